package handlers

import (
	"context"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"ferrymq/db"
	"ferrymq/metrics"
)

func analyticsRoutes() []route {
	return []route{
		probe("/metrics", open, (*API).metrics),
		probe("/metrics/prometheus", open, (*API).prometheus),
		probe("/status", readOnly, (*API).alive),
		on("GET", "/api/v1/status", readOnly, (*API).status),
		on("GET", "/api/v1/status/analytics", readOnly, (*API).statusAnalytics),
		on("GET", "/api/v1/status/buffers", readOnly, (*API).statusBuffers),
		on("GET", "/api/v1/analytics/queue-lag", readOnly, (*API).queueLag),
		on("GET", "/api/v1/analytics/queue-ops", readOnly, (*API).queueOps),
		on("GET", "/api/v1/analytics/queue-parked-replicas", readOnly, (*API).queueParked),
		on("GET", "/api/v1/analytics/retention", readOnly, (*API).retentionHistory),
		on("GET", "/api/v1/analytics/system-metrics", readOnly, (*API).systemMetrics),
		on("GET", "/api/v1/analytics/worker-metrics", readOnly, (*API).workerMetrics),
		on("GET", "/api/v1/analytics/postgres-stats", readOnly, (*API).postgresStats),
	}
}

// maxPoints is how many points a series has at most, the newest ones.
const maxPoints = 10_000

// timeRange is what a series is about.
type timeRange struct {
	From instant `json:"from"`
	To   instant `json:"to"`
}

// window is a range of the history, the width of the steps it is answered in, and which queues it is about.
type window struct {
	from, to        time.Time
	minutes         int32
	name, ns, task  string
	queues          []int32 // as ActivitySeries takes them
	filtered, empty bool
}

// readWindow reads from, to and the filters, and writes what this broker has counted, so that the answer has it.
func (a *API) readWindow(r *request, q *params, back time.Duration) (*window, error) {
	now := r.engine.Now()
	w := &window{from: q.moment("from", now.Add(-back)), to: q.moment("to", now), name: q.name("queue", ""), ns: q.name("namespace", ""), task: q.name("task", "")}
	if q.err != nil {
		return nil, q.err
	}
	w.minutes, w.empty = stepOf(w.to.Sub(w.from)), !w.from.Before(w.to)
	if w.filtered = w.name+w.ns+w.task != ""; !w.filtered {
		w.queues = []int32{0}
	}
	if err := a.Metrics.Flush(); err != nil {
		return nil, a.databaseError(r, err, "query failed")
	}
	if w.filtered && !w.empty {
		rows, err := a.queries.ActivityQueues(r.Context(), db.ActivityQueuesParams{ProjectID: r.engine.Project, Name: w.name, Namespace: w.ns, Task: w.task})
		if err != nil {
			return nil, a.databaseError(r, err, "query failed")
		}
		for _, q := range rows {
			w.queues = append(w.queues, q.ID)
		}
	}
	return w, nil
}

func (w *window) timeRange() timeRange { return timeRange{instant(w.from), instant(w.to)} }

// after is where the first minute begins that reaches into the window, as a bound that is not included.
func (w *window) after() time.Time { return w.from.Add(-time.Minute) }

func (w *window) seconds() float64 { return float64(w.minutes) * 60 }

// perSecond is a rate over one step.
func (w *window) perSecond(n int64) float64 { return metrics.Round(float64(n) / w.seconds()) }

// stepOf is how wide the steps of a range are, in minutes.
func stepOf(d time.Duration) int32 {
	switch {
	case d <= time.Hour:
		return 1
	case d <= 6*time.Hour:
		return 5
	case d <= 24*time.Hour:
		return 15
	case d <= 7*24*time.Hour:
		return 60
	}
	return 360
}

// lagOf is the mean and the highest lag of deliveries, null without any.
func lagOf(sum, count, highest int64) (mean, most *int64) {
	if count == 0 {
		return nil, nil
	}
	m := int64(math.Round(float64(sum) / float64(count)))
	return &m, &highest
}

// series is the history of all queues of a window together, oldest first.
func (a *API) series(ctx context.Context, w *window) ([]db.ActivitySeriesRow, error) {
	if w.empty || len(w.queues) == 0 {
		return nil, nil
	}
	rows, err := a.queries.ActivitySeries(ctx, db.ActivitySeriesParams{QueueIds: w.queues, After: w.after(), Before: w.to, Minutes: w.minutes, Max: maxPoints})
	slices.Reverse(rows)
	return rows, err
}

