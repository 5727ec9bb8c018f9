package groupcommit_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/groupcommit"
)

// kill fails the next message of a subscription whose first attempt is its last, and returns its dead letter.
func (b *broker) kill(q *catalog.Queue, g *catalog.Group, payload string) (id uuid.UUID) {
	b.t.Helper()
	got := b.receive(q, g, 1, soon)
	if len(got) != 1 || got[0].payload != payload {
		b.t.Fatalf("received %v, want %s", got, payload)
	}
	if err := b.NackLanes(b.t.Context(), g, one(got), "boom", "boom", -1); err != nil || got[0].Err != nil {
		b.t.Fatal(err, got[0].Err)
	}
	if err := b.Pool.QueryRow(b.t.Context(), "select id from ferrymq.dead_letters where group_id = $1 order by failed_at desc limit 1", g.ID).Scan(&id); err != nil {
		b.t.Fatal(err)
	}
	return id
}

// drain acks what a subscription gets until nothing comes any more.
func (b *broker) drain(q *catalog.Queue, g *catalog.Group) (payloads []string) {
	b.t.Helper()
	for {
		got := b.receive(q, g, 10, 0)
		if len(got) == 0 {
			return payloads
		}
		for _, l := range got {
			payloads = append(payloads, fmt.Sprint(l.payload, " ", l.attempt))
		}
		if err := b.AckLanes(b.t.Context(), g, one(got)); err != nil {
			b.t.Fatal(err)
		}
	}
}

// TestLaneRedriveOnce: 20 callers on two brokers make one copy, for the subscription it belongs to, and it can fail again.
func TestLaneRedriveOnce(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{})
	a := bs[0]
	fragile := func(p *catalog.Policy) { p.MaxAttempts = 1 }
	q, g := a.subscribe("orders", "mail", fragile)
	_, other := a.subscribe("orders", "audit", fragile)
	a.push("orders", "k", items(3, "m")...)
	id := a.kill(q, g, `"m-0"`)
	kept := a.kill(q, other, `"m-0"`)
	var done atomic.Int64
	var all sync.WaitGroup
	for n := range 20 {
		all.Go(func() {
			b := bs[n%2]
			ids, _, err := b.RedriveLanes(t.Context(), g, []uuid.UUID{id, uuid.New(), kept})
			if err != nil {
				t.Error(err)
			}
			done.Add(int64(len(ids)))
		})
	}
	all.Wait()
	if done.Load() != 1 {
		t.Errorf("%d callers redrove it", done.Load())
	}
	equal(t, "mail", fmt.Sprint(a.drain(q, g)), `["m-1" 1 "m-2" 1 "m-0" 1]`)
	equal(t, "audit", fmt.Sprint(a.drain(q, other)), `["m-1" 1 "m-2" 1]`)
	var dead int
	if err := a.Pool.QueryRow(t.Context(), "select count(*) from ferrymq.dead_letters where id = $1", kept).Scan(&dead); err != nil || dead != 1 {
		t.Errorf("the other subscription's dead letter: %d %v", dead, err)
	}
	// Redriven, it fails again.
	a.push("orders", "k", item{payload: `"x"`})
	id = a.kill(q, g, `"x"`)
	if ids, _, err := a.RedriveLanes(t.Context(), g, []uuid.UUID{id}); err != nil || len(ids) != 1 {
		t.Fatal(ids, err)
	}
	if again := a.kill(q, g, `"x"`); again == id {
		t.Error("the same dead letter")
	}
}

// TestLaneRedriveRollsBack: when the stream goes meanwhile nothing is moved, and nothing is lost.
func TestLaneRedriveRollsBack(t *testing.T) {
	t.Parallel()
	b := together(t, 1, setup{})[0]
	q, g := b.subscribe("orders", "mail", func(p *catalog.Policy) { p.MaxAttempts = 1 })
	b.push("orders", "k", items(1, "m")...)
	id := b.kill(q, g, `"m-0"`)
	b.exec("update ferrymq.dead_letters set partition_id = -1")
	if ids, _, err := b.RedriveLanes(t.Context(), g, []uuid.UUID{id}); !errors.Is(err, catalog.ErrGone) || ids != nil {
		t.Error(ids, err)
	}
	var dead int
	if err := b.Pool.QueryRow(t.Context(), "select count(*) from ferrymq.dead_letters").Scan(&dead); err != nil || dead != 1 {
		t.Errorf("%d dead letters, %v", dead, err)
	}
}

