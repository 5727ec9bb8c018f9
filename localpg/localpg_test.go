package localpg

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// fast is for tests of everything but durability.
var fast = map[string]string{"fsync": "off", "shared_buffers": "16MB"}

// ownEnv turns this test binary into a process that owns the PostgreSQL of a
// directory until it is killed.
const ownEnv = "FERRYMQ_LOCALPG_TEST_OWN"

func TestMain(m *testing.M) {
	if dir := os.Getenv(ownEnv); dir != "" {
		s, err := Start(context.Background(), Options{Dir: dir, Settings: fast})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(s.PID())
		<-s.Done()
		os.Exit(0)
	}
	code := m.Run()
	if dir, err := pristine(); err == nil {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

// pristine is a directory with a cluster that was started and stopped once:
// tests copy it, which is faster than initdb.
var pristine = sync.OnceValues(func() (string, error) {
	dir, err := tempDir()
	if err != nil {
		return "", err
	}
	s, err := Start(context.Background(), Options{Dir: dir, Settings: fast})
	if err != nil {
		return "", err
	}
	s.Stop()
	return dir, s.Err()
})

// tempDir can be entered by the user that root runs PostgreSQL as, unlike
// t.TempDir.
func tempDir() (string, error) {
	base := "/dev/shm"
	if _, err := os.Stat(base); err != nil {
		base = ""
	}
	dir, err := os.MkdirTemp(base, "localpg-test-")
	if err != nil || os.Geteuid() != 0 {
		return dir, err
	}
	return dir, os.Chmod(dir, 0o711)
}

func emptyDir(t *testing.T) string {
	t.Helper()
	dir, err := tempDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func clusterDir(t *testing.T) string {
	t.Helper()
	from, err := pristine()
	if err != nil {
		t.Fatal(err)
	}
	dir := emptyDir(t)
	if out, err := exec.Command("cp", "-a", filepath.Join(from, "pg"), dir).CombinedOutput(); err != nil {
		t.Fatalf("cp: %v %s", err, out)
	}
	return dir
}

func start(t *testing.T, dir string) *Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := Start(ctx, Options{Dir: dir, Settings: fast})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

func query(t *testing.T, s *Server, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.DSN)
	if err != nil {
		t.Fatalf("%v\n%s", err, s.Log())
	}
	defer func() { _ = conn.Close(context.Background()) }()
	var out string
	if err := conn.QueryRow(t.Context(), sql).Scan(&out); err != nil && !errors.Is(err, pgx.ErrNoRows) {
		t.Fatalf("%s: %v", sql, err)
	}
	return out
}

// waitGone waits until no PostgreSQL process is left in the directory.
func waitGone(t *testing.T, dir string, pid int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if len(serversIn(filepath.Join(dir, "pg"), &pidFile{pid: pid})) == 0 {
			return
		}
	}
	t.Errorf("PostgreSQL still runs in %s", dir)
}

func TestRestartKeepsData(t *testing.T) {
	t.Parallel()
	dir := emptyDir(t)
	s := start(t, dir)
	if s.Version < minMajor || s.Dir != dir || s.Relocated || (s.User != "") != (os.Geteuid() == 0) {
		t.Errorf("version %d, dir %s (relocated %v), user %q", s.Version, s.Dir, s.Relocated, s.User)
	}
	query(t, s, "create table kept as select 'here' as x")
	for _, q := range [][2]string{
		{"select current_setting('fsync')", "off"},
		{"select current_setting('listen_addresses')", ""},
		{"select current_setting('timezone')", "UTC"},
		{"select current_setting('server_encoding')", "UTF8"},
		{"select datcollate from pg_database where datname = 'postgres'", "C"},
	} {
		if got := query(t, s, q[0]); got != q[1] {
			t.Errorf("%s: %q, want %q", q[0], got, q[1])
		}
	}
	if fi, err := os.Stat(filepath.Join(dir, "s")); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("socket directory: %v %v", fi, err)
	}
	select {
	case <-s.Done():
		t.Error("done while running")
	default:
	}
	var stops sync.WaitGroup
	for range 3 {
		stops.Go(s.Stop)
	}
	stops.Wait()
	<-s.Done()
	if err := s.Err(); err != nil {
		t.Errorf("after an orderly stop: %v", err)
	}
	if !strings.Contains(s.Log(), "database system is shut down") {
		t.Errorf("log: %s", s.Log())
	}
	s = start(t, dir)
	if got := query(t, s, "select x from kept"); got != "here" {
		t.Errorf("after restart: %q", got)
	}
}

