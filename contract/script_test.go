package contract

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"ferrymq/dbtest"
)

// slack is added to every upper bound of time: scripts share the machine.
const slack = 400 * time.Millisecond

type line struct {
	n int
	s string
}

// script is a running script.
type script struct {
	t       *testing.T
	bin     string
	file    string
	dsn     string
	lines   []line
	pos     int
	env     []string
	brokers map[int]*broker
	all     []*broker
	calls   map[string]*call
	vars    map[string]string
	client  *http.Client
}

// call is a request and, once done is closed, its answer.
type call struct {
	label      string
	method     string // "": a raw request
	path       string
	send       func(context.Context) (*http.Response, error)
	ctx        context.Context
	cancel     context.CancelFunc
	start, end time.Time
	resp       *http.Response
	body       string
	err        error
	done       chan struct{}
}

// answer is what a call must answer.
type answer struct {
	status        int
	within, after time.Duration
	header        [][2]string
	body          string
	hasBody       bool
	match         []string
	paths         [][2]string
}

// errScript ends a scenario: its text is wrong, or a value it needs is missing.
type errScript struct{ error }

func run(t *testing.T, bin, file, text string) {
	s := &script{
		t: t, bin: bin, file: strings.TrimPrefix(file, "testdata/"), dsn: dbtest.New(t),
		brokers: map[int]*broker{}, calls: map[string]*call{}, vars: map[string]string{},
		client: &http.Client{
			Transport:     &http.Transport{MaxIdleConnsPerHost: 32},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
	var lines []line
	for i, l := range strings.Split(text, "\n") {
		lines = append(lines, line{i + 1, strings.TrimRight(l, " \t\r")})
	}
	s.lines = unroll(lines)
	defer s.end()
	for s.pos < len(s.lines) {
		at := s.lines[s.pos].n
		err := s.step()
		if err == nil {
			continue
		}
		t.Errorf("%s:%d: %v", s.file, at, err)
		if errors.As(err, new(errScript)) {
			for s.pos < len(s.lines) && !strings.HasPrefix(s.lines[s.pos].s, "##") {
				s.pos++
			}
			s.cancelAll()
		}
	}
}

func (s *script) cancelAll() {
	for _, c := range s.calls {
		c.cancel()
		<-c.done
	}
	clear(s.calls)
}

func (s *script) end() {
	s.cancelAll()
	s.client.CloseIdleConnections()
	for _, b := range s.brokers {
		if err := b.stop(); err != nil {
			s.t.Errorf("%s: %v", s.file, err)
		}
	}
	http.DefaultClient.CloseIdleConnections()
	for i, b := range s.all {
		if s.t.Failed() {
			s.t.Logf("log of broker process %d:\n%s", i+1, b.log)
		}
	}
}

// unroll repeats the lines of for loops.
func unroll(in []line) (out []line) {
	for i := 0; i < len(in); i++ {
		words := strings.Fields(in[i].s)
		if len(words) < 4 || words[0] != "for" || words[2] != "in" {
			out = append(out, in[i])
			continue
		}
		end := i
		for depth := 1; depth > 0; {
			end++
			if f := strings.Fields(in[end].s); len(f) > 0 {
				if f[0] == "for" {
					depth++
				} else if f[0] == "end" && len(f) == 1 {
					depth--
				}
			}
		}
		for _, w := range words[3:] {
			var body []line
			for _, l := range in[i+1 : end] {
				for i, name := range strings.Split(words[1], "|") {
					re := regexp.MustCompile(`\$` + name + `\b`)
					l.s = re.ReplaceAllLiteralString(l.s, strings.Split(w, "|")[i])
				}
				body = append(body, l)
			}
			out = append(out, unroll(body)...)
		}
		i = end
	}
	return out
}

// next takes lines up to a blank one (taken too) or one that stop accepts (left).
func (s *script) next(stop func(string) bool) (lines []string) {
	for ; s.pos < len(s.lines); s.pos++ {
		l := s.lines[s.pos].s
		if stop(l) {
			return lines
		}
		if l == "" {
			s.pos++
			return lines
		}
		lines = append(lines, l)
	}
	return lines
}

func isAnswer(l string) bool { return strings.HasPrefix(l, "=>") }

func (s *script) step() error {
	l := s.lines[s.pos].s
	where := fmt.Sprintf("%s:%d", s.file, s.lines[s.pos].n)
	s.pos++
	verb, rest, _ := strings.Cut(l, " ")
	switch {
	case l == "" || strings.HasPrefix(l, "#"):
		return nil
	case verb == "env":
		if len(s.all) > 0 {
			return errScript{errors.New("env after a broker started")}
		}
		s.env = append(s.env, repeats(rest))
		return nil
	case verb == "broker":
		f := strings.Fields(repeats(rest))
		n, err := strconv.Atoi(f[0])
		if err != nil {
			return errScript{err}
		}
		return s.startBroker(n, f[1:])
	case verb == "stop" || verb == "term":
		n, err := strconv.Atoi(rest)
		b := s.brokers[n]
		if err != nil || b == nil {
			return errScript{fmt.Errorf("no broker %q", rest)}
		}
		if verb == "term" {
			b.terminate()
			return nil
		}
		delete(s.brokers, n)
		return b.stop()
	case verb == "refuses":
		refuses(s.t, s.bin, s.dsn, where, strings.Fields(repeats(rest)))
		return nil
	case verb == "wait":
		d, err := time.ParseDuration(rest)
		if err != nil {
			return errScript{err}
		}
		time.Sleep(d)
		return nil
	case verb == "reconnect":
		dbtest.Reconnect(s.t)
		return nil
	case verb == "jwt":
		name, claims, _ := strings.Cut(rest, " ")
		return s.token(name, claims)
	case verb == "sql":
		return s.sql(rest)
	case verb == "database":
		return s.database(rest == "on")
	case verb == "cancel":
		c := s.calls[rest]
		if c == nil {
			return errScript{fmt.Errorf("no request %q", rest)}
		}
		delete(s.calls, rest)
		c.cancel()
		<-c.done
		return nil
	case verb == "await":
		return s.await(strings.Fields(rest))
	case verb == "&":
		name, rest, _ := strings.Cut(rest, " ")
		c, err := s.request(rest)
		if err != nil {
			return err
		}
		if s.calls[name] != nil {
			return errScript{fmt.Errorf("request %q is still running", name)}
		}
		s.calls[name] = c
		go c.run()
		return nil
	}
	c, err := s.request(l)
	if err != nil {
		return err
	}
	want, err := s.answers()
	if err != nil || len(want) != 1 {
		return errScript{fmt.Errorf("one answer wanted: %v", err)}
	}
	c.run()
	return s.check(c, want[0], c.start)
}

func (s *script) startBroker(n int, settings []string) error {
	ready := true
	env := append([]string{"DATABASE_URL=" + dbtest.Through(s.t, s.dsn), "PORT=0", "DB_POOL_SIZE=5"}, s.env...)
	if env[0] != "DATABASE_URL="+s.dsn {
		env = append(env, "DATABASE_DIRECT_URL="+s.dsn)
	}
	for _, w := range settings {
		if w == "unready" {
			ready = false
		} else {
			env = append(env, w)
		}
	}
	b, err := start(s.bin, env, ready)
	if b != nil {
		s.all = append(s.all, b)
		s.brokers[n] = b
	}
	if err != nil {
		return errScript{err}
	}
	return nil
}

var headerLine = regexp.MustCompile(`^([A-Z][A-Za-z]*(?:-[A-Za-z]+)*): ?(.*)$`)

// request reads "[@n] METHOD path" or "raw [n]" and the lines below it.
func (s *script) request(head string) (*call, error) {
	n := 1
	if strings.HasPrefix(head, "@") {
		num, rest, _ := strings.Cut(head[1:], " ")
		n, head = int(num[0]-'0'), rest
	}
	method, path, _ := strings.Cut(head, " ")
	if method == "raw" && path != "" {
		n = int(path[0] - '0')
	}
	c := &call{label: head, done: make(chan struct{})}
	c.ctx, c.cancel = context.WithTimeout(context.Background(), 60*time.Second)
	lines := s.next(isAnswer)
	if s.brokers[n] == nil {
		if n != 1 {
			return nil, errScript{fmt.Errorf("broker %d does not run", n)}
		}
		if err := s.startBroker(1, nil); err != nil {
			return nil, err
		}
	}
	addr := s.brokers[n].addr
	if method == "raw" {
		for i, l := range lines {
			var err error
			if lines[i], err = s.fill(l); err != nil {
				return nil, err
			}
		}
		c.send = func(ctx context.Context) (*http.Response, error) { return sendRaw(ctx, addr, lines) }
		return c, nil
	}
	if !regexp.MustCompile(`^[A-Z]+$`).MatchString(method) {
		return nil, errScript{fmt.Errorf("no such step: %s", head)}
	}
	path, err := s.fill(path)
	if err != nil {
		return nil, err
	}
	c.method, c.path = method, path
	header := http.Header{}
	var body []byte
	for _, l := range lines {
		if m := headerLine.FindStringSubmatch(l); m != nil && body == nil {
			value, err := s.fill(m[2])
			if err != nil {
				return nil, err
			}
			header.Add(m[1], value)
			continue
		}
		l, err := s.fill(strings.TrimLeft(l, " "))
		if err != nil {
			return nil, err
		}
		if q, ok := strings.CutPrefix(l, "bytes "); ok {
			if l, err = strconv.Unquote(q); err != nil {
				return nil, errScript{fmt.Errorf("%s: %w", q, err)}
			}
		}
		body = append(body, l...)
	}
	c.send = func(ctx context.Context) (*http.Response, error) {
		var r io.Reader
		if body != nil {
			r = bytes.NewReader(body)
		}
		if header.Get("Transfer-Encoding") == "chunked" {
			r = io.MultiReader(r) // hides the length
		}
		req, err := http.NewRequestWithContext(ctx, method, "http://"+addr, r)
		if err != nil {
			return nil, err
		}
		opaque, query, _ := strings.Cut(path, "?")
		req.URL = &url.URL{Scheme: "http", Host: addr, Opaque: opaque, RawQuery: query}
		req.Header = header
		return s.client.Do(req)
	}
	return c, nil
}

// token makes a token, signed by HS256 with the key "contract".
func (s *script) token(name, claims string) error {
	var c jwt.MapClaims
	if err := json.Unmarshal([]byte(repeats(claims)), &c); err != nil {
		return errScript{err}
	}
	t, err := jwt.NewWithClaims(jwt.SigningMethodHS256, c).SignedString([]byte("contract"))
	s.vars[name] = t
	return err
}

func sendRaw(ctx context.Context, addr string, lines []string) (*http.Response, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { conn.Close() }) // the call's context ends after its body was read
	for _, l := range lines {
		if p, ok := strings.CutPrefix(l, "pause "); ok {
			d, err := time.ParseDuration(p)
			if err != nil {
				return nil, err
			}
			time.Sleep(d)
			continue
		}
		text, err := strconv.Unquote(`"` + strings.ReplaceAll(l, `"`, `\"`) + `"`)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", l, err)
		}
		if _, err := io.WriteString(conn, text); err != nil {
			break // the server may answer before it has read everything
		}
	}
	method, _, _ := strings.Cut(lines[0], " ")
	return http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: method})
}

