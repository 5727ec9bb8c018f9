// Package console is the web console: a page of plain files that are part of the binary, and the session that lets it call the API.
//
// It stands in front of the API. The page lies at /, all else below /console, and every link in it is relative, so that it works below any
// prefix that a proxy takes off.
//
// Who logs in sends a credential (an API key, the root key or a JSON Web Token) once. It comes back as a cookie that scripts cannot read, that
// other sites cannot have sent (SameSite=Strict), and that ends with the browser. There is no store of sessions: any broker behind a load
// balancer serves any request, and a key that is deleted is refused with the next one.
//
// A request with the cookie counts as authorized only when it also carries the header X-FerryMQ-Console, and the browser, if it says where the
// request comes from (Sec-Fetch-Site), says from this origin. A form, an image or a link of another site cannot set a header, and a script of
// another site may only after asking with a preflight, which is never granted. So nothing of another site acts with the session of its
// visitor, whether it changes something or only reads, also where SameSite is not enough: a sibling host of the same site.
package console

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"encoding/hex"
	"io"
	"io/fs"
	"net/http"
	"path"
	"strconv"
	"strings"
)

// Header is what requests that use the session must carry, with any value.
const Header = "X-FerryMQ-Console"

const (
	cookieName = "ferrymq_session"
	maxCookie  = 3800 // browsers keep cookies of at least 4 KB
	policy     = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'none'; base-uri 'none'; " +
		"frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)

//go:embed static
var static embed.FS

type file struct {
	content   []byte
	kind, tag string
}

type handler struct {
	api   http.Handler
	files map[string]file // by path
}

// Handler serves the console, and gives everything else to the API: requests with a session as if they carried its credential.
func Handler(api http.Handler) http.Handler {
	h := &handler{api: api, files: make(map[string]file)}
	kinds := map[string]string{".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
	err := fs.WalkDir(static, "static", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := static.ReadFile(name)
		sum := sha256.Sum256(content)
		at := "/console/" + path.Base(name)
		if at == "/console/index.html" {
			at = "/"
		}
		h.files[at] = file{content, kinds[path.Ext(name)], `"` + hex.EncodeToString(sum[:8]) + `"`}
		return err
	})
	if err != nil {
		panic(err) // the files are part of the binary
	}
	return h
}

// ServeHTTP is http.Handler's.
func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	at := r.URL.EscapedPath()
	if f, ok := h.files[at]; ok {
		h.serveFile(w, r, f)
		return
	}
	if at == "/console" {
		h.session(w, r)
		return
	}
	if token := credential(r); token != "" {
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", "Bearer "+token)
	}
	if strings.HasPrefix(at, "/console/") {
		w.Header().Set("Cache-Control", "no-store")
	}
	h.api.ServeHTTP(w, r)
}

// guard sets the headers of whatever a browser may show.
func guard(w http.ResponseWriter) http.Header {
	header := w.Header()
	header.Set("Content-Security-Policy", policy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("X-Frame-Options", "DENY")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("Cross-Origin-Opener-Policy", "same-origin")
	header.Set("Cross-Origin-Resource-Policy", "same-origin")
	return header
}

func (h *handler) serveFile(w http.ResponseWriter, r *http.Request, f file) {
	header := guard(w)
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		refuse(w, http.StatusMethodNotAllowed, "Method Not Allowed", "GET, HEAD")
		return
	}
	header.Set("Content-Type", f.kind)
	header.Set("ETag", f.tag)
	header.Set("Cache-Control", "no-cache")
	if r.Header.Get("If-None-Match") == f.tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	header.Set("Content-Length", strconv.Itoa(len(f.content)))
	if r.Method == http.MethodGet {
		_, _ = w.Write(f.content)
	}
}

func refuse(w http.ResponseWriter, status int, text, allow string) {
	header := w.Header()
	header.Set("Content-Type", "application/json")
	header.Set("Cache-Control", "no-store")
	if allow != "" {
		header.Set("Allow", allow)
	}
	w.WriteHeader(status)
	_, _ = io.WriteString(w, `{"error":"`+text+`"}`)
}

// ours says whether a request comes from a page of the console.
func ours(r *http.Request) bool {
	site := r.Header.Get("Sec-Fetch-Site")
	return r.Header.Get(Header) != "" && (site == "" || site == "same-origin")
}

// credential is what the session of a request holds, "" without one. A request that has its own credential has no need of it.
func credential(r *http.Request) string {
	c, err := r.Cookie(cookieName)
	if err != nil || r.Header.Get("Authorization") != "" || !ours(r) {
		return ""
	}
	b, err := base64.RawURLEncoding.DecodeString(c.Value)
	if err != nil || !visible(string(b)) {
		return ""
	}
	return string(b)
}

// visible says whether a text can stand in a header.
func visible(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })
}

// session is the log-in (POST, the credential as the body) and the log-out (DELETE). The cookie has no path: browsers take that of the address
// without its last part, which is the prefix that we do not know.
func (h *handler) session(w http.ResponseWriter, r *http.Request) {
	guard(w)
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		w.Header().Set("Location", "./")
		w.WriteHeader(http.StatusSeeOther)
		return
	case http.MethodPost, http.MethodDelete:
	default:
		refuse(w, http.StatusMethodNotAllowed, "Method Not Allowed", "DELETE, GET, HEAD, POST")
		return
	}
	if !ours(r) {
		refuse(w, http.StatusForbidden, "not from the console", "")
		return
	}
	cookie := &http.Cookie{Name: cookieName, HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https"), MaxAge: -1}
	if r.Method == http.MethodDelete {
		http.SetCookie(w, cookie)
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(http.StatusNoContent)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 64<<10))
	token := strings.TrimSpace(string(body))
	if err != nil || !visible(token) {
		refuse(w, http.StatusBadRequest, "a key or token is required", "")
		return
	}
	if cookie.Value = base64.RawURLEncoding.EncodeToString([]byte(token)); len(cookie.Value) > maxCookie {
		refuse(w, http.StatusBadRequest, "the token is too large for a session: at most "+strconv.Itoa(maxCookie*3/4)+" bytes", "")
		return
	}
	// The API itself judges it.
	ask := r.Clone(r.Context())
	ask.Method, ask.Body, ask.ContentLength = http.MethodGet, http.NoBody, 0
	ask.URL.Path, ask.URL.RawPath, ask.URL.RawQuery = "/console/session", "", ""
	ask.Header.Del("Cookie")
	ask.Header.Set("Authorization", "Bearer "+token)
	answer := &kept{header: make(http.Header), status: http.StatusOK}
	h.api.ServeHTTP(answer, ask)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if answer.status == http.StatusOK {
		cookie.MaxAge = 0
		http.SetCookie(w, cookie)
	}
	w.WriteHeader(answer.status)
	_, _ = w.Write(answer.body.Bytes())
}

// kept is an answer that nobody has got yet.
type kept struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (k *kept) Header() http.Header         { return k.header }
func (k *kept) WriteHeader(status int)      { k.status = status }
func (k *kept) Write(b []byte) (int, error) { return k.body.Write(b) }
