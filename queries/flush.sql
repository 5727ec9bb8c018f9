-- The statements of one flush, in the order they run, all in one implicit transaction.
--
-- Lock order of the whole product: partitions by id, then cursors by (group_id, partition_id),
-- each in one sorted statement. Claims come last and never wait for a lock.
--
-- Read committed: a statement sees fresh columns only of rows it locked itself, the next statement
-- of the transaction sees them all. Every split into two statements below is there for that reason.

-- name: FlushSettings :exec
-- Transaction-local, because a pooler in transaction mode refuses them as start-up parameters.
select set_config('statement_timeout', @statement_timeout_ms::text, true), set_config('lock_timeout', @lock_timeout_ms::text, true),
       -- The statements are written for one plan, by index, whatever the size of arrays and tables: planning them anew costs as much
       -- as running them, and statistics of a table that was small or empty a moment ago must not turn them into scans.
       set_config('plan_cache_mode', 'force_generic_plan', true), set_config('enable_seqscan', 'off', true),
       -- Compiling takes longer than any of them runs.
       set_config('jit', 'off', true);

-- name: LockPartitions :many
-- Locks what the flush pushes to (reach = the largest bigint) or may drain (reach = the highest offset a settle can move to).
-- A pushed partition that is not returned is gone.
select p.id, p.next_offset
from rows from (unnest(@ids::bigint[]), unnest(@reaches::bigint[])) as t (id, reach)
join ferrymq.partitions p on p.id = t.id::bigint
where p.next_offset <= t.reach::bigint
order by p.id
for no key update of p;

-- name: AppendSegments :many
-- Moves the tails and stores the segments at them. expected_tails: -1, or the tail up to which deduplication was judged,
-- a partition that was locked but is not returned lost this compare-and-set, or its queue is gone.
with target as materialized (
    select t.id::bigint as id, t.total::bigint as total, t.expected::bigint as expected
    from rows from (unnest(@ids::bigint[]), unnest(@totals::bigint[]), unnest(@expected_tails::bigint[])) as t (id, total, expected)
), moved as (
    update ferrymq.partitions p
    set next_offset = p.next_offset + t.total,
        -- The clock may step back, time within a partition may not.
        last_push_at = greatest(clock_timestamp(), p.last_push_at),
        -- Indexed: it may change here only when nothing was due at all, or later.
        expire_at = least(p.expire_at, greatest(clock_timestamp(), p.last_push_at) + q.retain_seconds * interval '1 second')
    from target t, ferrymq.queues q
    where p.id = t.id and q.id = p.queue_id and q.deleted_at is null
      and (t.expected < 0 or p.next_offset = t.expected)
    returning p.id, p.next_offset - t.total as base, p.last_push_at
), stored as (
    insert into ferrymq.segments (partition_id, base_offset, count, key_no, codec, created_at, first_id, keys, frames)
    select m.id, m.base + s.rel, s.count, s.key_no, s.codec, m.last_push_at, s.first_id, s.keys, s.frames
    from rows from (unnest(@seg_partitions::bigint[]), unnest(@seg_rels::bigint[]), unnest(@seg_counts::int[]), unnest(@seg_key_nos::smallint[]),
                    unnest(@seg_codecs::smallint[]), unnest(@seg_first_ids::uuid[]), unnest(@seg_keys::bytea[]), unnest(@seg_frames::bytea[]))
         as s (partition_id, rel, count, key_no, codec, first_id, keys, frames)
    join moved m on m.id = s.partition_id
)
select m.id, m.base::bigint as base, m.last_push_at::timestamptz as created_at from moved m;

