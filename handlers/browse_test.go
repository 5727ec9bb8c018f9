package handlers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/db"
	"ferrymq/dbtest"
)

// seen is a message as a page shows it, without its contents.
type seen struct {
	Partition, Offset    int64
	Status, QueueStatus  string
	Consumed, TotalNamed int
}

// fetches counts the segments a session has read by index.
const fetches = "select idx_tup_fetch from pg_stat_xact_user_tables where relname = 'segments'"

// look cuts a page in a snapshot of its own.
func look(t *testing.T, pool *pgxpool.Pool, w walk, offset, limit int64) (page []seen, fetched int64) {
	t.Helper()
	err := pgx.BeginTxFunc(t.Context(), pool, db.Snapshot, func(tx pgx.Tx) error {
		w.q, w.project = db.New(tx), 1
		var before int64
		if err := tx.QueryRow(t.Context(), fetches).Scan(&before); err != nil {
			return err
		}
		runs, err := w.page(t.Context(), offset, limit)
		if err != nil {
			return err
		}
		for _, r := range runs {
			for o := r.hi - 1; o >= r.lo; o-- {
				s := w.places[r.lane]
				m := seen{Partition: r.lane, Offset: o, Status: s.status(o), QueueStatus: s.queueStatus(o)}
				if w.dead[deadKey{r.lane, o}] {
					m.Status = statusDead
				}
				m.Consumed, m.TotalNamed = s.consumed(o)
				page = append(page, m)
			}
		}
		err = tx.QueryRow(t.Context(), fetches).Scan(&fetched)
		fetched -= before
		return err
	})
	if err != nil {
		t.Fatal(db.Text(err))
	}
	return page, fetched
}

func exec(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %s", sql, db.Text(err))
	}
}

// scatter fills a database with messages whose times are often equal, cursors, leases and dead letters.
func scatter(t *testing.T, pool *pgxpool.Pool, rng *rand.Rand, start time.Time) {
	t.Helper()
	b := &pgx.Batch{}
	for q := 1; q <= 5; q++ {
		b.Queue("insert into ferrymq.queues (project_id, name, namespace, task) values (1, $1, $2, '')", fmt.Sprint("q", q), fmt.Sprint("n", q%2))
	}
	groups := map[int][]int{1: {}, 2: {1}, 3: {2, 3}, 4: {4, 5, 6}, 5: {7, 8}} // none, queue mode, hybrid, two named and one of single partitions, named
	for q := 2; q <= 5; q++ {
		for _, g := range groups[q] {
			name := fmt.Sprint("g", g)
			if g == 1 || g == 2 {
				name = "__QUEUE_MODE__"
			}
			b.Queue("insert into ferrymq.groups (queue_id, name, registered, start_mode, start_at) values ($1, $2, $3, 'all', now())", q, name, g != 6)
		}
	}
	for p := 1; p <= 300; p++ {
		q := 1 + rng.IntN(5)
		at, base := start.Add(time.Duration(rng.IntN(20))*time.Minute), int64(0)
		for range rng.IntN(7) {
			count := 1 + rng.IntN(4)
			b.Queue(`insert into ferrymq.segments (partition_id, base_offset, count, key_no, codec, created_at, first_id, keys, frames)
				values ($1, $2, $3, 0, 0, $4, gen_random_uuid(), '', '')`, p, base, count, at)
			base += int64(count)
			at = at.Add(time.Duration(rng.IntN(3)) * time.Minute)
		}
		first := int64(0)
		if base > 0 && rng.IntN(3) == 0 {
			first = rng.Int64N(base + 1)
		}
		b.Queue(`insert into ferrymq.partitions (public_id, queue_id, name, next_offset, first_offset, created_at, last_push_at)
			values (gen_random_uuid(), $1, $2, $3, $4, $5, (select max(created_at) from ferrymq.segments where partition_id = $6))`,
			q, fmt.Sprint("p", p%40, "-", p/40), base, first, start.Add(-time.Hour), p)
		for _, g := range groups[q] {
			committed := rng.Int64N(base + 1)
			switch rng.IntN(4) {
			case 0: // not met yet
			case 1:
				if committed < base {
					b.Queue("insert into ferrymq.cursors (group_id, partition_id, committed, pending, lease_id, batch_end, lease_until) values ($1, $2, $3, true, gen_random_uuid(), $4, now() + $5::int * interval '1 hour')",
						g, p, committed, committed+1+rng.Int64N(base-committed), 1-2*rng.IntN(2))
				}
			default:
				b.Queue("insert into ferrymq.cursors (group_id, partition_id, committed, pending) values ($1, $2, $3, true)", g, p, committed)
			}
		}
		for range rng.IntN(4) {
			b.Queue(`insert into ferrymq.dead_letters (id, queue_id, group_id, partition_id, message_offset, message_id, transaction_id, key_no, codec, frames, error_message, retry_count, message_created_at)
				values (gen_random_uuid(), $1, 1, $2, $3, gen_random_uuid(), 't', 0, 0, '', 'e', 0, now())`, q, p, rng.Int64N(base+1))
		}
	}
	if err := pool.SendBatch(t.Context(), b).Close(); err != nil {
		t.Fatal(db.Text(err))
	}
}

