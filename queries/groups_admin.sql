-- Consumer groups as an operator sees them: listings, seek, delete, subscriptions.
--
-- A group is deleted by its deleted_at, and everything joins live groups. What makes cursors holds the group (GroupHold, GroupLock)
-- or its queue's row (CreateCursors) until it commits, so that a deleted group gets no more of them.

-- name: GroupHold :one
-- Keeps a group from being deleted until the transaction ends. Comes before any lock on a partition.
select g.id, g.registered, g.start_at
from ferrymq.groups g
where g.id = @id::int and g.deleted_at is null
for key share;

-- name: SeekChunk :many
select p.id from ferrymq.partitions p
where p.queue_id = @queue_id::int and p.id > @after::bigint
order by p.id
limit @max::bigint;

-- name: SeekLockPartitions :many
-- What can be had without waiting: to wait for one would hold up the writers of all those locked before it.
select p.id from ferrymq.partitions p
where p.id = any(@ids::bigint[])
order by p.id
for no key update skip locked;

-- name: SeekLockCursors :many
-- The same for the cursors of these partitions.
select c.partition_id from ferrymq.cursors c
where c.group_id = @group_id::int and c.partition_id = any(@ids::bigint[])
order by c.partition_id
for no key update skip locked;

-- name: SeekCursors :many
-- Moves the cursors on partitions that are locked: those of free, and those that do not exist yet. The tail that decides about pending
-- is read under that lock, so no push can come in between. Whoever held a lease finds another cursor than his.
with target as materialized (
    select p.id, p.next_offset,
           case when @to_end::boolean or p.last_push_at is null or p.last_push_at < @at::timestamptz then p.next_offset
                when (select s.created_at from ferrymq.segments s where s.partition_id = p.id and s.base_offset >= p.first_offset
                      order by s.base_offset limit 1) >= @at::timestamptz then p.first_offset
                else ferrymq.offset_at(p.id, @at::timestamptz) end as to_offset
    from ferrymq.partitions p
    where p.id = any(@ids::bigint[])
      and (p.id = any(@free::bigint[])
           or (select x.group_id from ferrymq.cursors x where x.group_id = @group_id::int and x.partition_id = p.id) is null)
), freed as (
    delete from ferrymq.in_flight f
    where f.group_id = @group_id::int and f.partition_id = any(array(select t.id from target t))
)
insert into ferrymq.cursors as c (group_id, partition_id, committed, pending, origin)
select @group_id::int, t.id, t.to_offset, t.to_offset < t.next_offset, t.to_offset
from target t
order by t.id
on conflict (group_id, partition_id) do update
set committed = excluded.committed, origin = excluded.committed - (c.committed - c.origin), pending = excluded.pending,
    lease_id = null, lease_until = null, batch_end = null, failures = 0, failed_offset = null, not_before = null, attempts = 0, settled = null,
    leased_at = case when (select g.kind from ferrymq.groups g where g.id = @group_id::int) = 0 then clock_timestamp() else c.leased_at end -- fences RestoreCursors
returning c.partition_id, c.pending;

-- name: GroupsByName :many
select g.id, g.queue_id, q.name as queue
from ferrymq.groups g
cross join lateral (select x.name from ferrymq.queues x where x.id = g.queue_id and x.deleted_at is null and x.project_id = @project_id::int offset 0) q
where g.name = @name::text and g.kind = 0 and g.deleted_at is null
order by q.name;

-- name: GroupTake :one
-- Waits for those that hold the group.
select g.id, g.queue_id, g.registered
from ferrymq.groups g
where g.id = @id::int and g.deleted_at is null
for update;

-- name: GroupDelete :exec
-- Needs GroupTake and QueueLock in the same transaction. The row stays until a job has removed the cursors, the name is free at once.
update ferrymq.groups g set deleted_at = clock_timestamp() where g.id = @id::int;

-- name: GroupAgain :one
-- The registration of a deleted group as a new group, to be seeded again.
insert into ferrymq.groups (queue_id, name, registered, start_mode, start_at, created_at)
select g.queue_id, g.name, g.registered, g.start_mode, g.start_at, g.created_at
from ferrymq.groups g
where g.id = @id::int
returning id;

