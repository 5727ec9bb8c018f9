package groupcommit

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/db"
)

// Span is what a claim got of one partition: the messages [Start, Start+Take), in the segments that hold them.
type Span struct {
	Queue     *catalog.Queue
	Group     *catalog.Group
	Partition *catalog.Partition
	Row       catalog.Row
	Start     int64
	Take      int64
	Segments  []Segment

	Attempt int32 // of a lane: which delivery of its message this is, from 1

	exhausted bool // the lease of a lane's last attempt ended: only its dead letter is left to file
	lease     time.Duration
}

// Lease is how long the span was leased for.
func (s *Span) Lease() time.Duration { return s.lease }

// Segment is one stored segment, as read.
type Segment struct {
	Base      int64
	Count     int32
	KeyNo     int16
	Codec     int16
	OnlyGroup int32 // the group it was put back for, 0: for all
	CreatedAt time.Time
	FirstID   uuid.UUID
	Keys      []byte
	Frames    []byte
}

// claim asks for messages of a group, or of one of its partitions.
type claim struct {
	queue     *catalog.Queue
	group     *catalog.Group
	partition *catalog.Row // nil: any
	lease     uuid.UUID
	budget    int64
	parts     int64
	seconds   int32 // 0: the queue's
	autoAck   bool
	discovery bool
	consumer  string // of lanes
	wait      bool   // park when there is nothing

	// Written by whoever works on the claim: the flush it rides on, or parking under its lock.
	scan  bool    // look at the index, not only at hints
	hints []int64 // partitions to look at first
	tries int
	looks int // of its group, when it set out
	bulk  int // the same

	looked atomic.Bool // it was on a flush that succeeded

	parkedAt time.Time // zero: it is not parked
	parked   atomic.Int64

	mu       sync.Mutex
	finished bool
	left     bool // the caller has gone
	spans    []*Span
	err      error
	done     chan struct{}
}

// finish answers the claim. What nobody is there to receive is given back at once.
func (c *claim) finish(e *Engine, spans []*Span, err error) {
	c.mu.Lock()
	if c.finished {
		c.mu.Unlock()
		return
	}
	c.unpark(time.Now())
	c.finished, c.spans, c.err = true, spans, err
	left := c.left
	c.mu.Unlock()
	close(c.done)
	if left {
		e.giveBack(c, spans, nil)
	}
}

// unpark ends the time that a claim is parked.
func (c *claim) unpark(now time.Time) {
	if !c.parkedAt.IsZero() {
		c.parked.Add(int64(max(now.Sub(c.parkedAt), 0)))
		c.parkedAt = time.Time{}
	}
}

// leave is the end of a caller's patience. It reports false when the answer is there already.
func (c *claim) leave() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left = !c.finished
	return c.left
}

// present drops the claims whose caller has gone before they board a flight. One that had been parked was woken: for the next one then.
func (e *Engine) present(claims []*claim) []*claim {
	kept := claims[:0:0]
	for _, c := range claims {
		c.mu.Lock()
		left := c.left
		c.mu.Unlock()
		if left {
			c.finish(e, nil, nil)
			if c.looked.Load() {
				e.park.passOn(c)
			}
			continue
		}
		kept = append(kept, c)
	}
	return kept
}

// giveBack ends the leases of spans that nobody received: they can be claimed again at once, or, for rest, after a while.
// What it returns is closed as it happens.
func (e *Engine) giveBack(c *claim, spans []*Span, rest *Span) (done []chan struct{}) {
	for _, s := range spans {
		end := make(chan struct{})
		done = append(done, end)
		e.held.drop(s.Group.ID, s.Row.ID)
		if c.autoAck {
			r := &restore{queue: s.Queue.ID, group: s.Group.ID, partition: s.Row.ID, start: s.Start, end: s.Start + s.Take, rest: rest == s,
				lane: s.Partition.Lane, done: end}
			e.boardRestore(r)
			continue
		}
		if c.group.Lanes != nil {
			e.boardSettle(&settle{group: s.Group, partition: s.Partition, row: &s.Row, Lease: c.lease, Expected: s.Start, Action: actRelease, done: end})
			continue
		}
		action := int32(actGiveBack)
		if rest == s {
			action = actRest
		}
		e.boardSettle(&settle{group: s.Group, partition: s.Partition, row: &s.Row, Lease: c.lease, Expected: s.Start, Action: action, MoveTo: s.Start, done: end})
	}
	return done
}

