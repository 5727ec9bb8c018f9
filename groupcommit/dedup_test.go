package groupcommit_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"ferrymq/catalog"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
)

// TestDedupMemory: whatever the memory of an engine holds, an id is queued once.
func TestDedupMemory(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		bytes   int64
		engines int
		cold    bool // a new engine for every push
	}{
		{"one engine", 16 << 20, 1, false},
		{"no memory", 0, 1, false},
		{"tiny memory", 1 << 10, 1, false},
		{"two engines in turn", 16 << 20, 2, false},
		{"two engines in turn, tiny memory", 1 << 10, 2, false},
		{"cold", 16 << 20, 1, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dsn := dbtest.New(t)
			fresh := func() *broker {
				return start(t, dsn, setup{alone: true, pool: 4, change: func(o *groupcommit.Options) { o.DedupBytes = c.bytes }})
			}
			var bs []*broker
			for range c.engines {
				bs = append(bs, fresh())
			}
			first := make(map[string]string)
			ids := rounds(200)
			for n := range 3 * ids {
				if c.cold && n%60 == 0 {
					bs[0].stop()
					bs[0] = fresh()
				}
				b := bs[n%len(bs)]
				id := fmt.Sprint("id-", (n*37)%ids)
				p := fmt.Sprint("p", ((n*37)%ids)%3)
				r := b.push("dedup.q", p, item{id: id, payload: fmt.Sprint(n)})
				got := r[0].ID.String()
				if have, again := first[id]; again != r[0].Duplicate || (again && have != got) {
					t.Fatalf("push %d of %s: %+v, first was %q", n, id, r[0], have)
				}
				if !r[0].Duplicate {
					first[id] = got
				}
			}
			if n := number(t, bs[0].Pool, "select sum(next_offset)::bigint from ferrymq.partitions"); n != int64(ids) {
				t.Errorf("%d are stored, want %d", n, ids)
			}
		})
	}
}

// TestDedupTogether: equal ids pushed at once, in one request, in several on one flush, and on two brokers.
func TestDedupTogether(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{})
	const q = "same.q"
	r := bs[0].push(q, "p", item{id: "a", payload: `"1"`}, item{payload: `"2"`}, item{id: "a", payload: `"3"`}, item{id: "b", payload: `"4"`}, item{id: "a", payload: `"5"`})
	if r[0].Duplicate || r[1].Duplicate || r[3].Duplicate || !r[2].Duplicate || !r[4].Duplicate || r[2].ID != r[0].ID || r[4].ID != r[0].ID {
		t.Errorf("in one request: %+v", r)
	}
	r2 := bs[1].push(q, "p", item{id: "b", payload: `"6"`}, item{id: "c", payload: `"7"`}, item{id: "c", payload: `"8"`})
	if !r2[0].Duplicate || r2[0].ID != r[3].ID || r2[1].Duplicate || !r2[2].Duplicate || r2[2].ID != r2[1].ID {
		t.Errorf("with an old one: %+v", r2)
	}
	if r := bs[0].push(q, "other", item{id: "a", payload: `"1"`}); r[0].Duplicate {
		t.Error("another partition has its own window")
	}
	for n := range rounds(100) {
		id := fmt.Sprint("n-", n)
		var mu sync.Mutex
		queued, ids := 0, make(map[string]int)
		var work sync.WaitGroup
		for i := range 8 {
			work.Go(func() {
				r, err := bs[i%2].tryPush(context.Background(), q, fmt.Sprint("p", n%5), item{id: id, payload: fmt.Sprint(i)})
				if err != nil {
					t.Errorf("push: %v", err)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				if ids[r[0].ID.String()]++; !r[0].Duplicate {
					queued++
				}
			})
		}
		work.Wait()
		if queued != 1 || len(ids) != 1 {
			t.Fatalf("%s: %d queued, ids %v", id, queued, ids)
		}
	}
}

