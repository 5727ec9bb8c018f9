package groupcommit_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// A history is what clients saw, with the times their calls began and ended, and what the database holds in the end.
// check finds what contradicts the invariants of the design, judging only by what must be true whatever happened inside a call:
// of two calls nothing is known about the order unless one ended before the other began.
type history struct {
	mu      sync.Mutex
	pushes  []pushed
	claims  []claimed
	settles []settled

	stored map[string][]stored  // by partition, in offset order, at the end
	groups map[string]groupSpec // those that must have got everything
}

// groupSpec is what a group is owed.
type groupSpec struct {
	// Messages of pushes that began after contactEnd, and none of pushes that ended before contactStart. Zero: everything.
	contactStart, contactEnd time.Time
	lossy                    bool // may lose what it was given (autoAck)
}

type pushed struct {
	start, end time.Time
	producer   int
	partition  string
	payloads   []string
	ids        []string // given ids, "" = minted
	results    []string // message ids, nil unless the push was answered with success
	duplicate  []bool
}

type claimed struct {
	start, end time.Time
	partition  string
	group      string
	lease      string // "": autoAck
	seconds    time.Duration
	offset     int64
	payloads   []string
}

// settled is an answered ack or extend of one lease on one partition.
type settled struct {
	start, end time.Time
	partition  string
	group      string
	lease      string
	refused    bool // as stale
	extended   time.Duration
	ends       bool  // may end the lease
	committed  int64 // accepted: the cursor is at or above; -1: nothing is known
}

type stored struct{ id, payload, tx string }

func (h *history) add(e any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch e := e.(type) {
	case pushed:
		h.pushes = append(h.pushes, e)
	case claimed:
		h.claims = append(h.claims, e)
	case settled:
		h.settles = append(h.settles, e)
	}
}

// slack is for clocks: leases are set by the database's, compared here with ours.
const slack = 50 * time.Millisecond

func (h *history) check() []string {
	var bad []string
	fault := func(format string, args ...any) {
		if len(bad) < 50 {
			bad = append(bad, fmt.Sprintf(format, args...))
		}
	}
	h.checkPushes(fault)
	h.checkClaims(fault)
	return bad
}

type faultFunc = func(format string, args ...any)

func (h *history) checkPushes(fault faultFunc) {
	type place struct {
		partition string
		offset    int64
	}
	at := make(map[string]place) // message id -> place
	for partition, ms := range h.stored {
		ids := make(map[string]int)
		for i, m := range ms {
			if p, again := at[m.id]; again {
				fault("message id %s is stored twice: %v and %s/%d", m.id, p, partition, i)
			}
			at[m.id] = place{partition, int64(i)}
			if m.tx != m.id {
				if first, again := ids[m.tx]; again {
					fault("%s: transaction id %q is queued twice, at %d and %d", partition, m.tx, first, i)
				}
				ids[m.tx] = i
			}
		}
	}
	// last[partition] of each push, to compare those that do not overlap.
	type span struct {
		start, end time.Time
		low, high  int64
	}
	order := make(map[string][]span)
	for _, p := range h.pushes {
		if p.results == nil {
			continue
		}
		s := span{p.start, p.end, 1 << 62, -1}
		previous := int64(-1)
		for i, id := range p.results {
			found, ok := at[id]
			if !ok {
				fault("%s: answered message %s (%s) is not stored", p.partition, id, p.payloads[i])
				continue
			}
			m := h.stored[found.partition][found.offset]
			if found.partition != p.partition || (!p.duplicate[i] && m.payload != p.payloads[i]) {
				fault("%s: answered message %s is stored as %s/%d %q, pushed %q", p.partition, id, found.partition, found.offset, m.payload, p.payloads[i])
			}
			if p.ids[i] != "" && m.tx != p.ids[i] {
				fault("%s: message %s was pushed as %q and is stored as %q", p.partition, id, p.ids[i], m.tx)
			}
			if p.duplicate[i] {
				continue
			}
			if found.offset <= previous {
				fault("%s: request order broken at %q: offset %d after %d", p.partition, p.payloads[i], found.offset, previous)
			}
			previous = found.offset
			s.low, s.high = min(s.low, found.offset), max(s.high, found.offset)
		}
		if s.high >= 0 {
			order[p.partition] = append(order[p.partition], s)
		}
	}
	for partition, spans := range order {
		// Whoever began after another ended lies above it: compare with the highest that had ended.
		byEnd := slices.Clone(spans)
		slices.SortFunc(spans, func(a, b span) int { return a.start.Compare(b.start) })
		slices.SortFunc(byEnd, func(a, b span) int { return a.end.Compare(b.end) })
		i, high := 0, int64(-1)
		for _, s := range spans {
			for ; i < len(byEnd) && byEnd[i].end.Before(s.start); i++ {
				high = max(high, byEnd[i].high)
			}
			if s.low <= high {
				fault("%s: a push that began after another had ended got offset %d, the other %d", partition, s.low, high)
			}
		}
	}
}

