package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"ferrymq/client"
	"ferrymq/handlers"
	"ferrymq/schema"
)

// Exit codes.
const (
	exitFailure = 1
	exitUsage   = 2
	exitNothing = 3
)

// command is a word after "ferrymq".
type command struct {
	name, args, short, long string
	remote                  bool // it calls a broker
	run                     func(ctx context.Context, c *invocation) error
	flags                   func(c *invocation)
}

// invocation is a command that runs.
type invocation struct {
	*command
	flags    *flag.FlagSet
	args     []string
	in       io.Reader
	out, err io.Writer
	env      map[string]string

	url, key, project *string
	broker            *client.Client
}

// usageError is a mistake in the command line.
type usageError string

func (e usageError) Error() string { return string(e) }

// errNothing says that there was nothing to do.
var errNothing = errors.New("nothing")

// errSilent fails when all has been said.
var errSilent = errors.New("failed")

func commands() []command {
	return []command{
		{name: "serve", short: "run a broker; so does ferrymq alone", long: "All settings come from the environment; the README has the table of them. SIGTERM or Ctrl-C ends it in order.\n\nExamples:\n  ferrymq\n  DATABASE_URL=postgres://ferrymq@db.internal/ferrymq PORT=7000 ferrymq serve", run: serve},
		migrateCommand(), checkCommand(), pushCommand(), popCommand(), ackCommand(), tailCommand(), lagCommand(), deadCommand(),
		{name: "version", short: "print the version and what schema it knows", run: version},
	}
}

const remoteHelp = `
Flags of all commands that call a broker:
  -url URL        where it is; several with commas (FERRYMQ_URL, else http://127.0.0.1:6632)
  -key KEY        API key, root key or token (FERRYMQ_KEY, which other users of the machine do not see)
  -project NAME   the project of streams and subscriptions (FERRYMQ_PROJECT)
`

const exitHelp = `
Exit codes: 0 it worked, 1 it did not, 2 the command line is wrong, 3 there was nothing (pop, dlq).
`

// execute runs a command line and returns its exit code.
func execute(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) int {
	all := commands()
	if len(args) == 0 {
		args = []string{"serve"}
	}
	name, args := args[0], args[1:]
	if slices.Contains([]string{"help", "-h", "-help", "--help"}, name) {
		if len(args) == 0 {
			fmt.Fprint(out, "FerryMQ, a message broker over PostgreSQL.\n\nUsage: ferrymq [COMMAND] [ARGUMENTS AND FLAGS]\n\n")
			for _, c := range all {
				fmt.Fprintf(out, "  %-9s %s\n", c.name, c.short)
			}
			fmt.Fprint(out, "\n`ferrymq help COMMAND` says more, with examples.\n"+exitHelp)
			return 0
		}
		name, args = args[0], []string{"-h"}
	}
	if name == "--version" || name == "-version" {
		name = "version"
	}
	names := make([]string, len(all))
	for i, c := range all {
		if names[i] = c.name; c.name != name {
			continue
		}
		err := (&invocation{command: &all[i], in: in, out: out, err: errs, env: environment()}).do(ctx, args)
		var wrong usageError
		switch {
		case err == nil:
			return 0
		case errors.As(err, &wrong):
			fmt.Fprintf(errs, "ferrymq %s: %v\n`ferrymq help %s` shows how it is used.\n", name, err, name)
			return exitUsage
		case errors.Is(err, errNothing):
			return exitNothing
		case !errors.Is(err, errSilent):
			fmt.Fprintln(errs, "ferrymq:", err)
		}
		return exitFailure
	}
	fmt.Fprintf(errs, "ferrymq: there is no command %q%s\n`ferrymq help` lists them.\n", name, suggestion(name, names))
	return exitUsage
}

// suggestion is the name that was probably meant.
func suggestion(typed string, names []string) string {
	score := func(name string) int {
		if n := min(3, len(name)); strings.HasPrefix(typed, name[:n]) {
			return 1
		}
		return distance(typed, name)
	}
	best := slices.MinFunc(names, func(a, b string) int { return cmp.Compare(score(a), score(b)) })
	if score(best) > max(1, len(best)/3) {
		return ""
	}
	return fmt.Sprintf(": did you mean %s?", best)
}

