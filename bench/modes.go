package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// mode is a measurement; it fills r.m and r.drained.
type mode struct {
	run   func(r *run) error
	about string
	// The defaults that differ from flag to flag.
	producers, consumers, batch, popPartitions int
	popTimeout                                 time.Duration
}

var modes = map[string]mode{
	"push":       {push, "producers push as fast as they can", 64, 8, 1, 1, 5 * time.Second},
	"drain":      {drain, "preload, then consumers pop and ack until all is gone", 8, 8, 100, 1, 5 * time.Second},
	"cycle":      {cycle, "producers push while consumers pop and ack", 64, 64, 1, 1, 5 * time.Second},
	"live":       {live, "push at a fixed rate, measure end to end", 32, 32, 1, 1, 5 * time.Second},
	"wake":       {wake, "push one at a time to parked consumers", 8, 200, 1, 1, 60 * time.Second},
	"idle":       {idle, "hold many long polls and watch what they cost", 1, 1, 1, 1, 5 * time.Minute},
	"partitions": {partitions, "create many partitions, drain them, then use a few", 8, 8, 100, 100, 5 * time.Second},
	"lanes":      {lanes, "preload many keys, then consumers of a subscription receive and ack until all is gone", 8, 8, 100, 1, 5 * time.Second},
}

// measure puts the probe around what load does; load answers the messages and the seconds they took.
func (r *run) measure(load func() (messages int64, took time.Duration)) (int64, time.Duration, error) {
	p, err := startProbe(r.c)
	if err != nil {
		return 0, 0, err
	}
	n, took := load()
	return n, took, p.end(r.ctx, &r.m, n)
}

func (r *run) rate(name string, n int64, d time.Duration) {
	r.m.add(name, float64(n)/max(d.Seconds(), 1e-9))
}

func push(r *run) error {
	c := r.c
	n, took, err := r.measure(func() (int64, time.Duration) {
		start := now()
		r.produce(c.producers, c.batch, perStream(c.batch, c.spread), c.messages, c.duration)
		return r.stored.Load(), time.Duration(now() - start)
	})
	r.m.add("messages", float64(n))
	r.rate("push_msg_per_s", n, took)
	r.rate("push_req_per_s", r.push.count(), took)
	r.m.latency("push", &r.push)
	if err == nil && c.verify {
		r.startConsumers(8, 1000, 100, true, r.anyOf).finish()
	}
	return err
}

// perStream is how many of a batch go to one stream when it is spread over so many.
func perStream(batch, spread int) int { return max(batch/max(spread, 1), 1) }

func (r *run) preload() {
	c := r.c
	start := now()
	producers := min(c.producers, c.partitions)
	r.produce(producers, c.preloadBatch, perStream(c.preloadBatch, c.spread), c.messages, 0)
	r.rate("preload_msg_per_s", r.stored.Load(), time.Duration(now()-start))
}

func drain(r *run) error {
	c := r.c
	if !c.preloaded {
		r.preload()
	}
	return r.drain()
}

// drain measures consumers until everything is acked.
func (r *run) drain() error {
	c := r.c
	if !c.preloaded && c.dsn != "" {
		r.pause(c.pgSettle) // so that the commits of the preload are not counted
	}
	n, took, err := r.measure(func() (int64, time.Duration) {
		start := now()
		r.startConsumers(c.consumers, c.popBatch, c.popPartitions, c.wait, r.anyOf).finish()
		return r.acks.Load(), time.Duration(r.lastAck.Load() - start)
	})
	r.m.add("deliveries", float64(n))
	r.rate("deliveries_per_s", n, took)
	r.m.latency("pop", &r.pop)
	r.m.latency("ack", &r.ack)
	return err
}

// flow runs consumers beside a load and then until the rest is drained.
func (r *run) flow(load func()) error {
	c := r.c
	var pushing time.Duration
	n, took, err := r.measure(func() (int64, time.Duration) {
		start := now()
		cs := r.startConsumers(c.consumers, c.popBatch, c.popPartitions, c.wait, r.anyOf)
		load()
		pushing = time.Duration(now() - start)
		cs.finish()
		return r.acks.Load(), time.Duration(r.lastAck.Load() - start)
	})
	r.m.add("deliveries", float64(n))
	r.rate("cycle_msg_per_s", n, took)
	r.rate("push_msg_per_s", r.stored.Load(), pushing)
	r.m.latency("push", &r.push)
	r.m.latency("pop", &r.pop)
	r.m.latency("ack", &r.ack)
	r.m.latency("e2e", &r.e2e)
	return err
}

