package groupcommit

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/metrics"
	"ferrymq/segment"
)

// side is a partition that works alone, one transaction after the other, until nothing waits for it:
// because deduplication has to read before it can judge, because another broker won the compare-and-set, or
// because someone holds a lock on it for long.
type side struct {
	partition *catalog.Partition
	pushes    []*Push
	settles   []*settle
}

// aside returns the side lane of a partition, starting it when there is none. dock.mu is held.
func (e *Engine) aside(p *catalog.Partition) *side {
	key := keyOf(p)
	s := e.dock.sides[key]
	if s == nil {
		s = &side{partition: p}
		e.dock.sides[key] = s
		e.sideWork.Add(1)
		go e.runSide(key, s)
	}
	return s
}

// sendAside gives the pushes of an entry to its partition's side lane.
func (e *Engine) sendAside(n *entry) {
	e.dock.mu.Lock()
	defer e.dock.mu.Unlock()
	s := e.aside(n.partition)
	s.pushes = append(s.pushes, n.pushes...)
}

// besides says whether an entry's partition works alone at the moment.
func (e *Engine) besides(n *entry) bool {
	e.dock.mu.Lock()
	defer e.dock.mu.Unlock()
	return e.dock.sides[keyOf(n.partition)] != nil
}

func (e *Engine) runSide(key partitionKey, s *side) {
	defer e.sideWork.Done()
	var scratch builders
	d := e.dock
	for {
		d.mu.Lock()
		pushes, settles := s.pushes, s.settles
		s.pushes, s.settles = nil, nil
		if len(pushes)+len(settles) == 0 {
			delete(d.sides, key)
			d.mu.Unlock()
			return
		}
		d.mu.Unlock()
		if len(pushes) > 0 {
			e.sidePush(&scratch, s.partition, pushes)
		}
		for _, x := range settles {
			e.sideSettle(x)
		}
	}
}

// sideLockTimeout is how long a side lane waits for a lock before it lets another one have its connection for a moment.
const sideLockTimeout = 2 * time.Second

// alone runs fn in a transaction with its own connection, again after a deadlock, and turns errors into this package's.
func (e *Engine) alone(fn func(ctx context.Context, q *db.Queries) error) error {
	return e.patiently(sideLockTimeout, fn)
}

// patiently is alone with another time after which fn lets go of its locks and begins again when it waits for one.
func (e *Engine) patiently(lock time.Duration, fn func(ctx context.Context, q *db.Queries) error) error {
	began := time.Now()
	for {
		room := time.NewTimer(connectTimeout)
		select {
		case e.sideRoom <- struct{}{}:
			room.Stop()
		case <-room.C:
			return ErrNoConnection
		}
		err := e.alongside(lock, fn)
		<-e.sideRoom
		if !db.IsLockTimeout(err) || time.Since(began) > e.StatementTimeout || e.stop.Err() != nil {
			return err
		}
		// Blocked: others get the room meanwhile.
	}
}

func (e *Engine) alongside(lock time.Duration, fn func(ctx context.Context, q *db.Queries) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), e.StatementTimeout+connectTimeout)
	defer cancel()
	for again := false; ; again = true {
		acquire, stop := context.WithTimeout(ctx, connectTimeout)
		conn, err := e.Pool.Acquire(acquire)
		stop()
		if err != nil {
			return ErrNoConnection
		}
		committing, began := false, time.Now()
		err = func() error {
			defer conn.Release()
			tx, err := conn.Begin(ctx)
			if err != nil {
				return ErrNoConnection
			}
			defer tx.Rollback(ctx)
			q := e.q.WithTx(tx)
			if err := q.FlushSettings(ctx, e.settings(lock)); err != nil {
				return err
			}
			if err := fn(ctx, q); err != nil {
				return err
			}
			committing = true
			return tx.Commit(ctx)
		}()
		if db.IsRetryable(err) && !again {
			continue
		}
		if err == nil {
			e.Metrics.Committed(time.Since(began))
		}
		if committing && db.IsConnection(err) {
			return ErrUnknown
		}
		if db.IsConnection(err) {
			return ErrNoConnection
		}
		return err
	}
}

