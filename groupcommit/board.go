package groupcommit

import (
	"context"
	"errors"
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

// halves splits a board so that one poison operation is found and fails alone.
func (b *board) halves() (x, y *board) {
	x, y = &board{since: b.since}, &board{since: b.since}
	x.pushes, y.pushes = half(b.pushes)
	y.settles, x.settles = half(b.settles)
	x.restores, y.restores = half(b.restores)
	y.extends, x.extends = half(b.extends)
	x.claims, y.claims = half(b.claims)
	return x, y
}

func half[T any](s []T) (a, b []T) { n := (len(s) + 1) / 2; return s[:n], s[n:] }

// flusher takes what boarded and sends it, one flush after the other.
type flusher struct {
	e    *Engine
	kick chan struct{}

	mu     sync.Mutex
	next   board
	closed bool
	sides  map[partitionKey]*side // partitions that work alone for a while
	later  []*settle              // a cursor takes one settle a flush; the others board the next

	scratch builders
}

func (e *Engine) flusherOf(lane uint64) *flusher { return e.flushers[lane%uint64(len(e.flushers))] }

// enter adds to the board. It reports false when the flusher has closed.
func (f *flusher) enter(add func(*board)) bool {
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return false
	}
	if f.next.size() == 0 {
		f.next.since = time.Now()
	}
	add(&f.next)
	f.mu.Unlock()
	f.wake()
	return true
}

func (f *flusher) wake() {
	select {
	case f.kick <- struct{}{}:
	default:
	}
}

func (f *flusher) close() {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.wake()
}

func (f *flusher) run() {
	defer f.e.workers.Done()
	for range f.kick {
		f.mu.Lock()
		b := f.next
		f.next = board{settles: f.later}
		f.later = nil
		if len(f.next.settles) > 0 {
			f.next.settles, b.settles = nil, append(f.next.settles, b.settles...)
		}
		closed := f.closed
		f.mu.Unlock()
		if b.size() > 0 {
			f.depart(&b)
			f.mu.Lock()
			again := f.next.size() > 0 || len(f.later) > 0
			f.mu.Unlock()
			if again {
				f.wake()
			}
		}
		if closed {
			f.mu.Lock()
			empty := f.next.size() == 0 && len(f.later) == 0
			f.mu.Unlock()
			if empty {
				return
			}
			f.wake()
		}
	}
}

// depart sends one board, whatever it takes: again after a deadlock, alone per partition after a lock timeout,
// in halves after an error that one of them caused.
func (f *flusher) depart(b *board) {
	err := f.flush(b)
	if db.IsRetryable(err) {
		err = f.flush(b)
	}
	switch {
	case err == nil:
	case errors.Is(err, ErrNoConnection), errors.Is(err, ErrUnknown):
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
	f.mu.Lock()
	for _, p := range b.pushes {
		f.aside(p.Partition).pushes = append(f.aside(p.Partition).pushes, p)
	}
	for _, s := range b.settles {
		f.aside(s.partition).settles = append(f.aside(s.partition).settles, s)
	}
	f.mu.Unlock()
	rest := &board{restores: b.restores, extends: b.extends, claims: b.claims, since: b.since}
	if len(b.pushes)+len(b.settles) > 0 && rest.size() > 0 {
		f.depart(rest)
	} else if rest.size() > 0 {
		f.e.Log.Warn("an extend waited too long for a lock", "operations", rest.size())
		rest.fail(f.e, context.DeadlineExceeded)
	}
}

// acquireTimeout is what is left of an operation's patience for a connection.
func acquireTimeout(since time.Time) time.Duration {
	return max(connectTimeout-time.Since(since), 500*time.Millisecond)
}
