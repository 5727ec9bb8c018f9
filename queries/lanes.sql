-- name: LockGroups :exec
-- Before a claim for subscriptions with max_in_flight, and before an extend, in a statement of its own: what the claim then counts is
-- committed. The only lock that a claim waits for, and whoever holds it waits for nothing any more. Not the group's row: those who seed it hold
-- that while they wait for partitions. The ids come sorted.
select pg_advisory_xact_lock(1179805009, g.id::int)
from unnest(@ids::int[]) as g (id);

-- name: SettleLanes :many
-- Applies acks and nacks of deliveries, fenced by the lease. action: 0 ack, 1 nack, 2 release, 3 dead-letter what a claim found exhausted,
-- 4 pass over a message of another group. An ack is good after the end of the lease too, while nobody else has it.
-- delays: in ms, of a nack, -1 = as the policy says; of a release, how long the lane then rests. What is not returned changed nothing.
-- outcome: 0 applied, 1 dead letter filed, 2 nothing changed because the copy for the dead letter is missing.
-- pending is cleared as in SettleCursors.
with s as materialized (
    select t.n::int as n, t.group_id::int as group_id, t.partition_id::bigint as partition_id, t.lease_id::uuid as lease_id, t.action::int as action,
           t.delay::bigint as delay, t.reach::bigint as reach, t.error::text as error, t.signature::text as signature,
           t.dead_id::uuid as dead_id, t.message_id::uuid as message_id, t.transaction_id::text as transaction_id,
           t.key_no::smallint as key_no, t.codec::smallint as codec, t.frames::bytea as frames, t.created_at::timestamptz as created_at
    from rows from (unnest(@ns::int[]), unnest(@group_ids::int[]), unnest(@partition_ids::bigint[]), unnest(@lease_ids::uuid[]), unnest(@actions::int[]),
                    unnest(@delays::bigint[]), unnest(@reaches::bigint[]), unnest(@errors::text[]), unnest(@signatures::text[]),
                    unnest(@dead_ids::uuid[]), unnest(@message_ids::uuid[]), unnest(@transaction_ids::text[]),
                    unnest(@key_nos::smallint[]), unnest(@codecs::smallint[]), unnest(@frames::bytea[]), unnest(@created_ats::timestamptz[]))
         as t (n, group_id, partition_id, lease_id, action, delay, reach, error, signature, dead_id, message_id, transaction_id, key_no, codec, frames, created_at)
), judged as materialized (
    select s.n, s.group_id, s.partition_id, s.lease_id, s.action, s.reach, s.error, s.signature, s.dead_id, s.message_id, s.transaction_id, s.key_no, s.codec, s.frames,
           s.created_at, g.queue_id, g.max_in_flight > 0 as limited, g.trace_full, p.next_offset, p.first_offset, c.committed, c.attempts, c.consumer, d.dead,
           c.at, case when d.dead and s.dead_id = '00000000-0000-0000-0000-000000000000' then 2 when d.dead then 1 else 0 end as outcome,
           case when d.dead or s.action in (0, 4) then c.batch_end else c.committed end as to_offset,
           case when s.delay >= 0 then s.delay::double precision
                else least(g.backoff_initial * g.backoff_multiplier ^ least(c.attempts - 1, 100), g.backoff_max) * (0.9 + 0.2 * random()) end as rest
    from s
    cross join lateral (
        select x.ctid::tid as at, x.committed, x.batch_end, x.attempts, x.consumer, x.lease_id, x.lease_until from ferrymq.cursors x
        where x.group_id = s.group_id and x.partition_id >= s.partition_id and x.partition_id <= s.partition_id
        order by x.partition_id desc limit 1
    ) c
    join ferrymq.groups g on g.id = s.group_id and g.deleted_at is null
    join ferrymq.queues q on q.id = g.queue_id and q.deleted_at is null
    cross join lateral (
        select x.next_offset, x.first_offset from ferrymq.partitions x where x.id >= s.partition_id and x.id <= s.partition_id order by x.id desc limit 1
    ) p
    -- Of a message that retention has removed there is nothing to keep: its lane goes on without a dead letter.
    cross join lateral (select s.action = 3 or (s.action = 1 and g.max_attempts > 0 and c.attempts >= g.max_attempts and c.committed >= p.first_offset) as dead) d
    where c.lease_id = s.lease_id and (s.action in (0, 3, 4) or c.lease_until > clock_timestamp())
), filed as (
    insert into ferrymq.dead_letters (id, queue_id, group_id, partition_id, message_offset, message_id, transaction_id, key_no, codec, frames,
                                      error_message, retry_count, message_created_at, signature, consumer, first_failed_at)
    select j.dead_id, j.queue_id, j.group_id, j.partition_id, j.committed, j.message_id, j.transaction_id, j.key_no, j.codec, j.frames,
           j.error, j.attempts, j.created_at, j.signature, j.consumer,
           coalesce((select min(e.at) from ferrymq.lane_events e
                     where e.partition_id = j.partition_id and e.message_offset = j.committed and e.group_id = j.group_id and e.kind = 1), clock_timestamp())
    from judged j where j.outcome = 1
), noted as (
    insert into ferrymq.lane_events (group_id, partition_id, message_offset, kind, attempt, at, consumer, error)
    select j.group_id, j.partition_id, j.committed, k.kind, j.attempts, clock_timestamp(), j.consumer, case when k.kind <> 2 then j.error end
    from judged j
    cross join lateral (values (1::smallint, j.action = 1), (2::smallint, j.action = 0 and j.trace_full), (3::smallint, j.dead)) as k (kind, happened)
    where k.happened and j.outcome <> 2
), freed as (
    delete from ferrymq.in_flight f
    using judged j
    where j.limited and j.outcome <> 2 and f.group_id = j.group_id and f.partition_id = j.partition_id
), moved as (
    update ferrymq.cursors c
    set committed = j.to_offset, lease_id = null, lease_until = null, batch_end = null, settled = j.lease_id,
        attempts = case when j.to_offset > j.committed then 0 when j.action = 2 then c.attempts - 1 else c.attempts end,
        not_before = case when (j.action = 1 and not j.dead or j.action = 2 and j.rest > 0) and j.committed >= j.first_offset then clock_timestamp() + j.rest * interval '1 millisecond' end,
        pending = c.pending and not (j.to_offset = j.reach and j.next_offset <= j.reach)
    from judged j
    where j.outcome <> 2 and c.ctid = j.at
    returning j.n, j.outcome, c.committed, c.pending, coalesce(extract(epoch from c.not_before - clock_timestamp()) * 1000, -1) as due_ms
)
select m.n::int as n, m.outcome::int as outcome, m.committed::bigint as committed, m.pending::boolean as pending, m.due_ms::bigint as due_ms
from moved m
union all
select j.n, j.outcome, j.committed, true, -1
from judged j
where j.outcome = 2;

