// Package dedup is the broker's memory of which transaction ids lie inside
// the deduplication window of each partition. It knows no database and no
// clock: times are the database's created_at, passed in.
//
// A partition's memory is a row of blocks in offset order and a tail:
//
//	since                                                       tail
//	  │ [filter) [filter) [filter) [exact) [exact) [open, exact)  │
//	  └──────────── every key created at or after since ──────────┘
//
// A push is judged by [Cache.Look], then written with compare-and-set on the
// partition's tail in the database. If that tail is the one Look returned,
// nobody wrote in between and the verdict was exact. A hit is only a place to
// look: the caller confirms it by reading the 16-byte keys stored there. Every
// doubt ends in "not ok" or in a hit that does not confirm, never in silence.
//
// Exact blocks hold an 8-byte fingerprint and a 4-byte offset per key (18.5
// bytes a key with the slack of the table and a filter in front of it). A block is sealed when it is full
// or spans an eighth of the window, so that what expired leaves in whole
// blocks. Above the budget the oldest sealed blocks become binary fuse filters,
// then open blocks of partitions not used lately do, and when filters alone are
// too much, partitions not used lately (second chance) are forgotten: their
// next push reads the window again.
//
// Why fuse filters of 16 bits and not Bloom filters of 12 bits a key: a false
// positive reads the keys of a whole block, 250 KiB, which took PostgreSQL 15
// 2 ms from segments of 1,000 messages and 14 ms from segments of one. Over 60
// blocks of 16,000 keys (TestFilterChoice; all on the 2-core development
// machine while it was busy with other work, 2026):
//
//	          bits a key  false positives  reads per 1,000 looks  a look
//	Bloom 12        12.0          0.314 %                    188  2.5 µs
//	Bloom 20        20.0          0.006 %                    3.8  2.6 µs
//	fuse 8          10.2          0.393 %                    236  0.9 µs
//	fuse 16         20.5          0.001 %                    0.8  1.5 µs
//
// So a new key costs the database 2 µs of reading on average, not 380.
package dedup

import (
	"encoding/binary"
	"math"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/FastFilter/xorfilter"
)

const (
	keySize  = 16
	shards   = 64
	blockMax = 16_000 // keys of a full block, unless its partition has many
	blockAim = 64     // blocks of a partition from which they get larger: a look asks them all
	blockCap = 1024   // bytes of the budget for each key of the largest block
	blockMin = 32     // keys below which a block is not sealed for its age
	blockAge = 8      // a block spans at most this part of the window
	frontMin = 4096   // keys from which a sealed block gets a filter at once
	coldMin  = 256    // keys below which an open block is not worth a filter
	lookStep = 256    // keys looked up under one lock
	chances  = 64     // second chances given by one call that must make room

	// What the heap pays for a partition (struct, map entry, ring slot) and for
	// a sealed block (struct, slice slot) apart from their tables.
	partitionCost = 80 + 32 + 10
	sealedCost    = 96 + 12
	filterCost    = 48
)

// Cache remembers the ids of all partitions within one budget of bytes.
// It is safe for concurrent use.
type Cache struct {
	budget int64
	shards [shards]shard

	used, partitions, exact, filters, queued, converted, forgotten atomic.Int64

	room sync.Mutex // held by the one goroutine that makes room; guards hand
	hand uint
}

type fuse = xorfilter.BinaryFuse[uint16]

// workshop is the memory it takes to build a filter, about 0.7 MB.
type workshop struct {
	builder xorfilter.BinaryFuseBuilder
	fps     []uint64
}

var workshops = sync.Pool{New: func() any { return new(workshop) }}

// Hit says where a key may be stored: at one of the offsets in [From, To).
// To is From+1 for a single candidate.
type Hit struct {
	Index    int // which of the keys given to Look
	From, To int64
}

// Stats is a snapshot of the counters of a Cache.
type Stats struct {
	Bytes      int64 // memory in use, as accounted against the budget
	Partitions int64 // partitions remembered
	Exact      int64 // sealed blocks with exact entries; one open block per partition comes on top
	Filters    int64 // sealed blocks reduced to a filter
	Converted  int64 // exact blocks turned into filters so far
	Forgotten  int64 // partitions forgotten for lack of room so far
}

