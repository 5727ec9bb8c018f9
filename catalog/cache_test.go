package catalog

import (
	"fmt"
	"sync"
	"testing"
)

func (c *cache[K, V]) entries() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.young) + len(c.old)
}

func TestCache(t *testing.T) {
	t.Parallel()
	c := newCache[int, string](10)
	for n := range 1000 {
		c.set(n, fmt.Sprint(n))
		if _, ok := c.get(0); !ok { // used all the time: stays
			t.Fatalf("forgot what is in use after %d", n)
		}
		if e := c.entries(); e > 20 {
			t.Fatalf("%d entries", e)
		}
	}
	for n := 995; n < 1000; n++ {
		if v, ok := c.get(n); !ok || v != fmt.Sprint(n) {
			t.Errorf("%d: %q %v", n, v, ok)
		}
	}
	if _, ok := c.get(500); ok {
		t.Error("remembers what is long ago")
	}
	if v := c.add(999, "other"); v != "999" {
		t.Errorf("add replaced: %q", v)
	}
	for n := range 12 {
		c.set(2000+n, "x")
	}
	if v := c.add(999, "other"); v != "999" && v != "other" {
		t.Errorf("%q", v)
	}
	c.set(1, "one")
	c.dropIf(func(v string) bool { return v == "x" })
	if _, ok := c.get(2011); ok {
		t.Error("not dropped")
	}
	if _, ok := c.get(1); !ok {
		t.Error("dropped too much")
	}
	c.drop(1)
	if _, ok := c.get(1); ok {
		t.Error("not dropped")
	}
	c.clear()
	if e := c.entries(); e != 0 {
		t.Errorf("%d entries", e)
	}
}

// TestCacheReplace: a newer value is not hidden by what an older generation still holds.
func TestCacheReplace(t *testing.T) {
	t.Parallel()
	c := newCache[int, int](4)
	c.set(0, 1)
	for n := 1; n <= 4; n++ {
		c.set(n, n)
	} // 0 is in the old generation
	c.set(0, 2)
	c.drop(0)
	if v, ok := c.get(0); ok {
		t.Errorf("dropped, and there is %d", v)
	}
	c.set(0, 3)
	for n := 10; n < 14; n++ {
		c.set(n, n)
	}
	c.set(0, 4)
	if v, _ := c.get(0); v != 4 {
		t.Errorf("%d", v)
	}
}

func TestCacheTogether(t *testing.T) {
	t.Parallel()
	c := newCache[int, *int](50)
	var work sync.WaitGroup
	for range 8 {
		work.Go(func() {
			for n := range 5000 {
				k := n % 120
				v := c.add(k, &k)
				if *v != k {
					t.Errorf("%d is %d", k, *v)
					return
				}
				if n%97 == 0 {
					c.drop(k)
				}
			}
		})
	}
	work.Wait()
	if e := c.entries(); e > 100 {
		t.Errorf("%d entries", e)
	}
}

func TestDerive(t *testing.T) {
	t.Parallel()
	for _, c := range [][3]string{{"a.b.c", "a", "b"}, {"a.b", "a", "b"}, {"solo", "solo", ""}, {".x", "", "x"}, {"a.", "a", ""}, {"a..b", "a", ""}} {
		if n, k := Derive(c[0]); n != c[1] || k != c[2] {
			t.Errorf("%q: %q %q", c[0], n, k)
		}
	}
}
