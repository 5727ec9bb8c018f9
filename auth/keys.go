package auth

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/MicahParks/jwkset"
	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/golang-jwt/jwt/v5"
)

// kind is what a key can be used for. A token's algorithm is only ever tried with a key of its kind: else a public key
// could be taken for a secret.
type kind string

const (
	secret kind = "HS256, HS384 or HS512"
	rsaKey kind = "RS256, RS384 or RS512"
	edKey  kind = "EdDSA"
	ecKey  kind = "ES256"
)

type method struct {
	jwt.SigningMethod
	kind kind
}

// methods are all algorithms there are.
var methods = map[string]method{
	"HS256": {jwt.SigningMethodHS256, secret},
	"HS384": {jwt.SigningMethodHS384, secret},
	"HS512": {jwt.SigningMethodHS512, secret},
	"RS256": {jwt.SigningMethodRS256, rsaKey},
	"RS384": {jwt.SigningMethodRS384, rsaKey},
	"RS512": {jwt.SigningMethodRS512, rsaKey},
	"EdDSA": {jwt.SigningMethodEdDSA, edKey},
	"ES256": {jwt.SigningMethodES256, ecKey},
}

// kindOf is what a public key can be used for, "" if for nothing.
func kindOf(key any) kind {
	switch k := key.(type) {
	case *rsa.PublicKey:
		if k.N.BitLen() >= 2048 { // RFC 7518, section 3.3
			return rsaKey
		}
	case ed25519.PublicKey:
		return edKey
	case *ecdsa.PublicKey:
		if k.Curve == elliptic.P256() {
			return ecKey
		}
	}
	return ""
}

// parsePublicKey reads PEM, also with its line breaks written as \n, as environment files have them.
func parsePublicKey(text string) (any, error) {
	block, rest := pem.Decode([]byte(strings.ReplaceAll(text, `\n`, "\n")))
	if block == nil {
		return nil, errors.New("must be PEM")
	}
	if more, _ := pem.Decode(rest); more != nil {
		return nil, errors.New("must be one key")
	}
	var key any
	var err error
	switch block.Type {
	case "PUBLIC KEY":
		key, err = x509.ParsePKIXPublicKey(block.Bytes)
	case "RSA PUBLIC KEY":
		key, err = x509.ParsePKCS1PublicKey(block.Bytes)
	case "CERTIFICATE":
		var c *x509.Certificate
		if c, err = x509.ParseCertificate(block.Bytes); err == nil {
			key = c.PublicKey
		}
	default:
		return nil, fmt.Errorf("must be a public key, is %s", block.Type)
	}
	if err != nil {
		return nil, errors.New("cannot be read")
	}
	if kindOf(key) == "" {
		return nil, errors.New("must be a key for RSA (2048 bits or more), Ed25519 or P-256")
	}
	return key, nil
}

// missInterval is how long after an attempt to fetch the keys an unknown key id does not cause another one.
const missInterval = 5 * time.Second

// maxKeySet bounds what is read from the URL.
const maxKeySet = 1 << 20

// keySet holds the keys of a URL. When they cannot be fetched it keeps those it has.
type keySet struct {
	url      *url.URL
	interval time.Duration
	client   *http.Client
	log      *slog.Logger
	ctx      context.Context
	stop     context.CancelFunc
	tasks    sync.WaitGroup

	mu      sync.Mutex
	keys    []publicKey   // replaced, never changed
	fetched int64         // how often
	running chan struct{} // closed when the attempt under way has ended
	ended   time.Time     // of the last attempt
	failure error         // of the last attempt
}

type publicKey struct {
	id   string
	kind kind
	key  any
}

func newKeySet(u *url.URL, interval, timeout time.Duration) *keySet {
	s := &keySet{url: u, interval: interval, log: slog.New(slog.DiscardHandler)}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.client = &http.Client{
		Timeout:   timeout,
		Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, DisableKeepAlives: true},
		CheckRedirect: func(r *http.Request, via []*http.Request) error {
			if len(via) > 3 || via[0].URL.Scheme == "https" && r.URL.Scheme != "https" {
				return errors.New("redirected too often, or from https to http")
			}
			return nil
		},
	}
	return s
}

// start fetches the keys at once, and again and again.
func (s *keySet) start(log *slog.Logger) {
	s.log = log
	running := s.attempt(0) // so that the first request finds it under way
	s.tasks.Go(func() {
		for running != nil {
			<-running
			s.mu.Lock()
			wait := s.interval
			if s.failure != nil {
				wait = min(wait, missInterval)
			}
			s.mu.Unlock()
			select {
			case <-s.ctx.Done():
				return
			case <-time.After(wait):
			}
			running = s.attempt(0)
		}
	})
}