-- name: GroupRemoveCursors :execrows
with doomed as materialized (
    select c.group_id, c.partition_id
    from ferrymq.cursors c
    where c.group_id = (select g.id from ferrymq.groups g where g.id = @id::int and g.deleted_at is not null)
    order by c.group_id, c.partition_id
    limit @max::bigint
    for update
), counted as (
    delete from ferrymq.in_flight f where f.group_id = @id::int and f.partition_id = any(array(select d.partition_id from doomed d))
), noted as (
    delete from ferrymq.lane_events e where e.group_id = @id::int and e.partition_id = any(array(select d.partition_id from doomed d))
)
delete from ferrymq.cursors c
using doomed d
where c.group_id = d.group_id and c.partition_id = d.partition_id;

-- name: GroupCursorCount :one
select count(*)::bigint as cursors from ferrymq.cursors c where c.group_id = @id::int;

-- name: GroupRemove :exec
-- Dead letters outlive their group and are still listed under its name: then its row stays, with the queue.
with done as (
    delete from ferrymq.jobs j where j.kind = 'delete_group' and j.group_id = @id::int
)
delete from ferrymq.groups g
where g.id = @id::int and g.deleted_at is not null
  and not exists (select from ferrymq.dead_letters d where d.queue_id = g.queue_id and d.group_id = g.id);

-- name: DiscoveryForget :execrows
with doomed as materialized (
    select d.namespace, d.task
    from ferrymq.discovery_groups d
    where d.project_id = @project_id::int and d.name = @name::text
    order by d.namespace, d.task
    for update
)
delete from ferrymq.discovery_groups d
using doomed x
where d.project_id = @project_id::int and d.name = @name::text and d.namespace = x.namespace and d.task = x.task;

-- name: DiscoveryRestart :execrows
with changing as materialized (
    select d.namespace, d.task
    from ferrymq.discovery_groups d
    where d.project_id = @project_id::int and d.name = @name::text
    order by d.namespace, d.task
    for no key update
)
update ferrymq.discovery_groups d
set start_mode = 'time', start_at = @start_at::timestamptz
from changing x
where d.project_id = @project_id::int and d.name = @name::text and d.namespace = x.namespace and d.task = x.task;

-- name: GroupRestart :execrows
-- Decides where partitions start that have no cursor yet.
with changing as materialized (
    select g.id
    from ferrymq.groups g
    cross join lateral (select x.id from ferrymq.queues x where x.id = g.queue_id and x.deleted_at is null and x.project_id = @project_id::int offset 0) q
    where g.name = @name::text and g.kind = 0 and g.deleted_at is null and g.registered
    order by g.id
    for no key update of g
)
update ferrymq.groups g
set start_mode = 'time', start_at = @start_at::timestamptz
where g.id = any(array(select x.id from changing x));

-- name: DiscoveryHold :one
-- The registration a group is about to be registered by. Held, so that it is not deleted or changed before that commits.
-- Comes after QueueLock, as DiscoveryOf does.
select d.start_mode, d.start_at
from ferrymq.discovery_groups d
where d.project_id = @project_id::int and d.namespace = @namespace::text and d.task = @task::text and d.name = @name::text
for share;

