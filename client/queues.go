package client

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"sync"
	"time"
)

// Item is a message to be pushed to a queue.
type Item struct {
	Queue         string // made by its first push
	Partition     string // "": "Default"
	Payload       any    // encoded as JSON; json.RawMessage is sent byte for byte
	TransactionID string // pushed again to the same partition within the queue's dedup window, it is stored once; "": the client makes one
}

// Pushed is what became of an [Item].
type Pushed struct {
	ID          string `json:"message_id"`
	PartitionID string `json:"partitionId"`
	Status      string `json:"status"` // queued, duplicate, failed
	Error       string `json:"error"`  // of a failed one
}

// Push stores up to 10,000 items, and returns what became of each, in their order. The items of one partition are stored together or not at all.
// Its error is the first of those that were not.
func (c *Client) Push(ctx context.Context, items ...Item) ([]Pushed, error) {
	type wire struct {
		Queue         string          `json:"queue"`
		Partition     string          `json:"partition,omitempty"`
		TransactionID string          `json:"transactionId"`
		Payload       json.RawMessage `json:"payload"`
	}
	all := make([]json.RawMessage, len(items))
	for i, x := range items {
		head, err := json.Marshal(wire{Queue: x.Queue, Partition: x.Partition, TransactionID: cmp.Or(x.TransactionID, rand.Text())})
		payload, bad := encode(x.Payload)
		if err = errors.Join(err, bad); err != nil {
			return nil, fmt.Errorf("items[%d]: %w", i, err)
		}
		all[i] = append(append(head[:len(head)-len("null}")], payload...), '}')
	}
	results := make([]Pushed, len(items))
	todo := make([]int, len(items))
	for i := range todo {
		todo[i] = i
	}
	retried, began := false, time.Now()
	for round := 1; len(todo) > 0; round++ {
		body := []byte(`{"items":[`)
		for n, i := range todo {
			if n > 0 {
				body = append(body, ',')
			}
			body = append(body, all[i]...)
		}
		data, err := c.call(ctx, ctx, call{method: "POST", path: "/api/v1/push", body: append(body, "]}"...), tryFor: c.config.RetryFor, retried: &retried})
		var answer []Pushed
		if err == nil {
			err = json.Unmarshal(data, &answer)
		}
		if err == nil && len(answer) != len(todo) {
			err = errors.New("the answer is not that of a broker")
		}
		if err != nil {
			for _, i := range todo {
				results[i] = Pushed{Status: "failed", Error: err.Error()}
			}
			return results, err
		}
		var again []int
		for n, i := range todo {
			results[i] = answer[n]
			switch {
			case answer[n].Status == "duplicate" && items[i].TransactionID == "":
				results[i].Status = "queued" // an answer got lost
			case answer[n].Error == "database unavailable":
				again = append(again, i)
			}
		}
		pause := backoff(round, nil)
		if len(again) == 0 || time.Since(began)+pause > c.config.RetryFor || sleep(ctx, pause) != nil {
			break
		}
		todo = again
	}
	for i, x := range results {
		if x.Status == "failed" {
			return results, fmt.Errorf("items[%d]: %s", i, x.Error)
		}
	}
	return results, nil
}

// QueueMessage is a message of a batch.
type QueueMessage struct {
	ID            string          `json:"id"`
	TransactionID string          `json:"transactionId"`
	Payload       json.RawMessage `json:"data"`
	CreatedAt     time.Time       `json:"createdAt"`
	Partition     string          `json:"partition"`
	PartitionID   string          `json:"partitionId"`
	ProducerSub   string          `json:"producerSub"` // of the token that pushed it, if any
}

// PopOptions of a loop; the zero value will do.
type PopOptions struct {
	Group       string        // "": all consumers without a group share the queue
	Batch       int           // messages of one pop at most, 0: 100
	Concurrency int           // batches at once, each of one partition, 0: 4
	Lease       time.Duration // of a batch, in whole seconds; extended again and again while it is handled; 0: 60 s
	Grace       time.Duration // how long a handler may go on when the loop is stopped, 0: 10 s
}

