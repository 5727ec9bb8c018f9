package groupcommit_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/dbtest"
	"ferrymq/groupcommit"
)

// counter counts what an engine sends: flushes (each is one transaction) and single statements, by name.
type counter struct {
	mu      sync.Mutex
	flushes int
	claims  int // flushes with a claim on them
	queries map[string]int
}

func (c *counter) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.flushes++
	for _, q := range d.Batch.QueuedQueries {
		if s := statement(q.SQL); s == "ClaimPartitions" || s == "ClaimHinted" {
			c.claims++
		}
	}
	return ctx
}
func (c *counter) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (c *counter) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}
func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := statement(d.SQL); !strings.Contains(s, "pg_backend_pid()") { // a new connection's own
		c.queries[s]++
	}
	return ctx
}
func (c *counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// statement is the name sqlc gives a statement, or its text.
func statement(sql string) string {
	if rest, ok := strings.CutPrefix(sql, "-- name: "); ok {
		name, _, _ := strings.Cut(rest, " ")
		return name
	}
	return sql
}

// take returns the counts since the last call, without the promotion that runs once a second.
func (c *counter) take() (flushes, claims int, queries map[string]int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	flushes, claims, queries = c.flushes, c.claims, c.queries
	c.flushes, c.claims, c.queries = 0, 0, make(map[string]int)
	delete(queries, "PromoteDue")
	delete(queries, "NextDue")
	delete(queries, "OutboxNext") // the outbox is looked at once a second, whatever happens
	delete(queries, "discard plans")
	return flushes, claims, queries
}

// counted makes an engine's pool count.
func counted(t *testing.T, c *counter) func(o *groupcommit.Options) {
	c.queries = make(map[string]int)
	return func(o *groupcommit.Options) {
		config := o.Pool.Config()
		config.ConnConfig.Tracer = c
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		o.Pool = pool
	}
}

// TestCommitsIdle: with a pop parked, a push is stored and leased in one commit, and its ack is one more. Nothing else is sent.
func TestCommitsIdle(t *testing.T) {
	t.Parallel()
	var c counter
	b := start(t, dbtest.New(t), setup{recheck: slow, alone: true, change: counted(t, &c)})
	const q = "idle.q"
	for _, keyed := range []bool{false, true} {
		b.push(q, "p", item{payload: `"first"`})
		b.finish("g", b.need(wide(q, "g", 10, 1, 0), "first"))
		for n := range 20 {
			w := b.park(wide(q, "g", 10, 1, soon))
			m := item{payload: fmt.Sprint(n)}
			if keyed {
				m.id = fmt.Sprint("id-", n)
			}
			c.take()
			b.push(q, "p", m)
			d := w.wait(t)
			if flushes, _, queries := c.take(); flushes != 1 || len(queries) > 0 {
				t.Errorf("keyed %v: push and claim took %d flushes and %v", keyed, flushes, queries)
			}
			b.finish("g", d)
			if flushes, _, queries := c.take(); flushes != 1 || len(queries) > 0 {
				t.Errorf("keyed %v: the ack took %d flushes and %v", keyed, flushes, queries)
			}
		}
	}
}

// TestCommitsLoaded: under load many operations share a commit.
func TestCommitsLoaded(t *testing.T) {
	t.Parallel()
	var c counter
	b := start(t, dbtest.New(t), setup{alone: true, pool: 16, change: counted(t, &c)})
	const q, clients, partitions = "load.q", 64, 200
	for p := range partitions {
		b.push(q, fmt.Sprint("p", p), item{payload: "0"})
	}
	for d := b.pop(wide(q, "g", 1000, partitions, 0)); d != nil; d = b.pop(wide(q, "g", 1000, partitions, 0)) {
		b.finish("g", d)
	}
	c.take()
	length := 3 * time.Second
	if testing.Short() {
		length = time.Second
	}
	end := time.Now().Add(length)
	var delivered atomic.Int64
	var work sync.WaitGroup
	for i := range clients {
		work.Go(func() {
			for n := 0; time.Now().Before(end); n++ {
				if _, err := b.tryPush(context.Background(), q, fmt.Sprint("p", (i*31+n*7)%partitions), item{payload: "1"}); err != nil {
					t.Errorf("push: %v", err)
					return
				}
			}
		})
		work.Go(func() {
			for time.Now().Before(end) {
				d, err := b.tryPop(context.Background(), wide(q, "g", 1, 1, time.Second)) // polls that end empty on a slow machine are not what is counted
				if err != nil {
					t.Errorf("pop: %v", err)
					return
				}
				if d != nil {
					delivered.Add(1)
					b.tryAck(context.Background(), "g", d.Lease, d.messages[0].public, says(groupcommit.Completed, d.messages...)...)
				}
			}
		})
	}
	work.Wait()
	flushes, _, queries := c.take()
	commits := flushes
	for _, n := range queries {
		commits += n
	}
	rate := float64(commits) / float64(delivered.Load())
	t.Logf("%d messages delivered with %d flushes and %v: %.3f commits a message", delivered.Load(), flushes, queries, rate)
	if rate > 0.3 {
		t.Errorf("%.3f commits a message", rate)
	}
}

// TestParkedCost: 2,000 pops parked on 200 groups of 20 queues.
func TestParkedCost(t *testing.T) {
	t.Parallel()
	var c counter
	recheck := groupcommit.Recheck{Initial: 200 * time.Millisecond, Threshold: 1 << 30, Multiplier: 1, Max: 200 * time.Millisecond}
	b := start(t, dbtest.New(t), setup{recheck: recheck, alone: true, change: counted(t, &c)})
	var all []*parkedPop
	for q := range 20 {
		for g := range 10 {
			for range 10 {
				all = append(all, b.goPop(wide(fmt.Sprint("cost.", q), fmt.Sprint("g", g), 1, 1, time.Minute)))
			}
		}
	}
	eventually(t, "all are parked", func() bool { return b.Parked() == len(all) })
	pool := dbtest.Pool(t, b.dsn, 1)
	eventually(t, "all groups have their cursors", func() bool {
		var left int
		if err := pool.QueryRow(t.Context(), "select count(*) from ferrymq.groups where not seeded").Scan(&left); err != nil {
			t.Fatal(err)
		}
		return left == 0 && b.Parked() == len(all)
	})
	// The last cursors made wake their groups once more, a moment after they are committed.
	eventually(t, "it is quiet", func() bool {
		c.take()
		eventually(t, "a few re-checks", func() bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.queries["ReadyGroups"] >= 3
		})
		flushes, _, _ := c.take()
		return flushes == 0 && b.Parked() == len(all)
	})
	c.take()
	began := time.Now()
	eventually(t, "re-checks", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.queries["ReadyGroups"] >= 10
	})
	flushes, _, queries := c.take()
	// Groups that parked at different times are due at different ticks: a tick has one statement for all that are.
	ticks := int(time.Since(began)/(100*time.Millisecond)) + 2
	if n := queries["ReadyGroups"]; n > ticks {
		t.Errorf("%d re-checks in %d ticks", n, ticks)
	}
	delete(queries, "ReadyGroups")
	if flushes > 0 || len(queries) > 0 {
		t.Errorf("parked pops sent %d flushes and %v", flushes, queries)
	}
	if n := b.Pool.Stat().TotalConns(); n > b.Pool.Config().MaxConns {
		t.Errorf("%d connections", n)
	}
	b.Drain()
	for _, w := range all {
		<-w.done
		if w.d != nil || w.err != nil {
			t.Fatalf("drained pop: %v %v", w.d, w.err)
		}
	}
}

