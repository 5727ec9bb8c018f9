// Package client talks to FerryMQ brokers. It needs nothing but the standard library.
//
// [Client.Publish] and [Client.Receive] are the /v1 API: single messages, in order per key, with retries and dead letters.
// [Client.Push] and [Client.Pop] are the /api/v1 API: batches of a partition. All other routes are reached with [Client.Call].
//
// Calls are tried again, at another broker if there are several, until [Config].RetryFor is over. That is safe: what this package
// publishes carries an id, so that a message whose answer got lost is stored once. Delivery is at least once all the same: a handler
// may see a message again whose ack did not arrive.
package client

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Config is what a [Client] is made of. Only URLs is needed.
type Config struct {
	URLs     []string      // where the brokers are: http://host:port, with a path prefix if a proxy wants one
	Key      string        // an API key, the root key or a token; "" sends none
	Project  string        // of the /v1 names; "" is the project of the key, or "default"
	RetryFor time.Duration // how long a call is tried, 0: one minute; negative: once. Receive and Pop try until their context ends
	Timeout  time.Duration // how long one attempt may take beyond what it asks the broker to wait, 0: 35 s, a little more than a broker gives a statement
	TLS      *tls.Config   // nil: the defaults
	Log      *slog.Logger  // what no error can tell: brokers that cannot be reached, handlers that panic; nil: slog.Default()
}

// Client is safe for concurrent use.
type Client struct {
	urls      []string
	turn      atomic.Uint32 // which of them is used
	config    Config
	transport *http.Transport
	log       *slog.Logger
}

// New makes a client. It connects to nothing yet; its error is about the configuration.
func New(config Config) (*Client, error) {
	if len(config.URLs) == 0 {
		return nil, errors.New("client: no URLs")
	}
	c := &Client{config: config, log: cmp.Or(config.Log, slog.Default())}
	for _, s := range config.URLs {
		u, err := url.Parse(strings.TrimRight(s, "/"))
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.User != nil {
			return nil, fmt.Errorf("client: %q is no address of a broker: must be like http://127.0.0.1:6632", s)
		}
		c.urls = append(c.urls, u.String())
	}
	if strings.ContainsAny(config.Key, "\r\n") {
		return nil, errors.New("client: the key has a line break")
	}
	c.config.RetryFor = cmp.Or(config.RetryFor, time.Minute)
	c.config.Timeout = cmp.Or(config.Timeout, 35*time.Second)
	c.turn.Store(rand.Uint32N(1 << 16))
	// HTTP/1.1 only: a connection that is given up is one call that is given up.
	c.transport = &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: config.TLS, MaxIdleConnsPerHost: 64, IdleConnTimeout: 90 * time.Second,
		TLSHandshakeTimeout: 5 * time.Second, DialContext: (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}).DialContext}
	c.transport.Protocols = new(http.Protocols)
	c.transport.Protocols.SetHTTP1(true)
	return c, nil
}

// Close closes connections that are not in use. The client can still be used.
func (c *Client) Close() { c.transport.CloseIdleConnections() }

// Error is an answer that is no success.
type Error struct {
	Status int    // of HTTP
	Text   string // what the broker says

	retryAfter time.Duration
}

func (e *Error) Error() string { return fmt.Sprintf("broker: %d %s", e.Status, e.Text) }

