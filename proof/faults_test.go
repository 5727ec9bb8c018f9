package proof

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/dbtest"
	"ferrymq/proof/history"
	"ferrymq/schema"
)

// fleet is brokers behind addresses that stay when they are started again.
type fleet struct {
	*cluster
	pool   *pgxpool.Pool // leads around the proxy
	fronts []*proxy
	urls   []string
}

func newFleet(t *testing.T, n int, settings ...string) *fleet {
	t.Helper()
	c, dsn := newShared(t, n, settings...)
	f := &fleet{cluster: c, pool: dbtest.Pool(t, dsn, 4)}
	for _, b := range c.brokers {
		p, url := front(t, b)
		f.fronts, f.urls = append(f.fronts, p), append(f.urls, url)
	}
	return f
}

// replace puts another broker in place n, which need not be ready yet.
func (f *fleet) replace(n int, b *broker) {
	f.t.Helper()
	f.brokers[n] = b
	f.fronts[n].point(dialer("tcp", strings.TrimPrefix(b.url(), "http://")))
}

// restart ends a broker and starts it again.
func (f *fleet) restart(n int, with syscall.Signal) {
	f.t.Helper()
	f.brokers[n].end(with)
	if code := f.brokers[n].cmd.ProcessState.ExitCode(); with != syscall.SIGKILL && code != 0 {
		f.t.Errorf("exit code %d", code)
	}
	f.replace(n, f.spawn())
	f.brokers[n].ready()
}

// rounds is how often something is done.
func rounds(short, longer int) int {
	if *long {
		return longer
	}
	return short
}

// recovers checks how long it takes until everything works again, from now on.
func (l *load) recovers() {
	l.t.Helper()
	l.heal()
	took := l.recovered()
	l.t.Logf("everything works again %v after the fault", took)
	if took > recovery {
		l.t.Errorf("that is too long, want %v", recovery)
	}
}

// only fails if clients saw anything but these answers, which may end in "*".
func (l *load) only(allowed ...string) {
	l.t.Helper()
next:
	for what, n := range l.seen() {
		for _, a := range allowed {
			if what == a || strings.HasSuffix(a, "*") && strings.HasPrefix(what, strings.TrimSuffix(a, "*")) || strings.HasPrefix(a, "*") && strings.HasSuffix(what, strings.TrimPrefix(a, "*")) {
				continue next
			}
		}
		l.t.Errorf("%d times %s", n, what)
	}
}

// late are the answers to waits that were over before the database had answered: none on a machine that is not busy.
var late = []string{"pop: 500 pool", "pop: 500 pop failed", "receive: 500 pool", "receive: 500 receive failed"}

// Without any fault the history of a load has none either, and there are no answers but successes.
func TestLoad(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2)
	l := startLoad(t, f.urls, usual())
	pause(span(2*time.Second, 10*time.Minute), l.ending)
	l.verdict(f.pool)
	l.only(late...)
}

// Brokers that are killed at any moment, one or all at once, and start again, all with receivers that wait for them already: what was
// answered stands, nothing is given to two, and every broker has the same numbers afterwards.
func TestKilled(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 3)
	l := startLoad(t, f.urls, usual())
	for range rounds(2, 60) {
		pause(time.Duration(rand.IntN(500))*time.Millisecond, l.ending)
		f.restart(rand.IntN(3), syscall.SIGKILL)
	}
	var all sync.WaitGroup
	for n := range f.brokers {
		f.brokers[n].end(syscall.SIGKILL)
	}
	for n := range f.brokers {
		f.replace(n, f.spawn())
		all.Go(func() { f.brokers[n].await(`msg=ready`) })
	}
	all.Wait()
	l.recovers()
	l.verdict(f.pool)
	l.only(append([]string{"*: no answer", "*: 503 not ready, Retry-After"}, late...)...)
}

// A deployment: each broker is told to end and started again, under load. Clients see connections that are closed or refused, and
// nothing else.
func TestRollingRestart(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2)
	l := startLoad(t, f.urls, usual())
	for range rounds(1, 30) {
		for n := range f.brokers {
			pause(300*time.Millisecond, l.ending)
			f.restart(n, syscall.SIGTERM)
		}
	}
	l.recovers()
	l.verdict(f.pool)
	l.only(append([]string{"*: no answer", "*: 503 not ready, Retry-After"}, late...)...)
}

