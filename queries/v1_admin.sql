-- Streams and subscriptions of /v1 as an operator sees them.

-- name: StreamPage :many
select q.id, q.name, q.unkeyed_lanes, q.dedup_window_seconds, q.retention_seconds, q.completed_retention_seconds, q.retention_enabled, q.created_at
from ferrymq.queues q
where q.project_id = @project_id::int and q.deleted_at is null and q.name > @after::text
order by q.name
limit @max::bigint;

-- name: StreamNumbers :one
-- A pass over the stream's partitions.
select coalesce(sum(p.next_offset - p.first_offset), 0)::bigint as messages, (count(*) filter (where not p.hidden))::bigint as keys,
       (count(*) filter (where p.hidden))::bigint as unkeyed
from ferrymq.partitions p
where p.queue_id = @queue_id::int;

-- name: SubscriptionsDrop :exec
-- Frees the names of a deleted stream's subscriptions. In a transaction of its own: it may wait for seeders, who wait for partitions,
-- whose holders may wait for the queue.
update ferrymq.groups g
set deleted_at = clock_timestamp()
where g.id = any(array(
    select x.id from ferrymq.groups x
    join ferrymq.queues q on q.id = x.queue_id and q.deleted_at is not null
    where x.queue_id = @queue_id::int and x.kind = 1 and x.deleted_at is null
    order by x.id
    for no key update of x));

-- name: SubscriptionRecount :exec
-- What is in flight when a limit comes into force. Until then nobody counts.
with stale as (
    delete from ferrymq.in_flight f
    where f.group_id = @id::int
      and not exists (select from ferrymq.cursors c where c.group_id = f.group_id and c.partition_id = f.partition_id and c.lease_until > clock_timestamp())
)
insert into ferrymq.in_flight (group_id, partition_id, lease_until)
select c.group_id, c.partition_id, c.lease_until
from ferrymq.cursors c
where c.group_id = @id::int and c.pending and c.not_before is null and c.lease_until > clock_timestamp()
order by c.partition_id
on conflict (group_id, partition_id) do update set lease_until = excluded.lease_until;

-- name: SubscriptionPage :many
-- With the columns of SubscriptionGet.
select g.id, g.queue_id, q.name as queue, g.name, g.start_mode, g.start_at, g.seeded, g.lease_seconds, g.max_attempts, g.backoff_initial, g.backoff_multiplier,
       g.backoff_max, g.count_expired_leases, g.max_in_flight, g.paused, g.trace_full, g.created_at, g.updated_at
from ferrymq.groups g
cross join lateral (select x.name from ferrymq.queues x where x.id = g.queue_id and x.deleted_at is null offset 0) q
where g.project_id = @project_id::int and g.kind = 1 and g.deleted_at is null and g.name > @after::text
order by g.name
limit @max::bigint;

-- name: SubscriptionNumbers :one
-- A pass over the lanes that are not drained, found by index, with one look at the head of each for its age.
with open as materialized (
    select c.partition_id, c.committed, case when c.lease_until > clock_timestamp() then 2 else 1 end as state
    from ferrymq.cursors c
    where c.group_id = @id::int and c.pending and c.not_before is null
    union all
    select c.partition_id, c.committed, case when c.not_before <= clock_timestamp() then 1 when c.attempts > 0 then 3 else 4 end
    from ferrymq.cursors c
    where c.group_id = @id::int and c.not_before is not null
), lane as (
    select o.state, p.next_offset - greatest(o.committed, p.first_offset) as messages, s.created_at
    from open o
    cross join lateral (select x.next_offset, x.first_offset from ferrymq.partitions x where x.id = o.partition_id offset 0) p
    left join lateral (
        select x.created_at from ferrymq.segments x
        where x.partition_id = o.partition_id and x.base_offset <= greatest(o.committed, p.first_offset)
        order by x.base_offset desc limit 1) s on true
    where p.next_offset > greatest(o.committed, p.first_offset)
)
select (count(*) filter (where l.state = 1))::bigint as ready, (count(*) filter (where l.state = 2))::bigint as in_flight,
       (count(*) filter (where l.state = 3))::bigint as retrying, coalesce(sum(l.messages), 0)::bigint as backlog,
       case when count(*) = 0 then -1 else greatest(floor(extract(epoch from clock_timestamp() - min(l.created_at))), 0) end::bigint as oldest,
       (select count(*) from ferrymq.dead_letters d where d.group_id = @id::int)::bigint as dead
