package catalog_test

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/dbtest"
)

// Ids of projects, queues and groups are int: what is there already uses up none of them, however often and by however many brokers it is
// named again. (Those of partitions, jobs and the outbox are bigint.)
func TestIDsAreNotUsedUp(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	pool, ctx := dbtest.Pool(t, dsn, 2), t.Context()
	used := func() int64 {
		return number(t, pool, `select sum(coalesce(pg_sequence_last_value(s.oid), 0))::bigint from pg_class s join pg_namespace n on n.oid = s.relnamespace
			where n.nspname = 'ferrymq' and s.relkind = 'S' and s.relname in ('projects_id_seq', 'queues_id_seq', 'groups_id_seq', 'partitions_id_seq')`)
	}
	scope := catalog.Scope{Namespace: "s"}
	all := func() {
		e := engine(t, dsn) // with nothing in its memory
		c := e.Catalog
		push(t, e, "q", "p", "1")
		q, err := c.EnsureQueue(ctx, "q")
		if err != nil {
			t.Fatal(err)
		}
		for _, namespace := range []string{"s", "elsewhere", "s"} { // each time it comes into a scope its groups are made, if they are not there
			if _, err := c.Configure(ctx, "q", func(o *catalog.Queue) error { o.Namespace = namespace; return nil }); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := c.Register(ctx, q.ID, "g", catalog.All()); err != nil {
			t.Fatal(err)
		}
		if err := c.Discover(ctx, scope, "d", catalog.All(), time.Now()); err != nil {
			t.Fatal(err)
		}
		s, err := c.EnsureStream(ctx, "stream")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Subscribe(ctx, s, "sub", nil, func(*catalog.Policy) error { return nil }); err != nil {
			t.Fatal(err)
		}
		if _, err := db.New(pool).ProjectCreate(ctx, db.ProjectCreateParams{Name: "other"}); err != nil && !errors.Is(err, pgx.ErrNoRows) {
			t.Fatal(err)
		}
	}
	all()
	before := used()
	all()
	all()
	if after := used(); after != before {
		t.Errorf("%d ids were used up for what was there", after-before)
	}
}
