// Package proof holds the promises of the product under faults: real broker processes, a real PostgreSQL that is killed,
// cut off, filled up or replaced, and clients of both APIs, whose histories are checked afterwards.
//
// Every fault has a short form, which "go test ./..." runs, and a long one: go test ./proof -long -timeout 2h.
// FERRYMQ_BIN names a build of the broker to take instead of a fresh one, such as one with the race detector.
package proof

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/dbtest"
	"ferrymq/localpg"
)

// long asks for the long form of each test.
var long = flag.Bool("long", false, "the long form: faults that last, and load that goes on for minutes")

// patience bounds what should be quick, on a machine that is busy.
const patience = 60 * time.Second

// recovery is how long brokers may take until they work again, once their database does.
const recovery = 5 * time.Second

// busy is how much longer that may take where many tests run at the same time on two cores. What it took is in the log.
const busy = 3

func TestMain(m *testing.M) {
	flag.Parse()
	// The tests mostly wait for time to pass.
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		_ = f.Value.Set("8")
	}
	dbtest.Main(m, func() {
		http.DefaultClient.CloseIdleConnections()
		if built != "" {
			_ = os.RemoveAll(filepath.Dir(built))
		}
	})
}

// built is the broker that this run has built, once it has.
var built string

// binary builds the broker.
var binary = sync.OnceValues(func() (string, error) {
	if bin := os.Getenv("FERRYMQ_BIN"); bin != "" {
		return bin, nil
	}
	dir, err := os.MkdirTemp("", "ferrymq-proof-")
	if err != nil {
		return "", err
	}
	built = filepath.Join(dir, "ferrymq")
	return built, build(built)
})

func build(to string, flags ...string) error {
	cmd := exec.Command("go", append(append([]string{"build", "-o", to}, flags...), "ferrymq")...)
	cmd.Dir = ".."
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build: %w\n%s", err, out)
	}
	return nil
}

// span is the short or the long form of a time.
func span(short, longer time.Duration) time.Duration {
	if *long {
		return longer
	}
	return short
}

// eventually waits for a condition.
func eventually(t testing.TB, within time.Duration, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(within); !ok(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", within, what)
		}
	}
}

// postgres is a server of a test's own: it survives being killed, and can be stopped and started again.
type postgres struct {
	t        testing.TB
	settings map[string]string
	env      []string
	dir      string
	server   *localpg.Server
}

// small keeps a server's start and end quick; it stays as durable as any.
var small = map[string]string{"shared_buffers": "32MB", "max_wal_size": "256MB", "max_connections": "100"}

// newPostgres starts a server in dir, or in a new place if dir is empty. It is stopped with the test.
func newPostgres(t testing.TB, dir string, settings map[string]string, env ...string) *postgres {
	t.Helper()
	if dir == "" {
		dir = dbtest.DataDir(t)
	}
	p := &postgres{t: t, settings: make(map[string]string), env: env, dir: dir}
	for _, m := range []map[string]string{small, settings} {
		for k, v := range m {
			p.settings[k] = v
		}
	}
	p.start()
	t.Cleanup(func() { p.server.Stop() })
	return p
}

// tryStart starts the server, which must not run.
func (p *postgres) tryStart() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s, err := localpg.Start(ctx, localpg.Options{Dir: p.dir, Settings: p.settings, Env: p.env})
	if err == nil {
		p.server = s
	}
	return err
}

func (p *postgres) start() {
	p.t.Helper()
	if err := p.tryStart(); err != nil {
		p.t.Fatal(err)
	}
}

// end ends the server with a signal to its postmaster: SIGKILL is a crash, SIGQUIT an immediate shutdown, SIGINT a fast one.
func (p *postgres) end(with syscall.Signal) {
	p.t.Helper()
	if err := syscall.Kill(p.server.PID(), with); err != nil {
		p.t.Fatal(err)
	}
	select {
	case <-p.server.Done():
	case <-time.After(patience):
		p.t.Fatalf("PostgreSQL still runs after %v", with)
	}
	p.server.Stop()
}

