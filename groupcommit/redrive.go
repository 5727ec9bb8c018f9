package groupcommit

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/segment"
)

// Redrive says which dead letter goes back into a queue: that of an id, or the newest of an address.
type Redrive struct {
	ID            uuid.UUID
	Partition     uuid.UUID // with TransactionID, when ID is zero
	TransactionID string
	Queue, Name   *string // queue and partition to go to; nil: where it came from
}

// Redriven is what became of a dead letter.
type Redriven struct {
	ID                      uuid.UUID
	Queue, Partition, Group string // where it came from
	TransactionID           string // of the message that failed

	ToQueue string
	To      *catalog.Row
	NewID   string // its transaction id from now on: dlq: and the id of the dead letter
	Pushed         // a duplicate: a producer pushed that id itself, and the dead letter is still there

	from uuid.UUID
}

var (
	// ErrNoDeadLetter: there is none by that name, or somebody else has just taken it.
	ErrNoDeadLetter = errors.New("no such dead letter")
	// ErrUnreadable: what is stored cannot be opened with the keys of this broker.
	ErrUnreadable = errors.New("decryption failed")
	// ErrNoMessage: no message by that name is near the cursor.
	ErrNoMessage = errors.New("no such message")
	// ErrNotNext: the message is not the next one of that group.
	ErrNotNext = errors.New("message is not next in line for this group")

	errTwice = errors.New("pushed by a producer")
)

// Redrive moves a dead letter back into a queue, at the tail, in one transaction: whatever runs at the same time, there is one copy.
func (e *Engine) Redrive(ctx context.Context, r *Redrive) (*Redriven, error) {
	out, err := e.findDead(ctx, r)
	if err != nil {
		return nil, err
	}
	out.ToQueue, out.NewID = out.Queue, "dlq:"+out.ID.String()
	name := out.Partition
	if r.Queue != nil {
		out.ToQueue = *r.Queue
	}
	if r.Name != nil {
		name = *r.Name
	}
	for range maxTries {
		q, err := e.Catalog.EnsureQueue(ctx, out.ToQueue)
		if err != nil {
			return nil, e.Unavailable(err)
		}
		p, err := e.destination(ctx, r, q, out.from, name)
		if err != nil {
			return nil, e.Unavailable(err)
		}
		if p == nil {
			return nil, ErrNoDeadLetter // its partition went with its queue
		}
		c := &cargo{e: e}
		push := c.load(q, p, make([]segment.Message, 1))
		n := c.entries[0]
		n.keyed = true
		err = e.inTurn(ctx, c.keys(), func(ctx context.Context, q *db.Queries) error { return c.redrive(ctx, q, out, &push.Messages[0]) })
		switch {
		case err == nil:
			c.remember()
			c.announce()
			out.To, out.Pushed = n.row, push.Results[0]
			return out, nil
		case errors.Is(err, errTwice):
			out.To = n.row
			return out, nil
		case errors.Is(err, errMoved):
			c.forget()
			e.Catalog.ForgetQueue(out.ToQueue)
		case errors.Is(err, ErrNoDeadLetter), errors.Is(err, ErrUnreadable), errors.Is(err, ErrNoKey):
			return nil, err
		default:
			return nil, e.Unavailable(err)
		}
	}
	return nil, errMoved
}

// destination is the partition that a dead letter goes to: its own one, which a name need not reach, unless another place is named.
func (e *Engine) destination(ctx context.Context, r *Redrive, q *catalog.Queue, from uuid.UUID, name string) (*catalog.Partition, error) {
	if r.Queue == nil && r.Name == nil {
		found, err := e.Catalog.Public(ctx, []uuid.UUID{from})
		return found[from], err
	}
	found, err := e.Catalog.Partitions(ctx, q, []string{name})
	if err != nil {
		return nil, err
	}
	return found[0], nil
}

