package groupcommit_test

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/groupcommit"
	"ferrymq/segment"
)

var steps = flag.Int("steps", 0, "steps of the model run of lanes; 0: as many as a few seconds hold")

// modelKey is a key of the stream, or one of its hidden partitions.
type modelKey struct {
	name   string
	hidden bool
	tail   int64
	log    []string // payloads, also of messages that were put back for one subscription
	alone  bool     // it has such messages: then not every cursor moves in steps of its own
}

// modelLane is what one subscription should find on one key.
type modelLane struct {
	offsets  []int64 // of the messages that are for it
	head     int     // the next one
	attempts int
	lease    uuid.UUID // whose it is; also after its end, while nobody else had it
	settled  uuid.UUID
	state    laneState
	blurred  bool // settled is not known
}

type laneState int

const (
	laneReady   laneState = iota
	laneLeased            // live
	laneExpired           // the lease has ended, and nobody need have looked yet
	laneResting
)

func (l *modelLane) left() bool { return l.head < len(l.offsets) }

// advance moves the lane past its head.
func (l *modelLane) advance() {
	l.head++
	l.attempts, l.state, l.lease = 0, laneReady, uuid.Nil
}

type modelSub struct {
	name       string
	policy     func(*catalog.Policy)
	max        int
	counts     bool
	limit      int
	queue      []*catalog.Queue // by broker
	group      []*catalog.Group
	lanes      map[int64]*modelLane // by partition
	filed      int                  // dead letters that are there
	deliveries []*lane              // everything delivered lately, to settle in any order
}

// doomed says that a lane's last attempt has ended with its lease: its message becomes a dead letter when somebody looks.
func (s *modelSub) doomed(l *modelLane) bool {
	return l.state == laneExpired && s.counts && s.max > 0 && l.attempts >= s.max
}

// ready says that a receive may find the lane's head.
func (s *modelSub) ready(l *modelLane) bool {
	return l.left() && (l.state == laneReady || l.state == laneExpired && !s.counts)
}

func (s *modelSub) leased() (n int) {
	for _, l := range s.lanes {
		if l.state == laneLeased {
			n++
		}
	}
	return n
}

type laneModel struct {
	t       *testing.T
	rnd     *rand.Rand
	brokers []*broker
	subs    []*modelSub
	keys    map[int64]*modelKey
	ids     []int64 // of keys
	short   int     // receives that got less than there was
	done    map[string]int
	next    int
}

// TestLanesModel does what clients do, in any order, on two brokers, and compares every answer with a model of the contract:
// publish order and at most one message in flight per lane, attempts, what happens to settles that are late or repeated.
// At every quiet moment the database holds what the model says, message by message. Time passes by statement.
func TestLanesModel(t *testing.T) {
	t.Parallel()
	s := *seed
	if s == 0 {
		s = rand.Uint64()
	}
	t.Logf("seed %d (repeat with -seed, and -steps for long runs)", s)
	m := &laneModel{t: t, rnd: rand.New(rand.NewPCG(s, 1)), brokers: together(t, 2, setup{}), keys: map[int64]*modelKey{}, done: map[string]int{}}
	hour := func(p *catalog.Policy) { p.Initial, p.Max, p.LeaseSeconds = time.Hour, 2*time.Hour, 3600 }
	m.subs = []*modelSub{
		{name: "three", max: 3, counts: true, policy: func(p *catalog.Policy) { hour(p); p.MaxAttempts = 3 }},
		{name: "forever", counts: true, policy: func(p *catalog.Policy) { hour(p); p.MaxAttempts = 0 }},
		{name: "limited", max: 2, counts: true, limit: 4, policy: func(p *catalog.Policy) { hour(p); p.MaxAttempts, p.MaxInFlight = 2, 4 }},
		{name: "lenient", max: 2, policy: func(p *catalog.Policy) { hour(p); p.MaxAttempts, p.CountExpired = 2, false }},
	}
	for _, s := range m.subs {
		s.lanes = map[int64]*modelLane{}
		for _, b := range m.brokers {
			q, g := b.subscribe("model", s.name, s.policy)
			s.queue, s.group = append(s.queue, q), append(s.group, g)
		}
	}
	eventually(t, "the subscriptions are seeded", func() bool {
		return number(t, m.brokers[0].Pool, "select count(*) from ferrymq.groups where seeded") == int64(len(m.subs))
	})
	end := time.Now().Add(5 * time.Second)
	if testing.Short() {
		end = time.Now().Add(time.Second)
	}
	n := 0
	for ; n < *steps || *steps == 0 && (n < 100 || time.Now().Before(end)); n++ {
		m.step()
		if n%50 == 49 {
			m.quiet()
		}
		if t.Failed() {
			t.Fatalf("step %d; repeat with -seed %d", n, s)
		}
	}
	m.quiet()
	m.finish()
	t.Logf("%d steps: %v; %d receives got less than there was", n, m.done, m.short)
}