// perQueue is the history of each queue of a window, newest first.
func (a *API) perQueue(r *request, w *window) ([]db.ActivityByQueueRow, error) {
	if w.empty {
		return nil, nil
	}
	return a.queries.ActivityByQueue(r.Context(), db.ActivityByQueueParams{ProjectID: r.engine.Project, After: w.after(), Before: w.to, Minutes: w.minutes,
		Name: w.name, Namespace: w.ns, Task: w.task, Max: maxPoints})
}

func (a *API) statusBuffers(w http.ResponseWriter, r *request) error {
	ctx, cancel := context.WithTimeout(r.Context(), 2*time.Second)
	defer cancel()
	if _, err := a.Pool.Exec(ctx, "select 1"); err != nil {
		return a.write(w, http.StatusOK, []byte(`{"pending":0,"failed":0,"dbHealthy":false,"worker":0}`))
	}
	return a.write(w, http.StatusOK, []byte(`{"pending":0,"failed":0,"dbHealthy":true,"worker":0}`))
}

func (a *API) statusAnalytics(w http.ResponseWriter, r *request) error {
	q := &params{values: query(r.URL)}
	win, err := a.readWindow(r, q, 24*time.Hour)
	if err != nil {
		return err
	}
	type point struct {
		Timestamp instant `json:"timestamp"`
		Messages  int64   `json:"messages"`
	}
	var answer struct {
		DataPoints []point `json:"dataPoints"`
		Interval   string  `json:"interval"`
		From       instant `json:"from"`
		To         instant `json:"to"`
	}
	answer.Interval, answer.From, answer.To = q.text("interval"), instant(win.from), instant(win.to)
	switch answer.Interval {
	case "minute":
		win.minutes = 1
	case "day":
		win.minutes = 24 * 60
	default:
		answer.Interval, win.minutes = "hour", 60
	}
	rows, err := a.series(r.Context(), win)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	for _, x := range rows {
		answer.DataPoints = append(answer.DataPoints, point{instant(x.At), x.PushMessages})
	}
	return a.reply(w, http.StatusOK, &answer)
}

func (a *API) queueLag(w http.ResponseWriter, r *request) error {
	win, err := a.readWindow(r, &params{values: query(r.URL)}, time.Hour)
	if err != nil {
		return err
	}
	rows, err := a.perQueue(r, win)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	type point struct {
		QueueName     string  `json:"queueName"`
		PopCount      int64   `json:"popCount"`
		AvgLagMs      *int64  `json:"avgLagMs"`
		MaxLagMs      *int64  `json:"maxLagMs"`
		BucketMinutes int32   `json:"bucketMinutes"`
		BucketTime    instant `json:"bucketTime"`
	}
	var answer []point
	for _, x := range rows {
		mean, most := lagOf(x.LagSumMs, x.LagCount, x.LagMaxMs)
		answer = append(answer, point{x.Name, x.PopMessages, mean, most, win.minutes, instant(x.At)})
	}
	return a.reply(w, http.StatusOK, answer)
}

