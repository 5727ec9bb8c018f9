package client

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"runtime/debug"
	"slices"
	"time"
)

// Outgoing is a message to be published.
type Outgoing struct {
	Key     string         // messages of one key are delivered in order, one at a time; "": no order
	Payload any            // encoded as JSON; json.RawMessage is sent byte for byte
	Headers map[string]any // may be nil
	ID      string         // published again with the same id and key within the stream's dedup window, it is stored once; "": the client makes one
	Delay   time.Duration  // when it is appended to its key, 0..365 days
}

// Published is what became of a message.
type Published struct {
	ID        string // of the broker: msg_…
	Duplicate bool   // its Outgoing.ID was there already; ID is that of the first. After a lost answer that may have been this very call
	Err       error  // it was not stored
}

// What one call carries at most. More goes in several, one after the other.
const (
	callMessages = 1000
	callBytes    = 8 << 20
)

// Publish stores messages and returns what became of each, in their order. The messages of one key in a call are stored together or not at
// all; of different keys, some may be stored and others not: the error then is the first of the results'. More than 1,000 messages or 8 MiB go
// in several calls. It may be called again with the same IDs; without IDs, what the error leaves open may then be stored twice.
func (c *Client) Publish(ctx context.Context, stream string, messages ...Outgoing) ([]Published, error) {
	type wire struct {
		Key     *string         `json:"key,omitempty"`
		ID      string          `json:"id"`
		Headers json.RawMessage `json:"headers,omitempty"`
		Delay   string          `json:"delay,omitempty"`
	}
	results, texts := make([]Published, len(messages)), make([][]byte, len(messages))
	todo := make([]int, len(messages))
	for i, m := range messages {
		w := wire{ID: m.ID}
		if m.Key != "" {
			w.Key = &m.Key
		}
		if m.ID == "" {
			w.ID = rand.Text()
		}
		if m.Delay != 0 {
			w.Delay = m.Delay.String()
		}
		payload, err := encode(m.Payload)
		if err == nil && m.Headers != nil {
			w.Headers, err = encode(m.Headers)
		}
		var head []byte
		if err == nil {
			head, err = json.Marshal(w)
		}
		if err != nil {
			return nil, fmt.Errorf("messages[%d]: %w", i, err)
		}
		texts[i] = append(append(append(head[:len(head)-1], `,"payload":`...), payload...), '}')
		todo[i] = i
	}
	retried, began := false, time.Now()
	for round := 1; len(todo) > 0; round++ {
		var again []int
		for len(todo) > 0 {
			body, n := []byte(`{"messages":[`), 0
			for n < len(todo) && n < callMessages && (n == 0 || len(body)+len(texts[todo[n]]) < callBytes) {
				if n > 0 {
					body = append(body, ',')
				}
				body = append(body, texts[todo[n]]...)
				n++
			}
			these := todo[:n]
			todo = todo[n:]
			data, err := c.call(ctx, ctx, call{method: "POST", path: "/v1/streams/" + url.PathEscape(stream) + "/messages", body: append(body, "]}"...), tryFor: c.config.RetryFor, retried: &retried})
			var answer struct {
				Results []struct{ ID, Status, Error string }
			}
			if err == nil {
				err = json.Unmarshal(data, &answer)
			}
			if err == nil && len(answer.Results) != n {
				err = errors.New("the answer is not that of a broker")
			}
			if err != nil {
				for _, i := range slices.Concat(these, todo, again) {
					results[i].Err = err
				}
				return results, err
			}
			for k, x := range answer.Results {
				i := these[k]
				// An id of our own is there already only because an answer got lost.
				results[i] = Published{ID: x.ID, Duplicate: x.Status == "duplicate" && messages[i].ID != ""}
				if x.Status == "failed" {
					results[i].Err = errors.New(x.Error)
					if x.Error == "database unavailable" {
						again = append(again, i)
					}
				}
			}
		}
		pause := backoff(round, nil)
		if len(again) == 0 || time.Since(began)+pause > c.config.RetryFor || sleep(ctx, pause) != nil {
			break
		}
		todo = again
	}
	for i := range results {
		if results[i].Err != nil {
			return results, fmt.Errorf("messages[%d]: %w", i, results[i].Err)
		}
	}
	return results, nil
}

func stack() string { return string(debug.Stack()) }
