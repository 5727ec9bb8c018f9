package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// streams is how many sequences of messages there are. Each has one writer; FerryMQ gives each a partition of its own.
const streams = 256

// message is one payload and what it says: JSON text of a fixed size, a header of 32 hex digits and random filler.
type message struct {
	stream, seq uint32
	due         int64 // when it was to be sent, nanoseconds since base
}

var base = time.Now()

func now() int64 { return int64(time.Since(base)) }

var filler = func() []byte {
	const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	b := make([]byte, 4<<20)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(b)
	for i := range b {
		b[i] = letters[b[i]&63]
	}
	return b
}()

// appendTo appends the payload, a JSON string of size bytes.
func (m message) appendTo(b []byte, size int) []byte {
	b = fmt.Appendf(append(b, '"'), "%08x%08x%016x", m.stream, m.seq, m.due)
	fill := size - 34
	at := (int(m.stream)*2654435761 + int(m.seq)*fill) % (len(filler) - fill)
	return append(append(b, filler[at:at+fill]...), '"')
}

// read is the message of a payload, if every byte of it is as it was sent.
func read(payload []byte, size int, scratch []byte) (m message, _ []byte, ok bool) {
	var raw [16]byte
	if len(payload) != size || size < 34 {
		return m, scratch, false
	}
	if _, err := hex.Decode(raw[:], payload[1:33]); err != nil {
		return m, scratch, false
	}
	for i, p := range []*uint32{&m.stream, &m.seq} {
		*p = uint32(raw[i*4])<<24 | uint32(raw[i*4+1])<<16 | uint32(raw[i*4+2])<<8 | uint32(raw[i*4+3])
	}
	for _, b := range raw[8:] {
		m.due = m.due<<8 | int64(b)
	}
	scratch = m.appendTo(scratch[:0], size)
	return m, scratch, m.stream < streams && string(scratch) == string(payload)
}

// What is known of a message.
const (
	stored uint8 = 1 << iota
	seen
	acked
)

type order int

const (
	none        order = iota
	perConsumer       // what one consumer gets of a stream ascends
	perStream         // what all consumers together get of a stream ascends
)

type stream struct {
	mu    sync.Mutex
	state []uint8
	last  map[int]int64 // per consumer, or one for all: the highest that came so far
}

// checker holds every product to the same: what was answered as stored comes and is acked, never again after its ack, unchanged, and in
// the order that the product promises.
type checker struct {
	size    int
	order   order
	streams [streams]stream
	left    atomic.Int64 // stored and not acked
	acks    atomic.Int64
	lastAck atomic.Int64
	warm    int64 // messages due before do not count in e2e

	e2e, push samples

	mu     sync.Mutex
	broken map[string]int
}

func newChecker(size int, o order) *checker {
	c := &checker{size: size, order: o, broken: map[string]int{}}
	for i := range c.streams {
		c.streams[i].last = map[int]int64{}
	}
	return c
}

func (c *checker) violate(what string) {
	c.mu.Lock()
	c.broken[what]++
	c.mu.Unlock()
}

// mark sets bits of a message and answers those it had.
func (c *checker) mark(m message, bits uint8) (had uint8) {
	s := &c.streams[m.stream]
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.state) <= int(m.seq) {
		s.state = append(s.state, 0)
	}
	had = s.state[m.seq]
	s.state[m.seq] = had | bits
	return had
}

func (c *checker) stored(ms []message) {
	for _, m := range ms {
		if c.mark(m, stored)&acked == 0 {
			c.left.Add(1)
		}
	}
}

// delivered judges what came to a consumer and answers which messages it was.
func (c *checker) delivered(consumer int, payloads ...[]byte) []message {
	at := now()
	ms := make([]message, 0, len(payloads))
	var scratch []byte
	for _, p := range payloads {
		var m message
		var ok bool
		if m, scratch, ok = read(p, c.size, scratch); !ok {
			c.violate("payload")
			continue
		}
		ms = append(ms, m)
		if m.due >= c.warm {
			c.e2e.add(at - m.due)
		}
		had := c.mark(m, seen)
		switch {
		case had&acked != 0:
			c.violate("duplicate after ack")
		case had&seen == 0 && c.order != none:
			who := consumer
			if c.order == perStream {
				who = 0
			}
			s := &c.streams[m.stream]
			s.mu.Lock()
			if last, any := s.last[who]; any && int64(m.seq) < last {
				c.violate("order")
			}
			s.last[who] = int64(m.seq)
			s.mu.Unlock()
		}
	}
	return ms
}

func (c *checker) acked(ms []message) {
	for _, m := range ms {
		switch had := c.mark(m, acked); {
		case had&acked != 0:
			c.violate("acked twice")
		case had&stored != 0:
			c.left.Add(-1)
		}
	}
	c.acks.Add(int64(len(ms)))
	c.lastAck.Store(now())
}

// verdict is "ok" or what was broken. Messages that are left count as lost.
func (c *checker) verdict() string {
	if n := c.left.Load(); n != 0 {
		c.broken["lost"] = int(n)
	}
	var all []string
	for _, k := range slices.Sorted(maps.Keys(c.broken)) {
		all = append(all, fmt.Sprintf("%d x %s", c.broken[k], k))
	}
	if all == nil {
		return "ok"
	}
	return strings.Join(all, ", ")
}

