package catalog

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/db"
)

// seedChunk is how many partitions get a cursor in one transaction: their rows are locked for that long.
const seedChunk = 1000

// seeding is the making of the cursors of a newly registered group.
type seeding struct {
	done   chan struct{}         // closed when every partition has its cursor, or nobody goes on
	failed atomic.Pointer[error] // why the last try ended early; it is tried again
}

// Seeded is closed once all partitions that existed when the group was registered have their cursor; nil = long ago.
func (g *Group) Seeded() <-chan struct{} {
	if g.seeding == nil {
		return nil
	}
	return g.seeding.done
}

// SeedFailure is why the last try to make the cursors failed, as long as they are not made.
func (g *Group) SeedFailure() error {
	if g.seeding == nil {
		return nil
	}
	err := g.seeding.failed.Load()
	select {
	case <-g.seeding.done:
		return nil
	default:
	}
	if err == nil {
		return nil
	}
	return *err
}

// Group finds a group that exists, or nil. It makes nothing.
func (c *Catalog) Group(ctx context.Context, queue int32, group string) (*Group, error) {
	key := name{queue: queue, name: group}
	if g, ok := c.groups.get(key); ok {
		return g, nil
	}
	row, err := c.q.GroupGet(ctx, db.GroupGetParams{QueueID: queue, Name: group})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return c.remember(key, row.ID, row.Registered, row.Seeded, Start{Mode: row.StartMode, At: &row.StartAt}), nil
}

// ForgetGroup drops a group that turned out to be gone.
func (c *Catalog) ForgetGroup(queue int32, group string) {
	c.groups.drop(name{queue: queue, name: group})
}

func (c *Catalog) remember(key name, id int32, registered, seeded bool, start Start) *Group {
	g := &Group{ID: id, Project: c.project, QueueID: key.queue, Name: key.name, Registered: registered, Start: start}
	if registered && !seeded {
		g.seeding = c.seed(g)
	}
	c.groups.set(key, g)
	return g
}

// Register is the first queue-wide contact of a group: it stores where the group starts and gives every partition its cursor.
// A group that is registered already keeps its start. ErrGone: the queue was deleted.
func (c *Catalog) Register(ctx context.Context, queue int32, group string, start Start) (*Group, error) {
	if g, ok := c.groups.get(name{queue: queue, name: group}); ok && g.Registered {
		return g, nil
	}
	return first(ctx, c, fmt.Sprintf("g%d %s", queue, group), func(ctx context.Context) (*Group, error) { return c.registerGroup(ctx, queue, group, start) })
}

func (c *Catalog) registerGroup(ctx context.Context, queue int32, group string, start Start) (*Group, error) {
	if g, err := c.Group(ctx, queue, group); err != nil || (g != nil && g.Registered) {
		return g, err
	}
	var row db.GroupCreateRow
	err := c.retried(ctx, func(q *db.Queries) error {
		if _, err := q.QueueLock(ctx, db.QueueLockParams{ID: queue}); err != nil {
			return err
		}
		var err error
		row, err = register(ctx, q, queue, group, start)
		return err
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrGone
	}
	if err != nil {
		return nil, err
	}
	return c.remember(name{queue: queue, name: group}, row.ID, true, row.Seeded, Start{Mode: row.StartMode, At: &row.StartAt}), nil
}

// register runs under the queue's row lock: creators of partitions are waited for, later ones see the group and add its cursor themselves.
// The job makes sure that some broker finishes the seeding.
func register(ctx context.Context, q *db.Queries, queue int32, group string, start Start) (db.GroupCreateRow, error) {
	row, err := q.GroupCreate(ctx, db.GroupCreateParams{QueueID: queue, Name: group, Registered: true, StartMode: start.Mode, StartAt: start.At})
	if err != nil {
		return row, err
	}
	if !row.Registered {
		if _, err := q.GroupRegister(ctx, db.GroupRegisterParams{ID: row.ID, StartMode: start.Mode, StartAt: start.At}); err != nil {
			return row, err
		}
		again, err := q.GroupGet(ctx, db.GroupGetParams{QueueID: queue, Name: group})
		if err != nil {
			return row, err
		}
		row = db.GroupCreateRow(again)
	}
	if row.Seeded {
		return row, nil
	}
	return row, q.JobCreate(ctx, db.JobCreateParams{Kind: "seed", QueueID: queue, GroupID: &row.ID, DelaySeconds: 10})
}

// seed starts making the cursors of g in the background, once per group at a time.
func (c *Catalog) seed(g *Group) *seeding {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.seeds[g.ID]; s != nil {
		return s
	}
	s := &seeding{done: make(chan struct{})}
	c.seeds[g.ID] = s
	c.working.Add(1)
	go func() {
		defer c.working.Done()
		select {
		case c.seedRoom <- struct{}{}:
			defer func() { <-c.seedRoom }()
		case <-c.stop.Done():
		}
		for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
			err := c.Seed(c.stop, g.ID)
			if err == nil || c.stop.Err() != nil {
				break
			}
			s.failed.Store(&err)
			select {
			case <-c.stop.Done():
			case <-time.After(wait):
			}
		}
		c.mu.Lock()
		delete(c.seeds, g.ID)
		c.mu.Unlock()
		// The next look-up reads that the group is seeded.
		if g.Lanes != nil {
			c.subscriptions.drop(scoped{g.Project, g.Name})
		} else {
			c.groups.drop(name{queue: g.QueueID, name: g.Name})
		}
		close(s.done)
		c.onSeed(g.ID)
	}()
	return s
}

