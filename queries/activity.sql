-- name: ActivityAdd :exec
-- What a broker counted since it last wrote, added to the current minute.
with process as (
    insert into ferrymq.broker_activity as b (bucket, broker, wall_ms, cpu_user_ms, cpu_sys_ms, rss_bytes, pool_active, pool_idle, pool_size, uptime_seconds)
    values (date_trunc('minute', clock_timestamp()), @broker::text, @wall_ms::bigint, @cpu_user_ms::bigint, @cpu_sys_ms::bigint, @rss_bytes::bigint,
            @pool_active::int, @pool_idle::int, @pool_size::int, @uptime_seconds::bigint)
    on conflict (bucket, broker) do update
    set wall_ms = b.wall_ms + excluded.wall_ms, cpu_user_ms = b.cpu_user_ms + excluded.cpu_user_ms, cpu_sys_ms = b.cpu_sys_ms + excluded.cpu_sys_ms,
        rss_bytes = excluded.rss_bytes, pool_active = excluded.pool_active, pool_idle = excluded.pool_idle, pool_size = excluded.pool_size,
        uptime_seconds = excluded.uptime_seconds
    returning b.bucket
)
insert into ferrymq.activity as a (bucket, queue_id, broker,
    push_requests, push_messages, pop_requests, pop_messages, pop_empty, ack_requests, ack_success, ack_failed, transactions, partitions_created,
    partitions_deleted, retention_messages, completed_retention_messages, eviction_messages, retention_events, dead_letters, db_errors, lag_sum_ms,
    lag_count, lag_max_ms, parked)
select p.bucket, t.queue_id::int, @broker::text,
    t.push_requests::bigint, t.push_messages::bigint, t.pop_requests::bigint, t.pop_messages::bigint, t.pop_empty::bigint, t.ack_requests::bigint,
    t.ack_success::bigint, t.ack_failed::bigint, t.transactions::bigint, t.partitions_created::bigint, t.partitions_deleted::bigint,
    t.retention_messages::bigint, t.completed_retention_messages::bigint, t.eviction_messages::bigint, t.retention_events::bigint,
    t.dead_letters::bigint, t.db_errors::bigint, t.lag_sum_ms::bigint, t.lag_count::bigint, t.lag_max_ms::bigint, t.parked::bigint
from process p
cross join rows from (unnest(@queue_ids::int[]),
    unnest(@push_requests::bigint[]), unnest(@push_messages::bigint[]), unnest(@pop_requests::bigint[]), unnest(@pop_messages::bigint[]),
    unnest(@pop_empty::bigint[]), unnest(@ack_requests::bigint[]), unnest(@ack_success::bigint[]), unnest(@ack_failed::bigint[]),
    unnest(@transactions::bigint[]), unnest(@partitions_created::bigint[]), unnest(@partitions_deleted::bigint[]),
    unnest(@retention_messages::bigint[]), unnest(@completed_retention_messages::bigint[]), unnest(@eviction_messages::bigint[]),
    unnest(@retention_events::bigint[]), unnest(@dead_letters::bigint[]), unnest(@db_errors::bigint[]), unnest(@lag_sum_ms::bigint[]),
    unnest(@lag_count::bigint[]), unnest(@lag_max_ms::bigint[]), unnest(@parked::bigint[]))
    as t (queue_id,
    push_requests, push_messages, pop_requests, pop_messages, pop_empty, ack_requests, ack_success, ack_failed, transactions, partitions_created,
    partitions_deleted, retention_messages, completed_retention_messages, eviction_messages, retention_events, dead_letters, db_errors, lag_sum_ms,
    lag_count, lag_max_ms, parked)
