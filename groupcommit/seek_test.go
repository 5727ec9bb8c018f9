package groupcommit_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"ferrymq/catalog"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
)

var (
	toEnd   = groupcommit.Target{End: true}
	toStart = groupcommit.Target{At: time.Unix(0, 0)}
)

// seek seeks on a whole queue and says how many cursors moved.
func (b *broker) seek(queue, group string, to groupcommit.Target) int64 {
	b.t.Helper()
	found, moved, err := b.Seek(b.t.Context(), queue, group, to)
	if err != nil || !found {
		b.t.Fatalf("seek: found %v, %v", found, err)
	}
	return moved
}

// stuck counts cursors that have something to deliver and are not to be found, and those that nobody will ever remove.
func stuck(b *broker) int64 {
	b.t.Helper()
	return number(b.t, b.Pool, `select (select count(*) from ferrymq.cursors c join ferrymq.partitions p on p.id = c.partition_id where p.next_offset > c.committed and not c.pending)
		+ (select count(*) from ferrymq.cursors c where not exists (select from ferrymq.groups g where g.id = c.group_id))`)
}

func names(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("p%03d", i)
	}
	return out
}

// TestSeekStaleHolder: who held a lease when another broker sought is refused everywhere, whatever his broker remembers.
func TestSeekStaleHolder(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	for i, to := range []groupcommit.Target{toStart, toEnd} {
		for seeker := range bs {
			for _, acker := range bs {
				q := fmt.Sprint("q", i, seeker, acker.maintainer == bs[0].maintainer)
				bs[0].push(q, "p", items(4, "m")...)
				d := bs[0].need(wide(q, "g", 3, 1, 0), "m-0 m-1 m-2")
				bs[0].ack("g", d, groupcommit.Completed, d.messages[0])
				if n := bs[seeker].seek(q, "g", to); n != 1 {
					t.Fatalf("moved %d cursors", n)
				}
				for _, s := range []groupcommit.Status{groupcommit.Completed, groupcommit.Failed, groupcommit.Retry, groupcommit.DeadLetter} {
					for _, r := range acker.tryAck(t.Context(), "g", d.Lease, d.messages[0].public, says(s, d.messages[1:]...)...) {
						is(t, "ack under the lost lease", r.Err, groupcommit.ErrLease)
					}
				}
				if n, _, err := acker.Extend(t.Context(), d.Lease, 60); n != 0 || err != nil {
					t.Errorf("extended %d, %v", n, err)
				}
				want := "m-0 m-1 m-2 m-3"
				if to.End {
					acker.push(q, "p", item{payload: `"after"`})
					want = "after"
				}
				acker.finish("g", acker.need(wide(q, "g", 10, 1, 0), want))
			}
		}
	}
	if n := stuck(bs[0]); n > 0 {
		t.Errorf("%d stuck cursors", n)
	}
}

// TestSeekAgainstAck: both at once, on two brokers: no matter who is first, everything comes again after a seek to the start.
func TestSeekAgainstAck(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	bs[0].push("q", "p", items(3, "m")...)
	refused := 0
	for n := range rounds(200) {
		d := bs[0].need(wide("q", "g", 10, 1, 0), "m-0 m-1 m-2")
		var both sync.WaitGroup
		both.Go(func() {
			for _, r := range bs[n%2].tryAck(t.Context(), "g", d.Lease, d.messages[0].public, says(groupcommit.Completed, d.messages...)...) {
				if errors.Is(r.Err, groupcommit.ErrLease) {
					refused++
				} else if r.Err != nil {
					t.Errorf("ack: %v", r.Err)
				}
			}
		})
		both.Go(func() { bs[1].seek("q", "g", toStart) })
		both.Wait()
	}
	t.Logf("%d acks were refused", refused)

	// The ack waits for the partition behind the seek.
	d := bs[0].need(wide("q", "g", 10, 1, 0), "m-0 m-1 m-2")
	release := hold(t, bs[0].dsn, "select from ferrymq.partitions for no key update")
	var both sync.WaitGroup
	both.Go(func() { bs[1].seek("q", "g", toStart) })
	dbtest.WaitBlocked(t, bs[0].Pool, 1)
	both.Go(func() {
		for _, r := range bs[0].tryAck(t.Context(), "g", d.Lease, d.messages[0].public, says(groupcommit.Completed, d.messages...)...) {
			is(t, "ack behind a seek", r.Err, groupcommit.ErrLease)
		}
	})
	dbtest.WaitBlocked(t, bs[0].Pool, 2)
	release()
	both.Wait()
	bs[0].need(wide("q", "g", 10, 1, 0), "m-0 m-1 m-2")
}

