package groupcommit_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"ferrymq/catalog"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
)

// lasting makes the leases and backoffs of a subscription last longer than a test: they end by statement.
func lasting(change func(*catalog.Policy)) func(*catalog.Policy) {
	return func(p *catalog.Policy) {
		p.LeaseSeconds, p.Initial, p.Max = 3600, time.Hour, time.Hour
		if change != nil {
			change(p)
		}
	}
}

// expire ends the leases of a subscription's lanes.
func (b *broker) expire(g *catalog.Group) {
	b.t.Helper()
	exec(b.t, b.Pool, `update ferrymq.cursors set lease_until = clock_timestamp() - interval '1 millisecond' where group_id = $1 and lease_until > clock_timestamp()`, g.ID)
	exec(b.t, b.Pool, `update ferrymq.in_flight set lease_until = clock_timestamp() - interval '1 millisecond' where group_id = $1 and lease_until > clock_timestamp()`, g.ID)
}

// settleOne settles one delivery and says what became of it.
func (b *broker) settleOne(how string, g *catalog.Group, l *lane) error {
	d := l.Delivered
	ds, err := []*groupcommit.Delivered{&d}, error(nil)
	switch how {
	case "ack":
		err = b.AckLanes(context.Background(), g, ds)
	case "nack":
		err = b.NackLanes(context.Background(), g, ds, "boom", "boom", 0)
	case "release":
		err = b.ReleaseLanes(context.Background(), g, ds)
	case "extend":
		b.ExtendLanes(context.Background(), g, ds, 60)
	}
	return errors.Join(err, d.Err)
}

// next receives exactly one message.
func (b *broker) next(q *catalog.Queue, g *catalog.Group, payload string, attempt int32) *lane {
	b.t.Helper()
	got := b.receive(q, g, 1, soon)
	if len(got) != 1 || got[0].payload != payload || got[0].attempt != attempt {
		b.t.Fatalf("received %+v, want %s, attempt %d", got, payload, attempt)
	}
	return got[0]
}

// TestStaleHolder: who had a message before has no say any more, and changes nothing for who has it now.
func TestStaleHolder(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{})
	b := bs[0]
	q, g := b.subscribe("stale", "mail", lasting(func(p *catalog.Policy) { p.Initial = 0 }))
	b.push("stale", "k", items(2, "m")...)
	old := b.next(q, g, `"m-0"`, 1)
	b.expire(g)
	now := b.next(q, g, `"m-0"`, 2)
	before := number(t, b.Pool, "select extract(epoch from lease_until)::bigint from ferrymq.cursors where group_id = $1", g.ID)
	for _, how := range []string{"ack", "nack", "release", "extend"} {
		for _, other := range bs {
			is(t, how, other.settleOne(how, g, old), groupcommit.ErrLeaseLost)
		}
	}
	if after := number(t, b.Pool, "select extract(epoch from lease_until)::bigint from ferrymq.cursors where group_id = $1", g.ID); after != before {
		t.Error("the lease was changed")
	}
	if got := b.receive(q, g, 10, 0); len(got) > 0 {
		t.Errorf("received %s beside it", got[0].payload)
	}
	if err := bs[1].settleOne("ack", g, now); err != nil {
		t.Error(err)
	}
	is(t, "once more", b.settleOne("nack", g, now), groupcommit.ErrSettled)
	b.next(q, g, `"m-1"`, 1)
}

