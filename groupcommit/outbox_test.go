package groupcommit_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
	"ferrymq/segment"
	"ferrymq/wake"
)

// kept are the payloads of a stream by key, in order; "" are all that have none.
func kept(t testing.TB, pool *pgxpool.Pool, stream string) map[string][]string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `select case when p.hidden then '' else p.name end, s.codec, s.key_no, s.first_id, s.count, s.frames
		from ferrymq.segments s join ferrymq.partitions p on p.id = s.partition_id join ferrymq.queues q on q.id = p.queue_id
		where q.name = $1 and q.deleted_at is null order by p.id, s.base_offset`, stream)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	out := make(map[string][]string)
	for rows.Next() {
		var key string
		var codec, keyNo int16
		var first uuid.UUID
		var count int
		var frames []byte
		if err := rows.Scan(&key, &codec, &keyNo, &first, &count, &frames); err != nil {
			t.Fatal(err)
		}
		open, err := segment.Decode(nil, codec, keyNo, first, count, frames)
		if err != nil {
			t.Fatal(err)
		}
		for i := range count {
			out[key] = append(out[key], string(open.At(i).Payload))
		}
	}
	if rows.Err() != nil {
		t.Fatal(rows.Err())
	}
	return out
}

// has waits until a key holds exactly these payloads.
func (b *broker) has(stream, key, want string) {
	b.t.Helper()
	var got string
	eventually(b.t, want+" in "+stream+"/"+key, func() bool {
		got = strings.Join(kept(b.t, b.Pool, stream)[key], " ")
		return got == want || len(got) > len(want)
	})
	if got != want {
		b.t.Fatalf("%s/%s holds %s, want %s", stream, key, got, want)
	}
}

// told is a broker that looks at the outbox only when it is told to, or a message is due.
func told(t *testing.T, dsn string) *broker {
	t.Helper()
	b := start(t, dsn, setup{alone: true, recheck: slow, change: func(o *groupcommit.Options) { o.Announce = nil }})
	b.SetPeers(30)
	conn, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	bus := wake.Open(wake.Options{Conn: conn, Log: b.Log, OnHint: b.Hint, OnQueue: b.QueueChanged, OnMove: b.LookOutbox, OnLost: b.LookAll})
	t.Cleanup(bus.Close)
	eventually(t, "the bus listens", bus.Listening)
	time.Sleep(1100 * time.Millisecond) // the first look may have been planned before the peers were known
	return b
}

func TestPublishFromTransaction(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	b := told(t, dsn)
	pool := dbtest.Pool(t, dsn, 4)
	q, g := b.subscribe("orders", "mail", nil)

	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `select ferrymq.publish('orders', 'k', '"rolled back"')`); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := b.Parked()
	got := make(chan []*lane, 1)
	go func() { got <- b.receive(q, g, 10, 20*time.Second) }()
	eventually(t, "the receive is parked", func() bool { return b.Parked() > before })

	tx, err = pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if _, err := tx.Exec(t.Context(), `select ferrymq.publish('orders', 'k', ' { "n" :  1.50, "s": "\u0000" }', '{"trace": "x"}')`); err != nil {
		t.Fatal(err)
	}
	// It may stay open: nobody waits for it, not for its key either.
	if _, err := b.tryPush(t.Context(), "orders", "other", item{payload: "1"}); err != nil {
		t.Fatal(err)
	}
	select {
	case ls := <-got:
		if len(ls) != 1 || ls[0].key != "other" {
			t.Fatalf("received %+v", ls)
		}
	case <-time.After(soon):
		t.Fatal("the receive got nothing")
	}
	b.push("orders", "k", item{payload: "2"})
	exec(t, pool, `select ferrymq.publish('orders', 'k', '3')`)
	b.has("orders", "k", "2 3")

	for _, l := range b.receive(q, g, 10, 0) {
		l.Until = time.Time{}
		if err := b.AckLanes(t.Context(), g, one([]*lane{l})); err != nil {
			t.Fatal(err)
		}
	}
	for _, l := range b.receive(q, g, 10, 0) {
		if err := b.AckLanes(t.Context(), g, one([]*lane{l})); err != nil {
			t.Fatal(err)
		}
	}
	before = b.Parked()
	go func() { got <- b.receive(q, g, 10, 20*time.Second) }()
	eventually(t, "the receive is parked", func() bool { return b.Parked() > before })
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	select {
	case ls := <-got:
		if len(ls) != 1 || ls[0].payload != `{ "n" :  1.50, "s": "\u0000" }` {
			t.Fatalf("received %+v", ls)
		}
		t.Logf("woken after %v", time.Since(began))
	case <-time.After(soon):
		t.Fatal("the commit woke nobody")
	}
	if n := number(t, pool, "select count(*) from ferrymq.outbox"); n != 0 {
		t.Errorf("%d rows are left", n)
	}
}

