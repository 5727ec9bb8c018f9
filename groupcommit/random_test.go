package groupcommit_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/groupcommit"
	"ferrymq/segment"
)

var seed = flag.Uint64("seed", 0, "seed of the randomized runs; 0: any")

// TestRandom lets producers and consumers do what clients do, in disorder, and checks the history of it all.
func TestRandom(t *testing.T) {
	t.Parallel()
	for _, brokers := range []int{1, 2} {
		t.Run(fmt.Sprintf("%dbrokers", brokers), func(t *testing.T) {
			t.Parallel()
			randomRun(t, brokers)
		})
	}
}

const (
	autoGroup = "auto"
	lateGroup = "late"
	mainGroup = "main"
)

type run struct {
	t       *testing.T
	h       *history
	brokers []*broker
	seed    uint64
	queues  []string
	until   time.Time
	seq     atomic.Int64
}

func randomRun(t *testing.T, brokers int) {
	s := *seed
	if s == 0 {
		s = rand.Uint64()
	}
	t.Logf("seed %d (repeat with -seed)", s)
	length := 11 * time.Second
	if testing.Short() {
		length = 3 * time.Second
	}
	r := &run{t: t, seed: s, brokers: together(t, brokers, setup{pool: 12}), queues: []string{"rnd.a", "rnd.b", "rnd.c"}, until: time.Now().Add(length),
		h: &history{groups: map[string]groupSpec{mainGroup: {}, autoGroup: {lossy: true}, catalog.QueueMode: {}}}}
	var work sync.WaitGroup
	number := uint64(0)
	begin := func(do func(rnd *rand.Rand)) {
		number++
		rnd := rand.New(rand.NewPCG(s, number))
		work.Go(func() { do(rnd) })
	}
	for i := range 6 {
		begin(func(rnd *rand.Rand) { r.produce(rnd, i) })
	}
	for range 3 {
		begin(func(rnd *rand.Rand) { r.consume(rnd, mainGroup) })
		begin(func(rnd *rand.Rand) { r.consume(rnd, catalog.QueueMode) })
	}
	for range 2 {
		begin(func(rnd *rand.Rand) { r.consume(rnd, autoGroup) })
	}
	// The late group starts with what comes after its first contact with each queue.
	start := time.Now().Add(length / 3)
	begin(func(rnd *rand.Rand) {
		time.Sleep(time.Until(start))
		spec := groupSpec{contactStart: time.Now()}
		for _, q := range r.queues {
			if _, err := r.any(rnd).tryPop(t.Context(), &groupcommit.Pop{Queue: q, Group: lateGroup, Named: true, Start: catalog.Start{Mode: "new"}, Batch: 1, Partitions: 1, Seconds: 1}); err != nil {
				t.Errorf("first contact: %v", err)
			}
		}
		// What these pops claimed is not in the history: let the leases end.
		spec.contactEnd = time.Now()
		time.Sleep(time.Second + slack)
		r.h.mu.Lock()
		r.h.groups[lateGroup] = spec
		r.h.mu.Unlock()
		for range 2 {
			begin(func(rnd *rand.Rand) { r.consume(rnd, lateGroup) })
		}
	})
	work.Wait()
	r.drain()
	r.read()
	for _, f := range r.h.check() {
		t.Error(f)
	}
	delivered := 0
	for _, c := range r.h.claims {
		delivered += len(c.payloads)
	}
	messages := 0
	for _, p := range r.h.stored {
		messages += len(p)
	}
	t.Logf("%d pushes, %d messages in %d partitions, %d claims, %d deliveries, %d settles", len(r.h.pushes), messages, len(r.h.stored), len(r.h.claims), delivered, len(r.h.settles))
	if t.Failed() {
		t.Logf("repeat with -seed %d", s)
	}
}

func (r *run) any(rnd *rand.Rand) *broker { return r.brokers[rnd.IntN(len(r.brokers))] }

