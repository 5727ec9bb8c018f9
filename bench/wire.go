package main

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"math/rand/v2"
)

// A payload is JSON text of exactly the wanted size: a header of 40 hex digits (run, stream,
// sequence, send time) and filler cut from a fixed pool at a place that stream and sequence
// decide, so that a receiver can rebuild and compare every byte without any memory of it.
const (
	headerLen   = 40
	stringFrame = len(`""`)
	objectFrame = len(`{"h":"","x":""}`)
	alphabet    = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
)

// pool is the filler. Neighbours in a stream take neighbouring cuts, so nothing repeats
// within 4 MiB of one partition and a compressing broker gains only the alphabet's 2 bits.
var pool = func() []byte {
	b := make([]byte, 4<<20)
	src := rand.NewChaCha8([32]byte{'f', 'e', 'r', 'r', 'y'})
	_, _ = src.Read(b)
	for i := range b {
		b[i] = alphabet[b[i]&63]
	}
	return b
}()

// id names one message: who sent it, in which stream, the how-maniest, when (nanoseconds of
// the sender's clock).
type id struct {
	run, stream, seq uint32
	ts               int64
}

func (p id) appendPayload(dst []byte, size int, object bool) []byte {
	if size < headerLen+objectFrame {
		at := int(p.seq) % (len(pool) - size)
		return append(append(append(dst, '"'), pool[at:at+size-stringFrame]...), '"')
	}
	var raw [headerLen / 2]byte
	binary.BigEndian.PutUint32(raw[0:], p.run)
	binary.BigEndian.PutUint32(raw[4:], p.stream)
	binary.BigEndian.PutUint32(raw[8:], p.seq)
	binary.BigEndian.PutUint64(raw[12:], uint64(p.ts))
	frame := stringFrame
	if object {
		frame = objectFrame
		dst = append(dst, `{"h":`...)
	}
	dst = append(dst, '"')
	dst = hex.AppendEncode(dst, raw[:])
	if object {
		dst = append(dst, `","x":"`...)
	}
	fill := size - frame - headerLen
	at := (uint64(p.stream)*2654435761 + uint64(p.seq)*uint64(fill)) % uint64(len(pool)-fill)
	dst = append(dst, pool[at:at+uint64(fill)]...)
	dst = append(dst, '"')
	if object {
		dst = append(dst, '}')
	}
	return dst
}

// parsePayload reads the header of a payload made by appendPayload.
func parsePayload(data []byte) (p id, ok bool) {
	data = bytes.TrimPrefix(data, []byte(`{"h":`))
	if len(data) < headerLen+1 || data[0] != '"' {
		return p, false
	}
	var raw [headerLen / 2]byte
	if _, err := hex.Decode(raw[:], data[1:headerLen+1]); err != nil {
		return p, false
	}
	p.run = binary.BigEndian.Uint32(raw[0:])
	p.stream = binary.BigEndian.Uint32(raw[4:])
	p.seq = binary.BigEndian.Uint32(raw[8:])
	p.ts = int64(binary.BigEndian.Uint64(raw[12:]))
	return p, true
}

// appendTxid appends the UUIDv7 that belongs to this message, as JSON text. Time comes from
// ts, the other bits from a hash of the rest, so the receiver can check it too.
func (p id) appendTxid(dst []byte) []byte {
	ms := uint64(base.UnixMilli() + p.ts/1e6)
	a := mix(uint64(p.run)<<32 | uint64(p.stream))
	a = mix(a ^ uint64(p.seq))
	var u [16]byte
	binary.BigEndian.PutUint64(u[:], ms<<16|0x7000|a&0xfff)
	binary.BigEndian.PutUint64(u[8:], mix(a)&^(3<<62)|2<<62)
	dst = append(dst, '"')
	from := 0
	for _, to := range [...]int{4, 6, 8, 10, 16} {
		dst = hex.AppendEncode(dst, u[from:to])
		dst = append(dst, '-')
		from = to
	}
	dst[len(dst)-1] = '"'
	return dst
}

// mix is splitmix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// message is one message of a pop answer; the byte slices are raw JSON values inside the answer.
type message struct {
	id
	ours                               bool
	txid, partitionID, partition, data []byte
	lease                              []byte
}

var errAnswer = errors.New("unreadable answer")

// parsePop scans a pop answer by its known keys, in any order.
func parsePop(b []byte, dst []message) ([]message, error) {
	s := scanner{b: b}
	s.open('{')
	for k := s.key(); k != nil; k = s.key() {
		if string(k) != "messages" {
			s.value()
			continue
		}
		s.open('[')
		for s.elem() {
			var m message
			s.open('{')
			for k := s.key(); k != nil; k = s.key() {
				v := s.value()
				switch string(k) {
				case "transactionId":
					m.txid = v
				case "partitionId":
					m.partitionID = v
				case "partition":
					m.partition = v
				case "leaseId":
					m.lease = v
				case "data":
					m.data = v
				}
			}
			m.id, m.ours = parsePayload(m.data)
			if m.txid == nil || m.partitionID == nil || m.lease == nil || m.data == nil {
				return dst, errAnswer
			}
			dst = append(dst, m)
		}
	}
	if s.bad || s.i != len(bytes.TrimRight(b, "\r\n\t ")) {
		return dst, errAnswer
	}
	return dst, nil
}