// A broker that stands still for longer than its leases last, with requests inside, and goes on: others have its messages by then, and
// what it still answers or settles is late.
func TestPaused(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2)
	m := usual()
	m.lease, m.attempts = 1, 8
	l := startLoad(t, f.urls, m)
	for n := range rounds(2, 40) {
		b := f.brokers[n%2].cmd.Process
		pause(time.Duration(200+rand.IntN(400))*time.Millisecond, l.ending)
		if err := b.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		pause(1500*time.Millisecond, l.ending)
		if err := b.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
	l.recovers()
	l.verdict(f.pool)
	l.only(append([]string{"*: no answer"}, late...)...)
	if l.log.Totals().Late == 0 {
		t.Error("nobody was late")
	}
}

// sessions ends sessions of the brokers.
func (f *fleet) endSessions(how string) {
	f.t.Helper()
	if _, err := f.pool.Exec(f.t.Context(), `select pg_terminate_backend(a.pid) from pg_stat_activity a
		where a.datname = current_database() and a.pid <> pg_backend_pid() and a.application_name not like 'Test%' `+how); err != nil {
		f.t.Fatal(err)
	}
}

// outage are the answers that the contract has for statements that fail and connections that are lost.
var outage = []string{"push: 500 push failed", "push: 503 database unavailable, Retry-After", "pop: 500 pop failed", "pop: 500 pool",
	"ack item: pool", "ack item: ack flush failed; lease will expire and redeliver", "extend: 500 renew failed", "extend: 500 pool",
	"publish: 500 publish failed", "publish: 500 pool", "publish: 503 database unavailable, Retry-After", "receive: 500 receive failed", "receive: 500 pool",
	"receive: 500 query failed", "settle: 500 settle failed", "settle: 500 pool", "settle: 500 query failed",
	"admin: 500 query failed", "admin: 500 configure failed", "admin: 500 pool", "admin: 503 counting takes too long, Retry-After",
	"ack item: not settled: try again", "nack item: not settled: try again", "extend item: not settled: try again"}

// Somebody ends sessions of the brokers, all the time, also in the middle of a commit.
func TestTerminatedSessions(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2)
	l := startLoad(t, f.urls, usual())
	for end := time.Now().Add(span(2*time.Second, 10*time.Minute)); time.Now().Before(end); {
		f.endSessions("order by random() limit 2")
		pause(time.Duration(10+rand.IntN(80))*time.Millisecond, l.ending)
	}
	l.recovers()
	l.verdict(f.pool)
	l.only(outage...)
}

// Statements that are cancelled because they take too long, by a limit of the database and because another session holds what they
// need: one partition, which holds up nobody else's.
func TestStatementTimeouts(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2, "STATEMENT_TIMEOUT_MS=100")
	l := startLoad(t, f.urls, usual())
	var name string
	if err := f.pool.QueryRow(t.Context(), "select current_database()").Scan(&name); err != nil {
		t.Fatal(err)
	}
	limit := func(sql string) {
		t.Helper()
		if _, err := f.pool.Exec(t.Context(), fmt.Sprintf(sql, name)); err != nil {
			t.Fatal(err)
		}
		f.endSessions("")
	}
	for range rounds(1, 60) {
		pause(300*time.Millisecond, l.ending)
		tx, err := f.pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		// A partition and a key, with what their groups have there.
		if _, err := tx.Exec(t.Context(), `select from ferrymq.partitions p where p.id in
			(select min(x.id) from ferrymq.partitions x where not x.hidden group by x.queue_id) order by p.id for update`); err != nil {
			t.Fatal(err)
		}
		pause(time.Second, l.ending)
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		limit("alter database %s set statement_timeout = '3ms'")
		pause(time.Second, l.ending)
		limit("alter database %s reset statement_timeout")
	}
	l.recovers()
	l.verdict(f.pool)
	l.only(outage...)
}

// One key and one partition, with many producers and consumers on every broker, one of which stands still for a while: never two in
// flight, nothing is jumped over, and nothing left behind.
func TestOneLane(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 3)
	m := mix{queue: "q", stream: "s", partitions: 1, keys: 1, producers: rounds(8, 64), consumers: rounds(8, 50), groups: []string{"g"}, subs: []string{"strict"},
		lease: 2, attempts: 20, honest: true, batch: 50, maxSends: rounds(10, 2000)}
	l := startLoad(t, f.urls, m)
	pause(200*time.Millisecond, l.ending)
	b := f.brokers[0].cmd.Process
	_ = b.Signal(syscall.SIGSTOP)
	pause(500*time.Millisecond, l.ending)
	_ = b.Signal(syscall.SIGCONT)
	l.producers.Wait()
	l.verdict(f.pool)
	l.only(append([]string{"*: no answer"}, late...)...)
}

