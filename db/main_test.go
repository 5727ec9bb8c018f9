package db_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/db"
	"ferrymq/dbtest"
)

func TestMain(m *testing.M) { dbtest.Main(m) }

// everything is the reach of a pushed partition in LockPartitions.
const everything = int64(1<<63 - 1)

var (
	none  uuid.UUID // no lease asked for
	epoch = time.Unix(0, 0).UTC()
)

// world is a fresh database and short ways to put things into it.
type world struct {
	*db.Queries
	t    testing.TB
	dsn  string
	pool *pgxpool.Pool
}

func newWorld(t testing.TB, size int) *world {
	t.Helper()
	dsn := dbtest.New(t)
	pool := dbtest.Pool(t, dsn, size)
	return &world{Queries: db.New(pool), t: t, dsn: dsn, pool: pool}
}

func (w *world) ctx() context.Context { return w.t.Context() }

func must[T any](t testing.TB) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(db.Text(err))
		}
		return v
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(db.Text(err))
	}
}

func equal[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s = %v, want %v", what, got, want)
	}
}

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	if _, err := w.pool.Exec(w.ctx(), sql, args...); err != nil {
		w.t.Fatalf("%s: %s", sql, db.Text(err))
	}
}

func one[T any](w *world, sql string, args ...any) (v T) {
	w.t.Helper()
	if err := w.pool.QueryRow(w.ctx(), sql, args...).Scan(&v); err != nil {
		w.t.Fatalf("%s: %s", sql, db.Text(err))
	}
	return v
}

// queue makes a queue; set is the body of an update, or "".
func (w *world) queue(name, set string) int32 {
	w.t.Helper()
	q := must[db.FerrymqQueue](w.t)(w.QueueCreate(w.ctx(), db.QueueCreateParams{ProjectID: 1, Name: name, Namespace: name, Task: "", UnkeyedLanes: 1}))
	if set != "" {
		w.exec("update ferrymq.queues set "+set+" where id = $1", q.ID)
	}
	return q.ID
}

// group makes a registered group that starts at the oldest message, with its cursors.
func (w *world) group(queue int32, name string) int32 { return w.groupAt(queue, name, "all", &epoch) }

func (w *world) groupAt(queue int32, name, mode string, at *time.Time) int32 {
	w.t.Helper()
	var id int32
	check(w.t, pgx.BeginFunc(w.ctx(), w.pool, func(tx pgx.Tx) error {
		q := db.New(tx)
		if _, err := q.QueueLock(w.ctx(), db.QueueLockParams{ID: queue}); err != nil {
			return err
		}
		g, err := q.GroupCreate(w.ctx(), db.GroupCreateParams{QueueID: queue, Name: name, Registered: true, StartMode: mode, StartAt: at})
		id = g.ID
		return err
	}))
	w.seed(id, 1000)
	return id
}

// seed is the seeding of a group as the catalog does it.
func (w *world) seed(group int32, chunk int64) {
	w.t.Helper()
	for done := false; !done; {
		check(w.t, pgx.BeginFunc(w.ctx(), w.pool, func(tx pgx.Tx) (err error) {
			done, err = seedStep(w.ctx(), db.New(tx), group, chunk)
			return err
		}))
	}
}

func seedStep(ctx context.Context, q *db.Queries, group int32, chunk int64) (done bool, err error) {
	g, err := q.GroupLock(ctx, db.GroupLockParams{ID: group})
	if err != nil || g.Seeded {
		return true, err
	}
	ids, err := q.SeedLock(ctx, db.SeedLockParams{QueueID: g.QueueID, After: g.SeededTo, Max: chunk})
	if err != nil {
		return true, err
	}
	to := g.SeededTo
	if len(ids) > 0 {
		to = ids[len(ids)-1]
		if err := q.SeedCursors(ctx, db.SeedCursorsParams{GroupID: group, StartAt: g.StartAt, Ids: ids}); err != nil {
			return true, err
		}
	}
	done = int64(len(ids)) < chunk
	return done, q.SeedAdvance(ctx, db.SeedAdvanceParams{ID: group, SeededTo: to, Seeded: done})
}

