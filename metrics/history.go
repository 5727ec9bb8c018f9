package metrics

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"ferrymq/db"
)

const (
	writeEvery  = 10 * time.Second
	processMost = time.Minute     // a broker that does nothing writes so often
	writeTime   = 5 * time.Second // for a connection, and then for the statement
	closeTime   = time.Second
	writeRows   = 1000 // queues in one statement
	expireEvery = 10 * time.Minute
	expireRows  = 1000
	expireSteps = 100
	rateSpan    = 6 // writes that a rate looks back
)

// history is what becomes rows of ferrymq.activity: that of one project, whatever else the broker does.
type history struct {
	Project int32 // the default project; set before anything is counted

	started atomic.Bool // only then q and Parked are read
	q       *db.Queries
	stop    context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup

	writing sync.Mutex // one Flush at a time
	written [stored]int64
	last    sample           // what process figures were written up to
	noted   map[int32]int64  // parked pops, as written for the current minute
	minute  time.Time        // that minute, by this broker's clock
	samples [rateSpan]sample // guarded by sampling
	next    int

	sampling sync.Mutex
}

// sample is where the counters that have rates stand at a moment.
type sample struct {
	at                 time.Time
	user, system       time.Duration
	requests, messages int64
}

func (m *Metrics) sample() (s sample) {
	s.at = time.Now()
	s.user, s.system = cpu()
	for _, r := range m.routes {
		for i := range r.codes {
			s.requests += r.codes[i].Load()
		}
	}
	s.messages = m.total[PushMessages].Load()
	return s
}

// oldSample is the oldest sample there is of the last minute.
func (m *Metrics) oldSample() sample {
	m.sampling.Lock()
	defer m.sampling.Unlock()
	if s := m.samples[m.next]; !s.at.IsZero() {
		return s
	}
	if s := m.samples[0]; !s.at.IsZero() {
		return s
	}
	return sample{at: m.began}
}

func (m *Metrics) keepSample(s sample) {
	m.sampling.Lock()
	defer m.sampling.Unlock()
	m.samples[m.next] = s
	m.next = (m.next + 1) % rateSpan
}

// Start begins to write what is counted to the database, until Close.
func (m *Metrics) Start() {
	m.history.q = db.New(db.Patient{Pool: m.Pools[0]})
	m.stop, m.cancel = context.WithCancel(context.Background())
	m.started.Store(true)
	m.running.Add(1)
	go m.run()
}

// Close writes what is left.
func (m *Metrics) Close() {
	m.cancel()
	m.running.Wait()
	if err := m.flush(context.Background(), closeTime); err != nil {
		m.Log.Warn("the last counts were not written", "error", db.Text(err))
	}
}

func (m *Metrics) run() {
	defer m.running.Done()
	ticker := time.NewTicker(writeEvery)
	defer ticker.Stop()
	expired, failing := time.Time{}, false
	for {
		select {
		case <-m.stop.Done():
			return
		case <-ticker.C:
		}
		m.keepSample(m.sample())
		err := m.flush(m.stop, writeTime)
		if err == nil && time.Since(expired) > expireEvery {
			expired = time.Now()
			err = m.expire()
		}
		if err != nil && !failing && m.stop.Err() == nil {
			m.Log.Warn("writing counts failed, trying again", "error", db.Text(err))
		}
		failing = err != nil
	}
}

// expire removes rows that are older than anybody may ask for.
func (m *Metrics) expire() error {
	for range expireSteps {
		n, err := m.q.ActivityExpire(m.stop, db.ActivityExpireParams{Max: expireRows})
		if err != nil || n < expireRows {
			break
		}
	}
	for range expireSteps {
		n, err := m.q.FlowExpire(m.stop, db.FlowExpireParams{Max: expireRows})
		if err != nil || n < expireRows {
			break
		}
	}
	_, err := m.q.BrokerActivityExpire(m.stop, db.BrokerActivityExpireParams{Max: expireRows})
	return err
}

// Flush writes what was counted since the last time, so that whoever reads the tables sees it.
func (m *Metrics) Flush() error { return m.flush(context.Background(), writeTime) }

