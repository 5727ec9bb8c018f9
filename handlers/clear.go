package handlers

func clearRoutes() []route { return nil }
