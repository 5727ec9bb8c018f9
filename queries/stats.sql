-- name: NumbersWanted :one
-- When somebody last asked for current numbers, and now.
select s.numbers_wanted_at, clock_timestamp()::timestamptz as now from ferrymq.system s;

-- name: NumbersWant :one
-- Makes every broker count anew before it answers with numbers again.
update ferrymq.system s set numbers_wanted_at = clock_timestamp() returning numbers_wanted_at;

-- name: QueuePage :many
-- The live queues of a project, newest first. Empty filters match all.
select q.id, q.public_id, q.name, q.namespace, q.task, q.created_at
from ferrymq.queues q
where q.project_id = @project_id::int and q.deleted_at is null
  and (@queue::text = '' or q.name = @queue::text)
  and (@namespace::text = '' or q.namespace = @namespace::text)
  and (@task::text = '' or q.task = @task::text)
order by q.id desc
limit @max::bigint offset @skip::bigint;

-- name: QueueNumbers :many
-- Counts queues, one row each. How many messages a queue keeps is by nature a pass over its partitions; its backlog is not.
-- With lag, every row has the lag of all of them together as well: over the partitions with a backlog, in messages, and in
-- seconds since the oldest of it was pushed. Beyond 100,000 such partitions the seconds are those of an even sample.
with behind as materialized (
    select b.queue_id::int as queue_id, b.partition_id::bigint as partition_id, b.head::bigint as head,
           b.pending::bigint as pending, b.processing::bigint as processing
    from ferrymq.backlog(@ids::int[], null) b
), sums as materialized (
    select b.queue_id, sum(b.pending)::bigint as pending, sum(b.processing)::bigint as processing
    from behind b
    group by b.queue_id
), offsets as materialized (
    select coalesce(avg(b.pending), 0)::bigint as avg, coalesce(percentile_cont(0.5) within group (order by b.pending), 0)::bigint as median,
           coalesce(min(b.pending), 0)::bigint as min, coalesce(max(b.pending), 0)::bigint as max
    from behind b
    where @lag::boolean
), times as materialized (
    select coalesce(avg(a.age), 0)::bigint as avg, coalesce(percentile_cont(0.5) within group (order by a.age), 0)::bigint as median,
           coalesce(min(a.age), 0)::bigint as min, coalesce(max(a.age), 0)::bigint as max
    from (
        select greatest(extract(epoch from statement_timestamp() - s.created_at), 0)::float8 as age
        from behind b
        cross join lateral (
            select g.created_at from ferrymq.segments g
            where g.partition_id = b.partition_id and g.base_offset <= b.head
            order by g.base_offset desc
            limit 1
        ) s
        where @lag::boolean and b.partition_id % (1 + (select count(*) from behind) / 100000) = 0
    ) a
)
select x.id::int as queue_id, t.partitions::bigint as partitions, t.total::bigint as total, coalesce(s.pending, 0)::bigint as pending,
       coalesce(s.processing, 0)::bigint as processing, d.dead::bigint as dead_letter,
       o.avg::bigint as offset_avg, o.median::bigint as offset_median, o.min::bigint as offset_min, o.max::bigint as offset_max,
       a.avg::bigint as time_avg, a.median::bigint as time_median, a.min::bigint as time_min, a.max::bigint as time_max
from unnest(@ids::int[]) as x (id)
cross join lateral (
    select count(*) as partitions, coalesce(sum(p.next_offset - p.first_offset), 0) as total
    from ferrymq.partitions p where p.queue_id = x.id
    offset 0
) t
cross join lateral (select count(*) as dead from ferrymq.dead_letters l where l.queue_id = x.id offset 0) d
left join sums s on s.queue_id = x.id
cross join offsets o
cross join times a;

-- name: QueueSegments :many
-- Reads the segments of queues: for small ones only.
select p.queue_id, count(*)::bigint as segments, coalesce(sum(octet_length(s.keys) + octet_length(s.frames)), 0)::bigint as bytes
from unnest(@ids::int[]) as x (id)
cross join lateral (
    select y.id, y.queue_id, y.first_offset from ferrymq.partitions y where y.queue_id = x.id and y.next_offset > y.first_offset offset 0
) p
cross join lateral (
    select g.keys, g.frames from ferrymq.segments g
    where g.partition_id = p.id and g.base_offset + g.count > p.first_offset
      and g.base_offset >= coalesce((select b.base_offset from ferrymq.segments b where b.partition_id = p.id and b.base_offset <= p.first_offset
                                     order by b.base_offset desc limit 1), 0)
    offset 0
) s
group by p.queue_id;

