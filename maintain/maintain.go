// Package maintain is a broker's background work: it keeps the broker visible to others, notices what they changed,
// and finishes jobs. Everything starts at an index of what is due; nothing walks all partitions.
package maintain

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/db"
	"ferrymq/groupcommit"
	"ferrymq/wake"
)

const (
	beatEvery    = 2 * time.Second
	jobsEvery    = time.Second
	refreshSpan  = 10              // seconds of queue changes read at each beat: several beats overlap
	forgetAfter  = 8 * time.Second // without a refresh for so long, nothing cached can be trusted
	removeChunk  = 200             // partitions of a deleted queue in one transaction
	segmentChunk = 1000            // segments
	streamChunk  = 50              // streams of a deleted project between two signs of life
	jobRoom      = 3               // jobs at a time
	tracesEvery  = time.Minute     // between looks for traces that are too old
)

// Maintainer runs the loops until Close.
type Maintainer struct {
	Pool   *pgxpool.Pool
	Log    *slog.Logger
	Engine *groupcommit.Engine
	Bus    *wake.Bus
	Name   string // of this broker, for people
	// Switches gets the maintenance switches as they are in the database, at each heartbeat. May be nil.
	Switches func(db.SystemGetRow)

	RetentionInterval time.Duration // period of the retention sweep; 0: none
	RetentionBatch    int64         // segments that one statement of it removes
	CleanupDays       int32         // after which an idle, empty partition goes; 0: never
	OnRemoved         func(Removed) // gets what retention removes. May be nil.

	id      uuid.UUID
	q       *db.Queries
	kick    chan struct{}
	sweptTo int64 // the partition behind which the next rows are removed
	stop    context.Context
	cancel  context.CancelFunc
	work    sync.WaitGroup
}

// Start begins the loops. The exported fields must be set.
func (m *Maintainer) Start() {
	m.id, m.q, m.kick = uuid.New(), db.New(db.Patient{Pool: m.Pool}), make(chan struct{}, 1)
	m.stop, m.cancel = context.WithCancel(context.Background())
	m.work.Add(3)
	go m.beat()
	go m.every(tracesEvery, nil, m.expireTraces, "removing old traces")
	go m.jobs()
	if m.RetentionInterval > 0 {
		m.work.Add(1)
		go m.every(m.RetentionInterval, nil, m.retention, "retention")
	}
}

// Close ends the loops, what they are at included, and signs the broker off.
func (m *Maintainer) Close() {
	m.cancel()
	m.work.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = m.q.BrokerLeave(ctx, db.BrokerLeaveParams{ID: m.id}) // others notice the silence anyway
}

// Kick makes the job loop look at once.
func (m *Maintainer) Kick() {
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

func (m *Maintainer) every(d time.Duration, kick <-chan struct{}, do func(ctx context.Context) error, what string) {
	defer m.work.Done()
	ticker := time.NewTicker(d)
	defer ticker.Stop()
	failing := false
	for {
		err := do(m.stop)
		if m.stop.Err() != nil {
			return
		}
		if err != nil && !failing {
			m.Log.Warn(what+" failed, trying again", "error", db.Text(err))
		}
		failing = err != nil
		select {
		case <-m.stop.Done():
			return
		case <-kick:
		case <-ticker.C:
		}
	}
}

func (m *Maintainer) beat() {
	refreshed := time.Now()
	var last time.Time // what the last beat wrote
	m.every(beatEvery, nil, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		beat, err := m.q.BrokerBeat(ctx, db.BrokerBeatParams{ID: m.id, Name: m.Name, Last: last})
		if err != nil {
			return err
		}
		if beat.Back && !last.IsZero() {
			m.Log.Warn("the database has gone back to an earlier time: what was written since is lost, and nothing of it is remembered any more")
			m.Engine.ForgetAll()
		}
		last = beat.SeenAt
		m.Bus.Others(beat.Others > 0)
		m.Engine.SetNow(beat.Now)
		m.Engine.SetPeers(beat.Others)
		if m.Switches != nil {
			s, err := m.q.SystemGet(ctx)
			if err != nil {
				return err
			}
			m.Switches(s)
		}
		if time.Since(refreshed) > forgetAfter {
			m.Engine.Catalog.ForgetAll()
		}
		if err := m.Engine.Catalog.Refresh(ctx, refreshSpan); err != nil {
			return err
		}
		refreshed = time.Now()
		return nil
	}, "heartbeat")
}

