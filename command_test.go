package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"ferrymq/dbtest"
	"ferrymq/schema"
)

// prompt runs command lines of the real program.
type prompt struct {
	t   *testing.T
	env []string
}

// run runs one and returns its exit code and what it prints.
func (s prompt) run(stdin string, args ...string) (code int, out, errs string) {
	s.t.Helper()
	cmd := s.command(args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	timer := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		s.t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()
}

func (s prompt) command(args ...string) *exec.Cmd {
	s.t.Helper()
	exe, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	cmd := exec.Command(exe, args...)
	cmd.Env = append([]string{asBroker + "=1", "PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "GOCOVERDIR=" + os.Getenv("GOCOVERDIR")}, s.env...)
	return cmd
}

// want runs one that must end with this code and print, on either channel, what these patterns match.
func (s prompt) want(code int, stdin string, patterns []string, args ...string) (out string) {
	s.t.Helper()
	got, out, errs := s.run(stdin, args...)
	if got != code {
		s.t.Errorf("ferrymq %q: exit code %d, want %d\n%s%s", args, got, code, out, errs)
	}
	for _, p := range patterns {
		if !regexp.MustCompile(p).MatchString(out + errs) {
			s.t.Errorf("ferrymq %q does not print %q:\n%s%s", args, p, out, errs)
		}
	}
	return out
}

// A command line that is wrong is refused, says what was meant, and never starts a broker. Help comes for everything, on stdout.
func TestCommandLine(t *testing.T) {
	t.Parallel()
	s := prompt{t, []string{"PORT=99999"}} // serving would fail by it
	for _, x := range []struct {
		code    int
		pattern string
		args    []string
	}{
		{2, `there is no command "srve": did you mean serve\?`, []string{"srve"}},
		{2, `there is no command "pushh": did you mean push\?`, []string{"pushh", "x"}},
		{2, `there is no command "migrations": did you mean migrate\?`, []string{"migrations"}},
		{2, `there is no command "xyzzy"\n`, []string{"xyzzy"}},
		{2, `there is no command "-port"\n`, []string{"-port", "1"}},
		{2, `there is no command "verzion": did you mean version\?`, []string{"help", "verzion"}},
		{2, `STREAM is missing`, []string{"push"}},
		{2, `SUBSCRIPTION is missing`, []string{"dlq", "list"}},
		{2, `"b" is more than it takes`, []string{"pop", "a", "b"}},
		{2, `"x" is more than it takes`, []string{"serve", "x"}},
		{2, `flag provided but not defined: -bogus`, []string{"pop", "a", "-bogus"}},
		{2, `invalid value "x" for flag -n`, []string{"pop", "a", "-n", "x"}},
		{2, `there is no migrate "upp": did you mean up\?`, []string{"migrate", "upp"}},
		{2, `there is no dlq "lsit": did you mean list\?`, []string{"dlq", "lsit", "s"}},
		{2, `say which: ids, or -signature, or -all`, []string{"dlq", "delete", "s"}},
		{2, `no address of a broker`, []string{"pop", "a", "-url", "localhost:1"}},
		{1, `PORT: must be 0..65535`, []string{"serve"}},
		{1, `PORT: must be 0..65535`, nil},
		{0, fmt.Sprintf(`^ferrymq \d\S+, schema %d\n$`, schema.Known()), []string{"version"}},
		{0, `^ferrymq \d`, []string{"--version"}},
		{0, `(?s)^FerryMQ.*serve .*migrate .*check .*push .*pop .*ack .*tail .*lag .*dlq .*version .*Exit codes: 0`, []string{"help"}},
	} {
		s.want(x.code, "", []string{x.pattern}, x.args...)
	}
	for _, help := range []string{"-h", "--help"} {
		if _, out, _ := s.run("", help); !strings.HasPrefix(out, "FerryMQ") {
			t.Errorf("%s prints %q", help, out)
		}
	}
	for _, c := range commands() {
		code, out, errs := s.run("", "help", c.name)
		if _, same, _ := s.run("", c.name, "-h"); code != 0 || errs != "" || same != out || !strings.Contains(out, "Usage: ferrymq "+c.name) || c.name != "version" && !strings.Contains(out, "Examples:\n  ") {
			t.Errorf("help of %s: %d %s%s", c.name, code, out, errs)
		}
		for line := range strings.Lines(out) {
			if len(line) > 161 {
				t.Errorf("help of %s has a line of %d letters: %s", c.name, len(line), line)
			}
		}
	}
}

// Publishing, consuming, settling, dead letters, lag and following, as a person would do it.
func TestClientCommands(t *testing.T) {
	t.Parallel()
	p := spawn(t, "DATABASE_URL="+dbtest.New(t))
	s := prompt{t, []string{"FERRYMQ_URL=" + p.ready(t)}}

	s.want(3, "", nil, "pop", "mail", "-stream", "letters")
	s.want(0, "", []string{`2 published, 0 of them`}, "push", "letters", `{"to": "ada", "n": 1.50}`, `"two"`, "-message-key", "k")
	s.want(0, "{\"c\": \"x\", \"n\": 7}\n\n{\"c\": \"y\", \"n\": 8}\n", []string{`2 published, 0 of them`, `(?m)^msg_`}, "push", "letters", "-key-field", "c", "-id-field", "n", "-ids")
	s.want(0, "{\"c\": \"x\", \"n\": 7}\n", []string{`1 published, 1 of them were there already`}, "push", "letters", "-key-field", "c", "-id-field", "n")
	s.want(1, "{\"c\": \"x\"}\nnot json\n", []string{`message 2: it is not JSON \(-raw sends lines as texts\); the 0 before are published`}, "push", "letters", "-message-key", "k")
	s.want(1, "{}\n", []string{`message 1: there is no field "c"`}, "push", "letters", "-key-field", "c")
	s.want(0, "not json \"\n", []string{`1 published`}, "push", "letters", "-raw", "-message-key", "k")
	s.want(0, "", []string{`0 published`}, "push", "letters")

	out := s.want(0, "", nil, "pop", "mail", "-n", "10", "-raw")
	if got, want := inAnyOrder(out), inAnyOrder("{\"to\": \"ada\", \"n\": 1.50}\n\"two\"\n\"not json \\\"\"\n{\"c\": \"x\", \"n\": 7}\n{\"c\": \"y\", \"n\": 8}\n"); got != want {
		t.Errorf("popped\n%s\nwant\n%s", got, want)
	}
	s.want(3, "", nil, "pop", "mail")

	// A message that comes while it is waited for.
	cmd := s.command("pop", "mail", "-wait", "30s")
	var waited bytes.Buffer
	cmd.Stdout = &waited
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s.want(0, "", nil, "push", "letters", `"late"`)
	if err := cmd.Wait(); err != nil || !strings.Contains(waited.String(), `"payload":"late"`) {
		t.Errorf("%v: %s", err, &waited)
	}

	// Kept, given back, failed, extended, acked.
	s.want(0, "", nil, "push", "letters", `1`, "-message-key", "z")
	kept := s.want(0, "", []string{`"attempt":1,`}, "pop", "mail", "-keep")
	s.want(0, kept, nil, "ack", "mail", "-release")
	kept = s.want(0, "", []string{`"attempt":1,`}, "pop", "mail", "-keep")
	s.want(0, kept, nil, "ack", "mail", "-extend", "1m")
	s.want(0, kept, nil, "ack", "mail", "-nack", "not now", "-retry-after", "0s")
	kept = s.want(0, "", []string{`"attempt":2,`}, "pop", "mail", "-keep")
	var delivery struct {
		ID string `json:"delivery_id"`
	}
	if err := json.Unmarshal([]byte(kept), &delivery); err != nil {
		t.Fatal(err)
	}
	s.want(0, "", nil, "ack", "mail", delivery.ID)
	s.want(1, "", []string{`^dlv_\S+: already settled\ndlv_bad: unknown delivery id\n$`}, "ack", "mail", delivery.ID, "dlv_bad")
	s.want(1, "", []string{`no subscription named none in project default`}, "pop", "none")

	// Dead letters.
	p.must(t, 200, "PUT", p.url(t)+"/v1/subscriptions/mail", `{"retry":{"max_attempts":1}}`)
	s.want(3, "", nil, "dlq", "list", "mail")
	for i := range 3 {
		s.want(0, "", nil, "push", "letters", fmt.Sprint(i), "-message-key", "dead")
		s.want(0, s.want(0, "", nil, "pop", "mail", "-keep"), nil, "ack", "mail", "-nack", []string{"full of 1", "full of 2", "gone"}[i])
	}
	s.want(0, "", []string{`"count":2`, `"count":1`}, "dlq", "list", "mail", "-signatures")
	s.want(0, "", []string{`^\{"id":"dl_[^\n]*"gone"[^\n]*\n$`}, "dlq", "list", "mail", "-n", "1")
	var example struct{ Signature string }
	first, _, _ := strings.Cut(s.want(0, "", nil, "dlq", "list", "mail", "-signatures"), "\n")
	if err := json.Unmarshal([]byte(first), &example); err != nil {
		t.Fatal(err)
	}
	s.want(1, "3\n", []string{`redrive 2 dead letters of mail\? Type 2 to go on: ferrymq: nothing was done`}, "dlq", "redrive", "mail", "-signature", example.Signature)
	s.want(1, "", []string{`nothing was done`}, "dlq", "delete", "mail", "-all")
	s.want(0, "2\n", []string{`2 redriven`}, "dlq", "redrive", "mail", "-signature", example.Signature)
	if out := s.want(0, "", nil, "pop", "mail", "-n", "5", "-raw"); out != "0\n1\n" {
		t.Errorf("redriven messages come as %q, want them in their order", out)
	}
	s.want(1, "", []string{`dl_0: `, `0 deleted`}, "dlq", "delete", "mail", "dl_0", "-yes")
	s.want(0, "", []string{`1 deleted`}, "dlq", "delete", "mail", "-all", "-yes")
	s.want(3, "", nil, "dlq", "delete", "mail", "-all", "-yes")

	// Following.
	all := s.want(0, "", nil, "tail", "letters", "-since", "1h", "-once", "-raw")
	if got := strings.Fields(all); len(got) < 9 || got[len(got)-1] != "1" || !strings.HasPrefix(all, `{"to": "ada", "n": 1.50}`+"\n\"two\"\n") {
		t.Errorf("tail of the last hour: %s", all)
	}
	tail := s.command("tail", "letters")
	follow := launch(t, tail)
	for end := time.Now().Add(patience); !strings.Contains(follow.String(), "follow me"); { // it begins when it has looked once
		s.want(0, "", nil, "push", "letters", `"follow me"`)
		if time.Now().After(end) {
			t.Fatalf("tail prints %s", follow)
		}
	}
	s.want(0, "", nil, "push", "letters", `"the last"`)
	follow.await(t, `the last`)
	if strings.Contains(follow.String(), `"two"`) || strings.Count(follow.String(), "the last") != 1 {
		t.Errorf("tail prints\n%s", follow)
	}

	// How far behind.
	s.want(0, "", nil, "pop", "mail", "-n", "100000")
	s.want(0, "", nil, "push", "letters", `1`)
	p.must(t, 204, "GET", p.url(t)+"/api/v1/pop/queue/letters?consumerGroup=audit&subscriptionMode=new", "")
	s.want(0, "", []string{`^KIND +NAME +STREAM +BACKLOG +OLDEST`, `(?m)^subscription +mail +letters +1 +\d+s +0 +0 +0$`, `(?m)^group +audit +letters +0 +- +-`}, "lag")
	s.want(0, "", []string{`(?m)^\{"kind":"subscription","name":"mail","stream":"letters","backlog":1,"in_flight":0,`}, "lag", "-json")

	// Many at once, with progress.
	var many strings.Builder
	for i := range 5000 {
		fmt.Fprintf(&many, "{\"n\": %d}\n", i)
	}
	s.want(0, many.String(), []string{`5000 published, 0 of them`}, "push", "many", "-id-field", "n")
}

// Behind a pipe that stays open, what has been read is published at once. Ctrl-C ends it.
func TestPushStreams(t *testing.T) {
	t.Parallel()
	p := spawn(t, "DATABASE_URL="+dbtest.New(t))
	s := prompt{t, []string{"FERRYMQ_URL=" + p.ready(t)}}
	s.want(3, "", nil, "pop", "mail", "-stream", "letters")
	cmd := s.command("push", "letters")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(in, `"at once"`)
	s.want(0, "", []string{`"at once"`}, "pop", "mail", "-wait", "30s")
	_ = cmd.Process.Signal(os.Interrupt)
	if err := cmd.Wait(); err == nil {
		t.Error("interrupted, and it says that all is well")
	}
}

// Without an answer and without rights, commands fail and say what to do.
func TestClientCommandsRefused(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	prompt{t, nil}.want(1, "", []string{`gave up after \d+ attempts: dial tcp .*refused`}, "lag", "-url", "http://"+l.Addr().String())

	p := spawn(t, "DATABASE_URL="+dbtest.New(t), "AUTH_REQUIRED=true", "ROOT_API_KEY=long-root-key", "BIND_ADDR=127.0.0.1")
	url := "FERRYMQ_URL=" + p.ready(t)
	prompt{t, []string{url}}.want(1, "", []string{`401 Authentication required; the 0 before are published\nFERRYMQ_KEY is`}, "push", "letters", "1")
	root := prompt{t, []string{url, "FERRYMQ_KEY=long-root-key"}}
	root.want(0, "", nil, "push", "letters", "1")
	root.want(0, "", nil, "lag")
	root.want(0, "", []string{`1`}, "tail", "letters", "-since", "1h", "-once", "-raw")
	root.want(1, "", []string{`no .*nowhere`}, "pop", "x", "-project", "nowhere")
}

// The schema from nothing to the newest and back.
func TestMigrateCommand(t *testing.T) {
	t.Parallel()
	dsn := dbtest.Empty(t)
	s := prompt{t, []string{"DATABASE_URL=" + dsn}}
	known := schema.Known()
	newest := fmt.Sprintf(`^schema %d\n`, known)
	s.want(0, "", []string{`(?m)^pending  00001_init\.sql$`}, "migrate", "status")
	s.want(0, "", []string{newest, fmt.Sprintf(`schema 0, wanted %d`, known)}, "migrate", "up")
	s.want(0, "", []string{newest}, "migrate", "up")
	if out := s.want(0, "", []string{`(?m)^applied  00001_init\.sql$`}, "migrate", "status"); strings.Contains(out, "pending") {
		t.Error(out)
	}
	s.want(2, "", []string{fmt.Sprintf(`from version %d to %d and drops what the newer tables hold: say -yes`, known, known-1)}, "migrate", "down")
	s.want(2, "", []string{`already`}, "migrate", "down", "-to", fmt.Sprint(known), "-yes")
	s.want(0, "", []string{fmt.Sprintf(`^schema %d\n`, known-1)}, "migrate", "down", "-yes")
	s.want(0, "", []string{fmt.Sprintf(`(?m)^pending  %05d_`, known)}, "migrate", "status")
	s.want(0, "", []string{`^schema 0\n`}, "migrate", "down", "-to", "0", "-yes")
	s.want(0, "", []string{newest}, "migrate", "up")
	if _, err := dbtest.Pool(t, dsn, 1).Exec(t.Context(), "insert into "+schema.Table+" (version_id, is_applied) values (99999, true)"); err != nil {
		t.Fatal(err)
	}
	for _, what := range []string{"up", "status", "down"} {
		s.want(1, "", []string{`schema version 99999, this binary knows up to`}, "migrate", what)
	}
	prompt{t, nil}.want(1, "", []string{`no database is set: DATABASE_URL names it`}, "migrate", "up")
	prompt{t, []string{"DATABASE_URL=postgres://user:secret@127.0.0.1:1/x?connect_timeout=2"}}.want(1, "", []string{`refused`}, "migrate", "status")
}

// Each thing that can be wrong is found, and a database that is as it should be passes.
func TestCheckCommand(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	pool := dbtest.Pool(t, dsn, 1)
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(context.WithoutCancel(t.Context()), sql); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
	other := dbtest.Empty(t) // not of the template that has made the first one
	if err := schema.Migrate(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	name := quoteName(config.Database)
	check := func(code int, patterns []string, env ...string) string {
		t.Helper()
		return prompt{t, append([]string{"DATABASE_URL=" + dsn}, env...)}.want(code, "", patterns, "check")
	}
	// The tests' server does not sync; nothing else is wrong with it.
	out := check(1, []string{`FAIL  durability   fsync is off`, `fix: set fsync = on`, `ok    settings `, `ok    database     PostgreSQL 1\d`, `ok    schema `, `ok    permissions`, `ok    tables `,
		`ok    clock `, `ok    connections  a broker opens 18; of`, `(?:ok|WARN)  +pooler `, `ok    brokers      0 run`})
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "WARN") && !strings.Contains(line, "pooler") || strings.HasPrefix(line, "FAIL") && !strings.Contains(line, "durability") {
			t.Errorf("of a fresh database it says %s", line)
		}
	}
	for _, x := range []struct {
		do, undo string
		pattern  string
		env      []string
	}{
		{pattern: `WARN  settings     no authentication, and it would listen on 0\.0\.0\.0`, env: []string{"BIND_ADDR=0.0.0.0"}},
		{pattern: `WARN  settings     a key for authentication is set, but authentication is off`, env: []string{"ROOT_API_KEY=x"}},
		{pattern: `WARN  settings     DB_POLO_SIZE is no setting, but like DB_POOL_SIZE`, env: []string{"DB_POLO_SIZE=3"}},
		{pattern: `FAIL  settings     PORT: must be 0\.\.65535`, env: []string{"PORT=70000"}},
		{pattern: `FAIL  connections  a broker opens 1002, and max_connections leaves`, env: []string{"DB_POOL_SIZE=1000"}},
		{pattern: `ok    direct       DATABASE_DIRECT_URL leads to the same database`, env: []string{"DATABASE_DIRECT_URL=" + dsn}},
		{pattern: `FAIL  direct       DATABASE_DIRECT_URL: DATABASE_DIRECT_URL and DATABASE_URL lead to different databases`, env: []string{"DATABASE_DIRECT_URL=" + other}},
		{do: "alter database " + name + " set synchronous_commit = off", undo: "alter database " + name + " reset synchronous_commit", pattern: `FAIL  durability   synchronous_commit is off`},
		{do: "alter database " + name + " set default_transaction_read_only = on", undo: "alter database " + name + " reset default_transaction_read_only", pattern: `FAIL  database     it takes no writes`},
		{do: "alter database " + name + " connection limit 12", undo: "alter database " + name + " connection limit -1", pattern: `FAIL  connections  a broker opens 18, and the database's connection limit leaves 12`},
		{do: "alter table ferrymq.cursors reset (fillfactor)", undo: "alter table ferrymq.cursors set (fillfactor = 50)", pattern: `(?s)WARN  tables       cursors has lost .*fix: alter table ferrymq\.cursors set \(fillfactor = 50\)`},
		{do: "insert into " + schema.Table + " (version_id, is_applied) values (99999, true)", undo: "delete from " + schema.Table + " where version_id = 99999", pattern: `FAIL  schema       version 99999, this binary knows up to`},
	} {
		if x.do != "" {
			exec(x.do)
		}
		if code, out, errs := (prompt{t, append([]string{"DATABASE_URL=" + dsn}, x.env...)}).run("", "check"); code != 1 || !regexp.MustCompile(x.pattern).MatchString(out) {
			t.Errorf("after %q with %q: %d, want %q\n%s%s", x.do, x.env, code, x.pattern, out, errs)
		}
		if x.undo != "" {
			exec(x.undo)
		}
	}

	// A role that owns nothing, step by step.
	role := quoteName("check_" + config.Database)
	exec("create role " + role + " login")
	t.Cleanup(func() {
		exec("drop owned by " + role)
		exec("drop role " + role)
	})
	dsn = strings.Replace(dsn, config.User, "check_"+config.Database, 1)
	out = check(1, []string{`(?s)FAIL  permissions  the role may not use the schema ferrymq.*fix: grant usage on schema ferrymq to "check_`})
	fix := regexp.MustCompile(`fix: (grant usage .*)`).FindStringSubmatch(out)
	exec("grant usage on schema ferrymq to " + role)
	check(1, []string{`FAIL  schema       .*schema_version`, `FAIL  permissions  the role may not read and write all of: .*cursors`})
	exec(fix[1])
	check(1, []string{`ok    permissions`, `ok    schema `})

	empty := dbtest.Empty(t)
	prompt{t, []string{"DATABASE_URL=" + empty}}.want(1, "", []string{`ok    schema       version 0; a broker would migrate to`}, "check")
	prompt{t, []string{"DATABASE_URL=" + empty, "AUTO_MIGRATE=false"}}.want(1, "", []string{`(?s)FAIL  schema       version 0, needed is \d+, and AUTO_MIGRATE is false: a broker would wait\n +fix: ferrymq migrate up`}, "check")
	prompt{t, []string{"DATABASE_URL=postgres://user:secret@127.0.0.1:1/x?connect_timeout=2"}}.want(1, "", []string{`FAIL  database     .*refused`, `fix: see that`}, "check")
	prompt{t, []string{"DATABASE_URL=postgres://user:secret@[/x"}}.want(1, "", []string{`cannot be parsed`}, "check")
	prompt{t, []string{"PGBIN=" + os.Getenv("PGBIN")}}.want(0, "", []string{`ok    database     none is set: a private one would be started in ./data`}, "check")
	prompt{t, []string{"PGBIN=" + os.Getenv("PGBIN"), "BIND_ADDR=0.0.0.0"}}.want(1, "", []string{`WARN`}, "check", "-strict")
}

func TestSuggestion(t *testing.T) {
	t.Parallel()
	for _, x := range []struct {
		a, b string
		n    int
	}{{"", "", 0}, {"a", "", 1}, {"push", "push", 0}, {"psuh", "push", 1}, {"puhs", "push", 1}, {"pusch", "push", 1}, {"pop", "push", 3}} {
		if n := distance(x.a, x.b); n != x.n || distance(x.b, x.a) != n {
			t.Errorf("distance %q %q is %d, want %d", x.a, x.b, n, x.n)
		}
	}
	names := make([]string, 0, 16)
	for _, c := range commands() {
		names = append(names, c.name)
	}
	if slices.Contains(names, "") || suggestion("mig", names) != ": did you mean migrate?" {
		t.Error(names, suggestion("mig", names))
	}
}
