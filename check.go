package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"ferrymq/db"
	"ferrymq/localpg"
	"ferrymq/schema"
)

func migrateCommand() command {
	var yes *bool
	var to *int64
	return command{name: "migrate", args: "up|status|down", short: "apply the migrations, list them, or take them back",
		long: "It works on DATABASE_DIRECT_URL, else DATABASE_URL or PGHOST. up does what a broker does when it starts, unless AUTO_MIGRATE is false; several\nat once wait for each other. down takes back the newest migration, or all above -to, with what their tables hold: end the brokers first,\nand start an older version afterwards. -to 0 drops all that FerryMQ has stored.\n\n" +
			"Examples:\n  ferrymq migrate status\n  ferrymq migrate up\n  ferrymq migrate down -to 11 -yes",
		flags: func(c *invocation) {
			yes = c.flags.Bool("yes", false, "down: yes, drop what the newer tables hold")
			to = c.flags.Int64("to", -1, "down: to which `VERSION`")
		},
		run: func(ctx context.Context, c *invocation) error {
			what := c.args[0]
			if !slices.Contains([]string{"up", "status", "down"}, what) {
				return usageError(fmt.Sprintf("there is no migrate %q%s", what, suggestion(what, []string{"up", "status", "down"})))
			}
			config, err := loadConfig(c.env)
			if err != nil {
				return err
			}
			dsn := cmp.Or(config.DatabaseDirectURL, config.DatabaseURL)
			if dsn == "" {
				return errors.New("no database is set: DATABASE_URL names it. A private PostgreSQL under DATA_DIR is migrated when a broker starts")
			}
			have, err := applied(ctx, dsn)
			if err != nil {
				return fmt.Errorf("database: %s", db.Text(redact(err)))
			}
			known := schema.Known()
			switch what {
			case "status":
				for _, s := range schema.Steps() {
					state := "applied"
					if s.Version > have {
						state = "pending"
					}
					fmt.Fprintf(c.out, "%-8s %s\n", state, s.Name)
				}
				if have > known {
					return fmt.Errorf("the database has schema version %d, this binary knows up to %d: run a newer ferrymq", have, known)
				}
				return nil
			case "up":
				if have > known {
					return fmt.Errorf("the database has schema version %d, this binary knows up to %d: run a newer ferrymq", have, known)
				}
				fmt.Fprintf(c.err, "schema %d, wanted %d\n", have, known)
				if err := schema.Migrate(ctx, dsn); err != nil {
					return errors.New(db.Text(err).String())
				}
			case "down":
				if *to < 0 {
					*to = have - 1
				}
				switch {
				case have > known:
					return fmt.Errorf("the database has schema version %d, this binary knows up to %d: only a newer ferrymq can take it back", have, known)
				case *to >= have:
					return usageError(fmt.Sprintf("the schema is at version %d already", have))
				case !*yes:
					return usageError(fmt.Sprintf("this takes the schema from version %d to %d and drops what the newer tables hold: say -yes", have, *to))
				}
				if err := schema.Revert(ctx, dsn, *to); err != nil {
					return errors.New(db.Text(err).String())
				}
			}
			if have, err = applied(ctx, dsn); err != nil {
				return errors.New(db.Text(err).String())
			}
			fmt.Fprintf(c.out, "schema %d\n", have)
			return nil
		}}
}

// applied is the schema version of a database.
func applied(ctx context.Context, dsn string) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return 0, err
	}
	defer conn.Close(ctx)
	return schema.Applied(ctx, conn)
}

// checker prints what it finds.
type checker struct {
	c                *invocation
	failed, warnings int
}

func (k *checker) say(level, what, text, fix string) {
	fmt.Fprintf(k.c.out, "%-5s %-12s %s\n", level, what, text)
	if fix != "" {
		fmt.Fprintf(k.c.out, "%-18s fix: %s\n", "", fix)
	}
}

func (k *checker) ok(what, text string, args ...any) {
	k.say("ok", what, fmt.Sprintf(text, args...), "")
}
func (k *checker) warn(what, fix, text string, args ...any) {
	k.warnings++
	k.say("WARN", what, fmt.Sprintf(text, args...), fix)
}
func (k *checker) fail(what, fix, text string, args ...any) {
	k.failed++
	k.say("FAIL", what, fmt.Sprintf(text, args...), fix)
}

