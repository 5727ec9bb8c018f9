package handlers

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"time"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/groupcommit"
)

func subscriptionRoutes() []route {
	return []route{
		on("GET", "/v1/subscriptions", readOnly, (*API).listSubscriptions),
		on("PUT", "/v1/subscriptions/{sub}", admin, (*API).putSubscription),
		on("GET", "/v1/subscriptions/{sub}", readOnly, (*API).getSubscription),
		on("DELETE", "/v1/subscriptions/{sub}", admin, (*API).deleteSubscription),
		on("GET", "/v1/subscriptions/{sub}/lanes", readOnly, (*API).listLanes),
		on("POST", "/v1/subscriptions/{sub}/seek", admin, (*API).seekLanes),
	}
}

const (
	maxAttempts   = 1_000_000
	maxBackoff    = 7 * 24 * time.Hour
	maxMultiplier = 100
	maxInFlight   = 1_000_000
)

// subscriptionEdit is a PUT of a subscription.
type subscriptionEdit struct {
	stream *string
	start  *catalog.Start
	edits  []func(p *catalog.Policy)
}

func readSubscriptionEdit(body []byte) (*subscriptionEdit, error) {
	e := &subscriptionEdit{}
	if len(body) == 0 {
		return e, nil
	}
	def := catalog.DefaultPolicy()
	set := func(edit func(p *catalog.Policy)) { e.edits = append(e.edits, edit) }
	err := parse(body, func(d *document) error {
		return d.object(func(name string) (err error) {
			switch name {
			case "stream":
				e.stream, err = d.optionalName(maxName)
			case "start":
				e.start, err = d.place()
			case "lease_seconds":
				var n int32
				n, err = d.whole(def.LeaseSeconds, 1, maxLeaseSeconds)
				set(func(p *catalog.Policy) { p.LeaseSeconds = n })
			case "count_expired_leases":
				var yes bool
				yes, err = d.flag(def.CountExpired)
				set(func(p *catalog.Policy) { p.CountExpired = yes })
			case "max_in_flight":
				var n int32
				n, err = d.whole(def.MaxInFlight, 0, maxInFlight)
				set(func(p *catalog.Policy) { p.MaxInFlight = n })
			case "paused":
				var yes bool
				yes, err = d.flag(def.Paused)
				set(func(p *catalog.Policy) { p.Paused = yes })
			case "trace":
				var s *string
				if d.kind() == '"' || d.kind() == 'n' {
					s, err = d.optionalText()
				} else if _, err = d.value(); err == nil {
					s = new(string)
				}
				if err == nil && s != nil && *s != "full" && *s != "failures" {
					err = bad(`trace must be "full" or "failures"`)
				}
				set(func(p *catalog.Policy) { p.TraceFull = s != nil && *s == "full" })
			case "retry":
				err = readRetry(d, &def, set)
			default:
				err = d.skip()
			}
			return err
		})
	})
	return e, err
}

func readRetry(d *document, def *catalog.Policy, set func(func(p *catalog.Policy))) error {
	if null, err := d.null(); null || err != nil {
		set(func(p *catalog.Policy) {
			p.MaxAttempts, p.Initial, p.Multiplier, p.Max = def.MaxAttempts, def.Initial, def.Multiplier, def.Max
		})
		return err
	}
	if k := d.kind(); k != '{' && k != 0 {
		return bad("retry must be an object")
	}
	return d.object(func(name string) (err error) {
		switch name {
		case "max_attempts":
			var n int32
			n, err = d.whole(def.MaxAttempts, 0, maxAttempts)
			set(func(p *catalog.Policy) { p.MaxAttempts = n })
		case "initial":
			var t time.Duration
			t, err = d.duration(def.Initial, maxBackoff, time.Millisecond)
			set(func(p *catalog.Policy) { p.Initial = t })
		case "max":
			var t time.Duration
			t, err = d.duration(def.Max, maxBackoff, time.Millisecond)
			set(func(p *catalog.Policy) { p.Max = t })
		case "multiplier":
			var f float64
			f, err = d.multiplier(def.Multiplier)
			set(func(p *catalog.Policy) { p.Multiplier = f })
		default:
			err = d.skip()
		}
		return err
	})
}

