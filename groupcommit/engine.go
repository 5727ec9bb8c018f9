// Package groupcommit is the engine: everything that waits (pushes, acks, extends, claims, of all queues) boards
// a flush, and one flush is one round trip and one commit.
//
// A caller boards an operation and waits for its result. A flush leaves at once when none is in the air and takes all
// that waits, so nothing waits on a timer, and more board the busier the database is; a crowd does not wait for its
// return, up to GROUP_COMMIT_WIDTH flushes at a time. What boards is divided into lanes by partition, and a lane is only
// ever on one flush, so a partition never waits on itself.
//
//	handler ── Push ──┐                      ┌── lock partitions, append, mark, settle, claim ──┐
//	handler ── Ack ───┼─ dock ─── flusher ───┤        one pipeline, one transaction             ├─ results, hints
//	parked pop ───────┘    ▲                 └──────────────────────────────────────────────────┘     │
//	                       └──────────────── side lane: one partition alone ◄─────────────────────────┘
//
// What a flush stored is announced as hints (a partition with something to deliver) to the pops parked here, and
// to other brokers. Pops that are parked when a push departs board the same flush (push-through): the message is
// stored and leased in one commit.
package groupcommit

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/dedup"
	"ferrymq/metrics"
	"ferrymq/segment"
	"ferrymq/wake"
)

// What an operation may fail with. Anything else is a statement that failed: nothing of the operation was stored.
var (
	// ErrNoConnection: no database connection in time. Nothing was stored.
	ErrNoConnection = errors.New("no database connection")
	// ErrUnknown: the connection broke during the commit; it may have happened or not.
	ErrUnknown = errors.New("connection lost, outcome unknown")
	// ErrOverloaded: too much waits already. Nothing was stored.
	ErrOverloaded = errors.New("overloaded")
	// ErrClosed: the broker is shutting down.
	ErrClosed = errors.New("shutting down")
	// ErrFull: the push would lift the queue above its maxSize. Nothing was stored.
	ErrFull = errors.New("queue is full")
	// ErrNoKey: the queue wants encryption and the broker has no key. Nothing was stored.
	ErrNoKey = errors.New("encryption key not configured")
)

// errNotSent: the connection was dead before anything of the flush went out.
var errNotSent = errors.New("connection found dead")

// connectTimeout is how long an operation waits for a database connection before it fails.
const connectTimeout = 5 * time.Second

// Hint says that a partition may have something to deliver.
type Hint = wake.Hint

// Options of New. Log, Pool and Catalog are required.
type Options struct {
	Pool    *pgxpool.Pool
	Flights *pgxpool.Pool // connections of flushes alone, so that nothing else can starve them; nil: Pool
	Log     *slog.Logger
	Hasher  segment.Hasher
	Keys    *segment.Keys // nil: no encryption
	Project int32
	DBNow   time.Time // the database's clock at this moment

	Width            int           // flushes in flight at most
	DedupBytes       int64         // memory of the deduplication window
	PushQueueMax     int64         // messages waiting to be written
	MaxParked        int           // parked pops
	StatementTimeout time.Duration // a longer statement is cancelled
	Recheck          Recheck
	// Announce gets what a commit of this broker left to deliver, for other brokers. It must not block. May be nil.
	Announce func([]Hint)
	// Alone says whether no other broker is known to be alive: then pushes need not lock their partitions in order first,
	// since within a broker no two flushes share one. Being wrong costs a deadlock, which is retried. May be nil.
	Alone func() bool
	// Metrics counts what is stored, settled and committed. May be nil.
	Metrics *metrics.Metrics
}

// Recheck is how often parked pops look at the database for what no hint told them.
type Recheck struct {
	Initial    time.Duration
	Threshold  int // after so many empty ones the interval grows
	Multiplier float64
	Max        time.Duration
}

