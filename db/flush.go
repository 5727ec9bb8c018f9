package db

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Flush collects the statements of one flush and sends them in one round trip. Without an explicit transaction
// PostgreSQL runs a pipeline up to its end as one, so that one flush is one commit.
//
// sqlc has no way to put different statements on one pgx.Batch; this file does, with the generated SQL and types.
// What the destinations hold counts only after Send returned nil: rows of a batch that later rolls back are handed out all the same.
type Flush struct{ batch pgx.Batch }

// Len is the number of statements queued.
func (f *Flush) Len() int { return f.batch.Len() }

// Send runs the statements in the order they were queued. On an error nothing of them is stored, unless IsConnection(err): then nobody knows.
func (f *Flush) Send(ctx context.Context, conn interface {
	SendBatch(context.Context, *pgx.Batch) pgx.BatchResults
}) error {
	return conn.SendBatch(ctx, &f.batch).Close()
}

func collect[T any](q *pgx.QueuedQuery, dst *[]T, scan func(pgx.Rows, *T) error) {
	q.Query(func(rows pgx.Rows) error {
		for rows.Next() {
			var row T
			if err := scan(rows, &row); err != nil {
				return err
			}
			*dst = append(*dst, row)
		}
		return rows.Err()
	})
}

// FlushSettings puts the statement of that name before the others, unless the connection has these settings for good.
func (f *Flush) FlushSettings(arg FlushSettingsParams, conn *pgx.Conn) {
	if conn != nil && conn.PgConn().CustomData()[flightKey] != nil {
		return
	}
	var first pgx.Batch
	first.Queue(FlushSettings, arg.StatementTimeoutMs, arg.Lasting, arg.LockTimeoutMs)
	f.batch.QueuedQueries = append(first.QueuedQueries, f.batch.QueuedQueries...)
}

// LockPartitions queues the statement of that name.
func (f *Flush) LockPartitions(arg LockPartitionsParams, dst *[]LockPartitionsRow) {
	collect(f.batch.Queue(LockPartitions, arg.Ids, arg.Reaches), dst, func(r pgx.Rows, i *LockPartitionsRow) error {
		return r.Scan(&i.ID, &i.NextOffset)
	})
}

// AppendSegments queues the statement of that name.
func (f *Flush) AppendSegments(arg AppendSegmentsParams, dst *[]AppendSegmentsRow) {
	collect(f.batch.Queue(AppendSegments, arg.Ids, arg.Totals, arg.ExpectedTails, arg.SegPartitions, arg.SegRels, arg.SegCounts,
		arg.SegKeyNos, arg.SegCodecs, arg.SegFirstIds, arg.SegKeys, arg.SegFrames), dst, func(r pgx.Rows, i *AppendSegmentsRow) error {
		return r.Scan(&i.ID, &i.Base, &i.CreatedAt)
	})
}

// CreatePartitions queues the statement of that name.
func (f *Flush) CreatePartitions(arg CreatePartitionsParams, dst *[]CreatePartitionsRow) {
	collect(f.batch.Queue(CreatePartitions, arg.PublicIds, arg.QueueIds, arg.Names, arg.Hiddens, arg.Totals, arg.SegPartitions, arg.SegRels, arg.SegCounts,
		arg.SegKeyNos, arg.SegCodecs, arg.SegFirstIds, arg.SegKeys, arg.SegFrames), dst, func(r pgx.Rows, i *CreatePartitionsRow) error {
		return r.Scan(&i.ID, &i.PublicID, &i.CreatedAt)
	})
}

// CreateCursors queues the statement of that name.
func (f *Flush) CreateCursors(arg CreateCursorsParams) { f.batch.Queue(CreateCursors, arg.PublicIds) }

// LockCursors queues the statement of that name.
func (f *Flush) LockCursors(arg LockCursorsParams) {
	f.batch.Queue(LockCursors, arg.Pushed, arg.GroupIds, arg.PartitionIds, arg.LeaseIds)
}

// MarkPending queues the statement of that name.
func (f *Flush) MarkPending(arg MarkPendingParams) { f.batch.Queue(MarkPending, arg.Pushed) }

// SettleCursors queues the statement of that name.
func (f *Flush) SettleCursors(arg SettleCursorsParams, dst *[]SettleCursorsRow) {
	collect(f.batch.Queue(SettleCursors, arg.Ns, arg.GroupIds, arg.PartitionIds, arg.LeaseIds, arg.Expecteds, arg.Actions, arg.MoveTos,
		arg.FailedAts, arg.Reaches, arg.DeadIds, arg.MessageIds, arg.TransactionIds, arg.Errors, arg.KeyNos, arg.Codecs, arg.Frames,
		arg.CreatedAts), dst, func(r pgx.Rows, i *SettleCursorsRow) error {
		return r.Scan(&i.N, &i.Outcome, &i.Committed, &i.Released, &i.Pending, &i.DueMs)
	})
}

