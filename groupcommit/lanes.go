package groupcommit

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/db"
)

// Why a settle of a delivery is refused.
var (
	// ErrLeaseLost: the message was delivered again since, or moved on by someone else.
	ErrLeaseLost = errors.New("lease lost")
	// ErrSettled: this delivery was acked or nacked before.
	ErrSettled = errors.New("already settled")
)

// Receive claims at most max messages, each of another lane of a subscription, waiting for them as long as wait.
// Nil: there was nothing, or the broker is draining. When ctx ends first nothing stays leased.
func (e *Engine) Receive(ctx context.Context, g *catalog.Group, max int64, wait time.Duration, consumer string) (*Delivery, error) {
	return e.popGroup(ctx, &Pop{Batch: max, Partitions: max, Wait: wait, consumer: consumer}, nil, g, time.Now().Add(wait))
}

// LaneOf is the hidden lane of a message without a key that brings an id: always the same, or a repeat would not be found.
func (e *Engine) LaneOf(q *catalog.Queue, id string) int32 {
	k := e.Hasher.Key(id)
	return int32(binary.BigEndian.Uint32(k[:]) % uint32(q.IDLanes))
}

// Delivered is one delivery that is settled: where it was, and under which lease.
type Delivered struct {
	Partition int64
	Offset    int64
	Lease     uuid.UUID

	Err   error     // of what became of it
	Until time.Time // of an extend: the new end of its lease
}

// Ack moves the lanes of deliveries past their messages. Each has its own Err.
func (e *Engine) AckLanes(ctx context.Context, g *catalog.Group, ds []*Delivered) error {
	return e.settleLanes(ctx, g, ds, settle{Action: actAck})
}

// NackLanes makes the messages of deliveries come again after delay, or, when that is negative, after what the policy says;
// those that have used up their attempts become dead letters.
func (e *Engine) NackLanes(ctx context.Context, g *catalog.Group, ds []*Delivered, why, signature string, delay time.Duration) error {
	return e.settleLanes(ctx, g, ds, settle{Action: actNack, Error: Clip(why), Signature: signature, Delay: delay})
}

// ReleaseLanes gives the messages of deliveries back at once, as if they had not been delivered.
func (e *Engine) ReleaseLanes(ctx context.Context, g *catalog.Group, ds []*Delivered) error {
	return e.settleLanes(ctx, g, ds, settle{Action: actRelease})
}

func (e *Engine) settleLanes(ctx context.Context, g *catalog.Group, ds []*Delivered, like settle) error {
	lanes, err := e.lanesOf(ctx, g, ds)
	if err != nil {
		return err
	}
	settles := make([]*settle, len(ds))
	pending := make([]int, 0, len(ds))
	for i, d := range ds {
		p := lanes[d.Partition]
		var row *catalog.Row
		if p != nil {
			row = p.Row()
		}
		if row == nil || row.ID != d.Partition {
			d.Err = ErrLeaseLost
			continue
		}
		s := like
		s.group, s.partition, s.row, s.Lease, s.Expected, s.done = g, p, row, d.Lease, d.Offset, make(chan struct{})
		settles[i] = &s
		pending = append(pending, i)
		e.boardSettle(&s)
	}
	var refused []int
	for _, i := range pending {
		s, d := settles[i], ds[i]
		<-s.done
		if s.Err == nil && s.Applied && s.Outcome == outNeedCopy { // its last attempt
			if s.Copy, d.Err = e.copyOf(ctx, e.q, s.row, d.Offset); d.Err != nil {
				continue
			}
			s.Applied, s.done = false, make(chan struct{})
			e.boardSettle(s)
			<-s.done
		}
		if d.Err = s.Err; d.Err == nil && !s.Applied {
			refused = append(refused, i)
		}
	}
	e.explain(ctx, g, ds, refused)
	return nil
}

// explain says why settles of lanes changed nothing. What else the call did stands, also when it cannot find out.
func (e *Engine) explain(ctx context.Context, g *catalog.Group, ds []*Delivered, refused []int) {
	if len(refused) == 0 {
		return
	}
	var ids []int64
	for _, i := range refused {
		e.held.dropLease(g.ID, ds[i].Partition, ds[i].Lease)
		ids = append(ids, ds[i].Partition)
	}
	states, err := e.q.LaneStates(ctx, db.LaneStatesParams{GroupID: g.ID, PartitionIds: ids})
	if err != nil {
		for _, i := range refused {
			ds[i].Err = e.Unavailable(err)
		}
		return
	}
	settled := make(map[int64]uuid.UUID, len(states))
	for _, s := range states {
		settled[s.PartitionID] = s.Settled
	}
	for _, i := range refused {
		d := ds[i]
		d.Err = ErrLeaseLost
		if settled[d.Partition] == d.Lease {
			d.Err = ErrSettled
		}
	}
}

