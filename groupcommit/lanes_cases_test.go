package groupcommit_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"ferrymq/catalog"
	"ferrymq/groupcommit"
)

// ackAll settles deliveries that must be good.
func (b *broker) ackAll(g *catalog.Group, ls []*lane) {
	b.t.Helper()
	if err := b.AckLanes(b.t.Context(), g, one(ls)); err != nil {
		b.t.Fatal(err)
	}
	for _, l := range ls {
		if l.Err != nil {
			b.t.Fatalf("%s: %v", l.key, l.Err)
		}
	}
}

// publishKeys publishes one message to each of n keys.
func (b *broker) publishKeys(stream, prefix string, n int) {
	b.t.Helper()
	var all []*groupcommit.Push
	for i := range n {
		p, err := b.newPush(b.t.Context(), stream, fmt.Sprint(prefix, i), items(1, prefix))
		if err != nil {
			b.t.Fatal(err)
		}
		all = append(all, p)
	}
	if err := b.Push(b.t.Context(), all); err != nil {
		b.t.Fatal(err)
	}
}

// TestHotKey: a key with a large backlog delays nobody, whether its head is held or it is acked all the time.
func TestHotKey(t *testing.T) {
	t.Parallel()
	b := together(t, 1, setup{})[0]
	q, g := b.subscribe("hot", "mail", lasting(nil))
	for range 20 {
		b.push("hot", "hot", items(1000, "h")...)
	}
	held := b.next(q, g, `"h-0"`, 1)
	b.publishKeys("hot", "cold", 1)
	began := time.Now()
	if ls := b.receive(q, g, 10, 5*time.Second); len(ls) != 1 || ls[0].key != "cold0" {
		t.Fatalf("beside a key that is held came %+v", ls)
	} else {
		b.ackAll(g, ls)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("the message beside a key that is held took %v", took)
	}
	b.ackAll(g, []*lane{held})
	for _, max := range []int64{1, 100} {
		b.publishKeys("hot", fmt.Sprint("m", max, "."), 100)
		served, deliveries, least := 0, 0, map[int64]int{1: 250, 100: 110}[max]
		for served < 100 {
			ls := b.receive(q, g, max, soon)
			if len(ls) == 0 {
				t.Fatalf("max_messages %d: %d of 100 keys came", max, served)
			}
			for _, l := range ls {
				deliveries++
				if l.key != "hot" {
					served++
				}
			}
			b.ackAll(g, ls)
		}
		t.Logf("max_messages %d: 100 keys behind a backlog came within %d deliveries", max, deliveries)
		if deliveries > least {
			t.Errorf("max_messages %d: 100 keys took %d deliveries", max, deliveries)
		}
	}
}

// TestPoisonKeys: keys whose messages always fail leave the others alone, and a worker that nacks goes on receiving.
func TestPoisonKeys(t *testing.T) {
	t.Parallel()
	const poison, good = 50, 500
	bs := together(t, 2, setup{})
	bs[0].subscribe("poison", "mail", func(p *catalog.Policy) { p.Initial, p.MaxAttempts = time.Second, 0 })
	bs[0].publishKeys("poison", "bad", poison)
	bs[0].publishKeys("poison", "good", good)
	var mu sync.Mutex
	attempts := map[string]int32{}
	acked := 0
	began := time.Now()
	var all sync.WaitGroup
	for n := range 10 {
		all.Go(func() {
			b := bs[n%2]
			q, g := b.subscribe("poison", "mail", nil)
			for {
				mu.Lock()
				done := acked == good && len(attempts) == poison && slices.Min(slices.Collect(maps.Values(attempts))) >= 2
				mu.Unlock()
				if done || time.Since(began) > 30*time.Second {
					return
				}
				for _, l := range b.receive(q, g, 3, time.Second) {
					if strings.HasPrefix(l.key, "bad") {
						if err := b.NackLanes(t.Context(), g, one([]*lane{l}), "bad", "bad", -1); err != nil || l.Err != nil {
							t.Error(err, l.Err)
						}
						mu.Lock()
						if l.attempt != attempts[l.key]+1 {
							t.Errorf("%s: attempt %d after %d", l.key, l.attempt, attempts[l.key])
						}
						attempts[l.key] = l.attempt
						mu.Unlock()
						continue
					}
					if err := b.AckLanes(t.Context(), g, one([]*lane{l})); err != nil || l.Err != nil || l.attempt != 1 {
						t.Errorf("%s, attempt %d: %v %v", l.key, l.attempt, err, l.Err)
					}
					mu.Lock()
					acked++
					mu.Unlock()
				}
			}
		})
	}
	all.Wait()
	took := time.Since(began)
	failures := int32(0)
	for k, n := range attempts {
		failures += n
		// Waits of 1 s, 2 s, 4 s, …, each at least 90 % of that.
		if most := took.Seconds()/0.9 + 1; float64(int(1)<<(n-1)) > most {
			t.Errorf("%s was delivered %d times within %v", k, n, took)
		}
	}
	if acked != good || len(attempts) != poison {
		t.Errorf("%d of %d messages were acked, %d of %d keys failed", acked, good, len(attempts), poison)
	}
	t.Logf("%d acked, %d failures of %d keys, in %v", acked, failures, len(attempts), took.Round(time.Millisecond))
}

