package history

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Rule is a promise.
type Rule string

// The rules that Check knows.
const (
	Durable     Rule = "what was answered with success is there"
	NeverSent   Rule = "nothing is delivered that was not sent"
	Once        Rule = "what is sent again under its id is stored once"
	Order       Rule = "the first deliveries of a lane are in publish order"
	Head        Rule = "a lane moves on only when its head is settled"
	Dense       Rule = "offsets have no gaps"
	OneInFlight Rule = "one live lease per lane and group"
	Attempts    Rule = "attempts count 1, 2, 3"
	DeadOnce    Rule = "a message becomes a dead letter once, after its last attempt"
	AckedEnds   Rule = "what was acked does not come again"
	Late        Rule = "who settles late changes nothing"
	InTime      Rule = "who settles in time is not refused"
	Stuck       Rule = "everything is delivered and settled in the end"
	Counted     Rule = "the numbers of every broker are what the history says"
	Contract    Rule = "only documented answers"
)

// Violation is something that cannot be if FerryMQ keeps its promises.
type Violation struct {
	Rule Rule
	Text string
}

func (v Violation) String() string { return string(v.Rule) + ": " + v.Text }

// slack is for clocks: leases are set by the database's, compared here with the client's.
const slack = 50 * time.Millisecond

// most is how many violations of one rule are told.
const most = 10

type message struct {
	Lane
	payload string
}

func (m message) String() string { return m.Queue + "/" + m.Key + " " + m.payload }

// sent is what all the sends of a message together say.
type sent struct {
	start, end time.Time // stored between these, if at all; end is far away if that is not known
	stored     bool      // for sure
	possible   bool      // not every send was refused
	id         string    // "": not known
	call       int64
	index      int
}

var never = time.Unix(1<<40, 0)

// place is a lane as one group sees it.
type place struct {
	group string
	Lane
}

// hold is a lease as seen from outside.
type hold struct {
	place
	lease      string
	start, end time.Time // of the call that brought it
	live       time.Time // until then it is, for sure
	dead       time.Time // from then on it is not, for sure
	deliveries []*Delivery
}

type check struct {
	*Log
	found  []Violation
	counts map[Rule]int
	sent   map[message]*sent
	holds  map[place][]*hold
	by     map[[2]string]*hold // by group and lease
}

// Check reports what is wrong, nil if nothing is.
func (l *Log) Check() []Violation {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &check{Log: l, counts: map[Rule]int{}, sent: map[message]*sent{}, holds: map[place][]*hold{}, by: map[[2]string]*hold{}}
	for _, text := range l.odd {
		c.fault(Contract, "%s", text)
	}
	for _, n := range l.Counters {
		if n.Got != n.Want {
			c.fault(Counted, "%s: %d, want %d", n.Name, n.Got, n.Want)
		}
	}
	c.sends()
	c.stored()
	c.leases()
	c.inFlight()
	c.late()
	c.attempts()
	for group, g := range l.Groups {
		c.group(group, g)
	}
	return c.found
}

func (c *check) fault(r Rule, format string, args ...any) {
	c.counts[r]++
	switch n := c.counts[r]; {
	case n <= most:
		c.found = append(c.found, Violation{r, fmt.Sprintf(format, args...)})
	case n == most+1:
		c.found = append(c.found, Violation{r, "and more"})
	}
}

func (c *check) sends() {
	for i := range c.Log.sends {
		s := &c.Log.sends[i]
		m := message{s.Lane, s.Payload}
		x := c.sent[m]
		if x == nil {
			x = &sent{start: s.Start, end: never, call: s.Call, index: s.Index}
			c.sent[m] = x
		}
		x.start = earlier(x.start, s.Start)
		if s.Outcome != Refused {
			x.possible = true
		}
		if s.Outcome != OK {
			continue
		}
		if x.stored && !s.Duplicate {
			if first := c.firstQueued(m, i); first >= 0 {
				c.fault(Once, "%s was answered as queued twice: %s and %s", m, c.Log.sends[first].Message, s.Message)
			}
		}
		if x.id != "" && s.Message != "" && x.id != s.Message {
			c.fault(Once, "%s was answered with two ids: %s and %s", m, x.id, s.Message)
		}
		if x.id == "" {
			x.id = s.Message
		}
		x.stored, x.end = true, earlier(x.end, s.End)
	}
}

