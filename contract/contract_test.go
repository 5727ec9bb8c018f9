// Package contract holds the /api/v1 contract as text scripts: testdata/*.txt,
// each run against its own broker process on its own database. Nothing here
// knows the code of the broker; it is driven by its settings and by HTTP.
//
// # Scripts
//
// A script is a list of steps. A line that starts with # is a comment; one
// that starts with ## names a scenario. When a value of a scenario could not be
// captured, the rest of that scenario is left out and the next one runs.
//
//	POST /api/v1/push                       a request: method and path as sent, byte for byte
//	X-Header: value                         request headers
//	{"items":[{"queue":"q",                 the body; lines are joined,
//	  "payload":1}]}                        leading spaces dropped
//	=> 201                                  the answer: its status
//	X-Header: value                         headers it must have ("-": must not have)
//	[{"index":0,"message_id":"$m:uuid7"}]   its body, byte for byte (one final newline is free)
//
// In place of a whole body, any number of
//
//	~regexp                                 the body matches
//	.messages.*.data 1 2 3                  the values at this path, as sent, joined by spaces
//	                                        (* is every element, a number one of them)
//	.queue == "a\u0020b"                    the value at this path, however it is spelled
//	.status absent                          there is nothing at this path
//
// A step ends at a blank line. Placeholders:
//
//	$name:kind   in answers: checks the kind and remembers the value. Two names
//	             never hold the same UUID; $_ is not remembered. Kinds: uuid, uuid7,
//	             time6 and time3 (UTC with 6 or 3 decimals), int, any (string content)
//	$name        the remembered value, in answers, paths, bodies and sql
//	<text*N>     text N times
//
// Further steps:
//
//	env NAME=value              a setting of all brokers, before the first one starts
//	broker 2 [NAME=value …]     starts another broker on the same database ("unready":
//	                            without waiting for /ready); broker 1 starts by itself
//	@2 GET /path                a request to broker 2
//	stop 2 · term 2             SIGTERM, and exit 0 within 10 s · SIGTERM only
//	refuses NAME=value …        a broker with these settings ends with an error that
//	                            names the first of them
//	& name GET /path            a request in the background
//	cancel name                 closes its connection
//	await name                  its answer follows, as above. With several names: the
//	                            first answer given matches exactly one, the second the rest
//	=> 200 within 1s after 500ms   bounds of time: after counts from the start of the request,
//	                            within too, but with await from the await
//	raw [N]                     the lines that follow are a request, Go string escapes;
//	                            "pause 1s" inside waits. "& name raw [N]" is possible
//	bytes "…"                   a body line in Go syntax
//	wait 1100ms                 lets time pass
//	jwt name {"role":"admin"}   a token with these claims: HS256, signed with the key "contract"
//	sql statement               on the database; "=> a|b" lines are the rows
//	reconnect                   tells the pooler, if the brokers are behind one, that the
//	                            server is another one now, as its operator would
//	database off · on           ends and refuses all connections to it · lets them in again
//	for x in a b c … end        repeats the lines between, $x replaced
//	for x|y in a|1 b|2 … end    the same with several names
//
// # Checked on every answer
//
// A 204 has no body, no Content-Length and no Content-Type. Everything else
// is valid JSON of type application/json, or metrics in the Prometheus text format. A 405 has Allow, a 401 WWW-Authenticate. A 503 has Retry-After,
// except from probes. No error names SQL, source files or other products. Status and body are what /v1/openapi.json says of the operation.
package contract

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"ferrymq/dbtest"
)

func TestMain(m *testing.M) {
	flag.Parse()
	// Scripts mostly wait for time to pass, so more of them run than there are cores.
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		_ = f.Value.Set("8")
	}
	dbtest.Main(m)
}

func TestContract(t *testing.T) {
	bin := os.Getenv("FERRYMQ_BIN") // another build of the broker, such as one with -race
	if bin == "" {
		bin = filepath.Join(t.TempDir(), "ferrymq")
		build := exec.Command("go", "build", "-o", bin, "ferrymq")
		build.Dir = ".."
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("build: %v\n%s", err, out)
		}
	}
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	t.Run("clients", func(t *testing.T) { t.Parallel(); testClients(t, bin) })
	t.Run("openapi", func(t *testing.T) { t.Parallel(); testOpenAPI(t, bin) })
	t.Run("nginx", func(t *testing.T) { t.Parallel(); testNginx(t, bin) })
	t.Run("caddy", func(t *testing.T) { t.Parallel(); testCaddy(t, bin) })
	t.Run("paging", func(t *testing.T) { t.Parallel(); testPaging(t, bin) })
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			run(t, bin, file, string(text))
		})
	}
}
