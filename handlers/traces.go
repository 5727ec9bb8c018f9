package handlers

import (
	"net/http"
	"strconv"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/db"
)

func traceRoutes() []route {
	return []route{
		on("POST", "/api/v1/traces", readWrite, (*API).createTrace),
		on("GET", "/api/v1/traces/names", readOnly, (*API).traceNames),
		on("GET", "/api/v1/traces/by-name/{traceName}", readOnly, (*API).tracesByName),
		on("GET", "/api/v1/traces/{partitionId}/{transactionId}", readOnly, (*API).tracesOfMessage),
	}
}

const (
	maxTraceNames = 100
	traceChunk    = 1000
)

func readTrace(body []byte) (t db.TraceCreateParams, err error) {
	var transaction, partition, group, event *string
	t.Names = []string{}
	err = parse(body, func(d *document) error {
		return d.object(func(name string) (err error) {
			switch name {
			case "transactionId":
				transaction, err = d.emptyOrName(maxTransactionID)
			case "partitionId":
				partition, err = d.optionalText()
			case "consumerGroup":
				group, err = d.optionalName(maxName)
			case "eventType":
				event, err = d.optionalName(maxName)
			case "data":
				t.Data, err = d.value()
			case "traceNames":
				t.Names, err = d.names()
			default:
				err = d.skip()
			}
			return err
		})
	})
	if err != nil {
		return t, err
	}
	if transaction == nil || *transaction == "" || partition == nil || *partition == "" {
		return t, bad("transactionId and partitionId are required")
	}
	if t.Data == nil || string(t.Data) == "null" {
		return t, bad("data is required")
	}
	if t.PartitionID, err = uuid.Parse(*partition); err != nil || len(*partition) != 36 {
		return t, bad("invalid partitionId")
	}
	if len(t.Names) > maxTraceNames {
		return t, bad("too many traceNames: at most %d", maxTraceNames)
	}
	t.TransactionID, t.ConsumerGroup, t.EventType = *transaction, catalog.QueueMode, "info"
	if group != nil {
		t.ConsumerGroup = *group
	}
	if event != nil {
		t.EventType = *event
	}
	return t, nil
}

// emptyOrName is a name that may also be empty, or nil for null.
func (d *document) emptyOrName(max int) (*string, error) {
	if null, err := d.null(); null || err != nil {
		return nil, err
	}
	s, err := d.str("")
	if err == errNotText || err == nil && s != "" && !validName(s, max) {
		return nil, badName(string(d.path), max)
	}
	return &s, err
}

// names is one name or an array of them.
func (d *document) names() ([]string, error) {
	names := []string{}
	if null, err := d.null(); null || err != nil {
		return names, err
	}
	if d.kind() == '"' {
		s, err := d.name("", maxName)
		return append(names, s), err
	}
	if k := d.kind(); k != '[' && k != 0 {
		return nil, d.wrong("a string or an array")
	}
	err := d.array(func(int) error {
		s, err := d.name("", maxName)
		names = append(names, s)
		return err
	})
	return names, err
}

func (a *API) createTrace(w http.ResponseWriter, r *request) error {
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	t, err := readTrace(body)
	if err != nil {
		return err
	}
	t.ProjectID, t.ID = r.engine.Project, uuid.Must(uuid.NewV7())
	if err := a.queries.TraceCreate(r.Context(), t); err != nil {
		return a.databaseError(r, err, "trace failed")
	}
	return a.write(w, http.StatusCreated, append(appendUUID([]byte(`{"success":true,"traceId":"`), t.ID), `"}`...))
}

// tracesOfMessage answers with all traces of a message. It reads and sends them in parts: they may be many, and large.
func (a *API) tracesOfMessage(w http.ResponseWriter, r *request) error {
	id, transaction, ok := address(r)
	s := &stream{api: a, w: w, b: []byte(`{"traces":[`)}
	p := db.TraceOfMessageParams{PartitionID: id, TransactionID: transaction, Max: traceChunk, Bytes: streamBytes}
	var err error
	for first := true; ok && err == nil; {
		var rows []db.TraceOfMessageRow
		if rows, err = a.queries.TraceOfMessage(r.Context(), p); err != nil || len(rows) == 0 {
			break
		}
		for _, t := range rows {
			if !first {
				s.b = append(s.b, ',')
			}
			first = false
			s.b = append(appendTrace(s.b, t), '}')
			p.AfterTime, p.AfterID = t.CreatedAt, t.ID
			if err = s.flush(); err != nil {
				break
			}
		}
	}
	s.b = append(s.b, "]}"...)
	if err != nil && !s.sent {
		return a.databaseError(r, err, "query failed")
	}
	return s.end(err)
}

