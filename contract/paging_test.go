package contract

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"ferrymq/dbtest"
)

// testPaging: every listing of /v1, read page by page while rows come and go, shows each row that stays exactly once, in one order,
// also when thousands are of one moment.
func testPaging(t *testing.T, bin string) {
	dsn := dbtest.New(t)
	b, err := start(bin, []string{"DATABASE_URL=" + dsn, "PORT=0"}, true)
	if err != nil {
		t.Fatal(err)
	}
	defer b.stop()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	sql := func(text string) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), text, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
	}
	send := func(method, path, body string) []byte {
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
		text, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode/100 != 2 {
			t.Fatalf("%s %s: %s %s %v", method, path, resp.Status, text, err)
		}
		return text
	}
	// read is all pages of a listing; between two of them something happens.
	read := func(path, list, field string, between func(page int, seen []string)) (seen []string) {
		t.Helper()
		cursor := ""
		for page := 0; ; page++ {
			var answer map[string]json.RawMessage
			var rows []map[string]any
			var next *string
			if err := json.Unmarshal(send("GET", path+cursor, ""), &answer); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(answer[list], &rows); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(answer["next_cursor"], &next); err != nil {
				t.Fatal(err)
			}
			for _, r := range rows {
				seen = append(seen, fmt.Sprint(r[field]))
			}
			if next == nil {
				return seen
			}
			if page > 1000 {
				t.Fatalf("%s has no end", path)
			}
			cursor = "&cursor=" + url.QueryEscape(*next)
			between(page, seen)
		}
	}
	once := func(what string, seen []string, n int) {
		t.Helper()
		if left := slices.Compact(slices.Sorted(slices.Values(seen))); len(left) != len(seen) {
			t.Errorf("%s: %d of %d came twice", what, len(seen)-len(left), len(seen))
		}
		if len(seen) != n {
			t.Errorf("%s: %d, want %d", what, len(seen), n)
		}
	}

	send("PUT", "/v1/subscriptions/sub", `{"stream":"s","retry":{"max_attempts":1}}`)
	send("POST", "/v1/streams/s/messages", `{"messages":[{"key":"dead","payload":1}]}`)
	var got struct {
		Messages []struct {
			ID string `json:"delivery_id"`
		}
	}
	if err := json.Unmarshal(send("POST", "/v1/subscriptions/sub/receive", ""), &got); err != nil || len(got.Messages) != 1 {
		t.Fatal(err, got)
	}
	send("POST", "/v1/subscriptions/sub/nack", `{"delivery_ids":["`+got.Messages[0].ID+`"],"error":"boom"}`)
	copies := func(n int, at string) string {
		return fmt.Sprintf(`insert into ferrymq.dead_letters select (jsonb_populate_record(null::ferrymq.dead_letters, to_jsonb(d) || jsonb_build_object('id', gen_random_uuid(), 'failed_at', %s))).*
			from (select * from ferrymq.dead_letters limit 1) d, generate_series(1, %d)`, at, n)
	}
	sql(copies(1499, "'2026-01-01T00:00:00Z'::timestamptz") + "; update ferrymq.dead_letters set failed_at = '2026-01-01T00:00:00Z'")
	redriven := 0
	seen := read("/v1/subscriptions/sub/dead-letters?limit=100", "dead_letters", "id", func(page int, seen []string) {
		switch page % 3 {
		case 0: // newer ones, and of the same moment, which may be seen or not
			sql(copies(50, "'2026-02-01T00:00:00Z'::timestamptz"))
		case 1: // of those that were seen
			ids, err := json.Marshal(seen[len(seen)-50:])
			if err != nil {
				t.Fatal(err)
			}
			send("POST", "/v1/subscriptions/sub/dead-letters/redrive", `{"ids":`+string(ids)+`}`)
			redriven += 50
		}
	})
	once("dead letters", seen, 1500)
	if redriven == 0 {
		t.Error("nothing was redriven meanwhile")
	}

	sql(`insert into ferrymq.queues (project_id, name, namespace, task) select 1, 'q' || i, 'q', '' from generate_series(1, 250) i;
		insert into ferrymq.groups (queue_id, kind, project_id, name, registered, start_mode, start_at, seeded) select q.id, 1, 1, q.name, true, 'all', to_timestamp(0), true from ferrymq.queues q where q.name ~ '^q\d'`)
	n := 251
	for _, list := range []string{"streams", "subscriptions"} {
		seen = read("/v1/"+list+"?limit=20", list, "name", func(page int, seen []string) {
			if page == 3 {
				send("DELETE", "/v1/"+list+"/"+seen[0], "") // was seen
			}
			if page == 5 {
				send("PUT", "/v1/"+list+"/0", `{"stream":"q1"}`) // comes before all
			}
		})
		once(list, seen, n)
		n-- // with the stream that was deleted its subscription went
		if !slices.IsSorted(seen) {
			t.Errorf("%s are not in order", list)
		}
	}

	var messages []string
	for i := range 500 {
		messages = append(messages, fmt.Sprintf(`{"key":"k%d","payload":1}`, i))
	}
	send("PUT", "/v1/subscriptions/lanes", `{"stream":"l"}`)
	send("POST", "/v1/streams/l/messages", `{"messages":[`+strings.Join(messages, ",")+`]}`)
	seen = read("/v1/subscriptions/lanes/lanes?limit=30", "lanes", "key", func(page int, seen []string) {
		send("POST", "/v1/subscriptions/lanes/receive", `{"max_messages":10}`) // other states, the same lanes
	})
	once("lanes", seen, 500)

	for _, path := range []string{"/v1/streams?", "/v1/subscriptions?", "/v1/subscriptions/sub/lanes?", "/v1/subscriptions/sub/dead-letters?", "/v1/subscriptions/sub/dead-letters/signatures?", "/v1/projects?"} {
		for query, status := range map[string]int{"limit=x": 400, "cursor=%21": 400, "limit=0": 200, "limit=-1": 200, "limit=1000000000": 200, "cursor=": 200} {
			resp, err := http.Get("http://" + b.addr + path + query)
			if err != nil {
				t.Fatal(err)
			}
			text, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != status || !json.Valid(text) {
				t.Errorf("GET %s%s: %s, want %d", path, query, resp.Status, status)
			}
		}
	}
}
