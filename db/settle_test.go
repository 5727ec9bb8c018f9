package db_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/db"
)

// settleCase is one settle on one cursor. Offsets are small: the leased batch is [10, 14), the partition's tail is 14 or 20.
type settleCase struct {
	action   int32
	lease    string // live, expired, foreign, unasked (a live one), free (none there, none asked), moved, ahead (live, decided on a lower, a higher offset)
	limit    int32  // retry_limit
	failedAt int64
	before   string // what the cursor has failed before: nothing, here (twice), later (twice)
	files    bool   // the queue has dead letters
	copy     bool
	delay    int32
	tail     int64
	moveTo   int64
	resting  bool // not_before is set
}

type settleState struct {
	committed int64
	end       int64 // -1: no lease
	failed    int64 // -1: none
	failures  int32
	due       string // "", "old", "delay" or "5s"
	pending   bool
}

type settleAnswer struct {
	found    bool
	outcome  int32
	released bool
	dead     bool
}

func (c settleCase) start() settleState {
	s := settleState{committed: 10, end: 14, failed: -1, pending: true}
	if c.lease == "free" {
		s.end = -1
		s.pending = c.tail > 10
	}
	switch c.before {
	case "here":
		s.failed, s.failures = c.failedAt, 2
	case "later":
		s.failed, s.failures = 13, 2
	}
	if c.resting {
		s.due = "old"
	}
	return s
}

// model is what a settle does, said once more in Go.
func (c settleCase) model() (settleState, settleAnswer) {
	s := c.start()
	switch {
	case c.lease == "foreign", c.lease == "ahead", c.lease == "moved" && c.action != complete, c.lease == "expired" && c.action < giveBack:
		return s, settleAnswer{}
	}
	a := settleAnswer{found: true}
	leased := s.end >= 0
	before := int32(0)
	if s.failed == c.failedAt {
		before = s.failures
	}
	exhausted := c.action == failed && leased && before >= c.limit
	to := max(c.moveTo, s.committed)
	switch {
	case c.action == deadLetter && !leased:
		a.outcome = noBatch
	case c.action == deadLetter || exhausted && c.files:
		if !c.copy {
			a.outcome = needCopy
			return s, a
		}
		a.outcome, a.dead, to = filed, true, c.failedAt+1
	case exhausted:
		a.outcome, to = dropped, c.failedAt+1
	}
	moved := to != s.committed
	s.committed = to
	a.released = leased
	if c.action == complete && leased && to < s.end {
		a.released = false
	} else {
		s.end = -1
	}
	if c.action == failed && leased && !exhausted {
		s.failed, s.failures = c.failedAt, before+1
	} else if s.failed < to {
		if s.failed >= 0 || moved {
			s.failed = -1
		}
		s.failures = 0
	}
	switch {
	case c.action == rest:
		s.due = "5s"
	case c.action == failed && leased && !exhausted && c.delay > 0:
		s.due = "delay"
	case c.start().failed < to && moved: // what had failed is behind, its backoff too
		s.due = ""
	}
	reach := c.moveTo
	if c.action == failed || c.action == deadLetter {
		reach = c.failedAt + 1
	}
	if to == reach && c.tail <= reach {
		s.pending = false
	}
	return s, a
}

func settleCases() (all []settleCase) {
	for action := range int32(6) {
		for _, lease := range []string{"live", "expired", "foreign", "unasked", "free", "moved", "ahead"} {
			for _, before := range []string{"", "here", "later"} {
				for _, tail := range []int64{14, 20} {
					for _, moveTo := range []int64{9, 10, 12, 14} {
						for _, failedAt := range []int64{10, 12, 13} {
							if action != failed && action != deadLetter && failedAt != 12 || (action == failed || action == deadLetter) && moveTo > failedAt {
								continue
							}
							if lease == "ahead" && failedAt != 12 || action >= retry && action != deadLetter && moveTo == 14 && lease != "live" {
								continue
							}
							for bits := range 16 {
								c := settleCase{action: action, lease: lease, before: before, tail: tail, moveTo: moveTo, failedAt: failedAt,
									limit: int32(bits & 1 * 2), files: bits&2 > 0, copy: bits&4 > 0, resting: bits&8 > 0}
								if action != failed && (c.limit > 0 || c.files) || action != failed && action != deadLetter && c.copy {
									continue
								}
								if lease == "free" && tail == 14 && moveTo == 12 {
									c.tail = 10 // drained
								}
								all = append(all, c)
								if action == failed {
									c.delay = 60_000
									all = append(all, c)
								}
							}
						}
					}
				}
			}
		}
	}
	return all
}

