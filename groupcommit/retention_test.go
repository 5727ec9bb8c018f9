package groupcommit_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
	"ferrymq/segment"
)

const often = 50 * time.Millisecond

// days makes all partitions older by so many.
func (b *broker) days(n int) {
	exec(b.t, b.Pool, `update ferrymq.partitions set created_at = created_at - $1 * interval '1 day', last_push_at = last_push_at - $1 * interval '1 day',
		empty_since = empty_since - $1 * interval '1 day'`, n)
	exec(b.t, b.Pool, "update ferrymq.segments set created_at = created_at - $1 * interval '1 day'", n)
	exec(b.t, b.Pool, "update ferrymq.retired_keys set created_at = created_at - $1 * interval '1 day', expires_at = expires_at - $1 * interval '1 day'", n)
}

func (b *broker) clear(queue string, partition ...string) (partitions, messages int64) {
	b.t.Helper()
	q, err := b.Catalog.EnsureQueue(b.t.Context(), queue)
	if err != nil {
		b.t.Fatal(err)
	}
	var p *string
	if len(partition) > 0 {
		p = &partition[0]
	}
	partitions, messages, err = b.Clear(b.t.Context(), q, p)
	if err != nil {
		b.t.Fatal(err)
	}
	return partitions, messages
}

func (b *broker) partitions() int64 {
	return number(b.t, b.Pool, "select count(*) from ferrymq.partitions")
}

// TestCleanup: which partitions go, and that their cursors go with them.
func TestCleanup(t *testing.T) {
	t.Parallel()
	b := start(t, dbtest.New(t), setup{sweep: often})
	const q = "clean.q"
	for _, p := range []string{"idle", "filled", "letters", "leased", "ids", "young", "pushed", "never"} {
		if p == "never" { // made by a pop, nothing was ever pushed
			b.need(route(q, p, "g", 1, 0), "")
			continue
		}
		id := ""
		if p == "ids" {
			id = "kept"
		}
		b.push(q, p, item{payload: `"` + p + `"`, id: id})
		if p == "letters" {
			b.need(wide(q, "h", 100, 100, 0), "idle filled letters")
			exec(t, b.Pool, `insert into ferrymq.dead_letters (id, queue_id, group_id, partition_id, message_offset, message_id, transaction_id, key_no, codec, frames, error_message, retry_count, message_created_at)
				select gen_random_uuid(), queue_id, 1, id, 0, gen_random_uuid(), 't', 0, 0, 'f', 'e', 1, now() from ferrymq.partitions where name = 'letters'`)
		}
	}
	exec(t, b.Pool, "update ferrymq.queues set dedup_window_seconds = 1000000")
	for _, p := range []string{"idle", "letters", "ids", "young", "pushed"} {
		b.clear(q, p)
	}
	b.push(q, "leased", item{payload: `"leased2"`})
	lease := b.need(route(q, "leased", "g", 2, 0), "leased leased2")
	eventually(t, "the rows are removed", func() bool {
		return number(t, b.Pool, "select count(*) from ferrymq.partitions where swept_offset < first_offset") == 0
	})
	// At once, or a sweep would see half of it: two days pass, and retention removes what is leased.
	exec(t, b.Pool, `update ferrymq.partitions set created_at = created_at - interval '2 day',
		last_push_at = last_push_at - case when name = 'pushed' then interval '0' else interval '2 day' end,
		first_offset = case when name = 'leased' then next_offset else first_offset end,
		empty_since = case when name = 'young' then clock_timestamp() when name = 'leased' or empty_since is not null then clock_timestamp() - interval '2 day' end`)
	left := func(want string) {
		t.Helper()
		eventually(t, "left are "+want, func() bool {
			var got string
			if err := b.Pool.QueryRow(t.Context(), "select string_agg(name, ' ' order by name) from ferrymq.partitions").Scan(&got); err != nil {
				t.Fatal(err)
			}
			return got == want
		})
	}
	left("filled ids leased letters pushed young")
	if n := number(t, b.Pool, "select count(*) from ferrymq.cursors c where not exists (select from ferrymq.partitions p where p.id = c.partition_id)"); n != 0 {
		t.Errorf("%d cursors are left of partitions that are gone", n)
	}
	// The lease can still be acked; then there is nothing that holds it.
	b.finish("g", lease)
	exec(t, b.Pool, "delete from ferrymq.dead_letters")
	exec(t, b.Pool, "update ferrymq.retired_keys set expires_at = clock_timestamp(), created_at = created_at - interval '20 day'")
	eventually(t, "the ids are forgotten", func() bool { return number(t, b.Pool, "select count(*) from ferrymq.retired_keys") == 0 })
	b.days(1)
	left("filled")
	exec(t, b.Pool, "update ferrymq.partitions set empty_since = clock_timestamp() - interval '9 day'") // as if it had been empty once
	eventually(t, "it is not taken for empty any more", func() bool {
		return number(t, b.Pool, "select count(*) from ferrymq.partitions where empty_since is null") == 1
	})
	b.days(100)
	b.need(wide(q, "late", 100, 100, 0), "filled")
	if b.partitions() != 1 {
		t.Error("a partition with messages is gone")
	}
}

