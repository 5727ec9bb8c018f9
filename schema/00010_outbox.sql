-- +goose Up

-- Messages on their way to their streams: those of applications' own transactions until a broker moves them, delayed ones until they
-- are due. queue_id: the stream when they were published, null if there was none: with a deleted stream goes what was published to it.
-- Made by ferrymq.publish a row has a payload, made by a broker frames, like a segment of one, encrypted if the stream wants that.
create table ferrymq.outbox (
    id bigint generated always as identity primary key,
    project_id int not null,
    queue_id int,
    stream text collate "C" not null,
    key text collate "C",
    due_at timestamptz,
    message_id text,
    payload text,
    headers text,
    key_no smallint,
    codec smallint,
    first_id uuid,
    frames bytea,
    check ((payload is null) <> (frames is null)),
    check ((frames is null) = (key_no is null) and (frames is null) = (codec is null) and (frames is null) = (first_id is null))
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off);
create index outbox_now on ferrymq.outbox (id) where due_at is null;
create index outbox_due on ferrymq.outbox (due_at, id) where due_at is not null;
create index outbox_queue on ferrymq.outbox (queue_id, id) where queue_id is not null;
insert into ferrymq.sweeps (name) values ('outbox');

-- Where a delayed message went whose id was given out before it had a place.
create table ferrymq.outbox_places (
    id bigint primary key,
    partition_id bigint not null,
    message_offset bigint not null,
    moved_at timestamptz not null default clock_timestamp()
);
create index outbox_places_moved_at on ferrymq.outbox_places (moved_at);

-- +goose StatementBegin
-- Publishes from the caller's own transaction: the message exists when that commits. It only inserts into the outbox: a transaction that
-- stays open holds no lock that anybody else wants. The notification goes out with the commit and makes the brokers look.
create function ferrymq.publish(stream text, key text, payload json, headers json default null, id text default null,
                                delay interval default null, project text default 'default')
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    owner int;
    target int;
    encrypted boolean;
    content text := btrim(payload::text, E' \t\n\r');
    extra text := btrim(headers::text, E' \t\n\r');
    seconds numeric := coalesce(extract(epoch from delay), 0);
begin
    if coalesce(octet_length(stream), 0) not between 1 and 255 then
        raise exception 'invalid stream: must be 1..255 bytes' using errcode = '22023';
    elsif octet_length(key) not between 1 and 255 then
        raise exception 'invalid key: must be 1..255 bytes, or null for a message without a key' using errcode = '22023';
    elsif octet_length(id) not between 1 and 512 then
        raise exception 'invalid id: must be 1..512 bytes, or null' using errcode = '22023';
    elsif content is null then
        raise exception 'payload is required (JSON null is ''null''::json)' using errcode = '22023';
    elsif json_typeof(headers) not in ('object', 'null') then
        raise exception 'headers must be a JSON object' using errcode = '22023';
    elsif octet_length(content) + coalesce(octet_length(extra), 0) > 67108864 then
        raise exception 'message too large: at most 67108864 bytes of payload and headers' using errcode = '22023';
    elsif seconds not between 0 and 31536000 then
        raise exception 'invalid delay: must be 0 seconds to 365 days' using errcode = '22023';
    end if;
    select p.id into owner from ferrymq.projects p where p.name = project and p.deleted_at is null;
    if owner is null then
        raise exception 'no project named %', coalesce(project, 'null') using errcode = '22023';
    end if;
    select q.id, q.encryption_enabled into target, encrypted
    from ferrymq.queues q where q.project_id = owner and q.name = publish.stream and q.deleted_at is null;
    if encrypted then
        raise exception 'stream % stores its messages encrypted: only a broker can publish to it', stream using errcode = '22023';
    end if;
    insert into ferrymq.outbox (project_id, queue_id, stream, key, due_at, message_id, payload, headers)
    values (owner, target, stream, key, case when seconds > 0 then clock_timestamp() + seconds * interval '1 second' end, id, content,
            case when extra not in ('null', '{}') then extra end);
    if seconds < 60 then
        perform pg_notify('ferrymq', '- o');
    end if;
end
$$;
-- +goose StatementEnd
-- Whoever may publish is told so: grant usage on schema ferrymq, and execute on this function.
revoke all on function ferrymq.publish(text, text, json, json, text, interval, text) from public;

-- +goose Down
drop function ferrymq.publish(text, text, json, json, text, interval, text);
delete from ferrymq.sweeps where name = 'outbox';
drop table ferrymq.outbox_places, ferrymq.outbox;