// sidePush stores pushes of one partition under its lock: what deduplication misses is read first, so it cannot lose twice.
func (e *Engine) sidePush(s *builders, p *catalog.Partition, pushes []*Push) {
	fail := func(err error) {
		if !errors.Is(err, ErrNoConnection) && !errors.Is(err, ErrUnknown) {
			e.Log.Error("a push failed", "queue", pushes[0].Queue.Name, "error", db.Text(err))
		}
		for _, x := range pushes {
			x.finish(e, err)
		}
	}
	n := &entry{partition: p, queue: pushes[0].Queue, row: p.Row(), pushes: pushes, expected: -1}
	for _, x := range pushes {
		n.keyed = n.keyed || len(x.keys) > 0
		if x.Queue.UpdatedAt.After(n.queue.UpdatedAt) {
			n.queue = x.Queue
		}
	}
	if n.row == nil {
		ctx, cancel := context.WithTimeout(context.Background(), connectTimeout)
		err := e.Catalog.Resolve(ctx, p)
		cancel()
		if err != nil {
			fail(e.Unavailable(err))
			return
		}
		if n.row = p.Row(); n.row == nil {
			e.reboard(pushes)
			return
		}
	}
	judging := n.keyed && n.queue.DedupWindowSeconds > 0
	gone := false
	err := e.alone(func(ctx context.Context, q *db.Queries) error {
		if judging { // most of a long window is read before the lock is taken
			if err := e.catchUp(ctx, q, n, -1); err != nil {
				return err
			}
		}
		locked, err := q.PartitionLock(ctx, db.PartitionLockParams{ID: n.row.ID})
		if errors.Is(err, pgx.ErrNoRows) {
			gone = true
			return nil
		}
		if err != nil {
			return err
		}
		var known map[segment.Key]Pushed
		if judging {
			if err := e.catchUp(ctx, q, n, locked.NextOffset); err != nil {
				return err
			}
			if known, err = e.confirm(ctx, q, n, locked.FirstOffset); err != nil {
				return err
			}
		}
		n.build(e, s, known)
		n.base = locked.NextOffset
		n.createdAt = e.Now()
		if n.total == 0 {
			return nil
		}
		a, _ := appendParams([]*entry{n})
		rows, err := q.AppendSegments(ctx, a)
		if err != nil {
			return err
		}
		if len(rows) == 0 { // the queue was deleted
			gone = true
			return nil
		}
		n.base, n.createdAt = rows[0].Base, rows[0].CreatedAt
		pushed := []int64{n.row.ID}
		if err := q.LockCursors(ctx, db.LockCursorsParams{Pushed: pushed, GroupIds: []int32{}, PartitionIds: []int64{}, LeaseIds: []uuid.UUID{}}); err != nil {
			return err
		}
		return q.MarkPending(ctx, db.MarkPendingParams{Pushed: pushed})
	})
	switch {
	case err != nil:
		fail(err)
	case gone:
		p.Forget(n.row)
		e.dedup.Forget(n.row.ID)
		e.reboard(pushes)
	default:
		e.Metrics.Total(metrics.CommitPushes, int64(len(pushes)))
		n.stored(e)
		if n.total > 0 {
			e.park.appeared(n.queue.ID, p.Name)
			e.announce([]Hint{{Queue: n.queue.ID, Partition: n.row.ID}}, n.queue)
		}
	}
}

// reboard sends pushes whose partition is gone through the catalog again.
func (e *Engine) reboard(pushes []*Push) {
	for _, x := range pushes {
		e.sideWork.Add(1)
		go func() {
			defer e.sideWork.Done()
			ctx, cancel := context.WithTimeout(context.Background(), connectTimeout)
			defer cancel()
			if err := e.resolve(ctx, x); err != nil {
				x.finish(e, err)
				return
			}
			e.boardPush(x)
		}()
	}
}

