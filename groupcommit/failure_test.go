package groupcommit_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/catalog"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
	"ferrymq/segment"
)

// hold locks rows in a session of its own until release is called.
func hold(t *testing.T, dsn, sql string, args ...any) (release func()) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), "begin"); err != nil {
		t.Fatal(err)
	}
	if tag, err := conn.Exec(t.Context(), sql, args...); err != nil || tag.RowsAffected() == 0 {
		t.Fatalf("locked %d rows: %v", tag.RowsAffected(), err)
	}
	var once sync.Once
	release = func() { once.Do(func() { conn.Close(context.Background()) }) }
	t.Cleanup(release)
	return release
}

const lockPartition = `select from ferrymq.partitions where name = $1 for update`

// outcome is a call that runs in the background.
type outcome struct {
	done chan struct{}
	err  error
	took time.Duration
}

func background(t *testing.T, do func() error) *outcome {
	o := &outcome{done: make(chan struct{})}
	began := time.Now()
	go func() {
		defer close(o.done)
		o.err = do()
		o.took = time.Since(began)
	}()
	t.Cleanup(func() { <-o.done })
	return o
}

func (o *outcome) wait(t *testing.T, what string, within time.Duration) error {
	t.Helper()
	select {
	case <-o.done:
	case <-time.After(within):
		t.Fatalf("%s: not done within %v", what, within)
	}
	return o.err
}

func (b *broker) goPush(t *testing.T, queue, partition string, ms ...item) *outcome {
	return background(t, func() error { _, err := b.tryPush(context.Background(), queue, partition, ms...); return err })
}

func admin(t *testing.T, dsn string) *pgxpool.Pool { return dbtest.Pool(t, dsn, 2) }

// TestBlockedPartition: a session that holds one partition for longer than the lock timeout stalls that partition only.
func TestBlockedPartition(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{recheck: slow})
	const q = "block.q"
	held := make(map[string]*delivered)
	for n := range 10 {
		p := fmt.Sprint("p", n)
		b.push(q, p, items(2, p)...)
		d := b.need(route(q, p, "g", 1, 0), p+"-0")
		held[p] = d
	}
	release := hold(t, dsn, lockPartition, "p0")
	defer release()
	began := time.Now()
	blockedPush := b.goPush(t, q, "p0", item{payload: `"blocked"`})
	dbtest.WaitBlocked(t, admin(t, dsn), 1)
	blockedAck := background(t, func() error {
		return b.tryAck(context.Background(), "g", held["p0"].Lease, held["p0"].messages[0].public, says(groupcommit.Failed, held["p0"].messages...)...)[0].Err
	})
	var others []*outcome
	for n := 1; n < 10; n++ {
		p := fmt.Sprint("p", n)
		others = append(others, b.goPush(t, q, p, item{payload: `"free"`}), background(t, func() error {
			return b.tryAck(context.Background(), "g", held[p].Lease, held[p].messages[0].public, says(groupcommit.Completed, held[p].messages...)...)[0].Err
		}))
	}
	others = append(others, b.goPush(t, q, "new", item{payload: `"free"`}))
	for _, o := range others {
		if err := o.wait(t, "a partition that nobody holds", 8*time.Second); err != nil {
			t.Error(err)
		}
	}
	t.Logf("the others took %v", time.Since(began))
	// From now on only the side lane waits.
	if err := b.goPush(t, q, "p1", item{payload: `"free"`}).wait(t, "a push beside the blocked one", soon); err != nil {
		t.Error(err)
	}
	if blockedPush.took != 0 {
		t.Errorf("the blocked push ended: %v", blockedPush.err)
	}
	release()
	if err := blockedPush.wait(t, "the released push", soon); err != nil {
		t.Error(err)
	}
	if err := blockedAck.wait(t, "the released ack", soon); err != nil {
		t.Error(err)
	}
	if d := b.pop(route(q, "p0", "g", 10, soon)); d.payloads() != "p0-0 p0-1 blocked" {
		t.Errorf("%q", d.payloads())
	}
}