func (a *API) queueOps(w http.ResponseWriter, r *request) error {
	win, err := a.readWindow(r, &params{values: query(r.URL)}, time.Hour)
	if err != nil {
		return err
	}
	rows, err := a.perQueue(r, win)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	type point struct {
		Bucket            instant `json:"bucket"`
		QueueName         string  `json:"queueName"`
		PushRequests      int64   `json:"pushRequests"`
		PushMessages      int64   `json:"pushMessages"`
		PopMessages       int64   `json:"popMessages"`
		PopEmpty          int64   `json:"popEmpty"`
		AckRequests       int64   `json:"ackRequests"`
		AckSuccess        int64   `json:"ackSuccess"`
		AckFailed         int64   `json:"ackFailed"`
		Transactions      int64   `json:"transactions"`
		PartitionsCreated int64   `json:"partitionsCreated"`
		PartitionsDeleted int64   `json:"partitionsDeleted"`
		PartitionCount    *int64  `json:"partitionCount"` // how many there were then is not known
		AvgLagMs          *int64  `json:"avgLagMs"`
		MaxLagMs          *int64  `json:"maxLagMs"`
		PushPerSecond     float64 `json:"pushPerSecond"`
		PopPerSecond      float64 `json:"popPerSecond"`
		AckPerSecond      float64 `json:"ackPerSecond"`
		EmptyPerSecond    float64 `json:"emptyPerSecond"`
		ParkedCount       int64   `json:"parkedCount"`
	}
	var answer struct {
		TimeRange     timeRange `json:"timeRange"`
		BucketMinutes int32     `json:"bucketMinutes"`
		Series        []point   `json:"series"`
		Queues        []string  `json:"queues"`
	}
	answer.TimeRange, answer.BucketMinutes = win.timeRange(), win.minutes
	for _, x := range oldestFirst(rows, func(x *db.ActivityByQueueRow) time.Time { return x.At }) {
		mean, most := lagOf(x.LagSumMs, x.LagCount, x.LagMaxMs)
		answer.Series = append(answer.Series, point{Bucket: instant(x.At), QueueName: x.Name, PushRequests: x.PushRequests, PushMessages: x.PushMessages,
			PopMessages: x.PopMessages, PopEmpty: x.PopEmpty, AckRequests: x.AckRequests, AckSuccess: x.AckSuccess, AckFailed: x.AckFailed,
			Transactions: x.Transactions, PartitionsCreated: x.PartitionsCreated, PartitionsDeleted: x.PartitionsDeleted, AvgLagMs: mean, MaxLagMs: most,
			PushPerSecond: win.perSecond(x.PushMessages), PopPerSecond: win.perSecond(x.PopMessages), AckPerSecond: win.perSecond(x.AckSuccess + x.AckFailed),
			EmptyPerSecond: win.perSecond(x.PopEmpty), ParkedCount: x.Parked})
		answer.Queues = append(answer.Queues, x.Name)
	}
	slices.Sort(answer.Queues)
	answer.Queues = slices.Compact(answer.Queues)
	return a.reply(w, http.StatusOK, &answer)
}

// oldestFirst turns rows that come newest first; those of one time keep their order.
func oldestFirst[T any](rows []T, at func(*T) time.Time) []T {
	slices.SortStableFunc(rows, func(x, y T) int { return at(&x).Compare(at(&y)) })
	return rows
}

// replica names a broker. Each is one worker.
type replica struct {
	Hostname string `json:"hostname"`
	WorkerID int    `json:"workerId"`
}

func (a *API) queueParked(w http.ResponseWriter, r *request) error {
	win, err := a.readWindow(r, &params{values: query(r.URL)}, time.Hour)
	if err != nil {
		return err
	}
	var rows []db.ActivityParkedRow
	if !win.empty {
		if rows, err = a.queries.ActivityParked(r.Context(), db.ActivityParkedParams{ProjectID: r.engine.Project, After: win.after(), Before: win.to,
			Minutes: win.minutes, Name: win.name, Namespace: win.ns, Task: win.task, Max: maxPoints}); err != nil {
			return a.databaseError(r, err, "query failed")
		}
	}
	type point struct {
		Bucket      instant `json:"bucket"`
		QueueName   string  `json:"queueName"`
		Hostname    string  `json:"hostname"`
		WorkerID    int     `json:"workerId"`
		ParkedCount int64   `json:"parkedCount"`
	}
	var answer struct {
		TimeRange     timeRange `json:"timeRange"`
		BucketMinutes int32     `json:"bucketMinutes"`
		Series        []point   `json:"series"`
		Replicas      []replica `json:"replicas"`
	}
	answer.TimeRange, answer.BucketMinutes = win.timeRange(), win.minutes
	var brokers []string
	for _, x := range oldestFirst(rows, func(x *db.ActivityParkedRow) time.Time { return x.At }) {
		answer.Series = append(answer.Series, point{instant(x.At), x.Name, x.Broker, 0, x.Parked})
		brokers = append(brokers, x.Broker)
	}
	slices.Sort(brokers)
	for _, b := range slices.Compact(brokers) {
		answer.Replicas = append(answer.Replicas, replica{Hostname: b})
	}
	return a.reply(w, http.StatusOK, &answer)
}

