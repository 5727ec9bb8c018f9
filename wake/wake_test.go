package wake

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"ferrymq/dbtest"
)

func TestMain(m *testing.M) { dbtest.Main(m) }

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// receiver notes what a bus hands out.
type receiver struct {
	mu     sync.Mutex
	hints  map[Hint]int
	queues map[int32]int
	lost   int
}

func newReceiver() *receiver {
	return &receiver{hints: make(map[Hint]int), queues: make(map[int32]int)}
}

func (r *receiver) options(conn *pgx.ConnConfig) Options {
	return Options{Conn: conn, Log: quiet,
		OnHint:  func(h Hint) { r.mu.Lock(); r.hints[h]++; r.mu.Unlock() },
		OnQueue: func(id int32) { r.mu.Lock(); r.queues[id]++; r.mu.Unlock() },
		OnLost:  func() { r.mu.Lock(); r.lost++; r.mu.Unlock() }}
}

func (r *receiver) see(do func() bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return do()
}

func open(t *testing.T, dsn string, r *receiver) *Bus {
	t.Helper()
	conn, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	conn.RuntimeParams["application_name"] = "bus"
	b := Open(r.options(conn))
	t.Cleanup(b.Close)
	eventually(t, "listening", b.Listening)
	return b
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

func TestBus(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	ra, rb := newReceiver(), newReceiver()
	a, b := open(t, dsn, ra), open(t, dsn, rb)
	want := []Hint{{1, 0, 10}, {2, 3, 1 << 60}, {1 << 30, 1 << 30, 0}}
	a.Announce(want)
	a.QueueChanged(7)
	eventually(t, "hints arrive", func() bool {
		return rb.see(func() bool {
			for _, h := range want {
				if rb.hints[h] == 0 {
					return false
				}
			}
			return rb.queues[7] > 0
		})
	})
	// One's own are not heard.
	b.Announce([]Hint{{9, 9, 9}})
	eventually(t, "the way back", func() bool { return ra.see(func() bool { return ra.hints[Hint{9, 9, 9}] > 0 }) })
	if ra.see(func() bool { return len(ra.hints) != 1 || len(ra.queues) != 0 }) {
		t.Errorf("a heard %v %v", ra.hints, ra.queues)
	}
	// Alone, nothing is sent; a queue's change is.
	a.Others(false)
	if a.Alone() {
		t.Error("one heartbeat without others is taken as proof")
	}
	a.Others(false)
	a.Announce([]Hint{{5, 5, 5}})
	a.QueueChanged(8)
	eventually(t, "the queue's change", func() bool { return rb.see(func() bool { return rb.queues[8] > 0 }) })
	if rb.see(func() bool { return rb.hints[Hint{5, 5, 5}] > 0 }) {
		t.Error("a hint was sent by a broker that is alone")
	}
	// Whoever says something is alive.
	b.Announce([]Hint{{6, 6, 6}})
	eventually(t, "b is heard", func() bool { return ra.see(func() bool { return ra.hints[Hint{6, 6, 6}] > 0 }) })
	a.Announce([]Hint{{5, 5, 6}})
	eventually(t, "a speaks again", func() bool { return rb.see(func() bool { return rb.hints[Hint{5, 5, 6}] > 0 }) })
}

// TestMany: thousands of hints at once arrive, in payloads that PostgreSQL takes; beyond the bound receivers look at everything.
func TestMany(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	ra, rb := newReceiver(), newReceiver()
	a := open(t, dsn, ra)
	open(t, dsn, rb)
	var all []Hint
	for n := range 5000 {
		all = append(all, Hint{1<<31 - 1, 1<<31 - 1 - int32(n), 1<<63 - 1})
	}
	for range 3 { // coalesced
		a.Announce(all)
	}
	eventually(t, "all arrive", func() bool { return rb.see(func() bool { return len(rb.hints) == len(all) }) })
	before := 0
	rb.see(func() bool { before = rb.lost; return true })
	for n := range 100 {
		var more []Hint
		for i := range 200 {
			more = append(more, Hint{2, int32(n), int64(i)})
		}
		a.Announce(more)
	}
	eventually(t, "all of them, or a look at everything", func() bool {
		return rb.see(func() bool { return rb.lost > before || len(rb.hints) == len(all)+20_000 })
	})
}

// TestReconnect: both connections come back after they were killed; hints of the meantime are replaced by a look at everything.
func TestReconnect(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	pool := dbtest.Pool(t, dsn, 1)
	ra, rb := newReceiver(), newReceiver()
	a := open(t, dsn, ra)
	b := open(t, dsn, rb)
	for round := range 3 {
		lostA, lostB := 0, 0
		ra.see(func() bool { lostA = ra.lost; return true })
		rb.see(func() bool { lostB = rb.lost; return true })
		if _, err := pool.Exec(t.Context(), "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'bus' and datname = current_database()"); err != nil {
			t.Fatal(err)
		}
		eventually(t, "a look at everything", func() bool {
			return ra.see(func() bool { return ra.lost > lostA }) && rb.see(func() bool { return rb.lost > lostB })
		})
		eventually(t, "listening again", func() bool { return a.Listening() && b.Listening() })
		h := Hint{1, 1, int64(round)}
		eventually(t, "hints flow again", func() bool { // those sent while the sender was down may be lost
			a.Announce([]Hint{h})
			return rb.see(func() bool { return rb.hints[h] > 0 })
		})
	}
}

// TestSenderLost: hints that were on a connection when it broke are made up for by a look at everything.
func TestSenderLost(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	pool := dbtest.Pool(t, dsn, 1)
	ra, rb := newReceiver(), newReceiver()
	a := open(t, dsn, ra)
	open(t, dsn, rb)
	a.Announce([]Hint{{1, 1, 1}})
	eventually(t, "the first arrives", func() bool { return rb.see(func() bool { return rb.hints[Hint{1, 1, 1}] > 0 }) })
	before := 0
	rb.see(func() bool { before = rb.lost; return true })
	// Only the senders: they have called pg_notify last.
	if _, err := pool.Exec(t.Context(), "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'bus' and datname = current_database() and query like '%pg_notify%'"); err != nil {
		t.Fatal(err)
	}
	a.Announce([]Hint{{2, 2, 2}})
	eventually(t, "the hint, or a look at everything", func() bool {
		return rb.see(func() bool { return rb.hints[Hint{2, 2, 2}] > 0 || rb.lost > before })
	})
}

// network is a way to the server that can stop to carry anything, without a word to either end.
type network struct {
	mu    sync.Mutex
	dead  chan struct{} // closed: what was dialled before carries nothing any more
	dials int
}

func (n *network) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	far, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	near, inside := net.Pipe()
	n.mu.Lock()
	dead := n.dead
	n.dials++
	n.mu.Unlock()
	carry := func(to, from net.Conn) {
		defer to.Close()
		defer from.Close()
		for b := make([]byte, 4096); ; {
			k, err := from.Read(b)
			if err != nil {
				return
			}
			select {
			case <-dead:
				continue // swallowed
			default:
			}
			if _, err := to.Write(b[:k]); err != nil {
				return
			}
		}
	}
	go carry(far, inside)
	go carry(inside, far)
	return near, nil
}

