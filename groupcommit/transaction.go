package groupcommit

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/metrics"
	"ferrymq/segment"
)

// Transaction is pushes and acks that happen together or not at all.
type Transaction struct {
	Pushes   []*Batch      // one per queue and partition
	Acks     []*Settlement // one per partition and group
	Required []uuid.UUID   // leases that must be live; zero is none that could be
}

// Batch is what a transaction pushes to one partition.
type Batch struct {
	Queue, Partition string
	Messages         []segment.Message

	Results []Pushed // once the transaction has happened; a duplicate repeats another message of this batch
}

// Settlement is what a transaction acknowledges in one partition for one group.
type Settlement struct {
	Partition uuid.UUID
	Group     string
	Items     []Ack
	Leases    []*uuid.UUID // what each item names, nil: no lease; zero is none that could be live
	Refused   error        // why its items cannot be accepted, whatever the database says

	Results []Acked // once the transaction has happened
}

// Rollback is why a transaction changed nothing.
type Rollback struct {
	Err              error  // ErrDuplicate, ErrFull, ErrNoKey, or why an ack was refused
	Queue, Partition string // of ErrDuplicate and ErrFull
}

func (r *Rollback) Error() string { return r.Err.Error() }
func (r *Rollback) Unwrap() error { return r.Err }

// ErrDuplicate: an id is in its partition already, inside the window.
var ErrDuplicate = errors.New("duplicate message")

var (
	// errMoved: what was looked up before the locks is not so any more. Look again.
	errMoved = errors.New("what this is about keeps changing")
	// errMissing: nothing speaks against the transaction, but a queue has to be made for it first.
	errMissing = errors.New("a queue does not exist")
)

// maxTries is how often something is tried whose partitions, queues or groups come and go meanwhile.
const maxTries = 20

// Transact makes a transaction happen, with the statements of a flush in their order, but one after the other: the partitions
// of all that is pushed and acknowledged are locked first, and the cursors before acks are judged. So nothing it was
// judged by can change before its commit. The error is a *Rollback when the transaction itself is why it did not happen;
// after ErrUnknown it may have. It does not end early with ctx once it has begun.
func (e *Engine) Transact(ctx context.Context, t *Transaction) error {
	var n int64
	for _, b := range t.Pushes {
		n += int64(len(b.Messages))
	}
	if n > 0 && e.waiting.Load() >= e.PushQueueMax {
		return ErrOverloaded
	}
	e.waiting.Add(n)
	defer e.waiting.Add(-n)
	create := false
	for tries := range maxTries {
		x, err := e.prepare(ctx, t, tries > 0, create)
		if err == nil {
			err = e.inTurn(ctx, x.keys(), x.run)
		}
		var why *Rollback
		switch {
		case err == nil:
			x.happened()
			return nil
		case errors.Is(err, errMissing):
			create = true
		case errors.Is(err, errMoved):
			x.forget()
			for _, b := range t.Pushes {
				e.Catalog.ForgetQueue(b.Queue)
			}
			for _, a := range x.acks {
				if a.group != nil {
					e.Catalog.ForgetGroup(a.group.QueueID, a.group.Name)
				}
			}
		case errors.As(err, &why):
			x.undone()
			return err
		default:
			x.undone()
			return e.Unavailable(err)
		}
	}
	return errMoved
}

// transacting says whether transactions have been seen lately: they lock partitions in order, and a flush that does not would
// stop and be stopped by them.
func (e *Engine) transacting() bool { return time.Now().Unix()-e.transact.Load() < 60 }

// turns lets one transaction of this broker after the other work on a partition. Those that wait hold no connection: a partition
// that is blocked for long uses up one, not all that side lanes and transactions share.
type turns struct {
	mu   sync.Mutex
	busy map[partitionKey]chan struct{} // closed when it is free again
}