// removed is what retention took away.
type removed struct {
	RetentionMsgs          int64 `json:"retentionMsgs"`
	CompletedRetentionMsgs int64 `json:"completedRetentionMsgs"`
	EvictionMsgs           int64 `json:"evictionMsgs"`
	TotalMsgs              int64 `json:"totalMsgs"`
	EventCount             int64 `json:"eventCount"`
}

func (a *API) retentionHistory(w http.ResponseWriter, r *request) error {
	win, err := a.readWindow(r, &params{values: query(r.URL)}, time.Hour)
	if err != nil {
		return err
	}
	rows, err := a.series(r.Context(), win)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	type point struct {
		Bucket instant `json:"bucket"`
		removed
	}
	var answer struct {
		TimeRange     timeRange `json:"timeRange"`
		BucketMinutes int32     `json:"bucketMinutes"`
		Series        []point   `json:"series"`
		Totals        removed   `json:"totals"`
	}
	answer.TimeRange, answer.BucketMinutes = win.timeRange(), win.minutes
	for _, x := range rows {
		n := removed{x.RetentionMessages, x.CompletedRetentionMessages, x.EvictionMessages,
			x.RetentionMessages + x.CompletedRetentionMessages + x.EvictionMessages, x.RetentionEvents}
		if n == (removed{}) {
			continue
		}
		answer.Series = append(answer.Series, point{instant(x.At), n})
		t := &answer.Totals
		t.RetentionMsgs, t.CompletedRetentionMsgs, t.EvictionMsgs = t.RetentionMsgs+n.RetentionMsgs, t.CompletedRetentionMsgs+n.CompletedRetentionMsgs, t.EvictionMsgs+n.EvictionMsgs
		t.TotalMsgs, t.EventCount = t.TotalMsgs+n.TotalMsgs, t.EventCount+n.EventCount
	}
	return a.reply(w, http.StatusOK, &answer)
}

// processes is the history of brokers in a window, oldest first; hostname "" is all.
func (a *API) processes(r *request, w *window, hostname string) ([]db.BrokerActivitySeriesRow, error) {
	if w.empty {
		return nil, nil
	}
	return a.queries.BrokerActivitySeries(r.Context(), db.BrokerActivitySeriesParams{Minutes: w.minutes, After: w.after(), Before: w.to, Broker: hostname})
}

// leaf is one figure over a step.
type leaf struct {
	Avg  float64 `json:"avg"`
	Min  float64 `json:"min"`
	Max  float64 `json:"max"`
	Last float64 `json:"last"`

	n int
}

func (l *leaf) add(x float64) {
	if l.n++; l.n == 1 {
		l.Min, l.Max = x, x
	}
	l.Avg += (x - l.Avg) / float64(l.n)
	l.Min, l.Max, l.Last = min(l.Min, x), max(l.Max, x), x
}

func (l leaf) rounded() leaf {
	return leaf{Avg: metrics.Round(l.Avg), Min: metrics.Round(l.Min), Max: metrics.Round(l.Max), Last: metrics.Round(l.Last)}
}

// figures of a process over a step. CPU is in microseconds per 10 ms, which is hundredths of a percent of a core.
type figures struct {
	CPU struct {
		User   leaf `json:"user_us"`
		System leaf `json:"system_us"`
	} `json:"cpu"`
	Memory struct {
		RSS leaf `json:"rss_bytes"`
	} `json:"memory"`
	Database struct {
		Active leaf `json:"pool_active"`
		Idle   leaf `json:"pool_idle"`
		Size   leaf `json:"pool_size"`
	} `json:"database"`
	Uptime leaf `json:"uptime_seconds"`
}

func (f *figures) add(x *db.BrokerActivitySeriesRow) {
	wall := float64(max(x.WallMs, 1))
	f.CPU.User.add(float64(x.CpuUserMs) / wall * 10_000)
	f.CPU.System.add(float64(x.CpuSysMs) / wall * 10_000)
	f.Memory.RSS.add(float64(x.RssBytes))
	f.Database.Active.add(float64(x.PoolActive))
	f.Database.Idle.add(float64(x.PoolIdle))
	f.Database.Size.add(float64(x.PoolSize))
	f.Uptime.add(float64(x.UptimeSeconds))
}

func (f figures) rounded() figures {
	for _, l := range []*leaf{&f.CPU.User, &f.CPU.System, &f.Memory.RSS, &f.Database.Active, &f.Database.Idle, &f.Database.Size, &f.Uptime} {
		*l = l.rounded()
	}
	return f
}