func (h *history) checkClaims(fault faultFunc) {
	type cursor struct{ group, partition string }
	by := make(map[cursor][]claimed)
	for _, c := range h.claims {
		k := cursor{c.group, c.partition}
		by[k] = append(by[k], c)
	}
	settles := make(map[cursor][]settled)
	for _, s := range h.settles {
		k := cursor{s.group, s.partition}
		settles[k] = append(settles[k], s)
	}
	for k, claims := range by {
		slices.SortFunc(claims, func(a, b claimed) int { return a.end.Compare(b.end) })
		h.checkContent(k.group, k.partition, claims, fault)
		ss := settles[k]
		slices.SortFunc(ss, func(a, b settled) int { return a.start.Compare(b.start) })
		checkLeases(k.group, k.partition, claims, ss, fault)
	}
	for group, spec := range h.groups {
		for partition, ms := range h.stored {
			got := make([]bool, len(ms))
			for _, c := range by[cursor{group, partition}] {
				for i := range c.payloads {
					if o := c.offset + int64(i); o < int64(len(got)) {
						got[o] = true
					}
				}
			}
			if spec.lossy {
				continue
			}
			began, ended := h.pushTimes(partition)
			for o, m := range ms {
				b, e := began[m.payload], ended[m.payload]
				owed := spec.contactEnd.IsZero() || b.After(spec.contactEnd)
				early := !spec.contactStart.IsZero() && !e.IsZero() && e.Before(spec.contactStart)
				if owed && !got[o] && !b.IsZero() {
					fault("%s never got %s/%d %q", group, partition, o, m.payload)
				}
				if early && got[o] {
					fault("%s got %s/%d %q, which was there before its first contact", group, partition, o, m.payload)
				}
			}
		}
	}
}

func (h *history) pushTimes(partition string) (began, ended map[string]time.Time) {
	began, ended = make(map[string]time.Time), make(map[string]time.Time)
	for _, p := range h.pushes {
		if p.partition != partition {
			continue
		}
		for i, payload := range p.payloads {
			if p.results == nil || !p.duplicate[i] {
				began[payload], ended[payload] = p.start, p.end
			}
		}
	}
	return began, ended
}

// checkContent: what was delivered is what is stored there, and nothing was jumped over: whatever lies below a delivery and
// at or above the group's first one has been delivered by a call that began before this one ended.
func (h *history) checkContent(group, partition string, claims []claimed, fault faultFunc) {
	ms := h.stored[partition]
	lowest := int64(1 << 62)
	for _, c := range claims {
		lowest = min(lowest, c.offset)
	}
	for _, c := range claims {
		for i, payload := range c.payloads {
			o := c.offset + int64(i)
			if o >= int64(len(ms)) || ms[o].payload != payload {
				fault("%s: %s/%d was delivered as %q and is not stored so", group, partition, o, payload)
			}
		}
	}
	if h.groups[group].lossy {
		return
	}
	begun := slices.Clone(claims)
	slices.SortFunc(begun, func(a, b claimed) int { return a.start.Compare(b.start) })
	next, i := lowest, 0 // everything in [lowest, next) has been delivered
	var ahead []claimed
	for _, c := range claims {
		for ; i < len(begun) && !begun[i].start.After(c.end); i++ {
			ahead = append(ahead, begun[i])
		}
		for moved := true; moved; {
			moved = false
			for j, a := range ahead {
				if a.offset <= next {
					next = max(next, a.offset+int64(len(a.payloads)))
					ahead[j] = ahead[len(ahead)-1]
					ahead = ahead[:len(ahead)-1]
					moved = true
					break
				}
			}
		}
		if c.offset > next {
			fault("%s: %s/%d was delivered before %d: order broken", group, partition, c.offset, next)
		}
	}
}

