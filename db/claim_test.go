package db_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"ferrymq/db"
)

// took says in short what every slot got: partition:start+take.
func (g got) took(names map[int64]string) map[int32][]string {
	out := map[int32][]string{}
	for _, s := range g.spans {
		out[s.slot] = append(out[s.slot], fmt.Sprintf("%s:%d+%d", names[s.partition], s.start, s.take))
	}
	return out
}

func slots(n int, budget, parts int64) (out []slot) {
	for range n {
		out = append(out, slot{lease: uuid.New(), budget: budget, parts: parts})
	}
	return out
}

// TestClaimDeals is how candidates become spans. Each case has partitions a, b, c, … of 10 messages in segments of 4, 4 and 2.
func TestClaimDeals(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name       string
		partitions int
		lists      func(g int32, p []int64) []list
		want       map[int32][]string
	}{
		{"one slot, one partition", 2, func(g int32, p []int64) []list { return []list{{group: g, scan: true, slots: slots(1, 100, 1)}} },
			map[int32][]string{0: {"a:0+10"}}},
		{"one slot over several partitions", 3, func(g int32, p []int64) []list { return []list{{group: g, scan: true, slots: slots(1, 25, 3)}} },
			map[int32][]string{0: {"a:0+10", "b:0+10", "c:0+5"}}},
		{"the budget ends before the partitions do", 3, func(g int32, p []int64) []list { return []list{{group: g, scan: true, slots: slots(1, 10, 3)}} },
			map[int32][]string{0: {"a:0+10"}}},
		{"dealt in turn", 4, func(g int32, p []int64) []list { return []list{{group: g, scan: true, slots: slots(2, 100, 2)}} },
			map[int32][]string{0: {"a:0+10", "c:0+10"}, 1: {"b:0+10", "d:0+10"}}},
		{"nobody takes two while another has none", 2, func(g int32, p []int64) []list { return []list{{group: g, scan: true, slots: slots(2, 100, 2)}} },
			map[int32][]string{0: {"a:0+10"}, 1: {"b:0+10"}}},
		{"more slots than partitions", 2, func(g int32, p []int64) []list { return []list{{group: g, scan: true, slots: slots(5, 1, 1)}} },
			map[int32][]string{0: {"a:0+1"}, 1: {"b:0+1"}}},
		{"a hint goes before the index", 3, func(g int32, p []int64) []list {
			return []list{{group: g, scan: true, hints: []int64{p[2]}, slots: slots(2, 100, 1)}}
		}, map[int32][]string{0: {"c:0+10"}, 1: {"a:0+10"}}},
		{"hints in their order", 4, func(g int32, p []int64) []list {
			return []list{{group: g, scan: true, hints: []int64{p[3], p[1], p[2]}, slots: slots(3, 100, 1)}}
		}, map[int32][]string{0: {"d:0+10"}, 1: {"b:0+10"}, 2: {"c:0+10"}}},
		{"the index goes before a hint", 3, func(g int32, p []int64) []list {
			return []list{{group: g, scan: true, indexFirst: true, hints: []int64{p[2]}, slots: slots(1, 100, 1)}}
		}, map[int32][]string{0: {"a:0+10"}}},
		{"a hint fills up what the index does not", 2, func(g int32, p []int64) []list {
			return []list{{group: g, scan: true, indexFirst: true, hints: []int64{p[1]}, slots: slots(2, 100, 1)}}
		}, map[int32][]string{0: {"a:0+10"}, 1: {"b:0+10"}}},
		{"hints only", 3, func(g int32, p []int64) []list {
			return []list{{group: g, hints: []int64{p[1]}, slots: slots(3, 100, 1)}}
		},
			map[int32][]string{0: {"b:0+10"}}},
		{"from a position", 4, func(g int32, p []int64) []list {
			return []list{{group: g, scan: true, from: p[1], slots: slots(2, 100, 1)}}
		},
			map[int32][]string{0: {"c:0+10"}, 1: {"d:0+10"}}},
		{"round the end", 4, func(g int32, p []int64) []list {
			return []list{{group: g, scan: true, from: p[2], slots: slots(3, 100, 1)}}
		},
			map[int32][]string{0: {"d:0+10"}, 1: {"a:0+10"}, 2: {"b:0+10"}}},
		{"a hint that the index would have found too takes nobody's place", 3, func(g int32, p []int64) []list {
			return []list{{group: g, scan: true, hints: []int64{p[0]}, slots: slots(2, 100, 1)}}
		}, map[int32][]string{0: {"a:0+10"}, 1: {"b:0+10"}}},
		{"a list of one partition first, and takes nobody's place", 3, func(g int32, p []int64) []list {
			return []list{{group: g, hints: p[:1], slots: slots(1, 100, 1)}, {group: g, scan: true, slots: slots(2, 100, 1)}}
		}, map[int32][]string{0: {"a:0+10"}, 1: {"b:0+10"}, 2: {"c:0+10"}}},
		{"never two slots on one cursor", 1, func(g int32, p []int64) []list {
			return []list{{group: g, hints: p, slots: slots(2, 1, 1)}, {group: g, scan: true, hints: p, slots: slots(2, 1, 1)}}
		}, map[int32][]string{0: {"a:0+1"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 2)
			q := w.queue("q", "")
			g := w.group(q, "g")
			names := map[int64]string{}
			var ids []int64
			for i := range c.partitions {
				n := string(rune('a' + i))
				ids = append(ids, w.partition(q, n, 4, 4, 2))
				names[ids[i]] = n
			}
			lists := c.lists(g, ids)
			got := w.claim(lists...)
			if d := cmp.Diff(c.want, got.took(names)); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
			for _, s := range got.spans {
				k := w.cursor(g, s.partition)
				var l *slot
				n := int(s.slot)
				for i := range lists {
					if n < len(lists[i].slots) {
						l = &lists[i].slots[n]
						break
					}
					n -= len(lists[i].slots)
				}
				if k.leaseID == nil || *k.leaseID != l.lease || *k.batchEnd != s.start+s.take || k.committed != s.start || !k.pending {
					t.Errorf("span %+v left the cursor %+v", s, k)
				}
				if in := time.Until(*k.leaseUntil); in > time.Minute || in < 30*time.Second {
					t.Errorf("leased for %v", in)
				}
			}
		})
	}
}