func appendTrace(b []byte, t db.TraceOfMessageRow) []byte {
	b = appendUUID(append(b, `{"id":"`...), t.ID)
	b = quote(append(b, `","event_type":`...), t.EventType)
	b = append(append(b, `,"data":`...), t.Data...)
	b = quote(append(b, `,"consumer_group":`...), t.ConsumerGroup)
	b = appendInstant(append(b, `,"worker_id":null,"created_at":`...), t.CreatedAt)
	b = append(b, `,"trace_names":[`...)
	for i, name := range t.Names {
		if i > 0 {
			b = append(b, ',')
		}
		b = quote(b, name)
	}
	return append(b, ']')
}

func (a *API) tracesByName(w http.ResponseWriter, r *request) error {
	q := &params{values: query(r.URL)}
	limit, offset := q.page(100)
	if q.err != nil {
		return q.err
	}
	if !validName(r.params[0], maxName) {
		return badName("traceName", maxName)
	}
	s := &stream{api: a, w: w, b: []byte(`{"traces":[`)}
	p := db.TraceByNameParams{Name: r.params[0], Skip: offset, Max: limit, Bytes: streamBytes}
	total := int64(0)
	var err error
	for p.Max > 0 && err == nil {
		var rows []db.TraceByNameRow
		if rows, err = a.queries.TraceByName(r.Context(), p); err != nil || len(rows) == 0 {
			break
		}
		for _, t := range rows {
			if total++; total > 1 {
				s.b = append(s.b, ',')
			}
			s.b = appendTrace(s.b, db.TraceOfMessageRow{ID: t.ID, EventType: t.EventType, Data: t.Data, ConsumerGroup: t.ConsumerGroup, CreatedAt: t.CreatedAt, Names: t.Names})
			s.b = quote(append(s.b, `,"transaction_id":`...), t.TransactionID)
			s.b = appendUUID(append(s.b, `,"partition_id":"`...), t.PartitionID)
			s.b = append(s.b, `","queue_name":`...)
			if t.QueueName == nil || t.PartitionName == nil {
				s.b = append(s.b, `null,"partition_name":null`...)
			} else {
				s.b = quote(append(quote(s.b, *t.QueueName), `,"partition_name":`...), *t.PartitionName)
			}
			s.b = append(s.b, `,"message_payload":null}`...)
			p.Skip, p.AfterTime, p.AfterID = 0, t.CreatedAt, t.ID
			if err = s.flush(); err != nil {
				break
			}
		}
		p.Max = limit - total
	}
	s.b = strconv.AppendInt(append(s.b, `],"total":`...), total, 10)
	s.b = append(appendPagination(s.b, limit, offset), '}')
	if err != nil && !s.sent {
		return a.databaseError(r, err, "query failed")
	}
	return s.end(err)
}

// lastNames are a page of the names of traces, the last used first, and when that was. It walks back from the last use until
// it has met enough names.
func (a *API) lastNames(r *request, offset, limit int64) (names []string, last []time.Time, err error) {
	met := map[string]bool{}
	p := db.TraceUsesParams{BeforeTime: distant, Max: traceChunk}
	for {
		rows, err := a.queries.TraceUses(r.Context(), p)
		if err != nil {
			return nil, nil, err
		}
		for _, n := range rows {
			if p.BeforeTime, p.BeforeName = n.CreatedAt, n.Name; met[n.Name] {
				continue
			}
			if met[n.Name] = true; int64(len(met)) > offset {
				names, last = append(names, n.Name), append(last, n.CreatedAt)
			}
			if int64(len(names)) == limit {
				return names, last, nil
			}
		}
		if int64(len(rows)) < p.Max {
			return names, last, nil
		}
	}
}

func (a *API) traceNames(w http.ResponseWriter, r *request) error {
	q := &params{values: query(r.URL)}
	limit, offset := q.page(50)
	if q.err != nil {
		return q.err
	}
	names, last, err := a.lastNames(r, offset, limit)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	rows, err := a.queries.TraceCounts(r.Context(), db.TraceCountsParams{Names: names})
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	type named struct {
		Name     string  `json:"trace_name"`
		Traces   int64   `json:"trace_count"`
		Messages int64   `json:"message_count"`
		LastSeen instant `json:"last_seen"`
	}
	type pagination struct {
		Limit  int64 `json:"limit"`
		Offset int64 `json:"offset"`
	}
	var page struct {
		Names      []named    `json:"trace_names"`
		Total      int        `json:"total"`
		Pagination pagination `json:"pagination"`
	}
	for i, n := range rows {
		page.Names = append(page.Names, named{n.Name, n.TraceCount, n.MessageCount, instant(last[i])})
	}
	page.Total, page.Pagination = len(rows), pagination{limit, offset}
	return a.reply(w, http.StatusOK, &page)
}