func (a *API) systemMetrics(w http.ResponseWriter, r *request) error {
	q := &params{values: query(r.URL)}
	hostname, worker := q.name("hostname", ""), q.number("workerId", 0, math.MinInt64, math.MaxInt64)
	win, err := a.readWindow(r, q, time.Hour)
	if err != nil {
		return err
	}
	var rows []db.BrokerActivitySeriesRow
	if worker == 0 {
		if rows, err = a.processes(r, win, hostname); err != nil {
			return a.databaseError(r, err, "query failed")
		}
	}
	type point struct {
		Timestamp instant `json:"timestamp"`
		Metrics   figures `json:"metrics"`
	}
	type series struct {
		replica
		TimeSeries []point `json:"timeSeries"`
	}
	var answer struct {
		TimeRange     timeRange `json:"timeRange"`
		BucketMinutes int32     `json:"bucketMinutes"`
		PointCount    int       `json:"pointCount"`
		ReplicaCount  int       `json:"replicaCount"`
		Replicas      []*series `json:"replicas"`
	}
	answer.TimeRange, answer.BucketMinutes = win.timeRange(), win.minutes
	byBroker := make(map[string]*series)
	for i := range rows {
		x := &rows[i]
		s := byBroker[x.Broker]
		if s == nil {
			s = &series{replica: replica{Hostname: x.Broker}}
			byBroker[x.Broker] = s
			answer.Replicas = append(answer.Replicas, s)
		}
		if n := len(s.TimeSeries); n == 0 || !time.Time(s.TimeSeries[n-1].Timestamp).Equal(x.At) {
			s.TimeSeries = append(s.TimeSeries, point{Timestamp: instant(x.At)})
			answer.PointCount++
		}
		s.TimeSeries[len(s.TimeSeries)-1].Metrics.add(x)
	}
	for _, s := range answer.Replicas {
		for i := range s.TimeSeries {
			s.TimeSeries[i].Metrics = s.TimeSeries[i].Metrics.rounded()
		}
	}
	slices.SortFunc(answer.Replicas, func(x, y *series) int { return strings.Compare(x.Hostname, y.Hostname) })
	answer.ReplicaCount = len(answer.Replicas)
	return a.reply(w, http.StatusOK, &answer)
}

