package db_test

func retentionStatements(w *world) map[string]statement { return nil }
