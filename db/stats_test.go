package db_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/db"
)

// lane is a partition as the brute-force count sees it, with the cursors of the groups that live.
type lane struct {
	id, first, next, dead int64
	queue                 int32
	cursors               map[string]position
}

type position struct{ committed, leasedTo int64 } // leasedTo 0: no live lease

// judge counts one partition message by message.
func (p *lane) judge(only string) (head, pending, processing int64) {
	const mode = "__QUEUE_MODE__"
	head = -1
	for name, c := range p.cursors {
		if decides := name == only || only == "" && name != mode; decides && (head < 0 || c.committed < head) {
			head = c.committed
		}
	}
	if c, ok := p.cursors[mode]; head < 0 && only == "" && ok {
		head = c.committed
	}
	head = max(head, p.first, 0)
	for offset := head; offset < p.next; offset++ {
		pending++
		for name, c := range p.cursors {
			if (only == "" || only == name) && c.committed <= offset && offset < c.leasedTo {
				processing++
				break
			}
		}
	}
	return head, pending, processing
}

// TestNumbers makes random states of queues, groups, leases and holes, and counts them in two ways.
func TestNumbers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	names := []string{"__QUEUE_MODE__", "a", "b", "c"}
	for round := range 40 {
		seed := uint64(time.Now().UnixNano())
		rnd := rand.New(rand.NewPCG(seed, 0))
		w.exec("truncate ferrymq.partitions, ferrymq.segments, ferrymq.cursors, ferrymq.queues, ferrymq.groups, ferrymq.jobs, ferrymq.dead_letters restart identity")
		var queues []int32
		var parts []*lane
		for q := range int32(2 + rnd.IntN(4)) {
			queue := w.queue(fmt.Sprint("q", q), "")
			queues = append(queues, queue)
			var own []*lane
			for p := range rnd.IntN(5) {
				x := &lane{queue: queue, next: rnd.Int64N(20), cursors: map[string]position{}}
				x.first = rnd.Int64N(x.next + 1)
				x.id = one[int64](w, `insert into ferrymq.partitions (public_id, queue_id, name, first_offset, next_offset) values (gen_random_uuid(), $1, $2, $3, $4) returning id`,
					queue, fmt.Sprint("p", p), x.first, x.next)
				for at := x.first; at < x.next; { // all of it is so many seconds old as its offset says
					n := 1 + rnd.Int64N(x.next-at)
					w.exec(`insert into ferrymq.segments (partition_id, base_offset, count, key_no, codec, created_at, first_id, keys, frames)
						values ($1, $2, $3, 0, 0, now() - make_interval(secs => 1000 - $2::bigint), gen_random_uuid(), '', 'x')`, x.id, at, n)
					at += n
				}
				if x.dead = rnd.Int64N(3); x.dead > 0 {
					w.exec(`insert into ferrymq.dead_letters (id, queue_id, group_id, partition_id, message_offset, message_id, transaction_id, key_no, codec, frames, error_message, retry_count, message_created_at)
						select gen_random_uuid(), $1, 1, $2, 0, gen_random_uuid(), 't', 0, 0, 'f', 'e', 1, now() from generate_series(1, $3)`, queue, x.id, x.dead)
				}
				own = append(own, x)
			}
			for _, name := range append(slices.Clone(names), "gone", "v1") {
				if rnd.IntN(3) == 0 {
					continue
				}
				registered := rnd.IntN(2) == 0
				seeded := registered && rnd.IntN(3) > 0
				group := one[int32](w, `insert into ferrymq.groups (queue_id, kind, project_id, name, registered, seeded, start_mode, start_at, deleted_at)
					values ($1, case when $2 = 'v1' then 1 else 0 end, case when $2 = 'v1' then $1::int end, $2, $3, $4, 'all', to_timestamp(0), case when $2 = 'gone' then now() end) returning id`, queue, name, registered, seeded)
				for _, x := range own {
					if !(registered && seeded) && rnd.IntN(2) == 0 {
						continue
					}
					c := position{committed: rnd.Int64N(x.next + 1)}
					if rnd.IntN(3) == 0 {
						c.committed = x.next
					}
					pending := c.committed < x.next || rnd.IntN(4) == 0
					var batchEnd, until, notBefore any
					switch n := rnd.IntN(5); {
					case n < 3 && c.committed < x.next:
						end := c.committed + 1 + rnd.Int64N(x.next-c.committed)
						batchEnd, until = end, time.Now().Add(-time.Hour)
						if n < 2 {
							until, c.leasedTo = time.Now().Add(time.Hour), end
						}
					case n == 3 && pending:
						notBefore = time.Now().Add(time.Hour)
					}
					w.exec(`insert into ferrymq.cursors (group_id, partition_id, committed, pending, batch_end, lease_until, lease_id, not_before)
						values ($1, $2, $3, $4, $5, $6, case when $5::bigint is not null then gen_random_uuid() end, $7)`, group, x.id, c.committed, pending, batchEnd, until, notBefore)
					if slices.Contains(names, name) {
						x.cursors[name] = c
					}
				}
			}
			parts = append(parts, own...)
		}
		compare(w, rnd, queues, parts, names)
		if t.Failed() {
			t.Fatalf("round %d, seed %d", round, seed)
		}
	}
}

