package catalog

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"ferrymq/db"
)

// What is fixed when a subscription is created.
var (
	// ErrTaken means that a subscription of that name is bound to another stream.
	ErrTaken = errors.New("the subscription is of another stream")
	// ErrStarted means that a subscription starts elsewhere.
	ErrStarted = errors.New("the subscription starts elsewhere")
)

// DefaultPolicy is that of a subscription that says nothing.
func DefaultPolicy() Policy {
	return Policy{LeaseSeconds: 30, MaxAttempts: 10, Initial: time.Second, Max: 10 * time.Minute, Multiplier: 2, CountExpired: true}
}

// SubscriptionRow is a subscription as it is stored.
type SubscriptionRow = db.SubscriptionGetRow

// ReadSubscription reads a subscription, whatever is remembered of it; nil when there is none.
func (c *Catalog) ReadSubscription(ctx context.Context, sub string) (*SubscriptionRow, error) {
	row, err := c.q.SubscriptionGet(ctx, db.SubscriptionGetParams{ProjectID: c.project, Name: sub})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return &row, err
}

// Subscriptions reads the next subscriptions of the project, in order of their names.
func (c *Catalog) Subscriptions(ctx context.Context, after string, max int64) ([]SubscriptionRow, error) {
	rows, err := c.q.SubscriptionPage(ctx, db.SubscriptionPageParams{ProjectID: c.project, After: after, Max: max})
	all := make([]SubscriptionRow, len(rows))
	for i, r := range rows {
		all[i] = SubscriptionRow(r)
	}
	return all, err
}

// Streams reads the next queues of the project, in order of their names.
func (c *Catalog) Streams(ctx context.Context, after string, max int64) ([]db.StreamPageRow, error) {
	return c.q.StreamPage(ctx, db.StreamPageParams{ProjectID: c.project, After: after, Max: max})
}

// PolicyOf is how a stored subscription is delivered.
func PolicyOf(r *db.SubscriptionGetRow) *Policy {
	return &Policy{Stream: r.Queue, LeaseSeconds: r.LeaseSeconds, MaxAttempts: r.MaxAttempts, Initial: time.Duration(r.BackoffInitial) * time.Millisecond,
		Max: time.Duration(r.BackoffMax) * time.Millisecond, Multiplier: r.BackoffMultiplier, CountExpired: r.CountExpiredLeases,
		MaxInFlight: r.MaxInFlight, Paused: r.Paused, TraceFull: r.TraceFull}
}

// Subscription finds a subscription by name; nil when there is none.
func (c *Catalog) Subscription(ctx context.Context, sub string) (*Group, error) {
	if g, ok := c.subscriptions.get(c.scoped(sub)); ok {
		return g, nil
	}
	row, err := c.q.SubscriptionGet(ctx, db.SubscriptionGetParams{ProjectID: c.project, Name: sub})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	g := &Group{ID: row.ID, QueueID: row.QueueID, Name: row.Name, Registered: true, Start: Start{Mode: row.StartMode, At: &row.StartAt}, Lanes: PolicyOf(&row), Project: c.project}
	if !row.Seeded {
		g.seeding = c.seed(g)
	}
	c.subscriptions.set(c.scoped(sub), g)
	return g, nil
}

// ForgetSubscription drops one that turned out to be changed or gone.
func (c *Catalog) ForgetSubscription(sub string) { c.subscriptions.drop(c.scoped(sub)) }

// Subscribe creates a subscription of a stream, or changes the policy of one that exists. change gets the policy as it is.
// start nil: wherever it starts; a new one with the oldest message.
// ErrTaken, ErrStarted: there is one that does not fit. ErrGone: the stream was deleted.
func (c *Catalog) Subscribe(ctx context.Context, q *Queue, sub string, start *Start, change func(*Policy) error) (*Group, error) {
	err := c.retried(ctx, func(tq *db.Queries) error {
		if _, err := tq.QueueLock(ctx, db.QueueLockParams{ID: q.ID}); err != nil {
			return err
		}
		begin := All()
		if start != nil {
			begin = *start
		}
		id, err := tq.SubscriptionCreate(ctx, db.SubscriptionCreateParams{QueueID: q.ID, ProjectID: c.project, Name: sub, StartMode: begin.Mode, StartAt: begin.At})
		made := err == nil
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		row, err := tq.SubscriptionGet(ctx, db.SubscriptionGetParams{ProjectID: c.project, Name: sub})
		if err == nil && row.QueueID != q.ID {
			return ErrTaken
		} // no row: of a stream that is being deleted, which is about to free the name
		if err != nil {
			return err
		}
		if start != nil && (start.Mode != row.StartMode || start.Mode == "time" && !start.At.Truncate(time.Microsecond).Equal(row.StartAt)) {
			return ErrStarted
		}
		p := PolicyOf(&row)
		before := p.MaxInFlight
		if err := change(p); err != nil {
			return err
		}
		if made {
			if err := tq.JobCreate(ctx, db.JobCreateParams{Kind: "seed", QueueID: q.ID, GroupID: &id, DelaySeconds: 10}); err != nil {
				return err
			}
		}
		// Other brokers read it again with the stream.
		if err := tq.QueueTouch(ctx, db.QueueTouchParams{ID: q.ID}); err != nil {
			return err
		}
		if err := tq.SubscriptionSet(ctx, db.SubscriptionSetParams{ID: row.ID, LeaseSeconds: p.LeaseSeconds, MaxAttempts: p.MaxAttempts, BackoffInitial: p.Initial.Milliseconds(),
			BackoffMultiplier: p.Multiplier, BackoffMax: p.Max.Milliseconds(), CountExpiredLeases: p.CountExpired, MaxInFlight: p.MaxInFlight, Paused: p.Paused, TraceFull: p.TraceFull}); err != nil || before > 0 || p.MaxInFlight == 0 {
			return err
		}
		return tq.SubscriptionRecount(ctx, db.SubscriptionRecountParams{ID: row.ID})
	})
	c.ForgetSubscription(sub)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrGone
	}
	if err != nil {
		return nil, err
	}
	return c.Subscription(ctx, sub)
}

// retried runs a transaction again that lost a deadlock: who changes a subscription holds its stream while he waits for its seeder,
// who waits for a partition, whose holder may wait for the stream. fn may run several times.
func (c *Catalog) retried(ctx context.Context, fn func(q *db.Queries) error) error {
	for tries := 0; ; tries++ {
		err := pgx.BeginFunc(ctx, db.Patient{Pool: c.pool}, func(tx pgx.Tx) error { return fn(c.q.WithTx(tx)) })
		if !db.IsRetryable(err) || tries == 5 {
			return err
		}
	}
}
