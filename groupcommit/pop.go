package groupcommit

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/db"
)

// Pop says what a pop asks for. Queue is empty for discovery, which then matches by Scope.
type Pop struct {
	Queue     string
	Partition *string // nil: any
	Scope     catalog.Scope
	Group     string
	Named     bool // the client named the group: then a missing partition is created for it
	Start     catalog.Start

	Batch      int64         // most messages of the call
	Partitions int64         // most partitions of the call
	Seconds    int32         // of the lease; 0: the queue's
	AutoAck    bool          // move the cursors instead of leasing
	Wait       time.Duration // 0: answer at once

	// Set by Engine.Pop.
	QueueID int32         // that of Queue, once it has been found
	Parked  time.Duration // how much of the call was spent parked

	consumer string // of lanes
}

// Delivery is what a pop got. Release gives it back.
type Delivery struct {
	Lease uuid.UUID
	Spans []*Span

	claims []*claim
	e      *Engine
}

// Release gives back what was not delivered: the leases end, or the cursors go back, as if the pop had not happened.
func (d *Delivery) Release() { d.giveBack(nil, true) }

// Unreadable gives back spans with messages that cannot be decoded, or with all the whole delivery, and waits until it has
// happened. The partitions of these spans rest for 5 seconds, so that they do not come up in every pop.
func (d *Delivery) Unreadable(spans []*Span, all bool) { happened(d.giveBack(spans, all)) }

func (d *Delivery) giveBack(rest []*Span, all bool) (done []chan struct{}) {
	for _, c := range d.claims {
		spans := rest
		if all {
			c.mu.Lock()
			spans = c.spans
			c.mu.Unlock()
		}
		done = append(done, d.e.giveBack(c, spans, rest)...)
	}
	return done
}

// happened waits for what giveBack returned, a while at most.
func happened(all []chan struct{}) {
	timeout := time.After(connectTimeout)
	for _, done := range all {
		select {
		case <-done:
		case <-timeout:
			return
		}
	}
}

// patience is how much longer than its timeout a pop waits for the flush its claim is on.
const patience = 300 * time.Millisecond

// Pop claims messages, waiting for them as long as p says. Nil: there was nothing, or pops are over (Drain, PausePops).
// When ctx ends first nothing stays leased, and its error is returned.
func (e *Engine) Pop(ctx context.Context, p *Pop) (*Delivery, error) {
	deadline := time.Now().Add(p.Wait)
	for tries := 0; ; tries++ {
		var d *Delivery
		var err error
		switch {
		case p.Queue == "":
			d, err = e.popDiscovery(ctx, p, deadline)
		case p.Partition != nil:
			d, err = e.popPartition(ctx, p, deadline)
		default:
			d, err = e.popQueue(ctx, p, deadline)
		}
		if errors.Is(err, catalog.ErrGone) && tries < 50 {
			// Deleted and perhaps made again since it was looked up.
			e.Catalog.ForgetQueue(p.Queue)
			continue
		}
		return d, err
	}
}

func (e *Engine) queue(ctx context.Context, name string) (*catalog.Queue, error) {
	q, err := e.Catalog.EnsureQueue(ctx, name)
	if err != nil {
		return nil, e.Unavailable(err)
	}
	return q, nil
}

func (e *Engine) popQueue(ctx context.Context, p *Pop, deadline time.Time) (*Delivery, error) {
	q, err := e.queue(ctx, p.Queue)
	if err != nil {
		return nil, err
	}
	p.QueueID = q.ID
	g, err := e.Catalog.Register(ctx, q.ID, p.Group, p.Start)
	if err != nil {
		return nil, e.Unavailable(err)
	}
	if hold := time.Duration(q.MinPopWaitTime) * time.Millisecond; hold > 0 && p.Wait > 0 && p.Batch > 1 {
		return e.popFilled(ctx, p, q, g, hold, deadline)
	}
	return e.popGroup(ctx, p, q, g, deadline)
}