func (a *API) workerMetrics(w http.ResponseWriter, r *request) error {
	win, err := a.readWindow(r, &params{values: query(r.URL)}, time.Hour)
	if err != nil {
		return err
	}
	rows, err := a.series(r.Context(), win)
	var queues []db.ActivityByQueueRow
	if err == nil {
		queues, err = a.perQueue(r, win)
	}
	var processes []db.BrokerActivitySeriesRow
	if err == nil {
		processes, err = a.processes(r, win, "")
	}
	var brokers []worker
	if err == nil {
		brokers, err = a.workers(r, win, processes)
	}
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	type point struct {
		Timestamp             instant `json:"timestamp"`
		PushRequestsPerSecond float64 `json:"pushRequestsPerSecond"`
		PopRequestsPerSecond  float64 `json:"popRequestsPerSecond"`
		AckRequestsPerSecond  float64 `json:"ackRequestsPerSecond"`
		PushMessagesPerSecond float64 `json:"pushMessagesPerSecond"`
		PopMessagesPerSecond  float64 `json:"popMessagesPerSecond"`
		AckMessagesPerSecond  float64 `json:"ackMessagesPerSecond"`
		AvgLagMs              *int64  `json:"avgLagMs"`
		MaxLagMs              *int64  `json:"maxLagMs"`
		DBErrors              *int64  `json:"dbErrors"`
		DLQCount              int64   `json:"dlqCount"`
	}
	type queue struct {
		QueueName string `json:"queueName"`
		PopCount  int64  `json:"popCount"`
		AvgLagMs  *int64 `json:"avgLagMs"`
		MaxLagMs  *int64 `json:"maxLagMs"`
	}
	type summary struct {
		PushRequests int64  `json:"pushRequests"`
		PopRequests  int64  `json:"popRequests"`
		AckRequests  int64  `json:"ackRequests"`
		Transactions int64  `json:"transactions"`
		PushMessages int64  `json:"pushMessages"`
		PopMessages  int64  `json:"popMessages"`
		AckMessages  int64  `json:"ackMessages"`
		AckSuccess   int64  `json:"ackSuccess"`
		AckFailed    int64  `json:"ackFailed"`
		DBErrors     *int64 `json:"dbErrors"`
		DLQCount     int64  `json:"dlqCount"`
	}
	var answer struct {
		TimeRange     timeRange `json:"timeRange"`
		BucketMinutes int32     `json:"bucketMinutes"`
		PointCount    int       `json:"pointCount"`
		TimeSeries    []point   `json:"timeSeries"`
		Workers       []worker  `json:"workers"`
		Queues        []queue   `json:"queues"`
		Summary       summary   `json:"summary"`
	}
	answer.TimeRange, answer.BucketMinutes, answer.PointCount, answer.Workers = win.timeRange(), win.minutes, len(rows), brokers
	s, failures := &answer.Summary, int64(0)
	for _, x := range rows {
		mean, most := lagOf(x.LagSumMs, x.LagCount, x.LagMaxMs)
		answer.TimeSeries = append(answer.TimeSeries, point{instant(x.At), win.perSecond(x.PushRequests), win.perSecond(x.PopRequests), win.perSecond(x.AckRequests),
			win.perSecond(x.PushMessages), win.perSecond(x.PopMessages), win.perSecond(x.AckSuccess + x.AckFailed), mean, most, win.known(x.DbErrors), x.DeadLetters})
		s.PushRequests, s.PopRequests, s.AckRequests, s.Transactions = s.PushRequests+x.PushRequests, s.PopRequests+x.PopRequests, s.AckRequests+x.AckRequests, s.Transactions+x.Transactions
		s.PushMessages, s.PopMessages, s.AckMessages = s.PushMessages+x.PushMessages, s.PopMessages+x.PopMessages, s.AckMessages+x.AckSuccess+x.AckFailed
		s.AckSuccess, s.AckFailed, s.DLQCount = s.AckSuccess+x.AckSuccess, s.AckFailed+x.AckFailed, s.DLQCount+x.DeadLetters
		failures += x.DbErrors
	}
	s.DBErrors = win.known(failures)
	type lag struct{ pops, sum, count, most int64 }
	byName, names := make(map[string]lag), []string(nil)
	for _, x := range queues {
		l, ok := byName[x.Name]
		if !ok {
			names = append(names, x.Name)
		}
		byName[x.Name] = lag{l.pops + x.PopMessages, l.sum + x.LagSumMs, l.count + x.LagCount, max(l.most, x.LagMaxMs)}
	}
	slices.Sort(names)
	for _, name := range names {
		l := byName[name]
		mean, most := lagOf(l.sum, l.count, l.most)
		answer.Queues = append(answer.Queues, queue{name, l.pops, mean, most})
	}
	return a.reply(w, http.StatusOK, &answer)
}

// known is a count that is kept for all queues together only.
func (w *window) known(n int64) *int64 {
	if w.filtered {
		return nil
	}
	return &n
}

// worker is what one broker did. dbConnections are those it had open last.
type worker struct {
	replica
	DBConnections     int32 `json:"dbConnections"`
	MessagesProcessed int64 `json:"messagesProcessed"`
}

// workers are the brokers that were there in a window.
func (a *API) workers(r *request, w *window, rows []db.BrokerActivitySeriesRow) ([]worker, error) {
	if w.empty {
		return nil, nil
	}
	did, err := a.queries.ActivityBrokers(r.Context(), db.ActivityBrokersParams{After: w.after(), Before: w.to})
	if err != nil {
		return nil, err
	}
	byName := make(map[string]*worker)
	var names []string
	for i := range rows {
		x := byName[rows[i].Broker]
		if x == nil {
			x = &worker{replica: replica{Hostname: rows[i].Broker}}
			byName[x.Hostname], names = x, append(names, x.Hostname)
		}
		x.DBConnections = rows[i].PoolActive + rows[i].PoolIdle
	}
	for _, d := range did {
		if x := byName[d.Broker]; x != nil {
			x.MessagesProcessed = d.AckSuccess
		}
	}
	slices.Sort(names)
	all := make([]worker, len(names))
	for i, n := range names {
		all[i] = *byName[n]
	}
	return all, nil
}
