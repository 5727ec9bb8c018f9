package localpg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const socketName = ".s.PGSQL.5432"

// pidFile is what a postmaster writes into its data directory.
type pidFile struct {
	pid    int
	socket string // directory
	ready  bool
}

// readPidFile returns nil if there is no file, and a zero pid if it makes no
// sense.
func readPidFile(data string) *pidFile {
	b, err := os.ReadFile(filepath.Join(data, "postmaster.pid"))
	if err != nil {
		return nil
	}
	lines := bytes.Split(b, []byte("\n"))
	line := func(n int) string {
		if n > len(lines) {
			return ""
		}
		return string(bytes.TrimSpace(lines[n-1]))
	}
	pid, _ := strconv.Atoi(line(1))
	return &pidFile{pid: max(pid, -pid), socket: line(5), ready: line(8) == "ready" || line(8) == "standby"}
}

// clearLeftover makes the data directory free for a new postmaster. The caller
// holds the lock, so whatever still runs there has lost its owner.
func clearLeftover(ctx context.Context, data string) error {
	pf := readPidFile(data)
	if pf == nil {
		return nil // shut down cleanly, or never started
	}
	stages := []struct {
		after time.Duration
		sig   syscall.Signal
	}{{0, syscall.SIGINT}, {10 * time.Second, syscall.SIGQUIT}, {15 * time.Second, syscall.SIGKILL}}
	start := time.Now()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		pids := serversIn(data, pf)
		if len(pids) == 0 {
			break
		}
		if len(stages) > 0 && time.Since(start) >= stages[0].after {
			sig := stages[0].sig
			if sig == syscall.SIGINT && slices.Contains(pids, pf.pid) {
				pids = []int{pf.pid} // it stops the others
			} else if sig == syscall.SIGINT {
				sig = syscall.SIGQUIT // backends without a postmaster: nothing left to save
			}
			for _, pid := range pids {
				if err := syscall.Kill(pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
					return fmt.Errorf("PostgreSQL process %d still runs in %s and cannot be stopped: %w", pid, data, err)
				}
			}
			stages = stages[1:]
		}
		if time.Since(start) > 20*time.Second {
			return fmt.Errorf("PostgreSQL processes %v still run in %s and do not stop", pids, data)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for PostgreSQL processes %v in %s to stop: %w", pids, data, ctx.Err())
		case <-tick.C:
		}
	}
	// PostgreSQL itself ignores a file that names a dead process, and has a
	// check of its own for that case. It stops at one that names any live
	// process (or zombie) of the same user, and at one without a number.
	if pf.pid == 0 || syscall.Kill(pf.pid, 0) == nil {
		if err := os.Remove(filepath.Join(data, "postmaster.pid")); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// serversIn lists the live PostgreSQL processes of a data directory. All of
// them have it as their working directory, which /proc tells. Without /proc,
// the postmaster of the pid file lives if something answers on its socket.
func serversIn(data string, pf *pidFile) []int {
	real, err := filepath.EvalSymlinks(data)
	if err != nil {
		return nil
	}
	if _, err := os.Stat("/proc/self/cwd"); err != nil {
		if pf.pid == 0 || pf.socket == "" {
			return nil
		}
		conn, err := net.Dial("unix", filepath.Join(pf.socket, socketName))
		if err != nil {
			return nil
		}
		_ = conn.Close()
		return []int{pf.pid}
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if cwd, err := os.Readlink(filepath.Join("/proc", e.Name(), "cwd")); err != nil || cwd != real {
			continue
		}
		// A shell that happens to stand in the directory is none of ours. A process that is ending has no program any more while its memory
		// is being taken down, and as long as a part of that is shared no new server starts.
		exe, err := os.Readlink(filepath.Join("/proc", e.Name(), "exe"))
		if errors.Is(err, os.ErrNotExist) || err == nil && strings.Contains(filepath.Base(exe), "postgres") {
			pids = append(pids, pid)
		}
	}
	return pids
}
