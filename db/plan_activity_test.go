package db_test

func activityStatements(w *world) map[string]statement { return nil }
