package handlers

import (
	"errors"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/segment"
)

func messageRoutes() []route {
	return slices.Concat([]route{
		on("GET", "/api/v1/messages", readOnly, (*API).listMessages),
		on("GET", "/api/v1/messages/{partitionId}/{transactionId}", readOnly, (*API).getMessage),
		on("DELETE", "/api/v1/messages/{partitionId}/{transactionId}", readWrite, (*API).deleteMessage),
	}, traceRoutes())
}

// optionalMoment is a time in a query, nil when absent.
func (p *params) optionalMoment(name string) *time.Time {
	if p.text(name) == "" {
		return nil
	}
	t := p.moment(name, time.Time{})
	return &t
}

// listMessages answers with a page of the newest messages. A page is cut from one moment's state. Pages of a range whose end
// is over do not overlap and leave nothing out, while one that reaches to now moves on with what is pushed.
func (a *API) listMessages(w http.ResponseWriter, r *request) error {
	p := &params{values: query(r.URL)}
	queue, partition, namespace, task := p.name("queue", ""), p.name("partition", ""), p.name("namespace", ""), p.name("task", "")
	if p.text("namespace") == "" {
		namespace = p.name("ns", "")
	}
	status := p.text("status")
	if !slices.Contains([]string{"", statusPending, statusProcessing, statusCompleted, statusDead}, status) {
		p.fail("status")
	}
	from, to := p.optionalMoment("from"), p.optionalMoment("to")
	limit, offset := p.page(200)
	if p.err != nil {
		return p.err
	}

	var page []run
	var mode []byte
	queues := map[int32]db.BrowseQueuesByIDRow{}
	k := &walk{project: r.engine.Project, name: partition, status: status}
	err := pgx.BeginTxFunc(r.Context(), a.reads, db.Snapshot, func(tx pgx.Tx) error {
		q := a.queries.WithTx(tx)
		k.q = q
		frame, err := q.BrowseRange(r.Context(), db.BrowseRangeParams{FromTime: from, ToTime: to})
		if err != nil {
			return err
		}
		k.from, k.to = frame.FromTime, frame.ToTime
		var ids []int32 // whose groups make the mode
		if queue != "" {
			x, err := q.QueueGet(r.Context(), db.QueueGetParams{ProjectID: k.project, Name: queue})
			if err != nil && !errors.Is(err, pgx.ErrNoRows) {
				return err
			}
			k.queues = []int32{}
			if err == nil && (namespace == "" || namespace == x.Namespace) && (task == "" || task == x.Task) {
				k.queues = []int32{x.ID}
			}
			ids = k.queues
		} else if namespace != "" || task != "" || partition != "" {
			k.queues, err = q.BrowseQueues(r.Context(), db.BrowseQueuesParams{ProjectID: k.project, Namespace: optional(namespace), Task: optional(task)})
			if err != nil {
				return err
			}
			k.queues = slices.Grow(k.queues, 1) // not nil, which would mean all
		}
		if page, err = k.page(r.Context(), offset, limit); err != nil {
			return err
		}
		for _, m := range page {
			ids = append(ids, k.places[m.lane].queue)
		}
		rows, err := q.BrowseQueuesByID(r.Context(), db.BrowseQueuesByIDParams{Ids: ids})
		for _, x := range rows {
			queues[x.ID] = x
		}
		if err != nil {
			return err
		}
		groups, err := q.BrowseGroups(r.Context(), db.BrowseGroupsParams{QueueIds: ids})
		mode = appendMode(nil, groups)
		return err
	})
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}

	s := &stream{api: a, w: w, b: []byte(`{"messages":[`)}
	total := 0
	err = a.eachMessage(r, page, func(m *run, offset int64, open *segment.Decoded) error {
		if total++; total > 1 {
			s.b = append(s.b, ',')
		}
		at := k.places[m.lane]
		s.b = appendListed(s.b, m, offset, open, at, queues[at.queue], k.dead[deadKey{m.lane, offset}])
		return s.flush()
	})
	s.b = append(append(s.b, `],"mode":`...), mode...)
	s.b = append(strconv.AppendInt(append(s.b, `,"total":`...), int64(total), 10), '}')
	if err != nil && !s.sent {
		return a.databaseError(r, err, "query failed")
	}
	return s.end(err)
}

