-- +goose Up
-- The maintenance switches. version counts the changes: what a broker knows is never replaced by something older.
create table ferrymq.system (
    singleton boolean primary key default true check (singleton),
    push_maintenance boolean not null default false,
    pop_maintenance boolean not null default false,
    version bigint not null default 0,
    changed_at timestamptz not null default clock_timestamp()
);
insert into ferrymq.system default values;

-- +goose Down
drop table ferrymq.system;
