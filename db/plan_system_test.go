package db_test

import "ferrymq/db"

func systemStatements(w *world) map[string]statement {
	on := true
	return map[string]statement{
		"SystemGet": {sql: db.SystemGet, buffers: 10, seq: []string{"system"}},
		"SystemSet": {sql: db.SystemSet, arg: db.SystemSetParams{Push: &on}, buffers: 10, seq: []string{"system"}},
	}
}
