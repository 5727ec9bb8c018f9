package proof

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/proof/history"
	"ferrymq/segment"
)

// mix is what a load does.
type mix struct {
	queue, stream    string
	partitions, keys int
	unkeyed          bool          // some messages have no key
	producers        int           // of each API
	consumers        int           // of each group and subscription
	pace             time.Duration // between two requests of a producer
	groups           []string      // of the queue
	subs             []string      // of the stream, prefixed by what they are: see subscription
	lease            int           // seconds
	attempts         int           // failures that make a dead letter
	poison           int           // every so manieth message fails always, 0: none
	honest           bool          // every message is acked at once but for those
	forgetful        bool          // most of what comes is forgotten
	spread           int           // partitions of a pop, 0: 3
	batch            int           // of a pop and a receive
	maxSends         int           // of each producer; 0: until told
}

// usual is a load that does a bit of everything and is not much for the machine.
func usual() mix {
	return mix{queue: "q", stream: "s", partitions: 6, keys: 12, unkeyed: true, producers: 3, consumers: 2, pace: 8 * time.Millisecond,
		groups: []string{"g1", "g2"}, subs: []string{"strict", "lenient"}, lease: 2, attempts: 4, poison: 40, batch: 8}
}

// load is clients of both APIs that go on through any fault as good clients do: what was not answered is sent again, a Retry-After is
// waited for, another broker is tried. All that they see is in the history.
type load struct {
	t     testing.TB
	log   history.Log
	mix   mix
	bases []string

	sending, ending chan struct{} // closed when producers, and all, shall end
	honest          atomic.Bool   // everybody acks at once from now on
	cured           atomic.Bool   // nothing fails any more
	producers       sync.WaitGroup
	consumers       sync.WaitGroup
	calls           atomic.Int64

	mu     sync.Mutex
	saw    map[string]int           // answers other than success
	healed time.Time                // when the fault ended
	first  map[string]time.Duration // from then on to the first success, by operation
}

// operations are what a load does all the time.
var operations = []string{"push", "pop", "ack", "publish", "receive", "settle"}

// startLoad makes the queue, its groups and the subscriptions, and begins.
func startLoad(t testing.TB, bases []string, m mix) *load {
	t.Helper()
	l := &load{t: t, mix: m, bases: bases, sending: make(chan struct{}), ending: make(chan struct{}), saw: map[string]int{}, first: map[string]time.Duration{}}
	l.log.Groups = map[string]history.Group{}
	c := l.client()
	c.must("POST", "/api/v1/configure", fmt.Sprintf(`{"queue":%q,"options":{"leaseTime":%d,"retryLimit":%d}}`, m.queue, m.lease, m.attempts-1))
	for _, g := range m.groups {
		l.log.Groups[g] = history.Group{Queue: m.queue, Max: m.attempts}
		for i := range m.consumers {
			l.consumers.Go(func() { l.client().consumeQueue(g, i) })
		}
	}
	for _, s := range m.subs {
		counts := !strings.HasPrefix(s, "lenient")
		c.must("PUT", "/v1/subscriptions/"+s, fmt.Sprintf(`{"stream":%q,"lease_seconds":%d,"count_expired_leases":%v,"retry":{"max_attempts":%d,"initial":"10ms","max":"50ms"}}`,
			m.stream, m.lease, counts, m.attempts))
		l.log.Groups[s] = history.Group{Queue: m.stream, Lanes: true, Max: m.attempts, CountExpired: counts}
		for i := range m.consumers {
			l.consumers.Go(func() { l.client().consumeLanes(s, i) })
		}
	}
	for i := range m.producers {
		if len(m.groups) > 0 {
			l.producers.Go(func() { l.client().push(i) })
		}
		if len(m.subs) > 0 {
			l.producers.Go(func() { l.client().publish(i) })
		}
	}
	t.Cleanup(func() {
		l.stop()
		if t.Failed() {
			t.Logf("history: %+v", l.log.Totals())
		}
	})
	return l
}

// stopSending ends the producers, each after what it is about.
func (l *load) stopSending() {
	select {
	case <-l.sending:
	default:
		close(l.sending)
	}
	l.producers.Wait()
}

// stop ends all clients.
func (l *load) stop() {
	select {
	case <-l.sending:
	default:
		close(l.sending)
	}
	select {
	case <-l.ending:
	default:
		close(l.ending)
	}
	l.producers.Wait()
	l.consumers.Wait()
}

// ended says that all shall end.
func (l *load) ended() bool {
	select {
	case <-l.ending:
		return true
	default:
		return false
	}
}

// pause waits; false: the channel was closed meanwhile.
func pause(d time.Duration, until <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-until:
		return false
	}
}

