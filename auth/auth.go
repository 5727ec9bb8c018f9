// Package auth says who sent a request and what that sender may do: it checks the Authorization header against a root
// key, against JSON Web Tokens, whose keys are given or fetched from a URL, and against the API keys of projects.
package auth

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// Role is a set of roles.
type Role uint8

// The roles that a token can give. The root key has Admin.
const (
	ReadOnly Role = 1 << iota
	WriteOnly
	ReadWrite
	Admin
)

// Identity is who sent a request.
type Identity struct {
	Subject string // "" is nobody in particular
	Roles   Role
	Key     *Key // of an API key, which has no roles
}

// Error is why a request has no identity: the text of its answer.
type Error string

// Error implements error.
func (e Error) Error() string { return string(e) }

// The errors of Authenticate. Of several that apply to a token the first of this order is given: what was checked first.
const (
	ErrRequired  Error = "Authentication required"
	ErrHeader    Error = "Bad token header"
	ErrKey       Error = "Unknown API key"
	ErrAlgorithm Error = "Unsupported token algorithm"
	ErrKeyID     Error = "Unknown key ID"
	ErrSignature Error = "Invalid token signature"
	ErrExpired   Error = "Token has expired"
	ErrNotYet    Error = "Token not yet valid"
	ErrFuture    Error = "Token issued in the future"
	ErrIssuer    Error = "Invalid token issuer"
	ErrAudience  Error = "Invalid token audience"
)

const (
	// maxToken is far above what issuers make, and bounds what a caller nobody knows can have parsed.
	maxToken = 16 << 10
	// maxSubject bounds what is stored with each message. OpenID Connect allows 255.
	maxSubject = 1 << 10
)

// Options are the settings of a Verifier.
type Options struct {
	RootKey string // "": none

	JWT                         bool   // tokens are accepted
	Algorithm                   string // a name from RFC 7518, or auto
	Secret, PublicKey, JWKSURL  string
	RefreshInterval, Timeout    time.Duration // of the key set
	ClockSkew                   time.Duration
	Issuer, Audience            string // "": not checked
	RolesClaim, RolesArrayClaim string
	RoleAdmin, RoleReadWrite    string
	RoleReadOnly, RoleWriteOnly string
	OpenPaths                   []string // exact, or a prefix when it ends in a slash and is longer than one
}

// Verifier checks Authorization headers. It is safe for concurrent use.
type Verifier struct {
	o       Options
	root    [sha256.Size]byte
	accepts map[string]method // by the name of the algorithm
	public  any               // the key of PublicKey
	set     *keySet           // of JWKSURL, unless there is a public key
	names   map[string]Role
	open    []openPath
	now     func() time.Time

	verified verified
}

type openPath struct {
	segments []string
	prefix   bool
}

// New checks the options; its errors name the setting that is at fault, and show no secret.
func New(o Options) (*Verifier, error) {
	v := &Verifier{o: o, root: sha256.Sum256([]byte(o.RootKey)), now: time.Now, names: make(map[string]Role)}
	if strings.ContainsFunc(o.RootKey, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, errors.New("ROOT_API_KEY: must be visible ASCII characters without spaces")
	}
	for _, r := range []struct {
		name string
		role Role
	}{{o.RoleAdmin, Admin}, {o.RoleReadWrite, ReadWrite}, {o.RoleReadOnly, ReadOnly}, {o.RoleWriteOnly, WriteOnly}} {
		if r.name != "" {
			v.names[r.name] |= r.role
		}
	}
	for _, p := range o.OpenPaths {
		if p = strings.TrimSpace(p); p == "" {
			continue
		}
		if p[0] != '/' {
			return nil, fmt.Errorf("JWT_SKIP_PATHS: a path starts with a slash, unlike %q", p)
		}
		path := openPath{prefix: len(p) > 1 && strings.HasSuffix(p, "/")}
		path.segments = strings.Split(strings.Trim(p, "/"), "/")
		v.open = append(v.open, path)
	}
	if o.PublicKey != "" {
		var err error
		if v.public, err = parsePublicKey(o.PublicKey); err != nil {
			return nil, fmt.Errorf("JWT_PUBLIC_KEY: %w", err)
		}
	}
	if o.JWKSURL != "" {
		u, err := url.Parse(o.JWKSURL)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
			return nil, errors.New("JWT_JWKS_URL: must be an http or https URL") // it may hold a password
		}
		if v.public == nil {
			v.set = newKeySet(u, o.RefreshInterval, o.Timeout)
		}
	}
	if err := v.choose(); err != nil {
		return nil, err
	}
	return v, nil
}

