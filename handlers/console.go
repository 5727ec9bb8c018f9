package handlers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"ferrymq/auth"
	"ferrymq/db"
	"ferrymq/segment"
)

// consoleRoutes are what the web console asks for beside the two APIs: where everything stands, at a glance. They are no promise to
// anybody else. Root key and tokens see all projects, an API key its own.
func consoleRoutes() []route {
	return []route{
		on("GET", "/console/session", readOnly, (*API).consoleSession),
		on("GET", "/console/overview", readOnly, (*API).consoleOverview),
		on("GET", "/console/queues", readOnly, (*API).consoleQueues),
		on("GET", "/console/queue", readOnly, (*API).consoleQueue),
		on("GET", "/console/groups", readOnly, (*API).consoleGroups),
		on("GET", "/console/blocked", readOnly, (*API).consoleBlocked),
		on("GET", "/console/dead-letters", readOnly, (*API).consoleDead),
		on("GET", "/console/dead-letters/ids", readOnly, (*API).consoleDeadIDs),
		on("GET", "/console/message", readOnly, (*API).consoleMessage),
		on("GET", "/console/system", readOnly, (*API).consoleSystem),
	}
}

// consoleSession says who the caller is and what it may do, so that the console shows no button that would be refused.
func (a *API) consoleSession(w http.ResponseWriter, r *request) error {
	answer := struct {
		Version        string  `json:"version"`
		Authentication bool    `json:"authentication"`
		Subject        string  `json:"subject"`
		Project        *string `json:"project"` // of an API key, which sees no other
		Consume        bool    `json:"consume"` // may move, retry and bury messages
		Admin          bool    `json:"admin"`
		Broker         string  `json:"broker"`
	}{Version: Version, Authentication: a.Auth != nil, Subject: r.sub, Consume: true, Admin: true, Broker: a.Metrics.Name}
	if a.Auth != nil {
		answer.Consume, answer.Admin = r.roles&readWrite.roles() != 0, r.roles&admin.roles() != 0
	}
	if r.key != nil {
		answer.Project, answer.Consume, answer.Admin = &r.key.Name, r.key.Scopes&auth.Consume != 0, r.key.Scopes&auth.Manage != 0
	}
	return a.reply(w, http.StatusOK, &answer)
}

// lookout is where the groups and queues of a project stood at a moment.
type lookout struct {
	groups []db.ConsoleGroupsRow
	queues []db.ConsoleQueuesRow
	of     map[int32][]int // the places in groups, by queue
	taken  time.Time
	until  time.Time
}

// lookouts are kept for a moment: several people look at the same page.
type lookouts struct {
	mu   sync.Mutex
	of   map[int32]*lookout // by project, 0: all
	room chan struct{}
}

const (
	lookoutLeast = time.Second
	lookoutMost  = 30 * time.Second
	lookoutShare = 10 // at most such a part of the time is spent on it
)

// seen is the project that the caller sees, nil for all.
func (r *request) seen() *int32 {
	if r.key != nil {
		return &r.key.Project
	}
	return nil
}

