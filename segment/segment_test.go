package segment

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/google/uuid"
	"github.com/klauspost/compress/zstd"
)

const (
	keyA = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
	keyB = "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"
)

func ring(t testing.TB, current string, old ...string) *Keys {
	t.Helper()
	keys, err := NewKeys(current, old...)
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

func build(messages ...Message) *Builder {
	b := NewBuilder(NewHasher(7))
	for i := range messages {
		b.Append(&messages[i])
	}
	return b
}

// checkRoundTrip seals, decodes and compares everything a reader can ask.
func checkRoundTrip(t testing.TB, keys *Keys, messages []Message) {
	t.Helper()
	first := NewFirstID(time.Now())
	b := build(messages...)
	codec, keyNo, frames := b.Seal([]byte("dst"), keys, first)
	frames, ok := bytes.CutPrefix(frames, []byte("dst"))
	if !ok || (keyNo != 0) != (keys != nil) {
		t.Fatalf("Seal lost dst or chose key %d", keyNo)
	}
	stored := slices.Clone(frames)
	d, err := Decode(keys, codec, keyNo, first, len(messages), frames)
	if err != nil {
		t.Fatal(err)
	}
	if d.Len() != len(messages) {
		t.Fatalf("Len = %d, want %d", d.Len(), len(messages))
	}
	for i, want := range messages {
		if got := d.At(i); !equal(want, got) {
			t.Fatalf("message %d (-want +got):\n%s", i, cmp.Diff(want, got, cmpopts.EquateEmpty()))
		}
		text, key := want.TransactionID, Key{}
		if text == "" {
			text = d.ID(i).String()
		} else {
			key = NewHasher(7).Key(text)
		}
		if got := string(d.AppendTransactionID([]byte("+"), i)); got != "+"+text {
			t.Fatalf("message %d: transaction id %q, want %q", i, got, text)
		}
		if got := KeyAt(b.Keys(), i); got != key {
			t.Fatalf("message %d: key %x, want %x", i, got, key)
		}
		if got, ok := IndexOf(first, len(messages), d.ID(i)); !ok || got != i {
			t.Fatalf("IndexOf(ID(%d)) = %d, %v", i, got, ok)
		}
	}
	if !bytes.Equal(frames, stored) {
		t.Fatal("Decode modified its input")
	}
}

func equal(a, b Message) bool {
	return a.TransactionID == b.TransactionID && a.ProducerSub == b.ProducerSub &&
		(a.TraceID == nil) == (b.TraceID == nil) && (a.TraceID == nil || *a.TraceID == *b.TraceID) &&
		(a.Headers == nil) == (b.Headers == nil) && bytes.Equal(a.Headers, b.Headers) && bytes.Equal(a.Payload, b.Payload)
}

// randomMessage sets any of the fields, with sizes and texts of all sorts.
func randomMessage(rng *rand.Rand) (m Message) {
	data := func(limit int) []byte {
		b := make([]byte, rng.IntN(limit+1))
		if rng.IntN(2) == 0 { // compressible, else random
			return append(b[:0], strings.Repeat("value ", len(b)/6)...)
		}
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		return b
	}
	var id uuid.UUID
	for i := range id {
		id[i] = byte(rng.Uint32())
	}
	switch rng.IntN(8) {
	case 0, 1:
		m.TransactionID = id.String()
	case 2:
		m.TransactionID = awkwardIDs[rng.IntN(len(awkwardIDs))]
	case 3:
		m.TransactionID = string(data(60))
	}
	if rng.IntN(3) == 0 {
		m.TraceID = &id
	}
	if rng.IntN(3) == 0 {
		m.ProducerSub = string(data(40))
	}
	if rng.IntN(3) == 0 {
		m.Headers = data(100)
	}
	m.Payload = data([]int{0, 10, 300, 3000}[rng.IntN(4)])
	return m
}

var awkwardIDs = []string{
	"00000000-0000-0000-0000-000000000000",
	"ffffffff-ffff-ffff-ffff-ffffffffffff",
	"0195F7A8-0000-7000-8000-0123456789AB",
	"0195f7a8-0000-7000-8000-0123456789aB",
	"{0195f7a8-0000-7000-8000-0123456789ab}",
	"urn:uuid:0195f7a8-0000-7000-8000-0123456789ab",
	"0195f7a80000700080000123456789ab",
	"0195f7a8-0000-7000-8000-0123456789ag",
	"0195f7a8-0000-7000-80000-123456789ab",
	"0195f7a8_0000-7000-8000-0123456789ab",
	"0195f7a8-0000-7000-8000-0123456789a\xff",
	" ", "\x00", "order-1",
}

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(3, 4))
	both := []*Keys{nil, ring(t, keyA)}
	for round := range 300 {
		messages := make([]Message, 1+rng.IntN([]int{1, 5, 50, MaxMessages}[rng.IntN(4)]))
		for i := range messages {
			messages[i] = randomMessage(rng)
		}
		checkRoundTrip(t, both[round%2], messages)
	}
	for _, id := range awkwardIDs {
		checkRoundTrip(t, nil, []Message{{}, {TransactionID: id}, {}})
	}
	noise := make([]byte, 1<<20)
	for i := range noise {
		noise[i] = byte(rng.Uint32())
	}
	for _, keys := range both {
		checkRoundTrip(t, keys, []Message{{}})
		checkRoundTrip(t, keys, make([]Message, MaxMessages))
		checkRoundTrip(t, keys, []Message{{Payload: noise}})
		checkRoundTrip(t, keys, []Message{{Payload: bytes.Repeat([]byte("abcdefg"), 1<<20/7)}})
	}
}

