package main

import (
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

// The guide's shell blocks run one after the other, in one shell, and each prints what the page says.
func TestModelsExample(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("curl is not installed")
	}
	home := curlHome(t, spawn(t, "DATABASE_URL="+dbtest.New(t)))
	_, blocks := page(t, "docs/models.md")
	script, want := "", ""
	for i, b := range blocks {
		if b.lang == "sh" {
			if i+1 == len(blocks) || blocks[i+1].lang != "text" {
				t.Fatalf("the page does not say what this prints:\n%s", b.text)
			}
			script += b.text + "echo; echo --\n"
			want += strings.TrimSpace(blocks[i+1].text) + "\n--\n"
		}
	}
	cmd := exec.Command("sh", "-c", script)
	cmd.Dir = home
	cmd.Env = append(os.Environ(), "CURL_HOME="+home, "HOME="+home)
	out, err := cmd.CombinedOutput()
	if got := strings.ReplaceAll(string(out), "\n\n", "\n"); err != nil || got != want || want == "" {
		t.Errorf("%v: the commands print\n%s\nthe page says\n%s", err, got, want)
	}
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

// asGoose makes this test binary the goose command line, as far as the README uses it.
const asGoose = "FERRYMQ_TEST_GOOSE"

func gooseMain() error {
	f := flag.NewFlagSet("goose", flag.ContinueOnError)
	dir, table := f.String("dir", ".", ""), f.String("table", "goose_db_version", "")
	if err := f.Parse(os.Args[1:]); err != nil {
		return err
	}
	if f.NArg() != 3 || f.Arg(0) != "postgres" || f.Arg(2) != "up" {
		return errors.New("only: postgres DSN up")
	}
	config, err := pgx.ParseConfig(f.Arg(1))
	if err != nil {
		return err
	}
	conn := stdlib.OpenDB(*config)
	defer conn.Close()
	return errors.Join(goose.SetDialect("postgres"), setTable(*table), goose.Up(conn, *dir))
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

// The design names tests and scripts: they exist.
func TestDesignNamesTests(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("docs/design.md")
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, pattern := range []string{"*_test.go", "*/*_test.go"} {
		files, _ := filepath.Glob(pattern)
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			all.Write(b)
		}
	}
	for _, m := range regexp.MustCompile("`(?:[a-z]+\\.)?(Test[A-Z][A-Za-z]*)`").FindAllSubmatch(page, -1) {
		if !strings.Contains(all.String(), "func "+string(m[1])+"(t *testing.T)") {
			t.Errorf("docs/design.md names %s, which is gone", m[1])
		}
	}
	for _, list := range regexp.MustCompile("scripts? (`[a-z_]+`(?:, `[a-z_]+`)*)").FindAllSubmatch(page, -1) {
		for _, m := range regexp.MustCompile("[a-z_]+").FindAllString(string(list[1]), -1) {
			if _, err := os.Stat("contract/testdata/" + m + ".txt"); err != nil {
				t.Errorf("docs/design.md names the script %s: %v", m, err)
			}
		}
	}
}

// What the README names exists.
func TestReadmeLinks(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"README.md", "docs/design.md", "docs/benchmarks.md", "docs/models.md"} {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, m := range regexp.MustCompile(`\]\(([^)#]+)\)`).FindAllStringSubmatch(string(b), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(name), m[1])); err != nil {
				t.Errorf("%s links to %s: %v", name, m[1], err)
			}
		}
	}
}
