// FerryMQ is a message broker over PostgreSQL: one binary, HTTP in front, segments and cursors behind.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/console"
	"ferrymq/db"
	"ferrymq/groupcommit"
	"ferrymq/handlers"
	"ferrymq/localpg"
	"ferrymq/maintain"
	"ferrymq/metrics"
	"ferrymq/schema"
	"ferrymq/segment"
	"ferrymq/wake"
)

// drainNotice is how long /ready says "draining" before the listener closes, so that load balancers see it.
const drainNotice = time.Second

// drainTimeout is how long running requests may take to finish after that.
const drainTimeout = 7 * time.Second

// idleTimeout is longer than load balancers keep a connection that nobody uses (600 s at most): so it is they who close it, and
// never we just when they send the next request.
const idleTimeout = 620 * time.Second

// ballast is never touched and costs no memory. It makes the collector wait for at least as much garbage again:
// without it a broker with a small heap spends a tenth of its time collecting.
var ballast = make([]byte, 64<<20)

func main() {
	code := execute(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	runtime.KeepAlive(ballast)
	os.Exit(code)
}

// serve runs a broker until a signal.
func serve(ctx context.Context, _ *invocation) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	ctx, stop := context.WithCancel(ctx)
	go func() {
		<-signals
		stop()
		<-signals
		fmt.Fprintln(os.Stderr, "ferrymq: second signal, exiting at once")
		os.Exit(exitFailure)
	}()
	return run(ctx)
}

// run serves until ctx ends. Then, in this order: /ready says draining and parked pops are answered; after a moment the
// listener closes and running requests finish; the engine flushes what has boarded; background work, connections and
// the private PostgreSQL end. Nothing that was answered with success is lost, also when it is killed instead.
func run(ctx context.Context) error {
	config, err := loadConfig(environment())
	if err != nil {
		return err
	}
	log, quiet := newLogger(config)

	network := "tcp"
	if net.ParseIP(config.BindAddr).To4() != nil {
		network = "tcp4" // "tcp" takes 0.0.0.0 for all addresses, those of IPv6 too
	}
	listener, err := net.Listen(network, net.JoinHostPort(config.BindAddr, strconv.Itoa(config.Port)))
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("port %d on %s is in use: stop what uses it, or set PORT to another one", config.Port, config.BindAddr)
	}
	if err != nil {
		return fmt.Errorf("listen on %s port %d: %w", config.BindAddr, config.Port, err)
	}
	defer listener.Close()
	if config.auth != nil {
		config.auth.Start(log)
		defer config.auth.Close()
	} else if exposed(config) {
		log.Warn("no authentication: whoever reaches this address can read and write all queues", "address", listener.Addr().String())
	}
	if config.auth == nil && config.RootAPIKey+config.JWTSecret+config.JWTPublicKey+config.JWTJWKSURL != "" {
		log.Warn("a key for authentication is set, but it is off: JWT_ENABLED or AUTH_REQUIRED turn it on")
	}

	dsn, embedded := config.DatabaseURL, (*localpg.Server)(nil)
	var died <-chan struct{}
	if dsn == "" {
		if embedded, err = startPostgres(ctx, config, log); err != nil {
			return err
		}
		defer embedded.Stop()
		dsn, died = embedded.DSN, embedded.Done()
	}
	direct := cmp.Or(config.DatabaseDirectURL, dsn)
	if _, err := pgx.ParseConfig(direct); err != nil && direct != dsn {
		return fmt.Errorf("DATABASE_DIRECT_URL: %w", redact(err))
	}
	pool, flights, err := pools(context.WithoutCancel(ctx), config, dsn)
	if err != nil {
		return fmt.Errorf("DATABASE_URL: %w", redact(err))
	}
	defer pool.Close()
	defer flights.Close()

	counts := metrics.New(handlers.Version)
	counts.Pools, counts.Log, counts.Name = []*pgxpool.Pool{pool, flights}, log, brokerName()
	api := &handlers.API{Log: log, Pool: pool, MaxBody: config.MaxBodyBytes, Auth: config.auth, DefaultTimeout: milliseconds(config.DefaultTimeout),
		DefaultStart: config.start, HasKey: config.keys != nil, Metrics: counts}
	server := &http.Server{Handler: console.Handler(api.Handler()), ConnState: api.ConnState, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 5 * time.Minute, IdleTimeout: idleTimeout,
		MaxHeaderBytes: 128 << 10, DisableGeneralOptionsHandler: true, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	served := make(chan error, 1)
	go func() { served <- server.Serve(handlers.Plain{Listener: listener}) }()
	defer server.Close()

	log.Info("listening on http://"+listener.Addr().String(), "version", handlers.Version, "pid", os.Getpid())
	if err := prepare(ctx, config, log, pool, direct, api, died); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	b, err := start(ctx, config, log, pool, flights, direct, api)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	quiet.watch(ctx, func(ctx context.Context) error { return db.Probe(ctx, pool) })
	banner(ctx, config, log, pool)
	if embedded != nil && config.auth == nil {
		fmt.Fprintf(os.Stderr, "\nTry it:\n  curl -s -X POST http://%[1]s/api/v1/push -d '{\"items\":[{\"queue\":\"hello\",\"payload\":{\"n\":1}}]}'\n"+
			"  curl -s 'http://%[1]s/api/v1/pop/queue/hello?wait=true&autoAck=true'\n\n", listener.Addr())
	}

	var failure error
	select {
	case <-ctx.Done():
		log.Info("draining")
		api.Drain()
		b.engine.Drain()
		time.Sleep(drainNotice)
	case failure = <-served:
		failure = fmt.Errorf("serve: %w", failure)
	case <-died:
		failure = fmt.Errorf("the private PostgreSQL ended by itself: %w\n%s", embedded.Err(), embedded.Log())
	}
	finish, cancel := context.WithTimeout(context.Background(), drainTimeout)
	defer cancel()
	if err := server.Shutdown(finish); err != nil {
		log.Warn("requests were cut off", "error", err)
		server.Close()
	}
	b.close()
	log.Info("stopped")
	return failure
}

