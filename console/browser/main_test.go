// Package browser drives the console in a real Chromium. Every page that logs an error, throws, or breaks its Content-Security-Policy
// fails its test.
package browser

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

const rootKey = "root-key-of-the-tests"

var binary string

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "ferrymq-console.")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "ferrymq")
	build := exec.Command("go", "build", "-o", binary, ".")
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		panic(string(out))
	}
	return m.Run()
}

// broker is a running ferrymq with a PostgreSQL of its own.
type broker struct {
	t    *testing.T
	dir  string
	port int
	env  []string
	cmd  *exec.Cmd
	url  string
	key  string // sent by call
}

func start(t *testing.T, env ...string) *broker {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &broker{t: t, dir: t.TempDir(), port: l.Addr().(*net.TCPAddr).Port, env: env}
	l.Close()
	for d := b.dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		os.Chmod(d, 0o755) // the user that runs PostgreSQL passes through
	}
	b.url = fmt.Sprintf("http://127.0.0.1:%d", b.port)
	for _, e := range env {
		if v, ok := strings.CutPrefix(e, "ROOT_API_KEY="); ok {
			b.key = v
		}
	}
	b.up()
	t.Cleanup(func() { b.down(syscall.SIGTERM) })
	return b
}

func (b *broker) up() {
	b.t.Helper()
	b.cmd = exec.Command(binary)
	b.cmd.Env = append(os.Environ(), append([]string{fmt.Sprint("PORT=", b.port), "BIND_ADDR=127.0.0.1", "DATA_DIR=" + filepath.Join(b.dir, "data")}, b.env...)...)
	var out bytes.Buffer
	b.cmd.Stderr = &out
	if err := b.cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	await(b.t, "the broker is ready", func() bool {
		r, err := http.Get(b.url + "/ready")
		if err != nil {
			return false
		}
		r.Body.Close()
		return r.StatusCode == 200
	})
}

func (b *broker) down(s syscall.Signal) {
	if b.cmd != nil {
		_ = b.cmd.Process.Signal(s)
		_ = b.cmd.Wait()
		b.cmd = nil
	}
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(45 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("it never came that %s", what)
}

// call asks the API and returns its answer.
func (b *broker) call(method, path string, body any) map[string]any {
	b.t.Helper()
	var in io.Reader
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			b.t.Fatal(err)
		}
		in = bytes.NewReader(raw)
	}
	r, _ := http.NewRequest(method, b.url+path, in)
	if b.key != "" {
		r.Header.Set("Authorization", "Bearer "+b.key)
	}
	w, err := http.DefaultClient.Do(r)
	if err != nil {
		b.t.Fatal(err)
	}
	defer w.Body.Close()
	raw, _ := io.ReadAll(w.Body)
	if w.StatusCode > 299 {
		b.t.Fatalf("%s %s: %d %s", method, path, w.StatusCode, raw)
	}
	var answer map[string]any
	_ = json.Unmarshal(raw, &answer)
	return answer
}

type m = map[string]any

// fail has each of the next n messages of a subscription fail with an error.
func (b *broker) fail(sub string, n int, why string) {
	b.t.Helper()
	var ids []any
	for _, x := range b.call("POST", "/v1/subscriptions/"+url.PathEscape(sub)+"/receive", m{"max_messages": n, "consumer": "worker-1"})["messages"].([]any) {
		ids = append(ids, x.(m)["delivery_id"])
	}
	if len(ids) != n {
		b.t.Fatalf("%d of %d messages", len(ids), n)
	}
	b.call("POST", "/v1/subscriptions/"+url.PathEscape(sub)+"/nack", m{"delivery_ids": ids, "error": why})
}

// tab is a page of a Chromium of its own.
type tab struct {
	t    *testing.T
	ctx  context.Context
	base string

	mu     sync.Mutex
	errors []string
	bears  []string // errors that belong to the test: parts of their texts
}

func open(t *testing.T, base string, bears ...string) *tab {
	t.Helper()
	patience, stop := context.WithTimeout(context.Background(), 4*time.Minute)
	allocator, end := chromedp.NewExecAllocator(patience, append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox, chromedp.DisableGPU,
		chromedp.Flag("disable-dev-shm-usage", true))...)
	ctx, cancel := chromedp.NewContext(allocator, chromedp.WithErrorf(func(string, ...any) {})) // of events that this version does not know
	p := &tab{t: t, ctx: ctx, base: base, bears: bears}
	note := func(s string) {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, b := range p.bears {
			if strings.Contains(s, b) {
				return
			}
		}
		p.errors = append(p.errors, s)
	}
	chromedp.ListenTarget(ctx, func(ev any) {
		switch e := ev.(type) {
		case *runtime.EventExceptionThrown:
			note("thrown: " + e.ExceptionDetails.Error())
		case *runtime.EventConsoleAPICalled:
			if e.Type == runtime.APITypeError || e.Type == runtime.APITypeWarning {
				note(fmt.Sprintf("console: %s %s", e.Type, e.Args[0].Value))
			}
		case *log.EventEntryAdded:
			if e.Entry.Level == log.LevelError || e.Entry.Source == log.SourceSecurity || e.Entry.Source == log.SourceViolation && e.Entry.Level == log.LevelWarning {
				note(fmt.Sprintf("log: %s %s", e.Entry.Text, e.Entry.URL))
			}
		case *page.EventJavascriptDialogOpening:
			note("dialog: " + e.Message)
		}
	})
	t.Cleanup(func() {
		if t.Failed() {
			var text string
			_ = chromedp.Run(ctx, chromedp.Evaluate(`document.body.innerText`, &text))
			t.Logf("the page says:\n%s", text)
		}
		cancel()
		end()
		stop()
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, e := range p.errors {
			t.Errorf("the browser reports: %s", e)
		}
	})
	p.run(chromedp.EmulateViewport(1440, 1000), log.Enable(), chromedp.Navigate(base+"/"))
	return p
}

