package groupcommit_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
)

// TestLimitedWhileSeeding: who makes the cursors of a subscription holds it while he waits for a partition. Receives go on.
func TestLimitedWhileSeeding(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{recheck: slow})
	q, g := b.subscribe("lim.q", "mail", func(p *catalog.Policy) { p.MaxInFlight = 2 })
	b.push("lim.q", "a", item{payload: `"1"`}, item{payload: `"2"`})
	eventually(t, "the subscription is seeded", func() bool {
		return number(t, b.Pool, `select count(*) from ferrymq.groups where seeded`) == 1
	})
	if ls := b.receive(q, g, 1, soon); len(ls) != 1 || b.AckLanes(t.Context(), g, one(ls)) != nil || ls[0].Err != nil {
		t.Fatalf("received %d", len(ls))
	}
	// As Seed does, on another broker.
	hold(t, dsn, `select from ferrymq.groups where name = 'mail' for no key update`)
	if d, err := b.Receive(t.Context(), g, 1, soon, "tester"); err != nil || d == nil {
		t.Fatalf("receive while the subscription is held: %v, %v", d, err)
	}
}

// TestFirstContactBlocked: pops that meet a partition that somebody holds for long leave connections to others.
func TestFirstContactBlocked(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{recheck: slow})
	b.push("meet.q", "held", item{payload: `"1"`})
	release := hold(t, dsn, lockPartition, "held")
	var waiting []*parkedPop
	for i := range 40 {
		waiting = append(waiting, b.goPop(route("meet.q", "held", fmt.Sprint("g", i), 1, 20*time.Second)))
	}
	dbtest.WaitBlocked(t, admin(t, dsn), 3)
	o := background(t, func() error {
		for i := range 5 {
			if _, err := b.tryPush(context.Background(), fmt.Sprint("other", i), "p", item{payload: `"x"`}); err != nil {
				return err
			}
		}
		return nil
	})
	if err := o.wait(t, "a push beside pops that wait", 4*time.Second); err != nil {
		t.Error(err)
	}
	release()
	for _, w := range waiting {
		if d := w.wait(t); d.payloads() != "1" {
			t.Errorf("popped %q", d.payloads())
		}
	}
}

// small gives a broker the fewest connections it may have: two for flushes and two for all else.
func small(t *testing.T, dsn string) setup {
	return setup{alone: true, recheck: slow, pool: 2, change: func(o *groupcommit.Options) {
		flights, err := db.NewPool(t.Context(), dbtest.Through(t, dsn), 2, 30*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(flights.Close)
		o.Flights = flights
	}}
}

func (b *broker) limit(queue string, size int64) {
	b.t.Helper()
	if _, err := b.Catalog.Configure(b.t.Context(), queue, func(q *catalog.Queue) error { q.MaxSize = size; return nil }); err != nil {
		b.t.Fatal(err)
	}
}

// TestCountWithoutConnection: a push that waits for a connection to count the backlog does not stop the transactions that have them all.
func TestCountWithoutConnection(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, small(t, dsn))
	b.limit("full.q", 1000)
	for _, p := range []string{"a", "b", "c"} {
		b.push("full.q", p, item{payload: `"0"`})
	}
	time.Sleep(1100 * time.Millisecond) // the last count is too old
	release := hold(t, dsn, `select from ferrymq.partitions for update`)
	var all []*outcome
	for _, p := range []string{"a", "b"} {
		all = append(all, background(t, func() error { return b.transact(batch("full.q", p, item{payload: `"1"`})) }))
	}
	dbtest.WaitBlocked(t, admin(t, dsn), 2)
	all = append(all, b.goPush(t, "full.q", "c", item{payload: `"1"`}))
	eventually(t, "the push waits for a connection", func() bool { return db.Waiting(b.Pool) > 0 })
	release()
	for _, o := range all {
		if err := o.wait(t, "with all connections in use", 3*time.Second); err != nil {
			t.Error(err)
		}
	}
}