order by t.queue_id
on conflict (queue_id, bucket, broker) do update
set push_requests = a.push_requests + excluded.push_requests, push_messages = a.push_messages + excluded.push_messages,
    pop_requests = a.pop_requests + excluded.pop_requests, pop_messages = a.pop_messages + excluded.pop_messages, pop_empty = a.pop_empty + excluded.pop_empty,
    ack_requests = a.ack_requests + excluded.ack_requests, ack_success = a.ack_success + excluded.ack_success, ack_failed = a.ack_failed + excluded.ack_failed,
    transactions = a.transactions + excluded.transactions, partitions_created = a.partitions_created + excluded.partitions_created,
    partitions_deleted = a.partitions_deleted + excluded.partitions_deleted, retention_messages = a.retention_messages + excluded.retention_messages,
    completed_retention_messages = a.completed_retention_messages + excluded.completed_retention_messages,
    eviction_messages = a.eviction_messages + excluded.eviction_messages, retention_events = a.retention_events + excluded.retention_events,
    dead_letters = a.dead_letters + excluded.dead_letters, db_errors = a.db_errors + excluded.db_errors,
    lag_sum_ms = a.lag_sum_ms + excluded.lag_sum_ms, lag_count = a.lag_count + excluded.lag_count,
    lag_max_ms = greatest(a.lag_max_ms, excluded.lag_max_ms), parked = greatest(a.parked, excluded.parked);

-- name: ActivityExpire :execrows
delete from ferrymq.activity a
where a.ctid = any(array(
    select x.ctid from ferrymq.activity x
    where x.bucket < statement_timestamp() - interval '7 days'
    order by x.bucket
    limit @max::bigint
    for update skip locked));

-- name: BrokerActivityExpire :execrows
delete from ferrymq.broker_activity a
where a.ctid = any(array(
    select x.ctid from ferrymq.broker_activity x
    where x.bucket < statement_timestamp() - interval '7 days'
    order by x.bucket
    limit @max::bigint
    for update skip locked));

-- name: ActivityQueues :many
-- The live queues that a filter leaves; empty texts filter nothing.
select q.id, q.name from ferrymq.queues q
where q.project_id = @project_id::int and q.deleted_at is null
  and (@name::text = '' or q.name = @name::text)
  and (@namespace::text = '' or q.namespace = @namespace::text)
  and (@task::text = '' or q.task = @task::text)
order by q.id;

-- name: ActivitySeries :many
-- The minutes between after and before, in steps of so many, over all brokers, newest first. queue_ids {0}: everything together.
-- Lateral: the planner must not expect so much of it that it reads the table.
select date_bin(make_interval(mins => @minutes::int), a.bucket, '2000-01-01T00:00:00Z')::timestamptz as at,
    sum(a.push_requests)::bigint as push_requests, sum(a.push_messages)::bigint as push_messages, sum(a.pop_requests)::bigint as pop_requests,
    sum(a.pop_messages)::bigint as pop_messages, sum(a.pop_empty)::bigint as pop_empty, sum(a.ack_requests)::bigint as ack_requests,
    sum(a.ack_success)::bigint as ack_success, sum(a.ack_failed)::bigint as ack_failed, sum(a.transactions)::bigint as transactions,
    sum(a.retention_messages)::bigint as retention_messages, sum(a.completed_retention_messages)::bigint as completed_retention_messages,
    sum(a.eviction_messages)::bigint as eviction_messages, sum(a.retention_events)::bigint as retention_events,
    sum(a.dead_letters)::bigint as dead_letters, sum(a.db_errors)::bigint as db_errors,
    sum(a.lag_sum_ms)::bigint as lag_sum_ms, sum(a.lag_count)::bigint as lag_count, max(a.lag_max_ms)::bigint as lag_max_ms
from unnest(@queue_ids::int[]) as t (queue_id)
cross join lateral (
    select x.* from ferrymq.activity x
    where x.queue_id = t.queue_id::int and x.bucket > @after::timestamptz and x.bucket < @before::timestamptz
    offset 0
) a
group by 1
order by 1 desc
limit @max::bigint;

