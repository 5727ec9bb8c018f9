-- name: GroupGet :one
select g.id, g.queue_id, g.name, g.registered, g.start_mode, g.start_at, g.seeded, g.seeded_to
from ferrymq.groups g
where g.queue_id = @queue_id::int and g.kind = 0 and g.name = @name::text and g.deleted_at is null;

-- name: GroupCreate :one
-- Needs QueueLock in the same transaction: nobody makes it between the look and the insert. A conflict would use up an id, of which there
-- are two billion. A null start_at means this moment.
with there as materialized (
    select g.id, g.queue_id, g.name, g.registered, g.start_mode, g.start_at, g.seeded, g.seeded_to
    from ferrymq.groups g
    where g.queue_id = @queue_id::int and g.kind = 0 and g.name = @name::text and g.deleted_at is null
), made as (
    insert into ferrymq.groups (queue_id, name, registered, start_mode, start_at, seeded)
    select @queue_id::int, @name::text, @registered::boolean, @start_mode::text, coalesce(sqlc.narg('start_at')::timestamptz, clock_timestamp()), not @registered::boolean
    where not exists (select from there)
    returning id, queue_id, name, registered, start_mode, start_at, seeded, seeded_to
)
select t.id, t.queue_id, t.name, t.registered, t.start_mode, t.start_at, t.seeded, t.seeded_to from there t
union all
select m.id, m.queue_id, m.name, m.registered, m.start_mode, m.start_at, m.seeded, m.seeded_to from made m;

-- name: GroupRegister :execrows
-- Turns a group that only met partition pops into a registered one. Needs QueueLock in the same transaction.
update ferrymq.groups g
set registered = true, seeded = false, seeded_to = 0, created_at = clock_timestamp(), start_mode = @start_mode::text,
    start_at = coalesce(sqlc.narg('start_at')::timestamptz, clock_timestamp())
where g.id = @id::int and not g.registered;

-- name: GroupLock :one
-- One seeder at a time, the others go on with their own work.
select g.id, g.queue_id, g.start_mode, g.start_at, g.seeded_to, g.seeded
from ferrymq.groups g
where g.id = @id::int and g.deleted_at is null
for no key update;

-- name: SeedLock :many
-- Locks the next partitions to seed, so that a push that has marked but not committed is waited for.
-- Their tails are read by the next statement: this one's snapshot may be older than the lock.
select p.id from ferrymq.partitions p
where p.queue_id = @queue_id::int and p.id > @after::bigint
order by p.id
limit @max::bigint
for no key update;

-- name: SeedCursors :exec
insert into ferrymq.cursors (group_id, partition_id, committed, pending, origin)
select @group_id::int, s.id, s.start_offset, s.start_offset < s.next_offset, s.start_offset
from (
    select p.id, p.next_offset,
           case when p.last_push_at is null or p.last_push_at < @start_at::timestamptz then p.next_offset
                when p.created_at >= @start_at::timestamptz then p.first_offset
                else ferrymq.offset_at(p.id, @start_at::timestamptz) end as start_offset
    from ferrymq.partitions p
    where p.id = any(@ids::bigint[])
) s
order by s.id
on conflict do nothing;

-- name: SeedAdvance :exec
update ferrymq.groups g
set seeded_to = greatest(g.seeded_to, @seeded_to::bigint), seeded = @seeded::boolean
where g.id = @id::int;

-- name: DiscoveryRegister :one
-- The first discovery pop of a group for a scope fixes its start, later ones read it back.
insert into ferrymq.discovery_groups (project_id, name, namespace, task, start_mode, start_at)
values (@project_id::int, @name::text, @namespace::text, @task::text, @start_mode::text, coalesce(sqlc.narg('start_at')::timestamptz, clock_timestamp()))
on conflict (project_id, namespace, task, name) do update set name = excluded.name
returning start_mode, start_at;

