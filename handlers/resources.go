package handlers

func resourceRoutes() []route { return nil }