// SettleLanes queues the statement of that name.
func (f *Flush) SettleLanes(arg SettleLanesParams, dst *[]SettleLanesRow) {
	collect(f.batch.Queue(SettleLanes, arg.Ns, arg.GroupIds, arg.PartitionIds, arg.LeaseIds, arg.Actions, arg.Delays, arg.Reaches, arg.Errors, arg.Signatures,
		arg.DeadIds, arg.MessageIds, arg.TransactionIds, arg.KeyNos, arg.Codecs, arg.Frames, arg.CreatedAts), dst, func(r pgx.Rows, i *SettleLanesRow) error {
		return r.Scan(&i.N, &i.Outcome, &i.Committed, &i.Pending, &i.DueMs)
	})
}

// ExtendLanes queues the statement of that name.
func (f *Flush) ExtendLanes(arg ExtendLanesParams, dst *[]ExtendLanesRow) {
	collect(f.batch.Queue(ExtendLanes, arg.Ns, arg.GroupIds, arg.PartitionIds, arg.LeaseIds, arg.Seconds), dst, func(r pgx.Rows, i *ExtendLanesRow) error {
		return r.Scan(&i.N, &i.LeaseUntil)
	})
}

// LockGroups queues the statement of that name.
func (f *Flush) LockGroups(arg LockGroupsParams) { f.batch.Queue(LockGroups, arg.Ids) }

// RestoreCursors queues the statement of that name.
func (f *Flush) RestoreCursors(arg RestoreCursorsParams) {
	f.batch.Queue(RestoreCursors, arg.GroupIds, arg.PartitionIds, arg.StartOffsets, arg.EndOffsets, arg.ClaimedAts, arg.Rests)
}

// ExtendLeases queues the statement of that name.
func (f *Flush) ExtendLeases(arg ExtendLeasesParams, dst *[]ExtendLeasesRow) {
	collect(f.batch.Queue(ExtendLeases, arg.Ns, arg.GroupIds, arg.PartitionIds, arg.LeaseIds, arg.Seconds), dst, func(r pgx.Rows, i *ExtendLeasesRow) error {
		return r.Scan(&i.N, &i.LeaseUntil)
	})
}

// ClaimPartitions queues the statement of that name.
func (f *Flush) ClaimPartitions(arg ClaimPartitionsParams, dst *[]ClaimPartitionsRow) {
	collect(f.batch.Queue(ClaimPartitions, arg.ListNos, arg.ListGroups, arg.ListFroms, arg.ListScans, arg.ListIndexFirsts, arg.ListWants, arg.ListSlots, arg.ListFrames, arg.ListLimiteds,
		arg.HintLists, arg.HintPartitions, arg.SlotNos, arg.SlotLists, arg.SlotNths, arg.SlotLeases, arg.SlotBudgets, arg.SlotParts,
		arg.SlotSeconds, arg.SlotAutoAcks, arg.SlotDiscoveries, arg.SlotConsumers, arg.SpanBytes), dst, func(r pgx.Rows, i *ClaimPartitionsRow) error {
		return r.Scan(&i.ListNo, &i.Seen, &i.Stale, &i.AboveTo, &i.BelowTo, &i.DueMs, &i.SlotNo, &i.PartitionID, &i.PublicID, &i.Name,
			&i.StartOffset, &i.Take, &i.NextOffset, &i.LeaseMs, &i.Hidden, &i.Attempt, &i.Exhausted, &i.OnlyGroup, &i.BaseOffset, &i.Count, &i.KeyNo, &i.Codec, &i.CreatedAt, &i.FirstID,
			&i.Keys, &i.Frames)
	})
}

// CompleteCursors queues the statement of that name.
func (f *Flush) CompleteCursors(arg CompleteCursorsParams, dst *[]CompleteCursorsRow) {
	collect(f.batch.Queue(CompleteCursors, arg.Ns, arg.GroupIds, arg.PartitionIds, arg.LeaseIds, arg.Expecteds, arg.MoveTos, arg.Reaches), dst,
		func(r pgx.Rows, i *CompleteCursorsRow) error {
			return r.Scan(&i.N, &i.Committed, &i.Released, &i.Pending, &i.DueMs)
		})
}

// ClaimHinted queues the statement of that name.
func (f *Flush) ClaimHinted(arg ClaimHintedParams, dst *[]ClaimHintedRow) {
	collect(f.batch.Queue(ClaimHinted, arg.SpanBytes, arg.SlotNos, arg.Groups, arg.Partitions, arg.Leases, arg.Budgets, arg.Seconds, arg.AutoAcks, arg.Frames), dst,
		func(r pgx.Rows, i *ClaimHintedRow) error {
			return r.Scan(&i.SlotNo, &i.PartitionID, &i.PublicID, &i.Name, &i.StartOffset, &i.Take, &i.NextOffset, &i.LeaseMs, &i.Hidden, &i.OnlyGroup, &i.ClaimedAt,
				&i.BaseOffset, &i.Count, &i.KeyNo, &i.Codec, &i.CreatedAt, &i.FirstID, &i.Keys, &i.Frames)
		})
}
