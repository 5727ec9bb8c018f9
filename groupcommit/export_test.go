package groupcommit

import "context"

// Parked is how many pops wait, claims and watchers.
func (e *Engine) Parked() int {
	e.park.mu.Lock()
	defer e.park.mu.Unlock()
	return e.park.parked
}

// Refill answers a pop once more, as if its claim had left out all frames.
func (e *Engine) Refill(ctx context.Context, d *Delivery) (*Delivery, error) {
	c := d.claims[0]
	for _, s := range c.spans {
		for i := range s.Segments {
			s.Segments[i].Frames = nil
		}
	}
	return e.answer(ctx, c)
}

// Boarded is how many operations wait for a flight.
func (e *Engine) Boarded() (n int) {
	e.dock.mu.Lock()
	defer e.dock.mu.Unlock()
	for i := range e.dock.next {
		n += e.dock.next[i].size()
	}
	return n
}