// firstQueued is the send before i that was answered as queued, -1 if there is none.
func (c *check) firstQueued(m message, i int) int {
	return slices.IndexFunc(c.Log.sends[:i], func(s Send) bool {
		return s.Lane == m.Lane && s.Payload == m.payload && s.Outcome == OK && !s.Duplicate
	})
}

// redriven is how often a dead letter of a message may have been put back.
func (c *check) redriven(m message) (n int) {
	for i := range c.moves {
		if v := &c.moves[i]; v.Outcome != Refused && slices.Contains(v.Redriven, m.payload) && c.Groups[v.Group].Queue == m.Queue {
			n++
		}
	}
	return n
}

func (c *check) stored() {
	for lane, all := range c.Stored {
		seen := make(map[string]Stored)
		var places []placed
		for i, s := range all {
			m := message{lane, s.Payload}
			if s.Offset != int64(i) {
				c.fault(Dense, "%s has offset %d, in place %d", m, s.Offset, i)
			}
			x := c.sent[m]
			if x == nil || !x.possible {
				c.fault(NeverSent, "%s is stored", m)
				continue
			}
			if first, again := seen[s.Payload]; again {
				if c.redriven(m) == 0 {
					c.fault(Once, "%s is stored at %d and %d", m, first.Offset, s.Offset)
				}
				continue
			}
			seen[s.Payload] = s
			if x.id != "" && s.Message != "" && x.id != s.Message {
				c.fault(Once, "%s was answered as %s and is stored as %s", m, x.id, s.Message)
			}
			at := time.Unix(int64(i), 0)
			places = append(places, placed{m, x, at, at, 0})
		}
		c.order("stored", places)
		for m, x := range c.sent {
			if _, ok := seen[m.payload]; m.Lane == lane && x.stored && !ok {
				c.fault(Durable, "%s was answered with success and is not stored", m)
			}
		}
	}
}

// placed is when a message came first.
type placed struct {
	m          message
	sent       *sent
	start, end time.Time
	index      int
}

// order: what began to be sent after another had been answered does not come before it, nor does what was behind it in one request.
func (c *check) order(where string, all []placed) {
	slices.SortFunc(all, func(a, b placed) int { return cmp.Or(a.start.Compare(b.start), cmp.Compare(a.index, b.index)) })
	ended := slices.Clone(all)
	slices.SortStableFunc(ended, func(a, b placed) int { return a.end.Compare(b.end) })
	before := func(a, b placed) bool { // a came before b, for sure
		return a.end.Before(b.start) || a.start.Equal(b.start) && a.end.Equal(b.end) && a.index < b.index
	}
	var last placed // of those that came before, the one whose sending began last
	n := 0
	calls := make(map[int64]placed) // of those that came before, the one furthest behind in its request
	var open []placed               // one answer's worth, which came together
	take := func(p placed) {
		if last.sent == nil || p.sent.start.After(last.sent.start) {
			last = p
		}
		if o, ok := calls[p.sent.call]; !ok || p.sent.index > o.sent.index {
			calls[p.sent.call] = p
		}
	}
	compare := func(p, q placed) { // q came before p
		if q.sent.start.After(p.sent.end) {
			c.fault(Order, "%s: %s came before %s, whose sending had ended when its own began", where, q.m, p.m)
		} else if q.sent.call == p.sent.call && q.sent.index > p.sent.index {
			c.fault(Order, "%s: %s came before %s, which was before it in one request", where, q.m, p.m)
		}
	}
	for _, p := range all {
		for ; n < len(ended) && ended[n].end.Before(p.start); n++ {
			take(ended[n])
		}
		if last.sent != nil {
			compare(p, last)
		}
		if q, ok := calls[p.sent.call]; ok && q.m != last.m {
			compare(p, q)
		}
		open = slices.DeleteFunc(open, func(q placed) bool { return !q.start.Equal(p.start) })
		for _, q := range open {
			if before(q, p) {
				compare(p, q)
			}
		}
		open = append(open, p)
	}
}