from lane l;

-- name: LanePage :many
-- The lanes that are not drained, by index and in order of their partitions, those in one state, or with state '' all. It looks at so many (scan)
-- at most, and always returns a row: last is how far it has come, 0 when that is the end.
with chunk as materialized (
    select u.partition_id, u.committed, u.attempts, u.consumer, u.leased_at, u.lease_until, u.not_before,
           case when u.not_before > clock_timestamp() then case when u.attempts > 0 then 'retrying' else 'delayed' end
                when u.lease_until > clock_timestamp() then 'leased' else 'ready' end as state
    from (
        (select c.partition_id, c.committed, c.attempts, c.consumer, c.leased_at, c.lease_until, c.not_before
         from ferrymq.cursors c
         where c.group_id = @id::int and c.pending and c.not_before is null and c.partition_id > @after::bigint and @state::text <> 'retrying'
         order by c.partition_id
         limit @scan::bigint)
        union all
        (select c.partition_id, c.committed, c.attempts, c.consumer, c.leased_at, c.lease_until, c.not_before
         from ferrymq.cursors c
         where c.group_id = @id::int and c.not_before is not null and c.partition_id > @after::bigint
         order by c.partition_id
         limit @scan::bigint)
    ) u
    order by u.partition_id
    limit @scan::bigint
), reach as (
    select coalesce(case when count(*) = @scan::bigint then max(k.partition_id) end, 0) as last from chunk k
), found as materialized (
    select k.partition_id, k.attempts, k.consumer, k.leased_at, k.lease_until, k.not_before, k.state, p.name, p.hidden, greatest(k.committed, p.first_offset) as head,
           k.committed < p.first_offset as lost
    from chunk k
    cross join lateral (select x.name, x.hidden, x.first_offset, x.next_offset from ferrymq.partitions x where x.id = k.partition_id offset 0) p
    where (@state::text = '' or k.state = @state::text) and p.next_offset > greatest(k.committed, p.first_offset)
    order by k.partition_id
    limit @max::bigint
)
select r.last::bigint as last, coalesce(f.partition_id, 0)::bigint as partition_id, coalesce(f.name, '')::text as name, coalesce(f.hidden, false)::boolean as hidden,
       coalesce(f.head, 0)::bigint as head, coalesce(f.state, '')::text as state, coalesce(case when not f.lost then f.attempts end, 0)::int as attempts,
       coalesce(case when f.attempts > 0 and not f.lost then f.consumer end, '')::text as consumer,
       coalesce(case f.state when 'leased' then f.leased_at when 'retrying' then coalesce(e.at, f.leased_at) end, '0001-01-01T00:00:00Z')::timestamptz as since,
       coalesce(case f.state when 'leased' then f.lease_until end, '0001-01-01T00:00:00Z')::timestamptz as lease_until,
       coalesce(case when f.state in ('retrying', 'delayed') then f.not_before end, '0001-01-01T00:00:00Z')::timestamptz as not_before,
       (e.at is not null)::boolean as failed, coalesce(e.error, '')::text as error
from reach r
left join found f on true
left join lateral (
    select x.at, x.error from ferrymq.lane_events x
    where x.partition_id = f.partition_id and x.message_offset = f.head and x.group_id = @id::int and x.kind = 1
    order by x.at desc
    limit 1) e on true
order by f.partition_id;

-- name: QueueRemoveLanes :exec
-- What else there is of the lanes on some partitions of a deleted queue.
with counted as (
    delete from ferrymq.in_flight f
    using ferrymq.groups g
    where g.queue_id = @queue_id::int and g.kind = 1 and f.group_id = g.id and f.partition_id = any(@ids::bigint[])
)
delete from ferrymq.lane_events e where e.partition_id = any(@ids::bigint[]);
