package db_test

func groupStatements(w *world) map[string]statement { return nil }
