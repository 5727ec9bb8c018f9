-- +goose Up
alter table ferrymq.jobs drop constraint jobs_kind_check;
alter table ferrymq.jobs add constraint jobs_kind_check check (kind in ('seed', 'delete_queue', 'recheck', 'delete_group', 'retention'));

-- committed - origin is what the group has consumed of the partition: a seek moves both.
alter table ferrymq.cursors add column origin bigint not null default 0;

create index discovery_groups_name on ferrymq.discovery_groups (project_id, name);

-- +goose Down
drop index ferrymq.discovery_groups_name;
alter table ferrymq.cursors drop column origin;
delete from ferrymq.jobs where kind = 'delete_group';
alter table ferrymq.jobs drop constraint jobs_kind_check;
alter table ferrymq.jobs add constraint jobs_kind_check check (kind in ('seed', 'delete_queue', 'recheck', 'retention'));
