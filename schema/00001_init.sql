-- +goose Up
create schema if not exists ferrymq;

-- hash_seed keys the 128-bit hashes of transaction ids: it must never change once a segment is stored.
create table ferrymq.installation (
    singleton boolean primary key default true check (singleton),
    hash_seed bigint not null default ('x' || left(replace(gen_random_uuid()::text, '-', ''), 16))::bit(64)::bigint,
    created_at timestamptz not null default now()
);
insert into ferrymq.installation default values;

create table ferrymq.projects (
    id int generated always as identity primary key,
    name text collate "C" not null unique,
    created_at timestamptz not null default now()
);
insert into ferrymq.projects (name) values ('default');

-- A deleted queue keeps its row, with deleted_at set, until a job has removed what belongs to it.
create table ferrymq.queues (
    id int generated always as identity primary key,
    public_id uuid not null default gen_random_uuid() unique,
    project_id int not null references ferrymq.projects,
    name text collate "C" not null,
    namespace text collate "C" not null,
    task text collate "C" not null,
    created_at timestamptz not null default clock_timestamp(),
    updated_at timestamptz not null default clock_timestamp(),
    deleted_at timestamptz,
    configured boolean not null default false,
    lease_time int not null default 60 check (lease_time between 1 and 43200),
    retry_limit int not null default 3 check (retry_limit between 0 and 10000),
    retry_delay int not null default 0 check (retry_delay between 0 and 86400000),
    priority int not null default 0,
    max_size bigint not null default 0 check (max_size >= 0),
    ttl int not null default 3600 check (ttl >= 0),
    dead_letter_queue boolean not null default true,
    dlq_after_max_retries boolean not null default true,
    delayed_processing int not null default 0 check (delayed_processing >= 0),
    window_buffer int not null default 0 check (window_buffer >= 0),
    retention_seconds int not null default 0 check (retention_seconds >= 0),
    completed_retention_seconds int not null default 0 check (completed_retention_seconds >= 0),
    retention_enabled boolean not null default false,
    encryption_enabled boolean not null default false,
    max_wait_time_seconds int not null default 0 check (max_wait_time_seconds >= 0),
    min_pop_wait_time int not null default 0 check (min_pop_wait_time between 0 and 60000),
    dedup_window_seconds int not null default 3600 check (dedup_window_seconds >= 0),
    retention_sink_hold text not null default '',
    retention_sink_hold_max_seconds int not null default 604800
);
create unique index queues_name on ferrymq.queues (project_id, name) where deleted_at is null;
create index queues_namespace on ferrymq.queues (project_id, namespace, task) where deleted_at is null;
create index queues_task on ferrymq.queues (project_id, task) where deleted_at is null;
create index queues_updated_at on ferrymq.queues (updated_at);

-- next_offset is the allocator of offsets: its row lock serializes the writers of a partition.
-- Nothing that changes with a push may be indexed here, or updates stop being HOT.
create table ferrymq.partitions (
    id bigint generated always as identity primary key,
    public_id uuid not null unique,
    queue_id int not null references ferrymq.queues,
    hidden boolean not null default false,
    name text collate "C" not null,
    next_offset bigint not null default 0,
    first_offset bigint not null default 0,
    created_at timestamptz not null default clock_timestamp(),
    last_push_at timestamptz,
    unique (queue_id, hidden, name),
    check (first_offset >= 0 and first_offset <= next_offset)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off);
create index partitions_queue on ferrymq.partitions (queue_id, id);

-- Append-only. keys: empty, or 16 bytes a message (zero where the broker minted the id).
create table ferrymq.segments (
    partition_id bigint not null,
    base_offset bigint not null,
    count int not null check (count > 0),
    key_no smallint not null,
    codec smallint not null,
    created_at timestamptz not null,
    first_id uuid not null,
    keys bytea not null,
    frames bytea not null,
    primary key (partition_id, base_offset)
) with (autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off, toast.autovacuum_vacuum_cost_delay = 0, toast.vacuum_truncate = off);
alter table ferrymq.segments alter column frames set storage external, alter column keys set storage external;

-- kind 0: a group of the /api/v1 routes. registered: every partition of the queue has, or gets, a cursor.
-- start_at decides where a partition without a cursor starts; seeded_to is the highest partition id given one so far.
create table ferrymq.groups (
    id int generated always as identity primary key,
    queue_id int not null references ferrymq.queues,
    kind smallint not null default 0,
    name text collate "C" not null,
    registered boolean not null,
    start_mode text not null check (start_mode in ('all', 'new', 'time')),
    start_at timestamptz not null,
    seeded_to bigint not null default 0,
    seeded boolean not null default false,
    created_at timestamptz not null default clock_timestamp(),
    deleted_at timestamptz
);
create unique index groups_name on ferrymq.groups (queue_id, kind, name) where deleted_at is null;
create index groups_by_name on ferrymq.groups (name, id) where deleted_at is null;

