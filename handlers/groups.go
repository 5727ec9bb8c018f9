package handlers

import (
	"bytes"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/google/uuid"

	"ferrymq/db"
	"ferrymq/groupcommit"
)

func groupRoutes() []route {
	return []route{
		on("GET", "/api/v1/consumer-groups", readOnly, (*API).listGroups),
		on("GET", "/api/v1/consumer-groups/lagging", readOnly, (*API).laggingGroups),
		on("GET", "/api/v1/consumer-groups/{group}", readOnly, (*API).getGroup),
		on("POST", "/api/v1/consumer-groups/{group}/subscription", readWrite, (*API).setSubscription),
		on("POST", "/api/v1/consumer-groups/{group}/queues/{queue}/seek", readWrite, (*API).seekQueue),
		on("POST", "/api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek", readWrite, (*API).seekPartition),
		on("DELETE", "/api/v1/consumer-groups/{group}", admin, (*API).deleteGroup),
		on("DELETE", "/api/v1/consumer-groups/{group}/queues/{queue}", admin, (*API).deleteGroup),
	}
}

// checkNames holds the names of a path to their limits.
func checkNames(names []string, fields ...string) error {
	for i, s := range names {
		if !validName(s, maxName) {
			return badName(fields[i], maxName)
		}
	}
	return nil
}

type listedGroup struct {
	Name                  string   `json:"name"`
	Topics                []string `json:"topics"`
	QueueName             string   `json:"queueName"`
	Members               int64    `json:"members"`
	PartitionCursors      int64    `json:"partitionCursors"`
	PartitionsWithLag     int64    `json:"partitionsWithLag"`
	TotalLag              int64    `json:"totalLag"`
	MaxTimeLag            int64    `json:"maxTimeLag"`
	State                 string   `json:"state"`
	Storage               string   `json:"storage"`
	SubscriptionMode      *string  `json:"subscriptionMode"`
	SubscriptionTimestamp *instant `json:"subscriptionTimestamp"`
	SubscriptionCreatedAt *instant `json:"subscriptionCreatedAt"`
	Conflation            bool     `json:"conflation"`
}

// laggingAfter is how many seconds behind a group is called lagging.
const laggingAfter = 300

func (a *API) listGroups(w http.ResponseWriter, r *request) error {
	rows, err := a.queries.GroupList(r.Context(), db.GroupListParams{ProjectID: r.engine.Project})
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	list := make([]listedGroup, len(rows))
	for i, g := range rows {
		list[i] = listedGroup{Name: g.Name, Topics: []string{g.Queue}, QueueName: g.Queue, Members: g.Members, PartitionCursors: g.Members,
			PartitionsWithLag: g.PartitionsWithLag, TotalLag: g.TotalLag, MaxTimeLag: g.MaxTimeLag, State: "Dead", Storage: "segments"}
		if g.MaxTimeLag > laggingAfter {
			list[i].State = "Lagging"
		} else if g.Consumed {
			list[i].State = "Stable"
		}
		if g.Registered {
			start, created := instant(g.StartAt), instant(g.CreatedAt)
			list[i].SubscriptionMode, list[i].SubscriptionTimestamp, list[i].SubscriptionCreatedAt = &rows[i].StartMode, &start, &created
		}
	}
	return a.reply(w, http.StatusOK, list)
}

type laggingPartition struct {
	ConsumerGroup      string         `json:"consumer_group"`
	QueueName          string         `json:"queue_name"`
	PartitionName      string         `json:"partition_name"`
	PartitionID        uuid.UUID      `json:"partition_id"`
	WorkerID           *uuid.UUID     `json:"worker_id"`
	OffsetLag          int64          `json:"offset_lag"`
	TimeLagSeconds     int64          `json:"time_lag_seconds"`
	LagHours           jsontext.Value `json:"lag_hours"`
	OldestUnconsumedAt instant        `json:"oldest_unconsumed_at"`
	LastConsumedAt     *instant       `json:"last_consumed_at"` // not kept: always null
}

// maxLagging is how many partitions the lagging route lists at most, those furthest behind.
const maxLagging = 1000