// compare holds every statement that counts against the brute-force count.
func compare(w *world, rnd *rand.Rand, queues []int32, parts []*lane, names []string) {
	t := w.t
	type sum struct{ partitions, total, pending, processing, dead, behind, ready int64 }
	sums := func(only string) map[int32]sum {
		of := map[int32]sum{}
		for _, p := range parts {
			s := of[p.queue]
			_, pending, processing := p.judge(only)
			s.partitions, s.total, s.pending, s.processing, s.dead = s.partitions+1, s.total+p.next-p.first, s.pending+pending, s.processing+processing, s.dead+p.dead
			if pending > 0 {
				s.behind++
			}
			if pending > processing {
				s.ready++
			}
			of[p.queue] = s
		}
		return of
	}
	want := sums("")
	rows := must[[]db.QueueNumbersRow](t)(w.QueueNumbers(w.ctx(), db.QueueNumbersParams{Ids: queues, Lag: true}))
	equal(t, "queues counted", len(rows), len(queues))
	var offsets, ages []int64
	for _, p := range parts {
		if head, pending, _ := p.judge(""); pending > 0 {
			offsets = append(offsets, pending)
			ages = append(ages, 1000-one[int64](w, "select max(base_offset) from ferrymq.segments where partition_id = $1 and base_offset <= $2", p.id, head))
		}
	}
	for _, r := range rows {
		s := want[r.QueueID]
		equal(t, fmt.Sprintf("numbers of queue %d", r.QueueID), sum{r.Partitions, r.Total, r.Pending, r.Processing, r.DeadLetter, 0, 0}, sum{s.partitions, s.total, s.pending, s.processing, s.dead, 0, 0})
		if len(offsets) > 0 {
			equal(t, "smallest backlog", r.OffsetMin, slices.Min(offsets))
			equal(t, "largest backlog", r.OffsetMax, slices.Max(offsets))
			for what, d := range map[string]int64{"youngest": r.TimeMin - slices.Min(ages), "oldest": r.TimeMax - slices.Max(ages)} {
				if d < 0 || d > 60 {
					t.Errorf("the %s backlog is off by %d s", what, d)
				}
			}
		} else {
			equal(t, "lag of nothing", [8]int64{r.OffsetAvg, r.OffsetMedian, r.OffsetMin, r.OffsetMax, r.TimeAvg, r.TimeMedian, r.TimeMin, r.TimeMax}, [8]int64{})
		}
		equal(t, "pending for maxSize", must[int64](t)(w.QueuePendingCount(w.ctx(), db.QueuePendingCountParams{QueueID: r.QueueID})), s.pending)
	}
	group := names[rnd.IntN(len(names))]
	for _, only := range []string{"", group, "never met"} {
		var param *string
		if only != "" {
			param = &only
		}
		want := sums(only)
		for _, q := range queues {
			found := must[[]db.QueueDepthRow](t)(w.QueueDepth(w.ctx(), db.QueueDepthParams{QueueID: q, Group: param, Max: 100}))
			s := want[q]
			equal(t, fmt.Sprintf("partitions with a backlog, queue %d, group %q", q, only), int64(len(found)), s.behind)
			for _, r := range found {
				equal(t, fmt.Sprintf("depth of queue %d for %q", q, only), sum{pending: r.AllPending, processing: r.AllProcessing, behind: r.Partitions, ready: r.PartitionsReady},
					sum{pending: s.pending, processing: s.processing, behind: s.behind, ready: s.ready})
			}
		}
	}
	var ids []int64
	of := map[int64]*lane{}
	for _, p := range parts {
		ids, of[p.id] = append(ids, p.id), p
	}
	for _, r := range must[[]db.PartitionNumbersRow](t)(w.PartitionNumbers(w.ctx(), db.PartitionNumbersParams{Ids: ids})) {
		p := of[r.ID]
		_, pending, processing := p.judge("")
		equal(t, fmt.Sprintf("numbers of partition %d", r.ID), [4]int64{r.Total, r.Pending, r.Processing, r.DeadLetter}, [4]int64{p.next - p.first, pending, processing, p.dead})
		equal(t, "a partition without messages has no oldest and newest", r.Oldest.IsZero() && r.Newest.IsZero(), p.next == p.first)
		delete(of, r.ID)
	}
	equal(t, "partitions not counted", len(of), 0)
}

