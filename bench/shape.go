package main

import (
	"bytes"
	"encoding/json"
	"regexp"
	"time"
)

// shapes compares sampled answers (the first and every 1,024th of each connection) with the
// contract, key by key. Off with -shape=false, for other products.
type shapes struct {
	ck *checker
	on bool
}

var uuid7 = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)

// decode reads v and complains about unknown keys.
func (s *shapes) decode(what string, answer []byte, v any) bool {
	d := json.NewDecoder(bytes.NewReader(answer))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		s.ck.violate("shape", "%s: %v in %s", what, err, clip(answer))
		return false
	}
	return true
}

func (s *shapes) demand(ok bool, what string, answer []byte) {
	if !ok {
		s.ck.violate("shape", "%s in %s", what, clip(answer))
	}
}

func (s *shapes) push(answer []byte, sent []id, r *run) {
	var items []struct {
		Index                    *int
		MessageID                string `json:"message_id"`
		TransactionID            string `json:"transaction_id"`
		QueueName, Status, Error string
		PartitionID              *string `json:"partitionId"`
	}
	if !s.on || !s.decode("push answer", answer, &items) {
		return
	}
	for i, it := range items {
		s.demand(it.Index != nil && *it.Index == i, "push: wrong index", answer)
		s.demand(it.QueueName == r.queueOf(int(sent[i].stream)), "push: wrong queueName", answer)
		s.demand(uuid7.MatchString(it.MessageID), "push: message_id is no UUIDv7", answer)
		s.demand(it.PartitionID != nil || it.Status == "failed", "push: no partitionId", answer)
		want := it.MessageID
		if !r.c.noTxid {
			b := sent[i].appendTxid(nil)
			want = string(b[1 : len(b)-1])
		}
		s.demand(it.TransactionID == want, "push: wrong transaction_id", answer)
	}
}

func (s *shapes) ack(answer []byte, r *run) {
	var items []map[string]json.RawMessage
	if !s.on || !s.decode("ack answer", answer, &items) {
		return
	}
	for _, it := range items {
		for _, key := range []string{"index", "transactionId", "success", "error", "leaseReleased", "dlq", "noop"} {
			s.demand(it[key] != nil && len(it) == 7, "ack: not the seven keys", answer)
		}
	}
}

func (s *shapes) pop(answer []byte, queue, group string) {
	type msg struct {
		ID, TransactionID, PartitionID, Partition, LeaseID, ConsumerGroup *string
		CreatedAt                                                         *string
		TraceID, ProducerSub, Data                                        json.RawMessage
	}
	var a struct {
		Success                                               bool
		Queue, Partition, PartitionID, LeaseID, ConsumerGroup string
		Messages                                              []msg
		PartitionsClaimed                                     int
	}
	if !s.on || !s.decode("pop answer", answer, &a) {
		return
	}
	if group == "" {
		group = "__QUEUE_MODE__"
	}
	s.demand(a.Success && a.Queue == queue && a.ConsumerGroup == group && uuid7.MatchString(a.LeaseID), "pop: wrong top level", answer)
	partitions, last, seen := 0, "", map[string]string{}
	for _, m := range a.Messages {
		if m.ID == nil || m.TransactionID == nil || m.PartitionID == nil || m.Partition == nil || m.LeaseID == nil ||
			m.ConsumerGroup == nil || m.CreatedAt == nil || m.TraceID == nil || m.ProducerSub == nil || m.Data == nil {
			s.demand(false, "pop: a message lacks one of the ten keys", answer)
			return
		}
		s.demand(*m.LeaseID == a.LeaseID && *m.ConsumerGroup == group && uuid7.MatchString(*m.ID), "pop: wrong id, leaseId or consumerGroup of a message", answer)
		_, err := time.Parse("2006-01-02T15:04:05.000000Z", *m.CreatedAt)
		s.demand(err == nil && *m.CreatedAt >= seen[*m.PartitionID], "pop: createdAt misspelt or going back", answer)
		if *m.PartitionID != last {
			partitions++
			s.demand(seen[*m.PartitionID] == "", "pop: messages not grouped by partition", answer)
			s.demand(partitions > 1 || *m.PartitionID == a.PartitionID && *m.Partition == a.Partition, "pop: wrong partition at the top", answer)
		}
		last, seen[*m.PartitionID] = *m.PartitionID, *m.CreatedAt
	}
	s.demand(partitions == a.PartitionsClaimed && partitions > 0, "pop: wrong partitionsClaimed", answer)
}