// heal says that the fault is over.
func (l *load) heal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.healed, l.first = time.Now(), map[string]time.Duration{}
}

// recovered waits until every operation has succeeded again, and returns how long that took.
func (l *load) recovered() (took time.Duration) {
	l.t.Helper()
	var missing []string
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		l.mu.Lock()
		took, missing = 0, nil
		for _, op := range operations {
			if d, ok := l.first[op]; ok {
				took = max(took, d)
			} else if (len(l.mix.groups) > 0 || !slices.Contains(operations[:3], op)) && (len(l.mix.subs) > 0 || !slices.Contains(operations[3:], op)) {
				missing = append(missing, op)
			}
		}
		l.mu.Unlock()
		if len(missing) == 0 {
			return took
		}
	}
	l.t.Errorf("no success within %v of the end of the fault: %v", patience, missing)
	return patience
}

// seen are the answers that were no success, and requests without one.
func (l *load) seen() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.saw)
}

// client is one client of a load, that one goroutine uses.
type client struct {
	l     *load
	http  *http.Client
	next  int
	rests []time.Time // by broker: not asked again before
}

func (l *load) client() *client {
	c := &client{l: l, http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1}}, rests: make([]time.Time, len(l.bases)), next: rand.IntN(len(l.bases))}
	l.t.Cleanup(c.http.CloseIdleConnections)
	return c
}

// documented are the texts of errors that operations may answer with, by status. Those of 503 come with Retry-After.
var documented = map[string]map[int][]string{
	"push":    {500: {"push failed"}, 503: {"database unavailable", "overloaded", "not ready"}},
	"pop":     {500: {"pool", "pop failed"}, 503: {"overloaded", "not ready"}},
	"ack":     {503: {"not ready"}},
	"extend":  {500: {"pool", "renew failed"}, 503: {"not ready"}},
	"publish": {500: {"pool", "publish failed"}, 503: {"database unavailable", "overloaded", "not ready"}},
	"receive": {500: {"pool", "receive failed", "query failed"}, 503: {"overloaded", "not ready"}},
	"settle":  {500: {"pool", "settle failed", "query failed"}, 503: {"not ready"}},
	"admin":   {500: {"pool", "query failed", "configure failed"}, 503: {"not ready", "counting takes too long"}},
}

// harmless are errors that say that nothing was done.
var harmless = []string{"overloaded", "not ready", "pool"}

// reply is what came of a request.
type reply struct {
	start, end time.Time
	status     int    // 0: no whole answer
	body       []byte // of a success
	text       string // of an error
}

func (r *reply) ok() bool { return r.status >= 200 && r.status < 300 }

// outcome is what is known of a request that was no success.
func (r *reply) outcome() history.Outcome {
	if r.status == 0 || !slices.Contains(harmless, r.text) {
		return history.Unknown
	}
	return history.Refused
}

// do makes a request to the next broker that does not rest.
func (c *client) do(op, method, path, body string, within time.Duration) *reply {
	for {
		best := -1
		for i := range c.rests {
			n := (c.next + i) % len(c.rests)
			if best < 0 || c.rests[n].Before(c.rests[best]) && !c.rests[best].Before(time.Now()) {
				best = n
			}
		}
		c.next = best
		if wait := time.Until(c.rests[best]); wait <= 0 || !pause(wait, c.l.ending) {
			break
		}
	}
	n := c.next
	c.next = (n + 1) % len(c.rests)
	return c.ask(n, op, method, path, body, within)
}

// ask makes a request to one broker.
func (c *client) ask(n int, op, method, path, body string, within time.Duration) *reply {
	r, err := http.NewRequest(method, c.l.bases[n]+path, strings.NewReader(body))
	if err != nil {
		panic(err)
	}
	c.http.Timeout = within
	a := &reply{start: time.Now()}
	resp, err := c.http.Do(r)
	if err == nil {
		a.body, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close()
	}
	a.end = time.Now()
	if err != nil {
		c.rests[n] = a.end.Add(100 * time.Millisecond)
		c.saw(op + ": no answer")
		return a
	}
	a.status = resp.StatusCode
	if a.ok() {
		c.succeeded(op)
		return a
	}
	var problem struct{ Error string }
	if json.Unmarshal(a.body, &problem) != nil || !slices.Contains(documented[op][a.status], problem.Error) || resp.Header.Get("Content-Type") != "application/json" {
		c.l.log.Odd(fmt.Sprintf("%s %s: %d %s", method, path, a.status, a.body))
	}
	a.text = problem.Error
	after, retry := resp.Header.Get("Retry-After"), ""
	wait := 100 * time.Millisecond
	if s, err := strconv.Atoi(after); err == nil && s >= 1 && s <= 5 {
		wait, retry = time.Duration(s)*time.Second, ", Retry-After"
	}
	if (a.status == 503) != (retry != "") {
		c.l.log.Odd(fmt.Sprintf("%s %s: %d %s with Retry-After %q", method, path, a.status, a.body, after))
	}
	c.rests[n] = a.end.Add(wait)
	c.saw(fmt.Sprintf("%s: %d %s%s", op, a.status, a.text, retry))
	return a
}

