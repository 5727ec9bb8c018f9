package groupcommit_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"ferrymq/catalog"
	"ferrymq/groupcommit"
)

// All tests here run with re-checks a minute apart: a wakeup that is lost shows as a pop that gets nothing soon.

// rounds is how often a loop runs: thousands of times, unless time is short or the race detector makes each one slow.
func rounds(n int) int {
	switch {
	case testing.Short():
		return n / 10
	case racing:
		return n / 4
	}
	return n
}

// TestWakeups pushes message n while another goroutine acknowledges n-1 and a parked pop waits, in a tight loop.
func TestWakeups(t *testing.T) {
	t.Parallel()
	const q = "wake.up"
	for _, c := range []struct {
		name                string
		brokers             int
		pop, push, ack      int // the broker that does it
		make                func() *groupcommit.Pop
		rounds              int
		status              groupcommit.Status // of every other ack
		keyed               bool
		twoBrokersPushInRow bool
	}{
		{name: "wide", brokers: 1, make: func() *groupcommit.Pop { return wide(q, "g", 10, 1, soon) }, rounds: 1500},
		{name: "route", brokers: 1, make: func() *groupcommit.Pop { return route(q, "p", "g", 10, soon) }, rounds: 1500},
		{name: "queue mode", brokers: 1, make: func() *groupcommit.Pop { return wide(q, catalog.QueueMode, 10, 1, soon) }, rounds: 400},
		{name: "route of a group that is not registered", brokers: 1, make: func() *groupcommit.Pop { return route(q, "p", catalog.QueueMode, 10, soon) }, rounds: 400},
		{name: "discovery", brokers: 1, make: func() *groupcommit.Pop { return discovery("wake", "g", 10, soon) }, rounds: 400},
		{name: "auto", brokers: 1, make: func() *groupcommit.Pop { return auto(wide(q, "g", 10, 1, soon)) }, rounds: 400},
		{name: "retried", brokers: 1, make: func() *groupcommit.Pop { return wide(q, "g", 10, 1, soon) }, rounds: 300, status: groupcommit.Retry},
		{name: "failed", brokers: 1, make: func() *groupcommit.Pop { return wide(q, "g", 10, 1, soon) }, rounds: 300, status: groupcommit.Failed},
		{name: "keyed", brokers: 1, make: func() *groupcommit.Pop { return wide(q, "g", 10, 1, soon) }, rounds: 500, keyed: true, status: groupcommit.Retry},
		{name: "pushed elsewhere", brokers: 2, push: 1, make: func() *groupcommit.Pop { return wide(q, "g", 10, 1, soon) }, rounds: 400},
		{name: "pushed elsewhere, route", brokers: 2, push: 1, make: func() *groupcommit.Pop { return route(q, "p", "g", 10, soon) }, rounds: 400},
		{name: "pushed elsewhere, discovery", brokers: 2, push: 1, make: func() *groupcommit.Pop { return discovery("wake", "g", 10, soon) }, rounds: 400},
		{name: "acknowledged elsewhere", brokers: 2, ack: 1, make: func() *groupcommit.Pop { return wide(q, "g", 10, 1, soon) }, rounds: 400},
		{name: "acknowledged elsewhere, route", brokers: 2, ack: 1, make: func() *groupcommit.Pop { return route(q, "p", "g", 10, soon) }, rounds: 400},
		{name: "retried elsewhere", brokers: 2, ack: 1, make: func() *groupcommit.Pop { return wide(q, "g", 10, 1, soon) }, rounds: 300, status: groupcommit.Retry},
		{name: "pushed and acknowledged elsewhere", brokers: 2, ack: 1, push: 1, make: func() *groupcommit.Pop { return wide(q, "g", 10, 1, soon) }, rounds: 400},
		{name: "keyed, pushed by both", brokers: 2, ack: 1, make: func() *groupcommit.Pop { return wide(q, "g", 10, 1, soon) }, rounds: 300, keyed: true, twoBrokersPushInRow: true, status: groupcommit.Retry},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			bs := together(t, c.brokers, setup{recheck: slow})
			popper := bs[c.pop]
			bs[0].push(q, "p", item{payload: `"0"`})
			var acking sync.WaitGroup
			defer acking.Wait()
			next := 1 // the next message to push
			seen := -1
			worst := time.Duration(0)
			for n := 0; n < rounds(c.rounds); n++ {
				began := time.Now()
				d, err := popper.tryPop(t.Context(), c.make())
				if err != nil {
					t.Fatal(err)
				}
				if d == nil {
					t.Fatalf("lost wakeup in round %d: messages up to %d were pushed, the last delivered was %d", n, next-1, seen)
				}
				worst = max(worst, time.Since(began))
				acking.Wait()
				for _, m := range d.messages {
					seen = int(m.offset)
				}
				// What is delivered is acknowledged while the next is pushed and the next pop sets out.
				// A pop may find everything leased and park: the ack wakes it when it leaves something.
				status := groupcommit.Completed
				if n%2 == 1 {
					status = c.status
				}
				acking.Go(func() {
					if d.Delivery == nil || c.make().AutoAck {
						return
					}
					for i, r := range bs[c.ack].tryAck(t.Context(), c.make().Group, d.Lease, d.messages[0].public, says(status, d.messages...)...) {
						if r.Err != nil {
							t.Errorf("ack %d: %v", i, r.Err)
						}
					}
				})
				pusher := bs[c.push]
				if c.twoBrokersPushInRow {
					pusher = bs[n%2]
				}
				m := item{payload: fmt.Sprintf(`"%d"`, next)}
				if c.keyed {
					m.id = fmt.Sprint("id-", next)
				}
				next++
				acking.Go(func() {
					if _, err := pusher.tryPush(t.Context(), q, "p", m); err != nil {
						t.Errorf("push: %v", err)
					}
				})
			}
			t.Logf("longest wait %v", worst)
		})
	}
}

