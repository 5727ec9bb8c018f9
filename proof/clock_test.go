package proof

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// skewed is a PostgreSQL whose host's clock is what a test wants.
type skewed struct {
	*postgres
	file string
}

// newSkewed starts a server under libfaketime, in that time zone and with its clock ahead by so much.
func newSkewed(t *testing.T, zone string, ahead time.Duration) *skewed {
	t.Helper()
	found, _ := filepath.Glob("/usr/lib/*/faketime/libfaketime.so.1")
	if len(found) == 0 {
		t.Skip("libfaketime is not installed")
	}
	dir, err := os.MkdirTemp("", "ferrymq-clock-") // the user that runs PostgreSQL reads it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s := &skewed{file: filepath.Join(dir, "ahead")}
	s.step(t, ahead)
	s.postgres = newPostgres(t, "", map[string]string{"timezone": zone, "log_timezone": zone}, "LD_PRELOAD="+found[0], "FAKETIME_TIMESTAMP_FILE="+s.file,
		"FAKETIME_NO_CACHE=1", "DONT_FAKE_MONOTONIC=1", "TZ="+zone)
	return s
}

// step sets the clock ahead of the true one by so much, at once and for all processes of the server.
func (s *skewed) step(t *testing.T, ahead time.Duration) {
	t.Helper()
	next := s.file + ".next"
	if err := os.WriteFile(next, fmt.Appendf(nil, "%+f\n", ahead.Seconds()), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(next, s.file); err != nil { // it is read all the time
		t.Fatal(err)
	}
}

// now is what the server takes the time for.
func (s *skewed) now(t *testing.T) (now time.Time) {
	t.Helper()
	if err := s.pool().QueryRow(t.Context(), "select clock_timestamp()").Scan(&now); err != nil {
		t.Fatal(err)
	}
	return now
}

// taking is the answer of a pop.
type taking struct {
	LeaseID  string `json:"leaseId"`
	Messages []struct {
		TransactionID string          `json:"transactionId"`
		PartitionID   string          `json:"partitionId"`
		Data          json.RawMessage `json:"data"`
		CreatedAt     time.Time       `json:"createdAt"`
	} `json:"messages"`
}

// one pops one message of a partition for group g, waiting for it up to so long, and fails if it is another one. The time is how long it took.
func one(t *testing.T, url, queue, partition, want string, wait time.Duration) (taking, time.Duration) {
	t.Helper()
	a := call(http.DefaultClient, "GET", fmt.Sprintf("%s/api/v1/pop/queue/%s/partition/%s?consumerGroup=g&batch=1&wait=true&timeout=%d", url, queue, partition, wait.Milliseconds()), "")
	var got taking
	if a.status != 200 {
		t.Fatalf("%s/%s: %v, want %s", queue, partition, a, want)
	}
	decode(t, a.body, &got)
	if len(got.Messages) != 1 || string(got.Messages[0].Data) != want {
		t.Fatalf("%s/%s: %s, want %s", queue, partition, a.body, want)
	}
	return got, a.took
}

func push(t *testing.T, url, queue, partition, payload string) {
	t.Helper()
	must(t, 201, "POST", url+"/api/v1/push", fmt.Sprintf(`{"items":[{"queue":%q,"partition":%q,"payload":%s}]}`, queue, partition, payload))
}

// settled acknowledges what was popped, and says whether that was taken.
func settled(t *testing.T, url string, b taking) bool {
	t.Helper()
	a := call(http.DefaultClient, "POST", url+"/api/v1/ack", fmt.Sprintf(`{"transactionId":%q,"partitionId":%q,"leaseId":%q,"consumerGroup":"g","status":"completed"}`,
		b.Messages[0].TransactionID, b.Messages[0].PartitionID, b.LeaseID))
	var result []struct{ Success bool }
	if a.err != nil || a.status >= 500 {
		t.Fatalf("ack: %v", a)
	}
	decode(t, a.body, &result)
	return len(result) == 1 && result[0].Success
}

// The clock of the database's host jumps eight hours ahead and back again. Ahead, leases end and what was put off is due: the lease
// tells the old holder. Back, what was leased meanwhile still is its holder's to settle, and if nobody does it is a seek that frees it.
// Everything else goes on in order, at once, both times.
func TestDatabaseClockSteps(t *testing.T) {
	t.Parallel()
	s := newSkewed(t, "UTC", 0)
	c := newCluster(t, s.postgres, 2)
	a, b := c.urls()[0], c.urls()[1]
	must(t, 200, "POST", a+"/api/v1/configure", `{"queue":"q","options":{"leaseTime":300}}`)
	must(t, 200, "POST", a+"/api/v1/configure", `{"queue":"later","options":{"delayedProcessing":3600}}`)
	push(t, a, "q", "held", "1")
	push(t, a, "q", "held", "2")
	push(t, a, "later", "p", "1")
	must(t, 204, "GET", a+"/api/v1/pop/queue/later/partition/p?consumerGroup=g", "")
	old, _ := one(t, a, "q", "held", "1", patience)
	must(t, 204, "GET", b+"/api/v1/pop/queue/q/partition/held?consumerGroup=g", "")

	const jump = 8 * time.Hour
	s.step(t, jump)
	if ahead := time.Until(s.now(t)); ahead < jump-time.Minute {
		t.Fatalf("the server's clock is %v ahead", ahead)
	}
	taken, took := one(t, b, "q", "held", "1", patience)
	if took > recovery {
		t.Errorf("the lease ended after %v", took)
	}
	if settled(t, a, old) {
		t.Error("the old holder acknowledged what another has")
	}
	if !settled(t, b, taken) {
		t.Error("the holder could not acknowledge")
	}
	due, took := one(t, a, "later", "p", "1", patience)
	if took > recovery || !settled(t, a, due) {
		t.Errorf("what was put off came after %v", took)
	}
	kept, _ := one(t, a, "q", "held", "2", patience) // and is not settled before the clock is back
	push(t, a, "q", "lost", "1")
	lost, _ := one(t, b, "q", "lost", "1", patience) // its holder dies
	push(t, a, "q", "open", "1")

	s.step(t, 0)
	for n, url := range []string{a, b} {
		push(t, url, "q", "open", fmt.Sprint(n+2))
		push(t, url, "q", fmt.Sprint("new", n), "1")
	}
	for n := 1; n <= 3; n++ {
		got, took := one(t, b, "q", "open", fmt.Sprint(n), patience)
		if took > recovery || !settled(t, a, got) {
			t.Errorf("message %d of a partition after %v", n, took)
		}
	}
	for n := range 2 {
		got, took := one(t, a, "q", fmt.Sprint("new", n), "1", patience)
		if took > recovery || !settled(t, b, got) {
			t.Errorf("a new partition after %v", took)
		}
	}
	if !settled(t, b, kept) {
		t.Error("what was leased while the clock was ahead could not be acknowledged")
	}
	push(t, a, "q", "held", "3")
	if got, _ := one(t, b, "q", "held", "3", patience); !settled(t, b, got) {
		t.Error("the next one could not be acknowledged")
	}
	must(t, 204, "GET", b+"/api/v1/pop/queue/q/partition/lost?consumerGroup=g", "")
	must(t, 200, "POST", a+"/api/v1/consumer-groups/g/queues/q/partitions/lost/seek", fmt.Sprintf(`{"timestamp":%q}`, lost.Messages[0].CreatedAt.Add(-time.Second).Format(time.RFC3339Nano)))
	got, took := one(t, b, "q", "lost", "1", patience)
	if took > recovery || settled(t, a, lost) || !settled(t, b, got) {
		t.Errorf("after a seek, %v", took)
	}
}

// Brokers and database are in a time zone whose clocks go back, and then forward, by an hour while messages are leased and put off:
// what takes three seconds takes three seconds, and the times that clients see go on.
func TestSummerTime(t *testing.T) {
	t.Parallel()
	const zone = "Europe/Berlin"
	if _, err := time.LoadLocation(zone); err != nil {
		t.Skip("no time zones are installed")
	}
	for name, change := range map[string]time.Time{"ends": time.Date(2026, 10, 25, 1, 0, 0, 0, time.UTC), "begins": time.Date(2027, 3, 28, 1, 0, 0, 0, time.UTC)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSkewed(t, zone, time.Until(change.Add(-time.Minute)))
			c := newCluster(t, s.postgres, 2, "TZ="+zone)
			a, b := c.urls()[0], c.urls()[1]
			const hold = 3
			must(t, 200, "POST", a+"/api/v1/configure", fmt.Sprintf(`{"queue":"leased","options":{"leaseTime":%d}}`, hold))
			must(t, 200, "POST", a+"/api/v1/configure", fmt.Sprintf(`{"queue":"later","options":{"delayedProcessing":%d}}`, hold))
			must(t, 200, "PUT", a+"/v1/subscriptions/s", fmt.Sprintf(`{"stream":"s","lease_seconds":%d}`, hold))
			s.step(t, time.Until(change.Add(-time.Second))) // the change is within what follows
			push(t, a, "leased", "p", "1")
			push(t, a, "later", "p", "1")
			must(t, 200, "POST", a+"/v1/streams/s/messages", `{"messages":[{"key":"k","payload":1}]}`)
			began := time.Now()
			first, _ := one(t, a, "leased", "p", "1", patience)
			var lane received
			decode(t, must(t, 200, "POST", a+"/v1/subscriptions/s/receive", `{"wait_seconds":5}`), &lane)
			if len(lane.Messages) != 1 || lane.Messages[0].Attempt != 1 {
				t.Fatalf("%+v", lane)
			}
			check := func(what string) {
				t.Helper()
				if took := time.Since(began); took < (hold-1)*time.Second || took > hold*time.Second+recovery {
					t.Errorf("%s: after %v, want %d s", what, took, hold)
				}
			}
			done := make(chan time.Duration, 2)
			go func() { // both wait while the hour changes
				call(http.DefaultClient, "GET", b+"/api/v1/pop/queue/later/partition/p?consumerGroup=g&wait=true&timeout=30000&autoAck=true", "")
				done <- time.Since(began)
			}()
			go func() {
				call(http.DefaultClient, "POST", b+"/v1/subscriptions/s/receive", `{"wait_seconds":20}`)
				done <- time.Since(began)
			}()
			again, _ := one(t, b, "leased", "p", "1", patience)
			check("a lease")
			for range 2 {
				if took := <-done; took < (hold-1)*time.Second || took > hold*time.Second+recovery {
					t.Errorf("a delay or a lane's lease: after %v, want %d s", took, hold)
				}
			}
			if now := s.now(t); now.Before(change) {
				t.Fatalf("the hour has not changed: %v", now)
			}
			if !again.Messages[0].CreatedAt.Equal(first.Messages[0].CreatedAt) || first.Messages[0].CreatedAt.Before(change.Add(-time.Minute)) || first.Messages[0].CreatedAt.After(change.Add(time.Minute)) {
				t.Errorf("created %v, then %v", first.Messages[0].CreatedAt, again.Messages[0].CreatedAt)
			}
			push(t, b, "leased", "p", "2")
			if !settled(t, b, again) {
				t.Error("not acknowledged")
			}
			next, _ := one(t, a, "leased", "p", "2", patience)
			if next.Messages[0].CreatedAt.Before(change) || next.Messages[0].CreatedAt.After(change.Add(time.Minute)) {
				t.Errorf("after the change: created %v", next.Messages[0].CreatedAt)
			}
		})
	}
}