// shard is one lock and the partitions under it.
type shard struct {
	mu             sync.RWMutex
	parts          map[int64]*memory
	ring           []int64 // ids of parts in no order, walked by hand
	hand           int
	oldest, newest *sealed // queue of exact sealed blocks
}

// memory is what is known of one partition. It is kept at 80 bytes, because there may be millions.
type memory struct {
	tail   int64 // complete up to here
	since  int64 // and back to here
	open   block
	sealed *[]*sealed // oldest first; nil if none
	slot   uint32     // place in the ring
	used   atomic.Uint32
}

// block is a run of keys: offsets count from base, times are microseconds.
type block struct {
	base, oldest, newest int64
	table                table
}

// sealed is a block that takes no more keys. Its table never changes. A large
// one gets a filter in front, which answers a miss from a sixth of the memory
// (with 60 blocks the cache misses of the tables cost several times as much);
// when room is short the table goes and the filter stays.
type sealed struct {
	block
	end             int64   // one past the last offset
	filter          *fuse   // nil: none, table only
	older, newer    *sealed // neighbours in the shard's queue
	queued, dropped bool
}

// New returns an empty Cache that keeps its memory within budget bytes. Making
// filters takes another 0.7 MB for each goroutine at it, 12 MB for the largest blocks of a budget of 256 MB. With a budget of 0 nothing stays remembered.
func New(budget int64) *Cache {
	c := &Cache{budget: budget}
	for i := range c.shards {
		c.shards[i].parts = make(map[int64]*memory)
	}
	return c
}

// Tail returns the offset up to which the partition's memory is complete, and
// whether it is complete for a window that reaches back to since.
func (c *Cache) Tail(partition int64, since time.Time) (tail int64, ok bool) {
	_, tail, ok = c.Look(partition, since, nil, nil)
	return tail, ok
}

// Look appends to dst the places where the 16-byte keys may be stored since
// that time, newest first for each key, and returns the tail up to which this
// is all there is. If the memory does not reach back to since, or the partition
// is not remembered, ok is false and dst is returned as it was. Zero keys are
// skipped. A hit may lie before since: only its created_at tells.
//
// Tail and hits belong together: between two calls the partition may have been
// forgotten and loaded again.
func (c *Cache) Look(partition int64, since time.Time, keys []byte, dst []Hit) (hits []Hit, tail int64, ok bool) {
	s, from := c.shard(partition), since.UnixMicro()
	hits, tail = dst, math.MaxInt64
	for first := 0; ; first += lookStep {
		chunk := keys[min(first*keySize, len(keys)):min((first+lookStep)*keySize, len(keys))]
		s.mu.RLock()
		p := s.parts[partition]
		if p == nil || from < p.since {
			s.mu.RUnlock()
			return dst, 0, false
		}
		if p.used.Load() == 0 {
			p.used.Store(1)
		}
		// The tail of the first chunk holds for all: later ones know at least
		// as much, unless the partition was loaded anew with a lower tail.
		tail = min(tail, p.tail)
		hits = p.look(chunk, first, from, hits)
		s.mu.RUnlock()
		if (first+lookStep)*keySize >= len(keys) {
			return hits, tail, true
		}
	}
}

// Load starts the memory of a partition anew: empty, and complete for what was
// created since that time below tail. The caller follows with an Extend for
// each segment from tail on. A new partition is Load(p, 0, time.Time{}).
func (c *Cache) Load(partition, tail int64, since time.Time) {
	s := c.shard(partition)
	s.mu.Lock()
	c.forget(s, partition)
	p := &memory{tail: tail, since: since.UnixMicro(), slot: uint32(len(s.ring))}
	p.used.Store(1)
	s.parts[partition] = p
	s.ring = append(s.ring, partition)
	c.partitions.Add(1)
	c.used.Add(partitionCost)
	s.mu.Unlock()
	c.makeRoom()
}

