package db

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	pgxuuid "github.com/vgarvardt/pgx-google-uuid/v5"
)

// ErrIsolation is returned by Check when the database forces another isolation level than READ COMMITTED, and a pooler in between
// leaves no session that could be set to it.
var ErrIsolation = errors.New("behind a connection pooler, default_transaction_isolation of the database and of the role must be \"read committed\"")

// ErrPooler means that a connection pooler has come between us and the database since the first connection. IsConnection is true of it:
// the next connection knows how to go through.
var ErrPooler = errors.New("a connection pooler answers now, connecting again")

// NewPool makes a pool of at most size connections to the database at dsn. It connects lazily.
// The server cancels statements longer than statement, and transactions that a stuck broker leaves idle.
// Sessions are in UTC whatever the server is set to; times are compared by the server's clock only.
//
// Behind a pooler that hands out server connections per transaction nothing of a session lasts. Then no setting is made
// for one, no statement is prepared by name, and it is the client who cancels statements that take too long.
func NewPool(ctx context.Context, dsn string, size int32, statement time.Duration) (*pgxpool.Pool, error) {
	return newPool(ctx, dsn, size, &way{statement: statement})
}

// NewFlights is NewPool for connections that carry flushes and nothing else: where that lasts, their sessions have the settings of one,
// which then need not be sent with each.
func NewFlights(ctx context.Context, dsn string, size int32, statement, lock time.Duration) (*pgxpool.Pool, error) {
	return newPool(ctx, dsn, size, &way{statement: statement, flight: &FlushSettingsParams{StatementTimeoutMs: milliseconds(statement), LockTimeoutMs: milliseconds(lock), Lasting: true}})
}

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// flightKey marks connections that have the settings of a flush.
const flightKey = "flight"

func newPool(ctx context.Context, dsn string, size int32, w *way) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	config.MaxConns = size
	config.MinIdleConns = min(2, size)
	config.MaxConnLifetime = time.Hour
	config.MaxConnLifetimeJitter = 10 * time.Minute
	config.HealthCheckPeriod = 15 * time.Second
	SessionSettings(config.ConnConfig)
	w.chosen = choosesMode(dsn)
	config.ConnConfig.Tracer = w
	config.BeforeConnect, config.AfterConnect = w.beforeConnect, w.afterConnect
	// Statements are planned once per connection. What was planned when a table was empty would scan it for as long as the connection
	// lives, if nobody analyzes: the size that a plan is made for is looked at anew.
	config.PrepareConn = func(ctx context.Context, conn *pgx.Conn) (bool, error) {
		data := conn.PgConn().CustomData()
		if w.pooled.Load() {
			return true, nil // planned each time
		}
		if at, ok := data["planned"].(time.Time); ok && time.Since(at) < planAge {
			return true, nil
		} else if data["planned"] = time.Now(); !ok {
			return true, nil
		}
		_, err := conn.Exec(ctx, "discard plans", pgx.QueryExecModeSimpleProtocol)
		return err == nil, nil // a dead connection is replaced
	}
	// After a failover all connections may be to a server that is a standby now: it keeps them, and would for as long as they live.
	var pool atomic.Pointer[pgxpool.Pool]
	reset := func() {
		if p := pool.Load(); p != nil {
			p.Reset()
		}
	}
	failed := config.ConnConfig.OnPgError
	config.ConnConfig.OnPgError = func(conn *pgconn.PgConn, err *pgconn.PgError) bool {
		if err.Code == readOnly {
			reset()
		}
		return failed(conn, err)
	}
	config.PingTimeout = probeTimeout
	w.watch.config, w.watch.reset = config.ConnConfig, reset
	p, err := pgxpool.NewWithConfig(ctx, config)
	pool.Store(p)
	return p, err
}

// planAge is how old the plans of a connection may get.
const planAge = time.Minute

// choosesMode says whether the connection string says how statements are sent: then that stands.
func choosesMode(dsn string) bool {
	c, err := pgconn.ParseConfig(dsn)
	if err != nil {
		return false
	}
	_, ok := c.RuntimeParams["default_query_exec_mode"]
	return ok
}

// way is what a pool knows about the way to its database, and who waits for a connection. pgxpool takes it as its tracer.
type way struct {
	statement time.Duration
	flight    *FlushSettingsParams // what its sessions are set to besides
	chosen    bool
	waiting   atomic.Int64
	pooled    atomic.Bool
	watch     watch
	pace      pace

	mu    sync.Mutex
	known bool // pooled says how it is, at least as of the first connection
}

// Pooled says whether something sits between conn and PostgreSQL that shares server connections: the process id that was
// announced to us is not the one of the process that works for us. What only passes bytes on keeps the two equal.
func Pooled(ctx context.Context, conn *pgx.Conn) (bool, error) {
	var pid uint32
	err := conn.QueryRow(ctx, "select pg_catalog.pg_backend_pid()", pgx.QueryExecModeExec).Scan(&pid)
	return pid != conn.PgConn().PID(), err
}

