-- +goose Up
-- While a snapshot is held, a hot row has many entries of the same key, and look-ups read them from the newest on. Of entries that are merged
-- into one, a backward scan reads the oldest first.
alter index ferrymq.partitions_pkey set (deduplicate_items = off);
alter index ferrymq.cursors_pkey set (deduplicate_items = off);

-- +goose Down
alter index ferrymq.cursors_pkey reset (deduplicate_items);
alter index ferrymq.partitions_pkey reset (deduplicate_items);