// leases finds out how long each lease was live.
func (c *check) leases() {
	for i := range c.deliveries {
		d := &c.deliveries[i]
		m := message{d.Lane, d.Payload}
		if x := c.sent[m]; x == nil || !x.possible || d.End.Before(x.start) {
			c.fault(NeverSent, "%s: %s", d.Group, m)
		}
		k := [2]string{d.Group, d.Lease}
		h := c.by[k]
		if h == nil {
			h = &hold{place: place{d.Group, d.Lane}, lease: d.Lease, start: d.Start, end: d.End}
			h.live, h.dead = later(d.Start, d.From).Add(d.Length), d.End.Add(d.Length)
			c.by[k] = h
			c.holds[h.place] = append(c.holds[h.place], h)
		} else if h.Lane != d.Lane || !h.start.Equal(d.Start) {
			c.fault(OneInFlight, "%s: lease %s was given twice, on %v and %v", d.Group, d.Lease, h.Lane, d.Lane)
		}
		h.deliveries = append(h.deliveries, d)
	}
	slices.SortStableFunc(c.settles, func(a, b Settle) int { return a.Start.Compare(b.Start) })
	free := make(map[*hold]time.Time)
	for i := range c.settles {
		s := &c.settles[i]
		h := c.by[[2]string{s.Group, s.Lease}]
		if h == nil || s.Outcome == Refused {
			continue
		}
		if s.Kind == Extended {
			low, high := s.Start.Add(s.Extend), s.End.Add(s.Extend)
			switch lanes := c.Groups[s.Group].Lanes; {
			case s.Outcome == Unknown && lanes:
				h.live, h.dead = earlier(h.live, low), never
			case s.Outcome == Unknown:
				h.dead = never
			case lanes:
				h.live, h.dead = low, high
			default:
				h.live, h.dead = later(h.live, low), later(h.dead, high)
			}
		}
		if f, ok := free[h]; s.Ends && (!ok || s.Start.Before(f)) {
			free[h] = s.Start
		}
	}
	for p, holds := range c.holds {
		for _, h := range holds {
			h.live = h.live.Add(-slack)
			if f, ok := free[h]; ok {
				h.live = earlier(h.live, f)
			}
			for i := range c.moves {
				if v := &c.moves[i]; v.Redriven == nil && v.of(p.group, c.Groups[p.group]) && v.in(h.start, never) {
					h.live = earlier(h.live, v.Start)
				}
			}
		}
		slices.SortFunc(holds, func(a, b *hold) int { return a.end.Compare(b.end) })
	}
}

func (c *check) inFlight() {
	for p, holds := range c.holds {
		var open []*hold
		for _, h := range holds {
			open = slices.DeleteFunc(open, func(o *hold) bool { return !o.live.After(h.end) })
			for _, o := range open {
				if h.live.After(h.end) || h.start.After(o.end) {
					c.fault(OneInFlight, "%s: %v: lease %s on %s was given while lease %s on %s was live for another %v", p.group, p.Lane,
						h.lease, h.deliveries[0].Payload, o.lease, o.deliveries[0].Payload, o.live.Sub(h.end))
				}
			}
			open = append(open, h)
		}
	}
}

func (c *check) late() {
	for i := range c.settles {
		s := &c.settles[i]
		h := c.by[[2]string{s.Group, s.Lease}]
		if h == nil {
			continue
		}
		if s.Outcome == Refused {
			if s.End.Before(h.live) {
				c.fault(InTime, "%s: %v: lease %s was live for another %v", s.Group, s.Lane, s.Lease, h.live.Sub(s.End))
			}
			continue
		}
		if s.Outcome != OK {
			continue
		}
		if s.Start.After(h.dead.Add(slack)) && !(c.Groups[s.Group].Lanes && s.Kind == Acked) {
			c.fault(Late, "%s: %v: lease %s had ended %v before it was settled", s.Group, s.Lane, s.Lease, s.Start.Sub(h.dead))
			continue
		}
		for _, o := range c.holds[h.place] {
			if o.start.After(h.end) && o.end.Before(s.Start) {
				c.fault(Late, "%s: %v: lease %s was settled after lease %s had been given", s.Group, s.Lane, s.Lease, o.lease)
				break
			}
		}
	}
}

