package handlers

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

// body reads the whole request body, at most MaxBody bytes of it.
func (a *API) body(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	var buf bytes.Buffer
	if n := r.ContentLength; n > a.MaxBody {
		return nil, errTooLarge
	} else if n > 0 {
		buf.Grow(int(min(n, 1<<20)) + bytes.MinRead)
	}
	_, err := buf.ReadFrom(http.MaxBytesReader(w, r.Body, a.MaxBody))
	if err != nil {
		return nil, bodyError(err)
	}
	return buf.Bytes(), nil
}

// bodyError is the answer to a body that cannot be read to its end.
func bodyError(err error) error {
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		return errTooLarge
	}
	return bad("bad body: it ended early")
}

// document walks one JSON text without building it: values are slices of the body, so a payload comes out as it came in.
// Object members are matched by exact spelling, the last of equal ones counts, unknown ones are skipped.
type document struct {
	text []byte
	dec  *jsontext.Decoder
	path []byte // where the walk is, for errors
}

var decoders = sync.Pool{New: func() any { return new(jsontext.Decoder) }}

// parse walks body with fn and makes sure that nothing follows it. Errors are 400 "bad body".
func parse(body []byte, fn func(d *document) error) error {
	if !utf8.Valid(body) {
		return bad("bad body: not valid UTF-8")
	}
	d := &document{text: body, dec: decoders.Get().(*jsontext.Decoder)}
	defer decoders.Put(d.dec)
	// Escaped lone surrogates are JSON and may stand in a payload; text turns them down where text is read.
	d.dec.Reset(bytes.NewBuffer(body), jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))
	if err := fn(d); err != nil {
		return d.wrap(err)
	}
	if _, err := d.dec.ReadToken(); !errors.Is(err, io.EOF) {
		return bad("bad body: more than one JSON value")
	}
	return nil
}

func (d *document) wrap(err error) error {
	var known *httpError
	if errors.As(err, &known) {
		return err
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return bad("bad body: the JSON is incomplete")
	}
	var syntactic *jsontext.SyntacticError
	if errors.As(err, &syntactic) {
		return bad("bad body: invalid JSON at byte %d", syntactic.ByteOffset)
	}
	return bad("bad body: invalid JSON")
}

// wrong is a value of the wrong type at the current place.
func (d *document) wrong(want string) error {
	if len(d.path) == 0 {
		return bad("bad body: must be %s", want)
	}
	return bad("bad body: %s must be %s", d.path, want)
}

func (d *document) kind() jsontext.Kind { return d.dec.PeekKind() }

// value is the next value as it stands in the body.
func (d *document) value() ([]byte, error) {
	v, err := d.dec.ReadValue()
	if err != nil {
		return nil, err
	}
	end := d.dec.InputOffset()
	return d.text[end-int64(len(v)) : end : end], nil
}

func (d *document) skip() error { return d.dec.SkipValue() }

// boolean is the next value, a boolean, or nothing for null.
func (d *document) boolean(to *bool) error {
	switch d.kind() {
	case 't', 'f':
		*to = d.kind() == 't'
		return d.skip()
	case 'n':
		return d.skip()
	}
	return d.wrong("a boolean")
}

// null consumes a null and says whether it was one.
func (d *document) null() (bool, error) {
	if d.kind() != 'n' {
		return false, nil
	}
	return true, d.skip()
}

// object calls field for every member; field must consume the value.
func (d *document) object(field func(name string) error) error {
	if k := d.kind(); k != '{' {
		if k == 0 {
			return d.skip() // the syntax error
		}
		return d.wrong("an object")
	}
	if _, err := d.dec.ReadToken(); err != nil {
		return err
	}
	at := len(d.path)
	for d.kind() != '}' {
		raw, err := d.dec.ReadValue()
		if err != nil {
			return err
		}
		var name string
		if bytes.IndexByte(raw, '\\') < 0 {
			name = memberName(raw[1 : len(raw)-1])
		} else {
			unquoted, _ := jsontext.AppendUnquote(nil, raw)
			name = string(unquoted)
		}
		if at > 0 {
			d.path = append(d.path, '.')
		}
		d.path = append(d.path, name...)
		if err := field(name); err != nil {
			return err
		}
		d.path = d.path[:at]
	}
	_, err := d.dec.ReadToken()
	return err
}

// memberName avoids an allocation for the members that requests are made of.
func memberName(b []byte) string {
	switch string(b) {
	case "queue":
		return "queue"
	case "partition":
		return "partition"
	case "transactionId":
		return "transactionId"
	case "payload":
		return "payload"
	case "partitionId":
		return "partitionId"
	case "leaseId":
		return "leaseId"
	case "status":
		return "status"
	case "error":
		return "error"
	}
	return string(b)
}

