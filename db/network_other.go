//go:build !linux

package db

import "time"

func limitUnacknowledged(uintptr, time.Duration) {}