// distance is how many letters are to be added, dropped, changed or swapped with their neighbour to make one word of the other.
func distance(a, b string) int {
	var before, last []int
	for i := 0; i <= len(a); i++ {
		row := make([]int, len(b)+1)
		for j := range row {
			switch {
			case i == 0 || j == 0:
				row[j] = i + j
			default:
				cost := 1
				if a[i-1] == b[j-1] {
					cost = 0
				}
				row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+cost)
				if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
					row[j] = min(row[j], before[j-2]+1)
				}
			}
		}
		before, last = last, row
	}
	return last[len(b)]
}

func (c *invocation) do(ctx context.Context, args []string) error {
	c.flags = flag.NewFlagSet(c.name, flag.ContinueOnError)
	c.flags.SetOutput(io.Discard)
	if c.remote {
		c.url = c.flags.String("url", cmp.Or(c.env["FERRYMQ_URL"], "http://127.0.0.1:6632"), "")
		c.key = c.flags.String("key", c.env["FERRYMQ_KEY"], "")
		c.project = c.flags.String("project", c.env["FERRYMQ_PROJECT"], "")
	}
	if c.command.flags != nil {
		c.command.flags(c)
	}
	for { // flags may come after arguments
		if err := c.flags.Parse(args); errors.Is(err, flag.ErrHelp) {
			c.help()
			return nil
		} else if err != nil {
			return usageError(err.Error())
		}
		used := args[:len(args)-c.flags.NArg()]
		if args = c.flags.Args(); len(used) > 0 && used[len(used)-1] == "--" {
			c.args = append(c.args, args...)
			break
		}
		if len(args) == 0 {
			break
		}
		c.args, args = append(c.args, args[0]), args[1:]
	}
	least := strings.Fields(strings.Split(c.command.args, "[")[0])
	if len(c.args) < len(least) {
		return usageError(least[len(c.args)] + " is missing")
	}
	if !strings.Contains(c.command.args, "...") && len(c.args) > len(strings.Fields(c.command.args)) {
		return usageError(fmt.Sprintf("%q is more than it takes", c.args[len(c.args)-1]))
	}
	if c.remote {
		var err error
		c.broker, err = client.New(client.Config{URLs: strings.Split(*c.url, ","), Key: *c.key, Project: *c.project, RetryFor: 5 * time.Second,
			Log: slog.New(slog.NewTextHandler(c.err, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
				if a.Key == slog.TimeKey {
					return slog.Attr{}
				}
				return a
			}}))})
		if err != nil {
			return usageError(strings.TrimPrefix(err.Error(), "client: "))
		}
		defer c.broker.Close()
	}
	err := c.run(ctx, c)
	var refused *client.Error
	if errors.As(err, &refused) && refused.Status == http.StatusUnauthorized {
		err = fmt.Errorf("%w\nFERRYMQ_KEY is the key or token to come with. API keys (fmq_...) are for streams and subscriptions only, not for tail", err)
	}
	return err
}

func (c *invocation) help() {
	fmt.Fprintf(c.out, "%s\n\nUsage: ferrymq %s\n", strings.ToUpper(c.short[:1])+c.short[1:]+".", strings.TrimSpace(c.name+" "+c.command.args))
	if c.long != "" {
		fmt.Fprintf(c.out, "\n%s\n", c.long)
	}
	first := true
	c.flags.VisitAll(func(f *flag.Flag) {
		if f.Usage == "" { // said below
			return
		}
		if first {
			fmt.Fprint(c.out, "\nFlags:\n")
			first = false
		}
		kind, usage := flag.UnquoteUsage(f)
		if f.DefValue != "" && f.DefValue != "false" && f.DefValue != "0" && f.DefValue != "0s" {
			usage += " (" + f.DefValue + ")"
		}
		fmt.Fprintf(c.out, "  %-20s %s\n", strings.TrimSpace("-"+f.Name+" "+kind), usage)
	})
	if c.remote {
		fmt.Fprint(c.out, remoteHelp)
	}
	fmt.Fprint(c.out, exitHelp)
}

func version(_ context.Context, c *invocation) error {
	fmt.Fprintf(c.out, "ferrymq %s, schema %d\n", handlers.Version, schema.Known())
	return nil
}

// progress tells how far long work is, every two seconds.
type progress struct {
	c    *invocation
	what string
	n    int
	next time.Time
	from time.Time
}

