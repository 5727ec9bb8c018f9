package dedup

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/FastFilter/xorfilter"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// key returns the 16 bytes of id n; their halves are as random as xxh3's.
func key(n uint64) []byte {
	r := rand.NewPCG(n, 7)
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, r.Uint64()), r.Uint64())
}

func keysOf(from uint64, n int) []byte {
	var b []byte
	for i := range n {
		b = append(b, key(from+uint64(i))...)
	}
	return b
}

// fill extends a partition by segments of 1,000 ids, numbered like offsets.
func fill(t testing.TB, c *Cache, partition int64, from, to int, step time.Duration, window time.Duration) {
	t.Helper()
	for ; from < to; from += 1000 {
		at := epoch.Add(time.Duration(from) * step)
		n := min(1000, to-from)
		if !c.Extend(partition, int64(from), at, at.Add(-window), keysOf(uint64(from), n), n) {
			t.Fatalf("Extend at %d refused", from)
		}
	}
}

// contains reports whether one of the hits of key index covers the offset.
func contains(hits []Hit, index int, offset int64) bool {
	for _, h := range hits {
		if h.Index == index && h.From <= offset && offset < h.To {
			return true
		}
	}
	return false
}

// TestModel compares with a plain list of everything stored, under budgets from
// nothing to plenty: what is stored inside the window is always among the hits
// unless the partition is not ok, and hits that lead nowhere are rare.
func TestModel(t *testing.T) {
	type stored struct {
		id  uint64
		off int64
		at  time.Time
	}
	for _, budget := range []int64{0, 2_000, 20_000, 100_000, 400_000, 1 << 30} {
		t.Run(fmt.Sprint(budget), func(t *testing.T) {
			r := rand.New(rand.NewPCG(uint64(budget), 1))
			c := New(budget)
			const partitions = 12
			steps := 3000
			if testing.Short() {
				steps = 1000
			}
			var (
				all    [partitions][]stored
				index  [partitions]map[uint64][]stored
				tails  [partitions]int64
				now    = epoch
				window = time.Hour
				nextID uint64
				oks    int
				misses int
				wrong  int
			)
			store := func(p int64, s ...stored) {
				all[p] = append(all[p], s...)
				if len(all[p]) > 20_000 { // retention
					all[p] = all[p][10_000:]
					clear(index[p])
					c.Forget(p)
					s = all[p]
				}
				for _, s := range s {
					index[p][s.id] = append(index[p][s.id], s)
				}
			}
			for p := range index {
				index[p] = map[uint64][]stored{}
			}
			for step := range steps {
				now = now.Add(time.Duration(r.IntN(int(10 * time.Second))))
				if step%1000 == 700 { // configure: longer, shorter
					window = time.Duration(10+r.IntN(120)) * time.Minute
				}
				p := int64(min(r.IntN(partitions), r.IntN(partitions)))
				since := now.Add(-window)
				if r.IntN(200) == 0 {
					c.Forget(p)
				}
				if r.IntN(50) == 0 && tails[p] > 0 { // another broker wrote
					store(p, stored{nextID, tails[p], now})
					nextID++
					tails[p]++
				}
				// Look up old ids, recent ids and new ones.
				var ids []uint64
				for range r.IntN(100) {
					switch n := len(all[p]); {
					case n > 0 && r.IntN(3) == 0:
						ids = append(ids, all[p][r.IntN(n)].id)
					case n > 0 && r.IntN(3) == 0:
						ids = append(ids, all[p][n-1-r.IntN(min(n, 50))].id)
					default:
						ids = append(ids, 1<<60+r.Uint64N(1<<40))
					}
				}
				where := index[p]
				var keys []byte
				for _, id := range ids {
					keys = append(keys, key(id)...)
				}
				sentinel := Hit{-1, 1, 2}
				hits, tail, ok := c.Look(p, since, keys, []Hit{sentinel})
				if hits[0] != sentinel || !ok && len(hits) != 1 {
					t.Fatal("dst was not kept")
				}
				if tail > tails[p] {
					t.Fatalf("tail %d, want at most %d", tail, tails[p])
				}
				if ok {
					oks++
					for i, id := range ids {
						for _, s := range where[id] {
							if !s.at.Before(since) && s.off < tail && !contains(hits, i, s.off) {
								t.Fatalf("step %d: id %d at %d is not among the hits", step, id, s.off)
							}
						}
					}
					for _, h := range hits[1:] {
						if h.From < 0 || h.To <= h.From || h.To > tail {
							t.Fatalf("hit %v outside [0, %d)", h, tail)
						}
						if len(where[ids[h.Index]]) == 0 {
							wrong++
						}
					}
					misses += len(ids)
				}
				if !ok || tail != tails[p] { // read it again, as the broker does
					from := tail
					if !ok {
						if from = tails[p]; len(all[p]) > 0 {
							from = all[p][0].off
						}
						for _, s := range all[p] {
							if s.at.Before(since) {
								from = s.off + 1
							}
						}
						c.Load(p, from, since)
					}
					unread := all[p]
					for len(unread) > 0 && unread[0].off < from {
						unread = unread[1:]
					}
					for len(unread) > 0 { // segments of one created_at
						n, keys := 0, []byte(nil)
						for n < len(unread) && unread[n].at.Equal(unread[0].at) {
							keys = append(keys, key(unread[n].id)...)
							n++
						}
						c.Extend(p, unread[0].off, unread[0].at, since, keys, n)
						unread = unread[n:]
					}
					if r.IntN(20) != 0 && len(all[p]) > 0 {
						continue
					}
				}
				n := 1 + r.IntN(100)
				if r.IntN(20) == 0 {
					n = 1000
				}
				var seg []byte
				var ids2 []stored
				for i := range n {
					id := nextID
					nextID++
					if r.IntN(100) == 0 && len(all[p]) > 0 { // the same id again
						id = all[p][len(all[p])-1].id
					}
					seg = append(seg, key(id)...)
					ids2 = append(ids2, stored{id, tails[p] + int64(i), now})
				}
				c.Extend(p, tails[p], now, since, seg, n)
				store(p, ids2...)
				tails[p] += int64(n)
				if used := c.Stats().Bytes; used > budget {
					t.Fatalf("%d bytes used", used)
				}
			}
			t.Logf("ok %d of %d, %d looks, %d false hits, %+v", oks, steps, misses, wrong, c.Stats())
			if wrong > 5+misses/2000 {
				t.Errorf("%d false hits in %d looks", wrong, misses)
			}
			if budget > 1<<20 && oks < steps*4/5 {
				t.Errorf("only %d looks answered with memory to spare", oks)
			}
			for p := range int64(partitions) {
				c.Forget(p)
			}
			checkEmpty(t, c)
		})
	}
}

