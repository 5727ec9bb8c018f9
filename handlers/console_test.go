package handlers

import (
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"ferrymq/auth"
	"ferrymq/db"
)

// Each kind of trouble has its sentence, and what flows has none.
func TestTroubles(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		g      db.ConsoleGroupsRow
		pushed int64
		want   string
	}{
		{"idle", db.ConsoleGroupsRow{Oldest: -1}, 0, ""},
		{"flows", db.ConsoleGroupsRow{Lag: 500, Oldest: 2, Delivered: 10_000, Done: 10_000}, 10_400, ""},
		{"busy, nobody missed yet", db.ConsoleGroupsRow{Lag: 5, Oldest: 59}, 5, ""},
		{"nobody", db.ConsoleGroupsRow{Lag: 1, Oldest: 61}, 1, `bad Group "g" of queue "q" has no consumer: 1 message waits, the oldest for 61 seconds.`},
		{"held", db.ConsoleGroupsRow{Lag: 5, Oldest: 200, Leased: 1}, 5, ""},
		{"queue mode", db.ConsoleGroupsRow{Name: queueMode, Lag: 5, Oldest: 3600}, 0, `bad Queue "q" has no consumer: 5 messages wait, the oldest for 60 minutes.`},
		{"paused", db.ConsoleGroupsRow{Kind: 1, Paused: true, Lag: 5, Oldest: 7200}, 0, `warn Subscription "g" is paused: 5 messages wait, the oldest for 2 hours.`},
		{"falls behind", db.ConsoleGroupsRow{Kind: 1, Lag: 900, Oldest: 40, Delivered: 10, Done: 10}, 500,
			`warn Subscription "g" falls behind: 900 messages wait, the oldest for 40 seconds, 490 more than ten minutes ago.`},
		{"falls far behind", db.ConsoleGroupsRow{Lag: 900, Oldest: 301, Delivered: 10, Done: 10, Dead: 1}, 5000,
			`bad Group "g" of queue "q" falls behind: 900 messages wait, the oldest for 5 minutes, 900 more than ten minutes ago.`},
		{"behind", db.ConsoleGroupsRow{Lag: 900, Oldest: 200_000, Delivered: 10, Done: 10}, 0, `warn Group "g" of queue "q" is behind: 900 messages wait, the oldest for 2 days.`},
		{"blocked", db.ConsoleGroupsRow{Kind: 1, Lag: 9, Oldest: 90, Failing: 1}, 0, `bad Subscription "g": 1 key is blocked by a message that fails.`},
		{"hostile", db.ConsoleGroupsRow{Kind: 1, Name: "<b>\n\"", Lag: 9, Oldest: 90, Failing: 2}, 0, `bad Subscription "<b>\n\"": 2 keys are blocked by messages that fail.`},
	} {
		g := c.g
		if g.QueueID, g.Queue = 7, "q"; g.Name == "" {
			g.Name = "g"
		}
		s := &lookout{groups: []db.ConsoleGroupsRow{g}, queues: []db.ConsoleQueuesRow{{ID: 7, Name: "q", Pushed: c.pushed}}}
		var got []string
		for _, x := range s.troubles() {
			got = append(got, x.Severity+" "+x.Text)
		}
		if strings.Join(got, "|") != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// What the console asks for says what is there, pages and searches it, and an API key sees its own project only.
func TestConsole(t *testing.T) {
	t.Parallel()
	s := serve(t)
	for i := range 60 {
		s.must(t, 201, "POST", "/api/v1/push", fmt.Sprintf(`{"items":[{"queue":"q%02d","partition":"p","payload":1}]}`, i))
	}
	s.must(t, 200, "PUT", "/v1/subscriptions/sub", `{"stream":"orders","retry":{"initial":"10m","max":"10m"}}`)
	s.must(t, 200, "POST", "/v1/streams/orders/messages", `{"messages":[{"key":"k1","payload":1},{"key":"k1","payload":2},{"key":"k2","payload":3}]}`)
	got := s.must(t, 200, "POST", "/v1/subscriptions/sub/receive", `{"max_messages":1,"consumer":"w1"}`)
	s.must(t, 200, "POST", "/v1/subscriptions/sub/nack", `{"delivery_ids":["`+member(t, got, "delivery_id")+`"],"error":"boom 17"}`)
	popped := s.must(t, 200, "GET", "/api/v1/pop/queue/q00?consumerGroup=g&batch=1", "")
	s.must(t, 200, "POST", "/api/v1/ack", fmt.Sprintf(`{"transactionId":"%s","consumerGroup":"g","partitionId":"%s","leaseId":"%s","status":"dlq","error":"bad thing 4"}`,
		member(t, popped, "transactionId"), member(t, popped, "partitionId"), member(t, popped, "leaseId")))
	says := func(target string, parts ...string) string {
		t.Helper()
		body := s.must(t, 200, "GET", target, "")
		for _, part := range parts {
			if !strings.Contains(body, part) {
				t.Errorf("GET %s does not say %s: %s", target, part, clipped(body))
			}
		}
		return body
	}
	says("/console/session", `"authentication":false`, `"admin":true`, `"project":null`)
	says("/console/overview", `"severity":"bad"`, `1 key is blocked by a message that fails`, `1 message died in the last ten minutes, mostly \"bad thing <n>\"`, `"queues":61`, `"dead":1`)
	says("/console/queues?limit=2&offset=1", `"name":"q00"`, `"name":"q01"`, `"total":61`)
	says("/console/queues?search=Q5", `"total":10`, `"all":61`)
	says("/console/queues?sort=lag&limit=1", `"name":"orders"`, `"lag":3`, `"keys":2`)
	says("/console/queue?name=orders", `"name":"sub"`, `"kind":"subscription"`, `"failing":1`, `"lag":3`)
	says("/console/groups?search=ORD", `"total":1`, `"name":"sub"`)
	says("/console/blocked", `"last_error":"boom 17"`, `"attempts":1`, `"consumer":"w1"`, `"total":1`, `"leased":false`)
	id := member(t, says("/console/blocked"), "message_id")
	says("/console/message?id="+id, `{"readable":true,"payload":1,"headers":null}`)
	s.must(t, 400, "GET", "/console/message?id=x", "")
	s.must(t, 404, "GET", "/console/message?id="+string(appendMessageID(nil, 1<<40, 0)), "")
	says("/console/blocked?search=other", `"keys":[]`)
	says("/console/dead-letters", `"signature":"bad thing <n>"`, `"count":1`, `"kind":"group"`)
	if ids := says("/console/dead-letters/ids?queue=q00&group=g&signature=bad+thing+%3Cn%3E"); !strings.Contains(ids, `"ids":["`) {
		t.Error(ids)
	}
	says("/console/dead-letters/ids?queue=q00&group=g&signature=x", `{"ids":[]}`)
	says("/console/system", `"read_only":false`)
	for _, target := range []string{"/console/queues?sort=x", "/console/queues?limit=x", "/console/queues?offset=-x", "/console/groups?search=" + strings.Repeat("x", 300), "/console/blocked?queue=%00"} {
		s.must(t, 400, "GET", target, "")
	}
	s.must(t, 404, "GET", "/console/queue?name=nope", "")
	s.must(t, 404, "GET", "/console/queue?name=orders&project=nope", "")

	s.must(t, 201, "POST", "/v1/projects", `{"name":"other"}`)
	secret := member(t, s.must(t, 201, "POST", "/v1/projects/other/keys", `{"name":"k","scopes":["read"]}`), "secret")
	s.must(t, 200, "PUT", "/v1/subscriptions/theirs?project=other", `{"stream":"theirs"}`)
	var err error
	if s.Auth, err = auth.New(auth.Options{RootKey: "root", Algorithm: "auto"}); err != nil {
		t.Fatal(err)
	}
	for target, want := range map[string]string{"/console/session": `"project":"other","consume":false,"admin":false`, "/console/queues": `"total":1`, "/console/groups": `"total":1`,
		"/console/blocked": `"total":0`, "/console/dead-letters": `"total":0`, "/console/overview": `"queues":1`} {
		r := httptest.NewRequest("GET", target, nil)
		r.Header.Set("Authorization", "Bearer "+secret)
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		if w.Code != 200 || !strings.Contains(w.Body.String(), want) || strings.Contains(w.Body.String(), "orders") {
			t.Errorf("%s with a key of another project: %d %s", target, w.Code, w.Body)
		}
	}
	for target, want := range map[string]int{"/console/system": 403, "/console/message?id=" + id: 404, "/console/queue?name=orders": 404} {
		r := httptest.NewRequest("GET", target, nil)
		r.Header.Set("Authorization", "Bearer "+secret)
		w := httptest.NewRecorder()
		if s.ServeHTTP(w, r); w.Code != want {
			t.Errorf("%s with a key of another project: %d, want %d", target, w.Code, want)
		}
	}
}
