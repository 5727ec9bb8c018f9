package db_test

import (
	"context"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"ferrymq/db"
	"ferrymq/dbtest"
)

// statement is one query with arguments to plan it with.
type statement struct {
	sql string
	arg any // its Params, or nil
	// How many buffers one execution may touch whatever the tables hold; 0: the plan alone is looked at.
	buffers int
	index   []string // indexes the plan must use
	seq     []string // tables that are tiny by nature and may be read whole
	pass    float64  // rows a node may see, 0: 5000. For listings that are about all partitions by nature
}

const (
	bigPartitions = 100_000
	bigSegments   = 10 // per partition
	bigQueues     = 3000
	bigPending    = 300 // per group
)

// statements are all queries, with arguments for the data set of bigWorld.
func statements(w *world) map[string]statement {
	var parts []int64 // 100 partitions spread over the whole table
	var groups []int32
	leases := make([]uuid.UUID, 100)
	for i := range int64(100) {
		parts = append(parts, 1+i*(bigPartitions/100))
		groups = append(groups, int32(1+i%4))
	}
	var names []string
	var ones []int32
	for i := range 100 {
		names, ones = append(names, fmt.Sprintf("p%d", 1+i*(bigPartitions/100))), append(ones, 1)
	}
	var pushes []push
	var done []settle
	reaches := make([]int64, 100)
	for i, p := range parts {
		pushes = append(pushes, push{p, -1, []int{10}})
		done = append(done, settle{group: groups[i], partition: p, action: complete, expected: 1000, moveTo: 1000})
		reaches[i] = everything
	}
	pending := func(group int32, n int) (ids []int64) {
		rows := must[pgx.Rows](w.t)(w.pool.Query(w.ctx(), "select partition_id from ferrymq.cursors where group_id = $1 and pending and not_before is null order by partition_id limit $2", group, n))
		return must[[]int64](w.t)(pgx.CollectRows(rows, pgx.RowTo[int64]))
	}
	ten := list{group: 1, from: 50_000, scan: true, hints: pending(1, 5)}
	for range 10 {
		ten.slots = append(ten.slots, slot{lease: uuid.New(), budget: 10, parts: 1})
	}
	secs := make([]int32, 100)
	public := uuid.MustParse(one[string](w, "select public_id::text from ferrymq.partitions where id = 77"))
	now := time.Now()
	gid := int32(1)
	return map[string]statement{
		"FlushSettings": {sql: db.FlushSettings, arg: db.FlushSettingsParams{StatementTimeoutMs: "0", LockTimeoutMs: "0"}, buffers: 1},
		"LockPartitions": {sql: db.LockPartitions, arg: db.LockPartitionsParams{Ids: parts, Reaches: reaches},
			buffers: 900, index: []string{"partitions_pkey"}},
		"AppendSegments":   {sql: db.AppendSegments, arg: appends(pushes...), buffers: 3500, index: []string{"partitions_pkey"}},
		"CreatePartitions": {sql: db.CreatePartitions, arg: creation(uuid.New(), 2, "new", 10), buffers: 150},
		"CreateCursors":    {sql: db.CreateCursors, arg: db.CreateCursorsParams{PublicIds: []uuid.UUID{public}}, buffers: 100},
		"LockCursors": {sql: db.LockCursors, arg: db.LockCursorsParams{Pushed: parts, GroupIds: groups, PartitionIds: parts, LeaseIds: leases},
			buffers: 5000, index: []string{"cursors_pkey"}},
		"MarkPending":   {sql: db.MarkPending, arg: db.MarkPendingParams{Pushed: parts}, buffers: 4500, index: []string{"cursors_pkey"}},
		"SettleCursors": {sql: db.SettleCursors, arg: settles(done...), buffers: 6000, index: []string{"cursors_pkey", "partitions_pkey"}},
		"RestoreCursors": {sql: db.RestoreCursors, arg: db.RestoreCursorsParams{GroupIds: groups, PartitionIds: parts, StartOffsets: reaches, EndOffsets: reaches, ClaimedAts: make([]time.Time, 100), Rests: make([]bool, 100)},
			buffers: 900, index: []string{"cursors_pkey"}},
		"ExtendLeases": {sql: db.ExtendLeases, arg: db.ExtendLeasesParams{Ns: secs, GroupIds: groups, PartitionIds: parts, LeaseIds: leases, Seconds: secs},
			buffers: 900, index: []string{"cursors_pkey"}},
		"CompleteCursors": {sql: db.CompleteCursors, arg: completes(settles(done...)), buffers: 4500, index: []string{"cursors_pkey", "partitions_pkey"}},
		"ClaimHinted":     {sql: db.ClaimHinted, arg: hinted(list{group: 1, hints: pending(1, 10), slots: slots(10, 10, 1)}), buffers: 900, index: []string{"cursors_pkey", "partitions_pkey", "segments_pkey"}},
		"ClaimPartitions": {sql: db.ClaimPartitions, arg: claims(ten), buffers: 900, index: []string{"cursors_pkey", "cursors_pending", "partitions_pkey", "segments_pkey"}},

		"CursorGet":       {sql: db.CursorGet, arg: db.CursorGetParams{GroupID: 1, PartitionID: 77}, buffers: 60},
		"CursorCreate":    {sql: db.CursorCreate, arg: db.CursorCreateParams{GroupID: 99, PartitionID: 77, StartAt: now.Add(-time.Hour)}, buffers: 100},
		"LeaseFind":       {sql: db.LeaseFind, arg: db.LeaseFindParams{ProjectID: 1, LeaseID: uuid.New(), GroupID: 1}, buffers: 800},
		"ReadyGroups":     {sql: db.ReadyGroups, arg: db.ReadyGroupsParams{Ids: []int32{1, 2, 3, 4}, Wants: []int64{10, 10, 10, 10}}, buffers: 200, index: []string{"cursors_pending"}},
		"ReadyPartitions": {sql: db.ReadyPartitions, arg: db.ReadyPartitionsParams{GroupIds: groups, PartitionIds: parts}, buffers: 900},
		"GroupAvailable":  {sql: db.GroupAvailable, arg: db.GroupAvailableParams{GroupID: 1, Parts: 10}, buffers: 200, index: []string{"cursors_pending"}},
		"PromoteDue":      {sql: db.PromoteDue, arg: db.PromoteDueParams{Max: 10}, buffers: 300, index: []string{"cursors_not_before"}},
		"NextDue":         {sql: db.NextDue, buffers: 20, index: []string{"cursors_not_before"}},

		"GroupGet":          {sql: db.GroupGet, arg: db.GroupGetParams{QueueID: 1, Name: "g2"}, buffers: 60},
		"GroupCreate":       {sql: db.GroupCreate, arg: db.GroupCreateParams{QueueID: 1, Name: "new", Registered: true, StartMode: "all", StartAt: &now}, buffers: 60},
		"GroupRegister":     {sql: db.GroupRegister, arg: db.GroupRegisterParams{StartMode: "all", StartAt: &now, ID: 1}, buffers: 60},
		"GroupLock":         {sql: db.GroupLock, arg: db.GroupLockParams{ID: 1}, buffers: 60},
		"SeedLock":          {sql: db.SeedLock, arg: db.SeedLockParams{QueueID: 1, After: 50_000, Max: 100}, buffers: 900},
		"SeedCursors":       {sql: db.SeedCursors, arg: db.SeedCursorsParams{GroupID: 99, StartAt: now.Add(-time.Hour), Ids: parts}, buffers: 6000},
		"SeedAdvance":       {sql: db.SeedAdvance, arg: db.SeedAdvanceParams{ID: 1, SeededTo: 1}, buffers: 60},
		"DiscoveryRegister": {sql: db.DiscoveryRegister, arg: db.DiscoveryRegisterParams{ProjectID: 1, Name: "x", Namespace: "y", StartMode: "all", StartAt: &now}, buffers: 60},
		"DiscoveryOf":       {sql: db.DiscoveryOf, arg: db.DiscoveryOfParams{ProjectID: 1, Namespace: "n7", Task: "t"}, buffers: 60},
		"DiscoveryUnmet":    {sql: db.DiscoveryUnmet, arg: db.DiscoveryUnmetParams{ProjectID: 1, Namespace: "n7", Name: "g1"}, buffers: 400},
		"DiscoveryReady":    {sql: db.DiscoveryReady, arg: db.DiscoveryReadyParams{ProjectID: 1, Namespace: "n7", Name: "g1", Max: 10}, buffers: 400},

		"BrokerBeat":             {sql: db.BrokerBeat, arg: db.BrokerBeatParams{ID: uuid.New(), Name: "b"}, seq: []string{"brokers"}},
		"BrokerLeave":            {sql: db.BrokerLeave, arg: db.BrokerLeaveParams{ID: uuid.New()}, seq: []string{"brokers"}},
		"JobCreate":              {sql: db.JobCreate, arg: db.JobCreateParams{Kind: "seed", QueueID: 1, GroupID: &gid, DelaySeconds: 1}},
		"JobClaim":               {sql: db.JobClaim, arg: db.JobClaimParams{LeaseID: uuid.New()}, buffers: 100, index: []string{"jobs_due_at"}},
		"JobExtend":              {sql: db.JobExtend, arg: db.JobExtendParams{ID: 1, LeaseID: uuid.New()}, buffers: 60},
		"JobDone":                {sql: db.JobDone, arg: db.JobDoneParams{ID: 1, LeaseID: uuid.New()}, buffers: 60},
		"JobRecheckDone":         {sql: db.JobRecheckDone, arg: db.JobRecheckDoneParams{QueueID: 1}},
		"JobSeedDone":            {sql: db.JobSeedDone, arg: db.JobSeedDoneParams{GroupID: 1}, buffers: 100},
		"QueueRemoveLock":        {sql: db.QueueRemoveLock, arg: db.QueueRemoveLockParams{QueueID: 1, Max: 100}, buffers: 900},
		"QueueRemoveCursors":     {sql: db.QueueRemoveCursors, arg: db.QueueRemoveCursorsParams{QueueID: 1, Ids: parts}, buffers: 6500, seq: []string{"groups"}},
		"QueueRemoveSegments":    {sql: db.QueueRemoveSegments, arg: db.QueueRemoveSegmentsParams{Ids: parts, Max: 100}, buffers: 2500},
		"QueueRemovePartitions":  {sql: db.QueueRemovePartitions, arg: db.QueueRemovePartitionsParams{Ids: parts}, buffers: 900},
		"QueueRemoveDeadLetters": {sql: db.QueueRemoveDeadLetters, arg: db.QueueRemoveDeadLettersParams{QueueID: 1, Max: 100}, buffers: 900},
		"QueueRemoveGroups":      {sql: db.QueueRemoveGroups, arg: db.QueueRemoveGroupsParams{QueueID: 1000}, buffers: 100, seq: []string{"groups"}},
		"QueueRemove":            {sql: db.QueueRemove, arg: db.QueueRemoveParams{QueueID: 100}},
		"RecheckCursors":         {sql: db.RecheckCursors, arg: db.RecheckCursorsParams{GroupID: 1, After: 50_000, Max: 100}, buffers: 900},
		"GroupsOfQueue":          {sql: db.GroupsOfQueue, arg: db.GroupsOfQueueParams{QueueID: 1}, buffers: 60},
		"LeasesExpire":           {sql: db.LeasesExpire, arg: db.LeasesExpireParams{Max: 100}, buffers: 900},
		"Ping":                   {sql: db.Ping},

		"PartitionFindMany":   {sql: db.PartitionFindMany, arg: db.PartitionFindManyParams{QueueIds: ones, Names: names}, buffers: 900},
		"PartitionFindPublic": {sql: db.PartitionFindPublic, arg: db.PartitionFindPublicParams{ProjectID: 1, PublicIds: []uuid.UUID{public}}, buffers: 60},
		"PartitionLock":       {sql: db.PartitionLock, arg: db.PartitionLockParams{ID: 77}, buffers: 60},
		"SegmentKeys":         {sql: db.SegmentKeys, arg: db.SegmentKeysParams{PartitionID: 77, FromOffset: 500}, buffers: 60},
		"SegmentKeysAt":       {sql: db.SegmentKeysAt, arg: db.SegmentKeysAtParams{PartitionID: 77, FromOffset: 550, ToOffset: 700, Since: epoch}, buffers: 60},
		"SegmentAt":           {sql: db.SegmentAt, arg: db.SegmentAtParams{PartitionID: 77, AtOffset: 550}, buffers: 60},
		"SegmentFrames":       {sql: db.SegmentFrames, arg: db.SegmentFramesParams{PartitionIds: parts, BaseOffsets: make([]int64, 100)}, buffers: 900},
		"DedupStart":          {sql: db.DedupStart, arg: db.DedupStartParams{Since: now.Add(-time.Hour), ID: 77}, buffers: 100},

		"QueueGet":          {sql: db.QueueGet, arg: db.QueueGetParams{ProjectID: 1, Name: "q7"}, buffers: 60},
		"QueueChangedSince": {sql: db.QueueChangedSince, arg: db.QueueChangedSinceParams{Seconds: 10}, index: []string{"queues_updated_at"}},
		"QueueCreate":       {sql: db.QueueCreate, arg: db.QueueCreateParams{ProjectID: 1, Name: "new", Namespace: "a", Task: "b", UnkeyedLanes: 1}, buffers: 60},
		"QueueLock":         {sql: db.QueueLock, arg: db.QueueLockParams{ID: 7}, buffers: 60},
		"QueueRead":         {sql: db.QueueRead, arg: db.QueueReadParams{ID: 7}, buffers: 60},
		"QueueConfigure":    {sql: db.QueueConfigure, arg: db.QueueConfigureParams{LeaseTime: 1, UnkeyedLanes: 1, ID: 7}, buffers: 60},
		"QueueDelete":       {sql: db.QueueDelete, arg: db.QueueDeleteParams{ID: 7}, buffers: 60},
		"ProjectGet":        {sql: db.ProjectGet, arg: db.ProjectGetParams{Name: "default"}, buffers: 20, index: []string{"projects_name"}},
		"InstallationGet":   {sql: db.InstallationGet, seq: []string{"installation"}},
	}
}