// TestSeekAgainstPush: a message pushed while a seek to the end goes on is delivered, or the seek came after it.
func TestSeekAgainstPush(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	bs[0].push("q", "p", item{payload: `"first"`})
	bs[0].finish("g", bs[0].need(wide("q", "g", 10, 1, 0), "first"))

	release := hold(t, bs[0].dsn, "select from ferrymq.partitions for no key update")
	var both sync.WaitGroup
	both.Go(func() { bs[1].seek("q", "g", toEnd) })
	dbtest.WaitBlocked(t, bs[0].Pool, 1)
	both.Go(func() { bs[0].push("q", "p", item{payload: `"during"`}) })
	dbtest.WaitBlocked(t, bs[0].Pool, 2)
	w := bs[1].park(wide("q", "g", 10, 1, soon))
	release()
	both.Wait()
	d := w.wait(t)
	if d.payloads() != "during" {
		t.Fatalf("got %q", d.payloads())
	}
	bs[1].finish("g", d)

	// With something to deliver already, when a push has no cursor to mark and takes no lock on it.
	for _, p := range names(10) {
		bs[0].push("q", p, item{payload: `"first"`})
	}
	for n := range rounds(100) {
		var both sync.WaitGroup
		for _, p := range names(10) {
			both.Go(func() {
				bs[0].push("q", p, item{payload: fmt.Sprintf(`"%d"`, n)})
				bs[0].push("q", p, item{payload: fmt.Sprintf(`"%d more"`, n)})
			})
		}
		both.Go(func() { bs[1].seek("q", "g", toEnd) })
		both.Wait()
		if n := stuck(bs[0]); n > 0 {
			t.Fatal("the message sleeps for ever")
		}
		for _, p := range names(10) {
			bs[n%2].push("q", p, item{payload: `"backlog"`})
		}
	}
}

// TestSeekHeldLock: whoever holds a partition or a cursor for long holds up the seek there, not elsewhere, and nobody's pushes.
func TestSeekHeldLock(t *testing.T) {
	t.Parallel()
	b := together(t, 1, setup{recheck: slow})[0]
	for _, p := range names(50) {
		b.push("q", p, item{payload: `"m"`})
	}
	if d := b.pop(wide("q", "g", 100, 50, 0)); len(d.messages) != 50 {
		t.Fatalf("popped %d", len(d.messages))
	}
	free := hold(t, b.dsn, "select from ferrymq.partitions where name = 'p025' for no key update")
	freeCursor := hold(t, b.dsn, "select from ferrymq.cursors where partition_id = (select id from ferrymq.partitions where name = 'p030') for no key update")
	done := make(chan int64)
	go func() { done <- b.seek("q", "g", toEnd) }()
	moved := func() int64 {
		return number(t, b.Pool, "select count(*) from ferrymq.cursors where committed = 1 and lease_id is null")
	}
	eventually(t, "all others have moved", func() bool { return moved() == 48 })
	dbtest.WaitBlocked(t, b.Pool, 1)
	for _, p := range []string{"p000", "p024", "p026", "p030", "p049"} {
		began := time.Now()
		b.push("q", p, item{payload: `"more"`})
		if d := time.Since(began); d > soon/4 {
			t.Errorf("a push to %s took %v", p, d)
		}
	}
	// Longer than a lock is waited for at a time.
	eventually(t, "the seek gave up waiting and began again", func() bool {
		return number(t, b.Pool, "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and xact_start < clock_timestamp() - interval '1.5 s'") > 0
	})
	eventually(t, "another attempt", func() bool {
		return number(t, b.Pool, "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and xact_start > clock_timestamp() - interval '0.5 s'") > 0
	})
	free()
	freeCursor()
	if n := <-done; n != 50 {
		t.Errorf("moved %d cursors", n)
	}
	if n := stuck(b); n > 0 {
		t.Errorf("%d stuck cursors", n)
	}
}