// produce pushes until the time is over. Partitions appear on the way. One id in ten is used by several producers at once.
func (r *run) produce(rnd *rand.Rand, producer int) {
	for time.Now().Before(r.until) {
		time.Sleep(time.Duration(rnd.IntN(12)) * time.Millisecond)
		b := r.any(rnd)
		elapsed := 1 - time.Until(r.until).Seconds()/11
		var pushes []*groupcommit.Push
		var events []pushed
		used := make(map[string]bool)
		for range 1 + rnd.IntN(3) {
			q := r.queues[rnd.IntN(len(r.queues))]
			p := fmt.Sprintf("p%d", rnd.IntN(2+int(10*max(elapsed, 0))))
			if used[q+p] {
				continue
			}
			used[q+p] = true
			e := pushed{producer: producer, partition: q + "/" + p}
			var ms []item
			for range 1 + rnd.IntN(8) {
				m := item{payload: fmt.Sprint(r.seq.Add(1))}
				switch rnd.IntN(10) {
				case 0:
					m.id = fmt.Sprintf("shared-%d", time.Now().UnixMilli()/20)
				case 1, 2:
					m.id = "own-" + m.payload
				case 3:
					m.id = uuid.NewString()
				}
				ms = append(ms, m)
				e.payloads, e.ids = append(e.payloads, m.payload), append(e.ids, m.id)
			}
			x, err := b.newPush(r.t.Context(), q, p, ms)
			if err != nil {
				r.t.Errorf("look up %s/%s: %v", q, p, err)
				return
			}
			pushes, events = append(pushes, x), append(events, e)
		}
		start := time.Now()
		if err := b.Push(context.Background(), pushes); err != nil {
			r.t.Errorf("push: %v", err)
			return
		}
		end := time.Now()
		for i, p := range pushes {
			e := events[i]
			e.start, e.end = start, end
			if p.Err != nil {
				r.t.Errorf("push to %s: %v", e.partition, p.Err)
				continue
			}
			for _, res := range p.Results {
				e.results, e.duplicate = append(e.results, res.ID.String()), append(e.duplicate, res.Duplicate)
			}
			r.h.add(e)
		}
	}
}

// record notes what a pop got.
func (r *run) record(d *delivered, p *groupcommit.Pop, start, end time.Time) {
	for _, s := range d.Spans {
		c := claimed{start: start, end: end, partition: s.Queue.Name + "/" + s.Partition.Name, group: p.Group, seconds: time.Duration(p.Seconds) * time.Second, offset: s.Start}
		if !p.AutoAck {
			c.lease = d.Lease.String()
		}
		for _, m := range d.messages {
			if m.public == s.Row.PublicID {
				c.payloads = append(c.payloads, m.payload)
			}
		}
		r.h.add(c)
	}
}

func (r *run) randomPop(rnd *rand.Rand, group string) *groupcommit.Pop {
	wait := time.Duration(rnd.IntN(2)*rnd.IntN(400)) * time.Millisecond
	q := r.queues[rnd.IntN(len(r.queues))]
	batch := int64(1 + rnd.IntN(50))
	p := wide(q, group, batch, int64(1+rnd.IntN(5)), wait)
	switch n := rnd.IntN(10); {
	case group == autoGroup:
		p.AutoAck = true
	case n < 2 && group != lateGroup:
		p = route(q, fmt.Sprintf("p%d", rnd.IntN(6)), group, batch, wait)
	case n < 4 && group != lateGroup:
		p = discovery("rnd", group, batch, wait)
		p.Partitions = int64(1 + rnd.IntN(5))
	}
	p.Seconds = 1
	return p
}

func (r *run) consume(rnd *rand.Rand, group string) {
	for time.Now().Before(r.until) {
		b := r.any(rnd)
		p := r.randomPop(rnd, group)
		ctx, cancel := context.WithCancel(context.Background())
		if !p.AutoAck && rnd.IntN(8) == 0 {
			time.AfterFunc(time.Duration(rnd.IntN(20_000))*time.Microsecond, cancel)
		}
		start := time.Now()
		d, err := b.tryPop(ctx, p)
		end := time.Now()
		gone := ctx.Err() != nil
		cancel()
		// A short wait may end before a flush of a busy machine has had room, which is reported as no connection.
		if p.Wait > 0 && end.Sub(start) > p.Wait && late(err) {
			continue
		}
		// A look-up that its caller broke off is reported as no connection.
		if err != nil && !(gone && (errors.Is(err, context.Canceled) || late(err))) {
			r.t.Errorf("pop %s: %v", group, err)
			return
		}
		if d == nil {
			continue
		}
		r.record(d, p, start, end)
		if !p.AutoAck {
			r.handle(rnd, p, d, start, end)
		}
	}
}

