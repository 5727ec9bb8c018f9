-- Reading messages and dead letters without consuming them: snapshots, never a lock.

-- name: BrowseRange :one
-- What is browsed when the caller names no times, by the database's clock. to is cut to the minute, plus one.
select coalesce(sqlc.narg('from_time')::timestamptz, clock_timestamp() - interval '1 hour')::timestamptz as from_time,
       (date_trunc('minute', coalesce(sqlc.narg('to_time')::timestamptz, clock_timestamp())) + interval '1 minute')::timestamptz as to_time;

-- name: BrowseQueues :many
select q.id from ferrymq.queues q
where q.project_id = @project_id::int and q.deleted_at is null
  and (sqlc.narg('namespace')::text is null or q.namespace = sqlc.narg('namespace')::text)
  and (sqlc.narg('task')::text is null or q.task = sqlc.narg('task')::text)
order by q.id;

-- name: BrowseQueuesByID :many
select q.id, q.name, q.namespace, q.task, q.priority from ferrymq.queues q where q.id = any(@ids::int[]);

-- name: BrowseAll :many
-- The partitions of a project whose last push was not before from_time, latest first, after (before_time, after_id).
-- The newest message of each is not newer than that, which is what lets the caller stop. end_offset: where to_time cuts it off,
-- found among the newest segments, or by a search, which costs ten times as much.
-- One pass over the partitions, because no index may hold what every push changes. Segments are only looked at for those returned.
select c.id, c.last_push_at::timestamptz as last_push_at, c.first_offset,
       case when c.last_push_at < @to_time::timestamptz then c.next_offset
            else coalesce((select s.base_offset + s.count
                           from (select g.base_offset, g.count, g.created_at from ferrymq.segments g where g.partition_id = c.id order by g.base_offset desc limit 20) s
                           where s.created_at < @to_time::timestamptz
                           order by s.base_offset desc limit 1),
                          ferrymq.offset_at(c.id, @to_time::timestamptz)) end::bigint as end_offset
from (
    select p.id, p.last_push_at, p.first_offset, p.next_offset
    from ferrymq.partitions p
    join ferrymq.queues q on q.id = p.queue_id and q.project_id = @project_id::int and q.deleted_at is null
    where p.first_offset < p.next_offset and p.last_push_at >= @from_time::timestamptz and p.created_at < @to_time::timestamptz
      and (p.last_push_at < @before_time::timestamptz or (p.last_push_at = @before_time::timestamptz and p.id > @after_id::bigint))
    order by p.last_push_at desc, p.id
    limit @max::bigint
) c
order by c.last_push_at desc, c.id;

-- name: BrowseOfQueues :many
-- The same of some queues.
select c.id, c.last_push_at::timestamptz as last_push_at, c.first_offset,
       case when c.last_push_at < @to_time::timestamptz then c.next_offset
            else coalesce((select s.base_offset + s.count
                           from (select g.base_offset, g.count, g.created_at from ferrymq.segments g where g.partition_id = c.id order by g.base_offset desc limit 20) s
                           where s.created_at < @to_time::timestamptz
                           order by s.base_offset desc limit 1),
                          ferrymq.offset_at(c.id, @to_time::timestamptz)) end::bigint as end_offset
from (
    select p.id, p.last_push_at, p.first_offset, p.next_offset
    from ferrymq.partitions p
    where p.queue_id = any(@queue_ids::int[])
      and p.first_offset < p.next_offset and p.last_push_at >= @from_time::timestamptz and p.created_at < @to_time::timestamptz
      and (p.last_push_at < @before_time::timestamptz or (p.last_push_at = @before_time::timestamptz and p.id > @after_id::bigint))
    order by p.last_push_at desc, p.id
    limit @max::bigint
) c
order by c.last_push_at desc, c.id;

-- name: BrowseNamed :many
-- The same of the partitions with one name.
select c.id, c.last_push_at::timestamptz as last_push_at, c.first_offset,
       case when c.last_push_at < @to_time::timestamptz then c.next_offset
            else coalesce((select s.base_offset + s.count
                           from (select g.base_offset, g.count, g.created_at from ferrymq.segments g where g.partition_id = c.id order by g.base_offset desc limit 20) s
                           where s.created_at < @to_time::timestamptz
                           order by s.base_offset desc limit 1),
                          ferrymq.offset_at(c.id, @to_time::timestamptz)) end::bigint as end_offset
