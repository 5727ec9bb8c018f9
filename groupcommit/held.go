package groupcommit

import (
	"sync"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/segment"
)

// holding remembers what this broker delivered under leases: acks name messages by their transaction ids, and this
// turns them into offsets without reading. It is bounded, and only ever a shortcut: what it lacks is read from the database.
type holding struct {
	mu         sync.Mutex
	young, old map[cursorKey]*held
	leases     map[uuid.UUID][]cursorKey
	weight     int
	// When batches were last dropped, in two generations: a claim that began before that, and ends after it, must not bring one back.
	dropped, droppedOld map[cursorKey]time.Time
}

type cursorKey struct {
	group     int32
	partition int64
}

// held is one leased batch.
type held struct {
	lease     uuid.UUID
	until     time.Time // by this broker's clock; about
	partition *catalog.Partition
	committed int64
	end       int64
	parts     []keyed
	missed    bool // a hint was held back because of it
}

// keyed is the ids of one segment's messages.
type keyed struct {
	base  int64
	count int
	first uuid.UUID
	keys  []byte
}

// maxHeld is how many messages one generation remembers: about 20 MB.
const maxHeld = 1 << 20

// maxDropped is how many cursors one generation knows that were dropped.
const maxDropped = 1 << 14

func newHolding() *holding {
	return &holding{young: make(map[cursorKey]*held), leases: make(map[uuid.UUID][]cursorKey), dropped: make(map[cursorKey]time.Time)}
}

// add remembers the batches of a lease. If one was dropped meanwhile, whoever extends the lease has to ask the database which cursors it has:
// those that are left would not be all.
func (h *holding) add(lease uuid.UUID, spans ...*Span) {
	h.mu.Lock()
	defer h.mu.Unlock()
	whole := true
	for _, s := range spans {
		n := &held{lease: lease, partition: s.Partition, until: time.Now().Add(s.lease), committed: s.Start, end: s.Start + s.Take}
		for _, g := range s.Segments {
			n.parts = append(n.parts, keyed{base: g.Base, count: int(g.Count), first: g.FirstID, keys: g.Keys})
		}
		k := cursorKey{s.Group.ID, s.Row.ID}
		if h.dropped[k].After(s.began) || h.droppedOld[k].After(s.began) { // a seek has ended this lease, perhaps
			whole = false
			continue
		}
		if h.weight += int(s.Take); h.weight > maxHeld {
			for _, x := range h.old {
				delete(h.leases, x.lease)
			}
			h.old, h.young, h.weight = h.young, make(map[cursorKey]*held), int(s.Take)
		}
		h.remove(k)
		h.young[k] = n
		h.leases[lease] = append(h.leases[lease], k)
	}
	if !whole {
		delete(h.leases, lease)
	}
}

func (h *holding) find(k cursorKey) *held {
	if n := h.young[k]; n != nil {
		return n
	}
	return h.old[k]
}

func (h *holding) remove(k cursorKey) {
	n := h.find(k)
	if n == nil {
		return
	}
	delete(h.young, k)
	delete(h.old, k)
	keys := h.leases[n.lease]
	for i, x := range keys {
		if x == k {
			keys = append(keys[:i], keys[i+1:]...)
			break
		}
	}
	if len(keys) == 0 {
		delete(h.leases, n.lease)
	} else {
		h.leases[n.lease] = keys
	}
}

// get is the batch of a cursor if it was delivered here under that lease.
func (h *holding) get(group int32, partition int64, lease uuid.UUID) (held, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := h.find(cursorKey{group, partition})
	if n == nil || n.lease != lease {
		return held{}, false
	}
	return *n, true
}

// live guesses whether a cursor is leased: then hints about it wait for its holder, whose ack or the end of the lease brings them up again.
func (h *holding) live(group int32, partition int64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := h.find(cursorKey{group, partition})
	if n == nil || !time.Now().Before(n.until) {
		return false
	}
	n.missed = true
	return true
}

// partition is that of a batch that is held here, or nil.
func (h *holding) partition(group int32, partition int64) *catalog.Partition {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := h.find(cursorKey{group, partition}); n != nil {
		return n.partition
	}
	return nil
}

// extended notes how long a lease lasts now.
func (h *holding) extended(group int32, partition int64, until time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := h.find(cursorKey{group, partition}); n != nil {
		n.until = until
	}
}

// settled notes where a settle left the cursor. known: the batch was delivered here. missed: a hint was held back because of it,
// perhaps about something that the settle did not see. What is remembered under another lease than the settle's, if it asked for one, is
// older, and another broker's word that it is over on its way, or newer: whoever delivered this batch has to be told.
func (h *holding) settled(group int32, partition int64, lease uuid.UUID, committed int64, released bool) (known, missed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	k := cursorKey{group, partition}
	n := h.find(k)
	if n == nil || lease != uuid.Nil && n.lease != lease {
		return false, false
	}
	missed = n.missed
	if released || committed >= n.end {
		h.remove(k)
	} else {
		n.committed = committed
	}
	return true, missed
}

