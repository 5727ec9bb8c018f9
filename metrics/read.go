package metrics

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"

	"ferrymq/db"
)

// Text is everything in the Prometheus text format.
func (m *Metrics) Text() ([]byte, error) {
	families, err := m.registry.Gather()
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	parked := false
	for _, f := range families {
		parked = parked || strings.HasSuffix(f.GetName(), parkedName)
		if _, err := expfmt.MetricFamilyToText(&b, f); err != nil {
			return nil, err
		}
	}
	if !parked { // the library leaves out what has no value
		b.WriteString("# HELP ferrymq_" + parkedName + " " + parkedHelp + "\n# TYPE ferrymq_" + parkedName + " gauge\n")
	}
	return b.Bytes(), nil
}

// Snapshot is a short form of the metrics, as JSON clients read it. CPU times are in microseconds.
type Snapshot struct {
	Uptime   int64 `json:"uptime"`
	Requests Flow  `json:"requests"`
	Messages Flow  `json:"messages"`
	Database struct {
		PoolSize        int32 `json:"poolSize"`
		IdleConnections int32 `json:"idleConnections"`
		WaitingRequests int64 `json:"waitingRequests"`
	} `json:"database"`
	Memory struct {
		RSS          int64  `json:"rss"`
		HeapTotal    uint64 `json:"heapTotal"`
		HeapUsed     uint64 `json:"heapUsed"`
		External     int64  `json:"external"`
		ArrayBuffers int64  `json:"arrayBuffers"`
	} `json:"memory"`
	CPU struct {
		User   int64 `json:"user"`
		System int64 `json:"system"`
	} `json:"cpu"`
}

// Flow is a total and how much of it came per second lately.
type Flow struct {
	Total int64   `json:"total"`
	Rate  float64 `json:"rate"`
}

// Snapshot reads the short form.
func (m *Metrics) Snapshot() (s Snapshot) {
	s.Uptime = int64(time.Since(m.began).Seconds())
	now, before := m.sample(), m.oldSample()
	flow := func(n, was int64) Flow {
		return Flow{n, Round(float64(n-was) / max(now.at.Sub(before.at).Seconds(), 1))}
	}
	s.Requests, s.Messages = flow(now.requests, before.requests), flow(now.messages, before.messages)
	p := m.pool()
	s.Database.PoolSize, s.Database.IdleConnections, s.Database.WaitingRequests = p.size, p.idle, p.waiting
	var mem runtime.MemStats
	runtime.ReadMemStats(&mem)
	s.Memory.RSS, s.Memory.HeapTotal, s.Memory.HeapUsed = Resident(), mem.HeapSys, mem.HeapAlloc
	s.CPU.User, s.CPU.System = now.user.Microseconds(), now.system.Microseconds()
	return s
}

// Round keeps two decimals.
func Round(x float64) float64 { return math.Round(x*100) / 100 }

// maxQueues is how many values a family with queues has at most.
const maxQueues = 1000

// perQueue gives out a value per queue, the highest ones, and what the others have together.
func perQueue[T any](d *prometheus.Desc, rows []T, of func(T) (string, int64), gauge func(*prometheus.Desc, float64, ...string)) {
	rows = slices.Clone(rows)
	slices.SortFunc(rows, func(a, b T) int {
		an, av := of(a)
		bn, bv := of(b)
		return cmp.Or(cmp.Compare(bv, av), cmp.Compare(an, bn))
	})
	rest, left := int64(0), false
	for i, r := range rows {
		if name, v := of(r); i < maxQueues && name != "" {
			gauge(d, float64(v), name)
		} else {
			rest, left = rest+v, true
		}
	}
	if left {
		gauge(d, float64(rest), "")
	}
}

// The numbers of queues are looked up for scrapes, at most so often. A scrape waits for them only so long, and does
// without them when there have been none for a while.
const (
	backlogEvery = 10 * time.Second
	backlogWait  = 1500 * time.Millisecond
	backlogStale = time.Minute
)

type backlog struct {
	mu     sync.Mutex
	tried  time.Time
	got    time.Time
	rows   []queueGauge
	subs   []db.SubscriptionGaugesRow
	asking chan struct{} // closed when the look-up under way has ended
}

// queueGauge is what one queue holds.
type queueGauge struct {
	name                 string
	pending, deadLetters int64
}

// readGauges fails soon when there is no connection to be had: a scrape waits for it, and what was known before may be long over.
func (m *Metrics) readGauges(ctx context.Context) ([]queueGauge, []db.SubscriptionGaugesRow, error) {
	soon, cancel := context.WithTimeout(ctx, backlogWait*2/3)
	conn, err := m.Pools[0].Acquire(soon)
	cancel()
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", db.ErrAcquire, err)
	}
	defer conn.Release()
	q := db.New(conn)
	queues, err := q.ActivityQueues(ctx, db.ActivityQueuesParams{ProjectID: m.Project})
	if err != nil {
		return nil, nil, err
	}
	var all []queueGauge
	if len(queues) > 0 {
		names, ids := make(map[int32]string, len(queues)), make([]int32, len(queues))
		for i, q := range queues {
			ids[i], names[q.ID] = q.ID, q.Name
		}
		rows, err := q.QueueGauges(ctx, db.QueueGaugesParams{Ids: ids})
		if err != nil {
			return nil, nil, err
		}
		for _, r := range rows {
			all = append(all, queueGauge{names[r.ID], r.Pending, r.DeadLetters})
		}
	}
	subs, err := q.SubscriptionGauges(ctx, db.SubscriptionGaugesParams{ProjectID: m.Project, Max: maxQueues})
	return all, subs, err
}

// queueGauges are what the queues hold, and what the subscriptions have before them.
func (m *Metrics) queueGauges() ([]queueGauge, []db.SubscriptionGaugesRow) {
	if !m.started.Load() {
		return nil, nil
	}
	b := &m.backlog
	b.mu.Lock()
	if b.asking == nil && time.Since(b.tried) >= backlogEvery {
		b.asking, b.tried = make(chan struct{}), time.Now()
		go m.askGauges()
	}
	asking := b.asking
	b.mu.Unlock()
	if asking != nil {
		timer := time.NewTimer(backlogWait)
		defer timer.Stop()
		select {
		case <-asking:
		case <-timer.C:
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if time.Since(b.got) > backlogStale {
		return nil, nil
	}
	return b.rows, b.subs
}

func (m *Metrics) askGauges() {
	began, p := time.Now(), m.Pools[0]
	rows, subs, err := m.readGauges(context.Background())
	busy := errors.Is(err, db.ErrAcquire) && p.Stat().AcquiredConns() == p.Stat().MaxConns()
	b := &m.backlog
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case err == nil:
		b.rows, b.subs, b.got = rows, subs, began
	case db.IsConnection(err) && !busy: // no database: what was known may be long over
		b.rows, b.subs = nil, nil
	default:
		m.Log.Warn("counting what queues hold failed", "error", db.Text(err))
	}
	close(b.asking)
	b.asking = nil
}