func (m *laneModel) any() (int, *broker) {
	i := m.rnd.IntN(len(m.brokers))
	return i, m.brokers[i]
}

func (m *laneModel) step() {
	s := m.subs[m.rnd.IntN(len(m.subs))]
	switch p := m.rnd.IntN(100); {
	case p < 15:
		m.publish()
	case p < 40:
		m.receive(s, int64(1+m.rnd.IntN(12)))
	case p < 60:
		m.settle(s, "ack")
	case p < 72:
		m.settle(s, "nack")
	case p < 76:
		m.settle(s, "release")
	case p < 80:
		m.settle(s, "extend")
	case p < 90:
		m.expire(s)
	case p < 96:
		m.ripen(s)
	case p < 98:
		m.redrive(s)
	default:
		m.seek(s)
	}
}

func (m *laneModel) publish() {
	_, b := m.any()
	q, err := b.Catalog.EnsureQueue(m.t.Context(), "model")
	if err != nil {
		m.t.Fatal(err)
	}
	var found []*catalog.Partition
	hidden := m.rnd.IntN(4) == 0
	if hidden {
		found, err = b.Catalog.Unkeyed(m.t.Context(), q, []int32{m.rnd.Int32N(3)})
	} else {
		found, err = b.Catalog.Partitions(m.t.Context(), q, []string{fmt.Sprint("key", m.rnd.IntN(12))})
	}
	if err != nil {
		m.t.Fatal(err)
	}
	p := &groupcommit.Push{Queue: q, Partition: found[0]}
	var payloads []string
	for range 1 + m.rnd.IntN(3) {
		payloads = append(payloads, fmt.Sprint(m.next))
		p.Messages = append(p.Messages, segment.Message{Payload: []byte(payloads[len(payloads)-1])})
		m.next++
	}
	if err := b.Push(m.t.Context(), []*groupcommit.Push{p}); err != nil || p.Err != nil {
		m.t.Fatal(err, p.Err)
	}
	row := found[0].Row()
	if row == nil {
		found, err = b.Catalog.Again(m.t.Context(), q, found[0])
		if err != nil {
			m.t.Fatal(err)
		}
		row = found[0].Row()
	}
	k := m.keys[row.ID]
	if k == nil {
		k = &modelKey{name: found[0].Name, hidden: hidden}
		m.keys[row.ID] = k
		m.ids = append(m.ids, row.ID)
		for _, s := range m.subs {
			s.lanes[row.ID] = &modelLane{}
		}
	}
	for i, r := range p.Results {
		if r.Offset != k.tail {
			m.t.Fatalf("published at %d, want %d", r.Offset, k.tail)
		}
		k.log = append(k.log, payloads[i])
		for _, s := range m.subs {
			s.lanes[row.ID].offsets = append(s.lanes[row.ID].offsets, k.tail)
		}
		k.tail++
	}
	m.done["publish"]++
}

// receive takes what is there, and checks that all that comes may come.
func (m *laneModel) receive(s *modelSub, max int64) (got int) {
	m.t.Helper()
	want := 0
	for _, l := range s.lanes {
		if s.ready(l) {
			want++
		}
	}
	want = min(want, int(max))
	if s.limit > 0 {
		want = min(want, s.limit-s.leased())
	}
	i, b := m.any()
	m.done["receive"]++
	for _, d := range b.receive(s.queue[i], s.group[i], max, 0) {
		got++
		l, k := s.lanes[d.Partition], m.keys[d.Partition]
		if s.doomed(l) { // its message is a dead letter by now
			l.advance()
			l.blurred = true
			s.filed++
		}
		if !s.ready(l) {
			m.t.Fatalf("%s got %s at %d of %s, whose lane is %+v", s.name, d.payload, d.Offset, k.name, *l)
		}
		attempt := l.attempts + 1
		if l.state == laneExpired {
			attempt-- // it does not count
		}
		if d.Offset != l.offsets[l.head] || d.payload != k.log[d.Offset] || int(d.attempt) != attempt || d.Partition == 0 {
			m.t.Fatalf("%s got %s at %d of %s, attempt %d; want %s, attempt %d: %+v", s.name, d.payload, d.Offset, k.name, d.attempt, k.log[l.offsets[l.head]], attempt, *l)
		}
		l.attempts, l.lease, l.state = attempt, d.Lease, laneLeased
		s.deliveries = append(s.deliveries, d)
	}
	if len(s.deliveries) > 60 {
		s.deliveries = s.deliveries[len(s.deliveries)-60:]
	}
	if got > int(max) || s.limit > 0 && s.leased() > s.limit {
		m.t.Fatalf("%s: %d messages, %d in flight", s.name, got, s.leased())
	}
	if got < want {
		m.short++
	}
	return got
}

