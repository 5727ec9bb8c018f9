package main

import (
	"context"
	"encoding/base32"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/dbtest"
)

const rootKey = "the-root-key-of-this-test"

// as makes a request with a key and returns status and body.
func (p *process) as(t *testing.T, key, method, url, body string) (int, string) {
	t.Helper()
	r, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if key != "" {
		r.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := p.client.Do(r)
	if err != nil {
		t.Fatalf("%s %s: %v", method, url, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, url, err)
	}
	return resp.StatusCode, string(text)
}

// good is as for a request that must succeed, and returns one value of the answer by its path.
func (p *process) good(t *testing.T, key, method, url, body string, path ...any) string {
	t.Helper()
	status, text := p.as(t, key, method, url, body)
	if status >= 300 {
		t.Fatalf("%s %s: %d %s", method, url, status, text)
	}
	if len(path) == 0 {
		return text
	}
	var v any
	_ = json.Unmarshal([]byte(text), &v)
	for _, step := range path {
		switch x := v.(type) {
		case map[string]any:
			v = x[step.(string)]
		case []any:
			if len(x) == 0 {
				t.Fatalf("%s %s: nothing at %v in %s", method, url, path, text)
			}
			v = x[step.(int)]
		}
	}
	s, ok := v.(string)
	if !ok {
		t.Fatalf("%s %s: nothing at %v in %s", method, url, path, text)
	}
	return s
}

// wire is a way to a PostgreSQL that counts the round trips of who goes it.
type wire struct {
	dir   string
	trips atomic.Int64
}

// tap listens in a directory like the server of dsn and passes on to it.
func tap(t *testing.T, dsn string) (w *wire, through string) {
	t.Helper()
	c, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	if w = (&wire{}); !strings.HasPrefix(c.Host, "/") {
		t.Fatalf("%q is no socket directory", c.Host)
	}
	if w.dir, err = os.MkdirTemp("/tmp", "ferrymq-tap-"); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(w.dir, ".s.PGSQL.5432"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close(); os.RemoveAll(w.dir) })
	server := filepath.Join(c.Host, fmt.Sprintf(".s.PGSQL.%d", c.Port))
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			go w.pass(client, server)
		}
	}()
	return w, fmt.Sprintf("host=%s port=5432 user=%s dbname=%s", w.dir, c.User, c.Database)
}

func (w *wire) pass(client net.Conn, server string) {
	defer client.Close()
	up, err := net.Dial("unix", server)
	if err != nil {
		return
	}
	defer up.Close()
	go func() {
		_, _ = io.Copy(client, up)
		client.Close()
	}()
	head := make([]byte, 5)
	for first := true; ; first = false {
		n := 5
		if first { // the start-up message has no type
			n = 4
		}
		if _, err := io.ReadFull(client, head[:n]); err != nil {
			return
		}
		if kind := head[0]; !first && (kind == 'S' || kind == 'Q') {
			w.trips.Add(1)
		}
		rest := int64(binary.BigEndian.Uint32(head[n-4:n])) - 4
		if _, err := up.Write(head[:n]); err != nil {
			return
		}
		if _, err := io.CopyN(up, client, rest); err != nil {
			return
		}
	}
}