// TestClaimRotates claims with the position that the answers give: every partition is met once before any is met again.
func TestClaimRotates(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	g := w.group(q, "g")
	var ids []int64
	for i := range 7 {
		ids = append(ids, w.partition(q, fmt.Sprint(i), 5))
	}
	from := int64(0)
	met := []int64{}
	for range 14 {
		got := w.claim(list{group: g, scan: true, from: from, slots: []slot{{lease: uuid.New(), budget: 1, autoAck: true}}})
		met = append(met, got.spans[0].partition)
		if l := got.lists[0]; l.BelowTo > 0 {
			from = l.BelowTo
		} else {
			from = l.AboveTo
		}
	}
	if want := slices.Concat(ids, ids); !slices.Equal(met, want) {
		t.Errorf("met %v, want %v", met, want)
	}
}

func TestClaimLeases(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "lease_time = 1000")
	g, other := w.group(q, "g"), w.group(q, "other")
	p := w.partition(q, "p", 10)
	first, second := uuid.New(), uuid.New()
	l := list{group: g, hints: []int64{p}, slots: []slot{{lease: first, budget: 4, seconds: 50}}}
	scan := list{group: g, scan: true, slots: []slot{{lease: second, budget: 100}}}

	equal(t, "spans", len(w.claim(l).spans), 1)
	if in := time.Until(*w.cursor(g, p).leaseUntil); in > 50*time.Second || in < 20*time.Second {
		t.Errorf("leased for %v", in)
	}
	for _, again := range []list{l, scan} {
		got := w.claim(again)
		equal(t, "spans of a live lease", len(got.spans), 0)
		equal(t, "seen", got.lists[0].Seen, 0)
	}
	o := w.claim(list{group: other, scan: true, slots: []slot{{lease: uuid.New(), budget: 100}}})
	if len(o.spans) != 1 || o.spans[0].take != 10 {
		t.Errorf("the other group got %v", o.spans)
	}
	if in := time.Until(*w.cursor(other, p).leaseUntil); in < 900*time.Second {
		t.Errorf("leased for %v, not for the queue's time", in)
	}
	w.exec("update ferrymq.cursors set lease_until = now() - interval '1 second', failures = 2, failed_offset = 1 where group_id = $1", g)
	got := w.claim(scan)
	if len(got.spans) != 1 || got.spans[0].start != 0 || got.spans[0].take != 10 {
		t.Errorf("after the lease ended: %v", got.spans)
	}
	if c := w.cursor(g, p); *c.leaseID != second || c.failures != 2 || *c.failedOffset != 1 {
		t.Errorf("cursor = %+v", c)
	}
	if ms := got.spans[0].segments[0].LeaseMs; ms > 1_000_000 || ms < 900_000 {
		t.Errorf("lease_ms = %d", ms)
	}
}

