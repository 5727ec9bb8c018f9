package main

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"debug/elf"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/jackc/pgx/v5"

	"ferrymq/dbtest"
	"ferrymq/localpg"
	"ferrymq/schema"
)

// asBroker makes this test binary the broker, so that tests kill and signal a real process of what they were
// built from, with the race detector if they have it.
const asBroker = "FERRYMQ_TEST_BROKER"

// patience bounds what should be quick, on a machine that is busy.
const patience = 60 * time.Second

func TestMain(m *testing.M) {
	if os.Getenv(asBroker) != "" {
		main()
		os.Exit(0)
	}
	if os.Getenv(asGoose) != "" {
		if err := gooseMain(); err != nil {
			fmt.Fprintln(os.Stderr, "goose:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	dbtest.Main(m)
}

// process is a broker.
type process struct {
	cmd    *exec.Cmd
	client *http.Client
	done   chan struct{}

	mu   sync.Mutex
	log  bytes.Buffer
	grew chan struct{}
}

// spawn runs a broker that has only these settings, on a free port unless they name one. It is ended with the test.
func spawn(t *testing.T, settings ...string) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append([]string{asBroker + "=1", "PORT=0"}, settings...)
	return launch(t, cmd)
}

func launch(t *testing.T, cmd *exec.Cmd) *process {
	t.Helper()
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "GOCOVERDIR", "GORACE", "PGBIN"} {
		if v := os.Getenv(name); v != "" {
			cmd.Env = append(cmd.Env, name+"="+v)
		}
	}
	p := &process{cmd: cmd, done: make(chan struct{}), grew: make(chan struct{}), client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}
	cmd.Stdout, cmd.Stderr = p, p
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.client.CloseIdleConnections()
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.done:
		case <-time.After(patience):
			_ = cmd.Process.Kill()
			<-p.done
		}
		if t.Failed() {
			t.Logf("broker %d said:\n%s", cmd.Process.Pid, p)
		}
	})
	return p
}

// Write takes what the process prints.
func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.grew)
	p.grew = make(chan struct{})
	return p.log.Write(b)
}

func (p *process) String() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

// await returns the first group of the pattern, or all of it, once it has been printed.
func (p *process) await(t *testing.T, pattern string) string {
	t.Helper()
	re := regexp.MustCompile(pattern)
	timeout := time.After(patience)
	ended := p.done
	for {
		p.mu.Lock()
		m, grew := re.FindStringSubmatch(p.log.String()), p.grew
		p.mu.Unlock()
		if m != nil {
			return m[len(m)-1]
		}
		select {
		case <-grew:
		case <-ended:
			if ended == nil {
				continue
			}
			ended = nil // look once more: the last lines may have come in between
			if !re.MatchString(p.String()) {
				t.Fatalf("the broker ended (%v) without printing %q", p.cmd.ProcessState, pattern)
			}
		case <-timeout:
			t.Fatalf("the broker did not print %q", pattern)
		}
	}
}

func (p *process) url(t *testing.T) string { return p.await(t, `listening on (http://[^" ]+)`) }

// ready returns the address of a broker that serves.
func (p *process) ready(t *testing.T) string {
	t.Helper()
	p.await(t, `msg=ready`)
	return p.url(t)
}

// exits waits for the end of the process, which must come within a time, and returns its code.
func (p *process) exits(t *testing.T, within time.Duration) int {
	t.Helper()
	select {
	case <-p.done:
	case <-time.After(within):
		t.Fatalf("the broker still runs after %v", within)
	}
	return p.cmd.ProcessState.ExitCode()
}

// fails waits for an end with code 1 and returns what was printed.
func (p *process) fails(t *testing.T) string {
	t.Helper()
	if code := p.exits(t, patience); code != 1 {
		t.Fatalf("exit code %d, want 1", code)
	}
	return p.String()
}

func (p *process) signal(t *testing.T, s os.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// call makes a request. Its error means that there was no whole answer.
func (p *process) call(method, url, body string) (int, []byte, error) {
	r, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	resp, err := p.client.Do(r)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, text, err
}

// must makes a request that has to be answered with this status.
func (p *process) must(t *testing.T, status int, method, url, body string) string {
	t.Helper()
	got, text, err := p.call(method, url, body)
	if err != nil || got != status {
		t.Fatalf("%s %s: %d %s (%v), want %d", method, url, got, text, err, status)
	}
	return string(text)
}

type popped struct {
	Messages []struct {
		TransactionID string `json:"transactionId"`
		PartitionID   string `json:"partitionId"`
		LeaseID       string `json:"leaseId"`
	} `json:"messages"`
}

func (m popped) ack() string {
	type item struct {
		TransactionID string `json:"transactionId"`
		PartitionID   string `json:"partitionId"`
		LeaseID       string `json:"leaseId"`
		Status        string `json:"status"`
	}
	items := make([]item, len(m.Messages))
	for i, x := range m.Messages {
		items[i] = item{x.TransactionID, x.PartitionID, x.LeaseID, "completed"}
	}
	b, _ := json.Marshal(map[string]any{"acknowledgments": items})
	return string(b)
}

type acked []struct {
	TransactionID string `json:"transactionId"`
	Success       bool   `json:"success"`
}

// alive says whether a process exists and is no zombie.
func alive(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return !errors.Is(err, os.ErrNotExist) || runtime.GOOS != "linux"
	}
	_, rest, _ := bytes.Cut(stat, []byte(") "))
	return !bytes.HasPrefix(rest, []byte("Z"))
}