// appendAck appends the body that completes all messages.
func appendAck(dst []byte, group string, ms []message) []byte {
	dst = append(dst, `{"consumerGroup":`...)
	if group == "" {
		dst = append(dst, "null"...)
	} else {
		dst = append(dst, jsonText(group)...)
	}
	dst = append(dst, `,"acknowledgments":[`...)
	for i, m := range ms {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"transactionId":`...)
		dst = append(dst, m.txid...)
		dst = append(dst, `,"partitionId":`...)
		dst = append(dst, m.partitionID...)
		dst = append(dst, `,"status":"completed","leaseId":`...)
		dst = append(dst, m.lease...)
		dst = append(dst, '}')
	}
	return append(dst, "]}"...)
}

// jsonText is s as a JSON string.
func jsonText(s string) []byte {
	b, _ := json.Marshal(s) // a string cannot fail
	return b
}

// result is one element of a push or ack answer.
type result struct {
	status, err             string // push; err also ack
	success, noop, released bool   // ack
}

// parseResults scans a push or ack answer.
func parseResults(b []byte, dst []result) ([]result, error) {
	s := scanner{b: b}
	s.open('[')
	for s.elem() {
		var r result
		s.open('{')
		for k := s.key(); k != nil; k = s.key() {
			v := s.value()
			switch string(k) {
			case "status":
				switch string(v) {
				case `"queued"`:
					r.status = "queued" // no allocation in the usual case
				default:
					r.status = string(bytes.Trim(v, `"`))
				}
			case "error":
				if string(v) != "null" {
					r.err = string(bytes.Trim(v, `"`))
				}
			case "success":
				r.success = string(v) == "true"
			case "noop":
				r.noop = string(v) == "true"
			case "leaseReleased":
				r.released = string(v) == "true"
			}
		}
		dst = append(dst, r)
	}
	if s.bad || s.i != len(bytes.TrimRight(b, "\r\n\t ")) {
		return dst, errAnswer
	}
	return dst, nil
}

// scanner walks JSON without building anything. It trusts the text to be JSON (the sampled
// shape check does not); bad is set when it cannot go on.
type scanner struct {
	b   []byte
	i   int
	bad bool
}

// peek answers the next byte that is no white space, 0 at the end or after trouble.
func (s *scanner) peek() byte {
	for ; !s.bad && s.i < len(s.b); s.i++ {
		if c := s.b[s.i]; c != ' ' && c != '\n' && c != '\t' && c != '\r' {
			return c
		}
	}
	return 0
}

// open steps into an object or array.
func (s *scanner) open(c byte) {
	if s.peek() != c {
		s.bad = true
	}
	s.i++
}

// elem says whether the array has one more element, and steps to it.
func (s *scanner) elem() bool {
	switch s.peek() {
	case 0:
		s.bad = true
		return false
	case ']':
		s.i++
		return false
	case ',':
		s.i++
	}
	return !s.bad
}

// key answers the next key of the object and steps to its value; nil at the end.
func (s *scanner) key() []byte {
	if s.peek() == ',' {
		s.i++
	}
	switch s.peek() {
	case '}':
		s.i++
		return nil
	case '"':
		k := s.value()
		if s.peek() == ':' {
			s.i++
			return k[1 : len(k)-1]
		}
	}
	s.bad = true
	return nil
}

// value steps over one value and answers its text. The answer is never shorter than 2 bytes for a string.
func (s *scanner) value() []byte {
	c := s.peek()
	start := s.i
	switch c {
	case '"':
		s.str()
	case '{', '[':
		for depth := 0; s.i < len(s.b); {
			switch s.b[s.i] {
			case '"':
				s.str()
				continue
			case '{', '[':
				depth++
			case '}', ']':
				depth--
			}
			s.i++
			if depth == 0 {
				return s.b[start:s.i]
			}
		}
		s.bad = true
	default:
		for s.i < len(s.b) && bytes.IndexByte([]byte(",]} \n\t\r"), s.b[s.i]) < 0 {
			s.i++
		}
	}
	if s.bad || s.i == start {
		s.bad = true
		return []byte(`""`)
	}
	return s.b[start:s.i]
}

// str steps over a string that starts here.
func (s *scanner) str() {
	for i := s.i + 1; i < len(s.b); i++ {
		j := bytes.IndexByte(s.b[i:], '"')
		if j < 0 {
			break
		}
		i += j
		back := i
		for s.b[back-1] == '\\' {
			back--
		}
		if (i-back)%2 == 0 {
			s.i = i + 1
			return
		}
	}
	s.bad, s.i = true, len(s.b)
}
