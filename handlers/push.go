package handlers

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/groupcommit"
	"ferrymq/metrics"
	"ferrymq/segment"
)

const maxItems = 10_000

// pushItem is one element of items.
type pushItem struct {
	queue, partition string
	transactionID    string // "": minted
	payload          []byte // a slice of the body
	payloadSeen      bool
	sub              string // whom the token of the request names
}

// target is the items of a request for one (queue, partition), and what became of them.
type target struct {
	items []int
	push  *groupcommit.Push
	err   error
}

// readPush decodes {"items":[…]}.
func readPush(body []byte) ([]pushItem, error) {
	var items []pushItem
	seen := false
	err := parse(body, func(d *document) error {
		return d.object(func(name string) error {
			if name != "items" {
				return d.skip()
			}
			seen, items = true, nil
			return d.array(func(i int) error {
				if i == maxItems {
					return bad("too many items: at most %d", maxItems)
				}
				var last pushItem
				if i > 0 {
					last = items[i-1]
				}
				it, err := readItem(d, last)
				items = append(items, it)
				return err
			})
		})
	})
	if err == nil && !seen {
		err = bad("bad body: items is required")
	}
	return items, err
}

func readItem(d *document, last pushItem) (it pushItem, err error) {
	it.partition = "Default"
	err = d.object(func(name string) (err error) {
		switch name {
		case "queue":
			it.queue, err = d.name(last.queue, maxName)
		case "partition":
			if null, err := d.null(); null || err != nil {
				it.partition = "Default"
				return err
			}
			it.partition, err = d.name(last.partition, maxName)
		case "transactionId":
			if null, err := d.null(); null || err != nil {
				it.transactionID = ""
				return err
			}
			it.transactionID, err = d.name("", maxTransactionID)
		case "payload":
			it.payloadSeen = true
			it.payload, err = d.value()
		default:
			err = d.skip()
		}
		return err
	})
	switch {
	case err != nil:
	case it.queue == "":
		err = bad("bad body: %s.queue is required", d.path)
	case !it.payloadSeen:
		err = bad("bad body: %s.payload is required", d.path)
	}
	return it, err
}

func (a *API) push(w http.ResponseWriter, r *request) error {
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	items, err := readPush(body)
	if err != nil {
		return err
	}
	a.Metrics.Total(metrics.PushRequests, 1)
	if err := a.pushRefused(); err != nil {
		a.Metrics.Total(metrics.RefusedMaintenance, int64(len(items)))
		return err
	}
	began := time.Now()
	defer func() { a.Metrics.PushSeconds.Observe(time.Since(began).Seconds()) }()
	if len(items) == 0 {
		return a.write(w, http.StatusCreated, []byte("[]"))
	}
	for i := range items {
		items[i].sub = r.sub
	}
	targets := group(items)
	var pushes []*groupcommit.Push
	resolve(r.Context(), r.engine, items, targets)
	for _, t := range targets {
		if t.err == nil {
			pushes = append(pushes, t.push)
		}
	}
	if err := r.engine.Push(r.Context(), pushes); errors.Is(err, groupcommit.ErrOverloaded) {
		a.Metrics.Total(metrics.RefusedOverloaded, int64(len(items)))
		return busy("overloaded")
	} else if err != nil {
		return failed("push failed")
	}
	a.countPush(targets)
	return a.answerPush(w, items, targets)
}

// countPush counts the request for its queues, and what was refused.
func (a *API) countPush(targets []*target) {
	broken := false
	var seen map[int32]bool
	for _, t := range targets {
		err := t.err
		if t.push != nil {
			err = t.push.Err
			if id := t.push.Queue.ID; !seen[id] {
				a.Metrics.Queue(id, metrics.PushRequests, 1)
				if len(targets) > 1 {
					if seen == nil {
						seen = make(map[int32]bool)
					}
					seen[id] = true
				}
			}
		}
		switch {
		case err == nil, errors.Is(err, groupcommit.ErrNoKey):
		case errors.Is(err, groupcommit.ErrFull):
			a.Metrics.Total(metrics.RefusedFull, int64(len(t.items)))
		default:
			a.Metrics.Total(metrics.RefusedDatabase, int64(len(t.items)))
			broken = true
		}
	}
	if broken {
		a.Metrics.Total(metrics.DatabaseErrors, 1)
	}
}

type place struct{ queue, partition string }

func group(items []pushItem) []*target {
	var order []*target
	byPlace := make(map[place]*target)
	for i := range items {
		k := place{items[i].queue, items[i].partition}
		t := byPlace[k]
		if t == nil {
			t = &target{}
			byPlace[k] = t
			order = append(order, t)
		}
		t.items = append(t.items, i)
	}
	return order
}

// resolveTime bounds how long a request looks for its queues and partitions.
const resolveTime = 5 * time.Second