// Receivers that forget most of what they get, while newer messages of the same keys come in: after each lease the oldest comes first.
func TestForgotten(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2)
	m := usual()
	m.partitions, m.keys, m.lease, m.attempts, m.poison, m.forgetful, m.consumers = 3, 4, 1, 100, 0, true, 4
	l := startLoad(t, f.urls, m)
	pause(span(4*time.Second, 10*time.Minute), l.ending)
	l.verdict(f.pool)
	l.only(late...)
	if n := l.log.Totals(); n.Delivered < n.Acked+10 {
		t.Errorf("hardly anything was forgotten: %+v", n)
	}
}

// Attempts are counted in the database: a broker that starts again goes on where it was.
func TestAttemptsSurviveRestart(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 1)
	must(t, 200, "PUT", f.urls[0]+"/v1/subscriptions/s", `{"stream":"s","retry":{"max_attempts":3,"initial":"0s"}}`)
	must(t, 200, "POST", f.urls[0]+"/v1/streams/s/messages", `{"messages":[{"key":"k","payload":1}]}`)
	for attempt := 1; attempt <= 3; attempt++ {
		var got received
		decode(t, must(t, 200, "POST", f.urls[0]+"/v1/subscriptions/s/receive", `{"wait_seconds":10}`), &got)
		if len(got.Messages) != 1 || got.Messages[0].Attempt != attempt {
			t.Fatalf("attempt %d: %+v", attempt, got)
		}
		if attempt == 3 {
			f.restart(0, syscall.SIGKILL) // its delivery is settled by the next one
		}
		must(t, 200, "POST", f.urls[0]+"/v1/subscriptions/s/nack", fmt.Sprintf(`{"delivery_ids":[%q],"error":"no"}`, got.Messages[0].DeliveryID))
		if attempt == 2 {
			f.restart(0, syscall.SIGKILL)
		}
	}
	var page struct {
		DeadLetters []struct{ Attempts int } `json:"dead_letters"`
	}
	decode(t, must(t, 200, "GET", f.urls[0]+"/v1/subscriptions/s/dead-letters", ""), &page)
	if len(page.DeadLetters) != 1 || page.DeadLetters[0].Attempts != 3 {
		t.Errorf("dead letters: %+v", page)
	}
}

// unanswered sends an admin request to a broker and kills that in the middle of it, or just after; then it starts again.
func (f *fleet) unanswered(n int, method, path, body string, after time.Duration) (start, end time.Time, o history.Outcome) {
	f.t.Helper()
	client := newClient(f.t)
	got := make(chan answer, 1)
	start = time.Now()
	go func() { got <- call(client, method, f.urls[n]+path, body) }()
	time.Sleep(after)
	f.restart(n, syscall.SIGKILL)
	a := <-got
	client.CloseIdleConnections()
	switch {
	case a.err != nil || a.status >= 500:
		o = history.Unknown
	case a.status != 200:
		f.t.Errorf("%s %s: %v", method, path, a)
	}
	return start, time.Now(), o
}

// Brokers that are killed while they put all dead letters back, two at once: whoever asks again finishes it, and each message comes once more.
func TestKilledInRedrive(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2)
	m := usual()
	m.groups, m.subs, m.attempts, m.poison, m.pace, m.producers = nil, []string{"strict", "other"}, 2, 2, 0, 2
	l := startLoad(t, f.urls, m)
	pause(span(1500*time.Millisecond, time.Minute), l.ending)
	l.drain(2 * patience)
	l.cured.Store(true)
	c := l.client()
	redriven := func() (all []string) {
		for _, d := range c.deadLetters("strict") {
			all = append(all, d.Payload)
		}
		return all
	}
	const path, body = "/v1/subscriptions/strict/dead-letters/redrive", `{"all":true}`
	dead := redriven()
	left := []int{len(dead)}
	for n := range rounds(3, 20) {
		var both sync.WaitGroup
		both.Go(func() {
			if n == 0 {
				return
			}
			start := time.Now()
			a := call(http.DefaultClient, "POST", f.urls[1]+path, body)
			o := history.OK
			if a.err != nil || a.status != 200 {
				o = history.Unknown
			}
			l.log.Add(history.Move{Start: start, End: time.Now(), Outcome: o, Group: "strict", Redriven: dead})
		})
		start, end, o := f.unanswered(0, "POST", path, body, time.Duration(rand.IntN(20))*time.Millisecond)
		l.log.Add(history.Move{Start: start, End: end, Outcome: o, Group: "strict", Redriven: dead})
		both.Wait()
		left = append(left, len(redriven()))
	}
	must(t, 200, "POST", f.urls[0]+path, body)
	l.verdict(f.pool)
	if n := len(l.log.Dead["strict"]); n > 0 || len(dead) == 0 || len(l.log.Dead["other"]) == 0 {
		t.Errorf("dead letters: %d of %d are left, the other subscription has %d", n, len(dead), len(l.log.Dead["other"]))
	}
	t.Logf("dead letters left after each kill: %v", left)
}

