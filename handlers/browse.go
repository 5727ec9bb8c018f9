package handlers

import (
	"cmp"
	"container/heap"
	"context"
	"slices"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/db"
)

// The states of a message.
const (
	statusPending    = "pending"
	statusProcessing = "processing"
	statusCompleted  = "completed"
	statusDead       = "dead_letter"
)

// walk cuts one page of messages out of a snapshot, newest first: by createdAt, then partition, then offset.
//
// There is no index over the time of messages. But time does not go back within a partition, and its last push is a bound
// for all of it. So partitions are met in the order of their last push, each is walked backwards along its primary key, and
// the heads are merged; what is older than the page is never looked at.
type walk struct {
	q        *db.Queries // of the snapshot
	project  int32
	queues   []int32 // nil: all of the project
	name     string  // of partitions; empty: all
	status   string  // empty: all
	from, to time.Time
	want     int64 // messages from the first to the end of the page

	lanes  laneHeap
	bound  time.Time // nothing in a partition not met yet is newer
	after  int64
	chunk  int64
	end    time.Time
	all    bool                // no partition is left to meet
	places map[int64]*standing // partitions of which it is known where the groups stand
	dead   map[deadKey]bool    // dead-lettered offsets of what has been read
}

type deadKey struct{ partition, offset int64 }

// stretch is offsets [lo, hi).
type stretch struct{ lo, hi int64 }

// lane is a partition being walked from its newest message back.
type lane struct {
	id    int64
	parts []stretch // what is left to read of it, newest first
	runs  []run     // what has been read and is not used yet, newest first
	step  int64     // segments to read next
}

// run is messages [lo, hi) of one segment, all of them asked for.
type run struct {
	lane      int64
	base      int64
	count     int32
	createdAt time.Time
	firstID   uuid.UUID
	keyNo     int16
	codec     int16
	size      int64
	lo, hi    int64
}

type laneHeap []*lane

func (h laneHeap) Len() int           { return len(h) }
func (h laneHeap) Less(i, j int) bool { return h[i].compare(h[j]) < 0 }
func (h laneHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *laneHeap) Push(x any)        { *h = append(*h, x.(*lane)) }
func (h *laneHeap) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	*h = (*h)[:last]
	return x
}

func (l *lane) compare(o *lane) int {
	return cmp.Or(o.runs[0].createdAt.Compare(l.runs[0].createdAt), cmp.Compare(l.id, o.id))
}

const (
	firstChunk = 200              // partitions met at first
	lastChunk  = 10_000           // and at most at a time
	maxStep    = 1000             // segments of one partition read at a time
	maxAhead   = 200_000          // and of all, beyond a few each
	maxWalk    = 30 * time.Second // a snapshot that is held for long slows everybody's updates
)

// errTooDeep: an offset so deep, or a state so rare, that it cannot be found in time.
var errTooDeep = failed("query failed")

// page returns the runs of messages [offset, offset + limit) of the order, newest first.
func (w *walk) page(ctx context.Context, offset, limit int64) (page []run, err error) {
	w.want, w.bound, w.chunk = offset+limit, w.to, firstChunk
	w.places, w.dead, w.end = map[int64]*standing{}, map[deadKey]bool{}, time.Now().Add(maxWalk)
	for limit > 0 {
		for !w.all && (len(w.lanes) == 0 || !w.lanes[0].runs[0].createdAt.After(w.bound)) {
			if err := w.meet(ctx); err != nil {
				return nil, err
			}
		}
		if len(w.lanes) == 0 {
			break
		}
		l := w.lanes[0]
		r := l.runs[0]
		l.runs = l.runs[1:]
		n := r.hi - r.lo
		if skip := min(n, offset); skip > 0 {
			offset, r.hi = offset-skip, r.hi-skip
		}
		if take := min(r.hi-r.lo, limit); take > 0 {
			limit, r.lo = limit-take, r.hi-take
			page = append(page, r)
		}
		if len(l.runs) == 0 {
			if err := w.read(ctx, []*lane{l}); err != nil {
				return nil, err
			}
		}
		if len(l.runs) == 0 {
			heap.Pop(&w.lanes)
		} else {
			heap.Fix(&w.lanes, 0)
		}
	}
	return page, w.judge(ctx, page)
}