// samples are latencies in nanoseconds.
type samples struct {
	mu sync.Mutex
	v  []int64
}

func (s *samples) add(ns int64) {
	s.mu.Lock()
	s.v = append(s.v, ns)
	s.mu.Unlock()
}

// ms is a quantile in milliseconds.
func (s *samples) ms(q float64) float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.v) == 0 {
		return 0
	}
	slices.Sort(s.v)
	return float64(s.v[min(int(q*float64(len(s.v))), len(s.v)-1)]) / 1e6
}

// writer makes the messages of every step-th stream.
type writer struct {
	c               *checker
	at, first, step int
	next            [streams]uint32
	payloads        [][]byte
	ms              []message
}

// batch makes n messages of the writer's next stream. They are valid until the next call.
func (w *writer) batch(n int, due int64) (int, [][]byte, []message) {
	for len(w.payloads) < n {
		w.payloads = append(w.payloads, nil)
	}
	w.ms = w.ms[:0]
	for i := range n {
		m := message{uint32(w.at), w.next[w.at], due}
		w.next[w.at]++
		w.payloads[i] = m.appendTo(w.payloads[i][:0], w.c.size)
		w.ms = append(w.ms, m)
	}
	part := w.at
	if w.at += w.step; w.at >= streams {
		w.at = w.first
	}
	return part, w.payloads[:n], w.ms
}

// push lets producers send total messages in batches and answers how long it took.
func push(ctx context.Context, s server, c *checker, producers, batch, total int) (time.Duration, error) {
	ps := make([]producer, producers)
	for i := range ps {
		var err error
		if ps[i], err = s.producer(ctx); err != nil {
			return 0, err
		}
		defer ps[i].close()
	}
	var wg sync.WaitGroup
	var taken atomic.Int64
	errs := make(chan error, producers)
	start := now()
	for i, p := range ps {
		w := &writer{c: c, at: i, first: i, step: producers}
		wg.Go(func() {
			for taken.Add(int64(batch)) <= int64(total) && ctx.Err() == nil {
				began := now()
				part, payloads, ms := w.batch(batch, began)
				if err := p.push(ctx, part, payloads); err != nil {
					errs <- err
					return
				}
				c.push.add(now() - began)
				c.stored(ms)
			}
		})
	}
	wg.Wait()
	took := time.Duration(now() - start)
	select {
	case err := <-errs:
		return took, err
	default:
		return took, ctx.Err()
	}
}

// drain lets consumers take and ack what was stored, until beside returns and nothing is left. Time is counted to the last ack.
func drain(ctx context.Context, s server, c *checker, consumers, batch int, beside func() error) (time.Duration, error) {
	outer := ctx
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	start := now()
	go func() { ended <- s.consume(ctx, consumers, batch, c) }()
	err := beside()
	for quiet := now(); err == nil && c.left.Load() > 0 && ctx.Err() == nil; time.Sleep(time.Millisecond) {
		select {
		case err = <-ended:
			return 0, fmt.Errorf("consumers ended: %w", err)
		default:
		}
		if now()-max(quiet, c.lastAck.Load()) > int64(45*time.Second) {
			break // lost: the verdict says so
		}
	}
	took := time.Duration(c.lastAck.Load() - start)
	cancel()
	if e := <-ended; err == nil {
		err = e
	}
	if err == nil {
		err = outer.Err()
	}
	return took, err
}

// live sends at a fixed rate; whoever is free of the producers takes the next message.
func live(ctx context.Context, s server, c *checker, producers int, rate float64, d, warmup time.Duration) error {
	var wg sync.WaitGroup
	due := make(chan int64, 1<<16)
	errs := make(chan error, producers)
	for i := range producers {
		p, err := s.producer(ctx)
		if err != nil {
			return err
		}
		w := &writer{c: c, at: i, first: i, step: producers}
		wg.Go(func() {
			defer p.close()
			for at := range due {
				part, payloads, ms := w.batch(1, at)
				if err := p.push(ctx, part, payloads); err != nil {
					errs <- err
					return
				}
				c.stored(ms)
			}
		})
	}
	start := now()
	c.warm = start + int64(warmup)
	for n := 0; ctx.Err() == nil; n++ {
		at := start + int64(float64(n)/rate*1e9)
		if at-start > int64(d+warmup) {
			break
		}
		if wait := at - now(); wait > 0 {
			ts := syscall.NsecToTimespec(wait) // more exact than a timer of Go
			_ = syscall.Nanosleep(&ts, nil)
		}
		due <- at
	}
	close(due)
	wg.Wait()
	select {
	case err := <-errs:
		return err
	default:
		return ctx.Err()
	}
}

// gather is first and what else is there already or comes within a millisecond, up to half of what may be unacked: the other half is on
// its way meanwhile.
func gather[T any](first T, in <-chan T, batch int) []T {
	all := append(make([]T, 0, batch), first)
	for len(all) < (batch+1)/2 {
		select {
		case m, ok := <-in:
			if !ok {
				return all
			}
			all = append(all, m)
		case <-time.After(time.Millisecond):
			return all
		}
	}
	return all
}