// inTurn runs fn in a transaction of its own once no other one of this broker works on its partitions.
func (e *Engine) inTurn(ctx context.Context, keys []partitionKey, fn func(ctx context.Context, q *db.Queries) error) error {
	if len(keys) > 1 {
		e.transact.Store(time.Now().Unix())
	}
	// In order: who has the first of two waits for the second, never the other way round.
	slices.SortFunc(keys, func(a, b partitionKey) int { return cmp.Or(cmp.Compare(a.queue, b.queue), cmp.Compare(a.name, b.name)) })
	keys = slices.Compact(keys)
	t := &e.turns
	taken := 0
	defer func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		for _, k := range keys[:taken] {
			close(t.busy[k])
			delete(t.busy, k)
		}
	}()
	patience := time.NewTimer(e.StatementTimeout)
	defer patience.Stop()
	for taken < len(keys) {
		t.mu.Lock()
		if t.busy == nil {
			t.busy = make(map[partitionKey]chan struct{})
		}
		free := t.busy[keys[taken]]
		if free == nil {
			t.busy[keys[taken]] = make(chan struct{})
			taken++
		}
		t.mu.Unlock()
		if free == nil {
			continue
		}
		select {
		case <-free:
		case <-ctx.Done():
			return ctx.Err()
		case <-patience.C:
			return errors.New("waited too long for a partition")
		}
	}
	return e.alone(fn)
}

// cargo is what a transaction of its own appends, and the partitions it locks for that.
type cargo struct {
	e       *Engine
	entries []*entry
	also    []*catalog.Partition // locked too
	alsoRow []*catalog.Row       // of also

	tails   map[int64]int64 // of what is locked
	stored  []*entry
	created []db.CreatePartitionsRow
	scratch builders
}

func (c *cargo) keys() []partitionKey {
	keys := make([]partitionKey, 0, len(c.entries)+len(c.also))
	for _, n := range c.entries {
		keys = append(keys, keyOf(n.partition))
	}
	for _, p := range c.also {
		keys = append(keys, keyOf(p))
	}
	return keys
}

// load adds the push of a batch. Its partition need not exist.
func (c *cargo) load(queue *catalog.Queue, p *catalog.Partition, messages []segment.Message) *Push {
	push := &Push{Queue: queue, Partition: p, Messages: messages, Results: make([]Pushed, len(messages))}
	push.hash(c.e.Hasher)
	c.entries = append(c.entries, &entry{partition: p, queue: queue, row: p.Row(), public: uuid.New(), pushes: []*Push{push}, keyed: len(push.keys) > 0, expected: -1})
	return push
}

// windowed says whether ids of the entry may be duplicates of stored ones.
func (n *entry) windowed() bool { return n.keyed && n.queue.DedupWindowSeconds > 0 && n.row != nil }

// lock takes the locks of the partitions that exist. errMoved: one is gone.
func (c *cargo) lock(ctx context.Context, q *db.Queries) error {
	c.tails = make(map[int64]int64)
	var p db.LockPartitionsParams
	add := func(id int64) {
		if _, ok := c.tails[id]; !ok {
			c.tails[id] = -1
			p.Ids, p.Reaches = append(p.Ids, id), append(p.Reaches, 1<<63-1)
		}
	}
	for _, n := range c.entries {
		if n.row == nil {
			continue
		}
		add(n.row.ID)
		if n.windowed() {
			if _, ok := c.e.dedup.Tail(n.row.ID, n.since(c.e)); !ok { // most of a long window is read before the lock is taken
				if err := c.e.catchUp(ctx, q, n, -1); err != nil {
					return err
				}
			}
		}
	}
	for _, row := range c.alsoRow {
		add(row.ID)
	}
	if len(p.Ids) == 0 {
		return nil
	}
	rows, err := q.LockPartitions(ctx, p)
	if err != nil {
		return err
	}
	for _, r := range rows {
		c.tails[r.ID] = r.NextOffset
	}
	if len(rows) < len(p.Ids) {
		return errMoved
	}
	return nil
}

// duplicate finds an id that is in its partition's window already. Under the locks this is exact. errMoved: its queue was deleted.
func (c *cargo) duplicate(ctx context.Context, q *db.Queries) (*entry, error) {
	for _, n := range c.entries {
		if !n.windowed() {
			continue
		}
		if err := c.e.catchUp(ctx, q, n, c.tails[n.row.ID]); err != nil {
			return nil, err
		}
		known, err := c.e.confirm(ctx, q, n, 0)
		if err != nil {
			return nil, err
		}
		for _, p := range n.pushes {
			for i := 0; i < len(p.keys); i += len(segment.Key{}) {
				if _, ok := known[segment.Key(p.keys[i:])]; ok {
					_, err := q.QueueRead(ctx, db.QueueReadParams{ID: n.queue.ID})
					if errors.Is(err, pgx.ErrNoRows) {
						err = errMoved
					}
					return n, err
				}
			}
		}
	}
	return nil, nil
}