func (a *API) laggingGroups(w http.ResponseWriter, r *request) error {
	p := params{values: query(r.URL)}
	least := p.number("minLagSeconds", 3600, 0, math.MaxInt32)
	if p.err != nil {
		return p.err
	}
	rows, err := a.queries.GroupLagging(r.Context(), db.GroupLaggingParams{ProjectID: r.engine.Project, MinLagSeconds: least, Max: maxLagging})
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	list := make([]laggingPartition, len(rows))
	for i, x := range rows {
		list[i] = laggingPartition{ConsumerGroup: x.Name, QueueName: x.Queue, PartitionName: x.Partition, PartitionID: x.PublicID, WorkerID: lease(x.LeaseID),
			OffsetLag: x.OffsetLag, TimeLagSeconds: x.TimeLag, LagHours: strconv.AppendFloat(nil, float64(x.TimeLag)/3600, 'f', 2, 64),
			OldestUnconsumedAt: instant(x.CreatedAt)}
	}
	return a.reply(w, http.StatusOK, list)
}

// lease is the id of a live lease, or nil.
func lease(id uuid.UUID) *uuid.UUID {
	if id == uuid.Nil {
		return nil
	}
	return &id
}

type groupQueue struct {
	Conflation bool             `json:"conflation"`
	Partitions []groupPartition `json:"partitions"`
}

type groupPartition struct {
	Partition      string     `json:"partition"`
	WorkerID       *uuid.UUID `json:"workerId"`
	LastConsumedAt *instant   `json:"lastConsumedAt"` // not kept: always null
	TotalConsumed  int64      `json:"totalConsumed"`
	OffsetLag      int64      `json:"offsetLag"`
	TimeLagSeconds int64      `json:"timeLagSeconds"`
	LeaseActive    bool       `json:"leaseActive"`
}

func (a *API) getGroup(w http.ResponseWriter, r *request) error {
	if err := checkNames(r.params, "consumerGroup"); err != nil {
		return err
	}
	found, err := a.queries.GroupsByName(r.Context(), db.GroupsByNameParams{ProjectID: r.engine.Project, Name: r.params[0]})
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	out := make(map[string]*groupQueue, len(found))
	byID := make(map[int32]*groupQueue, len(found))
	ids := make([]int32, len(found))
	for i, g := range found {
		q := &groupQueue{}
		out[g.Queue], byID[g.ID], ids[i] = q, q, g.ID
	}
	if len(ids) > 0 {
		rows, err := a.queries.GroupPartitions(r.Context(), db.GroupPartitionsParams{Ids: ids})
		if err != nil {
			return a.databaseError(r, err, "query failed")
		}
		for _, x := range rows {
			q := byID[x.GroupID]
			q.Partitions = append(q.Partitions, groupPartition{Partition: x.Partition, WorkerID: lease(x.LeaseID), TotalConsumed: x.Consumed,
				OffsetLag: x.OffsetLag, TimeLagSeconds: x.TimeLag, LeaseActive: x.LeaseID != uuid.Nil})
		}
	}
	return a.reply(w, http.StatusOK, out)
}

// optionalMoment is a time as text, or nil for null.
func (d *document) optionalMoment() (*time.Time, error) {
	if null, err := d.null(); null || err != nil {
		return nil, err
	}
	if d.kind() != '"' {
		return nil, d.wrong("a time")
	}
	s, err := d.optionalText()
	if err != nil {
		return nil, err
	}
	t, ok := parseTime(*s)
	if !ok || t.Year() < 1 || t.Year() > 9999 {
		return nil, d.wrong("a time")
	}
	return &t, nil
}

func (a *API) setSubscription(w http.ResponseWriter, r *request) error {
	if err := checkNames(r.params, "consumerGroup"); err != nil {
		return err
	}
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	var at *time.Time
	err = parse(body, func(d *document) error {
		return d.object(func(name string) (err error) {
			if name != "subscriptionTimestamp" {
				return d.skip()
			}
			at, err = d.optionalMoment()
			return err
		})
	})
	if err != nil {
		return err
	}
	if at == nil {
		return bad("subscriptionTimestamp is required")
	}
	n, err := r.engine.Catalog.Restart(r.Context(), r.params[0], *at)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	return a.reply(w, http.StatusOK, struct {
		Success       bool    `json:"success"`
		ConsumerGroup string  `json:"consumerGroup"`
		NewTimestamp  instant `json:"newTimestamp"`
		RowsUpdated   int64   `json:"rowsUpdated"`
	}{true, r.params[0], instant(*at), n})
}