// Seed gives every partition that a registered group has no cursor on one, a chunk per transaction. It may run anywhere any number of times.
func (c *Catalog) Seed(ctx context.Context, group int32) error {
	for {
		finished := false
		err := pgx.BeginFunc(ctx, db.Patient{Pool: c.pool}, func(tx pgx.Tx) error {
			q := c.q.WithTx(tx)
			g, err := q.GroupLock(ctx, db.GroupLockParams{ID: group})
			if errors.Is(err, pgx.ErrNoRows) || (err == nil && g.Seeded) {
				finished = true
				return nil
			}
			if err != nil {
				return err
			}
			ids, err := q.SeedLock(ctx, db.SeedLockParams{QueueID: g.QueueID, After: g.SeededTo, Max: seedChunk})
			if err != nil {
				return err
			}
			to := g.SeededTo
			if len(ids) > 0 {
				to = ids[len(ids)-1]
				if err := q.SeedCursors(ctx, db.SeedCursorsParams{GroupID: group, StartAt: g.StartAt, Ids: ids}); err != nil {
					return err
				}
			}
			finished = len(ids) < seedChunk
			return q.SeedAdvance(ctx, db.SeedAdvanceParams{ID: group, SeededTo: to, Seeded: finished})
		})
		if err != nil {
			return err
		}
		if finished {
			return c.q.JobSeedDone(ctx, db.JobSeedDoneParams{GroupID: group})
		}
		c.onSeed(group)
	}
}

// Meet is the contact of a group with one partition: afterwards the pair has a cursor. It registers nothing.
// A missing partition is created, and returned with its row, unless create is false: then its Row stays nil and there is no cursor.
// ErrHeld: somebody else had the partition locked until then.
func (c *Catalog) Meet(ctx context.Context, q *Queue, p *Partition, group string, start Start, create bool, until time.Time) (*Group, error) {
	g, err := c.Group(ctx, q.ID, group)
	if err != nil {
		return nil, err
	}
	if g == nil {
		if g, err = c.createUnregistered(ctx, q.ID, group, start); err != nil {
			return nil, err
		}
	}
	if p.Row() == nil {
		if !create {
			return g, nil
		}
		if err := c.createPartition(ctx, q, p); err != nil {
			return nil, err
		}
	}
	row := p.Row()
	if row == nil {
		return nil, ErrGone
	}
	key := pair{g.ID, row.ID}
	if _, ok := c.met.get(key); ok || (g.Registered && g.seeding == nil) {
		return g, nil
	}
	for {
		// Together with all who meet it at the same time, and only so many pairs at once: somebody may hold the partition for long.
		_, err = first(ctx, c, fmt.Sprintf("m%d %d", g.ID, row.ID), func(ctx context.Context) (struct{}, error) {
			return struct{}{}, c.meet(ctx, g.ID, row.ID, start)
		})
		if !db.IsLockTimeout(err) || c.stop.Err() != nil {
			break
		}
		if !time.Now().Before(until) {
			return nil, ErrHeld
		}
	}
	switch {
	case errors.Is(err, errNoGroup):
		c.ForgetGroup(q.ID, group)
		return nil, ErrGone
	case errors.Is(err, pgx.ErrNoRows):
		p.Forget(row)
		return nil, ErrGone
	case err != nil:
		return nil, err
	}
	c.met.set(key, struct{}{})
	return g, nil
}

// ErrHeld means that somebody has had a partition locked for too long.
var ErrHeld = errors.New("partition is locked")

// meetLockTimeout is well within what a pop's answer may be late.
const meetLockTimeout = "250"

// errNoGroup: the group was deleted.
var errNoGroup = errors.New("group is gone")

