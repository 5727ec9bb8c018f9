package contract

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"ferrymq/dbtest"
)

// client sends what one of the official SDKs sends, byte for byte, and reads answers as it does.
type client struct {
	t     *testing.T
	name  string
	urls  []string // host:port; a bad one is passed over
	tries int      // for 5xx and broken connections
	pause time.Duration

	nulls   bool                // absent fields are sent as null
	encode  func(string) string // names in pop paths
	nothing []byte              // the body of a call without one
	options string              // of create
	accept  string              // of metrics()
}

// clients are the three SDKs. Pauses between tries are shorter than theirs.
func clients(t *testing.T, urls ...string) []*client {
	asIs := func(s string) string { return strings.ReplaceAll(s, " ", "%20") } // what their HTTP libraries do by themselves
	nine := `{"leaseTime":300,"retryLimit":3,"priority":0,"delayedProcessing":0,"windowBuffer":0,"maxSize":0,"retentionSeconds":0,"completedRetentionSeconds":0,"encryptionEnabled":false}`
	return []*client{
		{t: t, name: "js", urls: urls, tries: 3, pause: 300 * time.Millisecond, nulls: true, encode: asIs, nothing: []byte(`{}`), options: nine},
		{t: t, name: "python", urls: urls, tries: 3, pause: 300 * time.Millisecond, nulls: true, encode: asIs, options: nine},
		{t: t, name: "go", urls: urls, tries: 4, pause: 200 * time.Millisecond, encode: url.PathEscape, nothing: []byte(`{}`), options: `{"leaseTime":300,"retryLimit":3}`, accept: "application/json"},
	}
}

// reply is an answer as a client sees it.
type reply struct {
	status int
	header http.Header
	body   []byte
}

// once sends one request on a connection of its own, and a second one behind it: what follows an answer must be the next answer.
func (c *client) once(addr, method, path string, header string, body []byte) (*reply, error) {
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(40 * time.Second))
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: %s\r\n%s", method, path, addr, header)
	if body != nil {
		fmt.Fprintf(&b, "Content-Type: application/json\r\nContent-Length: %d\r\n", len(body))
	}
	b.WriteString("\r\n")
	b.Write(body)
	if _, err := conn.Write(b.Bytes()); err != nil {
		return nil, err
	}
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, &http.Request{Method: method})
	if err != nil {
		return nil, err
	}
	r := &reply{status: resp.StatusCode, header: resp.Header}
	if r.status == http.StatusNoContent { // not read
		if _, err := fmt.Fprintf(conn, "GET /ready HTTP/1.1\r\nHost: %s\r\n\r\n", addr); err != nil {
			return nil, err
		}
		if next, err := http.ReadResponse(in, nil); err != nil || next.StatusCode != 200 {
			return nil, fmt.Errorf("a 204 is followed by something: %v", err)
		}
		return r, nil
	}
	r.body, err = io.ReadAll(resp.Body)
	return r, err
}

// call tries as the SDKs do: 4xx never again, 5xx and broken connections a few times, each URL in turn.
func (c *client) call(method, path string, body []byte) *reply {
	c.t.Helper()
	var last error
	for try := range c.tries {
		if try > 0 {
			time.Sleep(c.pause)
		}
		for _, addr := range c.urls {
			r, err := c.once(addr, method, path, "", body)
			switch {
			case err != nil:
				last = err
				continue
			case r.status >= 500:
				last = fmt.Errorf("%d %s", r.status, r.body)
				continue
			}
			return r
		}
	}
	c.t.Fatalf("%s: %s %s: %v", c.name, method, path, last)
	return nil
}

// object parses an answer that must be a JSON object without a truthy "error".
func (c *client) object(method, path string, body []byte) map[string]any {
	c.t.Helper()
	r := c.call(method, path, body)
	var out map[string]any
	if err := json.Unmarshal(r.body, &out); err != nil {
		c.t.Fatalf("%s: %s %s: %d %s", c.name, method, path, r.status, r.body)
	}
	if e := out["error"]; e != nil && e != "" && e != false {
		c.t.Fatalf("%s: %s %s throws: %v", c.name, method, path, e)
	}
	if r.status < 200 || r.status > 299 {
		c.t.Fatalf("%s: %s %s: %d", c.name, method, path, r.status)
	}
	return out
}

