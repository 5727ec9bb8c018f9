package db_test

import (
	"time"

	"ferrymq/db"
)

func groupStatements(w *world) map[string]statement {
	var parts []int64 // 100 partitions spread over the whole table
	for i := range int64(100) {
		parts = append(parts, 1+i*(bigPartitions/100))
	}
	at := time.Now().Add(-150 * time.Minute)
	// The listings are about all groups, or all cursors of one: they are planned only. What is behind has to be found by index.
	behind := []string{"cursors_pending", "cursors_not_before", "partitions_pkey", "segments_pkey"}
	return map[string]statement{
		"GroupHold":          {sql: db.GroupHold, arg: db.GroupHoldParams{ID: 1}, buffers: 60},
		"SeekChunk":          {sql: db.SeekChunk, arg: db.SeekChunkParams{QueueID: 1, After: 50_000, Max: 100}, buffers: 200},
		"SeekLockPartitions": {sql: db.SeekLockPartitions, arg: db.SeekLockPartitionsParams{Ids: parts}, buffers: 900, index: []string{"partitions_pkey"}},
		"SeekLockCursors":    {sql: db.SeekLockCursors, arg: db.SeekLockCursorsParams{GroupID: 1, Ids: parts}, buffers: 900, index: []string{"cursors_pkey"}},
		"SeekCursors": {sql: db.SeekCursors, arg: db.SeekCursorsParams{GroupID: 1, Ids: parts, Free: parts, At: at},
			buffers: 7500, index: []string{"partitions_pkey", "segments_pkey"}},
		"GroupsByName":       {sql: db.GroupsByName, arg: db.GroupsByNameParams{ProjectID: 1, Name: "g2"}, buffers: 60, index: []string{"groups_by_name"}},
		"GroupTake":          {sql: db.GroupTake, arg: db.GroupTakeParams{ID: 1}, buffers: 60},
		"GroupDelete":        {sql: db.GroupDelete, arg: db.GroupDeleteParams{ID: 1}, buffers: 60},
		"GroupAgain":         {sql: db.GroupAgain, arg: db.GroupAgainParams{ID: 1}},
		"GroupRemoveCursors": {sql: db.GroupRemoveCursors, arg: db.GroupRemoveCursorsParams{ID: 1, Max: 1000}, index: []string{"cursors_pkey"}},
		"GroupCursorCount":   {sql: db.GroupCursorCount, arg: db.GroupCursorCountParams{ID: 1}, index: []string{"cursors_pkey"}},
		"GroupRemove":        {sql: db.GroupRemove, arg: db.GroupRemoveParams{ID: 1}, buffers: 100, index: []string{"dead_letters_queue"}},
		"DiscoveryForget":    {sql: db.DiscoveryForget, arg: db.DiscoveryForgetParams{ProjectID: 1, Name: "g7"}, buffers: 60},
		"DiscoveryRestart":   {sql: db.DiscoveryRestart, arg: db.DiscoveryRestartParams{ProjectID: 1, Name: "g7", StartAt: at}, buffers: 60},
		"DiscoveryHold":      {sql: db.DiscoveryHold, arg: db.DiscoveryHoldParams{ProjectID: 1, Namespace: "n7", Name: "g7"}, buffers: 60},
		"GroupRestart":       {sql: db.GroupRestart, arg: db.GroupRestartParams{ProjectID: 1, Name: "g2", StartAt: at}, buffers: 60},
		"GroupList":          {sql: db.GroupList, arg: db.GroupListParams{ProjectID: 1}, index: append(behind, "cursors_pkey"), seq: []string{"groups", "queues"}},
		"GroupLagging":       {sql: db.GroupLagging, arg: db.GroupLaggingParams{ProjectID: 1, MinLagSeconds: 3600, Max: 1000}, index: behind, seq: []string{"groups", "queues"}},
		"GroupPartitions":    {sql: db.GroupPartitions, arg: db.GroupPartitionsParams{Ids: []int32{2}}, index: []string{"cursors_pkey", "segments_pkey"}},
	}
}