// meet gives a pair its cursor. Those who wait for the partition's lock hold a part of the connections, and let others have them now and then.
func (c *Catalog) meet(ctx context.Context, group int32, partition int64, start Start) error {
	select {
	case c.meetRoom <- struct{}{}:
		defer func() { <-c.meetRoom }()
	case <-ctx.Done():
		return ctx.Err()
	}
	return c.retried(ctx, func(q *db.Queries) error {
		if err := q.FlushSettings(ctx, db.FlushSettingsParams{StatementTimeoutMs: "10000", LockTimeoutMs: meetLockTimeout}); err != nil {
			return err
		}
		held, err := q.GroupHold(ctx, db.GroupHoldParams{ID: group})
		if errors.Is(err, pgx.ErrNoRows) {
			return errNoGroup
		}
		if err != nil {
			return err
		}
		if held.Registered {
			start.At = &held.StartAt // what the group is registered with wins over what the pop carries
		}
		if _, err := q.PartitionLock(ctx, db.PartitionLockParams{ID: partition}); err != nil {
			return err
		}
		at := start.At
		if at == nil {
			i, err := q.InstallationGet(ctx)
			if err != nil {
				return err
			}
			at = &i.Now
		}
		_, err = q.CursorCreate(ctx, db.CursorCreateParams{GroupID: group, PartitionID: partition, StartAt: *at})
		return err
	})
}