// TestSettledInPart: acks that were committed are said to be, also when why others of the call were refused cannot be found out.
func TestSettledInPart(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, small(t, dsn))
	q, g := b.subscribe("part", "mail", lasting(nil))
	b.push("part", "a", items(2, "m")...)
	old := b.next(q, g, `"m-0"`, 1)
	if err := b.settleOne("ack", g, old); err != nil {
		t.Fatal(err)
	}
	now := b.next(q, g, `"m-1"`, 1)
	b.push("part", "b", items(1, "b")...)
	other := b.next(q, g, `"b-0"`, 1)
	for range 2 { // no connection is left but for flushes
		conn, err := b.Pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Release()
	}
	ds := one([]*lane{old, other})
	if err := b.AckLanes(t.Context(), g, ds); err != nil || !errors.Is(ds[0].Err, groupcommit.ErrNoConnection) || ds[1].Err != nil {
		t.Errorf("again: %v, the other one: %v, the call: %v", ds[0].Err, ds[1].Err, err)
	}
	ds = one([]*lane{old, now})
	if b.ExtendLanes(t.Context(), g, ds, 60); !errors.Is(ds[0].Err, groupcommit.ErrNoConnection) || ds[1].Err != nil {
		t.Errorf("again: %v, the other one: %v", ds[0].Err, ds[1].Err)
	}
}

// TestAfterExpiry: until somebody else has it an ack is good, nothing else is; whether the end of the lease was counted already or not.
func TestAfterExpiry(t *testing.T) {
	t.Parallel()
	b := together(t, 1, setup{})[0]
	q, g := b.subscribe("late", "mail", lasting(nil))
	for n, counted := range []bool{false, true} {
		b.push("late", "k", item{payload: fmt.Sprint(n)})
		l := b.next(q, g, fmt.Sprint(n), 1)
		b.expire(g)
		if counted {
			if got := b.receive(q, g, 1, 0); len(got) > 0 {
				t.Fatalf("received %+v", got[0])
			}
			if n := number(t, b.Pool, "select count(*) from ferrymq.cursors where lease_until = '-infinity' and not_before > clock_timestamp()"); n != 1 {
				t.Fatal("the lane does not rest")
			}
		}
		for _, how := range []string{"nack", "release", "extend"} {
			is(t, how, b.settleOne(how, g, l), groupcommit.ErrLeaseLost)
		}
		if err := b.settleOne("ack", g, l); err != nil {
			t.Errorf("ack, counted %v: %v", counted, err)
		}
		is(t, "once more", b.settleOne("ack", g, l), groupcommit.ErrSettled)
	}
}

// TestLostAfterExhausted: what comes right after a message that ran out of attempts has a lease of its own, which nobody has settled.
func TestLostAfterExhausted(t *testing.T) {
	t.Parallel()
	b := together(t, 1, setup{})[0]
	q, g := b.subscribe("own", "mail", lasting(func(p *catalog.Policy) { p.MaxAttempts = 1 }))
	b.push("own", "k", items(2, "m")...)
	b.next(q, g, `"m-0"`, 1)
	b.expire(g)
	l := b.next(q, g, `"m-1"`, 1)
	b.expire(g)
	is(t, "nack", b.settleOne("nack", g, l), groupcommit.ErrLeaseLost)
}

// TestLastAttempt: the nack of the last attempt files the dead letter at once, whatever it asks for and whether or not somebody waits;
// attempts outlive the broker that counted them.
func TestLastAttempt(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{})
	q, g := b.subscribe("last", "mail", lasting(func(p *catalog.Policy) { p.MaxAttempts = 3 }))
	b.push("last", "k", items(2, "m")...)
	for attempt := int32(1); attempt < 3; attempt++ {
		if err := b.settleOne("nack", g, b.next(q, g, `"m-0"`, attempt)); err != nil {
			t.Fatal(err)
		}
	}
	b.stop()
	b = start(t, dsn, setup{})
	q, g = b.subscribe("last", "mail", nil)
	l := b.next(q, g, `"m-0"`, 3)
	if err := b.NackLanes(t.Context(), g, one([]*lane{l}), "boom", "boom", 24*time.Hour); err != nil || l.Err != nil {
		t.Fatal(err, l.Err)
	}
	if n := number(t, b.Pool, "select count(*) from ferrymq.dead_letters where retry_count = 3"); n != 1 {
		t.Errorf("%d dead letters", n)
	}
	is(t, "once more", b.settleOne("nack", g, l), groupcommit.ErrSettled)
	b.next(q, g, `"m-1"`, 1)
}