// tenancyCalls is how each route is asked for something of another project: queries and bodies, in which names in braces are
// replaced, as they are in its path. Routes that are not here are called bare.
var tenancyCalls = map[string][][2]string{
	"GET /api/v1/pop":                                          {{"?namespace={ns}"}, {"?task={task}&consumerGroup={group}"}},
	"GET /api/v1/pop/queue/{queue}":                            {{}, {"?consumerGroup={group}&autoAck=true"}},
	"GET /api/v1/pop/queue/{queue}/partition/{partition}":      {{}, {"?consumerGroup={group}"}},
	"POST /api/v1/push":                                        {{"", `{"items":[{"queue":"{queue}","partition":"{partition}","transactionId":"{transactionId}","payload":1}]}`}},
	"POST /api/v1/ack":                                         {{"", `{"transactionId":"{transactionId}","partitionId":"{partitionId}","consumerGroup":"{group}"}`}, {"", `{"transactionId":"{transactionId}","partitionId":"{partitionId}","leaseId":"{leaseId}","consumerGroup":"{group}","status":"dlq"}`}},
	"POST /api/v1/ack/batch":                                   {{"", `{"consumerGroup":"{group}","acknowledgments":[{"transactionId":"{transactionId}","partitionId":"{partitionId}","leaseId":"{leaseId}"},{"transactionId":"{transactionId}","partitionId":"{partitionId}"}]}`}},
	"POST /api/v1/configure":                                   {{"", `{"queue":"{queue}","options":{"leaseTime":7}}`}},
	"DELETE /api/v1/queues/{queue}/clear":                      {{}, {"?partition={partition}"}},
	"GET /api/v1/consumer-groups/lagging":                      {{"?minLagSeconds=0"}},
	"DELETE /api/v1/consumer-groups/{group}":                   {{}, {"?deleteMetadata=false"}},
	"POST /api/v1/consumer-groups/{group}/subscription":        {{"", `{"subscriptionTimestamp":"2026-03-01T00:00:00Z"}`}},
	"POST /api/v1/consumer-groups/{group}/queues/{queue}/seek": {{"", `{"toEnd":true}`}, {"", `{"timestamp":"2000-01-01T00:00:00Z"}`}},
	"POST /api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek": {{}, {"", `{"timestamp":"2000-01-01T00:00:00Z"}`}},
	"POST /api/v1/transaction": {{"", `{"operations":[{"type":"ack","transactionId":"{transactionId}","partitionId":"{partitionId}","consumerGroup":"{group}"}],"requiredLeases":["{leaseId}"]}`},
		{"", `{"operations":[{"type":"push","queue":"{queue}","partition":"{partition}","transactionId":"by-{transactionId}","payload":1}]}`}},
	"GET /api/v1/messages": {{"?queue={queue}"}, {"?partition={partition}"}, {"?namespace={ns}&status=pending"}, {"?task={task}"}},
	"POST /api/v1/messages/{partitionId}/{transactionId}/dlq": {{}, {"", `{"consumerGroup":"{group}"}`}},
	"GET /api/v1/dlq":                                   {{"?queue={queue}"}, {"?partition={partition}"}, {"?consumerGroup={group}"}},
	"DELETE /api/v1/dlq":                                {{"?queue={queue}"}, {"?queue={queue}&consumerGroup={group}"}, {"?queue=%25"}, {"?queue="}, {""}},
	"POST /api/v1/dlq/{id}/replay":                      {{}, {"", `{"queue":"{queue}"}`}, {"", `{"partition":"{partition}"}`}},
	"POST /api/v1/traces":                               {{"", `{"transactionId":"{transactionId}","partitionId":"{partitionId}","data":1,"traceNames":["{traceName}"]}`}},
	"POST /api/v1/system/maintenance":                   {{"", `{"enabled":false}`}},
	"POST /api/v1/system/maintenance/pop":               {{"", `{"enabled":false}`}},
	"GET /api/v1/resources/queues":                      {{}, {"?namespace={ns}"}, {"?task={task}"}},
	"GET /api/v1/resources/queues/{queue}/depth":        {{}, {"?group={group}"}},
	"GET /api/v1/resources/partitions":                  {{}, {"?queue={queue}"}},
	"GET /api/v1/status":                                {{}, {"?queue={queue}"}, {"?namespace={ns}"}},
	"GET /api/v1/status/queues":                         {{}, {"?queue={queue}"}, {"?task={task}"}},
	"GET /api/v1/status/analytics":                      {{}, {"?queue={queue}"}},
	"GET /api/v1/analytics/queue-lag":                   {{}, {"?queue={queue}"}},
	"GET /api/v1/analytics/queue-ops":                   {{}, {"?namespace={ns}"}},
	"GET /api/v1/analytics/queue-parked-replicas":       {{}, {"?task={task}"}},
	"GET /api/v1/analytics/retention":                   {{}, {"?queue={queue}"}},
	"PUT /v1/streams/{stream}":                          {{"?project={project}", `{}`}},
	"POST /v1/streams/{stream}/messages":                {{"?project={project}", `{"messages":[{"key":"{partition}","id":"{transactionId}","payload":1}]}`}},
	"PUT /v1/subscriptions/{sub}":                       {{"?project={project}", `{}`}, {"?project={project}", `{"stream":"{stream}"}`}},
	"GET /v1/subscriptions/{sub}/lanes":                 {{}, {"?state=leased&project={project}"}},
	"POST /v1/subscriptions/{sub}/seek":                 {{"?project={project}", `{"to":"latest"}`}},
	"POST /v1/subscriptions/{sub}/receive":              {{"?project={project}"}},
	"POST /v1/subscriptions/{sub}/ack":                  {{"?project={project}", `{"delivery_ids":["{delivery}"]}`}},
	"POST /v1/subscriptions/{sub}/nack":                 {{"?project={project}", `{"delivery_ids":["{delivery}"],"error":"x"}`}},
	"POST /v1/subscriptions/{sub}/extend":               {{"?project={project}", `{"delivery_ids":["{delivery}"],"seconds":5}`}},
	"GET /v1/subscriptions/{sub}/dead-letters":          {{"?project={project}"}, {"?signature=their%20reason"}},
	"DELETE /v1/subscriptions/{sub}/dead-letters":       {{"?project={project}", `{"all":true}`}, {"", `{"ids":["{dead}"]}`}},
	"POST /v1/subscriptions/{sub}/dead-letters/redrive": {{"?project={project}", `{"all":true}`}, {"", `{"ids":["{dead}"]}`}},
	"GET /v1/messages/{id}/trace":                       {{"?project={project}"}},
	"GET /v1/streams":                                   {{"?project={project}"}},
	"GET /v1/subscriptions":                             {{"?project={project}"}},
	"POST /v1/projects":                                 {{"", `{"name":"{project}"}`}},
	"POST /v1/projects/{project}/keys":                  {{"", `{"scopes":["admin"]}`}},
}