-- name: GroupList :many
-- A cursor with lag is pending: those are found by index, and the segment of its next message tells the age.
with live as materialized (
    select g.id, g.name, q.name as queue, g.registered, g.start_mode, g.start_at, g.created_at
    from ferrymq.groups g
    join ferrymq.queues q on q.id = g.queue_id and q.deleted_at is null and q.project_id = @project_id::int
    where g.kind = 0 and g.deleted_at is null
), behind as (
    select l.id, c.partition_id, c.committed
    from live l
    cross join lateral (
        select x.partition_id, x.committed from ferrymq.cursors x
        where x.group_id = l.id and x.pending and x.not_before is null
        offset 0) c
    union all
    select l.id, c.partition_id, c.committed
    from ferrymq.cursors c
    join live l on l.id = c.group_id
    where c.not_before is not null
), lag as (
    select b.id, count(*) as partitions, sum(p.next_offset - greatest(b.committed, p.first_offset)) as total, min(s.created_at) as oldest
    from behind b
    cross join lateral (select x.id, x.next_offset, x.first_offset from ferrymq.partitions x where x.id = b.partition_id offset 0) p
    left join lateral (
        select x.created_at from ferrymq.segments x
        where x.partition_id = p.id and x.base_offset <= greatest(b.committed, p.first_offset)
        order by x.base_offset desc limit 1) s on true
    where p.next_offset > greatest(b.committed, p.first_offset)
    group by b.id
)
select l.name, l.queue, l.registered, l.start_mode, l.start_at, l.created_at,
       (select count(*) from ferrymq.cursors c where c.group_id = l.id)::bigint as members,
       (select exists (select from ferrymq.cursors c where c.group_id = l.id and c.committed > c.origin))::boolean as consumed,
       coalesce(g.partitions, 0)::bigint as partitions_with_lag, coalesce(g.total, 0)::bigint as total_lag,
       coalesce(greatest(floor(extract(epoch from clock_timestamp() - g.oldest)), 0), 0)::bigint as max_time_lag
from live l
left join lag g on g.id = l.id
order by l.name, l.queue;

-- name: GroupLagging :many
-- The partitions that are behind for at least so long, longest first.
with live as materialized (
    select g.id, g.name, q.name as queue
    from ferrymq.groups g
    join ferrymq.queues q on q.id = g.queue_id and q.deleted_at is null and q.project_id = @project_id::int
    where g.kind = 0 and g.deleted_at is null
), behind as (
    select l.name, l.queue, c.partition_id, c.committed, c.lease_id, c.lease_until
    from live l
    cross join lateral (
        select x.partition_id, x.committed, x.lease_id, x.lease_until from ferrymq.cursors x
        where x.group_id = l.id and x.pending and x.not_before is null
        offset 0) c
    union all
    select l.name, l.queue, c.partition_id, c.committed, c.lease_id, c.lease_until
    from ferrymq.cursors c
    join live l on l.id = c.group_id
    where c.not_before is not null
)
select b.name, b.queue, p.name as partition, p.public_id,
       coalesce(case when b.lease_until > clock_timestamp() then b.lease_id end, '00000000-0000-0000-0000-000000000000')::uuid as lease_id,
       (p.next_offset - greatest(b.committed, p.first_offset))::bigint as offset_lag,
       greatest(floor(extract(epoch from clock_timestamp() - s.created_at)), 0)::bigint as time_lag, s.created_at
from behind b
cross join lateral (select x.id, x.public_id, x.name, x.next_offset, x.first_offset from ferrymq.partitions x where x.id = b.partition_id offset 0) p
cross join lateral (
    select x.created_at from ferrymq.segments x
    where x.partition_id = p.id and x.base_offset <= greatest(b.committed, p.first_offset)
    order by x.base_offset desc limit 1) s
where p.next_offset > greatest(b.committed, p.first_offset)
  and (@min_lag_seconds::bigint = 0 or s.created_at <= clock_timestamp() - make_interval(secs => @min_lag_seconds::bigint))
order by s.created_at, offset_lag desc, b.name, b.queue, p.name
limit @max::bigint;

-- name: GroupPartitions :many
-- All cursors of some groups.
select c.group_id, p.name as partition, (c.committed - c.origin)::bigint as consumed,
       greatest(p.next_offset - greatest(c.committed, p.first_offset), 0)::bigint as offset_lag,
       coalesce(greatest(floor(extract(epoch from clock_timestamp() - s.created_at)), 0), 0)::bigint as time_lag,
       coalesce(case when c.lease_until > clock_timestamp() then c.lease_id end, '00000000-0000-0000-0000-000000000000')::uuid as lease_id
from ferrymq.cursors c
cross join lateral (select x.id, x.name, x.next_offset, x.first_offset from ferrymq.partitions x where x.id = c.partition_id offset 0) p
left join lateral (
    select x.created_at from ferrymq.segments x
    where x.partition_id = p.id and p.next_offset > greatest(c.committed, p.first_offset) and x.base_offset <= greatest(c.committed, p.first_offset)
    order by x.base_offset desc limit 1) s on true
where c.group_id = any(@ids::int[])
order by c.group_id, p.name;
