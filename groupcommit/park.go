package groupcommit

import (
	"context"
	"slices"
	"sync"
	"time"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/metrics"
)

// parking is where pops wait that found nothing, and what is known about the groups they wait on.
//
// No wakeup is lost between a claim that finds nothing and its parking: what is committed after the claim's
// statement began is announced by hint, which gives it to a parked claim or keeps it in the group's hints; idle looks
// at those under the same lock before it parks.
type parking struct {
	e *Engine

	mu       sync.Mutex
	groups   map[int32]*parkedGroup
	byQueue  map[int32]map[int32]*parkedGroup
	queues   map[int32]*catalog.Queue // of queues that watchers may care about
	watchers []*watcher
	turns    map[turnKey]int32
	parked   int
}

// parkedGroup is a group that pops came for lately.
type parkedGroup struct {
	id, queue int32
	idle      []*claim           // on any partition, longest waiting first
	narrow    map[int64][]*claim // on one partition
	hints     []int64            // partitions with something to deliver that nobody was offered yet
	hinted    map[int64]bool
	scanFrom  int64 // where the next look at the index begins
	flushes   int
	partial   bool      // see took
	empty     time.Time // when a look at the whole index last found nothing; zero once there has been a sign of anything
	looks     int       // how often all its claims were sent to look: those on a flush then look again
	bulk      int       // how often its cursors changed in bulk: claims on one partition then look again
	indexed   time.Time // when the index last went first
	used      time.Time
	check     backoff
}

// backoff spaces the re-checks of something parked.
type backoff struct {
	next  time.Time
	empty int
}

func (b *backoff) reset(r Recheck) { b.empty, b.next = 0, time.Now().Add(r.Initial) }

func (b *backoff) miss(r Recheck, leased bool) {
	b.empty++
	d := r.Initial
	for range min(max(b.empty-r.Threshold+1, 0), 64) {
		d = min(time.Duration(float64(d)*r.Multiplier), r.Max)
	}
	if leased { // only leases to end: those are looked at once a second
		d = max(d, time.Second)
	}
	b.next = time.Now().Add(d)
}

// watcher is a pop that waits for a sign to start over rather than for a claim: on discovery, or on a partition that doesn't exist yet.
type watcher struct {
	queue     int32         // 0: any in scope
	name      string        // of the queue
	scope     catalog.Scope // when queue is 0
	group     string
	partition string // the one that doesn't exist yet
	check     backoff
	sign      chan struct{}
}

const maxHints = 4096 // per group; what is dropped is found by the next look at the index

func newParking(e *Engine) *parking {
	return &parking{e: e, groups: make(map[int32]*parkedGroup), byQueue: make(map[int32]map[int32]*parkedGroup), queues: make(map[int32]*catalog.Queue), turns: make(map[turnKey]int32)}
}

func (p *parking) group(g *catalog.Group) *parkedGroup {
	pg := p.groups[g.ID]
	if pg == nil {
		pg = &parkedGroup{id: g.ID, queue: g.QueueID, narrow: make(map[int64][]*claim), hinted: make(map[int64]bool)}
		p.groups[g.ID] = pg
		if p.byQueue[g.QueueID] == nil {
			p.byQueue[g.QueueID] = make(map[int32]*parkedGroup)
		}
		p.byQueue[g.QueueID][g.ID] = pg
	}
	pg.used = time.Now()
	return pg
}

// enter makes the group known before its first claim looks, so that hints are kept for it. It returns the group's bulk.
func (p *parking) enter(g *catalog.Group) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.group(g).bulk
}

// seen remembers a queue for the scopes of watchers.
func (p *parking) seen(q *catalog.Queue) {
	p.mu.Lock()
	if len(p.watchers) > 0 {
		p.queues[q.ID] = q
	}
	p.mu.Unlock()
}

// forget drops a queue that changed: until it is seen again it may be in any scope.
func (p *parking) forget(queue int32) {
	p.mu.Lock()
	delete(p.queues, queue)
	p.mu.Unlock()
}