// meet adds the partitions that were pushed to next before those met so far.
func (w *walk) meet(ctx context.Context) error {
	var rows []db.BrowseAllRow
	before := w.bound
	if w.after == 0 { // the first: last pushes may lie beyond the range
		before = time.Date(200_000, 1, 1, 0, 0, 0, 0, time.UTC)
	}
	switch {
	case w.name != "":
		found, err := w.q.BrowseNamed(ctx, db.BrowseNamedParams{ToTime: w.to, QueueIds: w.queues, Name: w.name, FromTime: w.from, BeforeTime: before, AfterID: w.after, Max: w.chunk})
		if err != nil {
			return err
		}
		for _, r := range found {
			rows = append(rows, db.BrowseAllRow(r))
		}
	case w.queues != nil:
		found, err := w.q.BrowseOfQueues(ctx, db.BrowseOfQueuesParams{ToTime: w.to, QueueIds: w.queues, FromTime: w.from, BeforeTime: before, AfterID: w.after, Max: w.chunk})
		if err != nil {
			return err
		}
		for _, r := range found {
			rows = append(rows, db.BrowseAllRow(r))
		}
	default:
		var err error
		if rows, err = w.q.BrowseAll(ctx, db.BrowseAllParams{ToTime: w.to, ProjectID: w.project, FromTime: w.from, BeforeTime: before, AfterID: w.after, Max: w.chunk}); err != nil {
			return err
		}
	}
	w.all = int64(len(rows)) < w.chunk
	if len(rows) == 0 {
		return nil
	}
	w.bound, w.after = rows[len(rows)-1].LastPushAt, rows[len(rows)-1].ID
	w.chunk = min(w.chunk*4, lastChunk)

	// The fewer there are, the more of each is likely to be on the page.
	step := min(max(2*w.want/int64(len(rows)), 2), maxStep)
	var fresh []*lane
	for _, r := range rows {
		fresh = append(fresh, &lane{id: r.ID, step: step, parts: []stretch{{r.FirstOffset, max(r.FirstOffset, r.EndOffset)}}}) // the end may lie in what is removed
	}
	if w.status != "" {
		if err := w.stand(ctx, fresh); err != nil {
			return err
		}
		for _, l := range fresh {
			l.parts = w.places[l.id].parts(w.status, l.parts[0])
		}
	}
	if err := w.read(ctx, fresh); err != nil {
		return err
	}
	for _, l := range fresh {
		if len(l.runs) > 0 {
			w.lanes = append(w.lanes, l)
		}
	}
	// Each lane gives a message at least, so that of more lanes than the page wants messages only the newest can matter.
	if int64(len(w.lanes)) > w.want {
		slices.SortFunc(w.lanes, (*lane).compare)
		clear(w.lanes[w.want:])
		w.lanes = w.lanes[:w.want]
	}
	heap.Init(&w.lanes)
	return nil
}

// read reads on in lanes until each has a run or nothing is left of it.
func (w *walk) read(ctx context.Context, lanes []*lane) error {
	for {
		var open []*lane
		var p db.BrowseSegmentsParams
		for _, l := range lanes {
			for len(l.parts) > 0 && l.parts[0].lo >= l.parts[0].hi {
				l.parts = l.parts[1:]
			}
			if len(l.runs) > 0 || len(l.parts) == 0 {
				continue
			}
			open = append(open, l)
			p.PartitionIds, p.Lows = append(p.PartitionIds, l.id), append(p.Lows, l.parts[0].lo)
			p.Befores, p.Maxima = append(p.Befores, l.parts[0].hi), append(p.Maxima, l.step)
		}
		if len(open) == 0 {
			return nil
		}
		if time.Now().After(w.end) {
			return errTooDeep
		}
		var got []run // in the order of open, newest first
		var of []int
		if w.status == statusDead {
			rows, err := w.q.BrowseDeadSegments(ctx, db.BrowseDeadSegmentsParams(p))
			if err != nil {
				return err
			}
			for _, r := range rows {
				of = append(of, int(r.N)-1)
				got = append(got, run{base: r.BaseOffset, count: r.Count, createdAt: r.CreatedAt, firstID: r.FirstID, keyNo: r.KeyNo, codec: r.Codec, size: r.Size,
					lo: r.MessageOffset, hi: min(r.MessageOffset+1, r.BaseOffset+int64(r.Count))}) // empty in a hole
			}
		} else {
			rows, err := w.q.BrowseSegments(ctx, p)
			if err != nil {
				return err
			}
			for _, r := range rows {
				of = append(of, int(r.N)-1)
				got = append(got, run{base: r.BaseOffset, count: r.Count, createdAt: r.CreatedAt, firstID: r.FirstID, keyNo: r.KeyNo, codec: r.Codec, size: r.Size,
					lo: r.BaseOffset, hi: r.BaseOffset + int64(r.Count)})
			}
		}
		counts := make([]int64, len(open))
		for i := range got {
			r, l := &got[i], open[of[i]]
			counts[of[i]]++
			r.lane = l.id
			if len(l.parts) == 0 {
				continue // older than the range
			}
			if r.createdAt.Before(w.from) {
				l.parts = nil
				continue
			}
			part := &l.parts[0]
			r.lo, r.hi = max(r.lo, part.lo), min(r.hi, part.hi)
			part.hi = r.lo
			if r.lo < r.hi {
				l.runs = append(l.runs, *r)
			}
		}
		for i, l := range open {
			if len(l.parts) > 0 && counts[i] < l.step {
				l.parts = l.parts[1:]
			}
			l.step = min(l.step*4, maxStep, max(maxAhead/int64(len(w.lanes)+len(lanes)), 2))
		}
		if w.status != "" && w.status != statusDead {
			if err := w.withoutDead(ctx, open); err != nil {
				return err
			}
		}
	}
}

