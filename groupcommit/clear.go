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
// atomically. It returns how many partitions it looked at; none when the one that was named does not exist.
func (e *Engine) Clear(ctx context.Context, q *catalog.Queue, partition *string) (partitions, messages int64, err error) {
	for after, more := int64(0), true; more; {
		var ids []int64
		var n int64
		var leased []db.ClearCursorsRow
		err := e.alone(func(ctx context.Context, tx *db.Queries) (err error) {
			if partition != nil {
				id, err := tx.ClearFind(ctx, db.ClearFindParams{QueueID: q.ID, Name: *partition})
				if errors.Is(err, pgx.ErrNoRows) {
					return nil
				}
				if err != nil {
					return err
				}
				ids = []int64{id}
			} else if ids, err = tx.RetentionLockQueue(ctx, db.RetentionLockQueueParams{QueueID: q.ID, After: after, Max: clearChunk}); err != nil || len(ids) == 0 {
				return err
			}
			if leased, err = tx.ClearCursors(ctx, db.ClearCursorsParams{Ids: ids}); err != nil {
				return err
			}
			n, err = tx.ClearPartitions(ctx, db.ClearPartitionsParams{Ids: ids})
			return err
		})
		if err != nil {
			return partitions, messages, err
		}
		partitions, messages = partitions+int64(len(ids)), messages+n
		hints := make([]Hint, len(leased))
		for i, c := range leased { // whoever holds hints back for one of these leases need not
			e.held.drop(c.GroupID, c.PartitionID)
			e.park.lookSome(c.GroupID, 1) // with a limit on what is in flight there is room now
			hints[i] = Hint{Queue: q.ID, Group: c.GroupID, Partition: c.PartitionID}
		}
		if len(hints) > 0 && e.Announce != nil {
			e.Announce(hints)
		}
		if more = partition == nil && len(ids) == clearChunk && ctx.Err() == nil; more {
			after = ids[len(ids)-1]
		}
	}
	return partitions, messages, ctx.Err()
}

// Freed tells of cursors whose backoff ended because retention removed the message it was for.
func (e *Engine) Freed(hints []Hint) { e.announce(hints, nil) }

// Removed tells of a partition that was cleaned up. What still uses it finds out by itself; this is sooner.
func (e *Engine) Removed(r db.CleanupRow) {
	e.Catalog.Removed(r.QueueID, r.Name, r.Hidden, r.ID, r.PublicID)
	e.dedup.Forget(r.ID)
	e.park.removed(r.QueueID, r.ID)
	e.Metrics.Add(r.QueueID, metrics.PartitionsDeleted, 1)
}