// checkEmpty fails if anything is still on the books.
func checkEmpty(t *testing.T, c *Cache) {
	t.Helper()
	s := c.Stats()
	if s.Bytes != 0 || s.Partitions != 0 || s.Exact != 0 || s.Filters != 0 || c.queued.Load() != 0 {
		t.Errorf("left over: %+v, %d queued", s, c.queued.Load())
	}
	for i := range c.shards {
		if s := &c.shards[i]; s.oldest != nil || s.newest != nil || len(s.ring) != 0 || len(s.parts) != 0 {
			t.Errorf("shard %d is not empty", i)
		}
	}
}

func TestGapForgets(t *testing.T) {
	c := New(1 << 20)
	if _, ok := c.Tail(1, epoch); ok {
		t.Error("an unknown partition is ok")
	}
	if c.Extend(1, 0, epoch, epoch, nil, 1) {
		t.Error("an unknown partition was extended")
	}
	for _, bad := range []struct {
		name  string
		base  int64
		keys  []byte
		count int
	}{{"gap", 11, keysOf(11, 1), 1}, {"overlap", 9, keysOf(9, 1), 1}, {"short keys", 10, keysOf(10, 1), 2}, {"negative", 10, nil, -1}} {
		c.Load(1, 0, time.Time{})
		if !c.Extend(1, 0, epoch, time.Time{}, nil, 5) || !c.Extend(1, 5, epoch, time.Time{}, keysOf(5, 5), 5) || !c.Extend(1, 10, epoch, time.Time{}, nil, 0) {
			t.Fatal("Extend at the tail refused")
		}
		if tail, ok := c.Tail(1, time.Time{}); tail != 10 || !ok {
			t.Fatalf("tail %d, %t", tail, ok)
		}
		if c.Extend(1, bad.base, epoch, time.Time{}, bad.keys, bad.count) {
			t.Errorf("%s: accepted", bad.name)
		}
		if _, ok := c.Tail(1, epoch); ok {
			t.Errorf("%s: still ok", bad.name)
		}
	}
	checkEmpty(t, c)
}

