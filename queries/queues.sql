-- name: QueueGet :one
select q.* from ferrymq.queues q
where q.project_id = @project_id::int and q.name = @name::text and q.deleted_at is null;

-- name: QueueChangedSince :many
-- For the caches of other brokers: which queues changed lately, deleted ones too.
select q.id, q.project_id, q.name from ferrymq.queues q
where q.updated_at > statement_timestamp() - make_interval(secs => @seconds::int)
order by q.updated_at;

-- name: QueueCreate :one
-- Returns no row when the queue exists already, or the project was deleted.
insert into ferrymq.queues as q (project_id, name, namespace, task, retention_enabled, completed_retention_seconds, unkeyed_lanes, id_lanes)
select p.id, @name::text, @namespace::text, @task::text, @keep_consumed::int > 0, @keep_consumed::int, @unkeyed_lanes::int, @unkeyed_lanes::int
from ferrymq.projects p
where p.id = @project_id::int and p.deleted_at is null
for share
on conflict (project_id, name) where deleted_at is null do nothing
returning q.*;

-- name: QueueLock :one
-- Waits for creators of partitions, who hold the row through their foreign key, later ones see what this transaction wrote.
select q.id from ferrymq.queues q
where q.id = @id::int and q.deleted_at is null
for update;

-- name: QueueRead :one
select q.* from ferrymq.queues q
where q.id = @id::int and q.deleted_at is null;

-- name: QueueConfigure :one
update ferrymq.queues q
set updated_at = clock_timestamp(), configured = true,
    namespace = @namespace::text, task = @task::text,
    lease_time = @lease_time::int, retry_limit = @retry_limit::int, retry_delay = @retry_delay::int, priority = @priority::int,
    max_size = @max_size::bigint, ttl = @ttl::int, dead_letter_queue = @dead_letter_queue::boolean,
    dlq_after_max_retries = @dlq_after_max_retries::boolean, delayed_processing = @delayed_processing::int,
    window_buffer = @window_buffer::int, retention_seconds = @retention_seconds::int,
    completed_retention_seconds = @completed_retention_seconds::int, retention_enabled = @retention_enabled::boolean,
    encryption_enabled = @encryption_enabled::boolean, max_wait_time_seconds = @max_wait_time_seconds::int,
    min_pop_wait_time = @min_pop_wait_time::int, dedup_window_seconds = @dedup_window_seconds::int,
    retention_sink_hold = @retention_sink_hold::text, retention_sink_hold_max_seconds = @retention_sink_hold_max_seconds::int,
    unkeyed_lanes = @unkeyed_lanes::int
where q.id = @id::int
returning *;

-- name: QueueTouch :exec
-- What belongs to the queue has changed: other brokers read it again.
update ferrymq.queues q set updated_at = clock_timestamp() where q.id = @id::int;

-- name: QueueDelete :execrows
-- The row stays until a job has removed what belongs to it, the name is free at once.
update ferrymq.queues q
set deleted_at = clock_timestamp(), updated_at = clock_timestamp()
where q.id = @id::int and q.deleted_at is null;

-- name: QueuePendingCount :one
-- The backlog that maxSize is held against.
select coalesce(sum(b.pending), 0)::bigint as pending from ferrymq.backlog(array[@queue_id::int], null) b;

-- name: ProjectGet :one
select p.id from ferrymq.projects p where p.name = @name::text and p.deleted_at is null;

-- name: InstallationGet :one
select i.hash_seed, i.secret, clock_timestamp()::timestamptz as now from ferrymq.installation i;
