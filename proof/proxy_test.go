package proof

import (
	"net"
	"sync"
	"testing"
	"time"
)

// proxy is a network between two ends that can be spoiled: between brokers and their database, or between clients and a broker.
type proxy struct {
	listener net.Listener
	work     sync.WaitGroup

	mu       sync.Mutex
	target   func() (net.Conn, error)
	refusing bool
	holding  bool          // nothing passes until it is let go
	silent   bool          // connections that come now never get an answer
	delay    time.Duration // of each piece of data, in each direction
	rate     int           // bytes a second of each connection and direction, 0 is no limit
	lose     func() bool   // asked for each piece of an answer: true cuts the connection instead
	changed  chan struct{} // closed and replaced when any of that changes
	lines    map[*line]bool
	accepted int
	closed   bool
}

// line is one connection through the proxy.
type line struct {
	p              *proxy
	client, server net.Conn
	dead           [2]bool // nothing passes any more, and nobody is told: requests, answers
	gone           chan struct{}
	once           sync.Once
}

// newProxy listens on a free port of the loopback interface and connects to what target gives. It is closed with the test.
func newProxy(t testing.TB, target func() (net.Conn, error)) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: l, target: target, changed: make(chan struct{}), lines: make(map[*line]bool)}
	p.work.Add(1)
	go p.accept()
	t.Cleanup(func() {
		_ = l.Close()
		p.set(func() { p.closed = true })
		p.cut()
		p.work.Wait()
	})
	return p
}

// dialer connects to one address.
func dialer(network, address string) func() (net.Conn, error) {
	return func() (net.Conn, error) { return net.DialTimeout(network, address, 5*time.Second) }
}

func (p *proxy) port() int       { return p.listener.Addr().(*net.TCPAddr).Port }
func (p *proxy) address() string { return p.listener.Addr().String() }

func (p *proxy) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
	close(p.changed)
	p.changed = make(chan struct{})
}

// point makes new connections go somewhere else.
func (p *proxy) point(target func() (net.Conn, error)) { p.set(func() { p.target = target }) }

// pass ends all that is wrong with the network. Connections that were silenced stay so.
func (p *proxy) pass() {
	p.set(func() { p.refusing, p.holding, p.silent, p.delay, p.rate, p.lose = false, false, false, 0, 0, nil })
}

// refuse turns new connections away; those that exist are cut.
func (p *proxy) refuse() {
	p.set(func() { p.refusing = true })
	p.cut()
}

// hold stops all data, until pass: a network that is down for a while.
func (p *proxy) hold() { p.set(func() { p.holding = true }) }

// silence makes every connection half-open for good, also those that come until pass: what is sent arrives nowhere, and
// nobody is told.
func (p *proxy) silence() {
	p.set(func() {
		p.silent = true
		for l := range p.lines {
			l.dead = [2]bool{true, true}
		}
	})
}

// silenceLines makes the connections that exist half-open for good, in the directions that are said. New ones work.
func (p *proxy) silenceLines(requests, answers bool) {
	p.set(func() {
		for l := range p.lines {
			l.dead = [2]bool{requests || l.dead[0], answers || l.dead[1]}
		}
	})
}

// slow delays each piece of data, and limits the bytes a second of a connection if rate is positive.
func (p *proxy) slow(delay time.Duration, rate int) { p.set(func() { p.delay, p.rate = delay, rate }) }

// loseAnswers cuts the connection in place of a piece of an answer for which lose says so. The request has arrived.
func (p *proxy) loseAnswers(lose func() bool) { p.set(func() { p.lose = lose }) }

// cut resets all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	lines := make([]*line, 0, len(p.lines))
	for l := range p.lines {
		lines = append(lines, l)
	}
	p.mu.Unlock()
	for _, l := range lines {
		l.reset()
	}
}

// count is how many connections are open, and how many have been accepted so far.
func (p *proxy) count() (open, accepted int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.lines), p.accepted
}

func (p *proxy) accept() {
	defer p.work.Done()
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return
		}
		l := &line{p: p, client: c, gone: make(chan struct{})}
		p.mu.Lock()
		p.accepted++
		refusing, target := p.refusing || p.closed, p.target
		l.dead = [2]bool{p.silent, p.silent}
		if !refusing {
			p.lines[l] = true
		}
		p.mu.Unlock()
		if refusing {
			reset(c)
			continue
		}
		p.work.Add(1)
		go l.run(target)
	}
}

// reset closes a connection so that the other end notices at once.
func reset(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	_ = c.Close()
}

func (l *line) reset() {
	l.once.Do(func() {
		close(l.gone)
		l.p.mu.Lock()
		server := l.server
		delete(l.p.lines, l)
		l.p.mu.Unlock()
		reset(l.client)
		if server != nil {
			reset(server)
		}
	})
}

func (l *line) run(target func() (net.Conn, error)) {
	defer l.p.work.Done()
	defer l.reset()
	server, err := target()
	if err != nil {
		return
	}
	l.p.mu.Lock()
	l.server = server
	l.p.mu.Unlock()
	select {
	case <-l.gone:
		reset(server)
		return
	default:
	}
	l.p.work.Add(1)
	go func() {
		defer l.p.work.Done()
		defer l.reset()
		l.pump(server, l.client, false)
	}()
	l.pump(l.client, server, true)
}

// pump carries data one way until either end closes.
func (l *line) pump(to, from net.Conn, answers bool) {
	buf := make([]byte, 128<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			delay, ok := l.gate(n, answers)
			if !ok {
				return
			}
			if delay > 0 {
				timer := time.NewTimer(delay)
				select {
				case <-timer.C:
				case <-l.gone:
					timer.Stop()
					return
				}
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			if l.isDead(answers) { // nobody is told
				<-l.gone
			}
			return
		}
	}
}

func (l *line) isDead(answers bool) bool {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	return l.dead[way(answers)]
}

// way is the index of a direction.
func way(answers bool) int {
	if answers {
		return 1
	}
	return 0
}

// gate waits until data may pass, and says how much later; ok is false if the connection is to be cut instead.
func (l *line) gate(n int, answers bool) (delay time.Duration, ok bool) {
	for {
		l.p.mu.Lock()
		stuck, changed, lose := l.p.holding || l.dead[way(answers)], l.p.changed, l.p.lose
		if delay = l.p.delay; l.p.rate > 0 {
			delay += time.Duration(n) * time.Second / time.Duration(l.p.rate)
		}
		l.p.mu.Unlock()
		if !stuck {
			return delay, !answers || lose == nil || !lose()
		}
		select {
		case <-changed:
		case <-l.gone:
			return 0, false
		}
	}
}