// tenancyShared is the same with names that our project has too, so that the ids alone are foreign.
var tenancyShared = map[string][][2]string{
	"POST /v1/subscriptions/mail/ack":                                           {{"?project={project}", `{"delivery_ids":["{delivery}"]}`}},
	"POST /v1/subscriptions/mail/nack":                                          {{"?project={project}", `{"delivery_ids":["{delivery}"],"error":"x"}`}},
	"POST /v1/subscriptions/mail/extend":                                        {{"?project={project}", `{"delivery_ids":["{delivery}"],"seconds":5}`}},
	"DELETE /v1/subscriptions/mail/dead-letters":                                {{"", `{"ids":["{dead}"]}`}, {"", `{"signature":"{reason}"}`}},
	"POST /v1/subscriptions/mail/dead-letters/redrive":                          {{"", `{"ids":["{dead}"]}`}, {"", `{"signature":"{reason}"}`}},
	"GET /v1/subscriptions/mail/dead-letters":                                   {{"?signature={reason}"}},
	"POST /api/v1/consumer-groups/mail/queues/jobs/partitions/{partition}/seek": {{}},
	"GET /api/v1/pop/queue/jobs/partition/{partition}":                          {{"?consumerGroup={group}"}},
	// A partition that this broker has just pushed to.
	"POST /api/v1/messages/{stored}/t2/dlq":     {{}, {"", `{"consumerGroup":"{group}"}`}},
	"GET /api/v1/messages/{stored}/same":        {{}},
	"DELETE /api/v1/messages/{stored}/same":     {{}},
	"POST /api/v1/messages/{stored}/same/retry": {{}},
	"POST /api/v1/ack/batch":                    {{"", `{"acknowledgments":[{"transactionId":"t2","partitionId":"{stored}"}]}`}, {"", `{"consumerGroup":"{sub}","acknowledgments":[{"transactionId":"t2","partitionId":"{stored}","status":"dlq"}]}`}},
	"POST /api/v1/transaction":                  {{"", `{"operations":[{"type":"ack","transactionId":"t2","partitionId":"{stored}"}]}`}},
	"POST /api/v1/traces":                       {{"", `{"transactionId":"t2","partitionId":"{stored}","data":1,"traceNames":["stored"]}`}},
	"DELETE /api/v1/queues/jobs/clear":          {{"?partition={partition}"}},
}