func (e *Engine) findDead(ctx context.Context, r *Redrive) (*Redriven, error) {
	var d db.DeadLetterGetRow
	var err error
	if r.ID != (uuid.UUID{}) {
		d, err = e.q.DeadLetterGet(ctx, db.DeadLetterGetParams{ProjectID: e.Project, ID: r.ID})
	} else {
		var n db.DeadLetterNewestRow
		n, err = e.q.DeadLetterNewest(ctx, db.DeadLetterNewestParams{ProjectID: e.Project, PublicID: r.Partition, TransactionID: r.TransactionID})
		d = db.DeadLetterGetRow(n)
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrNoDeadLetter
	}
	if err != nil {
		return nil, e.Unavailable(err)
	}
	return &Redriven{ID: d.ID, Queue: d.Queue, Partition: d.Partition, Group: d.ConsumerGroup, TransactionID: d.TransactionID, from: d.PublicID}, nil
}

// redrive is the transaction: the dead letter goes, and its message is appended. The row comes first, so that those who are too
// late wait without holding the partition.
func (c *cargo) redrive(ctx context.Context, q *db.Queries, out *Redriven, m *segment.Message) error {
	d, err := q.DeadLetterTake(ctx, db.DeadLetterTakeParams{ID: out.ID})
	if errors.Is(err, pgx.ErrNoRows) {
		return ErrNoDeadLetter
	}
	if err != nil {
		return err
	}
	open, err := segment.Decode(c.e.Keys, d.Codec, d.KeyNo, d.MessageID, 1, d.Frames)
	if err != nil {
		c.e.Log.Error("a dead letter cannot be read", "id", out.ID, "error", db.Text(err))
		return ErrUnreadable
	}
	*m = open.At(0)
	m.TransactionID = out.NewID
	n := c.entries[0]
	n.pushes[0].hash(c.e.Hasher)
	if err := c.lock(ctx, q); err != nil {
		return err
	}
	if twice, err := c.duplicate(ctx, q); err != nil {
		return err
	} else if twice != nil {
		at, err := q.PartitionLock(ctx, db.PartitionLockParams{ID: n.row.ID})
		if err != nil {
			return err
		}
		known, err := c.e.confirm(ctx, q, n, at.FirstOffset)
		out.Pushed = known[segment.Key(n.pushes[0].keys)]
		return cmp.Or(err, errTwice)
	}
	if err := c.store(ctx, q, noCursors()); err != nil {
		return err
	}
	if len(c.stored) == 0 {
		return ErrNoKey
	}
	return nil
}

// BuryHead makes a dead letter of a live message by hand, for one group: only of the head of what that group has left.
// A group that has never been to the partition begins at its oldest message.
func (e *Engine) BuryHead(ctx context.Context, partition uuid.UUID, transactionID, group, text string) (id uuid.UUID, err error) {
	text = Clip(text)
	for range maxTries {
		found, err := e.Catalog.Public(ctx, []uuid.UUID{partition})
		if err != nil {
			return id, e.Unavailable(err)
		}
		b := &burial{cargo: cargo{e: e}, transactionID: transactionID, text: text}
		p := found[partition]
		if p != nil {
			b.partition, b.row = p, p.Row()
		}
		if b.row == nil || b.row.PublicID != partition {
			return id, ErrNoMessage
		}
		b.also, b.alsoRow = []*catalog.Partition{p}, []*catalog.Row{b.row}
		if b.group, err = e.Catalog.Group(ctx, p.QueueID, group); err == nil {
			err = e.inTurn(ctx, b.keys(), b.run)
			if err != nil && b.locked { // pops have passed over it
				e.announce([]Hint{{Queue: p.QueueID, Partition: b.row.ID}}, nil)
			}
		}
		switch {
		case err == nil:
			// Released, leased or not: what a backoff held back may go now.
			e.settled(&settle{group: b.group, partition: p, row: b.row}, db.SettleCursorsRow{Outcome: outFiled, Committed: b.committed, Released: true, Pending: b.pending, DueMs: -1})
			return b.copy.id, nil
		case errors.Is(err, errUnmet):
			// It is the head, so the group gets its cursor, as if it had popped this partition.
			e.Catalog.ForgetGroup(p.QueueID, group)
			_, err = e.Catalog.Meet(ctx, &catalog.Queue{ID: p.QueueID}, p, group, catalog.All(), false, time.Now().Add(e.StatementTimeout))
			if errors.Is(err, catalog.ErrGone) {
				return id, ErrNoMessage
			}
			if err != nil {
				return id, e.Unavailable(err)
			}
		case errors.Is(err, errMoved):
			b.forget()
		case errors.Is(err, ErrNotNext), errors.Is(err, ErrNoMessage), errors.Is(err, ErrUnreadable):
			return id, err
		default:
			return id, e.Unavailable(err)
		}
	}
	return id, errMoved
}