func (c *client) saw(what string) {
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	c.l.saw[what]++
}

func (c *client) succeeded(op string) {
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	if _, ok := c.l.first[op]; !ok && !c.l.healed.IsZero() {
		c.l.first[op] = time.Since(c.l.healed)
	}
}

// quick bounds requests that do not wait.
const quick = 5 * time.Second

// must makes an admin request until it succeeds.
func (c *client) must(method, path, body string) []byte {
	c.l.t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if r := c.do("admin", method, path, body, quick); r.ok() {
			return r.body
		} else if r.status != 0 && r.status < 500 {
			break
		}
	}
	c.l.t.Errorf("%s %s does not succeed", method, path)
	return nil
}

// payload names a message; no two are equal.
func payload(producer string, call, index int, poison bool) string {
	return fmt.Sprintf(`{"from": "%s", "n": %d.%d0, "poison": %v}`, producer, call, index, poison)
}

// poisoned says that a message fails.
func (l *load) poisoned(payload string) bool {
	return strings.HasSuffix(payload, "true}") && !l.cured.Load()
}

// poison says whether a message is to fail always.
func (l *load) poison(call, index int) bool {
	return l.mix.poison > 0 && (call*7+index)%l.mix.poison == l.mix.poison-1
}

// outgoing is a message until it is stored.
type outgoing struct {
	lane    history.Lane
	index   int
	payload string
	id      string
}

// send sends messages until all are stored, or it is told to end. Only one that may be in between can have been stored then.
func (c *client) send(op, path string, messages []outgoing, body func([]outgoing) string, read func([]byte) (ids, statuses []string)) {
	call := c.l.calls.Add(1)
	for tries := 0; len(messages) > 0; tries++ {
		if tries > 0 && c.l.ended() {
			return
		}
		r := c.do(op, "POST", path, body(messages), quick)
		var ids, statuses []string
		if r.ok() {
			if ids, statuses = read(r.body); len(ids) != len(messages) {
				c.l.log.Odd(fmt.Sprintf("%s: %d results for %d messages: %s", op, len(ids), len(messages), r.body))
				return
			}
		}
		var left []outgoing
		for i, m := range messages {
			s := history.Send{Start: r.start, End: r.end, Lane: m.lane, Call: call, Index: m.index, Payload: m.payload, Outcome: history.Unknown}
			switch {
			case !r.ok():
				s.Outcome = r.outcome()
			case statuses[i] == "queued" || statuses[i] == "duplicate":
				s.Outcome, s.Message, s.Duplicate = history.OK, ids[i], statuses[i] == "duplicate"
			}
			if s.Outcome != history.OK {
				left = append(left, m)
			}
			c.l.log.Add(s)
		}
		messages = left
	}
}

// more paces a producer; false: it has done enough.
func (c *client) more(call int) bool {
	return (c.l.mix.maxSends == 0 || call < c.l.mix.maxSends) && pause(time.Duration(rand.Int64N(int64(2*c.l.mix.pace)+1)), c.l.sending)
}

// push is a producer of the queue.
func (c *client) push(producer int) {
	name := fmt.Sprintf("push-%d", producer)
	for call := 0; c.more(call); call++ {
		var all []outgoing
		at := rand.IntN(c.l.mix.partitions)
		for i := range 1 + rand.IntN(4) {
			if rand.IntN(4) == 0 {
				at = rand.IntN(c.l.mix.partitions)
			}
			p := payload(name, call, i, c.l.poison(call, i))
			all = append(all, outgoing{history.Lane{Queue: c.l.mix.queue, Key: fmt.Sprintf("p%d", at)}, i, p, fmt.Sprintf("%s-%d-%d", name, call, i)})
		}
		c.pushAll(all)
	}
}