// TestSettle compares the statement with the model on every combination, all in one flush.
func TestSettle(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	cases := settleCases()
	type shape struct {
		limit, delay int32
		files        bool
	}
	queues, groups := map[shape]int32{}, map[shape]int32{}
	for _, c := range cases {
		k := shape{c.limit, c.delay, c.files}
		if queues[k] == 0 {
			queues[k] = w.queue(fmt.Sprint(k), fmt.Sprintf("retry_limit = %d, retry_delay = %d, dead_letter_queue = %t, dlq_after_max_retries = false", c.limit, c.delay, c.files))
			groups[k] = w.group(queues[k], "g")
		}
	}
	old := time.Now().Add(time.Hour).UTC().Truncate(time.Microsecond)
	live := uuid.New()
	var partitions, cursors [][]any
	var list []settle
	for i, c := range cases {
		k := shape{c.limit, c.delay, c.files}
		id := int64(i + 1)
		partitions = append(partitions, []any{id, uuid.New(), queues[k], fmt.Sprint(i), c.tail})
		s := c.start()
		var end, failedOffset, until, lease, due any
		if s.end >= 0 {
			end, lease, until = s.end, live, old
			if c.lease == "expired" {
				until = epoch
			}
		}
		if s.failed >= 0 {
			failedOffset = s.failed
		}
		if s.due != "" {
			due = old
		}
		cursors = append(cursors, []any{groups[k], id, s.committed, end, lease, until, failedOffset, s.failures, due, s.pending})
		x := settle{group: groups[k], partition: id, lease: live, expected: 10, action: c.action, moveTo: c.moveTo, failedAt: c.failedAt, err: "why"}
		switch c.lease {
		case "foreign":
			x.lease = uuid.New()
		case "unasked", "free":
			x.lease = none
		case "moved":
			x.expected = 9
		case "ahead":
			x.expected = 11
		}
		if c.copy {
			x.dead = &dead{id: uuid.New(), message: uuid.New(), transactionID: fmt.Sprint("t", i), frames: []byte("frames"), createdAt: epoch}
		}
		list = append(list, x)
	}
	w.exec("alter table ferrymq.partitions alter column id set generated by default")
	must[int64](t)(w.pool.CopyFrom(t.Context(), pgx.Identifier{"ferrymq", "partitions"}, []string{"id", "public_id", "queue_id", "name", "next_offset"}, pgx.CopyFromRows(partitions)))
	must[int64](t)(w.pool.CopyFrom(t.Context(), pgx.Identifier{"ferrymq", "cursors"},
		[]string{"group_id", "partition_id", "committed", "batch_end", "lease_id", "lease_until", "failed_offset", "failures", "not_before", "pending"}, pgx.CopyFromRows(cursors)))

	answers := map[int32]db.SettleCursorsRow{}
	for _, r := range w.settle(list...) {
		if _, twice := answers[r.N]; twice {
			t.Fatalf("settle %d was answered twice", r.N)
		}
		answers[r.N] = r
	}
	stored := map[int64]cursor{}
	rows := must[pgx.Rows](t)(w.pool.Query(t.Context(), "select partition_id, committed, batch_end, lease_id, failed_offset, failures, not_before, pending from ferrymq.cursors"))
	var id int64
	var row cursor
	must[any](t)(pgx.ForEachRow(rows, []any{&id, &row.committed, &row.batchEnd, &row.leaseID, &row.failedOffset, &row.failures, &row.notBefore, &row.pending}, func() error {
		stored[id] = row
		row = cursor{}
		return nil
	}))
	type letter struct {
		offset  int64
		message uuid.UUID
		id      uuid.UUID
		retries int32
		text    string
	}
	letters := map[int64]letter{}
	var l letter
	rows = must[pgx.Rows](t)(w.pool.Query(t.Context(), "select partition_id, message_offset, message_id, id, retry_count, error_message || transaction_id || convert_from(frames, 'utf8') from ferrymq.dead_letters"))
	must[any](t)(pgx.ForEachRow(rows, []any{&id, &l.offset, &l.message, &l.id, &l.retries, &l.text}, func() error { letters[id] = l; return nil }))

	bad := 0
	for i, c := range cases {
		want, answer := c.model()
		have := stored[int64(i+1)]
		got := settleState{committed: have.committed, end: -1, failed: -1, failures: have.failures, pending: have.pending}
		if have.batchEnd != nil {
			got.end = *have.batchEnd
		}
		if have.failedOffset != nil {
			got.failed = *have.failedOffset
		}
		if have.notBefore != nil {
			switch in := time.Until(*have.notBefore); {
			case have.notBefore.Equal(old):
				got.due = "old"
			case in > 0 && in <= 5*time.Second:
				got.due = "5s"
			case in > 20*time.Second && in <= time.Minute:
				got.due = "delay"
			default:
				got.due = in.String()
			}
		}
		r, found := answers[int32(i)]
		gotAnswer := settleAnswer{found: found, outcome: r.Outcome, released: r.Released}
		letter, filed := letters[int64(i+1)]
		gotAnswer.dead = filed
		ok := got == want && gotAnswer == answer
		if found {
			ok = ok && (r.Outcome == needCopy || r.Committed == want.committed && r.Pending == want.pending && (r.DueMs < 0) == (want.due == ""))
		}
		if filed {
			before := int32(0)
			if s := c.start(); s.failed == c.failedAt {
				before = s.failures
			}
			d := list[i].dead
			ok = ok && letter.offset == c.failedAt && letter.message == d.message && letter.id == d.id && letter.retries == before && letter.text == "why"+d.transactionID+"frames"
		}
		if !ok {
			if bad++; bad < 10 {
				t.Errorf("%+v:\n got %+v %+v %+v\nwant %+v %+v", c, got, gotAnswer, r, want, answer)
			}
		}
	}
	t.Logf("%d cases, %d wrong", len(cases), bad)
}

