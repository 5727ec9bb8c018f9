package handlers

import (
	"fmt"
	"net/http"
	"slices"
	"time"

	"ferrymq/metrics"
)

// hitRatio is how much was found in the cache, in percent; null when nothing was looked for.
func hitRatio(hits, reads int64) *float64 { return share(hits, hits+reads) }

func share(n, of int64) *float64 {
	if of == 0 {
		return nil
	}
	x := metrics.Round(float64(n) / float64(of) * 100)
	return &x
}

// sizeText is a number of bytes for people.
func sizeText(n int64) string {
	for _, u := range []string{"bytes", "kB", "MB", "GB"} {
		if n < 10*1024 {
			return fmt.Sprintf("%d %s", n, u)
		}
		n = (n + 512) / 1024
	}
	return fmt.Sprintf("%d TB", n)
}

func timeOf(t *time.Time) (i instant) {
	if t != nil {
		i = instant(*t)
	}
	return i
}

// postgresStats reads what the database's statistics say about our tables, as far as any role may see it.
func (a *API) postgresStats(w http.ResponseWriter, r *request) error {
	d, err := a.queries.PostgresDatabase(r.Context())
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	tables, err := a.queries.PostgresTables(r.Context())
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	indexes, err := a.queries.PostgresIndexes(r.Context())
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	active, err := a.queries.PostgresActive(r.Context())
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	type cache struct {
		DiskReads     int64    `json:"diskReads"`
		CacheHits     int64    `json:"cacheHits"`
		CacheHitRatio *float64 `json:"cacheHitRatio"`
	}
	type database struct {
		Database string `json:"database"`
		cache
	}
	type table struct {
		Schema string `json:"schema"`
		Table  string `json:"table"`
		cache
	}
	type index struct {
		Schema string `json:"schema"`
		Table  string `json:"table"`
		Index  string `json:"index"`
		cache
	}
	type sum struct {
		DiskReads int64    `json:"diskReads"`
		CacheHits int64    `json:"cacheHits"`
		HitRatio  *float64 `json:"hitRatio"`
	}
	type dead struct {
		Schema         string   `json:"schema"`
		Table          string   `json:"table"`
		DeadTuples     int64    `json:"deadTuples"`
		LiveTuples     int64    `json:"liveTuples"`
		DeadPercentage *float64 `json:"deadPercentage"`
		LastVacuum     instant  `json:"lastVacuum"`
		LastAutovacuum instant  `json:"lastAutovacuum"`
	}
	type hot struct {
		Schema              string   `json:"schema"`
		Table               string   `json:"table"`
		TotalUpdates        int64    `json:"totalUpdates"`
		HotUpdates          int64    `json:"hotUpdates"`
		HotUpdatePercentage *float64 `json:"hotUpdatePercentage"`
	}
	type query struct {
		Pid           int32   `json:"pid"`
		Duration      float64 `json:"duration"`
		State         string  `json:"state"`
		WaitEventType *string `json:"waitEventType"`
		WaitEvent     *string `json:"waitEvent"`
	}
	type vacuum struct {
		Table            string  `json:"table"`
		LastAutovacuum   instant `json:"lastAutovacuum"`
		DeadTuples       int64   `json:"deadTuples"`
		AutovacuumCount  int64   `json:"autovacuumCount"`
		AutoanalyzeCount int64   `json:"autoanalyzeCount"`
	}
	type size struct {
		Table          string `json:"table"`
		TotalSize      string `json:"totalSize"`
		TotalSizeBytes int64  `json:"totalSizeBytes"`
		TableSize      string `json:"tableSize"`
		TableSizeBytes int64  `json:"tableSizeBytes"`
		IndexSize      string `json:"indexSize"`
		IndexSizeBytes int64  `json:"indexSizeBytes"`
	}
	var answer struct {
		Timestamp     instant  `json:"timestamp"`
		Database      string   `json:"database"`
		DatabaseCache database `json:"databaseCache"`
		TableCache    []table  `json:"tableCache"`
		IndexCache    []index  `json:"indexCache"`
		CacheSummary  struct {
			Tables  sum `json:"tables"`
			Indexes sum `json:"indexes"`
		} `json:"cacheSummary"`
		DeadTuples       []dead   `json:"deadTuples"`
		HotUpdates       []hot    `json:"hotUpdates"`
		ActiveQueries    []query  `json:"activeQueries"`
		AutovacuumStatus []vacuum `json:"autovacuumStatus"`
		BufferConfig     struct {
			SharedBuffers      string `json:"sharedBuffers"`
			SharedBuffersBytes int64  `json:"sharedBuffersBytes"`
			EffectiveCacheSize string `json:"effectiveCacheSize"`
			WorkMem            string `json:"workMem"`
		} `json:"bufferConfig"`
		BufferUsage []struct{} `json:"bufferUsage"` // what is in the buffers, only a superuser may see
		TableSizes  []size     `json:"tableSizes"`
	}
	const schema = "ferrymq"
	answer.Timestamp, answer.Database = instant(d.Now), d.Name
	answer.DatabaseCache = database{d.Name, cache{d.BlksRead, d.BlksHit, hitRatio(d.BlksHit, d.BlksRead)}}
	b := &answer.BufferConfig
	b.SharedBuffers, b.SharedBuffersBytes, b.EffectiveCacheSize, b.WorkMem = d.SharedBuffers, d.SharedBuffersBytes, d.EffectiveCacheSize, d.WorkMem
	inTables, inIndexes := &answer.CacheSummary.Tables, &answer.CacheSummary.Indexes
	for _, t := range tables {
		inTables.DiskReads, inTables.CacheHits = inTables.DiskReads+t.HeapRead, inTables.CacheHits+t.HeapHit
		answer.TableCache = append(answer.TableCache, table{schema, t.Name, cache{t.HeapRead, t.HeapHit, hitRatio(t.HeapHit, t.HeapRead)}})
		answer.DeadTuples = append(answer.DeadTuples, dead{schema, t.Name, t.Dead, t.Live, share(t.Dead, t.Dead+t.Live), timeOf(t.LastVacuum), timeOf(t.LastAutovacuum)})
		answer.HotUpdates = append(answer.HotUpdates, hot{schema, t.Name, t.Updates, t.HotUpdates, share(t.HotUpdates, t.Updates)})
		answer.AutovacuumStatus = append(answer.AutovacuumStatus, vacuum{t.Name, timeOf(t.LastAutovacuum), t.Dead, t.AutovacuumCount, t.AutoanalyzeCount})
		answer.TableSizes = append(answer.TableSizes, size{t.Name, sizeText(t.TotalBytes), t.TotalBytes, sizeText(t.TableBytes), t.TableBytes, sizeText(t.IndexBytes), t.IndexBytes})
	}
	for _, i := range indexes {
		inIndexes.DiskReads, inIndexes.CacheHits = inIndexes.DiskReads+i.BlksRead, inIndexes.CacheHits+i.BlksHit
		answer.IndexCache = append(answer.IndexCache, index{schema, i.TableName, i.Name, cache{i.BlksRead, i.BlksHit, hitRatio(i.BlksHit, i.BlksRead)}})
	}
	inTables.HitRatio, inIndexes.HitRatio = hitRatio(inTables.CacheHits, inTables.DiskReads), hitRatio(inIndexes.CacheHits, inIndexes.DiskReads)
	for _, q := range active {
		answer.ActiveQueries = append(answer.ActiveQueries, query{q.Pid, metrics.Round(q.Seconds), q.State, q.WaitEventType, q.WaitEvent})
	}
	slices.SortStableFunc(answer.TableSizes, func(x, y size) int { return int(min(max(y.TotalSizeBytes-x.TotalSizeBytes, -1), 1)) })
	return a.reply(w, http.StatusOK, &answer)
}