func awaitGone(t *testing.T, pid int) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); alive(pid); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("process %d, the private PostgreSQL, outlived its broker", pid)
		}
	}
}

// postmaster is the process id of a private PostgreSQL that runs.
func postmaster(t *testing.T, dir string) int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "pg", "postmaster.pid"))
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := strings.Cut(string(b), "\n")
	pid, err := strconv.Atoi(first)
	if err != nil || !alive(pid) {
		t.Fatalf("no PostgreSQL with process id %q: %v", first, err)
	}
	return pid
}

func TestFromNothing(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(dbtest.DataDir(t), "made", "by the broker")
	p := spawn(t, "DATA_DIR="+dir)
	url := p.ready(t)
	p.await(t, `started a private PostgreSQL \(set DATABASE_URL to use your own\)`)
	p.await(t, `msg=migrating from=0 to=`)

	// What it prints to be tried.
	tried := regexp.MustCompile(`(?m)^  (curl .*)$`).FindAllStringSubmatch(p.await(t, `(?s)Try it:\n(.*\n)\n`), -1)
	if len(tried) != 2 {
		t.Fatalf("not two lines to try: %q", tried)
	}
	if _, err := exec.LookPath("curl"); err == nil {
		for i, want := range []string{`"status":"queued"`, `"data":{"n":1}`} {
			out, err := exec.Command("sh", "-c", tried[i][1]).CombinedOutput()
			if err != nil || !strings.Contains(string(out), want) {
				t.Errorf("%s: %s (%v), want %s", tried[i][1], out, err, want)
			}
		}
	}

	p.must(t, 201, "POST", url+"/api/v1/push", `{"items":[{"queue":"q","transactionId":"a","payload":1.0},{"queue":"q","transactionId":"b","payload":2e400}]}`)
	var got popped
	if err := json.Unmarshal([]byte(p.must(t, 200, "GET", url+"/api/v1/pop/queue/q?batch=1", "")), &got); err != nil {
		t.Fatal(err)
	}
	if s := p.must(t, 200, "POST", url+"/api/v1/ack/batch", got.ack()); !strings.Contains(s, `"success":true`) {
		t.Fatal(s)
	}
	pg := postmaster(t, dir)
	p.signal(t, os.Interrupt)
	if code := p.exits(t, 10*time.Second); code != 0 {
		t.Errorf("exit code %d after SIGINT", code)
	}
	if alive(pg) {
		t.Error("PostgreSQL runs after its broker has ended")
	}

	p = spawn(t, "DATA_DIR="+dir)
	url = p.ready(t)
	if strings.Contains(p.String(), "migrating") {
		t.Error("it migrates again")
	}
	if s := p.must(t, 200, "GET", url+"/api/v1/pop/queue/q?autoAck=true", ""); !strings.Contains(s, `"data":2e400,`) || strings.Contains(s, `"data":1.0,`) {
		t.Errorf("after the restart: %s", s)
	}
	p.must(t, 204, "GET", url+"/api/v1/pop/queue/q", "")
}

func TestSecondSignal(t *testing.T) {
	t.Parallel()
	dir := dbtest.DataDir(t)
	p := spawn(t, "DATA_DIR="+dir)
	p.ready(t)
	pg := postmaster(t, dir)
	p.signal(t, syscall.SIGTERM)
	p.await(t, `msg=draining`)
	p.signal(t, os.Interrupt)
	// While it drains the first second is for load balancers to notice: it cannot have ended in order.
	if code := p.exits(t, 10*time.Second); code != 1 || strings.Contains(p.String(), "msg=stopped") {
		t.Errorf("exit code %d", code)
	}
	p.await(t, `second signal, exiting at once`)
	awaitGone(t, pg)
}