func (e *Engine) boardClaim(c *claim) {
	c.scan = true
	if !e.dock.enter(uint64(c.group.ID), func(b *board) { b.claims = append(b.claims, c) }) {
		c.finish(e, nil, ErrClosed)
	}
}

// spanBytes is how much of one partition a claim takes at most, unless a single segment is larger.
const spanBytes = 16 << 20

// list is one pool of candidates in a flush, and the claims it is dealt to.
type list struct {
	group     *catalog.Group
	partition int64 // 0: any
	claims    []*claim
	hints     []int64
	seen      bool // the statement returned it: its group is alive
	scan      bool // it looks at the whole index
	began     time.Time
	looks     int // of its group then
}

// lists arranges the claims of a flush. Those on single partitions come first, so that they get theirs.
func (e *Engine) lists(claims []*claim, now time.Time) ([]*list, db.ClaimPartitionsParams) {
	p := db.ClaimPartitionsParams{HintLists: []int32{}, HintPartitions: []int64{}, SpanBytes: spanBytes}
	if len(claims) == 0 {
		return nil, p
	}
	type key struct {
		group     int32
		partition int64
	}
	byKey := make(map[key]*list)
	var narrow, wide []*list
	for _, c := range claims {
		c.unpark(now)
		k := key{group: c.group.ID}
		if c.partition != nil {
			k.partition = c.partition.ID
		}
		l := byKey[k]
		if l == nil {
			l = &list{group: c.group, partition: k.partition}
			byKey[k] = l
			if k.partition != 0 {
				narrow = append(narrow, l)
				l.hints = []int64{k.partition}
			} else {
				wide = append(wide, l)
			}
		}
		l.claims = append(l.claims, c)
	}
	all := append(narrow, wide...)
	for i, l := range all {
		no, want := int32(i), int64(0)
		scan := false
		for nth, c := range l.claims {
			parts := min(c.parts, c.budget)
			if c.tries > 0 { // the first candidates had nothing to deliver: look at more
				parts = max(parts, int64(32)<<min(c.tries, 5))
			}
			want = min(want+parts, 10_000)
			scan = scan || c.scan
			if l.partition == 0 {
				l.hints = append(l.hints, c.hints...)
			}
			seconds := c.seconds
			p.SlotNos = append(p.SlotNos, int32(len(p.SlotNos)))
			p.SlotLists = append(p.SlotLists, no)
			p.SlotNths = append(p.SlotNths, int32(nth))
			p.SlotLeases = append(p.SlotLeases, c.lease)
			p.SlotBudgets = append(p.SlotBudgets, c.budget)
			p.SlotParts = append(p.SlotParts, min(c.parts, c.budget))
			p.SlotSeconds = append(p.SlotSeconds, seconds)
			p.SlotAutoAcks = append(p.SlotAutoAcks, c.autoAck)
			p.SlotDiscoveries = append(p.SlotDiscoveries, c.discovery)
			p.SlotConsumers = append(p.SlotConsumers, c.consumer)
		}
		from, indexFirst := -l.partition, false
		if l.partition == 0 {
			from, indexFirst, l.hints = e.park.prepare(l, int(want), scan, now)
		}
		p.ListNos = append(p.ListNos, no)
		p.ListGroups = append(p.ListGroups, l.group.ID)
		p.ListFroms = append(p.ListFroms, from)
		l.scan, l.began, l.looks = scan && l.partition == 0, now, l.claims[0].looks
		p.ListScans = append(p.ListScans, l.scan)
		p.ListIndexFirsts = append(p.ListIndexFirsts, indexFirst)
		p.ListWants = append(p.ListWants, want)
		p.ListSlots = append(p.ListSlots, int32(len(l.claims)))
		p.ListFrames = append(p.ListFrames, !e.park.partial(l.group.ID))
		p.ListLimiteds = append(p.ListLimiteds, l.group.Limited())
		for _, h := range l.hints {
			p.HintLists = append(p.HintLists, no)
			p.HintPartitions = append(p.HintPartitions, h)
		}
	}
	return all, p
}

