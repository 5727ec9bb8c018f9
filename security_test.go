package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	neturl "net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"ferrymq/dbtest"
)

const jwtSecret = "jwt-secret-of-this-test"

// TestRevokedWhileParked: a request that waits is judged again before it is given anything: a key that was deleted and a token that has
// expired meanwhile get nothing, and what they would have got goes to somebody else, untouched.
func TestRevokedWhileParked(t *testing.T) {
	t.Parallel()
	p := spawn(t, "DATABASE_URL="+dbtest.New(t), "BIND_ADDR=127.0.0.1", "JWT_ENABLED=true", "JWT_SECRET="+jwtSecret, "JWT_CLOCK_SKEW=0", "ROOT_API_KEY="+rootKey)
	url := p.ready(t)
	p.good(t, rootKey, "POST", url+"/v1/projects", `{"name":"p"}`)
	answer := p.good(t, rootKey, "POST", url+"/v1/projects/p/keys", `{"scopes":["consume"]}`)
	var key struct{ ID, Secret string }
	if err := json.Unmarshal([]byte(answer), &key); err != nil || key.ID == "" {
		t.Fatal(answer, err)
	}
	short, err := jwt.NewWithClaims(jwt.SigningMethodHS256, jwt.MapClaims{"role": "read-write", "exp": time.Now().Add(3 * time.Second).Unix()}).SignedString([]byte(jwtSecret))
	if err != nil {
		t.Fatal(err)
	}
	p.good(t, rootKey, "PUT", url+"/v1/subscriptions/s?project=p", `{"stream":"jobs"}`)
	type result struct {
		status int
		text   string
	}
	wait := func(key, method, path, body string) chan result {
		out := make(chan result, 1)
		go func() {
			status, text := p.as(t, key, method, url+path, body)
			out <- result{status, text}
		}()
		return out
	}
	began := time.Now()
	receive := wait(key.Secret, "POST", "/v1/subscriptions/s/receive", `{"wait_seconds":25}`)
	pop := wait(short, "GET", "/api/v1/pop/queue/jobs?wait=true&timeout=60000&autoAck=true", "")
	awaitMetric(t, p, url, `ferrymq_parked_polls\{queue="jobs"\} 1`)
	awaitMetric(t, p, url, `ferrymq_parked_polls\{queue=""\} 1`)
	p.good(t, rootKey, "DELETE", url+"/v1/projects/p/keys/"+key.ID, "")
	time.Sleep(time.Until(began.Add(4 * time.Second))) // the token is over
	p.good(t, rootKey, "POST", url+"/v1/streams/jobs/messages?project=p", `{"messages":[{"key":"k","payload":"secret"}]}`)
	p.good(t, rootKey, "POST", url+"/api/v1/push", `{"items":[{"queue":"jobs","payload":"secret"}]}`)
	if r := <-receive; r.status != 401 || r.text != `{"error":"Unknown API key"}` {
		t.Errorf("a deleted key got %d %s", r.status, r.text)
	}
	if r := <-pop; r.status != 401 || r.text != `{"error":"Token has expired"}` {
		t.Errorf("an expired token got %d %s", r.status, r.text)
	}
	if s := p.good(t, rootKey, "POST", url+"/v1/subscriptions/s/receive?project=p", `{"wait_seconds":25}`); !strings.Contains(s, `"attempt":1,`) {
		t.Errorf("the message is not as it was: %s", s)
	}
	if s := p.good(t, rootKey, "GET", url+"/api/v1/pop/queue/jobs?wait=true&timeout=25000", ""); !strings.Contains(s, `"data":"secret"`) {
		t.Errorf("the message is lost: %s", s)
	}
}

