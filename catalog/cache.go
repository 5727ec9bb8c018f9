package catalog

import "sync"

// cache is a bounded map that forgets what was not used lately: when young is full it becomes old, and old is dropped.
// It costs no list and no time per access; what is used moves back to young.
type cache[K comparable, V any] struct {
	mu         sync.Mutex
	young, old map[K]V
	size       int // of one generation
}

func newCache[K comparable, V any](size int) *cache[K, V] {
	return &cache[K, V]{young: make(map[K]V), size: size}
}

func (c *cache[K, V]) get(k K) (V, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	v, ok := c.young[k]
	if !ok {
		if v, ok = c.old[k]; ok {
			c.put(k, v)
		}
	}
	return v, ok
}

// add stores v unless k is there already, and returns what is there.
func (c *cache[K, V]) add(k K, v V) V {
	c.mu.Lock()
	defer c.mu.Unlock()
	if have, ok := c.young[k]; ok {
		return have
	}
	if have, ok := c.old[k]; ok {
		v = have
	}
	c.put(k, v)
	return v
}

func (c *cache[K, V]) set(k K, v V) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.put(k, v)
}

// setUnless stores v, except when better says that what is there should stay. It returns what is there then.
func (c *cache[K, V]) setUnless(k K, v V, better func(V) bool) V {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range []map[K]V{c.young, c.old} {
		if have, ok := m[k]; ok && better(have) {
			return have
		}
	}
	c.put(k, v)
	return v
}

func (c *cache[K, V]) put(k K, v V) {
	if len(c.young) >= c.size {
		c.young, c.old = make(map[K]V), c.young
	}
	c.young[k] = v
}

func (c *cache[K, V]) drop(k K) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.young, k)
	delete(c.old, k)
}

func (c *cache[K, V]) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.young, c.old = make(map[K]V), nil
}

// dropIf walks the whole cache: for rare events only.
func (c *cache[K, V]) dropIf(match func(V) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range []map[K]V{c.young, c.old} {
		for k, v := range m {
			if match(v) {
				delete(m, k)
			}
		}
	}
}
