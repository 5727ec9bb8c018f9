package browser

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// socket stands between a broker and the socket of a database, and can be taken away.
type socket struct {
	t       *testing.T
	dir, to string

	mu       sync.Mutex
	listener net.Listener
	conns    []net.Conn
}

const socketFile = ".s.PGSQL.5432"

func (s *socket) open() {
	s.t.Helper()
	l, err := net.Listen("unix", filepath.Join(s.dir, socketFile))
	if err != nil {
		s.t.Fatal(err)
	}
	s.mu.Lock()
	s.listener = l
	s.mu.Unlock()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			d, err := net.Dial("unix", s.to)
			if err != nil {
				c.Close()
				continue
			}
			s.mu.Lock()
			s.conns = append(s.conns, c, d)
			s.mu.Unlock()
			go func() { _, _ = io.Copy(d, c); d.Close() }()
			go func() { _, _ = io.Copy(c, d); c.Close() }()
		}
	}()
}

func (s *socket) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listener.Close()
	for _, c := range s.conns {
		c.Close()
	}
	s.conns = nil
}

// A database that goes away is named within ten seconds, what was shown stays, and the page goes on by itself when it is back.
func TestDatabaseGoesAndComes(t *testing.T) {
	owner := start(t) // its database, by another way
	sockets, err := filepath.Glob(filepath.Join(owner.dir, "data", "*", socketFile))
	if err != nil || len(sockets) != 1 {
		t.Fatal(sockets, err)
	}
	dir, err := os.MkdirTemp("", "fmq")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	s := &socket{t: t, dir: dir, to: sockets[0]}
	s.open()
	defer s.close()
	b := start(t, "DATABASE_URL=host="+dir+" user=postgres dbname=postgres")
	b.call("POST", "/api/v1/push", m{"items": []any{m{"queue": "emails", "payload": 1}}})
	p := open(t, b.url, "500", "503")
	p.to("#/queues", "Queues and streams")
	p.says("emails", "live")
	for _, page := range []string{"#/queues", "#/overview"} {
		p.run(chromedp.Evaluate(`location.hash = `+quoted(page), nil))
		p.says("live")
		s.close()
		gone := time.Now()
		p.says("The broker cannot reach its database.", "trouble")
		if took := time.Since(gone); took > 20*time.Second {
			t.Errorf("it took %v until the page said so", took)
		} else {
			t.Logf("said after %v", took)
		}
		if page == "#/queues" {
			p.says("emails")
		}
		p.shoot("database-away")
		s.open()
		p.not("cannot reach its database")
		p.says("live")
	}
}

// token is a JSON Web Token with a role.
func token(secret, role string) string {
	enc := base64.RawURLEncoding
	body := enc.EncodeToString([]byte(`{"alg":"HS256","typ":"JWT"}`)) + "." +
		enc.EncodeToString(fmt.Appendf(nil, `{"sub":"alice","role":%q,"exp":%d}`, role, time.Now().Add(time.Hour).Unix()))
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write([]byte(body))
	return body + "." + enc.EncodeToString(mac.Sum(nil))
}

// Below a prefix of a real nginx, as docs/console.md has it: log-in with a token, what its role sees and does, and how it is kept.
func TestTokenBehindNginx(t *testing.T) {
	const secret = "a secret of thirty-two characters"
	b := start(t, "JWT_ENABLED=true", "JWT_SECRET="+secret)
	b.key = token(secret, "admin")
	fixture(b)
	base := behindNginx(t, b)
	p := open(t, base, "401", "403")
	login := func(credential string) {
		t.Helper()
		p.says("Log in")
		p.fill("credential", credential)
		p.run(chromedp.Evaluate(`document.getElementById("credential").focus()`, nil), chromedp.KeyEvent(kb.Enter))
	}
	login(token("another secret of that many bytes", "admin"))
	p.says("Invalid token")
	login(token(secret, "read-only"))
	p.says("What is stuck", "Log out", "alice", "read only")
	var cookies []*network.Cookie
	p.run(chromedp.ActionFunc(func(ctx context.Context) (err error) {
		cookies, err = network.GetCookies().Do(ctx)
		return err
	}))
	if len(cookies) != 1 || !cookies[0].HTTPOnly || cookies[0].SameSite != network.CookieSameSiteStrict || !cookies[0].Session || cookies[0].Path != "/ferry" {
		t.Errorf("%d cookies", len(cookies))
		for _, c := range cookies {
			t.Errorf("%+v", *c)
		}
	}
	for _, x := range listPages {
		p.to(x.hash, x.title)
	}
	p.to("#/dead", "Dead letters")
	p.says("disk full")
	if p.has("Redrive") || p.has("Delete") {
		t.Error("a reader has buttons")
	}
	p.to("#/maintenance", "Maintenance")
	p.says("Only an admin can change it.")
	if refused := js[int](p, `(async () => (await fetch("api/v1/system/maintenance", { method: "POST", body: '{"enabled":true}', headers: { "X-FerryMQ-Console": "1" } })).status)()`); refused != 403 {
		t.Errorf("a reader switches: %d", refused)
	}
	p.press("Log out")

	login(b.key)
	p.says("Begin push maintenance", "alice") // where the last one was
	p.to("#/queues", "Queues and streams")
	p.says("emails")
	b.call("POST", "/api/v1/push", m{"items": []any{m{"queue": "later", "payload": 1}}})
	p.says("later") // without a hand's turn
	p.to("#/dead", "Dead letters")
	p.click(`[...document.querySelectorAll("tr")].find((r) => r.innerText.includes("disk full")).querySelector("button")`)
	p.press("Redrive 2")
	p.says("2 messages were redriven.")
	p.run(chromedp.Reload())
	p.says("no such tenant", "Log out")
}

// behindNginx serves the broker as the documentation shows it.
func behindNginx(t *testing.T, b *broker) string {
	t.Helper()
	nginx, err := exec.LookPath("nginx")
	if err != nil {
		nginx = "/usr/sbin/nginx"
	}
	doc, err := os.ReadFile("../../docs/console.md")
	if err != nil {
		t.Fatal(err)
	}
	location := regexp.MustCompile("(?s)```nginx\n(.*?)```").FindSubmatch(doc)
	if location == nil {
		t.Fatal("docs/console.md shows no configuration of nginx")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	dir, user := t.TempDir(), ""
	if os.Getuid() == 0 {
		user = "user root;" // its workers must be able to write there
	}
	config := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(config, fmt.Appendf(nil, `daemon off; worker_processes 1; pid %[1]s/pid; error_log %[1]s/error.log; %[2]s
events {}
http {
	access_log off;
	client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/fastcgi; uwsgi_temp_path %[1]s/uwsgi; scgi_temp_path %[1]s/scgi;
	server {
		listen %[3]s;
%[4]s	}
}
`, dir, user, addr, strings.ReplaceAll(string(location[1]), "http://127.0.0.1:6632", b.url)), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(nginx, "-p", dir, "-c", config, "-e", filepath.Join(dir, "error.log"))
	var said strings.Builder
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
		if t.Failed() && said.Len() > 0 {
			t.Log(said.String())
		}
	})
	await(t, "nginx listens", func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	return "http://" + addr + "/ferry"
}
