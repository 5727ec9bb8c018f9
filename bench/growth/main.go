// Command growth measures how cost grows with work: one topic after the other, each on a fresh private PostgreSQL with fresh brokers, driven
// by bench. It prints a table per topic and draws two of them.
//
//	go run ./bench/growth [-broker bench-out/ferrymq] [-bench bench-out/bench] [-svg docs] [topic...]
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math"
	"net"
	"net/http"
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

	"github.com/jackc/pgx/v5"

	"ferrymq/localpg"
)

// settings are those of the broker's private PostgreSQL, with room for three brokers.
var settings = map[string]string{"max_connections": "120", "shared_buffers": "256MB", "max_wal_size": "4GB", "wal_buffers": "16MB"}

type topic struct {
	about string
	run   func(e *env) error
}

var topics = map[string]topic{
	"size":       {"bytes of a payload", size},
	"groups":     {"groups that each get everything", groups},
	"width":      {"GROUP_COMMIT_WIDTH", width},
	"brokers":    {"brokers on one database", brokers},
	"partitions": {"partitions of a queue, 100 of them used", partitionCount},
	"million":    {"what a million partitions cost beside what is used", million},
	"backlog":    {"messages that wait", backlog},
	"dedup":      {"an hour of ids at 15,000 a second", dedupWindow},
	"parked":     {"consumers that wait", parked},
	"lanes":      {"lanes in backoff", backoff},
	"cost":       {"what a million messages cost", cost},
	"storage":    {"bytes on disk and of WAL a message", storage},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	e := &env{ctx: ctx}
	flag.StringVar(&e.broker, "broker", "bench-out/ferrymq", "the broker's `binary`")
	flag.StringVar(&e.bench, "bench", "bench-out/bench", "the load generator's `binary`")
	flag.StringVar(&e.svg, "svg", "", "draw into this `directory`")
	flag.StringVar(&e.only, "only", "", "only these `values` of a topic, comma-separated")
	flag.StringVar(&e.duration, "duration", "3s", "how long each load runs")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: growth [flags] [topic...]")
		flag.PrintDefaults()
		for _, name := range slices.Sorted(maps.Keys(topics)) {
			fmt.Fprintf(os.Stderr, "  %-11s %s\n", name, topics[name].about)
		}
	}
	flag.Parse()
	names := flag.Args()
	if len(names) == 0 {
		names = slices.Sorted(maps.Keys(topics))
	}
	fmt.Printf("%s, %d cores, %s\n", time.Now().Format(time.DateTime), runtime.NumCPU(), first("/proc/cpuinfo", "model name\t: "))
	for _, name := range names {
		t, ok := topics[name]
		if !ok {
			flag.Usage()
			os.Exit(2)
		}
		e.head, e.rows = nil, nil
		err := t.run(e)
		e.down()
		e.print(name, t.about)
		if err != nil {
			fmt.Fprintf(os.Stderr, "growth: %s: %v\n", name, err)
			os.Exit(1)
		}
	}
}

func first(file, after string) string {
	b, _ := os.ReadFile(file)
	_, rest, _ := strings.Cut(string(b), after)
	line, _, _ := strings.Cut(rest, "\n")
	return line
}

// env is what a topic runs on, and its table.
type env struct {
	ctx                                context.Context
	broker, bench, svg, only, duration string
	dir                                string
	pg                                 *localpg.Server
	conn                               *pgx.Conn
	brokers                            []*exec.Cmd
	urls                               []string
	head                               []string
	rows                               [][]any
}

// up starts a fresh PostgreSQL and n brokers on it; vars are variables of their environment.
func (e *env) up(n int, vars ...string) (err error) {
	e.down()
	if e.dir, err = os.MkdirTemp("/tmp", "growth-"); err != nil {
		return err
	}
	if err := os.Chmod(e.dir, 0o755); err != nil { // PostgreSQL runs as another user
		return err
	}
	if e.pg, err = localpg.Start(e.ctx, localpg.Options{Dir: e.dir, Settings: settings}); err != nil {
		return err
	}
	if e.conn, err = pgx.Connect(e.ctx, e.pg.DSN); err != nil {
		return err
	}
	return e.start(n, vars...)
}

