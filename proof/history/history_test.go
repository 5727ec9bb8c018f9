package history

import (
	"slices"
	"strings"
	"testing"
	"time"
)

var zero = time.Now()

func at(ms int) time.Time { return zero.Add(time.Duration(ms) * time.Millisecond) }

// The lanes and groups of the histories: q is a queue of /api/v1, s a stream of /v1.
var (
	lq = Lane{"q", "p"}
	ls = Lane{"s", "k"}
)

// right is a history without a fault, with a bit of everything. Its entries have fixed places, for tests to break them.
func right() *Log {
	l := &Log{Groups: map[string]Group{"g": {Queue: "q", Max: 2}, "sub": {Queue: "s", Lanes: true, Max: 3, CountExpired: true}}, Drained: true}
	l.Add(
		// 0, 1: one push of two; 2: a push without an answer; 3: its repeat; 4: a refused one; 5, 6: publishes; 7: one that may have come in
		Send{at(0), at(10), lq, 1, 0, "a", OK, false, "1"},
		Send{at(0), at(10), lq, 1, 1, "b", OK, false, "2"},
		Send{at(20), at(30), lq, 2, 0, "c", Unknown, false, ""},
		Send{at(40), at(50), lq, 2, 0, "c", OK, true, "3"},
		Send{at(60), at(70), lq, 3, 0, "no", Refused, false, ""},
		Send{at(0), at(10), ls, 4, 0, "x", OK, false, "11"},
		Send{at(20), at(30), ls, 5, 0, "y", OK, false, "12"},
		Send{at(40), at(50), ls, 6, 0, "z", Unknown, false, ""},

		// /api/v1. 0, 1: a lease on a and b, of which a is settled and b fails; 2, 3: b again with c; it ends, settled late; 4, 5: again
		Delivery{at(60), at(70), time.Time{}, "g", lq, "l1", time.Second, 0, "1", "a", 0},
		Delivery{at(60), at(70), time.Time{}, "g", lq, "l1", time.Second, 1, "2", "b", 0},
		Settle{at(100), at(110), "g", lq, "l1", Failed, OK, "b", []string{"a"}, true, 0}, // settle 0
		Delivery{at(120), at(130), time.Time{}, "g", lq, "l2", time.Second, 0, "2", "b", 0},
		Delivery{at(120), at(130), time.Time{}, "g", lq, "l2", time.Second, 1, "3", "c", 0},
		Settle{at(1300), at(1310), "g", lq, "l2", Acked, Refused, "", []string{"b", "c"}, true, 0}, // settle 1
		Delivery{at(1400), at(1410), time.Time{}, "g", lq, "l3", time.Second, 0, "2", "b", 0},
		Delivery{at(1400), at(1410), time.Time{}, "g", lq, "l3", time.Second, 1, "3", "c", 0},
		Settle{at(1500), at(1510), "g", lq, "l3", Extended, OK, "", nil, false, 5 * time.Second}, // settle 2
		Settle{at(3000), at(3010), "g", lq, "l3", Acked, OK, "", []string{"b", "c"}, true, 0},    // settle 3

		// /v1. 6: x, nacked; 7: x, released; 8: x again, acked late while nobody had it; 9: y, whose first attempt nobody got
		Delivery{at(60), at(70), time.Time{}, "sub", ls, "d1", time.Second, 0, "11", "x", 1},
		Settle{at(100), at(110), "sub", ls, "d1", Failed, OK, "x", nil, true, 0}, // settle 4
		Delivery{at(200), at(210), time.Time{}, "sub", ls, "d2", time.Second, 0, "11", "x", 2},
		Settle{at(220), at(230), "sub", ls, "d2", Released, OK, "", nil, true, 0}, // settle 5
		Delivery{at(300), at(310), time.Time{}, "sub", ls, "d3", time.Second, 0, "11", "x", 2},
		Settle{at(2000), at(2010), "sub", ls, "d3", Acked, OK, "", []string{"x"}, true, 0}, // settle 6
		Lost{at(2020), "sub"},
		Delivery{at(4000), at(4010), time.Time{}, "sub", ls, "d4", time.Second, 0, "12", "y", 2},
		Settle{at(4100), at(4110), "sub", ls, "d4", Failed, Unknown, "y", nil, true, 0}, // settle 7
		Delivery{at(4200), at(4210), time.Time{}, "sub", ls, "d5", time.Second, 0, "12", "y", 3},
		Settle{at(4300), at(4310), "sub", ls, "d5", Failed, OK, "y", nil, true, 0}, // settle 8
		// redriven, and done
		Move{Start: at(4400), End: at(4410), Group: "sub", Queue: "s", Redriven: []string{"y"}},
		Delivery{at(4500), at(4510), time.Time{}, "sub", ls, "d6", time.Second, 0, "13", "y", 1}, // 11
		Settle{at(4600), at(4610), "sub", ls, "d6", Acked, OK, "", []string{"y"}, true, 0},       // settle 9
		Delivery{at(4700), at(4710), time.Time{}, "sub", ls, "d7", time.Second, 0, "14", "z", 1}, // 12
		Settle{at(4800), at(4810), "sub", ls, "d7", Acked, Unknown, "", []string{"z"}, true, 0},  // settle 10
	)
	l.Stored = map[Lane][]Stored{lq: {{0, "1", "a"}, {1, "2", "b"}, {2, "3", "c"}}}
	l.Counters = []Counter{{"pending", 0, 0}}
	return l
}