// Pop hands the messages of a queue to handler until ctx ends: those of a batch one after the other, in order, and acks them together. At the
// first error the rest of the batch is given back, and the message fails with its text: the queue's retry limit counts, and the message comes again
// or goes to the dead letters; but see [ErrRelease] and [DeadLetter].
//
// When ctx ends, handlers finish their message, what is done is acked, and the rest of each batch given back. The handler's context ends when the
// lease is lost ([ErrLeaseLost]) and when Grace is over ([ErrStopping]). What is held 2 s after that comes again when its lease ends, and Pop
// returns an error.
func (c *Client) Pop(ctx context.Context, queue string, o PopOptions, handler func(ctx context.Context, m QueueMessage) error) error {
	o.Lease = max(cmp.Or(o.Lease, time.Minute).Round(time.Second), time.Second)
	handle, all, end := lifetimes(ctx, cmp.Or(o.Grace, 10*time.Second))
	defer end()
	popping, refuse := context.WithCancelCause(ctx)
	defer refuse(nil)
	var workers sync.WaitGroup
	for range max(cmp.Or(o.Concurrency, 4), 1) {
		workers.Go(func() {
			for popping.Err() == nil {
				if err := c.popOnce(popping, handle, all, queue, o, handler); err != nil && popping.Err() == nil {
					refuse(err)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { workers.Wait(); close(done) }()
	var refused error
	select {
	case <-done:
	case <-all.Done():
		return errors.New("client: stopped while handlers run: their messages come again when the lease ends")
	}
	if ctx.Err() == nil {
		refused = context.Cause(popping)
	}
	return refused
}

// popOnce handles one batch.
func (c *Client) popOnce(ctx, handle, all context.Context, queue string, o PopOptions, handler func(context.Context, QueueMessage) error) error {
	const wait = 20 * time.Second
	seconds := int(o.Lease / time.Second)
	values := url.Values{"wait": {"true"}, "timeout": {strconv.FormatInt(wait.Milliseconds(), 10)}, "batch": {strconv.Itoa(cmp.Or(o.Batch, 100))}, "leaseSeconds": {strconv.Itoa(seconds)}}
	if o.Group != "" {
		values.Set("consumerGroup", o.Group)
	}
	data, err := c.call(all, ctx, call{method: "GET", path: "/api/v1/pop/queue/" + url.PathEscape(queue) + "?" + values.Encode(), wait: wait, tryFor: forever})
	if err != nil || len(data) == 0 {
		return err
	}
	var batch struct {
		LeaseID  string         `json:"leaseId"`
		Messages []QueueMessage `json:"messages"`
	}
	if err := json.Unmarshal(data, &batch); err != nil {
		return err
	}
	came := time.Now()
	handling, lose := context.WithCancelCause(handle)
	var extending sync.WaitGroup
	extending.Go(func() {
		for expires := came.Add(o.Lease); ; {
			if sleep(handling, o.Lease/3) != nil {
				return
			}
			began := time.Now()
			body := fmt.Appendf(nil, `{"seconds":%d}`, seconds)
			data, err := c.call(handling, handling, call{method: "POST", path: "/api/v1/lease/" + batch.LeaseID + "/extend", body: body, tryFor: o.Lease / 3})
			var answer struct{ Success bool }
			if err == nil && json.Unmarshal(data, &answer) == nil && answer.Success {
				expires = began.Add(o.Lease)
			} else if err == nil || time.Now().After(expires) {
				lose(ErrLeaseLost)
			}
		}
	})
	acks := c.handleBatch(ctx, handling, batch.Messages, handler)
	for i := range acks {
		acks[i]["leaseId"] = batch.LeaseID
	}
	body, err := encode(map[string]any{"consumerGroup": cmp.Or(o.Group, "__QUEUE_MODE__"), "acknowledgments": acks})
	if err != nil {
		return err
	}
	var answer []struct {
		Success bool
		Error   string
	}
	if data, err = c.call(all, all, call{method: "POST", path: "/api/v1/ack/batch", body: body, tryFor: c.config.RetryFor}); err == nil {
		err = json.Unmarshal(data, &answer)
	}
	lose(nil)
	extending.Wait()
	for _, x := range answer {
		if !x.Success && err == nil {
			err = errors.New(x.Error)
		}
	}
	if err != nil {
		c.log.Warn("ferrymq: a batch could not be acked, so it comes again", "queue", queue, "partition", batch.Messages[0].Partition, "error", err)
	}
	return nil
}

// handleBatch returns what to say of the messages, up to the first that is not done.
func (c *Client) handleBatch(ctx, handling context.Context, messages []QueueMessage, handler func(context.Context, QueueMessage) error) (acks []map[string]any) {
	for _, m := range messages {
		ack := map[string]any{"transactionId": m.TransactionID, "partitionId": m.PartitionID, "status": "completed"}
		acks = append(acks, ack)
		err := ErrRelease
		if ctx.Err() == nil {
			err = c.guard(handling, m.ID, func() error { return handler(handling, m) })
		}
		var dead deadLetter
		switch {
		case err == nil:
			continue
		case errors.Is(err, ErrRelease), errors.Is(context.Cause(handling), ErrStopping):
			ack["status"] = "retry"
		case errors.As(err, &dead):
			ack["status"], ack["error"] = "dlq", err.Error()
		default:
			ack["status"], ack["error"] = "failed", err.Error()
		}
		return acks
	}
	return acks
}