func (e *env) start(n int, vars ...string) error {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		_, port, _ := net.SplitHostPort(l.Addr().String())
		_ = l.Close()
		cmd := exec.Command(e.broker)
		log, err := os.Create(filepath.Join(e.dir, "broker-"+port+".log"))
		if err != nil {
			return err
		}
		cmd.Env = append(append(os.Environ(), "PORT="+port, "DATABASE_URL="+e.pg.DSN), vars...)
		cmd.Stdout, cmd.Stderr = log, log
		if err := cmd.Start(); err != nil {
			return err
		}
		_ = log.Close()
		e.brokers, e.urls = append(e.brokers, cmd), append(e.urls, "http://127.0.0.1:"+port)
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			r, err := http.Get(e.urls[len(e.urls)-1] + "/ready")
			if err == nil {
				_ = r.Body.Close()
				if r.StatusCode == http.StatusOK {
					break
				}
			}
			if time.Now().After(deadline) {
				text, _ := os.ReadFile(log.Name())
				return fmt.Errorf("broker is not ready:\n%s", text)
			}
		}
	}
	return nil
}

func (e *env) stopBrokers() {
	for _, b := range e.brokers {
		_ = b.Process.Signal(syscall.SIGTERM)
		_ = b.Wait()
	}
	e.brokers, e.urls = nil, nil
}

func (e *env) down() {
	e.stopBrokers()
	if e.conn != nil {
		_ = e.conn.Close(context.WithoutCancel(e.ctx))
		e.conn = nil
	}
	if e.pg != nil {
		e.pg.Stop()
		_ = os.RemoveAll(e.pg.Dir)
		_ = os.RemoveAll(e.dir)
		e.pg = nil
	}
}

// load runs bench and answers its figures. args are split at blanks.
func (e *env) load(args string) (map[string]float64, error) {
	file := filepath.Join(e.dir, "report.json")
	all := append(strings.Fields(args), "-url", strings.Join(e.urls, ","), "-json", file, "-dsn", e.pg.DSN, "-pg-settle", "1ms", "-pg-pid", strconv.Itoa(e.pg.PID()))
	for _, b := range e.brokers {
		all = append(all, "-broker-pid", strconv.Itoa(b.Process.Pid))
	}
	fmt.Fprintln(os.Stderr, "bench", args)
	out, err := exec.CommandContext(e.ctx, e.bench, all...).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("bench %s: %w\n%s", args, err, out)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var report struct {
		Summary map[string]struct{ Median float64 }
		Runs    []struct{ Errors map[string]int64 }
	}
	if err := json.Unmarshal(text, &report); err != nil {
		return nil, err
	}
	for _, r := range report.Runs {
		for text, n := range r.Errors {
			fmt.Fprintf(os.Stderr, "  error: %d x %s\n", n, text)
		}
	}
	values := map[string]float64{}
	for name, s := range report.Summary {
		values[name] = s.Median
	}
	return values, nil
}

func (e *env) exec(sql string, args ...any) error {
	_, err := e.conn.Exec(e.ctx, sql, args...)
	return err
}

// number is the one value of a query.
func (e *env) number(sql string, args ...any) (v float64, err error) {
	err = e.conn.QueryRow(e.ctx, sql, args...).Scan(&v)
	return v, err
}

// columns names the table's columns, row adds to it.
func (e *env) columns(names ...string) { e.head = names }

func (e *env) row(values ...any) { e.rows = append(e.rows, values) }

// of is the values that -only leaves.
func (e *env) of(values ...int) []int {
	if e.only == "" {
		return values
	}
	return slices.DeleteFunc(values, func(v int) bool { return !slices.Contains(strings.Split(e.only, ","), strconv.Itoa(v)) })
}

func (e *env) print(name, about string) {
	fmt.Printf("\n%s: %s\n\n| %s |\n|%s\n", name, about, strings.Join(e.head, " | "), strings.Repeat(" ---: |", len(e.head)))
	for _, r := range e.rows {
		text := make([]string, len(r))
		for i, v := range r {
			switch v := v.(type) {
			case float64:
				text[i] = digits(v)
			case int:
				text[i] = digits(float64(v))
			case string:
				text[i] = v
			}
		}
		fmt.Printf("| %s |\n", strings.Join(text, " | "))
	}
}

// digits is a number with the digits that mean something, and commas.
func digits(v float64) string {
	switch {
	case math.IsNaN(v):
		return "-"
	case v == float64(int64(v)) || v >= 100:
		s := strconv.FormatFloat(v, 'f', 0, 64)
		for i := len(s) - 3; i > 0; i -= 3 {
			s = s[:i] + "," + s[i:]
		}
		return s
	case v >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	default:
		return strconv.FormatFloat(v, 'g', 2, 64)
	}
}