func (d *document) multiplier(def float64) (float64, error) {
	if null, err := d.null(); null || err != nil {
		return def, err
	}
	raw, err := d.value()
	if err != nil {
		return 0, err
	}
	f, ok := number(raw)
	if !ok || f < 1 || f > maxMultiplier {
		return 0, bad("%s must be a number of 1 to %d", d.path, maxMultiplier)
	}
	return f, nil
}

func (e *subscriptionEdit) apply(p *catalog.Policy) error {
	for _, edit := range e.edits {
		edit(p)
	}
	if p.Initial > p.Max {
		return bad("retry.initial must be at most retry.max, which is %s", formatDuration(p.Max))
	}
	return nil
}

// listedSubscription is a subscription with its settings, spelled as a PUT takes them.
type listedSubscription struct {
	Name         string      `json:"name"`
	Project      string      `json:"project"`
	Stream       string      `json:"stream"`
	Start        string      `json:"start"`
	LeaseSeconds int32       `json:"lease_seconds"`
	Retry        retryPolicy `json:"retry"`
	CountExpired bool        `json:"count_expired_leases"`
	MaxInFlight  int32       `json:"max_in_flight"`
	Paused       bool        `json:"paused"`
	Trace        string      `json:"trace"`
	CreatedAt    instant     `json:"created_at"`
	UpdatedAt    instant     `json:"updated_at"`
}

type retryPolicy struct {
	MaxAttempts int32   `json:"max_attempts"`
	Initial     string  `json:"initial"`
	Multiplier  float64 `json:"multiplier"`
	Max         string  `json:"max"`
}

func (p *project) subscriber(s *catalog.SubscriptionRow) listedSubscription {
	policy := catalog.PolicyOf(s)
	start, trace := s.StartAt.UTC().Format(timeMilli), "failures"
	switch s.StartMode {
	case "all":
		start = "earliest"
	case "new":
		start = "latest"
	}
	if policy.TraceFull {
		trace = "full"
	}
	return listedSubscription{Name: s.Name, Project: p.name, Stream: s.Queue, Start: start, LeaseSeconds: policy.LeaseSeconds,
		Retry:        retryPolicy{policy.MaxAttempts, formatDuration(policy.Initial), policy.Multiplier, formatDuration(policy.Max)},
		CountExpired: policy.CountExpired, MaxInFlight: policy.MaxInFlight, Paused: policy.Paused, Trace: trace,
		CreatedAt: instant(s.CreatedAt), UpdatedAt: instant(s.UpdatedAt)}
}

// answerSubscription answers with a subscription and its numbers: lanes, except for the backlog and the dead, which are messages.
func (a *API) answerSubscription(w http.ResponseWriter, r *request, p *project, s *catalog.SubscriptionRow) error {
	n, err := counted(a, r, func(ctx context.Context) (db.SubscriptionNumbersRow, error) {
		return a.queries.SubscriptionNumbers(ctx, db.SubscriptionNumbersParams{ID: s.ID})
	})
	if err != nil {
		return err
	}
	var oldest *int64
	if n.Oldest >= 0 {
		oldest = &n.Oldest
	}
	return a.reply(w, http.StatusOK, struct {
		listedSubscription
		Ready    int64  `json:"ready"`
		InFlight int64  `json:"in_flight"`
		Retrying int64  `json:"waiting_for_retry"`
		Backlog  int64  `json:"backlog"`
		Dead     int64  `json:"dead"`
		Oldest   *int64 `json:"oldest_age_seconds"`
	}{p.subscriber(s), n.Ready, n.InFlight, n.Retrying, n.Backlog, n.Dead, oldest})
}

func conflict(format string, args ...any) error {
	return &httpError{status: http.StatusConflict, text: fmt.Sprintf(format, args...)}
}

