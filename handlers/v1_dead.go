package handlers

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"ferrymq/catalog"
	"ferrymq/db"
	"ferrymq/groupcommit"
	"ferrymq/segment"
)

const (
	maxDeadIDs     = 1000
	deadChunk      = 100     // dead letters that one transaction moves, or less when they are large
	deadChunkBytes = 8 << 20 // or as many as lie within so many bytes
	deadChunkIDs   = 16      // the same when they are named, of any size
	signatureReach = 100_000 // newest dead letters that are counted
)

func laneDeadRoutes() []route {
	return []route{
		on("GET", "/v1/subscriptions/{sub}/dead-letters", readOnly, (*API).listLaneDead),
		on("GET", "/v1/subscriptions/{sub}/dead-letters/signatures", readOnly, (*API).listSignatures),
		on("POST", "/v1/subscriptions/{sub}/dead-letters/redrive", admin, (*API).redriveLaneDead),
		on("DELETE", "/v1/subscriptions/{sub}/dead-letters", admin, (*API).deleteLaneDead),
	}
}

// listLaneDead answers with dead letters, the newest first. A page ends early when it gets large.
func (a *API) listLaneDead(w http.ResponseWriter, r *request) error {
	limit, from, err := paging(r, 24)
	if err != nil {
		return err
	}
	q := db.LaneDeadLettersParams{BeforeTime: distant, BeforeID: uuid.Max, Max: limit + 1, Bytes: streamBytes}
	if from != nil {
		q.BeforeTime, q.BeforeID = time.UnixMicro(int64(binary.BigEndian.Uint64(from))), uuid.UUID(from[8:])
		if y := q.BeforeTime.UTC().Year(); y < 1 || y > 9999 {
			return badQuery("cursor") // not ours, and more than the database can compare
		}
	}
	p, g, err := a.subscription(r)
	if err != nil {
		return err
	}
	q.GroupID = g.ID
	var rows []db.LaneDeadLettersRow
	if values := query(r.URL); values.Has("signature") {
		var found []db.LaneDeadLettersOfRow
		found, err = a.queries.LaneDeadLettersOf(r.Context(), db.LaneDeadLettersOfParams{GroupID: q.GroupID, Signature: groupcommit.Clip(strings.ToValidUTF8(values.Get("signature"), "\uFFFD")), BeforeTime: q.BeforeTime,
			BeforeID: q.BeforeID, Max: q.Max, Bytes: q.Bytes})
		for _, x := range found {
			rows = append(rows, db.LaneDeadLettersRow(x))
		}
	} else {
		rows, err = a.queries.LaneDeadLetters(r.Context(), q)
	}
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	more := len(rows) > 0 && rows[0].InPage > min(int64(len(rows)), limit)
	rows = rows[:min(int64(len(rows)), limit)]
	b := []byte(`{"dead_letters":[`)
	for i := range rows {
		if i > 0 {
			b = append(b, ',')
		}
		b = p.appendLaneDead(b, r.engine.Keys, g.Lanes.Stream, &rows[i])
	}
	var next []byte
	if more {
		last := &rows[len(rows)-1]
		next = append(binary.BigEndian.AppendUint64(nil, uint64(last.FailedAt.UnixMicro())), last.ID[:]...)
	}
	return a.write(w, http.StatusOK, appendNext(append(b, ']'), next))
}

func (p *project) appendLaneDead(b []byte, keys *segment.Keys, stream string, d *db.LaneDeadLettersRow) []byte {
	b = appendID(append(b, `{"id":"`...), deadPrefix, d.ID[:])
	b = append(b, `","message":{`...)
	m := segment.Raw{Payload: []byte("null")}
	open, err := segment.Decode(keys, d.Codec, d.KeyNo, d.MessageID, 1, d.Frames)
	if err == nil {
		m = open.Raw(0)
	}
	b = p.appendMessage(b, stream, &groupcommit.Span{Row: catalog.Row{ID: d.PartitionID}, Start: d.MessageOffset, Partition: &catalog.Partition{Name: d.PartitionName, Hidden: d.Hidden}},
		&groupcommit.Segment{CreatedAt: d.MessageCreatedAt}, &m)
	if err != nil {
		b = append(b, `,"unreadable":true`...)
	}
	b = strconv.AppendInt(append(b, `},"attempts":`...), int64(d.RetryCount), 10)
	b = quote(append(b, `,"error":`...), d.ErrorMessage)
	b = quote(append(b, `,"signature":`...), d.Signature)
	b = append(b, `,"consumer":`...)
	if d.Consumer != nil && *d.Consumer != "" {
		b = quote(b, *d.Consumer)
	} else {
		b = append(b, "null"...)
	}
	first := d.FailedAt
	if d.FirstFailedAt != nil {
		first = *d.FirstFailedAt
	}
	b = first.UTC().AppendFormat(append(b, `,"first_failed_at":"`...), timeMilli)
	b = d.FailedAt.UTC().AppendFormat(append(b, `","failed_at":"`...), timeMilli)
	return append(b, `"}`...)
}

