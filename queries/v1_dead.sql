-- Dead letters of subscriptions, and what happened to one message.

-- name: LaneDeadLetters :many
-- A page of a subscription's dead letters, the newest first, and no more than so many bytes of them.
select d.id, d.partition_id, d.message_offset, p.name as partition_name, p.hidden, d.message_id, d.key_no, d.codec, d.frames, d.error_message, d.retry_count,
       d.message_created_at, coalesce(d.signature, '')::text as signature, d.consumer, d.first_failed_at, d.failed_at, page.n::bigint as in_page
from (
    select x.id, x.failed_at, count(*) over () as n,
           sum(octet_length(x.frames)) over (order by x.failed_at desc, x.id desc) - octet_length(x.frames) as before
    from (
        select l.id, l.failed_at, l.frames from ferrymq.dead_letters l
        where l.group_id = @group_id::int and l.failed_at <= @before_time::timestamptz and (l.failed_at, l.id) < (@before_time::timestamptz, @before_id::uuid)
        order by l.failed_at desc, l.id desc
        limit @max::bigint
    ) x
) page
join ferrymq.dead_letters d on d.id = page.id
join ferrymq.partitions p on p.id = d.partition_id
where page.before < @bytes::bigint
order by page.failed_at desc, page.id desc;

-- name: LaneDeadLettersOf :many
-- The same of one signature.
select d.id, d.partition_id, d.message_offset, p.name as partition_name, p.hidden, d.message_id, d.key_no, d.codec, d.frames, d.error_message, d.retry_count,
       d.message_created_at, coalesce(d.signature, '')::text as signature, d.consumer, d.first_failed_at, d.failed_at, page.n::bigint as in_page
from (
    select x.id, x.failed_at, count(*) over () as n,
           sum(octet_length(x.frames)) over (order by x.failed_at desc, x.id desc) - octet_length(x.frames) as before
    from (
        select l.id, l.failed_at, l.frames from ferrymq.dead_letters l
        where l.group_id = @group_id::int and l.signature = @signature::text and l.failed_at <= @before_time::timestamptz
          and (l.failed_at, l.id) < (@before_time::timestamptz, @before_id::uuid)
        order by l.failed_at desc, l.id desc
        limit @max::bigint
    ) x
) page
join ferrymq.dead_letters d on d.id = page.id
join ferrymq.partitions p on p.id = d.partition_id
where page.before < @bytes::bigint
order by page.failed_at desc, page.id desc;

-- name: LaneSignatures :many
-- How often each error occurs among the newest dead letters, the most frequent first.
select s.signature, s.count::bigint as count, s.first_seen::timestamptz as first_seen, s.last_seen::timestamptz as last_seen, e.id as example
from (
    select coalesce(x.signature, '')::text as signature, count(*) as count, min(x.failed_at) as first_seen, max(x.failed_at) as last_seen
    from (
        select l.signature, l.failed_at from ferrymq.dead_letters l
        where l.group_id = @group_id::int
        order by l.failed_at desc
        limit @reach::bigint
    ) x
    group by 1
    having (count(*), coalesce(x.signature, '')) < (@below_count::bigint, @below_signature::text)
    order by count(*) desc, 1 desc
    limit @max::bigint
) s
cross join lateral (
    select d.id from ferrymq.dead_letters d
    where d.group_id = @group_id::int and d.signature = s.signature
    order by d.failed_at desc
    limit 1
) e
order by s.count desc, s.signature desc;

-- name: LaneDeadScan :many
-- The next step over a subscription's dead letters, the oldest first, up to a moment, and no more than so many bytes of them.
select x.id, x.failed_at
from (
    select l.id, l.failed_at, sum(octet_length(l.frames)) over (order by l.failed_at, l.id) - octet_length(l.frames) as before
    from (
        select k.id, k.failed_at, k.frames from ferrymq.dead_letters k
        where k.group_id = @group_id::int and k.failed_at >= @after_time::timestamptz
          and (k.failed_at, k.id) > (@after_time::timestamptz, @after_id::uuid)
        order by k.failed_at, k.id
        limit @max::bigint
    ) l
) x
where x.before < @bytes::bigint and x.failed_at <= @until::timestamptz
order by x.failed_at, x.id;

