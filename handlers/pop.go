package handlers

import (
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/groupcommit"
	"ferrymq/metrics"
	"ferrymq/segment"
)

const (
	defaultBatch    = 200
	maxBatch        = 10_000
	maxLeaseSeconds = 43_200
	maxTimeout      = 300_000
)

// readPop reads what the three pop routes share.
func (a *API) readPop(r *request, discovery bool) (*groupcommit.Pop, error) {
	q := &params{values: query(r.URL)}
	p := &groupcommit.Pop{Group: catalog.QueueMode}
	p.Batch = q.number("batch", defaultBatch, 1, maxBatch)
	if p.Partitions = q.number("partitions", 1, -1, maxBatch); p.Partitions <= 0 {
		p.Partitions = p.Batch
	}
	p.AutoAck = q.boolean("autoAck")
	wait := q.boolean("wait")
	timeout := q.number("timeout", a.DefaultTimeout.Milliseconds(), 0, maxTimeout)
	if wait {
		p.Wait = time.Duration(timeout) * time.Millisecond
	}
	p.Seconds = int32(max(q.number("leaseSeconds", 0, 0, maxLeaseSeconds), 0))
	if q.values.Has("consumerGroup") {
		p.Group, p.Named = q.text("consumerGroup"), true
		if !validName(p.Group, maxName) {
			q.fail("consumerGroup")
		}
		p.Named = p.Group != catalog.QueueMode
	}
	p.Start = a.DefaultStart
	if m := q.text("subscriptionMode"); m != "" {
		start, ok := ParseStart(m)
		if !ok {
			q.fail("subscriptionMode")
		}
		p.Start = start
	}
	if f := q.text("subscriptionFrom"); f == "now" {
		p.Start = catalog.Start{Mode: "new"}
	} else if t, ok := parseTime(f); ok {
		p.Start = catalog.Start{Mode: "time", At: &t}
	}
	if p.Group == catalog.QueueMode {
		p.Start = catalog.All()
	}
	if discovery {
		p.Scope = catalog.Scope{Namespace: q.name("namespace", ""), Task: q.name("task", "")}
	}
	return p, q.err
}

// ParseStart reads a subscriptionMode.
func ParseStart(mode string) (catalog.Start, bool) {
	switch mode {
	case "all", "from_beginning":
		return catalog.All(), true
	case "new", "new-only":
		return catalog.Start{Mode: "new"}, true
	}
	return catalog.Start{}, false
}

func (a *API) popQueue(w http.ResponseWriter, r *request) error {
	p, err := a.readPop(r, false)
	if err != nil {
		return err
	}
	if p.Queue = r.params[0]; !validName(p.Queue, maxName) {
		return badName("queue", maxName)
	}
	return a.pop(w, r, p)
}

func (a *API) popPartition(w http.ResponseWriter, r *request) error {
	p, err := a.readPop(r, false)
	if err != nil {
		return err
	}
	if p.Queue = r.params[0]; !validName(p.Queue, maxName) {
		return badName("queue", maxName)
	}
	if p.Partition = &r.params[1]; !validName(r.params[1], maxName) {
		return badName("partition", maxName)
	}
	return a.pop(w, r, p)
}

func (a *API) popDiscovery(w http.ResponseWriter, r *request) error {
	p, err := a.readPop(r, true)
	if err != nil {
		return err
	}
	if p.Scope == (catalog.Scope{}) && !a.popPaused() {
		return &httpError{status: http.StatusBadRequest, raw: []byte(`{"success":false,"error":"namespace or task is required","messages":[]}`)}
	}
	return a.pop(w, r, p)
}

