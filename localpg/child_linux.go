package localpg

import "syscall"

// childAttr puts a child into its own process group, so that Ctrl-C in a
// terminal reaches only this program, and has the kernel interrupt the child
// (for PostgreSQL: a fast shutdown) when the thread that forked it dies.
func childAttr(cred *syscall.Credential) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Credential: cred, Setpgid: true, Pdeathsig: syscall.SIGINT}
}