from (
    select p.id, p.last_push_at, p.first_offset, p.next_offset
    from unnest(@queue_ids::int[]) as i (queue_id)
    cross join lateral (
        select x.id, x.last_push_at, x.first_offset, x.next_offset, x.created_at from ferrymq.partitions x
        where x.queue_id = i.queue_id::int and not x.hidden and x.name = @name::text
        offset 0) p
    where p.first_offset < p.next_offset and p.last_push_at >= @from_time::timestamptz and p.created_at < @to_time::timestamptz
      and (p.last_push_at < @before_time::timestamptz or (p.last_push_at = @before_time::timestamptz and p.id > @after_id::bigint))
    order by p.last_push_at desc, p.id
    limit @max::bigint
) c
order by c.last_push_at desc, c.id;

-- name: BrowseSegments :many
-- The newest segments with an offset in [low, before) of each partition, newest first, a few of each. No frames.
select t.n::int as n, s.base_offset, s.count, s.created_at, s.first_id, s.key_no, s.codec, s.size::bigint as size
from rows from (unnest(@partition_ids::bigint[]), unnest(@lows::bigint[]), unnest(@befores::bigint[]), unnest(@maxima::bigint[]))
     with ordinality as t (partition_id, low, before, most, n)
cross join lateral (
    select g.base_offset, g.count, g.created_at, g.first_id, g.key_no, g.codec, octet_length(g.frames) as size
    from ferrymq.segments g
    where g.partition_id = t.partition_id::bigint and g.base_offset < t.before::bigint
      and g.base_offset > t.low::bigint - 1024 and g.base_offset + g.count > t.low::bigint -- no segment has more messages
    order by g.base_offset desc
    limit t.most::bigint
) s
order by t.n, s.base_offset desc;

-- name: BrowseDeadSegments :many
-- The newest dead-lettered offsets in [low, before) of each partition, newest first, with the segments that hold them.
select t.n::int as n, d.message_offset, s.base_offset, s.count, s.created_at, s.first_id, s.key_no, s.codec, s.size::bigint as size
from rows from (unnest(@partition_ids::bigint[]), unnest(@lows::bigint[]), unnest(@befores::bigint[]), unnest(@maxima::bigint[]))
     with ordinality as t (partition_id, low, before, most, n)
cross join lateral (
    select distinct x.message_offset from ferrymq.dead_letters x
    where x.partition_id = t.partition_id::bigint and x.message_offset >= t.low::bigint and x.message_offset < t.before::bigint
    order by x.message_offset desc
    limit t.most::bigint
) d
cross join lateral (
    select g.base_offset, g.count, g.created_at, g.first_id, g.key_no, g.codec, octet_length(g.frames) as size
    from ferrymq.segments g
    where g.partition_id = t.partition_id::bigint and g.base_offset <= d.message_offset
    order by g.base_offset desc
    limit 1
) s
order by t.n, d.message_offset desc;

-- name: BrowseDead :many
-- Which offsets of some stretches have dead letters.
select t.n::int as n, d.message_offset
from rows from (unnest(@partition_ids::bigint[]), unnest(@lows::bigint[]), unnest(@befores::bigint[])) with ordinality as t (partition_id, low, before, n)
cross join lateral (
    select distinct x.message_offset from ferrymq.dead_letters x
    where x.partition_id = t.partition_id::bigint and x.message_offset >= t.low::bigint and x.message_offset < t.before::bigint
) d;

-- name: BrowseCursors :many
-- Partitions, and where the groups stand that have met them or will (no cursor yet: nothing is consumed), name '' is no group.
with stand as materialized (
    select i.id::bigint as partition_id, p.public_id, p.name as partition_name, p.queue_id, g.id as group_id, g.name, g.registered
    from unnest(@partition_ids::bigint[]) as i (id)
    join ferrymq.partitions p on p.id = i.id::bigint
    left join ferrymq.groups g on g.queue_id = p.queue_id and g.kind = 0 and g.deleted_at is null
)
select s.partition_id, s.public_id, s.partition_name, s.queue_id, (case when s.registered or c.group_id is not null then s.name else '' end)::text as name, c.committed, c.batch_end, c.lease_until,
       coalesce(c.lease_until > clock_timestamp(), false)::boolean as live
