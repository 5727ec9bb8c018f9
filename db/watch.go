package db

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// suspicious is how long a call may take before its server is asked on another connection whether it still works on it.
	suspicious = 2 * time.Second
	// lookEvery is the time between two such questions. A second answer counts: the first may have crossed with the end of the call.
	lookEvery = time.Second
	enough    = 2
	// aftermath is how long it takes less, hasty and once, after a call has been given up: others are likely to wait as that one did.
	aftermath = 10 * time.Second
	hasty     = 500 * time.Millisecond
	// probeTimeout bounds a question, and how long a connection that was idle may take to answer before it is used.
	probeTimeout = 2 * time.Second
)

// watch ends calls whose answer will never come, because the connection leads nowhere and nobody was told: a host that vanished, a firewall
// that forgot. Their deadline alone would have to be as long as the longest statement, and as many such calls would be
// made one after the other as the pool has connections.
type watch struct {
	config *pgx.ConnConfig
	reset  func() // ends the idle connections of the pool

	mu    sync.Mutex
	calls map[*pgx.Conn]*watched
	armed bool
	gone  time.Time // when a call was last given up
}

type watched struct {
	since  time.Time // and nothing was heard from then on
	heard  int64
	doubts int // looks in a row in which the server did not work on it, or did not say
}

// begin looks after a call until end.
func (w *watch) begin(conn *pgx.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.calls == nil {
		w.calls = make(map[*pgx.Conn]*watched)
	}
	w.calls[conn] = &watched{since: time.Now(), heard: heard(conn)}
	if !w.armed {
		w.armed = true
		time.AfterFunc(lookEvery, w.look)
	}
}

func (w *watch) end(conn *pgx.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.calls, conn)
}

// look asks about the calls that take long.
func (w *watch) look() {
	suspects := make(map[uint32]*pgx.Conn)
	w.mu.Lock()
	patience, doubts := suspicious, enough
	if time.Since(w.gone) < aftermath {
		patience, doubts = hasty, 1
	}
	for conn, c := range w.calls {
		if n := heard(conn); n != c.heard { // an answer that is long and slow
			*c = watched{since: time.Now(), heard: n}
		}
		if time.Since(c.since) > patience {
			suspects[conn.PgConn().PID()] = conn
		}
	}
	if w.armed = len(w.calls) > 0; w.armed {
		defer time.AfterFunc(lookEvery, w.look)
	}
	calls := w.calls
	w.mu.Unlock()
	if len(suspects) == 0 {
		return
	}
	working, err := w.working()
	if Code(err) != "" {
		return // who refuses us is there
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	gone := false
	for pid, conn := range suspects {
		c := calls[conn]
		if c == nil || time.Since(c.since) < patience { // it has ended, or is another call by now
			continue
		}
		if err == nil && working[pid] {
			c.doubts = 0
			continue
		}
		if c.doubts++; c.doubts >= doubts {
			gone = true
			_ = conn.PgConn().Conn().Close()
		}
	}
	if gone {
		w.gone = time.Now()
		w.reset()
	}
}

// working asks the server which of our sessions are doing something.
func (w *watch) working() (map[uint32]bool, error) {
	config := w.config.Copy()
	config.ConnectTimeout = probeTimeout / 2 // of each host, and there is time for all of them
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout+time.Duration(len(config.Fallbacks))*config.ConnectTimeout)
	defer cancel()
	config.Tracer = nil
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	defer conn.Close(ctx)
	// 'disabled' is all that is said with track_activities = off.
	rows, err := conn.Query(ctx, "select pid from pg_catalog.pg_stat_activity where usename = current_user and state in ('active', 'fastpath function call', 'disabled')", pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		return nil, err
	}
	pids, err := pgx.CollectRows(rows, pgx.RowTo[uint32])
	if err != nil {
		return nil, err
	}
	all := make(map[uint32]bool, len(pids))
	for _, pid := range pids {
		all[pid] = true
	}
	return all, nil
}

// TraceBatchStart begins to look after a batch.
func (w *way) TraceBatchStart(ctx context.Context, conn *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	if !w.pooled.Load() {
		w.watch.begin(conn)
	}
	return ctx
}

// TraceBatchQuery is for each statement of a batch.
func (w *way) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd releases what TraceBatchStart took.
func (w *way) TraceBatchEnd(_ context.Context, conn *pgx.Conn, _ pgx.TraceBatchEndData) {
	w.watch.end(conn)
}
