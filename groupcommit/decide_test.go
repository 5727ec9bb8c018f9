package groupcommit

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/segment"
)

// spanOf makes the segments that hold ids at offsets from base on; "" is an id minted by the broker.
func spanOf(h segment.Hasher, base int64, ids ...string) (parts []keyed, minted []string) {
	for len(ids) > 0 {
		n := min(len(ids), 3)
		k := keyed{base: base, count: n, first: segment.NewFirstID(time.Now())}
		keyedSegment := slices.ContainsFunc(ids[:n], func(s string) bool { return s != "" })
		for i, id := range ids[:n] {
			minted = append(minted, segment.ID(k.first, i).String())
			var key segment.Key
			if id != "" {
				key = h.Key(id)
			}
			if keyedSegment {
				k.keys = append(k.keys, key[:]...)
			}
		}
		parts = append(parts, k)
		ids, base = ids[n:], base+int64(n)
	}
	return parts, minted
}

func TestDecide(t *testing.T) {
	t.Parallel()
	h := segment.NewHasher(7)
	// Offsets 0..9 are a..j; committed is 3, so a b c are below; d..h (3..7) are leased, i j lie beyond.
	parts, _ := spanOf(h, 0, "a", "b", "c", "d", "e", "f", "g", "h", "i", "j")
	leased := func() *cursor { return &cursor{committed: 3, end: 8, parts: parts, below: true} }
	unleased := func() *cursor { return &cursor{committed: 3, end: -1, parts: parts, below: true} }
	// Offsets 0..5: x y x x z x, nothing committed, the first four leased.
	twin, _ := spanOf(h, 0, "x", "y", "x", "x", "z", "x")
	twins := func() *cursor { return &cursor{committed: 0, end: 4, parts: twin, below: true} }
	const none = int32(-1) // nothing to settle
	word := map[string]Status{"ok": Completed, "failed": Failed, "retry": Retry, "dlq": DeadLetter}
	for _, c := range []struct {
		name     string
		cursor   func() *cursor
		acks     string // "id status" pairs
		action   int32
		moveTo   int64
		failedAt int64
		error    string
		results  string // per item: + accepted, = already done, or the word that the error begins with
	}{
		{"all", leased, "d ok, e ok, f ok, g ok, h ok", actComplete, 8, -1, "", "+ + + + +"},
		{"only the last", leased, "h ok", actComplete, 8, -1, "", "+"},
		{"stops earlier", leased, "e ok", actComplete, 5, -1, "", "+"},
		{"out of order", leased, "g ok, d ok", actComplete, 7, -1, "", "+ +"},
		{"failed in the middle", leased, "d ok, e failed, f ok, g ok", actFailed, 4, 4, "Retries exhausted", "+ + + +"},
		{"failed with unmentioned in front", leased, "g failed", actFailed, 3, 6, "Retries exhausted", "+"},
		{"retry", leased, "d ok, e retry", actRetry, 4, 4, "Retries exhausted", "+ +"},
		{"dlq", leased, "d ok, f dlq, e ok", actDeadLetter, 5, 5, "Retries exhausted", "+ + +"},
		{"the lowest decides", leased, "f dlq, e failed, d retry", actRetry, 3, 3, "Retries exhausted", "+ + +"},
		{"the lowest decides, given the other way round", leased, "d retry, e failed, f dlq", actRetry, 3, 3, "Retries exhausted", "+ + +"},
		{"same message: failed before retry", leased, "e retry, e failed", actFailed, 3, 4, "Retries exhausted", "+ +"},
		{"same message: dlq first", leased, "e dlq, e failed, e retry, e ok", actDeadLetter, 3, 4, "Retries exhausted", "+ + + +"},
		{"same message: completed last", leased, "e ok, e retry", actRetry, 3, 4, "Retries exhausted", "+ +"},
		{"below: completed", leased, "a ok", none, 0, 0, "", "="},
		{"below: failed", leased, "c failed", none, 0, 0, "", "already"},
		{"below: retry, dlq", leased, "a retry, b dlq", none, 0, 0, "", "already already"},
		{"below and above", leased, "c ok, d ok", actComplete, 4, -1, "", "= +"},
		{"unknown", leased, "zz ok", none, 0, 0, "", "unresolvable"},
		{"unknown beside known", leased, "zz failed, d ok", actComplete, 4, -1, "", "unresolvable +"},
		{"no id", leased, "- ok", none, 0, 0, "", "unresolvable"},
		{"no id beside known", leased, "- dlq, d ok", actComplete, 4, -1, "", "unresolvable +"},
		{"beyond the batch", leased, "i ok", actComplete, 9, -1, "", "+"},
		{"error of the item", leased, "d ok, e failed:mine", actFailed, 4, 4, "mine", "+ +"},
		{"first error of the group", leased, "d ok:not-this, g failed:later, e failed, f dlq:latest", actFailed, 4, 4, "later", "+ + + +"},
		{"no lease: completed", unleased, "e ok", actComplete, 5, -1, "", "+"},
		{"no lease: failed", unleased, "d ok, e failed", actFailed, 4, 4, "Retries exhausted", "+ +"},
		{"no lease: dlq", unleased, "e dlq", actDeadLetter, 3, 4, "Retries exhausted", "+"},
		{"twins: k-th mention", twins, "x ok, x ok", actComplete, 3, -1, "", "+ +"},
		{"twins: all", twins, "x ok, y ok, x ok, x ok", actComplete, 4, -1, "", "+ + + +"},
		{"twins: a fourth mention stays in the batch", twins, "x ok, x ok, x ok, x ok", actComplete, 4, -1, "", "+ + + +"},
		{"twins: the second failed", twins, "x ok, x failed, y ok", actFailed, 2, 2, "Retries exhausted", "+ + +"},
	} {
		a := &Acks{}
		for _, w := range strings.Split(c.acks, ", ") {
			id, status, _ := strings.Cut(w, " ")
			status, message, hasMessage := strings.Cut(status, ":")
			it := Ack{Status: word[status]}
			if id != "-" {
				it.TransactionID = &id
			}
			if hasMessage {
				it.Error = &message
			}
			a.Items = append(a.Items, it)
		}
		v, sure := a.decide(h, c.cursor())
		if !sure {
			t.Errorf("%s: not sure, with everything known", c.name)
			continue
		}
		var got []string
		for _, r := range a.Results {
			switch {
			case r.AlreadyDone:
				got = append(got, "=")
			case r.Err == nil:
				got = append(got, "+")
			default:
				first, _, _ := strings.Cut(r.Err.Error(), " ")
				got = append(got, strings.TrimSuffix(first, ":"))
			}
		}
		if s := strings.Join(got, " "); s != c.results {
			t.Errorf("%s: results %q, want %q", c.name, s, c.results)
		}
		if (v == nil) != (c.action == none) {
			t.Errorf("%s: verdict %+v", c.name, v)
			continue
		}
		if v == nil {
			continue
		}
		want := verdict{action: c.action, moveTo: c.moveTo, failedAt: c.failedAt, error: c.error}
		have := *v
		have.signal = 0
		if have != want {
			t.Errorf("%s: %+v, want %+v", c.name, have, want)
		}
	}
}