// TestSecretsStayInside: passwords, keys, tokens and payloads are in no log at any level, no metric, no answer that has no business with
// them, not in the list of processes, and not in what the database shows of its sessions.
func TestSecretsStayInside(t *testing.T) {
	t.Parallel()
	for _, format := range []string{"text", "json"} {
		t.Run(format, func(t *testing.T) {
			t.Parallel()
			dsn := dbtest.New(t)
			conn, err := pgx.Connect(t.Context(), dsn)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close(context.Background())
			const password, payload, encryption = "the-database-password", "the-payload", "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
			secrets := []string{password, rootKey, jwtSecret, encryption, payload, "fmq_", "eyJ"}
			settings := []string{"BIND_ADDR=127.0.0.1", "JWT_ENABLED=true", "JWT_SECRET=" + jwtSecret, "ROOT_API_KEY=" + rootKey, "ENCRYPTION_KEY=" + encryption, "LOG_LEVEL=debug", "LOG_FORMAT=" + format}
			with := dsn + " password=" + password
			if strings.Contains(dsn, "://") {
				u, _ := neturl.Parse(dsn)
				u.User = neturl.UserPassword(u.User.Username(), password)
				with = u.String()
			}
			p := spawn(t, append(settings, "DATABASE_URL="+with)...)
			p.await(t, `msg"?[=:]"?ready`)
			url := p.url(t)
			token, err := jwt.NewWithClaims(jwt.SigningMethodHS256, jwt.MapClaims{"sub": "somebody", "role": "admin"}).SignedString([]byte(jwtSecret))
			if err != nil {
				t.Fatal(err)
			}
			p.good(t, rootKey, "POST", url+"/v1/projects", `{"name":"p"}`)
			key := p.good(t, token, "POST", url+"/v1/projects/p/keys", `{"scopes":["publish","consume","read","admin"]}`, "secret")
			p.good(t, token, "POST", url+"/api/v1/configure", `{"queue":"q","options":{"encryptionEnabled":true}}`)
			p.good(t, token, "POST", url+"/api/v1/push", `{"items":[{"queue":"q","transactionId":"a","payload":"the-payload"},{"queue":"q","transactionId":"a","payload":"the-payload"}]}`)
			p.good(t, key, "POST", url+"/v1/streams/s/messages", `{"messages":[{"key":"k","payload":"the-payload","headers":{"h":"the-payload"}}]}`)
			p.good(t, token, "GET", url+"/api/v1/pop/queue/q", "")
			// What is refused says nothing of what was sent.
			for _, credentials := range []string{key + "x", token + "x", rootKey + "x", "fmq_" + strings.Repeat("x", 52), password} {
				if status, text := p.as(t, credentials, "POST", url+"/api/v1/push", `{"items":[{"payload":"the-payload"}]}`); status != 401 || strings.Contains(text, credentials) {
					t.Errorf("%d %s", status, text)
				}
			}
			for _, body := range []string{`{"items":[{"queue":"q","payload":"the-payload"`, `{"items":[{"payload":"the-payload"}]}`, `{"items":"the-payload"}`, `the-payload`, `{"items":[{"queue":7,"payload":"the-payload"}]}`} {
				for _, path := range []string{"/api/v1/push", "/api/v1/ack/batch", "/api/v1/transaction", "/api/v1/configure", "/v1/streams/s/messages"} {
					if status, text := p.as(t, rootKey, "POST", url+path, body); status < 300 && path == "/api/v1/push" || strings.Contains(text, payload) {
						t.Errorf("%s %s: %d %s", path, body, status, text)
					}
				}
			}
			// A statement that fails in the middle of everything.
			for _, sql := range []string{"create function fail() returns trigger language plpgsql as $$ begin raise exception 'broken: %', encode(new.frames, 'escape'); end $$",
				"create trigger fail before insert on ferrymq.segments for each row execute function fail()"} {
				if _, err := conn.Exec(t.Context(), sql); err != nil {
					t.Fatal(err)
				}
			}
			if status, text := p.as(t, rootKey, "POST", url+"/api/v1/push", `{"items":[{"queue":"other","payload":1}]}`); status != 500 || text != `{"error":"push failed"}` {
				t.Errorf("%d %s", status, text)
			}
			if _, err := conn.Exec(t.Context(), "drop trigger fail on ferrymq.segments"); err != nil {
				t.Fatal(err)
			}
			var sessions string
			if err := conn.QueryRow(t.Context(), "select string_agg(a::text, chr(10)) from pg_stat_activity a where pid <> pg_backend_pid()").Scan(&sessions); err != nil {
				t.Fatal(err)
			}
			_, metrics := p.as(t, "", "GET", url+"/metrics", "")
			command, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.cmd.Process.Pid))
			if err != nil && !os.IsNotExist(err) {
				t.Fatal(err)
			}
			var shown strings.Builder
			for _, path := range []string{"status", "analytics/postgres-stats", "analytics/system-metrics", "analytics/worker-metrics", "system/maintenance", "resources/queues/q", "consumer-groups"} {
				_, text := p.as(t, rootKey, "GET", url+"/api/v1/"+path, "")
				shown.WriteString(text)
			}
			_, keys := p.as(t, rootKey, "GET", url+"/v1/projects/p/keys", "")
			shown.WriteString(keys)
			// Stored keys are hashes.
			var stored string
			if err := conn.QueryRow(t.Context(), "select string_agg(k::text, chr(10)) from ferrymq.api_keys k").Scan(&stored); err != nil {
				t.Fatal(err)
			}
			// A database that is not there, and a setting that is wrong.
			away := spawn(t, append(settings, "DATABASE_URL=postgres://u:"+password+"@127.0.0.1:1/x")...)
			away.await(t, `waiting for the database`)
			wrong := spawn(t, append(settings, "DATABASE_URL=postgres://u:"+password+"@[bad")...)
			wrong.fails(t)
			for where, text := range map[string]string{"the log": p.String(), "the sessions": sessions, "the metrics": metrics, "the processes": string(command), "the answers": shown.String(),
				"the keys": stored, "the log without a database": away.String(), "the log of a bad start": wrong.String()} {
				for _, s := range append(secrets, key, token) {
					if strings.Contains(text, s) {
						t.Errorf("%q is in %s:\n%s", s, where, text)
					}
				}
			}
			if t.Failed() {
				return
			}
			if !strings.Contains(p.String(), "/api/v1/push") {
				t.Error("requests are not logged at level debug")
			}
		})
	}
}