// TestParkedOneQueue: one push to a queue with 1,000 parked pops wakes one of them.
func TestParkedOneQueue(t *testing.T) {
	t.Parallel()
	var c counter
	b := start(t, dbtest.New(t), setup{recheck: slow, alone: true, change: counted(t, &c)})
	b.push("one.q", "p", item{payload: "0"})
	b.finish("g", b.pop(wide("one.q", "g", 1, 1, 0)))
	all := make(chan *delivered, 1000)
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	for range cap(all) {
		work.Go(func() {
			if d, _ := b.tryPop(ctx, wide("one.q", "g", 1, 1, time.Minute)); d != nil {
				all <- d
			}
		})
	}
	eventually(t, "all are parked", func() bool { return b.Parked() == cap(all) })
	for n := range 10 {
		c.take()
		b.push("one.q", "p", item{payload: fmt.Sprint(n)})
		select {
		case d := <-all:
			b.finish("g", d)
		case <-time.After(soon):
			t.Fatal("lost wakeup")
		}
		if flushes, claims, queries := c.take(); flushes > 2 || claims > 1 || len(queries) > 0 {
			t.Errorf("one push and its ack took %d flushes, %d with claims, and %v", flushes, claims, queries)
		}
	}
	cancel()
	work.Wait()
}
