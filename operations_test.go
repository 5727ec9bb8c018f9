package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"ferrymq/dbtest"
	"ferrymq/localpg"
	"ferrymq/schema"
)

// example is the n-th block of docs/operations.md under a heading, in some language.
func example(t *testing.T, heading, lang string, n int) string {
	t.Helper()
	_, blocks := page(t, "docs/operations.md")
	for _, b := range blocks {
		if b.heading == heading && b.lang == lang {
			if n == 0 {
				return b.text
			}
			n--
		}
	}
	t.Fatalf("docs/operations.md has no such block of %s under %q", lang, heading)
	return ""
}

// adapt replaces parts of an example, each of which must be there.
func adapt(t *testing.T, text string, pairs ...string) string {
	t.Helper()
	for i := 0; i < len(pairs); i += 2 {
		if !strings.Contains(text, pairs[i]) {
			t.Fatalf("the example does not have %q any more:\n%s", pairs[i], text)
		}
		text = strings.ReplaceAll(text, pairs[i], pairs[i+1])
	}
	return text
}

// tools is the directory of PostgreSQL's programs; the test is skipped if one of these is not there.
func tools(t *testing.T, names ...string) string {
	t.Helper()
	dir, _, err := localpg.Installed(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Skip(name + " is not installed with this PostgreSQL")
		}
	}
	return dir
}

// shell runs a command of the page with these directories in front of the path.
func shell(t *testing.T, text, dir, path string, env ...string) {
	t.Helper()
	cmd := exec.Command("sh", "-ec", text)
	cmd.Dir = dir
	cmd.Env = append(append(os.Environ(), "PATH="+path+":"+os.Getenv("PATH")), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s\n%v: %s", text, err, out)
	}
}

// record is what was answered, and when.
type record struct {
	pushed []time.Time // by number, of queue q
	acked  []time.Time
}

// traffic pushes numbers to a queue, and pops and acks them, until it is told to end.
func traffic(t *testing.T, p *process, url string) (stop func() record) {
	t.Helper()
	var r record
	var mu sync.Mutex
	var clients sync.WaitGroup
	var ended atomic.Bool
	clients.Go(func() {
		for n := 0; !ended.Load(); n += 4 { // faster than they are consumed
			var items []string
			for i := range 4 {
				items = append(items, fmt.Sprintf(`{"queue":"q","transactionId":"m%[1]d","payload":%[1]d}`, n+i))
			}
			status, text, err := p.call("POST", url+"/api/v1/push", `{"items":[`+strings.Join(items, ",")+`]}`)
			if err != nil || status != 201 {
				t.Errorf("push: %d %s (%v)", status, text, err)
				return
			}
			mu.Lock()
			for range items {
				r.pushed = append(r.pushed, time.Now())
			}
			mu.Unlock()
		}
	})
	clients.Go(func() {
		for !ended.Load() {
			status, text, err := p.call("GET", url+"/api/v1/pop/queue/q?batch=1&leaseSeconds=2&wait=true&timeout=200", "")
			var got popped
			if err != nil || status == 200 && json.Unmarshal(text, &got) != nil {
				t.Errorf("pop: %d %s (%v)", status, text, err)
				return
			}
			if status != 200 {
				continue
			}
			if status, text, err := p.call("POST", url+"/api/v1/ack/batch", got.ack()); err != nil || status != 200 || strings.Contains(string(text), `"success":false`) {
				t.Errorf("ack: %d %s (%v)", status, text, err)
				return
			}
			mu.Lock()
			for range got.Messages {
				r.acked = append(r.acked, time.Now())
			}
			mu.Unlock()
		}
	})
	return func() record {
		ended.Store(true)
		clients.Wait()
		return r
	}
}

// before is how many of these happened before a time.
func before(all []time.Time, at time.Time) int {
	return len(slices.DeleteFunc(slices.Clone(all), func(x time.Time) bool { return !x.Before(at) }))
}

