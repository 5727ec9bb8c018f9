package groupcommit

import (
	"context"
	"errors"
	"math/bits"
	"sync"
	"time"

	"ferrymq/catalog"
	"ferrymq/db"
)

type partitionKey struct {
	queue int32
	name  string
}

func keyOf(p *catalog.Partition) partitionKey { return partitionKey{p.QueueID, p.Name} }

// board is what waits for the next departure.
type board struct {
	pushes   []*Push
	settles  []*settle
	restores []*restore
	extends  []*extend
	claims   []*claim
	since    time.Time // when the oldest boarded
	again    bool      // it failed before: nobody else gets on
}

func (b *board) size() int {
	return len(b.pushes) + len(b.settles) + len(b.restores) + len(b.extends) + len(b.claims)
}

// fail answers everything on the board.
func (b *board) fail(e *Engine, err error) {
	for _, p := range b.pushes {
		p.finish(e, err)
	}
	for _, s := range b.settles {
		s.finish(err)
	}
	for _, x := range b.extends {
		x.finish(err)
	}
	for _, c := range b.claims {
		c.finish(e, nil, err)
	}
}

// halves splits a board of two or more so that one poison operation is found and fails alone.
func (b *board) halves() (x, y *board) {
	x, y = &board{since: b.since, again: true}, &board{since: b.since, again: true}
	room := b.size() / 2
	x.pushes, y.pushes = upTo(&room, b.pushes)
	x.settles, y.settles = upTo(&room, b.settles)
	x.restores, y.restores = upTo(&room, b.restores)
	x.extends, y.extends = upTo(&room, b.extends)
	x.claims, y.claims = upTo(&room, b.claims)
	return x, y
}

func upTo[T any](room *int, s []T) (a, b []T) {
	n := min(*room, len(s))
	*room -= n
	return s[:n:n], s[n:]
}

// lanes is how many ways the dock is divided: a flight takes whole lanes, and what boards a lane that is in flight waits for its return.
const lanes = 64

// crowd is how many operations must wait before a flight leaves while another is in the air. Fewer are cheaper carried together,
// a little later, by the next one: a flush has a fixed cost, and on a small machine two half-empty ones cost both latency and throughput.
const crowd = 48

// dock is where operations board.
type dock struct {
	mu     sync.Mutex
	turn   *sync.Cond // a flight may leave
	next   [lanes]board
	filled uint64 // lanes with something on board
	away   uint64 // lanes in flight
	flying int
	closed bool
	sides  map[partitionKey]*side // partitions that work alone for a while
}

// flusher flies: it takes what boarded and sends it, one flush after the other.
type flusher struct {
	e       *Engine
	scratch builders
}

func newDock() *dock {
	d := &dock{sides: make(map[partitionKey]*side)}
	d.turn = sync.NewCond(&d.mu)
	return d
}

// enter adds to the board of a lane. It reports false when the dock has closed.
func (d *dock) enter(lane uint64, add func(*board)) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return false
	}
	d.put(lane, add)
	if d.ready() {
		d.turn.Signal()
	}
	return true
}

func (d *dock) put(lane uint64, add func(*board)) {
	b := &d.next[lane%lanes]
	if b.size() == 0 {
		b.since = time.Now()
		d.filled |= 1 << (lane % lanes)
	}
	add(b)
}

// ready says whether a flight may leave: the only one at once, another one when it is worth its while.
func (d *dock) ready() bool {
	free := d.filled &^ d.away
	if free == 0 || d.flying == 0 {
		return free != 0
	}
	n := 0
	for ; free != 0; free &= free - 1 {
		if n += d.next[bits.TrailingZeros64(free)].size(); n >= crowd {
			return true
		}
	}
	return false
}

