package db_test

import (
	"time"

	"github.com/google/uuid"

	"ferrymq/db"
)

func messageStatements(w *world) map[string]statement {
	now := time.Now()
	from, to, far := now.Add(-3*time.Hour), now.Add(time.Minute), now.Add(24*time.Hour)
	past := now.Add(-90 * time.Minute)
	var parts, lows, befores, maxima []int64
	var queues []int32
	for i := range int64(100) {
		parts, lows, befores, maxima = append(parts, 1+i*(bigPartitions/100)), append(lows, 250), append(befores, 1000), append(maxima, 4)
		queues = append(queues, int32(2+i))
	}
	public := uuid.MustParse(one[string](w, "select public_id::text from ferrymq.partitions where id = 77"))
	ns := "n7"
	gid := int32(1)
	return map[string]statement{
		"BrowseRange":      {sql: db.BrowseRange, arg: db.BrowseRangeParams{FromTime: &from}, buffers: 1},
		"BrowseQueues":     {sql: db.BrowseQueues, arg: db.BrowseQueuesParams{ProjectID: 1, Namespace: &ns}, buffers: 200, seq: []string{"queues"}},
		"BrowseQueuesByID": {sql: db.BrowseQueuesByID, arg: db.BrowseQueuesByIDParams{Ids: queues}, buffers: 400},
		// One pass over the partitions, and no more segments than what is returned needs.
		"BrowseAll": {sql: db.BrowseAll, arg: db.BrowseAllParams{ToTime: to, ProjectID: 1, FromTime: from, BeforeTime: far, Max: 200},
			pass: bigPartitions, buffers: 10_000, seq: []string{"partitions", "queues"}},
		"BrowseOfQueues": {sql: db.BrowseOfQueues, arg: db.BrowseOfQueuesParams{ToTime: past, QueueIds: queues, FromTime: from, BeforeTime: far, Max: 200},
			buffers: 14_000, index: []string{"partitions_queue"}},
		"BrowseNamed": {sql: db.BrowseNamed, arg: db.BrowseNamedParams{ToTime: to, QueueIds: queues, Name: "p700", FromTime: from, BeforeTime: far, Max: 200},
			buffers: 900, index: []string{"partitions_queue_id_hidden_name_key"}},
		"BrowseSegments": {sql: db.BrowseSegments, arg: db.BrowseSegmentsParams{PartitionIds: parts, Lows: lows, Befores: befores, Maxima: maxima},
			buffers: 900, index: []string{"segments_pkey"}},
		"BrowseDeadSegments": {sql: db.BrowseDeadSegments, arg: db.BrowseDeadSegmentsParams{PartitionIds: parts, Lows: make([]int64, 100), Befores: befores, Maxima: maxima},
			buffers: 1500, index: []string{"dead_letters_offset", "segments_pkey"}},
		"BrowseDead":      {sql: db.BrowseDead, arg: db.BrowseDeadParams{PartitionIds: parts, Lows: make([]int64, 100), Befores: befores}, buffers: 900, index: []string{"dead_letters_offset"}},
		"BrowseCursors":   {sql: db.BrowseCursors, arg: db.BrowseCursorsParams{PartitionIds: parts}, buffers: 4500, index: []string{"cursors_pkey"}, seq: []string{"groups"}},
		"BrowseGroups":    {sql: db.BrowseGroups, arg: db.BrowseGroupsParams{QueueIds: queues}, buffers: 500},
		"BrowsePartition": {sql: db.BrowsePartition, arg: db.BrowsePartitionParams{ProjectID: 1, PublicID: public}, buffers: 60},
		"BrowseFind":      {sql: db.BrowseFind, arg: db.BrowseFindParams{Key: []byte("0123456789abcdef"), PartitionID: 77, Before: 1000, Low: -1, Max: 5}, buffers: 60, index: []string{"segments_pkey"}},

		"DeadLetterFind":       {sql: db.DeadLetterFind, arg: db.DeadLetterFindParams{PartitionID: 77, TransactionID: "t"}, buffers: 60, index: []string{"dead_letters_transaction"}},
		"DeadLetterAt":         {sql: db.DeadLetterAt, arg: db.DeadLetterAtParams{PartitionID: 77}, buffers: 60, index: []string{"dead_letters_offset"}},
		"DeadLetterGroups":     {sql: db.DeadLetterGroups, arg: db.DeadLetterGroupsParams{ProjectID: 1, Name: "g2", QueueID: &gid}, buffers: 60, index: []string{"groups_by_name", "groups_deleted"}},
		"DeadLetterPartitions": {sql: db.DeadLetterPartitions, arg: db.DeadLetterPartitionsParams{QueueIds: queues, Name: "p700"}, buffers: 900},
		"DeadLetterList": {sql: db.DeadLetterList, arg: db.DeadLetterListParams{Bytes: 1 << 20, ProjectID: 1, Every: true, FromTime: epoch, ToTime: far, BeforeTime: far, BeforeID: uuid.Max,
			Reach: 100, Max: 100}, buffers: 2500, index: []string{"dead_letters_failed_at", "dead_letters_queue", "dead_letters_group", "dead_letters_address", "dead_letters_pkey"}},
		"DeadLetterDelete":     {sql: db.DeadLetterDelete, arg: db.DeadLetterDeleteParams{PartitionID: 77, TransactionID: "t"}, buffers: 60, index: []string{"dead_letters_transaction"}},
		"DeadLetterNow":        {sql: db.DeadLetterNow, buffers: 1},
		"DeadLetterPurgeQueue": {sql: db.DeadLetterPurgeQueue, arg: db.DeadLetterPurgeQueueParams{QueueID: 77, Until: far, Max: 100}, buffers: 900, index: []string{"dead_letters_queue"}},
		"DeadLetterPurgeGroup": {sql: db.DeadLetterPurgeGroup, arg: db.DeadLetterPurgeGroupParams{GroupID: 1, Until: far, Max: 100}, buffers: 1500, index: []string{"dead_letters_group"}},

		"TraceCreate": {sql: db.TraceCreate, arg: db.TraceCreateParams{ProjectID: 1, PartitionID: public, ID: uuid.New(), TransactionID: "t", ConsumerGroup: "g", EventType: "info",
			Data: []byte("1"), Names: []string{"a", "b"}}, buffers: 100},
		"TraceOfMessage":   {sql: db.TraceOfMessage, arg: db.TraceOfMessageParams{PartitionID: public, TransactionID: "t", AfterTime: epoch, Max: 100, Bytes: 1 << 20}, buffers: 60, index: []string{"traces_address"}},
		"TraceByName":      {sql: db.TraceByName, arg: db.TraceByNameParams{Name: "n7", AfterTime: epoch, Max: 100, Bytes: 1 << 20}, buffers: 100, index: []string{"trace_names_pkey", "traces_pkey"}},
		"TraceUses":        {sql: db.TraceUses, arg: db.TraceUsesParams{BeforeTime: now, BeforeName: "x", Max: 100}, buffers: 100, index: []string{"trace_names_created_at"}},
		"TraceCounts":      {sql: db.TraceCounts, arg: db.TraceCountsParams{Names: []string{"n1", "n2", "n3"}}, buffers: 100, index: []string{"trace_names_pkey"}},
		"TracesExpire":     {sql: db.TracesExpire, arg: db.TracesExpireParams{Max: 100}, buffers: 400, index: []string{"traces_created_at"}},
		"TraceNamesExpire": {sql: db.TraceNamesExpire, arg: db.TraceNamesExpireParams{Max: 100}, buffers: 400, index: []string{"trace_names_created_at"}},
	}
}
