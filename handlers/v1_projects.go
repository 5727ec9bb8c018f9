package handlers

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"net/http"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/auth"
	"ferrymq/db"
	"ferrymq/metrics"
)

func projectRoutes() []route {
	return []route{
		on("POST", "/v1/projects", root, (*API).createProject),
		on("GET", "/v1/projects", root, (*API).listProjects),
		on("DELETE", "/v1/projects/{project}", root, (*API).deleteProject),
		on("POST", "/v1/projects/{project}/keys", root, (*API).createKey),
		on("GET", "/v1/projects/{project}/keys", root, (*API).listKeys),
		on("DELETE", "/v1/projects/{project}/keys/{key}", root, (*API).deleteKey),
	}
}

type projectItem struct {
	Name      string  `json:"name"`
	CreatedAt instant `json:"created_at"`
}

func (a *API) createProject(w http.ResponseWriter, r *request) error {
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	var name string
	err = parse(body, func(d *document) error {
		return d.object(func(field string) (err error) {
			if field != "name" {
				return d.skip()
			}
			name, err = d.name("", maxName)
			return err
		})
	})
	if err == nil && name == "" {
		err = bad("name is required")
	}
	if err != nil {
		return err
	}
	at, err := a.queries.ProjectCreate(r.Context(), db.ProjectCreateParams{Name: name})
	if errors.Is(err, pgx.ErrNoRows) {
		return conflict("a project named %s exists already", name)
	}
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	return a.reply(w, http.StatusCreated, projectItem{name, instant(at)})
}

func (a *API) listProjects(w http.ResponseWriter, r *request) error {
	limit, after, err := pagingNames(r)
	if err != nil {
		return err
	}
	rows, err := a.queries.ProjectList(r.Context(), db.ProjectListParams{After: after, Max: limit + 1})
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	var out struct {
		Projects []projectItem `json:"projects"`
		Next     *string       `json:"next_cursor"`
	}
	rows, out.Next = more(rows, limit, func(p db.ProjectListRow) []byte { return []byte(p.Name) })
	for _, p := range rows {
		out.Projects = append(out.Projects, projectItem{p.Name, instant(p.CreatedAt)})
	}
	return a.reply(w, http.StatusOK, out)
}

// projectName is the project that the path names.
func projectName(r *request) (string, error) {
	if !validName(r.params[0], maxName) {
		return "", badName("project", maxName)
	}
	return r.params[0], nil
}

func noProject(name string) error { return notFound("no project named " + name) }

// deleteProject frees the name of a project at once and leaves its streams to a job.
func (a *API) deleteProject(w http.ResponseWriter, r *request) error {
	name, err := projectName(r)
	if err != nil {
		return err
	}
	if name == defaultProject {
		return conflict("the default project cannot be deleted")
	}
	n, err := a.queries.ProjectDelete(r.Context(), db.ProjectDeleteParams{Name: name})
	r.engine.Catalog.ForgetProject(name)
	a.keys.Forget()
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	if n == 0 {
		return noProject(name)
	}
	return a.write(w, http.StatusOK, []byte(`{"deleted":true}`))
}

const keyPrefix = "key_" // the key's UUID

// readKey reads what a new API key is to be.
func readKey(body []byte) (name string, scopes auth.Scope, err error) {
	errScopes := bad("scopes must be an array of one or more of publish, consume, read and admin")
	err = parse(body, func(d *document) error {
		return d.object(func(field string) error {
			switch field {
			case "name":
				s, err := d.optionalName(maxName)
				if name = ""; s != nil {
					name = *s
				}
				return err
			case "scopes":
				if scopes = 0; d.kind() != '[' {
					return errScopes
				}
				return d.array(func(int) error {
					if d.kind() != '"' {
						return errScopes
					}
					s, err := d.optionalText()
					if err != nil {
						return err
					}
					one := auth.ParseScope(*s)
					if scopes |= one; one == 0 {
						return errScopes
					}
					return nil
				})
			}
			return d.skip()
		})
	})
	if err == nil && scopes == 0 {
		err = errScopes
	}
	return name, scopes, err
}