// attempts looks at each message of each subscription.
func (c *check) attempts() {
	type one struct{ group, message string }
	all := make(map[one][]*Delivery)
	for i := range c.deliveries {
		if d := &c.deliveries[i]; c.Groups[d.Group].Lanes {
			all[one{d.Group, d.Message}] = append(all[one{d.Group, d.Message}], d)
		}
	}
	lost := make(map[string][]time.Time)
	for _, x := range c.lost {
		lost[x.Group] = append(lost[x.Group], x.Start)
	}
	released := make(map[[2]string]Outcome)
	for _, s := range c.settles {
		if k := [2]string{s.Group, s.Lease}; s.Kind == Released && s.Outcome != Refused {
			if o, ok := released[k]; !ok || o == Unknown {
				released[k] = s.Outcome
			}
		}
	}
	for k, ds := range all {
		g := c.Groups[k.group]
		slices.SortFunc(ds, func(a, b *Delivery) int { return cmp.Or(cmp.Compare(a.Attempt, b.Attempt), a.End.Compare(b.End)) })
		var before *Delivery
		excused := 0 // by answers that nobody got
		for _, d := range ds {
			again := slices.ContainsFunc(c.moves, func(v Move) bool { return v.Again && v.of(k.group, g) && v.in(ds[0].Start, d.End) })
			want := 1
			if before != nil {
				o, back := released[[2]string{k.group, before.Lease}]
				if want = before.Attempt + 1; back && o == OK {
					want = before.Attempt
				}
				if before.Attempt == d.Attempt {
					if g.CountExpired && !again && !back {
						c.fault(Attempts, "%s: %v %s was attempt %d twice", k.group, d.Lane, d.Payload, d.Attempt)
					}
					want = d.Attempt
				}
				if d.End.Before(before.Start) && !again {
					c.fault(Attempts, "%s: %v %s was attempt %d after attempt %d", k.group, d.Lane, d.Payload, before.Attempt, d.Attempt)
				}
			}
			if missing := d.Attempt - want; missing != 0 {
				excused += missing
				n := 0
				for _, t := range lost[k.group] {
					if t.Before(d.End) {
						n++
					}
				}
				if d.Attempt < 1 || excused > n {
					c.fault(Attempts, "%s: %v %s was attempt %d, want %d", k.group, d.Lane, d.Payload, d.Attempt, want)
				}
			}
			if g.Max > 0 && d.Attempt > g.Max {
				c.fault(DeadOnce, "%s: %v %s was attempt %d of %d", k.group, d.Lane, d.Payload, d.Attempt, g.Max)
			}
			before = d
		}
	}
}

// group judges what one group got.
func (c *check) group(group string, g Group) {
	first := make(map[message]*Delivery)
	lives := make(map[message][]string)
	for i := range c.deliveries {
		d := &c.deliveries[i]
		if d.Group != group {
			continue
		}
		m := message{d.Lane, d.Payload}
		if f := first[m]; f == nil || d.End.Before(f.End) {
			first[m] = d
		}
		if !slices.Contains(lives[m], d.Message) {
			lives[m] = append(lives[m], d.Message)
		}
	}
	byLane := make(map[Lane][]placed)
	for m, d := range first {
		x := c.sent[m]
		if x == nil {
			continue
		}
		copies := c.redriven(m)
		if len(lives[m]) > 1+copies || copies == 0 && x.id != "" && d.Message != x.id {
			c.fault(Once, "%s: %s came as %s, sent as %s, redriven %d times", group, m, strings.Join(lives[m], " and "), x.id, copies)
		}
		if copies == 0 || d.Message == x.id {
			byLane[m.Lane] = append(byLane[m.Lane], placed{m, x, d.Start, d.End, d.Index})
		}
	}
	for _, all := range byLane {
		c.order(group, all)
	}

	c.heads(group, g)

	// What became of each message: settled for good, and when that was known.
	done, maybe := make(map[message]time.Time), make(map[message]bool)
	failed := make(map[message]int)
	life := make(map[[2]string]bool) // lives that were acked, by payload and message id
	var again time.Time              // the last time that everything was put back
	for i := range c.moves {
		if v := &c.moves[i]; v.Again && v.of(group, g) && v.Outcome == OK {
			again = later(again, v.Start)
		}
	}
	for i := range c.settles {
		s := &c.settles[i]
		if s.Group != group || s.Outcome == Refused {
			continue
		}
		for _, p := range s.Done {
			m := message{s.Lane, p}
			if !s.End.Before(again) {
				maybe[m] = true
			}
			if t, ok := done[m]; s.Outcome == OK && (!ok || s.End.Before(t)) {
				done[m] = s.End
			}
		}
		if s.Kind == Failed && s.Outcome == OK {
			if m := (message{s.Lane, s.Payload}); s.Payload != "" {
				failed[m]++
			}
		}
		if h := c.by[[2]string{group, s.Lease}]; h != nil && s.Outcome == OK && s.Kind == Acked {
			for _, d := range h.deliveries {
				if slices.Contains(s.Done, d.Payload) {
					life[[2]string{d.Payload, d.Message}] = true
				}
			}
		}
	}
	for m, ids := range lives {
		n := 0
		for _, id := range ids {
			if life[[2]string{m.payload, id}] {
				n++
			}
		}
		if n > 1 {
			c.fault(DeadOnce, "%s: %d redriven copies of %s were acked", group, n, m)
		}
	}
	for i := range c.deliveries {
		d := &c.deliveries[i]
		m := message{d.Lane, d.Payload}
		t, ok := done[m]
		if d.Group != group || !ok || !d.Start.After(t) {
			continue
		}
		if !slices.ContainsFunc(c.moves, func(v Move) bool { return v.Again && v.of(group, g) && v.in(first[m].Start, d.End) }) {
			c.fault(AckedEnds, "%s: %s was acked, and came again %v later", group, m, d.Start.Sub(t))
		}
	}
	dead := make(map[message]int)
	for _, x := range c.Dead[group] {
		m := message{x.Lane, x.Payload}
		dead[m]++
		if dead[m] > 1 {
			c.fault(DeadOnce, "%s: %s is a dead letter %d times", group, m, dead[m])
		}
		if s := c.sent[m]; s == nil || !s.possible {
			c.fault(NeverSent, "%s: %s is a dead letter", group, m)
		}
		if _, ok := done[m]; ok && again.IsZero() {
			c.fault(DeadOnce, "%s: %s was acked and is a dead letter", group, m)
		}
		if g.Max == 0 || x.Attempts != g.Max {
			c.fault(DeadOnce, "%s: %s is a dead letter after %d attempts of %d", group, m, x.Attempts, g.Max)
		}
	}
	for m, n := range failed {
		if g.Max > 0 && n > g.Max*(1+c.redriven(m)) && again.IsZero() {
			c.fault(DeadOnce, "%s: %s failed %d times of %d", group, m, n, g.Max)
		}
	}
	if !c.Drained {
		return
	}
	for m, x := range c.sent {
		switch {
		case m.Queue != g.Queue || !x.stored || maybe[m] || dead[m] > 0:
		case first[m] == nil:
			c.fault(Durable, "%s never got %s", group, m)
		default:
			c.fault(Stuck, "%s: %s came %v ago, was not settled and did not come again", group, m, time.Since(first[m].End))
		}
	}
}

