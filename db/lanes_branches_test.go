package db_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/db"
	"ferrymq/dbtest"
	"ferrymq/schema"
)

// laneState is a cursor as a lane.
type laneState struct {
	Committed int64
	BatchEnd  *int64
	LeaseID   *uuid.UUID
	Left      *float64 // ms that its lease goes on; -infinity for one that was counted
	Rests     *float64 // ms until not_before
	Pending   bool
	Attempts  int32
	Consumer  *string
	Settled   *uuid.UUID
	Leased    bool // leased_at is set
}

func (w *world) lane(group int32, partition int64) laneState {
	w.t.Helper()
	rows := must[pgx.Rows](w.t)(w.pool.Query(w.ctx(), `select committed, batch_end, lease_id,
		case when lease_until = '-infinity' then '-infinity'::float8 else (extract(epoch from lease_until - clock_timestamp()) * 1000)::float8 end,
		(extract(epoch from not_before - clock_timestamp()) * 1000)::float8, pending, attempts, consumer, settled, leased_at is not null
		from ferrymq.cursors where group_id = $1 and partition_id = $2`, group, partition))
	return must[laneState](w.t)(pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[laneState]))
}

// subscription makes a group of lanes with retries after 1 s, 2 s, 3 s, 3 s, … and 5 attempts; set are further settings.
func (w *world) subscription(queue int32, name, set string) int32 {
	w.t.Helper()
	g := w.group(queue, name)
	w.exec("update ferrymq.groups set kind = 1, project_id = 1, lease_seconds = 60, max_attempts = 5, backoff_initial = 1000, backoff_multiplier = 2, backoff_max = 3000 where id = $1", g)
	if set != "" {
		w.exec("update ferrymq.groups set "+set+" where id = $1", g)
	}
	return g
}

// receive claims one lane as a consumer.
func (w *world) receive(group int32, partition int64, limited bool) (lease uuid.UUID) {
	w.t.Helper()
	lease = uuid.New()
	got := w.claim(list{group: group, scan: true, hints: []int64{partition}, limited: limited, want: 1, slots: []slot{{lease: lease, budget: 1, consumer: "worker"}}})
	if len(got.spans) != 1 || got.spans[0].partition != partition || got.spans[0].take != 1 {
		w.t.Fatalf("received %+v", got.spans)
	}
	return lease
}

const (
	ackLane = iota
	nackLane
	releaseLane
	exhaustLane
	passLane
)

// laneSettle is one settle of a lane. reach: up to where its partition is locked first, -1: it is not.
type laneSettle struct {
	group     int32
	partition int64
	lease     uuid.UUID
	action    int32
	delay     int64
	reach     int64
	dead      *dead
}

// settleLanes runs the statements of a flush.
func (w *world) settleLanes(list ...laneSettle) (settled []db.SettleLanesRow) {
	w.t.Helper()
	p := db.SettleLanesParams{}
	locks, cursors := db.LockPartitionsParams{}, db.LockCursorsParams{Pushed: []int64{}}
	for i, s := range list {
		d := s.dead
		if d == nil {
			d = &dead{frames: []byte{}}
		}
		if s.reach >= 0 {
			locks.Ids, locks.Reaches = append(locks.Ids, s.partition), append(locks.Reaches, s.reach)
		}
		cursors.GroupIds, cursors.PartitionIds, cursors.LeaseIds = append(cursors.GroupIds, s.group), append(cursors.PartitionIds, s.partition), append(cursors.LeaseIds, s.lease)
		p.Ns, p.GroupIds, p.PartitionIds, p.LeaseIds = append(p.Ns, int32(i)), append(p.GroupIds, s.group), append(p.PartitionIds, s.partition), append(p.LeaseIds, s.lease)
		p.Actions, p.Delays, p.Reaches = append(p.Actions, s.action), append(p.Delays, s.delay), append(p.Reaches, s.reach)
		p.Errors, p.Signatures = append(p.Errors, "error 7"), append(p.Signatures, "error <n>")
		p.DeadIds, p.MessageIds, p.TransactionIds = append(p.DeadIds, d.id), append(p.MessageIds, d.message), append(p.TransactionIds, d.transactionID)
		p.KeyNos, p.Codecs, p.Frames, p.CreatedAts = append(p.KeyNos, 0), append(p.Codecs, 0), append(p.Frames, d.frames), append(p.CreatedAts, d.createdAt)
	}
	var b db.Flush
	if len(locks.Ids) > 0 {
		b.LockPartitions(locks, new([]db.LockPartitionsRow))
	}
	b.LockCursors(cursors)
	b.SettleLanes(p, &settled)
	check(w.t, b.Send(w.ctx(), w.pool))
	return settled
}

// between says that a number of ms is there and within bounds; a test may be a while late.
func between(t *testing.T, what string, got *float64, low, high float64) {
	t.Helper()
	if got == nil || *got > high || *got < low-20_000 {
		t.Errorf("%s: %v ms, want %v to %v", what, got, low, high)
	}
}

