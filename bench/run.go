package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// base is the zero of every time stamp in this process.
var base = time.Now()

func now() int64 { return int64(time.Since(base)) }

// run is one execution of a mode.
type run struct {
	c     *config
	ctx   context.Context // ends with Ctrl-C
	id    uint32
	queue string
	ck    *checker
	shape *shapes
	m     metrics
	conns atomic.Int64 // numbers connections, to spread them over the brokers

	push, pop, ack, e2e hist
	warmUntil           int64 // messages sent before are not in e2e
	stored, acks        atomic.Int64
	deliveries          atomic.Int64
	lastAck             atomic.Int64
	stalled             bool
	drained             bool
	lanes               bool // consumers are those of a subscription of /v1
	// onDeliver, when set, is told of every delivery.
	onDeliver func(p id, at int64)

	errMu sync.Mutex
	errs  map[string]int64
}

func (r *run) fail(format string, args ...any) {
	r.errMu.Lock()
	r.errs[fmt.Sprintf(format, args...)]++
	r.errMu.Unlock()
}

// dial opens the next connection, on the brokers in turn.
func (r *run) dial(ctx context.Context, addrs []string, timeout time.Duration, buf int) *conn {
	c := &conn{ctx: ctx, addr: addrs[int(r.conns.Add(1)-1)%len(addrs)], timeout: timeout, bufSize: buf}
	if err := c.dial(); err != nil {
		r.fail("dial: %s", reason(err))
	}
	return c
}

func (r *run) head(method, path string) []byte {
	h := method + " " + path + " HTTP/1.1\r\nHost: bench\r\n"
	if r.c.token != "" {
		h += "Authorization: Bearer " + r.c.token + "\r\n"
	}
	return []byte(h)
}

// queueOf is the queue of a stream.
func (r *run) queueOf(n int) string {
	if r.c.distinctQueues {
		return r.queue + "-" + strconv.Itoa(n)
	}
	return r.queue
}

// groupName is "" for queue mode.
func (r *run) groupName(g int) string {
	if r.c.groups > 1 {
		return fmt.Sprintf("%s-%d", r.c.groupOr("bench"), g)
	}
	return r.c.group
}

// popPath is the pop request of a group; partition < 0 means the queue route.
func (r *run) popPath(g int, queue string, partition, batch, partitions int, wait bool) string {
	q := url.Values{"batch": {strconv.Itoa(batch)}, "partitions": {strconv.Itoa(partitions)}}
	if wait {
		q.Set("wait", "true")
		q.Set("timeout", strconv.FormatInt(r.c.popTimeout.Milliseconds(), 10))
	}
	if r.c.lease > 0 {
		q.Set("leaseSeconds", strconv.Itoa(int(r.c.lease.Seconds())))
	}
	if name := r.groupName(g); name != "" {
		q.Set("consumerGroup", name)
		q.Set("subscriptionMode", "all")
	}
	path := "/api/v1/pop/queue/" + url.PathEscape(queue)
	if partition >= 0 {
		path += "/partition/p" + strconv.Itoa(partition)
	}
	return path + "?" + q.Encode()
}

// streams is how many message sequences there are: one per partition, or, with more producers
// than partitions, one per producer. Stream n belongs to producer n mod producers and lies in
// partition n mod partitions, so every stream has one writer.
func streams(c *config, producers int) int { return max(c.partitions, producers) }

// producer owns every step-th stream from first on.
type producer struct {
	r           *run
	c           *conn
	head, item  []byte // the request's head, an item's text up to the partition number
	first, step int
	at          int // the next stream
	body        []byte
	sent        []id
	results     []result
	calls       int
}

func (r *run) newProducer(n, of int, addrs []string) *producer {
	return &producer{r: r, c: r.dial(r.ctx, addrs, 40*time.Second, 16<<10), head: r.head("POST", "/api/v1/push"),
		item: itemHead(r.queue), first: n, step: of, at: n}
}

func itemHead(queue string) []byte {
	return append(append([]byte(`{"queue":`), jsonText(queue)...), `,"partition":"p`...)
}

// advance steps to the producer's next stream.
func (p *producer) advance() {
	if p.at += p.step; p.at >= len(p.r.ck.streams) {
		p.at = p.first
	}
}