// checkLeases: while one lease was surely live no other claim began and ended; acks of ended leases were refused and those of live ones
// were not; what was committed did not come again.
func checkLeases(group, partition string, claims []claimed, settles []settled, fault faultFunc) {
	for i, c := range claims {
		if c.lease == "" {
			continue
		}
		// Surely live from the end of the call until the lease's earliest end, unless a settle may have ended it before.
		until, latest := c.start.Add(c.seconds), c.end.Add(c.seconds)
		free := time.Time{} // when something may first have ended it
		for _, s := range settles {
			if s.lease != c.lease {
				continue
			}
			inTime := s.end.Before(until.Add(-slack)) && (free.IsZero() || s.end.Before(free))
			late := s.start.After(latest.Add(slack))
			switch {
			case s.refused && inTime:
				fault("%s: %s: an ack of the live lease %s was refused", group, partition, c.lease)
			case !s.refused && late && s.committed >= 0:
				fault("%s: %s: an ack of the ended lease %s was accepted", group, partition, c.lease)
			}
			if s.refused {
				continue
			}
			if s.extended > 0 {
				until, latest = maxTime(until, s.start.Add(s.extended)), maxTime(latest, s.end.Add(s.extended))
			}
			if s.ends && free.IsZero() {
				free = s.start
			}
		}
		live := until.Add(-slack)
		if !free.IsZero() && free.Before(live) {
			live = free
		}
		for j, d := range claims {
			if i != j && d.start.After(c.end) && d.end.Before(live) {
				fault("%s: %s/%d was claimed at %d while lease %s on %d was live for another %v", group, partition, d.offset, j, c.lease, c.offset, live.Sub(d.end))
			}
		}
	}
	for _, s := range settles {
		if s.refused || s.committed < 0 {
			continue
		}
		for _, c := range claims {
			if c.start.After(s.end) && c.offset < s.committed {
				fault("%s: %s/%d was delivered after it had been committed up to %d", group, partition, c.offset, s.committed)
			}
		}
	}
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// TestHistory feeds the checker histories that are right and such that are broken in one way each.
func TestHistory(t *testing.T) {
	t.Parallel()
	zero := time.Now()
	at := func(ms int) time.Time { return zero.Add(time.Duration(ms) * time.Millisecond) }
	right := func() *history {
		h := &history{groups: map[string]groupSpec{"g": {}}, stored: map[string][]stored{"p": {{"1", "a", "1"}, {"2", "b", "x"}, {"3", "c", "3"}}}}
		h.add(pushed{start: at(0), end: at(10), partition: "p", payloads: []string{"a", "b"}, ids: []string{"", "x"}, results: []string{"1", "2"}, duplicate: []bool{false, false}})
		h.add(pushed{start: at(20), end: at(30), partition: "p", payloads: []string{"c", "d"}, ids: []string{"", "x"}, results: []string{"3", "2"}, duplicate: []bool{false, true}})
		h.add(claimed{start: at(12), end: at(14), partition: "p", group: "g", lease: "l1", seconds: time.Second, offset: 0, payloads: []string{"a", "b"}})
		h.add(settled{start: at(500), end: at(510), partition: "p", group: "g", lease: "l1", ends: true, committed: 1})
		h.add(claimed{start: at(600), end: at(610), partition: "p", group: "g", lease: "l2", seconds: time.Second, offset: 1, payloads: []string{"b", "c"}})
		h.add(settled{start: at(2000), end: at(2010), partition: "p", group: "g", lease: "l2", refused: true, committed: -1})
		h.add(claimed{start: at(2100), end: at(2110), partition: "p", group: "g", lease: "l3", seconds: time.Second, offset: 1, payloads: []string{"b", "c"}})
		h.add(settled{start: at(2200), end: at(2210), partition: "p", group: "g", lease: "l3", ends: true, committed: 3})
		return h
	}
	for _, c := range []struct {
		name, want string
		change     func(h *history)
	}{
		{"right", "", func(*history) {}},
		{"lost message", "not stored", func(h *history) { h.stored["p"] = h.stored["p"][:2]; h.claims = nil; h.settles = nil; h.groups = nil }},
		{"other payload stored", "pushed", func(h *history) { h.stored["p"][2].payload = "z" }},
		{"other id stored", "is stored as", func(h *history) { h.stored["p"][1].tx = "y" }},
		{"queued twice", "queued twice", func(h *history) { h.stored["p"][2].tx = "x" }},
		{"stored twice", "stored twice", func(h *history) { h.stored["q"] = []stored{{"1", "a", "1"}} }},
		{"request order", "request order", func(h *history) { h.stored["p"][0], h.stored["p"][1] = h.stored["p"][1], h.stored["p"][0] }},
		{"real-time order", "began after another", func(h *history) { h.pushes[0].start, h.pushes[0].end = at(40), at(50) }},
		{"not what is stored", "not stored so", func(h *history) { h.claims[0].payloads[1] = "z" }},
		{"jumped over", "order broken", func(h *history) {
			h.claims[0].payloads = []string{"a"}
			h.claims[1].offset, h.claims[1].payloads = 2, []string{"c"}
		}},
		{"never delivered", "never got", func(h *history) { h.claims[1].payloads, h.claims[2].payloads = []string{"b"}, []string{"b"} }},
		{"two live leases", "while lease", func(h *history) { h.claims[1].start, h.claims[1].end = at(300), at(310) }},
		{"two live leases, extended", "while lease", func(h *history) {
			h.add(settled{start: at(700), end: at(710), partition: "p", group: "g", lease: "l2", extended: 5 * time.Second, committed: -1})
			h.settles[1].start, h.settles[1].end = at(9000), at(9100)
		}},
		{"stale ack accepted", "ended lease", func(h *history) { h.settles[1].refused, h.settles[1].committed = false, 1 }},
		{"live ack refused", "live lease", func(h *history) { h.settles[1].start, h.settles[1].end = at(700), at(710) }},
		{"committed comes again", "had been committed", func(h *history) { h.claims[1].offset, h.claims[1].payloads = 0, []string{"a", "b", "c"} }},
		{"before the first contact", "before its first contact", func(h *history) { h.groups["g"] = groupSpec{contactStart: at(15), contactEnd: at(16)} }},
	} {
		h := right()
		c.change(h)
		got := h.check()
		switch {
		case c.want == "" && len(got) > 0:
			t.Errorf("%s: %q", c.name, got)
		case c.want != "" && !slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, c.want) }):
			t.Errorf("%s: found %q, want something with %q", c.name, got, c.want)
		}
	}
}
