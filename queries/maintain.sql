-- name: BrokerBeat :one
-- Keeps this broker alive in the table and says whether others are. back: what the last beat (last) wrote is not there any more, so
-- the database has been set back to an earlier time.
with before as materialized (
    select b.seen_at from ferrymq.brokers b where b.id = @id::uuid
), beat as (
    insert into ferrymq.brokers (id, name) values (@id::uuid, @name::text)
    on conflict (id) do update set seen_at = clock_timestamp()
    returning seen_at
)
select (select count(*) from ferrymq.brokers b where b.id <> @id::uuid and b.seen_at > clock_timestamp() - interval '10 seconds')::bigint as others,
       clock_timestamp()::timestamptz as now, t.seen_at::timestamptz as seen_at,
       (not exists (select from before x where x.seen_at >= @last::timestamptz))::boolean as back
from beat t;

-- name: BrokerLeave :exec
delete from ferrymq.brokers b where b.id = @id::uuid or b.seen_at < clock_timestamp() - interval '1 day';

-- name: JobCreate :exec
-- delay_seconds: how long the broker that creates it has to do the work itself before others take it up.
insert into ferrymq.jobs (kind, queue_id, group_id, due_at)
values (@kind::text, @queue_id::int, sqlc.narg('group_id')::int, clock_timestamp() + make_interval(secs => @delay_seconds::int));

-- name: JobClaim :one
-- A job whose worker died is due again when its lease ends.
update ferrymq.jobs j
set lease_id = @lease_id::uuid, lease_until = clock_timestamp() + interval '30 seconds', due_at = clock_timestamp() + interval '30 seconds'
where j.id = (
    select d.id from ferrymq.jobs d
    where d.due_at <= statement_timestamp()
    order by d.due_at
    limit 1
    for no key update skip locked)
returning j.id, j.kind, j.queue_id, j.group_id, j.project_id;

-- name: JobExtend :execrows
-- Zero rows: another broker took the job over, stop.
update ferrymq.jobs j
set lease_until = clock_timestamp() + interval '30 seconds', due_at = clock_timestamp() + interval '30 seconds'
where j.id = @id::bigint and j.lease_id = @lease_id::uuid;

-- name: JobDone :exec
delete from ferrymq.jobs j where j.id = @id::bigint and j.lease_id = @lease_id::uuid;

-- name: JobRecheckDone :exec
delete from ferrymq.jobs j where j.kind = 'recheck' and j.queue_id = @queue_id::int;

-- name: JobSeedDone :exec
delete from ferrymq.jobs j where j.kind = 'seed' and j.group_id = @group_id::int;

-- name: QueueRemoveLock :many
select p.id from ferrymq.partitions p
where p.queue_id = @queue_id::int
order by p.id
limit @max::bigint
for update;

-- name: QueueRemoveCursors :exec
with doomed as materialized (
    select c.group_id, c.partition_id
    from ferrymq.groups g
    join ferrymq.cursors c on c.group_id = g.id and c.partition_id = any(@ids::bigint[])
    where g.queue_id = @queue_id::int
    order by c.group_id, c.partition_id
    for update of c
)
delete from ferrymq.cursors c
using doomed d
where c.group_id = d.group_id and c.partition_id = d.partition_id;

-- name: QueueRemoveSegments :execrows
delete from ferrymq.segments s
where (s.partition_id, s.base_offset) in (
    select x.partition_id, x.base_offset from ferrymq.segments x
    where x.partition_id = any(@ids::bigint[])
    order by x.partition_id, x.base_offset
    limit @max::bigint);

-- name: QueueRemovePartitions :exec
delete from ferrymq.partitions p where p.id = any(@ids::bigint[]);

-- name: QueueRemoveDeadLetters :execrows
delete from ferrymq.dead_letters d
where d.id in (select x.id from ferrymq.dead_letters x where x.queue_id = @queue_id::int order by x.failed_at limit @max::bigint);

-- name: QueueRemoveGroups :exec
delete from ferrymq.groups g where g.queue_id = @queue_id::int;

-- name: QueueRemove :exec
delete from ferrymq.queues q where q.id = @queue_id::int;

-- name: RecheckCursors :one
-- After a configure: delays and windows are judged anew, a backoff (a failed message is not passed yet) stays.
-- Walks the cursors of the queue's groups in steps, 0 = done.
with step as materialized (
    select c.group_id, c.partition_id
    from ferrymq.cursors c
    where c.group_id = @group_id::int and c.partition_id > @after::bigint
    order by c.partition_id
    limit @max::bigint
), waiting as materialized (
    select c.group_id, c.partition_id
    from step s
    join ferrymq.cursors c on c.group_id = s.group_id and c.partition_id = s.partition_id
    where c.not_before is not null and c.failed_offset is null
    order by c.group_id, c.partition_id
    for no key update of c
), cleared as (
    update ferrymq.cursors c
    set not_before = null
    from waiting s
    where c.group_id = s.group_id and c.partition_id = s.partition_id
)
select coalesce(max(s.partition_id), 0)::bigint as last from step s;

-- name: GroupsOfQueue :many
select g.id from ferrymq.groups g where g.queue_id = @queue_id::int and g.deleted_at is null order by g.id;

-- name: LeasesExpire :execrows
-- A lease cannot outlive 12 hours without an extend, a day is past any.
delete from ferrymq.leases l
where l.ctid = any(array(
    select x.ctid from ferrymq.leases x
    where x.created_at < statement_timestamp() - interval '2 days'
    order by x.created_at
    limit @max::bigint));

-- name: Ping :one
select 1::int as one;