func (p *tab) run(actions ...chromedp.Action) {
	p.t.Helper()
	if err := chromedp.Run(p.ctx, actions...); err != nil {
		p.t.Fatal(err)
	}
}

// js evaluates an expression.
func js[T any](p *tab, expression string) (v T) {
	p.t.Helper()
	p.run(chromedp.Evaluate(expression, &v, func(e *runtime.EvaluateParams) *runtime.EvaluateParams { return e.WithAwaitPromise(true) }))
	return v
}

func quoted(s string) string {
	b, _ := json.Marshal(s)
	return string(b)
}

// says waits until the page shows all of these texts.
func (p *tab) says(texts ...string) {
	p.t.Helper()
	for _, text := range texts {
		await(p.t, "the page says "+quoted(text), func() bool { return js[bool](p, `document.body.innerText.includes(`+quoted(text)+`)`) })
	}
}

// not waits until the page does not show a text.
func (p *tab) not(text string) {
	p.t.Helper()
	await(p.t, "the page does not say "+quoted(text), func() bool { return !js[bool](p, `document.body.innerText.includes(`+quoted(text)+`)`) })
}

// to goes to a page of the console.
func (p *tab) to(hash string, title string) {
	p.t.Helper()
	p.run(chromedp.Evaluate(`location.hash = `+quoted(hash), nil))
	await(p.t, "the title is "+title, func() bool { return strings.HasPrefix(js[string](p, `document.title`), title+" –") })
}

// press presses a button by its text, once it can be pressed.
func (p *tab) press(text string) {
	p.t.Helper()
	await(p.t, "there is a button "+text, func() bool {
		return js[bool](p, `(() => { const b = [...document.querySelectorAll("dialog[open] button, main button, header button")].find((b) => b.innerText === `+quoted(text)+` && !b.disabled && b.offsetParent !== null && (!document.querySelector("dialog[open]") || b.closest("dialog"))); if (b) b.click(); return !!b; })()`)
	})
}

// click clicks what an expression finds, once it does.
func (p *tab) click(expression string) {
	p.t.Helper()
	await(p.t, "there is "+expression, func() bool {
		return js[bool](p, `(() => { try { const e = `+expression+`; e.click(); return true; } catch { return false; } })()`)
	})
}

// has says whether there is a button with a text.
func (p *tab) has(text string) bool {
	p.t.Helper()
	return js[bool](p, `[...document.querySelectorAll("main button")].some((b) => b.innerText === `+quoted(text)+`)`)
}

// fill sets what an input holds, as typing does.
func (p *tab) fill(id, text string) {
	p.t.Helper()
	p.run(chromedp.Evaluate(`(() => { const e = document.getElementById(`+quoted(id)+`); e.value = `+quoted(text)+`; e.dispatchEvent(new Event("input", { bubbles: true })); e.dispatchEvent(new Event("change", { bubbles: true })); })()`, nil))
}

// shoot saves the page at both widths, light and dark, when SHOTS is set, and always checks that nothing is wider than the window.
func (p *tab) shoot(name string) {
	p.t.Helper()
	for _, width := range []int64{1440, 390} {
		p.run(chromedp.EmulateViewport(width, 900))
		if over := js[[]string](p, `[...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest("nav, .unseen, pre, thead, .skip") && (innerWidth < 600 || !e.closest(".table"))).map((e) => e.tagName + "." + e.className + " " + e.innerText?.slice(0, 40))`); len(over) > 0 {
			p.t.Errorf("%s at %d pixels: wider than the window: %q", name, width, over)
		}
		for _, scheme := range []string{"light", "dark"} {
			if os.Getenv("SHOTS") == "" {
				continue
			}
			var png []byte
			p.run(emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}), chromedp.CaptureScreenshot(&png))
			_ = os.MkdirAll("shots", 0o755)
			if err := os.WriteFile(fmt.Sprintf("shots/%s-%d-%s.png", name, width, scheme), png, 0o644); err != nil {
				p.t.Fatal(err)
			}
		}
	}
	p.run(chromedp.EmulateViewport(1440, 1000))
}

// below is a proxy that serves the broker below a prefix.
func below(t *testing.T, b *broker, prefix string) string {
	t.Helper()
	to, _ := url.Parse(b.url)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.StripPrefix(prefix, &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) }})}
	go s.Serve(l)
	t.Cleanup(func() { s.Close() })
	return "http://" + l.Addr().String() + prefix
}