-- name: ActivityByQueue :many
-- The same for each queue, newest first. parked: the brokers of a minute together, the highest such minute of a step.
select m.at::timestamptz as at, m.name::text as name,
    sum(m.push_requests)::bigint as push_requests, sum(m.push_messages)::bigint as push_messages, sum(m.pop_messages)::bigint as pop_messages,
    sum(m.pop_empty)::bigint as pop_empty, sum(m.ack_requests)::bigint as ack_requests, sum(m.ack_success)::bigint as ack_success,
    sum(m.ack_failed)::bigint as ack_failed, sum(m.transactions)::bigint as transactions, sum(m.partitions_created)::bigint as partitions_created,
    sum(m.partitions_deleted)::bigint as partitions_deleted, sum(m.lag_sum_ms)::bigint as lag_sum_ms, sum(m.lag_count)::bigint as lag_count,
    max(m.lag_max_ms)::bigint as lag_max_ms, max(m.parked)::bigint as parked
from (
    select date_bin(make_interval(mins => @minutes::int), a.bucket, '2000-01-01T00:00:00Z') as at, q.name,
        sum(a.push_requests) as push_requests, sum(a.push_messages) as push_messages, sum(a.pop_messages) as pop_messages, sum(a.pop_empty) as pop_empty,
        sum(a.ack_requests) as ack_requests, sum(a.ack_success) as ack_success, sum(a.ack_failed) as ack_failed, sum(a.transactions) as transactions,
        sum(a.partitions_created) as partitions_created, sum(a.partitions_deleted) as partitions_deleted, sum(a.lag_sum_ms) as lag_sum_ms,
        sum(a.lag_count) as lag_count, max(a.lag_max_ms) as lag_max_ms, sum(a.parked) as parked
    from ferrymq.queues q
    cross join lateral (
        select x.* from ferrymq.activity x
        where x.queue_id = q.id and x.bucket > @after::timestamptz and x.bucket < @before::timestamptz
        offset 0
    ) a
    where q.project_id = @project_id::int and q.deleted_at is null
      and (@name::text = '' or q.name = @name::text)
      and (@namespace::text = '' or q.namespace = @namespace::text)
      and (@task::text = '' or q.task = @task::text)
    group by a.bucket, q.name
) m
group by m.at, m.name
order by m.at desc, m.name
limit @max::bigint;

-- name: ActivityParked :many
select date_bin(make_interval(mins => @minutes::int), a.bucket, '2000-01-01T00:00:00Z')::timestamptz as at, q.name, a.broker, max(a.parked)::bigint as parked
from ferrymq.queues q
cross join lateral (
    select x.bucket, x.broker, x.parked from ferrymq.activity x
    where x.queue_id = q.id and x.bucket > @after::timestamptz and x.bucket < @before::timestamptz and x.parked > 0
    offset 0
) a
where q.project_id = @project_id::int and q.deleted_at is null
  and (@name::text = '' or q.name = @name::text)
  and (@namespace::text = '' or q.namespace = @namespace::text)
  and (@task::text = '' or q.task = @task::text)
group by 1, q.name, a.broker
order by 1 desc, q.name, a.broker
limit @max::bigint;

-- name: ActivityBrokers :many
-- What each broker did in a range of minutes.
select a.broker, sum(a.push_messages)::bigint as push_messages, sum(a.pop_messages)::bigint as pop_messages,
    sum(a.ack_success)::bigint as ack_success, sum(a.ack_failed)::bigint as ack_failed, sum(a.db_errors)::bigint as db_errors, sum(a.dead_letters)::bigint as dead_letters
from ferrymq.activity a
where a.queue_id = 0 and a.bucket > @after::timestamptz and a.bucket < @before::timestamptz
group by a.broker
order by a.broker;

-- name: BrokerActivitySeries :many
-- The processes in a range of minutes, oldest first: in steps of so many, of each broker. An empty broker means all.
select date_bin(make_interval(mins => @minutes::int), b.bucket, '2000-01-01T00:00:00Z')::timestamptz as at, b.broker, b.bucket,
    b.wall_ms, b.cpu_user_ms, b.cpu_sys_ms, b.rss_bytes, b.pool_active, b.pool_idle, b.pool_size, b.uptime_seconds