// Brokers that are killed while they seek, over more lanes than one step takes: a second call finishes it, and everything comes again.
func TestKilledInSeek(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2)
	m := usual()
	m.partitions, m.keys, m.unkeyed, m.honest, m.poison, m.spread, m.batch, m.groups, m.subs = 1500, 1500, false, true, 0, 100, 100, []string{"g"}, []string{"strict"}
	m.producers, m.maxSends, m.pace = 0, 0, 0
	l := startLoad(t, f.urls, m)
	// One message in each, so that a seek has many steps.
	c := l.client()
	var pushes, publishes []outgoing
	for n := range m.partitions {
		pushes = append(pushes, outgoing{history.Lane{Queue: m.queue, Key: fmt.Sprint("p", n)}, n, payload("seek-a", n, 0, false), fmt.Sprint(n)})
		publishes = append(publishes, outgoing{history.Lane{Queue: m.stream, Key: fmt.Sprint("k", n)}, n, payload("seek-b", n, 0, false), fmt.Sprint(n)})
	}
	c.pushAll(pushes)
	c.publishAll(publishes)
	l.drain(2 * patience)
	for range rounds(2, 20) {
		for _, s := range []struct{ group, queue, path, body string }{
			{"g", m.queue, "/api/v1/consumer-groups/g/queues/" + m.queue + "/seek", `{"timestamp":"2020-01-01T00:00:00Z"}`},
			{"strict", m.stream, "/v1/subscriptions/strict/seek", `{"to":"earliest"}`},
		} {
			start, end, o := f.unanswered(rand.IntN(2), "POST", s.path, s.body, time.Duration(rand.IntN(30))*time.Millisecond)
			l.log.Add(history.Move{Start: start, End: end, Outcome: o, Group: s.group, Queue: s.queue, Again: true})
			start = time.Now()
			must(t, 200, "POST", f.urls[rand.IntN(2)]+s.path, s.body)
			l.log.Add(history.Move{Start: start, End: time.Now(), Group: s.group, Queue: s.queue, Again: true})
		}
	}
	l.verdict(f.pool)
}

