package dbtest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"ferrymq/localpg"
	"ferrymq/schema"
)

// leakEnv makes this test binary leave a goroutine behind.
const leakEnv = "FERRYMQ_DBTEST_LEAK"

func TestMain(m *testing.M) { Main(m) }

func exists(t *testing.T, name string) bool {
	t.Helper()
	s := started(t)
	var yes bool
	err := s.admin.QueryRow(t.Context(), "select exists (select from pg_database d where d.datname = $1)", name).Scan(&yes)
	if err != nil {
		t.Fatal(err)
	}
	return yes
}

func databaseOf(t *testing.T, dsn string) string {
	t.Helper()
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	return config.Database
}

func TestNew(t *testing.T) {
	for i := range 10 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			dsn := New(t)
			pool := Pool(t, dsn, 2)
			version, err := schema.Applied(t.Context(), pool)
			if err != nil || version != schema.Known() {
				t.Errorf("schema version %d (%v), want %d", version, err, schema.Known())
			}
			// Fails if another test got the same database.
			if _, err := pool.Exec(t.Context(), "create table mine (x int)"); err != nil {
				t.Error(err)
			}
			var zone string
			if err := pool.QueryRow(t.Context(), "show timezone").Scan(&zone); err != nil || zone != "UTC" {
				t.Errorf("timezone %q (%v)", zone, err)
			}
			if err := schema.Migrate(t.Context(), dsn); err != nil {
				t.Errorf("migrate again: %v", err)
			}
		})
	}
}

func TestDroppedWithOpenSession(t *testing.T) {
	t.Parallel()
	var name string
	var conn *pgx.Conn
	t.Run("test", func(t *testing.T) {
		dsn := Empty(t)
		name = databaseOf(t, dsn)
		var err error
		if conn, err = pgx.Connect(t.Context(), dsn); err != nil {
			t.Fatal(err)
		}
		if !exists(t, name) {
			t.Errorf("%s does not exist", name)
		}
	})
	if exists(t, name) {
		t.Errorf("%s still exists", name)
	}
	_ = conn.Close(context.Background())
}

func TestEmpty(t *testing.T) {
	t.Parallel()
	pool := Pool(t, Empty(t), 1)
	if version, err := schema.Applied(t.Context(), pool); version != 0 || err != nil {
		t.Errorf("schema version %d (%v)", version, err)
	}
}

func TestWaitBlocked(t *testing.T) {
	t.Parallel()
	pool := Pool(t, Empty(t), 4)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	const take = "select pg_advisory_xact_lock(1)"
	if _, err := tx.Exec(t.Context(), take); err != nil {
		t.Fatal(err)
	}
	WaitBlocked(t, pool, 0)
	taken := make(chan error)
	for range 2 {
		go func() {
			_, err := pool.Exec(t.Context(), take)
			taken <- err
		}()
	}
	WaitBlocked(t, pool, 2)
	select {
	case err := <-taken:
		t.Fatalf("not blocked: %v", err)
	default:
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := <-taken; err != nil {
			t.Error(err)
		}
	}
}