// flushed are the statements of flushes, hot these and what runs beside many of them.
var flushed = []string{"LockPartitions", "AppendSegments", "CreatePartitions", "CreateCursors", "LockCursors", "MarkPending", "CompleteCursors", "SettleCursors", "RestoreCursors", "ExtendLeases",
	"ClaimHinted", "ClaimPartitions", "SettleLanes", "ExtendLanes", "OutboxLock", "OutboxMoved"}
var hot = append(slices.Clone(flushed), "LaneStates", "OutboxNext", "OutboxPeek", "CursorGet", "ReadyGroups", "ReadyPartitions", "GroupAvailable", "PromoteDue", "NextDue", "PartitionFindMany", "PartitionFindPublic", "PartitionLock",
	"SegmentKeys", "SegmentKeysAt", "SegmentAt", "SegmentFrames", "DedupStart", "CursorCreate", "SeedLock", "SeedCursors")

// generated are the names and texts of all queries that sqlc generated.
func generated(t *testing.T) map[string]string {
	t.Helper()
	files := must[[]string](t)(filepath.Glob("*.sql.go"))
	found := map[string]string{}
	for _, name := range files {
		f := must[*ast.File](t)(parser.ParseFile(token.NewFileSet(), name, nil, 0))
		for _, d := range f.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			for _, s := range g.Specs {
				v := s.(*ast.ValueSpec)
				found[v.Names[0].Name] = strings.Trim(v.Values[0].(*ast.BasicLit).Value, "`")
			}
		}
	}
	return found
}

