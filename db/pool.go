package db

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	pgxuuid "github.com/vgarvardt/pgx-google-uuid/v5"
)

// ErrIsolation is returned by Connect when the database forces another isolation level than READ COMMITTED:
// the statements rely on each one seeing what was committed before it began.
var ErrIsolation = errors.New("default_transaction_isolation must be \"read committed\"")

// NewPool makes a pool of at most size connections to the database at dsn. It connects lazily.
// Sessions are in UTC whatever the server is set to; times are compared by the server's clock only.
func NewPool(ctx context.Context, dsn string, size int32) (*pgxpool.Pool, error) {
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
	config.AfterConnect = func(_ context.Context, conn *pgx.Conn) error {
		// Without it pgx sends every UUID through its text form.
		pgxuuid.Register(conn.TypeMap())
		return nil
	}
	return pgxpool.NewWithConfig(ctx, config)
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
