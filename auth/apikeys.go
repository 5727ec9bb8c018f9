package auth

import (
	"context"
	"crypto/sha256"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
)

// Scope is a set of what an API key may do in its project.
type Scope uint8

// The scopes. None includes another.
const (
	Publish Scope = 1 << iota
	Consume
	Read
	Manage
)

// scopeNames are in the order of their bits.
var scopeNames = [...]string{"publish", "consume", "read", "admin"}

// ParseScope is the scope of that name; zero when there is none.
func ParseScope(name string) Scope {
	for i, n := range scopeNames {
		if n == name {
			return 1 << i
		}
	}
	return 0
}

// Names are the names of the scopes in the set.
func (s Scope) Names() []string {
	names := []string{}
	for i, n := range scopeNames {
		if s&(1<<i) != 0 {
			names = append(names, n)
		}
	}
	return names
}

// Key is an API key: it may do something in one project.
type Key struct {
	Project int32
	Name    string // of the project
	Scopes  Scope
}

const (
	// SecretPrefix is what the secret of every API key begins with.
	SecretPrefix = "fmq_"
	// SecretSize is how many random bytes follow, in base32.
	SecretSize = 32

	secretLength = len(SecretPrefix) + (SecretSize*8+4)/5
)

const (
	// keyAge and lookupTimeout are both within the 5 s after which a deleted key is refused everywhere.
	keyAge        = 4 * time.Second
	lookupTimeout = 5 * time.Second
	// maxKeys bounds what is remembered of keys that exist, and of those that don't.
	maxKeys = 4096
	// lookupRoom is how many look-ups run at once: whoever makes secrets up gets no more of the database than that.
	lookupRoom = 4
)

// Keys finds API keys by the hashes of their secrets, and believes for a few seconds what it found. It is safe for concurrent use.
type Keys struct {
	find    func(ctx context.Context, hash [sha256.Size]byte) (*Key, error)
	room    chan struct{}
	lookups singleflight.Group

	mu sync.Mutex
	// By whether the key exists: made-up secrets don't push out those that are good.
	found map[bool]map[[sha256.Size]byte]finding
}

// finding is what a look-up that began at that moment found; nil is nothing.
type finding struct {
	key *Key
	at  time.Time
}

// NewKeys makes Keys that look up with find, which returns nil for a key that does not exist.
func NewKeys(find func(ctx context.Context, hash [sha256.Size]byte) (*Key, error)) *Keys {
	k := &Keys{find: find, room: make(chan struct{}, lookupRoom)}
	k.Forget()
	return k
}

// Forget makes every key be looked up again: one was deleted.
func (k *Keys) Forget() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.found = map[bool]map[[sha256.Size]byte]finding{true: {}, false: {}}
}

func (k *Keys) get(hash [sha256.Size]byte) (finding, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, m := range k.found {
		if f, ok := m[hash]; ok && time.Since(f.at) < keyAge {
			return f, true
		}
	}
	return finding{}, false
}

func (k *Keys) put(hash [sha256.Size]byte, f finding) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.found[f.key == nil], hash)
	if len(k.found[f.key != nil]) >= maxKeys {
		k.found[f.key != nil] = make(map[[sha256.Size]byte]finding)
	}
	k.found[f.key != nil][hash] = f
}

// authenticate says which key a secret is of. An error that is no Error means that nobody can say at the moment.
func (k *Keys) authenticate(ctx context.Context, secret string, hash [sha256.Size]byte) (Identity, error) {
	if len(secret) != secretLength {
		return Identity{}, ErrKey
	}
	f, ok := k.get(hash)
	if !ok {
		// One for all who ask at the same time, whoever of them leaves.
		done := k.lookups.DoChan(string(hash[:]), func() (any, error) {
			began := time.Now()
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookupTimeout)
			defer cancel()
			select {
			case k.room <- struct{}{}:
				defer func() { <-k.room }()
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			key, err := k.find(ctx, hash)
			if err != nil {
				return nil, err
			}
			k.put(hash, finding{key, began})
			return finding{key, began}, nil
		})
		select {
		case <-ctx.Done():
			return Identity{}, ctx.Err()
		case r := <-done:
			if r.Err != nil {
				return Identity{}, r.Err
			}
			f = r.Val.(finding)
		}
	}
	if f.key == nil {
		return Identity{}, ErrKey
	}
	return Identity{Key: f.key}, nil
}
