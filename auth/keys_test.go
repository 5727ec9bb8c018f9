package auth

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// issuer answers in place of the network, so that hours pass at once.
type issuer struct {
	mu     sync.Mutex
	body   string
	status int           // 0: no answer
	takes  time.Duration // until the answer
	asked  int
}

func (i *issuer) RoundTrip(r *http.Request) (*http.Response, error) {
	i.mu.Lock()
	i.asked++
	body, status, takes := i.body, i.status, i.takes
	i.mu.Unlock()
	select {
	case <-time.After(takes):
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	if status == 0 {
		return nil, errors.New("connection refused")
	}
	return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(body)), Request: r, Header: http.Header{}}, nil
}

func (i *issuer) set(status int, keys ...string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.status, i.body = status, `{"keys":[`+strings.Join(keys, ",")+`]}`
}

func (i *issuer) count() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.asked
}

func b64(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

// jwk is a public key as a JWK, with more members if given.
func jwk(t testing.TB, key any, more ...string) string {
	t.Helper()
	var s string
	switch k := key.(type) {
	case *rsa.PublicKey:
		s = fmt.Sprintf(`{"kty":"RSA","n":%q,"e":%q`, b64(k.N.Bytes()), b64(big.NewInt(int64(k.E)).Bytes()))
	case ed25519.PublicKey:
		s = fmt.Sprintf(`{"kty":"OKP","crv":"Ed25519","x":%q`, b64(k))
	case *ecdsa.PublicKey:
		point, err := k.Bytes() // 4, x, y
		if err != nil {
			t.Fatal(err)
		}
		half := len(point) / 2
		s = fmt.Sprintf(`{"kty":"EC","crv":%q,"x":%q,"y":%q`, k.Curve.Params().Name, b64(point[1:1+half]), b64(point[1+half:]))
	}
	return s + strings.Join(append([]string{""}, more...), ",") + "}"
}

// fetching is a verifier whose keys come from an issuer.
func fetching(t *testing.T, i *issuer, log io.Writer) *Verifier {
	t.Helper()
	o := defaults()
	o.Algorithm, o.JWKSURL = "auto", "https://user:Secret@issuer.example/keys?x=Secret"
	v := verifier(t, o)
	v.set.client.Transport = i
	v.Start(slog.New(slog.NewTextHandler(log, nil)))
	t.Cleanup(v.Close)
	return v
}

func TestKeySet(t *testing.T) {
	k := keys()
	rs := func(more ...string) string {
		return sign(t, header("RS256", more...), `{"role":"admin"}`, jwt.SigningMethodRS256, k.rsa)
	}
	rs2 := func(more ...string) string {
		return sign(t, header("RS384", more...), `{}`, jwt.SigningMethodRS384, k.rsa2)
	}
	ed := func(more ...string) string {
		return sign(t, header("EdDSA", more...), `{}`, jwt.SigningMethodEdDSA, k.ed)
	}
	ec := func(more ...string) string {
		return sign(t, header("ES256", more...), `{}`, jwt.SigningMethodES256, k.p256)
	}
	for name, c := range map[string]struct {
		set  []string
		want map[string]error // by token
	}{
		"by kid": {
			[]string{jwk(t, k.rsa.Public(), `"kid":"a"`), jwk(t, k.rsa2.Public(), `"kid":"b"`), jwk(t, k.ed.Public(), `"kid":"c"`), jwk(t, k.p256.Public(), `"kid":"d"`)},
			map[string]error{rs(`"kid":"a"`): nil, rs2(`"kid":"b"`): nil, ed(`"kid":"c"`): nil, ec(`"kid":"d"`): nil,
				rs(`"kid":"b"`): ErrSignature, rs(`"kid":"c"`): ErrSignature, ec(`"kid":"c"`): ErrSignature, rs(`"kid":"A"`): ErrKeyID, rs(`"kid":"e"`): ErrKeyID},
		},
		"without kid the first that fits": {
			[]string{jwk(t, k.p256.Public(), `"kid":"x"`), jwk(t, k.rsa.Public()), jwk(t, k.rsa2.Public()), jwk(t, k.ed.Public(), `"kid":"y"`)},
			map[string]error{rs(): nil, rs(`"kid":""`): nil, rs2(): ErrSignature, ed(): nil, ec(): nil, rs(`"kid":"x"`): ErrSignature, rs(`"kid":"z"`): ErrKeyID},
		},
		"one kid for keys of several kinds": {
			[]string{jwk(t, k.ed.Public(), `"kid":"a"`), jwk(t, k.rsa.Public(), `"kid":"a"`)},
			map[string]error{rs(`"kid":"a"`): nil, ed(`"kid":"a"`): nil, ec(`"kid":"a"`): ErrSignature},
		},
		"what is said about a key": {
			[]string{jwk(t, k.rsa2.Public(), `"use":"enc"`), jwk(t, k.rsa2.Public(), `"alg":"RSA-OAEP-256"`), jwk(t, k.rsa2.Public(), `"alg":"PS256"`),
				jwk(t, k.rsa.Public(), `"use":"sig"`, `"alg":"RS256"`, `"key_ops":["verify"]`), jwk(t, k.ed.Public(), `"alg":"Ed25519"`), jwk(t, k.p256.Public(), `"alg":"ES256"`)},
			map[string]error{rs(): nil, rs2(): ErrSignature, ed(): nil, ec(): nil},
		},
		"what is no key of ours": {
			[]string{`{"kty":"oct","k":"c2VjcmV0"}`, `{}`, `7`, `"x"`, `{"kty":"RSA"}`, `{"kty":"RSA","n":"AQ","e":"AQAB"}`, `{"kty":"OKP","crv":"X25519","x":"` + b64(make([]byte, 32)) + `"}`,
				`{"kty":"EC","crv":"P-256","x":"AQ","y":"AQ"}`, `{"kty":"new"}`, jwk(t, k.p384.Public()), jwk(t, k.ed.Public(), `"kid":7`), jwk(t, k.p256.Public(), `"kid":"last"`)},
			map[string]error{ec(): nil, ec(`"kid":"last"`): nil, ed(): ErrKeyID, rs(): ErrKeyID,
				sign(t, header("HS256"), `{}`, jwt.SigningMethodHS256, []byte("secret")): ErrAlgorithm},
		},
		"empty": {nil, map[string]error{rs(): ErrKeyID, rs(`"kid":"a"`): ErrKeyID}},
	} {
		synctest.Test(t, func(t *testing.T) {
			i := &issuer{}
			i.set(200, c.set...)
			v := fetching(t, i, io.Discard)
			for token, want := range c.want {
				h, _ := base64.RawURLEncoding.DecodeString(strings.Split(token, ".")[0])
				if _, err := ask(t, v, token); err != want {
					t.Errorf("%s: %s: %v, want %v", name, h, err, want)
				}
			}
		})
	}
}

// A miss fetches the keys, at most every 5 s, and those who miss at once share it.
func TestKeySetMiss(t *testing.T) {
	k := keys()
	synctest.Test(t, func(t *testing.T) {
		i := &issuer{takes: time.Second}
		i.set(200, jwk(t, k.rsa.Public(), `"kid":"old"`))
		v := fetching(t, i, io.Discard)
		old := sign(t, header("RS256", `"kid":"old"`), `{"sub":"x"}`, jwt.SigningMethodRS256, k.rsa)
		fresh := sign(t, header("RS256", `"kid":"new"`), `{"sub":"x"}`, jwt.SigningMethodRS256, k.rsa2)
		// Requests that come before the first answer wait for it, and a gone client does not end that.
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := v.Authenticate(gone, []string{old}, nil); err != ErrKeyID {
			t.Error(err)
		}
		var wait sync.WaitGroup
		for range 20 {
			wait.Go(func() {
				if _, err := ask(t, v, old); err != nil {
					t.Error(err)
				}
			})
		}
		wait.Wait()
		if n := i.count(); n != 1 {
			t.Errorf("asked %d times at the start", n)
		}
		i.set(200, jwk(t, k.rsa2.Public(), `"kid":"new"`))
		for range 49 { // until 4.9 s after that
			if _, err := ask(t, v, fresh); err != ErrKeyID {
				t.Fatalf("%v before 5 s are over", err)
			}
			time.Sleep(100 * time.Millisecond)
		}
		if _, err := ask(t, v, old); err != nil {
			t.Error("forgotten too soon:", err)
		}
		time.Sleep(100 * time.Millisecond)
		for range 20 {
			wait.Go(func() {
				if _, err := ask(t, v, fresh); err != nil {
					t.Error(err)
				}
			})
		}
		wait.Wait()
		if n := i.count(); n != 2 {
			t.Errorf("asked %d times", n)
		}
		// The old key is gone, and so is what was remembered of its tokens.
		if _, err := ask(t, v, old); err != ErrKeyID {
			t.Error("revoked:", err)
		}
	})
}

// Without a request that misses, keys are fetched every interval: a revoked key is refused from then on.
func TestKeySetInterval(t *testing.T) {
	k := keys()
	synctest.Test(t, func(t *testing.T) {
		i := &issuer{}
		i.set(200, jwk(t, k.rsa.Public(), `"kid":"a"`))
		v := fetching(t, i, io.Discard)
		token := sign(t, header("RS256", `"kid":"a"`), `{}`, jwt.SigningMethodRS256, k.rsa)
		if _, err := ask(t, v, token); err != nil {
			t.Error(err)
		}
		i.set(200)
		time.Sleep(v.set.interval - time.Second)
		if _, err := ask(t, v, token); err != nil || i.count() != 1 {
			t.Errorf("%v, asked %d times", err, i.count())
		}
		time.Sleep(2 * time.Second)
		if _, err := ask(t, v, token); err != ErrKeyID || i.count() != 2 {
			t.Errorf("%v, asked %d times", err, i.count())
		}
	})
}

// While the URL does not answer, the keys there are stay, and it is tried again soon; what is logged holds no secret.
func TestKeySetUnreachable(t *testing.T) {
	k := keys()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		i := &issuer{}
		v := fetching(t, i, &log)
		token := sign(t, header("RS256", `"kid":"a"`), `{}`, jwt.SigningMethodRS256, k.rsa)
		if _, err := ask(t, v, token); err != ErrKeyID {
			t.Error(err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := i.count(); n < 10 || n > 14 {
			t.Errorf("tried %d times in a minute", n)
		}
		i.set(200, jwk(t, k.rsa.Public(), `"kid":"a"`))
		time.Sleep(missInterval)
		synctest.Wait()
		before := i.count()
		if _, err := ask(t, v, token); err != nil || i.count() != before {
			t.Error("it answers by now:", err)
		}
		for _, answer := range []struct {
			status int
			body   string
		}{{0, ""}, {500, `{"keys":[]}`}, {404, ""}, {200, ""}, {200, "<html>"}, {200, "{}"}, {200, `{"keys":null}`}, {200, `{"keys":7}`}, {200, "[]"}, {200, `{"keys":[]} ` + "x"}, {301, ""}} {
			i.mu.Lock()
			i.status, i.body = answer.status, answer.body
			i.mu.Unlock()
			time.Sleep(v.set.interval + time.Second)
			synctest.Wait()
			if _, err := ask(t, v, token); err != nil {
				t.Errorf("after %+v: %v", answer, err)
			}
		}
		// One that takes too long is given up.
		i.mu.Lock()
		i.takes = time.Hour
		i.mu.Unlock()
		time.Sleep(v.set.interval + time.Second)
		began := time.Now()
		if _, err := ask(t, v, sign(t, header("RS256", `"kid":"b"`), `{}`, jwt.SigningMethodRS256, k.rsa)); err != ErrKeyID || time.Since(began) > 6*time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		v.Close()
		s := log.String()
		if strings.Contains(s, "Secret") || strings.Contains(s, "user") {
			t.Errorf("logged a secret:\n%s", s)
		}
		if warned, told := strings.Count(s, "cannot be fetched"), strings.Count(s, "keys fetched"); warned != 2 || told != 1 || !strings.Contains(s, "host=issuer.example") {
			t.Errorf("%d warnings, %d good news:\n%s", warned, told, s)
		}
	})
}

// Over a real connection: Close ends a fetch under way and leaves nothing behind, redirects stay on https, answers are bounded.
func TestKeySetHTTP(t *testing.T) {
	t.Parallel()
	k := keys()
	set := `{"keys":[` + jwk(t, k.rsa.Public(), `"kid":"a"`) + `]}`
	var plain, secure *httptest.Server
	var hung atomic.Bool
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/keys":
			if user, password, _ := r.BasicAuth(); user != "" && (user != "u" || password != "p") {
				w.WriteHeader(401)
			}
			io.WriteString(w, set)
		case "/to":
			http.Redirect(w, r, "/keys", http.StatusFound)
		case "/down":
			http.Redirect(w, r, plain.URL+"/keys", http.StatusFound)
		case "/round":
			http.Redirect(w, r, "/round", http.StatusFound)
		case "/large":
			io.WriteString(w, set[:len(set)-2])
			for range maxKeySet / 16 {
				if _, err := io.WriteString(w, ",{\"kty\":\"none\"} "); err != nil {
					return
				}
			}
			io.WriteString(w, "]}")
		case "/hang":
			hung.Store(true)
			<-r.Context().Done()
		}
	})
	plain, secure = httptest.NewServer(handler), httptest.NewTLSServer(handler)
	defer plain.Close()
	defer secure.Close()
	token := sign(t, header("RS256", `"kid":"a"`), `{}`, jwt.SigningMethodRS256, k.rsa)
	for url, want := range map[string]error{
		plain.URL + "/keys": nil, plain.URL + "/to": nil, secure.URL + "/keys": nil, secure.URL + "/to": nil,
		strings.Replace(plain.URL, "://", "://u:p@", 1) + "/keys": nil, strings.Replace(plain.URL, "://", "://u:x@", 1) + "/keys": ErrKeyID,
		secure.URL + "/down": ErrKeyID, plain.URL + "/round": ErrKeyID, plain.URL + "/large": ErrKeyID, plain.URL + "/hang": ErrKeyID, "http://127.0.0.1:1/": ErrKeyID,
	} {
		o := defaults()
		o.Algorithm, o.JWKSURL, o.Timeout = "RS256", url, time.Minute
		v := verifier(t, o)
		v.set.client.Transport.(*http.Transport).TLSClientConfig = secure.Client().Transport.(*http.Transport).TLSClientConfig
		v.Start(slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		if strings.HasSuffix(url, "/hang") {
			go func() {
				for !hung.Load() {
					time.Sleep(time.Millisecond)
				}
				cancel()
			}()
		}
		if _, err := v.Authenticate(ctx, []string{token}, nil); err != want {
			t.Errorf("%s: %v, want %v", url, err, want)
		}
		v.Close()
		cancel()
		if _, err := ask(t, v, sign(t, header("RS256", `"kid":"b"`), `{}`, jwt.SigningMethodRS256, k.rsa)); err != ErrKeyID {
			t.Errorf("%s closed: %v", url, err)
		}
	}
}
