package db_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/db"
	"ferrymq/dbtest"
	"ferrymq/schema"
)

// traffic remembers in which order a connection was written to and read from.
type traffic struct {
	net.Conn
	mu    sync.Mutex
	turns string // w and r, repetitions left out
}

func (c *traffic) note(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !strings.HasSuffix(c.turns, what) {
		c.turns += what
	}
}

func (c *traffic) Write(b []byte) (int, error) {
	c.note("w")
	return c.Conn.Write(b)
}

func (c *traffic) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.note("r")
	}
	return n, err
}

func (c *traffic) reset() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.turns
	c.turns = ""
	return t
}

// big is a flush of n operations: pushes, settles and claims.
func big(n int, partitions []int64, group int32) *flight {
	f := &flight{}
	l := list{group: group, scan: true}
	for i := range n {
		p := partitions[i%len(partitions)]
		switch i % 3 {
		case 0:
			if i < len(partitions) {
				f.pushes = append(f.pushes, push{p, -1, []int{1}})
			}
		case 1:
			if i < len(partitions) {
				f.settles = append(f.settles, settle{group: group, partition: p, lease: uuid.New(), action: retry})
			}
		}
		if len(f.pushes)+len(f.settles) <= i {
			l.slots = append(l.slots, slot{lease: uuid.New(), budget: 10})
		}
	}
	if len(l.slots) > 0 {
		f.lists = []list{l}
	}
	return f
}

// TestFlushIsOneCommit proves that a flush is one round trip and one commit, however many operations it carries.
func TestFlushIsOneCommit(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	g := w.group(q, "g")
	var ids []int64
	for i := range 1000 {
		ids = append(ids, int64(i+1))
	}
	p := creation(uuid.New(), q, "0")
	for i := range 999 {
		p.PublicIds, p.QueueIds, p.Names, p.Hiddens, p.Totals = append(p.PublicIds, uuid.New()), append(p.QueueIds, q), append(p.Names, fmt.Sprint(i+1)), append(p.Hiddens, false), append(p.Totals, 0)
	}
	made := must[[]db.CreatePartitionsRow](t)(w.CreatePartitions(t.Context(), p))
	check(t, w.CreateCursors(t.Context(), db.CreateCursorsParams{PublicIds: p.PublicIds}))
	for i := range made {
		ids[i] = made[i].ID
	}

	config := must[*pgx.ConnConfig](t)(pgx.ParseConfig(w.dsn))
	name := config.Database
	line := &traffic{}
	dial := config.DialFunc
	config.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		line.Conn = c
		return line, err
	}
	conn := must[*pgx.Conn](t)(pgx.ConnectConfig(t.Context(), config))
	defer conn.Close(context.Background())
	outside := dbtest.Pool(t, dbtest.Empty(t), 1)
	// Another database looks at the counter, so that looking does not count.
	commits := func() (n int64) {
		t.Helper()
		// Without a table to report on nothing would be flushed.
		for _, s := range []string{"select count(*) from ferrymq.projects", "select pg_stat_force_next_flush()"} {
			_, err := conn.Exec(t.Context(), s)
			check(t, err)
		}
		check(t, outside.QueryRow(t.Context(), "select xact_commit from pg_stat_database where datname = $1", name).Scan(&n))
		return n
	}
	for _, n := range []int{1, 1000} {
		t.Run(fmt.Sprint(n, " operations"), func(t *testing.T) {
			check(t, big(n, ids, g).send(t.Context(), conn)) // prepares the statements
			fewest, segments := int64(1<<62), one[int](w, "select count(*) from ferrymq.segments")
			f := big(n, ids, g)
			for range 3 { // autovacuum may commit beside it, but not each time
				before := commits()
				base := commits() - before
				before = commits()
				line.reset()
				f = big(n, ids, g)
				check(t, f.send(t.Context(), conn))
				turns := line.reset()
				equal(t, "turns on the wire", turns, "wr")
				fewest = min(fewest, commits()-before-base)
			}
			equal(t, "commits", fewest, 1)
			equal(t, "appended", len(f.appended), len(f.pushes))
			equal(t, "segments", one[int](w, "select count(*) from ferrymq.segments")-segments, 3*len(f.pushes))
			t.Logf("%d pushes, %d settles, %d claims", len(f.pushes), len(f.settles), n-len(f.pushes)-len(f.settles))
		})
	}
	t.Run("an error in the last statement leaves nothing", func(t *testing.T) {
		f := big(300, ids, g)
		f.lists = []list{{group: g, scan: true, indexFirst: true, want: -1, slots: slots(1, 1, 1)}}
		segments, tails := one[int](w, "select count(*) from ferrymq.segments"), one[int64](w, "select sum(next_offset)::bigint from ferrymq.partitions")
		err := f.send(t.Context(), conn)
		if db.Code(err) != "2201W" {
			t.Fatalf("a negative limit answered %v", err)
		}
		equal(t, "rows handed out before the error", len(f.appended), len(f.pushes))
		equal(t, "segments", one[int](w, "select count(*) from ferrymq.segments"), segments)
		equal(t, "tails", one[int64](w, "select sum(next_offset)::bigint from ferrymq.partitions"), tails)
	})
	t.Run("settings end with the flush", func(t *testing.T) {
		var names []string
		for _, s := range []string{"statement_timeout", "lock_timeout", "plan_cache_mode", "enable_seqscan"} {
			var v string
			check(t, conn.QueryRow(t.Context(), "select current_setting($1)", s).Scan(&v))
			names = append(names, v)
		}
		if want := []string{"0", "0", "auto", "on"}; !slices.Equal(names, want) {
			t.Errorf("after a flush: %v, want %v", names, want)
		}
	})
	t.Run("lock_timeout", func(t *testing.T) {
		a := w.begin()
		must[db.PartitionLockRow](t)(a.PartitionLock(t.Context(), db.PartitionLockParams{ID: ids[0]}))
		var f db.Flush
		var locked []db.LockPartitionsRow
		f.FlushSettings(db.FlushSettingsParams{StatementTimeoutMs: "5000", LockTimeoutMs: "10"}, nil)
		f.LockPartitions(db.LockPartitionsParams{Ids: ids[:1], Reaches: []int64{everything}}, &locked)
		if err := f.Send(t.Context(), conn); !db.IsLockTimeout(err) {
			t.Errorf("a flush that waits answered %v", err)
		}
	})
}

