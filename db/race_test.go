package db_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/db"
	"ferrymq/dbtest"
)

// Two sessions, held open at the point where they could go wrong. Each race is first lost on purpose, without what prevents it.

// send runs a flush on a connection of its own.
func (w *world) send(f *flight) <-chan error {
	return async(func() error { return f.send(w.ctx(), w.pool) })
}

// leased makes a partition of n messages, all leased to one pop.
func (w *world) leased(queue, group int32, name string, n int) (partition int64, lease uuid.UUID) {
	w.t.Helper()
	partition, lease = w.partition(queue, name, n), uuid.New()
	g := w.claim(list{group: group, hints: []int64{partition}, slots: []slot{{lease: lease, budget: int64(n)}}})
	if len(g.spans) != 1 || g.spans[0].take != int64(n) {
		w.t.Fatalf("claimed %v", g.spans)
	}
	return partition, lease
}

func TestRacePushAgainstDrainingSettle(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 6)
	q := w.queue("q", "")
	g := w.group(q, "g")

	t.Run("without the partition's lock the message sleeps for ever", func(t *testing.T) {
		p, lease := w.leased(q, g, "naive", 3)
		a := w.begin()
		must[[]db.SettleCursorsRow](t)(a.SettleCursors(t.Context(), settles(settle{group: g, partition: p, lease: lease, action: complete, moveTo: 3})))
		w.push(p, 1) // does not wait: the cursor looks pending
		a.commit()
		if c := w.cursor(g, p); c.pending || c.nextOffset != 4 {
			t.Fatalf("this race was expected to be lost, the cursor is %+v", c)
		}
		w.exec("update ferrymq.cursors set pending = true where partition_id = $1", p)
	})
	t.Run("settle first", func(t *testing.T) {
		p, lease := w.leased(q, g, "settle first", 3)
		a := w.begin()
		f := a.fly(&flight{settles: []settle{{group: g, partition: p, lease: lease, action: complete, moveTo: 3}}})
		equal(t, "pending", f.settled[0].Pending, false)
		pushing := w.send(&flight{pushes: []push{{p, -1, []int{1}}}})
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, pushing))
		equal(t, "pending", w.cursor(g, p).pending, true)
	})
	t.Run("push first", func(t *testing.T) {
		p, lease := w.leased(q, g, "push first", 3)
		a := w.begin()
		a.fly(&flight{pushes: []push{{p, -1, []int{1}}}})
		f := &flight{settles: []settle{{group: g, partition: p, lease: lease, action: complete, moveTo: 3}}}
		settling := w.send(f)
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, settling))
		equal(t, "pending", f.settled[0].Pending, true)
		equal(t, "pending", w.cursor(g, p).pending, true)
	})
	t.Run("dead letter of the last message", func(t *testing.T) {
		p, lease := w.leased(q, g, "dead", 3)
		a := w.begin()
		a.fly(&flight{pushes: []push{{p, -1, []int{1}}}})
		f := &flight{settles: []settle{{group: g, partition: p, lease: lease, action: deadLetter, moveTo: 0, failedAt: 2, dead: &dead{id: uuid.New(), frames: []byte("f"), createdAt: epoch}}}}
		settling := w.send(f)
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, settling))
		equal(t, "outcome", f.settled[0].Outcome, filed)
		equal(t, "pending", w.cursor(g, p).pending, true)
	})
	w.noneStuck()
}

func TestRaceClaimAgainstClaim(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 6)
	q := w.queue("q", "")
	g := w.group(q, "g")

	t.Run("looking and taking apart gives two leases", func(t *testing.T) {
		p := w.partition(q, "naive", 1)
		free := "select count(*) from ferrymq.cursors where partition_id = $1 and lease_id is null"
		take := "update ferrymq.cursors set lease_id = gen_random_uuid(), batch_end = 1, lease_until = now() + interval '1 hour' where partition_id = $1"
		a, b := w.begin(), w.begin()
		won := 0
		for _, s := range []*session{a, b} {
			var n int
			check(t, s.tx.QueryRow(t.Context(), free, p).Scan(&n))
			won += n
		}
		for _, s := range []*session{a, b} {
			_, err := s.tx.Exec(t.Context(), take, p)
			check(t, err)
			s.commit()
		}
		equal(t, "leases handed out", won, 2)
	})
	for _, how := range []string{"hint", "index"} {
		t.Run(how, func(t *testing.T) {
			p := w.partition(q, how, 5)
			l := list{group: g, scan: how == "index", slots: []slot{{lease: uuid.New(), budget: 5}}}
			if how == "hint" {
				l.hints = []int64{p}
			}
			a := w.begin()
			got := read(t, must[[]db.ClaimPartitionsRow](t)(a.ClaimPartitions(t.Context(), claims(l))))
			equal(t, "spans of the first", len(got.spans), 1)
			l.slots[0].lease = uuid.New()
			equal(t, "spans while the first is not committed", len(w.claim(l).spans), 0) // and it did not wait
			a.commit()
			equal(t, "spans while the first is live", len(w.claim(l).spans), 0)
			equal(t, "seen", w.claim(l).lists[0].Seen, 0)
		})
	}
}

