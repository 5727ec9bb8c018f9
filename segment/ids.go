package segment

import (
	"crypto/rand"
	"encoding/binary"
	"time"

	"github.com/google/uuid"
	"github.com/zeebo/xxh3"
)

// idBlock is how many ids a segment owns: the low 10 bits of its first id.
const idBlock = 1 << 10

// NewFirstID returns the id of a segment's first message: a UUIDv7 of time t,
// ordered within a millisecond by its fraction (RFC 9562, 6.2, method 3), whose
// low 10 bits are zero. The other 52 bits are random, of crypto/rand: it costs
// little once per segment and, unlike a generator in memory, does not repeat in
// a cloned virtual machine.
func NewFirstID(t time.Time) uuid.UUID {
	var id uuid.UUID
	rand.Read(id[8:]) // never fails
	ms, ns := t.UnixMilli(), t.Nanosecond()%1e6
	binary.BigEndian.PutUint64(id[:], uint64(ms)<<16|7<<12|uint64(ns)<<12/1e6)
	id[8] = id[8]&0x3f | 0x80
	id[14] &= 0xfc
	id[15] = 0
	return id
}

// ID is the id of message i of the segment that begins with first.
func ID(first uuid.UUID, i int) uuid.UUID {
	low := binary.BigEndian.Uint16(first[14:])
	binary.BigEndian.PutUint16(first[14:], low+uint16(i))
	return first
}

// FirstID is the first id of the segment that minted id. NewFirstID leaves the bits zero that count on from it.
func FirstID(id uuid.UUID) uuid.UUID {
	id[14] &= 0xfc
	id[15] = 0
	return id
}

// IndexOf is the inverse of ID, for a segment of count messages.
func IndexOf(first uuid.UUID, count int, id uuid.UUID) (int, bool) {
	if [14]byte(first[:]) != [14]byte(id[:]) {
		return 0, false
	}
	i := int(binary.BigEndian.Uint16(id[14:]) - binary.BigEndian.Uint16(first[14:]))
	return i, i < count
}

// Key stands for a transaction id in deduplication and acks. The zero Key is
// that of a minted id.
type Key [16]byte

// Hasher makes keys. Its seed is the installation's. xxh3 is not a cryptographic
// hash: a client that seeks collisions may find some, among its own ids.
type Hasher struct{ seed uint64 }

// NewHasher returns a hasher with that seed.
func NewHasher(seed uint64) Hasher { return Hasher{seed} }

// Key is the key of a transaction id, never zero.
func (h Hasher) Key(transactionID string) Key {
	return nonZero(xxh3.HashString128Seed(transactionID, h.seed))
}

// KeyBytes is Key of a byte slice.
func (h Hasher) KeyBytes(transactionID []byte) Key {
	return nonZero(xxh3.Hash128Seed(transactionID, h.seed))
}

func nonZero(sum xxh3.Uint128) Key {
	if sum.Hi|sum.Lo == 0 {
		sum.Lo = 1
	}
	return sum.Bytes()
}

// KeyAt is the key of message i in a keys column: zero if it was minted.
func KeyAt(keys []byte, i int) Key {
	if i < 0 || i >= len(keys)/16 {
		return Key{}
	}
	return Key(keys[i*16:])
}

// FindKey is the index of the first message not before from whose key is k,
// or -1. The zero key is never found.
func FindKey(keys []byte, from int, k Key) int {
	hi, lo := binary.LittleEndian.Uint64(k[:]), binary.LittleEndian.Uint64(k[8:])
	if hi|lo == 0 {
		return -1
	}
	for i := max(from, 0); i < len(keys)/16; i++ {
		at := keys[i*16:][:16]
		if binary.LittleEndian.Uint64(at) == hi && binary.LittleEndian.Uint64(at[8:]) == lo {
			return i
		}
	}
	return -1
}
