-- +goose Up
-- What went through queues and groups, per minute, for the console: of all projects, both APIs and all brokers together. It is kept for two
-- hours. group_id 0: what was pushed to the queue. queue_id 0: the sums of a project, whose id is then in group_id.
-- pushed, delivered, done, failed and dead are messages; done: consumed, failed: attempts that were not the last, dead: dead letters filed.
create table ferrymq.flow (
    bucket timestamptz not null,
    queue_id int not null,
    group_id int not null,
    pushed bigint not null,
    delivered bigint not null,
    done bigint not null,
    failed bigint not null,
    dead bigint not null,
    primary key (queue_id, group_id, bucket)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
create index flow_bucket on ferrymq.flow (bucket);

-- +goose Down
drop table ferrymq.flow;
