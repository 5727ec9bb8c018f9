package handlers

import "net/http"

func clearRoutes() []route {
	return []route{on("DELETE", "/api/v1/queues/{queue}/clear", admin, (*API).clear)}
}

// clear removes all messages of a queue, or of one partition.
func (a *API) clear(w http.ResponseWriter, r *request) error {
	queue := r.params[0]
	if !validName(queue, maxName) {
		return badName("queue", maxName)
	}
	p := params{values: query(r.URL)}
	var partition *string
	if name := p.name("partition", ""); name != "" {
		partition = &name
	}
	if p.err != nil {
		return p.err
	}
	r.engine.Catalog.ForgetQueue(queue) // it may have been deleted elsewhere
	q, err := r.engine.Catalog.Queue(r.Context(), queue)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	if q == nil {
		return notFound("Queue not found")
	}
	partitions, messages, err := r.engine.Clear(r.Context(), q, partition)
	if err != nil {
		return a.databaseError(r, err, "query failed")
	}
	if partition != nil && partitions == 0 {
		return notFound("Partition not found")
	}
	return a.reply(w, http.StatusOK, struct {
		Success           bool    `json:"success"`
		Queue             string  `json:"queue"`
		Partition         *string `json:"partition"`
		PartitionsCleared int64   `json:"partitionsCleared"`
		MessagesDeleted   int64   `json:"messagesDeleted"`
	}{true, queue, partition, partitions, messages})
}
