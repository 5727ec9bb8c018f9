package catalog_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"ferrymq/catalog"
	"ferrymq/dbtest"
)

// TestDeadlocked: whoever makes or changes something and loses a deadlock does it again.
func TestDeadlocked(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	start := catalog.All()
	for _, c := range []struct {
		name, at string // the statement that a deadlock ends
		do       func(c *catalog.Catalog) error
	}{
		{"make a queue", "insert on ferrymq.queues", func(c *catalog.Catalog) error { _, err := c.EnsureQueue(ctx, "new"); return err }},
		{"configure", "update on ferrymq.queues", func(c *catalog.Catalog) error {
			q, err := c.Configure(ctx, "a.b", func(q *catalog.Queue) error { q.LeaseTime++; return nil })
			if err == nil && q.LeaseTime != 61 {
				err = errors.New("not changed once")
			}
			return err
		}},
		{"delete", "update on ferrymq.queues", func(c *catalog.Catalog) error {
			_, existed, err := c.Delete(ctx, "a.b")
			if err == nil && !existed {
				err = errors.New("not deleted")
			}
			return err
		}},
		{"register", "insert on ferrymq.groups", func(c *catalog.Catalog) error {
			q, err := c.Queue(ctx, "a.b")
			if err == nil {
				_, err = c.Register(ctx, q.ID, "g", start)
			}
			return err
		}},
		{"discover", "insert on ferrymq.groups", func(c *catalog.Catalog) error {
			return c.Discover(ctx, catalog.Scope{Namespace: "a"}, "g", start, time.Now())
		}},
		{"meet", "insert on ferrymq.groups", func(c *catalog.Catalog) error { return meet(ctx, c, start) }},
		{"meet what is not there", "insert on ferrymq.partitions", func(c *catalog.Catalog) error { return meet(ctx, c, start) }},
		{"meet with a cursor", "insert on ferrymq.cursors", func(c *catalog.Catalog) error { return meet(ctx, c, start) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e := engine(t, dbtest.New(t))
			if _, err := e.Catalog.EnsureQueue(ctx, "a.b"); err != nil {
				t.Fatal(err)
			}
			for _, sql := range []string{"create sequence tries",
				`create function lose() returns trigger language plpgsql as $$ begin
					if nextval('tries') = 1 then raise exception 'deadlock detected' using errcode = '40P01'; end if; return new; end $$`,
				"create trigger lose before " + c.at + " for each row execute function lose()"} {
				if _, err := e.Pool.Exec(ctx, sql); err != nil {
					t.Fatal(err)
				}
			}
			if err := c.do(e.Catalog); err != nil {
				t.Error(err)
			}
			if number(t, e.Pool, "select last_value from tries where is_called") < 2 {
				t.Error("it was not tried again")
			}
		})
	}
}

func meet(ctx context.Context, c *catalog.Catalog, start catalog.Start) error {
	q, err := c.Queue(ctx, "a.b")
	if err != nil {
		return err
	}
	found, err := c.Partitions(ctx, q, []string{"p"})
	if err != nil {
		return err
	}
	_, err = c.Meet(ctx, q, found[0], "g", start, true, time.Now())
	return err
}