// Frames larger than the decoder accepts are not compressed, those of the
// largest message are.
func TestLargest(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		size  int
		codec int16
	}{{64 << 20, Zstd}, {maxDecoded, Plain}} {
		b, first := build(Message{Payload: make([]byte, c.size)}), NewFirstID(time.Now())
		codec, _, frames := b.Seal(nil, nil, first)
		d, err := Decode(nil, codec, 0, first, 1, frames)
		if err != nil || codec != c.codec || len(d.Raw(0).Payload) != c.size {
			t.Errorf("%d bytes: codec %d, %v", c.size, codec, err)
		}
		if b.Reset(); cap(b.frames) != 0 {
			t.Errorf("Reset keeps %d bytes", cap(b.frames))
		}
	}
}

func TestUUIDText(t *testing.T) {
	t.Parallel()
	for _, text := range append(awkwardIDs, uuid.NewString(), uuid.NewString()) {
		id, err := uuid.Parse(text)
		canonical := err == nil && id.String() == text
		got, ok := canonicalUUID(text)
		if ok != canonical || ok && got != id {
			t.Errorf("canonicalUUID(%q) = %v, %v", text, got, ok)
		}
		if ok && string(appendUUID(nil, got)) != text {
			t.Errorf("appendUUID(%v) = %q", got, appendUUID(nil, got))
		}
	}
}

func TestBuilderCaps(t *testing.T) {
	t.Parallel()
	b := NewBuilder(Hasher{})
	if !b.Fits(&Message{Payload: make([]byte, 2*MaxBytes)}) {
		t.Error("an empty builder refuses a large message")
	}
	rng := rand.New(rand.NewPCG(5, 6))
	for range 20 {
		b.Reset()
		if b.Len() != 0 || b.Size() != 0 || len(b.Keys()) != 0 {
			t.Fatal("Reset left something")
		}
		for m := randomMessage(rng); b.Fits(&m); m = randomMessage(rng) {
			before := b.Size()
			b.Append(&m)
			if b.Size()-before > m.maxSize() {
				t.Fatalf("%+v takes %d bytes, more than maxSize %d", m, b.Size()-before, m.maxSize())
			}
		}
		if b.Size() > MaxBytes || b.Len() > MaxMessages {
			t.Fatalf("%d messages, %d bytes", b.Len(), b.Size())
		}
	}
	b.Reset()
	for m := (Message{}); b.Fits(&m); {
		b.Append(&m)
	}
	if b.Len() != MaxMessages {
		t.Errorf("%d empty messages fit, want %d", b.Len(), MaxMessages)
	}
	defer func() {
		if recover() == nil {
			t.Error("Append to a full builder does not panic")
		}
	}()
	b.Append(&Message{})
}

