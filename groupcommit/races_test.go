package groupcommit_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"ferrymq/catalog"
	"ferrymq/dbtest"
)

// TestLimitedWhileSeeding: who makes the cursors of a subscription holds it while he waits for a partition. Receives go on.
func TestLimitedWhileSeeding(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{recheck: slow})
	q, g := b.subscribe("lim.q", "mail", func(p *catalog.Policy) { p.MaxInFlight = 2 })
	b.push("lim.q", "a", item{payload: `"1"`}, item{payload: `"2"`})
	eventually(t, "the subscription is seeded", func() bool {
		return number(t, b.Pool, `select count(*) from ferrymq.groups where seeded`) == 1
	})
	if ls := b.receive(q, g, 1, soon); len(ls) != 1 || b.AckLanes(t.Context(), g, one(ls)) != nil || ls[0].Err != nil {
		t.Fatalf("received %d", len(ls))
	}
	// As Seed does, on another broker.
	hold(t, dsn, `select from ferrymq.groups where name = 'mail' for no key update`)
	if d, err := b.Receive(t.Context(), g, 1, soon, "tester"); err != nil || d == nil {
		t.Fatalf("receive while the subscription is held: %v, %v", d, err)
	}
}

// TestFirstContactBlocked: pops that meet a partition that somebody holds for long leave connections to others.
func TestFirstContactBlocked(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{recheck: slow})
	b.push("meet.q", "held", item{payload: `"1"`})
	release := hold(t, dsn, lockPartition, "held")
	var waiting []*parkedPop
	for i := range 40 {
		waiting = append(waiting, b.goPop(route("meet.q", "held", fmt.Sprint("g", i), 1, 20*time.Second)))
	}
	dbtest.WaitBlocked(t, admin(t, dsn), 3)
	o := background(t, func() error {
		for i := range 5 {
			if _, err := b.tryPush(context.Background(), fmt.Sprint("other", i), "p", item{payload: `"x"`}); err != nil {
				return err
			}
		}
		return nil
	})
	if err := o.wait(t, "a push beside pops that wait", 4*time.Second); err != nil {
		t.Error(err)
	}
	release()
	for _, w := range waiting {
		if d := w.wait(t); d.payloads() != "1" {
			t.Errorf("popped %q", d.payloads())
		}
	}
}