// TestSeekTwice: two seeks at once, in opposite directions: each partition ends where one of them put it.
func TestSeekTwice(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	for _, p := range names(40) {
		bs[0].push("q", p, items(2, p)...)
	}
	bs[0].pop(auto(wide("q", "g", 1000, 100, 0)))
	for range rounds(100) {
		var both sync.WaitGroup
		for i, to := range []groupcommit.Target{toStart, toEnd} {
			both.Go(func() {
				if n := bs[i].seek("q", "g", to); n != 40 {
					t.Errorf("moved %d cursors", n)
				}
			})
		}
		both.Wait()
	}
	if n := number(t, bs[0].Pool, "select count(*) from ferrymq.cursors where (committed = 0 and pending) or (committed = 2 and not pending)"); n != 40 {
		t.Errorf("%d cursors are where a seek left them", n)
	}
	if n := number(t, bs[0].Pool, "select sum(committed - origin) from ferrymq.cursors"); n != 80 {
		t.Errorf("%d messages consumed", n)
	}
}

// TestSeekWakes: a seek back wakes pops that are parked for the group, of every kind, here and on the other broker.
func TestSeekWakes(t *testing.T) {
	t.Parallel()
	for _, partitions := range []int{1, 120} { // one by one, and as a whole
		t.Run(fmt.Sprint(partitions), func(t *testing.T) {
			t.Parallel()
			bs := together(t, 2, setup{recheck: slow})
			for _, p := range names(partitions) {
				bs[0].push("wake.q", p, item{payload: `"` + p + `"`})
			}
			if partitions == 1 {
				bs[0].push("wake.other", "p000", item{payload: `"x"`}) // a watcher's scope spans queues
			}
			for seeker := range bs {
				for n, make := range []func(group string) *groupcommit.Pop{
					func(g string) *groupcommit.Pop { return wide("wake.q", g, 1, 1, soon) },
					func(g string) *groupcommit.Pop { return route("wake.q", "p000", g, 1, soon) },
					func(g string) *groupcommit.Pop { return discovery("wake", g, 1, soon) },
				} {
					group := fmt.Sprint("g", n)
					for d := bs[0].pop(auto(wide("wake.q", group, 1000, 1000, 0))); d != nil; d = bs[0].pop(auto(wide("wake.q", group, 1000, 1000, 0))) {
					}
					bs[0].pop(auto(wide("wake.other", group, 1000, 1000, 0)))
					w := bs[0].park(make(group))
					if moved := bs[seeker].seek("wake.q", group, toStart); moved != int64(partitions) {
						t.Errorf("moved %d cursors", moved)
					}
					if d := w.wait(t); d == nil || len(d.messages) != 1 {
						t.Errorf("pop %d of broker 0, sought by %d: %q", n, seeker, d.payloads())
					}
				}
			}
		})
	}
}

