package console_test

import (
	"bytes"
	"encoding/base64"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"ferrymq/console"
)

// api answers with what it was asked, and knows one key.
func api(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/console/session" && r.Header.Get("Authorization") != "Bearer good" {
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = w.Write([]byte(`{"error":"Unknown API key"}`))
		return
	}
	_, _ = w.Write([]byte(r.Method + " " + r.URL.RequestURI() + " " + r.Header.Get("Authorization")))
}

func ask(method, target, body string, header ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, target, strings.NewReader(body))
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	console.Handler(http.HandlerFunc(api)).ServeHTTP(w, r)
	return w
}

const ours = "X-FerryMQ-Console"

// Every file is served with headers that let it run nothing from elsewhere, and everything that is none of them goes to the API untouched.
func TestFiles(t *testing.T) {
	t.Parallel()
	for path, kind := range map[string]string{"/": "text/html; charset=utf-8", "/console/app.js": "text/javascript; charset=utf-8", "/console/pages.js": "text/javascript; charset=utf-8",
		"/console/dom.js": "text/javascript; charset=utf-8", "/console/style.css": "text/css; charset=utf-8", "/console/icon.svg": "image/svg+xml"} {
		w := ask("GET", path, "")
		h := w.Header()
		if w.Code != 200 || h.Get("Content-Type") != kind || w.Body.Len() == 0 {
			t.Errorf("%s: %d %v", path, w.Code, h)
		}
		csp := h.Get("Content-Security-Policy")
		for _, want := range []string{"default-src 'none'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'", "require-trusted-types-for 'script'"} {
			if !strings.Contains(csp, want) {
				t.Errorf("%s: no %s in %s", path, want, csp)
			}
		}
		if strings.Contains(csp, "unsafe") || strings.Contains(csp, "http") || strings.Contains(csp, "*") {
			t.Errorf("%s: %s", path, csp)
		}
		if h.Get("X-Content-Type-Options") != "nosniff" || h.Get("X-Frame-Options") != "DENY" || h.Get("Referrer-Policy") != "no-referrer" || h.Get("Cache-Control") != "no-cache" {
			t.Errorf("%s: %v", path, h)
		}
		if again := ask("GET", path, "", "If-None-Match", h.Get("ETag")); again.Code != 304 || again.Body.Len() != 0 {
			t.Errorf("%s again: %d", path, again.Code)
		}
		if head := ask("HEAD", path, ""); head.Code != 200 || head.Body.Len() != 0 || head.Header().Get("Content-Length") == "0" {
			t.Errorf("HEAD %s: %d %v", path, head.Code, head.Header())
		}
		if post := ask("POST", path, ""); post.Code != 405 || post.Header().Get("Allow") != "GET, HEAD" {
			t.Errorf("POST %s: %d %v", path, post.Code, post.Header())
		}
	}
	for _, path := range []string{"/x", "//", "/console/", "/console/x.js", "/console/%61pp.js", "/console/browser", "/api/v1/push", "/v1/streams", "/consoles", "/?x=1/.."} {
		if w := ask("GET", path, ""); !strings.HasPrefix(w.Body.String(), "GET "+path+" ") && !strings.HasPrefix(path, "/?") {
			t.Errorf("%s: %s", path, w.Body)
		}
	}
	if w := ask("GET", "/console", ""); w.Code != 303 || w.Header().Get("Location") != "./" {
		t.Errorf("/console: %d %v", w.Code, w.Header())
	}
}

