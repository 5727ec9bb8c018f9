package db_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/db"
)

// stored is a segment put straight into a partition.
type stored struct {
	base  int64
	count int
	at    int // seconds after the epoch
}

func at(seconds int) time.Time { return time.Unix(int64(seconds), 0).UTC() }

// store makes a partition out of segments whose offsets begin at the first one's base.
func (w *world) store(queue int32, name string, segments []stored) int64 {
	w.t.Helper()
	p := w.partition(queue, name)
	var rows [][]any
	first, next, last := int64(0), int64(0), 0
	for i, s := range segments {
		if i == 0 {
			first = s.base
		}
		rows = append(rows, []any{p, s.base, s.count, 0, 0, at(s.at), uuid.New(), []byte{}, []byte{}})
		next, last = s.base+int64(s.count), s.at
	}
	must[int64](w.t)(w.pool.CopyFrom(w.ctx(), pgx.Identifier{"ferrymq", "segments"},
		[]string{"partition_id", "base_offset", "count", "key_no", "codec", "created_at", "first_id", "keys", "frames"}, pgx.CopyFromRows(rows)))
	w.exec("update ferrymq.partitions set first_offset = $1, next_offset = $2, last_push_at = $3, created_at = $4 where id = $5", first, next, at(last), epoch, p)
	return p
}

// TestOffsetAt compares the binary search with a walk over all segments.
func TestOffsetAt(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	r := rand.New(rand.NewPCG(1, 2))
	shapes := [][]stored{{}, {{0, 1, 50}}, {{7, 3, 50}}, {{0, 5, 50}, {5, 5, 50}, {10, 1, 50}}, {{1000, 1, 10}, {1001, 900, 20}, {1901, 1, 30}}}
	for range 25 {
		var s []stored
		base, now := int64(r.IntN(3)*r.IntN(500)), 10
		for range 1 + r.IntN(20) {
			n := 1 + r.IntN(7)
			if r.IntN(4) == 0 {
				n = 1 + r.IntN(1000)
			}
			s = append(s, stored{base, n, now})
			base += int64(n)
			now += r.IntN(3) * 5 // often the same time
		}
		shapes = append(shapes, s)
	}
	for i, s := range shapes {
		p := w.store(q, fmt.Sprint(i), s)
		for sec := 0; sec < 250; sec += 1 + sec%3 {
			want := int64(0)
			if len(s) > 0 {
				want = s[len(s)-1].base + int64(s[len(s)-1].count)
			}
			for _, x := range slices.Backward(s) {
				if x.at >= sec {
					want = x.base
				}
			}
			d := must[db.DedupStartRow](t)(w.DedupStart(t.Context(), db.DedupStartParams{ID: p, Since: at(sec)}))
			if d.StartOffset != want {
				t.Fatalf("%v at %d: %d, want %d", s, sec, d.StartOffset, want)
			}
		}
	}
	_, err := w.DedupStart(t.Context(), db.DedupStartParams{ID: 9999})
	equal(t, "a partition that is gone", errors.Is(err, pgx.ErrNoRows), true)
}