func (s *keySet) close() {
	s.mu.Lock()
	s.stop() // no attempt begins from here on
	s.mu.Unlock()
	s.tasks.Wait()
}

// find is the key with this id, or the first one when id is empty, that can be used for want.
func (s *keySet) find(ctx context.Context, id string, want kind) (any, error) {
	key, err := s.look(id, want)
	if err == ErrKeyID {
		if running := s.attempt(missInterval); running != nil {
			select {
			case <-running:
			case <-ctx.Done():
			}
		}
		key, err = s.look(id, want)
	}
	return key, err
}

// current numbers the keys there are at the moment. Without a set there is one of them for ever.
func (s *keySet) current() int64 {
	if s == nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fetched
}

func (s *keySet) look(id string, want kind) (any, error) {
	s.mu.Lock()
	keys := s.keys
	s.mu.Unlock()
	var err error = ErrKeyID
	for _, k := range keys {
		if id != "" && k.id != id {
			continue
		}
		if k.kind == want {
			return k.key, nil
		}
		if id != "" {
			err = ErrSignature // it is known, and of another kind
		}
	}
	return nil, err
}

// attempt begins to fetch the keys, unless an attempt ended less than pause ago or is under way already: callers share
// it, and none of them can cancel it. What it returns is closed when it has ended; nil: there is none.
func (s *keySet) attempt(pause time.Duration) (running chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running != nil || time.Since(s.ended) < pause || s.ctx.Err() != nil {
		return s.running
	}
	running = make(chan struct{})
	s.running = running
	s.tasks.Go(func() {
		keys, err := s.fetch()
		s.mu.Lock()
		s.done(keys, err)
		s.running, s.ended = nil, time.Now()
		s.mu.Unlock()
		close(running)
	})
	return running
}

// done takes the outcome of an attempt, and says so when it differs from the one before.
func (s *keySet) done(keys []publicKey, err error) {
	if err == nil {
		s.keys = keys
		s.fetched++
	}
	switch {
	case s.ctx.Err() != nil:
	case err != nil && (s.failure == nil || s.ended.IsZero()):
		s.log.Warn("JWT_JWKS_URL cannot be fetched", "host", s.url.Host, "error", err, "keys kept", len(s.keys))
	case err == nil && (s.failure != nil || s.ended.IsZero()):
		s.log.Info("keys fetched from JWT_JWKS_URL", "host", s.url.Host, "usable", len(keys))
	}
	s.failure = err
}

// fetch reads the key set. Its errors do not show the URL, which may hold a secret.
func (s *keySet) fetch() ([]publicKey, error) {
	r, err := http.NewRequestWithContext(s.ctx, http.MethodGet, s.url.String(), nil)
	if err != nil {
		return nil, errors.New("no valid URL")
	}
	r.Header.Set("Accept", "application/json, application/jwk-set+json")
	resp, err := s.client.Do(r)
	var withURL *url.Error
	if errors.As(err, &withURL) {
		return nil, withURL.Err
	} else if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("status %d", resp.StatusCode)
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxKeySet))
	if err != nil {
		return nil, err
	}
	return parseKeySet(b)
}

// parseKeySet reads a JWK set. Keys that cannot verify a token of ours are left out: sets hold others too.
func parseKeySet(b []byte) ([]publicKey, error) {
	var set struct {
		Keys []jsontext.Value `json:"keys"`
	}
	if err := json.Unmarshal(b, &set, jsontext.AllowDuplicateNames(true)); err != nil || set.Keys == nil {
		return nil, errors.New("no key set in the answer")
	}
	keys := []publicKey{}
	for _, raw := range set.Keys {
		jwk, err := jwkset.NewJWKFromRawJSON([]byte(raw), jwkset.JWKMarshalOptions{}, jwkset.JWKValidateOptions{})
		if err != nil {
			continue
		}
		m, k := jwk.Marshal(), kindOf(jwk.Key())
		meant := []jwkset.ALG{"", jwkset.AlgRS256, jwkset.AlgRS384, jwkset.AlgRS512}
		switch k {
		case edKey:
			meant = []jwkset.ALG{"", jwkset.AlgEdDSA, "Ed25519"}
		case ecKey:
			meant = []jwkset.ALG{"", jwkset.AlgES256}
		}
		if k != "" && (m.USE == "" || m.USE == jwkset.UseSig) && slices.Contains(meant, m.ALG) {
			keys = append(keys, publicKey{id: m.KID, kind: k, key: jwk.Key()})
		}
	}
	return keys, nil
}
