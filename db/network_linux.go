package db

import (
	"syscall"
	"time"
)

// limitUnacknowledged sets TCP_USER_TIMEOUT. It is a refinement: without it the watch notices.
func limitUnacknowledged(fd uintptr, d time.Duration) {
	const userTimeout = 18
	_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, userTimeout, int(d.Milliseconds()))
}
