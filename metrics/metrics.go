// Package metrics counts what a broker does: as numbers to scrape, and as a history per minute and queue in the database.
//
// Whoever does something adds to a counter, which costs an atomic addition or two; everything else happens when somebody
// reads, or every ten seconds.
package metrics

import (
	"log/slog"
	"math"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
)

// Count is something that is counted.
type Count int

// The counts. Those up to stored are columns of ferrymq.activity.
const (
	PushRequests Count = iota
	PushMessages       // stored
	PopRequests
	PopMessages // delivered
	PopEmpty
	AckRequests
	AckSuccess // items accepted as completed
	AckFailed  // all other items: failed, retry, dlq, and what was refused
	Transactions
	PartitionsCreated
	PartitionsDeleted
	RetentionMessages
	CompletedRetentionMessages
	EvictionMessages
	RetentionEvents // steps that removed something
	DeadLetters
	DatabaseErrors // requests that failed because of the database
	lagSum         // ms
	lagCount
	stored

	PushDuplicates Count = iota - 1
	RefusedOverloaded
	RefusedDatabase
	RefusedMaintenance
	RefusedFull
	DecryptionFailures
	commits
	CommitPushes
	CommitAcks
	CommitPops
	CommitExtends
	counts
)

// buckets of times, in seconds.
var buckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}

// Metrics is all that one broker counts. Set the exported fields before Start.
type Metrics struct {
	Pools  []*pgxpool.Pool // connections that requests use; the first one is also used here
	Log    *slog.Logger
	Name   string // of this broker, for people
	Parked func() []Parked
	// Gauges that somebody else knows; nil: 0.
	IsReady, PushMaintenance, PopMaintenance func() bool

	// How long requests took, pops without the time they were parked.
	PushSeconds, PopSeconds, AckSeconds prometheus.Observer
	commitSeconds                       prometheus.Observer

	registry *prometheus.Registry
	began    time.Time
	total    [counts]atomic.Int64 // of the default project, and what belongs to none
	others   [counts]atomic.Int64 // of all other projects: for operators, not in the history
	lagMax   atomic.Int64         // ms, since it was last written
	lag      lags
	routes   []*Route

	mu     sync.RWMutex // held for reading while a tally is added to: whoever takes the map has seen all of it
	queues map[int32]*tally

	history
	flow    flow
	backlog backlog
}

// tally is what happened to one queue since it was last written.
type tally struct {
	n      [stored]atomic.Int64
	lagMax atomic.Int64
}

// Parked is how many pops wait on one queue. Those of discovery have no queue: 0 and no name.
type Parked struct {
	Queue int32
	Name  string
	Pops  int64
}

// Route counts the answers of one route by status.
type Route struct {
	pattern string
	codes   [500]atomic.Int64 // from 100
}

// Answered notes an answer.
func (r *Route) Answered(status int) {
	if i := status - 100; i >= 0 && i < len(r.codes) {
		r.codes[i].Add(1)
	}
}

// lags is a histogram of delivery lags. The messages of a segment share theirs, so they are observed together.
type lags struct {
	counts [14]atomic.Uint64 // of buckets, and beyond
	micros atomic.Int64
}

func (l *lags) observe(d time.Duration, n int64) {
	i := 0
	for i < len(buckets) && d.Seconds() > buckets[i] {
		i++
	}
	l.counts[i].Add(uint64(n))
	l.micros.Add(d.Microseconds() * n)
}

// New makes the counters of a broker. They can be added to at once.
func New(version string) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry(), began: time.Now(), queues: make(map[int32]*tally)}
	m.last = m.sample()
	requests := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "ferrymq_request_duration_seconds", Buckets: buckets,
		Help: "How long push, pop and ack requests took. Of a pop that was parked, the time until it parked and from its wake-up on."}, []string{"op"})
	commit := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "ferrymq_commit_duration_seconds", Buckets: buckets, Help: "How long combined commits took."})
	m.PushSeconds, m.PopSeconds, m.AckSeconds = requests.WithLabelValues("push"), requests.WithLabelValues("pop"), requests.WithLabelValues("ack")
	m.commitSeconds = commit
	m.registry.MustRegister(requests, commit, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "ferrymq_build_info", Help: "The version that runs.",
		ConstLabels: prometheus.Labels{"version": version}}, func() float64 { return 1 }), collector{m})
	return m
}

// Route makes the counters of a route; pattern is its label.
func (m *Metrics) Route(pattern string) *Route {
	r := &Route{pattern: pattern}
	m.routes = append(m.routes, r)
	return r
}