from ferrymq.broker_activity b
where b.bucket > @after::timestamptz and b.bucket < @before::timestamptz and (@broker::text = '' or b.broker = @broker::text)
order by b.bucket, b.broker;

-- name: QueueGauges :many
-- The backlog of queues, as ferrymq.backlog counts it, and their dead letters.
with behind as materialized (
    select x.queue_id, sum(x.pending) as pending
    from (select b.queue_id::int as queue_id, b.pending::bigint as pending from ferrymq.backlog(@ids::int[], null) b) x
    group by x.queue_id
)
select l.id::int as id, coalesce(b.pending, 0)::bigint as pending, d.dead_letters::bigint as dead_letters
from unnest(@ids::int[]) as l (id)
left join behind b on b.queue_id = l.id
cross join lateral (select count(*) as dead_letters from ferrymq.dead_letters x where x.queue_id = l.id offset 0) d;

-- name: SubscriptionGauges :many
-- What the subscriptions of a project have before them, those with the most first: of each, the first hundred thousand lanes that
-- are not drained. Beyond ten thousand of them in all the age is that of an even sample.
with subs as materialized (
    select g.id, g.name, q.name as queue
    from ferrymq.groups g
    cross join lateral (select x.name from ferrymq.queues x where x.id = g.queue_id and x.deleted_at is null offset 0) q
    where g.project_id = @project_id::int and g.kind = 1 and g.deleted_at is null
), opened as materialized (
    select s.id, c.partition_id, c.committed, c.attempts, c.retrying
    from subs s
    cross join lateral (
        select k.partition_id, k.committed, k.attempts, false as retrying
        from ferrymq.cursors k where k.group_id = s.id and k.pending and k.not_before is null
        union all
        select k.partition_id, k.committed, k.attempts, k.attempts > 0 from ferrymq.cursors k where k.group_id = s.id and k.not_before is not null
        limit 100000
    ) c
), lanes as materialized (
    select o.id, o.partition_id, o.attempts, o.retrying, p.head, p.tail - p.head as messages
    from opened o
    cross join lateral (
        select greatest(o.committed, x.first_offset) as head, x.next_offset as tail from ferrymq.partitions x where x.id = o.partition_id offset 0
    ) p
    where p.tail > p.head
), ages as materialized (
    select l.id, greatest(extract(epoch from clock_timestamp() - min(s.created_at)), 0)::float8 as oldest
    from lanes l
    cross join lateral (
        select x.created_at from ferrymq.segments x
        where x.partition_id = l.partition_id and x.base_offset <= l.head
        order by x.base_offset desc
        limit 1
    ) s
    where l.partition_id % (1 + (select count(*) from lanes) / 10000) = 0
    group by l.id
), sums as materialized (
    select l.id, sum(l.messages) as messages, count(*) filter (where l.retrying) as retrying, max(l.attempts) as attempts from lanes l group by l.id
)
select s.queue, s.name, coalesce(n.messages, 0)::bigint as messages, coalesce(n.retrying, 0)::bigint as retrying,
       coalesce(n.attempts, 0)::bigint as attempts, coalesce(a.oldest, 0)::float8 as oldest
from subs s
left join sums n on n.id = s.id
left join ages a on a.id = s.id
order by n.messages desc nulls last, s.name
limit @max::bigint;

-- name: StatusLeases :one
-- The live leases of the queues that a filter leaves.
select count(distinct l.lease_id)::bigint as active, count(l.lease_id)::bigint as partitions, coalesce(sum(l.batch_end - l.committed), 0)::bigint as messages
from ferrymq.queues q
join ferrymq.groups g on g.queue_id = q.id and g.deleted_at is null
cross join lateral (
    select c.lease_id, c.batch_end, c.committed from ferrymq.cursors c
    where c.group_id = g.id and c.pending and c.not_before is null and c.lease_until > clock_timestamp()
    offset 0
) l
where q.project_id = @project_id::int and q.deleted_at is null
  and (@name::text = '' or q.name = @name::text)
  and (@namespace::text = '' or q.namespace = @namespace::text)
  and (@task::text = '' or q.task = @task::text);