// idle parks a claim that found nothing, ends it when it does not want to wait, or sends it off again when hints have come meanwhile.
func (p *parking) idle(c *claim) {
	p.mu.Lock()
	if p.e.over() {
		p.mu.Unlock()
		c.finish(p.e, nil, nil)
		return
	}
	c.mu.Lock()
	over := c.left || c.finished
	c.mu.Unlock()
	if !c.wait || over {
		p.mu.Unlock()
		c.finish(p.e, nil, nil)
		return
	}
	g := p.group(c.group)
	if c.partition == nil && len(g.hints) > 0 {
		hint := g.pop()
		if c.group.Limited() {
			g.unhint() // or a claim that may not have anything now would go once for each
		} else {
			c.hints = []int64{hint}
		}
		p.mu.Unlock()
		p.board(c, c.group.Limited())
		return
	}
	if c.partition != nil && g.hinted[c.partition.ID] {
		delete(g.hinted, c.partition.ID)
		g.hints = slices.DeleteFunc(g.hints, func(h int64) bool { return h == c.partition.ID })
		p.mu.Unlock()
		p.board(c, false)
		return
	}
	if c.partition != nil && c.bulk != g.bulk {
		c.bulk = g.bulk
		p.mu.Unlock()
		p.board(c, false)
		return
	}
	if c.partition == nil && c.looks != g.looks {
		p.mu.Unlock()
		p.board(c, true)
		return
	}
	if p.parked >= p.e.MaxParked && !c.admitted {
		p.mu.Unlock()
		c.finish(p.e, nil, ErrOverloaded)
		return
	}
	p.parked++
	c.admitted = true
	c.parkedAt = time.Now()
	if len(c.hints) > 0 { // a hint that led nowhere: whoever held the cursor may have left it
		g.check.reset(p.e.Recheck)
	}
	c.hints, c.tries, c.scan, c.thorough = nil, 0, false, false
	if c.partition != nil {
		g.narrow[c.partition.ID] = append(g.narrow[c.partition.ID], c)
	} else {
		if len(g.idle) == 0 && len(g.narrow) == 0 {
			g.check.reset(p.e.Recheck)
		}
		g.idle = append(g.idle, c)
	}
	if g.check.next.IsZero() {
		g.check.reset(p.e.Recheck)
	}
	p.mu.Unlock()
}

// board sends a claim that was parked to the dock.
func (p *parking) board(c *claim, scan bool) {
	c.scan = scan
	if !p.e.dock.enter(uint64(c.group.ID), func(b *board) { b.claims = append(b.claims, c) }) {
		c.finish(p.e, nil, ErrClosed)
	}
}

func (g *parkedGroup) pop() int64 {
	h := g.hints[0]
	g.hints = g.hints[1:]
	delete(g.hinted, h)
	return h
}

// unhint forgets all hints: who comes next looks at the index.
func (g *parkedGroup) unhint() {
	g.hints = nil
	clear(g.hinted)
}

func (g *parkedGroup) push(partition int64) {
	if g.hinted[partition] || len(g.hints) >= maxHints {
		return
	}
	g.empty = time.Time{}
	g.hinted[partition] = true
	g.hints = append(g.hints, partition)
}

// offer takes the parked claim that a partition with something to deliver goes to, or nil. With a limit on what is in flight any other
// may have something too, and it looks at the index: or one lane would come again with each settle while others wait.
func (p *parking) offer(g *parkedGroup, partition int64) *claim {
	if waiting := g.narrow[partition]; len(waiting) > 0 {
		c := waiting[0]
		if len(waiting) == 1 {
			delete(g.narrow, partition)
		} else {
			g.narrow[partition] = waiting[1:]
		}
		p.parked--
		return c
	}
	if len(g.idle) == 0 {
		return nil
	}
	c := g.idle[0]
	g.idle[0] = nil
	g.idle = g.idle[1:]
	if c.hints = nil; !c.group.Limited() {
		c.hints = []int64{partition}
	}
	p.parked--
	return c
}