// handle is what a consumer may do with what it got.
func (r *run) handle(rnd *rand.Rand, p *groupcommit.Pop, d *delivered, asked, got time.Time) {
	var order []uuid.UUID
	by := make(map[uuid.UUID][]message)
	for _, m := range d.messages {
		if by[m.public] == nil {
			order = append(order, m.public)
		}
		by[m.public] = append(by[m.public], m)
	}
	if rnd.IntN(12) == 0 {
		start := time.Now() // the lease may have begun at any time since the pop was asked for
		n, _, err := r.any(rnd).Extend(context.Background(), d.Lease, 2)
		end := time.Now()
		switch {
		case err != nil:
			r.t.Errorf("extend: %v", err)
		case n == len(order):
			for _, public := range order {
				m := by[public][0]
				r.h.add(settled{start: start, end: end, partition: m.queue + "/" + m.partition, group: p.Group, lease: d.Lease.String(), extended: 2 * time.Second, committed: -1})
			}
		case end.Before(asked.Add(time.Second - slack)):
			r.t.Errorf("extend of a live lease renewed %d of %d", n, len(order))
		}
	}
	for _, public := range order {
		ms := by[public]
		switch n := rnd.IntN(100); {
		case n < 5: // forgotten: the lease ends
			continue
		case n < 8: // too late
			time.Sleep(time.Until(got.Add(1100*time.Millisecond + 2*slack)))
			r.settle(rnd, p, d, says(groupcommit.Completed, ms...), ms)
		case n < 20: // a part, then perhaps the rest
			k := 1 + rnd.IntN(len(ms))
			r.settle(rnd, p, d, says(groupcommit.Completed, ms[:k]...), ms)
			if k < len(ms) && rnd.IntN(2) == 0 {
				r.settle(rnd, p, d, says(groupcommit.Completed, ms[k:]...), ms)
			}
		case n < 40: // one goes wrong
			k := rnd.IntN(len(ms))
			acks := says(groupcommit.Completed, ms...)
			acks[k].Status = []groupcommit.Status{groupcommit.Failed, groupcommit.Failed, groupcommit.Retry, groupcommit.DeadLetter}[rnd.IntN(4)]
			rnd.Shuffle(len(acks), func(i, j int) { acks[i], acks[j] = acks[j], acks[i] })
			r.settle(rnd, p, d, acks, ms)
		case n < 45: // given back, as to a client that has gone
			one := *d.Delivery
			start := time.Now()
			if len(order) == 1 {
				one.Release()
				r.h.add(settled{start: start, end: time.Now(), partition: ms[0].queue + "/" + ms[0].partition, group: p.Group, lease: d.Lease.String(), ends: true, committed: -1})
				continue
			}
			fallthrough
		default:
			r.settle(rnd, p, d, says(groupcommit.Completed, ms...), ms)
		}
	}
}

// settle acknowledges through any broker and notes what the answer says about the cursor.
func (r *run) settle(rnd *rand.Rand, p *groupcommit.Pop, d *delivered, acks []groupcommit.Ack, ms []message) {
	offset := make(map[string]int64)
	for _, m := range ms {
		offset[m.tx] = m.offset
	}
	start := time.Now()
	res := r.any(rnd).tryAck(context.Background(), p.Group, d.Lease, ms[0].public, acks...)
	s := settled{start: start, end: time.Now(), partition: ms[0].queue + "/" + ms[0].partition, group: p.Group, lease: d.Lease.String(), ends: true, committed: -1}
	signal, high := int64(1<<62), int64(-1)
	for i, a := range acks {
		switch {
		case errors.Is(res[i].Err, groupcommit.ErrLease):
			s.refused = true
		case res[i].Err != nil:
			r.t.Errorf("ack %s %s: %v", p.Group, s.partition, res[i].Err)
			return
		case a.Status != groupcommit.Completed:
			signal = min(signal, offset[*a.TransactionID])
		}
	}
	for _, a := range acks {
		if o := offset[*a.TransactionID]; a.Status == groupcommit.Completed && o < signal {
			high = max(high, o)
		}
	}
	if !s.refused {
		s.committed = max(high+1, 0)
		s.ends = res[0].LeaseReleased
	}
	r.h.add(s)
}

