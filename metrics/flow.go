package metrics

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"ferrymq/db"
)

// Traffic is what went through one queue or one group, in messages.
type Traffic int

// The flows. Pushed is of queues, the others of groups: delivered, consumed, attempts that failed and were not the last, dead letters.
const (
	Pushed Traffic = iota
	Delivered
	Done
	FailedAttempts
	Dead
	flows
)

// flow is what becomes rows of ferrymq.flow.
type flow struct {
	mu   sync.RWMutex // held for reading while numbers are added to
	rows map[flowKey]*[flows]atomic.Int64
}

// flowKey: group 0 is the queue; queue 0 is everything of a project, whose id is in group.
type flowKey struct{ queue, group int32 }

// Flow counts n messages of a queue (group 0) or of a group, and of their project.
func (m *Metrics) Flow(project, queue, group int32, f Traffic, n int64) {
	if n > 0 {
		m.flow.add(flowKey{queue, group}, f, n)
		m.flow.add(flowKey{0, project}, f, n)
	}
}

func (w *flow) add(k flowKey, f Traffic, n int64) {
	w.mu.RLock()
	if x := w.rows[k]; x != nil {
		x[f].Add(n)
		w.mu.RUnlock()
		return
	}
	w.mu.RUnlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	x := w.rows[k]
	if x == nil {
		if w.rows == nil {
			w.rows = make(map[flowKey]*[flows]atomic.Int64)
		}
		x = new([flows]atomic.Int64)
		w.rows[k] = x
	}
	x[f].Add(n)
}

func (w *flow) idle() bool {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return len(w.rows) == 0
}

// flush writes what went through since the last time: nothing where nothing did. What cannot be written is added up for the next time.
func (w *flow) flush(ctx context.Context, q *db.Queries) error {
	w.mu.Lock()
	taken := w.rows
	w.rows = nil
	w.mu.Unlock()
	keys := make([]flowKey, 0, len(taken))
	for k := range taken {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b flowKey) int { return cmp.Or(cmp.Compare(a.queue, b.queue), cmp.Compare(a.group, b.group)) })
	for len(keys) > 0 {
		part := keys[:min(writeRows, len(keys))]
		var p db.FlowAddParams
		columns := [flows]*[]int64{&p.Pushed, &p.Delivered, &p.Done, &p.Failed, &p.Dead}
		for _, k := range part {
			p.QueueIds, p.GroupIds = append(p.QueueIds, k.queue), append(p.GroupIds, k.group)
			for f, c := range columns {
				*c = append(*c, taken[k][f].Load())
			}
		}
		if err := q.FlowAdd(ctx, p); err != nil {
			if db.IsConnection(err) && !db.NotSent(err) { // as in Metrics.flush
				keys = keys[len(part):]
			}
			for _, k := range keys {
				for f := range flows {
					if n := taken[k][f].Load(); n > 0 {
						w.add(k, f, n)
					}
				}
			}
			return fmt.Errorf("flow: %w", err)
		}
		keys = keys[len(part):]
	}
	return nil
}
