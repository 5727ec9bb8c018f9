package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/caarlos0/env/v11"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"ferrymq/dbtest"
	"ferrymq/schema"
)

// block is one fenced code block of a page.
type block struct{ heading, lang, text string }

func readme(t *testing.T) (text string, blocks []block) {
	t.Helper()
	return page(t, "README.md")
}

func page(t *testing.T, name string) (text string, blocks []block) {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	var heading string
	var open *block
	for line := range strings.Lines(string(b)) {
		switch lang, fence := strings.CutPrefix(strings.TrimSpace(line), "```"); {
		case fence && open == nil:
			open = &block{heading: heading, lang: lang}
		case fence:
			blocks = append(blocks, *open)
			open = nil
		case open != nil:
			open.text += line
		case strings.HasPrefix(line, "## "):
			heading = strings.TrimSpace(line[3:])
		}
	}
	return string(b), blocks
}

// sh is the shell blocks of a section.
func sh(t *testing.T, heading string) (texts []string) {
	t.Helper()
	_, blocks := readme(t)
	for _, b := range blocks {
		if b.heading == heading && b.lang == "sh" {
			texts = append(texts, b.text)
		}
	}
	return texts
}

// Each section with commands has a test below that runs them; `go test ./...` is what runs this.
func TestReadmeCommandsAreTested(t *testing.T) {
	t.Parallel()
	_, blocks := readme(t)
	counts := make(map[string]int)
	for _, b := range blocks {
		if b.lang == "sh" {
			counts[b.heading]++
		}
	}
	if want := map[string]int{"From nothing": 2, "Push, pop, ack": 5, "Authentication": 3, "In production": 2}; !reflect.DeepEqual(counts, want) {
		t.Errorf("shell blocks per section: %v, tests know %v", counts, want)
	}
	if s := sh(t, "From nothing"); s[1] != "go test ./...\n" {
		t.Errorf("the test command is %q", s[1])
	}
}

