-- Retention, cleanup and clear. Lock order as everywhere: partitions by id, or skipped when locked, then cursors by (group_id, partition_id).
-- Offsets below first_offset do not exist for readers. Their rows go later, in steps, without a lock on the partition.

-- name: SweepClaim :one
-- One sweep per interval, whatever the number of brokers. On a grid, so that a broker that looks a little early next time is not a period late.
-- Returns its time: what becomes due during the sweep is for the next one, or it might never end.
update ferrymq.sweeps s
set due_at = greatest(s.due_at + make_interval(secs => @seconds::float8), clock_timestamp() + make_interval(secs => @seconds::float8) / 2)
where s.name = 'retention' and s.due_at <= clock_timestamp()
returning clock_timestamp()::timestamptz as began;

-- name: SweepSettings :exec
-- A crash may undo a step of the sweep, it is done again. So its commits need not take a turn of their own at the disk.
select set_config('synchronous_commit', 'off', true);

-- name: SweepRows :execrows
-- Held by the one broker that removes rows, to the end of its transaction.
select s.name from ferrymq.sweeps s where s.name = 'rows' for update skip locked;

-- name: RetentionDue :many
-- The partitions with something due. Locked by RetentionLock, and what that passed over by PartitionLock, one at a time.
select p.id from ferrymq.partitions p
where p.expire_at <= @due::timestamptz
order by p.expire_at
limit @max::bigint;

-- name: RetentionLock :many
-- What is due is judged by the next statement: only that sees all segments up to the tail that is locked here.
select p.id from ferrymq.partitions p
where p.expire_at <= @due::timestamptz
order by p.expire_at
limit @max::bigint
for no key update skip locked;

-- name: RetentionMove :many
-- Moves first_offset past everything that is due, in whole segments, and says when the next is. The partitions are locked.
-- Each message counts for one rule, the mildest. waits: something is old enough, but not passed by every group: looked at again
-- after so many seconds.
with rule as materialized (
    select p.id, p.queue_id, q.project_id, p.first_offset, p.next_offset,
           case when q.deleted_at is null then q.retain_seconds end as retain,
           case when q.retention_enabled and q.retention_seconds > 0 then q.retention_seconds end as keep,
           case when q.retention_enabled and q.completed_retention_seconds > 0 then q.completed_retention_seconds end as keep_completed,
           nullif(q.max_wait_time_seconds, 0) as keep_waiting
    from ferrymq.partitions p
    join ferrymq.queues q on q.id = p.queue_id
    where p.id = any(@ids::bigint[])
), bound as materialized (
    select r.*,
           case when r.keep is null then r.first_offset
                else ferrymq.offset_between(r.id, r.first_offset, r.next_offset, statement_timestamp() - r.keep * interval '1 second') end as kept,
           case when r.keep_waiting is null then r.first_offset
                else ferrymq.offset_between(r.id, r.first_offset, r.next_offset, statement_timestamp() - r.keep_waiting * interval '1 second') end as waited,
           case when r.keep_completed is null then r.first_offset
                else ferrymq.offset_between(r.id, r.first_offset, r.next_offset, statement_timestamp() - r.keep_completed * interval '1 second') end as aged,
           -- A registered group without a cursor gets one, and may start anywhere.
           case when r.keep_completed is null then 0 else (
               select coalesce(min(case when c.committed is null then 0 else c.committed end), 0)
               from ferrymq.groups g
               left join ferrymq.cursors c on c.group_id = g.id and c.partition_id = r.id
               where g.queue_id = r.queue_id and g.deleted_at is null and (g.registered or c.committed is not null)) end as passed
    from rule r
    where r.retain is not null
), target as materialized (
    select b.*, greatest(b.first_offset, case when b.passed >= b.aged then b.aged else (
               select case when s.base_offset + s.count <= b.passed then b.passed else s.base_offset end
               from ferrymq.segments s
               where s.partition_id = b.id and s.base_offset <= b.passed
               order by s.base_offset desc limit 1) end) as consumed
    from bound b
), changed as (
    update ferrymq.partitions p
    set first_offset = t.first_offset, expire_at = t.expire_at,
        empty_since = case when t.first_offset = p.next_offset then coalesce(p.empty_since, clock_timestamp()) else p.empty_since end
    from (
        select x.id, x.first_offset,
               least(o.created_at + least(x.keep, x.keep_waiting) * interval '1 second',
                     greatest(o.created_at + x.keep_completed * interval '1 second',
                              case when x.first_offset < x.aged then statement_timestamp() + make_interval(secs => @again_seconds::float8) end)) as expire_at
        from (select t.id, greatest(t.kept, t.waited, t.consumed) as first_offset, t.keep, t.keep_waiting, t.keep_completed, t.aged from target t) x
        left join lateral (select s.created_at from ferrymq.segments s where s.partition_id = x.id and s.base_offset = x.first_offset) o on true
        union all
        select r.id, r.first_offset, null from rule r where r.retain is null
    ) t
    where p.id = t.id
)
select t.id::bigint as id, t.queue_id::int as queue_id, t.project_id::int as project_id, (greatest(t.kept, t.waited, t.consumed) - t.first_offset)::bigint as removed,
       (t.consumed - t.first_offset)::bigint as completed,
       (greatest(t.kept, t.consumed) - t.consumed)::bigint as retained,
       (greatest(t.kept, t.waited, t.consumed) - greatest(t.kept, t.consumed))::bigint as evicted,
       (greatest(t.kept, t.waited, t.consumed) < t.aged)::boolean as waits