// creation is the arguments of CreatePartitions for one partition.
func creation(public uuid.UUID, queue int32, name string, counts ...int) db.CreatePartitionsParams {
	p := db.CreatePartitionsParams{PublicIds: []uuid.UUID{public}, QueueIds: []int32{queue}, Names: []string{name}, Hiddens: []bool{false}, Totals: []int64{0},
		SegPartitions: []uuid.UUID{}, SegRels: []int64{}, SegCounts: []int32{}, SegKeyNos: []int16{}, SegCodecs: []int16{},
		SegFirstIds: []uuid.UUID{}, SegKeys: [][]byte{}, SegFrames: [][]byte{}}
	for _, n := range counts {
		p.SegPartitions = append(p.SegPartitions, public)
		p.SegRels = append(p.SegRels, p.Totals[0])
		p.SegCounts = append(p.SegCounts, int32(n))
		p.SegKeyNos = append(p.SegKeyNos, 0)
		p.SegCodecs = append(p.SegCodecs, 0)
		p.SegFirstIds = append(p.SegFirstIds, must7())
		p.SegKeys = append(p.SegKeys, []byte{})
		p.SegFrames = append(p.SegFrames, fmt.Appendf(nil, "%d", p.Totals[0]))
		p.Totals[0] += int64(n)
	}
	return p
}

func must7() uuid.UUID { return uuid.Must(uuid.NewV7()) }

// partition makes a partition with one segment per count and the cursors of the groups.
func (w *world) partition(queue int32, name string, counts ...int) int64 {
	w.t.Helper()
	p := creation(uuid.New(), queue, name, counts...)
	var f db.Flush
	var made []db.CreatePartitionsRow
	f.CreatePartitions(p, &made)
	f.CreateCursors(db.CreateCursorsParams{PublicIds: p.PublicIds})
	check(w.t, f.Send(w.ctx(), w.pool))
	if len(made) != 1 {
		w.t.Fatalf("partition %q was not made", name)
	}
	return made[0].ID
}

// push is what a flush appends to one partition: one segment per count.
type push struct {
	partition int64
	expected  int64 // -1: any tail
	counts    []int
}

func appends(pushes ...push) db.AppendSegmentsParams {
	p := db.AppendSegmentsParams{Ids: []int64{}, Totals: []int64{}, ExpectedTails: []int64{}, SegPartitions: []int64{}, SegRels: []int64{},
		SegCounts: []int32{}, SegKeyNos: []int16{}, SegCodecs: []int16{}, SegFirstIds: []uuid.UUID{}, SegKeys: [][]byte{}, SegFrames: [][]byte{}}
	for _, x := range pushes {
		total := int64(0)
		for _, n := range x.counts {
			p.SegPartitions = append(p.SegPartitions, x.partition)
			p.SegRels = append(p.SegRels, total)
			p.SegCounts = append(p.SegCounts, int32(n))
			p.SegKeyNos = append(p.SegKeyNos, 0)
			p.SegCodecs = append(p.SegCodecs, 0)
			p.SegFirstIds = append(p.SegFirstIds, must7())
			p.SegKeys = append(p.SegKeys, []byte{})
			p.SegFrames = append(p.SegFrames, []byte("frames"))
			total += int64(n)
		}
		p.Ids = append(p.Ids, x.partition)
		p.Totals = append(p.Totals, total)
		p.ExpectedTails = append(p.ExpectedTails, x.expected)
	}
	return p
}

// settle is one settle of a flush.
type settle struct {
	group     int32
	partition int64
	lease     uuid.UUID
	expected  int64
	action    int32
	moveTo    int64
	failedAt  int64
	dead      *dead
	err       string
	waits     bool // not for CompleteCursors
}

type dead struct {
	id, message   uuid.UUID
	transactionID string
	frames        []byte
	createdAt     time.Time
}

// The actions and outcomes of SettleCursors.
const (
	complete = iota
	failed
	retry
	deadLetter
	giveBack
	rest

	applied  = 0
	filed    = 1
	needCopy = 2
	noBatch  = 3
	dropped  = 4
)

