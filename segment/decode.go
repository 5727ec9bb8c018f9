package segment

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/google/uuid"
)

var (
	// ErrDamaged means that stored frames are not what Seal returned.
	ErrDamaged = errors.New("segment: damaged")
	// ErrNoKey means that frames are encrypted with a key not in the ring.
	ErrNoKey = errors.New("segment: encryption key missing")
)

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrDamaged, fmt.Sprintf(format, args...))
}

// Decoded is a segment opened for reading, safe for concurrent use. Its
// methods panic if i was not decoded.
type Decoded struct {
	first  uuid.UUID
	from   int
	buf    []byte
	starts []uint32
}

// Raw is one message without any copy: every field aliases the decoded buffer
// and must not be modified.
type Raw struct {
	TransactionUUID *uuid.UUID // transaction id that is a canonical UUID, else nil
	TransactionText []byte     // any other transaction id; both nil is minted
	TraceID         *uuid.UUID
	ProducerSub     []byte
	Headers         []byte // nil is none
	Payload         []byte
}

// Decode opens the frames of a stored segment. The result may alias frames,
// which must not be modified after. Errors are ErrDamaged or ErrNoKey with
// detail; any input is safe.
func Decode(keys *Keys, codec, keyNo int16, firstID uuid.UUID, count int, frames []byte) (*Decoded, error) {
	return DecodeRange(keys, codec, keyNo, firstID, count, frames, 0, count)
}

// DecodeRange is Decode for who only wants the messages [from, to): the others
// are skipped, and what follows them is not looked at.
func DecodeRange(keys *Keys, codec, keyNo int16, firstID uuid.UUID, count int, frames []byte, from, to int) (*Decoded, error) {
	if count < 1 || count > idBlock || from < 0 || to > count || from > to {
		return nil, damaged("messages %d to %d of %d", from, to, count)
	}
	frames, err := Open(keys, codec, keyNo, firstID, frames)
	if err != nil {
		return nil, err
	}
	if len(frames) < 5*count || len(frames) > math.MaxUint32 {
		return nil, damaged("%d bytes for %d messages", len(frames), count)
	}
	d := &Decoded{first: firstID, buf: frames, from: from, starts: make([]uint32, to-from)}
	rest := frames
	for i := range to {
		at := uint32(len(frames) - len(rest))
		if i >= from {
			d.starts[i-from] = at
		}
		var ok bool
		if _, rest, ok = parse(rest); !ok {
			return nil, damaged("message %d of %d, byte %d", i, count, at)
		}
	}
	if to == count && len(rest) > 0 {
		return nil, damaged("%d bytes after %d messages", len(rest), count)
	}
	return d, nil
}

// Open decrypts and decompresses stored frames: what it returns decodes as
// Plain without a key. It may alias frames.
func Open(keys *Keys, codec, keyNo int16, firstID uuid.UUID, frames []byte) (plain []byte, err error) {
	if keyNo != 0 {
		if frames, err = keys.open(keyNo, frames, firstID, codec); err != nil {
			return nil, err
		}
	}
	switch codec {
	case Plain:
		return frames, nil
	case Zstd:
		return decompress(frames)
	}
	return nil, damaged("unknown codec %d", codec)
}

// parse reads the message at the start of b and returns what follows it.
func parse(b []byte) (r Raw, rest []byte, ok bool) {
	if len(b) == 0 {
		return r, nil, false
	}
	flags, b := b[0], b[1:]
	if flags&^flagsKnown != 0 || flags&(flagUUID|flagText) == flagUUID|flagText {
		return r, nil, false
	}
	if flags&flagUUID != 0 {
		if len(b) < 16 {
			return r, nil, false
		}
		r.TransactionUUID, b = (*uuid.UUID)(b), b[16:]
	}
	if flags&flagText != 0 {
		// Empty would read as minted.
		if r.TransactionText, b, ok = field(b); !ok || len(r.TransactionText) == 0 {
			return r, nil, false
		}
	}
	if flags&flagTrace != 0 {
		if len(b) < 16 {
			return r, nil, false
		}
		r.TraceID, b = (*uuid.UUID)(b), b[16:]
	}
	if flags&flagSub != 0 {
		if r.ProducerSub, b, ok = field(b); !ok {
			return r, nil, false
		}
	}
	if flags&flagHeaders != 0 {
		if r.Headers, b, ok = field(b); !ok {
			return r, nil, false
		}
	}
	r.Payload, b, ok = field(b)
	return r, b, ok
}

func field(b []byte) (value, rest []byte, ok bool) {
	if len(b) < 4 {
		return nil, nil, false
	}
	n := uint64(binary.BigEndian.Uint32(b))
	if b = b[4:]; n > uint64(len(b)) {
		return nil, nil, false
	}
	return b[:n:n], b[n:], true
}

// Len is one past the last message decoded.
func (d *Decoded) Len() int { return d.from + len(d.starts) }

// ID is the id of message i.
func (d *Decoded) ID(i int) uuid.UUID { return ID(d.first, i) }

// Raw returns message i without allocating.
func (d *Decoded) Raw(i int) Raw {
	r, _, _ := parse(d.buf[d.starts[i-d.from]:])
	return r
}

// At returns message i as it was appended. It allocates the strings that are
// set; Raw and AppendTransactionID do not.
func (d *Decoded) At(i int) Message {
	r := d.Raw(i)
	m := Message{TraceID: r.TraceID, ProducerSub: string(r.ProducerSub), Headers: r.Headers, Payload: r.Payload}
	if r.TransactionUUID != nil {
		m.TransactionID = r.TransactionUUID.String()
	} else {
		m.TransactionID = string(r.TransactionText)
	}
	return m
}

// AppendTransactionID appends the transaction id of message i to dst: the
// client's own, or the message id if it was minted.
func (d *Decoded) AppendTransactionID(dst []byte, i int) []byte {
	switch r := d.Raw(i); {
	case r.TransactionUUID != nil:
		return appendUUID(dst, *r.TransactionUUID)
	case r.TransactionText != nil:
		return append(dst, r.TransactionText...)
	default:
		return appendUUID(dst, d.ID(i))
	}
}