from target t;

-- name: RetentionFree :many
-- A backoff for a message that has been removed is over: it must not hold up the next ones. The partitions are locked.
with waiting as materialized (
    select c.group_id, c.partition_id
    from ferrymq.partitions p
    join ferrymq.groups g on g.queue_id = p.queue_id and g.deleted_at is null
    join ferrymq.cursors c on c.group_id = g.id and c.partition_id = p.id
    where p.id = any(@ids::bigint[]) and c.not_before is not null
      and case when g.kind = 1 then c.committed else c.failed_offset end < p.first_offset
    order by c.group_id, c.partition_id
    for no key update of c
)
update ferrymq.cursors c
set not_before = null, failed_offset = null, failures = 0
from waiting w
where c.group_id = w.group_id and c.partition_id = w.partition_id
returning c.group_id, c.partition_id;

-- name: RetentionUnswept :many
-- Partitions with rows that nobody reads any more, from a rotating position.
select p.id, p.swept_offset, p.first_offset
from ferrymq.partitions p
where p.swept_offset < p.first_offset and p.id > @after::bigint
order by p.id
limit @max::bigint;

-- name: RetentionRemove :many
-- Removes rows of those partitions, the oldest of each first, at most so many. Ids that the deduplication window still covers stay.
-- Says up to where the rows of a partition are gone.
with span as materialized (
    select t.id::bigint as id, t.from_offset::bigint as from_offset, t.to_offset::bigint as to_offset, q.dedup_window_seconds
    from rows from (unnest(@ids::bigint[]), unnest(@from_offsets::bigint[]), unnest(@to_offsets::bigint[])) as t (id, from_offset, to_offset)
    join ferrymq.partitions p on p.id = t.id::bigint
    join ferrymq.queues q on q.id = p.queue_id
), doomed as materialized (
    select s.partition_id, s.base_offset, s.count, s.created_at, s.first_id, s.keys, t.dedup_window_seconds
    from span t
    cross join lateral (
        select g.partition_id, g.base_offset, g.count, g.created_at, g.first_id, g.keys from ferrymq.segments g
        where g.partition_id = t.id and g.base_offset >= t.from_offset and g.base_offset < t.to_offset
        order by g.base_offset
        limit @max::bigint
    ) s
    limit @max::bigint
), kept as (
    -- A little longer than the window: brokers know the database's clock only nearly.
    insert into ferrymq.retired_keys (partition_id, base_offset, count, created_at, expires_at, first_id, keys)
    select d.partition_id, d.base_offset, d.count, d.created_at, d.created_at + (d.dedup_window_seconds + 10) * interval '1 second', d.first_id, d.keys
    from doomed d
    where d.dedup_window_seconds > 0 and octet_length(d.keys) > 0 and d.created_at > clock_timestamp() - (d.dedup_window_seconds + 10) * interval '1 second'
    on conflict do nothing
), gone as (
    delete from ferrymq.segments s
    using doomed d
    where s.partition_id = d.partition_id and s.base_offset = d.base_offset
)
select d.partition_id::bigint as id, count(*)::bigint as segments, max(d.base_offset + d.count)::bigint as swept
from doomed d
group by d.partition_id;