func (s settle) reach() int64 {
	if s.action == failed || s.action == deadLetter {
		return s.failedAt + 1
	}
	return s.moveTo
}

func settles(list ...settle) db.SettleCursorsParams {
	p := db.SettleCursorsParams{Ns: []int32{}, GroupIds: []int32{}, PartitionIds: []int64{}, LeaseIds: []uuid.UUID{}, Expecteds: []int64{}, Actions: []int32{},
		MoveTos: []int64{}, FailedAts: []int64{}, Reaches: []int64{}, DeadIds: []uuid.UUID{}, MessageIds: []uuid.UUID{}, TransactionIds: []string{},
		Errors: []string{}, KeyNos: []int16{}, Codecs: []int16{}, Frames: [][]byte{}, CreatedAts: []time.Time{}}
	for i, s := range list {
		d := s.dead
		if d == nil {
			d = &dead{frames: []byte{}}
		}
		p.Ns = append(p.Ns, int32(i))
		p.GroupIds = append(p.GroupIds, s.group)
		p.PartitionIds = append(p.PartitionIds, s.partition)
		p.LeaseIds = append(p.LeaseIds, s.lease)
		p.Expecteds = append(p.Expecteds, s.expected)
		p.Actions = append(p.Actions, s.action)
		p.MoveTos = append(p.MoveTos, s.moveTo)
		p.FailedAts = append(p.FailedAts, s.failedAt)
		p.Reaches = append(p.Reaches, s.reach())
		p.DeadIds = append(p.DeadIds, d.id)
		p.MessageIds = append(p.MessageIds, d.message)
		p.TransactionIds = append(p.TransactionIds, d.transactionID)
		p.Errors = append(p.Errors, s.err)
		p.KeyNos = append(p.KeyNos, 0)
		p.Codecs = append(p.Codecs, 0)
		p.Frames = append(p.Frames, d.frames)
		p.CreatedAts = append(p.CreatedAts, d.createdAt)
	}
	return p
}

// slot is one pop that rides in a flush.
type slot struct {
	lease     uuid.UUID
	budget    int64
	parts     int64 // 0: 1
	seconds   int32
	autoAck   bool
	discovery bool
	consumer  string
}

// list is one pool of candidates of a claim.
type list struct {
	group      int32
	from       int64
	scan       bool
	indexFirst bool
	want       int64 // 0: the sum of the slots' parts
	hints      []int64
	slots      []slot
	noFrames   bool
	limited    bool
}

func claims(lists ...list) db.ClaimPartitionsParams {
	p := db.ClaimPartitionsParams{ListNos: []int32{}, ListGroups: []int32{}, ListFroms: []int64{}, ListScans: []bool{}, ListIndexFirsts: []bool{},
		ListWants: []int64{}, ListSlots: []int32{}, ListFrames: []bool{}, ListLimiteds: []bool{}, SpanBytes: 1 << 30, HintLists: []int32{}, HintPartitions: []int64{}, SlotNos: []int32{}, SlotLists: []int32{},
		SlotNths: []int32{}, SlotLeases: []uuid.UUID{}, SlotBudgets: []int64{}, SlotParts: []int64{}, SlotSeconds: []int32{},
		SlotAutoAcks: []bool{}, SlotDiscoveries: []bool{}, SlotConsumers: []string{}}
	for no, l := range lists {
		want := int64(0)
		for nth, s := range l.slots {
			parts := max(s.parts, 1)
			want += parts
			p.SlotNos = append(p.SlotNos, int32(len(p.SlotNos)))
			p.SlotLists = append(p.SlotLists, int32(no))
			p.SlotNths = append(p.SlotNths, int32(nth))
			p.SlotLeases = append(p.SlotLeases, s.lease)
			p.SlotBudgets = append(p.SlotBudgets, s.budget)
			p.SlotParts = append(p.SlotParts, parts)
			p.SlotSeconds = append(p.SlotSeconds, s.seconds)
			p.SlotAutoAcks = append(p.SlotAutoAcks, s.autoAck)
			p.SlotDiscoveries = append(p.SlotDiscoveries, s.discovery)
			p.SlotConsumers = append(p.SlotConsumers, s.consumer)
		}
		if l.want != 0 {
			want = l.want
		}
		p.ListNos = append(p.ListNos, int32(no))
		p.ListGroups = append(p.ListGroups, l.group)
		p.ListFroms = append(p.ListFroms, l.from)
		p.ListScans = append(p.ListScans, l.scan)
		p.ListIndexFirsts = append(p.ListIndexFirsts, l.indexFirst)
		p.ListWants = append(p.ListWants, want)
		p.ListSlots = append(p.ListSlots, int32(len(l.slots)))
		p.ListFrames = append(p.ListFrames, !l.noFrames)
		p.ListLimiteds = append(p.ListLimiteds, l.limited)
		for _, h := range l.hints {
			p.HintLists = append(p.HintLists, int32(no))
			p.HintPartitions = append(p.HintPartitions, h)
		}
	}
	return p
}

