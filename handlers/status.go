package handlers

import (
	"net/http"
	"time"

	"github.com/google/uuid"

	"ferrymq/db"
	"ferrymq/metrics"
)

// statusQueuesMost is how many queues /status names, the newest; its sums are over all of them.
const statusQueuesMost = 100

// status is the history of a range beside the numbers of now.
func (a *API) status(w http.ResponseWriter, r *request) error {
	win, err := a.readWindow(r, &params{values: query(r.URL)}, time.Hour)
	if err != nil {
		return err
	}
	s, err := a.readStatus(r, win)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}

	type point struct {
		Timestamp          instant  `json:"timestamp"`
		Ingested           int64    `json:"ingested"`
		Processed          int64    `json:"processed"`
		PopMessages        int64    `json:"popMessages"`
		IngestedPerSecond  float64  `json:"ingestedPerSecond"`
		ProcessedPerSecond float64  `json:"processedPerSecond"`
		PopPerSecond       float64  `json:"popPerSecond"`
		AvgLagMs           *int64   `json:"avgLagMs"`
		MaxLagMs           *int64   `json:"maxLagMs"`
		DBErrors           *int64   `json:"dbErrors"`
		AckFailed          int64    `json:"ackFailed"`
		DLQCount           int64    `json:"dlqCount"`
		CPUUserPct         *float64 `json:"cpuUserPct"` // this and what follows: all brokers together
		CPUSysPct          *float64 `json:"cpuSysPct"`
		RSSMb              *float64 `json:"rssMb"`
		DBPoolActive       *float64 `json:"dbPoolActive"`
		DBPoolIdle         *float64 `json:"dbPoolIdle"`
		DBPoolSize         *float64 `json:"dbPoolSize"`
	}
	type queue struct {
		ID         uuid.UUID `json:"id"`
		Name       string    `json:"name"`
		Namespace  string    `json:"namespace"`
		Task       string    `json:"task"`
		CreatedAt  instant   `json:"createdAt"`
		Partitions int64     `json:"partitions"`
		Messages   counts    `json:"messages"`
	}
	type failure struct {
		Error string `json:"error"`
		Count int64  `json:"count"`
	}
	var answer struct {
		TimeRange     timeRange `json:"timeRange"`
		BucketMinutes int32     `json:"bucketMinutes"`
		PointCount    int       `json:"pointCount"`
		Throughput    []point   `json:"throughput"`
		Queues        []queue   `json:"queues"`
		Messages      struct {
			counts
			Requests struct {
				Push int64 `json:"push"`
				Pop  int64 `json:"pop"`
				Ack  int64 `json:"ack"`
			} `json:"requests"`
		} `json:"messages"`
		Leases struct {
			Active               int64  `json:"active"`
			PartitionsWithLeases int64  `json:"partitionsWithLeases"`
			TotalBatchSize       int64  `json:"totalBatchSize"`
			TotalAcked           *int64 `json:"totalAcked"` // where a lease began is not kept
		} `json:"leases"`
		DeadLetterQueue struct {
			TotalMessages      int64     `json:"totalMessages"`
			AffectedPartitions int64     `json:"affectedPartitions"`
			TopErrors          []failure `json:"topErrors"`
		} `json:"deadLetterQueue"`
		Workers []worker `json:"workers"`
		Errors  struct {
			DBErrors    *int64 `json:"dbErrors"`
			AckFailed   int64  `json:"ackFailed"`
			DLQMessages int64  `json:"dlqMessages"`
		} `json:"errors"`
		StatsAge int64 `json:"statsAge"`
	}
	answer.TimeRange, answer.BucketMinutes, answer.PointCount, answer.Workers = win.timeRange(), win.minutes, len(s.history), s.workers
	answer.StatsAge = int64(time.Since(s.numbers.taken).Seconds())
	sums, requests, broken := &answer.Errors, &answer.Messages.Requests, int64(0)
	byStep := stepFigures(s.processes)
	for _, x := range s.history {
		p := point{Timestamp: instant(x.At), Ingested: x.PushMessages, Processed: x.AckSuccess, PopMessages: x.PopMessages,
			IngestedPerSecond: win.perSecond(x.PushMessages), ProcessedPerSecond: win.perSecond(x.AckSuccess), PopPerSecond: win.perSecond(x.PopMessages),
			DBErrors: win.known(x.DbErrors), AckFailed: x.AckFailed, DLQCount: x.DeadLetters}
		p.AvgLagMs, p.MaxLagMs = lagOf(x.LagSumMs, x.LagCount, x.LagMaxMs)
		if brokers := byStep[x.At.Unix()]; brokers != nil {
			sum := func(of func(*figures) float64) *float64 {
				n := 0.0
				for _, f := range brokers {
					n += of(f)
				}
				n = metrics.Round(n)
				return &n
			}
			p.CPUUserPct = sum(func(f *figures) float64 { return f.CPU.User.Avg / 100 })
			p.CPUSysPct = sum(func(f *figures) float64 { return f.CPU.System.Avg / 100 })
			p.RSSMb = sum(func(f *figures) float64 { return f.Memory.RSS.Avg / (1 << 20) })
			p.DBPoolActive = sum(func(f *figures) float64 { return f.Database.Active.Avg })
			p.DBPoolIdle = sum(func(f *figures) float64 { return f.Database.Idle.Avg })
			p.DBPoolSize = sum(func(f *figures) float64 { return f.Database.Size.Avg })
		}
		answer.Throughput = append(answer.Throughput, p)
		requests.Push, requests.Pop, requests.Ack = requests.Push+x.PushRequests, requests.Pop+x.PopRequests, requests.Ack+x.AckRequests
		sums.AckFailed, sums.DLQMessages, broken = sums.AckFailed+x.AckFailed, sums.DLQMessages+x.DeadLetters, broken+x.DbErrors
	}
	sums.DBErrors = win.known(broken)
	for i, q := range s.queues {
		six := s.of[q.ID].six()
		answer.Messages.add(six)
		if i < statusQueuesMost {
			answer.Queues = append(answer.Queues, queue{q.PublicID, q.Name, q.Namespace, q.Task, instant(q.CreatedAt), s.of[q.ID].Partitions, six})
		}
	}
	l, d := &answer.Leases, &answer.DeadLetterQueue
	l.Active, l.PartitionsWithLeases, l.TotalBatchSize = s.leases.Active, s.leases.Partitions, s.leases.Messages
	d.TotalMessages, d.AffectedPartitions = s.dead.Messages, s.dead.Partitions
	for _, f := range s.failures {
		d.TopErrors = append(d.TopErrors, failure{f.Error, f.Messages})
	}
	return a.reply(w, http.StatusOK, &answer)
}