// pushAll pushes messages in one request, and again until all are stored.
func (c *client) pushAll(all []outgoing) {
	c.send("push", "/api/v1/push", all, func(all []outgoing) string {
		var b strings.Builder
		for i, m := range all {
			fmt.Fprintf(&b, `%s{"queue":%q,"partition":%q,"transactionId":%q,"payload":%s}`, map[bool]string{true: `{"items":[`, false: ","}[i == 0], m.lane.Queue, m.lane.Key, m.id, m.payload)
		}
		return b.String() + "]}"
	}, func(body []byte) (ids, statuses []string) {
		var results []struct {
			ID     string `json:"message_id"`
			Status string `json:"status"`
			Error  string `json:"error"`
		}
		_ = json.Unmarshal(body, &results)
		for _, r := range results {
			if r.Status == "failed" && r.Error != "push failed" && r.Error != "database unavailable" {
				c.l.log.Odd(fmt.Sprintf("push: %s", body))
			}
			ids, statuses = append(ids, r.ID), append(statuses, r.Status)
		}
		return ids, statuses
	})
}

// publish is a producer of the stream.
func (c *client) publish(producer int) {
	name := fmt.Sprintf("publish-%d", producer)
	for call := 0; c.more(call); call++ {
		var all []outgoing
		at := rand.IntN(c.l.mix.keys)
		for i := range 1 + rand.IntN(4) {
			if rand.IntN(2) == 0 {
				at = rand.IntN(c.l.mix.keys)
			}
			p := payload(name, call, i, c.l.poison(call, i))
			lane := history.Lane{Queue: c.l.mix.stream, Key: fmt.Sprintf("k%d", at)}
			if c.l.mix.unkeyed && rand.IntN(5) == 0 {
				lane.Key = unkeyed(p)
			}
			all = append(all, outgoing{lane, i, p, fmt.Sprintf("%s-%d-%d", name, call, i)})
		}
		c.publishAll(all)
	}
}

// publishAll publishes messages in one request, and again until all are stored.
func (c *client) publishAll(all []outgoing) {
	c.send("publish", "/v1/streams/"+c.l.mix.stream+"/messages", all, func(all []outgoing) string {
		var b strings.Builder
		for i, m := range all {
			key := "null"
			if !strings.HasPrefix(m.lane.Key, "~") {
				key = strconv.Quote(m.lane.Key)
			}
			fmt.Fprintf(&b, `%s{"key":%s,"id":%q,"payload":%s}`, map[bool]string{true: `{"messages":[`, false: ","}[i == 0], key, m.id, m.payload)
		}
		return b.String() + "]}"
	}, func(body []byte) (ids, statuses []string) {
		var results struct {
			Results []struct{ ID, Status, Error string }
		}
		_ = json.Unmarshal(body, &results)
		for _, r := range results.Results {
			if r.Status == "failed" && r.Error != "publish failed" && r.Error != "push failed" && r.Error != "database unavailable" {
				c.l.log.Odd(fmt.Sprintf("publish: %s", body))
			}
			ids, statuses = append(ids, r.ID), append(statuses, r.Status)
		}
		return ids, statuses
	})
}

// unkeyed is the lane of a message without a key.
func unkeyed(payload string) string { return "~" + payload }

// batch is what a pop brought of one partition.
type batch struct {
	group, id, lease string
	lane             history.Lane
	ids, payloads    []string
}

// item is what one ack says of a message.
type item struct {
	TransactionID string `json:"transactionId"`
	PartitionID   string `json:"partitionId"`
	LeaseID       string `json:"leaseId"`
	Status        string `json:"status"`
	Error         string `json:"error,omitempty"`
}

// verdict is what a client says of a batch: the first n are completed, and the next has a status of its own, if there is one.
type verdict struct {
	n      int
	status string // "", "failed", "retry"
}

func (c *client) acts() bool { return !c.l.mix.honest && !c.l.honest.Load() }