-- name: StatusDeadLetters :one
select coalesce(sum(d.messages), 0)::bigint as messages, coalesce(sum(d.partitions), 0)::bigint as partitions
from ferrymq.queues q
cross join lateral (
    select count(*) as messages, count(distinct x.partition_id) as partitions from ferrymq.dead_letters x where x.queue_id = q.id
) d
where q.project_id = @project_id::int and q.deleted_at is null
  and (@name::text = '' or q.name = @name::text)
  and (@namespace::text = '' or q.namespace = @namespace::text)
  and (@task::text = '' or q.task = @task::text);

-- name: StatusDeadLetterErrors :many
-- The most frequent errors among the newest thousand dead letters of each queue.
select d.error_message as error, count(*)::bigint as messages
from ferrymq.queues q
cross join lateral (
    select x.error_message from ferrymq.dead_letters x where x.queue_id = q.id order by x.failed_at desc limit 1000
) d
where q.project_id = @project_id::int and q.deleted_at is null
  and (@name::text = '' or q.name = @name::text)
  and (@namespace::text = '' or q.namespace = @namespace::text)
  and (@task::text = '' or q.task = @task::text)
group by d.error_message
order by 2 desc, 1
limit 10;

-- name: PostgresDatabase :one
select d.datname::text as name, coalesce(d.blks_read, 0)::bigint as blks_read, coalesce(d.blks_hit, 0)::bigint as blks_hit,
    clock_timestamp()::timestamptz as now, current_setting('shared_buffers')::text as shared_buffers,
    pg_size_bytes(current_setting('shared_buffers'))::bigint as shared_buffers_bytes, current_setting('effective_cache_size')::text as effective_cache_size,
    current_setting('work_mem')::text as work_mem
from pg_catalog.pg_stat_database d
where d.datname = current_database();

-- name: PostgresTables :many
select t.relname::text as name, coalesce(io.heap_blks_read, 0)::bigint as heap_read, coalesce(io.heap_blks_hit, 0)::bigint as heap_hit,
    coalesce(t.n_live_tup, 0)::bigint as live, coalesce(t.n_dead_tup, 0)::bigint as dead, coalesce(t.n_tup_upd, 0)::bigint as updates,
    coalesce(t.n_tup_hot_upd, 0)::bigint as hot_updates, t.last_vacuum, t.last_autovacuum, coalesce(t.autovacuum_count, 0)::bigint as autovacuum_count,
    coalesce(t.autoanalyze_count, 0)::bigint as autoanalyze_count, coalesce(pg_total_relation_size(t.relid), 0)::bigint as total_bytes,
    coalesce(pg_table_size(t.relid), 0)::bigint as table_bytes, coalesce(pg_indexes_size(t.relid), 0)::bigint as index_bytes
from pg_catalog.pg_stat_user_tables t
join pg_catalog.pg_statio_user_tables io on io.relid = t.relid
where t.schemaname = 'ferrymq'
order by t.relname;

-- name: PostgresIndexes :many
select i.relname::text as table_name, i.indexrelname::text as name, coalesce(i.idx_blks_read, 0)::bigint as blks_read, coalesce(i.idx_blks_hit, 0)::bigint as blks_hit
from pg_catalog.pg_statio_user_indexes i
where i.schemaname = 'ferrymq'
order by i.idx_blks_read desc, i.indexrelname;

-- name: PostgresActive :many
-- What has been running in this database for longer than a second. Not its text: that stays in the database.
select a.pid::int as pid, extract(epoch from clock_timestamp() - a.query_start)::float8 as seconds, coalesce(a.state, '')::text as state,
    a.wait_event_type, a.wait_event
from pg_catalog.pg_stat_activity a
where a.datname = current_database() and a.pid <> pg_backend_pid() and a.state <> 'idle' and a.query_start < clock_timestamp() - interval '1 second'
order by a.query_start
limit 20;
