package handlers

func messageRoutes() []route { return nil }