// lanesOf finds the partitions of deliveries, by what was delivered here or in the database; those of other queues are missing.
func (e *Engine) lanesOf(ctx context.Context, g *catalog.Group, ds []*Delivered) (map[int64]*catalog.Partition, error) {
	found := make(map[int64]*catalog.Partition, len(ds))
	var unknown []int64
	for _, d := range ds {
		if p := e.held.partition(g.ID, d.Partition); p != nil {
			found[d.Partition] = p
		} else {
			unknown = append(unknown, d.Partition)
		}
	}
	more, err := e.Catalog.ByID(ctx, g.QueueID, unknown)
	if err != nil {
		return nil, e.Unavailable(err)
	}
	for id, p := range more {
		found[id] = p
	}
	return found, nil
}

// ExtendLanes makes the leases of deliveries end so many seconds from now. What became of each is in it.
func (e *Engine) ExtendLanes(ctx context.Context, g *catalog.Group, ds []*Delivered, seconds int32) {
	extends := make([]*extend, len(ds))
	for i, d := range ds {
		x := &extend{group: g.ID, partition: d.Partition, lease: d.Lease, seconds: seconds, lane: true, limited: g.Limited(), done: make(chan struct{})}
		extends[i] = x
		if !e.dock.enter(uint64(g.ID), func(b *board) { b.extends = append(b.extends, x) }) {
			x.finish(ErrClosed)
		}
	}
	var refused []int
	for i, x := range extends {
		<-x.done
		d := ds[i]
		if d.Err, d.Until = x.err, x.until; d.Err == nil && x.until.IsZero() {
			refused = append(refused, i)
			continue
		}
		e.held.extended(g.ID, d.Partition, time.Now().Add(x.until.Sub(e.Now())))
	}
	e.explain(ctx, g, ds, refused)
}

// passOver takes out of what a claim got what is not to be delivered: messages that were put back for another group, which the cursor
// passes over, and those of lanes whose last attempt ended with its lease, which become dead letters. settled is nil when there
// was nothing of the kind; else it waits for the cursors to be past them.
func (e *Engine) passOver(c *claim, spans []*Span) (kept []*Span, settled *sync.WaitGroup) {
	kept = spans[:0]
	for _, s := range spans {
		had := len(s.Segments)
		s.Segments = slices.DeleteFunc(s.Segments, func(g Segment) bool { return g.OnlyGroup != 0 && g.OnlyGroup != c.group.ID })
		pass := had > 0 && len(s.Segments) == 0
		if !pass && !s.exhausted {
			kept = append(kept, s)
			continue
		}
		if settled == nil {
			settled = &sync.WaitGroup{}
		}
		if c.autoAck { // it is past them already
			continue
		}
		x := &settle{group: s.Group, partition: s.Partition, row: &s.Row, Lease: c.lease, Expected: s.Start, Action: actComplete, MoveTo: s.Start + s.Take, waits: true, done: make(chan struct{})}
		switch {
		case !pass:
			x.Action, x.Error, x.Signature = actExhaust, leaseExpired, leaseExpired
		case c.group.Lanes != nil:
			x.Action = actPass
		}
		e.held.add(c.lease, s)
		settled.Add(1)
		e.sideWork.Add(1)
		go func() {
			defer e.sideWork.Done()
			defer settled.Done()
			if !pass {
				ctx, cancel := context.WithTimeout(context.Background(), e.StatementTimeout)
				defer cancel()
				var err error
				if x.Copy, err = e.copyOf(ctx, e.q, x.row, s.Start); err != nil {
					return // found again when this lease has ended
				}
			}
			e.boardSettle(x)
			<-x.done
		}()
	}
	return kept, settled
}

// lookAgain boards a claim once more when what it passed over is out of the way.
func (e *Engine) lookAgain(c *claim, settled *sync.WaitGroup) {
	e.sideWork.Add(1)
	go func() {
		defer e.sideWork.Done()
		settled.Wait()
		if c.group.Lanes != nil { // what comes next of these lanes was settled by nobody yet
			c.lease = newLease(c.group.ID)
		}
		e.boardClaim(c)
	}()
}

// leaseExpired is the error of an attempt that ended without a word.
const leaseExpired = "lease expired"
