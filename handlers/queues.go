package handlers

import (
	"bytes"
	"errors"
	"math"
	"net/http"
	"strconv"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/metrics"
)

// option is one queue option of the configure route.
type option struct {
	name   string
	lo, hi int64 // of a number
	clamp  bool
	number func(q *catalog.Queue) any // *int32, *int64, *bool or *string
	def    any
}

// options are the 19 stored values, in the order they are answered. lease_time is 60 until the first configure, 300 from then on.
var options = []option{
	{name: "leaseTime", lo: 1, hi: 43200, def: int64(300), number: func(q *catalog.Queue) any { return &q.LeaseTime }},
	{name: "retryLimit", lo: 0, hi: 10000, def: int64(3), number: func(q *catalog.Queue) any { return &q.RetryLimit }},
	{name: "retryDelay", lo: 0, hi: 86400000, def: int64(0), number: func(q *catalog.Queue) any { return &q.RetryDelay }},
	{name: "priority", lo: math.MinInt32, hi: math.MaxInt32, def: int64(0), number: func(q *catalog.Queue) any { return &q.Priority }},
	{name: "maxSize", lo: 0, hi: 1000000000000, def: int64(0), number: func(q *catalog.Queue) any { return &q.MaxSize }},
	{name: "ttl", lo: 0, hi: math.MaxInt32, def: int64(3600), number: func(q *catalog.Queue) any { return &q.TTL }},
	{name: "deadLetterQueue", def: true, number: func(q *catalog.Queue) any { return &q.DeadLetterQueue }},
	{name: "dlqAfterMaxRetries", def: true, number: func(q *catalog.Queue) any { return &q.DLQAfterMaxRetries }},
	{name: "delayedProcessing", lo: 0, hi: 31536000, def: int64(0), number: func(q *catalog.Queue) any { return &q.DelayedProcessing }},
	{name: "windowBuffer", lo: 0, hi: 31536000, def: int64(0), number: func(q *catalog.Queue) any { return &q.WindowBuffer }},
	{name: "retentionSeconds", lo: 0, hi: math.MaxInt32, def: int64(0), number: func(q *catalog.Queue) any { return &q.RetentionSeconds }},
	{name: "completedRetentionSeconds", lo: 0, hi: math.MaxInt32, def: int64(0), number: func(q *catalog.Queue) any { return &q.CompletedRetentionSeconds }},
	{name: "retentionEnabled", def: false, number: func(q *catalog.Queue) any { return &q.RetentionEnabled }},
	{name: "encryptionEnabled", def: false, number: func(q *catalog.Queue) any { return &q.EncryptionEnabled }},
	{name: "maxWaitTimeSeconds", lo: 0, hi: math.MaxInt32, def: int64(0), number: func(q *catalog.Queue) any { return &q.MaxWaitTimeSeconds }},
	{name: "minPopWaitTime", lo: 0, hi: 60000, clamp: true, def: int64(0), number: func(q *catalog.Queue) any { return &q.MinPopWaitTime }},
	{name: "dedupWindowSeconds", lo: 0, hi: 31536000, def: int64(3600), number: func(q *catalog.Queue) any { return &q.DedupWindowSeconds }},
	{name: "retentionSinkHold", def: "", number: func(q *catalog.Queue) any { return &q.RetentionSinkHold }},
	{name: "retentionSinkHoldMaxSeconds", lo: 60, hi: 31536000, def: int64(604800), number: func(q *catalog.Queue) any { return &q.RetentionSinkHoldMaxSeconds }},
}

func (o *option) set(q *catalog.Queue, v any) {
	switch p := o.number(q).(type) {
	case *int32:
		*p = int32(v.(int64))
	case *int64:
		*p = v.(int64)
	case *bool:
		*p = v.(bool)
	case *string:
		*p = v.(string)
	}
}

