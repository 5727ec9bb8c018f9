package handlers

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/auth"
)

const (
	testSecret = "a secret of the tests, long enough"
	testRoot   = "root-key"
)

// contractRoutes is section 2 of the contract, written out: method, path, level.
const contractRoutes = `
POST   /api/v1/push                                                   WO
GET    /api/v1/pop                                                    RW
GET    /api/v1/pop/queue/:queue                                       RW
GET    /api/v1/pop/queue/:queue/partition/:partition                  RW
POST   /api/v1/ack                                                    RW
POST   /api/v1/ack/batch                                              RW
POST   /api/v1/lease/:leaseId/extend                                  RW
POST   /api/v1/configure                                              RW
DELETE /api/v1/resources/queues/:queue                                AD
GET    /health                                                        P
GET    /ready                                                         P
GET    /metrics                                                       P
GET    /metrics/prometheus                                            P
GET    /status                                                        RO
GET    /api/v1/consumer-groups                                        RO
GET    /api/v1/consumer-groups/lagging                                RO
GET    /api/v1/consumer-groups/:group                                 RO
POST   /api/v1/consumer-groups/:group/subscription                    RW
POST   /api/v1/consumer-groups/:group/queues/:queue/seek              RW
POST   /api/v1/consumer-groups/:group/queues/:queue/partitions/:partition/seek RW
DELETE /api/v1/consumer-groups/:group                                 AD
DELETE /api/v1/consumer-groups/:group/queues/:queue                   AD
POST   /api/v1/transaction                                            RW
DELETE /api/v1/messages/:partitionId/:transactionId                   RW
POST   /api/v1/messages/:partitionId/:transactionId/retry             RW
POST   /api/v1/messages/:partitionId/:transactionId/dlq               RW
POST   /api/v1/dlq/:id/replay                                         RW
POST   /api/v1/traces                                                 RW
GET    /api/v1/messages                                               RO
GET    /api/v1/messages/:partitionId/:transactionId                   RO
GET    /api/v1/dlq                                                    RO
GET    /api/v1/traces/names                                           RO
GET    /api/v1/traces/by-name/:traceName                              RO
GET    /api/v1/traces/:partitionId/:transactionId                     RO
DELETE /api/v1/dlq                                                    AD
DELETE /api/v1/queues/:queue/clear                                    AD
POST   /api/v1/stats/refresh                                          AD
GET    /api/v1/system/maintenance                                     AD
POST   /api/v1/system/maintenance                                     AD
GET    /api/v1/system/maintenance/pop                                 AD
POST   /api/v1/system/maintenance/pop                                 AD
GET    /api/v1/resources/queues                                       RO
GET    /api/v1/resources/queues/:queue                                RO
GET    /api/v1/resources/queues/:queue/depth                          RO
GET    /api/v1/resources/overview                                     RO
GET    /api/v1/resources/namespaces                                   RO
GET    /api/v1/resources/tasks                                        RO
GET    /api/v1/resources/partitions                                   RO
GET    /api/v1/status                                                 RO
GET    /api/v1/status/queues                                          RO
GET    /api/v1/status/queues/:queue                                   RO
GET    /api/v1/status/analytics                                       RO
GET    /api/v1/status/buffers                                         RO
GET    /api/v1/analytics/queue-lag                                    RO
GET    /api/v1/analytics/queue-ops                                    RO
GET    /api/v1/analytics/queue-parked-replicas                        RO
GET    /api/v1/analytics/retention                                    RO
GET    /api/v1/analytics/system-metrics                               RO
GET    /api/v1/analytics/worker-metrics                               RO
GET    /api/v1/analytics/postgres-stats                               RO
`