// The same on the other of two brokers, whichever moved it.
func TestPublishWakesEveryBroker(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	for i, b := range bs {
		q, g := b.subscribe(fmt.Sprint("orders", i), fmt.Sprint("sub", i), nil)
		before := b.Parked()
		got := make(chan []*lane, 1)
		go func() { got <- b.receive(q, g, 1, 20*time.Second) }()
		eventually(t, "the receive is parked", func() bool { return b.Parked() > before })
		exec(t, bs[1-i].Pool, `select ferrymq.publish($1, 'k', '1')`, fmt.Sprint("orders", i))
		select {
		case ls := <-got:
			if len(ls) != 1 {
				t.Fatalf("broker %d received %d", i, len(ls))
			}
		case <-time.After(soon):
			t.Fatalf("broker %d got nothing", i)
		}
	}
}

// Two brokers move what many transactions publish, in order and once each, while they are closed, started and cut off.
func TestMoveInOrder(t *testing.T) {
	t.Parallel()
	const writers, keys, each = 4, 25, 100
	bs := together(t, 2, setup{})
	dsn := bs[0].dsn
	pool := dbtest.Pool(t, dsn, writers+3)
	var writing sync.WaitGroup
	for w := range writers {
		writing.Add(1)
		go func() {
			defer writing.Done()
			for n := 0; n < each; {
				// Each transaction continues every key of its writer.
				some := min(1+(n+w)%7, each-n)
				for {
					_, err := pool.Exec(context.Background(), `select ferrymq.publish('orders', 'k' || $1::int || '.' || k, to_json(n), id => case when k < 5 then 'id' || n end)
						from generate_series($2::int, $3::int) n, generate_series(1, $4::int) k`, w, n, n+some-1, keys)
					if err == nil {
						break
					}
					t.Error(err)
					return
				}
				n += some
			}
		}()
	}
	written := make(chan struct{})
	go func() { writing.Wait(); close(written) }()
	for i, done := 0, false; !done; i++ {
		switch i % 3 {
		case 0:
			bs[i/3%2].stop()
			bs[i/3%2].Pool.Close()
			bs[i/3%2] = start(t, dsn, setup{})
		default:
			exec(t, pool, `select pg_terminate_backend(a.pid) from pg_stat_activity a where a.datname = current_database() and a.pid <> pg_backend_pid()
				and a.query ~ 'name: (Outbox|AppendSegments|CreatePartitions|MarkPending)|^commit' and a.query !~ 'publish'`)
		}
		select {
		case <-written:
			done = i > 12 && number(t, pool, "select count(*) from ferrymq.outbox") == 0
		case <-time.After(100 * time.Millisecond):
		}
	}
	got := kept(t, pool, "orders")
	if len(got) != writers*keys {
		t.Fatalf("%d keys", len(got))
	}
	for key, payloads := range got {
		if len(payloads) != each {
			t.Errorf("%s: %d messages", key, len(payloads))
		}
		for i, p := range payloads {
			if p != fmt.Sprint(i) {
				t.Errorf("%s: message %d is %s", key, i, p)
				break
			}
		}
	}
}