func (c *call) run() {
	defer c.cancel()
	defer close(c.done)
	c.start = time.Now()
	c.resp, c.err = c.send(c.ctx)
	if c.err == nil {
		var body []byte
		body, c.err = io.ReadAll(c.resp.Body)
		c.resp.Body.Close()
		c.body = strings.TrimSuffix(string(body), "\n")
	}
	c.end = time.Now()
}

// answers reads the "=>" blocks at the current line.
func (s *script) answers() (all []answer, err error) {
	for s.pos < len(s.lines) && isAnswer(s.lines[s.pos].s) {
		f := strings.Fields(s.lines[s.pos].s)
		s.pos++
		a := answer{}
		if a.status, err = strconv.Atoi(f[1]); err != nil {
			return nil, errScript{err}
		}
		for i := 2; i+1 < len(f); i += 2 {
			d, err := time.ParseDuration(f[i+1])
			switch {
			case err != nil:
				return nil, errScript{err}
			case f[i] == "within":
				a.within = d
			case f[i] == "after":
				a.after = d
			default:
				return nil, errScript{fmt.Errorf("%q?", f[i])}
			}
		}
		for _, l := range s.next(isAnswer) {
			l = repeats(l)
			if m := headerLine.FindStringSubmatch(l); m != nil && !a.hasBody {
				a.header = append(a.header, [2]string{m[1], m[2]})
			} else if l[0] == '~' {
				a.match = append(a.match, l[1:])
			} else if l[0] == '.' {
				path, value, _ := strings.Cut(l[1:], " ")
				a.paths = append(a.paths, [2]string{path, value})
			} else {
				a.body, a.hasBody = a.body+strings.TrimLeft(l, " "), true
			}
		}
		all = append(all, a)
	}
	return all, nil
}

