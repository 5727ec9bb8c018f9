package main

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/caarlos0/env/v11"

	"ferrymq/catalog"
	"ferrymq/handlers"
	"ferrymq/segment"
)

// Bool is a boolean setting: true/false, 1/0, yes/no or on/off, in any case.
type Bool bool

// UnmarshalText reads a Bool.
func (b *Bool) UnmarshalText(text []byte) error {
	switch strings.ToLower(string(text)) {
	case "true", "1", "yes", "on":
		*b = true
	case "false", "0", "no", "off":
		*b = false
	default:
		return errors.New("must be true or false")
	}
	return nil
}

// Config is the settings of a broker, all from the environment. An empty variable is an absent one.
type Config struct {
	// Port to listen on; 0 takes a free one.
	Port int `env:"PORT" envDefault:"6632" range:"0..65535"`
	// BindAddr is the address to listen on.
	BindAddr string `env:"BIND_ADDR" envDefault:"127.0.0.1"`
	// DatabaseURL of PostgreSQL 15 or newer; empty: `PGHOST` if set, else a private PostgreSQL under `DATA_DIR`.
	DatabaseURL string `env:"DATABASE_URL"`
	// DataDir of the private PostgreSQL.
	DataDir string `env:"DATA_DIR" envDefault:"./data"`
	// DBPoolSize is the number of database connections; two more listen and notify.
	DBPoolSize int `env:"DB_POOL_SIZE" envDefault:"16" range:"4..1000"`
	// StatementTimeoutMS cancels a longer statement, in ms.
	StatementTimeoutMS int `env:"STATEMENT_TIMEOUT_MS" envDefault:"30000" range:"100..3600000"`
	// AutoMigrate applies migrations at start; false waits until they are applied.
	AutoMigrate Bool `env:"AUTO_MIGRATE" envDefault:"true"`
	// MaxBodyBytes of a request.
	MaxBodyBytes int64 `env:"MAX_BODY_BYTES" envDefault:"67108864" range:"1024..1073741824"`
	// DefaultTimeout of a waiting pop, in ms; the alias `POP_DEFAULT_TIMEOUT_MS` counts when it is absent.
	DefaultTimeout int `env:"DEFAULT_TIMEOUT" envDefault:"30000" range:"0..300000"`
	// PopWaitInitialIntervalMS is how often a parked pop is re-checked, in ms.
	PopWaitInitialIntervalMS int `env:"POP_WAIT_INITIAL_INTERVAL_MS" envDefault:"100" range:"1..60000"`
	// PopWaitBackoffThreshold is how many empty re-checks come before the interval grows.
	PopWaitBackoffThreshold int `env:"POP_WAIT_BACKOFF_THRESHOLD" envDefault:"3" range:"0..1000000"`
	// PopWaitBackoffMultiplier of the interval from then on.
	PopWaitBackoffMultiplier float64 `env:"POP_WAIT_BACKOFF_MULTIPLIER" envDefault:"2.0" range:"1..100"`
	// PopWaitMaxIntervalMS is the longest interval, in ms.
	PopWaitMaxIntervalMS int `env:"POP_WAIT_MAX_INTERVAL_MS" envDefault:"1000" range:"1..60000"`
	// DefaultSubscriptionMode of a group that names none: `all` or `new`.
	DefaultSubscriptionMode string `env:"DEFAULT_SUBSCRIPTION_MODE" envDefault:"all"`
	// EncryptionKey for queues with encryptionEnabled, 64 hex characters; the alias `QUEEN_ENCRYPTION_KEY` counts when it is absent.
	EncryptionKey string `env:"ENCRYPTION_KEY"`
	// EncryptionKeysOld are former keys, comma-separated: data stored with them stays readable.
	EncryptionKeysOld []string `env:"ENCRYPTION_KEYS_OLD"`
	// LogLevel is debug, info, warn or error.
	LogLevel slog.Level `env:"LOG_LEVEL" envDefault:"info"`
	// LogFormat is text or json.
	LogFormat string `env:"LOG_FORMAT" envDefault:"text"`
	// DedupCacheMB is the memory of the deduplication window; smaller is slower, never wrong.
	DedupCacheMB int64 `env:"DEDUP_CACHE_MB" envDefault:"256" range:"0..1048576"`
	// GroupCommitWidth is the number of combined commits in flight.
	GroupCommitWidth int `env:"GROUP_COMMIT_WIDTH" envDefault:"2" range:"1..64"`
	// MaxParked pops; beyond them a pop that would wait is 503.
	MaxParked int `env:"MAX_PARKED" envDefault:"20000" range:"0..10000000"`
	// PushQueueMax is how many messages may wait to be written; beyond them a push is 503.
	PushQueueMax int64 `env:"PUSH_QUEUE_MAX" envDefault:"65536" range:"1..1000000000"`

	// RetentionInterval of the retention sweep, in ms; checked, without effect until retention is built.
	RetentionInterval int `env:"RETENTION_INTERVAL" envDefault:"5000" range:"100..86400000"`
	// RetentionBatchSize of a retention step, in segments; checked, without effect until retention is built.
	RetentionBatchSize int `env:"RETENTION_BATCH_SIZE" envDefault:"1000" range:"1..1000000"`
	// PartitionCleanupDays after which an idle, empty partition is removed, 0 = never; checked, without effect until retention is built.
	PartitionCleanupDays int `env:"PARTITION_CLEANUP_DAYS" envDefault:"30" range:"0..36500"`

	start catalog.Start
	keys  *segment.Keys
}