// TestCleanupRemembered: brokers that remember a partition which is gone find the new one of that name: pushes, pops and acks.
func TestCleanupRemembered(t *testing.T) {
	t.Parallel()
	for _, alone := range []bool{true, false} {
		t.Run(fmt.Sprint("alone ", alone), func(t *testing.T) {
			t.Parallel()
			dsn := dbtest.New(t)
			b := start(t, dsn, setup{alone: true, recheck: slow, change: func(o *groupcommit.Options) { o.Alone = func() bool { return alone } }})
			const q = "again.q"
			before := map[string]string{}
			for _, p := range []string{"a", "b", "c"} {
				b.push(q, p, item{id: "x-" + p, payload: `"old"`})
				auto := auto(route(q, p, "g", 10, 0))
				before[p] = b.need(auto, "old").messages[0].public.String()
			}
			gone := func() {
				b.clear(q)
				b.days(2)
				other := start(t, dsn, setup{sweep: often})
				eventually(t, "they are removed", func() bool { return b.partitions() == 0 })
				other.stop()
			}
			gone()
			// Pushed to one alone, and to several in one flush; the ids are new.
			b.push(q, "a", item{id: "x-a", payload: `"a1"`})
			var all []*groupcommit.Push
			for _, p := range []string{"a", "b", "c"} {
				x, err := b.newPush(t.Context(), q, p, []item{{id: "y-" + p, payload: `"` + p + `2"`}})
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, x)
			}
			if err := b.Push(t.Context(), all); err != nil {
				t.Fatal(err)
			}
			for _, x := range all {
				if x.Err != nil || x.Results[0].Duplicate {
					t.Errorf("%+v %v", x.Results, x.Err)
				}
			}
			for p, want := range map[string]string{"a": "a1 a2", "b": "b2", "c": "c2"} {
				d := b.need(route(q, p, "g", 10, 0), want)
				if d.messages[0].offset != 0 || d.messages[0].public.String() == before[p] {
					t.Errorf("%s: offset %d, id %v after %v", p, d.messages[0].offset, d.messages[0].public, before[p])
				}
				b.finish("g", d)
				if n := number(t, b.Pool, "select count(*) from ferrymq.cursors c join ferrymq.partitions p on p.id = c.partition_id where p.name = $1 and c.pending", p); n != 0 {
					t.Errorf("%s: %d cursors are pending after its last ack", p, n)
				}
			}
			// An ack of what was delivered of the old ones.
			if r := b.tryAck(t.Context(), "g", uuid.Nil, uuid.MustParse(before["a"]), groupcommit.Ack{TransactionID: text("x-a")}); !errors.Is(r[0].Err, groupcommit.ErrNoConsumer) {
				t.Errorf("%+v", r)
			}
			gone()
			// Made again by another broker: who pops without waiting sees it.
			other := start(t, dsn, setup{alone: true})
			other.push(q, "a", item{payload: `"a3"`})
			b.need(route(q, "a", "g", 10, 0), "a3")
			// Popped before there is a new one: it is made for a named group.
			b.need(route(q, "b", "g", 10, 0), "")
			other.push(q, "b", item{payload: `"b3"`})
			b.need(route(q, "b", "g", 10, 0), "b3")
			queueMode := route(q, "c", catalog.QueueMode, 10, 0)
			b.need(queueMode, "")
			other.push(q, "c", item{payload: `"c3"`})
			b.need(queueMode, "c3")
		})
	}
}

