package groupcommit

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/segment"
)

const (
	moveMessages = 1000    // that one transaction moves
	moveBytes    = 8 << 20 // of them, unless one message alone is larger

	moveLockTimeout = time.Second            // that a move waits for a partition
	moveRest        = 5 * time.Second        // of a key that cannot be moved
	moveBusy        = 250 * time.Millisecond // until the next look when another broker moves
)

var (
	// errElsewhere: another broker is moving messages.
	errElsewhere = errors.New("another broker moves")
	// errBlocked: somebody holds a lock for long.
	errBlocked = errors.New("its partition is locked")
)

// Scheduled is a message of a stream that is to be appended to its key later.
type Scheduled struct {
	Key     *string // nil: none
	Delay   time.Duration
	Message segment.Message
}

// Schedule stores delayed messages of one stream, all or none, and returns their numbers. Each is appended to its key when it is due, as
// if it had been published at that moment. catalog.ErrGone: the stream was deleted.
func (e *Engine) Schedule(ctx context.Context, q *catalog.Queue, all []Scheduled) ([]int64, error) {
	var keys *segment.Keys
	if q.EncryptionEnabled {
		if keys = e.Keys; keys == nil {
			return nil, ErrNoKey
		}
	}
	p := db.OutboxAddParams{QueueID: q.ID}
	b := segment.NewBuilder(e.Hasher)
	soonest := all[0].Delay
	for i := range all {
		m := &all[i]
		b.Reset()
		b.Append(&m.Message)
		first := segment.NewFirstID(time.Now())
		codec, keyNo, frames := b.Seal(nil, keys, first)
		key := ""
		if m.Key != nil {
			key = *m.Key
		}
		p.Keys, p.Delays = append(p.Keys, key), append(p.Delays, m.Delay.Microseconds())
		p.KeyNos, p.Codecs, p.FirstIds, p.Frames = append(p.KeyNos, keyNo), append(p.Codecs, codec), append(p.FirstIds, first), append(p.Frames, frames)
		soonest = min(soonest, m.Delay)
	}
	ids, err := e.q.OutboxAdd(ctx, p)
	if err != nil {
		return nil, e.Unavailable(err)
	}
	if len(ids) < len(all) {
		return nil, catalog.ErrGone
	}
	slices.Sort(ids)
	e.moveIn(soonest)
	return ids, nil
}

// mover moves what is in the outbox to its partitions.
type mover struct {
	kick   chan time.Duration
	paused atomic.Bool
	peers  atomic.Int32 // other brokers that look too

	// Of the loop alone.
	rest map[place]time.Time // keys that could not be moved, and until when they are left alone
	turn int32               // of unkeyed messages over the hidden lanes
}

// place is a key of a stream, or all of its unkeyed messages.
type place struct {
	project     int32
	stream, key string
}

// placeOf is the key that a row is bound for.
func placeOf(r *db.OutboxPeekRow) place {
	k := place{project: r.ProjectID, stream: r.Stream}
	if r.Key != nil {
		k.key = *r.Key
	}
	return k
}

// LookOutbox makes the engine look at the outbox: something was published from a transaction.
func (e *Engine) LookOutbox() { e.moveIn(0) }

// PauseMoves leaves the outbox alone until it is switched off.
func (e *Engine) PauseMoves(on bool) {
	if e.mover.paused.Swap(on) && !on {
		e.moveIn(0)
	}
}

// SetPeers says how many other brokers are alive: together they look at the outbox about once a second, besides what they are told.
func (e *Engine) SetPeers(n int64) { e.mover.peers.Store(int32(min(n, 30))) }

func (e *Engine) moveIn(d time.Duration) {
	select {
	case e.mover.kick <- d:
	default: // it looks soon
	}
}

// moveLoop looks at the outbox when it is told to, when a message is due, and every now and then.
func (e *Engine) moveLoop() {
	defer e.workers.Done()
	timer := time.NewTimer(0)
	defer timer.Stop()
	at := time.Now()
	for {
		select {
		case <-e.stop.Done():
			return
		case d := <-e.mover.kick:
			if t := time.Now().Add(d); t.Before(at) {
				at = t
				timer.Reset(d)
			}
			continue
		case <-timer.C:
		}
		next := time.Duration(1+e.mover.peers.Load()) * time.Second
		if !e.mover.paused.Load() {
			next = min(next, e.move())
		}
		at = time.Now().Add(next)
		timer.Reset(next)
	}
}

// move moves what is due until nothing is, and returns when to look again.
func (e *Engine) move() time.Duration {
	const later = time.Second
	for tries := 0; tries < maxTries && e.stop.Err() == nil && !e.mover.paused.Load(); {
		ctx, cancel := context.WithTimeout(e.stop, e.StatementTimeout)
		wait, err := e.moveSome(ctx)
		cancel()
		switch {
		case err == nil && wait > 0:
			return wait
		case err == nil:
			tries = 0
		case errors.Is(err, errMoved), errors.Is(err, ErrUnknown):
			tries++
		case errors.Is(err, errElsewhere):
			return moveBusy
		default:
			if e.stop.Err() == nil && !errors.Is(err, ErrNoConnection) && !db.IsConnection(err) {
				e.Log.Warn("moving messages of the outbox failed, trying again", "error", db.Text(err))
			}
			return later
		}
	}
	return later
}

