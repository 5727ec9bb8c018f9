package proof

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"ferrymq/dbtest"
)

// away are the answers while there is no database.
var away = append([]string{"*: 503 not ready, Retry-After"}, outage...)

// A database that crashes, is shut down at once, or in order, and starts again, under load, with transactions under way: nothing that was
// answered is lost, and brokers work again by themselves.
func TestDatabaseEnds(t *testing.T) {
	for name, signal := range map[string]syscall.Signal{"crash": syscall.SIGKILL, "immediate": syscall.SIGQUIT, "fast": syscall.SIGINT} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPostgres(t, "", nil)
			c := newCluster(t, p, 2)
			l := startLoad(t, c.urls(), usual())
			for range rounds(2, 20) {
				pause(time.Duration(300+rand.IntN(700))*time.Millisecond, l.ending)
				p.end(signal)
				pause(span(300*time.Millisecond, time.Duration(rand.IntN(5000))*time.Millisecond), l.ending)
				p.start()
				l.recovers()
			}
			l.verdict(p.pool())
			l.only(away...)
		})
	}
}

// A backend of a broker is killed: PostgreSQL ends all sessions and recovers.
func TestBackendKilled(t *testing.T) {
	t.Parallel()
	p := newPostgres(t, "", nil)
	c := newCluster(t, p, 2)
	l := startLoad(t, c.urls(), usual())
	for range rounds(2, 30) {
		pause(500*time.Millisecond, l.ending)
		var pid int
		if err := p.pool().QueryRow(t.Context(), `select pid from pg_stat_activity where application_name = 'ferrymq' and pid <> pg_backend_pid() order by random() limit 1`).Scan(&pid); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		eventually(t, patience, "PostgreSQL is there again", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			conn, err := pgx.Connect(ctx, p.server.DSN)
			if err == nil {
				_ = conn.Close(ctx)
			}
			return err == nil
		})
		l.recovers()
	}
	l.verdict(p.pool())
	l.only(away...)
}

// The database refuses connections for a while, and cuts those there are: calls are answered meanwhile, and everything works soon after.
func TestConnectionsRefused(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2)
	l := startLoad(t, f.urls, usual())
	pause(500*time.Millisecond, l.ending)
	_, before := f.db.count()
	f.db.refuse()
	lasted := span(3*time.Second, 30*time.Second)
	pause(lasted, l.ending)
	_, after := f.db.count()
	t.Logf("%d attempts to connect in %v", after-before, lasted)
	if float64(after-before) > 50*lasted.Seconds() {
		t.Errorf("%d attempts to connect in %v", after-before, lasted)
	}
	a := call(newClient(t), "POST", f.urls[0]+"/api/v1/push", `{"items":[{"queue":"q","payload":"x"}]}`)
	if a.status != 503 || a.header.Get("Retry-After") == "" {
		t.Errorf("a push meanwhile: %v", a)
	}
	f.db.pass()
	l.recovers()
	f.background()
	l.verdict(f.pool)
	l.only(away...)
}

// Somebody else has taken all connections that the server allows: it says 53300, and brokers live with those they have, or with none.
func TestTooManyConnections(t *testing.T) {
	t.Parallel()
	p := newPostgres(t, "", map[string]string{"max_connections": "30"})
	p.exec("create role app login")
	p.exec("grant create on database postgres to app")
	c := onDatabase(t, newProxy(t, p.dial), "postgres user=app", 2, "DB_POOL_SIZE=8")
	l := startLoad(t, c.urls(), usual())
	pause(500*time.Millisecond, l.ending)
	p.exec("create role greedy login")
	var taken []*pgx.Conn
	take := func() bool {
		conn, err := pgx.Connect(t.Context(), p.server.DSN+" user=greedy")
		if err != nil {
			return false
		}
		taken = append(taken, conn)
		return true
	}
	for take() {
	}
	if len(taken) == 0 {
		t.Fatal("no connection was to be had")
	}
	c.db.cut() // whoever of the brokers connects now is refused
	for end := time.Now().Add(span(2*time.Second, time.Minute)); time.Now().Before(end); pause(10*time.Millisecond, l.ending) {
		take()
	}
	for _, conn := range taken {
		_ = conn.Close(t.Context())
	}
	l.recovers()
	l.verdict(p.pool())
	l.only(away...)
}