-- name: ExtendLanes :many
-- The new end counts from now, also when it is earlier than the old one. A lease that has ended stays ended.
with x as materialized (
    select t.n::int as n, t.group_id::int as group_id, t.partition_id::bigint as partition_id, t.lease_id::uuid as lease_id, t.seconds::int as seconds
    from rows from (unnest(@ns::int[]), unnest(@group_ids::int[]), unnest(@partition_ids::bigint[]), unnest(@lease_ids::uuid[]), unnest(@seconds::int[]))
         as t (n, group_id, partition_id, lease_id, seconds)
), moved as (
    update ferrymq.cursors c
    set lease_until = clock_timestamp() + x.seconds * interval '1 second'
    from x
    where c.group_id = x.group_id and c.partition_id = x.partition_id and c.lease_id = x.lease_id and c.lease_until > clock_timestamp()
    returning x.n, c.group_id, c.partition_id, c.lease_until
), counted as (
    update ferrymq.in_flight f
    set lease_until = m.lease_until
    from moved m
    where f.group_id = m.group_id and f.partition_id = m.partition_id
)
select m.n::int as n, m.lease_until::timestamptz as lease_until from moved m;

-- name: LaneStates :many
-- Why a settle changed nothing: whose the lane is by now. A lane that is not returned does not exist.
select c.partition_id, coalesce(c.settled, '00000000-0000-0000-0000-000000000000')::uuid as settled, c.committed
from rows from (unnest(@partition_ids::bigint[])) as t (partition_id)
cross join lateral (
    select x.partition_id, x.settled, x.committed from ferrymq.cursors x
    where x.group_id = @group_id::int and x.partition_id = t.partition_id::bigint
    limit 1
) c;