// TestBlockedExtend: an extend that waits for a lock does not take the pops on its flush with it.
func TestBlockedExtend(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{recheck: slow, change: func(o *groupcommit.Options) { o.Width = 1 }})
	const q = "extend.q"
	b.push(q, "a", item{payload: `"a"`})
	d := b.need(wide(q, "g", 1, 1, 0), "a")
	release := hold(t, dsn, `select from ferrymq.cursors for update`)
	extend := background(t, func() error { _, _, err := b.Extend(context.Background(), d.Lease, 10); return err })
	dbtest.WaitBlocked(t, admin(t, dsn), 1)
	pop := background(t, func() error { _, err := b.tryPop(context.Background(), wide(q, "g", 1, 1, 0)); return err })
	if err := pop.wait(t, "a pop beside a blocked extend", soon); err != nil {
		t.Errorf("pop: %v", err)
	}
	extend.wait(t, "the extend", soon)
	release()
	if n, _, err := b.Extend(t.Context(), d.Lease, 10); n != 1 || err != nil {
		t.Errorf("extend afterwards: %d, %v", n, err)
	}
}

// TestPoison: of many operations that board one flush, the one the database refuses fails alone.
func TestPoison(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{recheck: slow, change: func(o *groupcommit.Options) { o.Width = 1 }})
	pool := admin(t, dsn)
	const q = "poison.q"
	b.push(q, "gate", item{payload: `"g"`})
	b.push(q, "bad", item{payload: `"x"`})
	var leased []*delivered
	for n := range 6 {
		p := fmt.Sprint("p", n)
		b.push(q, p, items(2, p)...)
		leased = append(leased, b.need(route(q, p, "g", 1, 0), p+"-0"))
	}
	b.finish("g", b.pop(route(q, "bad", "g", 9, 0)))
	b.finish("g", b.pop(route(q, "gate", "g", 9, 0)))
	exec(t, pool, `create function refuse() returns trigger language plpgsql as $$ begin
		if new.partition_id = (select id from ferrymq.partitions where name = 'bad') then raise exception 'poison'; end if; return new; end $$`)
	exec(t, pool, `create trigger refuse before insert on ferrymq.segments for each row execute function refuse()`)
	release := hold(t, dsn, lockPartition, "gate")
	gate := b.goPush(t, q, "gate", item{payload: `"gate"`})
	dbtest.WaitBlocked(t, pool, 1)
	var good []*outcome
	for n := range 6 {
		p := fmt.Sprint("p", n)
		good = append(good, b.goPush(t, q, p, item{payload: `"more"`}))
		good = append(good, background(t, func() error {
			return b.tryAck(context.Background(), "g", leased[n].Lease, leased[n].messages[0].public, says(groupcommit.Completed, leased[n].messages...)...)[0].Err
		}))
	}
	bad := []*outcome{b.goPush(t, q, "bad", item{payload: `"poison"`})}
	// An error text that is no UTF-8, and a name that no column can hold: neither gets past the handlers.
	wrong := "\xff"
	bad = append(bad, background(t, func() error {
		d := leased[0]
		return b.tryAck(context.Background(), "g", d.Lease, d.messages[0].public, groupcommit.Ack{TransactionID: &d.messages[0].tx, Status: groupcommit.Failed, Error: &wrong})[0].Err
	}), background(t, func() error {
		qq, err := b.Catalog.EnsureQueue(context.Background(), q)
		if err != nil {
			return nil
		}
		p := &groupcommit.Push{Queue: qq, Partition: &catalog.Partition{QueueID: qq.ID, Name: "a\x00b"}, Messages: []segment.Message{{Payload: []byte("1")}}}
		if err := b.Push(context.Background(), []*groupcommit.Push{p}); err != nil {
			return nil
		}
		return p.Err
	}))
	time.Sleep(20 * time.Millisecond) // whoever boards later flies later
	release()
	if err := gate.wait(t, "the gate", soon); err != nil {
		t.Error(err)
	}
	for i, o := range good {
		if err := o.wait(t, "a good operation", soon); err != nil && !(i == 1 && errors.Is(err, groupcommit.ErrLease)) {
			t.Errorf("good operation %d: %v", i, err)
		}
	}
	for i, o := range bad {
		err := o.wait(t, "a bad operation", soon)
		if i == 1 && err == nil {
			continue // the other ack of that message was first
		}
		if err == nil || errors.Is(err, groupcommit.ErrUnknown) || errors.Is(err, groupcommit.ErrNoConnection) {
			t.Errorf("bad operation %d: %v", i, err)
		}
	}
	// With pops parked on it, too: it ends, they stay.
	var parked []*parkedPop
	for range 5 {
		parked = append(parked, b.park(route(q, "bad", "g", 1, time.Minute)))
	}
	if err := b.goPush(t, q, "bad", item{payload: `"poison"`}).wait(t, "a poison push with parked pops", soon); err == nil {
		t.Error("poison was stored")
	}
	exec(t, pool, `drop trigger refuse on ferrymq.segments`)
	b.push(q, "bad", item{payload: `"cured"`})
	got := 0
	eventually(t, "a parked pop gets the cured one", func() bool {
		for _, w := range parked {
			select {
			case <-w.done:
				if w.err != nil {
					t.Fatalf("parked pop: %v", w.err)
				}
				if w.d.payloads() == "cured" {
					got++
				}
			default:
			}
		}
		return got > 0
	})
}

