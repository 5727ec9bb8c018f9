package handlers

import (
	"context"
	"maps"
	"slices"
	"time"

	"ferrymq/db"
)

// numbers are the counts of all queues as of one moment. Counting is a pass over all partitions, so it happens only when
// somebody asks, once for all who ask meanwhile, and may be reused for a while.
type numbers struct {
	at     time.Time // before the count began, by the database's clock
	taken  time.Time // the same by this process's
	until  time.Time // when they are too old
	queues map[int32]queueNumbers
	lag    lag
}

type queueNumbers struct {
	db.QueueNumbersRow
	segments, bytes *int64 // nil: not known, counting them would read too much
}

// lag is over all partitions with a backlog: in seconds and in messages.
type lag struct {
	Time   spread `json:"time"`
	Offset spread `json:"offset"`
}

type spread struct {
	Avg    int64 `json:"avg"`
	Median int64 `json:"median"`
	Min    int64 `json:"min"`
	Max    int64 `json:"max"`
}

const (
	maxNumbersAge = 10 * time.Second
	// numbersShare bounds what counting costs: for so many times as long as it took, its result is reused.
	numbersShare = 20
	// maxCounted is how many messages and partitions queues may have together for their segments to be counted one by one.
	maxCounted = 20_000
)

// numbers returns counts that are no older than 10 s, nor than the last time that numbers were asked to be current on any broker.
func (a *API) numbers(ctx context.Context, project int32) (*numbers, error) {
	wanted, err := a.queries.NumbersWanted(ctx)
	if err != nil {
		return nil, err
	}
	usable := func() *numbers {
		n := a.counted.Load()
		if n == nil || n.at.Before(wanted.NumbersWantedAt) || time.Now().After(n.until) {
			return nil
		}
		return n
	}
	if n := usable(); n != nil {
		return n, nil
	}
	select {
	case a.counting <- struct{}{}:
		defer func() { <-a.counting }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if n := usable(); n != nil { // counted while this one waited
		return n, nil
	}
	n := &numbers{at: wanted.Now, taken: time.Now()}
	rows, err := a.queries.QueuePage(ctx, db.QueuePageParams{ProjectID: project, Max: maxQueues})
	if err != nil {
		return nil, err
	}
	ids := make([]int32, len(rows))
	for i, q := range rows {
		ids[i] = q.ID
	}
	if n.queues, n.lag, err = a.count(ctx, ids, true); err != nil {
		return nil, err
	}
	n.until = n.taken.Add(min(numbersShare*time.Since(n.taken), maxNumbersAge))
	a.counted.Store(n)
	return n, nil
}

// count counts some queues.
func (a *API) count(ctx context.Context, ids []int32, withLag bool) (map[int32]queueNumbers, lag, error) {
	rows, err := a.queries.QueueNumbers(ctx, db.QueueNumbersParams{Ids: ids, Lag: withLag})
	if err != nil {
		return nil, lag{}, err
	}
	var all lag
	found := make(map[int32]queueNumbers, len(rows))
	slices.SortFunc(rows, func(x, y db.QueueNumbersRow) int {
		return int(min(max(x.Total+x.Partitions-y.Total-y.Partitions, -1), 1))
	})
	var small []int32
	sum := int64(0)
	for _, r := range rows {
		all = lag{Time: spread{r.TimeAvg, r.TimeMedian, r.TimeMin, r.TimeMax}, Offset: spread{r.OffsetAvg, r.OffsetMedian, r.OffsetMin, r.OffsetMax}}
		n := queueNumbers{QueueNumbersRow: r}
		if sum += r.Total + r.Partitions; sum <= maxCounted || r.Total == 0 {
			n.segments, n.bytes = new(int64), new(int64)
			if r.Total > 0 {
				small = append(small, r.QueueID)
			}
		}
		found[r.QueueID] = n
	}
	if len(small) > 0 {
		sizes, err := a.queries.QueueSegments(ctx, db.QueueSegmentsParams{Ids: small})
		if err != nil {
			return nil, lag{}, err
		}
		for _, s := range sizes {
			*found[s.QueueID].segments, *found[s.QueueID].bytes = s.Segments, s.Bytes
		}
	}
	return found, all, nil
}

// numbersOf returns the numbers of these queues. Queues that are newer than the numbers are counted by themselves.
func (a *API) numbersOf(ctx context.Context, project int32, rows []db.QueuePageRow) (map[int32]queueNumbers, *numbers, error) {
	n, err := a.numbers(ctx, project)
	if err != nil {
		return nil, nil, err
	}
	var unknown []int32
	for _, q := range rows {
		if _, ok := n.queues[q.ID]; !ok {
			unknown = append(unknown, q.ID)
		}
	}
	if len(unknown) == 0 {
		return n.queues, n, nil
	}
	newer, _, err := a.count(ctx, unknown, false)
	if err != nil {
		return nil, nil, err
	}
	maps.Copy(newer, n.queues)
	return newer, n, nil
}

// counts are the six numbers of whatever holds messages. failed is never known.
type counts struct {
	Total      int64  `json:"total"`
	Pending    int64  `json:"pending"`
	Processing int64  `json:"processing"`
	Completed  int64  `json:"completed"`
	Failed     *int64 `json:"failed"`
	DeadLetter int64  `json:"deadLetter"`
}

func (n queueNumbers) six() counts {
	return counts{Total: n.Total, Pending: n.Pending, Processing: n.Processing, Completed: n.Total - n.Pending, DeadLetter: n.DeadLetter}
}

func (c *counts) add(o counts) {
	c.Total += o.Total
	c.Pending += o.Pending
	c.Processing += o.Processing
	c.Completed += o.Completed
	c.DeadLetter += o.DeadLetter
}
