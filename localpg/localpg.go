// Package localpg runs a private PostgreSQL from the server binaries that are
// installed on this machine, and stops it when this process ends.
//
// The server listens on a unix socket only, in a directory that nobody but its
// user can enter; that is why it may trust every connection. A directory that
// was given to Start looks like this:
//
//	lock   held (flock) as long as the server runs: one owner at a time
//	pg     the cluster, made by initdb on first use
//	s      the socket
//
// Three things keep an owner that was killed from leaving trouble behind. On
// Linux the kernel interrupts the postmaster when its owner dies. Everywhere,
// the lock goes with the owner, and the next Start first stops whatever still
// runs on the same data. And initdb works under a temporary name, so that half
// a cluster never has the real one.
//
// PostgreSQL refuses to run as root. Started by root, it runs as the owner of
// the cluster, or for a new one as user postgres, else nobody.
package localpg

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// ErrInUse is the error of a Start whose directory another process holds.
var ErrInUse = errors.New("another process runs the PostgreSQL in this directory")

// Options says what to start.
type Options struct {
	// Dir is where the data goes. It is created if it does not exist. It may
	// not share anything with another program.
	Dir string
	// Settings are server settings, as in postgresql.conf. The ones that
	// decide where data and socket are belong to this package.
	Settings map[string]string
	// Env is more of the server's environment, as NAME=value: for tests of what surrounds it.
	Env []string
}

// reserved settings would break what the package promises.
var reserved = []string{"data_directory", "external_pid_file", "listen_addresses", "port", "unix_socket_directories"}

// Server is a running PostgreSQL.
type Server struct {
	// DSN connects as superuser to the database postgres (keyword/value form).
	DSN string
	// Version is the major version, such as 17.
	Version int
	// Dir is where the data really is.
	Dir string
	// Relocated says that Dir is not the directory that was asked for, because
	// User cannot enter that one. It depends only on the path, so that the
	// next Start finds the data again.
	Relocated bool
	// User is the account that root runs the server as, and empty if this
	// process is not root's.
	User string

	socketDir  string
	tempSocket bool
	lock       *os.File
	cmd        *exec.Cmd
	log        tail
	logDone    chan struct{}
	done       chan struct{}
	stopOnce   sync.Once

	mu       sync.Mutex
	stopping bool
	err      error
}

// Start runs the PostgreSQL of o.Dir, after initdb if it is new, and returns
// when it accepts connections. ctx bounds the start and not the server, which
// runs until Stop or until this process ends.
func Start(ctx context.Context, o Options) (_ *Server, err error) {
	if o.Dir == "" {
		return nil, errors.New("start PostgreSQL: no directory given")
	}
	for name := range o.Settings {
		if slices.Contains(reserved, strings.ToLower(name)) {
			return nil, fmt.Errorf("start PostgreSQL: setting %s cannot be changed", name)
		}
	}
	asked, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, err
	}
	dir, acc, err := place(ctx, asked)
	if err != nil {
		return nil, fmt.Errorf("start PostgreSQL: %w", err)
	}
	s := &Server{Dir: dir, Relocated: dir != asked, done: make(chan struct{}), logDone: make(chan struct{})}
	if acc != nil {
		s.User = acc.name
	}
	defer func() {
		if err != nil {
			s.release()
			err = fmt.Errorf("start PostgreSQL: %w", err)
		}
	}()
	if err := makeDirs(dir); err != nil {
		return nil, err
	}
	if s.lock, err = takeLock(dir); err != nil {
		return nil, err
	}
	data := filepath.Join(dir, "pg")
	bin, err := prepareCluster(ctx, dir, data, acc)
	if err != nil {
		return nil, err
	}
	s.Version = bin.major
	if err := clearLeftover(ctx, data); err != nil {
		return nil, err
	}
	if err := s.makeSocketDir(ctx, acc); err != nil {
		return nil, err
	}
	s.DSN = "host=" + quote(s.socketDir) + " port=5432 user=postgres dbname=postgres sslmode=disable"

	args := []string{"-D", data}
	for _, name := range slices.Sorted(maps.Keys(o.Settings)) {
		args = append(args, "-c", name+"="+o.Settings[name])
	}
	args = append(args, "-c", "listen_addresses=", "-c", "port=5432",
		"-c", `unix_socket_directories="`+strings.ReplaceAll(s.socketDir, `"`, `""`)+`"`)
	s.cmd = exec.Command(filepath.Join(bin.dir, "postgres"), args...)
	s.cmd.Dir, s.cmd.Env, s.cmd.SysProcAttr = "/", append(childEnv(), o.Env...), childAttr(acc.credential())
	if err := s.launch(); err != nil {
		return nil, err
	}
	if err := s.waitReady(ctx, data); err != nil {
		s.Stop()
		return nil, fmt.Errorf("%w\n%s", err, s.Log())
	}
	return s, nil
}