// reference is all messages in the order of the contract, each judged by itself.
const reference = `
	select m.partition_id, m.o,
	       case when exists (select from ferrymq.dead_letters d where d.partition_id = m.partition_id and d.message_offset = m.o) then 'dead_letter'
	            when g.named > 0 and g.passed = g.named or g.named = 0 and g.queue_passed then 'completed'
	            when g.leased then 'processing' else 'pending' end,
	       case when g.queue_passed then 'completed' when g.queue_leased then 'processing' else 'pending' end, g.passed, g.named,
	       m.created_at, m.queue, m.namespace, m.name
	from (select s.partition_id, s.base_offset + i as o, s.created_at, q.name as queue, q.namespace, p.name, p.queue_id
	      from ferrymq.segments s join ferrymq.partitions p on p.id = s.partition_id join ferrymq.queues q on q.id = p.queue_id, generate_series(0, s.count - 1) i
	      where s.base_offset + i >= p.first_offset) m
	cross join lateral (
	    select count(*) filter (where not x.queue) as named, count(*) filter (where not x.queue and x.committed > m.o) as passed,
	           coalesce(bool_or(x.queue and x.committed > m.o), false) as queue_passed,
	           coalesce(bool_or(x.lease_until > now() and m.o >= x.committed and m.o < x.batch_end), false) as leased,
	           coalesce(bool_or(x.queue and x.lease_until > now() and m.o >= x.committed and m.o < x.batch_end), false) as queue_leased
	    from (select g.name = '__QUEUE_MODE__' as queue, coalesce(c.committed, 0) as committed, c.lease_until, c.batch_end
	          from ferrymq.groups g left join ferrymq.cursors c on c.group_id = g.id and c.partition_id = m.partition_id
	          where g.queue_id = m.queue_id and (g.registered or c.committed is not null)) x) g
	order by m.created_at desc, m.partition_id, m.o desc`

// TestBrowse compares pages with what a query over everything says.
func TestBrowse(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	pool := dbtest.Pool(t, dbtest.Through(t, dbtest.New(t)), 2)
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	scatter(t, pool, rng, start)
	type message struct {
		seen
		at                     time.Time
		queue, namespace, name string
	}
	rows, err := pool.Query(t.Context(), reference)
	if err != nil {
		t.Fatal(db.Text(err))
	}
	all, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (m message, err error) {
		return m, r.Scan(&m.Partition, &m.Offset, &m.Status, &m.QueueStatus, &m.Consumed, &m.TotalNamed, &m.at, &m.queue, &m.namespace, &m.name)
	})
	if err != nil {
		t.Fatal(db.Text(err))
	}
	ids := map[string]int32{"q1": 1, "q2": 2, "q3": 3, "q4": 4, "q5": 5}
	found := map[string]int{}
	for range 200 {
		w := walk{from: start.Add(-time.Hour), to: start.Add(100 * time.Hour)}
		if rng.IntN(2) == 0 {
			w.from = start.Add(time.Duration(rng.IntN(35)) * time.Minute)
		}
		if rng.IntN(2) == 0 {
			w.to = start.Add(time.Duration(rng.IntN(35)) * time.Minute)
		}
		w.status = []string{"", "", statusPending, statusProcessing, statusCompleted, statusDead}[rng.IntN(6)]
		if rng.IntN(2) == 0 {
			w.queues = []int32{}
			for range rng.IntN(3) {
				w.queues = append(w.queues, int32(1+rng.IntN(5)))
			}
			slices.Sort(w.queues)
			w.queues = slices.Compact(w.queues)
		}
		if w.queues != nil && rng.IntN(4) == 0 {
			w.name = fmt.Sprint("p", rng.IntN(40), "-", rng.IntN(8))
		}
		limit, offset := 1+rng.Int64N(60), rng.Int64N(60)
		if rng.IntN(4) == 0 {
			limit, offset = 1+rng.Int64N(1000), rng.Int64N(1000)
		}
		var want []seen
		skip := offset
		for _, m := range all {
			if m.at.Before(w.from) || !m.at.Before(w.to) || w.status != "" && m.Status != w.status || w.name != "" && m.name != w.name ||
				w.queues != nil && !slices.Contains(w.queues, ids[m.queue]) {
				continue
			}
			if skip--; skip < 0 && int64(len(want)) < limit {
				want = append(want, m.seen)
			}
		}
		got, _ := look(t, pool, w, offset, limit)
		found[w.status] += len(got)
		if !slices.Equal(got, want) {
			at := 0
			for at < len(got) && at < len(want) && got[at] == want[at] {
				at++
			}
			t.Fatalf("%+v offset %d limit %d: %d messages, want %d, from %d on they differ\ngot  %+v\nwant %+v", w, offset, limit, len(got), len(want), at,
				got[at:min(at+3, len(got))], want[at:min(at+3, len(want))])
		}
	}
	t.Log(len(all), "messages, pages had", found)
}

