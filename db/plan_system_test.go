package db_test

func systemStatements(w *world) map[string]statement { return nil }