func TestClaimAutoAck(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	g := w.group(q, "g")
	p := w.partition(q, "p", 3, 3)
	l := list{group: g, scan: true, slots: []slot{{lease: uuid.New(), budget: 4, autoAck: true, discovery: true}}}
	for _, want := range [][2]int64{{0, 4}, {4, 2}} {
		got := w.claim(l)
		if len(got.spans) != 1 || got.spans[0].start != want[0] || got.spans[0].take != want[1] {
			t.Errorf("spans = %v, want %v", got.spans, want)
		}
		c := w.cursor(g, p)
		if c.committed != want[0]+want[1] || c.leaseID != nil || c.batchEnd != nil || !c.pending {
			t.Errorf("cursor = %+v", c)
		}
	}
	got := w.claim(l)
	equal(t, "spans", len(got.spans), 0)
	equal(t, "stale", got.lists[0].Stale, 1)
	equal(t, "pending", w.cursor(g, p).pending, false)
	equal(t, "leases", one[int](w, "select count(*) from ferrymq.leases"), 0)
}

func TestClaimDiscoveryLease(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	g := w.group(q, "g")
	for i := range 3 {
		w.partition(q, fmt.Sprint(i), 1)
	}
	lease := uuid.New()
	for range 2 { // once per lease and group, however many partitions and flushes
		w.claim(list{group: g, scan: true, slots: []slot{{lease: lease, budget: 10, parts: 1, discovery: true}, {lease: lease, budget: 10, parts: 1, discovery: true}}})
	}
	equal(t, "leases", one[int](w, "select count(*) from ferrymq.leases where lease_id = $1 and group_id = $2", lease, g), 1)
	find := func(group int32, project int32) int {
		return len(must[[]db.LeaseFindRow](t)(w.LeaseFind(t.Context(), db.LeaseFindParams{ProjectID: project, LeaseID: lease, GroupID: group})))
	}
	equal(t, "cursors found by the lease", find(0, 1), 3)
	equal(t, "cursors found in another project", find(0, 2), 0)
	w.exec("delete from ferrymq.leases")
	equal(t, "cursors found by the group", find(g, 1), 3)
	equal(t, "cursors found without either", find(0, 1), 0)
	w.exec("update ferrymq.cursors set lease_until = now() where partition_id = (select min(partition_id) from ferrymq.cursors)")
	equal(t, "live cursors found", find(g, 1), 2)
	check(t, w.deleteQueue(q))
	equal(t, "cursors of a deleted queue", find(g, 1), 0)
}