// TestBackoffCapped: however many attempts there were, the backoff is what the policy says.
func TestBackoffCapped(t *testing.T) {
	t.Parallel()
	b := together(t, 1, setup{})[0]
	q, g := b.subscribe("cap", "mail", func(p *catalog.Policy) { p.MaxAttempts, p.Multiplier = 0, 100 })
	b.push("cap", "k", items(1, "m")...)
	for attempt := int32(1); attempt < 10_000_000; attempt = attempt*100 + 1 {
		l := b.next(q, g, `"m-0"`, attempt)
		if err := b.NackLanes(t.Context(), g, one([]*lane{l}), "", "", -1); err != nil || l.Err != nil {
			t.Fatal(err, l.Err)
		}
		rest := number(t, b.Pool, "select extract(epoch from not_before - clock_timestamp())::bigint from ferrymq.cursors where group_id = $1", g.ID)
		if most := int64(660); rest < 0 || rest > most || attempt > 100 && rest < 530 {
			t.Errorf("attempt %d rests for %d s", attempt, rest)
		}
		exec(t, b.Pool, "update ferrymq.cursors set not_before = null, attempts = attempts * 100 where group_id = $1", g.ID)
	}
}

// TestFilerKilled: a broker that dies between finding a message without attempts left and filing it leaves that to the next one.
func TestFilerKilled(t *testing.T) {
	t.Parallel()
	b := together(t, 1, setup{})[0]
	q, g := b.subscribe("killed", "mail", lasting(func(p *catalog.Policy) { p.MaxAttempts = 1 }))
	b.push("killed", "k", items(2, "m")...)
	l := b.next(q, g, `"m-0"`, 1)
	exec(t, b.Pool, "update ferrymq.cursors set lease_id = gen_random_uuid(), lease_until = clock_timestamp() + interval '100 milliseconds' where group_id = $1", g.ID)
	b.next(q, g, `"m-1"`, 1)
	is(t, "ack", b.settleOne("ack", g, l), groupcommit.ErrLeaseLost)
	if n := number(t, b.Pool, "select count(*) from ferrymq.dead_letters where retry_count = 1"); n != 1 {
		t.Errorf("%d dead letters", n)
	}
}

// TestWindowAndLeases: a message that a window holds back when its lease has ended is looked at again and again. That changes nothing.
func TestWindowAndLeases(t *testing.T) {
	t.Parallel()
	b := together(t, 1, setup{})[0]
	if _, err := b.Catalog.Configure(t.Context(), "window", func(q *catalog.Queue) error { q.WindowBuffer = 60; return nil }); err != nil {
		t.Fatal(err)
	}
	q, g := b.subscribe("window", "mail", lasting(func(p *catalog.Policy) { p.CountExpired = false }))
	b.push("window", "k", items(1, "m")...)
	exec(t, b.Pool, "update ferrymq.partitions set last_push_at = last_push_at - interval '1 hour'")
	b.next(q, g, `"m-0"`, 1)
	b.push("window", "k", items(1, "n")...)
	b.expire(g)
	for range 3 {
		if got := b.receive(q, g, 1, 0); len(got) > 0 {
			t.Fatal("the window does not hold it back")
		}
		exec(t, b.Pool, "update ferrymq.cursors set not_before = null where group_id = $1", g.ID)
	}
	exec(t, b.Pool, "update ferrymq.partitions set last_push_at = last_push_at - interval '1 hour'")
	b.next(q, g, `"m-0"`, 1)
}

