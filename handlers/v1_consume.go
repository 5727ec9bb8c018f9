package handlers

import (
	"errors"
	"net/http"
	"strconv"
	"time"

	"ferrymq/catalog"
	"ferrymq/groupcommit"
	"ferrymq/metrics"
	"ferrymq/segment"
)

const (
	defaultReceive  = 10
	maxReceive      = 100
	maxWaitSeconds  = 25
	maxConsumer     = 200
	maxDeliveries   = 1000
	maxRetryAfter   = 7 * 24 * time.Hour
	maxExtendSecond = 43_200
)

func consumeRoutes() []route {
	return []route{
		on("POST", "/v1/subscriptions/{sub}/receive", readWrite, (*API).receive),
		on("POST", "/v1/subscriptions/{sub}/ack", readWrite, (*API).ackDeliveries),
		on("POST", "/v1/subscriptions/{sub}/nack", readWrite, (*API).nackDeliveries),
		on("POST", "/v1/subscriptions/{sub}/extend", readWrite, (*API).extendDeliveries),
	}
}

// subscription finds what the path names.
func (a *API) subscription(r *request) (*project, *catalog.Group, error) {
	p, err := a.project(r)
	if err != nil {
		return nil, nil, err
	}
	sub := r.params[0]
	if !validName(sub, maxName) {
		return nil, nil, badName("subscription", maxName)
	}
	if p.Catalog == nil {
		return nil, nil, p.missing("subscription", sub)
	}
	g, err := p.Subscription(r.Context(), sub)
	if err != nil {
		return nil, nil, a.databaseError(r, err, "query failed")
	}
	if g == nil {
		return nil, nil, p.missing("subscription", sub)
	}
	return p, g, nil
}

// readReceive reads the body of a receive; an empty one is all defaults.
func readReceive(body []byte) (most int64, wait time.Duration, consumer string, err error) {
	most = defaultReceive
	if len(body) == 0 {
		return most, 0, "", nil
	}
	err = parse(body, func(d *document) error {
		return d.object(func(name string) error {
			switch name {
			case "max_messages":
				if null, err := d.null(); null || err != nil {
					return err
				}
				raw, err := d.value()
				n, ok := wholeNumber(raw)
				if err == nil && (!ok || n < 1) {
					err = bad("max_messages must be a whole number of at least 1")
				}
				most = min(n, maxReceive)
				return err
			case "wait_seconds":
				if null, err := d.null(); null || err != nil {
					return err
				}
				raw, err := d.value()
				f, ok := number(raw)
				if err == nil && (!ok || f < 0) {
					err = bad("wait_seconds must be a number of at least 0")
				}
				wait = time.Duration(min(f, maxWaitSeconds) * float64(time.Second))
				return err
			case "consumer":
				s, err := d.optionalText()
				if s == nil || err != nil {
					return err
				}
				if consumer = *s; consumer != "" && !validName(consumer, maxConsumer) {
					return bad("consumer must be at most %d bytes of UTF-8 without NUL", maxConsumer)
				}
				return nil
			}
			return d.skip()
		})
	})
	return most, wait, consumer, err
}