// consumeQueue is a consumer of a group.
func (c *client) consumeQueue(group string, number int) {
	for !c.l.ended() {
		n := 1 + rand.IntN(c.l.mix.batch)
		path := fmt.Sprintf("/api/v1/pop/queue/%s?batch=%d&partitions=%d&wait=true&timeout=1000&consumerGroup=%s", c.l.mix.queue, n, 1+rand.IntN(cmp.Or(c.l.mix.spread, 3)), group)
		r := c.do("pop", "GET", path, "", quick+time.Second)
		if !r.ok() || r.status == http.StatusNoContent {
			continue
		}
		var all []*batch
		var sure []batch
		for i, m := range popped(c.l, r.body).Messages {
			lane := history.Lane{Queue: c.l.mix.queue, Key: m.Partition}
			if len(all) == 0 || all[len(all)-1].lane != lane {
				all = append(all, &batch{group: group, id: m.PartitionID, lease: m.LeaseID + m.PartitionID, lane: lane})
			}
			b := all[len(all)-1]
			b.ids, b.payloads = append(b.ids, m.TransactionID), append(b.payloads, string(m.Data))
			c.l.log.Add(history.Delivery{Start: r.start, End: r.end, From: atMost(m.CreatedAt, r.end), Group: group, Lane: lane, Lease: b.lease, Length: time.Duration(c.l.mix.lease) * time.Second,
				Index: i, Message: m.ID, Payload: string(m.Data)})
		}
		for _, b := range all {
			v := verdict{n: len(b.ids)}
			if c.acts() && c.l.mix.forgetful && rand.IntN(3) > 0 {
				continue
			}
			if n := slices.IndexFunc(b.payloads, c.l.poisoned); n >= 0 {
				v = verdict{n, "failed"}
			} else if c.acts() {
				switch rand.IntN(25) {
				case 0:
					v = verdict{rand.IntN(v.n), "failed"}
				case 1:
					v = verdict{rand.IntN(v.n), "retry"}
				case 2, 3:
					c.ack([]*batch{b}, verdict{n: 1 + rand.IntN(v.n)}) // a part first; the lease stays
				case 4, 5:
					c.extend(all)
					pause(time.Duration(rand.IntN(1500))*time.Millisecond, c.l.ending)
				case 6:
					// Too long, or nearly.
					pause(time.Duration(c.l.mix.lease)*time.Second+time.Duration(rand.IntN(600)-100)*time.Millisecond, c.l.ending)
				case 7:
					if number > 0 {
						continue // forgotten
					}
				}
			}
			if v.status == "" {
				sure = append(sure, *b)
			} else {
				c.ack([]*batch{b}, v)
			}
		}
		var rest []*batch
		for i := range sure {
			rest = append(rest, &sure[i])
		}
		c.ack(rest, verdict{n: c.l.mix.batch})
	}
}

// atMost is a time of the database, for use as one of ours.
func atMost(t, most time.Time) time.Time {
	if t.After(most) {
		return most
	}
	return t
}

type pops struct {
	Messages []struct {
		ID            string          `json:"id"`
		TransactionID string          `json:"transactionId"`
		PartitionID   string          `json:"partitionId"`
		Partition     string          `json:"partition"`
		LeaseID       string          `json:"leaseId"`
		CreatedAt     time.Time       `json:"createdAt"`
		Data          json.RawMessage `json:"data"`
	} `json:"messages"`
}

func popped(l *load, body []byte) (p pops) {
	if err := json.Unmarshal(body, &p); err != nil || len(p.Messages) == 0 {
		l.log.Odd(fmt.Sprintf("pop: %s (%v)", body, err))
	}
	return p
}

// ack says the same of some batches, until that is answered.
func (c *client) ack(batches []*batch, v verdict) {
	for tries := 0; len(batches) > 0 && tries < 20; tries++ {
		var items []item
		for _, b := range batches {
			for _, id := range b.ids[:min(len(b.ids), v.n)] {
				items = append(items, item{id, b.id, strings.TrimSuffix(b.lease, b.id), "completed", ""})
			}
			if v.status != "" {
				items = append(items, item{b.ids[v.n], b.id, strings.TrimSuffix(b.lease, b.id), v.status, "it does not work"})
			}
		}
		body, _ := json.Marshal(map[string]any{"consumerGroup": batches[0].group, "acknowledgments": items})
		r := c.do("ack", "POST", "/api/v1/ack/batch", string(body), quick)
		var results []struct {
			Success bool   `json:"success"`
			Error   string `json:"error"`
		}
		if r.ok() {
			if err := json.Unmarshal(r.body, &results); err != nil || len(results) != len(items) {
				c.l.log.Odd(fmt.Sprintf("ack: %s (%v)", r.body, err))
				return
			}
		}
		var left []*batch
		for _, b := range batches {
			n := min(len(b.ids), v.n)
			s := history.Settle{Start: r.start, End: r.end, Group: b.group, Lane: b.lane, Lease: b.lease, Kind: history.Acked, Done: b.payloads[:n], Ends: n == len(b.ids) || v.status != "", Outcome: r.outcome()}
			switch v.status {
			case "failed":
				s.Kind, s.Payload = history.Failed, b.payloads[v.n]
				n++
			case "retry":
				s.Kind = history.Released
				n++
			}
			if r.ok() {
				s.Outcome = history.OK
				for _, x := range results[:n] {
					switch {
					case x.Success:
					case x.Error == "invalid or expired lease":
						s.Outcome = history.Refused
					case x.Error == "pool" || x.Error == "ack flush failed; lease will expire and redeliver":
						s.Outcome = history.Unknown
						c.saw("ack item: " + x.Error)
					default:
						c.l.log.Odd(fmt.Sprintf("ack: %s", x.Error))
					}
				}
				results = results[n:]
			}
			if s.Outcome == history.Unknown || s.Outcome == history.Refused && !r.ok() {
				left = append(left, b)
			}
			if s.Outcome != history.Refused || r.ok() {
				c.l.log.Add(s)
			}
		}
		batches = left
	}
}

