package groupcommit

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/segment"
)

// Status is what an ack says about its message. The order is that of precedence at one offset.
type Status int

// The statuses of an ack.
const (
	Completed Status = iota
	Retry
	Failed
	DeadLetter
)

// Ack is one acknowledgment. TransactionID nil names no message.
type Ack struct {
	TransactionID *string
	Status        Status
	Error         *string
}

// Acks are the acknowledgments of one call for one partition and one lease: they are decided together.
type Acks struct {
	Partition *catalog.Partition // nil: unknown to this project
	Group     string
	Leased    bool // a lease was named; if it is no lease id, Lease is zero
	Lease     uuid.UUID
	Items     []Ack

	Results []Acked
}

// Acked is the outcome of one acknowledgment: accepted when Err is nil.
type Acked struct {
	Err           error
	LeaseReleased bool
	DeadLettered  bool
	AlreadyDone   bool // completed at or below the cursor
}

// Why an acknowledgment is refused.
var (
	ErrNoConsumer   = errors.New("consumer not found")
	ErrLease        = errors.New("invalid or expired lease")
	ErrCommitted    = errors.New("already committed: the cursor moved past this message before this ack")
	ErrUnresolvable = errors.New("unresolvable: transaction not in the ack window (hash purged or never pushed); if leased, the message redelivers")
	ErrNoBatch      = errors.New("no leased batch")
	ErrDeadRejected = errors.New("dlq rejected")
)

// ackWindow is how many offsets around the cursor an id is looked for.
const ackWindow = 10_000

// Ack decides the acknowledgments of one call. The groups are independent of each other: what each became is in its Results.
// An error of the database is in the Results of the group it hit.
func (e *Engine) Ack(ctx context.Context, groups []*Acks) {
	var all sync.WaitGroup
	for _, a := range groups[1:] {
		all.Add(1)
		go func() { defer all.Done(); e.ack(ctx, a) }()
	}
	e.ack(ctx, groups[0])
	all.Wait()
}

func (a *Acks) fail(err error) {
	a.Results = make([]Acked, len(a.Items))
	for i := range a.Results {
		a.Results[i].Err = err
	}
}

// cursor is where a (group, partition) stands when acks are decided on it.
type cursor struct {
	committed int64
	end       int64 // of the leased batch, live or not; -1: there is none
	parts     []keyed
	below     bool // parts reach below committed
}

func (e *Engine) ack(ctx context.Context, a *Acks) {
	var row *catalog.Row
	if a.Partition != nil {
		row = a.Partition.Row()
	}
	if row == nil {
		a.fail(ErrNoConsumer)
		return
	}
	g, err := e.Catalog.Group(ctx, a.Partition.QueueID, a.Group)
	if err != nil {
		a.fail(e.Unavailable(err))
		return
	}
	if g == nil {
		a.fail(ErrNoConsumer)
		return
	}
	var dead *deadCopy
	for tries := 0; tries < 20; tries++ {
		var c *cursor
		if a.Leased && tries == 0 {
			if h, ok := e.held.get(g.ID, row.ID, a.Lease); ok {
				c = &cursor{committed: h.committed, end: h.end, parts: h.parts}
			}
		}
		if c == nil {
			if c, err = e.readCursor(ctx, a, &g, row); err != nil {
				a.fail(err)
				return
			}
		}
		v, sure := a.decide(e.Hasher, c)
		if !sure { // an id outside of the leased span: only the database knows
			if c, err = e.readCursor(ctx, a, &g, row); err != nil {
				a.fail(err)
				return
			}
			v, _ = a.decide(e.Hasher, c)
		}
		if v == nil {
			return
		}
		s := &settle{group: g, partition: a.Partition, row: row, Expected: c.committed, Action: v.action, MoveTo: v.moveTo, FailedAt: v.failedAt, Error: v.error, waits: tries > 0, done: make(chan struct{})}
		if a.Leased {
			s.Lease = a.Lease
		}
		if v.signal >= 0 && (v.action == actDeadLetter && c.end >= 0 || dead != nil) {
			if dead, err = e.copyOf(ctx, e.q, row, v.failedAt); err != nil {
				a.fail(err)
				return
			}
			s.Copy = dead
		}
		e.boardSettle(s)
		<-s.done
		switch {
		case s.Err != nil:
			a.fail(s.Err)
			return
		case !s.Applied:
			e.held.drop(g.ID, row.ID) // it is not as remembered
			continue
		case s.Outcome == outNeedCopy:
			if dead, err = e.copyOf(ctx, e.q, row, v.failedAt); err != nil {
				a.fail(err)
				return
			}
			continue
		}
		a.report(v, s)
		return
	}
	a.fail(errors.New("the cursor keeps moving"))
}

// verdict is what the acks of a group mean together.
type verdict struct {
	action   int32
	moveTo   int64
	failedAt int64
	error    string
	signal   int // the item that decided, or -1
}