// TestSettleLane is every branch of settling a lane. Each case has a lane with three messages, of which the first is leased and attempt 1,
// unless before says otherwise.
func TestSettleLane(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	letter := func() *dead {
		return &dead{id: uuid.New(), message: uuid.New(), transactionID: "tx", frames: []byte("copy"), createdAt: epoch}
	}
	ended := "update ferrymq.cursors set lease_until = clock_timestamp() - interval '1 second' where partition_id = $1"
	counted := "update ferrymq.cursors set lease_until = '-infinity', not_before = clock_timestamp() + interval '1 hour' where partition_id = $1"
	atLast := "update ferrymq.cursors set committed = 2, batch_end = 3 where partition_id = $1"
	attempts := func(n int) string {
		return fmt.Sprintf("update ferrymq.cursors set attempts = %d where partition_id = $1", n)
	}
	type want struct {
		nothing  bool // no row, and nothing changed
		needCopy bool // a row that says so, and nothing changed
		filed    bool
		at       int64
		attempts int32
		rests    [2]float64 // ms; 0 0: it does not rest
		drained  bool
		events   string // kinds
	}
	for _, c := range []struct {
		name   string
		policy string
		before []string
		s      laneSettle
		want   want
	}{
		{"ack", "", nil, laneSettle{action: ackLane, reach: -1}, want{at: 1}},
		{"ack that cannot drain, with the lock", "", nil, laneSettle{action: ackLane, reach: 1}, want{at: 1}},
		{"ack of the last, without the lock", "", []string{atLast}, laneSettle{action: ackLane, reach: -1}, want{at: 3}},
		{"ack of the last, with the lock", "", []string{atLast}, laneSettle{action: ackLane, reach: 3}, want{at: 3, drained: true}},
		{"ack of what was the last", "", []string{atLast, "update ferrymq.partitions set next_offset = 4 where id = $1"}, laneSettle{action: ackLane, reach: 3}, want{at: 3}},
		{"ack after the lease", "", []string{ended}, laneSettle{action: ackLane, reach: -1}, want{at: 1}},
		{"ack of a lease that was counted", "", []string{counted}, laneSettle{action: ackLane, reach: -1}, want{at: 1}},
		{"ack at the last attempt", "max_attempts = 1", nil, laneSettle{action: ackLane, reach: -1}, want{at: 1}},
		{"ack of a subscription that traces", "trace_full = true", nil, laneSettle{action: ackLane, reach: -1}, want{at: 1, events: "0 2"}},
		{"ack with another lease", "", nil, laneSettle{action: ackLane, reach: -1, lease: uuid.New()}, want{nothing: true}},
		{"ack, settled already", "", []string{"update ferrymq.cursors set settled = lease_id, lease_id = null, lease_until = null, batch_end = null where partition_id = $1"},
			laneSettle{action: ackLane, reach: -1}, want{nothing: true}},

		{"nack", "", nil, laneSettle{action: nackLane, delay: -1, reach: -1}, want{attempts: 1, rests: [2]float64{900, 1100}, events: "1"}},
		{"nack of the second attempt", "", []string{attempts(2)}, laneSettle{action: nackLane, delay: -1, reach: -1}, want{attempts: 2, rests: [2]float64{1800, 2200}, events: "1"}},
		{"nack, capped", "", []string{attempts(3)}, laneSettle{action: nackLane, delay: -1, reach: -1}, want{attempts: 3, rests: [2]float64{2700, 3300}, events: "1"}},
		{"nack after a million attempts", "max_attempts = 0, backoff_multiplier = 100, backoff_max = 604800000", []string{attempts(1_000_000)}, laneSettle{action: nackLane, delay: -1, reach: -1},
			want{attempts: 1_000_000, rests: [2]float64{0.9 * 604_800_000, 1.1 * 604_800_000}, events: "1"}},
		{"nack without a backoff", "backoff_initial = 0", nil, laneSettle{action: nackLane, delay: -1, reach: -1}, want{attempts: 1, rests: [2]float64{-1, 0}, events: "1"}},
		{"nack, at once", "", nil, laneSettle{action: nackLane, delay: 0, reach: -1}, want{attempts: 1, rests: [2]float64{-1, 0}, events: "1"}},
		{"nack, in a week, above the cap and without jitter", "", nil, laneSettle{action: nackLane, delay: 604_800_000, reach: -1},
			want{attempts: 1, rests: [2]float64{604_800_000, 604_800_000}, events: "1"}},
		{"nack after the lease", "", []string{ended}, laneSettle{action: nackLane, delay: -1, reach: -1}, want{nothing: true}},
		{"nack of a lease that was counted", "", []string{counted}, laneSettle{action: nackLane, delay: -1, reach: -1}, want{nothing: true}},
		{"nack with another lease", "", nil, laneSettle{action: nackLane, delay: -1, reach: -1, lease: uuid.New()}, want{nothing: true}},
		{"nack of what retention took", "", []string{"update ferrymq.partitions set first_offset = 2 where id = $1"}, laneSettle{action: nackLane, delay: -1, reach: -1}, want{attempts: 1, events: "1"}},
		{"nack at the last attempt, no copy", "", []string{attempts(5)}, laneSettle{action: nackLane, delay: -1, reach: -1}, want{needCopy: true}},
		{"nack at the last attempt", "", []string{attempts(5)}, laneSettle{action: nackLane, delay: -1, reach: -1, dead: letter()}, want{filed: true, at: 1, events: "1 3"}},
		{"nack at the last attempt, later", "", []string{attempts(5)}, laneSettle{action: nackLane, delay: 604_800_000, reach: -1, dead: letter()}, want{filed: true, at: 1, events: "1 3"}},
		{"nack of the last at the last attempt", "", []string{attempts(5), atLast}, laneSettle{action: nackLane, delay: -1, reach: 3, dead: letter()}, want{filed: true, at: 3, drained: true, events: "1 3"}},
		{"nack after max_attempts was lowered", "max_attempts = 2", []string{attempts(4)}, laneSettle{action: nackLane, delay: -1, reach: -1, dead: letter()}, want{filed: true, at: 1, events: "1 3"}},
		{"nack with attempts left and a copy", "", nil, laneSettle{action: nackLane, delay: 0, reach: -1, dead: letter()}, want{attempts: 1, rests: [2]float64{-1, 0}, events: "1"}},
		{"nack without a limit", "max_attempts = 0", []string{attempts(99)}, laneSettle{action: nackLane, delay: 0, reach: -1}, want{attempts: 99, rests: [2]float64{-1, 0}, events: "1"}},

		{"release", "", nil, laneSettle{action: releaseLane, reach: -1}, want{}},
		{"release of the last attempt", "", []string{attempts(5)}, laneSettle{action: releaseLane, reach: -1}, want{attempts: 4}},
		{"release after the lease", "", []string{ended}, laneSettle{action: releaseLane, reach: -1}, want{nothing: true}},
		{"release with another lease", "", nil, laneSettle{action: releaseLane, reach: -1, lease: uuid.New()}, want{nothing: true}},

		{"exhausted, no copy", "", []string{attempts(5), ended}, laneSettle{action: exhaustLane, reach: -1}, want{needCopy: true}},
		{"exhausted", "", []string{attempts(5), ended}, laneSettle{action: exhaustLane, reach: -1, dead: letter()}, want{filed: true, at: 1, events: "3"}},
		{"exhausted with another lease", "", []string{attempts(5)}, laneSettle{action: exhaustLane, reach: -1, dead: letter(), lease: uuid.New()}, want{nothing: true}},
		{"passed over", "trace_full = true", nil, laneSettle{action: passLane, reach: -1}, want{at: 1, events: "0"}},
		{"the last passed over, with the lock", "", []string{atLast}, laneSettle{action: passLane, reach: 3}, want{at: 3, drained: true}},

		{"a deleted subscription", "", []string{"update ferrymq.groups set deleted_at = now() where id = (select group_id from ferrymq.cursors where partition_id = $1)"},
			laneSettle{action: ackLane, reach: -1}, want{nothing: true}},
		{"a deleted stream", "", []string{"update ferrymq.queues set deleted_at = now() where id = (select queue_id from ferrymq.partitions where id = $1)"},
			laneSettle{action: ackLane, reach: -1}, want{nothing: true}},
		{"a partition that is gone", "", []string{"delete from ferrymq.partitions where id = $1"}, laneSettle{action: ackLane, reach: 1}, want{nothing: true}},
		{"a counted lane", "max_in_flight = 3", nil, laneSettle{action: ackLane, reach: -1}, want{at: 1}},
		{"a counted lane, no copy", "max_in_flight = 3, max_attempts = 1", nil, laneSettle{action: nackLane, reach: -1}, want{needCopy: true}},
		{"a paused subscription", "", []string{"update ferrymq.groups set paused = true where id = (select group_id from ferrymq.cursors where partition_id = $1)"},
			laneSettle{action: ackLane, reach: -1}, want{at: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := &world{Queries: w.Queries, t: t, dsn: w.dsn, pool: w.pool}
			q := w.queue(c.name, "")
			g := w.subscription(q, c.name, c.policy)
			p := w.partition(q, "p", 3)
			limited := one[bool](w, "select max_in_flight > 0 from ferrymq.groups where id = $1", g)
			lease := w.receive(g, p, limited)
			for _, sql := range c.before {
				w.exec(sql, p)
			}
			before := w.lane(g, p)
			s := c.s
			s.group, s.partition = g, p
			if s.lease == none {
				s.lease = lease
			}
			rows := w.settleLanes(s)
			after := w.lane(g, p)
			events := one[string](w, "select coalesce(string_agg(kind::text, ' ' order by kind), '') from ferrymq.lane_events where partition_id = $1", p)
			equal(t, "counted in flight", one[int](w, "select count(*) from ferrymq.in_flight where partition_id = $1", p) == 1, limited && (c.want.nothing || c.want.needCopy))
			if c.want.nothing || c.want.needCopy {
				if c.want.nothing && len(rows) > 0 || c.want.needCopy && (len(rows) != 1 || rows[0].Outcome != needCopy) {
					t.Errorf("answered %+v", rows)
				}
				before.Left, after.Left, before.Rests, after.Rests = nil, nil, nil, nil // time passes
				if deref(before) != deref(after) {
					t.Errorf("the lane was %s and is %s", deref(before), deref(after))
				}
				equal(t, "events", events, "")
				equal(t, "dead letters", one[int](w, "select count(*) from ferrymq.dead_letters where group_id = $1", g), 0)
				return
			}
			if len(rows) != 1 || rows[0].Committed != c.want.at || rows[0].Pending == c.want.drained || rows[0].Outcome != map[bool]int32{true: filed}[c.want.filed] {
				t.Fatalf("answered %+v", rows)
			}
			if after.Committed != c.want.at || after.Attempts != c.want.attempts || after.Pending == c.want.drained || after.LeaseID != nil || after.Left != nil || after.BatchEnd != nil ||
				after.Settled == nil || *after.Settled != lease || after.Consumer == nil || *after.Consumer != "worker" {
				t.Errorf("the lane is %s", deref(after))
			}
			if r := c.want.rests; r == [2]float64{} {
				if after.Rests != nil || rows[0].DueMs != -1 {
					t.Errorf("the lane rests %v ms, the answer says %d", after.Rests, rows[0].DueMs)
				}
			} else {
				between(t, "rest", after.Rests, r[0], r[1])
				due := float64(rows[0].DueMs)
				between(t, "due", &due, r[0], r[1])
				if due < r[0]-1000 { // that is said as of the statement
					t.Errorf("due in %v ms, want at least %v", due, r[0])
				}
			}
			equal(t, "events", events, c.want.events)
			if !c.want.filed {
				equal(t, "dead letters", one[int](w, "select count(*) from ferrymq.dead_letters where group_id = $1", g), 0)
				return
			}
			equal(t, "dead letter", one[string](w, `select concat_ws(' ', queue_id = $2, partition_id = $3, message_offset, message_id = $4, transaction_id, error_message, signature, retry_count, consumer,
				convert_from(frames, 'UTF8'), message_created_at = to_timestamp(0), first_failed_at <= clock_timestamp()) from ferrymq.dead_letters where group_id = $1 and id = $5`, g, q, p, s.dead.message, s.dead.id),
				fmt.Sprintf("t t %d t tx error 7 error <n> %d worker copy t t", before.Committed, before.Attempts))
		})
	}
}

