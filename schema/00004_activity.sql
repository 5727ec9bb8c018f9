-- +goose Up
-- What brokers did, per minute and queue. queue_id 0: all queues together, and what belongs to none; it stays when queues go.
-- A broker adds to its own rows only. Nothing that it adds to is indexed.
create table ferrymq.activity (
    bucket timestamptz not null,
    queue_id int not null,
    broker text collate "C" not null,
    push_requests bigint not null,
    push_messages bigint not null,
    pop_requests bigint not null,
    pop_messages bigint not null,
    pop_empty bigint not null,
    ack_requests bigint not null,
    ack_success bigint not null,
    ack_failed bigint not null,
    transactions bigint not null,
    partitions_created bigint not null,
    partitions_deleted bigint not null,
    retention_messages bigint not null,
    completed_retention_messages bigint not null,
    eviction_messages bigint not null,
    retention_events bigint not null,
    dead_letters bigint not null,
    db_errors bigint not null,
    lag_sum_ms bigint not null,
    lag_count bigint not null,
    lag_max_ms bigint not null,
    parked bigint not null,
    primary key (queue_id, bucket, broker)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
create index activity_bucket on ferrymq.activity (bucket);

-- The same for the processes: times are sums over the minute, the rest is as it was last.
create table ferrymq.broker_activity (
    bucket timestamptz not null,
    broker text collate "C" not null,
    wall_ms bigint not null,
    cpu_user_ms bigint not null,
    cpu_sys_ms bigint not null,
    rss_bytes bigint not null,
    pool_active int not null,
    pool_idle int not null,
    pool_size int not null,
    uptime_seconds bigint not null,
    primary key (bucket, broker)
) with (fillfactor = 70);

-- +goose Down
drop table ferrymq.broker_activity;
drop table ferrymq.activity;
