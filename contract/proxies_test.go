package contract

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"ferrymq/dbtest"
)

// example is a block of docs/operations.md in some language.
func example(t *testing.T, lang string) string {
	t.Helper()
	page, err := os.ReadFile("../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(page), "\n```"+lang+"\n")
	text, _, ok := strings.Cut(rest, "```")
	if !ok {
		t.Fatalf("docs/operations.md has no block of %s", lang)
	}
	return text
}

// adapt replaces parts of an example, each of which must be there.
func adapt(t *testing.T, text string, pairs ...string) string {
	t.Helper()
	for i := 0; i < len(pairs); i += 2 {
		if !strings.Contains(text, pairs[i]) {
			t.Fatalf("the example does not have %q any more", pairs[i])
		}
		text = strings.ReplaceAll(text, pairs[i], pairs[i+1])
	}
	return text
}

// installed is where a program is; the test is skipped if it is nowhere.
func installed(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		path = "/usr/sbin/" + name // not on everybody's path
	}
	if _, err := os.Stat(path); err != nil {
		t.Skip(name + " is not installed")
	}
	return path
}

// testNginx and testCaddy: behind a proxy as docs/operations.md configures it, with its buffering, the answer of a long poll arrives when there
// is something, whole and with its length; large bodies pass, and a broker that is gone is passed by. They run where the proxy is installed.
func testNginx(t *testing.T, bin string) {
	proxy := installed(t, "nginx")
	behindProxy(t, bin, func(one, other string) string { return startNginx(t, proxy, one, other) })
}

func testCaddy(t *testing.T, bin string) {
	proxy := installed(t, "caddy")
	behindProxy(t, bin, func(one, other string) string { return startCaddy(t, proxy, one, other) })
}

// behindProxy starts a proxy in front of two brokers, one of which is not there.
func behindProxy(t *testing.T, bin string, proxy func(one, other string) (addr string)) {
	b, err := start(bin, []string{"DATABASE_URL=" + dbtest.New(t), "PORT=0"}, true)
	if err != nil {
		t.Fatal(err)
	}
	defer b.stop()
	direct, through := "http://"+b.addr, "http://"+proxy(b.addr, free(t))
	client := &http.Client{Transport: &http.Transport{}, Timeout: time.Minute}
	defer client.CloseIdleConnections()
	send := func(method, url, body string) (*http.Response, string) {
		req, err := http.NewRequest(method, url, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp, string(text)
	}
	if resp, text := send("PUT", through+"/v1/subscriptions/sub", `{"stream":"s"}`); resp.StatusCode != 200 {
		t.Fatal(resp.Status, text)
	}
	n := 0
	for _, api := range []struct{ name, method, poll, body, push, message string }{
		{"pop", "GET", "/api/v1/pop/queue/q?wait=true&timeout=30000&autoAck=true", "", "/api/v1/push", `{"items":[{"queue":"q","partition":"%[2]d","payload":%[1]s}]}`},
		{"receive", "POST", "/v1/subscriptions/sub/receive", `{"wait_seconds":25}`, "/v1/streams/s/messages", `{"messages":[{"key":"%[2]d","payload":%[1]s}]}`},
	} {
		for _, payload := range []string{`"small"`, `"` + strings.Repeat("large", 200_000) + `"`} {
			var late []time.Duration
			for range 15 {
				n++ // a key of its own: nothing is in front of it
				type answer struct {
					resp *http.Response
					text string
					at   time.Time
				}
				got := make(chan answer, 1)
				go func() {
					resp, text := send(api.method, through+api.poll, api.body)
					got <- answer{resp, text, time.Now()}
				}()
				time.Sleep(50 * time.Millisecond) // most of them are parked by then; the others find it at once
				if resp, text := send("POST", direct+api.push, fmt.Sprintf(api.message, payload, n)); resp.StatusCode/100 != 2 {
					t.Fatal(resp.Status, text)
				}
				stored := time.Now()
				a := <-got
				late = append(late, a.at.Sub(stored))
				if a.resp.StatusCode != 200 || !strings.Contains(a.text, payload) {
					t.Fatalf("%s: %s, %d bytes", api.name, a.resp.Status, len(a.text))
				}
				if a.resp.ContentLength != int64(len(a.text)) {
					t.Fatalf("%s: a length of %d, %d bytes came, %v", api.name, a.resp.ContentLength, len(a.text), a.resp.TransferEncoding)
				}
			}
			slices.Sort(late)
			if m := late[len(late)/2]; m > 100*time.Millisecond {
				t.Errorf("%s of %d bytes: the answer came %v after the push: %v", api.name, len(payload), m, late)
			}
		}
	}
	// Large bodies pass.
	if resp, text := send("POST", through+"/api/v1/push", `{"items":[{"queue":"big","payload":"`+strings.Repeat("x", 20<<20)+`"}]}`); resp.StatusCode != 201 {
		t.Error(resp.Status, text)
	}
	// An empty answer leaves the connection as good as before.
	for range 20 {
		if resp, text := send("GET", through+"/api/v1/pop/queue/empty", ""); resp.StatusCode != 204 || text != "" {
			t.Fatal(resp.Status, text)
		}
	}
}

// free is an address that nobody listens on.
func free(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// startNginx runs nginx in front of two brokers until the test ends. Nothing about buffering is configured.
func startNginx(t *testing.T, proxy, one, other string) (addr string) {
	addr = free(t)
	dir := t.TempDir()
	user := ""
	if os.Getuid() == 0 {
		user = "user root;" // its workers must be able to write there
	}
	site := adapt(t, example(t, "nginx"), "127.0.0.1:6632", one, "127.0.0.1:6633", other, "listen 443 ssl", "listen "+addr,
		"    ssl_certificate /etc/ssl/mq.example.com.pem;\n    ssl_certificate_key /etc/ssl/mq.example.com.key;\n", "")
	config := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(config, fmt.Appendf(nil, `daemon off; master_process on; worker_processes 1; pid %[1]s/pid; error_log %[1]s/error.log; %[2]s
events {}
http {
	access_log off;
	client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/fastcgi; uwsgi_temp_path %[1]s/uwsgi; scgi_temp_path %[1]s/scgi;
%[3]s}
`, dir, user, site), 0o600); err != nil {
		t.Fatal(err)
	}
	serving(t, exec.Command(proxy, "-p", dir, "-c", config, "-e", filepath.Join(dir, "error.log")), addr)
	return addr
}

// startCaddy runs Caddy in front of two brokers until the test ends. Its site is one of plain HTTP.
func startCaddy(t *testing.T, proxy, one, other string) (addr string) {
	addr = free(t)
	dir := t.TempDir()
	site := adapt(t, example(t, "caddy"), "127.0.0.1:6632", one, "127.0.0.1:6633", other, "mq.example.com", "http://"+addr)
	config := filepath.Join(dir, "Caddyfile")
	if err := os.WriteFile(config, []byte("{\n\tadmin off\n\tauto_https off\n}\n"+site), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(proxy, "run", "--config", config, "--adapter", "caddyfile")
	cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	serving(t, cmd, addr)
	return addr
}

// serving starts a program and waits until it listens. It is ended with the test.
func serving(t *testing.T, cmd *exec.Cmd, addr string) {
	t.Helper()
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
	})
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		conn, err := net.Dial("tcp", addr)
		if err == nil {
			conn.Close()
			return
		}
		if time.Now().After(end) {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			t.Fatalf("%s does not listen: %s", cmd.Path, log.Bytes())
		}
	}
}
