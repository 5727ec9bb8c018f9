package maintain

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"ferrymq/db"
	"ferrymq/groupcommit"
)

const (
	moveChunk   = 50               // partitions judged in one transaction: their rows are locked for that long
	sweepChunk  = 200              // partitions whose rows are removed by one statement at most
	planChunk   = 500              // partitions of a reconfigured queue in one transaction
	remindChunk = 20               // queues without a rule looked at per sweep
	remindLook  = 100              // partitions of each
	lateAgain   = 60 * time.Second // until what is old enough but not consumed is looked at again
	soonAgain   = 200              // partitions a second for which that may be sooner
	waitBusy    = time.Second      // for the lock of a partition that is always busy
	waitHeld    = 10 * time.Second // the same where new rules have to be heeded
	busyMost    = 500              // of these in one sweep
)

// Removed is how many messages of a queue one step of the sweep removed, and by which rule. A message counts for one: the mildest that fits.
type Removed struct {
	Project, Queue     int32
	Retention          int64 // retentionSeconds
	CompletedRetention int64 // completedRetentionSeconds
	Eviction           int64 // maxWaitTimeSeconds
}

// retention is one sweep, if it is this broker's turn. What is due is out of reach first, all of it, by moving first_offset;
// rows go afterwards, for as long as an interval lasts, so that a large backlog of them never delays the next look.
func (m *Maintainer) retention(ctx context.Context) error {
	end := time.Now().Add(m.RetentionInterval)
	began, err := m.q.SweepClaim(ctx, db.SweepClaimParams{Seconds: m.RetentionInterval.Seconds()})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := m.removeDue(ctx, began); err != nil {
		return err
	}
	for more := true; more; more = more && time.Now().Before(end) {
		began := time.Now()
		if more, err = m.removeRows(ctx); err != nil {
			return err
		}
		if more { // nobody waits for it: at most half of the time, or pushes feel it
			select {
			case <-time.After(time.Since(began)):
			case <-ctx.Done():
			}
		}
	}
	for more := true; more; more = more && time.Now().Before(end) {
		n, err := m.q.RetiredExpire(ctx, db.RetiredExpireParams{Max: m.RetentionBatch})
		if err != nil {
			return err
		}
		more = n == m.RetentionBatch
	}
	for more := m.CleanupDays > 0; more; more = more && time.Now().Before(end) {
		if more, err = m.cleanup(ctx); err != nil {
			return err
		}
	}
	return m.remind(ctx)
}

// step is a short transaction of the sweep. Losing it in a crash is no harm: it is done again.
func (m *Maintainer) step(ctx context.Context, lock time.Duration, fn func(q *db.Queries) error) error {
	return pgx.BeginFunc(ctx, m.Pool, func(tx pgx.Tx) error {
		q := m.q.WithTx(tx)
		ms := func(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }
		err := q.FlushSettings(ctx, db.FlushSettingsParams{StatementTimeoutMs: ms(m.Engine.StatementTimeout), LockTimeoutMs: ms(lock)})
		if err != nil {
			return err
		}
		if err := q.SweepSettings(ctx); err != nil {
			return err
		}
		return fn(q)
	})
}