-- name: CreatePartitions :many
-- A new partition appears in its final state, first segments included. What is not returned exists already, or its queue is gone.
-- The foreign key locks the queue row against a group's first contact, so the next statement sees every group.
with target as materialized (
    select t.public_id::uuid as public_id, t.queue_id::int as queue_id, t.name::text as name, t.hidden::boolean as hidden, t.total::bigint as total
    from rows from (unnest(@public_ids::uuid[]), unnest(@queue_ids::int[]), unnest(@names::text[]), unnest(@hiddens::boolean[]), unnest(@totals::bigint[]))
         as t (public_id, queue_id, name, hidden, total)
), made as (
    insert into ferrymq.partitions (public_id, queue_id, name, hidden, next_offset, last_push_at, expire_at, empty_since)
    select t.public_id, t.queue_id, t.name, t.hidden, t.total, case when t.total > 0 then clock_timestamp() end,
           case when t.total > 0 then clock_timestamp() + q.retain_seconds * interval '1 second' end, case when t.total = 0 then clock_timestamp() end
    from target t
    join ferrymq.queues q on q.id = t.queue_id and q.deleted_at is null
    order by t.queue_id, t.hidden, t.name
    on conflict (queue_id, hidden, name) do nothing
    returning id, public_id, last_push_at, created_at
), stored as (
    insert into ferrymq.segments (partition_id, base_offset, count, key_no, codec, created_at, first_id, keys, frames)
    select m.id, s.rel, s.count, s.key_no, s.codec, m.last_push_at, s.first_id, s.keys, s.frames
    from rows from (unnest(@seg_partitions::uuid[]), unnest(@seg_rels::bigint[]), unnest(@seg_counts::int[]), unnest(@seg_key_nos::smallint[]),
                    unnest(@seg_codecs::smallint[]), unnest(@seg_first_ids::uuid[]), unnest(@seg_keys::bytea[]), unnest(@seg_frames::bytea[]))
         as s (partition_id, rel, count, key_no, codec, first_id, keys, frames)
    join made m on m.public_id = s.partition_id
)
select m.id, m.public_id, coalesce(m.last_push_at, m.created_at)::timestamptz as created_at from made m;

-- name: CreateCursors :exec
-- Cursors of the partitions just created, for every registered group.
insert into ferrymq.cursors (group_id, partition_id, committed, pending, origin)
select g.id, p.id,
       case when p.created_at >= g.start_at then 0 else p.next_offset end,
       p.created_at >= g.start_at and p.next_offset > 0,
       case when p.created_at >= g.start_at then 0 else p.next_offset end
from ferrymq.partitions p
join ferrymq.groups g on g.queue_id = p.queue_id and g.deleted_at is null and g.registered
where p.public_id = any(@public_ids::uuid[])
order by g.id, p.id
on conflict do nothing;

-- name: LockCursors :exec
-- Everything mark and settle will touch, in one sorted pass: two unordered walks deadlock two brokers.
select c.group_id
from (
    -- offset 0 keeps the planner from starting at the groups, of which there may be many.
    select g.id as group_id, p.id as partition_id, true as mark, null::uuid as lease_id
    from ferrymq.partitions p
    cross join lateral (select x.id from ferrymq.groups x where x.queue_id = p.queue_id and x.deleted_at is null offset 0) g
    where p.id = any(@pushed::bigint[])
    union all
    select s.group_id::int, s.partition_id::bigint, false, s.lease_id::uuid
    from rows from (unnest(@group_ids::int[]), unnest(@partition_ids::bigint[]), unnest(@lease_ids::uuid[])) as s (group_id, partition_id, lease_id)
) w
join ferrymq.cursors c on c.group_id = w.group_id and c.partition_id = w.partition_id
where (w.mark and not c.pending)
   or (not w.mark and (w.lease_id = '00000000-0000-0000-0000-000000000000' or w.lease_id = c.lease_id))
order by c.group_id, c.partition_id
for no key update of c;

-- name: MarkPending :exec
-- Joined with the groups in SQL: one that another broker made a moment ago counts.
-- By ctid, which LockCursors holds in place: joined, a plan made while the table was small walks all of its primary key.
update ferrymq.cursors c
set pending = true
where c.ctid = any(array(
    select (select k.ctid from ferrymq.cursors k
            where k.group_id = g.id and k.partition_id = p.id and not k.pending and p.next_offset > k.committed)
    from ferrymq.partitions p
    cross join lateral (select x.id from ferrymq.groups x where x.queue_id = p.queue_id and x.deleted_at is null offset 0) g
    where p.id = any(@pushed::bigint[])));

