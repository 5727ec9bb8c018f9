package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/localpg"
)

type pgmqQueue struct {
	pg    *localpg.Server
	pool  *pgxpool.Pool
	queue int
}

func startPGMQ(ctx context.Context, c *config, dir string) (server, string, error) {
	text, err := os.ReadFile(c.pgmq)
	if err != nil {
		return nil, "", err
	}
	pg, pool, err := postgres(ctx, dir)
	if err != nil {
		return nil, "", err
	}
	q := &pgmqQueue{pg: pg, pool: pool}
	if _, err := pool.Exec(ctx, string(text)); err != nil {
		q.stop()
		return nil, "", err
	}
	return q, fmt.Sprintf("on PostgreSQL %d", pg.Version), nil
}

func (q *pgmqQueue) stop() {
	q.pool.Close()
	q.pg.Stop()
}

func (q *pgmqQueue) order() order { return none }

func (q *pgmqQueue) name() string { return "rivals_" + strconv.Itoa(q.queue) }

func (q *pgmqQueue) fresh(ctx context.Context) error {
	q.queue++
	_, err := q.pool.Exec(ctx, "select pgmq.create($1)", q.name())
	return err
}

func (q *pgmqQueue) producer(context.Context) (producer, error) { return q, nil }

func (q *pgmqQueue) close() {}

func (q *pgmqQueue) push(ctx context.Context, _ int, payloads [][]byte) error {
	if len(payloads) == 1 {
		_, err := q.pool.Exec(ctx, "select pgmq.send($1::text, $2::jsonb)", q.name(), payloads[0])
		return err
	}
	texts := make([]string, len(payloads))
	for i, p := range payloads {
		texts[i] = string(p)
	}
	_, err := q.pool.Exec(ctx, "select pgmq.send_batch($1::text, $2::text[]::jsonb[])", q.name(), texts)
	return err
}

func (q *pgmqQueue) consume(ctx context.Context, consumers, batch int, k *checker) error {
	var wg sync.WaitGroup
	errs := make(chan error, consumers)
	for n := range consumers {
		wg.Go(func() {
			if err := q.consumer(ctx, n, batch, k); err != nil && ctx.Err() == nil {
				errs <- err
			}
		})
	}
	wg.Wait()
	select {
	case err := <-errs:
		return err
	default:
		return nil
	}
}

// consumer looks every 10 ms while there is nothing: pgmq wakes nobody.
func (q *pgmqQueue) consumer(ctx context.Context, n, batch int, k *checker) error {
	for ctx.Err() == nil {
		rows, err := q.pool.Query(ctx, "select msg_id, message::text from pgmq.read($1, 60, $2)", q.name(), batch)
		if err != nil {
			return err
		}
		var ids []int64
		var payloads [][]byte
		for rows.Next() {
			var id int64
			var text string
			if err := rows.Scan(&id, &text); err != nil {
				return err
			}
			ids, payloads = append(ids, id), append(payloads, []byte(text))
		}
		if err := rows.Err(); err != nil {
			return err
		}
		if ids == nil {
			select {
			case <-ctx.Done():
			case <-time.After(10 * time.Millisecond):
			}
			continue
		}
		ms := k.delivered(n, payloads...)
		if _, err := q.pool.Exec(ctx, "select pgmq.delete($1::text, $2::bigint[])", q.name(), ids); err != nil {
			return err
		}
		k.acked(ms)
	}
	return nil
}