// restored checks a queue that was restored to a moment between two times, as docs/operations.md says.
func restored(t *testing.T, p *process, url string, r record, from, to time.Time) {
	t.Helper()
	var numbers []int
	for { // the lease that was live at the moment ends first
		status, text, err := p.call("GET", url+"/api/v1/pop/queue/q?batch=500&autoAck=true&wait=true&timeout=4000", "")
		if err != nil || status != 200 && status != 204 {
			t.Fatalf("%d %s (%v)", status, text, err)
		}
		if status == 204 {
			break
		}
		var got struct{ Messages []struct{ Data int } }
		if err := json.Unmarshal(text, &got); err != nil {
			t.Fatal(err)
		}
		for _, m := range got.Messages {
			numbers = append(numbers, m.Data)
		}
	}
	if len(numbers) == 0 {
		t.Fatal("nothing is left to deliver: the test shows little")
	}
	first, last := numbers[0], numbers[len(numbers)-1]
	for i, n := range numbers {
		if n != first+i {
			t.Fatalf("after %d comes %d", first+i-1, n)
		}
	}
	// Whatever was answered before the moment is there; what began after it is not. One request is under way in between.
	if last+1 < before(r.pushed, from) || last > before(r.pushed, to)+4 {
		t.Errorf("messages up to %d, %d were pushed before the moment and %d until it was surely over", last, before(r.pushed, from), before(r.pushed, to))
	}
	if first < before(r.acked, from) || first > before(r.acked, to)+1 {
		t.Errorf("the group goes on at %d, %d were acked before the moment and %d until it was surely over", first, before(r.acked, from), before(r.acked, to))
	}
	// Producers push again what is lost, and only that is stored.
	for id, want := range map[string]string{fmt.Sprint("m", last): "duplicate", fmt.Sprint("m", last+1): "queued"} {
		if got := p.must(t, 201, "POST", url+"/api/v1/push", fmt.Sprintf(`{"items":[{"queue":"q","transactionId":%q,"payload":0}]}`, id)); !strings.Contains(got, `"`+want+`"`) {
			t.Errorf("%s pushed again: %s, want %s", id, got, want)
		}
	}
	t.Logf("delivered %d to %d of %d", first, last, len(r.pushed))
}

// take receives a message of a subscription.
func take(t *testing.T, p *process, url, sub string) (delivery, payload string, attempt int) {
	t.Helper()
	var m struct {
		Messages []struct {
			DeliveryID string `json:"delivery_id"`
			Attempt    int
			Message    struct{ Payload json.RawMessage }
		}
	}
	text := p.must(t, 200, "POST", url+"/v1/subscriptions/"+sub+"/receive", `{"max_messages":1,"wait_seconds":10}`)
	if err := json.Unmarshal([]byte(text), &m); err != nil || len(m.Messages) != 1 {
		t.Fatalf("%s (%v)", text, err)
	}
	return m.Messages[0].DeliveryID, string(m.Messages[0].Message.Payload), m.Messages[0].Attempt
}

// TestDump: a dump that is made under load and restored elsewhere is one moment of everything.
func TestDump(t *testing.T) {
	t.Parallel()
	s := dbtest.Durable(t)
	bin := tools(t, "pg_dump", "pg_restore")
	p := spawn(t, "DATABASE_URL="+s.DSN)
	url := p.ready(t)
	p.must(t, 200, "PUT", url+"/v1/subscriptions/mail", `{"stream":"letters","lease_seconds":600}`)
	p.must(t, 200, "POST", url+"/v1/streams/letters/messages", `{"messages":[{"key":"a","payload":1},{"key":"b","payload":2}]}`)
	early, _, _ := take(t, p, url, "mail")
	stop := traffic(t, p, url)
	time.Sleep(time.Second)
	dir := t.TempDir()
	from := time.Now()
	shell(t, example(t, "Backup and restore", "sh", 0), dir, bin, "DATABASE_URL="+s.DSN)
	to := time.Now()
	late, _, _ := take(t, p, url, "mail")
	time.Sleep(300 * time.Millisecond)
	r := stop()

	admin := dbtest.Pool(t, s.DSN, 1)
	if _, err := admin.Exec(t.Context(), "create database later"); err != nil {
		t.Fatal(err)
	}
	dsn := s.DSN + " dbname=later"
	shell(t, example(t, "Backup and restore", "sh", 1), dir, bin, "DATABASE_URL="+dsn)
	p2 := spawn(t, "DATABASE_URL="+dsn)
	url2 := p2.ready(t)
	restored(t, p2, url2, r, from, to)
	got := p2.must(t, 200, "POST", url2+"/v1/subscriptions/mail/ack", fmt.Sprintf(`{"delivery_ids":[%q,%q]}`, early, late))
	if strings.Count(got, `"ok":true`) != 1 || !strings.Contains(got, fmt.Sprintf(`{"delivery_id":%q,"ok":true}`, early)) {
		t.Errorf("acks of deliveries before and after the dump: %s", got)
	}
	if _, payload, attempt := take(t, p2, url2, "mail"); payload != "2" || attempt != 1 {
		t.Errorf("then comes %s, attempt %d", payload, attempt)
	}
	if said := p2.String(); strings.Contains(said, "level=ERROR") || strings.Contains(said, "level=WARN") {
		t.Errorf("it said\n%s", said)
	}
}

