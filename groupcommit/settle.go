package groupcommit

import (
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/metrics"
)

// The actions and outcomes of the statement SettleCursors.
const (
	actComplete   = 0
	actFailed     = 1
	actRetry      = 2
	actDeadLetter = 3
	actGiveBack   = 4
	actRest       = 5

	// Of lanes, in the statement SettleLanes less by laneActions.
	laneActions = 10
	actAck      = laneActions
	actNack     = laneActions + 1
	actRelease  = laneActions + 2
	actExhaust  = laneActions + 3
	actPass     = laneActions + 4

	outApplied  = 0
	outFiled    = 1
	outNeedCopy = 2
	outNoBatch  = 3
	outDropped  = 4
)

// settle moves one cursor, fenced by a lease and by the offset it was decided on. Of a lane, Expected is the offset that was delivered.
type settle struct {
	group     *catalog.Group
	partition *catalog.Partition
	row       *catalog.Row
	Lease     uuid.UUID // zero: none asked for
	Expected  int64
	Action    int32
	MoveTo    int64
	FailedAt  int64
	Copy      *deadCopy
	Error     string
	Signature string
	waits     bool          // for whoever changes the cursor at the same time; else it may have to be decided again
	Delay     time.Duration // of a nack, negative: as the policy says; of a release, how long the lane rests

	Applied   bool
	Outcome   int32
	Committed int64
	Released  bool
	Pending   bool
	DueMs     int64
	reached   int64 // what LockPartitions was given, or -1
	foreign   bool  // another broker delivered what this ended
	missed    bool  // a hint came while it was leased
	Err       error
	done      chan struct{} // nil: nobody waits
}

// deadCopy is a message as its dead letter keeps it.
type deadCopy struct {
	id            uuid.UUID
	messageID     uuid.UUID
	transactionID string
	keyNo, codec  int16
	frames        []byte
	createdAt     time.Time
}

// quick says whether it is for CompleteCursors.
func (s *settle) quick() bool { return s.Action == actComplete && !s.waits }

func (s *settle) ofLane() bool { return s.Action >= laneActions }

// reach is the highest offset the settle can move the cursor to.
func (s *settle) reach() int64 {
	switch {
	case s.Action == actRelease:
		return -1
	case s.ofLane():
		return s.Expected + 1
	}
	if s.Action == actGiveBack || s.Action == actRest {
		return -1
	}
	if s.Action == actFailed || s.Action == actDeadLetter {
		return s.FailedAt + 1
	}
	return s.MoveTo
}

// drains says whether the settle may leave nothing to deliver. Tails only grow: what has been seen beyond is still there.
func (s *settle) drains() bool { return s.reach() >= s.partition.Tail() }

// leavesWork guesses whether the partition will have something to deliver once the settle is applied.
func (s *settle) leavesWork() bool {
	switch s.Action {
	case actComplete, actDeadLetter, actAck, actExhaust, actPass:
		return s.partition.Tail() > s.reach()
	case actRetry, actGiveBack, actRelease:
		return s.Delay == 0
	}
	return false // failed: perhaps delayed
}

// laneSettled is the outcome of a settle of a lane in terms of the others.
func laneSettled(r db.SettleLanesRow) db.SettleCursorsRow {
	return db.SettleCursorsRow{N: r.N, Outcome: r.Outcome, Committed: r.Committed, Released: r.Outcome != outNeedCopy, Pending: r.Pending, DueMs: r.DueMs}
}

func (s *settle) apply(e *Engine, r db.SettleCursorsRow) {
	s.Applied, s.Outcome, s.Committed, s.Released, s.Pending, s.DueMs = true, r.Outcome, r.Committed, r.Released, r.Pending, r.DueMs
	if s.Outcome == outNeedCopy {
		return
	}
	dead := int64(0)
	if s.Outcome == outFiled {
		dead = 1
		e.Metrics.Add(s.group.Project, s.group.QueueID, metrics.DeadLetters, 1)
	}
	s.flow(e, dead)
	known, missed := e.held.settled(s.group.ID, s.row.ID, s.Lease, s.Committed, s.Released)
	s.foreign, s.missed = !known, missed
	e.due(s.DueMs)
}

// flow counts what became of the messages that the settle passed, dead of them to the dead letters.
func (s *settle) flow(e *Engine, dead int64) {
	count := func(f metrics.Traffic, n int64) { e.Metrics.Flow(s.group.Project, s.group.QueueID, s.group.ID, f, n) }
	count(metrics.Dead, dead)
	count(metrics.Done, s.Committed-s.Expected-dead)
	switch s.Action {
	case actFailed, actRetry, actNack:
		count(metrics.FailedAttempts, 1-dead)
	}
}

