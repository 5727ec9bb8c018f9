-- name: CheckServer :one
-- What the database and the role are like, for whoever is about to run a broker on them.
select current_setting('server_version_num')::int as version, current_setting('server_version')::text as version_text,
       current_setting('fsync')::text as fsync, current_setting('full_page_writes')::text as full_page_writes,
       current_setting('synchronous_commit')::text as synchronous_commit, current_setting('autovacuum')::text as autovacuum,
       (pg_is_in_recovery() or current_setting('default_transaction_read_only') = 'on')::boolean as read_only,
       clock_timestamp()::timestamptz as now, current_user::text as role, current_database()::text as database,
       (current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
        - coalesce(current_setting('reserved_connections', true)::int, 0))::int as connections,
       (select count(*) from pg_catalog.pg_stat_activity a where a.backend_type = 'client backend')::int as used,
       (select r.rolconnlimit from pg_catalog.pg_roles r where r.rolname = current_user)::int as role_limit,
       (select d.datconnlimit from pg_catalog.pg_database d where d.datname = current_database())::int as database_limit,
       has_database_privilege(current_database(), 'create')::boolean as may_create,
       (to_regnamespace('ferrymq') is not null)::boolean as made,
       (select coalesce(bool_or(pg_has_role(n.nspowner, 'usage')), false) from pg_catalog.pg_namespace n where n.nspname = 'ferrymq')::boolean as owner,
       (select coalesce(bool_or(has_schema_privilege(n.oid, 'usage')), false) from pg_catalog.pg_namespace n where n.nspname = 'ferrymq')::boolean as may_use;

-- name: CheckTables :many
select c.relname::text as name, coalesce(c.reloptions, '{}')::text[] as options,
       (has_table_privilege(c.oid, 'select') and has_table_privilege(c.oid, 'insert') and has_table_privilege(c.oid, 'update')
        and has_table_privilege(c.oid, 'delete'))::boolean as allowed
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = 'ferrymq' and c.relkind = 'r'
order by c.relname;

-- name: CheckBrokers :one
select count(*)::int as alive from ferrymq.brokers b where b.seen_at > clock_timestamp() - interval '10 seconds';