// TestDedupWindow: the window is judged by when a message was stored.
func TestDedupWindow(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{alone: true})
	const q = "window.q"
	if _, err := b.Catalog.Configure(t.Context(), q, func(x *catalog.Queue) error { x.DedupWindowSeconds = 100; return nil }); err != nil {
		t.Fatal(err)
	}
	old := b.push(q, "p", item{id: "old", payload: "1"})[0]
	b.push(q, "p", item{id: "middle", payload: "2"})
	young := b.push(q, "p", item{id: "young", payload: "3"})[0]
	exec(t, b.Pool, "update ferrymq.segments set created_at = clock_timestamp() - (case base_offset when 0 then 150 when 1 then 110 else 90 end) * interval '1 second'")
	for _, bytes := range []int64{1 << 20, 0} {
		cold := start(t, dsn, setup{alone: true, change: func(o *groupcommit.Options) { o.DedupBytes = bytes }})
		if r := cold.push(q, "p", item{id: "young", payload: "x"})[0]; !r.Duplicate || r.ID != young.ID {
			t.Errorf("inside the window: %+v", r)
		}
		id := fmt.Sprint("mark-", bytes)
		cold.push(q, "p", item{id: id, payload: "x"})
		if r := cold.push(q, "p", item{id: id, payload: "x"})[0]; !r.Duplicate {
			t.Error("just stored, and no duplicate")
		}
	}
	cold := start(t, dsn, setup{alone: true})
	r := cold.push(q, "p", item{id: "old", payload: "4"}, item{id: "middle", payload: "5"})
	if r[0].Duplicate || r[1].Duplicate || r[0].ID == old.ID {
		t.Errorf("outside of the window: %+v", r)
	}
	if r := cold.push(q, "p", item{id: "old", payload: "6"}); !r[0].Duplicate {
		t.Error("queued again, and then not a duplicate of that")
	}
	// Off: not even inside a request.
	if _, err := cold.Catalog.Configure(t.Context(), q, func(x *catalog.Queue) error { x.DedupWindowSeconds = 0; return nil }); err != nil {
		t.Fatal(err)
	}
	if r := cold.push(q, "p", item{id: "old", payload: "7"}, item{id: "old", payload: "8"}); r[0].Duplicate || r[1].Duplicate {
		t.Errorf("switched off: %+v", r)
	}
}

// TestDedupFailed: a push that failed leaves no trace, neither in the database nor in memory.
func TestDedupFailed(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{alone: true})
	const q = "trace.q"
	b.push(q, "p", item{id: "0", payload: "0"})
	exec(t, b.Pool, `create function refuse() returns trigger language plpgsql as $$ begin raise exception 'not now'; end $$`)
	for range 3 {
		exec(t, b.Pool, `create trigger refuse before insert on ferrymq.segments for each row execute function refuse()`)
		for _, p := range []string{"p", "new"} {
			if _, err := b.tryPush(t.Context(), q, p, item{id: "a", payload: "1"}); err == nil {
				t.Fatal("stored")
			}
		}
		exec(t, b.Pool, `drop trigger refuse on ferrymq.segments`)
	}
	for _, p := range []string{"p", "new"} {
		if r := b.push(q, p, item{id: "a", payload: "1"}); r[0].Duplicate {
			t.Errorf("%s: a failed push left its id behind", p)
		}
		if r := b.push(q, p, item{id: "a", payload: "1"}); !r[0].Duplicate {
			t.Errorf("%s: queued twice", p)
		}
	}
}

// TestDedupHammer: two brokers and many producers on one partition, every id pushed several times.
func TestDedupHammer(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{change: func(o *groupcommit.Options) { o.DedupBytes = 64 << 10 }})
	end := time.Now().Add(3 * time.Second)
	if testing.Short() {
		end = time.Now().Add(time.Second)
	}
	var queued, answered atomic.Int64
	var work sync.WaitGroup
	for i := range 12 {
		work.Go(func() {
			for n := 0; time.Now().Before(end); n++ {
				var ms []item
				for j := range 5 {
					ms = append(ms, item{id: fmt.Sprint("h-", n*5+j), payload: fmt.Sprint(i)})
				}
				r, err := bs[i%2].tryPush(context.Background(), "hammer.q", "p", ms...)
				if err != nil {
					t.Errorf("push: %v", err)
					return
				}
				for _, x := range r {
					if answered.Add(1); !x.Duplicate {
						queued.Add(1)
					}
				}
			}
		})
	}
	work.Wait()
	stored := readStored(t, bs[0])["hammer.q/p"]
	seen := make(map[string]bool)
	for _, m := range stored {
		if seen[m.tx] {
			t.Errorf("%s is queued twice", m.tx)
		}
		seen[m.tx] = true
	}
	if int64(len(stored)) != queued.Load() {
		t.Errorf("%d stored, %d answered as queued", len(stored), queued.Load())
	}
	t.Logf("%d answered, %d queued", answered.Load(), queued.Load())
}
