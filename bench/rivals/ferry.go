package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"sync"

	"ferrymq/localpg"
)

// settings are those of the broker's private PostgreSQL: every product on PostgreSQL gets them.
var settings = map[string]string{"max_connections": "100", "shared_buffers": "256MB", "max_wal_size": "4GB", "wal_buffers": "16MB"}

type ferry struct {
	pg    *localpg.Server
	p     *process
	addr  string
	queue int
	ids   bool
}

func freePort() string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	defer func() { _ = l.Close() }()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

func startFerry(ctx context.Context, c *config, dir string) (server, string, error) {
	if c.ferrymq == "" {
		return nil, "", fmt.Errorf("-ferrymq is missing")
	}
	binary, err := exec.LookPath(c.ferrymq)
	if err != nil {
		return nil, "", err
	}
	if binary, err = absolute(binary); err != nil {
		return nil, "", err
	}
	f := &ferry{ids: c.ids}
	if f.pg, err = localpg.Start(ctx, localpg.Options{Dir: dir, Settings: settings}); err != nil {
		return nil, "", err
	}
	port := freePort()
	f.addr = "127.0.0.1:" + port
	if f.p, err = start(dir, "ferrymq", []string{"PORT=" + port, "DATABASE_URL=" + f.pg.DSN}, binary); err != nil {
		f.pg.Stop()
		return nil, "", err
	}
	err = f.p.until(ctx, func() error {
		r, err := http.Get("http://" + f.addr + "/ready")
		if err != nil {
			return err
		}
		_ = r.Body.Close()
		if r.StatusCode != 200 {
			return fmt.Errorf("status %d", r.StatusCode)
		}
		return nil
	})
	if err != nil {
		f.stop()
		return nil, "", err
	}
	return f, fmt.Sprintf("on PostgreSQL %d, HTTP", f.pg.Version), nil
}

func (f *ferry) stop() {
	f.p.stop()
	f.pg.Stop()
}

func (f *ferry) order() order { return perStream }

func (f *ferry) fresh(context.Context) error {
	f.queue++
	return nil
}

func (f *ferry) name() string { return "rivals-" + strconv.Itoa(f.queue) }

// client is one connection with one request in flight, without what net/http's costs: the load runs on the same cores.
type client struct {
	nc       net.Conn
	r        *bufio.Reader
	out, in  []byte
	f        *ferry
	sequence int
}

func (f *ferry) dial() (*client, error) {
	nc, err := net.Dial("tcp", f.addr)
	if err != nil {
		return nil, err
	}
	return &client{nc: nc, r: bufio.NewReaderSize(nc, 64<<10), f: f}, nil
}

func (c *client) close() { _ = c.nc.Close() }

func (c *client) do(head string, body []byte) (status int, answer []byte, err error) {
	c.out = append(append(c.out[:0], head...), " HTTP/1.1\r\nHost: rivals\r\n"...)
	if body != nil {
		c.out = fmt.Appendf(c.out, "Content-Length: %d\r\n", len(body))
	}
	c.out = append(append(c.out, "\r\n"...), body...)
	if _, err := c.nc.Write(c.out); err != nil {
		return 0, nil, err
	}
	line, err := c.r.ReadSlice('\n')
	if err != nil {
		return 0, nil, err
	}
	if len(line) < 12 {
		return 0, nil, fmt.Errorf("bad status line %q", line)
	}
	if status, err = strconv.Atoi(string(line[9:12])); err != nil {
		return 0, nil, err
	}
	length := 0
	for {
		if line, err = c.r.ReadSlice('\n'); err != nil {
			return 0, nil, err
		}
		if line = bytes.TrimRight(line, "\r\n"); len(line) == 0 {
			break
		}
		name, value, _ := bytes.Cut(line, []byte(": "))
		switch {
		case bytes.EqualFold(name, []byte("Content-Length")):
			if length, err = strconv.Atoi(string(value)); err != nil {
				return 0, nil, err
			}
		case bytes.EqualFold(name, []byte("Transfer-Encoding")):
			return 0, nil, fmt.Errorf("answer in chunks")
		}
	}
	if cap(c.in) < length {
		c.in = make([]byte, length*3/2)
	}
	c.in = c.in[:length]
	_, err = io.ReadFull(c.r, c.in)
	return status, c.in, err
}

type ferryProducer struct {
	*client
	body []byte
}