func TestDelay(t *testing.T) {
	t.Parallel()
	b := start(t, dbtest.New(t), setup{alone: true, recheck: slow})
	b.SetPeers(30)
	time.Sleep(1100 * time.Millisecond)
	q, g := b.subscribe("orders", "mail", nil)
	k := "k"
	message := func(payload, id string) segment.Message {
		return segment.Message{Payload: []byte(payload), TransactionID: id, Headers: []byte(`{"h":1}`), ProducerSub: "me"}
	}
	began := time.Now()
	ids, err := b.Schedule(t.Context(), q, []groupcommit.Scheduled{
		{Key: &k, Delay: 2200 * time.Millisecond, Message: message("3", "")},
		{Key: &k, Delay: 2000 * time.Millisecond, Message: message("1", "once")}, // long enough that what follows is done by then
		{Key: &k, Delay: 2000 * time.Millisecond, Message: message("2", "")},
		{Key: &k, Delay: 2300 * time.Millisecond, Message: message("4", "once")},
		{Delay: 2250 * time.Millisecond, Message: message("5", "")},
		{Key: &k, Delay: time.Hour, Message: message("6", "")},
	})
	if err != nil || len(ids) != 6 || !slices.IsSorted(ids) {
		t.Fatal(ids, err)
	}
	b.push("orders", "k", item{payload: "0"}) // nothing is held up
	first := b.receive(q, g, 1, 0)
	if len(first) != 1 || first[0].payload != "0" {
		t.Fatalf("%+v", first)
	}
	if err := b.AckLanes(t.Context(), g, one(first)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"1", "2"} {
		got := b.receive(q, g, 1, 20*time.Second)
		if len(got) != 1 || got[0].payload != want {
			t.Fatalf("%+v, want %s", got, want)
		}
		if took := time.Since(began); took < 2*time.Second || took > soon+2*time.Second {
			t.Errorf("%s came after %v", want, took)
		}
		if err := b.AckLanes(t.Context(), g, one(got)); err != nil {
			t.Fatal(err)
		}
	}
	b.has("orders", "k", "0 1 2 3")
	b.has("orders", "", "5")
	eventually(t, "all is moved", func() bool { return number(t, b.Pool, "select count(*) from ferrymq.outbox") == 1 })
	b.has("orders", "k", "0 1 2 3") // the id of the last was there when it was due
	places := make([]int64, 6)
	for i, id := range ids {
		places[i] = number(t, b.Pool, "select coalesce(max(p.message_offset), -1) from ferrymq.outbox_places p where p.id = $1", id)
	}
	if want := []int64{3, 1, 2, 1, 0, -1}; !slices.Equal(places, want) {
		t.Errorf("places %v, want %v", places, want)
	}
	exec(t, b.Pool, "update ferrymq.queues set deleted_at = now()")
	if _, err := b.Schedule(t.Context(), q, []groupcommit.Scheduled{{Delay: time.Second, Message: message("7", "")}}); !errors.Is(err, catalog.ErrGone) {
		t.Errorf("a deleted stream: %v", err)
	}
}

func TestDelayEncrypted(t *testing.T) {
	t.Parallel()
	keys, err := segment.NewKeys(strings.Repeat("ab", 32))
	if err != nil {
		t.Fatal(err)
	}
	dsn := dbtest.New(t)
	b := start(t, dsn, setup{alone: true})
	q, err := b.Catalog.Configure(t.Context(), "secret", func(q *catalog.Queue) error { q.EncryptionEnabled = true; return nil })
	if err != nil {
		t.Fatal(err)
	}
	k := "k"
	delayed := []groupcommit.Scheduled{{Key: &k, Delay: time.Millisecond, Message: segment.Message{Payload: []byte(`"hidden"`)}}}
	if _, err := b.Schedule(t.Context(), q, delayed); !errors.Is(err, groupcommit.ErrNoKey) {
		t.Errorf("without a key: %v", err)
	}
	_, err = b.Pool.Exec(t.Context(), `select ferrymq.publish('secret', 'k', '1')`)
	refused(t, err, "stream secret stores its messages encrypted: only a broker can publish to it")
	c := start(t, dsn, setup{alone: true, change: func(o *groupcommit.Options) { o.Keys = keys }})
	c.PauseMoves(true)
	if _, err := c.Schedule(t.Context(), q, delayed); err != nil {
		t.Fatal(err)
	}
	exec(t, b.Pool, `select ferrymq.publish('open', 'k', '1')`)
	b.LookOutbox()
	b.has("open", "k", "1") // one that cannot be moved here holds up no other
	if n := number(t, b.Pool, "select count(*) from ferrymq.outbox where key_no > 0 and position('hidden' in frames) = 0"); n != 1 {
		t.Errorf("%d rows are encrypted", n)
	}
	c.PauseMoves(false)
	eventually(t, "it is moved", func() bool {
		return number(t, b.Pool, "select count(*) from ferrymq.segments where key_no > 0") == 1
	})
}

