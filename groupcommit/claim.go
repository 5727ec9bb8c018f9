package groupcommit

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/metrics"
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
	claimed   time.Time // by the database's clock: no later than the cursor was taken
	began     time.Time // the same by this broker's
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
	scan     bool    // look at the index, not only at hints
	thorough bool    // a look at its hint alone was in vain
	hints    []int64 // partitions to look at first
	tries    int
	looks    int // of its group, when it set out
	bulk     int // the same

	looked atomic.Bool // it was on a flush that succeeded
	sent   atomic.Bool // it was on a flush that went to the database

	parkedAt time.Time // zero: it is not parked
	admitted bool      // it has been parked: however often it leaves to look, nobody takes its place
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
		return
	}
	for _, s := range spans {
		e.Metrics.Flow(s.Group.Project, s.Group.QueueID, s.Group.ID, metrics.Delivered, s.Take)
		if c.autoAck {
			e.Metrics.Flow(s.Group.Project, s.Group.QueueID, s.Group.ID, metrics.Done, s.Take)
		}
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

// giveBack ends the leases of spans that nobody received: they can be claimed again at once, or, those that rest, after a while.
// What it returns is closed as it happens.
func (e *Engine) giveBack(c *claim, spans, rest []*Span) (done []chan struct{}) {
	for _, s := range spans {
		end, rests := make(chan struct{}), slices.Contains(rest, s)
		done = append(done, end)
		e.held.drop(s.Group.ID, s.Row.ID)
		if c.autoAck {
			r := &restore{queue: s.Queue.ID, group: s.Group.ID, partition: s.Row.ID, start: s.Start, end: s.Start + s.Take, claimed: s.claimed, rest: rests,
				lane: s.Partition.Lane, done: end}
			e.boardRestore(r)
			continue
		}
		x := &settle{group: s.Group, partition: s.Partition, row: &s.Row, Lease: c.lease, Expected: s.Start, Action: actGiveBack, MoveTo: s.Start, done: end}
		switch {
		case c.group.Lanes != nil:
			x.Action = actRelease
			if rests {
				x.Delay = unreadableRest
			}
		case rests:
			x.Action = actRest
		}
		e.boardSettle(x)
	}
	return done
}

// unreadableRest is how long a lane whose message cannot be decoded is left alone. Of other cursors the statements say it.
const unreadableRest = 5 * time.Second

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
	group      *catalog.Group
	partition  int64 // 0: any
	claims     []*claim
	hints      []int64
	want       int64 // how many partitions
	from       int64 // where the look at the index begins
	scan       bool  // it looks at the whole index
	indexFirst bool  // before the hints
	seen       bool  // the statement returned it: its group is alive
	began      time.Time
	looks      int // of its group then
}

// lists arranges the claims of a flush. Those on single partitions come first, so that they get theirs. quick are of the claims that
// ClaimHinted serves, each with one hint.
func (e *Engine) lists(claims []*claim, now time.Time) (lists, quick []*list) {
	byKey := make(map[cursorKey]*list)
	var narrow, wide []*list
	for _, c := range claims {
		c.unpark(now)
		k := cursorKey{group: c.group.ID}
		if c.partition != nil {
			k.partition = c.partition.ID
		}
		l := byKey[k]
		if l == nil {
			l = &list{group: c.group, partition: k.partition, began: now}
			byKey[k] = l
			if k.partition != 0 {
				narrow = append(narrow, l)
			} else {
				wide = append(wide, l)
			}
		}
		l.claims = append(l.claims, c)
	}
	taken := make(map[cursorKey]bool)
	for _, l := range append(narrow, wide...) {
		if q := e.park.arrange(l, taken, now); q != nil {
			quick = append(quick, q)
		}
		if len(l.claims) > 0 {
			lists = append(lists, l)
		}
	}
	return lists, quick
}

// claimParams is the arguments for lists.
func (e *Engine) claimParams(lists []*list) db.ClaimPartitionsParams {
	p := db.ClaimPartitionsParams{HintLists: []int32{}, HintPartitions: []int64{}, SpanBytes: spanBytes}
	for i, l := range lists {
		no := int32(i)
		for nth, c := range l.claims {
			p.SlotNos = append(p.SlotNos, int32(len(p.SlotNos)))
			p.SlotLists = append(p.SlotLists, no)
			p.SlotNths = append(p.SlotNths, int32(nth))
			p.SlotLeases = append(p.SlotLeases, c.lease)
			p.SlotBudgets = append(p.SlotBudgets, c.budget)
			p.SlotParts = append(p.SlotParts, min(c.parts, c.budget))
			p.SlotSeconds = append(p.SlotSeconds, c.seconds)
			p.SlotAutoAcks = append(p.SlotAutoAcks, c.autoAck)
			p.SlotDiscoveries = append(p.SlotDiscoveries, c.discovery)
			p.SlotConsumers = append(p.SlotConsumers, c.consumer)
		}
		p.ListNos = append(p.ListNos, no)
		p.ListGroups = append(p.ListGroups, l.group.ID)
		p.ListFroms = append(p.ListFroms, l.from)
		p.ListScans = append(p.ListScans, l.scan)
		p.ListIndexFirsts = append(p.ListIndexFirsts, l.indexFirst)
		p.ListWants = append(p.ListWants, l.want)
		p.ListSlots = append(p.ListSlots, int32(len(l.claims)))
		p.ListFrames = append(p.ListFrames, !e.park.partial(l.group.ID))
		p.ListLimiteds = append(p.ListLimiteds, l.group.Limited())
		for _, h := range l.hints {
			p.HintLists = append(p.HintLists, no)
			p.HintPartitions = append(p.HintPartitions, h)
		}
	}
	return p
}

