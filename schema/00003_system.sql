-- +goose Up
-- The maintenance switches, and when somebody last asked for current numbers. version counts the changes of the
-- switches: what a broker knows is never replaced by something older.
create table ferrymq.system (
    singleton boolean primary key default true check (singleton),
    push_maintenance boolean not null default false,
    pop_maintenance boolean not null default false,
    version bigint not null default 0,
    changed_at timestamptz not null default clock_timestamp(),
    numbers_wanted_at timestamptz not null default to_timestamp(0)
);
insert into ferrymq.system default values;

-- What waits for a time, by group: with cursors_pending, all of a group that is not drained. not_before is indexed already.
create index cursors_waiting on ferrymq.cursors (group_id, partition_id) where not_before is not null;

-- +goose StatementBegin
-- The partitions of some queues that have a backlog: from head on, and how much of it is under live leases.
-- A function because maxSize, the listings and the depth of a queue must count alike; being plain SQL it is planned as part
-- of the query that calls it.
-- The backlog is what the slowest named group has not finished, among those with a cursor on the partition; without one,
-- what queue mode has not; without any cursor everything retained. With only_group: the same as if there were no other group.
-- Where one of the groups that decide has a cursor on every partition (it is registered, and seeded), whatever is not in
-- one of the two indexes of open cursors is drained, so that idle partitions cost nothing; elsewhere every partition is looked at.
create function ferrymq.backlog(queues int[], only_group text)
returns table (queue_id int, partition_id bigint, head bigint, pending bigint, processing bigint) language sql stable as $$
    with judges as materialized (
        select x.id as queue_id,
               coalesce(array_agg(g.id) filter (where g.named), '{}') as named,
               coalesce(array_agg(g.id) filter (where not g.named), '{}') as mode,
               coalesce(bool_or(g.everywhere) filter (where g.named), bool_or(g.everywhere), false) as everywhere
        from unnest(queues) as x (id)
        left join lateral (
            select y.id, y.registered and y.seeded as everywhere, y.name <> '__QUEUE_MODE__' or only_group is not null as named
            from ferrymq.groups y
            where y.queue_id = x.id and y.kind = 0 and y.deleted_at is null and (only_group is null or y.name = only_group)
            offset 0
        ) g on true
        group by x.id
    ), opened as materialized (
        select j.queue_id, g.id as group_id, c.partition_id, c.committed, c.leased_to
        from judges j
        cross join lateral unnest(j.named || j.mode) as g (id)
        cross join lateral (
            select k.partition_id, k.committed, case when k.lease_until > statement_timestamp() then k.batch_end end as leased_to
            from ferrymq.cursors k where k.group_id = g.id and k.pending and k.not_before is null
            union all
            select k.partition_id, k.committed, null from ferrymq.cursors k where k.group_id = g.id and k.not_before is not null
            offset 0
        ) c
    ), parts as materialized (
        select h.queue_id, p.id, greatest(h.committed, p.first_offset) as head, p.next_offset as tail
        from (
            select o.queue_id, o.partition_id, min(o.committed) as committed
            from judges j
            join opened o on o.queue_id = j.queue_id and (o.group_id = any(j.named) or j.named = '{}')
            where j.everywhere
            group by o.queue_id, o.partition_id
        ) h
        join ferrymq.partitions p on p.id = h.partition_id
        where p.next_offset > greatest(h.committed, p.first_offset)
        union all
        select j.queue_id, p.id, greatest(h.committed, p.first_offset), p.next_offset
        from judges j
        join ferrymq.partitions p on p.queue_id = j.queue_id
        cross join lateral (
            select case when j.named || j.mode <> '{}' then coalesce(
                (select min(k.committed) from ferrymq.cursors k where k.group_id = any(j.named) and k.partition_id = p.id),
                (select min(k.committed) from ferrymq.cursors k where k.group_id = any(j.mode) and k.partition_id = p.id), 0) else 0 end as committed
            offset 0
        ) h
        where not j.everywhere and p.next_offset > greatest(h.committed, p.first_offset)
    ), leased as (
        select x.id, sum(greatest(x.hi - greatest(x.lo, x.seen), 0))::bigint as messages
        from (
            select p.id, greatest(o.committed, p.head) as lo, o.leased_to as hi,
                   coalesce(max(o.leased_to) over (partition by p.id order by o.committed rows between unbounded preceding and 1 preceding), 0) as seen
            from opened o
            join parts p on p.id = o.partition_id
            where o.leased_to is not null
        ) x
        group by x.id
    )
    select p.queue_id, p.id, p.head, p.tail - p.head, coalesce(l.messages, 0)
    from parts p
    left join leased l on l.id = p.id
$$;
-- +goose StatementEnd

-- +goose Down
drop function ferrymq.backlog(int[], text);
drop index ferrymq.cursors_waiting;
drop table ferrymq.system;
