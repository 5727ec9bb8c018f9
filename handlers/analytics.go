package handlers

func analyticsRoutes() []route { return nil }