// literal writes a Go value as PostgreSQL would read it.
func literal(v reflect.Value) string {
	switch x := v.Interface().(type) {
	case uuid.UUID:
		return "'" + x.String() + "'"
	case time.Time:
		return "'" + x.UTC().Format(time.RFC3339Nano) + "'"
	case []byte:
		return fmt.Sprintf(`'\x%x'`, x)
	case string:
		return "'" + strings.ReplaceAll(x, "'", "''") + "'"
	}
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return "null"
		}
		return literal(v.Elem())
	case reflect.Slice:
		items := make([]string, v.Len())
		for i := range items {
			e := v.Index(i)
			if b, ok := e.Interface().([]byte); ok {
				items[i] = fmt.Sprintf(`"\\x%x"`, b)
				continue
			}
			items[i] = `"` + strings.Trim(literal(e), "'") + `"`
		}
		return "'{" + strings.Join(items, ",") + "}'"
	}
	return fmt.Sprint(v.Interface())
}

// arguments is the parameter list of an EXECUTE: sqlc numbers the fields of a Params as the statement does.
func arguments(arg any) string {
	if arg == nil {
		return ""
	}
	v := reflect.ValueOf(arg)
	var out []string
	for i := range v.NumField() {
		out = append(out, literal(v.Field(i)))
	}
	return "(" + strings.Join(out, ", ") + ")"
}