// Brokers that are killed while they delete a queue and a stream: the work is finished by whoever is there, nothing of them is left, and
// new ones of the same names begin empty.
func TestKilledInDelete(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2)
	m := usual()
	m.queue, m.stream = "other", "elsewhere" // a load that must not notice
	l := startLoad(t, f.urls, m)
	count := func(sql string) (n int) {
		t.Helper()
		if err := f.pool.QueryRow(t.Context(), sql).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for range rounds(1, 20) {
		var items, messages []string
		for n := range 1500 {
			items = append(items, fmt.Sprintf(`{"queue":"gone","partition":"p%d","payload":1}`, n))
			messages = append(messages, fmt.Sprintf(`{"key":"k%d","payload":1}`, n))
		}
		must(t, 201, "POST", f.urls[0]+"/api/v1/push", `{"items":[`+strings.Join(items, ",")+`]}`)
		must(t, 200, "POST", f.urls[0]+"/v1/streams/past/messages", `{"messages":[`+strings.Join(messages, ",")+`]}`)
		must(t, 200, "PUT", f.urls[0]+"/v1/subscriptions/past", `{"stream":"past"}`)
		must(t, 200, "GET", f.urls[0]+"/api/v1/pop/queue/gone?batch=100&partitions=100&consumerGroup=g", "")
		must(t, 200, "POST", f.urls[0]+"/v1/subscriptions/past/receive", `{"max_messages":100,"wait_seconds":10}`)
		for n, path := range []string{"/api/v1/resources/queues/gone", "/v1/streams/past"} {
			f.unanswered(n, "DELETE", path, "", time.Duration(rand.IntN(30))*time.Millisecond)
			a := call(http.DefaultClient, "DELETE", f.urls[1-n]+path, "")
			if a.status != 200 && a.status != 404 {
				t.Errorf("again: %v", a)
			}
		}
		must(t, 204, "GET", f.urls[0]+"/api/v1/pop/queue/gone?consumerGroup=g", "")
		must(t, 404, "POST", f.urls[0]+"/v1/subscriptions/past/receive", "")
		f.restart(0, syscall.SIGKILL)
		f.restart(1, syscall.SIGKILL)
		must(t, 200, "GET", f.urls[0]+"/ready", "")
		// Time passes: a job is its broker's for so long, also when that is dead.
		if _, err := f.pool.Exec(t.Context(), `update ferrymq.jobs j set lease_until = clock_timestamp(), due_at = clock_timestamp() where j.kind = 'delete_queue'`); err != nil {
			t.Fatal(err)
		}
		eventually(t, patience, "all that was deleted is gone", func() bool {
			return count(`select count(*) from ferrymq.queues q where q.deleted_at is not null`) == 0 &&
				count(`select count(*) from ferrymq.partitions p where p.queue_id not in (select q.id from ferrymq.queues q)`) == 0 &&
				count(`select count(*) from ferrymq.segments s where s.partition_id not in (select p.id from ferrymq.partitions p)`) == 0 &&
				count(`select count(*) from ferrymq.cursors c where c.group_id not in (select g.id from ferrymq.groups g)`) == 0
		})
		must(t, 201, "POST", f.urls[1]+"/api/v1/push", `{"items":[{"queue":"gone","partition":"p0","payload":"new"}]}`)
		if s := must(t, 200, "GET", f.urls[0]+"/api/v1/pop/queue/gone?batch=100&partitions=100&autoAck=true&consumerGroup=g", ""); strings.Count(s, `"data":`) != 1 || !strings.Contains(s, `"data":"new"`) {
			t.Errorf("the new queue has %s", s)
		}
		must(t, 200, "DELETE", f.urls[1]+"/api/v1/resources/queues/gone", "")
	}
	l.verdict(f.pool)
}

// nextVersion builds a binary of the same source and one more migration, which changes a table.
func nextVersion(t *testing.T, table string) (bin string) {
	t.Helper()
	dir := t.TempDir()
	added, err := filepath.Abs(fmt.Sprintf("../schema/%05d_added.sql", schema.Known()+1))
	if err != nil {
		t.Fatal(err)
	}
	file, overlay := filepath.Join(dir, "added.sql"), filepath.Join(dir, "overlay.json")
	for name, text := range map[string]string{
		file: fmt.Sprintf(`-- +goose Up
alter table ferrymq.%[1]s add column added int not null default 7;
create table ferrymq.added (x int);
-- +goose Down
drop table ferrymq.added;
alter table ferrymq.%[1]s drop column added;
`, table),
		overlay: fmt.Sprintf(`{"Replace":{%q:%q}}`, added, file),
	} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	bin = filepath.Join(dir, "later")
	if err := build(bin, "-overlay", overlay); err != nil {
		t.Fatal(err)
	}
	return bin
}

// A deployment with a migration, under load. It migrates while old brokers run, which go on; an old one that starts afterwards refuses
// to, and says why.
func TestRollingMigration(t *testing.T) {
	t.Parallel()
	known, later := schema.Known(), nextVersion(t, "queues")
	f := newFleet(t, 2)
	l := startLoad(t, f.urls, usual())
	pause(300*time.Millisecond, l.ending)
	for n := range f.brokers {
		f.brokers[n].end(syscall.SIGTERM)
		f.replace(n, launch(t, later, f.settings...))
		f.brokers[n].ready()
		pause(500*time.Millisecond, l.ending) // one is old, one is new
	}
	if version, err := schema.Applied(t.Context(), f.pool); err != nil || version != known+1 {
		t.Errorf("schema version %d (%v), want %d", version, err, known+1)
	}
	old := f.spawn()
	select {
	case <-old.done:
	case <-time.After(patience):
		t.Fatal("an old broker starts")
	}
	if want := fmt.Sprintf("the database has schema version %d, this binary knows up to %d", known+1, known); old.cmd.ProcessState.ExitCode() != 1 || !strings.Contains(old.String(), want) {
		t.Errorf("an old broker ended with %d and said %s", old.cmd.ProcessState.ExitCode(), old)
	}
	l.recovers()
	l.verdict(f.pool)
	l.only(append([]string{"*: no answer", "*: 503 not ready, Retry-After"}, late...)...)
}

