package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// fake speaks push, pop and ack, and the receive and ack of /v1, from memory, for one fault at a time.
type fake struct {
	fault  string // "", lose, duplicate, late duplicate, reorder, two leases, wrong payload, no answer, misshapen, two of a key, 503, ack without answer
	mu     sync.Mutex
	wake   chan struct{}
	queues map[string]*fakeQueue
	pushes int
	acks   int
}

type fakeQueue struct {
	lanes []*fakeLane
	byID  map[string]*fakeLane
}

type fakeMsg struct {
	id, txid string
	data     json.RawMessage
}

type fakeLane struct {
	name, id string
	msgs     []fakeMsg
	cursors  map[string]*fakeCursor
}

type fakeCursor struct {
	committed, end int
	lease          string
	until          time.Time
}

func newUUID() string {
	return fmt.Sprintf("0199b1f0-%04x-7%03x-8%03x-%012x", rand.N(1<<16), rand.N(1<<12), rand.N(1<<12), rand.N(1<<48))
}

func (f *fake) queue(name string) *fakeQueue {
	if f.queues[name] == nil {
		f.queues[name] = &fakeQueue{byID: map[string]*fakeLane{}}
	}
	return f.queues[name]
}

func (q *fakeQueue) lane(name string) *fakeLane {
	for _, l := range q.lanes {
		if l.name == name {
			return l
		}
	}
	l := &fakeLane{name: name, id: newUUID(), cursors: map[string]*fakeCursor{}}
	q.lanes = append(q.lanes, l)
	q.byID[l.id] = l
	return l
}

func (f *fake) push(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Items []struct {
			Queue, Partition string
			TransactionID    string `json:"transactionId"`
			Payload          json.RawMessage
		}
	}
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		http.Error(w, `{"error":"bad body"}`, 400)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pushes++
	if f.fault == "503" && f.pushes%10 == 0 {
		w.WriteHeader(503)
		_, _ = io.WriteString(w, `{"error":"overloaded"}`)
		return
	}
	var out []map[string]any
	for i, it := range body.Items {
		l := f.queue(it.Queue).lane(it.Partition)
		m := fakeMsg{newUUID(), it.TransactionID, it.Payload}
		if m.txid == "" {
			m.txid = m.id
		}
		hit := f.pushes == 20 && i == 0
		switch {
		case hit && f.fault == "lose":
		case hit && f.fault == "duplicate":
			l.msgs = append(l.msgs, m, m)
		case hit && f.fault == "wrong payload":
			m.data = bytes.Replace(bytes.Clone(m.data), m.data[60:63], []byte("..."), 1)
			l.msgs = append(l.msgs, m)
		case f.fault == "reorder" && len(l.msgs) == 3:
			l.msgs = append(l.msgs, m)
			l.msgs[2], l.msgs[3] = l.msgs[3], l.msgs[2]
		default:
			l.msgs = append(l.msgs, m)
		}
		e := map[string]any{"index": i, "message_id": m.id, "transaction_id": m.txid, "queueName": it.Queue, "status": "queued", "partitionId": l.id}
		if f.fault == "misshapen" {
			delete(e, "partitionId")
		}
		out = append(out, e)
	}
	close(f.wake)
	f.wake = make(chan struct{})
	if f.fault == "no answer" && f.pushes%10 == 0 {
		panic(http.ErrAbortHandler)
	}
	w.WriteHeader(201)
	_ = json.NewEncoder(w).Encode(out)
}

func (f *fake) pop(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	batch, _ := strconv.Atoi(q.Get("batch"))
	parts, _ := strconv.Atoi(q.Get("partitions"))
	ms, _ := strconv.Atoi(q.Get("timeout"))
	end := time.After(time.Duration(ms) * time.Millisecond)
	for {
		f.mu.Lock()
		answer, wake := f.claim(r.PathValue("queue"), r.PathValue("partition"), q.Get("consumerGroup"), batch, parts), f.wake
		f.mu.Unlock()
		if answer != nil {
			_ = json.NewEncoder(w).Encode(answer)
			return
		}
		if q.Get("wait") != "true" {
			w.WriteHeader(204)
			return
		}
		select {
		case <-end:
			w.WriteHeader(204)
			return
		case <-r.Context().Done():
			return
		case <-wake:
		case <-time.After(100 * time.Millisecond): // leases that ended
		}
	}
}

