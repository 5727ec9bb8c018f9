// Package catalog turns the names that clients send into rows: queues, partitions and consumer groups.
// It creates them on first use and remembers them, bounded; what it remembers is checked again by every
// statement that uses it, so a stale entry costs a retry and never a wrong answer.
package catalog

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/zeebo/xxh3"
	"golang.org/x/sync/singleflight"

	"ferrymq/db"
)

// QueueMode is the group of a pop that names none.
const QueueMode = "__QUEUE_MODE__"

// ErrGone means that the queue was deleted while it was being used. The caller resolves the name again.
var ErrGone = errors.New("queue is gone")

// ErrNoProject means that the project was deleted while it was being used.
var ErrNoProject = errors.New("project is gone")

// Queue is one row of queues. A change makes a new Queue; one that is held never changes.
type Queue = db.FerrymqQueue

// Partition is a partition that exists or is about to. Holders of one may outlive the row: see Forget.
type Partition struct {
	QueueID int32
	Name    string
	// Hidden ones carry the messages without a key of a stream; no name reaches them.
	Hidden bool
	// Lane is the same for the same (queue, name) everywhere: what works on a partition takes turns by it.
	Lane uint64

	row  atomic.Pointer[Row]
	tail atomic.Int64
}

// Row is the identity a partition gets when it is created.
type Row struct {
	ID       int64
	PublicID uuid.UUID
}

// Row is nil while the partition is not known to exist.
func (p *Partition) Row() *Row { return p.row.Load() }

// Created records the row, after the commit that made it or when it was read. The offsets of a new one start from 0.
func (p *Partition) Created(r Row) {
	if old := p.row.Swap(&r); old != nil && old.ID != r.ID {
		p.tail.Store(0)
	}
}

// Forget drops a row that turned out to be gone; a newer one stays.
func (p *Partition) Forget(r *Row) {
	if p.row.CompareAndSwap(r, nil) {
		p.tail.Store(0)
	}
}

// SeenTail notes that the next offset of the partition is at least n. A hint for waking, not for correctness.
func (p *Partition) SeenTail(n int64) {
	for {
		have := p.tail.Load()
		if n <= have || p.tail.CompareAndSwap(have, n) {
			return
		}
	}
}

// Tail is the highest next offset seen.
func (p *Partition) Tail() int64 { return p.tail.Load() }

// Group is a consumer group of one queue.
type Group struct {
	ID      int32
	Project int32
	QueueID int32
	Name    string
	// Registered groups have a cursor on every partition of the queue; others only where a partition pop made one.
	Registered bool
	Start      Start
	// Lanes is how a subscription is delivered; nil for a group of the /api/v1 routes.
	Lanes   *Policy
	seeding *seeding // nil once every partition that existed at registration has its cursor
}

// Policy is how the lanes of a subscription are delivered: one message at a time each.
type Policy struct {
	Stream       string
	LeaseSeconds int32
	MaxAttempts  int32         // 0: no limit
	Initial      time.Duration // of the backoff: it grows by Multiplier with each failed attempt, up to Max
	Max          time.Duration
	Multiplier   float64
	CountExpired bool // a lease that ended is a failed attempt
	MaxInFlight  int32
	Paused       bool
	TraceFull    bool
}

// Limited says whether the messages in flight of a subscription are counted exactly.
func (g *Group) Limited() bool { return g.Lanes != nil && g.Lanes.MaxInFlight > 0 }

// Start says where a (group, partition) without a cursor begins. A nil At means the moment of the first contact.
type Start struct {
	Mode string // all, new or time
	At   *time.Time
}

// All starts at the oldest retained message.
func All() Start { epoch := time.Unix(0, 0).UTC(); return Start{Mode: "all", At: &epoch} }

type name struct {
	queue  int32
	name   string
	hidden bool // of a partition
}

type pair struct {
	group     int32
	partition int64
}

// Catalog is what is known of the queues of one project. It is safe for concurrent use.
type Catalog struct {
	*shared
	project int32
}