// takeLock holds dir for this process, or says who does.
func takeLock(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, fs.ErrPermission) {
		if by := owner(filepath.Join(dir, "lock")); by != nil && by.uid != os.Geteuid() {
			return nil, fmt.Errorf("%s belongs to user %s: run as that user, or choose another directory: %w", dir, by.name, err)
		}
	}
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		holder := make([]byte, 20)
		n, _ := f.Read(holder)
		_ = f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: %s (process %s)", ErrInUse, dir, bytes.TrimSpace(holder[:n]))
		}
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	// The number is for people only; the flock is what counts.
	if err := f.Truncate(0); err == nil {
		_, _ = fmt.Fprintln(f, os.Getpid())
	}
	return f, nil
}

// prepareCluster finds the binaries that fit, and makes the cluster if there is
// none.
func prepareCluster(ctx context.Context, dir, data string, acc *account) (binaries, error) {
	// What an initdb that was interrupted left behind.
	stale, _ := filepath.Glob(filepath.Join(dir, "pg.init-*"))
	for _, d := range stale {
		if err := os.RemoveAll(d); err != nil {
			return binaries{}, err
		}
	}
	text, err := os.ReadFile(filepath.Join(data, "PG_VERSION"))
	switch {
	case err == nil:
		major, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			return binaries{}, fmt.Errorf("%s/PG_VERSION is %q, which is no version", data, text)
		}
		bin, err := findBinaries(ctx, acc.credential(), data, major)
		if err != nil {
			return binaries{}, err
		}
		switch by := owner(data); {
		case acc == nil && by != nil && by.uid != os.Geteuid():
			return binaries{}, fmt.Errorf("%s belongs to user %s: run as that user, or choose another directory", data, by.name)
		case acc != nil && by != nil && by.uid == 0:
			err = ownTree(data, acc)
		}
		return bin, err
	case errors.Is(err, fs.ErrPermission):
		return binaries{}, fmt.Errorf("%s belongs to another user: run as that user, or choose another directory: %w", data, err)
	case !errors.Is(err, fs.ErrNotExist):
		return binaries{}, err
	}
	bin, err := findBinaries(ctx, acc.credential(), data, 0)
	if err != nil {
		return binaries{}, err
	}
	return bin, initCluster(ctx, bin, dir, data, acc)
}