func deref(s laneState) string {
	out := fmt.Sprintf("at %d, pending %v, attempts %d, leased_at %v", s.Committed, s.Pending, s.Attempts, s.Leased)
	add := func(name string, there bool, v func() any) {
		if there {
			out += ", " + name + " " + fmt.Sprint(v())
		}
	}
	add("until", s.BatchEnd != nil, func() any { return *s.BatchEnd })
	add("lease", s.LeaseID != nil, func() any { return *s.LeaseID })
	add("for", s.Left != nil, func() any { return *s.Left })
	add("rests", s.Rests != nil, func() any { return *s.Rests })
	add("consumer", s.Consumer != nil, func() any { return *s.Consumer })
	add("settled", s.Settled != nil, func() any { return *s.Settled })
	return out
}

// TestSettleLaneJitter: waits after the first attempt lie within 10 % of the policy's, on both sides of it.
func TestSettleLaneJitter(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	g := w.subscription(q, "s", "backoff_initial = 3000000, backoff_max = 3000000")
	for i := range 100 {
		w.partition(q, fmt.Sprint(i), 1)
	}
	lease := uuid.New()
	var all []laneSettle
	for _, s := range w.claim(list{group: g, scan: true, slots: []slot{{lease: lease, budget: 100, parts: 100}}}).spans {
		all = append(all, laneSettle{group: g, partition: s.partition, lease: lease, action: nackLane, delay: -1, reach: -1})
	}
	rows := w.settleLanes(all...)
	equal(t, "settled", len(rows), 100)
	low, high := int64(math.MaxInt64), int64(0)
	for _, r := range rows {
		low, high = min(low, r.DueMs), max(high, r.DueMs)
	}
	if low < 2_695_000 || low > 2_900_000 || high < 3_100_000 || high > 3_300_000 {
		t.Errorf("the waits lie between %d and %d ms", low, high)
	}
}

