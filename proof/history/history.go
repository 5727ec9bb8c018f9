// Package history judges what clients of a broker saw.
//
// A [Log] holds what they did: the times at which each request began and its answer had been read, and what the answer said; for a request
// without an answer nobody knows what it did. [Log.Check] compares this with what FerryMQ promises, and reports only what cannot be true
// whatever happened inside the calls: of two calls nothing is known about the order unless one ended before the other began, and a lease
// is live for sure only from the answer that brought it until the first request that may have ended it.
//
// It knows both APIs: a queue of /api/v1 and its groups, where a lease is on a batch of one partition, and a stream of /v1 and its
// subscriptions, where it is on one message of one key.
package history

import (
	"sync"
	"time"
)

// Outcome is what a client knows of its request.
type Outcome uint8

// What an answer says.
const (
	OK      Outcome = iota
	Refused         // answered: it changed nothing
	Unknown         // no answer, or one that leaves it open
)

// Lane is a partition of a queue, or a key of a stream. A message without a key, of which no order is promised, has a lane for itself.
type Lane struct{ Queue, Key string }

// Send is one message of one request that pushes or publishes. A client that repeats a request records it again.
type Send struct {
	Start, End time.Time
	Lane       Lane
	Call       int64  // of the request, the same for its repeats
	Index      int    // in the request
	Payload    string // names the message: no other of the lane has it
	Outcome    Outcome
	Duplicate  bool   // answered so
	Message    string // the id that was answered
}

// Delivery is one message of an answer. A lease that covers several messages of a lane has a Delivery for each.
type Delivery struct {
	Start, End time.Time
	From       time.Time // when the lease began at the earliest, if more is known than Start
	Group      string
	Lane       Lane
	Lease      string
	Length     time.Duration // of the lease
	Index      int           // in the answer
	Message    string
	Payload    string
	Attempt    int // of /v1
}

// Kind is what a settle does.
type Kind uint8

// The kinds. Failed counts against the message, Released does not.
const (
	Acked Kind = iota
	Failed
	Released
	Extended
)

// Settle is what one request did to one lease.
type Settle struct {
	Start, End time.Time
	Group      string
	Lane       Lane
	Lease      string
	Kind       Kind
	Outcome    Outcome       // Refused: as late
	Payload    string        // of the message that is Failed
	Done       []string      // payloads of messages that cannot come again if this was accepted
	Ends       bool          // it may end the lease
	Extend     time.Duration // of Extended
}

// Lost is a request for messages whose answer nobody got: it may have taken one message of each lane, in vain.
type Lost struct {
	Start time.Time
	Group string
}

// Move is a request that puts messages back, or ends leases: until its end is known it may do so at any time.
type Move struct {
	Start, End time.Time
	Outcome    Outcome
	Group      string // of this one only; "": of all of Queue
	Queue      string
	Again      bool     // everything comes again that was settled: a seek to the beginning
	Redriven   []string // payloads of dead letters that it may put back
}

func (m *Move) of(group string, g Group) bool {
	return m.Group == group || m.Group == "" && m.Queue == g.Queue
}

// in says that a move may have happened after a time and before another.
func (m *Move) in(after, before time.Time) bool {
	return m.Start.Before(before) && (m.Outcome == Unknown || m.End.After(after))
}

// Group is a consumer group, or a subscription, which is owed every message of its queue.
type Group struct {
	Queue        string
	Lanes        bool // a subscription of /v1
	Max          int  // failures after which a message is a dead letter, 0: never
	CountExpired bool // of a subscription: the end of a lease is a failure
}

// Dead is a dead letter that is there in the end.
type Dead struct {
	Lane     Lane
	Payload  string
	Attempts int
}

// Stored is a message that is in the database in the end.
type Stored struct {
	Offset           int64
	Message, Payload string // "": the id is not known
}

// Counter is a number of a broker in the end, and what it should be.
type Counter struct {
	Name      string
	Got, Want int64
}

// Log is a history. The zero value is an empty one. Its methods may be called at the same time; what is exported is for the end.
type Log struct {
	mu         sync.Mutex
	sends      []Send
	deliveries []Delivery
	settles    []Settle
	lost       []Lost
	moves      []Move
	odd        []string

	Groups   map[string]Group
	Drained  bool              // clients waited until nothing came any more
	Dead     map[string][]Dead // by group
	Stored   map[Lane][]Stored // by offset; of lanes that are not here nothing is known
	Counters []Counter
}

// Add takes a [Send], [Delivery], [Settle], [Lost] or [Move].
func (l *Log) Add(entries ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range entries {
		switch e := e.(type) {
		case Send:
			l.sends = append(l.sends, e)
		case Delivery:
			l.deliveries = append(l.deliveries, e)
		case Settle:
			l.settles = append(l.settles, e)
		case Lost:
			l.lost = append(l.lost, e)
		case Move:
			l.moves = append(l.moves, e)
		default:
			panic("history: not an entry")
		}
	}
}

// Odd records an answer that no contract knows.
func (l *Log) Odd(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.odd = append(l.odd, text)
}

// Totals are how much of what there is in a log.
type Totals struct{ Sent, Stored, Delivered, Acked, Failed, Late, Lost int }

// Totals counts.
func (l *Log) Totals() (t Totals) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t.Delivered, t.Lost = len(l.deliveries), len(l.lost)
	for _, s := range l.sends {
		t.Sent++
		if s.Outcome == OK && !s.Duplicate {
			t.Stored++
		}
	}
	for _, s := range l.settles {
		switch {
		case s.Outcome == Refused:
			t.Late++
		case s.Outcome == OK:
			t.Acked += len(s.Done)
			if s.Kind == Failed {
				t.Failed++
			}
		}
	}
	return t
}
