package groupcommit

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"

	"ferrymq/db"
	"ferrymq/metrics"
)

// LockTimeout is how long a flush waits for a row lock before its partitions go on alone.
const LockTimeout = 500 * time.Millisecond

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// flush sends one board: one pipeline, one transaction. On an error nothing has been answered.
func (f *flusher) flush(b *board) error {
	e := f.e
	now := time.Now()
	entries := f.plan(b.pushes)
	settles := f.onePerCursor(b.settles)
	b.extends = merge(b.extends)
	b.restores = f.oneRestore(b.restores)

	// Parked pops whose partition is about to get something to deliver ride along.
	claims := e.present(b.claims)
	for _, n := range entries {
		if n.row != nil && n.total > 0 && !b.again {
			claims = e.park.ride(claims, Hint{Queue: n.queue.ID, Partition: n.row.ID})
		}
	}
	for _, s := range settles {
		if s.leavesWork() && !b.again {
			claims = e.park.ride(claims, Hint{Queue: s.group.QueueID, Group: s.group.ID, Partition: s.row.ID})
		}
	}
	b.claims = claims
	lists, quick := e.lists(claims, now)
	all := slices.Concat(lists, quick)

	var batch db.Flush
	var locks db.LockPartitionsParams
	pushed := []int64{}
	cursors := lockSet{db.LockCursorsParams{GroupIds: []int32{}, PartitionIds: []int64{}, LeaseIds: []uuid.UUID{}}}
	a, c := appendParams(entries)
	ofLanes := slices.DeleteFunc(slices.Clone(settles), func(s *settle) bool { return !s.ofLane() })
	done := slices.DeleteFunc(slices.Clone(settles), func(s *settle) bool { return !s.quick() })
	others := slices.DeleteFunc(slices.Clone(settles), func(s *settle) bool { return s.quick() || s.ofLane() })
	for _, s := range settles {
		if s.reached = s.lockReach(); s.reached >= 0 {
			locks.Ids = append(locks.Ids, s.row.ID)
			locks.Reaches = append(locks.Reaches, s.reached)
		}
		cursors.add(s.group.ID, s.row.ID, s.Lease)
	}
	// Whoever else locks two of these partitions does it in this order: other brokers, and the transactions of this one.
	// A single one too: AppendSegments does not follow a row that moves while it waits for it.
	inOrder := len(a.Ids) > 0 && (e.Alone == nil || !e.Alone() || e.transacting())
	for _, id := range a.Ids {
		pushed = append(pushed, id)
		if inOrder {
			locks.Ids = append(locks.Ids, id)
			locks.Reaches = append(locks.Reaches, 1<<63-1)
		}
	}
	for _, r := range b.restores {
		cursors.add(r.group, r.partition, uuid.UUID{})
	}
	for _, x := range b.extends {
		cursors.add(x.group, x.partition, x.lease)
	}
	cursors.Pushed = pushed

	var locked []db.LockPartitionsRow
	if len(locks.Ids) > 0 {
		batch.LockPartitions(locks, &locked)
	}
	var appended []db.AppendSegmentsRow
	if len(a.Ids) > 0 {
		batch.AppendSegments(a, &appended)
	}
	var created []db.CreatePartitionsRow
	if len(c.PublicIds) > 0 {
		batch.CreatePartitions(c, &created)
		batch.CreateCursors(db.CreateCursorsParams{PublicIds: c.PublicIds})
	}
	if len(pushed) > 0 || len(cursors.GroupIds) > len(done) { // CompleteCursors does without
		batch.LockCursors(cursors.LockCursorsParams)
	}
	if len(pushed) > 0 {
		batch.MarkPending(db.MarkPendingParams{Pushed: pushed})
	}
	var completed []db.CompleteCursorsRow
	if len(done) > 0 {
		batch.CompleteCursors(completeParams(done), &completed)
	}
	var moved []db.SettleCursorsRow
	if len(others) > 0 {
		batch.SettleCursors(settleParams(others), &moved)
	}
	var passed []db.SettleLanesRow
	if len(ofLanes) > 0 {
		batch.SettleLanes(settleLanesParams(ofLanes), &passed)
	}
	if len(b.restores) > 0 {
		batch.RestoreCursors(restoreParams(b.restores))
	}
	var limited []int32
	for _, l := range lists {
		if l.group.Limited() {
			limited = append(limited, l.group.ID)
		}
	}
	for _, x := range b.extends { // a claim must see the new end of a lease, or it has ended for the claim and goes on
		if x.limited {
			limited = append(limited, x.group)
		}
	}
	var extended []db.ExtendLeasesRow
	var extendedLanes []db.ExtendLanesRow
	leases, lanes := extendParams(b.extends)
	if len(leases.Ns) > 0 {
		batch.ExtendLeases(leases, &extended)
	}
	if len(limited) > 0 {
		slices.Sort(limited)
		batch.LockGroups(db.LockGroupsParams{Ids: slices.Compact(limited)})
	}
	if len(lanes.Ns) > 0 {
		batch.ExtendLanes(lanes, &extendedLanes)
	}
	var hinted []db.ClaimHintedRow
	if len(quick) > 0 {
		batch.ClaimHinted(e.hintedParams(quick), &hinted)
	}
	var claimed []db.ClaimPartitionsRow
	if len(lists) > 0 {
		batch.ClaimPartitions(e.claimParams(lists), &claimed)
	}
	if batch.Len() == 0 { // everything went to side lanes
		return nil
	}
	began := time.Now()
	if err := e.send(&batch, b.since, claims); err != nil {
		e.park.giveBack(all)
		// What plan moved to side lanes is theirs now.
		b.pushes = b.pushes[:0]
		for _, n := range entries {
			b.pushes = append(b.pushes, n.pushes...)
		}
		b.settles = settles
		return err
	}

	e.Metrics.Committed(time.Since(began))
	for _, n := range entries {
		e.Metrics.Total(metrics.CommitPushes, int64(len(n.pushes)))
	}
	e.Metrics.Total(metrics.CommitAcks, acks(settles))
	e.Metrics.Total(metrics.CommitExtends, int64(len(b.extends)))
	e.Metrics.Total(metrics.CommitPops, int64(len(claims)))

	var hints, tell []Hint
	hints = f.deliverPushes(hints, entries, inOrder, locked, appended, created)
	for _, r := range passed {
		ofLanes[r.N].apply(e, laneSettled(r))
	}
	for _, r := range completed {
		done[r.N].apply(e, db.SettleCursorsRow{Outcome: outApplied, Committed: r.Committed, Released: r.Released, Pending: r.Pending, DueMs: r.DueMs})
	}
	for _, r := range moved {
		others[r.N].apply(e, r)
	}
	for _, s := range settles {
		if h, here, ok := s.hint(); here {
			hints = append(hints, h)
		} else if ok {
			tell = append(tell, h)
		}
	}
	for _, s := range settles {
		s.finish(nil)
	}
	for _, r := range extended {
		b.extends[r.N].until = r.LeaseUntil
	}
	for _, r := range extendedLanes {
		b.extends[r.N].until = r.LeaseUntil
	}
	for _, x := range b.extends {
		x.finish(nil)
	}
	for _, r := range b.restores {
		hints = append(hints, Hint{Queue: r.queue, Group: r.group, Partition: r.partition})
		close(r.done)
	}
	e.deliverHinted(quick, hinted)
	e.deliverClaims(lists, claimed)
	for _, h := range hints {
		e.park.hint(h, all)
	}
	for _, s := range settles {
		if s.missed && s.Released {
			e.park.left(s.group, s.row.ID) // what came meanwhile, the claims of this flush may not have seen either
		}
	}
	if tell = append(tell, hints...); len(tell) > 0 && e.Announce != nil {
		e.Announce(tell)
	}
	return nil
}