// node is one node of a plan.
type node struct {
	Type     string  `json:"Node Type"`
	Relation string  `json:"Relation Name"`
	Index    string  `json:"Index Name"`
	Cond     string  `json:"Index Cond"`
	Hit      int     `json:"Shared Hit Blocks"`
	Read     int     `json:"Shared Read Blocks"`
	Rows     float64 `json:"Actual Rows"`
	Loops    float64 `json:"Actual Loops"`
	Filtered float64 `json:"Rows Removed by Filter"`
	Plans    []node  `json:"Plans"`
}

func (n *node) walk(visit func(*node)) {
	visit(n)
	for i := range n.Plans {
		n.Plans[i].walk(visit)
	}
}

// outline is the plan in a few short lines.
func (n *node) outline(indent string) string {
	s := fmt.Sprintf("%s%s %s %s rows=%.0f loops=%.0f filtered=%.0f buffers=%d\n", indent, n.Type, n.Relation, n.Index, n.Rows, n.Loops, n.Filtered, n.Hit+n.Read)
	for i := range n.Plans {
		s += n.Plans[i].outline(indent + "  ")
	}
	return s
}

func explain(ctx context.Context, conn pgx.Tx, name, options string, arg any) (*node, error) {
	var text string
	err := conn.QueryRow(ctx, "explain ("+options+"format json) execute \""+name+"\""+arguments(arg), pgx.QueryExecModeSimpleProtocol).Scan(&text)
	if err != nil {
		return nil, err
	}
	var plans []struct{ Plan node }
	if err := json.Unmarshal([]byte(text), &plans); err != nil {
		return nil, err
	}
	return &plans[0].Plan, nil
}

func prepare(t testing.TB, tx pgx.Tx, name, sql string) {
	t.Helper()
	if _, err := tx.Exec(t.Context(), "prepare \""+name+"\" as "+sql, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatalf("%s: %s", name, db.Text(err))
	}
}

// scans are the tables a plan reads whole, tiny ones aside.
func scans(root *node, tiny []string) (tables []string) {
	root.walk(func(n *node) {
		whole := n.Type == "Seq Scan" || (n.Type == "Index Scan" || n.Type == "Index Only Scan") && n.Cond == "" && n.Index != "cursors_not_before" &&
			n.Relation != "groups" && n.Relation != "queues" // in order of a key, up to where the other side of a merge ends
		if whole && !slices.Contains(tiny, n.Relation) {
			tables = append(tables, strings.TrimSpace(n.Relation+" "+n.Index))
		}
	})
	return tables
}

