package contract

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"ferrymq/dbtest"
)

// operation is one that /v1/openapi.json describes.
type operation struct {
	ID         string                    `json:"operationId"`
	Parameters []parameter               `json:"parameters"`
	Body       struct{ Content content } `json:"requestBody"`
	Responses  map[string]described      `json:"responses"`
	method     string
	path       []string
}

type parameter struct {
	Ref     string `json:"$ref"`
	Name    string `json:"name"`
	In      string `json:"in"`
	Example any    `json:"example"`
}

type described struct {
	Ref     string  `json:"$ref"`
	Content content `json:"content"`
}

// content is by media type. Schemas are compiled where they stand.
type content map[string]*struct {
	Example json.RawMessage `json:"example"`
	schema  *jsonschema.Schema
}

// description is compiled once: every answer of every script is held to it too.
var description = sync.OnceValues(func() ([]*operation, error) {
	text, err := os.ReadFile("../handlers/openapi.json")
	if err != nil {
		return nil, err
	}
	root, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	closed(root)
	compiler := jsonschema.NewCompiler()
	compiler.DefaultDraft(jsonschema.Draft2020)
	compiler.AssertFormat()
	if err := compiler.AddResource("openapi.json", root); err != nil {
		return nil, err
	}
	compile := func(c content, at ...string) error {
		for mediaType, x := range c {
			pointer := "openapi.json#"
			for _, name := range append(at, "content", mediaType, "schema") {
				pointer += "/" + url.PathEscape(strings.NewReplacer("~", "~0", "/", "~1").Replace(name))
			}
			if x.schema, err = compiler.Compile(pointer); err != nil {
				return err
			}
		}
		return nil
	}
	var doc struct {
		Paths      map[string]map[string]*operation `json:"paths"`
		Components struct {
			Parameters map[string]parameter `json:"parameters"`
			Responses  map[string]described `json:"responses"`
		} `json:"components"`
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		return nil, err
	}
	for name, r := range doc.Components.Responses {
		if err := compile(r.Content, "components", "responses", name); err != nil {
			return nil, err
		}
	}
	var all []*operation
	for path, ops := range doc.Paths {
		for method, op := range ops {
			op.method, op.path = strings.ToUpper(method), strings.Split(path[1:], "/")
			all = append(all, op)
			if err := compile(op.Body.Content, "paths", path, method, "requestBody"); err != nil {
				return nil, err
			}
			for i, p := range op.Parameters {
				if p.Ref != "" {
					op.Parameters[i] = doc.Components.Parameters[strings.TrimPrefix(p.Ref, "#/components/parameters/")]
				}
			}
			for status, r := range op.Responses {
				if r.Ref != "" {
					op.Responses[status] = doc.Components.Responses[strings.TrimPrefix(r.Ref, "#/components/responses/")]
				} else if err := compile(r.Content, "paths", path, method, "responses", status); err != nil {
					return nil, err
				}
			}
		}
	}
	// What has fewer parameters in its path is meant.
	slices.SortFunc(all, func(a, b *operation) int {
		return cmp.Or(strings.Count(strings.Join(a.path, "/"), "{")-strings.Count(strings.Join(b.path, "/"), "{"), cmp.Compare(a.ID, b.ID))
	})
	return all, nil
})

// closed lets no schema pass what it does not name, unless it says that it does.
func closed(v any) {
	switch v := v.(type) {
	case []any:
		for _, x := range v {
			closed(x)
		}
	case map[string]any:
		if _, ok := v["properties"].(map[string]any); ok && v["additionalProperties"] == nil {
			v["additionalProperties"] = false
		}
		for _, x := range v {
			closed(x)
		}
	}
}

func (op *operation) match(method string, path []string) bool {
	if method != op.method || len(path) != len(op.path) {
		return false
	}
	for i, p := range op.path {
		if path[i] == "" || p[0] != '{' && p != path[i] {
			return false
		}
	}
	return true
}

// validate holds an answer to what the operation says.
func (op *operation) validate(status int, mediaType, body string) error {
	r, ok := op.Responses[strconv.Itoa(status)]
	if !ok {
		return fmt.Errorf("openapi: %s does not answer %d", op.ID, status)
	}
	if len(r.Content) == 0 {
		if body != "" {
			return fmt.Errorf("openapi: %s answers %d without a body", op.ID, status)
		}
		return nil
	}
	x := r.Content[mediaType]
	if x == nil {
		return fmt.Errorf("openapi: %s does not answer %d with %s", op.ID, status, mediaType)
	}
	if mediaType != "application/json" {
		return nil
	}
	return conforms(x.schema, body)
}