// extend makes the lease of a pop longer, which is that of all its batches.
func (c *client) extend(all []*batch) {
	r := c.do("extend", "POST", "/api/v1/lease/"+strings.TrimSuffix(all[0].lease, all[0].id)+"/extend", fmt.Sprintf(`{"seconds":%d}`, c.l.mix.lease), quick)
	var x struct {
		Renewed int `json:"renewed"`
	}
	if r.ok() {
		if _ = json.Unmarshal(r.body, &x); x.Renewed == 0 {
			return
		}
	} else if r.outcome() == history.Refused {
		return // it was not looked at
	}
	for _, b := range all {
		// Some of the batches may be settled, or their leases ended, and others not: nothing is known of any one of them.
		c.l.log.Add(history.Settle{Start: r.start, End: r.end, Group: b.group, Lane: b.lane, Lease: b.lease, Kind: history.Extended, Extend: time.Duration(c.l.mix.lease) * time.Second, Outcome: history.Unknown})
	}
}

// deliveries is the answer of a receive.
type deliveries struct {
	Messages []*delivery `json:"messages"`
}

type delivery struct {
	DeliveryID string `json:"delivery_id"`
	Attempt    int    `json:"attempt"`
	Message    struct {
		ID          string          `json:"id"`
		Key         *string         `json:"key"`
		Payload     json.RawMessage `json:"payload"`
		PublishedAt time.Time       `json:"published_at"`
	} `json:"message"`
	lane history.Lane
}

// consumeLanes is a consumer of a subscription.
func (c *client) consumeLanes(sub string, number int) {
	const wait = time.Second
	var kept []*delivery // to be settled late
	for !c.l.ended() {
		r := c.do("receive", "POST", "/v1/subscriptions/"+sub+"/receive", fmt.Sprintf(`{"max_messages":%d,"wait_seconds":%d,"consumer":"c%d"}`, 1+rand.IntN(c.l.mix.batch), wait/time.Second, number), quick+wait)
		if !r.ok() {
			if r.outcome() == history.Unknown {
				c.l.log.Add(history.Lost{Start: r.start, Group: sub})
			}
			continue
		}
		var got deliveries
		if err := json.Unmarshal(r.body, &got); err != nil {
			c.l.log.Odd(fmt.Sprintf("receive: %s (%v)", r.body, err))
			continue
		}
		// A look that is under way when the wait is over is answered without: what it claims comes again after its lease.
		if len(got.Messages) == 0 && r.end.Sub(r.start) > wait+200*time.Millisecond {
			c.l.log.Add(history.Lost{Start: r.start, Group: sub})
		}
		var acks, nacks, releases []*delivery
		for i, d := range got.Messages {
			p := string(d.Message.Payload)
			d.lane = history.Lane{Queue: c.l.mix.stream, Key: unkeyed(p)}
			if d.Message.Key != nil {
				d.lane.Key = *d.Message.Key
			}
			c.l.log.Add(history.Delivery{Start: r.start, End: r.end, From: atMost(d.Message.PublishedAt, r.end), Group: sub, Lane: d.lane, Lease: d.DeliveryID, Length: time.Duration(c.l.mix.lease) * time.Second,
				Index: i, Message: d.Message.ID, Payload: p, Attempt: d.Attempt})
			what := rand.IntN(30)
			switch {
			case c.acts() && c.l.mix.forgetful && what < 20:
			case c.l.poisoned(p):
				nacks = append(nacks, d)
			case !c.acts() || what > 6:
				acks = append(acks, d)
			case what == 0:
				nacks = append(nacks, d)
			case what == 1:
				releases = append(releases, d)
			case what == 2:
				c.settle(sub, "extend", history.Extended, []*delivery{d}, fmt.Sprintf(`,"seconds":%d`, 1+rand.IntN(c.l.mix.lease)))
				acks = append(acks, d)
			case what <= 4:
				kept = append(kept, d)
			case what == 5:
				acks = append(acks, d)
				kept = append(kept, d) // again, later
			case number == 0:
				acks = append(acks, d)
			} // else forgotten
		}
		c.settle(sub, "nack", history.Failed, nacks, `,"error":"it does not work","retry_after":"`+strconv.Itoa(rand.IntN(40))+`ms"`)
		c.settle(sub, "nack", history.Released, releases, `,"release":true`)
		if c.acts() && rand.IntN(40) == 0 {
			pause(time.Duration(c.l.mix.lease)*time.Second+time.Duration(rand.IntN(600)-100)*time.Millisecond, c.l.ending)
		}
		c.settle(sub, "ack", history.Acked, acks, "")
		if len(kept) > 5 || !c.acts() {
			switch rand.IntN(4) {
			case 0:
				c.settle(sub, "nack", history.Failed, kept, `,"error":"late","retry_after":"0s"`)
			case 1:
				c.settle(sub, "extend", history.Extended, kept, `,"seconds":1`)
			default:
				c.settle(sub, "ack", history.Acked, kept, "")
			}
			kept = nil
		}
	}
}

