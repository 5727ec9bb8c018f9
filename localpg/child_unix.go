//go:build unix && !linux

package localpg

import "syscall"

// childAttr puts a child into its own process group, so that Ctrl-C in a
// terminal reaches only this program. There is no parent-death signal here: a
// postmaster that outlives a killed owner is stopped by the next Start.
func childAttr(cred *syscall.Credential) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Credential: cred, Setpgid: true}
}