func TestDurable(t *testing.T) {
	t.Parallel()
	s := Durable(t)
	one := func(dsn, sql string) (out string) {
		t.Helper()
		if err := Pool(t, dsn, 1).QueryRow(t.Context(), sql).Scan(&out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	if got := one(s.DSN, "select concat_ws(' ', current_setting('fsync'), current_setting('synchronous_commit'), current_setting('full_page_writes'))"); got != "on on on" {
		t.Errorf("fsync, synchronous_commit, full_page_writes: %s", got)
	}
	if _, err := Pool(t, s.DSN, 1).Exec(t.Context(), "create table kept as select 'here' as x"); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(s.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-s.Done()
	s.Stop()
	again, err := localpg.Start(t.Context(), localpg.Options{Dir: s.Dir})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Stop()
	if got := one(again.DSN, "select x from kept"); got != "here" {
		t.Errorf("after a crash: %q", got)
	}
}

// failing is a test that has failed, with its cleanups in our hands.
type failing struct {
	testing.TB
	cleanups []func()
	logged   string
}

func (f *failing) Failed() bool                 { return true }
func (f *failing) Cleanup(fn func())            { f.cleanups = append(f.cleanups, fn) }
func (f *failing) Logf(format string, a ...any) { f.logged += fmt.Sprintf(format, a...) }

func TestKeep(t *testing.T) {
	for _, keep := range []string{"", "1"} {
		t.Setenv("FERRYMQ_KEEP_DB", keep)
		f := &failing{TB: t}
		dsn := Empty(f)
		name := databaseOf(t, dsn)
		for _, fn := range f.cleanups {
			fn()
		}
		if kept := keep != ""; exists(t, name) != kept || strings.Contains(f.logged, dsn) != kept {
			t.Errorf("FERRYMQ_KEEP_DB=%q: exists %v, logged %q", keep, exists(t, name), f.logged)
		}
		if err := started(t).exec(t.Context(), "drop database if exists "+name); err != nil {
			t.Error(err)
		}
		started(t).kept.Store(false)
	}
}

// run runs tests of this package in a process of their own.
func run(t *testing.T, pattern string, env ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", pattern, "-test.v")
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestLeak(t *testing.T) {
	if os.Getenv(leakEnv) != "" {
		go func() { select {} }()
		return
	}
	t.Parallel()
	out, err := run(t, "^TestLeak$", leakEnv+"=1")
	if err == nil || !strings.Contains(out, "left goroutines behind") {
		t.Errorf("a leak went unnoticed (%v): %s", err, out)
	}
}

func TestOtherServer(t *testing.T) {
	if os.Getenv("FERRYMQ_TEST_DSN") != "" {
		t.Skip("already on another server")
	}
	t.Parallel()
	s := Durable(t)
	out, err := run(t, "^(TestNew|TestEmpty|TestKeep|TestDroppedWithOpenSession)$", "FERRYMQ_TEST_DSN="+s.DSN)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var left int
	if err := Pool(t, s.DSN, 1).QueryRow(t.Context(), "select count(*) from pg_database d where d.datname like 'ferrymq%'").Scan(&left); err != nil || left != 0 {
		t.Errorf("%d databases left (%v)", left, err)
	}
}

func TestSweep(t *testing.T) {
	t.Parallel()
	prefix := filepath.Join(t.TempDir(), "x-")
	for _, name := range []string{"dead", "live", "kept"} {
		if err := os.Mkdir(prefix+name, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	owner, err := lockFile(prefix+"live/owner", syscall.LOCK_EX)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = owner.Close() }()
	if err := (&home{dir: prefix + "kept"}).keep(); err != nil {
		t.Fatal(err)
	}
	if err := sweep(prefix); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(prefix + "*")
	if err != nil || fmt.Sprint(left) != fmt.Sprint([]string{prefix + "kept", prefix + "live"}) {
		t.Errorf("left: %v (%v)", left, err)
	}
}

func TestOwnDir(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "cache")
	for range 2 {
		if err := ownDir(dir); err != nil {
			t.Error(err)
		}
	}
	if err := os.Chmod(dir, 0o770); err != nil {
		t.Fatal(err)
	}
	if err := ownDir(dir); err == nil {
		t.Error("a directory open to others was accepted")
	}
	link := dir + "-link"
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	if err := ownDir(link); err == nil {
		t.Error("a link was accepted")
	}
}

func TestWithDatabase(t *testing.T) {
	t.Parallel()
	for _, dsn := range []string{
		"postgres://u:p@localhost:5433/postgres?sslmode=disable",
		"postgresql:///postgres?host=/run/x&user=u&port=5433",
		"host='/a b' port=5433 user=u dbname=postgres",
	} {
		config, err := pgx.ParseConfig(withDatabase(dsn, "other"))
		if err != nil || config.Database != "other" || config.User != "u" || config.Port != 5433 {
			t.Errorf("%s: %+v (%v)", dsn, config, err)
		}
	}
}