// A broker that ends under load, in order or killed, loses nothing it has answered for.
func TestEndUnderLoad(t *testing.T) {
	for name, sig := range map[string]syscall.Signal{"interrupted": syscall.SIGINT, "killed": syscall.SIGKILL} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := dbtest.DataDir(t)
			p := spawn(t, "DATA_DIR="+dir)
			l := load{p: p, url: p.ready(t), enough: make(chan struct{})}
			pg := postmaster(t, dir)
			var clients sync.WaitGroup
			for i := range 8 {
				clients.Go(func() { l.produce(i) })
			}
			for range 4 {
				clients.Go(l.consume)
			}
			select {
			case <-l.enough:
			case <-time.After(patience):
				t.Error("no load")
			}
			p.signal(t, sig)
			if code := p.exits(t, 10*time.Second); sig == syscall.SIGINT && code != 0 {
				t.Errorf("exit code %d", code)
			}
			clients.Wait()

			p = spawn(t, "DATA_DIR="+dir) // at once: it has to cope with what is still ending
			url := p.ready(t)
			if now := postmaster(t, dir); now == pg || alive(pg) {
				t.Errorf("PostgreSQL %d was left behind", pg)
			}
			after := make(map[string]bool)
			for {
				status, text, err := p.call("GET", url+"/api/v1/pop/queue/q?batch=1000&partitions=100&wait=true&timeout=3000", "")
				if err != nil || status != 200 && status != 204 {
					t.Fatalf("pop: %d %s (%v)", status, text, err)
				}
				if status == 204 {
					break
				}
				var got popped
				if err := json.Unmarshal(text, &got); err != nil {
					t.Fatal(err)
				}
				for _, m := range got.Messages {
					after[m.TransactionID] = true
				}
				p.must(t, 200, "POST", url+"/api/v1/ack/batch", got.ack())
			}
			pushed, done := 0, 0
			l.sent.Range(func(id, _ any) bool {
				pushed++
				_, acked := l.acked.Load(id)
				_, perhaps := l.perhaps.Load(id)
				if !acked && !perhaps && !after[id.(string)] {
					t.Errorf("%v was answered 201 and is lost", id)
				}
				return !t.Failed()
			})
			l.acked.Range(func(id, _ any) bool {
				done++
				if after[id.(string)] {
					t.Errorf("%v was acked and came again", id)
				}
				return !t.Failed()
			})
			t.Logf("%d pushed, %d acked, then %d delivered", pushed, done, len(after))
			if pushed == 0 || done == 0 || len(after) == 0 {
				t.Error("the end came at a moment that proves nothing")
			}
		})
	}
}

// load is producers and consumers that go on until the broker does not answer any more.
type load struct {
	p                    *process
	url                  string
	sent, acked, perhaps sync.Map // ids: answered 201, acked with success, acked without an answer
	acks                 atomic.Int64
	enough               chan struct{} // closed when there has been some load
}

func (l *load) produce(i int) {
	for n := 0; ; n++ {
		id := fmt.Sprintf("%d-%d", i, n)
		body := fmt.Sprintf(`{"items":[{"queue":"q","partition":"p%d","transactionId":%q,"payload":%d}]}`, i%4, id, n)
		status, _, err := l.p.call("POST", l.url+"/api/v1/push", body)
		if err != nil || status != 201 {
			return
		}
		l.sent.Store(id, true)
	}
}

func (l *load) consume() {
	for {
		status, text, err := l.p.call("GET", l.url+"/api/v1/pop/queue/q?batch=3&wait=true&timeout=1000&leaseSeconds=2", "")
		if err != nil || status != 200 && status != 204 {
			return
		}
		if status == 204 {
			select {
			case <-l.p.done:
				return
			default:
				continue
			}
		}
		var got popped
		if json.Unmarshal(text, &got) != nil {
			return
		}
		status, text, err = l.p.call("POST", l.url+"/api/v1/ack/batch", got.ack())
		var answers acked
		if err != nil || status != 200 || json.Unmarshal(text, &answers) != nil {
			for _, m := range got.Messages {
				l.perhaps.Store(m.TransactionID, true)
			}
			return
		}
		for _, a := range answers {
			if a.Success {
				l.acked.Store(a.TransactionID, true)
				if l.acks.Add(1) == 500 {
					close(l.enough)
				}
			}
		}
	}
}

func TestPortBusy(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	port := l.Addr().(*net.TCPAddr).Port
	dir := filepath.Join(t.TempDir(), "data")
	said := spawn(t, "DATA_DIR="+dir, fmt.Sprintf("PORT=%d", port)).fails(t)
	if want := fmt.Sprintf("port %d on 127.0.0.1 is in use: stop what uses it, or set PORT to another one", port); !strings.Contains(said, want) {
		t.Errorf("said %q, want %q", said, want)
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("it made a data directory before it looked at the port")
	}
}