// bigWorld is a database with many partitions, segments, cursors and queues, analyzed.
func bigWorld(t testing.TB) *world {
	w := newWorld(t, 4)
	tx := must[pgx.Tx](t)(w.pool.Begin(t.Context()))
	defer tx.Rollback(context.Background())
	for _, table := range []string{"partitions", "segments", "cursors"} { // saves a third of the time
		if _, err := tx.Exec(t.Context(), "alter table ferrymq."+table+" set unlogged"); err != nil {
			t.Fatal(db.Text(err))
		}
	}
	fill(t, tx, bigPartitions, bigSegments, bigQueues, bigPending)
	check(t, tx.Commit(t.Context()))
	w.exec("analyze ferrymq.partitions, ferrymq.segments, ferrymq.cursors, ferrymq.queues, ferrymq.groups, ferrymq.dead_letters, ferrymq.lane_events, ferrymq.jobs, ferrymq.leases, ferrymq.discovery_groups, ferrymq.retired_keys, ferrymq.traces, ferrymq.trace_names, ferrymq.projects, ferrymq.api_keys, ferrymq.outbox, ferrymq.outbox_places")
	return w
}

// fill makes queue 1 with all partitions but one in a hundred and four groups, and many small queues with a group each.
func fill(t testing.TB, tx pgx.Tx, partitions, segments, queues, pending int) {
	t.Helper()
	for _, s := range []string{
		"set local session_replication_role = replica", // no foreign keys: only the loading is quicker
		fmt.Sprintf("insert into ferrymq.queues (project_id, name, namespace, task, updated_at) select 1, 'q' || i, 'n' || i %% 300, 't' || i %% 10, now() - interval '1 day' from generate_series(1, %d) i", queues),
		fmt.Sprintf(`insert into ferrymq.groups (queue_id, name, registered, start_mode, start_at, seeded)
			select case when i <= 4 then 1 else i - 3 end, 'g' || case when i <= 4 then i else 1 end, true, 'all', to_timestamp(0), true from generate_series(1, %d) i`, queues+3),
		fmt.Sprintf(`insert into ferrymq.partitions (public_id, queue_id, name, next_offset, created_at, last_push_at)
			select gen_random_uuid(), case when i %% 100 = 0 then 2 + i / 100 %% (%d - 1) else 1 end, 'p' || i, %d, now() - interval '2 day', now() - interval '1 hour'
			from generate_series(1, %d) i`, queues, segments*100, partitions),
		fmt.Sprintf(`insert into ferrymq.segments (partition_id, base_offset, count, key_no, codec, created_at, first_id, keys, frames)
			select p, s * 100, 100, 0, 0, now() - (%d - s) * interval '1 hour', '00000000-0000-7000-8000-000000000000', '', 'f' from generate_series(1, %d) p, generate_series(0, %d) s`,
			segments, partitions, segments-1),
		fmt.Sprintf(`insert into ferrymq.cursors (group_id, partition_id, committed, pending)
			select g.id, p.id, case when p.id %% (%[1]d / %[2]d) = 1 then p.next_offset / 2 else p.next_offset end, p.id %% (%[1]d / %[2]d) = 1
			from ferrymq.groups g join ferrymq.partitions p on p.queue_id = g.queue_id order by 1, 2`, partitions, pending),
		"update ferrymq.cursors set not_before = now() + interval '1 hour', pending = true where partition_id % 1000 = 3",
		`insert into ferrymq.dead_letters (id, queue_id, group_id, partition_id, message_offset, message_id, transaction_id, key_no, codec, frames, error_message, retry_count, message_created_at)
			select gen_random_uuid(), 1 + i % 1000, 1 + i % 1000, i, 0, gen_random_uuid(), 't', 0, 0, 'f', 'e', 1, now() from generate_series(1, 10000) i`,
		fmt.Sprintf(`insert into ferrymq.dead_letters (id, queue_id, group_id, partition_id, message_offset, message_id, transaction_id, key_no, codec, frames, error_message, retry_count, message_created_at, failed_at, signature)
			select gen_random_uuid(), 6, %d, i, 1, gen_random_uuid(), 't' || i, 0, 0, 'f', 'e', 1, now(), now() - i * interval '1 second', 's' || i %% 20 from generate_series(1, 5000) i`, deadGroup),
		`insert into ferrymq.lane_events (group_id, partition_id, message_offset, kind, attempt, at)
			select 9, i % 1000, i % 10, 1, 1, now() - i * interval '10 minutes' from generate_series(1, 20000) i`,
		`with t as (insert into ferrymq.traces select gen_random_uuid(), gen_random_uuid(), 't' || i % 1000, 'g', 'info', 'd', array['n' || i % 5000], null, null, now() - i * interval '1 second'
			from generate_series(1, 20000) i returning *)
			insert into ferrymq.trace_names select names[1], created_at, id, partition_id, transaction_id from t`,
		"insert into ferrymq.projects (name) select 'p' || i from generate_series(1, 5000) i on conflict do nothing",
		"insert into ferrymq.api_keys (id, project_id, name, scopes, hash) select gen_random_uuid(), 1 + i % 5000, 'k' || i, '{read}', sha256(i::text::bytea) from generate_series(1, 10000) i on conflict do nothing",
		"insert into ferrymq.leases (lease_id, group_id) select gen_random_uuid(), 1 from generate_series(1, 10000)",
		"insert into ferrymq.jobs (kind, queue_id, group_id, due_at) select 'seed', i, i, now() + i * interval '1 second' from generate_series(1, 5000) i",
		"insert into ferrymq.discovery_groups select 1, 'g' || i, 'n' || i % 300, '', 'all', now() from generate_series(1, 5000) i",
		"update ferrymq.partitions set expire_at = now() + (id % 5 - 1) * interval '1 hour' where id % 200 = 5",
		"update ferrymq.partitions set first_offset = 200, swept_offset = 100 where id % 1000 = 7",
		"update ferrymq.partitions set empty_since = now() - (id % 60) * interval '1 day' where id % 200 = 6",
		"insert into ferrymq.retired_keys select i % 5000, i, 1, now(), now() + (i % 100 - 2) * interval '1 minute', '00000000-0000-7000-8000-000000000000', '0123456789abcdef' from generate_series(1, 10000) i",
		"update ferrymq.queues set remind_at = now() + (id % 100 - 3) * interval '1 minute'",
		"insert into ferrymq.outbox (project_id, queue_id, stream, key, due_at, payload) select 1, 1 + i % 1000, 's', 'k' || i, now() + (i - 100) * interval '1 second', '1' from generate_series(1, 50000) i",
		"insert into ferrymq.outbox (project_id, queue_id, stream, key, payload) select 1, 1 + i % 1000, 's', 'k' || i, '1' from generate_series(1, 5000) i",
		"insert into ferrymq.outbox_places (id, partition_id, message_offset, moved_at) select i, i, 0, now() - i * interval '1 hour' from generate_series(1, 20000) i on conflict do nothing",
		"set local session_replication_role = origin",
	} {
		if _, err := tx.Exec(t.Context(), s); err != nil {
			t.Fatalf("%s: %s", s, db.Text(err))
		}
	}
}