// resolve looks a push's queue and partition up again, by name, past all caches.
func (e *Engine) resolve(ctx context.Context, p *Push) error {
	c := e.Catalog.Of(p.Queue.ProjectID)
	c.ForgetQueue(p.Queue.Name)
	ensure := c.EnsureQueue
	if p.Stream {
		ensure = c.EnsureStream
	}
	q, err := ensure(ctx, p.Queue.Name)
	if err != nil {
		return e.Unavailable(err)
	}
	found, err := c.Again(ctx, q, p.Partition)
	if err != nil {
		return e.Unavailable(err)
	}
	p.Queue, p.Partition = q, found[0]
	return nil
}

// catchUp completes the memory of a partition up to the tail its transaction sees. Under the partition's lock that is to; else -1.
func (e *Engine) catchUp(ctx context.Context, q *db.Queries, n *entry, to int64) error {
	reading := &e.reading[uint64(n.row.ID)%lanes]
	reading.Lock()
	defer reading.Unlock()
	since := n.since(e)
	tail, ok := e.dedup.Tail(n.row.ID, since)
	since = since.Add(-dedupSlack)
	if !ok {
		start, err := q.DedupStart(ctx, db.DedupStartParams{ID: n.row.ID, Since: since})
		if errors.Is(err, pgx.ErrNoRows) {
			return nil // gone: the lock will say so
		}
		if err != nil {
			return err
		}
		tail = start.StartOffset
		e.dedup.Load(n.row.ID, tail, since)
	}
	rows, err := q.SegmentKeys(ctx, db.SegmentKeysParams{PartitionID: n.row.ID, FromOffset: tail})
	if err != nil {
		return err
	}
	// Retention leaves nothing of segments that had no ids, or old ones.
	hole := func(end int64, at time.Time) {
		if end > tail && !e.dedup.Knows(n.row.ID, tail, nil, int(end-tail)) {
			e.dedup.Extend(n.row.ID, tail, at, since, nil, int(end-tail))
		}
	}
	for _, r := range rows {
		hole(r.BaseOffset, r.CreatedAt)
		tail = r.BaseOffset + int64(r.Count)
		if e.dedup.Knows(n.row.ID, r.BaseOffset, r.Keys, int(r.Count)) { // its flush has just ended
			continue
		}
		if !e.dedup.Extend(n.row.ID, r.BaseOffset, r.CreatedAt, since, r.Keys, int(r.Count)) {
			// More than the memory holds: it begins here, complete only for windows that begin later.
			e.dedup.Load(n.row.ID, r.BaseOffset, r.CreatedAt.Add(time.Microsecond))
			e.dedup.Extend(n.row.ID, r.BaseOffset, r.CreatedAt, since, r.Keys, int(r.Count))
		}
	}
	hole(to, since)
	return nil
}

// original is the message that a push repeats: its id is zero once it has been removed.
func original(base, first int64, firstID uuid.UUID, i int) Pushed {
	p := Pushed{Offset: base + int64(i), Duplicate: true, stored: true}
	if base >= first {
		p.ID = segment.ID(firstID, i)
	}
	return p
}

// confirm reads the keys that memory points at and returns the ids of the messages that really repeat; what lies below first has been removed.
// Under the partition's lock, with the memory complete, this is exact.
func (e *Engine) confirm(ctx context.Context, q *db.Queries, n *entry, first int64) (map[segment.Key]Pushed, error) {
	since := n.since(e)
	known := make(map[segment.Key]Pushed)
	for _, p := range n.pushes {
		if len(p.keys) == 0 {
			continue
		}
		hits, _, ok := e.dedup.Look(n.row.ID, since, p.keys, nil)
		if !ok { // the memory is too small for this window
			return known, e.confirmAll(ctx, q, n, first, known)
		}
		for _, h := range hits {
			k := segment.Key(p.keys[16*h.Index:])
			if _, done := known[k]; done {
				continue
			}
			rows, err := q.SegmentKeysAt(ctx, db.SegmentKeysAtParams{PartitionID: n.row.ID, FromOffset: h.From, ToOffset: h.To, Since: since})
			if err != nil {
				return nil, err
			}
			for _, r := range rows {
				if at := segment.FindKey(r.Keys, 0, k); at >= 0 {
					known[k] = original(r.BaseOffset, first, r.FirstID, at)
					break
				}
			}
		}
	}
	return known, nil
}

