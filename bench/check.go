package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// outcome is what the producer knows of a message.
type outcome = uint8

const (
	pending outcome = iota // not answered yet
	queued                 // answered queued: must be delivered and acked by every group
	unknown                // no answer, or one that leaves it open: may be delivered
	refused                // answered as not stored: must not be delivered
)

// What a group knows of a message.
const (
	sawBit uint8 = 1 << iota
	ackBit
	maybeBit // an ack was sent whose answer is not known
)

// stream is a sequence of messages with one writer, in one partition.
type stream struct {
	mu   sync.Mutex
	next uint32
	// state holds 1+groups bytes per sequence number: the outcome, then per group the bits.
	state []uint8
	// last is per group 1 + the highest sequence number delivered for the first time.
	last []uint32
}

// hold is a lease as its holder sees it: from the pop answer read to the ack being sent. The
// real lease is longer at both ends, so two holds that overlap mean two live leases.
type hold struct {
	consumer int32 // 1 + consumer, 0 = free
	since    int64
}

// checker follows every message from push to ack. See README.md for its rules.
type checker struct {
	on         bool
	run        uint32
	groups     int
	partitions int
	preloaded  bool  // pushed by an earlier process: outcomes are not known
	lease      int64 // ns; a hold older than this may have expired

	streams  []stream
	holds    []hold // partition × group
	holdLock [64]sync.Mutex

	// open counts, per group, messages answered queued and not acked yet; maybe those of them with maybeBit.
	open, maybe []atomic.Int64

	redelivered, noops, foreign atomic.Int64

	mu    sync.Mutex
	kinds map[string]int64
	first []string
	late  []late
}

// late is a first delivery after a later message of its stream; innocent if its push had no clear answer.
type late struct {
	group         int
	stream        uint32
	seq, lastSeen uint32
}

func newChecker(c *config, run uint32, groups, streams int) *checker {
	k := &checker{on: c.check, run: run, groups: groups, partitions: c.partitions, preloaded: c.preloaded,
		lease: int64(c.leaseTime()), streams: make([]stream, streams), open: make([]atomic.Int64, groups), maybe: make([]atomic.Int64, groups),
		kinds: map[string]int64{}}
	if k.on {
		k.holds = make([]hold, c.partitions*groups)
	}
	if c.preloaded {
		for g := range k.open {
			k.open[g].Store(c.messages)
		}
	}
	return k
}

func (k *checker) violate(kind, format string, args ...any) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.kinds[kind]++
	if len(k.first) < 10 {
		k.first = append(k.first, kind+": "+fmt.Sprintf(format, args...))
	}
}

// send allots the next sequence number of a stream to its only writer.
func (k *checker) send(n uint32) uint32 {
	s := &k.streams[n]
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	k.grow(s)
	return s.next - 1
}

func (k *checker) grow(s *stream) {
	if !k.on {
		return
	}
	for len(s.state) < int(s.next)*(1+k.groups) {
		s.state = append(s.state, 0)
	}
	if s.last == nil {
		s.last = make([]uint32, k.groups)
	}
}

// answered records the outcome of a push.
func (k *checker) answered(n, seq uint32, o outcome) {
	if !k.on {
		if o == queued {
			for g := range k.open {
				k.open[g].Add(1)
			}
		}
		return
	}
	s := &k.streams[n]
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.state[int(seq)*(1+k.groups):][:1+k.groups]
	st[0] = o
	for g := range k.groups {
		switch {
		case o == queued && st[1+g]&ackBit == 0:
			k.open[g].Add(1)
		case o == refused && st[1+g]&sawBit != 0:
			k.violate("phantom", "group %d got stream %d seq %d, whose push was refused", g, n, seq)
		}
	}
}

// delivered records one pop answer of a consumer.
func (k *checker) delivered(g, consumer int, ms []message, now int64) {
	if !k.on {
		return
	}
	part := -1
	for i := range ms {
		m := &ms[i]
		if m.ours = m.ours && (m.run == k.run || k.preloaded) && int(m.stream) < len(k.streams); !m.ours {
			k.foreign.Add(1)
			continue
		}
		if p := int(m.stream) % k.partitions; p != part {
			part = p
			k.take(g, consumer, p, now)
		}
		if i > 0 && ms[i-1].ours && ms[i-1].stream == m.stream && m.seq <= ms[i-1].seq {
			k.violate("order", "group %d: one answer has stream %d seq %d after %d", g, m.stream, m.seq, ms[i-1].seq)
		}
		k.deliver(g, m)
	}
}

func (k *checker) deliver(g int, m *message) {
	s := &k.streams[m.stream]
	s.mu.Lock()
	defer s.mu.Unlock()
	if m.seq >= s.next {
		if !k.preloaded {
			k.violate("phantom", "group %d got stream %d seq %d, never sent", g, m.stream, m.seq)
			m.ours = false
			return
		}
		s.next = m.seq + 1
		k.grow(s)
	}
	st := s.state[int(m.seq)*(1+k.groups):][:1+k.groups]
	switch {
	case st[1+g]&ackBit != 0:
		k.violate("duplicate", "group %d got stream %d seq %d again after its ack had succeeded", g, m.stream, m.seq)
	case st[1+g]&sawBit != 0:
		k.redelivered.Add(1)
	case m.seq+1 < s.last[g]:
		k.mu.Lock()
		k.late = append(k.late, late{g, m.stream, m.seq, s.last[g] - 1})
		k.mu.Unlock()
	default:
		s.last[g] = m.seq + 1
	}
	if st[0] == refused {
		k.violate("phantom", "group %d got stream %d seq %d, whose push was refused", g, m.stream, m.seq)
	}
	st[1+g] |= sawBit
}

