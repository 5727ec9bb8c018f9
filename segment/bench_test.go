package segment

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/uuid"
)

var kinds = []string{"random", "json"}

// benchMessages returns n messages of 256 bytes: random, or JSON that differs
// in its values.
func benchMessages(kind string, n int) []Message {
	rng := rand.New(rand.NewPCG(1, 2))
	messages := make([]Message, n)
	for i := range messages {
		p := make([]byte, 0, 320)
		if kind == "random" {
			for len(p) < 256 {
				p = append(p, byte(rng.Uint32()))
			}
		} else {
			p = fmt.Appendf(p, `{"orderId":"%016x","customerId":%d,"status":%q,"currency":"EUR","amount":%d.%02d,`+
				`"createdAt":"2026-03-%02dT%02d:%02d:%02d.%03dZ","items":[{"sku":"SKU-%06d","quantity":%d}],"note":"`,
				rng.Uint64(), rng.IntN(1e6), []string{"created", "paid", "shipped"}[rng.IntN(3)], rng.IntN(1000), rng.IntN(100),
				rng.IntN(28)+1, rng.IntN(24), rng.IntN(60), rng.IntN(60), rng.IntN(1000), rng.IntN(1e6), rng.IntN(9)+1)
			for words := []string{"deliver ", "fragile ", "gift ", "leave at the door ", "call first "}; len(p) < 254; {
				p = append(p, words[rng.IntN(len(words))]...)
			}
			p = append(p[:254], `"}`...)
		}
		messages[i].Payload = p
	}
	return messages
}

func benchKeys(b testing.TB) *Keys {
	keys, err := NewKeys("00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff")
	if err != nil {
		b.Fatal(err)
	}
	return keys
}

func forShapes(b *testing.B, run func(b *testing.B, messages []Message, keys *Keys)) {
	for _, kind := range kinds {
		for _, n := range []int{1, 10, 100, 1000} {
			messages := benchMessages(kind, n)
			b.Run(fmt.Sprintf("%s/%d", kind, n), func(b *testing.B) { run(b, messages, nil) })
		}
	}
	ids := benchMessages("random", 100)
	for i := range ids {
		ids[i].TransactionID = uuid.NewString()
	}
	b.Run("ids/100", func(b *testing.B) { run(b, ids, nil) })
	b.Run("encrypted/1", func(b *testing.B) { run(b, ids[:1], benchKeys(b)) })
	b.Run("encrypted/100", func(b *testing.B) { run(b, ids, benchKeys(b)) })
}

func BenchmarkAppendSeal(b *testing.B) {
	forShapes(b, func(b *testing.B, messages []Message, keys *Keys) {
		builder, first := NewBuilder(Hasher{}), NewFirstID(time.Now())
		var frames []byte
		b.ReportAllocs()
		for b.Loop() {
			builder.Reset()
			for i := range messages {
				builder.Append(&messages[i])
			}
			_, _, frames = builder.Seal(frames[:0], keys, first)
		}
		report(b, len(messages))
		b.ReportMetric(float64(len(frames))/float64(builder.Size()), "stored/size")
	})
}

func BenchmarkDecode(b *testing.B) {
	forShapes(b, func(b *testing.B, messages []Message, keys *Keys) {
		builder, first := NewBuilder(Hasher{}), NewFirstID(time.Now())
		for i := range messages {
			builder.Append(&messages[i])
		}
		codec, keyNo, frames := builder.Seal(nil, keys, first)
		var id []byte
		bytes := 0
		b.ReportAllocs()
		for b.Loop() {
			d, err := Decode(keys, codec, keyNo, first, len(messages), frames)
			if err != nil {
				b.Fatal(err)
			}
			for i := range d.Len() {
				id = d.AppendTransactionID(id[:0], i)
				bytes += len(d.Raw(i).Payload)
			}
		}
		report(b, len(messages))
	})
}

func report(b *testing.B, messages int) {
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*messages), "ns/msg")
}

func BenchmarkNewFirstID(b *testing.B) {
	for now := time.Now(); b.Loop(); {
		NewFirstID(now)
	}
}

func BenchmarkFindKey(b *testing.B) {
	builder := NewBuilder(Hasher{})
	for i := range MaxMessages {
		builder.Append(&Message{TransactionID: fmt.Sprint(i)})
	}
	last := KeyAt(builder.Keys(), MaxMessages-1)
	for b.Loop() {
		FindKey(builder.Keys(), 0, last)
	}
}