// removeDue moves first_offset past what was due at that time, everywhere.
func (m *Maintainer) removeDue(ctx context.Context, due time.Time) error {
	// Looking again at what is not consumed costs as much as the first time. For a few it may be done in every sweep.
	again, room := min(m.RetentionInterval/2, lateAgain), int(soonAgain*m.RetentionInterval.Seconds())
	move := func(lock func(q *db.Queries) ([]int64, error)) (found int, err error) {
		var rows []db.RetentionMoveRow
		var freed []db.RetentionFreeRow
		err = m.step(ctx, waitBusy, func(q *db.Queries) error {
			ids, err := lock(q)
			if found = len(ids); err != nil || found == 0 {
				return err
			}
			if rows, err = q.RetentionMove(ctx, db.RetentionMoveParams{Ids: ids, AgainSeconds: again.Seconds()}); err != nil {
				return err
			}
			freed, err = q.RetentionFree(ctx, db.RetentionFreeParams{Ids: ids})
			return err
		})
		if err != nil {
			return found, err
		}
		for _, r := range rows {
			if r.Waits {
				if room--; room == 0 {
					again = lateAgain
				}
			}
		}
		m.removed(rows, freed)
		return found, nil
	}
	for found := moveChunk; found == moveChunk; {
		var err error
		found, err = move(func(q *db.Queries) ([]int64, error) {
			return q.RetentionLock(ctx, db.RetentionLockParams{Due: due, Max: moveChunk})
		})
		if db.IsLockTimeout(err) { // somebody holds a cursor of one of them
			break
		}
		if err != nil {
			return err
		}
	}
	// What is pushed to all the time may be locked whenever one looks: wait for it, but not for long.
	busy, err := m.q.RetentionDue(ctx, db.RetentionDueParams{Due: due, Max: busyMost})
	if err != nil {
		return err
	}
	for _, id := range busy {
		_, err := move(func(q *db.Queries) ([]int64, error) {
			_, err := q.PartitionLock(ctx, db.PartitionLockParams{ID: id})
			return []int64{id}, err
		})
		if err != nil && !db.IsLockTimeout(err) && !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
	}
	return nil
}

// removed tells what has been moved past, after the commit.
func (m *Maintainer) removed(rows []db.RetentionMoveRow, freed []db.RetentionFreeRow) {
	queues := make(map[int64]int32)
	sums := make(map[int32]Removed)
	for _, r := range rows {
		queues[r.ID] = r.QueueID
		if r.Removed > 0 {
			s := sums[r.QueueID]
			sums[r.QueueID] = Removed{r.ProjectID, r.QueueID, s.Retention + r.Retained, s.CompletedRetention + r.Completed, s.Eviction + r.Evicted}
		}
	}
	for _, s := range sums {
		m.Log.Debug("retention removed messages", "queue", s.Queue, "retention", s.Retention, "completed", s.CompletedRetention, "eviction", s.Eviction)
		if m.OnRemoved != nil {
			m.OnRemoved(s)
		}
	}
	hints := make([]groupcommit.Hint, len(freed))
	for i, c := range freed {
		hints[i] = groupcommit.Hint{Queue: queues[c.PartitionID], Group: c.GroupID, Partition: c.PartitionID}
	}
	if len(hints) > 0 {
		m.Engine.Freed(hints)
	}
}

// removeRows removes a batch of rows below first_offset. More: there are others, and it is this broker that removes.
func (m *Maintainer) removeRows(ctx context.Context) (more bool, err error) {
	var swept db.RetentionSweptParams
	// No partition is locked meanwhile: that would make its pushes wait.
	err = m.step(ctx, waitBusy, func(q *db.Queries) error {
		if n, err := q.SweepRows(ctx); err != nil || n == 0 {
			return err
		}
		found, err := q.RetentionUnswept(ctx, db.RetentionUnsweptParams{After: m.sweptTo, Max: sweepChunk})
		if err != nil {
			return err
		}
		if more = len(found) == sweepChunk || m.sweptTo > 0; len(found) == 0 {
			m.sweptTo = 0 // from the start
			return nil
		}
		arg := db.RetentionRemoveParams{Max: m.RetentionBatch}
		for _, p := range found {
			arg.Ids, arg.FromOffsets, arg.ToOffsets = append(arg.Ids, p.ID), append(arg.FromOffsets, p.SweptOffset), append(arg.ToOffsets, p.FirstOffset)
		}
		gone, err := q.RetentionRemove(ctx, arg)
		if err != nil {
			return err
		}
		ends := make(map[int64]int64)
		var n int64
		for _, r := range gone {
			ends[r.ID], n = r.Swept, n+r.Segments
		}
		for _, p := range found {
			end, ok := ends[p.ID]
			if n < m.RetentionBatch {
				end, ok = p.FirstOffset, true
			}
			if ok {
				swept.Ids, swept.Swepts = append(swept.Ids, p.ID), append(swept.Swepts, end)
			}
		}
		more = more || n == m.RetentionBatch
		m.sweptTo = swept.Ids[len(swept.Ids)-1]
		return nil
	})
	if err != nil || len(swept.Ids) == 0 {
		return more, err
	}
	err = m.step(ctx, waitBusy, func(q *db.Queries) error { return q.RetentionSwept(ctx, swept) })
	if db.IsLockTimeout(err) { // then they are looked at once more
		err = nil
	}
	return more, err
}