// A network between brokers and database that is slow, or stands still for a while, or cuts connections all the time: calls take longer,
// or fail as documented.
func TestBadNetwork(t *testing.T) {
	for name, spoil := range map[string]func(*fleet, *load){
		"slow": func(f *fleet, l *load) {
			f.db.slow(40*time.Millisecond, 1<<20)
			pause(span(3*time.Second, 5*time.Minute), l.ending)
		},
		"still": func(f *fleet, l *load) {
			for range rounds(2, 20) {
				f.db.hold()
				pause(span(1500*time.Millisecond, time.Duration(rand.IntN(8000))*time.Millisecond), l.ending)
				f.db.pass()
				pause(500*time.Millisecond, l.ending)
			}
		},
		"cut": func(f *fleet, l *load) {
			for end := time.Now().Add(span(3*time.Second, 5*time.Minute)); time.Now().Before(end); {
				f.db.cut()
				pause(time.Duration(50+rand.IntN(400))*time.Millisecond, l.ending)
			}
		},
		"lossy": func(f *fleet, l *load) { // statements arrive and are done, and nobody hears of it
			f.db.loseAnswers(func() bool { return rand.IntN(100) == 0 })
			pause(span(3*time.Second, 5*time.Minute), l.ending)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFleet(t, 2)
			l := startLoad(t, f.urls, usual())
			pause(300*time.Millisecond, l.ending)
			spoil(f, l)
			f.db.pass()
			l.recovers()
			l.verdict(f.pool)
			l.only(away...)
		})
	}
}

// Connections that lead nowhere, without anybody being told, in both directions or in one: the other end is gone, or a firewall has
// forgotten them. Calls do not wait for them for ever, and new connections are made.
func TestHalfOpen(t *testing.T) {
	for name, lost := range map[string]struct{ requests, answers bool }{"both": {true, true}, "requests": {requests: true}, "answers": {answers: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFleet(t, 2)
			l := startLoad(t, f.urls, usual())
			for range rounds(1, 10) {
				pause(500*time.Millisecond, l.ending)
				f.db.silenceLines(lost.requests, lost.answers)
				l.heal()
				// They are noticed after 4 s. Locks that the server holds for one of them go meanwhile.
				if took := l.recovered(); took > busy*recovery {
					t.Errorf("everything works again only %v after connections went silent", took)
				} else {
					t.Logf("works again after %v", took)
				}
			}
			l.verdict(f.pool)
			l.only(append([]string{"*: no answer"}, away...)...)
		})
	}
}

// The database vanishes without a word, also for who connects anew: calls are answered meanwhile. When it is back, all that brokers do by
// themselves goes on too.
func TestSilent(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2)
	l := startLoad(t, f.urls, usual())
	pause(500*time.Millisecond, l.ending)
	f.db.silence()
	a := call(newClient(t), "POST", f.urls[0]+"/api/v1/push", `{"items":[{"queue":"other","payload":1}]}`)
	t.Logf("a push meanwhile: %v", a)
	if a.status != 503 || a.header.Get("Retry-After") == "" || a.took > 4*recovery {
		t.Errorf("a push meanwhile: %v", a)
	}
	pause(span(0, 2*time.Minute), l.ending)
	f.db.pass()
	l.recovers()
	f.background()
	l.verdict(f.pool)
	l.only(append([]string{"*: no answer"}, away...)...)
}

// background checks that brokers listen to each other and have heartbeats.
func (f *fleet) background() {
	f.t.Helper()
	eventually(f.t, patience, "all brokers listen and have a heartbeat", func() bool {
		var listening, beating int
		if err := f.pool.QueryRow(f.t.Context(), `select (select count(*) from pg_stat_activity where datname = current_database() and query like 'listen%'),
			(select count(*) from ferrymq.brokers where seen_at > clock_timestamp() - interval '3 seconds')`).Scan(&listening, &beating); err != nil {
			f.t.Fatal(err)
		}
		return listening >= len(f.brokers) && beating >= len(f.brokers)
	})
}