// TestSettleLaneFirstFailure: a dead letter knows when its message failed first.
func TestSettleLaneFirstFailure(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	g := w.subscription(q, "s", "max_attempts = 2")
	p := w.partition(q, "p", 1)
	w.settleLanes(laneSettle{group: g, partition: p, lease: w.receive(g, p, false), action: nackLane, reach: -1})
	w.exec("update ferrymq.lane_events set at = at - interval '1 hour'")
	w.exec("update ferrymq.cursors set not_before = null")
	w.settleLanes(laneSettle{group: g, partition: p, lease: w.receive(g, p, false), action: nackLane, reach: -1, dead: &dead{id: uuid.New(), frames: []byte("f"), createdAt: epoch}})
	equal(t, "first failure", one[bool](w, "select first_failed_at between clock_timestamp() - interval '61 minutes' and clock_timestamp() - interval '59 minutes' and retry_count = 2 from ferrymq.dead_letters"), true)
}

// TestExtendLane is every branch of extending a lane.
func TestExtendLane(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	for _, c := range []struct {
		name    string
		before  string
		lease   uuid.UUID
		seconds int32
		applies bool
	}{
		{"longer", "", none, 3600, true},
		{"shorter", "", none, 30, true},
		{"ended", "update ferrymq.cursors set lease_until = clock_timestamp() - interval '1 ms' where partition_id = $1", none, 60, false},
		{"counted", "update ferrymq.cursors set lease_until = '-infinity' where partition_id = $1", none, 60, false},
		{"another lease", "", uuid.New(), 60, false},
		{"settled", "update ferrymq.cursors set settled = lease_id, lease_id = null, lease_until = null, batch_end = null where partition_id = $1", none, 60, false},
	} {
		for _, limited := range []bool{false, true} {
			t.Run(fmt.Sprint(c.name, " ", limited), func(t *testing.T) {
				w := &world{Queries: w.Queries, t: t, dsn: w.dsn, pool: w.pool}
				q := w.queue(t.Name(), "")
				g := w.subscription(q, t.Name(), fmt.Sprintf("max_in_flight = %d", map[bool]int{true: 3}[limited]))
				p := w.partition(q, "p", 2)
				lease := w.receive(g, p, limited)
				if c.before != "" {
					w.exec(c.before, p)
				}
				before := w.lane(g, p)
				if c.lease != none {
					lease = c.lease
				}
				rows := must[[]db.ExtendLanesRow](t)(w.ExtendLanes(w.ctx(), db.ExtendLanesParams{Ns: []int32{0}, GroupIds: []int32{g}, PartitionIds: []int64{p}, LeaseIds: []uuid.UUID{lease}, Seconds: []int32{c.seconds}}))
				after := w.lane(g, p)
				if !c.applies {
					before.Left, after.Left = nil, nil
					if len(rows) > 0 || deref(before) != deref(after) {
						t.Errorf("answered %+v, the lane was %s and is %s", rows, deref(before), deref(after))
					}
					return
				}
				want := float64(c.seconds) * 1000
				between(t, "lease", after.Left, want, want)
				if len(rows) != 1 || after.Attempts != 1 || *after.LeaseID != lease {
					t.Fatalf("answered %+v, the lane is %s", rows, deref(after))
				}
				equal(t, "the answer says what holds", one[bool](w, "select lease_until = $2 from ferrymq.cursors where partition_id = $1", p, rows[0].LeaseUntil), true)
				equal(t, "in flight for as long", one[int](w, "select count(*) from ferrymq.in_flight f join ferrymq.cursors c using (group_id, partition_id, lease_until) where partition_id = $1", p), map[bool]int{true: 1}[limited])
			})
		}
	}
}