func checkCommand() command {
	var strict *bool
	return command{name: "check", args: "", short: "look at the settings and the database, and say what is wrong and how to mend it",
		long: "It takes the settings that a broker would, changes nothing, and can run beside brokers. Each finding comes with its fix.\nExit code 1: a broker would not start, or would lose what it promises to keep.\n\n" +
			"Examples:\n  ferrymq check\n  DATABASE_URL=postgres://ferrymq@db.internal/ferrymq ferrymq check -strict",
		flags: func(c *invocation) { strict = c.flags.Bool("strict", false, "warnings count as failures") },
		run: func(ctx context.Context, c *invocation) error {
			k := &checker{c: c}
			ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
			defer cancel()
			if config, err := loadConfig(c.env); err != nil {
				k.fail("settings", "set it to a value of the README's table", "%v", err)
			} else {
				k.settings(config)
				k.database(ctx, config)
			}
			if k.failed > 0 || *strict && k.warnings > 0 {
				return errSilent
			}
			return nil
		}}
}

// settings says what is unsafe, and what looks like a setting and is none.
func (k *checker) settings(c *Config) {
	before := k.warnings
	t := reflect.TypeFor[Config]()
	names := []string{"FERRYMQ_URL", "FERRYMQ_KEY", "FERRYMQ_PROJECT"}
	for i := range t.NumField() {
		if name := t.Field(i).Tag.Get("env"); name != "" {
			names = append(names, name)
		}
	}
	for name, others := range aliases {
		names = append(append(names, name), others...)
	}
	for name := range k.c.env {
		best := slices.MinFunc(names, func(a, b string) int { return cmp.Compare(distance(name, a), distance(name, b)) })
		if d := distance(name, best); d > 0 && d <= 2 && len(best) > 8 {
			k.warn("settings", "rename it, or ignore this if it is somebody else's", "%s is no setting, but like %s", name, best)
		}
	}
	if exposed(c) {
		k.warn("settings", "set AUTH_REQUIRED=true and ROOT_API_KEY, or BIND_ADDR=127.0.0.1", "no authentication, and it would listen on %s: whoever reaches it can read and write all queues", c.BindAddr)
	}
	if unused := c.auth == nil && c.RootAPIKey+c.JWTSecret+c.JWTPublicKey+c.JWTJWKSURL != ""; unused {
		k.warn("settings", "set AUTH_REQUIRED or JWT_ENABLED", "a key for authentication is set, but authentication is off")
	}
	if k.warnings == before {
		k.ok("settings", "can all be used")
	}
}