// popGroup claims from any partition of a registered group.
func (e *Engine) popGroup(ctx context.Context, p *Pop, q *catalog.Queue, g *catalog.Group, deadline time.Time) (*Delivery, error) {
	seeded := g.Seeded()
	if seeded != nil { // mostly done in a moment, and then the first look is not in vain
		if soon := time.Now().Add(seedMoment); p.Wait <= 0 || soon.Before(deadline) {
			e.awaitSeeded(ctx, seeded, soon)
		} else {
			e.awaitSeeded(ctx, seeded, deadline)
		}
	}
	for {
		c := e.newClaim(p, q, g, newLease(g.ID), p.Batch, p.Partitions)
		c.wait = p.Wait > 0 // each chunk of a new group's cursors wakes it
		d, err := e.await(ctx, c, deadline)
		p.Parked += time.Duration(c.parked.Load())
		if d == nil && err == nil && c.wait {
			err = e.unseeded(g)
		}
		if d != nil || err != nil || seeded == nil || c.wait {
			return d, e.forgetGone(g, err)
		}
		// A first contact that does not wait: an empty answer means nothing yet, until the cursors are made.
		if !e.awaitSeeded(ctx, seeded, time.Now().Add(seedPatience)) {
			return nil, e.unseeded(g)
		}
		seeded = nil
	}
}

// seedMoment is how long a first contact waits for all of its group's cursors before it looks at those there are.
const seedMoment = 200 * time.Millisecond

// seedPatience is how long a pop that does not wait waits for its group's cursors on first contact.
const seedPatience = 3 * time.Second

// awaitSeeded reports whether a group's cursors were made in time.
func (e *Engine) awaitSeeded(ctx context.Context, seeded <-chan struct{}, deadline time.Time) bool {
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	select {
	case <-seeded:
		return true
	case <-timer.C:
	case <-ctx.Done():
	case <-*e.ended.Load():
	}
	return false
}

// unseeded is why a new group has no cursors, if making them fails: what it would be given is not known, so its pop is not empty.
func (e *Engine) unseeded(g *catalog.Group) error {
	if err := g.SeedFailure(); err != nil {
		return e.Unavailable(err)
	}
	return nil
}

func (e *Engine) forgetGone(g *catalog.Group, err error) error {
	if errors.Is(err, catalog.ErrGone) {
		e.Catalog.ForgetGroup(g.QueueID, g.Name)
	}
	return err
}

func (e *Engine) newClaim(p *Pop, q *catalog.Queue, g *catalog.Group, lease uuid.UUID, budget, parts int64) *claim {
	return &claim{queue: q, group: g, lease: lease, budget: budget, parts: max(parts, 1), seconds: p.Seconds, autoAck: p.AutoAck, consumer: p.consumer, done: make(chan struct{})}
}

// await boards a claim and waits for its answer, its deadline, or the end of the caller.
func (e *Engine) await(ctx context.Context, c *claim, deadline time.Time) (*Delivery, error) {
	c.bulk = e.park.enter(c.group)
	if !e.park.parkAtOnce(c) {
		e.boardClaim(c)
	}
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	select {
	case <-c.done:
		return e.answer(ctx, c)
	case <-ctx.Done():
		return e.leave(ctx, c, ctx.Err())
	case <-timer.C:
	}
	if c.wait && e.park.withdraw(c) {
		return nil, nil
	}
	// On a flush, or about to board one: a non-waiting pop stays for its answer, a waiting one for a little.
	if c.wait && !c.autoAck { // what autoAck moved for nobody would have to be moved back
		timer.Reset(patience)
	} else {
		timer.Reset(e.StatementTimeout + 2*connectTimeout)
	}
	select {
	case <-c.done:
		return e.answer(ctx, c)
	case <-ctx.Done():
		return e.leave(ctx, c, ctx.Err())
	case <-timer.C:
		return e.leave(ctx, c, nil)
	}
}

// leave gives a claim up. If it has just been answered, the answer counts for a caller that is still there.
func (e *Engine) leave(ctx context.Context, c *claim, err error) (*Delivery, error) {
	if e.park.withdraw(c) {
		c.leave()
		return nil, err
	}
	if c.leave() {
		switch {
		case err != nil || c.looked.Load():
		case c.sent.Load():
			err = ErrUnknown // no answer yet: what it takes comes again after its lease
		default:
			err = ErrNoConnection
		}
		return nil, err
	}
	return e.answer(ctx, c)
}