// ride takes the parked claims that a flush is about to leave work for and puts them on that flush.
func (p *parking) ride(claims []*claim, h Hint) []*claim {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.each(h, func(g *parkedGroup) {
		if p.e.held.live(g.id, h.Partition) && h.Group == 0 {
			return // its holder will say when it is done
		}
		if c := p.offer(g, h.Partition); c != nil {
			c.scan = c.group.Limited()
			claims = append(claims, c)
		}
	})
	return claims
}

func (p *parking) each(h Hint, do func(*parkedGroup)) {
	if h.Group != 0 {
		if g := p.groups[h.Group]; g != nil {
			do(g)
		}
		return
	}
	for _, g := range p.byQueue[h.Queue] {
		do(g)
	}
}

// hint says that a partition has something to deliver: a parked claim goes for it, or the group's next claim will.
// Without a partition the whole group has changed: sought, or deleted.
// lists are the claims of the flush the hint comes from: they have been offered it.
func (p *parking) hint(h Hint, lists []*list) {
	if h.Partition == 0 {
		p.e.held.dropGroup(h.Group)
		p.look(h.Group)
		return
	}
	var claims []*claim
	p.mu.Lock()
	p.each(h, func(g *parkedGroup) {
		for _, l := range lists {
			if l.group.ID == g.id && slices.Contains(l.hints, h.Partition) {
				return
			}
		}
		if h.Group != 0 { // to one group, because its lease there has ended
			p.e.held.drop(g.id, h.Partition)
		} else if p.e.held.live(g.id, h.Partition) {
			return
		}
		if c := p.offer(g, h.Partition); c != nil {
			claims = append(claims, c)
		} else {
			g.push(h.Partition)
		}
		g.check.reset(p.e.Recheck)
	})
	if len(p.watchers) > 0 {
		p.signal(h)
	}
	p.mu.Unlock()
	for _, c := range claims {
		p.board(c, c.group.Limited())
	}
}

// refused forgets the hints of a group that is paused: they would be followed one by one. When it is not any more all look at the index.
func (p *parking) refused(group int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if g := p.groups[group]; g != nil {
		g.unhint()
	}
}

// left says that a claim of the group did not take all that a partition has, or did not get to look at it.
func (p *parking) left(group *catalog.Group, partition int64) {
	p.mu.Lock()
	g := p.groups[group.ID]
	var c *claim
	if g != nil && !p.e.held.live(g.id, partition) {
		if c = p.offer(g, partition); c == nil {
			g.push(partition)
		}
	}
	if len(p.watchers) > 0 {
		p.signal(Hint{Queue: group.QueueID, Group: group.ID, Partition: partition})
	}
	p.mu.Unlock()
	if c != nil {
		p.board(c, c.group.Limited())
	}
}

// passOn wakes others for what a claim was woken for that did not get to look.
func (p *parking) passOn(c *claim) {
	switch {
	case c.partition != nil:
		p.left(c.group, c.partition.ID)
	case len(c.hints) == 0:
		p.lookSome(c.group.ID, 1)
	}
	for _, h := range c.hints {
		p.left(c.group, h)
	}
}

// removed sends off what is parked on a partition that is gone: its claims find that out.
func (p *parking) removed(queue int32, partition int64) {
	var claims []*claim
	p.mu.Lock()
	for _, g := range p.byQueue[queue] {
		claims = append(claims, g.narrow[partition]...)
		p.parked -= len(g.narrow[partition])
		delete(g.narrow, partition)
	}
	p.mu.Unlock()
	for _, c := range claims {
		p.board(c, false)
	}
}

// takeIdle unparks up to n claims on any partition.
func (g *parkedGroup) takeIdle(p *parking, n int) []*claim {
	n = min(n, len(g.idle))
	out := slices.Clone(g.idle[:n])
	g.idle = g.idle[n:]
	p.parked -= n
	return out
}

// takeAll unparks up to n claims of a group.
func (g *parkedGroup) takeAll(p *parking, n int) []*claim {
	out := g.takeIdle(p, n)
	for partition, waiting := range g.narrow {
		out = append(out, waiting[0])
		p.parked--
		if len(waiting) == 1 {
			delete(g.narrow, partition)
		} else {
			g.narrow[partition] = waiting[1:]
		}
	}
	return out
}