// TestStarts is where a cursor begins: by the seeding of a registered group and by the first contact with one partition.
func TestStarts(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	p := w.store(q, "p", []stored{{5, 5, 10}, {10, 5, 20}, {15, 5, 20}, {20, 5, 30}})
	empty := w.partition(q, "empty")
	fresh := w.partition(q, "fresh", 4)
	now := time.Now().Add(time.Hour)
	for i, c := range []struct {
		mode      string
		start     *time.Time
		committed int64
		pending   bool
		fresh     int64
	}{
		{"all", &epoch, 5, true, 0},
		{"time", new(at(10)), 5, true, 0},
		{"time", new(at(11)), 10, true, 0},
		{"time", new(at(20)), 10, true, 0},
		{"time", new(at(30)), 20, true, 0},
		{"time", new(at(31)), 25, false, 0},
		{"new", nil, 25, false, 4},
		{"time", &now, 25, false, 4},
	} {
		g := w.groupAt(q, fmt.Sprint("registered", i), c.mode, c.start)
		u := must[db.GroupCreateRow](t)(w.GroupCreate(t.Context(), db.GroupCreateParams{QueueID: q, Name: fmt.Sprint("met", i), StartMode: c.mode, StartAt: c.start}))
		for _, id := range []int64{p, empty, fresh} {
			equal(t, "cursors made", must[int64](t)(w.CursorCreate(t.Context(), db.CursorCreateParams{GroupID: u.ID, PartitionID: id, StartAt: u.StartAt})), 1)
			equal(t, "cursors made again", must[int64](t)(w.CursorCreate(t.Context(), db.CursorCreateParams{GroupID: u.ID, PartitionID: id, StartAt: epoch})), 0)
		}
		for _, group := range []int32{g, u.ID} {
			if k := w.cursor(group, p); k.committed != c.committed || k.pending != c.pending {
				t.Errorf("%d %s: cursor = %+v, want %+v", i, c.mode, k, c)
			}
			if k := w.cursor(group, empty); k.committed != 0 || k.pending {
				t.Errorf("%d %s: cursor of the empty partition = %+v", i, c.mode, k)
			}
			if k := w.cursor(group, fresh); k.committed != c.fresh || k.pending != (c.fresh == 0) {
				t.Errorf("%d %s: cursor of the fresh partition = %+v", i, c.mode, k)
			}
		}
	}
	w.noneStuck()
}

func TestSeedingInChunks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q, other := w.queue("q", ""), w.queue("other", "")
	for i := range 7 {
		w.partition(q, fmt.Sprint(i), 1)
		w.partition(other, fmt.Sprint(i), 1)
	}
	g := must[db.GroupCreateRow](t)(w.GroupCreate(t.Context(), db.GroupCreateParams{QueueID: q, Name: "g", Registered: true, StartMode: "all", StartAt: &epoch}))
	equal(t, "seeded", g.Seeded, false)
	for i, want := range []int{3, 6, 7, 7} {
		var done bool
		check(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) (err error) { done, err = seedStep(t.Context(), db.New(tx), g.ID, 3); return err }))
		equal(t, "cursors", one[int](w, "select count(*) from ferrymq.cursors where pending and group_id = $1", g.ID), want)
		equal(t, "done", done, i >= 2)
	}
	w.seed(g.ID, 3)
	row := must[db.GroupGetRow](t)(w.GroupGet(t.Context(), db.GroupGetParams{QueueID: q, Name: "g"}))
	equal(t, "seeded", row.Seeded, true)
	equal(t, "all cursors", one[int](w, "select count(*) from ferrymq.cursors"), 7)
}

func TestGroups(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	ctx := t.Context()
	u := must[db.GroupCreateRow](t)(w.GroupCreate(ctx, db.GroupCreateParams{QueueID: q, Name: "g", StartMode: "all", StartAt: &epoch}))
	if u.Registered || !u.Seeded {
		t.Errorf("group = %+v", u)
	}
	later := at(99)
	again := must[db.GroupCreateRow](t)(w.GroupCreate(ctx, db.GroupCreateParams{QueueID: q, Name: "g", Registered: true, StartMode: "time", StartAt: &later}))
	if again.ID != u.ID || again.Registered || again.StartMode != "all" || !again.StartAt.Equal(epoch) {
		t.Errorf("made again: %+v", again)
	}
	register := func(at *time.Time) int64 {
		return must[int64](t)(w.GroupRegister(ctx, db.GroupRegisterParams{ID: u.ID, StartMode: "time", StartAt: at}))
	}
	equal(t, "registered", register(&later), 1)
	equal(t, "registered again", register(&epoch), 0)
	g := must[db.GroupGetRow](t)(w.GroupGet(ctx, db.GroupGetParams{QueueID: q, Name: "g"}))
	if !g.Registered || g.Seeded || !g.StartAt.Equal(later) {
		t.Errorf("group = %+v", g)
	}
	fresh := must[db.GroupCreateRow](t)(w.GroupCreate(ctx, db.GroupCreateParams{QueueID: q, Name: "now", StartMode: "new"}))
	if d := time.Since(fresh.StartAt); d < -time.Minute || d > time.Minute {
		t.Errorf("a group without a time starts %v ago", d)
	}
	equal(t, "groups", len(must[[]int32](t)(w.GroupsOfQueue(ctx, db.GroupsOfQueueParams{QueueID: q}))), 2)
	w.exec("update ferrymq.groups set deleted_at = now() where id = $1", u.ID)
	_, err := w.GroupGet(ctx, db.GroupGetParams{QueueID: q, Name: "g"})
	equal(t, "a deleted group is gone", errors.Is(err, pgx.ErrNoRows), true)
	second := must[db.GroupCreateRow](t)(w.GroupCreate(ctx, db.GroupCreateParams{QueueID: q, Name: "g", StartMode: "all", StartAt: &epoch}))
	equal(t, "the name is free", second.ID != u.ID, true)
}

