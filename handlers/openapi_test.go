package handlers

import (
	"fmt"
	"io"
	"net/http/httptest"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/go-json-experiment/json"
)

// The description has every route of the table and no other, with its level and its parameters.
func TestOpenAPIRoutes(t *testing.T) {
	t.Parallel()
	type parameter struct {
		Ref  string `json:"$ref"`
		Name string `json:"name"`
		In   string `json:"in"`
	}
	var doc struct {
		OpenAPI string
		Info    struct{ Version string }
		Tags    []struct{ Name string }
		Paths   map[string]map[string]struct {
			OperationID string `json:"operationId"`
			Summary     string
			Tags        []string
			Security    []map[string][]string
			Parameters  []parameter
			Responses   map[string]any
		}
		Components struct{ Parameters map[string]parameter }
	}
	var all any
	if err := json.Unmarshal(openAPI, &all); err != nil { // names that come twice are errors too
		t.Fatal(err)
	}
	if err := json.Unmarshal(openAPI, &doc, json.MatchCaseInsensitiveNames(true)); err != nil {
		t.Fatal(err)
	}
	if doc.OpenAPI != "3.1.1" || doc.Info.Version != Version {
		t.Errorf("OpenAPI %s of version %s", doc.OpenAPI, doc.Info.Version)
	}
	roles := map[level]string{readOnly: "read-only", writeOnly: "write-only", readWrite: "read-write", admin: "admin"}
	scopes := map[level]string{readOnly: "read", writeOnly: "publish", readWrite: "consume", admin: "admin", root: "root"}
	ids, tags := make(map[string]bool), make(map[string]bool)
	for _, r := range (&API{}).table() {
		if r.path[0] == "console" { // which no client is to rely on
			continue
		}
		path := "/" + strings.Join(r.path, "/")
		where := r.method + " " + path
		op, ok := doc.Paths[path][strings.ToLower(r.method)]
		if !ok {
			t.Errorf("%s is not described", where)
			continue
		}
		delete(doc.Paths[path], strings.ToLower(r.method))
		names := roles
		if r.path[0] == "v1" {
			names = scopes
		}
		want := []map[string][]string{}
		if name := names[r.level]; name != "" {
			want = append(want, map[string][]string{"bearer": {name}})
		}
		if !reflect.DeepEqual(op.Security, want) {
			t.Errorf("%s: security %v, want %v", where, op.Security, want)
		}
		if op.OperationID == "" || ids[op.OperationID] || op.Summary == "" || len(op.Tags) != 1 {
			t.Errorf("%s: operationId %q, summary %q, tags %v", where, op.OperationID, op.Summary, op.Tags)
		}
		ids[op.OperationID] = true
		for _, tag := range op.Tags {
			tags[tag] = true
		}
		var declared, has []string
		for _, p := range op.Parameters {
			if name, ok := strings.CutPrefix(p.Ref, "#/components/parameters/"); ok {
				p = doc.Components.Parameters[name]
			}
			if p.In == "path" {
				declared = append(declared, "{"+p.Name+"}")
			}
			if n := p.In + " " + p.Name; slices.Contains(has, n) {
				t.Errorf("%s: %s comes twice", where, n)
			} else {
				has = append(has, n)
			}
		}
		if want := regexp.MustCompile(`\{\w+\}`).FindAllString(path, -1); !slices.Equal(declared, want) {
			t.Errorf("%s: parameters %v of the path, want %v", where, declared, want)
		}
	}
	for path, ops := range doc.Paths {
		for method := range ops {
			t.Errorf("%s %s is described, and no route", method, path)
		}
	}
	for _, tag := range doc.Tags {
		if !tags[tag.Name] {
			t.Errorf("nothing is tagged %s", tag.Name)
		}
		delete(tags, tag.Name)
	}
	for tag := range tags {
		t.Errorf("the tag %s is not declared", tag)
	}
	references(t, all)
}

// References lead somewhere, and to every component there is one.
func references(t *testing.T, doc any) {
	used := make(map[string]bool)
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case []any:
			for _, x := range v {
				walk(x)
			}
		case map[string]any:
			if ref, ok := v["$ref"].(string); ok {
				used[ref] = true
			}
			for _, x := range v {
				walk(x)
			}
		}
	}
	walk(doc)
	for kind, all := range doc.(map[string]any)["components"].(map[string]any) {
		for name := range all.(map[string]any) {
			ref := fmt.Sprintf("#/components/%s/%s", kind, name)
			if !used[ref] && kind != "securitySchemes" {
				t.Errorf("nothing refers to %s", ref)
			}
			delete(used, ref)
		}
	}
	for ref := range used {
		t.Errorf("%s leads nowhere", ref)
	}
}

// The description needs no token, whatever the open paths are, and does not look at what comes in its place.
func TestOpenAPINeedsNoToken(t *testing.T) {
	t.Parallel()
	h := guarded(t, guards("/nothing"), io.Discard)
	for _, credentials := range []string{"", "Bearer x.y.z"} {
		r := httptest.NewRequest("GET", "/v1/openapi.json", nil)
		r.Header.Set("Authorization", credentials)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != 503 || w.Body.String() != `{"error":"not ready"}` {
			t.Errorf("with %q: %d %s", credentials, w.Code, w.Body)
		}
	}
}