// settle settles deliveries, live or not, each once or twice, on any broker.
func (m *laneModel) settle(s *modelSub, how string) {
	if len(s.deliveries) == 0 {
		return
	}
	var ds []*lane
	var lanes []*modelLane
	for range 1 + m.rnd.IntN(6) {
		from := s.deliveries
		if n := len(from); n > 8 && m.rnd.IntN(3) > 0 {
			from = from[n-8:]
		}
		d := *from[m.rnd.IntN(len(from))]
		if slices.ContainsFunc(ds, func(x *lane) bool { return x.Partition == d.Partition && x.Lease != d.Lease }) {
			continue // which one the lane is left with is anybody's guess
		}
		ds = append(ds, &d)
		lanes = append(lanes, s.lanes[d.Partition])
	}
	delay := time.Duration(m.rnd.IntN(2)) * time.Hour // ripe at once, or never in this test
	if how == "nack" && m.rnd.IntN(3) == 0 {
		delay = -1
	}
	if how == "extend" {
		// Extends of one lease in one call are one.
		ds, lanes = ds[:1], lanes[:1]
	}
	i, b := m.any()
	var err error
	switch how {
	case "ack":
		err = b.AckLanes(m.t.Context(), s.group[i], one(ds))
	case "nack":
		err = b.NackLanes(m.t.Context(), s.group[i], one(ds), "boom", "boom", delay)
	case "release":
		err = b.ReleaseLanes(m.t.Context(), s.group[i], one(ds))
	case "extend":
		b.ExtendLanes(m.t.Context(), s.group[i], one(ds), 3600)
	}
	if err != nil {
		m.t.Fatal(err)
	}
	m.done[how]++
	for n, d := range ds {
		l := lanes[n]
		owns := l.lease == d.Lease && l.lease != uuid.Nil
		applies := owns && (how == "ack" || l.state == laneLeased)
		if owns && s.doomed(l) && how == "ack" && errors.Is(d.Err, groupcommit.ErrLeaseLost) {
			applies = false // somebody has begun to file its dead letter
			l.lease = uuid.Nil
			l.blurred = true
		}
		if !applies {
			want := groupcommit.ErrLeaseLost
			if l.settled == d.Lease {
				want = groupcommit.ErrSettled
			}
			// Of a doomed lane somebody may have filed the dead letter by now: that was the last settle then.
			if !errors.Is(d.Err, want) && !(errors.Is(d.Err, groupcommit.ErrLeaseLost) && (l.blurred || m.keys[d.Partition].alone || s.doomed(l))) {
				m.t.Fatalf("%s: %s of %d in %s: %v, want %v: %+v", s.name, how, d.Offset, m.keys[d.Partition].name, d.Err, want, *l)
			}
			continue
		}
		if d.Err != nil {
			m.t.Fatalf("%s: %s of %d in %s: %v: %+v", s.name, how, d.Offset, m.keys[d.Partition].name, d.Err, *l)
		}
		if how == "extend" {
			if in := time.Until(d.Until); in < 59*time.Minute || in > 61*time.Minute {
				m.t.Fatalf("extended by %v", in)
			}
			continue
		}
		l.settled, l.blurred = d.Lease, false
		switch {
		case how == "ack":
			l.advance()
		case how == "release":
			l.attempts, l.state, l.lease = l.attempts-1, laneReady, uuid.Nil
		case s.max > 0 && l.attempts >= s.max:
			l.advance()
			s.filed++
		default:
			l.lease = uuid.Nil
			if l.state = laneResting; delay == 0 {
				l.state = laneReady
			}
		}
	}
}