func (m *Maintainer) jobs() {
	room := make(chan struct{}, jobRoom)
	m.every(jobsEvery, m.kick, func(ctx context.Context) error {
		for {
			lease := uuid.New()
			job, err := m.q.JobClaim(ctx, db.JobClaimParams{LeaseID: lease})
			if errors.Is(err, pgx.ErrNoRows) {
				return nil
			}
			if err != nil {
				return err
			}
			// A long job must not hold up the short ones behind it.
			room <- struct{}{}
			m.work.Add(1)
			go func() {
				defer m.work.Done()
				defer func() { <-room }()
				if err := m.run(ctx, job, lease); err != nil && ctx.Err() == nil {
					m.Log.Warn("job failed, it will be tried again", "kind", job.Kind, "error", db.Text(err))
				}
			}()
		}
	}, "looking for jobs")
}

// foreignKey is the code of a row that others still refer to.
const foreignKey = "23503"

// errTakenOver means that another broker works on the job by now.
var errTakenOver = errors.New("job taken over by another broker")

func (m *Maintainer) run(ctx context.Context, job db.JobClaimRow, lease uuid.UUID) error {
	next := func() error {
		n, err := m.q.JobExtend(ctx, db.JobExtendParams{ID: job.ID, LeaseID: lease})
		if err == nil && n == 0 {
			err = errTakenOver
		}
		return err
	}
	var err error
	switch job.Kind {
	case "seed":
		err = m.Engine.Catalog.Seed(ctx, *job.GroupID)
	case "delete_queue":
		err = m.removeQueue(ctx, job.QueueID, next)
		for tries := 0; db.Code(err) == foreignKey && tries < 10; tries++ { // a partition has come whose creator had begun before the deletion
			err = m.removeQueue(ctx, job.QueueID, next)
		}
	case "delete_group":
		for more := true; more && err == nil; {
			if err = next(); err == nil {
				_, more, err = m.Engine.Catalog.RemoveGroup(ctx, *job.GroupID)
			}
		}
	case "recheck":
		err = m.recheck(ctx, job.QueueID)
	case "delete_project":
		err = m.removeProject(ctx, *job.ProjectID, next)
	case "retention":
		err = m.planRetention(ctx, job.QueueID, next)
	}
	if errors.Is(err, errTakenOver) {
		return nil
	}
	if err != nil {
		return err
	}
	return m.q.JobDone(ctx, db.JobDoneParams{ID: job.ID, LeaseID: lease})
}

// removeProject deletes the streams of a project whose name is free already: each becomes a job of its own.
func (m *Maintainer) removeProject(ctx context.Context, project int32, next func() error) error {
	c := m.Engine.Catalog.Of(project)
	for {
		if err := next(); err != nil {
			return err
		}
		streams, err := m.q.ProjectStreams(ctx, db.ProjectStreamsParams{ProjectID: project, Max: streamChunk})
		if err != nil {
			return err
		}
		if len(streams) == 0 {
			return m.q.ProjectRemoveKeys(ctx, db.ProjectRemoveKeysParams{ProjectID: project})
		}
		for _, s := range streams {
			if _, _, err := c.Delete(ctx, s.Name); err != nil {
				return err
			}
			m.Engine.QueueChanged(s.ID)
			m.Bus.QueueChanged(s.ID)
		}
	}
}