// cleanup removes partitions that have been empty and idle for long.
func (m *Maintainer) cleanup(ctx context.Context) (more bool, err error) {
	var gone []db.CleanupRow
	err = m.step(ctx, waitBusy, func(q *db.Queries) error {
		ids, err := q.CleanupLock(ctx, db.CleanupLockParams{Days: m.CleanupDays, Max: sweepChunk})
		if more = len(ids) == sweepChunk; err != nil || len(ids) == 0 {
			return err
		}
		if err := q.CleanupLockCursors(ctx, db.CleanupLockCursorsParams{Ids: ids}); err != nil {
			return err
		}
		gone, err = q.Cleanup(ctx, db.CleanupParams{Ids: ids, Days: m.CleanupDays})
		return err
	})
	if err != nil {
		return false, err
	}
	for _, p := range gone {
		m.Engine.Removed(p)
	}
	if len(gone) > 0 {
		m.Log.Debug("removed empty partitions", "partitions", len(gone))
	}
	return more, nil
}

// remind says of which queues nothing is ever removed, while what they hold is consumed.
func (m *Maintainer) remind(ctx context.Context) error {
	looked, err := m.q.QueueRemind(ctx, db.QueueRemindParams{Max: remindChunk, Partitions: remindLook})
	if err != nil {
		return err
	}
	for _, q := range looked {
		if q.Consumed > 0 {
			m.Log.Info("consumed messages are kept for ever: set retentionEnabled with retentionSeconds or completedRetentionSeconds, or maxWaitTimeSeconds",
				"queue", q.Name, "consumed", q.Consumed)
		}
	}
	return nil
}

// planRetention makes new rules of a queue hold for what it has stored already: first where nobody holds the partition, so that waiting
// for one holds up no other one. One that is held for too long fails the job when all the others are done.
func (m *Maintainer) planRetention(ctx context.Context, queue int32, next func() error) error {
	var held error
	for after := int64(0); ; {
		if err := next(); err != nil {
			return err
		}
		ids, err := m.q.SeekChunk(ctx, db.SeekChunkParams{QueueID: queue, After: after, Max: planChunk})
		if err != nil || len(ids) == 0 {
			return cmp.Or(err, held)
		}
		var locked []int64
		err = m.step(ctx, waitBusy, func(q *db.Queries) (err error) {
			if locked, err = q.SeekLockPartitions(ctx, db.SeekLockPartitionsParams{Ids: ids}); err != nil || len(locked) == 0 {
				return err
			}
			return q.RetentionPlan(ctx, db.RetentionPlanParams{Ids: locked})
		})
		if err != nil {
			return err
		}
		for _, id := range ids {
			if _, done := slices.BinarySearch(locked, id); done {
				continue
			}
			if err := next(); err != nil {
				return err
			}
			wait := waitHeld
			if held != nil { // and perhaps many more by the same holder
				wait = waitBusy
			}
			err := m.step(ctx, wait, func(q *db.Queries) error {
				if _, err := q.PartitionLock(ctx, db.PartitionLockParams{ID: id}); errors.Is(err, pgx.ErrNoRows) {
					return nil
				} else if err != nil {
					return err
				}
				return q.RetentionPlan(ctx, db.RetentionPlanParams{Ids: []int64{id}})
			})
			if db.IsLockTimeout(err) {
				held = err
			} else if err != nil {
				return err
			}
		}
		if len(ids) < planChunk {
			return held
		}
		after = ids[len(ids)-1]
	}
}
