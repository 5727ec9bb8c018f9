package catalog_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
	"ferrymq/segment"
)

func TestMain(m *testing.M) { dbtest.Main(m) }

// engine is an engine alone on a database: what the catalog is for.
func engine(t *testing.T, dsn string) *groupcommit.Engine {
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
	e := groupcommit.New(groupcommit.Options{Pool: pool, Log: quiet, Hasher: segment.NewHasher(uint64(installation.HashSeed)), Project: project, DBNow: installation.Now,
		Width: 2, DedupBytes: 1 << 20, PushQueueMax: 1000, MaxParked: 1000, StatementTimeout: 30 * time.Second,
		Recheck: groupcommit.Recheck{Initial: 100 * time.Millisecond, Threshold: 3, Multiplier: 2, Max: time.Second}})
	t.Cleanup(e.Close)
	return e
}

func push(t *testing.T, e *groupcommit.Engine, queue, partition, payload string) {
	t.Helper()
	if err := tryPush(e, queue, partition, payload); err != nil {
		t.Fatalf("push: %v", err)
	}
}

func tryPush(e *groupcommit.Engine, queue, partition, payload string) error {
	ctx := context.Background()
	q, err := e.Catalog.EnsureQueue(ctx, queue)
	if err != nil {
		return err
	}
	found, err := e.Catalog.Partitions(ctx, q, []string{partition})
	if err != nil {
		return err
	}
	p := &groupcommit.Push{Queue: q, Partition: found[0], Messages: []segment.Message{{Payload: []byte(payload)}}}
	if err := e.Push(ctx, []*groupcommit.Push{p}); err != nil {
		return err
	}
	return p.Err
}

var (
	all   = catalog.All()
	fresh = catalog.Start{Mode: "new"}
)

func wide(queue, group string, start catalog.Start) *groupcommit.Pop {
	return &groupcommit.Pop{Queue: queue, Group: group, Named: group != catalog.QueueMode, Start: start, Batch: 10_000, Partitions: 10_000, AutoAck: true}
}

func route(queue, partition, group string, start catalog.Start) *groupcommit.Pop {
	p := wide(queue, group, start)
	p.Partition = &partition
	return p
}

func scoped(namespace, task, group string, start catalog.Start) *groupcommit.Pop {
	p := wide("", group, start)
	p.Scope = catalog.Scope{Namespace: namespace, Task: task}
	return p
}

// pop returns the payloads it got, by queue/partition.
func pop(t *testing.T, e *groupcommit.Engine, p *groupcommit.Pop) map[string]string {
	t.Helper()
	d, err := e.Pop(t.Context(), p)
	if err != nil {
		t.Fatalf("pop: %v", err)
	}
	out := make(map[string]string)
	if d == nil {
		return out
	}
	for _, s := range d.Spans {
		for _, g := range s.Segments {
			open, err := segment.Decode(nil, g.Codec, g.KeyNo, g.FirstID, int(g.Count), g.Frames)
			if err != nil {
				t.Fatal(err)
			}
			for i := max(s.Start-g.Base, 0); i < min(s.Start+s.Take-g.Base, int64(g.Count)); i++ {
				out[s.Queue.Name+"/"+s.Partition.Name] += string(open.At(int(i)).Payload)
			}
		}
	}
	return out
}

func expect(t *testing.T, what string, got map[string]string, want ...string) {
	t.Helper()
	w := make(map[string]string)
	for i := 0; i < len(want); i += 2 {
		w[want[i]] = want[i+1]
	}
	if fmt.Sprint(got) != fmt.Sprint(w) {
		t.Errorf("%s: got %v, want %v", what, got, w)
	}
}