// store appends, creates what partitions are missing, and marks cursors pending, of which it locks more. An entry whose queue
// wants a key that is not there is left out: what is not to be stored in plain text is not written at all.
func (c *cargo) store(ctx context.Context, q *db.Queries, cursors lockSet) error {
	c.stored, c.created = c.stored[:0], nil
	for _, n := range c.entries {
		if !n.queue.EncryptionEnabled || c.e.Keys != nil {
			n.build(c.e, &c.scratch, n.known)
			if n.total == 0 { // all of it is there already
				n.base, n.createdAt = c.tails[n.row.ID], c.e.Now()
			}
			c.stored = append(c.stored, n)
		}
	}
	a, made := appendParams(c.stored)
	if len(a.Ids) > 0 {
		rows, err := q.AppendSegments(ctx, a)
		if err != nil {
			return err
		}
		byID := make(map[int64]db.AppendSegmentsRow, len(rows))
		for _, r := range rows {
			byID[r.ID] = r
		}
		for _, n := range c.stored {
			if n.row == nil || n.total == 0 {
				continue
			}
			r, ok := byID[n.row.ID]
			if !ok { // its queue was deleted
				c.tails[n.row.ID] = -1
				return errMoved
			}
			n.base, n.createdAt = r.Base, r.CreatedAt
		}
	}
	if len(made.PublicIds) > 0 {
		var err error
		if c.created, err = q.CreatePartitions(ctx, made); err != nil {
			return err
		}
		if len(c.created) < len(made.PublicIds) { // made by somebody else meanwhile, or the queue was deleted
			return errMoved
		}
		if err := q.CreateCursors(ctx, db.CreateCursorsParams{PublicIds: made.PublicIds}); err != nil {
			return err
		}
	}
	cursors.Pushed = a.Ids
	if len(a.Ids)+len(cursors.GroupIds) == 0 {
		return nil
	}
	if err := q.LockCursors(ctx, cursors.LockCursorsParams); err != nil || len(a.Ids) == 0 {
		return err
	}
	return q.MarkPending(ctx, db.MarkPendingParams{Pushed: a.Ids})
}

// forget drops the rows that turned out to be gone.
func (c *cargo) forget() {
	gone := func(p *catalog.Partition, row *catalog.Row) {
		if row != nil && c.tails[row.ID] < 0 {
			p.Forget(row)
			c.e.dedup.Forget(row.ID)
		}
	}
	for _, n := range c.entries {
		gone(n.partition, n.row)
	}
	for i, p := range c.also {
		gone(p, c.alsoRow[i])
	}
}

// remember notes after the commit what was stored.
func (c *cargo) remember() {
	byPublic := make(map[uuid.UUID]db.CreatePartitionsRow, len(c.created))
	for _, r := range c.created {
		byPublic[r.PublicID] = r
	}
	for _, n := range c.stored {
		if n.row == nil {
			n.made(c.e, byPublic[n.public])
		}
		n.remember(c.e)
		c.e.Metrics.Total(metrics.CommitPushes, int64(len(n.pushes)))
	}
}

// announce wakes who waits for what was stored.
func (c *cargo) announce() {
	var hints []Hint
	for _, n := range c.stored {
		c.e.park.seen(n.queue)
		c.e.park.appeared(n.queue.ID, n.partition.Name)
		hints = append(hints, Hint{Queue: n.queue.ID, Partition: n.row.ID})
	}
	if len(hints) > 0 {
		c.e.announce(hints, nil)
	}
}

// attempt is one try of a transaction.
type attempt struct {
	cargo
	t        *Transaction
	again    bool                    // what the caches said was wrong before
	missing  bool                    // a queue does not exist
	locked   bool                    // it has had cursors locked
	pushes   []*Push                 // of t.Pushes; nil: its queue does not exist
	acks     []*acknowledgment       // of t.Acks
	required map[uuid.UUID]cursorKey // where each of t.Required was live before the locks
}

// acknowledgment is one of a transaction's settlements being decided.
type acknowledgment struct {
	of        *Settlement
	partition *catalog.Partition // nil: there is none
	row       *catalog.Row
	group     *catalog.Group // nil: there is none

	err     error            // no item can be accepted
	at      *db.CursorGetRow // the locked cursor
	acks    Acks
	verdict *verdict // nil: nothing changes
	settle  *settle
	moved   db.SettleCursorsRow
}