// TestSeekForgets: after a seek on another broker a push wakes pops here, though this broker had leased the partition to somebody.
func TestSeekForgets(t *testing.T) {
	t.Parallel()
	for _, partitions := range []int{1, 120} {
		bs := together(t, 2, setup{recheck: slow})
		for _, p := range names(partitions) {
			bs[0].push("q", p, item{payload: `"m"`})
		}
		for seeker := range bs {
			for d := bs[0].pop(wide("q", "g", 1000, 1000, 0)); d != nil; d = bs[0].pop(wide("q", "g", 1000, 1000, 0)) {
			}
			bs[seeker].seek("q", "g", toEnd)
			w := bs[0].park(wide("q", "g", 1, 1, soon))
			if seeker == 1 { // what it tells has to arrive: a hint about something to deliver comes behind it
				bs[1].push("q", "other", item{payload: `"o"`})
				if d := w.wait(t); d.payloads() != "o" {
					t.Fatalf("got %q", d.payloads())
				}
				w = bs[0].park(wide("q", "g", 1, 1, soon))
			}
			bs[1].push("q", "p000", item{payload: `"m"`})
			if d := w.wait(t); d.payloads() != "m" {
				t.Errorf("%d partitions, sought by %d: got %q", partitions, seeker, d.payloads())
			}
		}
	}
}

// removal is how long deletions wait for cursors that are held, of two queues.
const removal = 2 * time.Second

// TestDeleteGroup: what a broker remembers of a deleted group leads it to the new one, or to nothing; pops that waited start over.
func TestDeleteGroup(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	b, other := bs[0], bs[1]
	deaf := start(t, b.dsn, setup{alone: true, recheck: brisk}) // nobody tells it anything
	remove := func(group string, keep bool, want int64) {
		t.Helper()
		n, _, err := other.DeleteGroup(t.Context(), "", group, keep)
		if err != nil || n != want {
			t.Fatalf("delete: %d cursors, %v", n, err)
		}
	}
	b.push("q", "p", items(2, "m")...)

	t.Run("ack, extend and seek", func(t *testing.T) {
		d := b.need(wide("q", "g", 1, 1, 0), "m-0")
		remove("g", false, 1)
		for _, r := range b.tryAck(t.Context(), "g", d.Lease, d.messages[0].public, says(groupcommit.Completed, d.messages...)...) {
			is(t, "ack", r.Err, groupcommit.ErrNoConsumer)
		}
		if n, _, err := b.Extend(t.Context(), d.Lease, 60); n != 0 || err != nil {
			t.Errorf("extended %d, %v", n, err)
		}
		if n := b.seek("q", "g", toStart); n != 0 {
			t.Errorf("sought %d", n)
		}
		other.need(wide("q", "g", 1, 1, 0), "m-0")
		for _, r := range b.tryAck(t.Context(), "g", d.Lease, d.messages[0].public, says(groupcommit.Completed, d.messages...)...) {
			is(t, "ack of the new group's message under the old lease", r.Err, groupcommit.ErrLease)
		}
	})
	t.Run("pops of the other broker", func(t *testing.T) {
		for _, make := range []func() *groupcommit.Pop{
			func() *groupcommit.Pop { return wide("q", "again", 10, 1, 0) },
			func() *groupcommit.Pop { return route("q", "p", "again", 10, 0) },
			func() *groupcommit.Pop { return discovery("q", "again", 10, 0) },
		} {
			for range 2 {
				b.need(make(), "m-0 m-1")
				remove("again", false, 1)
			}
		}
	})
	t.Run("parked", func(t *testing.T) {
		for n, make := range []func(group string) *groupcommit.Pop{
			func(g string) *groupcommit.Pop { return wide("q", g, 10, 1, soon) },
			func(g string) *groupcommit.Pop { return route("q", "p", g, 10, soon) },
			func(g string) *groupcommit.Pop { return discovery("q", g, 10, soon) },
		} {
			for _, on := range bs {
				group := fmt.Sprint("parked", n)
				b.finish(group, b.need(wide("q", group, 10, 1, 0), "m-0 m-1"))
				first := on.park(make(group))
				second := on.park(make(group))
				remove(group, false, 1)
				// Both find the group gone, one of them gets the partition.
				select {
				case <-first.done:
				case <-second.done:
				case <-time.After(soon):
					t.Fatal("lost wakeup")
				}
				first.cancel()
				second.cancel()
				<-first.done
				<-second.done
				remove(group, false, 1)
			}
		}
	})
	t.Run("kept registration", func(t *testing.T) {
		start := catalog.Start{Mode: "new"}
		p := wide("q", "new", 10, 1, 0)
		p.Start = start
		b.need(p, "")
		b.push("q", "p", item{payload: `"n"`})
		for keep := range 4 {
			b.need(wide("q", "new", 10, 1, 0), "n")
			remove("new", keep < 3, 1)
		}
		b.need(wide("q", "new", 10, 1, 0), "m-0 m-1 n")
	})
	t.Run("hint lost", func(t *testing.T) {
		b.finish("deaf", b.need(wide("q", "deaf", 10, 1, 0), "m-0 m-1 n"))
		for _, p := range []*groupcommit.Pop{wide("q", "deaf", 10, 1, soon), route("q", "p", "deaf", 10, soon)} {
			w := deaf.park(p)
			remove("deaf", false, 1)
			d := w.wait(t)
			if d.payloads() != "m-0 m-1 n" {
				t.Errorf("got %q", d.payloads())
			}
			deaf.finish("deaf", d)
		}
	})
	t.Run("while its cursors are still there", func(t *testing.T) {
		b.push("slow", "p", item{payload: `"m"`})
		exec(t, b.Pool, "update ferrymq.queues set min_pop_wait_time = 60000, updated_at = clock_timestamp() where name = 'slow'")
		b.Catalog.ForgetQueue("slow")
		other.finish("held", other.need(wide("slow", "held", 1, 1, 0), "m"))
		w := b.park(wide("slow", "held", 2, 1, soon-removal))
		d := deaf.need(wide("q", "held", 1, 1, 0), "m-0")
		deaf.need(wide("q", "held", 1, 1, 0), "") // it remembers the group, now that that is seeded
		// They can be changed, but not removed.
		release := hold(t, b.dsn, "select from ferrymq.cursors c join ferrymq.groups g on g.id = c.group_id where g.name = 'held' for key share of c")
		remove("held", false, 2)
		if n, _, err := deaf.Extend(t.Context(), d.Lease, 60); n != 0 || err != nil {
			t.Errorf("extended %d, %v", n, err)
		}
		for _, r := range deaf.tryAck(t.Context(), "held", d.Lease, d.messages[0].public, says(groupcommit.Completed, d.messages...)...) {
			is(t, "ack", r.Err, groupcommit.ErrNoConsumer)
		}
		b.need(wide("q", "held", 1, 1, 0), "m-0")
		if d := w.wait(t); d.payloads() != "m" {
			t.Errorf("popped for a batch of two: %q", d.payloads())
		}
		release()
		exec(t, b.Pool, "update ferrymq.jobs set due_at = clock_timestamp() where kind = 'delete_group'")
	})
	eventually(t, "the rows of deleted groups are gone", func() bool {
		return number(t, b.Pool, "select count(*) from ferrymq.groups where deleted_at is not null") == 0
	})
	if n := stuck(b); n > 0 {
		t.Errorf("%d stuck cursors", n)
	}
}

