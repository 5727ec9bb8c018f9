package main

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"time"

	"ferrymq/db"
)

// newLogger is the log of a broker, in the format and from the level that the settings say. Until its probe is set it says everything.
func newLogger(c *Config) (*slog.Logger, *calm) {
	o := &slog.HandlerOptions{Level: c.LogLevel}
	var h slog.Handler = slog.NewTextHandler(os.Stderr, o)
	if c.LogFormat == "json" {
		h = slog.NewJSONHandler(os.Stderr, o)
	}
	quiet := &calm{Handler: h, repeats: make(map[string]*repeat)}
	return slog.New(quiet), quiet
}

const (
	// repeatEvery is how often the same complaint is written.
	repeatEvery = 10 * time.Second
	// manyRepeats bounds what is remembered of complaints.
	manyRepeats = 1000
	// probeEvery is the time between two looks whether a database that was lost answers again.
	probeEvery = 200 * time.Millisecond
)

// calm is a log handler for somebody who is on call: a database that is away makes two lines, one when it goes and one when it is back, however
// many operations meet it; and what is wrong a thousand times a second is said once in a while, with how often it was.
type calm struct {
	slog.Handler

	mu      sync.Mutex
	ctx     context.Context             // while it lasts, the database is asked
	probe   func(context.Context) error // whether it answers
	away    time.Time                   // since when it does not, zero: it does
	back    time.Time                   // when it last came back
	unsaid  int                         // complaints about that
	repeats map[string]*repeat
}

// repeat is a complaint that was written.
type repeat struct {
	at     time.Time
	unsaid int // since then
}

// watch begins to hold back, with a probe that says whether the database answers.
func (c *calm) watch(ctx context.Context, probe func(context.Context) error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ctx, c.probe = ctx, probe
}

// Handle writes a record, or counts it.
func (c *calm) Handle(ctx context.Context, r slog.Record) error {
	c.mu.Lock()
	if r.Level < slog.LevelWarn || c.probe == nil {
		c.mu.Unlock()
		return c.Handler.Handle(ctx, r)
	}
	reason, key := about(r)
	if reason.Away {
		defer c.mu.Unlock()
		return c.lost(ctx, r.Time, reason)
	}
	last := c.repeats[key]
	if last != nil && r.Time.Sub(last.at) < repeatEvery {
		last.unsaid++
		c.mu.Unlock()
		return nil
	}
	if last != nil && last.unsaid > 0 {
		r.AddAttrs(slog.Int("times", last.unsaid+1))
	}
	if len(c.repeats) >= manyRepeats {
		clear(c.repeats)
	}
	c.repeats[key] = &repeat{at: r.Time}
	c.mu.Unlock()
	return c.Handler.Handle(ctx, r)
}

// about is the error of a record, and what makes it another complaint than others.
func about(r slog.Record) (reason db.Reason, key string) {
	key = r.Message
	r.Attrs(func(a slog.Attr) bool {
		if x, ok := a.Value.Any().(db.Reason); ok {
			reason = x
		} else if a.Value.Kind() == slog.KindString {
			key += "\n" + a.Value.String()
		}
		return true
	})
	return reason, key
}

func (c *calm) lost(ctx context.Context, at time.Time, reason db.Reason) error {
	if !c.away.IsZero() {
		c.unsaid++
		return nil
	}
	wait := probeEvery
	if at.Sub(c.back) < repeatEvery { // comes and goes
		wait = 10 * probeEvery
	}
	c.away, c.unsaid = at, 0
	time.AfterFunc(wait, c.look)
	r := slog.NewRecord(at, slog.LevelWarn, "no connection to the database, trying again", 0)
	r.Add("error", reason)
	return c.Handler.Handle(ctx, r)
}

// look says that the database is back, or comes again.
func (c *calm) look() {
	err := c.probe(c.ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil {
		return
	}
	if err != nil {
		time.AfterFunc(probeEvery, c.look)
		return
	}
	r := slog.NewRecord(time.Now(), slog.LevelInfo, "the database answers again", 0)
	r.Add("after", time.Since(c.away).Round(time.Millisecond), "failures", c.unsaid+1)
	c.away, c.back = time.Time{}, time.Now()
	_ = c.Handler.Handle(context.Background(), r)
}