// TestKnows: what was read by one and written by another need not be told twice, and is not mistaken for another segment at its place.
func TestKnows(t *testing.T) {
	c := New(1 << 30)
	if c.Knows(1, 0, nil, 0) {
		t.Error("an unknown partition is known")
	}
	c.Load(1, 0, time.Time{})
	const per, all = 1000, 40 // enough to seal blocks and give them filters
	for i := range all {
		if !c.Extend(1, int64(i*per), epoch, time.Time{}, keysOf(uint64(i*per), per), per) {
			t.Fatal("Extend at the tail refused")
		}
	}
	c.Extend(1, all*per, epoch, time.Time{}, nil, 5)
	for i := range all {
		if !c.Knows(1, int64(i*per), keysOf(uint64(i*per), per), per) {
			t.Fatalf("segment %d is not known", i)
		}
	}
	if !c.Knows(1, all*per, nil, 5) || !c.Knows(1, all*per+5, nil, 0) {
		t.Error("a segment without keys at the tail is not known")
	}
	for _, other := range []struct {
		base  int64
		keys  []byte
		count int
	}{{all*per + 3, nil, 3}, {per, keysOf(77_000_000, per), per}, {per + 1, keysOf(per, per), per}, {all * per, keysOf(all*per, 5), 5}} {
		if c.Knows(1, other.base, other.keys, other.count) {
			t.Errorf("%d messages at %d are known", other.count, other.base)
		}
	}
	if tail, ok := c.Tail(1, time.Time{}); tail != all*per+5 || !ok {
		t.Errorf("tail %d, %t", tail, ok)
	}
}

func TestWindow(t *testing.T) {
	c := New(1 << 30)
	c.Load(1, 0, epoch)
	if _, ok := c.Tail(1, epoch.Add(-time.Microsecond)); ok {
		t.Error("ok for a window that begins before the memory")
	}
	const hour = 3_600_000 // one id per millisecond
	fill(t, c, 1, 0, 2*hour, time.Millisecond, time.Hour)
	begin := epoch.Add(time.Hour)
	if _, ok := c.Tail(1, begin); !ok {
		t.Error("not ok for the window")
	}
	if _, ok := c.Tail(1, epoch); ok {
		t.Error("ok for an enlarged window although blocks were dropped")
	}
	s := c.Stats()
	if perKey := float64(s.Bytes) / hour; perKey > 19.5 {
		t.Errorf("%.1f bytes per key of the window", perKey)
	}
	// The window's first id is inside, and ids long outside do not hit.
	hits, _, _ := c.Look(1, begin, append(key(hour), key(1)...), nil)
	if !contains(hits, 0, hour) || len(hits) != 1 {
		t.Errorf("hits %v", hits)
	}
	for id := hour; id < 2*hour; id += 4999 {
		if hits, _, _ = c.Look(1, begin, key(uint64(id)), hits[:0]); len(hits) != 1 || hits[0] != (Hit{0, int64(id), int64(id) + 1}) {
			t.Fatalf("id %d: hits %v", id, hits)
		}
	}
	// A shrunk window passes over blocks.
	hits, _, _ = c.Look(1, begin.Add(30*time.Minute), key(hour), nil)
	if len(hits) != 0 {
		t.Errorf("hits %v in a shrunk window", hits)
	}
	// The open block expires too, and is then missing from a larger window.
	c.Load(3, 0, time.Time{})
	c.Extend(3, 0, epoch, epoch.Add(-time.Hour), key(0), 1)
	c.Extend(3, 1, begin, epoch.Add(time.Second), key(1), 1)
	if _, ok := c.Tail(3, epoch); ok {
		t.Error("ok although the open block was dropped")
	}
	c.Forget(3)
	// A trickle does not pile up: one id a minute for a day.
	c.Load(2, 0, time.Time{})
	for i := range 1440 {
		at := epoch.Add(time.Duration(i) * time.Minute)
		c.Extend(2, int64(i), at, at.Add(-time.Hour), key(uint64(i)), 1)
	}
	if added := c.Stats().Bytes - s.Bytes; added > 3000 {
		t.Errorf("a window of 60 ids takes %d bytes", added)
	}
}