// shared is what the catalogs of all projects have in common.
type shared struct {
	OnPartition func(*Queue) // called when a pop has made a partition; set before use, may be nil

	pool   *pgxpool.Pool
	q      *db.Queries
	onSeed func(group int32) // a chunk of cursors was made: parked pops look again

	projects      *cache[string, known]
	queues        *cache[scoped, *Queue]
	partitions    *cache[name, *Partition]
	public        *cache[publicID, *Partition]
	groups        *cache[name, *Group]
	subscriptions *cache[scoped, *Group]
	met           *cache[pair, struct{}]
	discovered    *cache[discovery, struct{}]

	firsts singleflight.Group // first uses of a name: one of many callers creates, the others get its result

	mu       sync.Mutex
	seeds    map[int32]*seeding
	seedRoom chan struct{} // seeders at work
	meetRoom chan struct{} // first contacts with a partition
	stop     context.Context
	working  sync.WaitGroup
}

// scoped is a name in a project.
type scoped struct {
	project int32
	name    string
}

// publicID is what clients know a partition by. Another project's is none.
type publicID struct {
	project int32
	id      uuid.UUID
}

// known is the project of a name, and since when: it may be deleted and made again elsewhere.
type known struct {
	id int32
	at time.Time
}

// projectAge is how long the project of a name is believed.
const projectAge = 3 * time.Second

// In is the catalog of another project; nil when there is none of that name.
func (c *Catalog) In(ctx context.Context, project string) (*Catalog, error) {
	if k, ok := c.projects.get(project); ok && time.Since(k.at) < projectAge {
		return c.Of(k.id), nil
	}
	id, err := c.q.ProjectGet(ctx, db.ProjectGetParams{Name: project})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	c.projects.set(project, known{id, time.Now()})
	return c.Of(id), nil
}

// ForgetProject drops a name whose project was deleted.
func (c *Catalog) ForgetProject(name string) { c.projects.drop(name) }

// Of is In by id.
func (c *Catalog) Of(project int32) *Catalog { return &Catalog{c.shared, project} }

// Project is the id of the project that names are looked up in.
func (c *Catalog) Project() int32 { return c.project }

func (c *Catalog) scoped(n string) scoped { return scoped{c.project, n} }

// How many entries the caches hold at most, in two generations each: about 60 MB when all are full.
const (
	maxQueues     = 50_000
	maxPartitions = 100_000
	maxGroups     = 50_000
	maxProjects   = 1_000
)

// New makes a catalog of the queues of one project. onSeed is called when a new group got cursors.
// Seeding goes on in the background until stop ends; Wait waits for it.
func New(stop context.Context, pool *pgxpool.Pool, project int32, onSeed func(group int32)) *Catalog {
	room := max(1, pool.Config().MaxConns/2) // of those who wait for locks
	return &Catalog{&shared{
		pool: pool, q: db.New(db.Patient{Pool: pool}), onSeed: onSeed, stop: stop,
		projects:      newCache[string, known](maxProjects),
		queues:        newCache[scoped, *Queue](maxQueues),
		partitions:    newCache[name, *Partition](maxPartitions),
		public:        newCache[publicID, *Partition](maxPartitions),
		groups:        newCache[name, *Group](maxGroups),
		subscriptions: newCache[scoped, *Group](maxGroups),
		met:           newCache[pair, struct{}](maxPartitions),
		discovered:    newCache[discovery, struct{}](maxGroups),
		seeds:         make(map[int32]*seeding),
		seedRoom:      make(chan struct{}, min(2, room)),
		meetRoom:      make(chan struct{}, room),
	}, project}
}

// Wait returns when no background seeding runs any more. Call it after stop has ended.
func (c *Catalog) Wait() { c.working.Wait() }

// Derive is the namespace and task a queue has by its name alone.
func Derive(queue string) (namespace, task string) {
	parts := strings.SplitN(queue, ".", 3)
	if len(parts) > 1 {
		return parts[0], parts[1]
	}
	return queue, ""
}

// Queue finds a live queue by name; nil when there is none.
func (c *Catalog) Queue(ctx context.Context, name string) (*Queue, error) {
	if q, ok := c.queues.get(c.scoped(name)); ok {
		return q, nil
	}
	row, err := c.q.QueueGet(ctx, db.QueueGetParams{ProjectID: c.project, Name: name})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return c.queues.setUnless(c.scoped(name), &row, func(now *Queue) bool { return now.UpdatedAt.After(row.UpdatedAt) }), nil
}