// Extend records a committed segment of count messages: the i-th 16-byte key
// belongs to offset base+i, zero keys are skipped, and keys may be empty if
// all are zero. What was created before since, where the window begins, may be
// dropped; the zero time keeps everything. A since later than the one of the
// next Look may make that one not ok: where they come from different clocks,
// allow for the difference here.
//
// It reports whether the partition's memory was complete up to base. If not,
// someone else wrote in between, and the partition is forgotten.
func (c *Cache) Extend(partition, base int64, createdAt, since time.Time, keys []byte, count int) bool {
	s := c.shard(partition)
	s.mu.Lock()
	p := s.parts[partition]
	if p == nil || p.tail != base || count < 0 || len(keys) != 0 && len(keys) != count*keySize {
		c.forget(s, partition)
		s.mu.Unlock()
		return false
	}
	if p.used.Load() == 0 {
		p.used.Store(1)
	}
	at, from := createdAt.UnixMicro(), since.UnixMicro()
	c.expire(s, p, from)
	var full *sealed
	most := c.most(p)
	if len(p.open.table) >= blockMin && at-p.open.oldest > (at-from)/blockAge {
		full = c.seal(s, p, base)
	}
	for i := 0; i < len(keys); i += keySize {
		fp, off := fingerprint(keys[i:]), base+int64(i/keySize)
		if fp == 0 {
			continue
		}
		b := &p.open
		if len(b.table) >= most || len(b.table) > 0 && off-b.base >= math.MaxUint32 {
			full = c.seal(s, p, off)
		}
		if len(b.table) == 0 {
			b.base, b.oldest, b.newest = off, at, at
		}
		b.oldest, b.newest = min(b.oldest, at), max(b.newest, at)
		c.used.Add(b.table.insert(fp, uint32(off-b.base)+1))
	}
	p.tail = base + int64(count)
	var front table
	if full != nil && len(full.table) >= frontMin {
		front = full.table
	}
	s.mu.Unlock()
	if front != nil {
		filter := build(front)
		s.mu.Lock()
		c.setFilter(full, filter)
		s.mu.Unlock()
	}
	c.makeRoom()
	return true
}

// Knows says whether a committed segment is remembered already, because another caller read what this one wrote: then
// there is nothing to Extend. A segment with keys that the memory does not have where they should be is another one, stored
// after the database was set back to an earlier time.
func (c *Cache) Knows(partition, base int64, keys []byte, count int) bool {
	s := c.shard(partition)
	s.mu.RLock()
	defer s.mu.RUnlock()
	p := s.parts[partition]
	if p == nil || base+int64(count) > p.tail {
		return false
	}
	for first := 0; first*keySize < len(keys); first += lookStep {
		chunk := keys[first*keySize : min((first+lookStep)*keySize, len(keys))]
		hits := p.look(chunk, first, math.MinInt64, nil)
		for i := 0; i < len(chunk); i += keySize {
			at := int64(first + i/keySize)
			if fingerprint(chunk[i:]) != 0 && !slices.ContainsFunc(hits, func(h Hit) bool { return int64(h.Index) == at && h.From <= base+at && base+at < h.To }) {
				return false
			}
		}
	}
	return true
}

// Forget drops all that is remembered of a partition.
func (c *Cache) Forget(partition int64) {
	s := c.shard(partition)
	s.mu.Lock()
	c.forget(s, partition)
	s.mu.Unlock()
}

// ForgetAll drops all that is remembered.
func (c *Cache) ForgetAll() {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		for len(s.ring) > 0 {
			c.forget(s, s.ring[0])
		}
		s.mu.Unlock()
	}
}

// Stats returns the counters.
func (c *Cache) Stats() Stats {
	return Stats{
		Bytes:      c.used.Load(),
		Partitions: c.partitions.Load(),
		Exact:      c.exact.Load(),
		Filters:    c.filters.Load(),
		Converted:  c.converted.Load(),
		Forgotten:  c.forgotten.Load(),
	}
}

func (c *Cache) shard(partition int64) *shard { return &c.shards[uint64(partition)%shards] }

