package dbtest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"ferrymq/localpg"
)

// home holds the clusters of this process: <base>/ferrymq-test-<uid>-<random>.
// The file owner in it is locked as long as the process lives, so that the next
// one can tell what a dead one has left.
//
// Beside it, ferrymq-test-<uid> belongs to all processes of a user, and nobody
// else can enter it. It keeps a cluster fresh from initdb for each PostgreSQL
// version, since copying one is far quicker than making one, and the lock under
// which homes are made and swept.
type home struct {
	dir      string
	owner    *os.File
	pristine string // the cluster to copy
}

var (
	homeUsed    atomic.Bool
	processHome = sync.OnceValues(newHome)
)

func newHome() (_ *home, err error) {
	homeUsed.Store(true)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	base, cache := places(os.Geteuid())
	if err := ownDir(cache); err != nil {
		return nil, err
	}
	guard, err := lockFile(filepath.Join(cache, "lock"), syscall.LOCK_EX)
	if err != nil {
		return nil, err
	}
	defer func() { _ = guard.Close() }()

	prefix := filepath.Join(base, fmt.Sprintf("ferrymq-test-%d-", os.Geteuid()))
	if err := sweep(prefix); err != nil {
		return nil, err
	}
	h := &home{}
	if h.dir, err = os.MkdirTemp(base, filepath.Base(prefix)); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, h.remove())
		}
	}()
	if os.Geteuid() == 0 { // PostgreSQL will run as somebody else
		if err := os.Chmod(h.dir, 0o711); err != nil {
			return nil, err
		}
	}
	if h.owner, err = lockFile(filepath.Join(h.dir, "owner"), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, err
	}
	bin, version, err := localpg.Installed(ctx)
	if err != nil {
		return nil, err
	}
	key := sha256.Sum256([]byte(bin + "\n" + version))
	h.pristine = filepath.Join(cache, fmt.Sprintf("pg-%x", key[:6]))
	if _, err := os.Stat(h.pristine); errors.Is(err, fs.ErrNotExist) {
		return h, h.makePristine(ctx)
	}
	return h, nil
}

// places chooses where clusters go and where the cache is: memory if there is
// enough of it, since creating the thousand files of a cluster on disk may take
// a second.
func places(uid int) (base, cache string) {
	name := fmt.Sprintf("ferrymq-test-%d", uid)
	const memory, enough = "/dev/shm", 1 << 30
	var st syscall.Statfs_t
	if err := syscall.Statfs(memory, &st); err == nil && uint64(st.Bavail)*uint64(st.Bsize) >= enough {
		if f, err := os.CreateTemp(memory, name+"."); err == nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
			return memory, filepath.Join(memory, name)
		}
	}
	base = os.TempDir()
	if uid == 0 && !searchable(base) {
		base = "/tmp"
	}
	// Temporary directories may be cleaned file by file: no place for a cache.
	if dir, err := os.UserCacheDir(); err == nil && os.MkdirAll(dir, 0o700) == nil {
		return base, filepath.Join(dir, name)
	}
	return base, filepath.Join(base, name)
}

// searchable says whether every user can reach dir.
func searchable(dir string) bool {
	for {
		if fi, err := os.Stat(dir); err != nil || fi.Mode()&0o001 == 0 {
			return false
		}
		if dir == filepath.Dir(dir) {
			return true
		}
		dir = filepath.Dir(dir)
	}
}

// ownDir makes a directory of our own, and does not accept one that somebody
// else has put there.
func ownDir(dir string) error {
	if err := os.Mkdir(dir, 0o700); err == nil || !errors.Is(err, fs.ErrExist) {
		return err
	}
	fi, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if !fi.IsDir() || uidOf(fi) != os.Geteuid() || fi.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("%s exists, but is not a directory that only this user can enter", dir)
	}
	return nil
}

func uidOf(fi fs.FileInfo) int { return int(fi.Sys().(*syscall.Stat_t).Uid) }

func lockFile(path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err = syscall.Flock(int(f.Fd()), how)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// sweep removes the homes of processes that died before they could. The caller
// holds the lock, so that none of them is just being made.
func sweep(prefix string) error {
	dirs, err := filepath.Glob(prefix + "*")
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		fi, err := os.Lstat(dir)
		if err != nil || !fi.IsDir() || uidOf(fi) != os.Geteuid() {
			continue
		}
		if _, err := os.Lstat(filepath.Join(dir, "keep")); err == nil {
			continue
		}
		owner, err := lockFile(filepath.Join(dir, "owner"), syscall.LOCK_EX|syscall.LOCK_NB)
		if err != nil {
			continue
		}
		// Its server may just be writing its last words: what cannot be removed
		// waits for the next sweep.
		_ = os.RemoveAll(dir)
		_ = owner.Close()
	}
	return nil
}

// makePristine fills the cache. The cluster is made in our home, because as
// root the user of the server could not enter the cache.
func (h *home) makePristine(ctx context.Context) error {
	dir := filepath.Join(h.dir, "init")
	s, err := localpg.Start(ctx, localpg.Options{Dir: dir, Settings: settings})
	if err != nil {
		return err
	}
	s.Stop()
	if err := s.Err(); err != nil {
		return err
	}
	tmp := h.pristine + ".tmp"
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	if err := copyTree(filepath.Join(dir, "pg"), tmp); err != nil {
		return err
	}
	if err := os.Rename(tmp, h.pristine); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// cluster makes a directory for localpg.Start with a fresh cluster in it.
func (h *home) cluster(pattern string) (string, error) {
	dir, err := os.MkdirTemp(h.dir, pattern)
	if err != nil {
		return "", err
	}
	if os.Geteuid() == 0 {
		if err := os.Chmod(dir, 0o711); err != nil {
			return "", err
		}
	}
	return dir, copyTree(h.pristine, filepath.Join(dir, "pg"))
}

func (h *home) remove() error {
	err := os.RemoveAll(h.dir)
	if h.owner != nil {
		_ = h.owner.Close()
	}
	return err
}

// keep saves the home from being swept.
func (h *home) keep() error {
	return os.WriteFile(filepath.Join(h.dir, "keep"), nil, 0o600)
}

// copyTree copies directories and files with their modes and, for root, their
// owners.
func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		dest := to + path[len(from):]
		var made fs.FileMode
		switch {
		case d.IsDir():
			made = 0o700
			err = os.Mkdir(dest, made)
		case fi.Mode().IsRegular():
			made = 0o600
			err = copyFile(path, dest, made)
		default:
			err = fmt.Errorf("%s: cannot copy a %s", path, fi.Mode().Type())
		}
		if err == nil && os.Geteuid() == 0 {
			st := fi.Sys().(*syscall.Stat_t)
			err = os.Lchown(dest, int(st.Uid), int(st.Gid))
		}
		if err == nil && fi.Mode().Perm() != made {
			err = os.Chmod(dest, fi.Mode().Perm())
		}
		return err
	})
}

func copyFile(from, to string, perm fs.FileMode) error {
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	w, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return errors.Join(err, w.Close())
}