// Total adds to the broker's count alone.
func (m *Metrics) Total(c Count, n int64) { m.total[c].Add(n) }

// Queue adds to a queue's count alone: for a request, which the broker counts once however many queues it is about.
func (m *Metrics) Queue(queue int32, c Count, n int64) {
	m.with(queue, func(t *tally) { t.n[c].Add(n) })
}

// Add counts something that belongs to one queue of a project.
func (m *Metrics) Add(project, queue int32, c Count, n int64) {
	if project != m.Project {
		m.others[c].Add(n)
		return
	}
	m.Total(c, n)
	m.Queue(queue, c, n)
}

func (m *Metrics) with(queue int32, add func(*tally)) {
	if queue == 0 {
		return
	}
	m.mu.RLock()
	if t := m.queues[queue]; t != nil {
		add(t)
		m.mu.RUnlock()
		return
	}
	m.mu.RUnlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.queues[queue]
	if t == nil {
		t = &tally{}
		m.queues[queue] = t
	}
	add(t)
}

// Delivered counts n messages of a queue that were delivered so long after they were stored.
func (m *Metrics) Delivered(queue int32, n int64, lag time.Duration) {
	lag = max(lag, 0) // clocks differ a little
	ms := lag.Milliseconds()
	m.lag.observe(lag, n)
	m.total[PopMessages].Add(n)
	m.total[lagSum].Add(ms * n)
	m.total[lagCount].Add(n)
	raise(&m.lagMax, ms)
	m.with(queue, func(t *tally) {
		t.n[PopMessages].Add(n)
		t.n[lagSum].Add(ms * n)
		t.n[lagCount].Add(n)
		raise(&t.lagMax, ms)
	})
}

func raise(to *atomic.Int64, n int64) {
	for have := to.Load(); n > have; have = to.Load() {
		if to.CompareAndSwap(have, n) {
			return
		}
	}
}

// Committed counts a combined commit and how long it took.
func (m *Metrics) Committed(took time.Duration) {
	m.total[commits].Add(1)
	m.commitSeconds.Observe(took.Seconds())
}

// collector gives out what is kept in plain numbers, and what is looked up when somebody reads.
type collector struct{ m *Metrics }

// family is one family of numbers that collector gives out.
func family(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("ferrymq_"+name, help, labels, nil)
}

// subsNote says which subscriptions there are numbers of.
const subsNote = ", at most 10 s old. Of the default project, the 1000 subscriptions with the largest backlog, of each the first 100,000 keys that have one."

const queuesNote = " Of queues of the default project, the 1000 with the highest value; the rest is summed up without a queue"

var (
	totals = []struct {
		desc  *prometheus.Desc
		count func(m *Metrics) int64
	}{
		{family("push_requests_total", "Push requests."), of(PushRequests)},
		{family("pop_requests_total", "Pop requests."), of(PopRequests)},
		{family("ack_requests_total", "Ack requests."), of(AckRequests)},
		{family("push_messages_total", "Messages stored."), of(PushMessages)},
		{family("pop_messages_total", "Messages delivered."), of(PopMessages)},
		{family("ack_messages_total", "Acknowledgments in ack requests and transactions, whatever became of them."), of(AckSuccess, AckFailed)},
		{family("pop_empty_total", "Pops answered 204."), of(PopEmpty)},
		{family("push_duplicates_total", "Pushed messages that repeated one inside the deduplication window."), of(PushDuplicates)},
		{family("ack_failed_total", "Acknowledgments that were not a completed one: failed, retry and dlq, and all that were refused."), of(AckFailed)},
		{family("dead_letters_total", "Dead letters filed."), of(DeadLetters)},
		{family("retention_messages_total", "Messages removed by retention, of all three kinds."), of(RetentionMessages, CompletedRetentionMessages, EvictionMessages)},
		{family("decryption_failures_total", "Pops that met messages which could not be decrypted or decoded."), of(DecryptionFailures)},
		{family("commits_total", "Combined commits."), of(commits)},
	}
	refused      = family("push_refused_total", "Pushed messages that were refused, by reason.", "reason")
	refusals     = map[string]Count{"overloaded": RefusedOverloaded, "database": RefusedDatabase, "maintenance": RefusedMaintenance, "full": RefusedFull}
	committed    = family("commit_items_total", "Operations that combined commits carried: pushes and acks of one partition, pops, extends of one lease.", "op")
	commitItems  = map[string]Count{"push": CommitPushes, "ack": CommitAcks, "pop": CommitPops, "extend": CommitExtends}
	answers      = family("http_requests_total", "Requests answered, by route and status. Route \"other\" is none of ours.", "route", "code")
	lagDesc      = family("delivery_lag_seconds", "From a message's createdAt to its delivery.")
	uptime       = family("uptime_seconds", "Since the broker was started.")
	memory       = family("process_resident_memory_bytes", "Resident memory.")
	goroutines   = family("goroutines", "What goes on at the same time in the broker: connections, waiting calls, its own work.")
	ready        = family("ready", "1 when the broker serves requests.")
	maintenance  = family("maintenance_enabled", "1 while that kind of request is switched off.", "kind")
	poolSize     = family("db_pool_size", "Database connections that the broker may open.")
	poolActive   = family("db_pool_active", "Database connections in use.")
	poolIdle     = family("db_pool_idle", "Database connections that are open and unused.")
	parkedPolls  = family(parkedName, parkedHelp, "queue")
	pending      = family("queue_pending_messages", "Messages that the slowest consumer group has not finished, at most 10 s old."+queuesNote+".", "queue")
	backlogDesc  = family("subscription_backlog_messages", "Messages that a subscription has not settled"+subsNote, "queue", "subscription")
	retryingDesc = family("subscription_retrying_lanes", "Keys of a subscription that wait for a retry"+subsNote, "queue", "subscription")
	attemptsDesc = family("subscription_attempts", "The most attempts that a message at the head of a key has had so far"+subsNote, "queue", "subscription")
	oldestDesc   = family("subscription_oldest_seconds", "The age of the oldest message that a subscription has not settled"+subsNote, "queue", "subscription")
	deadLetters  = family("dead_letters", "Dead letters that are stored, at most 10 s old."+queuesNote+".", "queue")
)

