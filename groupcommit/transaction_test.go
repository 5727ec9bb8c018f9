package groupcommit_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/catalog"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
	"ferrymq/segment"
)

func batch(queue, partition string, ms ...item) *groupcommit.Batch {
	b := &groupcommit.Batch{Queue: queue, Partition: partition}
	for _, m := range ms {
		b.Messages = append(b.Messages, segment.Message{TransactionID: m.id, Payload: []byte(m.payload)})
	}
	return b
}

// settlement acknowledges messages of one partition under the lease they were delivered with; nil: without one.
func settlement(group string, d *delivered, status groupcommit.Status, ms ...message) *groupcommit.Settlement {
	s := &groupcommit.Settlement{Partition: ms[0].public, Group: group, Items: says(status, ms...)}
	for range ms {
		var lease *uuid.UUID
		if d != nil {
			lease = &d.Lease
		}
		s.Leases = append(s.Leases, lease)
	}
	return s
}

// transact makes a transaction of batches, settlements and required leases.
func (b *broker) transact(parts ...any) error {
	t := &groupcommit.Transaction{}
	for _, p := range parts {
		switch p := p.(type) {
		case *groupcommit.Batch:
			t.Pushes = append(t.Pushes, p)
		case *groupcommit.Settlement:
			t.Acks = append(t.Acks, p)
		case uuid.UUID:
			t.Required = append(t.Required, p)
		}
	}
	return b.Transact(context.Background(), t)
}

func (b *broker) needTransact(parts ...any) {
	b.t.Helper()
	if err := b.transact(parts...); err != nil {
		b.t.Fatalf("transaction: %v", err)
	}
}

func tails(t *testing.T, b *broker) string {
	t.Helper()
	var s string
	if err := b.Pool.QueryRow(t.Context(), `select coalesce(string_agg(p.name || ' ' || p.next_offset, ', ' order by p.name), '') from ferrymq.partitions p
		join ferrymq.queues q on q.id = p.queue_id and q.deleted_at is null`).Scan(&s); err != nil {
		t.Fatal(err)
	}
	return s
}

// TestRolledBackLeavesNoTrace: whatever rolls a transaction back, what it wanted to push can be pushed afterwards, and is queued.
func TestRolledBackLeavesNoTrace(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	bs := []*broker{start(t, dsn, setup{}), start(t, dsn, setup{})}
	pool := admin(t, dsn)
	b := bs[0]
	const q = "trace.q"
	b.push(q, "p", item{id: "0", payload: `"0"`})
	d := b.need(route(q, "p", "g", 1, 0), "0")
	stranger := message{public: d.messages[0].public, tx: "stranger"}
	for i, c := range []struct {
		name string
		err  error
		with func() []any
	}{
		{"unknown id", groupcommit.ErrUnresolvable, func() []any { return []any{settlement("g", d, groupcommit.Completed, stranger)} }},
		{"no consumer", groupcommit.ErrNoConsumer, func() []any { return []any{settlement("h", d, groupcommit.Completed, d.messages...)} }},
		{"lease", groupcommit.ErrLease, func() []any { return []any{settlement("g", d, groupcommit.Completed, d.messages...), uuid.New()} }},
		{"duplicate elsewhere", groupcommit.ErrDuplicate, func() []any { return []any{batch(q, "p", item{id: "0", payload: "1"})} }},
		{"poison", nil, func() []any { return []any{batch(q, "poison", item{id: "x", payload: "1"})} }},
	} {
		exec(t, pool, `create or replace function refuse() returns trigger language plpgsql as $$ begin
			if exists (select from ferrymq.partitions where id = new.partition_id and name = 'poison') then raise exception 'poison'; end if; return new; end $$`)
		if i == 0 {
			exec(t, pool, `create trigger refuse before insert on ferrymq.segments for each row execute function refuse()`)
		}
		id := item{id: "after " + c.name, payload: `"x"`}
		before := tails(t, b)
		for range 3 {
			err := b.transact(append([]any{batch(q, "p", id), batch(q, "new "+c.name, id), batch("new."+c.name, "p", id), settlement("g", d, groupcommit.Completed, d.messages...)}, c.with()...)...)
			if c.err != nil {
				is(t, c.name, err, c.err)
			} else if err == nil {
				t.Error("poison was stored")
			}
			if after := tails(t, b); after != before {
				t.Errorf("%s: %s, before %s", c.name, after, before)
			}
		}
		if n := number(t, pool, `select count(*) from ferrymq.queues where name = $1`, "new."+c.name); n != 0 && c.err != nil {
			t.Errorf("%s made a queue", c.name)
		}
		if n := number(t, pool, `select committed from ferrymq.cursors`); n != 0 {
			t.Errorf("%s moved the cursor to %d", c.name, n)
		}
		for n, r := range [][]groupcommit.Pushed{bs[i%2].push(q, "p", id), bs[(i+1)%2].push(q, "p", id)} {
			if r[0].Duplicate != (n == 1) {
				t.Errorf("%s: push %d afterwards: %+v", c.name, n, r[0])
			}
		}
	}
	// The lease has lived through it all.
	b.needTransact(settlement("g", d, groupcommit.Completed, d.messages...), d.Lease)
}