// TestSameKey stores one id over and over: look-up and insert stay quick, and
// every place is covered.
func TestSameKey(t *testing.T) {
	c := New(1 << 30)
	c.Load(1, 0, time.Time{})
	seg := make([]byte, 0, 1000*keySize)
	for range 1000 {
		seg = append(seg, key(1)...)
	}
	for i := range 100 {
		c.Extend(1, int64(i*1000), epoch, time.Time{}, seg, 1000)
	}
	hits, _, _ := c.Look(1, time.Time{}, key(1), nil)
	for off := range int64(100_000) {
		if !contains(hits, 0, off) {
			t.Fatalf("offset %d is in none of %v", off, hits)
		}
	}
	if hits[0] != (Hit{0, 99_999, 100_000}) || len(hits) != 2 {
		t.Errorf("hits %v", hits)
	}
}

// TestMillionPartitions measures what the heap pays for small partitions.
func TestMillionPartitions(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a second")
	}
	for _, ids := range []int{1, 10} {
		c := New(1 << 40)
		before := heap()
		n := 1_000_000 / ids
		for p := range int64(n) {
			c.Load(p, 0, time.Time{})
			c.Extend(p, 0, epoch, time.Time{}, keysOf(uint64(p)<<8, ids), ids)
		}
		paid, s := float64(heap()-before)/float64(n), c.Stats()
		booked := float64(s.Bytes) / float64(n)
		t.Logf("%d partitions with %d ids: %.0f bytes each, %.0f accounted", n, ids, paid, booked)
		if ids == 1 && paid > 160 {
			t.Errorf("%.0f bytes", paid)
		}
		if paid > booked*1.1 {
			t.Errorf("%.0f bytes paid, %.0f accounted", paid, booked)
		}
	}
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestBudget fills a small budget with partitions of all sizes and compares
// with what the heap really pays.
func TestBudget(t *testing.T) {
	const budget = 16 << 20
	before := heap()
	c := New(budget)
	r := rand.New(rand.NewPCG(1, 1))
	tails := map[int64]int{}
	for range 30_000 {
		p := r.Int64N(1 + r.Int64N(20_000))
		if _, ok := c.Tail(p, time.Time{}); !ok {
			c.Load(p, 0, time.Time{})
			tails[p] = 0
		}
		n := 1 + r.IntN(1+r.IntN(1000))
		if c.Extend(p, int64(tails[p]), epoch, time.Time{}, keysOf(r.Uint64(), n), n) {
			tails[p] += n
		}
		if used := c.Stats().Bytes; used > budget {
			t.Fatalf("%d bytes", used)
		}
	}
	s, paid := c.Stats(), heap()-before
	t.Logf("%d bytes on the heap, %+v", paid, s)
	if paid > budget*11/10 {
		t.Errorf("%d bytes on the heap", paid)
	}
	if s.Converted == 0 || s.Forgotten == 0 {
		t.Error("no pressure")
	}
	runtime.KeepAlive(tails)
	runtime.KeepAlive(c)
}

// TestLargePartition holds 5,000,000 ids of one partition in filters.
func TestLargePartition(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	const budget, ids = 16 << 20, 5_000_000
	c := New(budget)
	c.Load(1, 0, time.Time{})
	start := time.Now()
	fill(t, c, 1, 0, ids, time.Microsecond, time.Hour)
	filled, s := time.Since(start), c.Stats()
	r := rand.New(rand.NewPCG(1, 1))
	var hits []Hit
	for range 20 {
		id := r.IntN(ids)
		hits, _, _ = c.Look(1, time.Time{}, key(uint64(id)), hits[:0])
		if !contains(hits, 0, int64(id)) {
			t.Fatalf("id %d is missing", id)
		}
	}
	const looks = 50_000
	absent := keysOf(1<<40, looks)
	start = time.Now()
	hits, _, _ = c.Look(1, time.Time{}, absent, hits[:0])
	each := time.Since(start) / looks
	t.Logf("%v to fill, %.2f bytes a key, a miss takes %v, %d false positives in %d looks, %+v",
		filled, float64(s.Bytes)/ids, each, len(hits), looks, s)
	if s.Forgotten != 0 || s.Bytes > budget {
		t.Errorf("%+v", s)
	}
	if rate := float64(len(hits)) / looks; rate > 2*float64(s.Filters)/65536 {
		t.Errorf("%.4f false positives per look with %d filters", rate, s.Filters)
	}
}

