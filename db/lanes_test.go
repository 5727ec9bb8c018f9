package db_test

import (
	"testing"

	"github.com/google/uuid"

	"ferrymq/db"
	"ferrymq/dbtest"
)

// TestClaimExhausted: what a broker only has to file is not leased to it for as long as to a consumer. Found again, it is exhausted still.
func TestClaimExhausted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	q := w.queue("q", "")
	g := w.group(q, "g")
	w.exec("update ferrymq.groups set kind = 1, project_id = 1, lease_seconds = 43200, max_attempts = 1 where id = $1", g)
	p := w.partition(q, "p", 2)
	take := list{group: g, scan: true}
	for n, want := range []struct {
		ms        int64
		exhausted bool
	}{{43_200_000, false}, {30_000, true}, {30_000, true}} {
		take.slots = []slot{{lease: uuid.New(), budget: 1}}
		got := w.claim(take)
		if len(got.spans) != 1 {
			t.Fatalf("claim %d: %+v", n, got.spans)
		}
		r := got.spans[0].segments[0]
		if r.LeaseMs != want.ms || r.Exhausted != want.exhausted || r.StartOffset != 0 || r.Attempt != 1 {
			t.Errorf("claim %d: leased for %d ms, exhausted %v, at %d, attempt %d", n, r.LeaseMs, r.Exhausted, r.StartOffset, r.Attempt)
		}
		w.exec("update ferrymq.cursors set lease_until = clock_timestamp() - interval '1 ms' where partition_id = $1", p)
	}
}

// TestRaceLimit: two claims at once count the same messages in flight, unless they lock the group first.
func TestRaceLimit(t *testing.T) {
	t.Parallel()
	for _, locked := range []bool{false, true} {
		w := newWorld(t, 6)
		q := w.queue("q", "")
		g := w.group(q, "g")
		w.exec("update ferrymq.groups set kind = 1, project_id = 1, max_in_flight = 1 where id = $1", g)
		w.partition(q, "a", 1)
		w.partition(q, "b", 1)
		claim := func(s *session) error {
			if locked {
				if err := s.LockGroups(w.ctx(), db.LockGroupsParams{Ids: []int32{g}}); err != nil {
					return err
				}
			}
			_, err := s.ClaimPartitions(w.ctx(), claims(list{group: g, scan: true, limited: true, slots: slots(1, 1, 1)}))
			return err
		}
		a, b := w.begin(), w.begin()
		check(t, claim(a))
		other := async(func() error { return claim(b) })
		if locked {
			dbtest.WaitBlocked(t, w.pool, 1)
			a.commit()
			check(t, finish(t, other))
		} else {
			check(t, finish(t, other))
			a.commit()
		}
		b.commit()
		want := map[bool]int{false: 2, true: 1}[locked] // without the lock this race is lost
		equal(t, "in flight", one[int](w, "select count(*) from ferrymq.in_flight"), want)
	}
}