// banner says what is on, where, and how safe it is.
func banner(ctx context.Context, c *Config, log *slog.Logger, pool *pgxpool.Pool) {
	authentication, encryption := "off", "off"
	switch {
	case c.auth != nil && bool(c.JWTEnabled):
		authentication = "API keys and JWT"
	case c.auth != nil:
		authentication = "API keys"
	}
	if c.keys != nil {
		encryption = "on"
	}
	at := pool.Config().ConnConfig
	log.Info("ready", "schema", schema.Known(), "database", at.Database, "host", at.Host, "authentication", authentication, "encryption", encryption,
		"connections", c.DBPoolSize, "flushers", c.GroupCommitWidth)
	if s, err := db.New(db.Patient{Pool: pool}).CheckServer(ctx); err == nil {
		for _, x := range hazards(s) {
			log.Warn(x.name+" is off in this database: "+x.loss, "fix", "set "+x.name+" = on")
		}
	}
}

// exposed says whether others than this machine reach a broker without authentication.
func exposed(c *Config) bool {
	ip := net.ParseIP(c.BindAddr)
	return c.auth == nil && ip != nil && !ip.IsLoopback()
}

// pools divides DB_POOL_SIZE: each combined commit in flight has a connection of its own, everything else shares the others.
func pools(ctx context.Context, c *Config, dsn string) (pool, flights *pgxpool.Pool, err error) {
	statement := milliseconds(c.StatementTimeoutMS)
	if flights, err = db.NewFlights(ctx, dsn, int32(c.GroupCommitWidth), statement, groupcommit.LockTimeout); err != nil {
		return nil, nil, err
	}
	if pool, err = db.NewPool(ctx, dsn, int32(c.DBPoolSize-c.GroupCommitWidth), statement); err != nil {
		flights.Close()
	}
	return pool, flights, err
}