func (f *fake) claim(queue, partition, group string, batch, parts int) map[string]any {
	fq := f.queue(queue)
	name := group
	if name == "" {
		name = "__QUEUE_MODE__"
	}
	lease := newUUID()
	var msgs []map[string]any
	var first *fakeLane
	claimed := 0
	from := 0
	if len(fq.lanes) > 0 {
		from = rand.IntN(len(fq.lanes))
	}
	for i := range fq.lanes {
		l := fq.lanes[(from+i)%len(fq.lanes)]
		if partition != "" && l.name != partition || len(msgs) == batch || parts > 0 && claimed == parts {
			continue
		}
		c := l.cursors[group]
		if c == nil {
			c = &fakeCursor{}
			l.cursors[group] = c
		}
		if c.committed == len(l.msgs) || c.until.After(time.Now()) && f.fault != "two leases" {
			continue
		}
		c.end = min(len(l.msgs), c.committed+batch-len(msgs))
		c.lease, c.until = lease, time.Now().Add(2*time.Second)
		if claimed++; first == nil {
			first = l
		}
		for _, m := range l.msgs[c.committed:c.end] {
			msgs = append(msgs, map[string]any{"id": m.id, "transactionId": m.txid, "traceId": nil, "data": m.data, "producerSub": nil,
				"createdAt": "2026-03-01T09:00:00.123456Z", "partitionId": l.id, "partition": l.name, "leaseId": lease, "consumerGroup": name})
		}
	}
	if first == nil {
		return nil
	}
	return map[string]any{"success": true, "queue": queue, "partition": first.name, "partitionId": first.id, "leaseId": lease,
		"consumerGroup": name, "messages": msgs, "partitionsClaimed": claimed}
}

func (f *fake) ack(w http.ResponseWriter, r *http.Request) {
	var body struct {
		ConsumerGroup   string
		Acknowledgments []struct{ TransactionID, PartitionID, LeaseID string }
	}
	_ = json.NewDecoder(r.Body).Decode(&body)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.acks++
	out := []map[string]any{}
	for i, a := range body.Acknowledgments {
		e := map[string]any{"index": i, "transactionId": a.TransactionID, "success": false, "error": "invalid or expired lease", "leaseReleased": false, "dlq": false, "noop": false}
		for _, q := range f.queues {
			l := q.byID[a.PartitionID]
			if l == nil {
				continue
			}
			c := l.cursors[body.ConsumerGroup]
			if c.lease == a.LeaseID || f.fault == "two leases" {
				e["success"], e["error"], e["leaseReleased"] = true, nil, true
				c.until = time.Time{}
				c.committed = max(c.committed, c.end)
				if f.fault == "late duplicate" && f.acks == 20 && i == len(body.Acknowledgments)-1 {
					c.committed--
				}
			}
		}
		out = append(out, e)
	}
	close(f.wake)
	f.wake = make(chan struct{})
	if f.fault == "ack without answer" && f.acks%20 == 0 {
		panic(http.ErrAbortHandler)
	}
	_ = json.NewEncoder(w).Encode(out)
}

// subscriptions of the fake are named <stream>-<n>.
func (f *fake) receive(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Max  int     `json:"max_messages"`
		Wait float64 `json:"wait_seconds"`
	}
	_ = json.NewDecoder(r.Body).Decode(&body)
	sub := r.PathValue("sub")
	stream := sub[:strings.LastIndexByte(sub, '-')]
	end := time.After(time.Duration(body.Wait * float64(time.Second)))
	out := []any{}
	for waiting := true; waiting && len(out) == 0; {
		f.mu.Lock()
		for range body.Max {
			per := 1
			if f.fault == "two of a key" {
				per = 2
			}
			got := f.claim(stream, "", sub, per, 1)
			if got == nil {
				break
			}
			for _, m := range got["messages"].([]map[string]any) {
				out = append(out, map[string]any{"delivery_id": fmt.Sprintf("dlv_%s/%s", m["partitionId"], m["leaseId"]), "attempt": 1, "lease_expires_at": "2026-03-01T09:00:30.123Z",
					"message": map[string]any{"id": fmt.Sprint("msg_", m["id"]), "stream": stream, "project": "default", "key": m["partition"], "payload": m["data"],
						"headers": map[string]any{}, "published_at": "2026-03-01T09:00:00.123Z"}})
			}
		}
		wake := f.wake
		f.mu.Unlock()
		if len(out) == 0 {
			select {
			case <-end:
				waiting = false
			case <-r.Context().Done():
				return
			case <-wake:
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"messages": out})
}