func (b *broker) exec(sql string) {
	b.t.Helper()
	exec(b.t, b.Pool, sql)
}

// TestPassedOver: groups of the other API never see a redriven message, are not held up by it, and end up behind it.
func TestPassedOver(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{})
	b := bs[0]
	q, g := b.subscribe("orders", "mail", func(p *catalog.Policy) { p.MaxAttempts = 1 })
	b.push("orders", "k", items(2, "m")...)
	redrive := func(payload string) {
		t.Helper()
		if ids, _, err := b.RedriveLanes(t.Context(), g, []uuid.UUID{b.kill(q, g, payload)}); err != nil || len(ids) != 1 {
			t.Fatal(ids, err)
		}
	}
	b.need(auto(wide("orders", "idle", 10, 1, 0)), "m-0 m-1")
	b.need(auto(wide("orders", "idle", 10, 1, 0)), "")
	redrive(`"m-0"`)
	var idle bool
	if err := b.Pool.QueryRow(t.Context(), `select c.committed = p.next_offset and not c.pending and c.committed - c.origin = 2 from ferrymq.cursors c
		join ferrymq.groups g on g.id = c.group_id and g.name = 'idle' join ferrymq.partitions p on p.id = c.partition_id`).Scan(&idle); err != nil || !idle {
		t.Errorf("a group that was up to date has a backlog: %v", err)
	}
	b.push("orders", "k", item{id: "after", payload: `"n-0"`})
	redrive(`"m-1"`)
	redrive(`"m-0"`)
	// m-0 m-1 [m-0] n-0 [m-1] [m-0]
	for i, pop := range []func(group string, batch int64) *groupcommit.Pop{
		func(group string, batch int64) *groupcommit.Pop { return wide("orders", group, batch, 1, 0) },
		func(group string, batch int64) *groupcommit.Pop { return route("orders", "k", group, batch, 0) },
	} {
		group := fmt.Sprint("one by one ", i)
		for _, want := range []string{"m-0", "m-1", "n-0", ""} {
			if d := b.need(pop(group, 1), want); d != nil {
				b.finish(group, d)
			}
		}
		group = fmt.Sprint("auto ", i)
		for _, want := range []string{"m-0", "m-1", "n-0", ""} {
			b.need(auto(pop(group, 1)), want)
		}
		// Who acks all that came has completed the batch, here and where only the database knows it.
		for n, acker := range bs {
			group = fmt.Sprint("whole ", i, n)
			d := b.need(pop(group, 10), "m-0 m-1 n-0")
			for _, r := range acker.ack(group, d, groupcommit.Completed, d.messages...) {
				if !r.LeaseReleased {
					t.Errorf("%s: the lease goes on", group)
				}
			}
			b.need(pop(group, 10), "")
		}
	}
	// Parked while a message comes that is not for it, and one that is.
	b.need(auto(wide("orders", "waits", 10, 1, 0)), "m-0 m-1 n-0")
	w := b.park(auto(wide("orders", "waits", 10, 1, soon)))
	redrive(`"n-0"`)
	b.push("orders", "k", item{payload: `"o-0"`})
	<-w.done
	if w.err != nil || w.d.payloads() != "o-0" {
		t.Errorf("%v %q", w.err, w.d.payloads())
	}
	b.need(wide("orders", "idle", 10, 1, 0), "n-0 o-0")
	// A repeat of the original is still one, and every cursor is behind all messages.
	if r := b.push("orders", "k", item{id: "after", payload: "1"}); !r[0].Duplicate {
		t.Error("not a duplicate")
	}
	eventually(t, "the groups are behind everything but the last two", func() bool {
		var n int
		if err := b.Pool.QueryRow(t.Context(), `select count(*) from ferrymq.cursors c join ferrymq.groups g on g.id = c.group_id and g.kind = 0
			join ferrymq.partitions p on p.id = c.partition_id where g.name <> 'idle' and (c.lease_id is not null or c.committed < p.next_offset - 2)`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n == 0
	})
}

