package db_test

func statsStatements(w *world) map[string]statement { return nil }
