package db_test

import (
	"time"

	"github.com/google/uuid"

	"ferrymq/db"
)

func transactionStatements(w *world) map[string]statement {
	public := uuid.MustParse(one[string](w, "select public_id::text from ferrymq.partitions where id = 77"))
	dead := uuid.MustParse(one[string](w, "select id::text from ferrymq.dead_letters where partition_id = 77"))
	return map[string]statement{
		"DeadLetterNewest": {sql: db.DeadLetterNewest, arg: db.DeadLetterNewestParams{TransactionID: "t", ProjectID: 1, PublicID: public}, buffers: 60},
		"DeadLetterGet":    {sql: db.DeadLetterGet, arg: db.DeadLetterGetParams{ProjectID: 1, ID: dead}, buffers: 60},
		"DeadLetterTake":   {sql: db.DeadLetterTake, arg: db.DeadLetterTakeParams{ID: dead}, buffers: 60},
		"CursorLock":       {sql: db.CursorLock, arg: db.CursorLockParams{GroupID: 1, PartitionID: 77}, buffers: 60, index: []string{"cursors_pkey"}},
		"DeadLetterHead": {sql: db.DeadLetterHead, arg: db.DeadLetterHeadParams{Committed: 1, GroupID: 1, PartitionID: 77, ID: uuid.New(), Frames: []byte("f"), MessageCreatedAt: time.Now()},
			buffers: 100, index: []string{"cursors_pkey"}},
	}
}
