package handlers

import (
	"context"
	"errors"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"ferrymq/catalog"
	"ferrymq/groupcommit"
	"ferrymq/segment"
)

// project is what the names of a /v1 call are scoped to.
type project struct {
	*catalog.Catalog
	name string
}

const defaultProject = "default"

// project is that of the API key that the call came with, else the one that it names, or the default one. One that does not exist answers like a name that does not exist in it.
func (a *API) project(r *request) (*project, error) {
	if r.key != nil {
		return &project{r.engine.Catalog.Of(r.key.Project), r.key.Name}, nil
	}
	name := query(r.URL).Get("project")
	if name == "" || name == defaultProject {
		return &project{r.engine.Catalog, defaultProject}, nil
	}
	if !validName(name, maxName) {
		return nil, badName("project", maxName)
	}
	c, err := r.engine.Catalog.In(r.Context(), name)
	if err != nil {
		return nil, a.databaseError(r, err, "query failed")
	}
	return &project{c, name}, nil // c is nil for a project that does not exist
}

// missing is the 404 of a name.
func (p *project) missing(what, name string) error {
	return notFound("no " + what + " named " + name + " in project " + p.name)
}

// stream finds the stream that the path names.
func (a *API) stream(r *request) (*project, *catalog.Queue, error) {
	p, err := a.project(r)
	if err != nil {
		return nil, nil, err
	}
	name := r.params[0]
	if !validName(name, maxName) {
		return nil, nil, badName("stream", maxName)
	}
	if p.Catalog == nil {
		return nil, nil, p.missing("stream", name)
	}
	q, err := p.Queue(r.Context(), name)
	if err != nil {
		return nil, nil, a.databaseError(r, err, "query failed")
	}
	if q == nil {
		return nil, nil, p.missing("stream", name)
	}
	return p, q, nil
}

// paging reads limit and cursor of a listing. from is what the cursor carries: nil on the first page, else size bytes, or any number
// of them when size is negative.
func paging(r *request, size int) (limit int64, from []byte, err error) {
	p := &params{values: query(r.URL)}
	limit = p.number("limit", 100, 1, 1000)
	if text := p.text("cursor"); text != "" {
		if size < 0 {
			size = crockford.DecodedLen(len(text))
		}
		var ok bool
		if from, ok = decodeID(text, "", size); !ok {
			p.fail("cursor")
		}
	}
	return limit, from, p.err
}

// more cuts rows, of which one more than limit was asked for, to a page. next is its cursor, made of the place of its last row; nil at the end.
func more[T any](rows []T, limit int64, place func(T) []byte) (page []T, next *string) {
	if int64(len(rows)) <= limit {
		return rows, nil
	}
	rows = rows[:limit]
	cursor := crockford.EncodeToString(place(rows[limit-1]))
	return rows, &cursor
}

// appendNext is the end of a listing, its closing brace included. Nil: there is no more.
func appendNext(b, from []byte) []byte {
	if from == nil {
		return append(b, `,"next_cursor":null}`...)
	}
	return append(appendID(append(b, `,"next_cursor":"`...), "", from), `"}`...)
}

// appendMessage is a message as /v1 shows it, without the braces.
func (p *project) appendMessage(b []byte, stream string, s *groupcommit.Span, g *groupcommit.Segment, m *segment.Raw) []byte {
	b = appendMessageID(append(b, `"id":"`...), s.Row.ID, s.Start)
	b = quote(append(b, `","stream":`...), stream)
	b = quote(append(b, `,"project":`...), p.name)
	b = append(b, `,"key":`...)
	if s.Partition.Hidden {
		b = append(b, "null"...)
	} else {
		b = quote(b, s.Partition.Name)
	}
	b = append(append(b, `,"payload":`...), m.Payload...)
	b = append(b, `,"headers":`...)
	if len(m.Headers) > 0 {
		b = append(b, m.Headers...)
	} else {
		b = append(b, "{}"...)
	}
	b = g.CreatedAt.UTC().AppendFormat(append(b, `,"published_at":"`...), timeMilli)
	return append(b, '"')
}

// number reads a JSON number; one that is too large is infinite.
func number(raw []byte) (float64, bool) {
	if len(raw) == 0 || raw[0] == '"' {
		return 0, false
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	return f, err == nil || errors.Is(err, strconv.ErrRange)
}

// parseDuration reads a Go-style duration that is not negative.
func parseDuration(s string) (time.Duration, bool) {
	d, err := time.ParseDuration(s)
	return d, err == nil && d >= 0 && !strings.HasPrefix(s, "-") && !strings.HasPrefix(s, "+")
}

// formatDuration writes what parseDuration reads, without the zeros of time.Duration.String.
func formatDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = s[:len(s)-2]
	}
	if strings.HasSuffix(s, "h0m") {
		s = s[:len(s)-2]
	}
	return s
}

