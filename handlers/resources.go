package handlers

import (
	"context"
	"errors"
	"maps"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/metrics"
)

func resourceRoutes() []route {
	return []route{
		on("GET", "/api/v1/resources/queues", readOnly, (*API).resourceQueues),
		on("GET", "/api/v1/resources/queues/{queue}", readOnly, (*API).resourceQueue),
		on("GET", "/api/v1/resources/queues/{queue}/depth", readOnly, (*API).depth),
		on("GET", "/api/v1/resources/overview", readOnly, (*API).overview),
		on("GET", "/api/v1/resources/namespaces", readOnly, (*API).namespaces),
		on("GET", "/api/v1/resources/tasks", readOnly, (*API).tasks),
		on("GET", "/api/v1/resources/partitions", readOnly, (*API).resourcePartitions),
		on("GET", "/api/v1/status/queues", readOnly, (*API).statusQueues),
		on("GET", "/api/v1/status/queues/{queue}", readOnly, (*API).statusQueue),
		on("POST", "/api/v1/stats/refresh", admin, (*API).refreshNumbers),
	}
}

const (
	maxQueues     = math.MaxInt32 // where all are listed
	maxPartitions = 1000          // in the answers about one queue
)

var errNoQueue = notFound("Queue not found")

// three and two are the shorter forms of counts.
type three struct {
	Total      int64 `json:"total"`
	Pending    int64 `json:"pending"`
	Processing int64 `json:"processing"`
}

type two struct {
	Total   int64 `json:"total"`
	Pending int64 `json:"pending"`
}

type pagination struct {
	Limit  int64 `json:"limit"`
	Offset int64 `json:"offset"`
}

// segmentCounts is how a queue's messages are stored; the number of segments is null where counting them would read too much.
type segmentCounts struct {
	Segments *int64 `json:"segments"`
	Messages int64  `json:"messages"`
}

func (a *API) resourceQueues(w http.ResponseWriter, r *request) error {
	q := &params{values: query(r.URL)}
	page := db.QueuePageParams{ProjectID: r.engine.Project, Namespace: q.name("namespace", ""), Task: q.name("task", ""),
		Max: q.number("limit", maxQueues, 1, 1000), Skip: q.number("offset", 0, 0, 1<<62)}
	if q.err != nil {
		return q.err
	}
	type queue struct {
		ID            uuid.UUID     `json:"id"`
		Name          string        `json:"name"`
		Namespace     string        `json:"namespace"`
		Task          string        `json:"task"`
		CreatedAt     instant       `json:"createdAt"`
		Partitions    int64         `json:"partitions"`
		RetainedBytes *int64        `json:"retainedBytes"`
		Segments      segmentCounts `json:"segments"`
		Messages      three         `json:"messages"`
	}
	var out struct {
		Queues []queue `json:"queues"`
	}
	rows, of, _, err := a.queuePage(r, page)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	for _, q := range rows {
		n := of[q.ID]
		out.Queues = append(out.Queues, queue{ID: q.PublicID, Name: q.Name, Namespace: q.Namespace, Task: q.Task, CreatedAt: instant(q.CreatedAt),
			Partitions: n.Partitions, RetainedBytes: n.bytes, Segments: segmentCounts{n.segments, n.Total}, Messages: three{n.Total, n.Pending, n.Processing}})
	}
	return a.reply(w, http.StatusOK, out)
}

// queuePage lists queues with their numbers.
func (a *API) queuePage(r *request, page db.QueuePageParams) ([]db.QueuePageRow, map[int32]queueNumbers, *numbers, error) {
	rows, err := a.queries.QueuePage(r.Context(), page)
	if err != nil {
		return nil, nil, nil, err
	}
	of, n, err := a.numbersOf(r.Context(), r.engine.Project, rows)
	return rows, of, n, err
}

// queueOf is the queue that a path names.
func (a *API) queueOf(r *request) (*catalog.Queue, error) {
	if !validName(r.params[0], maxName) {
		return nil, badName("queue", maxName)
	}
	return a.liveQueue(r, r.params[0])
}

