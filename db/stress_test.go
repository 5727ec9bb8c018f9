package db_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"ferrymq/db"
)

// cursorKey names a cursor.
type cursorKey struct {
	group     int32
	partition int64
}

// held is a lease somebody works under.
type held struct {
	lease      uuid.UUID
	start, end int64
}

// ledger is what the brokers of TestStress know together: who holds what, and up to where each cursor was delivered.
type ledger struct {
	mu     sync.Mutex
	holder map[cursorKey]uuid.UUID
	next   map[cursorKey]int64
	failed map[cursorKey]uuid.UUID // under which lease a message failed: what became of it its answer will say
	errs   []string
	bases  map[int64]map[int64]int64 // partition → base → total
}

func (l *ledger) fail(format string, args ...any) {
	if len(l.errs) < 20 {
		l.errs = append(l.errs, fmt.Sprintf(format, args...))
	}
}

// TestStress runs whole flushes of several brokers over few partitions and checks what none of them may ever see.
func TestStress(t *testing.T) {
	t.Parallel()
	const brokers, partitions = 4, 6
	span := 3 * time.Second
	if testing.Short() {
		span = time.Second
	}
	w := newWorld(t, brokers+2)
	q := w.queue("q", "retry_limit = 1, dead_letter_queue = true")
	groups := []int32{w.group(q, "one"), w.group(q, "two")}
	var ids []int64
	for i := range partitions {
		ids = append(ids, w.partition(q, fmt.Sprint(i)))
	}
	l := &ledger{holder: map[cursorKey]uuid.UUID{}, next: map[cursorKey]int64{}, failed: map[cursorKey]uuid.UUID{}, bases: map[int64]map[int64]int64{}}
	for _, p := range ids {
		l.bases[p] = map[int64]int64{}
	}
	ctx, stop := context.WithTimeout(t.Context(), span)
	defer stop()
	var work sync.WaitGroup
	var flights, pushed int64
	for n := range brokers {
		work.Go(func() {
			r := rand.New(rand.NewPCG(uint64(n), uint64(time.Now().UnixNano())))
			mine := map[cursorKey]held{}
			var done, messages int64
			defer func() {
				l.mu.Lock()
				flights, pushed = flights+done, pushed+messages
				l.mu.Unlock()
			}()
			for ctx.Err() == nil || len(mine) > 0 {
				f := l.random(r, ids, groups, mine, ctx.Err() != nil)
				if err := f.send(t.Context(), w.pool); err != nil {
					l.mu.Lock()
					l.fail("a flush failed: %s", db.Text(err))
					l.mu.Unlock()
					return
				}
				l.land(f, mine)
				done++
				for _, x := range f.pushes {
					for _, c := range x.counts {
						messages += int64(c)
					}
				}
			}
		})
	}
	// Every snapshot must show that whatever can be delivered will be looked for.
	work.Go(func() {
		for ctx.Err() == nil {
			var stuck int
			err := w.pool.QueryRow(t.Context(), `select count(*) from ferrymq.cursors c join ferrymq.partitions p on p.id = c.partition_id
				where not c.pending and p.next_offset > c.committed`).Scan(&stuck)
			if err != nil || stuck > 0 {
				l.mu.Lock()
				l.fail("%d cursors are stuck (%v)", stuck, err)
				l.mu.Unlock()
				return
			}
		}
	})
	work.Wait()
	for _, e := range l.errs {
		t.Error(e)
	}
	if t.Failed() {
		return
	}
	w.noneStuck()
	for _, g := range groups { // drain what is left, in order
		for {
			got := w.claim(list{group: g, scan: true, slots: []slot{{lease: uuid.New(), budget: 100_000, parts: 100, autoAck: true}}})
			for _, s := range got.spans {
				k := cursorKey{g, s.partition}
				equal(t, fmt.Sprintf("start of %v", k), s.start, l.next[k])
				l.next[k] = s.start + s.take
			}
			if len(got.spans) == 0 && got.lists[0].Seen == 0 {
				break
			}
		}
		for _, p := range ids {
			c := w.cursor(g, p)
			equal(t, fmt.Sprintf("delivered of %d to %d", p, g), l.next[cursorKey{g, p}], c.nextOffset)
			if c.pending || c.committed != c.nextOffset || c.leaseID != nil {
				t.Errorf("drained cursor = %+v", c)
			}
		}
	}
	for _, p := range ids { // dense
		tail := int64(0)
		for l.bases[p][tail] > 0 {
			tail += l.bases[p][tail]
		}
		equal(t, fmt.Sprintf("tail of %d", p), one[int64](w, "select next_offset from ferrymq.partitions where id = $1", p), tail)
	}
	equal(t, "gaps", one[int](w, `select count(*) from (select base_offset, lag(base_offset + count, 1, 0::bigint) over (partition by partition_id order by base_offset) as want,
		created_at < lag(created_at) over (partition by partition_id order by base_offset) as back from ferrymq.segments) x where base_offset <> want or back`), 0)
	t.Logf("%d flushes, %d messages, %d dead letters", flights, pushed, one[int](w, "select count(*) from ferrymq.dead_letters"))
}

