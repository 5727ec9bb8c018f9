package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"slices"
	"time"
)

// metrics are named numbers in the order they were added.
type metrics struct {
	names  []string
	values map[string]float64
}

func (m *metrics) add(name string, v float64) {
	if m.values == nil {
		m.values = map[string]float64{}
	}
	if _, again := m.values[name]; !again {
		m.names = append(m.names, name)
	}
	m.values[name] = v
}

// latency adds the percentiles of h in milliseconds.
func (m *metrics) latency(name string, h *hist) {
	for _, q := range []struct {
		name string
		q    float64
	}{{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"p99.9", 0.999}, {"max", 1}} {
		d := h.quantile(q.q)
		if q.q == 1 {
			d = time.Duration(h.max.Load())
		}
		m.add(name+"_"+q.name+"_ms", float64(d)/1e6)
	}
}

// runResult is one run as it is reported.
type runResult struct {
	Queue   string             `json:"queue"`
	Started time.Time          `json:"started"`
	Metrics map[string]float64 `json:"metrics"`
	Errors  map[string]int64   `json:"errors"`
	Check   checkResult        `json:"check"`
	Stopped bool               `json:"interrupted"`
	names   []string
}

// spread is one number over all runs.
type spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

type report struct {
	Mode    string            `json:"mode"`
	Args    []string          `json:"args"`
	Machine map[string]string `json:"machine"`
	Summary map[string]spread `json:"summary"`
	Runs    []runResult       `json:"runs"`
}

// summarize fills Summary and answers the names in order.
func (r *report) summarize() (names []string) {
	all := map[string][]float64{}
	for _, run := range r.Runs {
		for _, n := range run.names {
			if all[n] == nil {
				names = append(names, n)
			}
			all[n] = append(all[n], run.Metrics[n])
		}
	}
	r.Summary = map[string]spread{}
	for n, vs := range all {
		slices.Sort(vs)
		mid := (vs[(len(vs)-1)/2] + vs[len(vs)/2]) / 2
		r.Summary[n] = spread{Median: mid, Min: vs[0], Max: vs[len(vs)-1]}
	}
	return names
}

func (r *report) print() {
	names := r.summarize()
	fmt.Printf("\nbench %s, %s, %s, %s cores, %s\n", r.Mode, time.Now().Format(time.DateTime), r.Machine["cpu"], r.Machine["cores"], r.Machine["kernel"])
	for _, n := range names {
		s := r.Summary[n]
		if len(r.Runs) == 1 {
			fmt.Printf("  %-34s %14s\n", n, number(s.Median))
		} else {
			fmt.Printf("  %-34s %14s   (%s - %s)\n", n, number(s.Median), number(s.Min), number(s.Max))
		}
	}
	for i, run := range r.Runs {
		for _, e := range sortedKeys(run.Errors) {
			fmt.Printf("  run %d error: %6d × %s\n", i+1, run.Errors[e], e)
		}
		fmt.Printf("  run %d check: %s\n", i+1, run.Check)
		for _, v := range run.Check.First {
			fmt.Printf("      %s\n", v)
		}
		if run.Stopped {
			fmt.Printf("  run %d was interrupted\n", i+1)
		}
	}
}

// number prints with the digits that mean something.
func number(v float64) string {
	switch {
	case v == float64(int64(v)) || v >= 1000:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.3f", v)
	}
}

func (r *report) write(file string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(b, '\n'), 0o644)
}

func machine() map[string]string {
	m := map[string]string{"cores": fmt.Sprint(runtime.NumCPU()), "go": runtime.Version(), "cpu": runtime.GOARCH}
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if _, rest, ok := bytes.Cut(b, []byte("model name\t: ")); ok {
			line, _, _ := bytes.Cut(rest, []byte("\n"))
			m["cpu"] = string(line)
		}
	}
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m["kernel"] = string(bytes.TrimSpace(b))
	}
	return m
}
