-- +goose Up
-- Ways to look at dead letters: all of them, those of a group, those of an address, those of a stretch of offsets.
create index dead_letters_failed_at on ferrymq.dead_letters (failed_at, id);
create index dead_letters_group on ferrymq.dead_letters (group_id, failed_at);
create index dead_letters_transaction on ferrymq.dead_letters (partition_id, transaction_id, failed_at);
create index dead_letters_offset on ferrymq.dead_letters (partition_id, message_offset, failed_at);
-- Deleted groups: their dead letters keep the name.
create index groups_deleted on ferrymq.groups (name) where deleted_at is not null;

-- What consumers report about messages, which need not exist. data is kept as it was sent, to the byte.
-- The names of queue and partition are those at that moment: a trace outlives both.
create table ferrymq.traces (
    id uuid primary key,
    partition_id uuid not null,
    transaction_id text collate "C" not null,
    consumer_group text collate "C" not null,
    event_type text not null,
    data bytea not null,
    names text[] not null,
    queue_name text,
    partition_name text,
    created_at timestamptz not null
);
create index traces_address on ferrymq.traces (partition_id, transaction_id, created_at, id);
create index traces_created_at on ferrymq.traces (created_at);

create table ferrymq.trace_names (
    name text collate "C" not null,
    created_at timestamptz not null,
    trace_id uuid not null,
    partition_id uuid not null,
    transaction_id text collate "C" not null,
    primary key (name, created_at, trace_id)
);
create index trace_names_created_at on ferrymq.trace_names (created_at, name);

-- +goose Down
drop table ferrymq.trace_names;
drop table ferrymq.traces;
drop index ferrymq.groups_deleted;
drop index ferrymq.dead_letters_offset;
drop index ferrymq.dead_letters_transaction;
drop index ferrymq.dead_letters_group;
drop index ferrymq.dead_letters_failed_at;