func (n *network) dialled() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.dials
}

// cut makes the connections so far carry nothing.
func (n *network) cut() {
	n.mu.Lock()
	defer n.mu.Unlock()
	close(n.dead)
	n.dead = make(chan struct{})
}

// TestSilentNetwork: connections that are open and carry nothing are noticed and made anew, the listening and the telling one.
func TestSilentNetwork(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	ra, rb := newReceiver(), newReceiver()
	networks := [2]network{{dead: make(chan struct{})}, {dead: make(chan struct{})}}
	var buses [2]*Bus
	for i, r := range []*receiver{ra, rb} {
		conn, err := pgx.ParseConfig(dsn)
		if err != nil {
			t.Fatal(err)
		}
		conn.DialFunc, conn.RuntimeParams["application_name"] = networks[i].dial, "bus"
		o := r.options(conn)
		o.Quiet = 300 * time.Millisecond
		buses[i] = Open(o)
		defer buses[i].Close()
	}
	a, b := buses[0], buses[1]
	eventually(t, "both listen", func() bool { return a.Listening() && b.Listening() })
	flows := func(round int64) {
		t.Helper()
		h := Hint{1, 1, round}
		eventually(t, "hints flow", func() bool {
			a.Announce([]Hint{h})
			return rb.see(func() bool { return rb.hints[h] > 0 })
		})
	}
	flows(1)
	pool := dbtest.Pool(t, dsn, 1)
	eventually(t, "nothing is said but whether somebody is there", func() bool {
		var n int
		if err := pool.QueryRow(t.Context(), "select count(*) from pg_stat_activity where application_name = 'bus' and datname = current_database() and state = 'idle' and query = '-- ping'").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n == 4
	})
	before, lost := networks[0].dialled()+networks[1].dialled(), 0
	rb.see(func() bool { lost = rb.lost; return true })
	networks[0].cut()
	networks[1].cut()
	eventually(t, "a look at everything", func() bool { return rb.see(func() bool { return rb.lost > lost }) })
	flows(2)
	if n := networks[0].dialled() + networks[1].dialled() - before; n > 12 {
		t.Errorf("%d connections were made", n)
	}
}

