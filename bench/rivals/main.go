// Command rivals runs the same work against FerryMQ and what one would otherwise pick, one after the other on the same machine:
// the same payloads, everything synced to disk before it is answered, the same checker. README.md says what is compared and what is not.
//
//	cd bench/rivals && go run . -ferrymq ../../bench-out/ferrymq
package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// server is a started product.
type server interface {
	// fresh makes an empty queue, and the ones before it go if they would cost anything.
	fresh(ctx context.Context) error
	producer(ctx context.Context) (producer, error)
	// consume runs consumers that take at most batch messages each and tell c of what came and what was acked, until ctx ends.
	consume(ctx context.Context, consumers, batch int, c *checker) error
	order() order
	stop()
}

// producer is used by one goroutine. push returns when the messages are on disk.
type producer interface {
	push(ctx context.Context, part int, payloads [][]byte) error
	close()
}

type config struct {
	ferrymq, pgmq, out, only, report string
	small, large, size, repeat       int
	live                             time.Duration
	rate                             float64
	ids                              bool
}

// result is one measured number of one run.
type result struct {
	Product, Version, Mode, Unit string
	Value                        float64
	Check                        string
	At                           time.Time
}

var products = []struct {
	name  string
	start func(ctx context.Context, c *config, dir string) (s server, version string, err error)
}{
	{"FerryMQ", startFerry},
	{"River", startRiver},
	{"pgmq", startPGMQ},
	{"RabbitMQ", startRabbit},
	{"NATS", startNATS},
}