// look makes parked claims of a group look at the index: its cursors changed in bulk.
func (p *parking) look(group int32) {
	p.mu.Lock()
	g := p.groups[group]
	var claims []*claim
	if g != nil {
		g.changed()
		claims = g.takeAll(p, len(g.idle))
	}
	for _, w := range p.watchers {
		w.signal()
	}
	p.mu.Unlock()
	for _, c := range claims {
		p.board(c, true)
	}
}

// changed makes the claims of a group that are on a flush look again before they park.
func (g *parkedGroup) changed() {
	g.looks++
	g.bulk++
	g.empty = time.Time{}
}

// gone ends the parked claims of a group that was deleted, or only those on one partition, which may be what is gone. Their pops start
// over: with a first contact.
func (p *parking) gone(group int32, partition int64) {
	p.mu.Lock()
	var claims []*claim
	if g := p.groups[group]; g != nil {
		if partition == 0 {
			g.changed()
			claims = g.takeIdle(p, len(g.idle))
		}
		for id, waiting := range g.narrow {
			if partition == 0 || id == partition {
				claims = append(claims, waiting...)
				p.parked -= len(waiting)
				delete(g.narrow, id)
			}
		}
	}
	for _, w := range p.watchers {
		w.signal()
	}
	p.mu.Unlock()
	for _, c := range claims {
		c.finish(p.e, nil, catalog.ErrGone)
	}
}

// stillEmpty is how long a look at the index that found nothing counts for the next pops of the group.
const stillEmpty = time.Second

// parkAtOnce parks a waiting claim without a look, when one has just found the group empty and no other broker is alive whose
// doings could have gone unnoticed since. A third of the flushes of sparse traffic were such looks: the pop after each ack.
func (p *parking) parkAtOnce(c *claim) bool {
	if !c.wait || c.partition != nil || p.e.Alone == nil || !p.e.Alone() {
		return false
	}
	p.mu.Lock()
	g := p.group(c.group)
	empty := time.Since(g.empty) < stillEmpty
	c.looks = g.looks
	p.mu.Unlock()
	if empty {
		p.idle(c)
	}
	return empty
}

// emptied notes a look at the whole index, begun at that time, that found nothing.
func (p *parking) emptied(group int32, looks int, at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if g := p.groups[group]; g != nil && g.looks == looks && len(g.hints) == 0 {
		g.empty = at
	}
}

// lookSome makes some parked claims look: a flush has locked more than it took, which others may have passed over meanwhile.
func (p *parking) lookSome(group int32, n int) {
	p.mu.Lock()
	var claims []*claim
	if g := p.groups[group]; g != nil {
		g.looks++
		g.empty = time.Time{}
		claims = g.takeIdle(p, n)
	}
	p.mu.Unlock()
	for _, c := range claims {
		p.board(c, true)
	}
}

// lookQueue does the same for all groups of a queue.
func (p *parking) lookQueue(queue int32) {
	p.mu.Lock()
	var groups []int32
	for id := range p.byQueue[queue] {
		groups = append(groups, id)
	}
	p.mu.Unlock()
	for _, id := range groups {
		p.look(id)
	}
}

// lookAll makes the re-check look at everything that is parked, now.
func (p *parking) lookAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.groups {
		g.check = backoff{next: time.Now()}
	}
	for _, w := range p.watchers {
		w.signal()
	}
}

// withdraw takes a claim out of the parking; false when it is riding.
func (p *parking) withdraw(c *claim) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	g := p.groups[c.group.ID]
	if g == nil {
		return false
	}
	if c.partition != nil {
		waiting := g.narrow[c.partition.ID]
		if i := slices.Index(waiting, c); i >= 0 {
			if waiting = slices.Delete(waiting, i, i+1); len(waiting) == 0 {
				delete(g.narrow, c.partition.ID)
			} else {
				g.narrow[c.partition.ID] = waiting
			}
			p.parked--
			c.unpark(time.Now())
			return true
		}
		return false
	}
	if i := slices.Index(g.idle, c); i >= 0 {
		g.idle = slices.Delete(g.idle, i, i+1)
		p.parked--
		c.unpark(time.Now())
		return true
	}
	return false
}

