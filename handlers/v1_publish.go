package handlers

import (
	"errors"
	"math/rand/v2"
	"net/http"
	"time"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/groupcommit"
	"ferrymq/metrics"
	"ferrymq/segment"
)

func publishRoutes() []route {
	return []route{on("POST", "/v1/streams/{stream}/messages", writeOnly, (*API).publish)}
}

// outgoing is one message of a publish.
type outgoing struct {
	key     *string // nil: unkeyed
	id      string  // "": minted
	payload []byte
	headers []byte
	delay   time.Duration

	number int64 // of a delayed one that is stored
	err    error // of one that is not
}

// maxDelay is how far ahead a message may be published.
const maxDelay = 365 * 24 * time.Hour

func readPublish(body []byte) (all []outgoing, err error) {
	seen := false
	err = parse(body, func(d *document) error {
		return d.object(func(name string) error {
			if name != "messages" {
				return d.skip()
			}
			if d.kind() != '[' {
				return bad("messages must be an array")
			}
			seen, all = true, nil
			return d.array(func(i int) error {
				if i == maxItems {
					return bad("too many messages: at most %d", maxItems)
				}
				m, err := readOutgoing(d)
				all = append(all, m)
				return err
			})
		})
	})
	if err == nil && !seen {
		err = bad("messages must be an array")
	}
	return all, err
}

func readOutgoing(d *document) (m outgoing, err error) {
	err = d.object(func(name string) (err error) {
		switch name {
		case "key":
			m.key, err = d.optionalName(maxName)
		case "id":
			if null, err := d.null(); null || err != nil {
				return err
			}
			m.id, err = d.name("", maxTransactionID)
		case "payload":
			m.payload, err = d.value()
		case "headers":
			if null, err := d.null(); null || err != nil {
				return err
			}
			if d.kind() != '{' {
				return bad("%s must be an object", d.path)
			}
			m.headers, err = d.value()
			if err == nil && isEmpty(m.headers) {
				m.headers = nil
			}
		case "delay":
			text, err := d.optionalText()
			if text == nil || err != nil {
				return err
			}
			var ok bool
			if m.delay, ok = parseDuration(*text); !ok || m.delay > maxDelay {
				return bad("invalid %s: must be a duration from 0s to %s", d.path, formatDuration(maxDelay))
			}
		default:
			err = d.skip()
		}
		return err
	})
	if err == nil && m.payload == nil {
		err = bad("%s.payload is required", d.path)
	}
	return m, err
}

// carriage is the messages of a publish for one partition.
type carriage struct {
	messages []int
	push     *groupcommit.Push
}

func (a *API) publish(w http.ResponseWriter, r *request) error {
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	all, err := readPublish(body)
	if err != nil {
		return err
	}
	if err := a.pushRefused(); err != nil {
		return err
	}
	p, err := a.project(r)
	if err != nil {
		return err
	}
	name := r.params[0]
	if !validName(name, maxName) {
		return badName("stream", maxName)
	}
	if p.Catalog == nil {
		return p.missing("stream", name)
	}
	q, err := p.EnsureStream(r.Context(), name)
	if errors.Is(err, catalog.ErrNoProject) {
		return p.missing("stream", name)
	} else if err != nil {
		return a.databaseError(r, err, "publish failed")
	}
	if len(all) == 0 {
		return a.write(w, http.StatusOK, []byte(`{"results":[]}`))
	}
	now, later := make([]int, 0, len(all)), []int(nil)
	for i := range all {
		if all[i].delay > 0 {
			later = append(later, i)
		} else {
			now = append(now, i)
		}
	}
	carriages, err := a.load(r, p, q, all, now)
	if err != nil {
		return a.databaseError(r, err, "publish failed")
	}
	pushes := make([]*groupcommit.Push, len(carriages))
	for i, c := range carriages {
		pushes[i] = c.push
	}
	if err := r.engine.Push(r.Context(), pushes); errors.Is(err, groupcommit.ErrOverloaded) {
		return busy("overloaded")
	} else if err != nil {
		return failed("publish failed")
	}
	for _, x := range pushes {
		if errors.Is(x.Err, catalog.ErrNoProject) {
			return p.missing("stream", name)
		}
	}
	if err := a.schedule(r, p, q, all, later, carriages); err != nil {
		return p.missing("stream", name)
	}
	return a.answerPublish(w, all, carriages)
}