// prepare looks up what a transaction names. Queues are made only if create says so: one that is rolled back makes none.
func (e *Engine) prepare(ctx context.Context, t *Transaction, again, create bool) (*attempt, error) {
	x := &attempt{cargo: cargo{e: e}, t: t, again: again, pushes: make([]*Push, len(t.Pushes)), required: make(map[uuid.UUID]cursorKey)}
	byQueue := make(map[string][]int)
	var queues []string
	for i, b := range t.Pushes {
		if byQueue[b.Queue] == nil {
			queues = append(queues, b.Queue)
		}
		byQueue[b.Queue] = append(byQueue[b.Queue], i)
	}
	places := make([]*catalog.Partition, len(t.Pushes))
	of := make([]*catalog.Queue, len(t.Pushes))
	for _, name := range queues {
		look := e.Catalog.Queue
		if create {
			look = e.Catalog.EnsureQueue
		}
		q, err := look(ctx, name)
		if err != nil {
			return nil, err
		}
		if q == nil {
			x.missing = true
			continue
		}
		names := make([]string, len(byQueue[name]))
		for n, i := range byQueue[name] {
			names[n] = t.Pushes[i].Partition
		}
		found, err := e.Catalog.Partitions(ctx, q, names)
		if err != nil {
			return nil, err
		}
		for n, i := range byQueue[name] {
			places[i], of[i] = found[n], q
		}
	}
	for i, b := range t.Pushes {
		if of[i] != nil {
			x.pushes[i] = x.load(of[i], places[i], b.Messages)
		}
	}
	if err := x.prepareAcks(ctx); err != nil {
		return nil, err
	}
	for _, lease := range t.Required {
		if lease == (uuid.UUID{}) {
			continue
		}
		if held := e.held.cursors(lease); len(held) > 0 && !again {
			x.required[lease] = held[0]
			continue
		}
		found, err := e.q.LeaseFind(ctx, db.LeaseFindParams{ProjectID: e.Project, LeaseID: lease, GroupID: LeaseGroup(lease)})
		if err != nil {
			return nil, err
		}
		if len(found) > 0 {
			x.required[lease] = cursorKey{found[0].GroupID, found[0].PartitionID}
		}
	}
	return x, nil
}

func (x *attempt) prepareAcks(ctx context.Context) error {
	var ids []uuid.UUID
	for _, s := range x.t.Acks {
		if s.Refused == nil {
			ids = append(ids, s.Partition)
		}
	}
	found := map[uuid.UUID]*catalog.Partition{}
	if len(ids) > 0 {
		var err error
		if found, err = x.e.Catalog.Public(ctx, ids); err != nil {
			return err
		}
	}
	for _, s := range x.t.Acks {
		a := &acknowledgment{of: s}
		x.acks = append(x.acks, a)
		p := found[s.Partition]
		if s.Refused != nil || p == nil {
			continue
		}
		row := p.Row()
		if row == nil || row.PublicID != s.Partition {
			continue
		}
		g, err := x.e.Catalog.Group(ctx, p.QueueID, s.Group)
		if err != nil {
			return err
		}
		a.partition, a.row, a.group = p, row, g
		x.also, x.alsoRow = append(x.also, p), append(x.alsoRow, row)
	}
	return nil
}

func noCursors() lockSet {
	return lockSet{db.LockCursorsParams{Pushed: []int64{}, GroupIds: []int32{}, PartitionIds: []int64{}, LeaseIds: []uuid.UUID{}}}
}

func rollBack(err error) error { return &Rollback{Err: err} }

// run is the transaction. It may run more than once.
func (x *attempt) run(ctx context.Context, q *db.Queries) error {
	if err := x.lock(ctx, q); err != nil {
		return err
	}
	if n, err := x.duplicate(ctx, q); err != nil {
		return err
	} else if n != nil {
		return &Rollback{Err: ErrDuplicate, Queue: n.queue.Name, Partition: n.partition.Name}
	}
	cursors := noCursors()
	for _, a := range x.acks {
		if a.group != nil {
			cursors.add(a.group.ID, a.row.ID, uuid.UUID{})
		}
	}
	for lease, k := range x.required {
		cursors.add(k.group, k.partition, lease)
	}
	x.locked = true
	if err := x.store(ctx, q, cursors); err != nil {
		return err
	}
	if err := x.judge(ctx, q); err != nil {
		return err
	}
	if err := x.settle(ctx, q); err != nil {
		return err
	}
	if len(x.stored) < len(x.entries) {
		return rollBack(ErrNoKey)
	}
	if err := x.fits(ctx, q); err != nil {
		return err
	}
	if x.missing {
		return errMissing
	}
	return nil
}