// The first command, with Ctrl-C as a terminal sends it: to all of the process group.
func TestReadmeStart(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(dbtest.DataDir(t), "data")
	words := strings.Fields(sh(t, "From nothing")[0])
	cmd := exec.Command(words[0], words[1:]...)
	cmd.Env = append(os.Environ(), "PORT=0", "DATA_DIR="+dir, "DATABASE_URL=", "PGHOST=", "PG_HOST=", "GOFLAGS=-buildvcs=false")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p := launch(t, cmd)
	p.ready(t)
	p.await(t, `Try it:`)
	pg := postmaster(t, dir)
	if err := syscall.Kill(-p.cmd.Process.Pid, syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	p.exits(t, 10*time.Second) // with 1, whatever the program says: that is how go run ends when it was interrupted
	p.await(t, `msg=stopped`)
	awaitGone(t, pg)
}

var (
	anyUUID = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)
	anyTime = regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z`)
	breaks  = regexp.MustCompile(`\n *`)
)

// shape is an answer without what differs from run to run.
func shape(s string) string {
	s = anyTime.ReplaceAllString(anyUUID.ReplaceAllString(s, "<id>"), "<time>")
	return breaks.ReplaceAllString(s, "")
}

// curlHome is a home directory whose curl takes the address in the README for that of this broker.
func curlHome(t *testing.T, p *process) string {
	t.Helper()
	_, port, err := net.SplitHostPort(strings.TrimPrefix(p.ready(t), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	home := t.TempDir()
	if err := os.WriteFile(filepath.Join(home, ".curlrc"), []byte("connect-to = 127.0.0.1:6632:127.0.0.1:"+port+"\nnoproxy = *\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return home
}

// The curl lines are run as they stand; curl itself is told that the address is another one.
func TestReadmeExample(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("curl is not installed")
	}
	home := curlHome(t, spawn(t, "DATABASE_URL="+dbtest.New(t)))
	_, blocks := readme(t)
	blocks = slices.DeleteFunc(blocks, func(b block) bool { return b.heading != "Push, pop, ack" })
	var before string // blocks build on each other; what an earlier one prints is not wanted again
	for i, b := range blocks {
		if b.lang != "sh" {
			continue
		}
		cmd := exec.Command("sh", "-c", "set -e\n"+before+b.text)
		cmd.Dir = home
		cmd.Env = append(os.Environ(), "CURL_HOME="+home, "HOME="+home)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s\n%v: %s", b.text, err, out)
		}
		if i+1 < len(blocks) && blocks[i+1].lang == "json" {
			if got, want := shape(string(out)), shape(blocks[i+1].text); got != want {
				t.Errorf("%s\nanswered\n%s\nthe README says\n%s", b.text, got, want)
			}
		} else if strings.Contains(b.text, "/depth") {
			if !strings.Contains(string(out), `"pending":0`) || strings.Contains(string(out), `"error"`) {
				t.Errorf("%s\nanswered %s", b.text, out)
			}
		} else if !strings.Contains(string(out), `"transactionId":"order-1"`) {
			t.Errorf("%s\nanswered %s", b.text, out)
		}
		for line := range strings.Lines(b.text) {
			if strings.HasPrefix(line, "api=") {
				before += line
			}
		}
	}
}

// The blocks of a page run one after the other, in whatever language, and each prints what the page says. Lines of different keys come in any order. Programs that are not installed are named.
func TestPageExamples(t *testing.T) {
	t.Parallel()
	run := map[string]func(file string) *exec.Cmd{
		"sh":         func(file string) *exec.Cmd { return exec.Command("sh", file) },
		"python":     func(file string) *exec.Cmd { return exec.Command("python3", file) },
		"javascript": func(file string) *exec.Cmd { return exec.Command("node", file) },
		"go":         func(file string) *exec.Cmd { return exec.Command("go", "run", file) },
		"sql":        func(file string) *exec.Cmd { return exec.Command("psql", "-qtA", "-v", "ON_ERROR_STOP=1", "-f", file) },
	}
	suffix := map[string]string{"sh": ".sh", "python": ".py", "javascript": ".js", "go": ".go", "sql": ".sql"}
	for name, state := range map[string]struct {
		before string // SQL that the page takes for granted
		blocks int
	}{
		"docs/models.md":     {blocks: 8},
		"docs/quickstart.md": {blocks: 8},
		"docs/client.md":     {blocks: 2},
		"docs/cli.md":        {blocks: 5},
		"docs/migration.md": {blocks: 2, before: "create schema pgmq; create table pgmq.q_jobs (msg_id bigint primary key generated always as identity, read_ct int not null default 0, " +
			"enqueued_at timestamptz not null default now(), vt timestamptz not null default now(), message jsonb); insert into pgmq.q_jobs (message) select jsonb_build_object('n', i) from generate_series(1, 20) i"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := dbtest.New(t)
			pool := dbtest.Pool(t, dsn, 1)
			if _, err := pool.Exec(t.Context(), state.before); err != nil {
				t.Fatal(err)
			}
			p := spawn(t, "DATABASE_URL="+dsn)
			home := curlHome(t, p)
			exe, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(exe, filepath.Join(home, "ferrymq")); err != nil {
				t.Fatal(err)
			}
			environ := append(os.Environ(), "CURL_HOME="+home, asBroker+"=1", "PATH="+home+":"+os.Getenv("PATH"), "FERRYMQ_URL="+p.url(t), "DATABASE_URL="+dsn)
			_, blocks := page(t, name)
			ran := 0
			for i, b := range blocks {
				command := run[b.lang]
				if command == nil {
					continue
				}
				ran++
				want := ""
				if i+1 < len(blocks) && blocks[i+1].lang == "text" {
					want = blocks[i+1].text
				} else if b.lang != "sql" {
					t.Errorf("the page does not say what this prints:\n%s", b.text)
				}
				file := filepath.Join(home, "example"+suffix[b.lang])
				text := b.text
				if b.lang != "sh" && b.lang != "sql" {
					text = strings.ReplaceAll(text, "http://127.0.0.1:6632", p.url(t))
				}
				if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
				cmd := command(file)
				if _, err := exec.LookPath(cmd.Args[0]); err != nil {
					t.Logf("not run: %v", err)
					continue
				}
				if cmd.Dir = home; b.lang == "go" {
					cmd.Dir = "" // in this module, for its client
				}
				cmd.Env = environ
				if b.lang == "sh" { // one shell's variables and functions are those of the next one
					definitions := filepath.Join(home, "definitions")
					cmd = exec.Command("sh", "-c", "set -e; [ ! -f "+definitions+" ] || . "+definitions+"\n. "+file)
					cmd.Dir, cmd.Env = home, append(environ, "HOME="+home)
				}
				if b.lang == "sql" {
					cmd.Args = append(cmd.Args, "-d", dsn)
				}
				var out, errs strings.Builder
				cmd.Stdout, cmd.Stderr = &out, &errs
				err := cmd.Run()
				got := strings.TrimSpace(out.String())
				if err != nil || want != "" && inAnyOrder(got) != inAnyOrder(want) {
					t.Errorf("%v: this\n%s\nprints\n%s\n%s\nand the page says\n%s", err, b.text, got, errs.String(), want)
				}
				if b.lang == "sh" {
					kept := regexp.MustCompile(`(?m)^(?:[a-z]+=\S+|[a-z]+\(\) \{.*\})$`).FindAllString(b.text, -1)
					f, err := os.OpenFile(filepath.Join(home, "definitions"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
					if err != nil {
						t.Fatal(err)
					}
					fmt.Fprintln(f, strings.Join(kept, "\n"))
					f.Close()
				}
			}
			if ran != state.blocks {
				t.Errorf("%d blocks can be run, the test knows of %d", ran, state.blocks)
			}
			if strings.HasSuffix(name, "migration.md") {
				p.must(t, 200, "PUT", p.url(t)+"/v1/subscriptions/check", `{"stream":"jobs"}`)
				awaitBacklog(t, p, "check", 21)
			}
		})
	}
}

// awaitBacklog waits until a subscription has so many messages before it.
func awaitBacklog(t *testing.T, p *process, sub string, n int) {
	t.Helper()
	text := ""
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if text = p.must(t, 200, "GET", p.url(t)+"/v1/subscriptions/"+sub, ""); strings.Contains(text, fmt.Sprintf(`"backlog":%d,`, n)) {
			return
		}
	}
	t.Errorf("want a backlog of %d: %s", n, text)
}

// inAnyOrder sorts lines, and drops empty ones.
func inAnyOrder(s string) string {
	lines := slices.DeleteFunc(strings.Split(s, "\n"), func(l string) bool { return strings.TrimSpace(l) == "" })
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// The broker gets the settings of the first command, the others are run as they stand. No secret is logged, whatever is.
func TestReadmeAuthentication(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("curl is not installed")
	}
	blocks := sh(t, "Authentication")
	settings, ok := strings.CutSuffix(blocks[0], " go run .\n")
	if !ok {
		t.Fatalf("the broker is started with %q", blocks[0])
	}
	p := spawn(t, append(strings.Fields(settings), "LOG_LEVEL=debug", "DATABASE_URL="+dbtest.New(t))...)
	home := curlHome(t, p)
	secret := ""
	for command, want := range map[string]string{
		blocks[1]:                    `"status":"queued"`,
		blocks[2] + "echo \" $key\"": `"status":"queued"`,
		strings.Replace(blocks[2], "$key", "fmq_0123", 1):             `{"error":"Unknown API key"}`,
		strings.ReplaceAll(blocks[1], "Authorization: ", "X-Other: "): `{"error":"Authentication required"}`,
	} {
		cmd := exec.Command("sh", "-c", command)
		cmd.Env = append(os.Environ(), "CURL_HOME="+home, "HOME="+home)
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%s\n%v: %s", command, err, out)
		} else if s := regexp.MustCompile(`fmq_[0-9a-z]{52}`).Find(out); s != nil {
			secret = string(s)
		}
	}
	hash := sha256.Sum256([]byte(secret))
	for _, s := range []string{secret, hex.EncodeToString(hash[:]), "some-long-random-text"} {
		if secret == "" || strings.Contains(p.String(), s) || !strings.Contains(p.String(), "path=/v1/projects/payments/keys ") {
			t.Errorf("%q was made, and this logged:\n%s", s, p)
		}
	}
	if !strings.Contains(p.url(t), "//0.0.0.0:") {
		t.Errorf("it listens on %s", p.url(t))
	}
}

// The migration commands are run as they stand, on a goose that is this test binary when none is installed:
// then `go install` is left out, since it needs a network.
func TestReadmeMigrations(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("psql"); err != nil {
		t.Skip("psql is not installed")
	}
	install, commands, _ := strings.Cut(sh(t, "In production")[1], "\n")
	mod, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	version := regexp.MustCompile(`github.com/pressly/goose/v3 (v\S+)`).FindSubmatch(mod)
	if want := "go install github.com/pressly/goose/v3/cmd/goose@" + string(version[1]); install != want {
		t.Errorf("the README has %q, go.mod says %q", install, want)
	}
	dsn, path := dbtest.Empty(t), os.Getenv("PATH")
	if _, err := exec.LookPath("goose"); err != nil {
		exe, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		if err := os.Symlink(exe, filepath.Join(dir, "goose")); err != nil {
			t.Fatal(err)
		}
		path = dir + ":" + path
	}
	p := spawn(t, "DATABASE_URL="+dsn, "AUTO_MIGRATE=false")
	p.await(t, `waiting until the migrations are applied`)
	cmd := exec.Command("sh", "-ec", commands)
	cmd.Env = append(os.Environ(), "PATH="+path, "DATABASE_URL="+dsn, asGoose+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	p.ready(t)
	if have, err := schema.Applied(t.Context(), dbtest.Pool(t, dsn, 1)); err != nil || have != schema.Known() {
		t.Errorf("schema version %d (%v)", have, err)
	}
}

// asGoose makes this test binary the goose command line, as far as the pages use it.
const asGoose = "FERRYMQ_TEST_GOOSE"

func gooseMain() error {
	f := flag.NewFlagSet("goose", flag.ContinueOnError)
	dir, table := f.String("dir", ".", ""), f.String("table", "goose_db_version", "")
	if err := f.Parse(os.Args[1:]); err != nil {
		return err
	}
	if f.NArg() != 3 || f.Arg(0) != "postgres" || f.Arg(2) != "up" && f.Arg(2) != "down" {
		return errors.New("only: postgres DSN up|down")
	}
	config, err := pgx.ParseConfig(f.Arg(1))
	if err != nil {
		return err
	}
	conn := stdlib.OpenDB(*config)
	defer conn.Close()
	return errors.Join(goose.SetDialect("postgres"), setTable(*table), goose.RunContext(context.Background(), f.Arg(2), conn, *dir))
}

func setTable(name string) error {
	goose.SetTableName(name)
	return nil
}

// The table of settings is what the Config struct says.
func TestReadmeSettings(t *testing.T) {
	t.Parallel()
	const open, end = "<!-- settings: written by `UPDATE_README=1 go test -run TestReadmeSettings .` -->\n", "<!-- /settings -->\n"
	text, _ := readme(t)
	before, rest, ok1 := strings.Cut(text, open)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok1 || !ok2 {
		t.Fatal("the README has no place for the settings")
	}
	want := before + open + settingsTable(t) + end + after
	if text == want {
		return
	}
	if os.Getenv("UPDATE_README") == "" {
		t.Fatalf("the README's settings differ from the Config struct; UPDATE_README=1 writes them:\n%s", settingsTable(t))
	}
	if err := os.WriteFile("README.md", []byte(want), 0o644); err != nil {
		t.Fatal(err)
	}
}

func settingsTable(t *testing.T) string {
	t.Helper()
	params, err := env.GetFieldParams(&Config{})
	if err != nil {
		t.Fatal(err)
	}
	file, err := parser.ParseFile(token.NewFileSet(), "config.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	docs := make(map[string]string) // by variable
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok || spec.Name.Name != "Config" {
			return true
		}
		for _, f := range spec.Type.(*ast.StructType).Fields.List {
			if f.Tag != nil {
				tag := reflect.StructTag(strings.Trim(f.Tag.Value, "`"))
				docs[tag.Get("env")] = strings.Join(strings.Fields(f.Doc.Text()), " ")
				if r := tag.Get("range"); r != "" {
					docs[tag.Get("env")] += " (" + r + ")"
				}
			}
		}
		return false
	})
	var b strings.Builder
	b.WriteString("| Variable | Default | Meaning (range) |\n| --- | --- | --- |\n")
	for _, p := range params {
		value := "-"
		if p.HasDefaultValue {
			value = "`" + p.DefaultValue + "`"
		}
		if docs[p.Key] == "" {
			t.Errorf("%s has no comment", p.Key)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", p.Key, value, docs[p.Key])
	}
	return b.String()
}

