package handlers

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"ferrymq/catalog"
	"ferrymq/groupcommit"
	"ferrymq/segment"
)

// sink is a client that keeps of the last answer its status and its body.
type sink struct {
	header http.Header
	status int
	body   []byte
}

func (s *sink) Header() http.Header { return s.header }
func (s *sink) WriteHeader(n int)   { s.status = n }
func (s *sink) Write(b []byte) (int, error) {
	if s.status == 0 {
		s.status = http.StatusOK
	}
	s.body = append(s.body, b...)
	return len(b), nil
}

// call sends one request, past net/http's server.
func (s *sink) call(b *testing.B, h http.Handler, method, target string, body []byte, want int) {
	u, err := url.ParseRequestURI(target)
	if err != nil {
		b.Fatal(err)
	}
	s.header, s.status, s.body = make(http.Header), 0, s.body[:0]
	h.ServeHTTP(s, &http.Request{Method: method, URL: u, RequestURI: target, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Host: "x", Header: http.Header{},
		Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body))})
	if s.status != want {
		b.Fatalf("%s %s answered %d %s", method, target, s.status, clipped(string(s.body)))
	}
}

// benchItems is the body of a push of n messages of 256 bytes with ids of their own.
func benchItems(n, number int) []byte {
	random := make([]byte, 127)
	_, _ = rand.Read(random)
	b := []byte(`{"items":[`)
	for i := range n {
		if i > 0 {
			b = append(b, ',')
		}
		b = fmt.Appendf(b, `{"queue":"bench","partition":"p%d","transactionId":"t-%d-%d","payload":"%s"}`, number%16, number, i, hex.EncodeToString(random))
	}
	return append(b, "]}"...)
}

var benchSizes = []int{1, 10, 100}

// BenchmarkPush is a push of one request at a time, all the way to a database that does not wait for its disk.
func BenchmarkPush(b *testing.B) {
	s, c, number := serve(b), &sink{}, 0
	for _, n := range benchSizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.ReportAllocs(); b.Loop(); number++ {
				b.StopTimer()
				body := benchItems(n, number)
				b.StartTimer()
				c.call(b, s, "POST", "/api/v1/push", body, http.StatusCreated)
			}
		})
	}
}

// BenchmarkPopAck is a pop and the ack of what it brought.
func BenchmarkPopAck(b *testing.B) {
	s, c, number := serve(b), &sink{}, 0
	left := 0
	for _, n := range benchSizes {
		target := fmt.Sprintf("/api/v1/pop/queue/bench?batch=%d&wait=true", n)
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.ReportAllocs(); b.Loop(); {
				b.StopTimer()
				for ; left < 100*n; left += 100 {
					c.call(b, s, "POST", "/api/v1/push", benchItems(100, number), http.StatusCreated)
					number++
				}
				b.StartTimer()
				c.call(b, s, "GET", target, nil, http.StatusOK)
				b.StopTimer()
				body := ackOf(c.body)
				left -= bytes.Count(c.body, []byte(`"transactionId"`))
				b.StartTimer()
				c.call(b, s, "POST", "/api/v1/ack/batch", body, http.StatusOK)
			}
		})
	}
}

// ackOf is an ack of all that a pop answered.
func ackOf(popped []byte) []byte {
	after := func(s, name string) (value, rest string) {
		_, rest, _ = strings.Cut(s, `"`+name+`":"`)
		value, rest, _ = strings.Cut(rest, `"`)
		return value, rest
	}
	b := []byte(`{"acknowledgments":[`)
	for rest := string(popped); ; {
		var id, partition, lease string
		id, rest = after(rest, "transactionId")
		partition, rest = after(rest, "partitionId")
		lease, rest = after(rest, "leaseId")
		if id == "" {
			break
		}
		b = fmt.Appendf(b, `{"transactionId":"%s","partitionId":"%s","leaseId":"%s","status":"completed"},`, id, partition, lease)
	}
	return append(b[:len(b)-1], "]}"...)
}

// BenchmarkReadPush is the decoding of a push alone.
func BenchmarkReadPush(b *testing.B) {
	for _, n := range benchSizes {
		body := benchItems(n, 0)
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				if _, err := readPush(body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkAppendDelivery is the answer of a pop, from stored segments.
func BenchmarkAppendDelivery(b *testing.B) {
	s, c := serve(b), &sink{}
	for i, n := range benchSizes {
		c.call(b, s, "POST", "/api/v1/push", bytes.ReplaceAll(benchItems(n, 0), []byte(`"bench"`), fmt.Appendf(nil, `"bench%d"`, i)), http.StatusCreated)
		p := &groupcommit.Pop{Queue: fmt.Sprint("bench", i), Group: "g", Batch: int64(n), Partitions: 1, Named: true}
		p.Start = catalog.All()
		p.Wait = time.Second
		d, err := s.engine.Load().Pop(b.Context(), p)
		if err != nil || d == nil {
			b.Fatal(d, err)
		}
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				body, _, err := appendDelivery((*segment.Keys)(nil), p, d)
				if err != nil {
					b.Fatal(err)
				}
				b.SetBytes(int64(len(body)))
			}
		})
	}
}
