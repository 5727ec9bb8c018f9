package main

import (
	"crypto/rand"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

func size(e *env) error {
	e.columns("bytes", "single pushes/s", "p99 ms", "messages/s in batches", "MB/s", "p99 ms", "drained/s in batches")
	for _, n := range e.of(10, 100, 1000, 10_000, 100_000, 1<<20) {
		if err := e.up(1); err != nil {
			return err
		}
		single, err := e.load(fmt.Sprintf("push -producers 64 -size %d -duration %s", n, e.duration))
		if err != nil {
			return err
		}
		// A batch is at most 4 MiB.
		batch := min(max(4<<20/n, 1), 100)
		many, err := e.load(fmt.Sprintf("push -producers 8 -batch %d -size %d -duration %s", batch, n, e.duration))
		if err != nil {
			return err
		}
		drained := math.NaN()
		if n >= 100 {
			got, err := e.load(fmt.Sprintf("drain -consumers 8 -batch %d -preload-batch %d -size %d -messages %d", batch, batch, n, min(max(500_000_000/n, 500), 200_000)))
			if err != nil {
				return err
			}
			drained = got["deliveries_per_s"]
		}
		e.row(n, single["push_msg_per_s"], single["push_p99_ms"], many["push_msg_per_s"], many["push_msg_per_s"]*float64(n)/1e6, many["push_p99_ms"], drained)
	}
	return e.draw("growth-size.svg", "Throughput against the size of a message", 0, "bytes of a payload", map[string]int{"single pushes/s": 1, "pushed/s in batches": 3, "drained/s in batches": 6})
}

func groups(e *env) error {
	e.columns("groups", "deliveries/s", "messages/s", "broker CPU s per million", "PostgreSQL CPU s per million")
	for _, n := range e.of(1, 2, 4, 8, 16) {
		if err := e.up(1); err != nil {
			return err
		}
		got, err := e.load(fmt.Sprintf("drain -groups %d -consumers %d -batch 100 -messages %d", n, max(8/n, 1), max(300_000/n, 50_000)))
		if err != nil {
			return err
		}
		e.row(n, got["deliveries_per_s"], got["deliveries_per_s"]/float64(n), got["cpu_broker_s_per_million"], got["cpu_pg_s_per_million"])
	}
	return nil
}

// usual is what topics that compare set-ups measure of each.
func usual(e *env) (values []any, err error) {
	for _, l := range []struct{ args, want string }{
		{"push -producers 64 -duration " + e.duration, "push_msg_per_s push_p99_ms"},
		{"push -producers 8 -batch 100 -duration " + e.duration, "push_msg_per_s push_p99_ms"},
		{"drain -consumers 32 -batch 1 -messages 15000", "deliveries_per_s"},
		{"drain -consumers 8 -batch 100 -messages 200000", "deliveries_per_s"},
	} {
		got, err := e.load(l.args)
		if err != nil {
			return nil, err
		}
		for _, w := range strings.Fields(l.want) {
			values = append(values, got[w])
		}
	}
	return values, nil
}

func usualColumns(e *env, of string) {
	e.columns(of, "push 64 x 1, msg/s", "p99 ms", "push 8 x 100, msg/s", "p99 ms", "drain 32 x 1, msg/s", "drain 8 x 100, msg/s")
}

func width(e *env) error {
	usualColumns(e, "GROUP_COMMIT_WIDTH")
	for _, n := range e.of(1, 2, 4, 8) {
		if err := e.up(1, fmt.Sprintf("GROUP_COMMIT_WIDTH=%d", n)); err != nil {
			return err
		}
		got, err := usual(e)
		if err != nil {
			return err
		}
		e.row(append([]any{n}, got...)...)
	}
	return nil
}

func brokers(e *env) error {
	usualColumns(e, "brokers")
	for _, n := range e.of(1, 2, 3) {
		if err := e.up(n); err != nil {
			return err
		}
		got, err := usual(e)
		if err != nil {
			return err
		}
		e.row(append([]any{n}, got...)...)
	}
	return nil
}

// spread makes partitions p<first> to p<last> of a queue that exists, each with a cursor of every group, nothing in them.
func (e *env) spread(queue string, first, last int) error {
	// Without the look at the queue that the foreign key takes for each row.
	if err := e.exec("set session_replication_role = replica"); err != nil {
		return err
	}
	for at := first; at <= last; at += 100_000 {
		err := e.exec(`with made as (
				insert into ferrymq.partitions (public_id, queue_id, name, empty_since)
				select gen_random_uuid(), q.id, 'p' || i, clock_timestamp() from ferrymq.queues q, generate_series($2::int, $3::int) i where q.name = $1
				returning id, queue_id
			)
			insert into ferrymq.cursors (group_id, partition_id, committed, pending)
			select g.id, m.id, 0, false from made m join ferrymq.groups g on g.queue_id = m.queue_id`, queue, at, min(at+99_999, last))
		if err != nil {
			return err
		}
	}
	return e.settle()
}

// settle leaves the work that follows a large change to nobody.
func (e *env) settle() error {
	for _, sql := range []string{"vacuum analyze ferrymq.partitions", "vacuum analyze ferrymq.cursors", "checkpoint"} {
		if err := e.exec(sql); err != nil {
			return err
		}
	}
	return nil
}

const used = 100

// crowd starts a broker whose queue "crowd" has n partitions; those that are used have been used before.
func (e *env) crowd(n int) error {
	if err := e.up(1); err != nil {
		return err
	}
	if _, err := e.load(fmt.Sprintf("cycle -queue crowd -partitions %d -producers 1 -consumers 1 -messages %d", min(n, used), min(n, used))); err != nil {
		return err
	}
	if n > used {
		return e.spread("crowd", used, n-1)
	}
	return nil
}

func partitionCount(e *env) error {
	e.columns("partitions", "push 8 x 100, msg/s", "p99 ms", "push 64 x 1, msg/s", "p99 ms", "live 300/s p50 ms", "p99 ms")
	for _, n := range e.of(1, 100, 10_000, 1_000_000) {
		if err := e.crowd(n); err != nil {
			return err
		}
		row := []any{n}
		// Pushes go to all of them, what is live to those that are used.
		live, err := e.load(fmt.Sprintf("live -queue crowd -partitions %d -rate 300 -duration %s", min(n, used), e.duration))
		if err != nil {
			return err
		}
		for _, args := range []string{"-producers 8 -batch 100 -spread 10", "-producers 64"} {
			got, err := e.load(fmt.Sprintf("push -queue crowd -check=false -partitions %d %s -duration %s", n, args, e.duration))
			if err != nil {
				return err
			}
			row = append(row, got["push_msg_per_s"], got["push_p99_ms"])
		}
		e.row(append(row, live["e2e_p50_ms"], live["e2e_p99_ms"])...)
	}
	return nil
}

// million compares the same traffic beside 1,000 partitions and beside 1,000,000.
func million(e *env) error {
	e.columns("partitions", "start to ready ms", "a new group: first pop ms", "all its cursors s", "live 300/s push p99 ms", "pop p99 ms", "end to end p50 ms", "p99 ms",
		"idle broker % of a core", "idle PostgreSQL %", "RSS MB")
	for _, n := range e.of(1000, 1_000_000) {
		if err := e.crowd(n); err != nil {
			return err
		}
		e.stopBrokers()
		began := time.Now()
		if err := e.start(1); err != nil {
			return err
		}
		ready := time.Since(began)
		live, err := e.load(fmt.Sprintf("live -queue crowd -partitions %d -rate 300 -duration 8s", used))
		if err != nil {
			return err
		}
		began = time.Now()
		if _, err := e.load(fmt.Sprintf("cycle -queue crowd -group late -partitions %d -producers 1 -consumers 1 -messages 1 -check=false", used)); err != nil {
			return err
		}
		met := time.Since(began)
		for {
			left, err := e.number("select count(*) from ferrymq.groups where not seeded")
			if err != nil {
				return err
			}
			if left == 0 || e.ctx.Err() != nil {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		seeded := time.Since(began)
		idle, err := e.load("idle -queue other -pollers 1 -duration 10s")
		if err != nil {
			return err
		}
		e.row(n, int(ready.Milliseconds()), int(met.Milliseconds()), seeded.Seconds(), live["push_p99_ms"], live["pop_p99_ms"], live["e2e_p50_ms"], live["e2e_p99_ms"],
			idle["cpu_broker_pct_of_core"], idle["cpu_pg_pct_of_core"], idle["broker_rss_max_mb"])
	}
	return nil
}

// backlog fills a queue by copying segments inside the database: 256 partitions, 1,000 messages of 128 bytes a segment.
func backlog(e *env) error {
	e.columns("messages waiting", "GB", "push 8 x 100, msg/s", "p99 ms", "drain 8 x 100 of it, msg/s", "another queue: live 300/s p50 ms", "p99 ms")
	for _, n := range e.of(0, 1_000_000, 10_000_000, 50_000_000) {
		if err := e.up(1); err != nil {
			return err
		}
		const partitions, each = 256, 1000
		if n > 0 {
			if _, err := e.load(fmt.Sprintf("push -queue full -partitions %d -producers 8 -batch %d -messages %d -size 128 -no-txid", partitions, each, partitions*each)); err != nil {
				return err
			}
			e.stopBrokers()
			for copies := (n - 1) / (partitions * each); copies > 0; copies -= 20 {
				// A look at the tail says where the next ones go: every partition is as long as the others.
				err := e.exec(`with more as (select $1::int as n), s as (
						insert into ferrymq.segments (partition_id, base_offset, count, key_no, codec, created_at, first_id, keys, frames)
						select p.id, p.next_offset + i * $2::int, s.count, s.key_no, s.codec, p.last_push_at, s.first_id, s.keys, s.frames
						from ferrymq.partitions p join ferrymq.segments s on s.partition_id = p.id and s.base_offset = 0, generate_series(0, $1::int - 1) i
					)
					update ferrymq.partitions set next_offset = next_offset + $1::int * $2::int`, min(copies, 20), each)
				if err != nil {
					return err
				}
			}
			if err := e.settle(); err != nil {
				return err
			}
			if err := e.start(1); err != nil {
				return err
			}
		}
		bytes, err := e.number("select pg_total_relation_size('ferrymq.segments')")
		if err != nil {
			return err
		}
		live, err := e.load("live -queue other -rate 300 -duration " + e.duration)
		if err != nil {
			return err
		}
		push, err := e.load(fmt.Sprintf("push -queue full -partitions %d -producers 8 -batch 100 -size 128 -no-txid -duration %s", partitions, e.duration))
		if err != nil {
			return err
		}
		drained := math.NaN()
		if n > 0 {
			got, err := e.load(fmt.Sprintf("drain -queue full -preloaded -check=false -consumers 8 -batch 100 -size 128 -no-txid -partitions %d -messages 200000", partitions))
			if err != nil {
				return err
			}
			drained = got["deliveries_per_s"]
		}
		e.row(n, bytes/1e9, push["push_msg_per_s"], push["push_p99_ms"], drained, live["e2e_p50_ms"], live["e2e_p99_ms"])
	}
	return e.draw("growth-backlog.svg", "Throughput against the backlog", 0, "messages that wait", map[string]int{"pushed/s": 2, "drained/s": 4})
}

// dedupWindow fills an hour's window with random keys, as many as 15,000 pushes a second leave, and measures pushes beside it.
func dedupWindow(e *env) error {
	e.columns("ids in the window", "brokers", "partitions", "push 64 x 1, msg/s", "push 8 x 100, msg/s", "blocks of segments read a push", "RSS MB")
	for _, n := range e.of(0, 54_000_000) {
		for _, set := range []struct{ brokers, partitions int }{{1, 256}, {1, 1}, {2, 1}} {
			if err := e.up(set.brokers); err != nil {
				return err
			}
			if err := e.window(n, set.partitions); err != nil {
				return err
			}
			push := "push -queue window -check=false -partitions " + fmt.Sprint(set.partitions)
			// The first push of a partition reads its window, once.
			if _, err := e.load(fmt.Sprintf("%s -producers 8 -batch 1 -messages %d", push, 4*set.partitions)); err != nil {
				return err
			}
			if err := e.exec("select pg_stat_reset()"); err != nil {
				return err
			}
			single, err := e.load(push + " -producers 64 -duration " + e.duration)
			if err != nil {
				return err
			}
			many, err := e.load(push + " -producers 8 -batch 100 -pg-settle 11s -duration " + e.duration)
			if err != nil {
				return err
			}
			blocks, err := e.number(`select coalesce(sum(toast_blks_hit + toast_blks_read), 0)::float8 from pg_statio_all_tables where schemaname = 'ferrymq' and relname = 'segments'`)
			if err != nil {
				return err
			}
			pushes := single["messages"] + many["messages"]/100
			e.row(n, set.brokers, set.partitions, single["push_msg_per_s"], many["push_msg_per_s"], blocks/pushes, many["broker_rss_max_mb"])
		}
	}
	return nil
}

// window stores segments whose keys are n random ids of the last hour, in p0 … of queue "window".
func (e *env) window(n, partitions int) error {
	if _, err := e.load(fmt.Sprintf("push -queue window -partitions %d -producers 1 -no-txid -messages %d", partitions, partitions)); err != nil || n == 0 {
		return err
	}
	brokers := len(e.brokers)
	e.stopBrokers()
	rows, err := e.conn.Query(e.ctx, "select id from ferrymq.partitions order by id")
	if err != nil {
		return err
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return err
	}
	const each = 1000
	segments, now := n/each/partitions, time.Now()
	// What was pushed is older than the window's ids.
	if err := e.exec("update ferrymq.segments set created_at = now() - interval '1 hour'"); err != nil {
		return err
	}
	at := 0
	source := pgx.CopyFromFunc(func() ([]any, error) {
		if at == segments*len(ids) {
			return nil, nil
		}
		p, s := at/segments, at%segments
		at++
		keys := make([]byte, 16*each)
		if _, err := rand.Read(keys); err != nil {
			return nil, err
		}
		// The frames are read by nobody here.
		return []any{ids[p], int64(1 + s*each), int32(each), int16(0), int16(0), now.Add(-time.Hour * time.Duration(segments-s) / time.Duration(segments)).Add(2 * time.Minute),
			uuid.Must(uuid.NewV7()), keys, []byte{0}}, nil
	})
	columns := []string{"partition_id", "base_offset", "count", "key_no", "codec", "created_at", "first_id", "keys", "frames"}
	if _, err := e.conn.CopyFrom(e.ctx, pgx.Identifier{"ferrymq", "segments"}, columns, source); err != nil {
		return err
	}
	if err := e.exec("update ferrymq.partitions set next_offset = 1 + $1, last_push_at = now()", segments*each); err != nil {
		return err
	}
	if err := e.settle(); err != nil {
		return err
	}
	return e.start(brokers)
}

func parked(e *env) error {
	e.columns("waiting", "queues", "broker RSS MB", "idle broker % of a core", "idle PostgreSQL %", "wrong answers", "PostgreSQL connections", "wake p50 ms", "p99 ms", "CPU ms a wake")
	for _, set := range []struct{ pollers, queues int }{{100, 1}, {10_000, 1}, {10_000, 10_000}, {18_000, 1}} {
		if err := e.up(1, "MAX_PARKED=50000"); err != nil {
			return err
		}
		idle, err := e.load(fmt.Sprintf("idle -pollers %d -queues %d -duration 10s", set.pollers, set.queues))
		if err != nil {
			return err
		}
		park := "-park queue"
		if set.queues > 1 {
			park = "-distinct-queues"
		}
		wake, err := e.load(fmt.Sprintf("wake -consumers %d %s -messages 300 -duration 20s", set.pollers, park))
		if err != nil {
			return err
		}
		cpu := wake["cpu_broker_and_pg_s_per_million"] / 1e3
		e.row(set.pollers, set.queues, idle["broker_rss_max_mb"], idle["cpu_broker_pct_of_core"], idle["cpu_pg_pct_of_core"], idle["answered_wrongly"],
			idle["pg_connections"], wake["wake_p50_ms"], wake["wake_p99_ms"], cpu)
	}
	return nil
}

// backoff puts lanes of another subscription to wait for a retry.
func backoff(e *env) error {
	e.columns("lanes in backoff", "lanes 8 x 100, msg/s", "broker CPU s per million", "PostgreSQL CPU s per million", "idle broker % of a core", "idle PostgreSQL %")
	for _, n := range e.of(0, 100_000) {
		if err := e.up(1); err != nil {
			return err
		}
		if _, err := e.load("lanes -queue waiting -partitions 10 -messages 10"); err != nil {
			return err
		}
		if n > 0 {
			if err := e.spread("waiting", 10, 9+n); err != nil {
				return err
			}
			if err := e.exec("update ferrymq.cursors set pending = true, failures = 1, not_before = now() + interval '1 hour' where committed = 0"); err != nil {
				return err
			}
			if err := e.settle(); err != nil {
				return err
			}
		}
		got, err := e.load("lanes -messages 40000")
		if err != nil {
			return err
		}
		idle, err := e.load("idle -queue other -pollers 1 -duration 10s")
		if err != nil {
			return err
		}
		e.row(n, got["deliveries_per_s"], got["cpu_broker_s_per_million"], got["cpu_pg_s_per_million"], idle["cpu_broker_pct_of_core"], idle["cpu_pg_pct_of_core"])
	}
	return nil
}
