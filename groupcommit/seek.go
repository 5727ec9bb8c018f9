package groupcommit

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/db"
)

// Target is where a seek moves cursors: to the end, or in front of the first segment of At or later, and to the end where there is none.
type Target struct {
	End bool
	At  time.Time
}

const (
	seekChunk = 1000 // partitions in one transaction: their rows are locked for that long
	seekHints = 100  // beyond so many partitions the whole group is told to look
)

// Seek moves the cursors of a group on all partitions of a queue, each partition by itself: what held a lease there has lost it.
// It makes no group. found is false when there is no such queue or it has no partitions.
func (e *Engine) Seek(ctx context.Context, queue, group string, to Target) (found bool, moved int64, err error) {
	q, g, err := e.fresh(ctx, queue, group)
	if q == nil || err != nil {
		return false, 0, err
	}
	return e.seekQueue(ctx, q.ID, g, to)
}

// SeekLanes is Seek of a subscription.
func (e *Engine) SeekLanes(ctx context.Context, g *catalog.Group, to Target) (moved int64, err error) {
	_, moved, err = e.seekQueue(ctx, g.QueueID, g, to)
	return moved, err
}

func (e *Engine) seekQueue(ctx context.Context, queue int32, g *catalog.Group, to Target) (found bool, moved int64, err error) {
	for after := int64(0); ; {
		ids, err := e.q.SeekChunk(ctx, db.SeekChunkParams{QueueID: queue, After: after, Max: seekChunk})
		if err != nil || len(ids) == 0 {
			return found, moved, e.Unavailable(err)
		}
		if found = true; g == nil {
			return found, 0, nil
		}
		n, err := e.seek(ctx, g, ids, to)
		moved += n
		if errors.Is(err, catalog.ErrGone) { // the group was deleted meanwhile
			return found, moved, nil
		}
		if err != nil || len(ids) < seekChunk {
			return found, moved, err
		}
		after = ids[len(ids)-1]
	}
}

// SeekPartition is Seek on one partition.
func (e *Engine) SeekPartition(ctx context.Context, queue, partition, group string, to Target) (found, moved bool, err error) {
	q, g, err := e.fresh(ctx, queue, group)
	if q == nil || err != nil {
		return false, false, err
	}
	rows, err := e.q.PartitionFindMany(ctx, db.PartitionFindManyParams{QueueIds: []int32{q.ID}, Names: []string{partition}})
	if err != nil || len(rows) == 0 || g == nil {
		return len(rows) > 0, false, e.Unavailable(err)
	}
	n, err := e.seek(ctx, g, []int64{rows[0].ID}, to)
	if errors.Is(err, catalog.ErrGone) {
		err = nil
	}
	return true, n > 0, err
}

// fresh finds a queue and one of its groups as they are now, whatever this broker remembers. Nil: there is none.
func (e *Engine) fresh(ctx context.Context, queue, group string) (*catalog.Queue, *catalog.Group, error) {
	e.Catalog.ForgetQueue(queue)
	q, err := e.Catalog.Queue(ctx, queue)
	if q == nil || err != nil {
		return nil, nil, e.Unavailable(err)
	}
	e.Catalog.ForgetGroup(q.ID, group)
	g, err := e.Catalog.Group(ctx, q.ID, group)
	return q, g, e.Unavailable(err)
}

// seek moves the cursors on some partitions.
func (e *Engine) seek(ctx context.Context, g *catalog.Group, ids []int64, to Target) (moved int64, err error) {
	err = byAndBy(ctx, ids, func(ids []int64, wait bool) ([]int64, error) {
		rows, err := e.seekSome(g, ids, wait, to)
		if err != nil {
			return nil, err
		}
		e.sought(g, rows)
		moved += int64(len(rows))
		done := make([]int64, len(rows))
		for i, r := range rows {
			done[i] = r.PartitionID
		}
		return done, nil
	})
	return moved, err
}

