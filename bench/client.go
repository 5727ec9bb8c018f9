package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"
)

// conn is one persistent HTTP/1.1 connection with one request in flight. It exists because
// net/http's client costs several times more CPU per request, and the generator shares its
// cores with what it measures. Not safe for concurrent use.
type conn struct {
	ctx     context.Context // its end aborts the request in flight
	addr    string
	timeout time.Duration // for one whole request
	bufSize int

	nc      net.Conn
	br      *bufio.Reader
	unhook  func() bool
	out, in []byte
	// framed204 says that the last 204 carried Content-Length or Content-Type, which the contract forbids.
	framed204 bool
}

var errAborted = errors.New("aborted")

func (c *conn) dial() error {
	d := net.Dialer{Timeout: 10 * time.Second}
	nc, err := d.DialContext(c.ctx, "tcp", c.addr)
	if err != nil {
		return err
	}
	c.nc = nc
	if c.br == nil {
		c.br = bufio.NewReaderSize(nc, c.bufSize)
	} else {
		c.br.Reset(nc)
	}
	c.unhook = context.AfterFunc(c.ctx, func() { _ = nc.SetDeadline(time.Unix(1, 0)) })
	return nil
}

func (c *conn) close() {
	if c.nc != nil {
		c.unhook()
		_ = c.nc.Close()
		c.nc = nil
	}
}

// do sends head (request line and headers, each line ended, without the blank line) and body
// (nil: none), and answers status and body. The body is valid until the next call. After an
// error the connection is closed; the next call dials again.
func (c *conn) do(head, body []byte) (status int, answer []byte, err error) {
	if c.nc == nil {
		if err := c.dial(); err != nil {
			return 0, nil, err
		}
	}
	_ = c.nc.SetDeadline(time.Now().Add(c.timeout))
	// After the deadline: the hook of dial may have run just before and been overwritten.
	if c.ctx.Err() != nil {
		c.close()
		return 0, nil, errAborted
	}
	c.out = append(c.out[:0], head...)
	if body != nil {
		c.out = append(c.out, "Content-Length: "...)
		c.out = strconv.AppendInt(c.out, int64(len(body)), 10)
		c.out = append(c.out, "\r\n"...)
	}
	c.out = append(c.out, "\r\n"...)
	c.out = append(c.out, body...)
	_, err = c.nc.Write(c.out)
	keep := false
	if err == nil {
		status, keep, err = c.read()
	}
	if err != nil || !keep {
		c.close()
	}
	if err != nil && c.ctx.Err() != nil {
		err = errAborted
	}
	return status, c.in, err
}

// read reads one response into c.in.
func (c *conn) read() (status int, keep bool, err error) {
	c.in = c.in[:0]
	line, err := c.br.ReadSlice('\n')
	if err != nil {
		return 0, false, err
	}
	if len(line) < 12 || !bytes.HasPrefix(line, []byte("HTTP/1.")) {
		return 0, false, fmt.Errorf("bad status line %q", line)
	}
	if status, err = strconv.Atoi(string(line[9:12])); err != nil {
		return 0, false, fmt.Errorf("bad status line %q", line)
	}
	keep = line[7] == '1'
	length, chunked, typed := -1, false, false
	for {
		if line, err = c.br.ReadSlice('\n'); err != nil {
			return 0, false, err
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			break
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimSpace(value)
		switch {
		case len(name) == 14 && bytes.EqualFold(name, []byte("Content-Length")):
			if length, err = strconv.Atoi(string(value)); err != nil {
				return 0, false, fmt.Errorf("bad Content-Length %q", value)
			}
		case len(name) == 17 && bytes.EqualFold(name, []byte("Transfer-Encoding")):
			chunked = bytes.EqualFold(value, []byte("chunked"))
		case len(name) == 12 && bytes.EqualFold(name, []byte("Content-Type")):
			typed = true
		case len(name) == 10 && bytes.EqualFold(name, []byte("Connection")):
			keep = keep && !bytes.EqualFold(value, []byte("close"))
		}
	}
	switch {
	case status == 204:
		c.framed204 = length >= 0 || chunked || typed
		return status, keep, nil
	case chunked:
		for {
			if line, err = c.br.ReadSlice('\n'); err != nil {
				return 0, false, err
			}
			size, err := strconv.ParseInt(string(bytes.TrimRight(line, "\r\n")), 16, 32)
			if err != nil {
				return 0, false, fmt.Errorf("bad chunk %q", line)
			}
			if err := c.fill(int(size) + 2); err != nil {
				return 0, false, err
			}
			c.in = c.in[:len(c.in)-2]
			if size == 0 {
				return status, keep, nil
			}
		}
	case length >= 0:
		return status, keep, c.fill(length)
	default:
		return 0, false, errors.New("answer without a length")
	}
}

// fill appends n bytes of the stream to c.in.
func (c *conn) fill(n int) error {
	at := len(c.in)
	if cap(c.in) < at+n {
		c.in = append(make([]byte, 0, (at+n)*3/2), c.in...)
	}
	c.in = c.in[:at+n]
	_, err := io.ReadFull(c.br, c.in[at:])
	return err
}