// ParkedPops is how many pops wait on each queue. Queues of other projects have no name here.
func (e *Engine) ParkedPops() []metrics.Parked {
	p := e.park
	p.mu.Lock()
	defer p.mu.Unlock()
	found := make(map[int32]*metrics.Parked)
	add := func(queue int32, name string, n int) {
		if found[queue] == nil {
			found[queue] = &metrics.Parked{Queue: queue, Name: name}
		}
		found[queue].Pops += int64(n)
	}
	for _, g := range p.groups {
		if len(g.idle) > 0 {
			add(g.queue, e.nameOf(g.idle[0]), len(g.idle))
		}
		for _, waiting := range g.narrow {
			add(g.queue, e.nameOf(waiting[0]), len(waiting))
		}
	}
	for _, w := range p.watchers {
		add(w.queue, w.name, 1)
	}
	all := make([]metrics.Parked, 0, len(found))
	for _, x := range found {
		all = append(all, *x)
	}
	return all
}

// nameOf is the name of the queue that a claim is on.
func (e *Engine) nameOf(c *claim) string {
	name, project := "", e.Project
	if c.group.Lanes != nil { // a receive knows its subscription only
		name, project = c.group.Lanes.Stream, c.group.Project
	} else if c.queue != nil {
		name, project = c.queue.Name, c.queue.ProjectID
	}
	if project != e.Project {
		return ""
	}
	return name
}

// endAll answers every parked claim. p.mu is held.
func (p *parking) endAll(err error) {
	for _, g := range p.groups {
		for _, c := range g.takeAll(p, len(g.idle)) {
			c.finish(p.e, nil, err)
		}
		for len(g.narrow) > 0 {
			for _, c := range g.takeAll(p, 0) {
				c.finish(p.e, nil, err)
			}
		}
	}
	for _, w := range p.watchers {
		w.signal()
	}
}

// arrange says where a list looks: from which partition in the index, whether the index goes before the hints, and the hints. It takes out
// the claims that ClaimHinted serves, with a hint for each, and returns them as a list of their own; nil: there are none. taken is what such
// claims of this flush are about.
// At least every 8th flush and every 100 ms the index goes first: hot partitions must not starve a backlog nobody hints at.
func (p *parking) arrange(l *list, taken map[cursorKey]bool, now time.Time) (quick *list) {
	p.mu.Lock()
	defer p.mu.Unlock()
	g := p.group(l.group)
	l.looks = g.looks
	offered := false
	for _, c := range l.claims {
		c.looks = g.looks
		l.scan = l.scan || c.scan && l.partition == 0
		offered = offered || len(c.hints) > 0
	}
	if l.scan && !offered {
		g.flushes++
		if g.flushes%8 == 0 || now.Sub(g.indexed) >= 100*time.Millisecond {
			// And alone: what is looked at is locked, and not to be had for others, also where it is more than is wanted.
			g.indexed = now
			l.indexFirst = true
		}
	}
	if !l.indexFirst {
		quick = g.quick(l, taken)
	}
	l.scan = false
	for _, c := range l.claims {
		parts := min(c.parts, c.budget)
		if c.tries > 0 { // the first candidates had nothing to deliver: look at more
			parts = max(parts, int64(32)<<min(c.tries, 5))
		}
		l.want = min(l.want+parts, 10_000)
		l.scan = l.scan || c.scan && l.partition == 0
	}
	if l.partition != 0 {
		l.from, l.hints = -l.partition, []int64{l.partition}
		return quick
	}
	l.from = g.scanFrom
	for _, c := range l.claims {
		l.hints = append(l.hints, c.hints...)
	}
	for !l.indexFirst && len(l.hints) < int(l.want) && len(g.hints) > 0 {
		l.hints = append(l.hints, g.pop())
	}
	return quick
}

