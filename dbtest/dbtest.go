// Package dbtest gives tests real databases.
//
// Each test process starts one PostgreSQL of its own when a test first asks for
// a database, and each test clones its databases from a template that has been
// migrated once. Nothing is shared between tests, so all of them may be
// parallel, may NOTIFY, and may look at pg_stat_activity. The server does not
// sync to disk; tests that kill it use [Durable].
//
// Three environment variables change this. FERRYMQ_TEST_DSN names a superuser
// connection to a server that already runs, to be used instead.
// FERRYMQ_KEEP_DB, if not empty, keeps the databases of failed tests.
// FERRYMQ_TEST_POOLER, if not empty, puts a PgBouncer between what is tested
// and the server, see [Through].
//
// A package that uses dbtest says so once:
//
//	func TestMain(m *testing.M) { dbtest.Main(m) }
package dbtest

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"ferrymq/localpg"
)

// patience bounds what should take milliseconds, on a machine that is busy.
const patience = 30 * time.Second

var mainCalled bool

// Main runs the tests of a package and exits. Tests that pass but leave
// goroutines behind fail the package. It belongs into TestMain. What is given
// as after runs once the last test has ended.
func Main(m *testing.M, after ...func()) {
	mainCalled = true
	code := m.Run()
	for _, f := range after {
		f()
	}
	closeAdmin()
	if code == 0 {
		err := goleak.Find(
			goleak.IgnoreAnyFunction("ferrymq/localpg.(*Server).wait"),
			goleak.IgnoreAnyFunction("ferrymq/localpg.(*Server).readLog"),
		)
		if err != nil {
			fmt.Fprintln(os.Stderr, "dbtest: the tests passed, but left goroutines behind:", err)
			code = 1
		}
	}
	if err := stop(); err != nil {
		fmt.Fprintln(os.Stderr, "dbtest:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// New returns the connection string of a fresh database with the current
// schema. It is dropped when the test ends.
func New(t testing.TB) string {
	t.Helper()
	s := started(t)
	template, err := s.template()
	if err != nil {
		t.Fatalf("dbtest: template database: %v", err)
	}
	return s.create(t, template)
}

// Empty returns the connection string of a fresh database with nothing in it.
// It is dropped when the test ends.
func Empty(t testing.TB) string {
	t.Helper()
	return started(t).create(t, "template0")
}

func started(t testing.TB) *server {
	t.Helper()
	if !mainCalled {
		t.Fatal("dbtest: this package needs a TestMain that calls dbtest.Main")
	}
	s, err := shared()
	if err != nil {
		t.Fatalf("dbtest: %v", err)
	}
	return s
}

// Pool connects to a database of New or Empty with at most size connections,
// in UTC, and closes them when the test ends.
func Pool(t testing.TB, dsn string, size int) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = int32(size)
	if strings.HasSuffix(config.ConnConfig.Host, poolerSuffix) { // as the product does
		config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	}
	config.ConnConfig.RuntimeParams["timezone"] = "UTC"
	config.ConnConfig.RuntimeParams["application_name"] = t.Name()[:min(len(t.Name()), 63)]
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		closed := make(chan struct{})
		go func() {
			pool.Close()
			close(closed)
		}()
		select {
		case <-closed:
		case <-time.After(patience):
			t.Errorf("dbtest: %d connections were not given back to the pool", pool.Stat().AcquiredConns())
		}
	})
	return pool
}

// WaitBlocked returns when at least n sessions of the pool's database wait for
// a lock, and fails the test if that does not happen. It needs a connection of
// the pool for itself.
func WaitBlocked(t testing.TB, pool *pgxpool.Pool, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	blocked := -1
	for {
		err := pool.QueryRow(ctx, `select count(*) from pg_stat_activity a
			where a.datname = current_database() and a.wait_event_type = 'Lock'`).Scan(&blocked)
		if err == nil && blocked >= n {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("dbtest: %d sessions wait for a lock, want %d (last error: %v)", blocked, n, err)
		case <-tick.C:
			if err != nil && ctx.Err() == nil {
				t.Fatalf("dbtest: count blocked sessions: %v", err)
			}
		}
	}
}

// DataDir returns a directory for localpg.Start with a cluster that is new and
// stopped, which saves the time of initdb. Unlike t.TempDir it also serves
// tests that run as root, whose PostgreSQL runs as somebody else. It is
// removed when the test ends.
func DataDir(t testing.TB) string {
	t.Helper()
	if !mainCalled {
		t.Fatal("dbtest: this package needs a TestMain that calls dbtest.Main")
	}
	h, err := processHome()
	if err != nil {
		t.Fatalf("dbtest: %v", err)
	}
	dir, err := h.cluster("d-*")
	if err != nil {
		t.Fatalf("dbtest: %v", err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("dbtest: %v", err)
		}
	})
	return dir
}

// Durable starts a PostgreSQL for this test alone, with the settings that a
// broker runs on: what it has committed survives being killed. It is stopped
// when the test ends. A test that kills it calls Stop and then localpg.Start
// with the same Dir.
func Durable(t testing.TB) *localpg.Server {
	t.Helper()
	dir := DataDir(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := localpg.Start(ctx, localpg.Options{Dir: dir})
	if err != nil {
		t.Fatalf("dbtest: %v", err)
	}
	t.Cleanup(s.Stop)
	return s
}

// withDatabase is dsn, in either of its forms, with another database.
func withDatabase(dsn, name string) string {
	if strings.HasPrefix(dsn, "postgres://") || strings.HasPrefix(dsn, "postgresql://") {
		if u, err := url.Parse(dsn); err == nil {
			u.Path = "/" + name
			return u.String()
		}
	}
	return dsn + " dbname=" + name // the last one counts
}