// decide resolves the ids and applies the rules: the lowest offset that is not completed is the signal, the cursor goes up to
// the highest completed offset below it. nil: nothing changes, Results say why. Not sure: an id has to be looked for in the database.
func (a *Acks) decide(h segment.Hasher, c *cursor) (v *verdict, sure bool) {
	a.Results = make([]Acked, len(a.Items))
	above := finder{hasher: h, parts: c.parts, from: c.committed, to: c.committed + ackWindow}
	if c.end >= 0 {
		above.to = c.end
	}
	beyond := finder{hasher: h, parts: c.parts, from: above.to, to: c.committed + ackWindow}
	below := finder{hasher: h, parts: c.parts, from: max(c.committed-ackWindow, 0), to: c.committed}

	v = &verdict{moveTo: c.committed, failedAt: -1, signal: -1}
	offsets := make([]int64, len(a.Items))
	accepted := false
	for i := range a.Items {
		it := &a.Items[i]
		offsets[i] = -1
		if it.TransactionID == nil {
			a.Results[i].Err = ErrUnresolvable
			if !c.below {
				return nil, false // the lease still has to be judged by the database
			}
			continue
		}
		offset, ok := above.next(*it.TransactionID)
		if !ok {
			if !c.below {
				return nil, false
			}
			if offset, ok = beyond.next(*it.TransactionID); !ok {
				// Mentioned more often than it occurs: the same message again.
				if offset, ok = above.seen[*it.TransactionID]; !ok {
					offset, ok = beyond.seen[*it.TransactionID]
				}
			}
			if !ok {
				if _, under := below.next(*it.TransactionID); !under {
					a.Results[i].Err = ErrUnresolvable
				} else if it.Status == Completed {
					a.Results[i].AlreadyDone = true
				} else {
					a.Results[i].Err = ErrCommitted
				}
				continue
			}
		}
		offsets[i], accepted = offset, true
		if it.Status != Completed && (v.signal < 0 || offset < offsets[v.signal] || (offset == offsets[v.signal] && it.Status > a.Items[v.signal].Status)) {
			v.signal = i
		}
	}
	if !accepted {
		return nil, true
	}
	limit := int64(1<<63 - 1)
	if v.signal >= 0 {
		limit = offsets[v.signal]
		v.failedAt = limit
		switch a.Items[v.signal].Status {
		case Failed:
			v.action = actFailed
		case Retry:
			v.action = actRetry
		case DeadLetter:
			v.action = actDeadLetter
		}
		v.error = a.errorText(v.signal)
	}
	for i, o := range offsets {
		if o >= 0 && o < limit && a.Items[i].Status == Completed {
			v.moveTo = max(v.moveTo, o+1)
		}
	}
	if v.signal < 0 {
		v.moveTo = c.next(v.moveTo)
	}
	return v, true
}

// next is the first offset of the leased batch from at on that holds a message for this group, or its end: whoever has completed all
// that was delivered to him has completed the batch, also when a message that was put back for another group ends it.
func (c *cursor) next(at int64) int64 {
	if at >= c.end {
		return at
	}
	for _, p := range c.parts {
		if p.base+int64(p.count) > at {
			return min(max(p.base, at), c.end)
		}
	}
	return c.end
}

// maxError is how much of an error's text is kept.
const maxError = 4 << 10

// errorText is the error a dead letter gets: the item's, else the first one a nack of the group brought.
func (a *Acks) errorText(signal int) string {
	if t := a.Items[signal].Error; t != nil {
		return Clip(*t)
	}
	for i := range a.Items {
		if t := a.Items[i].Error; t != nil && a.Items[i].Status != Completed {
			return Clip(*t)
		}
	}
	return "Retries exhausted"
}

