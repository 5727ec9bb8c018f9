package groupcommit

import (
	"errors"
	"math/bits"
	"sync"
	"time"

	"ferrymq/catalog"
	"ferrymq/db"
)

type partitionKey struct {
	queue  int32
	name   string
	hidden bool
}

func keyOf(p *catalog.Partition) partitionKey { return partitionKey{p.QueueID, p.Name, p.Hidden} }

// board is what waits for the next departure.
type board struct {
	pushes   []*Push
	settles  []*settle
	restores []*restore
	extends  []*extend
	claims   []*claim
	bytes    int       // of the pushes' messages
	since    time.Time // when the oldest boarded
	again    bool      // it failed before: nobody else gets on
}

func (b *board) size() int {
	return len(b.pushes) + len(b.settles) + len(b.restores) + len(b.extends) + len(b.claims)
}

// weight is what a board is worth carrying alone: an operation counts one, and one more for every few messages it is about.
func (b *board) weight() int {
	n := b.size()
	for _, p := range b.pushes {
		n += len(p.Messages) / 8
	}
	for _, c := range b.claims {
		n += int(c.budget) / 8
	}
	return n
}

// fail answers everything on the board.
func (b *board) fail(e *Engine, err error) {
	for _, r := range b.restores {
		if r.tries++; r.tries < 10 {
			e.boardRestore(r)
		}
	}
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

// overdue is how long a flight may be away before another one leaves, crowd or not: it may be stuck behind a lock.
const overdue = 20 * time.Millisecond

// dock is where operations board.
type dock struct {
	mu     sync.Mutex
	turn   *sync.Cond // a flight may leave
	next   [lanes]board
	filled uint64 // lanes with something on board
	away   uint64 // lanes in flight
	flying int
	left   time.Time // when the last flight left
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
	if free == 0 || d.flying == 0 || time.Since(d.left) > overdue {
		return free != 0
	}
	n := 0
	for ; free != 0; free &= free - 1 {
		if n += d.next[bits.TrailingZeros64(free)].weight(); n >= crowd {
			return true
		}
	}
	return false
}

// take boards everybody whose lane is not in flight.
func (d *dock) take() (b *board, mask uint64) {
	b = &board{since: time.Now()}
	for free := d.filled &^ d.away; free != 0; free &= free - 1 {
		bit := free & -free
		lane := &d.next[bits.TrailingZeros64(free)]
		if size := b.bytes + lane.bytes; size > flightBytes && b.size() > 0 {
			continue // with the next one
		} else if size > flightBytes {
			b.pushes, lane.pushes = lane.split()
			mask |= bit
			break // what is left of the lane stays, and the lane with it
		}
		b.join(lane)
		*lane = board{}
		mask |= bit
		d.filled &^= bit
	}
	d.away |= mask
	d.flying++
	d.left = time.Now()
	return b, mask
}

// flightBytes bounds what a flight carries: PostgreSQL takes no message over 1 GiB, and the broker holds it all.
const flightBytes = 32 << 20

// split takes as many pushes off a board as a flight may carry, at least one.
func (b *board) split() (taken, rest []*Push) {
	n, bytes := 0, 0
	for n < len(b.pushes) && (n == 0 || bytes+b.pushes[n].bytes <= flightBytes) {
		bytes += b.pushes[n].bytes
		n++
	}
	b.bytes -= bytes
	return b.pushes[:n:n], b.pushes[n:]
}

func (b *board) join(o *board) {
	b.pushes = append(b.pushes, o.pushes...)
	b.settles = append(b.settles, o.settles...)
	b.restores = append(b.restores, o.restores...)
	b.extends = append(b.extends, o.extends...)
	b.claims = append(b.claims, o.claims...)
	b.bytes += o.bytes
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
		late := time.AfterFunc(overdue+time.Millisecond, d.turn.Broadcast)
		f.depart(b)
		late.Stop()
		d.mu.Lock()
		d.away &^= mask
		d.flying--
		d.turn.Signal()
	}
}

// depart sends one board, whatever it takes: again after a deadlock, alone per partition after a lock timeout,
// in halves after an error that one of them caused.
func (f *flusher) depart(b *board) {
	began := time.Now()
	err := f.flush(b)
	// Pooled connections may have died unnoticed while they were idle, all of them.
	for tries := f.e.Flights.Config().MaxConns; errors.Is(err, errNotSent) && tries >= 0; tries-- {
		err = f.flush(b)
	}
	// A statement that was cancelled before its time was so by somebody else: an administrator, or a pooler that was too late with what another
	// client had asked for.
	if db.IsRetryable(err) || db.Code(err) == queryCanceled && time.Since(began) < f.e.StatementTimeout {
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
	case db.IsLockTimeout(err), db.Code(err) == queryCanceled:
		f.spread(b, err)
	case b.size() > 1 && db.IsPoison(err) && time.Since(b.since) < bisectTime:
		x, y := b.halves()
		f.depart(x)
		f.depart(y)
	default:
		f.e.Log.Error("a flush failed", "operations", b.size(), "error", db.Text(err))
		b.fail(f.e, err)
	}
}

// queryCanceled is the code of a statement that took longer than it may.
const queryCanceled = "57014"

// bisectTime is how long a flush may be taken apart to find its poison operation: everything behind it waits.
const bisectTime = 10 * time.Second

// spread gives every partition of a flush that waited too long for a lock, or took too long, a transaction of its own:
// the one that is blocked then stalls only itself. Claims never wait for a lock and go on here.
func (f *flusher) spread(b *board, err error) {
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
	rest := &board{restores: b.restores, extends: b.extends, claims: b.claims, since: b.since, again: true}
	switch {
	case rest.size() == 0:
	case rest.size() < b.size():
		f.depart(rest)
	case rest.size() > 1 && len(rest.extends)+len(rest.restores) > 0:
		x, y := rest.halves()
		f.depart(x)
		f.depart(y)
	default:
		f.e.Log.Warn("an operation waited too long", "error", db.Text(err))
		rest.fail(f.e, err)
	}
}

// acquireTimeout is what is left of an operation's patience for a connection.
func acquireTimeout(since time.Time) time.Duration {
	return max(connectTimeout-time.Since(since), 500*time.Millisecond)
}
