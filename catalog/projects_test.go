package catalog_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/dbtest"
)

// A stream that is being made in a project when that is deleted is there for the job to remove, and after the deletion there is none made.
func TestStreamOfDeletedProject(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	e, pool := engine(t, dsn), dbtest.Pool(t, dsn, 4)
	q, ctx := db.New(pool), t.Context()
	if _, err := q.ProjectCreate(ctx, db.ProjectCreateParams{Name: "p"}); err != nil {
		t.Fatal(err)
	}
	c, err := e.Catalog.In(ctx, "p")
	if err != nil {
		t.Fatal(err)
	}
	id := int32(number(t, pool, "select id from ferrymq.projects where name = 'p'"))

	maker, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer maker.Rollback(context.Background())
	if _, err := db.New(maker).QueueCreate(ctx, db.QueueCreateParams{ProjectID: id, Name: "first", Namespace: "first", UnkeyedLanes: 1}); err != nil {
		t.Fatal(err)
	}
	deleted := make(chan error, 1)
	go func() {
		n, err := q.ProjectDelete(context.Background(), db.ProjectDeleteParams{Name: "p"})
		if err == nil && n != 1 {
			err = fmt.Errorf("%d projects were deleted", n)
		}
		deleted <- err
	}()
	dbtest.WaitBlocked(t, pool, 1)
	if err := maker.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-deleted; err != nil {
		t.Fatal(err)
	}
	if streams, err := q.ProjectStreams(ctx, db.ProjectStreamsParams{ProjectID: id, Max: 10}); err != nil || len(streams) != 1 {
		t.Errorf("%v (%v)", streams, err)
	}
	// A call in flight, that has looked the project up before.
	if made, err := c.EnsureStream(ctx, "second"); made != nil || !errors.Is(err, catalog.ErrNoProject) {
		t.Errorf("%v (%v)", made, err)
	}
	if again, err := e.Catalog.In(ctx, "p"); again != nil || err != nil {
		t.Errorf("the deleted project is still there (%v)", err)
	}
	if n := number(t, pool, "select count(*) from ferrymq.queues"); n != 1 {
		t.Errorf("%d streams", n)
	}
}

// The other way round: a maker that waits for the deletion makes nothing. The same with keys.
func TestDeletionHoldsMakers(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	pool := dbtest.Pool(t, dsn, 5)
	q, ctx := db.New(pool), t.Context()
	if _, err := q.ProjectCreate(ctx, db.ProjectCreateParams{Name: "p"}); err != nil {
		t.Fatal(err)
	}
	id := int32(number(t, pool, "select id from ferrymq.projects where name = 'p'"))
	deleter, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer deleter.Rollback(context.Background())
	if _, err := db.New(deleter).ProjectDelete(ctx, db.ProjectDeleteParams{Name: "p"}); err != nil {
		t.Fatal(err)
	}
	made := make(chan error, 2)
	go func() {
		_, err := q.QueueCreate(context.Background(), db.QueueCreateParams{ProjectID: id, Name: "s", Namespace: "s", UnkeyedLanes: 1})
		made <- err
	}()
	go func() {
		_, err := q.APIKeyCreate(context.Background(), db.APIKeyCreateParams{ID: uuid.New(), Scopes: []string{"read"}, Hash: make([]byte, 32), Project: "p"})
		made <- err
	}()
	dbtest.WaitBlocked(t, pool, 2)
	if err := deleter.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := <-made; !errors.Is(err, pgx.ErrNoRows) {
			t.Errorf("made in a deleted project: %v", err)
		}
	}
}
