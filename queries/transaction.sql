-- Dead letters that come back, and messages that become dead letters by hand.

-- name: DeadLetterNewest :one
-- The newest dead letter of a message, of whatever group; those of subscriptions are not for these routes.
select d.id, q.name as queue, p.name as partition, p.public_id, d.consumer_group::text as consumer_group, d.transaction_id
from ferrymq.partitions p
join ferrymq.queues q on q.id = p.queue_id and q.deleted_at is null and q.project_id = @project_id::int
cross join lateral (
    select x.id, x.transaction_id, coalesce(g.name, '') as consumer_group
    from ferrymq.dead_letters x
    left join ferrymq.groups g on g.id = x.group_id
    where x.partition_id = p.id and x.transaction_id = @transaction_id::text and coalesce(g.kind, 0) = 0
    order by x.failed_at desc, x.id desc
    limit 1
) d
where p.public_id = @public_id::uuid;

-- name: DeadLetterGet :one
select d.id, q.name as queue, p.name as partition, p.public_id, coalesce(g.name, '')::text as consumer_group, d.transaction_id
from ferrymq.dead_letters d
join ferrymq.partitions p on p.id = d.partition_id
join ferrymq.queues q on q.id = p.queue_id and q.deleted_at is null and q.project_id = @project_id::int
left join ferrymq.groups g on g.id = d.group_id
where d.id = @id::uuid and coalesce(g.kind, 0) = 0;

-- name: DeadLetterTake :one
-- Of many who want it one gets it, the others wait for that transaction and then get none.
delete from ferrymq.dead_letters d
using ferrymq.queues q
where d.id = @id::uuid and q.id = d.queue_id and q.deleted_at is null
returning d.message_id, d.key_no, d.codec, d.frames;

-- name: CursorLock :one
select c.committed, c.failed_offset, c.failures
from ferrymq.cursors c
where c.group_id = @group_id::int and c.partition_id = @partition_id::bigint
for no key update;

-- name: DeadLetterHead :one
-- Files the dead letter of the message at the head of a cursor and moves the cursor past it (committed), which ends a live lease.
-- Needs LockPartitions and CursorLock in earlier statements of the same transaction: nothing is pushed between this look at
-- the tail and the commit, so pending is exact. No row: the queue is gone.
with moved as (
    update ferrymq.cursors c
    set committed = @committed::bigint, batch_end = null, lease_id = null, lease_until = null,
        failed_offset = case when c.failed_offset >= @committed::bigint then c.failed_offset end,
        failures = case when c.failed_offset >= @committed::bigint then c.failures else 0 end,
        not_before = case when c.failed_offset >= @committed::bigint then c.not_before end,
        pending = p.next_offset > @committed::bigint
    from ferrymq.partitions p
    join ferrymq.queues q on q.id = p.queue_id and q.deleted_at is null
    where c.group_id = @group_id::int and c.partition_id = @partition_id::bigint and p.id = c.partition_id
    returning c.group_id, c.partition_id, p.queue_id, c.pending
), filed as (
    insert into ferrymq.dead_letters (id, queue_id, group_id, partition_id, message_offset, message_id, transaction_id, key_no, codec, frames,
                                      error_message, retry_count, message_created_at)
    select @id::uuid, m.queue_id, m.group_id, m.partition_id, @message_offset::bigint, @message_id::uuid, @transaction_id::text, @key_no::smallint, @codec::smallint,
           @frames::bytea, @error_message::text, @retry_count::int, @message_created_at::timestamptz
    from moved m
)
select m.pending from moved m;