// confirmAll reads the keys of the whole window, once, for all pushes of the entry.
func (e *Engine) confirmAll(ctx context.Context, q *db.Queries, n *entry, first int64, known map[segment.Key]Pushed) error {
	wanted := make(map[segment.Key]bool)
	for _, p := range n.pushes {
		for i := 0; i < len(p.keys); i += len(segment.Key{}) {
			wanted[segment.Key(p.keys[i:])] = true
		}
	}
	delete(wanted, segment.Key{})
	start, err := q.DedupStart(ctx, db.DedupStartParams{ID: n.row.ID, Since: n.since(e)})
	if err != nil {
		return err
	}
	rows, err := q.SegmentKeys(ctx, db.SegmentKeysParams{PartitionID: n.row.ID, FromOffset: start.StartOffset})
	if err != nil {
		return err
	}
	for _, r := range rows {
		for i := range int(r.Count) {
			if k := segment.KeyAt(r.Keys, i); wanted[k] {
				known[k] = original(r.BaseOffset, first, r.FirstID, i)
			}
		}
	}
	return nil
}

// sideSettle applies one settle in its own transaction, waiting for locks as long as a statement may.
func (e *Engine) sideSettle(s *settle) {
	var rows []db.SettleCursorsRow
	err := e.alone(func(ctx context.Context, q *db.Queries) error {
		rows = nil
		s.reached = s.reach()
		locks := db.LockPartitionsParams{Ids: []int64{s.row.ID}, Reaches: []int64{s.reached}}
		if _, err := q.LockPartitions(ctx, locks); err != nil {
			return err
		}
		cursor := lockSet{db.LockCursorsParams{Pushed: []int64{}}}
		cursor.add(s.group.ID, s.row.ID, s.Lease)
		if err := q.LockCursors(ctx, cursor.LockCursorsParams); err != nil {
			return err
		}
		if s.ofLane() {
			passed, err := q.SettleLanes(ctx, settleLanesParams([]*settle{s}))
			for _, r := range passed {
				rows = append(rows, laneSettled(r))
			}
			return err
		}
		var err error
		rows, err = q.SettleCursors(ctx, settleParams([]*settle{s}))
		return err
	})
	if err != nil {
		if !errors.Is(err, ErrNoConnection) && !errors.Is(err, ErrUnknown) {
			e.Log.Error("an ack failed", "error", db.Text(err))
		}
		s.finish(err)
		return
	}
	e.Metrics.Total(metrics.CommitAcks, acks([]*settle{s}))
	if len(rows) > 0 {
		e.settled(s, rows[0])
	}
	s.finish(nil)
}

// settled puts into effect what a commit outside of a flush made of a settle.
func (e *Engine) settled(s *settle, r db.SettleCursorsRow) {
	s.apply(e, r)
	if h, here, ok := s.hint(); here {
		e.announce([]Hint{h}, nil)
	} else if ok && e.Announce != nil {
		e.Announce([]Hint{h})
	}
	if s.missed && s.Released {
		e.park.left(s.group, s.row.ID)
	}
}

func (e *Engine) settings(lock time.Duration) db.FlushSettingsParams {
	return db.FlushSettingsParams{StatementTimeoutMs: milliseconds(e.StatementTimeout), LockTimeoutMs: milliseconds(lock)}
}