// judge decides the acks on their locked cursors: ids that mean nothing are told before leases that are over, and these before all else.
func (x *attempt) judge(ctx context.Context, q *db.Queries) error {
	for _, a := range x.acks {
		if err := x.resolve(ctx, q, a); err != nil {
			return err
		}
	}
	named := len(x.t.Required) > 0
	for _, s := range x.t.Acks {
		named = named || slices.ContainsFunc(s.Leases, func(l *uuid.UUID) bool { return l != nil })
	}
	for _, lease := range x.t.Required {
		if err := x.live(ctx, q, lease); err != nil {
			return err
		}
	}
	for _, a := range x.acks {
		if a.at == nil || !named {
			continue
		}
		for _, l := range a.of.Leases {
			if !a.at.Live || a.at.LeaseID == nil || (l != nil && *l != *a.at.LeaseID) || (l == nil && !slices.Contains(x.t.Required, *a.at.LeaseID)) {
				return rollBack(ErrLease)
			}
		}
		a.acks.Leased, a.acks.Lease = true, *a.at.LeaseID
	}
	for _, a := range x.acks {
		if a.err != nil {
			return rollBack(a.err)
		}
		for _, r := range a.acks.Results {
			if r.Err != nil {
				return rollBack(r.Err)
			}
		}
	}
	return nil
}

// resolve reads a locked cursor and decides what the ids mean on it. What the transaction itself has pushed is not there yet.
func (x *attempt) resolve(ctx context.Context, q *db.Queries, a *acknowledgment) error {
	e := x.e
	a.at, a.verdict, a.settle, a.err = nil, nil, nil, a.of.Refused
	if a.err == nil && a.group == nil {
		a.err = ErrNoConsumer
	}
	if a.err != nil {
		return nil
	}
	r, err := q.CursorGet(ctx, db.CursorGetParams{GroupID: a.group.ID, PartitionID: a.row.ID})
	if errors.Is(err, pgx.ErrNoRows) {
		e.Catalog.ForgetGroup(a.group.QueueID, a.group.Name)
		if !x.again { // or it has been made anew
			return errMoved
		}
		a.err = ErrNoConsumer
		return nil
	}
	if err != nil {
		return err
	}
	a.at, a.acks = &r, Acks{Group: a.of.Group, Items: a.of.Items}
	c := cursorAt(r)
	if r.LeaseID != nil {
		if h, ok := e.held.get(a.group.ID, a.row.ID, *r.LeaseID); ok {
			c.parts = h.parts
		}
	}
	v, sure := a.acks.decide(e.Hasher, c)
	if !sure {
		if err := c.read(ctx, q, a.row, x.tails[a.row.ID]); err != nil {
			return err
		}
		v, _ = a.acks.decide(e.Hasher, c)
	}
	for _, r := range a.acks.Results {
		if errors.Is(r.Err, ErrUnresolvable) {
			return rollBack(ErrUnresolvable)
		}
	}
	a.verdict = v
	if v != nil {
		a.settle = &settle{group: a.group, partition: a.partition, row: a.row, Expected: c.committed, Action: v.action, MoveTo: v.moveTo, FailedAt: v.failedAt, Error: v.error}
	}
	return nil
}

// live makes sure of a required lease: a cursor that it is live on is locked.
func (x *attempt) live(ctx context.Context, q *db.Queries, lease uuid.UUID) error {
	is := func(r *db.CursorGetRow) bool { return r.Live && r.LeaseID != nil && *r.LeaseID == lease }
	for _, a := range x.acks {
		if a.at != nil && is(a.at) {
			return nil
		}
	}
	if lease == (uuid.UUID{}) {
		return rollBack(ErrLease)
	}
	if k, ok := x.required[lease]; ok {
		r, err := q.CursorGet(ctx, db.CursorGetParams{GroupID: k.group, PartitionID: k.partition})
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		if err == nil && is(&r) {
			return nil
		}
	}
	found, err := q.LeaseFind(ctx, db.LeaseFindParams{ProjectID: x.e.Project, LeaseID: lease, GroupID: LeaseGroup(lease)})
	if err != nil {
		return err
	}
	if len(found) > 0 { // on other cursors than those that are locked
		return errMoved
	}
	return rollBack(ErrLease)
}

