package handlers

func deadLetterRoutes() []route { return nil }