// random makes a flush: pushes, settles of what this broker holds, and claims. At the end it only settles.
func (l *ledger) random(r *rand.Rand, ids []int64, groups []int32, mine map[cursorKey]held, ending bool) *flight {
	f := &flight{}
	if !ending {
		for _, i := range r.Perm(len(ids))[:r.IntN(4)] {
			x := push{ids[i], -1, nil}
			for range 1 + r.IntN(3) {
				x.counts = append(x.counts, 1+r.IntN(5))
			}
			f.pushes = append(f.pushes, x)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for k, h := range mine {
		if !ending && r.IntN(3) == 0 {
			continue
		}
		s := settle{group: k.group, partition: k.partition, lease: h.lease, expected: h.start, moveTo: h.start}
		switch r.IntN(8) {
		case 0:
			s.action = retry
		case 1:
			s.action = giveBack
		case 2:
			s.action, s.failedAt = failed, h.start
			s.dead = &dead{id: uuid.New(), frames: []byte("f"), createdAt: epoch}
		case 3:
			if h.end-h.start > 1 && !ending {
				s.moveTo = h.start + 1 // the lease goes on
				break
			}
			fallthrough
		default:
			s.moveTo = h.end
		}
		f.settles = append(f.settles, s)
		// From here on somebody else may have it, before this broker knows that its settle is done.
		if s.action != complete || s.moveTo == h.end {
			delete(l.holder, k)
			delete(mine, k)
		} else {
			mine[k] = held{h.lease, s.moveTo, h.end}
		}
		l.next[k] = s.moveTo
		if s.action == failed {
			l.next[k], l.failed[k] = -1, h.lease
		}
	}
	if ending {
		return f
	}
	for _, g := range groups {
		if r.IntN(3) == 0 {
			continue
		}
		for _, i := range r.Perm(len(ids))[:r.IntN(3)] {
			f.quick.Groups, f.quick.Partitions, f.quick.Leases = append(f.quick.Groups, g), append(f.quick.Partitions, ids[i]), append(f.quick.Leases, uuid.New())
			f.quick.SlotNos, f.quick.Budgets, f.quick.Seconds = append(f.quick.SlotNos, int32(len(f.quick.SlotNos))), append(f.quick.Budgets, int64(1+r.IntN(20))), append(f.quick.Seconds, 600)
			f.quick.AutoAcks, f.quick.Frames, f.quick.SpanBytes = append(f.quick.AutoAcks, false), append(f.quick.Frames, true), 1<<30
		}
		x := list{group: g, scan: r.IntN(4) > 0, indexFirst: r.IntN(4) == 0, from: ids[r.IntN(len(ids))]}
		for _, i := range r.Perm(len(ids))[:r.IntN(3)] {
			x.hints = append(x.hints, ids[i])
		}
		for range 1 + r.IntN(2) {
			x.slots = append(x.slots, slot{lease: uuid.New(), budget: int64(1 + r.IntN(20)), parts: int64(1 + r.IntN(2)), seconds: 600})
		}
		f.lists = append(f.lists, x)
	}
	return f
}

// land notes what a flush did.
func (l *ledger) land(f *flight, mine map[cursorKey]held) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(f.appended) != len(f.pushes) {
		l.fail("%d pushes, %d appended", len(f.pushes), len(f.appended))
	}
	totals := map[int64]int64{}
	for _, x := range f.pushes {
		for _, c := range x.counts {
			totals[x.partition] += int64(c)
		}
	}
	for _, a := range f.appended {
		if l.bases[a.ID][a.Base] != 0 {
			l.fail("offset %d of partition %d was given twice", a.Base, a.ID)
		}
		l.bases[a.ID][a.Base] = totals[a.ID]
	}
	if len(f.settled) != len(f.settles) {
		l.fail("%d settles, %d answered: a lease was lost", len(f.settles), len(f.settled))
	}
	for _, r := range f.settled {
		if s := f.settles[r.N]; s.action == failed {
			k := cursorKey{s.group, s.partition}
			want := s.expected
			if r.Outcome == filed {
				want++
			}
			if r.Committed != want || l.next[k] >= 0 && l.next[k] < want {
				l.fail("a failed message at %d left the cursor at %d, %d is delivered", s.expected, r.Committed, l.next[k])
			}
			if l.next[k] < 0 && l.failed[k] == s.lease { // nobody has claimed it since
				l.next[k] = want
			}
		}
	}
	seen := map[cursorKey]bool{}
	took := func(k cursorKey, lease uuid.UUID, start, take int64) {
		if h, ok := mine[k]; seen[k] {
			if !ok || h.lease != lease {
				l.fail("two slots got %v", k)
			}
			return
		}
		seen[k] = true
		if l.holder[k] != none {
			l.fail("%v was leased while it was held", k)
		}
		if l.next[k] >= 0 && start != l.next[k] {
			l.fail("%v was delivered from %d, not from %d", k, start, l.next[k])
		}
		l.next[k] = start
		l.holder[k] = lease
		mine[k] = held{lease, start, start + take}
	}
	for _, r := range f.hinted {
		took(cursorKey{f.quick.Groups[r.SlotNo], r.PartitionID}, f.quick.Leases[r.SlotNo], r.StartOffset, r.Take)
	}
	slot := int32(0)
	for no, x := range f.lists {
		for _, s := range x.slots {
			for _, r := range f.claimed {
				if r.SlotNo == slot && int(r.ListNo) == no {
					took(cursorKey{x.group, r.PartitionID}, s.lease, r.StartOffset, r.Take)
				}
			}
			slot++
		}
	}
}