// drop forgets a batch that is not as remembered. Who extends its lease has to ask the database which cursors that has.
func (h *holding) drop(group int32, partition int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	k := cursorKey{group, partition}
	if len(h.dropped) >= maxDropped {
		h.dropped, h.droppedOld = make(map[cursorKey]time.Time), h.dropped
	}
	h.dropped[k] = time.Now()
	if n := h.find(k); n != nil {
		h.remove(k)
		delete(h.leases, n.lease)
	}
}

// dropLease is drop, unless the cursor has another lease by now.
func (h *holding) dropLease(group int32, partition int64, lease uuid.UUID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	k := cursorKey{group, partition}
	if n := h.find(k); n != nil && n.lease == lease {
		h.remove(k)
	}
}

// dropGroup forgets all batches of a group. It walks everything that is remembered: for rare events.
func (h *holding) dropGroup(group int32) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, m := range []map[cursorKey]*held{h.young, h.old} {
		for k, n := range m {
			if k.group == group {
				h.remove(k)
				delete(h.leases, n.lease)
			}
		}
	}
}

// cursors are those a lease was handed out for here.
func (h *holding) cursors(lease uuid.UUID) []cursorKey {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]cursorKey(nil), h.leases[lease]...)
}

// finder resolves transaction ids to offsets within a list of segments.
type finder struct {
	hasher segment.Hasher
	parts  []keyed
	from   int64 // offsets below are not looked at
	to     int64 // nor these and above
	calls  int
	index  map[segment.Key]int64 // the lowest offset of each key, made once there are many calls
	seen   map[string]int64
}

// next finds the lowest offset of an id; a repeated mention of it finds the next occurrence.
func (f *finder) next(id string) (int64, bool) {
	k := f.hasher.Key(id)
	minted, isUUID := parseUUID(id)
	from := f.from
	last, again := f.seen[id]
	if again {
		from = last + 1
	} else if f.calls++; f.calls > 16 {
		f.buildIndex()
	}
	at, ok := int64(0), false
	if f.index != nil && from == f.from {
		at, ok = f.index[k]
		if isUUID {
			if m, found := f.search(segment.Key{}, minted, true, from); found && (!ok || m < at) {
				at, ok = m, true
			}
		}
	} else {
		at, ok = f.search(k, minted, isUUID, from)
	}
	if !ok && again { // mentioned more often than it occurs
		return last, true
	}
	if ok {
		if f.seen == nil {
			f.seen = make(map[string]int64)
		}
		f.seen[id] = at
	}
	return at, ok
}

func (f *finder) search(k segment.Key, minted uuid.UUID, isUUID bool, from int64) (int64, bool) {
	for n := range f.parts {
		p := &f.parts[n]
		if p.base+int64(p.count) <= from || p.base >= f.to {
			continue
		}
		if i := p.index(int(max(from-p.base, 0)), int(min(f.to-p.base, int64(p.count))), k, minted, isUUID); i >= 0 {
			return p.base + int64(i), true
		}
	}
	return 0, false
}

func (f *finder) buildIndex() {
	if f.index != nil {
		return
	}
	f.index = make(map[segment.Key]int64)
	for n := range f.parts {
		p := &f.parts[n]
		for i := int(max(f.from-p.base, 0)); i < p.count && p.base+int64(i) < f.to; i++ {
			if k := segment.KeyAt(p.keys, i); k != (segment.Key{}) {
				if _, ok := f.index[k]; !ok {
					f.index[k] = p.base + int64(i)
				}
			}
		}
	}
}

// index is the first message of [from, to) with that id, or -1.
func (p *keyed) index(from, to int, k segment.Key, minted uuid.UUID, isUUID bool) int {
	at := -1
	if len(p.keys) > 0 && k != (segment.Key{}) {
		if i := segment.FindKey(p.keys, from, k); i >= 0 && i < to {
			at = i
		}
	}
	if isUUID {
		if i, ok := segment.IndexOf(p.first, p.count, minted); ok && i >= from && i < to && segment.KeyAt(p.keys, i) == (segment.Key{}) && (at < 0 || i < at) {
			at = i
		}
	}
	return at
}

func parseUUID(s string) (uuid.UUID, bool) {
	if len(s) != 36 {
		return uuid.UUID{}, false
	}
	id, err := uuid.Parse(s)
	return id, err == nil && id.String() == s
}
