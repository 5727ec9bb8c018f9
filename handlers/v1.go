package handlers

import (
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
	name := r.URL.Query().Get("project")
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

// number reads a JSON number.
func number(raw []byte) (float64, bool) {
	if len(raw) == 0 || raw[0] == '"' {
		return 0, false
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	return f, err == nil
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
