// Package handlers is the HTTP API: it decodes a request, makes one call to the engine, and encodes the answer.
package handlers

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/auth"
	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/groupcommit"
	"ferrymq/metrics"
)

// Version is what /health reports.
const Version = "0.1.0"

// API serves all routes. Set the exported fields before the first request; call Ready when the engine runs.
type API struct {
	Log     *slog.Logger
	Pool    *pgxpool.Pool
	MaxBody int64

	Auth           *auth.Verifier   // nil: whoever comes may do everything
	DefaultTimeout time.Duration    // of a waiting pop that names none
	DefaultStart   catalog.Start    // of a group that names none
	HasKey         bool             // an encryption key is configured
	Secret         uuid.UUID        // of the installation: what makes delivery ids
	Changed        func(id int32)   // a queue was configured or deleted; may be nil
	Metrics        *metrics.Metrics // nil: nobody will ask

	engine   atomic.Pointer[groupcommit.Engine]
	waiting  atomic.Pointer[string] // why not ready yet
	draining atomic.Bool
	switches switches
	counted  atomic.Pointer[numbers]
	counting chan struct{} // holds an element while somebody counts
	routes   []route
	other    *metrics.Route // answers to what is no route

	lookouts    lookouts
	connections atomic.Int64

	keys    *auth.Keys
	reads   db.Patient  // for listings and the like: only so many at once, so that they leave the database to messages
	queries *db.Queries // the same, outside of a transaction
	direct  *db.Queries // for what must not wait behind listings
}

type route struct {
	method  string
	path    []string // "{name}" matches one segment
	level   level
	handle  handler
	head    bool // HEAD is answered too
	waiting bool // served before the schema is current
	answers *metrics.Route
}

type handler func(a *API, w http.ResponseWriter, r *request) error

// level is what a caller must be allowed to do when authentication is on.
type level int

const (
	open level = iota
	readOnly
	writeOnly
	readWrite
	admin
	root   // of /v1: projects and their keys
	public // open, whatever the list of open paths says
)

// roles are those that are allowed. What is open to all is so by the list of open paths; taken off it, it is a read.
func (l level) roles() auth.Role {
	switch l {
	case admin, root:
		return auth.Admin
	case readWrite:
		return auth.ReadWrite | auth.Admin
	case writeOnly:
		return auth.WriteOnly | auth.ReadWrite | auth.Admin
	}
	return auth.ReadOnly | auth.ReadWrite | auth.Admin
}

// scope is what an API key must have, on the routes of /v1; none is enough for root.
func (l level) scope() auth.Scope {
	switch l {
	case readOnly:
		return auth.Read
	case writeOnly:
		return auth.Publish
	case readWrite:
		return auth.Consume
	case admin:
		return auth.Manage
	}
	return 0
}

func on(method, path string, l level, handle handler) route {
	return route{method: method, path: strings.Split(path[1:], "/"), level: l, handle: handle}
}

// probe is a route that is served before the schema is current, and to HEAD too.
func probe(path string, l level, handle handler) route {
	x := on("GET", path, l, handle)
	x.head, x.waiting = true, true
	return x
}

// request is a matched request: the path parameters are percent-decoded once.
type request struct {
	*http.Request
	engine *groupcommit.Engine
	params []string
	sub    string    // whom the token names; "" is nobody
	key    *auth.Key // the API key it came with, if it did
	roles  auth.Role
	path   []string // decoded, for stillAllowed
	level  level
	began  time.Time
}

// longWait is after how long a request that waited is judged again.
const longWait = time.Second

// stillAllowed judges a request again that has waited for messages: its key may have been deleted since, or its token be over.
func (a *API) stillAllowed(r *request) error {
	if time.Since(r.began) < longWait {
		return nil
	}
	_, err := a.authorize(r.Request, r.path, r.level)
	return err
}

// table is the table of contents of the API. What is called most comes first.
func (a *API) table() []route {
	return slices.Concat([]route{
		on("POST", "/api/v1/push", writeOnly, (*API).push),
		on("GET", "/api/v1/pop", readWrite, (*API).popDiscovery),
		on("GET", "/api/v1/pop/queue/{queue}", readWrite, (*API).popQueue),
		on("GET", "/api/v1/pop/queue/{queue}/partition/{partition}", readWrite, (*API).popPartition),
		on("POST", "/api/v1/ack", readWrite, (*API).ack),
		on("POST", "/api/v1/ack/batch", readWrite, (*API).ackBatch),
		on("POST", "/api/v1/lease/{leaseId}/extend", readWrite, (*API).extend),
		on("POST", "/api/v1/configure", readWrite, (*API).configure),
		on("DELETE", "/api/v1/resources/queues/{queue}", admin, (*API).deleteQueue),
		probe("/health", open, (*API).health),
		probe("/ready", open, (*API).ready),
	}, groupRoutes(), transactionRoutes(), messageRoutes(), deadLetterRoutes(), clearRoutes(), systemRoutes(), resourceRoutes(), analyticsRoutes(), publishRoutes(), consumeRoutes(), projectRoutes(), laneDeadRoutes(), laneTraceRoutes(), streamRoutes(), subscriptionRoutes(), openAPIRoutes(), consoleRoutes())
}

