-- name: ClaimPartitions :many
-- Leases partitions to the slots of the flush and returns their messages' segments.
-- A list is one pool of candidates: a group (scan), or one partition of a group (hints only). Lists of single partitions come first.
-- Candidates are dealt to the slots of a list in turn, so that no slot goes empty while another takes two.
-- from_partition of the latter may be minus that partition: then the list counts as gone when there is no cursor there.
-- Every list of a live group first returns a row without a slot: seen = candidates looked at, stale = those that had nothing to deliver.
-- seen is -1 when there was no look, because the subscription is paused or has all in flight that it may.
-- frames false: the caller has the frames of most segments already and fetches the others.
-- Of a subscription (kind 1) every partition is a lane: one message at a time, with its number of attempts. A lease of a lane that
-- ended counts as a failed attempt: the lane rests as its policy says, and at the last attempt it is claimed once more, exhausted,
-- for the broker to file its dead letter. With max_in_flight a lock per group serializes the claims.
-- A claim never waits: rows that another session holds are passed over, and the holder wakes whom it leaves work for.
with list as materialized (
    select l.list_no::int as list_no, g.group_id, g.lease_time, g.delayed_processing, g.window_buffer,
           l.from_partition::bigint as from_partition, l.scan::boolean as scan, l.index_first::boolean as index_first, l.slots::int as slots,
           -- LockGroups holds the group by now, so what it counts is exact.
           case when g.paused then 0
                when g.max_in_flight > 0 then least(l.want::bigint, greatest(g.max_in_flight - (
                    select count(*) from ferrymq.in_flight f where f.group_id = g.group_id and f.lease_until > clock_timestamp()), 0))
                else l.want::bigint end as want,
           l.frames::boolean as frames, g.lanes, g.max_attempts, g.backoff_initial, g.backoff_multiplier, g.backoff_max, g.count_expired_leases,
           g.max_in_flight > 0 as limited, g.trace_full as traced
    from rows from (unnest(@list_nos::int[]), unnest(@list_groups::int[]), unnest(@list_froms::bigint[]), unnest(@list_scans::boolean[]),
                    unnest(@list_index_firsts::boolean[]), unnest(@list_wants::bigint[]), unnest(@list_slots::int[]), unnest(@list_frames::boolean[]),
                    unnest(@list_limiteds::boolean[]))
         as l (list_no, group_id, from_partition, scan, index_first, want, slots, frames, limited)
    cross join lateral (
        select x.id as group_id, case when x.kind = 1 then x.lease_seconds else q.lease_time end as lease_time, q.delayed_processing, q.window_buffer,
               x.kind = 1 as lanes, x.max_attempts, x.backoff_initial, x.backoff_multiplier, x.backoff_max, x.count_expired_leases, x.max_in_flight, x.paused, x.trace_full
        from ferrymq.groups x
        join ferrymq.queues q on q.id = x.queue_id and q.deleted_at is null
        where x.id = l.group_id::int and x.deleted_at is null
          -- A claim that does not know of the limit has not taken the lock: as if the group were gone, it looks it up again.
          and (l.limited::boolean or x.max_in_flight = 0)
          and (l.from_partition::bigint >= 0 or (
              select true from ferrymq.cursors c where c.group_id = l.group_id::int and c.partition_id >= -l.from_partition::bigint and c.partition_id <= -l.from_partition::bigint
              order by c.partition_id desc limit 1))
        offset 0) g
), hinted as materialized (
    select l.list_no, c.group_id, c.partition_id, c.committed, c.attempts, c.lease_until, c.consumer, c.ctid::tid as at, h.n
    from rows from (unnest(@hint_lists::int[]), unnest(@hint_partitions::bigint[])) with ordinality as h (list_no, partition_id, n)
    join list l on l.list_no = h.list_no::int
    cross join lateral (
        select x.ctid::tid as at from ferrymq.cursors x
        where x.group_id = l.group_id and x.partition_id >= h.partition_id::bigint and x.partition_id <= h.partition_id::bigint
        order by x.partition_id desc limit 1
    ) v
    join ferrymq.cursors c on c.ctid = v.at
    where c.pending and l.want > 0
      and (c.not_before is null or c.not_before <= clock_timestamp())
      and (c.lease_until is null or c.lease_until < clock_timestamp())
    for no key update of c skip locked
), above as materialized (
    -- Without what is hinted, or such a candidate would count twice against what is wanted and a slot go empty.
    select l.list_no, l.group_id, s.partition_id, s.committed, s.attempts, s.lease_until, s.consumer, s.at
    from list l
    cross join lateral (
        select c.partition_id, c.committed, c.attempts, c.lease_until, c.consumer, c.ctid::tid as at from ferrymq.cursors c
        where c.group_id = l.group_id and c.pending and c.not_before is null and c.partition_id > l.from_partition
          and (c.lease_until is null or c.lease_until < clock_timestamp())
          and c.partition_id <> all (array(select h.partition_id from hinted h where h.group_id = l.group_id))
        order by c.partition_id
        limit case when l.index_first then l.want else greatest(l.want - (select count(*) from hinted h where h.list_no = l.list_no), 0) end
        for no key update skip locked
    ) s
    where l.scan
), below as materialized (
    select l.list_no, l.group_id, s.partition_id, s.committed, s.attempts, s.lease_until, s.consumer, s.at
    from list l
    cross join lateral (
        select c.partition_id, c.committed, c.attempts, c.lease_until, c.consumer, c.ctid::tid as at from ferrymq.cursors c
        where c.group_id = l.group_id and c.pending and c.not_before is null and c.partition_id <= l.from_partition
          and (c.lease_until is null or c.lease_until < clock_timestamp())
          and c.partition_id <> all (array(select h.partition_id from hinted h where h.group_id = l.group_id))
        order by c.partition_id
        limit greatest(l.want - (select count(*) from above a where a.list_no = l.list_no)
                              - case when l.index_first then 0 else (select count(*) from hinted h where h.list_no = l.list_no) end, 0)
        for no key update skip locked
    ) s
    where l.scan
), candidate as materialized (
    -- A transaction does not skip its own locks: the same cursor may come from two sources.
    select distinct on (u.group_id, u.partition_id) u.list_no, u.group_id, u.partition_id, u.committed, u.attempts, u.lease_until, u.consumer, u.at, u.source, u.place
    from (
        select h.list_no, h.group_id, h.partition_id, h.committed, h.attempts, h.lease_until, h.consumer, h.at, 1 as source, h.n as place from hinted h
        union all
        select a.list_no, a.group_id, a.partition_id, a.committed, a.attempts, a.lease_until, a.consumer, a.at, 2, a.partition_id from above a
        union all
        select b.list_no, b.group_id, b.partition_id, b.committed, b.attempts, b.lease_until, b.consumer, b.at, 3, b.partition_id from below b
    ) u
    order by u.group_id, u.partition_id, u.list_no, u.source
), met as materialized (
    -- expired: the lease of a lane ended and counts. retry_at: then it rests that long, unless it was the last attempt. Meanwhile the
    -- lease stays, as one that ended at -infinity: it has been counted, and an ack that comes late is still good.
    select k.at, p.at as partition_at, k.list_no, k.group_id, k.partition_id, k.source, k.place, k.committed, k.consumer, k.lease_until, l.index_first, l.slots, l.lease_time, l.frames, l.lanes, l.limited, l.want, l.traced,
           l.max_attempts, l.window_buffer, l.delayed_processing, p.public_id, p.name, p.hidden, p.next_offset, p.last_push_at,
           greatest(k.committed, p.first_offset)::bigint as start_offset,
           case when k.committed < p.first_offset then 0 when l.lanes and k.lease_until > '-infinity' and not l.count_expired_leases then k.attempts - 1 else k.attempts end as attempts,
           l.lanes and k.lease_until > '-infinity' and l.count_expired_leases and k.committed >= p.first_offset as expired,
           case when l.lanes and k.lease_until > '-infinity' and l.count_expired_leases and k.committed >= p.first_offset and (l.max_attempts = 0 or k.attempts < l.max_attempts)
                then k.lease_until + least(l.backoff_initial * l.backoff_multiplier ^ least(k.attempts - 1, 100), l.backoff_max) * (0.9 + 0.2 * random()) * interval '1 millisecond'
           end as retry_at
    from candidate k
    join list l on l.list_no = k.list_no
    -- One that moved between this statement's snapshot and the lock is passed over: whoever moved it wakes whom he leaves work for.
    join ferrymq.cursors c on c.ctid = k.at
    cross join lateral (
        select x.ctid::tid as at, x.public_id, x.name, x.hidden, x.next_offset, x.last_push_at, x.first_offset from ferrymq.partitions x
        where x.id >= k.partition_id and x.id <= k.partition_id
        order by x.id desc limit 1
    ) p
), looked as materialized (
    select k.*,
           case when k.retry_at > clock_timestamp() then 0
                when k.window_buffer > 0 and k.last_push_at > clock_timestamp() - k.window_buffer * interval '1 second' then 0
                when k.delayed_processing > 0 then (
                    select coalesce(max(s.base_offset + s.count), 0) from ferrymq.segments s
                    where s.partition_id = k.partition_id and s.created_at <= clock_timestamp() - k.delayed_processing * interval '1 second'
                      and s.base_offset < k.start_offset + 10000
                      and s.base_offset > k.start_offset - 1000) - k.start_offset
                else k.next_offset - k.start_offset end as available
    from met k
), numbered as (
    select k.*, case when k.lanes then 1 else k.available end as most,
           row_number() over (partition by k.list_no order by case when k.index_first and k.source = 1 then 9 else k.source end, k.place) - 1 as nth
    from looked k
    where k.available > 0
), slot as materialized (
    select s.slot_no::int as slot_no, s.list_no::int as list_no, s.nth::int as nth, s.lease_id::uuid as lease_id, s.budget::bigint as budget,
           s.parts::bigint as parts, s.lease_seconds::int as lease_seconds, s.auto_ack::boolean as auto_ack, s.discovery::boolean as discovery, s.consumer::text as consumer
    from rows from (unnest(@slot_nos::int[]), unnest(@slot_lists::int[]), unnest(@slot_nths::int[]), unnest(@slot_leases::uuid[]), unnest(@slot_budgets::bigint[]),
                    unnest(@slot_parts::bigint[]), unnest(@slot_seconds::int[]), unnest(@slot_auto_acks::boolean[]), unnest(@slot_discoveries::boolean[]),
                    unnest(@slot_consumers::text[]))
         as s (slot_no, list_no, nth, lease_id, budget, parts, lease_seconds, auto_ack, discovery, consumer)
), dealt as (
    select n.at, n.list_no, n.group_id, n.partition_id, n.public_id, n.name, n.start_offset, n.next_offset, n.lease_time, n.nth, n.frames, n.hidden,
           n.lanes, n.limited, n.traced, n.attempts, n.expired, n.consumer as last_consumer, n.lease_until as last_until, n.expired and n.attempts >= n.max_attempts and n.max_attempts > 0 as exhausted,
           s.slot_no, s.lease_id, s.budget, s.lease_seconds, s.auto_ack, s.discovery, s.consumer, n.most as available,
           coalesce(sum(least(n.most, s.budget, 2147483647)::int) over (partition by n.list_no, s.nth order by n.nth rows between unbounded preceding and 1 preceding), 0) as used
    from numbered n
    join slot s on s.list_no = n.list_no and s.nth = n.nth % n.slots and n.nth / n.slots < s.parts
    where not n.limited or n.nth < n.want -- there may be more hints than that
), taken as materialized (
    -- A span ends before the segment that would make it too large to hold in memory.
    select d.*, case when d.wanted = 1 then 1 else least(d.wanted, (
        select min(x.base_offset)
        from (
            select g.base_offset, sum(octet_length(g.frames)) over (order by g.base_offset) - octet_length(g.frames) as before
            from ferrymq.segments g
            where g.partition_id = d.partition_id
              and g.base_offset >= (select b.base_offset from ferrymq.segments b where b.partition_id = d.partition_id and b.base_offset <= d.start_offset
                                    order by b.base_offset desc limit 1)
              and g.base_offset < d.start_offset + d.wanted
        ) x
        where x.before > @span_bytes::bigint
    ) - d.start_offset) end::bigint as take
    from (
        select e.*, least(e.available, e.budget - e.used)::bigint as wanted,
               case when e.exhausted then least(e.lease_time, 30) -- for the broker: if it dies, the next one files the dead letter
                    when e.lease_seconds > 0 then e.lease_seconds else e.lease_time end as seconds
        from dealt e
        where e.used < e.budget
    ) d
), drained as materialized (
    -- Cleared only under the partition's lock, with the tail read under it, who holds that lock marks again or has drained it himself.
    select p.id, k.group_id
    from looked k
    join ferrymq.partitions p on p.ctid = k.partition_at
    where k.available <= 0 and p.next_offset <= k.start_offset
    for no key update of p skip locked
), change as materialized (
    select t.at, t.list_no, t.group_id, t.partition_id, true as claimed, t.start_offset, t.take, t.lease_id, t.auto_ack, t.seconds,
           null::timestamptz as due, false as drained, false as ended, t.lanes, t.exhausted, t.attempts, t.expired, t.consumer, t.last_consumer, t.last_until
    from taken t
    union all
    select k.at, k.list_no, k.group_id, k.partition_id, false, k.start_offset, 0, null, false, 0,
           case when k.next_offset <= k.start_offset then null
                when k.retry_at > clock_timestamp() then k.retry_at
                when k.window_buffer > 0 and k.last_push_at > clock_timestamp() - k.window_buffer * interval '1 second'
                     then k.last_push_at + k.window_buffer * interval '1 second'
                else (select s.created_at from ferrymq.segments s where s.partition_id = k.partition_id and s.base_offset <= k.start_offset
                      order by s.base_offset desc limit 1) + k.delayed_processing * interval '1 second' end,
           exists (select from drained d where d.id = k.partition_id and d.group_id = k.group_id),
           k.lanes and k.lease_until > '-infinity', k.lanes, false, k.attempts, k.expired, null, k.consumer, k.lease_until
    from looked k
    where k.available <= 0
), changed as (
    update ferrymq.cursors c
    set committed = case when h.claimed and h.auto_ack then h.start_offset + h.take
                         when h.claimed or h.drained then h.start_offset else c.committed end,
        lease_id = case when h.claimed and not h.auto_ack then h.lease_id when not h.claimed and not h.drained then c.lease_id end,
        lease_until = case when h.claimed and not h.auto_ack then clock_timestamp() + h.seconds * interval '1 second'
                           when h.ended and not h.drained then '-infinity' -- judged, counted or not, and not again
                           when not h.claimed and not h.drained then c.lease_until end,
        batch_end = case when h.claimed and not h.auto_ack then h.start_offset + h.take when not h.claimed and not h.drained then c.batch_end end,
        not_before = h.due,
        pending = not h.drained,
        attempts = case when h.lanes then h.attempts + case when h.claimed and not h.exhausted then 1 else 0 end else 0 end,
        consumer = case when h.lanes and h.claimed and not h.exhausted then h.consumer else c.consumer end,
        leased_at = case when h.lanes and h.claimed and not h.exhausted then clock_timestamp() else c.leased_at end
    from change h
    where c.ctid = h.at
), counted as (
    insert into ferrymq.in_flight (group_id, partition_id, lease_until)
    select t.group_id, t.partition_id, clock_timestamp() + t.seconds * interval '1 second'
    from taken t
    where t.limited
    on conflict (group_id, partition_id) do update set lease_until = excluded.lease_until
), noted as (
    insert into ferrymq.lane_events (group_id, partition_id, message_offset, kind, attempt, at, consumer, error)
    select h.group_id, h.partition_id, h.start_offset, 1, h.attempts, h.last_until, h.last_consumer, 'lease expired'
    from change h
    where h.expired
    union all
    select t.group_id, t.partition_id, t.start_offset, 0, t.attempts + 1, clock_timestamp(), t.consumer, null
    from taken t
    where t.traced and not t.exhausted
), remembered as (
    insert into ferrymq.leases (lease_id, group_id)
    select distinct t.lease_id, t.group_id from taken t where t.discovery and not t.auto_ack
    on conflict do nothing
), result as (
    -- One row per list, then its spans. Joined, either would be walked for every row of the other.
    select x.list_no, sum(x.seen)::int as seen, sum(x.stale)::int as stale, max(x.above_to)::bigint as above_to, max(x.below_to)::bigint as below_to,
           coalesce(extract(epoch from min(x.due) - clock_timestamp()) * 1000, -1)::bigint as due_ms,
           -1 as slot_no, 0::bigint as nth, 0::bigint as partition_id, '00000000-0000-0000-0000-000000000000'::uuid as public_id, '' as name,
           0::bigint as start_offset, 0::bigint as take, 0::bigint as next_offset, 0::bigint as lease_ms,
           false as hidden, 0 as attempt, false as exhausted, 0 as only_group,
           0::bigint as base_offset, 0 as count, 0::smallint as key_no, 0::smallint as codec, now() as created_at,
           '00000000-0000-0000-0000-000000000000'::uuid as first_id, null::bytea as keys, null::bytea as frames
    from (
        select l.list_no, case when l.want > 0 then 0 else -1 end as seen, 0 as stale, 0::bigint as above_to, 0::bigint as below_to, null::timestamptz as due from list l
        union all
        select k.list_no, 1, case when k.available <= 0 then 1 else 0 end, case when k.source = 2 then k.partition_id else 0 end,
               case when k.source = 3 then k.partition_id else 0 end, null from looked k
        union all
        select h.list_no, 0, 0, 0, 0, h.due from change h
    ) x
    group by x.list_no
    union all
    select t.list_no, 0, 0, 0, 0, -1, t.slot_no, t.nth, t.partition_id, t.public_id, t.name, t.start_offset, t.take, t.next_offset, t.seconds * 1000::bigint,
           t.hidden, case when t.lanes then t.attempts + case when t.exhausted then 0 else 1 end else 0 end, t.exhausted, coalesce(s.only_group, 0),
           s.base_offset, s.count, s.key_no, s.codec, s.created_at, s.first_id, s.keys, case when t.frames then s.frames end
    from taken t
    cross join lateral (
        (select g.base_offset, g.count, g.key_no, g.codec, g.created_at, g.first_id, g.keys, g.frames, g.only_group
         from ferrymq.segments g
         where g.partition_id = t.partition_id and g.base_offset <= t.start_offset
         order by g.base_offset desc limit 1)
        union all
        select g.base_offset, g.count, g.key_no, g.codec, g.created_at, g.first_id, g.keys, g.frames, g.only_group
        from ferrymq.segments g
        where t.take > 1 and g.partition_id = t.partition_id and g.base_offset > t.start_offset and g.base_offset < t.start_offset + t.take
    ) s
)
select r.list_no::int as list_no, r.seen::int as seen, r.stale::int as stale, r.above_to::bigint as above_to, r.below_to::bigint as below_to, r.due_ms::bigint as due_ms,
       r.slot_no::int as slot_no, r.partition_id::bigint as partition_id, r.public_id::uuid as public_id, r.name::text as name,
       r.start_offset::bigint as start_offset, r.take::bigint as take, r.next_offset::bigint as next_offset, r.lease_ms::bigint as lease_ms,
       r.hidden::boolean as hidden, r.attempt::int as attempt, r.exhausted::boolean as exhausted, r.only_group::int as only_group,
       r.base_offset::bigint as base_offset, r.count::int as count, r.key_no::smallint as key_no, r.codec::smallint as codec,
       r.created_at::timestamptz as created_at, r.first_id::uuid as first_id, r.keys::bytea as keys, r.frames::bytea as frames
