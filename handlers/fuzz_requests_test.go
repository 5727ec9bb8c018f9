package handlers

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"
)

// bodies are what requests of a route may say, for the fuzzer to begin with; what stands in angle brackets is an id of furnish.
var bodies = map[string][]string{
	"POST /api/v1/push": {`{"items":[{"queue":"<queue>","partition":"Default","transactionId":"t1","payload":{"a":1e400}},{"queue":"w","partition":null,"payload":null}]}`,
		`{"items":[{"queue":"a","QUEUE":"b","queue":"c","payload":"\ud800","x":[{}]}]}`, `{"items":[]}`, `{}`, "\ufeff{\"items\":[]}"},
	"POST /api/v1/ack": {`{"transactionId":"t2","partitionId":"<partition>","status":"failed","error":"e\u0000\ud800","leaseId":"<lease>","consumerGroup":"<group>"}`,
		`{"transactionId":null,"partitionId":null,"leaseId":""}`},
	"POST /api/v1/ack/batch": {`{"consumerGroup":"<group>","acknowledgments":[{"transactionId":"t2","partitionId":"<partition>","status":"retry","leaseId":"<lease>"},{},{"status":"dlq","partitionId":"<partition>","transactionId":"t3"}]}`,
		`{"acknowledgments":null}`},
	"POST /api/v1/lease/{leaseId}/extend": {`{"seconds":1e3}`, `{"seconds":-9223372036854775809}`, `no`, ``},
	"POST /api/v1/configure": {`{"queue":"<queue>","mode":"merge","options":{"leaseTime":1.5e1,"retryLimit":null,"retentionSinkHold":"a.b","namespace":"n","task":null}}`,
		`{"queue":"<queue>","mode":"replace","namespace":"","priority":-2147483648,"ttl":2147483647,"minPopWaitTime":1e99}`, `{"queue":"<queue>","mode":"a\"b"}`},
	"POST /api/v1/consumer-groups/{group}/subscription":                               {`{"subscriptionTimestamp":"2026-03-01T00:00:00+01:00"}`, `{"subscriptionTimestamp":"0001-01-01T00:00:00+14:00"}`},
	"POST /api/v1/consumer-groups/{group}/queues/{queue}/seek":                        {`{"toEnd":true}`, `{"timestamp":"9999-12-31T23:59:59-14:00","toEnd":null}`},
	"POST /api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek": {``, `{}`, `{"timestamp":"2026-03-01"}`},
	"POST /api/v1/transaction": {`{"operations":[{"type":"ack","transactionId":"t2","partitionId":"<partition>","consumerGroup":"<group>","status":"completed"},{"type":"push","items":[{"queue":"q2","transactionId":"x","payload":1,"traceId":"<partition>"}]},{"queue":"q3","data":0,"type":"push"}],"requiredLeases":["<lease>",""],"kv":[ ]}`,
		`{"operations":[],"timers":[1]}`},
	"POST /api/v1/messages/{partitionId}/{transactionId}/dlq": {`{"consumerGroup":"<group>","error":"bad\u0000"}`},
	"POST /api/v1/dlq/{id}/replay":                            {`{"queue":"<queue>","partition":"p2"}`},
	"POST /api/v1/traces":                                     {`{"transactionId":"t1","partitionId":"<partition>","data":{"a":"\u0000"},"consumerGroup":"<group>","eventType":"e","traceNames":["n","m"]}`, `{"transactionId":"t1","partitionId":"<partition>","data":1e999999,"traceNames":"n"}`},
	"POST /api/v1/system/maintenance":                         {`{"enabled":false}`},
	"POST /api/v1/system/maintenance/pop":                     {`{"enabled":false}`},
	"POST /v1/streams/{stream}/messages":                      {`{"messages":[{"key":"k1","payload":{"a":1},"headers":{"h":"\ud800"},"id":"i1","delay":"0s"},{"payload":0,"delay":"8760h"},{"key":null,"payload":null,"headers":null,"id":null,"delay":null}]}`},
	"PUT /v1/streams/{stream}":                                {`{"unkeyed_lanes":4,"dedup_window":"1h","retention":"1.5s","keep_consumed":null}`},
	"PUT /v1/subscriptions/{sub}": {`{"stream":"<stream>","start":"earliest","lease_seconds":30,"retry":{"max_attempts":10,"initial":"1s","multiplier":2,"max":"10m"},"count_expired_leases":true,"max_in_flight":0,"paused":false,"trace":"full"}`,
		`{"stream":"<stream>","start":"0001-01-01T00:00:00\u002b14:00"}`},
	"POST /v1/subscriptions/{sub}/seek":                 {`{"to":"latest"}`, `{"to":"9999-12-31T23:59:59.9999-00:01"}`},
	"POST /v1/subscriptions/{sub}/receive":              {`{"max_messages":10,"wait_seconds":0.5,"consumer":"w"}`, `{"max_messages":1e400,"wait_seconds":1e400}`},
	"POST /v1/subscriptions/{sub}/ack":                  {`{"delivery_ids":["<delivery>","",1,null,{"a":[]}]}`},
	"POST /v1/subscriptions/{sub}/nack":                 {`{"delivery_ids":["<delivery>"],"error":"x\u0000\ud800 12","retry_after":"1h"}`, `{"delivery_ids":["<delivery>"],"release":true}`},
	"POST /v1/subscriptions/{sub}/extend":               {`{"delivery_ids":["<delivery>"],"seconds":60}`},
	"POST /v1/subscriptions/{sub}/dead-letters/redrive": {`{"ids":["<dead>","x"]}`, `{"signature":"e <n>"}`, `{"all":true}`},
	"DELETE /v1/subscriptions/{sub}/dead-letters":       {`{"ids":["<dead>"]}`, `{"signature":"\u0000\ud800"}`},
	"POST /v1/projects":                                 {`{"name":"p2"}`},
	"POST /v1/projects/{project}/keys":                  {`{"scopes":["publish","consume","read","admin"],"name":"k"}`},
}