// Clip is what is kept of an error's text: it drops NUL, which PostgreSQL's text cannot hold, and cuts at a rune boundary.
func Clip(s string) string {
	s = strings.ReplaceAll(s, "\x00", "")
	if n := maxError; len(s) > n {
		for n > 0 && !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	return s
}

func (a *Acks) report(v *verdict, s *settle) {
	for i := range a.Results {
		r := &a.Results[i]
		if r.Err != nil {
			continue
		}
		r.LeaseReleased = s.Released
		if i == v.signal {
			r.DeadLettered = s.Outcome == outFiled
			if s.Outcome == outNoBatch {
				*r = Acked{Err: ErrNoBatch}
			}
		}
	}
}

// readCursor is the slow way to what acks are decided on: after a restart, on another broker, or for ids outside of the leased span.
// It judges the lease too, so that nothing needs to be settled when it is over. A group that was deleted and made again is replaced.
func (e *Engine) readCursor(ctx context.Context, a *Acks, g **catalog.Group, row *catalog.Row) (*cursor, error) {
	r, err := e.q.CursorGet(ctx, db.CursorGetParams{GroupID: (*g).ID, PartitionID: row.ID})
	if errors.Is(err, pgx.ErrNoRows) {
		e.Catalog.ForgetGroup((*g).QueueID, (*g).Name)
		again, err := e.Catalog.Group(ctx, (*g).QueueID, (*g).Name)
		if err != nil {
			return nil, e.Unavailable(err)
		}
		if again == nil || again.ID == (*g).ID {
			return nil, ErrNoConsumer
		}
		*g = again
		return e.readCursor(ctx, a, g, row)
	}
	if err != nil {
		return nil, e.Unavailable(err)
	}
	if a.Leased && (!r.Live || r.LeaseID == nil || *r.LeaseID != a.Lease) {
		return nil, ErrLease
	}
	c := cursorAt(r)
	if err := c.read(ctx, e.q, row, 1<<63-1); err != nil {
		return nil, e.Unavailable(err)
	}
	return c, nil
}

func cursorAt(r db.CursorGetRow) *cursor {
	c := &cursor{committed: r.Committed, end: -1}
	if r.BatchEnd != nil {
		c.end = *r.BatchEnd
	}
	return c
}

// read fetches the ids around a cursor, of messages below tail.
func (c *cursor) read(ctx context.Context, q *db.Queries, row *catalog.Row, tail int64) error {
	rows, err := q.SegmentKeysAt(ctx, db.SegmentKeysAtParams{PartitionID: row.ID, FromOffset: max(c.committed-ackWindow, 0),
		ToOffset: min(max(c.committed+ackWindow, c.end), tail)})
	if err != nil {
		return err
	}
	c.parts, c.below = c.parts[:0:0], true
	for i := len(rows) - 1; i >= 0; i-- {
		c.parts = append(c.parts, keyed{base: rows[i].BaseOffset, count: int(rows[i].Count), first: rows[i].FirstID, keys: rows[i].Keys})
	}
	return nil
}

// copyOf makes the copy of one message that a dead letter keeps.
func (e *Engine) copyOf(ctx context.Context, q *db.Queries, row *catalog.Row, offset int64) (*deadCopy, error) {
	s, err := q.SegmentAt(ctx, db.SegmentAtParams{PartitionID: row.ID, AtOffset: offset})
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, e.Unavailable(err)
	}
	i := int(offset - s.BaseOffset)
	if err != nil || i >= int(s.Count) {
		return nil, ErrDeadRejected // retention was faster
	}
	if s.Secret && e.Keys == nil {
		return nil, ErrDeadRejected
	}
	d, err := segment.Decode(e.Keys, s.Codec, s.KeyNo, s.FirstID, int(s.Count), s.Frames)
	if err != nil {
		e.Log.Error("a message cannot be copied to the dead letters", "partition", row.PublicID, "offset", offset, "error", db.Text(err))
		return nil, ErrDeadRejected
	}
	m := d.At(i)
	b := segment.NewBuilder(e.Hasher)
	b.Append(&m)
	c := &deadCopy{id: segment.NewFirstID(time.Now()), messageID: d.ID(i), transactionID: string(d.AppendTransactionID(nil, i)), createdAt: s.CreatedAt}
	rnd := uuid.New()
	copy(c.id[13:], rnd[:3])
	var keys *segment.Keys
	if s.Secret {
		keys = e.Keys
	}
	c.codec, c.keyNo, c.frames = b.Seal([]byte{}, keys, c.messageID)
	return c, nil
}

// Extend makes every live lease with that id last at least so many seconds from now. It returns how many there were and
// the earliest new end.
func (e *Engine) Extend(ctx context.Context, lease uuid.UUID, seconds int32) (renewed int, until time.Time, err error) {
	cursors := e.held.cursors(lease)
	if len(cursors) == 0 {
		found, err := e.q.LeaseFind(ctx, db.LeaseFindParams{ProjectID: e.Project, LeaseID: lease, GroupID: LeaseGroup(lease)})
		if err != nil {
			return 0, time.Time{}, e.Unavailable(err)
		}
		for _, f := range found {
			cursors = append(cursors, cursorKey{f.GroupID, f.PartitionID})
		}
	}
	extends := make([]*extend, len(cursors))
	for i, c := range cursors {
		x := &extend{group: c.group, partition: c.partition, lease: lease, seconds: seconds, done: make(chan struct{})}
		extends[i] = x
		if !e.dock.enter(uint64(c.group), func(b *board) { b.extends = append(b.extends, x) }) {
			x.finish(ErrClosed)
		}
	}
	for i, x := range extends {
		<-x.done
		if x.err != nil {
			if err == nil || errors.Is(err, ErrNoConnection) {
				err = x.err
			}
			continue
		}
		if x.until.IsZero() {
			continue
		}
		e.held.extended(cursors[i].group, cursors[i].partition, time.Now().Add(x.until.Sub(e.Now())))
		if renewed++; until.IsZero() || x.until.Before(until) {
			until = x.until
		}
	}
	if err != nil {
		if renewed > 0 && errors.Is(err, ErrNoConnection) {
			err = ErrUnknown // that one would say that nothing happened
		}
		return 0, time.Time{}, err
	}
	return renewed, until, nil
}
