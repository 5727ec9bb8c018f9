package handlers

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"

	"ferrymq/catalog"
)

// bodyReaders read the bodies of routes and say what they have understood; payloads are part of that as respell spells them.
var bodyReaders = map[string]func(body []byte) (any, error){
	"push": func(body []byte) (any, error) {
		items, err := readPush(body)
		for i := range items {
			items[i].payload = respelled(items[i].payload)
		}
		return items, err
	},
	"publish": func(body []byte) (any, error) {
		all, err := readPublish(body)
		var out []any
		for _, m := range all {
			out = append(out, orNone(m.key), m.id, string(respelled(m.payload)), string(respelled(m.headers)), m.delay)
		}
		return out, err
	},
	"transaction": func(body []byte) (any, error) {
		c, err := readTransaction(body)
		if err != nil {
			return nil, err
		}
		out := []any{c.required, c.pushes}
		for _, o := range c.items {
			if p := o.push; p != nil {
				out = append(out, p.queue, p.partition, p.transactionID, string(respelled(p.payload)), orNone(p.traceID))
			} else {
				out = append(out, o.ack.group, o.ack.said())
			}
		}
		return out, nil
	},
	"ack": func(body []byte) (any, error) {
		group, items, err := readAck(body)
		return []any{group, items[0].said()}, err
	},
	"acks": func(body []byte) (any, error) {
		group, items, err := readAcks(body)
		out := []any{group}
		for i := range items {
			out = append(out, items[i].said())
		}
		return out, err
	},
	"extend": func(body []byte) (any, error) { return readExtend(body), nil },
	"configure": func(body []byte) (any, error) {
		c, err := readConfigure(body)
		if err != nil {
			return nil, err
		}
		out := []any{orNone(c.queue), orNone(c.mode), orNone(c.namespace), orNone(c.task)}
		for i := range options {
			if raw, ok := c.options[options[i].name]; ok {
				v, err := options[i].parse(raw)
				if err != nil {
					return nil, err
				}
				out = append(out, options[i].name, v)
			}
		}
		return out, nil
	},
	"trace": func(body []byte) (any, error) {
		t, err := readTrace(body)
		t.Data = respelled(t.Data)
		return t, err
	},
	"target": func(body []byte) (any, error) { return readTarget(body, false) },
	"receive": func(body []byte) (any, error) {
		most, wait, consumer, err := readReceive(body)
		if err == nil && (most < 1 || most > maxReceive || wait < 0 || wait > maxWaitSeconds*time.Second || len(consumer) > maxConsumer) {
			err = fmt.Errorf("out of range: %d, %v, %q", most, wait, consumer)
		}
		return []any{most, wait, consumer}, err
	},
	"settle": func(body []byte) (any, error) {
		all, err := readSettling(body, func(d *document, name string) error { return d.skip() })
		var out []any
		for _, s := range all {
			out = append(out, text(s.sent))
		}
		return out, err
	},
	"selection": func(body []byte) (any, error) {
		s, err := readSelection(body)
		out := []any{s.named, orNone(s.signature), s.all}
		for _, id := range s.ids {
			out = append(out, text(id))
		}
		return out, err
	},
	"stream": func(body []byte) (any, error) {
		e, err := readStreamEdit(body)
		q := &catalog.Queue{}
		if err == nil {
			err = e.apply(q)
		}
		return fmt.Sprint(q.UnkeyedLanes, q.DedupWindowSeconds, q.RetentionEnabled, q.RetentionSeconds, q.CompletedRetentionSeconds), err
	},
	"subscription": func(body []byte) (any, error) {
		e, err := readSubscriptionEdit(body)
		if err != nil {
			return nil, err
		}
		policy := catalog.DefaultPolicy()
		err = e.apply(&policy)
		if err == nil && (policy.LeaseSeconds < 1 || policy.Initial < 0 || policy.Max < policy.Initial || policy.Multiplier < 1) {
			err = fmt.Errorf("out of range: %+v", policy)
		}
		start := "none"
		if e.start != nil {
			start = fmt.Sprint(e.start.Mode, e.start.At)
		}
		return fmt.Sprint(orNone(e.stream), start, policy), err
	},
	"place": func(body []byte) (any, error) {
		var start *catalog.Start
		err := parse(body, func(d *document) (err error) { start, err = d.place(); return err })
		if err != nil || start == nil {
			return nil, err
		}
		return fmt.Sprint(start.Mode, start.At), nil
	},
	"key": func(body []byte) (any, error) {
		name, scopes, err := readKey(body)
		return []any{name, scopes}, err
	},
}

// orNone is what a pointer points to, so that two of them can be compared as text.
func orNone[T any](p *T) any {
	if p == nil {
		return "none"
	}
	return fmt.Sprintf("%+q", any(*p))
}