// schedule stores the delayed messages of a publish, all or none, but none of a key whose other messages were refused. Its error says that
// the project is gone.
func (a *API) schedule(r *request, p *project, q *catalog.Queue, all []outgoing, later []int, carriages []*carriage) error {
	refused := make(map[string]error)
	for _, c := range carriages {
		if key := all[c.messages[0]].key; key != nil && c.push.Err != nil {
			refused[*key] = c.push.Err
		}
	}
	var these []int
	var messages []groupcommit.Scheduled
	for _, i := range later {
		m := &all[i]
		if m.key != nil && refused[*m.key] != nil {
			m.err = refused[*m.key]
			continue
		}
		these = append(these, i)
		messages = append(messages, groupcommit.Scheduled{Key: m.key, Delay: m.delay, Message: m.message(r)})
	}
	if len(these) == 0 {
		return nil
	}
	numbers, err := r.engine.Schedule(r.Context(), q, messages)
	for range 3 {
		if !errors.Is(err, catalog.ErrGone) {
			break
		}
		p.ForgetQueue(q.Name)
		if q, err = p.EnsureStream(r.Context(), q.Name); err != nil {
			break
		}
		numbers, err = r.engine.Schedule(r.Context(), q, messages)
	}
	if errors.Is(err, catalog.ErrNoProject) {
		return err
	}
	if err != nil && !errors.Is(err, groupcommit.ErrNoKey) && r.Context().Err() == nil {
		a.Metrics.Total(metrics.DatabaseErrors, 1)
		a.Log.Error("publish failed", "path", r.URL.Path, "error", db.Text(err))
	}
	for n, i := range these {
		if all[i].err = err; err == nil {
			all[i].number = numbers[n]
		}
	}
	return nil
}

func (m *outgoing) message(r *request) segment.Message {
	return segment.Message{TransactionID: m.id, Payload: m.payload, Headers: m.headers, ProducerSub: r.sub}
}

// load sorts the messages of a publish by key; those without one are spread over the hidden lanes, and those of them that
// bring an id go where that id always goes, so that it is found again.
func (a *API) load(r *request, p *project, q *catalog.Queue, all []outgoing, now []int) ([]*carriage, error) {
	type place struct {
		hidden bool
		key    string
		lane   int32
	}
	var order []place
	byPlace := make(map[place]*carriage)
	turn := rand.Int32N(q.UnkeyedLanes)
	for _, i := range now {
		m := &all[i]
		at := place{hidden: m.key == nil}
		switch {
		case m.key != nil:
			at.key = *m.key
		case m.id != "":
			at.lane = r.engine.LaneOf(q, m.id)
		default:
			at.lane = turn
			turn = (turn + 1) % q.UnkeyedLanes
		}
		c := byPlace[at]
		if c == nil {
			c = &carriage{}
			byPlace[at] = c
			order = append(order, at)
		}
		c.messages = append(c.messages, i)
	}
	var keys []string
	var lanes []int32
	for _, at := range order {
		if at.hidden {
			lanes = append(lanes, at.lane)
		} else {
			keys = append(keys, at.key)
		}
	}
	named, err := p.Partitions(r.Context(), q, keys)
	if err != nil {
		return nil, err
	}
	hidden, err := p.Unkeyed(r.Context(), q, lanes)
	if err != nil {
		return nil, err
	}
	carriages := make([]*carriage, len(order))
	for n, at := range order {
		c := byPlace[at]
		c.push = &groupcommit.Push{Queue: q, Stream: true, Messages: make([]segment.Message, len(c.messages))}
		if at.hidden {
			c.push.Partition, hidden = hidden[0], hidden[1:]
		} else {
			c.push.Partition, named = named[0], named[1:]
		}
		for k, i := range c.messages {
			c.push.Messages[k] = all[i].message(r)
		}
		carriages[n] = c
	}
	return carriages, nil
}

// answerPublish answers in request order. What is stored for one key stands, whatever became of another.
func (a *API) answerPublish(w http.ResponseWriter, all []outgoing, carriages []*carriage) error {
	type outcome struct {
		c *carriage
		n int
	}
	where := make([]outcome, len(all))
	decided, unavailable := false, false
	judge := func(err error) {
		switch {
		case err == nil, errors.Is(err, groupcommit.ErrFull), errors.Is(err, groupcommit.ErrNoKey):
			decided = true
		case errors.Is(err, groupcommit.ErrNoConnection), errors.Is(err, groupcommit.ErrUnknown), errors.Is(err, groupcommit.ErrClosed):
			unavailable = true
		}
	}
	for i := range all {
		if all[i].delay > 0 {
			judge(all[i].err)
		}
	}
	for _, c := range carriages {
		judge(c.push.Err)
		for n, i := range c.messages {
			where[i] = outcome{c, n}
		}
	}
	if !decided {
		if unavailable {
			return busy("database unavailable")
		}
		return failed("publish failed")
	}
	b := append(make([]byte, 0, 80*len(all)), `{"results":[`...)
	for i := range all {
		if i > 0 {
			b = append(b, ',')
		}
		var push *groupcommit.Push
		err := all[i].err
		if all[i].delay == 0 {
			push = where[i].c.push
			err = push.Err
		}
		if err != nil {
			b = quote(append(b, `{"id":null,"status":"failed","error":`...), pushError(err))
			b = append(b, '}')
			continue
		}
		if push == nil {
			b = append(appendScheduledID(append(b, `{"id":"`...), all[i].number), `","status":"queued"}`...)
			continue
		}
		res := push.Results[where[i].n]
		b = appendMessageID(append(b, `{"id":"`...), push.Partition.Row().ID, res.Offset)
		if res.Duplicate {
			b = append(b, `","status":"duplicate"}`...)
		} else {
			b = append(b, `","status":"queued"}`...)
		}
	}
	return a.write(w, http.StatusOK, append(b, `]}`...))
}
