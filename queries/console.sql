-- What the console shows: the work of the last minutes, and where everything stands. project_id null: of all projects.

-- name: FlowAdd :exec
-- What a broker counted since it last wrote, added to the current minute. In one order, as other brokers do it.
insert into ferrymq.flow as f (bucket, queue_id, group_id, pushed, delivered, done, failed, dead)
select date_trunc('minute', clock_timestamp()), t.queue_id::int, t.group_id::int, t.pushed::bigint, t.delivered::bigint, t.done::bigint, t.failed::bigint, t.dead::bigint
from rows from (unnest(@queue_ids::int[]), unnest(@group_ids::int[]), unnest(@pushed::bigint[]), unnest(@delivered::bigint[]), unnest(@done::bigint[]),
                unnest(@failed::bigint[]), unnest(@dead::bigint[])) as t (queue_id, group_id, pushed, delivered, done, failed, dead)
order by t.queue_id, t.group_id
on conflict (queue_id, group_id, bucket) do update
set pushed = f.pushed + excluded.pushed, delivered = f.delivered + excluded.delivered, done = f.done + excluded.done, failed = f.failed + excluded.failed,
    dead = f.dead + excluded.dead;

-- name: FlowExpire :execrows
delete from ferrymq.flow f
where f.ctid = any(array(
    select x.ctid from ferrymq.flow x
    where x.bucket < statement_timestamp() - interval '2 hours'
    order by x.bucket
    limit @max::bigint));

-- name: FlowSums :many
-- The minutes of the last hour, over a project or over all.
select f.bucket, sum(f.pushed)::bigint as pushed, sum(f.delivered)::bigint as delivered, sum(f.done)::bigint as done, sum(f.failed)::bigint as failed,
       sum(f.dead)::bigint as dead
from ferrymq.flow f
where f.queue_id = 0 and f.bucket > statement_timestamp() - interval '61 minutes'
  and (sqlc.narg('project_id')::int is null or f.group_id = sqlc.narg('project_id')::int)
group by f.bucket
order by f.bucket;

-- name: FlowOfQueue :many
-- The same of one queue: what was pushed to it, and what its groups did.
select f.bucket, sum(f.pushed)::bigint as pushed, sum(f.delivered)::bigint as delivered, sum(f.done)::bigint as done, sum(f.failed)::bigint as failed,
       sum(f.dead)::bigint as dead
from ferrymq.flow f
where f.queue_id = @queue_id::int and f.bucket > statement_timestamp() - interval '61 minutes'
group by f.bucket
order by f.bucket;

-- name: ConsoleQueues :many
-- All queues by name, and what was pushed to each in the last ten minutes.
select q.id, q.project_id, j.name as project, q.name, coalesce(f.pushed, 0)::bigint as pushed
from ferrymq.queues q
join ferrymq.projects j on j.id = q.project_id and j.deleted_at is null
left join lateral (
    select sum(x.pushed) as pushed from ferrymq.flow x
    where x.queue_id = q.id and x.group_id = 0 and x.bucket > statement_timestamp() - interval '10 minutes'
) f on true
where q.deleted_at is null and (sqlc.narg('project_id')::int is null or q.project_id = sqlc.narg('project_id')::int)
order by q.name, q.project_id;

-- name: ConsoleQueueSizes :many
-- Of some queues: keys and messages, of at most so many partitions each (reach), and dead letters.
select x.id::int as queue_id, p.partitions::bigint as partitions, p.messages::bigint as messages, d.dead::bigint as dead
from unnest(@ids::int[]) as x (id)
cross join lateral (
    select count(*) as partitions, coalesce(sum(y.next_offset - y.first_offset), 0) as messages
    from (select z.next_offset, z.first_offset from ferrymq.partitions z where z.queue_id = x.id limit @reach::bigint) y
) p
cross join lateral (select count(*) as dead from ferrymq.dead_letters l where l.queue_id = x.id offset 0) d;