// A key whose partition somebody has locked waits alone, and in order.
func TestMoveBlockedKey(t *testing.T) {
	t.Parallel()
	b := start(t, dbtest.New(t), setup{alone: true})
	pool := dbtest.Pool(t, b.dsn, 4)
	for _, k := range []string{"a", "b", "c"} {
		b.push("orders", k, item{payload: "0"})
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if _, err := tx.Exec(t.Context(), "select from ferrymq.partitions where name = 'b' for update"); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, "select ferrymq.publish('orders', k, to_json(n)) from unnest(array['a', 'b', 'c', 'd']) k, generate_series(1, 2) n")
	b.has("orders", "a", "0 1 2")
	b.has("orders", "c", "0 1 2")
	b.has("orders", "d", "1 2")
	exec(t, pool, "select ferrymq.publish('orders', k, '3') from unnest(array['b', 'c']) k")
	b.has("orders", "c", "0 1 2 3")
	if n := number(t, pool, "select count(*) from ferrymq.outbox"); n != 3 {
		t.Errorf("%d rows wait", n)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.has("orders", "b", "0 1 2 3")
}

// One broker at a time moves: while another is at it, nothing is.
func TestMoveOneAtATime(t *testing.T) {
	t.Parallel()
	b := start(t, dbtest.New(t), setup{alone: true})
	pool := dbtest.Pool(t, b.dsn, 4)
	b.PauseMoves(true)
	exec(t, pool, "select ferrymq.publish('orders', 'k', to_json(n)) from generate_series(1, 3) n")
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if rows, err := db.New(tx).OutboxClaim(t.Context()); err != nil || len(rows) != 1 {
		t.Fatal(rows, err)
	}
	b.PauseMoves(false)
	for range 3 {
		b.LookOutbox()
		time.Sleep(200 * time.Millisecond)
	}
	if n := number(t, pool, "select count(*) from ferrymq.outbox"); n != 3 {
		t.Errorf("%d rows wait", n)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.has("orders", "k", "1 2 3")
}

func TestMoveOfDeletedStream(t *testing.T) {
	t.Parallel()
	b := start(t, dbtest.New(t), setup{})
	b.PauseMoves(true)
	exec(t, b.Pool, "select ferrymq.publish('orders', 'k', '1')") // before there is one
	q, err := b.Catalog.EnsureStream(t.Context(), "orders")
	if err != nil {
		t.Fatal(err)
	}
	exec(t, b.Pool, "select ferrymq.publish('orders', 'k', '2')")
	exec(t, b.Pool, "select ferrymq.publish('orders', 'k', '3', delay => '1 hour')")
	open, err := b.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer open.Rollback(context.Background())
	if _, err := open.Exec(t.Context(), "select ferrymq.publish('orders', 'k', '4')"); err != nil {
		t.Fatal(err)
	}
	if _, existed, err := b.Catalog.Delete(t.Context(), "orders"); err != nil || !existed {
		t.Fatal(existed, err)
	}
	b.maintainer.Kick()
	eventually(t, "the stream is gone", func() bool {
		return number(t, b.Pool, "select count(*) from ferrymq.queues where id = $1", q.ID) == 0
	})
	if n := number(t, b.Pool, "select count(*) from ferrymq.outbox"); n != 1 {
		t.Errorf("%d rows are left", n)
	}
	if err := open.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	exec(t, b.Pool, "select ferrymq.publish('orders', 'k', '5')")
	b.PauseMoves(false)
	b.has("orders", "k", "1 5")
	eventually(t, "nothing is left", func() bool { return number(t, b.Pool, "select count(*) from ferrymq.outbox") == 0 })
	exec(t, b.Pool, "insert into ferrymq.projects (name) values ('other')")
	b.PauseMoves(true)
	exec(t, b.Pool, "select ferrymq.publish('fees', 'k', '1', project => 'other')")
	exec(t, b.Pool, "update ferrymq.projects set deleted_at = now() where name = 'other'")
	b.PauseMoves(false)
	eventually(t, "nothing is left", func() bool { return number(t, b.Pool, "select count(*) from ferrymq.outbox") == 0 })
	if n := number(t, b.Pool, "select count(*) from ferrymq.queues where name = 'fees'"); n != 0 {
		t.Error("a stream was made in a deleted project")
	}
}

func refused(t *testing.T, err error, want string) {
	t.Helper()
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != "22023" || pg.Message != want {
		t.Errorf("%v, want %q", err, want)
	}
}

func TestPublishRefused(t *testing.T) {
	t.Parallel()
	pool := dbtest.Pool(t, dbtest.New(t), 2)
	const key, delay = "invalid key: must be 1..255 bytes, or null for a message without a key", "invalid delay: must be 0 seconds to 365 days"
	for args, want := range map[string]string{
		"'', 'k', '1'":                              "invalid stream: must be 1..255 bytes",
		"null, 'k', '1'":                            "invalid stream: must be 1..255 bytes",
		"repeat('ä', 128), 'k', '1'":                "invalid stream: must be 1..255 bytes",
		"'s', '', '1'":                              key,
		"'s', repeat('k', 256), '1'":                key,
		"'s', 'k', null":                            "payload is required (JSON null is 'null'::json)",
		"'s', 'k', '1', '[]'":                       "headers must be a JSON object",
		"'s', 'k', '1', id => ''":                   "invalid id: must be 1..512 bytes, or null",
		"'s', 'k', '1', id => repeat('i', 513)":     "invalid id: must be 1..512 bytes, or null",
		"'s', 'k', '1', delay => '-1 second'":       delay,
		"'s', 'k', '1', delay => '365 days 1 sec'":  delay,
		"'s', 'k', to_json(repeat('x', 67108863))":  "message too large: at most 67108864 bytes of payload and headers",
		"'s', 'k', '1', project => 'none'":          "no project named none",
		"'s', 'k', '1', project => null":            "no project named null",
		"'s', 'k', '1', delay => interval '2 year'": delay,
	} {
		_, err := pool.Exec(t.Context(), "select ferrymq.publish("+args+")")
		refused(t, err, want)
	}
	if n := number(t, pool, "select count(*) from ferrymq.outbox"); n != 0 {
		t.Errorf("%d rows", n)
	}
	for _, args := range []string{"'s', null, 'null'", "repeat('ä', 127), repeat('k', 255), '1', '{}', repeat('i', 512), '365 days'", "'s', 'k', '1', 'null', null, '0'"} {
		exec(t, pool, "select ferrymq.publish("+args+")")
	}
	if n := number(t, pool, "select count(*) from ferrymq.outbox where headers is null"); n != 3 {
		t.Errorf("%d rows without headers", n)
	}
}

// Whoever may execute the function needs no other right, and whoever may not has none. What they put in their search path or names is not used.
func TestPublishPrivileges(t *testing.T) {
	t.Parallel()
	pool := dbtest.Pool(t, dbtest.New(t), 2)
	role := pgx.Identifier{"publisher_" + uuid.NewString()}.Sanitize()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	try := func(sql string) error {
		sub, err := tx.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err = sub.Exec(t.Context(), sql); err != nil {
			if err := sub.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			return err
		}
		return sub.Commit(t.Context())
	}
	must := func(sql string) {
		t.Helper()
		if err := try(sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	must("create role " + role)
	must("grant usage on schema ferrymq to " + role)
	must("grant temporary on database " + pgx.Identifier{pool.Config().ConnConfig.Database}.Sanitize() + " to " + role)
	must("set local role " + role)
	const publish = "select ferrymq.publish('orders', 'k', '1')"
	if err := try(publish); db.Code(err) != "42501" {
		t.Errorf("without the right: %v", err)
	}
	must("reset role")
	must("grant execute on function ferrymq.publish to " + role)
	must("set local role " + role)
	must("create temporary table outbox (id int)")
	must("create function pg_temp.octet_length(text) returns int language sql as 'select 1/0'")
	must("set local search_path = pg_temp, pg_catalog")
	must(publish)
	for _, sql := range []string{"select from ferrymq.outbox", "insert into ferrymq.outbox (project_id, stream, payload) values (1, 's', '1')", "select from ferrymq.queues"} {
		if err := try(sql); db.Code(err) != "42501" {
			t.Errorf("%s: %v", sql, err)
		}
	}
	must("reset role")
	var n int
	if err := tx.QueryRow(t.Context(), "select count(*) from ferrymq.outbox").Scan(&n); err != nil || n != 1 {
		t.Errorf("%d rows, %v", n, err)
	}
}