from stand s
left join ferrymq.cursors c on c.group_id = s.group_id and c.partition_id = s.partition_id
order by s.partition_id, s.name;

-- name: BrowseGroups :many
select distinct g.name from ferrymq.groups g
where g.queue_id = any(@queue_ids::int[]) and g.kind = 0 and g.deleted_at is null;

-- name: BrowsePartition :one
select p.id, p.name, p.first_offset, p.next_offset, q.id as queue_id, q.name as queue_name, q.namespace, q.task,
       q.lease_time, q.retry_limit, q.retry_delay, q.ttl, q.max_size, q.dead_letter_queue
from ferrymq.partitions p
join ferrymq.queues q on q.id = p.queue_id and q.deleted_at is null and q.project_id = @project_id::int
where p.public_id = @public_id::uuid;

-- name: BrowseFind :one
-- Looks through the next segments of a partition, newest first, for a transaction id: by its key, or as the id of a message
-- of the segment that begins with first_id. found: where it may be (a key may match by accident), low: how far this got, -1: none.
select coalesce(max(s.base_offset) filter (where s.first_id = @first_id::uuid or position(@key::bytea in s.keys) > 0), -1)::bigint as found,
       coalesce(min(s.base_offset), -1)::bigint as low
from (
    select g.base_offset, g.first_id, g.keys from ferrymq.segments g
    where g.partition_id = @partition_id::bigint and g.base_offset < @before::bigint and g.base_offset > @low::bigint
    order by g.base_offset desc
    limit @max::bigint
) s;

-- name: DeadLetterFind :one
-- The newest of an address.
select d.message_offset, d.message_id, d.key_no, d.codec, d.frames, d.error_message, d.retry_count, d.message_created_at
from ferrymq.dead_letters d
where d.partition_id = @partition_id::bigint and d.transaction_id = @transaction_id::text
order by d.failed_at desc
limit 1;

-- name: DeadLetterAt :one
-- The newest of an offset.
select d.error_message, d.retry_count from ferrymq.dead_letters d
where d.partition_id = @partition_id::bigint and d.message_offset = @message_offset::bigint
order by d.failed_at desc
limit 1;

-- name: DeadLetterGroups :many
-- Groups by name, deleted ones too: dead letters outlive their group. Two arms, each with an index.
select g.id
from (
    select l.id, l.queue_id, l.kind from ferrymq.groups l where l.name = @name::text and l.deleted_at is null
    union all
    select d.id, d.queue_id, d.kind from ferrymq.groups d where d.name = @name::text and d.deleted_at is not null
) g
join ferrymq.queues q on q.id = g.queue_id and q.deleted_at is null and q.project_id = @project_id::int
where g.kind = 0 and (sqlc.narg('queue_id')::int is null or g.queue_id = sqlc.narg('queue_id')::int);

-- name: DeadLetterPartitions :many
select p.id
from unnest(@queue_ids::int[]) as i (queue_id)
cross join lateral (
    select x.id from ferrymq.partitions x
    where x.queue_id = i.queue_id::int and not x.hidden and x.name = @name::text
    offset 0) p;