// take notes that a consumer holds a partition.
func (k *checker) take(g, consumer, p int, now int64) {
	l := &k.holdLock[p%len(k.holdLock)]
	l.Lock()
	defer l.Unlock()
	h := &k.holds[p*k.groups+g]
	if h.consumer != 0 && h.consumer != int32(consumer)+1 && now-h.since < k.lease {
		k.violate("two holders", "group %d partition %d: consumer %d got it while consumer %d holds it",
			g, p, consumer, h.consumer-1)
	}
	*h = hold{int32(consumer) + 1, now}
}

// releasing is called before the ack of these messages is sent.
func (k *checker) releasing(g, consumer int, ms []message) {
	if !k.on {
		return
	}
	part := -1
	for i := range ms {
		if p := int(ms[i].stream) % k.partitions; ms[i].ours && p != part {
			part = p
			l := &k.holdLock[p%len(k.holdLock)]
			l.Lock()
			if h := &k.holds[p*k.groups+g]; h.consumer == int32(consumer)+1 {
				h.consumer = 0
			}
			l.Unlock()
		}
	}
}

// acked records an ack that was answered with success.
func (k *checker) acked(g int, m *message, noop bool) {
	if noop {
		k.noops.Add(1)
	}
	if !k.on {
		k.open[g].Add(-1)
		return
	}
	if !m.ours {
		return
	}
	s := &k.streams[m.stream]
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.state[int(m.seq)*(1+k.groups):][:1+k.groups]
	switch {
	case st[1+g]&ackBit == 0:
		st[1+g] |= ackBit
		if st[1+g]&maybeBit != 0 {
			k.maybe[g].Add(-1)
		}
		if st[0] == queued || k.preloaded {
			k.open[g].Add(-1)
		}
	case !noop:
		k.violate("duplicate", "group %d acked stream %d seq %d twice, both taken as new", g, m.stream, m.seq)
	}
}

// ackUnknown records that it is open whether an ack succeeded: the message may come again or not.
func (k *checker) ackUnknown(g int, ms ...message) {
	for i := range ms {
		if m := &ms[i]; m.ours && k.on {
			s := &k.streams[m.stream]
			s.mu.Lock()
			if b := &s.state[int(m.seq)*(1+k.groups)+1+g]; *b&(ackBit|maybeBit) == 0 {
				*b |= maybeBit
				k.maybe[g].Add(1)
			}
			s.mu.Unlock()
		}
	}
}

// finish gives the verdict. Loss is only judged when everything should have been drained.
func (k *checker) finish(drained bool) checkResult {
	for _, l := range k.late {
		s := &k.streams[l.stream]
		if s.state[int(l.seq)*(1+k.groups)] != unknown {
			k.violate("order", "group %d got stream %d seq %d after %d", l.group, l.stream, l.seq, l.lastSeen)
		}
	}
	if drained && k.on {
		for n := range k.streams {
			s := &k.streams[n]
			for seq := range int(s.next) {
				st := s.state[seq*(1+k.groups):][:1+k.groups]
				for g := range k.groups {
					switch {
					case st[0] != queued && !k.preloaded || st[1+g]&(ackBit|maybeBit) != 0:
					case st[1+g]&sawBit != 0:
						k.violate("lost", "group %d: stream %d seq %d was delivered, no ack succeeded, it never came again", g, n, seq)
					default:
						k.violate("lost", "group %d: stream %d seq %d never came", g, n, seq)
					}
				}
			}
		}
	}
	if drained {
		for g := range k.open {
			if n := k.open[g].Load() - k.maybe[g].Load(); n > 0 && k.kinds["lost"] == 0 {
				k.violate("lost", "group %d: %d messages are missing", g, n)
			}
		}
	}
	return checkResult{On: k.on, LossChecked: drained, Violations: k.kinds, First: k.first,
		Redelivered: k.redelivered.Load(), Noops: k.noops.Load(), Foreign: k.foreign.Load()}
}

// checkResult is the verdict of one run.
type checkResult struct {
	On          bool             `json:"on"`
	LossChecked bool             `json:"loss_checked"`
	Violations  map[string]int64 `json:"violations"`
	First       []string         `json:"first,omitempty"`
	Redelivered int64            `json:"redelivered_unacked"`
	Noops       int64            `json:"ack_noops"`
	Foreign     int64            `json:"foreign"`
}

func (r checkResult) ok() bool { return len(r.Violations) == 0 }

func (r checkResult) String() string {
	if !r.On && r.ok() {
		return "off"
	}
	what := "no loss, no duplicate after ack, order kept"
	if !r.LossChecked {
		what = "what arrived is in order and without duplicates; loss NOT checked"
	}
	if !r.ok() {
		var kinds []string
		for _, kind := range slices.Sorted(maps.Keys(r.Violations)) {
			kinds = append(kinds, fmt.Sprintf("%d × %s", r.Violations[kind], kind))
		}
		what = "FAILED: " + strings.Join(kinds, ", ")
	}
	return fmt.Sprintf("%s (redelivered before ack %d, noop acks %d, foreign messages %d)", what, r.Redelivered, r.Noops, r.Foreign)
}