// first runs fn once for all who call it with the same key at the same time. It does not end with one caller's ctx.
func first[T any](ctx context.Context, c *Catalog, key string, fn func(ctx context.Context) (T, error)) (T, error) {
	done := c.firsts.DoChan(key, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), firstTimeout)
		defer cancel()
		return fn(ctx)
	})
	var none T
	select {
	case <-ctx.Done():
		return none, ctx.Err()
	case r := <-done:
		if r.Err != nil {
			return none, r.Err
		}
		return r.Val.(T), nil
	}
}

// firstTimeout bounds what many wait for.
const firstTimeout = 30 * time.Second

// EnsureQueue finds or creates a queue, with the groups of the discovery registrations that cover it.
func (c *Catalog) EnsureQueue(ctx context.Context, name string) (*Queue, error) {
	return c.ensure(ctx, name, 0, UnkeyedLanes)
}

// UnkeyedLanes is how many hidden lanes a stream has unless it says otherwise.
const UnkeyedLanes = 256

// KeepConsumed is how long a stream that was made by its first publish keeps what every subscription has settled.
const KeepConsumed = 7 * 24 * time.Hour

// EnsureStream is EnsureQueue with the defaults of a stream.
func (c *Catalog) EnsureStream(ctx context.Context, name string) (*Queue, error) {
	return c.ensure(ctx, name, KeepConsumed, UnkeyedLanes)
}

func (c *Catalog) ensure(ctx context.Context, name string, keep time.Duration, lanes int32) (*Queue, error) {
	if q, ok := c.queues.get(c.scoped(name)); ok {
		return q, nil
	}
	return first(ctx, c, fmt.Sprintf("q%d %s", c.project, name), func(ctx context.Context) (*Queue, error) { return c.createQueue(ctx, name, keep, lanes) })
}

func (c *Catalog) createQueue(ctx context.Context, name string, keep time.Duration, lanes int32) (*Queue, error) {
	for {
		q, err := c.Queue(ctx, name)
		if q != nil || err != nil {
			return q, err
		}
		namespace, task := Derive(name)
		var made *Queue
		var alive bool
		var joined []db.GroupCreateRow
		err = c.retried(ctx, func(q *db.Queries) error {
			made, alive, joined = nil, true, nil
			row, err := q.QueueCreate(ctx, db.QueueCreateParams{ProjectID: c.project, Name: name, Namespace: namespace, Task: task, KeepConsumed: int32(keep.Seconds()), UnkeyedLanes: lanes})
			if errors.Is(err, pgx.ErrNoRows) {
				alive, err = q.ProjectAlive(ctx, db.ProjectAliveParams{ID: c.project})
				return err
			}
			if err != nil {
				return err
			}
			made = &row
			joined, err = c.joinDiscovery(ctx, q, &row)
			return err
		})
		if err != nil {
			return nil, err
		}
		if !alive {
			c.projects.dropIf(func(k known) bool { return k.id == c.project })
			return nil, ErrNoProject
		}
		if made != nil {
			c.queues.set(c.scoped(name), made)
			return made, c.seedJoined(ctx, joined)
		}
	}
}

// joinDiscovery registers the groups whose discovery pops cover the queue, with their first time. The queue's row is locked or new.
func (c *Catalog) joinDiscovery(ctx context.Context, q *db.Queries, queue *Queue) (joined []db.GroupCreateRow, err error) {
	found, err := q.DiscoveryOf(ctx, db.DiscoveryOfParams{ProjectID: c.project, Namespace: queue.Namespace, Task: queue.Task})
	if err != nil {
		return nil, err
	}
	for _, d := range found {
		g, err := register(ctx, q, queue.ID, d.Name, Start{Mode: d.StartMode, At: &d.StartAt})
		if err != nil {
			return nil, err
		}
		joined = append(joined, g)
	}
	return joined, nil
}

