package db_test

import "ferrymq/db"

// consoleStatements fills the flow first: two hours of 500 queues and their groups.
func consoleStatements(w *world) map[string]statement {
	w.exec(`insert into ferrymq.flow select date_trunc('minute', now()) - m * interval '1 minute', q, g, 1, 1, 1, 1, 1
	        from generate_series(0, 119) m, generate_series(0, 500) q, generate_series(0, 1) g`)
	w.exec("analyze ferrymq.flow")
	var add db.FlowAddParams
	for q := range int32(100) {
		add.QueueIds, add.GroupIds = append(add.QueueIds, q), append(add.GroupIds, q)
		for _, c := range []*[]int64{&add.Pushed, &add.Delivered, &add.Done, &add.Failed, &add.Dead} {
			*c = append(*c, 1)
		}
	}
	tiny := []string{"queues", "projects", "groups"} // what lists all of them walks them
	return map[string]statement{
		"FlowAdd":     {sql: db.FlowAdd, arg: add, buffers: 1500},
		"FlowExpire":  {sql: db.FlowExpire, arg: db.FlowExpireParams{Max: 10}, buffers: 100, index: []string{"flow_bucket"}},
		"FlowSums":    {sql: db.FlowSums, arg: db.FlowSumsParams{}, buffers: 200, index: []string{"flow_pkey"}},
		"FlowOfQueue": {sql: db.FlowOfQueue, arg: db.FlowOfQueueParams{QueueID: 7}, buffers: 200, index: []string{"flow_pkey"}},

		"ConsoleMessage": {sql: db.ConsoleMessage, arg: db.ConsoleMessageParams{PartitionID: 77, MessageOffset: 1}, buffers: 60, index: []string{"partitions_pkey", "segments_pkey"}, seq: []string{"queues"}},

		// What these touch grows with queues, groups, cursors that are not drained, and dead letters.
		"ConsoleQueues":     {sql: db.ConsoleQueues, arg: db.ConsoleQueuesParams{}, index: []string{"flow_pkey"}, seq: tiny},
		"ConsoleQueueSizes": {sql: db.ConsoleQueueSizes, arg: db.ConsoleQueueSizesParams{Ids: []int32{10, 40, 70}, Reach: 1000}, buffers: 3000, index: []string{"partitions_queue", "dead_letters_queue"}},
		"ConsoleGroups":     {sql: db.ConsoleGroups, arg: db.ConsoleGroupsParams{}, index: []string{"cursors_pending", "cursors_waiting", "partitions_pkey", "segments_pkey", "flow_pkey"}, seq: tiny},
		"ConsoleBlocked":    {sql: db.ConsoleBlocked, arg: db.ConsoleBlockedParams{Max: 100}, index: []string{"cursors_pending", "cursors_waiting", "partitions_pkey", "lane_events_address"}, seq: tiny},
		"ConsoleDead":       {sql: db.ConsoleDead, arg: db.ConsoleDeadParams{Reach: 1000, Max: 100}, index: []string{"dead_letters_failed_at"}, seq: tiny},
		"ConsoleDeadOf":     {sql: db.ConsoleDeadOf, arg: db.ConsoleDeadOfParams{QueueID: 1, GroupID: 1, Reach: 1000}, index: []string{"dead_letters_group"}},

		"ConsoleBrokers":  {sql: db.ConsoleBrokers, seq: []string{"brokers"}},
		"ConsoleDatabase": {sql: db.ConsoleDatabase, seq: catalogs},

		// Asked by people, and once at a start.
		"CheckServer":  {sql: db.CheckServer, seq: catalogs},
		"CheckTables":  {sql: db.CheckTables, seq: catalogs},
		"CheckBrokers": {sql: db.CheckBrokers, seq: []string{"brokers"}},
	}
}