const (
	parkedName = "parked_polls"
	parkedHelp = "Pops that wait for messages." + queuesNote + ", as are discovery pops."
)

func of(cs ...Count) func(m *Metrics) int64 {
	return func(m *Metrics) (n int64) {
		for _, c := range cs {
			n += m.total[c].Load() + m.others[c].Load()
		}
		return n
	}
}

// Describe implements prometheus.Collector. It names nothing: what is given out depends on whether there is a database.
func (collector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c collector) Collect(out chan<- prometheus.Metric) {
	m := c.m
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v int64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	for _, t := range totals {
		counter(t.desc, t.count(m))
	}
	for reason, n := range refusals {
		counter(refused, m.total[n].Load(), reason)
	}
	for op, n := range commitItems {
		counter(committed, m.total[n].Load(), op)
	}
	for _, r := range m.routes {
		for i := range r.codes {
			if n := r.codes[i].Load(); n > 0 {
				counter(answers, n, r.pattern, strconv.Itoa(i+100))
			}
		}
	}
	cumulative, n := make(map[float64]uint64, len(buckets)), uint64(0)
	for i := range m.lag.counts {
		if n += m.lag.counts[i].Load(); i < len(buckets) {
			cumulative[buckets[i]] = n
		}
	}
	out <- prometheus.MustNewConstHistogram(lagDesc, n, float64(m.lag.micros.Load())/1e6, cumulative)
	gauge(uptime, math.Floor(time.Since(m.began).Seconds()))
	gauge(memory, float64(Resident()))
	gauge(goroutines, float64(runtime.NumGoroutine()))
	gauge(ready, truth(m.IsReady))
	gauge(maintenance, truth(m.PushMaintenance), "push")
	gauge(maintenance, truth(m.PopMaintenance), "pop")
	p := m.pool()
	gauge(poolSize, float64(p.size))
	gauge(poolActive, float64(p.active))
	gauge(poolIdle, float64(p.idle))
	if m.started.Load() && m.Parked != nil {
		perQueue(parkedPolls, m.Parked(), func(p Parked) (string, int64) { return p.Name, p.Pops }, gauge)
	}
	rows, subs := m.queueGauges()
	for _, s := range subs {
		gauge(backlogDesc, float64(s.Messages), s.Queue, s.Name)
		gauge(retryingDesc, float64(s.Retrying), s.Queue, s.Name)
		gauge(attemptsDesc, float64(s.Attempts), s.Queue, s.Name)
		gauge(oldestDesc, s.Oldest, s.Queue, s.Name)
	}
	perQueue(pending, rows, func(q queueGauge) (string, int64) { return q.name, q.pending }, gauge)
	perQueue(deadLetters, rows, func(q queueGauge) (string, int64) { return q.name, q.deadLetters }, gauge)
}

func truth(f func() bool) float64 {
	if f != nil && f() {
		return 1
	}
	return 0
}
