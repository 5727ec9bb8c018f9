package db_test

import (
	"time"

	"github.com/jackc/pgx/v5"

	"ferrymq/db"
)

func retentionStatements(w *world) map[string]statement {
	rows := must[pgx.Rows](w.t)(w.pool.Query(w.ctx(), "select id from ferrymq.partitions where swept_offset < first_offset order by id limit 100"))
	unswept := must[[]int64](w.t)(pgx.CollectRows(rows, pgx.RowTo[int64]))
	froms, tos := make([]int64, len(unswept)), make([]int64, len(unswept))
	var parts []int64
	for i := range int64(100) {
		parts, froms[i], tos[i] = append(parts, 1+i*(bigPartitions/100)), 100, 200
	}
	now := time.Now()
	return map[string]statement{
		"SweepClaim":    {sql: db.SweepClaim, arg: db.SweepClaimParams{Seconds: 5}, seq: []string{"sweeps"}},
		"SweepSettings": {sql: db.SweepSettings},
		"SweepRows":     {sql: db.SweepRows, seq: []string{"sweeps"}},

		"RetentionDue":     {sql: db.RetentionDue, arg: db.RetentionDueParams{Due: now, Max: 50}, buffers: 300, index: []string{"partitions_expire_at"}},
		"RetentionLock":    {sql: db.RetentionLock, arg: db.RetentionLockParams{Due: now, Max: 50}, buffers: 500, index: []string{"partitions_expire_at"}},
		"RetentionMove":    {sql: db.RetentionMove, arg: db.RetentionMoveParams{Ids: parts, AgainSeconds: 60}, buffers: 3000, index: []string{"partitions_pkey"}},
		"RetentionFree":    {sql: db.RetentionFree, arg: db.RetentionFreeParams{Ids: parts}, buffers: 3000, index: []string{"cursors_pkey"}},
		"RetentionUnswept": {sql: db.RetentionUnswept, arg: db.RetentionUnsweptParams{After: 500, Max: 50}, buffers: 300, index: []string{"partitions_unswept"}},
		"RetentionRemove":  {sql: db.RetentionRemove, arg: db.RetentionRemoveParams{Ids: unswept, FromOffsets: froms, ToOffsets: tos, Max: 100}, buffers: 2500, index: []string{"segments_pkey"}},
		"RetentionSwept":   {sql: db.RetentionSwept, arg: db.RetentionSweptParams{Ids: unswept, Swepts: tos}, buffers: 3000, index: []string{"partitions_pkey"}},
		"RetiredExpire":    {sql: db.RetiredExpire, arg: db.RetiredExpireParams{Max: 100}, buffers: 2500, index: []string{"retired_keys_expires_at", "retired_keys_pkey"}},
		"QueueRemoveRetired": {sql: db.QueueRemoveRetired, arg: db.QueueRemoveRetiredParams{Ids: []int64{1, 2, 3}, Max: 100}, buffers: 1000,
			index: []string{"retired_keys_pkey"}},

		"RetentionPlan":      {sql: db.RetentionPlan, arg: db.RetentionPlanParams{Ids: parts}, buffers: 3000, index: []string{"partitions_pkey", "segments_pkey"}},
		"CleanupLock":        {sql: db.CleanupLock, arg: db.CleanupLockParams{Days: 30, Max: 100}, buffers: 900, index: []string{"partitions_empty_since"}},
		"CleanupLockCursors": {sql: db.CleanupLockCursors, arg: db.CleanupLockCursorsParams{Ids: parts}, buffers: 3000, index: []string{"cursors_pkey"}},
		"Cleanup":            {sql: db.Cleanup, arg: db.CleanupParams{Ids: parts, Days: 30}, buffers: 4000, index: []string{"partitions_pkey", "cursors_pkey"}},
		"QueueRemind":        {sql: db.QueueRemind, arg: db.QueueRemindParams{Max: 20, Partitions: 100}, buffers: 2500, index: []string{"queues_remind_at"}},
		"ClearFree":          {sql: db.ClearFree, arg: db.ClearFreeParams{Ids: parts}, buffers: 8000, index: []string{"partitions_pkey", "cursors_pkey"}},
		"ClearCursors":       {sql: db.ClearCursors, arg: db.ClearCursorsParams{Ids: parts}, buffers: 8000, index: []string{"cursors_pkey"}},
		"ClearPartitions":    {sql: db.ClearPartitions, arg: db.ClearPartitionsParams{Ids: parts}, buffers: 3000, index: []string{"partitions_pkey"}},
	}
}