// settle settles deliveries, until that is answered.
func (c *client) settle(sub, route string, kind history.Kind, ds []*delivery, more string) {
	for tries := 0; len(ds) > 0 && tries < 20; tries++ {
		ids := make([]string, len(ds))
		for i, d := range ds {
			ids[i] = strconv.Quote(d.DeliveryID)
		}
		r := c.do("settle", "POST", "/v1/subscriptions/"+sub+"/"+route, `{"delivery_ids":[`+strings.Join(ids, ",")+"]"+more+"}", quick)
		var got struct {
			Results []struct {
				OK    bool
				Error string
			}
		}
		if r.ok() {
			if err := json.Unmarshal(r.body, &got); err != nil || len(got.Results) != len(ds) {
				c.l.log.Odd(fmt.Sprintf("%s: %s (%v)", route, r.body, err))
				return
			}
		}
		var left []*delivery
		for i, d := range ds {
			s := history.Settle{Start: r.start, End: r.end, Group: sub, Lane: d.lane, Lease: d.DeliveryID, Kind: kind, Outcome: r.outcome(), Ends: kind != history.Extended}
			switch kind {
			case history.Acked:
				s.Done = []string{string(d.Message.Payload)}
			case history.Failed:
				s.Payload = string(d.Message.Payload)
			case history.Extended:
				_, seconds, _ := strings.Cut(more, ":")
				n, _ := strconv.Atoi(seconds)
				s.Extend = time.Duration(n) * time.Second
			}
			if r.ok() {
				switch x := got.Results[i]; {
				case x.OK:
					s.Outcome = history.OK
				case x.Error == "lease lost" || x.Error == "already settled":
					s.Outcome = history.Refused
				case x.Error == "not settled: try again":
					s.Outcome = history.Unknown
					c.saw(route + " item: " + x.Error)
				default:
					c.l.log.Odd(fmt.Sprintf("%s: %s", route, x.Error))
				}
			} else if s.Outcome == history.Refused {
				left = append(left, d) // not seen by anybody
				continue
			}
			if s.Outcome == history.Unknown {
				left = append(left, d)
			}
			c.l.log.Add(s)
		}
		ds = left
	}
}

// numbers are what a broker says of a group: the messages that are left, those under a lease, and the dead letters of a subscription.
type numbers struct{ left, leased, dead int64 }

func (c *client) numbers(n int, group string) (x numbers, ok bool) {
	if c.l.log.Groups[group].Lanes {
		var got struct {
			Backlog  int64
			InFlight int64 `json:"in_flight"`
			Dead     int64
		}
		r := c.ask(n, "admin", "GET", "/v1/subscriptions/"+group, "", quick)
		ok = r.ok() && json.Unmarshal(r.body, &got) == nil
		return numbers{got.Backlog, got.InFlight, got.Dead}, ok
	}
	var got struct{ Pending, Processing int64 }
	r := c.ask(n, "admin", "GET", "/api/v1/resources/queues/"+c.l.mix.queue+"/depth?group="+group, "", quick)
	ok = r.ok() && json.Unmarshal(r.body, &got) == nil
	return numbers{got.Pending, got.Processing, 0}, ok
}

// drain ends the producers and waits until every broker says that nothing is left, or for so long.
func (l *load) drain(within time.Duration) {
	l.t.Helper()
	l.stopSending()
	l.honest.Store(true)
	c := l.client()
	left := map[string]numbers{"": {}}
	for end := time.Now().Add(within); len(left) > 0 && time.Now().Before(end); pause(100*time.Millisecond, l.ending) {
		clear(left)
		for group := range l.log.Groups {
			for n := range l.bases {
				if x, ok := c.numbers(n, group); !ok || x.left != 0 || x.leased != 0 {
					left[fmt.Sprintf("%s of broker %d", group, n)] = x
				}
			}
		}
	}
	if len(left) > 0 {
		l.t.Errorf("not drained within %v: %+v", within, left)
	}
}