// ThroughPooler says whether the pool of NewPool goes through a pooler, which is known once it has connected.
func ThroughPooler(p *pgxpool.Pool) bool {
	w, ok := p.Config().ConnConfig.Tracer.(*way)
	return ok && w.pooled.Load()
}

// beforeConnect chooses how statements are sent. pgx wants to know before it connects, so the first time a connection of its own finds out.
func (w *way) beforeConnect(ctx context.Context, c *pgx.ConnConfig) error {
	if err := w.pace.wait(ctx); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.known {
		ctx, cancel := context.WithTimeout(ctx, 2*connectTimeout) // everybody waits for it
		defer cancel()
		try := c.Copy()
		try.Tracer = nil
		conn, err := pgx.ConnectConfig(ctx, try)
		w.pace.ended(err)
		if err != nil {
			return err
		}
		defer conn.Close(ctx)
		pooled, err := Pooled(ctx, conn)
		if err != nil {
			return err
		}
		w.pooled.Store(pooled)
		w.known = true
	}
	if w.pooled.Load() && !w.chosen {
		// The statement is parsed and planned each time, under no name. Of the modes that do so it is the one that knows the types of
		// parameters, and it asks for them once per connection.
		c.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	}
	if w.pooled.Load() {
		// At the end of its time a statement is cancelled in the server, whose answer says so and leaves the connection as it was.
		c.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
			return &canceller{conn: conn}
		}
	}
	return nil
}

// canceller cancels in the server what a caller does not wait for any more. Unlike pgx's own it never gives up a request that is on its way,
// also when the statement has ended meanwhile: PgBouncer 1.18 crashes when that connection is closed before the server has closed it.
type canceller struct {
	conn *pgconn.PgConn
	done chan struct{}
}

// How long a statement may take to end after a request to cancel it, and the request itself.
const (
	cancelled       = 2 * time.Second
	cancelRequested = 5 * time.Second
)

func (c *canceller) HandleCancel(context.Context) {
	_ = c.conn.Conn().SetDeadline(time.Now().Add(cancelled))
	c.done = make(chan struct{})
	go func() {
		defer close(c.done)
		ctx, cancel := context.WithTimeout(context.Background(), cancelRequested)
		defer cancel()
		_ = c.conn.CancelRequest(ctx) // the deadline helps where it fails
		time.Sleep(cancelled / 20)    // the signal is sent, but perhaps not noticed: it must not hit the next statement
	}()
}

func (c *canceller) HandleUnwatchAfterCancel() {
	<-c.done
	_ = c.conn.Conn().SetDeadline(time.Time{})
}

// afterConnect makes the settings of the session, if it is one of our own.
func (w *way) afterConnect(ctx context.Context, conn *pgx.Conn) error {
	// Without it pgx sends every UUID through its text form.
	pgxuuid.Register(conn.TypeMap())
	own, err := Settle(ctx, conn, w.statement)
	if err == nil && own && w.flight != nil {
		conn.PgConn().CustomData()[flightKey] = true
		err = New(conn).FlushSettings(ctx, *w.flight)
	}
	if err != nil || own {
		return err
	}
	if !w.pooled.Swap(true) && !w.chosen {
		return ErrPooler // this connection would prepare statements by name
	}
	return nil
}

// Settle makes the settings of a new session, whatever the database or the role is set to, and says whether it is one of our own. One that
// a pooler lends is left as it is. A statement may then take so long.
func Settle(ctx context.Context, conn *pgx.Conn, statement time.Duration) (own bool, err error) {
	pid := conn.PgConn().PID()
	var backend uint32
	// The statements rely on each one seeing what was committed before it began, and compiling the larger ones takes longer than they run.
	err = conn.QueryRow(ctx, `select b.pid, case when b.pid = $1::bigint then
			set_config('statement_timeout', $2::text, false) || set_config('lock_timeout', '0', false) ||
			set_config('idle_in_transaction_session_timeout', '5s', false) ||
			set_config('jit', 'off', false) || set_config('default_transaction_isolation', 'read committed', false) end
		from (select pg_catalog.pg_backend_pid() as pid) b`, pgx.QueryExecModeExec, int64(pid), strconv.FormatInt(statement.Milliseconds(), 10)).Scan(&backend, nil)
	return backend == pid, err
}

// TraceAcquireStart counts who waits.
func (w *way) TraceAcquireStart(ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireStartData) context.Context {
	w.waiting.Add(1)
	return ctx
}