-- name: SettleCursors :many
-- Applies what acks decided, fenced by the exact lease (zero = none asked for) and by the cursor it was decided on (expected).
-- action: 0 complete up to move_to, 1 failed at failed_at, 2 retry, 3 dead-letter failed_at, 4 give back undelivered,
-- 5 the same, and the partition rests 5 s.
-- What is not returned changed nothing: the lease is over, or the cursor moved. outcome: 0 applied, 1 dead letter filed,
-- 2 nothing changed because the copy for the dead letter is missing, 3 applied but there was no leased batch to dead-letter from,
-- 4 the exhausted message was dropped.
-- pending is cleared only when the cursor reached exactly the offset LockPartitions was given: then the partition row is locked
-- by this transaction, and no push can slip in between this look at next_offset and the commit.
with s as materialized (
    select t.n::int as n, t.group_id::int as group_id, t.partition_id::bigint as partition_id, t.lease_id::uuid as lease_id, t.expected::bigint as expected,
           t.action::int as action, t.move_to::bigint as move_to, t.failed_at::bigint as failed_at, t.reach::bigint as reach,
           t.dead_id::uuid as dead_id, t.message_id::uuid as message_id, t.transaction_id::text as transaction_id, t.error::text as error,
           t.key_no::smallint as key_no, t.codec::smallint as codec, t.frames::bytea as frames, t.created_at::timestamptz as created_at
    from rows from (unnest(@ns::int[]), unnest(@group_ids::int[]), unnest(@partition_ids::bigint[]), unnest(@lease_ids::uuid[]), unnest(@expecteds::bigint[]),
                    unnest(@actions::int[]), unnest(@move_tos::bigint[]), unnest(@failed_ats::bigint[]), unnest(@reaches::bigint[]),
                    unnest(@dead_ids::uuid[]), unnest(@message_ids::uuid[]), unnest(@transaction_ids::text[]), unnest(@errors::text[]),
                    unnest(@key_nos::smallint[]), unnest(@codecs::smallint[]), unnest(@frames::bytea[]), unnest(@created_ats::timestamptz[]))
         as t (n, group_id, partition_id, lease_id, expected, action, move_to, failed_at, reach,
               dead_id, message_id, transaction_id, error, key_no, codec, frames, created_at)
), found as materialized (
    select s.n, s.group_id, s.partition_id, s.action, s.move_to, s.failed_at, s.reach,
           s.dead_id, s.message_id, s.transaction_id, s.error, s.key_no, s.codec, s.frames, s.created_at,
           g.queue_id, p.next_offset, p.first_offset, q.retry_delay, c.committed, c.batch_end, c.failures,
           q.dead_letter_queue or q.dlq_after_max_retries as files,
           c.batch_end is not null as leased,
           case when c.failed_offset = s.failed_at then c.failures else 0 end as failed_before,
           s.action = 1 and c.batch_end is not null and case when c.failed_offset = s.failed_at then c.failures else 0 end >= q.retry_limit as exhausted
    from s
    join ferrymq.cursors c on c.group_id = s.group_id and c.partition_id = s.partition_id
    join ferrymq.groups g on g.id = s.group_id and g.deleted_at is null
    join ferrymq.queues q on q.id = g.queue_id and q.deleted_at is null
    join ferrymq.partitions p on p.id = s.partition_id
    -- Completing up to an offset of the leased batch means the same wherever the cursor is by now.
    where (c.committed = s.expected or (s.action = 0 and c.committed >= s.expected))
      and (s.lease_id = '00000000-0000-0000-0000-000000000000'
           or (c.lease_id = s.lease_id and (s.action >= 4 or c.lease_until > clock_timestamp())))
), judged as materialized (
    select f.*,
           case when f.action = 3 and not f.leased then 3
                when (f.action = 3 or (f.exhausted and f.files)) and f.dead_id = '00000000-0000-0000-0000-000000000000' then 2
                when f.action = 3 or (f.exhausted and f.files) then 1
                when f.exhausted then 4
                else 0 end as outcome,
           case when (f.action = 3 and f.leased) or f.exhausted then f.failed_at + 1
                else greatest(f.move_to, f.committed) end as to_offset
    from found f
), filed as (
    insert into ferrymq.dead_letters (id, queue_id, group_id, partition_id, message_offset, message_id, transaction_id, key_no, codec, frames,
                                      error_message, retry_count, message_created_at)
    select j.dead_id, j.queue_id, j.group_id, j.partition_id, j.failed_at, j.message_id, j.transaction_id, j.key_no, j.codec, j.frames,
           j.error, j.failed_before, j.created_at
    from judged j where j.outcome = 1
), moved as (
    update ferrymq.cursors c
    set committed = j.to_offset,
        lease_id = case when j.action = 0 and j.to_offset < c.batch_end then c.lease_id end,
        lease_until = case when j.action = 0 and j.to_offset < c.batch_end then c.lease_until end,
        batch_end = case when j.action = 0 and j.to_offset < c.batch_end then c.batch_end end,
        failed_offset = case when j.action = 1 and j.leased and not j.exhausted then j.failed_at
                             when c.failed_offset >= j.to_offset then c.failed_offset end,
        failures = case when j.action = 1 and j.leased and not j.exhausted then j.failed_before + 1
                        when c.failed_offset >= j.to_offset then c.failures else 0 end,
        not_before = case when j.action = 5 then clock_timestamp() + interval '5 seconds'
                          when j.action = 1 and j.leased and not j.exhausted and j.retry_delay > 0 and j.failed_at >= j.first_offset -- else it was removed
                               then clock_timestamp() + j.retry_delay * interval '1 millisecond'
                          when c.failed_offset >= j.to_offset or j.to_offset = c.committed then c.not_before end,
        pending = c.pending and not (j.to_offset = j.reach and j.next_offset <= j.reach)
    from judged j
    where j.outcome <> 2 and c.group_id = j.group_id and c.partition_id = j.partition_id
    returning j.n, j.outcome, j.to_offset, j.leased and not (j.action = 0 and j.to_offset < j.batch_end) as released, c.pending,
              coalesce(extract(epoch from c.not_before - clock_timestamp()) * 1000, -1) as due_ms
)
select m.n::int as n, m.outcome::int as outcome, m.to_offset::bigint as committed, m.released::boolean as released, m.pending::boolean as pending,
       m.due_ms::bigint as due_ms