// span is what a slot got of one partition.
type span struct {
	list, slot  int32
	partition   int64
	start, take int64
	segments    []db.ClaimPartitionsRow
}

// got is the answer of a claim.
type got struct {
	lists map[int32]db.ClaimPartitionsRow // the first row of each list
	spans []span
}

func read(t testing.TB, rows []db.ClaimPartitionsRow) got {
	t.Helper()
	g := got{lists: map[int32]db.ClaimPartitionsRow{}}
	for _, r := range rows {
		if _, ok := g.lists[r.ListNo]; !ok {
			g.lists[r.ListNo] = r
		}
		if r.SlotNo < 0 {
			continue
		}
		if n := len(g.spans); n == 0 || g.spans[n-1].slot != r.SlotNo || g.spans[n-1].partition != r.PartitionID {
			g.spans = append(g.spans, span{list: r.ListNo, slot: r.SlotNo, partition: r.PartitionID, start: r.StartOffset, take: r.Take})
		}
		s := &g.spans[len(g.spans)-1]
		s.segments = append(s.segments, r)
	}
	for _, s := range g.spans { // the segments cover exactly the span, forward
		first, last := s.segments[0], s.segments[len(s.segments)-1]
		if s.take <= 0 || first.BaseOffset > s.start || first.BaseOffset+int64(first.Count) <= s.start ||
			last.BaseOffset >= s.start+s.take || last.BaseOffset+int64(last.Count) < s.start+s.take || s.start+s.take > first.NextOffset {
			t.Errorf("slot %d, partition %d: segments %d+%d … %d+%d do not cover [%d, +%d) below %d", s.slot, s.partition,
				first.BaseOffset, first.Count, last.BaseOffset, last.Count, s.start, s.take, first.NextOffset)
		}
		for i := 1; i < len(s.segments); i++ {
			if s.segments[i].BaseOffset != s.segments[i-1].BaseOffset+int64(s.segments[i-1].Count) {
				t.Errorf("partition %d: segment %d does not follow %d", s.partition, s.segments[i].BaseOffset, s.segments[i-1].BaseOffset)
			}
		}
	}
	return g
}

func (w *world) claim(lists ...list) got {
	w.t.Helper()
	return read(w.t, must[[]db.ClaimPartitionsRow](w.t)(w.ClaimPartitions(w.ctx(), claims(lists...))))
}

// pop claims everything of one group for one slot.
func (w *world) pop(group int32, lease uuid.UUID) got {
	w.t.Helper()
	return w.claim(list{group: group, scan: true, slots: []slot{{lease: lease, budget: 1000, parts: 100}}})
}

// flight is the operations of one flush.
type flight struct {
	pushes   []push
	settles  []settle
	restores []db.RestoreCursorsParams
	extends  []db.ExtendLeasesParams
	lists    []list
	quick    db.ClaimHintedParams

	locked    []db.LockPartitionsRow
	appended  []db.AppendSegmentsRow
	settled   []db.SettleCursorsRow // and what send adds from completed
	completed []db.CompleteCursorsRow
	extended  []db.ExtendLeasesRow
	hinted    []db.ClaimHintedRow
	claimed   []db.ClaimPartitionsRow
}