// Handler makes the API servable.
func (a *API) Handler() http.Handler {
	a.routes, a.counting = a.table(), make(chan struct{}, 1)
	a.lookouts.room = make(chan struct{}, 1)
	a.reads = db.Patient{Pool: a.Pool, Room: make(chan struct{}, max(1, a.Pool.Config().MaxConns/readShare))}
	a.queries, a.direct = db.New(a.reads), db.New(db.Patient{Pool: a.Pool})
	a.keys = auth.NewKeys(a.findKey)
	if a.Metrics == nil {
		a.Metrics = metrics.New(Version)
	}
	for i := range a.routes {
		a.routes[i].answers = a.Metrics.Route(a.routes[i].method + " /" + strings.Join(a.routes[i].path, "/"))
	}
	a.other = a.Metrics.Route("other")
	a.Metrics.IsReady = func() bool { return a.engine.Load() != nil && !a.draining.Load() }
	a.Metrics.PushMaintenance, a.Metrics.PopMaintenance = a.switches.push.Load, a.popPaused
	reason := "migrations pending"
	a.waiting.Store(&reason)
	return a
}

// readShare is of how many connections one may be used by listings, statistics and whatever else reads much.
const readShare = 4

// Ready lets requests through to the engine.
func (a *API) Ready(e *groupcommit.Engine) { a.engine.Store(e) }

// NotReady says why requests are not let through yet, for /ready.
func (a *API) NotReady(reason string) { a.waiting.Store(&reason) }

// ConnState counts connections, as the http.Server's hook.
func (a *API) ConnState(_ net.Conn, s http.ConnState) {
	switch s {
	case http.StateNew:
		a.connections.Add(1)
	case http.StateClosed, http.StateHijacked:
		a.connections.Add(-1)
	}
}

// Drain makes /ready say so. Requests are still served.
func (a *API) Drain() { a.draining.Store(true) }

// ServeHTTP finds the route: paths are matched as sent, segment by segment, never cleaned or redirected.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	began := time.Now()
	rec := &recorder{ResponseWriter: w, status: http.StatusOK, route: a.other}
	if err := a.serve(rec, r, began); err != nil {
		a.fail(rec, r, err)
	}
	if r.Context().Err() != nil {
		rec.status = statusGone
	}
	rec.route.Answered(rec.status)
	a.Log.LogAttrs(r.Context(), slog.LevelDebug, "request", slog.String("method", r.Method), slog.String("path", r.URL.Path),
		slog.Int("status", rec.status), slog.Duration("took", time.Since(began)))
}

// statusGone counts requests whose client has gone before the answer.
const statusGone = 499

// recorder remembers what was answered, on which route.
type recorder struct {
	http.ResponseWriter
	status int
	route  *metrics.Route
}

// WriteHeader is http.ResponseWriter's.
func (w *recorder) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (a *API) serve(w *recorder, r *http.Request, began time.Time) error {
	segments := strings.Split(strings.TrimPrefix(r.URL.EscapedPath(), "/"), "/")
	for i, s := range segments {
		if segments[i], _ = url.PathUnescape(s); segments[i] == "" {
			return errNoRoute
		}
	}
	var allowed []string
	for i := range a.routes {
		t := &a.routes[i]
		params, ok := t.match(segments)
		if !ok {
			continue
		}
		if r.Method != t.method && !(t.head && r.Method == http.MethodHead) {
			allowed = append(allowed, t.method)
			if t.head {
				allowed = append(allowed, http.MethodHead)
			}
			continue
		}
		w.route = t.answers
		id, err := a.authorize(r, segments, t.level)
		if err != nil {
			return err
		}
		e := a.engine.Load()
		if e == nil && !t.waiting {
			return busy("not ready")
		}
		return t.handle(a, w, &request{Request: r, engine: e, params: params, sub: id.Subject, key: id.Key, roles: id.Roles, path: segments, level: t.level, began: began})
	}
	if len(allowed) > 0 {
		slices.Sort(allowed)
		w.Header().Set("Allow", strings.Join(slices.Compact(allowed), ", "))
		return &httpError{status: http.StatusMethodNotAllowed, text: "Method Not Allowed"}
	}
	return errNoRoute
}