func (c *client) array(method, path string, body []byte, want int) []map[string]any {
	c.t.Helper()
	r := c.call(method, path, body)
	var out []map[string]any
	if err := json.Unmarshal(r.body, &out); err != nil || r.status > 299 {
		c.t.Fatalf("%s: %s %s: %d %s", c.name, method, path, r.status, r.body)
	}
	if want >= 0 && len(out) != want {
		c.t.Fatalf("%s: %s %s: %d elements, want %d", c.name, method, path, len(out), want)
	}
	return out
}

type item struct{ queue, partition, id, payload string }

// push always sends a partition and an id of its own, and sorts the answer by status.
func (c *client) push(items ...item) map[string]int {
	c.t.Helper()
	var parts []string
	for _, it := range items {
		if it.id == "" {
			it.id = uuid.Must(uuid.NewV7()).String()
		}
		parts = append(parts, fmt.Sprintf(`{"queue":%q,"partition":%q,"payload":%s,"transactionId":%q}`, it.queue, it.partition, it.payload, it.id))
	}
	by := map[string]int{}
	for _, r := range c.array("POST", "/api/v1/push", []byte(`{"items":[`+strings.Join(parts, ",")+`]}`), len(items)) {
		by[r["status"].(string)]++
	}
	return by
}

type message struct {
	ID, TransactionID, PartitionID, Partition, LeaseID, ConsumerGroup, CreatedAt string
	Data                                                                         json.RawMessage
	raw                                                                          string
}

// pop chooses the route as the SDKs do and reads "messages" only. nil: 204.
func (c *client) pop(queue, partition, group string, more string) []message {
	c.t.Helper()
	path := "/api/v1/pop/queue/" + c.encode(queue)
	if partition != "Default" && partition != "" {
		path += "/partition/" + c.encode(partition)
	}
	path += "?batch=10&wait=false&timeout=30000" + more
	if group != "" {
		path += "&consumerGroup=" + url.QueryEscape(group)
	}
	return c.messages(path)
}

func (c *client) messages(path string) []message {
	c.t.Helper()
	r := c.call("GET", path, nil)
	if r.status == http.StatusNoContent {
		return nil
	}
	var body struct{ Messages []json.RawMessage }
	if err := json.Unmarshal(r.body, &body); err != nil || len(body.Messages) == 0 {
		c.t.Fatalf("%s: GET %s: %d %s", c.name, path, r.status, r.body)
	}
	var out []message
	for _, raw := range body.Messages {
		var m message
		if err := json.Unmarshal(raw, &m); err != nil {
			c.t.Fatal(err)
		}
		var keys map[string]any
		_ = json.Unmarshal(raw, &keys)
		if len(keys) != 10 {
			c.t.Fatalf("%s: a message has %d keys: %s", c.name, len(keys), raw)
		}
		m.raw = string(raw)
		out = append(out, m)
	}
	return out
}

// optional is a field of an ack: null or left out when there is nothing.
func (c *client) optional(name, value string) string {
	switch {
	case value != "":
		return fmt.Sprintf(`,%q:%q`, name, value)
	case c.nulls:
		return fmt.Sprintf(`,%q:null`, name)
	}
	return ""
}

func (c *client) ackBody(m message, status, why string) string {
	return fmt.Sprintf(`{"transactionId":%q,"partitionId":%q,"status":%q%s%s`, m.TransactionID, m.PartitionID, status, c.optional("error", why), c.optional("leaseId", m.LeaseID))
}

func (c *client) ack(m message, status, why string) map[string]any {
	c.t.Helper()
	r := c.array("POST", "/api/v1/ack", []byte(c.ackBody(m, status, why)+c.optional("consumerGroup", m.ConsumerGroup)+"}"), 1)[0]
	if r["success"] != true {
		c.t.Errorf("%s: ack %s: %v", c.name, status, r)
	}
	return r
}