// TestPlans looks at the generic plan of every query on much data: no table is read whole, and what an execution touches does not grow with it.
func TestPlans(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("builds a large data set")
	}
	began := time.Now()
	w := bigWorld(t)
	t.Logf("data set built in %v", time.Since(began).Round(time.Millisecond))
	all := statements(w)
	for _, more := range []func(*world) map[string]statement{groupStatements, transactionStatements, messageStatements, retentionStatements, systemStatements,
		statsStatements, activityStatements, laneStatements, keyStatements, deadStatements, v1AdminStatements, outboxStatements, consoleStatements} {
		maps.Copy(all, more(w))
	}
	texts := generated(t)
	for name, sql := range texts {
		if s, ok := all[name]; !ok || s.sql != sql {
			t.Errorf("query %s is missing from the list of this test", name)
		}
	}
	equal(t, "number of queries", len(all), len(texts))

	conn := must[pgx.Tx](t)(w.pool.Begin(t.Context()))
	defer conn.Rollback(context.Background())
	if _, err := conn.Exec(t.Context(), "set local plan_cache_mode = force_generic_plan"); err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		s := all[name]
		prepare(t, conn, name, s.sql)
		sub := must[pgx.Tx](t)(conn.Begin(t.Context())) // rolled back
		options := ""
		if s.buffers > 0 {
			options = "analyze, buffers, timing off, "
		}
		root, err := explain(t.Context(), sub, name, options, s.arg)
		if err != nil {
			t.Errorf("%s: %s", name, db.Text(err))
		} else {
			used := map[string]bool{}
			worst := 0.0
			root.walk(func(n *node) {
				used[n.Index] = true
				worst = max(worst, (n.Rows+n.Filtered)*n.Loops)
			})
			bad := false
			if found := scans(root, s.seq); len(found) > 0 {
				bad = true
				t.Errorf("%s reads %v whole", name, found)
			}
			for _, i := range s.index {
				if !used[i] {
					bad = true
					t.Errorf("%s does not use index %s", name, i)
				}
			}
			touched := root.Hit + root.Read
			if s.buffers > 0 && (touched > s.buffers || worst > max(s.pass, 5000)) {
				bad = true
				t.Errorf("%s touched %d buffers, more than %d, or a node saw too many rows: %.0f", name, touched, s.buffers, worst)
			}
			if s.buffers > 0 {
				t.Logf("%-22s %5d buffers, at most %5.0f rows in a node", name, touched, worst)
			}
			if bad {
				t.Log(root.outline(""))
			}
		}
		check(t, sub.Rollback(t.Context()))
	}
}