func (a *API) liveQueue(r *request, name string) (*catalog.Queue, error) {
	q, err := a.queries.QueueGet(r.Context(), db.QueueGetParams{ProjectID: r.engine.Project, Name: name})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, errNoQueue
	}
	if err != nil {
		return nil, a.databaseError(r, err, "query failed")
	}
	return &q, nil
}

// numberedPartition is a partition with its numbers.
type numberedPartition struct {
	db.PartitionPageRow
	db.PartitionNumbersRow
}

func (p *numberedPartition) six() counts {
	return counts{Total: p.Total, Pending: p.Pending, Processing: p.Processing, Completed: p.Total - p.Pending, DeadLetter: p.DeadLetter}
}

// partitions lists partitions by queue and name: of one queue, or with "" of all.
func (a *API) partitions(ctx context.Context, project int32, queue string, limit, offset int64) ([]numberedPartition, error) {
	page := db.PartitionPageParams{ProjectID: project, First: queue, Last: queue, Max: limit, Skip: offset, Upto: limit + offset}
	if queue == "" {
		page.Last = strings.Repeat(string(rune(0x10FFFF)), maxName/4+1) // above every name
	}
	rows, err := a.queries.PartitionPage(ctx, page)
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	ids := make([]int64, len(rows))
	for i, p := range rows {
		ids[i] = p.ID
	}
	found, err := a.queries.PartitionNumbers(ctx, db.PartitionNumbersParams{Ids: ids})
	if err != nil {
		return nil, err
	}
	of := make(map[int64]db.PartitionNumbersRow, len(found))
	for _, n := range found {
		of[n.ID] = n
	}
	var out []numberedPartition
	for _, p := range rows {
		if n, ok := of[p.ID]; ok { // else removed just now
			out = append(out, numberedPartition{p, n})
		}
	}
	return out, nil
}

func (a *API) resourceQueue(w http.ResponseWriter, r *request) error {
	q, err := a.queueOf(r)
	if err != nil {
		return err
	}
	type partition struct {
		ID        uuid.UUID `json:"id"`
		Name      string    `json:"name"`
		CreatedAt instant   `json:"createdAt"`
		Stats     counts    `json:"stats"`
		Oldest    instant   `json:"oldestMessage"`
		Newest    instant   `json:"newestMessage"`
	}
	var out struct {
		ID            uuid.UUID      `json:"id"`
		Name          string         `json:"name"`
		Namespace     string         `json:"namespace"`
		Task          string         `json:"task"`
		CreatedAt     instant        `json:"createdAt"`
		Options       jsontext.Value `json:"options"`
		Partitions    []partition    `json:"partitions"`
		Totals        counts         `json:"totals"`
		RetainedBytes *int64         `json:"retainedBytes"`
		Segments      segmentCounts  `json:"segments"`
	}
	found, n, err := a.wholeQueue(r, q)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	out.ID, out.Name, out.Namespace, out.Task, out.CreatedAt = q.PublicID, q.Name, q.Namespace, q.Task, instant(q.CreatedAt)
	b := quote(append(appendOptions([]byte(`{`), q), `,"namespace":`...), q.Namespace)
	out.Options = append(quote(append(b, `,"task":`...), q.Task), '}')
	for _, p := range found {
		out.Partitions = append(out.Partitions, partition{ID: p.PublicID, Name: p.Name, CreatedAt: instant(p.CreatedAt), Stats: p.six(),
			Oldest: instant(p.Oldest), Newest: instant(p.Newest)})
	}
	out.Totals, out.RetainedBytes, out.Segments = n.six(), n.bytes, segmentCounts{n.segments, n.Total}
	return a.reply(w, http.StatusOK, out)
}

// wholeQueue counts one queue now, and its first partitions one by one.
func (a *API) wholeQueue(r *request, q *catalog.Queue) ([]numberedPartition, queueNumbers, error) {
	found, err := a.partitions(r.Context(), r.engine.Project, q.Name, maxPartitions, 0)
	if err != nil {
		return nil, queueNumbers{}, err
	}
	all, _, err := a.count(r.Context(), []int32{q.ID}, false)
	return found, all[q.ID], err
}