func (f *fake) ackLanes(w http.ResponseWriter, r *http.Request) {
	var body struct {
		IDs []string `json:"delivery_ids"`
	}
	_ = json.NewDecoder(r.Body).Decode(&body)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.acks++
	out := []map[string]any{}
	sub := r.PathValue("sub")
	for i, id := range body.IDs {
		lane, lease, _ := strings.Cut(strings.TrimPrefix(id, "dlv_"), "/")
		e := map[string]any{"delivery_id": id, "ok": false, "error": "lease lost"}
		if c := f.queue(sub[:strings.LastIndexByte(sub, '-')]).byID[lane].cursors[sub]; c.lease == lease || f.fault == "two leases" {
			e = map[string]any{"delivery_id": id, "ok": true}
			c.until = time.Time{}
			c.committed = max(c.committed, c.end)
			if f.fault == "late duplicate" && f.acks == 20 && i == len(body.IDs)-1 {
				c.committed--
			}
		}
		out = append(out, e)
	}
	close(f.wake)
	f.wake = make(chan struct{})
	_ = json.NewEncoder(w).Encode(map[string]any{"results": out})
}

func serve(t *testing.T, fault string) string {
	t.Helper()
	f := &fake{fault: fault, wake: make(chan struct{}), queues: map[string]*fakeQueue{}}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /api/v1/push", f.push)
	mux.HandleFunc("GET /api/v1/pop/queue/{queue}", f.pop)
	mux.HandleFunc("GET /api/v1/pop/queue/{queue}/partition/{partition}", f.pop)
	mux.HandleFunc("POST /api/v1/ack/batch", f.ack)
	mux.HandleFunc("PUT /v1/subscriptions/{sub}", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(201) })
	mux.HandleFunc("POST /v1/subscriptions/{sub}/receive", f.receive)
	mux.HandleFunc("POST /v1/subscriptions/{sub}/ack", f.ackLanes)
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s.URL
}

// runBench runs bench and answers its exit code and report.
func runBench(t *testing.T, args ...string) (int, report) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "out.json")
	code := bench(t.Context(), append(args, "-json", file))
	var r report
	if b, err := os.ReadFile(file); err == nil {
		if err := json.Unmarshal(b, &r); err != nil {
			t.Fatal(err)
		}
	}
	return code, r
}

func TestModes(t *testing.T) {
	for name, tt := range map[string]struct {
		args string
		want string // a metric that must be positive
	}{
		"push":           {"push -producers 4 -duration 200ms -verify -partitions 8", "push_msg_per_s"},
		"push many":      {"push -producers 4 -duration 200ms -verify -partitions 2 -batch 20 -spread 4 -object -no-txid", "push_p99.9_ms"},
		"push messages":  {"push -messages 333 -batch 10 -producers 3", "messages"},
		"drain":          {"drain -messages 3000 -partitions 16 -groups 3 -pop-partitions 4", "deliveries_per_s"},
		"drain polling":  {"drain -messages 500 -partitions 4 -group g -batch 7 -wait=false", "ack_p50_ms"},
		"drain nocheck":  {"drain -messages 500 -partitions 4 -check=false", "ack_p50_ms"},
		"cycle":          {"cycle -duration 300ms -producers 8 -consumers 8 -partitions 16", "cycle_msg_per_s"},
		"cycle messages": {"cycle -messages 500 -producers 8 -consumers 8 -partitions 3 -batch 5", "e2e_p99_ms"},
		"live":           {"live -rate 500 -duration 400ms -warmup 100ms -consumers 4 -partitions 8", "e2e_p50_ms"},
		"wake":           {"wake -parked 10 -messages 20 -gap 1ms", "wake_p99_ms"},
		"wake queue":     {"wake -parked 10 -messages 20 -gap 1ms -park queue", "wake_p99_ms"},
		"wake queues":    {"wake -parked 10 -messages 20 -gap 1ms -distinct-queues", "wake_p99_ms"},
		"idle":           {"idle -pollers 50 -queues 5 -duration 300ms -pop-timeout 1s", "pollers"},
		"partitions":     {"partitions -partitions 100 -consumers 2 -duration 200ms -gap 1ms -active 3", "active_e2e_p50_ms"},
		"lanes":          {"lanes -messages 3000 -partitions 200 -groups 2 -batch 20", "deliveries_per_s"},
		"lanes single":   {"lanes -messages 600 -partitions 30 -consumers 20 -batch 1 -work 100us", "ack_p50_ms"},
		"lanes polling":  {"lanes -messages 300 -partitions 300 -wait=false -preload-batch 7", "pop_p50_ms"},
		"repeat":         {"push -messages 50 -repeat 3 -queue again", "push_req_per_s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := serve(t, "")
			code, r := runBench(t, append(strings.Fields(tt.args), "-url", url+","+url, "-broker-pid", strconv.Itoa(os.Getpid()), "-pg-pid", strconv.Itoa(os.Getppid()))...)
			if code != 0 || r.Summary[tt.want].Median <= 0 {
				t.Errorf("exit code %d, %s = %v", code, tt.want, r.Summary[tt.want])
			}
			for _, run := range r.Runs {
				if len(run.Errors) > 0 || run.Check.Redelivered+run.Check.Foreign > 0 {
					t.Errorf("errors %v, check %v", run.Errors, run.Check)
				}
			}
			if name == "drain" && r.Summary["deliveries"].Median != 9000 {
				t.Errorf("%v deliveries, want 9000", r.Summary["deliveries"])
			}
		})
	}
}