func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// eachMessage reads the segments of a page, a few at a time, and opens them: open is nil for what cannot be.
// What retention has removed since the page was cut is left out.
func (a *API) eachMessage(r *request, page []run, each func(m *run, offset int64, open *segment.Decoded) error) error {
	for len(page) > 0 {
		var p db.SegmentFramesParams
		n, size := 0, int64(0)
		for n < len(page) && (n == 0 || size+page[n].size <= streamBytes) {
			if m := &page[n]; n == 0 || m.lane != page[n-1].lane || m.base != page[n-1].base {
				p.PartitionIds, p.BaseOffsets = append(p.PartitionIds, m.lane), append(p.BaseOffsets, m.base)
				size += m.size
			}
			n++
		}
		rows, err := a.queries.SegmentFrames(r.Context(), p)
		if err != nil {
			return err
		}
		frames := make(map[deadKey][]byte, len(rows))
		for _, x := range rows {
			frames[deadKey{x.PartitionID, x.BaseOffset}] = x.Frames
		}
		var open *segment.Decoded
		for i := range page[:n] {
			m := &page[i]
			stored, ok := frames[deadKey{m.lane, m.base}]
			if !ok {
				continue
			}
			if i == 0 || m.lane != page[i-1].lane || m.base != page[i-1].base {
				if open, err = segment.Decode(r.engine.Keys, m.codec, m.keyNo, m.firstID, int(m.count), stored); err != nil {
					open = nil
				}
			}
			for at := m.hi - 1; at >= m.lo; at-- {
				if err := each(m, at, open); err != nil {
					return err
				}
			}
		}
		page = page[n:]
	}
	return nil
}

func appendListed(b []byte, m *run, offset int64, open *segment.Decoded, p *standing, q db.BrowseQueuesByIDRow, dead bool) []byte {
	n := int(offset - m.base)
	b = appendUUID(append(b, `{"id":"`...), segment.ID(m.firstID, n))
	var x segment.Raw
	b = append(b, `","transactionId":`...)
	if open != nil {
		x = open.Raw(n)
		b = quote(b, string(open.AppendTransactionID(nil, n)))
	} else {
		b = append(b, "null"...)
	}
	b = appendUUID(append(b, `,"partitionId":"`...), p.publicID)
	b = quote(append(b, `","queuePath":`...), q.Name+"/"+p.partition)
	b = quote(append(b, `,"queue":`...), q.Name)
	b = quote(append(b, `,"partition":`...), p.partition)
	b = quote(append(b, `,"namespace":`...), q.Namespace)
	b = quote(append(b, `,"task":`...), q.Task)
	status := p.status(offset)
	if dead {
		status = statusDead
	}
	b = append(append(b, `,"status":"`...), status...)
	b = append(append(b, `","queueStatus":"`...), p.queueStatus(offset)...)
	passed, named := p.consumed(offset)
	b = strconv.AppendInt(append(b, `","busStatus":{"consumedBy":`...), int64(passed), 10)
	b = strconv.AppendInt(append(b, `,"totalGroups":`...), int64(named), 10)
	b = appendOrigin(append(b, `},`...), &x)
	b = strconv.AppendInt(append(b, `,"queuePriority":`...), int64(q.Priority), 10)
	b = strconv.AppendBool(append(b, `,"payloadAvailable":`...), open != nil)
	b = strconv.AppendInt(append(b, `,"segment":{"seq":`...), m.base, 10)
	b = strconv.AppendInt(append(b, `,"frameIdx":`...), int64(n), 10)
	b = appendInstant(append(b, `},"createdAt":`...), m.createdAt)
	b = appendInstant(append(b, `,"leaseExpiresAt":`...), p.leaseEnd(offset))
	b = appendPayload(append(b, `,"data":`...), x.Payload)
	b = appendPayload(append(b, `,"payload":`...), x.Payload)
	return append(strconv.AppendBool(append(b, `,"isEncrypted":`...), m.keyNo != 0), '}')
}

// appendOrigin appends traceId and producerSub.
func appendOrigin(b []byte, x *segment.Raw) []byte {
	b = append(b, `"traceId":`...)
	if x.TraceID != nil {
		b = append(appendUUID(append(b, '"'), *x.TraceID), '"')
	} else {
		b = append(b, "null"...)
	}
	return appendText(append(b, `,"producerSub":`...), string(x.ProducerSub))
}

// appendText appends a string, null if it is empty.
func appendText(b []byte, s string) []byte {
	if s == "" {
		return append(b, "null"...)
	}
	return quote(b, s)
}

func appendPayload(b, payload []byte) []byte {
	if payload == nil {
		return append(b, "null"...)
	}
	return append(b, payload...)
}

func appendInstant(b []byte, t time.Time) []byte {
	text, _ := instant(t).MarshalJSON()
	return append(b, text...)
}

// appendMode says which kinds of consumers there are: queue mode, named groups, both, or none yet.
func appendMode(b []byte, groups []string) []byte {
	queue := slices.Contains(groups, catalog.QueueMode)
	bus := len(groups)
	if queue {
		bus--
	}
	kind := "none"
	switch {
	case queue && bus > 0:
		kind = "hybrid"
	case queue:
		kind = "queue"
	case bus > 0:
		kind = "bus"
	}
	b = strconv.AppendBool(append(b, `{"hasQueueMode":`...), queue)
	b = strconv.AppendInt(append(b, `,"busGroupsCount":`...), int64(bus), 10)
	return append(append(append(b, `,"type":"`...), kind...), `"}`...)
}

