package groupcommit

// Parked is how many pops wait, claims and watchers.
func (e *Engine) Parked() int {
	e.park.mu.Lock()
	defer e.park.mu.Unlock()
	return e.park.parked
}