func main() {
	if len(os.Args) == 3 && os.Args[1] == "nats-server" {
		if err := natsServer(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := rivals(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "rivals:", err)
		stop()
		os.Exit(1)
	}
}

func rivals(ctx context.Context) error {
	c := &config{}
	flag.StringVar(&c.ferrymq, "ferrymq", "", "the broker's `binary`")
	flag.StringVar(&c.pgmq, "pgmq", "", "pgmq's SQL `file`, as it is published; without it pgmq is left out")
	flag.StringVar(&c.out, "out", "", "append every result to this `file`; the table is of all that are in it")
	flag.StringVar(&c.only, "only", "", "run only these, comma-separated: FerryMQ,River,pgmq,RabbitMQ,NATS")
	flag.StringVar(&c.report, "report", "", "run nothing, print the table of this `file`")
	flag.IntVar(&c.repeat, "repeat", 3, "rounds; the products take turns within each")
	flag.IntVar(&c.small, "small", 40000, "messages of push 64 x 1 and of the drain after it")
	flag.IntVar(&c.large, "large", 200000, "messages of push 8 x 100 and of the drain after it")
	flag.IntVar(&c.size, "size", 256, "bytes of a payload")
	flag.Float64Var(&c.rate, "rate", 300, "live: messages per second")
	flag.DurationVar(&c.live, "live", 5*time.Second, "live: how long, after one second to warm up")
	flag.BoolVar(&c.ids, "ids", false, "FerryMQ: push with transaction ids, that is, with deduplication")
	flag.Parse()
	var all []result
	if name := cmp.Or(c.report, c.out); name != "" {
		var err error
		if all, err = load(name); err != nil {
			return err
		}
	}
	if c.report != "" {
		table(all)
		return nil
	}
	for round := range c.repeat {
		for _, p := range products {
			if c.only != "" && !slices.Contains(strings.Split(c.only, ","), p.name) || p.name == "pgmq" && c.pgmq == "" {
				continue
			}
			fmt.Fprintf(os.Stderr, "round %d: %s\n", round+1, p.name)
			got, err := measure(ctx, c, p.name, p.start)
			if err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
			all = append(all, got...)
			if err := save(c.out, got); err != nil {
				return err
			}
		}
	}
	table(all)
	return nil
}

// measure starts a product on an empty directory, runs every mode and removes it.
func measure(ctx context.Context, c *config, name string, start func(context.Context, *config, string) (server, string, error)) (all []result, err error) {
	dir, err := os.MkdirTemp("/tmp", "rivals-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := os.Chmod(dir, 0o755); err != nil { // PostgreSQL runs as another user
		return nil, err
	}
	s, version, err := start(ctx, c, dir)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	add := func(mode, unit string, v float64, k *checker) {
		all = append(all, result{name, version, mode, unit, v, k.verdict(), time.Now()})
		fmt.Fprintf(os.Stderr, "  %-22s %10.1f %-6s %s\n", mode, v, unit, k.verdict())
	}
	for _, m := range []struct{ producers, push, total, consumers, pop int }{{64, 1, c.small, 32, 1}, {8, 100, c.large, 8, 100}} {
		if err := s.fresh(ctx); err != nil {
			return all, err
		}
		k := newChecker(c.size, s.order())
		took, err := push(ctx, s, k, m.producers, m.push, m.total)
		if err != nil {
			return all, fmt.Errorf("push: %w", err)
		}
		pushed := float64(k.left.Load()) / took.Seconds()
		took, err = drain(ctx, s, k, m.consumers, m.pop, func() error { return nil })
		if err != nil {
			return all, fmt.Errorf("drain: %w", err)
		}
		add(fmt.Sprintf("push %d x %d", m.producers, m.push), "msg/s", pushed, k)
		add(fmt.Sprintf("push %d x %d p99", m.producers, m.push), "ms", k.push.ms(0.99), k)
		add(fmt.Sprintf("drain %d x %d", m.consumers, m.pop), "msg/s", float64(k.acks.Load())/took.Seconds(), k)
	}
	if err := s.fresh(ctx); err != nil {
		return all, err
	}
	k := newChecker(c.size, s.order())
	_, err = drain(ctx, s, k, 32, 1, func() error { return live(ctx, s, k, 32, c.rate, c.live, time.Second) })
	if err != nil {
		return all, fmt.Errorf("live: %w", err)
	}
	add(fmt.Sprintf("live %g/s p50", c.rate), "ms", k.e2e.ms(0.5), k)
	add(fmt.Sprintf("live %g/s p99", c.rate), "ms", k.e2e.ms(0.99), k)
	return all, nil
}

func load(name string) (all []result, err error) {
	f, err := os.Open(name)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	for s := bufio.NewScanner(f); s.Scan(); {
		var r result
		if err := json.Unmarshal(s.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, r)
	}
	return all, nil
}

func save(name string, rs []result) error {
	if name == "" {
		return nil
	}
	f, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	for _, r := range rs {
		b, err := json.Marshal(r)
		if err != nil {
			return err
		}
		if _, err := f.Write(append(b, '\n')); err != nil {
			return err
		}
	}
	return f.Close()
}

// table prints medians, lowest and highest, and how FerryMQ compares: above 1 it is better, below 1 worse.
func table(all []result) {
	values, versions := map[[2]string][]float64{}, map[string]string{}
	var modes, names []string
	units := map[string]string{}
	for _, r := range all {
		key := [2]string{r.Mode, r.Product}
		values[key] = append(values[key], r.Value)
		versions[r.Product], units[r.Mode] = r.Version, r.Unit
		if !slices.Contains(modes, r.Mode) {
			modes = append(modes, r.Mode)
		}
		if !slices.Contains(names, r.Product) {
			names = append(names, r.Product)
		}
		if r.Check != "ok" {
			fmt.Printf("CHECK FAILED: %s, %s: %s\n", r.Product, r.Mode, r.Check)
		}
	}
	fmt.Printf("\n%s, %d cores, %s\n\n|  |", time.Now().Format(time.DateOnly), runtime.NumCPU(), cpu())
	for _, n := range names {
		fmt.Printf(" %s %s |", n, versions[n])
	}
	fmt.Printf("\n| --- |%s\n", strings.Repeat(" --- |", len(names)))
	for _, m := range modes {
		fmt.Printf("| %s, %s |", m, units[m])
		for _, n := range names {
			v := values[[2]string{m, n}]
			if len(v) == 0 {
				fmt.Print(" - |")
				continue
			}
			mid := median(v)
			fmt.Printf(" %s (%s - %s)", number(mid), number(slices.Min(v)), number(slices.Max(v)))
			if ours := values[[2]string{m, "FerryMQ"}]; n != "FerryMQ" && len(ours) > 0 {
				ratio := median(ours) / mid
				if units[m] == "ms" {
					ratio = 1 / ratio
				}
				fmt.Printf(" **%.2f**", ratio)
			}
			fmt.Print(" |")
		}
		fmt.Println()
	}
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// number has three digits that mean something, and commas.
func number(v float64) string {
	if v < 100 {
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	s := strconv.FormatFloat(v, 'f', 0, 64)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func cpu() string {
	b, _ := os.ReadFile("/proc/cpuinfo")
	_, rest, _ := strings.Cut(string(b), "model name\t: ")
	line, _, _ := strings.Cut(rest, "\n")
	return line
}

// process is a server that was started here and ends with us.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
	log  string
}

// start runs a command with its output in dir/name.log.
func start(dir, name string, env []string, command string, args ...string) (*process, error) {
	p := &process{cmd: exec.Command(command, args...), done: make(chan struct{}), log: filepath.Join(dir, name+".log")}
	f, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	p.cmd.Dir, p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr = dir, append(os.Environ(), env...), f, f
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	started := make(chan error, 1)
	go func() { // the death signal comes when the thread that forked ends
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			_ = p.cmd.Wait()
			close(p.done)
		}
	}()
	return p, <-started
}

// until waits for ready, or says what the process had to say.
func (p *process) until(ctx context.Context, ready func() error) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		err := ready()
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
			continue
		}
		out, _ := os.ReadFile(p.log)
		return fmt.Errorf("did not start: %w\n%s", err, out)
	}
}

func (p *process) stop() {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(15 * time.Second):
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
		<-p.done
	}
}