// TestPassedOverMany: a lane gets over a long row of messages of another subscription in one call.
func TestPassedOverMany(t *testing.T) {
	t.Parallel()
	b := together(t, 1, setup{})[0]
	q, g := b.subscribe("orders", "mail", func(p *catalog.Policy) { p.MaxAttempts = 1 })
	_, other := b.subscribe("orders", "audit", nil)
	b.push("orders", "k", items(30, "m")...)
	var ids []uuid.UUID
	for n := range 30 {
		ids = append(ids, b.kill(q, g, fmt.Sprintf(`"m-%d"`, n)))
	}
	b.drain(q, other)
	if done, _, err := b.RedriveLanes(t.Context(), g, ids); err != nil || len(done) != 30 {
		t.Fatal(len(done), err)
	}
	b.push("orders", "k", item{payload: `"last"`})
	equal(t, "audit", fmt.Sprint(b.drain(q, other)), `["last" 1]`)
	got := b.drain(q, g)
	equal(t, "number of messages", len(got), 31)
	for n := range 30 {
		equal(t, "order", got[n], fmt.Sprintf(`"m-%d" 1`, n))
	}
}

func equal[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// TestLaneRedriveBesides: redrives of many keys beside pushes, receives and each other on two brokers: every message is acked once in the end.
func TestLaneRedriveBesides(t *testing.T) {
	t.Parallel()
	const keys, each = 10, 10
	bs := together(t, 2, setup{})
	var mu sync.Mutex
	acked := make(map[string]int)
	failed := make(map[string]bool)
	count := func() (n int) {
		mu.Lock()
		defer mu.Unlock()
		return len(acked)
	}
	var groups []*catalog.Group
	var queues []*catalog.Queue
	for _, b := range bs {
		q, g := b.subscribe("orders", "mail", func(p *catalog.Policy) { p.MaxAttempts = 1 })
		queues, groups = append(queues, q), append(groups, g)
	}
	var all sync.WaitGroup
	for n, b := range bs {
		all.Go(func() {
			for i := range each {
				var pushes []*groupcommit.Push
				for k := range keys {
					p, err := b.newPush(t.Context(), "orders", fmt.Sprint(k), []item{{payload: fmt.Sprintf(`"%d-%d-%d"`, n, k, i)}})
					if err != nil {
						t.Error(err)
						return
					}
					pushes = append(pushes, p)
				}
				if err := b.Push(t.Context(), pushes); err != nil {
					t.Error(err)
				}
				for _, p := range pushes {
					if p.Err != nil {
						t.Error(p.Err)
					}
				}
			}
		})
		all.Go(func() { // each message fails once, is redriven, and acked
			for end := time.Now().Add(60 * time.Second); count() < 2*keys*each && time.Now().Before(end); {
				var ok, bad []*groupcommit.Delivered
				for _, l := range b.receive(queues[n], groups[n], 10, 100*time.Millisecond) {
					mu.Lock()
					if failed[l.payload] {
						acked[l.payload]++
						ok = append(ok, &l.Delivered)
					} else {
						failed[l.payload] = true
						bad = append(bad, &l.Delivered)
					}
					mu.Unlock()
				}
				if err := errors.Join(b.AckLanes(t.Context(), groups[n], ok), b.NackLanes(t.Context(), groups[n], bad, "boom", "boom", -1)); err != nil {
					t.Error(err)
				}
			}
		})
		all.Go(func() {
			for end := time.Now().Add(60 * time.Second); count() < 2*keys*each && time.Now().Before(end); {
				rows, err := b.Pool.Query(t.Context(), "select id from ferrymq.dead_letters order by random() limit 30")
				if err != nil {
					t.Error(err)
					return
				}
				ids, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
				if err == nil && len(ids) > 0 {
					_, _, err = b.RedriveLanes(t.Context(), groups[n], ids)
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	equal(t, "messages acked", count(), 2*keys*each)
	for payload, n := range acked {
		if n != 1 {
			t.Errorf("%s was acked %d times", payload, n)
		}
	}
}