// moveSome moves as much as one transaction may. There is nothing more to move for so long as it returns.
func (e *Engine) moveSome(ctx context.Context) (wait time.Duration, err error) {
	next, err := e.q.OutboxNext(ctx)
	switch {
	case err != nil:
		return 0, err
	case !next.Waiting && next.DueMs < 0:
		return time.Hour, nil
	case !next.Waiting && next.DueMs > 0:
		return time.Duration(next.DueMs) * time.Millisecond, nil
	}
	rows, err := e.q.OutboxPeek(ctx, e.mover.resting())
	if err == nil && len(rows) == 0 { // what waits is resting, or somebody has just moved it
		return moveBusy, nil
	}
	if err != nil {
		return 0, err
	}
	return 0, e.moveRows(ctx, rows)
}

// resting is what to look for. What has rested long enough is looked at again.
func (m *mover) resting() db.OutboxPeekParams {
	p := db.OutboxPeekParams{RestProjects: []int32{}, RestStreams: []string{}, RestKeys: []string{}, Max: moveMessages, Bytes: moveBytes}
	for k, until := range m.rest {
		if time.Now().After(until) {
			delete(m.rest, k)
			continue
		}
		p.RestProjects, p.RestStreams, p.RestKeys = append(p.RestProjects, k.project), append(p.RestStreams, k.stream), append(p.RestKeys, k.key)
	}
	return p
}

// letRest lets the key of a row rest. Nothing of it is moved meanwhile, or it would be overtaken.
func (e *Engine) letRest(r *db.OutboxPeekRow, why error) {
	e.Log.Error("messages of the outbox cannot be moved, trying again later", "stream", r.Stream, "error", db.Text(why))
	if e.mover.rest == nil {
		e.mover.rest = make(map[place]time.Time)
	}
	e.mover.rest[placeOf(r)] = time.Now().Add(moveRest)
}

// load is the messages of a move for one partition, in order.
type load struct {
	queue     *catalog.Queue
	partition *catalog.Partition
	rows      []*db.OutboxPeekRow
	messages  []segment.Message
}

// moveRows moves rows that were looked at.
func (e *Engine) moveRows(ctx context.Context, rows []db.OutboxPeekRow) error {
	loads, dropped, err := e.sort(ctx, rows)
	if err != nil {
		return e.Unavailable(err)
	}
	if len(dropped) > 0 {
		if err := e.q.OutboxDrop(ctx, db.OutboxDropParams{Ids: dropped}); err != nil {
			return e.Unavailable(err)
		}
	}
	if len(loads) == 0 {
		return nil
	}
	return e.moveLoads(loads)
}

// bound are the messages of a move for one stream.
type bound struct {
	queue *catalog.Queue         // nil: its project was deleted
	rows  [2][]*db.OutboxPeekRow // those with a key, and those without
	what  [2][]segment.Message
	keys  []string // of those with one
	lanes []int32  // of those without
}

// sort resolves where rows go. Dropped are those of deleted streams and projects.
func (e *Engine) sort(ctx context.Context, rows []db.OutboxPeekRow) (loads []*load, dropped []int64, err error) {
	streams := make(map[place]*bound)
	left := make(map[place]bool)
	for i := range rows {
		r := &rows[i]
		key := placeOf(r)
		if left[key] {
			continue
		}
		if r.Gone {
			dropped = append(dropped, r.ID)
			continue
		}
		c, name := e.Catalog.Of(r.ProjectID), place{project: r.ProjectID, stream: r.Stream}
		to := streams[name]
		if to == nil {
			to = &bound{}
			streams[name] = to
			if to.queue, err = c.EnsureStream(ctx, r.Stream); err != nil && !errors.Is(err, catalog.ErrNoProject) {
				return nil, nil, err
			}
		}
		if to.queue == nil {
			dropped = append(dropped, r.ID)
			continue
		}
		if r.QueueID != nil && *r.QueueID != to.queue.ID { // one of the two was deleted since
			c.ForgetQueue(r.Stream)
			return nil, nil, errMoved
		}
		m, err := e.messageOf(r)
		if to.queue.EncryptionEnabled && e.Keys == nil {
			err = ErrNoKey
		}
		if err != nil {
			e.letRest(r, err)
			left[key] = true
			continue
		}
		n := 0
		if r.Key != nil {
			to.keys = append(to.keys, *r.Key)
		} else {
			n = 1
			lane := e.mover.turn % to.queue.UnkeyedLanes
			if e.mover.turn = lane + 1; m.TransactionID != "" {
				lane = e.LaneOf(to.queue, m.TransactionID)
			}
			to.lanes = append(to.lanes, lane)
		}
		to.rows[n], to.what[n] = append(to.rows[n], r), append(to.what[n], m)
	}
	byPartition := make(map[partitionKey]*load)
	for name, to := range streams {
		if to.queue == nil {
			continue
		}
		c := e.Catalog.Of(name.project)
		named, err := c.Partitions(ctx, to.queue, to.keys)
		if err != nil {
			return nil, nil, err
		}
		hidden, err := c.Unkeyed(ctx, to.queue, to.lanes)
		if err != nil {
			return nil, nil, err
		}
		for n, found := range [][]*catalog.Partition{named, hidden} {
			for i, p := range found {
				l := byPartition[keyOf(p)]
				if l == nil {
					l = &load{queue: to.queue, partition: p}
					byPartition[keyOf(p)] = l
					loads = append(loads, l)
				}
				l.rows, l.messages = append(l.rows, to.rows[n][i]), append(l.messages, to.what[n][i])
			}
		}
	}
	return loads, dropped, nil
}

