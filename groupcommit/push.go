package groupcommit

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/metrics"
	"ferrymq/segment"
)

// Push is the messages of one request for one partition. It is stored as a whole or not at all.
type Push struct {
	Queue     *catalog.Queue
	Partition *catalog.Partition
	Messages  []segment.Message
	Stream    bool // a queue that has to be made again gets the defaults of a stream

	// Results has one element per message once the push is done with Err == nil.
	Results []Pushed
	Err     error

	bytes int
	keys  []byte // 16 bytes a message, or empty when no message brings its own id
	all   *sync.WaitGroup
}

// Pushed is what became of a message: its id, or that of the message it repeats.
type Pushed struct {
	ID        uuid.UUID
	Offset    int64 // in its partition
	Duplicate bool

	stored bool // Offset counts from the partition's beginning already, not from that of the entry
}

func (p *Push) finish(e *Engine, err error) {
	p.Err = err
	e.waiting.Add(-int64(len(p.Messages)))
	p.all.Done()
}

// Push stores messages, deduplicated by transaction id, and returns when every push is decided; each has its own Err.
// It returns ErrOverloaded, with nothing stored, when too many messages wait already.
// It does not end early with ctx, whose end only keeps a push from starting: what has boarded will be stored.
func (e *Engine) Push(ctx context.Context, pushes []*Push) error {
	var n int64
	for _, p := range pushes {
		n += int64(len(p.Messages))
	}
	if e.waiting.Load() >= e.PushQueueMax {
		return ErrOverloaded
	}
	e.waiting.Add(n)
	var all sync.WaitGroup
	all.Add(len(pushes))
	for _, p := range pushes {
		p.all = &all
		p.Results = make([]Pushed, len(p.Messages))
		switch err := e.admit(ctx, p); {
		case err != nil:
			p.finish(e, err)
		default:
			p.hash(e.Hasher)
			e.boardPush(p)
		}
	}
	all.Wait()
	return nil
}

// admit refuses what needs no flush to be refused.
func (e *Engine) admit(ctx context.Context, p *Push) error {
	if p.Queue.EncryptionEnabled && e.Keys == nil {
		return ErrNoKey
	}
	if p.Queue.MaxSize > 0 {
		return e.sizes.admit(e, p.Queue, int64(len(p.Messages)), true, func() (int64, error) {
			return e.q.QueuePendingCount(ctx, db.QueuePendingCountParams{QueueID: p.Queue.ID})
		})
	}
	return nil
}

func (p *Push) hash(h segment.Hasher) {
	for i := range p.Messages {
		if id := p.Messages[i].TransactionID; id != "" {
			if p.keys == nil {
				p.keys = make([]byte, 16*len(p.Messages))
			}
			k := h.Key(id)
			copy(p.keys[16*i:], k[:])
		}
	}
}

func (e *Engine) boardPush(p *Push) {
	p.bytes = 0
	for i := range p.Messages {
		p.bytes += len(p.Messages[i].Payload) + len(p.Messages[i].TransactionID) + len(p.Messages[i].ProducerSub)
	}
	ok := e.dock.enter(p.Partition.Lane, func(b *board) {
		b.pushes = append(b.pushes, p)
		b.bytes += p.bytes
	})
	if !ok {
		p.finish(e, ErrClosed)
	}
}

// entry is what one flush appends to one partition.
type entry struct {
	partition *catalog.Partition
	queue     *catalog.Queue
	row       *catalog.Row // nil: to be created, under public
	public    uuid.UUID
	pushes    []*Push
	keyed     bool
	known     map[segment.Key]Pushed // of a move: ids that are stored already
	expected  int64                  // tail the deduplication was judged at, or -1
	total     int64
	parts     []part

	base      int64
	createdAt time.Time
}

// part is one segment of an entry.
type part struct {
	rel    int64
	count  int32
	first  uuid.UUID
	keyNo  int16
	codec  int16
	keys   []byte
	frames []byte
}