func TestRestore(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	g := w.group(q, "g")
	taken := func(name string) int64 {
		p := w.partition(q, name, 5)
		w.claim(list{group: g, hints: []int64{p}, slots: []slot{{lease: uuid.New(), budget: 3, autoAck: true}}})
		return p
	}
	restore := func(p, start, end int64, rest bool) {
		w.fly(&flight{restores: []db.RestoreCursorsParams{{GroupIds: []int32{g}, PartitionIds: []int64{p}, StartOffsets: []int64{start}, EndOffsets: []int64{end}, ClaimedAts: []time.Time{time.Now()}, Rests: []bool{rest}}}})
	}
	p := taken("where it was left")
	restore(p, 0, 3, false)
	if c := w.cursor(g, p); c.committed != 0 || !c.pending || c.notBefore != nil {
		t.Errorf("cursor = %+v", c)
	}
	p = taken("with a rest")
	restore(p, 0, 3, true)
	if c := w.cursor(g, p); c.committed != 0 || c.notBefore == nil || time.Until(*c.notBefore) > 5*time.Second {
		t.Errorf("cursor = %+v", c)
	}
	p = taken("moved on")
	w.claim(list{group: g, hints: []int64{p}, slots: []slot{{lease: uuid.New(), budget: 1, autoAck: true}}})
	restore(p, 0, 3, false)
	equal(t, "committed", w.cursor(g, p).committed, 4)
	p = taken("leased")
	w.claim(list{group: g, hints: []int64{p}, slots: []slot{{lease: uuid.New(), budget: 1}}})
	restore(p, 0, 3, false)
	equal(t, "committed", w.cursor(g, p).committed, 3)
	p = taken("cleared")
	w.claim(list{group: g, hints: []int64{p}, slots: []slot{{lease: uuid.New(), budget: 9, autoAck: true}}})
	w.claim(list{group: g, hints: []int64{p}, slots: []slot{{lease: uuid.New(), budget: 9}}})
	equal(t, "pending", w.cursor(g, p).pending, false)
	restore(p, 3, 5, false)
	if c := w.cursor(g, p); c.committed != 3 || !c.pending {
		t.Errorf("cursor = %+v", c)
	}
	w.noneStuck()
}

func TestExtend(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "lease_time = 100")
	g := w.group(q, "g")
	p, lease := w.leased(q, g, "p", 1)
	extend := func(lease uuid.UUID, seconds int32) []db.ExtendLeasesRow {
		return w.fly(&flight{extends: []db.ExtendLeasesParams{{Ns: []int32{7}, GroupIds: []int32{g}, PartitionIds: []int64{p}, LeaseIds: []uuid.UUID{lease}, Seconds: []int32{seconds}}}}).extended
	}
	before := *w.cursor(g, p).leaseUntil
	r := extend(lease, 5)
	if len(r) != 1 || r[0].N != 7 || !r[0].LeaseUntil.Equal(before) {
		t.Errorf("a shorter extend answered %v, the lease was until %v", r, before)
	}
	r = extend(lease, 500)
	if len(r) != 1 || !r[0].LeaseUntil.Equal(*w.cursor(g, p).leaseUntil) || r[0].LeaseUntil.Sub(before) < 390*time.Second {
		t.Errorf("a longer extend answered %v, the lease was until %v", r, before)
	}
	equal(t, "extended with another lease", len(extend(uuid.New(), 500)), 0)
	w.exec("update ferrymq.cursors set lease_until = now() - interval '1 second'")
	equal(t, "extended after its end", len(extend(lease, 500)), 0)
}