func TestDataDirOfAnotherVersion(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]string{
		"99": `made by PostgreSQL 99, but only PostgreSQL \d+ .* found: install PostgreSQL 99, or move the directory away`,
		"14": `made by PostgreSQL 14, but 15 is the oldest that is supported: move the directory away`,
	} {
		dir := dbtest.DataDir(t)
		if err := os.WriteFile(filepath.Join(dir, "pg", "PG_VERSION"), []byte(version+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if said := spawn(t, "DATA_DIR="+dir).fails(t); !regexp.MustCompile(want).MatchString(said) {
			t.Errorf("%s: said %q", version, said)
		}
	}
}

func TestDataDirInUse(t *testing.T) {
	t.Parallel()
	dir := dbtest.DataDir(t)
	p := spawn(t, "DATA_DIR="+dir)
	p.ready(t)
	said := spawn(t, "DATA_DIR="+dir).fails(t)
	if !strings.Contains(said, "another process runs the PostgreSQL in this directory") || !strings.Contains(said, fmt.Sprintf("(process %d)", p.cmd.Process.Pid)) {
		t.Errorf("said %q", said)
	}
}

// Errors that waiting does not cure end the start at once, and what they say holds no secret.
func TestHopelessDatabase(t *testing.T) {
	t.Parallel()
	s := dbtest.Durable(t)
	admin := dbtest.Pool(t, s.DSN, 1)
	if _, err := admin.Exec(t.Context(), "create role app login password 'right-Secret'"); err != nil {
		t.Fatal(err)
	}
	hba := filepath.Join(s.Dir, "pg", "pg_hba.conf")
	rules, err := os.ReadFile(hba)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(hba, append([]byte("local all app scram-sha-256\n"), rules...), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.Exec(t.Context(), "select pg_reload_conf()"); err != nil {
		t.Fatal(err)
	}
	host := admin.Config().ConnConfig.Host
	uri := func(user, name string) string {
		return "DATABASE_URL=postgres://" + user + "@/" + name + "?host=" + url.QueryEscape(host) + "&port=5432&sslmode=disable"
	}
	for name, c := range map[string]struct {
		settings []string
		want     string
	}{
		"wrong password":     {[]string{uri("app:wrong-Secret", "postgres")}, `password authentication failed for user "app"`},
		"no password":        {[]string{uri("app", "postgres")}, `password`},
		"missing role":       {[]string{uri("nobody-here:wrong-Secret", "postgres")}, `role "nobody-here" does not exist`},
		"missing database":   {[]string{uri("postgres:wrong-Secret", "not-there")}, `database "not-there" does not exist`},
		"not a URL":          {[]string{"DATABASE_URL=postgres://app:wrong-Secret@host:port/x"}, "DATABASE_URL: cannot be parsed"},
		"slash in password":  {[]string{"DATABASE_URL=postgres://app:wrong-Secret/x@host/x"}, "DATABASE_URL: cannot be parsed"},
		"PG variables":       {[]string{"PGHOST=" + host, "PGUSER=app", "PGPASSWORD=wrong-Secret", "PGDATABASE=postgres"}, `password authentication failed for user "app"`},
		"no right to create": {[]string{uri("app:right-Secret", "postgres")}, `permission denied for database postgres`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			said := spawn(t, c.settings...).fails(t)
			if !strings.Contains(said, c.want) {
				t.Errorf("said %q, want %q", said, c.want)
			}
			if strings.Contains(said, "Secret") {
				t.Errorf("a password is in what it said: %q", said)
			}
		})
	}
}

// A database that is not there yet is waited for, not given up.
func TestWaitsForDatabase(t *testing.T) {
	t.Parallel()
	s := dbtest.Durable(t)
	s.Stop()
	p := spawn(t, "DATABASE_URL="+s.DSN+" password=Secret")
	url := p.url(t)
	p.await(t, `waiting for the database`)
	if s := p.must(t, 503, "GET", url+"/ready", ""); s != `{"status":"not ready","reason":"database unreachable"}` {
		t.Error(s)
	}
	p.must(t, 503, "GET", url+"/health", "")
	again, err := localpg.Start(t.Context(), localpg.Options{Dir: s.Dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Stop)
	if again.DSN != s.DSN {
		t.Skip("the temporary directory has too long a name for a socket")
	}
	p.ready(t)
	p.must(t, 200, "GET", url+"/ready", "")
	if strings.Contains(p.String(), "Secret") {
		t.Error("a password is in what it said")
	}
	p.signal(t, os.Interrupt) // before its database goes
	p.exits(t, 10*time.Second)
}

// A broker does not outlive its private PostgreSQL, and the next one has what was answered.
func TestPostgresKilled(t *testing.T) {
	t.Parallel()
	dir := dbtest.DataDir(t)
	p := spawn(t, "DATA_DIR="+dir)
	p.must(t, 201, "POST", p.ready(t)+"/api/v1/push", `{"items":[{"queue":"q","payload":1}]}`)
	if err := syscall.Kill(postmaster(t, dir), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if said := p.fails(t); !strings.Contains(said, "the private PostgreSQL ended by itself") {
		t.Errorf("said %q", said)
	}
	p = spawn(t, "DATA_DIR="+dir)
	if s := p.must(t, 200, "GET", p.ready(t)+"/api/v1/pop/queue/q", ""); !strings.Contains(s, `"data":1,`) {
		t.Error(s)
	}
}

func TestWaitsForMigrations(t *testing.T) {
	t.Parallel()
	dsn := dbtest.Empty(t)
	p := spawn(t, "DATABASE_URL="+dsn, "AUTO_MIGRATE=false")
	url := p.url(t)
	p.await(t, fmt.Sprintf(`waiting until the migrations are applied \(AUTO_MIGRATE is false\)" schema=0 needed=%d`, schema.Known()))
	if s := p.must(t, 503, "GET", url+"/ready", ""); s != `{"status":"not ready","reason":"migrations pending"}` {
		t.Error(s)
	}
	p.must(t, 200, "GET", url+"/health", "")
	for method, path := range map[string]string{"POST": "/api/v1/push", "GET": "/api/v1/pop/queue/q?wait=true"} {
		if s := p.must(t, 503, method, url+path, "{}"); s != `{"error":"not ready"}` {
			t.Errorf("%s: %s", path, s)
		}
	}
	if err := schema.Migrate(t.Context(), dsn); err != nil {
		t.Fatal(err)
	}
	p.ready(t)
	p.must(t, 200, "GET", url+"/ready", "")
	p.must(t, 201, "POST", url+"/api/v1/push", `{"items":[{"queue":"q","payload":1}]}`)
	if strings.Contains(p.String(), "msg=migrating") {
		t.Error("it migrated")
	}
}

func TestWaitsForMigrationsUntilInterrupted(t *testing.T) {
	t.Parallel()
	p := spawn(t, "DATABASE_URL="+dbtest.Empty(t), "AUTO_MIGRATE=false")
	p.await(t, `waiting until the migrations are applied`)
	p.signal(t, os.Interrupt)
	if code := p.exits(t, 10*time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestRefusesNewerSchema(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	if _, err := dbtest.Pool(t, dsn, 1).Exec(t.Context(), "insert into ferrymq.schema_version (version_id, is_applied) values (4711, true)"); err != nil {
		t.Fatal(err)
	}
	for _, auto := range []string{"true", "false"} {
		said := spawn(t, "DATABASE_URL="+dsn, "AUTO_MIGRATE="+auto).fails(t)
		if want := fmt.Sprintf("the database has schema version 4711, this binary knows up to %d", schema.Known()); !strings.Contains(said, want) {
			t.Errorf("said %q, want %q", said, want)
		}
	}
}

func TestThreeStartAtOnce(t *testing.T) {
	t.Parallel()
	dsn := dbtest.Empty(t)
	var brokers [3]*process
	for i := range brokers {
		brokers[i] = spawn(t, "DATABASE_URL="+dsn)
	}
	for _, p := range brokers {
		url := p.ready(t)
		p.must(t, 201, "POST", url+"/api/v1/push", `{"items":[{"queue":"q","payload":1}]}`)
	}
	var n int64
	if err := dbtest.Pool(t, dsn, 1).QueryRow(t.Context(), "select count(*) from ferrymq.schema_version v where v.version_id > 0").Scan(&n); err != nil || n != schema.Known() {
		t.Errorf("%d migrations applied (%v)", n, err)
	}
}

// A broker takes its database from the PG* variables under both of their spellings, and embeds nothing then.
func TestPGVariables(t *testing.T) {
	t.Parallel()
	for _, names := range [][]string{
		{"PGHOST", "PGPORT", "PGUSER", "PGPASSWORD", "PGDATABASE"},
		{"PG_HOST", "PG_PORT", "PG_USER", "PG_PASSWORD", "PG_DATABASE"},
		{"PG_HOST", "PG_PORT", "PG_USER", "PG_PASSWORD", "PG_DB"},
	} {
		dsn := dbtest.New(t)
		c, err := pgx.ParseConfig(dsn)
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(t.TempDir(), "data")
		settings := []string{"DATA_DIR=" + dir}
		for i, v := range []string{c.Host, strconv.Itoa(int(c.Port)), c.User, c.Password, c.Database} {
			settings = append(settings, names[i]+"="+v)
		}
		p := spawn(t, settings...)
		p.must(t, 201, "POST", p.ready(t)+"/api/v1/push", `{"items":[{"queue":"q","payload":1}]}`)
		var n int
		if err := dbtest.Pool(t, dsn, 1).QueryRow(t.Context(), "select count(*) from ferrymq.segments").Scan(&n); err != nil || n != 1 {
			t.Errorf("%s: %d segments in the database that it names (%v)", names, n, err)
		}
		if _, err := os.Stat(dir); err == nil || strings.Contains(p.String(), "private PostgreSQL") {
			t.Errorf("%s: it embeds a PostgreSQL all the same", names)
		}
	}
}

func TestStaticBinary(t *testing.T) {
	t.Parallel()
	bin := filepath.Join(t.TempDir(), "ferrymq")
	command := sh(t, "In production")[0]
	if want := "CGO_ENABLED=0 go build -o ferrymq .\n"; command != want {
		t.Fatalf("the README builds with %q, want %q", command, want)
	}
	build := exec.Command("sh", "-c", strings.Replace(command, "-o ferrymq", "-o "+bin, 1))
	build.Env = append(os.Environ(), "GOFLAGS=-buildvcs=false")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	if f, err := elf.Open(bin); err == nil {
		defer f.Close()
		if libs, err := f.ImportedLibraries(); err != nil || len(libs) > 0 {
			t.Errorf("needs %v (%v)", libs, err)
		}
		for _, p := range f.Progs {
			if p.Type == elf.PT_INTERP {
				t.Error("needs a dynamic linker")
			}
		}
	} else if runtime.GOOS == "linux" {
		t.Fatal(err)
	}
	cmd := exec.Command(bin)
	cmd.Env = []string{"PORT=0", "DATABASE_URL=" + dbtest.New(t)}
	launch(t, cmd).ready(t)
}

func TestLoadConfig(t *testing.T) {
	t.Parallel()
	key, old := strings.Repeat("ab", 32), strings.Repeat("cd", 32)
	c, err := loadConfig(map[string]string{})
	if err != nil {
		t.Fatal(err)
	}
	if c.Port != 6632 || c.BindAddr != "127.0.0.1" || c.DatabaseURL != "" || !bool(c.AutoMigrate) || c.keys != nil {
		t.Errorf("defaults: %+v", c)
	}
	for _, x := range []struct {
		vars string // NAME=value, separated by spaces
		ok   func(*Config) bool
	}{
		{"PORT=0", func(c *Config) bool { return c.Port == 0 }},
		{"BIND_ADDR=::1", func(c *Config) bool { return c.BindAddr == "::1" }},
		{"AUTO_MIGRATE=Off", func(c *Config) bool { return !bool(c.AutoMigrate) }},
		{"AUTO_MIGRATE=YES", func(c *Config) bool { return bool(c.AutoMigrate) }},
		{"POP_DEFAULT_TIMEOUT_MS=5", func(c *Config) bool { return c.DefaultTimeout == 5 }},
		{"POP_DEFAULT_TIMEOUT_MS=5 DEFAULT_TIMEOUT=7", func(c *Config) bool { return c.DefaultTimeout == 7 }},
		{"QUEEN_ENCRYPTION_KEY=" + key, func(c *Config) bool { return c.keys != nil }},
		{"ENCRYPTION_KEY=" + key + " ENCRYPTION_KEYS_OLD=" + old, func(c *Config) bool { return len(c.keys.Numbers()) == 3 }},
		{"DATABASE_URL=postgres://a/b PGHOST=c", func(c *Config) bool { return c.DatabaseURL == "postgres://a/b" }},
		{"JWT_ENABLED=false AUTH_REQUIRED=0 JWT_SECRET=x ROOT_API_KEY=x", func(c *Config) bool { return c.auth == nil && c.BindAddr == "127.0.0.1" }},
		{"JWT_ENABLED=true JWT_SECRET=x", func(c *Config) bool { return c.auth != nil && c.BindAddr == "0.0.0.0" }},
		{"JWT_ENABLED=true AUTH_REQUIRED=false JWT_SECRET=x", func(c *Config) bool { return c.auth != nil }},
		{"AUTH_REQUIRED=on ROOT_API_KEY=x", func(c *Config) bool { return c.auth != nil && c.BindAddr == "0.0.0.0" }},
		{"AUTH_REQUIRED=on ROOT_API_KEY=x BIND_ADDR=10.1.2.3", func(c *Config) bool { return c.BindAddr == "10.1.2.3" }},
		{"JWT_ENABLED=1 JWT_ALGORITHM=EdDSA JWT_JWKS_URL=https://user:password@issuer/keys", func(c *Config) bool { return c.auth != nil }},
		{"JWT_SKIP_PATHS=,", func(c *Config) bool { return len(strings.Join(c.JWTSkipPaths, "")) == 0 }},
	} {
		if c, err := loadConfig(parseVars(x.vars)); err != nil || !x.ok(c) {
			t.Errorf("%s: %+v (%v)", x.vars, c, err)
		}
	}
	for _, vars := range []string{ // the first of them is at fault
		"PORT=abc", "PORT=-1", "PORT=65536", "PORT=6632x", "PORT=99999999999999999999",
		"BIND_ADDR=nowhere", "DB_POOL_SIZE=3", "STATEMENT_TIMEOUT_MS=99", "AUTO_MIGRATE=maybe", "MAX_BODY_BYTES=1023",
		"DEFAULT_TIMEOUT=300001", "POP_DEFAULT_TIMEOUT_MS=x", "POP_WAIT_INITIAL_INTERVAL_MS=0", "POP_WAIT_BACKOFF_THRESHOLD=-1",
		"POP_WAIT_BACKOFF_MULTIPLIER=0.5", "POP_WAIT_BACKOFF_MULTIPLIER=NaN", "POP_WAIT_MAX_INTERVAL_MS=1s",
		"DEFAULT_SUBSCRIPTION_MODE=latest", "LOG_LEVEL=loud", "LOG_FORMAT=xml", "DEDUP_CACHE_MB=-1", "GROUP_COMMIT_WIDTH=0",
		"MAX_PARKED=-1", "PUSH_QUEUE_MAX=0", "RETENTION_INTERVAL=1", "RETENTION_BATCH_SIZE=0", "PARTITION_CLEANUP_DAYS=-1",
		"ENCRYPTION_KEY=abc", "ENCRYPTION_KEY=" + strings.Repeat("g", 64), "ENCRYPTION_KEYS_OLD=" + old,
		"ENCRYPTION_KEYS_OLD=Secret ENCRYPTION_KEY=" + key,
		"JWT_ENABLED=true", "JWT_ENABLED=tru", "AUTH_REQUIRED=1", "AUTH_REQUIRED=2", "JWT_ALGORITHM=HS255", "JWT_PUBLIC_KEY=Secret",
		"JWT_JWKS_URL=ftp://Secret", "JWT_JWKS_URL=http://Secret:%zz", "ROOT_API_KEY=Secret\x00", "JWT_SKIP_PATHS=ready", "JWT_CLOCK_SKEW=-1",
		"JWT_ALGORITHM=RS256 JWT_ENABLED=true JWT_SECRET=Secret", "JWT_SECRET= JWT_ENABLED=true JWT_JWKS_URL=https://Secret@x",
		"PGPORT=x PGHOST=h", "PG_PORT=0 PGHOST=h", "PGSSLMODE=no PGHOST=h", "PG_USE_SSL=maybe PGHOST=h",
		"PG_SSL_REJECT_UNAUTHORIZED=maybe PGHOST=h", "PGSSLROOTCERT=/not/there PGHOST=h", "PG_SSL_ROOT_CERT=/not/there PGHOST=h",
	} {
		_, err := loadConfig(parseVars(vars))
		name, _, _ := strings.Cut(vars, "=")
		if err == nil {
			t.Errorf("%s: accepted", vars)
		} else if !slices.Contains(regexp.MustCompile(`\w+`).FindAllString(err.Error(), -1), name) {
			t.Errorf("%s: the error does not name the variable: %v", vars, err)
		} else if strings.Contains(err.Error(), "Secret") || strings.Contains(err.Error(), old) {
			t.Errorf("%s: the error shows a key: %v", vars, err)
		}
	}
}

// A key that another algorithm is for stops the start.
func TestPublicKeyMustFit(t *testing.T) {
	t.Parallel()
	public, _, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		t.Fatal(err)
	}
	text := string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
	for algorithm, ok := range map[string]bool{"EdDSA": true, "auto": true, "RS256": false, "ES256": false, "HS256": false} {
		for _, key := range []string{text, strings.ReplaceAll(text, "\n", `\n`)} {
			_, err := loadConfig(map[string]string{"JWT_ENABLED": "true", "JWT_ALGORITHM": algorithm, "JWT_PUBLIC_KEY": key})
			if (err == nil) != ok {
				t.Errorf("%s: %v", algorithm, err)
			} else if err != nil && algorithm != "HS256" && !strings.Contains(err.Error(), "JWT_PUBLIC_KEY") {
				t.Errorf("%s: %v does not name it", algorithm, err)
			}
		}
	}
}

// Where a broker listens, and what it says about that.
func TestListenAddress(t *testing.T) {
	t.Parallel()
	const warning, unused = "no authentication: whoever reaches this address", "a key for authentication is set, but it is off"
	for _, c := range []struct {
		settings, address string
		warns, unused     bool
	}{
		{"", "127.0.0.1", false, false},
		{"BIND_ADDR=0.0.0.0", "0.0.0.0", true, false},
		{"BIND_ADDR=127.0.0.2", "127.0.0.2", false, false},
		{"AUTH_REQUIRED=true ROOT_API_KEY=Secret", "0.0.0.0", false, false},
		{"JWT_ENABLED=true JWT_SECRET=Secret", "0.0.0.0", false, false},
		{"JWT_ENABLED=true JWT_SECRET=Secret BIND_ADDR=127.0.0.1", "127.0.0.1", false, false},
		{"ROOT_API_KEY=Secret", "127.0.0.1", false, true},
		{"JWT_SECRET=Secret BIND_ADDR=0.0.0.0", "0.0.0.0", true, true},
	} {
		// No database: what is looked at is said before one is needed.
		p := spawn(t, append(strings.Fields(c.settings), "DATABASE_URL=host=/nonexistent", "LOG_LEVEL=debug")...)
		p.await(t, `waiting for the database`)
		at, _, err := net.SplitHostPort(strings.TrimPrefix(p.url(t), "http://"))
		if err != nil || at != c.address {
			t.Errorf("%s: listens on %s (%v)", c.settings, at, err)
		}
		if s := p.String(); strings.Contains(s, warning) != c.warns || strings.Contains(s, unused) != c.unused || strings.Contains(s, "Secret") {
			t.Errorf("%s: said\n%s", c.settings, s)
		}
		p.signal(t, os.Interrupt)
	}
}

// Tokens of an issuer whose keys are fetched: it may come later than the broker, and when it replaces a key, tokens of the
// old one end with the next fetch. Nothing of a token or a key is said.
func TestIssuer(t *testing.T) {
	t.Parallel()
	var set atomic.Pointer[string]
	issuer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s := set.Load(); s != nil {
			io.WriteString(w, *s)
		} else {
			w.WriteHeader(http.StatusBadGateway)
		}
	}))
	defer issuer.Close()
	p := spawn(t, "DATABASE_URL="+dbtest.New(t), "JWT_ENABLED=true", "JWT_ALGORITHM=EdDSA", "JWT_JWKS_URL="+issuer.URL+"/Secret",
		"JWT_JWKS_REFRESH_INTERVAL=1", "BIND_ADDR=127.0.0.1", "LOG_LEVEL=debug")
	url := p.ready(t)
	var tokens [2]string
	var sets [2]string
	for i := range tokens {
		public, private, err := ed25519.GenerateKey(nil)
		if err != nil {
			t.Fatal(err)
		}
		sets[i] = fmt.Sprintf(`{"keys":[{"kty":"OKP","crv":"Ed25519","kid":"%d","x":%q}]}`, i, base64.RawURLEncoding.EncodeToString(public))
		token := jwt.NewWithClaims(jwt.SigningMethodEdDSA, jwt.MapClaims{"sub": fmt.Sprint("producer-", i), "role": "read-write"})
		token.Header["kid"] = fmt.Sprint(i)
		if tokens[i], err = token.SignedString(private); err != nil {
			t.Fatal(err)
		}
	}
	push := func(token string) (int, string) {
		r, err := http.NewRequest("POST", url+"/api/v1/push", strings.NewReader(`{"items":[{"queue":"q","payload":1}]}`))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+token)
		resp, err := p.client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b)
	}
	becomes := func(token string, want int) string {
		t.Helper()
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for end := time.Now().Add(patience); ; <-tick.C {
			status, body := push(token)
			if status == want {
				return body
			}
			if time.Now().After(end) {
				t.Fatalf("%d %s, want %d", status, body, want)
			}
		}
	}
	const unknown = `{"error":"Unknown key ID"}`
	if status, body := push(tokens[0]); status != 401 || body != unknown {
		t.Errorf("before the issuer answers: %d %s", status, body)
	}
	set.Store(&sets[0])
	becomes(tokens[0], 201)
	if status, body := push(tokens[1]); status != 401 || body != unknown {
		t.Errorf("a key that is not published yet: %d %s", status, body)
	}
	set.Store(&sets[1])
	if body := becomes(tokens[0], 401); body != unknown {
		t.Error(body)
	}
	becomes(tokens[1], 201)
	for _, secret := range []string{"Secret", tokens[0][strings.LastIndex(tokens[0], ".")+1:], tokens[1][strings.LastIndex(tokens[1], ".")+1:]} {
		if strings.Contains(p.String(), secret) {
			t.Errorf("%q is in what it said", secret)
		}
	}
}