// TestWakeRest: what one of several parked pops leaves is taken by the others at once.
func TestWakeRest(t *testing.T) {
	t.Parallel()
	const q = "rest.q"
	t.Run("partial ack, then the rest", func(t *testing.T) {
		t.Parallel()
		for _, second := range []int{0, 1} {
			bs := together(t, 2, setup{recheck: slow})
			b, acker := bs[0], bs[second]
			b.push(q, "p", items(3, "m")...)
			d := b.need(wide(q, "g", 3, 1, 0), "m-0 m-1 m-2")
			w := b.park(wide(q, "g", 10, 1, soon))
			acker.ack("g", d, groupcommit.Completed, d.messages[0])
			b.push(q, "p", item{payload: `"more"`})
			acker.ack("g", d, groupcommit.Completed, d.messages[1:]...)
			if got := w.wait(t); got.payloads() != "more" {
				t.Errorf("got %q", got.payloads())
			}
		}
	})
	t.Run("partial ack, then retry", func(t *testing.T) {
		t.Parallel()
		b := together(t, 1, setup{recheck: slow})[0]
		b.push(q, "p", items(3, "m")...)
		d := b.need(wide(q, "g", 3, 1, 0), "m-0 m-1 m-2")
		w := b.park(wide(q, "g", 10, 1, soon))
		b.ack("g", d, groupcommit.Completed, d.messages[0])
		b.ack("g", d, groupcommit.Retry, d.messages[1])
		if got := w.wait(t); got.payloads() != "m-1 m-2" {
			t.Errorf("got %q", got.payloads())
		}
	})
	t.Run("one push, three autoAck pops of one message", func(t *testing.T) {
		t.Parallel()
		b := together(t, 1, setup{recheck: slow})[0]
		b.push(q, "p", item{payload: `"first"`})
		b.need(auto(wide(q, "g", 1, 1, 0)), "first")
		var all []*parkedPop
		for range 3 {
			all = append(all, b.park(auto(wide(q, "g", 1, 1, soon))))
		}
		b.push(q, "p", items(3, "m")...)
		for _, w := range all {
			if w.wait(t) == nil {
				t.Fatal("lost wakeup: nothing")
			}
		}
	})
	t.Run("the rest of a full batch in another partition", func(t *testing.T) {
		t.Parallel()
		b := together(t, 1, setup{recheck: slow})[0]
		for _, p := range []string{"a", "b", "c"} {
			b.push(q, p, item{payload: `"old"`})
		}
		b.finish("g", b.pop(wide(q, "g", 10, 10, 0)))
		w1, w2 := b.park(wide(q, "g", 1, 3, soon)), b.park(wide(q, "g", 1, 3, soon))
		push := func(p string) *groupcommit.Push {
			x, err := b.newPush(t.Context(), q, p, items(1, p))
			if err != nil {
				t.Fatal(err)
			}
			return x
		}
		if err := b.Push(t.Context(), []*groupcommit.Push{push("a"), push("b")}); err != nil {
			t.Fatal(err)
		}
		if w1.wait(t) == nil || w2.wait(t) == nil {
			t.Error("lost wakeup: nothing")
		}
	})
	t.Run("lease given back by a cancelled pop", func(t *testing.T) {
		t.Parallel()
		for _, automatic := range []bool{false, true} {
			b := together(t, 1, setup{recheck: slow})[0]
			b.push(q, "p", item{payload: `"0"`})
			b.finish("g", b.need(wide(q, "g", 10, 1, 0), "0"))
			for n := range rounds(150) {
				ctx, cancel := context.WithCancel(t.Context())
				p := wide(q, "g", 10, 1, soon)
				p.AutoAck = automatic
				first := make(chan *delivered, 1)
				go func() {
					d, _ := b.tryPop(ctx, p)
					first <- d
				}()
				go b.tryPush(context.Background(), q, "p", item{payload: fmt.Sprintf(`"%d"`, n+1)})
				go cancel()
				d := <-first
				if d == nil {
					if d = b.pop(p); d == nil {
						t.Fatalf("autoAck %v: lost wakeup in round %d", automatic, n)
					}
				}
				if !automatic {
					for _, r := range b.tryAck(t.Context(), "g", [16]byte{}, d.messages[0].public, says(groupcommit.Completed, d.messages...)...) {
						if r.Err != nil {
							t.Fatal(r.Err)
						}
					}
				}
			}
		}
	})
	t.Run("new partitions", func(t *testing.T) {
		t.Parallel()
		bs := together(t, 2, setup{recheck: slow})
		for n := range rounds(150) {
			p := fmt.Sprint("p", n)
			for i, pop := range []*groupcommit.Pop{wide(q, "g", 10, 1, soon), route(q, p, catalog.QueueMode, 10, soon), discovery("rest", "h", 10, soon)} {
				w := bs[0].goPop(pop)
				if i == 0 {
					go bs[n%2].tryPush(context.Background(), q, p, item{payload: `"x"`})
				}
				d := w.wait(t)
				if d == nil {
					t.Fatalf("lost wakeup: partition %s, pop %d", p, i)
				}
				bs[0].finish(pop.Group, d)
			}
		}
	})
	t.Run("pops wait for different missing partitions", func(t *testing.T) {
		t.Parallel()
		b := together(t, 1, setup{recheck: slow})[0]
		b.push(q, "other", item{payload: `"x"`})
		wa := b.park(route(q, "a", catalog.QueueMode, 1, soon))
		wb := b.park(route(q, "b", catalog.QueueMode, 1, soon))
		b.push(q, "b", item{payload: `"b"`})
		if d := wb.wait(t); d.payloads() != "b" {
			t.Errorf("got %q", d.payloads())
		}
		b.push(q, "a", item{payload: `"a"`})
		if d := wa.wait(t); d.payloads() != "a" {
			t.Errorf("got %q", d.payloads())
		}
	})
	t.Run("backoff ends", func(t *testing.T) {
		t.Parallel()
		bs := together(t, 2, setup{recheck: slow})
		b := bs[0]
		if _, err := b.Catalog.Configure(t.Context(), q, func(x *catalog.Queue) error { x.RetryDelay = 300; return nil }); err != nil {
			t.Fatal(err)
		}
		bs[1].QueueChanged(0)
		b.push(q, "p", item{payload: `"m"`})
		for n, acker := range []*broker{bs[0], bs[1], bs[0]} {
			d := b.need(wide(q, "g", 1, 1, soon), "m")
			acker.ack("g", d, groupcommit.Failed, d.messages...)
			if d := b.pop(wide(q, "g", 1, 1, 0)); d != nil {
				t.Fatalf("attempt %d: delivered within the backoff", n)
			}
		}
		b.need(wide(q, "g", 1, 1, soon), "m")
	})
}