// TestCleanupWhileParked: pops that wait on a partition which goes get what is pushed to the next one of that name.
func TestCleanupWhileParked(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	sweeps, other := start(t, dsn, setup{sweep: often, recheck: slow}), start(t, dsn, setup{recheck: brisk})
	const q = "parked.q"
	sweeps.push(q, "p", item{payload: `"old"`})
	for _, g := range []string{"a", "b", catalog.QueueMode} {
		sweeps.need(auto(route(q, "p", g, 10, 0)), "old")
	}
	sweeps.clear(q)
	waiting := []*parkedPop{sweeps.park(route(q, "p", "a", 10, 20*time.Second)), other.park(route(q, "p", "b", 10, 20*time.Second)),
		sweeps.park(route(q, "p", catalog.QueueMode, 10, 20*time.Second))}
	old := number(t, sweeps.Pool, "select id from ferrymq.partitions")
	sweeps.days(2)
	// The named ones make it anew while they wait.
	eventually(t, "it is another one", func() bool {
		return number(t, sweeps.Pool, "select count(*) from ferrymq.partitions where id > $1", old) == 1 && sweeps.Parked() >= 2
	})
	sweeps.push(q, "p", item{payload: `"new"`})
	for i, w := range waiting {
		if d := w.wait(t); d.payloads() != "new" || d.messages[0].offset != 0 {
			t.Errorf("pop %d: %q", i, d.payloads())
		}
	}
}

// TestCleanupAgainstPush: a push that waits for the lock of a partition which is being removed stores into a new one.
func TestCleanupAgainstPush(t *testing.T) {
	t.Parallel()
	for _, pushes := range []int{1, 2} {
		t.Run(fmt.Sprint(pushes), func(t *testing.T) {
			t.Parallel()
			b := start(t, dbtest.New(t), setup{alone: true})
			const q = "race.q"
			for n := range pushes {
				b.push(q, fmt.Sprint("p", n), item{payload: "0"})
			}
			tx, err := b.Pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback(context.Background())
			for _, s := range []string{"select from ferrymq.partitions for update", "delete from ferrymq.cursors", "delete from ferrymq.segments", "delete from ferrymq.partitions"} {
				if _, err := tx.Exec(t.Context(), s); err != nil {
					t.Fatal(err)
				}
			}
			var work sync.WaitGroup
			for n := range pushes {
				work.Go(func() {
					if _, err := b.tryPush(context.Background(), q, fmt.Sprint("p", n), item{payload: fmt.Sprint(n + 1)}); err != nil {
						t.Error(err)
					}
				})
			}
			dbtest.WaitBlocked(t, b.Pool, 1)
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			work.Wait()
			for n := range pushes {
				b.need(route(q, fmt.Sprint("p", n), "g", 10, 0), fmt.Sprint(n+1))
			}
		})
	}
}

