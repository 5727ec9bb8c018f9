package proof

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// churnFor is how long the long form of TestChurn goes on.
var churnFor = flag.Duration("churn", 30*time.Minute, "how long the long form of TestChurn takes")

// footprint is what a moment of a churn looks like.
type footprint struct {
	at      time.Duration
	bytes   map[string]int64 // of each table and index of some size
	dead    int64            // rows, of all tables
	rss     int64
	p99     time.Duration // of the pushes since the last one
	pushes  int
	backlog int64
}

// traffic is clients of both APIs at a steady rate whose messages go by retention, and queues that come and go.
type traffic struct {
	t    testing.TB
	base string
	http *http.Client
	end  chan struct{}
	done sync.WaitGroup

	mu     sync.Mutex
	took   []time.Duration // of pushes
	failed atomic.Int64
}

// call returns false when the traffic has ended.
func (f *traffic) call(method, path, body string) (string, bool) {
	a := call(f.http, method, f.base+path, body)
	select {
	case <-f.end:
		return "", false
	default:
	}
	waits := strings.Contains(path, "timeout=") || strings.HasSuffix(path, "/receive")
	if waits && a.status == 500 && a.took > time.Second { // its wait was over before the database had answered: the machine is busy
		return "", true
	}
	if a.err != nil || a.status >= 300 {
		if f.failed.Add(1) < 10 {
			f.t.Errorf("%s %s: %v", method, path, a)
		}
		return "", true
	}
	if path == "/api/v1/push" {
		f.mu.Lock()
		f.took = append(f.took, a.took)
		f.mu.Unlock()
	}
	return a.body, true
}

// every does something all the time.
func (f *traffic) every(gap time.Duration, work func(n int) bool) {
	f.done.Go(func() {
		tick := time.NewTicker(gap)
		defer tick.Stop()
		for n := 0; work(n); n++ {
			select {
			case <-tick.C:
			case <-f.end:
				return
			}
		}
	})
}

// consume pops and acks once.
func (f *traffic) consume(queue, group string) bool {
	body, ok := f.call("GET", "/api/v1/pop/queue/"+queue+"?batch=20&partitions=5&wait=true&timeout=1000&consumerGroup="+group, "")
	if !ok || body == "" {
		return ok
	}
	var got pops
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		f.t.Errorf("pop: %v", err)
	}
	var items []item
	for _, m := range got.Messages {
		items = append(items, item{m.TransactionID, m.PartitionID, m.LeaseID, "completed", ""})
	}
	text, _ := json.Marshal(map[string]any{"consumerGroup": group, "acknowledgments": items})
	_, ok = f.call("POST", "/api/v1/ack/batch", string(text))
	return ok
}

// receive receives and acks once.
func (f *traffic) receive(sub string) bool {
	body, ok := f.call("POST", "/v1/subscriptions/"+sub+"/receive", `{"max_messages":20,"wait_seconds":1}`)
	if !ok || body == "" {
		return ok
	}
	var got deliveries
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		f.t.Errorf("receive: %v", err)
	}
	var ids []string
	for _, d := range got.Messages {
		ids = append(ids, strconv.Quote(d.DeliveryID))
	}
	if len(ids) == 0 {
		return true
	}
	_, ok = f.call("POST", "/v1/subscriptions/"+sub+"/ack", `{"delivery_ids":[`+strings.Join(ids, ",")+`]}`)
	return ok
}

// look takes the footprint.
func (f *traffic) look(pool *pgxpool.Pool, b *broker, began time.Time) (now footprint) {
	f.t.Helper()
	ctx := context.Background()
	rows, err := pool.Query(ctx, `select c.relname, pg_relation_size(c.oid) + case when c.reltoastrelid > 0 then pg_total_relation_size(c.reltoastrelid) else 0 end
		from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'ferrymq' and c.relkind in ('r', 'i')`)
	if err != nil {
		f.t.Fatal(err)
	}
	now.bytes = map[string]int64{}
	var name string
	var size int64
	if _, err := pgx.ForEachRow(rows, []any{&name, &size}, func() error { now.bytes[name] = size; return nil }); err != nil {
		f.t.Fatal(err)
	}
	if err := pool.QueryRow(ctx, `select (select sum(n_dead_tup) from pg_stat_user_tables where schemaname = 'ferrymq'),
		(select coalesce(sum(p.next_offset - c.committed), 0) from ferrymq.cursors c join ferrymq.partitions p on p.id = c.partition_id)`).Scan(&now.dead, &now.backlog); err != nil {
		f.t.Fatal(err)
	}
	now.at, now.rss = time.Since(began), resident(f.t, b.cmd.Process.Pid)
	f.mu.Lock()
	defer f.mu.Unlock()
	slices.Sort(f.took)
	if now.pushes = len(f.took); now.pushes > 0 {
		now.p99 = f.took[now.pushes*99/100]
	}
	f.took = nil
	return now
}

// resident is a process's memory in bytes.
func resident(t testing.TB, pid int) int64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Skip("no /proc here")
	}
	pages, _ := strconv.ParseInt(strings.Fields(string(text))[1], 10, 64)
	return pages * int64(os.Getpagesize())
}