// authorize looks at a request that has a route and whose body nobody has read, and says who sent it. API keys are for /v1 and the console only.
func (a *API) authorize(r *http.Request, path []string, l level) (id auth.Identity, err error) {
	if a.Auth == nil || l == public || a.Auth.Open(path) {
		return id, nil
	}
	var keys *auth.Keys
	if path[0] == "v1" || path[0] == "console" {
		keys = a.keys
	}
	id, err = a.Auth.Authenticate(r.Context(), r.Header["Authorization"], keys)
	if refused := auth.Error(""); errors.As(err, &refused) {
		err = &httpError{status: http.StatusUnauthorized, text: err.Error()}
	}
	if err != nil {
		return id, err
	}
	if id.Roles&l.roles() == 0 && (id.Key == nil || id.Key.Scopes&l.scope() == 0) {
		return id, &httpError{status: http.StatusForbidden, text: "Insufficient permissions"}
	}
	return id, nil
}

var errNoRoute = &httpError{status: http.StatusNotFound, raw: []byte(`{"error":"Not Found","code":"no_such_route"}`)}

func (t *route) match(segments []string) (params []string, ok bool) {
	if len(segments) != len(t.path) {
		return nil, false
	}
	for i, p := range t.path {
		if p[0] == '{' {
			params = append(params, segments[i])
		} else if segments[i] != p {
			return nil, false
		}
	}
	return params, true
}

// fail is the one place where errors become answers.
func (a *API) fail(w http.ResponseWriter, r *http.Request, err error) int {
	var known *httpError
	switch {
	case errors.As(err, &known):
	case r.Context().Err() != nil: // the client has gone: nobody reads this
		known = &httpError{status: http.StatusServiceUnavailable, text: "cancelled"}
	default:
		a.Log.Error("request failed", "method", r.Method, "path", r.URL.Path, "error", db.Text(err))
		known = &httpError{status: http.StatusInternalServerError, text: "query failed"}
	}
	body := known.raw
	if body == nil {
		body = append(quote([]byte(`{"error":`), known.text), '}')
	}
	if known.retry > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(known.retry))
	}
	if known.status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	if known.status == http.StatusRequestEntityTooLarge {
		w.Header().Set("Connection", "close") // the rest of the body is not worth reading
	}
	a.write(w, known.status, body)
	return known.status
}

var nosniff = []string{"nosniff"}

// writeTimeout is how long a client may take to read an answer.
const writeTimeout = time.Minute

// write sends a JSON answer. Its error means that the client did not get it.
func (a *API) write(w http.ResponseWriter, status int, body []byte) error {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h["X-Content-Type-Options"] = nosniff // a payload is never a page
	h.Set("Content-Length", strconv.Itoa(len(body)))
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
	w.WriteHeader(status)
	_, err := w.Write(body)
	return err
}

// reply answers with a value as JSON: fields in the order of the struct, a nil slice as [].
func (a *API) reply(w http.ResponseWriter, status int, v any) error {
	b, err := json.Marshal(v, json.Deterministic(true))
	if err != nil {
		return err
	}
	return a.write(w, status, b)
}

// notFound is a 404 with a fixed text.
func notFound(text string) error { return &httpError{status: http.StatusNotFound, text: text} }

func retrySoon() int { return 1 + rand.IntN(3) }

// health makes one round trip to the database.
func (a *API) health(w http.ResponseWriter, r *request) error {
	ctx, cancel := context.WithTimeout(r.Context(), 2*time.Second)
	defer cancel()
	status, body := http.StatusOK, `{"status":"healthy","database":"connected","engine":"ferrymq","version":"`+Version+`"}`
	if _, err := a.Pool.Exec(ctx, "select 1"); err != nil {
		status, body = http.StatusServiceUnavailable, `{"status":"unhealthy","database":"disconnected","engine":"ferrymq","version":"`+Version+`"}`
	}
	return a.write(w, status, []byte(body))
}

// ready says whether requests are served: the schema is current, the database answers, the broker is not shutting down.
func (a *API) ready(w http.ResponseWriter, r *request) error {
	reason := ""
	switch {
	case a.draining.Load():
		reason = "draining"
	case r.engine == nil:
		reason = *a.waiting.Load()
	default:
		ctx, cancel := context.WithTimeout(r.Context(), 2*time.Second)
		defer cancel()
		if _, err := a.Pool.Exec(ctx, "select 1"); err != nil {
			reason = "database unreachable"
		}
	}
	if reason != "" {
		return a.write(w, http.StatusServiceUnavailable, append(quote([]byte(`{"status":"not ready","reason":`), reason), '}'))
	}
	return a.write(w, http.StatusOK, []byte(`{"status":"ready"}`))
}

var errNoConnection, errUnknown = groupcommit.ErrNoConnection, groupcommit.ErrUnknown
