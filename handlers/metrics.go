package handlers

import (
	"net/http"
	"strconv"
	"strings"
	"time"
)

// metrics answers in the Prometheus text format, and in JSON to those who ask for it by name.
func (a *API) metrics(w http.ResponseWriter, r *request) error {
	if !accepts(r.Header.Values("Accept"), "application/json") {
		return a.prometheus(w, r)
	}
	w.Header().Set("Cache-Control", "no-cache")
	return a.reply(w, http.StatusOK, a.Metrics.Snapshot())
}

func (a *API) prometheus(w http.ResponseWriter, r *request) error {
	b, err := a.Metrics.Text()
	if err != nil {
		return err
	}
	h := w.Header()
	h.Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	h.Set("Cache-Control", "no-cache")
	h["X-Content-Type-Options"] = nosniff
	h.Set("Content-Length", strconv.Itoa(len(b)))
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
	_, _ = w.Write(b)
	return nil
}

// accepts says whether a media type is named, wildcards aside, and not turned down.
func accepts(values []string, mediaType string) bool {
	for _, part := range strings.Split(strings.Join(values, ","), ",") {
		name, parameters, _ := strings.Cut(part, ";")
		if !strings.EqualFold(strings.TrimSpace(name), mediaType) {
			continue
		}
		for _, p := range strings.Split(parameters, ";") {
			k, v, _ := strings.Cut(strings.TrimSpace(p), "=")
			if q, err := strconv.ParseFloat(v, 64); strings.EqualFold(k, "q") && err == nil && q == 0 {
				return false
			}
		}
		return true
	}
	return false
}

// alive answers without looking at anything.
func (a *API) alive(w http.ResponseWriter, r *request) error {
	return a.write(w, http.StatusOK, []byte(`{"status":"ok","engine":"ferrymq"}`))
}