func (a *API) receive(w http.ResponseWriter, r *request) error {
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	most, wait, consumer, err := readReceive(body)
	if err != nil {
		return err
	}
	p, g, err := a.subscription(r)
	if err != nil {
		return err
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	var d *groupcommit.Delivery
	for deadline, tries := time.Now().Add(wait), 0; ; tries++ {
		d, err = r.engine.Receive(r.Context(), g, most, time.Until(deadline), consumer)
		if !errors.Is(err, catalog.ErrGone) || tries == 3 {
			break
		}
		// Deleted or changed since it was looked up.
		p.Catalog.ForgetSubscription(g.Name)
		if _, g, err = a.subscription(r); err != nil {
			return err
		}
	}
	switch {
	case r.Context().Err() != nil:
		if d != nil {
			d.Release()
		}
		return r.Context().Err()
	case errors.Is(err, groupcommit.ErrOverloaded):
		return busy("overloaded")
	case err != nil:
		return a.databaseError(r, err, "receive failed")
	case d == nil:
		return a.write(w, http.StatusOK, []byte(`{"messages":[]}`))
	}
	if err := a.stillAllowed(r); err != nil {
		d.Release()
		return err
	}
	out, damaged := a.appendReceived(r.engine, p, d)
	if len(damaged) > 0 { // their lanes are held up, no others
		d.Unreadable(damaged, false)
		a.Metrics.Total(metrics.DecryptionFailures, 1)
		if len(damaged) == len(d.Spans) {
			return failed("decryption failed")
		}
	}
	if r.Context().Err() != nil || a.write(w, http.StatusOK, out) != nil {
		d.Release()
	}
	return nil
}

// appendReceived builds the answer of a receive from the messages that can be read.
func (a *API) appendReceived(e *groupcommit.Engine, p *project, d *groupcommit.Delivery) (b []byte, damaged []*groupcommit.Span) {
	b = append(b, `{"messages":[`...)
	for _, s := range d.Spans {
		g := &s.Segments[0]
		at := int(s.Start - g.Base)
		open, err := segment.DecodeRange(e.Keys, g.Codec, g.KeyNo, g.FirstID, int(g.Count), g.Frames, at, at+1)
		if err != nil {
			a.Log.Error("a stored message cannot be read", "stream", s.Group.Lanes.Stream, "key", s.Partition.Name, "error", err)
			damaged = append(damaged, s)
			continue
		}
		m := open.Raw(at)
		if b[len(b)-1] == '}' {
			b = append(b, ',')
		}
		b = a.appendDeliveryID(append(b, `{"delivery_id":"`...), s.Row.ID, s.Start, d.Lease)
		b = strconv.AppendInt(append(b, `","attempt":`...), int64(s.Attempt), 10)
		b = e.Now().Add(s.Lease()).UTC().AppendFormat(append(b, `,"lease_expires_at":"`...), timeMilli)
		b = append(b, `","message":{`...)
		b = p.appendMessage(b, s.Group.Lanes.Stream, s, g, &m)
		b = append(b, `}}`...)
	}
	return append(b, `]}`...), damaged
}

// settled is one entry of a request that settles deliveries, in its order.
type settled struct {
	sent []byte // as it stood in the body
	d    *groupcommit.Delivered
	err  error
}

var errUnknownDelivery = errors.New("unknown delivery id")

// readSettling decodes the body of ack, nack and extend: delivery_ids, and what field takes.
func readSettling(body []byte, field func(d *document, name string) error) (all []settled, err error) {
	seen := false
	err = parse(body, func(d *document) error {
		return d.object(func(name string) error {
			if name != "delivery_ids" {
				return field(d, name)
			}
			if d.kind() != '[' {
				return errNoDeliveries
			}
			seen, all = true, nil
			return d.array(func(i int) error {
				if i == maxDeliveries {
					return bad("too many delivery_ids: at most %d", maxDeliveries)
				}
				raw, err := d.value()
				all = append(all, settled{sent: raw, err: errUnknownDelivery})
				return err
			})
		})
	})
	if err == nil && !seen {
		err = errNoDeliveries
	}
	return all, err
}

// settling reads which deliveries of which subscription a call settles.
func (a *API) settling(w http.ResponseWriter, r *request, field func(d *document, name string) error) (g *catalog.Group, all []settled, ds []*groupcommit.Delivered, err error) {
	body, err := a.body(w, r.Request)
	if err != nil {
		return nil, nil, nil, err
	}
	if all, err = readSettling(body, field); err != nil {
		return nil, nil, nil, err
	}
	_, g, err = a.subscription(r)
	if err != nil {
		return nil, nil, nil, err
	}
	for i := range all {
		s := &all[i]
		if s.d = a.decodeDelivery(text(s.sent), g.ID); s.d != nil {
			s.err = nil
			ds = append(ds, s.d)
		}
	}
	return g, all, ds, nil
}

var errNoDeliveries = bad("delivery_ids must be an array")

// answerSettled answers with one result per id. An outage is a 500 only when it hit all of them.
func (a *API) answerSettled(w http.ResponseWriter, r *request, all []settled, ds []*groupcommit.Delivered, err error) error {
	if err != nil {
		return a.databaseError(r, err, "settle failed")
	}
	b := append(make([]byte, 0, 100*len(all)), `{"results":[`...)
	for i, s := range all {
		if i > 0 {
			b = append(b, ',')
		}
		err := s.err
		if s.d != nil {
			err = s.d.Err
		}
		b = append(append(b, `{"delivery_id":`...), s.sent...)
		b = strconv.AppendBool(append(b, `,"ok":`...), err == nil)
		if err != nil {
			b = quote(append(b, `,"error":`...), settleError(err))
		} else if !s.d.Until.IsZero() {
			b = s.d.Until.UTC().AppendFormat(append(b, `,"lease_expires_at":"`...), timeMilli)
			b = append(b, '"')
		}
		b = append(b, '}')
	}
	return a.write(w, http.StatusOK, append(b, `]}`...))
}

func settleError(err error) string {
	for _, known := range []error{errUnknownDelivery, groupcommit.ErrLeaseLost, groupcommit.ErrSettled} {
		if errors.Is(err, known) {
			return known.Error()
		}
	}
	return "not settled: try again"
}

func (a *API) ackDeliveries(w http.ResponseWriter, r *request) error {
	g, all, ds, err := a.settling(w, r, func(d *document, _ string) error { return d.skip() })
	if err != nil {
		return err
	}
	return a.answerSettled(w, r, all, ds, r.engine.AckLanes(r.Context(), g, ds))
}

func (a *API) nackDeliveries(w http.ResponseWriter, r *request) error {
	why, release := "", false
	delay, badDelay := time.Duration(-1), false
	g, all, ds, err := a.settling(w, r, func(d *document, name string) (err error) {
		var s *string
		switch name {
		case "error":
			if s, err = d.optionalText(); s != nil {
				why = *s
			}
			return err
		case "retry_after":
			if s, err = d.optionalText(); s == nil || err != nil {
				return err
			}
			var ok bool
			delay, ok = parseDuration(*s)
			badDelay = !ok || delay > maxRetryAfter
			return nil
		case "release":
			return d.boolean(&release)
		}
		return d.skip()
	})
	if err != nil {
		return err
	}
	if release {
		return a.answerSettled(w, r, all, ds, r.engine.ReleaseLanes(r.Context(), g, ds))
	}
	if badDelay {
		return bad("retry_after must be a duration of 0s to 168h, such as \"30s\"")
	}
	return a.answerSettled(w, r, all, ds, r.engine.NackLanes(r.Context(), g, ds, why, signature(why), delay))
}

func (a *API) extendDeliveries(w http.ResponseWriter, r *request) error {
	seconds := int64(0)
	g, all, ds, err := a.settling(w, r, func(d *document, name string) error {
		if name != "seconds" {
			return d.skip()
		}
		raw, err := d.value()
		if n, ok := wholeNumber(raw); ok {
			seconds = n
		}
		return err
	})
	if err != nil {
		return err
	}
	if seconds < 1 || seconds > maxExtendSecond {
		return bad("seconds must be a whole number of 1 to %d", maxExtendSecond)
	}
	r.engine.ExtendLanes(r.Context(), g, ds, int32(seconds))
	return a.answerSettled(w, r, all, ds, nil)
}