func TestDiscovery(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	ctx := t.Context()
	queue := func(name, namespace, task string) int32 {
		return must[db.FerrymqQueue](t)(w.QueueCreate(ctx, db.QueueCreateParams{ProjectID: 1, Name: name, Namespace: namespace, Task: task, UnkeyedLanes: 1})).ID
	}
	register := func(namespace, task string, at time.Time) db.DiscoveryRegisterRow {
		return must[db.DiscoveryRegisterRow](t)(w.DiscoveryRegister(ctx, db.DiscoveryRegisterParams{ProjectID: 1, Name: "g", Namespace: namespace, Task: task, StartMode: "time", StartAt: &at}))
	}
	n1, n1t, t2, empty := queue("a", "n", "x"), queue("b", "n", "t"), queue("c", "m", "t"), queue("d", "", "t")
	register("n", "t", at(3))
	register("n", "", at(2))
	register("", "t", at(1))
	equal(t, "the first time stays", register("n", "", at(9)).StartAt.Equal(at(2)), true)
	of := func(namespace, task string) (found []int64) {
		for _, r := range must[[]db.DiscoveryOfRow](t)(w.DiscoveryOf(ctx, db.DiscoveryOfParams{ProjectID: 1, Namespace: namespace, Task: task})) {
			found = append(found, r.StartAt.Unix())
		}
		return found
	}
	for _, c := range []struct {
		namespace, task string
		want            []int64
	}{{"n", "t", []int64{1, 2, 3}}, {"n", "x", []int64{2}}, {"m", "t", []int64{1}}, {"m", "x", nil}, {"n", "", []int64{2}}} {
		if got := of(c.namespace, c.task); !slices.Equal(got, c.want) {
			t.Errorf("registrations of %v = %v", c, got)
		}
	}
	for _, c := range []struct {
		namespace, task string
		want            []int32
	}{{"n", "", []int32{n1, n1t}}, {"n", "t", []int32{n1t}}, {"", "t", []int32{n1t, t2, empty}}, {"x", "", []int32{0}}, {"m", "x", []int32{0}}} { // 0: not registered
		var got []int32
		for _, r := range must[[]db.DiscoveryUnmetRow](t)(w.DiscoveryUnmet(ctx, db.DiscoveryUnmetParams{ProjectID: 1, Namespace: c.namespace, Task: c.task, Name: "g"})) {
			got = append(got, r.ID)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("queues of %v = %v", c, got)
		}
	}
	var groups []int32
	for _, q := range []int32{n1, n1t, t2, empty} {
		groups = append(groups, w.group(q, "g"))
	}
	w.group(n1, "another")
	equal(t, "unmet", len(must[[]db.DiscoveryUnmetRow](t)(w.DiscoveryUnmet(ctx, db.DiscoveryUnmetParams{ProjectID: 1, Task: "t", Name: "g"}))), 0)
	ready := func(namespace, task string, after int32, max int64) (got []int32) {
		for _, r := range must[[]db.DiscoveryReadyRow](t)(w.DiscoveryReady(ctx, db.DiscoveryReadyParams{ProjectID: 1, Namespace: namespace, Task: task, Name: "g", After: after, Max: max})) {
			got = append(got, r.ID)
		}
		return got
	}
	equal(t, "ready", len(ready("", "t", 0, 9)), 0)
	for _, q := range []int32{n1, n1t, t2, empty} {
		w.partition(q, "p", 1)
	}
	for _, c := range []struct {
		namespace, task string
		after           int32
		max             int64
		want            []int32
	}{{"n", "", 0, 9, groups[:2]}, {"", "t", 0, 9, groups[1:]}, {"", "t", groups[1], 9, []int32{groups[2], groups[3], groups[1]}}, {"", "t", groups[3], 2, groups[1:3]}, {"n", "t", 0, 9, groups[1:2]}} {
		if got := ready(c.namespace, c.task, c.after, c.max); !slices.Equal(got, c.want) {
			t.Errorf("ready %v = %v", c, got)
		}
	}
	w.pop(groups[1], uuid.New())
	check(t, w.deleteQueue(t2))
	if got := ready("", "t", 0, 9); !slices.Equal(got, groups[3:]) {
		t.Errorf("ready = %v", got)
	}
}