// statusRows is what status is made of.
type statusRows struct {
	queues    []db.QueuePageRow
	of        map[int32]queueNumbers
	numbers   *numbers
	history   []db.ActivitySeriesRow
	processes []db.BrokerActivitySeriesRow
	workers   []worker
	leases    db.StatusLeasesRow
	dead      db.StatusDeadLettersRow
	failures  []db.StatusDeadLetterErrorsRow
}

func (a *API) readStatus(r *request, win *window) (s statusRows, err error) {
	ctx, project := r.Context(), r.engine.Project
	s.queues, s.of, s.numbers, err = a.queuePage(r, db.QueuePageParams{ProjectID: project, Queue: win.name, Namespace: win.ns, Task: win.task, Max: maxQueues})
	if err == nil {
		s.history, err = a.series(ctx, win)
	}
	if err == nil {
		s.processes, err = a.processes(r, win, "")
	}
	if err == nil {
		s.workers, err = a.workers(r, win, s.processes)
	}
	if err == nil {
		s.leases, err = a.queries.StatusLeases(ctx, db.StatusLeasesParams{ProjectID: project, Name: win.name, Namespace: win.ns, Task: win.task})
	}
	if err == nil {
		s.dead, err = a.queries.StatusDeadLetters(ctx, db.StatusDeadLettersParams{ProjectID: project, Name: win.name, Namespace: win.ns, Task: win.task})
	}
	if err == nil {
		s.failures, err = a.queries.StatusDeadLetterErrors(ctx, db.StatusDeadLetterErrorsParams{ProjectID: project, Name: win.name, Namespace: win.ns, Task: win.task})
	}
	return s, err
}

// stepFigures are the figures of each broker in each step, by the step's second.
func stepFigures(rows []db.BrokerActivitySeriesRow) map[int64]map[string]*figures {
	all := make(map[int64]map[string]*figures)
	for i := range rows {
		x := &rows[i]
		step := all[x.At.Unix()]
		if step == nil {
			step = make(map[string]*figures)
			all[x.At.Unix()] = step
		}
		if step[x.Broker] == nil {
			step[x.Broker] = &figures{}
		}
		step[x.Broker].add(x)
	}
	return all
}
