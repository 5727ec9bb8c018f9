package metrics

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/db"
	"ferrymq/dbtest"
)

func TestMain(m *testing.M) { dbtest.Main(m) }

// begin starts the metrics of one broker on a database.
func begin(t *testing.T, pool *pgxpool.Pool, name string, parked func() []Parked) *Metrics {
	t.Helper()
	m := New("test")
	m.Pools, m.Log, m.Name, m.Project, m.Parked = []*pgxpool.Pool{pool}, slog.New(slog.DiscardHandler), name, 1, parked
	m.Start()
	t.Cleanup(m.Close)
	return m
}

func number(t *testing.T, pool *pgxpool.Pool, sql string) (n int64) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), sql).Scan(&n); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return n
}

func exec(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// TestNothingLostOrDoubled counts from many goroutines on two brokers, while both write all the time and every other write fails.
func TestNothingLostOrDoubled(t *testing.T) {
	t.Parallel()
	pool := dbtest.Pool(t, dbtest.New(t), 4)
	brokers := []*Metrics{begin(t, pool, "a", nil), begin(t, pool, "b", nil)}
	const adders, each, queues = 8, 3000, 40
	var adding, writing sync.WaitGroup
	done := make(chan struct{})
	failed := false
	writing.Add(1)
	go func() {
		defer writing.Done()
		for ok := false; ; ok = !ok {
			if ok {
				exec(t, pool, "alter table ferrymq.away rename to activity")
			} else {
				exec(t, pool, "alter table ferrymq.activity rename to away")
			}
			for _, m := range brokers {
				if err := m.Flush(); err != nil {
					failed = true
				}
			}
			select {
			case <-done:
				if ok {
					return
				}
			default:
			}
		}
	}()
	for g := range adders {
		adding.Add(1)
		go func() {
			defer adding.Done()
			m := brokers[g%2]
			for i := range each {
				queue := int32(1 + i%queues)
				m.Add(m.Project, queue, PushMessages, 2)
				m.Queue(queue, PushRequests, 1)
				m.Total(PushRequests, 1)
				m.Delivered(queue, 3, time.Duration(i)*time.Millisecond)
			}
		}()
	}
	adding.Wait()
	close(done)
	writing.Wait()
	if !failed {
		t.Error("no write has failed")
	}
	for _, m := range brokers {
		if err := m.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	for _, of := range []string{"queue_id = 0", "queue_id > 0"} {
		for column, want := range map[string]int64{"sum(push_messages)": adders * each * 2, "sum(push_requests)": adders * each,
			"sum(pop_messages)": adders * each * 3, "sum(lag_count)": adders * each * 3, "sum(lag_sum_ms)": adders * 3 * each * (each - 1) / 2,
			"max(lag_max_ms)": each - 1, "count(distinct broker)": 2} {
			if got := number(t, pool, "select "+column+" from ferrymq.activity where "+of); got != want {
				t.Errorf("%s where %s = %d, want %d", column, of, got, want)
			}
		}
	}
}

// TestIdle: a broker that does nothing writes nothing, but for a row a minute; nor do pops that stay parked.
func TestIdle(t *testing.T) {
	t.Parallel()
	pool := dbtest.Pool(t, dbtest.New(t), 4)
	waiting := []Parked{{Queue: 7, Name: "q", Pops: 3}, {Pops: 2}}
	m := begin(t, pool, "a", func() []Parked { return waiting })
	flush := func() {
		t.Helper()
		if err := m.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	writes := func() int64 {
		return number(t, pool, "select coalesce(sum(xmin::text::bigint), 0) from ferrymq.activity")
	}
	flush()
	before := writes()
	if before == 0 {
		t.Fatal("parked pops were not written")
	}
	minute := m.minute
	for range 3 {
		flush()
	}
	if after := writes(); after != before && m.minute.Equal(minute) {
		t.Error("an idle broker has written")
	}
	waiting[0].Pops = 5
	flush()
	if got := number(t, pool, "select max(parked) from ferrymq.activity where queue_id = 7"); got != 5 {
		t.Errorf("parked = %d, want 5", got)
	}
	if got := number(t, pool, "select max(parked) from ferrymq.activity where queue_id = 0"); got != 7 {
		t.Errorf("parked in all = %d, want 7", got)
	}
	waiting = nil
	flush()
	exec(t, pool, "truncate ferrymq.activity, ferrymq.broker_activity")
	m.last.at = m.last.at.Add(-processMost)
	flush()
	if n := number(t, pool, "select count(*) from ferrymq.broker_activity"); n != 1 {
		t.Errorf("%d rows of the process after a minute, want 1", n)
	}
	if n := number(t, pool, "select count(*) from ferrymq.activity"); n != 0 {
		t.Errorf("%d rows of queues, want none", n)
	}
}

// TestExpire: what is older than a week goes, in steps.
func TestExpire(t *testing.T) {
	t.Parallel()
	pool := dbtest.Pool(t, dbtest.New(t), 4)
	m := begin(t, pool, "a", nil)
	exec(t, pool, `insert into ferrymq.activity select date_trunc('minute', now()) - i * interval '1 hour', 1, 'x', 0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0 from generate_series(0, 2500) i`)
	exec(t, pool, `insert into ferrymq.broker_activity select date_trunc('minute', now()) - i * interval '1 hour', 'x', 0,0,0,0,0,0,0,0 from generate_series(0, 500) i`)
	if err := m.expire(); err != nil {
		t.Fatal(err)
	}
	for _, table := range []string{"activity", "broker_activity"} {
		if n := number(t, pool, "select count(*) from ferrymq."+table); n != 7*24+1 && n != 7*24 {
			t.Errorf("%d rows of %s are left, want those of 7 days", n, table)
		}
	}
}

// TestManyQueues: however many queues there are, a family has a thousand of them, and none of their numbers is lost.
func TestManyQueues(t *testing.T) {
	t.Parallel()
	var waiting []Parked
	sum := int64(0)
	for i := range 2500 {
		waiting = append(waiting, Parked{Queue: int32(i + 1), Name: fmt.Sprintf("q%d", i), Pops: int64(i + 1)})
		sum += int64(i + 1)
	}
	pool := dbtest.Pool(t, dbtest.New(t), 4)
	m := begin(t, pool, "a", func() []Parked { return waiting })
	text, err := m.Text()
	if err != nil {
		t.Fatal(err)
	}
	got, lines := int64(0), 0
	for _, l := range strings.Split(string(text), "\n") {
		if !strings.HasPrefix(l, "ferrymq_parked_polls{") {
			continue
		}
		lines++
		var n float64
		if _, err := fmt.Sscan(l[strings.LastIndexByte(l, ' ')+1:], &n); err != nil {
			t.Fatal(err)
		}
		got += int64(n)
	}
	if lines != maxQueues+1 || got != sum {
		t.Errorf("%d lines with %d pops, want %d with %d", lines, got, maxQueues+1, sum)
	}
	if !strings.Contains(string(text), "\nferrymq_parked_polls{queue=\"q2499\"} 2500\n") {
		t.Error("the queue with most pops is missing")
	}
	// A write in parts
	if err := m.Flush(); err != nil {
		t.Fatal(err)
	}
	if n := number(t, pool, "select count(*) from ferrymq.activity where queue_id > 0"); n != 2500 {
		t.Errorf("%d rows, want 2500", n)
	}
}

// TestGauges: scrapes that come together look once, a slow database holds them up only so long, and what it says later counts.
func TestGauges(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	pool := dbtest.Pool(t, dsn, 4)
	exec(t, pool, "insert into ferrymq.queues (project_id, name, namespace, task) values (1, 'q', 'q', '')")
	m := begin(t, pool, "a", nil)
	if rows, _ := m.queueGauges(); len(rows) != 1 || rows[0].name != "q" {
		t.Fatalf("%v", rows)
	}
	exec(t, pool, "insert into ferrymq.queues (project_id, name, namespace, task) values (1, 'r', 'r', '')")
	if rows, _ := m.queueGauges(); len(rows) != 1 {
		t.Errorf("looked again at once: %v", rows)
	}
	held, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer held.Rollback(t.Context())
	if _, err := held.Exec(t.Context(), "lock table ferrymq.dead_letters in access exclusive mode"); err != nil {
		t.Fatal(err)
	}
	m.backlog.mu.Lock()
	m.backlog.tried = time.Time{}
	m.backlog.mu.Unlock()
	began := time.Now()
	var scrapes sync.WaitGroup
	for range 5 {
		scrapes.Add(1)
		go func() {
			defer scrapes.Done()
			if rows, _ := m.queueGauges(); len(rows) != 1 {
				t.Errorf("%v, want what was known before", rows)
			}
		}()
	}
	scrapes.Wait()
	if took := time.Since(began); took < backlogWait || took > 3*backlogWait {
		t.Errorf("took %v", took)
	}
	dbtest.WaitBlocked(t, pool, 1)
	m.backlog.mu.Lock()
	asking := m.backlog.asking
	m.backlog.mu.Unlock()
	if err := held.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-asking
	if rows, _ := m.queueGauges(); len(rows) != 2 {
		t.Errorf("%v, want both queues", rows)
	}
}

// TestNoConnection: what cannot be written for lack of a connection is kept, and a broker that stops does not wait for long.
func TestNoConnection(t *testing.T) {
	t.Parallel()
	pool := dbtest.Pool(t, dbtest.New(t), 1)
	m := begin(t, pool, "a", nil)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	m.Add(m.Project, 7, PushMessages, 3)
	for range 3 {
		if err := m.flush(t.Context(), 10*time.Millisecond); !db.IsConnection(err) {
			t.Errorf("%v", err)
		}
		m.Add(m.Project, 7, PushMessages, 1)
	}
	began := time.Now()
	m.Close()
	if took := time.Since(began); took > 2*closeTime {
		t.Errorf("closing took %v", took)
	}
	conn.Release()
	if err := m.Flush(); err != nil {
		t.Fatal(err)
	}
	for _, of := range []string{"0", "7"} {
		if n := number(t, pool, "select sum(push_messages) from ferrymq.activity where queue_id = "+of); n != 6 {
			t.Errorf("%d of queue %s, want 6", n, of)
		}
	}
}

// TestRate: rates are over the last minute, or since the start.
func TestRate(t *testing.T) {
	t.Parallel()
	m := New("test")
	r := m.Route("GET /x")
	m.began = time.Now().Add(-10 * time.Second)
	for range 20 {
		r.Answered(200)
	}
	m.Total(PushMessages, 50)
	if s := m.Snapshot(); s.Requests.Total != 20 || s.Requests.Rate < 1.9 || s.Requests.Rate > 2 || s.Messages.Total != 50 || s.Messages.Rate < 4.8 || s.Messages.Rate > 5 {
		t.Errorf("%+v", s)
	}
	old := m.sample()
	for i := range 2 * rateSpan { // two minutes without anything
		old.at = time.Now().Add(time.Duration(i-2*rateSpan) * writeEvery)
		m.keepSample(old)
	}
	if s := m.Snapshot(); s.Requests.Rate != 0 || s.Messages.Rate != 0 {
		t.Errorf("%+v", s)
	}
	m.Total(PushMessages, 60)
	if s := m.Snapshot(); s.Messages.Total != 110 || s.Messages.Rate < 0.9 || s.Messages.Rate > 1.1 {
		t.Errorf("%+v", s)
	}
}