// initCluster makes a cluster under a temporary name, then gives it its own.
func initCluster(ctx context.Context, bin binaries, dir, data string, acc *account) error {
	_ = os.Remove(data) // an empty directory may be replaced
	if _, err := os.Lstat(data); err == nil {
		return fmt.Errorf("%s exists but is not a PostgreSQL cluster: move it away", data)
	}
	tmp, err := os.MkdirTemp(dir, "pg.init-")
	if err != nil {
		return err
	}
	if err := acc.own(tmp); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(bin.dir, "initdb"), "-D", tmp, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-instructions")
	cmd.Dir, cmd.Env, cmd.SysProcAttr = "/", childEnv(), childAttr(acc.credential())
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	if out, err := combinedOutput(cmd); err != nil {
		_ = os.RemoveAll(tmp)
		return fmt.Errorf("initdb: %w\n%s", cmp.Or(ctx.Err(), err), bytes.TrimSpace(out))
	}
	if err := os.Rename(tmp, data); err != nil {
		return err
	}
	return syncDir(dir)
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// makeSocketDir prepares <dir>/s, or a temporary directory where that path
// would be too long for a socket (the limit is 103 bytes on some systems) or
// has a comma, which separates hosts in a connection string.
func (s *Server) makeSocketDir(ctx context.Context, acc *account) error {
	s.socketDir = filepath.Join(s.Dir, "s")
	if len(filepath.Join(s.socketDir, socketName)) >= 100 || strings.Contains(s.socketDir, ",") {
		base := os.TempDir()
		if ok, err := acc.canEnter(ctx, base); err != nil || !ok || len(base) > 60 {
			base = "/tmp"
		}
		dir, err := os.MkdirTemp(base, "ferrymq-")
		if err != nil {
			return err
		}
		s.socketDir, s.tempSocket = dir, true
	}
	if err := privateDir(s.socketDir, acc); err != nil {
		return err
	}
	// Nothing runs here any more, and PostgreSQL would stop at a socket lock
	// file that names some live process.
	for _, name := range []string{socketName, socketName + ".lock"} {
		if err := os.Remove(filepath.Join(s.socketDir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// launch starts the postmaster and returns once it exists.
func (s *Server) launch() error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	s.cmd.Stdout, s.cmd.Stderr = w, w
	started := make(chan error, 1)
	go s.wait(started, r)
	err = <-started
	_ = w.Close()
	if err != nil {
		_ = r.Close()
		s.cmd = nil
		return err
	}
	go s.readLog(r)
	return nil
}

// wait owns the postmaster from fork to exit. The parent-death signal fires
// when the thread that forked dies, so this goroutine keeps its thread.
func (s *Server) wait(started chan<- error, log *os.File) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := s.cmd.Start()
	started <- err
	if err != nil {
		return
	}
	err = s.cmd.Wait()
	// Backends that outlive a killed postmaster hold the pipe a little longer.
	_ = log.SetReadDeadline(time.Now().Add(time.Second))
	<-s.logDone
	s.mu.Lock()
	if !s.stopping || err != nil {
		s.err = fmt.Errorf("PostgreSQL in %s ended: %v", s.Dir, s.cmd.ProcessState)
	}
	s.mu.Unlock()
	close(s.done)
}

func (s *Server) readLog(r *os.File) {
	defer close(s.logDone)
	buf := make([]byte, 4096)
	for {
		n, err := r.Read(buf)
		s.log.add(buf[:n])
		if err != nil {
			_ = r.Close()
			return
		}
	}
}

// waitReady returns once the postmaster says in its pid file that it accepts
// connections, and one to its socket succeeds.
func (s *Server) waitReady(ctx context.Context, data string) error {
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for {
		if pf := readPidFile(data); pf != nil && pf.ready && pf.pid == s.PID() {
			if conn, err := net.Dial("unix", filepath.Join(s.socketDir, socketName)); err == nil {
				return conn.Close()
			}
		}
		select {
		case <-s.done:
			return s.Err()
		case <-ctx.Done():
			return fmt.Errorf("not ready in time: %w", ctx.Err())
		case <-tick.C:
		}
	}
}

// Stop ends the server: sessions are cut off, data is written, the lock is
// given up. It returns when all of that is done, and may be called again, from
// several goroutines too. A server that takes longer than 10 s is told to give
// up at once, and recovers at the next Start.
func (s *Server) Stop() {
	s.stopOnce.Do(func() {
		s.mu.Lock()
		s.stopping = true
		s.mu.Unlock()
		for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGQUIT, syscall.SIGKILL} {
			_ = s.cmd.Process.Signal(sig)
			timer := time.NewTimer(10 * time.Second)
			select {
			case <-timer.C:
				continue
			case <-s.done:
				timer.Stop()
			}
			break
		}
		<-s.done
		s.release()
	})
}

// release undoes what Start did around the postmaster.
func (s *Server) release() {
	if s.tempSocket {
		_ = os.RemoveAll(s.socketDir)
	}
	if s.lock != nil {
		_ = s.lock.Close()
	}
}

// Done is closed when the postmaster has ended, for whatever reason. Stop must
// be called even then.
func (s *Server) Done() <-chan struct{} { return s.done }

// Err is nil while the server runs and after an orderly Stop; otherwise it says
// how the postmaster ended.
func (s *Server) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Command is a command that runs as the user of the server and, like the server, does not outlive the thread that starts it.
func (s *Server) Command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	attr := *s.cmd.SysProcAttr
	cmd.Dir, cmd.Env, cmd.SysProcAttr = "/", childEnv(), &attr
	return cmd
}

// PID is the process id of the postmaster.
func (s *Server) PID() int { return s.cmd.Process.Pid }

// Log is the most recent output of the server, for error messages.
func (s *Server) Log() string { return s.log.String() }

// tail keeps the end of what is added to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

const tailMax = 32 << 10

func (t *tail) add(p []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	if over := len(t.b) - tailMax; over > 0 {
		t.b = append(t.b[:0], t.b[over:]...)
	}
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.b))
}

// combinedOutput is that of exec.Cmd on a thread that lives as long as the
// child, as the parent-death signal demands.
func combinedOutput(cmd *exec.Cmd) (out []byte, err error) {
	cmd.WaitDelay = 5 * time.Second
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		out, err = cmd.CombinedOutput()
	}()
	<-done
	return out, err
}

// childEnv passes on what loading the binaries needs and nothing else: libpq
// and server variables such as PGPORT would change the server, and secrets of
// this program are not its business. The time zone becomes the default of a
// new cluster.
func childEnv() []string {
	env := []string{"LC_ALL=C", "TZ=UTC"}
	for _, name := range []string{"PATH", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"} {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// quote makes any text a value of a keyword/value connection string.
func quote(v string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(v) + "'"
}
