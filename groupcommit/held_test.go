package groupcommit

import (
	"testing"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
)

// A lease of which a part was dropped while it was claimed is not remembered as if the rest were all of it: its extend asks the database.
func TestHeldInPart(t *testing.T) {
	began := time.Now()
	span := func(partition int64) *Span {
		return &Span{Group: &catalog.Group{ID: 1}, Row: catalog.Row{ID: partition}, Take: 1, lease: time.Minute, began: began}
	}
	for _, dropped := range []int64{0, 1, 2} {
		h, lease := newHolding(), uuid.New()
		if dropped > 0 {
			h.drop(1, dropped)
		}
		h.add(lease, span(1), span(2))
		want := 2
		if dropped > 0 {
			want = 0
		}
		if got := len(h.cursors(lease)); got != want {
			t.Errorf("dropped %d: the lease has %d cursors, want %d", dropped, got, want)
		}
		for p := int64(1); p <= 2; p++ {
			if _, known := h.get(1, p, lease); known != (p != dropped) {
				t.Errorf("dropped %d: %d is known: %v", dropped, p, known)
			}
		}
	}
}
