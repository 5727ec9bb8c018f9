-- name: TraceCreate :exec
-- Queue and partition are looked up among one project's: those of another one are unknown.
with place as materialized (
    select q.name as queue_name, p.name as partition_name
    from ferrymq.partitions p
    join ferrymq.queues q on q.id = p.queue_id and q.deleted_at is null and q.project_id = @project_id::int
    where p.public_id = @partition_id::uuid
), stored as (
    insert into ferrymq.traces (id, partition_id, transaction_id, consumer_group, event_type, data, names, queue_name, partition_name, created_at)
    values (@id::uuid, @partition_id::uuid, @transaction_id::text, @consumer_group::text, @event_type::text, @data::bytea, @names::text[],
            (select l.queue_name from place l), (select l.partition_name from place l), clock_timestamp())
    returning id, names, created_at, partition_id, transaction_id
)
insert into ferrymq.trace_names (name, created_at, trace_id, partition_id, transaction_id)
select distinct unnest(s.names), s.created_at, s.id, s.partition_id, s.transaction_id from stored s;

-- name: TraceOfMessage :many
-- The traces of a message after (after_time, after_id), oldest first, as many as are not too large together, one at least.
select x.id, x.event_type, x.data, x.consumer_group, x.created_at, x.names
from (
    select t.id, t.event_type, t.data, t.consumer_group, t.created_at, t.names,
           sum(octet_length(t.data)) over (order by t.created_at, t.id) - octet_length(t.data) as before
    from (
        select n.* from ferrymq.traces n
        where n.partition_id = @partition_id::uuid and n.transaction_id = @transaction_id::text
          and (n.created_at, n.id) > (@after_time::timestamptz, @after_id::uuid)
        order by n.created_at, n.id
        limit @max::bigint
    ) t
) x
where x.before <= @bytes::bigint
order by x.created_at, x.id;

-- name: TraceByName :many
-- The same by name, with the message they are about.
select x.id, x.event_type, x.data, x.consumer_group, x.created_at, x.names, x.transaction_id, x.partition_id, x.queue_name, x.partition_name
from (
    select t.id, t.event_type, t.data, t.consumer_group, t.created_at, t.names, t.transaction_id, t.partition_id, t.queue_name, t.partition_name,
           sum(octet_length(t.data)) over (order by t.created_at, t.id) - octet_length(t.data) as before
    from (
        select n.trace_id from ferrymq.trace_names n
        where n.name = @name::text and (n.created_at, n.trace_id) > (@after_time::timestamptz, @after_id::uuid)
        order by n.created_at, n.trace_id
        offset @skip::bigint limit @max::bigint
    ) n
    join ferrymq.traces t on t.id = n.trace_id
) x
where x.before <= @bytes::bigint
order by x.created_at, x.id;

-- name: TraceUses :many
-- Uses of names before (before_time, before_name), the last one first.
select n.name, n.created_at from ferrymq.trace_names n
where (n.created_at, n.name) < (@before_time::timestamptz, @before_name::text)
order by n.created_at desc, n.name desc
limit @max::bigint;

-- name: TraceCounts :many
-- Of each name, in the order given.
select t.name::text as name, c.traces::bigint as trace_count, c.messages::bigint as message_count
from unnest(@names::text[]) with ordinality as t (name, n)
cross join lateral (
    select count(*) as traces, count(distinct (n.partition_id, n.transaction_id)) as messages from ferrymq.trace_names n where n.name = t.name::text
) c
order by t.n;

-- name: TracesExpire :execrows
-- Traces are kept for a week.
delete from ferrymq.traces t
where t.ctid = any(array(
    select x.ctid from ferrymq.traces x
    where x.created_at < statement_timestamp() - interval '7 days'
    order by x.created_at
    limit @max::bigint
    for update skip locked));

-- name: TraceNamesExpire :execrows
delete from ferrymq.trace_names t
where t.ctid = any(array(
    select x.ctid from ferrymq.trace_names x
    where x.created_at < statement_timestamp() - interval '7 days'
    order by x.created_at
    limit @max::bigint
    for update skip locked));