// hostileNames are names that something between a client and the disk may take for more than a name.
var hostileNames = []string{`'; drop table ferrymq.queues; --`, `$1`, `%s%n%d`, `%`, `_`, `${jndi:ldap://x/y}`, `<script>alert(1)</script>`, `{{7*7}}`, "a\r\nX-Evil: 1\r\n\r\n<html>", "line\nlevel=ERROR msg=forged",
	"\x1b[31mred\x1b[0m", `"quoted" \ back`, "tab\tnul-free", "../../etc/passwd", `{"json":1}`, "\u202egnp.exe", "\u2028", "a=b msg=forged"}

// TestHostileNames: names are data everywhere: in SQL, answers, headers, labels and logs.
func TestHostileNames(t *testing.T) {
	t.Parallel()
	for _, format := range []string{"text", "json"} {
		t.Run(format, func(t *testing.T) {
			t.Parallel()
			p := spawn(t, "DATABASE_URL="+dbtest.New(t), "BIND_ADDR=127.0.0.1", "LOG_LEVEL=debug", "LOG_FORMAT="+format)
			p.await(t, `msg"?[=:]"?ready`)
			url := p.url(t)
			json1 := func(s string) string { b, _ := json.Marshal(s); return string(b) }
			for _, n := range hostileNames {
				q, path := json1(n), neturl.PathEscape(n)
				p.good(t, "", "POST", url+"/api/v1/push", fmt.Sprintf(`{"items":[{"queue":%[1]s,"partition":%[1]s,"transactionId":%[1]s,"payload":%[1]s}]}`, q))
				p.good(t, "", "POST", url+"/api/v1/configure", fmt.Sprintf(`{"queue":%[1]s,"namespace":%[1]s,"task":%[1]s,"options":{"leaseTime":30}}`, q))
				answer := p.good(t, "", "GET", url+"/api/v1/pop/queue/"+path+"?consumerGroup="+neturl.QueryEscape(n), "")
				var got struct {
					Queue, Partition, ConsumerGroup string
					Messages                        []struct{ TransactionID, Data, PartitionID, LeaseID string }
				}
				if err := json.Unmarshal([]byte(answer), &got); err != nil || got.Queue != n || got.Partition != n || got.ConsumerGroup != n || len(got.Messages) != 1 || got.Messages[0].TransactionID != n || got.Messages[0].Data != n {
					t.Errorf("%q came back as %s", n, answer)
					continue
				}
				m := got.Messages[0]
				p.good(t, "", "POST", url+"/api/v1/ack", fmt.Sprintf(`{"transactionId":%[1]s,"partitionId":%[2]q,"leaseId":%[3]q,"consumerGroup":%[1]s,"status":"dlq","error":%[1]s}`, q, m.PartitionID, m.LeaseID))
				p.good(t, "", "POST", url+"/api/v1/traces", fmt.Sprintf(`{"transactionId":%[1]s,"partitionId":%[2]q,"data":%[1]s,"eventType":%[1]s,"traceNames":%[1]s}`, q, m.PartitionID))
				for _, get := range []string{"/api/v1/dlq?queue=" + neturl.QueryEscape(n), "/api/v1/messages?queue=" + neturl.QueryEscape(n), "/api/v1/traces/by-name/" + path, "/api/v1/resources/queues/" + path} {
					if s := p.good(t, "", "GET", url+get, ""); strings.ContainsAny(s, "\r\n\x1b") || !json.Valid([]byte(s)) || strings.Count(s, m.PartitionID) == 0 {
						t.Errorf("%s: %s", get, s)
					}
				}
				// A filter is a name and no pattern.
				if s := p.good(t, "", "DELETE", url+"/api/v1/dlq?queue="+neturl.QueryEscape(n), ""); !strings.Contains(s, `"deleted":1,`) {
					t.Errorf("%q: %s", n, s)
				}
				resp, err := http.Get(url + "/v1/streams/" + path + "nothing")
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
				if h := resp.Header; h.Get("X-Evil") != "" || h.Get("X-Content-Type-Options") != "nosniff" || h.Get("Content-Type") != "application/json" || h.Get("Access-Control-Allow-Origin") != "" {
					t.Errorf("%q: %v", n, h)
				}
				p.good(t, "", "PUT", url+"/v1/subscriptions/"+path, `{"stream":`+q+`}`)
				p.good(t, "", "POST", url+"/v1/streams/"+path+"/messages", fmt.Sprintf(`{"messages":[{"key":%[1]s,"id":%[1]s,"payload":2,"headers":{"h":%[1]s}}]}`, json1(n+"2")))
				p.good(t, "", "POST", url+"/v1/subscriptions/"+path+"/receive", `{"consumer":`+q+`}`)
				p.as(t, "", "GET", url+"/api/v1/pop/queue/x?batch="+neturl.QueryEscape(n), "")
				p.as(t, "", "GET", url+"/"+path, "")
			}
			if s := p.good(t, "", "GET", url+"/api/v1/resources/queues", ""); strings.Count(s, `"name":`) != len(hostileNames)+1 && strings.Count(s, `"name":`) != len(hostileNames) {
				t.Errorf("%d queues: %s", strings.Count(s, `"name":`), s)
			}
			// Nothing without a filter.
			for _, query := range []string{"", "?queue=", "?consumerGroup=x"} {
				if status, text := p.as(t, "", "DELETE", url+"/api/v1/dlq"+query, ""); status != 400 || text != `{"error":"queue is required"}` {
					t.Errorf("DELETE dlq%s: %d %s", query, status, text)
				}
			}
			_, metrics := p.as(t, "", "GET", url+"/metrics/prometheus", "")
			parser := expfmt.NewTextParser(model.LegacyValidation)
			families, err := parser.TextToMetricFamilies(strings.NewReader(metrics))
			if err != nil {
				t.Fatalf("%v:\n%s", err, metrics)
			}
			labels := map[string]bool{}
			for _, m := range families["ferrymq_queue_pending_messages"].GetMetric() {
				labels[m.GetLabel()[0].GetValue()] = true
			}
			for _, n := range hostileNames {
				if !labels[n] {
					t.Errorf("no label %q", n)
				}
			}
			// Nobody writes lines, fields or colours of his own into the log.
			for line := range bytes.Lines([]byte(p.String())) {
				line = bytes.TrimSuffix(line, []byte("\n"))
				if len(line) == 0 || bytes.HasPrefix(line, []byte("ferrymq: ")) {
					continue
				}
				if i := bytes.IndexFunc(line, func(r rune) bool { return r < ' ' || r == 0x7f || r == '\u202e' || r == '\u2028' }); i >= 0 && (format == "text" || line[i] < ' ') {
					t.Errorf("the log has %q", line)
				}
				var fields map[string]any
				if format == "json" && json.Unmarshal(line, &fields) != nil || format == "text" && !bytes.HasPrefix(line, []byte("time=")) ||
					bytes.Contains(line, []byte(" level=ERROR")) || bytes.Contains(line, []byte(`"level":"ERROR"`)) || bytes.Contains(line, []byte(" msg=forged ")) {
					t.Errorf("the log has %q", line)
				}
			}
			for _, path := range []string{"/debug/pprof/", "/debug/pprof/heap", "/debug/vars", "/debug/requests", "/.git/config", "/console/", "/console/../main.go"} {
				if status, text := p.as(t, "", "GET", url+path, ""); status != 404 || !strings.Contains(text, "no_such_route") {
					t.Errorf("%s: %d %s", path, status, text)
				}
			}
		})
	}
}