// batch queues the statements of a flush in the order a broker does.
func (f *flight) batch() *db.Flush {
	b := new(db.Flush)
	b.FlushSettings(db.FlushSettingsParams{StatementTimeoutMs: "30000", LockTimeoutMs: "20000"}, nil)
	locks, cursors := f.locks()
	if len(locks.Ids) > 0 {
		b.LockPartitions(locks, &f.locked)
	}
	if len(f.pushes) > 0 {
		b.AppendSegments(appends(f.pushes...), &f.appended)
	}
	done, others := f.divided()
	if len(cursors.Pushed) > 0 || len(cursors.GroupIds) > len(done.Ns) {
		b.LockCursors(cursors)
	}
	if len(f.pushes) > 0 {
		b.MarkPending(db.MarkPendingParams{Pushed: cursors.Pushed})
	}
	if len(done.Ns) > 0 {
		b.CompleteCursors(completes(done), &f.completed)
	}
	if len(others.Ns) > 0 {
		b.SettleCursors(others, &f.settled)
	}
	for _, r := range f.restores {
		b.RestoreCursors(r)
	}
	for _, x := range f.extends {
		b.ExtendLeases(x, &f.extended)
	}
	if len(f.quick.SlotNos) > 0 {
		b.ClaimHinted(f.quick, &f.hinted)
	}
	if len(f.lists) > 0 {
		b.ClaimPartitions(claims(f.lists...), &f.claimed)
	}
	return b
}

// send runs the flight.
func (f *flight) send(ctx context.Context, conn interface {
	SendBatch(context.Context, *pgx.Batch) pgx.BatchResults
}) error {
	if err := f.batch().Send(ctx, conn); err != nil {
		return err
	}
	for _, r := range f.completed {
		f.settled = append(f.settled, db.SettleCursorsRow{N: r.N, Committed: r.Committed, Released: r.Released, Pending: r.Pending, DueMs: r.DueMs})
	}
	return nil
}

// divided are the settles for CompleteCursors, and those for SettleCursors. Each keeps its number.
func (f *flight) divided() (done, others db.SettleCursorsParams) {
	var d, o []settle
	var ns, os []int32
	for i, s := range f.settles {
		if s.action == complete && !s.waits {
			d, ns = append(d, s), append(ns, int32(i))
		} else {
			o, os = append(o, s), append(os, int32(i))
		}
	}
	done, others = settles(d...), settles(o...)
	copy(done.Ns, ns)
	copy(others.Ns, os)
	return done, others
}

// completes is the arguments of CompleteCursors for settles that are its business.
func completes(p db.SettleCursorsParams) db.CompleteCursorsParams {
	return db.CompleteCursorsParams{Ns: p.Ns, GroupIds: p.GroupIds, PartitionIds: p.PartitionIds, LeaseIds: p.LeaseIds, Expecteds: p.Expecteds, MoveTos: p.MoveTos, Reaches: p.Reaches}
}

func (f *flight) locks() (db.LockPartitionsParams, db.LockCursorsParams) {
	l := db.LockPartitionsParams{Ids: []int64{}, Reaches: []int64{}}
	c := db.LockCursorsParams{Pushed: []int64{}, GroupIds: []int32{}, PartitionIds: []int64{}, LeaseIds: []uuid.UUID{}}
	for _, x := range f.pushes {
		l.Ids, l.Reaches = append(l.Ids, x.partition), append(l.Reaches, everything)
		c.Pushed = append(c.Pushed, x.partition)
	}
	for _, s := range f.settles {
		l.Ids, l.Reaches = append(l.Ids, s.partition), append(l.Reaches, s.reach())
		c.GroupIds, c.PartitionIds, c.LeaseIds = append(c.GroupIds, s.group), append(c.PartitionIds, s.partition), append(c.LeaseIds, s.lease)
	}
	for _, r := range f.restores {
		for i := range r.GroupIds {
			c.GroupIds, c.PartitionIds, c.LeaseIds = append(c.GroupIds, r.GroupIds[i]), append(c.PartitionIds, r.PartitionIds[i]), append(c.LeaseIds, none)
		}
	}
	for _, x := range f.extends {
		c.GroupIds, c.PartitionIds, c.LeaseIds = append(c.GroupIds, x.GroupIds...), append(c.PartitionIds, x.PartitionIds...), append(c.LeaseIds, x.LeaseIds...)
	}
	return l, c
}