// readTarget reads where to seek. optional: a body that says nothing means to the end.
func readTarget(body []byte, optional bool) (to groupcommit.Target, err error) {
	var end *bool
	var at *time.Time
	if !optional || len(bytes.TrimSpace(body)) > 0 {
		err = parse(body, func(d *document) error {
			return d.object(func(name string) (err error) {
				switch name {
				case "toEnd":
					end, err = d.optionalBool()
				case "timestamp":
					at, err = d.optionalMoment()
				default:
					err = d.skip()
				}
				return err
			})
		})
	}
	switch {
	case err != nil:
		return to, err
	case end != nil && *end, end == nil && at == nil && optional:
		to.End = true
	case at != nil:
		to.At = *at
	default:
		return to, bad("Must specify toEnd=true or a timestamp")
	}
	return to, nil
}

// optionalBool is true or false, or nil for null.
func (d *document) optionalBool() (*bool, error) {
	k := d.kind()
	if k != 't' && k != 'f' && k != 'n' && k != 0 {
		return nil, d.wrong("a boolean")
	}
	if err := d.skip(); err != nil || k == 'n' {
		return nil, err
	}
	b := k == 't'
	return &b, nil
}

// appendTarget says where a seek went.
func appendTarget(b []byte, to groupcommit.Target) []byte {
	b = strconv.AppendBool(append(b, `,"seekToEnd":`...), to.End)
	if to.End {
		return append(b, `,"targetTimestamp":null`...)
	}
	return append(to.At.UTC().AppendFormat(append(b, `,"targetTimestamp":"`...), timeMilli), '"')
}

func (a *API) seekQueue(w http.ResponseWriter, r *request) error {
	if err := checkNames(r.params, "consumerGroup", "queue"); err != nil {
		return err
	}
	group, queue := r.params[0], r.params[1]
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	to, err := readTarget(body, false)
	if err != nil {
		return err
	}
	found, moved, err := r.engine.Seek(r.Context(), queue, group, to)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	names := func(b []byte) []byte {
		return quote(append(quote(append(b, `"consumerGroup":`...), group), `,"queueName":`...), queue)
	}
	if !found {
		b := names([]byte(`{"success":false,"error":"Queue not found or has no partitions",`))
		return &httpError{status: http.StatusNotFound, raw: append(b, `,"partitionsUpdated":0}`...)}
	}
	b := appendTarget(names([]byte(`{"success":true,`)), to)
	return a.write(w, http.StatusOK, append(strconv.AppendInt(append(b, `,"partitionsUpdated":`...), moved, 10), '}'))
}

func (a *API) seekPartition(w http.ResponseWriter, r *request) error {
	if err := checkNames(r.params, "consumerGroup", "queue", "partition"); err != nil {
		return err
	}
	group, queue, partition := r.params[0], r.params[1], r.params[2]
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	to, err := readTarget(body, true)
	if err != nil {
		return err
	}
	found, moved, err := r.engine.SeekPartition(r.Context(), queue, partition, group, to)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	names := func(b []byte) []byte {
		b = quote(append(quote(append(b, `"consumerGroup":`...), group), `,"queueName":`...), queue)
		return quote(append(b, `,"partitionName":`...), partition)
	}
	if !found {
		b := names([]byte(`{"success":false,"error":"Partition not found",`))
		return &httpError{status: http.StatusNotFound, raw: append(b, `,"updated":false}`...)}
	}
	b := appendTarget(names([]byte(`{"success":true,`)), to)
	return a.write(w, http.StatusOK, append(strconv.AppendBool(append(b, `,"updated":`...), moved), '}'))
}

// deleteGroup deletes a group of one queue, or of all.
func (a *API) deleteGroup(w http.ResponseWriter, r *request) error {
	if err := checkNames(r.params, "consumerGroup", "queue"); err != nil {
		return err
	}
	p := params{values: query(r.URL)}
	keep := p.text("deleteMetadata") != "" && !p.boolean("deleteMetadata")
	if p.err != nil {
		return p.err
	}
	queue := ""
	if len(r.params) > 1 {
		queue = r.params[1]
	}
	cursors, registrations, err := r.engine.DeleteGroup(r.Context(), queue, r.params[0], keep)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	b := quote([]byte(`{"success":true,"consumerGroup":`), r.params[0])
	b = strconv.AppendInt(append(b, `,"deletedPartitions":`...), cursors, 10)
	b = strconv.AppendBool(append(b, `,"metadataDeleted":`...), registrations)
	if queue != "" {
		b = quote(append(b, `,"queueName":`...), queue)
	}
	return a.write(w, http.StatusOK, append(b, '}'))
}