// standby makes a copy of a server that follows it, and waits until it does.
func (p *postgres) standby() *postgres {
	p.t.Helper()
	config, err := pgx.ParseConfig(p.server.DSN)
	if err != nil {
		p.t.Fatal(err)
	}
	dir := dbtest.DataDir(p.t)
	data := filepath.Join(dir, "pg")
	old, err := filepath.Glob(filepath.Join(data, "*"))
	if err != nil {
		p.t.Fatal(err)
	}
	for _, f := range old { // the directory itself is the server's
		if err := os.RemoveAll(f); err != nil {
			p.t.Fatal(err)
		}
	}
	// By hand: not every PostgreSQL comes with pg_basebackup.
	conn, err := pgx.ConnectConfig(p.t.Context(), config)
	if err != nil {
		p.t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(p.t.Context(), "select pg_backup_start('standby', true)"); err != nil {
		p.t.Fatal(err)
	}
	copied := p.server.Command("cp", "-R", filepath.Join(p.dir, "pg")+"/.", data)
	copied.Env = append(copied.Env, "LC_ALL=C")
	if out, err := copied.CombinedOutput(); err != nil { // some files are gone before it comes to them
		for line := range strings.Lines(string(out)) {
			if !strings.Contains(line, "No such file or directory") {
				p.t.Fatalf("%v\n%s", err, out)
			}
		}
	}
	var label string
	if err := conn.QueryRow(p.t.Context(), "select labelfile from pg_backup_stop(false)").Scan(&label); err != nil {
		p.t.Fatal(err)
	}
	owner, err := os.Stat(data)
	if err != nil {
		p.t.Fatal(err)
	}
	for name, text := range map[string]string{"backup_label": label, "standby.signal": "",
		"postgresql.auto.conf": fmt.Sprintf("primary_conninfo = 'host=%s port=%d user=%s'\n", config.Host, config.Port, config.User)} {
		file := filepath.Join(data, name)
		err := os.WriteFile(file, []byte(text), 0o600)
		if err == nil && os.Geteuid() == 0 {
			err = os.Chown(file, int(owner.Sys().(*syscall.Stat_t).Uid), -1)
		}
		if err != nil {
			p.t.Fatal(err)
		}
	}
	if err := os.Remove(filepath.Join(data, "postmaster.pid")); err != nil {
		p.t.Fatal(err)
	}
	s := newPostgres(p.t, dir, p.settings)
	pool := p.pool()
	eventually(p.t, patience, "it follows", func() bool {
		var n int
		return pool.QueryRow(p.t.Context(), "select count(*) from pg_stat_replication where state = 'streaming'").Scan(&n) == nil && n == 1
	})
	// What a commit says is true of both, or a failover would lose it.
	p.exec("alter system set synchronous_standby_names = '*'")
	p.exec("select pg_reload_conf()")
	return s
}

// promote makes a standby the server that takes writes.
func (p *postgres) promote() {
	p.t.Helper()
	p.exec("alter system reset synchronous_standby_names")
	p.exec("select pg_reload_conf(), pg_promote()")
}

// A failover, with a standby that follows synchronously: brokers meet a server that takes no writes, and work again by themselves soon
// after one does, at the same address or at another one that they were told of. Then back again.
func TestFailover(t *testing.T) {
	for _, two := range []bool{false, true} {
		t.Run(map[bool]string{false: "one address", true: "two hosts"}[two], func(t *testing.T) {
			t.Parallel()
			p := newPostgres(t, "", nil)
			other := newProxy(t, func() (net.Conn, error) { return nil, net.ErrClosed })
			db := newProxy(t, p.dial)
			var settings []string
			if two {
				settings = append(settings, fmt.Sprintf("DATABASE_URL=host=127.0.0.1,127.0.0.1 port=%d,%d sslmode=disable dbname=postgres user=postgres target_session_attrs=read-write", db.port(), other.port()))
			}
			c := onDatabase(t, db, "postgres", 2, settings...)
			l := startLoad(t, c.urls(), usual())
			for range rounds(2, 10) {
				s := p.standby()
				pause(500*time.Millisecond, l.ending)
				if two {
					other.point(s.dial)
					pause(300*time.Millisecond, l.ending)
					p.end(syscall.SIGKILL)
					db, other = other, db
				} else {
					db.point(s.dial) // reads go there meanwhile, writes are refused
					db.cut()
					var a answer
					eventually(t, patience, "a push is refused", func() bool {
						a = call(newClient(t), "POST", c.urls()[0]+"/api/v1/push", `{"items":[{"queue":"other","payload":1}]}`)
						return a.status != 201
					})
					if a.status != 503 || a.header.Get("Retry-After") == "" {
						t.Errorf("a push where nothing can be written: %v", a)
					}
					p.end(syscall.SIGKILL)
				}
				pause(span(500*time.Millisecond, 10*time.Second), l.ending)
				s.promote()
				l.recovers()
				p = s
			}
			l.verdict(p.pool())
			l.only(away...)
		})
	}
}

// The disk of the database is full: pushes are refused, and nothing that was answered is lost, also if PostgreSQL gives up because it cannot
// write its log. Everything works again once there is room.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can mount a small file system")
	}
	made, dir := dbtest.DataDir(t), filepath.Join(t.TempDir(), "small")
	for up := dir; up != "/"; up = filepath.Dir(up) { // the server's user passes through
		if err := os.MkdirAll(up, 0o755); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(up); err == nil && info.Mode()&0o001 == 0 {
			if err := os.Chmod(up, 0o711); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=200m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // the server has been stopped by then
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	if out, err := exec.Command("cp", "-a", made+"/.", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	p := newPostgres(t, dir, map[string]string{"min_wal_size": "32MB", "max_wal_size": "48MB"})
	c := newCluster(t, p, 2)
	l := startLoad(t, c.urls(), usual())
	for range rounds(2, 10) {
		pause(500*time.Millisecond, l.ending)
		filler := filepath.Join(dir, "filler")
		f, err := os.Create(filler)
		if err != nil {
			t.Fatal(err)
		}
		for block := make([]byte, 1<<16); err == nil; _, err = f.Write(block) {
		}
		for block := make([]byte, 1<<9); errors.Is(err, syscall.ENOSPC) && len(block) > 0; block = block[:len(block)/2] {
			_, err = f.Write(block)
		}
		_ = f.Close()
		var a answer
		eventually(t, patience, "a push is refused", func() bool {
			a = call(newClient(t), "POST", c.urls()[0]+"/api/v1/push", `{"items":[{"queue":"big","payload":"`+strings.Repeat("x", 1<<16)+`"}]}`)
			return a.status != 201
		})
		if a.status != 503 && a.status != 500 || strings.Contains(a.body, "extend") || strings.Contains(a.body, "space") {
			t.Errorf("a push without room: %v", a)
		}
		pause(span(time.Second, 20*time.Second), l.ending)
		if err := os.Remove(filler); err != nil {
			t.Fatal(err)
		}
		select {
		case <-p.server.Done(): // it could not write its log, nor recover without room
			p.server.Stop()
			p.start()
		default:
		}
		l.recovers()
	}
	l.verdict(p.pool())
	l.only(away...)
}

// The first of two hosts vanishes without a word, with all connections to it, and the second takes over.
func TestHostVanishes(t *testing.T) {
	t.Parallel()
	first, dsn := newShared(t, 0)
	_, rest, _ := strings.Cut(first.settings[0], " port=")
	port, rest, _ := strings.Cut(rest, " ")
	other := newProxy(t, first.db.target)
	c := &cluster{t: t, db: first.db, settings: []string{fmt.Sprintf("DATABASE_URL=host=127.0.0.1,127.0.0.1 port=%s,%d target_session_attrs=read-write %s", port, other.port(), rest)}}
	for range 2 {
		c.brokers = append(c.brokers, c.spawn().ready())
	}
	l := startLoad(t, c.urls(), usual())
	pause(500*time.Millisecond, l.ending)
	c.db.silence()
	l.heal()
	if took := l.recovered(); took > 3*recovery {
		t.Errorf("everything works again only %v after the host has gone", took)
	} else {
		t.Logf("works again after %v", took)
	}
	eventually(t, patience, "the brokers listen on the other host", func() bool { open, _ := other.count(); return open >= 2*3 })
	l.verdict(dbtest.Pool(t, dsn, 4))
	l.only(append([]string{"*: no answer"}, away...)...)
}