-- name: ConsoleGroups :many
-- Where all groups stand. lag, leased, failing and oldest are of the first hundred thousand cursors of each that are not drained; beyond
-- twenty thousand in all, oldest is that of an even sample. oldest is -1 without a lag.
with live as materialized (
    select g.id, g.kind, g.queue_id, g.name, g.paused, g.created_at, q.name as queue, q.project_id, j.name as project
    from ferrymq.groups g
    join ferrymq.queues q on q.id = g.queue_id and q.deleted_at is null
    join ferrymq.projects j on j.id = q.project_id and j.deleted_at is null
    where g.deleted_at is null and (sqlc.narg('project_id')::int is null or q.project_id = sqlc.narg('project_id')::int)
), opened as materialized (
    select l.id, c.partition_id, c.committed, c.leased, c.failing
    from live l
    cross join lateral (
        select k.partition_id, k.committed, coalesce(k.lease_until > statement_timestamp(), false) as leased,
               k.attempts > case when k.lease_until > statement_timestamp() then 1 else 0 end or k.failures > 0 as failing
        from ferrymq.cursors k where k.group_id = l.id and k.pending and k.not_before is null
        union all
        select k.partition_id, k.committed, false, k.attempts > 0 or k.failures > 0 from ferrymq.cursors k where k.group_id = l.id and k.not_before is not null
        limit 100000
    ) c
), behind as materialized (
    select o.id, o.partition_id, o.leased, o.failing, p.head, p.tail - p.head as messages
    from opened o
    cross join lateral (
        select greatest(o.committed, x.first_offset) as head, x.next_offset as tail from ferrymq.partitions x where x.id = o.partition_id offset 0
    ) p
    where p.tail > p.head
), ages as materialized (
    select b.id, greatest(extract(epoch from statement_timestamp() - min(s.created_at)), 0)::bigint as oldest
    from behind b
    cross join lateral (
        select x.created_at from ferrymq.segments x
        where x.partition_id = b.partition_id and x.base_offset <= b.head
        order by x.base_offset desc
        limit 1
    ) s
    where b.partition_id % (1 + (select count(*) from behind) / 20000) = 0
    group by b.id
), sums as materialized (
    select b.id, sum(b.messages) as lag, count(*) as keys, count(*) filter (where b.leased) as leased, count(*) filter (where b.failing) as failing
    from behind b group by b.id
)
select l.id, l.kind, l.queue_id, l.name, l.paused, l.created_at, l.queue, l.project_id, l.project, coalesce(s.lag, 0)::bigint as lag, coalesce(s.keys, 0)::bigint as keys,
       coalesce(s.leased, 0)::bigint as leased, coalesce(s.failing, 0)::bigint as failing, coalesce(a.oldest, -1)::bigint as oldest,
       coalesce(f.delivered, 0)::bigint as delivered, coalesce(f.done, 0)::bigint as done, coalesce(f.failed, 0)::bigint as failed, coalesce(f.dead, 0)::bigint as dead
from live l
left join sums s on s.id = l.id
left join ages a on a.id = l.id
left join lateral (
    select sum(x.delivered) as delivered, sum(x.done) as done, sum(x.failed) as failed, sum(x.dead) as dead from ferrymq.flow x
    where x.queue_id = l.queue_id and x.group_id = l.id and x.bucket > statement_timestamp() - interval '10 minutes'
) f on true
order by l.id;

-- name: ConsoleBlocked :many
-- Keys whose next message has failed before, or waits for its next attempt, with its last error and when it first failed, those that
-- have tried most first: of each group the first thousand. group_id null: of all.
with live as materialized (
    select g.id, g.kind, g.name, q.name as queue, j.name as project
    from ferrymq.groups g
    join ferrymq.queues q on q.id = g.queue_id and q.deleted_at is null
    join ferrymq.projects j on j.id = q.project_id and j.deleted_at is null
    where g.deleted_at is null and (sqlc.narg('project_id')::int is null or q.project_id = sqlc.narg('project_id')::int)
      and (@name::text = '' or g.name = @name::text) and (@queue::text = '' or q.name = @queue::text)
), blocked as (
    select l.id, l.kind, l.name, l.queue, l.project, c.*
    from live l
    cross join lateral (
        (select k.partition_id, k.committed, greatest(k.attempts, k.failures) as attempts, k.consumer, k.lease_until, k.not_before
         from ferrymq.cursors k
         where k.group_id = l.id and k.not_before is not null and (k.attempts > 0 or k.failures > 0)
         limit 1000)
        union all
        (select k.partition_id, k.committed, greatest(k.attempts, k.failures), k.consumer, k.lease_until, k.not_before
         from (select y.* from ferrymq.cursors y where y.group_id = l.id and y.pending and y.not_before is null limit 100000) k
         where k.attempts > case when k.lease_until > statement_timestamp() then 1 else 0 end or k.failures > 0
         limit 1000)
    ) c
)
select b.kind, b.name, b.queue, b.project, b.partition_id, p.public_id, p.name as key, p.hidden, p.head::bigint as head, b.attempts::int as attempts, coalesce(b.consumer, '')::text as consumer,
       (p.tail - p.head)::bigint as waiting, coalesce(b.lease_until, '0001-01-01T00:00:00Z')::timestamptz as lease_until,
       coalesce(b.not_before, '0001-01-01T00:00:00Z')::timestamptz as not_before, coalesce(e.since, '0001-01-01T00:00:00Z')::timestamptz as since,
       coalesce(e.error, '')::text as error, (count(*) over ())::bigint as total