func (c *client) ackAll(ms []message, status, why string) {
	c.t.Helper()
	var parts []string
	for _, m := range ms {
		parts = append(parts, c.ackBody(m, status, why)+"}")
	}
	for _, r := range c.array("POST", "/api/v1/ack/batch", []byte(fmt.Sprintf(`{"acknowledgments":[%s],"consumerGroup":%q}`, strings.Join(parts, ","), ms[0].ConsumerGroup)), len(ms)) {
		if r["success"] != true {
			c.t.Errorf("%s: batch ack: %v", c.name, r)
		}
	}
}

func (c *client) create(queue string) {
	c.t.Helper()
	body := fmt.Sprintf(`{"queue":%q%s%s,"options":%s}`, queue, c.optional("namespace", ""), c.optional("task", ""), c.options)
	if r := c.object("POST", "/api/v1/configure", []byte(body)); r["configured"] != true {
		c.t.Fatalf("%s: create: %v", c.name, r)
	}
}

// testClients runs the official SDKs' calls against two brokers on one database.
func testClients(t *testing.T, bin string) {
	env := []string{"DATABASE_URL=" + dbtest.New(t), "PORT=0", "RETENTION_INTERVAL=2000", "ENCRYPTION_KEY=" + strings.Repeat("0123456789abcdef", 4)}
	var addrs []string
	for range 2 {
		b, err := start(bin, env, true)
		if err != nil {
			t.Fatal(err, b.log)
		}
		t.Cleanup(func() {
			if err := b.stop(); err != nil {
				t.Error(err)
			}
			if log := b.log.String(); strings.Contains(log, "level=ERROR") {
				t.Errorf("the broker logged errors:\n%s", log)
			}
		})
		addrs = append(addrs, b.addr)
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	bad := free.Addr().String()
	free.Close() // nothing listens there
	for _, c := range clients(t, append([]string{bad}, addrs...)...) {
		t.Run(c.name, func(t *testing.T) {
			c.t = t
			c.produceAndConsume()
			c.fail()
			c.transact()
			c.administrate()
			c.retry(addrs[0])
		})
	}
}

func (c *client) produceAndConsume() {
	// Characters that survive in a path on their own.
	queue := c.name + ".work:1@x+y,z;a=b&c$d!e'f(g)h*~i j"
	c.create(queue)
	first := uuid.Must(uuid.NewV7()).String()
	got := c.push(item{queue, "Default", first, `{"a":1.10}`}, item{queue, "Default", "", `null`}, item{queue, "lane/ä", "", `"x"`})
	if got["queued"] != 3 {
		c.t.Fatalf("%s: push: %v", c.name, got)
	}
	if got := c.push(item{queue, "Default", first, `{"a":1.10}`}, item{queue, "Default", "", `[]`}); got["duplicate"] != 1 || got["queued"] != 1 {
		c.t.Errorf("%s: push again: %v", c.name, got)
	}
	for _, mode := range []string{"all", "new", "new-only", "from_beginning"} {
		if c.name == "go" && mode == "from_beginning" {
			continue
		}
		ms := c.pop(queue, "", "mode-"+mode, "&subscriptionMode="+mode+"&partitions=5")
		if all := mode == "all" || mode == "from_beginning"; (len(ms) > 0) != all {
			c.t.Errorf("%s: mode %s got %d messages", c.name, mode, len(ms))
		}
	}
	ms := c.pop(queue, "Default", "", "")
	var data []string
	for _, m := range ms {
		data = append(data, string(m.Data))
	}
	if !slices.Equal(data, []string{`{"a":1.10}`, `null`, `[]`}) || ms[0].ConsumerGroup != "__QUEUE_MODE__" || ms[0].TransactionID != first {
		c.t.Fatalf("%s: pop: %v", c.name, ms)
	}
	if got := c.object("POST", "/api/v1/lease/"+ms[0].LeaseID+"/extend", c.nothing); got["newExpiresAt"] == nil || got["success"] != true {
		c.t.Errorf("%s: extend: %v", c.name, got)
	}
	c.ack(ms[0], "completed", "")
	c.ackAll(ms[1:], "completed", "")
	// The other partition by its route: names with a slash work for those that encode.
	if c.name == "go" {
		ms = c.pop(queue, "lane/ä", "", "")
	} else {
		ms = c.pop(queue, "", "", "&partitions=2")
	}
	if len(ms) != 1 || ms[0].Partition != "lane/ä" {
		c.t.Fatalf("%s: pop of the other partition: %v", c.name, ms)
	}
	c.ack(ms[0], "completed", "")
	if ms := c.pop(queue, "", "", ""); ms != nil {
		c.t.Errorf("%s: an empty queue: %v", c.name, ms)
	}
	// Discovery, long poll: it answers within 500 ms of its timeout.
	began := time.Now()
	if ms := c.messages("/api/v1/pop?batch=1&wait=true&timeout=300&namespace=" + c.name + "-nowhere"); ms != nil || time.Since(began) > 800*time.Millisecond+slack {
		c.t.Errorf("%s: a long poll: %v after %v", c.name, ms, time.Since(began))
	}
}

func (c *client) fail() {
	queue := c.name + ".bad"
	c.create(queue)
	c.push(item{queue, "Default", "", `{"n":1}`}, item{queue, "Default", "", `{"n":2}`})
	var bad message
	for n := range 4 {
		ms := c.pop(queue, "", "g", "")
		if len(ms) != 2 {
			c.t.Fatalf("%s: attempt %d: %v", c.name, n, ms)
		}
		bad = ms[0]
		if r := c.ack(bad, "failed", "boom"); (r["dlq"] == true) != (n == 3) {
			c.t.Errorf("%s: attempt %d: %v", c.name, n, r)
		}
	}
	dlq := c.object("GET", "/api/v1/dlq?queue="+url.QueryEscape(queue)+"&consumerGroup=g&limit=10&offset=0", nil)
	rows := dlq["messages"].([]any)
	if len(rows) != 1 || rows[0].(map[string]any)["errorMessage"] != "boom" || !reflect.DeepEqual(rows[0].(map[string]any)["data"], map[string]any{"n": 1.0}) {
		c.t.Fatalf("%s: dlq: %v", c.name, dlq)
	}
	address := "/api/v1/messages/" + bad.PartitionID + "/" + bad.TransactionID
	if r := c.object("POST", address+"/retry", c.nothing); r["success"] != true {
		c.t.Errorf("%s: retry: %v", c.name, r)
	}
	ms := c.pop(queue, "", "g", "")
	if len(ms) != 2 || string(ms[0].Data) != `{"n":2}` || string(ms[1].Data) != `{"n":1}` {
		c.t.Fatalf("%s: after the retry: %v", c.name, ms)
	}
	if r := c.object("POST", "/api/v1/messages/"+ms[0].PartitionID+"/"+ms[0].TransactionID+"/dlq", []byte(`{"consumerGroup":"g"}`)); r["success"] != true {
		c.t.Errorf("%s: to the dlq: %v", c.name, r)
	}
	if r := c.object("DELETE", "/api/v1/messages/"+ms[0].PartitionID+"/"+ms[0].TransactionID, nil); r["success"] != true {
		c.t.Errorf("%s: delete: %v", c.name, r)
	}
}

// transact: an ack without its lease, which is only in requiredLeases, and a push.
func (c *client) transact() {
	queue, next := c.name+".tx", c.name+".next"
	c.create(queue)
	c.push(item{queue, "Default", "", `1`})
	ms := c.pop(queue, "", "g", "")
	if len(ms) != 1 {
		c.t.Fatalf("%s: %v", c.name, ms)
	}
	body := fmt.Sprintf(`{"operations":[{"type":"ack","transactionId":%q,"partitionId":%q,"status":"completed","consumerGroup":"g"},{"type":"push","items":[{"queue":%q,"partition":"Default","payload":{"m":1},"transactionId":%q}]}],"requiredLeases":[%q]}`,
		ms[0].TransactionID, ms[0].PartitionID, next, uuid.Must(uuid.NewV7()), ms[0].LeaseID)
	if r := c.object("POST", "/api/v1/transaction", []byte(body)); r["success"] != true || len(r["results"].([]any)) != 2 {
		c.t.Errorf("%s: transaction: %v", c.name, r)
	}
	// Sent again it was there already, and the SDKs throw.
	again := c.call("POST", "/api/v1/transaction", []byte(body))
	var r struct {
		Success bool
		Error   string
	}
	if err := json.Unmarshal(again.body, &r); err != nil || again.status != 200 || r.Success || !strings.HasPrefix(r.Error, "QDUP") {
		c.t.Errorf("%s: the same transaction again: %d %s", c.name, again.status, again.body)
	}
	if ms := c.pop(next, "", "", ""); len(ms) != 1 {
		c.t.Errorf("%s: what the transaction pushed: %v", c.name, ms)
	}
}

// administrate makes every call of the admin objects.
func (c *client) administrate() {
	queue := c.name + ".admin"
	c.create(queue)
	id := uuid.Must(uuid.NewV7()).String()
	c.push(item{queue, "Default", id, `{"n":1}`}, item{queue, "Default", "", `{"n":2}`})
	ms := c.pop(queue, "", "g", "")
	q := url.PathEscape(queue)
	address := "/api/v1/messages/" + ms[0].PartitionID + "/" + id

	for path, keys := range map[string]string{
		"/api/v1/resources/overview":                         "queues partitions messages statsAge",
		"/api/v1/resources/namespaces":                       "namespaces",
		"/api/v1/resources/tasks":                            "tasks",
		"/api/v1/resources/queues?limit=10&offset=0":         "queues",
		"/api/v1/resources/queues/" + q:                      "name options partitions totals",
		"/api/v1/resources/queues/" + q + "/depth?group=g":   "pending processing ready",
		"/api/v1/resources/partitions?queue=" + q:            "partitions pagination total",
		"/api/v1/messages?queue=" + q + "&limit=10&offset=0": "messages mode total",
		address:                    "id data status consumerGroups",
		"/api/v1/dlq?queue=" + q:   "messages pagination total",
		"/api/v1/traces/names":     "trace_names total",
		"/api/v1/traces/by-name/x": "traces total",
		"/api/v1/traces/" + ms[0].PartitionID + "/" + id: "traces",
		"/api/v1/status":                          "timeRange throughput queues messages workers",
		"/api/v1/status/queues":                   "queues pagination",
		"/api/v1/status/queues/" + q:              "queue partitions totals",
		"/api/v1/status/analytics":                "dataPoints interval",
		"/api/v1/status/buffers":                  "pending failed dbHealthy",
		"/api/v1/consumer-groups/g":               queue,
		"/api/v1/system/maintenance":              "maintenanceMode popMaintenanceMode bufferStats",
		"/api/v1/system/maintenance/pop":          "popMaintenanceMode",
		"/health":                                 "status",
		"/api/v1/analytics/queue-ops":             "series queues",
		"/api/v1/analytics/queue-parked-replicas": "series replicas",
		"/api/v1/analytics/retention":             "series totals",
		"/api/v1/analytics/system-metrics":        "timeRange",
		"/api/v1/analytics/worker-metrics":        "timeSeries workers",
		"/api/v1/analytics/postgres-stats":        "database tableSizes",
	} {
		got := c.object("GET", path, nil)
		for key := range strings.FieldsSeq(keys) {
			if _, ok := got[key]; !ok {
				c.t.Errorf("%s: GET %s has no %s: %v", c.name, path, key, got)
			}
		}
	}
	for _, path := range []string{"/api/v1/consumer-groups", "/api/v1/consumer-groups/lagging?minLagSeconds=0", "/api/v1/analytics/queue-lag"} {
		c.array("GET", path, nil, -1)
	}
	for _, call := range []struct{ method, path, body, key string }{
		{"POST", "/api/v1/traces", fmt.Sprintf(`{"transactionId":%q,"partitionId":%q,"consumerGroup":"g","traceNames":["order-1"],"eventType":"info","data":{"text":"x"}}`, id, ms[0].PartitionID), "success"},
		{"POST", "/api/v1/consumer-groups/g/subscription", `{"subscriptionTimestamp":"2026-03-01T00:00:00Z"}`, "success"},
		{"POST", "/api/v1/consumer-groups/g/queues/" + q + "/seek", `{"timestamp":"2026-03-01T00:00:00.000Z"}`, "success"},
		{"POST", "/api/v1/consumer-groups/g/queues/" + q + "/seek", `{"toEnd":true}`, "success"},
		{"POST", "/api/v1/consumer-groups/g/queues/" + q + "/partitions/Default/seek", string(c.nothing), "success"},
		{"POST", "/api/v1/stats/refresh", string(c.nothing), "engine"},
		{"POST", "/api/v1/system/maintenance", `{"enabled":false}`, "message"},
		{"POST", "/api/v1/system/maintenance/pop", `{"enabled":false}`, "message"},
		{"DELETE", "/api/v1/queues/" + q + "/clear", "", "success"},
		{"DELETE", "/api/v1/dlq?queue=" + q, "", "success"},
		{"DELETE", "/api/v1/consumer-groups/g/queues/" + q + "?deleteMetadata=true", "", "success"},
		{"DELETE", "/api/v1/consumer-groups/g", "", "success"},
		{"DELETE", "/api/v1/resources/queues/" + q, "", "deleted"},
	} {
		var body []byte
		if call.body != "" {
			body = []byte(call.body)
		}
		if got := c.object(call.method, call.path, body); got[call.key] == nil || got[call.key] == false {
			c.t.Errorf("%s: %s %s: %v", c.name, call.method, call.path, got)
		}
	}
	// metrics() parses JSON or gets nothing: it is no error for any of them.
	header := ""
	if c.accept != "" {
		header = "Accept: " + c.accept + "\r\n"
	}
	r, err := c.once(c.urls[1], "GET", "/metrics", header, nil)
	if err != nil || r.status != 200 || json.Valid(r.body) != (c.accept != "") {
		c.t.Errorf("%s: metrics: %v %v", c.name, r, err)
	}
}

// retry: a push during maintenance is tried again until it is taken, and stored once; a 4xx is not tried again.
func (c *client) retry(addr string) {
	if r, err := c.once(addr, "POST", "/api/v1/system/maintenance", "", []byte(`{"enabled":true}`)); err != nil || r.status != 200 {
		c.t.Fatal(r, err)
	}
	only := *c
	only.urls = []string{addr}
	if r, err := c.once(addr, "POST", "/api/v1/push", "", []byte(`{"items":[{"queue":"x","payload":1}]}`)); err != nil || r.status != 503 || r.header.Get("Retry-After") != "5" {
		c.t.Errorf("%s: push in maintenance: %v %v", c.name, r, err)
	}
	off := time.AfterFunc(c.pause/2, func() { _, _ = c.once(addr, "POST", "/api/v1/system/maintenance", "", []byte(`{"enabled":false}`)) })
	defer off.Stop()
	queue := c.name + ".again"
	if got := only.push(item{queue, "Default", "", `1`}); got["queued"] != 1 {
		c.t.Errorf("%s: push tried again: %v", c.name, got)
	}
	if ms := only.pop(queue, "", "", ""); len(ms) != 1 {
		c.t.Errorf("%s: stored %d times", c.name, len(ms))
	}
	if r := only.call("GET", "/api/v1/pop/queue/"+queue+"?batch=x", nil); r.status != 400 {
		c.t.Errorf("%s: %d", c.name, r.status)
	}
}