-- name: RetentionSwept :exec
update ferrymq.partitions p
set swept_offset = least(s.swept, p.first_offset)
from (
    select x.id, t.swept::bigint as swept
    from rows from (unnest(@ids::bigint[]), unnest(@swepts::bigint[])) as t (id, swept)
    join ferrymq.partitions x on x.id = t.id::bigint
    order by x.id
    for no key update of x
) s
where p.id = s.id and p.swept_offset < s.swept;

-- name: RetiredExpire :execrows
-- A window that became longer meanwhile counts.
with due as materialized (
    select r.partition_id, r.base_offset, r.created_at + (coalesce(q.dedup_window_seconds, 0) + 10) * interval '1 second' as until
    from ferrymq.retired_keys r
    left join ferrymq.partitions p on p.id = r.partition_id
    left join ferrymq.queues q on q.id = p.queue_id and q.deleted_at is null
    where r.expires_at <= statement_timestamp()
    order by r.expires_at
    limit @max::bigint
    for update of r skip locked
), kept as (
    update ferrymq.retired_keys r set expires_at = d.until
    from due d
    where d.until > statement_timestamp() and r.partition_id = d.partition_id and r.base_offset = d.base_offset
), gone as (
    delete from ferrymq.retired_keys r
    using due d
    where d.until <= statement_timestamp() and r.partition_id = d.partition_id and r.base_offset = d.base_offset
)
select d.base_offset from due d;

-- name: QueueRemoveRetired :execrows
delete from ferrymq.retired_keys r
where r.ctid = any(array(
    select x.ctid from ferrymq.retired_keys x
    where x.partition_id = any(@ids::bigint[])
    order by x.partition_id, x.base_offset
    limit @max::bigint
    for update));

-- name: RetentionPlan :exec
-- After a configure: when what they hold is due by the rules there are now. The partitions are locked.
update ferrymq.partitions p
set expire_at = x.expire_at
from (
    select y.id, o.created_at + q.retain_seconds * interval '1 second' as expire_at
    from ferrymq.partitions y
    join ferrymq.queues q on q.id = y.queue_id
    left join lateral (select s.created_at from ferrymq.segments s where s.partition_id = y.id and s.base_offset = y.first_offset) o on true
    where y.id = any(@ids::bigint[])
) x
where p.id = x.id and p.expire_at is distinct from x.expire_at;

-- name: CleanupLock :many
-- Partitions that were emptied so many days ago, whatever came since.
select p.id from ferrymq.partitions p
where p.empty_since <= statement_timestamp() - make_interval(days => @days::int) and p.swept_offset >= p.first_offset
order by p.empty_since
limit @max::bigint
for update skip locked;

-- name: CleanupLockCursors :exec
select c.group_id
from ferrymq.partitions p
join ferrymq.groups g on g.queue_id = p.queue_id and g.deleted_at is null
join ferrymq.cursors c on c.group_id = g.id and c.partition_id = p.id
where p.id = any(@ids::bigint[])
order by c.group_id, c.partition_id
for update of c;

-- name: Cleanup :many
-- Removes those of the locked partitions that are empty and idle and hold nothing else that is needed, and puts off the others.
with judged as materialized (
    select p.id, p.public_id, p.queue_id, p.name, p.hidden, p.next_offset > p.first_offset as filled, greatest(p.empty_since, p.last_push_at) as active_at,
           exists (select from ferrymq.retired_keys r where r.partition_id = p.id)
               or exists (select from ferrymq.dead_letters d where d.partition_id = p.id)
               or exists (select from ferrymq.groups g join ferrymq.cursors c on c.group_id = g.id
                          where g.queue_id = p.queue_id and g.deleted_at is null and c.partition_id = p.id and c.lease_until > clock_timestamp()) as needed
    from ferrymq.partitions p
    where p.id = any(@ids::bigint[])
), goes as materialized (
    select j.id, j.public_id, j.queue_id, j.name, j.hidden from judged j
    where not j.filled and not j.needed and j.active_at <= statement_timestamp() - make_interval(days => @days::int)
), without_cursors as (
    delete from ferrymq.cursors c
    using goes x, ferrymq.groups g
    where g.queue_id = x.queue_id and g.deleted_at is null and c.group_id = g.id and c.partition_id = x.id
), removed as (
    delete from ferrymq.partitions p
    using goes x
    where p.id = x.id
), put_off as (
    update ferrymq.partitions p
    set empty_since = case when j.filled then null
                           when j.active_at > statement_timestamp() - make_interval(days => @days::int) then j.active_at
                           else statement_timestamp() - make_interval(days => @days::int) + interval '1 day' end
    from judged j
    where p.id = j.id and j.id not in (select x.id from goes x)
)
select x.id, x.public_id, x.queue_id, q.project_id, x.name, x.hidden from goes x join ferrymq.queues q on q.id = x.queue_id;