// deadLetters reads all dead letters of a group.
func (c *client) deadLetters(group string) (all []history.Dead) {
	if !c.l.log.Groups[group].Lanes {
		for offset := 0; ; offset += 1000 {
			var page struct {
				Messages []struct {
					Partition  string
					RetryCount int `json:"retryCount"`
					Data       json.RawMessage
				}
			}
			_ = json.Unmarshal(c.must("GET", fmt.Sprintf("/api/v1/dlq?queue=%s&consumerGroup=%s&limit=1000&offset=%d", c.l.mix.queue, group, offset), ""), &page)
			for _, m := range page.Messages {
				all = append(all, history.Dead{Lane: history.Lane{Queue: c.l.mix.queue, Key: m.Partition}, Payload: string(m.Data), Attempts: m.RetryCount + 1})
			}
			if len(page.Messages) < 1000 {
				return all
			}
		}
	}
	for cursor := ""; ; {
		var page struct {
			DeadLetters []struct {
				Message struct {
					Key     *string
					Payload json.RawMessage
				}
				Attempts int
			} `json:"dead_letters"`
			Next *string `json:"next_cursor"`
		}
		_ = json.Unmarshal(c.must("GET", "/v1/subscriptions/"+group+"/dead-letters?limit=1000"+cursor, ""), &page)
		for _, m := range page.DeadLetters {
			lane := history.Lane{Queue: c.l.mix.stream, Key: unkeyed(string(m.Message.Payload))}
			if m.Message.Key != nil {
				lane.Key = *m.Message.Key
			}
			all = append(all, history.Dead{Lane: lane, Payload: string(m.Message.Payload), Attempts: m.Attempts})
		}
		if page.Next == nil {
			return all
		}
		cursor = "&cursor=" + url.QueryEscape(*page.Next)
	}
}

// verdict waits until everything has been delivered, ends the load, reads what there is, from every broker and from the database
// if there is a pool, and judges.
func (l *load) verdict(pool *pgxpool.Pool) {
	l.t.Helper()
	l.drain(2 * patience)
	l.stop()
	l.log.Drained = true
	c := &client{l: l, http: &http.Client{}, rests: make([]time.Time, len(l.bases))}
	defer c.http.CloseIdleConnections()
	l.log.Dead = map[string][]history.Dead{}
	for group, g := range l.log.Groups {
		dead := c.deadLetters(group)
		l.log.Dead[group] = dead
		for n := range l.bases {
			x, ok := c.numbers(n, group)
			if !ok {
				l.t.Errorf("broker %d does not say its numbers", n)
			}
			if !g.Lanes {
				x.dead = int64(len(dead))
			}
			name := fmt.Sprintf("%s of broker %d: ", group, n)
			l.log.Counters = append(l.log.Counters, history.Counter{Name: name + "left", Got: x.left}, history.Counter{Name: name + "in flight", Got: x.leased},
				history.Counter{Name: name + "dead letters", Got: x.dead, Want: int64(len(dead))})
		}
	}
	if pool != nil {
		l.readStored(pool)
	}
	for _, v := range l.log.Check() {
		l.t.Error(v)
	}
	l.t.Logf("%+v; answers other than success: %v", l.log.Totals(), l.seen())
}

// readStored reads every message from the database.
func (l *load) readStored(pool *pgxpool.Pool) {
	l.t.Helper()
	l.log.Stored = map[history.Lane][]history.Stored{}
	rows, err := pool.Query(l.t.Context(), `select q.name, p.name, p.hidden, s.base_offset, s.count, s.first_id, s.codec, s.key_no, s.frames
		from ferrymq.segments s join ferrymq.partitions p on p.id = s.partition_id join ferrymq.queues q on q.id = p.queue_id
		where q.deleted_at is null and q.name in ($1, $2) order by p.id, s.base_offset`, l.mix.queue, l.mix.stream)
	if err != nil {
		l.t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var lane history.Lane
		var hidden bool
		var base int64
		var count int
		var first uuid.UUID
		var codec, keyNo int16
		var frames []byte
		if err := rows.Scan(&lane.Queue, &lane.Key, &hidden, &base, &count, &first, &codec, &keyNo, &frames); err != nil {
			l.t.Fatal(err)
		}
		open, err := segment.Decode(nil, codec, keyNo, first, count, frames)
		if err != nil {
			l.t.Fatal(err)
		}
		for i := range count {
			x := history.Stored{Offset: base + int64(i), Payload: string(open.Raw(i).Payload)}
			at := lane
			if lane.Queue == l.mix.queue {
				x.Message = open.ID(i).String()
			}
			if hidden {
				at.Key = unkeyed(x.Payload)
				x.Offset = int64(len(l.log.Stored[at]))
			}
			l.log.Stored[at] = append(l.log.Stored[at], x)
		}
	}
	if err := rows.Err(); err != nil {
		l.t.Fatal(err)
	}
}