func (p *progress) add(n int) {
	now := time.Now()
	if p.from.IsZero() {
		p.from, p.next = now, now.Add(2*time.Second)
	}
	if p.n += n; now.After(p.next) {
		fmt.Fprintf(p.c.err, "%d %s, %.0f a second\n", p.n, p.what, float64(p.n)/now.Sub(p.from).Seconds())
		p.next = now.Add(2 * time.Second)
	}
}

// lines sends what can be read at a moment together, at most so many lines.
func lines(in io.Reader, most int) (batches <-chan []string, failed func() error) {
	one, many := make(chan string, most), make(chan []string)
	s := bufio.NewScanner(in)
	s.Buffer(nil, 64<<20)
	go func() {
		defer close(one)
		for s.Scan() {
			one <- s.Text()
		}
	}()
	go func() {
		defer close(many)
		for line := range one {
			batch := []string{line}
			for more := true; more && len(batch) < most; {
				select {
				case line, ok := <-one:
					if more = ok; ok {
						batch = append(batch, line)
					}
				default:
					more = false
				}
			}
			many <- batch
		}
	}()
	return many, s.Err
}

func pushCommand() command {
	var key, keyField, idField *string
	var raw, ids *bool
	var delay *time.Duration
	return command{name: "push", args: "STREAM [PAYLOAD...]", remote: true, short: "publish messages to a stream",
		long: "Payloads are JSON: arguments, or else lines of standard input. A stream is a queue, too: consumers of both APIs get them.\nWhat is read is sent at once, and many lines together. If it ends early it says how many lines are stored.\n\n" +
			"Examples:\n  ferrymq push orders '{\"total\": 9.5}' -message-key customer-7\n  ferrymq push orders < orders.jsonl -key-field customer -id-field number\n  tail -f app.log | ferrymq push logs -raw",
		flags: func(c *invocation) {
			key = c.flags.String("message-key", "", "`KEY` of the messages: those of one key come in order")
			keyField = c.flags.String("key-field", "", "take the key from this `FIELD` of the payload")
			idField = c.flags.String("id-field", "", "take the id from this `FIELD`: pushed again within the dedup window, it is stored once")
			delay = c.flags.Duration("delay", 0, "deliver them so much later")
			raw = c.flags.Bool("raw", false, "each line is a text, whatever it holds")
			ids = c.flags.Bool("ids", false, "print the ids that the broker gave")
		},
		run: func(ctx context.Context, c *invocation) error {
			field := func(payload json.RawMessage, name string) (string, error) {
				var object map[string]json.RawMessage
				if json.Unmarshal(payload, &object) != nil || object[name] == nil {
					return "", fmt.Errorf("there is no field %q", name)
				}
				var text string
				if json.Unmarshal(object[name], &text) == nil {
					return text, nil
				}
				return string(object[name]), nil
			}
			p, known, done := progress{c: c, what: "published"}, 0, 0
			send := func(texts []string) error {
				messages := make([]client.Outgoing, len(texts))
				for i, text := range texts {
					m := client.Outgoing{Key: *key, Delay: *delay, Payload: text}
					var err error
					if !*raw {
						m.Payload = json.RawMessage(text)
						if !json.Valid([]byte(text)) {
							err = errors.New("it is not JSON (-raw sends lines as texts)")
						}
					}
					if *keyField != "" && err == nil {
						m.Key, err = field([]byte(text), *keyField)
					}
					if *idField != "" && err == nil {
						m.ID, err = field([]byte(text), *idField)
					}
					if err != nil {
						return fmt.Errorf("message %d: %w; the %d before are published", done+i+1, err, done)
					}
					messages[i] = m
				}
				results, err := c.broker.Publish(ctx, c.args[0], messages...)
				for i, x := range results {
					if x.Err != nil && err != nil {
						return fmt.Errorf("message %d: %w; the %d before are published", done+i+1, err, done+i)
					}
					if x.Duplicate {
						known++
					}
					if *ids {
						fmt.Fprintln(c.out, x.ID)
					}
				}
				if err != nil {
					return err
				}
				done += len(texts)
				p.add(len(texts))
				return nil
			}
			var err error
			if len(c.args) > 1 {
				err = send(c.args[1:])
			} else {
				batches, failed := lines(c.in, 500)
				for batch := range batches {
					batch = slices.DeleteFunc(batch, func(s string) bool { return strings.TrimSpace(s) == "" && !*raw })
					if err = send(batch); err != nil {
						break
					}
				}
				if err == nil {
					err = failed()
				}
			}
			if err == nil {
				fmt.Fprintf(c.err, "%d published, %d of them were there already\n", p.n, known)
			}
			return err
		}}
}

