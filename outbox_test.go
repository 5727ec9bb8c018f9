package main

import (
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/dbtest"
)

// The SQL of docs/outbox.md is run as it stands; only the role has another name, since roles are of a whole server.
func TestOutboxDoc(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("docs/outbox.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllSubmatch(text, -1)
	if len(blocks) != 3 {
		t.Fatalf("%d blocks of SQL", len(blocks))
	}
	dsn := dbtest.New(t)
	p := spawn(t, "DATABASE_URL="+dsn)
	url := p.ready(t)
	pool := dbtest.Pool(t, dsn, 1)
	role := pgx.Identifier{"shop_" + uuid.NewString()}.Sanitize()
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	receive := func(want string) {
		t.Helper()
		r, err := http.Post(url+"/v1/subscriptions/mail/receive", "application/json", strings.NewReader(`{"wait_seconds":20}`))
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		var body strings.Builder
		if err := r.Write(&body); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(body.String(), want) {
			t.Errorf("received %s, want %s", body.String(), want)
		}
	}
	exec(`insert into ferrymq.queues (project_id, name, namespace, task) values (1, 'orders', 'orders', '')`)
	exec(`insert into ferrymq.groups (queue_id, kind, project_id, name, registered, start_mode, start_at)
		select q.id, 1, 1, 'mail', true, 'all', to_timestamp(0) from ferrymq.queues q where q.name = 'orders'`)
	exec(string(blocks[0][1]))
	receive(`"key":"customer-ada","payload":{"id":1,"customer":"ada","total":12.50},"headers":{}`)
	exec("create role " + role)
	defer exec("reset role; drop owned by " + role + "; drop role " + role)
	exec(strings.ReplaceAll(string(blocks[1][1]), "shop", role))
	exec("set role " + role)
	exec(string(blocks[2][1]))
	receive(`"key":null,"payload":"no order is promised without a key","headers":{"source": "shop"}`)
	var waiting string
	exec("reset role")
	if err := pool.QueryRow(t.Context(), "select key || ' ' || message_id || ' ' || payload from ferrymq.outbox where due_at > now() + interval '119 minutes'").Scan(&waiting); err != nil ||
		waiting != `customer-ada reminder-1 {"remind": true}` {
		t.Errorf("%q waits, %v", waiting, err)
	}
}