func (a *API) depth(w http.ResponseWriter, r *request) error {
	params := &params{values: query(r.URL)}
	var group *string
	if g := params.name("group", ""); g != "" {
		group = &g
	}
	if params.err != nil {
		return params.err
	}
	q, err := a.queueOf(r)
	if err != nil {
		return err
	}
	rows, err := a.queries.QueueDepth(r.Context(), db.QueueDepthParams{QueueID: q.ID, Group: group, Max: maxPartitions})
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	type partition struct {
		Partition  string `json:"partition"`
		Pending    int64  `json:"pending"`
		Processing int64  `json:"processing"`
		Ready      int64  `json:"ready"`
	}
	out := struct {
		Queue             string      `json:"queue"`
		Group             *string     `json:"group"`
		Pending           int64       `json:"pending"`
		Processing        int64       `json:"processing"`
		Ready             int64       `json:"ready"`
		PartitionsPending int64       `json:"partitionsPending"`
		PartitionsReady   int64       `json:"partitionsReady"`
		Conflation        bool        `json:"conflation"`
		EffectivePending  int64       `json:"effectivePending"`
		EffectiveReady    int64       `json:"effectiveReady"`
		Partitions        []partition `json:"partitions"`
	}{Queue: q.Name, Group: group}
	for _, p := range rows {
		out.Pending, out.Processing, out.PartitionsPending, out.PartitionsReady = p.AllPending, p.AllProcessing, p.Partitions, p.PartitionsReady
		out.Partitions = append(out.Partitions, partition{p.Name, p.Pending, p.Processing, p.Pending - p.Processing})
	}
	out.Ready = out.Pending - out.Processing
	out.EffectivePending, out.EffectiveReady = out.Pending, out.Ready
	return a.reply(w, http.StatusOK, out)
}

// rates are messages per second, of all brokers, since the minute before this one began.
type rates struct {
	Ingested  float64 `json:"ingestedPerSecond"`
	Processed float64 `json:"processedPerSecond"`
}

func (a *API) rates(r *request) (out rates, err error) {
	if err := a.Metrics.Flush(); err != nil {
		return out, err
	}
	now := r.engine.Now()
	since := now.Truncate(time.Minute).Add(-time.Minute)
	minutes, err := a.queries.ActivitySeries(r.Context(), db.ActivitySeriesParams{Minutes: 1, QueueIds: []int32{0}, After: since.Add(-time.Second),
		Before: now.Add(time.Minute), Max: 10})
	for _, m := range minutes {
		out.Ingested += float64(m.PushMessages)
		out.Processed += float64(m.AckSuccess)
	}
	seconds := now.Sub(since).Seconds()
	return rates{metrics.Round(out.Ingested / seconds), metrics.Round(out.Processed / seconds)}, err
}

func (a *API) overview(w http.ResponseWriter, r *request) error {
	rows, of, n, err := a.queuePage(r, db.QueuePageParams{ProjectID: r.engine.Project, Max: maxQueues})
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	rate, err := a.rates(r)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	out := struct {
		Queues     int     `json:"queues"`
		Partitions int64   `json:"partitions"`
		Namespaces int     `json:"namespaces"`
		Tasks      int     `json:"tasks"`
		Messages   counts  `json:"messages"`
		Lag        lag     `json:"lag"`
		Throughput rates   `json:"throughput"`
		Timestamp  instant `json:"timestamp"`
		StatsAge   int64   `json:"statsAge"`
	}{Queues: len(rows), Namespaces: len(byName(rows, of, namespaceOf)), Tasks: len(byName(rows, of, taskOf)), Lag: n.lag,
		Throughput: rate, Timestamp: instant(r.engine.Now()), StatsAge: int64(time.Since(n.taken).Seconds())}
	for _, q := range rows {
		out.Partitions += of[q.ID].Partitions
		out.Messages.add(of[q.ID].six())
	}
	return a.reply(w, http.StatusOK, out)
}

// several is the numbers of the queues that share a namespace or a task.
type several struct {
	Queues     int64 `json:"queues"`
	Partitions int64 `json:"partitions"`
	Messages   two   `json:"messages"`
}

func namespaceOf(q db.QueuePageRow) string { return q.Namespace }
func taskOf(q db.QueuePageRow) string      { return q.Task }