func TestRaceClaimAgainstSettle(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 6)
	q := w.queue("q", "")
	g := w.group(q, "g")
	t.Run("a claim passes over what is being settled", func(t *testing.T) {
		p, lease := w.leased(q, g, "a", 3)
		w.push(p, 2)
		a := w.begin()
		a.fly(&flight{settles: []settle{{group: g, partition: p, lease: lease, action: complete, moveTo: 3}}})
		l := list{group: g, hints: []int64{p}, slots: []slot{{lease: uuid.New(), budget: 9}}}
		equal(t, "spans", len(w.claim(l).spans), 0)
		a.commit()
		got := w.claim(l)
		if len(got.spans) != 1 || got.spans[0].start != 3 || got.spans[0].take != 2 {
			t.Errorf("spans = %+v", got.spans)
		}
	})
	t.Run("a stale holder changes nothing", func(t *testing.T) {
		p, lease := w.leased(q, g, "b", 3)
		w.exec("update ferrymq.cursors set lease_until = now() - interval '1 second' where partition_id = $1", p)
		a, second := w.begin(), uuid.New()
		must[[]db.ClaimPartitionsRow](t)(a.ClaimPartitions(t.Context(), claims(list{group: g, hints: []int64{p}, slots: []slot{{lease: second, budget: 9}}})))
		equal(t, "completed", len(w.settle(settle{group: g, partition: p, lease: lease, action: complete})), 0) // its lease is over: it does not even wait
		var flights []*flight
		var done []<-chan error
		for i, action := range []int32{deadLetter, rest} {
			flights = append(flights, &flight{settles: []settle{{group: g, partition: p, lease: lease, action: action}}})
			done = append(done, w.send(flights[i]))
			dbtest.WaitBlocked(t, w.pool, i+1)
		}
		a.commit()
		for i := range done {
			check(t, finish(t, done[i]))
			equal(t, "settled", len(flights[i].settled), 0)
		}
		c := w.cursor(g, p)
		if c.leaseID == nil || *c.leaseID != second || c.committed != 0 {
			t.Errorf("cursor = %+v", c)
		}
	})
}

