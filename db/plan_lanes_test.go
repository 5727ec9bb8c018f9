package db_test

import (
	"time"

	"github.com/google/uuid"

	"ferrymq/db"
)

func laneStatements(w *world) map[string]statement {
	var parts []int64
	groups, ns, leases, frames := make([]int32, 100), make([]int32, 100), make([]uuid.UUID, 100), make([][]byte, 100)
	for i := range int32(100) {
		parts, groups[i], ns[i], leases[i], frames[i] = append(parts, 1+int64(i)*(bigPartitions/100)), 1+i%4, i, uuid.New(), []byte{}
	}
	texts, zeros, offsets, times := make([]string, 100), make([]int16, 100), make([]int64, 100), make([]time.Time, 100)
	return map[string]statement{
		"LockGroups": {sql: db.LockGroups, arg: db.LockGroupsParams{Ids: groups}, buffers: 60},
		"SettleLanes": {sql: db.SettleLanes, arg: db.SettleLanesParams{Ns: ns, GroupIds: groups, PartitionIds: parts, LeaseIds: leases, Actions: ns, Delays: offsets, Reaches: offsets,
			Errors: texts, Signatures: texts, DeadIds: leases, MessageIds: leases, TransactionIds: texts, KeyNos: zeros, Codecs: zeros, Frames: frames, CreatedAts: times},
			buffers: 900, index: []string{"cursors_pkey"}},
		"ExtendLanes": {sql: db.ExtendLanes, arg: db.ExtendLanesParams{Ns: ns, GroupIds: groups, PartitionIds: parts, LeaseIds: leases, Seconds: ns}, buffers: 900, index: []string{"cursors_pkey"}},
		"LaneStates":  {sql: db.LaneStates, arg: db.LaneStatesParams{GroupID: 1, PartitionIds: parts}, buffers: 900, index: []string{"cursors_pkey"}},

		"PartitionFindIDs":   {sql: db.PartitionFindIDs, arg: db.PartitionFindIDsParams{Ids: parts, QueueID: 1}, buffers: 900},
		"SubscriptionGet":    {sql: db.SubscriptionGet, arg: db.SubscriptionGetParams{ProjectID: 1, Name: "x"}, buffers: 60},
		"SubscriptionCreate": {sql: db.SubscriptionCreate, arg: db.SubscriptionCreateParams{QueueID: 1, ProjectID: 1, Name: "x", StartMode: "all"}, buffers: 60},
		"SubscriptionSet":    {sql: db.SubscriptionSet, arg: db.SubscriptionSetParams{LeaseSeconds: 1, BackoffMultiplier: 1, ID: 1}, buffers: 60},
		"QueueTouch":         {sql: db.QueueTouch, arg: db.QueueTouchParams{ID: 7}, buffers: 60},
	}
}