// address is the message that a path names. ok is false if there can be none.
func address(r *request) (partition uuid.UUID, transaction string, ok bool) {
	partition, err := uuid.Parse(r.params[0])
	return partition, r.params[1], err == nil && len(r.params[0]) == 36 && validName(r.params[1], maxTransactionID)
}

// found is a message as one of the two routes below shows it.
type found struct {
	row       db.BrowsePartitionRow
	offset    int64
	id        uuid.UUID
	open      *segment.Decoded
	n         int // in open
	keyNo     int16
	createdAt time.Time
	status    string // empty: as the groups say
	err       *string
	retries   int32
}

var errUnreadable = failed("decryption failed")

func (a *API) getMessage(w http.ResponseWriter, r *request) error {
	id, transaction, ok := address(r)
	if !ok {
		return notFound("Message not found")
	}
	m, at, mode, err := a.find(r, id, transaction)
	if errors.Is(err, pgx.ErrNoRows) {
		return notFound("Message not found")
	}
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	return a.write(w, http.StatusOK, appendFound(m, id, transaction, at, mode))
}

// find reads one message. It may have to look through a whole partition, so it does not hold a snapshot.
func (a *API) find(r *request, id uuid.UUID, transaction string) (m *found, at *standing, mode []byte, err error) {
	q := a.queries
	row, err := q.BrowsePartition(r.Context(), db.BrowsePartitionParams{ProjectID: r.engine.Project, PublicID: id})
	if err != nil {
		return nil, nil, nil, err
	}
	if m, err = findStored(r, q, row, transaction); err == nil && m == nil {
		m, err = findDead(r, q, row, transaction)
	}
	if err != nil {
		return nil, nil, nil, err
	}
	at = &standing{}
	cursors, err := q.BrowseCursors(r.Context(), db.BrowseCursorsParams{PartitionIds: []int64{row.ID}})
	for _, c := range cursors {
		at.add(c)
	}
	if err != nil {
		return nil, nil, nil, err
	}
	groups, err := q.BrowseGroups(r.Context(), db.BrowseGroupsParams{QueueIds: []int32{row.QueueID}})
	return m, at, appendMode(nil, groups), err
}

// findStored looks for the newest retained message with a transaction id, from the tail back; nil if there is none.
// It reads the keys of ids, and opens only segments that seem to have it.
func findStored(r *request, q *db.Queries, row db.BrowsePartitionRow, transaction string) (*found, error) {
	key := r.engine.Hasher.Key(transaction)
	p := db.BrowseFindParams{Key: key[:], PartitionID: row.ID, Before: row.NextOffset, Low: row.FirstOffset - segment.MaxMessages, Max: 100}
	if id, err := uuid.Parse(transaction); err == nil && id.String() == transaction {
		p.FirstID = segment.FirstID(id) // the message whose id we minted has it as its transaction id
	}
	for {
		f, err := q.BrowseFind(r.Context(), p)
		if err != nil || f.Low < 0 {
			return nil, err
		}
		if f.Found < 0 {
			p.Before, p.Max = f.Low, min(4*p.Max, 5000)
			continue
		}
		p.Before = f.Found
		s, err := q.SegmentAt(r.Context(), db.SegmentAtParams{PartitionID: row.ID, AtOffset: max(f.Found, row.FirstOffset)})
		if errors.Is(err, pgx.ErrNoRows) || err == nil && s.BaseOffset != f.Found {
			continue // removed
		}
		if err != nil {
			return nil, err
		}
		open, err := segment.Decode(r.engine.Keys, s.Codec, s.KeyNo, s.FirstID, int(s.Count), s.Frames)
		if err != nil {
			return nil, errUnreadable
		}
		var text []byte
		for n := int(s.Count) - 1; n >= 0 && s.BaseOffset+int64(n) >= row.FirstOffset; n-- {
			if text = open.AppendTransactionID(text[:0], n); string(text) != transaction {
				continue
			}
			m := &found{row: row, offset: s.BaseOffset + int64(n), id: open.ID(n), open: open, n: n, keyNo: s.KeyNo, createdAt: s.CreatedAt}
			d, err := q.DeadLetterAt(r.Context(), db.DeadLetterAtParams{PartitionID: row.ID, MessageOffset: m.offset})
			if errors.Is(err, pgx.ErrNoRows) {
				return m, nil
			}
			m.status, m.err, m.retries = statusDead, &d.ErrorMessage, d.RetryCount
			return m, err
		}
	}
}

