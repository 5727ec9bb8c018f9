-- name: SystemGet :one
select s.push_maintenance, s.pop_maintenance, s.version from ferrymq.system s;

-- name: SystemSet :one
-- Null leaves a switch as it is.
update ferrymq.system s
set push_maintenance = coalesce(sqlc.narg('push')::boolean, s.push_maintenance),
    pop_maintenance = coalesce(sqlc.narg('pop')::boolean, s.pop_maintenance),
    version = s.version + 1, changed_at = clock_timestamp()
returning push_maintenance, pop_maintenance, version;