func TestReady(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	ctx := t.Context()
	q := w.queue("q", "")
	g, idle := w.group(q, "g"), w.group(q, "idle")
	var ids []int64
	for i := range 4 {
		ids = append(ids, w.partition(q, fmt.Sprint(i), 5))
	}
	w.exec("update ferrymq.cursors set pending = false, committed = 5 where group_id = $1", idle)
	groups := func(want int64) map[int32]db.ReadyGroupsRow {
		out := map[int32]db.ReadyGroupsRow{}
		for _, r := range must[[]db.ReadyGroupsRow](t)(w.ReadyGroups(ctx, db.ReadyGroupsParams{Ids: []int32{g, idle}, Wants: []int64{want, want}})) {
			out[r.ID] = r
		}
		return out
	}
	available := func(parts int64) int64 {
		return must[int64](t)(w.GroupAvailable(ctx, db.GroupAvailableParams{GroupID: g, Parts: parts}))
	}
	ready := func() (n int) {
		return len(must[[]db.ReadyPartitionsRow](t)(w.ReadyPartitions(ctx, db.ReadyPartitionsParams{GroupIds: []int32{g, g, g, g, idle, g}, PartitionIds: append(slices.Clone(ids), ids[0], 9999)})))
	}
	r := groups(3)
	if r[g].Ready != 3 || !r[g].Pending || r[idle].Ready != 0 || r[idle].Pending {
		t.Errorf("ready = %v", r)
	}
	equal(t, "available in two", available(2), 10)
	equal(t, "available", available(10), 20)
	equal(t, "ready partitions, and one that is gone", ready(), 4+1)
	w.claim(list{group: g, hints: ids[:2], slots: slots(2, 5, 1)})
	w.exec("update ferrymq.cursors set not_before = now() + interval '1 hour' where partition_id = $1 and group_id = $2", ids[2], g)
	w.exec("update ferrymq.partitions set first_offset = 2 where id = $1", ids[3])
	r = groups(10)
	equal(t, "ready", r[g].Ready, 1)
	equal(t, "available", available(10), 3)
	equal(t, "ready partitions, and one that is gone", ready(), 1+1)
	w.exec("update ferrymq.cursors set not_before = now() - interval '1 hour' where not_before is not null")
	equal(t, "ready partitions when one is due", ready(), 2+1)
	equal(t, "ready before it is promoted", groups(10)[g].Ready, 1)
	w.exec("update ferrymq.cursors set pending = false, committed = 5 where partition_id = $1", ids[3])
	w.exec("update ferrymq.cursors set lease_until = now() + interval '1 hour' where lease_id is not null")
	r = groups(10)
	if r[g].Ready != 0 || !r[g].Pending {
		t.Errorf("all leased: %v", r)
	}
}

