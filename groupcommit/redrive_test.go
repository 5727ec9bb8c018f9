package groupcommit_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/dbtest"
	"ferrymq/groupcommit"
)

// dead makes a dead letter of a new message and returns its id.
func (b *broker) dead(queue, partition, id string) uuid.UUID {
	b.t.Helper()
	b.push(queue, partition, item{id: id, payload: fmt.Sprintf("%q", id)})
	d := b.need(route(queue, partition, "g", 1, soon), id)
	b.ack("g", d, groupcommit.DeadLetter, d.messages...)
	var dead uuid.UUID
	if err := b.Pool.QueryRow(b.t.Context(), `select id from ferrymq.dead_letters where transaction_id = $1`, id).Scan(&dead); err != nil {
		b.t.Fatal(err)
	}
	return dead
}

// TestRedriveOnce: whoever else wants the row, there is one copy, or the row is still there.
func TestRedriveOnce(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	pool := admin(t, bs[0].dsn)
	const q = "redrive.q"
	for n := range rounds(30) {
		id := fmt.Sprint("m", n)
		dead := bs[0].dead(q, "p", id)
		var moved, gone atomic.Int64
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				r := &groupcommit.Redrive{ID: dead}
				if i%3 == 0 {
					other := fmt.Sprint("other", i%2)
					r.Name = &other
				}
				switch _, err := bs[i%2].Redrive(context.Background(), r); {
				case err == nil:
					moved.Add(1)
				case errors.Is(err, groupcommit.ErrNoDeadLetter):
					gone.Add(1)
				default:
					t.Error(err)
				}
			})
		}
		all.Wait()
		if moved.Load() != 1 || gone.Load() != 19 {
			t.Fatalf("%d moved, %d gone", moved.Load(), gone.Load())
		}
		copies := 0
		for _, ms := range readStored(t, bs[0]) {
			for _, m := range ms {
				if m.tx == "dlq:"+dead.String() {
					copies++
				}
			}
		}
		if left := number(t, pool, `select count(*) from ferrymq.dead_letters`); copies != 1 || left != 0 {
			t.Fatalf("%d copies, %d dead letters", copies, left)
		}
		for _, p := range []string{"p", "other0", "other1"} {
			bs[0].pop(auto(route(q, p, "g", 10, 0)))
		}
	}
	// Another session has deleted it and not committed.
	conn, err := pgx.Connect(t.Context(), bs[0].dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	for end, want := range map[string]error{"commit": groupcommit.ErrNoDeadLetter, "rollback": nil} {
		dead := bs[0].dead(q, "p", end)
		for _, s := range []string{"begin", "delete from ferrymq.dead_letters"} {
			if _, err := conn.Exec(t.Context(), s); err != nil {
				t.Fatal(err)
			}
		}
		o := background(t, func() error {
			_, err := bs[0].Redrive(context.Background(), &groupcommit.Redrive{ID: dead})
			return err
		})
		dbtest.WaitBlocked(t, pool, 1)
		// Meanwhile the partition is not held.
		if err := bs[1].goPush(t, q, "p", item{payload: `"beside"`}).wait(t, "a push beside a redrive that waits", soon); err != nil {
			t.Error(err)
		}
		if _, err := conn.Exec(t.Context(), end); err != nil {
			t.Fatal(err)
		}
		is(t, end, o.wait(t, end, soon), want)
		bs[0].pop(auto(route(q, "p", "g", 10, 0)))
	}
}

// TestRedriveAllOrNothing: what fails on the way leaves the dead letter where it was, and its id free.
func TestRedriveAllOrNothing(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	c, through := newCutter(t, dbtest.Through(t, dsn))
	b := start(t, dsn, setup{alone: true, recheck: slow, through: through})
	pool := admin(t, dsn)
	const q = "atomic.q"
	dead := b.dead(q, "p", "m")
	exec(t, pool, `create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$`)
	exec(t, pool, `create trigger refuse before insert on ferrymq.segments for each row execute function refuse()`)
	if _, err := b.Redrive(t.Context(), &groupcommit.Redrive{ID: dead}); err == nil {
		t.Error("moved although nothing can be stored")
	}
	exec(t, pool, `drop trigger refuse on ferrymq.segments`)
	for _, how := range []int32{1, 2} {
		c.cut.Store(how)
		_, err := b.Redrive(t.Context(), &groupcommit.Redrive{ID: dead})
		is(t, "a redrive whose commit was cut", err, groupcommit.ErrUnknown)
		if left, want := number(t, pool, `select count(*) from ferrymq.dead_letters`), int64(2-how); left != want {
			t.Errorf("%d dead letters are left, want %d", left, want)
		}
	}
	_, err := b.Redrive(t.Context(), &groupcommit.Redrive{ID: dead})
	is(t, "once more", err, groupcommit.ErrNoDeadLetter)
	if d := b.pop(auto(route(q, "p", "h", 10, 0))); d.payloads() != "m m" || d.messages[1].tx != "dlq:"+dead.String() {
		t.Errorf("%q", d.payloads())
	}
}

// TestBuryAgainstPush: the last message becomes a dead letter while another is pushed. Whoever commits first, it is found.
func TestBuryAgainstPush(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	dsn := bs[0].dsn
	const q = "bury.q"
	bs[0].push(q, "p", item{id: "last", payload: `"last"`})
	d := bs[1].need(wide(q, "g", 1, 1, 0), "last")
	parked := bs[1].park(wide(q, "g", 1, 1, soon))
	release := stopAtCommit(t, dsn, "dead_letters")
	bury := background(t, func() error {
		_, err := bs[0].BuryHead(context.Background(), d.messages[0].public, "last", "g", "by hand")
		return err
	})
	awaitStopped(t, bs[0])
	push := bs[1].goPush(t, q, "p", item{payload: `"next"`})
	dbtest.WaitBlocked(t, admin(t, dsn), 1)
	release()
	for _, o := range []*outcome{bury, push} {
		if err := o.wait(t, "bury and push", soon); err != nil {
			t.Error(err)
		}
	}
	if d := parked.wait(t); d.payloads() != "next" {
		t.Errorf("%q", d.payloads())
	}
}

// TestBuryTogether: many bury one message at once, also for a group that has never been there: one dead letter.
func TestBuryTogether(t *testing.T) {
	t.Parallel()
	bs := together(t, 2, setup{recheck: slow})
	const q = "bury.q"
	for n := range rounds(20) {
		p := fmt.Sprint("p", n)
		bs[0].push(q, p, item{id: "m", payload: `"m"`})
		found, err := bs[0].Catalog.Partitions(t.Context(), &catalog.Queue{ID: int32(number(t, bs[0].Pool, `select id from ferrymq.queues`))}, []string{p})
		if err != nil {
			t.Fatal(err)
		}
		var done atomic.Int64
		var all sync.WaitGroup
		for i := range 6 {
			all.Go(func() {
				_, err := bs[i%2].BuryHead(context.Background(), found[0].Row().PublicID, "m", fmt.Sprint("g", n%3), "x")
				if err == nil {
					done.Add(1)
				} else if !errors.Is(err, groupcommit.ErrNotNext) {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if left := number(t, bs[0].Pool, `select count(*) from ferrymq.dead_letters`); done.Load() != 1 || left != int64(n+1) {
			t.Fatalf("%d say they did it, there are %d dead letters after %d rounds", done.Load(), left, n+1)
		}
	}
}