func (s *script) await(names []string) error {
	want, err := s.answers()
	if err != nil {
		return err
	}
	since := time.Now()
	var calls []*call
	for _, name := range names {
		c := s.calls[name]
		if c == nil {
			return errScript{fmt.Errorf("no request %q", name)}
		}
		delete(s.calls, name)
		<-c.done
		calls = append(calls, c)
	}
	if len(want) == 0 || len(want) > 2 || len(want) == 2 && len(calls) < 2 {
		return errScript{errors.New("await wants one answer, or two with several names")}
	}
	if len(want) == 2 {
		var errs []error
		one := slices.IndexFunc(calls, func(c *call) bool {
			err := s.check(c, want[0], since)
			errs = append(errs, err)
			return err == nil
		})
		if one < 0 {
			return fmt.Errorf("none of the answers fits: %w", errors.Join(errs...))
		}
		calls = slices.Delete(calls, one, one+1)
	}
	for _, c := range calls {
		err = errors.Join(err, s.check(c, want[len(want)-1], since))
	}
	return err
}

// check compares an answer; only when all of it fits its values are remembered.
func (s *script) check(c *call, want answer, since time.Time) (err error) {
	defer func() {
		if err == nil {
			return
		}
		text := fmt.Sprintf("%s: %%w", c.label)
		if c.resp != nil {
			text += fmt.Sprintf("\n  answer: %d %s", c.resp.StatusCode, strings.ReplaceAll(clip(c.body), "%", "%%"))
		}
		err = fmt.Errorf(text, err)
	}()
	if c.err != nil {
		return c.err
	}
	if c.resp.StatusCode != want.status {
		return fmt.Errorf("want status %d", want.status)
	}
	if d := c.end.Sub(since); want.within > 0 && d > want.within+slack {
		return fmt.Errorf("want it within %v, took %v", want.within, d)
	}
	if d := c.end.Sub(c.start); d < want.after {
		return fmt.Errorf("want it after %v, took %v", want.after, d)
	}
	if err := always(c); err != nil {
		return err
	}
	if err := asDescribed(c); err != nil {
		return err
	}
	vars := maps.Clone(s.vars)
	for _, h := range want.header {
		got, has := c.resp.Header.Get(h[0]), c.resp.Header.Values(h[0]) != nil
		if h[1] == "-" {
			if has {
				return fmt.Errorf("has header %s: %s", h[0], got)
			}
		} else if err := match(vars, h[1], got); err != nil {
			return fmt.Errorf("header %s: %w", h[0], err)
		}
	}
	for _, m := range want.match {
		m, err := fill(vars, m, regexp.QuoteMeta)
		if err != nil {
			return err
		}
		re, err := regexp.Compile(m)
		if err != nil {
			return errScript{err}
		}
		if !re.MatchString(c.body) {
			return fmt.Errorf("does not match %s", m)
		}
	}
	for _, p := range want.paths {
		got, err := lookup(json.RawMessage(c.body), p[0])
		if err != nil {
			return err
		}
		if value, ok := strings.CutPrefix(p[1], "== "); ok {
			var a, b any
			if json.Unmarshal([]byte(value), &a) != nil || json.Unmarshal([]byte(got), &b) != nil || !reflect.DeepEqual(a, b) {
				return fmt.Errorf(".%s: want the value %s, got %s", p[0], value, got)
			}
		} else if err := match(vars, p[1], got); err != nil {
			return fmt.Errorf(".%s: %w", p[0], err)
		}
	}
	if want.hasBody {
		if err := match(vars, want.body, c.body); err != nil {
			return err
		}
	}
	s.vars = vars
	return nil
}

