package auth

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const hsSecret = "a secret of the tests, long enough"

// Keys are made once: RSA keys take a while.
var keys = sync.OnceValue(func() (k struct {
	rsa, rsa2  *rsa.PrivateKey
	ed         ed25519.PrivateKey
	p256, p384 *ecdsa.PrivateKey
}) {
	must := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	var err error
	k.rsa, err = rsa.GenerateKey(rand.Reader, 2048)
	must(err)
	k.rsa2, err = rsa.GenerateKey(rand.Reader, 2048)
	must(err)
	_, k.ed, err = ed25519.GenerateKey(rand.Reader)
	must(err)
	k.p256, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	k.p384, err = ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	must(err)
	return k
})

func publicPEM(t testing.TB, key any) string {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
}

// defaults are the options as a broker with JWT_ENABLED has them.
func defaults() Options {
	return Options{JWT: true, Algorithm: "HS256", RefreshInterval: time.Hour, Timeout: 5 * time.Second, ClockSkew: 30 * time.Second,
		RolesClaim: "role", RolesArrayClaim: "roles",
		RoleAdmin: "admin", RoleReadWrite: "read-write", RoleReadOnly: "read-only", RoleWriteOnly: "write-only"}
}

func verifier(t testing.TB, o Options) *Verifier {
	t.Helper()
	v, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// header is the JSON of a token's header, with more members if given.
func header(alg string, more ...string) string {
	return `{"alg":"` + alg + `","typ":"JWT"` + strings.Join(append([]string{""}, more...), ",") + `}`
}

// sign makes a token from a header and claims as they stand.
func sign(t testing.TB, header, claims string, method jwt.SigningMethod, key any) string {
	t.Helper()
	text := base64.RawURLEncoding.EncodeToString([]byte(header)) + "." + base64.RawURLEncoding.EncodeToString([]byte(claims))
	if method == nil {
		return text + "."
	}
	signature, err := method.Sign(text, key)
	if err != nil {
		t.Fatal(err)
	}
	return text + "." + base64.RawURLEncoding.EncodeToString(signature)
}

func hs256(t testing.TB, claims string) string {
	return sign(t, header("HS256"), claims, jwt.SigningMethodHS256, []byte(hsSecret))
}

// ask authenticates one header.
func ask(t testing.TB, v *Verifier, h string) (Identity, error) {
	t.Helper()
	return v.Authenticate(t.Context(), []string{h}, nil)
}

func TestHeader(t *testing.T) {
	t.Parallel()
	o := defaults()
	o.Secret, o.RootKey = hsSecret, "root-Key.1/2+3="
	v := verifier(t, o)
	o.JWT = false
	rootOnly := verifier(t, o)
	token := hs256(t, `{"sub":"me","role":"read-only"}`)
	me, root := Identity{Subject: "me", Roles: ReadOnly}, Identity{Roles: Admin}
	for _, c := range []struct {
		headers []string
		id      Identity
		err     error
		without error // when only the root key counts
	}{
		{headers: nil, err: ErrRequired, without: ErrRequired},
		{headers: []string{""}, err: ErrRequired, without: ErrRequired},
		{headers: []string{" \t"}, err: ErrRequired, without: ErrRequired},
		{headers: []string{"Bearer"}, err: ErrRequired, without: ErrRequired},
		{headers: []string{"bearer "}, err: ErrRequired, without: ErrRequired},
		{headers: []string{"Bearer " + token}, id: me, without: ErrHeader},
		{headers: []string{"bearer " + token}, id: me, without: ErrHeader},
		{headers: []string{"BEARER   " + token + " "}, id: me, without: ErrHeader},
		{headers: []string{token}, id: me, without: ErrHeader},
		{headers: []string{"Bearer " + o.RootKey}, id: root},
		{headers: []string{"bEaReR " + o.RootKey}, id: root},
		{headers: []string{o.RootKey}, id: root},
		{headers: []string{"Bearer " + o.RootKey + "x"}, err: ErrHeader, without: ErrHeader},
		{headers: []string{"Bearer " + o.RootKey[1:]}, err: ErrHeader, without: ErrHeader},
		{headers: []string{"Bearer " + strings.ToUpper(o.RootKey)}, err: ErrHeader, without: ErrHeader},
		{headers: []string{"Bearer Bearer " + token}, err: ErrHeader, without: ErrHeader},
		{headers: []string{"Basic " + o.RootKey}, err: ErrHeader, without: ErrHeader},
		{headers: []string{"Basic " + token}, err: ErrHeader, without: ErrHeader},
		{headers: []string{"Token " + token}, err: ErrHeader, without: ErrHeader},
		{headers: []string{"Bearer\t" + token}, err: ErrHeader, without: ErrHeader},
		{headers: []string{"Bearer fmq_0123456789abcdef"}, err: ErrHeader, without: ErrHeader},
		{headers: []string{"fmq_0123456789abcdef"}, err: ErrHeader, without: ErrHeader},
		{headers: []string{"Bearer " + token, "Bearer " + token}, err: ErrHeader, without: ErrHeader},
		{headers: []string{"", "Bearer " + token}, err: ErrHeader, without: ErrHeader},
		{headers: []string{"Bearer " + o.RootKey, "Bearer " + o.RootKey}, err: ErrHeader, without: ErrHeader},
	} {
		if id, err := v.Authenticate(t.Context(), c.headers, nil); id != c.id || err != c.err {
			t.Errorf("%q: %+v, %v; want %+v, %v", c.headers, id, err, c.id, c.err)
		}
		want := c.id
		if c.without != nil {
			want = Identity{}
		}
		if id, err := rootOnly.Authenticate(t.Context(), c.headers, nil); id != want || err != c.without {
			t.Errorf("without tokens, %q: %+v, %v; want %+v, %v", c.headers, id, err, want, c.without)
		}
	}
	o.JWT, o.RootKey = true, ""
	if id, err := ask(t, verifier(t, o), "Bearer "+rootOnly.o.RootKey); err != ErrHeader {
		t.Errorf("no root key: %+v, %v", id, err)
	}
}

// What does not look like a token, or like one of ours.
func TestMalformed(t *testing.T) {
	t.Parallel()
	o := defaults()
	o.Secret = hsSecret
	v := verifier(t, o)
	good := hs256(t, `{}`)
	parts := strings.Split(good, ".")
	signed := func(h, claims string) string { return sign(t, h, claims, jwt.SigningMethodHS256, []byte(hsSecret)) }
	for token, want := range map[string]error{
		good:                          nil,
		"x":                           ErrHeader,
		".":                           ErrHeader,
		"..":                          ErrHeader,
		parts[0] + "." + parts[1]:     ErrHeader,
		good + ".":                    ErrHeader,
		good + ".x.y":                 ErrHeader, // an encrypted token has five parts
		"!!!." + parts[1] + ".x":      ErrHeader,
		parts[0] + "=." + parts[1]:    ErrHeader,
		signed(`[]`, `{}`):            ErrHeader,
		signed(`null`, `{}`):          ErrAlgorithm,
		signed(`{"alg":7}`, `{}`):     ErrHeader,
		signed(`{"alg":"HS256",`, ``): ErrHeader,
		signed(`{"alg":"HS256","alg":"HS256"}`, `{}`):                              ErrHeader,
		signed(header("HS256", `"crit":["exp"]`), `{}`):                            ErrHeader,
		signed(header("HS256", `"kid":7`), `{}`):                                   ErrHeader,
		signed(header("HS256", `"kid":"anything"`), `{}`):                          nil,
		signed(header("HS256", `"jku":"https://elsewhere","jwk":{}`), `{}`):        nil, // not looked at
		signed(`{"typ":"JWT"}`, `{}`):                                              ErrAlgorithm,
		signed(`{"ALG":"HS256"}`, `{}`):                                            ErrAlgorithm,
		signed(header("hs256"), `{}`):                                              ErrAlgorithm,
		signed(header("HS999"), `{}`):                                              ErrAlgorithm,
		signed(header("none"), `{}`):                                               ErrAlgorithm,
		sign(t, header("none"), `{"role":"admin"}`, nil, nil):                      ErrAlgorithm,
		sign(t, header("None"), `{"role":"admin"}`, nil, nil):                      ErrAlgorithm,
		sign(t, header(""), `{"role":"admin"}`, nil, nil):                          ErrAlgorithm,
		sign(t, header("HS256"), `{"role":"admin"}`, nil, nil):                     ErrSignature,
		parts[0] + "." + parts[1] + ".!!!":                                         ErrSignature,
		good + "A":                                                                 ErrSignature,
		good[:len(good)-4]:                                                         ErrSignature,
		signed(header("HS256"), `[]`):                                              ErrHeader,
		signed(header("HS256"), `null`):                                            ErrHeader,
		signed(header("HS256"), `{`):                                               ErrHeader,
		signed(header("HS256"), `{"a":1,"a":2}`):                                   ErrHeader,
		signed(header("HS256"), `{"sub":"`+strings.Repeat("s", maxSubject)+`"}`):   nil,
		signed(header("HS256"), `{"sub":"`+strings.Repeat("s", maxSubject+1)+`"}`): ErrHeader,
		signed(header("HS256"), `{"pad":"`+strings.Repeat("s", 11<<10)+`"}`):       nil,
		signed(header("HS256"), `{"pad":"`+strings.Repeat("s", 100<<10)+`"}`):      ErrHeader,
	} {
		if _, err := ask(t, v, "Bearer "+token); err != want {
			t.Errorf("%.200s: %v, want %v", token, err, want)
		}
	}
	// Any other claims under the same signature.
	other := base64.RawURLEncoding.EncodeToString([]byte(`{"role":"admin"}`))
	if _, err := ask(t, v, parts[0]+"."+other+"."+parts[2]); err != ErrSignature {
		t.Errorf("other claims: %v", err)
	}
}

// Each setting of the algorithm, with all keys configured, against a token of each algorithm.
func TestAlgorithms(t *testing.T) {
	t.Parallel()
	k := keys()
	tokens := map[string]string{}
	for _, m := range []jwt.SigningMethod{jwt.SigningMethodHS256, jwt.SigningMethodHS384, jwt.SigningMethodHS512} {
		tokens[m.Alg()] = sign(t, header(m.Alg()), `{}`, m, []byte(hsSecret))
	}
	for _, m := range []jwt.SigningMethod{jwt.SigningMethodRS256, jwt.SigningMethodRS384, jwt.SigningMethodRS512, jwt.SigningMethodPS256} {
		tokens[m.Alg()] = sign(t, header(m.Alg()), `{}`, m, k.rsa)
	}
	tokens["EdDSA"] = sign(t, header("EdDSA"), `{}`, jwt.SigningMethodEdDSA, k.ed)
	tokens["ES256"] = sign(t, header("ES256"), `{}`, jwt.SigningMethodES256, k.p256)
	tokens["ES384"] = sign(t, header("ES384"), `{}`, jwt.SigningMethodES384, k.p384)
	rsaPEM, edPEM, ecPEM := publicPEM(t, k.rsa.Public()), publicPEM(t, k.ed.Public()), publicPEM(t, k.p256.Public())
	for _, c := range []struct{ setting, pem, secret, accepts string }{
		{"HS256", "", hsSecret, "HS256"},
		{"HS384", "", hsSecret, "HS384"},
		{"HS512", rsaPEM, hsSecret, "HS512"},
		{"RS256", rsaPEM, hsSecret, "RS256 RS384 RS512"},
		{"RS384", rsaPEM, "", "RS384"},
		{"RS512", rsaPEM, "", "RS512"},
		{"EdDSA", edPEM, hsSecret, "EdDSA"},
		{"ES256", ecPEM, "", "ES256"},
		{"auto", "", hsSecret, "HS256 HS384 HS512"},
		{"auto", rsaPEM, "", "RS256 RS384 RS512"},
		{"auto", rsaPEM, hsSecret, "HS256 HS384 HS512 RS256 RS384 RS512"},
		{"auto", edPEM, "", "EdDSA"},
		{"auto", ecPEM, hsSecret, "HS256 HS384 HS512 ES256"},
	} {
		o := defaults()
		o.Algorithm, o.PublicKey, o.Secret = c.setting, c.pem, c.secret
		v := verifier(t, o)
		accepts := strings.Fields(c.accepts)
		for alg, token := range tokens {
			var want error
			if !slices.Contains(accepts, alg) {
				want = ErrAlgorithm
			}
			if _, err := ask(t, v, token); err != want {
				t.Errorf("%s (%.40q, %q): %s: %v, want %v", c.setting, c.pem, c.secret, alg, err, want)
			}
		}
	}
}

// A public key, which is no secret, must never do as one.
func TestAlgorithmConfusion(t *testing.T) {
	t.Parallel()
	k := keys()
	for _, public := range []any{k.rsa.Public(), k.ed.Public(), k.p256.Public()} {
		o := defaults()
		o.Algorithm, o.PublicKey = "auto", publicPEM(t, public)
		withoutSecret := verifier(t, o)
		o.Secret = hsSecret
		withSecret := verifier(t, o)
		der, err := x509.MarshalPKIXPublicKey(public)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range [][]byte{[]byte(o.PublicKey), []byte(strings.TrimSpace(o.PublicKey)), der, {}} {
			forged := sign(t, header("HS256"), `{"role":"admin"}`, jwt.SigningMethodHS256, s)
			if _, err := ask(t, withoutSecret, forged); err != ErrAlgorithm {
				t.Errorf("%T without a secret: %v", public, err)
			}
			if _, err := ask(t, withSecret, forged); err != ErrSignature {
				t.Errorf("%T with a secret: %v", public, err)
			}
		}
	}
	// A signature by another key of the same kind, and one that is moved to another algorithm.
	o := defaults()
	o.Algorithm, o.PublicKey = "RS256", publicPEM(t, k.rsa.Public())
	v := verifier(t, o)
	if _, err := ask(t, v, sign(t, header("RS256"), `{}`, jwt.SigningMethodRS256, k.rsa2)); err != ErrSignature {
		t.Errorf("another key: %v", err)
	}
	if _, err := ask(t, v, sign(t, header("RS512"), `{}`, jwt.SigningMethodRS256, k.rsa)); err != ErrSignature {
		t.Errorf("another hash: %v", err)
	}
}

func TestClaims(t *testing.T) {
	t.Parallel()
	const now = 1_800_000_000
	type C struct {
		claims string
		want   error
	}
	run := func(o Options, at time.Time, cases []C) {
		t.Helper()
		o.Secret = hsSecret
		v := verifier(t, o)
		v.now = func() time.Time { return at }
		for _, c := range cases {
			token := hs256(t, c.claims)
			for range 2 { // the second time it is remembered
				if _, err := ask(t, v, token); err != c.want {
					t.Errorf("%s at %d.%09d: %v, want %v", c.claims, at.Unix(), at.Nanosecond(), err, c.want)
				}
			}
		}
	}
	o := defaults()
	at := time.Unix(now, 0)
	run(o, at, []C{ // 30 s of skew
		{`{}`, nil},
		{`{"exp":null,"nbf":null,"iat":null,"sub":null,"iss":null,"aud":null}`, nil},
		{`{"exp":1799999971}`, nil},
		{`{"exp":1799999970}`, ErrExpired}, // valid until just before exp + skew
		{`{"exp":1799999970.5}`, nil},
		{`{"exp":1799999969.999}`, ErrExpired},
		{`{"exp":1.799999971e9}`, nil},
		{`{"exp":0}`, ErrExpired},
		{`{"exp":-1}`, ErrExpired},
		{`{"exp":1e300}`, nil},
		{`{"exp":9223372036854775807}`, nil},
		{`{"exp":18446744073709551616}`, nil},
		{`{"exp":1e999}`, ErrExpired},
		{`{"exp":"1899999999"}`, ErrExpired},
		{`{"exp":true}`, ErrExpired},
		{`{"exp":{}}`, ErrExpired},
		{`{"EXP":0}`, nil},
		{`{"nbf":1800000030}`, nil}, // from nbf - skew on
		{`{"nbf":1800000030.001}`, ErrNotYet},
		{`{"nbf":1800000031}`, ErrNotYet},
		{`{"nbf":"x"}`, ErrNotYet},
		{`{"nbf":-1e300}`, nil},
		{`{"iat":1800000030}`, nil},
		{`{"iat":1800000030.5}`, ErrFuture},
		{`{"iat":1800000031}`, ErrFuture},
		{`{"iat":[]}`, ErrFuture},
		{`{"iat":1,"nbf":1,"exp":1900000000}`, nil},
		{`{"iss":7,"aud":7}`, nil}, // not asked for
	})
	run(o, at.Add(999*time.Millisecond), []C{{`{"exp":1799999971}`, nil}, {`{"nbf":1800000031}`, ErrNotYet}})
	run(o, at.Add(time.Second), []C{{`{"exp":1799999971}`, ErrExpired}, {`{"nbf":1800000031}`, nil}})
	o.ClockSkew = 0
	run(o, at, []C{
		{`{"exp":1800000000}`, ErrExpired}, {`{"exp":1800000000.25}`, nil}, {`{"exp":1800000001}`, nil},
		{`{"nbf":1800000000}`, nil}, {`{"nbf":1800000000.25}`, ErrNotYet},
		{`{"iat":1800000000}`, nil}, {`{"iat":1800000001}`, ErrFuture},
	})
	o.Issuer, o.Audience = "https://issuer", "ferrymq"
	run(o, at, []C{
		{`{"iss":"https://issuer","aud":"ferrymq"}`, nil},
		{`{"iss":"https://issuer","aud":["other","ferrymq"]}`, nil},
		{`{"iss":"https://issuer","aud":[7,null,"ferrymq"]}`, nil},
		{`{"iss":"https://issuer","aud":["other"]}`, ErrAudience},
		{`{"iss":"https://issuer","aud":"other"}`, ErrAudience},
		{`{"iss":"https://issuer","aud":"ferrymq,other"}`, ErrAudience},
		{`{"iss":"https://issuer","aud":[]}`, ErrAudience},
		{`{"iss":"https://issuer","aud":7}`, ErrAudience},
		{`{"iss":"https://issuer"}`, ErrAudience},
		{`{"iss":"https://issuer/","aud":"ferrymq"}`, ErrIssuer},
		{`{"iss":["https://issuer"],"aud":"ferrymq"}`, ErrIssuer},
		{`{"iss":null,"aud":"ferrymq"}`, ErrIssuer},
		{`{"aud":"ferrymq"}`, ErrIssuer},
		// Of several errors: exp, nbf, iat, iss, aud.
		{`{"exp":1,"nbf":1900000000,"iat":1900000000,"iss":"x","aud":"x"}`, ErrExpired},
		{`{"nbf":1900000000,"iat":1900000000,"iss":"x","aud":"x"}`, ErrNotYet},
		{`{"iat":1900000000,"iss":"x","aud":"x"}`, ErrFuture},
		{`{"iss":"x","aud":"x"}`, ErrIssuer},
	})
	// And before all of them header, algorithm and signature.
	o.Secret = hsSecret
	v := verifier(t, o)
	if _, err := ask(t, v, sign(t, header("HS512"), `{"exp":1}`, jwt.SigningMethodHS256, []byte("wrong"))); err != ErrAlgorithm {
		t.Error(err)
	}
	if _, err := ask(t, v, sign(t, header("HS256"), `{"exp":1}`, jwt.SigningMethodHS256, []byte("wrong"))); err != ErrSignature {
		t.Error(err)
	}
}

func TestRoles(t *testing.T) {
	t.Parallel()
	o := defaults()
	o.Secret = hsSecret
	renamed := o
	renamed.RolesClaim, renamed.RolesArrayClaim = "https://x/role", "groups"
	renamed.RoleAdmin, renamed.RoleReadWrite, renamed.RoleReadOnly, renamed.RoleWriteOnly = "ops", "worker", "viewer", "producer"
	for _, c := range []struct {
		o      Options
		claims string
		want   Role
	}{
		{o, `{}`, 0},
		{o, `{"role":"admin"}`, Admin},
		{o, `{"role":"read-write"}`, ReadWrite},
		{o, `{"role":"read-only"}`, ReadOnly},
		{o, `{"role":"write-only"}`, WriteOnly},
		{o, `{"role":"Admin"}`, 0},
		{o, `{"role":"admin "}`, 0},
		{o, `{"role":""}`, 0},
		{o, `{"role":["admin"]}`, 0},
		{o, `{"role":null,"roles":null}`, 0},
		{o, `{"roles":"admin"}`, 0},
		{o, `{"roles":["admin"]}`, Admin},
		{o, `{"roles":["x","read-only","write-only",7,null,["admin"]]}`, ReadOnly | WriteOnly},
		{o, `{"roles":[]}`, 0},
		{o, `{"role":"write-only","roles":["read-only"]}`, WriteOnly | ReadOnly},
		{o, `{"role":"nobody","roles":["read-only"]}`, ReadOnly},
		{renamed, `{"role":"admin","roles":["admin"]}`, 0},
		{renamed, `{"https://x/role":"ops"}`, Admin},
		{renamed, `{"https://x/role":"admin"}`, 0},
		{renamed, `{"groups":["worker","viewer"],"https://x/role":"producer"}`, ReadWrite | ReadOnly | WriteOnly},
	} {
		if id, err := ask(t, verifier(t, c.o), hs256(t, c.claims)); err != nil || id.Roles != c.want {
			t.Errorf("%s: %b, %v; want %b", c.claims, id.Roles, err, c.want)
		}
	}
}

func TestSubject(t *testing.T) {
	t.Parallel()
	o := defaults()
	o.Secret = hsSecret
	v := verifier(t, o)
	for claims, want := range map[string]string{
		`{"sub":"service-7"}`: "service-7", `{"sub":"\u00e9\ud83d\ude00\"\\"}`: "é😀\"\\", `{"sub":""}`: "", `{"sub":null}`: "", `{"sub":7}`: "", `{}`: "",
	} {
		if id, err := ask(t, v, hs256(t, claims)); err != nil || id.Subject != want {
			t.Errorf("%s: %q, %v; want %q", claims, id.Subject, err, want)
		}
	}
}

func TestOpen(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ list, open, closed string }{
		{"/health,/ready,/metrics,/metrics/prometheus", "/health /ready /metrics /metrics/prometheus", "/status /health/x /api/v1/push /metrics/other"},
		{"", "", "/health /ready"},
		{",", "", "/health /ready"},
		{"/", "", "/health /api/v1/push"},
		{" /health , /status ", "/health /status", "/ready"},
		{"/metrics/", "/metrics/prometheus /metrics/x/y", "/metrics /metricsx /health"},
		{"/api/v1/pop/queue/a/", "/api/v1/pop/queue/a/partition/b", "/api/v1/pop/queue/a /api/v1/pop/queue/a%2Fpartition%2Fb /api/v1/pop/queue/ab /api/v1/pop/queue/b/partition/a"},
		{"/api/v1/pop/queue/a", "/api/v1/pop/queue/a", "/api/v1/pop/queue/b"},
		{"/api/", "/api/v1/push /api/v1/pop", "/health"},
	} {
		o := Options{Algorithm: "HS256", OpenPaths: strings.Split(c.list, ",")}
		v := verifier(t, o)
		for want, paths := range map[bool]string{true: c.open, false: c.closed} {
			for _, p := range strings.Fields(paths) {
				segments := strings.Split(p[1:], "/")
				for i := range segments {
					segments[i] = strings.ReplaceAll(segments[i], "%2F", "/")
				}
				if got := v.Open(segments); got != want {
					t.Errorf("list %q, path %s: %v", c.list, p, got)
				}
			}
		}
	}
}