// send pushes n messages in one request, perStream of them to each stream in turn. ts is the
// intended send time, 0 = now.
func (p *producer) send(n, perStream int, ts int64) (stored int) {
	r := p.r
	start := now()
	if ts == 0 {
		ts = start
	}
	p.body, p.sent = append(p.body[:0], `{"items":[`...), p.sent[:0]
	for i := range n {
		if i > 0 {
			p.body = append(p.body, ',')
			if i%perStream == 0 {
				p.advance()
			}
		}
		m := id{run: r.id, stream: uint32(p.at), seq: r.ck.send(uint32(p.at)), ts: ts}
		p.sent = append(p.sent, m)
		if r.c.distinctQueues {
			p.item = itemHead(r.queueOf(p.at))
		}
		p.body = append(p.body, p.item...)
		p.body = strconv.AppendInt(p.body, int64(p.at%r.c.partitions), 10)
		p.body = append(p.body, '"')
		if !r.c.noTxid {
			p.body = append(p.body, `,"transactionId":`...)
			p.body = m.appendTxid(p.body)
		}
		p.body = append(p.body, `,"payload":`...)
		p.body = m.appendPayload(p.body, r.c.size, r.c.object)
		p.body = append(p.body, '}')
	}
	p.body = append(p.body, "]}"...)
	p.advance()

	status, answer, err := p.c.do(p.head, p.body)
	r.push.record(now() - min(start, ts))
	all := unknown
	switch {
	case err != nil:
		if !errors.Is(err, errAborted) {
			r.fail("push: %s", reason(err))
		}
	case status != 201:
		r.fail("push: %d %s", status, clip(answer))
		if status != 503 && status != 502 && status != 504 {
			all = refused
		}
	default:
		if p.results, err = parseResults(answer, p.results[:0]); err != nil || len(p.results) != n {
			r.ck.violate("shape", "push answer has %d readable elements for %d items: %s", len(p.results), n, clip(answer))
			break
		}
		if p.calls++; p.calls%1024 == 1 {
			r.shape.push(answer, p.sent, r)
		}
		for i, res := range p.results {
			o := queued
			switch {
			case res.status == "queued":
				stored++
			case res.status == "failed" && res.err != "database unavailable":
				o = refused
				r.fail("push item failed: %s", res.err)
			case res.status == "duplicate":
				o = unknown
				r.ck.violate("duplicate", "stream %d seq %d is new and was answered duplicate", p.sent[i].stream, p.sent[i].seq)
			default:
				o = unknown
				r.fail("push item %s: %s", res.status, res.err)
			}
			r.ck.answered(p.sent[i].stream, p.sent[i].seq, o)
		}
		r.stored.Add(int64(stored))
		return stored
	}
	for _, m := range p.sent {
		r.ck.answered(m.stream, m.seq, all)
	}
	r.pause(50 * time.Millisecond)
	return 0
}

// pause waits, or returns when the run is interrupted.
func (r *run) pause(d time.Duration) {
	select {
	case <-r.ctx.Done():
	case <-time.After(d):
	}
}

// produce runs producers until the budget of messages (0: none) or the time (0: none) is used up.
func (r *run) produce(producers, batch, perStream int, budget int64, d time.Duration) {
	var wg sync.WaitGroup
	var taken atomic.Int64
	ps := make([]*producer, producers)
	for i := range ps {
		ps[i] = r.newProducer(i, producers, r.c.addrs)
	}
	end := now() + int64(d)
	for _, p := range ps {
		wg.Go(func() {
			defer p.c.close()
			for r.ctx.Err() == nil && (d == 0 || now() < end) {
				n := int64(batch)
				if budget > 0 {
					if n = min(n, budget-taken.Add(n)+n); n <= 0 {
						return
					}
				}
				p.send(int(n), perStream, 0)
			}
		})
	}
	wg.Wait()
}