// The design and the guarantees name tests and scripts: they exist, in the package that is said.
func TestDesignNamesTests(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, pattern := range []string{"*/*_test.go", "*/*/*_test.go"} {
		more, _ := filepath.Glob(pattern)
		files = append(files, more...)
	}
	names := make(map[string][]string) // packages of a test; main is ""
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)[A-Z]\w*)\(`)
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		pkg := ""
		if dir := filepath.Dir(f); dir != "." {
			pkg = filepath.Base(dir)
		}
		for _, m := range declared.FindAllSubmatch(b, -1) {
			names[string(m[1])] = append(names[string(m[1])], pkg)
		}
	}
	for page, strict := range map[string]bool{"docs/design.md": false, "docs/guarantees.md": true} {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		found := regexp.MustCompile("`(?:([a-z]+)\\.)?((?:Test|Fuzz)[A-Z][A-Za-z]*)(/[a-z]+)?`").FindAllStringSubmatch(string(text), -1)
		for _, m := range found {
			pkg, name := m[1], m[2]
			if len(names[name]) == 0 || (pkg != "" || strict) && !slices.Contains(names[name], pkg) {
				t.Errorf("%s names %s, which is in %q", page, m[0], names[name])
			}
		}
		lists := regexp.MustCompile("scripts? (`[a-z0-9_]+`(?:, `[a-z0-9_]+`)*)").FindAllSubmatch(text, -1)
		for _, list := range lists {
			for _, m := range regexp.MustCompile("[a-z0-9_]+").FindAllString(string(list[1]), -1) {
				if _, err := os.Stat("contract/testdata/" + m + ".txt"); err != nil {
					t.Errorf("%s names the script %s: %v", page, m, err)
				}
			}
		}
		if len(found) < 20 || len(lists) < 5 {
			t.Errorf("%s names %d tests and %d lists of scripts", page, len(found), len(lists))
		}
	}
}

// What the pages link to exists, also within a page.
func TestReadmeLinks(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob("docs/*.md")
	if err != nil || len(pages) < 4 {
		t.Fatal(pages, err)
	}
	anchors := func(page string) (all []string) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Error(err)
		}
		for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllSubmatch(text, -1) {
			heading := regexp.MustCompile("[^a-z0-9 _-]").ReplaceAllString(strings.ToLower(string(m[1])), "")
			all = append(all, strings.ReplaceAll(heading, " ", "-"))
		}
		return all
	}
	for _, name := range append(pages, "README.md", "bench/README.md") {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, m := range regexp.MustCompile(`\]\(([^)#]*)(?:#([^)]*))?\)`).FindAllStringSubmatch(string(b), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			to := name
			if m[1] != "" {
				to = filepath.Join(filepath.Dir(name), m[1])
			}
			if _, err := os.Stat(to); err != nil {
				t.Errorf("%s links to %s: %v", name, m[1], err)
			} else if m[2] != "" && !slices.Contains(anchors(to), m[2]) {
				t.Errorf("%s links to %s#%s: there is no such heading", name, m[1], m[2])
			}
		}
	}
}
