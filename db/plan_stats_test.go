package db_test

import (
	"strings"

	"ferrymq/db"
)

func statsStatements(w *world) map[string]statement {
	group := "g1"
	var ids []int32
	var parts []int64
	for i := range int32(100) {
		ids = append(ids, 2+i*20)
		parts = append(parts, int64(i)*1000+1)
	}
	small := []string{"queues"} // what walks them walks their numbers too
	return map[string]statement{
		"NumbersWanted": {sql: db.NumbersWanted, buffers: 10, seq: []string{"system"}},
		"NumbersWant":   {sql: db.NumbersWant, buffers: 10, seq: []string{"system"}},
		"QueuePage":     {sql: db.QueuePage, arg: db.QueuePageParams{ProjectID: 1, Skip: 100, Max: 100}, buffers: 200, seq: small},
		// 100 small queues; then the big one, whose partitions are counted but not looked at one by one for their backlog.
		"QueueNumbers":      {sql: db.QueueNumbers, arg: db.QueueNumbersParams{Ids: ids, Lag: true}, buffers: 4000},
		"QueuePendingCount": {sql: db.QueuePendingCount, arg: db.QueuePendingCountParams{QueueID: 1}, buffers: 4500, index: []string{"cursors_pending", "cursors_waiting"}},
		"QueueDepth":        {sql: db.QueueDepth, arg: db.QueueDepthParams{QueueID: 1, Group: &group, Max: 100}, buffers: 4500},
		"QueueSegments":     {sql: db.QueueSegments, arg: db.QueueSegmentsParams{Ids: ids[:10]}, buffers: 1500},
		"PartitionPage": {sql: db.PartitionPage, arg: db.PartitionPageParams{ProjectID: 1, Last: strings.Repeat("\U0010ffff", 64), Skip: 100, Max: 100, Upto: 200},
			buffers: 1500, index: []string{"partitions_queue_id_hidden_name_key"}},
		"PartitionNumbers": {sql: db.PartitionNumbers, arg: db.PartitionNumbersParams{Ids: parts}, buffers: 9000, index: []string{"cursors_pkey", "partitions_pkey", "segments_pkey"}},
	}
}
