package maintain

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
	"ferrymq/segment"
)

// sweeper is a broker whose sweeps a test runs by hand.
func sweeper(t *testing.T, dsn string) *Maintainer {
	t.Helper()
	m := broker(t, dsn)
	m.q, m.RetentionInterval, m.RetentionBatch, m.CleanupDays = db.New(db.Patient{Pool: m.Pool}), time.Minute, 10, 30
	return m
}

// sweep runs a whole sweep, whether it is due or not.
func (m *Maintainer) sweep(t *testing.T) {
	t.Helper()
	exec(t, m.Pool, "update ferrymq.sweeps set due_at = clock_timestamp()")
	if err := m.retention(t.Context()); err != nil {
		t.Fatal(db.Text(err))
	}
}

func configure(t *testing.T, m *Maintainer, queue string, change func(q *catalog.Queue)) *catalog.Queue {
	t.Helper()
	q, err := m.Engine.Catalog.Configure(t.Context(), queue, func(q *catalog.Queue) error { change(q); return nil })
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// age makes everything stored older.
func age(t *testing.T, m *Maintainer, seconds int) {
	t.Helper()
	exec(t, m.Pool, "update ferrymq.segments set created_at = created_at - $1 * interval '1 second'", seconds)
	exec(t, m.Pool, "update ferrymq.retired_keys set created_at = created_at - $1 * interval '1 second', expires_at = expires_at - $1 * interval '1 second'", seconds)
	exec(t, m.Pool, `update ferrymq.partitions set created_at = created_at - $1 * interval '1 second', last_push_at = last_push_at - $1 * interval '1 second',
		expire_at = expire_at - $1 * interval '1 second', empty_since = empty_since - $1 * interval '1 second'`, seconds)
}

// send pushes one segment of messages; an id "" is none.
func send(t *testing.T, e *groupcommit.Engine, queue, partition string, ids ...string) []groupcommit.Pushed {
	t.Helper()
	r, err := trySend(t.Context(), e, queue, partition, ids...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func trySend(ctx context.Context, e *groupcommit.Engine, queue, partition string, ids ...string) ([]groupcommit.Pushed, error) {
	q, err := e.Catalog.EnsureQueue(ctx, queue)
	if err != nil {
		return nil, err
	}
	found, err := e.Catalog.Partitions(ctx, q, []string{partition})
	if err != nil {
		return nil, err
	}
	p := &groupcommit.Push{Queue: q, Partition: found[0]}
	for _, id := range ids {
		p.Messages = append(p.Messages, segment.Message{TransactionID: id, Payload: fmt.Appendf(nil, "%q", id)})
	}
	if err := e.Push(ctx, []*groupcommit.Push{p}); err != nil {
		return nil, err
	}
	return p.Results, p.Err
}

func popOf(queue, group string, batch int64) *groupcommit.Pop {
	return &groupcommit.Pop{Queue: queue, Group: group, Named: true, Start: catalog.All(), Batch: batch, Partitions: 100}
}

func routeOf(queue, partition, group string, batch int64) *groupcommit.Pop {
	p := popOf(queue, group, batch)
	p.Partition, p.Partitions = &partition, 1
	return p
}

// take pops and returns the payloads and what was delivered.
func take(t *testing.T, e *groupcommit.Engine, p *groupcommit.Pop) (string, *groupcommit.Delivery) {
	t.Helper()
	d, err := e.Pop(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	return payloads(t, d), d
}

func payloads(t testing.TB, d *groupcommit.Delivery) string {
	if d == nil {
		return ""
	}
	var out []string
	for _, s := range d.Spans {
		for _, g := range s.Segments {
			open, err := segment.Decode(nil, g.Codec, g.KeyNo, g.FirstID, int(g.Count), g.Frames)
			if err != nil {
				t.Error(err)
				return ""
			}
			for i := max(s.Start-g.Base, 0); i < min(s.Start+s.Take-g.Base, int64(g.Count)); i++ {
				m := open.At(int(i))
				out = append(out, strings.Trim(string(m.Payload), `"`))
			}
		}
	}
	return strings.Join(out, " ")
}

func gets(t *testing.T, what string, e *groupcommit.Engine, p *groupcommit.Pop, want string) *groupcommit.Delivery {
	t.Helper()
	got, d := take(t, e, p)
	if got != want {
		t.Fatalf("%s: popped %q, want %q", what, got, want)
	}
	return d
}

// ack says something about a message of a delivery's first partition.
func ack(e *groupcommit.Engine, d *groupcommit.Delivery, group, id string, status groupcommit.Status) groupcommit.Acked {
	a := &groupcommit.Acks{Partition: d.Spans[0].Partition, Group: group, Leased: d.Lease != uuid.Nil, Lease: d.Lease, Items: []groupcommit.Ack{{TransactionID: &id, Status: status}}}
	e.Ack(context.Background(), []*groupcommit.Acks{a})
	return a.Results[0]
}

// TestRules: what each rule removes, alone and together, in whole segments, and when it looks again.
func TestRules(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	m := sweeper(t, dsn)
	var removed Removed
	var of int32 // on a slow machine more of an earlier queue is due by now
	m.OnRemoved = func(r Removed) {
		if r.Queue != of {
			return
		}
		removed.Retention, removed.CompletedRetention, removed.Eviction = removed.Retention+r.Retention, removed.CompletedRetention+r.CompletedRetention, removed.Eviction+r.Eviction
	}
	// Segments of 3, 100, 50, 30 and 5 s of age, ten messages each: offsets 0, 10, 20, 30, 40 to 50. The first is the oldest.
	ages := []int{100, 50, 30, 15, 5}
	const never = -1
	for i, c := range []struct {
		name                        string
		enabled                     bool
		keep, completed, wait       int32
		committed                   []int64 // of registered groups
		unregistered                []int64 // of groups that met this partition only
		absent                      int     // registered groups without a cursor yet
		first                       int64
		retention, consumed, evicts int64
		next                        int // seconds from now until it is looked at again
	}{
		{name: "no rule", enabled: true, first: 0, next: never},
		{name: "not enabled", keep: 1, completed: 1, committed: []int64{50}, first: 0, next: never},
		{name: "retention", enabled: true, keep: 20, first: 30, retention: 30, next: 5},
		{name: "retention of all", enabled: true, keep: 1, first: 50, retention: 50, next: never},
		{name: "retention of nothing", enabled: true, keep: 101, first: 0, next: 1},
		{name: "retention, unread or not", enabled: true, keep: 20, committed: []int64{0, 50}, first: 30, retention: 30, next: 5},
		{name: "max wait", wait: 20, first: 30, evicts: 30, next: 5},
		{name: "max wait, enabled", enabled: true, wait: 20, committed: []int64{5}, first: 30, evicts: 30, next: 5},
		{name: "completed without groups", enabled: true, completed: 20, first: 0, next: 30},
		{name: "completed", enabled: true, completed: 20, committed: []int64{50}, first: 30, consumed: 30, next: 5},
		{name: "completed, one group behind", enabled: true, completed: 20, committed: []int64{50, 20}, first: 20, consumed: 20, next: 30},
		{name: "completed, in the middle of a segment", enabled: true, completed: 20, committed: []int64{50, 29}, first: 20, consumed: 20, next: 30},
		{name: "completed, one message of all", enabled: true, completed: 1, committed: []int64{49}, first: 40, consumed: 40, next: 30},
		{name: "completed, all of it", enabled: true, completed: 1, committed: []int64{50}, first: 50, consumed: 50, next: never},
		{name: "completed, nothing passed", enabled: true, completed: 1, committed: []int64{9}, first: 0, next: 30},
		{name: "completed, a group that met the partition", enabled: true, completed: 20, committed: []int64{50}, unregistered: []int64{10}, first: 10, consumed: 10, next: 30},
		{name: "completed, only such a group", enabled: true, completed: 20, unregistered: []int64{30}, first: 30, consumed: 30, next: 5},
		{name: "completed, a group still without cursor", enabled: true, completed: 20, committed: []int64{50}, absent: 1, first: 0, next: 30},
		{name: "completed and retention", enabled: true, completed: 20, keep: 60, committed: []int64{0}, first: 10, retention: 10, next: 10},
		{name: "all three", enabled: true, completed: 90, keep: 40, wait: 20, committed: []int64{50}, first: 30, retention: 10, consumed: 10, evicts: 10, next: 5},
		{name: "the strictest wins", enabled: true, keep: 20, wait: 60, first: 30, retention: 30, next: 5},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := configure(t, m, fmt.Sprint("rule.", i), func(q *catalog.Queue) {
				q.RetentionEnabled, q.RetentionSeconds, q.CompletedRetentionSeconds, q.MaxWaitTimeSeconds = c.enabled, c.keep, c.completed, c.wait
			})
			exec(t, m.Pool, `insert into ferrymq.partitions (public_id, queue_id, name, next_offset, last_push_at, expire_at)
				values (gen_random_uuid(), $1, 'p', 50, clock_timestamp() - interval '5 s', clock_timestamp())`, q.ID)
			p := number(t, m.Pool, "select max(id) from ferrymq.partitions")
			for n, a := range ages {
				exec(t, m.Pool, `insert into ferrymq.segments (partition_id, base_offset, count, key_no, codec, created_at, first_id, keys, frames)
					values ($1, $2, 10, 0, 0, clock_timestamp() - $3 * interval '1 second', gen_random_uuid(), '', '')`, p, 10*n, a)
			}
			group := func(registered bool, at int64, cursor bool) {
				exec(t, m.Pool, `with g as (insert into ferrymq.groups (queue_id, name, registered, start_mode, start_at, seeded) values ($1, gen_random_uuid()::text, $2, 'all', to_timestamp(0), true) returning id)
					insert into ferrymq.cursors (group_id, partition_id, committed, pending) select g.id, $3, $4, true from g where $5`, q.ID, registered, p, at, cursor)
			}
			for _, at := range c.committed {
				group(true, at, true)
			}
			for _, at := range c.unregistered {
				group(false, at, true)
			}
			for range c.absent {
				group(true, 0, false)
			}
			group(false, 0, false) // one that met another partition only: does not count
			removed, of = Removed{}, q.ID
			m.sweep(t)
			if got := number(t, m.Pool, "select first_offset from ferrymq.partitions where id = $1", p); got != c.first {
				t.Errorf("first offset %d, want %d", got, c.first)
			}
			if want := (Removed{Retention: c.retention, CompletedRetention: c.consumed, Eviction: c.evicts}); removed != want {
				t.Errorf("removed %+v, want %+v", removed, want)
			}
			next := number(t, m.Pool, "select coalesce(round(extract(epoch from expire_at - clock_timestamp())), -1)::bigint from ferrymq.partitions where id = $1", p)
			if next > int64(c.next) || next < int64(c.next)-3 {
				t.Errorf("looked at again in %d s, want %d", next, c.next)
			}
			if n := number(t, m.Pool, "select count(*) from ferrymq.segments where partition_id = $1", p); n != 5-c.first/10 {
				t.Errorf("%d segments are stored, want %d", n, 5-c.first/10)
			}
			if n := number(t, m.Pool, "select count(*) from ferrymq.partitions where id = $1 and swept_offset = first_offset and (empty_since is null) = (next_offset > first_offset)", p); n != 1 {
				t.Error("not swept, or taken for empty")
			}
		})
	}
}

// TestPushPlans: a push schedules a partition once, an earlier due time counts, and one under a new rule is found.
func TestPushPlans(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	m := sweeper(t, dsn)
	due := func() int64 {
		return number(t, m.Pool, "select coalesce(round(extract(epoch from expire_at - clock_timestamp())), -1)::bigint from ferrymq.partitions")
	}
	near := func(what string, want int64) {
		t.Helper()
		if d := due(); d > want || d < want-20 {
			t.Errorf("%s: due in %d s, want %d", what, d, want)
		}
	}
	send(t, m.Engine, "plan.q", "p", "a")
	if d := due(); d != -1 {
		t.Errorf("due in %d s without a rule", d)
	}
	plan := func() {
		t.Helper()
		if err := m.planRetention(t.Context(), int32(number(t, m.Pool, "select id from ferrymq.queues")), func() error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	configure(t, m, "plan.q", func(q *catalog.Queue) { q.MaxWaitTimeSeconds = 1000 })
	if n := number(t, m.Pool, "select count(*) from ferrymq.jobs where kind = 'retention'"); n != 2 {
		t.Errorf("%d jobs after a new rule", n)
	}
	plan()
	near("planned by the job", 1000)
	age(t, m, 100)
	send(t, m.Engine, "plan.q", "p", "b")
	near("after another push", 900)
	configure(t, m, "plan.q", func(q *catalog.Queue) { q.MaxWaitTimeSeconds = 500 })
	send(t, m.Engine, "plan.q", "p", "c")
	near("a push under a stricter rule", 500)
	plan()
	near("the oldest, under the stricter rule", 400)
	send(t, m.Engine, "plan.q", "p", "d")
	near("after another push", 400)
	configure(t, m, "plan.q", func(q *catalog.Queue) { q.MaxWaitTimeSeconds = 0 })
	age(t, m, 10_000)
	m.sweep(t)
	if d := due(); d != -1 || number(t, m.Pool, "select first_offset from ferrymq.partitions") != 0 {
		t.Errorf("due in %d s after the rule was dropped", d)
	}
}

// TestStragglers: a push that began under the old rules and commits after the job has passed is found by the second job.
func TestStragglers(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	m := sweeper(t, dsn)
	send(t, m.Engine, "late.q", "p", "a")
	tx, err := m.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	// A push in the air: it has locked the partition, with nothing to schedule.
	if _, err := tx.Exec(t.Context(), "update ferrymq.partitions set last_push_at = clock_timestamp()"); err != nil {
		t.Fatal(err)
	}
	q := configure(t, m, "late.q", func(q *catalog.Queue) { q.MaxWaitTimeSeconds = 1000 })
	done := make(chan error, 1)
	go func() { done <- m.planRetention(context.Background(), q.ID, func() error { return nil }) }()
	dbtest.WaitBlocked(t, m.Pool, 1)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if n := number(t, m.Pool, "select count(*) from ferrymq.partitions where expire_at is not null"); n != 1 {
		t.Error("the job did not wait for the push")
	}
	if n := number(t, m.Pool, "select count(*) from ferrymq.jobs where kind = 'retention' and due_at > clock_timestamp() + interval '30 seconds'"); n != 1 {
		t.Errorf("%d later jobs", n)
	}
}

// TestPlanBlocked: new rules hold for all partitions but the one that somebody holds, whose turn comes when it is free.
func TestPlanBlocked(t *testing.T) {
	t.Parallel()
	m := sweeper(t, dbtest.New(t))
	for _, p := range []string{"a", "b", "c"} {
		send(t, m.Engine, "held.q", p, "x")
	}
	q := configure(t, m, "held.q", func(q *catalog.Queue) { q.MaxWaitTimeSeconds = 1000 })
	tx, err := m.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if _, err := tx.Exec(t.Context(), "select from ferrymq.partitions where name = 'b' for update"); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- m.planRetention(context.Background(), q.ID, func() error { return nil }) }()
	dbtest.WaitBlocked(t, m.Pool, 1)
	if n := number(t, m.Pool, "select count(*) from ferrymq.partitions where name = 'a' and expire_at is not null"); n != 1 {
		t.Error("a partition that nobody holds waits for the held one")
	}
	send(t, m.Engine, "held.q", "a", "pushed meanwhile")
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if n := number(t, m.Pool, "select count(*) from ferrymq.partitions where expire_at is not null"); n != 3 {
		t.Errorf("the rules hold for %d partitions", n)
	}
}

// TestOneSweep: however many brokers look, one of them sweeps in an interval.
func TestOneSweep(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	m := sweeper(t, dsn)
	for round := range 5 {
		exec(t, m.Pool, "update ferrymq.sweeps set due_at = clock_timestamp() - interval '1 ms'")
		var turns atomic.Int64
		var work sync.WaitGroup
		for range 5 {
			work.Go(func() {
				_, err := m.q.SweepClaim(t.Context(), db.SweepClaimParams{Seconds: 5})
				if err == nil {
					turns.Add(1)
				} else if !errors.Is(err, pgx.ErrNoRows) {
					t.Error(err)
				}
			})
		}
		work.Wait()
		if turns.Load() != 1 {
			t.Errorf("round %d: %d brokers sweep", round, turns.Load())
		}
	}
	if n := number(t, m.Pool, "select count(*) from ferrymq.sweeps where name = 'retention' and due_at between clock_timestamp() + interval '2 s' and clock_timestamp() + interval '5 s'"); n != 1 {
		t.Error("the next sweep is not in an interval")
	}
	// Three brokers with loops of their own.
	exec(t, m.Pool, "create table sweeps_seen (at timestamptz)")
	exec(t, m.Pool, `create function seen() returns trigger language plpgsql as 'begin insert into sweeps_seen values (clock_timestamp()); return null; end'`)
	exec(t, m.Pool, "create trigger seen after update on ferrymq.sweeps for each row execute function seen()")
	exec(t, m.Pool, "update ferrymq.sweeps set due_at = clock_timestamp()")
	for range 3 {
		b := broker(t, dsn)
		b.RetentionInterval, b.RetentionBatch = 200*time.Millisecond, 10
		run(t, b)
	}
	time.Sleep(2 * time.Second) // there is no telling that nothing more comes but by time
	if n := number(t, m.Pool, "select count(*) from sweeps_seen") - 2; n < 3 || n > 14 {
		t.Errorf("%d sweeps in 2 s, want 10", n)
	}
}

// TestDueFirst: everything that is due is out of reach before rows are removed, and rows go in bounded steps.
func TestDueFirst(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	m := sweeper(t, dsn)
	configure(t, m, "first.q", func(q *catalog.Queue) { q.MaxWaitTimeSeconds = 100 })
	var names []string
	for p := range 120 {
		names = append(names, fmt.Sprint("p", p))
		send(t, m.Engine, "first.q", names[p], "x", "y")
		send(t, m.Engine, "first.q", names[p], "z")
	}
	age(t, m, 200)
	send(t, m.Engine, "first.q", "p7", "new")
	m.RetentionInterval = time.Nanosecond // over at once: one step of each kind
	m.sweep(t)
	if n := number(t, m.Pool, "select count(*) from ferrymq.partitions where first_offset < 3"); n != 0 {
		t.Errorf("%d partitions have due messages", n)
	}
	if n := number(t, m.Pool, "select count(*) from ferrymq.segments"); n != 241-10 {
		t.Errorf("%d segments after one step of ten", n)
	}
	if d := gets(t, "only what is not due", m.Engine, popOf("first.q", "g", 1000), "new"); len(d.Spans) != 1 {
		t.Error(len(d.Spans))
	}
	if n := number(t, m.Pool, "select count(*) from ferrymq.cursors where committed <> 3"); n != 0 {
		t.Errorf("%d cursors are not at the end of what was removed", n)
	}
	if n := number(t, m.Pool, "select count(*) from ferrymq.cursors where pending"); n != 1 {
		t.Errorf("%d cursors are pending", n)
	}
	m.RetentionInterval = time.Minute
	m.sweep(t)
	if n := number(t, m.Pool, "select count(*) from ferrymq.segments"); n != 1 {
		t.Errorf("%d segments are left", n)
	}
	if n := number(t, m.Pool, "select count(*) from ferrymq.partitions where swept_offset < first_offset"); n != 0 {
		t.Errorf("%d partitions are unswept", n)
	}
}

// TestBusyPartition: a partition that is locked when the sweep looks is waited for; one that stays locked holds up nobody else.
func TestBusyPartition(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	m := sweeper(t, dsn)
	configure(t, m, "busy.q", func(q *catalog.Queue) { q.MaxWaitTimeSeconds = 100 })
	for _, p := range []string{"a", "b", "c"} {
		send(t, m.Engine, "busy.q", p, "x")
	}
	age(t, m, 200)
	tx, err := m.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if _, err := tx.Exec(t.Context(), "select from ferrymq.partitions where name = 'a' for update"); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- m.removeDue(context.Background(), time.Now()) }()
	dbtest.WaitBlocked(t, m.Pool, 1)
	if n := number(t, m.Pool, "select count(*) from ferrymq.partitions where first_offset = 1"); n != 2 {
		t.Errorf("%d partitions were swept beside a locked one", n)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if n := number(t, m.Pool, "select count(*) from ferrymq.partitions where first_offset = 1"); n != 3 {
		t.Errorf("%d partitions were swept", n)
	}
	// A cursor that somebody holds for long: its partition waits for the next sweep, the others do not.
	for _, p := range []string{"a", "b", "c"} {
		send(t, m.Engine, "busy.q", p, "y")
	}
	d := gets(t, "of b", m.Engine, routeOf("busy.q", "b", "g", 1), "y")
	configure(t, m, "busy.q", func(q *catalog.Queue) { q.RetryDelay = 86_400_000 })
	if r := ack(m.Engine, d, "g", "y", groupcommit.Failed); r.Err != nil {
		t.Fatal(r.Err)
	}
	age(t, m, 200)
	if tx, err = m.Pool.Begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if _, err := tx.Exec(t.Context(), "select from ferrymq.cursors for update"); err != nil {
		t.Fatal(err)
	}
	if err := m.removeDue(t.Context(), time.Now()); err != nil {
		t.Fatal(err)
	}
	if n := number(t, m.Pool, "select count(*) from ferrymq.partitions where first_offset = 2"); n != 2 {
		t.Errorf("%d partitions were swept beside one with a locked cursor", n)
	}
}

// TestDedupAcrossRemoval: the window counts what was removed: in every state of the removal, for every memory.
func TestDedupAcrossRemoval(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	m := sweeper(t, dsn)
	warm, cold := broker(t, dsn), broker(t, dsn) // one knows the partition, one does not
	configure(t, m, "dedup.q", func(q *catalog.Queue) { q.MaxWaitTimeSeconds, q.DedupWindowSeconds = 100, 1000 })
	send(t, m.Engine, "dedup.q", "p", "a", "", "b") // 0
	send(t, m.Engine, "dedup.q", "p", "", "")       // 3
	send(t, m.Engine, "dedup.q", "p", "c")          // 5
	send(t, m.Engine, "dedup.q", "p", "")           // 6
	age(t, m, 200)
	kept := send(t, m.Engine, "dedup.q", "p", "d") // 7
	send(t, warm.Engine, "dedup.q", "p", "w")      // 8
	check := func(what string, e *groupcommit.Engine, fresh string) {
		t.Helper()
		r := send(t, e, "dedup.q", "p", "a", "b", "c", "d", fresh)
		for i, want := range []uuid.UUID{{}, {}, {}, kept[0].ID} {
			if !r[i].Duplicate || r[i].ID != want {
				t.Errorf("%s: %+v, want a duplicate of %v", what, r[i], want)
			}
		}
		if r[4].Duplicate {
			t.Errorf("%s: a new id is a duplicate", what)
		}
	}
	if err := m.removeDue(t.Context(), time.Now()); err != nil {
		t.Fatal(err)
	}
	check("moved, the rows are there", m.Engine, "e1")
	check("moved, warm", warm.Engine, "e2")
	check("moved, cold", cold.Engine, "e3")
	m.RetentionBatch = 2
	if _, err := m.removeRows(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := number(t, m.Pool, "select count(*) from ferrymq.retired_keys"); n != 1 {
		t.Errorf("%d retired after the first step", n)
	}
	check("half removed", m.Engine, "f1")
	check("half removed, warm", warm.Engine, "f2")
	check("half removed, new", broker(t, dsn).Engine, "f3")
	m.sweep(t)
	if n := number(t, m.Pool, "select count(*) from ferrymq.retired_keys"); n != 2 {
		t.Errorf("%d retired", n)
	}
	check("removed", m.Engine, "g1")
	check("removed, warm", warm.Engine, "g2")
	check("removed, new", broker(t, dsn).Engine, "g3")
	// No memory at all: every window is read.
	tiny := broker(t, dsn)
	check("removed, small memory", tiny.Engine, "g4")
	// All of it gone, the last segment had no ids.
	send(t, m.Engine, "dedup.q", "p", "")
	age(t, m, 200)
	m.sweep(t)
	if n := number(t, m.Pool, "select next_offset - first_offset from ferrymq.partitions"); n != 0 {
		t.Fatalf("%d messages are left", n)
	}
	for i, e := range []*groupcommit.Engine{m.Engine, warm.Engine, broker(t, dsn).Engine} {
		r := send(t, e, "dedup.q", "p", "a", "d", "g1", fmt.Sprint("h", i), "w")
		for j, x := range r {
			if want := j != 3; x.Duplicate != want || (want && x.ID != uuid.Nil) {
				t.Errorf("engine %d, empty, %d: %+v", i, j, x)
			}
		}
		// And with a memory that is complete now, without reading anything again.
		if r := send(t, e, "dedup.q", "p", fmt.Sprint("i", i)); r[0].Duplicate {
			t.Errorf("engine %d: %+v", i, r)
		}
	}
	// The window ends; then they are forgotten.
	age(t, m, 650)
	m.sweep(t)
	if r := send(t, m.Engine, "dedup.q", "p", "a", "d"); r[0].Duplicate || !r[1].Duplicate {
		t.Errorf("a has left the window, d has not: %+v", r)
	}
	// A window that was made longer counts for what there is.
	configure(t, m, "dedup.q", func(q *catalog.Queue) { q.DedupWindowSeconds = 100_000 })
	age(t, m, 1000)
	n := number(t, m.Pool, "select count(*) from ferrymq.retired_keys")
	m.sweep(t)
	if now := number(t, m.Pool, "select count(*) from ferrymq.retired_keys"); now < n || n == 0 {
		t.Errorf("%d of %d are left though the window is longer now", now, n)
	}
	if r := send(t, m.Engine, "dedup.q", "p", "g1"); !r[0].Duplicate {
		t.Errorf("%+v", r)
	}
	configure(t, m, "dedup.q", func(q *catalog.Queue) { q.DedupWindowSeconds = 1 })
	age(t, m, 200_000)
	m.sweep(t)
	if n := number(t, m.Pool, "select count(*) from ferrymq.retired_keys"); n != 0 {
		t.Errorf("%d are left after the window", n)
	}
}

// TestBelow: a consumer below the removed part goes on at the oldest that is left, in order; its lease over removed messages
// can be acked, and its backoff for one ends.
func TestBelow(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	m, other := sweeper(t, dsn), broker(t, dsn)
	configure(t, m, "below.q", func(q *catalog.Queue) {
		q.MaxWaitTimeSeconds, q.RetryDelay, q.RetryLimit, q.LeaseTime = 100, 86_400_000, 1, 3600
	})
	send(t, m.Engine, "below.q", "p", "a", "b")
	send(t, m.Engine, "below.q", "p", "c")
	var leased []*groupcommit.Delivery
	for _, g := range []string{"acks", "elsewhere", "nacks", "kills", "slow"} {
		leased = append(leased, gets(t, g, m.Engine, popOf("below.q", g, 2), "a b"))
	}
	failed := gets(t, "failed", m.Engine, popOf("below.q", "failed", 1), "a")
	if r := ack(m.Engine, failed, "failed", "a", groupcommit.Failed); r.Err != nil || !r.LeaseReleased {
		t.Fatalf("%+v", r)
	}
	parked := make(chan string, 1)
	go func() {
		p := popOf("below.q", "failed", 10)
		p.Wait = 20 * time.Second
		d, err := other.Engine.Pop(context.Background(), p)
		if err != nil {
			t.Error(err)
		}
		parked <- payloads(t, d)
	}()
	age(t, m, 200)
	send(t, m.Engine, "below.q", "p", "d", "e")
	send(t, m.Engine, "below.q", "p", "f")
	m.sweep(t)
	select {
	case got := <-parked:
		if got != "d e f" {
			t.Errorf("the backoff ended with %q", got)
		}
	case <-time.After(10 * time.Second):
		t.Error("the backoff of a removed message holds up the next ones")
	}
	if r := ack(m.Engine, leased[0], "acks", "b", groupcommit.Completed); r.Err != nil || !r.LeaseReleased {
		t.Errorf("%+v", r)
	}
	gets(t, "acks", m.Engine, popOf("below.q", "acks", 10), "d e f")
	// Another broker finds the ids among the retired ones.
	if r := ack(other.Engine, leased[1], "elsewhere", "b", groupcommit.Completed); r.Err != nil || !r.LeaseReleased {
		t.Errorf("%+v", r)
	}
	gets(t, "elsewhere", other.Engine, popOf("below.q", "elsewhere", 10), "d e f")
	// Nacked with budget left: the message does not come again, and nothing waits for it.
	exec(t, m.Pool, "update ferrymq.queues set retry_delay = 0, updated_at = clock_timestamp()")
	if r := ack(m.Engine, leased[2], "nacks", "a", groupcommit.Failed); r.Err != nil || !r.LeaseReleased || r.DeadLettered {
		t.Errorf("%+v", r)
	}
	gets(t, "nacks", m.Engine, popOf("below.q", "nacks", 1), "d")
	// Dead-lettered: refused, nothing changes.
	if r := ack(m.Engine, leased[3], "kills", "a", groupcommit.DeadLetter); !errors.Is(r.Err, groupcommit.ErrDeadRejected) {
		t.Errorf("%+v", r)
	}
	if r := ack(m.Engine, leased[3], "kills", "b", groupcommit.Completed); r.Err != nil || !r.LeaseReleased {
		t.Errorf("%+v", r)
	}
	gets(t, "kills", m.Engine, popOf("below.q", "kills", 10), "d e f")
	gets(t, "slow, leased", m.Engine, popOf("below.q", "slow", 10), "")
	exec(t, m.Pool, "update ferrymq.cursors set lease_until = clock_timestamp() where lease_id is not null")
	gets(t, "slow", m.Engine, popOf("below.q", "slow", 2), "d e")
	if n := number(t, m.Pool, "select count(*) from ferrymq.dead_letters"); n != 0 {
		t.Errorf("%d dead letters", n)
	}
	gets(t, "new", m.Engine, popOf("below.q", "new", 10), "d e f")
	gets(t, "new on the route", m.Engine, routeOf("below.q", "p", "one", 10), "d e f")
}

// TestConsumedSoon: what is old when the last group passes it goes with the next sweep, as long as there is little of that.
func TestConsumedSoon(t *testing.T) {
	t.Parallel()
	m := sweeper(t, dbtest.New(t))
	m.RetentionInterval = 100 * time.Millisecond // room for 20
	configure(t, m, "soon.q", func(q *catalog.Queue) { q.RetentionEnabled, q.CompletedRetentionSeconds = true, 100 })
	for p := range 120 {
		send(t, m.Engine, "soon.q", fmt.Sprint("p", p), "x")
	}
	take(t, m.Engine, popOf("soon.q", "g", 1))
	age(t, m, 200)
	m.sweep(t)
	soon := number(t, m.Pool, "select count(*) from ferrymq.partitions where expire_at < clock_timestamp() + interval '10 s'")
	late := number(t, m.Pool, "select count(*) from ferrymq.partitions where expire_at > clock_timestamp() + interval '10 s'")
	if soon != moveChunk || soon+late != 120 {
		t.Errorf("%d are looked at again soon, %d later", soon, late)
	}
}

// TestSweepsUnderLoad: two brokers sweep at once beside pushes, pops and acks: nothing deadlocks, nothing is counted twice,
// nothing is lost but what is due, and order holds.
func TestSweepsUnderLoad(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	var removed, errs atomic.Int64
	log := slog.New(slog.NewTextHandler(writer(func(b []byte) { errs.Add(1); t.Logf("%s", b) }), &slog.HandlerOptions{Level: slog.LevelWarn}))
	var brokers []*Maintainer
	for range 2 {
		m := broker(t, dsn)
		m.Log, m.RetentionInterval, m.RetentionBatch, m.CleanupDays = log, 20*time.Millisecond, 7, 1
		m.OnRemoved = func(r Removed) { removed.Add(r.Retention + r.CompletedRetention + r.Eviction) }
		brokers = append(brokers, m)
	}
	configure(t, brokers[0], "load.q", func(q *catalog.Queue) {
		q.RetentionEnabled, q.RetentionSeconds, q.CompletedRetentionSeconds = true, 2, 1
	})
	for _, m := range brokers {
		run(t, m)
	}
	stop := make(chan struct{})
	var work sync.WaitGroup
	var pushed, popped atomic.Int64
	running := func() bool {
		select {
		case <-stop:
			return false
		default:
			return true
		}
	}
	for n := range 6 {
		work.Go(func() {
			for i := 0; running(); i++ {
				p := fmt.Sprint("p", (n+i)%10)
				if _, err := trySend(context.Background(), brokers[i%2].Engine, "load.q", p, fmt.Sprint(n, "-", i), ""); err != nil {
					t.Error(err)
					return
				}
				pushed.Add(2)
			}
		})
		work.Go(func() {
			last := make(map[int64]int64)
			for i := 0; running(); i++ {
				p := popOf("load.q", fmt.Sprint("g", n), 20)
				p.Partitions, p.AutoAck = 3, i%3 == 0
				d, err := brokers[i%2].Engine.Pop(context.Background(), p)
				if err != nil {
					t.Error(err)
					return
				}
				if d == nil {
					continue
				}
				for _, s := range d.Spans {
					if s.Start < last[s.Row.ID] {
						t.Errorf("partition %d: %d comes after %d", s.Row.ID, s.Start, last[s.Row.ID])
					}
					last[s.Row.ID] = s.Start + s.Take
					popped.Add(s.Take)
					if p.AutoAck {
						continue
					}
					g := s.Segments[len(s.Segments)-1]
					open, err := segment.Decode(nil, g.Codec, g.KeyNo, g.FirstID, int(g.Count), g.Frames)
					if err != nil {
						t.Error(err)
						return
					}
					id := string(open.AppendTransactionID(nil, int(s.Start+s.Take-1-g.Base)))
					a := &groupcommit.Acks{Partition: s.Partition, Group: p.Group, Leased: true, Lease: d.Lease, Items: []groupcommit.Ack{{TransactionID: &id}}}
					brokers[(i+n)%2].Engine.Ack(context.Background(), []*groupcommit.Acks{a})
					if err := a.Results[0].Err; err != nil && !errors.Is(err, groupcommit.ErrUnresolvable) {
						t.Error(err)
					}
				}
			}
		})
	}
	time.Sleep(3500 * time.Millisecond)
	close(stop)
	work.Wait()
	eventually(t, "all is removed", func() bool {
		return number(t, brokers[0].Pool, "select coalesce(sum(next_offset - first_offset), 0)::bigint from ferrymq.partitions") == 0 &&
			number(t, brokers[0].Pool, "select count(*) from ferrymq.segments") == 0
	})
	eventually(t, "all is counted", func() bool { return removed.Load() == pushed.Load() })
	if n := number(t, brokers[0].Pool, "select sum(next_offset)::bigint from ferrymq.partitions"); n != pushed.Load() {
		t.Errorf("%d are stored of %d", n, pushed.Load())
	}
	if errs.Load() > 0 {
		t.Errorf("%d warnings", errs.Load())
	}
	t.Logf("%d pushed and removed, %d popped", pushed.Load(), popped.Load())
}

type writer func([]byte)

func (w writer) Write(b []byte) (int, error) { w(b); return len(b), nil }

// TestReminder: one line per queue and day says that nothing is ever removed, while something consumed lies there.
func TestReminder(t *testing.T) {
	t.Parallel()
	m := sweeper(t, dbtest.New(t))
	var log bytes.Buffer
	m.Log = slog.New(slog.NewTextHandler(&log, nil))
	send(t, m.Engine, "full.q", "p", "a")
	configure(t, m, "full.q", func(q *catalog.Queue) { q.CompletedRetentionSeconds = 60 }) // without retentionEnabled it is no rule
	send(t, m.Engine, "unread.q", "p", "a")
	send(t, m.Engine, "ruled.q", "p", "a")
	configure(t, m, "ruled.q", func(q *catalog.Queue) { q.MaxWaitTimeSeconds = 100_000 })
	for _, q := range []string{"full.q", "ruled.q"} {
		p := popOf(q, "g", 1)
		p.AutoAck = true
		gets(t, q, m.Engine, p, "a")
	}
	take(t, m.Engine, popOf("unread.q", "g", 1))
	lines := func() []string {
		m.sweep(t)
		defer log.Reset()
		return slices.DeleteFunc(strings.Split(log.String(), "\n"), func(s string) bool { return s == "" })
	}
	if l := lines(); len(l) != 0 {
		t.Errorf("at once: %q", l)
	}
	later := func(hours int) {
		exec(t, m.Pool, "update ferrymq.queues set remind_at = remind_at - $1 * interval '1 hour'", hours)
	}
	later(1)
	if l := lines(); len(l) != 1 || !strings.Contains(l[0], "queue=full.q") || !strings.Contains(l[0], "kept for ever") {
		t.Errorf("after an hour: %q", l)
	}
	later(23)
	if l := lines(); len(l) != 0 {
		t.Errorf("again within a day: %q", l)
	}
	later(2)
	if l := lines(); len(l) != 1 {
		t.Errorf("after a day: %q", l)
	}
}
