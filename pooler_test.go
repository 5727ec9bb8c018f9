package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/db"
	"ferrymq/dbtest"
	"ferrymq/localpg"
	"ferrymq/schema"
)

// recovery is how soon a broker must work again once what was in the way has gone.
const recovery = 5 * time.Second

func through(t *testing.T, p *dbtest.Pooler, dsn string) string {
	t.Helper()
	dsn, err := p.DSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	return dsn
}

// again awaits success of a push.
func (p *process) again(t *testing.T, url, what string) {
	t.Helper()
	began := time.Now()
	for {
		status, body, err := p.call("POST", url+"/api/v1/push", `{"items":[{"queue":"again","payload":1}]}`)
		if status == 201 {
			t.Logf("%s: works again after %v", what, time.Since(began).Round(time.Millisecond))
			return
		}
		if err != nil || status != 503 {
			t.Errorf("%s: %d %s (%v), want 503", what, status, body, err)
		}
		if time.Since(began) > recovery {
			t.Fatalf("%s: does not work again after %v: %d %s", what, recovery, status, body)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// refused makes a push that cannot reach the database.
func (p *process) refused(t *testing.T, url, what string) {
	t.Helper()
	resp, err := p.client.Post(url+"/api/v1/push", "application/json", strings.NewReader(`{"items":[{"queue":"again","payload":1}]}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" {
		t.Errorf("%s: %d, Retry-After %q", what, resp.StatusCode, resp.Header.Get("Retry-After"))
	}
}

// woken has a and b wait for what the other one gets, in both APIs. Each must have it within so long.
func woken(t *testing.T, a, b *process, atA, atB string, within time.Duration) {
	t.Helper()
	a.must(t, 201, "POST", atA+"/api/v1/push", `{"items":[{"queue":"w","payload":"first"}]}`)
	a.must(t, 200, "POST", atA+"/v1/streams/letters/messages", `{"messages":[{"key":"`+uuid.NewString()+`","payload":"first"}]}`)
	for _, way := range []struct {
		p        *process
		at, body string
		other    *process
		otherAt  string
	}{{a, atA, "from b", b, atB}, {b, atB, "from a", a, atA}} {
		drain(t, way.p, way.at)
		type answer struct {
			body string
			at   time.Time
		}
		queue, lane := make(chan answer, 1), make(chan answer, 1)
		ask := func(to chan answer, method, url, body string) {
			status, text, err := way.p.call(method, url, body)
			to <- answer{fmt.Sprintf("%d %s %v", status, text, err), time.Now()}
		}
		go ask(queue, "GET", way.at+"/api/v1/pop/queue/w?wait=true&timeout=20000&autoAck=true", "")
		go ask(lane, "POST", way.at+"/v1/subscriptions/mail/receive", `{"wait_seconds":20}`)
		time.Sleep(1500 * time.Millisecond) // both wait, and their re-checks have reached the longest interval
		pushed := time.Now()
		way.other.must(t, 201, "POST", way.otherAt+"/api/v1/push", `{"items":[{"queue":"w","payload":"`+way.body+`"}]}`)
		way.other.must(t, 200, "POST", way.otherAt+"/v1/streams/letters/messages", `{"messages":[{"key":"`+uuid.NewString()+`","payload":"`+way.body+`"}]}`) // no other message is in front of it
		for name, c := range map[string]chan answer{"pop": queue, "receive": lane} {
			got := <-c
			if took := got.at.Sub(pushed); !strings.Contains(got.body, way.body) || took > within {
				t.Errorf("%s %s after %v: %s", name, way.body, took, got.body)
			}
		}
	}
}

// drain takes all there is.
func drain(t *testing.T, p *process, at string) {
	t.Helper()
	for strings.Contains(p.must(t, 200, "POST", at+"/v1/subscriptions/mail/receive", `{"max_messages":10}`), `"delivery_id"`) {
	}
	for {
		status, _, err := p.call("GET", at+"/api/v1/pop/queue/w?autoAck=true&batch=100", "")
		if err != nil || status != 200 && status != 204 {
			t.Fatal(status, err)
		}
		if status == 204 {
			return
		}
	}
}

// TestThroughPooler is brokers whose only way to the database is a PgBouncer that pools transactions.
func TestThroughPooler(t *testing.T) {
	t.Parallel()
	if !dbtest.HasPooler() {
		t.Skip("pgbouncer is not installed")
	}
	s := dbtest.Durable(t)
	pooler := dbtest.NewPooler(t, s, "query_wait_timeout = 2")
	dsn := through(t, pooler, s.DSN)
	var brokers [3]*process
	var at [3]string
	for i := range brokers { // all of them want to migrate
		brokers[i] = spawn(t, "DATABASE_URL="+dsn, "STATEMENT_TIMEOUT_MS=3000")
	}
	for i, p := range brokers {
		at[i] = p.ready(t)
		p.await(t, `behind a connection pooler.* set DATABASE_DIRECT_URL`)
	}
	admin := dbtest.Pool(t, s.DSN, 3)
	var n int64
	if err := admin.QueryRow(t.Context(), "select count(*) from ferrymq.schema_version v where v.version_id > 0").Scan(&n); err != nil || n != schema.Known() {
		t.Errorf("%d migrations applied (%v)", n, err)
	}
	brokers[0].must(t, 200, "PUT", at[0]+"/v1/subscriptions/mail", `{"stream":"letters"}`)
	woken(t, brokers[0], brokers[1], at[0], at[1], 4*time.Second)

	// Nothing is left with the server connections for whoever gets them next.
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	for range 30 {
		var found string
		err := conn.QueryRow(t.Context(), `select concat_ws(' ', current_setting('statement_timeout'), current_setting('lock_timeout'), current_setting('jit'),
				current_setting('enable_seqscan'), current_setting('synchronous_commit'), current_setting('idle_in_transaction_session_timeout'),
				(select count(*) from pg_prepared_statements), (select count(*) from pg_locks l where l.locktype = 'advisory'), (select count(*) from pg_listening_channels()))`,
			pgx.QueryExecModeSimpleProtocol).Scan(&found)
		if err != nil || found != "0 0 on on on 0 0 0 0" {
			t.Fatalf("a server connection has been changed: %q (%v)", found, err)
		}
	}

	// What takes too long is cancelled, also where no session can be told to.
	hold, err := admin.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := hold.Exec(t.Context(), "lock table ferrymq.trace_names"); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	status, body, err := brokers[0].call("GET", at[0]+"/api/v1/traces/names", "")
	if err != nil || status != 500 || string(body) != `{"error":"query failed"}` || time.Since(began) > 10*time.Second {
		t.Errorf("%d %s (%v) after %v", status, body, err, time.Since(began))
	}
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		if err := admin.QueryRow(t.Context(), "select count(*) from pg_stat_activity a where a.wait_event_type = 'Lock' and a.query like '%trace_names%'").Scan(&n); err != nil || time.Now().After(end) {
			t.Fatalf("still %d statements (%v)", n, err)
		}
		if n == 0 {
			break
		}
	}
	if err := hold.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}

	// The pooler goes away and comes back.
	pooler.Stop()
	brokers[1].refused(t, at[1], "no pooler")
	pooler.Start(t)
	brokers[1].again(t, at[1], "the pooler is back")

	// All its connections are taken.
	var takers []*pgx.Conn
	for range 10 {
		c, err := pgx.Connect(t.Context(), dsn)
		if err != nil {
			t.Fatal(err)
		}
		takers = append(takers, c)
		if _, err := c.Exec(t.Context(), "begin"); err != nil {
			t.Fatal(err)
		}
	}
	brokers[1].refused(t, at[1], "no connection of the pooler")
	for _, c := range takers {
		c.Close(t.Context())
	}
	brokers[1].again(t, at[1], "connections are free")

	// The server behind it goes away and comes back.
	admin.Close()
	s.Stop()
	brokers[1].refused(t, at[1], "no server")
	server, err := localpg.Start(t.Context(), localpg.Options{Dir: s.Dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	for i, p := range brokers {
		p.again(t, at[i], "the server is back")
	}
	woken(t, brokers[2], brokers[0], at[2], at[0], 4*time.Second)
	for _, p := range brokers {
		p.signal(t, os.Interrupt) // before their database goes
		p.exits(t, patience)
	}
}

// TestIsolationBehindPooler: where no session can be set to it, a broker does not start on another isolation level than the one its
// statements are written for, and says what to do. Once that is done it starts, and it does so behind a pooler only.
func TestIsolationBehindPooler(t *testing.T) {
	t.Parallel()
	if !dbtest.HasPooler() {
		t.Skip("pgbouncer is not installed")
	}
	s := dbtest.Durable(t)
	admin := dbtest.Pool(t, s.DSN, 1)
	run := func(sql string) {
		t.Helper()
		if _, err := admin.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	for _, level := range []string{"serializable", "repeatable read"} {
		for _, whose := range []string{"role postgres", "database postgres"} {
			run("alter " + whose + " set default_transaction_isolation = '" + level + "'")
			dsn := through(t, dbtest.NewPooler(t, s), s.DSN)
			for _, settings := range [][]string{{"DATABASE_URL=" + dsn}, {"DATABASE_URL=" + dsn, "DATABASE_DIRECT_URL=" + s.DSN}} {
				said := spawn(t, settings...).fails(t)
				if !strings.Contains(said, db.ErrIsolation.Error()) || !strings.Contains(said, level) {
					t.Errorf("%s of the %s: it said\n%s", level, whose, said)
				}
			}
			run("alter " + whose + " reset default_transaction_isolation")
		}
	}
	p := spawn(t, "DATABASE_URL="+through(t, dbtest.NewPooler(t, s), s.DSN))
	p.must(t, 201, "POST", p.ready(t)+"/api/v1/push", `{"items":[{"queue":"q","payload":1}]}`)
	p.signal(t, os.Interrupt) // before its database goes
	p.exits(t, patience)
}

// TestCancelBehindPooler: callers that go away all the time, also while what they asked for ends by itself, harm nobody: PgBouncer 1.18
// ends when a request to cancel is given up halfway. Nor does a cancel hit somebody else's statement.
func TestCancelBehindPooler(t *testing.T) {
	t.Parallel()
	if !dbtest.HasPooler() {
		t.Skip("pgbouncer is not installed")
	}
	s := dbtest.Durable(t)
	pool, err := db.NewPool(t.Context(), through(t, dbtest.NewPooler(t, s), s.DSN), 10, patience)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	var cancelled, ended atomic.Int64
	var all sync.WaitGroup
	for n := range 8 {
		all.Go(func() {
			for i := range 25 {
				took := time.Duration(i%5+1) * time.Millisecond
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Millisecond)
				_, err := pool.Exec(ctx, "select pg_sleep($1::float8)", took.Seconds())
				cancel()
				switch {
				case err == nil:
					ended.Add(1)
				case ctx.Err() != nil:
					cancelled.Add(1)
				default:
					t.Errorf("%d: a statement in time: %v", n, err)
				}
			}
		})
	}
	all.Wait()
	if cancelled.Load() == 0 || ended.Load() == 0 {
		t.Errorf("%d were cancelled, %d ended", cancelled.Load(), ended.Load())
	}
	if _, err := pool.Exec(t.Context(), "select 1"); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// TestPoolerWithDirectWay is brokers that have a second address, for what needs a session.
func TestPoolerWithDirectWay(t *testing.T) {
	t.Parallel()
	if !dbtest.HasPooler() {
		t.Skip("pgbouncer is not installed")
	}
	s := dbtest.Durable(t)
	dsn := through(t, dbtest.NewPooler(t, s), s.DSN)
	never := []string{"DATABASE_URL=" + dsn, "DATABASE_DIRECT_URL=" + s.DSN, "POP_WAIT_INITIAL_INTERVAL_MS=60000", "POP_WAIT_MAX_INTERVAL_MS=60000"}
	a, b := spawn(t, never...), spawn(t, never...)
	atA, atB := a.ready(t), b.ready(t)
	a.must(t, 200, "PUT", atA+"/v1/subscriptions/mail", `{"stream":"letters"}`)
	woken(t, a, b, atA, atB, 4*time.Second)
	for _, p := range []*process{a, b} {
		if strings.Contains(p.String(), "pooler") {
			t.Error("it warns")
		}
	}
	other := dbtest.Empty(t)
	for name, c := range map[string]struct{ settings, want string }{
		"another database": {"DATABASE_URL=" + dsn + "\nDATABASE_DIRECT_URL=" + other, "lead to different databases"},
		"to migrate":       {"DATABASE_URL=" + other + "\nDATABASE_DIRECT_URL=" + s.DSN, "lead to different databases"},
		"alone":            {"DATABASE_DIRECT_URL=" + s.DSN, "DATABASE_DIRECT_URL: needs DATABASE_URL too"},
		"no address":       {"DATABASE_URL=" + s.DSN + "\nDATABASE_DIRECT_URL=postgres://a:Secret@b:c/", "DATABASE_DIRECT_URL: cannot be parsed"},
	} {
		if said := spawn(t, strings.Split(c.settings, "\n")...).fails(t); !strings.Contains(said, c.want) || strings.Contains(said, "Secret") {
			t.Errorf("%s: said %q, want %q", name, said, c.want)
		}
	}
}
