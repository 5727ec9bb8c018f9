// Command bench is a black-box load generator and checker for a broker that speaks /api/v1
// (push, pop, ack). README.md describes the modes and how numbers are to be reported.
//
//	go run ./bench push -url http://127.0.0.1:6632 -producers 64 -batch 1
//
// It answers 0 when everything held, 1 when the checker found a violation, 2 when it could not run.
package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// config holds the flags; see parse for what they mean.
type config struct {
	addrs, pushAddrs                            []string
	token, queue, group, json, dsn, park        string
	groups, producers, consumers, batch         int
	popBatch, popPartitions, partitions, spread int
	size, preloadBatch, repeat, pollers, queues int
	active                                      int
	object, noTxid, wait, preloaded, verify     bool
	distinctQueues, check, shape                bool
	messages                                    int64
	rate                                        float64
	duration, warmup, popTimeout, lease, stall  time.Duration
	gap, pgSettle, work, snapshot               time.Duration
	brokerPIDs                                  []int
	pgPID                                       int
}

func (c *config) groupOr(name string) string {
	if c.group != "" {
		return c.group
	}
	return name
}

// leaseTime is how long a hold is surely valid: the asked lease, else the contract's default.
func (c *config) leaseTime() time.Duration {
	if c.lease > 0 {
		return c.lease
	}
	return 60 * time.Second
}

// list is a flag that may be repeated and may hold commas.
type list []string

func (l *list) String() string { return strings.Join(*l, ",") }

func (l *list) Set(s string) error {
	*l = append(*l, strings.Split(s, ",")...)
	return nil
}

func addrsOf(urls []string) (addrs []string, err error) {
	for _, s := range urls {
		u, err := url.Parse(s)
		if err != nil || u.Scheme != "http" || u.Host == "" {
			return nil, fmt.Errorf("not an http URL: %q", s)
		}
		if u.Port() == "" {
			u.Host += ":80"
		}
		addrs = append(addrs, u.Host)
	}
	return addrs, nil
}

