-- +goose Up

-- kind 4: redriven, to the message at to_offset of the same partition.
alter table ferrymq.lane_events add column to_offset bigint;

-- +goose Down
alter table ferrymq.lane_events drop column to_offset;
