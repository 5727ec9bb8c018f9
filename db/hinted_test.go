package db_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"ferrymq/db"
	"ferrymq/dbtest"
)

// hinted is the arguments of ClaimHinted that give each slot of a list the hint of its number.
func hinted(l list) db.ClaimHintedParams {
	p := db.ClaimHintedParams{SpanBytes: 1 << 30}
	for i, s := range l.slots {
		p.SlotNos, p.Groups, p.Partitions = append(p.SlotNos, int32(i)), append(p.Groups, l.group), append(p.Partitions, l.hints[i])
		p.Leases, p.Budgets, p.Seconds = append(p.Leases, s.lease), append(p.Budgets, s.budget), append(p.Seconds, s.seconds)
		p.AutoAcks, p.Frames = append(p.AutoAcks, s.autoAck), append(p.Frames, !l.noFrames)
	}
	return p
}

// asClaimed are rows of ClaimHinted as ClaimPartitions returns the same.
func asClaimed(rows []db.ClaimHintedRow) (out []db.ClaimPartitionsRow) {
	for _, r := range rows {
		out = append(out, db.ClaimPartitionsRow{DueMs: -1, SlotNo: r.SlotNo, PartitionID: r.PartitionID, PublicID: r.PublicID, Name: r.Name, StartOffset: r.StartOffset, Take: r.Take,
			NextOffset: r.NextOffset, LeaseMs: r.LeaseMs, Hidden: r.Hidden, OnlyGroup: r.OnlyGroup, BaseOffset: r.BaseOffset, Count: r.Count, KeyNo: r.KeyNo, Codec: r.Codec,
			CreatedAt: r.CreatedAt, FirstID: r.FirstID, Keys: r.Keys, Frames: r.Frames})
	}
	return out
}

// TestClaimHinted: whatever state a cursor is in, what ClaimHinted does to it ClaimPartitions does too, and it returns the same. Where it does
// nothing, ClaimPartitions may do more.
func TestClaimHinted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	q := w.queue("q", "lease_time = 77")
	g := w.group(q, "g")
	passes := map[string]bool{"leased": true, "waits": true, "is due": true, "drained": true, "not pending": true, "nothing": true}
	states := map[string]string{
		"new": "", "half way": "committed = 5", "at a segment's end": "committed = 4", "behind retention": "", "restored": "", "for another group": "",
		"lease over": "lease_id = gen_random_uuid(), lease_until = now() - interval '1 second', batch_end = 3", "failed before": "failed_offset = 0, failures = 2",
		"leased": "lease_id = gen_random_uuid(), lease_until = now() + interval '1 hour', batch_end = 3", "waits": "not_before = now() + interval '1 hour'",
		"is due": "not_before = now() - interval '1 second'", "drained": "committed = 10", "not pending": "committed = 10, pending = false",
	}
	for name, state := range states {
		for _, s := range []slot{{budget: 100}, {budget: 1}, {budget: 5, seconds: 9}, {budget: 3, autoAck: true}, {budget: 100, autoAck: true}} {
			for _, spanBytes := range []int64{1 << 30, 1} {
				t.Run(fmt.Sprint(name, "/", s.budget, " ", s.seconds, " ", s.autoAck, " ", spanBytes), func(t *testing.T) {
					s := s
					s.lease = uuid.New()
					p := w.partition(q, uuid.NewString(), 4, 4, 2)
					if state != "" {
						w.exec("update ferrymq.cursors set "+state+" where partition_id = $1", p)
					}
					switch name {
					case "behind retention":
						w.exec("update ferrymq.partitions set first_offset = 6 where id = $1", p)
					case "for another group":
						w.exec("update ferrymq.segments set only_group = 99 where partition_id = $1 and base_offset = 4", p)
					}
					l := list{group: g, hints: []int64{p}, slots: []slot{s}}
					run := func(claim func(x *session) []db.ClaimPartitionsRow) ([]db.ClaimPartitionsRow, string) {
						x := w.begin()
						defer x.tx.Rollback(t.Context())
						rows := claim(x)
						var row string
						check(t, x.tx.QueryRow(t.Context(), `select row(c.committed, c.batch_end, c.lease_id, round(extract(epoch from c.lease_until - now()) / 3), c.failed_offset, c.failures,
							c.not_before, c.pending, c.attempts, c.leased_at, c.settled, c.consumer)::text from ferrymq.cursors c where c.partition_id = $1`, p).Scan(&row))
						return rows, row
					}
					var before string
					_, before = run(func(*session) []db.ClaimPartitionsRow { return nil })
					all, want := run(func(x *session) []db.ClaimPartitionsRow {
						p := claims(l)
						p.SpanBytes = spanBytes
						return must[[]db.ClaimPartitionsRow](t)(x.ClaimPartitions(t.Context(), p))[1:]
					})
					quick, got := run(func(x *session) []db.ClaimPartitionsRow {
						p := hinted(l)
						p.SpanBytes = spanBytes
						return asClaimed(must[[]db.ClaimHintedRow](t)(x.ClaimHinted(t.Context(), p)))
					})
					if passes[name] {
						equal(t, "rows", len(quick), 0)
						equal(t, "cursor", got, before)
						return
					}
					if d := cmp.Diff(all, quick); d != "" || len(quick) == 0 {
						t.Errorf("-ClaimPartitions +ClaimHinted:\n%s", d)
					}
					equal(t, "cursor", got, want)
				})
			}
		}
	}
}