// parse reads the flags of a mode.
func parse(name string, m mode, args []string) (*config, error) {
	c := &config{}
	var urls, pushURLs, pids list
	f := flag.NewFlagSet("bench "+name, flag.ContinueOnError)
	f.Var(&urls, "url", "broker `URL` (default http://127.0.0.1:6632); repeat or use commas for several")
	f.Var(&pushURLs, "push-url", "wake: push to this broker instead")
	f.StringVar(&c.token, "token", "", "bearer token")
	f.StringVar(&c.queue, "queue", "", "queue name (default: a fresh one)")
	f.StringVar(&c.group, "group", "", "consumer group (default: queue mode)")
	f.IntVar(&c.groups, "groups", 1, "so many groups each get everything (fan-out)")
	f.IntVar(&c.producers, "producers", m.producers, "connections that push")
	f.IntVar(&c.consumers, "consumers", m.consumers, "connections that pop and ack, per group")
	f.IntVar(&c.consumers, "parked", m.consumers, "wake: the same as -consumers")
	f.IntVar(&c.batch, "batch", m.batch, "messages per push; per pop too, unless -pop-batch")
	f.IntVar(&c.popBatch, "pop-batch", 0, "messages per pop (default: -batch)")
	f.IntVar(&c.popPartitions, "pop-partitions", m.popPartitions, "partitions per pop")
	f.IntVar(&c.partitions, "partitions", 0, "partitions (default 256; wake: -parked; partitions, lanes: 10000)")
	f.IntVar(&c.spread, "spread", 0, "partitions one push goes to (default 1; lanes: as many as it has messages)")
	f.IntVar(&c.size, "size", 256, "bytes of a payload, as JSON text; below 54 it has no room for who it is: push only, not checked")
	f.BoolVar(&c.object, "object", false, "payload is an object, not a string")
	f.BoolVar(&c.noTxid, "no-txid", false, "push without transactionId")
	f.Int64Var(&c.messages, "messages", 0, "stop after so many messages (drain, lanes: preload, default 200000)")
	f.DurationVar(&c.duration, "duration", 0, "stop after so long (default 10s, if -messages is not given either)")
	f.IntVar(&c.preloadBatch, "preload-batch", 100, "drain, lanes: messages per push of the preload")
	f.BoolVar(&c.preloaded, "preloaded", false, "drain: -queue was filled by an earlier bench push with the same -partitions, -producers, -size; -messages of them")
	f.BoolVar(&c.wait, "wait", true, "long poll")
	f.DurationVar(&c.popTimeout, "pop-timeout", m.popTimeout, "timeout of a long poll")
	f.DurationVar(&c.lease, "lease", 30*time.Second, "leaseSeconds of a pop, 0: leave it to the queue")
	f.DurationVar(&c.work, "work", 0, "what a consumer takes between pop and ack; longer makes two holders of a lease easier to see")
	f.DurationVar(&c.stall, "stall", 40*time.Second, "give up draining when nothing was acked for so long; keep it above -lease")
	f.Float64Var(&c.rate, "rate", 300, "live: messages per second")
	f.DurationVar(&c.warmup, "warmup", 2*time.Second, "live: messages due before this do not count in e2e")
	f.StringVar(&c.park, "park", "partition", "wake: consumers wait on their own `partition` or all on the `queue`")
	f.BoolVar(&c.distinctQueues, "distinct-queues", false, "wake, idle: every consumer has its own queue")
	f.DurationVar(&c.gap, "gap", 20*time.Millisecond, "wake, partitions: pause before each push")
	f.IntVar(&c.pollers, "pollers", 10000, "idle: long polls")
	f.IntVar(&c.queues, "queues", 1, "idle: queues they wait on")
	f.IntVar(&c.active, "active", 1, "partitions: how many are used in the last phase")
	f.DurationVar(&c.snapshot, "snapshot", 0, "cycle, needs -dsn: run for a minute, hold a snapshot for so long, run another minute; rates of each minute")
	f.BoolVar(&c.verify, "verify", false, "push: drain and check afterwards, outside the window")
	f.BoolVar(&c.check, "check", true, "check loss, duplicates, order, leases, payloads")
	f.BoolVar(&c.shape, "shape", true, "compare sampled answers with the contract key by key")
	f.Var(&pids, "broker-pid", "process `id` of a broker; repeatable")
	f.IntVar(&c.pgPID, "pg-pid", 0, "process id of the postmaster")
	f.StringVar(&c.dsn, "dsn", "", "PostgreSQL, for reading counters only")
	f.DurationVar(&c.pgSettle, "pg-settle", 11*time.Second, "with -dsn: wait so long before reading statistics (an idle backend may keep them for 10 s)")
	f.StringVar(&c.json, "json", "", "write the report to this `file` too")
	f.IntVar(&c.repeat, "repeat", 1, "run so many times, report median and spread")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	if f.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	return c, c.complete(name, urls, pushURLs, pids)
}