// listSignatures groups the newest dead letters by their errors, the most frequent first.
func (a *API) listSignatures(w http.ResponseWriter, r *request) error {
	limit, from, err := paging(r, -1)
	if err == nil && from != nil && len(from) < 8 {
		err = badQuery("cursor")
	}
	if err != nil {
		return err
	}
	_, g, err := a.subscription(r)
	if err != nil {
		return err
	}
	q := db.LaneSignaturesParams{GroupID: g.ID, Reach: signatureReach, BelowCount: math.MaxInt64, Max: limit + 1}
	if from != nil {
		q.BelowCount = int64(binary.BigEndian.Uint64(from))
		q.BelowSignature = strings.ToValidUTF8(groupcommit.Clip(string(from[8:])), "")
	}
	rows, err := a.queries.LaneSignatures(r.Context(), q)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	var next []byte
	if int64(len(rows)) > limit {
		rows = rows[:limit]
		last := &rows[limit-1]
		next = append(binary.BigEndian.AppendUint64(nil, uint64(last.Count)), last.Signature...)
	}
	b := []byte(`{"signatures":[`)
	for i := range rows {
		if i > 0 {
			b = append(b, ',')
		}
		s := &rows[i]
		b = quote(append(b, `{"signature":`...), s.Signature)
		b = strconv.AppendInt(append(b, `,"count":`...), s.Count, 10)
		b = s.FirstSeen.UTC().AppendFormat(append(b, `,"first_seen":"`...), timeMilli)
		b = s.LastSeen.UTC().AppendFormat(append(b, `","last_seen":"`...), timeMilli)
		b = append(appendID(append(b, `","example":"`...), deadPrefix, s.Example[:]), `"}`...)
	}
	return a.write(w, http.StatusOK, appendNext(append(b, ']'), next))
}

// selection is which dead letters a call is about: exactly one of the three.
type selection struct {
	ids       [][]byte // as they stood in the body
	named     bool     // by ids
	signature *string
	all       bool
}

func readSelection(body []byte) (s selection, err error) {
	err = parse(body, func(d *document) error {
		return d.object(func(name string) (err error) {
			switch name {
			case "ids":
				if null, err := d.null(); null || err != nil {
					return err
				}
				if d.kind() != '[' {
					return bad("ids must be an array")
				}
				s.named, s.ids = true, nil
				return d.array(func(i int) error {
					if i == maxDeadIDs {
						return bad("too many ids: at most %d", maxDeadIDs)
					}
					raw, err := d.value()
					s.ids = append(s.ids, raw)
					return err
				})
			case "signature":
				s.signature, err = d.optionalText()
				return err
			case "all":
				return d.boolean(&s.all)
			}
			return d.skip()
		})
	})
	ways := 0
	for _, given := range []bool{s.named, s.signature != nil, s.all} {
		if given {
			ways++
		}
	}
	if err == nil && ways != 1 {
		err = bad("exactly one of ids, signature and all is required")
	}
	return s, err
}

func (a *API) redriveLaneDead(w http.ResponseWriter, r *request) error {
	return a.eachDead(w, r, "redriven", func(g *catalog.Group, ids []uuid.UUID) (done, unreadable []uuid.UUID, err error) {
		return r.engine.RedriveLanes(r.Context(), g, ids)
	})
}

func (a *API) deleteLaneDead(w http.ResponseWriter, r *request) error {
	return a.eachDead(w, r, "deleted", func(g *catalog.Group, ids []uuid.UUID) (done, unreadable []uuid.UUID, err error) {
		done, err = a.queries.LaneDeadDelete(r.Context(), db.LaneDeadDeleteParams{Ids: ids, GroupID: g.ID})
		return done, nil, err
	})
}