-- name: QueueRemind :many
-- Queues without a rule whose turn it is to be looked at, and what of the first partitions every group has passed.
-- The next look is in a day if there is something, else in an hour.
with due as materialized (
    select q.id, q.name
    from ferrymq.queues q
    where q.deleted_at is null and q.retain_seconds is null and q.remind_at <= statement_timestamp()
    order by q.remind_at
    limit @max::bigint
    for no key update skip locked
), looked as materialized (
    select d.id, d.name, coalesce((
        select sum(greatest(x.passed - x.first_offset, 0))
        from (
            select p.first_offset, (select coalesce(min(c.committed), 0) from ferrymq.groups g
                                    join ferrymq.cursors c on c.group_id = g.id and c.partition_id = p.id
                                    where g.queue_id = d.id and g.deleted_at is null) as passed
            from ferrymq.partitions p
            where p.queue_id = d.id
            order by p.id
            limit @partitions::bigint
        ) x), 0) as consumed
    from due d
), changed as (
    update ferrymq.queues q
    set remind_at = clock_timestamp() + case when l.consumed > 0 then interval '1 day' else interval '1 hour' end
    from looked l
    where q.id = l.id
)
select l.name, l.consumed::bigint as consumed from looked l;

-- name: ClearFree :many
-- Of the locked partitions those whose cursors can all be had without waiting, and locks these.
with free as materialized (
    select c.partition_id
    from ferrymq.partitions p
    join ferrymq.groups g on g.queue_id = p.queue_id and g.deleted_at is null
    join ferrymq.cursors c on c.group_id = g.id and c.partition_id = p.id
    where p.id = any(@ids::bigint[])
    order by c.group_id, c.partition_id
    for no key update of c skip locked
), n as materialized (
    select f.partition_id, count(*) as cursors from free f group by f.partition_id
)
select p.id
from ferrymq.partitions p
left join n on n.partition_id = p.id
where p.id = any(@ids::bigint[])
  and coalesce(n.cursors, 0) = (select count(*) from ferrymq.groups g join ferrymq.cursors c on c.group_id = g.id and c.partition_id = p.id
                                where g.queue_id = p.queue_id and g.deleted_at is null)
order by p.id;

-- name: ClearCursors :many
-- Every cursor of the locked partitions goes to the end. Returns those that were leased.
with found as materialized (
    select c.group_id, c.partition_id, c.lease_id, p.next_offset, g.kind
    from ferrymq.partitions p
    join ferrymq.groups g on g.queue_id = p.queue_id and g.deleted_at is null
    join ferrymq.cursors c on c.group_id = g.id and c.partition_id = p.id
    where p.id = any(@ids::bigint[])
    order by c.group_id, c.partition_id
    for no key update of c
), moved as (
    update ferrymq.cursors c
    set committed = f.next_offset, origin = f.next_offset - (c.committed - c.origin), lease_id = null, lease_until = null, batch_end = null, failed_offset = null, failures = 0, attempts = 0, not_before = null, pending = false,
        leased_at = case when f.kind = 0 then clock_timestamp() else c.leased_at end -- fences RestoreCursors
    from found f
    where c.group_id = f.group_id and c.partition_id = f.partition_id
), freed as (
    delete from ferrymq.in_flight x
    using found f
    where f.lease_id is not null and x.group_id = f.group_id and x.partition_id = f.partition_id
)
select f.group_id, f.partition_id from found f where f.lease_id is not null;

-- name: ClearPartitions :one
-- Nothing of the locked partitions exists any more. Their rows go with the next sweeps.
with cleared as (
    update ferrymq.partitions p
    set first_offset = p.next_offset, expire_at = null, empty_since = coalesce(p.empty_since, clock_timestamp())
    from (select x.id, x.next_offset - x.first_offset as messages from ferrymq.partitions x where x.id = any(@ids::bigint[])) old
    where p.id = old.id and old.messages > 0
    returning old.messages
)
select coalesce(sum(c.messages), 0)::bigint as messages from cleared c;