var foreign = regexp.MustCompile(`(?i)sqlstate|pgx|goroutine|queen|\.go:\d|postgres`)

// always checks what the contract promises of every answer.
func always(c *call) error {
	h, code := c.resp.Header, c.resp.StatusCode
	for k, v := range h {
		if foreign.MatchString(k + strings.Join(v, "")) {
			return fmt.Errorf("header %s: %s", k, v)
		}
	}
	if code == 204 {
		if c.body != "" || h.Values("Content-Length") != nil || h.Values("Content-Type") != nil || c.resp.TransferEncoding != nil {
			return fmt.Errorf("204 with body, Content-Length or Content-Type: %v %v", h, c.resp.TransferEncoding)
		}
		return nil
	}
	if ct := h.Get("Content-Type"); code == 200 && strings.HasPrefix(ct, "text/plain; version=0.0.4") {
		parser := expfmt.NewTextParser(model.UTF8Validation)
		if _, err := parser.TextToMetricFamilies(strings.NewReader(c.body + "\n")); err != nil {
			return fmt.Errorf("no metrics: %w", err)
		}
		return nil
	} else if ct != "application/json" {
		return fmt.Errorf("Content-Type %q", ct)
	}
	if strings.HasPrefix(c.label, "HEAD ") {
		if c.body != "" {
			return errors.New("HEAD with a body")
		}
	} else if !json.Valid([]byte(c.body)) {
		return errors.New("no JSON")
	}
	if code >= 400 && foreign.MatchString(c.body) {
		return fmt.Errorf("the error says %q", foreign.FindString(c.body))
	}
	if got := h.Get("WWW-Authenticate"); (code == 401) != (got == "Bearer") {
		return fmt.Errorf("%d with WWW-Authenticate %q", code, got)
	}
	if code == 405 && h.Get("Allow") == "" {
		return errors.New("405 without Allow")
	}
	probe := strings.HasPrefix(c.body, `{"status":`) || strings.HasPrefix(c.label, "HEAD ")
	if code == 503 {
		want := []string{"1", "2", "3"}
		if probe {
			want = []string{""}
		} else if strings.Contains(c.body, "maintenance") {
			want = []string{"5"}
		}
		if !slices.Contains(want, h.Get("Retry-After")) {
			return fmt.Errorf("503 with Retry-After %q", h.Get("Retry-After"))
		}
	}
	return nil
}