// TestKilledFlush: a connection that ends in the middle of a flush leaves an unknown outcome, and nothing else.
func TestKilledFlush(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{})
	pool := admin(t, dsn)
	b.push("kill.q", "p", item{payload: `"0"`})
	release := hold(t, dsn, lockPartition, "p")
	push := b.goPush(t, "kill.q", "p", item{id: "one", payload: `"1"`})
	dbtest.WaitBlocked(t, pool, 1)
	exec(t, pool, `select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`)
	err := push.wait(t, "the killed push", soon)
	if !errors.Is(err, groupcommit.ErrUnknown) && !errors.Is(err, groupcommit.ErrNoConnection) {
		t.Errorf("killed push: %v", err)
	}
	release()
	var r []groupcommit.Pushed
	eventually(t, "the next push is stored", func() bool {
		r, err = b.tryPush(t.Context(), "kill.q", "p", item{id: "one", payload: `"1"`})
		return err == nil
	})
	if r[0].Duplicate {
		t.Error("a push that was killed while it waited was stored")
	}
	b.need(wide("kill.q", "g", 10, 1, soon), "0 1")
}

// TestCancelledFlush: a flush that somebody else cancels is sent again: nobody but him knows of it.
func TestCancelledFlush(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{})
	pool := admin(t, dsn)
	b.push("cancel.q", "p", item{payload: `"1"`})
	d := b.pop(wide("cancel.q", "g", 1, 1, soon))
	release := hold(t, dsn, "select from ferrymq.cursors for update")
	extend := background(t, func() error {
		n, _, err := b.Extend(context.Background(), d.Lease, 10)
		if err == nil && n != 1 {
			err = fmt.Errorf("%d leases", n)
		}
		return err
	})
	dbtest.WaitBlocked(t, pool, 1)
	exec(t, pool, `select pg_cancel_backend(pid) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`)
	release()
	if err := extend.wait(t, "the cancelled extend", soon); err != nil {
		t.Error(err)
	}
}