// consumers pop and ack until they are stopped.
type consumers struct {
	r      *run
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

type consumer struct {
	r          *run
	c          *conn
	g, n       int
	queue      string
	pop, ack   []byte // request heads
	msgs       []message
	body, want []byte
	results    []result
	pops       int

	receive []byte // the body, of one that receives from a subscription
	last    []int  // per key, the receive that brought it last
}

func (r *run) newConsumer(ctx context.Context, g, n int, queue, path string) *consumer {
	return &consumer{r: r, g: g, n: n, queue: queue, pop: r.head("GET", path), ack: r.head("POST", "/api/v1/ack/batch"),
		c: r.dial(ctx, r.c.addrs, r.c.popTimeout+20*time.Second, 16<<10)}
}

// startConsumers starts n consumers for every group; lane says what the i-th of each polls
// (partition < 0: the queue route).
func (r *run) startConsumers(n, batch, partitions int, wait bool, lane func(i int) (queue string, partition int)) *consumers {
	ctx, cancel := context.WithCancel(r.ctx)
	cs := &consumers{r: r, cancel: cancel}
	r.lastAck.Store(now())
	for i := range n * r.c.groups {
		queue, partition := lane(i / r.c.groups)
		g := i % r.c.groups
		var k *consumer
		if r.lanes {
			k = r.newReceiver(ctx, g, i, batch, wait)
		} else {
			k = r.newConsumer(ctx, g, i, queue, r.popPath(g, queue, partition, batch, partitions, wait))
		}
		cs.wg.Go(func() {
			defer k.c.close()
			for ctx.Err() == nil {
				if k.step() == 0 && !wait {
					r.pause(2 * time.Millisecond)
				}
			}
		})
	}
	return cs
}

// anyOf is the lane of consumers that take whatever the queue has.
func (r *run) anyOf(int) (string, int) { return r.queue, -1 }

// finish waits until everything stored is acked by every group, or nothing moved for -stall,
// then stops the consumers and, unless interrupted, looks once more for what should not be there.
func (cs *consumers) finish() {
	r := cs.r
	r.stalled = false
	began := now()
	for !r.allAcked(false) && r.ctx.Err() == nil {
		quiet := time.Duration(now() - max(r.lastAck.Load(), began))
		if r.c.preloaded && r.c.messages == 0 && quiet > 3*time.Second {
			break
		}
		if r.allAcked(true) && quiet > r.c.leaseTime()+2*time.Second {
			break // acks without an answer had landed: their messages would have come again by now
		}
		if quiet > r.c.stall {
			r.stalled = true
			r.fail("stalled: nothing acked for %s", r.c.stall)
			break
		}
		time.Sleep(time.Millisecond)
	}
	cs.cancel()
	cs.wg.Wait()
	if r.drained = r.ctx.Err() == nil; r.drained {
		last, acks := r.lastAck.Load(), r.acks.Load()
		for g := range r.c.groups {
			queues := 1
			if r.c.distinctQueues {
				queues = len(r.ck.streams)
			}
			for n := range queues {
				q := r.queueOf(n)
				var k *consumer
				if r.lanes {
					k = r.newReceiver(r.ctx, g, r.c.consumers*r.c.groups+g, 100, false)
				} else {
					k = r.newConsumer(r.ctx, g, r.c.consumers*r.c.groups+g, q, r.popPath(g, q, -1, 1000, 0, false))
				}
				for range 1000 {
					if k.step() == 0 {
						break
					}
				}
				k.c.close()
			}
		}
		r.lastAck.Store(last)
		r.acks.Store(acks) // what the look found is not part of the rate
	}
}

// allAcked says whether every group acked all; with maybe, acks without an answer count.
func (r *run) allAcked(maybe bool) bool {
	if r.c.preloaded && r.c.messages == 0 {
		return false
	}
	for g := range r.ck.open {
		n := r.ck.open[g].Load()
		if maybe {
			n -= r.ck.maybe[g].Load()
		}
		if n > 0 {
			return false
		}
	}
	return true
}

// step does one pop and the ack of what came; it answers the number of messages.
func (k *consumer) step() int {
	if k.receive != nil {
		return k.receiveStep()
	}
	r := k.r
	start := now()
	status, answer, err := k.c.do(k.pop, nil)
	at := now()
	switch {
	case err != nil:
		if !errors.Is(err, errAborted) {
			r.fail("pop: %s", reason(err))
			r.pause(50 * time.Millisecond)
		}
		return 0
	case status == 204:
		if k.c.framed204 && r.c.shape {
			r.ck.violate("shape", "204 with Content-Length or Content-Type")
		}
		return 0
	case status != 200:
		r.fail("pop: %d %s", status, clip(answer))
		r.pause(50 * time.Millisecond)
		return 0
	}
	if k.msgs, err = parsePop(answer, k.msgs[:0]); err != nil || len(k.msgs) == 0 {
		r.ck.violate("shape", "pop answer with %d readable messages: %s", len(k.msgs), clip(answer))
		r.pause(50 * time.Millisecond)
		return 0
	}
	r.pop.record(at - start)
	r.deliveries.Add(int64(len(k.msgs)))
	r.ck.delivered(k.g, k.n, k.msgs, at)
	for i := range k.msgs {
		k.inspect(&k.msgs[i], at)
	}
	if k.pops++; k.pops%1024 == 1 {
		r.shape.pop(answer, k.queue, r.groupName(k.g))
	}
	if r.c.work > 0 {
		r.pause(r.c.work)
	}
	k.body = appendAck(k.body[:0], r.groupName(k.g), k.msgs)
	r.ck.releasing(k.g, k.n, k.msgs)
	k.finishAck()
	return len(k.msgs)
}

// inspect compares a delivered message with what was sent and records its latency.
func (k *consumer) inspect(m *message, at int64) {
	r := k.r
	if !m.ours {
		return
	}
	mine := m.run == r.id
	if mine && m.ts >= r.warmUntil {
		r.e2e.record(at - m.ts)
	}
	if r.onDeliver != nil && mine {
		r.onDeliver(m.id, at)
	}
	if !r.c.check {
		return
	}
	if k.want = m.appendPayload(k.want[:0], r.c.size, r.c.object); string(k.want) != string(m.data) {
		r.ck.violate("payload", "stream %d seq %d came as %s", m.stream, m.seq, clip(m.data))
	}
	if k.want = m.appendTxid(k.want[:0]); mine && !r.c.noTxid && m.txid != nil && string(k.want) != string(m.txid) {
		r.ck.violate("payload", "stream %d seq %d came with transactionId %s, sent %s", m.stream, m.seq, m.txid, k.want)
	}
	if n, err := strconv.Atoi(string(m.partition[min(2, len(m.partition)):max(len(m.partition)-1, 0)])); err != nil || n != int(m.stream)%r.c.partitions {
		r.ck.violate("payload", "stream %d seq %d came in partition %s", m.stream, m.seq, m.partition)
	}
}

func (k *consumer) finishAck() {
	r := k.r
	start := now()
	status, answer, err := k.c.do(k.ack, k.body)
	switch {
	case errors.Is(err, errAborted):
		return
	case err != nil:
		r.fail("ack: %s", reason(err))
		r.ck.ackUnknown(k.g, k.msgs...)
		return
	case status != 200:
		r.fail("ack: %d %s", status, clip(answer))
		r.ck.ackUnknown(k.g, k.msgs...)
		return
	}
	at := now()
	r.ack.record(at - start)
	if k.results, err = parseResults(answer, k.results[:0]); err != nil || len(k.results) != len(k.msgs) {
		r.ck.violate("shape", "ack answer has %d readable elements for %d items: %s", len(k.results), len(k.msgs), clip(answer))
		return
	}
	if k.pops%1024 == 1 {
		r.shape.ack(answer, r)
	}
	for i, res := range k.results {
		if !res.success {
			r.fail("ack item: %s", res.err)
			if strings.HasPrefix(res.err, "ack flush failed") {
				r.ck.ackUnknown(k.g, k.msgs[i])
			}
			continue
		}
		if !res.released && !res.noop && r.c.shape {
			r.ck.violate("shape", "the whole batch was acked, leaseReleased is false")
		}
		r.acks.Add(1)
		r.ck.acked(k.g, &k.msgs[i], res.noop)
	}
	r.lastAck.Store(at)
}

// reason is an error without addresses, so that equal errors count together.
func reason(err error) string {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err.Error()
		}
		err = inner
	}
}

func clip(b []byte) string { return string(b[:min(len(b), 160)]) }
