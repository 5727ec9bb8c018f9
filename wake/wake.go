// Package wake carries hints between brokers on one database: what one of them committed, parked pops of another may want.
//
// A hint may be lost, and is then made up for by the re-check of parked pops. It is sent after the commit, from a
// connection of its own, coalesced, and only while another broker is alive: NOTIFY inside the transactions of the
// hot path would take a lock that all commits share.
package wake

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/db"
)

// Hint says that a partition of a queue may have something to deliver: to one group, or to all when Group is 0.
type Hint struct {
	Queue     int32
	Group     int32
	Partition int64
}

// Options of Open. All but Direct and Quiet are required.
type Options struct {
	Conn   *pgx.ConnConfig // two connections are made with it, one listens and one notifies
	Direct bool            // somebody says that Conn gives sessions of our own: listen whatever it looks like
	Log    *slog.Logger

	OnHint  func(Hint)     // another broker has something for parked pops
	OnQueue func(id int32) // another broker configured or deleted a queue
	OnMove  func()         // something was published from a transaction of its own
	OnLost  func()         // hints may have been lost: look at everything once

	Quiet time.Duration // how long nothing may come before the other end is asked whether it is there; 0: 15 seconds
}

// channel is the one NOTIFY channel; what it is about stands in the payload.
const channel = "ferrymq"

const (
	maxPayload = 7900 // PostgreSQL's limit is 7999
	maxPending = 8192 // hints; beyond that receivers look at everything
)

// Bus is one broker's end.
type Bus struct {
	o      Options
	self   string
	others atomic.Bool
	silent atomic.Int32 // heartbeats in a row that saw no other broker
	up     atomic.Bool

	mu      sync.Mutex
	pending map[Hint]struct{}
	queues  map[int32]struct{}
	all     bool
	kick    chan struct{}

	stop    context.Context
	cancel  context.CancelFunc
	workers sync.WaitGroup
}

// Open starts listening and sending; it does not wait for either. Close ends it.
func Open(o Options) *Bus {
	b := &Bus{o: o, self: uuid.NewString()[:8], pending: make(map[Hint]struct{}), queues: make(map[int32]struct{}), kick: make(chan struct{}, 1)}
	b.stop, b.cancel = context.WithCancel(context.Background())
	if b.o.Quiet == 0 {
		b.o.Quiet = 15 * time.Second
	}
	b.others.Store(true) // until the first heartbeat says otherwise
	b.workers.Add(2)
	go b.supervise("listening for other brokers", b.listen)
	go b.supervise("telling other brokers", b.send)
	return b
}

// Close ends both connections. Pending hints are dropped.
func (b *Bus) Close() {
	b.cancel()
	b.workers.Wait()
}

// Listening says whether hints of other brokers arrive at the moment.
func (b *Bus) Listening() bool { return b.up.Load() }

// Others tells the bus whether another broker is alive: alone, it sends nothing.
// One heartbeat without others is no proof: two brokers that start together may each look before the other has its row.
func (b *Bus) Others(alive bool) {
	if alive {
		b.silent.Store(0)
		b.others.Store(true)
	} else if b.silent.Add(1) > 1 {
		b.others.Store(false)
	}
}

// Alone says whether no other broker is known to be alive.
func (b *Bus) Alone() bool { return !b.others.Load() }

// Announce hands hints to the other brokers. It never blocks.
func (b *Bus) Announce(hints []Hint) {
	if !b.others.Load() {
		return
	}
	b.mu.Lock()
	for _, h := range hints {
		if len(b.pending) >= maxPending {
			b.all = true
			break
		}
		b.pending[h] = struct{}{}
	}
	b.mu.Unlock()
	b.wake()
}

// QueueChanged tells the other brokers to read a queue's row again.
func (b *Bus) QueueChanged(id int32) {
	b.mu.Lock()
	b.queues[id] = struct{}{}
	b.mu.Unlock()
	b.wake()
}

func (b *Bus) wake() {
	select {
	case b.kick <- struct{}{}:
	default:
	}
}

// supervise keeps one of the connections alive, with a growing pause between attempts.
func (b *Bus) supervise(what string, work func(ctx context.Context, conn *pgx.Conn) error) {
	defer b.workers.Done()
	wait := 50 * time.Millisecond
	for b.stop.Err() == nil {
		began := time.Now()
		err := func() error {
			ctx, cancel := context.WithTimeout(b.stop, 10*time.Second)
			conn, err := pgx.ConnectConfig(ctx, b.o.Conn)
			cancel()
			if err != nil {
				return err
			}
			defer func() {
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				defer cancel()
				conn.Close(ctx)
			}()
			soon, cancel := context.WithTimeout(b.stop, 5*time.Second)
			_, err = db.Settle(soon, conn, 5*time.Second)
			cancel()
			if err != nil {
				return err
			}
			return work(b.stop, conn)
		}()
		if b.stop.Err() != nil || errors.Is(err, errDeaf) {
			return
		}
		if time.Since(began) > time.Minute {
			wait = 50 * time.Millisecond
		}
		b.o.Log.Warn(what+" failed, trying again", "wait", wait.Round(time.Millisecond), "error", db.Text(err))
		select {
		case <-b.stop.Done():
		case <-time.After(wait/2 + rand.N(wait)):
		}
		wait = min(2*wait, 5*time.Second)
	}
}

