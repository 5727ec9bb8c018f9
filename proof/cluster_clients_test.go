package proof

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"sync/atomic"
	"testing"
	"time"

	"ferrymq/dbtest"
)

// front puts a proxy before a broker and returns it with the address that leads through it.
func front(t testing.TB, b *broker) (*proxy, string) {
	t.Helper()
	p := newProxy(t, dialer("tcp", b.url()[len("http://"):]))
	return p, "http://" + p.address()
}

// A client that sent a request whose answer was lost on the way sends it again: with an id of its own the message is stored
// once, in both APIs, and the second answer names the first message.
func TestRetryAfterLostAnswer(t *testing.T) {
	t.Parallel()
	c, dsn := newShared(t, 1)
	network, through := front(t, c.brokers[0])
	client := newClient(t)
	direct := c.brokers[0].url()
	must(t, 200, "PUT", direct+"/v1/subscriptions/s", `{"stream":"s"}`)
	pool := dbtest.Pool(t, dsn, 1)
	stored := func() (n int) {
		t.Helper()
		if err := pool.QueryRow(t.Context(), "select coalesce(sum(next_offset), 0)::int from ferrymq.partitions").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for i, call1 := range []struct{ path, body, first, again string }{
		{"/api/v1/push", `{"items":[{"queue":"q","transactionId":"mine","payload":1}]}`, "", `"status":"duplicate"`},
		{"/v1/streams/s/messages", `{"messages":[{"key":"k","id":"mine","payload":1}]}`, "", `"status":"duplicate"`},
	} {
		network.loseAnswers(func() bool { return true })
		if a := call(client, "POST", through+call1.path, call1.body); a.err == nil {
			t.Fatalf("the answer was not lost: %v", a)
		}
		network.pass()
		if n := stored(); n != i+1 {
			t.Fatalf("%s: %d messages are stored after the lost answer, want %d", call1.path, n, i+1)
		}
		a := call(client, "POST", through+call1.path, call1.body)
		if a.err != nil || !regexp.MustCompile(call1.again).MatchString(a.body) {
			t.Errorf("%s again: %v", call1.path, a)
		}
		if n := stored(); n != i+1 {
			t.Errorf("%s: %d messages are stored after the repeat, want %d", call1.path, n, i+1)
		}
	}
}

// Of a hundred answers to acks one is lost, and the client repeats it: the repeat is a success, or says that it was done, and
// no key waits for a lease to end.
func TestLostAcks(t *testing.T) {
	t.Parallel()
	c, _ := newShared(t, 2)
	network, through := front(t, c.brokers[0])
	client := newClient(t)
	direct := c.brokers[1].url()
	keys, per := 20, 20
	if *long {
		per = 1000
	}
	must(t, 200, "PUT", direct+"/v1/subscriptions/s", `{"stream":"s","lease_seconds":600}`)
	for k := range keys {
		body := `{"messages":[`
		for i := range per {
			if i > 0 {
				body += ","
			}
			body += fmt.Sprintf(`{"key":"k%d","payload":%d}`, k, i)
		}
		must(t, 200, "POST", direct+"/v1/streams/s/messages", body+"]}")
	}
	var pieces, lost atomic.Int64
	done := make([]int, keys)
	for left := keys * per; left > 0; {
		var got received
		decode(t, must(t, 200, "POST", direct+"/v1/subscriptions/s/receive", `{"max_messages":100,"wait_seconds":10}`), &got)
		if len(got.Messages) == 0 {
			t.Fatalf("nothing for 10 s with %d messages left: a key is stuck", left)
		}
		for _, m := range got.Messages {
			var key, n int
			fmt.Sscanf(m.Message.Key, "k%d", &key)
			fmt.Sscan(string(m.Message.Payload), &n)
			if n != done[key] || m.Attempt != 1 {
				t.Fatalf("key %d: got %d in attempt %d, want %d in the first", key, n, m.Attempt, done[key])
			}
			done[key]++
			left--
			network.loseAnswers(func() bool { return pieces.Add(1)%100 == 7 })
			for tries := 1; ; tries++ {
				a := call(client, "POST", through+"/v1/subscriptions/s/ack", fmt.Sprintf(`{"delivery_ids":[%q]}`, m.DeliveryID))
				if a.err != nil {
					lost.Add(1)
					continue
				}
				// The first one may have happened.
				if a.status != 200 || !regexp.MustCompile(`"ok":true`).MatchString(a.body) && !(tries > 1 && regexp.MustCompile(`"already settled"|"lease lost"`).MatchString(a.body)) {
					t.Fatalf("ack, try %d: %v", tries, a)
				}
				break
			}
		}
	}
	if lost.Load() == 0 {
		t.Error("no answer was lost")
	}
}

// received is the answer of a receive.
type received struct {
	Messages []struct {
		DeliveryID string `json:"delivery_id"`
		Attempt    int    `json:"attempt"`
		Message    struct {
			ID      string          `json:"id"`
			Key     string          `json:"key"`
			Payload json.RawMessage `json:"payload"`
		} `json:"message"`
	} `json:"messages"`
}

func decode(t testing.TB, text string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), into); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

// A receive is a POST with a body: a client that goes away while it waits is noticed all the same, within a second, and the
// next message goes to one that is there.
func TestGoneWhileParked(t *testing.T) {
	t.Parallel()
	c, _ := newShared(t, 1)
	url := c.brokers[0].url()
	must(t, 200, "PUT", url+"/v1/subscriptions/s", `{"stream":"s","lease_seconds":600}`)
	parked := func() string {
		return regexp.MustCompile(`(?m)^ferrymq_parked_polls\{.*`).FindString(must(t, 200, "GET", url+"/metrics", ""))
	}
	const none = ""
	for i := range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		gone := make(chan answer, 1)
		client := newClient(t)
		go func() {
			gone <- callWith(ctx, client, "POST", url+"/v1/subscriptions/s/receive", `{"max_messages":10,"wait_seconds":25,"consumer":"w"}`)
		}()
		eventually(t, patience, "the receive waits", func() bool { return parked() != none })
		cancel()
		if a := <-gone; a.err == nil {
			t.Fatalf("the receive was answered: %v", a)
		}
		client.CloseIdleConnections()
		eventually(t, time.Second, "the broker notices that the client has gone", func() bool { return parked() == none })
		must(t, 200, "POST", url+"/v1/streams/s/messages", fmt.Sprintf(`{"messages":[{"key":"k","payload":%d}]}`, i))
		var got received
		decode(t, must(t, 200, "POST", url+"/v1/subscriptions/s/receive", `{"wait_seconds":5}`), &got)
		if len(got.Messages) != 1 || got.Messages[0].Attempt != 1 {
			t.Fatalf("the next receive got %+v", got)
		}
		must(t, 200, "POST", url+"/v1/subscriptions/s/ack", fmt.Sprintf(`{"delivery_ids":[%q]}`, got.Messages[0].DeliveryID))
	}
}