func (k *checker) database(ctx context.Context, c *Config) {
	if c.DatabaseURL == "" {
		dir, version, err := localpg.Installed(ctx)
		if err != nil {
			k.fail("database", "set DATABASE_URL, or install PostgreSQL 15 or newer", "none is set, and a private one cannot be started: %v", err)
			return
		}
		k.ok("database", "none is set: a private one would be started in %s, with %s from %s", c.DataDir, version, dir)
		return
	}
	pool, err := db.NewPool(ctx, c.DatabaseURL, 1, milliseconds(c.StatementTimeoutMS))
	if err == nil {
		defer pool.Close()
		err = db.Check(ctx, pool)
	}
	q := db.New(db.Patient{Pool: pool})
	var s db.CheckServerRow
	var before, after time.Time
	if err == nil {
		before = time.Now()
		s, err = q.CheckServer(ctx)
		after = time.Now()
	}
	if err != nil {
		k.fail("database", "see that the address, role, password and database of DATABASE_URL (or PGHOST) are right, and that it can be reached from here", "%s", strings.ReplaceAll(db.Text(redact(err)).String(), "\n\t", " "))
		return
	}
	k.ok("database", "PostgreSQL %s, database %s, role %s", s.VersionText, printable(s.Database), printable(s.Role))
	if s.ReadOnly {
		k.fail("database", "name the primary, or all hosts with target_session_attrs=read-write", "it takes no writes: a standby, or default_transaction_read_only is on")
	}
	have := k.schema(ctx, c, pool, s)
	k.permissions(ctx, q, s, have)

	off := hazards(s)
	for _, x := range off {
		k.fail("durability", "set "+x.name+" = on", "%s is off: %s", x.name, x.loss)
	}
	if len(off) == 0 {
		k.ok("durability", "fsync, full_page_writes and autovacuum are on, synchronous_commit is %s", s.SynchronousCommit)
	}

	middle := before.Add(after.Sub(before) / 2)
	if skew := s.Now.Sub(middle); skew.Abs() > time.Second+after.Sub(before)/2 {
		k.warn("clock", "keep both in time, with chrony or systemd-timesyncd", "the database's is %s away from that of this machine; leases go by the database's, tokens by the broker's", skew.Abs().Round(100*time.Millisecond))
	} else {
		k.ok("clock", "the database's and this machine's differ by %s", skew.Abs().Round(time.Millisecond))
	}

	need, limit, where := int32(c.DBPoolSize+2), s.Connections, "max_connections"
	if s.RoleLimit >= 0 && s.RoleLimit < limit {
		limit, where = s.RoleLimit, "the role's connection limit"
	}
	if s.DatabaseLimit >= 0 && s.DatabaseLimit < limit {
		limit, where = s.DatabaseLimit, "the database's connection limit"
	}
	pooled := db.ThroughPooler(pool)
	switch fix := fmt.Sprintf("raise %s, or lower DB_POOL_SIZE (%d)", where, c.DBPoolSize); {
	case need > limit:
		k.fail("connections", fix, "a broker opens %d, and %s leaves %d", need, where, limit)
	case need > limit-s.Used:
		k.warn("connections", fix, "a broker opens %d; of %d that %s leaves, %d are in use, perhaps by this broker", need, limit, where, s.Used)
	default:
		k.ok("connections", "a broker opens %d; of %d that %s leaves, %d are in use", need, limit, where, s.Used)
	}
	switch {
	case pooled && c.DatabaseDirectURL == "":
		k.warn("pooler", "set DATABASE_DIRECT_URL to an address of PostgreSQL itself", "there is one: brokers cannot hear of each other through it, and a waiting pop gets what another broker stored up to POP_WAIT_MAX_INTERVAL_MS (%d) later", c.PopWaitMaxIntervalMS)
	case pooled:
		k.ok("pooler", "there is one, and DATABASE_DIRECT_URL for what cannot go through it")
	default:
		k.ok("pooler", "none in between")
	}
	if c.DatabaseDirectURL != "" {
		k.direct(ctx, c, q, have)
	}
	if have > 0 && s.MayUse {
		if n, err := q.CheckBrokers(ctx); err == nil {
			k.ok("brokers", "%d run on this database", n)
		}
	}
}

// missing is a setting of a database that is off, and what that may cost.
type missing struct{ name, loss string }

// hazards are the settings of a database without which what was answered with success may be lost, or it becomes unusable.
func hazards(s db.CheckServerRow) (off []missing) {
	for _, x := range []struct {
		value string
		missing
	}{
		{s.Fsync, missing{"fsync", "a crash of its host can damage everything"}},
		{s.FullPageWrites, missing{"full_page_writes", "a crash of its host can damage pages"}},
		{s.SynchronousCommit, missing{"synchronous_commit", "a crash of the server loses the last moments of what was answered with success"}},
		{s.Autovacuum, missing{"autovacuum", "tables grow without end, and slow down within hours"}},
	} {
		if x.value == "off" {
			off = append(off, x.missing)
		}
	}
	return off
}

// schema returns the version of what the database has.
func (k *checker) schema(ctx context.Context, c *Config, pool schema.Querier, s db.CheckServerRow) int64 {
	have, err := schema.Applied(ctx, pool)
	known := schema.Known()
	switch pending := have < known; {
	case err != nil && s.MayUse:
		k.fail("schema", fmt.Sprintf("grant select on %s to %s", schema.Table, quoteName(s.Role)), "%s", db.Text(err))
		return -1
	case err != nil: // said by permissions
		return 0
	case have > known:
		k.fail("schema", "run a newer ferrymq", "version %d, this binary knows up to %d", have, known)
	case pending && !bool(c.AutoMigrate):
		k.fail("schema", "ferrymq migrate up", "version %d, needed is %d, and AUTO_MIGRATE is false: a broker would wait", have, known)
	case pending && (s.Made && !s.Owner || !s.Made && !s.MayCreate):
		k.fail("schema", fmt.Sprintf("grant create on database %s to %s, or let the owner run ferrymq migrate up", quoteName(s.Database), quoteName(s.Role)), "version %d, needed is %d, and the role may not apply migrations", have, known)
	case pending:
		k.ok("schema", "version %d; a broker would migrate to %d when it starts", have, known)
	default:
		k.ok("schema", "version %d, as this binary needs it", have)
	}
	return have
}

