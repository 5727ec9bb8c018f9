package handlers

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
	"ferrymq/segment"
)

// served is the API over an engine and a database, without a network.
type served struct {
	*API
	log  *logged
	made int // how often it was furnished
}

// logged keeps what the API logs.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.text.Len() > 1<<20 {
		l.text.Reset()
	}
	return l.text.Write(b)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// serve starts an API on a database of its own, until the test ends.
func serve(t testing.TB) *served {
	t.Helper()
	pool, err := db.NewPool(t.Context(), dbtest.New(t), 6, 30*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	installation, err := db.New(pool).InstallationGet(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	l := &logged{}
	log := slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelWarn}))
	e := groupcommit.New(groupcommit.Options{Pool: pool, Log: log, Hasher: segment.NewHasher(uint64(installation.HashSeed)), Project: 1, DBNow: installation.Now,
		Width: 1, DedupBytes: 1 << 20, PushQueueMax: 65536, MaxParked: 100, StatementTimeout: 30 * time.Second,
		Recheck: groupcommit.Recheck{Initial: time.Second, Threshold: 3, Multiplier: 2, Max: time.Second}})
	t.Cleanup(e.Close)
	a := &API{Log: log, Pool: pool, MaxBody: 8 << 20, DefaultTimeout: time.Second, DefaultStart: catalog.All(), Secret: installation.Secret}
	a.Handler()
	a.Ready(e)
	return &served{API: a, log: l}
}

// answer is what came back.
type answer struct {
	status int
	header http.Header
	body   string
}

// ask sends a request whose target stands as it would in its first line. A target that no server would take is none: ok is false.
// The caller goes away after wait.
func (s *served) ask(t testing.TB, method, target string, body []byte, wait time.Duration) (x answer, ok bool) {
	t.Helper()
	u, err := url.ParseRequestURI(target)
	if err != nil || !strings.HasPrefix(target, "/") {
		return x, false
	}
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	r := (&http.Request{Method: method, URL: u, RequestURI: target, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Host: "x", Header: http.Header{},
		Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body))}).WithContext(ctx)
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	x = answer{w.Code, w.Header(), w.Body.String()}
	if ctx.Err() != nil && x.status == http.StatusServiceUnavailable {
		return x, false // it was parked
	}
	s.judge(t, method, target, body, x)
	return x, true
}

// judge holds an answer to what is promised of all of them.
func (s *served) judge(t testing.TB, method, target string, body []byte, x answer) {
	t.Helper()
	complain := func(why string) {
		t.Helper()
		t.Fatalf("%s %s %s\nanswered %d %s: %s\n%s", method, target, clipped(string(body)), x.status, clipped(x.body), why, clipped(s.log.String()))
	}
	kind := x.header.Get("Content-Type")
	switch {
	case x.status >= 500:
		complain("no fault of a client is one of the server")
	case x.status == http.StatusNoContent:
		if x.body != "" || kind != "" {
			complain("no content, with content")
		}
		return
	case strings.HasPrefix(kind, "text/plain; version=0.0.4"):
		return
	case kind != "application/json":
		complain("of type " + kind)
	}
	d := jsontext.NewDecoder(strings.NewReader(x.body), jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))
	v, err := d.ReadValue()
	if err == nil {
		if _, err = d.ReadToken(); errors.Is(err, io.EOF) {
			err = nil
		} else if err == nil {
			err = errors.New("more than one value")
		}
	}
	if err != nil {
		complain(err.Error())
	}
	if x.status >= 400 && !bytes.HasPrefix(v, []byte(`{"error":"`)) && !bytes.Contains(v, []byte(`"error":"`)) {
		complain("no error in it")
	}
	for _, leak := range []string{"SQLSTATE", "ferrymq.", "goroutine ", ".go:", "pgx"} {
		if x.status >= 400 && strings.Contains(x.body, leak) && !strings.Contains(target+string(body), leak) {
			complain("it says " + leak)
		}
	}
}

func clipped(s string) string {
	if len(s) > 2000 {
		return s[:1000] + " … " + s[len(s)-1000:]
	}
	return s
}