// TestPartitionPage: pages by queue and name, each partition once.
func TestPartitionPage(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	var want []string
	for _, q := range []string{"b", "a", "c"} {
		id := w.queue(q, "")
		for p := range 7 {
			w.exec("insert into ferrymq.partitions (public_id, queue_id, name) values (gen_random_uuid(), $1, $2)", id, fmt.Sprint("p", 6-p))
			want = append(want, fmt.Sprint(q, "/p", p))
		}
		w.exec("insert into ferrymq.partitions (public_id, queue_id, name, hidden) values (gen_random_uuid(), $1, '~unkeyed/1', true)", id)
		want = append(want, q+"/~unkeyed/1")
	}
	slices.Sort(want)
	for _, size := range []int64{1, 2, 5, 7, 100} {
		var got []string
		for skip := int64(0); ; skip += size {
			rows := must[[]db.PartitionPageRow](t)(w.PartitionPage(w.ctx(), db.PartitionPageParams{ProjectID: 1, Last: strings.Repeat("\U0010ffff", 64), Max: size, Skip: skip, Upto: size + skip}))
			for _, r := range rows {
				got = append(got, r.Queue+"/"+r.Name)
			}
			if len(rows) == 0 {
				break
			}
		}
		equal(t, fmt.Sprint("partitions in pages of ", size), fmt.Sprint(got), fmt.Sprint(want))
	}
	rows := must[[]db.PartitionPageRow](t)(w.PartitionPage(w.ctx(), db.PartitionPageParams{ProjectID: 1, First: "b", Last: "b", Max: 100, Upto: 100}))
	equal(t, "partitions of one queue", len(rows), 8)
}

// TestNumbersOfManyPartitions: what a count of 100,000 idle partitions costs. The backlog of a queue does not grow with them.
func TestNumbersOfManyPartitions(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("builds a large data set")
	}
	w := newWorld(t, 2)
	check(t, pgx.BeginFunc(w.ctx(), w.pool, func(tx pgx.Tx) error { fill(t, tx, 100_000, 2, 1000, 100); return nil }))
	w.exec("analyze ferrymq.partitions, ferrymq.segments, ferrymq.cursors, ferrymq.queues, ferrymq.groups, ferrymq.dead_letters")
	ids := one[[]int32](w, "select array_agg(id) from ferrymq.queues")
	pool := must[*pgxpool.Pool](t)(db.NewPool(w.ctx(), w.dsn, 1, time.Minute)) // as a broker has it
	defer pool.Close()
	q := db.New(pool)
	for range 2 {
		began := time.Now()
		rows := must[[]db.QueueNumbersRow](t)(q.QueueNumbers(w.ctx(), db.QueueNumbersParams{Ids: ids, Lag: true}))
		t.Logf("%d queues counted in %v", len(rows), time.Since(began).Round(time.Millisecond))
		began = time.Now()
		n := must[int64](t)(q.QueuePendingCount(w.ctx(), db.QueuePendingCountParams{QueueID: 1}))
		t.Logf("backlog of the large queue, %d, counted in %v", n, time.Since(began).Round(time.Millisecond))
	}
}