from result r
order by r.list_no, r.slot_no, r.nth, r.base_offset;

-- name: ClaimHinted :many
-- ClaimPartitions for what most claims are: each slot wants one partition, and is told which; its group is one of batches (kind 0) whose
-- queue has neither delay nor window. A statement costs what its plan has of nodes before it does anything: this one has a third as many.
-- A slot that is not returned got nothing, for whatever reason: ClaimPartitions finds it out. Nor does this one put aside what is stale.
-- The pairs (group, partition) are distinct.
with taken as materialized (
    -- A span ends before the segment that would make it too large to hold in memory.
    select d.slot_no, d.group_id, d.partition_id, d.lease_id, d.auto_ack, d.frames, d.seconds, d.at, d.public_id, d.name, d.hidden, d.start_offset, d.next_offset,
           case when d.wanted = 1 then 1 else least(d.wanted, (
               select min(x.base_offset)
               from (
                   select g.base_offset, sum(octet_length(g.frames)) over (order by g.base_offset) - octet_length(g.frames) as before
                   from ferrymq.segments g
                   where g.partition_id = d.partition_id
                     and g.base_offset >= (select b.base_offset from ferrymq.segments b where b.partition_id = d.partition_id and b.base_offset <= d.start_offset
                                           order by b.base_offset desc limit 1)
                     and g.base_offset < d.start_offset + d.wanted
               ) x
               where x.before > @span_bytes::bigint
           ) - d.start_offset) end::bigint as take
    from (
        select s.slot_no::int as slot_no, s.group_id::int as group_id, s.partition_id::bigint as partition_id, s.lease_id::uuid as lease_id, s.auto_ack::boolean as auto_ack,
               s.frames::boolean as frames, case when s.lease_seconds::int > 0 then s.lease_seconds::int else g.lease_time end as seconds,
               c.at, p.public_id, p.name, p.hidden, greatest(c.committed, p.first_offset) as start_offset, p.next_offset,
               least(p.next_offset - greatest(c.committed, p.first_offset), s.budget::bigint) as wanted
        from rows from (unnest(@slot_nos::int[]), unnest(@groups::int[]), unnest(@partitions::bigint[]), unnest(@leases::uuid[]), unnest(@budgets::bigint[]),
                        unnest(@seconds::int[]), unnest(@auto_acks::boolean[]), unnest(@frames::boolean[]))
             as s (slot_no, group_id, partition_id, lease_id, budget, lease_seconds, auto_ack, frames)
        cross join lateral (
            select q.lease_time
            from ferrymq.groups x
            join ferrymq.queues q on q.id = x.queue_id and q.deleted_at is null and q.delayed_processing = 0 and q.window_buffer = 0
            where x.id = s.group_id::int and x.deleted_at is null and x.kind = 0
            offset 0
        ) g
        cross join lateral (
            -- By the primary key, which a cursor enters once: the index of what is pending has a dead entry for each time this one has drained.
            -- PostgreSQL 18 would take that one, if it saw that it could.
            select x.ctid::tid as at, x.committed from ferrymq.cursors x
            where x.group_id = s.group_id::int and x.partition_id >= s.partition_id::bigint and x.partition_id <= s.partition_id::bigint
              and x.pending::int = 1 and x.not_before is null and (x.lease_until is null or x.lease_until < clock_timestamp())
            order by x.partition_id desc limit 1
            for no key update skip locked
        ) c
        cross join lateral (
            select x.public_id, x.name, x.hidden, x.next_offset, x.first_offset from ferrymq.partitions x
            where x.id >= s.partition_id::bigint and x.id <= s.partition_id::bigint
            order by x.id desc limit 1
        ) p
        where p.next_offset > greatest(c.committed, p.first_offset)
        offset 0
    ) d
), changed as (
    -- One that moved between this statement's snapshot and the lock is not where it was: it is passed over, and whoever moved it wakes whom
    -- he leaves work for.
    update ferrymq.cursors c
    set committed = case when t.auto_ack then t.start_offset + t.take else t.start_offset end,
        lease_id = case when not t.auto_ack then t.lease_id end,
        lease_until = case when not t.auto_ack then clock_timestamp() + t.seconds * interval '1 second' end,
        batch_end = case when not t.auto_ack then t.start_offset + t.take end
    from taken t
    where c.ctid = t.at
    returning t.slot_no, t.partition_id, t.frames, t.seconds, t.public_id, t.name, t.hidden, t.start_offset, t.next_offset, t.take
)
select t.slot_no::int as slot_no, t.partition_id::bigint as partition_id, t.public_id::uuid as public_id, t.name::text as name,
       t.start_offset::bigint as start_offset, t.take::bigint as take, t.next_offset::bigint as next_offset, (t.seconds * 1000::bigint)::bigint as lease_ms,
       t.hidden::boolean as hidden, coalesce(s.only_group, 0)::int as only_group, now()::timestamptz as claimed_at, s.base_offset::bigint as base_offset, s.count::int as count,
       s.key_no::smallint as key_no, s.codec::smallint as codec, s.created_at::timestamptz as created_at, s.first_id::uuid as first_id,
       s.keys::bytea as keys, (case when t.frames then s.frames end)::bytea as frames
from changed t
cross join lateral (
    (select g.base_offset, g.count, g.key_no, g.codec, g.created_at, g.first_id, g.keys, g.frames, g.only_group
     from ferrymq.segments g
     where g.partition_id = t.partition_id and g.base_offset <= t.start_offset
     order by g.base_offset desc limit 1)
    union all
    select g.base_offset, g.count, g.key_no, g.codec, g.created_at, g.first_id, g.keys, g.frames, g.only_group
    from ferrymq.segments g
    where t.take > 1 and g.partition_id = t.partition_id and g.base_offset > t.start_offset and g.base_offset < t.start_offset + t.take
) s
order by t.slot_no, s.base_offset;