// findDead is the newest dead letter of an address.
func findDead(r *request, q *db.Queries, row db.BrowsePartitionRow, transaction string) (*found, error) {
	d, err := q.DeadLetterFind(r.Context(), db.DeadLetterFindParams{PartitionID: row.ID, TransactionID: transaction})
	if err != nil {
		return nil, err
	}
	open, err := segment.Decode(r.engine.Keys, d.Codec, d.KeyNo, d.MessageID, 1, d.Frames)
	if err != nil {
		return nil, errUnreadable
	}
	return &found{row: row, offset: d.MessageOffset, id: d.MessageID, open: open, keyNo: d.KeyNo, createdAt: d.MessageCreatedAt,
		status: statusDead, err: &d.ErrorMessage, retries: d.RetryCount}, nil
}

func appendFound(m *found, partition uuid.UUID, transaction string, p *standing, mode []byte) []byte {
	x := m.open.Raw(m.n)
	b := appendUUID(append(make([]byte, 0, 2*len(x.Payload)+1024), `{"id":"`...), m.id)
	b = quote(append(b, `","transactionId":`...), transaction)
	b = appendPayload(append(b, `,"data":`...), x.Payload)
	b = appendPayload(append(b, `,"payload":`...), x.Payload)
	b = appendOrigin(append(b, ','), &x)
	b = appendInstant(append(b, `,"createdAt":`...), m.createdAt)
	b = appendUUID(append(b, `,"partitionId":"`...), partition)
	b = quote(append(b, `","partition":`...), m.row.Name)
	b = strconv.AppendBool(append(b, `,"isEncrypted":`...), m.keyNo != 0)
	b = quote(append(b, `,"queue":`...), m.row.QueueName)
	b = quote(append(b, `,"queuePath":`...), m.row.QueueName+"/"+m.row.Name)
	b = quote(append(b, `,"namespace":`...), m.row.Namespace)
	b = quote(append(b, `,"task":`...), m.row.Task)
	if m.status == "" {
		m.status = p.status(m.offset)
	}
	b = append(append(b, `,"status":"`...), m.status...)
	b = append(b, `","errorMessage":`...)
	if m.err != nil {
		b = quote(b, *m.err)
	} else {
		b = append(b, "null"...)
	}
	b = strconv.AppendInt(append(b, `,"retryCount":`...), int64(m.retries), 10)
	b = appendInstant(append(b, `,"leaseExpiresAt":`...), p.leaseEnd(m.offset))
	b = strconv.AppendInt(append(b, `,"queueConfig":{"leaseTime":`...), int64(m.row.LeaseTime), 10)
	b = strconv.AppendInt(append(b, `,"retryLimit":`...), int64(m.row.RetryLimit), 10)
	b = strconv.AppendInt(append(b, `,"retryDelay":`...), int64(m.row.RetryDelay), 10)
	b = strconv.AppendInt(append(b, `,"ttl":`...), int64(m.row.TTL), 10)
	b = strconv.AppendInt(append(b, `,"maxSize":`...), m.row.MaxSize, 10)
	b = strconv.AppendBool(append(b, `,"deadLetterQueue":`...), m.row.DeadLetterQueue)
	b = append(b, `},"consumerGroups":[`...)
	for i := range p.groups {
		g := &p.groups[i]
		if i > 0 {
			b = append(b, ',')
		}
		b = quote(append(b, `{"name":`...), g.group)
		b = quote(append(b, `,"group":`...), g.group)
		b = strconv.AppendBool(append(b, `,"consumed":`...), m.offset < g.committed)
		var end time.Time
		if g.leases(m.offset) {
			end = g.until
		}
		b = append(appendInstant(append(b, `,"leaseExpiresAt":`...), end), '}')
	}
	return append(append(append(b, `],"mode":`...), mode...), '}')
}

// deleteMessage removes the dead letters of an address. The log itself is append-only: a live message cannot be taken out of it.
func (a *API) deleteMessage(w http.ResponseWriter, r *request) error {
	id, transaction, ok := address(r)
	deleted := int64(0)
	if ok {
		row, err := a.queries.BrowsePartition(r.Context(), db.BrowsePartitionParams{ProjectID: r.engine.Project, PublicID: id})
		if err == nil {
			deleted, err = a.queries.DeadLetterDelete(r.Context(), db.DeadLetterDeleteParams{PartitionID: row.ID, TransactionID: transaction})
		}
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return a.databaseError(r, err, "query failed")
		}
	}
	status, success, rest := http.StatusOK, true, `,"message":"Message deleted successfully"}`
	if deleted == 0 {
		status, success, rest = http.StatusNotFound, false, `,"error":"Message not found","message":"No dead letter has this address. Messages of the log cannot be deleted."}`
	}
	b := strconv.AppendBool([]byte(`{"success":`), success)
	b = quote(append(b, `,"partitionId":`...), r.params[0])
	b = quote(append(b, `,"transactionId":`...), r.params[1])
	return a.write(w, status, append(b, rest...))
}