-- name: QueueDepth :many
-- The partitions of a queue with a backlog, by name, each row with the sums over all of them.
select p.name, b.pending::bigint as pending, b.processing::bigint as processing,
       (sum(b.pending) over ())::bigint as all_pending, (sum(b.processing) over ())::bigint as all_processing, (count(*) over ())::bigint as partitions,
       (count(*) filter (where b.pending > b.processing) over ())::bigint as partitions_ready
from ferrymq.backlog(array[@queue_id::int], sqlc.narg('group')::text) b
join ferrymq.partitions p on p.id = b.partition_id
order by p.name
limit @max::bigint;

-- name: PartitionPage :many
-- Partitions by queue and name, of the live queues of a project whose names lie in [first, last]. upto is skip + max.
-- Of those that hold messages without a key, and of the others, the index has the order, each by itself.
select p.id, p.public_id, q.name as queue, p.name, p.created_at, p.last_push_at
from ferrymq.queues q
cross join lateral (
    select y.* from (
        (select x.id, x.public_id, x.name, x.hidden, x.created_at, x.last_push_at from ferrymq.partitions x
         where x.queue_id = q.id and not x.hidden order by x.name limit @upto::bigint)
        union all
        (select x.id, x.public_id, x.name, x.hidden, x.created_at, x.last_push_at from ferrymq.partitions x
         where x.queue_id = q.id and x.hidden order by x.name limit @upto::bigint)
    ) y
    order by y.name, y.hidden
    limit @upto::bigint
) p
where q.project_id = @project_id::int and q.deleted_at is null and q.name >= @first::text and q.name <= @last::text
order by q.name, p.name, p.hidden
limit @max::bigint offset @skip::bigint;

-- name: PartitionNumbers :many
-- Counts single partitions by the rules of ferrymq.backlog. The year 1 stands for no message.
select p.id, (p.next_offset - p.first_offset)::bigint as total, greatest(p.next_offset - h.head, 0)::bigint as pending, l.processing::bigint as processing,
       h.committed::bigint as committed, (select count(*) from ferrymq.dead_letters d where d.partition_id = p.id)::bigint as dead_letter,
       coalesce((select g.created_at from ferrymq.segments g where g.partition_id = p.id and g.base_offset <= p.first_offset and p.next_offset > p.first_offset
                 order by g.base_offset desc limit 1), '0001-01-01T00:00:00Z')::timestamptz as oldest,
       coalesce((select g.created_at from ferrymq.segments g where g.partition_id = p.id and g.base_offset < p.next_offset and p.next_offset > p.first_offset
                 order by g.base_offset desc limit 1), '0001-01-01T00:00:00Z')::timestamptz as newest
from unnest(@ids::bigint[]) as x (id)
cross join lateral (select y.id, y.queue_id, y.first_offset, y.next_offset from ferrymq.partitions y where y.id = x.id offset 0) p
cross join lateral (
    select w.committed, greatest(w.committed, p.first_offset) as head
    from (select coalesce(
        (select min(k.committed) from ferrymq.groups g join ferrymq.cursors k on k.group_id = g.id and k.partition_id = p.id
         where g.queue_id = p.queue_id and g.kind = 0 and g.deleted_at is null and g.name <> '__QUEUE_MODE__'),
        (select min(k.committed) from ferrymq.groups g join ferrymq.cursors k on k.group_id = g.id and k.partition_id = p.id
         where g.queue_id = p.queue_id and g.kind = 0 and g.deleted_at is null and g.name = '__QUEUE_MODE__'), 0) as committed offset 0) w
) h
cross join lateral (
    select coalesce(sum(greatest(z.batch_end - greatest(z.lo, z.seen), 0)), 0) as processing
    from (
        select k.batch_end, greatest(k.committed, h.head) as lo,
               coalesce(max(k.batch_end) over (order by k.committed rows between unbounded preceding and 1 preceding), 0) as seen
        from ferrymq.groups g
        join ferrymq.cursors k on k.group_id = g.id and k.partition_id = p.id and k.lease_until > statement_timestamp()
        where g.queue_id = p.queue_id and g.kind = 0 and g.deleted_at is null
    ) z
) l;