func popCommand() command {
	var n *int
	var wait *time.Duration
	var keep, raw *bool
	var stream *string
	return command{name: "pop", args: "SUBSCRIPTION", remote: true, short: "take messages of a subscription: print and ack them",
		long: "Prints one JSON object a line. A message is acked when it has been written, so that it comes again if that fails.\nWith -keep it stays leased: `ferrymq ack` settles it, or it comes again when the lease ends. No message within -wait: exit code 3.\n\n" +
			"Examples:\n  ferrymq pop mail -stream letters -n 10\n  ferrymq pop mail -keep | tee got.jsonl",
		flags: func(c *invocation) {
			n = c.flags.Int("n", 1, "at most so `many`")
			wait = c.flags.Duration("wait", 0, "wait for the first one")
			keep = c.flags.Bool("keep", false, "do not ack")
			raw = c.flags.Bool("raw", false, "print payloads only")
			stream = c.flags.String("stream", "", "make the subscription, of this `STREAM`, if there is none")
		},
		run: func(ctx context.Context, c *invocation) error {
			path := "/v1/subscriptions/" + url.PathEscape(c.args[0])
			if *stream != "" {
				if err := c.broker.Call(ctx, "PUT", path, map[string]any{"stream": *stream}, nil); err != nil {
					return err
				}
			}
			got, end := 0, time.Now().Add(*wait)
			for got < *n {
				var answer struct{ Messages []json.RawMessage }
				seconds := 0.0
				if got == 0 {
					seconds = min(max(time.Until(end).Seconds(), 0), 20)
				}
				if err := c.broker.Call(ctx, "POST", path+"/receive", map[string]any{"max_messages": min(*n-got, 100), "wait_seconds": seconds, "consumer": "ferrymq pop"}, &answer); err != nil {
					return err
				}
				if len(answer.Messages) == 0 && (got > 0 || !time.Now().Before(end)) {
					break
				}
				var ids []string
				for _, text := range answer.Messages {
					var m struct {
						ID      string `json:"delivery_id"`
						Message struct{ Payload json.RawMessage }
					}
					if err := json.Unmarshal(text, &m); err != nil {
						return err
					}
					if *raw {
						text = m.Message.Payload
					}
					if _, err := fmt.Fprintf(c.out, "%s\n", bytes.ReplaceAll(text, []byte("\n"), []byte(" "))); err != nil {
						return err // what is not printed comes again
					}
					ids = append(ids, m.ID)
				}
				got += len(ids)
				if !*keep && len(ids) > 0 {
					if err := settle(ctx, c, "ack", map[string]any{}, ids); err != nil {
						return err
					}
				}
			}
			if got == 0 {
				return errNothing
			}
			return nil
		}}
}

// settle says which deliveries it could not settle.
func settle(ctx context.Context, c *invocation, what string, body map[string]any, ids []string) error {
	failed := false
	for chunk := range slices.Chunk(ids, 1000) {
		body["delivery_ids"] = chunk
		var answer struct {
			Results []struct {
				ID    string `json:"delivery_id"`
				OK    bool
				Error string
			}
		}
		if err := c.broker.Call(ctx, "POST", "/v1/subscriptions/"+url.PathEscape(c.args[0])+"/"+what, body, &answer); err != nil {
			return err
		}
		for _, x := range answer.Results {
			if !x.OK {
				failed = true
				fmt.Fprintf(c.err, "%s: %s\n", x.ID, x.Error)
			}
		}
	}
	if failed {
		return errSilent
	}
	return nil
}