type keyItem struct {
	ID        string   `json:"id"`
	Name      string   `json:"name"`
	Scopes    []string `json:"scopes"`
	CreatedAt instant  `json:"created_at"`
}

func keyOf(id uuid.UUID) string { return string(appendID(nil, keyPrefix, id[:])) }

// createKey makes an API key. Its secret is in this answer and nowhere else.
func (a *API) createKey(w http.ResponseWriter, r *request) error {
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	name, scopes, err := readKey(body)
	if err != nil {
		return err
	}
	project, err := projectName(r)
	if err != nil {
		return err
	}
	var out struct {
		keyItem
		Secret string `json:"secret"`
	}
	raw := make([]byte, auth.SecretSize)
	rand.Read(raw)
	out.Secret = string(appendID(nil, auth.SecretPrefix, raw))
	hash := sha256.Sum256([]byte(out.Secret))
	id, err := uuid.NewV7() // lists them by age
	if err != nil {
		return err
	}
	at, err := a.queries.APIKeyCreate(r.Context(), db.APIKeyCreateParams{ID: id, Name: name, Scopes: scopes.Names(), Hash: hash[:], Project: project})
	if errors.Is(err, pgx.ErrNoRows) {
		return noProject(project)
	}
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	out.keyItem = keyItem{keyOf(id), name, scopes.Names(), instant(at)}
	return a.reply(w, http.StatusCreated, out)
}

// projectID looks up the project that the path names.
func (a *API) projectID(r *request) (id int32, name string, err error) {
	if name, err = projectName(r); err != nil {
		return 0, "", err
	}
	id, err = a.queries.ProjectGet(r.Context(), db.ProjectGetParams{Name: name})
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, name, noProject(name)
	}
	if err != nil {
		return 0, name, a.databaseError(r, err, "query failed")
	}
	return id, name, nil
}

func (a *API) listKeys(w http.ResponseWriter, r *request) error {
	limit, after, err := paging(r, len(uuid.UUID{}))
	if err != nil {
		return err
	}
	project, _, err := a.projectID(r)
	if err != nil {
		return err
	}
	var from uuid.UUID
	copy(from[:], after)
	rows, err := a.queries.APIKeyList(r.Context(), db.APIKeyListParams{ProjectID: project, After: from, Max: limit + 1})
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	var out struct {
		Keys []keyItem `json:"keys"`
		Next *string   `json:"next_cursor"`
	}
	rows, out.Next = more(rows, limit, func(k db.APIKeyListRow) []byte { return k.ID[:] })
	for _, k := range rows {
		out.Keys = append(out.Keys, keyItem{keyOf(k.ID), k.Name, k.Scopes, instant(k.CreatedAt)})
	}
	return a.reply(w, http.StatusOK, out)
}

func (a *API) deleteKey(w http.ResponseWriter, r *request) error {
	project, name, err := a.projectID(r)
	if err != nil {
		return err
	}
	n := int64(0)
	if raw, ok := decodeID(r.params[1], keyPrefix, len(uuid.UUID{})); ok {
		n, err = a.direct.APIKeyDelete(r.Context(), db.APIKeyDeleteParams{ProjectID: project, ID: uuid.UUID(raw)})
		a.keys.Forget()
		if err != nil {
			return a.databaseError(r, err, "query failed")
		}
	}
	if n == 0 {
		return notFound("no key " + r.params[1] + " in project " + name)
	}
	return a.write(w, http.StatusOK, []byte(`{"deleted":true}`))
}

// findKey looks an API key up by the hash of its secret.
func (a *API) findKey(ctx context.Context, hash [sha256.Size]byte) (*auth.Key, error) {
	if a.engine.Load() == nil {
		return nil, busy("not ready")
	}
	k, err := a.direct.APIKeyFind(ctx, db.APIKeyFindParams{Hash: hash[:]})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		a.Metrics.Total(metrics.DatabaseErrors, 1)
		if !db.IsConnection(err) {
			a.Log.Error("look up an API key", "error", db.Text(err))
		}
		return nil, busy("database unavailable")
	}
	key := &auth.Key{Project: k.ProjectID, Name: k.Project}
	for _, s := range k.Scopes {
		key.Scopes |= auth.ParseScope(s)
	}
	return key, nil
}