// errUnmet: the message is the head, but the group has no cursor on the partition yet.
var errUnmet = errors.New("the group has not been to the partition")

// burial is one try of BuryHead.
type burial struct {
	cargo
	partition           *catalog.Partition
	row                 *catalog.Row
	group               *catalog.Group // nil: there is none yet
	transactionID, text string

	locked    bool // it has had the cursor locked
	copy      *deadCopy
	committed int64
	pending   bool
}

func (b *burial) run(ctx context.Context, q *db.Queries) error {
	if err := b.lock(ctx, q); err != nil {
		return err
	}
	if _, err := q.QueueRead(ctx, db.QueueReadParams{ID: b.partition.QueueID}); errors.Is(err, pgx.ErrNoRows) {
		return ErrNoMessage
	} else if err != nil {
		return err
	}
	var at db.CursorLockRow
	unmet := b.group == nil
	if !unmet {
		var err error
		at, err = q.CursorLock(ctx, db.CursorLockParams{GroupID: b.group.ID, PartitionID: b.row.ID})
		if unmet = errors.Is(err, pgx.ErrNoRows); err != nil && !unmet {
			return err
		}
		b.locked = !unmet
	}
	// The ids of removed messages may still be known; they are in front of nothing.
	p, err := q.PartitionLock(ctx, db.PartitionLockParams{ID: b.row.ID})
	if err != nil {
		return err
	}
	c := &cursor{committed: max(at.Committed, p.FirstOffset), end: -1}
	if err := c.read(ctx, q, b.row, p.NextOffset); err != nil {
		return err
	}
	head, ok := c.find(b.e.Hasher, b.transactionID, c.committed)
	if !ok {
		if _, ok := c.find(b.e.Hasher, b.transactionID, p.FirstOffset); ok { // passed already
			return ErrNotNext
		}
		return ErrNoMessage
	}
	if head != c.head() {
		return ErrNotNext
	}
	if unmet {
		return errUnmet
	}
	b.copy, err = b.e.copyOf(ctx, q, b.row, head)
	if errors.Is(err, ErrDeadRejected) { // it is there, so it cannot be read
		return ErrUnreadable
	}
	if err != nil {
		return err
	}
	failures := int32(0)
	if at.FailedOffset != nil && *at.FailedOffset == head {
		failures = at.Failures
	}
	b.committed = head + 1
	b.pending, err = q.DeadLetterHead(ctx, db.DeadLetterHeadParams{GroupID: b.group.ID, PartitionID: b.row.ID, Committed: b.committed, MessageOffset: head, ID: b.copy.id,
		MessageID: b.copy.messageID, TransactionID: b.copy.transactionID, KeyNo: b.copy.keyNo, Codec: b.copy.codec, Frames: b.copy.frames, ErrorMessage: b.text,
		RetryCount: failures, MessageCreatedAt: b.copy.createdAt})
	if errors.Is(err, pgx.ErrNoRows) {
		return ErrNoMessage
	}
	return err
}

// find is the lowest offset of an id, from some offset on.
func (c *cursor) find(h segment.Hasher, id string, from int64) (int64, bool) {
	f := finder{hasher: h, parts: c.parts, from: from, to: c.committed + ackWindow}
	return f.next(id)
}

// head is the lowest offset above the cursor that is still stored, or -1.
func (c *cursor) head() int64 {
	for _, p := range c.parts {
		if p.base+int64(p.count) > c.committed {
			return max(p.base, c.committed)
		}
	}
	return -1
}