// TraceAcquireEnd is the end of the wait.
func (w *way) TraceAcquireEnd(context.Context, *pgxpool.Pool, pgxpool.TraceAcquireEndData) {
	w.waiting.Add(-1)
}

// TraceConnectStart is the start of an attempt to connect.
func (w *way) TraceConnectStart(ctx context.Context, _ pgx.TraceConnectStartData) context.Context {
	return ctx
}

// TraceConnectEnd is told how it ended.
func (w *way) TraceConnectEnd(_ context.Context, d pgx.TraceConnectEndData) { w.pace.ended(d.Err) }

type cancelKey struct{}

// TraceQueryStart bounds a statement where the server has not been told to.
func (w *way) TraceQueryStart(ctx context.Context, conn *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	if !w.pooled.Load() {
		w.watch.begin(conn)
		return ctx
	}
	ctx, cancel := context.WithTimeout(ctx, w.statement)
	return context.WithValue(ctx, cancelKey{}, cancel)
}

// TraceQueryEnd releases what TraceQueryStart took.
func (w *way) TraceQueryEnd(ctx context.Context, conn *pgx.Conn, _ pgx.TraceQueryEndData) {
	w.watch.end(conn)
	if cancel, ok := ctx.Value(cancelKey{}).(context.CancelFunc); ok {
		cancel()
	}
}

// Waiting is how many wait for a connection of the pool at the moment.
func Waiting(p *pgxpool.Pool) int64 {
	if w, ok := p.Config().ConnConfig.Tracer.(*way); ok {
		return w.waiting.Load()
	}
	return 0
}

// SessionSettings are what every connection of a broker needs, pooled or not.
func SessionSettings(c *pgx.ConnConfig) {
	overNetwork(c)
	c.RuntimeParams["timezone"] = "UTC"
	if c.RuntimeParams["application_name"] == "" {
		c.RuntimeParams["application_name"] = "ferrymq"
	}
	failed := c.OnPgError
	c.OnPgError = func(conn *pgconn.PgConn, err *pgconn.PgError) bool { // false closes the connection
		return err.Code != readOnly && (failed == nil || failed(conn, err))
	}
}

// readOnly is the code of a server that takes no writes, such as a standby.
const readOnly = "25006"

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

// Probe asks whether the database answers, and takes writes. If it does not take them, the connections of the pool go: another server may.
func Probe(ctx context.Context, pool *pgxpool.Pool) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	var only bool
	if err := pool.QueryRow(ctx, "select current_setting('transaction_read_only')::boolean", pgx.QueryExecModeExec).Scan(&only); err != nil {
		return err
	}
	if only {
		pool.Reset()
		return ErrReadOnly
	}
	return nil
}

// ErrReadOnly means that the server takes no writes, such as a standby.
var ErrReadOnly = errors.New("the database is read-only")

func unexpected(err error) bool { return errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) }

// ErrAcquire means that no connection could be had in time. IsConnection is true of it.
var ErrAcquire = errors.New("no database connection in time")

// acquireTimeout is how long Patient waits for a connection.
const acquireTimeout = 5 * time.Second

// Patient is a pool whose callers wait for a connection only so long: then the error is ErrAcquire, whatever their own deadline.
type Patient struct {
	Pool *pgxpool.Pool
	// Room holds an element for each connection that its callers have, at most as many as it has room for; nil: the whole pool.
	// Who has one must not ask for another.
	Room chan struct{}
}

// patientConn is a connection and its place in the room.
type patientConn struct {
	*pgxpool.Conn
	room chan struct{}
}

func (c *patientConn) Release() {
	c.Conn.Release()
	if c.room != nil {
		<-c.room
	}
}

func (p Patient) acquire(ctx context.Context) (*patientConn, error) {
	soon, cancel := context.WithTimeout(ctx, acquireTimeout)
	defer cancel()
	err := error(nil)
	if p.Room != nil {
		select {
		case p.Room <- struct{}{}:
		case <-soon.Done():
			err = soon.Err()
		}
	}
	var conn *pgxpool.Conn
	if err == nil {
		if conn, err = p.Pool.Acquire(soon); err == nil {
			return &patientConn{conn, p.Room}, nil
		}
		if p.Room != nil {
			<-p.Room
		}
	}
	if ctx.Err() == nil && soon.Err() != nil {
		err = ErrAcquire
	}
	return nil, err
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
	conn *patientConn
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
	conn *patientConn
}

func (r patientRow) Scan(dst ...any) error {
	defer r.conn.Release()
	return r.Row.Scan(dst...)
}

type failedRow struct{ err error }

func (r failedRow) Scan(...any) error { return r.err }

type patientTx struct {
	pgx.Tx
	conn *patientConn
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
	// Also when it is because its caller has gone: else the connection would go with it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), acquireTimeout)
	defer cancel()
	return t.Tx.Rollback(ctx)
}
