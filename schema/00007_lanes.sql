-- +goose Up

-- A stream is a queue, a key a partition. Messages without a key go to one of unkeyed_lanes hidden partitions. Those of them that bring
-- an id go by it to one of id_lanes, which never changes: a repeat must meet its original.
alter table ferrymq.queues
    add column unkeyed_lanes int not null default 256 check (unkeyed_lanes between 1 and 65536),
    add column id_lanes int not null default 256 check (id_lanes between 1 and 65536);
alter table ferrymq.installation add column secret uuid not null default gen_random_uuid();

-- kind 1: a subscription of the /v1 routes, its name unique in its project. A lane is its cursor on one partition:
-- one message at a time. In milliseconds: backoff_initial, backoff_max.
alter table ferrymq.groups
    add column project_id int,
    add column lease_seconds int not null default 30 check (lease_seconds between 1 and 43200),
    add column max_attempts int not null default 10 check (max_attempts >= 0),
    add column backoff_initial bigint not null default 1000 check (backoff_initial >= 0),
    add column backoff_multiplier double precision not null default 2 check (backoff_multiplier between 1 and 100),
    add column backoff_max bigint not null default 600000 check (backoff_max >= 0),
    add column count_expired_leases boolean not null default true,
    add column max_in_flight int not null default 0 check (max_in_flight >= 0),
    add column paused boolean not null default false,
    add column trace_full boolean not null default false,
    add column updated_at timestamptz not null default clock_timestamp(),
    add check (kind in (0, 1) and (kind = 0) = (project_id is null));
create unique index groups_subscription on ferrymq.groups (project_id, name) where kind = 1 and deleted_at is null;

-- Of lanes only. attempts: deliveries of the head that count. consumer, leased_at: who has it, or had it last.
-- settled: the last lease that was settled, to tell a repeated settle from a lost lease.
alter table ferrymq.cursors
    add column attempts int not null default 0 check (attempts >= 0),
    add column leased_at timestamptz,
    add column settled uuid,
    add column consumer text;

-- Live leases of subscriptions with max_in_flight, and of no others: what is held against it must be counted exactly.
create table ferrymq.in_flight (
    group_id int not null,
    partition_id bigint not null,
    lease_until timestamptz not null,
    primary key (group_id, partition_id)
);

-- What happened to messages in lanes, for traces and for the last error of a lane. kind 0: delivered (only of subscriptions that
-- trace in full), 1: failed, 2: acked (the same), 3: dead-lettered.
create table ferrymq.lane_events (
    group_id int not null,
    partition_id bigint not null,
    message_offset bigint not null,
    kind smallint not null,
    attempt int not null,
    at timestamptz not null,
    consumer text,
    error text
);
create index lane_events_address on ferrymq.lane_events (partition_id, message_offset, group_id, at);
create index lane_events_at on ferrymq.lane_events (at);

-- signature groups the dead letters of lanes by their errors.
alter table ferrymq.dead_letters
    add column signature text collate "C",
    add column first_failed_at timestamptz,
    add column consumer text;
create index dead_letters_signature on ferrymq.dead_letters (group_id, signature, failed_at) where signature is not null;

-- A message that was put back for one group: every other one passes over it. Null: for all.
alter table ferrymq.segments add column only_group int;

-- +goose Down
delete from ferrymq.cursors c using ferrymq.groups g where g.kind = 1 and c.group_id = g.id;
delete from ferrymq.dead_letters d using ferrymq.groups g where g.kind = 1 and d.group_id = g.id;
delete from ferrymq.groups where kind = 1;
alter table ferrymq.segments drop column only_group;
drop index ferrymq.dead_letters_signature;
alter table ferrymq.dead_letters drop column signature, drop column first_failed_at, drop column consumer;
drop table ferrymq.lane_events, ferrymq.in_flight;
alter table ferrymq.cursors drop column attempts, drop column leased_at, drop column settled, drop column consumer;
alter table ferrymq.groups drop column project_id, drop column lease_seconds, drop column max_attempts, drop column backoff_initial,
    drop column backoff_multiplier, drop column backoff_max, drop column count_expired_leases, drop column max_in_flight, drop column paused,
    drop column trace_full, drop column updated_at;
alter table ferrymq.installation drop column secret;
alter table ferrymq.queues drop column unkeyed_lanes, drop column id_lanes;
