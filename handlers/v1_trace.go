package handlers

import (
	"cmp"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"ferrymq/db"
)

func laneTraceRoutes() []route {
	return []route{on("GET", "/v1/messages/{id}/trace", readOnly, (*API).laneTrace)}
}

const (
	traceLanes  = 1000 // subscriptions that a trace shows
	traceEvents = 2000 // newest events of its message
)

// The kinds of ferrymq.lane_events.
const (
	kindDelivered = iota
	kindFailed
	kindAcked
	kindDead
	kindRedriven
)

var kindNames = []string{"delivered", "failed", "acked", "dead_lettered", "redriven"}

// messageTrace is what became of a message.
type messageTrace struct {
	ID            string      `json:"id"`
	Stream        string      `json:"stream"`
	Project       string      `json:"project"`
	Key           *string     `json:"key"`
	PublishedAt   instant     `json:"published_at"` // null: nobody knows any more
	Subscriptions []laneTrace `json:"subscriptions"`
}

type laneTrace struct {
	Subscription string      `json:"subscription"`
	State        string      `json:"state"`
	Attempts     int32       `json:"attempts"`
	Events       []laneEvent `json:"events"`
}

type laneEvent struct {
	Event      string  `json:"event"`
	Attempt    int32   `json:"attempt"`
	At         instant `json:"at"`
	Consumer   *string `json:"consumer"`
	Error      *string `json:"error"`
	DeadLetter string  `json:"dead_letter,omitempty"` // while it is there
	Message    string  `json:"message,omitempty"`     // that it was redriven as

	kind int
}

// laneTrace finds a message by where its id says that it is.
func (a *API) laneTrace(w http.ResponseWriter, r *request) error {
	p, err := a.project(r)
	if err != nil {
		return err
	}
	if !validName(r.params[0], maxName) {
		return badName("message id", maxName)
	}
	missing := p.missingMessage(r.params[0])
	id := r.params[0]
	partition, offset, ok := decodeMessageID(id)
	number, delayed := decodeScheduledID(id)
	if !ok && !delayed || p.Catalog == nil {
		return missing
	}
	if delayed {
		at, err := a.queries.OutboxFind(r.Context(), db.OutboxFindParams{ID: number, ProjectID: p.Project()})
		if errors.Is(err, pgx.ErrNoRows) {
			return missing
		}
		if err != nil {
			return a.databaseError(r, err, "query failed")
		}
		if at.PartitionID == 0 { // it is not due
			return a.reply(w, http.StatusOK, messageTrace{ID: id, Stream: at.Stream, Project: p.name, Key: at.Key})
		}
		partition, offset = at.PartitionID, at.MessageOffset
		id = string(appendMessageID(nil, partition, offset))
	}
	m, err := a.queries.TraceMessage(r.Context(), db.TraceMessageParams{ProjectID: p.Project(), PartitionID: partition, MessageOffset: offset})
	if errors.Is(err, pgx.ErrNoRows) {
		return missing
	}
	var lanes []db.TraceLanesRow
	var events []db.TraceEventsRow
	var dead []db.TraceDeadRow
	if err == nil {
		lanes, err = a.queries.TraceLanes(r.Context(), db.TraceLanesParams{PartitionID: partition, QueueID: m.QueueID, Max: traceLanes})
	}
	if err == nil {
		events, err = a.queries.TraceEvents(r.Context(), db.TraceEventsParams{PartitionID: partition, MessageOffset: offset, Max: traceEvents})
	}
	if err == nil {
		dead, err = a.queries.TraceDead(r.Context(), db.TraceDeadParams{PartitionID: partition, MessageOffset: offset, Max: traceEvents})
	}
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	if !m.Stored && len(events)+len(dead) == 0 {
		return missing
	}
	t := messageTrace{ID: id, Stream: m.Stream, Project: p.name}
	if !m.Hidden {
		t.Key = &m.Name
	}
	if m.Stored {
		t.PublishedAt = instant(m.CreatedAt)
	} else if len(dead) > 0 {
		t.PublishedAt = instant(dead[0].MessageCreatedAt)
	}
	for i := range lanes {
		if l := &lanes[i]; m.OnlyGroup == 0 || m.OnlyGroup == l.ID {
			t.Subscriptions = append(t.Subscriptions, traceOf(l, partition, offset, events, dead))
		}
	}
	return a.reply(w, http.StatusOK, t)
}

