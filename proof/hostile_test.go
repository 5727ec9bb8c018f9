package proof

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-json-experiment/json/jsontext"
)

// connections is how many files and sockets the broker has open.
func (b *broker) connections() int {
	all, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.cmd.Process.Pid))
	return len(all)
}

// resident is the memory of the broker.
func (b *broker) resident() int64 {
	b.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", b.cmd.Process.Pid))
	if err != nil {
		b.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	kb, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
	if err != nil {
		b.t.Fatal(err)
	}
	return kb << 10
}

// goroutines is how many the broker says it has.
func (b *broker) goroutines() int {
	b.t.Helper()
	_, rest, _ := strings.Cut(must(b.t, 200, "GET", b.url()+"/metrics", ""), "\nferrymq_goroutines ")
	n, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

// address is host and port of the broker.
func (b *broker) address() string { return strings.TrimPrefix(b.url(), "http://") }

// dial opens a connection of a client that speaks for itself. It is closed with the test.
func (b *broker) dial(t testing.TB) *net.TCPConn {
	t.Helper()
	c, err := net.DialTimeout("tcp", b.address(), patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c.(*net.TCPConn)
}

// TestSlowSenders: thousands of clients that never finish their headers or bodies keep nobody else from anything; those with headers
// are closed soon, and a long poll is not taken for one of them.
func TestSlowSenders(t *testing.T) {
	t.Parallel()
	c, _ := newShared(t, 1)
	b, url := c.brokers[0], c.urls()[0]
	must(t, 201, "POST", url+"/api/v1/push", `{"items":[{"queue":"q","payload":0}]}`)
	http.DefaultClient.CloseIdleConnections()
	goroutines := b.goroutines()
	http.DefaultClient.CloseIdleConnections()
	before, memory := b.connections(), b.resident()
	poll := make(chan answer, 1)
	go func() { poll <- call(newClient(t), "GET", url+"/api/v1/pop/queue/none?wait=true&timeout=14000", "") }()
	heads, bodies := 400, 100
	if *long {
		heads, bodies = 2000, 500
	}
	var slow []net.Conn
	for i := range heads + bodies {
		x := b.dial(t)
		text := "GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "
		if i >= heads {
			text = "POST /api/v1/push HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{\"items\":["
		}
		if _, err := io.WriteString(x, text); err != nil {
			t.Fatal(err)
		}
		slow = append(slow, x)
	}
	for i := range 50 {
		a := call(http.DefaultClient, "POST", url+"/api/v1/push", fmt.Sprintf(`{"items":[{"queue":"q","payload":%d}]}`, i))
		if a.status != 201 || a.took > recovery {
			t.Errorf("a push beside them: %v", a)
		}
	}
	for i, x := range slow[:heads] {
		_ = x.SetReadDeadline(time.Now().Add(patience))
		if _, err := io.Copy(io.Discard, x); err != nil && errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("slow headers %d are not closed: %v", i, err)
		}
	}
	select {
	case a := <-poll:
		t.Errorf("the long poll was cut: %v", a)
	default:
	}
	if a := <-poll; a.status != 204 {
		t.Errorf("the long poll: %v", a)
	}
	for _, x := range slow {
		_ = x.Close()
	}
	http.DefaultClient.CloseIdleConnections()
	eventually(t, patience, "all connections are gone", func() bool { return b.connections() <= before+2 })
	eventually(t, patience, "their goroutines are gone", func() bool { return b.goroutines() <= goroutines+5 })
	if now := b.resident(); now > memory+int64(heads+bodies)*100<<10 {
		t.Errorf("%d bytes, %d before", now, memory)
	}
}

// TestCutEverywhere: requests end after each of their bytes, and answers are left unread at each of theirs. A push that was not
// received whole stored nothing, nothing that was stored is lost, and no connection stays.
func TestCutEverywhere(t *testing.T) {
	t.Parallel()
	c, _ := newShared(t, 1)
	b, url := c.brokers[0], c.urls()[0]
	must(t, 200, "POST", url+"/api/v1/configure", `{"queue":"cut","options":{"leaseTime":1,"dedupWindowSeconds":3600}}`)
	first := must(t, 201, "POST", url+"/api/v1/push", `{"items":[{"queue":"cut","transactionId":"whole","payload":1}]}`)
	_, partition, _ := strings.Cut(first, `"partitionId":"`)
	partition = partition[:36]
	http.DefaultClient.CloseIdleConnections()
	before := b.connections()
	post := func(path, body string) string {
		return fmt.Sprintf("POST /api/v1%s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
	}
	step := 7
	if *long {
		step = 1
	}
	whole := 1
	for _, request := range []func(n int) string{
		func(n int) string {
			return post("/push", fmt.Sprintf(`{"items":[{"queue":"cut","transactionId":"id%04d","payload":%d}]}`, n, n))
		},
		func(int) string {
			return "GET /api/v1/pop/queue/cut?batch=1&wait=true&timeout=100 HTTP/1.1\r\nHost: x\r\n\r\n"
		},
		func(int) string {
			return post("/ack", `{"transactionId":"none","partitionId":"`+partition+`","status":"failed"}`)
		},
	} {
		for n := 0; n <= len(request(0)); n += step {
			x := b.dial(t)
			_, _ = io.WriteString(x, request(n)[:n])
			_ = x.SetLinger(n % 2) // every other is reset
			_ = x.Close()
		}
		for n := range 20 { // whole requests, whose answers are not read to the end
			x := b.dial(t)
			_, _ = io.WriteString(x, request(5000+n))
			_, _ = x.Read(make([]byte, 1+n*7))
			_ = x.SetLinger(0)
			_ = x.Close()
		}
	}
	whole += 20
	http.DefaultClient.CloseIdleConnections()
	eventually(t, patience, "all connections are gone", func() bool { return b.connections() <= before+2 })
	got := map[string]bool{}
	eventually(t, patience, "everything stored comes", func() bool {
		a := call(http.DefaultClient, "GET", url+"/api/v1/pop/queue/cut?consumerGroup=later&autoAck=true&batch=1000", "")
		for _, part := range strings.Split(a.body, `"transactionId":"`)[1:] {
			id, _, _ := strings.Cut(part, `"`)
			if got[id] {
				t.Errorf("%s twice", id)
			}
			got[id] = true
		}
		return len(got) >= whole
	})
	for id := range got {
		n, err := strconv.Atoi(strings.TrimPrefix(id, "id"))
		if id != "whole" && (err != nil || n < 5000 || n >= 5020) && n != len(post("/push", `{"items":[{"queue":"cut","transactionId":"id0000","payload":100}]}`)) {
			t.Errorf("%q was stored, and was not received whole", id)
		}
	}
	// What pops took whose clients were gone comes back to their group when its lease ends, if not at once.
	eventually(t, patience, "it is not kept from its group", func() bool {
		return call(http.DefaultClient, "GET", url+"/api/v1/pop/queue/cut?batch=1000", "").status == 200
	})
}

// TestProtocol: what clients may do with HTTP, and what they may not.
func TestProtocol(t *testing.T) {
	t.Parallel()
	c, _ := newShared(t, 1, "MAX_BODY_BYTES=1048576")
	b := c.brokers[0]
	push := `{"items":[{"queue":"p","payload":1}]}`
	length := fmt.Sprintf("Content-Length: %d\r\n", len(push))
	for name, x := range map[string]struct {
		send string
		want []int // the answers, in order; then the connection ends, if closes
		ends bool
	}{
		"1.0":             {"POST /api/v1/push HTTP/1.0\r\n" + length + "\r\n" + push, []int{201}, true},
		"close":           {"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + length + "\r\n" + push, []int{201}, true},
		"pipelined":       {strings.Repeat("POST /api/v1/push HTTP/1.1\r\nHost: x\r\n"+length+"\r\n"+push, 5) + "GET /api/v1/pop/queue/nothing HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n", []int{201, 201, 201, 201, 201, 204, 200}, false},
		"expect":          {"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n" + length + "\r\n" + push, []int{100, 201}, false},
		"absolute":        {"GET http://x/api/v1/pop/queue/nothing HTTP/1.1\r\nHost: x\r\n\r\n", []int{204}, false},
		"no length":       {"POST /api/v1/push HTTP/1.1\r\nHost: x\r\n\r\n", []int{400}, false},
		"two lengths":     {"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n" + length + "\r\n" + push, []int{400}, true},
		"negative length": {"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", []int{400}, true},
		// Chunks win over a length, here as for everybody who obeys RFC 9112: nobody is told two things.
		"length and chunks":      {"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n", []int{400, 200}, false},
		"chunks twice":           {"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", []int{501}, true},
		"space before the colon": {"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nContent-Length : 4\r\n\r\nabcd", []int{400}, true},
		"two hosts":              {"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", []int{400}, true},
		"TRACE":                  {"TRACE /api/v1/push HTTP/1.1\r\nHost: x\r\n\r\n", []int{405}, false},
		"OPTIONS":                {"OPTIONS /api/v1/push HTTP/1.1\r\nHost: x\r\n\r\n", []int{405}, false},
		"CONNECT":                {"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", []int{404}, false},
		"no method":              {"FLY /api/v1/push HTTP/1.1\r\nHost: x\r\n\r\n", []int{405}, false},
		"HTTP/2":                 {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", []int{404}, true},
		"TLS":                    {"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", []int{400}, true},
		"many headers":           {"GET /health HTTP/1.1\r\nHost: x\r\n" + strings.Repeat("X: y\r\n", 50_000) + "\r\n", []int{431}, true},
		"a long query":           {"GET /api/v1/pop/queue/q?consumerGroup=" + strings.Repeat("x", 200_000) + " HTTP/1.1\r\nHost: x\r\n\r\n", []int{431}, true},
		"a query":                {"GET /api/v1/pop/queue/q?x=" + strings.Repeat("&", 60_000) + " HTTP/1.1\r\nHost: x\r\n\r\n", []int{204}, false},
		"announced":              {"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n", []int{413}, true},
		"endless":                {"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + strings.Repeat("10000\r\n"+strings.Repeat(" ", 65536)+"\r\n", 24), []int{413}, true},
		"packed":                 {"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00", []int{400}, false},
	} {
		t.Run(name, func(t *testing.T) {
			conn := b.dial(t)
			go io.WriteString(conn, x.send) // it may not be read to its end
			r := bufio.NewReader(conn)
			for i, want := range x.want {
				resp, err := http.ReadResponse(r, nil)
				if err != nil {
					t.Fatalf("answer %d: %v", i, err)
				}
				body, err := io.ReadAll(resp.Body)
				if err != nil || resp.StatusCode != want {
					t.Fatalf("answer %d: %d %s, %v, want %d", i, resp.StatusCode, body, err, want)
				}
				switch {
				case want == 100 || want == 204:
					if len(body) > 0 {
						t.Errorf("answer %d: %d with %q", i, want, body)
					}
				case !jsontext.Value(body).IsValid() || resp.Header.Get("Content-Type") != "application/json":
					t.Errorf("answer %d: no JSON: %s %q", i, resp.Header, body)
				}
			}
			if !x.ends {
				return
			}
			if rest, err := io.ReadAll(r); len(rest) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the connection goes on: %q %v", rest, err)
			}
		})
	}
	if memory := b.resident(); memory > 300<<20 {
		t.Errorf("%d bytes", memory)
	}
	must(t, 200, "GET", b.url()+"/health", "")
}

// TestIdlePolls: thousands of polls on as many queues need no connection to the database, however few there are. What is too many is
// told to come back. When they go nothing of them stays.
func TestIdlePolls(t *testing.T) {
	t.Parallel()
	polls := 1500
	if *long {
		var files syscall.Rlimit
		if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
			t.Fatal(err)
		}
		polls = int(min(20000, files.Cur-2000)) // the broker may open as many files as this process
	}
	c, _ := newShared(t, 1, "DB_POOL_SIZE=10", "MAX_PARKED="+strconv.Itoa(polls))
	b, url := c.brokers[0], c.urls()[0]
	before, goroutines := b.connections(), b.goroutines()
	parked := func() int {
		n := 0
		for line := range strings.SplitSeq(must(t, 200, "GET", url+"/metrics", ""), "\n") {
			if rest, ok := strings.CutPrefix(line, "ferrymq_parked_polls{"); ok {
				k, _ := strconv.Atoi(rest[strings.LastIndexByte(rest, ' ')+1:])
				n += k
			}
		}
		return n
	}
	var wg sync.WaitGroup
	conns := make([]*net.TCPConn, polls)
	for i := range conns {
		if i%100 == 99 { // the first poll of a queue looks it up, for which connections may be short: this is about what comes after
			eventually(t, patience, "polls are parked, but for some that look again just now", func() bool { return parked() >= i*95/100 })
		}
		conns[i] = b.dial(t)
		_ = conns[i].SetDeadline(time.Now().Add(10 * patience))
		if _, err := fmt.Fprintf(conns[i], "GET /api/v1/pop/queue/idle%d?wait=true&timeout=280000 HTTP/1.1\r\nHost: x\r\n\r\n", i); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, patience, "polls are parked", func() bool { return parked() >= polls*95/100 })
	var took []time.Duration
	for i := range 100 {
		a := call(http.DefaultClient, "POST", url+"/api/v1/push", fmt.Sprintf(`{"items":[{"queue":"busy","payload":%d}]}`, i))
		if a.status != 201 {
			t.Fatalf("push: %v", a)
		}
		took = append(took, a.took)
	}
	slices.Sort(took)
	if took[98] > recovery {
		t.Errorf("pushes took up to %v", took[98])
	}
	must(t, 201, "POST", url+"/api/v1/push", `{"items":[{"queue":"idle7","payload":"wake"}]}`)
	if resp, err := http.ReadResponse(bufio.NewReader(conns[7]), nil); err != nil || resp.StatusCode != 200 {
		t.Errorf("the one whose message came: %v %v", resp, err)
	}
	// Those that look again just then are not counted: of a hundred more some may get a place, and some are told to come back.
	var refused atomic.Int64
	for range 100 {
		wg.Go(func() {
			a := call(http.DefaultClient, "GET", url+"/api/v1/pop/queue/one-more?wait=true&timeout=1000", "")
			switch {
			case a.status == 503 && a.header.Get("Retry-After") != "" && a.body == `{"error":"overloaded"}`:
				refused.Add(1)
			case a.status != 204:
				t.Errorf("one more: %v", a)
			}
		})
	}
	wg.Wait()
	if refused.Load() == 0 {
		t.Error("a hundred more found room")
	}
	eventually(t, patience, "all that have waited before wait on", func() bool { return parked() == polls-1 })
	for _, x := range conns {
		_ = x.Close()
	}
	eventually(t, patience, "none is parked", func() bool { return parked() == 0 })
	eventually(t, patience, "their goroutines are gone", func() bool { return b.goroutines() <= goroutines+30 })
	http.DefaultClient.CloseIdleConnections()
	eventually(t, patience, "all connections are gone", func() bool { return b.connections() <= before+15 })
}
