// Package schema holds FerryMQ's migrations: plain goose SQL files, the only definition of its tables.
// They are embedded for brokers that migrate at start, and usable with the goose command line as they are.
package schema

import (
	"context"
	"database/sql"
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

// Migrate applies the migrations that are missing in the database at dsn.
// Any number of brokers may call it at once: one applies, the others wait for it.
// It never touches a database whose version is newer than Known.
func Migrate(ctx context.Context, dsn string) error {
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		return err
	}
	// A migration waits for a lock only briefly: traffic queues up behind a waiting ACCESS EXCLUSIVE.
	config.RuntimeParams["lock_timeout"] = "2s"
	conn := stdlib.OpenDB(*config)
	defer conn.Close()
	if _, err := conn.ExecContext(ctx, "create schema if not exists ferrymq"); err != nil && !alreadyMade(err) {
		return fmt.Errorf("create schema ferrymq: %w", err)
	}
	p, err := provider(conn)
	if err != nil {
		return err
	}
	for {
		_, err = p.Up(ctx)
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "55P03" { // lock_not_available
			break
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(500 * time.Millisecond):
		}
	}
	if err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	return nil
}

func provider(conn *sql.DB) (*goose.Provider, error) {
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(1, 300))
	if err != nil {
		return nil, err
	}
	return goose.NewProvider(goose.DialectPostgres, conn, files,
		goose.WithSessionLocker(locker), goose.WithDisableGlobalRegistry(true), goose.WithTableName(Table))
}

// Two brokers that create the schema at the same moment: the loser sees a unique violation in the catalog.
func alreadyMade(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (pg.Code == "23505" || pg.Code == "42P06")
}

// Known is the newest schema version this binary was built with.
func Known() int64 {
	entries, err := files.ReadDir(".")
	if err != nil {
		panic(err) // embedded: cannot fail
	}
	var newest int64
	for _, e := range entries {
		if v, err := goose.NumericComponent(e.Name()); err == nil && v > newest {
			newest = v
		}
	}
	return newest
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