func TestPromote(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	ctx := t.Context()
	q := w.queue("q", "")
	g := w.group(q, "g")
	_, err := w.NextDue(ctx)
	equal(t, "nothing is due", errors.Is(err, pgx.ErrNoRows), true)
	var ids []int64
	for i := range 5 {
		ids = append(ids, w.partition(q, fmt.Sprint(i), 1))
		w.exec("update ferrymq.cursors set not_before = now() + ($1 - 3) * interval '1 minute' where partition_id = $2", i, ids[i])
	}
	if ms := must[int64](t)(w.NextDue(ctx)); ms > -170_000 || ms < -200_000 {
		t.Errorf("the next is due in %d ms", ms)
	}
	promote := func(max int64) (got []int64) {
		for _, r := range must[[]db.PromoteDueRow](t)(w.PromoteDue(ctx, db.PromoteDueParams{Max: max})) {
			equal(t, "group", r.GroupID, g)
			got = append(got, r.PartitionID)
		}
		slices.Sort(got)
		return got
	}
	a := w.begin() // what another session holds is passed over
	_, err = a.tx.Exec(ctx, "select from ferrymq.cursors where partition_id = $1 for update", ids[0])
	check(t, err)
	if got := promote(2); !slices.Equal(got, ids[1:3]) {
		t.Errorf("promoted %v", got)
	}
	a.commit()
	if got := promote(10); !slices.Equal(got, []int64{ids[0], ids[3]}) {
		t.Errorf("promoted %v", got)
	}
	if ms := must[int64](t)(w.NextDue(ctx)); ms > 60_000 || ms < 30_000 {
		t.Errorf("the next is due in %d ms", ms)
	}
	equal(t, "promoted again", len(promote(10)), 0)
	equal(t, "claimable", len(w.pop(g, uuid.New()).spans), 4)
}

func TestRecheck(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	g, other := w.group(q, "g"), w.group(q, "other")
	var ids []int64
	for i := range 5 {
		ids = append(ids, w.partition(q, fmt.Sprint(i), 3))
	}
	w.exec("update ferrymq.cursors set not_before = now() + interval '1 hour' where partition_id <> $1", ids[4])
	w.exec("update ferrymq.cursors set failed_offset = 0, failures = 1 where partition_id = $1", ids[1])
	var steps []int64
	for after := int64(0); ; {
		after = must[int64](t)(w.RecheckCursors(t.Context(), db.RecheckCursorsParams{GroupID: g, After: after, Max: 2}))
		steps = append(steps, after)
		if after == 0 {
			break
		}
	}
	if want := []int64{ids[1], ids[3], ids[4], 0}; !slices.Equal(steps, want) {
		t.Errorf("steps %v, want %v", steps, want)
	}
	for i, id := range ids {
		equal(t, fmt.Sprint("waits ", i), w.cursor(g, id).notBefore != nil, i == 1)
		equal(t, fmt.Sprint("the other group waits ", i), w.cursor(other, id).notBefore != nil, i < 4)
	}
}

