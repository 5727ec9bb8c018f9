package auth

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// secretOf makes the secret of a test key.
func secretOf(n int) string {
	return SecretPrefix + fmt.Sprintf("%0*d", secretLength-len(SecretPrefix), n)
}

// vault is where the keys of a test are looked up.
type vault struct {
	mu      sync.Mutex
	keys    map[[sha256.Size]byte]*Key
	err     error
	lookups atomic.Int64
	running atomic.Int64
	most    atomic.Int64
	takes   time.Duration
}

func (v *vault) find(ctx context.Context, hash [sha256.Size]byte) (*Key, error) {
	v.lookups.Add(1)
	for n := v.running.Add(1); n > v.most.Load(); {
		v.most.Store(n)
	}
	defer v.running.Add(-1)
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(v.takes):
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.keys[hash], v.err
}

func (v *vault) set(n int, k *Key) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.keys == nil {
		v.keys = make(map[[sha256.Size]byte]*Key)
	}
	v.keys[sha256.Sum256([]byte(secretOf(n)))] = k
}

func TestScopes(t *testing.T) {
	t.Parallel()
	all := Scope(0)
	for _, name := range []string{"publish", "consume", "read", "admin"} {
		s := ParseScope(name)
		if s == 0 || s&all != 0 || fmt.Sprint(s.Names()) != "["+name+"]" {
			t.Errorf("%s: %d %v", name, s, s.Names())
		}
		all |= s
	}
	if fmt.Sprint(all.Names(), Scope(0).Names()) != "[publish consume read admin] []" {
		t.Error(all.Names())
	}
	for _, name := range []string{"", "root", "Read", "read "} {
		if ParseScope(name) != 0 {
			t.Errorf("%q is a scope", name)
		}
	}
}

// Where API keys are not accepted their secrets are like any other token; where they are, the root key is still the root key.
func TestAPIKeyOrNot(t *testing.T) {
	t.Parallel()
	o := defaults()
	o.Secret, o.RootKey = hsSecret, secretOf(1)
	v, keys := verifier(t, o), &vault{}
	keys.set(1, &Key{Project: 1})
	keys.set(2, &Key{Project: 2, Scopes: Read})
	known := NewKeys(keys.find)
	for _, c := range []struct {
		header    string
		with      Identity
		err, none error
	}{
		{"Bearer " + secretOf(1), Identity{Roles: Admin}, nil, nil},
		{"Bearer " + secretOf(2), Identity{Key: keys.keys[sha256.Sum256([]byte(secretOf(2)))]}, nil, ErrHeader},
		{secretOf(2), Identity{Key: keys.keys[sha256.Sum256([]byte(secretOf(2)))]}, nil, ErrHeader},
		{"Bearer " + secretOf(3), Identity{}, ErrKey, ErrHeader},
		{"Bearer " + secretOf(2) + "0", Identity{}, ErrKey, ErrHeader},
		{"Bearer fmq_", Identity{}, ErrKey, ErrHeader},
		{"Bearer FMQ_" + secretOf(2)[4:], Identity{}, ErrHeader, ErrHeader},
		{"Basic " + secretOf(2), Identity{}, ErrHeader, ErrHeader},
	} {
		if id, err := v.Authenticate(t.Context(), []string{c.header}, known); id != c.with || err != c.err {
			t.Errorf("%s: %+v %v", c.header, id, err)
		}
		if _, err := v.Authenticate(t.Context(), []string{c.header}, nil); err != c.none {
			t.Errorf("%s without API keys: %v", c.header, err)
		}
	}
	if n := keys.lookups.Load(); n != 2 {
		t.Errorf("%d look-ups for two secrets that could be of a key", n)
	}
}

// A key is looked up once in a while, whoever asks, and a deleted one is refused within 5 s.
func TestAPIKeysAreBelievedForSeconds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		keys := &vault{takes: 100 * time.Millisecond}
		key := &Key{Project: 1, Scopes: Publish}
		keys.set(1, key)
		known := NewKeys(keys.find)
		ask := func(n int) error {
			id, err := known.authenticate(t.Context(), secretOf(n), sha256.Sum256([]byte(secretOf(n))))
			if (err == nil) != (id.Key != nil) {
				t.Errorf("%+v %v", id, err)
			}
			return err
		}
		for n, want := range map[int]error{1: nil, 2: ErrKey} {
			before := keys.lookups.Load()
			var all sync.WaitGroup
			for range 100 {
				all.Go(func() {
					if err := ask(n); err != want {
						t.Error(err)
					}
				})
			}
			all.Wait()
			if err := ask(n); err != want || keys.lookups.Load() != before+1 {
				t.Errorf("%v, %d look-ups", err, keys.lookups.Load()-before)
			}
		}
		keys.set(1, nil)
		deleted, used := time.Now(), time.Duration(0)
		for ask(1) == nil {
			used = time.Since(deleted)
			time.Sleep(10 * time.Millisecond)
		}
		if used == 0 || used > 5*time.Second {
			t.Errorf("used for %v after it was deleted", used)
		}
		keys.set(1, key)
		known.Forget()
		if err := ask(1); err != nil {
			t.Errorf("not looked up again: %v", err)
		}
		// An outage is no refusal, and what was believed is not believed for longer.
		keys.err = errors.New("no database")
		if err := ask(1); err != nil {
			t.Error(err)
		}
		time.Sleep(keyAge)
		if err := ask(1); err != keys.err {
			t.Error(err)
		}
		keys.err = nil
		if err := ask(1); err != nil {
			t.Errorf("the outage is remembered: %v", err)
		}
		// A look-up that hangs ends, and whoever does not want to wait for it doesn't.
		keys.takes = time.Hour
		known.Forget()
		gone, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		if _, err := known.authenticate(gone, secretOf(1), sha256.Sum256([]byte(secretOf(1)))); err != context.DeadlineExceeded || time.Since(began) != time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		if err := ask(1); err == nil || errors.Is(err, ErrKey) || time.Since(began) != lookupTimeout {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}

// Made-up secrets take neither the memory nor the database from those that are good.
func TestMadeUpSecrets(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		keys := &vault{takes: time.Millisecond}
		keys.set(1, &Key{Project: 1})
		known := NewKeys(keys.find)
		ask := func(n int) error {
			_, err := known.authenticate(t.Context(), secretOf(n), sha256.Sum256([]byte(secretOf(n))))
			return err
		}
		if err := ask(1); err != nil {
			t.Fatal(err)
		}
		var all sync.WaitGroup
		for i := range 3 * maxKeys / 2 {
			all.Go(func() {
				if err := ask(2 + i); err != ErrKey {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if n := keys.most.Load(); n > lookupRoom {
			t.Errorf("%d look-ups at once", n)
		}
		if n := len(known.found[false]); n > maxKeys {
			t.Errorf("%d are remembered", n)
		}
		before := keys.lookups.Load()
		if err := ask(1); err != nil || keys.lookups.Load() != before {
			t.Errorf("the good one was forgotten: %v", err)
		}
	})
}

// An API key is not in the errors.
func TestAPIKeyErrorsShowNothing(t *testing.T) {
	t.Parallel()
	v, known := verifier(t, Options{RootKey: "root", Algorithm: "HS256"}), NewKeys((&vault{}).find)
	for _, keys := range []*Keys{known, nil} {
		if _, err := v.Authenticate(t.Context(), []string{"Bearer " + secretOf(7)}, keys); err == nil || strings.Contains(err.Error(), secretOf(7)[4:]) {
			t.Error(err)
		}
	}
}
