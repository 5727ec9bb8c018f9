package db_test

import (
	"math"
	"time"

	"github.com/google/uuid"

	"ferrymq/db"
)

// deadStatements are those about the dead letters and traces of subscriptions.
func deadStatements(w *world) map[string]statement {
	var parts []int64
	ids, offsets, ns, zeros, frames := make([]uuid.UUID, 100), make([]int64, 100), make([]int32, 100), make([]int16, 100), make([][]byte, 100)
	for i := range int64(100) {
		parts, ids[i], frames[i] = append(parts, 1+i*(bigPartitions/100)), uuid.New(), []byte{}
	}
	far := time.Date(3000, 1, 1, 0, 0, 0, 0, time.UTC)
	dead := []string{"dead_letters_group"}
	signed := []string{"dead_letters_signature"}
	return map[string]statement{
		"LaneDeadLetters": {sql: db.LaneDeadLetters, arg: db.LaneDeadLettersParams{GroupID: deadGroup, BeforeTime: far, BeforeID: uuid.Max, Max: 100, Bytes: 1 << 20}, buffers: 1500, index: dead},
		"LaneDeadLettersOf": {sql: db.LaneDeadLettersOf, arg: db.LaneDeadLettersOfParams{GroupID: deadGroup, Signature: "s1", BeforeTime: far, BeforeID: uuid.Max, Max: 100, Bytes: 1 << 20},
			buffers: 1500, index: signed},
		"LaneSignatures": {sql: db.LaneSignatures, arg: db.LaneSignaturesParams{GroupID: deadGroup, Reach: 1000, BelowCount: math.MaxInt64, Max: 100}, buffers: 2000, index: dead},
		"LaneDeadScan":   {sql: db.LaneDeadScan, arg: db.LaneDeadScanParams{GroupID: deadGroup, AfterTime: epoch, Until: far, Max: 100, Bytes: 1 << 20}, buffers: 400, index: dead},
		"LaneDeadScanOf": {sql: db.LaneDeadScanOf, arg: db.LaneDeadScanOfParams{GroupID: deadGroup, Signature: "s1", AfterTime: epoch, Until: far, Max: 100, Bytes: 1 << 20}, buffers: 400, index: signed},
		"LaneDeadLock":   {sql: db.LaneDeadLock, arg: db.LaneDeadLockParams{Ids: ids, GroupID: deadGroup}, buffers: 900, index: []string{"dead_letters_pkey"}},
		"LaneRedrive": {sql: db.LaneRedrive, arg: db.LaneRedriveParams{Ids: ids, PartitionIds: parts, Rels: offsets, FromOffsets: offsets, Attempts: ns, KeyNos: zeros, Codecs: zeros,
			FirstIds: ids, Frames: frames, GroupID: deadGroup}, buffers: 5000, index: []string{"partitions_pkey"}},
		"LanePassIdle":   {sql: db.LanePassIdle, arg: db.LanePassIdleParams{Ids: parts, Bases: offsets, GroupID: deadGroup}, buffers: 4500, index: []string{"cursors_pkey"}},
		"LaneDeadDelete": {sql: db.LaneDeadDelete, arg: db.LaneDeadDeleteParams{Ids: ids, GroupID: deadGroup}, buffers: 900, index: []string{"dead_letters_pkey"}},

		"TraceMessage":     {sql: db.TraceMessage, arg: db.TraceMessageParams{MessageOffset: 550, ProjectID: 1, PartitionID: 77}, buffers: 60, index: []string{"segments_pkey"}},
		"TraceLanes":       {sql: db.TraceLanes, arg: db.TraceLanesParams{PartitionID: 77, QueueID: 1, Max: 100}, buffers: 900},
		"TraceEvents":      {sql: db.TraceEvents, arg: db.TraceEventsParams{PartitionID: 77, MessageOffset: 5, Max: 100}, buffers: 200, index: []string{"lane_events_address"}},
		"TraceDead":        {sql: db.TraceDead, arg: db.TraceDeadParams{PartitionID: 77, MessageOffset: 0, Max: 100}, buffers: 60, index: []string{"dead_letters_offset"}},
		"LaneEventsExpire": {sql: db.LaneEventsExpire, arg: db.LaneEventsExpireParams{Max: 100}, buffers: 900, index: []string{"lane_events_at"}},
	}
}

// deadGroup has many dead letters, of a few errors.
const deadGroup = 9