// TestPointInTime: a base backup and the archived WAL take everything to a moment.
func TestPointInTime(t *testing.T) {
	t.Parallel()
	dir := dbtest.DataDir(t)
	backup := filepath.Join(dir, "backup")
	archive := strings.ReplaceAll(example(t, "Backup and restore", "ini", 0), "/backup/", backup+"/")
	settings := map[string]string{}
	for _, line := range strings.Split(strings.TrimSpace(archive), "\n") {
		name, value, ok := strings.Cut(line, " = ")
		if !ok {
			t.Fatal(line)
		}
		settings[name] = strings.Trim(value, "'")
	}
	s, err := localpg.Start(t.Context(), localpg.Options{Dir: dir, Settings: settings})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	bin := tools(t, "pg_basebackup")
	if err := os.MkdirAll(filepath.Join(backup, "wal"), 0o755); err != nil {
		t.Fatal(err)
	}
	owned(t, s, backup)
	p := spawn(t, "DATABASE_URL="+s.DSN)
	url := p.ready(t)
	p.must(t, 201, "POST", url+"/api/v1/push", `{"items":[{"queue":"other","payload":"before the backup"}]}`)
	shell(t, adapt(t, example(t, "Backup and restore", "sh", 2), "/backup/", backup+"/"), dir, bin, "DATABASE_URL="+s.DSN)
	stop := traffic(t, p, url)
	time.Sleep(time.Second)
	admin := dbtest.Pool(t, s.DSN, 1)
	var moment time.Time
	from := time.Now()
	if err := admin.QueryRow(t.Context(), "select clock_timestamp()").Scan(&moment); err != nil {
		t.Fatal(err)
	}
	to := time.Now()
	time.Sleep(500 * time.Millisecond)
	r := stop()
	if _, err := admin.Exec(t.Context(), "select pg_switch_wal()"); err != nil {
		t.Fatal(err)
	}
	p.signal(t, os.Interrupt)
	p.exits(t, patience)
	admin.Close()
	s.Stop() // archives the rest

	data := filepath.Join(dir, "pg")
	copyData(t, filepath.Join(backup, "base"), data)
	conf := adapt(t, example(t, "Backup and restore", "ini", 1), "/backup/", backup+"/", "2026-11-30 09:00:00+00", moment.UTC().Format("2006-01-02 15:04:05.000000+00"))
	f, err := os.OpenFile(filepath.Join(data, "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(conf); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := os.WriteFile(filepath.Join(data, "recovery.signal"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	owned(t, s, data)
	s2 := restart(t, dir)
	after := dbtest.Pool(t, s2.DSN, 1)
	for recovering, end := true, time.Now().Add(patience); recovering; time.Sleep(20 * time.Millisecond) { // until then it can be read only
		if err := after.QueryRow(t.Context(), "select pg_is_in_recovery()").Scan(&recovering); err != nil || time.Now().After(end) {
			t.Fatalf("still in recovery (%v)", err)
		}
	}
	p2 := spawn(t, "DATABASE_URL="+s2.DSN)
	url2 := p2.ready(t)
	restored(t, p2, url2, r, from, to)
	if got := p2.must(t, 200, "GET", url2+"/api/v1/pop/queue/other", ""); !strings.Contains(got, "before the backup") {
		t.Error(got)
	}
}

// owned gives files to the user of a server.
func owned(t *testing.T, s *localpg.Server, dir string) {
	t.Helper()
	if s.User == "" {
		return
	}
	if out, err := exec.Command("chown", "-R", s.User, dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// copyData copies the files of a server that is stopped, or of a backup of one. Owners stay.
func copyData(t *testing.T, from, to string) {
	t.Helper()
	if err := os.RemoveAll(to); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", "-a", from, to).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// TestDatabaseGoesBack: the database is set back to an earlier time while brokers run, by a restore, or by a failover to a server that
// had not got the last commits. Brokers notice and need no restart: nothing that they remember of what is no more hides or alters a message.
func TestDatabaseGoesBack(t *testing.T) {
	t.Parallel()
	s := dbtest.Durable(t)
	dir := s.Dir
	a, b := spawn(t, "DATABASE_URL="+s.DSN), spawn(t, "DATABASE_URL="+s.DSN)
	atA, atB := a.ready(t), b.ready(t)
	push := func(p *process, at, queue, id, payload string) string {
		t.Helper()
		return p.must(t, 201, "POST", at+"/api/v1/push", fmt.Sprintf(`{"items":[{"queue":%q,"transactionId":%q,"payload":%q}]}`, queue, id, payload))
	}
	pop := func(p *process, at, queue string) (m struct {
		Messages []struct{ TransactionID, Data, PartitionID, LeaseID string }
	}) {
		t.Helper()
		_, text, err := p.call("GET", at+"/api/v1/pop/queue/"+queue+"?batch=2&leaseSeconds=1", "")
		if err != nil || len(text) > 0 && json.Unmarshal(text, &m) != nil {
			t.Fatalf("%s (%v)", text, err)
		}
		return m
	}
	receive := func(p *process, at string) (id, payload string) {
		t.Helper()
		var m struct {
			Messages []struct {
				DeliveryID string `json:"delivery_id"`
				Message    struct{ Payload string }
			}
		}
		if err := json.Unmarshal([]byte(p.must(t, 200, "POST", at+"/v1/subscriptions/mail/receive", `{"wait_seconds":10}`)), &m); err != nil || len(m.Messages) != 1 {
			t.Fatalf("%+v (%v)", m, err)
		}
		return m.Messages[0].DeliveryID, m.Messages[0].Message.Payload
	}
	a.must(t, 200, "PUT", atA+"/v1/subscriptions/mail", `{"stream":"letters","lease_seconds":1,"retry":{"initial":"0s"}}`)
	for i := range 20 {
		push(a, atA, "q", fmt.Sprint("kept", i), "kept")
	}
	a.must(t, 200, "POST", atA+"/v1/streams/letters/messages", `{"messages":[{"key":"k","payload":"kept"}]}`)
	beats(t, s.DSN)

	s.Stop()
	backup := filepath.Join(dir, "earlier")
	copyData(t, filepath.Join(dir, "pg"), backup)
	s = restart(t, dir)
	a.again(t, atA, "the server is back")
	b.again(t, atB, "the server is back")

	// What will be no more.
	for i := range 20 {
		push(a, atA, "q", fmt.Sprint("lost", i), "lost")
	}
	push(a, atA, "new", "1", "lost")
	for range 15 {
		for _, m := range pop(a, atA, "q").Messages {
			a.must(t, 200, "POST", atA+"/api/v1/ack", fmt.Sprintf(`{"transactionId":%q,"partitionId":%q,"leaseId":%q}`, m.TransactionID, m.PartitionID, m.LeaseID))
		}
	}
	delivery, _ := receive(a, atA)
	a.must(t, 200, "POST", atA+"/v1/streams/letters/messages", `{"messages":[{"key":"k","id":"1","payload":"lost"}]}`)
	beats(t, s.DSN)

	s.Stop()
	copyData(t, backup, filepath.Join(dir, "pg"))
	restart(t, dir)
	for _, p := range []*process{a, b} {
		p.await(t, `the database has gone back`)
	}
	// Other messages in the places of the lost ones, by the broker that knows little of them; then the other one's.
	if got := push(b, atB, "other", "1", "other"); !strings.Contains(got, `"queued"`) {
		t.Error(got)
	}
	for i := range 20 {
		if got := push(b, atB, "q", fmt.Sprint("new", i), "new"); !strings.Contains(got, `"queued"`) {
			t.Error(got)
		}
	}
	for _, c := range [][2]string{{"kept3", "duplicate"}, {"lost3", "queued"}, {"lost3", "duplicate"}, {"new3", "duplicate"}, {"new19", "duplicate"}} {
		if got := push(a, atA, "q", c[0], "again"); !strings.Contains(got, `"`+c[1]+`"`) {
			t.Errorf("%s: %s, want %s", c[0], got, c[1])
		}
	}
	if got := push(a, atA, "new", "1", "again"); !strings.Contains(got, `"queued"`) {
		t.Error(got)
	}
	var got []string
	for len(got) < 41 {
		ms := pop(a, atA, "q").Messages
		for _, m := range ms {
			if got = append(got, m.TransactionID); !strings.HasPrefix(m.TransactionID, m.Data) && m.Data != "again" {
				t.Errorf("%s has the payload %s", m.TransactionID, m.Data)
			}
			a.must(t, 200, "POST", atA+"/api/v1/ack", fmt.Sprintf(`{"transactionId":%q,"partitionId":%q,"leaseId":%q}`, m.TransactionID, m.PartitionID, m.LeaseID))
		}
		if len(ms) == 0 {
			break
		}
	}
	if want := append(numbered("kept", 20), append(numbered("new", 20), "lost3")...); strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("delivered %v, want %v", got, want)
	}
	for queue, want := range map[string]string{"new": "again", "other": "other"} {
		if m := pop(b, atB, queue).Messages; len(m) != 1 || m[0].Data != want {
			t.Errorf("%s has %+v", queue, m)
		}
	}
	// A delivery that never was settles nothing.
	if got := a.must(t, 200, "POST", atA+"/v1/subscriptions/mail/ack", fmt.Sprintf(`{"delivery_ids":[%q]}`, delivery)); strings.Contains(got, `"ok":true`) {
		t.Errorf("an ack of what is no more: %s", got)
	}
	if _, payload := receive(b, atB); payload != "kept" {
		t.Errorf("received %q", payload)
	}
}

func numbered(name string, n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprint(name, i))
	}
	return all
}

// restart starts the server of a directory again. It is stopped with the test.
func restart(t *testing.T, dir string) *localpg.Server {
	t.Helper()
	s, err := localpg.Start(t.Context(), localpg.Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

// beats waits until each broker has shown that it is alive.
func beats(t *testing.T, dsn string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	var now time.Time
	if err := conn.QueryRow(t.Context(), "select clock_timestamp()").Scan(&now); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		var n int
		if err := conn.QueryRow(t.Context(), "select count(*) from ferrymq.brokers b where b.seen_at > $1", now).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if n >= 2 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d brokers are alive", n)
		}
	}
}

// TestOperationsService: the unit is one that systemd takes, and what it runs is a broker that finds its settings in a file.
func TestOperationsService(t *testing.T) {
	t.Parallel()
	settings := example(t, "One broker as a service", "env", 0)
	vars := make(map[string]string)
	for _, line := range strings.Split(strings.TrimSpace(settings), "\n") {
		name, value, _ := strings.Cut(line, "=")
		vars[name] = value
	}
	if _, err := loadConfig(vars); err != nil {
		t.Errorf("the settings of the unit: %v", err)
	}
	verify, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	unit := filepath.Join(dir, "ferrymq.service")
	if err := os.WriteFile(unit, []byte(adapt(t, example(t, "One broker as a service", "ini", 0), "/usr/local/bin/ferrymq", exe)), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(verify, "verify", unit).CombinedOutput()
	if err != nil || strings.Contains(string(out), "ferrymq.service") {
		t.Errorf("%v: %s", err, out)
	}
}

// TestOperationsContainer: what the container file puts into an empty image is enough: a broker that is nobody, in a directory that has
// nothing else.
func TestOperationsContainer(t *testing.T) {
	t.Parallel()
	file := example(t, "In a container", "dockerfile", 0)
	mod, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if goes := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindSubmatch(mod); !strings.Contains(file, "FROM golang:"+string(goes[1])+" AS build\n") {
		t.Errorf("go.mod wants Go %s", goes[1])
	}
	build := regexp.MustCompile(`(?m)^RUN (CGO_ENABLED=0 go build .*)$`).FindStringSubmatch(file)
	if build == nil {
		t.Fatal("nothing is built")
	}
	_, image, ok := strings.Cut(file, "FROM scratch\n")
	who := regexp.MustCompile(`(?m)^USER (\d+):(\d+)$`).FindStringSubmatch(image)
	if !ok || who == nil {
		t.Fatal("the image is not one from scratch with a user")
	}
	if os.Getuid() != 0 || runtime.GOOS != "linux" {
		t.Skip("only root changes the root directory")
	}
	root, err := os.MkdirTemp("/tmp", "ferrymq-root-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	shell(t, adapt(t, build[1], "-o /ferrymq ", "-o "+root+"/ferrymq "), ".", "/", "GOFLAGS=-buildvcs=false")

	c, err := pgx.ParseConfig(dbtest.New(t))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(c.Host, "/") {
		t.Skip("the database has no socket")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") // the way to the database's socket, which is not in there
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer in.Close()
				out, err := net.Dial("unix", filepath.Join(c.Host, fmt.Sprintf(".s.PGSQL.%d", c.Port)))
				if err != nil {
					return
				}
				defer out.Close()
				go func() {
					_, _ = io.Copy(out, in)
					out.Close()
				}()
				_, _ = io.Copy(in, out)
			}()
		}
	}()
	uid, _ := strconv.ParseUint(who[1], 10, 32)
	gid, _ := strconv.ParseUint(who[2], 10, 32)
	cmd := exec.Command("/ferrymq")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	_, port, _ := net.SplitHostPort(l.Addr().String())
	cmd.Env = []string{"PORT=0", "DATABASE_URL=postgres://" + c.User + "@127.0.0.1:" + port + "/" + c.Database + "?sslmode=disable"}
	for _, m := range regexp.MustCompile(`(?m)^ENV (\S+=\S+)$`).FindAllStringSubmatch(image, -1) {
		cmd.Env = append(cmd.Env, m[1])
	}
	p := launch(t, cmd)
	url := p.ready(t)
	p.must(t, 201, "POST", url+"/api/v1/push", `{"items":[{"queue":"q","payload":1}]}`)
	p.must(t, 200, "GET", url+"/api/v1/pop/queue/q", "")
}

// TestOperationsRollback: a step back, and forth again, leaves the messages.
func TestOperationsRollback(t *testing.T) {
	t.Parallel()
	dsn := dbtest.New(t)
	p := spawn(t, "DATABASE_URL="+dsn)
	url := p.ready(t)
	p.must(t, 201, "POST", url+"/api/v1/push", `{"items":[{"queue":"q","payload":"kept"}]}`)
	p.signal(t, os.Interrupt)
	p.exits(t, patience)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.Symlink(exe, filepath.Join(dir, "goose")); err != nil {
		t.Fatal(err)
	}
	shell(t, example(t, "Upgrade and rollback", "sh", 0), ".", dir, "DATABASE_URL="+dsn, asGoose+"=1")
	if have, err := schema.Applied(t.Context(), dbtest.Pool(t, dsn, 1)); err != nil || have != schema.Known()-1 {
		t.Errorf("schema version %d (%v), want one less than %d", have, err, schema.Known())
	}
	p = spawn(t, "DATABASE_URL="+dsn)
	if got := p.must(t, 200, "GET", p.ready(t)+"/api/v1/pop/queue/q", ""); !strings.Contains(got, "kept") {
		t.Error(got)
	}
}

// TestOperationsRights: the grants of the page are those that a broker is tested with.
func TestOperationsRights(t *testing.T) {
	t.Parallel()
	if got := example(t, "The database", "sql", 0); strings.TrimSpace(got) != strings.TrimSpace(grants) {
		t.Errorf("the page grants\n%s\nTestOddDatabase runs with\n%s", got, grants)
	}
	settings := strings.Split(strings.TrimSpace(example(t, "The database", "ini", 0)), "\n")
	if !dbtest.HasPooler() {
		t.Skip("pgbouncer is not installed")
	}
	s := dbtest.Durable(t)
	dsn := through(t, dbtest.NewPooler(t, s, settings...), s.DSN)
	p := spawn(t, "DATABASE_URL="+dsn, "DATABASE_DIRECT_URL="+s.DSN)
	p.must(t, 201, "POST", p.ready(t)+"/api/v1/push", `{"items":[{"queue":"q","payload":1}]}`)
}

// TestOperationsHosts: of several hosts the broker takes the one that takes writes.
func TestOperationsHosts(t *testing.T) {
	t.Parallel()
	standby, primary := dbtest.Durable(t), dbtest.Durable(t)
	pool := dbtest.Pool(t, standby.DSN, 1)
	for _, sql := range []string{"alter system set default_transaction_read_only = on", "select pg_reload_conf()"} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	host := func(s *localpg.Server) string {
		c, err := pgx.ParseConfig(s.DSN)
		if err != nil {
			t.Fatal(err)
		}
		return url.QueryEscape(c.Host)
	}
	dsn := adapt(t, strings.TrimSpace(example(t, "The database", "text", 0)), "ferrymq@db1,db2/ferrymq?", "postgres@/postgres?host="+host(standby)+","+host(primary)+"&")
	p := spawn(t, dsn)
	p.must(t, 201, "POST", p.ready(t)+"/api/v1/push", `{"items":[{"queue":"q","payload":1}]}`)
}

// TestOperationsAlerts: every metric that an alert asks for is there, with the labels that it asks for, and where promtool is installed
// it takes the rules and sees each of them fire.
func TestOperationsAlerts(t *testing.T) {
	t.Parallel()
	rules, err := os.ReadFile("docs/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	p := spawn(t, "DATABASE_URL="+dbtest.New(t))
	url := p.ready(t)
	p.must(t, 201, "POST", url+"/api/v1/push", `{"items":[{"queue":"q","payload":1}]}`)
	p.must(t, 200, "PUT", url+"/v1/subscriptions/mail", `{"stream":"orders"}`)
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	metrics, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`\bferrymq_[a-z_]+`).FindAllString(string(rules), -1)
	if len(names) < 15 {
		t.Errorf("the rules name %d metrics", len(names))
	}
	for _, n := range names {
		if !regexp.MustCompile(`(?m)^` + n + `[{ ]`).Match(metrics) {
			t.Errorf("%s is no metric:\n%s", n, metrics)
		}
	}
	text, _ := page(t, "docs/operations.md")
	tests, err := os.ReadFile("docs/alerts_test.yml")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`alert: (\w+)`).FindAllSubmatch(rules, -1) {
		if !strings.Contains(text, "`"+string(m[1])+"`") || !strings.Contains(string(tests), `"`+string(m[1])+`"`) {
			t.Errorf("%s is not in docs/operations.md, or not in docs/alerts_test.yml", m[1])
		}
	}
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is not installed")
	}
	for _, args := range [][]string{{"check", "rules", "docs/alerts.yml"}, {"test", "rules", "docs/alerts_test.yml"}} {
		if out, err := exec.Command(promtool, args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %v: %s", args, out)
		}
	}
}