// choose sets which algorithms are accepted: of those asked for, the ones that there is a key for.
func (v *Verifier) choose() error {
	asked := []string{v.o.Algorithm}
	kind := methods[v.o.Algorithm].kind
	switch {
	case v.o.Algorithm == "RS256":
		asked = []string{"RS256", "RS384", "RS512"}
	case v.o.Algorithm == "auto":
		asked = slices.Collect(maps.Keys(methods))
	case kind == "":
		return fmt.Errorf("JWT_ALGORITHM: must be HS256, HS384, HS512, RS256, RS384, RS512, EdDSA, ES256 or auto, got %q", v.o.Algorithm)
	}
	v.accepts = make(map[string]method)
	fetched := false // a public key is wanted
	for _, name := range asked {
		m := methods[name]
		switch {
		case m.kind == secret:
			if v.o.Secret == "" {
				continue
			}
		case v.public != nil:
			if kindOf(v.public) != m.kind {
				continue
			}
		case v.set == nil:
			continue
		}
		v.accepts[name] = m
		fetched = fetched || m.kind != secret
	}
	if !fetched {
		v.set = nil
	}
	if !v.o.JWT || len(v.accepts) > 0 {
		return nil
	}
	missing := "JWT_PUBLIC_KEY or JWT_JWKS_URL"
	switch {
	case v.o.Algorithm == "auto":
		missing = "JWT_SECRET, JWT_PUBLIC_KEY or JWT_JWKS_URL"
	case kind == secret:
		missing = "JWT_SECRET"
	case v.public != nil:
		return fmt.Errorf("JWT_PUBLIC_KEY: holds a key for %s, which JWT_ENABLED with JWT_ALGORITHM=%s cannot use", kindOf(v.public), v.o.Algorithm)
	}
	return fmt.Errorf("%s: must be set for JWT_ENABLED with JWT_ALGORITHM=%s", missing, v.o.Algorithm)
}

// Start begins to fetch the key set, if there is one. It is called once, and does not wait.
func (v *Verifier) Start(log *slog.Logger) {
	if v.set != nil && v.o.JWT {
		v.set.start(log)
	}
}

// Close ends what Start began.
func (v *Verifier) Close() {
	if v.set != nil {
		v.set.close()
	}
}

// Open says whether a path, given by its decoded segments, needs no credentials. It is compared by segments: in a name
// that has a slash in it nothing can be hidden.
func (v *Verifier) Open(path []string) bool {
	return slices.ContainsFunc(v.open, func(p openPath) bool {
		return len(path) == len(p.segments) && !p.prefix && slices.Equal(path, p.segments) ||
			len(path) > len(p.segments) && p.prefix && slices.Equal(path[:len(p.segments)], p.segments)
	})
}

// Authenticate says who sent a request with these Authorization headers. API keys are looked up in apiKeys; nil: none is accepted.
// Its error is an Error, or that of a look-up. It waits only for that, and for a key set that is being fetched, at most for as long as
// that may take.
func (v *Verifier) Authenticate(ctx context.Context, headers []string, apiKeys *Keys) (Identity, error) {
	if len(headers) > 1 {
		return Identity{}, ErrHeader // which of them counts is not for us to guess
	}
	token := ""
	if len(headers) == 1 {
		token = strings.Trim(headers[0], " \t")
	}
	if scheme, rest, ok := strings.Cut(token, " "); ok {
		if !strings.EqualFold(scheme, "Bearer") {
			return Identity{}, ErrHeader
		}
		token = strings.TrimLeft(rest, " \t")
	} else if strings.EqualFold(token, "Bearer") {
		token = ""
	}
	if token == "" {
		return Identity{}, ErrRequired
	}
	sum := sha256.Sum256([]byte(token))
	if v.o.RootKey != "" && subtle.ConstantTimeCompare(sum[:], v.root[:]) == 1 {
		return Identity{Roles: Admin}, nil
	}
	if apiKeys != nil && strings.HasPrefix(token, SecretPrefix) {
		return apiKeys.authenticate(ctx, token, sum)
	}
	if !v.o.JWT || len(token) > maxToken {
		return Identity{}, ErrHeader
	}
	keys := v.set.current()
	c := v.verified.get(sum, keys)
	if c == nil {
		var err error
		if c, err = v.verify(ctx, token); err != nil {
			return Identity{}, err
		}
		v.verified.put(sum, keys, c)
	}
	if err := c.check(v.now(), v.o.ClockSkew); err != nil {
		return Identity{}, err
	}
	return c.identity, nil
}

// maxVerified is how many tokens are remembered.
const maxVerified = 4096

