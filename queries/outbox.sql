-- Messages on their way to their streams. Lock order: the claim, rows of the outbox by id, then partitions and cursors as everywhere.

-- name: OutboxAdd :many
-- Delayed messages of one stream. An empty key is none. No row: the stream is gone.
insert into ferrymq.outbox (project_id, queue_id, stream, key, due_at, key_no, codec, first_id, frames)
select q.project_id, q.id, q.name, nullif(t.key::text, ''), statement_timestamp() + t.delay::bigint * interval '1 microsecond',
       t.key_no::smallint, t.codec::smallint, t.first_id::uuid, t.frames::bytea
from rows from (unnest(@keys::text[]), unnest(@delays::bigint[]), unnest(@key_nos::smallint[]), unnest(@codecs::smallint[]), unnest(@first_ids::uuid[]),
                unnest(@frames::bytea[])) with ordinality as t (key, delay, key_no, codec, first_id, frames, n)
join ferrymq.queues q on q.id = @queue_id::int and q.deleted_at is null
order by t.n
returning id;

-- name: OutboxNext :one
-- Whether anything waits to be moved at once, and in how many milliseconds the next delayed message is due; -1: there is none.
select ((select o.id from ferrymq.outbox o where o.due_at is null and o.id > 0 order by o.id limit 1) is not null)::boolean as waiting,
       coalesce((select ceil(greatest(extract(epoch from o.due_at - clock_timestamp()) * 1000, 0))
                 from ferrymq.outbox o where o.due_at > to_timestamp(0) order by o.due_at, o.id limit 1), -1)::bigint as due_ms;

-- name: OutboxPeek :many
-- What is to be moved, and no more than so many bytes of it: delayed messages by the moment they were due, then the others in the order they
-- were published. Keys that rest are passed over. Whoever moves these rows locks them first, and begins again if one is gone.
with rest as materialized (
    select t.project_id::int as project_id, t.stream::text as stream, t.key::text as key
    from rows from (unnest(@rest_projects::int[]), unnest(@rest_streams::text[]), unnest(@rest_keys::text[])) as t (project_id, stream, key)
), picked as materialized (
    select y.id, y.n
    from (
        select x.id, row_number() over w as n, sum(x.size) over w - x.size as before
        from (
            (select o.id, o.due_at, coalesce(octet_length(o.payload), octet_length(o.frames)) as size
             from ferrymq.outbox o
             where o.due_at <= statement_timestamp()
               and not exists (select from rest r where r.project_id = o.project_id and r.stream = o.stream and r.key = coalesce(o.key, ''))
             order by o.due_at, o.id
             limit @max::bigint)
            union all
            (select o.id, null, coalesce(octet_length(o.payload), octet_length(o.frames))
             from ferrymq.outbox o
             where o.due_at is null and o.id > 0
               and not exists (select from rest r where r.project_id = o.project_id and r.stream = o.stream and r.key = coalesce(o.key, ''))
             order by o.id
             limit @max::bigint)
        ) x
        window w as (order by x.due_at nulls last, x.id rows unbounded preceding)
    ) y
    where y.before < @bytes::bigint
)
select o.id, o.project_id, o.queue_id, o.stream, o.key, o.message_id, o.payload, o.headers, o.key_no, o.codec, o.first_id, o.frames,
       (o.queue_id is not null and q.id is null)::boolean as gone
from picked p
cross join lateral (select x.id, x.project_id, x.queue_id, x.stream, x.key, x.message_id, x.payload, x.headers, x.key_no, x.codec, x.first_id, x.frames
                    from ferrymq.outbox x where x.id = p.id offset 0) o
left join ferrymq.queues q on q.id = o.queue_id and q.deleted_at is null
order by p.n;

-- name: OutboxClaim :many
-- One broker at a time moves, or messages of one key could overtake each other. No row: another one is at it.
select s.name from ferrymq.sweeps s where s.name = 'outbox' for no key update skip locked;

-- name: OutboxLock :many
select o.id from ferrymq.outbox o where o.id = any(@ids::bigint[]) order by o.id for update;

-- name: OutboxMoved :exec
-- Needs OutboxLock. Where those went whose id was given out is kept.
with gone as (
    delete from ferrymq.outbox o where o.id = any(@ids::bigint[])
)
insert into ferrymq.outbox_places (id, partition_id, message_offset)
select t.id::bigint, t.partition_id::bigint, t.message_offset::bigint
from rows from (unnest(@place_ids::bigint[]), unnest(@partition_ids::bigint[]), unnest(@message_offsets::bigint[])) as t (id, partition_id, message_offset);

-- name: OutboxDrop :exec
delete from ferrymq.outbox o where o.id = any(@ids::bigint[]);

-- name: OutboxRemoveQueue :execrows
-- Of a deleted queue. Rows that are being moved are left to whoever moves them: it drops them.
delete from ferrymq.outbox o
where o.id = any(array(
    select x.id from ferrymq.outbox x
    where x.queue_id = @queue_id::int
    order by x.id
    limit @max::bigint
    for update skip locked));

-- name: OutboxPlacesExpire :execrows
delete from ferrymq.outbox_places p
where p.ctid = any(array(
    select x.ctid from ferrymq.outbox_places x
    where x.moved_at < statement_timestamp() - interval '30 days'
    order by x.moved_at
    limit @max::bigint));

-- name: OutboxFind :one
-- What a delayed message's id leads to: its place once it was moved (partition_id > 0), else where it will go.
select coalesce(p.partition_id, 0)::bigint as partition_id, coalesce(p.message_offset, 0)::bigint as message_offset, coalesce(o.stream, '')::text as stream, o.key
from (select @id::bigint as id) x
left join ferrymq.outbox_places p on p.id = x.id
left join ferrymq.outbox o on o.id = x.id and o.project_id = @project_id::int
where p.id is not null or o.id is not null;