// TestWakeEach: 200 pops are parked, pushes to different partitions wake as many of them.
func TestWakeEach(t *testing.T) {
	t.Parallel()
	const q, n = "each.q", 200
	for _, brokers := range []int{1, 2} {
		bs := together(t, brokers, setup{recheck: slow})
		popper, pusher := bs[0], bs[brokers-1]
		var all []*parkedPop
		for range n {
			all = append(all, popper.goPop(wide(q, "g", 5, 1, 2*soon)))
		}
		eventually(t, "all are parked", func() bool { return popper.Parked() == n })
		for round := range 2 { // first new partitions, then known ones
			for i := range n {
				i := i
				go pusher.tryPush(context.Background(), q, fmt.Sprint("p", i), item{payload: `"x"`})
			}
			seen := make(map[string]bool)
			for _, w := range all {
				d := w.wait(t)
				if d == nil {
					t.Fatalf("%d brokers, round %d: lost wakeup after %d", brokers, round, len(seen))
				}
				seen[d.messages[0].partition] = true
				popper.finish("g", d)
			}
			if len(seen) != n {
				t.Errorf("%d partitions delivered", len(seen))
			}
			if round == 0 {
				all = all[:0]
				for range n {
					all = append(all, popper.goPop(wide(q, "g", 5, 1, 2*soon)))
				}
				eventually(t, "all are parked", func() bool { return popper.Parked() == n })
			}
		}
	}
}

// TestWakeFirstContact: a new group's first pop races with pushes; whatever was pushed is found.
func TestWakeFirstContact(t *testing.T) {
	t.Parallel()
	const q = "first.q"
	bs := together(t, 2, setup{recheck: slow})
	for n := range rounds(150) {
		g := fmt.Sprint("g", n)
		for p := range 2 {
			go bs[(n+p)%2].tryPush(context.Background(), q, fmt.Sprint("p", n%50, p), item{payload: `"x"`})
		}
		p := wide(q, g, 1000, 1000, soon)
		d := bs[n%2].pop(p)
		if d == nil {
			t.Fatalf("lost wakeup in round %d", n)
		}
	}
}