// TestDeleteGroupUnderLoad deletes a group over and over while it is popped, acknowledged, sought and pushed to on two brokers.
func TestDeleteGroupUnderLoad(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{})
	parts := names(10)
	for _, p := range parts {
		bs[0].push("q", p, item{payload: `"0"`})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	var all sync.WaitGroup
	loop := func(do func(n int) error) {
		all.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				if err := do(n); err != nil && ctx.Err() == nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for i, b := range bs {
		for _, wait := range []time.Duration{0, 50 * time.Millisecond} {
			loop(func(int) error {
				d, err := b.tryPop(ctx, wide("q", "g", 5, 5, wait))
				if late(err) { // a short wait may end before a flush of a busy machine has room
					return nil
				}
				if err != nil || d == nil {
					return err
				}
				for _, m := range d.messages {
					for _, r := range bs[rand.IntN(2)].tryAck(context.Background(), "g", d.Lease, m.public, says(groupcommit.Completed, m)...) {
						if r.Err != nil && !errors.Is(r.Err, groupcommit.ErrNoConsumer) && !errors.Is(r.Err, groupcommit.ErrLease) {
							return fmt.Errorf("ack: %w", r.Err)
						}
					}
				}
				return nil
			})
		}
		loop(func(n int) error {
			_, err := b.tryPop(ctx, auto(route("q", parts[n%len(parts)], "g", 1, 0)))
			return err
		})
		loop(func(n int) error {
			_, err := b.tryPush(context.Background(), "q", fmt.Sprintf("new-%d-%d", i, n/3), item{payload: `"n"`})
			return err
		})
		loop(func(int) error {
			_, _, err := b.Seek(ctx, "q", "g", toStart)
			return err
		})
		loop(func(n int) error {
			_, _, err := b.DeleteGroup(context.Background(), "", "g", n%2 == i)
			return err
		})
	}
	all.Wait()
	if _, _, err := bs[0].DeleteGroup(t.Context(), "q", "g", false); err != nil {
		t.Fatal(err)
	}
	eventually(t, "only live groups have cursors", func() bool {
		return number(t, bs[0].Pool, "select count(*) from ferrymq.cursors")+number(t, bs[0].Pool, "select count(*) from ferrymq.groups") == 0
	})
	got := 0
	for d := bs[1].pop(auto(wide("q", "g", 10000, 10000, 0))); d != nil; d = bs[1].pop(auto(wide("q", "g", 10000, 10000, 0))) {
		got += len(d.messages)
	}
	if want := number(t, bs[0].Pool, "select sum(next_offset) from ferrymq.partitions"); int64(got) != want {
		t.Errorf("a first contact got %d of %d messages", got, want)
	}
}

// TestSeekStorm seeks, acknowledges, pops and pushes at random on two brokers. Nothing deadlocks, and after the last seek everything
// comes, in order.
func TestSeekStorm(t *testing.T) {
	t.Parallel()
	var log logged
	bs := together(t, 2, setup{change: func(o *groupcommit.Options) { o.Log = slog.New(slog.NewTextHandler(&log, nil)) }})
	parts := names(50)
	for _, p := range parts {
		bs[0].push("q", p, item{payload: `"0"`})
	}
	var pushed [50]int            // the last number of each partition, by one pusher each
	direct := admin(t, bs[0].dsn) // a pooler would keep the sessions that it asks on
	began := number(t, direct, "select deadlocks from pg_stat_database where datname = current_database()")
	ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
	defer cancel()
	var all sync.WaitGroup
	for n := range 20 {
		b := bs[n%2]
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(n), 1))
			for ctx.Err() == nil {
				switch n % 5 {
				case 0: // pushes to its partitions
					at := (n/5 + 4*r.IntN(13)) % 52
					if at >= 50 {
						continue
					}
					if _, err := b.tryPush(context.Background(), "q", parts[at], item{payload: fmt.Sprintf(`"%d"`, pushed[at]+1)}); err != nil {
						t.Errorf("push: %v", err)
						return
					}
					pushed[at]++
				case 1: // seeks on the queue, or on a partition
					to := toStart
					switch r.IntN(3) {
					case 0:
						to = toEnd
					case 1:
						to = groupcommit.Target{At: time.Now().Add(-500 * time.Millisecond)}
					}
					var err error
					if r.IntN(2) == 0 {
						_, _, err = b.Seek(context.Background(), "q", "g", to)
					} else {
						_, _, err = b.SeekPartition(context.Background(), "q", parts[r.IntN(50)], "g", to)
					}
					if err != nil {
						t.Errorf("seek: %v", err)
						return
					}
				default: // pops and says something
					d, err := b.tryPop(ctx, wide("q", "g", 1+r.Int64N(30), 1+r.Int64N(10), time.Duration(r.IntN(2))*20*time.Millisecond))
					// A short wait may end before a flush of a busy machine has room.
					if err != nil && ctx.Err() == nil && !late(err) {
						t.Errorf("pop: %v", err)
						return
					}
					if d == nil {
						continue
					}
					for _, p := range parts {
						ms := d.of(p)
						if len(ms) == 0 || r.IntN(5) == 0 {
							continue
						}
						for _, res := range bs[r.IntN(2)].tryAck(context.Background(), "g", d.Lease, ms[0].public, says([]groupcommit.Status{groupcommit.Completed, groupcommit.Completed, groupcommit.Retry}[r.IntN(3)], ms...)...) {
							if res.Err != nil && !errors.Is(res.Err, groupcommit.ErrLease) {
								t.Errorf("ack: %v", res.Err)
								return
							}
						}
					}
				}
			}
		})
	}
	all.Wait()
	if n := bs[1].seek("q", "g", toStart); n != 50 {
		t.Errorf("moved %d cursors", n)
	}
	if n := stuck(bs[0]); n > 0 {
		t.Errorf("%d stuck cursors", n)
	}
	got := make(map[string][]string)
	for d := bs[0].pop(auto(wide("q", "g", 10000, 100, 0))); d != nil; d = bs[0].pop(auto(wide("q", "g", 10000, 100, 0))) {
		for _, m := range d.messages {
			got[m.partition] = append(got[m.partition], strings.Trim(m.payload, `"`))
		}
	}
	total := 0
	for i, p := range parts {
		var want []string
		for n := range pushed[i] + 1 {
			want = append(want, fmt.Sprint(n))
		}
		total += len(want)
		if !slices.Equal(got[p], want) {
			t.Errorf("%s: %d messages, want %d: %.200v", p, len(got[p]), len(want), got[p])
		}
	}
	t.Logf("%d messages", total)
	if log.contains("deadlock") || log.contains("level=ERROR") {
		t.Errorf("the log says:\n%s", log.text.String())
	}
	// The server counts a deadlock when the session that lost it reports, at the latest when it ends.
	ended := time.Now()
	for _, b := range bs {
		b.stop()
		b.Pool.Reset()
	}
	eventually(t, "the sessions have ended", func() bool {
		return number(t, direct, "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() and backend_start < $1", ended) == 0
	})
	if n := number(t, direct, "select deadlocks from pg_stat_database where datname = current_database()"); n != began {
		t.Errorf("%d deadlocks", n-began)
	}
}