// TestPublishAgainstAck: the last message of a lane is acked at the moment the next is published. Whoever waits gets it, at once.
func TestPublishAgainstAck(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	a, b := bs[0], bs[1]
	q, g := a.subscribe("tight", "mail", lasting(nil))
	b.subscribe("tight", "mail", nil)
	a.push("tight", "k", item{payload: "0"})
	total := rounds(1000)
	if *steps > 0 {
		total = *steps
	}
	var took []time.Duration
	l := a.next(q, g, "0", 1)
	for n := 1; n <= total; n++ {
		receiver, acker, publisher := bs[n%2], bs[n/2%2], bs[n/4%2]
		var both sync.WaitGroup
		both.Go(func() {
			if err := acker.settleOne("ack", g, l); err != nil {
				t.Errorf("ack: %v", err)
			}
		})
		both.Go(func() {
			if _, err := publisher.tryPush(t.Context(), "tight", "k", item{payload: fmt.Sprint(n)}); err != nil {
				t.Errorf("publish: %v", err)
			}
		})
		var at atomic.Int64
		go func() { both.Wait(); at.Store(time.Now().UnixNano()) }()
		next := receiver.next(q, g, fmt.Sprint(n), 1)
		both.Wait()
		if since := at.Load(); since > 0 {
			took = append(took, time.Since(time.Unix(0, since)))
		} else {
			took = append(took, 0)
		}
		l = next
	}
	slices.Sort(took)
	worst := took[len(took)*999/1000]
	t.Logf("%d rounds, p50 %v, p99.9 %v, longest %v", total, took[len(took)/2], worst, took[len(took)-1])
	if worst >= time.Second {
		t.Errorf("p99.9 of the time to delivery is %v", worst)
	}
}

// TestOneAtATime: one key, many receivers on two brokers: in publish order, each once, none while another is out.
func TestOneAtATime(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{})
	b := bs[0]
	q, g := b.subscribe("single", "mail", lasting(nil))
	total := int64(rounds(300))
	b.push("single", "k", items(int(total), "m")...)
	var out, got atomic.Int64
	var all sync.WaitGroup
	for n := range 16 {
		b := bs[n%2]
		all.Go(func() {
			for got.Load() < total && !t.Failed() {
				d, err := b.Receive(context.Background(), g, 3, 100*time.Millisecond, "")
				if late(err) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if d == nil {
					continue
				}
				if len(d.Spans) != 1 || out.Add(1) != 1 {
					t.Error("two messages of a key are out")
				}
				s := d.Spans[0]
				if want := got.Load(); s.Start != want || s.Attempt != 1 {
					t.Errorf("message %d, attempt %d, want %d", s.Start, s.Attempt, want)
				}
				got.Add(1)
				out.Add(-1)
				if err := bs[int(s.Start)%2].settleOne("ack", g, &lane{Delivered: groupcommit.Delivered{Partition: s.Row.ID, Offset: s.Start, Lease: d.Lease}}); err != nil {
					t.Errorf("ack: %v", err)
				}
			}
		})
	}
	all.Wait()
	if got.Load() != total {
		t.Errorf("%d messages, want %d", got.Load(), total)
	}
	_ = q
}

// TestSettleAgainstExpiry: a lease ends while its holder settles or extends it and another receives. Exactly one of them has the message.
func TestSettleAgainstExpiry(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"ack", "nack", "extend"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			bs := together(t, 2, setup{})
			a, b := bs[0], bs[1]
			q, g := a.subscribe("edge", "mail", lasting(func(p *catalog.Policy) { p.CountExpired = false }))
			b.subscribe("edge", "mail", nil)
			won := map[string]int{}
			for n := range rounds(200) {
				key := fmt.Sprint("k", n)
				a.push("edge", key, items(1, key)...)
				l := a.next(q, g, fmt.Sprintf(`"%s-0"`, key), 1)
				exec(t, a.Pool, "update ferrymq.cursors set lease_until = clock_timestamp() + make_interval(secs => $2) where partition_id = $1", l.Partition, float64(n%8)/1000)
				var err error
				settle := background(t, func() error {
					time.Sleep(time.Duration(n%5) * time.Millisecond)
					err = a.settleOne(how, g, l)
					return nil
				})
				var got []*lane
				for end := time.Now().Add(20 * time.Millisecond); len(got) == 0 && time.Now().Before(end); {
					got = b.receive(q, g, 1, 0)
				}
				_ = settle.wait(t, how, soon)
				switch {
				case err == nil && len(got) > 0 && how != "nack", err == nil && len(got) > 0 && got[0].attempt != 2:
					t.Fatalf("round %d: %s was good, and it came again: %+v", n, how, got[0])
				case err == nil:
					won["holder"]++
				case !errors.Is(err, groupcommit.ErrLeaseLost):
					t.Fatal(err)
				default:
					won["receiver"]++
					if len(got) == 0 {
						got = b.receive(q, g, 1, soon)
					}
					if len(got) != 1 || got[0].key != key || got[0].attempt != 1 {
						t.Fatalf("round %d: lost, and received %+v", n, got)
					}
				}
				if len(got) == 0 && how == "nack" {
					got = b.receive(q, g, 1, soon)
				}
				if len(got) == 0 && how == "extend" {
					got = []*lane{l}
				}
				for _, l := range got {
					if err := b.settleOne("ack", g, l); err != nil {
						t.Fatal(err)
					}
				}
			}
			t.Log(won)
		})
	}
}

