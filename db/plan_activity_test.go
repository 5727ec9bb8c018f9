package db_test

import (
	"time"

	"ferrymq/db"
)

// activityStatements fills the history first: a week of two brokers, and of the last hour 2000 queues.
func activityStatements(w *world) map[string]statement {
	zeros := "0" + func() (s string) {
		for range 20 {
			s += ", 0"
		}
		return s
	}()
	w.exec(`insert into ferrymq.activity select date_trunc('minute', now()) - m * interval '1 minute', 0, 'b' || b, ` + zeros + ` from generate_series(0, 10100) m, generate_series(1, 2) b`)
	w.exec(`insert into ferrymq.activity select date_trunc('minute', now()) - m * interval '1 minute', q, 'b1', ` + zeros + ` from generate_series(0, 60) m, generate_series(1, 2000) q`)
	w.exec(`insert into ferrymq.broker_activity select date_trunc('minute', now()) - m * interval '1 minute', 'b' || b, 0, 0, 0, 0, 0, 0, 0, 0 from generate_series(0, 10100) m, generate_series(1, 2) b`)
	w.exec("analyze ferrymq.activity, ferrymq.broker_activity")
	add := db.ActivityAddParams{Broker: "b1", WallMs: 1}
	columns := []*[]int64{&add.PushRequests, &add.PushMessages, &add.PopRequests, &add.PopMessages, &add.PopEmpty, &add.AckRequests, &add.AckSuccess, &add.AckFailed,
		&add.Transactions, &add.PartitionsCreated, &add.PartitionsDeleted, &add.RetentionMessages, &add.CompletedRetentionMessages, &add.EvictionMessages,
		&add.RetentionEvents, &add.DeadLetters, &add.DbErrors, &add.LagSumMs, &add.LagCount, &add.LagMaxMs, &add.Parked}
	for q := range int32(100) {
		add.QueueIds = append(add.QueueIds, q)
		for _, c := range columns {
			*c = append(*c, 1)
		}
	}
	ids := []int32{1}
	for q := int32(10); q < 3000; q += 30 {
		ids = append(ids, q)
	}
	after, before := time.Now().Add(-time.Hour), time.Now()
	queues := []string{"queues"}           // a listing of queues walks them
	groups := []string{"queues", "groups"} // and their groups
	return map[string]statement{
		"ActivityAdd":          {sql: db.ActivityAdd, arg: add, buffers: 2500},
		"ActivityExpire":       {sql: db.ActivityExpire, arg: db.ActivityExpireParams{Max: 10}, buffers: 100, index: []string{"activity_bucket"}},
		"BrokerActivityExpire": {sql: db.BrokerActivityExpire, arg: db.BrokerActivityExpireParams{Max: 10}, buffers: 100, index: []string{"broker_activity_pkey"}},
		"ActivityQueues":       {sql: db.ActivityQueues, arg: db.ActivityQueuesParams{ProjectID: 1, Name: "q7"}, seq: queues},
		"ActivitySeries": {sql: db.ActivitySeries, arg: db.ActivitySeriesParams{Minutes: 1, QueueIds: []int32{0}, After: after, Before: before, Max: 100},
			buffers: 200, index: []string{"activity_pkey"}},
		"ActivityByQueue": {sql: db.ActivityByQueue, arg: db.ActivityByQueueParams{Minutes: 1, After: after, Before: before, ProjectID: 1, Name: "q7", Max: 100},
			buffers: 1000, index: []string{"activity_pkey"}, seq: queues},
		"ActivityParked": {sql: db.ActivityParked, arg: db.ActivityParkedParams{Minutes: 1, After: after, Before: before, ProjectID: 1, Name: "q7", Max: 100},
			buffers: 1000, index: []string{"activity_pkey"}, seq: queues},
		"ActivityBrokers":      {sql: db.ActivityBrokers, arg: db.ActivityBrokersParams{After: after, Before: before}, buffers: 200, index: []string{"activity_pkey"}},
		"BrokerActivitySeries": {sql: db.BrokerActivitySeries, arg: db.BrokerActivitySeriesParams{Minutes: 1, After: after, Before: before}, buffers: 200, index: []string{"broker_activity_pkey"}},

		// What these touch grows with queues, with cursors that have something to deliver, and with dead letters.
		"QueueGauges":            {sql: db.QueueGauges, arg: db.QueueGaugesParams{Ids: ids}, buffers: 6000, index: []string{"cursors_pending", "dead_letters_queue"}},
		"SubscriptionGauges":     {sql: db.SubscriptionGauges, arg: db.SubscriptionGaugesParams{ProjectID: 1, Max: 1000}, buffers: 6000, index: []string{"groups_subscription", "cursors_pending", "cursors_waiting", "segments_pkey"}},
		"StatusLeases":           {sql: db.StatusLeases, arg: db.StatusLeasesParams{ProjectID: 1}, index: []string{"cursors_pending"}, seq: groups},
		"StatusDeadLetters":      {sql: db.StatusDeadLetters, arg: db.StatusDeadLettersParams{ProjectID: 1}, index: []string{"dead_letters_queue"}, seq: queues},
		"StatusDeadLetterErrors": {sql: db.StatusDeadLetterErrors, arg: db.StatusDeadLetterErrorsParams{ProjectID: 1}, index: []string{"dead_letters_queue"}, seq: queues},

		// Of PostgreSQL's own views, and of few tables.
		"PostgresDatabase": {sql: db.PostgresDatabase, seq: catalogs},
		"PostgresTables":   {sql: db.PostgresTables, seq: catalogs},
		"PostgresIndexes":  {sql: db.PostgresIndexes, seq: catalogs},
		"PostgresActive":   {sql: db.PostgresActive, seq: catalogs},
	}
}

var catalogs = []string{"pg_class", "pg_index", "pg_namespace", "pg_database", "pg_authid"}
