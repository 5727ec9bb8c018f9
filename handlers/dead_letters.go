package handlers

import (
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/db"
	"ferrymq/segment"
)

func deadLetterRoutes() []route {
	return []route{
		on("GET", "/api/v1/dlq", readOnly, (*API).listDeadLetters),
		on("DELETE", "/api/v1/dlq", admin, (*API).purgeDeadLetters),
	}
}

// group is a group's name; unlike other parameters it may not be empty.
func (p *params) group(name string) string {
	s := p.text(name)
	if p.values.Has(name) && !validName(s, maxName) {
		p.fail(name)
	}
	return s
}

// distant is later than anything stored.
var distant = time.Date(200_000, 1, 1, 0, 0, 0, 0, time.UTC)

// listDeadLetters answers with a page of dead letters, the newest failure first. from is inclusive, to exclusive.
func (a *API) listDeadLetters(w http.ResponseWriter, r *request) error {
	p := &params{values: query(r.URL)}
	queue, group, partition := p.name("queue", ""), p.group("consumerGroup"), p.name("partition", "")
	l := db.DeadLetterListParams{Bytes: streamBytes, ProjectID: r.engine.Project, Every: queue == "" && group == "" && partition == "", BeforeID: uuid.Max,
		GroupIds: []int32{}, PartitionIds: []int64{}}
	l.FromTime, l.ToTime = p.moment("from", time.Time{}), p.moment("to", distant)
	l.BeforeTime = l.ToTime
	limit, offset := p.page(100)
	if p.err != nil {
		return p.err
	}
	none, err := a.deadLetterScope(r, &l, queue, group, partition)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}

	s := &stream{api: a, w: w, b: []byte(`{"messages":[`)}
	total := int64(0)
	l.Skip, l.Max = offset, limit
	for !none && err == nil {
		var rows []db.DeadLetterListRow
		l.Reach = l.Skip + l.Max
		if rows, err = a.queries.DeadLetterList(r.Context(), l); err != nil {
			break
		}
		for i := range rows {
			if total++; total > 1 {
				s.b = append(s.b, ',')
			}
			s.b = appendDeadLetter(s.b, r.engine.Keys, &rows[i])
			if err = s.flush(); err != nil {
				break
			}
		}
		n := int64(len(rows))
		if n == 0 || n == rows[0].InPage {
			break
		}
		l.Skip, l.Max, l.BeforeTime, l.BeforeID = 0, l.Max-n, rows[n-1].FailedAt, rows[n-1].ID
	}
	s.b = appendPagination(append(s.b, ']'), limit, offset)
	s.b = append(strconv.AppendInt(append(s.b, `,"total":`...), total, 10), '}')
	if err != nil && !s.sent {
		return a.databaseError(r, err, "query failed")
	}
	return s.end(err)
}

func appendPagination(b []byte, limit, offset int64) []byte {
	b = strconv.AppendInt(append(b, `,"pagination":{"limit":`...), limit, 10)
	return append(strconv.AppendInt(append(b, `,"offset":`...), offset, 10), '}')
}

// deadLetterScope turns names into the rows they stand for; none: one of them stands for nothing.
func (a *API) deadLetterScope(r *request, l *db.DeadLetterListParams, queue, group, partition string) (none bool, err error) {
	var id *int32
	var queues []int32
	if queue != "" {
		q, err := a.queries.QueueGet(r.Context(), db.QueueGetParams{ProjectID: l.ProjectID, Name: queue})
		if errors.Is(err, pgx.ErrNoRows) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
		id, queues = &q.ID, []int32{q.ID}
		if group == "" && partition == "" {
			l.QueueID = q.ID
		}
	}
	if group != "" {
		if l.GroupIds, err = a.queries.DeadLetterGroups(r.Context(), db.DeadLetterGroupsParams{ProjectID: l.ProjectID, Name: group, QueueID: id}); err != nil || len(l.GroupIds) == 0 {
			return true, err
		}
	}
	if partition != "" {
		if queue == "" {
			if queues, err = a.queries.BrowseQueues(r.Context(), db.BrowseQueuesParams{ProjectID: l.ProjectID}); err != nil {
				return false, err
			}
		}
		l.PartitionIds, err = a.queries.DeadLetterPartitions(r.Context(), db.DeadLetterPartitionsParams{QueueIds: queues, Name: partition})
		return len(l.PartitionIds) == 0, err
	}
	return false, nil
}

func appendDeadLetter(b []byte, keys *segment.Keys, d *db.DeadLetterListRow) []byte {
	var x segment.Raw
	if open, err := segment.Decode(keys, d.Codec, d.KeyNo, d.MessageID, 1, d.Frames); err == nil {
		x = open.Raw(0)
	}
	b = appendUUID(append(b, `{"id":"`...), d.ID)
	b = quote(append(b, `","transactionId":`...), d.TransactionID)
	b = appendUUID(append(b, `,"partitionId":"`...), d.PublicID)
	b = quote(append(b, `","queue":`...), d.QueueName)
	b = quote(append(b, `,"partition":`...), d.PartitionName)
	b = quote(append(b, `,"consumerGroup":`...), d.GroupName)
	b = quote(append(b, `,"errorMessage":`...), d.ErrorMessage)
	b = strconv.AppendInt(append(b, `,"retryCount":`...), int64(d.RetryCount), 10)
	b = appendPayload(append(b, `,"data":`...), x.Payload)
	b = appendText(append(b, `,"producerSub":`...), string(x.ProducerSub))
	b = appendInstant(append(b, `,"createdAt":`...), d.FailedAt)
	b = appendInstant(append(b, `,"failedAt":`...), d.FailedAt)
	if d.KeyNo != 0 {
		b = append(b, `,"isEncrypted":true`...)
	}
	return append(b, '}')
}

// purgeChunk is how many dead letters go in one transaction.
const purgeChunk = 2000

// purgeDeadLetters removes what a queue, or one of its groups, has failed up to this moment.
func (a *API) purgeDeadLetters(w http.ResponseWriter, r *request) error {
	p := &params{values: query(r.URL)}
	queue, group := p.name("queue", ""), p.group("consumerGroup")
	if p.err != nil {
		return p.err
	}
	if queue == "" {
		return bad("queue is required")
	}
	var l db.DeadLetterListParams
	l.ProjectID = r.engine.Project
	none, err := a.deadLetterScope(r, &l, queue, group, "")
	var until time.Time
	if err == nil && !none {
		until, err = a.queries.DeadLetterNow(r.Context())
	}
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	var steps []func() (int64, error)
	if l.QueueID != 0 {
		steps = append(steps, func() (int64, error) {
			return a.queries.DeadLetterPurgeQueue(r.Context(), db.DeadLetterPurgeQueueParams{QueueID: l.QueueID, Until: until, Max: purgeChunk})
		})
	}
	for _, id := range l.GroupIds {
		steps = append(steps, func() (int64, error) {
			return a.queries.DeadLetterPurgeGroup(r.Context(), db.DeadLetterPurgeGroupParams{GroupID: id, Until: until, Max: purgeChunk})
		})
	}
	deleted := int64(0)
	for _, step := range steps {
		for n := int64(1); n > 0; deleted += n {
			if n, err = step(); err != nil {
				return a.databaseError(r, err, "query failed")
			}
		}
	}
	b := strconv.AppendInt([]byte(`{"success":true,"deleted":`), deleted, 10)
	b = quote(append(b, `,"queue":`...), queue)
	b = appendText(append(b, `,"consumerGroup":`...), group)
	return a.write(w, http.StatusOK, append(b, '}'))
}