-- name: LaneDeadScanOf :many
-- The same of one signature.
select x.id, x.failed_at
from (
    select l.id, l.failed_at, sum(octet_length(l.frames)) over (order by l.failed_at, l.id) - octet_length(l.frames) as before
    from (
        select k.id, k.failed_at, k.frames from ferrymq.dead_letters k
        where k.group_id = @group_id::int and k.signature = @signature::text and k.failed_at >= @after_time::timestamptz
          and (k.failed_at, k.id) > (@after_time::timestamptz, @after_id::uuid)
        order by k.failed_at, k.id
        limit @max::bigint
    ) l
) x
where x.before < @bytes::bigint and x.failed_at <= @until::timestamptz
order by x.failed_at, x.id;

-- name: LaneDeadLock :many
-- In one order, before the partitions: of many who want them one gets them, the others wait here and then find none.
select d.id, d.partition_id, d.message_offset, d.message_id, d.key_no, d.codec, d.frames, d.retry_count, d.failed_at, q.encryption_enabled
from ferrymq.dead_letters d
join ferrymq.queues q on q.id = d.queue_id and q.deleted_at is null
join ferrymq.groups g on g.id = d.group_id and g.deleted_at is null
where d.id = any(@ids::uuid[]) and (d.group_id = @group_id::int) is true -- not by the index of the group
order by d.id
for update of d;

-- name: LaneRedrive :many
-- Needs LaneDeadLock and LockPartitions in earlier statements of the same transaction. The dead letters go, and their messages are appended
-- to their partitions for this group only, each as a segment of its own, rel counts within its partition. Queues that are gone return nothing.
with x as materialized (
    select t.id::uuid as id, t.partition_id::bigint as partition_id, t.rel::bigint as rel, t.from_offset::bigint as from_offset, t.attempts::int as attempts,
           t.key_no::smallint as key_no, t.codec::smallint as codec, t.first_id::uuid as first_id, t.frames::bytea as frames
    from rows from (unnest(@ids::uuid[]), unnest(@partition_ids::bigint[]), unnest(@rels::bigint[]), unnest(@from_offsets::bigint[]), unnest(@attempts::int[]),
                    unnest(@key_nos::smallint[]), unnest(@codecs::smallint[]), unnest(@first_ids::uuid[]), unnest(@frames::bytea[]))
         as t (id, partition_id, rel, from_offset, attempts, key_no, codec, first_id, frames)
), moved as (
    update ferrymq.partitions p
    set next_offset = p.next_offset + t.total,
        last_push_at = greatest(clock_timestamp(), p.last_push_at),
        expire_at = least(p.expire_at, greatest(clock_timestamp(), p.last_push_at) + q.retain_seconds * interval '1 second')
    from (select y.partition_id, count(*) as total from x y group by y.partition_id) t, ferrymq.queues q
    where p.id = t.partition_id and q.id = p.queue_id and q.deleted_at is null
    returning p.id, p.next_offset - t.total as base, p.last_push_at
), stored as (
    insert into ferrymq.segments (partition_id, base_offset, count, key_no, codec, created_at, first_id, keys, frames, only_group)
    select m.id, m.base + x.rel, 1, x.key_no, x.codec, m.last_push_at, x.first_id, '', x.frames, @group_id::int
    from x
    join moved m on m.id = x.partition_id
), noted as (
    insert into ferrymq.lane_events (group_id, partition_id, message_offset, kind, attempt, at, to_offset)
    select @group_id::int, m.id, x.from_offset, 4, x.attempts, m.last_push_at, m.base + x.rel
    from x
    join moved m on m.id = x.partition_id
), gone as (
    delete from ferrymq.dead_letters d where d.id = any(array(select x.id from x join moved m on m.id = x.partition_id))
)
select m.id::bigint as id, m.base::bigint as base from moved m;