func (w *world) fly(f *flight) *flight {
	w.t.Helper()
	check(w.t, f.send(w.ctx(), w.pool))
	return f
}

// push appends one segment per count and returns where they begin.
func (w *world) push(partition int64, counts ...int) int64 {
	w.t.Helper()
	f := w.fly(&flight{pushes: []push{{partition, -1, counts}}})
	if len(f.appended) != 1 {
		w.t.Fatalf("nothing was appended to partition %d", partition)
	}
	return f.appended[0].Base
}

// settle applies settles in a flush of their own.
func (w *world) settle(list ...settle) []db.SettleCursorsRow {
	w.t.Helper()
	return w.fly(&flight{settles: list}).settled
}

// cursor is a row of cursors.
type cursor struct {
	committed    int64
	batchEnd     *int64
	leaseID      *uuid.UUID
	leaseUntil   *time.Time
	failedOffset *int64
	failures     int32
	notBefore    *time.Time
	pending      bool
	nextOffset   int64
}

func (w *world) cursor(group int32, partition int64) cursor {
	w.t.Helper()
	c, ok := w.findCursor(group, partition)
	if !ok {
		w.t.Fatalf("group %d has no cursor on partition %d", group, partition)
	}
	return c
}

func (w *world) findCursor(group int32, partition int64) (c cursor, ok bool) {
	w.t.Helper()
	err := w.pool.QueryRow(w.ctx(), `select c.committed, c.batch_end, c.lease_id, c.lease_until, c.failed_offset, c.failures, c.not_before, c.pending, p.next_offset
		from ferrymq.cursors c join ferrymq.partitions p on p.id = c.partition_id where c.group_id = $1 and c.partition_id = $2`, group, partition).
		Scan(&c.committed, &c.batchEnd, &c.leaseID, &c.leaseUntil, &c.failedOffset, &c.failures, &c.notBefore, &c.pending, &c.nextOffset)
	if errors.Is(err, pgx.ErrNoRows) {
		return c, false
	}
	check(w.t, err)
	return c, true
}

// noneStuck fails when a cursor has something to deliver that no claim will look for.
func (w *world) noneStuck() {
	w.t.Helper()
	if n := one[int](w, `select count(*) from ferrymq.cursors c join ferrymq.partitions p on p.id = c.partition_id where not c.pending and p.next_offset > c.committed`); n > 0 {
		w.t.Errorf("%d cursors are stuck: not pending with messages to deliver", n)
	}
}

// session is one connection in a transaction.
type session struct {
	*db.Queries
	w  *world
	tx pgx.Tx
}

func (w *world) begin() *session {
	w.t.Helper()
	tx := must[pgx.Tx](w.t)(w.pool.Begin(w.ctx()))
	w.t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return &session{db.New(tx), w, tx}
}

func (s *session) commit() {
	s.w.t.Helper()
	check(s.w.t, s.tx.Commit(s.w.ctx()))
}

// fly runs the statements of a flush inside the session's transaction.
func (s *session) fly(f *flight) *flight {
	s.w.t.Helper()
	check(s.w.t, f.send(s.w.ctx(), s.tx))
	return f
}

// async runs fn and hands out its error.
func async(fn func() error) <-chan error {
	c := make(chan error, 1)
	go func() { c <- fn() }()
	return c
}

func finish(t testing.TB, c <-chan error) error {
	t.Helper()
	select {
	case err := <-c:
		return err
	case <-time.After(30 * time.Second):
		t.Fatal("still waiting after 30 s")
		return nil
	}
}