// TestDecideFromMemory: what is only known within the leased span decides alike, or says that it is not sure.
func TestDecideFromMemory(t *testing.T) {
	t.Parallel()
	h := segment.NewHasher(7)
	parts, minted := spanOf(h, 3, "d", "", "f", "g", "h")
	c := &cursor{committed: 3, end: 8, parts: parts}
	for _, it := range []struct {
		id   string
		sure bool
	}{{"d", true}, {minted[1], true}, {minted[0], false}, {"a", false}, {"i", false}, {strings.ToUpper(minted[1]), false}} {
		a := &Acks{Items: []Ack{{TransactionID: &it.id}}}
		if _, sure := a.decide(h, c); sure != it.sure {
			t.Errorf("%s: sure %v", it.id, sure)
		}
	}
	if _, sure := (&Acks{Items: []Ack{{}}}).decide(h, c); sure {
		t.Error("no id: sure, and the lease was not judged")
	}
}

// naive resolves and decides as the contract says it, with maps and loops.
func naive(ids []string, committed, end int64, acks []Ack) (action int32, moveTo, failedAt int64, results []string) {
	to := min(committed+ackWindow, int64(len(ids)))
	batch := to
	if end >= 0 {
		batch = end
	}
	mentions := make(map[string]int)
	at := make([]int64, len(acks))
	for i, a := range acks {
		at[i] = -1
		if a.TransactionID == nil {
			results = append(results, "?")
			continue
		}
		id := *a.TransactionID
		k := mentions[id]
		mentions[id]++
		find := func(from, to int64) (all []int64) {
			for o := from; o < to; o++ {
				if ids[o] == id {
					all = append(all, o)
				}
			}
			return all
		}
		all := find(committed, batch)
		if len(all) == 0 {
			all = find(batch, to)
		}
		switch {
		case len(all) > 0:
			at[i] = all[min(k, len(all)-1)]
			results = append(results, "+")
		case len(find(max(committed-ackWindow, 0), committed)) == 0:
			results = append(results, "?")
		case a.Status == Completed:
			results = append(results, "=")
		default:
			results = append(results, "!")
		}
	}
	failedAt, moveTo = -1, committed
	for i, a := range acks {
		if at[i] >= 0 && a.Status != Completed && (failedAt < 0 || at[i] < failedAt) {
			failedAt = at[i]
		}
	}
	for i, a := range acks {
		if at[i] < 0 {
			continue
		}
		if at[i] == failedAt {
			action = max(action, map[Status]int32{Completed: 0, Retry: 1, Failed: 2, DeadLetter: 3}[a.Status])
		}
		if a.Status == Completed && (failedAt < 0 || at[i] < failedAt) {
			moveTo = max(moveTo, at[i]+1)
		}
	}
	action = map[int32]int32{0: actComplete, 1: actRetry, 2: actFailed, 3: actDeadLetter}[action]
	return action, moveTo, failedAt, results
}

