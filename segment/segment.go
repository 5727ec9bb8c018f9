// Package segment is the codec of a segment: many messages of one partition
// stored in one database row.
//
// The frames of a segment are its messages, one after the other:
//
//	flags           1 byte, see the flag constants
//	transaction id  16 bytes if flagUUID; length + text if flagText
//	trace id        16 bytes if flagTrace
//	producer        length + text if flagSub
//	headers         length + bytes if flagHeaders
//	payload         length + bytes, always
//
// Every length is 4 bytes, big-endian. All frames together are compressed
// (codec [Zstd]) when that pays, and then encrypted when a key is given.
// The format is stored for as long as the message is: TestGolden pins it.
package segment

import (
	"encoding/binary"

	"github.com/google/uuid"
)

// Caps of a segment. A message bigger than MaxBytes makes its own segment.
const (
	MaxMessages = 1000      // messages in a segment; at most idBlock
	MaxBytes    = 256 << 10 // frames before compression
)

const (
	flagUUID    = 1 << iota // transaction id is a canonical UUID, 16 bytes
	flagText                // transaction id is any other text
	flagTrace               // has a trace id
	flagSub                 // has a producer subject
	flagHeaders             // has headers
	flagsKnown  = 1<<iota - 1
)

// Buffers above this are not kept by [Builder.Reset]: one message may be as
// large as 64 MiB.
const maxKeptBuffer = 4 * MaxBytes

// Message is one message as stored. Append copies its byte slices; those
// returned by [Decoded] alias the decoded buffer and must not be modified.
type Message struct {
	TransactionID string     // "" is minted: equals the message id
	TraceID       *uuid.UUID // optional
	ProducerSub   string     // "" is none
	Headers       []byte     // raw JSON, nil is none
	Payload       []byte     // exactly as received
}

// maxSize is the most bytes m takes in frames. A UUID transaction id takes
// 24 fewer.
func (m *Message) maxSize() int {
	return 1 + 16 + 4*4 + len(m.TransactionID) + len(m.ProducerSub) + len(m.Headers) + len(m.Payload)
}

// Builder collects the messages of one segment and is reused after Reset. It
// is not safe for concurrent use.
type Builder struct {
	hasher Hasher
	count  int
	frames []byte
	keys   []byte
	packed []byte // scratch of Seal
}

// NewBuilder returns an empty builder whose keys are made by h.
func NewBuilder(h Hasher) *Builder { return &Builder{hasher: h} }

// Len is the number of messages appended.
func (b *Builder) Len() int { return b.count }

// Size is the number of bytes of frames before compression.
func (b *Builder) Size() int { return len(b.frames) }

// Fits reports whether m may be appended without exceeding the caps. An empty
// builder takes any message.
func (b *Builder) Fits(m *Message) bool {
	return b.count == 0 || b.count < MaxMessages && len(b.frames)+m.maxSize() <= MaxBytes
}

// Reset empties the builder and keeps its buffers, unless they are very large.
func (b *Builder) Reset() {
	b.count = 0
	b.frames, b.keys, b.packed = kept(b.frames), b.keys[:0], kept(b.packed)
}

func kept(buf []byte) []byte {
	if cap(buf) > maxKeptBuffer {
		return nil
	}
	return buf[:0]
}

// Append adds m, copying all of it. No field may reach 4 GiB; PostgreSQL
// stores less than 1 GiB anyway. It panics if the builder already has
// MaxMessages, since ids would overlap.
func (b *Builder) Append(m *Message) {
	if b.count >= MaxMessages {
		panic("segment: Append to a full builder")
	}
	at := len(b.frames)
	f := append(b.frames, 0)
	if m.TransactionID != "" {
		if id, ok := canonicalUUID(m.TransactionID); ok {
			f[at] |= flagUUID
			f = append(f, id[:]...)
		} else {
			f[at] |= flagText
			f = appendField(f, m.TransactionID)
		}
		b.appendKey(b.hasher.Key(m.TransactionID))
	} else if len(b.keys) > 0 {
		b.appendKey(Key{})
	}
	if m.TraceID != nil {
		f[at] |= flagTrace
		f = append(f, m.TraceID[:]...)
	}
	if m.ProducerSub != "" {
		f[at] |= flagSub
		f = appendField(f, m.ProducerSub)
	}
	if m.Headers != nil {
		f[at] |= flagHeaders
		f = appendField(f, m.Headers)
	}
	b.frames = appendField(f, m.Payload)
	b.count++
}

// appendKey adds the key of the message being appended, preceded by a zero
// key for every message before it that has none.
func (b *Builder) appendKey(k Key) {
	for len(b.keys) < b.count*len(k) {
		b.keys = append(b.keys, make([]byte, len(k))...)
	}
	b.keys = append(b.keys, k[:]...)
}

// Keys is the segment's keys column: empty if no message has a transaction id
// of its own, else one key per message, the zero key for minted ones. It is
// valid until the next Append or Reset.
func (b *Builder) Keys() []byte { return b.keys }

// Seal appends the segment's stored frames to dst and says how they are
// stored. Nothing it returns aliases the builder. If keys is not nil the
// frames are encrypted, bound to firstID and the codec.
func (b *Builder) Seal(dst []byte, keys *Keys, firstID uuid.UUID) (codec, keyNo int16, frames []byte) {
	codec, body := Plain, b.frames
	if b.packed = compress(b.packed[:0], b.frames); len(b.packed) > 0 {
		codec, body = Zstd, b.packed
	}
	if keys == nil {
		return codec, 0, append(dst, body...)
	}
	key := keys.ring[0]
	return codec, key.no, key.seal(dst, body, firstID, codec)
}

func appendField[T string | []byte](dst []byte, field T) []byte {
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(field)))
	return append(dst, field...)
}

// uuidAt is where each byte's two digits are in the text of a UUID.
var uuidAt = [16]int{0, 2, 4, 6, 9, 11, 14, 16, 19, 21, 24, 26, 28, 30, 32, 34}

const hexDigits = "0123456789abcdef"

var hexValue = func() (v [256]byte) {
	for i := range v {
		v[i] = 0xff
	}
	for i := range len(hexDigits) {
		v[hexDigits[i]] = byte(i)
	}
	return v
}()

// canonicalUUID parses s if formatting the UUID gives exactly s again.
func canonicalUUID(s string) (id uuid.UUID, ok bool) {
	if len(s) != 36 || s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' {
		return id, false
	}
	var all byte
	for i, at := range uuidAt {
		hi, lo := hexValue[s[at]], hexValue[s[at+1]]
		all |= hi | lo
		id[i] = hi<<4 | lo
	}
	return id, all < 16
}

func appendUUID(dst []byte, id uuid.UUID) []byte {
	text := [36]byte{8: '-', 13: '-', 18: '-', 23: '-'}
	for i, at := range uuidAt {
		text[at], text[at+1] = hexDigits[id[i]>>4], hexDigits[id[i]&15]
	}
	return append(dst, text[:]...)
}