func TestCheckerCatches(t *testing.T) {
	for fault, want := range map[string]string{
		"lose": "lost", "duplicate": "duplicate", "late duplicate": "duplicate", "reorder": "order",
		"two leases": "two holders", "wrong payload": "payload", "misshapen": "shape",
	} {
		for _, batch := range []string{"1", "10"} {
			t.Run(fault+"/"+batch, func(t *testing.T) {
				t.Parallel()
				code, r := runBench(t, "cycle", "-url", serve(t, fault), "-messages", "1000", "-producers", "4", "-consumers", "4",
					"-partitions", "4", "-batch", batch, "-stall", "2s", "-work", map[bool]string{true: "5ms", false: "0s"}[fault == "two leases"], "-shape="+strconv.FormatBool(fault == "misshapen"))
				if code != 1 || len(r.Runs) != 1 || r.Runs[0].Check.Violations[want] == 0 {
					t.Errorf("exit code %d, want 1 with %q: %+v", code, want, r.Runs)
				}
			})
		}
	}
}

func TestLaneCheckerCatches(t *testing.T) {
	for fault, want := range map[string]string{
		"lose": "lost", "duplicate": "duplicate", "late duplicate": "duplicate", "reorder": "order", "two leases": "two holders", "wrong payload": "payload", "two of a key": "two of a key",
	} {
		t.Run(fault, func(t *testing.T) {
			t.Parallel()
			code, r := runBench(t, "lanes", "-url", serve(t, fault), "-messages", "1000", "-producers", "4", "-consumers", "4", "-preload-batch", "5",
				"-partitions", "20", "-batch", "8", "-stall", "2s", "-work", map[bool]string{true: "5ms", false: "0s"}[fault == "two leases"])
			if code != 1 || len(r.Runs) != 1 || r.Runs[0].Check.Violations[want] == 0 {
				t.Errorf("exit code %d, want 1 with %q: %+v", code, want, r.Runs)
			}
		})
	}
}

// TestHonestFaults: what a correct broker may do under stress is counted, not condemned.
func TestHonestFaults(t *testing.T) {
	for fault, stat := range map[string]string{"503": "push: 503", "no answer": "push: EOF", "ack without answer": "ack: EOF"} {
		t.Run(fault, func(t *testing.T) {
			t.Parallel()
			code, r := runBench(t, "cycle", "-url", serve(t, fault), "-messages", "300", "-producers", "4", "-consumers", "4", "-partitions", "4", "-lease", "2s", "-stall", "10s")
			if code != 0 {
				t.Errorf("exit code %d: %+v", code, r.Runs)
			}
			found := false
			for e := range r.Runs[0].Errors {
				found = found || strings.HasPrefix(e, stat)
			}
			if !found {
				t.Errorf("errors %v, want one of %q", r.Runs[0].Errors, stat)
			}
		})
	}
}

func TestPreloaded(t *testing.T) {
	for fault, want := range map[string]int{"": 0, "lose": 1} {
		url := serve(t, fault)
		if code, _ := runBench(t, "push", "-url", url, "-queue", "q", "-messages", "500", "-producers", "2", "-partitions", "4"); code != 0 {
			t.Fatal("push failed")
		}
		code, r := runBench(t, "drain", "-url", url, "-queue", "q", "-preloaded", "-partitions", "4", "-producers", "2", "-messages", "500", "-stall", "2s")
		if code != want {
			t.Errorf("%q: exit code %d, want %d: %+v", fault, code, want, r.Runs)
		}
	}
}

func TestInterrupt(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	began := time.Now()
	if code := bench(ctx, []string{"cycle", "-url", serve(t, ""), "-duration", "1m", "-producers", "2", "-consumers", "2"}); code != 0 || time.Since(began) > 3*time.Second {
		t.Errorf("exit code %d after %s", code, time.Since(began))
	}
}