// messageOf is the message of a row.
func (e *Engine) messageOf(r *db.OutboxPeekRow) (m segment.Message, err error) {
	if r.Payload != nil {
		m.Payload = []byte(*r.Payload)
		if r.Headers != nil {
			m.Headers = []byte(*r.Headers)
		}
		if r.MessageID != nil {
			m.TransactionID = *r.MessageID
		}
		return m, nil
	}
	open, err := segment.Decode(e.Keys, *r.Codec, *r.KeyNo, *r.FirstID, 1, r.Frames)
	if err != nil {
		return m, err
	}
	return open.At(0), nil
}

// moveLoads moves all of them in one transaction, or, when that fails, each half for itself: one that cannot be moved holds up no other.
func (e *Engine) moveLoads(loads []*load) error {
	m := &moving{cargo: cargo{e: e}, loads: loads}
	for _, l := range loads {
		m.pushes = append(m.pushes, m.load(l.queue, l.partition, l.messages))
		for _, r := range l.rows {
			m.ids = append(m.ids, r.ID)
		}
	}
	if len(loads) > 1 {
		e.transact.Store(time.Now().Unix()) // it locks partitions in order
	}
	err := e.patiently(moveLockTimeout, m.run)
	switch {
	case err == nil:
		m.remember()
		m.announce()
		return nil
	case errors.Is(err, errMoved):
		m.forget()
		for _, l := range loads {
			e.Catalog.Of(l.queue.ProjectID).ForgetQueue(l.queue.Name)
		}
		return err
	case errors.Is(err, errElsewhere), errors.Is(err, ErrNoConnection), errors.Is(err, ErrUnknown):
		return err
	case len(loads) == 1:
		e.letRest(loads[0].rows[0], err)
		return nil
	}
	if err := e.moveLoads(loads[:len(loads)/2]); err != nil {
		return err
	}
	return e.moveLoads(loads[len(loads)/2:])
}

// moving is one transaction that moves messages.
type moving struct {
	cargo
	loads  []*load
	pushes []*Push // of loads
	ids    []int64
}

// run is the transaction. It may run more than once. What was looked at before is still all there is of its keys: whatever was committed
// before the last of these rows was written had been seen too, and nobody else has moved it if the rows are there.
func (m *moving) run(ctx context.Context, q *db.Queries) error {
	err := m.steps(ctx, q)
	if db.IsLockTimeout(err) { // it is not worth waiting for
		return errBlocked
	}
	return err
}

func (m *moving) steps(ctx context.Context, q *db.Queries) error {
	claimed, err := q.OutboxClaim(ctx)
	if err != nil {
		return err
	}
	if len(claimed) == 0 {
		return errElsewhere
	}
	locked, err := q.OutboxLock(ctx, db.OutboxLockParams{Ids: m.ids})
	if err != nil {
		return err
	}
	if len(locked) < len(m.ids) {
		return errMoved
	}
	if err := m.lock(ctx, q); err != nil {
		return err
	}
	for _, n := range m.entries {
		if n.known = nil; !n.windowed() {
			continue
		}
		if err := m.e.catchUp(ctx, q, n, m.tails[n.row.ID]); err != nil {
			return err
		}
		if n.known, err = m.e.confirm(ctx, q, n, 0); err != nil {
			return err
		}
	}
	if err := m.store(ctx, q, noCursors()); err != nil {
		return err
	}
	if len(m.stored) < len(m.entries) {
		return ErrNoKey
	}
	made := make(map[uuid.UUID]int64, len(m.created))
	for _, c := range m.created {
		made[c.PublicID] = c.ID
	}
	p := db.OutboxMovedParams{PlaceIds: []int64{}, PartitionIds: []int64{}, MessageOffsets: []int64{}, Ids: m.ids}
	for i, l := range m.loads {
		n := m.entries[i]
		for k, r := range l.rows {
			if r.Payload != nil {
				continue
			}
			res, id := m.pushes[i].Results[k], made[n.public]
			if n.row != nil {
				id = n.row.ID
			}
			if !res.stored {
				res.Offset += n.base
			}
			p.PlaceIds, p.PartitionIds, p.MessageOffsets = append(p.PlaceIds, r.ID), append(p.PartitionIds, id), append(p.MessageOffsets, res.Offset)
		}
	}
	return q.OutboxMoved(ctx, p)
}
