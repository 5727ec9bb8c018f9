package db

import (
	"context"
	"errors"
	"net"

	"github.com/jackc/pgx/v5/pgconn"
)

// Code is the SQLSTATE of an error PostgreSQL answered with, or "".
func Code(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// IsLockTimeout says that a statement gave up waiting for a row lock. Its transaction changed nothing.
func IsLockTimeout(err error) bool { return Code(err) == "55P03" }

// IsRetryable says that the transaction lost a deadlock or a serialization conflict: it changed nothing and may run again.
func IsRetryable(err error) bool {
	c := Code(err)
	return c == "40P01" || c == "40001"
}

// IsConnection says that there is no database to talk to, or that the connection broke: when the error comes
// from a commit, nobody knows whether it happened.
func IsConnection(err error) bool {
	if err == nil {
		return false
	}
	var connect *pgconn.ConnectError
	if errors.Is(err, ErrAcquire) || errors.Is(err, ErrPooler) || errors.As(err, &connect) { // whatever the server said to turn us away
		return true
	}
	switch c := Code(err); {
	case c == "":
		var network net.Error
		return errors.As(err, &network) || errors.Is(err, net.ErrClosed) ||
			errors.Is(err, context.DeadlineExceeded) || pgconn.SafeToRetry(err) || pgconn.Timeout(err) || unexpected(err)
	case c[:2] == "08", c == "57P01", c == "57P02", c == "57P03", c == "53300", c == readOnly:
		// connection exceptions, the server going down or starting, no slot left, a read-only standby
		return true
	}
	return false
}

// NotSent says that the connection was found dead before anything was sent on it: nothing happened.
func NotSent(err error) bool { return pgconn.SafeToRetry(err) }

// IsPoison says that an error may be the fault of one operation among many: data that does not fit, a broken rule, or an
// argument that cannot be sent. A full disk or a server out of memory is nobody's.
func IsPoison(err error) bool {
	c := Code(err)
	if c == "" {
		return true
	}
	switch c[:2] {
	case "21", "22", "23", "42", "54", "P0", "XX":
		return true
	}
	return false
}

// Reason is an error for the log: bounded, because encoding errors of pgx print whole arguments.
type Reason struct {
	text string
	Away bool // there was no connection to the database, or it broke
}

// Text is the reason of an error.
func Text(err error) Reason {
	s := err.Error()
	if len(s) > 500 {
		s = s[:500] + "…"
	}
	return Reason{text: s, Away: IsConnection(err)}
}

// String is what the error said.
func (r Reason) String() string { return r.text }

// MarshalText is String, for logs.
func (r Reason) MarshalText() ([]byte, error) { return []byte(r.text), nil }