func TestInterruptedInitdb(t *testing.T) {
	t.Parallel()
	dir := emptyDir(t)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for len(glob(t, filepath.Join(dir, "pg.init-*", "*"))) == 0 && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	if s, err := Start(ctx, Options{Dir: dir}); !errors.Is(err, context.Canceled) {
		if s != nil {
			s.Stop()
		}
		t.Fatalf("start, cancelled during initdb: %v", err)
	}
	if left := glob(t, filepath.Join(dir, "pg*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	if err := os.Mkdir(filepath.Join(dir, "pg.init-1"), 0o700); err != nil {
		t.Fatal(err)
	}
	start(t, dir)
	if left := glob(t, filepath.Join(dir, "pg.init-*")); len(left) != 0 {
		t.Errorf("not cleaned up: %v", left)
	}
}

func glob(t *testing.T, pattern string) []string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	if err != nil {
		t.Error(err)
	}
	return found
}

func TestSecondStartRefused(t *testing.T) {
	t.Parallel()
	dir := clusterDir(t)
	s := start(t, dir)
	_, err := Start(t.Context(), Options{Dir: dir})
	if !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), fmt.Sprint(os.Getpid())) {
		t.Errorf("second start: %v", err)
	}
	if got := query(t, s, "select 'alive'"); got != "alive" {
		t.Errorf("the first: %q", got)
	}
}

func TestOwnerKilled(t *testing.T) {
	t.Parallel()
	dir := clusterDir(t)
	owner := exec.Command(os.Args[0])
	owner.Env = append(os.Environ(), ownEnv+"="+dir)
	out, err := owner.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	var pid int
	if _, scanErr := fmt.Sscan(line, &pid); err != nil || scanErr != nil {
		t.Fatalf("owner said %q (%v)", line, err)
	}
	if err := owner.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, out)
	_ = owner.Wait()

	s := start(t, dir)
	if s.PID() == pid {
		t.Error("the orphan was taken for ours")
	}
	if got := query(t, s, "select 'alive'"); got != "alive" {
		t.Errorf("after the owner was killed: %q", got)
	}
	s.Stop()
	waitGone(t, dir, pid)
}

// An owner on a system without a parent-death signal leaves its postmaster
// running; so does this one, by starting it without localpg.
func TestOrphanIsStopped(t *testing.T) {
	t.Parallel()
	dir := clusterDir(t)
	first := start(t, dir)
	args, env, attr := first.cmd.Args, first.cmd.Env, *first.cmd.SysProcAttr
	first.Stop()
	orphan := exec.Command(args[0], args[1:]...)
	orphan.Dir, orphan.Env = "/", env
	orphan.SysProcAttr = &syscall.SysProcAttr{Credential: attr.Credential, Setpgid: true}
	if err := orphan.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func() { exited <- orphan.Wait() }()
	for pf := readPidFile(filepath.Join(dir, "pg")); pf == nil || !pf.ready; pf = readPidFile(filepath.Join(dir, "pg")) {
		time.Sleep(2 * time.Millisecond)
	}
	s := start(t, dir)
	if err := <-exited; err != nil {
		t.Errorf("the orphan was not stopped in order: %v", err)
	}
	if got := query(t, s, "select 'alive'"); got != "alive" {
		t.Errorf("after an orphan: %q", got)
	}
}