func TestClaimAfterRetention(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	g := w.group(q, "g")
	p := w.partition(q, "p", 5, 5, 5)
	w.exec("delete from ferrymq.segments where base_offset < 10")
	w.exec("update ferrymq.partitions set first_offset = 10")
	got := w.pop(g, uuid.New())
	if len(got.spans) != 1 || got.spans[0].start != 10 || got.spans[0].take != 5 {
		t.Errorf("spans = %v", got.spans)
	}
	equal(t, "committed", w.cursor(g, p).committed, 10)

	// Everything is gone: the cursor follows and is drained.
	p = w.partition(q, "all", 5)
	w.exec("delete from ferrymq.segments where partition_id = $1", p)
	w.exec("update ferrymq.partitions set first_offset = 5 where id = $1", p)
	equal(t, "stale", w.pop(g, uuid.New()).lists[0].Stale, 1)
	c := w.cursor(g, p)
	if c.committed != 5 || c.pending {
		t.Errorf("cursor = %+v", c)
	}
	w.push(p, 1)
	got = w.pop(g, uuid.New())
	if len(got.spans) != 1 || got.spans[0].start != 5 || got.spans[0].take != 1 {
		t.Errorf("spans = %v", got.spans)
	}
}

func TestClaimDelayed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	near := func(t *testing.T, what string, got *time.Time, want time.Duration) {
		t.Helper()
		if got == nil || time.Until(*got) > want || time.Until(*got) < want-10*time.Second {
			t.Errorf("%s is at %v, want in %v", what, got, want)
		}
	}
	t.Run("delay", func(t *testing.T) {
		q := w.queue("delay", "delayed_processing = 60")
		g := w.group(q, "g")
		p := w.partition(q, "p", 3, 3, 3)
		w.exec("update ferrymq.segments set created_at = created_at - interval '2 minutes' where partition_id = $1 and base_offset = 0", p)
		got := w.pop(g, uuid.New())
		if len(got.spans) != 1 || got.spans[0].take != 3 {
			t.Errorf("the part that is due: %v", got.spans)
		}
		w.settle(settle{group: g, partition: p, lease: *w.cursor(g, p).leaseID, action: complete, moveTo: 3})
		got = w.pop(g, uuid.New())
		equal(t, "spans", len(got.spans), 0)
		equal(t, "stale", got.lists[0].Stale, 1)
		if ms := got.lists[0].DueMs; ms > 60_000 || ms < 50_000 {
			t.Errorf("due in %d ms", ms)
		}
		c := w.cursor(g, p)
		near(t, "not_before", c.notBefore, time.Minute)
		equal(t, "pending", c.pending, true)
		got = w.pop(g, uuid.New())
		equal(t, "looked at again", got.lists[0].Seen, 0)
		w.exec("update ferrymq.segments set created_at = created_at - interval '2 minutes' where partition_id = $1", p)
		w.exec("update ferrymq.cursors set not_before = now() - interval '1 second' where partition_id = $1", p)
		equal(t, "by index before it is promoted", len(w.pop(g, uuid.New()).spans), 0)
		got = w.claim(list{group: g, hints: []int64{p}, slots: slots(1, 100, 1)})
		equal(t, "by hint", len(got.spans), 1)
		equal(t, "not_before is gone", w.cursor(g, p).notBefore == nil, true)
	})
	t.Run("window", func(t *testing.T) {
		q := w.queue("window", "window_buffer = 30")
		g := w.group(q, "g")
		p := w.partition(q, "p", 3)
		got := w.pop(g, uuid.New())
		equal(t, "spans", len(got.spans), 0)
		near(t, "not_before", w.cursor(g, p).notBefore, 30*time.Second)
		w.exec("update ferrymq.partitions set last_push_at = now() - interval '1 minute' where id = $1", p)
		w.exec("update ferrymq.cursors set not_before = null where partition_id = $1", p)
		equal(t, "spans after the window", len(w.pop(g, uuid.New()).spans), 1)
	})
	t.Run("an ended lease stays fenced while it waits", func(t *testing.T) {
		q := w.queue("fenced", "")
		g := w.group(q, "g")
		p, lease := w.leased(q, g, "p", 3)
		w.exec("update ferrymq.queues set delayed_processing = 60 where id = $1", q)
		w.exec("update ferrymq.cursors set lease_until = now() - interval '1 second' where partition_id = $1", p)
		equal(t, "spans", len(w.pop(g, uuid.New()).spans), 0)
		c := w.cursor(g, p)
		if c.leaseID == nil || *c.leaseID != lease || c.notBefore == nil || !c.pending {
			t.Errorf("cursor = %+v", c)
		}
	})
	w.noneStuck()
}

func TestClaimStaleSlotsLookAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	g := w.group(q, "g")
	idle, full := w.partition(q, "idle"), w.partition(q, "full", 1)
	w.exec("update ferrymq.cursors set pending = true where partition_id = $1", idle)
	got := w.claim(list{group: g, scan: true, slots: slots(1, 1, 1)})
	equal(t, "stale", got.lists[0].Stale, 1)
	equal(t, "pending", w.cursor(g, idle).pending, false)
	got = w.claim(list{group: g, scan: true, slots: slots(1, 1, 1)})
	if len(got.spans) != 1 || got.spans[0].partition != full {
		t.Errorf("spans = %v", got.spans)
	}
}

func TestClaimGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	a, b, c := w.queue("a", ""), w.queue("b", ""), w.queue("c", "")
	ga, gb, gc := w.group(a, "g"), w.group(b, "g"), w.group(c, "g")
	for _, q := range []int32{a, b, c} {
		w.partition(q, "p", 1)
	}
	check(t, w.deleteQueue(a))
	w.exec("update ferrymq.groups set deleted_at = now() where id = $1", gb)
	lists := []list{{group: ga, scan: true, slots: slots(1, 1, 1)}, {group: gb, scan: true, slots: slots(1, 1, 1)}, {group: gc, scan: true, slots: slots(1, 1, 1)}}
	got := w.claim(lists...)
	if _, ok := got.lists[0]; ok {
		t.Error("a list of a deleted queue was answered")
	}
	if _, ok := got.lists[1]; ok {
		t.Error("a list of a deleted group was answered")
	}
	if len(got.spans) != 1 || got.spans[0].list != 2 || got.spans[0].slot != 2 {
		t.Errorf("spans = %v", got.spans)
	}
	equal(t, "leases", one[int](w, "select count(*) from ferrymq.cursors where lease_id is not null"), 1)
}

// TestClaimSegments takes every span of a partition with uneven segments: read checks that the segments cover it, here that no more came.
func TestClaimSegments(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	g := w.group(q, "g")
	p := w.partition(q, "p", 3, 1, 4, 2)
	bounds := []int64{0, 3, 4, 8, 10}
	for start := int64(0); start < 10; start++ {
		for budget := int64(1); budget <= 11; budget++ {
			w.exec("update ferrymq.cursors set committed = $1, lease_id = null, lease_until = null, batch_end = null, pending = true", start)
			got := w.claim(list{group: g, hints: []int64{p}, slots: slots(1, budget, 1)})
			if len(got.spans) != 1 || got.spans[0].start != start || got.spans[0].take != min(budget, 10-start) {
				t.Fatalf("from %d with %d: %v", start, budget, got.spans)
			}
			n := 0
			for i := range 4 {
				if bounds[i] < start+got.spans[0].take && bounds[i+1] > start {
					n++
				}
			}
			equal(t, fmt.Sprintf("segments from %d with %d", start, budget), len(got.spans[0].segments), n)
			if f := string(got.spans[0].segments[0].Frames); f != fmt.Sprint(got.spans[0].segments[0].BaseOffset) {
				t.Errorf("frames %q", f)
			}
		}
	}
}