func TestUsage(t *testing.T) {
	for _, args := range []string{"", "nothing", "push -size 1", "drain -size 3", "push -size 10 -verify", "push -snapshot 1m", "cycle -snapshot 1m", "push -url https://x", "push -batch 0", "drain -preloaded", "push x"} {
		if code := bench(t.Context(), strings.Fields(args)); code != 2 {
			t.Errorf("%q: exit code %d, want 2", args, code)
		}
	}
}

func TestHist(t *testing.T) {
	for _, v := range []int64{0, 1, 127, 128, 129, 1000, 12345, 999_999, 1 << 30, 1<<42 + 12345} {
		if got := valueOf(bucketOf(v)); math.Abs(float64(got-v)) > 0.01*float64(v) {
			t.Errorf("%d is recorded as %d", v, got)
		}
	}
	bucketOf(math.MaxInt64) // clamped, no panic
	var h hist
	h.record(math.MaxInt64)
	h.reset()
	for i := range 10000 {
		h.record(int64(i+1) * 1000)
	}
	for q, want := range map[float64]float64{0.5: 5e6, 0.99: 9.9e6, 0.999: 9.99e6, 1: 1e7} {
		if got := float64(h.quantile(q)); math.Abs(got-want) > 0.01*want {
			t.Errorf("quantile %v = %v, want %v", q, got, want)
		}
	}
}

func TestScannerAgainstEncodingJSON(t *testing.T) {
	odd := `{ "partitionsClaimed":1, "messages" : [ {"data" : {"a":"}]\\\"","b":[1,{"c":"\\"}]}, "x":[],"leaseId":"L","partitionId":"P","transactionId":"T\"\\","partition":"p1"}, {"data":null,"leaseId":"L","partitionId":"P","transactionId":"U"} ] , "z":-1.5e3 }` + "\n"
	ms, err := parsePop([]byte(odd), nil)
	if err != nil || len(ms) != 2 || string(ms[0].txid) != `"T\"\\"` || string(ms[0].data) != `{"a":"}]\\\"","b":[1,{"c":"\\"}]}` || string(ms[1].data) != "null" {
		t.Errorf("%d messages, %v: %+v", len(ms), err, ms)
	}
	for n := range len(odd) - 1 {
		if _, err := parsePop([]byte(odd[:n]), nil); err == nil {
			t.Errorf("the first %d bytes were taken as whole", n)
		}
	}
	for _, object := range []bool{false, true} {
		want := id{1, 2, 3, 4 << 40}
		b := want.appendPayload(nil, 256, object)
		if got, ok := parsePayload(b); !ok || got != want || len(b) != 256 || !json.Valid(b) {
			t.Errorf("payload %s is read as %v", b, got)
		}
	}
	if tx := (id{1, 2, 3, 4}).appendTxid(nil); !uuid7.MatchString(string(tx[1 : len(tx)-1])) {
		t.Errorf("%s is no UUIDv7", tx)
	}
	if body := appendAck(nil, "g", ms); !json.Valid(body) {
		t.Errorf("not JSON: %s", body)
	}
}

func FuzzScanner(f *testing.F) {
	f.Add([]byte(`{"messages":[{"transactionId":"a","data":"\\"}]}`))
	f.Add([]byte(`{"messages":[{"delivery_id":"a","message":{"key":"k","payload":"\\"}}],"results":[{"ok":true}]}`))
	f.Fuzz(func(_ *testing.T, b []byte) {
		_, _ = parseReceive(b, nil)
		_, _ = parseSettled(b, nil)
		_, _ = parsePop(b, nil)
		_, _ = parseResults(b, nil)
	})
}

func BenchmarkPushBody(b *testing.B) {
	var body []byte
	b.SetBytes(256)
	for i := range b.N {
		m := id{1, 2, uint32(i), 3}
		body = m.appendPayload(m.appendTxid(body[:0]), 256, false)
	}
}

func BenchmarkParsePop(b *testing.B) {
	f := &fake{queues: map[string]*fakeQueue{}}
	l := f.queue("q").lane("p1")
	for i := range 100 {
		l.msgs = append(l.msgs, fakeMsg{newUUID(), newUUID(), id{1, 1, uint32(i), 1}.appendPayload(nil, 256, false)})
	}
	text, _ := json.Marshal(f.claim("q", "", "", 100, 1))
	var ms []message
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		ms, _ = parsePop(text, ms[:0])
	}
}
