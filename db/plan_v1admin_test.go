package db_test

import "ferrymq/db"

func v1AdminStatements(w *world) map[string]statement {
	var parts []int64
	for i := range int64(100) {
		parts = append(parts, 1+i*(bigPartitions/100))
	}
	return map[string]statement{
		"StreamPage":          {sql: db.StreamPage, arg: db.StreamPageParams{ProjectID: 1, After: "q1500", Max: 100}, buffers: 500, index: []string{"queues_name"}},
		"StreamNumbers":       {sql: db.StreamNumbers, arg: db.StreamNumbersParams{QueueID: 7}, buffers: 100, index: []string{"partitions_queue"}},
		"SubscriptionsDrop":   {sql: db.SubscriptionsDrop, arg: db.SubscriptionsDropParams{QueueID: 1}, buffers: 100},
		"SubscriptionRecount": {sql: db.SubscriptionRecount, arg: db.SubscriptionRecountParams{ID: 1}, buffers: 900, index: []string{"cursors_pending"}},
		"SubscriptionPage":    {sql: db.SubscriptionPage, arg: db.SubscriptionPageParams{ProjectID: 1, Max: 100}, buffers: 500},
		"SubscriptionNumbers": {sql: db.SubscriptionNumbers, arg: db.SubscriptionNumbersParams{ID: 1}, buffers: 6000, index: []string{"cursors_pending", "cursors_waiting", "segments_pkey"}},
		"LanePage":            {sql: db.LanePage, arg: db.LanePageParams{ID: 1, After: 50_000, Scan: 1000, Max: 100}, buffers: 2500, index: []string{"cursors_pending", "cursors_waiting"}},
		"QueueRemoveLanes":    {sql: db.QueueRemoveLanes, arg: db.QueueRemoveLanesParams{QueueID: 1, Ids: parts}, buffers: 1500, seq: []string{"groups"}},
	}
}
