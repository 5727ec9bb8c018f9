-- The statements of one flush, in the order they run, all in one implicit transaction.
--
-- Lock order of the whole product: partitions by id, then cursors by (group_id, partition_id),
-- each in one sorted statement. Claims come last and never wait for a lock.
--
-- Read committed: a statement sees fresh columns only of rows it locked itself, the next statement
-- of the transaction sees them all. Every split into two statements below is there for that reason.
--
-- While any session of the database holds an old snapshot, no version of a row goes away: after thousands of updates its keys stand in the index
-- once for every few of them. So rows that change all the time are looked up as x.id >= t.id and x.id <= t.id order by x.id desc limit 1:
-- backwards (an equality would be read forwards), where the newest version is first, and no further. What a transaction has locked it then
-- changes by ctid: nobody else can move it. A row that is found but not locked may move meanwhile, and a look-up by ctid loses it then.

-- name: FlushSettings :exec
-- Not as start-up parameters, which a pooler in transaction mode refuses: for the transaction, or, on a session of our own, for as long as it lasts.
select set_config('statement_timeout', @statement_timeout_ms::text, not @lasting::boolean), set_config('lock_timeout', @lock_timeout_ms::text, not @lasting::boolean),
       -- A broker that vanished leaves its locks no longer than that.
       set_config('idle_in_transaction_session_timeout', '5s', not @lasting::boolean),
       -- The statements are written for one plan, by index, whatever the size of arrays and tables: planning them anew costs as much
       -- as running them, and statistics of a table that was small or empty a moment ago must not turn them into scans.
       set_config('plan_cache_mode', 'force_generic_plan', not @lasting::boolean), set_config('enable_seqscan', 'off', not @lasting::boolean),
       -- Nor by a bitmap, which reads all versions of a row.
       set_config('enable_bitmapscan', 'off', not @lasting::boolean),
       -- Compiling takes longer than any of them runs.
       set_config('jit', 'off', not @lasting::boolean);

-- name: LockPartitions :many
-- Locks what the flush pushes to (reach = the largest bigint) or may drain (reach = the highest offset a settle can move to).
-- A pushed partition that is not returned is gone.
select p.id, p.next_offset
from (
    select u.id::bigint as id, u.reach::bigint as reach
    from rows from (unnest(@ids::bigint[]), unnest(@reaches::bigint[])) as u (id, reach)
    where u.reach::bigint >= (select x.next_offset from ferrymq.partitions x where x.id >= u.id::bigint and x.id <= u.id::bigint order by x.id desc limit 1)
    order by u.id
    offset 0
) t
cross join lateral (
    select x.id, x.next_offset from ferrymq.partitions x
    where x.id >= t.id and x.id <= t.id
    order by x.id desc limit 1
    for no key update
) p
where p.next_offset <= t.reach;