func number(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) (n int64) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestStarts(t *testing.T) {
	t.Parallel()
	e := engine(t, dbtest.New(t))
	push(t, e, "s.q", "a", "1")
	expect(t, "new: backlog skipped", pop(t, e, wide("s.q", "n", fresh)))
	push(t, e, "s.q", "a", "2")
	push(t, e, "s.q", "b", "3")
	expect(t, "new: what came after, all of a later partition", pop(t, e, wide("s.q", "n", fresh)), "s.q/a", "2", "s.q/b", "3")
	expect(t, "queue mode ignores the start", pop(t, e, wide("s.q", catalog.QueueMode, all)), "s.q/a", "12", "s.q/b", "3")
	expect(t, "all", pop(t, e, wide("s.q", "all", all)), "s.q/a", "12", "s.q/b", "3")
	push(t, e, "s.q", "a", "4")
	expect(t, "registered: parameters are ignored", pop(t, e, wide("s.q", "n", all)), "s.q/a", "4")
	var between time.Time
	if err := e.Pool.QueryRow(t.Context(), "select created_at from ferrymq.segments order by created_at offset 1 limit 1").Scan(&between); err != nil {
		t.Fatal(err)
	}
	expect(t, "a time: the first segment at or after it", pop(t, e, wide("s.q", "time", catalog.Start{Mode: "time", At: &between})), "s.q/a", "24", "s.q/b", "3")
	future := time.Now().Add(time.Hour)
	expect(t, "a time to come", pop(t, e, wide("s.q", "future", catalog.Start{Mode: "time", At: &future})))
	push(t, e, "s.q", "a", "5")
	push(t, e, "s.q", "later", "6")
	got := pop(t, e, wide("s.q", "future", all))
	if got["s.q/a"] != "5" {
		t.Errorf("a time to come, next push: %v", got)
	}
}

// TestPartitionRoute: the route fixes the start of its partition, creates it for a named group, and registers nothing.
func TestPartitionRoute(t *testing.T) {
	t.Parallel()
	e := engine(t, dbtest.New(t))
	// Scenario 53.
	expect(t, "missing partition", pop(t, e, route("r.q", "p", "g", fresh)))
	push(t, e, "r.q", "p", "1")
	expect(t, "what came after the first contact", pop(t, e, route("r.q", "p", "g", fresh)), "r.q/p", "1")
	push(t, e, "r.q", "other", "2")
	if n := number(t, e.Pool, "select count(*) from ferrymq.groups where registered"); n != 0 {
		t.Errorf("%d groups are registered by the partition route", n)
	}
	if n := number(t, e.Pool, "select count(*) from ferrymq.cursors"); n != 1 {
		t.Errorf("%d cursors, want that of the one partition", n)
	}
	expect(t, "another partition: its own first contact", pop(t, e, route("r.q", "other", "g", fresh)))
	push(t, e, "r.q", "other", "3")
	expect(t, "pair contacted: parameters are ignored", pop(t, e, route("r.q", "other", "g", all)), "r.q/other", "3")
	// Queue mode does not create.
	expect(t, "queue mode", pop(t, e, route("r.q", "missing", catalog.QueueMode, all)))
	if n := number(t, e.Pool, "select count(*) from ferrymq.partitions where name = 'missing'"); n != 0 {
		t.Error("queue mode made a partition")
	}
	push(t, e, "r.q", "missing", "4")
	expect(t, "queue mode, from the beginning", pop(t, e, route("r.q", "missing", catalog.QueueMode, all)), "r.q/missing", "4")
	// A registration later on keeps the cursors that are there and gives the others its own start.
	push(t, e, "r.q", "p", "5")
	push(t, e, "r.q", "third", "6")
	got := pop(t, e, wide("r.q", "g", all)) // may leave before every cursor is made; the next one waits for them
	for k, v := range pop(t, e, wide("r.q", "g", all)) {
		got[k] += v
	}
	expect(t, "registered later", got, "r.q/p", "5", "r.q/third", "6", "r.q/missing", "4")
	// Registered: the route's parameters are ignored.
	push(t, e, "r.q", "fourth", "7")
	expect(t, "registered, route", pop(t, e, route("r.q", "fourth", "g", fresh)), "r.q/fourth", "7")
}

