package groupcommit_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"ferrymq/catalog"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
)

// waiting is a receive that waits in the background.
type waiting struct {
	done chan []*lane
	at   time.Time
	err  error
}

func (b *broker) goReceive(q *catalog.Queue, g *catalog.Group, max int64, wait time.Duration) *waiting {
	b.t.Helper()
	before := b.Parked()
	w := &waiting{done: make(chan []*lane, 1)}
	ended := make(chan struct{})
	b.t.Cleanup(func() { <-ended })
	go func() {
		defer close(ended)
		d, err := b.Receive(b.t.Context(), g, max, wait, "waiter")
		w.at, w.err = time.Now(), err
		var out []*lane
		if d != nil {
			for _, s := range d.Spans {
				out = append(out, &lane{Delivered: groupcommit.Delivered{Partition: s.Row.ID, Offset: s.Start, Lease: d.Lease}, key: s.Partition.Name, attempt: s.Attempt})
			}
		}
		w.done <- out
	}()
	eventually(b.t, "the receive is parked", func() bool { return b.Parked() > before })
	return w
}

// mustSettle fails the test unless all of them were settled.
func (b *broker) mustSettle(err error, ls []*lane) {
	b.t.Helper()
	for _, l := range ls {
		err = errors.Join(err, l.Err)
	}
	if err != nil {
		b.t.Fatal(err)
	}
}

// TestLaneLimitWakes: with a limit in force every settle lets exactly one more message out, to a receive that is parked, at once,
// on whatever broker, and fairly: what has waited longest comes before the lane that was just settled.
func TestLaneLimitWakes(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 2} {
		t.Run(fmt.Sprint(n, " brokers"), func(t *testing.T) {
			t.Parallel()
			bs := together(t, n, setup{recheck: slow})
			a, b := bs[0], bs[n-1]
			q, g := a.subscribe("orders", "mail", func(p *catalog.Policy) { p.MaxInFlight = 2 })
			qb, gb := b.subscribe("orders", "mail", nil)
			for _, key := range names(5) {
				a.push("orders", key, items(3, key)...)
			}
			held := a.receive(q, g, 10, 0)
			if len(held) != 2 {
				t.Fatalf("%d in flight", len(held))
			}
			seen := map[string]int{held[0].key: 1, held[1].key: 1}
			for round, settle := range []func(b *broker, ls []*lane) error{
				func(b *broker, ls []*lane) error { return b.AckLanes(t.Context(), g, one(ls)) },
				func(b *broker, ls []*lane) error { return b.NackLanes(t.Context(), g, one(ls), "x", "x", time.Hour) },
				func(b *broker, ls []*lane) error { return b.ReleaseLanes(t.Context(), g, one(ls)) },
				func(b *broker, ls []*lane) error { return b.AckLanes(t.Context(), g, one(ls)) },
			} {
				first, second := b.goReceive(qb, gb, 10, soon), b.goReceive(qb, gb, 10, soon)
				settler := bs[round%n]
				settler.mustSettle(settle(settler, held[:1]), held[:1])
				var got []*lane
				select {
				case got = <-first.done:
				case got = <-second.done:
				case <-time.After(soon):
					t.Fatal("lost wakeup: there is room, and the parked receives got nothing")
				}
				if len(got) != 1 {
					t.Fatalf("round %d: %d messages came out, not one", round, len(got))
				}
				seen[got[0].key]++
				held = append(held[1:], got...)
				// The other one waits still, until the next settle.
				if live := number(t, a.Pool, "select count(*) from ferrymq.in_flight where lease_until > clock_timestamp()"); live != 2 {
					t.Fatalf("round %d: %d in flight", round, live)
				}
				settler.mustSettle(settle(settler, held[:1]), held[:1])
				select {
				case got = <-first.done:
				case got = <-second.done:
				case <-time.After(soon):
					t.Fatal("lost wakeup: there is room, and the parked receive got nothing")
				}
				if len(got) != 1 {
					t.Fatalf("round %d: %d messages came out", round, len(got))
				}
				seen[got[0].key]++
				held = append(held[1:], got...)
			}
			if len(seen) != 5 {
				t.Errorf("some lanes were passed over again and again: %v", seen)
			}
		})
	}
}