-- name: DiscoveryOf :many
-- The registrations whose scope covers a queue, oldest first. Held, in the order of those who delete or change them,
-- so that none of these happens before the groups that are made of them are there to be deleted and changed too.
with held as materialized (
    select d.name, d.start_mode, d.start_at
    from ferrymq.discovery_groups d
    where d.project_id = @project_id::int
      and ((d.namespace = @namespace::text and d.task in ('', @task::text)) or (d.namespace = '' and d.task = @task::text))
    order by d.namespace, d.task, d.name
    for share
)
select h.name, h.start_mode, h.start_at from held h
order by h.start_at;

-- name: DiscoveryUnmet :many
-- Queues in scope where the group is not registered yet, and first of all 0 if the registration for the scope is missing.
-- Two arms, because no index serves "any namespace, or this one". A scope names at least one of both.
select q.id, q.name
from (
    select 0 as id, '' as name
    where not exists (select from ferrymq.discovery_groups d where d.project_id = @project_id::int and d.namespace = @namespace::text
                      and d.task = @task::text and d.name = @name::text)
    union all
    select n.id, n.name from ferrymq.queues n
    where @namespace::text <> '' and n.project_id = @project_id::int and n.deleted_at is null
      and n.namespace = @namespace::text and (@task::text = '' or n.task = @task::text)
    union all
    select t.id, t.name from ferrymq.queues t
    where @namespace::text = '' and t.project_id = @project_id::int and t.deleted_at is null and t.task = @task::text
) q
where not exists (select from ferrymq.groups g where g.queue_id = q.id and g.kind = 0 and g.name = @name::text and g.deleted_at is null and g.registered)
order by q.id
limit 1000;

-- name: DiscoveryReady :many
-- Groups of that name in scope with something to claim, in a rotating order.
select g.id, g.queue_id, q.name
from (
    select n.id, n.name from ferrymq.queues n
    where @namespace::text <> '' and n.project_id = @project_id::int and n.deleted_at is null
      and n.namespace = @namespace::text and (@task::text = '' or n.task = @task::text)
    union all
    select t.id, t.name from ferrymq.queues t
    where @namespace::text = '' and t.project_id = @project_id::int and t.deleted_at is null and t.task = @task::text
) q
join ferrymq.groups g on g.queue_id = q.id and g.kind = 0 and g.name = @name::text and g.deleted_at is null
where exists (select from ferrymq.cursors c where c.group_id = g.id and c.pending and c.not_before is null
              and (c.lease_until is null or c.lease_until < clock_timestamp()))
order by g.id <= @after::int, g.id
limit @max::bigint;

-- name: SubscriptionGet :one
select g.id, g.queue_id, q.name as queue, g.name, g.start_mode, g.start_at, g.seeded, g.lease_seconds, g.max_attempts, g.backoff_initial, g.backoff_multiplier,
       g.backoff_max, g.count_expired_leases, g.max_in_flight, g.paused, g.trace_full, g.created_at, g.updated_at
from ferrymq.groups g
join ferrymq.queues q on q.id = g.queue_id and q.deleted_at is null
where g.project_id = @project_id::int and g.kind = 1 and g.name = @name::text and g.deleted_at is null;

-- name: SubscriptionCreate :one
-- Needs QueueLock in the same transaction. No row: the name is taken in the project. A null start_at means this moment.
insert into ferrymq.groups (queue_id, kind, project_id, name, registered, start_mode, start_at)
select @queue_id::int, 1, @project_id::int, @name::text, true, @start_mode::text, coalesce(sqlc.narg('start_at')::timestamptz, clock_timestamp())
-- A conflict would use up an id, and whoever starts sends this.
where not exists (select from ferrymq.groups g where g.project_id = @project_id::int and g.name = @name::text and g.kind = 1 and g.deleted_at is null)
on conflict do nothing
returning id;

-- name: SubscriptionSet :exec
update ferrymq.groups g
set lease_seconds = @lease_seconds::int, max_attempts = @max_attempts::int, backoff_initial = @backoff_initial::bigint,
    backoff_multiplier = @backoff_multiplier::double precision, backoff_max = @backoff_max::bigint, count_expired_leases = @count_expired_leases::boolean,
    max_in_flight = @max_in_flight::int, paused = @paused::boolean, trace_full = @trace_full::boolean, updated_at = clock_timestamp()
where g.id = @id::int;