func TestCheck(t *testing.T) {
	t.Parallel()
	for _, x := range []struct {
		name  string
		rule  Rule // "": nothing is wrong
		spoil func(l *Log)
	}{
		{"right", "", func(*Log) {}},

		{"a push is not stored", Durable, func(l *Log) { l.Stored[lq] = l.Stored[lq][:2] }},
		{"a push is never delivered", Durable, func(l *Log) { l.Groups["other"] = Group{Queue: "q"} }},
		{"an unknown one need not be there", "", func(l *Log) { l.deliveries, l.settles = l.deliveries[:12], l.settles[:10] }},
		{"not drained, nothing is owed", "", func(l *Log) { l.Groups["other"], l.Drained = Group{Queue: "q"}, false }},

		{"never sent", NeverSent, func(l *Log) { l.deliveries[8].Payload = "other" }},
		{"other bytes", NeverSent, func(l *Log) { l.deliveries[8].Payload = "x " }},
		{"delivered though refused", NeverSent, func(l *Log) { l.deliveries[5].Payload = "no" }},
		{"delivered before it was sent", NeverSent, func(l *Log) { l.deliveries[0].Start, l.deliveries[0].End = at(-20), at(-10) }},
		{"in another lane", NeverSent, func(l *Log) { l.deliveries[12].Lane.Key = "k2" }},
		{"stored though refused", NeverSent, func(l *Log) { l.Stored[lq] = append(l.Stored[lq], Stored{3, "9", "no"}) }},
		{"dead and never sent", NeverSent, func(l *Log) { l.Dead = map[string][]Dead{"sub": {{ls, "other", 3}}} }},

		{"queued twice", Once, func(l *Log) { l.sends[2].Outcome, l.sends[2].Message = OK, "3"; l.sends[3].Duplicate = false }},
		{"another id for the repeat", Once, func(l *Log) { l.sends[2].Outcome, l.sends[2].Message = OK, "4" }},
		{"delivered under two ids", Once, func(l *Log) { l.deliveries[4].Message = "9" }},
		{"stored twice", Once, func(l *Log) { l.Stored[lq] = append(l.Stored[lq], Stored{3, "9", "c"}) }},
		{"stored under another id", Once, func(l *Log) { l.Stored[lq][1].Message = "9" }},
		{"put back twice", Once, func(l *Log) { l.deliveries[10].Message = "15" }},
		{"redriven by nobody", Once, func(l *Log) { l.moves[0].Outcome = Refused }},

		{"stored out of order", Order, func(l *Log) {
			l.Stored[lq][0], l.Stored[lq][2] = Stored{0, "3", "c"}, Stored{2, "1", "a"}
		}},
		{"stored out of order of a request", Order, func(l *Log) {
			l.Stored[lq][0], l.Stored[lq][1] = Stored{0, "2", "b"}, Stored{1, "1", "a"}
		}},
		{"delivered out of order", Order, func(l *Log) {
			l.deliveries[6].Start, l.deliveries[6].End, l.deliveries[7].Start, l.deliveries[8].Start = at(5000), at(5010), at(5020), at(5030)
			l.deliveries[7].End, l.deliveries[8].End = at(5025), at(5040)
			l.deliveries[9].Message = "12"
		}},
		{"out of order of a request, in one answer", Order, func(l *Log) { l.deliveries[0].Index, l.deliveries[1].Index = 1, 0 }},
		{"sent at the same time, any order", "", func(l *Log) {
			l.sends[6].Start = at(9)
			l.deliveries[6], l.deliveries[12] = Delivery{at(4700), at(4710), time.Time{}, "sub", ls, "d7", time.Second, 0, "14", "z", 1}, l.deliveries[6]
		}},

		{"the next one, its head not settled", Head, func(l *Log) {
			l.Add(Delivery{at(1700), at(1710), time.Time{}, "sub", ls, "d8", time.Second, 0, "12", "y", 1})
			l.moves, l.deliveries = nil, append(l.deliveries[:11], l.deliveries[12:]...)
		}},
		{"the next one, its head perhaps settled", "", func(l *Log) {
			l.settles[6].Outcome, l.settles[6].Start, l.settles[6].End = Unknown, at(400), at(410)
			l.Add(Delivery{at(402), at(412), time.Time{}, "sub", ls, "d8", time.Second, 0, "12", "y", 1})
		}},
		{"a batch jumps over one", Head, func(l *Log) { l.deliveries = append(l.deliveries[:4], l.deliveries[5:]...) }},

		{"a gap in the offsets", Dense, func(l *Log) { l.Stored[lq][2].Offset = 3 }},

		{"two live leases", OneInFlight, func(l *Log) {
			l.deliveries[2].Start, l.deliveries[2].End = at(80), at(90)
			l.deliveries[3].Start, l.deliveries[3].End = at(80), at(90)
		}},
		{"a second one before the end", OneInFlight, func(l *Log) {
			for i := 4; i <= 5; i++ {
				l.deliveries[i].Start, l.deliveries[i].End = at(900), at(910)
			}
		}},
		{"just at the end", "", func(l *Log) {
			for i := 4; i <= 5; i++ {
				l.deliveries[i].Start, l.deliveries[i].End = at(1060), at(1080)
			}
			l.settles[1].Start, l.settles[1].End = at(1100), at(1110)
		}},
		{"a second one, though extended", OneInFlight, func(l *Log) {
			l.Add(Delivery{at(2700), at(2710), time.Time{}, "g", lq, "l4", time.Second, 0, "3", "c", 0})
		}},
		{"two of one key", OneInFlight, func(l *Log) {
			l.Add(Delivery{at(320), at(330), time.Time{}, "sub", ls, "d8", time.Second, 0, "12", "y", 1})
		}},
		{"one that came late begins late", OneInFlight, func(l *Log) {
			l.deliveries[2].From, l.deliveries[3].From = at(500), at(500)
			l.deliveries[2].End, l.deliveries[3].End = at(510), at(510)
		}},
		{"a lease on two lanes", OneInFlight, func(l *Log) { l.deliveries[8].Lease = "d2" }},

		{"the same attempt", Attempts, func(l *Log) { l.deliveries[7].Attempt = 1 }},
		{"released twice is no failure", "", func(l *Log) {
			l.settles[4].Kind, l.deliveries[7].Attempt, l.deliveries[8].Attempt = Released, 1, 1
		}},
		{"expired leases are not counted", "", func(l *Log) {
			g := l.Groups["sub"]
			g.CountExpired = false
			l.Groups["sub"] = g
			l.settles[4].Outcome, l.settles[4].Start, l.settles[4].End = Unknown, at(100), at(110)
			l.deliveries[7].Attempt, l.deliveries[8].Attempt = 1, 1
		}},
		{"an attempt is missing", Attempts, func(l *Log) { l.deliveries[8].Attempt = 3 }},
		{"nobody got it", Attempts, func(l *Log) { l.lost = nil }},
		{"attempts go back", Attempts, func(l *Log) { l.deliveries[6].Attempt, l.deliveries[7].Attempt = 2, 1 }},
		{"attempt 0", Attempts, func(l *Log) { l.deliveries[6].Attempt = 0 }},

		{"one attempt more", DeadOnce, func(l *Log) { l.deliveries[10].Attempt, l.deliveries[10].Message = 4, "12" }},
		{"dead twice", DeadOnce, func(l *Log) {
			l.settles = l.settles[:9]
			l.Dead = map[string][]Dead{"sub": {{ls, "y", 3}, {ls, "y", 3}}}
		}},
		{"dead once", "", func(l *Log) {
			l.moves, l.deliveries, l.settles = nil, l.deliveries[:10], l.settles[:9]
			l.Dead = map[string][]Dead{"sub": {{ls, "y", 3}}}
		}},
		{"dead too early", DeadOnce, func(l *Log) { l.settles = l.settles[:9]; l.Dead = map[string][]Dead{"sub": {{ls, "y", 2}}} }},
		{"dead and acked", DeadOnce, func(l *Log) { l.Dead = map[string][]Dead{"sub": {{ls, "x", 3}}} }},
		{"failed too often", DeadOnce, func(l *Log) { l.Add(l.settles[0], l.settles[0]) }},
		{"both copies acked", DeadOnce, func(l *Log) {
			l.Add(Settle{at(4300), at(4310), "sub", ls, "d5", Acked, OK, "", []string{"y"}, true, 0})
		}},

		{"acked and again", AckedEnds, func(l *Log) {
			l.Add(Delivery{at(5000), at(5010), time.Time{}, "g", lq, "l5", time.Second, 0, "2", "b", 0})
		}},
		{"acked meanwhile", "", func(l *Log) {
			l.Add(Delivery{at(3005), at(3015), time.Time{}, "g", lq, "l5", time.Millisecond, 0, "3", "c", 0})
		}},
		{"acked, and put back", "", func(l *Log) {
			l.Add(Move{Start: at(4900), End: at(4910), Queue: "q", Group: "g", Again: true},
				Delivery{at(5000), at(5010), time.Time{}, "g", lq, "l5", time.Second, 0, "1", "a", 0},
				Delivery{at(5000), at(5010), time.Time{}, "g", lq, "l5", time.Second, 1, "2", "b", 0},
				Delivery{at(5000), at(5010), time.Time{}, "g", lq, "l5", time.Second, 2, "3", "c", 0},
				Settle{at(5020), at(5030), "g", lq, "l5", Acked, OK, "", []string{"a", "b", "c"}, true, 0})
		}},
		{"put back and left", Stuck, func(l *Log) { l.Add(Move{Start: at(4900), End: at(4910), Queue: "q", Group: "g", Again: true}) }},

		{"settled late", Late, func(l *Log) { l.settles[1].Outcome = OK }},
		{"settled just in time", "", func(l *Log) {
			l.settles[1].Outcome, l.settles[1].Start, l.settles[1].End, l.settles[1].Done = OK, at(1160), at(1170), nil
		}},
		{"settled when another had it", Late, func(l *Log) { l.settles[4].Start, l.settles[4].End = at(215), at(218) }},
		{"acked late when another had it", Late, func(l *Log) {
			l.Add(Settle{at(4220), at(4230), "sub", ls, "d3", Acked, OK, "", nil, true, 0})
		}},
		{"nacked after the end", Late, func(l *Log) { l.settles[6].Kind = Failed }},

		{"refused in time", InTime, func(l *Log) {
			l.settles[3].Outcome = Refused
			l.settles[3].Start, l.settles[3].End = at(1600), at(1610)
		}},
		{"refused after one without an answer", "", func(l *Log) {
			l.Add(Settle{at(4150), at(4160), "sub", ls, "d4", Failed, Refused, "y", nil, true, 0})
		}},

		{"never settled", Stuck, func(l *Log) { l.settles[3].Outcome, l.settles[3].Start, l.settles[3].End = Refused, at(7000), at(7010) }},
		{"perhaps settled", "", func(l *Log) { l.settles[3].Outcome = Unknown }},

		{"a number", Counted, func(l *Log) { l.Counters[0].Got = -1 }},
		{"an answer", Contract, func(l *Log) { l.Odd("502 Bad Gateway") }},
	} {
		l := right()
		x.spoil(l)
		got := l.Check()
		switch {
		case x.rule == "" && len(got) > 0:
			t.Errorf("%s: %v", x.name, got)
		case x.rule != "" && !slices.ContainsFunc(got, func(v Violation) bool { return v.Rule == x.rule }):
			t.Errorf("%s: found %v, want %q", x.name, got, x.rule)
		}
	}
}

// A fault that happens a thousand times is told a few times.
func TestManyViolations(t *testing.T) {
	t.Parallel()
	l := right()
	for range 1000 {
		l.Odd("x")
	}
	if got := l.Check(); len(got) != most+1 || !strings.HasSuffix(got[most].String(), "and more") {
		t.Errorf("%d violations: %v", len(got), got)
	}
	if got := l.Totals(); got != (Totals{Sent: 8, Stored: 4, Delivered: 13, Acked: 5, Failed: 3, Late: 1, Lost: 1}) {
		t.Errorf("%+v", got)
	}
}