// queries are query strings worth a beginning, on any route.
var queries = []string{"", "limit=5&offset=3&from=2026-01-01&to=9999-12-31T23:59:59Z&queue=<queue>&partition=p&namespace=q&task=t&status=pending&group=<group>",
	"batch=2&partitions=0&wait=true&timeout=1&leaseSeconds=9300000000&consumerGroup=<group>&subscriptionMode=new&subscriptionFrom=0001-01-01T00:00:00%2B14:00&autoAck=yes",
	"cursor=zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzg&signature=%00%ff&state=leased&project=<project>", "project=%zz", "limit=%31&a;b&&=&%zz", "minLagSeconds=9223372036854775807&interval=day&hostname=h&workerId=-9223372036854775808",
	"cursor=fzzzzzzzzzzzy", "cursor=c0", "signature=%00", "deleteMetadata=false"}

// samples are what there is of each path parameter.
var samples = map[string]string{"queue": "<queue>", "partition": "Default", "group": "<group>", "leaseId": "<lease>", "partitionId": "<partition>", "transactionId": "t1",
	"id": "<letter>", "traceName": "n", "sub": "<sub>", "stream": "<stream>", "project": "<project>", "key": "<key>"}

// sample is a path of a route, and all it is called by in bodies.
func (x *route) sample() (path, name string) {
	for _, p := range x.path {
		if p[0] == '{' {
			p = samples[p[1:len(p)-1]]
		}
		path += "/" + p
	}
	return strings.Replace(path, "/v1/messages/<letter>/trace", "/v1/messages/<message>/trace", 1), x.method + " /" + strings.Join(x.path, "/")
}

// FuzzRequest sends any request to a broker with a database: nothing in it is a fault of the broker, and every answer is JSON that
// says what was wrong.
func FuzzRequest(f *testing.F) {
	s := serve(f)
	cursors := queries
	for _, size := range []int{8, 16, 24} {
		for _, with := range []byte{0x7f, 0x90} {
			cursors = append(cursors, "limit=1&cursor="+crockford.EncodeToString(append([]byte{with}, bytes.Repeat([]byte{0xff * (with & 1)}, size-1)...)))
		}
	}
	for i := range s.routes {
		path, name := s.routes[i].sample()
		all := append(slices.Clone(bodies[name]), "", "[1]")
		for _, body := range all {
			f.Add(s.routes[i].method, path, "", []byte(body))
		}
		asked := cursors
		if s.routes[i].method != "GET" {
			asked = queries[1:3]
		}
		for _, q := range asked {
			f.Add(s.routes[i].method, path, q, []byte(all[0]))
		}
	}
	var ids map[string]string
	n := 0
	f.Fuzz(func(t *testing.T, method, path, query string, body []byte) {
		if n++; ids == nil || n%100 == 0 || method == "DELETE" && n%20 == 0 {
			ids = s.furnish(t) // much of it has been used up, or deleted
		}
		target := fill(path, ids)
		if query != "" {
			target += "?" + fill(query, ids)
		}
		if strings.Contains(target, "/system/") && bytes.Contains(body, []byte("true")) {
			return // it would keep all others from what they are here for
		}
		s.ask(t, method, target, []byte(fill(string(body), ids)), 100*time.Millisecond)
	})
}