func TestPostmasterKilled(t *testing.T) {
	t.Parallel()
	dir := clusterDir(t)
	s := start(t, dir)
	query(t, s, "create table kept as select 'here' as x")
	busy, err := pgx.Connect(t.Context(), s.DSN)
	if err != nil {
		t.Fatal(err)
	}
	go func() { // a backend that does not notice by itself
		_, _ = busy.Exec(context.Background(), "select count(*) from generate_series(1, 1e10)")
	}()
	if err := syscall.Kill(s.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-s.Done()
	if err := s.Err(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("err: %v", err)
	}
	if _, err := Start(t.Context(), Options{Dir: dir}); !errors.Is(err, ErrInUse) {
		t.Errorf("start before stop: %v", err)
	}
	s.Stop()
	s = start(t, dir)
	if got := query(t, s, "select x from kept"); got != "here" {
		t.Errorf("after a crash: %q", got)
	}
}

// A process that is ending has no program long before the memory that it shares is free: it still counts. A row of killed servers has such
// moments, which last longer the more memory there is.
func TestEndingProcessCounts(t *testing.T) {
	t.Parallel()
	dir := clusterDir(t)
	data := filepath.Join(dir, "pg")
	for range 5 {
		s, err := Start(t.Context(), Options{Dir: dir, Settings: map[string]string{"fsync": "off", "shared_buffers": "1GB"}})
		if err != nil {
			t.Fatal(err)
		}
		pf := readPidFile(data)
		all := serversIn(data, pf)
		for _, pid := range all {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
		for len(serversIn(data, pf)) > 0 {
			runtime.Gosched()
		}
		for _, pid := range all {
			if _, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid)); err == nil {
				t.Errorf("process %d is still there", pid)
			}
		}
		s.Stop()
	}
}