// aliases are other names of a setting, in order of precedence after its own.
var aliases = map[string][]string{
	"DEFAULT_TIMEOUT": {"POP_DEFAULT_TIMEOUT_MS"},
	"ENCRYPTION_KEY":  {"QUEEN_ENCRYPTION_KEY"},
	"PGHOST":          {"PG_HOST"},
	"PGPORT":          {"PG_PORT"},
	"PGUSER":          {"PG_USER"},
	"PGPASSWORD":      {"PG_PASSWORD"},
	"PGDATABASE":      {"PG_DATABASE", "PG_DB"},
	"PGSSLROOTCERT":   {"PG_SSL_ROOT_CERT"},
}

// environment is os.Environ as a map, empty variables left out.
func environment() map[string]string {
	m := make(map[string]string)
	for _, kv := range os.Environ() {
		if k, v, _ := strings.Cut(kv, "="); v != "" {
			m[k] = v
		}
	}
	return m
}

// withAliases fills in what only an alias sets. It returns which name each setting really came from.
func withAliases(vars map[string]string) (all, from map[string]string) {
	all, from = maps.Clone(vars), make(map[string]string)
	for name, others := range aliases {
		for _, o := range others {
			if _, ok := all[name]; !ok && all[o] != "" {
				all[name], from[name] = all[o], o
			}
		}
	}
	return all, from
}