// lookup gives the raw values at a dotted path; * stands for every element.
func lookup(v json.RawMessage, path string) (string, error) {
	if path == "" {
		return string(bytes.TrimSpace(v)), nil
	}
	key, rest, _ := strings.Cut(path, ".")
	if key == "*" {
		var list []json.RawMessage
		if err := json.Unmarshal(v, &list); err != nil {
			return "", fmt.Errorf(".%s: %w", path, err)
		}
		var out []string
		for _, e := range list {
			s, err := lookup(e, rest)
			if err != nil {
				return "", err
			}
			out = append(out, s)
		}
		return strings.Join(out, " "), nil
	}
	if n, err := strconv.Atoi(key); err == nil {
		var list []json.RawMessage
		if err := json.Unmarshal(v, &list); err != nil || n >= len(list) {
			return "absent", err
		}
		return lookup(list[n], rest)
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(v, &object); err != nil {
		return "", fmt.Errorf(".%s: %w", path, err)
	}
	e, ok := object[key]
	if !ok {
		return "absent", nil
	}
	return lookup(e, rest)
}

var (
	placeholder = regexp.MustCompile(`\$([a-z_]\w*)(?::(uuid7|uuid|time6|time3|int|any)\b)?`)
	repeated    = regexp.MustCompile(`<([^<>]+)\*(\d+)>`)
	kinds       = map[string]*regexp.Regexp{
		"uuid":  regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`),
		"uuid7": regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}`),
		"time6": regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z`),
		"time3": regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z`),
		"int":   regexp.MustCompile(`^-?\d+`),
		"any":   regexp.MustCompile(`^(?:[^"\\]|\\.)*`),
	}
)

