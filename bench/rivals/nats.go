package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"sync"
	"syscall"
	"time"

	natsd "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// natsServer is NATS in a process of its own: JetStream that syncs before it answers.
func natsServer(dir string) error {
	conf := filepath.Join(dir, "nats.conf")
	text := fmt.Sprintf("listen: 127.0.0.1:%s\njetstream { store_dir: %q, sync_interval: always, max_file_store: 50GB }\n", os.Getenv("NATS_PORT"), dir)
	if err := os.WriteFile(conf, []byte(text), 0o644); err != nil {
		return err
	}
	opts, err := natsd.ProcessConfigFile(conf)
	if err != nil {
		return err
	}
	if !opts.SyncAlways {
		return errors.New("sync_interval: always was not taken")
	}
	s, err := natsd.NewServer(opts)
	if err != nil {
		return err
	}
	s.ConfigureLogger()
	s.Start()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	<-stop
	s.Shutdown()
	s.WaitForShutdown()
	return nil
}

type natsQueue struct {
	p     *process
	url   string
	queue int
	conn  *nats.Conn
	js    jetstream.JetStream
	in    jetstream.Consumer
}

func startNATS(ctx context.Context, _ *config, dir string) (server, string, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, "", err
	}
	port := freePort()
	q := &natsQueue{url: "nats://127.0.0.1:" + port}
	if q.p, err = start(dir, "nats", []string{"NATS_PORT=" + port}, self, "nats-server", dir); err != nil {
		return nil, "", err
	}
	err = q.p.until(ctx, func() (err error) {
		q.conn, err = nats.Connect(q.url)
		return err
	})
	if err == nil {
		q.js, err = jetstream.New(q.conn)
	}
	if err != nil {
		q.stop()
		return nil, "", err
	}
	return q, version("github.com/nats-io/nats-server/v2") + ", JetStream", nil
}

func (q *natsQueue) stop() {
	if q.conn != nil {
		q.conn.Close()
	}
	q.p.stop()
}

func (q *natsQueue) order() order { return perConsumer }

func (q *natsQueue) name() string { return "rivals-" + strconv.Itoa(q.queue) }

func (q *natsQueue) fresh(ctx context.Context) error {
	if q.queue > 0 {
		if err := q.js.DeleteStream(ctx, q.name()); err != nil {
			return err
		}
	}
	q.queue++
	_, err := q.js.CreateStream(ctx, jetstream.StreamConfig{Name: q.name(), Subjects: []string{q.name() + ".*"},
		Storage: jetstream.FileStorage, AllowAtomicPublish: true})
	if err != nil {
		return err
	}
	q.in, err = q.js.CreateConsumer(ctx, q.name(), jetstream.ConsumerConfig{Durable: "all", AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: time.Minute, MaxAckPending: 10000})
	return err
}

type natsProducer struct {
	conn  *nats.Conn
	js    jetstream.JetStream
	queue string
	n     int
}

func (q *natsQueue) producer(context.Context) (producer, error) {
	conn, err := nats.Connect(q.url)
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(conn)
	return &natsProducer{conn: conn, js: js, queue: q.name()}, err
}

func (p *natsProducer) close() { p.conn.Close() }

// push sends several messages as one atomic batch, which NATS stores and syncs together: message by message it is several times slower.
func (p *natsProducer) push(ctx context.Context, part int, payloads [][]byte) error {
	subject := p.queue + "." + strconv.Itoa(part)
	if len(payloads) == 1 {
		_, err := p.js.Publish(ctx, subject, payloads[0])
		return err
	}
	p.n++
	batch := fmt.Sprintf("%p-%d", p, p.n)
	for i, b := range payloads {
		m := &nats.Msg{Subject: subject, Data: b, Header: nats.Header{"Nats-Batch-Id": {batch}, "Nats-Batch-Sequence": {strconv.Itoa(i + 1)}}}
		if i < len(payloads)-1 {
			if i == 0 { // the first is answered, with nothing or with why not
				if answer, err := p.conn.RequestMsgWithContext(ctx, m); err != nil || len(answer.Data) > 0 {
					return fmt.Errorf("batch: %w %s", err, answer.Data)
				}
				continue
			}
			if err := p.conn.PublishMsg(m); err != nil {
				return err
			}
			continue
		}
		m.Header.Set("Nats-Batch-Commit", "1")
		answer, err := p.conn.RequestMsgWithContext(ctx, m)
		if err != nil {
			return err
		}
		var a struct {
			Count int             `json:"count"`
			Error json.RawMessage `json:"error"`
		}
		if err := json.Unmarshal(answer.Data, &a); err != nil || a.Count != len(payloads) {
			return fmt.Errorf("batch: %s", answer.Data)
		}
	}
	return nil
}

// consume acks each message, and waits for the answer to the last ack of what it fetched.
func (q *natsQueue) consume(ctx context.Context, consumers, batch int, k *checker) error {
	var wg sync.WaitGroup
	errs := make(chan error, consumers)
	for n := range consumers {
		conn, err := nats.Connect(q.url)
		if err != nil {
			return err
		}
		defer conn.Close()
		js, err := jetstream.New(conn)
		if err != nil {
			return err
		}
		in, err := js.Consumer(ctx, q.name(), "all")
		if err != nil {
			return err
		}
		wg.Go(func() {
			if err := natsConsumer(ctx, in, n, batch, k); err != nil && ctx.Err() == nil {
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

func natsConsumer(ctx context.Context, consumer jetstream.Consumer, n, batch int, k *checker) error {
	messages, err := consumer.Messages(jetstream.PullMaxMessages(batch))
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, messages.Stop)()
	in := make(chan jetstream.Msg, batch)
	failed := make(chan error, 1)
	go func() {
		defer close(in)
		for {
			m, err := messages.Next()
			if errors.Is(err, jetstream.ErrMsgIteratorClosed) {
				return
			}
			if err != nil {
				failed <- err
				return
			}
			in <- m
		}
	}()
	defer func() { // the reader must not be left with a message nobody takes
		messages.Stop()
		for range in {
		}
	}()
	for m := range in {
		got := gather(m, in, batch)
		payloads := make([][]byte, len(got))
		for i := range got {
			payloads[i] = got[i].Data()
		}
		ms := k.delivered(n, payloads...)
		for _, m := range got[:len(got)-1] {
			if err := m.Ack(); err != nil {
				return err
			}
		}
		if err := got[len(got)-1].DoubleAck(ctx); err != nil {
			return err
		}
		k.acked(ms)
	}
	select {
	case err := <-failed:
		return err
	default:
		return nil
	}
}

// version is that of a module this program was built with.
func version(module string) string {
	info, _ := debug.ReadBuildInfo()
	for _, m := range info.Deps {
		if m.Path == module {
			return m.Version
		}
	}
	return ""
}