// flush waits for a connection so long, or until ctx ends. What is sent then has a time limit of its own: it must not be left
// open what has been written.
func (m *Metrics) flush(ctx context.Context, patience time.Duration) error {
	m.writing.Lock()
	defer m.writing.Unlock()
	if !m.started.Load() {
		return nil
	}
	now, p, rows := m.sample(), m.pool(), m.take()
	if len(rows) == 0 && now.at.Sub(m.last.at) < processMost && m.flow.idle() {
		return nil
	}
	soon, stop := context.WithTimeout(ctx, patience)
	conn, err := m.Pools[0].Acquire(soon)
	stop()
	if err != nil {
		m.giveBack(rows)
		return fmt.Errorf("%w: %w", db.ErrAcquire, err)
	}
	defer conn.Release()
	ctx, cancel := context.WithTimeout(context.Background(), writeTime)
	defer cancel()
	q := db.New(conn)
	for done := 0; done < len(rows) || now.at.Sub(m.last.at) >= processMost; {
		part := rows[done:min(done+writeRows, len(rows))]
		arg := columns(part)
		arg.Broker, arg.RssBytes, arg.PoolActive, arg.PoolIdle, arg.PoolSize = m.Name, Resident(), p.active, p.idle, p.size
		arg.WallMs, arg.UptimeSeconds = now.at.Sub(m.last.at).Milliseconds(), int64(now.at.Sub(m.began).Seconds())
		arg.CpuUserMs, arg.CpuSysMs = (now.user - m.last.user).Milliseconds(), (now.system - m.last.system).Milliseconds()
		if err := q.ActivityAdd(ctx, arg); err != nil {
			if db.IsConnection(err) && !db.NotSent(err) { // rather a count that is missing than one that never was
				done += len(part)
			}
			m.giveBack(rows[done:])
			return err
		}
		done += len(part)
		m.last = now
	}
	return m.flow.flush(ctx, q)
}

// row is what happened to one queue; queue 0 is everything.
type row struct {
	queue          int32
	n              [stored]int64
	lagMax, parked int64
}

// take collects what has not been written yet. Only queues with something to write have a row.
func (m *Metrics) take() (rows []row) {
	m.mu.Lock()
	taken := m.queues
	m.queues = make(map[int32]*tally)
	m.mu.Unlock()
	for id, t := range taken {
		r := row{queue: id, lagMax: t.lagMax.Load()}
		for c := range r.n {
			r.n[c] = t.n[c].Load()
		}
		rows = append(rows, r)
	}
	all, changed := row{lagMax: m.lagMax.Swap(0)}, false
	for c := range all.n {
		n := m.total[c].Load()
		all.n[c], m.written[c] = n-m.written[c], n
		changed = changed || all.n[c] != 0
	}
	var parked []Parked
	if m.Parked != nil {
		parked = m.Parked()
	}
	if minute := time.Now().Truncate(time.Minute); minute != m.minute {
		m.minute, m.noted = minute, make(map[int32]int64)
	}
	at := make(map[int32]int, len(rows))
	for i := range rows {
		at[rows[i].queue] = i
	}
	for _, p := range parked {
		all.parked += p.Pops
		if i, ok := at[p.Queue]; ok {
			rows[i].parked = p.Pops
		} else if p.Queue != 0 && p.Pops > m.noted[p.Queue] { // pops that stay parked cost a row a minute
			rows = append(rows, row{queue: p.Queue, parked: p.Pops})
		}
		m.noted[p.Queue] = max(m.noted[p.Queue], p.Pops)
	}
	if changed || all.parked > m.noted[0] {
		rows = append(rows, all)
	}
	m.noted[0] = max(m.noted[0], all.parked)
	return rows
}

// giveBack undoes take.
func (m *Metrics) giveBack(rows []row) {
	m.minute = time.Time{}
	for _, r := range rows {
		if r.queue == 0 {
			for c := range r.n {
				m.written[c] -= r.n[c]
			}
			raise(&m.lagMax, r.lagMax)
			continue
		}
		m.with(r.queue, func(t *tally) {
			for c := range r.n {
				t.n[c].Add(r.n[c])
			}
			raise(&t.lagMax, r.lagMax)
		})
	}
}

func columns(rows []row) (p db.ActivityAddParams) {
	n := [stored]*[]int64{&p.PushRequests, &p.PushMessages, &p.PopRequests, &p.PopMessages, &p.PopEmpty, &p.AckRequests, &p.AckSuccess, &p.AckFailed,
		&p.Transactions, &p.PartitionsCreated, &p.PartitionsDeleted, &p.RetentionMessages, &p.CompletedRetentionMessages, &p.EvictionMessages,
		&p.RetentionEvents, &p.DeadLetters, &p.DbErrors, &p.LagSumMs, &p.LagCount}
	for _, r := range rows {
		p.QueueIds = append(p.QueueIds, r.queue)
		for c := range r.n {
			*n[c] = append(*n[c], r.n[c])
		}
		p.LagMaxMs, p.Parked = append(p.LagMaxMs, r.lagMax), append(p.Parked, r.parked)
	}
	return p
}

// connections is how the broker's database connections stand.
type connections struct {
	size, active, idle int32
	waiting            int64
}

func (m *Metrics) pool() (c connections) {
	for _, p := range m.Pools {
		s := p.Stat()
		c.size, c.active, c.idle, c.waiting = c.size+s.MaxConns(), c.active+s.AcquiredConns(), c.idle+s.IdleConns(), c.waiting+db.Waiting(p)
	}
	return c
}