// TestClaimHintedRefuses: what it is not written for it leaves alone.
func TestClaimHintedRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	for name, set := range map[string]string{"delay": "delayed_processing = 1", "window": "window_buffer = 1", "deleted": ""} {
		q := w.queue(name, set)
		g := w.group(q, "g")
		p := w.partition(q, "p", 3)
		w.exec("update ferrymq.segments set created_at = created_at - interval '1 hour' where partition_id = $1", p)
		w.exec("update ferrymq.partitions set last_push_at = last_push_at - interval '1 hour' where id = $1", p)
		if name == "deleted" {
			w.exec("update ferrymq.queues set deleted_at = now() where id = $1", q)
		}
		equal(t, name, len(must[[]db.ClaimHintedRow](t)(w.ClaimHinted(w.ctx(), hinted(list{group: g, hints: []int64{p}, slots: slots(1, 1, 1)})))), 0)
	}
	q := w.queue("q", "")
	p := w.partition(q, "p", 3)
	for name, g := range map[string]int32{"a subscription": w.subscription(q, "s", ""), "a deleted group": w.group(q, "gone"), "no group": 999} {
		if name == "a deleted group" {
			w.exec("update ferrymq.groups set deleted_at = now() where id = $1", g)
		}
		equal(t, name, len(must[[]db.ClaimHintedRow](t)(w.ClaimHinted(w.ctx(), hinted(list{group: g, hints: []int64{p}, slots: slots(1, 1, 1)})))), 0)
	}
	g := w.group(q, "g")
	twice := must[[]db.ClaimHintedRow](t)(w.ClaimHinted(w.ctx(), hinted(list{group: g, hints: []int64{p, p}, slots: slots(2, 1, 1)})))
	equal(t, "slots that get the same partition", len(twice), 1)
	equal(t, "again", len(must[[]db.ClaimHintedRow](t)(w.ClaimHinted(w.ctx(), hinted(list{group: g, hints: []int64{p}, slots: slots(1, 1, 1)})))), 0)
}

