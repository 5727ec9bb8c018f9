-- +goose Up

-- A deleted project keeps its row: its name is free at once, and nothing joins it any more.
alter table ferrymq.projects drop constraint projects_name_key;
alter table ferrymq.projects add column deleted_at timestamptz;
create unique index projects_name on ferrymq.projects (name) where deleted_at is null;

-- hash is the SHA-256 of the secret, which is stored nowhere.
create table ferrymq.api_keys (
    id uuid primary key,
    project_id int not null references ferrymq.projects,
    name text not null,
    scopes text[] not null check (scopes <@ array['publish', 'consume', 'read', 'admin'] and cardinality(scopes) > 0),
    hash bytea not null unique check (length(hash) = 32),
    created_at timestamptz not null default clock_timestamp()
);
create index api_keys_project on ferrymq.api_keys (project_id, id);

-- Of a job that is about a project and no queue; its queue_id is 0.
alter table ferrymq.jobs add column project_id int;
alter table ferrymq.jobs drop constraint jobs_kind_check;
alter table ferrymq.jobs add constraint jobs_kind_check
    check (kind in ('seed', 'delete_queue', 'recheck', 'delete_group', 'retention', 'delete_project'));

-- +goose Down
delete from ferrymq.jobs where kind = 'delete_project';
alter table ferrymq.jobs drop constraint jobs_kind_check;
alter table ferrymq.jobs add constraint jobs_kind_check check (kind in ('seed', 'delete_queue', 'recheck', 'delete_group', 'retention'));
alter table ferrymq.jobs drop column project_id;
drop table ferrymq.api_keys;
drop index ferrymq.projects_name;
update ferrymq.projects set name = 'deleted ' || id where deleted_at is not null;
alter table ferrymq.projects drop column deleted_at;
alter table ferrymq.projects add unique (name);
