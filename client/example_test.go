package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os/signal"
	"syscall"
	"time"

	"ferrymq/client"
)

// Publishing and handling messages until a signal comes.
func Example() {
	c, err := client.New(client.Config{URLs: []string{address}}) // such as http://127.0.0.1:6632
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()

	subscription := map[string]any{"stream": "letters", "retry": map[string]any{"initial": "100ms"}}
	if err := c.Call(ctx, "PUT", "/v1/subscriptions/mail", subscription, nil); err != nil {
		log.Fatal(err)
	}
	if _, err := c.Publish(ctx, "letters",
		client.Outgoing{Key: "ada", Payload: "first"},
		client.Outgoing{Key: "ada", Payload: "second"}); err != nil {
		log.Fatal(err)
	}
	err = c.Receive(ctx, "mail", client.ReceiveOptions{}, func(ctx context.Context, m client.Message) error {
		var text string
		if err := json.Unmarshal(m.Payload, &text); err != nil {
			return err // and after as many attempts as the subscription says, it is a dead letter
		}
		if text == "first" && m.Attempt == 1 {
			return errors.New("mailbox is full")
		}
		fmt.Println(m.Key, text)
		if text == "second" {
			stop()
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// ada first
	// ada second
}

// A message with all that it can have. Published again with the same id, it is stored once.
func ExampleClient_Publish() {
	c, err := client.New(client.Config{URLs: []string{address}})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	for range 2 {
		results, err := c.Publish(context.Background(), "invoices", client.Outgoing{
			Key:     "customer-7",
			ID:      "invoice-2026-17",
			Headers: map[string]any{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
			Payload: map[string]any{"cents": 1200},
		})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("there already:", results[0].Duplicate)
	}
	// Output:
	// there already: false
	// there already: true
}

// Batches of a queue: in order within a partition, acked together.
func ExampleClient_Pop() {
	c, err := client.New(client.Config{URLs: []string{address}})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for n := 1; n <= 3; n++ {
		if _, err := c.Push(ctx, client.Item{Queue: "orders", Partition: "customer-7", Payload: n}); err != nil {
			log.Fatal(err)
		}
	}
	err = c.Pop(ctx, "orders", client.PopOptions{Group: "billing"}, func(ctx context.Context, m client.QueueMessage) error {
		fmt.Println("order", string(m.Payload))
		if string(m.Payload) == "3" {
			cancel()
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// order 1
	// order 2
	// order 3
}
