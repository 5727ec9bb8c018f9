package db_test

import (
	"testing"

	"ferrymq/db"
)

// Traces and their names go after a week, in steps, the younger ones stay.
func TestTracesExpire(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.exec(`with t as (insert into ferrymq.traces select gen_random_uuid(), gen_random_uuid(), 't', 'g', 'info', '1', array['n'], null, null, now() - i * interval '1 day' - interval '1 minute'
		from generate_series(0, 9) i returning *)
		insert into ferrymq.trace_names select 'n', created_at, id, partition_id, transaction_id from t`)
	for _, want := range []int64{2, 1, 0} {
		equal(t, "names removed", must[int64](t)(w.TraceNamesExpire(w.ctx(), db.TraceNamesExpireParams{Max: 2})), want)
		equal(t, "traces removed", must[int64](t)(w.TracesExpire(w.ctx(), db.TracesExpireParams{Max: 2})), want)
	}
	equal(t, "traces left", one[int](w, "select count(*)::int from ferrymq.traces"), 7)
	equal(t, "names left", one[int](w, "select count(*)::int from ferrymq.trace_names"), 7)
}
