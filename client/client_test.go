package client_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"ferrymq/client"
	"ferrymq/dbtest"
)

// patience bounds what should be quick, on a machine that is busy.
const patience = 60 * time.Second

// address is a broker that all tests and examples use that do not stop theirs.
var address string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "ferrymq-client-")
	if err == nil {
		err = os.Chmod(dir, 0o711) // root's PostgreSQL runs as somebody else
	}
	bin = filepath.Join(dir, "ferrymq")
	if err == nil {
		cmd := exec.Command("go", "build", "-o", bin, "ferrymq")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		cmd.Stderr = os.Stderr
		err = cmd.Run()
	}
	var b *broker
	if err == nil {
		b, err = launch("PORT=0", "DATA_DIR="+filepath.Join(dir, "data"))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	address = b.url
	dbtest.Main(m, func() {
		b.end(syscall.SIGTERM)
		os.RemoveAll(dir)
	})
}

var bin string

// broker is a process.
type broker struct {
	cmd   *exec.Cmd
	url   string
	mu    sync.Mutex
	log   bytes.Buffer
	ready chan struct{}
	done  chan struct{}
}

var readyLine = regexp.MustCompile(`(?s)listening on (http://[^" ]+).*msg=ready`)

func (b *broker) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.log.Write(p)
	if m := readyLine.FindSubmatch(b.log.Bytes()); m != nil && b.url == "" {
		b.url = string(m[1])
		close(b.ready)
	}
	return len(p), nil
}

// launch returns a broker that is ready.
func launch(settings ...string) (*broker, error) {
	b := &broker{cmd: exec.Command(bin), ready: make(chan struct{}), done: make(chan struct{})}
	b.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "PGBIN=" + os.Getenv("PGBIN")}, settings...)
	b.cmd.Stdout, b.cmd.Stderr = b, b
	if err := b.cmd.Start(); err != nil {
		return nil, err
	}
	go func() { _ = b.cmd.Wait(); close(b.done) }()
	select {
	case <-b.ready:
		return b, nil
	case <-b.done:
	case <-time.After(patience):
		b.end(syscall.SIGKILL)
	}
	return nil, fmt.Errorf("the broker is not ready:\n%s", b.log.String())
}

func (b *broker) end(s syscall.Signal) {
	_ = b.cmd.Process.Signal(s)
	<-b.done
}

func connect(t testing.TB, config client.Config) *client.Client {
	t.Helper()
	if config.URLs == nil {
		config.URLs = []string{address}
	}
	if config.Log == nil {
		config.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	c, err := client.New(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// subscribe makes a subscription of the stream of the same name, both called like the test.
func subscribe(t testing.TB, c *client.Client, settings map[string]any) string {
	t.Helper()
	all := map[string]any{"stream": t.Name()}
	for k, v := range settings {
		all[k] = v
	}
	if err := c.Call(t.Context(), "PUT", "/v1/subscriptions/"+t.Name(), all, nil); err != nil {
		t.Fatal(err)
	}
	return t.Name()
}

func publish(t testing.TB, c *client.Client, messages ...client.Outgoing) []client.Published {
	t.Helper()
	results, err := c.Publish(t.Context(), t.Name(), messages...)
	if err != nil {
		t.Fatal(err)
	}
	return results
}

// seen is what handlers were given.
type seen struct {
	mu   sync.Mutex
	all  []client.Message
	grew chan struct{}
}

func (s *seen) add(m client.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, m)
	if s.grew != nil {
		close(s.grew)
		s.grew = nil
	}
}

// await returns the messages once there are n.
func (s *seen) await(t testing.TB, n int) []client.Message {
	t.Helper()
	for end := time.After(patience); ; {
		s.mu.Lock()
		all := slices.Clone(s.all)
		if s.grew == nil {
			s.grew = make(chan struct{})
		}
		grew := s.grew
		s.mu.Unlock()
		if len(all) >= n {
			return all
		}
		select {
		case <-grew:
		case <-end:
			t.Fatalf("%d messages came, want %d", len(all), n)
		}
	}
}

// loop runs a Receive and returns what stops it and gives its error.
func loop(t testing.TB, c *client.Client, sub string, o client.ReceiveOptions, handler func(context.Context, client.Message) error) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Receive(ctx, sub, o, handler) }()
	stop = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-ended:
			return err
		case <-time.After(patience):
			return errors.New("the loop does not end")
		}
	})
	t.Cleanup(func() { _ = stop() })
	return stop
}