func TestDiscovery(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	e, other := engine(t, dsn), engine(t, dsn)
	push(t, e, "ns.old", "p", "1")
	push(t, e, "else.task", "p", "0")
	expect(t, "new: backlog skipped", pop(t, e, scoped("ns", "", "g", fresh)))
	// Scenario 52: a queue made later, here or on another broker, is registered with that first time.
	push(t, other, "ns.later", "p", "2")
	push(t, e, "ns.old", "p", "3")
	expect(t, "a queue made later", pop(t, e, scoped("ns", "", "g", fresh)), "ns.later/p", "2", "ns.old/p", "3")
	expect(t, "known on the other broker, whatever it says", pop(t, other, scoped("ns", "", "g", all)))
	expect(t, "by task", pop(t, e, scoped("", "task", "g", all)), "else.task/p", "0")
	expect(t, "by both", pop(t, e, scoped("ns", "old", "h", all)), "ns.old/p", "13")
	expect(t, "both have to match", pop(t, e, scoped("ns", "task", "h", all)))
	// A queue that starts to match by a configure has the group, from its first time: everything pushed since.
	push(t, other, "far.away", "p", "4")
	if _, err := other.Catalog.Configure(t.Context(), "far.away", func(q *catalog.Queue) error { q.Namespace = "ns"; return nil }); err != nil {
		t.Fatal(err)
	}
	if n := number(t, e.Pool, `select count(*) from ferrymq.groups g join ferrymq.queues q on q.id = g.queue_id where q.name = 'far.away' and g.name = 'g' and g.registered`); n != 1 {
		t.Error("configure did not register the group")
	}
	push(t, other, "far.away", "p", "5")
	expect(t, "a queue that moved into the scope", pop(t, e, scoped("ns", "", "g", fresh)), "far.away/p", "45")
	// A queue deleted and made again starts anew.
	if _, existed, err := e.Catalog.Delete(t.Context(), "ns.later"); !existed || err != nil {
		t.Fatal(existed, err)
	}
	push(t, e, "ns.later", "p", "6")
	expect(t, "a queue made again", pop(t, e, scoped("ns", "", "g", fresh)), "ns.later/p", "6")
}

// TestRegistrationRace: a group registers with start "new" while both brokers push. What was answered before its first pop
// began is skipped, what was sent after that pop ended is delivered, in between either.
func TestRegistrationRace(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	es := []*groupcommit.Engine{engine(t, dsn), engine(t, dsn)}
	rounds := 60
	if testing.Short() {
		rounds = 10
	}
	for round := range rounds {
		queue := fmt.Sprint("race.", round)
		var mu sync.Mutex
		type sent struct{ began, ended time.Time }
		log := make(map[string]sent)
		var work sync.WaitGroup
		stop := make(chan struct{})
		for i := range 4 {
			work.Go(func() {
				for n := 0; ; n++ {
					select {
					case <-stop:
						return
					default:
					}
					payload := fmt.Sprintf("[%d.%d]", i, n)
					began := time.Now()
					if err := tryPush(es[i%2], queue, fmt.Sprint("p", n%7), payload); err != nil {
						t.Errorf("push: %v", err)
						return
					}
					mu.Lock()
					log[payload] = sent{began, time.Now()}
					mu.Unlock()
				}
			})
		}
		for enough := false; !enough; { // some before the first contact
			mu.Lock()
			enough = len(log) >= 8 || t.Failed()
			mu.Unlock()
		}
		got := ""
		collect := func(e *groupcommit.Engine) {
			for _, s := range pop(t, e, wide(queue, "g", fresh)) {
				got += s
			}
		}
		began := time.Now()
		var contact sync.WaitGroup
		parts := make([]string, 2)
		for i, e := range es { // both brokers at once
			contact.Go(func() {
				for _, s := range pop(t, e, wide(queue, "g", fresh)) {
					parts[i] += s
				}
			})
		}
		contact.Wait()
		ended := time.Now()
		got = parts[0] + parts[1]
		close(stop)
		work.Wait()
		push(t, es[0], queue, "p0", "[last]")
		push(t, es[1], queue, "brand new", "[last]")
		collect(es[round%2])
		seen := make(map[string]int)
		for _, p := range splitPayloads(got) {
			seen[p]++
		}
		if seen["[last]"] != 2 {
			t.Errorf("round %d: the last ones came %d times", round, seen["[last]"])
		}
		for p, s := range log {
			switch {
			case s.ended.Before(began) && seen[p] > 0:
				t.Errorf("round %d: %s was there before the first contact and was delivered", round, p)
			case s.began.After(ended) && seen[p] != 1, seen[p] > 1:
				t.Errorf("round %d: %s was delivered %d times", round, p, seen[p])
			}
		}
		if t.Failed() {
			return
		}
	}
}

func splitPayloads(s string) (out []string) {
	for i, from := 0, 0; i < len(s); i++ {
		if s[i] == ']' {
			out, from = append(out, s[from:i+1]), i+1
		}
	}
	return out
}