// TestLaneLimitHints: however many partitions were announced, no more goes out than may be in flight.
func TestLaneLimitHints(t *testing.T) {
	t.Parallel()
	b := together(t, 1, setup{recheck: slow})[0]
	q, g := b.subscribe("orders", "mail", func(p *catalog.Policy) { p.MaxInFlight = 3 })
	if len(b.receive(q, g, 10, 0)) != 0 { // from now on hints are kept
		t.Fatal("something out of nothing")
	}
	for _, key := range names(20) {
		b.push("orders", key, items(2, key)...)
	}
	// The first look of a while is at the index, the next one follows hints.
	if got := append(b.receive(q, g, 1, 0), b.receive(q, g, 10, 0)...); len(got) != 3 {
		t.Errorf("%d in flight", len(got))
	}
	if got := b.receive(q, g, 10, 0); len(got) != 0 {
		t.Errorf("%d more", len(got))
	}
	// A limit that comes into force counts what is out already, one that is lowered below it lets nothing out.
	for _, most := range []int32{0, 5, 1} {
		b.subscribe("orders", "mail", func(p *catalog.Policy) { p.MaxInFlight = most })
		_, g = b.subscribe("orders", "mail", nil)
		want := map[int32]int{0: 1, 5: 1, 1: 0}[most]
		if got := b.receive(q, g, 1, 0); len(got) != want {
			t.Errorf("limit %d: %d more", most, len(got))
		}
	}
	if got := b.receive(q, g, 100, 0); len(got) != 0 {
		t.Errorf("%d more", len(got))
	}
}

// TestLanesPaused: a paused subscription gives out nothing and its parked receives do not busy themselves; when it goes on they get
// what there is at once, on all brokers. A limit that comes into force ends receives that do not know it: they look the subscription up again.
func TestLanesPaused(t *testing.T) {
	t.Parallel()
	var c counter
	bs := together(t, 2, setup{recheck: brisk, change: counted(t, &c)})
	a, b := bs[0], bs[1]
	pause := func(yes bool) {
		q, g := a.subscribe("orders", "mail", func(p *catalog.Policy) { p.Paused = yes })
		a.Reconsider(g.QueueID)
		a.bus.QueueChanged(q.ID)
	}
	q, g := a.subscribe("orders", "mail", nil)
	qb, gb := b.subscribe("orders", "mail", nil)
	pause(true)
	for _, key := range names(30) {
		a.push("orders", key, items(1, key)...)
	}
	here, there := a.goReceive(q, g, 1, 20*time.Second), b.goReceive(qb, gb, 1, 20*time.Second)
	eventually(t, "re-checks see nothing to do", func() bool {
		c.take()
		eventually(t, "a few re-checks", func() bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.queries["ReadyGroups"] >= 3
		})
		flushes, _, _ := c.take()
		return flushes == 0
	})
	pause(false)
	for _, w := range []*waiting{here, there} {
		select {
		case got := <-w.done:
			if len(got) != 1 {
				t.Fatalf("%d messages, %v", len(got), w.err)
			}
		case <-time.After(soon):
			t.Fatal("lost wakeup: the subscription goes on")
		}
	}
	rest := a.receive(q, g, 100, 0)
	if len(rest) != 28 {
		t.Fatalf("%d more", len(rest))
	}
	w := b.goReceive(qb, gb, 1, 20*time.Second)
	qa, _ := a.subscribe("orders", "mail", func(p *catalog.Policy) { p.MaxInFlight = 40 })
	a.bus.QueueChanged(qa.ID)
	a.push("orders", "more", item{payload: "1"})
	select {
	case <-w.done:
		if !errors.Is(w.err, catalog.ErrGone) {
			t.Errorf("a receive that does not know of the limit: %v", w.err)
		}
	case <-time.After(soon):
		t.Fatal("a receive waits on terms that are not valid any more")
	}
}

// TestSeekLanes: a seek moves every lane; whoever held a lease has lost it, attempts begin anew, and parked receives on all brokers wake.
func TestSeekLanes(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	a, b := bs[0], bs[1]
	q, g := a.subscribe("orders", "mail", func(p *catalog.Policy) { p.MaxInFlight = 50 })
	qb, gb := b.subscribe("orders", "mail", nil)
	for _, key := range names(3) {
		a.push("orders", key, items(2, key)...)
	}
	got := a.receive(q, g, 10, 0)
	a.mustSettle(a.NackLanes(t.Context(), g, one(got[:1]), "x", "x", time.Hour), got[:1])
	a.mustSettle(a.AckLanes(t.Context(), g, one(got[1:2])), got[1:2])
	more := a.receive(q, g, 10, 0)
	w := b.goReceive(qb, gb, 10, 20*time.Second)
	if n, err := a.SeekLanes(t.Context(), g, toStart); n != 3 || err != nil {
		t.Fatal(n, err)
	}
	select {
	case again := <-w.done:
		for _, l := range again {
			if l.attempt != 1 || l.Offset != 0 {
				t.Errorf("%+v", l)
			}
		}
		if len(again) == 0 {
			t.Errorf("nothing, %v", w.err)
		}
	case <-time.After(soon):
		t.Fatal("lost wakeup: the lanes were moved")
	}
	for _, l := range append(got[2:], more...) {
		if err := b.AckLanes(t.Context(), gb, []*groupcommit.Delivered{&l.Delivered}); err != nil || !errors.Is(l.Err, groupcommit.ErrLeaseLost) {
			t.Errorf("ack under a lease that is lost: %v %v", err, l.Err)
		}
	}
	if n, err := b.SeekLanes(t.Context(), gb, toEnd); n != 3 || err != nil {
		t.Fatal(n, err)
	}
	if n := number(t, a.Pool, "select (select count(*) from ferrymq.in_flight) + (select count(*) from ferrymq.cursors where pending or lease_id is not null)"); n != 0 {
		t.Errorf("%d leases after a seek", n)
	}
	if left := a.receive(q, g, 10, 0); len(left) != 0 {
		t.Errorf("%d messages behind the end", len(left))
	}
}