func TestDecideAgainstNaive(t *testing.T) {
	t.Parallel()
	h := segment.NewHasher(7)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	for range 20_000 {
		ids := make([]string, 1+rnd.IntN(40))
		for i := range ids {
			if rnd.IntN(4) > 0 {
				ids[i] = fmt.Sprint("id", rnd.IntN(2*len(ids)))
			}
		}
		parts, minted := spanOf(h, 0, ids...)
		for i := range ids {
			if ids[i] == "" {
				ids[i] = minted[i]
			}
		}
		committed := int64(rnd.IntN(len(ids) + 1))
		end := int64(-1)
		if committed < int64(len(ids)) && rnd.IntN(3) > 0 {
			end = committed + 1 + int64(rnd.IntN(len(ids)-int(committed)))
		}
		var acks []Ack
		for range 1 + rnd.IntN(30) {
			a := Ack{Status: []Status{Completed, Completed, Completed, Failed, Retry, DeadLetter}[rnd.IntN(6)]}
			switch n := rnd.IntN(20); {
			case n == 0:
			case n == 1:
				id := "unknown"
				a.TransactionID = &id
			default:
				a.TransactionID = &ids[rnd.IntN(len(ids))]
			}
			acks = append(acks, a)
		}
		a := &Acks{Items: acks}
		v, sure := a.decide(h, &cursor{committed: committed, end: end, parts: parts, below: true})
		action, moveTo, failedAt, want := naive(ids, committed, end, acks)
		var got []string
		for _, r := range a.Results {
			got = append(got, map[error]string{nil: "+", ErrUnresolvable: "?", ErrCommitted: "!"}[r.Err])
			if r.AlreadyDone {
				got[len(got)-1] = "="
			}
		}
		if !sure || !slices.Equal(got, want) {
			t.Fatalf("ids %v committed %d end %d: results %v, want %v (sure %v)", ids, committed, end, got, want, sure)
		}
		if v == nil {
			if slices.Contains(want, "+") {
				t.Fatal("accepted, and no verdict")
			}
			continue
		}
		if v.action != action || v.moveTo != moveTo || v.failedAt != failedAt {
			t.Fatalf("ids %v committed %d end %d: %+v, want action %d, move to %d, failed at %d", ids, committed, end, *v, action, moveTo, failedAt)
		}
		// From memory of the leased span alone the verdict is the same, or it is not sure.
		if end >= 0 {
			var span []keyed
			for _, p := range parts {
				if p.base < end && p.base+int64(p.count) > committed {
					span = append(span, p)
				}
			}
			b := &Acks{Items: acks}
			if w, sure := b.decide(h, &cursor{committed: committed, end: end, parts: span}); sure && *w != *v {
				t.Fatalf("from memory %+v, from the database %+v", *w, *v)
			}
		}
	}
}

