-- Projects and their API keys. What is made in a project holds its row while it is made (for share), and a deletion waits for that:
-- so nothing is made in a project that is deleted already, and what was made before is seen by the job that cleans up.

-- name: ProjectCreate :one
-- No row: the name is taken.
insert into ferrymq.projects (name)
select @name::text
where not exists (select from ferrymq.projects p where p.name = @name::text and p.deleted_at is null) -- a conflict would use up an id
on conflict (name) where deleted_at is null do nothing
returning created_at;

-- name: ProjectList :many
select p.name, p.created_at from ferrymq.projects p
where p.deleted_at is null and p.name > @after::text
order by p.name
limit @max::bigint;

-- name: ProjectDelete :execrows
with gone as (
    update ferrymq.projects p set deleted_at = clock_timestamp()
    where p.name = @name::text and p.deleted_at is null
    returning p.id
)
insert into ferrymq.jobs (kind, queue_id, project_id)
select 'delete_project', 0, g.id from gone g;

-- name: ProjectAlive :one
select exists (select from ferrymq.projects p where p.id = @id::int and p.deleted_at is null)::boolean as alive;

-- name: ProjectStreams :many
select q.id, q.name from ferrymq.queues q
where q.project_id = @project_id::int and q.deleted_at is null
order by q.name
limit @max::bigint;

-- name: ProjectRemoveKeys :exec
delete from ferrymq.api_keys k where k.project_id = @project_id::int;

-- name: APIKeyCreate :one
-- No row: there is no such project.
insert into ferrymq.api_keys (id, project_id, name, scopes, hash)
select @id::uuid, p.id, @name::text, @scopes::text[], @hash::bytea
from ferrymq.projects p
where p.name = @project::text and p.deleted_at is null
for share
returning created_at;

-- name: APIKeyFind :one
select k.scopes, p.id as project_id, p.name as project
from ferrymq.api_keys k
join ferrymq.projects p on p.id = k.project_id and p.deleted_at is null
where k.hash = @hash::bytea;

-- name: APIKeyList :many
select k.id, k.name, k.scopes, k.created_at from ferrymq.api_keys k
where k.project_id = @project_id::int and k.id > @after::uuid
order by k.id
limit @max::bigint;

-- name: APIKeyDelete :execrows
delete from ferrymq.api_keys k where k.project_id = @project_id::int and k.id = @id::uuid;