// dial connects to the server's socket, wherever it is by now.
func (p *postgres) dial() (net.Conn, error) {
	c, err := pgx.ParseConfig(p.server.DSN)
	if err != nil {
		return nil, err
	}
	return net.DialTimeout("unix", filepath.Join(c.Host, fmt.Sprintf(".s.PGSQL.%d", c.Port)), 5*time.Second)
}

// pool connects to the server directly.
func (p *postgres) pool() *pgxpool.Pool {
	p.t.Helper()
	return dbtest.Pool(p.t, p.server.DSN, 4)
}

// exec runs a statement on the server, on a connection of its own.
func (p *postgres) exec(sql string) {
	p.t.Helper()
	c, err := pgx.Connect(context.Background(), p.server.DSN)
	if err != nil {
		p.t.Fatal(err)
	}
	defer c.Close(context.Background())
	if _, err := c.Exec(context.Background(), sql); err != nil {
		p.t.Fatalf("%s: %v", sql, err)
	}
}

// cluster is brokers on one database, which they reach through a proxy.
type cluster struct {
	t        testing.TB
	settings []string
	db       *proxy
	brokers  []*broker
}

// newCluster starts n brokers with these settings on a server of the test's own.
func newCluster(t testing.TB, p *postgres, n int, settings ...string) *cluster {
	t.Helper()
	return onDatabase(t, newProxy(t, p.dial), "postgres", n, settings...)
}

// newShared starts n brokers with these settings on a database of the server that all tests share: it cannot be harmed, the
// network before it can. Its DSN leads around the proxy.
func newShared(t testing.TB, n int, settings ...string) (c *cluster, dsn string) {
	t.Helper()
	dsn = dbtest.New(t)
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	network, address := "tcp", net.JoinHostPort(config.Host, fmt.Sprint(config.Port))
	if strings.HasPrefix(config.Host, "/") {
		network, address = "unix", filepath.Join(config.Host, fmt.Sprintf(".s.PGSQL.%d", config.Port))
	}
	user := config.User
	if config.Password != "" {
		user += " password=" + config.Password
	}
	return onDatabase(t, newProxy(t, dialer(network, address)), config.Database+" user="+user, n, settings...), dsn
}

func onDatabase(t testing.TB, p *proxy, database string, n int, settings ...string) *cluster {
	t.Helper()
	if !strings.Contains(database, " user=") {
		database += " user=postgres"
	}
	c := &cluster{t: t, db: p}
	c.settings = append([]string{fmt.Sprintf("DATABASE_URL=host=127.0.0.1 port=%d sslmode=disable dbname=%s", p.port(), database)}, settings...)
	for range n {
		c.brokers = append(c.brokers, c.spawn())
	}
	for _, b := range c.brokers {
		b.ready()
	}
	return c
}

// urls are the addresses of the brokers.
func (c *cluster) urls() []string {
	c.t.Helper()
	var all []string
	for _, b := range c.brokers {
		all = append(all, b.url())
	}
	return all
}

// spawn starts one more broker, which is not counted as one of the cluster's.
func (c *cluster) spawn(settings ...string) *broker {
	c.t.Helper()
	bin, err := binary()
	if err != nil {
		c.t.Fatal(err)
	}
	return launch(c.t, bin, append(append([]string{}, c.settings...), settings...)...)
}

// broker is a process.
type broker struct {
	t    testing.TB
	cmd  *exec.Cmd
	done chan struct{}
	base string

	mu   sync.Mutex
	log  bytes.Buffer
	grew chan struct{}
}

