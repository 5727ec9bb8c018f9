package localpg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// minMajor is the oldest PostgreSQL that Start accepts; howToInstall names it too.
const minMajor = 15

const howToInstall = `install PostgreSQL 15 or newer:
  Debian, Ubuntu:  sudo apt install postgresql
  Fedora:          sudo dnf install postgresql-server
  Homebrew:        brew install postgresql@18
or point PGBIN at a directory that has postgres and initdb, or set DATABASE_URL to use a server that already runs`

// binaries is one installation of the PostgreSQL server.
type binaries struct {
	dir     string
	version string // what postgres -V prints
	major   int
}

// Installed reports the server binaries that Start would choose for an empty
// directory: where they are and what "postgres -V" prints.
func Installed(ctx context.Context) (dir, version string, err error) {
	acc, err := defaultAccount()
	if err != nil {
		return "", "", err
	}
	b, err := findBinaries(ctx, acc.credential(), "", 0)
	return b.dir, b.version, err
}

// findBinaries picks the installation for the cluster in data, which was made
// by major version want; 0 means that there is no cluster yet.
func findBinaries(ctx context.Context, cred *syscall.Credential, data string, want int) (binaries, error) {
	if want != 0 && want < minMajor {
		return binaries{}, fmt.Errorf("data directory %s was made by PostgreSQL %d, but %d is the oldest that is supported: move the directory away to start empty, or convert it with pg_upgrade", data, want, minMajor)
	}
	dirs, err := binDirs()
	if err != nil {
		return binaries{}, err
	}
	var others []string
	var broken error
	for _, dir := range dirs {
		b, err := inspect(ctx, cred, dir)
		switch {
		case err != nil:
			broken = cmp.Or(broken, err)
		case want == b.major, want == 0 && b.major >= minMajor:
			return b, nil
		default:
			others = append(others, fmt.Sprintf("%d (%s)", b.major, dir))
		}
	}
	found := strings.Join(others, ", ")
	switch {
	case found == "" && broken != nil:
		return binaries{}, broken
	case found == "":
		return binaries{}, errors.New("no PostgreSQL server binaries found: " + howToInstall)
	case want == 0:
		return binaries{}, fmt.Errorf("only PostgreSQL %s found: %s", found, howToInstall)
	}
	return binaries{}, fmt.Errorf("data directory %s was made by PostgreSQL %d, but only PostgreSQL %s found: install PostgreSQL %[2]d, or move the directory away to start empty, or convert it with pg_upgrade", data, want, found)
}

// binDirs lists the directories that hold both postgres and initdb, in order
// of preference. If PGBIN is set, only that one counts.
func binDirs() ([]string, error) {
	if dir := os.Getenv("PGBIN"); dir != "" {
		abs, err := filepath.Abs(dir)
		if err != nil {
			return nil, err
		}
		if !hasServer(abs) {
			return nil, fmt.Errorf("PGBIN is %s, which does not have both postgres and initdb", dir)
		}
		return []string{abs}, nil
	}
	var dirs []string
	add := func(dir string) {
		if filepath.IsAbs(dir) && hasServer(dir) && !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		// A link in PATH leads to the real installation, which has its
		// libraries and share files beside it.
		if real, err := filepath.EvalSymlinks(filepath.Join(dir, "postgres")); err == nil {
			add(filepath.Dir(real))
		}
	}
	for _, pattern := range []string{
		"/usr/lib/postgresql/*/bin",
		"/opt/homebrew/opt/postgresql*/bin",
		"/usr/local/opt/postgresql*/bin",
		"/usr/pgsql-*/bin",
	} {
		found, _ := filepath.Glob(pattern)
		slices.SortFunc(found, func(a, b string) int { return cmp.Compare(majorIn(b), majorIn(a)) })
		for _, dir := range found {
			add(dir)
		}
	}
	return dirs, nil
}

func hasServer(dir string) bool {
	for _, name := range []string{"postgres", "initdb"} {
		fi, err := os.Stat(filepath.Join(dir, name))
		if err != nil || fi.IsDir() || fi.Mode()&0o111 == 0 {
			return false
		}
	}
	return true
}

// majorIn reads the version out of a path such as /usr/lib/postgresql/17/bin.
func majorIn(dir string) int {
	n, _ := strconv.Atoi(regexp.MustCompile(`\d+`).FindString(filepath.Base(filepath.Dir(dir))))
	return n
}

var versionPattern = regexp.MustCompile(`\(PostgreSQL\) (\d+)`)

// inspect runs postgres -V as the user that will run the server.
func inspect(ctx context.Context, cred *syscall.Credential, dir string) (binaries, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "-V")
	cmd.Dir, cmd.Env, cmd.SysProcAttr = "/", childEnv(), childAttr(cred)
	out, err := combinedOutput(cmd)
	if err != nil {
		if cred != nil && errors.Is(err, fs.ErrPermission) {
			return binaries{}, fmt.Errorf("uid %d, which has to run PostgreSQL because root may not, cannot execute %s: %w", cred.Uid, cmd.Path, err)
		}
		return binaries{}, fmt.Errorf("%s -V: %w %s", cmd.Path, err, out)
	}
	m := versionPattern.FindSubmatch(out)
	if m == nil {
		return binaries{}, fmt.Errorf("%s -V printed %q, which names no version", cmd.Path, out)
	}
	major, _ := strconv.Atoi(string(m[1]))
	return binaries{dir: dir, version: strings.TrimSpace(string(out)), major: major}, nil
}
