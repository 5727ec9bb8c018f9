package db_test

import (
	"github.com/google/uuid"

	"ferrymq/db"
)

// keyStatements are about projects and API keys.
func keyStatements(w *world) map[string]statement {
	hash := one[[]byte](w, "select hash from ferrymq.api_keys where name = 'k77'")
	return map[string]statement{
		"ProjectCreate":     {sql: db.ProjectCreate, arg: db.ProjectCreateParams{Name: "new"}, buffers: 60},
		"ProjectList":       {sql: db.ProjectList, arg: db.ProjectListParams{After: "p3", Max: 101}, buffers: 300, index: []string{"projects_name"}},
		"ProjectDelete":     {sql: db.ProjectDelete, arg: db.ProjectDeleteParams{Name: "p7"}, buffers: 60},
		"ProjectAlive":      {sql: db.ProjectAlive, arg: db.ProjectAliveParams{ID: 7}, buffers: 20},
		"ProjectStreams":    {sql: db.ProjectStreams, arg: db.ProjectStreamsParams{ProjectID: 1, Max: 50}, buffers: 150, index: []string{"queues_name"}},
		"ProjectRemoveKeys": {sql: db.ProjectRemoveKeys, arg: db.ProjectRemoveKeysParams{ProjectID: 7}, buffers: 60, index: []string{"api_keys_project"}},
		"APIKeyCreate":      {sql: db.APIKeyCreate, arg: db.APIKeyCreateParams{ID: uuid.New(), Name: "k", Scopes: []string{"read"}, Hash: make([]byte, 32), Project: "p7"}, buffers: 60},
		"APIKeyFind":        {sql: db.APIKeyFind, arg: db.APIKeyFindParams{Hash: hash}, buffers: 20, index: []string{"api_keys_hash_key"}},
		"APIKeyList":        {sql: db.APIKeyList, arg: db.APIKeyListParams{ProjectID: 7, Max: 101}, buffers: 60, index: []string{"api_keys_project"}},
		"APIKeyDelete":      {sql: db.APIKeyDelete, arg: db.APIKeyDeleteParams{ProjectID: 7, ID: uuid.New()}, buffers: 60},
	}
}
