package handlers

import (
	"errors"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/groupcommit"
	"ferrymq/metrics"
)

// ackItem is one acknowledgment as sent.
type ackItem struct {
	transactionID, partitionID, status, error, leaseID *string
}

func (it *ackItem) field(d *document, name string, last ackItem) (known bool, err error) {
	var to **string
	var before *string // acks of one call mostly have these in common
	switch name {
	case "transactionId":
		to = &it.transactionID
	case "partitionId":
		to, before = &it.partitionID, last.partitionID
	case "status":
		to, before = &it.status, last.status
	case "error":
		to = &it.error
	case "leaseId":
		to, before = &it.leaseID, last.leaseID
	default:
		return false, nil
	}
	*to, err = d.optionalTextLike(before)
	return true, err
}

func parseStatus(s *string) groupcommit.Status {
	if s == nil {
		return groupcommit.Completed
	}
	switch *s {
	case "completed", "success", "acked", "ok":
		return groupcommit.Completed
	case "retry":
		return groupcommit.Retry
	case "dlq":
		return groupcommit.DeadLetter
	}
	return groupcommit.Failed
}

func groupName(d *document) (string, error) {
	s, err := d.optionalName(maxName)
	if s == nil || err != nil {
		return catalog.QueueMode, err
	}
	return *s, nil
}

// readAck decodes the body of the single route.
func readAck(body []byte) (group string, items []ackItem, err error) {
	group = catalog.QueueMode
	var it ackItem
	err = parse(body, func(d *document) error {
		return d.object(func(name string) (err error) {
			if name == "consumerGroup" {
				group, err = groupName(d)
				return err
			}
			if known, err := it.field(d, name, ackItem{}); known {
				return err
			}
			return d.skip()
		})
	})
	return group, []ackItem{it}, err
}

// readAcks decodes the body of the batch route.
func readAcks(body []byte) (group string, items []ackItem, err error) {
	group = catalog.QueueMode
	err = parse(body, func(d *document) error {
		return d.object(func(name string) (err error) {
			switch name {
			case "consumerGroup":
				group, err = groupName(d)
				return err
			case "acknowledgments":
				items = nil
				if null, err := d.null(); null || err != nil {
					return err
				}
				return d.array(func(i int) error {
					var it, last ackItem
					if i > 0 {
						last = items[i-1]
					}
					err := d.object(func(name string) error {
						if known, err := it.field(d, name, last); known {
							return err
						}
						return d.skip()
					})
					items = append(items, it)
					return err
				})
			}
			return d.skip()
		})
	})
	return group, items, err
}

func (a *API) ack(w http.ResponseWriter, r *request) error { return a.acknowledge(w, r, readAck) }

func (a *API) ackBatch(w http.ResponseWriter, r *request) error { return a.acknowledge(w, r, readAcks) }

var errPartitionID = errors.New("invalid partitionId")

// acknowledge groups the items by (partition, lease) and answers them in request order.
func (a *API) acknowledge(w http.ResponseWriter, r *request, read func(body []byte) (string, []ackItem, error)) error {
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	group, items, err := read(body)
	if err != nil {
		return err
	}
	type key struct {
		partition uuid.UUID
		lease     string
	}
	type at struct {
		acks *groupcommit.Acks
		n    int
		err  error
	}
	a.Metrics.Total(metrics.AckRequests, 1)
	began := time.Now()
	defer func() { a.Metrics.AckSeconds.Observe(time.Since(began).Seconds()) }()
	places := make([]at, len(items))
	byKey := make(map[key]*groupcommit.Acks)
	var order []*groupcommit.Acks
	var partitions []uuid.UUID
	var of []uuid.UUID // partition of each group
	for i := range items {
		it := &items[i]
		id, err := uuid.UUID{}, errPartitionID
		if it.partitionID != nil && len(*it.partitionID) == 36 {
			id, err = uuid.Parse(*it.partitionID)
		}
		if err != nil {
			places[i].err = errPartitionID
			continue
		}
		k := key{partition: id}
		if it.leaseID != nil {
			k.lease = *it.leaseID
		}
		g := byKey[k]
		if g == nil {
			g = &groupcommit.Acks{Group: group, Leased: k.lease != ""}
			if g.Leased && len(k.lease) == 36 {
				g.Lease, _ = uuid.Parse(k.lease)
			}
			byKey[k] = g
			order = append(order, g)
			partitions, of = append(partitions, id), append(of, id)
		}
		places[i] = at{acks: g, n: len(g.Items)}
		g.Items = append(g.Items, groupcommit.Ack{TransactionID: it.transactionID, Status: parseStatus(it.status), Error: it.error})
	}
	if len(order) > 0 {
		found, err := r.engine.Catalog.Public(r.Context(), partitions)
		if err != nil {
			err = r.engine.Unavailable(err)
			for i := range places {
				places[i].err = cmpErr(places[i].err, err)
			}
		} else {
			for i, g := range order {
				g.Partition = found[of[i]]
			}
			r.engine.Ack(r.Context(), order)
		}
	}
	b := make([]byte, 0, 160*len(items)+2)
	b = append(b, '[')
	counts, broken := make(map[int32]ackCount, 1), int64(0)
	for i := range items {
		if i > 0 {
			b = append(b, ',')
		}
		res := groupcommit.Acked{Err: places[i].err}
		if res.Err == nil {
			res = places[i].acks.Results[places[i].n]
		}
		b = appendAcked(b, i, items[i].transactionID, res)
		queue := int32(0)
		if g := places[i].acks; g != nil && g.Partition != nil {
			queue = g.Partition.QueueID
		}
		n := counts[queue]
		if res.Err == nil && parseStatus(items[i].status) == groupcommit.Completed {
			n.success++
		} else if n.failed++; res.Err != nil && !refusal(res.Err) {
			broken = 1
		}
		counts[queue] = n
	}
	a.Metrics.Total(metrics.DatabaseErrors, broken)
	for queue, n := range counts {
		a.Metrics.Queue(queue, metrics.AckRequests, 1)
		a.Metrics.Add(r.engine.Project, queue, metrics.AckSuccess, n.success)
		a.Metrics.Add(r.engine.Project, queue, metrics.AckFailed, n.failed)
	}
	return a.write(w, http.StatusOK, append(b, ']'))
}