// byName adds up queues; those without the name are left out.
func byName(rows []db.QueuePageRow, of map[int32]queueNumbers, name func(db.QueuePageRow) string) map[string]several {
	sums := make(map[string]several)
	for _, q := range rows {
		if name(q) == "" {
			continue
		}
		s, n := sums[name(q)], of[q.ID]
		s.Queues++
		s.Partitions += n.Partitions
		s.Messages.Total += n.Total
		s.Messages.Pending += n.Pending
		sums[name(q)] = s
	}
	return sums
}

func (a *API) namespaces(w http.ResponseWriter, r *request) error {
	rows, of, _, err := a.queuePage(r, db.QueuePageParams{ProjectID: r.engine.Project, Max: maxQueues})
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	type namespace struct {
		Namespace string `json:"namespace"`
		several   `json:",inline"`
	}
	var out struct {
		Namespaces []namespace `json:"namespaces"`
	}
	sums := byName(rows, of, namespaceOf)
	for _, name := range slices.Sorted(maps.Keys(sums)) {
		out.Namespaces = append(out.Namespaces, namespace{name, sums[name]})
	}
	return a.reply(w, http.StatusOK, out)
}

func (a *API) tasks(w http.ResponseWriter, r *request) error {
	rows, of, _, err := a.queuePage(r, db.QueuePageParams{ProjectID: r.engine.Project, Max: maxQueues})
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	type task struct {
		Task    string `json:"task"`
		several `json:",inline"`
	}
	var out struct {
		Tasks []task `json:"tasks"`
	}
	sums := byName(rows, of, taskOf)
	for _, name := range slices.Sorted(maps.Keys(sums)) {
		out.Tasks = append(out.Tasks, task{name, sums[name]})
	}
	return a.reply(w, http.StatusOK, out)
}

func (a *API) resourcePartitions(w http.ResponseWriter, r *request) error {
	q := &params{values: query(r.URL)}
	queue := q.name("queue", "")
	limit, offset := q.page(100)
	if q.err != nil {
		return q.err
	}
	if queue != "" {
		if _, err := a.liveQueue(r, queue); err != nil {
			return err
		}
	}
	found, err := a.partitions(r.Context(), r.engine.Project, queue, limit, offset)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	type partition struct {
		ID        uuid.UUID `json:"id"`
		Name      string    `json:"name"`
		Queue     string    `json:"queue"`
		CreatedAt instant   `json:"createdAt"`
		Messages  three     `json:"messages"`
	}
	out := struct {
		Partitions []partition `json:"partitions"`
		Pagination pagination  `json:"pagination"`
		Total      int         `json:"total"`
	}{Pagination: pagination{limit, offset}, Total: len(found)}
	for _, p := range found {
		out.Partitions = append(out.Partitions, partition{p.PublicID, p.Name, p.Queue, instant(p.CreatedAt), three{p.Total, p.Pending, p.Processing}})
	}
	return a.reply(w, http.StatusOK, out)
}

func (a *API) statusQueues(w http.ResponseWriter, r *request) error {
	q := &params{values: query(r.URL)}
	q.moment("from", time.Time{}) // the numbers are those of now, whatever the range
	q.moment("to", time.Time{})
	page := db.QueuePageParams{ProjectID: r.engine.Project, Queue: q.name("queue", ""), Namespace: q.name("namespace", ""), Task: q.name("task", "")}
	page.Max, page.Skip = q.page(100)
	if q.err != nil {
		return q.err
	}
	type messages struct {
		Total      int64 `json:"total"`
		Pending    int64 `json:"pending"`
		Processing int64 `json:"processing"`
		Completed  int64 `json:"completed"`
		DeadLetter int64 `json:"deadLetter"`
	}
	type queue struct {
		ID         uuid.UUID `json:"id"`
		Name       string    `json:"name"`
		Namespace  string    `json:"namespace"`
		Task       string    `json:"task"`
		CreatedAt  instant   `json:"createdAt"`
		Partitions int64     `json:"partitions"`
		Messages   messages  `json:"messages"`
	}
	out := struct {
		Queues     []queue    `json:"queues"`
		Pagination pagination `json:"pagination"`
	}{Pagination: pagination{page.Max, page.Skip}}
	rows, of, _, err := a.queuePage(r, page)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	for _, q := range rows {
		n := of[q.ID]
		out.Queues = append(out.Queues, queue{q.PublicID, q.Name, q.Namespace, q.Task, instant(q.CreatedAt), n.Partitions,
			messages{n.Total, n.Pending, n.Processing, n.Total - n.Pending, n.DeadLetter}})
	}
	return a.reply(w, http.StatusOK, out)
}