// Engine runs the flushers. Its methods may be called by any number of goroutines.
type Engine struct {
	Options
	Catalog *catalog.Catalog

	q      *db.Queries
	dedup  *dedup.Cache
	dock   *dock
	park   *parking
	held   *holding
	frames frameCache
	sizes  sizes

	waiting  atomic.Int64 // messages boarded and not yet decided
	clock    atomic.Int64 // database clock minus ours, ns
	nextDue  chan time.Duration
	stop     context.Context
	cancel   context.CancelFunc
	draining bool                          // under park.mu, as are changes of ended
	ended    atomic.Pointer[chan struct{}] // closed while the broker drains or pops are paused: nothing parks
	workers  sync.WaitGroup
	sideWork sync.WaitGroup
	sideRoom chan struct{} // side lanes and transactions may hold so many connections
	turns    turns
	mover    mover
	transact atomic.Int64      // when a transaction began last, in Unix seconds
	reading  [lanes]sync.Mutex // by partition: the memory of ids is completed by one at a time
}

// New starts an engine. Close ends it.
func New(o Options) *Engine {
	if o.Flights == nil {
		o.Flights = o.Pool
	}
	if o.Metrics == nil {
		o.Metrics = metrics.New("")
	}
	e := &Engine{
		Options: o, q: db.New(db.Patient{Pool: o.Pool}), dedup: dedup.New(o.DedupBytes),
		nextDue:  make(chan time.Duration, 16),
		sideRoom: make(chan struct{}, max(2, int(o.Pool.Config().MaxConns)/2)),
	}
	running := make(chan struct{})
	e.ended.Store(&running)
	e.stop, e.cancel = context.WithCancel(context.Background())
	e.SetNow(o.DBNow)
	e.Catalog = catalog.New(e.stop, o.Pool, o.Project, func(group int32) { e.park.look(group) })
	e.Catalog.OnPartition = func(q *catalog.Queue) { e.Metrics.Add(q.ProjectID, q.ID, metrics.PartitionsCreated, 1) }
	e.park = newParking(e)
	e.held = newHolding()
	e.dock = newDock()
	e.mover.kick = make(chan time.Duration, 16)
	for range max(o.Width, 1) {
		e.workers.Add(1)
		go (&flusher{e: e}).run()
	}
	e.workers.Add(3)
	go e.recheckLoop()
	go e.promoteLoop()
	go e.moveLoop()
	return e
}

// Drain ends parked pops with an empty answer and makes new ones end at once. Pushes and acks go on.
func (e *Engine) Drain() {
	e.park.mu.Lock()
	defer e.park.mu.Unlock()
	e.draining = true
	e.endPops()
}

// PausePops ends parked pops with an empty answer and keeps new ones from parking, until it is switched off.
func (e *Engine) PausePops(on bool) {
	e.park.mu.Lock()
	defer e.park.mu.Unlock()
	if on {
		e.endPops()
	} else if !e.draining && e.over() {
		running := make(chan struct{})
		e.ended.Store(&running)
	}
}

func (e *Engine) endPops() {
	if !e.over() {
		close(*e.ended.Load())
		e.park.endAll(nil)
	}
}

// over says whether nothing may park.
func (e *Engine) over() bool {
	select {
	case <-*e.ended.Load():
		return true
	default:
		return false
	}
}

// Close refuses what boards from now on, finishes what has boarded, and returns when the last flush has ended.
// Call it after the last request has been answered.
func (e *Engine) Close() {
	e.Drain()
	e.dock.close()
	e.cancel()
	e.workers.Wait()
	e.sideWork.Wait()
	e.Catalog.Wait()
}

// Now is the database's clock, as well as this broker knows it: for windows that only need to be about right.
func (e *Engine) Now() time.Time { return time.Now().Add(time.Duration(e.clock.Load())) }

// SetNow learns the database's clock. Call it every few seconds with what the database says the time is.
func (e *Engine) SetNow(t time.Time) { e.clock.Store(int64(time.Until(t))) }