// parse reads a value for the option; nil is null, the default.
func (o *option) parse(raw []byte) (any, error) {
	if string(raw) == "null" {
		return o.def, nil
	}
	switch o.def.(type) {
	case bool:
		switch string(raw) {
		case "true":
			return true, nil
		case "false":
			return false, nil
		}
		return nil, o.bad("must be a boolean")
	case string:
		var s string
		if err := parse(raw, func(d *document) (err error) { s, err = d.str(""); return err }); err != nil || len(s) > 64 || !sinkName(s) {
			return nil, o.bad("must match [A-Za-z0-9._-]{0,64}")
		}
		return s, nil
	}
	n, ok := wholeNumber(raw)
	if ok && o.clamp {
		n = min(max(n, o.lo), o.hi)
	}
	if !ok || n < o.lo || n > o.hi {
		return nil, o.bad("must be " + strconv.FormatInt(o.lo, 10) + ".." + strconv.FormatInt(o.hi, 10))
	}
	return n, nil
}

func (o *option) bad(why string) error { return bad("invalid option %q: %s", o.name, why) }

func sinkName(s string) bool {
	for _, c := range []byte(s) {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-') {
			return false
		}
	}
	return true
}

// wholeNumber reads a JSON number that is an integer, however it is spelt; huge ones are held to the 64-bit range.
func wholeNumber(raw []byte) (int64, bool) {
	if n, err := strconv.ParseInt(string(raw), 10, 64); err == nil {
		return n, true
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) || f != math.Trunc(f) || len(raw) == 0 || raw[0] == '"' {
		return 0, false
	}
	if f >= math.MaxInt64 {
		return math.MaxInt64, true
	}
	if f <= math.MinInt64 {
		return math.MinInt64, true
	}
	return int64(f), true
}

// configuration is a configure request as sent.
type configuration struct {
	queue   *string
	mode    *string
	options map[string][]byte // raw values of known options
	// namespace and task: set, reset to what the name gives, or kept when absent
	namespace, task *setting
}

type setting struct {
	value string
	reset bool
}

func readConfigure(body []byte) (*configuration, error) {
	var c configuration
	top := map[string][]byte{}
	var nested map[string][]byte
	err := parse(body, func(d *document) error {
		return d.object(func(name string) error {
			raw, err := d.value()
			if err != nil {
				return err
			}
			if name != "options" || len(raw) == 0 || raw[0] != '{' {
				top[name] = raw
				return nil
			}
			nested = map[string][]byte{}
			return parse(raw, func(d *document) error {
				return d.object(func(name string) error {
					nested[name], err = d.value()
					return err
				})
			})
		})
	})
	if err != nil {
		return nil, err
	}
	if c.queue, err = configureText(top, "queue"); err != nil {
		return nil, err
	}
	if c.mode, err = configureText(top, "mode"); err != nil {
		return nil, err
	}
	if c.options = nested; nested == nil {
		c.options = top
	}
	if c.namespace, err = configureName(nested, top, "namespace"); err != nil {
		return nil, err
	}
	c.task, err = configureName(nested, top, "task")
	return &c, err
}

// configureText is a string member, nil when absent or null.
func configureText(from map[string][]byte, name string) (s *string, err error) {
	raw, ok := from[name]
	if !ok || string(raw) == "null" {
		return nil, nil
	}
	err = parse(raw, func(d *document) error {
		d.path = append(d.path, name...)
		v, err := d.str("")
		if errors.Is(err, errNotText) {
			return badName(name, maxName)
		}
		s = &v
		return err
	})
	return s, err
}

// configureName is namespace or task: from the options, else from the top level. Empty counts as absent; null resets only in the options.
func configureName(nested, top map[string][]byte, name string) (*setting, error) {
	for _, from := range []map[string][]byte{nested, top} {
		raw, ok := from[name]
		if !ok {
			continue
		}
		if string(raw) == "null" {
			if nested != nil && bytes.Equal(raw, nested[name]) {
				return &setting{reset: true}, nil
			}
			continue
		}
		s, err := configureText(from, name)
		if err != nil {
			return nil, err
		}
		if *s == "" {
			continue
		}
		if !validName(*s, maxName) {
			return nil, badName(name, maxName)
		}
		return &setting{value: *s}, nil
	}
	return nil, nil
}