-- name: AppendSegments :many
-- Moves the tails and stores the segments at them. expected_tails: -1, or the tail up to which deduplication was judged,
-- a partition that was locked but is not returned lost this compare-and-set, or its queue is gone. One that was not locked may also have moved.
with target as materialized (
    -- Joined in the update, the queue would be where a plan begins, and all of its partitions looked at.
    select x.at, t.total::bigint as total, t.expected::bigint as expected, q.retain_seconds
    from rows from (unnest(@ids::bigint[]), unnest(@totals::bigint[]), unnest(@expected_tails::bigint[])) as t (id, total, expected)
    cross join lateral (
        select p.ctid::tid as at, p.queue_id from ferrymq.partitions p where p.id >= t.id::bigint and p.id <= t.id::bigint order by p.id desc limit 1
    ) x
    cross join lateral (select y.retain_seconds from ferrymq.queues y where y.id = x.queue_id and y.deleted_at is null offset 0) q
), moved as (
    update ferrymq.partitions p
    set next_offset = p.next_offset + t.total,
        -- The clock may step back, time within a partition may not.
        last_push_at = greatest(clock_timestamp(), p.last_push_at),
        -- Indexed: it may change here only when nothing was due at all, or later.
        expire_at = least(p.expire_at, greatest(clock_timestamp(), p.last_push_at) + t.retain_seconds * interval '1 second')
    from target t
    where p.ctid = t.at and (t.expected < 0 or p.next_offset = t.expected)
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
    select v.group_id, v.partition_id
    from (
        -- offset 0 keeps the planner from starting at the groups, of which there may be many.
        select g.id as group_id, t.id::bigint as partition_id, true as mark, null::uuid as lease_id
        from rows from (unnest(@pushed::bigint[])) as t (id)
        cross join lateral (select x.queue_id from ferrymq.partitions x where x.id >= t.id::bigint and x.id <= t.id::bigint order by x.id desc limit 1) p
        cross join lateral (select x.id from ferrymq.groups x where x.queue_id = p.queue_id and x.deleted_at is null offset 0) g
        union all
        select s.group_id::int, s.partition_id::bigint, false, s.lease_id::uuid
        from rows from (unnest(@group_ids::int[]), unnest(@partition_ids::bigint[]), unnest(@lease_ids::uuid[])) as s (group_id, partition_id, lease_id)
    ) v
    cross join lateral (
        select x.pending, x.lease_id from ferrymq.cursors x
        where x.group_id = v.group_id and x.partition_id >= v.partition_id and x.partition_id <= v.partition_id
        order by x.partition_id desc limit 1
    ) k
    where (v.mark and not k.pending)
       or (not v.mark and (v.lease_id = '00000000-0000-0000-0000-000000000000' or v.lease_id = k.lease_id))
    order by v.group_id, v.partition_id
    offset 0
) w
cross join lateral (
    select x.group_id from ferrymq.cursors x
    where x.group_id = w.group_id and x.partition_id >= w.partition_id and x.partition_id <= w.partition_id
    order by x.partition_id desc limit 1
    for no key update
) c;

-- name: MarkPending :exec
-- Joined with the groups in SQL: one that another broker made a moment ago counts.
-- By ctid, which LockCursors holds in place: joined, a plan made while the table was small walks all of its primary key.
update ferrymq.cursors c
set pending = true
where c.ctid = any(array(
    select k.at
    from rows from (unnest(@pushed::bigint[])) as t (id)
    cross join lateral (select x.id, x.queue_id, x.next_offset from ferrymq.partitions x
                        where x.id >= t.id::bigint and x.id <= t.id::bigint order by x.id desc limit 1) p
    cross join lateral (select x.id from ferrymq.groups x where x.queue_id = p.queue_id and x.deleted_at is null offset 0) g
    cross join lateral (select x.ctid::tid as at, x.pending, x.committed from ferrymq.cursors x
                        where x.group_id = g.id and x.partition_id >= p.id and x.partition_id <= p.id order by x.partition_id desc limit 1) k
    where not k.pending and p.next_offset > k.committed));

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
           c.at, g.queue_id, p.next_offset, p.first_offset, q.retry_delay, c.committed, c.batch_end, c.failures,
           q.dead_letter_queue or q.dlq_after_max_retries as files,
           c.batch_end is not null as leased,
           case when c.failed_offset = s.failed_at then c.failures else 0 end as failed_before,
           s.action = 1 and c.batch_end is not null and case when c.failed_offset = s.failed_at then c.failures else 0 end >= q.retry_limit as exhausted
    from s
    cross join lateral (
        select x.ctid::tid as at, x.committed, x.batch_end, x.failures, x.failed_offset, x.lease_id, x.lease_until from ferrymq.cursors x
        where x.group_id = s.group_id and x.partition_id >= s.partition_id and x.partition_id <= s.partition_id
        order by x.partition_id desc limit 1
    ) c
    join ferrymq.groups g on g.id = s.group_id and g.deleted_at is null
    join ferrymq.queues q on q.id = g.queue_id and q.deleted_at is null
    cross join lateral (
        select x.next_offset, x.first_offset from ferrymq.partitions x where x.id >= s.partition_id and x.id <= s.partition_id order by x.id desc limit 1
    ) p
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
    where j.outcome <> 2 and c.ctid = j.at
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