func cycle(r *run) error {
	return r.flow(func() {
		if r.c.snapshot > 0 {
			ctx, cancel := context.WithCancel(r.ctx)
			var wg sync.WaitGroup
			wg.Go(func() { r.minutes(ctx) })
			wg.Go(func() {
				if err := r.holdSnapshot(ctx, time.Minute, r.c.snapshot); err != nil && ctx.Err() == nil {
					r.fail("snapshot: %s", reason(err))
				}
			})
			defer wg.Wait()
			defer cancel()
		}
		r.produce(r.c.producers, r.c.batch, perStream(r.c.batch, r.c.spread), r.c.messages, r.c.duration)
	})
}

// minutes adds what was pushed and acked in each minute, a second, until ctx ends.
func (r *run) minutes(ctx context.Context) {
	t := time.NewTicker(time.Minute)
	defer t.Stop()
	var stored, acks int64
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		s, a := r.stored.Load(), r.acks.Load()
		r.rate(fmt.Sprintf("minute_%02d_push_msg_per_s", n), s-stored, time.Minute)
		r.rate(fmt.Sprintf("minute_%02d_acked_msg_per_s", n), a-acks, time.Minute)
		stored, acks = s, a
	}
}

// live sends on a fixed schedule. Whoever of the producers is free takes the next message;
// if all are busy it waits, and its latency counts from when it was due.
func live(r *run) error {
	c := r.c
	r.warmUntil = now() + int64(c.warmup)
	return r.flow(func() {
		due := make(chan int64, 1<<16)
		var wg sync.WaitGroup
		for i := range c.producers {
			p := r.newProducer(i, c.producers, c.addrs)
			wg.Go(func() {
				defer p.c.close()
				for ts := range due {
					p.send(1, 1, ts)
				}
			})
		}
		start := now()
		var maxLag int64
		for n := int64(0); r.ctx.Err() == nil && (c.messages == 0 || n < c.messages); n++ {
			at := start + int64(float64(n)/c.rate*1e9)
			if c.duration > 0 && at-start >= int64(c.duration+c.warmup) {
				break
			}
			// The sleep of the operating system is exact to 0.1 ms, a Go timer only to 1 ms.
			if d := at - now(); d > 0 {
				ts := syscall.NsecToTimespec(d)
				_ = syscall.Nanosleep(&ts, nil)
			}
			maxLag = max(maxLag, now()-at)
			due <- at
		}
		close(due)
		wg.Wait()
		r.m.add("schedule_lag_max_ms", float64(maxLag)/1e6)
	})
}

// pingPong pushes one message at a time to random ones of the first n streams, waits for each
// to arrive, and answers how many did. Its latencies are in r.e2e and r.push.
func (r *run) pingPong(n int, addrs []string, count int64, d, gap time.Duration, seen <-chan id) (arrived int64) {
	p := r.newProducer(0, 1, addrs)
	defer p.c.close()
	for _, h := range []*hist{&r.push, &r.e2e, &r.pop, &r.ack} {
		h.reset()
	}
	end := now() + int64(d)
	for i := int64(0); r.ctx.Err() == nil && (count == 0 || i < count) && (d == 0 || now() < end); i++ {
		r.pause(gap + rand.N(gap/4+1)) // the consumer acks and parks again; no rhythm with the broker's re-checks
		p.at = rand.IntN(n)
		if p.send(1, 1, 0) == 0 {
			continue
		}
		want := p.sent[0]
		timeout := time.After(10 * time.Second)
		for waiting := true; waiting; {
			select {
			case got := <-seen:
				if got.stream == want.stream && got.seq == want.seq {
					arrived++
					waiting = false
				}
			case <-timeout:
				r.fail("not delivered within 10 s")
				waiting = false
			case <-r.ctx.Done():
				waiting = false
			}
		}
	}
	return arrived
}

// watch makes deliveries visible to pingPong.
func (r *run) watch() <-chan id {
	seen := make(chan id, 1024)
	r.onDeliver = func(p id, _ int64) {
		select {
		case seen <- p:
		default:
		}
	}
	return seen
}

