package groupcommit_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"ferrymq/dbtest"
	"ferrymq/groupcommit"
)

// TestVisits: pops that take one partition each come by all partitions alike, on one broker and on two.
func TestVisits(t *testing.T) {
	t.Parallel()
	for _, brokers := range []int{1, 2} {
		t.Run(fmt.Sprint(brokers), func(t *testing.T) {
			t.Parallel()
			const partitions, messages, poppers, rounds = 100, 60, 50, 20
			bs := together(t, brokers, setup{pool: 8})
			for p := range partitions {
				bs[0].push("fair.q", fmt.Sprint("p", p), items(messages, "m")...)
			}
			var mu sync.Mutex
			visits, last := make(map[string]int), make(map[string]int)
			total, longest := 0, 0
			var work sync.WaitGroup
			for n := range poppers {
				b := bs[n%brokers]
				work.Go(func() {
					for range partitions * rounds / poppers {
						d, err := b.tryPop(context.Background(), wide("fair.q", "g", 1, 1, 20*time.Second))
						if d == nil || err != nil {
							t.Errorf("nothing: %v", err)
							return
						}
						p := d.messages[0].partition
						mu.Lock()
						longest = max(longest, total-last[p])
						visits[p]++
						total++
						mu.Unlock()
						b.tryAck(context.Background(), "g", d.Lease, d.messages[0].public, says(groupcommit.Completed, d.messages...)...)
						mu.Lock()
						last[p] = total // it was not to be had before
						mu.Unlock()
					}
				})
			}
			work.Wait()
			least, most := rounds*partitions, 0
			for p := range partitions {
				n := visits[fmt.Sprint("p", p)]
				least, most = min(least, n), max(most, n)
			}
			t.Logf("%d to %d visits, %d on average, at most %d pops between two of one partition", least, most, rounds, longest)
			// Half of its share at least, twice at most: which flush a pop gets on is chance.
			if 2*least < rounds || most > 2*rounds || longest > rounds/2*partitions {
				t.Errorf("%d to %d visits, at most %d pops between two of one partition", least, most, longest)
			}
		})
	}
}

// TestParkedOneSubscription: one message for a subscription on which 500 receives wait wakes one of them.
func TestParkedOneSubscription(t *testing.T) {
	t.Parallel()
	var c counter
	b := start(t, dbtest.New(t), setup{recheck: slow, alone: true, change: counted(t, &c)})
	_, g := b.subscribe("one.s", "sub", nil)
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan struct{}, 500)
	var work sync.WaitGroup
	for range cap(got) {
		work.Go(func() {
			if d, _ := b.Receive(ctx, g, 10, time.Minute, ""); d != nil {
				got <- struct{}{}
			}
		})
	}
	eventually(t, "all are parked", func() bool { return b.Parked() == cap(got) })
	for n := range 10 {
		c.take()
		b.push("one.s", fmt.Sprint("k", n), item{payload: "1"})
		select {
		case <-got:
		case <-time.After(soon):
			t.Fatal("lost wakeup")
		}
		flushes, claims, queries := c.take()
		delete(queries, "PartitionFindMany") // the key is new
		if flushes > 2 || claims > 2 || len(queries) > 0 {
			t.Errorf("one message took %d flushes, %d with claims, and %v", flushes, claims, queries)
		}
		if left := b.Parked(); left != cap(got)-1-n {
			t.Errorf("%d are parked, want %d", left, cap(got)-1-n)
		}
	}
	cancel()
	work.Wait()
}
