// Package schema holds FerryMQ's migrations: plain goose SQL files, the only definition of its tables.
// They are embedded for brokers that migrate at start, and usable with the goose command line as they are.
package schema

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"embed"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

//go:embed *.sql
var files embed.FS

// Table is goose's version table. It lives in FerryMQ's own PostgreSQL schema, next to what it describes.
const Table = "ferrymq.schema_version"

// While a migration waits for a lock, brokers queue up behind it, and give up after 0.5 s: it gives up sooner, and leaves them most of the time.
const (
	lockTimeout = "'200ms'"
	retryAfter  = 2 * time.Second
)

// Migrate applies the migrations that are missing in the database at dsn.
// Any number of brokers may call it at once: one applies, the others wait for it.
// It never touches a database whose version is newer than Known.
func Migrate(ctx context.Context, dsn string) error {
	conn, err := open(dsn)
	if err != nil {
		return err
	}
	defer conn.Close()
	// "If not exists" needs the right to create schemas even if it does.
	if _, err := conn.ExecContext(ctx, "do $$ begin if to_regnamespace('ferrymq') is null then create schema ferrymq; end if; end $$"); err != nil && !alreadyMade(err) {
		return fmt.Errorf("create schema ferrymq: %w", err)
	}
	p, err := provider(conn)
	if err != nil {
		return err
	}
	return patient(ctx, func() error {
		_, err := p.Up(ctx)
		return err
	})
}

// Revert takes back all migrations above version to, the newest first, with what their tables hold. Brokers of that version can run then; this one
// would apply them again. Version 0 is a database without the schema.
func Revert(ctx context.Context, dsn string, to int64) error {
	conn, err := open(dsn)
	if err != nil {
		return err
	}
	defer conn.Close()
	p, err := provider(conn)
	if err != nil {
		return err
	}
	return patient(ctx, func() error {
		if _, err := p.DownTo(ctx, max(to, 1)); err != nil || to > 0 {
			return err
		}
		// The first one takes the table of versions with it, which goose would still write to.
		tx, err := conn.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "drop schema ferrymq cascade"); err != nil {
			return errors.Join(err, tx.Rollback())
		}
		return tx.Commit()
	})
}

// Step is a migration that this binary knows.
type Step struct {
	Version int64
	Name    string
}

// Steps are all migrations, the oldest first.
func Steps() (all []Step) {
	entries, err := files.ReadDir(".")
	if err != nil {
		panic(err) // embedded: cannot fail
	}
	for _, e := range entries {
		if v, err := goose.NumericComponent(e.Name()); err == nil {
			all = append(all, Step{v, e.Name()})
		}
	}
	return all
}

func open(dsn string) (*sql.DB, error) {
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeExec // through a pooler, names of statements do not last
	return sql.OpenDB(connector{stdlib.GetConnector(*config)}), nil
}

// patient tries again when a lock could not be had.
func patient(ctx context.Context, do func() error) error {
	for {
		err := do()
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "55P03" { // lock_not_available
			if err != nil {
				return fmt.Errorf("migrate: %w", err)
			}
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(retryAfter):
		}
	}
}

func provider(conn *sql.DB) (*goose.Provider, error) {
	return goose.NewProvider(goose.DialectPostgres, conn, files,
		goose.WithSessionLocker(&locker{db: conn}), goose.WithDisableGlobalRegistry(true), goose.WithTableName(Table))
}

// connector makes connections whose transactions wait for a lock only briefly: traffic queues up behind a waiting ACCESS EXCLUSIVE.
// The time is set in each transaction, because a pooler refuses it at the start of a connection.
type connector struct{ driver.Connector }

// Connect is driver.Connector's.
func (c connector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return hasty{conn.(*stdlib.Conn)}, nil
}

type hasty struct{ *stdlib.Conn }

// BeginTx is driver.ConnBeginTx's.
func (h hasty) BeginTx(ctx context.Context, o driver.TxOptions) (driver.Tx, error) {
	tx, err := h.Conn.BeginTx(ctx, o)
	if err != nil {
		return nil, err
	}
	if _, err := h.Conn.ExecContext(ctx, "set local lock_timeout = "+lockTimeout, nil); err != nil {
		return nil, errors.Join(err, tx.Rollback())
	}
	return tx, nil
}

// locker lets one broker migrate at a time. The lock is one of a transaction that stays open meanwhile, on a connection of its own:
// that holds through a pooler as well, where locks of sessions end up with others.
type locker struct {
	db *sql.DB
	tx *sql.Tx
}

// SessionLock waits for the lock, with no transaction open in between: some changes of a schema wait for all that are.
func (l *locker) SessionLock(ctx context.Context, _ *sql.Conn) error {
	for {
		tx, err := l.db.BeginTx(context.WithoutCancel(ctx), nil)
		if err != nil {
			return err
		}
		var got bool
		// The lock is goose's own: brokers that take it for their session, and goose's command line, keep out too.
		err = tx.QueryRowContext(ctx, "select pg_try_advisory_xact_lock($1) from set_config('idle_in_transaction_session_timeout', '0', true)", lock.DefaultLockID).Scan(&got)
		if err == nil && got {
			l.tx = tx
			return nil
		}
		if err = errors.Join(err, tx.Rollback()); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

// SessionUnlock gives the lock back. If that fails, the connection is broken, and the lock gone with it.
func (l *locker) SessionUnlock(context.Context, *sql.Conn) error {
	_ = l.tx.Rollback()
	return nil
}

// Two brokers that create the schema at the same moment: the loser sees a unique violation in the catalog.
func alreadyMade(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (pg.Code == "23505" || pg.Code == "42P06")
}

// Known is the newest schema version this binary was built with.
func Known() int64 {
	steps := Steps()
	return steps[len(steps)-1].Version
}

// Querier is what Applied needs of a connection or pool.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Applied is the schema version of a database, 0 when nothing has been applied yet.
func Applied(ctx context.Context, q Querier) (int64, error) {
	var version int64
	err := q.QueryRow(ctx, "select coalesce(max(version_id), 0) from "+Table+" where is_applied").Scan(&version)
	var pg *pgconn.PgError
	if errors.As(err, &pg) && (pg.Code == "42P01" || pg.Code == "3F000") { // undefined_table, invalid_schema_name
		return 0, nil
	}
	return version, err
}