// look appends the hits of keys, the first of which is number first.
func (p *memory) look(keys []byte, first int, from int64, hits []Hit) []Hit {
	var fps [lookStep]uint64
	n := len(keys) / keySize
	for i := range n {
		fps[i] = fingerprint(keys[i*keySize:])
	}
	hits = p.open.look(fps[:n], first, from, hits)
	if p.sealed == nil {
		return hits
	}
	for _, b := range slices.Backward(*p.sealed) {
		if b.newest < from {
			continue
		}
		if b.filter == nil {
			hits = b.look(fps[:n], first, from, hits)
			continue
		}
		for i, fp := range fps[:n] {
			switch {
			case fp == 0 || !b.filter.Contains(fp):
			case b.table == nil:
				hits = append(hits, Hit{first + i, b.base, b.end})
			default:
				hits = b.look(fps[i:i+1], first+i, from, hits)
			}
		}
	}
	return hits
}

func (b *block) look(fps []uint64, first int, from int64, hits []Hit) []Hit {
	if len(b.table) == 0 || b.newest < from {
		return hits
	}
	for i, fp := range fps {
		if fp == 0 {
			continue
		}
		oldest, newest := b.table.find(fp)
		if newest == 0 {
			continue
		}
		last := b.base + int64(newest) - 1
		hits = append(hits, Hit{first + i, last, last + 1})
		if oldest != newest {
			hits = append(hits, Hit{first + i, b.base + int64(oldest) - 1, last})
		}
	}
	return hits
}

// expire drops the blocks whose newest key is older than from.
func (c *Cache) expire(s *shard, p *memory, from int64) {
	if p.sealed != nil {
		blocks := *p.sealed
		for len(blocks) > 0 && blocks[0].newest < from {
			p.since = max(p.since, blocks[0].newest+1)
			c.drop(s, blocks[0])
			blocks[0], blocks = nil, blocks[1:]
		}
		*p.sealed = blocks
	}
	if len(p.open.table) > 0 && p.open.newest < from {
		p.since = max(p.since, p.open.newest+1)
		c.used.Add(-p.open.table.bytes())
		p.open = block{}
	}
}

// most is how many keys the open block takes.
func (c *Cache) most(p *memory) int {
	if p.sealed == nil || len(*p.sealed) < blockAim {
		return blockMax
	}
	return int(max(blockMax, min((p.tail-(*p.sealed)[0].base)/blockAim, c.budget/blockCap)))
}

// seal closes the open block, which ends before offset end, and queues it.
func (c *Cache) seal(s *shard, p *memory, end int64) *sealed {
	b := &sealed{block: p.open, end: end, older: s.newest, queued: true}
	p.open = block{}
	if fit := slotsFor(len(b.table)); cap(b.table) > fit+fit/8 {
		c.used.Add(b.table.rebuild(fit))
	}
	if p.sealed == nil {
		p.sealed = new([]*sealed)
	}
	*p.sealed = append(*p.sealed, b)
	if s.newest == nil {
		s.oldest = b
	} else {
		s.newest.newer = b
	}
	s.newest = b
	c.queued.Add(1)
	c.exact.Add(1)
	c.used.Add(sealedCost)
	return b
}

// unqueue takes a block out of the shard's queue.
func (c *Cache) unqueue(s *shard, b *sealed) {
	if !b.queued {
		return
	}
	if b.older == nil {
		s.oldest = b.newer
	} else {
		b.older.newer = b.newer
	}
	if b.newer == nil {
		s.newest = b.older
	} else {
		b.newer.older = b.older
	}
	b.older, b.newer, b.queued = nil, nil, false
	c.queued.Add(-1)
}

// drop settles the accounts of a sealed block that left its partition.
func (c *Cache) drop(s *shard, b *sealed) {
	c.unqueue(s, b)
	b.dropped = true
	if b.table != nil {
		c.exact.Add(-1)
	} else {
		c.filters.Add(-1)
	}
	c.used.Add(-sealedCost - b.bytes())
}

func (b *sealed) bytes() int64 {
	if b.filter == nil {
		return b.table.bytes()
	}
	return b.table.bytes() + filterCost + 2*int64(len(b.filter.Fingerprints))
}

