package handlers

import (
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"

	"ferrymq/db"
	"ferrymq/groupcommit"
)

func systemRoutes() []route {
	return []route{
		on("GET", "/api/v1/system/maintenance", admin, (*API).maintenance),
		on("POST", "/api/v1/system/maintenance", admin, (*API).setPushMaintenance),
		on("GET", "/api/v1/system/maintenance/pop", admin, (*API).popMaintenance),
		on("POST", "/api/v1/system/maintenance/pop", admin, (*API).setPopMaintenance),
	}
}

// switches are the maintenance switches as last known. Requests only read the flags, so an outage of the database changes nothing.
type switches struct {
	push, pop atomic.Bool

	mu      sync.Mutex
	version int64
}

// SetMaintenance learns the switches from the database and puts them into effect; what is older than what is known is ignored.
// Pops that are parked end when pops are switched off.
func (a *API) SetMaintenance(e *groupcommit.Engine, s db.SystemGetRow) {
	a.switches.mu.Lock()
	defer a.switches.mu.Unlock()
	if s.Version < a.switches.version {
		return
	}
	a.switches.version = s.Version
	if a.switches.push.Swap(s.PushMaintenance) != s.PushMaintenance {
		a.Log.Warn("push maintenance", "on", s.PushMaintenance)
	}
	e.PauseMoves(s.PushMaintenance)
	if a.switches.pop.Load() != s.PopMaintenance {
		a.Log.Warn("pop maintenance", "on", s.PopMaintenance)
	}
	// A pop that has seen the flag off must find the engine ready to park it, or be ended by it.
	if s.PopMaintenance {
		a.switches.pop.Store(true)
		e.PausePops(true)
	} else {
		e.PausePops(false)
		a.switches.pop.Store(false)
	}
}

// maintenanceRetry is the Retry-After of what push maintenance refuses, in seconds.
const maintenanceRetry = 5

// pushRefused is the answer to whatever would store a message during push maintenance, nil when there is none.
func (a *API) pushRefused() error {
	if !a.switches.push.Load() {
		return nil
	}
	return &httpError{status: http.StatusServiceUnavailable, text: "push maintenance", retry: maintenanceRetry}
}

// popPaused says whether every pop is answered 204.
func (a *API) popPaused() bool { return a.switches.pop.Load() }

func (a *API) maintenance(w http.ResponseWriter, r *request) error {
	b := strconv.AppendBool([]byte(`{"maintenanceMode":`), a.switches.push.Load())
	b = strconv.AppendBool(append(b, `,"popMaintenanceMode":`...), a.switches.pop.Load())
	return a.write(w, http.StatusOK, append(b, `,"bufferedMessages":0,"bufferHealthy":true,"bufferStats":{"pendingCount":0,"failedCount":0,"dbHealthy":true,`+
		`"failedFiles":{"count":0,"totalBytes":0,"totalMB":0.0,"failoverCount":0,"qos0Count":0}}}`...))
}

func (a *API) popMaintenance(w http.ResponseWriter, r *request) error {
	if a.popPaused() {
		return a.write(w, http.StatusOK, []byte(`{"popMaintenanceMode":true,"message":"Pop maintenance mode is ON. All pops answer 204."}`))
	}
	return a.write(w, http.StatusOK, []byte(`{"popMaintenanceMode":false,"message":"Pop maintenance mode is OFF. Normal operation."}`))
}

func (a *API) setPushMaintenance(w http.ResponseWriter, r *request) error {
	s, err := a.setMaintenance(w, r, func(on *bool) db.SystemSetParams { return db.SystemSetParams{Push: on} })
	if err != nil {
		return err
	}
	b := strconv.AppendBool([]byte(`{"maintenanceMode":`), s.PushMaintenance)
	b = append(b, `,"bufferedMessages":0,"bufferHealthy":true,"message":"Maintenance mode `...)
	if s.PushMaintenance {
		return a.write(w, http.StatusOK, append(b, `ENABLED. Pushes are refused with 503."}`...))
	}
	return a.write(w, http.StatusOK, append(b, `DISABLED."}`...))
}

func (a *API) setPopMaintenance(w http.ResponseWriter, r *request) error {
	s, err := a.setMaintenance(w, r, func(on *bool) db.SystemSetParams { return db.SystemSetParams{Pop: on} })
	if err != nil {
		return err
	}
	if s.PopMaintenance {
		return a.write(w, http.StatusOK, []byte(`{"popMaintenanceMode":true,"message":"Pop maintenance mode ENABLED. All POP operations will return empty arrays."}`))
	}
	return a.write(w, http.StatusOK, []byte(`{"popMaintenanceMode":false,"message":"Pop maintenance mode DISABLED."}`))
}

// setMaintenance stores the switch and puts it into effect here; other brokers read it with their heartbeat.
func (a *API) setMaintenance(w http.ResponseWriter, r *request, change func(on *bool) db.SystemSetParams) (s db.SystemGetRow, err error) {
	body, err := a.body(w, r.Request)
	if err != nil {
		return s, err
	}
	var on *bool
	err = parse(body, func(d *document) error {
		return d.object(func(name string) error {
			raw, err := d.value()
			if err != nil || name != "enabled" {
				return err
			}
			on = nil
			if text := string(raw); text == "true" || text == "false" {
				yes := text == "true"
				on = &yes
			}
			return nil
		})
	})
	if err != nil || on == nil {
		return s, bad("enabled (boolean) is required")
	}
	row, err := a.direct.SystemSet(r.Context(), change(on))
	if err != nil {
		return s, a.databaseError(r, err, "query failed")
	}
	s = db.SystemGetRow(row)
	a.SetMaintenance(r.engine, s)
	return s, nil
}