// launch runs a broker on a free port. It is ended with the test.
func launch(t testing.TB, bin string, settings ...string) *broker {
	t.Helper()
	b := &broker{t: t, cmd: exec.Command(bin), done: make(chan struct{}), grew: make(chan struct{})}
	b.cmd.Env = append([]string{"PORT=0"}, settings...)
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "GOCOVERDIR", "GORACE"} {
		if v := os.Getenv(name); v != "" {
			b.cmd.Env = append(b.cmd.Env, name+"="+v)
		}
	}
	b.cmd.Stdout, b.cmd.Stderr = b, b
	if err := b.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = b.cmd.Wait()
		close(b.done)
	}()
	t.Cleanup(func() {
		// In order, within the time that it promises, and with code 0: whatever the test has done to it.
		select {
		case <-b.done:
		default:
			_ = b.cmd.Process.Signal(syscall.SIGTERM)
			select {
			case <-b.done:
				if code := b.cmd.ProcessState.ExitCode(); code != 0 {
					t.Errorf("broker %d ended with code %d", b.cmd.Process.Pid, code)
				}
			case <-time.After(patience):
				t.Errorf("broker %d did not end", b.cmd.Process.Pid)
				_ = b.cmd.Process.Signal(syscall.SIGQUIT)
				<-b.done
			}
		}
		if strings.Contains(b.String(), "panic:") || strings.Contains(b.String(), "DATA RACE") {
			t.Errorf("broker %d panicked", b.cmd.Process.Pid)
		}
		if t.Failed() {
			said := b.String()
			if len(said) > 20000 {
				said = said[:10000] + "\n…\n" + said[len(said)-10000:]
			}
			t.Logf("broker %d said:\n%s", b.cmd.Process.Pid, said)
		}
	})
	return b
}

// Write takes what the process prints.
func (b *broker) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.grew)
	b.grew = make(chan struct{})
	return b.log.Write(p)
}

func (b *broker) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.log.String()
}

// await returns the last group of the pattern once it has been printed.
func (b *broker) await(pattern string) string {
	b.t.Helper()
	re := regexp.MustCompile(pattern)
	timeout := time.After(patience)
	for ended := false; ; {
		b.mu.Lock()
		m, grew := re.FindStringSubmatch(b.log.String()), b.grew
		b.mu.Unlock()
		if m != nil {
			return m[len(m)-1]
		}
		if ended {
			b.t.Fatalf("the broker ended without printing %q:\n%s", pattern, b)
		}
		select {
		case <-grew:
		case <-b.done:
			ended = true // its last lines may have come in between
		case <-timeout:
			b.t.Fatalf("the broker did not print %q", pattern)
		}
	}
}

// url is the address that the broker listens on.
func (b *broker) url() string {
	b.t.Helper()
	if b.base == "" {
		b.base = b.await(`listening on (http://[^" ]+)`)
	}
	return b.base
}

// ready waits until the broker serves.
func (b *broker) ready() *broker {
	b.t.Helper()
	b.url()
	b.await(`msg=ready`)
	return b
}

// end ends the process with a signal and waits for it.
func (b *broker) end(with syscall.Signal) {
	b.t.Helper()
	_ = b.cmd.Process.Signal(with)
	select {
	case <-b.done:
	case <-time.After(patience):
		b.t.Fatalf("the broker still runs after %v", with)
	}
}

// answer is what came back for a request.
type answer struct {
	status int
	header http.Header
	body   string
	err    error // no whole answer came
	took   time.Duration
}

func (a answer) String() string {
	return fmt.Sprintf("%d %s (%v, after %v)", a.status, a.body, a.err, a.took)
}

// call makes a request that nobody waits for longer than patience.
func call(client *http.Client, method, url, body string) answer {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return callWith(ctx, client, method, url, body)
}

func callWith(ctx context.Context, client *http.Client, method, url, body string) (a answer) {
	began := time.Now()
	defer func() { a.took = time.Since(began) }()
	var r *http.Request
	if r, a.err = http.NewRequestWithContext(ctx, method, url, strings.NewReader(body)); a.err != nil {
		return a
	}
	resp, err := client.Do(r)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return answer{status: resp.StatusCode, header: resp.Header, body: string(text), err: err}
}

// must makes a request that has to be answered with this status.
func must(t testing.TB, status int, method, url, body string) string {
	t.Helper()
	a := call(http.DefaultClient, method, url, body)
	if a.err != nil || a.status != status {
		t.Fatalf("%s %s: %v, want %d", method, url, a, status)
	}
	return a.body
}

// newClient is a client with connections of its own, which are closed with the test.
func newClient(t testing.TB) *http.Client {
	transport := &http.Transport{MaxIdleConnsPerHost: 1000, DialContext: (&net.Dialer{Timeout: 5 * time.Second}).DialContext}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}