// TestTransactionAgainstPush: one id by a transaction and by plain pushes, on two brokers at once: one of them is stored.
func TestTransactionAgainstPush(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{})
	const q = "same.q"
	n := rounds(150)
	for i := range n {
		id := item{id: fmt.Sprint("id-", i), payload: fmt.Sprint(i)}
		p := fmt.Sprint("p", i%4)
		var won atomic.Int64
		var all sync.WaitGroup
		for k := range 8 {
			b := bs[k%2]
			all.Go(func() {
				if k < 4 {
					r, err := b.tryPush(context.Background(), q, p, id, item{payload: "0"})
					if err != nil {
						t.Errorf("push: %v", err)
					} else if !r[0].Duplicate {
						won.Add(1)
					}
					return
				}
				err := b.transact(batch(q, p, id, id), batch(q, "log", item{payload: "1"}))
				if err == nil {
					won.Add(1)
				} else if !errors.Is(err, groupcommit.ErrDuplicate) {
					t.Errorf("transaction: %v", err)
				}
			})
		}
		all.Wait()
		if won.Load() != 1 {
			t.Fatalf("%s was stored by %d of them", id.id, won.Load())
		}
	}
	stored := readStored(t, bs[0])
	for i := range n {
		times := 0
		for _, m := range stored[fmt.Sprintf("%s/p%d", q, i%4)] {
			if m.tx == fmt.Sprint("id-", i) {
				times++
			}
		}
		if times != 1 {
			t.Errorf("id-%d is stored %d times", i, times)
		}
	}
}

// impatient lets a database find deadlocks at once, long before a lock times out: call it before brokers connect.
func impatient(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	exec(t, pool, `do $$ begin execute format('alter database %I set deadlock_timeout = ''10ms''', current_database()); end $$`)
}

// noDeadlock ends the brokers, because sessions tell what they have counted when they end.
func noDeadlock(t *testing.T, pool *pgxpool.Pool, bs ...*broker) {
	t.Helper()
	for _, b := range bs {
		b.stop()
		b.Pool.Close()
	}
	eventually(t, "the brokers' sessions have ended", func() bool {
		return number(t, pool, `select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() and application_name = 'ferrymq'`) == 0
	})
	if n := number(t, pool, `select deadlocks from pg_stat_database where datname = current_database()`); n != 0 {
		t.Errorf("%d deadlocks", n)
	}
}

