package localpg

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// PostgreSQL refuses to run as root. Root therefore runs it as the first of
// these that exists, and keeps the data below rootBase when that user cannot
// enter the directory that was asked for.
var (
	unprivileged = []string{"postgres", "nobody"}
	rootBase     = "/var/lib/ferrymq"
)

// account is the user that runs PostgreSQL; nil means the present one.
type account struct {
	name     string
	uid, gid int
}

// defaultAccount picks the user for a new cluster.
func defaultAccount() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range unprivileged {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.Atoi(u.Uid)
		gid, err2 := strconv.Atoi(u.Gid)
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		return &account{name, uid, gid}, nil
	}
	return nil, fmt.Errorf("PostgreSQL does not run as root, and none of the users %s exists to run it: create one, or run this program as a normal user", strings.Join(unprivileged, ", "))
}

// owner is the user a cluster belongs to, or nil if there is no such file.
func owner(path string) *account {
	fi, err := os.Lstat(path)
	if err != nil {
		return nil
	}
	st := fi.Sys().(*syscall.Stat_t)
	acc := &account{name: strconv.Itoa(int(st.Uid)), uid: int(st.Uid), gid: int(st.Gid)}
	if u, err := user.LookupId(acc.name); err == nil {
		acc.name = u.Username
	}
	return acc
}

// credential drops to the account, without any supplementary group.
func (a *account) credential() *syscall.Credential {
	if a == nil {
		return nil
	}
	return &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid)}
}

// own gives one file to the account.
func (a *account) own(path string) error {
	if a == nil {
		return nil
	}
	return os.Lchown(path, a.uid, a.gid)
}

// canEnter tries it as the account, since permission bits are not the whole
// truth (access lists, mount options).
func (a *account) canEnter(ctx context.Context, dir string) (bool, error) {
	if a == nil {
		return true, nil
	}
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", ":")
	cmd.Dir, cmd.Env, cmd.SysProcAttr = dir, childEnv(), childAttr(a.credential())
	_, err := combinedOutput(cmd)
	if errors.Is(err, fs.ErrPermission) {
		return false, nil
	}
	return err == nil, err
}

// place says where the data of the directory that was asked for really goes,
// and which account runs it. A cluster that exists already is always found
// again, whatever has happened to permissions since.
func place(ctx context.Context, asked string) (dir string, acc *account, err error) {
	acc, err = defaultAccount()
	if err != nil || acc == nil {
		return asked, nil, err
	}
	sum := sha256.Sum256([]byte(asked))
	there := filepath.Join(rootBase, hex.EncodeToString(sum[:6]))
	for _, dir := range []string{asked, there} {
		by := owner(filepath.Join(dir, "pg", "PG_VERSION"))
		if by == nil {
			continue
		}
		if by.uid != 0 {
			acc = by
		}
		switch ok, err := acc.canEnter(ctx, dir); {
		case err != nil:
			return "", nil, err
		case !ok:
			return "", nil, fmt.Errorf("user %s, which has to run the PostgreSQL in %s, cannot enter that directory: every directory above it needs permission to search (chmod o+x)", acc.name, dir)
		}
		return dir, acc, nil
	}
	existing := asked
	for {
		if _, err := os.Stat(existing); err == nil {
			break
		} else if !errors.Is(err, fs.ErrNotExist) {
			return "", nil, err
		}
		existing = filepath.Dir(existing)
	}
	ok, err := acc.canEnter(ctx, existing)
	if err != nil {
		return "", nil, err
	}
	if ok {
		return asked, acc, nil
	}
	return there, acc, nil
}

// makeDirs is os.MkdirAll whose new directories can be searched by everyone
// whatever the umask: what must stay private inside has its own mode.
func makeDirs(dir string) error {
	if fi, err := os.Stat(dir); err == nil {
		if !fi.IsDir() {
			return &fs.PathError{Op: "mkdir", Path: dir, Err: syscall.ENOTDIR}
		}
		return nil
	}
	if err := makeDirs(filepath.Dir(dir)); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return nil
		}
		return err
	}
	return os.Chmod(dir, 0o755)
}

// privateDir makes sure that dir exists, belongs to the account, and lets
// nobody else in.
func privateDir(dir string, acc *account) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := acc.own(dir); err != nil {
		return err
	}
	return os.Chmod(dir, 0o700)
}

// ownTree gives a cluster that root copied into place to the account.
func ownTree(root string, acc *account) error {
	return filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return acc.own(path)
	})
}