func TestJobs(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	ctx := t.Context()
	claim := func() (uuid.UUID, *db.JobClaimRow) {
		lease := uuid.New()
		j, err := w.JobClaim(ctx, db.JobClaimParams{LeaseID: lease})
		if errors.Is(err, pgx.ErrNoRows) {
			return lease, nil
		}
		check(t, err)
		return lease, &j
	}
	g := int32(7)
	check(t, w.JobCreate(ctx, db.JobCreateParams{Kind: "seed", QueueID: 1, GroupID: &g, DelaySeconds: 100}))
	if _, j := claim(); j != nil {
		t.Errorf("a job that is not due was claimed: %+v", j)
	}
	check(t, w.JobCreate(ctx, db.JobCreateParams{Kind: "recheck", QueueID: 2}))
	check(t, w.JobCreate(ctx, db.JobCreateParams{Kind: "delete_queue", QueueID: 3}))
	a := w.begin()
	first := must[db.JobClaimRow](t)(a.JobClaim(ctx, db.JobClaimParams{LeaseID: uuid.New()}))
	lease, second := claim() // not the one another session is claiming
	if first.Kind != "recheck" || second == nil || second.Kind != "delete_queue" || second.QueueID != 3 || second.GroupID != nil {
		t.Fatalf("claimed %+v, %+v", first, second)
	}
	a.commit()
	if _, j := claim(); j != nil {
		t.Errorf("a job was claimed twice: %+v", j)
	}
	equal(t, "extended", must[int64](t)(w.JobExtend(ctx, db.JobExtendParams{ID: second.ID, LeaseID: lease})), 1)
	w.exec("update ferrymq.jobs set due_at = now() - interval '1 second' where id = $1", second.ID) // its worker died
	next, taken := claim()
	if taken == nil || taken.ID != second.ID {
		t.Fatalf("claimed %+v", taken)
	}
	equal(t, "extended by the old worker", must[int64](t)(w.JobExtend(ctx, db.JobExtendParams{ID: second.ID, LeaseID: lease})), 0)
	check(t, w.JobDone(ctx, db.JobDoneParams{ID: second.ID, LeaseID: lease}))
	equal(t, "jobs", one[int](w, "select count(*) from ferrymq.jobs"), 3)
	check(t, w.JobDone(ctx, db.JobDoneParams{ID: second.ID, LeaseID: next}))
	check(t, w.JobSeedDone(ctx, db.JobSeedDoneParams{GroupID: g}))
	equal(t, "jobs", one[int](w, "select count(*) from ferrymq.jobs"), 1)
}

func TestBrokers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	ctx := t.Context()
	a, b := uuid.New(), uuid.New()
	beat := func(id uuid.UUID) int64 {
		return must[db.BrokerBeatRow](t)(w.BrokerBeat(ctx, db.BrokerBeatParams{ID: id, Name: "b"})).Others
	}
	equal(t, "others", beat(a), 0)
	equal(t, "others", beat(b), 1)
	equal(t, "others", beat(a), 1)
	w.exec("update ferrymq.brokers set seen_at = now() - interval '20 seconds' where id = $1", b)
	equal(t, "others after a silence", beat(a), 0)
	w.exec("update ferrymq.brokers set seen_at = now() - interval '2 days' where id = $1", b)
	check(t, w.BrokerLeave(ctx, db.BrokerLeaveParams{ID: a}))
	equal(t, "brokers", one[int](w, "select count(*) from ferrymq.brokers"), 0)
	w.exec("insert into ferrymq.leases (lease_id, group_id, created_at) select gen_random_uuid(), 1, now() - i * interval '1 day' from generate_series(0, 5) i")
	equal(t, "leases expired", must[int64](t)(w.LeasesExpire(ctx, db.LeasesExpireParams{Max: 3})), 3)
	equal(t, "leases expired", must[int64](t)(w.LeasesExpire(ctx, db.LeasesExpireParams{Max: 3})), 1)
	equal(t, "leases", one[int](w, "select count(*) from ferrymq.leases"), 2)
}

