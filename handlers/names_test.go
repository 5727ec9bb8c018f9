package handlers

import (
	"bytes"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

// hostileNames are names that mean something to somebody else, and what is none.
var hostileNames = []string{"a/b", "a%2Fb", "%", "+", " ", ".", "..", "../../v1/push", "*", "_", "?", "#", "&=;", ":", "$1", "%s", "'; drop table x; --", "{{7*7}}", "{}", "[a]", `"`, `\`, "\n", "\x7f", "\u2028", "\u202eabc", "\ufeff",
	"😀", "ü", "u\u0308", "İ", "null", "0", "-1", "true", "default", "Default", "DEFAULT", "__QUEUE_MODE__", "~unkeyed/3", "queue", "names", "by-name", "lagging", "batch", "signatures", "dlq:x", "<script>", "${jndi:x}",
	strings.Repeat("a", 255), strings.Repeat("é", 127) + "x",
	// no names
	"", "\x00", "a\x00b", "\xff", "\xc0\x80", "\xed\xa0\x80", strings.Repeat("a", 256), strings.Repeat("é", 128), strings.Repeat("x", 100_000)}

// noNames is how many of them, at the end, are none.
const noNames = 9

var queryNames = []string{"queue", "partition", "group", "consumerGroup", "namespace", "ns", "task", "status", "from", "to", "limit", "offset", "cursor", "project", "state", "signature", "batch", "subscriptionFrom", "hostname", "interval"}

// TestHostileNames sends names in the place of each path parameter, each query parameter and each text of a body, on every route.
// None of it is a fault of the broker, and every answer is JSON.
func TestHostileNames(t *testing.T) {
	t.Parallel()
	s := serve(t)
	ids := s.furnish(t)
	for i := range s.routes {
		x := &s.routes[i]
		path, name := x.sample()
		if strings.Contains(path, "/system/") {
			continue
		}
		body := ""
		if all := bodies[name]; len(all) > 0 {
			body = all[0]
		}
		for at, p := range x.path {
			if p[0] != '{' {
				continue
			}
			for k, hostile := range hostileNames {
				if (i+k)%3 != 0 && k < len(hostileNames)-noNames {
					continue // each name is met by every kind of route, and by each by those that are none
				}
				parts := strings.Split(path, "/")
				parts[at+1] = url.PathEscape(hostile)
				answer, _ := s.ask(t, x.method, fill(strings.Join(parts, "/"), ids), []byte(fill(body, ids)), time.Second)
				if hostile == "" && answer.status != 404 {
					t.Errorf("%s without %s: %d", name, p, answer.status)
				}
			}
		}
		for n, q := range queryNames {
			for k, hostile := range hostileNames {
				if x.method == "GET" && (i+n+k)%16 == 0 {
					s.ask(t, x.method, fill(path, ids)+"?"+q+"="+url.QueryEscape(hostile), nil, 200*time.Millisecond)
				}
			}
		}
		for k, hostile := range hostileNames {
			for n, with := range replaced([]byte(body), hostile) {
				if (i+n+k)%4 != 0 {
					continue
				}
				s.ask(t, x.method, fill(path, ids), []byte(fill(string(with), ids)), 200*time.Millisecond)
			}
		}
	}
}

// replaced is a body with each of its texts, names of members left out, replaced in turn.
func replaced(body []byte, with string) (all [][]byte) {
	d := jsontext.NewDecoder(bytes.NewReader(body))
	text := slices.Concat([]byte{'"'}, []byte(strings.NewReplacer(`"`, `\"`, `\`, `\\`, "\n", `\n`, "\x00", `\u0000`).Replace(with)), []byte{'"'})
	for {
		if k := d.PeekKind(); k == '{' || k == '[' || k == '}' || k == ']' {
			if _, err := d.ReadToken(); err != nil {
				return all
			}
			continue
		}
		kind, n := d.StackIndex(d.StackDepth())
		v, err := d.ReadValue()
		if err != nil {
			return all
		}
		if end := d.InputOffset(); v[0] == '"' && (kind != '{' || n%2 == 1) {
			all = append(all, slices.Concat(body[:end-int64(len(v))], text, body[end:]))
		}
	}
}

// TestNamesComeBack: what is taken as a name is listed by it, and is found by it in every place, whatever its characters.
func TestNamesComeBack(t *testing.T) {
	t.Parallel()
	s := serve(t)
	for _, name := range hostileNames {
		if name == "" || len(name) > 255 || !utf8.ValidString(name) || strings.Contains(name, "\x00") {
			continue
		}
		j, p, q := string(quote(nil, name)), url.PathEscape(name), url.QueryEscape(name)
		listed := func(target string, parts ...string) {
			t.Helper()
			body := s.must(t, 200, "GET", target, "")
			for _, part := range parts {
				if !strings.Contains(body, part) {
					t.Errorf("GET %s does not say %s: %s", target, part, clipped(body))
				}
			}
		}
		queue := `"queue":` + j
		s.must(t, 200, "POST", "/api/v1/configure", fmt.Sprintf(`{"queue":%s,"options":{"namespace":%[1]s,"task":%[1]s,"retryLimit":0}}`, j))
		pushed := s.must(t, 201, "POST", "/api/v1/push", fmt.Sprintf(`{"items":[{"queue":%s,"partition":%[1]s,"transactionId":%[1]s,"payload":1},{"queue":%[1]s,"partition":%[1]s,"payload":2}]}`, j))
		partition := member(t, pushed, "partitionId")
		popped := s.must(t, 200, "GET", "/api/v1/pop/queue/"+p+"?batch=1&consumerGroup="+q, "")
		for _, part := range []string{queue, `"partition":` + j, `"consumerGroup":` + j, `"transactionId":` + j} {
			if !strings.Contains(popped, part) {
				t.Errorf("%q: popped without %s: %s", name, part, popped)
			}
		}
		s.must(t, 200, "POST", "/api/v1/ack", fmt.Sprintf(`{"transactionId":%s,"consumerGroup":%[1]s,"partitionId":"%s","leaseId":"%s","status":"failed","error":%[1]s}`, j, partition, member(t, popped, "leaseId")))
		listed("/api/v1/dlq?queue="+q+"&partition="+q+"&consumerGroup="+q, queue, `"transactionId":`+j, `"errorMessage":`+j, `"total":1`)
		listed("/api/v1/messages?queue="+q+"&partition="+q+"&namespace="+q+"&task="+q, queue, `"transactionId":`+j, `"total":2`)
		listed("/api/v1/messages/"+partition+"/"+p, queue, `"status":"dead_letter"`)
		listed("/api/v1/pop?consumerGroup=x&batch=1&namespace="+q+"&task="+q, `"partition":`+j, `"transactionId":`+j)
		listed("/api/v1/resources/queues?namespace="+q, `"name":`+j)
		listed("/api/v1/resources/queues/"+p, `"name":`+j)
		listed("/api/v1/resources/queues/"+p+"/depth?group="+q, queue, `"group":`+j, `"partition":`+j)
		listed("/api/v1/resources/partitions?queue="+q, queue, `"name":`+j)
		listed("/api/v1/resources/namespaces", `"namespace":`+j)
		listed("/api/v1/resources/tasks", `"task":`+j)
		listed("/api/v1/status/queues/"+p, `"name":`+j)
		listed("/api/v1/status/queues?queue="+q, `"name":`+j)
		listed("/api/v1/consumer-groups", `"name":`+j+`,"topics":[`+j+`]`)
		if name != "lagging" { // which is a route
			listed("/api/v1/consumer-groups/"+p, j+`:{"conflation"`, `"partition":`+j)
		}
		listed("/metrics")
		if moved := s.must(t, 200, "POST", "/api/v1/consumer-groups/"+p+"/queues/"+p+"/partitions/"+p+"/seek", ""); !strings.Contains(moved, `"updated":true`) {
			t.Errorf("%q: %s", name, moved)
		}
		s.must(t, 201, "POST", "/api/v1/traces", fmt.Sprintf(`{"transactionId":%s,"partitionId":"%s","data":1,"traceNames":%[1]s,"eventType":%[1]s,"consumerGroup":%[1]s}`, j, partition))
		listed("/api/v1/traces/names?limit=1000", `"trace_name":`+j)
		listed("/api/v1/traces/by-name/"+p, `"event_type":`+j, `"consumer_group":`+j, `"transaction_id":`+j, `"queue_name":`+j)
		listed("/api/v1/traces/"+partition+"/"+p, `"trace_names":[`+j+`]`)

		if name == "default" {
			continue
		}
		s.must(t, 201, "POST", "/v1/projects", `{"name":`+j+`}`)
		s.must(t, 201, "POST", "/v1/projects/"+p+"/keys", `{"scopes":["read"],"name":`+j+`}`)
		listed("/v1/projects?limit=1000", `"name":`+j)
		listed("/v1/projects/"+p+"/keys", `"name":`+j)
		in := "?project=" + q
		s.must(t, 200, "POST", "/v1/streams/"+p+"/messages"+in, fmt.Sprintf(`{"messages":[{"key":%s,"id":%[1]s,"payload":1,"headers":{%[1]s:%[1]s}}]}`, j))
		if again := s.must(t, 200, "POST", "/v1/streams/"+p+"/messages"+in, fmt.Sprintf(`{"messages":[{"key":%s,"id":%[1]s,"payload":1}]}`, j)); !strings.Contains(again, `"duplicate"`) {
			t.Errorf("%q again: %s", name, again)
		}
		s.must(t, 200, "PUT", "/v1/subscriptions/"+p+in, `{"stream":`+j+`,"retry":{"max_attempts":1}}`)
		listed("/v1/streams"+in+"&limit=1000", `"name":`+j)
		listed("/v1/streams/"+p+in, `"name":`+j)
		listed("/v1/subscriptions"+in+"&limit=1000", `"name":`+j, `"stream":`+j)
		consumer := name[:min(len(name), 200)]
		for !utf8.ValidString(consumer) {
			consumer = consumer[:len(consumer)-1]
		}
		got := s.must(t, 200, "POST", "/v1/subscriptions/"+p+"/receive"+in, `{"consumer":`+string(quote(nil, consumer))+`}`)
		if !strings.Contains(got, `"stream":`+j+`,"project":`+j+`,"key":`+j) || !strings.Contains(got, `"headers":{`+j+":"+j+"}") {
			t.Errorf("%q: received %s", name, got)
		}
		listed("/v1/subscriptions/"+p+"/lanes"+in, `"key":`+j, `"consumer":`+string(quote(nil, consumer)))
		s.must(t, 200, "POST", "/v1/subscriptions/"+p+"/nack"+in, `{"delivery_ids":["`+member(t, got, "delivery_id")+`"],"error":`+j+`}`)
		dead := s.must(t, 200, "GET", "/v1/subscriptions/"+p+"/dead-letters"+in, "")
		if !strings.Contains(dead, `"key":`+j) || !strings.Contains(dead, `"error":`+j) {
			t.Errorf("%q: dead %s", name, dead)
		}
		trace := s.must(t, 200, "GET", "/v1/messages/"+member(t, got, "id")+"/trace"+in, "")
		if !strings.Contains(trace, `"subscription":`+j) || !strings.Contains(trace, `"error":`+j) {
			t.Errorf("%q: trace %s", name, trace)
		}
		s.must(t, 200, "DELETE", "/v1/projects/"+p, "")
		s.must(t, 200, "DELETE", "/api/v1/consumer-groups/"+p+"/queues/"+p, "")
	}
	// Deleting one deletes no other.
	for _, name := range []string{"*", "%", "_", "a%2Fb", "__QUEUE_MODE__"} {
		if body := s.must(t, 200, "DELETE", "/api/v1/resources/queues/"+url.PathEscape(name), ""); !strings.Contains(body, `"existed":true`) {
			t.Errorf("%q: %s", name, body)
		}
	}
	for _, name := range []string{"a/b", "ü", "u\u0308", "?", "..", "default", "Default"} {
		s.must(t, 200, "GET", "/api/v1/resources/queues/"+url.PathEscape(name), "")
	}
}