// TestSmallPool: with the fewest connections, fifty callers of all that takes a transaction of its own get through.
func TestSmallPool(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, small(t, dsn))
	b.limit("small.q", 1_000_000)
	var dead []*groupcommit.Redrive
	for i := range 10 {
		dead = append(dead, &groupcommit.Redrive{ID: b.dead("small.q", "p", fmt.Sprint("dead", i))})
	}
	var all sync.WaitGroup
	for i := range 50 {
		all.Go(func() {
			p := fmt.Sprint("p", i%7)
			for n := range rounds(6) {
				var err error
				switch i % 5 {
				case 0:
					err = b.transact(batch("small.q", p, item{id: fmt.Sprint(i, n), payload: `"t"`}), batch("small.q", fmt.Sprint("new", i, n), item{payload: `"t"`}))
				case 1:
					if n > 0 {
						break
					}
					_, err = b.Redrive(context.Background(), dead[i/5])
				case 2:
					_, _, err = b.Seek(context.Background(), "small.q", "g", groupcommit.Target{End: n%2 == 0})
				case 3:
					_, err = b.tryPush(context.Background(), "small.q", p, item{id: fmt.Sprint(i, n), payload: `"p"`})
				case 4:
					_, err = b.tryPop(context.Background(), auto(route("small.q", p, fmt.Sprint("g", i, n), 1, 0)))
				}
				if err != nil {
					t.Errorf("%d: %v", i%5, err)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(60 * time.Second):
		t.Error("they hang")
		<-done
	}
}

// TestGroupMadeAnew: a transaction that has to look again, because a partition is gone, sees then too that the group is another one.
func TestGroupMadeAnew(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	a, b := start(t, dsn, setup{alone: true, recheck: slow}), start(t, dsn, setup{alone: true, recheck: slow})
	for _, p := range []string{"gone", "p"} {
		a.push("anew.q", p, item{id: p, payload: `"1"`})
	}
	d := a.need(route("anew.q", "p", "g", 1, 0), "1")
	if _, _, err := b.DeleteGroup(t.Context(), "anew.q", "g", false); err != nil {
		t.Fatal(err)
	}
	b.need(route("anew.q", "p", "g", 1, 0), "1")
	pool := admin(t, dsn)
	exec(t, pool, `delete from ferrymq.cursors where partition_id = (select id from ferrymq.partitions where name = 'gone')`)
	exec(t, pool, `delete from ferrymq.segments where partition_id = (select id from ferrymq.partitions where name = 'gone')`)
	exec(t, pool, `delete from ferrymq.partitions where name = 'gone'`)
	if err := a.transact(batch("anew.q", "gone", item{payload: `"2"`}), settlement("g", nil, groupcommit.Completed, d.messages...)); err != nil {
		t.Error(err)
	}
}

// TestClearLanes: what is cleared counts neither against the messages in flight nor as an attempt of the next one.
func TestClearLanes(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{recheck: slow})
	q, g := b.subscribe("clear.q", "mail", func(p *catalog.Policy) { p.MaxInFlight, p.MaxAttempts = 1, 3 })
	b.push("clear.q", "a", item{payload: `"1"`})
	old := b.receive(q, g, 1, soon)
	if len(old) != 1 {
		t.Fatal("nothing received")
	}
	if _, _, err := b.Clear(t.Context(), q, nil); err != nil {
		t.Fatal(err)
	}
	b.push("clear.q", "a", item{payload: `"2"`})
	ls := b.receive(q, g, 1, soon/2)
	if len(ls) != 1 || ls[0].payload != `"2"` || ls[0].attempt != 1 {
		t.Fatalf("received %+v", ls)
	}
	if err := b.AckLanes(t.Context(), g, one(old)); err != nil || !errors.Is(old[0].Err, groupcommit.ErrLeaseLost) {
		t.Errorf("ack of what was cleared: %v, %v", err, old[0].Err)
	}
	if err := b.AckLanes(t.Context(), g, one(ls)); err != nil || ls[0].Err != nil {
		t.Errorf("ack: %v, %v", err, ls[0].Err)
	}
}

// TestClearMakesRoom: a lease that a clear ends makes room for another lane, at once.
func TestClearMakesRoom(t *testing.T) {
	t.Parallel()
	b := start(t, dbtest.New(t), setup{recheck: slow})
	q, g := b.subscribe("room.q", "mail", func(p *catalog.Policy) { p.MaxInFlight = 1 })
	b.push("room.q", "a", item{payload: `"1"`})
	b.push("room.q", "b", item{payload: `"2"`})
	ls := b.receive(q, g, 1, soon)
	if len(ls) != 1 {
		t.Fatal("nothing received")
	}
	got := make(chan *groupcommit.Delivery, 1)
	parked := background(t, func() error {
		d, err := b.Receive(context.Background(), g, 1, 20*time.Second, "tester")
		got <- d
		return err
	})
	eventually(t, "the receive is parked", func() bool { return b.Parked() == 1 })
	if _, _, err := b.Clear(t.Context(), q, &ls[0].key); err != nil {
		t.Fatal(err)
	}
	if err := parked.wait(t, "the parked receive", soon); err != nil {
		t.Fatal(err)
	}
	if d := <-got; d == nil {
		t.Error("it got nothing")
	}
}

// TestNackOfRemoved: a backoff for a message that retention has removed does not hold up the next ones, whether the nack
// comes before or after.
func TestNackOfRemoved(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{recheck: slow})
	pool := admin(t, dsn)
	if _, err := b.Catalog.Configure(t.Context(), "nack.q", func(q *catalog.Queue) error { q.RetryDelay = 60_000; return nil }); err != nil {
		t.Fatal(err)
	}
	b.push("nack.q", "p", item{payload: `"1"`})
	b.push("nack.q", "p", item{payload: `"2"`})
	d := b.need(route("nack.q", "p", "g", 1, 0), "1")
	exec(t, pool, `update ferrymq.partitions set first_offset = 1`)
	b.tryAck(t.Context(), "g", d.Lease, d.messages[0].public, says(groupcommit.Failed, d.messages...)...)
	b.need(route("nack.q", "p", "g", 1, soon), "2")
}

// TestWokenAndGone: a parked pop that is woken and whose caller leaves before it flies passes the sign on to the next one.
func TestWokenAndGone(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"wide", "narrow"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			dsn := dbtest.New(t)
			one := func(o *groupcommit.Options) { o.Width = 1 }
			b, other := start(t, dsn, setup{alone: true, recheck: slow, change: one}), start(t, dsn, setup{alone: true, recheck: slow})
			b.push("wake.q", "p", item{payload: `"0"`})
			b.push("wake.x", "x", item{payload: `"0"`})
			b.pop(auto(wide("wake.q", "g", 1, 1, 0)))
			pop := wide("wake.q", "g", 1, 1, time.Minute)
			if kind == "narrow" {
				pop = route("wake.q", "p", "g", 1, time.Minute)
			}
			first := b.park(pop)
			second := b.park(pop)
			release := hold(t, dsn, lockPartition, "x")
			blocked := b.goPush(t, "wake.x", "x", item{payload: `"1"`})
			dbtest.WaitBlocked(t, admin(t, dsn), 1)
			other.push("wake.q", "p", item{payload: `"1"`})
			id := number(t, b.Pool, `select id from ferrymq.partitions where name = 'p'`)
			queue := number(t, b.Pool, `select queue_id from ferrymq.partitions where name = 'p'`)
			b.Hint(groupcommit.Hint{Queue: int32(queue), Partition: id})
			if b.Parked() != 1 {
				t.Fatalf("%d parked", b.Parked())
			}
			first.cancel()
			<-first.done
			release()
			if d := second.wait(t); d.payloads() != "1" {
				t.Errorf("popped %q", d.payloads())
			}
			if err := blocked.wait(t, "the push", soon); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestPassedOverWakes: a pop that passed over a cursor, because somebody had locked it to settle or to judge, is woken when that ends
// and leaves something to deliver, whatever became of it.
func TestPassedOverWakes(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"commit", "rollback", "bury"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			bs := together(t, 2, setup{recheck: slow})
			dsn, pool := bs[0].dsn, admin(t, bs[0].dsn)
			for _, q := range []string{"over.a", "over.b"} {
				bs[0].push(q, "p", item{id: "1", payload: `"1"`}, item{id: "2", payload: `"2"`})
			}
			var ms []message
			for _, q := range []string{"over.a", "over.b"} {
				d := bs[0].need(wide(q, "g", 1, 1, 0), "1")
				bs[0].ack("g", d, groupcommit.Retry, d.messages...) // its lease ends, nothing is passed
				ms = append(ms, d.messages[0])
			}
			eventually(t, "both are free", func() bool {
				return number(t, pool, `select count(*) from ferrymq.cursors where lease_id is null and pending`) == 2
			})
			// The cursor of b is locked after that of a. It is what the transaction waits for.
			release := hold(t, dsn, `select from ferrymq.cursors c join ferrymq.groups g on g.id = c.group_id join ferrymq.queues q on q.id = g.queue_id
				where q.name = 'over.b' for no key update of c`)
			var o *outcome
			switch kind {
			case "commit":
				o = background(t, func() error {
					return bs[0].transact(settlement("g", nil, groupcommit.Completed, ms[0]), settlement("g", nil, groupcommit.Completed, ms[1]))
				})
			case "rollback":
				o = background(t, func() error {
					return bs[0].transact(settlement("g", nil, groupcommit.Completed, ms[0]), settlement("g", nil, groupcommit.Completed, message{public: ms[1].public, tx: "stranger"}))
				})
			case "bury":
				release()
				release = hold(t, dsn, `select from ferrymq.installation for update`)
				exec(t, pool, `create function wait_here() returns trigger language plpgsql as $$ begin perform from ferrymq.installation for update; raise exception 'no'; end $$`)
				exec(t, pool, `create trigger wait_here before insert on ferrymq.dead_letters for each row execute function wait_here()`)
				o = background(t, func() error {
					_, err := bs[0].BuryHead(context.Background(), ms[0].public, "1", "g", "x")
					return err
				})
			}
			dbtest.WaitBlocked(t, pool, 1)
			var waiting []*parkedPop
			for _, b := range bs {
				waiting = append(waiting, b.park(wide("over.a", "g", 1, 1, time.Minute)))
			}
			release()
			err := o.wait(t, "what locked it", soon)
			want := "1"
			if kind == "commit" {
				want = "2"
			}
			if (err == nil) != (kind == "commit") {
				t.Errorf("%s: %v", kind, err)
			}
			select {
			case <-waiting[0].done:
				waiting[0].cancel()
			case <-waiting[1].done:
				waiting[0], waiting[1] = waiting[1], waiting[0]
			case <-time.After(soon):
				t.Fatal("lost wakeup: nobody got anything")
			}
			if d := waiting[0].wait(t); d.payloads() != want {
				t.Errorf("popped %q", d.payloads())
			}
		})
	}
}

