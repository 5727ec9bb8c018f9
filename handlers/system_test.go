package handlers

import (
	"io"
	"log/slog"
	"testing"
	"time"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
)

// TestSwitchesNeverGoBack: a heartbeat that read the switches before a change must not undo it.
func TestSwitchesNeverGoBack(t *testing.T) {
	t.Parallel()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	pool := dbtest.Pool(t, dbtest.Through(t, dbtest.New(t)), 4)
	e := groupcommit.New(groupcommit.Options{Pool: pool, Log: log, Project: 1, DBNow: time.Now(), Width: 1, PushQueueMax: 1, MaxParked: 10,
		StatementTimeout: time.Minute, Recheck: groupcommit.Recheck{Initial: time.Second, Max: time.Second}})
	defer e.Close()
	a := &API{Log: log}
	waits := func() bool { // a pop of a queue that stays empty
		began := time.Now()
		d, err := e.Pop(t.Context(), &groupcommit.Pop{Queue: "q", Group: "__QUEUE_MODE__", Start: catalog.All(), Batch: 1, Partitions: 1, Wait: time.Second})
		if d != nil || err != nil {
			t.Fatalf("pop: %v %v", d, err)
		}
		return time.Since(began) >= time.Second
	}
	for _, c := range []struct {
		set       db.SystemGetRow
		push, pop bool
	}{
		{db.SystemGetRow{Version: 3}, false, false},
		{db.SystemGetRow{Version: 4, PopMaintenance: true}, false, true},
		{db.SystemGetRow{Version: 3}, false, true},
		{db.SystemGetRow{Version: 5, PopMaintenance: true, PushMaintenance: true}, true, true},
		{db.SystemGetRow{Version: 4, PopMaintenance: true}, true, true},
		{db.SystemGetRow{Version: 6, PushMaintenance: true}, true, false},
		{db.SystemGetRow{Version: 5, PopMaintenance: true, PushMaintenance: true}, true, false},
		{db.SystemGetRow{Version: 6, PushMaintenance: true}, true, false},
		{db.SystemGetRow{Version: 7}, false, false},
	} {
		a.SetMaintenance(e, c.set)
		if refused := a.pushRefused() != nil; refused != c.push || a.popPaused() != c.pop || waits() == c.pop {
			t.Errorf("after %+v: pushes refused %v, pops paused %v, want %v and %v", c.set, refused, a.popPaused(), c.push, c.pop)
		}
	}
	// Once the broker drains nothing parks any more, whatever the switches say.
	e.Drain()
	a.SetMaintenance(e, db.SystemGetRow{Version: 8, PopMaintenance: true})
	a.SetMaintenance(e, db.SystemGetRow{Version: 9})
	if waits() {
		t.Error("a pop parked on a broker that drains")
	}
}