// TestBrowseBounded: a page of many partitions reads few segments, wherever the page lies in time.
func TestBrowseBounded(t *testing.T) {
	t.Parallel()
	pool := dbtest.Pool(t, dbtest.Through(t, dbtest.New(t)), 2)
	exec(t, pool, "insert into ferrymq.queues (project_id, name, namespace, task) values (1, 'q', 'q', '')")
	exec(t, pool, `insert into ferrymq.partitions (public_id, queue_id, name, next_offset, created_at, last_push_at)
		select gen_random_uuid(), 1, 'p' || i, 50, now() - interval '1 day', now() - i * interval '1 millisecond' from generate_series(1, 2000) i`)
	exec(t, pool, `insert into ferrymq.segments (partition_id, base_offset, count, key_no, codec, created_at, first_id, keys, frames)
		select p.id, s, 1, 0, 0, p.last_push_at - (49 - s) * interval '1 minute', gen_random_uuid(), '', '' from ferrymq.partitions p, generate_series(0, 49) s`)
	exec(t, pool, "analyze ferrymq.partitions, ferrymq.segments")
	now := time.Now()
	for _, c := range []struct {
		w             walk
		offset, limit int64
		most          int64
	}{
		{walk{from: now.Add(-3 * time.Hour), to: now.Add(time.Hour)}, 0, 200, 2000},
		{walk{from: now.Add(-3 * time.Hour), to: now.Add(time.Hour)}, 1000, 200, 10_000},
		{walk{from: now.Add(-3 * time.Hour), to: now.Add(time.Hour), queues: []int32{1}}, 0, 50, 1000},
		{walk{from: now.Add(-3 * time.Hour), to: now.Add(time.Hour), queues: []int32{1}, name: "p7"}, 0, 10, 100},
		// In the past each partition may be the first: a few segments and a search in each, but no walk.
		{walk{from: now.Add(-3 * time.Hour), to: now.Add(-30 * time.Minute)}, 0, 50, 2000 * 30},
		{walk{from: now.Add(-3 * time.Hour), to: now.Add(time.Hour), status: statusDead}, 0, 50, 0},
		{walk{from: now.Add(-3 * time.Hour), to: now.Add(time.Hour), status: statusCompleted}, 0, 50, 0},
	} {
		page, fetched := look(t, pool, c.w, c.offset, c.limit)
		if want := c.limit; (c.w.status != "") != (len(page) == 0) || len(page) > 0 && int64(len(page)) != want {
			t.Errorf("%+v: %d messages", c.w, len(page))
		}
		if fetched > c.most {
			t.Errorf("%+v: read %d segments, more than %d", c.w, fetched, c.most)
		}
	}
}