// take boards everybody whose lane is not in flight.
func (d *dock) take() (b *board, mask uint64) {
	mask = d.filled &^ d.away
	for free := mask; free != 0; free &= free - 1 {
		lane := &d.next[bits.TrailingZeros64(free)]
		if b == nil {
			whole := *lane
			b = &whole
		} else {
			b.join(lane)
		}
		*lane = board{}
	}
	d.filled &^= mask
	d.away |= mask
	d.flying++
	return b, mask
}

func (b *board) join(o *board) {
	b.pushes = append(b.pushes, o.pushes...)
	b.settles = append(b.settles, o.settles...)
	b.restores = append(b.restores, o.restores...)
	b.extends = append(b.extends, o.extends...)
	b.claims = append(b.claims, o.claims...)
	if o.since.Before(b.since) {
		b.since = o.since
	}
}

func (d *dock) close() {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	d.turn.Broadcast()
}

// run flies until the dock has closed and nobody waits any more.
func (f *flusher) run() {
	d := f.e.dock
	defer f.e.workers.Done()
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		for !d.ready() {
			if d.closed && d.filled == 0 && d.flying == 0 {
				d.turn.Broadcast()
				return
			}
			d.turn.Wait()
		}
		b, mask := d.take()
		if d.ready() {
			d.turn.Signal()
		}
		d.mu.Unlock()
		f.depart(b)
		d.mu.Lock()
		d.away &^= mask
		d.flying--
		d.turn.Signal()
	}
}

// depart sends one board, whatever it takes: again after a deadlock, alone per partition after a lock timeout,
// in halves after an error that one of them caused.
func (f *flusher) depart(b *board) {
	err := f.flush(b)
	// Pooled connections may have died unnoticed while they were idle, all of them.
	for tries := f.e.Flights.Config().MaxConns; errors.Is(err, errNotSent) && tries >= 0; tries-- {
		err = f.flush(b)
	}
	if db.IsRetryable(err) {
		err = f.flush(b)
	}
	switch {
	case err == nil:
	case errors.Is(err, ErrNoConnection), errors.Is(err, ErrUnknown), errors.Is(err, errNotSent):
		if errors.Is(err, errNotSent) {
			err = errors.Join(ErrNoConnection, err)
		}
		f.e.Log.Warn("flush failed", "operations", b.size(), "error", db.Text(err))
		b.fail(f.e, err)
	case db.IsLockTimeout(err):
		f.spread(b)
	case b.size() > 1:
		x, y := b.halves()
		f.depart(x)
		f.depart(y)
	case b.size() == 1:
		f.e.Log.Error("an operation failed", "error", db.Text(err))
		b.fail(f.e, err)
	}
}

// spread gives every partition of a flush that met a lock timeout a transaction of its own: the one that is
// blocked then stalls only itself. Claims never wait for a lock and go on here.
func (f *flusher) spread(b *board) {
	d := f.e.dock
	d.mu.Lock()
	for _, p := range b.pushes {
		lane := f.e.aside(p.Partition)
		lane.pushes = append(lane.pushes, p)
	}
	for _, s := range b.settles {
		lane := f.e.aside(s.partition)
		lane.settles = append(lane.settles, s)
	}
	d.mu.Unlock()
	rest := &board{restores: b.restores, extends: b.extends, claims: b.claims, since: b.since}
	if blocked := len(b.extends) + len(b.restores); len(b.pushes)+len(b.settles) == 0 && blocked > 0 {
		f.e.Log.Warn("an extend waited too long for a lock", "operations", blocked)
		rest.claims = nil
		rest.fail(f.e, context.DeadlineExceeded)
		rest = &board{claims: b.claims, since: b.since}
	}
	if rest.size() > 0 && rest.size() < b.size() {
		f.depart(rest)
	} else {
		rest.fail(f.e, context.DeadlineExceeded)
	}
}

// acquireTimeout is what is left of an operation's patience for a connection.
func acquireTimeout(since time.Time) time.Duration {
	return max(connectTimeout-time.Since(since), 500*time.Millisecond)
}