// TestExtendTooLate: an extend that waits for its lane until the lease is over is refused, and nothing is extended.
func TestExtendTooLate(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{})
	b := bs[0]
	q, g := b.subscribe("wait", "mail", lasting(func(p *catalog.Policy) { p.CountExpired = false }))
	b.push("wait", "k", items(1, "m")...)
	l := b.next(q, g, `"m-0"`, 1)
	exec(t, b.Pool, "update ferrymq.cursors set lease_until = clock_timestamp() + interval '200 milliseconds' where group_id = $1", g.ID)
	release := hold(t, b.dsn, "select from ferrymq.cursors where group_id = $1 for update", g.ID)
	var lost error
	extend := background(t, func() error { lost = b.settleOne("extend", g, l); return nil })
	dbtest.WaitBlocked(t, admin(t, b.dsn), 1)
	eventually(t, "the lease is over", func() bool {
		return number(t, b.Pool, "select count(*) from ferrymq.cursors where group_id = $1 and lease_until < clock_timestamp()", g.ID) == 1
	})
	release()
	_ = extend.wait(t, "extend", soon)
	is(t, "extend", lost, groupcommit.ErrLeaseLost)
	bs[1].next(q, g, `"m-0"`, 1)
}

// TestLimitAgainstExtend: a lease that is being extended counts against what may be in flight, although it has ended for others
// by the time they look.
func TestLimitAgainstExtend(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{})
	a, b := bs[0], bs[1]
	q, g := a.subscribe("count", "mail", lasting(func(p *catalog.Policy) { p.MaxInFlight = 1 }))
	a.push("count", "k", items(1, "m")...)
	l := a.next(q, g, `"m-0"`, 1)
	a.push("count", "x", items(1, "n")...)
	pool := admin(t, a.dsn)
	exec(t, pool, "update ferrymq.in_flight set lease_until = clock_timestamp()")
	release := hold(t, a.dsn, "select from ferrymq.in_flight where group_id = $1 for update", g.ID)
	var extended error
	var extend *outcome
	for stuck := false; !stuck; {
		exec(t, pool, "update ferrymq.cursors set lease_until = clock_timestamp() + interval '200 milliseconds' where lease_id is not null")
		extend = background(t, func() error { extended = a.settleOne("extend", g, l); return nil })
		eventually(t, "the extend is over, or it waits after it has looked", func() bool {
			stuck = number(t, pool, "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'") > 0
			select {
			case <-extend.done:
				return true
			default:
				return stuck
			}
		})
	}
	eventually(t, "the lease is over", func() bool {
		return number(t, pool, "select count(*) from ferrymq.cursors where lease_until < clock_timestamp()") == 1
	})
	var got []*lane
	other := background(t, func() error { got = b.receive(q, g, 1, 0); return nil })
	select {
	case <-other.done:
	case <-time.After(100 * time.Millisecond): // it waits, as it should, or this machine is slow
	}
	release()
	_ = extend.wait(t, "extend", soon)
	_ = other.wait(t, "receive", soon)
	if live := number(t, a.Pool, "select count(*) from ferrymq.cursors where group_id = $1 and lease_until > clock_timestamp()", g.ID); live > 1 {
		t.Errorf("%d in flight: extended (%v) beside %+v", live, extended, got)
	}
}