// hint is what the settle left for others. here: for pops of this broker too; otherwise it only tells the one that delivered
// the batch, which holds hints back until it hears that the lease has ended.
func (s *settle) hint() (h Hint, here, ok bool) {
	if s.Lease == (uuid.UUID{}) && s.Applied && s.Outcome != outNeedCopy && !s.Released && s.Pending && s.DueMs < 0 {
		// There was no lease to end, but pops have passed over the cursor while it was locked.
		return Hint{Queue: s.group.QueueID, Partition: s.row.ID}, true, true
	}
	freed := s.Applied && s.Outcome != outNeedCopy && s.Released
	ended := freed && s.DueMs < 0
	here = ended && s.Pending || freed && s.group.Limited() // there is room for another lane
	return Hint{Queue: s.group.QueueID, Group: s.group.ID, Partition: s.row.ID}, here, here || (ended && s.foreign)
}

// acks is how many of the settles are acks, and not batches given back.
func acks(settles []*settle) (n int64) {
	for _, s := range settles {
		if s.Action < actGiveBack {
			n++
		}
	}
	return n
}

func (s *settle) finish(err error) {
	s.Err = err
	if s.done != nil {
		close(s.done)
	}
}

func (e *Engine) boardSettle(s *settle) {
	if !e.dock.enter(s.partition.Lane, func(b *board) { b.settles = append(b.settles, s) }) {
		s.finish(ErrClosed)
	}
}

func settleParams(settles []*settle) db.SettleCursorsParams {
	p := db.SettleCursorsParams{}
	for i, s := range settles {
		p.Ns = append(p.Ns, int32(i))
		p.GroupIds = append(p.GroupIds, s.group.ID)
		p.PartitionIds = append(p.PartitionIds, s.row.ID)
		p.LeaseIds = append(p.LeaseIds, s.Lease)
		p.Expecteds = append(p.Expecteds, s.Expected)
		p.Actions = append(p.Actions, s.Action)
		p.MoveTos = append(p.MoveTos, s.MoveTo)
		p.FailedAts = append(p.FailedAts, s.FailedAt)
		p.Reaches = append(p.Reaches, s.reached)
		c := s.Copy
		if c == nil {
			c = &deadCopy{frames: []byte{}}
		}
		p.DeadIds = append(p.DeadIds, c.id)
		p.MessageIds = append(p.MessageIds, c.messageID)
		p.TransactionIds = append(p.TransactionIds, c.transactionID)
		p.Errors = append(p.Errors, s.Error)
		p.KeyNos = append(p.KeyNos, c.keyNo)
		p.Codecs = append(p.Codecs, c.codec)
		p.Frames = append(p.Frames, c.frames)
		p.CreatedAts = append(p.CreatedAts, c.createdAt)
	}
	return p
}

func completeParams(settles []*settle) (p db.CompleteCursorsParams) {
	for i, s := range settles {
		p.Ns = append(p.Ns, int32(i))
		p.GroupIds = append(p.GroupIds, s.group.ID)
		p.PartitionIds = append(p.PartitionIds, s.row.ID)
		p.LeaseIds = append(p.LeaseIds, s.Lease)
		p.Expecteds = append(p.Expecteds, s.Expected)
		p.MoveTos = append(p.MoveTos, s.MoveTo)
		p.Reaches = append(p.Reaches, s.reached)
	}
	return p
}

func settleLanesParams(settles []*settle) (p db.SettleLanesParams) {
	for i, s := range settles {
		p.Ns = append(p.Ns, int32(i))
		p.GroupIds = append(p.GroupIds, s.group.ID)
		p.PartitionIds = append(p.PartitionIds, s.row.ID)
		p.LeaseIds = append(p.LeaseIds, s.Lease)
		p.Actions = append(p.Actions, s.Action-laneActions)
		delay := int64(-1)
		if s.Delay >= 0 {
			delay = s.Delay.Milliseconds()
		}
		p.Delays = append(p.Delays, delay)
		p.Reaches = append(p.Reaches, s.reached)
		p.Errors = append(p.Errors, s.Error)
		p.Signatures = append(p.Signatures, s.Signature)
		c := s.Copy
		if c == nil {
			c = &deadCopy{frames: []byte{}}
		}
		p.DeadIds = append(p.DeadIds, c.id)
		p.MessageIds = append(p.MessageIds, c.messageID)
		p.TransactionIds = append(p.TransactionIds, c.transactionID)
		p.KeyNos = append(p.KeyNos, c.keyNo)
		p.Codecs = append(p.Codecs, c.codec)
		p.Frames = append(p.Frames, c.frames)
		p.CreatedAts = append(p.CreatedAts, c.createdAt)
	}
	return p
}