func TestRaceClearingClaimAgainstPush(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 6)
	q := w.queue("q", "")
	g := w.group(q, "g")
	// A cursor that says pending and has nothing: what autoAck leaves behind.
	idle := func(name string) int64 {
		p := w.partition(q, name, 3)
		w.claim(list{group: g, hints: []int64{p}, slots: []slot{{lease: uuid.New(), budget: 9, autoAck: true}}})
		if c := w.cursor(g, p); !c.pending || c.committed != 3 || c.leaseID != nil {
			t.Fatalf("cursor = %+v", c)
		}
		return p
	}
	look := func(p int64) db.ClaimPartitionsParams {
		return claims(list{group: g, hints: []int64{p}, slots: []slot{{lease: uuid.New(), budget: 9}}})
	}
	t.Run("clearing without the partition's lock loses the message", func(t *testing.T) {
		p := idle("naive")
		a := w.begin()
		_, err := a.tx.Exec(t.Context(), `update ferrymq.cursors c set pending = false from ferrymq.partitions p
			where c.partition_id = $1 and p.id = c.partition_id and p.next_offset <= c.committed`, p)
		check(t, err)
		w.push(p, 1)
		a.commit()
		equal(t, "pending", w.cursor(g, p).pending, false)
		w.exec("update ferrymq.cursors set pending = true where partition_id = $1", p)
	})
	t.Run("claim first", func(t *testing.T) {
		p := idle("claim first")
		a := w.begin()
		rows := must[[]db.ClaimPartitionsRow](t)(a.ClaimPartitions(t.Context(), look(p)))
		equal(t, "stale", rows[0].Stale, 1)
		pushing := w.send(&flight{pushes: []push{{p, -1, []int{1}}}})
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, pushing))
		equal(t, "pending", w.cursor(g, p).pending, true)
	})
	t.Run("push first", func(t *testing.T) {
		p := idle("push first")
		a := w.begin()
		a.fly(&flight{pushes: []push{{p, -1, []int{1}}}})
		rows := must[[]db.ClaimPartitionsRow](t)(w.ClaimPartitions(t.Context(), look(p))) // does not wait, does not clear
		equal(t, "stale", rows[0].Stale, 1)
		a.commit()
		equal(t, "pending", w.cursor(g, p).pending, true)
		equal(t, "spans", len(read(t, must[[]db.ClaimPartitionsRow](t)(w.ClaimPartitions(t.Context(), look(p)))).spans), 1)
	})
	t.Run("a claim without a push clears", func(t *testing.T) {
		p := idle("clears")
		must[[]db.ClaimPartitionsRow](t)(w.ClaimPartitions(t.Context(), look(p)))
		equal(t, "pending", w.cursor(g, p).pending, false)
	})
	w.noneStuck()
}

func TestRaceSeedingAgainstPush(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 6)
	q := w.queue("q", "")
	register := func(name string) int32 {
		g := must[db.GroupCreateRow](t)(w.GroupCreate(t.Context(), db.GroupCreateParams{QueueID: q, Name: name, Registered: true, StartMode: "all", StartAt: &epoch}))
		return g.ID
	}
	t.Run("seeding without the partitions' locks misses the push", func(t *testing.T) {
		p := w.partition(q, "naive")
		a := w.begin()
		a.fly(&flight{pushes: []push{{p, -1, []int{1}}}}) // marks: there is no cursor yet
		g := register("naive")
		check(t, w.SeedCursors(t.Context(), db.SeedCursorsParams{GroupID: g, StartAt: epoch, Ids: []int64{p}}))
		a.commit()
		if c := w.cursor(g, p); c.pending || c.nextOffset != 1 {
			t.Fatalf("this race was expected to be lost, the cursor is %+v", c)
		}
		w.exec("update ferrymq.cursors set pending = true where group_id = $1", g)
	})
	t.Run("push first", func(t *testing.T) {
		p := w.partition(q, "push first")
		a := w.begin()
		a.fly(&flight{pushes: []push{{p, -1, []int{1}}}})
		g := register("push first")
		seeding := async(func() error {
			return pgx.BeginFunc(w.ctx(), w.pool, func(tx pgx.Tx) error { _, err := seedStep(w.ctx(), db.New(tx), g, 1000); return err })
		})
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, seeding))
		if c := w.cursor(g, p); !c.pending || c.committed != 0 {
			t.Errorf("cursor = %+v", c)
		}
	})
	t.Run("seeding first", func(t *testing.T) {
		p := w.partition(q, "seeding first")
		g := register("seeding first")
		a := w.begin()
		_, err := seedStep(t.Context(), a.Queries, g, 1000)
		check(t, err)
		pushing := w.send(&flight{pushes: []push{{p, -1, []int{1}}}})
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, pushing))
		if c := w.cursor(g, p); !c.pending || c.committed != 0 {
			t.Errorf("cursor = %+v", c)
		}
	})
	t.Run("first contact with one partition", func(t *testing.T) {
		p := w.partition(q, "meet")
		a := w.begin()
		a.fly(&flight{pushes: []push{{p, -1, []int{1}}}})
		g := must[db.GroupCreateRow](t)(w.GroupCreate(t.Context(), db.GroupCreateParams{QueueID: q, Name: "meet", StartMode: "all", StartAt: &epoch}))
		meeting := async(func() error {
			return pgx.BeginFunc(w.ctx(), w.pool, func(tx pgx.Tx) error {
				q := db.New(tx)
				if _, err := q.PartitionLock(w.ctx(), db.PartitionLockParams{ID: p}); err != nil {
					return err
				}
				_, err := q.CursorCreate(w.ctx(), db.CursorCreateParams{GroupID: g.ID, PartitionID: p, StartAt: epoch})
				return err
			})
		})
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, meeting))
		if c := w.cursor(g.ID, p); !c.pending || c.committed != 0 {
			t.Errorf("cursor = %+v", c)
		}
	})
	w.noneStuck()
}