// TestFlightSettings: a connection for flushes has their settings for as long as it lasts, and does not get them again with each.
func TestFlightSettings(t *testing.T) {
	t.Parallel()
	pool := must[*pgxpool.Pool](t)(db.NewFlights(t.Context(), dbtest.New(t), 1, 7*time.Second, 300*time.Millisecond))
	defer pool.Close()
	for range 2 {
		conn := must[*pgxpool.Conn](t)(pool.Acquire(t.Context()))
		var f db.Flush
		f.FlushSettings(db.FlushSettingsParams{StatementTimeoutMs: "1", LockTimeoutMs: "1"}, conn.Conn())
		equal(t, "statements", f.Len(), 0)
		for name, want := range map[string]string{"statement_timeout": "7s", "lock_timeout": "300ms", "idle_in_transaction_session_timeout": "5s", "plan_cache_mode": "force_generic_plan",
			"enable_seqscan": "off", "enable_bitmapscan": "off", "jit": "off"} {
			var got string
			check(t, conn.QueryRow(t.Context(), "select current_setting($1)", name).Scan(&got))
			equal(t, name, got, want)
		}
		conn.Release()
	}
}

func TestTables(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	for table, want := range map[string][]string{
		"partitions": {"fillfactor=70", "autovacuum_vacuum_scale_factor=0", "autovacuum_vacuum_threshold=1000", "autovacuum_vacuum_cost_delay=0", "vacuum_truncate=off"},
		"cursors":    {"fillfactor=50", "autovacuum_vacuum_scale_factor=0", "autovacuum_vacuum_threshold=1000", "autovacuum_vacuum_cost_delay=0", "vacuum_truncate=off"},
		"segments":   {"autovacuum_vacuum_cost_delay=0", "vacuum_truncate=off"},
	} {
		got := one[[]string](w, "select reloptions from pg_class where oid = ('ferrymq.' || $1)::regclass", table)
		for _, o := range want {
			if !slices.Contains(got, o) {
				t.Errorf("%s has %v, without %s", table, got, o)
			}
		}
	}
	toast := one[[]string](w, "select t.reloptions from pg_class c join pg_class t on t.oid = c.reltoastrelid where c.oid = 'ferrymq.segments'::regclass")
	if !slices.Contains(toast, "vacuum_truncate=off") || !slices.Contains(toast, "autovacuum_vacuum_cost_delay=0") {
		t.Errorf("toast of segments has %v", toast)
	}
	equal(t, "external columns of segments", one[string](w, "select string_agg(attname, ',' order by attname) from pg_attribute where attrelid = 'ferrymq.segments'::regclass and attstorage = 'e'"), "frames,keys")
	// What a push or a claim changes must not be indexed; expire_at is changed by the first push of many only.
	equal(t, "indexes of partitions", one[string](w, "select string_agg(distinct a.attname, ',' order by a.attname) from pg_index i join pg_attribute a on a.attrelid = i.indrelid and a.attnum = any(i.indkey) where i.indrelid = 'ferrymq.partitions'::regclass"), "empty_since,expire_at,hidden,id,name,public_id,queue_id")
	equal(t, "indexes of cursors", one[string](w, "select string_agg(distinct a.attname, ',' order by a.attname) from pg_index i join pg_attribute a on a.attrelid = i.indrelid and a.attnum = any(i.indkey) where i.indrelid = 'ferrymq.cursors'::regclass"), "group_id,not_before,partition_id")
	equal(t, "indexes of segments", one[int](w, "select count(*) from pg_index where indrelid = 'ferrymq.segments'::regclass"), 1)
	equal(t, "tables outside of the schema", one[int](w, "select count(*) from pg_class c where c.relnamespace = 'public'::regnamespace"), 0)
}