func (g *parkedGroup) quick(l *list, taken map[cursorKey]bool) *list {
	q := &list{group: l.group, partition: l.partition, began: l.began, looks: l.looks}
	rest := l.claims[:0:0]
	for _, c := range l.claims {
		k := cursorKey{l.group.ID, l.partition}
		switch {
		case !c.quick():
			k.partition = 0
		case l.partition != 0:
		case len(c.hints) > 0:
			k.partition = c.hints[0]
		case len(g.hints) > 0:
			k.partition = g.pop()
		}
		if k.partition == 0 || taken[k] {
			rest = append(rest, c)
			continue
		}
		taken[k] = true
		q.claims, q.hints = append(q.claims, c), append(q.hints, k.partition)
	}
	l.claims = rest
	if len(q.claims) == 0 {
		return nil
	}
	return q
}

// giveBack returns the hints of a flush that failed.
func (p *parking) giveBack(lists []*list) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, l := range lists {
		if g := p.groups[l.group.ID]; g != nil && l.partition == 0 {
			for _, h := range l.hints {
				g.push(h)
			}
		}
	}
}

// took notes whether the group's claims lately ended in the middle of segments.
func (p *parking) took(group int32, partial bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if g := p.groups[group]; g != nil {
		g.partial = partial
	}
}

func (p *parking) partial(group int32) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	g := p.groups[group]
	return g != nil && g.partial
}

// partials says whether a group of the queue takes its segments in parts.
func (p *parking) partials(queue int32) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.byQueue[queue] {
		if g.partial {
			return true
		}
	}
	return false
}

// scanned moves the rotating position behind what the last look at the index returned.
func (p *parking) scanned(group int32, above, below int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	g := p.groups[group]
	if g == nil {
		return
	}
	if below > 0 {
		g.scanFrom = below
	} else if above > 0 {
		g.scanFrom = above
	}
}

func (w *watcher) signal() {
	select {
	case w.sign <- struct{}{}:
	default:
	}
}

// watch registers a watcher; false when too many pops are parked.
func (p *parking) watch(w *watcher) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.parked >= p.e.MaxParked {
		return false
	}
	p.parked++
	w.sign = make(chan struct{}, 1)
	w.check.reset(p.e.Recheck)
	p.watchers = append(p.watchers, w)
	return true
}

// unwatch removes a watcher; a sign it did not use goes to the next one.
func (p *parking) unwatch(w *watcher) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.parked--
	if i := slices.Index(p.watchers, w); i >= 0 {
		p.watchers = slices.Delete(p.watchers, i, i+1)
	}
	if len(p.watchers) == 0 {
		clear(p.queues)
	}
	select {
	case <-w.sign:
		for _, x := range p.watchers {
			if x.queue == w.queue && x.scope == w.scope && x.group == w.group && x.partition == w.partition {
				x.signal()
				return
			}
		}
	default:
	}
}

// signal wakes one watcher per (scope, group) that a hint concerns. p.mu is held.
func (p *parking) signal(h Hint) {
	type kind struct {
		queue int32
		scope catalog.Scope
		group string
	}
	woken := make(map[kind]bool)
	q := p.queues[h.Queue]
	for _, w := range p.watchers {
		k := kind{w.queue, w.scope, w.group}
		if woken[k] || w.partition != "" || (w.queue != 0 && w.queue != h.Queue) || (w.queue == 0 && q != nil && !w.scope.Covers(q)) {
			continue
		}
		if len(w.sign) == 0 {
			woken[k] = true
			w.signal()
		}
	}
}

// appeared wakes who waits for a partition that did not exist: for that one, or, when its name is not known, for any of the queue.
func (p *parking) appeared(queue int32, partition string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range p.watchers {
		if w.queue == queue && w.partition != "" && (partition == "" || w.partition == partition) {
			w.signal()
		}
	}
}