// TestLeasesOfLargeMessages: a lease costs the database's log little, however large its messages are.
func TestLeasesOfLargeMessages(t *testing.T) {
	t.Parallel()
	s := dbtest.Durable(t)
	p := spawn(t, "DATABASE_URL="+s.DSN)
	at := p.ready(t)
	for range 5 {
		p.must(t, 201, "POST", at+"/api/v1/push", `{"items":[{"queue":"q","payload":"`+strings.Repeat("large ", 1<<18)+`"}]}`)
	}
	pool := dbtest.Pool(t, s.DSN, 1)
	if _, err := pool.Exec(t.Context(), "checkpoint"); err != nil {
		t.Fatal(err)
	}
	var before string
	if err := pool.QueryRow(t.Context(), "select pg_current_wal_lsn()::text").Scan(&before); err != nil {
		t.Fatal(err)
	}
	const rounds = 60
	for range rounds {
		var got popped
		if err := json.Unmarshal([]byte(p.must(t, 200, "GET", at+"/api/v1/pop/queue/q?batch=1", "")), &got); err != nil {
			t.Fatal(err)
		}
		p.must(t, 200, "POST", at+"/api/v1/ack/batch", strings.ReplaceAll(got.ack(), `"completed"`, `"retry"`))
	}
	var bytes int64
	if err := pool.QueryRow(t.Context(), "select pg_wal_lsn_diff(pg_current_wal_lsn(), $1::text::pg_lsn)::bigint", before).Scan(&bytes); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes of WAL for each lease that was taken and given back", bytes/rounds)
	if bytes/rounds > 4096 {
		t.Errorf("a lease of a message of 1.5 MB costs %d bytes of WAL", bytes/rounds)
	}
}