// TestHot measures the share of HOT updates under pushes, claims and settles on partitions with a backlog.
func TestHot(t *testing.T) {
	t.Parallel()
	// A server of its own: a transaction anywhere in a cluster keeps what it might still see from being pruned everywhere.
	dsn := dbtest.Durable(t).DSN
	check(t, schema.Migrate(t.Context(), dsn))
	pool := dbtest.Pool(t, dsn, 1)
	w := &world{Queries: db.New(pool), t: t, dsn: dsn, pool: pool}
	q := w.queue("q", "retention_enabled = true, retention_seconds = 3600") // a rule changes nothing about it
	const partitions = 100
	for i := range partitions {
		w.partition(q, fmt.Sprint(i), 500, 500)
	}
	g := w.group(q, "g")
	w.exec("select pg_stat_force_next_flush()")
	shares := func() (upd, hot map[string]int64) {
		w.exec("select pg_stat_force_next_flush()")
		w.exec("select 1")
		upd, hot = map[string]int64{}, map[string]int64{}
		rows := must[pgx.Rows](t)(w.pool.Query(t.Context(), "select relname::text, n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relname in ('partitions', 'cursors')"))
		var table string
		var u, h int64
		must[any](t)(pgx.ForEachRow(rows, []any{&table, &u, &h}, func() error { upd[table], hot[table] = u, h; return nil }))
		return upd, hot
	}
	upd0, hot0 := shares()
	f := &flight{}
	from := int64(0)
	for i := range 400 {
		next := &flight{}
		for n := range 20 {
			next.pushes = append(next.pushes, push{int64(1 + (i*20+n)%partitions), -1, []int{2}})
		}
		for _, s := range read(t, f.claimed).spans {
			next.settles = append(next.settles, settle{group: g, partition: s.partition, lease: f.lists[0].slots[s.slot].lease, expected: s.start, action: complete, moveTo: s.start + s.take})
		}
		next.lists = []list{{group: g, scan: true, from: from, slots: slots(20, 2, 1)}}
		w.fly(next)
		if l := read(t, next.claimed).lists[0]; l.BelowTo > 0 {
			from = l.BelowTo
		} else {
			from = l.AboveTo
		}
		f = next
	}
	upd, hot := shares()
	for table, least := range map[string]float64{"partitions": 0.95, "cursors": 0.90} {
		u, h := upd[table]-upd0[table], hot[table]-hot0[table]
		share := float64(h) / float64(u)
		t.Logf("%s: %d updates, %.1f %% HOT", table, u, 100*share)
		if u < 7000 || share < least {
			t.Errorf("%s: %d of %d updates were HOT, less than %.0f %%", table, h, u, 100*least)
		}
	}
}

