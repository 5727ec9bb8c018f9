package segment

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/google/uuid"
)

const nonceSize = 24

var errBadKey = errors.New("an encryption key must be 64 hexadecimal characters (32 bytes)")

// Keys is a ring of encryption keys: one to write with, any number to read.
// A nil *Keys does not encrypt and reads only what is not encrypted. It is
// safe for concurrent use.
type Keys struct{ ring []*key }

// NewKeys makes a ring of hexadecimal 256-bit keys: new segments are written
// with current, and those of old keys can still be read. Its error never
// shows a key.
func NewKeys(current string, old ...string) (*Keys, error) {
	k := &Keys{}
	for i, text := range append([]string{current}, old...) {
		key, err := newKey(text)
		if err != nil && i > 0 {
			return nil, fmt.Errorf("segment: old key %d: %w", i, err)
		} else if err != nil {
			return nil, fmt.Errorf("segment: current key: %w", err)
		}
		k.ring = append(k.ring, key)
	}
	return k, nil
}

// Numbers lists the key numbers that Decode can open, 0 (not encrypted) among
// them.
func (k *Keys) Numbers() []int16 {
	numbers := []int16{0}
	if k != nil {
		for _, key := range k.ring {
			numbers = append(numbers, key.no)
		}
	}
	return numbers
}

// open decrypts frames with the key of that number. Two keys may share one.
func (k *Keys) open(no int16, frames []byte, firstID uuid.UUID, codec int16) ([]byte, error) {
	found := false
	if k != nil {
		for _, key := range k.ring {
			if key.no != no {
				continue
			}
			if plain, err := key.open(frames, firstID, codec); err == nil {
				return plain, nil
			}
			found = true
		}
	}
	if !found {
		return nil, fmt.Errorf("%w: number %d", ErrNoKey, no)
	}
	return nil, damaged("authentication failed with key number %d", no)
}

// key encrypts with XAES-256-GCM (c2sp.org/XAES-256-GCM): AES-256-GCM under a
// key derived for each nonce. Random nonces of plain GCM are safe for 2^32
// segments, which a busy broker writes in days; these are for 2^80.
type key struct {
	no    int16
	block cipher.Block
	k1    [aes.BlockSize]byte // CMAC subkey
}

func newKey(text string) (*key, error) {
	secret, err := hex.DecodeString(text)
	if err != nil || len(secret) != 32 {
		return nil, errBadKey
	}
	block, err := aes.NewCipher(secret)
	if err != nil {
		return nil, err
	}
	k := &key{block: block}
	// 15 bits of a hash: every broker with the key knows its number.
	sum := sha256.Sum256(secret)
	k.no = max(1, int16(binary.BigEndian.Uint16(sum[:])&0x7fff))
	block.Encrypt(k.k1[:], k.k1[:])
	var carry byte
	for i := len(k.k1) - 1; i >= 0; i-- {
		k.k1[i], carry = k.k1[i]<<1|carry, k.k1[i]>>7
	}
	k.k1[15] ^= carry * 0x87
	return k, nil
}

func (k *key) derive(nonce []byte) cipher.AEAD {
	var secret [32]byte
	for i := range 2 {
		half := secret[i*16:][:16]
		copy(half, []byte{0, byte(i + 1), 'X', 0})
		copy(half[4:], nonce[:12])
		for j := range half {
			half[j] ^= k.k1[j]
		}
		k.block.Encrypt(half, half)
	}
	return must(cipher.NewGCM(must(aes.NewCipher(secret[:])))) // fails only on a wrong size
}

func (k *key) seal(dst, plain []byte, firstID uuid.UUID, codec int16) []byte {
	var nonce [nonceSize]byte
	rand.Read(nonce[:]) // never fails
	dst = append(dst, nonce[:]...)
	return k.derive(nonce[:]).Seal(dst, nonce[12:], plain, bound(firstID, codec))
}

func (k *key) open(frames []byte, firstID uuid.UUID, codec int16) ([]byte, error) {
	if len(frames) < nonceSize {
		return nil, ErrDamaged
	}
	return k.derive(frames).Open(nil, frames[12:nonceSize], frames[nonceSize:], bound(firstID, codec))
}

// bound is what the ciphertext is bound to, so that frames can't be moved to
// another segment.
func bound(firstID uuid.UUID, codec int16) []byte {
	return binary.BigEndian.AppendUint16(firstID[:], uint16(codec))
}