// loadConfig reads and checks the settings; its error names the variable.
func loadConfig(vars map[string]string) (*Config, error) {
	var c Config
	vars, from := withAliases(vars)
	if err := env.ParseWithOptions(&c, env.Options{Environment: vars}); err != nil {
		return nil, settingError(err, from)
	}
	if err := c.checkRanges(from); err != nil {
		return nil, err
	}
	var ok bool
	if c.start, ok = handlers.ParseStart(c.DefaultSubscriptionMode); !ok {
		return nil, fmt.Errorf("DEFAULT_SUBSCRIPTION_MODE: must be all or new, got %q", c.DefaultSubscriptionMode)
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		return nil, fmt.Errorf("LOG_FORMAT: must be text or json, got %q", c.LogFormat)
	}
	if net.ParseIP(c.BindAddr) == nil && c.BindAddr != "localhost" {
		return nil, fmt.Errorf("BIND_ADDR: must be an IP address, got %q", c.BindAddr)
	}
	switch {
	case c.EncryptionKey != "":
		keys, err := segment.NewKeys(c.EncryptionKey, c.EncryptionKeysOld...)
		if err != nil {
			return nil, fmt.Errorf("ENCRYPTION_KEY or ENCRYPTION_KEYS_OLD: %w", err)
		}
		c.keys = keys
	case len(c.EncryptionKeysOld) > 0:
		return nil, errors.New("ENCRYPTION_KEYS_OLD: needs ENCRYPTION_KEY too")
	}
	// An operator who asks for authentication must not get an open broker.
	for _, name := range []string{"JWT_ENABLED", "AUTH_REQUIRED"} {
		var on Bool
		if v := vars[name]; v != "" {
			if err := on.UnmarshalText([]byte(v)); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
		}
		if on {
			return nil, fmt.Errorf("%s: this version has no authentication; leave it off and keep the broker on a private address", name)
		}
	}
	if c.DatabaseURL == "" && vars["PGHOST"] != "" {
		c.DatabaseURL = libpqDSN(vars)
	}
	return &c, nil
}

// settingError keeps the first of the library's errors, with the variable it is about.
func settingError(err error, from map[string]string) error {
	var all env.AggregateError
	if errors.As(err, &all) && len(all.Errors) > 0 {
		err = all.Errors[0]
	}
	var parse env.ParseError
	if errors.As(err, &parse) {
		t := reflect.TypeFor[Config]()
		if f, ok := t.FieldByName(parse.Name); ok {
			return fmt.Errorf("%s: %w", variable(f, from), parse.Err)
		}
	}
	return err
}

// variable is the name that a field's value was set by.
func variable(f reflect.StructField, from map[string]string) string {
	name := f.Tag.Get("env")
	if alias, ok := from[name]; ok {
		return alias
	}
	return name
}

// checkRanges holds every number against its range tag.
func (c *Config) checkRanges(from map[string]string) error {
	v := reflect.ValueOf(c).Elem()
	for i := range v.NumField() {
		f := v.Type().Field(i)
		lo, hi, ok := strings.Cut(f.Tag.Get("range"), "..")
		if !ok {
			continue
		}
		var x float64
		if v.Field(i).CanInt() {
			x = float64(v.Field(i).Int())
		} else {
			x = v.Field(i).Float()
		}
		low, _ := strconv.ParseFloat(lo, 64)
		high, _ := strconv.ParseFloat(hi, 64)
		if !(x >= low && x <= high) {
			return fmt.Errorf("%s: must be %s..%s", variable(f, from), lo, hi)
		}
	}
	return nil
}

// libpqDSN is the connection that the PG* variables describe, aliases included.
func libpqDSN(vars map[string]string) string {
	ssl := vars["PGSSLMODE"]
	var use, verify Bool = false, true
	_ = use.UnmarshalText([]byte(vars["PG_USE_SSL"]))
	_ = verify.UnmarshalText([]byte(vars["PG_SSL_REJECT_UNAUTHORIZED"]))
	if ssl == "" && bool(use) {
		if ssl = "verify-full"; !bool(verify) {
			ssl = "require"
		}
	}
	var b strings.Builder
	for _, p := range [][2]string{{"host", vars["PGHOST"]}, {"port", vars["PGPORT"]}, {"user", vars["PGUSER"]}, {"password", vars["PGPASSWORD"]},
		{"dbname", vars["PGDATABASE"]}, {"sslmode", ssl}, {"sslrootcert", vars["PGSSLROOTCERT"]}} {
		if p[1] != "" {
			v := strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(p[1])
			fmt.Fprintf(&b, "%s='%s' ", p[0], v)
		}
	}
	return strings.TrimSpace(b.String())
}

func milliseconds(n int) time.Duration { return time.Duration(n) * time.Millisecond }