// TestAppend is the contract of pushing to partitions that exist.
func TestAppend(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	g := w.group(q, "g")
	p, other := w.partition(q, "p"), w.partition(q, "other")
	f := w.fly(&flight{pushes: []push{{p, -1, []int{3, 2, 5}}, {other, 0, []int{1}}}})
	equal(t, "appended", len(f.appended), 2)
	equal(t, "base", w.push(p, 1, 1), 10)
	equal(t, "segments", one[string](w, "select string_agg(base_offset || '+' || count, ' ' order by base_offset) from ferrymq.segments where partition_id = $1", p), "0+3 3+2 5+5 10+1 11+1")
	equal(t, "tail", w.cursor(g, p).nextOffset, 12)
	equal(t, "pending", w.cursor(g, p).pending, true)

	// A lost compare-and-set changes nothing, its neighbours go on.
	f = w.fly(&flight{pushes: []push{{p, 11, []int{1}}, {other, 1, []int{4}}, {9999, -1, []int{1}}}})
	if len(f.appended) != 1 || f.appended[0].ID != other || f.appended[0].Base != 1 {
		t.Errorf("appended %v", f.appended)
	}
	equal(t, "locked", len(f.locked), 2) // the third is gone
	equal(t, "tail", w.cursor(g, p).nextOffset, 12)
	equal(t, "segments", one[int](w, "select count(*) from ferrymq.segments where partition_id = $1", p), 5)

	// Time never goes back within a partition.
	ahead := time.Now().Add(time.Hour).UTC().Truncate(time.Microsecond)
	w.exec("update ferrymq.partitions set last_push_at = $1 where id = $2", ahead, p)
	f = w.fly(&flight{pushes: []push{{p, 12, []int{1, 1}}, {other, -1, []int{1}}}})
	for _, a := range f.appended {
		equal(t, "created at the time of the last push", a.CreatedAt.Equal(ahead), a.ID == p)
	}
	equal(t, "segments of that time", one[int](w, "select count(*) from ferrymq.segments where created_at = $1", ahead), 2)

	// Nothing goes into a deleted queue.
	check(t, w.deleteQueue(q))
	f = w.fly(&flight{pushes: []push{{p, -1, []int{1}}}})
	equal(t, "appended", len(f.appended), 0)
	equal(t, "locked", len(f.locked), 1)
}

// TestLockPartitions locks what is pushed to and what a settle may drain, nothing else.
func TestLockPartitions(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	a, b, c := w.partition(q, "a", 5), w.partition(q, "b", 5), w.partition(q, "c", 5)
	rows := must[[]db.LockPartitionsRow](t)(w.LockPartitions(t.Context(), db.LockPartitionsParams{
		Ids: []int64{c, b, a, 9999, a}, Reaches: []int64{5, 4, everything, everything, 3}}))
	var ids []int64
	for _, r := range rows {
		ids = append(ids, r.ID)
		equal(t, "next_offset", r.NextOffset, 5)
	}
	if want := []int64{a, c}; !slices.Equal(slices.Compact(ids), want) {
		t.Errorf("locked %v, want %v", ids, want)
	}
}

// TestMark sets pending for every group of the queue that has something to deliver.
func TestMark(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q, foreign := w.queue("q", ""), w.queue("foreign", "")
	p := w.partition(q, "p", 5)
	behind, ahead, gone, rest := w.group(q, "behind"), w.group(q, "ahead"), w.group(q, "gone"), w.group(q, "rest")
	fg := w.group(foreign, "f")
	w.exec("update ferrymq.cursors set pending = false, committed = 5")
	w.exec("update ferrymq.cursors set committed = 6 where group_id = $1", ahead)
	w.exec("update ferrymq.groups set deleted_at = now() where id = $1", gone)
	w.exec("update ferrymq.cursors set not_before = now() + interval '1 hour' where group_id = $1", rest)
	w.exec("insert into ferrymq.cursors (group_id, partition_id, committed, pending) values ($1, $2, 0, false)", fg, p)
	w.push(p, 1)
	for group, want := range map[int32]bool{behind: true, ahead: false, gone: false, rest: true, fg: false} {
		equal(t, fmt.Sprintf("pending of %d", group), w.cursor(group, p).pending, want)
	}
	equal(t, "the backoff stays", w.cursor(rest, p).notBefore != nil, true)
}