// match compares a text with a template and remembers its captures.
func match(vars map[string]string, template, got string) error {
	at := 0
	differs := func(want string) error {
		return fmt.Errorf("differs at byte %d\n  want: %s\n  got:  %s", at, clip(want), clip(got[at:]))
	}
	literal := func(want string) error {
		if !strings.HasPrefix(got[at:], want) {
			n := 0
			for n < len(want) && at+n < len(got) && want[n] == got[at+n] {
				n++
			}
			at += n
			return differs(want[n:])
		}
		at += len(want)
		return nil
	}
	for template != "" {
		m := placeholder.FindStringSubmatchIndex(template)
		if m == nil {
			m = []int{len(template), len(template)}
		}
		if err := literal(template[:m[0]]); err != nil {
			return err
		}
		if len(m) > 2 {
			name := template[m[2]:m[3]]
			if m[4] < 0 {
				v, ok := vars[name]
				if !ok {
					return errScript{fmt.Errorf("$%s is not known", name)}
				}
				if err := literal(v); err != nil {
					return fmt.Errorf("$%s %w", name, err)
				}
			} else {
				kind := template[m[4]:m[5]]
				v := kinds[kind].FindString(got[at:])
				if v == "" && kind != "any" {
					return differs("$" + name + ":" + kind)
				}
				if strings.HasPrefix(kind, "uuid") && name != "_" {
					for other, o := range vars {
						if o == v {
							return fmt.Errorf("$%s and $%s are the same: %s", name, other, v)
						}
					}
				}
				if name != "_" {
					vars[name] = v
				}
				at += len(v)
			}
		}
		template = template[m[1]:]
	}
	if at < len(got) {
		return differs("(end)")
	}
	return nil
}

func repeats(text string) string {
	return repeated.ReplaceAllStringFunc(text, func(m string) string {
		p := repeated.FindStringSubmatch(m)
		n, _ := strconv.Atoi(p[2])
		return strings.Repeat(p[1], n)
	})
}

func (s *script) fill(text string) (string, error) {
	return fill(s.vars, repeats(text), func(v string) string { return v })
}

func fill(vars map[string]string, text string, quote func(string) string) (out string, err error) {
	out = placeholder.ReplaceAllStringFunc(text, func(m string) string {
		name, _, _ := strings.Cut(m[1:], ":")
		v, ok := vars[name]
		if !ok {
			err = errScript{fmt.Errorf("$%s is not known", name)}
		}
		return quote(v) + strings.TrimPrefix(m, "$"+name)
	})
	return out, err
}

func clip(s string) string {
	if len(s) > 1500 {
		return fmt.Sprintf("%s… (%d bytes)", s[:1500], len(s))
	}
	return s
}

func (s *script) sql(statement string) error {
	var want []string
	for _, l := range s.next(func(string) bool { return false }) {
		if row, ok := strings.CutPrefix(l, "=> "); ok {
			want = append(want, row)
		} else {
			statement += " " + strings.TrimSpace(l)
		}
	}
	statement, err := s.fill(statement)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := pgconn.Connect(ctx, s.dsn)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	results, err := conn.Exec(ctx, statement).ReadAll()
	if err != nil {
		return err
	}
	var rows []string
	for _, r := range results {
		for _, row := range r.Rows {
			var cols []string
			for _, v := range row {
				if v == nil {
					v = []byte("null")
				}
				cols = append(cols, string(v))
			}
			rows = append(rows, strings.Join(cols, "|"))
		}
	}
	vars := maps.Clone(s.vars)
	if want == nil {
		return nil
	}
	if err := match(vars, strings.Join(want, "\n"), strings.Join(rows, "\n")); err != nil {
		return fmt.Errorf("sql: %w", err)
	}
	s.vars = vars
	return nil
}

// database lets connections in, or ends them all and lets none in.
func (s *script) database(on bool) error {
	cfg, err := pgconn.ParseConfig(s.dsn)
	if err != nil {
		return err
	}
	name := cfg.Database
	cfg.Database = "postgres"
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	statement := fmt.Sprintf(`alter database "%s" allow_connections %v`, name, on)
	if _, err := conn.Exec(ctx, statement).ReadAll(); err != nil || on {
		return err
	}
	_, err = conn.Exec(ctx, fmt.Sprintf(`select pg_terminate_backend(pid) from pg_stat_activity where datname = '%s'`, name)).ReadAll()
	return err
}