// numbers awaits the subscription's state.
func awaitState(t testing.TB, c *client.Client, sub string, want string, n int) {
	t.Helper()
	var state map[string]any
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if err := c.Call(t.Context(), "GET", "/v1/subscriptions/"+sub, nil, &state); err != nil {
			t.Fatal(err)
		}
		if state[want] == float64(n) {
			return
		}
	}
	t.Fatalf("%s: want %s %d: %v", sub, want, n, state)
}

// lossy is a way to the broker on which answers get lost.
func lossy(t testing.TB, lose func(r *http.Request) bool) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.RequestURI, r.URL.Scheme, r.URL.Host = "", "http", strings.TrimPrefix(address, "http://")
		resp, err := http.DefaultTransport.RoundTrip(r)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil || lose(r) {
			panic(http.ErrAbortHandler)
		}
		w.WriteHeader(resp.StatusCode)
		_, _ = w.Write(body)
	}))
	t.Cleanup(func() {
		s.Close()
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	})
	return s.URL
}

// What is published while answers get lost is stored once, with and without keys and ids; payloads arrive byte for byte.
func TestPublishLostAnswers(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	url := lossy(t, func(*http.Request) bool { return calls.Add(1)%2 == 1 })
	c, direct := connect(t, client.Config{URLs: []string{url}}), connect(t, client.Config{})
	sub := subscribe(t, direct, nil)
	const n = 20
	for i := range n {
		for _, x := range publish(t, c, client.Outgoing{Payload: i}, client.Outgoing{Key: "k", Payload: json.RawMessage(fmt.Sprintf(`{"n": %d.0, "<": "\u003c"}`, i)), Headers: map[string]any{"h": "<&>"}}) {
			if x.Duplicate || x.ID == "" || x.Err != nil {
				t.Errorf("%+v", x)
			}
		}
	}
	for range 2 {
		publish(t, c, client.Outgoing{Key: "k", ID: "mine", Payload: nil})
	}
	if x := publish(t, direct, client.Outgoing{Key: "k", ID: "mine", Payload: nil}); !x[0].Duplicate {
		t.Errorf("a repeat with the same id is %+v", x)
	}
	publish(t, c, client.Outgoing{Key: "later", Delay: 300 * time.Millisecond, Payload: "late"})
	var got seen
	stop := loop(t, direct, sub, client.ReceiveOptions{}, func(_ context.Context, m client.Message) error { got.add(m); return nil })
	got.await(t, 2*n+2)
	awaitState(t, direct, sub, "backlog", 0)
	if err := stop(); err != nil {
		t.Error(err)
	}
	all, k := got.await(t, 0), 0
	if len(all) != 2*n+2 {
		t.Errorf("%d messages came, want %d", len(all), 2*n+2)
	}
	for _, m := range all {
		if m.Key == "k" && string(m.Payload) != "null" {
			if want := fmt.Sprintf(`{"n": %d.0, "<": "\u003c"}`, k); string(m.Payload) != want || m.Headers["h"] != "<&>" {
				t.Errorf("came as %s %v, want %s", m.Payload, m.Headers, want)
			}
			k++
		}
	}
}

// A call that carries more than one call may carry is made of several.
func TestPublishMany(t *testing.T) {
	t.Parallel()
	c := connect(t, client.Config{})
	sub := subscribe(t, c, nil)
	many := make([]client.Outgoing, 2500)
	for i := range many {
		many[i] = client.Outgoing{Key: fmt.Sprint(i % 100), Payload: i}
	}
	large := strings.Repeat("x", 5<<20)
	publish(t, c, many...)
	publish(t, c, client.Outgoing{Payload: large}, client.Outgoing{Payload: large}, client.Outgoing{Payload: large})
	awaitState(t, c, sub, "backlog", 2503)
	if results, err := c.Publish(t.Context(), t.Name()); err != nil || len(results) != 0 {
		t.Errorf("nothing published: %v %v", results, err)
	}
}