// TestPlansUnanalyzed plans the hot statements when the tables are empty and keeps the plans while the tables grow,
// once more when they have grown and nobody has analyzed them, or only when they were empty, and when they are drained but were analyzed full.
func TestPlansUnanalyzed(t *testing.T) {
	t.Parallel()
	for _, v := range []struct { // the mode is of what runs outside of flushes
		mode  string
		empty bool // analyzed when the tables are
	}{{"force_generic_plan", false}, {"auto", false}, {"auto", true}} {
		mode := v.mode
		t.Run(fmt.Sprint(mode, v.empty), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 3)
			for _, table := range []string{"partitions", "segments", "cursors", "queues", "groups", "outbox"} {
				w.exec("alter table ferrymq." + table + " set (autovacuum_enabled = off)")
			}
			if v.empty {
				w.exec("analyze")
			}
			conn := must[pgx.Tx](t)(w.pool.Begin(t.Context()))
			defer conn.Rollback(context.Background())
			if _, err := conn.Exec(t.Context(), "select set_config('plan_cache_mode', $1, true)", mode); err != nil {
				t.Fatal(err)
			}
			texts := generated(t)
			fake := statementsOnEmpty()
			look := func(when string) {
				for _, name := range hot {
					sub := must[pgx.Tx](t)(conn.Begin(t.Context()))
					if slices.Contains(flushed, name) {
						check(t, db.New(sub).FlushSettings(t.Context(), db.FlushSettingsParams{StatementTimeoutMs: "0", LockTimeoutMs: "0"}))
					}
					// Six times: from then on a cached plan may be kept whatever happens.
					var root *node
					for range 6 {
						var err error
						if root, err = explain(t.Context(), sub, name+mode, "", fake[name]); err != nil {
							t.Fatalf("%s: %s", name, db.Text(err))
						}
					}
					tiny := []string{"groups", "queues", "in_flight"} // in_flight: those of limited subscriptions
					if name == "PromoteDue" {                         // by ctid when the table has grown; it runs when something is due, and soon there are statistics
						tiny = append(tiny, "cursors")
					}
					if found := scans(root, tiny); len(found) > 0 {
						t.Errorf("%s, planned %s, reads %v whole", name, when, found)
					}
					check(t, sub.Rollback(t.Context()))
				}
			}
			for _, name := range hot {
				prepare(t, conn, name+mode, texts[name])
			}
			if !v.empty { // else only for so long: planAge
				look("on empty tables")
			}
			// In another session: this one would plan anew after what makes loading quick.
			check(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error { fill(t, tx, 5000, 4, 500, 100); return nil }))
			if v.empty {
				if _, err := conn.Exec(t.Context(), "discard plans", pgx.QueryExecModeSimpleProtocol); err != nil {
					t.Fatal(err)
				}
			}
			look("before the tables grew, or when its plans were discarded")
			again := func() {
				for _, name := range hot {
					if _, err := conn.Exec(t.Context(), "deallocate \""+name+mode+"\"", pgx.QueryExecModeSimpleProtocol); err != nil {
						t.Fatal(err)
					}
					prepare(t, conn, name+mode, texts[name])
				}
			}
			again()
			look("on tables that were never analyzed since")
			w.exec("update ferrymq.cursors set pending = true, committed = 0")
			w.exec("analyze")
			again()
			look("on full tables")
			w.exec("update ferrymq.cursors c set pending = false, not_before = null, committed = p.next_offset from ferrymq.partitions p where p.id = c.partition_id")
			w.exec("delete from ferrymq.outbox")
			look("on full tables that have been drained")
			again()
			look("on drained tables that were analyzed full")
		})
	}
}