// expire lets the leases of some lanes end.
func (m *laneModel) expire(s *modelSub) {
	for _, id := range m.ids {
		l := s.lanes[id]
		if l.state != laneLeased || m.rnd.IntN(3) > 0 {
			continue
		}
		b := m.brokers[0]
		if n := exec(m.t, b.Pool, `update ferrymq.cursors set lease_until = clock_timestamp() - interval '1 millisecond' where group_id = $1 and partition_id = $2 and lease_id = $3 and lease_until > clock_timestamp()`,
			s.group[0].ID, id, l.lease); n != 1 {
			m.t.Fatalf("%s: the lease of %s is not what it should be: %+v", s.name, m.keys[id].name, *l)
		}
		exec(m.t, b.Pool, `update ferrymq.in_flight set lease_until = clock_timestamp() - interval '1 millisecond' where group_id = $1 and partition_id = $2`, s.group[0].ID, id)
		l.state = laneExpired
		m.done["expire"]++
	}
}

// ripen ends the backoffs of a subscription.
func (m *laneModel) ripen(s *modelSub) {
	rows, err := m.brokers[0].Pool.Query(m.t.Context(), "update ferrymq.cursors set not_before = null where group_id = $1 and not_before is not null returning partition_id", s.group[0].ID)
	if err != nil {
		m.t.Fatal(err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		m.t.Fatal(err)
	}
	for _, id := range ids {
		l := s.lanes[id]
		if l.state != laneReady && l.state != laneResting && !(l.state == laneExpired && s.counts && !s.doomed(l)) {
			m.t.Fatalf("%s: %s rests, but is %+v", s.name, m.keys[id].name, *l)
		}
		l.state = laneReady // the lease of one that expired is good for an ack still
	}
	for id, l := range s.lanes {
		if l.state == laneResting {
			m.t.Fatalf("%s: %s does not rest: %+v", s.name, m.keys[id].name, *l)
		}
	}
	m.done["ripen"]++
}

// redrive puts dead letters back.
func (m *laneModel) redrive(s *modelSub) {
	i, b := m.any()
	rows, err := b.Pool.Query(m.t.Context(), "select id, partition_id, message_offset from ferrymq.dead_letters where group_id = $1 order by failed_at", s.group[0].ID)
	if err != nil {
		m.t.Fatal(err)
	}
	type letter struct {
		ID        uuid.UUID
		Partition int64
		Offset    int64
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[letter])
	if err != nil {
		m.t.Fatal(err)
	}
	all = slices.DeleteFunc(all, func(letter) bool { return m.rnd.IntN(3) > 0 })
	var ids []uuid.UUID
	for _, d := range all {
		ids = append(ids, d.ID)
	}
	if len(ids) == 0 {
		return
	}
	// Those of which the model does not know yet have failed by their lease.
	for _, d := range all {
		if l := s.lanes[d.Partition]; s.doomed(l) && l.offsets[l.head] == d.Offset {
			l.advance()
			l.blurred = true
			s.filed++
		}
	}
	done, _, err := b.RedriveLanes(m.t.Context(), s.group[i], ids)
	if err != nil || len(done) != len(ids) {
		m.t.Fatal(len(done), len(ids), err)
	}
	s.filed -= len(done)
	for _, d := range all {
		k, l := m.keys[d.Partition], s.lanes[d.Partition]
		k.alone = true
		k.log = append(k.log, k.log[d.Offset])
		l.offsets = append(l.offsets, k.tail)
		k.tail++
	}
	m.done["redrive"]++
}

// seek moves all lanes of a subscription.
func (m *laneModel) seek(s *modelSub) {
	m.quiet()
	i, b := m.any()
	end := m.rnd.IntN(2) == 0
	if _, err := b.SeekLanes(m.t.Context(), s.group[i], groupcommit.Target{End: end, At: time.Unix(0, 0)}); err != nil {
		m.t.Fatal(err)
	}
	// A dead letter that was being filed is there by now, or never comes.
	n := int(number(m.t, b.Pool, "select count(*) from ferrymq.dead_letters where group_id = $1", s.group[0].ID))
	doomed := 0
	for _, l := range s.lanes {
		if s.doomed(l) {
			doomed++
		}
		l.head, l.attempts, l.state, l.lease, l.settled, l.blurred = 0, 0, laneReady, uuid.Nil, uuid.Nil, true
		if end {
			l.head = len(l.offsets)
		}
	}
	if n < s.filed || n > s.filed+doomed {
		m.t.Fatalf("%s: %d dead letters, want %d, or %d more", s.name, n, s.filed, doomed)
	}
	s.filed = n
	m.done["seek"]++
}

// quiet compares the database with the model.
func (m *laneModel) quiet() {
	type row struct {
		Partition int64
		Committed int64
		Tail      int64
		Attempts  int
		Lease     *uuid.UUID
		Live      bool
		Resting   bool
		Pending   bool
		Counted   bool
	}
	for _, s := range m.subs {
		var wrong string
		for range 100 { // what is being filed or passed over takes a moment
			wrong = ""
			rows, err := m.brokers[0].Pool.Query(m.t.Context(), `select c.partition_id, c.committed, p.next_offset, c.attempts, c.lease_id, coalesce(c.lease_until > clock_timestamp(), false),
				coalesce(c.not_before > clock_timestamp(), false), c.pending, exists (select from ferrymq.in_flight f where f.group_id = c.group_id and f.partition_id = c.partition_id and f.lease_until > clock_timestamp())
				from ferrymq.cursors c join ferrymq.partitions p on p.id = c.partition_id where c.group_id = $1`, s.group[0].ID)
			if err != nil {
				m.t.Fatal(err)
			}
			all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
			if err != nil {
				m.t.Fatal(err)
			}
			if len(all) != len(m.keys) {
				m.t.Fatalf("%s: %d lanes, want %d", s.name, len(all), len(m.keys))
			}
			for _, r := range all {
				l, k := s.lanes[r.Partition], m.keys[r.Partition]
				bad := func(format string, args ...any) {
					wrong = fmt.Sprintf("%s, %s: %s: %+v, the database says %+v", s.name, k.name, fmt.Sprintf(format, args...), *l, r)
				}
				if s.doomed(l) && r.Committed > l.offsets[l.head] {
					l.advance()
					l.blurred = true
					s.filed++
				}
				low, high := int64(0), k.tail
				if l.head > 0 {
					low = l.offsets[l.head-1] + 1
				}
				if l.left() {
					high = l.offsets[l.head]
				}
				if r.Committed < low || r.Committed > high || r.Tail != k.tail {
					bad("at %d of %d, want %d to %d of %d", r.Committed, r.Tail, low, high, k.tail)
				}
				if l.left() && !r.Pending {
					bad("stuck")
				}
				if s.doomed(l) || !l.left() && k.alone {
					continue
				}
				if r.Attempts != l.attempts && (l.attempts > 0 || r.Committed == high) {
					bad("%d attempts", r.Attempts)
				}
				if leased := l.state == laneLeased; r.Live != leased && (leased || !k.alone) || leased && *r.Lease != l.lease || s.limit > 0 && r.Counted != leased && (leased || !k.alone) {
					bad("leased")
				}
				if r.Resting != (l.state == laneResting) && l.state != laneExpired {
					bad("resting")
				}
			}
			if n := number(m.t, m.brokers[0].Pool, "select count(*) from ferrymq.dead_letters where group_id = $1", s.group[0].ID); int(n) != s.filed && wrong == "" {
				wrong = fmt.Sprintf("%s: %d dead letters, want %d", s.name, n, s.filed)
			}
			if wrong == "" {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
		if wrong != "" {
			m.t.Fatal(wrong)
		}
	}
}

// finish acks all there is: nobody may be stuck.
func (m *laneModel) finish() {
	for _, s := range m.subs {
		end, least := time.Now().Add(30*time.Second), 1<<62
		for {
			left := 0
			for id, l := range s.lanes {
				if l.state == laneLeased {
					d := groupcommit.Delivered{Partition: id, Offset: l.offsets[l.head], Lease: l.lease}
					if err := m.brokers[0].AckLanes(m.t.Context(), s.group[0], []*groupcommit.Delivered{&d}); err != nil || d.Err != nil {
						m.t.Fatal(err, d.Err)
					}
					l.settled = l.lease
					l.advance()
				}
				left += len(l.offsets) - l.head
			}
			if left == 0 {
				break
			}
			if left < least {
				least, end = left, time.Now().Add(30*time.Second)
			}
			if time.Now().After(end) {
				m.t.Fatalf("%s is stuck: %d messages left", s.name, left)
			}
			m.ripen(s)
			if m.receive(s, 100) == 0 {
				m.quiet() // what was filed meanwhile is not left
			}
		}
	}
	m.quiet()
	if n := number(m.t, m.brokers[0].Pool, "select count(*) from ferrymq.cursors c join ferrymq.partitions p on p.id = c.partition_id where c.lease_id is not null or c.committed < p.next_offset"); n > 0 {
		// Behind the last message of a lane there may be some of other subscriptions.
		for range 20 {
			for _, s := range m.subs {
				m.receive(s, 100)
			}
		}
		n = number(m.t, m.brokers[0].Pool, "select count(*) from ferrymq.cursors c join ferrymq.partitions p on p.id = c.partition_id where c.committed < p.next_offset")
		if n > 0 {
			m.t.Errorf("%d lanes have something left", n)
		}
	}
}