func TestStalePidFile(t *testing.T) {
	t.Parallel()
	dir := clusterDir(t)
	s := start(t, dir)
	attr := *s.cmd.SysProcAttr
	s.Stop()
	// A live process of the same user that has nothing to do with PostgreSQL,
	// although it stands in the data directory.
	other := exec.Command("sleep", "1000")
	other.Dir = filepath.Join(dir, "pg")
	other.SysProcAttr = &attr
	started, release := make(chan error), make(chan struct{})
	go func() {
		if err := other.Start(); err != nil {
			started <- err
			return
		}
		started <- nil
		<-release
		_ = other.Wait()
		close(started)
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = other.Process.Kill()
		close(release)
		<-started
	}()
	pidPath := filepath.Join(dir, "pg", "postmaster.pid")
	for name, text := range map[string]string{
		"live":  fmt.Sprintf("%d\n%s/pg\n1700000000\n5432\n%[2]s/s\n\n\n", other.Process.Pid, dir),
		"dead":  "4194303\n" + dir + "/pg\n1700000000\n5432\n\n\n\nready   \n",
		"empty": "",
	} {
		if err := os.WriteFile(pidPath, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if attr.Credential != nil {
			if err := os.Chown(pidPath, int(attr.Credential.Uid), int(attr.Credential.Gid)); err != nil {
				t.Fatal(err)
			}
		}
		s := start(t, dir)
		if got := query(t, s, "select 'alive'"); got != "alive" {
			t.Errorf("%s: %q", name, got)
		}
		s.Stop()
	}
	if err := syscall.Kill(other.Process.Pid, 0); err != nil {
		t.Errorf("the unrelated process: %v", err)
	}
}

func TestWrongMajor(t *testing.T) {
	t.Parallel()
	dir := clusterDir(t)
	path := filepath.Join(dir, "pg", "PG_VERSION")
	for _, major := range []string{"99", "14"} {
		if err := os.WriteFile(path, []byte(major+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, version, err := Installed(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		installed := string(versionPattern.FindStringSubmatch(version)[1])
		_, err = Start(t.Context(), Options{Dir: dir})
		if err == nil {
			t.Fatal("started")
		}
		wants := []string{filepath.Join(dir, "pg"), "PostgreSQL " + major, "pg_upgrade", "move the directory away"}
		if major == "99" {
			wants = append(wants, "PostgreSQL "+installed, "install PostgreSQL 99")
		}
		for _, want := range wants {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("PG_VERSION %s: %q does not say %q", major, err, want)
			}
		}
	}
}

func TestLongPath(t *testing.T) {
	t.Parallel()
	short := clusterDir(t)
	dir := filepath.Join(short, strings.Repeat("a very long name ", 6), "data")
	if err := makeDirs(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(short, "pg"), filepath.Join(dir, "pg")); err != nil {
		t.Fatal(err)
	}
	s := start(t, dir)
	if got := query(t, s, "select 'alive'"); got != "alive" {
		t.Errorf("%q", got)
	}
	fi, err := os.Stat(s.socketDir)
	if err != nil || fi.Mode().Perm() != 0o700 || strings.HasPrefix(s.socketDir, dir) {
		t.Errorf("socket directory %s: %v %v", s.socketDir, fi, err)
	}
	s.Stop()
	if _, err := os.Stat(s.socketDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket directory after stop: %v", err)
	}
}

func TestOddPath(t *testing.T) {
	t.Parallel()
	parent := clusterDir(t)
	for _, name := range []string{`it's "odd" \ `, "a,b"} {
		dir := filepath.Join(parent, name)
		if err := makeDirs(dir); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(parent, "pg"), filepath.Join(dir, "pg")); err != nil {
			t.Fatal(err)
		}
		s := start(t, dir)
		if got := query(t, s, "select 'alive'"); got != "alive" {
			t.Errorf("%q: %q", name, got)
		}
		s.Stop()
		parent = dir
	}
}

func TestBadSettings(t *testing.T) {
	t.Parallel()
	dir := clusterDir(t)
	if _, err := Start(t.Context(), Options{Dir: dir, Settings: map[string]string{"Port": "1"}}); err == nil || !strings.Contains(err.Error(), "Port") {
		t.Errorf("reserved setting: %v", err)
	}
	_, err := Start(t.Context(), Options{Dir: dir, Settings: map[string]string{"no_such": "1"}})
	if err == nil || !strings.Contains(err.Error(), `unrecognized configuration parameter "no_such"`) {
		t.Errorf("unknown setting: %v", err)
	}
	start(t, dir) // neither kept the lock
}

func TestRootRelocates(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root has to give up its identity")
	}
	closed := emptyDir(t)
	base := emptyDir(t)
	was := rootBase
	rootBase = filepath.Join(base, "lib", "ferrymq")
	t.Cleanup(func() { rootBase = was })
	if err := os.Chmod(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	asked := filepath.Join(closed, "clone", "data")
	s := start(t, asked)
	if !s.Relocated || filepath.Dir(s.Dir) != rootBase {
		t.Errorf("dir %s, relocated %v", s.Dir, s.Relocated)
	}
	if _, err := os.Stat(filepath.Join(closed, "clone")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left a directory where nothing is: %v", err)
	}
	query(t, s, "create table kept as select 'here' as x")
	s.Stop()
	// The data is found again, even when the reason to move has gone.
	if err := os.Chmod(closed, 0o711); err != nil {
		t.Fatal(err)
	}
	again := start(t, asked)
	if again.Dir != s.Dir || !again.Relocated {
		t.Errorf("dir %s, relocated %v", again.Dir, again.Relocated)
	}
	if got := query(t, again, "select x from kept"); got != "here" {
		t.Errorf("after the move: %q", got)
	}
}

func TestRootDropsToClusterOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root has to give up its identity")
	}
	dir := clusterDir(t)
	fresh, err := defaultAccount()
	if err != nil {
		t.Fatal(err)
	}
	nobody, err := user.Lookup("nobody")
	if err != nil {
		t.Fatal(err)
	}
	uid, err := strconv.Atoi(nobody.Uid)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		owner account
		want  string
	}{
		{account{uid: uid, gid: uid}, "nobody"},
		{account{}, fresh.name}, // what root copied into place is given away
	} {
		if err := ownTree(filepath.Join(dir, "pg"), &c.owner); err != nil {
			t.Fatal(err)
		}
		s := start(t, dir)
		if s.User != c.want {
			t.Errorf("runs as %s, want %s", s.User, c.want)
		}
		if groups := groupsOf(t, s.PID()); groups != "" {
			t.Errorf("supplementary groups: %s", groups)
		}
		s.Stop()
	}
}

