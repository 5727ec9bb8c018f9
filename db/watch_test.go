package db_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/db"
	"ferrymq/dbtest"
)

// TestLongStatementIsLeftAlone: a statement that takes longer than the server is trusted without asking is not taken for one whose answer
// was lost, also if the server does not say what its sessions do.
func TestLongStatementIsLeftAlone(t *testing.T) {
	t.Parallel()
	for _, track := range []string{"on", "off"} {
		t.Run("track_activities "+track, func(t *testing.T) {
			t.Parallel()
			dsn := dbtest.New(t)
			admin := dbtest.Pool(t, dsn, 1)
			if _, err := admin.Exec(t.Context(), `do $$ begin execute format('alter database %I set track_activities = `+track+`', current_database()); end $$`); err != nil {
				t.Fatal(err)
			}
			pool := must[*pgxpool.Pool](t)(db.NewPool(t.Context(), dsn, 1, time.Minute))
			defer pool.Close()
			if _, err := pool.Exec(t.Context(), "select pg_sleep(7)"); err != nil {
				t.Errorf("a statement of 7 s: %v", err)
			}
		})
	}
}