// hintedParams is the arguments for quick lists.
func (e *Engine) hintedParams(quick []*list) db.ClaimHintedParams {
	p := db.ClaimHintedParams{SpanBytes: spanBytes}
	for _, l := range quick {
		frames := !e.park.partial(l.group.ID)
		for i, c := range l.claims {
			p.SlotNos = append(p.SlotNos, int32(len(p.SlotNos)))
			p.Groups = append(p.Groups, l.group.ID)
			p.Partitions = append(p.Partitions, l.hints[i])
			p.Leases = append(p.Leases, c.lease)
			p.Budgets = append(p.Budgets, c.budget)
			p.Seconds = append(p.Seconds, c.seconds)
			p.AutoAcks = append(p.AutoAcks, c.autoAck)
			p.Frames = append(p.Frames, frames)
		}
	}
	return p
}

// quick says whether ClaimHinted may serve the claim, once it has a hint. The statement judges the group and the queue again.
func (c *claim) quick() bool {
	return !c.thorough && min(c.parts, c.budget) == 1 && !c.discovery && c.group.Lanes == nil && c.queue.DelayedProcessing == 0 && c.queue.WindowBuffer == 0
}

// deliverHinted answers the claims of quick lists. One that got nothing looks again, thoroughly, or, if it was woken by a
// hint that somebody else followed, parks again.
func (e *Engine) deliverHinted(quick []*list, rows []db.ClaimHintedRow) {
	no := int32(0)
	for _, l := range quick {
		for _, c := range l.claims {
			var spans []*Span
			var tail int64
			for ; len(rows) > 0 && rows[0].SlotNo == no; rows = rows[1:] {
				r := &rows[0]
				if len(spans) == 0 {
					p := e.Catalog.Claimed(l.group.Project, l.group.QueueID, r.PartitionID, r.PublicID, r.Name, r.Hidden, r.NextOffset)
					spans = append(spans, &Span{Queue: c.queue, Group: l.group, Partition: p, Row: catalog.Row{ID: r.PartitionID, PublicID: r.PublicID}, Start: r.StartOffset, Take: r.Take,
						lease: time.Duration(r.LeaseMs) * time.Millisecond, claimed: r.ClaimedAt, began: l.began})
					tail = r.NextOffset
				}
				s := spans[0]
				s.Segments = append(s.Segments, Segment{Base: r.BaseOffset, Count: r.Count, KeyNo: r.KeyNo, Codec: r.Codec, OnlyGroup: r.OnlyGroup,
					CreatedAt: r.CreatedAt, FirstID: r.FirstID, Keys: r.Keys, Frames: r.Frames})
			}
			no++
			c.looked.Store(true)
			spans, passed := e.passOver(c, spans)
			switch {
			case passed != nil && len(spans) == 0: // progress, however often
				e.lookAgain(c, passed)
			case len(spans) > 0:
				s := spans[0]
				if !c.autoAck {
					e.held.add(c.lease, s)
				}
				e.park.took(l.group.ID, partial(spans))
				c.finish(e, spans, nil)
				if c.autoAck && s.Start+s.Take < tail {
					e.park.left(l.group, s.Row.ID)
				}
			case c.scan || c.partition != nil: // the group may be gone, or the cursor is to be put aside
				c.thorough, c.hints = true, nil
				e.boardClaim(c)
			default:
				e.park.idle(c)
			}
		}
	}
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
	var now time.Time // of the transaction, in the first row of every list
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
			now = r.CreatedAt
			continue
		}
		c := slots[r.SlotNo]
		spans := got[r.SlotNo]
		if n := len(spans); n == 0 || spans[n-1].Row.ID != r.PartitionID {
			p := e.Catalog.Claimed(l.group.Project, l.group.QueueID, r.PartitionID, r.PublicID, r.Name, r.Hidden, r.NextOffset)
			spans = append(spans, &Span{Queue: c.queue, Group: l.group, Partition: p, Row: catalog.Row{ID: r.PartitionID, PublicID: r.PublicID}, Start: r.StartOffset, Take: r.Take, Attempt: r.Attempt, exhausted: r.Exhausted,
				lease: time.Duration(r.LeaseMs) * time.Millisecond, claimed: now, began: l.began})
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
				if !c.autoAck {
					e.held.add(c.lease, spans...)
				}
				for _, s := range spans {
					taken = append(taken, s.Row.ID)
					if c.autoAck && s.Start+s.Take < tails[s.Row.ID] {
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
