package db_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/db"
)

// TestOldSnapshot updates rows thousands of times while a snapshot is held, so that no version of them goes away, and looks at what the
// statements of a flush touch then: not more than before, but for what is left of the versions at the end of an index.
func TestOldSnapshot(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 4)
	queue := w.queue("q", "")
	group := w.group(queue, "g")
	var ids []int64
	for i := range 3 {
		ids = append(ids, w.partition(queue, fmt.Sprintf("p%d", i), 1000))
	}
	w.exec("analyze ferrymq.partitions, ferrymq.cursors")
	hold := must[pgx.Tx](t)(w.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead}))
	defer hold.Rollback(context.Background())
	if _, err := hold.Exec(t.Context(), "select count(*) from ferrymq.partitions"); err != nil {
		t.Fatal(db.Text(err))
	}

	groups, leases := []int32{group, group, group}, []uuid.UUID{none, none, none}
	everywhere := []int64{everything, everything, everything}
	l := list{group: group, hints: ids}
	for range ids {
		l.slots = append(l.slots, slot{lease: uuid.New(), budget: 1, parts: 1})
	}
	var pushes []push
	var done []settle
	for _, id := range ids {
		pushes, done = append(pushes, push{id, -1, []int{1}}), append(done, settle{group: group, partition: id, action: complete, expected: 0, moveTo: 1})
	}
	statements := map[string]struct {
		sql  string
		arg  any
		more int // what it may touch more than with no snapshot held
	}{
		"LockPartitions":  {db.LockPartitions, db.LockPartitionsParams{Ids: ids, Reaches: everywhere}, 20},
		"AppendSegments":  {db.AppendSegments, appends(pushes...), 20},
		"LockCursors":     {db.LockCursors, db.LockCursorsParams{Pushed: ids, GroupIds: groups, PartitionIds: ids, LeaseIds: leases}, 40},
		"MarkPending":     {db.MarkPending, db.MarkPendingParams{Pushed: ids}, 20},
		"SettleCursors":   {db.SettleCursors, settles(done...), 40},
		"CompleteCursors": {db.CompleteCursors, completes(settles(done...)), 40},
		"ClaimHinted":     {db.ClaimHinted, hinted(l), 40},
		"ClaimPartitions": {db.ClaimPartitions, claims(l), 40},
		"PartitionLock":   {db.PartitionLock, db.PartitionLockParams{ID: ids[0]}, 10},
		"ReadyPartitions": {db.ReadyPartitions, db.ReadyPartitionsParams{GroupIds: groups, PartitionIds: ids}, 20},
	}
	looks, outline := 0, ""
	touched := func(name string) int {
		tx := must[pgx.Tx](t)(w.pool.Begin(t.Context()))
		defer tx.Rollback(context.Background())
		check(t, db.New(tx).FlushSettings(t.Context(), db.FlushSettingsParams{StatementTimeoutMs: "0", LockTimeoutMs: "0"}))
		looks++
		as := fmt.Sprint(name, looks) // a connection keeps its plans
		prepare(t, tx, as, statements[name].sql)
		root, err := explain(t.Context(), tx, as, "analyze, buffers, timing off, ", statements[name].arg)
		if err != nil {
			t.Fatalf("%s: %s", name, db.Text(err))
		}
		outline = root.outline("")
		return root.Hit + root.Read
	}
	before := map[string]int{}
	for name := range statements {
		before[name] = touched(name)
	}
	// Every update in a transaction of its own, as flushes do it, and by the same way, or this would take long.
	update := func(times int) {
		w.exec(fmt.Sprintf(`do $$ begin
			for i in 1..%d loop
				update ferrymq.partitions set last_push_at = clock_timestamp() where ctid = any(array(
					select (select x.ctid from ferrymq.partitions x where x.id >= t.id and x.id <= t.id order by x.id desc limit 1) from generate_series(1, 3) t (id)));
				update ferrymq.cursors set failures = i where ctid = any(array(
					select (select x.ctid from ferrymq.cursors x where x.group_id = 1 and x.partition_id >= t.id and x.partition_id <= t.id order by x.partition_id desc limit 1) from generate_series(1, 3) t (id)));
				commit;
			end loop; end $$`, times))
	}
	update(1000)
	w.exec("analyze ferrymq.partitions, ferrymq.cursors") // what is stored suggests other plans now
	for _, name := range slices.Sorted(maps.Keys(statements)) {
		after := touched(name)
		// A row whose page is full moves to another one, and what is unique is then checked against all versions: not always.
		for range 3 {
			update(7)
			after = min(after, touched(name))
		}
		t.Logf("%-16s %3d buffers, with 1000 versions of each row %d", name, before[name], after)
		if after > before[name]+statements[name].more {
			t.Errorf("%s touched %d buffers, before %d\n%s", name, after, before[name], outline)
		}
	}
}