// TestSeedTakenOver: a broker registers a group on 5,000 partitions and ends at once; another one's job finishes the seeding.
func TestSeedTakenOver(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	e := engine(t, dsn)
	push(t, e, "seed.q", "p", "1")
	queue := number(t, e.Pool, "select id from ferrymq.queues where name = 'seed.q'")
	if _, err := e.Pool.Exec(t.Context(), `insert into ferrymq.partitions (public_id, queue_id, name) select gen_random_uuid(), $1, 'x' || n from generate_series(1, 5000) n`, queue); err != nil {
		t.Fatal(err)
	}
	// The one that dies: its first chunk is committed, then its context ends.
	stop, cancel := context.WithCancel(t.Context())
	pool := dbtest.Pool(t, dsn, 3)
	project := number(t, pool, "select id from ferrymq.projects where name = 'default'")
	chunks := 0
	dying := catalog.New(stop, pool, int32(project), func(int32) {
		if chunks++; chunks == 1 {
			cancel()
		}
	})
	g, err := dying.Register(t.Context(), int32(queue), "g", all)
	if err != nil {
		t.Fatal(err)
	}
	<-g.Seeded()
	dying.Wait()
	have := number(t, e.Pool, "select count(*) from ferrymq.cursors where group_id = $1", g.ID)
	if have == 0 || have > 4000 {
		t.Fatalf("%d cursors when it died", have)
	}
	if n := number(t, e.Pool, "select count(*) from ferrymq.jobs where kind = 'seed' and group_id = $1", g.ID); n != 1 {
		t.Fatalf("%d seed jobs", n)
	}
	if err := e.Catalog.Seed(t.Context(), g.ID); err != nil { // what the job does
		t.Fatal(err)
	}
	if n := number(t, e.Pool, "select count(*) from ferrymq.cursors where group_id = $1", g.ID); n != 5001 {
		t.Errorf("%d cursors", n)
	}
	if n := number(t, e.Pool, "select count(*) from ferrymq.jobs"); n != 0 {
		t.Errorf("%d jobs are left", n)
	}
	expect(t, "after seeding", pop(t, e, wide("seed.q", "g", all)), "seed.q/p", "1")
}

// TestForgotten: what a catalog remembers of a queue that another broker deleted is found out.
func TestForgotten(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	a, b := engine(t, dsn), engine(t, dsn)
	push(t, a, "gone.q", "p", "1")
	push(t, b, "gone.q", "p", "2")
	expect(t, "before", pop(t, b, wide("gone.q", "g", all)), "gone.q/p", "12")
	if _, existed, err := a.Catalog.Delete(t.Context(), "gone.q"); !existed || err != nil {
		t.Fatal(existed, err)
	}
	if _, existed, err := a.Catalog.Delete(t.Context(), "gone.q"); existed || err != nil {
		t.Errorf("deleted twice: %v %v", existed, err)
	}
	push(t, b, "gone.q", "p", "3")
	push(t, a, "gone.q", "p", "4")
	expect(t, "made again", pop(t, b, wide("gone.q", "g", all)), "gone.q/p", "34")
	if n := number(t, a.Pool, "select count(*) from ferrymq.queues where name = 'gone.q' and deleted_at is null"); n != 1 {
		t.Errorf("%d live queues of that name", n)
	}
	found, err := a.Catalog.Public(t.Context(), []uuid.UUID{uuid.New()})
	if len(found) != 0 || err != nil {
		t.Errorf("an unknown id: %v %v", found, err)
	}
}

// TestOneQueue: many first uses of a name, on two brokers, make one queue.
func TestOneQueue(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	es := []*groupcommit.Engine{engine(t, dsn), engine(t, dsn)}
	var work sync.WaitGroup
	for i := range 40 {
		work.Go(func() {
			if err := tryPush(es[i%2], "one.q", fmt.Sprint("p", i%4), "x"); err != nil {
				t.Errorf("push: %v", err)
			}
		})
	}
	work.Wait()
	if q, p, n := number(t, es[0].Pool, "select count(*) from ferrymq.queues"), number(t, es[0].Pool, "select count(*) from ferrymq.partitions"),
		number(t, es[0].Pool, "select sum(next_offset)::bigint from ferrymq.partitions"); q != 1 || p != 4 || n != 40 {
		t.Errorf("%d queues, %d partitions, %d messages", q, p, n)
	}
}