func (a *API) statusQueue(w http.ResponseWriter, r *request) error {
	q, err := a.queueOf(r)
	if err != nil {
		return err
	}
	type config struct {
		LeaseTime       int32 `json:"leaseTime"`
		RetryLimit      int32 `json:"retryLimit"`
		RetryDelay      int32 `json:"retryDelay"`
		TTL             int32 `json:"ttl"`
		MaxQueueSize    int64 `json:"maxQueueSize"`
		DeadLetterQueue bool  `json:"deadLetterQueue"`
	}
	type queue struct {
		ID        uuid.UUID `json:"id"`
		Name      string    `json:"name"`
		Namespace string    `json:"namespace"`
		Task      string    `json:"task"`
		Priority  int32     `json:"priority"`
		CreatedAt instant   `json:"createdAt"`
		Config    config    `json:"config"`
	}
	type cursor struct {
		TotalConsumed   int64 `json:"totalConsumed"`
		BatchesConsumed int64 `json:"batchesConsumed"`
	}
	type partition struct {
		ID           uuid.UUID `json:"id"`
		Name         string    `json:"name"`
		CreatedAt    instant   `json:"createdAt"`
		Messages     counts    `json:"messages"`
		Stats        counts    `json:"stats"`
		Cursor       cursor    `json:"cursor"`
		LastActivity instant   `json:"lastActivity"`
		Oldest       instant   `json:"oldestMessage"`
		Newest       instant   `json:"newestMessage"`
	}
	type totals struct {
		Messages counts `json:"messages"`
	}
	found, n, err := a.wholeQueue(r, q)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	out := struct {
		Queue      queue       `json:"queue"`
		Partitions []partition `json:"partitions"`
		Totals     totals      `json:"totals"`
	}{Queue: queue{q.PublicID, q.Name, q.Namespace, q.Task, q.Priority, instant(q.CreatedAt),
		config{q.LeaseTime, q.RetryLimit, q.RetryDelay, q.TTL, q.MaxSize, q.DeadLetterQueue}}, Totals: totals{n.six()}}
	for _, p := range found {
		one := partition{ID: p.PublicID, Name: p.Name, CreatedAt: instant(p.CreatedAt), Messages: p.six(), Stats: p.six(),
			Cursor: cursor{TotalConsumed: p.Committed}, Oldest: instant(p.Oldest), Newest: instant(p.Newest)}
		if p.LastPushAt != nil {
			one.LastActivity = instant(*p.LastPushAt)
		}
		out.Partitions = append(out.Partitions, one)
	}
	return a.reply(w, http.StatusOK, out)
}

// refreshNumbers counts now, and makes the other brokers count again before they answer.
func (a *API) refreshNumbers(w http.ResponseWriter, r *request) error {
	err := a.Metrics.Flush()
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	at, err := a.queries.NumbersWant(r.Context())
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	rows, of, _, err := a.queuePage(r, db.QueuePageParams{ProjectID: r.engine.Project, Max: maxQueues})
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	out := struct {
		Engine        string  `json:"engine"`
		QueuesUpdated int     `json:"queuesUpdated"`
		SegPartitions int64   `json:"segPartitions"`
		Namespaces    int     `json:"namespaces"`
		Tasks         int     `json:"tasks"`
		System        int     `json:"system"`
		RefreshedAt   instant `json:"refreshedAt"`
	}{Engine: "segments", QueuesUpdated: len(rows), Namespaces: len(byName(rows, of, namespaceOf)), Tasks: len(byName(rows, of, taskOf)), System: 1,
		RefreshedAt: instant(at)}
	for _, q := range rows {
		out.SegPartitions += of[q.ID].Partitions
	}
	return a.reply(w, http.StatusOK, out)
}
