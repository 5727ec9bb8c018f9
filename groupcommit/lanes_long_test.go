package groupcommit_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"ferrymq/catalog"
	"ferrymq/groupcommit"
	"ferrymq/segment"
)

// TestShortLeasesAmongLong: what was leased for a moment comes back in time, however many long leases there are beside it.
func TestShortLeasesAmongLong(t *testing.T) {
	t.Parallel()
	const long, short = 12_000, 10
	bs := together(t, 2, setup{})
	b := bs[0]
	q, g := b.subscribe("many", "mail", lasting(func(p *catalog.Policy) { p.Initial, p.MaxAttempts = 0, 0 }))
	for n := 0; n < long+short; n += 1002 {
		var all []*groupcommit.Push
		for i := n; i < min(n+1002, long+short); i++ {
			p, err := b.newPush(t.Context(), "many", fmt.Sprint("k", i), items(2, fmt.Sprint(i)))
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, p)
		}
		if err := b.Push(t.Context(), all); err != nil {
			t.Fatal(err)
		}
	}
	var out []*lane
	for len(out) < long+short {
		got := b.receive(q, g, 100, soon)
		if len(got) == 0 {
			t.Fatalf("%d of %d lanes came", len(out), long+short)
		}
		out = append(out, got...)
	}
	some := make([]*lane, short)
	for i := range some {
		some[i] = out[(2*i+1)*len(out)/(2*short)] // far from each other
	}
	q, g2 := bs[1].subscribe("many", "mail", nil)
	began := time.Now()
	b.ExtendLanes(t.Context(), g, one(some), 2)
	back := map[string]time.Duration{}
	for len(back) < short {
		for _, l := range bs[1].receive(q, g2, 3, 20*time.Second) {
			if l.attempt != 2 || l.Offset != 0 {
				t.Errorf("%s at %d, attempt %d", l.key, l.Offset, l.attempt)
			}
			back[l.key] = time.Since(began)
		}
	}
	for _, l := range some {
		if took := back[l.key]; took < 2*time.Second || took > 3*time.Second {
			t.Errorf("%s came back after %v", l.key, took)
		}
	}
	t.Logf("back after %v", slices.Max(slices.Collect(maps.Values(back))))
}

// TestWokenOnTime: whoever waits gets a delayed message, and one that a transaction in SQL publishes, within a second of the moment that
// it is due or committed, on any of two brokers and whichever stored it.
func TestWokenOnTime(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	for _, how := range []string{"delay", "publish", "publish with a delay", "publish to a new key"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			qs, gs := make([]*catalog.Queue, 2), make([]*catalog.Group, 2)
			for i, b := range bs {
				qs[i], gs[i] = b.subscribe(how, how, nil)
			}
			var late []time.Duration
			n := max(rounds(40), 8)
			for i := range n {
				receiver, publisher := i%2, i/2%2
				b := bs[receiver]
				got := make(chan []*lane, 1)
				var at time.Time
				go func() {
					ls := b.receive(qs[receiver], gs[receiver], 10, 20*time.Second)
					at = time.Now()
					got <- ls
				}()
				time.Sleep(time.Duration(i%4) * 20 * time.Millisecond) // parked already, or not yet
				key, payload := "k", fmt.Sprint(i)
				delay := time.Duration(50+37*i%300) * time.Millisecond
				var due time.Time
				switch how {
				case "delay":
					_, err := bs[publisher].Schedule(t.Context(), qs[publisher], []groupcommit.Scheduled{{Key: &key, Delay: delay, Message: segment.Message{Payload: []byte(payload)}}})
					if err != nil {
						t.Fatal(err)
					}
					due = time.Now().Add(delay)
				case "publish with a delay":
					exec(t, bs[publisher].Pool, "select ferrymq.publish($1, 'k', $2::text::json, delay => $3::int * interval '1 ms')", how, payload, int(delay.Milliseconds()))
					due = time.Now().Add(delay)
				default:
					if how == "publish to a new key" {
						key = payload
					}
					exec(t, bs[publisher].Pool, "select ferrymq.publish($1, $2, $3::text::json)", how, key, payload)
					due = time.Now()
				}
				ls := <-got
				if len(ls) != 1 || ls[0].payload != payload || ls[0].key != key {
					t.Fatalf("round %d: %+v", i, ls)
				}
				took := at.Sub(due)
				if took > soon || took < -delay {
					t.Fatalf("round %d: received %v after it was due", i, took)
				}
				late = append(late, took)
				if err := b.AckLanes(t.Context(), gs[receiver], one(ls)); err != nil || ls[0].Err != nil {
					t.Fatal(err, ls[0].Err)
				}
			}
			slices.Sort(late)
			t.Logf("%d rounds: p50 %v, longest %v", n, late[n/2], late[n-1])
			if late[n*9/10] > time.Second { // a busy machine may be late once in a while
				t.Errorf("p90 is %v", late[n*9/10])
			}
		})
	}
}
