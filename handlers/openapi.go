package handlers

import (
	"bytes"
	_ "embed"
	"net/http"
)

// The description of every route of both APIs. Tests hold it to the table of routes and to what the broker answers.
//
//go:embed openapi.json
var openAPIFile []byte

var openAPI = bytes.Replace(openAPIFile, []byte("{version}"), []byte(Version), 1)

func openAPIRoutes() []route {
	return []route{on("GET", "/v1/openapi.json", public, (*API).description)}
}

func (a *API) description(w http.ResponseWriter, _ *request) error {
	return a.write(w, http.StatusOK, openAPI)
}
