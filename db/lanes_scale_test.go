package db_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"ferrymq/db"
)

// TestLanesAside: what a receive and a promotion touch does not grow with the lanes that wait for a retry, nor what a receive by hint touches with the lanes that are leased.
func TestLanesAside(t *testing.T) {
	t.Parallel()
	const many = 100_000
	w := newWorld(t, 2)
	q := w.queue("q", "")
	g := w.subscription(q, "s", "")
	for _, table := range []string{"partitions", "segments", "cursors"} {
		w.exec("alter table ferrymq." + table + " set (autovacuum_enabled = off)")
	}
	check(t, pgx.BeginFunc(w.ctx(), w.pool, func(tx pgx.Tx) error {
		for _, s := range []string{
			"set local session_replication_role = replica",
			"alter table ferrymq.segments set unlogged",
			fmt.Sprintf("insert into ferrymq.partitions (public_id, queue_id, name, next_offset, last_push_at) select gen_random_uuid(), %d, 'p' || i, 5, now() from generate_series(1, %d) i", q, many),
			"insert into ferrymq.segments (partition_id, base_offset, count, key_no, codec, created_at, first_id, keys, frames) select id, 0, 5, 0, 0, now(), gen_random_uuid(), '', 'f' from ferrymq.partitions",
			fmt.Sprintf("insert into ferrymq.cursors (group_id, partition_id, committed, pending) select %d, id, 0, true from ferrymq.partitions", g),
		} {
			if _, err := tx.Exec(w.ctx(), s); err != nil {
				return err
			}
		}
		return nil
	}))
	w.exec("analyze ferrymq.partitions, ferrymq.segments, ferrymq.cursors, ferrymq.groups, ferrymq.queues")
	texts := map[string]string{"claim": db.ClaimPartitions, "promote": db.PromoteDue, "next": db.NextDue, "ready": db.ReadyGroups}
	touches := func(what, name string, arg any, most int) {
		t.Helper()
		tx := must[pgx.Tx](t)(w.pool.Begin(t.Context())) // one each: it would keep from vacuum what the next one is to be without
		defer tx.Rollback(context.Background())
		check(t, db.New(tx).FlushSettings(t.Context(), db.FlushSettingsParams{StatementTimeoutMs: "0", LockTimeoutMs: "0"}))
		_, err := tx.Exec(t.Context(), "set local plan_cache_mode = force_generic_plan")
		check(t, err)
		prepare(t, tx, name, texts[name])
		defer func() { _, _ = tx.Exec(context.Background(), "deallocate \""+name+"\"") }()
		root := must[*node](t)(explain(t.Context(), tx, name, "analyze, buffers, timing off, ", arg))
		n := root.Hit + root.Read
		t.Logf("%s: %d buffers", what, n)
		if n > most {
			t.Errorf("%s touches %d buffers, more than %d:\n%s", what, n, most, root.outline(""))
		}
	}
	claim := claims(list{group: g, from: many / 2, scan: true, slots: slots(1, 100, 100)})
	ready := db.ReadyGroupsParams{Ids: []int32{g}, Wants: []int64{100}}
	touches("a claim with everything ready", "claim", claim, 3000)

	w.exec("update ferrymq.cursors set not_before = now() + interval '1 hour' + partition_id * interval '1 ms', attempts = 1")
	w.exec("vacuum analyze ferrymq.cursors")
	touches("a claim with everything waiting", "claim", claim, 60)
	touches("a re-check with everything waiting", "ready", ready, 60)
	touches("a promotion with nothing due", "promote", db.PromoteDueParams{Max: 1000}, 60)
	touches("the next due time", "next", nil, 20)

	w.exec("update ferrymq.cursors set not_before = not_before - interval '2 hours'")
	w.exec("vacuum analyze ferrymq.cursors")
	touches("a promotion with everything due", "promote", db.PromoteDueParams{Max: 1000}, 25_000)
	touches("a claim with everything due and nothing promoted", "claim", claim, 60)

	// A look at the index passes over live leases, in what it has of the index and the table: the one thing here that grows. Hints spare the look.
	w.exec("update ferrymq.cursors set not_before = null, lease_id = gen_random_uuid(), lease_until = now() + interval '1 hour', batch_end = 1")
	w.exec("vacuum analyze ferrymq.cursors")
	touches("a claim with everything leased", "claim", claim, many/10)
	touches("a claim by hint with everything leased", "claim", claims(list{group: g, hints: []int64{7, 8, 9}, slots: slots(1, 100, 100)}), 60)
}
