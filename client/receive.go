package client

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/url"
	"slices"
	"sync"
	"time"
)

// Message is a message that is being handled.
type Message struct {
	ID          string          `json:"id"`
	Stream      string          `json:"stream"`
	Project     string          `json:"project"`
	Key         string          `json:"key"` // "": published without one
	Payload     json.RawMessage `json:"payload"`
	Headers     map[string]any  `json:"headers"`
	PublishedAt time.Time       `json:"published_at"`
	Attempt     int             `json:"-"` // 1 the first time
}

// ReceiveOptions of a loop; the zero value will do.
type ReceiveOptions struct {
	Concurrency int           // handlers at once, 0: 16. Of one key there is never more than one
	Consumer    string        // who this is, for the trace and the list of blocked keys
	Extend      time.Duration // to what a lease is extended again and again while a handler runs, in whole seconds; 0: 30 s
	Grace       time.Duration // how long handlers may go on when the loop is stopped, 0: 10 s
}

// Receive hands the messages of a subscription to handler until ctx ends. A nil error acks the message. Any other is a failed attempt with its
// text: it comes again by the retry policy of the subscription, and its key waits for it; but see [ErrRelease] and [RetryAfter]. A panic is
// a failed attempt too. Acks of handlers that end at the same time go together. While brokers cannot be reached, Receive tries on.
//
// The handler's context does not end with ctx. It ends when the lease is lost ([ErrLeaseLost]; an ack is tried even then), and when the loop is
// stopped and Grace is over ([ErrStopping]): a message whose handler then returns an error is given back without counting an attempt,
// and so is, 2 s later, one whose handler still runs. So Receive returns at the latest Grace and 4 s after ctx has ended: with nil if all
// handlers have, else with an error. Before that it returns only if its call is refused, as with a subscription that does not exist.
func (c *Client) Receive(ctx context.Context, sub string, o ReceiveOptions, handler func(ctx context.Context, m Message) error) error {
	o.Concurrency = max(cmp.Or(o.Concurrency, 16), 1)
	o.Extend = max(cmp.Or(o.Extend, 30*time.Second).Round(time.Second), time.Second)
	handle, all, end := lifetimes(ctx, cmp.Or(o.Grace, 10*time.Second))
	defer end()
	l := &lanes{c: c, path: "/v1/subscriptions/" + url.PathEscape(sub) + "/", o: o, handler: handler, handle: handle, all: all,
		slots: make(chan struct{}, o.Concurrency), acks: make(chan *held), held: make(map[string]*held)}
	var background sync.WaitGroup
	background.Go(l.ack)
	background.Go(l.extend)
	err := l.receive(ctx)

	done := make(chan struct{})
	go func() { l.handlers.Wait(); close(done) }()
	var left error
	if err != nil { // refused: what is held is finished all the same
		select {
		case <-done:
		case <-ctx.Done():
		}
	}
	select {
	case <-done:
	case <-all.Done():
		left = l.abandon()
	}
	end()
	background.Wait()
	return errors.Join(err, left)
}

// lanes is a running Receive.
type lanes struct {
	c           *Client
	path        string
	o           ReceiveOptions
	handler     func(context.Context, Message) error
	handle, all context.Context

	slots    chan struct{} // full: Concurrency handlers run
	acks     chan *held
	handlers sync.WaitGroup

	mu   sync.Mutex
	held map[string]*held // by delivery id
	over bool
}

// held is a message with its lease.
type held struct {
	id       string
	message  Message
	lose     context.CancelCauseFunc
	expires  time.Time // by this clock
	extendAt time.Time
	done     chan error // what became of its ack
}