// Clients that never finish what they send cost little and not for long, and a long poll is not taken for one of them.
func TestSlowClients(t *testing.T) {
	t.Parallel()
	p := spawn(t, "DATABASE_URL="+dbtest.New(t))
	url := p.ready(t)
	addr := strings.TrimPrefix(url, "http://")
	began := time.Now()
	poll := make(chan int, 1)
	go func() {
		status, _, _ := p.call("GET", url+"/api/v1/pop/queue/q?wait=true&timeout=18000", "")
		poll <- status
	}()
	var conns []net.Conn
	for range 200 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, "GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	p.must(t, 201, "POST", url+"/api/v1/push", `{"items":[{"queue":"other","payload":1}]}`)
	for _, c := range conns {
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("after %v: %v", time.Since(began), err)
		}
	}
	select {
	case status := <-poll:
		t.Errorf("the long poll was answered %d after %v, before all of them were closed", status, time.Since(began))
	default:
		if status := <-poll; status != 204 {
			t.Errorf("the long poll was answered %d", status)
		}
	}
}

func parseVars(s string) map[string]string {
	m := make(map[string]string)
	for _, kv := range strings.Fields(s) {
		k, v, _ := strings.Cut(kv, "=")
		m[k] = v
	}
	return m
}

func TestEnvironmentSkipsEmpty(t *testing.T) {
	t.Setenv("PORT", "")
	t.Setenv("PG_DB", "x=y")
	m := environment()
	if _, ok := m["PORT"]; ok || m["PG_DB"] != "x=y" {
		t.Errorf("%q", m)
	}
}