from blocked b
cross join lateral (
    select x.public_id, x.name, x.hidden, greatest(b.committed, x.first_offset) as head, x.next_offset as tail from ferrymq.partitions x
    where x.id = b.partition_id and x.next_offset > greatest(b.committed, x.first_offset) offset 0
) p
left join lateral (
    select min(x.at) as since, (array_agg(x.error order by x.at desc))[1] as error from ferrymq.lane_events x
    where x.partition_id = b.partition_id and x.message_offset = p.head and x.group_id = b.id and x.kind = 1
) e on true
order by b.attempts desc, e.since, b.partition_id
limit @max::bigint;

-- name: ConsoleDead :many
-- The newest dead letters (reach), by group and error.
select d.queue_id, q.name as queue, j.name as project, d.group_id, coalesce(g.name, '')::text as name, coalesce(g.kind, 0)::smallint as kind,
       (g.id is not null and g.deleted_at is null)::boolean as live, d.error::text as error, d.lane::boolean as lane, count(*)::bigint as count,
       (count(*) filter (where d.failed_at > statement_timestamp() - interval '10 minutes'))::bigint as recent,
       min(d.failed_at)::timestamptz as first_seen, max(d.failed_at)::timestamptz as last_seen
from (
    select x.queue_id, x.group_id, coalesce(x.signature, left(x.error_message, 400)) as error, x.signature is not null as lane, x.failed_at
    from ferrymq.dead_letters x
    where x.failed_at < 'infinity'
    order by x.failed_at desc, x.id desc
    limit @reach::bigint
) d
join ferrymq.queues q on q.id = d.queue_id and q.deleted_at is null
join ferrymq.projects j on j.id = q.project_id and j.deleted_at is null
left join ferrymq.groups g on g.id = d.group_id
where (sqlc.narg('project_id')::int is null or q.project_id = sqlc.narg('project_id')::int)
group by d.queue_id, q.name, j.name, d.group_id, g.name, g.kind, g.id, g.deleted_at, d.error, d.lane
order by count(*) desc, max(d.failed_at) desc
limit @max::bigint;

-- name: ConsoleDeadOf :many
-- The newest dead letters (reach) of a group of the /api/v1 routes.
select d.id, left(d.error_message, 400)::text as error
from ferrymq.dead_letters d
where d.group_id = @group_id::int and d.queue_id = @queue_id::int and d.signature is null
order by d.failed_at desc, d.id desc
limit @reach::bigint;

-- name: ConsoleBrokers :many
select b.id, b.name, b.started_at, extract(epoch from clock_timestamp() - b.seen_at)::float8 as silent
from ferrymq.brokers b
where b.seen_at > clock_timestamp() - interval '1 hour'
order by b.name, b.started_at;

-- name: ConsoleDatabase :one
-- How the database stands, as far as any role may see it. In seconds: how long the oldest transaction has been open.
select current_setting('server_version')::text as version, pg_database_size(current_database())::bigint as bytes, current_setting('max_connections')::int as max_connections,
       (count(*) filter (where a.backend_type = 'client backend'))::bigint as connections,
       coalesce(max(extract(epoch from clock_timestamp() - a.xact_start)) filter (where a.backend_type = 'client backend' and a.datname = current_database()
                and a.pid <> pg_backend_pid()), 0)::float8 as oldest_transaction,
       (count(*) filter (where a.datname = current_database() and a.wait_event_type = 'Lock'))::bigint as waiting_for_locks, pg_is_in_recovery()::boolean as read_only
from pg_catalog.pg_stat_activity a;

-- name: ConsoleMessage :one
-- The segment that holds a message.
select s.base_offset, s.count, s.key_no, s.codec, s.first_id, s.created_at, s.frames
from ferrymq.partitions p
join ferrymq.queues q on q.id = p.queue_id and q.deleted_at is null and (sqlc.narg('project_id')::int is null or q.project_id = sqlc.narg('project_id')::int)
cross join lateral (
    select g.base_offset, g.count, g.key_no, g.codec, g.first_id, g.created_at, g.frames from ferrymq.segments g
    where g.partition_id = p.id and g.base_offset <= @message_offset::bigint
    order by g.base_offset desc
    limit 1
) s
where p.id = @partition_id::bigint and p.first_offset <= @message_offset::bigint and s.base_offset + s.count > @message_offset::bigint;
