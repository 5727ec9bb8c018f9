package db_test

import (
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/db"
)

// BenchmarkFlush is the time of one flush per kind of statement, without what makes it durable: what a flush costs however little it
// carries (0), and what each operation adds. The database is as tests have it, so it says nothing about the disk.
func BenchmarkFlush(b *testing.B) {
	const many = 256
	w := newWorld(b, 2)
	q := w.queue("q", "")
	g := w.group(q, "g")
	var ids []int64
	for i := range many {
		ids = append(ids, w.partition(q, fmt.Sprint(i), 1_000_000_000))
	}
	w.exec("vacuum analyze")
	conn := must[*pgxpool.Conn](b)(w.pool.Acquire(w.ctx()))
	defer conn.Release()
	settings := db.FlushSettingsParams{StatementTimeoutMs: "30000", LockTimeoutMs: "500"}
	send := func(b *testing.B, fill func(f *db.Flush)) {
		var f db.Flush
		f.FlushSettings(settings, nil)
		if fill != nil {
			fill(&f)
		}
		check(b, f.Send(w.ctx(), conn))
	}
	b.Run("nothing", func(b *testing.B) {
		for b.Loop() {
			send(b, nil)
		}
	})
	at := make(map[int64]int64)
	next := 0
	turn := func(n int) []int64 {
		if next+n > many {
			next = 0
		}
		next += n
		return ids[next-n : next]
	}
	for _, n := range []int{0, 1, 8, 32} {
		var leases []slot
		var taken []int64
		quick := false
		claim := func(f *db.Flush) (rows func() int) {
			taken, leases = turn(n), slots(n, 1, 1)
			if quick {
				var claimed []db.ClaimHintedRow
				f.ClaimHinted(hinted(list{group: g, hints: taken, slots: leases, noFrames: true}), &claimed)
				return func() int { return len(claimed) }
			}
			var claimed []db.ClaimPartitionsRow
			f.ClaimPartitions(claims(list{group: g, hints: taken, slots: leases, noFrames: true}), &claimed)
			return func() int { return len(claimed) - 1 }
		}
		settle := func(f *db.Flush) (rows func() int) {
			var done []settle
			lock := db.LockCursorsParams{Pushed: []int64{}, GroupIds: []int32{}, PartitionIds: []int64{}, LeaseIds: []uuid.UUID{}}
			for i, p := range taken {
				done = append(done, settle{group: g, partition: p, lease: leases[i].lease, action: complete, expected: at[p], moveTo: at[p] + 1})
				at[p]++
				lock.GroupIds, lock.PartitionIds, lock.LeaseIds = append(lock.GroupIds, g), append(lock.PartitionIds, p), append(lock.LeaseIds, leases[i].lease)
			}
			p := settles(done...)
			if quick {
				var moved []db.CompleteCursorsRow
				f.CompleteCursors(completes(p), &moved)
				return func() int { return len(moved) }
			}
			var moved []db.SettleCursorsRow
			f.LockCursors(lock)
			f.SettleCursors(p, &moved)
			return func() int { return len(moved) }
		}
		run := func(b *testing.B, what func(*db.Flush) func() int) {
			var rows func() int
			send(b, func(f *db.Flush) { rows = what(f) })
			equal(b, "rows", rows(), n)
		}
		for _, name := range []string{"", "quick "} {
			b.Run(fmt.Sprintf("%sclaim/%d", name, n), func(b *testing.B) {
				for quick = name != ""; b.Loop(); {
					run(b, claim)
					b.StopTimer()
					run(b, settle)
					b.StartTimer()
				}
			})
			b.Run(fmt.Sprintf("%ssettle/%d", name, n), func(b *testing.B) {
				for quick = name != ""; b.Loop(); {
					b.StopTimer()
					run(b, claim)
					b.StartTimer()
					run(b, settle)
				}
			})
		}
		if n == 0 {
			continue
		}
		b.Run(fmt.Sprintf("push/%d", n), func(b *testing.B) {
			for b.Loop() {
				var pushes []push
				to := turn(n)
				for _, p := range to {
					pushes = append(pushes, push{p, -1, []int{1}})
				}
				var stored []db.AppendSegmentsRow
				send(b, func(f *db.Flush) {
					f.AppendSegments(appends(pushes...), &stored)
					f.LockCursors(db.LockCursorsParams{Pushed: to, GroupIds: []int32{}, PartitionIds: []int64{}, LeaseIds: []uuid.UUID{}})
					f.MarkPending(db.MarkPendingParams{Pushed: to})
				})
				equal(b, "rows", len(stored), n)
			}
		})
	}
}