-- What a discovery pop asked for, so that a queue that starts to match later is registered with that first time.
-- Empty namespace or task = not asked for.
create table ferrymq.discovery_groups (
    project_id int not null references ferrymq.projects,
    name text collate "C" not null,
    namespace text collate "C" not null,
    task text collate "C" not null,
    start_mode text not null check (start_mode in ('all', 'new', 'time')),
    start_at timestamptz not null,
    primary key (project_id, namespace, task, name)
);

-- One row = cursor, lease and readiness of a (group, partition). committed is the next offset to deliver;
-- the leased batch is [committed, batch_end). pending may be true with nothing to deliver, never the reverse.
create table ferrymq.cursors (
    group_id int not null,
    failures int not null default 0,
    partition_id bigint not null,
    committed bigint not null check (committed >= 0),
    batch_end bigint,
    lease_until timestamptz,
    failed_offset bigint,
    not_before timestamptz,
    lease_id uuid,
    pending boolean not null,
    primary key (group_id, partition_id),
    check (batch_end is null or committed < batch_end),
    check ((lease_id is null) = (batch_end is null) and (lease_id is null) = (lease_until is null)),
    check (lease_id is null or pending)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off);
create index cursors_pending on ferrymq.cursors (group_id, partition_id) where pending and not_before is null;
create index cursors_not_before on ferrymq.cursors (not_before) where not_before is not null;

-- A copy of one message, as a segment of one: it survives the retention of its queue.
create table ferrymq.dead_letters (
    id uuid primary key,
    queue_id int not null,
    group_id int not null,
    partition_id bigint not null,
    message_offset bigint not null,
    message_id uuid not null,
    transaction_id text not null,
    key_no smallint not null,
    codec smallint not null,
    frames bytea not null,
    error_message text not null,
    retry_count int not null,
    message_created_at timestamptz not null,
    failed_at timestamptz not null default clock_timestamp()
);
create index dead_letters_queue on ferrymq.dead_letters (queue_id, failed_at);
create index dead_letters_address on ferrymq.dead_letters (partition_id, failed_at);

-- Only leases of discovery pops, which may span groups: any other lease id carries its group.
create table ferrymq.leases (
    lease_id uuid not null,
    group_id int not null,
    created_at timestamptz not null default clock_timestamp(),
    primary key (lease_id, group_id)
);
create index leases_created_at on ferrymq.leases (created_at);

create table ferrymq.brokers (
    id uuid primary key,
    name text not null,
    started_at timestamptz not null default clock_timestamp(),
    seen_at timestamptz not null default clock_timestamp()
);

-- Work that must be finished by some broker. A worker holds a job until lease_until, fenced by lease_id.
create table ferrymq.jobs (
    id bigint generated always as identity primary key,
    kind text not null check (kind in ('seed', 'delete_queue', 'recheck')),
    queue_id int not null,
    group_id int,
    due_at timestamptz not null default clock_timestamp(),
    lease_id uuid,
    lease_until timestamptz
);
create index jobs_due_at on ferrymq.jobs (due_at);
create index jobs_group on ferrymq.jobs (group_id);
create index jobs_queue on ferrymq.jobs (queue_id);

-- +goose StatementBegin
-- The first offset of a partition whose segment was created at or after t, or the tail.
-- created_at never goes back within a partition, so halving the offset space finds it in ~40 index probes at most.
create function ferrymq.offset_at(partition bigint, t timestamptz) returns bigint language sql stable as $$
    with recursive halve (lo, hi) as (
        select p.first_offset, p.next_offset from ferrymq.partitions p where p.id = partition
        union all
        select case when s.created_at < t then s.base_offset + s.count else h.lo end,
               case when s.created_at < t then h.hi else s.base_offset end
        from halve h
        cross join lateral (
            select g.base_offset, g.count, g.created_at from ferrymq.segments g
            where g.partition_id = partition and g.base_offset <= (h.lo + h.hi) / 2
            order by g.base_offset desc limit 1
        ) s
        where h.lo < h.hi
    )
    select h.hi from halve h where h.lo >= h.hi limit 1
$$;
-- +goose StatementEnd

-- +goose Down
drop schema ferrymq cascade;
