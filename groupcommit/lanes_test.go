package groupcommit_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"ferrymq/catalog"
	"ferrymq/groupcommit"
	"ferrymq/segment"
)

// subscribe makes a subscription that changes the usual policy.
func (b *broker) subscribe(queue, sub string, change func(*catalog.Policy)) (*catalog.Queue, *catalog.Group) {
	b.t.Helper()
	q, err := b.Catalog.EnsureQueue(b.t.Context(), queue)
	if err != nil {
		b.t.Fatal(err)
	}
	g, err := b.Catalog.Subscribe(b.t.Context(), q, sub, nil, func(p *catalog.Policy) error {
		if change != nil {
			change(p)
		}
		return nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return q, g
}

// lane is one delivery with what is in it.
type lane struct {
	groupcommit.Delivered
	key, payload string
	attempt      int32
}

// late says that a wait, if it was short, may just have been over on a busy machine before its first flush was through.
func late(err error) bool {
	return errors.Is(err, groupcommit.ErrNoConnection) || errors.Is(err, groupcommit.ErrUnknown)
}

func (b *broker) receive(q *catalog.Queue, g *catalog.Group, max int64, wait time.Duration) (out []*lane) {
	b.t.Helper()
	d, err := b.Receive(b.t.Context(), g, max, wait, "tester")
	if late(err) && wait > 0 && wait < time.Second {
		return nil
	}
	if err != nil {
		b.t.Fatal(err)
	}
	if d == nil {
		return nil
	}
	for _, s := range d.Spans {
		if s.Take != 1 {
			b.t.Fatalf("a lane delivered %d messages at once", s.Take)
		}
		seg := s.Segments[0]
		open, err := segment.DecodeRange(b.Keys, seg.Codec, seg.KeyNo, seg.FirstID, int(seg.Count), seg.Frames, int(s.Start-seg.Base), int(s.Start-seg.Base)+1)
		if err != nil {
			b.t.Fatal(err)
		}
		m := open.Raw(int(s.Start - seg.Base))
		out = append(out, &lane{groupcommit.Delivered{Partition: s.Row.ID, Offset: s.Start, Lease: d.Lease}, s.Partition.Name, string(m.Payload), s.Attempt})
	}
	return out
}

func one(ls []*lane) (ds []*groupcommit.Delivered) {
	for _, l := range ls {
		ds = append(ds, &l.Delivered)
	}
	return ds
}

func TestLanes(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 2} {
		t.Run(fmt.Sprint(n, " brokers"), func(t *testing.T) {
			t.Parallel()
			bs := together(t, n, setup{})
			a, b := bs[0], bs[n-1]
			q, g := a.subscribe("orders", "mail", func(p *catalog.Policy) { p.MaxAttempts, p.Initial = 3, 50*time.Millisecond })
			qb, gb := b.subscribe("orders", "mail", func(p *catalog.Policy) { p.MaxAttempts, p.Initial = 3, 50*time.Millisecond })
			for _, key := range []string{"x", "y", "z"} {
				a.push("orders", key, items(3, key)...)
			}
			first := a.receive(q, g, 10, 0)
			if len(first) != 3 {
				t.Fatalf("%d lanes", len(first))
			}
			if more := b.receive(qb, gb, 10, 0); len(more) != 0 {
				t.Fatalf("a second message of a lane: %v", more[0])
			}
			if err := b.AckLanes(t.Context(), gb, one(first)); err != nil {
				t.Fatal(err)
			}
			for _, l := range first {
				if l.Err != nil || l.attempt != 1 {
					t.Errorf("%+v", l)
				}
			}
			if err := a.AckLanes(t.Context(), g, one(first)); err != nil || !errors.Is(first[0].Err, groupcommit.ErrSettled) {
				t.Errorf("acked again: %v %v", err, first[0].Err)
			}
			// A message that fails three times is out of the way.
			for attempt := int32(1); attempt <= 3; attempt++ {
				got := b.receive(qb, gb, 1, 10*time.Second)
				for len(got) == 1 && got[0].key != "x" {
					if err := b.AckLanes(t.Context(), gb, one(got)); err != nil {
						t.Fatal(err)
					}
					got = b.receive(qb, gb, 1, 10*time.Second)
				}
				if len(got) != 1 || got[0].payload != `"x-1"` || got[0].attempt != attempt {
					t.Fatalf("attempt %d: %+v", attempt, got[0])
				}
				if err := a.NackLanes(t.Context(), g, one(got), "boom 42", "boom #", -1); err != nil || got[0].Err != nil {
					t.Fatal(err, got[0].Err)
				}
			}
			for {
				got := b.receive(qb, gb, 1, 10*time.Second)
				if len(got) != 1 {
					t.Fatal("x-2 does not come")
				}
				if err := b.AckLanes(t.Context(), gb, one(got)); err != nil {
					t.Fatal(err)
				}
				if got[0].payload == `"x-2"` {
					if got[0].attempt != 1 {
						t.Errorf("attempt %d", got[0].attempt)
					}
					break
				}
			}
			var dead int
			if err := a.Pool.QueryRow(t.Context(), "select count(*) from ferrymq.dead_letters where retry_count = 3 and signature = 'boom #' and error_message = 'boom 42'").Scan(&dead); err != nil || dead != 1 {
				t.Errorf("%d dead letters, %v", dead, err)
			}
		})
	}
}

// TestLaneExpiry: the end of a lease is a failed attempt, at the last one the message is dead-lettered and the lane goes on.
func TestLaneExpiry(t *testing.T) {
	t.Parallel()
	b := start(t, together(t, 1, setup{})[0].dsn, setup{})
	q, g := b.subscribe("orders", "mail", func(p *catalog.Policy) { p.MaxAttempts, p.Initial, p.LeaseSeconds = 2, 100*time.Millisecond, 1 })
	b.push("orders", "k", items(2, "m")...)
	one1 := b.receive(q, g, 1, 0)
	two := b.receive(q, g, 1, 10*time.Second)
	if len(two) != 1 || two[0].payload != `"m-0"` || two[0].attempt != 2 {
		t.Fatalf("%+v", two)
	}
	if err := b.AckLanes(t.Context(), g, one(one1)); err != nil || !errors.Is(one1[0].Err, groupcommit.ErrLeaseLost) {
		t.Errorf("%v %v", err, one1[0].Err)
	}
	three := b.receive(q, g, 1, 10*time.Second)
	if len(three) != 1 || three[0].payload != `"m-1"` || three[0].attempt != 1 {
		t.Fatalf("%+v", three[0])
	}
	if b.ExtendLanes(t.Context(), g, one(three), 30); three[0].Err != nil || time.Until(three[0].Until) < 20*time.Second {
		t.Errorf("%v", three[0])
	}
	if err := b.ReleaseLanes(t.Context(), g, one(three)); err != nil || three[0].Err != nil {
		t.Error(err, three[0].Err)
	}
	again := b.receive(q, g, 1, 0)
	if len(again) != 1 || again[0].attempt != 1 {
		t.Errorf("released: %+v", again)
	}
}

func TestLaneLimit(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{})
	q, g := bs[0].subscribe("orders", "mail", func(p *catalog.Policy) { p.MaxInFlight = 5 })
	for n := range 20 {
		bs[0].push("orders", fmt.Sprint(n), item{payload: "1"})
	}
	q2, g2 := bs[1].subscribe("orders", "mail", nil)
	got := append(bs[0].receive(q, g, 4, 0), bs[1].receive(q2, g2, 4, 0)...)
	if len(got) != 5 {
		t.Errorf("%d in flight", len(got))
	}
	if err := bs[1].AckLanes(t.Context(), g2, one(got[:2])); err != nil {
		t.Fatal(err)
	}
	if more := bs[0].receive(q, g, 10, 0); len(more) != 2 {
		t.Errorf("%d more", len(more))
	}
}