// TestTransactionsCrosswise: transactions that push to A and acknowledge B meet those that push to B and acknowledge A, and plain
// pushes to both, on one broker that thinks it is alone and on two. No deadlock, nobody waits in vain.
func TestTransactionsCrosswise(t *testing.T) {
	t.Parallel()
	for _, brokers := range []int{1, 2} {
		t.Run(fmt.Sprintf("%dbrokers", brokers), func(t *testing.T) {
			t.Parallel()
			s := setup{recheck: slow, pool: 12}
			if brokers == 1 {
				s.change = func(o *groupcommit.Options) { o.Alone = func() bool { return true } }
			}
			dsn := dbtest.New(t)
			pool := admin(t, dsn)
			impatient(t, pool)
			var bs []*broker
			for range brokers {
				bs = append(bs, start(t, dsn, s))
			}
			const q = "cross.q"
			bs[0].needTransact(batch(q, "A", items(1, "a")...), batch(q, "B", items(1, "b")...))
			for i, p := range []string{"A", "B"} {
				d := bs[i%brokers].pop(route(q, p, "g", 10, 0))
				bs[i%brokers].finish("g", d)
			}
			length := 3 * time.Second
			if testing.Short() {
				length = time.Second
			}
			end := time.Now().Add(length)
			var all sync.WaitGroup
			var done, plain atomic.Int64
			// Each partition is consumed by one worker per broker, which passes what it gets on to the other partition.
			for k := range 2 * brokers {
				b, from, to := bs[k%brokers], "A", "B"
				if k/brokers == 1 {
					from, to = to, from
				}
				all.Go(func() {
					for n := 0; time.Now().Before(end); n++ {
						d, err := b.tryPop(context.Background(), route(q, from, "g", 10, 500*time.Millisecond))
						if err != nil {
							t.Errorf("pop: %v", err)
							return
						}
						if d == nil {
							continue
						}
						var out []item
						for i := range d.messages {
							out = append(out, item{id: fmt.Sprint(k, "-", n, "-", i), payload: fmt.Sprintf("%q", strings.Trim(d.messages[i].payload, `"`))})
						}
						if err := b.transact(batch(q, to, out...), settlement("g", d, groupcommit.Completed, d.messages...)); err != nil {
							t.Errorf("transaction: %v", err)
							return
						}
						done.Add(1)
					}
				})
			}
			for k := range 2 {
				b := bs[k%brokers]
				all.Go(func() {
					for n := 0; time.Now().Before(end); n++ {
						ps := make([]*groupcommit.Push, 2)
						for i, name := range []string{"B", "A"} {
							var err error
							if ps[i], err = b.newPush(context.Background(), q, name, []item{{id: fmt.Sprint("plain", k, n), payload: `"plain"`}}); err != nil {
								t.Error(err)
								return
							}
						}
						if err := b.Push(context.Background(), ps); err != nil || ps[0].Err != nil || ps[1].Err != nil {
							t.Errorf("push: %v, %v, %v", err, ps[0].Err, ps[1].Err)
						}
						plain.Add(1)
						time.Sleep(20 * time.Millisecond)
					}
				})
			}
			all.Wait()
			t.Logf("%d transactions, %d pushes", done.Load(), plain.Load())
			if done.Load() < 5 {
				t.Errorf("only %d transactions in %v", done.Load(), length)
			}
			readStored(t, bs[0]) // offsets are dense
			// What is passed on is never lost or doubled: one a and one b still go round, and every plain one.
			count := map[string]int{}
			for _, p := range []string{"A", "B"} {
				for {
					d := bs[0].pop(auto(route(q, p, "g", 10_000, 0)))
					if d == nil {
						break
					}
					for _, m := range d.messages {
						count[strings.Trim(m.payload, `"`)]++
					}
				}
			}
			if count["a-0"] > 1 || count["b-0"] > 1 || count["plain"] != int(2*plain.Load()) {
				t.Errorf("left to deliver: %v, of %d plain pushes", count, plain.Load())
			}
			noDeadlock(t, pool, bs...)
		})
	}
}