// byAndBy has something done to partitions: all at once that can be locked without waiting, the rest by and by. Only when nothing is left
// but what others hold does it wait, for one partition, with no other one locked: whoever holds that for long holds up nothing but this.
// do returns which ones it has done; after it waited for one, that one is done in any case.
func byAndBy(ctx context.Context, ids []int64, do func(ids []int64, wait bool) (done []int64, err error)) error {
	for wait := len(ids) == 1; len(ids) > 0; {
		if err := ctx.Err(); err != nil {
			return err
		}
		some := ids
		if wait {
			some = ids[:1]
		}
		done, err := do(some, wait)
		if err != nil {
			return err
		}
		if wait {
			ids, wait = ids[1:], false
			continue
		}
		are := make(map[int64]bool, len(done))
		for _, id := range done {
			are[id] = true
		}
		ids, wait = slices.DeleteFunc(slices.Clone(ids), func(id int64) bool { return are[id] }), len(done) == 0
	}
	return nil
}

func (e *Engine) seekSome(g *catalog.Group, ids []int64, wait bool, to Target) (rows []db.SeekCursorsRow, err error) {
	err = e.alone(func(ctx context.Context, q *db.Queries) error {
		rows = nil
		if _, err := q.GroupHold(ctx, db.GroupHoldParams{ID: g.ID}); errors.Is(err, pgx.ErrNoRows) {
			return catalog.ErrGone
		} else if err != nil {
			return err
		}
		locked, free := ids, ids
		if wait {
			if _, err := q.PartitionLock(ctx, db.PartitionLockParams{ID: ids[0]}); errors.Is(err, pgx.ErrNoRows) {
				return nil // the partition was deleted
			} else if err != nil {
				return err
			}
		} else {
			if locked, err = q.SeekLockPartitions(ctx, db.SeekLockPartitionsParams{Ids: ids}); err != nil || len(locked) == 0 {
				return err
			}
			if free, err = q.SeekLockCursors(ctx, db.SeekLockCursorsParams{GroupID: g.ID, Ids: locked}); err != nil {
				return err
			}
			free = append([]int64{}, free...) // no NULL
		}
		rows, err = q.SeekCursors(ctx, db.SeekCursorsParams{GroupID: g.ID, Ids: locked, Free: free, ToEnd: to.End, At: to.At})
		return err
	})
	return rows, err
}

// sought forgets the leases that a seek has ended and wakes pops for what it left to deliver. Other brokers are told of every cursor:
// hints about what they remember as leased would wait for a holder who has lost it.
func (e *Engine) sought(g *catalog.Group, rows []db.SeekCursorsRow) {
	var pending, drained []Hint
	for _, r := range rows {
		e.held.drop(g.ID, r.PartitionID)
		h := Hint{Queue: g.QueueID, Group: g.ID, Partition: r.PartitionID}
		if r.Pending {
			pending = append(pending, h)
		} else {
			drained = append(drained, h)
		}
	}
	all := append(drained, pending...)
	if len(all) > seekHints {
		all = []Hint{{Queue: g.QueueID, Group: g.ID}}
		if len(pending) > 0 {
			e.park.look(g.ID)
		}
	} else {
		for _, h := range pending {
			e.park.hint(h, nil)
		}
	}
	if len(all) > 0 && e.Announce != nil {
		e.Announce(all)
	}
}

// deleteLockTimeout is how long a group's deletion waits for a row lock before it lets go of those it has: while it waits for the queue
// it keeps a first contact from ending that may be what it waits for.
const deleteLockTimeout = 300 * time.Millisecond

// removeTime is how long a deletion removes cursors itself, before it leaves the rest to its job.
const removeTime = 2 * time.Second

