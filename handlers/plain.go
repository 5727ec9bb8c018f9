package handlers

import (
	"bytes"
	"net"
)

// Plain listens for connections on which what is not even a request is answered in JSON as well.
type Plain struct{ net.Listener }

// Accept is net.Listener's.
func (l Plain) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return plainConn{c}, nil
}

type plainConn struct{ net.Conn }

// plainHeader is in the answers that net/http writes without asking a handler, and in no other: in one piece, the body last.
var plainHeader = []byte("\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n")

// Write is net.Conn's.
func (c plainConn) Write(b []byte) (int, error) {
	at := bytes.Index(b[:min(len(b), 200)], plainHeader)
	if at < 0 {
		return c.Conn.Write(b)
	}
	text := bytes.TrimLeft(b[at+len(plainHeader):], "0123456789 ")
	out := append(bytes.Clone(b[:at]), "\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"...)
	if _, err := c.Conn.Write(append(quote(append(out, `{"error":`...), string(text)), '}')); err != nil {
		return 0, err
	}
	return len(b), nil
}

// CloseWrite is net.TCPConn's: net/http closes a connection in two steps, so that the client can read the answer.
func (c plainConn) CloseWrite() error {
	if x, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return x.CloseWrite()
	}
	return nil
}
