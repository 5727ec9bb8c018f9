-- +goose Up
-- What of a queue's messages becomes due first, seconds after they were stored; null: no rule, nothing is ever removed.
-- remind_at: when to look whether consumed data piles up there all the same.
alter table ferrymq.queues
    add column retain_seconds int generated always as (least(
        case when retention_enabled then nullif(retention_seconds, 0) end,
        case when retention_enabled then nullif(completed_retention_seconds, 0) end,
        nullif(max_wait_time_seconds, 0))) stored,
    add column remind_at timestamptz not null default clock_timestamp() + interval '1 hour';
create index queues_remind_at on ferrymq.queues (remind_at) where deleted_at is null and retain_seconds is null;

-- expire_at: when the oldest segment may be due; null: never. A push sets it only where it is null or later, so it changes
-- when a partition turns from nothing due to something due, and not with every push.
-- first_offset: the oldest message that exists for readers. swept_offset: below it the rows are gone too.
-- empty_since: set when the last message is removed, and not touched by pushes: what is looked at for cleanup.
alter table ferrymq.partitions
    add column expire_at timestamptz,
    add column swept_offset bigint not null default 0,
    add column empty_since timestamptz,
    add check (swept_offset <= first_offset);
update ferrymq.partitions p set expire_at = clock_timestamp()
from ferrymq.queues q where q.id = p.queue_id and q.retain_seconds is not null and p.next_offset > 0;
update ferrymq.partitions p set empty_since = clock_timestamp() where p.next_offset = p.first_offset;
create index partitions_expire_at on ferrymq.partitions (expire_at) where expire_at is not null;
create index partitions_unswept on ferrymq.partitions (id) where swept_offset < first_offset;
create index partitions_empty_since on ferrymq.partitions (empty_since) where empty_since is not null;

-- The ids of removed segments that are younger than the deduplication window of their queue.
create table ferrymq.retired_keys (
    partition_id bigint not null,
    base_offset bigint not null,
    count int not null,
    created_at timestamptz not null,
    expires_at timestamptz not null,
    first_id uuid not null,
    keys bytea not null,
    primary key (partition_id, base_offset)
) with (autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off, toast.autovacuum_vacuum_cost_delay = 0, toast.vacuum_truncate = off);
create index retired_keys_expires_at on ferrymq.retired_keys (expires_at);

-- What one broker at a time does for all: a sweep begins when it is due, 'rows' is held while rows are removed.
create table ferrymq.sweeps (
    name text primary key,
    due_at timestamptz not null default clock_timestamp()
);
insert into ferrymq.sweeps (name) values ('retention'), ('rows');

alter table ferrymq.jobs drop constraint jobs_kind_check;
alter table ferrymq.jobs add constraint jobs_kind_check check (kind in ('seed', 'delete_queue', 'recheck', 'delete_group', 'retention'));

-- +goose StatementBegin
-- The first offset of [low, high) whose segment was created at or after t, or high. Rows at the low end may be missing.
create function ferrymq.offset_between(partition bigint, low bigint, high bigint, t timestamptz) returns bigint language sql stable as $$
    with recursive halve (lo, hi) as (
        select low, high
        union all
        select case when s.created_at >= t then h.lo else greatest(s.base_offset + s.count, (h.lo + h.hi) / 2 + 1) end,
               case when s.created_at >= t then greatest(s.base_offset, h.lo) else h.hi end
        from halve h
        left join lateral (
            select g.base_offset, g.count, g.created_at from ferrymq.segments g
            where g.partition_id = partition and g.base_offset <= (h.lo + h.hi) / 2
            order by g.base_offset desc limit 1
        ) s on true
        where h.lo < h.hi
    )
    select h.hi from halve h where h.lo >= h.hi limit 1
$$;
-- +goose StatementEnd

-- +goose Down
drop function ferrymq.offset_between(bigint, bigint, bigint, timestamptz);
delete from ferrymq.jobs where kind = 'retention';
alter table ferrymq.jobs drop constraint jobs_kind_check;
alter table ferrymq.jobs add constraint jobs_kind_check check (kind in ('seed', 'delete_queue', 'recheck', 'delete_group'));
drop table ferrymq.sweeps, ferrymq.retired_keys;
alter table ferrymq.partitions drop column expire_at, drop column swept_offset, drop column empty_since;
alter table ferrymq.queues drop column retain_seconds, drop column remind_at;