// builders are the buffers a flusher reuses from flush to flush.
type builders struct {
	segment *segment.Builder
	seen    map[segment.Key]Pushed
}

// build turns the pushes of an entry into segments and fills in their results. known holds the ids found to be duplicates of stored messages.
func (n *entry) build(e *Engine, s *builders, known map[segment.Key]Pushed) {
	if s.segment == nil {
		s.segment = segment.NewBuilder(e.Hasher)
		s.seen = make(map[segment.Key]Pushed)
	}
	dedup := n.queue.DedupWindowSeconds > 0 && n.keyed
	messages := 0
	for _, p := range n.pushes {
		messages += len(p.Messages)
	}
	clear(s.seen)
	var keys *segment.Keys
	if n.queue.EncryptionEnabled {
		keys = e.Keys
	}
	n.total, n.parts = 0, n.parts[:0]
	b := s.segment
	b.Reset()
	var first uuid.UUID
	seal := func() {
		if b.Len() == 0 {
			return
		}
		p := part{rel: n.total - int64(b.Len()), count: int32(b.Len()), first: first, keys: slices.Clone(b.Keys())}
		if p.keys == nil {
			p.keys = []byte{}
		}
		p.codec, p.keyNo, p.frames = b.Seal(nil, keys, first)
		n.parts = append(n.parts, p)
		b.Reset()
	}
	for _, p := range n.pushes {
		for i := range p.Messages {
			m := &p.Messages[i]
			if b.Len() == 0 {
				first = segment.NewFirstID(time.Now())
			}
			if dedup && len(p.keys) > 0 && m.TransactionID != "" {
				k := segment.Key(p.keys[16*i:])
				if first, ok := known[k]; ok {
					p.Results[i] = first
					continue
				}
				if messages > 1 {
					if first, ok := s.seen[k]; ok {
						p.Results[i] = first
						continue
					}
				}
				if !b.Fits(m) {
					seal()
					first = segment.NewFirstID(time.Now())
				}
				if messages > 1 {
					s.seen[k] = Pushed{ID: segment.ID(first, b.Len()), Offset: n.total, Duplicate: true}
				}
			} else if !b.Fits(m) {
				seal()
				first = segment.NewFirstID(time.Now())
			}
			p.Results[i] = Pushed{ID: segment.ID(first, b.Len()), Offset: n.total}
			b.Append(m)
			n.total++
		}
	}
	seal()
}

// dedupSlack is how much longer than the window ids are remembered: this broker's idea of the database's clock may move a little.
const dedupSlack = time.Second

// since is the beginning of the entry's deduplication window.
func (n *entry) since(e *Engine) time.Time {
	return e.Now().Add(-time.Duration(n.queue.DedupWindowSeconds) * time.Second)
}

// judge says whether memory alone decides that nothing of the entry is a duplicate of a stored message, and at which tail.
func (n *entry) judge(e *Engine) (ok bool) {
	n.expected = -1
	if n.queue.DedupWindowSeconds == 0 || !n.keyed || n.row == nil {
		return true
	}
	n.expected = 1<<62 - 1
	for _, p := range n.pushes {
		if len(p.keys) == 0 {
			continue
		}
		hits, tail, ok := e.dedup.Look(n.row.ID, n.since(e), p.keys, nil)
		if !ok || len(hits) > 0 {
			return false
		}
		n.expected = min(n.expected, tail)
	}
	return true
}

// plan sorts the pushes of a board by partition. Those that memory cannot judge go to their side lane.
func (f *flusher) plan(pushes []*Push) []*entry {
	if len(pushes) == 0 {
		return nil
	}
	byKey := make(map[partitionKey]*entry, len(pushes))
	var entries []*entry
	for _, p := range pushes {
		key := keyOf(p.Partition)
		n := byKey[key]
		if n == nil {
			n = &entry{partition: p.Partition, queue: p.Queue, row: p.Partition.Row()}
			if n.row == nil {
				n.public = uuid.New()
			}
			byKey[key] = n
			entries = append(entries, n)
		}
		n.pushes = append(n.pushes, p)
		n.keyed = n.keyed || len(p.keys) > 0
	}
	kept := entries[:0]
	for _, n := range entries {
		if n.judge(f.e) && !f.e.besides(n) {
			n.build(f.e, &f.scratch, nil)
			kept = append(kept, n)
			continue
		}
		f.e.sendAside(n)
	}
	// Where they are not locked first, they are in this order: others who take several at once do the same.
	slices.SortStableFunc(kept, func(a, b *entry) int { return cmp.Compare(a.id(), b.id()) })
	return kept
}