from moved m
union all
select j.n, j.outcome, j.to_offset, false, true, -1
from judged j
where j.outcome = 2;

-- name: RestoreCursors :exec
-- Undoes an autoAck claim that nobody received, if the cursor is still where that claim left it. Backwards, so pending stays true.
update ferrymq.cursors c
set committed = t.start_offset::bigint, pending = true,
    not_before = case when t.rest::boolean then clock_timestamp() + interval '5 seconds' else c.not_before end
from rows from (unnest(@group_ids::int[]), unnest(@partition_ids::bigint[]), unnest(@start_offsets::bigint[]), unnest(@end_offsets::bigint[]), unnest(@rests::boolean[]))
     as t (group_id, partition_id, start_offset, end_offset, rest)
where c.group_id = t.group_id::int and c.partition_id = t.partition_id::bigint and c.committed = t.end_offset::bigint and c.lease_id is null;

-- name: ExtendLeases :many
-- Never makes a lease shorter. The caller names the cursors, a lease that has ended stays ended, as do those of a deleted group.
update ferrymq.cursors c
set lease_until = greatest(c.lease_until, clock_timestamp() + t.seconds::int * interval '1 second')
from rows from (unnest(@ns::int[]), unnest(@group_ids::int[]), unnest(@partition_ids::bigint[]), unnest(@lease_ids::uuid[]), unnest(@seconds::int[]))
     as t (n, group_id, partition_id, lease_id, seconds)
cross join lateral (select g.id from ferrymq.groups g where g.id = t.group_id::int and g.deleted_at is null offset 0) g
where c.group_id = t.group_id::int and c.partition_id = t.partition_id::bigint
  and c.lease_id = t.lease_id::uuid and c.lease_until > clock_timestamp()
returning t.n::int as n, c.lease_until::timestamptz as lease_until;