func (a *API) configure(w http.ResponseWriter, r *request) error {
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	c, err := readConfigure(body)
	if err != nil {
		return err
	}
	if c.queue == nil || *c.queue == "" {
		return bad("queue is required")
	}
	if !validName(*c.queue, maxName) {
		return badName("queue", maxName)
	}
	replace := false
	if c.mode != nil {
		switch *c.mode {
		case "merge":
		case "replace":
			replace = true
		default:
			return bad(`mode must be "merge" or "replace", got "%s"`, *c.mode)
		}
	}
	values := make(map[string]any)
	for i := range options {
		o := &options[i]
		raw, ok := c.options[o.name]
		if !ok {
			continue
		}
		v, err := o.parse(raw)
		if err != nil {
			return err
		}
		if o.name == "encryptionEnabled" && v == true && !a.HasKey {
			return o.bad("ENCRYPTION_KEY is not configured")
		}
		values[o.name] = v
	}
	q, err := r.engine.Catalog.Configure(r.Context(), *c.queue, func(q *catalog.Queue) error {
		namespace, task := catalog.Derive(q.Name)
		if replace || !q.Configured {
			enabled, completed := q.RetentionEnabled, q.CompletedRetentionSeconds
			for i := range options {
				options[i].set(q, options[i].def)
			}
			q.Namespace, q.Task = namespace, task
			if !replace { // the keep_consumed of a stream that a publish made; else they are the defaults
				q.RetentionEnabled, q.CompletedRetentionSeconds = enabled, completed
			}
		}
		for i := range options {
			if v, ok := values[options[i].name]; ok {
				options[i].set(q, v)
			}
		}
		q.Namespace = c.namespace.apply(q.Namespace, namespace)
		q.Task = c.task.apply(q.Task, task)
		return nil
	})
	if err != nil {
		return a.databaseError(r, err, "configure failed")
	}
	if a.Changed != nil {
		a.Changed(q.ID)
	}
	return a.write(w, http.StatusOK, appendConfigured(q))
}

func (s *setting) apply(now, derived string) string {
	switch {
	case s == nil:
		return now
	case s.reset:
		return derived
	}
	return s.value
}

func appendConfigured(q *catalog.Queue) []byte {
	b := appendUUID([]byte(`{"configured":true,"queueId":"`), q.PublicID)
	b = quote(append(b, `","partitionId":null,"queue":`...), q.Name)
	b = quote(append(b, `,"namespace":`...), q.Namespace)
	b = quote(append(b, `,"task":`...), q.Task)
	b = append(b, `,"storage":"segments","options":{`...)
	return append(appendOptions(b, q), "}}"...)
}

func appendOptions(b []byte, q *catalog.Queue) []byte {
	for i := range options {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(quote(b, options[i].name), ':')
		switch p := options[i].number(q).(type) {
		case *int32:
			b = strconv.AppendInt(b, int64(*p), 10)
		case *int64:
			b = strconv.AppendInt(b, *p, 10)
		case *bool:
			b = strconv.AppendBool(b, *p)
		case *string:
			b = quote(b, *p)
		}
	}
	return b
}

func (a *API) deleteQueue(w http.ResponseWriter, r *request) error {
	queue := r.params[0]
	if !validName(queue, maxName) {
		return badName("queue", maxName)
	}
	id, existed, err := r.engine.Catalog.Delete(r.Context(), queue)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	if !existed {
		b := quote([]byte(`{"deleted":false,"queue":`), queue)
		return a.write(w, http.StatusOK, append(b, `,"existed":false,"message":"Queue not found, nothing was deleted"}`...))
	}
	if a.Changed != nil {
		a.Changed(id)
	}
	b := quote([]byte(`{"deleted":true,"queue":`), queue)
	return a.write(w, http.StatusOK, append(b, `,"existed":true}`...))
}

// databaseError is the answer when a statement of a route failed: "pool" without a connection, else the route's own text.
func (a *API) databaseError(r *request, err error, text string) error {
	var known *httpError
	switch {
	case errors.As(err, &known), r.Context().Err() != nil:
		return err
	case errors.Is(r.engine.Unavailable(err), errNoConnection):
		a.Metrics.Total(metrics.DatabaseErrors, 1)
		return failed("pool")
	}
	a.Metrics.Total(metrics.DatabaseErrors, 1)
	if !errors.Is(err, errUnknown) { // whose flush has said it
		a.Log.Error(text, "path", r.URL.Path, "error", db.Text(err))
	}
	return failed(text)
}