// v1Routes is the same of the other contract: the scope, or root.
const v1Routes = `
POST   /v1/subscriptions/:sub/receive                  consume
POST   /v1/subscriptions/:sub/ack                      consume
POST   /v1/subscriptions/:sub/nack                     consume
POST   /v1/subscriptions/:sub/extend                   consume
POST   /v1/streams/:stream/messages                    publish
PUT    /v1/streams/:stream                             admin
GET    /v1/streams                                     read
GET    /v1/streams/:stream                             read
DELETE /v1/streams/:stream                             admin
PUT    /v1/subscriptions/:sub                          admin
GET    /v1/subscriptions                               read
GET    /v1/subscriptions/:sub                          read
DELETE /v1/subscriptions/:sub                          admin
GET    /v1/subscriptions/:sub/lanes                    read
GET    /v1/subscriptions/:sub/dead-letters             read
GET    /v1/subscriptions/:sub/dead-letters/signatures  read
POST   /v1/subscriptions/:sub/dead-letters/redrive     admin
DELETE /v1/subscriptions/:sub/dead-letters             admin
POST   /v1/subscriptions/:sub/seek                     admin
GET    /v1/messages/:id/trace                          read
POST   /v1/projects                                    root
GET    /v1/projects                                    root
DELETE /v1/projects/:project                           root
POST   /v1/projects/:project/keys                      root
GET    /v1/projects/:project/keys                      root
DELETE /v1/projects/:project/keys/:key                 root
`

// consoleOnly is what the web console asks for; API keys with the scope read may too.
const consoleOnly = `
GET    /console/session              RO
GET    /console/overview             RO
GET    /console/queues               RO
GET    /console/queue                RO
GET    /console/groups               RO
GET    /console/blocked              RO
GET    /console/dead-letters         RO
GET    /console/dead-letters/ids     RO
GET    /console/message              RO
GET    /console/system               RO
`

// guarded is the API without a database and not ready: whoever is let through gets 503, or a probe.
func guarded(t *testing.T, o auth.Options, log io.Writer) http.Handler {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), "host=/nonexistent")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	a := &API{Log: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})), Pool: pool, MaxBody: 64 << 20}
	if o.JWT || o.RootKey != "" {
		if a.Auth, err = auth.New(o); err != nil {
			t.Fatal(err)
		}
	}
	return a.Handler()
}

func guards(skip ...string) auth.Options {
	return auth.Options{JWT: true, RootKey: testRoot, Algorithm: "HS256", Secret: testSecret, RolesClaim: "role", RolesArrayClaim: "roles",
		RoleAdmin: "admin", RoleReadWrite: "read-write", RoleReadOnly: "read-only", RoleWriteOnly: "write-only", OpenPaths: skip}
}

