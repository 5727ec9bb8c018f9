package handlers

func transactionRoutes() []route { return nil }