func ackCommand() command {
	var nack *string
	var release *bool
	var after, extend *time.Duration
	return command{name: "ack", args: "SUBSCRIPTION [DELIVERY_ID...]", remote: true, short: "settle messages that pop -keep took",
		long: "Delivery ids (dlv_...) are arguments, or else lines of standard input, which may be lines that pop has printed.\n\n" +
			"Examples:\n  ferrymq ack mail dlv_01h...\n  ferrymq ack mail < got.jsonl\n  ferrymq ack mail -nack 'mailbox is full' -retry-after 10m dlv_01h...",
		flags: func(c *invocation) {
			nack = c.flags.String("nack", "", "they failed, with this `TEXT`")
			after = c.flags.Duration("retry-after", -1, "with -nack: when they come again, instead of what the policy says")
			release = c.flags.Bool("release", false, "give them back at once; it was no attempt")
			extend = c.flags.Duration("extend", 0, "keep their leases so much longer, from now on")
		},
		run: func(ctx context.Context, c *invocation) error {
			ids := c.args[1:]
			if len(ids) == 0 {
				batches, failed := lines(c.in, 1000)
				for batch := range batches {
					for _, line := range batch {
						var m struct {
							ID string `json:"delivery_id"`
						}
						if line = strings.TrimSpace(line); json.Unmarshal([]byte(line), &m) == nil {
							line = m.ID
						}
						if line != "" {
							ids = append(ids, line)
						}
					}
				}
				if err := failed(); err != nil {
					return err
				}
			}
			switch {
			case *nack != "" && *after >= 0:
				return settle(ctx, c, "nack", map[string]any{"error": *nack, "retry_after": after.String()}, ids)
			case *nack != "":
				return settle(ctx, c, "nack", map[string]any{"error": *nack}, ids)
			case *release:
				return settle(ctx, c, "nack", map[string]any{"release": true}, ids)
			case *extend > 0:
				return settle(ctx, c, "extend", map[string]any{"seconds": int(extend.Round(time.Second).Seconds())}, ids)
			}
			return settle(ctx, c, "ack", map[string]any{}, ids)
		}}
}

func tailCommand() command {
	var since *time.Duration
	var once, raw *bool
	return command{name: "tail", args: "QUEUE", remote: true, short: "follow what arrives in a queue or stream, without consuming it",
		long: "Prints one JSON object a line, the oldest first. It looks once a second, and takes no lease: consumers do not notice.\nIt reads /api/v1/messages, so it sees the default project only, and needs a token or the root key where authentication is on.\n\n" +
			"Examples:\n  ferrymq tail orders\n  ferrymq tail orders -since 10m -once",
		flags: func(c *invocation) {
			since = c.flags.Duration("since", 0, "begin so long ago, instead of now")
			once = c.flags.Bool("once", false, "end when everything has been printed")
			raw = c.flags.Bool("raw", false, "print payloads only")
		},
		run: func(ctx context.Context, c *invocation) error {
			type message struct {
				ID        string          `json:"id"`
				Partition string          `json:"partition"`
				Created   string          `json:"created_at"`
				Payload   json.RawMessage `json:"payload"`
			}
			// The database's clock counts, and a message may come to light a little after its time.
			const late = 10 * time.Second
			seen := make(map[string]time.Time)
			look := func(from time.Time) ([]message, error) {
				var found []message
				for {
					var answer struct {
						Messages []struct {
							message
							At string `json:"createdAt"`
						}
					}
					values := url.Values{"queue": {c.args[0]}, "limit": {"1000"}, "offset": {fmt.Sprint(len(found))}, "from": {from.UTC().Format(time.RFC3339Nano)}}
					if err := c.broker.Call(ctx, "GET", "/api/v1/messages?"+values.Encode(), nil, &answer); err != nil {
						return nil, err
					}
					for _, m := range answer.Messages {
						m.message.Created = m.At
						found = append(found, m.message)
					}
					if len(answer.Messages) < 1000 {
						slices.Reverse(found)
						return found, nil
					}
				}
			}
			newest := time.Now().Add(-*since)
			silent := *since == 0
			for {
				found, err := look(newest.Add(-late))
				if err != nil {
					if ctx.Err() != nil {
						return nil
					}
					return err
				}
				begin := newest
				for _, m := range found {
					at, err := time.Parse(time.RFC3339, m.Created)
					if err != nil {
						return err
					}
					if at.After(newest) {
						newest = at
					}
					if !seen[m.ID].IsZero() {
						continue
					}
					seen[m.ID] = at
					if silent || *once && at.Before(begin) {
						continue
					}
					text, err := m.Payload.MarshalJSON()
					if !*raw && err == nil {
						text, err = json.Marshal(m)
					}
					if err == nil {
						_, err = fmt.Fprintf(c.out, "%s\n", bytes.ReplaceAll(text, []byte("\n"), []byte(" ")))
					}
					if err != nil {
						return err
					}
				}
				silent = false
				maps.DeleteFunc(seen, func(_ string, at time.Time) bool { return at.Before(newest.Add(-2 * late)) })
				if *once {
					return nil
				}
				select {
				case <-ctx.Done():
					return nil
				case <-time.After(time.Second):
				}
			}
		}}
}