// receive asks for as many messages as there are handlers free.
func (l *lanes) receive(ctx context.Context) error {
	const wait = 20
	for {
		select {
		case l.slots <- struct{}{}:
		case <-ctx.Done():
			return nil
		}
		n := 1
		for more := true; more && n < 100; {
			select {
			case l.slots <- struct{}{}:
				n++
			default:
				more = false
			}
		}
		body, err := encode(map[string]any{"max_messages": n, "wait_seconds": wait, "consumer": l.o.Consumer})
		var data []byte
		var began, date time.Time
		var answer struct {
			Messages []struct {
				DeliveryID     string    `json:"delivery_id"`
				Attempt        int       `json:"attempt"`
				LeaseExpiresAt time.Time `json:"lease_expires_at"`
				Message        Message   `json:"message"`
			}
		}
		if err == nil && ctx.Err() == nil {
			began = time.Now()
			data, err = l.c.call(l.all, ctx, call{method: "POST", path: l.path + "receive", body: body, wait: wait * time.Second, tryFor: forever, date: &date})
		}
		if err == nil && len(data) > 0 {
			err = json.Unmarshal(data, &answer)
		}
		for range n - len(answer.Messages) {
			<-l.slots
		}
		for _, d := range answer.Messages {
			d.Message.Attempt = d.Attempt
			h := &held{id: d.DeliveryID, message: d.Message, done: make(chan error, 1)}
			// How long the lease lasts is seen from whichever clock says less; it is longer than it seems, or extended soon.
			left := time.Until(d.LeaseExpiresAt)
			most := left
			if !date.IsZero() {
				other := d.LeaseExpiresAt.Sub(date)
				left, most = min(left, other-time.Second), max(left, other)
			}
			h.extendAt = time.Now().Add(max(left/3, 0))
			h.expires = began.Add(max(most, l.o.Extend))
			l.start(h)
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
	}
}

func (l *lanes) start(h *held) {
	ctx, lose := context.WithCancelCause(l.handle)
	h.lose = lose
	l.mu.Lock()
	l.held[h.id] = h
	l.mu.Unlock()
	l.handlers.Go(func() {
		defer func() { <-l.slots }()
		defer lose(nil)
		err := l.c.guard(ctx, h.message.ID, func() error { return l.handler(ctx, h.message) })
		l.mu.Lock()
		over := l.over
		l.mu.Unlock()
		if over {
			return
		}
		l.settle(ctx, h, err)
		l.mu.Lock()
		delete(l.held, h.id)
		l.mu.Unlock()
	})
}

// settle acks or nacks one message. That it cannot be done is said, and mended by the end of the lease.
func (l *lanes) settle(ctx context.Context, h *held, err error) {
	var after retryAfter
	var failed error
	switch stopping := errors.Is(context.Cause(ctx), ErrStopping); {
	case err == nil:
		select {
		case l.acks <- h:
			failed = <-h.done
		case <-l.all.Done():
			failed = ErrStopping
		}
	case stopping, errors.Is(err, ErrRelease):
		failed = l.call("nack", map[string]any{"release": true}, h)[h.id]
	case errors.As(err, &after):
		failed = l.call("nack", map[string]any{"error": err.Error(), "retry_after": max(after.after, 0).String()}, h)[h.id]
	default:
		failed = l.call("nack", map[string]any{"error": err.Error()}, h)[h.id]
	}
	if failed != nil {
		l.c.log.Warn("ferrymq: a message could not be settled, so it comes again", "message", h.message.ID, "key", h.message.Key, "attempt", h.message.Attempt, "error", failed)
	}
}

// ack sends what waits at a moment together.
func (l *lanes) ack() {
	for {
		var these []*held
		select {
		case h := <-l.acks:
			these = append(these, h)
		case <-l.all.Done():
			return
		}
		for more := true; more && len(these) < 1000; {
			select {
			case h := <-l.acks:
				these = append(these, h)
			default:
				more = false
			}
		}
		failed := l.call("ack", map[string]any{}, these...)
		for _, h := range these {
			h.done <- failed[h.id]
		}
	}
}

// call settles deliveries, and returns the errors of those that it could not. Behind a lost answer, what has been settled was so by this call.
func (l *lanes) call(what string, body map[string]any, these ...*held) map[string]error {
	ids := make([]string, len(these))
	for i, h := range these {
		ids[i] = h.id
	}
	failed, retried := make(map[string]error), false
	for round := 1; len(ids) > 0; round++ {
		body["delivery_ids"] = ids
		q := call{method: "POST", path: l.path + what, tryFor: l.c.config.RetryFor, retried: &retried}
		if what == "extend" {
			q.tryFor = l.o.Extend / 3 // the next one comes soon
		}
		var data []byte
		var answer struct {
			Results []struct {
				DeliveryID string `json:"delivery_id"`
				OK         bool   `json:"ok"`
				Error      string `json:"error"`
			}
		}
		var err error
		if q.body, err = encode(body); err == nil {
			data, err = l.c.call(l.all, l.all, q)
		}
		if err == nil {
			err = json.Unmarshal(data, &answer)
		}
		if err != nil {
			for _, id := range ids {
				failed[id] = err
			}
			return failed
		}
		ids = nil
		for _, x := range answer.Results {
			switch delete(failed, x.DeliveryID); {
			case x.OK, x.Error == "already settled" && retried:
			case x.Error == "lease lost", x.Error == "unknown delivery id":
				failed[x.DeliveryID] = ErrLeaseLost
			default:
				failed[x.DeliveryID] = errors.New(x.Error)
				if x.Error != "already settled" {
					ids = append(ids, x.DeliveryID)
				}
			}
		}
		if len(ids) == 0 || round == 5 || sleep(l.all, backoff(round, nil)) != nil {
			break
		}
	}
	return failed
}

// extend keeps the leases of what is held.
func (l *lanes) extend() {
	tick := time.NewTicker(min(200*time.Millisecond, l.o.Extend/10))
	defer tick.Stop()
	for {
		select {
		case <-l.all.Done():
			return
		case <-tick.C:
		}
		now := time.Now()
		var due []*held
		l.mu.Lock()
		for _, h := range l.held {
			if now.After(h.expires) {
				h.lose(ErrLeaseLost)
			} else if now.After(h.extendAt) && len(due) < 1000 {
				due = append(due, h)
			}
		}
		l.mu.Unlock()
		if len(due) == 0 {
			continue
		}
		failed := l.call("extend", map[string]any{"seconds": int(math.Round(l.o.Extend.Seconds()))}, due...)
		l.mu.Lock()
		for _, h := range due {
			switch err := failed[h.id]; {
			case err == nil:
				h.expires, h.extendAt = now.Add(l.o.Extend), now.Add(l.o.Extend/3)
			case errors.Is(err, ErrLeaseLost) && l.held[h.id] != nil:
				h.lose(ErrLeaseLost)
				h.extendAt, h.expires = now.Add(forever), now.Add(forever)
			}
		}
		l.mu.Unlock()
	}
}

// abandon gives back what handlers did not finish in time.
func (l *lanes) abandon() error {
	l.mu.Lock()
	l.over = true
	these := slices.Collect(maps.Values(l.held))
	l.mu.Unlock()
	if len(these) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), lastWords)
	defer cancel()
	last := &lanes{c: l.c, path: l.path, o: l.o, all: ctx}
	for chunk := range slices.Chunk(these, 1000) {
		last.call("nack", map[string]any{"release": true}, chunk...)
	}
	return fmt.Errorf("client: stopped while %d handlers run: their messages were given back", len(these))
}