// removeQueue deletes what belongs to a queue whose name is free already, in short transactions and in the lock order of the product.
func (m *Maintainer) removeQueue(ctx context.Context, queue int32, next func() error) error {
	for {
		if err := next(); err != nil {
			return err
		}
		found := 0
		err := pgx.BeginFunc(ctx, m.Pool, func(tx pgx.Tx) error {
			q := m.q.WithTx(tx)
			ids, err := q.QueueRemoveLock(ctx, db.QueueRemoveLockParams{QueueID: queue, Max: removeChunk})
			if found = len(ids); err != nil || found == 0 {
				return err
			}
			if err := q.QueueRemoveCursors(ctx, db.QueueRemoveCursorsParams{QueueID: queue, Ids: ids}); err != nil {
				return err
			}
			if err := q.QueueRemoveLanes(ctx, db.QueueRemoveLanesParams{QueueID: queue, Ids: ids}); err != nil {
				return err
			}
			n, err := q.QueueRemoveSegments(ctx, db.QueueRemoveSegmentsParams{Ids: ids, Max: segmentChunk})
			if err != nil || n == segmentChunk {
				return err // more of them: the partitions stay for the next round
			}
			n, err = q.QueueRemoveRetired(ctx, db.QueueRemoveRetiredParams{Ids: ids, Max: segmentChunk})
			if err != nil || n == segmentChunk {
				return err
			}
			return q.QueueRemovePartitions(ctx, db.QueueRemovePartitionsParams{Ids: ids})
		})
		if err != nil {
			return err
		}
		if found == 0 {
			break
		}
	}
	for {
		n, err := m.q.QueueRemoveDeadLetters(ctx, db.QueueRemoveDeadLettersParams{QueueID: queue, Max: segmentChunk})
		if err != nil {
			return err
		}
		if n < segmentChunk {
			break
		}
	}
	for {
		n, err := m.q.OutboxRemoveQueue(ctx, db.OutboxRemoveQueueParams{QueueID: queue, Max: segmentChunk})
		if err != nil {
			return err
		}
		if n < segmentChunk {
			break
		}
		if err := next(); err != nil {
			return err
		}
	}
	// Together: if a late creator's partition keeps the queue, its groups stay too, and with them what finds its cursors.
	return pgx.BeginFunc(ctx, db.Patient{Pool: m.Pool}, func(tx pgx.Tx) error {
		q := m.q.WithTx(tx)
		if err := q.QueueRemoveGroups(ctx, db.QueueRemoveGroupsParams{QueueID: queue}); err != nil {
			return err
		}
		return q.QueueRemove(ctx, db.QueueRemoveParams{QueueID: queue})
	})
}

// expireTraces removes traces that are past their time, names first: a name without its trace would be missing from its list. Events
// of lanes go the same way, those of deleted subscriptions too.
func (m *Maintainer) expireTraces(ctx context.Context) error {
	for n := int64(1); n > 0; {
		var err error
		if n, err = m.q.TraceNamesExpire(ctx, db.TraceNamesExpireParams{Max: segmentChunk}); err != nil {
			return err
		}
	}
	for n := int64(1); n > 0; {
		var err error
		if n, err = m.q.TracesExpire(ctx, db.TracesExpireParams{Max: segmentChunk}); err != nil {
			return err
		}
	}
	for n := int64(1); n > 0; {
		var err error
		if n, err = m.q.LaneEventsExpire(ctx, db.LaneEventsExpireParams{Max: segmentChunk}); err != nil {
			return err
		}
	}
	for n := int64(1); n > 0; {
		var err error
		if n, err = m.q.OutboxPlacesExpire(ctx, db.OutboxPlacesExpireParams{Max: segmentChunk}); err != nil {
			return err
		}
	}
	return nil
}

// recheck judges the delays of a reconfigured queue anew.
func (m *Maintainer) recheck(ctx context.Context, queue int32) error {
	if err := m.Engine.Catalog.Recheck(ctx, queue); err != nil {
		return err
	}
	m.Engine.Reconsider(queue)
	m.Bus.QueueChanged(queue)
	return nil
}