func (f *ferry) producer(context.Context) (producer, error) {
	c, err := f.dial()
	return &ferryProducer{client: c}, err
}

func (p *ferryProducer) push(_ context.Context, part int, payloads [][]byte) error {
	p.body = append(p.body[:0], `{"items":[`...)
	for i, payload := range payloads {
		if i > 0 {
			p.body = append(p.body, ',')
		}
		p.body = fmt.Appendf(p.body, `{"queue":"%s","partition":"p%d","payload":`, p.f.name(), part)
		p.body = append(p.body, payload...)
		if p.f.ids {
			p.sequence++
			p.body = fmt.Appendf(p.body, `,"transactionId":"%p-%d"`, p, p.sequence)
		}
		p.body = append(p.body, '}')
	}
	p.body = append(p.body, "]}"...)
	status, answer, err := p.do("POST /api/v1/push", p.body)
	if err == nil && (status != 201 || bytes.Count(answer, []byte(`"status":"queued"`)) != len(payloads)) {
		err = fmt.Errorf("push: %d %.200s", status, answer)
	}
	return err
}

func (f *ferry) consume(ctx context.Context, consumers, batch int, k *checker) error {
	var wg sync.WaitGroup
	errs := make(chan error, consumers)
	path := fmt.Sprintf("GET /api/v1/pop/queue/%s?batch=%d&partitions=1&wait=true&timeout=5000", f.name(), batch)
	for n := range consumers {
		c, err := f.dial()
		if err != nil {
			return err
		}
		defer context.AfterFunc(ctx, c.close)()
		wg.Go(func() {
			if err := c.consume(ctx, path, n, k); err != nil && ctx.Err() == nil {
				errs <- err
			}
		})
	}
	wg.Wait()
	select {
	case err := <-errs:
		return err
	default:
		return nil
	}
}

func (c *client) consume(ctx context.Context, path string, n int, k *checker) error {
	var payloads [][]byte
	var body []byte
	for ctx.Err() == nil {
		status, answer, err := c.do(path, nil)
		if err != nil {
			return err
		}
		if status == 204 {
			continue
		}
		if status != 200 {
			return fmt.Errorf("pop: %d %.200s", status, answer)
		}
		payloads = payloads[:0]
		body = append(body[:0], `{"acknowledgments":[`...)
		// The messages are found by their known keys; the check of each payload shows that they were found.
		for rest := answer; ; {
			i := bytes.Index(rest, []byte(`"transactionId":`))
			if i < 0 {
				break
			}
			if len(payloads) > 0 {
				body = append(body, ',')
			}
			rest = rest[i:]
			id, after := field(rest, `"transactionId":`)
			data, after := field(after, `"data":`)
			partition, after := field(after, `"partitionId":`)
			lease, after := field(after, `"leaseId":`)
			payloads = append(payloads, data)
			body = fmt.Appendf(body, `{"transactionId":%s,"partitionId":%s,"leaseId":%s,"status":"completed"}`, id, partition, lease)
			rest = after
		}
		body = append(body, "]}"...)
		ms := k.delivered(n, payloads...)
		status, answer, err = c.do("POST /api/v1/ack/batch", body)
		if err == nil && (status != 200 || bytes.Count(answer, []byte(`"success":true`)) != len(payloads)) {
			err = fmt.Errorf("ack: %d %.200s", status, answer)
		}
		if err != nil {
			return err
		}
		k.acked(ms)
	}
	return nil
}

// field is the string after a key, quotes included: none of those here has a quote inside.
func field(b []byte, key string) (value, rest []byte) {
	i := bytes.Index(b, []byte(key))
	if i < 0 {
		return nil, nil
	}
	b = b[i+len(key):]
	if len(b) == 0 || b[0] != '"' {
		return nil, b
	}
	end := 2 + bytes.IndexByte(b[1:], '"')
	return b[:end], b[end:]
}

// compact is a JSON payload as it was sent; databases put blanks into what they store as JSON.
func compact(b []byte) []byte {
	var out bytes.Buffer
	if json.Compact(&out, b) != nil {
		return b
	}
	return out.Bytes()
}

func absolute(name string) (string, error) {
	if strings.HasPrefix(name, "/") {
		return name, nil
	}
	out, err := exec.Command("readlink", "-f", name).Output()
	return strings.TrimSpace(string(out)), err
}