// TestListingsLeaveRoom: however many listings hang in the database, messages find connections. Those beyond their room are refused in time.
func TestListingsLeaveRoom(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	p := spawn(t, "DATABASE_URL="+dsn, "BIND_ADDR=127.0.0.1", "DB_POOL_SIZE=8")
	url := p.ready(t)
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	p.good(t, "", "POST", url+"/api/v1/push", `{"items":[{"queue":"q","payload":1}]}`)
	if _, err := conn.Exec(t.Context(), "begin; lock table ferrymq.dead_letters in access exclusive mode"); err != nil {
		t.Fatal(err)
	}
	type answer struct {
		status int
		text   string
	}
	answers := make(chan answer, 20)
	for range 20 {
		go func() {
			status, text, err := p.call("GET", url+"/api/v1/dlq?queue=q", "")
			if err != nil {
				text = []byte(err.Error())
			}
			answers <- answer{status, string(text)}
		}()
	}
	if a := <-answers; a.status != 500 || a.text != `{"error":"pool"}` { // one that found no place
		t.Errorf("a listing in the crowd: %d %s", a.status, a.text)
	}
	for i := range 10 { // each needs connections beside those of the combined commits
		began := time.Now()
		p.good(t, "", "POST", url+"/api/v1/push", fmt.Sprintf(`{"items":[{"queue":"new%d","payload":1}]}`, i))
		p.good(t, "", "GET", url+fmt.Sprintf("/api/v1/pop/queue/new%d?consumerGroup=g", i), "")
		if took := time.Since(began); took > 4*time.Second {
			t.Errorf("a push and a pop beside listings that hang took %v", took)
		}
	}
	p.good(t, "", "GET", url+"/health", "")
	if _, err := conn.Exec(t.Context(), "rollback"); err != nil {
		t.Fatal(err)
	}
	for range 19 {
		if a := <-answers; a.status != 200 && a.text != `{"error":"pool"}` {
			t.Errorf("a listing: %d %s", a.status, a.text)
		}
	}
	p.good(t, "", "GET", url+"/api/v1/dlq?queue=q", "")
}

