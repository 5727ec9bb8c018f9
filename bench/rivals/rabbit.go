package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	amqp "github.com/rabbitmq/amqp091-go"
)

type rabbit struct {
	epmd, p *process
	url     string
	queue   int
}

// startRabbit runs a node of its own, whatever else is installed as a service: own name, ports, data, and port mapper.
func startRabbit(ctx context.Context, _ *config, dir string) (server, string, error) {
	found, err := filepath.Glob("/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server")
	if err != nil || len(found) == 0 {
		return nil, "", fmt.Errorf("no rabbitmq-server: apt-get install rabbitmq-server (%v)", err)
	}
	epmd, err := exec.LookPath("epmd")
	if err != nil {
		return nil, "", err
	}
	port, mapper := freePort(), freePort()
	for name, text := range map[string]string{
		"rabbitmq.conf":   "listeners.tcp.1 = 127.0.0.1:" + port + "\nlog.console = false\n",
		"advanced.config": "[].\n",
		"plugins":         "[].\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return nil, "", err
		}
	}
	r := &rabbit{url: "amqp://guest:guest@127.0.0.1:" + port}
	if r.epmd, err = start(dir, "epmd", nil, epmd, "-address", "127.0.0.1", "-port", mapper); err != nil {
		return nil, "", err
	}
	r.p, err = start(dir, "rabbitmq", []string{"HOME=" + dir, "ERL_EPMD_PORT=" + mapper, "ERL_EPMD_ADDRESS=127.0.0.1",
		"RABBITMQ_NODENAME=rivals@localhost", "RABBITMQ_NODE_PORT=" + port, "RABBITMQ_DIST_PORT=" + freePort(),
		"RABBITMQ_CONFIG_FILE=" + dir + "/rabbitmq.conf", "RABBITMQ_ADVANCED_CONFIG_FILE=" + dir + "/advanced.config",
		"RABBITMQ_ENABLED_PLUGINS_FILE=" + dir + "/plugins", "RABBITMQ_MNESIA_BASE=" + dir, "RABBITMQ_LOG_BASE=" + dir,
		"RABBITMQ_PID_FILE=" + dir + "/pid", "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1}"}, found[len(found)-1])
	if err != nil {
		r.epmd.stop()
		return nil, "", err
	}
	err = r.p.until(ctx, func() error {
		c, err := amqp.Dial(r.url)
		if err == nil {
			_ = c.Close()
		}
		return err
	})
	if err != nil {
		r.stop()
		return nil, "", err
	}
	_, v, _ := strings.Cut(filepath.Base(filepath.Dir(filepath.Dir(found[len(found)-1]))), "-")
	return r, v + ", quorum queue", nil
}

func (r *rabbit) stop() {
	r.p.stop()
	r.epmd.stop()
}

func (r *rabbit) order() order { return perConsumer }

func (r *rabbit) name() string { return "rivals-" + strconv.Itoa(r.queue) }

// open is a connection with one channel, as each producer and consumer has.
func (r *rabbit) open() (*amqp.Connection, *amqp.Channel, error) {
	conn, err := amqp.Dial(r.url)
	if err != nil {
		return nil, nil, err
	}
	ch, err := conn.Channel()
	if err != nil {
		_ = conn.Close()
	}
	return conn, ch, err
}

func (r *rabbit) fresh(context.Context) error {
	conn, ch, err := r.open()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if r.queue > 0 {
		if _, err := ch.QueueDelete(r.name(), false, false, false); err != nil {
			return err
		}
	}
	r.queue++
	_, err = ch.QueueDeclare(r.name(), true, false, false, false, amqp.Table{"x-queue-type": "quorum"})
	return err
}

type rabbitProducer struct {
	conn  *amqp.Connection
	ch    *amqp.Channel
	queue string
	wait  []*amqp.DeferredConfirmation
}

func (r *rabbit) producer(context.Context) (producer, error) {
	conn, ch, err := r.open()
	if err != nil {
		return nil, err
	}
	return &rabbitProducer{conn: conn, ch: ch, queue: r.name()}, ch.Confirm(false)
}

func (p *rabbitProducer) close() { _ = p.conn.Close() }

func (p *rabbitProducer) push(ctx context.Context, _ int, payloads [][]byte) error {
	p.wait = p.wait[:0]
	for _, b := range payloads {
		d, err := p.ch.PublishWithDeferredConfirmWithContext(ctx, "", p.queue, true, false, amqp.Publishing{DeliveryMode: amqp.Persistent, Body: b})
		if err != nil {
			return err
		}
		p.wait = append(p.wait, d)
	}
	for _, d := range p.wait {
		if ok, err := d.WaitContext(ctx); err != nil || !ok {
			return fmt.Errorf("not confirmed: %w", err)
		}
	}
	return nil
}

// consume acks what came with one frame per batch. RabbitMQ does not answer an ack, so it counts when it is sent.
func (r *rabbit) consume(ctx context.Context, consumers, batch int, k *checker) error {
	var wg sync.WaitGroup
	errs := make(chan error, consumers)
	for n := range consumers {
		conn, ch, err := r.open()
		if err != nil {
			return err
		}
		defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
		if err := ch.Qos(batch, 0, false); err != nil {
			return err
		}
		in, err := ch.ConsumeWithContext(ctx, r.name(), "", false, false, false, false, nil)
		if err != nil {
			return err
		}
		wg.Go(func() {
			for d := range in {
				ds := gather(d, in, batch)
				payloads := make([][]byte, len(ds))
				for i := range ds {
					payloads[i] = ds[i].Body
				}
				ms := k.delivered(n, payloads...)
				if err := ds[len(ds)-1].Ack(true); err != nil {
					if ctx.Err() == nil {
						errs <- err
					}
					return
				}
				k.acked(ms)
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
