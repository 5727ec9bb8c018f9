package handlers

import (
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/groupcommit"
	"ferrymq/segment"
)

func transactionRoutes() []route {
	return []route{
		on("POST", "/api/v1/transaction", readWrite, (*API).transaction),
		on("POST", "/api/v1/messages/{partitionId}/{transactionId}/retry", readWrite, (*API).retryMessage),
		on("POST", "/api/v1/messages/{partitionId}/{transactionId}/dlq", readWrite, (*API).buryMessage),
		on("POST", "/api/v1/dlq/{id}/replay", readWrite, (*API).replayDeadLetter),
	}
}

// operation is one item of a transaction: a pushed message or an ack.
type operation struct {
	push *transactionPush
	ack  *transactionAck
}

type transactionPush struct {
	pushItem
	data    []byte // what payload is when there is none
	traceID *uuid.UUID

	batch *groupcommit.Batch
	n     int // its place in the batch
}

type transactionAck struct {
	ackItem
	group string

	settlement *groupcommit.Settlement
	n          int
}

// call is a transaction as sent.
type call struct {
	items    []operation
	required []uuid.UUID
	pushes   int
}

// readTransaction decodes a transaction. Errors that do not start with "bad body" are answered as a transaction that was rolled back.
func readTransaction(body []byte) (*call, error) {
	c := &call{}
	var operations [][]byte
	isArray, extras := false, false
	// All of it is JSON before any of it is looked at.
	err := parse(body, func(d *document) error {
		return d.object(func(name string) error {
			switch name {
			case "operations":
				operations, isArray = nil, d.kind() == '['
				if !isArray {
					return d.skip()
				}
				return d.array(func(int) error {
					raw, err := d.value()
					operations = append(operations, raw)
					return err
				})
			case "requiredLeases":
				c.required = nil
				if null, err := d.null(); null || err != nil {
					return err
				}
				return d.array(func(int) error {
					lease, err := d.optionalText()
					if lease != nil && *lease != "" {
						c.required = append(c.required, parseID(*lease))
					}
					return err
				})
			case "kv", "timers":
				raw, err := d.value()
				extras = extras || err == nil && !isEmpty(raw)
				return err
			}
			return d.skip()
		})
	})
	switch {
	case err != nil:
		return nil, err
	case !isArray:
		return nil, bad("transaction requires an operations array")
	case extras:
		return nil, bad("kv and timers are not supported")
	}
	for i, raw := range operations {
		if err := c.readOperation("operations["+strconv.Itoa(i)+"]", raw); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// parseID is an id in its usual spelling, or zero, which nothing has.
func parseID(s string) (id uuid.UUID) {
	if len(s) == 36 {
		id, _ = uuid.Parse(s)
	}
	return id
}

// isEmpty says whether a JSON value is null, "", or an array or object of nothing.
func isEmpty(raw []byte) bool {
	s := string(raw)
	return s == "null" || s == `""` || ((s[0] == '[' || s[0] == '{') && strings.TrimSpace(s[1:len(s)-1]) == "")
}

// members walks the object that stands at path in the body.
func members(path string, raw []byte, field func(d *document, name string) error) error {
	return parse(raw, func(d *document) error {
		d.path = append(d.path, path...)
		return d.object(func(name string) error { return field(d, name) })
	})
}

// readOperation decodes an operation twice: what its fields mean depends on its type, which may come last.
func (c *call) readOperation(path string, raw []byte) error {
	var kind string
	err := members(path, raw, func(d *document, name string) (err error) {
		if name != "type" {
			return d.skip()
		}
		if kind = ""; d.kind() != '"' {
			return d.skip()
		}
		if kind, err = d.str(""); errors.Is(err, errNotText) {
			err = nil
		}
		return err
	})
	switch {
	case err != nil:
		return err
	case kind == "push":
		return c.readPushes(path, raw)
	case kind != "ack":
		return bad("transaction supports only push and ack operations")
	}
	a := &transactionAck{group: catalog.QueueMode}
	c.items = append(c.items, operation{ack: a})
	return members(path, raw, func(d *document, name string) (err error) {
		if name == "consumerGroup" {
			a.group, err = groupName(d)
			return err
		}
		if known, err := a.field(d, name, ackItem{}); known {
			return err
		}
		return d.skip()
	})
}

// readPushes decodes a push operation: its items, or itself.
func (c *call) readPushes(path string, raw []byte) error {
	items, several := [][]byte{raw}, false
	err := members(path, raw, func(d *document, name string) error {
		if name != "items" {
			return d.skip()
		}
		items, several = [][]byte{raw}, false
		if null, err := d.null(); null || err != nil {
			return err
		}
		items, several = nil, true
		return d.array(func(int) error {
			item, err := d.value()
			items = append(items, item)
			return err
		})
	})
	if err != nil {
		return err
	}
	if c.pushes += len(items); c.pushes > maxItems {
		return bad("too many items: at most %d", maxItems)
	}
	for i, item := range items {
		at := path
		if several {
			at += ".items[" + strconv.Itoa(i) + "]"
		}
		p := &transactionPush{pushItem: pushItem{partition: "Default"}}
		if err := members(at, item, p.field); err != nil {
			return err
		}
		if p.queue == "" {
			return bad("bad body: %s.queue is required", at)
		}
		if p.payload == nil {
			p.payload = p.data
		}
		if p.payload == nil {
			p.payload = []byte("{}")
		}
		c.items = append(c.items, operation{push: p})
	}
	return nil
}

func (p *transactionPush) field(d *document, name string) (err error) {
	switch name {
	case "queue":
		p.queue, err = d.name("", maxName)
	case "partition":
		p.partition = "Default"
		var s *string
		if s, err = d.optionalName(maxName); s != nil {
			p.partition = *s
		}
	case "transactionId":
		p.transactionID = ""
		var s *string
		if s, err = d.optionalName(maxTransactionID); s != nil {
			p.transactionID = *s
		}
	case "payload":
		p.payload, err = d.value()
	case "data":
		p.data, err = d.value()
	case "traceId":
		if p.traceID = nil; d.kind() != '"' {
			return d.skip()
		}
		var s *string
		if s, err = d.optionalText(); s != nil {
			if id := parseID(*s); id != (uuid.UUID{}) {
				p.traceID = &id
			}
		}
	default:
		err = d.skip()
	}
	return err
}

// transaction makes pushes and acks happen together or not at all.
func (a *API) transaction(w http.ResponseWriter, r *request) error {
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	id := segment.NewFirstID(time.Now())
	c, err := readTransaction(body)
	if err != nil {
		var known *httpError
		if errors.As(err, &known) && !strings.HasPrefix(known.text, "bad body") {
			return a.write(w, known.status, appendRolledBack(id, known.text, "bad_request"))
		}
		return err
	}
	if c.pushes > 0 {
		if err := a.pushRefused(); err != nil {
			return err
		}
	}
	t := c.transaction(r.sub)
	err = r.engine.Transact(r.Context(), t)
	var why *groupcommit.Rollback
	switch {
	case err == nil:
		return a.write(w, http.StatusOK, c.appendResults(id))
	case errors.As(err, &why):
		text, reason := rollbackText(why)
		return a.write(w, http.StatusOK, appendRolledBack(id, text, reason))
	case errors.Is(err, groupcommit.ErrUnknown):
		return busy("outcome unknown")
	case errors.Is(err, groupcommit.ErrOverloaded):
		return busy("overloaded")
	}
	return a.databaseError(r, err, "transaction failed")
}

// transaction sorts the items by what they are about.
func (c *call) transaction(sub string) *groupcommit.Transaction {
	t := &groupcommit.Transaction{Required: c.required}
	batches := make(map[place]*groupcommit.Batch)
	type pair struct {
		partition uuid.UUID // zero, which no partition has, stands for none
		group     string
	}
	settlements := make(map[pair]*groupcommit.Settlement)
	for _, o := range c.items {
		if p := o.push; p != nil {
			k := place{p.queue, p.partition}
			if p.batch = batches[k]; p.batch == nil {
				p.batch = &groupcommit.Batch{Queue: p.queue, Partition: p.partition}
				batches[k] = p.batch
				t.Pushes = append(t.Pushes, p.batch)
			}
			p.n = len(p.batch.Messages)
			p.batch.Messages = append(p.batch.Messages, segment.Message{TransactionID: p.transactionID, TraceID: p.traceID, ProducerSub: sub, Payload: p.payload})
			continue
		}
		x := o.ack
		k := pair{group: x.group}
		if x.partitionID != nil {
			k.partition = parseID(*x.partitionID)
		}
		s := settlements[k]
		if s == nil {
			s = &groupcommit.Settlement{Partition: k.partition, Group: x.group}
			if k.partition == (uuid.UUID{}) && (x.partitionID == nil || *x.partitionID != k.partition.String()) {
				s.Refused = errPartitionID
			}
			settlements[k] = s
			t.Acks = append(t.Acks, s)
		}
		var lease *uuid.UUID
		if x.leaseID != nil && *x.leaseID != "" {
			id := parseID(*x.leaseID)
			lease = &id
		}
		x.settlement, x.n = s, len(s.Items)
		s.Items = append(s.Items, groupcommit.Ack{TransactionID: x.transactionID, Status: parseStatus(x.status), Error: x.error})
		s.Leases = append(s.Leases, lease)
	}
	return t
}

func appendRolledBack(id uuid.UUID, text, reason string) []byte {
	b := appendUUID([]byte(`{"transactionId":"`), id)
	b = quote(append(b, `","success":false,"error":`...), text)
	b = quote(append(b, `,"reason":`...), reason)
	return append(b, `,"results":[]}`...)
}

func rollbackText(why *groupcommit.Rollback) (text, reason string) {
	switch {
	case errors.Is(why.Err, groupcommit.ErrDuplicate):
		text, reason = "QDUP duplicate messages in queue "+string(quote(nil, why.Queue))+" partition "+string(quote(nil, why.Partition)), "duplicate"
	case errors.Is(why.Err, groupcommit.ErrFull):
		text, reason = "QFULL queue "+string(quote(nil, why.Queue))+" is full", "queue_full"
	case errors.Is(why.Err, groupcommit.ErrNoKey):
		text, reason = why.Err.Error(), "encryption"
	case errors.Is(why.Err, groupcommit.ErrUnresolvable):
		text, reason = "QTXN ack references unknown transactionId", "ack_rejected"
	default:
		text, reason = ackError(why.Err), "ack_rejected"
	}
	return text + "; transaction rolled back", reason
}

func (c *call) appendResults(id uuid.UUID) []byte {
	b := make([]byte, 0, 128+200*len(c.items))
	b = appendUUID(append(b, `{"transactionId":"`...), id)
	b = append(b, `","success":true,"results":[`...)
	for i, o := range c.items {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(append(b, `{"index":`...), int64(i), 10)
		if p := o.push; p != nil {
			done := p.batch.Results[p.n]
			b = append(b, `,"type":"push","success":true,"transactionId":`...)
			if p.transactionID != "" {
				b = quote(b, p.transactionID)
			} else {
				b = append(appendUUID(append(b, '"'), done.ID), '"')
			}
			b = appendUUID(append(b, `,"messageId":"`...), done.ID)
			b = quote(append(b, `","queueName":`...), p.queue)
			if done.Duplicate {
				b = append(b, `,"duplicate":true`...)
			}
		} else {
			b = append(b, `,"type":"ack","success":true,"transactionId":`...)
			if tid := o.ack.transactionID; tid != nil {
				b = quote(b, *tid)
			} else {
				b = append(b, "null"...)
			}
			b = strconv.AppendBool(append(b, `,"error":null,"dlq":`...), o.ack.settlement.Results[o.ack.n].DeadLettered)
		}
		b = append(b, '}')
	}
	return append(b, `]}`...)
}