func (a *API) putSubscription(w http.ResponseWriter, r *request) error {
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	edit, err := readSubscriptionEdit(body)
	if err != nil {
		return err
	}
	p, sub, err := a.named(r, "subscription")
	if err != nil {
		return err
	}
	var g *catalog.Group
	for tries := 0; ; tries++ {
		if g, err = a.subscribe(r, p, sub, edit); !errors.Is(err, catalog.ErrGone) || tries == 20 {
			break
		}
		select { // its stream is being deleted
		case <-time.After(50 * time.Millisecond):
		case <-r.Context().Done():
			return r.Context().Err()
		}
	}
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	if a.Changed != nil {
		a.Changed(g.QueueID)
	}
	return a.getSubscription(w, r)
}

// subscribe makes or changes a subscription; ErrGone: its stream was deleted meanwhile.
func (a *API) subscribe(r *request, p *project, sub string, edit *subscriptionEdit) (*catalog.Group, error) {
	s, err := p.ReadSubscription(r.Context(), sub)
	if err != nil {
		return nil, err
	}
	var q *catalog.Queue
	if s != nil {
		if edit.stream != nil && *edit.stream != s.Queue {
			return nil, conflict("subscription %s is of stream %s: its stream cannot be changed", sub, s.Queue)
		}
		q, err = p.Queue(r.Context(), s.Queue)
	} else {
		if edit.stream == nil {
			return nil, bad("stream is required to create a subscription")
		}
		policy := catalog.DefaultPolicy()
		if err := edit.apply(&policy); err != nil {
			return nil, err
		}
		q, err = p.EnsureStream(r.Context(), *edit.stream)
		if errors.Is(err, catalog.ErrNoProject) {
			err = p.missing("subscription", sub)
		}
	}
	if err != nil {
		return nil, err
	}
	if q == nil {
		return nil, catalog.ErrGone
	}
	g, err := p.Subscribe(r.Context(), q, sub, edit.start, edit.apply)
	switch {
	case errors.Is(err, catalog.ErrTaken):
		return nil, conflict("subscription %s is of another stream: its stream cannot be changed", sub)
	case errors.Is(err, catalog.ErrStarted):
		return nil, conflict("subscription %s exists: its start cannot be changed, seek moves it", sub)
	case errors.Is(err, catalog.ErrGone):
		p.ForgetQueue(q.Name)
	case err == nil && g == nil:
		err = catalog.ErrGone
	}
	return g, err
}

// readSubscription reads what the path names as it is now.
func (a *API) readSubscription(r *request) (*project, *catalog.SubscriptionRow, error) {
	p, sub, err := a.named(r, "subscription")
	if err != nil {
		return nil, nil, err
	}
	s, err := p.ReadSubscription(r.Context(), sub)
	if err != nil {
		return nil, nil, a.databaseError(r, err, "query failed")
	}
	if s == nil {
		return nil, nil, p.missing("subscription", sub)
	}
	return p, s, nil
}

func (a *API) getSubscription(w http.ResponseWriter, r *request) error {
	p, s, err := a.readSubscription(r)
	if err != nil {
		return err
	}
	return a.answerSubscription(w, r, p, s)
}

func (a *API) listSubscriptions(w http.ResponseWriter, r *request) error {
	limit, after, err := pagingNames(r)
	if err != nil {
		return err
	}
	p, err := a.project(r)
	if err != nil {
		return err
	}
	var rows []catalog.SubscriptionRow
	if p.Catalog != nil {
		if rows, err = p.Subscriptions(r.Context(), after, limit+1); err != nil {
			return a.databaseError(r, err, "query failed")
		}
	}
	rows, next := more(rows, limit, func(s catalog.SubscriptionRow) []byte { return []byte(s.Name) })
	list := make([]listedSubscription, len(rows))
	for i := range rows {
		list[i] = p.subscriber(&rows[i])
	}
	return a.reply(w, http.StatusOK, struct {
		Subscriptions []listedSubscription `json:"subscriptions"`
		Next          *string              `json:"next_cursor"`
	}{list, next})
}

