package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"time"
)

// lanes drains a stream through subscriptions of /v1: a message of each key at a time.
func lanes(r *run) error {
	r.lanes = true
	for g := range r.c.groups {
		if err := r.subscribe(g); err != nil {
			return err
		}
	}
	r.preload()
	return r.drain()
}

func (r *run) subscription(g int) string { return r.queue + "-" + strconv.Itoa(g) }

func (r *run) subscribe(g int) error {
	k := r.dial(r.ctx, r.c.addrs, 40*time.Second, 16<<10)
	defer k.close()
	body := fmt.Sprintf(`{"stream":%s,"start":"earliest"`, jsonText(r.queue))
	if r.c.lease > 0 {
		body += fmt.Sprintf(`,"lease_seconds":%d`, int(r.c.lease.Seconds()))
	}
	status, answer, err := k.do(r.head("PUT", "/v1/subscriptions/"+url.PathEscape(r.subscription(g))), []byte(body+"}"))
	if err == nil && status/100 != 2 {
		err = fmt.Errorf("%d %s", status, clip(answer))
	}
	if err != nil {
		return fmt.Errorf("subscribe: %w", err)
	}
	return nil
}

func (r *run) newReceiver(ctx context.Context, g, n, max int, wait bool) *consumer {
	path := "/v1/subscriptions/" + url.PathEscape(r.subscription(g))
	k := &consumer{r: r, g: g, n: n, queue: r.queue, pop: r.head("POST", path+"/receive"), ack: r.head("POST", path+"/ack"),
		c: r.dial(ctx, r.c.addrs, r.c.popTimeout+20*time.Second, 16<<10), last: make([]int, r.c.partitions)}
	seconds := 0.0
	if wait {
		seconds = r.c.popTimeout.Seconds()
	}
	k.receive = fmt.Appendf(nil, `{"max_messages":%d,"wait_seconds":%v,"consumer":"bench-%d"}`, max, seconds, n)
	return k
}

// receiveStep is step on a subscription.
func (k *consumer) receiveStep() int {
	r := k.r
	start := now()
	status, answer, err := k.c.do(k.pop, k.receive)
	at := now()
	switch {
	case err != nil:
		if !errors.Is(err, errAborted) {
			r.fail("receive: %s", reason(err))
			r.pause(50 * time.Millisecond)
		}
		return 0
	case status != 200:
		r.fail("receive: %d %s", status, clip(answer))
		r.pause(50 * time.Millisecond)
		return 0
	}
	if k.msgs, err = parseReceive(answer, k.msgs[:0]); err != nil {
		r.ck.violate("shape", "receive answer with %d readable messages: %s", len(k.msgs), clip(answer))
		r.pause(50 * time.Millisecond)
		return 0
	}
	if len(k.msgs) == 0 {
		return 0
	}
	r.pop.record(at - start)
	r.deliveries.Add(int64(len(k.msgs)))
	r.ck.delivered(k.g, k.n, k.msgs, at)
	k.pops++
	for i := range k.msgs {
		m := &k.msgs[i]
		k.inspect(m, at)
		if !m.ours {
			continue
		}
		key := int(m.stream) % r.c.partitions
		if k.last[key] == k.pops {
			r.ck.violate("two of a key", "group %d: one answer has two messages of key p%d", k.g, key)
		}
		k.last[key] = k.pops
	}
	if k.pops%1024 == 1 {
		r.shape.receive(answer, r.queue)
	}
	if r.c.work > 0 {
		r.pause(r.c.work)
	}
	k.body = append(k.body[:0], `{"delivery_ids":[`...)
	for i := range k.msgs {
		if i > 0 {
			k.body = append(k.body, ',')
		}
		k.body = append(k.body, k.msgs[i].lease...)
	}
	k.body = append(k.body, "]}"...)
	r.ck.releasing(k.g, k.n, k.msgs)
	k.finishReceived()
	return len(k.msgs)
}

func (k *consumer) finishReceived() {
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
	if k.results, err = parseSettled(answer, k.results[:0]); err != nil || len(k.results) != len(k.msgs) {
		r.ck.violate("shape", "ack answer has %d readable elements for %d ids: %s", len(k.results), len(k.msgs), clip(answer))
		return
	}
	for i, res := range k.results {
		if !res.success {
			r.fail("ack item: %s", res.err)
			if res.err == "not settled: try again" {
				r.ck.ackUnknown(k.g, k.msgs[i])
			}
			continue
		}
		r.acks.Add(1)
		r.ck.acked(k.g, &k.msgs[i], false)
	}
	r.lastAck.Store(at)
}

// parseReceive scans the answer of a receive by its known keys, in any order. The lease of a message is its delivery id.
func parseReceive(b []byte, dst []message) ([]message, error) {
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
				switch string(k) {
				case "delivery_id":
					m.lease = s.value()
				case "message":
					s.open('{')
					for k := s.key(); k != nil; k = s.key() {
						v := s.value()
						switch string(k) {
						case "key":
							m.partition = v
						case "payload":
							m.data = v
						}
					}
				default:
					s.value()
				}
			}
			m.id, m.ours = parsePayload(m.data)
			if m.lease == nil || m.data == nil || m.partition == nil {
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

// parseSettled scans the answer of an ack of deliveries.
func parseSettled(b []byte, dst []result) ([]result, error) {
	s := scanner{b: b}
	s.open('{')
	for k := s.key(); k != nil; k = s.key() {
		if string(k) != "results" {
			s.value()
			continue
		}
		s.open('[')
		for s.elem() {
			var r result
			s.open('{')
			for k := s.key(); k != nil; k = s.key() {
				v := s.value()
				switch string(k) {
				case "ok":
					r.success = string(v) == "true"
				case "error":
					r.err = string(bytes.Trim(v, `"`))
				}
			}
			dst = append(dst, r)
		}
	}
	if s.bad || s.i != len(bytes.TrimRight(b, "\r\n\t ")) {
		return dst, errAnswer
	}
	return dst, nil
}

func (s *shapes) receive(answer []byte, stream string) {
	var a struct {
		Messages []struct {
			DeliveryID     string    `json:"delivery_id"`
			Attempt        int       `json:"attempt"`
			LeaseExpiresAt time.Time `json:"lease_expires_at"`
			Message        struct {
				ID, Stream, Project string
				Key                 *string
				Payload             json.RawMessage
				Headers             map[string]json.RawMessage
				PublishedAt         time.Time `json:"published_at"`
			}
		}
	}
	if !s.on || !s.decode("receive answer", answer, &a) {
		return
	}
	for _, d := range a.Messages {
		m := d.Message
		s.demand(len(d.DeliveryID) > 4 && d.DeliveryID[:4] == "dlv_" && len(m.ID) > 4 && m.ID[:4] == "msg_", "receive: wrong id", answer)
		s.demand(d.Attempt >= 1 && m.Stream == stream && m.Project == "default" && m.Key != nil && m.Headers != nil, "receive: wrong message", answer)
		s.demand(d.LeaseExpiresAt.After(m.PublishedAt), "receive: leased until before it was published", answer)
	}
}