// must is ask, answered with status.
func (s *served) must(t testing.TB, status int, method, target, body string) string {
	t.Helper()
	x, _ := s.ask(t, method, target, []byte(body), time.Minute)
	if x.status != status {
		t.Fatalf("%s %s %s: %d %s, not %d\n%s", method, target, clipped(body), x.status, clipped(x.body), status, s.log)
	}
	return x.body
}

// member is the first string that follows a name in an answer.
func member(t testing.TB, body, name string) string {
	t.Helper()
	_, rest, ok := strings.Cut(body, strconv.Quote(name)+`:"`)
	if !ok {
		t.Fatalf("no %s in %s", name, clipped(body))
	}
	value, _, _ := strings.Cut(rest, `"`)
	return value
}

// furnish makes one of everything, so that requests of the fuzzer find something, and returns what their text may name.
func (s *served) furnish(t testing.TB) map[string]string {
	t.Helper()
	s.made++
	ids := map[string]string{}
	for _, kind := range []string{"queue", "stream", "sub", "project", "group"} {
		ids[kind] = kind + strconv.Itoa(s.made)
	}
	do := func(status int, method, target, body string) string {
		t.Helper()
		return s.must(t, status, method, fill(target, ids), fill(body, ids))
	}
	do(200, "POST", "/api/v1/configure", `{"queue":"<queue>","options":{"retryLimit":0}}`)
	pushed := do(201, "POST", "/api/v1/push", `{"items":[{"queue":"<queue>","transactionId":"t1","payload":1},{"queue":"<queue>","transactionId":"t2","payload":2},{"queue":"<queue>","transactionId":"t3","payload":3}]}`)
	ids["partition"] = member(t, pushed, "partitionId")
	do(200, "POST", "/v1/streams/<stream>/messages", `{"messages":[{"key":"k1","id":"i1","payload":1},{"key":"k2","payload":2},{"payload":3},{"key":"k1","payload":4},{"key":"k3","delay":"1h","payload":5}]}`)
	do(200, "PUT", "/v1/subscriptions/<sub>", `{"stream":"<stream>","retry":{"max_attempts":1}}`)
	got := do(200, "POST", "/v1/subscriptions/<sub>/receive", `{"max_messages":1}`)
	do(200, "POST", "/v1/subscriptions/<sub>/nack", `{"delivery_ids":["`+member(t, got, "delivery_id")+`"],"error":"e 1"}`)
	ids["dead"] = member(t, do(200, "GET", "/v1/subscriptions/<sub>/dead-letters", ""), "id")
	got = do(200, "POST", "/v1/subscriptions/<sub>/receive", `{"max_messages":1}`)
	ids["delivery"], ids["message"] = member(t, got, "delivery_id"), member(t, got, "id")
	got = do(200, "GET", "/api/v1/pop/queue/<queue>?consumerGroup=<group>&batch=1", "")
	ids["lease"] = member(t, got, "leaseId")
	do(200, "POST", "/api/v1/ack", `{"transactionId":"t1","partitionId":"<partition>","leaseId":"<lease>","consumerGroup":"<group>","status":"dlq","error":"e"}`)
	ids["letter"] = member(t, do(200, "GET", "/api/v1/dlq?queue=<queue>", ""), "id")
	ids["lease"] = member(t, do(200, "GET", "/api/v1/pop/queue/<queue>?consumerGroup=<group>&batch=1", ""), "leaseId")
	do(201, "POST", "/api/v1/traces", `{"transactionId":"t1","partitionId":"<partition>","data":{},"traceNames":["n"]}`)
	do(201, "POST", "/v1/projects", `{"name":"<project>"}`)
	ids["key"] = member(t, do(201, "POST", "/v1/projects/<project>/keys", `{"scopes":["read"],"name":"k"}`), "id")
	return ids
}

// fill puts ids and names of furnish in the place of their names in angle brackets.
func fill(text string, ids map[string]string) string {
	for name, id := range ids {
		text = strings.ReplaceAll(text, "<"+name+">", id)
	}
	return text
}