func token(t *testing.T, claims jwt.MapClaims) string {
	t.Helper()
	s, err := jwt.NewWithClaims(jwt.SigningMethodHS256, claims).SignedString([]byte(testSecret))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

var defaultSkip = []string{"/health", "/ready", "/metrics", "/metrics/prometheus"}

// Every route against every role, with and without open paths.
func TestEveryRouteEveryRole(t *testing.T) {
	t.Parallel()
	who := map[string]string{
		"nobody": "", "root": "Bearer " + testRoot, "bad": "Bearer x.y.z",
		"no role":    "Bearer " + token(t, jwt.MapClaims{"sub": "x"}),
		"other role": "Bearer " + token(t, jwt.MapClaims{"role": "superuser", "roles": []string{"reader"}}),
		"expired":    "Bearer " + token(t, jwt.MapClaims{"role": "admin", "exp": time.Now().Add(-time.Hour).Unix()}),
		"two roles":  "Bearer " + token(t, jwt.MapClaims{"role": "write-only", "roles": []string{"read-only"}}),
	}
	for _, role := range []string{"read-only", "write-only", "read-write", "admin"} {
		who[role] = "Bearer " + token(t, jwt.MapClaims{"role": role})
		who[role+" in a list"] = "Bearer " + token(t, jwt.MapClaims{"role": "superuser", "roles": []string{"x", role}})
	}
	allowed := map[string][]string{
		"RO": {"root", "read-only", "read-write", "admin", "two roles"},
		"WO": {"root", "write-only", "read-write", "admin", "two roles"},
		"RW": {"root", "read-write", "admin"},
		"AD": {"root", "admin"},
	}
	allowed["P"] = allowed["RO"] // taken off the list

	open, closed := guarded(t, guards(defaultSkip...), io.Discard), guarded(t, guards("/nothing"), io.Discard)
	off, everything := guarded(t, auth.Options{}, io.Discard), guarded(t, guards("/health", "/ready", "/metrics", "/status", "/metrics/", "/api/", "/console/"), io.Discard)
	for line := range strings.Lines(strings.TrimSpace(contractRoutes) + consoleOnly) {
		f := strings.Fields(line)
		method, path, level := f[0], f[1], f[2]
		path = strings.NewReplacer(":", "a").Replace(path)
		methods := []string{method}
		if strings.HasPrefix(path, "/health") || path == "/ready" || path == "/status" || strings.HasPrefix(path, "/metrics") {
			methods = append(methods, "HEAD")
		}
		for _, method := range methods {
			call := func(h http.Handler, credentials string) (int, string, http.Header) {
				r := httptest.NewRequest(method, path, strings.NewReader(""))
				if credentials != "" {
					r.Header.Set("Authorization", credentials)
				}
				w := httptest.NewRecorder()
				h.ServeHTTP(w, r)
				return w.Code, w.Body.String(), w.Header()
			}
			if status, body, _ := call(off, ""); status == 404 || status == 405 {
				t.Errorf("%s %s is missing: %d %s", method, path, status, body)
				continue
			}
			for name, credentials := range who {
				passed := func(h http.Handler) string {
					switch status, body, header := call(h, credentials); status {
					case 401:
						want := `{"error":"Authentication required"}`
						if name == "bad" {
							want = `{"error":"Bad token header"}`
						} else if name == "expired" {
							want = `{"error":"Token has expired"}`
						}
						if body != want || header.Get("WWW-Authenticate") != "Bearer" {
							t.Errorf("%s %s as %s: %s %v", method, path, name, body, header)
						}
						return "401"
					case 403:
						if body != `{"error":"Insufficient permissions"}` || header.Get("WWW-Authenticate") != "" {
							t.Errorf("%s %s as %s: %s %v", method, path, name, body, header)
						}
						return "403"
					}
					return "passed"
				}
				want := "passed"
				switch base := strings.TrimSuffix(name, " in a list"); {
				case base == "nobody" || base == "bad" || base == "expired":
					want = "401"
				case !slices.Contains(allowed[level], base):
					want = "403"
				}
				if got := passed(closed); got != want {
					t.Errorf("%s %s as %s, nothing is open: %s, want %s", method, path, name, got, want)
				}
				if level == "P" {
					want = "passed"
				}
				if got := passed(open); got != want {
					t.Errorf("%s %s as %s: %s, want %s", method, path, name, got, want)
				}
				if got := passed(everything); got != "passed" {
					t.Errorf("%s %s as %s, everything is open: %s", method, path, name, got)
				}
				if got := passed(off); got != "passed" {
					t.Errorf("%s %s as %s, without authentication: %s", method, path, name, got)
				}
			}
		}
	}
}

// secretOf is the secret of an API key in these tests.
func secretOf(name string) string {
	return auth.SecretPrefix + name + strings.Repeat("0", 52-len(name))
}

// Every route of /v1 against everything that a call may carry.
func TestEveryV1RouteEveryCredential(t *testing.T) {
	t.Parallel()
	keys := map[[sha256.Size]byte]*auth.Key{}
	who := map[string]string{"nobody": "", "root": "Bearer " + testRoot, "bad": "Bearer x.y.z", "no key": "Bearer " + secretOf("x"), "no secret": "Bearer fmq_x",
		"no role": "Bearer " + token(t, jwt.MapClaims{"sub": "x"})}
	for _, role := range []string{"read-only", "write-only", "read-write", "admin"} {
		who[role] = "Bearer " + token(t, jwt.MapClaims{"role": role})
	}
	key := func(name string, k auth.Key) {
		keys[sha256.Sum256([]byte(secretOf(name)))] = &k
		who[name+" key"] = "Bearer " + secretOf(name)
	}
	for i, scope := range []string{"publish", "consume", "read", "admin"} {
		key(scope, auth.Key{Project: 1, Name: "default", Scopes: 1 << i})
	}
	key("other", auth.Key{Project: 2, Name: "other", Scopes: auth.Publish | auth.Consume | auth.Read | auth.Manage})
	key("scopeless", auth.Key{Project: 1, Name: "default"})

	who["expired"] = "Bearer " + token(t, jwt.MapClaims{"role": "admin", "exp": time.Now().Add(-time.Hour).Unix()})
	allowed := map[string][]string{
		"publish": {"root", "admin", "read-write", "write-only", "publish key", "other key"},
		"consume": {"root", "admin", "read-write", "consume key", "other key"},
		"read":    {"root", "admin", "read-write", "read-only", "read key", "other key"},
		"admin":   {"root", "admin", "admin key", "other key"},
		"root":    {"root", "admin"},
	}
	refused := map[string]string{"nobody": "Authentication required", "bad": "Bad token header", "no key": "Unknown API key", "no secret": "Unknown API key", "expired": "Token has expired"}
	find := func(_ context.Context, hash [sha256.Size]byte) (*auth.Key, error) { return keys[hash], nil }
	on, off := guarded(t, guards(), io.Discard), guarded(t, auth.Options{}, io.Discard)
	on.(*API).keys, off.(*API).keys = auth.NewKeys(find), nil
	for line := range strings.Lines(strings.TrimSpace(v1Routes)) {
		f := strings.Fields(line)
		method, path, scope := f[0], strings.ReplaceAll(f[1], ":", "a"), f[2]
		call := func(h http.Handler, credentials string) *httptest.ResponseRecorder {
			r := httptest.NewRequest(method, path, strings.NewReader(""))
			if credentials != "" {
				r.Header.Set("Authorization", credentials)
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			return w
		}
		if w := call(off, ""); w.Code == 404 || w.Code == 405 {
			t.Errorf("%s %s is missing: %d %s", method, path, w.Code, w.Body)
			continue
		}
		for name, credentials := range who {
			want, text := 503, `{"error":"not ready"}`
			if why, ok := refused[name]; ok {
				want, text = 401, `{"error":"`+why+`"}`
			} else if !slices.Contains(allowed[scope], name) {
				want, text = 403, `{"error":"Insufficient permissions"}`
			}
			if w := call(on, credentials); w.Code != want || w.Body.String() != text || (w.Header().Get("WWW-Authenticate") == "Bearer") != (want == 401) {
				t.Errorf("%s %s with %s: %d %s %v, want %d", method, path, name, w.Code, w.Body, w.Header(), want)
			}
			if w := call(off, credentials); w.Code != 503 {
				t.Errorf("%s %s with %s, without authentication: %d %s", method, path, name, w.Code, w.Body)
			}
		}
	}
}

// The other API accepts no API key, whatever it may do.
func TestAPIKeysAreForV1(t *testing.T) {
	t.Parallel()
	h := guarded(t, guards(), io.Discard)
	h.(*API).keys = auth.NewKeys(func(context.Context, [sha256.Size]byte) (*auth.Key, error) {
		t.Error("a key was looked up")
		return &auth.Key{Scopes: 15}, nil
	})
	for line := range strings.Lines(strings.TrimSpace(contractRoutes)) {
		f := strings.Fields(line)
		r := httptest.NewRequest(f[0], strings.ReplaceAll(f[1], ":", "a"), unreadable{t})
		r.Header.Set("Authorization", "Bearer "+secretOf("x"))
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != 401 && w.Code != 404 && w.Code != 405 || w.Code == 401 && w.Body.String() != `{"error":"Bad token header"}` {
			t.Errorf("%s: %d %s", line, w.Code, w.Body)
		}
	}
}

// The contract knows every route that there is.
func TestNoOtherRoutes(t *testing.T) {
	t.Parallel()
	levels := map[level]string{open: "P", readOnly: "RO", writeOnly: "WO", readWrite: "RW", admin: "AD"}
	known := map[string]bool{"GET /v1/openapi.json public": true}
	scopes := map[level]string{readOnly: "read", writeOnly: "publish", readWrite: "consume", admin: "admin", root: "root", public: "public"}
	for line := range strings.Lines(contractRoutes + v1Routes + consoleOnly) {
		if f := strings.Fields(line); len(f) > 0 {
			known[strings.Join(f, " ")] = true
		}
	}
	for _, r := range (&API{}).table() {
		path := "/" + strings.Join(r.path, "/")
		names := levels
		if r.path[0] == "v1" {
			names = scopes
		}
		path = strings.NewReplacer("{", ":", "}", "").Replace(path)
		if line := r.method + " " + path + " " + names[r.level]; !known[line] {
			t.Errorf("%s is not in the contract", line)
		}
	}
}

// 404 and 405 need no token, and say the same with one.
func TestUnknownNeedsNoToken(t *testing.T) {
	t.Parallel()
	h := guarded(t, guards(defaultSkip...), io.Discard)
	for _, c := range []struct {
		method, path string
		status       int
		body         string
	}{
		{"GET", "/nope", 404, `{"error":"Not Found","code":"no_such_route"}`},
		{"GET", "/api/v1/push", 405, `{"error":"Method Not Allowed"}`},
		{"HEAD", "/api/v1/pop/queue/q", 405, `{"error":"Method Not Allowed"}`},
		{"OPTIONS", "/api/v1/push", 405, `{"error":"Method Not Allowed"}`},
		{"POST", "/health", 405, `{"error":"Method Not Allowed"}`},
	} {
		for _, credentials := range []string{"", "Bearer x", "Bearer " + testRoot} {
			r := httptest.NewRequest(c.method, c.path, nil)
			r.Header.Set("Authorization", credentials)
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			if w.Code != c.status || w.Body.String() != c.body || w.Header().Get("WWW-Authenticate") != "" {
				t.Errorf("%s %s with %q: %d %s", c.method, c.path, credentials, w.Code, w.Body)
			}
		}
	}
}

// unreadable is a body that must not be read.
type unreadable struct{ t *testing.T }

func (u unreadable) Read([]byte) (int, error) {
	u.t.Error("the body was read")
	return 0, io.EOF
}

func (u unreadable) Close() error { return nil }

// Who is not allowed in has nothing of a body read, and nothing of a token logged.
func TestRefusedEarly(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	h := guarded(t, guards(), &log)
	reader := token(t, jwt.MapClaims{"sub": "somebody", "role": "read-only"})
	signature := reader[strings.LastIndex(reader, ".")+1:]
	for credentials, want := range map[string]int{"": 401, "Bearer " + reader + "x": 401, "Bearer wrong-Secret": 401, "Bearer " + reader: 403} {
		r := httptest.NewRequest("POST", "/api/v1/push", unreadable{t})
		r.Header.Set("Authorization", credentials)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != want || w.Header().Get("Content-Type") != "application/json" {
			t.Errorf("%q: %d %s", credentials, w.Code, w.Body)
		}
		if s := w.Body.String(); strings.Contains(s, signature) || strings.Contains(s, "Secret") {
			t.Errorf("the answer shows the token: %s", s)
		}
	}
	claims := base64.RawURLEncoding.EncodeToString([]byte(`"sub"`))[:4]
	for _, secret := range []string{signature, "Secret", testRoot, testSecret, claims} {
		if strings.Contains(log.String(), secret) {
			t.Errorf("%q was logged:\n%s", secret, log.String())
		}
	}
	if n := strings.Count(log.String(), "msg=request"); n != 4 {
		t.Errorf("%d lines:\n%s", n, log.String())
	}
}

// A name says nothing to who may not see it: whatever there is, the answer is the same.
func TestRefusedAlike(t *testing.T) {
	t.Parallel()
	h := guarded(t, guards(), io.Discard)
	for _, credentials := range []string{"", "Bearer " + token(t, jwt.MapClaims{"role": "write-only"})} {
		answers := make(map[string]bool)
		for _, path := range []string{"q", "%00", strings.Repeat("x", 300), "q?batch=abc", "q?consumerGroup="} {
			r := httptest.NewRequest("GET", "/api/v1/pop/queue/"+path, nil)
			r.Header.Set("Authorization", credentials)
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			answers[fmt.Sprint(w.Code, w.Body)] = true
		}
		if len(answers) != 1 {
			t.Errorf("%q: %v", credentials, answers)
		}
	}
}