// Acks whose answers get lost are not said to have failed, and nothing is handled twice for them.
func TestReceiveLostAnswers(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	url := lossy(t, func(r *http.Request) bool { return !strings.HasSuffix(r.URL.Path, "/receive") && calls.Add(1)%2 == 1 })
	var log bytes.Buffer
	c, direct := connect(t, client.Config{URLs: []string{url}, Log: slog.New(slog.NewTextHandler(&log, nil))}), connect(t, client.Config{})
	sub := subscribe(t, direct, map[string]any{"lease_seconds": 300})
	for i := range 50 {
		publish(t, direct, client.Outgoing{Key: fmt.Sprint(i % 5), Payload: i})
	}
	var got seen
	stop := loop(t, c, sub, client.ReceiveOptions{Concurrency: 3}, func(_ context.Context, m client.Message) error { got.add(m); return nil })
	got.await(t, 50)
	awaitState(t, direct, sub, "backlog", 0)
	if err := stop(); err != nil || strings.Contains(log.String(), "settled") {
		t.Errorf("%v\n%s", err, &log)
	}
	if all := got.await(t, 50); len(all) != 50 {
		t.Errorf("%d messages were handled, want 50", len(all))
	}
}

// Messages of one key come in order, one at a time, however many handlers there are.
func TestKeyOrder(t *testing.T) {
	t.Parallel()
	c := connect(t, client.Config{})
	sub := subscribe(t, c, nil)
	const keys, each = 20, 20
	for i := range each {
		var batch []client.Outgoing
		for k := range keys {
			batch = append(batch, client.Outgoing{Key: fmt.Sprint(k), Payload: i})
		}
		publish(t, c, batch...)
	}
	var got seen
	var mu sync.Mutex
	running, most := map[string]bool{}, 0
	stop := loop(t, c, sub, client.ReceiveOptions{Concurrency: 12}, func(_ context.Context, m client.Message) error {
		mu.Lock()
		if running[m.Key] {
			t.Errorf("two handlers have key %s", m.Key)
		}
		running[m.Key] = true
		most = max(most, len(running))
		mu.Unlock()
		time.Sleep(time.Millisecond)
		mu.Lock()
		delete(running, m.Key)
		mu.Unlock()
		got.add(m)
		return nil
	})
	next := map[string]int{}
	for _, m := range got.await(t, keys*each) {
		if string(m.Payload) != fmt.Sprint(next[m.Key]) || m.Attempt != 1 {
			t.Errorf("key %s: %s attempt %d, want %d", m.Key, m.Payload, m.Attempt, next[m.Key])
		}
		next[m.Key]++
	}
	if err := stop(); err != nil || most < 2 || most > 12 {
		t.Errorf("%v, at most %d handlers at once", err, most)
	}
}

// A broker is killed and started again while messages are published and handled: all come, in the order of their key.
func TestBrokerKilled(t *testing.T) {
	t.Parallel()
	dsn := "DATABASE_URL=" + dbtest.New(t)
	b, err := launch("PORT=0", dsn)
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(strings.TrimPrefix(b.url, "http://"))
	t.Cleanup(func() { b.end(syscall.SIGTERM) })
	c := connect(t, client.Config{URLs: []string{b.url}})
	sub := subscribe(t, c, map[string]any{"lease_seconds": 1, "retry": map[string]any{"initial": "10ms"}})
	var got seen
	stop := loop(t, c, sub, client.ReceiveOptions{Extend: time.Second}, func(_ context.Context, m client.Message) error { got.add(m); return nil })
	const n = 30
	for i := range n {
		publish(t, c, client.Outgoing{Key: "a", Payload: i}, client.Outgoing{Key: "b", Payload: i})
		if i%10 == 5 {
			b.end(syscall.SIGKILL)
			if b, err = launch("PORT="+port, dsn); err != nil {
				t.Fatal(err)
			}
		}
	}
	awaitState(t, c, sub, "backlog", 0)
	if err := stop(); err != nil {
		t.Error(err)
	}
	last := map[string]int{"a": -1, "b": -1}
	for _, m := range got.await(t, 2*n) {
		var x int
		if err := json.Unmarshal(m.Payload, &x); err != nil || x != last[m.Key] && x != last[m.Key]+1 {
			t.Errorf("key %s: %s after %d", m.Key, m.Payload, last[m.Key])
		}
		last[m.Key] = x
	}
	if last["a"] != n-1 || last["b"] != n-1 {
		t.Errorf("the last ones are %v", last)
	}
}