// array calls element for every element; element must consume the value.
func (d *document) array(element func(i int) error) error {
	if k := d.kind(); k != '[' {
		if k == 0 {
			return d.skip()
		}
		return d.wrong("an array")
	}
	if _, err := d.dec.ReadToken(); err != nil {
		return err
	}
	at := len(d.path)
	for i := 0; d.kind() != ']'; i++ {
		d.path = append(strconv.AppendInt(append(d.path, '['), int64(i), 10), ']')
		if err := element(i); err != nil {
			return err
		}
		d.path = d.path[:at]
	}
	_, err := d.dec.ReadToken()
	return err
}

// str is the next value, a string. last is what the same member was before: an equal one is not copied again.
func (d *document) str(last string) (string, error) {
	if k := d.kind(); k != '"' {
		if k == 0 {
			return "", d.skip()
		}
		return "", d.wrong("a string")
	}
	raw, err := d.dec.ReadValue()
	if err != nil {
		return "", err
	}
	if inner := raw[1 : len(raw)-1]; bytes.IndexByte(inner, '\\') < 0 {
		if string(inner) == last {
			return last, nil
		}
		return string(inner), nil
	}
	s, err := jsontext.AppendUnquote(nil, raw)
	if err != nil { // a lone surrogate
		return "", errNotText
	}
	return string(s), nil
}

// text is a value as it stands in a body, if it is a string; else it is empty.
func text(raw []byte) string {
	s, err := jsontext.AppendUnquote(nil, raw)
	if err != nil {
		return ""
	}
	return string(s)
}

// errNotText is a JSON string that is no UTF-8: it escapes half of a surrogate pair.
var errNotText = errors.New("not text")

// name is the next value, a string of min..max bytes without NUL; errors are 400 "invalid <field>".
func (d *document) name(last string, max int) (string, error) {
	s, err := d.str(last)
	if errors.Is(err, errNotText) || (err == nil && !validName(s, max)) {
		return "", badName(string(d.path), max)
	}
	return s, err
}

// optionalName is name, or nil for null.
func (d *document) optionalName(max int) (*string, error) {
	if null, err := d.null(); null || err != nil {
		return nil, err
	}
	s, err := d.name("", max)
	return &s, err
}

// optionalText is any string, or nil for null. Half surrogate pairs become U+FFFD.
func (d *document) optionalText() (*string, error) { return d.optionalTextLike(nil) }

// optionalTextLike is optionalText. last is what the same member was before: an equal one is not copied again.
func (d *document) optionalTextLike(last *string) (*string, error) {
	if null, err := d.null(); null || err != nil {
		return nil, err
	}
	if d.kind() != '"' {
		s, err := d.str("")
		return &s, err
	}
	raw, err := d.dec.ReadValue()
	if err != nil {
		return nil, err
	}
	if last != nil && string(raw[1:len(raw)-1]) == *last && bytes.IndexByte(raw, '\\') < 0 {
		return last, nil
	}
	b, _ := jsontext.AppendUnquote(nil, raw)
	s := string(bytes.ToValidUTF8(b, []byte("\uFFFD")))
	return &s, nil
}

const (
	maxName          = 255
	maxTransactionID = 512
)

func validName(s string, max int) bool {
	return len(s) >= 1 && len(s) <= max && utf8.ValidString(s) && bytes.IndexByte([]byte(s), 0) < 0
}

func badName(field string, max int) error {
	return bad("invalid %s: must be 1..%d bytes of UTF-8 without NUL", field, max)
}

// quote appends s as a JSON string.
func quote(dst []byte, s string) []byte {
	out, err := jsontext.AppendQuote(dst, s)
	if err != nil { // not UTF-8: nothing stored is, so this is a client's own text
		out, _ = jsontext.AppendQuote(dst, string(bytes.ToValidUTF8([]byte(s), []byte("\uFFFD"))))
	}
	return out
}

// instant is a time in listings: UTC, three decimals, the zero time is null.
type instant time.Time

// MarshalJSON implements json.Marshaler.
func (t instant) MarshalJSON() ([]byte, error) {
	if time.Time(t).IsZero() {
		return []byte("null"), nil
	}
	return time.Time(t).UTC().AppendFormat(nil, `"`+timeMilli+`"`), nil
}

// timeMilli is the format of times in listings.
const timeMilli = "2006-01-02T15:04:05.000Z"

// httpError is an error that is an answer.
type httpError struct {
	status int
	text   string
	retry  int // seconds of Retry-After; 0: none
	raw    []byte
}

func (e *httpError) Error() string { return e.text }

func bad(format string, args ...any) error {
	return &httpError{status: http.StatusBadRequest, text: fmt.Sprintf(format, args...)}
}

var errTooLarge = &httpError{status: http.StatusRequestEntityTooLarge, text: "body too large"}

// failed is a 500 with a fixed text.
func failed(text string) error { return &httpError{status: http.StatusInternalServerError, text: text} }

// busy is a 503 that asks to come back soon.
func busy(text string) error {
	return &httpError{status: http.StatusServiceUnavailable, text: text, retry: retrySoon()}
}
