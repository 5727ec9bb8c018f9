package handlers

import (
	"bytes"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// FuzzPayload stores any payload: it is turned down because it is no JSON, or comes back byte for byte wherever it is shown.
func FuzzPayload(f *testing.F) {
	s := serve(f)
	ids := s.furnish(f)
	for _, p := range []string{`null`, `{}`, `[]`, `""`, `0`, `-0`, `1e400`, `-1e400`, `1e-400`, `1E+131073`, `1.10`, `0.000`, ` {"b" :` + "\t[1,\n 2 ] } ", `{"a":1,"a":2,"A":3}`, `"\ud800"`, `"\udc00\ud800"`, `"\u0000\/\u00e9é"`,
		`"</script>&\u2028` + "\u2028" + `"`, `{"":{"":[]}}`, `"`, `nul`, `01`, `+1`, `.5`, `1.`, `'a'`, "\"\xff\"", "\"\xc0\x80\"", "\"\xed\xa0\x80\"", "\"\x00\"", "\"\n\"", `[1,]`, `{"a"}`, `NaN`, `// x`, "\ufeff1",
		strings.Repeat("7", 200_000), `"` + strings.Repeat("x", 1<<20) + `"`, strings.Repeat("[", 9000) + strings.Repeat("]", 9000), strings.Repeat("[", 10_001) + strings.Repeat("]", 10_001)} {
		f.Add([]byte(p))
	}
	s.must(f, 200, "POST", "/v1/streams/payloads.v1/messages", `{"messages":[]}`)
	s.must(f, 200, "PUT", "/v1/subscriptions/payloads", `{"stream":"payloads.v1","retry":{"max_attempts":1}}`)
	group := 0
	f.Fuzz(func(t *testing.T, payload []byte) {
		want := bytes.Trim(payload, " \t\r\n")
		one := func(body string) (status int, took bool) {
			took = utf8.Valid(payload) && whole(payload) && whole([]byte(body))
			if status = 400; took {
				status = 200
			}
			return status, took
		}
		shows := func(answer, name string) {
			t.Helper()
			if !strings.Contains(answer, strconv.Quote(name)+":"+string(want)+",") && !strings.Contains(answer, strconv.Quote(name)+":"+string(want)+"}") {
				t.Fatalf("%s is not %s in %s", name, clipped(string(want)), clipped(answer))
			}
		}
		if !whole(payload) && whole([]byte(`[`+string(payload)+`]`)) {
			return // more than one
		}
		group++
		id := "id" + strconv.Itoa(group)
		push := `{"items":[{"queue":"payloads","transactionId":"` + id + `","payload":` + string(payload) + `}]}`
		status, took := one(push)
		if took {
			status = 201
		}
		pushed := s.must(t, status, "POST", "/api/v1/push", push)
		publish := `{"messages":[{"key":"k","headers":{"h":` + string(want) + `},"payload":` + string(payload) + `}]}`
		status, took = one(publish)
		s.must(t, status, "POST", "/v1/streams/payloads.v1/messages", publish)
		trace := `{"partitionId":"` + ids["partition"] + `","transactionId":"` + id + `","data":` + string(payload) + `}`
		_, traced := one(trace)
		if traced = traced && string(want) != "null"; traced {
			status = 201
		} else {
			status = 400
		}
		s.must(t, status, "POST", "/api/v1/traces", trace)
		if traced {
			shows(s.must(t, 200, "GET", fill("/api/v1/traces/<partition>/"+id, ids), ""), "data")
		}
		if !took {
			return
		}
		x := s.must(t, 200, "GET", "/api/v1/messages/"+member(t, pushed, "partitionId")+"/"+id, "")
		shows(x, "data")
		shows(x, "payload")
		shows(s.must(t, 200, "GET", "/api/v1/pop/queue/payloads?autoAck=true&batch=1", ""), "data")
		x = s.must(t, 200, "POST", "/v1/subscriptions/payloads/receive", `{"max_messages":1}`)
		shows(x, "payload")
		shows(x, "h")
		end := `{"delivery_ids":["` + member(t, x, "delivery_id") + `"]}`
		if group%2 == 0 {
			s.must(t, 200, "POST", "/v1/subscriptions/payloads/ack", end)
			return
		}
		s.must(t, 200, "POST", "/v1/subscriptions/payloads/nack", end)
		shows(s.must(t, 200, "GET", "/v1/subscriptions/payloads/dead-letters?limit=1", ""), "payload")
		s.must(t, 200, "POST", "/v1/subscriptions/payloads/dead-letters/redrive", `{"all":true}`)
		x = s.must(t, 200, "POST", "/v1/subscriptions/payloads/receive", `{"max_messages":1}`)
		shows(x, "payload")
		s.must(t, 200, "POST", "/v1/subscriptions/payloads/ack", `{"delivery_ids":["`+member(t, x, "delivery_id")+`"]}`)
	})
}

// FuzzIDs reads ids that nobody issued. What is an id has one spelling, and a delivery is taken only for what was issued as it is.
func FuzzIDs(f *testing.F) {
	a := &API{}
	var raw [38]byte
	copy(raw[:], a.tag(raw[:32])) // wrong, in the wrong place
	f.Add(string(appendMessageID(nil, 1, 2)), []byte{1})
	f.Add(string(appendScheduledID(nil, 7)), []byte{})
	f.Add(string(appendID(nil, deliveryPrefix, raw[:])), raw[:32])
	f.Add(string(a.appendDeliveryID(nil, 1<<40, 3, [16]byte{6: 0x70, 8: 0x80})), []byte("x"))
	f.Add("msg_\u00e9", []byte(nil))
	f.Add("dlv_", []byte{0xff})
	f.Fuzz(func(t *testing.T, s string, b []byte) {
		if p, o, ok := decodeMessageID(s); ok && string(appendMessageID(nil, p, o)) != s {
			t.Fatalf("%q is another spelling of message %d %d", s, p, o)
		}
		if n, ok := decodeScheduledID(s); ok && string(appendScheduledID(nil, n)) != s {
			t.Fatalf("%q is another spelling of the delayed message %d", s, n)
		}
		if d := a.decodeDelivery(s, 0); d != nil && string(a.appendDeliveryID(nil, d.Partition, d.Offset, d.Lease)) != s {
			t.Fatalf("%q was not issued", s)
		}
		if raw, ok := decodeID(s, deadPrefix, 16); ok && string(appendID(nil, deadPrefix, raw)) != s {
			t.Fatalf("%q is another spelling", s)
		}
		if raw, ok := decodeID(string(appendID(nil, "x_", b)), "x_", len(b)); !ok || !bytes.Equal(raw, b) {
			t.Fatalf("%x became %x", b, raw)
		}
		// One bit of an issued id, anywhere.
		id := a.appendDeliveryID(nil, 5, 6, [16]byte{6: 0x70, 8: 0x80})
		if len(b) > 1 {
			id[int(b[0])%len(id)] ^= 1 << (b[1] % 8)
			if d := a.decodeDelivery(string(id), 0); d != nil {
				t.Fatalf("%q was not issued", id)
			}
		}
	})
}

// FuzzNumbers reads numbers, durations and times as they stand in bodies and queries.
func FuzzNumbers(f *testing.F) {
	for _, s := range []string{"0", "-0", "1e3", "1.0", "1.5", "9223372036854775808", "-9223372036854775809", "1e400", "-1e400", "1e-400", "9007199254740993", " 5", "5 ", "5abc", "0x10", "1_000", "+1", "٣", "１", "",
		"1h30m", "0s", "-1s", "+1s", "9999999h", "1e3s", "1.5s", ".5s", "1µs", "106751d", "2562047h47m16.854775807s", "2562047h47m16.854775808s", "1s ", "1 s", "0", "NaN", "Inf", "inf", "nan",
		"2026-03-01T09:00:00.123456789+05:30", "2026-03-01", "0000-01-01", "10000-01-01", "2026-02-30", "2026-03-01T09:00:00 05:30", "2026-03-01T24:00:00Z", "2026-12-31T23:59:60Z", "9999-12-31T23:59:59.999999999Z"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if d, ok := parseDuration(s); ok {
			if again, ok := parseDuration(formatDuration(d)); d < 0 || !ok || again != d {
				t.Fatalf("%q is %v, which is %v", s, d, again)
			}
		}
		if at, ok := parseTime(s); ok && (at.Year() < 0 || at.Year() > 10_000 || at.Location() != time.UTC) {
			t.Fatalf("%q is %v", s, at)
		}
		if start, ok := parseStart(s); ok && start.Mode == "time" {
			if again, ok := parseStart(start.At.Format(timeMilli)); !ok || !again.At.Equal(*start.At) {
				t.Fatalf("%q is %v, which is shown as %v", s, start.At, again.At)
			}
		}
		p := &params{values: map[string][]string{"n": {s}}}
		if n := p.number("n", 7, -100, 100); n < -100 || n > 100 || p.err == nil && s != "" && strings.Trim(s, "-0123456789") != "" {
			t.Fatalf("%q is %d, %v", s, n, p.err)
		}
		if !utf8.ValidString(s) || !whole([]byte(s)) || strings.TrimSpace(s) != s {
			return
		}
		n, ok := wholeNumber([]byte(s))
		x, isNumber := number([]byte(s))
		if ok && (!isNumber || x != float64(n) && n != 1<<63-1 && n != -1<<63) || isNumber != (s[0] == '-' || s[0] >= '0' && s[0] <= '9') {
			t.Fatalf("%q is %d, %v and %g, %v", s, n, ok, x, isNumber)
		}
	})
}
