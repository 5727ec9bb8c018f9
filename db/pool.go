package db

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	pgxuuid "github.com/vgarvardt/pgx-google-uuid/v5"
)

// ErrIsolation is returned by Connect when the database forces another isolation level than READ COMMITTED:
// the statements rely on each one seeing what was committed before it began.
var ErrIsolation = errors.New("default_transaction_isolation must be \"read committed\"")

// NewPool makes a pool of at most size connections to the database at dsn. It connects lazily.
// The server cancels statements longer than statement, and transactions that a stuck broker leaves idle.
// Sessions are in UTC whatever the server is set to; times are compared by the server's clock only.
func NewPool(ctx context.Context, dsn string, size int32, statement time.Duration) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	config.MaxConns = size
	config.MinIdleConns = min(2, size)
	config.MaxConnLifetime = time.Hour
	config.MaxConnLifetimeJitter = 10 * time.Minute
	config.HealthCheckPeriod = 15 * time.Second
	if config.ConnConfig.ConnectTimeout == 0 {
		config.ConnConfig.ConnectTimeout = 5 * time.Second
	}
	SessionSettings(config.ConnConfig)
	config.ConnConfig.Tracer = &acquires{}
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		// Without it pgx sends every UUID through its text form.
		pgxuuid.Register(conn.TypeMap())
		// Compiling the larger statements takes longer than they run.
		_, err := conn.Exec(ctx, "select set_config('statement_timeout', $1, false), set_config('idle_in_transaction_session_timeout', '60s', false), set_config('jit', 'off', false)",
			strconv.FormatInt(statement.Milliseconds(), 10))
		return err
	}
	return pgxpool.NewWithConfig(ctx, config)
}

// acquires counts who waits for a connection of a pool. pgx takes it as a tracer of queries, which it does not look at.
type acquires struct{ waiting atomic.Int64 }

func (a *acquires) TraceAcquireStart(ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireStartData) context.Context {
	a.waiting.Add(1)
	return ctx
}
func (a *acquires) TraceAcquireEnd(context.Context, *pgxpool.Pool, pgxpool.TraceAcquireEndData) {
	a.waiting.Add(-1)
}
func (a *acquires) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (a *acquires) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// Waiting is how many wait for a connection of the pool at the moment.
func Waiting(p *pgxpool.Pool) int64 {
	if a, ok := p.Config().ConnConfig.Tracer.(*acquires); ok {
		return a.waiting.Load()
	}
	return 0
}

// SessionSettings are what every connection of a broker needs, pooled or not.
func SessionSettings(c *pgx.ConnConfig) {
	c.RuntimeParams["timezone"] = "UTC"
	if c.RuntimeParams["application_name"] == "" {
		c.RuntimeParams["application_name"] = "ferrymq"
	}
}

// Check refuses a server that the statements are not written for.
func Check(ctx context.Context, pool *pgxpool.Pool) error {
	var version int
	var isolation string
	err := pool.QueryRow(ctx, "select current_setting('server_version_num')::int, current_setting('default_transaction_isolation')").Scan(&version, &isolation)
	if err != nil {
		return err
	}
	if version < 150000 {
		return fmt.Errorf("PostgreSQL 15 or newer is needed, this server is %d.%d", version/10000, version%10000)
	}
	if isolation != "read committed" {
		return fmt.Errorf("%w, it is %q", ErrIsolation, isolation)
	}
	return nil
}

func unexpected(err error) bool { return errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) }

// ErrAcquire means that no connection could be had in time. IsConnection is true of it.
var ErrAcquire = errors.New("no database connection in time")

// acquireTimeout is how long Patient waits for a connection.
const acquireTimeout = 5 * time.Second

// Patient is a pool whose callers wait for a connection only so long: then the error is ErrAcquire, whatever their own deadline.
type Patient struct{ Pool *pgxpool.Pool }

func (p Patient) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	soon, cancel := context.WithTimeout(ctx, acquireTimeout)
	defer cancel()
	conn, err := p.Pool.Acquire(soon)
	if err != nil && ctx.Err() == nil && soon.Err() != nil {
		err = ErrAcquire
	}
	return conn, err
}

// Exec is pgxpool.Pool.Exec.
func (p Patient) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	conn, err := p.acquire(ctx)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	defer conn.Release()
	return conn.Exec(ctx, sql, args...)
}

// Query is pgxpool.Pool.Query.
func (p Patient) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	conn, err := p.acquire(ctx)
	if err != nil {
		return nil, err
	}
	rows, err := conn.Query(ctx, sql, args...)
	if err != nil {
		conn.Release()
		return nil, err
	}
	return &patientRows{rows, conn}, nil
}

// QueryRow is pgxpool.Pool.QueryRow.
func (p Patient) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	conn, err := p.acquire(ctx)
	if err != nil {
		return failedRow{err}
	}
	return patientRow{conn.QueryRow(ctx, sql, args...), conn}
}

// Begin is pgxpool.Pool.Begin.
func (p Patient) Begin(ctx context.Context) (pgx.Tx, error) { return p.BeginTx(ctx, pgx.TxOptions{}) }

// Snapshot are the options of a transaction whose statements all read the same moment. It takes no locks and waits for nobody.
var Snapshot = pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}

// BeginTx is pgxpool.Pool.BeginTx.
func (p Patient) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	conn, err := p.acquire(ctx)
	if err != nil {
		return nil, err
	}
	tx, err := conn.BeginTx(ctx, options)
	if err != nil {
		conn.Release()
		return nil, err
	}
	return &patientTx{tx, conn}, nil
}

type patientRows struct {
	pgx.Rows
	conn *pgxpool.Conn
}

func (r *patientRows) Next() bool {
	if r.Rows.Next() {
		return true
	}
	r.Close()
	return false
}

func (r *patientRows) Close() {
	r.Rows.Close()
	if r.conn != nil {
		r.conn.Release()
		r.conn = nil
	}
}

type patientRow struct {
	pgx.Row
	conn *pgxpool.Conn
}

func (r patientRow) Scan(dst ...any) error {
	defer r.conn.Release()
	return r.Row.Scan(dst...)
}

type failedRow struct{ err error }

func (r failedRow) Scan(...any) error { return r.err }

type patientTx struct {
	pgx.Tx
	conn *pgxpool.Conn
}

func (t *patientTx) release() {
	if t.conn != nil {
		t.conn.Release()
		t.conn = nil
	}
}

func (t *patientTx) Commit(ctx context.Context) error {
	defer t.release()
	return t.Tx.Commit(ctx)
}

func (t *patientTx) Rollback(ctx context.Context) error {
	defer t.release()
	return t.Tx.Rollback(ctx)
}