// TestClaimLane is every branch of claiming a lane. Each case has a lane with three messages, changed by before.
func TestClaimLane(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	old := uuid.MustParse("00000000-0000-7000-8000-00000000000d")
	lapsed := func(ago string, attempts int) string {
		return fmt.Sprintf(`update ferrymq.cursors set lease_id = '%s', lease_until = clock_timestamp() - interval '%s', batch_end = committed + 1, attempts = %d, consumer = 'last', leased_at = now() where partition_id = $1`, old, ago, attempts)
	}
	type want struct {
		gone      bool // the list is not answered
		seen      int32
		none      bool // nothing is claimed
		start     int64
		attempt   int32
		exhausted bool
		seconds   float64
		events    string
		rests     [2]float64 // ms: the lane is put aside
		drained   bool
	}
	for _, c := range []struct {
		name   string
		policy string
		before []string
		list   list
		want   want
	}{
		{"fresh", "", nil, list{scan: true}, want{seen: 1, attempt: 1, seconds: 60}},
		{"by hint alone", "", nil, list{hints: []int64{0}}, want{seen: 1, attempt: 1, seconds: 60}},
		{"by hint and index", "", nil, list{scan: true, hints: []int64{0, 0}}, want{seen: 1, attempt: 1, seconds: 60}},
		{"traced", "trace_full = true", nil, list{scan: true}, want{seen: 1, attempt: 1, seconds: 60, events: "0"}},
		{"again after a nack", "", []string{"update ferrymq.cursors set attempts = 3 where partition_id = $1"}, list{scan: true}, want{seen: 1, attempt: 4, seconds: 60}},
		{"live", "", []string{lapsed("-1 hour", 1)}, list{scan: true, hints: []int64{0}}, want{none: true}},
		{"resting", "", []string{"update ferrymq.cursors set not_before = now() + interval '1 hour', attempts = 1 where partition_id = $1"}, list{scan: true, hints: []int64{0}}, want{none: true}},
		{"due, but not promoted", "", []string{"update ferrymq.cursors set not_before = now() - interval '1 second', attempts = 1 where partition_id = $1"}, list{scan: true}, want{none: true}},
		{"due, by hint", "", []string{"update ferrymq.cursors set not_before = now() - interval '1 second', attempts = 1 where partition_id = $1"}, list{hints: []int64{0}}, want{seen: 1, attempt: 2, seconds: 60}},
		{"a lapsed lease", "", []string{lapsed("1 ms", 1)}, list{scan: true}, want{seen: 1, none: true, attempt: 1, events: "1", rests: [2]float64{900, 1100}}},
		{"a lapsed lease of the second attempt", "", []string{lapsed("1 ms", 2)}, list{scan: true}, want{seen: 1, none: true, attempt: 2, events: "1", rests: [2]float64{1800, 2200}}},
		{"a lapsed lease after many attempts", "max_attempts = 0, backoff_multiplier = 100", []string{lapsed("1 ms", 1_000_000)}, list{hints: []int64{0}},
			want{seen: 1, none: true, attempt: 1_000_000, events: "1", rests: [2]float64{2700, 3300}}},
		{"a lease that lapsed longer ago than its backoff", "", []string{lapsed("2 seconds", 1)}, list{scan: true}, want{seen: 1, attempt: 2, seconds: 60, events: "1"}},
		{"a lapsed lease that does not count", "count_expired_leases = false", []string{lapsed("1 ms", 2)}, list{scan: true}, want{seen: 1, attempt: 2, seconds: 60}},
		{"a lapsed lease that does not count, of the last attempt", "count_expired_leases = false", []string{lapsed("1 ms", 5)}, list{scan: true}, want{seen: 1, attempt: 5, seconds: 60}},
		{"a lapsed lease that was counted", "", []string{lapsed("1 ms", 1), "update ferrymq.cursors set lease_until = '-infinity' where partition_id = $1"}, list{scan: true}, want{seen: 1, attempt: 2, seconds: 60}},
		{"a lapsed lease of the last attempt", "", []string{lapsed("1 ms", 5)}, list{scan: true}, want{seen: 1, attempt: 5, seconds: 30, exhausted: true, events: "1"}},
		{"the same, of a short lease", "lease_seconds = 7", []string{lapsed("1 ms", 5)}, list{scan: true}, want{seen: 1, attempt: 5, seconds: 7, exhausted: true, events: "1"}},
		{"a lapsed lease of a message that retention took", "", []string{lapsed("1 ms", 5), "update ferrymq.partitions set first_offset = 2 where id = $1"}, list{scan: true}, want{seen: 1, start: 2, attempt: 1, seconds: 60}},
		{"retention took all", "", []string{"update ferrymq.partitions set first_offset = 3 where id = $1"}, list{scan: true}, want{seen: 1, none: true, start: 3, drained: true}},
		{"paused", "paused = true", nil, list{scan: true, hints: []int64{0}}, want{seen: -1, none: true}},
		{"limited", "max_in_flight = 2", nil, list{scan: true, limited: true}, want{seen: 1, attempt: 1, seconds: 60}},
		{"limited and full", "max_in_flight = 1", []string{"insert into ferrymq.in_flight select group_id, -1, now() + interval '1 hour' from ferrymq.cursors where partition_id = $1"}, list{scan: true, limited: true, hints: []int64{0}}, want{seen: -1, none: true}},
		{"limited, full of what has lapsed", "max_in_flight = 1", []string{"insert into ferrymq.in_flight select group_id, -1, now() - interval '1 ms' from ferrymq.cursors where partition_id = $1"}, list{scan: true, limited: true}, want{seen: 1, attempt: 1, seconds: 60}},
		{"limited, which the claim does not know", "max_in_flight = 2", nil, list{scan: true}, want{gone: true, none: true}},
		{"not limited any more", "", nil, list{scan: true, limited: true}, want{seen: 1, attempt: 1, seconds: 60}},
		{"a message of another subscription", "", []string{"update ferrymq.segments set only_group = 999 where partition_id = $1"}, list{scan: true}, want{seen: 1, attempt: 1, seconds: 60}},
		{"drained", "", []string{"update ferrymq.cursors set committed = 3 where partition_id = $1"}, list{scan: true}, want{seen: 1, none: true, start: 3, drained: true}},
		{"the stream delays", "", []string{"update ferrymq.queues set delayed_processing = 60 where id = (select queue_id from ferrymq.partitions where id = $1)"}, list{scan: true}, want{seen: 1, none: true, rests: [2]float64{59_000, 60_000}}},
		{"a deleted subscription", "", []string{"update ferrymq.groups set deleted_at = now() where id = (select group_id from ferrymq.cursors where partition_id = $1)"}, list{scan: true, hints: []int64{0}}, want{gone: true, none: true}},
		{"a deleted stream", "", []string{"update ferrymq.queues set deleted_at = now() where id = (select queue_id from ferrymq.partitions where id = $1)"}, list{scan: true}, want{gone: true, none: true}},
		{"a partition that is gone", "", []string{"delete from ferrymq.partitions where id = $1"}, list{scan: true, hints: []int64{0}}, want{none: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := &world{Queries: w.Queries, t: t, dsn: w.dsn, pool: w.pool}
			q := w.queue(c.name, "")
			g := w.subscription(q, c.name, c.policy)
			p := w.partition(q, "p", 3)
			for _, sql := range c.before {
				w.exec(sql, p)
			}
			before := w.lane(g, p)
			l := c.list
			lease := uuid.New()
			l.group, l.slots = g, []slot{{lease: lease, budget: 100, parts: 100, consumer: "worker"}}
			for i := range l.hints {
				l.hints[i] = p
			}
			got := w.claim(l)
			after := w.lane(g, p)
			answer, answered := got.lists[0]
			if answered == c.want.gone || answer.Seen != c.want.seen {
				t.Errorf("seen %d, answered %v", answer.Seen, answered)
			}
			equal(t, "events", one[string](w, "select coalesce(string_agg(kind::text, ' ' order by kind), '') from ferrymq.lane_events where partition_id = $1", p), c.want.events)
			equal(t, "expired of whom", one[int](w, "select count(*) from ferrymq.lane_events where partition_id = $1 and kind = 1 and (consumer, error, attempt) is distinct from ('last', 'lease expired', $2)", p, before.Attempts), 0)
			equal(t, "in flight", one[int](w, "select count(*) from ferrymq.in_flight where partition_id = $1", p) == 1, !c.want.none && l.limited && c.policy != "")
			if !c.want.none {
				if len(got.spans) != 1 || got.spans[0].take != 1 || got.spans[0].start != c.want.start {
					t.Fatalf("claimed %+v", got.spans)
				}
				r := got.spans[0].segments[0]
				if r.Attempt != c.want.attempt || r.Exhausted != c.want.exhausted || float64(r.LeaseMs) != c.want.seconds*1000 || len(got.spans[0].segments) != 1 {
					t.Errorf("claimed as attempt %d, exhausted %v, for %d ms", r.Attempt, r.Exhausted, r.LeaseMs)
				}
				who := map[bool]string{true: "last", false: "worker"}[c.want.exhausted]
				if after.Committed != c.want.start || *after.BatchEnd != c.want.start+1 || *after.LeaseID != lease || !after.Pending || after.Rests != nil || after.Attempts != c.want.attempt || *after.Consumer != who || !after.Leased {
					t.Errorf("the lane is %s", deref(after))
				}
				between(t, "lease", after.Left, c.want.seconds*1000, c.want.seconds*1000)
				return
			}
			if len(got.spans) > 0 {
				t.Fatalf("claimed %+v", got.spans)
			}
			switch {
			case c.want.rests != [2]float64{}:
				between(t, "rest", after.Rests, c.want.rests[0], c.want.rests[1])
				equal(t, "stale", answer.Stale, 1)
				if before.LeaseID != nil && (*after.LeaseID != old || after.Left == nil || !math.IsInf(*after.Left, -1) || *after.BatchEnd != 1) {
					t.Errorf("the lease is not kept: %s", deref(after))
				}
				if after.Attempts != c.want.attempt || !after.Pending || after.Committed != 0 {
					t.Errorf("the lane is %s", deref(after))
				}
			case c.want.drained:
				if after.Pending || after.Committed != c.want.start || after.LeaseID != nil || after.Attempts != 0 {
					t.Errorf("the lane is %s", deref(after))
				}
			default:
				before.Left, after.Left, before.Rests, after.Rests = nil, nil, nil, nil
				if deref(before) != deref(after) {
					t.Errorf("the lane was %s and is %s", deref(before), deref(after))
				}
			}
		})
	}
}

