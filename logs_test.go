package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"ferrymq/db"
	"ferrymq/dbtest"
	"ferrymq/localpg"
)

// A database that is away makes two lines, and complaints are not written more often than once in a while, none lost from count.
func TestCalmLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		plain := slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}})
		c := &calm{Handler: plain, repeats: map[string]*repeat{}}
		log := slog.New(c)
		away := db.Text(fmt.Errorf("flush: %w", db.ErrAcquire))
		full := db.Text(errors.New("no space"))
		said := func(want ...string) {
			t.Helper()
			synctest.Wait()
			c.mu.Lock()
			defer c.mu.Unlock()
			if got := strings.TrimSpace(out.String()); got != strings.Join(want, "\n") {
				t.Errorf("said\n%s\nwant\n%s", got, strings.Join(want, "\n"))
			}
			out.Reset()
		}
		log.Warn("waiting for the database", "error", away)
		log.Warn("waiting for the database", "error", away)
		said(`level=WARN msg="waiting for the database" error="`+away.String()+`"`, `level=WARN msg="waiting for the database" error="`+away.String()+`"`)

		var mu sync.Mutex
		var gone error
		set := func(err error) { mu.Lock(); gone = err; mu.Unlock() }
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		c.watch(ctx, func(context.Context) error { mu.Lock(); defer mu.Unlock(); return gone })

		set(errors.New("refused"))
		for range 100 {
			log.Warn("flush failed", "operations", 1, "error", away)
			log.Error("a push failed", "error", away)
			log.Info("draining")
			time.Sleep(29 * time.Millisecond) // so that the database is back between two looks
		}
		set(nil)
		time.Sleep(probeEvery)
		said(append(append([]string{`level=WARN msg="no connection to the database, trying again" error="` + away.String() + `"`}, strings.Split(strings.Repeat("level=INFO msg=draining\n", 100), "\n")[:100]...),
			`level=INFO msg="the database answers again" after=3s failures=200`)...)

		// One that comes and goes is not worth ten lines a second.
		for range 20 {
			log.Warn("flush failed", "error", away)
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(time.Second)
		said(`level=WARN msg="no connection to the database, trying again" error="`+away.String()+`"`, `level=INFO msg="the database answers again" after=2s failures=20`)

		for range 25 {
			log.Error("a push failed", "queue", "a", "error", full)
			time.Sleep(time.Second)
		}
		log.Error("a push failed", "queue", "b", "error", full)
		said(`level=ERROR msg="a push failed" queue=a error="no space"`, `level=ERROR msg="a push failed" queue=a error="no space" times=10`,
			`level=ERROR msg="a push failed" queue=a error="no space" times=10`, `level=ERROR msg="a push failed" queue=b error="no space"`)

		// What is remembered is bounded.
		for n := range 3 * manyRepeats {
			log.Warn("something else", "name", fmt.Sprint(n))
		}
		if n := len(c.repeats); n > manyRepeats {
			t.Errorf("%d complaints are remembered", n)
		}
	})
}

// A broker whose database goes away and comes back, under load, says so: once each, and what it is and where when it starts.
func TestLogOfAnOutage(t *testing.T) {
	t.Parallel()
	s := dbtest.Durable(t)
	p := spawn(t, "DATABASE_URL="+s.DSN)
	u := p.ready(t)
	for _, want := range []string{`database=\S+`, `authentication=off`, `encryption=off`, `schema=\d+`, `connections=\d+`} {
		p.await(t, `msg=ready .*`+want)
	}
	ending := make(chan struct{})
	var load sync.WaitGroup
	for range 4 {
		load.Go(func() {
			for {
				select {
				case <-ending:
					return
				default:
					p.call("POST", u+"/api/v1/push", `{"items":[{"queue":"q","payload":1}]}`)
					p.call("GET", u+"/api/v1/pop/queue/q?autoAck=true&wait=true&timeout=100", "")
				}
			}
		})
	}
	defer load.Wait()
	defer close(ending)
	s.Stop()
	p.await(t, `no connection to the database, trying again`)
	time.Sleep(2 * time.Second) // every part of the broker has met it by then
	again, err := localpg.Start(t.Context(), localpg.Options{Dir: s.Dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Stop)
	p.await(t, `the database answers again" after=\S+ failures=\d+`)
	p.must(t, 201, "POST", u+"/api/v1/push", `{"items":[{"queue":"q","payload":1}]}`)
	if all := regexp.MustCompile(`level=(WARN|ERROR).*`).FindAllString(p.String(), -1); len(all) != 1 {
		t.Errorf("warnings and errors:\n%s", strings.Join(all, "\n"))
	}
}

// A database that takes no writes is as good as none, however well it answers.
func TestLogOfAReadOnlyDatabase(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	admin := dbtest.Pool(t, dsn, 1)
	p := spawn(t, "DATABASE_URL="+dsn)
	u := p.ready(t)
	set := func(to string) {
		t.Helper()
		for _, sql := range []string{"begin read write; do $$ begin execute format('alter database %I " + to + "', current_database()); end $$; commit",
			"select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"} {
			if _, err := admin.Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
		}
	}
	set("set default_transaction_read_only = on")
	p.await(t, `no connection to the database, trying again`)
	for began := time.Now(); time.Since(began) < 3*time.Second; {
		p.call("POST", u+"/api/v1/push", `{"items":[{"queue":"q","payload":1}]}`)
	}
	if strings.Contains(p.String(), "answers again") {
		t.Error("it is said to be back while it is read-only")
	}
	set("reset default_transaction_read_only")
	p.await(t, `the database answers again`)
	if n := strings.Count(p.String(), "no connection to the database"); n != 1 {
		t.Errorf("it was said %d times", n)
	}
}

// Who runs a broker on a database that may lose things is told, in each start.
func TestLogOfHazards(t *testing.T) {
	t.Parallel()
	p := spawn(t, "DATABASE_URL="+dbtest.New(t)) // whose server is made for tests
	p.ready(t)
	p.await(t, `level=WARN msg="fsync is off in this database: .*fix="set fsync = on"`)
	p.await(t, `level=WARN msg="synchronous_commit is off in this database: `)
}
