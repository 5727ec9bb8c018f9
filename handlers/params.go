package handlers

import (
	"net/url"
	"strconv"
	"strings"
	"time"
)

func badQuery(name string) error { return bad("invalid query parameter %q", name) }

// params reads query parameters; the first that does not parse is its error.
type params struct {
	values url.Values
	err    error
}

// query splits a query at every & and at nothing else. A value whose escapes are broken is kept as what no parameter accepts:
// left out, as the library does it, a misspelt group would be queue mode, and a misspelt limit none.
func query(u *url.URL) url.Values {
	values := make(url.Values)
	for pair := range strings.SplitSeq(u.RawQuery, "&") {
		name, value, _ := strings.Cut(pair, "=")
		name, err := url.QueryUnescape(name)
		if err != nil || pair == "" {
			continue
		}
		text, err := url.QueryUnescape(value)
		if err != nil {
			text = "\xff" + value
		}
		values[name] = append(values[name], text)
	}
	return values
}

func (p *params) text(name string) string { return p.values.Get(name) }

func (p *params) fail(name string) {
	if p.err == nil {
		p.err = badQuery(name)
	}
}

// number is a decimal 64-bit integer held to lo..hi, or def.
func (p *params) number(name string, def, lo, hi int64) int64 {
	s := p.text(name)
	if s == "" {
		return def
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || s[0] == '+' {
		p.fail(name)
		return def
	}
	return min(max(n, lo), hi)
}

func (p *params) boolean(name string) bool {
	switch strings.ToLower(p.text(name)) {
	case "", "false", "0", "no":
		return false
	case "true", "1", "yes":
		return true
	}
	p.fail(name)
	return false
}

// name is a name within its limits, or def when absent.
func (p *params) name(name, def string) string {
	s := p.text(name)
	if s == "" {
		return def
	}
	if !validName(s, maxName) {
		p.fail(name)
	}
	return s
}

// parseTime reads RFC 3339, or an ISO 8601 date or date-time; without an offset it is UTC.
func parseTime(s string) (time.Time, bool) {
	// A plus sign that was not percent-encoded arrives as a space.
	if i := strings.LastIndexByte(s, ' '); i > len("2006-01-02T15") {
		s = s[:i] + "+" + s[i+1:]
	}
	for _, layout := range []string{time.RFC3339, "2006-01-02T15:04:05", "2006-01-02T15:04", "2006-01-02 15:04:05", "2006-01-02",
		"2006-01-02T15:04Z07:00", "2006-01-02T15:04:05Z0700"} {
		if t, err := time.Parse(layout, s); err == nil && t.Year() >= 1 && t.Year() < 10_000 {
			return t.UTC(), true
		}
	}
	return time.Time{}, false
}

// moment is a time in a query, or def when absent.
func (p *params) moment(name string, def time.Time) time.Time {
	s := p.text(name)
	if s == "" {
		return def
	}
	t, ok := parseTime(s)
	if !ok {
		p.fail(name)
	}
	return t
}

// page is limit (held to 1..1000) and offset (0 and up).
func (p *params) page(def int64) (limit, offset int64) {
	return p.number("limit", def, 1, 1000), p.number("offset", 0, 0, 1<<62)
}
