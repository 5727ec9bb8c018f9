-- name: CursorGet :one
select c.committed, c.batch_end, c.lease_id, coalesce(c.lease_until > clock_timestamp(), false)::boolean as live, p.next_offset, p.first_offset
from ferrymq.cursors c
join ferrymq.groups g on g.id = c.group_id and g.deleted_at is null
join ferrymq.partitions p on p.id = c.partition_id
join ferrymq.queues q on q.id = p.queue_id and q.deleted_at is null
where c.group_id = @group_id::int and c.partition_id = @partition_id::bigint;

-- name: CursorCreate :execrows
-- First contact of a group with one partition. Needs GroupHold, and PartitionLock in an earlier statement of the same transaction:
-- only then no push can commit between this look at the tail and the cursor.
insert into ferrymq.cursors (group_id, partition_id, committed, pending, origin)
select @group_id::int, s.id, s.start_offset, s.start_offset < s.next_offset, s.start_offset
from (
    select p.id, p.next_offset,
           case when p.last_push_at is null or p.last_push_at < @start_at::timestamptz then p.next_offset
                else ferrymq.offset_at(p.id, @start_at::timestamptz) end as start_offset
    from ferrymq.partitions p
    where p.id = @partition_id::bigint
) s
on conflict do nothing;

-- name: LeaseFind :many
-- The live cursors of a lease this broker did not hand out. The lease id carries its group, a discovery lease (group 0) is looked up.
select c.group_id, c.partition_id
from ferrymq.cursors c
join ferrymq.groups g on g.id = c.group_id and g.deleted_at is null
join ferrymq.queues q on q.id = g.queue_id and q.deleted_at is null and q.project_id = @project_id::int
where c.group_id in (select l.group_id from ferrymq.leases l where l.lease_id = @lease_id::uuid union all select @group_id::int)
  and c.pending and c.not_before is null and c.lease_id = @lease_id::uuid and c.lease_until > clock_timestamp()
order by c.group_id, c.partition_id;

-- name: ReadyGroups :many
-- The one re-check for all parked pops: which groups have something to claim, and which only wait for leases to end.
-- A group that was deleted is ready: its claims find out. One that is paused, or has all in flight that it may, only waits.
select g.id::int as id, case when a.id is null then g.want::bigint else r.ready end::bigint as ready,
       -- Not exists, which a plan made while the table was small answers by hashing all of it.
       coalesce((select true from ferrymq.cursors c where c.group_id = g.id::int and c.pending and c.not_before is null limit 1), false)::boolean as pending
from rows from (unnest(@ids::int[]), unnest(@wants::bigint[])) as g (id, want)
left join lateral (
    select y.id, case when y.paused then 0
                      when y.max_in_flight > 0 then y.max_in_flight - (
                          select count(*) from ferrymq.in_flight f where f.group_id = g.id::int and f.lease_until > clock_timestamp())
                      else g.want::bigint end as room
    from ferrymq.groups y
    where y.id = g.id::int and y.deleted_at is null
    limit 1
) a on true
cross join lateral (
    select count(*) as ready from (
        select from ferrymq.cursors c
        where c.group_id = g.id::int and c.pending and c.not_before is null
          and (c.lease_until is null or c.lease_until < clock_timestamp())
        limit greatest(least(g.want::bigint, a.room), 0)) x
) r;

-- name: ReadyPartitions :many
-- The same for pops parked on one partition. One whose cursor is gone, with the partition or the group, comes too: its claim finds that out.
-- Lateral, or a plan made while the table was small reads the table.
select t.group_id::int as group_id, t.partition_id::bigint as partition_id
from rows from (unnest(@group_ids::int[]), unnest(@partition_ids::bigint[])) as t (group_id, partition_id)
left join lateral (
    select x.pending and (x.not_before is null or x.not_before <= clock_timestamp())
           and (x.lease_until is null or x.lease_until < clock_timestamp()) as ready
    from ferrymq.cursors x
    where x.group_id = t.group_id::int and x.partition_id >= t.partition_id::bigint and x.partition_id <= t.partition_id::bigint
    order by x.partition_id desc
    limit 1
) c on true
where coalesce(c.ready, true)
   or (select y.id from ferrymq.groups y where y.id = t.group_id::int and y.deleted_at is null) is null;

-- name: GroupAvailable :one
-- How many messages a claim of that shape would get now, for a pop that waits to fill its batch. No row: the group was deleted.
select coalesce((
    select sum(x.available)
    from (
        select p.next_offset - greatest(c.committed, p.first_offset) as available
        from ferrymq.cursors c
        cross join lateral (select y.next_offset, y.first_offset from ferrymq.partitions y where y.id = c.partition_id offset 0) p
        where c.group_id = @group_id::int and c.pending and c.not_before is null
          and (c.lease_until is null or c.lease_until < clock_timestamp())
        order by c.partition_id -- by index, however many are pending: a moment later few may be
        limit @parts::bigint
    ) x), 0)::bigint as available
from ferrymq.groups g
where g.id = @group_id::int and g.deleted_at is null;

-- name: PromoteDue :many
-- Delays, windows and backoffs that are over: back into the index of claimable cursors.
-- statement_timestamp, because a volatile function is no index condition: every cursor that still waits would be looked at.
-- By ctid, because joined with an unknown limit the whole table would be. A row that moved meanwhile is found the next time.
update ferrymq.cursors c
set not_before = null
where c.ctid = any(array(
    select d.ctid from ferrymq.cursors d
    where d.not_before <= statement_timestamp()
    order by d.not_before
    limit @max::bigint
    for no key update skip locked))
returning c.group_id, c.partition_id;

-- name: NextDue :one
-- Milliseconds until the next cursor is due, no row when none waits.
select (extract(epoch from c.not_before - clock_timestamp()) * 1000)::bigint as ms
from ferrymq.cursors c
where c.not_before is not null
order by c.not_before
limit 1;