func TestClip(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ in, want string }{
		{"", ""},
		{"plain", "plain"},
		{"a\x00b\x00", "ab"},
		{"\x00", ""},
		{"\x00\x00ab", "ab"},
		{strings.Repeat("x", maxError), strings.Repeat("x", maxError)},
		{strings.Repeat("x", maxError+1), strings.Repeat("x", maxError)},
		{strings.Repeat("x", maxError-1) + "é", strings.Repeat("x", maxError-1)},
		{strings.Repeat("x", maxError-2) + "é", strings.Repeat("x", maxError-2) + "é"},
		{strings.Repeat("x", maxError-2) + "é.", strings.Repeat("x", maxError-2) + "é"},
		{strings.Repeat("x", maxError-3) + "😀", strings.Repeat("x", maxError-3)},
		{strings.Repeat("x", maxError-4) + "😀.", strings.Repeat("x", maxError-4) + "😀"},
		{strings.Repeat("😀", maxError/4+1), strings.Repeat("😀", maxError/4)},
		{"\x00" + strings.Repeat("é", maxError), strings.Repeat("é", maxError/2)},
	} {
		got := Clip(c.in)
		if got != c.want {
			t.Errorf("clip of %d bytes (%.20q): %d bytes, want %d", len(c.in), c.in, len(got), len(c.want))
		}
		if !utf8.ValidString(got) || strings.Contains(got, "\x00") {
			t.Errorf("clip of %.20q is no text", c.in)
		}
	}
}

var groupOne = catalog.Group{ID: 1, QueueID: 1, Name: "g"}

func TestHeld(t *testing.T) {
	t.Parallel()
	h := newHolding()
	lease := uuid.New()
	span := func(partition int64) *Span {
		s := &Span{Group: &groupOne, Start: 0, Take: 10, lease: time.Minute}
		s.Row.ID = partition
		return s
	}
	h.add(lease, span(1))
	h.add(lease, span(2))
	if n := len(h.cursors(lease)); n != 2 {
		t.Errorf("%d cursors", n)
	}
	if known, missed := h.settled(1, 1, lease, 5, false); !known || missed {
		t.Error("a partial settle of a known batch")
	}
	if b, ok := h.get(1, 1, lease); !ok || b.committed != 5 {
		t.Errorf("%+v %v", b, ok)
	}
	if !h.live(1, 2) {
		t.Error("not live")
	}
	if known, _ := h.settled(1, 2, uuid.New(), 10, true); known || !h.live(1, 2) {
		t.Error("a settle under another lease is not of this batch")
	}
	if known, missed := h.settled(1, 2, lease, 10, true); !known || !missed {
		t.Error("the hint that was held back is lost")
	}
	if known, _ := h.settled(1, 2, lease, 10, true); known {
		t.Error("settled twice")
	}
	if h.live(1, 2) {
		t.Error("live after the settle")
	}
	h.add(lease, span(2))
	h.drop(1, 1)
	if n := len(h.cursors(lease)); n != 0 {
		t.Errorf("a lease of which a part was dropped has to be looked up: %d cursors", n)
	}
	if _, ok := h.get(1, 2, lease); !ok {
		t.Error("the other part was dropped too")
	}
	// A seek ended it before its claim was told: it holds up no hints.
	late := span(3)
	late.began = time.Now()
	h.drop(1, 3)
	if h.add(lease, late); h.live(1, 3) {
		t.Error("a batch is back that was dropped")
	}
	late.began = time.Now()
	if h.add(lease, late); !h.live(1, 3) {
		t.Error("a batch of a later claim is not remembered")
	}
	// Two generations are kept, not more.
	for i := range int64(5) {
		s := span(100 + i)
		s.Take = maxHeld
		h.add(uuid.New(), s)
	}
	if n := len(h.young) + len(h.old); n > 2 {
		t.Errorf("%d batches held", n)
	}
	if n := len(h.leases); n > 2 {
		t.Errorf("%d leases held", n)
	}
}

func TestHalves(t *testing.T) {
	t.Parallel()
	rnd := rand.New(rand.NewPCG(1, 1))
	for range 1000 {
		b := &board{pushes: make([]*Push, rnd.IntN(4)), settles: make([]*settle, rnd.IntN(4)), restores: make([]*restore, rnd.IntN(4)),
			extends: make([]*extend, rnd.IntN(4)), claims: make([]*claim, rnd.IntN(4))}
		if b.size() < 2 {
			continue
		}
		x, y := b.halves()
		if x.size() == 0 || y.size() == 0 || x.size()+y.size() != b.size() {
			t.Fatalf("%d became %d and %d", b.size(), x.size(), y.size())
		}
	}
}
