package handlers

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"strings"

	"github.com/google/uuid"

	"ferrymq/groupcommit"
)

// The ids of /v1 are a prefix and lower-case Crockford base32. They carry where things are, so nothing has to be looked up by them.
var crockford = base32.NewEncoding("0123456789abcdefghjkmnpqrstvwxyz").WithPadding(base32.NoPadding)

const (
	messagePrefix  = "msg_" // partition, offset
	deliveryPrefix = "dlv_" // partition, offset, lease, tag
	deadPrefix     = "dl_"  // the dead letter's UUID

	tagSize = 6
)

func appendID(dst []byte, prefix string, raw []byte) []byte {
	return crockford.AppendEncode(append(dst, prefix...), raw)
}

// decodeID is the inverse of appendID: only the one spelling that appendID makes is an id.
func decodeID(s, prefix string, size int) ([]byte, bool) {
	text, ok := strings.CutPrefix(s, prefix)
	if !ok || len(text) != crockford.EncodedLen(size) {
		return nil, false
	}
	raw, err := crockford.DecodeString(text)
	return raw, err == nil && crockford.EncodeToString(raw) == text
}

func placeOf(partition, offset int64) []byte {
	b := binary.BigEndian.AppendUint64(make([]byte, 0, 38), uint64(partition))
	return binary.BigEndian.AppendUint64(b, uint64(offset))
}

func appendMessageID(dst []byte, partition, offset int64) []byte {
	return appendID(dst, messagePrefix, placeOf(partition, offset))
}

func decodeMessageID(s string) (partition, offset int64, ok bool) {
	raw, ok := decodeID(s, messagePrefix, 16)
	if !ok {
		return 0, 0, false
	}
	partition, offset = int64(binary.BigEndian.Uint64(raw)), int64(binary.BigEndian.Uint64(raw[8:]))
	return partition, offset, partition > 0 && offset >= 0
}

// appendScheduledID is the id of a delayed message, which has no place yet: its number, in place of a partition and negative.
func appendScheduledID(dst []byte, number int64) []byte {
	return appendID(dst, messagePrefix, placeOf(-number, 0))
}

func decodeScheduledID(s string) (number int64, ok bool) {
	raw, ok := decodeID(s, messagePrefix, 16)
	if !ok {
		return 0, false
	}
	number = -int64(binary.BigEndian.Uint64(raw))
	return number, number > 0 && binary.BigEndian.Uint64(raw[8:]) == 0
}

// tag makes a delivery id something that only a broker of this installation can have issued.
func (a *API) tag(raw []byte) []byte {
	m := hmac.New(sha256.New, a.Secret[:])
	m.Write(raw)
	return m.Sum(nil)[:tagSize]
}

func (a *API) appendDeliveryID(dst []byte, partition, offset int64, lease uuid.UUID) []byte {
	raw := append(placeOf(partition, offset), lease[:]...)
	return appendID(dst, deliveryPrefix, append(raw, a.tag(raw)...))
}

// decodeDelivery reads an id that was issued for the subscription with that group id; nil when it was not.
func (a *API) decodeDelivery(s string, group int32) *groupcommit.Delivered {
	raw, ok := decodeID(s, deliveryPrefix, 32+tagSize)
	if !ok || !hmac.Equal(a.tag(raw[:32]), raw[32:]) {
		return nil
	}
	d := &groupcommit.Delivered{Partition: int64(binary.BigEndian.Uint64(raw)), Offset: int64(binary.BigEndian.Uint64(raw[8:])), Lease: uuid.UUID(raw[16:32])}
	if groupcommit.LeaseGroup(d.Lease) != group {
		return nil
	}
	return d
}