// What Seal returns must survive the builder's next use.
func TestSealDoesNotAlias(t *testing.T) {
	t.Parallel()
	first := NewFirstID(time.Now())
	for _, size := range []int{10, 3000} {
		for _, keys := range []*Keys{nil, ring(t, keyA)} {
			b := build(Message{Payload: make([]byte, size)})
			codec, keyNo, frames := b.Seal(nil, keys, first)
			b.Reset()
			b.Append(&Message{Payload: bytes.Repeat([]byte("x"), size)})
			b.Seal(nil, keys, first)
			d, err := Decode(keys, codec, keyNo, first, 1, frames)
			if err != nil || !bytes.Equal(d.Raw(0).Payload, make([]byte, size)) {
				t.Errorf("%d bytes, codec %d: %v", size, codec, err)
			}
		}
	}
}

func TestCompressOnlyWhenItPays(t *testing.T) {
	t.Parallel()
	half := append(benchMessages("random", 400), benchMessages("json", 400)...)
	for name, c := range map[string]struct {
		messages []Message
		want     int16
	}{
		"one small":     {benchMessages("json", 1), Plain},
		"ten json":      {benchMessages("json", 10), Zstd},
		"full json":     {benchMessages("json", 900), Zstd},
		"ten random":    {benchMessages("random", 10), Plain},
		"full random":   {benchMessages("random", 900), Plain},
		"half and half": {half, Zstd},
	} {
		b := build(c.messages...)
		codec, _, frames := b.Seal(nil, nil, uuid.UUID{})
		if codec != c.want {
			t.Errorf("%s: codec %d, want %d", name, codec, c.want)
		}
		if codec == Zstd && len(frames) > b.Size()*9/10 {
			t.Errorf("%s: %d bytes of %d", name, len(frames), b.Size())
		}
	}
}

// Allocations are per segment, not per message.
func TestAllocations(t *testing.T) {
	messages := benchMessages("json", 100)
	for i := range messages {
		messages[i].TransactionID = uuid.NewString()
	}
	b, first := build(messages...), NewFirstID(time.Now())
	_, _, frames := b.Seal(nil, nil, first)
	seal := testing.AllocsPerRun(50, func() {
		b.Reset()
		for i := range messages {
			b.Append(&messages[i])
		}
		_, _, frames = b.Seal(frames[:0], nil, first)
	})
	id := make([]byte, 0, 64)
	open := testing.AllocsPerRun(50, func() {
		d, err := Decode(nil, Zstd, 0, first, len(messages), frames)
		if err != nil {
			t.Fatal(err)
		}
		for i := range d.Len() {
			id = d.AppendTransactionID(id[:0], i)
			_ = d.Raw(i)
		}
	})
	if seal > 10 || open > 10 {
		t.Errorf("%v allocations to seal, %v to decode 100 messages", seal, open)
	}
}