// TestRaceClaimHinted: a claim waits for nobody, and what it does not get it does not return.
func TestRaceClaimHinted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 6)
	q := w.queue("q", "")
	g := w.group(q, "g")
	claim := func(hints ...int64) []db.ClaimHintedRow {
		return must[[]db.ClaimHintedRow](t)(w.ClaimHinted(t.Context(), hinted(list{group: g, hints: hints, slots: slots(len(hints), 1, 1)})))
	}
	t.Run("against a claim", func(t *testing.T) {
		p1, p2 := w.partition(q, "a1", 3), w.partition(q, "a2", 3)
		a := w.begin()
		equal(t, "first", len(must[[]db.ClaimHintedRow](t)(a.ClaimHinted(t.Context(), hinted(list{group: g, hints: []int64{p1}, slots: slots(1, 1, 1)})))), 1)
		got := claim(p1, p2)
		if len(got) != 1 || got[0].PartitionID != p2 {
			t.Errorf("got %+v", got)
		}
		a.commit()
		equal(t, "leased", len(claim(p1)), 0)
	})
	t.Run("against a push that marks", func(t *testing.T) {
		p := w.partition(q, "b")
		a := w.begin()
		a.fly(&flight{pushes: []push{{p, -1, []int{1}}}})
		equal(t, "before the commit", len(claim(p)), 0)
		a.commit()
		equal(t, "after it", len(claim(p)), 1)
	})
	t.Run("many at once", func(t *testing.T) {
		var ids []int64
		for i := range 20 {
			ids = append(ids, w.partition(q, fmt.Sprint("c", i), 1))
		}
		got := make([][]db.ClaimHintedRow, 4)
		var done []<-chan error
		for i := range got {
			order := slices.Clone(ids)
			if i%2 == 1 {
				slices.Reverse(order)
			}
			done = append(done, async(func() (err error) {
				got[i], err = w.ClaimHinted(w.ctx(), hinted(list{group: g, hints: order, slots: slots(len(order), 1, 1)}))
				return err
			}))
		}
		taken := map[int64]int{}
		for i := range got {
			check(t, finish(t, done[i]))
			for _, r := range got[i] {
				taken[r.PartitionID]++
			}
		}
		for _, id := range ids {
			equal(t, "holders", taken[id], 1)
		}
	})
}

// TestRaceComplete: acks that lock by themselves wait for each other in one order, and one whose cursor has moved since the statement began
// changes nothing.
func TestRaceComplete(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 6)
	q := w.queue("q", "")
	g := w.group(q, "g")
	for _, c := range []struct {
		name, change string
		want         int // acks that are good
	}{
		{"nothing", "", 2},
		{"an extended lease", "lease_until = lease_until + interval '1 hour'", 1},
		{"another lease", "lease_id = gen_random_uuid()", 1},
		{"a moved cursor", "committed = committed + 1", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			p1, first := w.leased(q, g, c.name+" 1", 3)
			p2, second := w.leased(q, g, c.name+" 2", 3)
			a := w.begin()
			_, err := a.tx.Exec(t.Context(), "select from ferrymq.cursors where partition_id = $1 for update", p1)
			check(t, err)
			f := &flight{settles: []settle{{group: g, partition: p2, lease: second, action: complete, moveTo: 2}, {group: g, partition: p1, lease: first, action: complete, moveTo: 2}}}
			settling := w.send(f)
			dbtest.WaitBlocked(t, w.pool, 1)
			if c.change != "" {
				w.exec("update ferrymq.cursors set "+c.change+" where partition_id = $1", p2)
			}
			before := w.cursor(g, p2)
			a.commit()
			check(t, finish(t, settling))
			equal(t, "settled", len(f.settled), c.want)
			if c.want == 1 {
				equal(t, "which", f.settled[0].N, 1)
				if d := cmp.Diff(before, w.cursor(g, p2), cmp.AllowUnexported(cursor{})); d != "" {
					t.Errorf("it changed all the same:\n%s", d)
				}
			}
			equal(t, "committed", w.cursor(g, p1).committed, 2)
		})
	}
	t.Run("crosswise", func(t *testing.T) {
		var parts []int64
		var leases []uuid.UUID
		for i := range 10 {
			p, lease := w.leased(q, g, fmt.Sprint("x", i), 500)
			parts, leases = append(parts, p), append(leases, lease)
		}
		rounds := func(back bool) error {
			for n := range int64(150) {
				var done []settle
				for i, p := range parts {
					done = append(done, settle{group: g, partition: p, lease: leases[i], action: complete, moveTo: n + 1})
				}
				if back {
					slices.Reverse(done)
				}
				if err := (&flight{settles: done}).send(w.ctx(), w.pool); err != nil {
					return err
				}
			}
			return nil
		}
		one, other := async(func() error { return rounds(false) }), async(func() error { return rounds(true) })
		check(t, finish(t, one))
		check(t, finish(t, other))
	})
}
