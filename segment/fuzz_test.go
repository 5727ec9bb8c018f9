package segment

import (
	"errors"
	"testing"

	"github.com/google/uuid"
)

func FuzzRoundTrip(f *testing.F) {
	f.Add("", []byte(nil), "", []byte(nil), []byte(nil), uint16(1), false)
	f.Add("order-1", []byte("0123456789abcdef"), "alice", []byte("{}"), []byte("hello"), uint16(40), true)
	f.Add("0195f7a8-1234-7abc-8def-0123456789ab", []byte("x"), "", []byte(nil), []byte(`{"a":1}`), uint16(999), false)
	keys := ring(f, keyA)
	f.Fuzz(func(t *testing.T, id string, trace []byte, sub string, headers, payload []byte, copies uint16, encrypt bool) {
		m := Message{TransactionID: id, ProducerSub: sub, Headers: headers, Payload: payload}
		if len(trace) > 0 {
			m.TraceID = new(uuid.UUID)
			copy(m.TraceID[:], trace)
		}
		ring := keys
		if !encrypt {
			ring = nil
		}
		messages := []Message{{}, m}
		for b := build(messages...); b.Len() <= int(copies) && b.Fits(&m); b.Append(&m) {
			messages = append(messages, m)
		}
		checkRoundTrip(t, ring, messages)
	})
}

// FuzzDecode gives Decode any frames: as they are, and as if the attacker had
// the encryption key.
func FuzzDecode(f *testing.F) {
	first := uuid.MustParse("0195f7a8-1234-7000-8000-000000000400")
	keys := ring(f, keyA)
	no := keys.ring[0].no
	_, _, frames := build(goldenMessages()...).Seal(nil, nil, first)
	f.Add(int16(0), int16(0), 6, frames)
	f.Add(int16(1), int16(0), 6, encoder.EncodeAll(frames, nil))
	f.Add(int16(0), no, 6, keys.ring[0].seal(nil, frames, first, Plain))
	f.Fuzz(func(t *testing.T, codec, keyNo int16, count int, frames []byte) {
		check(t, nil, codec, keyNo, first, count, frames)
		check(t, keys, codec, keyNo, first, count, frames)
		check(t, keys, codec, no, first, count, keys.ring[0].seal(nil, frames, first, codec))
	})
}

func check(t *testing.T, keys *Keys, codec, keyNo int16, first uuid.UUID, count int, frames []byte) {
	d, err := Decode(keys, codec, keyNo, first, count, frames)
	if err != nil {
		if !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrNoKey) {
			t.Fatalf("neither ErrDamaged nor ErrNoKey: %v", err)
		}
		return
	}
	if d.Len() != count || len(d.buf) > max(len(frames), maxDecoded) {
		t.Fatalf("%d messages of %d, %d bytes", d.Len(), count, len(d.buf))
	}
	messages := make([]Message, min(count, MaxMessages))
	for i := range messages {
		messages[i] = d.At(i)
	}
	checkRoundTrip(t, keys, messages)
}