// TestLimitTogether: two brokers at the limit, in a tight loop.
func TestLimitTogether(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{})
	const limit = 3
	q, g := bs[0].subscribe("limit", "mail", lasting(func(p *catalog.Policy) { p.MaxInFlight = limit }))
	bs[1].subscribe("limit", "mail", nil)
	total := int64(rounds(400))
	for n := range total {
		bs[0].push("limit", fmt.Sprint("k", n%20), item{payload: fmt.Sprint(n)})
	}
	var out, got, most atomic.Int64
	var all sync.WaitGroup
	for n := range 6 {
		b := bs[n%2]
		all.Go(func() {
			for got.Load() < total && !t.Failed() {
				d, err := b.Receive(context.Background(), g, 2, 100*time.Millisecond, "")
				if late(err) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if d == nil {
					continue
				}
				now := out.Add(int64(len(d.Spans)))
				if most.Store(max(most.Load(), now)); now > limit {
					t.Errorf("%d in flight", now)
				}
				time.Sleep(time.Millisecond) // hold them while others look
				for _, s := range d.Spans {
					got.Add(1)
					out.Add(-1) // before the ack: what is counted here is in flight for certain
					if err := b.settleOne("ack", g, &lane{Delivered: groupcommit.Delivered{Partition: s.Row.ID, Offset: s.Start, Lease: d.Lease}}); err != nil {
						t.Errorf("ack: %v", err)
					}
				}
			}
		})
	}
	all.Wait()
	if n := number(t, bs[0].Pool, "select count(*) from ferrymq.in_flight"); n != 0 {
		t.Errorf("%d rows are left in flight", n)
	}
	t.Logf("at most %d in flight", most.Load())
	_ = q
}

// TestOldestFirst: leases of many keys end while more is published and receivers loop: what comes next of each key is what had been out.
func TestOldestFirst(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{})
	b := bs[0]
	q, g := b.subscribe("oldest", "mail", lasting(func(p *catalog.Policy) { p.Initial = 0; p.MaxAttempts = 0 }))
	const keys = 5
	for n := range keys {
		b.push("oldest", fmt.Sprint("k", n), items(2, fmt.Sprint("k", n))...)
	}
	heads := map[string]string{}
	take := func(want int) (ls []*lane) {
		for len(ls) < want {
			got := b.receive(q, g, keys, soon)
			if len(got) == 0 {
				t.Fatal("stuck")
			}
			ls = append(ls, got...)
		}
		return ls
	}
	for _, l := range take(keys) {
		heads[l.key] = l.payload
	}
	for n := range rounds(60) {
		var all sync.WaitGroup
		var mu sync.Mutex
		seen := map[string]bool{}
		all.Go(func() {
			for k := range keys {
				if _, err := bs[1].tryPush(t.Context(), "oldest", fmt.Sprint("k", k), item{payload: fmt.Sprint(n)}); err != nil {
					t.Error(err)
				}
			}
		})
		all.Go(func() { b.expire(g) })
		end := time.Now().Add(soon)
		for r := range 4 {
			all.Go(func() {
				for time.Now().Before(end) {
					mu.Lock()
					done := len(seen) == keys
					mu.Unlock()
					if done {
						return
					}
					for _, l := range bs[r%2].receive(q, g, 2, 20*time.Millisecond) {
						mu.Lock()
						if seen[l.key] && l.attempt != int32(n+3) || l.payload != heads[l.key] || l.attempt < int32(n+2) {
							t.Errorf("round %d: %s comes with %s, attempt %d; %s was out", n, l.key, l.payload, l.attempt, heads[l.key])
						}
						seen[l.key] = true
						mu.Unlock()
					}
				}
			})
		}
		all.Wait()
		if len(seen) != keys || t.Failed() {
			t.Fatalf("round %d: %d keys came again", n, len(seen))
		}
	}
}
