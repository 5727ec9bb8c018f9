package contract

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// broker is one running process.
type broker struct {
	cmd  *exec.Cmd
	addr string // host:port
	log  *logBuffer
	done chan struct{} // closed when the process has ended
	term bool          // SIGTERM was sent: a second one ends a broker at once
}

// logBuffer collects what a broker prints and tells once where it listens.
type logBuffer struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	addr chan string
}

var listening = regexp.MustCompile(`http://(127\.0\.0\.1:\d+)`)

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf.Write(p)
	if l.addr != nil {
		if m := listening.FindSubmatch(l.buf.Bytes()); m != nil {
			l.addr <- string(m[1])
			l.addr = nil
		}
	}
	return len(p), nil
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// command is the broker with only the given settings in its environment.
func command(bin string, env []string) (*exec.Cmd, *logBuffer) {
	log := &logBuffer{addr: make(chan string, 1)}
	cmd := exec.Command(bin)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.TempDir()}, env...)
	cmd.Stdout, cmd.Stderr = log, log
	return cmd, log
}

// start returns when the broker listens and, if wanted, is ready.
func start(bin string, env []string, ready bool) (*broker, error) {
	cmd, log := command(bin, env)
	addr := log.addr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	b := &broker{cmd: cmd, log: log, done: make(chan struct{})}
	go func() { _ = cmd.Wait(); close(b.done) }()
	select {
	case b.addr = <-addr:
	case <-b.done:
		return b, fmt.Errorf("the broker ended: %v", cmd.ProcessState)
	case <-time.After(30 * time.Second):
		return b, fmt.Errorf("the broker does not listen after 30s")
	}
	for end := time.Now().Add(30 * time.Second); ready; time.Sleep(20 * time.Millisecond) {
		resp, err := http.Get("http://" + b.addr + "/ready")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == 200 {
				return b, nil
			}
		}
		if time.Now().After(end) {
			return b, fmt.Errorf("the broker is not ready after 30s")
		}
	}
	return b, nil
}

func (b *broker) terminate() {
	if !b.term {
		_ = b.cmd.Process.Signal(syscall.SIGTERM)
	}
	b.term = true
}

// stop sends SIGTERM; the process must end with code 0.
func (b *broker) stop() error {
	b.terminate()
	select {
	case <-b.done:
	case <-time.After(10 * time.Second):
		_ = b.cmd.Process.Kill()
		<-b.done
		return fmt.Errorf("the broker runs 10s after SIGTERM")
	}
	if code := b.cmd.ProcessState.ExitCode(); code != 0 {
		return fmt.Errorf("the broker ended with %v", b.cmd.ProcessState)
	}
	return nil
}

// refuses runs a broker whose settings (NAME=value) must be refused by name.
func refuses(t *testing.T, bin, dsn, where string, settings []string) {
	t.Helper()
	env := append([]string{"DATABASE_URL=" + dsn, "PORT=0"}, settings...)
	cmd, log := command(bin, env)
	addr := log.addr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	name, _, _ := strings.Cut(settings[0], "=")
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	runs := false
	select {
	case <-done:
	case <-addr:
		runs = true
	case <-time.After(10 * time.Second):
		runs = true
	}
	if runs {
		_ = cmd.Process.Kill()
		<-done
	}
	switch {
	case runs:
		t.Errorf("%s: broker runs with %v\n%s", where, settings, log)
	case cmd.ProcessState.ExitCode() <= 0:
		t.Errorf("%s: broker with %v ended with %v\n%s", where, settings, cmd.ProcessState, log)
	case !slices.Contains(regexp.MustCompile(`\w+`).FindAllString(log.String(), -1), name):
		t.Errorf("%s: broker with %v does not name %s:\n%s", where, settings, name, log)
	}
}