func TestEncryption(t *testing.T) {
	t.Parallel()
	a, b := ring(t, keyA), ring(t, keyB)
	first := NewFirstID(time.Now())
	for _, messages := range [][]Message{{{Payload: []byte("secret")}}, benchMessages("json", 10)} {
		n := len(messages)
		codec, keyNo, frames := build(messages...).Seal(nil, a, first)
		if keyNo <= 0 || bytes.Contains(frames, []byte("secret")) {
			t.Fatalf("not encrypted, key number %d", keyNo)
		}
		if _, _, again := build(messages...).Seal(nil, a, first); bytes.Equal(frames, again) {
			t.Error("the same nonce twice")
		}
		if _, err := Decode(ring(t, keyB, keyA), codec, keyNo, first, n, frames); err != nil {
			t.Errorf("after rotation: %v", err)
		}
		for _, keys := range []*Keys{nil, b} {
			if _, err := Decode(keys, codec, keyNo, first, n, frames); !errors.Is(err, ErrNoKey) {
				t.Errorf("without the key: %v", err)
			}
		}
		if _, err := Decode(b, codec, b.ring[0].no, first, n, frames); !errors.Is(err, ErrDamaged) {
			t.Errorf("with the wrong key: %v", err)
		}
		if _, err := Decode(a, codec, keyNo, NewFirstID(time.Now()), n, frames); !errors.Is(err, ErrDamaged) {
			t.Errorf("frames of another segment: %v", err)
		}
		if _, err := Decode(a, 1-codec, keyNo, first, n, frames); !errors.Is(err, ErrDamaged) {
			t.Errorf("other codec: %v", err)
		}
		for i := range frames {
			frames[i] ^= 0x40
			if _, err := Decode(a, codec, keyNo, first, n, frames); !errors.Is(err, ErrDamaged) {
				t.Errorf("byte %d tampered: %v", i, err)
			}
			frames[i] ^= 0x40
			if _, err := Decode(a, codec, keyNo, first, n, frames[:i]); !errors.Is(err, ErrDamaged) {
				t.Errorf("cut at %d: %v", i, err)
			}
		}
	}
}

// Two keys may have the same number: the one that authenticates is right.
func TestKeyNumberCollision(t *testing.T) {
	t.Parallel()
	both := ring(t, keyA, keyB)
	both.ring[1].no = both.ring[0].no
	first := NewFirstID(time.Now())
	_, _, frames := build(Message{}).Seal(nil, ring(t, keyB), first)
	if _, err := Decode(both, Plain, both.ring[0].no, first, 1, frames); err != nil {
		t.Error(err)
	}
}

func TestNewKeys(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"", keyA[1:], keyA + "00", "zz" + keyA[2:]} {
		for _, args := range [][]string{{bad}, {keyA, bad}} {
			_, err := NewKeys(args[0], args[1:]...)
			if err == nil || len(bad) > 2 && strings.Contains(err.Error(), bad[2:20]) {
				t.Errorf("NewKeys(%q): %v", args, err)
			}
		}
	}
	if diff := cmp.Diff([]int16{0, 25357, 29403}, ring(t, keyA, strings.ToUpper(keyB)).Numbers()); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]int16{0}, (*Keys)(nil).Numbers()); diff != "" {
		t.Error(diff)
	}
}

