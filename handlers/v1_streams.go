package handlers

import (
	"context"
	"errors"
	"net/http"
	"time"

	"ferrymq/catalog"
	"ferrymq/db"
)

func streamRoutes() []route {
	return []route{
		on("GET", "/v1/streams", readOnly, (*API).listStreams),
		on("PUT", "/v1/streams/{stream}", admin, (*API).putStream),
		on("GET", "/v1/streams/{stream}", readOnly, (*API).getStream),
		on("DELETE", "/v1/streams/{stream}", admin, (*API).deleteStream),
	}
}

const (
	maxUnkeyedLanes = 65_536
	maxDedupWindow  = 365 * 24 * time.Hour
	maxKept         = 10 * 365 * 24 * time.Hour

	defaultDedupWindow = time.Hour
)

// streamEdit is what a PUT of a stream changes. Nil: it stays.
type streamEdit struct {
	lanes           *int32
	dedup           *int32
	retention, keep *int32 // in seconds
}

func readStreamEdit(body []byte) (e streamEdit, err error) {
	if len(body) == 0 {
		return e, nil
	}
	seconds := func(d *document, to **int32, def, max time.Duration) error {
		t, err := d.duration(def, max, time.Second)
		n := int32(t / time.Second)
		*to = &n
		return err
	}
	err = parse(body, func(d *document) error {
		return d.object(func(name string) error {
			switch name {
			case "unkeyed_lanes":
				n, err := d.whole(catalog.UnkeyedLanes, 1, maxUnkeyedLanes)
				e.lanes = &n
				return err
			case "dedup_window":
				return seconds(d, &e.dedup, defaultDedupWindow, maxDedupWindow)
			case "retention":
				return seconds(d, &e.retention, 0, maxKept)
			case "keep_consumed":
				return seconds(d, &e.keep, catalog.KeepConsumed, maxKept)
			}
			return d.skip()
		})
	})
	return e, err
}

// kept is how long messages are kept, in seconds: those that are not consumed, and those that are. 0: for ever.
func kept(enabled bool, retention, consumed int32) (int32, int32) {
	if !enabled {
		return 0, 0
	}
	return retention, consumed
}

func (e *streamEdit) apply(q *catalog.Queue) error {
	if e.lanes != nil {
		q.UnkeyedLanes = *e.lanes
	}
	if e.dedup != nil {
		q.DedupWindowSeconds = *e.dedup
	}
	if e.retention == nil && e.keep == nil {
		return nil
	}
	// One switch is for both: what it has kept from holding must not begin to with the other.
	retention, keep := kept(q.RetentionEnabled, q.RetentionSeconds, q.CompletedRetentionSeconds)
	if e.retention != nil {
		retention = *e.retention
	}
	if e.keep != nil {
		keep = *e.keep
	}
	q.RetentionEnabled, q.RetentionSeconds, q.CompletedRetentionSeconds = retention > 0 || keep > 0, retention, keep
	return nil
}

// listedStream is a stream with its settings, spelled as a PUT takes them.
type listedStream struct {
	Name         string  `json:"name"`
	Project      string  `json:"project"`
	UnkeyedLanes int32   `json:"unkeyed_lanes"`
	DedupWindow  string  `json:"dedup_window"`
	Retention    string  `json:"retention"`
	KeepConsumed string  `json:"keep_consumed"`
	CreatedAt    instant `json:"created_at"`
}

func (p *project) listed(q *db.StreamPageRow) listedStream {
	retention, keep := kept(q.RetentionEnabled, q.RetentionSeconds, q.CompletedRetentionSeconds)
	return listedStream{Name: q.Name, Project: p.name, UnkeyedLanes: q.UnkeyedLanes, DedupWindow: seconds(q.DedupWindowSeconds),
		Retention: seconds(retention), KeepConsumed: seconds(keep), CreatedAt: instant(q.CreatedAt)}
}