func receiving(r *receiver) *Bus {
	return &Bus{o: r.options(nil), self: "me"}
}

func TestReceive(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		payload string
		hints   string
		queues  string
		lost    int
	}{
		{"you 1.2.3 q4 *", "map[{1 2 3}:1]", "map[4:1]", 1},
		{"you", "map[]", "map[]", 0},
		{"", "map[]", "map[]", 0},
		{"me 1.2.3 q4 *", "map[]", "map[]", 0},
		{"you 1.2 1.2.3.4 a.b.c 1.2.x q qx q99999999999 99999999999.1.1 1.2.99999999999999999999 ** *x", "map[]", "map[]", 0},
		{"you -1.-2.-3 0.5.6", "map[{-1 -2 -3}:1 {0 5 6}:1]", "map[]", 0},
	} {
		r := newReceiver()
		receiving(r).receive(c.payload)
		if h, q := fmt.Sprint(r.hints), fmt.Sprint(r.queues); h != c.hints || q != c.queues || r.lost != c.lost {
			t.Errorf("%q: %s %s %d", c.payload, h, q, r.lost)
		}
	}
}

// TestTake: payloads stay under PostgreSQL's limit and carry everything; too much becomes "*".
func TestTake(t *testing.T) {
	t.Parallel()
	ra := newReceiver()
	a := &Bus{o: ra.options(nil), self: "12345678", pending: make(map[Hint]struct{}), queues: make(map[int32]struct{}), kick: make(chan struct{}, 1)}
	a.others.Store(true)
	drain := func() *receiver {
		r := newReceiver()
		b := receiving(r)
		for p := a.take(); p != ""; p = a.take() {
			if len(p) >= 8000 {
				t.Fatalf("a payload of %d bytes", len(p))
			}
			b.receive(p)
		}
		return r
	}
	var hints []Hint
	for n := range maxPending {
		hints = append(hints, Hint{-1 << 31, -1 << 31, -1<<63 + int64(n)})
	}
	for n := range int32(3000) {
		a.queues[-1<<31+n] = struct{}{}
	}
	a.Announce(hints)
	if r := drain(); len(r.hints) != maxPending || len(r.queues) != 3000 || r.lost != 0 {
		t.Errorf("%d hints, %d queues, %d lost", len(r.hints), len(r.queues), r.lost)
	}
	a.Announce(hints)
	a.Announce([]Hint{{1, 1, 1}})
	a.queues[5] = struct{}{}
	if r := drain(); r.lost != 1 || r.queues[5] != 1 {
		t.Errorf("beyond the bound: %d hints, %d lost, queues %v", len(r.hints), r.lost, r.queues)
	}
	if r := drain(); len(r.hints) != 0 || r.lost != 0 {
		t.Error("something is left")
	}
}

func FuzzReceive(f *testing.F) {
	for _, s := range []string{"you 1.2.3 q4 *", "me *", "", "x q-1 -1.-1.-1", "a\x00b 1.2.3"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, payload string) {
		r := newReceiver()
		receiving(r).receive(payload)
		if n := len(r.hints) + len(r.queues) + r.lost; n > len(strings.Fields(payload)) {
			t.Errorf("%d from %q", n, payload)
		}
	})
}