// tenancyRemakes are the routes that make what they do not find, or change what everybody shares: they are called last.
var tenancyRemakes = regexp.MustCompile(`^(POST /api/v1/(push|configure|transaction|traces)|GET /api/v1/pop/queue/|PUT |POST /v1/streams/|POST /api/v1/dlq/|POST /v1/projects)`)

// ofOperators are the routes about the broker or the database, whoever uses them.
var ofOperators = map[string]bool{"GET /api/v1/analytics/postgres-stats": true, "GET /api/v1/analytics/system-metrics": true, "GET /metrics/prometheus": true, "GET /metrics": true,
	"GET /v1/openapi.json": true, "GET /health": true, "GET /ready": true, "GET /status": true}

var (
	tenancyTimes  = regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z`)
	tenancyUUIDs  = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)
	tenancyIDs    = regexp.MustCompile(`\b(msg|dlv|dl|key)_[0-9a-z]{10,}|fmq_[0-9a-z]+`)
	tenancyCounts = regexp.MustCompile(`"(ready|backlog)":\d+`)
	tenancyMoving = regexp.MustCompile(`"(statsAge|cpu\w+|rssMb|dbPool\w+|dbConnections|throughput|\w*PerSecond|timeLagSeconds|time_lag_seconds|lag_hours|maxTimeLag|hostname|time|oldest_age_seconds|avgLagMs|maxLagMs|pointCount)":("[^"]*"|[^,}\]{\[]+|\{[^}]*\})`)
)

// alike is an answer without what two answers that say the same may differ in.
func alike(answer string, names map[string]string) string {
	for name, value := range names {
		if name == "dlq" || name == "keyId" { // are an id or a key as well
			continue
		}
		quoted, _ := json.Marshal(value)
		answer = strings.ReplaceAll(answer, string(quoted), `"<`+name+`>"`)
	}
	for _, name := range []string{"stream", "sub", "project", "id", "delivery", "message", "transactionId"} { // in sentences
		if names[name] != "" {
			answer = strings.ReplaceAll(answer, names[name], "<"+name+">")
		}
	}
	answer = tenancyMoving.ReplaceAllString(answer, `"$1":<moving>`)
	answer = tenancyTimes.ReplaceAllString(answer, "<time>")
	answer = tenancyUUIDs.ReplaceAllString(answer, "<uuid>")
	return tenancyIDs.ReplaceAllString(answer, "<id>")
}

func fill(template string, names map[string]string) string {
	for name, value := range names {
		template = strings.ReplaceAll(template, "{"+name+"}", value)
	}
	return template
}