// TestRemovedAfterClaim: segments that go between the claim and the reading of their frames are left out, and the pop looks
// on when nothing else was claimed.
func TestRemovedAfterClaim(t *testing.T) {
	t.Parallel()
	b := start(t, dbtest.New(t), setup{alone: true})
	const q = "gone.q"
	for _, p := range []string{"a", "b"} {
		b.push(q, p, item{payload: `"` + p + `1"`}, item{payload: `"` + p + `2"`})
		b.push(q, p, item{payload: `"` + p + `3"`})
	}
	remove := func(where string) {
		exec(t, b.Pool, "delete from ferrymq.segments where "+where)
		exec(t, b.Pool, `update ferrymq.partitions p set first_offset = coalesce((select min(s.base_offset) from ferrymq.segments s where s.partition_id = p.id), p.next_offset)`)
	}
	a := number(t, b.Pool, "select min(id) from ferrymq.partitions")
	all := wide(q, "leases", 100, 100, 0)
	moves := auto(wide(q, "moves", 100, 100, 0))
	leased, moved := b.need(all, "a1 a2 a3 b1 b2 b3"), b.need(moves, "a1 a2 a3 b1 b2 b3")
	// Of a nothing is left, of b the last message.
	remove(fmt.Sprintf("partition_id = %d or base_offset = 0", a))
	for what, d := range map[string]*delivered{"leases": leased, "moves": moved} {
		left, err := b.Refill(t.Context(), d.Delivery)
		if err != nil || len(left.Spans) != 1 || len(left.Spans[0].Segments) != 1 || left.Spans[0].Segments[0].Base != 2 {
			t.Fatalf("%s: %+v %v", what, left, err)
		}
	}
	if n := number(t, b.Pool, "select count(*) from ferrymq.cursors where lease_id is not null and partition_id = $1", a); n != 0 {
		t.Error("the lease of what was removed is kept")
	}
	b.ack("leases", leased, groupcommit.Completed, leased.of("b")[2])
	b.need(all, "")
	b.need(moves, "")
	// Of everything nothing is left.
	b.push(q, "a", item{payload: `"a4"`})
	leased, moved = b.need(all, "a4"), b.need(moves, "a4")
	remove("base_offset = 3")
	for what, d := range map[string]*delivered{"leases": leased, "moves": moved} {
		if left, err := b.Refill(t.Context(), d.Delivery); !errors.Is(err, catalog.ErrGone) || left != nil {
			t.Errorf("%s: %+v %v", what, left, err)
		}
	}
	b.push(q, "a", item{payload: `"a5"`})
	b.need(all, "a5")
	b.need(moves, "a5")
}

// TestClearUnderLoad: a queue is cleared again and again beside pushes, pops and acks on two brokers: no deadlock, what is popped is in
// order and was not cleared before, and the numbers add up.
func TestClearUnderLoad(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{sweep: often})
	const q = "clear.q"
	stop := make(chan struct{})
	var work sync.WaitGroup
	var pushed, cleared, refused atomic.Int64
	running := func() bool {
		select {
		case <-stop:
			return false
		default:
			return true
		}
	}
	var mu sync.Mutex
	floor := make(map[string]int64) // offsets below are cleared, for pops that begin now
	for n := range 4 {
		work.Go(func() {
			for i := 0; running(); i++ {
				if _, err := bs[i%2].tryPush(context.Background(), q, fmt.Sprint("p", (n+i)%8), item{payload: "1"}, item{id: fmt.Sprint(n, "-", i), payload: "2"}); err != nil {
					t.Error(err)
					return
				}
				pushed.Add(2)
			}
		})
		work.Go(func() {
			last := make(map[string]int64)
			for i := 0; running(); i++ {
				mu.Lock()
				least := make(map[string]int64, len(floor))
				for p, o := range floor {
					least[p] = o
				}
				mu.Unlock()
				p := wide(q, fmt.Sprint("g", n), 10, 4, 0)
				p.AutoAck = i%4 == 0
				d, err := bs[i%2].tryPop(context.Background(), p)
				if err != nil {
					t.Error(err)
					return
				}
				if d == nil {
					continue
				}
				by := make(map[uuid.UUID][]message)
				for _, m := range d.messages {
					if m.offset < least[m.partition] || m.offset < last[m.partition] {
						t.Errorf("%s: %d was delivered, cleared up to %d, last %d", m.partition, m.offset, least[m.partition], last[m.partition])
					}
					last[m.partition] = m.offset
					by[m.public] = append(by[m.public], m)
				}
				if p.AutoAck {
					continue
				}
				for public, ms := range by {
					for _, r := range bs[(i+n)%2].tryAck(context.Background(), p.Group, d.Lease, public, says(groupcommit.Completed, ms...)...) {
						if errors.Is(r.Err, groupcommit.ErrLease) {
							refused.Add(1)
						} else if r.Err != nil {
							t.Error(r.Err)
						}
					}
				}
			}
		})
	}
	for i := range 12 {
		time.Sleep(250 * time.Millisecond)
		_, n := bs[i%2].clear(q)
		cleared.Add(n)
		rows, err := bs[0].Pool.Query(t.Context(), "select name, first_offset from ferrymq.partitions")
		if err != nil {
			t.Fatal(err)
		}
		mu.Lock()
		for rows.Next() {
			var p string
			var o int64
			if err := rows.Scan(&p, &o); err != nil {
				t.Error(err)
			}
			floor[p] = o
		}
		mu.Unlock()
	}
	close(stop)
	work.Wait()
	_, n := bs[0].clear(q)
	if cleared.Add(n) != pushed.Load() {
		t.Errorf("%d cleared of %d", cleared.Load(), pushed.Load())
	}
	if n := number(t, bs[0].Pool, "select count(*) from ferrymq.cursors where pending or lease_id is not null"); n != 0 {
		t.Errorf("%d cursors are pending or leased", n)
	}
	eventually(t, "the rows go", func() bool { return number(t, bs[0].Pool, "select count(*) from ferrymq.segments") == 0 })
	t.Logf("%d pushed, %d acks refused", pushed.Load(), refused.Load())
}