// settle moves the cursors. Copies for dead letters are made once the database has said that they are needed.
func (x *attempt) settle(ctx context.Context, q *db.Queries) error {
	var todo []*acknowledgment
	for _, a := range x.acks {
		if a.settle != nil {
			a.settle.Lease, a.settle.reached = a.acks.Lease, a.settle.reach()
			todo = append(todo, a)
		}
	}
	for len(todo) > 0 {
		settles := make([]*settle, len(todo))
		for i, a := range todo {
			settles[i] = a.settle
		}
		rows, err := q.SettleCursors(ctx, settleParams(settles))
		if err != nil {
			return err
		}
		if len(rows) < len(todo) {
			// Nothing but time, or the end of the queue or group, can change a locked cursor.
			if slices.ContainsFunc(todo, func(a *acknowledgment) bool { return a.acks.Leased }) {
				return rollBack(ErrLease)
			}
			return errMoved
		}
		var again []*acknowledgment
		for _, r := range rows {
			a := todo[r.N]
			switch r.Outcome {
			case outNoBatch:
				return rollBack(ErrNoBatch)
			case outNeedCopy:
				a.settle.Copy, err = x.e.copyOf(ctx, q, a.row, a.settle.FailedAt)
				if errors.Is(err, ErrDeadRejected) {
					return rollBack(err)
				}
				if err != nil {
					return err
				}
				again = append(again, a)
			default:
				a.moved = r
			}
		}
		todo = again
	}
	return nil
}

// fits holds the queues pushed to against their maxSize: the backlog as the transaction leaves it, with its pushes and its acks.
func (x *attempt) fits(ctx context.Context, q *db.Queries) error {
	added := make(map[*catalog.Queue]int64)
	for _, n := range x.stored {
		if n.queue.MaxSize > 0 {
			added[n.queue] += n.total
		}
	}
	for _, n := range x.stored {
		if added[n.queue] == 0 {
			continue
		}
		total := added[n.queue]
		delete(added, n.queue)
		err := x.e.sizes.admit(x.e, n.queue, total, false, func() (int64, error) {
			with, err := q.QueuePendingCount(ctx, db.QueuePendingCountParams{QueueID: n.queue.ID})
			return with - total, err
		})
		if errors.Is(err, ErrFull) {
			return &Rollback{Err: ErrFull, Queue: n.queue.Name}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// undone wakes pops for what a transaction that did not happen had locked: they have passed over it.
func (x *attempt) undone() {
	if x == nil || !x.locked {
		return
	}
	var hints []Hint
	for _, a := range x.acks {
		if a.group != nil && (a.at == nil || !a.at.Live) {
			hints = append(hints, Hint{Queue: a.group.QueueID, Partition: a.row.ID})
		}
	}
	if len(hints) > 0 {
		x.e.announce(hints, nil)
	}
}

// happened puts into effect what the commit of the transaction changed.
func (x *attempt) happened() {
	x.remember()
	counts := x.e.Metrics
	counts.Total(metrics.Transactions, 1)
	queues := make(map[int32]bool)
	for _, n := range x.stored {
		queues[n.queue.ID] = true
	}
	for _, a := range x.acks {
		queues[a.group.QueueID] = true
		for _, it := range a.of.Items {
			if it.Status == Completed {
				counts.Add(a.group.Project, a.group.QueueID, metrics.AckSuccess, 1)
			} else {
				counts.Add(a.group.Project, a.group.QueueID, metrics.AckFailed, 1)
			}
		}
	}
	for q := range queues {
		counts.Queue(q, metrics.Transactions, 1)
	}
	for _, a := range x.acks {
		if a.settle != nil {
			counts.Total(metrics.CommitAcks, 1)
			x.e.settled(a.settle, a.moved)
			a.acks.report(a.verdict, a.settle)
		}
		a.of.Results = a.acks.Results
	}
	x.announce()
	for i, b := range x.t.Pushes {
		b.Results = x.pushes[i].Results
	}
}