func conforms(schema *jsonschema.Schema, text string) error {
	v, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	if err == nil {
		err = schema.Validate(v)
	}
	if err != nil {
		return fmt.Errorf("openapi: %w", err)
	}
	return nil
}

// asDescribed holds a call of a script to the description. What is no route, and raw requests, are left alone.
func asDescribed(c *call) error {
	all, err := description()
	if err != nil {
		return err
	}
	path, _, _ := strings.Cut(c.path, "?")
	segments := strings.Split(strings.TrimPrefix(path, "/"), "/")
	for _, op := range all {
		if op.match(c.method, segments) {
			return op.validate(c.resp.StatusCode, c.resp.Header.Get("Content-Type"), c.body)
		}
	}
	return nil
}

// The ids that the examples use; a story puts real ones in their place.
var exampleIDs = map[string]string{
	"partition": "5d0f6f0a-9c1e-4b7e-8f53-0d6c2f1a7e10", "lease": "0199b1f2-9a7b-7d20-8e31-4c5d6e7f8a90", "dlq": "0199b200-4d3a-7c10-9f2b-6a1e5d0c7b83",
	"delivery": "dlv_000000000000800000000000001jcv4007d6h724wz48z0m30br84g2q1e7m0", "message": "msg_000000000008g0000000000001",
	"dead": "dl_06cv4007d6h724wz48z0m30br8", "key": "key_06cv4007d6h724wz48z0m30br8",
}

// openapiStory calls every operation with its example. "has=" is in the answer; "x=path" puts what is there in the place of the example
// id of x. A line with a method is a call in between.
const openapiStory = `
openapi has="openapi": "3.1.1"
health has="healthy"
ready
alive
configure
push partition=0.partitionId has="queued"
popQueue lease=leaseId has="data":{"cents": 1200}
extendLease has="success":true
ack has="success":true
ackBatch has="noop":true
POST /api/v1/consumer-groups/ledger/queues/billing.charge/seek {"timestamp":"2026-03-01T00:00:00Z"}
popPartition has="cust-9"
POST /api/v1/consumer-groups/ledger/queues/billing.charge/seek {"timestamp":"2026-03-01T00:00:00Z"}
popDiscovery has="cust-9"
transaction has="success":true
listGroups has="ledger"
listLagging
getGroup has="cust-9"
setGroupStart
seekPartition has="updated":true
seekQueue has="success":true
listMessages has="pay-17"
buryMessage dlq=dlqId
listDeadLetters has="bad data"
getMessage has="dead_letter"
retryMessage has="moved"
POST /api/v1/consumer-groups/ledger/queues/billing.charge/seek {"timestamp":"2026-03-01T00:00:00Z"}
buryMessage dlq=dlqId
replayDeadLetter has="moved"
POST /api/v1/consumer-groups/ledger/queues/billing.charge/seek {"timestamp":"2026-03-01T00:00:00Z"}
buryMessage
deleteMessage has="success":true
createTrace
listTraceNames has="checkout"
listTraces has="checkout"
getTraces has="checkout"
getMaintenance
setMaintenance has=DISABLED
getPopMaintenance
setPopMaintenance has=DISABLED
refreshNumbers
listQueues has="billing.charge"
getQueue has="cust-9"
getDepth has="cust-9"
getOverview
listNamespaces has="billing"
listTasks has="charge"
listPartitions has="cust-9"
getStatus
getStatusOfQueues has="billing.charge"
getStatusOfQueue has="cust-9"
getStatusAnalytics
getBuffers
getQueueLag
getQueueOps
getParked
getRetention
getSystemMetrics
getWorkerMetrics
getDatabaseStats
metrics
prometheus
deleteGroupOfQueue has="deletedPartitions":
deleteGroup
purgeDeadLetters has="success":true
clearQueue has="success":true
deleteQueue has="deleted":true
putStream has="unkeyed_lanes":64
publish message=results.0.id has="queued"
putSubscription has="max_attempts":2
receive delivery=messages.0.delivery_id has="attempt":1
extendDeliveries has="ok":true
nackDeliveries has="ok":true
receive delivery=messages.0.delivery_id has="attempt":2
nackDeliveries has="ok":true
listLaneDeadLetters dead=dead_letters.0.id has="downstream 500"
listSignatures has="downstream <n>"
redrive has="redriven":1
traceMessage has="subscription":"mail"
receive delivery=messages.0.delivery_id has="attempt":1
ackDeliveries has="ok":true
getStream has="24h"
listStreams has="orders"
getSubscription has="in_flight":1
listSubscriptions has="mail"
listLanes has="worker-1"
seekSubscription has="lanes_moved":2
deleteLaneDeadLetters has="deleted":0
deleteSubscription has="deleted":true
deleteStream has="deleted":true
createProject has="payments"
listProjects has="payments"
createKey key=id has="secret":"fmq_
listKeys has="backend"
deleteKey has="deleted":true
deleteProject has="deleted":true
`