// TestTransactionWakes: pops parked here and on another broker wake by a transaction, on old and new partitions and queues.
func TestTransactionWakes(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	const q = "wake.q"
	for i := range rounds(40) {
		p := fmt.Sprint("p", i%3)
		for k, b := range bs {
			g := fmt.Sprint("g", k)
			w := b.park(wide(q, g, 10, 10, soon))
			o := b.park(route("wake.other", fmt.Sprint("n", i, k), catalog.QueueMode, 10, soon))
			if i == 0 {
				o.cancel()
				<-o.done
				o = b.park(route("wake.other", fmt.Sprint("n", i, k), catalog.QueueMode, 10, soon))
			}
			bs[0].needTransact(batch(q, p, items(1, "m")...), batch("wake.other", fmt.Sprint("n", i, k), items(1, "o")...))
			b.finish(g, w.wait(t))
			if d := o.wait(t); d.payloads() != "o-0" {
				t.Fatalf("%q", d.payloads())
			}
			other := fmt.Sprint("g", 1-k) // is not to pile up
			if d := bs[1-k].pop(wide(q, other, 10, 10, soon)); d != nil {
				bs[1-k].finish(other, d)
			}
		}
	}
	// An ack in a transaction frees the rest of the partition.
	bs[0].push(q, "ack", items(2, "x")...)
	d := bs[0].need(route(q, "ack", "g9", 1, 0), "x-0")
	w := bs[1].park(route(q, "ack", "g9", 1, soon))
	bs[0].needTransact(settlement("g9", d, groupcommit.Completed, d.messages...))
	if d := w.wait(t); d.payloads() != "x-1" {
		t.Errorf("%q", d.payloads())
	}
}

// stopAtCommit makes every transaction that inserts into a table wait before it commits, until release is called.
func stopAtCommit(t *testing.T, dsn, table string) (release func()) {
	t.Helper()
	pool := admin(t, dsn)
	// Polling, because lock_timeout would end a wait.
	exec(t, pool, `create or replace function stop_here() returns trigger language plpgsql as $$ begin
		while not pg_try_advisory_xact_lock_shared(4711) loop perform pg_sleep(0.01); end loop; return null; end $$`)
	exec(t, pool, `create constraint trigger stop_here after insert on ferrymq.`+table+` deferrable initially deferred for each row execute function stop_here()`)
	return hold(t, dsn, `select pg_advisory_xact_lock(4711)`)
}

// awaitStopped returns when a transaction waits there.
func awaitStopped(t *testing.T, b *broker) {
	t.Helper()
	eventually(t, "a transaction stops at its commit", func() bool {
		return number(t, b.Pool, `select count(*) from pg_stat_activity where datname = current_database() and query = 'commit' and state = 'active'`) > 0
	})
}

// TestNothingChangesBeforeCommit: once a transaction has judged, what it was judged by stands until its commit, whatever others do.
func TestNothingChangesBeforeCommit(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	dsn := bs[0].dsn
	const q = "judged.q"
	bs[0].push(q, "in", items(3, "m")...)
	bs[0].push(q, "out", item{payload: `"0"`})
	bs[0].finish("g", bs[0].need(route(q, "out", "g", 1, 0), "0"))
	one := wide(q, "g", 2, 1, 0)
	one.Seconds = 2
	d := bs[0].need(one, "m-0 m-1")
	release := stopAtCommit(t, dsn, "segments")
	transaction := background(t, func() error {
		return bs[0].transact(batch(q, "out", item{id: "mine", payload: `"mine"`}), settlement("g", d, groupcommit.Completed, d.messages...), d.Lease)
	})
	pool := admin(t, dsn)
	awaitStopped(t, bs[0])
	// The same id by a plain push, the same lease by a nack, an extend, another transaction: each has to wait for the outcome.
	var pushed []groupcommit.Pushed
	calls := []*outcome{
		background(t, func() (err error) {
			pushed, err = bs[1].tryPush(context.Background(), q, "out", item{id: "mine", payload: `"theirs"`})
			return err
		}),
		background(t, func() error {
			return bs[1].tryAck(context.Background(), "g", d.Lease, d.messages[0].public, says(groupcommit.Retry, d.messages...)...)[0].Err
		}),
		background(t, func() error {
			return bs[1].transact(batch(q, "out", item{id: "mine", payload: `"third"`}))
		}),
		background(t, func() error {
			return bs[1].transact(settlement("g", d, groupcommit.DeadLetter, d.messages...))
		}),
	}
	eventually(t, "the lease has ended", func() bool {
		return number(t, pool, `select count(*) from ferrymq.cursors where lease_until < clock_timestamp()`) == 1
	})
	if got := bs[1].pop(route(q, "in", "g", 10, 0)); got != nil {
		t.Errorf("%q was leased again although a transaction finishes it", got.payloads())
	}
	for i, o := range calls {
		select {
		case <-o.done:
			t.Errorf("call %d did not wait: %v", i, o.err)
		default:
		}
	}
	release()
	if err := transaction.wait(t, "the transaction", soon); err != nil {
		t.Errorf("the transaction: %v", err)
	}
	for i, want := range []error{nil, groupcommit.ErrLease, groupcommit.ErrDuplicate, groupcommit.ErrLease} {
		is(t, fmt.Sprint("call ", i), calls[i].wait(t, "a call that waited", soon), want)
	}
	if !pushed[0].Duplicate {
		t.Error("the id was stored twice")
	}
	bs[1].need(route(q, "in", "g", 10, 0), "m-2")
	bs[1].need(route(q, "out", "g", 10, 0), "mine")
}