func (a *API) deleteSubscription(w http.ResponseWriter, r *request) error {
	p, s, err := a.readSubscription(r)
	if err != nil {
		return err
	}
	existed, err := r.engine.DeleteSubscription(r.Context(), &catalog.Group{ID: s.ID, QueueID: s.QueueID, Name: s.Name})
	p.ForgetSubscription(s.Name)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	if !existed {
		return p.missing("subscription", s.Name)
	}
	if a.Changed != nil {
		a.Changed(s.QueueID)
	}
	return a.write(w, http.StatusOK, []byte(`{"deleted":true}`))
}

// listedLane is a key that has something to deliver.
type listedLane struct {
	Key            *string `json:"key"` // null: one of the unkeyed lanes
	State          string  `json:"state"`
	MessageID      string  `json:"message_id"`
	Attempt        int32   `json:"attempt"`
	Consumer       *string `json:"consumer"`
	Since          instant `json:"since"`
	LeaseExpiresAt instant `json:"lease_expires_at"`
	RetryAt        instant `json:"retry_at"`
	LastError      *string `json:"last_error"`
}

// laneScan is how many lanes a page looks at, at most, for those in one state: it may have fewer than limit, and a cursor all the same.
const laneScan = 20_000

func (a *API) listLanes(w http.ResponseWriter, r *request) error {
	limit, raw, err := paging(r, 8)
	if err != nil {
		return err
	}
	after := int64(0)
	if raw != nil {
		after = int64(binary.BigEndian.Uint64(raw))
	}
	state := query(r.URL).Get("state")
	switch state {
	case "", "ready", "leased", "retrying", "delayed":
	default:
		return badQuery("state")
	}
	_, s, err := a.readSubscription(r)
	if err != nil {
		return err
	}
	rows, err := counted(a, r, func(ctx context.Context) ([]db.LanePageRow, error) {
		return a.queries.LanePage(ctx, db.LanePageParams{ID: s.ID, After: after, State: state, Scan: laneScan, Max: limit + 1})
	})
	if err != nil {
		return err
	}
	last := rows[0].Last
	if rows[0].PartitionID == 0 {
		rows = nil
	}
	rows, next := more(rows, limit, func(x db.LanePageRow) []byte { return binary.BigEndian.AppendUint64(nil, uint64(x.PartitionID)) })
	if next == nil && last > 0 {
		at := crockford.EncodeToString(binary.BigEndian.AppendUint64(nil, uint64(last)))
		next = &at
	}
	list := make([]listedLane, len(rows))
	for i := range rows {
		x := &rows[i]
		l := listedLane{State: x.State, MessageID: string(appendMessageID(nil, x.PartitionID, x.Head)), Attempt: x.Attempts, Since: instant(x.Since),
			LeaseExpiresAt: instant(x.LeaseUntil), RetryAt: instant(x.NotBefore)}
		if !x.Hidden {
			l.Key = &x.Name
		}
		if x.Consumer != "" {
			l.Consumer = &x.Consumer
		}
		if x.Failed {
			l.LastError = &x.Error
		}
		list[i] = l
	}
	return a.reply(w, http.StatusOK, struct {
		Lanes []listedLane `json:"lanes"`
		Next  *string      `json:"next_cursor"`
	}{list, next})
}

func (a *API) seekLanes(w http.ResponseWriter, r *request) error {
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	var to *catalog.Start
	err = parse(body, func(d *document) error {
		return d.object(func(name string) (err error) {
			if name != "to" {
				return d.skip()
			}
			to, err = d.place()
			return err
		})
	})
	if err == nil && to == nil {
		err = bad("to must be %s", aPlace)
	}
	if err != nil {
		return err
	}
	_, s, err := a.readSubscription(r)
	if err != nil {
		return err
	}
	target := groupcommit.Target{End: to.At == nil}
	if to.At != nil {
		target.At = *to.At
	}
	moved, err := r.engine.SeekLanes(r.Context(), &catalog.Group{ID: s.ID, QueueID: s.QueueID, Name: s.Name}, target)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	return a.reply(w, http.StatusOK, struct {
		Moved int64 `json:"lanes_moved"`
	}{moved})
}