func TestRaceCreationAgainstFirstContact(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 6)
	group := func(ctx context.Context, q *db.Queries, queue int32, name string, lock bool) (int32, error) {
		if lock {
			if _, err := q.QueueLock(ctx, db.QueueLockParams{ID: queue}); err != nil {
				return 0, err
			}
		}
		g, err := q.GroupCreate(ctx, db.GroupCreateParams{QueueID: queue, Name: name, Registered: true, StartMode: "all", StartAt: &epoch})
		return g.ID, err
	}
	t.Run("without the queue's lock nobody makes the cursor", func(t *testing.T) {
		q := w.queue("naive", "")
		a := w.begin()
		p := creation(uuid.New(), q, "p", 1)
		made := must[[]db.CreatePartitionsRow](t)(a.CreatePartitions(t.Context(), p))
		check(t, a.CreateCursors(t.Context(), db.CreateCursorsParams{PublicIds: p.PublicIds}))
		g := must[int32](t)(group(t.Context(), w.Queries, q, "g", false))
		w.seed(g, 1000)
		a.commit()
		if _, ok := w.findCursor(g, made[0].ID); ok {
			t.Fatal("this race was expected to be lost")
		}
	})
	t.Run("creation first", func(t *testing.T) {
		q := w.queue("creation first", "")
		a := w.begin()
		p := creation(uuid.New(), q, "p", 1)
		made := must[[]db.CreatePartitionsRow](t)(a.CreatePartitions(t.Context(), p))
		var g int32
		registering := async(func() error {
			return pgx.BeginFunc(w.ctx(), w.pool, func(tx pgx.Tx) (err error) {
				g, err = group(w.ctx(), db.New(tx), q, "g", true)
				return err
			})
		})
		dbtest.WaitBlocked(t, w.pool, 1)
		check(t, a.CreateCursors(t.Context(), db.CreateCursorsParams{PublicIds: p.PublicIds}))
		a.commit()
		check(t, finish(t, registering))
		w.seed(g, 1000)
		if c := w.cursor(g, made[0].ID); !c.pending || c.committed != 0 {
			t.Errorf("cursor = %+v", c)
		}
	})
	t.Run("contact first", func(t *testing.T) {
		q := w.queue("contact first", "")
		a := w.begin()
		g := must[int32](t)(group(t.Context(), a.Queries, q, "g", true))
		p := creation(uuid.New(), q, "p", 1)
		var made []db.CreatePartitionsRow
		creating := async(func() error {
			var f db.Flush
			f.CreatePartitions(p, &made)
			f.CreateCursors(db.CreateCursorsParams{PublicIds: p.PublicIds})
			return f.Send(w.ctx(), w.pool)
		})
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, creating))
		if c := w.cursor(g, made[0].ID); !c.pending || c.committed != 0 {
			t.Errorf("cursor = %+v", c)
		}
		w.seed(g, 1000)
		equal(t, "cursors", one[int](w, "select count(*) from ferrymq.cursors where group_id = $1", g), 1)
	})
	t.Run("seeding passes by a partition that is not committed", func(t *testing.T) {
		q := w.queue("passes", "")
		a := w.begin()
		g := must[int32](t)(group(t.Context(), a.Queries, q, "g", true))
		p := creation(uuid.New(), q, "first", 1)
		b := w.begin()
		var made []db.CreatePartitionsRow
		creating := async(func() (err error) { made, err = b.CreatePartitions(w.ctx(), p); return err })
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, creating))
		second := w.partition(q, "second", 1)
		w.seed(g, 1000) // sees the second only, whose id is higher
		if second < made[0].ID {
			t.Fatalf("ids %d, %d", made[0].ID, second)
		}
		check(t, b.CreateCursors(t.Context(), db.CreateCursorsParams{PublicIds: p.PublicIds}))
		b.commit()
		equal(t, "cursors", one[int](w, "select count(*) from ferrymq.cursors where group_id = $1 and pending", g), 2)
	})
	t.Run("two create the same partition", func(t *testing.T) {
		q := w.queue("twice", "")
		w.group(q, "g")
		a, b := w.begin(), w.begin()
		must[[]db.CreatePartitionsRow](t)(a.CreatePartitions(t.Context(), creation(uuid.New(), q, "p", 1)))
		var made []db.CreatePartitionsRow
		p := creation(uuid.New(), q, "p", 1)
		creating := async(func() (err error) { made, err = b.CreatePartitions(w.ctx(), p); return err })
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, creating))
		equal(t, "made by the second", len(made), 0)
		check(t, b.CreateCursors(t.Context(), db.CreateCursorsParams{PublicIds: p.PublicIds}))
		b.commit()
		equal(t, "segments", one[int](w, "select count(*) from ferrymq.segments s join ferrymq.partitions p on p.id = s.partition_id where p.queue_id = $1", q), 1)
	})
	w.exec("delete from ferrymq.partitions where queue_id = (select id from ferrymq.queues where name = 'naive')")
	w.noneStuck()
}

func TestRaceOppositeOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 6)
	q := w.queue("q", "")
	g, other := w.group(q, "g"), w.group(q, "other")

	t.Run("settles that lock their partition themselves deadlock", func(t *testing.T) {
		p1, p2 := w.partition(q, "n1", 1), w.partition(q, "n2", 1)
		a, b := w.begin(), w.begin()
		must[[]db.AppendSegmentsRow](t)(a.AppendSegments(t.Context(), appends(push{p1, -1, []int{1}})))
		must[[]db.AppendSegmentsRow](t)(b.AppendSegments(t.Context(), appends(push{p2, -1, []int{1}})))
		first := async(func() error { _, err := a.PartitionLock(w.ctx(), db.PartitionLockParams{ID: p2}); return err })
		dbtest.WaitBlocked(t, w.pool, 1)
		_, err := b.PartitionLock(t.Context(), db.PartitionLockParams{ID: p1})
		other := finish(t, first)
		if !db.IsRetryable(err) && !db.IsRetryable(other) {
			t.Fatalf("a deadlock was expected: %v, %v", err, other)
		}
		_, _ = a.tx.Rollback(context.Background()), b.tx.Rollback(context.Background())
	})
	t.Run("mark, then settle, without LockCursors deadlock", func(t *testing.T) {
		p1, p2 := w.partition(q, "m1"), w.partition(q, "m2")
		a, b := w.begin(), w.begin()
		for s, p := range map[*session]int64{a: p1, b: p2} {
			must[[]db.AppendSegmentsRow](t)(s.AppendSegments(t.Context(), appends(push{p, -1, []int{1}})))
			check(t, s.MarkPending(t.Context(), db.MarkPendingParams{Pushed: []int64{p}}))
		}
		first := async(func() error {
			_, err := a.SettleCursors(w.ctx(), settles(settle{group: g, partition: p2, action: retry}))
			return err
		})
		dbtest.WaitBlocked(t, w.pool, 1)
		_, err := b.SettleCursors(t.Context(), settles(settle{group: g, partition: p1, action: retry}))
		other := finish(t, first)
		if !db.IsRetryable(err) && !db.IsRetryable(other) {
			t.Fatalf("a deadlock was expected: %v, %v", err, other)
		}
		_, _ = a.tx.Rollback(context.Background()), b.tx.Rollback(context.Background())
	})
	t.Run("mark, then settle, with LockCursors wait", func(t *testing.T) {
		p1, p2 := w.partition(q, "w1"), w.partition(q, "w2")
		x := flight{pushes: []push{{p1, -1, []int{1}}}, settles: []settle{{group: g, partition: p2, action: retry, moveTo: -1}}}
		y := flight{pushes: []push{{p2, -1, []int{1}}}, settles: []settle{{group: g, partition: p1, action: retry, moveTo: -1}}}
		a := w.begin()
		locks, cursors := x.locks()
		must[[]db.LockPartitionsRow](t)(a.LockPartitions(t.Context(), locks))
		must[[]db.AppendSegmentsRow](t)(a.AppendSegments(t.Context(), appends(x.pushes...)))
		check(t, a.LockCursors(t.Context(), cursors))
		second := w.send(&y)
		dbtest.WaitBlocked(t, w.pool, 1)
		check(t, a.MarkPending(t.Context(), db.MarkPendingParams{Pushed: cursors.Pushed}))
		must[[]db.SettleCursorsRow](t)(a.SettleCursors(t.Context(), settles(x.settles...)))
		a.commit()
		check(t, finish(t, second))
	})
	t.Run("flushes that push and drain crosswise", func(t *testing.T) {
		p1, p2 := w.partition(q, "1"), w.partition(q, "2")
		rounds := func(pushTo, drain int64, group int32) error {
			for range 150 {
				f := &flight{pushes: []push{{pushTo, -1, []int{1}}}, lists: []list{{group: group, hints: []int64{drain}, slots: []slot{{lease: uuid.New(), budget: 1000}}}}}
				if err := f.send(w.ctx(), w.pool); err != nil {
					return err
				}
				f.settles = nil
				for _, r := range f.claimed {
					if r.SlotNo >= 0 && len(f.settles) == 0 {
						f.settles = []settle{{group: group, partition: drain, lease: f.lists[0].slots[0].lease, expected: r.StartOffset, action: complete, moveTo: r.StartOffset + r.Take}}
					}
				}
				f.lists = nil
				if err := f.send(w.ctx(), w.pool); err != nil {
					return err
				}
			}
			return nil
		}
		one := async(func() error { return rounds(p1, p2, g) })
		two := async(func() error { return rounds(p2, p1, g) })
		three := async(func() error { return rounds(p1, p2, other) })
		check(t, finish(t, one))
		check(t, finish(t, two))
		check(t, finish(t, three))
	})
	w.noneStuck()
}