// id is that of the entry's partition, or that of none when it is to be created.
func (n *entry) id() int64 {
	if n.row == nil {
		return 1<<63 - 1
	}
	return n.row.ID
}

// stored is called after the commit that stored an entry.
func (n *entry) stored(e *Engine) {
	n.remember(e)
	for _, p := range n.pushes {
		p.finish(e, nil)
	}
}

// remember notes what the commit of an entry stored. Before it nobody may know: a push that failed leaves no trace.
func (n *entry) remember(e *Engine) {
	if n.queue.DedupWindowSeconds > 0 {
		if n.base == 0 {
			e.dedup.Load(n.row.ID, 0, time.Time{})
		}
		for _, p := range n.parts {
			if e.dedup.Knows(n.row.ID, n.base+p.rel, p.keys, int(p.count)) { // a transaction that waited for this commit has read it
				continue
			}
			if !e.dedup.Extend(n.row.ID, n.base+p.rel, n.createdAt, n.since(e).Add(-dedupSlack), p.keys, int(p.count)) {
				break
			}
		}
	}
	n.partition.SeenTail(n.base + n.total)
	if e.park.partials(n.queue.ID) { // what they will come for message by message need not be read
		for _, p := range n.parts {
			if p.count > 1 && p.codec == segment.Plain && p.keyNo == 0 {
				e.frames.add(frameKey{n.row.ID, n.base + p.rel}, p.first, p.frames)
			}
		}
	}
	if n.total > 0 {
		e.Metrics.Add(n.queue.ProjectID, n.queue.ID, metrics.PushMessages, n.total)
		e.Metrics.Flow(n.queue.ProjectID, n.queue.ID, 0, metrics.Pushed, n.total)
	}
	repeated := -n.total
	for _, p := range n.pushes {
		repeated += int64(len(p.Messages))
	}
	e.Metrics.Total(metrics.PushDuplicates, repeated)
	for _, p := range n.pushes {
		for i := range p.Results {
			if r := &p.Results[i]; !r.stored {
				r.Offset += n.base
			}
		}
	}
}

// made notes the row of the partition that the commit of an entry created.
func (n *entry) made(e *Engine, r db.CreatePartitionsRow) {
	e.Catalog.Claimed(n.queue.ProjectID, n.queue.ID, r.ID, r.PublicID, n.partition.Name, n.partition.Hidden, n.total)
	n.row = &catalog.Row{ID: r.ID, PublicID: r.PublicID}
	if have := n.partition.Row(); have == nil || have.ID != r.ID {
		n.partition.Created(*n.row)
	}
	n.base, n.createdAt = 0, r.CreatedAt
	e.Metrics.Add(n.queue.ProjectID, n.queue.ID, metrics.PartitionsCreated, 1)
}