// A migration of a table that somebody reads for long: everybody who wants the table queues up behind it, so it gives up soon and tries
// again later, until the read has ended. Calls take a little longer meanwhile, and that is all.
func TestMigrationBehindRead(t *testing.T) {
	t.Parallel()
	later := nextVersion(t, "partitions")
	f := newFleet(t, 2)
	l := startLoad(t, f.urls, usual())
	read, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = read.Rollback(context.Background()) }()
	if _, err := read.Exec(t.Context(), "select count(*) from ferrymq.partitions"); err != nil {
		t.Fatal(err)
	}
	b := launch(t, later, f.settings...)
	waits := func() (n int) {
		if err := f.pool.QueryRow(t.Context(), `select count(*) from pg_stat_activity a where a.datname = current_database() and a.wait_event_type = 'Lock'
			and a.query like '%add column added%'`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	eventually(t, patience, "the migration waits for the read", func() bool { return waits() == 1 })
	client, pushes, longest := newClient(t), 0, time.Duration(0)
	began := time.Now()
	lasts := span(6*time.Second, time.Minute)
	for time.Since(began) < lasts {
		a := call(client, "POST", f.urls[pushes%2]+"/api/v1/push", fmt.Sprintf(`{"items":[{"queue":"q2","partition":"p%d","payload":1}]}`, pushes%5))
		if a.status != 201 {
			t.Fatalf("a push meanwhile: %v", a)
		}
		pushes, longest = pushes+1, max(longest, a.took)
		pause(5*time.Millisecond, l.ending)
	}
	t.Logf("%d pushes in %v, the longest took %v", pushes, lasts, longest)
	if longest > 2*time.Second {
		t.Errorf("a push took %v while a migration waited", longest)
	}
	if v, err := schema.Applied(t.Context(), f.pool); err != nil || v != schema.Known() {
		t.Errorf("schema version %d (%v) while the table is read", v, err)
	}
	if err := read.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.ready()
	if v, err := schema.Applied(t.Context(), f.pool); err != nil || v != schema.Known()+1 {
		t.Errorf("schema version %d (%v) after the read", v, err)
	}
	l.recovers()
	l.verdict(f.pool)
	l.only(late...)
}

// The clocks of brokers step by an hour, to and fro, each in its own way: nobody is given what another has, nothing is late or early, for
// only the database's clock judges. The brokers are built from the same source with a standard library whose wall clock does that.
func TestClockSteps(t *testing.T) {
	if !*long {
		t.Skip("builds the standard library: long form only")
	}
	t.Parallel()
	dir := t.TempDir()
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	original := filepath.Join(strings.TrimSpace(string(out)), "src", "time", "time.go")
	text, err := os.ReadFile(original)
	if err != nil {
		t.Fatal(err)
	}
	const read = "sec, nsec, mono := runtimeNow()\n"
	if strings.Count(string(text), read) == 0 {
		t.Fatal("time.Now is not as it was")
	}
	stepping := strings.ReplaceAll(string(text), read, read+"\tsec += [...]int64{0, 3600, -3600, 86400}[uint64(mono)/2000000000%4]\n")
	file, overlay := filepath.Join(dir, "time.go"), filepath.Join(dir, "overlay.json")
	for name, text := range map[string]string{file: stepping, overlay: fmt.Sprintf(`{"Replace":{%q:%q}}`, original, file)} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	bin := filepath.Join(dir, "stepping")
	if err := build(bin, "-overlay", overlay); err != nil {
		t.Fatal(err)
	}
	f := newFleet(t, 2)
	f.brokers[0].end(syscall.SIGTERM) // one of two: the other's clock is right
	f.replace(0, launch(t, bin, f.settings...))
	f.brokers[0].ready()
	m := usual()
	m.lease = 1
	l := startLoad(t, f.urls, m)
	pause(30*time.Second, l.ending)
	l.verdict(f.pool)
	l.only(late...)
}