// The first vector of c2sp.org/XAES-256-GCM.
func TestXAES(t *testing.T) {
	t.Parallel()
	k, err := newKey(strings.Repeat("01", 32))
	if err != nil {
		t.Fatal(err)
	}
	nonce := []byte("ABCDEFGHIJKLMNOPQRSTUVWX")
	got := hex.EncodeToString(k.derive(nonce).Seal(nil, nonce[12:], []byte("XAES-256-GCM"), nil))
	if want := "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// Hostile input is an error and takes no more memory than it is worth. Not
// parallel: it measures the memory of the process.
func TestHostile(t *testing.T) {
	bomb := func(size int) []byte {
		return must(zstd.NewWriter(nil)).EncodeAll(make([]byte, size), nil)
	}
	if _, err := decompress(bomb(1 << 10)); err != nil { // the decoder's own buffers
		t.Fatal(err)
	}
	// A frame header that claims 79 MiB, followed by one empty last block.
	claim := []byte{0x28, 0xb5, 0x2f, 0xfd, 0xa0, 0, 0, 0xf0, 0x04, 1, 0, 0}
	for name, c := range map[string]struct {
		codec  int16
		count  int
		frames []byte
	}{
		"nothing":             {Plain, 1, nil},
		"no messages":         {Plain, 0, nil},
		"negative count":      {Plain, -1, []byte{0, 0, 0, 0, 0}},
		"count above block":   {Plain, 1025, make([]byte, 5*1025)},
		"huge count":          {Plain, 1 << 40, make([]byte, 5)},
		"one too few":         {Plain, 2, make([]byte, 5)},
		"one too many":        {Plain, 1, make([]byte, 10)},
		"trailing byte":       {Plain, 1, make([]byte, 6)},
		"length past the end": {Plain, 1, []byte{0, 0, 0, 0, 1}},
		"length 4 GiB":        {Plain, 1, []byte{0, 0xff, 0xff, 0xff, 0xff}},
		"unknown flag":        {Plain, 1, []byte{0x20, 0, 0, 0, 0}},
		"two transaction ids": {Plain, 1, append([]byte{flagUUID | flagText}, make([]byte, 30)...)},
		"empty text id":       {Plain, 1, append([]byte{flagText}, make([]byte, 8)...)},
		"cut UUID":            {Plain, 1, append([]byte{flagUUID}, make([]byte, 10)...)},
		"cut trace":           {Plain, 1, append([]byte{flagTrace}, make([]byte, 10)...)},
		"cut producer":        {Plain, 1, []byte{flagSub, 0, 0, 0, 9}},
		"cut headers":         {Plain, 1, []byte{flagHeaders, 0, 0, 0}},
		"codec 2":             {2, 1, make([]byte, 5)},
		"codec -1":            {-1, 1, make([]byte, 5)},
		"not zstd":            {Zstd, 1, []byte("hello, world")},
		"empty zstd":          {Zstd, 1, nil},
		"bomb":                {Zstd, 1, bomb(1 << 30)},
		"bombs":               {Zstd, 1, append(bomb(60<<20), bomb(60<<20)...)},
		"claim":               {Zstd, 1, claim},
	} {
		var before, after runtime.MemStats
		most := uint64(128 << 10)
		if strings.HasPrefix(name, "bomb") {
			most = 3 * maxDecoded
		}
		runtime.ReadMemStats(&before)
		_, err := Decode(nil, c.codec, 0, uuid.UUID{}, c.count, c.frames)
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > most {
			t.Errorf("%s: %d bytes allocated", name, n)
		}
		if !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Every cut and every flipped bit of stored frames either reads as something
// or is ErrDamaged; compressed frames carry a checksum and always tell.
func TestDamage(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(8, 9))
	messages := make([]Message, 20)
	for i := range messages {
		messages[i] = randomMessage(rng)
	}
	for _, messages := range [][]Message{messages[:5], benchMessages("json", 10)} {
		codec, _, frames := build(messages...).Seal(nil, nil, uuid.UUID{})
		for i := range frames {
			if _, err := Decode(nil, codec, 0, uuid.UUID{}, len(messages), frames[:i]); !errors.Is(err, ErrDamaged) {
				t.Errorf("codec %d cut at %d: %v", codec, i, err)
			}
			bad := slices.Clone(frames)
			bad[i] ^= 1 << rng.IntN(8)
			d, err := Decode(nil, codec, 0, uuid.UUID{}, len(messages), bad)
			if err != nil && !errors.Is(err, ErrDamaged) {
				t.Errorf("codec %d, byte %d: %v", codec, i, err)
			}
			for j := range messages {
				if err == nil {
					d.At(j)
				}
			}
		}
	}
}

func TestFirstID(t *testing.T) {
	t.Parallel()
	now := time.Now()
	seen := map[uuid.UUID]bool{}
	for i := range 10_000 {
		at := now.Add(time.Duration(i) * time.Microsecond)
		first := NewFirstID(at)
		last := ID(first, idBlock-1)
		for _, id := range []uuid.UUID{first, last} {
			if id.Version() != 7 || id.Variant() != uuid.RFC4122 {
				t.Fatalf("%v is not a UUIDv7", id)
			}
			sec, ns := id.Time().UnixTime()
			if got := time.Unix(sec, ns).UnixMilli(); got != at.UnixMilli() {
				t.Fatalf("%v says %d ms, want %d", id, got, at.UnixMilli())
			}
		}
		if first[15] != 0 || first[14]&3 != 0 || !bytes.Equal(first[:14], last[:14]) {
			t.Fatalf("%v does not own a block of %d", first, idBlock)
		}
		if seen[first] {
			t.Fatalf("%v twice", first)
		}
		seen[first] = true
		if earlier := NewFirstID(at.Add(-time.Microsecond)); bytes.Compare(earlier[:], first[:]) >= 0 {
			t.Fatalf("%v of a microsecond before %v", earlier, first)
		}
	}
}

func TestIndexOf(t *testing.T) {
	t.Parallel()
	first, other := NewFirstID(time.Now()), NewFirstID(time.Now().Add(time.Second))
	before := first
	before[14], before[15] = first[14]-1, 0xff
	for _, c := range []struct {
		id    uuid.UUID
		count int
		want  int
		ok    bool
	}{
		{first, 1, 0, true},
		{ID(first, 999), 1000, 999, true},
		{ID(first, 1000), 1000, 0, false},
		{before, 1000, 0, false},
		{other, 1000, 0, false},
		{uuid.UUID{}, 1000, 0, false},
	} {
		if i, ok := IndexOf(first, c.count, c.id); ok != c.ok || ok && i != c.want {
			t.Errorf("IndexOf(%v, %d, %v) = %d, %v", first, c.count, c.id, i, ok)
		}
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	h := NewHasher(7)
	if b := build(Message{}, Message{}); len(b.Keys()) != 0 || KeyAt(b.Keys(), 1) != (Key{}) {
		t.Error("minted ids have keys")
	}
	keys := build(Message{}, Message{TransactionID: "a"}, Message{}, Message{TransactionID: "b"}, Message{TransactionID: "a"}, Message{}).Keys()
	if len(keys) != 6*16 {
		t.Fatalf("%d bytes of keys", len(keys))
	}
	for i, want := range []Key{{}, h.Key("a"), {}, h.Key("b"), h.Key("a"), {}, {}} {
		if got := KeyAt(keys, i); got != want {
			t.Errorf("KeyAt(%d) = %x, want %x", i, got, want)
		}
	}
	for _, c := range []struct {
		from int
		key  Key
		want int
	}{
		{0, h.Key("a"), 1}, {-5, h.Key("a"), 1}, {1, h.Key("a"), 1}, {2, h.Key("a"), 4}, {5, h.Key("a"), -1}, {99, h.Key("a"), -1},
		{0, h.Key("b"), 3}, {0, h.Key("c"), -1}, {0, Key{}, -1},
	} {
		if got := FindKey(keys, c.from, c.key); got != c.want {
			t.Errorf("FindKey(%d, %x) = %d, want %d", c.from, c.key, got, c.want)
		}
	}
	if FindKey(keys[:20], 0, h.Key("a")) != -1 || FindKey(nil, 0, h.Key("a")) != -1 {
		t.Error("FindKey reads past the end")
	}
	if h.Key("a") != h.KeyBytes([]byte("a")) || h.Key("a") == NewHasher(8).Key("a") {
		t.Error("Key is not seeded, or differs from KeyBytes")
	}
	if nonZero(struct{ Hi, Lo uint64 }{}) == (Key{}) {
		t.Error("the zero hash is the zero key")
	}
}

func TestConcurrentUse(t *testing.T) {
	t.Parallel()
	keys := ring(t, keyA)
	var wg sync.WaitGroup
	for seed := range uint64(4) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, 0))
			messages := make([]Message, 50)
			for range 10 {
				for i := range messages {
					messages[i] = randomMessage(rng)
				}
				checkRoundTrip(t, keys, messages)
			}
		})
	}
	wg.Wait()
}