// drain pops until no group has anything left: nobody may be stuck.
func (r *run) drain() {
	// Leases of consumers that left end within 3 s; what parks now has to be woken for it.
	end := time.Now().Add(25 * time.Second)
	var work sync.WaitGroup
	for g := range r.h.groups {
		for i, q := range r.queues {
			work.Go(func() {
				b := r.brokers[i%len(r.brokers)]
				for {
					p := wide(q, g, 1000, 100, 1500*time.Millisecond)
					p.Seconds, p.AutoAck = 5, g == autoGroup
					start := time.Now()
					d, err := b.tryPop(context.Background(), p)
					if err != nil {
						r.t.Errorf("drain: %v", err)
						return
					}
					if d == nil && r.left(g, q) == 0 {
						return
					}
					if d != nil {
						r.record(d, p, start, time.Now())
						if !p.AutoAck {
							by := make(map[uuid.UUID][]message)
							for _, m := range d.messages {
								by[m.public] = append(by[m.public], m)
							}
							for _, ms := range by {
								r.settle(rand.New(rand.NewPCG(r.seed, 1000)), p, d, says(groupcommit.Completed, ms...), ms)
							}
						}
					}
					if time.Now().After(end) {
						r.t.Errorf("%s of %s is stuck: %d partitions have something left", g, q, r.left(g, q))
						return
					}
				}
			})
		}
	}
	work.Wait()
	for _, b := range r.brokers[:1] {
		for what, sql := range map[string]string{
			"cursors with a backlog that are not pending": `select count(*) from ferrymq.cursors c join ferrymq.partitions p on p.id = c.partition_id where not c.pending and p.next_offset > c.committed`,
			"cursors above their tail":                    `select count(*) from ferrymq.cursors c join ferrymq.partitions p on p.id = c.partition_id where c.committed > p.next_offset`,
			"cursors with a backlog":                      `select count(*) from ferrymq.cursors c join ferrymq.partitions p on p.id = c.partition_id where p.next_offset > c.committed`,
			"partitions without a cursor of a registered group": `select count(*) from ferrymq.partitions p join ferrymq.groups g on g.queue_id = p.queue_id and g.registered
				where not exists (select from ferrymq.cursors c where c.group_id = g.id and c.partition_id = p.id)`,
		} {
			if n := numberBackground(r.t, b, sql); n != 0 {
				r.t.Errorf("%d %s", n, what)
			}
		}
	}
}

func numberBackground(t *testing.T, b *broker, sql string, args ...any) (n int64) {
	t.Helper()
	if err := b.Pool.QueryRow(context.Background(), sql, args...).Scan(&n); err != nil {
		t.Error(err)
	}
	return n
}

func (r *run) left(group, queue string) int64 {
	return numberBackground(r.t, r.brokers[0], `select count(*) from ferrymq.cursors c join ferrymq.partitions p on p.id = c.partition_id join ferrymq.groups g on g.id = c.group_id
		join ferrymq.queues q on q.id = g.queue_id where g.name = $1 and q.name = $2 and p.next_offset > c.committed`, group, queue)
}

// read fetches what is stored, and checks that offsets are dense.
func (r *run) read() {
	r.h.stored = readStored(r.t, r.brokers[0])
}

func readStored(t *testing.T, b *broker) map[string][]stored {
	t.Helper()
	rows, err := b.Pool.Query(t.Context(), `select q.name || '/' || p.name, p.next_offset, s.base_offset, s.count, s.codec, s.first_id, s.frames
		from ferrymq.partitions p join ferrymq.queues q on q.id = p.queue_id left join ferrymq.segments s on s.partition_id = p.id order by p.id, s.base_offset`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	out := make(map[string][]stored)
	tails := make(map[string]int64)
	for rows.Next() {
		var name string
		var tail int64
		var base, count, codec *int64
		var first *uuid.UUID
		var frames []byte
		if err := rows.Scan(&name, &tail, &base, &count, &codec, &first, &frames); err != nil {
			t.Fatal(err)
		}
		tails[name] = tail
		out[name] = slices.Grow(out[name], 0)
		if base == nil {
			continue
		}
		if *base != int64(len(out[name])) {
			t.Errorf("%s: a segment begins at %d, want %d", name, *base, len(out[name]))
		}
		open, err := segment.Decode(nil, int16(*codec), 0, *first, int(*count), frames)
		if err != nil {
			t.Fatal(err)
		}
		for i := range open.Len() {
			m := open.At(i)
			out[name] = append(out[name], stored{id: open.ID(i).String(), tx: string(open.AppendTransactionID(nil, i)), payload: string(m.Payload)})
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	for name, tail := range tails {
		if tail != int64(len(out[name])) {
			t.Errorf("%s: next_offset %d, %d messages", name, tail, len(out[name]))
		}
	}
	return out
}