func (it *ackItem) said() any {
	return []any{orNone(it.transactionID), orNone(it.partitionID), orNone(it.status), orNone(it.error), orNone(it.leaseID)}
}

// respelled is a JSON value that means the same and looks different: every character of every string is escaped, and there are
// spaces wherever they may be. Text that has no other spelling, with half of a surrogate pair in it, stays as it is.
func respelled(value []byte) []byte {
	if value == nil {
		return nil
	}
	var out []byte
	d := jsontext.NewDecoder(bytes.NewReader(value), jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))
	for {
		kind, length := d.StackIndex(d.StackDepth())
		switch k := d.PeekKind(); {
		case k == '}' || k == ']' || d.StackDepth() == 0 || length == 0:
		case kind == '{' && length%2 == 1:
			out = append(out, "\t:"...)
		default:
			out = append(out, "\r,\n"...)
		}
		var raw []byte
		if k := d.PeekKind(); k == '{' || k == '[' || k == '}' || k == ']' {
			t, err := d.ReadToken()
			if err != nil {
				return nil
			}
			raw = []byte(t.String())
		} else {
			v, err := d.ReadValue()
			if err != nil {
				break
			}
			raw = v
		}
		if raw[0] == '"' {
			if s, err := jsontext.AppendUnquote(nil, raw); err == nil {
				raw = []byte{'"'}
				for _, r := range string(s) {
					if r < 0x10000 {
						raw = fmt.Appendf(raw, `\u%04X`, r)
					} else {
						raw = utf8.AppendRune(raw, r)
					}
				}
				raw = append(raw, '"')
			}
		}
		out = append(append(append(out, ' '), raw...), ' ')
	}
	return out
}

func TestRespelled(t *testing.T) {
	for in, want := range map[string]string{`{"a":[1,"é\n",{}],"a":null}`: " {  \"\\u0061\" \t: [  1 \r,\n \"\\u00E9\\u000A\" \r,\n {  }  ] \r,\n \"\\u0061\" \t: null  } ", `"\ud800"`: ` "\ud800" `, `"😀"`: ` "😀" `} {
		if got := string(respelled([]byte(in))); got != want {
			t.Errorf("%s: %q, want %q", in, got, want)
		}
	}
}

// FuzzBodies gives the decoders of bodies anything. Either it is turned down with a text for the client, or it is understood, and then
// so is everything that means the same.
func FuzzBodies(f *testing.F) {
	for name, all := range bodies {
		for _, body := range all {
			f.Add([]byte(fill(body, map[string]string{"queue": "q", "partition": "5d0f6f0a-9c1e-4b7e-8f53-0d6c2f1a7e10", "stream": "s"})))
		}
		_ = name
	}
	for _, body := range []string{``, `"latest"`, `"2026-03-01T00:00:00+01:00"`, `{"delivery_ids":["dlv_0"]}`, `[`, `{"items":[{"queue":"a","queue":"b","payload":1,"payload":2}]}`, "{\"items\":[{\"queue\":\"\xff\"}]}",
		`{"items":[{"queue":"\ud800","payload":0}]}`, `{"a":` + strings.Repeat("[", 20_000), `{"max_messages":1e-400,"wait_seconds":-1e400}`, `{"options":{"leaseTime":300.0000000000000000001,"maxSize":1e12}}`,
		`{"ids":[1],"ids":null}`, `{"operations":[{"type":"push","items":null,"queue":"q"}]}`, "\ufeff{}", `{} {}`} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var other []byte
		for name, decode := range bodyReaders {
			got, err := decode(bytes.Clone(body))
			if err != nil {
				var known *httpError
				if !errors.As(err, &known) || known.status != http.StatusBadRequest || known.text == "" || !utf8.ValidString(known.text) {
					t.Fatalf("%s: %#v is no answer", name, err)
				}
			}
			if !utf8.Valid(body) || !whole(body) {
				if err == nil && len(body) > 0 && name != "extend" {
					t.Fatalf("%s: took what is no JSON: %v", name, got)
				}
				continue
			}
			if other == nil {
				if other = respelled(body); other == nil {
					return
				}
			}
			again, err2 := decode(bytes.Clone(other))
			if (err == nil) != (err2 == nil) || err == nil && fmt.Sprintf("%q", got) != fmt.Sprintf("%q", again) {
				t.Fatalf("%s: %q, %v\nspelled %s:\n%q, %v", name, got, err, other, again, err2)
			}
		}
	})
}

// whole says whether a text is one JSON value.
func whole(body []byte) bool {
	d := jsontext.NewDecoder(bytes.NewReader(body), jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))
	if d.SkipValue() != nil {
		return false
	}
	_, err := d.ReadToken()
	return errors.Is(err, io.EOF)
}