// startPostgres starts the private PostgreSQL. It is as durable as any: only its size is set for a small machine.
func startPostgres(ctx context.Context, c *Config, log *slog.Logger) (*localpg.Server, error) {
	began := time.Now()
	s, err := localpg.Start(ctx, localpg.Options{Dir: c.DataDir, Settings: map[string]string{
		"max_connections": strconv.Itoa(c.DBPoolSize + 20),
		"shared_buffers":  "256MB",
		"max_wal_size":    "4GB",
		"wal_buffers":     "16MB",
	}})
	if err != nil {
		return nil, err
	}
	attrs := []any{"version", s.Version, "data", s.Dir, "took", time.Since(began).Round(time.Millisecond)}
	if s.User != "" {
		attrs = append(attrs, "user", s.User)
	}
	log.Info("started a private PostgreSQL (set DATABASE_URL to use your own)", attrs...)
	if s.Relocated {
		log.Warn("user "+s.User+" cannot enter DATA_DIR, so the data is elsewhere", "wanted", c.DataDir, "data", s.Dir)
	}
	return s, nil
}

// prepare waits for a database that can be used and brings its schema to what this binary knows, or waits until someone has.
func prepare(ctx context.Context, c *Config, log *slog.Logger, pool *pgxpool.Pool, direct string, api *handlers.API, died <-chan struct{}) error {
	said := ""
	say := func(level slog.Level, reason, msg string, args ...any) {
		api.NotReady(reason)
		if text := fmt.Sprint(msg, args); text != said {
			said = text
			log.Log(ctx, level, msg, args...)
		}
	}
	for {
		err := db.Check(ctx, pool)
		if err == nil {
			var have int64
			if have, err = schema.Applied(ctx, pool); err == nil {
				known := schema.Known()
				switch {
				case have > known:
					return fmt.Errorf("the database has schema version %d, this binary knows up to %d: run a newer ferrymq", have, known)
				case have == known:
					return nil
				case bool(c.AutoMigrate):
					log.Info("migrating", "from", have, "to", known)
					if err = schema.Migrate(ctx, direct); err == nil {
						var after int64
						if after, err = schema.Applied(ctx, pool); err == nil && after == have {
							err = errElsewhere
						} else if err == nil {
							continue
						}
					}
				default:
					say(slog.LevelWarn, "migrations pending", "waiting until the migrations are applied (AUTO_MIGRATE is false)", "schema", have, "needed", known)
				}
			}
		}
		if err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if !db.IsConnection(err) || hopeless(err) {
				return fmt.Errorf("database: %w", redact(err))
			}
			say(slog.LevelWarn, "database unreachable", "waiting for the database", "error", db.Text(redact(err)))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-died:
			return errors.New("the private PostgreSQL ended by itself")
		case <-time.After(time.Second):
		}
	}
}

// errElsewhere means that what was done at one address is not seen at the other.
var errElsewhere = errors.New("DATABASE_DIRECT_URL and DATABASE_URL lead to different databases")

// hopeless errors don't go away by waiting: a wrong password, user or database name.
func hopeless(err error) bool {
	switch db.Code(err) {
	case "28P01", "28000", "3D000":
		return true
	}
	return false
}

// redact drops the connection string from errors of its parser: it may hold a password.
func redact(err error) error {
	var parse *pgconn.ParseConfigError
	if errors.As(err, &parse) {
		return errors.New("cannot be parsed: must be postgres://user:password@host:port/database or key=value pairs")
	}
	return err
}

// broker is what runs besides the HTTP server.
type broker struct {
	engine     *groupcommit.Engine
	bus        *wake.Bus
	maintainer *maintain.Maintainer
	metrics    *metrics.Metrics
}

// brokerName is what people know this process by.
func brokerName() string {
	host, _ := os.Hostname()
	return fmt.Sprintf("%s:%d", host, os.Getpid())
}