// TestClaimLanesDeal: messages are dealt to the receives of a flush one by one, each of another lane, and hints are no way around a limit.
func TestClaimLanesDeal(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	var ids []int64
	names := map[int64]string{}
	for _, n := range []string{"a", "b", "c", "d", "e"} {
		p := w.partition(q, n, 4, 4)
		ids, names[p] = append(ids, p), n
	}
	for _, c := range []struct {
		name, policy string
		list         list
		want         map[int32][]string
	}{
		{"in turn", "", list{scan: true, slots: slots(2, 100, 100)}, map[int32][]string{0: {"a:0+1", "c:0+1", "e:0+1"}, 1: {"b:0+1", "d:0+1"}}},
		{"as many as asked for", "", list{scan: true, slots: slots(2, 2, 2)}, map[int32][]string{0: {"a:0+1", "c:0+1"}, 1: {"b:0+1", "d:0+1"}}},
		{"more receives than lanes", "", list{scan: true, slots: slots(9, 1, 1)}, map[int32][]string{0: {"a:0+1"}, 1: {"b:0+1"}, 2: {"c:0+1"}, 3: {"d:0+1"}, 4: {"e:0+1"}}},
		{"hints first", "", list{scan: true, hints: []int64{ids[4], ids[2]}, slots: slots(1, 3, 3)}, map[int32][]string{0: {"e:0+1", "c:0+1", "a:0+1"}}},
		{"limited", "max_in_flight = 3", list{scan: true, limited: true, slots: slots(2, 100, 100)}, map[int32][]string{0: {"a:0+1", "c:0+1"}, 1: {"b:0+1"}}},
		{"limited, all hinted", "max_in_flight = 2", list{scan: true, limited: true, hints: ids, slots: slots(2, 100, 100)}, map[int32][]string{0: {"a:0+1"}, 1: {"b:0+1"}}},
	} {
		g := w.subscription(q, c.name, c.policy)
		c.list.group = g
		got := w.claim(c.list).took(names)
		if fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
		// Nothing of it is there for anybody else.
		for _, s := range w.claim(list{group: g, scan: true, limited: c.list.limited, hints: ids, slots: slots(1, 100, 100)}).spans {
			for _, l := range c.want {
				for _, taken := range l {
					if taken == fmt.Sprintf("%s:%d+%d", names[s.partition], s.start, s.take) {
						t.Errorf("%s: %s was claimed twice", c.name, taken)
					}
				}
			}
		}
	}
}