// TestKilledAgain: while connections are killed all the time, pushes that are repeated until they are answered are stored exactly once.
func TestKilledAgain(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	bs := []*broker{start(t, dsn, setup{}), start(t, dsn, setup{})}
	pool := admin(t, dsn)
	length := 4 * time.Second
	if testing.Short() {
		length = time.Second
	}
	end := time.Now().Add(length)
	var work sync.WaitGroup
	var pushed, unknown, duplicate atomic.Int64
	for i := range 8 {
		work.Go(func() {
			for n := 0; time.Now().Before(end); n++ {
				id := fmt.Sprintf("%d-%d", i, n)
				for try := 0; ; try++ {
					r, err := bs[(i+try)%2].tryPush(context.Background(), "again.q", fmt.Sprint("p", i%3), item{id: id, payload: fmt.Sprintf("%q", id)})
					if err == nil {
						if r[0].Duplicate {
							duplicate.Add(1)
							if try == 0 {
								t.Errorf("%s is a duplicate at its first push", id)
							}
						}
						break
					}
					unknown.Add(1)
				}
				pushed.Add(1)
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
	stored := readStored(t, bs[0])
	seen := make(map[string]bool)
	for _, ms := range stored {
		for _, m := range ms {
			if seen[m.tx] {
				t.Errorf("%s is stored twice", m.tx)
			}
			seen[m.tx] = true
		}
	}
	if int64(len(seen)) != pushed.Load() {
		t.Errorf("%d are stored, %d were answered", len(seen), pushed.Load())
	}
	t.Logf("%d pushed, %d failed on the way, %d of those had been stored", pushed.Load(), unknown.Load(), duplicate.Load())
}

// TestNoConnection: without a free connection everything fails, within the time that is promised.
func TestNoConnection(t *testing.T) {
	t.Parallel()
	b := start(t, dbtest.New(t), setup{alone: true, pool: 2, recheck: slow})
	b.push("pool.q", "p", item{payload: `"0"`})
	b.finish("g", b.pop(wide("pool.q", "g", 1, 1, 0)))
	var taken []*pgxpool.Conn
	for range 2 {
		c, err := b.Pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		taken = append(taken, c)
	}
	calls := map[string]*outcome{
		"push": b.goPush(t, "pool.q", "p", item{payload: `"1"`}),
		"pop":  background(t, func() error { _, err := b.tryPop(context.Background(), wide("pool.q", "g", 1, 1, 0)); return err }),
		"short poll": background(t, func() error {
			_, err := b.tryPop(context.Background(), wide("pool.q", "g", 1, 1, 100*time.Millisecond))
			return err
		}),
		"long poll": background(t, func() error {
			_, err := b.tryPop(context.Background(), wide("pool.q", "g", 1, 1, 20*time.Second))
			return err
		}),
	}
	for what, o := range calls {
		is(t, what, o.wait(t, what, 5*time.Second+soon), groupcommit.ErrNoConnection)
		t.Logf("%s failed after %v", what, o.took)
	}
	if took := calls["short poll"].took; took > 2*time.Second {
		t.Errorf("a poll of 100 ms took %v", took)
	}
	for _, c := range taken {
		c.Release()
	}
	b.push("pool.q", "p", item{payload: `"2"`})
	b.need(wide("pool.q", "g", 10, 1, soon), "2")
}

func TestOverload(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{recheck: slow, change: func(o *groupcommit.Options) { o.PushQueueMax, o.MaxParked = 3, 2 }})
	const q = "full.q"
	b.push(q, "p", item{payload: `"0"`})
	b.finish("g", b.pop(wide(q, "g", 1, 1, 0)))
	release := hold(t, dsn, lockPartition, "p")
	first := b.goPush(t, q, "p", items(3, "m")...)
	dbtest.WaitBlocked(t, admin(t, dsn), 1)
	_, err := b.tryPush(t.Context(), q, "other", item{payload: `"x"`})
	is(t, "a push beyond PushQueueMax", err, groupcommit.ErrOverloaded)
	release()
	if err := first.wait(t, "the first push", soon); err != nil {
		t.Error(err)
	}
	b.push(q, "other", item{payload: `"x"`})
	for d := b.pop(wide(q, "g", 9, 9, 0)); d != nil; d = b.pop(wide(q, "g", 9, 9, 0)) {
		b.finish("g", d)
	}
	b.park(wide(q, "g", 1, 1, time.Minute))
	b.park(discovery("nowhere", "h", 1, time.Minute))
	for _, p := range []*groupcommit.Pop{wide(q, "g", 1, 1, soon), route(q, "p", "g", 1, soon), route(q, "missing", catalog.QueueMode, 1, soon), discovery("nowhere", "g", 1, soon)} {
		_, err := b.tryPop(t.Context(), p)
		is(t, "a pop beyond MaxParked", err, groupcommit.ErrOverloaded)
	}
	if d := b.pop(wide(q, "g", 1, 1, 0)); d != nil {
		t.Error("a pop that does not wait got something")
	}
}

// TestPlaceIsKept: a parked pop that leaves for a look is not refused because another took its place meanwhile.
func TestPlaceIsKept(t *testing.T) {
	t.Parallel()
	b := start(t, dbtest.New(t), setup{recheck: slow, change: func(o *groupcommit.Options) { o.MaxParked = 4 }})
	const q = "place.q"
	var first []*parkedPop
	for range 4 {
		first = append(first, b.park(wide(q, "g", 1, 1, time.Minute)))
	}
	queue := int32(number(t, b.Pool, `select id from ferrymq.queues`))
	var refused atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	var more sync.WaitGroup
	for range 16 {
		more.Go(func() {
			for ctx.Err() == nil {
				if _, err := b.tryPop(t.Context(), wide(q, "g", 1, 1, 100*time.Millisecond)); err != nil {
					is(t, "one more", err, groupcommit.ErrOverloaded)
					refused.Add(1)
				}
			}
		})
	}
	for range 300 {
		b.Reconsider(queue)
		time.Sleep(time.Millisecond)
	}
	cancel()
	more.Wait()
	if refused.Load() == 0 {
		t.Error("none was refused")
	}
	for n := range first {
		b.push(q, fmt.Sprint("p", n), item{payload: `"m"`})
	}
	for _, w := range first {
		if d := w.wait(t); d.payloads() != "m" {
			t.Errorf("one that waited: %q", d.payloads())
		}
	}
}

// TestClose: what has boarded is finished, what comes later is refused, parked pops end at once.
func TestClose(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{recheck: slow})
	const q = "close.q"
	b.push(q, "p", item{payload: `"leased"`})
	b.need(wide(q, "g", 1, 1, 0), "leased")
	// The ack is of another queue: on this one it would free a message for the parked pops, if it came before Drain.
	b.push("close.other", "p", item{payload: `"acked"`})
	d := b.need(wide("close.other", "g", 1, 1, 0), "acked")
	parked := []*parkedPop{b.park(wide(q, "g", 1, 1, time.Minute)), b.park(route(q, "p", "g", 1, time.Minute)),
		b.park(route(q, "missing", catalog.QueueMode, 1, time.Minute)), b.park(discovery("nowhere", "g", 1, time.Minute))}
	release := hold(t, dsn, lockPartition, "p")
	boarded := []*outcome{b.goPush(t, q, "p", item{id: "a", payload: `"a"`}), b.goPush(t, q, "p", item{id: "b", payload: `"b"`}), background(t, func() error {
		return b.tryAck(context.Background(), "g", d.Lease, d.messages[0].public, says(groupcommit.Completed, d.messages...)...)[0].Err
	})}
	dbtest.WaitBlocked(t, admin(t, dsn), 1)
	began := time.Now()
	b.Drain()
	for _, w := range parked {
		if w.wait(t) != nil {
			t.Error("a drained pop got something")
		}
	}
	// A pop that rides with an operation on the locked partition comes back with it, after the lock timeout.
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("draining took %v", took)
	}
	if d := b.pop(wide(q, "g", 1, 1, time.Minute)); d != nil {
		t.Error("a pop after Drain got something that is leased")
	}
	closed := background(t, func() error { b.stop(); return nil })
	release()
	for i, o := range boarded {
		if err := o.wait(t, "a boarded operation", soon); err != nil && !errors.Is(err, groupcommit.ErrClosed) {
			t.Errorf("boarded operation %d: %v", i, err)
		}
	}
	closed.wait(t, "Close", soon)
	if err := boarded[0].err; err != nil {
		t.Errorf("the push that was flying: %v", err)
	}
	_, err := b.tryPush(t.Context(), q, "p", item{payload: `"late"`})
	is(t, "a push after Close", err, groupcommit.ErrClosed)
	_, err = b.tryPop(t.Context(), wide(q, "g", 1, 1, 0))
	is(t, "a pop after Close", err, groupcommit.ErrClosed)
}

// TestExtendAcrossBrokers: a lease of two partitions, acknowledged in part through another broker, is extended on both.
func TestExtendAcrossBrokers(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	const q = "lease.q"
	bs[0].push(q, "a", items(3, "a")...)
	bs[0].push(q, "b", items(3, "b")...)
	d := bs[0].pop(wide(q, "g", 6, 2, 0))
	if len(d.messages) != 6 {
		t.Fatalf("%q", d.payloads())
	}
	a := d.of("a")
	bs[1].ack("g", d, groupcommit.Completed, a[0])
	bs[0].ack("g", d, groupcommit.Completed, a[1])
	for _, b := range bs {
		if n, _, err := b.Extend(t.Context(), d.Lease, 100); n != 2 || err != nil {
			t.Errorf("renewed %d, %v", n, err)
		}
	}
	bs[1].ack("g", d, groupcommit.Completed, a[2])
	if n, _, err := bs[0].Extend(t.Context(), d.Lease, 100); n != 1 || err != nil {
		t.Errorf("renewed %d, %v", n, err)
	}
}

// TestFirstContactInTime: a first contact ends when its pop does, though somebody holds the partition, and gives the others meanwhile.
func TestFirstContactInTime(t *testing.T) {
	t.Parallel()
	for name, pop := range map[string]func(group string, wait time.Duration) *groupcommit.Pop{
		"partition": func(g string, wait time.Duration) *groupcommit.Pop { return route("ns.q", "held", g, 10, wait) },
		"queue":     func(g string, wait time.Duration) *groupcommit.Pop { return wide("ns.q", g, 10, 1, wait) },
		"discovery": func(g string, wait time.Duration) *groupcommit.Pop { return discovery("ns", g, 10, wait) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := start(t, dbtest.New(t), setup{})
			b.push("ns.q", "held", item{payload: `"x"`})
			release := hold(t, b.dsn, lockPartition, "held")
			for _, wait := range []time.Duration{time.Second, 0} {
				began := time.Now()
				d, err := b.tryPop(t.Context(), pop(fmt.Sprint("g", wait), wait))
				if d != nil || err != nil {
					t.Fatalf("popped %v, %v", d, err)
				}
				t.Logf("a wait of %v took %v", wait, time.Since(began))
				if took := time.Since(began); took > 8*time.Second {
					t.Errorf("a wait of %v took %v", wait, took)
				}
			}
			release()
			b.finish("g1s", b.need(pop("g1s", soon), `x`))
		})
	}
}