// TestTwoProjects: what another project has is not there, on any route, by any name or id. Nothing that one project asks for touches the
// other, nothing that one does shows in what the other reads, and a question about what is hidden costs what one about nothing costs.
func TestTwoProjects(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	database, through := tap(t, dsn)
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	exec := func(sql string) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	value := func(sql string) (s string) {
		t.Helper()
		if err := conn.QueryRow(t.Context(), sql).Scan(&s); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
		return s
	}
	settings := []string{"DATABASE_URL=" + through, "BIND_ADDR=127.0.0.1", "AUTH_REQUIRED=true", "ROOT_API_KEY=" + rootKey, "LOG_LEVEL=debug"}

	theirs := map[string]string{"queue": "secret.errand.x", "partition": "their-lane", "transactionId": "their-tx", "group": "their-group", "ns": "secret", "task": "errand",
		"traceName": "their-trace", "stream": "their-stream", "sub": "their-sub", "project": "theirs", "reason": "their-reason"}
	// A queue of theirs that was filled over /api/v1, so that it has everything that those routes make.
	p := spawn(t, settings...)
	url := p.ready(t)
	p.good(t, rootKey, "POST", url+"/v1/projects", `{"name":"theirs"}`)
	p.good(t, rootKey, "POST", url+"/v1/projects", `{"name":"ours"}`)
	theirs["partitionId"] = p.good(t, rootKey, "POST", url+"/api/v1/push", fill(`{"items":[{"queue":"{queue}","partition":"{partition}","transactionId":"{transactionId}-0","payload":"their payload"},
		{"queue":"{queue}","partition":"{partition}","transactionId":"{transactionId}","payload":"their payload"},{"queue":"{queue}","partition":"{partition}","transactionId":"t2","payload":"their payload"}]}`, theirs), 0, "partitionId")
	pop := fill(url+"/api/v1/pop/queue/{queue}?consumerGroup={group}&batch=1&leaseSeconds=40000", theirs)
	lease := p.good(t, rootKey, "GET", pop, "", "leaseId")
	p.good(t, rootKey, "POST", url+"/api/v1/ack", fill(`{"transactionId":"{transactionId}-0","partitionId":"{partitionId}","consumerGroup":"{group}","status":"dlq","error":"their-reason","leaseId":"`+lease+`"}`, theirs))
	theirs["leaseId"] = p.good(t, rootKey, "GET", pop, "", "leaseId")
	p.good(t, rootKey, "GET", fill(url+"/api/v1/pop?namespace={ns}&consumerGroup=their-discovery&leaseSeconds=40000", theirs), "")
	dlq := p.good(t, rootKey, "GET", url+"/api/v1/dlq", "", "messages", 0, "id")
	p.signal(t, os.Interrupt)
	p.exits(t, patience)
	exec("update ferrymq.queues set project_id = (select id from ferrymq.projects where name = 'theirs')")
	exec("update ferrymq.discovery_groups set project_id = (select id from ferrymq.projects where name = 'theirs')")
	exec("delete from ferrymq.activity")

	p = spawn(t, settings...)
	url = p.ready(t)
	newKey := func(project string) string {
		return p.good(t, rootKey, "POST", url+"/v1/projects/"+project+"/keys", `{"scopes":["publish","consume","read","admin"]}`, "secret")
	}
	ours, theirKey := newKey("ours"), newKey("theirs")
	receives := int64(0)
	// populate makes the same in a project, under the same names, and returns the ids.
	populate := func(key, stream, sub, reason string) (message, delivery, dead string) {
		t.Helper()
		p.good(t, key, "PUT", url+"/v1/subscriptions/"+sub, `{"stream":"`+stream+`","lease_seconds":40000,"retry":{"max_attempts":1}}`)
		if got := p.good(t, key, "POST", url+"/v1/streams/"+stream+"/messages", `{"messages":[{"key":"k","id":"same","payload":1},{"key":"k","id":"t2","payload":2},{"key":"k","payload":3},{"payload":4},{"key":"late","payload":5,"delay":"1h"}]}`, "results", 0, "status"); got != "queued" {
			t.Errorf("a message of another project counts as its repetition: %s", got)
		}
		receive := func() string {
			receives++
			return p.good(t, key, "POST", url+"/v1/subscriptions/"+sub+"/receive", `{"max_messages":1,"wait_seconds":10,"consumer":"worker"}`)
		}
		answer := receive()
		if !strings.Contains(answer, `"key":"k"`) {
			answer = receive()
		}
		p.good(t, key, "POST", url+"/v1/subscriptions/"+sub+"/nack", `{"delivery_ids":["`+regexp.MustCompile(`dlv_\w+`).FindString(answer)+`"],"error":"`+reason+`"}`)
		for answer = receive(); !strings.Contains(answer, `"payload":2`); answer = receive() {
		}
		return regexp.MustCompile(`msg_\w+`).FindString(answer), regexp.MustCompile(`dlv_\w+`).FindString(answer),
			p.good(t, key, "GET", url+"/v1/subscriptions/"+sub+"/dead-letters", "", "dead_letters", 0, "id")
	}
	populate(ours, "jobs", "mail", "our-reason")
	// The default project, over the other API, has these names too.
	p.good(t, rootKey, "POST", url+"/api/v1/push", `{"items":[{"queue":"jobs","partition":"k","transactionId":"same","payload":1},{"queue":"jobs","partition":"k","transactionId":"b","payload":2}]}`)
	p.good(t, rootKey, "GET", url+"/api/v1/pop/queue/jobs?consumerGroup=mail&batch=1&leaseSeconds=40000", "")

	// Every route that there is.
	var description struct {
		Paths map[string]map[string]json.RawMessage `json:"paths"`
	}
	if err := json.Unmarshal([]byte(p.good(t, rootKey, "GET", url+"/v1/openapi.json", "")), &description); err != nil {
		t.Fatal(err)
	}
	var routes []string
	for path, methods := range description.Paths {
		for m := range methods {
			if m != "parameters" {
				routes = append(routes, strings.ToUpper(m)+" "+path)
			}
		}
	}
	slices.Sort(routes)
	for route := range tenancyCalls {
		if !slices.Contains(routes, route) {
			t.Errorf("there is no %s", route)
		}
	}

	// What we read must not move with what they do.
	keyOf := func(path string) string {
		if strings.HasPrefix(path, "/v1/") {
			return ours
		}
		return rootKey
	}
	mine := map[string]string{"queue": "jobs", "partition": "k", "transactionId": "same", "group": "mail", "ns": "jobs", "task": "x", "traceName": "x", "stream": "jobs", "sub": "mail", "project": "ours",
		"id": "x", "partitionId": value("select p.public_id::text from ferrymq.partitions p join ferrymq.queues q on q.id = p.queue_id join ferrymq.projects r on r.id = q.project_id where r.name = 'default' and p.name = 'k'")}
	from := time.Now().Add(-30 * time.Minute).UTC().Format(time.RFC3339)
	look := func() map[string]string {
		p.good(t, rootKey, "POST", url+"/api/v1/stats/refresh", "")
		all := map[string]string{}
		for _, route := range routes {
			method, path, _ := strings.Cut(route, " ")
			if method != "GET" || ofOperators[route] || strings.HasPrefix(path, "/api/v1/pop") || strings.HasPrefix(path, "/v1/projects") {
				continue
			}
			query := "?from=" + from + "&to=" + time.Now().Add(30*time.Minute).UTC().Format("2006-01-02T15:00:00Z")
			if strings.HasPrefix(path, "/api/v1/resources/overview") {
				query = ""
			}
			_, answer := p.as(t, keyOf(path), method, url+fill(path, mine)+query, "")
			all[route] = alike(answer, nil)
		}
		all["refresh"] = alike(p.good(t, rootKey, "POST", url+"/api/v1/stats/refresh", ""), nil)
		all["metrics"] = regexp.MustCompile(`"messages":\{"total":\d+`).FindString(func() string {
			r, _ := http.NewRequest("GET", url+"/metrics", nil)
			r.Header.Set("Accept", "application/json")
			resp, err := p.client.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			b, _ := io.ReadAll(resp.Body)
			return string(b)
		}())
		return all
	}
	parked := make(chan string, 1)
	go func() {
		_, s := p.as(t, rootKey, "GET", url+"/api/v1/pop/queue/jobs?consumerGroup=waits&subscriptionMode=new&wait=true&timeout=300000", "")
		parked <- s
	}()
	awaitMetric(t, p, url, `ferrymq_parked_polls\{queue="jobs"\} 1`)
	before := look()
	receives = 1 // it may have been about to park
	_, ready := p.as(t, "", "GET", url+"/metrics/prometheus", "")
	populate(theirKey, "jobs", "mail", "their-reason")
	theirs["message"], theirs["delivery"], theirs["dead"] = populate(theirKey, theirs["stream"], theirs["sub"], "their-reason")
	for i := range 50 {
		p.good(t, theirKey, "POST", url+"/v1/streams/jobs/messages", fmt.Sprintf(`{"messages":[{"key":"k%d","payload":1},{"key":"k","payload":1}]}`, i))
	}
	theirs["stored"] = value("select p.public_id::text from ferrymq.partitions p join ferrymq.queues q on q.id = p.queue_id where q.name = 'their-stream' and p.name = 'k'")
	theirs["keyId"] = p.good(t, rootKey, "GET", url+"/v1/projects/theirs/keys", "", "keys", 0, "id")
	select {
	case s := <-parked:
		t.Errorf("a pop of ours woke: %s", s)
	default:
	}
	changed := look()
	for route, was := range before {
		if changed[route] != was {
			t.Errorf("%s moved with what another project did:\n%s\n%s", route, was, changed[route])
		}
	}
	p.good(t, rootKey, "DELETE", url+"/api/v1/consumer-groups/waits", "")
	_, after := p.as(t, "", "GET", url+"/metrics/prometheus", "")
	claims := func(s string) (n int64) {
		n, _ = strconv.ParseInt(regexp.MustCompile(`commit_items_total\{op="pop"\} (\d+)`).FindStringSubmatch(s)[1], 10, 64)
		return n
	}
	if n := claims(after) - claims(ready); n > receives {
		t.Errorf("%d looks for messages, though only %d were asked for: what one project publishes wakes others", n, receives)
	}
	if strings.Contains(after, "secret") || strings.Contains(after, "their-") {
		t.Error("a metric names a queue of theirs")
	}

	// What does not exist, in the same shapes.
	crockford := base32.NewEncoding("0123456789abcdefghjkmnpqrstvwxyz").WithPadding(base32.NoPadding)
	place := binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, 1<<40), 1)
	random := uuid.New()
	nothing := map[string]string{"queue": "absent.thing.x", "partition": "no-lane", "transactionId": "no-tx", "group": "no-group", "ns": "absent", "task": "thing", "traceName": "no-trace",
		"stream": "no-stream", "sub": "no-sub", "project": "nobody", "reason": "no-reason", "partitionId": uuid.NewString(), "stored": uuid.NewString(), "leaseId": uuid.Must(uuid.NewV7()).String(),
		"message": "msg_" + crockford.EncodeToString(place), "delivery": "dlv_" + crockford.EncodeToString(append(append(place, random[:]...), random[:6]...)), "dead": "dl_" + crockford.EncodeToString(random[:]), "keyId": "key_" + crockford.EncodeToString(random[:])}

	state := func() string {
		var b strings.Builder
		for _, sql := range []string{
			"select string_agg(x::text, chr(10) order by x.id) from ferrymq.queues x where x.project_id = $1",
			"select string_agg(x::text, chr(10) order by x.id) from ferrymq.partitions x join ferrymq.queues q on q.id = x.queue_id where q.project_id = $1",
			"select string_agg(x::text, chr(10) order by x.partition_id, x.base_offset) from ferrymq.segments x join ferrymq.partitions p on p.id = x.partition_id join ferrymq.queues q on q.id = p.queue_id where q.project_id = $1",
			"select string_agg(x::text, chr(10) order by x.id) from ferrymq.groups x join ferrymq.queues q on q.id = x.queue_id where q.project_id = $1",
			"select string_agg(x::text, chr(10) order by x.group_id, x.partition_id) from ferrymq.cursors x join ferrymq.groups g on g.id = x.group_id join ferrymq.queues q on q.id = g.queue_id where q.project_id = $1",
			"select string_agg(x::text, chr(10) order by x.id) from ferrymq.dead_letters x join ferrymq.queues q on q.id = x.queue_id where q.project_id = $1",
			"select string_agg(x::text, chr(10) order by x.id) from ferrymq.api_keys x where x.project_id = $1",
			"select string_agg(x::text, chr(10) order by x.name) from ferrymq.discovery_groups x where x.project_id = $1",
			"select string_agg(x::text, chr(10) order by x.id) from ferrymq.projects x where x.id = $1",
			"select string_agg(x::text, chr(10) order by x.id) from ferrymq.outbox x join ferrymq.queues q on q.id = x.queue_id where q.project_id = $1",
		} {
			var s *string
			if err := conn.QueryRow(t.Context(), strings.Replace(sql, "$1", "(select id from ferrymq.projects where name = 'theirs')", 1)).Scan(&s); err != nil {
				t.Fatalf("%s: %v", sql, err)
			}
			if s != nil {
				b.WriteString(*s)
			}
			b.WriteString("\n--\n")
		}
		return b.String()
	}
	whole := state()
	unchanged := func() {
		t.Helper()
		was, is := strings.Split(whole, "\n"), strings.Split(state(), "\n")
		for i := range max(len(was), len(is)) {
			if i >= len(was) || i >= len(is) || was[i] != is[i] {
				t.Errorf("theirs has changed:\n%v\n%v", was[min(i, len(was)):], is[min(i, len(is)):])
				return
			}
		}
	}

	call := func(route string, c [2]string, names map[string]string) (status int, answer string) {
		method, path, _ := strings.Cut(route, " ")
		names["key"] = names["keyId"]
		names["id"] = names["message"]
		if strings.HasPrefix(path, "/api/v1/dlq") {
			names["id"] = names["dlq"]
		}
		return p.as(t, keyOf(path), method, url+fill(path, names)+fill(c[0], names), fill(c[1], names))
	}
	theirs["dlq"], nothing["dlq"] = dlq, uuid.NewString()
	hidden := []string{"their", "secret"}
	compare := func(route string, c [2]string, count bool) {
		t.Helper()
		least := [2]int64{1 << 30, 1 << 30}
		var trouble string
		for range 6 { // what the broker does in the background is counted too
			var answers [2]string
			var statuses [2]int
			for i, names := range []map[string]string{theirs, nothing} {
				began := database.trips.Load()
				statuses[i], answers[i] = call(route, c, names)
				least[i] = min(least[i], database.trips.Load()-began)
				said := answers[i]
				for _, v := range names { // an echo
					said = strings.ReplaceAll(said, v, "")
				}
				for _, h := range hidden {
					if strings.Contains(said, h) && !ofOperators[route] && !tenancyRemakes.MatchString(route) && count {
						t.Errorf("%s %v shows %q: %s", route, c, h, answers[i])
					}
				}
				if answers[i] = alike(answers[i], names); !count { // what was just made may not be counted yet
					answers[i] = tenancyCounts.ReplaceAllString(answers[i], `"$1":0`)
				}
			}
			if statuses[0] >= 500 || statuses[0] != statuses[1] || answers[0] != answers[1] && !ofOperators[route] {
				t.Errorf("%s %v differs:\n%d %s\n%d %s", route, c, statuses[0], answers[0], statuses[1], answers[1])
				return
			}
			if trouble = ""; least[0] == least[1] || !count {
				return
			}
			trouble = fmt.Sprintf("%d round trips for what is hidden, %d for what is not there", least[0], least[1])
		}
		t.Errorf("%s %v: %s", route, c, trouble)
	}
	walk := func(remakes bool) {
		for _, calls := range []map[string][][2]string{nil, tenancyShared} {
			some := routes
			if calls == nil {
				calls = tenancyCalls
			} else {
				some = slices.Sorted(func(yield func(string) bool) {
					for r := range calls {
						if !yield(r) {
							return
						}
					}
				})
			}
			for _, route := range some {
				if tenancyRemakes.MatchString(route) != remakes {
					continue
				}
				cs := calls[route]
				if cs == nil {
					cs = [][2]string{{}}
				}
				for _, c := range cs {
					compare(route, c, !remakes && !ofOperators[route])
				}
			}
		}
	}
	walk(false)
	unchanged()
	walk(true)
	unchanged()
	// And everything is as usable for them as before.
	p.good(t, theirKey, "POST", url+"/v1/subscriptions/"+theirs["sub"]+"/ack", `{"delivery_ids":["`+theirs["delivery"]+`"]}`, "results", 0, "delivery_id")
	for _, secret := range []string{rootKey, ours, theirKey, "their payload"} {
		if strings.Contains(p.String(), secret) {
			t.Errorf("%q was logged", secret)
		}
	}
}

// awaitMetric waits until a line of the metrics matches.
func awaitMetric(t *testing.T, p *process, url, pattern string) {
	t.Helper()
	re := regexp.MustCompile(pattern)
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		_, s := p.as(t, "", "GET", url+"/metrics/prometheus", "")
		if re.MatchString(s) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the metrics do not say %s:\n%s", pattern, s)
		}
	}
}