-- name: CompleteCursors :many
-- SettleCursors for what most acks are, action 0, without what a plan for the others costs. It takes the locks itself, in order: alone in its
-- flush it needs no LockCursors. One that moved between this statement's snapshot and the lock changes nothing and is not returned.
with s as materialized (
    select t.n::int as n, t.move_to::bigint as move_to, t.reach::bigint as reach, c.at, c.leased, p.next_offset
    from (
        select u.n, u.group_id, u.partition_id, u.lease_id, u.expected, u.move_to, u.reach
        from rows from (unnest(@ns::int[]), unnest(@group_ids::int[]), unnest(@partition_ids::bigint[]), unnest(@lease_ids::uuid[]), unnest(@expecteds::bigint[]),
                        unnest(@move_tos::bigint[]), unnest(@reaches::bigint[]))
             as u (n, group_id, partition_id, lease_id, expected, move_to, reach)
        order by u.group_id, u.partition_id
        offset 0
    ) t
    cross join lateral (
        select g.id
        from ferrymq.groups g
        join ferrymq.queues q on q.id = g.queue_id and q.deleted_at is null
        where g.id = t.group_id::int and g.deleted_at is null
        offset 0
    ) g
    cross join lateral (
        select x.ctid::tid as at, x.batch_end is not null as leased from ferrymq.cursors x
        where x.group_id = t.group_id::int and x.partition_id >= t.partition_id::bigint and x.partition_id <= t.partition_id::bigint
          and x.committed >= t.expected::bigint
          and (t.lease_id::uuid = '00000000-0000-0000-0000-000000000000' or (x.lease_id = t.lease_id::uuid and x.lease_until > clock_timestamp()))
        order by x.partition_id desc limit 1
        for no key update
    ) c
    cross join lateral (
        select x.next_offset from ferrymq.partitions x where x.id >= t.partition_id::bigint and x.id <= t.partition_id::bigint order by x.id desc limit 1
    ) p
)
update ferrymq.cursors c
set committed = greatest(s.move_to, c.committed),
    lease_id = case when s.move_to < c.batch_end then c.lease_id end,
    lease_until = case when s.move_to < c.batch_end then c.lease_until end,
    batch_end = case when s.move_to < c.batch_end then c.batch_end end,
    failed_offset = case when c.failed_offset >= greatest(s.move_to, c.committed) then c.failed_offset end,
    failures = case when c.failed_offset >= greatest(s.move_to, c.committed) then c.failures else 0 end,
    not_before = case when c.failed_offset >= greatest(s.move_to, c.committed) or s.move_to <= c.committed then c.not_before end,
    pending = c.pending and not (greatest(s.move_to, c.committed) = s.reach and s.next_offset <= s.reach)
from s
where c.ctid = s.at
returning s.n::int as n, c.committed::bigint as committed, (s.leased and c.lease_id is null)::boolean as released, c.pending::boolean as pending,
          coalesce(extract(epoch from c.not_before - clock_timestamp()) * 1000, -1)::bigint as due_ms;

-- name: RestoreCursors :exec
-- Undoes an autoAck claim that nobody received, if the cursor is still where that claim left it, and no seek has put it there since.
-- Backwards, so pending stays true.
update ferrymq.cursors c
set committed = t.start_offset::bigint, pending = true,
    not_before = case when t.rest::boolean then clock_timestamp() + interval '5 seconds' else c.not_before end
from rows from (unnest(@group_ids::int[]), unnest(@partition_ids::bigint[]), unnest(@start_offsets::bigint[]), unnest(@end_offsets::bigint[]), unnest(@claimed_ats::timestamptz[]), unnest(@rests::boolean[]))
     as t (group_id, partition_id, start_offset, end_offset, claimed_at, rest)
where c.group_id = t.group_id::int and c.partition_id = t.partition_id::bigint and c.committed = t.end_offset::bigint and c.lease_id is null
  and (c.leased_at is null or c.leased_at < t.claimed_at::timestamptz);

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
