package handlers

func groupRoutes() []route { return nil }
