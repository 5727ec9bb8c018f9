package contract

import (
	"strings"
	"testing"
)

// A runner that lets everything pass is worse than none.
func TestMatch(t *testing.T) {
	const id, id7 = "5d0f6f0a-9c1e-4b7e-8f53-0d6c2f1a7e10", "0199b1f0-4d3a-7c10-9f2b-6a1e5d0c7b83"
	for _, c := range []struct {
		template, got string
		ok            bool
	}{
		{`[{"a":1}]`, `[{"a":1}]`, true},
		{`[{"a":1}]`, `[{"a": 1}]`, false},
		{`[{"a":1}]`, `[{"a":1}] `, false},
		{`"$x:uuid"`, `"` + id + `"`, true},
		{`"$x:uuid7"`, `"` + id + `"`, false},
		{`"$x:uuid7","$x"`, `"` + id7 + `","` + id7 + `"`, true},
		{`"$x:uuid7","$y:uuid7"`, `"` + id7 + `","` + id7 + `"`, false},
		{`"$_:uuid7","$_:uuid7"`, `"` + id7 + `","` + id7 + `"`, true},
		{`"$known"`, `"k"`, true},
		{`"$known"`, `"other"`, false},
		{`"$unknown"`, `"k"`, false},
		{`"$t:time6"`, `"2026-03-01T09:00:00.123456Z"`, true},
		{`"$t:time6"`, `"2026-03-01T09:00:00.123Z"`, false},
		{`"$t:time6"`, `"2026-03-01T09:00:00.123456+00:00"`, false},
		{`{"error":"$_:any"}`, `{"error":"a \" b"}`, true},
		{`{"error":"$_:any"}`, `{"error":"a","code":"b"}`, false},
	} {
		vars := map[string]string{"known": "k"}
		if err := match(vars, c.template, c.got); (err == nil) != c.ok {
			t.Errorf("match(%s, %s) = %v", c.template, c.got, err)
		}
	}
}

func TestLookup(t *testing.T) {
	const doc = `{"a":[{"b":1.10,"c":"x"},{"b":null}],"d":{"e":[1, 2]}}`
	for path, want := range map[string]string{
		"a.*.b": "1.10 null", "a.*.c": `"x" absent`, "a.1.b": "null", "a.2.b": "absent", "d.e": "[1, 2]", "x.y": "absent",
	} {
		if got, err := lookup([]byte(doc), path); got != want || err != nil {
			t.Errorf("lookup(%s) = %s, %v; want %s", path, got, err, want)
		}
	}
}

func TestUnroll(t *testing.T) {
	in := []line{{1, "for x|y in a|1 b|2"}, {2, "$x $y"}, {3, "for z in p q"}, {4, "$x$z $xy"}, {5, "end"}, {6, "end"}, {7, "$x"}}
	var got []string
	for _, l := range unroll(in) {
		got = append(got, l.s)
	}
	const want = "a 1|ap $xy|aq $xy|b 2|bp $xy|bq $xy|$x"
	if strings.Join(got, "|") != want {
		t.Errorf("got %q", got)
	}
}