func seconds(n int32) string { return formatDuration(time.Duration(n) * time.Second) }

// answerStream answers with a stream and its numbers.
func (a *API) answerStream(w http.ResponseWriter, r *request, p *project, q *catalog.Queue) error {
	n, err := counted(a, r, func(ctx context.Context) (db.StreamNumbersRow, error) {
		return a.queries.StreamNumbers(ctx, db.StreamNumbersParams{QueueID: q.ID})
	})
	if err != nil {
		return err
	}
	return a.reply(w, http.StatusOK, struct {
		listedStream
		Messages int64 `json:"messages"` // retained
		Keys     int64 `json:"keys"`
		InUse    int64 `json:"unkeyed_lanes_in_use"`
	}{p.listed(&db.StreamPageRow{Name: q.Name, UnkeyedLanes: q.UnkeyedLanes, DedupWindowSeconds: q.DedupWindowSeconds, RetentionSeconds: q.RetentionSeconds,
		CompletedRetentionSeconds: q.CompletedRetentionSeconds, RetentionEnabled: q.RetentionEnabled, CreatedAt: q.CreatedAt}), n.Messages, n.Keys, n.Unkeyed})
}

func (a *API) putStream(w http.ResponseWriter, r *request) error {
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	edit, err := readStreamEdit(body)
	if err != nil {
		return err
	}
	p, name, err := a.named(r, "stream")
	if err != nil {
		return err
	}
	lanes := int32(catalog.UnkeyedLanes)
	if edit.lanes != nil {
		lanes = *edit.lanes
	}
	q, err := p.ConfigureStream(r.Context(), name, lanes, edit.apply)
	if errors.Is(err, catalog.ErrNoProject) {
		return p.missing("stream", name)
	} else if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	if a.Changed != nil {
		a.Changed(q.ID)
	}
	return a.answerStream(w, r, p, q)
}

func (a *API) getStream(w http.ResponseWriter, r *request) error {
	p, name, err := a.named(r, "stream")
	if err != nil {
		return err
	}
	p.ForgetQueue(name) // it may have been changed elsewhere
	p, q, err := a.stream(r)
	if err != nil {
		return err
	}
	return a.answerStream(w, r, p, q)
}

func (a *API) listStreams(w http.ResponseWriter, r *request) error {
	limit, after, err := pagingNames(r)
	if err != nil {
		return err
	}
	p, err := a.project(r)
	if err != nil {
		return err
	}
	var rows []db.StreamPageRow
	if p.Catalog != nil {
		if rows, err = p.Streams(r.Context(), after, limit+1); err != nil {
			return a.databaseError(r, err, "query failed")
		}
	}
	rows, next := more(rows, limit, func(q db.StreamPageRow) []byte { return []byte(q.Name) })
	list := make([]listedStream, len(rows))
	for i := range rows {
		list[i] = p.listed(&rows[i])
	}
	return a.reply(w, http.StatusOK, struct {
		Streams []listedStream `json:"streams"`
		Next    *string        `json:"next_cursor"`
	}{list, next})
}

func (a *API) deleteStream(w http.ResponseWriter, r *request) error {
	p, name, err := a.named(r, "stream")
	if err != nil {
		return err
	}
	id, existed, err := p.Delete(r.Context(), name)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	if !existed {
		return p.missing("stream", name)
	}
	if a.Changed != nil {
		a.Changed(id)
	}
	return a.write(w, http.StatusOK, []byte(`{"deleted":true}`))
}

// named is the project of a call and the name in its path, whether or not there is anything of that name.
func (a *API) named(r *request, what string) (*project, string, error) {
	p, err := a.project(r)
	if err != nil {
		return nil, "", err
	}
	name := r.params[0]
	if !validName(name, maxName) {
		return nil, "", badName(what, maxName)
	}
	if p.Catalog == nil {
		return nil, "", p.missing(what, name)
	}
	return p, name, nil
}
