package schema_test

import (
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"ferrymq/dbtest"
	"ferrymq/schema"
)

func TestMain(m *testing.M) { dbtest.Main(m) }

// TestDownAndUp: every migration can be taken back, one after the other, and applied again.
func TestDownAndUp(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	conn := stdlib.OpenDB(*config)
	defer conn.Close()
	p, err := goose.NewProvider(goose.DialectPostgres, conn, os.DirFS("."), goose.WithTableName(schema.Table))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.DownTo(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
}