func appendParams(entries []*entry) (a db.AppendSegmentsParams, c db.CreatePartitionsParams) {
	a = db.AppendSegmentsParams{Ids: []int64{}, Totals: []int64{}, ExpectedTails: []int64{}, SegPartitions: []int64{}, SegRels: []int64{}, SegCounts: []int32{},
		SegKeyNos: []int16{}, SegCodecs: []int16{}, SegFirstIds: []uuid.UUID{}, SegKeys: [][]byte{}, SegFrames: [][]byte{}}
	c = db.CreatePartitionsParams{PublicIds: []uuid.UUID{}, QueueIds: []int32{}, Names: []string{}, Hiddens: []bool{}, Totals: []int64{}, SegPartitions: []uuid.UUID{}, SegRels: []int64{},
		SegCounts: []int32{}, SegKeyNos: []int16{}, SegCodecs: []int16{}, SegFirstIds: []uuid.UUID{}, SegKeys: [][]byte{}, SegFrames: [][]byte{}}
	for _, n := range entries {
		if n.total == 0 {
			continue
		}
		if n.row == nil {
			c.PublicIds = append(c.PublicIds, n.public)
			c.QueueIds = append(c.QueueIds, n.queue.ID)
			c.Names = append(c.Names, n.partition.Name)
			c.Hiddens = append(c.Hiddens, n.partition.Hidden)
			c.Totals = append(c.Totals, n.total)
			for _, p := range n.parts {
				c.SegPartitions = append(c.SegPartitions, n.public)
				c.SegRels = append(c.SegRels, p.rel)
				c.SegCounts = append(c.SegCounts, p.count)
				c.SegKeyNos = append(c.SegKeyNos, p.keyNo)
				c.SegCodecs = append(c.SegCodecs, p.codec)
				c.SegFirstIds = append(c.SegFirstIds, p.first)
				c.SegKeys = append(c.SegKeys, p.keys)
				c.SegFrames = append(c.SegFrames, p.frames)
			}
			continue
		}
		a.Ids = append(a.Ids, n.row.ID)
		a.Totals = append(a.Totals, n.total)
		a.ExpectedTails = append(a.ExpectedTails, n.expected)
		for _, p := range n.parts {
			a.SegPartitions = append(a.SegPartitions, n.row.ID)
			a.SegRels = append(a.SegRels, p.rel)
			a.SegCounts = append(a.SegCounts, p.count)
			a.SegKeyNos = append(a.SegKeyNos, p.keyNo)
			a.SegCodecs = append(a.SegCodecs, p.codec)
			a.SegFirstIds = append(a.SegFirstIds, p.first)
			a.SegKeys = append(a.SegKeys, p.keys)
			a.SegFrames = append(a.SegFrames, p.frames)
		}
	}
	return a, c
}

// sizes holds the backlog counts that maxSize is held against: an acceptance may use one up to a second old, a refusal never.
type sizes struct {
	mu     sync.Mutex
	counts map[int32]*size
}

type size struct {
	mu      sync.Mutex
	pending int64
	at      time.Time
	added   atomic.Int64 // admitted here since the count
}

func (s *sizes) of(queue int32) *size {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.counts == nil {
		s.counts = make(map[int32]*size)
	}
	z := s.counts[queue]
	if z == nil {
		z = &size{}
		s.counts[queue] = z
	}
	return z
}

// admit says whether n more messages fit. count is the backlog without them. Only who holds no connection may wait: whoever counts
// may be waiting for one.
func (s *sizes) admit(e *Engine, q *catalog.Queue, n int64, wait bool, count func() (int64, error)) error {
	z := s.of(q.ID)
	if !z.mu.TryLock() {
		if !wait {
			pending, err := count()
			if err == nil && pending+n > q.MaxSize {
				err = ErrFull
			}
			if err == nil {
				z.added.Add(n)
			}
			return err
		}
		z.mu.Lock()
	}
	defer z.mu.Unlock()
	fits := func() bool { return z.pending+z.added.Load()+n <= q.MaxSize }
	if z.at.IsZero() || time.Since(z.at) > time.Second || !fits() {
		at := time.Now()
		pending, err := count()
		if err != nil {
			return e.Unavailable(err)
		}
		z.pending, z.at = pending, at
		z.added.Store(0)
		if !fits() {
			return ErrFull
		}
	}
	z.added.Add(n)
	return nil
}

// Unavailable turns an error of a read outside of a flush into ErrNoConnection when that is what it means: nothing was done.
func (e *Engine) Unavailable(err error) error {
	if db.IsConnection(err) && !errors.Is(err, ErrUnknown) {
		return ErrNoConnection
	}
	return err
}