// eachDead does something with the selected dead letters, a few at a time. Each step stands, whatever becomes of the next: a call
// that failed can be made again.
func (a *API) eachDead(w http.ResponseWriter, r *request, what string, do func(g *catalog.Group, ids []uuid.UUID) (done, unreadable []uuid.UUID, err error)) error {
	body, err := a.body(w, r.Request)
	if err != nil {
		return err
	}
	sel, err := readSelection(body)
	if err != nil {
		return err
	}
	p, g, err := a.subscription(r)
	if err != nil {
		return err
	}
	n, became := 0, make(map[uuid.UUID]error)
	step := func(ids []uuid.UUID) error {
		done, unreadable, err := do(g, ids)
		for _, id := range done {
			became[id] = nil
		}
		for _, id := range unreadable {
			became[id] = groupcommit.ErrUnreadable
		}
		n += len(done)
		return err
	}
	b := append([]byte(`{"`), what...)
	if sel.named {
		ids := make([]uuid.UUID, len(sel.ids)) // the nil one is nobody's
		var known []uuid.UUID
		for i, s := range sel.ids {
			if raw, ok := decodeID(text(s), deadPrefix, 16); ok {
				if ids[i] = uuid.UUID(raw); !slices.Contains(known, ids[i]) {
					known = append(known, ids[i])
				}
			}
		}
		for chunk := range slices.Chunk(known, deadChunkIDs) {
			if err = step(chunk); err != nil {
				break
			}
		}
		b = strconv.AppendInt(append(b, `":`...), int64(n), 10)
		b = append(b, `,"results":[`...)
		for i, id := range ids {
			if i > 0 {
				b = append(b, ',')
			}
			why, found := became[id]
			if !found {
				why = groupcommit.ErrNoDeadLetter
			} else if why == nil {
				became[id] = groupcommit.ErrNoDeadLetter // named twice
			}
			b = append(append(b, `{"id":`...), sel.ids[i]...)
			b = strconv.AppendBool(append(b, `,"ok":`...), why == nil)
			if why != nil {
				b = quote(append(b, `,"error":`...), why.Error())
			}
			b = append(b, '}')
		}
		b = append(b, ']')
	} else {
		err = a.walkDead(r.Context(), g, sel.signature, step)
		b = strconv.AppendInt(append(b, `":`...), int64(n), 10)
	}
	switch {
	case errors.Is(err, catalog.ErrGone):
		p.Catalog.ForgetSubscription(g.Name)
		return p.missing("subscription", g.Name)
	case errors.Is(err, groupcommit.ErrNoKey):
		return failed(pushError(err))
	case err != nil:
		return a.databaseError(r, err, "query failed")
	}
	return a.write(w, http.StatusOK, append(b, '}'))
}

// walkDead goes over a subscription's dead letters as they are now, the oldest first: what comes back meanwhile is not met again.
func (a *API) walkDead(ctx context.Context, g *catalog.Group, signature *string, step func(ids []uuid.UUID) error) error {
	until, err := a.queries.DeadLetterNow(ctx)
	q := db.LaneDeadScanParams{GroupID: g.ID, AfterTime: time.Unix(0, 0), Until: until, Max: deadChunk, Bytes: deadChunkBytes}
	for err == nil {
		var rows []db.LaneDeadScanRow
		if signature == nil {
			rows, err = a.queries.LaneDeadScan(ctx, q)
		} else {
			var found []db.LaneDeadScanOfRow
			found, err = a.queries.LaneDeadScanOf(ctx, db.LaneDeadScanOfParams{GroupID: q.GroupID, Signature: groupcommit.Clip(*signature), AfterTime: q.AfterTime, AfterID: q.AfterID,
				Until: q.Until, Max: q.Max, Bytes: q.Bytes})
			for _, x := range found {
				rows = append(rows, db.LaneDeadScanRow(x))
			}
		}
		if err != nil || len(rows) == 0 {
			return err
		}
		ids := make([]uuid.UUID, len(rows))
		for i, x := range rows {
			ids[i], q.AfterTime, q.AfterID = x.ID, x.FailedAt, x.ID
		}
		err = step(ids)
	}
	return err
}