func TestLibpqDSN(t *testing.T) {
	t.Parallel()
	for vars, want := range map[string]string{
		"PGHOST=db": "host='db'",
		"PG_HOST=db PG_PORT=1 PG_USER=u PG_PASSWORD=p PG_DB=d": "host='db' port='1' user='u' password='p' dbname='d'",
		"PG_HOST=db PG_DB=d PG_DATABASE=e PGDATABASE=f":        "host='db' dbname='f'",
		"PG_HOST=db PG_DB=d PG_DATABASE=e":                     "host='db' dbname='e'",
		`PGHOST=db PGPASSWORD=it's\`:                           `host='db' password='it\'s\\'`,
		"PGHOST=db PG_USE_SSL=true":                            "host='db' sslmode='verify-full'",
		"PGHOST=db PG_USE_SSL=1 PG_SSL_REJECT_UNAUTHORIZED=no": "host='db' sslmode='require'",
		"PGHOST=db PG_USE_SSL=1 PGSSLMODE=disable":             "host='db' sslmode='disable'",
		"PGHOST=db PG_USE_SSL=false":                           "host='db'",
		"PGHOST=db PG_USE_SSL=true PG_SSL_ROOT_CERT=system":    "host='db' sslmode='verify-full' sslrootcert='system'",
	} {
		c, err := loadConfig(parseVars(vars))
		if err != nil || c.DatabaseURL != want {
			t.Errorf("%s: %v (%v), want %s", vars, c, err, want)
			continue
		}
		parsed, err := pgx.ParseConfig(c.DatabaseURL)
		if err != nil {
			t.Errorf("%s: %v", vars, err)
		} else if strings.Contains(vars, "it's") && parsed.Password != `it's\` {
			t.Errorf("password %q", parsed.Password)
		}
	}
}

// Every alias is one of a setting or of a libpq variable.
func TestAliases(t *testing.T) {
	t.Parallel()
	for name, others := range maps.All(aliases) {
		for _, o := range others {
			all, from := withAliases(map[string]string{o: "x"})
			if all[name] != "x" || from[name] != o {
				t.Errorf("%s does not set %s", o, name)
			}
		}
	}
}

// run ends without an error when it is told to before it has begun.
func TestRunCancelled(t *testing.T) {
	t.Setenv("PORT", "0")
	t.Setenv("DATABASE_URL", "host=/nonexistent")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := run(ctx); err != nil {
		t.Error(err)
	}
}