func TestRaceExtendAndRestoreAgainstSettle(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 6)
	q := w.queue("q", "")
	g := w.group(q, "g")
	extend := func(p int64, lease uuid.UUID) *flight {
		return &flight{extends: []db.ExtendLeasesParams{{Ns: []int32{0}, GroupIds: []int32{g}, PartitionIds: []int64{p}, LeaseIds: []uuid.UUID{lease}, Seconds: []int32{3000}}}}
	}
	t.Run("settle first", func(t *testing.T) {
		p, lease := w.leased(q, g, "a", 3)
		a := w.begin()
		a.fly(&flight{settles: []settle{{group: g, partition: p, lease: lease, action: retry}}})
		f := extend(p, lease)
		extending := w.send(f)
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, extending))
		equal(t, "extended", len(f.extended), 0)
		equal(t, "leased", w.cursor(g, p).leaseID != nil, false)
	})
	t.Run("extend first", func(t *testing.T) {
		p, lease := w.leased(q, g, "b", 3)
		a := w.begin()
		equal(t, "extended", len(a.fly(extend(p, lease)).extended), 1)
		f := &flight{settles: []settle{{group: g, partition: p, lease: lease, action: complete, moveTo: 3}}}
		settling := w.send(f)
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, settling))
		equal(t, "settled", len(f.settled), 0) // the cursor moved under it
		f = &flight{settles: []settle{{group: g, partition: p, lease: lease, action: complete, moveTo: 3, waits: true}}}
		a = w.begin()
		equal(t, "extended again", len(a.fly(extend(p, lease)).extended), 1)
		settling = w.send(f)
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, settling))
		equal(t, "settled by the one that waits", len(f.settled), 1)
		equal(t, "pending", w.cursor(g, p).pending, false)
	})
	t.Run("restore against the next claim", func(t *testing.T) {
		p := w.partition(q, "c", 3)
		w.claim(list{group: g, hints: []int64{p}, slots: []slot{{lease: uuid.New(), budget: 2, autoAck: true}}})
		lease := uuid.New()
		a := w.begin()
		must[[]db.ClaimPartitionsRow](t)(a.ClaimPartitions(t.Context(), claims(list{group: g, hints: []int64{p}, slots: []slot{{lease: lease, budget: 2}}})))
		restoring := w.send(&flight{restores: []db.RestoreCursorsParams{{GroupIds: []int32{g}, PartitionIds: []int64{p}, StartOffsets: []int64{0}, EndOffsets: []int64{2}, ClaimedAts: []time.Time{time.Now()}, Rests: []bool{false}}}})
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, restoring))
		if c := w.cursor(g, p); c.committed != 2 || c.leaseID == nil || *c.leaseID != lease {
			t.Errorf("cursor = %+v", c)
		}
	})
}