// TestTransactionBlocked: transactions that wait for a partition which somebody holds, however many, keep nobody else waiting.
func TestTransactionBlocked(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{recheck: slow})
	const q = "blocked.q"
	for n := range 6 {
		b.push(q, fmt.Sprint("p", n), items(2, fmt.Sprint("p", n))...)
	}
	release := hold(t, dsn, lockPartition, "p0")
	var blocked []*outcome
	for n := range 40 {
		blocked = append(blocked, background(t, func() error {
			return b.transact(batch(q, "p0", item{id: fmt.Sprint("t", n), payload: `"t"`}), batch(q, fmt.Sprint("beside", n), item{payload: `"b"`}))
		}))
	}
	dbtest.WaitBlocked(t, admin(t, dsn), 1)
	if n := number(t, b.Pool, `select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`); n > 2 {
		t.Errorf("%d sessions wait for one partition", n)
	}
	for round := range 3 {
		began := time.Now()
		for n := 1; n < 6; n++ {
			p := fmt.Sprint("p", n)
			id := fmt.Sprint(round, p)
			if err := b.goPush(t, q, p, item{payload: `"free"`}, item{id: id, payload: `"free"`}).wait(t, "a push to a free partition", soon); err != nil {
				t.Error(err)
			}
			d := b.pop(route(q, p, "g", 10, 0))
			if err := background(t, func() error {
				return b.transact(batch(q, p, item{id: id + "+", payload: `"free"`}), settlement("g", d, groupcommit.Completed, d.messages...))
			}).wait(t, "a transaction on a free partition", soon); err != nil {
				t.Error(err)
			}
		}
		t.Logf("round %d took %v", round, time.Since(began))
	}
	release()
	for _, o := range blocked {
		if err := o.wait(t, "a transaction that was blocked", 3*soon); err != nil {
			t.Error(err)
		}
	}
	if got := tails(t, b); !strings.Contains(got, "p0 42, p1 11,") {
		t.Error(got)
	}
}