// resolve finds the queue and the partition of every target: one look-up per queue, whatever the number of partitions.
func resolve(ctx context.Context, e *groupcommit.Engine, items []pushItem, targets []*target) {
	var unknown map[string][]*target // by queue
	var queues []string              // of these, in the order they are named: that is the order in which new ones are made
	for _, t := range targets {
		first := &items[t.items[0]]
		if q, p := e.Catalog.Known(first.queue, first.partition); p != nil {
			t.push = newPush(q, p, items, t)
			continue
		}
		if unknown == nil {
			unknown = make(map[string][]*target)
		}
		if unknown[first.queue] == nil {
			queues = append(queues, first.queue)
		}
		unknown[first.queue] = append(unknown[first.queue], t)
	}
	if unknown == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, resolveTime)
	defer cancel()
	for _, queue := range queues {
		of := unknown[queue]
		names := make([]string, len(of))
		for i, t := range of {
			names[i] = items[t.items[0]].partition
		}
		q, err := e.Catalog.EnsureQueue(ctx, queue)
		var found []*catalog.Partition
		if err == nil {
			found, err = e.Catalog.Partitions(ctx, q, names)
		}
		for i, t := range of {
			if err != nil {
				t.err = e.Unavailable(err)
				continue
			}
			t.push = newPush(q, found[i], items, t)
		}
	}
}

func newPush(q *catalog.Queue, part *catalog.Partition, items []pushItem, t *target) *groupcommit.Push {
	p := &groupcommit.Push{Queue: q, Partition: part, Messages: make([]segment.Message, len(t.items))}
	for n, i := range t.items {
		p.Messages[n] = segment.Message{TransactionID: items[i].transactionID, ProducerSub: items[i].sub, Payload: items[i].payload}
	}
	return p
}

// answerPush answers in request order. A group is decided when it was stored, or refused for a reason of its own.
func (a *API) answerPush(w http.ResponseWriter, items []pushItem, targets []*target) error {
	decided, unavailable := false, false
	type outcome struct {
		t *target
		n int
	}
	where := make([]outcome, len(items))
	for _, t := range targets {
		if t.err == nil {
			t.err = t.push.Err
		}
		switch {
		case t.err == nil, errors.Is(t.err, groupcommit.ErrFull), errors.Is(t.err, groupcommit.ErrNoKey):
			decided = true
		case errors.Is(t.err, groupcommit.ErrNoConnection), errors.Is(t.err, groupcommit.ErrUnknown), errors.Is(t.err, groupcommit.ErrClosed):
			unavailable = true
		}
		for n, i := range t.items {
			where[i] = outcome{t, n}
		}
	}
	if !decided {
		if unavailable {
			return busy("database unavailable")
		}
		return failed("push failed")
	}
	b := make([]byte, 0, 256*len(items))
	b = append(b, '[')
	for i := range items {
		if i > 0 {
			b = append(b, ',')
		}
		o := where[i]
		status, id := "queued", uuid.UUID{}
		if o.t.err != nil {
			status, id = "failed", segment.NewFirstID(time.Now())
		} else if id = o.t.push.Results[o.n].ID; o.t.push.Results[o.n].Duplicate {
			status = "duplicate"
		}
		b = append(b, `{"index":`...)
		b = strconv.AppendInt(b, int64(i), 10)
		b = append(b, `,"message_id":"`...)
		b = appendUUID(b, id)
		b = append(b, `","transaction_id":`...)
		if tid := items[i].transactionID; tid != "" {
			b = quote(b, tid)
		} else {
			b = append(appendUUID(append(b, '"'), id), '"')
		}
		b = append(b, `,"queueName":`...)
		b = quote(b, items[i].queue)
		b = append(b, `,"status":"`...)
		b = append(b, status...)
		b = append(b, `","partitionId":`...)
		if row := partitionRow(o.t.push); row != nil {
			b = append(appendUUID(append(b, '"'), row.PublicID), '"')
		} else {
			b = append(b, "null"...)
		}
		if o.t.err != nil {
			b = quote(append(b, `,"error":`...), pushError(o.t.err))
		}
		b = append(b, '}')
	}
	return a.write(w, http.StatusCreated, append(b, ']'))
}

func partitionRow(p *groupcommit.Push) *catalog.Row {
	if p == nil {
		return nil
	}
	return p.Partition.Row()
}

func pushError(err error) string {
	switch {
	case errors.Is(err, groupcommit.ErrFull):
		return "queue is full"
	case errors.Is(err, groupcommit.ErrNoKey):
		return "encryption key not configured"
	case errors.Is(err, groupcommit.ErrNoConnection), errors.Is(err, groupcommit.ErrUnknown), errors.Is(err, groupcommit.ErrClosed):
		return "database unavailable"
	}
	return "push failed"
}