// complete fills the defaults that depend on others and refuses what cannot work.
func (c *config) complete(name string, urls, pushURLs, pids list) (err error) {
	if len(urls) == 0 {
		urls = list{"http://127.0.0.1:6632"}
	}
	if c.addrs, err = addrsOf(urls); err != nil {
		return err
	}
	if c.pushAddrs, err = addrsOf(pushURLs); err != nil {
		return err
	}
	if len(c.pushAddrs) == 0 {
		c.pushAddrs = c.addrs
	}
	for _, s := range pids {
		pid, err := strconv.Atoi(s)
		if err != nil {
			return fmt.Errorf("not a process id: %q", s)
		}
		c.brokerPIDs = append(c.brokerPIDs, pid)
	}
	if c.popBatch == 0 {
		c.popBatch = c.batch
	}
	switch {
	case c.messages == 0 && (name == "drain" && !c.preloaded || name == "lanes"):
		c.messages = 200000
	case c.messages == 0 && c.duration == 0 && name != "drain":
		c.duration = 10 * time.Second
	}
	if c.partitions == 0 {
		c.partitions = map[string]int{"wake": c.consumers, "partitions": 10000, "lanes": 10000, "idle": 1}[name]
		if c.partitions == 0 {
			c.partitions = 256
		}
	}
	if c.spread == 0 && name == "lanes" {
		c.spread = c.preloadBatch
	}
	switch name {
	case "wake":
		c.partitions = max(c.partitions, c.consumers)
	case "partitions":
		c.producers = min(c.producers, c.partitions)
	case "idle":
		c.distinctQueues = c.distinctQueues || c.queues > 1
		if c.distinctQueues && c.queues == 1 {
			c.queues = c.pollers
		}
	}
	if min := headerLen + objectFrame; c.size < min && (name != "push" || c.verify || c.size < stringFrame) {
		return fmt.Errorf("-size must be at least %d, for push without -verify %d", min, stringFrame)
	}
	if c.snapshot != 0 {
		if name != "cycle" || c.dsn == "" {
			return fmt.Errorf("-snapshot is for cycle and needs -dsn")
		}
		c.duration = c.snapshot + 2*time.Minute
	}
	if c.batch < 1 || c.producers < 1 || c.consumers < 1 || c.groups < 1 || c.partitions < 1 || c.repeat < 1 || c.rate <= 0 {
		return fmt.Errorf("counts must be at least 1")
	}
	if c.preloaded && (c.queue == "" || c.repeat > 1 || name != "drain") {
		return fmt.Errorf("-preloaded is for drain, needs -queue and forbids -repeat")
	}
	return nil
}

// execute runs a mode once.
func execute(ctx context.Context, name string, c *config, n int) (runResult, error) {
	r := &run{c: c, ctx: ctx, id: rand.Uint32(), queue: c.queue, errs: map[string]int64{}}
	if r.queue == "" {
		r.queue = fmt.Sprintf("bench-%08x", r.id)
	} else if c.repeat > 1 {
		r.queue = fmt.Sprintf("%s-%08x-%d", c.queue, r.id, n+1)
	}
	writers := c.producers
	if name == "drain" && !c.preloaded || name == "wake" || name == "lanes" {
		writers = min(c.producers, c.partitions)
	}
	r.ck = newChecker(c, r.id, c.groups, streams(c, writers))
	r.shape = &shapes{ck: r.ck, on: c.shape}
	started := time.Now()
	if err := modes[name].run(r); err != nil {
		return runResult{}, err
	}
	return runResult{Queue: r.queue, Started: started, Metrics: r.m.values, names: r.m.names, Errors: r.errs,
		Check: r.ck.finish(r.drained), Stopped: ctx.Err() != nil}, nil
}

// bench is main with arguments and an exit code.
func bench(ctx context.Context, args []string) int {
	usage := func() {
		fmt.Fprintln(os.Stderr, "usage: bench <mode> [flags]; bench <mode> -h lists them")
		for _, name := range sortedKeys(modes) {
			fmt.Fprintf(os.Stderr, "  %-11s %s\n", name, modes[name].about)
		}
	}
	if len(args) == 0 {
		usage()
		return 2
	}
	name := args[0]
	m, ok := modes[name]
	if !ok {
		usage()
		return 2
	}
	c, err := parse(name, m, args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 2
	}
	rep := &report{Mode: name, Args: args, Machine: machine()}
	code := 0
	for n := range c.repeat {
		if ctx.Err() != nil {
			break
		}
		res, err := execute(ctx, name, c, n)
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			return 2
		}
		if rep.Runs = append(rep.Runs, res); !res.Check.ok() {
			code = 1
		}
	}
	rep.print()
	if c.json != "" {
		if err := rep.write(c.json); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			return 2
		}
	}
	return code
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the process at once
	os.Exit(bench(ctx, os.Args[1:]))
}