// withoutDead takes the dead-lettered messages out of what was read.
func (w *walk) withoutDead(ctx context.Context, lanes []*lane) error {
	var all []run
	for _, l := range lanes {
		all = append(all, l.runs...)
	}
	if err := w.findDead(ctx, all); err != nil {
		return err
	}
	for _, l := range lanes {
		var left []run
		for _, r := range l.runs {
			for end := r.hi; end > r.lo; {
				for end > r.lo && w.dead[deadKey{l.id, end - 1}] {
					end--
				}
				live := r
				live.hi = end
				for end > r.lo && !w.dead[deadKey{l.id, end - 1}] {
					end--
				}
				if live.lo = end; live.lo < live.hi {
					left = append(left, live)
				}
			}
		}
		l.runs = left
	}
	return nil
}

// findDead remembers which messages of runs have dead letters.
func (w *walk) findDead(ctx context.Context, runs []run) error {
	var p db.BrowseDeadParams
	for _, r := range runs {
		p.PartitionIds, p.Lows, p.Befores = append(p.PartitionIds, r.lane), append(p.Lows, r.lo), append(p.Befores, r.hi)
	}
	if len(runs) == 0 {
		return nil
	}
	rows, err := w.q.BrowseDead(ctx, p)
	for _, r := range rows {
		w.dead[deadKey{runs[r.N-1].lane, r.MessageOffset}] = true
	}
	return err
}

// judge makes sure that the states of a page are known.
func (w *walk) judge(ctx context.Context, page []run) error {
	var lanes []*lane
	for _, r := range page {
		lanes = append(lanes, &lane{id: r.lane})
	}
	if err := w.stand(ctx, lanes); err != nil {
		return err
	}
	return w.findDead(ctx, page)
}

// stand reads where the groups stand in partitions.
func (w *walk) stand(ctx context.Context, lanes []*lane) error {
	var ids []int64
	for _, l := range lanes {
		if w.places[l.id] == nil {
			w.places[l.id] = &standing{}
			ids = append(ids, l.id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	rows, err := w.q.BrowseCursors(ctx, db.BrowseCursorsParams{PartitionIds: ids})
	for _, r := range rows {
		w.places[r.PartitionID].add(r)
	}
	return err
}

// standing is a partition and where the groups of its queue stand in it.
type standing struct {
	publicID  uuid.UUID
	partition string
	queue     int32
	groups    []position
}

// position is one group's: everything below committed is finished, [committed, leased) is under a live lease until then.
type position struct {
	group             string
	committed, leased int64
	until             time.Time
}

func (p *standing) add(r db.BrowseCursorsRow) {
	p.publicID, p.partition, p.queue = r.PublicID, r.PartitionName, r.QueueID
	if r.Name == "" {
		return // the queue has no groups
	}
	g := position{group: r.Name}
	if r.Committed != nil {
		g.committed = *r.Committed
	}
	if r.Live {
		g.leased, g.until = *r.BatchEnd, *r.LeaseUntil
	}
	p.groups = append(p.groups, g)
}

func (g *position) leases(offset int64) bool { return offset >= g.committed && offset < g.leased }

// consumed is how many of the named groups have passed a message, and how many there are.
func (p *standing) consumed(offset int64) (passed, named int) {
	for i := range p.groups {
		if g := &p.groups[i]; g.group != catalog.QueueMode {
			named++
			if offset < g.committed {
				passed++
			}
		}
	}
	return passed, named
}

// status is the state of a message that has no dead letter.
func (p *standing) status(offset int64) string {
	passed, named := p.consumed(offset)
	if named == 0 {
		return p.queueStatus(offset)
	}
	if passed == named {
		return statusCompleted
	}
	if !p.leaseEnd(offset).IsZero() {
		return statusProcessing
	}
	return statusPending
}

// queueStatus is the state as queue mode alone sees it.
func (p *standing) queueStatus(offset int64) string {
	for i := range p.groups {
		if g := &p.groups[i]; g.group == catalog.QueueMode {
			if offset < g.committed {
				return statusCompleted
			}
			if g.leases(offset) {
				return statusProcessing
			}
		}
	}
	return statusPending
}

// leaseEnd is when the last live lease over a message ends.
func (p *standing) leaseEnd(offset int64) (end time.Time) {
	for i := range p.groups {
		if g := &p.groups[i]; g.leases(offset) && g.until.After(end) {
			end = g.until
		}
	}
	return end
}

// parts are the stretches of a whole where messages without a dead letter have a status, newest first.
// With dead_letter it is the whole: those are found by their offsets.
func (p *standing) parts(status string, whole stretch) (parts []stretch) {
	if status == statusDead {
		return []stretch{whole}
	}
	edges := []int64{whole.lo, whole.hi}
	for _, g := range p.groups {
		for _, e := range []int64{g.committed, g.leased} {
			if e > whole.lo && e < whole.hi {
				edges = append(edges, e)
			}
		}
	}
	slices.Sort(edges)
	edges = slices.Compact(edges)
	for i := len(edges) - 2; i >= 0; i-- {
		if p.status(edges[i]) != status {
			continue
		}
		if n := len(parts); n > 0 && parts[n-1].lo == edges[i+1] {
			parts[n-1].lo = edges[i]
		} else {
			parts = append(parts, stretch{edges[i], edges[i+1]})
		}
	}
	return parts
}
