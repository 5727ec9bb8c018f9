package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"ferrymq/localpg"
)

// job is a message as River keeps one.
type job struct {
	P json.RawMessage `json:"p"`
}

func (job) Kind() string { return "rival" }

type riverQueue struct {
	pg    *localpg.Server
	pool  *pgxpool.Pool
	add   *river.Client[pgx.Tx]
	queue int
}

// postgres starts a PostgreSQL with the settings that FerryMQ's has.
func postgres(ctx context.Context, dir string) (*localpg.Server, *pgxpool.Pool, error) {
	pg, err := localpg.Start(ctx, localpg.Options{Dir: dir, Settings: settings})
	if err != nil {
		return nil, nil, err
	}
	cfg, err := pgxpool.ParseConfig(pg.DSN)
	if err == nil {
		cfg.MaxConns = 32
		var pool *pgxpool.Pool
		if pool, err = pgxpool.NewWithConfig(ctx, cfg); err == nil {
			return pg, pool, nil
		}
	}
	pg.Stop()
	return nil, nil, err
}

func startRiver(ctx context.Context, _ *config, dir string) (server, string, error) {
	pg, pool, err := postgres(ctx, dir)
	if err != nil {
		return nil, "", err
	}
	r := &riverQueue{pg: pg, pool: pool}
	driver := riverpgxv5.New(pool)
	m, err := rivermigrate.New(driver, nil)
	if err == nil {
		_, err = m.Migrate(ctx, rivermigrate.DirectionUp, nil)
	}
	if err == nil {
		r.add, err = river.NewClient(driver, &river.Config{Logger: quiet, FetchCooldown: river.FetchCooldownMin}) // as often it notifies
	}
	if err != nil {
		r.stop()
		return nil, "", err
	}
	return r, version("github.com/riverqueue/river") + fmt.Sprintf(" on PostgreSQL %d", pg.Version), nil
}

var quiet = slog.New(slog.DiscardHandler)

func (r *riverQueue) stop() {
	r.pool.Close()
	r.pg.Stop()
}

func (r *riverQueue) order() order { return none }

func (r *riverQueue) fresh(context.Context) error {
	r.queue++
	return nil
}

func (r *riverQueue) name() string { return "rivals_" + strconv.Itoa(r.queue) }

func (r *riverQueue) producer(context.Context) (producer, error) { return r, nil }

func (r *riverQueue) close() {}

func (r *riverQueue) push(ctx context.Context, _ int, payloads [][]byte) error {
	if len(payloads) == 1 {
		_, err := r.add.Insert(ctx, job{payloads[0]}, &river.InsertOpts{Queue: r.name()})
		return err
	}
	params := make([]river.InsertManyParams, len(payloads))
	for i, p := range payloads {
		params[i] = river.InsertManyParams{Args: job{p}, InsertOpts: &river.InsertOpts{Queue: r.name()}}
	}
	_, err := r.add.InsertManyFast(ctx, params)
	return err
}

type worker struct {
	river.WorkerDefaults[job]
	k *checker
}

func (w *worker) Work(_ context.Context, j *river.Job[job]) error {
	w.k.delivered(0, compact(j.Args.P))
	return nil
}

// consume has one client with as many workers as the others have messages with their consumers. An ack is a job that is completed in the
// database, which River says in its events.
func (r *riverQueue) consume(ctx context.Context, consumers, batch int, k *checker) error {
	workers := river.NewWorkers()
	river.AddWorker(workers, &worker{k: k})
	client, err := river.NewClient(riverpgxv5.New(r.pool), &river.Config{
		Queues: map[string]river.QueueConfig{r.name(): {MaxWorkers: consumers * batch}}, Workers: workers, Logger: quiet,
		FetchCooldown: river.FetchCooldownMin,
	})
	if err != nil {
		return err
	}
	events, cancel := client.SubscribeConfig(&river.SubscribeConfig{ChanSize: 1 << 20, Kinds: []river.EventKind{river.EventKindJobCompleted}})
	defer cancel()
	if err := client.Start(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	var scratch []byte
	for {
		select {
		case e := <-events:
			var a job
			if err := json.Unmarshal(e.Job.EncodedArgs, &a); err != nil {
				return err
			}
			var m message
			var ok bool
			if m, scratch, ok = read(compact(a.P), k.size, scratch); ok {
				k.acked([]message{m})
			}
		case <-ctx.Done():
			stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			defer cancel()
			return client.Stop(stopping)
		}
	}
}