func (c *Catalog) createUnregistered(ctx context.Context, queue int32, group string, start Start) (*Group, error) {
	var row db.GroupCreateRow
	err := c.retried(ctx, func(q *db.Queries) error {
		if _, err := q.QueueLock(ctx, db.QueueLockParams{ID: queue}); err != nil {
			return err
		}
		var err error
		row, err = q.GroupCreate(ctx, db.GroupCreateParams{QueueID: queue, Name: group, StartMode: start.Mode, StartAt: start.At})
		return err
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrGone
	}
	if err != nil {
		return nil, err
	}
	return c.remember(name{queue: queue, name: group}, row.ID, row.Registered, row.Seeded, Start{Mode: row.StartMode, At: &row.StartAt}), nil
}

// createPartition makes an empty partition with the cursors of the registered groups.
func (c *Catalog) createPartition(ctx context.Context, queue *Queue, p *Partition) error {
	public, created := uuid.New(), false
	err := c.retried(ctx, func(q *db.Queries) error {
		made, err := q.CreatePartitions(ctx, db.CreatePartitionsParams{PublicIds: []uuid.UUID{public}, QueueIds: []int32{queue.ID}, Names: []string{p.Name}, Hiddens: []bool{p.Hidden}, Totals: []int64{0},
			SegPartitions: []uuid.UUID{}, SegRels: []int64{}, SegCounts: []int32{}, SegKeyNos: []int16{}, SegCodecs: []int16{}, SegFirstIds: []uuid.UUID{}, SegKeys: [][]byte{}, SegFrames: [][]byte{}})
		if err != nil {
			return err
		}
		if created = len(made) > 0; !created {
			return nil
		}
		return q.CreateCursors(ctx, db.CreateCursorsParams{PublicIds: []uuid.UUID{public}})
	})
	if err != nil {
		return err
	}
	if created && c.OnPartition != nil {
		c.OnPartition(queue)
	}
	return c.Resolve(ctx, p)
}

// Resolve reads the row of a partition that may have been created elsewhere. It leaves Row nil when there is none.
func (c *Catalog) Resolve(ctx context.Context, p *Partition) error {
	found, err := c.q.PartitionFindMany(ctx, db.PartitionFindManyParams{QueueIds: []int32{p.QueueID}, Names: []string{p.Name}, Hidden: p.Hidden})
	if err != nil {
		return err
	}
	for _, f := range found {
		p.Created(Row{ID: f.ID, PublicID: f.PublicID})
		c.found(0, f.ID, f.PublicID, f.QueueID, f.Name, f.Hidden, f.NextOffset)
	}
	return nil
}

// Scope is what a discovery pop matches queues by; empty = not asked for.
type Scope struct{ Namespace, Task string }

type discovery struct {
	scope Scope
	group string
}

// Covers says whether a queue matches.
func (s Scope) Covers(q *Queue) bool {
	return (s.Namespace == "" || s.Namespace == q.Namespace) && (s.Task == "" || s.Task == q.Task)
}

// Discover registers the group for every queue in scope that it does not know yet, with the start of the group's first discovery pop.
// It waits for their cursors until that time: what lacks one then is found later.
func (c *Catalog) Discover(ctx context.Context, scope Scope, group string, start Start, until time.Time) error {
	timeout := time.NewTimer(time.Until(until))
	defer timeout.Stop()
	key := discovery{scope, group}
	for {
		if _, ok := c.discovered.get(key); !ok {
			if _, err := c.q.DiscoveryRegister(ctx, db.DiscoveryRegisterParams{ProjectID: c.project, Name: group, Namespace: scope.Namespace, Task: scope.Task, StartMode: start.Mode, StartAt: start.At}); err != nil {
				return err
			}
			c.discovered.set(key, struct{}{})
		}
		unmet, err := c.q.DiscoveryUnmet(ctx, db.DiscoveryUnmetParams{ProjectID: c.project, Namespace: scope.Namespace, Task: scope.Task, Name: group})
		if err != nil || len(unmet) == 0 {
			return err
		}
		for _, q := range unmet {
			if q.ID == 0 { // the registration was deleted: this is a first contact again
				c.discovered.drop(key)
				break
			}
			g, err := c.joinScope(ctx, q.ID, scope, group)
			if errors.Is(err, ErrGone) {
				continue
			}
			if err != nil {
				return err
			}
			if done := g.Seeded(); done != nil {
				select {
				case <-done:
				case <-timeout.C:
					timeout.Reset(0) // for the others
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		}
	}
}

// joinScope registers a group for a queue with the start of its discovery registration. ErrGone: the queue or the registration was deleted.
func (c *Catalog) joinScope(ctx context.Context, queue int32, scope Scope, group string) (*Group, error) {
	return first(ctx, c, fmt.Sprintf("d%d %s", queue, group), func(ctx context.Context) (*Group, error) {
		var row db.GroupCreateRow
		err := c.retried(ctx, func(q *db.Queries) error {
			if _, err := q.QueueLock(ctx, db.QueueLockParams{ID: queue}); err != nil {
				return err
			}
			d, err := q.DiscoveryHold(ctx, db.DiscoveryHoldParams{ProjectID: c.project, Namespace: scope.Namespace, Task: scope.Task, Name: group})
			if err != nil {
				return err
			}
			row, err = register(ctx, q, queue, group, Start{Mode: d.StartMode, At: &d.StartAt})
			return err
		})
		if errors.Is(err, pgx.ErrNoRows) {
			return nil, ErrGone
		}
		if err != nil {
			return nil, err
		}
		return c.remember(name{queue: queue, name: group}, row.ID, true, row.Seeded, Start{Mode: row.StartMode, At: &row.StartAt}), nil
	})
}

// ForgetDiscovery deletes the discovery registrations of a group: queues that come to match later are not registered for it any more.
// It says whether there were any.
func (c *Catalog) ForgetDiscovery(ctx context.Context, group string) (bool, error) {
	n, err := c.q.DiscoveryForget(ctx, db.DiscoveryForgetParams{ProjectID: c.project, Name: group})
	return n > 0, err
}

// Restart changes where partitions start that a registered group has not met yet, on all its queues and on those that its discovery
// registrations come to cover. It returns how many registrations of both kinds that changed.
func (c *Catalog) Restart(ctx context.Context, group string, at time.Time) (int64, error) {
	// The discovery registrations first: a queue that is being created reads them, and is waited for.
	d, err := c.q.DiscoveryRestart(ctx, db.DiscoveryRestartParams{ProjectID: c.project, Name: group, StartAt: at})
	if err != nil {
		return 0, err
	}
	n, err := c.q.GroupRestart(ctx, db.GroupRestartParams{ProjectID: c.project, Name: group, StartAt: at})
	return d + n, err
}

// RemoveGroup removes some of what belongs to a deleted group, and returns how many cursors that were. more: there is more of it.
// It may run anywhere any number of times. An error means that nothing was removed, unless the connection was lost.
func (c *Catalog) RemoveGroup(ctx context.Context, group int32) (removed int64, more bool, err error) {
	err = pgx.BeginFunc(ctx, db.Patient{Pool: c.pool}, func(tx pgx.Tx) error {
		q := c.q.WithTx(tx)
		if err := q.FlushSettings(ctx, db.FlushSettingsParams{StatementTimeoutMs: "10000", LockTimeoutMs: "1000"}); err != nil {
			return err
		}
		removed, err = q.GroupRemoveCursors(ctx, db.GroupRemoveCursorsParams{ID: group, Max: removeChunk})
		return err
	})
	if err != nil {
		return 0, true, err
	}
	if removed == removeChunk {
		return removed, true, nil
	}
	return removed, false, c.q.GroupRemove(ctx, db.GroupRemoveParams{ID: group})
}

// removeChunk is how many cursors of a deleted group go in one transaction.
const removeChunk = 1000

// Ready lists groups of that name in scope with something to claim, starting after a group id and wrapping round.
func (c *Catalog) Ready(ctx context.Context, scope Scope, group string, after int32, limit int64) ([]db.DiscoveryReadyRow, error) {
	return c.q.DiscoveryReady(ctx, db.DiscoveryReadyParams{ProjectID: c.project, Namespace: scope.Namespace, Task: scope.Task, Name: group, After: after, Max: limit})
}