// TestSameOrder: two subscriptions see each key in the same order, whoever publishes.
func TestSameOrder(t *testing.T) {
	t.Parallel()
	const keys, publishers, each = 20, 10, 10
	bs := together(t, 2, setup{})
	for _, sub := range []string{"one", "two"} {
		bs[0].subscribe("same", sub, lasting(nil))
	}
	var all sync.WaitGroup
	for n := range publishers {
		all.Go(func() {
			for i := range each {
				for k := range keys {
					if _, err := bs[n%2].tryPush(t.Context(), "same", fmt.Sprint("k", k), item{payload: fmt.Sprint(n*each + i)}); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	var mu sync.Mutex
	seen := map[string]map[string][]string{"one": {}, "two": {}}
	for i, sub := range []string{"one", "two"} {
		for range 3 {
			all.Go(func() {
				b := bs[i]
				q, g := b.subscribe("same", sub, nil)
				for n := 0; n < 5; {
					ls := b.receive(q, g, 7, time.Second)
					if len(ls) == 0 {
						n++
						continue
					}
					mu.Lock()
					for _, l := range ls {
						seen[sub][l.key] = append(seen[sub][l.key], l.payload)
					}
					mu.Unlock()
					if err := b.AckLanes(t.Context(), g, one(ls)); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	all.Wait()
	for k := range keys {
		key := fmt.Sprint("k", k)
		one, two := seen["one"][key], seen["two"][key]
		if len(one) != publishers*each || !slices.Equal(one, two) {
			t.Errorf("%s: %d and %d messages:\n%v\n%v", key, len(one), len(two), one, two)
		}
	}
}

// TestCrashingMessage: a message at which its consumer dies takes down those that were received with it, again and again. Backoffs spread
// them, so that they come without it before their attempts are used up: only it becomes a dead letter.
func TestCrashingMessage(t *testing.T) {
	t.Parallel()
	b := together(t, 1, setup{})[0]
	q, g := b.subscribe("crash", "mail", lasting(func(p *catalog.Policy) {
		p.Initial, p.Max, p.MaxAttempts = 500*time.Millisecond, 500*time.Millisecond, 8
	}))
	b.publishKeys("crash", "good", 9)
	b.publishKeys("crash", "bad", 1)
	acked, crashes := 0, 0
	for acked < 9 || number(t, b.Pool, "select count(*) from ferrymq.dead_letters where group_id = $1", g.ID) == 0 {
		got := b.receive(q, g, 10, 5*time.Second)
		if slices.ContainsFunc(got, func(l *lane) bool { return strings.HasPrefix(l.key, "bad") }) {
			if crashes++; crashes > 8 {
				t.Fatal("it came more than 8 times")
			}
			b.expire(g) // of all that this consumer has
			continue
		}
		if err := b.AckLanes(t.Context(), g, one(got)); err != nil {
			t.Fatal(err)
		}
		acked += len(got)
	}
	if n := number(t, b.Pool, "select count(*) from ferrymq.dead_letters where group_id = $1", g.ID); acked != 9 || n != 1 || crashes != 8 {
		t.Errorf("%d acked, %d dead letters, %d crashes", acked, n, crashes)
	}
}
