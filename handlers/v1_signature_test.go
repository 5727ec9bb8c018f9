package handlers

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

func TestSignature(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ text, want string }{
		{"", ""},
		{"  \n ", ""},
		{"downstream 500", "downstream <n>"},
		{"timeout after 1.5s, 20 ms", "timeout after <n>s, <n> ms"},
		{"order 0d0ff1ce-1234-4abc-8def-001122334455 failed", "order <uuid> failed"},
		{"order 0D0FF1CE-1234-4ABC-8DEF-001122334455 failed", "order <uuid> failed"},
		{"at 0xDEADbeef", "at <hex>"},
		{"commit 3f2a9c1 and 77fe01aa", "commit <hex> and <hex>"},
		{"commit deadbeefcafe", "commit <hex>"},
		{"face it: add a decade, dead or bad", "face it: add a decade, dead or bad"}, // words
		{`no "user 7"` + ` or 'it\'s 5'`, "no <text> or <text>"},
		{`can't and won't`, `can't and won't`},
		{`unknown field "a" in "b\"c"`, `unknown field <text> in <text>`},
		{"a  b\t\tc\nd", "a b c d"},
		{"grüße 17 日本 5", "grüße <n> 日本 <n>"},
		{"user17 x-17-y", "user<n> x-<n>-y"},
		{strings.Repeat("x", 300), strings.Repeat("x", 200)},
		{strings.Repeat("ü", 101), strings.Repeat("ü", 100)},
		{"x" + strings.Repeat("ü", 101), "x" + strings.Repeat("ü", 99)}, // cut between characters
		{"nul\x00 7", "nul <n>"},
	} {
		if got := signature(c.text); got != c.want {
			t.Errorf("%q: %q, want %q", c.text, got, c.want)
		}
	}
	if a, b := signature("order 17 of customer 3f2a9c1 failed"), signature("order 3 of customer 0000aa1 failed"); a != b {
		t.Errorf("%q and %q", a, b)
	}
}

// TestSignatureBounded: no input takes long, grows, or ends inside of a character.
func TestSignatureBounded(t *testing.T) {
	t.Parallel()
	began := time.Now()
	for _, part := range []string{`"`, `'`, `\`, `"\`, "a0", "0a ", "0x", "1.", " ", "\t\n", "0d0ff1ce-", "aaaaaaaa-0000-", "ü", "\xff", "'\\'"} {
		for _, n := range []int{4096, 100_000} {
			s := signature(strings.Repeat(part, n/len(part)))
			if len(s) > maxSignature || utf8.ValidString(part) && !utf8.ValidString(s) {
				t.Errorf("%q: %d bytes, %q", part, len(s), s)
			}
		}
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("took %v", took)
	}
}
