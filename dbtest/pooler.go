package dbtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"ferrymq/localpg"
)

// Pooler is a PgBouncer in transaction mode. It gives each transaction to the server connection that rested longest, so that
// whoever relies on a session soon meets another's.
type Pooler struct {
	dir    string
	server *localpg.Server
	cmd    *exec.Cmd
	done   chan struct{}
	said   bytes.Buffer // read only once it has ended
	ending atomic.Bool
}

const (
	poolerPort   = "6432" // of a socket: any would do
	poolerSuffix = "-pgbouncer"
)

// HasPooler says whether PgBouncer is installed.
func HasPooler() bool { return pgbouncer() != "" }

func pgbouncer() string {
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return ""
}

// NewPooler starts a PgBouncer in front of a server, with further settings if there are any. It ends with the test.
func NewPooler(t testing.TB, server *localpg.Server, settings ...string) *Pooler {
	t.Helper()
	p, err := newPooler(server, settings...)
	if err != nil {
		t.Fatalf("dbtest: %v", err)
	}
	t.Cleanup(p.Stop)
	return p
}

func newPooler(server *localpg.Server, settings ...string) (*Pooler, error) {
	h, err := processHome()
	if err != nil {
		return nil, err
	}
	p := &Pooler{server: server}
	if p.dir, err = os.MkdirTemp(h.dir, "b-*"+poolerSuffix); err != nil {
		return nil, err
	}
	to, err := pgx.ParseConfig(server.DSN)
	if err != nil {
		return nil, err
	}
	config := fmt.Sprintf("[databases]\n* = host=%s port=%d user=%s\n[pgbouncer]\n", to.Host, to.Port, to.User) + strings.Join(append([]string{
		"listen_port = " + poolerPort, "unix_socket_dir = " + p.dir, "auth_type = any", "pool_mode = transaction", "server_round_robin = 1", "default_pool_size = 10",
		"max_client_conn = 1000", "server_login_retry = 1", "query_wait_timeout = 4", "server_idle_timeout = 5", "admin_users = " + to.User, "log_connections = 0", "log_disconnections = 0", "log_pooler_errors = 0"}, settings...), "\n") + "\n"
	path := filepath.Join(p.dir, "ini")
	if err := os.WriteFile(path, []byte(config), 0o644); err != nil {
		return nil, err
	}
	if c := server.Command("pgbouncer").SysProcAttr.Credential; c != nil {
		err = errors.Join(os.Chown(p.dir, int(c.Uid), int(c.Gid)), os.Chown(path, int(c.Uid), int(c.Gid)))
	}
	if err != nil {
		return nil, err
	}
	return p, p.start()
}

// Start starts it again after Stop, at the same address.
func (p *Pooler) Start(t testing.TB) {
	t.Helper()
	if err := p.start(); err != nil {
		t.Fatalf("dbtest: %v", err)
	}
}

func (p *Pooler) start() error {
	bin := pgbouncer()
	if bin == "" {
		return errors.New("pgbouncer is not installed")
	}
	p.cmd, p.done = p.server.Command(bin, filepath.Join(p.dir, "ini")), make(chan struct{})
	p.ending.Store(false)
	p.said.Reset()
	p.cmd.Stdout, p.cmd.Stderr = &p.said, &p.said
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // see localpg: it ends when the thread that forked does
		defer close(p.done)
		err := p.cmd.Start()
		started <- err
		if err == nil {
			err = p.cmd.Wait()
			if !p.ending.Load() { // whatever fails now fails because of this
				fmt.Fprintf(os.Stderr, "dbtest: pgbouncer ended by itself: %v\n%s\n", err, p.said.String())
			}
		}
	}()
	if err := <-started; err != nil {
		return err
	}
	for end := time.Now().Add(patience); ; time.Sleep(3 * time.Millisecond) {
		conn, err := net.Dial("unix", filepath.Join(p.dir, ".s.PGSQL."+poolerPort))
		if err == nil {
			return conn.Close()
		}
		select {
		case <-p.done:
			return fmt.Errorf("pgbouncer ended: %s", p.said.String())
		default:
			if time.Now().After(end) {
				p.Stop()
				return fmt.Errorf("pgbouncer: %w", err)
			}
		}
	}
}

// Stop ends it at once, and all connections through it.
func (p *Pooler) Stop() {
	p.ending.Store(true)
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(time.Second):
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

// DSN is the way through it to a database of its server.
func (p *Pooler) DSN(dsn string) (string, error) {
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("host=%s port=%s user=%s dbname='%s'", p.dir, poolerPort, config.User, strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(config.Database)), nil
}

// sharedPooler is the one in front of the server of this process.
var sharedPooler = sync.OnceValues(func() (*Pooler, error) {
	s, err := shared()
	if err != nil {
		return nil, err
	}
	if s.own == nil {
		return nil, errors.New("FERRYMQ_TEST_POOLER does not go together with FERRYMQ_TEST_DSN")
	}
	s.pooler, err = newPooler(s.own)
	return s.pooler, err
})

// Through is the address of a database of New or Empty for what is tested: with FERRYMQ_TEST_POOLER it leads through a PgBouncer in
// transaction mode. What a test itself does there goes to dsn, as it may want sessions.
func Through(t testing.TB, dsn string) string {
	t.Helper()
	if os.Getenv("FERRYMQ_TEST_POOLER") == "" {
		return dsn
	}
	p, err := sharedPooler()
	if err == nil {
		dsn, err = p.DSN(dsn)
	}
	if err != nil {
		t.Fatalf("dbtest: %v", err)
	}
	return dsn
}

// Reconnect makes the pooler of Through, if there is one, take new connections to its server for everything that begins from now on: what
// its operator does once the server behind it is another one.
func Reconnect(t testing.TB) {
	t.Helper()
	if os.Getenv("FERRYMQ_TEST_POOLER") == "" {
		return
	}
	p, err := sharedPooler()
	if err != nil {
		t.Fatalf("dbtest: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	conn, err := pgconn.Connect(ctx, fmt.Sprintf("host=%s port=%s user=postgres dbname=pgbouncer", p.dir, poolerPort))
	if err != nil {
		t.Fatalf("dbtest: %v", err)
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, "RECONNECT").ReadAll(); err != nil {
		t.Fatalf("dbtest: %v", err)
	}
}
