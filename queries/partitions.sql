-- name: PartitionFindMany :many
-- By queue and name, in no particular order. Lateral, or a plan made while the table was small reads the table.
select p.id, p.public_id, p.queue_id, p.name, p.hidden, p.next_offset
from rows from (unnest(@queue_ids::int[]), unnest(@names::text[])) as t (queue_id, name)
cross join lateral (
    select x.id, x.public_id, x.queue_id, x.name, x.hidden, x.next_offset from ferrymq.partitions x
    where x.queue_id = t.queue_id::int and x.hidden = @hidden::boolean and x.name = t.name::text
    limit 1
) p;

-- name: PartitionFindPublic :many
-- By the id clients know, among the live queues of one project.
select p.id, p.public_id, p.queue_id, p.name, p.hidden, p.next_offset
from ferrymq.partitions p
join ferrymq.queues q on q.id = p.queue_id and q.deleted_at is null and q.project_id = @project_id::int
where p.public_id = any(@public_ids::uuid[]);

-- name: PartitionFindIDs :many
select p.id, p.public_id, p.queue_id, p.name, p.hidden, p.next_offset
from ferrymq.partitions p
where p.id = any(@ids::bigint[]) and p.queue_id = @queue_id::int;

-- name: PartitionLock :one
select p.id, p.next_offset, p.first_offset from ferrymq.partitions p
where p.id >= @id::bigint and p.id <= @id::bigint
order by p.id desc
limit 1
for no key update;

-- name: SegmentKeys :many
-- What deduplication has to read: the keys of the segments at or after an offset, removed ones included.
select s.base_offset, s.count, s.created_at, s.first_id, s.keys
from ferrymq.segments s
where s.partition_id = @partition_id::bigint and s.base_offset >= @from_offset::bigint
union all
select r.base_offset, r.count, r.created_at, r.first_id, r.keys
from ferrymq.retired_keys r
where r.partition_id = @partition_id::bigint and r.base_offset >= @from_offset::bigint
order by base_offset;

-- name: SegmentKeysAt :many
-- The keys of the segments inside the window that cover [from_offset, to_offset), newest first, removed ones included.
-- Messages that were put back for one subscription have none, and nobody else may name them.
select s.base_offset, s.count, s.created_at, s.first_id, s.keys
from ferrymq.segments s
where s.partition_id = @partition_id::bigint
  and s.base_offset >= (select coalesce(max(b.base_offset), 0) from ferrymq.segments b where b.partition_id = @partition_id::bigint and b.base_offset <= @from_offset::bigint)
  and s.base_offset < @to_offset::bigint and s.created_at >= @since::timestamptz and s.only_group is null
union all
select r.base_offset, r.count, r.created_at, r.first_id, r.keys
from ferrymq.retired_keys r
where r.partition_id = @partition_id::bigint
  and r.base_offset >= (select coalesce(max(b.base_offset), 0) from ferrymq.retired_keys b where b.partition_id = @partition_id::bigint and b.base_offset <= @from_offset::bigint)
  and r.base_offset < @to_offset::bigint and r.created_at >= @since::timestamptz
order by base_offset desc;

-- name: SegmentAt :one
-- The segment that covers one offset, unless that has been removed, and whether a copy of it has to be encrypted.
select s.base_offset, s.count, s.key_no, s.codec, s.created_at, s.first_id, s.keys, s.frames,
    (s.key_no <> 0 or exists (select from ferrymq.partitions p join ferrymq.queues q on q.id = p.queue_id where p.id = @partition_id::bigint and q.encryption_enabled))::boolean as secret
from ferrymq.segments s
where s.partition_id = @partition_id::bigint and s.base_offset <= @at_offset::bigint
  and exists (select from ferrymq.partitions p where p.id = @partition_id::bigint and p.first_offset <= @at_offset::bigint)
order by s.base_offset desc
limit 1;

-- name: SegmentFrames :many
-- Lateral, or a plan made while the table was small reads the table.
select s.partition_id, s.base_offset, s.frames
from rows from (unnest(@partition_ids::bigint[]), unnest(@base_offsets::bigint[])) as t (partition_id, base_offset)
cross join lateral (
    select g.partition_id, g.base_offset, g.frames from ferrymq.segments g
    where g.partition_id = t.partition_id::bigint and g.base_offset = t.base_offset::bigint
    limit 1
) s;

-- name: DedupStart :one
-- Where the memory of a partition has to start reading: the first segment inside the window, removed or not, and the tail of this snapshot.
select p.next_offset, coalesce(
    (select r.base_offset from ferrymq.retired_keys r where r.partition_id = p.id and r.created_at >= @since::timestamptz order by r.base_offset limit 1),
    ferrymq.offset_between(p.id, p.swept_offset, p.next_offset, @since::timestamptz))::bigint as start_offset
from ferrymq.partitions p
where p.id = @id::bigint;