func TestQueues(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	ctx := t.Context()
	project := must[int32](t)(w.ProjectGet(ctx, db.ProjectGetParams{Name: "default"}))
	q := w.queue("q", "")
	_, err := w.QueueCreate(ctx, db.QueueCreateParams{ProjectID: project, Name: "q", Namespace: "x", UnkeyedLanes: 1})
	equal(t, "made twice", errors.Is(err, pgx.ErrNoRows), true)
	row := must[db.FerrymqQueue](t)(w.QueueGet(ctx, db.QueueGetParams{ProjectID: project, Name: "q"}))
	if row.ID != q || row.LeaseTime != 60 || row.RetryLimit != 3 || row.Configured {
		t.Errorf("queue = %+v", row)
	}
	w.exec("update ferrymq.queues set updated_at = now() - interval '1 minute'")
	changed := func() int {
		return len(must[[]db.QueueChangedSinceRow](t)(w.QueueChangedSince(ctx, db.QueueChangedSinceParams{Seconds: 10})))
	}
	equal(t, "changed", changed(), 0)
	after := must[db.FerrymqQueue](t)(w.QueueConfigure(ctx, db.QueueConfigureParams{ID: q, LeaseTime: 9, Namespace: "n", RetentionSinkHold: "h", UnkeyedLanes: 1}))
	if !after.Configured || after.LeaseTime != 9 || after.Namespace != "n" || after.DeadLetterQueue {
		t.Errorf("configured = %+v", after)
	}
	equal(t, "changed", changed(), 1)
	equal(t, "read", must[db.FerrymqQueue](t)(w.QueueRead(ctx, db.QueueReadParams{ID: q})).LeaseTime, 9)
	equal(t, "deleted", must[int64](t)(w.QueueDelete(ctx, db.QueueDeleteParams{ID: q})), 1)
	equal(t, "deleted again", must[int64](t)(w.QueueDelete(ctx, db.QueueDeleteParams{ID: q})), 0)
	equal(t, "changed", changed(), 1) // others learn of it
	_, err = w.QueueLock(ctx, db.QueueLockParams{ID: q})
	equal(t, "a deleted queue cannot be locked", errors.Is(err, pgx.ErrNoRows), true)
	if w.queue("q", "") == q {
		t.Error("the name was not free")
	}
	if i := must[db.InstallationGetRow](t)(w.InstallationGet(ctx)); time.Since(i.Now).Abs() > time.Minute {
		t.Errorf("installation = %+v", i)
	}
	equal(t, "ping", must[int32](t)(w.Ping(ctx)), 1)
}

func TestQueuePendingCount(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q, other := w.queue("q", ""), w.queue("other", "")
	count := func() int64 {
		return must[int64](t)(w.QueuePendingCount(t.Context(), db.QueuePendingCountParams{QueueID: q}))
	}
	equal(t, "of an empty queue", count(), 0)
	a, b := w.partition(q, "a", 10), w.partition(q, "b", 20)
	w.partition(other, "a", 100)
	w.exec("update ferrymq.partitions set first_offset = 4 where id = $1", a)
	equal(t, "without groups", count(), 26)
	mode := w.group(q, "__QUEUE_MODE__")
	w.exec("update ferrymq.cursors set committed = 15 where group_id = $1 and partition_id = $2", mode, b)
	equal(t, "by queue mode", count(), 11)
	fast, slow := w.group(q, "fast"), w.group(q, "slow")
	w.exec("update ferrymq.cursors set committed = 10 where group_id = $1 and partition_id = $2", fast, a)
	w.exec("update ferrymq.cursors set committed = 8 where group_id = $1 and partition_id = $2", slow, a)
	w.exec("update ferrymq.cursors set committed = 20 where group_id = $1 and partition_id = $2", fast, b)
	equal(t, "by the slowest named group", count(), 22)
	w.exec("update ferrymq.groups set deleted_at = now() where id = $1", slow)
	equal(t, "without the deleted one", count(), 0)
}

func TestPartitionLookups(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	ctx := t.Context()
	q, other := w.queue("q", ""), w.queue("other", "")
	a, b, same := w.partition(q, "a", 3), w.partition(q, "b"), w.partition(other, "a")
	hidden := w.partition(q, "h")
	w.exec("update ferrymq.partitions set hidden = true where id = $1", hidden)
	found := must[[]db.PartitionFindManyRow](t)(w.PartitionFindMany(ctx, db.PartitionFindManyParams{QueueIds: []int32{q, q, other, q, q}, Names: []string{"a", "b", "a", "h", "x"}}))
	ids, public := []int64{}, []uuid.UUID{}
	for _, f := range found {
		ids, public = append(ids, f.ID), append(public, f.PublicID)
	}
	slices.Sort(ids)
	if want := []int64{a, b, same}; !slices.Equal(ids, want) {
		t.Errorf("found %v, want %v", ids, want)
	}
	equal(t, "by public id", len(must[[]db.PartitionFindPublicRow](t)(w.PartitionFindPublic(ctx, db.PartitionFindPublicParams{ProjectID: 1, PublicIds: append(public, uuid.New())}))), 3)
	equal(t, "in another project", len(must[[]db.PartitionFindPublicRow](t)(w.PartitionFindPublic(ctx, db.PartitionFindPublicParams{ProjectID: 2, PublicIds: public}))), 0)
	check(t, w.deleteQueue(other))
	equal(t, "of live queues", len(must[[]db.PartitionFindPublicRow](t)(w.PartitionFindPublic(ctx, db.PartitionFindPublicParams{ProjectID: 1, PublicIds: public}))), 2)
}