// seedJoined makes the cursors of groups that joinDiscovery registered, after its commit.
func (c *Catalog) seedJoined(ctx context.Context, joined []db.GroupCreateRow) error {
	for _, row := range joined {
		g := c.remember(name{queue: row.QueueID, name: row.Name}, row.ID, true, row.Seeded, Start{Mode: row.StartMode, At: &row.StartAt})
		if done := g.Seeded(); done != nil {
			select {
			case <-done:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	return nil
}

// Configure changes a queue, creating it first when it is missing. change gets the row as it is, locked, and edits it.
func (c *Catalog) Configure(ctx context.Context, name string, change func(*Queue) error) (*Queue, error) {
	return c.configure(ctx, name, 0, UnkeyedLanes, change)
}

// ConfigureStream is Configure of a stream; lanes is how many hidden ones it gets when it is created.
func (c *Catalog) ConfigureStream(ctx context.Context, name string, lanes int32, change func(*Queue) error) (*Queue, error) {
	return c.configure(ctx, name, KeepConsumed, lanes, change)
}

func (c *Catalog) configure(ctx context.Context, name string, keep time.Duration, lanes int32, change func(*Queue) error) (*Queue, error) {
	for {
		q, err := c.ensure(ctx, name, keep, lanes)
		if err != nil {
			return nil, err
		}
		var after Queue
		var recheck bool
		var joined []db.GroupCreateRow
		err = c.retried(ctx, func(tq *db.Queries) error {
			recheck, joined = false, nil
			if _, err := tq.QueueLock(ctx, db.QueueLockParams{ID: q.ID}); err != nil {
				return err
			}
			before, err := tq.QueueRead(ctx, db.QueueReadParams{ID: q.ID})
			if err != nil {
				return err
			}
			edited := before
			if err := change(&edited); err != nil {
				return err
			}
			after, err = tq.QueueConfigure(ctx, db.QueueConfigureParams{
				ID: edited.ID, Namespace: edited.Namespace, Task: edited.Task, LeaseTime: edited.LeaseTime, RetryLimit: edited.RetryLimit,
				RetryDelay: edited.RetryDelay, Priority: edited.Priority, MaxSize: edited.MaxSize, TTL: edited.TTL,
				DeadLetterQueue: edited.DeadLetterQueue, DLQAfterMaxRetries: edited.DLQAfterMaxRetries,
				DelayedProcessing: edited.DelayedProcessing, WindowBuffer: edited.WindowBuffer,
				RetentionSeconds: edited.RetentionSeconds, CompletedRetentionSeconds: edited.CompletedRetentionSeconds,
				RetentionEnabled: edited.RetentionEnabled, EncryptionEnabled: edited.EncryptionEnabled,
				MaxWaitTimeSeconds: edited.MaxWaitTimeSeconds, MinPopWaitTime: edited.MinPopWaitTime,
				DedupWindowSeconds: edited.DedupWindowSeconds, RetentionSinkHold: edited.RetentionSinkHold,
				RetentionSinkHoldMaxSeconds: edited.RetentionSinkHoldMaxSeconds, UnkeyedLanes: edited.UnkeyedLanes,
			})
			if err != nil {
				return err
			}
			if after.Namespace != before.Namespace || after.Task != before.Task {
				if joined, err = c.joinDiscovery(ctx, tq, &after); err != nil {
					return err
				}
			}
			if r := after.RetainSeconds; r != nil && (before.RetainSeconds == nil || *r != *before.RetainSeconds) {
				// Once more when every statement that began under the old rules has ended.
				for _, delay := range []int32{0, 60} {
					if err := tq.JobCreate(ctx, db.JobCreateParams{Kind: "retention", QueueID: after.ID, DelaySeconds: delay}); err != nil {
						return err
					}
				}
			}
			if after.DelayedProcessing != before.DelayedProcessing || after.WindowBuffer != before.WindowBuffer {
				recheck = true
				return tq.JobCreate(ctx, db.JobCreateParams{Kind: "recheck", QueueID: after.ID, DelaySeconds: 5})
			}
			return nil
		})
		if errors.Is(err, pgx.ErrNoRows) { // deleted since it was looked up
			c.queues.drop(c.scoped(name))
			continue
		}
		if err != nil {
			return nil, err
		}
		c.queues.set(c.scoped(name), &after)
		if recheck { // or as much of it as is done soon: the job does the rest
			soon, cancel := context.WithTimeout(ctx, recheckTime)
			if c.Recheck(soon, after.ID) == nil {
				_ = c.q.JobRecheckDone(soon, db.JobRecheckDoneParams{QueueID: after.ID}) // or the job finds nothing left to do
			}
			cancel()
		}
		return &after, c.seedJoined(ctx, joined)
	}
}

// recheckTime is how long a configure may take to make new delays hold at once.
const recheckTime = 2 * time.Second

// Recheck makes the cursors of a queue judge their delays and windows anew. It may run anywhere any number of times.
func (c *Catalog) Recheck(ctx context.Context, queue int32) error {
	groups, err := c.q.GroupsOfQueue(ctx, db.GroupsOfQueueParams{QueueID: queue})
	if err != nil {
		return err
	}
	for _, g := range groups {
		for after := int64(0); ; {
			last, err := c.q.RecheckCursors(ctx, db.RecheckCursorsParams{GroupID: g, After: after, Max: 1000})
			if err != nil {
				return err
			}
			if last == 0 {
				break
			}
			after = last
		}
	}
	return nil
}

// Delete frees the name of a queue at once and leaves the removal of its rows to a job. It reports whether the queue existed.
func (c *Catalog) Delete(ctx context.Context, name string) (id int32, existed bool, err error) {
	c.queues.drop(c.scoped(name))
	q, err := c.Queue(ctx, name)
	if q == nil || err != nil {
		return 0, false, err
	}
	err = c.retried(ctx, func(tq *db.Queries) error {
		existed = false
		// Waits for creators of partitions: what they made is then removed too.
		if _, err := tq.QueueLock(ctx, db.QueueLockParams{ID: q.ID}); errors.Is(err, pgx.ErrNoRows) {
			return nil
		} else if err != nil {
			return err
		}
		n, err := tq.QueueDelete(ctx, db.QueueDeleteParams{ID: q.ID})
		existed = n > 0
		if err != nil || !existed {
			return err
		}
		return tq.JobCreate(ctx, db.JobCreateParams{Kind: "delete_queue", QueueID: q.ID})
	})
	if err == nil && existed {
		err = c.q.SubscriptionsDrop(ctx, db.SubscriptionsDropParams{QueueID: q.ID})
	}
	c.ForgetID(q.ID)
	return q.ID, existed && err == nil, err
}

// ForgetQueue drops a name whose queue turned out to be deleted or changed elsewhere.
func (c *Catalog) ForgetQueue(name string) { c.queues.drop(c.scoped(name)) }

// ForgetID is ForgetQueue by id.
func (c *Catalog) ForgetID(id int32) {
	c.queues.dropIf(func(q *Queue) bool { return q.ID == id })
	c.subscriptions.dropIf(func(g *Group) bool { return g.QueueID == id })
}

// Refresh drops the queues that changed in the last seconds, on whatever broker. Run it every few seconds, with overlap:
// that is how a configure on another broker takes effect here.
func (c *Catalog) Refresh(ctx context.Context, seconds int32) error {
	changed, err := c.q.QueueChangedSince(ctx, db.QueueChangedSinceParams{Seconds: seconds})
	if err != nil {
		return err
	}
	for _, q := range changed {
		c.subscriptions.dropIf(func(g *Group) bool { return g.QueueID == q.ID })
		c.queues.drop(scoped{q.ProjectID, q.Name})
	}
	return nil
}

// ForgetAll is for when nothing remembered can be trusted: the database was away for long.
func (c *Catalog) ForgetAll() {
	c.projects.clear()
	c.queues.clear()
	c.groups.clear()
	c.subscriptions.clear()
	c.discovered.clear()
	c.met.clear()
}

// ForgetPartitions is for when partitions may not be what they were: the database was set back.
func (c *Catalog) ForgetPartitions() {
	c.partitions.clear()
	c.public.clear()
}

// Removed forgets a partition that was cleaned up.
func (c *Catalog) Removed(queue int32, partition string, hidden bool, id int64, public uuid.UUID) {
	if p, ok := c.partitions.get(name{queue, partition, hidden}); ok {
		if r := p.Row(); r != nil && r.ID == id {
			p.Forget(r)
		}
	}
	c.public.drop(publicID{c.project, public})
}

// Known returns a queue's partition when both are remembered, without looking anything up.
func (c *Catalog) Known(queue, partition string) (*Queue, *Partition) {
	q, ok := c.queues.get(c.scoped(queue))
	if !ok {
		return nil, nil
	}
	p, ok := c.partitions.get(name{queue: q.ID, name: partition})
	if !ok || p.Row() == nil {
		return nil, nil
	}
	return q, p
}

// Partitions finds the partitions of one queue by name, in the order of names. Those that don't exist have no Row yet.
func (c *Catalog) Partitions(ctx context.Context, q *Queue, names []string) ([]*Partition, error) {
	return c.find(ctx, q, names, false)
}

// Unkeyed finds the hidden partitions of a stream by their numbers, like Partitions.
func (c *Catalog) Unkeyed(ctx context.Context, q *Queue, lanes []int32) ([]*Partition, error) {
	names := make([]string, len(lanes))
	for i, n := range lanes {
		names[i] = "~unkeyed/" + strconv.Itoa(int(n))
	}
	return c.find(ctx, q, names, true)
}

// Again finds the partition of the same name, in a queue that was looked up again.
func (c *Catalog) Again(ctx context.Context, q *Queue, p *Partition) ([]*Partition, error) {
	return c.find(ctx, q, []string{p.Name}, p.Hidden)
}

func (c *Catalog) find(ctx context.Context, q *Queue, names []string, hidden bool) ([]*Partition, error) {
	out := make([]*Partition, len(names))
	var ids []int32
	var unknown []string
	for i, n := range names {
		p, ok := c.partitions.get(name{q.ID, n, hidden})
		if !ok {
			p = c.partitions.add(name{q.ID, n, hidden}, newPartition(q.ID, n, hidden))
		}
		out[i] = p
		if p.Row() == nil {
			ids, unknown = append(ids, q.ID), append(unknown, n)
		}
	}
	if len(unknown) == 0 {
		return out, nil
	}
	found, err := c.q.PartitionFindMany(ctx, db.PartitionFindManyParams{QueueIds: ids, Names: unknown, Hidden: hidden})
	if err != nil {
		return nil, err
	}
	for _, f := range found {
		c.found(q.ProjectID, f.ID, f.PublicID, f.QueueID, f.Name, f.Hidden, f.NextOffset)
	}
	return out, nil
}

func newPartition(queue int32, n string, hidden bool) *Partition {
	p := &Partition{QueueID: queue, Name: n, Hidden: hidden, Lane: xxh3.HashStringSeed(n, uint64(queue))}
	if hidden {
		p.Lane++
	}
	return p
}

// found remembers a partition; by the id that clients know only when its project is given.
func (c *Catalog) found(project int32, id int64, public uuid.UUID, queue int32, n string, hidden bool, tail int64) *Partition {
	p := c.partitions.add(name{queue, n, hidden}, newPartition(queue, n, hidden))
	if r := p.Row(); r == nil || r.ID != id {
		p.Created(Row{ID: id, PublicID: public})
	}
	p.SeenTail(tail)
	if project != 0 {
		c.public.set(publicID{project, public}, p)
	}
	return p
}

// ByID finds partitions of one queue by the ids of their rows; others are missing from the result.
func (c *Catalog) ByID(ctx context.Context, queue int32, ids []int64) (map[int64]*Partition, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	rows, err := c.q.PartitionFindIDs(ctx, db.PartitionFindIDsParams{QueueID: queue, Ids: ids})
	if err != nil {
		return nil, err
	}
	out := make(map[int64]*Partition, len(rows))
	for _, f := range rows {
		out[f.ID] = c.found(0, f.ID, f.PublicID, f.QueueID, f.Name, f.Hidden, f.NextOffset)
	}
	return out, nil
}

// Claimed remembers a partition that a claim returned, so that its acks find it without a look-up.
func (c *Catalog) Claimed(project, queue int32, id int64, public uuid.UUID, partition string, hidden bool, tail int64) *Partition {
	return c.found(project, id, public, queue, partition, hidden, tail)
}

// Public finds partitions by the ids that clients know; those of deleted queues, other projects or unknown ones are missing from the result.
func (c *Catalog) Public(ctx context.Context, ids []uuid.UUID) (map[uuid.UUID]*Partition, error) {
	out := make(map[uuid.UUID]*Partition, len(ids))
	var unknown []uuid.UUID
	for _, id := range ids {
		if p, ok := c.public.get(publicID{c.project, id}); ok {
			if r := p.Row(); r != nil && r.PublicID == id {
				out[id] = p
				continue
			}
		}
		unknown = append(unknown, id)
	}
	if len(unknown) == 0 {
		return out, nil
	}
	found, err := c.q.PartitionFindPublic(ctx, db.PartitionFindPublicParams{ProjectID: c.project, PublicIds: unknown})
	if err != nil {
		return nil, err
	}
	for _, f := range found {
		out[f.PublicID] = c.found(c.project, f.ID, f.PublicID, f.QueueID, f.Name, f.Hidden, f.NextOffset)
	}
	return out, nil
}
