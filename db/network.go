package db

import (
	"context"
	"crypto/tls"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
)

const (
	// deadPeer is how long the other end of a connection may leave what it was sent unacknowledged.
	deadPeer = 10 * time.Second
	// connectTimeout is how long connecting to an address may take, nextHost if there is another one to try.
	connectTimeout, nextHost = 3 * time.Second, 2 * time.Second
	// grace is how long a statement may still take when its caller has gone: one that is cut off costs the connection, and many callers go at
	// once.
	grace = time.Second
)

// overNetwork prepares connections for ends that vanish without a word.
func overNetwork(c *pgx.ConnConfig) {
	if c.ConnectTimeout == 0 {
		c.ConnectTimeout = connectTimeout
		for _, f := range c.Fallbacks {
			if f.Host != c.Host || f.Port != c.Port {
				c.ConnectTimeout = nextHost
			}
		}
	}
	c.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.DeadlineContextWatcherHandler{Conn: conn.Conn(), DeadlineDelay: grace}
	}
	dialer := &net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 3},
		// For what was sent and not acknowledged keepalive does nothing: TCP goes on for 15 minutes.
		Control: func(network, _ string, raw syscall.RawConn) error {
			if network == "unix" {
				return nil
			}
			return raw.Control(func(fd uintptr) { limitUnacknowledged(fd, deadPeer) })
		},
	}
	limit := c.ConnectTimeout
	c.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dialer.DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		w := &wire{Conn: conn}
		// pgx asks the server to cancel what a broken connection was about, for 15 s if nobody answers, and the pool waits for that with a place.
		w.mute = time.AfterFunc(limit, func() { _ = conn.Close() })
		return w, nil
	}
}

// wire counts how often something was heard. One on which nothing is heard at first is closed.
type wire struct {
	net.Conn
	heard atomic.Int64
	mute  *time.Timer
}

// Close also ends the wait for the first word.
func (w *wire) Close() error {
	w.mute.Stop()
	return w.Conn.Close()
}

func (w *wire) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	if n > 0 && w.heard.Add(1) == 1 {
		w.mute.Stop()
	}
	return n, err
}

// heard is how often something was heard on a connection.
func heard(conn *pgx.Conn) int64 {
	c := conn.PgConn().Conn()
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	if w, ok := c.(*wire); ok {
		return w.heard.Load()
	}
	return 0
}

// pace makes a pool whose database cannot be reached try more and more rarely, twice a second in the end: who wants a connection in between
// waits for that, and fails as it does. A server that starts again is not met by everybody at the same moment.
type pace struct {
	mu     sync.Mutex
	err    error // of the last attempt
	pause  time.Duration
	next   time.Time
	opened chan struct{} // closed when an attempt succeeds
}

const firstPause, longestPause = 20 * time.Millisecond, 500 * time.Millisecond

// wait returns when it is time for an attempt, or the error of the last one if others have made those that were due meanwhile.
func (p *pace) wait(ctx context.Context) error {
	for waited := 0; ; waited++ {
		p.mu.Lock()
		d, opened, err := time.Until(p.next), p.opened, p.err
		if err == nil {
			p.mu.Unlock()
			return nil
		}
		if d <= 0 {
			p.pause = min(2*p.pause, longestPause)
			p.next = time.Now().Add(p.pause/2 + rand.N(p.pause+1))
			p.mu.Unlock()
			return nil
		}
		p.mu.Unlock()
		if waited == 2 {
			return err
		}
		timer := time.NewTimer(d)
		select {
		case <-timer.C:
		case <-opened:
			timer.Stop()
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
	}
}

// ended is told how an attempt ended.
func (p *pace) ended(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case err == nil && p.err != nil:
		close(p.opened)
	case err != nil && p.err == nil:
		p.opened = make(chan struct{})
		p.pause, p.next = firstPause, time.Now().Add(firstPause)
	}
	p.err = err
}