// lockReach is the offset that LockPartitions is given for the settle, or -1 when it cannot drain the partition.
func (s *settle) lockReach() int64 {
	if s.drains() {
		return s.reach()
	}
	return -1
}

// lockSet is the arguments of LockCursors being collected.
type lockSet struct{ db.LockCursorsParams }

func (l *lockSet) add(group int32, partition int64, lease uuid.UUID) {
	l.GroupIds = append(l.GroupIds, group)
	l.PartitionIds = append(l.PartitionIds, partition)
	l.LeaseIds = append(l.LeaseIds, lease)
}

// restore undoes an autoAck claim nobody received.
type restore struct {
	queue      int32
	group      int32
	partition  int64
	start, end int64
	claimed    time.Time // by the database's clock
	rest       bool
	lane       uint64
	tries      int
	done       chan struct{}
}

func (e *Engine) boardRestore(r *restore) {
	if !e.dock.enter(r.lane, func(b *board) { b.restores = append(b.restores, r) }) {
		close(r.done)
	}
}

// oneRestore keeps one restore per cursor, that of the last claim: the others can only be undone after it.
func (f *flusher) oneRestore(rs []*restore) []*restore {
	if len(rs) < 2 {
		return rs
	}
	last := make(map[cursorKey]*restore, len(rs))
	for _, r := range rs {
		if k := (cursorKey{r.group, r.partition}); last[k] == nil || last[k].end < r.end {
			last[k] = r
		}
	}
	kept := rs[:0:0]
	for _, r := range rs {
		if last[cursorKey{r.group, r.partition}] == r {
			kept = append(kept, r)
			continue
		}
		f.e.boardRestore(r)
	}
	return kept
}

func restoreParams(rs []*restore) (p db.RestoreCursorsParams) {
	for _, r := range rs {
		p.GroupIds = append(p.GroupIds, r.group)
		p.PartitionIds = append(p.PartitionIds, r.partition)
		p.StartOffsets = append(p.StartOffsets, r.start)
		p.EndOffsets = append(p.EndOffsets, r.end)
		p.ClaimedAts = append(p.ClaimedAts, r.claimed)
		p.Rests = append(p.Rests, r.rest)
	}
	return p
}

// extend moves the end of one cursor's lease.
type extend struct {
	group     int32
	partition int64
	lease     uuid.UUID
	seconds   int32
	lane      bool // the end is set, not only put off
	limited   bool // of a subscription with a limit on what is in flight

	also  []*extend // the same lease on the same cursor: one row cannot be updated twice in one statement
	until time.Time // zero: the lease had ended
	err   error
	done  chan struct{}
}

func (x *extend) finish(err error) {
	for _, y := range x.also {
		y.until = x.until
		y.finish(err)
	}
	x.also = nil
	x.err = err
	close(x.done)
}

// merge joins extends of one lease on one cursor: the longest counts, for all of them.
func merge(extends []*extend) []*extend {
	if len(extends) < 2 {
		return extends
	}
	type key struct {
		cursorKey
		lease uuid.UUID
	}
	seen := make(map[key]*extend, len(extends))
	kept := extends[:0:0]
	for _, x := range extends {
		k := key{cursorKey{x.group, x.partition}, x.lease}
		if first := seen[k]; first != nil {
			first.seconds = max(first.seconds, x.seconds)
			first.also = append(first.also, x)
			continue
		}
		seen[k] = x
		kept = append(kept, x)
	}
	return kept
}

func extendParams(xs []*extend) (leases db.ExtendLeasesParams, lanes db.ExtendLanesParams) {
	for i, x := range xs {
		p := &leases
		if x.lane {
			p = (*db.ExtendLeasesParams)(&lanes)
		}
		p.Ns = append(p.Ns, int32(i))
		p.GroupIds = append(p.GroupIds, x.group)
		p.PartitionIds = append(p.PartitionIds, x.partition)
		p.LeaseIds = append(p.LeaseIds, x.lease)
		p.Seconds = append(p.Seconds, x.seconds)
	}
	return leases, lanes
}
