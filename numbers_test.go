package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/dbtest"
)

// tally is what is counted of a queue or of all.
type tally struct{ Total, Pending, Processing, DeadLetter int64 }

// shadow counts messages one by one from the rows: a second opinion on the numbers of the API.
type shadow struct {
	queue, partition  string
	first, next, dead int64
	cursors           map[string][2]int64 // by group: committed, and the end of a live lease or 0
}

func shadows(t *testing.T, pool *pgxpool.Pool) []*shadow {
	t.Helper()
	of := map[int64]*shadow{}
	var all []*shadow
	var id int64
	var s shadow
	rows, _ := pool.Query(t.Context(), `select p.id, q.name, p.name, p.first_offset, p.next_offset, (select count(*) from ferrymq.dead_letters d where d.partition_id = p.id)
		from ferrymq.partitions p join ferrymq.queues q on q.id = p.queue_id where q.deleted_at is null`)
	if _, err := pgx.ForEachRow(rows, []any{&id, &s.queue, &s.partition, &s.first, &s.next, &s.dead}, func() error {
		one := s
		one.cursors = map[string][2]int64{}
		of[id] = &one
		all = append(all, &one)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	var group string
	var committed, end int64
	rows, _ = pool.Query(t.Context(), `select c.partition_id, g.name, c.committed, case when c.lease_until > now() then c.batch_end else 0 end
		from ferrymq.cursors c join ferrymq.groups g on g.id = c.group_id where g.deleted_at is null`)
	if _, err := pgx.ForEachRow(rows, []any{&id, &group, &committed, &end}, func() error {
		if of[id] != nil {
			of[id].cursors[group] = [2]int64{committed, end}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

func (s *shadow) tally(only string) (n tally) {
	head := int64(-1)
	for group, c := range s.cursors {
		if (group == only || only == "" && group != "__QUEUE_MODE__") && (head < 0 || c[0] < head) {
			head = c[0]
		}
	}
	if c, ok := s.cursors["__QUEUE_MODE__"]; head < 0 && only == "" && ok {
		head = c[0]
	}
	n.Total, n.DeadLetter = s.next-s.first, s.dead
	for offset := max(head, s.first); offset < s.next; offset++ {
		n.Pending++
		for group, c := range s.cursors {
			if (only == "" || only == group) && c[0] <= offset && offset < c[1] {
				n.Processing++
				break
			}
		}
	}
	return n
}

// TestNumbersOfAnyHistory lets two brokers do whatever they can do to queues, in random order, and compares their numbers with a
// count of the rows. In the end what is pending is what can be received.
func TestNumbersOfAnyHistory(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	rnd := rand.New(rand.NewPCG(seed, 1))
	defer func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	}()
	dsn := dbtest.New(t)
	pool := dbtest.Pool(t, dsn, 2)
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	brokers := []*process{spawn(t, "DATABASE_URL="+dsn, "DB_POOL_SIZE=6"), spawn(t, "DATABASE_URL="+dsn, "DB_POOL_SIZE=6")}
	base := []string{brokers[0].ready(t), brokers[1].ready(t)}
	call := func(n int, status int, method, path, body string) string {
		t.Helper()
		return brokers[n].must(t, status, method, base[n]+"/api/v1"+path, body)
	}
	read := func(n int, path string, v any) {
		t.Helper()
		if err := json.Unmarshal([]byte(call(n, 200, "GET", path, "")), v); err != nil {
			t.Fatal(err)
		}
	}
	queues := []string{"a.x", "a.y", "b"}
	pick := func(of ...string) string { return of[rnd.IntN(len(of))] }
	queue := func() string { return queues[rnd.IntN(len(queues))] }

	check := func() {
		t.Helper()
		n := rnd.IntN(2)
		call(n, 200, "POST", "/stats/refresh", "")
		all := shadows(t, pool)
		sums := func(only string) (of map[string]tally, sum tally) {
			of = map[string]tally{}
			for _, s := range all {
				x, y := of[s.queue], s.tally(only)
				for _, z := range []*tally{&x, &sum} {
					*z = tally{z.Total + y.Total, z.Pending + y.Pending, z.Processing + y.Processing, z.DeadLetter + y.DeadLetter}
				}
				of[s.queue] = x
			}
			return of, sum
		}
		want, sum := sums("")
		var list struct {
			Queues []struct {
				Name     string
				Messages tally
			}
		}
		read(1-n, "/status/queues", &list)
		for _, q := range list.Queues {
			if q.Messages != want[q.Name] {
				t.Errorf("status of queue %s: %+v, want %+v", q.Name, q.Messages, want[q.Name])
			}
			for _, group := range []string{"", "g", "h", "__QUEUE_MODE__"} {
				var depth struct{ Pending, Processing, Ready, PartitionsPending int64 }
				read(n, "/resources/queues/"+q.Name+"/depth?group="+group, &depth)
				of, _ := sums(group)
				if w := of[q.Name]; depth.Pending != w.Pending || depth.Processing != w.Processing || depth.Ready != w.Pending-w.Processing {
					t.Errorf("depth of %s for %q: %+v, want %+v", q.Name, group, depth, w)
				}
			}
		}
		var overview struct {
			Messages tally
			Lag      struct{ Offset struct{ Max int64 } }
		}
		read(n, "/resources/overview", &overview)
		if overview.Messages != sum {
			t.Errorf("overview: %+v, want %+v", overview.Messages, sum)
		}
		var partitions struct {
			Partitions []struct {
				Queue, Name string
				Messages    tally
			}
		}
		read(1-n, "/resources/partitions", &partitions)
		if len(partitions.Partitions) != len(all) {
			t.Errorf("%d partitions listed, %d exist", len(partitions.Partitions), len(all))
		}
		most := int64(0)
		for _, s := range all {
			w := s.tally("")
			most = max(most, w.Pending)
			for _, p := range partitions.Partitions {
				if w.DeadLetter = 0; p.Queue == s.queue && p.Name == s.partition && p.Messages != w {
					t.Errorf("partition %s of %s: %+v, want %+v", p.Name, p.Queue, p.Messages, w)
				}
			}
		}
		if overview.Lag.Offset.Max != most {
			t.Errorf("the largest lag is %d, want %d", overview.Lag.Offset.Max, most)
		}
		if t.Failed() {
			t.FailNow()
		}
	}

	for step := range 400 {
		n := rnd.IntN(2)
		switch rnd.IntN(12) {
		case 0, 1, 2:
			var items []string
			for range 1 + rnd.IntN(8) {
				items = append(items, fmt.Sprintf(`{"queue":%q,"partition":%q,"payload":%d}`, queue(), pick("p1", "p2", "p3"), step))
			}
			call(n, 201, "POST", "/push", `{"items":[`+strings.Join(items, ",")+`]}`)
		case 3, 4, 5, 6: // lease, and acknowledge some of it somehow
			group := pick("", "g", "h")
			path := base[n] + "/api/v1/pop/queue/" + queue() + pick("", "", "/partition/p1", "/partition/p2") + fmt.Sprintf("?batch=%d&partitions=3&autoAck=%v", 1+rnd.IntN(10), rnd.IntN(5) == 0)
			if group != "" {
				path += "&consumerGroup=" + group
			}
			status, text, err := brokers[n].call("GET", path, "")
			if err != nil || status != 200 && status != 204 {
				t.Fatalf("%s: %d %s (%v)", path, status, text, err)
			}
			var got popped
			if status == 204 || json.Unmarshal(text, &got) != nil || got.Messages[0].LeaseID == "" || rnd.IntN(4) == 0 {
				continue
			}
			var items []string
			for _, m := range got.Messages[:1+rnd.IntN(len(got.Messages))] {
				items = append(items, fmt.Sprintf(`{"transactionId":%q,"partitionId":%q,"leaseId":%q,"status":%q}`, m.TransactionID, m.PartitionID, m.LeaseID,
					pick("completed", "completed", "completed", "completed", "failed", "retry", "dlq")))
			}
			consumer := ""
			if group != "" {
				consumer = fmt.Sprintf(`"consumerGroup":%q,`, group)
			}
			call(rnd.IntN(2), 200, "POST", "/ack/batch", `{`+consumer+`"acknowledgments":[`+strings.Join(items, ",")+`]}`)
		case 7: // leases end
			exec("update ferrymq.cursors set lease_until = now() - interval '1 second' where lease_id is not null and group_id % 2 = $1", step%2)
		case 8: // retention made a hole: whole segments
			exec(`update ferrymq.partitions p set first_offset = s.base_offset
				from (select partition_id, min(base_offset) filter (where base_offset > first_offset) as base_offset
					from ferrymq.segments s join ferrymq.partitions x on x.id = s.partition_id group by partition_id) s
				where s.partition_id = p.id and s.base_offset is not null and p.id % 3 = $1`, step%3)
		case 9:
			call(n, 200, "POST", "/configure", fmt.Sprintf(`{"queue":%q,"options":{"delayedProcessing":%s,"retryDelay":%s,"retryLimit":1}}`, queue(), pick("0", "0", "3600"), pick("0", "60000")))
		case 10:
			if rnd.IntN(4) == 0 {
				call(n, 200, "DELETE", "/resources/queues/"+queue(), "")
			}
		case 11:
			check()
		}
	}
	check()

	// Now all leases and delays end: what the API says is pending can be received, and then nothing is.
	for _, q := range queues {
		call(0, 200, "POST", "/configure", fmt.Sprintf(`{"queue":%q,"mode":"replace","options":{}}`, q))
		call(1, 201, "POST", "/push", fmt.Sprintf(`{"items":[{"queue":%q,"payload":0}]}`, q))
		for _, group := range []string{"g", "h"} {
			brokers[0].call("GET", base[0]+"/api/v1/pop/queue/"+q+"?batch=1&consumerGroup="+group, "") // it may never have met the whole queue
		}
	}
	exec("update ferrymq.cursors set lease_until = now() - interval '1 second' where lease_id is not null")
	exec("update ferrymq.cursors set not_before = null, pending = true")
	for _, q := range queues {
		for _, group := range []string{"g", "h"} {
			var depth struct{ Pending, Ready int64 }
			read(1, "/resources/queues/"+q+"/depth?group="+group, &depth)
			received := int64(0)
			for {
				var got popped
				status, text, err := brokers[0].call("GET", base[0]+"/api/v1/pop/queue/"+q+"?batch=10000&partitions=100&autoAck=true&consumerGroup="+group, "")
				if err != nil || status != 200 {
					if status != 204 {
						t.Fatalf("%d %s (%v)", status, text, err)
					}
					break
				}
				if err := json.Unmarshal(text, &got); err != nil {
					t.Fatal(err)
				}
				received += int64(len(got.Messages))
			}
			if depth.Ready != depth.Pending || depth.Pending != received {
				t.Errorf("group %s of %s: %+v, and %d messages came", group, q, depth, received)
			}
			read(1, "/resources/queues/"+url.PathEscape(q)+"/depth?group="+group, &depth)
			if depth.Pending != 0 || depth.Ready != 0 {
				t.Errorf("group %s of %s has received everything: %+v", group, q, depth)
			}
		}
	}
	check()
}
