package catalog

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"ferrymq/db"
)

// ErrTaken means that a subscription of that name is bound to another stream, or starts elsewhere.
var ErrTaken = errors.New("subscription exists otherwise")

func policyOf(r *db.SubscriptionGetRow) *Policy {
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
	g := &Group{ID: row.ID, QueueID: row.QueueID, Name: row.Name, Registered: true, Start: Start{Mode: row.StartMode, At: &row.StartAt}, Lanes: policyOf(&row), project: c.project}
	if !row.Seeded {
		g.seeding = c.seed(g)
	}
	c.subscriptions.set(c.scoped(sub), g)
	return g, nil
}

// ForgetSubscription drops one that turned out to be changed or gone.
func (c *Catalog) ForgetSubscription(sub string) { c.subscriptions.drop(c.scoped(sub)) }

// Subscribe creates a subscription of a stream, or changes the policy of one that exists. change gets the policy as it is.
// ErrTaken: the name is bound to another stream. ErrGone: the stream was deleted.
func (c *Catalog) Subscribe(ctx context.Context, q *Queue, sub string, start Start, change func(*Policy) error) (*Group, error) {
	err := pgx.BeginFunc(ctx, db.Patient{Pool: c.pool}, func(tx pgx.Tx) error {
		tq := c.q.WithTx(tx)
		if _, err := tq.QueueLock(ctx, db.QueueLockParams{ID: q.ID}); err != nil {
			return err
		}
		id, err := tq.SubscriptionCreate(ctx, db.SubscriptionCreateParams{QueueID: q.ID, ProjectID: c.project, Name: sub, StartMode: start.Mode, StartAt: start.At})
		made := err == nil
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		row, err := tq.SubscriptionGet(ctx, db.SubscriptionGetParams{ProjectID: c.project, Name: sub})
		if errors.Is(err, pgx.ErrNoRows) || err == nil && row.QueueID != q.ID {
			return ErrTaken
		}
		if err != nil {
			return err
		}
		p := policyOf(&row)
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
		return tq.SubscriptionSet(ctx, db.SubscriptionSetParams{ID: row.ID, LeaseSeconds: p.LeaseSeconds, MaxAttempts: p.MaxAttempts, BackoffInitial: p.Initial.Milliseconds(),
			BackoffMultiplier: p.Multiplier, BackoffMax: p.Max.Milliseconds(), CountExpiredLeases: p.CountExpired, MaxInFlight: p.MaxInFlight, Paused: p.Paused, TraceFull: p.TraceFull})
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