func wake(r *run) error {
	c := r.c
	lane := func(i int) (string, int) { return r.queueOf(i), i }
	if c.distinctQueues {
		lane = func(i int) (string, int) { return r.queueOf(i), -1 }
	} else if c.park == "queue" {
		lane = r.anyOf
	}
	// Everything exists and has been used once before the clock runs.
	r.produce(min(c.producers, c.partitions), 100, 1, int64(c.partitions), 0)
	seen := r.watch()
	cs := r.startConsumers(c.consumers, c.popBatch, 1, true, lane)
	for deadline := now() + int64(30*time.Second); !r.allAcked(false) && now() < deadline && r.ctx.Err() == nil; {
		r.pause(10 * time.Millisecond)
	}
	r.pause(time.Second)
	n, _, err := r.measure(func() (int64, time.Duration) {
		return r.pingPong(c.partitions, c.pushAddrs, c.messages, c.duration, c.gap, seen), 0
	})
	cs.finish()
	r.m.add("wakes", float64(n))
	r.m.latency("wake", &r.e2e)
	r.m.latency("push", &r.push)
	return err
}

func partitions(r *run) error {
	c := r.c
	_, _, err := r.measure(func() (int64, time.Duration) {
		start := now()
		var wg sync.WaitGroup
		for i := range c.producers {
			p := r.newProducer(i, c.producers, c.addrs)
			wg.Go(func() {
				defer p.c.close()
				own := (c.partitions - i + c.producers - 1) / c.producers
				for own > 0 && r.ctx.Err() == nil {
					p.send(min(own, c.batch), 1, 0)
					own -= c.batch
				}
			})
		}
		wg.Wait()
		took := time.Duration(now() - start)
		r.rate("create_partitions_per_s", r.stored.Load(), took)
		r.m.latency("create_push", &r.push)

		start = now()
		r.startConsumers(c.consumers, c.popBatch, c.popPartitions, true, r.anyOf).finish()
		took = time.Duration(r.lastAck.Load() - start)
		r.rate("first_drain_msg_per_s", r.acks.Load(), took)
		r.m.latency("drain_pop", &r.pop)
		r.m.latency("drain_ack", &r.ack)
		return r.stored.Load(), took
	})
	if err != nil || r.stalled {
		return err
	}
	seen := r.watch()
	cs := r.startConsumers(1, c.popBatch, 1, true, r.anyOf)
	n := r.pingPong(min(c.active, c.partitions), c.addrs, max(c.messages, 500), c.duration, c.gap, seen)
	cs.finish()
	r.m.add("active_messages", float64(n))
	r.m.latency("active_e2e", &r.e2e)
	r.m.latency("active_push", &r.push)
	r.m.latency("active_ack", &r.ack)
	return nil
}

// idle parks pollers that nobody feeds. Every answer they get inside the window is judged:
// only 204, and only at their timeout, is right.
func idle(r *run) error {
	c := r.c
	var answered, wrong, parked, measuring atomic.Int64
	var wg sync.WaitGroup
	slots := make(chan struct{}, 64) // dial so many at once
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	for i := range c.pollers {
		n := i % c.queues
		head := r.head("GET", r.popPath(0, r.queueOf(n), -1, 1, 1, true))
		wg.Go(func() {
			slots <- struct{}{}
			k := r.dial(ctx, c.addrs, c.popTimeout+20*time.Second, 512)
			<-slots
			defer k.close()
			parked.Add(1)
			for {
				start := now()
				status, answer, err := k.do(head, nil)
				took := time.Duration(now() - start)
				if ctx.Err() != nil {
					return
				}
				if measuring.Load() == 1 {
					answered.Add(1)
				}
				switch {
				case err != nil:
					r.fail("pop: %s", reason(err))
				case status != 204:
					r.fail("pop: %d %s", status, clip(answer))
				case took < c.popTimeout-50*time.Millisecond:
					r.fail("pop: 204 early")
				case took > c.popTimeout+time.Second:
					r.fail("pop: 204 late")
				default:
					continue
				}
				wrong.Add(1)
				r.pause(time.Second)
			}
		})
	}
	for parked.Load() < int64(c.pollers) && r.ctx.Err() == nil {
		r.pause(10 * time.Millisecond)
	}
	r.pause(2 * time.Second)
	wrongBefore := wrong.Load()
	_, _, err := r.measure(func() (int64, time.Duration) {
		measuring.Store(1)
		r.pause(c.duration)
		measuring.Store(0)
		return 0, c.duration
	})
	cancel()
	wg.Wait()
	r.m.add("pollers", float64(c.pollers))
	r.m.add("answers", float64(answered.Load()))
	r.m.add("answered_wrongly", float64(wrong.Load()))
	r.m.add("answered_wrongly_while_opening", float64(wrongBefore))
	return err
}