// TestLeaseEndsWhileBlocked: a lease that ends while a transaction waits for its locks is over when it is judged.
func TestLeaseEndsWhileBlocked(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{recheck: slow})
	const q = "ends.q"
	b.push(q, "in", items(1, "m")...)
	b.push(q, "out", items(1, "o")...)
	short := func() *delivered {
		p := route(q, "in", "g", 1, 0)
		p.Seconds = 1
		return b.need(p, "m-0")
	}
	for _, how := range []string{"named", "required", "required only"} {
		d := short()
		release := hold(t, dsn, lockPartition, "out")
		var parts []any
		switch how {
		case "named":
			parts = []any{settlement("g", d, groupcommit.Completed, d.messages...)}
		case "required":
			parts = []any{settlement("g", nil, groupcommit.Completed, d.messages...), d.Lease}
		case "required only":
			parts = []any{d.Lease}
		}
		o := background(t, func() error {
			return b.transact(append(parts, batch(q, "out", item{id: how, payload: `"x"`}))...)
		})
		dbtest.WaitBlocked(t, admin(t, dsn), 1)
		eventually(t, "the lease has ended", func() bool {
			return number(t, b.Pool, `select count(*) from ferrymq.cursors where lease_until < clock_timestamp()`) == 1
		})
		release()
		is(t, how, o.wait(t, how, soon), groupcommit.ErrLease)
	}
	if got := tails(t, b); got != "in 1, out 1" {
		t.Error(got)
	}
	d := short()
	b.needTransact(settlement("g", nil, groupcommit.Completed, d.messages...), d.Lease, batch(q, "out", item{id: "named", payload: `"x"`}))
}

// TestTransactionMeetsCreation: a partition that somebody else is just creating, or that is gone, makes the whole transaction look again.
func TestTransactionMeetsCreation(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	bs := []*broker{start(t, dsn, setup{recheck: slow}), start(t, dsn, setup{recheck: slow})}
	pool := admin(t, dsn)
	const q = "made.q"
	bs[0].push(q, "old", item{id: "0", payload: `"0"`})
	bs[1].push(q, "old", item{id: "1", payload: `"1"`})

	// Another session has created it and not committed.
	queue := number(t, pool, `select id from ferrymq.queues where name = $1`, q)
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	for _, end := range []string{"commit", "rollback"} {
		name := "new " + end
		for _, s := range []string{"begin", fmt.Sprintf("insert into ferrymq.partitions (public_id, queue_id, name) values (gen_random_uuid(), %d, '%s')", queue, name)} {
			if _, err := conn.Exec(t.Context(), s); err != nil {
				t.Fatal(err)
			}
		}
		o := background(t, func() error {
			return bs[0].transact(batch(q, "old", item{id: "with " + name, payload: `"x"`}), batch(q, name, item{id: "a", payload: `"a"`}, item{id: "b", payload: `"b"`}))
		})
		dbtest.WaitBlocked(t, pool, 1)
		if _, err := conn.Exec(t.Context(), end); err != nil {
			t.Fatal(err)
		}
		if err := o.wait(t, name, soon); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := tails(t, bs[0]); got != "new commit 2, new rollback 2, old 4" {
		t.Error(got)
	}
	// The partition is removed behind both brokers' backs.
	exec(t, pool, `with p as (delete from ferrymq.partitions where name = 'new commit' returning id), c as (delete from ferrymq.cursors where partition_id in (select id from p)) delete from ferrymq.segments where partition_id in (select id from p)`)
	bs[0].needTransact(batch(q, "old", item{id: "again", payload: `"x"`}), batch(q, "new commit", item{id: "a", payload: `"a"`}))
	if got := tails(t, bs[0]); got != "new commit 1, new rollback 2, old 5" {
		t.Error(got)
	}
	// The queue is deleted on the other broker, and perhaps made again.
	for n := range 2 {
		if _, existed, err := bs[1].Catalog.Delete(t.Context(), q); !existed || err != nil {
			t.Fatal(existed, err)
		}
		if n == 1 {
			bs[1].push(q, "old", item{payload: `"1"`})
		}
		bs[0].needTransact(batch(q, "old", item{id: "0", payload: `"0"`}), batch(q, "new", item{id: "a", payload: `"a"`}))
		if got, want := tails(t, bs[0]), fmt.Sprintf("new 1, old %d", 1+n); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	// Acks on what is gone have no consumer.
	d := bs[0].need(route(q, "new", "g", 1, 0), "a")
	exec(t, pool, `delete from ferrymq.partitions where name = 'new'`)
	is(t, "an ack on a removed partition", bs[0].transact(settlement("g", d, groupcommit.Completed, d.messages...), batch(q, "old", item{id: "no", payload: "1"})), groupcommit.ErrNoConsumer)
}

// cutter is a PostgreSQL connection's way through a proxy that cuts it at a commit.
type cutter struct {
	listener net.Listener
	to       func() (net.Conn, error)
	cut      atomic.Int32 // 1: before the commit gets through, 2: after it, before its answer
	done     atomic.Int32
}

func newCutter(t *testing.T, dsn string) (*cutter, string) {
	t.Helper()
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	network, address := "tcp", net.JoinHostPort(config.Host, fmt.Sprint(config.Port))
	if strings.HasPrefix(config.Host, "/") {
		network, address = "unix", fmt.Sprintf("%s/.s.PGSQL.%d", config.Host, config.Port)
	}
	c := &cutter{listener: l, to: func() (net.Conn, error) { return net.Dial(network, address) }}
	var all sync.WaitGroup
	t.Cleanup(func() { l.Close(); all.Wait() })
	all.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { c.carry(client) })
		}
	})
	through := fmt.Sprintf("host=127.0.0.1 port=%d user=%s dbname=%s sslmode=disable", l.Addr().(*net.TCPAddr).Port, config.User, config.Database)
	if config.Password != "" {
		through += " password=" + config.Password
	}
	return c, through
}