// TestLaneLeaseEndsOnce: two claims that meet the same lapsed lease count it once.
func TestLaneLeaseEndsOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	q := w.queue("q", "")
	g := w.subscription(q, "s", "")
	p := w.partition(q, "p", 2)
	w.receive(g, p, false)
	w.exec("update ferrymq.cursors set lease_until = clock_timestamp() - interval '1 ms'")
	l := list{group: g, scan: true, hints: []int64{p}, slots: slots(1, 1, 1)}
	a, b := w.begin(), w.begin()
	must[[]db.ClaimPartitionsRow](t)(a.ClaimPartitions(w.ctx(), claims(l)))
	equal(t, "passed over while another session has it", read(t, must[[]db.ClaimPartitionsRow](t)(b.ClaimPartitions(w.ctx(), claims(l)))).lists[0].Seen, 0)
	a.commit()
	must[[]db.ClaimPartitionsRow](t)(b.ClaimPartitions(w.ctx(), claims(l)))
	b.commit()
	equal(t, "counted", one[int](w, "select count(*) from ferrymq.lane_events"), 1)
	if s := w.lane(g, p); s.Attempts != 1 || s.Rests == nil {
		t.Errorf("the lane is %s", deref(s))
	}
}

// TestHotLanes is TestHot for lanes with a backlog: claims, acks, nacks that come again at once, and releases change no index; only a lane
// that rests leaves one and enters the other.
func TestHotLanes(t *testing.T) {
	t.Parallel()
	dsn := dbtest.Durable(t).DSN
	check(t, schema.Migrate(t.Context(), dsn))
	pool := dbtest.Pool(t, dsn, 1)
	w := &world{Queries: db.New(pool), t: t, dsn: dsn, pool: pool}
	q := w.queue("q", "")
	const lanes = 200
	for i := range lanes {
		w.partition(q, fmt.Sprint(i), 500)
	}
	g := w.subscription(q, "s", "max_attempts = 0")
	count := func() (updates, hot int64) {
		w.exec("select pg_stat_force_next_flush()")
		w.exec("select 1")
		check(t, w.pool.QueryRow(t.Context(), "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relname = 'cursors'").Scan(&updates, &hot))
		return updates, hot
	}
	u0, h0 := count()
	from := int64(0)
	for i := range 300 {
		lease := uuid.New()
		got := w.claim(list{group: g, scan: true, from: from, slots: []slot{{lease: lease, budget: 40, parts: 40, consumer: "worker"}}})
		if l := got.lists[0]; l.BelowTo > 0 {
			from = l.BelowTo
		} else {
			from = l.AboveTo
		}
		var all []laneSettle
		for n, s := range got.spans {
			x := laneSettle{group: g, partition: s.partition, lease: lease, action: ackLane, reach: -1}
			if n == i%40 { // one in forty fails
				x.action, x.delay = nackLane, 1
			}
			all = append(all, x)
		}
		w.settleLanes(all...)
		must[[]db.PromoteDueRow](t)(w.PromoteDue(w.ctx(), db.PromoteDueParams{Max: 100}))
	}
	u, h := count()
	u, h = u-u0, h-h0
	t.Logf("%d updates, %.1f %% HOT", u, 100*float64(h)/float64(u))
	if u < 20_000 || float64(h) < 0.9*float64(u) {
		t.Errorf("%d of %d updates of cursors were HOT", h, u)
	}
}