// announce gives out what a commit outside of a flush left to deliver.
func (e *Engine) announce(hints []Hint, q *catalog.Queue) {
	if q != nil {
		e.park.seen(q)
	}
	for _, h := range hints {
		e.park.hint(h, nil)
	}
	if e.Announce != nil {
		e.Announce(hints)
	}
}

// Hint is what another broker announced: parked pops here may have work.
func (e *Engine) Hint(h Hint) {
	e.park.hint(h, nil)
	if h.Group == 0 {
		e.park.appeared(h.Queue, "")
	}
}

// QueueChanged makes the engine read a queue again that was configured or deleted on another broker.
func (e *Engine) QueueChanged(id int32) {
	e.Catalog.ForgetID(id)
	e.Reconsider(id)
}

// Reconsider makes parked pops look at a queue again that was configured or deleted through this engine's catalog.
func (e *Engine) Reconsider(id int32) {
	e.park.forget(id)
	e.park.lookQueue(id)
}

// ForgetAll is for a database that was set back to an earlier time: whatever is remembered may be of things that never were.
// Parked pops look again.
func (e *Engine) ForgetAll() {
	e.Catalog.ForgetAll()
	e.Catalog.ForgetPartitions()
	e.dedup.ForgetAll()
	e.park.lookAll()
}

// LookAll makes every parked pop look at the database: after hints may have been lost.
func (e *Engine) LookAll() { e.park.lookAll() }

// due asks for a promotion in so many ms; negative = nothing is due.
func (e *Engine) due(ms int64) {
	if ms < 0 {
		return
	}
	select {
	case e.nextDue <- time.Duration(ms) * time.Millisecond:
	default: // the loop looks at least once a second
	}
}

// promoteLoop makes cursors claimable again whose delay, window or backoff is over, and wakes their groups.
func (e *Engine) promoteLoop() {
	defer e.workers.Done()
	const idle = time.Second
	timer := time.NewTimer(idle)
	defer timer.Stop()
	at := time.Now().Add(idle)
	for {
		select {
		case <-e.stop.Done():
			return
		case d := <-e.nextDue:
			if t := time.Now().Add(d); t.Before(at) {
				at = t
				timer.Reset(d)
			}
			continue
		case <-timer.C:
		}
		next := idle
		ctx, cancel := context.WithTimeout(e.stop, connectTimeout)
		for {
			rows, err := e.q.PromoteDue(ctx, db.PromoteDueParams{Max: 1000})
			if err != nil {
				if e.stop.Err() == nil {
					e.Log.Debug("promoting due cursors failed", "error", db.Text(err))
				}
				break
			}
			hints := make([]Hint, len(rows))
			for i, r := range rows {
				hints[i] = Hint{Group: r.GroupID, Partition: r.PartitionID}
			}
			e.announce(hints, nil)
			if len(rows) < 1000 {
				if ms, err := e.q.NextDue(ctx); err == nil {
					least := time.Millisecond
					if len(rows) == 0 { // what is due is locked by someone
						least = 100 * time.Millisecond
					}
					next = min(idle, max(time.Duration(ms+1)*time.Millisecond, least))
				}
				break
			}
		}
		cancel()
		at = time.Now().Add(next)
		timer.Reset(next)
	}
}

// newLease is a UUIDv7 whose last four bytes are the group: extend finds the cursors of a lease from its id alone.
// Group 0 is a lease that may span groups.
func newLease(group int32) uuid.UUID {
	id := segment.NewFirstID(time.Now())
	rnd := uuid.New()
	copy(id[9:12], rnd[:3])
	id[12], id[13], id[14], id[15] = byte(group>>24), byte(group>>16), byte(group>>8), byte(group)
	return id
}

// LeaseGroup is the group that a lease is of.
func LeaseGroup(id uuid.UUID) int32 {
	return int32(id[12])<<24 | int32(id[13])<<16 | int32(id[14])<<8 | int32(id[15])
}