// TestOrderAlone: a broker that is alone takes its partitions in the order of all others that take several: who makes cursors, or clears.
func TestOrderAlone(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{alone: true, recheck: slow, change: func(o *groupcommit.Options) { o.Width, o.Alone = 1, func() bool { return true } }})
	low, high := "", "" // two that board in the other order than that of their ids
	var lane uint64
	for i := 0; high == ""; i++ {
		p := fmt.Sprint("p", i)
		b.push("order.q", p, item{payload: `"0"`})
		_, found := b.Catalog.Known("order.q", p)
		switch n := found.Lane % 64; {
		case low == "" && n > 0:
			low, lane = p, n
		case low != "" && n < lane:
			high = p
		}
	}
	b.push("order.q", "x", item{payload: `"0"`})
	pool := admin(t, dsn)
	// So many that they are looked up one by one.
	exec(t, pool, `insert into ferrymq.partitions (public_id, queue_id, name) select gen_random_uuid(), queue_id, 'more' || i from ferrymq.partitions, generate_series(1, 20000) i where name = 'x'`)
	exec(t, pool, `analyze ferrymq.partitions`)
	session, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close(context.Background())
	for _, s := range []string{"begin", "select from ferrymq.partitions where name = '" + low + "' for no key update"} {
		if _, err := session.Exec(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	release := hold(t, dsn, lockPartition, "x")
	first := b.goPush(t, "order.q", "x", item{payload: `"1"`})
	dbtest.WaitBlocked(t, pool, 1)
	var pushes []*groupcommit.Push // they board while the only flight is away
	for _, p := range []string{low, high} {
		x, err := b.newPush(t.Context(), "order.q", p, []item{{payload: `"1"`}})
		if err != nil {
			t.Fatal(err)
		}
		pushes = append(pushes, x)
	}
	both := background(t, func() error { return b.Push(context.Background(), pushes) })
	eventually(t, "they have boarded", func() bool { return b.Boarded() == 2 })
	release()
	if err := first.wait(t, "the first push", soon); err != nil {
		t.Fatal(err)
	}
	dbtest.WaitBlocked(t, pool, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 400*time.Millisecond)
	defer cancel()
	if _, err := session.Exec(ctx, "select from ferrymq.partitions where name = '"+high+"' for no key update"); err != nil {
		t.Errorf("the flush holds the second partition while it waits for the first: %v", err)
	}
	session.Close(context.Background())
	if err := both.wait(t, "the pushes", soon); err != nil {
		t.Error(err)
	}
}

// TestCloseBlocked: a partition that somebody holds does not keep a broker from closing.
func TestCloseBlocked(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{alone: true, recheck: slow})
	b.push("close.q", "p", item{payload: `"0"`})
	hold(t, dsn, lockPartition, "p")
	push := b.goPush(t, "close.q", "p", item{payload: `"1"`})
	clearing := background(t, func() error {
		q, err := b.Catalog.Queue(context.Background(), "close.q")
		if err == nil {
			_, _, err = b.Clear(context.Background(), q, nil)
		}
		return err
	})
	dbtest.WaitBlocked(t, admin(t, dsn), 2)
	closing := background(t, func() error { b.stop(); b.Pool.Close(); return nil })
	closing.wait(t, "close", 8*time.Second)
	for _, o := range []*outcome{push, clearing} {
		if err := o.wait(t, "what was blocked", soon); err == nil {
			t.Error("it cannot have happened")
		}
	}
}