func (p *project) missingMessage(id string) error {
	return notFound("no message with id " + id + " in project " + p.name)
}

// traceOf puts together what is known of a message in one lane: events, its dead letter, and what the cursor remembers of the last delivery.
func traceOf(l *db.TraceLanesRow, partition, offset int64, events []db.TraceEventsRow, dead []db.TraceDeadRow) laneTrace {
	t := laneTrace{Subscription: l.Name, Events: []laneEvent{}}
	add := func(kind int, attempt int32, at time.Time, consumer, text *string) *laneEvent {
		if consumer != nil && *consumer == "" {
			consumer = nil
		}
		t.Events = append(t.Events, laneEvent{Event: kindNames[kind], Attempt: attempt, At: instant(at), Consumer: consumer, Error: text, kind: kind})
		return &t.Events[len(t.Events)-1]
	}
	has := func(kind int, attempt int32) *laneEvent {
		i := slices.IndexFunc(t.Events, func(e laneEvent) bool { return e.kind == kind && e.Attempt == attempt })
		if i < 0 {
			return nil
		}
		return &t.Events[i]
	}
	failed := int32(0)
	for i := range slices.Backward(events) {
		e := &events[i]
		if e.GroupID != l.ID || int(e.Kind) >= len(kindNames) {
			continue
		}
		x := add(int(e.Kind), e.Attempt, e.At, e.Consumer, e.Error)
		if e.ToOffset != nil {
			x.Message = string(appendMessageID(nil, partition, *e.ToOffset))
		}
		if e.Kind == kindFailed {
			failed = max(failed, e.Attempt)
		}
	}
	isDead := false
	for i := range dead {
		d := &dead[i]
		if d.GroupID != l.ID {
			continue
		}
		x := has(kindDead, d.RetryCount)
		if x == nil {
			x = add(kindDead, d.RetryCount, d.FailedAt, d.Consumer, &d.ErrorMessage)
		}
		x.DeadLetter, isDead = string(appendID(nil, deadPrefix, d.ID[:])), true
	}
	if l.LeasedAt != nil {
		switch {
		case l.Met && l.Committed == offset && l.Attempts > 0:
			if has(kindDelivered, l.Attempts) == nil {
				add(kindDelivered, l.Attempts, *l.LeasedAt, l.Consumer, nil)
			}
		case l.Met && l.Committed == offset+1 && l.Attempts == 0 && l.Origin <= offset: // its last delivery, nothing has been since
			attempt := failed + 1
			for _, e := range t.Events {
				if e.kind == kindDead {
					attempt = e.Attempt
				}
			}
			if has(kindDelivered, attempt) == nil {
				add(kindDelivered, attempt, *l.LeasedAt, l.Consumer, nil)
			}
		}
	}
	slices.SortStableFunc(t.Events, func(a, b laneEvent) int {
		return cmp.Or(time.Time(a.At).Compare(time.Time(b.At)), cmp.Compare(a.Attempt, b.Attempt), cmp.Compare(a.kind, b.kind))
	})
	for _, e := range t.Events {
		t.Attempts = max(t.Attempts, e.Attempt)
	}
	last := -1
	if n := len(t.Events); n > 0 {
		last = t.Events[n-1].kind
	}
	switch {
	case !l.Met || l.Committed < offset:
		t.State = "not_reached"
	case l.Committed > offset && isDead, l.Committed > offset && last == kindDead:
		t.State = "dead"
	case l.Committed > offset && last == kindRedriven:
		t.State = "redriven"
	case l.Committed > offset && l.Origin > offset && len(t.Events) == 0: // it began behind it
		t.State = "not_reached"
	case l.Committed > offset:
		t.State = "acked"
	case l.Leased:
		t.State = "in_flight"
	case l.Resting || l.Attempts > 0:
		t.State = "retrying"
	default:
		t.State = "ready"
	}
	return t
}
