package main

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// subBits is the resolution of a histogram: 2^subBits linear buckets per power of two, so a
// bucket is at most 1/128 of its value wide and its middle at most 0.4 % off.
const subBits = 7

// maxBits bounds what is told apart: 2^43 ns, two and a half hours.
const maxBits = 43

// hist is a log-linear histogram of nanoseconds with fixed buckets, safe for concurrent use.
type hist struct {
	buckets [(maxBits - subBits + 1) << subBits]atomic.Int64
	max     atomic.Int64
}

// bucketOf maps nanoseconds to a bucket.
func bucketOf(ns int64) int {
	v := uint64(max(ns, 0))
	n := bits.Len64(v)
	if n <= subBits {
		return int(v)
	}
	if n > maxBits {
		return (maxBits-subBits+1)<<subBits - 1
	}
	shift := n - subBits - 1
	return (shift+1)<<subBits + int(v>>shift) - 1<<subBits
}

// valueOf is the middle of a bucket in nanoseconds.
func valueOf(b int) int64 {
	if b < 1<<subBits {
		return int64(b)
	}
	shift := b>>subBits - 1
	low := int64(b&(1<<subBits-1)+1<<subBits) << shift
	return low + int64(1)<<shift/2
}

func (h *hist) record(ns int64) {
	h.buckets[bucketOf(ns)].Add(1)
	for {
		m := h.max.Load()
		if ns <= m || h.max.CompareAndSwap(m, ns) {
			return
		}
	}
}

// reset empties h; samples recorded meanwhile may stay or go.
func (h *hist) reset() {
	for i := range h.buckets {
		h.buckets[i].Store(0)
	}
	h.max.Store(0)
}

func (h *hist) count() (n int64) {
	for i := range h.buckets {
		n += h.buckets[i].Load()
	}
	return n
}

// quantile answers the latency below which the share q of the samples lies.
func (h *hist) quantile(q float64) time.Duration {
	total := h.count()
	if total == 0 {
		return 0
	}
	rank := max(int64(q*float64(total)+0.9999999), 1)
	for i := range h.buckets {
		if rank -= h.buckets[i].Load(); rank <= 0 {
			return time.Duration(min(valueOf(i), h.max.Load()))
		}
	}
	return time.Duration(h.max.Load())
}