func TestPublicKeys(t *testing.T) {
	t.Parallel()
	k := keys()
	block := func(kind string, der []byte) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
	}
	pkix := publicPEM(t, k.rsa.Public())
	certificate, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(1)}, &x509.Certificate{SerialNumber: big.NewInt(1)}, k.rsa.Public(), k.rsa)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"PKIX": pkix, "PKCS1": block("RSA PUBLIC KEY", x509.MarshalPKCS1PublicKey(&k.rsa.PublicKey)), "certificate": block("CERTIFICATE", certificate),
		"escaped": strings.ReplaceAll(pkix, "\n", `\n`), "space around": "\n  \n" + pkix + "\n\n",
	} {
		o := defaults()
		o.Algorithm, o.PublicKey = "RS256", text
		v, err := New(o)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if _, err := ask(t, v, sign(t, header("RS256"), `{}`, jwt.SigningMethodRS256, k.rsa)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	private, err := x509.MarshalPKCS8PrivateKey(k.rsa)
	if err != nil {
		t.Fatal(err)
	}
	small, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"none": "Secret", "cut": pkix[:len(pkix)/2], "damaged": block("PUBLIC KEY", []byte("Secret")), "private": block("PRIVATE KEY", private),
		"P-384": publicPEM(t, k.p384.Public()), "RSA-1024": publicPEM(t, small.Public()), "two": pkix + publicPEM(t, k.ed.Public()),
	} {
		for _, on := range []bool{true, false} {
			o := defaults()
			o.JWT, o.Secret, o.PublicKey = on, hsSecret, text
			if _, err := New(o); err == nil || !strings.Contains(err.Error(), "JWT_PUBLIC_KEY") || strings.Contains(err.Error(), "Secret") {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// Many tokens: what is remembered stays bounded, and right.
func TestRemembersBounded(t *testing.T) {
	t.Parallel()
	o := defaults()
	o.Secret = hsSecret
	v := verifier(t, o)
	for i := range maxVerified + 100 {
		want := fmt.Sprint("s", i)
		if id, err := ask(t, v, hs256(t, `{"sub":"`+want+`"}`)); err != nil || id.Subject != want {
			t.Fatalf("%d: %+v, %v", i, id, err)
		}
	}
	if n := len(v.verified.claims); n > maxVerified {
		t.Errorf("%d tokens are remembered", n)
	}
}

func BenchmarkAuthenticate(b *testing.B) {
	k := keys()
	claims := fmt.Sprintf(`{"sub":"service-7","role":"read-write","iss":"https://issuer.example","aud":"ferrymq","iat":%d,"exp":%d}`, time.Now().Unix(), time.Now().Unix()+3600)
	for _, c := range []struct {
		method      jwt.SigningMethod
		key, public any
	}{
		{jwt.SigningMethodHS256, []byte(hsSecret), nil},
		{jwt.SigningMethodRS256, k.rsa, k.rsa.Public()},
		{jwt.SigningMethodEdDSA, k.ed, k.ed.Public()},
		{jwt.SigningMethodES256, k.p256, k.p256.Public()},
	} {
		b.Run(c.method.Alg(), func(b *testing.B) {
			o := defaults()
			o.Algorithm, o.Secret = c.method.Alg(), hsSecret
			if c.public != nil {
				o.PublicKey = publicPEM(b, c.public)
			}
			v := verifier(b, o)
			headers := []string{"Bearer " + sign(b, header(c.method.Alg()), claims, c.method, c.key)}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := v.Authenticate(b.Context(), headers, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