// heads: when a lease was given, everything that was surely sent before its first message may have been settled.
func (c *check) heads(group string, g Group) {
	if slices.ContainsFunc(c.moves, func(v Move) bool { return v.Redriven == nil && !v.Again && v.of(group, g) }) {
		return
	}
	settled := make(map[message]time.Time)
	for i := range c.settles {
		s := &c.settles[i]
		if s.Group != group || s.Outcome == Refused {
			continue
		}
		for _, p := range s.Done {
			m := message{s.Lane, p}
			if t, ok := settled[m]; !ok || s.Start.Before(t) {
				settled[m] = s.Start
			}
		}
	}
	for _, x := range c.Dead[group] {
		settled[message{x.Lane, x.Payload}] = time.Time{}
	}
	type head struct {
		m       message
		end     time.Time // of its sending
		settled time.Time
	}
	lanes := make(map[Lane][]head)
	for m, x := range c.sent {
		if m.Queue != g.Queue || !x.stored {
			continue
		}
		t, ok := settled[m]
		if !ok {
			t = never
		}
		if c.redriven(m) == 0 {
			lanes[m.Lane] = append(lanes[m.Lane], head{m, x.end, t})
		}
	}
	for _, all := range lanes {
		slices.SortFunc(all, func(a, b head) int { return a.end.Compare(b.end) })
		for i := 1; i < len(all); i++ { // the one that is settled last, of those up to here
			if last := all[i-1]; last.settled.After(all[i].settled) {
				all[i].m, all[i].settled = last.m, last.settled
			}
		}
	}
	for p, holds := range c.holds {
		if p.group != group {
			continue
		}
		for _, h := range holds {
			d := h.deliveries[0]
			m := message{d.Lane, d.Payload}
			x := c.sent[m]
			if x == nil || c.redriven(m) > 0 {
				continue
			}
			all := lanes[p.Lane]
			n, _ := slices.BinarySearchFunc(all, x.start, func(h head, t time.Time) int { return h.end.Compare(t) })
			if n > 0 && all[n-1].settled.After(d.End) {
				c.fault(Head, "%s: %s came while %s was not settled", group, m, all[n-1].m)
			}
		}
	}
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
