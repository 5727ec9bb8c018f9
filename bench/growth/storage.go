package main

import (
	"bufio"
	"bytes"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
)

// storage says where the bytes of a message go, on disk and in the WAL, for segments of one message and of many. Payloads have 256 bytes.
func storage(e *env) error {
	e.columns("what", "1 producer x 1", "64 x 1", "8 x 100", "8 x 1000")
	loads := []string{"-producers 1 -batch 1 -messages 10000", "-producers 64 -batch 1 -messages 40000", "-producers 8 -batch 100 -messages 100000", "-producers 8 -batch 1000 -messages 400000"}
	var rows []string
	values := map[string][]any{}
	set := func(i int, name string, v float64) {
		if values[name] == nil {
			rows = append(rows, name)
			values[name] = make([]any, len(loads))
			for j := range values[name] {
				values[name][j] = "-"
			}
		}
		values[name][i] = v
	}
	for i, load := range loads {
		if err := e.up(1); err != nil {
			return err
		}
		// Partitions and group exist, and no page is written for the first time since a checkpoint: those images come in a table of their own.
		if _, err := e.load("cycle -queue stored -producers 8 -consumers 8 -messages 512"); err != nil {
			return err
		}
		count, err := e.number("select count(*) from ferrymq.segments")
		if err != nil {
			return err
		}
		before, err := e.sizes()
		if err != nil {
			return err
		}
		from, err := e.lsn()
		if err != nil {
			return err
		}
		got, err := e.load("push -queue stored -check=false " + load)
		if err != nil {
			return err
		}
		messages := got["messages"]
		to, err := e.lsn()
		if err != nil {
			return err
		}
		all, err := e.number("select count(*) from ferrymq.segments")
		if err != nil {
			return err
		}
		set(i, "messages a segment", messages/(all-count))
		after, err := e.sizes()
		if err != nil {
			return err
		}
		total := 0.0
		for _, name := range []string{"segments: rows", "segments: primary key", "segments: out of line", "segments: index of that", "partitions and cursors"} {
			set(i, "disk, "+name, (after[name]-before[name])/messages)
			total += after[name] - before[name]
		}
		set(i, "**disk, all**", total/messages)
		wal, err := e.waldump(from, to)
		if err != nil {
			return err
		}
		for _, kind := range []string{"Heap/INSERT", "Heap/HOT_UPDATE", "Heap/LOCK", "Btree", "Transaction/COMMIT", "other", "images of pages"} {
			set(i, "WAL, "+kind, wal[kind]/messages)
		}
		set(i, "**WAL, push**", wal["all"]/messages)
		if from, err = e.lsn(); err != nil {
			return err
		}
		drain := "-consumers 8 -batch 100"
		if i == 0 {
			drain = "-consumers 1 -batch 1"
		}
		if got, err = e.load(fmt.Sprintf("drain -queue stored -preloaded -check=false %s -messages %.0f", drain, messages)); err != nil {
			return err
		}
		if to, err = e.lsn(); err != nil {
			return err
		}
		if wal, err = e.waldump(from, to); err != nil {
			return err
		}
		set(i, "WAL, pop and ack", wal["all"]/got["deliveries"])
	}
	for _, name := range rows {
		e.row(append([]any{name}, values[name]...)...)
	}
	return nil
}

// cost says what messages of 256 bytes cost in CPU, WAL and commits, by how they come.
func cost(e *env) error {
	e.columns("load", "msg/s", "broker CPU s a million", "PostgreSQL CPU s a million", "WAL bytes a message", "writing transactions a message")
	if err := e.up(1); err != nil {
		return err
	}
	for _, l := range []struct{ what, args, rate string }{
		{"push 64 x 1", "push -producers 64 -duration " + e.duration, "push_msg_per_s"},
		{"push 8 x 100", "push -producers 8 -batch 100 -duration " + e.duration, "push_msg_per_s"},
		{"pop and ack 32 x 1", "drain -consumers 32 -batch 1 -messages 15000", "deliveries_per_s"},
		{"pop and ack 8 x 100", "drain -consumers 8 -batch 100 -messages 200000", "deliveries_per_s"},
		{"lanes, receive and ack 8 x 100", "lanes -messages 60000", "deliveries_per_s"},
		{"push, pop and ack, 300/s", "live -rate 300 -duration " + e.duration, "cycle_msg_per_s"},
		{"push, pop and ack, 1,500/s", "live -rate 1500 -duration " + e.duration, "cycle_msg_per_s"},
	} {
		got, err := e.load(l.args)
		if err != nil {
			return err
		}
		e.row(l.what, got[l.rate], got["cpu_broker_s_per_million"], got["cpu_pg_s_per_million"], got["wal_bytes_per_message"], got["pg_write_xacts_per_message"])
	}
	return nil
}

func (e *env) sizes() (map[string]float64, error) {
	sizes := map[string]float64{}
	for name, sql := range map[string]string{
		"segments: rows":          "pg_relation_size('ferrymq.segments')",
		"segments: primary key":   "pg_relation_size('ferrymq.segments_pkey')",
		"segments: out of line":   "(select pg_relation_size(reltoastrelid) from pg_class where oid = 'ferrymq.segments'::regclass)",
		"segments: index of that": "(select pg_indexes_size(reltoastrelid) from pg_class where oid = 'ferrymq.segments'::regclass)",
		"partitions and cursors":  "pg_total_relation_size('ferrymq.partitions') + pg_total_relation_size('ferrymq.cursors')",
	} {
		v, err := e.number("select (" + sql + ")::float8")
		if err != nil {
			return nil, err
		}
		sizes[name] = v
	}
	return sizes, nil
}

func (e *env) lsn() (lsn string, err error) {
	err = e.conn.QueryRow(e.ctx, "select pg_current_wal_flush_lsn()::text").Scan(&lsn)
	return lsn, err
}

// waldump adds up the WAL between two places by kind of record, images of pages apart.
func (e *env) waldump(from, to string) (map[string]float64, error) {
	var bin string
	if err := e.conn.QueryRow(e.ctx, "select setting from pg_config where name = 'BINDIR'").Scan(&bin); err != nil {
		return nil, err
	}
	out, err := e.pg.Command(filepath.Join(bin, "pg_waldump"), "--stats=record", "-p", filepath.Join(e.pg.Dir, "pg", "pg_wal"), "-s", from, "-e", to).Output()
	if err != nil {
		return nil, fmt.Errorf("pg_waldump: %w", err)
	}
	sums := map[string]float64{}
	for s := bufio.NewScanner(bytes.NewReader(out)); s.Scan(); {
		// Type  N (%)  Record size (%)  FPI size (%)  Combined size (%)
		f := strings.Fields(strings.NewReplacer("(", " ", ")", " ").Replace(s.Text()))
		if len(f) != 9 || !strings.Contains(f[0], "/") {
			continue
		}
		size, err := strconv.ParseFloat(f[3], 64)
		if err != nil {
			continue
		}
		images, _ := strconv.ParseFloat(f[5], 64)
		kind := strings.TrimSuffix(f[0], "+INIT")
		if strings.HasPrefix(kind, "Btree/") {
			kind = "Btree"
		}
		switch kind {
		case "Heap/INSERT", "Heap/HOT_UPDATE", "Heap/LOCK", "Btree", "Transaction/COMMIT":
		default:
			kind = "other"
		}
		sums[kind] += size
		sums["images of pages"] += images
		sums["all"] += size + images
	}
	return sums, nil
}