// verified remembers tokens whose signature was good, by their hash: clients send the same one again and again. What a
// token says is held against the clock each time all the same, and when the keys are fetched anew all are forgotten.
type verified struct {
	mu     sync.Mutex
	keys   int64
	claims map[[sha256.Size]byte]*claims
}

func (s *verified) get(sum [sha256.Size]byte, keys int64) *claims {
	s.mu.Lock()
	defer s.mu.Unlock()
	if keys != s.keys {
		return nil
	}
	return s.claims[sum]
}

// put remembers a token. keys is which ones were current before it was verified: it may have been verified by newer ones.
func (s *verified) put(sum [sha256.Size]byte, keys int64, c *claims) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case keys < s.keys:
		return
	case s.claims == nil || keys > s.keys || len(s.claims) >= maxVerified:
		s.keys, s.claims = keys, make(map[[sha256.Size]byte]*claims)
	}
	s.claims[sum] = c
}

// claims is what a token says, once its signature has been found good.
type claims struct {
	identity             Identity
	expires, from, since float64 // seconds since 1970
	err                  error   // what is wrong with it at any time
}

// check holds the claims against the clock. A token is valid until just before it expires.
func (c *claims) check(now time.Time, skew time.Duration) error {
	t, s := float64(now.UnixNano())/1e9, skew.Seconds()
	switch {
	case t >= c.expires+s:
		return ErrExpired
	case t < c.from-s:
		return ErrNotYet
	case t < c.since-s:
		return ErrFuture
	}
	return c.err
}

// verify checks the signature of a token: by the algorithm that it names if that one is accepted, and only with a key
// of the kind that this algorithm is for.
func (v *Verifier) verify(ctx context.Context, token string) (*claims, error) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return nil, ErrHeader
	}
	var header struct {
		Alg  string         `json:"alg"`
		Kid  string         `json:"kid"`
		Crit jsontext.Value `json:"crit"`
	}
	if decode(parts[0], &header) != nil || header.Crit != nil { // we know no extension, so none that is critical
		return nil, ErrHeader
	}
	m, ok := v.accepts[header.Alg]
	if !ok {
		return nil, ErrAlgorithm
	}
	key := v.public
	if m.kind == secret {
		key = []byte(v.o.Secret)
	} else if key == nil {
		var err error
		if key, err = v.set.find(ctx, header.Kid, m.kind); err != nil {
			return nil, err
		}
	}
	signature, err := base64.RawURLEncoding.DecodeString(parts[2])
	if err != nil || m.Verify(token[:len(parts[0])+1+len(parts[1])], signature, key) != nil {
		return nil, ErrSignature
	}
	var said map[string]jsontext.Value
	if decode(parts[1], &said) != nil || said == nil {
		return nil, ErrHeader
	}
	return v.read(said)
}

func decode(part string, into any) error {
	b, err := base64.RawURLEncoding.DecodeString(part)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, into)
}

// read reads the claims. One of the wrong type counts against the token.
func (v *Verifier) read(said map[string]jsontext.Value) (*claims, error) {
	c := &claims{
		expires: number(said["exp"], math.Inf(1), math.Inf(-1)),
		from:    number(said["nbf"], math.Inf(-1), math.Inf(1)),
		since:   number(said["iat"], math.Inf(-1), math.Inf(1)),
	}
	if v.o.Issuer != "" && text(said["iss"]) != v.o.Issuer {
		c.err = ErrIssuer
	} else if a := said["aud"]; v.o.Audience != "" && text(a) != v.o.Audience && !slices.Contains(texts(a), v.o.Audience) {
		c.err = ErrAudience
	}
	if c.identity.Subject = text(said["sub"]); len(c.identity.Subject) > maxSubject {
		return nil, ErrHeader
	}
	c.identity.Roles = v.names[text(said[v.o.RolesClaim])]
	for _, name := range texts(said[v.o.RolesArrayClaim]) {
		c.identity.Roles |= v.names[name]
	}
	return c, nil
}

// number is a claim that is a number: absent without one, broken when it is something else.
func number(v jsontext.Value, absent, broken float64) float64 {
	switch v.Kind() {
	case 0, 'n':
		return absent
	case '0':
		if f, err := strconv.ParseFloat(string(v), 64); err == nil {
			return f
		}
	}
	return broken
}

// text is a claim that is text, else "".
func text(v jsontext.Value) (s string) {
	if v.Kind() == '"' {
		_ = json.Unmarshal(v, &s)
	}
	return s
}

// texts is what is text in a claim that is an array.
func texts(v jsontext.Value) (all []string) {
	var elements []jsontext.Value
	if v.Kind() == '[' && json.Unmarshal(v, &elements) == nil {
		for _, e := range elements {
			all = append(all, text(e))
		}
	}
	return all
}