// logged keeps what a broker logs.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) contains(s string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text.String(), s)
}

// TestReleaseAgainstSeek: what autoAck gave to a client that has gone is not brought back where somebody has sought meanwhile, not even to
// the same place; and of what was taken one after the other everything is brought back, if the last is first.
func TestReleaseAgainstSeek(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	auto := func(q string, batch int64) *delivered {
		p := wide(q, "g", batch, 1, 0)
		p.AutoAck = true
		return bs[0].pop(p)
	}
	at := func(q string) int64 {
		return number(t, bs[0].Pool, "select c.committed from ferrymq.cursors c join ferrymq.partitions p on p.id = c.partition_id join ferrymq.queues q on q.id = p.queue_id where q.name = $1", q)
	}
	bs[0].push("sought", "p", items(3, "m")...)
	d := auto("sought", 3)
	bs[1].seek("sought", "g", toEnd)
	d.Release()
	bs[0].push("sought", "p", item{payload: `"after"`})
	bs[0].finish("g", bs[0].need(wide("sought", "g", 10, 1, soon), "after"))

	bs[0].push("cleared", "p", items(3, "m")...)
	d = auto("cleared", 3)
	bs[1].clear("cleared")
	d.Release()
	bs[0].push("cleared", "p", item{payload: `"after"`})
	bs[0].need(wide("cleared", "g", 10, 1, soon), "after")
	if n := at("cleared"); n != 3 {
		t.Errorf("the cursor was set back to %d", n)
	}

	bs[0].push("chain", "p", items(5, "m")...)
	one, two := auto("chain", 3), auto("chain", 2)
	two.Release() // the other way round the first may fly alone, and is not brought back: the cursor is not where it left it
	one.Release()
	eventually(t, "both are brought back", func() bool { return at("chain") == 0 })
	bs[0].need(wide("chain", "g", 10, 1, soon), "m-0 m-1 m-2 m-3 m-4")
}