// send runs the batch on its own context, never a caller's.
func (e *Engine) send(batch *db.Flush, since time.Time, claims []*claim) error {
	acquire, stop := context.WithTimeout(context.Background(), acquireTimeout(since))
	conn, err := e.Flights.Acquire(acquire)
	stop()
	if err != nil {
		return errors.Join(ErrNoConnection, err)
	}
	defer conn.Release()
	for _, c := range claims {
		c.sent.Store(true)
	}
	// The server cancels a statement that is too long; this is for a server that does not answer any more.
	ctx, cancel := context.WithTimeout(context.Background(), e.StatementTimeout+connectTimeout)
	defer cancel()
	batch.FlushSettings(e.settings(LockTimeout), conn.Conn())
	if err := batch.Send(ctx, conn); err != nil {
		if db.NotSent(err) {
			return errors.Join(errNotSent, err)
		}
		if db.IsConnection(err) {
			return errors.Join(ErrUnknown, err)
		}
		return err
	}
	return nil
}

// onePerCursor keeps one settle per cursor; the others are decided on what it leaves.
func (f *flusher) onePerCursor(settles []*settle) []*settle {
	if len(settles) < 2 {
		return f.notAside(settles)
	}
	type cursor struct {
		group     int32
		partition int64
	}
	seen := make(map[cursor]bool, len(settles))
	kept := settles[:0:0]
	var later []*settle
	for _, s := range settles {
		k := cursor{s.group.ID, s.row.ID}
		if seen[k] {
			later = append(later, s)
			continue
		}
		seen[k] = true
		kept = append(kept, s)
	}
	if len(later) > 0 {
		f.e.dock.mu.Lock()
		for _, s := range later {
			f.e.dock.put(s.partition.Lane, func(b *board) { b.settles = append(b.settles, s) })
		}
		f.e.dock.mu.Unlock()
	}
	return f.notAside(kept)
}