// The files name nothing outside of themselves, hold nothing inline, and never turn text into markup.
func TestFilesAreSelfContained(t *testing.T) {
	t.Parallel()
	bad := map[string]*regexp.Regexp{
		"an address elsewhere": regexp.MustCompile(`(?i)(src|href|url|from|import|fetch)\s*[=(]?\s*["'(]\s*(https?:|//|/)`),
		"markup from text":     regexp.MustCompile(`innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|eval\(|new Function|javascript:`),
		"something inline":     regexp.MustCompile(`(?i)<style|<script[^>]*>[^<]|\sstyle=|\son[a-z]+="`),
	}
	err := filepath.WalkDir("static", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		for what, find := range bad {
			if at := find.Find(b); at != nil {
				t.Errorf("%s has %s: %s", path, what, at)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A log-in is judged by the API, and makes a cookie that no script reads and no other site sends.
func TestLogin(t *testing.T) {
	t.Parallel()
	w := ask("POST", "/console", " good\n", ours, "1")
	cookies := w.Result().Cookies()
	if w.Code != 200 || len(cookies) != 1 || w.Body.String() != "GET /console/session Bearer good" || w.Header().Get("Cache-Control") != "no-store" {
		t.Fatalf("%d %v %s", w.Code, w.Header(), w.Body)
	}
	c := cookies[0]
	if !c.HttpOnly || c.SameSite != http.SameSiteStrictMode || c.Secure || c.Path != "" || c.Domain != "" || c.MaxAge != 0 || !c.Expires.IsZero() {
		t.Errorf("the cookie is %v", c)
	}
	if w := ask("POST", "/console", "good", ours, "1", "X-Forwarded-Proto", "https", "Sec-Fetch-Site", "same-origin"); !w.Result().Cookies()[0].Secure {
		t.Errorf("behind https: %v", w.Header())
	}
	for _, x := range []struct {
		body   string
		header []string
		status int
	}{
		{"bad", []string{ours, "1"}, 401},
		{"", []string{ours, "1"}, 400},
		{"a b", []string{ours, "1"}, 400},
		{"ключ", []string{ours, "1"}, 400},
		{strings.Repeat("x", 3000), []string{ours, "1"}, 400},
		{strings.Repeat("x", 100<<10), []string{ours, "1"}, 400},
		{"good", nil, 403},
		{"good", []string{ours, "1", "Sec-Fetch-Site", "cross-site"}, 403},
		{"good", []string{ours, "1", "Sec-Fetch-Site", "same-site"}, 403},
		{"good", []string{ours, "1", "Sec-Fetch-Site", "none"}, 403},
	} {
		if w := ask("POST", "/console", x.body, x.header...); w.Code != x.status || w.Header().Get("Set-Cookie") != "" || !strings.HasPrefix(w.Body.String(), `{"error":`) {
			t.Errorf("%.10q %v: %d %s %v", x.body, x.header, w.Code, w.Body, w.Header())
		}
	}
	out := ask("DELETE", "/console", "", ours, "1")
	if c := out.Result().Cookies(); out.Code != 204 || len(c) != 1 || c[0].MaxAge >= 0 || c[0].Value != "" {
		t.Errorf("log-out: %d %v", out.Code, out.Header())
	}
	if w := ask("DELETE", "/console", ""); w.Code != 403 || w.Header().Get("Set-Cookie") != "" {
		t.Errorf("log-out from elsewhere: %d", w.Code)
	}
	if w := ask("PUT", "/console", "", ours, "1"); w.Code != 405 {
		t.Errorf("PUT: %d", w.Code)
	}
}

// The session counts only for what the console itself has sent, whatever the method.
func TestSessionIsNotForOthers(t *testing.T) {
	t.Parallel()
	cookie := "ferrymq_session=" + base64.RawURLEncoding.EncodeToString([]byte("good"))
	for _, method := range []string{"GET", "POST", "DELETE", "PUT"} {
		for _, x := range []struct {
			header []string
			want   string
		}{
			{[]string{ours, "1"}, "Bearer good"},
			{[]string{ours, "1", "Sec-Fetch-Site", "same-origin"}, "Bearer good"},
			{nil, ""},
			{[]string{"Sec-Fetch-Site", "same-origin"}, ""},
			{[]string{"Sec-Fetch-Site", "none"}, ""},
			{[]string{ours, "1", "Sec-Fetch-Site", "cross-site"}, ""},
			{[]string{ours, "1", "Sec-Fetch-Site", "same-site"}, ""},
			{[]string{ours, "1", "Authorization", "Bearer other"}, "Bearer other"},
		} {
			w := ask(method, "/api/v1/pop", "", append(x.header, "Cookie", cookie)...)
			if got := strings.TrimPrefix(w.Body.String(), method+" /api/v1/pop "); got != x.want {
				t.Errorf("%s %v: %q, want %q", method, x.header, got, x.want)
			}
		}
	}
	for _, value := range []string{"", "!", base64.RawURLEncoding.EncodeToString([]byte("a\r\nX-Evil: 1")), base64.RawURLEncoding.EncodeToString([]byte{0})} {
		if w := ask("GET", "/x", "", ours, "1", "Cookie", "ferrymq_session="+value); !bytes.HasSuffix(w.Body.Bytes(), []byte(" ")) {
			t.Errorf("%q: %s", value, w.Body)
		}
	}
}