func (a *API) lookout(r *request) (*lookout, error) {
	project := r.seen()
	id, c := int32(0), &a.lookouts
	if project != nil {
		id = *project
	}
	fresh := func() *lookout {
		c.mu.Lock()
		defer c.mu.Unlock()
		if s := c.of[id]; s != nil && time.Now().Before(s.until) {
			return s
		}
		return nil
	}
	if s := fresh(); s != nil {
		return s, nil
	}
	select {
	case c.room <- struct{}{}:
		defer func() { <-c.room }()
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	if s := fresh(); s != nil { // taken while this one waited
		return s, nil
	}
	return counted(a, r, func(ctx context.Context) (*lookout, error) {
		s := &lookout{taken: time.Now(), of: make(map[int32][]int)}
		var err error
		if s.groups, err = a.queries.ConsoleGroups(ctx, db.ConsoleGroupsParams{ProjectID: project}); err != nil {
			return nil, err
		}
		if s.queues, err = a.queries.ConsoleQueues(ctx, db.ConsoleQueuesParams{ProjectID: project}); err != nil {
			return nil, err
		}
		for i, g := range s.groups {
			s.of[g.QueueID] = append(s.of[g.QueueID], i)
		}
		s.until = time.Now().Add(min(max(lookoutShare*time.Since(s.taken), lookoutLeast), lookoutMost))
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.of == nil {
			c.of = make(map[int32]*lookout)
		}
		for k, x := range c.of { // projects come and go
			if time.Since(x.until) > lookoutMost {
				delete(c.of, k)
			}
		}
		c.of[id] = s
		return s, nil
	})
}

// consoleGroup is a group of either API.
type consoleGroup struct {
	Project   string `json:"project"`
	Queue     string `json:"queue"`
	Name      string `json:"name"` // "" for consumers without a group
	Kind      string `json:"kind"` // group or subscription
	Paused    bool   `json:"paused"`
	Lag       int64  `json:"lag"`
	Keys      int64  `json:"keys"` // with a lag
	Leased    int64  `json:"leased"`
	Failing   int64  `json:"failing"`
	Oldest    *int64 `json:"oldest_seconds"`
	Delivered int64  `json:"delivered"` // this and what follows: in the last ten minutes
	Done      int64  `json:"done"`
	Failed    int64  `json:"failed"`
	Dead      int64  `json:"dead"`
	Pushed    int64  `json:"pushed"` // to its queue
}

// queueMode is the group of those who consume without one.
const queueMode = "__QUEUE_MODE__"

func kindOf(kind int16) string {
	if kind == 1 {
		return "subscription"
	}
	return "group"
}

func consoleName(name string) string {
	if name == queueMode {
		return ""
	}
	return name
}

func (s *lookout) group(g *db.ConsoleGroupsRow, pushed int64) consoleGroup {
	c := consoleGroup{g.Project, g.Queue, consoleName(g.Name), kindOf(g.Kind), g.Paused, g.Lag, g.Keys, g.Leased, g.Failing, nil, g.Delivered, g.Done, g.Failed, g.Dead, pushed}
	if g.Oldest >= 0 {
		c.Oldest = &g.Oldest
	}
	return c
}

// pushed is what was pushed to each queue in the last ten minutes.
func (s *lookout) pushed() map[int32]int64 {
	of := make(map[int32]int64, len(s.queues))
	for _, q := range s.queues {
		of[q.ID] = q.Pushed
	}
	return of
}

// trouble is something that does not go on by itself, in a sentence. Page and Query say where the console shows more.
type trouble struct {
	Severity string            `json:"severity"` // bad or warn
	Text     string            `json:"text"`
	Page     string            `json:"page"`
	Query    map[string]string `json:"query"`
	weight   int64
}

const (
	waitsLong     = 60  // seconds that the oldest message may wait before somebody is missed
	waitsTooLong  = 300 // and from when on it is bad
	growthLeast   = 100 // messages in ten minutes that a lag may grow by
	lockCrowd     = 10
	openTooLong   = 300 // seconds of a transaction
	brokerSilent  = 15  // seconds
	brokerGone    = 600 // after which a broker that left without a word is no news
	troublesMost  = 50
	deadReach     = 100_000
	deadMost      = 2000
	blockedMost   = 500
	sizeReach     = 100_000
	consolePage   = 50
	consoleSearch = 255
)

func (g consoleGroup) title() string {
	switch {
	case g.Name == "":
		return fmt.Sprintf("Queue %q", g.Queue)
	case g.Kind == "subscription":
		return fmt.Sprintf("Subscription %q", g.Name)
	}
	return fmt.Sprintf("Group %q of queue %q", g.Name, g.Queue)
}

// troubles of the groups.
func (s *lookout) troubles() (all []trouble) {
	pushed := s.pushed()
	for i := range s.groups {
		g := s.group(&s.groups[i], pushed[s.groups[i].QueueID])
		say := func(severity, page string, weight int64, format string, args ...any) {
			all = append(all, trouble{severity, fmt.Sprintf(format, args...), page, map[string]string{"search": g.Name, "project": g.Project, "queue": g.Queue}, weight})
		}
		if g.Failing > 0 {
			say("bad", "blocked", g.Failing, "%s: %s.", g.title(), plural(g.Failing, "key is blocked by a message that fails", "keys are blocked by messages that fail"))
		}
		if g.Oldest == nil || g.Lag == 0 {
			continue
		}
		oldest, grown := *g.Oldest, min(g.Pushed-g.Done-g.Dead, g.Lag)
		severity := "warn"
		if oldest > waitsTooLong {
			severity = "bad"
		}
		waiting := plural(g.Lag, "message waits", "messages wait") + ", the oldest for " + ago(oldest)
		switch {
		case g.Paused:
			say("warn", "groups", oldest, "%s is paused: %s.", g.title(), waiting)
		case oldest > waitsLong && g.Delivered == 0 && g.Leased == 0 && g.Failing == 0:
			say("bad", "groups", oldest, "%s has no consumer: %s.", g.title(), waiting)
		case oldest > waitsLong/2 && grown > growthLeast:
			say(severity, "groups", oldest, "%s falls behind: %s, %d more than ten minutes ago.", g.title(), waiting, grown)
		case oldest > waitsTooLong:
			say("warn", "groups", oldest, "%s is behind: %s.", g.title(), waiting)
		}
	}
	return all
}

func plural(n int64, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.FormatInt(n, 10) + " " + many
}

// ago is a number of seconds for people.
func ago(s int64) string {
	switch {
	case s < 120:
		return plural(s, "second", "seconds")
	case s < 2*3600:
		return plural(s/60, "minute", "minutes")
	case s < 2*86400:
		return plural(s/3600, "hour", "hours")
	}
	return plural(s/86400, "day", "days")
}

func (a *API) consoleOverview(w http.ResponseWriter, r *request) error {
	s, err := a.lookout(r)
	if err != nil {
		return err
	}
	series, err := a.queries.FlowSums(r.Context(), db.FlowSumsParams{ProjectID: r.seen()})
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	dead, err := a.deadSignatures(r)
	if err != nil {
		return err
	}
	troubles := s.troubles()
	total, recent := int64(0), make(map[[3]string]*deadSignature)
	for i, d := range dead {
		total += d.Count
		key := [3]string{d.Project, d.Queue, d.Group}
		if d.Recent == 0 {
			continue
		}
		if x := recent[key]; x != nil {
			x.Recent += d.Recent
		} else {
			d := dead[i]
			recent[key] = &d
		}
	}
	for _, d := range recent {
		g := consoleGroup{Queue: d.Queue, Name: d.Group, Kind: d.Kind}
		troubles = append(troubles, trouble{"bad", fmt.Sprintf("%s: %s in the last ten minutes, mostly %q.", g.title(), plural(d.Recent, "message died", "messages died"), short(d.Signature)),
			"dead", map[string]string{"search": cmp.Or(d.Group, d.Queue)}, d.Recent})
	}
	if r.key == nil {
		more, err := a.systemTroubles(r)
		if err != nil {
			return err
		}
		troubles = append(more, troubles...)
	}
	slices.SortStableFunc(troubles, func(x, y trouble) int {
		return cmp.Or(cmp.Compare(x.Severity, y.Severity), cmp.Compare(y.weight, x.weight), strings.Compare(x.Text, y.Text))
	})
	var answer struct {
		Now      instant   `json:"now"`
		Troubles []trouble `json:"troubles"`
		Hidden   int       `json:"troubles_hidden"`
		Queues   int       `json:"queues"`
		Groups   int       `json:"groups"`
		Lag      int64     `json:"lag"`
		Oldest   *int64    `json:"oldest_seconds"`
		Failing  int64     `json:"failing"`
		Leased   int64     `json:"leased"`
		Dead     int64     `json:"dead"`
		Parked   int64     `json:"waiting_consumers"` // of this broker
		Live     int64     `json:"connections"`
		Series   []minute  `json:"series"`
	}
	answer.Now, answer.Queues, answer.Groups, answer.Dead, answer.Series = instant(time.Now()), len(s.queues), len(s.groups), total, minutes(series)
	answer.Hidden = max(0, len(troubles)-troublesMost)
	answer.Troubles = troubles[:len(troubles)-answer.Hidden]
	for i := range s.groups {
		g := &s.groups[i]
		answer.Lag, answer.Failing, answer.Leased = answer.Lag+g.Lag, answer.Failing+g.Failing, answer.Leased+g.Leased
		if g.Oldest >= 0 && (answer.Oldest == nil || *answer.Oldest < g.Oldest) {
			answer.Oldest = &g.Oldest
		}
	}
	if a.Metrics.Parked != nil && r.key == nil {
		for _, p := range a.Metrics.Parked() {
			answer.Parked += p.Pops
		}
	}
	answer.Live = a.connections.Load()
	return a.reply(w, http.StatusOK, &answer)
}

// short is the begin of a text.
func short(s string) string {
	if r := []rune(s); len(r) > 80 {
		return string(r[:79]) + "…"
	}
	return s
}

// minute is a point of the charts. A minute in which nothing happened has none.
type minute struct {
	At        instant `json:"at"`
	Pushed    int64   `json:"pushed"`
	Delivered int64   `json:"delivered"`
	Done      int64   `json:"done"`
	Failed    int64   `json:"failed"`
	Dead      int64   `json:"dead"`
}

func minutes(rows []db.FlowSumsRow) []minute {
	all := make([]minute, len(rows))
	for i, x := range rows {
		all[i] = minute{instant(x.Bucket), x.Pushed, x.Delivered, x.Done, x.Failed, x.Dead}
	}
	return all
}

// systemTroubles are those of the brokers and the database.
func (a *API) systemTroubles(r *request) (all []trouble, err error) {
	say := func(severity, page, format string, args ...any) {
		all = append(all, trouble{severity, fmt.Sprintf(format, args...), page, nil, 1 << 62})
	}
	if a.switches.push.Load() {
		say("bad", "maintenance", "Publishing is switched off: every push is refused until push maintenance ends.")
	}
	if a.popPaused() {
		say("bad", "maintenance", "Consuming is switched off: every pop is answered empty until pop maintenance ends.")
	}
	d, err := a.queries.ConsoleDatabase(r.Context())
	if err != nil {
		return nil, a.databaseError(r, err, "query failed")
	}
	brokers, err := a.queries.ConsoleBrokers(r.Context())
	if err != nil {
		return nil, a.databaseError(r, err, "query failed")
	}
	if d.ReadOnly {
		say("bad", "system", "The database is a read-only standby: nothing can be published or consumed.")
	}
	if d.Connections*10 > int64(d.MaxConnections)*9 {
		say("bad", "system", "The database has %d of at most %d connections open: soon it will refuse more.", d.Connections, d.MaxConnections)
	}
	if d.WaitingForLocks >= lockCrowd {
		say("warn", "system", "%d database sessions wait for locks.", d.WaitingForLocks)
	}
	if d.OldestTransaction > openTooLong {
		say("warn", "system", "A database transaction has been open for %s: old rows cannot be cleaned up until it ends.", ago(int64(d.OldestTransaction)))
	}
	for _, b := range brokers {
		if b.Silent > brokerSilent && b.Silent < brokerGone {
			say("warn", "system", "Broker %q has said nothing for %s and has not signed off.", b.Name, ago(int64(b.Silent)))
		}
	}
	return all, nil
}

// consolePaging reads search, sort, limit and offset; sort is one of the given, the first by default.
func consolePaging(r *request, sorts ...string) (search, sort string, limit, offset int64, err error) {
	p := &params{values: query(r.URL)}
	search, sort = strings.ToLower(p.text("search")), cmp.Or(p.text("sort"), sorts[0])
	limit = p.number("limit", consolePage, 1, 200)
	offset = p.number("offset", 0, 0, 1<<31)
	if len(search) > consoleSearch {
		p.fail("search")
	}
	if !slices.Contains(sorts, sort) {
		p.fail("sort")
	}
	return search, sort, limit, offset, p.err
}

func page[T any](rows []T, limit, offset int64) []T {
	offset = min(offset, int64(len(rows)))
	return rows[offset:min(offset+limit, int64(len(rows)))]
}

// consoleQueueRow is a queue, which a stream is too.
type consoleQueueRow struct {
	Project  string `json:"project"`
	Name     string `json:"name"`
	Groups   int    `json:"groups"`
	Lag      int64  `json:"lag"` // of the group with the largest
	Oldest   *int64 `json:"oldest_seconds"`
	Failing  int64  `json:"failing"`
	Pushed   int64  `json:"pushed"` // in the last ten minutes
	Keys     int64  `json:"keys"`
	Messages int64  `json:"messages"`
	More     bool   `json:"more"` // there are more keys, which have not been counted
	Dead     int64  `json:"dead"`
	id       int32
}

func (s *lookout) queue(q *db.ConsoleQueuesRow) consoleQueueRow {
	x := consoleQueueRow{Project: q.Project, Name: q.Name, Groups: len(s.of[q.ID]), Pushed: q.Pushed, id: q.ID}
	for _, i := range s.of[q.ID] {
		g := &s.groups[i]
		x.Lag, x.Failing = max(x.Lag, g.Lag), x.Failing+g.Failing
		if g.Oldest >= 0 && (x.Oldest == nil || *x.Oldest < g.Oldest) {
			x.Oldest = &g.Oldest
		}
	}
	return x
}

// sizes fills in what is counted of the queues of a page only.
func (a *API) sizes(r *request, rows []consoleQueueRow) error {
	ids := make([]int32, len(rows))
	for i := range rows {
		ids[i] = rows[i].id
	}
	found, err := counted(a, r, func(ctx context.Context) ([]db.ConsoleQueueSizesRow, error) {
		return a.queries.ConsoleQueueSizes(ctx, db.ConsoleQueueSizesParams{Ids: ids, Reach: sizeReach})
	})
	if err != nil {
		return err
	}
	for _, n := range found {
		x := &rows[slices.Index(ids, n.QueueID)]
		x.Keys, x.Messages, x.Dead, x.More = n.Partitions, n.Messages, n.Dead, n.Partitions == sizeReach
	}
	return nil
}

func oldestFirstSeconds(x, y *int64) int {
	age := func(p *int64) int64 {
		if p == nil {
			return -1
		}
		return *p
	}
	return cmp.Compare(age(y), age(x))
}

func (a *API) consoleQueues(w http.ResponseWriter, r *request) error {
	search, sort, limit, offset, err := consolePaging(r, "name", "lag", "oldest", "pushed")
	if err != nil {
		return err
	}
	s, err := a.lookout(r)
	if err != nil {
		return err
	}
	var rows []consoleQueueRow
	for i := range s.queues {
		if q := &s.queues[i]; strings.Contains(strings.ToLower(q.Name), search) {
			rows = append(rows, s.queue(q))
		}
	}
	slices.SortStableFunc(rows, func(x, y consoleQueueRow) int {
		switch sort {
		case "lag":
			return cmp.Compare(y.Lag, x.Lag)
		case "oldest":
			return oldestFirstSeconds(x.Oldest, y.Oldest)
		case "pushed":
			return cmp.Compare(y.Pushed, x.Pushed)
		}
		return 0
	})
	total := len(rows)
	rows = page(rows, limit, offset)
	if err := a.sizes(r, rows); err != nil {
		return err
	}
	return a.reply(w, http.StatusOK, struct {
		Queues []consoleQueueRow `json:"queues"`
		Total  int               `json:"total"`
		All    int               `json:"all"`
	}{rows, total, len(s.queues)})
}

// consoleQueue is one queue with its groups and its last hour.
func (a *API) consoleQueue(w http.ResponseWriter, r *request) error {
	p := &params{values: query(r.URL)}
	name, project := p.name("name", ""), p.name("project", defaultProject)
	if p.err != nil {
		return p.err
	}
	s, err := a.lookout(r)
	if err != nil {
		return err
	}
	at := slices.IndexFunc(s.queues, func(q db.ConsoleQueuesRow) bool { return q.Name == name && q.Project == project })
	if at < 0 {
		return errNoQueue
	}
	rows := []consoleQueueRow{s.queue(&s.queues[at])}
	if err := a.sizes(r, rows); err != nil {
		return err
	}
	series, err := a.queries.FlowOfQueue(r.Context(), db.FlowOfQueueParams{QueueID: rows[0].id})
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	var answer struct {
		Queue  consoleQueueRow `json:"queue"`
		Groups []consoleGroup  `json:"groups"`
		Series []minute        `json:"series"`
	}
	answer.Queue = rows[0]
	for _, i := range s.of[rows[0].id] {
		answer.Groups = append(answer.Groups, s.group(&s.groups[i], rows[0].Pushed))
	}
	for _, x := range series {
		answer.Series = append(answer.Series, minute{instant(x.Bucket), x.Pushed, x.Delivered, x.Done, x.Failed, x.Dead})
	}
	return a.reply(w, http.StatusOK, &answer)
}

func (a *API) consoleGroups(w http.ResponseWriter, r *request) error {
	search, sort, limit, offset, err := consolePaging(r, "oldest", "lag", "name", "failing")
	if err != nil {
		return err
	}
	s, err := a.lookout(r)
	if err != nil {
		return err
	}
	pushed := s.pushed()
	var rows []consoleGroup
	for i := range s.groups {
		g := s.group(&s.groups[i], pushed[s.groups[i].QueueID])
		if strings.Contains(strings.ToLower(g.Name), search) || strings.Contains(strings.ToLower(g.Queue), search) {
			rows = append(rows, g)
		}
	}
	slices.SortFunc(rows, func(x, y consoleGroup) int {
		first := 0
		switch sort {
		case "oldest":
			first = oldestFirstSeconds(x.Oldest, y.Oldest)
		case "lag":
			first = cmp.Compare(y.Lag, x.Lag)
		case "failing":
			first = cmp.Compare(y.Failing, x.Failing)
		}
		return cmp.Or(first, strings.Compare(x.Name, y.Name), strings.Compare(x.Queue, y.Queue), strings.Compare(x.Project, y.Project))
	})
	return a.reply(w, http.StatusOK, struct {
		Groups []consoleGroup `json:"groups"`
		Total  int            `json:"total"`
		All    int            `json:"all"`
	}{page(rows, limit, offset), len(rows), len(s.groups)})
}

func (a *API) consoleBlocked(w http.ResponseWriter, r *request) error {
	p := &params{values: query(r.URL)}
	name, queue := p.name("search", ""), p.name("queue", "")
	if p.err != nil {
		return p.err
	}
	rows, err := counted(a, r, func(ctx context.Context) ([]db.ConsoleBlockedRow, error) {
		return a.queries.ConsoleBlocked(ctx, db.ConsoleBlockedParams{ProjectID: r.seen(), Name: name, Queue: queue, Max: blockedMost})
	})
	if err != nil {
		return err
	}
	type key struct {
		Project   string    `json:"project"`
		Queue     string    `json:"queue"`
		Group     string    `json:"group"`
		Kind      string    `json:"kind"`
		Key       *string   `json:"key"` // null: one of the lanes without a key
		MessageID string    `json:"message_id"`
		Partition uuid.UUID `json:"partition_id"`
		Attempts  int32     `json:"attempts"`
		Consumer  string    `json:"consumer"`
		Waiting   int64     `json:"waiting"` // messages, this one included
		Since     instant   `json:"since"`
		Until     instant   `json:"until"` // the next attempt, or the end of the one under way
		Leased    bool      `json:"leased"`
		Error     string    `json:"last_error"`
	}
	var answer struct {
		Keys  []key `json:"keys"`
		Total int64 `json:"total"`
	}
	for i := range rows {
		x := &rows[i]
		k := key{Project: x.Project, Queue: x.Queue, Group: consoleName(x.Name), Kind: kindOf(x.Kind), MessageID: string(appendMessageID(nil, x.PartitionID, x.Head)),
			Partition: x.PublicID, Attempts: x.Attempts, Consumer: x.Consumer, Waiting: x.Waiting, Since: instant(x.Since), Until: instant(x.NotBefore), Error: x.Error}
		if x.NotBefore.IsZero() && x.LeaseUntil.After(time.Now()) {
			k.Until, k.Leased = instant(x.LeaseUntil), true
		}
		if !x.Hidden {
			k.Key = &x.Key
		}
		answer.Keys, answer.Total = append(answer.Keys, k), x.Total
	}
	return a.reply(w, http.StatusOK, &answer)
}

// deadSignature is dead letters of one group that died of the same.
type deadSignature struct {
	Project   string  `json:"project"`
	Queue     string  `json:"queue"`
	Group     string  `json:"group"`
	Kind      string  `json:"kind"`
	Live      bool    `json:"live"` // the group still exists
	Signature string  `json:"signature"`
	Count     int64   `json:"count"`
	Recent    int64   `json:"recent"` // in the last ten minutes
	First     instant `json:"first_seen"`
	Last      instant `json:"last_seen"`
	ids       [2]int32
}

// deadSignatures are those of the newest dead letters, the most frequent first.
func (a *API) deadSignatures(r *request) ([]deadSignature, error) {
	rows, err := counted(a, r, func(ctx context.Context) ([]db.ConsoleDeadRow, error) {
		return a.queries.ConsoleDead(ctx, db.ConsoleDeadParams{ProjectID: r.seen(), Reach: deadReach, Max: deadMost})
	})
	if err != nil {
		return nil, err
	}
	type same struct {
		group, queue int32
		error        string
	}
	at := make(map[same]int)
	var all []deadSignature
	for i := range rows {
		x := &rows[i]
		text := x.Error
		if !x.Lane { // of the other API: its errors are kept as they are
			text = signature(text)
		}
		k := same{x.GroupID, x.QueueID, text}
		if j, ok := at[k]; ok {
			d := &all[j]
			d.Count, d.Recent = d.Count+x.Count, d.Recent+x.Recent
			if x.FirstSeen.Before(time.Time(d.First)) {
				d.First = instant(x.FirstSeen)
			}
			if x.LastSeen.After(time.Time(d.Last)) {
				d.Last = instant(x.LastSeen)
			}
			continue
		}
		at[k] = len(all)
		all = append(all, deadSignature{x.Project, x.Queue, consoleName(x.Name), kindOf(x.Kind), x.Live, text, x.Count, x.Recent, instant(x.FirstSeen), instant(x.LastSeen),
			[2]int32{x.QueueID, x.GroupID}})
	}
	slices.SortStableFunc(all, func(x, y deadSignature) int { return cmp.Compare(y.Count, x.Count) })
	return all, nil
}

func (a *API) consoleDead(w http.ResponseWriter, r *request) error {
	search, _, limit, offset, err := consolePaging(r, "count")
	if err != nil {
		return err
	}
	all, err := a.deadSignatures(r)
	if err != nil {
		return err
	}
	total := int64(0)
	all = slices.DeleteFunc(all, func(d deadSignature) bool {
		return !strings.Contains(strings.ToLower(d.Signature+"\n"+d.Group+"\n"+d.Queue), search)
	})
	for _, d := range all {
		total += d.Count
	}
	return a.reply(w, http.StatusOK, struct {
		Signatures []deadSignature `json:"signatures"`
		Total      int             `json:"total"`
		Messages   int64           `json:"messages"`
	}{page(all, limit, offset), len(all), total})
}

// consoleDeadIDs are the ids of the dead letters of a group of the /api/v1 routes that died of the same: those are replayed one by one.
func (a *API) consoleDeadIDs(w http.ResponseWriter, r *request) error {
	p := &params{values: query(r.URL)}
	queue, group, text := p.name("queue", ""), p.name("group", queueMode), p.text("signature")
	if p.err != nil {
		return p.err
	}
	all, err := a.deadSignatures(r)
	if err != nil {
		return err
	}
	answer := struct {
		IDs []uuid.UUID `json:"ids"`
	}{[]uuid.UUID{}}
	for _, d := range all {
		if d.Kind != "group" || d.Project != defaultProject || d.Queue != queue || d.Group != consoleName(group) || d.Signature != text {
			continue
		}
		rows, err := a.queries.ConsoleDeadOf(r.Context(), db.ConsoleDeadOfParams{QueueID: d.ids[0], GroupID: d.ids[1], Reach: deadReach})
		if err != nil {
			return a.databaseError(r, err, "query failed")
		}
		for _, x := range rows {
			if signature(x.Error) == text {
				answer.IDs = append(answer.IDs, x.ID)
			}
		}
	}
	return a.reply(w, http.StatusOK, &answer)
}

// consoleMessage is the payload and the headers of a message by its id.
func (a *API) consoleMessage(w http.ResponseWriter, r *request) error {
	partition, offset, ok := decodeMessageID(query(r.URL).Get("id"))
	if !ok {
		return badQuery("id")
	}
	s, err := a.queries.ConsoleMessage(r.Context(), db.ConsoleMessageParams{ProjectID: r.seen(), PartitionID: partition, MessageOffset: offset})
	if errors.Is(err, pgx.ErrNoRows) {
		return notFound("the message is not stored any more")
	}
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	open, err := segment.Decode(r.engine.Keys, s.Codec, s.KeyNo, s.FirstID, int(s.Count), s.Frames)
	if err != nil {
		return a.write(w, http.StatusOK, []byte(`{"readable":false,"payload":null,"headers":null}`))
	}
	m := open.Raw(int(offset - s.BaseOffset))
	b := appendPayload([]byte(`{"readable":true,"payload":`), m.Payload)
	return a.write(w, http.StatusOK, append(appendPayload(append(b, `,"headers":`...), m.Headers), '}'))
}

// consoleSystem is the brokers and the database. An API key has nothing to do with them.
func (a *API) consoleSystem(w http.ResponseWriter, r *request) error {
	if r.key != nil {
		return &httpError{status: http.StatusForbidden, text: "Insufficient permissions"}
	}
	brokers, err := a.queries.ConsoleBrokers(r.Context())
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	began := time.Now()
	d, err := a.queries.ConsoleDatabase(r.Context())
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	took := time.Since(began)
	type broker struct {
		Name    string  `json:"name"`
		Started instant `json:"started_at"`
		Silent  int64   `json:"silent_seconds"`
		This    bool    `json:"this"`
	}
	var answer struct {
		Brokers  []broker `json:"brokers"`
		Database struct {
			Version           string  `json:"version"`
			Bytes             int64   `json:"bytes"`
			MaxConnections    int32   `json:"max_connections"`
			Connections       int64   `json:"connections"`
			OldestTransaction int64   `json:"oldest_transaction_seconds"`
			WaitingForLocks   int64   `json:"waiting_for_locks"`
			ReadOnly          bool    `json:"read_only"`
			RoundTrip         float64 `json:"round_trip_ms"`
		} `json:"database"`
		Pushes bool  `json:"push_maintenance"`
		Pops   bool  `json:"pop_maintenance"`
		Live   int64 `json:"connections"`
	}
	for _, b := range brokers {
		answer.Brokers = append(answer.Brokers, broker{b.Name, instant(b.StartedAt), int64(b.Silent), b.Name == a.Metrics.Name})
	}
	x := &answer.Database
	x.Version, x.Bytes, x.MaxConnections, x.Connections, x.WaitingForLocks, x.ReadOnly = d.Version, d.Bytes, d.MaxConnections, d.Connections, d.WaitingForLocks, d.ReadOnly
	x.OldestTransaction, x.RoundTrip = int64(d.OldestTransaction), float64(took.Microseconds())/1000
	answer.Pushes, answer.Pops, answer.Live = a.switches.push.Load(), a.popPaused(), a.connections.Load()
	return a.reply(w, http.StatusOK, &answer)
}