func (e *Engine) answer(ctx context.Context, c *claim) (*Delivery, error) {
	if c.err != nil || len(c.spans) == 0 {
		return nil, c.err
	}
	d := &Delivery{Lease: c.lease, Spans: c.spans, claims: []*claim{c}, e: e}
	err := ctx.Err()
	if err == nil {
		d.Spans, err = e.fill(ctx, c.spans)
	}
	if err != nil {
		d.Release()
		if errors.Is(err, ErrNoConnection) {
			err = ErrUnknown // that one would say that nothing happened
		}
		return nil, err
	}
	if len(d.Spans) < len(c.spans) {
		e.giveBackRemoved(c, d.Spans)
		if len(d.Spans) == 0 {
			return nil, catalog.ErrGone // again: there may be other messages
		}
	}
	return d, nil
}

// giveBackRemoved ends the leases of spans that were removed since they were claimed, and waits for it.
func (e *Engine) giveBackRemoved(c *claim, left []*Span) {
	var removed []*Span
	c.mu.Lock()
	for _, s := range c.spans {
		if !slices.Contains(left, s) {
			removed = append(removed, s)
		}
	}
	c.spans = left
	c.mu.Unlock()
	happened(e.giveBack(c, removed, nil))
}

// popFilled holds a batch that is not full up to the queue's minPopWaitTime: nothing is leased meanwhile.
func (e *Engine) popFilled(ctx context.Context, p *Pop, q *catalog.Queue, g *catalog.Group, hold time.Duration, deadline time.Time) (*Delivery, error) {
	if seeded := g.Seeded(); seeded != nil && !e.awaitSeeded(ctx, seeded, deadline) {
		return nil, e.unseeded(g)
	}
	w := &watcher{queue: q.ID, name: q.Name, group: g.Name}
	if !e.park.watch(w) {
		return nil, ErrOverloaded
	}
	defer e.park.unwatch(w)
	e.park.enter(g)
	var until time.Time // when the held batch goes
	for {
		available, err := e.q.GroupAvailable(ctx, db.GroupAvailableParams{GroupID: g.ID, Parts: max(p.Partitions, 1)})
		if errors.Is(err, pgx.ErrNoRows) {
			return nil, e.forgetGone(g, catalog.ErrGone)
		}
		if err != nil {
			return nil, e.Unavailable(err)
		}
		if available > 0 && until.IsZero() {
			if until = time.Now().Add(hold); until.After(deadline) {
				until = deadline
			}
		}
		if available >= p.Batch || (available > 0 && !time.Now().Before(until)) {
			once := *p
			once.Wait = 0
			d, err := e.popGroup(ctx, &once, q, g, time.Now())
			if d != nil || err != nil {
				return d, err
			}
			until = time.Time{}
		}
		next := time.Until(deadline)
		if !until.IsZero() {
			next = time.Until(until)
		}
		if next <= 0 && !time.Now().Before(deadline) {
			return nil, nil
		}
		timer, began := time.NewTimer(max(next, time.Millisecond)), time.Now()
		select {
		case <-w.sign:
			// Pushes come in bursts: look at most every few milliseconds.
			select {
			case <-time.After(5 * time.Millisecond):
			case <-ctx.Done():
			}
		case <-timer.C:
		case <-ctx.Done():
		case <-*e.ended.Load():
			timer.Stop()
			return nil, nil
		}
		timer.Stop()
		p.Parked += time.Since(began)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

func (e *Engine) popPartition(ctx context.Context, p *Pop, deadline time.Time) (*Delivery, error) {
	var w *watcher
	for {
		q, err := e.queue(ctx, p.Queue)
		if err != nil {
			return nil, err
		}
		found, err := e.Catalog.Partitions(ctx, q, []string{*p.Partition})
		if err != nil {
			return nil, e.Unavailable(err)
		}
		part := found[0]
		p.QueueID = q.ID
		missing := part.Row() == nil
		patient := deadline
		if p.Wait <= 0 {
			patient = time.Now().Add(seedPatience)
		}
		g, err := e.Catalog.Meet(ctx, q, part, p.Group, p.Start, p.Named, patient)
		if errors.Is(err, catalog.ErrHeld) { // nothing of it can be delivered
			return nil, nil
		}
		if err != nil {
			return nil, e.Unavailable(err)
		}
		if row := part.Row(); row != nil {
			if missing { // others may wait for it
				e.park.appeared(q.ID, part.Name)
			}
			c := e.newClaim(p, q, g, newLease(g.ID), p.Batch, 1)
			c.partition, c.wait = row, p.Wait > 0
			d, err := e.await(ctx, c, deadline)
			p.Parked += time.Duration(c.parked.Load())
			if errors.Is(err, catalog.ErrGone) {
				part.Forget(row)
			}
			return d, e.forgetGone(g, err)
		}
		// Queue mode, and the partition does not exist: wait for the push that makes it.
		if w == nil {
			if p.Wait <= 0 {
				return nil, nil
			}
			w = &watcher{queue: q.ID, name: q.Name, group: p.Group, partition: *p.Partition}
			if !e.park.watch(w) {
				return nil, ErrOverloaded
			}
			defer e.park.unwatch(w)
			continue // look once more, now that nothing can be missed
		}
		if done, err := e.sign(ctx, p, w, deadline); done {
			return nil, err
		}
	}
}

// sign waits for a watcher's sign; done when there is nothing more to wait for.
func (e *Engine) sign(ctx context.Context, p *Pop, w *watcher, deadline time.Time) (done bool, err error) {
	began := time.Now()
	defer func() { p.Parked += time.Since(began) }()
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	select {
	case <-w.sign:
		return false, nil
	case <-timer.C:
		return true, nil
	case <-*e.ended.Load():
		return true, nil
	case <-ctx.Done():
		return true, ctx.Err()
	}
}

// popDiscovery takes one queue's group at a time, in turn, until the batch or the partitions are used up.
func (e *Engine) popDiscovery(ctx context.Context, p *Pop, deadline time.Time) (*Delivery, error) {
	var w *watcher
	lease := newLease(0)
	for {
		d, err := e.discover(ctx, p, lease, deadline)
		if d != nil || err != nil {
			return d, err
		}
		if w == nil {
			if p.Wait <= 0 {
				return nil, nil
			}
			w = &watcher{scope: p.Scope, group: p.Group}
			if !e.park.watch(w) {
				return nil, ErrOverloaded
			}
			defer e.park.unwatch(w)
			continue
		}
		if done, err := e.sign(ctx, p, w, deadline); done {
			return nil, err
		}
	}
}

func (e *Engine) discover(ctx context.Context, p *Pop, lease uuid.UUID, deadline time.Time) (*Delivery, error) {
	patient := time.Now().Add(seedPatience)
	if p.Wait > 0 && deadline.Before(patient) {
		patient = deadline
	}
	if err := e.Catalog.Discover(ctx, p.Scope, p.Group, p.Start, patient); err != nil {
		return nil, e.Unavailable(err)
	}
	budget, parts := p.Batch, max(p.Partitions, 1)
	turn := e.park.turn(p.Scope, p.Group)
	// More than one may serve: others compete for the same groups.
	ready, err := e.Catalog.Ready(ctx, p.Scope, p.Group, turn, min(max(parts, 16), 100))
	if err != nil {
		return nil, e.Unavailable(err)
	}
	whole := &Delivery{Lease: lease, e: e}
	for _, r := range ready {
		e.park.turned(p.Scope, p.Group, r.ID)
		q, err := e.queue(ctx, r.Name)
		if err != nil {
			whole.Release()
			return nil, err
		}
		if q.ID != r.QueueID {
			continue // deleted and made again just now
		}
		c := e.newClaim(p, q, &catalog.Group{ID: r.ID, Project: e.Project, QueueID: r.QueueID, Name: p.Group, Registered: true}, lease, budget, parts)
		c.discovery = true
		d, err := e.await(ctx, c, time.Now())
		if errors.Is(err, catalog.ErrGone) {
			continue
		}
		if err != nil {
			whole.Release()
			return nil, err
		}
		if d == nil {
			continue
		}
		whole.claims = append(whole.claims, d.claims...)
		whole.Spans = append(whole.Spans, d.Spans...)
		for _, s := range d.Spans {
			budget -= s.Take
			parts--
		}
		if budget <= 0 || parts <= 0 {
			break
		}
	}
	if len(whole.Spans) == 0 {
		return nil, nil
	}
	return whole, nil
}