// storage is how tables that are written all the time must be kept. It is what the migrations say.
var storage = map[string][]string{
	"partitions":      {"fillfactor=70", "autovacuum_vacuum_scale_factor=0", "autovacuum_vacuum_threshold=1000", "autovacuum_vacuum_cost_delay=0", "vacuum_truncate=off"},
	"segments":        {"autovacuum_vacuum_cost_delay=0", "vacuum_truncate=off"},
	"cursors":         {"fillfactor=50", "autovacuum_vacuum_scale_factor=0", "autovacuum_vacuum_threshold=1000", "autovacuum_vacuum_cost_delay=0", "vacuum_truncate=off"},
	"retired_keys":    {"autovacuum_vacuum_cost_delay=0", "vacuum_truncate=off"},
	"activity":        {"fillfactor=70", "autovacuum_vacuum_scale_factor=0", "autovacuum_vacuum_threshold=1000", "autovacuum_vacuum_cost_delay=0"},
	"broker_activity": {"fillfactor=70"},
	"outbox":          {"autovacuum_vacuum_scale_factor=0", "autovacuum_vacuum_threshold=1000", "autovacuum_vacuum_cost_delay=0", "vacuum_truncate=off"},
	"flow":            {"fillfactor=70", "autovacuum_vacuum_scale_factor=0", "autovacuum_vacuum_threshold=1000", "autovacuum_vacuum_cost_delay=0"},
}

func (k *checker) permissions(ctx context.Context, q *db.Queries, s db.CheckServerRow, have int64) {
	grant := fmt.Sprintf("grant usage on schema ferrymq to %[1]s; grant select, insert, update, delete on all tables in schema ferrymq to %[1]s", quoteName(s.Role))
	if s.Made && !s.MayUse {
		k.fail("permissions", grant, "the role may not use the schema ferrymq")
		return
	}
	if have == 0 {
		return
	}
	tables, err := q.CheckTables(ctx)
	if err != nil {
		k.fail("permissions", grant, "%s", db.Text(err))
		return
	}
	var refused []string
	changed := 0
	for _, t := range tables {
		if !t.Allowed && t.Name != "schema_version" {
			refused = append(refused, t.Name)
		}
		var wrong []string
		for _, o := range storage[t.Name] {
			if !slices.Contains(t.Options, o) {
				wrong = append(wrong, o)
			}
		}
		if len(wrong) > 0 && have == schema.Known() {
			changed++
			k.warn("tables", fmt.Sprintf("alter table ferrymq.%s set (%s)", t.Name, strings.ReplaceAll(strings.Join(wrong, ", "), "=", " = ")), "%s has lost settings that keep it small", t.Name)
		}
	}
	if len(refused) > 0 {
		k.fail("permissions", grant, "the role may not read and write all of: %s", strings.Join(refused, ", "))
	} else {
		k.ok("permissions", "the role may read and write all tables")
	}
	if changed == 0 {
		k.ok("tables", "have the settings that keep them small")
	}
}

// direct looks where DATABASE_DIRECT_URL leads.
func (k *checker) direct(ctx context.Context, c *Config, q *db.Queries, have int64) {
	const fix = "give it the host, port and database of PostgreSQL itself"
	conn, err := pgx.ParseConfig(c.DatabaseDirectURL)
	if err != nil {
		k.fail("direct", fix, "DATABASE_DIRECT_URL: %v", redact(err))
		return
	}
	db.SessionSettings(conn)
	if have > 0 {
		if i, err := q.InstallationGet(ctx); err == nil {
			if err := sameInstallation(ctx, conn, i.HashSeed); err != nil {
				k.fail("direct", fix, "DATABASE_DIRECT_URL: %s", db.Text(err))
				return
			}
		}
	}
	x, err := pgx.ConnectConfig(ctx, conn)
	if err != nil {
		k.fail("direct", fix, "DATABASE_DIRECT_URL: %s", db.Text(err))
		return
	}
	defer x.Close(ctx)
	if pooled, err := db.Pooled(ctx, x); err == nil && pooled {
		k.warn("direct", fix, "DATABASE_DIRECT_URL leads through a connection pooler: that is right only if each client keeps a session of its own there")
		return
	}
	k.ok("direct", "DATABASE_DIRECT_URL leads to the same database")
}

func quoteName(s string) string { return pgx.Identifier{s}.Sanitize() }
