package groupcommit_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
	"ferrymq/maintain"
	"ferrymq/segment"
	"ferrymq/wake"
)

func TestMain(m *testing.M) { dbtest.Main(m) }

// soon bounds what takes milliseconds, on a machine that is busy. It is far below slow, so that a lost wakeup shows.
const soon = 8 * time.Second

// slow re-checks hide no lost wakeup: nothing looks at the database by itself within a test.
var slow = groupcommit.Recheck{Initial: 60 * time.Second, Threshold: 3, Multiplier: 2, Max: 60 * time.Second}

var brisk = groupcommit.Recheck{Initial: 100 * time.Millisecond, Threshold: 3, Multiplier: 2, Max: time.Second}

// setup says how a test's brokers differ from the usual.
type setup struct {
	recheck groupcommit.Recheck
	alone   bool   // no bus, no maintainer
	through string // the way to the database, if it is not the usual one
	pool    int
	sweep   time.Duration // retention's interval; 0: none
	change  func(*groupcommit.Options)
}

// broker is an engine with what the program starts around it.
type broker struct {
	*groupcommit.Engine
	t          testing.TB
	dsn        string
	bus        *wake.Bus
	maintainer *maintain.Maintainer
	closed     sync.Once
}

// start runs a broker on a database until the test ends.
func start(t testing.TB, dsn string, s setup) *broker {
	t.Helper()
	if s.pool == 0 {
		s.pool = 8
	}
	if s.recheck == (groupcommit.Recheck{}) {
		s.recheck = brisk
	}
	if s.through == "" {
		s.through = dbtest.Through(t, dsn)
	}
	pool, err := db.NewPool(t.Context(), s.through, int32(s.pool), 30*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	q := db.New(pool)
	installation := reached(t, func() (db.InstallationGetRow, error) { return q.InstallationGet(t.Context()) })
	project := reached(t, func() (int32, error) { return q.ProjectGet(t.Context(), db.ProjectGetParams{Name: "default"}) })
	log := slog.New(slog.NewTextHandler(&testLog{t: t}, &slog.HandlerOptions{Level: slog.LevelWarn}))
	b := &broker{t: t, dsn: dsn}
	o := groupcommit.Options{Pool: pool, Log: log, Hasher: segment.NewHasher(uint64(installation.HashSeed)), Project: project, DBNow: installation.Now,
		Width: 2, DedupBytes: 16 << 20, PushQueueMax: 65536, MaxParked: 20000, StatementTimeout: 30 * time.Second, Recheck: s.recheck}
	if s.change != nil {
		s.change(&o)
	}
	if !s.alone {
		opened := make(chan struct{})
		o.Announce = func(h []groupcommit.Hint) { <-opened; b.bus.Announce(h) }
		b.Engine = groupcommit.New(o)
		conn, err := pgx.ParseConfig(dsn)
		if err != nil {
			t.Fatal(err)
		}
		b.bus = wake.Open(wake.Options{Conn: conn, Log: log, OnHint: b.Hint, OnQueue: b.QueueChanged, OnMove: b.LookOutbox, OnLost: b.LookAll})
		close(opened)
		b.maintainer = &maintain.Maintainer{Pool: pool, Log: log, Engine: b.Engine, Bus: b.bus, Name: "test",
			RetentionInterval: s.sweep, RetentionBatch: 100, CleanupDays: 1}
		b.maintainer.Start()
	} else {
		b.Engine = groupcommit.New(o)
	}
	t.Cleanup(b.stop)
	return b
}

// reached asks until there is a connection, as the program does when it starts: a pooler may hand out one that a test has killed.
func reached[T any](t testing.TB, ask func() (T, error)) (got T) {
	t.Helper()
	eventually(t, "a connection", func() (ok bool) {
		var err error
		if got, err = ask(); err != nil && !db.IsConnection(err) {
			t.Fatal(err)
		}
		return err == nil
	})
	return got
}

func (b *broker) stop() {
	b.closed.Do(func() {
		b.Close()
		if b.bus != nil {
			b.maintainer.Close()
			b.bus.Close()
		}
	})
}

// together starts brokers that know of each other: hints flow both ways.
func together(t testing.TB, n int, s setup) []*broker {
	t.Helper()
	dsn := dbtest.New(t)
	var all []*broker
	for range n {
		all = append(all, start(t, dsn, s))
	}
	if n > 1 {
		for _, b := range all {
			eventually(t, "the bus listens", b.bus.Listening)
			// A heartbeat from before the other one's first would stop the sending until the next.
			eventually(t, "brokers see each other", func() bool {
				var alive int
				if err := b.Pool.QueryRow(t.Context(), "select count(*) from ferrymq.brokers").Scan(&alive); err != nil {
					t.Fatal(err)
				}
				return alive == n
			})
		}
	}
	return all
}

// testLog sends what a broker logs to the test's log.
type testLog struct {
	t  testing.TB
	mu sync.Mutex
}

var _ io.Writer = (*testLog)(nil)

func (l *testLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.t.Logf("broker: %s", bytes.TrimSpace(p))
	return len(p), nil
}

// eventually waits for a condition that nothing announces.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	end := time.Now().Add(30 * time.Second)
	for !ok() {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// item is a message to push.
type item struct{ id, payload string }

func items(n int, prefix string) []item {
	out := make([]item, n)
	for i := range out {
		out[i] = item{payload: fmt.Sprintf(`"%s-%d"`, prefix, i)}
	}
	return out
}

// newPush prepares a push of one partition.
func (b *broker) newPush(ctx context.Context, queue, partition string, ms []item) (*groupcommit.Push, error) {
	q, err := b.Catalog.EnsureQueue(ctx, queue)
	if err != nil {
		return nil, err
	}
	found, err := b.Catalog.Partitions(ctx, q, []string{partition})
	if err != nil {
		return nil, err
	}
	p := &groupcommit.Push{Queue: q, Partition: found[0]}
	for _, m := range ms {
		p.Messages = append(p.Messages, segment.Message{TransactionID: m.id, Payload: []byte(m.payload)})
	}
	return p, nil
}

func (b *broker) tryPush(ctx context.Context, queue, partition string, ms ...item) ([]groupcommit.Pushed, error) {
	p, err := b.newPush(ctx, queue, partition, ms)
	if err != nil {
		return nil, err
	}
	if err := b.Push(ctx, []*groupcommit.Push{p}); err != nil {
		return nil, err
	}
	return p.Results, p.Err
}

func (b *broker) push(queue, partition string, ms ...item) []groupcommit.Pushed {
	b.t.Helper()
	r, err := b.tryPush(b.t.Context(), queue, partition, ms...)
	if err != nil {
		b.t.Fatalf("push to %s/%s: %v", queue, partition, err)
	}
	return r
}

// message is a delivered message.
type message struct {
	public    uuid.UUID
	partition string
	queue     string
	offset    int64
	id        uuid.UUID
	tx        string
	payload   string
}

// delivered is what a pop returned.
type delivered struct {
	*groupcommit.Delivery
	messages []message
}

func (d *delivered) payloads() string {
	if d == nil {
		return ""
	}
	var out []string
	for _, m := range d.messages {
		out = append(out, strings.Trim(m.payload, `"`))
	}
	return strings.Join(out, " ")
}

func (d *delivered) of(partition string) []message {
	var out []message
	for _, m := range d.messages {
		if m.partition == partition {
			out = append(out, m)
		}
	}
	return out
}

// wide is a pop of any partition of a queue.
func wide(queue, group string, batch, parts int64, wait time.Duration) *groupcommit.Pop {
	return &groupcommit.Pop{Queue: queue, Group: group, Named: group != catalog.QueueMode, Start: catalog.All(), Batch: batch, Partitions: parts, Wait: wait}
}

func route(queue, partition, group string, batch int64, wait time.Duration) *groupcommit.Pop {
	p := wide(queue, group, batch, 1, wait)
	p.Partition = &partition
	return p
}

func discovery(namespace, group string, batch int64, wait time.Duration) *groupcommit.Pop {
	p := wide("", group, batch, 1, wait)
	p.Scope.Namespace = namespace
	return p
}

func auto(p *groupcommit.Pop) *groupcommit.Pop { p.AutoAck = true; return p }

func (b *broker) tryPop(ctx context.Context, p *groupcommit.Pop) (*delivered, error) {
	one := *p
	d, err := b.Pop(ctx, &one)
	if d == nil || err != nil {
		return nil, err
	}
	out := &delivered{Delivery: d}
	for _, s := range d.Spans {
		for _, g := range s.Segments {
			open, err := segment.Decode(nil, g.Codec, g.KeyNo, g.FirstID, int(g.Count), g.Frames)
			if err != nil {
				return nil, err
			}
			for i := max(s.Start-g.Base, 0); i < min(s.Start+s.Take-g.Base, int64(g.Count)); i++ {
				m := open.At(int(i))
				out.messages = append(out.messages, message{public: s.Row.PublicID, partition: s.Partition.Name, queue: s.Queue.Name, offset: g.Base + i,
					id: open.ID(int(i)), tx: string(open.AppendTransactionID(nil, int(i))), payload: string(m.Payload)})
			}
		}
	}
	return out, nil
}

func (b *broker) pop(p *groupcommit.Pop) *delivered {
	b.t.Helper()
	d, err := b.tryPop(b.t.Context(), p)
	if err != nil {
		b.t.Fatalf("pop: %v", err)
	}
	return d
}

// need pops what must be there.
func (b *broker) need(p *groupcommit.Pop, payloads string) *delivered {
	b.t.Helper()
	d := b.pop(p)
	if got := d.payloads(); got != payloads {
		b.t.Fatalf("popped %q, want %q", got, payloads)
	}
	return d
}

// parkedPop is a pop that waits in the background.
type parkedPop struct {
	done   chan struct{}
	d      *delivered
	err    error
	at     time.Time
	cancel context.CancelFunc
}

func (b *broker) goPop(p *groupcommit.Pop) *parkedPop {
	ctx, cancel := context.WithCancel(context.Background())
	w := &parkedPop{done: make(chan struct{}), cancel: cancel}
	b.t.Cleanup(func() { cancel(); <-w.done })
	go func() {
		defer close(w.done)
		w.d, w.err = b.tryPop(ctx, p)
		w.at = time.Now()
	}()
	return w
}

// park starts a pop and returns when it waits.
func (b *broker) park(p *groupcommit.Pop) *parkedPop {
	b.t.Helper()
	before := b.Parked()
	w := b.goPop(p)
	eventually(b.t, "the pop is parked", func() bool {
		select {
		case <-w.done:
			b.t.Fatalf("the pop did not park: %q, %v", w.d.payloads(), w.err)
		default:
		}
		return b.Parked() > before
	})
	return w
}

// wait returns what the pop got, which has to come soon.
func (w *parkedPop) wait(t testing.TB) *delivered {
	t.Helper()
	select {
	case <-w.done:
	case <-time.After(soon):
		t.Fatal("lost wakeup: the parked pop got nothing")
	}
	if w.err != nil {
		t.Fatalf("pop: %v", w.err)
	}
	return w.d
}

func text(s string) *string { return &s }

// ack says something about messages of one partition.
func (b *broker) tryAck(ctx context.Context, group string, lease uuid.UUID, public uuid.UUID, acks ...groupcommit.Ack) []groupcommit.Acked {
	found, err := b.Catalog.Public(ctx, []uuid.UUID{public})
	if err != nil {
		out := make([]groupcommit.Acked, len(acks))
		for i := range out {
			out[i].Err = err
		}
		return out
	}
	a := &groupcommit.Acks{Partition: found[public], Group: group, Leased: lease != uuid.Nil, Lease: lease, Items: acks}
	b.Ack(ctx, []*groupcommit.Acks{a})
	return a.Results
}

func says(status groupcommit.Status, ms ...message) []groupcommit.Ack {
	var out []groupcommit.Ack
	for _, m := range ms {
		out = append(out, groupcommit.Ack{TransactionID: text(m.tx), Status: status})
	}
	return out
}

// ack acknowledges messages of one partition, all with one status, and fails the test when one is refused.
func (b *broker) ack(group string, d *delivered, status groupcommit.Status, ms ...message) []groupcommit.Acked {
	b.t.Helper()
	r := b.tryAck(b.t.Context(), group, d.Lease, ms[0].public, says(status, ms...)...)
	for i := range r {
		if r[i].Err != nil {
			b.t.Fatalf("ack %d: %v", i, r[i].Err)
		}
	}
	return r
}

// finish completes everything that was delivered.
func (b *broker) finish(group string, d *delivered) {
	b.t.Helper()
	by := make(map[uuid.UUID][]message)
	for _, m := range d.messages {
		by[m.public] = append(by[m.public], m)
	}
	for _, ms := range by {
		b.ack(group, d, groupcommit.Completed, ms...)
	}
}

func exec(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) int64 {
	t.Helper()
	tag, err := pool.Exec(t.Context(), sql, args...)
	if err != nil {
		t.Fatal(err)
	}
	return tag.RowsAffected()
}

func number(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) int64 {
	t.Helper()
	var n int64
	if err := pool.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// is fails the test unless err is (or wraps) want.
func is(t testing.TB, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}