// remove is the job that takes a deleted queue away. It may fail because a creator was not done, and runs again then.
func (w *world) remove(queue int32) error {
	for {
		found := 0
		err := pgx.BeginFunc(w.ctx(), w.pool, func(tx pgx.Tx) error {
			q := db.New(tx)
			ids, err := q.QueueRemoveLock(w.ctx(), db.QueueRemoveLockParams{QueueID: queue, Max: 2})
			if found = len(ids); err != nil || found == 0 {
				return err
			}
			if err := q.QueueRemoveCursors(w.ctx(), db.QueueRemoveCursorsParams{QueueID: queue, Ids: ids}); err != nil {
				return err
			}
			if n, err := q.QueueRemoveSegments(w.ctx(), db.QueueRemoveSegmentsParams{Ids: ids, Max: 2}); err != nil || n == 2 {
				return err
			}
			return q.QueueRemovePartitions(w.ctx(), db.QueueRemovePartitionsParams{Ids: ids})
		})
		if err != nil {
			return err
		}
		if found == 0 {
			break
		}
	}
	if _, err := w.QueueRemoveDeadLetters(w.ctx(), db.QueueRemoveDeadLettersParams{QueueID: queue, Max: 100}); err != nil {
		return err
	}
	return pgx.BeginFunc(w.ctx(), w.pool, func(tx pgx.Tx) error {
		q := db.New(tx)
		if err := q.QueueRemoveGroups(w.ctx(), db.QueueRemoveGroupsParams{QueueID: queue}); err != nil {
			return err
		}
		return q.QueueRemove(w.ctx(), db.QueueRemoveParams{QueueID: queue})
	})
}

func (w *world) deleteQueue(queue int32) error {
	return pgx.BeginFunc(w.ctx(), w.pool, func(tx pgx.Tx) error {
		q := db.New(tx)
		if _, err := q.QueueLock(w.ctx(), db.QueueLockParams{ID: queue}); err != nil {
			return err
		}
		_, err := q.QueueDelete(w.ctx(), db.QueueDeleteParams{ID: queue})
		return err
	})
}

func TestRaceDeleteQueue(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 6)
	gone := func(t *testing.T, queue int32) {
		t.Helper()
		for _, what := range []string{"select count(*) from ferrymq.queues where id = $1", "select count(*) from ferrymq.partitions where queue_id = $1", "select count(*) from ferrymq.groups where queue_id = $1"} {
			equal(t, what, one[int](w, what, queue), 0)
		}
		for _, table := range []string{"cursors", "segments"} {
			equal(t, "orphans in "+table, one[int](w, "select count(*) from ferrymq."+table+" x where not exists (select from ferrymq.partitions p where p.id = x.partition_id)"), 0)
		}
	}
	t.Run("against a push", func(t *testing.T) {
		q := w.queue("a", "")
		w.group(q, "g")
		p, idle := w.partition(q, "p", 1), w.partition(q, "idle", 1, 1, 1)
		a := w.begin()
		a.fly(&flight{pushes: []push{{p, -1, []int{1}}}})
		check(t, w.deleteQueue(q))
		removing := async(func() error { return w.remove(q) })
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, removing))
		f := w.fly(&flight{pushes: []push{{p, -1, []int{1}}, {idle, -1, []int{1}}}})
		equal(t, "locked", len(f.locked), 0)
		equal(t, "appended", len(f.appended), 0)
		gone(t, q)
	})
	t.Run("a push after the delete stores nothing", func(t *testing.T) {
		q := w.queue("b", "")
		p := w.partition(q, "p", 1)
		a := w.begin()
		must[[]int64](t)(a.QueueRemoveLock(t.Context(), db.QueueRemoveLockParams{QueueID: q, Max: 10}))
		check(t, w.deleteQueue(q))
		f := &flight{pushes: []push{{p, -1, []int{1}}}}
		pushing := w.send(f)
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, pushing))
		equal(t, "locked", len(f.locked), 1)
		equal(t, "appended", len(f.appended), 0)
		equal(t, "tail", one[int64](w, "select next_offset from ferrymq.partitions where id = $1", p), 1)
		check(t, w.remove(q))
		gone(t, q)
	})
	t.Run("creation first", func(t *testing.T) {
		q := w.queue("c", "")
		w.group(q, "g")
		a := w.begin()
		p := creation(uuid.New(), q, "p", 1)
		must[[]db.CreatePartitionsRow](t)(a.CreatePartitions(t.Context(), p))
		deleting := async(func() error { return w.deleteQueue(q) })
		dbtest.WaitBlocked(t, w.pool, 1)
		check(t, a.CreateCursors(t.Context(), db.CreateCursorsParams{PublicIds: p.PublicIds}))
		a.commit()
		check(t, finish(t, deleting))
		check(t, w.remove(q))
		gone(t, q)
	})
	t.Run("delete first, and the job is quicker than the creator", func(t *testing.T) {
		q := w.queue("d", "")
		w.group(q, "g")
		a, b := w.begin(), w.begin()
		must[int32](t)(a.QueueLock(t.Context(), db.QueueLockParams{ID: q}))
		must[int64](t)(a.QueueDelete(t.Context(), db.QueueDeleteParams{ID: q}))
		p := creation(uuid.New(), q, "p", 1)
		creating := async(func() error { _, err := b.CreatePartitions(w.ctx(), p); return err })
		dbtest.WaitBlocked(t, w.pool, 1)
		a.commit()
		check(t, finish(t, creating))
		removing := async(func() error { return w.remove(q) }) // its last step waits for the creator
		dbtest.WaitBlocked(t, w.pool, 1)
		check(t, b.CreateCursors(t.Context(), db.CreateCursorsParams{PublicIds: p.PublicIds}))
		b.commit()
		if err := finish(t, removing); db.Code(err) != "23503" {
			t.Errorf("the first run ended with %v", err)
		}
		check(t, w.remove(q))
		gone(t, q)
	})
}

