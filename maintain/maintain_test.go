package maintain

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
	"ferrymq/segment"
	"ferrymq/wake"
)

func TestMain(m *testing.M) { dbtest.Main(m) }

// broker runs a maintainer with what it needs. It is not started.
func broker(t *testing.T, dsn string) *Maintainer {
	t.Helper()
	pool := dbtest.Pool(t, dbtest.Through(t, dsn), 6)
	q := db.New(pool)
	installation, err := q.InstallationGet(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	project, err := q.ProjectGet(t.Context(), db.ProjectGetParams{Name: "default"})
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	e := groupcommit.New(groupcommit.Options{Pool: pool, Log: log, Hasher: segment.NewHasher(uint64(installation.HashSeed)), Project: project, DBNow: installation.Now,
		Width: 2, DedupBytes: 1 << 20, PushQueueMax: 1000, MaxParked: 1000, StatementTimeout: 30 * time.Second,
		Recheck: groupcommit.Recheck{Initial: 100 * time.Millisecond, Threshold: 3, Multiplier: 2, Max: time.Second}})
	t.Cleanup(e.Close)
	conn, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	bus := wake.Open(wake.Options{Conn: conn, Log: log, OnHint: e.Hint, OnQueue: e.QueueChanged, OnMove: e.LookOutbox, OnLost: e.LookAll})
	t.Cleanup(bus.Close)
	return &Maintainer{Pool: pool, Log: log, Engine: e, Bus: bus, Name: "test"}
}

func run(t *testing.T, m *Maintainer) *Maintainer {
	m.Start()
	t.Cleanup(m.Close)
	return m
}

func push(t *testing.T, e *groupcommit.Engine, queue string, partitions, each int) {
	t.Helper()
	q, err := e.Catalog.EnsureQueue(t.Context(), queue)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for n := range partitions {
		names = append(names, fmt.Sprint("p", n))
	}
	found, err := e.Catalog.Partitions(t.Context(), q, names)
	if err != nil {
		t.Fatal(err)
	}
	for range each {
		var all []*groupcommit.Push
		for _, p := range found {
			all = append(all, &groupcommit.Push{Queue: q, Partition: p, Messages: []segment.Message{{Payload: []byte("1")}}})
		}
		if err := e.Push(t.Context(), all); err != nil {
			t.Fatal(err)
		}
		for _, p := range all {
			if p.Err != nil {
				t.Fatal(p.Err)
			}
		}
	}
}

func number(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) (n int64) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func exec(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// rows counts what belongs to a queue.
const rows = `select (select count(*) from ferrymq.queues where id = $1) + (select count(*) from ferrymq.partitions where queue_id = $1)
	+ (select count(*) from ferrymq.groups where queue_id = $1) + (select count(*) from ferrymq.dead_letters where queue_id = $1)
	+ (select count(*) from ferrymq.cursors) + (select count(*) from ferrymq.segments) + (select count(*) from ferrymq.jobs)`

// TestDelete: the job removes everything in steps, and goes on after its worker was killed in the middle.
func TestDelete(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	m := broker(t, dsn)
	push(t, m.Engine, "del.q", 450, 3)
	for _, g := range []string{"g", catalog.QueueMode} {
		d, err := m.Engine.Pop(t.Context(), &groupcommit.Pop{Queue: "del.q", Group: g, Named: true, Start: catalog.All(), Batch: 10, Partitions: 10})
		if err != nil || d == nil {
			t.Fatal(d, err)
		}
		if g == "g" {
			id := segment.ID(d.Spans[0].Segments[0].FirstID, 0).String()
			a := &groupcommit.Acks{Partition: d.Spans[0].Partition, Group: g, Leased: true, Lease: d.Lease, Items: []groupcommit.Ack{{TransactionID: &id, Status: groupcommit.DeadLetter}}}
			m.Engine.Ack(t.Context(), []*groupcommit.Acks{a})
			if a.Results[0].Err != nil || !a.Results[0].DeadLettered {
				t.Fatalf("%+v", a.Results[0])
			}
		}
	}
	eventually(t, "the groups are seeded", func() bool {
		return number(t, m.Pool, "select count(*) from ferrymq.groups where not seeded") == 0 && number(t, m.Pool, "select count(*) from ferrymq.jobs") == 0
	})
	if n := number(t, m.Pool, "select count(*) from ferrymq.cursors"); n != 900 {
		t.Fatalf("%d cursors", n)
	}
	id, existed, err := m.Engine.Catalog.Delete(t.Context(), "del.q")
	if !existed || err != nil {
		t.Fatal(existed, err)
	}
	// A worker that dies: its context ends after the first step.
	m.q = db.New(m.Pool)
	lease := uuid.New()
	job, err := m.q.JobClaim(t.Context(), db.JobClaimParams{LeaseID: lease})
	if err != nil || job.Kind != "delete_queue" {
		t.Fatalf("%+v %v", job, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	steps := 0
	err = m.removeQueue(ctx, job.QueueID, func() error {
		if steps++; steps == 3 {
			cancel()
		}
		return nil
	})
	if err == nil {
		t.Fatal("the killed worker finished")
	}
	left := number(t, m.Pool, "select count(*) from ferrymq.partitions where queue_id = $1", id)
	if left == 0 || left == 450 {
		t.Errorf("%d partitions are left by the killed worker", left)
	}
	other := run(t, broker(t, dsn))
	if n := number(t, other.Pool, rows, id); n == 0 {
		t.Fatal("nothing left to do")
	}
	exec(t, other.Pool, "update ferrymq.jobs set due_at = clock_timestamp(), lease_until = clock_timestamp()") // 30 s later
	other.Kick()
	eventually(t, "everything is removed", func() bool { return number(t, other.Pool, rows, id) == 0 })
	// The one who was thought dead notices.
	if n, err := m.q.JobExtend(t.Context(), db.JobExtendParams{ID: job.ID, LeaseID: lease}); n != 0 || err != nil {
		t.Errorf("extended a job that was taken over: %d %v", n, err)
	}
	push(t, m.Engine, "del.q", 2, 1)
	if n := number(t, m.Pool, "select count(*) from ferrymq.partitions"); n != 2 {
		t.Errorf("%d partitions after the name was used again", n)
	}
}

// TestRemoveQueueLate: a partition that appears while its deleted queue is being removed, because its creator had begun before, is removed with it.
func TestRemoveQueueLate(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	m := broker(t, dsn)
	m.id, m.q = uuid.New(), db.New(m.Pool)
	push(t, m.Engine, "late.q", 3, 1)
	id, _, err := m.Engine.Catalog.Delete(t.Context(), "late.q")
	if err != nil {
		t.Fatal(err)
	}
	creator, err := m.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer creator.Rollback(context.Background())
	if _, err := creator.Exec(t.Context(), "insert into ferrymq.partitions (public_id, queue_id, name) values (gen_random_uuid(), $1, 'late')", id); err != nil {
		t.Fatal(err)
	}
	lease := uuid.New()
	job, err := m.q.JobClaim(t.Context(), db.JobClaimParams{LeaseID: lease})
	if err != nil || job.Kind != "delete_queue" {
		t.Fatalf("%+v %v", job, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- m.run(t.Context(), job, lease) }()
	dbtest.WaitBlocked(t, dbtest.Pool(t, dsn, 1), 1)
	if err := creator.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("the job: %v", err)
	}
	if n := number(t, m.Pool, "select (select count(*) from ferrymq.queues) + (select count(*) from ferrymq.partitions) + (select count(*) from ferrymq.jobs)"); n != 0 {
		t.Errorf("%d rows are left", n)
	}
}

// TestRemoveProject: a worker that ends in the middle of a project's streams has removed each of them whole or not at all; another
// one does the rest, and touches no other project.
func TestRemoveProject(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	m := broker(t, dsn)
	m.id, m.q = uuid.New(), db.New(m.Pool)
	ctx := t.Context()
	for _, project := range []string{"gone", "other"} {
		if _, err := m.q.ProjectCreate(ctx, db.ProjectCreateParams{Name: project}); err != nil {
			t.Fatal(err)
		}
		if _, err := m.q.APIKeyCreate(ctx, db.APIKeyCreateParams{ID: uuid.New(), Scopes: []string{"read"}, Hash: []byte(fmt.Sprintf("%-32s", project)), Project: project}); err != nil {
			t.Fatal(err)
		}
		exec(t, m.Pool, `with q as (insert into ferrymq.queues (project_id, name, namespace, task)
				select p.id, 's' || n, '', '' from ferrymq.projects p, generate_series(1, 120) n where p.name = $1 returning id)
			insert into ferrymq.partitions (public_id, queue_id, name) select gen_random_uuid(), q.id, 'k' from q`, project)
	}
	if n, err := m.q.ProjectDelete(ctx, db.ProjectDeleteParams{Name: "gone"}); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	const (
		live = "select count(*) from ferrymq.queues q join ferrymq.projects p on p.id = q.project_id where p.name = $1 and q.deleted_at is null"
		rows = "select count(*) from ferrymq.partitions s join ferrymq.queues q on q.id = s.queue_id join ferrymq.projects p on p.id = q.project_id where p.name = $1"
		keys = "select count(*) from ferrymq.api_keys k join ferrymq.projects p on p.id = k.project_id where p.name = $1"
	)
	lease := uuid.New()
	job, err := m.q.JobClaim(ctx, db.JobClaimParams{LeaseID: lease})
	if err != nil || job.Kind != "delete_project" {
		t.Fatalf("%+v %v", job, err)
	}
	dying, cancel := context.WithCancel(ctx)
	steps := 0
	err = m.removeProject(dying, *job.ProjectID, func() error {
		if steps++; steps == 2 {
			cancel()
		}
		return nil
	})
	if n := number(t, m.Pool, live, "gone"); err == nil || n != 120-streamChunk {
		t.Fatalf("%d streams are left by the killed worker (%v)", n, err)
	}
	exec(t, m.Pool, "update ferrymq.jobs set due_at = clock_timestamp(), lease_until = clock_timestamp()") // 30 s later
	run(t, broker(t, dsn)).Kick()
	eventually(t, "everything is removed", func() bool {
		return number(t, m.Pool, live, "gone")+number(t, m.Pool, rows, "gone")+number(t, m.Pool, keys, "gone")+number(t, m.Pool, "select count(*) from ferrymq.jobs") == 0
	})
	if a, b, c := number(t, m.Pool, live, "other"), number(t, m.Pool, rows, "other"), number(t, m.Pool, keys, "other"); a != 120 || b != 120 || c != 1 {
		t.Errorf("the other project has %d streams, %d partitions, %d keys", a, b, c)
	}
}

// TestSeedJob: the seeding of 5,000 partitions whose broker ended is finished by another broker's job.
func TestSeedJob(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	m := broker(t, dsn)
	push(t, m.Engine, "seed.q", 1, 1)
	queue := int32(number(t, m.Pool, "select id from ferrymq.queues"))
	exec(t, m.Pool, `insert into ferrymq.partitions (public_id, queue_id, name) select gen_random_uuid(), $1, 'x' || n from generate_series(1, 5000) n`, queue)
	stop, cancel := context.WithCancel(t.Context())
	project := int32(number(t, m.Pool, "select id from ferrymq.projects where name = 'default'"))
	dying := catalog.New(stop, m.Pool, project, func(int32) { cancel() })
	g, err := dying.Register(t.Context(), queue, "g", catalog.All())
	if err != nil {
		t.Fatal(err)
	}
	dying.Wait()
	if n := number(t, m.Pool, "select count(*) from ferrymq.cursors"); n == 0 || n > 4000 {
		t.Fatalf("%d cursors when it died", n)
	}
	exec(t, m.Pool, "update ferrymq.jobs set due_at = clock_timestamp()") // 10 s later
	run(t, m).Kick()
	eventually(t, "seeding is finished", func() bool {
		return number(t, m.Pool, "select count(*) from ferrymq.groups where seeded and id = $1", g.ID) == 1 && number(t, m.Pool, "select count(*) from ferrymq.jobs") == 0
	})
	if n := number(t, m.Pool, "select count(*) from ferrymq.cursors where group_id = $1", g.ID); n != 5001 {
		t.Errorf("%d cursors", n)
	}
}

// TestReconfigured: a shorter delay frees what waited for the longer one, on every broker.
func TestReconfigured(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	a, b := run(t, broker(t, dsn)), run(t, broker(t, dsn))
	delay := func(seconds int32) {
		q, err := a.Engine.Catalog.Configure(t.Context(), "delay.q", func(q *catalog.Queue) error { q.DelayedProcessing = seconds; return nil })
		if err != nil {
			t.Fatal(err)
		}
		a.Engine.QueueChanged(q.ID)
		a.Bus.QueueChanged(q.ID)
		a.Kick()
	}
	delay(3600)
	push(t, a.Engine, "delay.q", 1, 1)
	p := func(wait time.Duration) *groupcommit.Pop {
		return &groupcommit.Pop{Queue: "delay.q", Group: "g", Named: true, Start: catalog.All(), Batch: 10, Partitions: 1, Wait: wait}
	}
	if d, err := b.Engine.Pop(t.Context(), p(0)); d != nil || err != nil {
		t.Fatal(d, err)
	}
	got := make(chan error, 1)
	go func() {
		d, err := b.Engine.Pop(context.Background(), p(20*time.Second))
		if d == nil && err == nil {
			err = context.DeadlineExceeded
		}
		got <- err
	}()
	delay(0)
	if err := <-got; err != nil {
		t.Error(err)
	}
}

// TestBeat: brokers see each other come and go.
func TestBeat(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	a, b := run(t, broker(t, dsn)), broker(t, dsn)
	b.Start()
	eventually(t, "both are known", func() bool { return number(t, a.Pool, "select count(*) from ferrymq.brokers") == 2 })
	b.Close()
	if n := number(t, a.Pool, "select count(*) from ferrymq.brokers"); n != 1 {
		t.Errorf("%d brokers after one left", n)
	}
}

// TestLaneEventsExpire: what happened in lanes is kept for 30 days.
func TestLaneEventsExpire(t *testing.T) {
	t.Parallel()
	m := broker(t, dbtest.New(t))
	exec(t, m.Pool, `insert into ferrymq.lane_events (group_id, partition_id, message_offset, kind, attempt, at)
		select 1, 1, i, 1, 1, now() - make_interval(days => 28 + i % 4) from generate_series(1, 4000) i`)
	run(t, m)
	eventually(t, "the old ones are gone", func() bool {
		return number(t, m.Pool, "select count(*) from ferrymq.lane_events where at < now() - interval '30 days'") == 0
	})
	if n := number(t, m.Pool, "select count(*) from ferrymq.lane_events"); n != 2000 {
		t.Errorf("%d are left", n)
	}
}
