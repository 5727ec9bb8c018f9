package handlers

import (
	"bytes"
	"errors"
	"net/http"
	"strconv"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/groupcommit"
)

// retryMessage puts the newest dead letter of a message back into its queue.
func (a *API) retryMessage(w http.ResponseWriter, r *request) error {
	m := &groupcommit.Redrive{Partition: parseID(r.params[0]), TransactionID: r.params[1]}
	gone := quote([]byte(`"partitionId":`), r.params[0])
	gone = quote(append(gone, `,"transactionId":`...), r.params[1])
	return a.redrive(w, r, m, m.Partition != (uuid.UUID{}) && validName(m.TransactionID, maxTransactionID), gone)
}

// replayDeadLetter puts one dead letter back, perhaps into another queue or partition.
func (a *API) replayDeadLetter(w http.ResponseWriter, r *request) error {
	m := &groupcommit.Redrive{ID: parseID(r.params[0])}
	err := a.optional(w, r, func(d *document, name string) (err error) {
		switch name {
		case "queue":
			m.Queue, err = d.optionalName(maxName)
		case "partition":
			m.Name, err = d.optionalName(maxName)
		default:
			err = d.skip()
		}
		return err
	})
	if err != nil {
		return err
	}
	return a.redrive(w, r, m, m.ID != (uuid.UUID{}), quote([]byte(`"dlqId":`), r.params[0]))
}

// optional reads an object that may be left out.
func (a *API) optional(w http.ResponseWriter, r *request, field func(d *document, name string) error) error {
	body, err := a.body(w, r.Request)
	if err != nil || len(bytes.TrimSpace(body)) == 0 {
		return err
	}
	return parse(body, func(d *document) error {
		return d.object(func(name string) error { return field(d, name) })
	})
}

// redrive answers retry and replay; gone is what names the dead letter when there is none.
func (a *API) redrive(w http.ResponseWriter, r *request, m *groupcommit.Redrive, possible bool, gone []byte) error {
	if a.pushRefused() != nil {
		return &httpError{status: http.StatusServiceUnavailable, retry: maintenanceRetry, raw: []byte(`{"success":false,"result":"maintenance","error":"push maintenance"}`)}
	}
	err := groupcommit.ErrNoDeadLetter
	var d *groupcommit.Redriven
	if possible {
		d, err = r.engine.Redrive(r.Context(), m)
	}
	switch {
	case errors.Is(err, groupcommit.ErrNoDeadLetter):
		b := append([]byte(`{"success":false,"result":"gone",`), gone...)
		return a.write(w, http.StatusNotFound, append(b, `,"error":"Message not found"}`...))
	case errors.Is(err, groupcommit.ErrUnreadable), errors.Is(err, groupcommit.ErrNoKey):
		return failed(err.Error())
	case err != nil:
		return a.databaseError(r, err, "query failed")
	}
	result, status := "moved", "queued"
	if d.Duplicate {
		result, status = "duplicate", "duplicate"
	}
	b := append(append([]byte(`{"success":true,"result":"`), result...), `","queue":`...)
	b = quote(b, d.Queue)
	b = quote(append(b, `,"partition":`...), d.Partition)
	b = quote(append(b, `,"consumerGroup":`...), d.Group)
	b = appendUUID(append(b, `,"dlqId":"`...), d.ID)
	b = quote(append(b, `","originalTransactionId":`...), d.TransactionID)
	b = appendUUID(append(b, `,"replayedAs":{"index":0,"message_id":"`...), d.Pushed.ID)
	b = quote(append(b, `","transaction_id":`...), d.NewID)
	b = quote(append(b, `,"queueName":`...), d.ToQueue)
	b = append(append(b, `,"status":"`...), status...)
	b = appendUUID(append(b, `","partitionId":"`...), d.To.PublicID)
	b = strconv.AppendInt(append(b, `","offset":`...), d.Offset, 10)
	b = strconv.AppendBool(append(b, `},"dlqRowRemoved":`...), !d.Duplicate)
	return a.write(w, http.StatusOK, append(b, '}'))
}

// buryMessage makes a dead letter of the message that is next for a group.
func (a *API) buryMessage(w http.ResponseWriter, r *request) error {
	group, text := catalog.QueueMode, "Moved to DLQ by operator"
	err := a.optional(w, r, func(d *document, name string) (err error) {
		switch name {
		case "consumerGroup":
			group, err = groupName(d)
		case "error":
			text = "Moved to DLQ by operator"
			var s *string
			if s, err = d.optionalText(); s != nil {
				text = *s
			}
		default:
			err = d.skip()
		}
		return err
	})
	if err != nil {
		return err
	}
	var id uuid.UUID
	err = groupcommit.ErrNoMessage
	if partition := parseID(r.params[0]); partition != (uuid.UUID{}) && validName(r.params[1], maxTransactionID) {
		id, err = r.engine.BuryHead(r.Context(), partition, r.params[1], group, text)
	}
	b := quote([]byte(`,"partitionId":`), r.params[0])
	b = quote(append(b, `,"transactionId":`...), r.params[1])
	switch {
	case errors.Is(err, groupcommit.ErrNoMessage):
		b = append([]byte(`{"success":false`), b...)
		return a.write(w, http.StatusNotFound, append(b, `,"error":"Message not found","message":"No such message waits for this group"}`...))
	case errors.Is(err, groupcommit.ErrNotNext):
		return a.write(w, http.StatusConflict, []byte(`{"success":false,"error":"message is not next in line for this group"}`))
	case errors.Is(err, groupcommit.ErrUnreadable):
		return failed(err.Error())
	case err != nil:
		return a.databaseError(r, err, "query failed")
	}
	b = append([]byte(`{"success":true`), b...)
	b = quote(append(b, `,"consumerGroup":`...), group)
	b = appendUUID(append(b, `,"dlqId":"`...), id)
	return a.write(w, http.StatusOK, append(b, `"}`...))
}