// errDeaf means that hints cannot arrive this way.
var errDeaf = errors.New("nothing can be heard through a connection pooler")

func (b *Bus) listen(ctx context.Context, conn *pgx.Conn) error {
	defer b.up.Store(false)
	// A pooler takes the connection that listens away after the statement, and drops what arrives there.
	soon, cancel := context.WithTimeout(ctx, 5*time.Second)
	pooled, err := db.Pooled(soon, conn)
	cancel()
	if err != nil {
		return err
	}
	if pooled && b.o.Direct {
		b.o.Log.Warn("DATABASE_DIRECT_URL leads through a connection pooler: that is right only if each client keeps a session of its own there")
	} else if pooled {
		b.o.Log.Warn("the database is behind a connection pooler, through which nothing can be heard from other brokers: " +
			"a waiting pop gets what they push at its next re-check, up to POP_WAIT_MAX_INTERVAL_MS later instead of at once; " +
			"set DATABASE_DIRECT_URL to an address of PostgreSQL itself")
		return errDeaf
	}
	if err := b.exec(ctx, conn, "listen "+channel); err != nil {
		return err
	}
	b.up.Store(true)
	// Listening first, then looking: nothing falls between the two.
	b.o.OnLost()
	for {
		wait, cancel := context.WithTimeout(ctx, b.o.Quiet)
		n, err := conn.WaitForNotification(wait)
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			if wait.Err() == nil {
				return err
			}
			// Quiet for long: is there still someone at the other end?
			if err := b.exec(ctx, conn, "-- ping"); err != nil {
				return fmt.Errorf("ping: %w", err)
			}
			continue
		}
		b.receive(n.Payload)
	}
}

// receive reads a payload: the sender, then words. A word is "*" (look at everything), "o" (look at the outbox), "q<id>" (queue changed)
// or "<queue>.<group>.<partition>".
func (b *Bus) receive(payload string) {
	words := strings.Fields(payload)
	if len(words) == 0 || words[0] == b.self {
		return
	}
	if words[0] != "-" { // of no broker: ferrymq.publish
		b.Others(true)
	}
	for _, w := range words[1:] {
		if w == "o" {
			b.o.OnMove()
			continue
		}
		if w == "*" {
			b.o.OnLost()
			continue
		}
		if id, ok := strings.CutPrefix(w, "q"); ok {
			if n, err := strconv.ParseInt(id, 10, 32); err == nil {
				b.o.OnQueue(int32(n))
			}
			continue
		}
		parts := strings.Split(w, ".")
		if len(parts) != 3 {
			continue
		}
		q, err1 := strconv.ParseInt(parts[0], 10, 32)
		g, err2 := strconv.ParseInt(parts[1], 10, 32)
		p, err3 := strconv.ParseInt(parts[2], 10, 64)
		if err1 == nil && err2 == nil && err3 == nil {
			b.o.OnHint(Hint{Queue: int32(q), Group: int32(g), Partition: p})
		}
	}
}

func (b *Bus) send(ctx context.Context, conn *pgx.Conn) error {
	if err := b.notify(ctx, conn, b.self); err != nil { // hello: I may want your hints
		return err
	}
	ping := time.NewTicker(b.o.Quiet)
	defer ping.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ping.C:
			if err := b.exec(ctx, conn, "-- ping"); err != nil {
				return fmt.Errorf("ping: %w", err)
			}
		case <-b.kick:
			for payload := b.take(); payload != ""; payload = b.take() {
				if err := b.notify(ctx, conn, payload); err != nil {
					// What this one carried may be lost: whoever listens looks at everything.
					b.mu.Lock()
					b.all = true
					b.mu.Unlock()
					b.wake()
					return err
				}
			}
		}
	}
}

func (b *Bus) notify(ctx context.Context, conn *pgx.Conn, payload string) error {
	// Nothing here needs to survive a crash. Local, and under no name: a pooler may give the session to others.
	return b.exec(ctx, conn, "select set_config('synchronous_commit', 'off', true), pg_notify($1, $2)", pgx.QueryExecModeExec, channel, payload)
}

// exec waits a while only: a connection whose other end has gone without a word would be believed for as long as TCP does.
func (b *Bus) exec(ctx context.Context, conn *pgx.Conn, sql string, args ...any) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_, err := conn.Exec(ctx, sql, args...)
	return err
}

// take makes the next payload of what is pending, "" when nothing is.
func (b *Bus) take() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := append(make([]byte, 0, 256), b.self...)
	none := len(p)
	for id := range b.queues {
		if len(p) > maxPayload-20 {
			break
		}
		p = strconv.AppendInt(append(p, " q"...), int64(id), 10)
		delete(b.queues, id)
	}
	if b.all {
		b.all = false
		clear(b.pending)
		p = append(p, " *"...)
	}
	for h := range b.pending {
		if len(p) > maxPayload-50 {
			break
		}
		p = strconv.AppendInt(append(p, ' '), int64(h.Queue), 10)
		p = strconv.AppendInt(append(p, '.'), int64(h.Group), 10)
		p = strconv.AppendInt(append(p, '.'), h.Partition, 10)
		delete(b.pending, h)
	}
	if len(p) == none {
		return ""
	}
	return string(p)
}
