package db_test

import (
	"github.com/google/uuid"

	"ferrymq/db"
)

// outboxStatements are those about messages on their way to their streams.
func outboxStatements(w *world) map[string]statement {
	ids, delays, zeros, firsts, frames, names := make([]int64, 100), make([]int64, 100), make([]int16, 100), make([]uuid.UUID, 100), make([][]byte, 100), make([]string, 100)
	projects := make([]int32, 100)
	for i := range ids {
		ids[i], frames[i] = int64(1+i*500), []byte{}
	}
	places := make([]int64, 100)
	for i := range places {
		places[i] = int64(100_000 + i)
	}
	return map[string]statement{
		"OutboxAdd":  {sql: db.OutboxAdd, arg: db.OutboxAddParams{Keys: names, Delays: delays, KeyNos: zeros, Codecs: zeros, FirstIds: firsts, Frames: frames, QueueID: 7}, buffers: 1500},
		"OutboxNext": {sql: db.OutboxNext, buffers: 20, index: []string{"outbox_now", "outbox_due"}},
		"OutboxPeek": {sql: db.OutboxPeek, arg: db.OutboxPeekParams{RestProjects: projects[:10], RestStreams: names[:10], RestKeys: names[:10], Max: 100, Bytes: 1 << 20}, buffers: 2000,
			index: []string{"outbox_now", "outbox_due", "outbox_pkey"}},
		"OutboxClaim":        {sql: db.OutboxClaim, buffers: 20, seq: []string{"sweeps"}},
		"OutboxLock":         {sql: db.OutboxLock, arg: db.OutboxLockParams{Ids: ids}, buffers: 900, index: []string{"outbox_pkey"}},
		"OutboxMoved":        {sql: db.OutboxMoved, arg: db.OutboxMovedParams{PlaceIds: places, PartitionIds: places, MessageOffsets: places, Ids: ids}, buffers: 1800, index: []string{"outbox_pkey"}},
		"OutboxDrop":         {sql: db.OutboxDrop, arg: db.OutboxDropParams{Ids: ids}, buffers: 900, index: []string{"outbox_pkey"}},
		"OutboxRemoveQueue":  {sql: db.OutboxRemoveQueue, arg: db.OutboxRemoveQueueParams{QueueID: 7, Max: 100}, buffers: 900, index: []string{"outbox_queue"}},
		"OutboxPlacesExpire": {sql: db.OutboxPlacesExpire, arg: db.OutboxPlacesExpireParams{Max: 100}, buffers: 900, index: []string{"outbox_places_moved_at"}},
		"OutboxFind":         {sql: db.OutboxFind, arg: db.OutboxFindParams{ID: 77, ProjectID: 1}, buffers: 20, index: []string{"outbox_pkey", "outbox_places_pkey"}},
	}
}
