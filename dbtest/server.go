package dbtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/localpg"
	"ferrymq/schema"
)

// settings trade safety, of which a test needs none, for speed.
var settings = map[string]string{
	"fsync":              "off",
	"synchronous_commit": "off",
	"full_page_writes":   "off",
	"shared_buffers":     "64MB",
	"max_connections":    "300",
	"max_wal_size":       "256MB", // it may lie in memory
}

// server is where the databases of this process live.
type server struct {
	dsn      string
	own      *localpg.Server // nil if it is not ours
	admin    *pgxpool.Pool
	prefix   string // of database names, unique to this process
	created  atomic.Int64
	kept     atomic.Bool
	template func() (string, error)
	pooler   *Pooler // nil until Through asks for it
}

var (
	opened atomic.Pointer[server]
	shared = sync.OnceValues(open)
)

// open starts or finds the server.
func open() (*server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	s := &server{dsn: os.Getenv("FERRYMQ_TEST_DSN"), prefix: fmt.Sprintf("ferrymq_test_%x", rand.Text()[:8])}
	s.template = sync.OnceValues(s.makeTemplate)
	if s.dsn == "" {
		h, err := processHome()
		if err != nil {
			return nil, err
		}
		dir, err := h.cluster("c-*")
		if err != nil {
			return nil, err
		}
		if s.own, err = localpg.Start(ctx, localpg.Options{Dir: dir, Settings: settings}); err != nil {
			return nil, err
		}
		s.dsn = s.own.DSN
	}
	opened.Store(s)
	config, err := pgxpool.ParseConfig(s.dsn)
	if err != nil {
		return nil, err
	}
	config.MaxConns = 4
	if s.admin, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return nil, err
	}
	return s, s.admin.Ping(ctx)
}

// makeTemplate migrates a database once. Nobody may be connected to it while it
// is cloned, so nobody can be afterwards.
func (s *server) makeTemplate() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	name := s.prefix + "_template"
	if err := s.exec(ctx, "create database "+name+" template template0 strategy file_copy"); err != nil {
		return "", err
	}
	if err := schema.Migrate(ctx, withDatabase(s.dsn, name)); err != nil {
		return "", err
	}
	if err := s.exec(ctx, "alter database "+name+" allow_connections false"); err != nil {
		return "", err
	}
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		var sessions int
		err := s.admin.QueryRow(ctx, "select count(*) from pg_stat_activity a where a.datname = $1", name).Scan(&sessions)
		if err != nil || sessions == 0 {
			return name, err
		}
		<-tick.C
	}
}

// create clones a database for one test.
func (s *server) create(t testing.TB, template string) string {
	t.Helper()
	name := fmt.Sprintf("%s_%d", s.prefix, s.created.Add(1))
	dsn := withDatabase(s.dsn, name)
	if err := s.exec(t.Context(), "create database "+name+" template "+template+" strategy file_copy"); err != nil {
		t.Fatalf("dbtest: %v%s", err, s.log())
	}
	t.Cleanup(func() {
		if t.Failed() && os.Getenv("FERRYMQ_KEEP_DB") != "" {
			s.kept.Store(true)
			t.Logf("dbtest: kept the database: %s", dsn)
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := s.exec(ctx, "drop database if exists "+name+" with (force)"); err != nil {
			t.Errorf("dbtest: %v%s", err, s.log())
		}
	})
	return dsn
}

// exec runs one statement that takes no parameters. The simple protocol spares
// a round trip and a cached plan for a text that never comes back.
func (s *server) exec(ctx context.Context, sql string) error {
	if _, err := s.admin.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("%s: %w", sql, err)
	}
	return nil
}

// log is what the server said, if it is ours and has died.
func (s *server) log() string {
	if s.own == nil || s.own.Err() == nil {
		return ""
	}
	return "\n" + s.own.Log()
}

// closeAdmin drops what outlives the tests and ends our own connections, whose
// goroutines would count as leaks.
func closeAdmin() {
	s := opened.Load()
	if s == nil || s.admin == nil {
		return
	}
	if s.own == nil {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := s.exec(ctx, "drop database if exists "+s.prefix+"_template with (force)"); err != nil {
			fmt.Fprintln(os.Stderr, "dbtest:", err)
		}
	}
	if s.pooler != nil {
		s.pooler.Stop()
	}
	s.admin.Close()
}

// stop ends what this process has started and removes its files.
func stop() error {
	var died error
	s := opened.Load()
	if s != nil && s.own != nil {
		s.own.Stop()
		if died = s.own.Err(); died != nil {
			died = fmt.Errorf("%w\n%s", died, s.own.Log())
		}
	}
	if !homeUsed.Load() {
		return died
	}
	h, err := processHome()
	if err != nil {
		return errors.Join(died, err)
	}
	if s == nil || s.own == nil || !s.kept.Load() {
		return errors.Join(died, h.remove())
	}
	bin, _, err := localpg.Installed(context.Background())
	user := "yourself"
	if s.own.User != "" {
		user = s.own.User
	}
	fmt.Fprintf(os.Stderr, "dbtest: databases of failed tests are kept in %s (remove it when done). To look at them, run as %s:\n\t%s -D %s -k %s -c listen_addresses=\n",
		h.dir, user, filepath.Join(bin, "postgres"), filepath.Join(s.own.Dir, "pg"), filepath.Join(s.own.Dir, "s"))
	return errors.Join(died, err, h.keep())
}