// TestClearWakes: a hint held back for a lease that a clear on another broker ended does not sleep until that lease would have.
func TestClearWakes(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	const q = "wakes.q"
	bs[0].push(q, "p", item{payload: `"old"`})
	bs[0].need(wide(q, "g", 10, 1, 0), "old")
	w := bs[0].park(wide(q, "g", 10, 1, 20*time.Second))
	bs[1].clear(q)
	bs[1].push(q, "p", item{payload: `"new"`})
	if d := w.wait(t); d.payloads() != "new" {
		t.Errorf("%q", d.payloads())
	}
}

// TestClearBlocked: what somebody holds is cleared last, and until then holds up nothing but the clear.
func TestClearBlocked(t *testing.T) {
	t.Parallel()
	for _, held := range []string{"select from ferrymq.partitions where name = 'b' for update",
		"select from ferrymq.cursors c join ferrymq.partitions p on p.id = c.partition_id where p.name = 'b' for update of c"} {
		t.Run(held, func(t *testing.T) {
			t.Parallel()
			b := start(t, dbtest.New(t), setup{})
			for _, p := range []string{"a", "b", "c"} {
				b.push("q", p, items(2, p)...)
			}
			b.need(wide("q", "g", 1, 1, 0), "a-0")
			release := hold(t, b.dsn, held)
			q, err := b.Catalog.EnsureQueue(t.Context(), "q")
			if err != nil {
				t.Fatal(err)
			}
			var partitions, messages int64
			cleared := background(t, func() (err error) {
				partitions, messages, err = b.Clear(context.Background(), q, nil)
				return err
			})
			dbtest.WaitBlocked(t, admin(t, b.dsn), 1)
			if n := number(t, b.Pool, "select count(*) from ferrymq.partitions where first_offset = next_offset"); n != 2 {
				t.Errorf("%d partitions are clear while one is held", n)
			}
			for _, p := range []string{"a", "c"} {
				if err := b.goPush(t, "q", p, item{payload: `"after"`}).wait(t, "a push beside the held partition", soon); err != nil {
					t.Error(err)
				}
			}
			release()
			if err := cleared.wait(t, "the clear", soon); err != nil || partitions != 3 || messages != 6 {
				t.Errorf("cleared %d partitions of %d messages: %v", partitions, messages, err)
			}
		})
	}
}

// TestStreamMadeAgain: a stream that is deleted while something is published to it is made again as a stream.
func TestStreamMadeAgain(t *testing.T) {
	t.Parallel()
	for _, stream := range []bool{true, false} {
		b := start(t, dbtest.New(t), setup{})
		ctx := t.Context()
		q, err := b.Catalog.EnsureStream(ctx, "orders")
		if err != nil {
			t.Fatal(err)
		}
		found, err := b.Catalog.Partitions(ctx, q, []string{"k"})
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := b.Catalog.Delete(ctx, "orders"); err != nil {
			t.Fatal(err)
		}
		p := &groupcommit.Push{Queue: q, Partition: found[0], Stream: stream, Messages: []segment.Message{{Payload: []byte("1")}}}
		if err := b.Push(ctx, []*groupcommit.Push{p}); err != nil || p.Err != nil {
			t.Fatal(err, p.Err)
		}
		keep := int64(0)
		if stream {
			keep = 604800
		}
		if n := number(t, b.Pool, "select completed_retention_seconds from ferrymq.queues where deleted_at is null"); n != keep {
			t.Errorf("consumed messages are kept for %d s, want %d", n, keep)
		}
	}
}