func (a *API) pop(w http.ResponseWriter, r *request, p *groupcommit.Pop) error {
	if r.ContentLength != 0 { // only a request read to its end shows that the client has gone
		if _, err := io.Copy(io.Discard, http.MaxBytesReader(w, r.Body, a.MaxBody)); err != nil {
			return bodyError(err)
		}
	}
	a.Metrics.Total(metrics.PopRequests, 1)
	if a.popPaused() {
		a.Metrics.Total(metrics.PopEmpty, 1)
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	began := time.Now()
	d, err := r.engine.Pop(r.Context(), p)
	defer func() { a.Metrics.PopSeconds.Observe((time.Since(began) - p.Parked).Seconds()) }()
	a.Metrics.Queue(p.QueueID, metrics.PopRequests, 1)
	switch {
	case r.Context().Err() != nil:
		if d != nil {
			d.Release()
		}
		return r.Context().Err()
	case errors.Is(err, groupcommit.ErrOverloaded):
		return busy("overloaded")
	case errors.Is(err, groupcommit.ErrNoConnection):
		a.Metrics.Total(metrics.DatabaseErrors, 1)
		return failed("pool")
	case err != nil:
		a.Metrics.Total(metrics.DatabaseErrors, 1)
		return failed("pop failed")
	case d == nil:
		a.Metrics.Add(r.engine.Project, p.QueueID, metrics.PopEmpty, 1)
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	if err := a.stillAllowed(r); err != nil {
		d.Release()
		return err
	}
	body, damaged, err := appendDelivery(r.engine.Keys, p, d)
	if err != nil {
		a.Log.Error("stored messages cannot be read", "queue", damaged.Queue.Name, "partition", damaged.Partition.Name, "error", err)
		d.Unreadable([]*groupcommit.Span{damaged}, true)
		a.Metrics.Total(metrics.DecryptionFailures, 1)
		return failed("decryption failed")
	}
	if r.Context().Err() != nil || a.write(w, http.StatusOK, body) != nil {
		d.Release()
		return nil
	}
	now := r.engine.Now()
	for _, s := range d.Spans {
		for i := range s.Segments {
			g := &s.Segments[i]
			n := min(s.Start+s.Take, g.Base+int64(g.Count)) - max(s.Start, g.Base)
			a.Metrics.Delivered(s.Queue.ID, n, now.Sub(g.CreatedAt))
		}
	}
	return nil
}

// appendDelivery builds the answer straight from the segments: payloads are copied, never parsed. With an error it names the span it is in.
func appendDelivery(keys *segment.Keys, p *groupcommit.Pop, d *groupcommit.Delivery) (body []byte, damaged *groupcommit.Span, err error) {
	size := 512
	for _, s := range d.Spans {
		for _, g := range s.Segments {
			n := min(int64(g.Count), s.Take)
			size += len(g.Frames)*int(n)/int(g.Count) + 400*int(n)
		}
	}
	lease := ""
	if !p.AutoAck {
		lease = d.Lease.String()
	}
	first := d.Spans[0]
	b := make([]byte, 0, size)
	b = quote(append(b, `{"success":true,"queue":`...), p.Queue)
	b = quote(append(b, `,"partition":`...), first.Partition.Name)
	b = appendUUID(append(b, `,"partitionId":"`...), first.Row.PublicID)
	b = append(append(b, `","leaseId":"`...), lease...)
	b = quote(append(b, `","consumerGroup":`...), p.Group)
	b = append(b, `,"messages":[`...)
	comma := false
	var tail []byte
	for _, s := range d.Spans {
		// What all messages of a partition end with.
		tail = appendUUID(append(tail[:0], `,"partitionId":"`...), s.Row.PublicID)
		tail = quote(append(tail, `","partition":`...), s.Partition.Name)
		tail = append(append(tail, `,"leaseId":"`...), lease...)
		tail = quote(append(tail, `","consumerGroup":`...), p.Group)
		tail = append(tail, '}')
		for i := range s.Segments {
			g := &s.Segments[i]
			from, to := int(max(s.Start-g.Base, 0)), int(min(s.Start+s.Take-g.Base, int64(g.Count)))
			open, err := segment.DecodeRange(keys, g.Codec, g.KeyNo, g.FirstID, int(g.Count), g.Frames, from, to)
			if err != nil {
				return nil, s, err
			}
			for n := from; n < to; n++ {
				if comma {
					b = append(b, ',')
				}
				comma = true
				b = appendMessage(b, open, n, g.CreatedAt)
				b = append(b, tail...)
			}
		}
	}
	b = strconv.AppendInt(append(b, `],"partitionsClaimed":`...), int64(len(d.Spans)), 10)
	return append(b, '}'), nil, nil
}

func appendMessage(b []byte, open *segment.Decoded, n int, createdAt time.Time) []byte {
	m := open.Raw(n)
	b = appendUUID(append(b, `{"id":"`...), open.ID(n))
	b = append(b, `","transactionId":`...)
	if m.TransactionText != nil {
		b = quote(b, string(m.TransactionText))
	} else {
		b = append(open.AppendTransactionID(append(b, '"'), n), '"')
	}
	b = append(b, `,"traceId":`...)
	if m.TraceID != nil {
		b = append(appendUUID(append(b, '"'), *m.TraceID), '"')
	} else {
		b = append(b, "null"...)
	}
	b = append(append(b, `,"data":`...), m.Payload...)
	b = append(b, `,"producerSub":`...)
	if len(m.ProducerSub) > 0 {
		b = quote(b, string(m.ProducerSub))
	} else {
		b = append(b, "null"...)
	}
	b = createdAt.UTC().AppendFormat(append(b, `,"createdAt":"`...), timeMicro)
	return append(b, '"')
}

// timeMicro is the format of times on pop and lease.
const timeMicro = "2006-01-02T15:04:05.000000Z"

const hexDigits = "0123456789abcdef"

func appendUUID(dst []byte, id uuid.UUID) []byte {
	for i, x := range id {
		if i == 4 || i == 6 || i == 8 || i == 10 {
			dst = append(dst, '-')
		}
		dst = append(dst, hexDigits[x>>4], hexDigits[x&15])
	}
	return dst
}