// backlog is a line of lag.
type backlog struct {
	Kind     string   `json:"kind"` // subscription or group
	Name     string   `json:"name"`
	Stream   string   `json:"stream"`
	Backlog  int64    `json:"backlog"`
	InFlight *int64   `json:"in_flight,omitempty"`
	Retrying *int64   `json:"waiting_for_retry,omitempty"`
	Dead     *int64   `json:"dead,omitempty"`
	Oldest   *float64 `json:"oldest_age_seconds"`
}

func lagCommand() command {
	var asJSON *bool
	return command{name: "lag", args: "", remote: true, short: "how far behind groups and subscriptions are",
		long: "The oldest age is that of the first message that is not done. Groups of /api/v1 are left out for API keys, which may not read them.\n\nExamples:\n  ferrymq lag\n  ferrymq lag -json | jq 'select(.backlog > 1000)'",
		flags: func(c *invocation) {
			asJSON = c.flags.Bool("json", false, "one JSON object a line")
		},
		run: func(ctx context.Context, c *invocation) error {
			var all []backlog
			p := progress{c: c, what: "subscriptions looked at"}
			for cursor := ""; ; {
				var page struct {
					Subscriptions []backlog
					Next          string `json:"next_cursor"`
				}
				if err := c.broker.Call(ctx, "GET", "/v1/subscriptions?"+url.Values{"limit": {"1000"}, "cursor": {cursor}}.Encode(), nil, &page); err != nil {
					return err
				}
				for _, s := range page.Subscriptions { // a list does not count
					err := c.broker.Call(ctx, "GET", "/v1/subscriptions/"+url.PathEscape(s.Name), nil, &s)
					var gone *client.Error
					if errors.As(err, &gone) && gone.Status == http.StatusNotFound {
						continue
					} else if err != nil {
						return err
					}
					s.Kind = "subscription"
					all = append(all, s)
					p.add(1)
				}
				if cursor = page.Next; cursor == "" {
					break
				}
			}
			if *c.project == "" && !strings.HasPrefix(*c.key, "fmq_") {
				var groups []struct {
					Name, QueueName string
					TotalLag        int64
					MaxTimeLag      float64
				}
				if err := c.broker.Call(ctx, "GET", "/api/v1/consumer-groups", nil, &groups); err != nil {
					return err
				}
				for _, g := range groups {
					b := backlog{Kind: "group", Name: g.Name, Stream: g.QueueName, Backlog: g.TotalLag}
					if g.TotalLag > 0 {
						b.Oldest = &g.MaxTimeLag
					}
					all = append(all, b)
				}
			}
			if *asJSON {
				for _, b := range all {
					if err := json.NewEncoder(c.out).Encode(b); err != nil {
						return err
					}
				}
				return nil
			}
			slices.SortStableFunc(all, func(a, b backlog) int { return cmp.Compare(b.Backlog, a.Backlog) })
			w := tabwriter.NewWriter(c.out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "KIND\tNAME\tSTREAM\tBACKLOG\tOLDEST\tIN FLIGHT\tRETRYING\tDEAD")
			number := func(n *int64) string {
				if n == nil {
					return "-"
				}
				return fmt.Sprint(*n)
			}
			for _, b := range all {
				oldest := "-"
				if b.Oldest != nil {
					oldest = (time.Duration(*b.Oldest) * time.Second).String()
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\n", b.Kind, printable(b.Name), printable(b.Stream), b.Backlog, oldest, number(b.InFlight), number(b.Retrying), number(b.Dead))
			}
			return w.Flush()
		}}
}

// printable is a name that does nothing to a terminal or a table.
func printable(s string) string {
	if q := fmt.Sprintf("%q", s); q != `"`+s+`"` {
		return q
	}
	return s
}

func deadCommand() command {
	var signature *string
	var all, yes, bySignature *bool
	var n *int
	return command{name: "dlq", args: "list|redrive|delete SUBSCRIPTION [ID...]", remote: true, short: "look at, redrive or delete the dead letters of a subscription",
		long: "list prints the newest first, one JSON object a line; -signatures counts them by their error. redrive puts each back at the end of its key,\ndelete removes it for good. Both want ids, -signature or -all, say how many that are, and ask for that number unless there is a -yes.\n\n" +
			"Examples:\n  ferrymq dlq list mail -signatures\n  ferrymq dlq redrive mail -signature 'mailbox is full'\n  ferrymq dlq delete mail dl_01h... -yes",
		flags: func(c *invocation) {
			signature = c.flags.String("signature", "", "those with this `SIGNATURE` only")
			all = c.flags.Bool("all", false, "all of them")
			yes = c.flags.Bool("yes", false, "do not ask")
			bySignature = c.flags.Bool("signatures", false, "list: how many there are of each signature")
			n = c.flags.Int("n", 20, "list: at most so `many`; 0: all")
		},
		run: func(ctx context.Context, c *invocation) error {
			what, path := c.args[0], "/v1/subscriptions/"+url.PathEscape(c.args[1])+"/dead-letters"
			if !slices.Contains([]string{"list", "redrive", "delete"}, what) {
				return usageError(fmt.Sprintf("there is no dlq %q%s", what, suggestion(what, []string{"list", "redrive", "delete"})))
			}
			c.args = c.args[1:]
			ids := c.args[1:]
			values := url.Values{"limit": {"1000"}}
			if *signature != "" {
				values.Set("signature", *signature)
			}
			walk := func(path, list string, each func(json.RawMessage) bool) error {
				for {
					var page map[string]json.RawMessage
					if err := c.broker.Call(ctx, "GET", path+"?"+values.Encode(), nil, &page); err != nil {
						return err
					}
					var items []json.RawMessage
					var next string
					if err := errors.Join(json.Unmarshal(page[list], &items), json.Unmarshal(page["next_cursor"], &next)); err != nil {
						return err
					}
					for _, x := range items {
						if !each(x) {
							return nil
						}
					}
					if next == "" {
						return nil
					}
					values.Set("cursor", next)
				}
			}
			count := 0
			if what == "list" {
				from, list := path, "dead_letters"
				if *bySignature {
					from, list = path+"/signatures", "signatures"
				}
				err := walk(from, list, func(x json.RawMessage) bool {
					fmt.Fprintf(c.out, "%s\n", bytes.ReplaceAll(x, []byte("\n"), []byte(" ")))
					count++
					return *n == 0 || count < *n
				})
				if err == nil && count == 0 {
					err = errNothing
				}
				return err
			}
			ways := 0
			for _, given := range []bool{len(ids) > 0, *signature != "", *all} {
				if given {
					ways++
				}
			}
			if ways != 1 {
				return usageError("say which: ids, or -signature, or -all")
			}
			if len(ids) == 0 {
				if err := walk(path, "dead_letters", func(x json.RawMessage) bool {
					var d struct{ ID string }
					_ = json.Unmarshal(x, &d)
					ids = append(ids, d.ID)
					return true
				}); err != nil {
					return err
				}
				if len(ids) == 0 {
					return errNothing
				}
			}
			if !*yes {
				fmt.Fprintf(c.err, "%s %d dead letters of %s? Type %d to go on: ", what, len(ids), printable(c.args[0]), len(ids))
				answer, _ := bufio.NewReader(c.in).ReadString('\n')
				if strings.TrimSpace(answer) != fmt.Sprint(len(ids)) {
					return errors.New("nothing was done")
				}
			}
			method, to, p := "DELETE", path, progress{c: c, what: what + "d"}
			if what == "redrive" {
				method, to, p.what = "POST", path+"/redrive", "redriven"
			}
			slices.Reverse(ids) // the oldest first: that is the order in which they are to come
			failed := false
			for chunk := range slices.Chunk(ids, 500) {
				var answer struct {
					Results []struct {
						ID    string
						OK    bool
						Error string
					}
				}
				if err := c.broker.Call(ctx, method, to, map[string]any{"ids": chunk}, &answer); err != nil {
					return fmt.Errorf("%w; %d are %s", err, p.n, p.what)
				}
				done := 0
				for _, x := range answer.Results {
					if x.OK {
						done++
					} else {
						failed = true
						fmt.Fprintf(c.err, "%s: %s\n", printable(x.ID), x.Error)
					}
				}
				p.add(done)
			}
			fmt.Fprintf(c.err, "%d %s\n", p.n, p.what)
			if failed {
				return errSilent
			}
			return nil
		}}
}
