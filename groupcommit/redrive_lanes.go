package groupcommit

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/segment"
)

// RedriveLanes puts dead letters of a subscription back, each at the tail of its own key, for this subscription only and from its first
// attempt. It is one transaction: whatever runs at the same time, there is one copy of each. Those that cannot be opened stay where they
// are; those in neither answer are not there, or somebody else has just taken them.
func (e *Engine) RedriveLanes(ctx context.Context, g *catalog.Group, ids []uuid.UUID) (done, unreadable []uuid.UUID, err error) {
	if ctx.Err() != nil {
		return nil, nil, ctx.Err()
	}
	e.transact.Store(time.Now().Unix()) // it locks partitions in order
	var partitions []int64
	err = e.alone(func(ctx context.Context, q *db.Queries) error {
		done, unreadable, partitions = nil, nil, nil
		letters, err := q.LaneDeadLock(ctx, db.LaneDeadLockParams{Ids: ids, GroupID: g.ID})
		if err != nil {
			return err
		}
		// What failed first comes first again.
		slices.SortFunc(letters, func(a, b db.LaneDeadLockRow) int { return a.FailedAt.Compare(b.FailedAt) })
		p := db.LaneRedriveParams{GroupID: g.ID}
		rels := make(map[int64]int64)
		b := segment.NewBuilder(e.Hasher)
		for i := range letters {
			d := &letters[i]
			open, err := segment.Decode(e.Keys, d.Codec, d.KeyNo, d.MessageID, 1, d.Frames)
			if err != nil {
				e.Log.Error("a dead letter cannot be read", "id", d.ID, "error", db.Text(err))
				unreadable = append(unreadable, d.ID)
				continue
			}
			var keys *segment.Keys
			if d.EncryptionEnabled {
				if keys = e.Keys; keys == nil {
					return ErrNoKey
				}
			}
			m := open.At(0)
			m.TransactionID = "" // minted: the one it had belongs to the original
			b.Reset()
			b.Append(&m)
			first := segment.NewFirstID(time.Now())
			codec, keyNo, frames := b.Seal(nil, keys, first)
			p.Ids, p.PartitionIds, p.Rels = append(p.Ids, d.ID), append(p.PartitionIds, d.PartitionID), append(p.Rels, rels[d.PartitionID])
			p.FromOffsets, p.Attempts = append(p.FromOffsets, d.MessageOffset), append(p.Attempts, d.RetryCount)
			p.KeyNos, p.Codecs, p.FirstIds, p.Frames = append(p.KeyNos, keyNo), append(p.Codecs, codec), append(p.FirstIds, first), append(p.Frames, frames)
			if rels[d.PartitionID]++; rels[d.PartitionID] == 1 {
				partitions = append(partitions, d.PartitionID)
			}
			done = append(done, d.ID)
		}
		if len(done) == 0 {
			return nil
		}
		reaches := slices.Repeat([]int64{1<<63 - 1}, len(partitions))
		if _, err := q.LockPartitions(ctx, db.LockPartitionsParams{Ids: partitions, Reaches: reaches}); err != nil {
			return err
		}
		moved, err := q.LaneRedrive(ctx, p)
		if err != nil {
			return err
		}
		if len(moved) != len(partitions) {
			return catalog.ErrGone
		}
		if err := q.LockCursors(ctx, db.LockCursorsParams{Pushed: partitions, GroupIds: []int32{}, PartitionIds: []int64{}, LeaseIds: []uuid.UUID{}}); err != nil {
			return err
		}
		idle := db.LanePassIdleParams{GroupID: g.ID}
		for _, m := range moved {
			idle.Ids, idle.Bases = append(idle.Ids, m.ID), append(idle.Bases, m.Base)
		}
		if err := q.LanePassIdle(ctx, idle); err != nil {
			return err
		}
		return q.MarkPending(ctx, db.MarkPendingParams{Pushed: partitions})
	})
	if errors.Is(err, catalog.ErrGone) || errors.Is(err, ErrNoKey) {
		return nil, nil, err
	}
	if err != nil {
		return nil, nil, e.Unavailable(err)
	}
	hints := make([]Hint, len(partitions))
	for i, id := range partitions {
		hints[i] = Hint{Queue: g.QueueID, Partition: id}
	}
	e.announce(hints, nil)
	return done, unreadable, nil
}
