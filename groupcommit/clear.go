package groupcommit

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/metrics"
)

// clearChunk is how many partitions are cleared in one transaction.
const clearChunk = 1000

// Clear removes all messages of a queue, or of one partition of it: cursors go to the end, leases end. Each partition is cleared
// atomically. It returns how many partitions it cleared; none when the one that was named does not exist.
func (e *Engine) Clear(ctx context.Context, q *catalog.Queue, partition *string) (partitions, messages int64, err error) {
	clear := func(ids []int64) error {
		return byAndBy(ctx, ids, func(ids []int64, wait bool) ([]int64, error) {
			done, n, err := e.clearSome(q, ids, wait)
			partitions, messages = partitions+int64(len(done)), messages+n
			return done, err
		})
	}
	if partition != nil {
		rows, err := e.q.PartitionFindMany(ctx, db.PartitionFindManyParams{QueueIds: []int32{q.ID}, Names: []string{*partition}})
		if err != nil || len(rows) == 0 {
			return 0, 0, e.Unavailable(err)
		}
		err = clear([]int64{rows[0].ID})
		return partitions, messages, err
	}
	for after := int64(0); ; {
		ids, err := e.q.SeekChunk(ctx, db.SeekChunkParams{QueueID: q.ID, After: after, Max: clearChunk})
		if err != nil || len(ids) == 0 {
			return partitions, messages, e.Unavailable(err)
		}
		if err := clear(ids); err != nil || len(ids) < clearChunk {
			return partitions, messages, err
		}
		after = ids[len(ids)-1]
	}
}

// clearSome clears those of some partitions that it can lock, with their cursors, without waiting, or waits for a single one.
func (e *Engine) clearSome(q *catalog.Queue, ids []int64, wait bool) (done []int64, messages int64, err error) {
	var leased []db.ClearCursorsRow
	err = e.alone(func(ctx context.Context, tx *db.Queries) (err error) {
		done, messages, leased = ids, 0, nil
		if wait {
			_, err = tx.PartitionLock(ctx, db.PartitionLockParams{ID: ids[0]})
			if errors.Is(err, pgx.ErrNoRows) { // the partition was deleted
				done, err = nil, nil
			}
		} else if done, err = tx.SeekLockPartitions(ctx, db.SeekLockPartitionsParams{Ids: ids}); err == nil && len(done) > 0 {
			done, err = tx.ClearFree(ctx, db.ClearFreeParams{Ids: done})
		}
		if err != nil || len(done) == 0 {
			return err
		}
		if leased, err = tx.ClearCursors(ctx, db.ClearCursorsParams{Ids: done}); err != nil {
			return err
		}
		messages, err = tx.ClearPartitions(ctx, db.ClearPartitionsParams{Ids: done})
		return err
	})
	if err != nil {
		return nil, 0, err
	}
	hints := make([]Hint, len(leased))
	for i, c := range leased { // whoever holds hints back for one of these leases need not
		e.held.drop(c.GroupID, c.PartitionID)
		e.park.lookSome(c.GroupID, 1) // with a limit on what is in flight there is room now
		hints[i] = Hint{Queue: q.ID, Group: c.GroupID, Partition: c.PartitionID}
	}
	if len(hints) > 0 && e.Announce != nil {
		e.Announce(hints)
	}
	return done, messages, nil
}

// Freed tells of cursors whose backoff ended because retention removed the message it was for.
func (e *Engine) Freed(hints []Hint) { e.announce(hints, nil) }

// Removed tells of a partition that was cleaned up. What still uses it finds out by itself; this is sooner.
func (e *Engine) Removed(r db.CleanupRow) {
	e.Catalog.Removed(r.QueueID, r.Name, r.Hidden, r.ID, r.PublicID)
	e.dedup.Forget(r.ID)
	e.park.removed(r.QueueID, r.ID)
	e.Metrics.Add(r.ProjectID, r.QueueID, metrics.PartitionsDeleted, 1)
}