// TestChurn lets traffic go on whose messages go by retention, while queues and partitions come and go: what is stored must come to a
// plateau, table by table and index by index, and the broker's memory stays flat.
func TestChurn(t *testing.T) {
	t.Parallel()
	whole, keep, gap := 24*time.Second, 2, time.Second
	settings := map[string]string{"autovacuum_naptime": "1s"}
	if *long {
		whole, keep, gap = *churnFor, 60, 15*time.Second
		settings = map[string]string{"shared_buffers": "128MB", "max_wal_size": "1GB"} // and autovacuum as it comes
	}
	p := newPostgres(t, "", settings)
	c := newCluster(t, p, 1, "RETENTION_INTERVAL=500")
	pool := p.pool()
	f := &traffic{t: t, base: c.brokers[0].url(), http: newClient(t), end: make(chan struct{})}
	stop := sync.OnceFunc(func() {
		close(f.end)
		f.done.Wait()
	})
	defer stop()
	configure := func(queue string) bool {
		_, ok := f.call("POST", "/api/v1/configure", fmt.Sprintf(`{"queue":%q,"options":{"retentionEnabled":true,"retentionSeconds":%d,"completedRetentionSeconds":%[2]d,"dedupWindowSeconds":%[2]d}}`, queue, keep))
		return ok
	}
	configure("steady")
	f.call("PUT", "/v1/streams/steady-lanes", fmt.Sprintf(`{"unkeyed_lanes":8,"keep_consumed":"%ds","retention":"%[1]ds","dedup_window":"%[1]ds"}`, keep))
	f.call("PUT", "/v1/subscriptions/work", `{"stream":"steady-lanes"}`)

	padding := strings.Repeat("x", 200)
	for w := range 4 {
		f.every(40*time.Millisecond, func(n int) bool { // 200 messages a second
			var items []string
			for i := range 2 {
				items = append(items, fmt.Sprintf(`{"queue":"steady","partition":"p%d","transactionId":"t-%d-%d-%d","payload":%q}`, (n*2+i+w*8)%32, w, n, i, padding))
			}
			_, ok := f.call("POST", "/api/v1/push", `{"items":[`+strings.Join(items, ",")+`]}`)
			return ok
		})
		f.every(time.Millisecond, func(int) bool { return f.consume("steady", "g"+strconv.Itoa(w%2)) })
	}
	for w := range 2 {
		f.every(40*time.Millisecond, func(n int) bool { // 100 messages a second
			_, ok := f.call("POST", "/v1/streams/steady-lanes/messages", fmt.Sprintf(`{"messages":[{"key":"k%d","payload":%q},{"payload":%[2]q}]}`, (n+w*16)%32, padding))
			return ok
		})
		f.every(time.Millisecond, func(int) bool { return f.receive("work") })
	}
	// A queue lives for two periods, with partitions of its own all the time.
	f.every(3*time.Second, func(n int) bool {
		queue := fmt.Sprintf("passing-%d", n)
		if !configure(queue) {
			return false
		}
		for i := range 20 {
			if _, ok := f.call("POST", "/api/v1/push", fmt.Sprintf(`{"items":[{"queue":%q,"partition":"%d","payload":1}]}`, queue, i)); !ok {
				return false
			}
		}
		if !f.consume(queue, "g0") {
			return false
		}
		if n >= 2 {
			_, ok := f.call("DELETE", fmt.Sprintf("/api/v1/resources/queues/passing-%d", n-2), "")
			return ok
		}
		return true
	})

	began := time.Now()
	var seen []footprint
	for time.Since(began) < whole {
		pause(gap, f.end)
		now := f.look(pool, c.brokers[0], began)
		seen = append(seen, now)
		if *long {
			var total int64
			for _, n := range now.bytes {
				total += n
			}
			t.Logf("%6.0f s: %5.1f MB stored, partitions %4d kB, cursors %4d kB, cursors_pending %4d kB, segments %5d kB, %5d dead rows, backlog %d, broker %3d MB, %d pushes, p99 %v", now.at.Seconds(),
				float64(total)/1e6, now.bytes["partitions"]>>10, now.bytes["cursors"]>>10, now.bytes["cursors_pending"]>>10, now.bytes["segments"]>>10, now.dead, now.backlog, now.rss>>20, now.pushes, now.p99.Round(100*time.Microsecond))
		}
	}
	stop()
	if n := f.failed.Load(); n > 0 {
		t.Errorf("%d calls failed", n)
	}

	// The second half of the time may not need more than the first did at its most, and a little.
	peak := func(of []footprint) (bytes map[string]int64, rss int64) {
		bytes = map[string]int64{}
		for _, x := range of {
			for name, n := range x.bytes {
				bytes[name] = max(bytes[name], n)
			}
			rss = max(rss, x.rss)
		}
		return bytes, rss
	}
	before, rss := peak(seen[:len(seen)/2])
	after, late := peak(seen[len(seen)/2:])
	for name, n := range after {
		if slack := int64(1 << 20); n > before[name]*3/2+slack {
			t.Errorf("%s grew from %d to %d bytes", name, before[name], n)
		}
	}
	if late > rss*3/2+32<<20 {
		t.Errorf("the broker's memory grew from %d to %d MB", rss>>20, late>>20)
	}
	// How many were HOT is for the log: retention moves expire_at, which is indexed, and nearly every message drains its cursor.
	for _, table := range []string{"partitions", "cursors"} {
		var share float64
		if err := pool.QueryRow(context.Background(), "select 100.0 * n_tup_hot_upd / greatest(n_tup_upd, 1) from pg_stat_user_tables where schemaname = 'ferrymq' and relname = $1", table).Scan(&share); err != nil {
			t.Fatal(err)
		}
		t.Logf("%.1f %% of the updates of %s were HOT", share, table)
	}
}