// TestSegmentKeys is what deduplication and acks read.
func TestSegmentKeys(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	ctx := t.Context()
	q := w.queue("q", "")
	p := w.store(q, "p", []stored{{5, 5, 10}, {10, 2, 20}, {12, 5, 30}, {17, 3, 30}})
	w.store(q, "other", []stored{{0, 100, 10}})
	var got []int64
	for _, r := range must[[]db.SegmentKeysRow](t)(w.SegmentKeys(ctx, db.SegmentKeysParams{PartitionID: p, FromOffset: 10})) {
		got = append(got, r.BaseOffset)
	}
	if want := []int64{10, 12, 17}; !slices.Equal(got, want) {
		t.Errorf("from 10: %v", got)
	}
	for _, c := range []struct {
		from, to int64
		since    int
		want     []int64
	}{{11, 12, 0, []int64{10}}, {11, 13, 0, []int64{12, 10}}, {0, 6, 0, []int64{5}}, {0, 5, 0, nil}, {9, 100, 0, []int64{17, 12, 10, 5}}, {9, 100, 20, []int64{17, 12, 10}}, {16, 17, 0, []int64{12}}, {19, 100, 0, []int64{17}}, {9, 100, 31, nil}} {
		got = nil
		for _, r := range must[[]db.SegmentKeysAtRow](t)(w.SegmentKeysAt(ctx, db.SegmentKeysAtParams{PartitionID: p, FromOffset: c.from, ToOffset: c.to, Since: at(c.since)})) {
			got = append(got, r.BaseOffset)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v", c, got)
		}
	}
	for offset, base := range map[int64]int64{5: 5, 9: 5, 10: 10, 16: 12, 19: 17} {
		equal(t, fmt.Sprint("segment at ", offset), must[db.SegmentAtRow](t)(w.SegmentAt(ctx, db.SegmentAtParams{PartitionID: p, AtOffset: offset})).BaseOffset, base)
	}
	_, err := w.SegmentAt(ctx, db.SegmentAtParams{PartitionID: p, AtOffset: 4})
	equal(t, "what retention took", errors.Is(err, pgx.ErrNoRows), true)
}

func TestCursorGet(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	ctx := t.Context()
	q := w.queue("q", "")
	g := w.group(q, "g")
	p := w.partition(q, "p", 5)
	get := func() db.CursorGetRow {
		return must[db.CursorGetRow](t)(w.CursorGet(ctx, db.CursorGetParams{GroupID: g, PartitionID: p}))
	}
	if c := get(); c.LeaseID != nil || c.BatchEnd != nil || c.Live || c.NextOffset != 5 {
		t.Errorf("cursor = %+v", c)
	}
	lease := uuid.New()
	w.claim(list{group: g, hints: []int64{p}, slots: []slot{{lease: lease, budget: 3}}})
	if c := get(); *c.LeaseID != lease || *c.BatchEnd != 3 || !c.Live {
		t.Errorf("cursor = %+v", c)
	}
	w.exec("update ferrymq.cursors set lease_until = now() - interval '1 second'")
	if c := get(); *c.LeaseID != lease || c.Live {
		t.Errorf("cursor = %+v", c)
	}
	_, err := w.CursorGet(ctx, db.CursorGetParams{GroupID: g, PartitionID: 9999})
	equal(t, "no cursor", errors.Is(err, pgx.ErrNoRows), true)
}