// TestNeighboursSleep: what is pushed to one queue wakes nobody who waits on others: their looks at the database stay those of an idle broker.
func TestNeighboursSleep(t *testing.T) {
	t.Parallel()
	p := spawn(t, "DATABASE_URL="+dbtest.New(t), "BIND_ADDR=127.0.0.1")
	url := p.ready(t)
	const waiters, pushes = 300, 300
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	p.good(t, "", "PUT", url+"/v1/subscriptions/s", `{"stream":"idle"}`)
	for i := range waiters {
		go func() {
			method, path, body := "GET", fmt.Sprintf("/api/v1/pop/queue/idle?consumerGroup=g%d&wait=true&timeout=300000", i%10), ""
			if i%3 == 0 {
				method, path, body = "POST", "/v1/subscriptions/s/receive", `{"wait_seconds":25}`
			}
			r, _ := http.NewRequestWithContext(ctx, method, url+path, strings.NewReader(body))
			if resp, err := p.client.Do(r); err == nil {
				resp.Body.Close()
			}
		}()
	}
	awaitMetric(t, p, url, fmt.Sprintf(`ferrymq_parked_polls\{queue="idle"\} %d`, waiters))
	looks := func() (n int) {
		_, s := p.as(t, "", "GET", url+"/metrics", "")
		_, after, _ := strings.Cut(s, `ferrymq_commit_items_total{op="pop"} `)
		_, _ = fmt.Sscan(after, &n)
		return n
	}
	before := looks()
	if before < waiters {
		t.Fatalf("%d waiters have looked %d times", waiters, before)
	}
	for i := range pushes {
		p.good(t, "", "POST", url+"/api/v1/push", fmt.Sprintf(`{"items":[{"queue":"busy","partition":"p%d","payload":1}]}`, i%7))
	}
	if n := looks() - before; n > waiters/10 {
		t.Errorf("%d looks of those who wait for something else, at %d pushes", n, pushes)
	}
}