// TestCreatePartitions: a partition appears in its final state.
func TestCreatePartitions(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q, deleted := w.queue("q", ""), w.queue("deleted", "")
	past, future := time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	all, earlier, later := w.group(q, "all"), w.groupAt(q, "earlier", "time", &past), w.groupAt(q, "later", "time", &future)
	unregistered := must[db.GroupCreateRow](t)(w.GroupCreate(t.Context(), db.GroupCreateParams{QueueID: q, Name: "unregistered", StartMode: "all", StartAt: &epoch})).ID
	gone := w.group(q, "gone")
	w.exec("update ferrymq.groups set deleted_at = now() where id = $1", gone)
	check(t, w.deleteQueue(deleted))

	p := creation(uuid.New(), q, "b", 3, 2)
	for _, x := range []db.CreatePartitionsParams{creation(uuid.New(), q, "a"), creation(uuid.New(), deleted, "a", 1), creation(uuid.New(), q, "b", 7)} {
		p.PublicIds, p.QueueIds, p.Names, p.Hiddens, p.Totals = append(p.PublicIds, x.PublicIds...), append(p.QueueIds, x.QueueIds...), append(p.Names, x.Names...), append(p.Hiddens, x.Hiddens...), append(p.Totals, x.Totals...)
		p.SegPartitions, p.SegRels, p.SegCounts = append(p.SegPartitions, x.SegPartitions...), append(p.SegRels, x.SegRels...), append(p.SegCounts, x.SegCounts...)
		p.SegKeyNos, p.SegCodecs, p.SegFirstIds = append(p.SegKeyNos, x.SegKeyNos...), append(p.SegCodecs, x.SegCodecs...), append(p.SegFirstIds, x.SegFirstIds...)
		p.SegKeys, p.SegFrames = append(p.SegKeys, x.SegKeys...), append(p.SegFrames, x.SegFrames...)
	}
	var f db.Flush
	var made []db.CreatePartitionsRow
	f.CreatePartitions(p, &made)
	f.CreateCursors(db.CreateCursorsParams{PublicIds: p.PublicIds})
	check(t, f.Send(t.Context(), w.pool))
	equal(t, "made", len(made), 2)
	byID := map[uuid.UUID]int64{}
	for _, m := range made {
		byID[m.PublicID] = m.ID
	}
	full, empty := byID[p.PublicIds[0]], byID[p.PublicIds[1]]
	if full == 0 || empty == 0 {
		t.Fatalf("made %v", made) // the first of two with one name
	}
	equal(t, "segments", one[string](w, "select string_agg(partition_id || ':' || base_offset || '+' || count, ' ' order by base_offset) from ferrymq.segments"), fmt.Sprintf("%d:0+3 %d:3+2", full, full))
	for _, c := range []struct {
		group     int32
		partition int64
		committed int64
		pending   bool
	}{{all, full, 0, true}, {all, empty, 0, false}, {earlier, full, 0, true}, {later, full, 5, false}, {later, empty, 0, false}} {
		k := w.cursor(c.group, c.partition)
		if k.committed != c.committed || k.pending != c.pending {
			t.Errorf("cursor of group %d on %d = %+v", c.group, c.partition, k)
		}
	}
	for _, g := range []int32{unregistered, gone} {
		if _, ok := w.findCursor(g, full); ok {
			t.Errorf("group %d has a cursor", g)
		}
	}
	equal(t, "last_push_at of the empty one", one[bool](w, "select last_push_at is null from ferrymq.partitions where id = $1", empty), true)
	again := must[[]db.CreatePartitionsRow](t)(w.CreatePartitions(t.Context(), creation(uuid.New(), q, "a", 1)))
	equal(t, "made again", len(again), 0)
	equal(t, "segments", one[int](w, "select count(*) from ferrymq.segments"), 2)
}