// TestBrowseUnderTraffic: while messages come and go, pages of a range that is over show nothing twice, and what was there all
// the time is shown unless something newer of the range was removed meanwhile. Nobody waits for anybody.
func TestBrowseUnderTraffic(t *testing.T) {
	t.Parallel()
	pool := dbtest.Pool(t, dbtest.Through(t, dbtest.New(t)), 4)
	exec(t, pool, "insert into ferrymq.queues (project_id, name, namespace, task) values (1, 'q', 'q', '')")
	exec(t, pool, `insert into ferrymq.partitions (public_id, queue_id, name, next_offset, created_at, last_push_at)
		select gen_random_uuid(), 1, 'p' || i, 20, now() - interval '3 hours', now() - interval '1 hour' from generate_series(1, 20) i`)
	exec(t, pool, `insert into ferrymq.segments (partition_id, base_offset, count, key_no, codec, created_at, first_id, keys, frames)
		select p, s * 2, 2, 0, 0, now() - interval '1 hour' - (9 - s) * interval '1 minute', gen_random_uuid(), '', '' from generate_series(1, 20) p, generate_series(0, 9) s`)
	removing := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- func() error {
			for i := 0; ; i++ {
				select {
				case <-ctx.Done():
					return nil
				default:
				}
				err := pgx.BeginFunc(context.WithoutCancel(ctx), pool, func(tx pgx.Tx) error {
					b := &pgx.Batch{}
					b.Queue("select from ferrymq.partitions where id = $1 for update", 1+i%20)
					b.Queue(`with moved as (update ferrymq.partitions set next_offset = next_offset + 1, last_push_at = clock_timestamp() where id = $1 returning id, next_offset, last_push_at)
						insert into ferrymq.segments select id, next_offset - 1, 1, 0, 0, last_push_at, gen_random_uuid(), '', '' from moved`, 1+i%20)
					select {
					case <-removing:
						b.Queue("update ferrymq.partitions set first_offset = first_offset + 1 where id = $1 and first_offset < 10", 1+i%20)
						b.Queue("delete from ferrymq.segments s using ferrymq.partitions p where p.id = $1 and s.partition_id = p.id and s.base_offset + s.count <= p.first_offset", 1+i%20)
					default:
					}
					return tx.SendBatch(context.Background(), b).Close()
				})
				if err != nil {
					return err
				}
			}
		}()
	}()
	for _, removal := range []bool{false, true} {
		if removal {
			close(removing)
		}
		for range 5 {
			w := walk{from: time.Now().Add(-3 * time.Hour), to: time.Now().Add(-30 * time.Minute)}
			met := map[[2]int64]bool{}
			for offset := int64(0); ; offset += 17 {
				page, _ := look(t, pool, w, offset, 17)
				for _, m := range page {
					if k := [2]int64{m.Partition, m.Offset}; met[k] {
						t.Fatalf("message %v is shown twice", k)
					} else {
						met[k] = true
					}
				}
				if len(page) < 17 {
					break
				}
			}
			if !removal && len(met) != 400 {
				t.Errorf("%d messages, want 400", len(met))
			}
			if removal && len(met) < 200 {
				t.Errorf("%d messages, but 200 were never removed", len(met))
			}
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(db.Text(err))
	}
}

// TestBrowseNeverWaits: a page, and the search for one message, pass by every row lock.
func TestBrowseNeverWaits(t *testing.T) {
	t.Parallel()
	pool := dbtest.Pool(t, dbtest.Through(t, dbtest.New(t)), 2)
	scatter(t, pool, rand.New(rand.NewPCG(1, 2)), time.Now().Add(-time.Hour))
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	for _, table := range []string{"queues", "groups", "partitions", "segments", "cursors", "dead_letters"} {
		if _, err := tx.Exec(t.Context(), "select from ferrymq."+table+" for update"); err != nil {
			t.Fatal(err)
		}
	}
	for _, status := range []string{"", statusPending, statusProcessing, statusCompleted, statusDead} {
		if page, _ := look(t, pool, walk{from: time.Now().Add(-9 * time.Hour), to: time.Now().Add(time.Hour), status: status}, 0, 50); len(page) != 50 {
			t.Errorf("%d messages", len(page))
		}
	}
}

// TestStream: an answer that fails on the way is broken off, one that fails before is an error, a short one has its length.
func TestStream(t *testing.T) {
	t.Parallel()
	mebibyte := strings.Repeat("x", streamAhead)
	for _, c := range []struct {
		parts []string
		err   error
		want  string // empty: the client must notice
	}{
		{parts: []string{`"a"`}, want: `"a"`},
		{parts: []string{`"` + mebibyte, mebibyte, `"`}, want: `"` + mebibyte + mebibyte + `"`},
		{parts: []string{`"`}, err: failed("query failed"), want: `{"error":"query failed"}`},
		{parts: []string{`"` + mebibyte, `x`}, err: errors.New("gone")},
	} {
		a := quiet()
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			s := &stream{api: a, w: w}
			for _, p := range c.parts {
				s.b = append(s.b, p...)
				if err := s.flush(); err != nil {
					t.Error(err)
				}
			}
			if err := s.end(c.err); err != nil {
				a.fail(w, r, err)
			}
		}))
		resp, err := http.Get(server.URL)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		server.Close()
		if (err != nil) != (c.want == "") || err == nil && (string(body) != c.want || resp.Header.Get("Content-Type") != "application/json") {
			t.Errorf("%d parts, %v: %d bytes, %v", len(c.parts), c.err, len(body), err)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}

func quiet() *API { return &API{Log: slog.New(slog.NewTextHandler(io.Discard, nil))} }
