package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// ticks is USER_HZ: the unit of CPU times in /proc, 100 on every Linux.
const ticks = 100

// ownCommits is what one reading of PostgreSQL adds to the commit count after it was read:
// the start of the session and its two statements.
const ownCommits = 3

// counters are readings of everything outside the generator.
type counters struct {
	gen, broker, pg float64 // CPU seconds so far
	commits, wal    int64
	xids            int64 // transaction ids handed out: transactions that wrote
	backends        int64
	tables          map[string]hot
}

type hot struct{ updates, hot int64 }

// probe reads counters around a measured window.
type probe struct {
	c      *config
	before counters
	start  time.Time
	wall   time.Duration
	maxRSS int64
	stop   chan struct{}
	wg     sync.WaitGroup
}

func startProbe(c *config) (*probe, error) {
	p := &probe{c: c, stop: make(chan struct{})}
	if err := p.readPG(&p.before); err != nil {
		return nil, err
	}
	if err := p.readCPU(&p.before); err != nil {
		return nil, err
	}
	p.wg.Go(func() {
		t := time.NewTicker(200 * time.Millisecond)
		defer t.Stop()
		for {
			var sum int64
			for _, pid := range c.brokerPIDs {
				sum += rss(pid)
			}
			p.maxRSS = max(p.maxRSS, sum)
			select {
			case <-p.stop:
				return
			case <-t.C:
			}
		}
	})
	p.start = time.Now()
	return p, nil
}

// end closes the window and adds its numbers to m, per messages where that makes sense.
// CPU, WAL and transaction ids are read at once, the statistics views after -pg-settle.
func (p *probe) end(ctx context.Context, m *metrics, messages int64) error {
	p.wall = time.Since(p.start)
	close(p.stop)
	p.wg.Wait()
	var now counters
	if err := p.readCPU(&now); err != nil {
		return err
	}
	per := func(x float64, unit float64) float64 { return x / max(float64(messages), 1) * unit }
	gen, broker, pg := now.gen-p.before.gen, now.broker-p.before.broker, now.pg-p.before.pg
	m.add("cpu_gen_s_per_million", per(gen, 1e6))
	m.add("cpu_gen_pct_of_core", gen/p.wall.Seconds()*100)
	if len(p.c.brokerPIDs) > 0 {
		m.add("cpu_broker_s_per_million", per(broker, 1e6))
		m.add("cpu_broker_pct_of_core", broker/p.wall.Seconds()*100)
		m.add("broker_rss_max_mb", float64(p.maxRSS)/1e6)
	}
	if p.c.pgPID > 0 {
		m.add("cpu_pg_s_per_million", per(pg, 1e6))
		m.add("cpu_pg_pct_of_core", pg/p.wall.Seconds()*100)
	}
	if p.c.pgPID > 0 && len(p.c.brokerPIDs) > 0 {
		m.add("cpu_broker_and_pg_s_per_million", per(broker+pg, 1e6))
	}
	if p.c.dsn == "" {
		return nil
	}
	if err := p.readPG(&now); err != nil {
		return err
	}
	wal, xids, backends := now.wal-p.before.wal, now.xids-p.before.xids, now.backends
	select {
	case <-ctx.Done():
	case <-time.After(p.c.pgSettle):
	}
	if err := p.readPG(&now); err != nil {
		return err
	}
	commits := now.commits - p.before.commits - 2*ownCommits
	m.add("pg_commits", float64(commits))
	// Over the whole time between the readings: what goes on without load goes on while we wait.
	m.add("pg_commits_per_s", float64(commits)/time.Since(p.start).Seconds())
	m.add("pg_commits_per_message", per(float64(commits), 1))
	m.add("pg_write_xacts_per_message", per(float64(xids), 1))
	m.add("wal_bytes_per_message", per(float64(wal), 1))
	m.add("pg_connections", float64(backends))
	for _, name := range sortedKeys(now.tables) {
		n, h := now.tables[name].updates-p.before.tables[name].updates, now.tables[name].hot-p.before.tables[name].hot
		if n > 0 {
			m.add("hot_pct_"+name, float64(h)/float64(n)*100)
			m.add("updates_"+name, float64(n))
		}
	}
	return nil
}

func (p *probe) readCPU(c *counters) error {
	var ru syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &ru); err != nil {
		return err
	}
	c.gen = float64(ru.Utime.Nano()+ru.Stime.Nano()) / 1e9
	for _, pid := range p.c.brokerPIDs {
		s, err := readStat(pid)
		if err != nil {
			return fmt.Errorf("broker: %w", err)
		}
		c.broker += s.own
	}
	if p.c.pgPID == 0 {
		return nil
	}
	s, err := readStat(p.c.pgPID)
	if err != nil {
		return fmt.Errorf("postmaster: %w", err)
	}
	c.pg = s.own + s.reaped
	all, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range all {
		pid, _ := strconv.Atoi(filepath.Base(dir))
		if s, err := readStat(pid); err == nil && s.parent == p.c.pgPID {
			c.pg += s.own
		}
	}
	return nil
}

type stat struct {
	parent      int
	own, reaped float64 // seconds: of the process, of its children that ended
}

func readStat(pid int) (s stat, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return s, err
	}
	// The name in parentheses may hold anything: count from the last one.
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(f) < 15 {
		return s, fmt.Errorf("short /proc/%d/stat", pid)
	}
	n := func(i int) float64 { v, _ := strconv.ParseFloat(string(f[i]), 64); return v }
	return stat{parent: int(n(1)), own: (n(11) + n(12)) / ticks, reaped: (n(13) + n(14)) / ticks}, nil
}

func rss(pid int) int64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0
	}
	if f := bytes.Fields(b); len(f) > 1 {
		n, _ := strconv.ParseInt(string(f[1]), 10, 64)
		return n * int64(os.Getpagesize())
	}
	return 0
}

// readPG reads on a session of its own, simple protocol, so that what it adds is known (ownCommits).
func (p *probe) readPG(c *counters) error {
	if p.c.dsn == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	pg, err := connect(ctx, p.c.dsn)
	if err != nil {
		return err
	}
	defer func() { _ = pg.Close(ctx) }()
	err = pg.QueryRow(ctx, `select xact_commit, numbackends - 1,
			pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint,
			pg_snapshot_xmax(pg_current_snapshot())::text::bigint
		from pg_stat_database where datname = current_database()`).
		Scan(&c.commits, &c.backends, &c.wal, &c.xids)
	if err != nil {
		return err
	}
	rows, err := pg.Query(ctx, `select relname, n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where schemaname = 'ferrymq'`)
	if err != nil {
		return err
	}
	c.tables = map[string]hot{}
	var name string
	var h hot
	_, err = pgx.ForEachRow(rows, []any{&name, &h.updates, &h.hot}, func() error {
		c.tables[name] = h
		return nil
	})
	return err
}

func connect(ctx context.Context, dsn string) (*pgx.Conn, error) {
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	return pgx.ConnectConfig(ctx, cfg)
}

// holdSnapshot keeps a transaction open that has a snapshot and an id of its own, from after on for so long.
func (r *run) holdSnapshot(ctx context.Context, after, long time.Duration) error {
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(after):
	}
	pg, err := connect(ctx, r.c.dsn)
	if err != nil {
		return err
	}
	defer func() { _ = pg.Close(context.WithoutCancel(ctx)) }()
	if _, err := pg.Exec(ctx, "begin isolation level repeatable read; select txid_current()"); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case <-time.After(long):
	}
	_, err = pg.Exec(context.WithoutCancel(ctx), "rollback")
	return err
}

func sortedKeys[V any](m map[string]V) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