// TestLockOrder: whatever the order of the arguments, locks are taken in the order of the product. What comes after a row that is held stays free.
func TestLockOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 4)
	q := w.queue("q", "")
	g1, g2 := w.group(q, "1"), w.group(q, "2")
	p1, p2 := w.partition(q, "1"), w.partition(q, "2")
	type lock struct {
		name, held, after string
		run               func() error
	}
	cursors := func(p db.LockCursorsParams) func() error {
		return func() error { return w.LockCursors(w.ctx(), p) }
	}
	asked := db.LockCursorsParams{Pushed: []int64{}, GroupIds: []int32{g2, g2, g1, g1}, PartitionIds: []int64{p2, p1, p2, p1}, LeaseIds: make([]uuid.UUID, 4)}
	pushed := db.LockCursorsParams{Pushed: []int64{p2, p1}, GroupIds: []int32{}, PartitionIds: []int64{}, LeaseIds: []uuid.UUID{}}
	mixed := db.LockCursorsParams{Pushed: []int64{p2}, GroupIds: []int32{g2, g1}, PartitionIds: []int64{p1, p1}, LeaseIds: make([]uuid.UUID, 2)}
	first := fmt.Sprintf("from ferrymq.cursors where group_id = %d and partition_id = %d", g1, p1)
	others := fmt.Sprintf("from ferrymq.cursors where (group_id, partition_id) <> (%d, %d)", g1, p1)
	for _, l := range []lock{
		{"partitions", fmt.Sprint("from ferrymq.partitions where id = ", p1), fmt.Sprint("from ferrymq.partitions where id = ", p2), func() error {
			_, err := w.LockPartitions(w.ctx(), db.LockPartitionsParams{Ids: []int64{p2, p1}, Reaches: []int64{everything, everything}})
			return err
		}},
		{"cursors to settle", first, others, cursors(asked)},
		{"cursors to mark", first, others, cursors(pushed)},
		{"both", first, others, cursors(mixed)},
	} {
		t.Run(l.name, func(t *testing.T) {
			a, b := w.begin(), w.begin()
			_, err := a.tx.Exec(t.Context(), "select "+l.held+" for update")
			check(t, err)
			waiting := async(l.run)
			dbtest.WaitBlocked(t, w.pool, 1)
			var all, free int
			check(t, b.tx.QueryRow(t.Context(), "select count(*) "+l.after).Scan(&all))
			check(t, b.tx.QueryRow(t.Context(), "select count(*) from (select "+l.after+" for update skip locked) x").Scan(&free))
			equal(t, "rows that are free", free, all)
			check(t, b.tx.Rollback(t.Context()))
			a.commit()
			check(t, finish(t, waiting))
		})
	}
}
