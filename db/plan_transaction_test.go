package db_test

func transactionStatements(w *world) map[string]statement { return nil }