// TestSeekLanesAgainstAck: both at once, on two brokers: whoever is first, everything comes again after a seek to the start.
func TestSeekLanesAgainstAck(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	q, g := bs[0].subscribe("orders", "mail", nil)
	bs[1].subscribe("orders", "mail", nil)
	for _, key := range names(4) {
		bs[0].push("orders", key, items(2, key)...)
	}
	for n := range 20 {
		got := bs[0].receive(q, g, 10, 0)
		if len(got) != 4 {
			t.Fatalf("round %d: %d lanes", n, len(got))
		}
		var both sync.WaitGroup
		both.Go(func() {
			if err := bs[n%2].AckLanes(t.Context(), g, one(got)); err != nil {
				t.Error(err)
			}
		})
		both.Go(func() {
			if moved, err := bs[1].SeekLanes(t.Context(), g, toStart); moved != 4 || err != nil {
				t.Error(moved, err)
			}
		})
		both.Wait()
		for _, l := range got {
			if l.Offset != 0 || l.attempt != 1 || l.Err != nil && !errors.Is(l.Err, groupcommit.ErrLeaseLost) {
				t.Fatalf("round %d: %+v", n, l)
			}
		}
	}
}

// TestDeleteSubscription: its receives end as gone wherever they are, what was delivered is lost, its name is free at once and nothing stays behind.
func TestDeleteSubscription(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	a, b := bs[0], bs[1]
	for n, remove := range []func(g *catalog.Group) error{
		func(g *catalog.Group) error { _, err := a.DeleteSubscription(t.Context(), g); return err },
		func(g *catalog.Group) error {
			id, existed, err := a.Catalog.Delete(t.Context(), "orders")
			if !existed {
				t.Error("no stream")
			}
			a.Reconsider(id)
			a.bus.QueueChanged(id)
			return err
		},
	} {
		q, g := a.subscribe("orders", "mail", func(p *catalog.Policy) { p.MaxInFlight, p.TraceFull = 10, true })
		b.QueueChanged(q.ID)
		qb, gb := b.subscribe("orders", "mail", nil)
		if gb.ID != g.ID {
			t.Fatal("two subscriptions of one name")
		}
		a.push("orders", "k", items(2, "m")...)
		got := a.receive(q, g, 10, 0)
		if len(got) != 1 {
			t.Fatalf("round %d: %d messages", n, len(got))
		}
		here, there := a.goReceive(q, g, 1, 20*time.Second), b.goReceive(qb, gb, 1, 20*time.Second)
		if err := remove(g); err != nil {
			t.Fatal(err)
		}
		for _, w := range []*waiting{here, there} {
			select {
			case <-w.done:
				is(t, "receive of what was deleted", w.err, catalog.ErrGone)
			case <-time.After(soon):
				t.Fatal("a receive waits for what was deleted")
			}
		}
		if err := b.AckLanes(t.Context(), gb, one(got)); err != nil || !errors.Is(got[0].Err, groupcommit.ErrLeaseLost) {
			t.Errorf("ack: %v %v", err, got[0].Err)
		}
		_, again := a.subscribe("orders", "mail", nil)
		if again.ID == g.ID {
			t.Error("the same subscription")
		}
		eventually(t, "nothing is left", func() bool {
			return number(t, a.Pool, `select (select count(*) from ferrymq.cursors where group_id = $1) + (select count(*) from ferrymq.in_flight where group_id = $1)
				+ (select count(*) from ferrymq.lane_events where group_id = $1) + (select count(*) from ferrymq.groups where id = $1)`, g.ID) == 0
		})
	}
}

// TestParkedReceives: receives that wait are counted on their stream.
func TestParkedReceives(t *testing.T) {
	t.Parallel()
	b := start(t, dbtest.New(t), setup{recheck: slow})
	q, g := b.subscribe("parked.s", "sub", nil)
	b.goReceive(q, g, 1, 20*time.Second)
	if all := b.ParkedPops(); len(all) != 1 || all[0].Name != "parked.s" || all[0].Queue != q.ID || all[0].Pops != 1 {
		t.Errorf("%+v", all)
	}
	b.Drain()
}