// Every operation is called with its example and answers as described.
func testOpenAPI(t *testing.T, bin string) {
	all, err := description()
	if err != nil {
		t.Fatal(err)
	}
	b, err := start(bin, []string{"DATABASE_URL=" + dbtest.New(t), "PORT=0", "DB_POOL_SIZE=5"}, true)
	if b != nil {
		defer func() { _ = b.stop() }()
	}
	if err != nil {
		t.Fatal(err)
	}
	send := func(method, path, body string) (int, string, string) {
		t.Helper()
		req, err := http.NewRequest(method, "http://"+b.addr+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		answer, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, resp.Header.Get("Content-Type"), string(answer)
	}
	ids, told := make(map[string]string), make(map[string]bool)
	for line := range strings.Lines(strings.TrimSpace(openapiStory)) {
		line = strings.TrimSuffix(line, "\n")
		if method, rest, _ := strings.Cut(line, " "); method == strings.ToUpper(method) {
			path, body, _ := strings.Cut(rest, " ")
			if status, _, answer := send(method, path, body); status >= 300 {
				t.Fatalf("%s: %d %s", line, status, answer)
			}
			continue
		}
		line, has, _ := strings.Cut(line, " has=")
		words := strings.Fields(line)
		at := slices.IndexFunc(all, func(op *operation) bool { return op.ID == words[0] })
		if at < 0 {
			t.Errorf("%s is not described", words[0])
			continue
		}
		op := all[at]
		told[op.ID] = true
		var known []string
		for name, id := range ids {
			known = append(known, exampleIDs[name], id)
		}
		real := strings.NewReplacer(known...)
		path, query := "/"+strings.Join(op.path, "/"), url.Values{}
		for _, p := range op.Parameters {
			switch value := fmt.Sprint(p.Example); {
			case p.In == "path":
				path = strings.Replace(path, "{"+p.Name+"}", url.PathEscape(real.Replace(value)), 1)
			case p.Example != nil:
				query.Set(p.Name, real.Replace(value))
			}
		}
		body := ""
		if x := op.Body.Content["application/json"]; x != nil {
			body = real.Replace(string(x.Example))
			if err := conforms(x.schema, body); err != nil {
				t.Errorf("the example of %s: %v", op.ID, err)
			}
		}
		status, mediaType, answer := send(op.method, path+"?"+query.Encode(), body)
		if err := op.validate(status, mediaType, answer); err != nil || status >= 300 || status == 204 || !strings.Contains(answer, has) {
			t.Errorf("%s: %s %s %s\nanswered %d %s\n%v", line, op.method, path, body, status, clip(answer), err)
		}
		for _, w := range words[1:] {
			name, where, _ := strings.Cut(w, "=")
			id, err := lookup(json.RawMessage(answer), where)
			if ids[name] = strings.Trim(id, `"`); err != nil || id == "absent" || exampleIDs[name] == "" {
				t.Errorf("%s: %s: %v", line, w, err)
			}
		}
	}
	for _, op := range all {
		if !told[op.ID] {
			t.Errorf("%s was not called", op.ID)
		}
	}
}

// The validator is for tests: the broker does without it.
func TestOpenAPIValidatorStaysOut(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("go", "list", "-deps", "ferrymq").CombinedOutput()
	if err != nil || bytes.Contains(out, []byte("jsonschema")) {
		t.Errorf("%v\n%s", err, out)
	}
}