func groupsOf(t *testing.T, pid int) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(string(b), "\nGroups:")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(line)
}

func TestNoBinaries(t *testing.T) {
	empty := t.TempDir()
	t.Setenv("PGBIN", empty)
	if _, _, err := Installed(t.Context()); err == nil || !strings.Contains(err.Error(), empty) {
		t.Errorf("PGBIN without binaries: %v", err)
	}
	for _, want := range []string{"apt install", "dnf install", "brew install", "DATABASE_URL"} {
		if !strings.Contains(howToInstall, want) {
			t.Errorf("no hint about %s", want)
		}
	}
}

// A wrapper such as Debian's /usr/bin/pg_ctl does not make a server directory,
// and a link into one leads to it.
func TestPathLinks(t *testing.T) {
	real, _, err := Installed(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	links, lone := t.TempDir(), t.TempDir()
	if err := os.Symlink(filepath.Join(real, "postgres"), filepath.Join(links, "postgres")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(lone, "postgres"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PGBIN", "")
	t.Setenv("PATH", lone+":"+links)
	dirs, err := binDirs()
	if err != nil || len(dirs) == 0 || dirs[0] != real {
		t.Errorf("found %v (%v), want %s first", dirs, err, real)
	}
}

// fakeServer is an installation that only knows its version.
func fakeServer(t *testing.T, version string) string {
	t.Helper()
	dir := emptyDir(t)
	for _, name := range []string{"postgres", "initdb"} {
		script := "#!/bin/sh\necho 'postgres (PostgreSQL) " + version + "'\n"
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestOldServerOnly(t *testing.T) {
	t.Setenv("PGBIN", fakeServer(t, "13.4"))
	_, _, err := Installed(t.Context())
	if err == nil || !strings.Contains(err.Error(), "only PostgreSQL 13") || !strings.Contains(err.Error(), "PostgreSQL 15 or newer") {
		t.Errorf("old server: %v", err)
	}
}

func TestSeveralMajors(t *testing.T) {
	old, first, second := fakeServer(t, "14.1"), fakeServer(t, "98beta1"), fakeServer(t, "99.3 (Some 99.3-1)")
	acc, err := defaultAccount()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("PGBIN", "")
	t.Setenv("PATH", old+":"+first+":"+second+":"+os.Getenv("PATH"))
	for want, dir := range map[int]string{0: first, 98: first, 99: second} {
		b, err := findBinaries(t.Context(), acc.credential(), "/data/pg", want)
		if err != nil || b.dir != dir {
			t.Errorf("for %d: %+v (%v), want %s", want, b, err, dir)
		}
	}
	_, err = findBinaries(t.Context(), acc.credential(), "/data/pg", 97)
	for _, part := range []string{"/data/pg", "PostgreSQL 97", "98 (" + first, "99 (" + second} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%v does not say %q", err, part)
		}
	}
}

func TestTail(t *testing.T) {
	var l tail
	for i := range tailMax {
		l.add([]byte(fmt.Sprintln(i)))
	}
	if s := l.String(); len(s) > tailMax || !strings.HasSuffix(s, fmt.Sprint(tailMax-1)) {
		t.Errorf("%d bytes, ending in %q", len(s), s[len(s)-10:])
	}
}