// DeleteGroup deletes a consumer group of one queue, or of all queues when queue is empty, with its cursors and leases. With keep its
// registrations stay, and the next pop starts where they say. cursors is how many there were, registrations whether any was deleted.
func (e *Engine) DeleteGroup(ctx context.Context, queue, group string, keep bool) (cursors int64, registrations bool, err error) {
	if queue == "" && !keep {
		// First, and by itself: a queue that is being created with them is waited for, and found below.
		if registrations, err = e.Catalog.ForgetDiscovery(ctx, group); err != nil {
			return 0, false, e.Unavailable(err)
		}
	}
	found, err := e.q.GroupsByName(ctx, db.GroupsByNameParams{ProjectID: e.Project, Name: group})
	if err != nil {
		return 0, false, e.Unavailable(err)
	}
	for _, f := range found {
		if queue != "" && f.Queue != queue {
			continue
		}
		deleted, n, err := e.deleteGroup(ctx, f, group, keep)
		if err != nil {
			return 0, false, e.Unavailable(err)
		}
		cursors += n
		registrations = registrations || (deleted && !keep)
	}
	return cursors, registrations, nil
}

// DeleteSubscription deletes a subscription with its lanes; existed is false when somebody else has just done it.
func (e *Engine) DeleteSubscription(ctx context.Context, g *catalog.Group) (existed bool, err error) {
	existed, _, err = e.deleteGroup(ctx, db.GroupsByNameRow{ID: g.ID, QueueID: g.QueueID}, g.Name, false)
	return existed, e.Unavailable(err)
}

func (e *Engine) deleteGroup(ctx context.Context, f db.GroupsByNameRow, group string, keep bool) (deleted bool, cursors int64, err error) {
	err = e.patiently(deleteLockTimeout, func(ctx context.Context, q *db.Queries) error {
		deleted = false
		// The group before its queue: seeders hold the group while they wait for partitions, and whoever holds those may wait for the queue.
		g, err := q.GroupTake(ctx, db.GroupTakeParams{ID: f.ID})
		if err == nil {
			_, err = q.QueueLock(ctx, db.QueueLockParams{ID: f.QueueID}) // waits for creators of partitions, who make cursors
		}
		if errors.Is(err, pgx.ErrNoRows) { // deleted meanwhile
			return nil
		}
		if err != nil {
			return err
		}
		deleted = true
		if err := q.GroupDelete(ctx, db.GroupDeleteParams{ID: f.ID}); err != nil {
			return err
		}
		if err := q.QueueTouch(ctx, db.QueueTouchParams{ID: f.QueueID}); err != nil { // subscriptions are remembered with their stream
			return err
		}
		if err := q.JobCreate(ctx, db.JobCreateParams{Kind: "delete_group", QueueID: f.QueueID, GroupID: &f.ID, DelaySeconds: 10}); err != nil {
			return err
		}
		if !keep || !g.Registered {
			return nil
		}
		again, err := q.GroupAgain(ctx, db.GroupAgainParams{ID: f.ID})
		if err != nil {
			return err
		}
		return q.JobCreate(ctx, db.JobCreateParams{Kind: "seed", QueueID: f.QueueID, GroupID: &again, DelaySeconds: 10})
	})
	if err != nil || !deleted {
		return false, 0, err
	}
	e.Catalog.ForgetGroup(f.QueueID, group)
	e.held.dropGroup(f.ID)
	e.park.gone(f.ID, 0)
	if e.Announce != nil {
		e.Announce([]Hint{{Queue: f.QueueID, Group: f.ID}})
	}
	if keep { // begins to seed the group; if not, the job does
		_, _ = e.Catalog.Group(ctx, f.QueueID, group)
	}
	more := true
	for began := time.Now(); more && time.Since(began) < removeTime; {
		var n int64
		n, more, err = e.Catalog.RemoveGroup(ctx, f.ID)
		if cursors += n; db.IsLockTimeout(err) {
			break // somebody holds one for long
		}
		if err != nil {
			return true, cursors, err
		}
	}
	if more { // the rest is the job's
		var rest int64
		rest, err = e.q.GroupCursorCount(ctx, db.GroupCursorCountParams{ID: f.ID})
		cursors += rest
	}
	return true, cursors, err
}