// forget removes a partition, if it is there.
func (c *Cache) forget(s *shard, partition int64) {
	p := s.parts[partition]
	if p == nil {
		return
	}
	if p.sealed != nil {
		for _, b := range *p.sealed {
			c.drop(s, b)
		}
	}
	delete(s.parts, partition)
	last := len(s.ring) - 1
	s.ring[p.slot] = s.ring[last]
	if moved := s.parts[s.ring[last]]; moved != nil {
		moved.slot = p.slot
	}
	s.ring = s.ring[:last]
	c.partitions.Add(-1)
	c.used.Add(-partitionCost - p.open.table.bytes())
}

// makeRoom brings the memory back within the budget. One goroutine does it at
// a time, the others wait for it only when it falls behind.
func (c *Cache) makeRoom() {
	if c.used.Load() <= c.budget {
		return
	}
	if !c.room.TryLock() {
		if c.used.Load() <= c.budget+c.budget/20 {
			return
		}
		c.room.Lock()
	}
	defer c.room.Unlock()
	second := chances
	for c.used.Load() > c.budget && c.partitions.Load() > 0 {
		s := &c.shards[c.hand%shards]
		c.hand++
		if c.queued.Load() > 0 {
			c.convert(s)
		} else {
			c.retire(s, &second)
		}
	}
}

// convert leaves the shard's oldest exact sealed block its filter only,
// building it outside the lock if there is none. If that fails, or does not
// pay, the block stays exact.
func (c *Cache) convert(s *shard) {
	s.mu.Lock()
	b := s.oldest
	if b == nil {
		s.mu.Unlock()
		return
	}
	c.unqueue(s, b)
	filter := b.filter
	s.mu.Unlock()
	if filter == nil && len(b.table) >= blockMin { // only convert changes a sealed table
		filter = build(b.table)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c.setFilter(b, filter)
	if b.dropped || b.filter == nil {
		return
	}
	c.used.Add(-b.table.bytes())
	b.table = nil
	c.exact.Add(-1)
	c.filters.Add(1)
	c.converted.Add(1)
}

// setFilter gives a block its filter, unless it has one or is gone.
func (c *Cache) setFilter(b *sealed, filter *fuse) {
	if b.dropped || b.filter != nil || filter == nil {
		return
	}
	c.used.Add(-b.bytes())
	b.filter = filter
	c.used.Add(b.bytes())
}

// build returns the filter of a table, nil if there is none to be found.
func build(t table) *fuse {
	w := workshops.Get().(*workshop)
	defer workshops.Put(w)
	w.fps = t.distinct(w.fps[:0])
	filter, err := xorfilter.BuildBinaryFuse[uint16](&w.builder, w.fps)
	if err != nil {
		return nil
	}
	filter.Fingerprints = slices.Clone(filter.Fingerprints) // they are the builder's
	return &filter
}

// retire looks at one partition of the shard. If it was used since the last
// look it gets a second chance, while there are any left; else its open block
// is sealed to become a filter, or, if that is small, the partition forgotten.
func (c *Cache) retire(s *shard, second *int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.ring) == 0 {
		return
	}
	if s.hand >= len(s.ring) {
		s.hand = 0
	}
	id := s.ring[s.hand]
	p := s.parts[id]
	blocks := 0
	if p.sealed != nil {
		blocks = len(*p.sealed)
	}
	switch {
	case *second > 0 && p.used.Swap(0) != 0:
		*second--
		s.hand++
	case len(p.open.table) >= coldMin+blocks*coldMin/16: // few, large filters
		c.seal(s, p, p.tail)
		s.hand++
	default:
		c.forget(s, id)
		c.forgotten.Add(1)
	}
}

// fingerprint is 0 for the zero key only.
func fingerprint(key []byte) uint64 {
	a, b := binary.LittleEndian.Uint64(key), binary.LittleEndian.Uint64(key[8:])
	if a|b == 0 {
		return 0
	}
	hi, lo := bits.Mul64(a^0x9e3779b97f4a7c15, b^0xd1b54a32d192ed03)
	return max(hi^lo, 1)
}