// maxSignature is how long the signature of an error may be, in bytes.
const maxSignature = 200

// No backtracking: the time is linear in the text. An apostrophe within a word quotes nothing.
var signatureParts = []struct {
	find *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}`), "<uuid>"},
	{regexp.MustCompile(`"(?:[^"\\]|\\.)*"|\B'(?:[^'\\]|\\.)*'\B`), "<text>"},
	{regexp.MustCompile(`\b0[xX][0-9a-fA-F]+\b|\b[a-fA-F]{9,}\b|\b[0-9a-fA-F]*[0-9][0-9a-fA-F]*[a-fA-F][0-9a-fA-F]*\b|\b[0-9a-fA-F]*[a-fA-F][0-9a-fA-F]*[0-9][0-9a-fA-F]*\b`), "<hex>"},
	{regexp.MustCompile(`[0-9]+(?:\.[0-9]+)?`), "<n>"},
	{regexp.MustCompile(`\s+`), " "},
}

// signature is an error's text without what differs from one message to the next: dead letters are grouped by it.
func signature(text string) string {
	text = strings.TrimSpace(groupcommit.Clip(text))
	for _, p := range signatureParts {
		text = p.find.ReplaceAllString(text, p.with)
	}
	for n := maxSignature; len(text) > maxSignature; n-- {
		if utf8.RuneStart(text[n]) {
			text = text[:n]
		}
	}
	return text
}

// pagingNames is paging of a list in order of names.
func pagingNames(r *request) (limit int64, after string, err error) {
	limit, raw, err := paging(r, -1)
	if after = string(raw); err == nil && after != "" && !validName(after, maxName) {
		err = badQuery("cursor")
	}
	return limit, after, err
}

// flag is the next value, a boolean, or def for null.
func (d *document) flag(def bool) (bool, error) {
	switch d.kind() {
	case 't', 'f', 'n':
		err := d.boolean(&def)
		return def, err
	}
	if _, err := d.value(); err != nil {
		return false, err
	}
	return false, bad("%s must be true or false", d.path)
}

// whole is the next value, a whole number of lo to hi, or def for null.
func (d *document) whole(def, lo, hi int32) (int32, error) {
	if null, err := d.null(); null || err != nil {
		return def, err
	}
	raw, err := d.value()
	if err != nil {
		return 0, err
	}
	n, ok := wholeNumber(raw)
	if !ok || n < int64(lo) || n > int64(hi) {
		return 0, bad("%s must be a whole number of %d to %d", d.path, lo, hi)
	}
	return int32(n), nil
}

// duration is the next value, a duration of at most max, or def for null. It is rounded up to a multiple of unit.
func (d *document) duration(def, max, unit time.Duration) (time.Duration, error) {
	if null, err := d.null(); null || err != nil {
		return def, err
	}
	wrong := bad("%s must be a duration of 0s to %s, such as \"30s\"", d.path, formatDuration(max))
	if d.kind() != '"' {
		if _, err := d.value(); err != nil {
			return 0, err
		}
		return 0, wrong
	}
	s, err := d.str("")
	if err != nil && !errors.Is(err, errNotText) {
		return 0, err
	}
	t, ok := parseDuration(s)
	if !ok || t > max {
		return 0, wrong
	}
	return (t + unit - 1) / unit * unit, nil
}

// parseStart reads where a subscription is to begin.
func parseStart(s string) (catalog.Start, bool) {
	switch s {
	case "earliest":
		return catalog.All(), true
	case "latest":
		return catalog.Start{Mode: "new"}, true
	}
	t, err := time.Parse(time.RFC3339, s)
	t = t.UTC().Truncate(time.Millisecond) // as it is shown
	return catalog.Start{Mode: "time", At: &t}, err == nil && t.Year() >= 1 && t.Year() < 10_000
}

const aPlace = `"earliest", "latest" or an RFC 3339 time`

// place is the next value, where to begin; nil for null.
func (d *document) place() (*catalog.Start, error) {
	if null, err := d.null(); null || err != nil {
		return nil, err
	}
	raw, err := d.value()
	if err != nil {
		return nil, err
	}
	if start, ok := parseStart(text(raw)); ok {
		return &start, nil
	}
	return nil, bad("%s must be %s", d.path, aPlace)
}

// countTime bounds how long the numbers of one stream or subscription are counted for an answer.
const countTime = 5 * time.Second

// counted runs a count, for so long as it may take.
func counted[T any](a *API, r *request, count func(ctx context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(r.Context(), countTime)
	defer cancel()
	n, err := count(ctx)
	if err != nil {
		if r.Context().Err() == nil && ctx.Err() != nil {
			return n, busy("counting takes too long")
		}
		return n, a.databaseError(r, err, "query failed")
	}
	return n, nil
}