// ackCount is what became of the items of a request for one queue.
type ackCount struct{ success, failed int64 }

func cmpErr(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

func appendAcked(b []byte, i int, transactionID *string, res groupcommit.Acked) []byte {
	b = strconv.AppendInt(append(b, `{"index":`...), int64(i), 10)
	b = append(b, `,"transactionId":`...)
	if transactionID != nil {
		b = quote(b, *transactionID)
	} else {
		b = append(b, "null"...)
	}
	b = strconv.AppendBool(append(b, `,"success":`...), res.Err == nil)
	b = append(b, `,"error":`...)
	if res.Err != nil {
		b = quote(b, ackError(res.Err))
	} else {
		b = append(b, "null"...)
	}
	b = strconv.AppendBool(append(b, `,"leaseReleased":`...), res.LeaseReleased)
	b = strconv.AppendBool(append(b, `,"dlq":`...), res.DeadLettered)
	b = strconv.AppendBool(append(b, `,"noop":`...), res.AlreadyDone)
	return append(b, '}')
}

// refusals are errors that are no fault of the database.
var refusals = []error{errPartitionID, groupcommit.ErrNoConsumer, groupcommit.ErrLease, groupcommit.ErrCommitted,
	groupcommit.ErrUnresolvable, groupcommit.ErrNoBatch, groupcommit.ErrDeadRejected}

func refusal(err error) bool {
	return slices.ContainsFunc(refusals, func(known error) bool { return errors.Is(err, known) })
}

// ackError is the text of a refusal; the engine's own refusals say it themselves.
func ackError(err error) string {
	for _, known := range refusals {
		if errors.Is(err, known) {
			return known.Error()
		}
	}
	if errors.Is(err, groupcommit.ErrNoConnection) {
		return "pool"
	}
	return "ack flush failed; lease will expire and redeliver"
}

const defaultExtend = 60

// readExtend is lenient: no body, no JSON or no seconds are all the default.
func readExtend(body []byte) int64 {
	seconds := int64(defaultExtend)
	err := parse(body, func(d *document) error {
		return d.object(func(name string) error {
			if name != "seconds" || d.kind() != '0' {
				return d.skip()
			}
			v, err := d.value()
			if err != nil {
				return err
			}
			if n, ok := wholeNumber(v); ok {
				seconds = min(max(n, 1), maxLeaseSeconds)
			}
			return nil
		})
	})
	if err != nil {
		return defaultExtend
	}
	return seconds
}

func (a *API) extend(w http.ResponseWriter, r *request) error {
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	seconds := readExtend(body)
	var renewed int
	var until time.Time
	if lease, err := uuid.Parse(r.params[0]); err == nil && len(r.params[0]) == 36 {
		if renewed, until, err = r.engine.Extend(r.Context(), lease, int32(seconds)); errors.Is(err, groupcommit.ErrNoConnection) {
			return failed("pool")
		} else if err != nil {
			return failed("renew failed")
		}
	}
	end := []byte("null")
	if renewed > 0 {
		end = append(until.UTC().AppendFormat([]byte{'"'}, timeMicro), '"')
	}
	b := quote([]byte(`{"leaseId":`), r.params[0])
	b = strconv.AppendBool(append(b, `,"success":`...), renewed > 0)
	b = strconv.AppendInt(append(b, `,"renewed":`...), int64(renewed), 10)
	for _, name := range []string{"newExpiresAt", "expiresAt", "lease_expires_at"} {
		b = append(quote(append(b, ','), name), ':')
		b = append(b, end...)
	}
	return a.write(w, http.StatusOK, append(b, '}'))
}