-- name: DeadLetterList :many
-- Newest first, after (before_time, before_id): of all queues (every), of one, of groups, or of partitions (and groups, if any are given).
-- reach = skip + max. in_page: how many there are to come, of which only as many are returned as are not too large together, one at least.
with everywhere as materialized (
    select d.id, d.failed_at from ferrymq.dead_letters d
    cross join lateral (select v.id from ferrymq.queues v where v.id = d.queue_id and v.project_id = @project_id::int and v.deleted_at is null offset 0) v
    where @every::boolean and d.failed_at >= @from_time::timestamptz and d.failed_at < @to_time::timestamptz
      and (d.failed_at, d.id) < (@before_time::timestamptz, @before_id::uuid)
    order by d.failed_at desc, d.id desc
    limit @reach::bigint
), of_queue as materialized (
    select d.id, d.failed_at from ferrymq.dead_letters d
    where d.queue_id = @queue_id::int and d.failed_at >= @from_time::timestamptz and d.failed_at < @to_time::timestamptz
      and d.failed_at <= @before_time::timestamptz and (d.failed_at, d.id) < (@before_time::timestamptz, @before_id::uuid)
    order by d.failed_at desc, d.id desc
    limit @reach::bigint
), of_groups as materialized (
    select l.id, l.failed_at
    from unnest(@group_ids::int[]) as g (id)
    cross join lateral (
        select d.id, d.failed_at from ferrymq.dead_letters d
        where d.group_id = g.id::int and d.failed_at >= @from_time::timestamptz and d.failed_at < @to_time::timestamptz
          and d.failed_at <= @before_time::timestamptz and (d.failed_at, d.id) < (@before_time::timestamptz, @before_id::uuid)
        order by d.failed_at desc, d.id desc
        limit @reach::bigint
    ) l
    where cardinality(@partition_ids::bigint[]) = 0
), of_partitions as materialized (
    select l.id, l.failed_at
    from unnest(@partition_ids::bigint[]) as p (id)
    cross join lateral (
        select d.id, d.failed_at from ferrymq.dead_letters d
        where d.partition_id = p.id::bigint and d.failed_at >= @from_time::timestamptz and d.failed_at < @to_time::timestamptz
          and d.failed_at <= @before_time::timestamptz and (d.failed_at, d.id) < (@before_time::timestamptz, @before_id::uuid)
          and (cardinality(@group_ids::int[]) = 0 or d.group_id = any(@group_ids::int[]))
        order by d.failed_at desc, d.id desc
        limit @reach::bigint
    ) l
), page as materialized (
    select u.id, u.failed_at
    from (
        select e.id, e.failed_at from everywhere e
        union all select o.id, o.failed_at from of_queue o
        union all select o.id, o.failed_at from of_groups o
        union all select o.id, o.failed_at from of_partitions o
    ) u
    order by u.failed_at desc, u.id desc
    offset @skip::bigint limit @max::bigint
)
select x.id, x.message_id, x.transaction_id, x.key_no, x.codec, x.frames, x.error_message, x.retry_count, x.failed_at,
       p.public_id, p.name as partition_name, q.name as queue_name, coalesce(g.name, '')::text as group_name, x.in_page::bigint as in_page
from (
    select d.id, d.queue_id, d.group_id, d.partition_id, d.message_id, d.transaction_id, d.key_no, d.codec, d.frames, d.error_message, d.retry_count, d.failed_at,
           count(*) over () as in_page, sum(octet_length(d.frames)) over (order by d.failed_at desc, d.id desc) - octet_length(d.frames) as before
    from page
    join ferrymq.dead_letters d on d.id = page.id
) x
join ferrymq.partitions p on p.id = x.partition_id
join ferrymq.queues q on q.id = x.queue_id
left join ferrymq.groups g on g.id = x.group_id
where x.before <= @bytes::bigint
order by x.failed_at desc, x.id desc;

-- name: DeadLetterDelete :execrows
with doomed as materialized (
    select d.id from ferrymq.dead_letters d
    where d.partition_id = @partition_id::bigint and d.transaction_id = @transaction_id::text
    order by d.failed_at, d.id
    for update
)
delete from ferrymq.dead_letters d where d.id = any(array(select x.id from doomed x));

-- name: DeadLetterNow :one
select clock_timestamp()::timestamptz as now;

-- name: DeadLetterPurgeQueue :execrows
-- A chunk of what failed up to a moment: what fails meanwhile is not chased.
with doomed as materialized (
    select d.id from ferrymq.dead_letters d
    where d.queue_id = @queue_id::int and d.failed_at <= @until::timestamptz
    order by d.failed_at, d.id
    limit @max::bigint
    for update
)
delete from ferrymq.dead_letters d where d.id = any(array(select x.id from doomed x));

-- name: DeadLetterPurgeGroup :execrows
with doomed as materialized (
    select d.id from ferrymq.dead_letters d
    where d.group_id = @group_id::int and d.failed_at <= @until::timestamptz
    order by d.failed_at, d.id
    limit @max::bigint
    for update
)
delete from ferrymq.dead_letters d where d.id = any(array(select x.id from doomed x));