// TestPlansRenewed: a plan that was made when its table was empty is not kept for as long as its connection lives.
func TestPlansRenewed(t *testing.T) {
	t.Parallel()
	pool := must[*pgxpool.Pool](t)(db.NewPool(t.Context(), dbtest.New(t), 1, time.Minute))
	defer pool.Close()
	if _, err := pool.Exec(t.Context(), "create table public.small (id int primary key) with (autovacuum_enabled = off); analyze public.small; set plan_cache_mode = force_generic_plan", pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	plan := func(ago time.Duration) string {
		conn := must[*pgxpool.Conn](t)(pool.Acquire(t.Context()))
		defer conn.Release()
		rows := must[pgx.Rows](t)(conn.Query(t.Context(), "explain execute find(1)", pgx.QueryExecModeSimpleProtocol))
		lines := must[[]string](t)(pgx.CollectRows(rows, pgx.RowTo[string]))
		conn.Conn().PgConn().CustomData()["planned"] = time.Now().Add(-ago)
		return strings.Join(lines, "\n")
	}
	if _, err := pool.Exec(t.Context(), "prepare find(int) as select from public.small where id = $1", pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	plan(0)
	if _, err := pool.Exec(t.Context(), "insert into public.small select generate_series(1, 10000)"); err != nil {
		t.Fatal(err)
	}
	if p := plan(time.Hour); !strings.Contains(p, "Seq Scan") {
		t.Fatalf("this is no plan that gets too old: %s", p)
	}
	if p := plan(0); strings.Contains(p, "Seq Scan") {
		t.Errorf("an hour later: %s", p)
	}
}

func statementsOnEmpty() map[string]any {
	l := list{group: 1, scan: true, hints: []int64{1, 2, 3}, slots: []slot{{lease: uuid.New(), budget: 10}, {lease: uuid.New(), budget: 10}}}
	ids, groups, ns := []int64{1, 2, 3}, []int32{1, 1, 1}, []int32{0, 1, 2}
	leases := make([]uuid.UUID, 3)
	now := time.Now()
	return map[string]any{
		"LockPartitions":      db.LockPartitionsParams{Ids: ids, Reaches: ids},
		"AppendSegments":      appends(push{1, -1, []int{1}}, push{2, -1, []int{1}}, push{3, -1, []int{1}}),
		"CreatePartitions":    creation(uuid.New(), 1, "new", 1),
		"CreateCursors":       db.CreateCursorsParams{PublicIds: leases},
		"LockCursors":         db.LockCursorsParams{Pushed: ids, GroupIds: groups, PartitionIds: ids, LeaseIds: leases},
		"MarkPending":         db.MarkPendingParams{Pushed: ids},
		"SettleCursors":       settles(settle{group: 1, partition: 1}, settle{group: 1, partition: 2}, settle{group: 1, partition: 3}),
		"CompleteCursors":     completes(settles(settle{group: 1, partition: 1}, settle{group: 1, partition: 2}, settle{group: 1, partition: 3})),
		"ClaimHinted":         hinted(list{group: 1, hints: ids, slots: slots(3, 10, 1)}),
		"RestoreCursors":      db.RestoreCursorsParams{GroupIds: groups, PartitionIds: ids, StartOffsets: ids, EndOffsets: ids, ClaimedAts: make([]time.Time, 3), Rests: make([]bool, 3)},
		"ExtendLeases":        db.ExtendLeasesParams{Ns: ns, GroupIds: groups, PartitionIds: ids, LeaseIds: leases, Seconds: ns},
		"ClaimPartitions":     claims(l),
		"CursorGet":           db.CursorGetParams{GroupID: 1, PartitionID: 1},
		"ReadyGroups":         db.ReadyGroupsParams{Ids: groups, Wants: ids},
		"ReadyPartitions":     db.ReadyPartitionsParams{GroupIds: groups, PartitionIds: ids},
		"GroupAvailable":      db.GroupAvailableParams{GroupID: 1, Parts: 1},
		"PromoteDue":          db.PromoteDueParams{Max: 10},
		"NextDue":             nil,
		"PartitionFindMany":   db.PartitionFindManyParams{QueueIds: groups, Names: []string{"a", "b", "c"}},
		"PartitionFindPublic": db.PartitionFindPublicParams{ProjectID: 1, PublicIds: leases},
		"PartitionLock":       db.PartitionLockParams{ID: 1},
		"SegmentKeys":         db.SegmentKeysParams{PartitionID: 1, FromOffset: 1},
		"SegmentKeysAt":       db.SegmentKeysAtParams{PartitionID: 1, FromOffset: 1, ToOffset: 2, Since: now},
		"SegmentAt":           db.SegmentAtParams{PartitionID: 1, AtOffset: 1},
		"SegmentFrames":       db.SegmentFramesParams{PartitionIds: []int64{1, 2}, BaseOffsets: []int64{0, 0}},
		"DedupStart":          db.DedupStartParams{Since: now, ID: 1},
		"CursorCreate":        db.CursorCreateParams{GroupID: 1, StartAt: now, PartitionID: 1},
		"SettleLanes": db.SettleLanesParams{Ns: ns, GroupIds: groups, PartitionIds: ids, LeaseIds: leases, Actions: ns, Delays: ids, Reaches: ids, Errors: make([]string, 3),
			Signatures: make([]string, 3), DeadIds: leases, MessageIds: leases, TransactionIds: make([]string, 3), KeyNos: make([]int16, 3), Codecs: make([]int16, 3),
			Frames: [][]byte{{}, {}, {}}, CreatedAts: make([]time.Time, 3)},
		"ExtendLanes": db.ExtendLanesParams{Ns: ns, GroupIds: groups, PartitionIds: ids, LeaseIds: leases, Seconds: ns},
		"LaneStates":  db.LaneStatesParams{GroupID: 1, PartitionIds: ids},
		"OutboxLock":  db.OutboxLockParams{Ids: ids},
		"OutboxMoved": db.OutboxMovedParams{PlaceIds: ids, PartitionIds: ids, MessageOffsets: ids, Ids: ids},
		"OutboxNext":  nil,
		"OutboxPeek":  db.OutboxPeekParams{RestProjects: []int32{}, RestStreams: []string{}, RestKeys: []string{}, Max: 100, Bytes: 1 << 20},
		"SeedLock":    db.SeedLockParams{QueueID: 1, After: 1, Max: 10},
		"SeedCursors": db.SeedCursorsParams{GroupID: 1, StartAt: now, Ids: ids},
	}
}