// While a handler runs its lease is extended, far beyond its first end.
func TestLeaseExtended(t *testing.T) {
	t.Parallel()
	c := connect(t, client.Config{})
	sub := subscribe(t, c, map[string]any{"lease_seconds": 2})
	publish(t, c, client.Outgoing{Key: "k", Payload: 1}, client.Outgoing{Key: "k", Payload: 2})
	var got seen
	stop := loop(t, c, sub, client.ReceiveOptions{Extend: 2 * time.Second}, func(ctx context.Context, m client.Message) error {
		got.add(m)
		if string(m.Payload) == "1" {
			select {
			case <-time.After(6 * time.Second):
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		return nil
	})
	all := got.await(t, 2)
	awaitState(t, c, sub, "backlog", 0)
	if string(all[1].Payload) != "2" || all[1].Attempt != 1 {
		t.Errorf("after the long one came %s, attempt %d", all[1].Payload, all[1].Attempt)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// A lease that somebody has ended ends the handler's context.
func TestLeaseLost(t *testing.T) {
	t.Parallel()
	c := connect(t, client.Config{})
	sub := subscribe(t, c, nil)
	publish(t, c, client.Outgoing{Key: "k", Payload: 1})
	began, cause := make(chan struct{}), make(chan error, 1)
	loop(t, c, sub, client.ReceiveOptions{Extend: time.Second, Concurrency: 1}, func(ctx context.Context, m client.Message) error {
		close(began)
		<-ctx.Done()
		cause <- context.Cause(ctx)
		return ctx.Err()
	})
	<-began
	// The subscription's lease is 30 s; how long it lasts is not known to the loop until it has extended it: that is due after 10 s at most.
	if err := c.Call(t.Context(), "POST", "/v1/subscriptions/"+sub+"/seek", map[string]any{"to": "latest"}, nil); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-cause:
		if !errors.Is(err, client.ErrLeaseLost) {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Error("the handler does not know that its lease is lost")
	}
}

// Stopping lets handlers finish; what they do not finish is given back at once and not counted; one that does not end is left.
func TestStop(t *testing.T) {
	t.Parallel()
	c := connect(t, client.Config{})
	sub := subscribe(t, c, map[string]any{"lease_seconds": 300, "retry": map[string]any{"max_attempts": 1}})
	publish(t, c, client.Outgoing{Key: "quick", Payload: 1}, client.Outgoing{Key: "slow", Payload: 1}, client.Outgoing{Key: "deaf", Payload: 1})
	var began, ended seen
	stopping, never := make(chan struct{}), make(chan struct{})
	stop := loop(t, c, sub, client.ReceiveOptions{Grace: time.Second}, func(ctx context.Context, m client.Message) error {
		began.add(m)
		defer ended.add(m)
		switch m.Key {
		case "quick":
			<-stopping
			return ctx.Err()
		case "slow":
			<-ctx.Done()
			return context.Cause(ctx)
		}
		<-never
		return nil
	})
	began.await(t, 3)
	time.AfterFunc(100*time.Millisecond, func() { close(stopping) })
	at := time.Now()
	err := stop()
	if took := time.Since(at); err == nil || !strings.Contains(err.Error(), "1 handlers run") || took < 2*time.Second || took > 20*time.Second {
		t.Errorf("stopped after %v with %v", took, err)
	}
	var again seen
	stop = loop(t, c, sub, client.ReceiveOptions{}, func(_ context.Context, m client.Message) error { again.add(m); return nil })
	for _, m := range again.await(t, 2) {
		if m.Attempt != 1 || m.Key == "quick" {
			t.Errorf("%s came again, as attempt %d", m.Key, m.Attempt)
		}
	}
	awaitState(t, c, sub, "backlog", 0)
	if err := stop(); err != nil {
		t.Error(err)
	}
	close(never)
	ended.await(t, 3)
}

// A loop that is stopped just when messages are handed out gives them back: none is left to the end of its lease.
func TestStopWhileReceiving(t *testing.T) {
	t.Parallel()
	c := connect(t, client.Config{})
	sub := subscribe(t, c, map[string]any{"lease_seconds": 3600})
	var handled atomic.Int64
	const n = 40
	for i := range n {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- c.Receive(ctx, sub, client.ReceiveOptions{}, func(context.Context, client.Message) error { handled.Add(1); return nil })
		}()
		time.Sleep(time.Duration(i) * 200 * time.Microsecond)
		go cancel()
		publish(t, c, client.Outgoing{Payload: i})
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	stop := loop(t, c, sub, client.ReceiveOptions{}, func(_ context.Context, m client.Message) error {
		if m.Attempt != 1 {
			t.Errorf("%s: attempt %d", m.Payload, m.Attempt)
		}
		handled.Add(1)
		return nil
	})
	awaitState(t, c, sub, "backlog", 0)
	if err := stop(); err != nil || handled.Load() != n {
		t.Errorf("%v, %d of %d handled", err, handled.Load(), n)
	}
}

// A poison message and one whose handler panics go to the dead letters, with why, and hold up nothing else; a handler may say when, or that it
// was no attempt.
func TestErrors(t *testing.T) {
	t.Parallel()
	c := connect(t, client.Config{Log: slog.New(slog.DiscardHandler)})
	sub := subscribe(t, c, map[string]any{"retry": map[string]any{"max_attempts": 2, "initial": "10ms"}})
	for _, key := range []string{"poison", "panic", "later", "release", "fine"} {
		publish(t, c, client.Outgoing{Key: key, Payload: 1}, client.Outgoing{Key: key, Payload: 2})
	}
	var mu sync.Mutex
	calls, attempts, at := map[string]int{}, map[string]int{}, map[string]time.Time{}
	stop := loop(t, c, sub, client.ReceiveOptions{}, func(_ context.Context, m client.Message) error {
		mu.Lock()
		defer mu.Unlock()
		calls[m.Key]++
		attempts[m.Key] += m.Attempt
		if string(m.Payload) == "2" {
			return nil
		}
		switch m.Key {
		case "poison":
			return errors.New("cannot be parsed: 17")
		case "panic":
			panic("nil map")
		case "later":
			if m.Attempt == 1 {
				at[m.Key] = time.Now()
				return fmt.Errorf("wrapped: %w", client.RetryAfter(1500*time.Millisecond, errors.New("quota")))
			}
			if waited := time.Since(at[m.Key]); waited < time.Second {
				t.Errorf("came again after %v", waited)
			}
		case "release":
			if calls[m.Key] < 5 {
				return client.ErrRelease
			}
		}
		return nil
	})
	awaitState(t, c, sub, "backlog", 0)
	awaitState(t, c, sub, "dead", 2)
	if err := stop(); err != nil {
		t.Error(err)
	}
	if want := map[string]int{"poison": 3, "panic": 3, "later": 3, "release": 6, "fine": 2}; fmt.Sprint(calls) != fmt.Sprint(want) || attempts["release"] != 6 {
		t.Errorf("handlers were called %v times, want %v; attempts %v", calls, want, attempts)
	}
	var dead struct {
		Letters []struct {
			Error   string
			Message client.Message
		} `json:"dead_letters"`
	}
	if err := c.Call(t.Context(), "GET", "/v1/subscriptions/"+sub+"/dead-letters", nil, &dead); err != nil {
		t.Fatal(err)
	}
	for _, d := range dead.Letters {
		if want := map[string]string{"poison": "cannot be parsed: 17", "panic": "panic: nil map"}[d.Message.Key]; d.Error != want {
			t.Errorf("%s died of %q, want %q", d.Message.Key, d.Error, want)
		}
	}
}

// What is refused is an error at once; what may get better is tried, at all brokers, when they ask for it, and not for ever.
func TestRetries(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	busy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if calls.Add(1) == 1 {
			w.Header().Set("Retry-After", "1")
		}
		w.WriteHeader(503)
		fmt.Fprint(w, `{"error":"overloaded"}`)
	}))
	t.Cleanup(busy.Close)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	nobody := "http://" + closed.Addr().String()

	c := connect(t, client.Config{URLs: []string{nobody, busy.URL, address}})
	began := time.Now()
	for i := range 6 {
		if _, err := c.Publish(t.Context(), t.Name(), client.Outgoing{Payload: i}); err != nil {
			t.Errorf("one of three brokers works: %v", err)
		}
	}
	t.Logf("%v", time.Since(began))

	calls.Store(0)
	c = connect(t, client.Config{URLs: []string{busy.URL}, RetryFor: 1500 * time.Millisecond})
	began = time.Now()
	var refused *client.Error
	_, err = c.Publish(t.Context(), t.Name(), client.Outgoing{Payload: 1})
	if took := time.Since(began); !errors.As(err, &refused) || refused.Status != 503 || refused.Text != "overloaded" || took < time.Second || calls.Load() < 2 {
		t.Errorf("%d calls in %v: %v", calls.Load(), took, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := connect(t, client.Config{URLs: []string{nobody}}).Publish(ctx, "s", client.Outgoing{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	c = connect(t, client.Config{})
	if err := c.Receive(t.Context(), "nobody-made-it", client.ReceiveOptions{}, nil); !errors.As(err, &refused) || refused.Status != 404 {
		t.Error(err)
	}
	if results, err := c.Publish(t.Context(), "s", client.Outgoing{Payload: 1}, client.Outgoing{Payload: 1, Delay: -1}); !errors.As(err, &refused) || refused.Status != 400 || results[0].Err == nil {
		t.Errorf("%v %v", results, err)
	}
	for _, bad := range []any{json.RawMessage(`{`), func() {}} {
		if _, err := c.Publish(t.Context(), "s", client.Outgoing{Payload: bad}); err == nil || !strings.Contains(err.Error(), "messages[0]") {
			t.Error(err)
		}
	}
	for _, urls := range [][]string{nil, {""}, {"127.0.0.1:6632"}, {"ftp://x"}, {"http://user:secret@x"}} {
		if _, err := client.New(client.Config{URLs: urls}); err == nil || strings.HasPrefix(err.Error(), "client: no") == (urls != nil) {
			t.Errorf("%q: %v", urls, err)
		}
	}
}

// A queue's batches: order, acks in one call, failures, dead letters, lost answers and the end of it.
func TestQueue(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	url := lossy(t, func(r *http.Request) bool { return r.Method == "POST" && calls.Add(1)%2 == 1 })
	c := connect(t, client.Config{URLs: []string{url}, Log: slog.New(slog.DiscardHandler)})
	for i := range 20 {
		pushed, err := c.Push(t.Context(), client.Item{Queue: t.Name(), Partition: "a", Payload: i}, client.Item{Queue: t.Name(), Partition: "b", Payload: i})
		if err != nil || pushed[0].Status != "queued" || pushed[1].Status != "queued" {
			t.Fatal(pushed, err)
		}
	}
	var mu sync.Mutex
	got, tries, enough := map[string][]string{}, map[string]int{}, make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		ended <- c.Pop(ctx, t.Name(), client.PopOptions{Group: "g", Batch: 7, Lease: 2 * time.Second}, func(ctx context.Context, m client.QueueMessage) error {
			mu.Lock()
			defer mu.Unlock()
			at := m.Partition + string(m.Payload)
			tries[at]++
			switch {
			case at == "a3" && tries[at] == 1:
				return errors.New("not yet")
			case at == "a5" && tries[at] == 1:
				panic("no")
			case at == "b7":
				return client.DeadLetter(errors.New("never"))
			case at == "b9" && tries[at] < 10:
				return client.ErrRelease
			case at == "b11": // longer than the lease
				mu.Unlock()
				select {
				case <-time.After(4 * time.Second):
				case <-ctx.Done():
					t.Error(context.Cause(ctx))
				}
				mu.Lock()
			}
			got[m.Partition] = append(got[m.Partition], string(m.Payload))
			if len(got["a"]) == 20 && len(got["b"]) == 19 {
				close(enough)
			}
			return nil
		})
	}()
	select {
	case <-enough:
	case <-time.After(patience):
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if a, b := strings.Join(got["a"], " "), strings.Join(got["b"], " "); a != "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19" || b != strings.Replace(a, "7 ", "", 1) {
		t.Errorf("a: %s\nb: %s", a, b)
	}
	var dead struct {
		Messages []struct{ ErrorMessage string }
	}
	if err := c.Call(t.Context(), "GET", "/api/v1/dlq?queue="+t.Name(), nil, &dead); err != nil || len(dead.Messages) != 1 || dead.Messages[0].ErrorMessage != "never" {
		t.Errorf("%v %+v", err, dead)
	}
	var refused *client.Error
	if err := c.Pop(t.Context(), strings.Repeat("x", 300), client.PopOptions{}, nil); !errors.As(err, &refused) || refused.Status != 400 {
		t.Error(err)
	}
}

// A queue's loop that is stopped acks what is done and gives back the rest of its batch.
func TestQueueStop(t *testing.T) {
	t.Parallel()
	c := connect(t, client.Config{})
	for i := range 5 {
		if _, err := c.Push(t.Context(), client.Item{Queue: t.Name(), Payload: i}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	err := c.Pop(ctx, t.Name(), client.PopOptions{Lease: time.Hour}, func(context.Context, client.QueueMessage) error {
		if n++; n == 2 {
			cancel()
		}
		return nil
	})
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	var rest []string
	again := c.Pop(ctx, t.Name(), client.PopOptions{}, func(_ context.Context, m client.QueueMessage) error {
		if rest = append(rest, string(m.Payload)); string(m.Payload) == "4" {
			cancel()
		}
		return nil
	})
	if err != nil || again != nil || n != 2 || strings.Join(rest, "") != "234" {
		t.Errorf("%v %v: %d handled, then %v", err, again, n, rest)
	}
}