// TestFewBlocks: a look asks every block, so a partition with very many keys has larger ones, and misses none of them.
func TestFewBlocks(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	const budget, ids = 64 << 20, 8_000_000
	c := New(budget)
	c.Load(1, 0, time.Time{})
	fill(t, c, 1, 0, ids, time.Microsecond, time.Hour)
	s := c.Stats()
	if blocks := s.Exact + s.Filters; s.Forgotten != 0 || s.Bytes > budget || blocks > 4*blockAim {
		t.Errorf("%d blocks, %+v", blocks, s)
	}
	r := rand.New(rand.NewPCG(2, 2))
	var hits []Hit
	for range 1000 {
		id := r.IntN(ids)
		if hits, _, _ = c.Look(1, time.Time{}, key(uint64(id)), hits[:0]); !contains(hits, 0, int64(id)) {
			t.Fatalf("id %d is missing", id)
		}
	}
}

// TestConcurrent has writers with their own partitions and readers of all of
// them under a budget that makes them evict each other; run it with -race.
func TestConcurrent(t *testing.T) {
	t.Run("many small", func(t *testing.T) { concurrent(t, 1<<20, 16) })
	t.Run("few large", func(t *testing.T) { concurrent(t, 2<<20, 1) })
}

func concurrent(t *testing.T, budget, each int64) {
	c := New(budget)
	var wg sync.WaitGroup
	for w := range int64(4) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 2))
			tails := make([]int64, each)
			for range 500 {
				i := r.Int64N(each)
				p := i*4 + w
				tail, ok := c.Tail(p, time.Time{})
				if !ok {
					c.Load(p, 0, time.Time{})
					tails[i] = 0
				} else if tail != tails[i] {
					t.Errorf("partition %d: tail %d, want %d", p, tail, tails[i])
				}
				n := int64(r.IntN(500))
				if c.Extend(p, tails[i], epoch, time.Time{}, keysOf(uint64(p<<32+tails[i]), int(n)), int(n)) {
					tails[i] += n
				}
				other := r.Int64N(4 * each)
				if hits, tail, ok := c.Look(other, time.Time{}, keysOf(uint64(other<<32), 100), nil); ok {
					for off := range min(tail, 100) {
						if !contains(hits, int(off), off) {
							t.Errorf("partition %d: offset %d is missing", other, off)
						}
					}
				}
				if r.IntN(300) == 0 {
					c.Forget(p)
				}
			}
		})
	}
	wg.Wait()
	c.makeRoom()
	if s := c.Stats(); s.Bytes > budget || s.Converted == 0 || each > 1 && s.Forgotten == 0 {
		t.Errorf("%+v", s)
	}
	for p := range 4 * each {
		c.Forget(p)
	}
	checkEmpty(t, c)
}

// bloom is what the package does not use, to compare with.
type bloom struct {
	words []uint64
	k     int
}

func newBloom(fps []uint64, bitsPerKey float64, k int) *bloom {
	f := &bloom{make([]uint64, int(float64(len(fps))*bitsPerKey)/64), k}
	for _, fp := range fps {
		f.add(fp)
	}
	return f
}

// place is where the i-th bit of fp lies (double hashing).
func (f *bloom) place(fp uint64, i int) (word, bit uint64) {
	step := bits.RotateLeft64(fp, 32)*0x9e3779b97f4a7c15 | 1
	hi, lo := bits.Mul64(fp+uint64(i)*step, uint64(len(f.words)))
	return hi, 1 << (lo >> 58)
}

func (f *bloom) add(fp uint64) {
	for i := range f.k {
		w, b := f.place(fp, i)
		f.words[w] |= b
	}
}

func (f *bloom) Contains(fp uint64) bool {
	for i := range f.k {
		if w, b := f.place(fp, i); f.words[w]&b == 0 {
			return false
		}
	}
	return true
}