-- name: LanePassIdle :exec
-- Groups that had consumed all there was are past what is not for them at once: it is no backlog of theirs. Needs LockPartitions and LockCursors
-- in earlier statements of the same transaction. By ctid as in MarkPending.
update ferrymq.cursors c
set committed = p.next_offset, origin = c.origin + p.next_offset - c.committed
from ferrymq.partitions p
where p.id = c.partition_id and c.ctid = any(array(
    select (select k.ctid from ferrymq.cursors k
            where k.group_id = g.id and k.partition_id = x.id and not k.pending and k.lease_id is null and k.committed = t.base::bigint)
    from rows from (unnest(@ids::bigint[]), unnest(@bases::bigint[])) as t (id, base)
    join ferrymq.partitions x on x.id = t.id::bigint
    cross join lateral (select y.id from ferrymq.groups y where y.queue_id = x.queue_id and y.deleted_at is null and y.id <> @group_id::int offset 0) g));

-- name: LaneDeadDelete :many
with doomed as materialized (
    select d.id from ferrymq.dead_letters d
    where d.id = any(@ids::uuid[]) and (d.group_id = @group_id::int) is true -- not by the index of the group
    order by d.id
    for update
)
delete from ferrymq.dead_letters d using doomed x where d.id = x.id
returning d.id;

-- name: TraceMessage :one
-- What lies at an address; stored is false when it is gone.
select p.queue_id, p.name, p.hidden, q.name as stream, coalesce(s.only_group, 0)::int as only_group, coalesce(s.created_at, p.created_at)::timestamptz as created_at,
       (s.created_at is not null)::boolean as stored
from ferrymq.partitions p
join ferrymq.queues q on q.id = p.queue_id and q.deleted_at is null and q.project_id = @project_id::int
left join lateral (
    select g.count, g.base_offset, g.created_at, g.only_group from ferrymq.segments g
    where g.partition_id = p.id and g.base_offset <= @message_offset::bigint
    order by g.base_offset desc
    limit 1
) s on s.base_offset + s.count > @message_offset::bigint
where p.id = @partition_id::bigint and p.next_offset > @message_offset::bigint;

-- name: TraceLanes :many
-- Where the subscriptions of a stream stand on a partition.
select g.id, g.name, coalesce(c.committed, 0)::bigint as committed, coalesce(c.origin, 0)::bigint as origin, (c.group_id is not null)::boolean as met,
       coalesce(c.lease_until > clock_timestamp(), false)::boolean as leased, coalesce(c.not_before > clock_timestamp(), false)::boolean as resting,
       coalesce(c.attempts, 0)::int as attempts, c.consumer, c.leased_at
from ferrymq.groups g
left join ferrymq.cursors c on c.group_id = g.id and c.partition_id = @partition_id::bigint
where g.queue_id = @queue_id::int and g.kind = 1 and g.deleted_at is null
order by g.name
limit @max::bigint;

-- name: TraceEvents :many
select e.group_id, e.kind, e.attempt, e.at, e.consumer, e.error, e.to_offset
from ferrymq.lane_events e
where e.partition_id = @partition_id::bigint and e.message_offset = @message_offset::bigint
order by e.at desc
limit @max::bigint;

-- name: TraceDead :many
-- The dead letters of a message: they stay longer than its events.
select d.id, d.group_id, d.retry_count, d.error_message, d.consumer, d.message_created_at, d.failed_at
from ferrymq.dead_letters d
where d.partition_id = @partition_id::bigint and d.message_offset = @message_offset::bigint and d.signature is not null
order by d.failed_at desc
limit @max::bigint;

-- name: LaneEventsExpire :execrows
delete from ferrymq.lane_events e
where e.ctid = any(array(
    select x.ctid from ferrymq.lane_events x
    where x.at < statement_timestamp() - interval '30 days'
    order by x.at
    limit @max::bigint));