// recheckLoop looks, in one statement per tick for all of them, whether parked claims have something that no hint told:
// ended leases, and what another broker did when its hint was lost.
func (e *Engine) recheckLoop() {
	defer e.workers.Done()
	tick := max(min(e.Recheck.Initial, 100*time.Millisecond), time.Millisecond)
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		select {
		case <-e.stop.Done():
			return
		case <-ticker.C:
			e.park.recheck(e.stop)
		}
	}
}

func (p *parking) recheck(stop context.Context) {
	now := time.Now()
	groups, narrow := db.ReadyGroupsParams{}, db.ReadyPartitionsParams{}
	p.mu.Lock()
	for id, g := range p.groups {
		if len(g.idle) == 0 && len(g.narrow) == 0 {
			if now.Sub(g.used) > 5*time.Minute {
				delete(p.groups, id)
				if delete(p.byQueue[g.queue], id); len(p.byQueue[g.queue]) == 0 {
					delete(p.byQueue, g.queue)
				}
			}
			continue
		}
		g.used = now
		if now.Before(g.check.next) {
			continue
		}
		if len(g.idle) > 0 {
			groups.Ids = append(groups.Ids, id)
			groups.Wants = append(groups.Wants, int64(min(len(g.idle), 100)))
		}
		for partition := range g.narrow {
			narrow.GroupIds = append(narrow.GroupIds, id)
			narrow.PartitionIds = append(narrow.PartitionIds, partition)
		}
		if len(g.idle) == 0 {
			g.check.miss(p.e.Recheck, false)
		}
	}
	for _, w := range p.watchers {
		if !now.Before(w.check.next) {
			w.check.miss(p.e.Recheck, false)
			w.signal()
		}
	}
	p.mu.Unlock()
	if len(groups.Ids)+len(narrow.GroupIds) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(stop, p.e.StatementTimeout+connectTimeout)
	defer cancel()
	ready, err := []db.ReadyGroupsRow(nil), error(nil)
	if len(groups.Ids) > 0 {
		ready, err = p.e.q.ReadyGroups(ctx, groups)
	}
	var single []db.ReadyPartitionsRow
	if err == nil && len(narrow.GroupIds) > 0 {
		single, err = p.e.q.ReadyPartitions(ctx, narrow)
	}
	var claims []*claim
	p.mu.Lock()
	switch {
	case err != nil && stop.Err() == nil:
		// A failed re-check ends the polls it was for: an outage must not look like an idle queue.
		for _, id := range append(groups.Ids, narrow.GroupIds...) {
			if g := p.groups[id]; g != nil {
				claims = append(claims, g.takeAll(p, len(g.idle))...)
			}
		}
	case err == nil:
		for _, r := range ready {
			g := p.groups[r.ID]
			if g == nil {
				continue
			}
			if r.Ready == 0 {
				g.check.miss(p.e.Recheck, r.Pending)
				continue
			}
			g.check.reset(p.e.Recheck)
			for n := int64(0); n < r.Ready && len(g.idle) > 0; n++ {
				claims = append(claims, g.idle[0])
				g.idle = g.idle[1:]
				p.parked--
			}
		}
		for _, r := range single {
			if g := p.groups[r.GroupID]; g != nil && len(g.narrow[r.PartitionID]) > 0 {
				claims = append(claims, p.offer(g, r.PartitionID))
			}
		}
	}
	p.mu.Unlock()
	if err != nil {
		if stop.Err() == nil {
			p.e.Log.Warn("looking for work of parked pops failed", "error", db.Text(err))
		}
		for _, c := range claims {
			c.finish(p.e, nil, p.e.Unavailable(err))
		}
		return
	}
	for _, c := range claims {
		p.board(c, c.partition == nil)
	}
}

// turn is the group a discovery scope was last served from, so that the next look begins behind it.
func (p *parking) turn(s catalog.Scope, group string) int32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.turns[turnKey{s, group}]
}

func (p *parking) turned(s catalog.Scope, group string, id int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.turns) > 10_000 {
		clear(p.turns)
	}
	p.turns[turnKey{s, group}] = id
}

type turnKey struct {
	scope catalog.Scope
	group string
}