// deliverClaims answers the claims of a committed flush; those that got nothing park, look again, or end empty.
func (e *Engine) deliverClaims(lists []*list, rows []db.ClaimPartitionsRow) {
	if len(lists) == 0 {
		return
	}
	var slots []*claim
	for _, l := range lists {
		slots = append(slots, l.claims...)
	}
	got := make([][]*Span, len(slots))
	stale := make([]bool, len(lists))
	surplus := make([]int, len(lists)) // candidates with something to deliver
	tails := make(map[int64]int64)
	for i := range rows {
		r := &rows[i]
		l := lists[r.ListNo]
		if !l.seen {
			l.seen = true
			if r.Seen < 0 && !l.group.Limited() {
				e.park.refused(l.group.ID)
			}
			stale[r.ListNo] = r.Stale > 0
			surplus[r.ListNo] = int(r.Seen - r.Stale)
			e.due(r.DueMs)
			if l.partition == 0 {
				e.park.scanned(l.group.ID, r.AboveTo, r.BelowTo)
				if l.scan && r.Seen == 0 {
					e.park.emptied(l.group.ID, l.looks, l.began)
				}
			}
		}
		if r.SlotNo < 0 {
			continue
		}
		c := slots[r.SlotNo]
		spans := got[r.SlotNo]
		if n := len(spans); n == 0 || spans[n-1].Row.ID != r.PartitionID {
			p := e.Catalog.Claimed(l.group.QueueID, r.PartitionID, r.PublicID, r.Name, r.Hidden, r.NextOffset)
			spans = append(spans, &Span{Queue: c.queue, Group: l.group, Partition: p, Row: catalog.Row{ID: r.PartitionID, PublicID: r.PublicID}, Start: r.StartOffset, Take: r.Take, Attempt: r.Attempt, exhausted: r.Exhausted,
				lease: time.Duration(r.LeaseMs) * time.Millisecond})
			got[r.SlotNo] = spans
			if c.autoAck {
				tails[r.PartitionID] = r.NextOffset
			}
		}
		s := spans[len(spans)-1]
		s.Segments = append(s.Segments, Segment{Base: r.BaseOffset, Count: r.Count, KeyNo: r.KeyNo, Codec: r.Codec, OnlyGroup: r.OnlyGroup,
			CreatedAt: r.CreatedAt, FirstID: r.FirstID, Keys: r.Keys, Frames: r.Frames})
	}
	i := 0
	for no, l := range lists {
		full := true
		var taken, rest []int64 // partitions: claimed, and those that still have something for the next
		for _, c := range l.claims {
			spans := got[i]
			i++
			c.looked.Store(true)
			spans, passed := e.passOver(c, spans)
			if passed != nil && len(spans) == 0 { // progress, however often
				e.lookAgain(c, passed)
				continue
			}
			full = full && len(spans) > 0
			switch {
			case len(spans) > 0:
				for _, s := range spans {
					taken = append(taken, s.Row.ID)
					if !c.autoAck {
						e.held.add(c.lease, s)
					} else if s.Start+s.Take < tails[s.Row.ID] {
						rest = append(rest, s.Row.ID)
					}
				}
				e.park.took(l.group.ID, partial(spans))
				c.finish(e, spans, nil)
			case !l.seen:
				c.finish(e, nil, catalog.ErrGone)
			case stale[no] && c.tries < 20:
				// What stood in the way has been put aside: look again.
				c.tries++
				e.boardClaim(c)
			default:
				e.park.idle(c)
			}
		}
		if full && l.partition == 0 { // whoever went without looked at every hint in vain; here some may not have been reached
			for _, h := range l.hints {
				if !slices.Contains(taken, h) {
					rest = append(rest, h)
				}
			}
		}
		for _, partition := range rest {
			e.park.left(l.group, partition)
		}
		if !l.seen {
			e.park.gone(l.group.ID, l.partition)
		}
		if more := surplus[no] - len(taken); more > 0 && l.partition == 0 {
			e.park.lookSome(l.group.ID, more)
		}
	}
}