func start(ctx context.Context, c *Config, log *slog.Logger, pool, flights *pgxpool.Pool, direct string, api *handlers.API) (*broker, error) {
	q := db.New(db.Patient{Pool: pool})
	installation, err := q.InstallationGet(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the installation: %w", err)
	}
	project, err := q.ProjectGet(ctx, db.ProjectGetParams{Name: "default"})
	if err != nil {
		return nil, fmt.Errorf("read the default project: %w", err)
	}
	switches, err := q.SystemGet(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the maintenance switches: %w", err)
	}
	conn, err := pgx.ParseConfig(direct)
	if err != nil {
		return nil, redact(err)
	}
	db.SessionSettings(conn)
	if c.DatabaseDirectURL != "" {
		if err := sameInstallation(ctx, conn, installation.HashSeed); errors.Is(err, errElsewhere) {
			return nil, err
		} else if err != nil {
			log.Warn("DATABASE_DIRECT_URL cannot be used at the moment", "error", db.Text(err))
		}
	}
	b := &broker{metrics: api.Metrics}
	b.metrics.Project = project
	var bus *wake.Bus
	b.engine = groupcommit.New(groupcommit.Options{
		Pool: pool, Flights: flights, Log: log, Hasher: segment.NewHasher(uint64(installation.HashSeed)), Keys: c.keys, Project: project, DBNow: installation.Now,
		Width: c.GroupCommitWidth, DedupBytes: c.DedupCacheMB << 20, PushQueueMax: c.PushQueueMax, MaxParked: c.MaxParked,
		StatementTimeout: milliseconds(c.StatementTimeoutMS),
		Recheck: groupcommit.Recheck{Initial: milliseconds(c.PopWaitInitialIntervalMS), Threshold: c.PopWaitBackoffThreshold,
			Multiplier: c.PopWaitBackoffMultiplier, Max: milliseconds(c.PopWaitMaxIntervalMS)},
		Metrics:  api.Metrics,
		Announce: func(h []groupcommit.Hint) { bus.Announce(h) },
		Alone:    func() bool { return bus.Alone() },
	})
	bus = wake.Open(wake.Options{Conn: conn, Direct: c.DatabaseDirectURL != "", Log: log, OnHint: b.engine.Hint, OnQueue: b.engine.QueueChanged, OnMove: b.engine.LookOutbox, OnLost: b.engine.LookAll})
	b.bus = bus
	b.metrics.Parked = b.engine.ParkedPops
	b.metrics.Start()
	b.maintainer = &maintain.Maintainer{Pool: pool, Log: log, Engine: b.engine, Bus: bus, Name: b.metrics.Name,
		Switches:          func(s db.SystemGetRow) { api.SetMaintenance(b.engine, s) },
		RetentionInterval: milliseconds(c.RetentionInterval), RetentionBatch: int64(c.RetentionBatchSize), CleanupDays: int32(c.PartitionCleanupDays),
		OnRemoved: b.removed}
	api.Secret = installation.Secret
	api.SetMaintenance(b.engine, switches)
	b.maintainer.Start()
	api.Changed = func(id int32) {
		b.engine.Reconsider(id)
		bus.QueueChanged(id)
		b.maintainer.Kick()
	}
	api.Ready(b.engine)
	return b, nil
}

// sameInstallation is errElsewhere if the address leads to other tables than the ones with this seed.
func sameInstallation(ctx context.Context, conn *pgx.ConnConfig, seed int64) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	c, err := pgx.ConnectConfig(ctx, conn.Copy())
	if err != nil {
		return err
	}
	defer c.Close(ctx)
	switch i, err := db.New(c).InstallationGet(ctx); {
	case err != nil && db.IsConnection(err):
		return err
	case err != nil || i.HashSeed != seed:
		return errElsewhere
	}
	return nil
}

// removed counts what retention has removed.
func (b *broker) removed(r maintain.Removed) {
	b.metrics.Add(r.Project, r.Queue, metrics.RetentionMessages, r.Retention)
	b.metrics.Add(r.Project, r.Queue, metrics.CompletedRetentionMessages, r.CompletedRetention)
	b.metrics.Add(r.Project, r.Queue, metrics.EvictionMessages, r.Eviction)
	b.metrics.Add(r.Project, r.Queue, metrics.RetentionEvents, 1)
}

func (b *broker) close() {
	b.engine.Close()
	b.metrics.Close()
	b.maintainer.Close()
	b.bus.Close()
}