// TestFilterChoice gives the figures of the package comment; -v shows them.
func TestFilterChoice(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	const blocks, looks = 60, 200_000
	type filter interface{ Contains(uint64) bool }
	r := rand.New(rand.NewPCG(1, 1))
	for _, kind := range []struct {
		name string
		make func([]uint64) (filter, int)
	}{
		{"Bloom 12", func(fps []uint64) (filter, int) { f := newBloom(fps, 12, 8); return f, len(f.words) * 64 }},
		{"Bloom 20", func(fps []uint64) (filter, int) { f := newBloom(fps, 20, 14); return f, len(f.words) * 64 }},
		{"fuse 8", func(fps []uint64) (filter, int) {
			f, _ := xorfilter.NewBinaryFuse[uint8](fps)
			return f, len(f.Fingerprints) * 8
		}},
		{"fuse 16", func(fps []uint64) (filter, int) {
			f, _ := xorfilter.NewBinaryFuse[uint16](fps)
			return f, len(f.Fingerprints) * 16
		}},
	} {
		var all []filter
		size, start := 0, time.Now()
		for range blocks {
			fps := make([]uint64, blockMax)
			for i := range fps {
				fps[i] = r.Uint64()
			}
			f, n := kind.make(fps)
			all, size = append(all, f), size+n
		}
		built := time.Since(start) / blocks
		found := 0
		start = time.Now()
		for range looks {
			fp := r.Uint64()
			for _, f := range all {
				if f.Contains(fp) {
					found++
				}
			}
		}
		t.Logf("%-8s %5.1f bits a key, %8.5f %% false positives, %7.2f reads per 1,000 looks, %v a look, %v to build one",
			kind.name, float64(size)/blocks/blockMax, 100*float64(found)/looks/blocks,
			1000*float64(found)/looks, time.Since(start)/looks, built)
		if kind.name == "fuse 16" && found > 2*blocks*looks/65536 {
			t.Errorf("%d false positives", found)
		}
	}
}

func BenchmarkLookMiss(b *testing.B) {
	for _, kind := range []string{"exact", "filter"} {
		for _, blocks := range []int{1, 10, 60} {
			c := New(1 << 30)
			c.Load(1, 0, time.Time{})
			fill(b, c, 1, 0, blocks*blockMax, time.Microsecond, time.Hour)
			if kind == "filter" {
				c.budget = c.Stats().Bytes / 5
				c.makeRoom()
			}
			keys := keysOf(1<<40, 1<<14)
			for _, n := range []int{1, 100} {
				b.Run(fmt.Sprintf("%s/blocks=%d/keys=%d", kind, blocks, n), func(b *testing.B) {
					b.ReportAllocs()
					var hits []Hit
					i := 0
					for b.Loop() {
						at := i % (1<<14 - n)
						hits, _, _ = c.Look(1, time.Time{}, keys[at*keySize:(at+n)*keySize], hits[:0])
						i += n
					}
					b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(i), "ns/key")
				})
			}
		}
	}
}

func BenchmarkExtend(b *testing.B) {
	for _, kind := range []struct {
		name   string
		budget int64
	}{{"exact", 1 << 30}, {"filter", 8 << 20}} {
		for _, n := range []int{1, 100, 1000} {
			b.Run(fmt.Sprintf("%s/keys=%d", kind.name, n), func(b *testing.B) {
				b.ReportAllocs()
				c := New(kind.budget)
				c.Load(1, 0, time.Time{})
				r := rand.NewPCG(1, 1)
				seg, tail := make([]byte, n*keySize), int64(0)
				for b.Loop() {
					for i := 0; i < len(seg); i += 8 {
						binary.LittleEndian.PutUint64(seg[i:], r.Uint64())
					}
					at := epoch.Add(time.Duration(tail) * time.Microsecond)
					if !c.Extend(1, tail, at, at.Add(-2*time.Second), seg, n) {
						b.Fatal("refused")
					}
					tail += int64(n)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(tail), "ns/key")
			})
		}
	}
}

func TestForgetAll(t *testing.T) {
	c := New(1 << 30)
	for p := range int64(300) {
		c.Load(p, 0, time.Time{})
		for i := range uint64(p) {
			c.Extend(p, int64(i)*100, epoch, time.Time{}, keysOf(i*100, 100), 100)
		}
	}
	c.ForgetAll()
	if s := c.Stats(); s.Partitions != 0 || s.Bytes != 0 || s.Exact != 0 || s.Filters != 0 {
		t.Errorf("%+v is left", s)
	}
	if _, ok := c.Tail(7, time.Time{}); ok {
		t.Error("a partition is remembered")
	}
}