// notAside hands settles of partitions that work alone to their side lane.
func (f *flusher) notAside(settles []*settle) []*settle {
	d := f.e.dock
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.sides) == 0 {
		return settles
	}
	kept := settles[:0:0]
	for _, s := range settles {
		if lane := d.sides[keyOf(s.partition)]; lane != nil {
			lane.settles = append(lane.settles, s)
			continue
		}
		kept = append(kept, s)
	}
	return kept
}

// deliverPushes answers the pushes of a committed flush. What lost its compare-and-set, was created elsewhere or is gone goes on alone.
func (f *flusher) deliverPushes(hints []Hint, entries []*entry, inOrder bool, locked []db.LockPartitionsRow, appended []db.AppendSegmentsRow, created []db.CreatePartitionsRow) []Hint {
	if len(entries) == 0 {
		return hints
	}
	byID := make(map[int64]db.AppendSegmentsRow, len(appended))
	for _, r := range appended {
		byID[r.ID] = r
	}
	exists := make(map[int64]bool, len(locked))
	for _, r := range locked {
		exists[r.ID] = true
	}
	byPublic := make(map[uuid.UUID]db.CreatePartitionsRow, len(created))
	for _, r := range created {
		byPublic[r.PublicID] = r
	}
	for _, n := range entries {
		done, made := n.total == 0, n.row == nil
		if made {
			if r, ok := byPublic[n.public]; ok {
				n.made(f.e, r)
				done = true
			}
		} else if r, ok := byID[n.row.ID]; ok {
			n.base, n.createdAt, done = r.Base, r.CreatedAt, true
		} else if inOrder && !exists[n.row.ID] {
			n.partition.Forget(n.row)
			f.e.dedup.Forget(n.row.ID)
		}
		if done {
			n.stored(f.e)
			if n.base == 0 { // new, or at least new for those who wait for it
				f.e.park.appeared(n.queue.ID, n.partition.Name)
			}
			hints = append(hints, Hint{Queue: n.queue.ID, Partition: n.row.ID})
			f.e.park.seen(n.queue)
			continue
		}
		f.e.sendAside(n)
	}
	return hints
}
