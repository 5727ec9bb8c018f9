package main

import (
	"context"
	"net/url"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"ferrymq/dbtest"
)

// What a role needs to run a broker whose schema somebody else has made and owns.
const grants = `
grant usage on schema ferrymq to app;
grant select, insert, update, delete on all tables in schema ferrymq to app`

// TestOddDatabase is a broker with no more rights than it needs, in a database whose name has to be quoted, where whatever the
// role and the database may set is set against it.
func TestOddDatabase(t *testing.T) {
	t.Parallel()
	s := dbtest.Durable(t)
	admin := dbtest.Pool(t, s.DSN, 1)
	const name = `My "odd" d'b \ ü`
	quoted := pgx.Identifier{name}.Sanitize()
	run := func(sql string) {
		t.Helper()
		if _, err := admin.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	run("create database " + quoted)
	run("create role app login")
	host := admin.Config().ConnConfig.Host
	at := func(user string) string {
		return (&url.URL{Scheme: "postgres", User: url.User(user), Path: "/" + name, RawQuery: url.Values{"host": {host}}.Encode()}).String()
	}
	if said := spawn(t, "DATABASE_URL="+at("app")).fails(t); !strings.Contains(said, "permission denied for database") {
		t.Errorf("without rights: said %q", said)
	}
	owner := spawn(t, "DATABASE_URL="+at("postgres"))
	owner.ready(t)
	if said := spawn(t, "DATABASE_URL="+at("app")).fails(t); !strings.Contains(said, "permission denied for schema ferrymq") {
		t.Errorf("without rights to the schema: said %q", said)
	}
	conn, err := pgx.Connect(t.Context(), at("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(t.Context(), grants); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), "revoke all on schema public from public; revoke temporary on database "+quoted+" from public"); err != nil {
		t.Fatal(err)
	}
	for _, setting := range []string{"default_transaction_isolation = 'serializable'", "search_path = ''", "timezone = 'Asia/Kolkata'", "datestyle = 'SQL, DMY'",
		"intervalstyle = 'postgres_verbose'", "bytea_output = 'escape'", "standard_conforming_strings = off", "lock_timeout = '100ms'", "statement_timeout = '100ms'"} {
		run("alter database " + quoted + " set " + setting)
		run("alter role app set " + setting)
	}
	for _, isolation := range []string{"serializable", "repeatable read"} {
		run("alter role app set default_transaction_isolation = '" + isolation + "'")
		p := spawn(t, "DATABASE_URL="+at("app"), "TZ=America/New_York")
		u := p.ready(t)
		p.must(t, 201, "POST", u+"/api/v1/push", `{"items":[{"queue":"q","transactionId":"`+isolation+`","payload":1}]}`)
		if got := p.must(t, 200, "GET", u+"/api/v1/pop/queue/q?autoAck=true", ""); !strings.Contains(got, `"transactionId":"`+isolation+`"`) || !strings.Contains(got, `Z","partitionId"`) {
			t.Error(got)
		}
		p.must(t, 200, "POST", u+"/api/v1/configure", `{"queue":"q","options":{"leaseTime":9}}`)
		p.must(t, 200, "PUT", u+"/v1/subscriptions/mail", `{"stream":"letters"}`)
		p.must(t, 200, "POST", u+"/v1/streams/letters/messages", `{"messages":[{"key":"`+isolation+`","payload":1}]}`)
		if got := p.must(t, 200, "POST", u+"/v1/subscriptions/mail/receive", `{}`); !strings.Contains(got, `"payload":1`) {
			t.Error(got)
		}
		p.must(t, 200, "GET", u+"/api/v1/status", "")
		p.must(t, 200, "DELETE", u+"/api/v1/resources/queues/q", "")
		p.signal(t, os.Interrupt)
		p.exits(t, patience)
		if said := p.String(); strings.Contains(said, "level=ERROR") || strings.Contains(said, "level=WARN") {
			t.Errorf("%s: it said\n%s", isolation, said)
		}
	}
	owner.signal(t, os.Interrupt)
	owner.exits(t, patience)
}