func (c *cutter) carry(client net.Conn) {
	defer client.Close()
	server, err := c.to()
	if err != nil {
		return
	}
	defer server.Close()
	var silent atomic.Bool
	back := make(chan struct{})
	go func() {
		defer close(back)
		defer client.Close()
		buf := make([]byte, 64<<10)
		for {
			n, err := server.Read(buf)
			if silent.Load() { // the commit is done: its answer is lost
				return
			}
			if _, werr := client.Write(buf[:n]); err != nil || werr != nil {
				return
			}
		}
	}()
	buf := make([]byte, 64<<10)
	for {
		n, err := client.Read(buf)
		if err != nil {
			break
		}
		if bytes.Contains(buf[:n], []byte("commit\x00")) {
			if how := c.cut.Swap(0); how > 0 {
				c.done.Add(1)
				if how == 1 {
					break
				}
				silent.Store(true)
				server.Write(buf[:n])
				<-back
				break
			}
		}
		if _, err := server.Write(buf[:n]); err != nil {
			break
		}
	}
	server.Close()
	<-back
}

// TestConnectionCutAtCommit: the outcome is unknown, and who repeats with the same ids finds out. Nothing is ever stored twice.
func TestConnectionCutAtCommit(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	c, through := newCutter(t, dbtest.Through(t, dsn))
	b := start(t, dsn, setup{alone: true, recheck: slow, through: through})
	const q = "cut.q"
	for n, before := range []bool{true, false, true, false} {
		b.push(q, "in", item{payload: `"m"`})
		d := b.need(route(q, "in", "g", 1, 0), "m")
		id := fmt.Sprint("cut ", n)
		parts := func() []any {
			return []any{batch(q, "out", item{id: id, payload: `"o"`}), batch(q, fmt.Sprint("new", n), item{id: id, payload: `"o"`}), settlement("g", d, groupcommit.Completed, d.messages...), d.Lease}
		}
		c.cut.Store(2)
		if before {
			c.cut.Store(1)
		}
		is(t, "a commit whose connection was cut", b.transact(parts()...), groupcommit.ErrUnknown)
		if c.done.Load() != int32(n+1) {
			t.Fatal("nothing was cut")
		}
		if before {
			if err := b.transact(parts()...); err != nil {
				t.Errorf("repeated after a commit that did not get through: %v", err)
			}
		}
		is(t, "repeated after it happened", b.transact(parts()...), groupcommit.ErrDuplicate)
		if r := b.push(q, "out", item{id: id, payload: "2"}); !r[0].Duplicate {
			t.Errorf("%s was stored twice", id)
		}
	}
	if got := tails(t, b); got != "in 4, new0 1, new1 1, new2 1, new3 1, out 4" {
		t.Error(got)
	}
}

