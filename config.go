package main

import (
	"cmp"
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

	"ferrymq/auth"
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
// The fields' comments are the README's table of settings; a test holds the two together.
type Config struct {
	// TCP port to listen on; 0 takes a free one.
	Port int `env:"PORT" envDefault:"6632" range:"0..65535"`
	// Address to listen on. Empty: 127.0.0.1, with authentication 0.0.0.0.
	BindAddr string `env:"BIND_ADDR"`
	// PostgreSQL 15 or newer, as a URL or as key=value pairs. Empty: what `PGHOST` and its companions say, else a private PostgreSQL under `DATA_DIR`.
	DatabaseURL string `env:"DATABASE_URL"`
	// The same database without a connection pooler in between, for what needs a session of its own: hearing of other brokers, and migrations. Empty: `DATABASE_URL`.
	DatabaseDirectURL string `env:"DATABASE_DIRECT_URL"`
	// Directory of the private PostgreSQL.
	DataDir string `env:"DATA_DIR" envDefault:"./data"`
	// Database connections that serve requests; two more listen and notify.
	DBPoolSize int `env:"DB_POOL_SIZE" envDefault:"16" range:"4..1000"`
	// A statement that takes longer is cancelled, in ms.
	StatementTimeoutMS int `env:"STATEMENT_TIMEOUT_MS" envDefault:"30000" range:"100..3600000"`
	// Apply missing migrations at start; false waits, not ready, until somebody has.
	AutoMigrate Bool `env:"AUTO_MIGRATE" envDefault:"true"`
	// Largest request body, in bytes; a larger one is answered 413.
	MaxBodyBytes int64 `env:"MAX_BODY_BYTES" envDefault:"67108864" range:"1024..1073741824"`
	// How long a waiting pop that names no `timeout` waits, in ms. Alias: `POP_DEFAULT_TIMEOUT_MS`.
	DefaultTimeout int `env:"DEFAULT_TIMEOUT" envDefault:"30000" range:"0..300000"`
	// How often a parked pop is re-checked at first, in ms; a push wakes it at once anyway.
	PopWaitInitialIntervalMS int `env:"POP_WAIT_INITIAL_INTERVAL_MS" envDefault:"100" range:"1..60000"`
	// Empty re-checks before the interval grows.
	PopWaitBackoffThreshold int `env:"POP_WAIT_BACKOFF_THRESHOLD" envDefault:"3" range:"0..1000000"`
	// Factor by which it then grows.
	PopWaitBackoffMultiplier float64 `env:"POP_WAIT_BACKOFF_MULTIPLIER" envDefault:"2.0" range:"1..100"`
	// Longest interval, in ms.
	PopWaitMaxIntervalMS int `env:"POP_WAIT_MAX_INTERVAL_MS" envDefault:"1000" range:"1..60000"`
	// Where a new consumer group that does not say starts: `all` or `new`.
	DefaultSubscriptionMode string `env:"DEFAULT_SUBSCRIPTION_MODE" envDefault:"all"`
	// Key for queues with `encryptionEnabled`: 64 hexadecimal characters. Alias: `QUEEN_ENCRYPTION_KEY`.
	EncryptionKey string `env:"ENCRYPTION_KEY"`
	// Former keys, comma-separated: what was stored with them stays readable.
	EncryptionKeysOld []string `env:"ENCRYPTION_KEYS_OLD"`
	// Accept JSON Web Tokens; needs a key. It turns authentication on, whatever `AUTH_REQUIRED` says.
	JWTEnabled Bool `env:"JWT_ENABLED" envDefault:"false"`
	// Which algorithm tokens are signed with: `HS256`, `HS384`, `HS512`, `RS256` (accepts RS384 and RS512 too), `RS384`, `RS512`, `EdDSA`, `ES256`, or `auto` for all that there is a key for.
	JWTAlgorithm string `env:"JWT_ALGORITHM" envDefault:"HS256"`
	// Key for `HS256`, `HS384` and `HS512`, as it stands.
	JWTSecret string `env:"JWT_SECRET"`
	// Key for the other algorithms, as PEM; line breaks may be written as `\n`.
	JWTPublicKey string `env:"JWT_PUBLIC_KEY"`
	// Where those keys are fetched as a JWK set, when there is no `JWT_PUBLIC_KEY`: http or https.
	JWTJWKSURL string `env:"JWT_JWKS_URL"`
	// How often they are fetched, in s. An unknown key id fetches them too, at most every 5 s.
	JWTJWKSRefreshInterval int `env:"JWT_JWKS_REFRESH_INTERVAL" envDefault:"3600" range:"1..604800"`
	// How long that may take, in ms.
	JWTJWKSTimeoutMS int `env:"JWT_JWKS_TIMEOUT_MS" envDefault:"5000" range:"1..60000"`
	// By how much the clocks of broker and issuer may differ, in s.
	JWTClockSkew int `env:"JWT_CLOCK_SKEW" envDefault:"30" range:"0..86400"`
	// What a token must have as its `iss`. Empty: anything.
	JWTIssuer string `env:"JWT_ISSUER"`
	// What a token must have as its `aud`, or in it. Empty: anything.
	JWTAudience string `env:"JWT_AUDIENCE"`
	// The claim that names one role.
	JWTRolesClaim string `env:"JWT_ROLES_CLAIM" envDefault:"role"`
	// The claim that lists roles.
	JWTRolesArrayClaim string `env:"JWT_ROLES_ARRAY_CLAIM" envDefault:"roles"`
	// The name of the role that may do everything.
	JWTRoleAdmin string `env:"JWT_ROLE_ADMIN" envDefault:"admin"`
	// The name of the role that pushes, consumes, configures and reads.
	JWTRoleReadWrite string `env:"JWT_ROLE_READ_WRITE" envDefault:"read-write"`
	// The name of the role that lists and browses.
	JWTRoleReadOnly string `env:"JWT_ROLE_READ_ONLY" envDefault:"read-only"`
	// The name of the role that only pushes.
	JWTRoleWriteOnly string `env:"JWT_ROLE_WRITE_ONLY" envDefault:"write-only"`
	// Paths that need no token, comma-separated; one that ends in `/` stands for all below it. A value replaces the list.
	JWTSkipPaths []string `env:"JWT_SKIP_PATHS" envDefault:"/health,/ready,/metrics,/metrics/prometheus"`
	// Turn authentication on: `ROOT_API_KEY`, and tokens with `JWT_ENABLED`.
	AuthRequired Bool `env:"AUTH_REQUIRED" envDefault:"false"`
	// A token that may do everything.
	RootAPIKey string `env:"ROOT_API_KEY"`
	// `debug`, `info`, `warn` or `error`.
	LogLevel slog.Level `env:"LOG_LEVEL" envDefault:"info"`
	// `text` or `json`.
	LogFormat string `env:"LOG_FORMAT" envDefault:"text"`
	// Memory for the deduplication window, in MiB; less is slower, never wrong.
	DedupCacheMB int64 `env:"DEDUP_CACHE_MB" envDefault:"256" range:"0..1048576"`
	// Combined commits in flight at once.
	GroupCommitWidth int `env:"GROUP_COMMIT_WIDTH" envDefault:"2" range:"1..64"`
	// Pops that may wait at once; one more is answered 503.
	MaxParked int `env:"MAX_PARKED" envDefault:"20000" range:"0..10000000"`
	// Messages that may wait to be written; a push beyond is answered 503.
	PushQueueMax int64 `env:"PUSH_QUEUE_MAX" envDefault:"65536" range:"1..1000000000"`

	// Period of the retention sweep, in ms. One broker does it for all.
	RetentionInterval int `env:"RETENTION_INTERVAL" envDefault:"5000" range:"100..86400000"`
	// Segments that one statement of it removes.
	RetentionBatchSize int `env:"RETENTION_BATCH_SIZE" envDefault:"1000" range:"1..1000000"`
	// Days after which an empty partition that nothing is pushed to goes; 0 = never.
	PartitionCleanupDays int `env:"PARTITION_CLEANUP_DAYS" envDefault:"30" range:"0..36500"`

	start catalog.Start
	keys  *segment.Keys
	auth  *auth.Verifier // nil: off
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
	if err := c.setAuth(); err != nil {
		return nil, err
	}
	if net.ParseIP(c.BindAddr) == nil && c.BindAddr != "localhost" {
		return nil, fmt.Errorf("BIND_ADDR: must be an IP address, got %q", c.BindAddr)
	}
	switch {
	case c.EncryptionKey != "":
		if _, err := segment.NewKeys(c.EncryptionKey); err != nil {
			return nil, fmt.Errorf("%s: %w", cmp.Or(from["ENCRYPTION_KEY"], "ENCRYPTION_KEY"), err)
		}
		keys, err := segment.NewKeys(c.EncryptionKey, c.EncryptionKeysOld...)
		if err != nil {
			return nil, fmt.Errorf("ENCRYPTION_KEYS_OLD: %w", err)
		}
		c.keys = keys
	case len(c.EncryptionKeysOld) > 0:
		return nil, errors.New("ENCRYPTION_KEYS_OLD: needs ENCRYPTION_KEY too")
	}
	if c.GroupCommitWidth > c.DBPoolSize-2 {
		return nil, fmt.Errorf("GROUP_COMMIT_WIDTH: must be at least 2 less than DB_POOL_SIZE, which is %d", c.DBPoolSize)
	}
	if c.DatabaseURL == "" && vars["PGHOST"] != "" {
		dsn, err := libpqDSN(vars, from)
		if err != nil {
			return nil, err
		}
		c.DatabaseURL = dsn
	}
	if c.DatabaseDirectURL != "" && c.DatabaseURL == "" {
		return nil, errors.New("DATABASE_DIRECT_URL: needs DATABASE_URL too")
	}
	return &c, nil
}

// setAuth turns authentication on when it is asked for. Its settings are checked in any case.
func (c *Config) setAuth() error {
	v, err := auth.New(auth.Options{
		RootKey: c.RootAPIKey, JWT: bool(c.JWTEnabled), Algorithm: c.JWTAlgorithm, Secret: c.JWTSecret, PublicKey: c.JWTPublicKey, JWKSURL: c.JWTJWKSURL,
		RefreshInterval: time.Duration(c.JWTJWKSRefreshInterval) * time.Second, Timeout: milliseconds(c.JWTJWKSTimeoutMS),
		ClockSkew: time.Duration(c.JWTClockSkew) * time.Second, Issuer: c.JWTIssuer, Audience: c.JWTAudience,
		RolesClaim: c.JWTRolesClaim, RolesArrayClaim: c.JWTRolesArrayClaim,
		RoleAdmin: c.JWTRoleAdmin, RoleReadWrite: c.JWTRoleReadWrite, RoleReadOnly: c.JWTRoleReadOnly, RoleWriteOnly: c.JWTRoleWriteOnly,
		OpenPaths: c.JWTSkipPaths,
	})
	if err != nil {
		return err
	}
	if c.AuthRequired && !c.JWTEnabled && c.RootAPIKey == "" {
		return errors.New("AUTH_REQUIRED: needs JWT_ENABLED=true or a ROOT_API_KEY")
	}
	address := "127.0.0.1"
	if c.AuthRequired || c.JWTEnabled {
		c.auth, address = v, "0.0.0.0"
	}
	c.BindAddr = cmp.Or(c.BindAddr, address)
	return nil
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

// libpqDSN is the connection that the PG* variables describe, aliases included. Its error names the variable.
func libpqDSN(vars, from map[string]string) (string, error) {
	name := func(v string) string { return cmp.Or(from[v], v) }
	var use, verify Bool = false, true
	for v, b := range map[string]*Bool{"PG_USE_SSL": &use, "PG_SSL_REJECT_UNAUTHORIZED": &verify} {
		if vars[v] != "" {
			if err := b.UnmarshalText([]byte(vars[v])); err != nil {
				return "", fmt.Errorf("%s: %w", v, err)
			}
		}
	}
	ssl := vars["PGSSLMODE"]
	switch ssl {
	case "disable", "allow", "prefer", "require", "verify-ca", "verify-full":
	case "":
		if use && verify {
			ssl = "verify-full"
		} else if use {
			ssl = "require"
		}
	default:
		return "", fmt.Errorf("PGSSLMODE: must be disable, allow, prefer, require, verify-ca or verify-full, got %q", ssl)
	}
	if v := vars["PGPORT"]; v != "" {
		if n, err := strconv.ParseUint(v, 10, 16); err != nil || n == 0 {
			return "", fmt.Errorf("%s: must be 1..65535, got %q", name("PGPORT"), v)
		}
	}
	if v := vars["PGSSLROOTCERT"]; v != "" && v != "system" {
		if _, err := os.Stat(v); err != nil {
			return "", fmt.Errorf("%s: %w", name("PGSSLROOTCERT"), err)
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
	return strings.TrimSpace(b.String()), nil
}

func milliseconds(n int) time.Duration { return time.Duration(n) * time.Millisecond }