func goldenMessages() []Message {
	trace := uuid.MustParse("0af76519-16cd-43dd-8448-eb211c80319c")
	return []Message{
		{},
		{Payload: []byte("hello")},
		{TransactionID: "0195f7a8-1234-7abc-8def-0123456789ab", Payload: []byte(`{"a":1}`)},
		{TransactionID: "0195F7A8-1234-7ABC-8DEF-0123456789AB", Headers: []byte(`{}`)},
		{TransactionID: "order-1", TraceID: &trace, ProducerSub: "alice", Headers: []byte(`{"h":"v"}`), Payload: []byte{0, 1, 0xff}},
		{Payload: bytes.Repeat([]byte("ferry "), 40)},
	}
}

// TestGolden pins what is stored. If it fails, the change makes stored data
// unreadable: add a codec or a flag instead, and keep reading the old bytes.
func TestGolden(t *testing.T) {
	t.Parallel()
	first := uuid.MustParse("0195f7a8-1234-7000-8000-000000000400")
	b := build(goldenMessages()...)
	_, _, frames := b.Seal(nil, nil, first)
	golden := map[string]string{}
	file, err := os.ReadFile("testdata/golden.txt")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(file)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		golden[name] = value
	}
	keys := ring(t, keyA)
	for name, got := range map[string]string{
		"frames": hex.EncodeToString(frames),
		"keys":   hex.EncodeToString(b.Keys()),
		"key_no": fmt.Sprint(keys.ring[0].no),
		"id_4":   ID(first, 4).String(),
	} {
		if got != golden[name] {
			t.Errorf("%s\n got %s\nwant %s", name, got, golden[name])
		}
	}
	for name, c := range map[string]struct{ codec, keyNo int16 }{
		"frames":         {Plain, 0},
		"zstd":           {Zstd, 0},
		"encrypted":      {Plain, keys.ring[0].no},
		"encrypted_zstd": {Zstd, keys.ring[0].no},
	} {
		frames, err := hex.DecodeString(golden[name])
		if err != nil {
			t.Fatal(err)
		}
		d, err := Decode(keys, c.codec, c.keyNo, first, 6, frames)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for i, want := range goldenMessages() {
			if got := d.At(i); !equal(want, got) {
				t.Errorf("%s, message %d (-want +got):\n%s", name, i, cmp.Diff(want, got, cmpopts.EquateEmpty()))
			}
		}
	}
}

func TestDecodeRange(t *testing.T) {
	b := NewBuilder(NewHasher(1))
	for i := range 10 {
		b.Append(&Message{TransactionID: string(rune('a' + i)), Payload: []byte{byte('0' + i)}})
	}
	first := NewFirstID(time.Now())
	codec, keyNo, frames := b.Seal(nil, nil, first)
	for from := range 11 {
		for to := from; to <= 10; to++ {
			d, err := DecodeRange(nil, codec, keyNo, first, 10, frames, from, to)
			if err != nil {
				t.Fatal(err)
			}
			for i := from; i < to; i++ {
				if m := d.At(i); m.TransactionID != string(rune('a'+i)) || string(m.Payload) != string(rune('0'+i)) {
					t.Fatalf("[%d,%d) message %d is %+v", from, to, i, m)
				}
			}
		}
	}
	if _, err := DecodeRange(nil, codec, keyNo, first, 10, frames[:len(frames)-1], 0, 9); err != nil {
		t.Errorf("the last message is not asked for: %v", err)
	}
	if _, err := DecodeRange(nil, codec, keyNo, first, 10, frames, 3, 11); !errors.Is(err, ErrDamaged) {
		t.Errorf("past the end: %v", err)
	}
}
