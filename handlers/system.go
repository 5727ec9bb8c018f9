package handlers

func systemRoutes() []route { return nil }