// transient errors may go away by trying again.
func transient(err error) bool {
	var e *Error
	if !errors.As(err, &e) {
		return true // no answer at all
	}
	switch e.Status {
	case http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return e.Status == http.StatusInternalServerError && (e.Text == "pool" || e.Text == "pop failed")
}

// Call makes any call of either API: body is sent as JSON unless it is nil, and the answer decoded into answer unless that is nil.
// It is tried again like all others, also when an answer got lost: what is not to happen twice must say so itself, by an id.
// The path starts with "/"; the client adds its project to paths of /v1. Answers that are no success are an [*Error].
func (c *Client) Call(ctx context.Context, method, path string, body, answer any) error {
	var data []byte
	var err error
	if body != nil {
		if data, err = encode(body); err != nil {
			return err
		}
	}
	if data, err = c.call(ctx, ctx, call{method: method, path: path, body: data, tryFor: c.config.RetryFor}); err != nil || answer == nil || len(data) == 0 {
		return err
	}
	return json.Unmarshal(data, answer)
}

// encode is JSON without escapes for HTML; what is JSON already stays as it is.
func encode(v any) ([]byte, error) {
	if raw, ok := v.(json.RawMessage); ok {
		if !json.Valid(raw) {
			return nil, errors.New("client: the payload is not JSON")
		}
		return raw, nil
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// call is a request that is tried until it is answered.
type call struct {
	method, path string
	body         []byte
	wait         time.Duration // what the broker was asked to wait
	tryFor       time.Duration // negative: once
	retried      *bool         // set when an answer may have got lost
	date         *time.Time    // the broker's clock, if it says
}

// forever is longer than any loop runs.
const forever = 1 << 62

// call tries until it succeeds, cannot succeed, or its time is over. When soft ends, a call that waits is ended in such a way that what the
// broker has handed out already is still received; when ctx ends, it is over.
func (c *Client) call(ctx, soft context.Context, q call) ([]byte, error) {
	began := time.Now()
	for n := 1; ; n++ {
		data, err := c.attempt(ctx, soft, q)
		switch {
		case err == nil:
			return data, nil
		case ctx.Err() != nil:
			return nil, fmt.Errorf("%s %s: %w (%w)", q.method, q.path, ctx.Err(), err)
		case soft.Err() != nil, !transient(err):
			return nil, err
		}
		if q.retried != nil {
			*q.retried = true
		}
		c.turn.Add(1)
		pause := time.Duration(0)
		if round := n / len(c.urls); n%len(c.urls) == 0 {
			pause = backoff(round, err)
		}
		if time.Since(began)+pause > q.tryFor {
			return nil, fmt.Errorf("%s %s: gave up after %d attempts: %w", q.method, q.path, n, err)
		}
		if n >= 2 && n&(n-1) == 0 {
			c.log.Warn("ferrymq: trying again", "call", q.method+" "+q.path, "attempts", n, "error", err)
		}
		if sleep(soft, pause) != nil {
			return nil, fmt.Errorf("%s %s: %w (%w)", q.method, q.path, soft.Err(), err)
		}
	}
}

// backoff grows from 50 ms to 5 s, is spread over its upper half, and is not less than what the broker asks for.
func backoff(n int, err error) time.Duration {
	d := min(50*time.Millisecond<<min(n-1, 10), 5*time.Second)
	var e *Error
	if errors.As(err, &e) {
		d = max(d, min(e.retryAfter, time.Minute))
	}
	return d + rand.N(d/2+1)
}

// sleep ends early with the context's error.
func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// lastWords is how long a call that is ended may still be answered.
const lastWords = 2 * time.Second

func (c *Client) attempt(ctx, soft context.Context, q call) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, c.config.Timeout+q.wait)
	defer cancel()
	if soft != ctx && soft.Done() != nil {
		var conn atomic.Pointer[net.Conn]
		ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
			if conn.Store(&i.Conn); soft.Err() != nil {
				cancel()
			}
		}})
		// The broker sees that nothing more is coming and ends the call, or has answered just before.
		defer context.AfterFunc(soft, func() {
			if p := conn.Load(); p != nil {
				if half, ok := (*p).(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil && sleep(ctx, lastWords) != nil {
					return
				}
			}
			cancel()
		})()
	}
	r, err := http.NewRequestWithContext(ctx, q.method, c.urls[int(c.turn.Load())%len(c.urls)]+q.path, bytes.NewReader(q.body))
	if err != nil {
		return nil, &Error{Status: http.StatusBadRequest, Text: err.Error()}
	}
	if c.config.Key != "" {
		r.Header.Set("Authorization", "Bearer "+c.config.Key)
	}
	if c.config.Project != "" && strings.HasPrefix(q.path, "/v1/") {
		values := r.URL.Query()
		values.Set("project", c.config.Project)
		r.URL.RawQuery = values.Encode()
	}
	resp, err := c.transport.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	if q.date != nil {
		*q.date, _ = http.ParseTime(resp.Header.Get("Date"))
	}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		e := &Error{Status: resp.StatusCode, Text: http.StatusText(resp.StatusCode)}
		var body struct{ Error string }
		if json.Unmarshal(data, &body) == nil && body.Error != "" {
			e.Text = body.Error
		}
		if s, err := strconv.ParseFloat(resp.Header.Get("Retry-After"), 64); err == nil && s > 0 {
			e.retryAfter = time.Duration(min(s, 3600) * float64(time.Second))
		}
		return nil, e
	}
	return data, nil
}

// ErrRelease is an error for handlers: the message is given back at once, and this was no attempt.
var ErrRelease = errors.New("released")

// ErrLeaseLost is the cause of a handler's context when its message may be with somebody else.
var ErrLeaseLost = errors.New("lease lost")

// ErrStopping is the cause of a handler's context when the loop is stopped and its time is over.
var ErrStopping = errors.New("stopping")

type retryAfter struct {
	error
	after time.Duration
}

func (e retryAfter) Unwrap() error { return e.error }

// RetryAfter is an error for handlers of [Client.Receive]: the message failed and comes again after this time (0..7 days), whatever the
// subscription's retry policy says.
func RetryAfter(after time.Duration, err error) error {
	return retryAfter{cmp.Or(err, errors.New("failed")), after}
}

type deadLetter struct{ error }

func (e deadLetter) Unwrap() error { return e.error }

// DeadLetter is an error for handlers of [Client.Pop]: the message goes to the dead letters at once. The /v1 API has no such answer:
// there it is a failed attempt like any other.
func DeadLetter(err error) error { return deadLetter{cmp.Or(err, errors.New("failed"))} }

// lifetimes are those of a loop that runs until ctx ends: handlers are told to stop when the grace is over, and lastWords later all is.
func lifetimes(ctx context.Context, grace time.Duration) (handle, all context.Context, end func()) {
	all, endAll := context.WithCancel(context.WithoutCancel(ctx))
	handle, endHandle := context.WithCancelCause(all)
	stop := context.AfterFunc(ctx, func() {
		if sleep(all, grace) != nil {
			return
		}
		endHandle(ErrStopping)
		if sleep(all, lastWords) == nil {
			endAll()
		}
	})
	return handle, all, func() { stop(); endAll(); endHandle(nil) }
}

// guard calls a handler. A panic is an error like others, and logged with its stack.
func (c *Client) guard(ctx context.Context, what string, call func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			c.log.ErrorContext(ctx, "ferrymq: a handler panicked", "message", what, "panic", p, "stack", stack())
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return call()
}