// TestTransactionsUnderFire: connections are killed all the time; transactions repeated until they are answered happen exactly once.
func TestTransactionsUnderFire(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	bs := []*broker{start(t, dsn, setup{pool: 12}), start(t, dsn, setup{pool: 12})}
	pool := admin(t, dsn)
	length := 3 * time.Second
	if testing.Short() {
		length = time.Second
	}
	end := time.Now().Add(length)
	var work sync.WaitGroup
	var happened, failed atomic.Int64
	for i := range 6 {
		work.Go(func() {
			for n := 0; time.Now().Before(end); n++ {
				id := fmt.Sprintf("%d-%d", i, n)
				for try := 0; ; try++ {
					b := bs[(i+try)%2]
					err := b.transact(batch("fire.q", fmt.Sprint("p", i%3), item{id: id, payload: "1"}), batch("fire.q", fmt.Sprint("p", (i+1)%3), item{id: id, payload: "2"}))
					if err == nil || errors.Is(err, groupcommit.ErrDuplicate) {
						if try == 0 && err != nil {
							t.Errorf("%s is a duplicate at its first try", id)
						}
						break
					}
					failed.Add(1)
				}
				happened.Add(1)
			}
		})
	}
	work.Go(func() {
		for time.Now().Before(end) {
			time.Sleep(30 * time.Millisecond)
			if _, err := pool.Exec(context.Background(), `select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
				and state <> 'idle' order by random() limit 1`); err != nil {
				t.Error(err)
			}
		}
	})
	work.Wait()
	seen := make(map[string]int)
	for place, ms := range readStored(t, bs[0]) {
		for _, m := range ms {
			if seen[m.tx]++; seen[m.tx] > 2 {
				t.Errorf("%s is stored again in %s", m.tx, place)
			}
		}
	}
	for id, n := range seen {
		if n != 2 {
			t.Errorf("of %s, %d of 2 are stored", id, n)
		}
	}
	if int64(len(seen)) != happened.Load() {
		t.Errorf("%d are stored, %d were answered", len(seen), happened.Load())
	}
	t.Logf("%d happened, %d failed on the way", happened.Load(), failed.Load())
}

// TestFlushKeepsToTheOrder: a broker that is alone saves itself locking partitions in order, but not while there are transactions.
func TestFlushKeepsToTheOrder(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	pool := admin(t, dsn)
	impatient(t, pool)
	b := start(t, dsn, setup{alone: true, recheck: slow, change: func(o *groupcommit.Options) {
		o.Width, o.Alone = 1, func() bool { return true }
	}})
	const q = "order.q"
	b.push(q, "gate", items(1, "g")...)
	b.push(q, "low", items(1, "l")...)
	b.push(q, "high", items(1, "h")...)
	d := b.need(route(q, "high", "g", 1, 0), "h-0")
	releaseGate := hold(t, dsn, lockPartition, "gate")
	release := hold(t, dsn, lockPartition, "low")
	transaction := background(t, func() error { return b.transact(batch(q, "low", items(1, "t")...), batch(q, "high", items(1, "t")...)) })
	dbtest.WaitBlocked(t, pool, 1)
	gate := b.goPush(t, q, "gate", items(1, "x")...)
	dbtest.WaitBlocked(t, pool, 2)
	// On one flush: what drains high, and what pushes to low.
	push := b.goPush(t, q, "low", items(1, "p")...)
	ack := background(t, func() error {
		return b.tryAck(context.Background(), "g", d.Lease, d.messages[0].public, says(groupcommit.Completed, d.messages...)...)[0].Err
	})
	dbtest.WaitBlocked(t, pool, 3) // the transaction, the gate's side lane, and that flush
	release()
	for _, o := range []*outcome{transaction, push, ack} {
		if err := o.wait(t, "what waited for one of two", soon); err != nil {
			t.Error(err)
		}
	}
	releaseGate()
	if err := gate.wait(t, "the gate", soon); err != nil {
		t.Error(err)
	}
	noDeadlock(t, pool, b)
}
