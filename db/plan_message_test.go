package db_test

func messageStatements(w *world) map[string]statement { return nil }
