package groupcommit

import (
	"context"
	"slices"
	"sync"

	"github.com/google/uuid"

	"ferrymq/db"
	"ferrymq/segment"
)

// frameCache keeps the opened frames of segments that were delivered in part: the next pop of that partition wants the rest.
// Without it a pop of one message would read its whole segment, again and again. Two generations bound it.
type frameCache struct {
	mu         sync.Mutex
	young, old map[frameKey]frameEntry
	bytes      int
}

type frameKey struct{ partition, base int64 }

type frameEntry struct {
	first  uuid.UUID // tells a segment from another one at its place, after the database was restored to an earlier time
	frames []byte
}

// frameBytes is what one generation may hold.
const frameBytes = 16 << 20

func (c *frameCache) get(k frameKey, first uuid.UUID) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, ok := c.young[k]
	if !ok {
		if n, ok = c.old[k]; ok {
			c.put(k, n)
		}
	}
	if n.first != first {
		return nil
	}
	return n.frames
}

func (c *frameCache) add(k frameKey, first uuid.UUID, frames []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.young[k]; !ok {
		c.put(k, frameEntry{first, frames})
	}
}

func (c *frameCache) put(k frameKey, n frameEntry) {
	if c.bytes+len(n.frames) > frameBytes || c.young == nil {
		c.old, c.young, c.bytes = c.young, make(map[frameKey]frameEntry), 0
	}
	c.young[k] = n
	c.bytes += len(n.frames)
}

// partial says whether most of what was claimed lies in segments that were not taken to their end: then frames are
// better left out of the group's next claims, and taken from the cache.
func partial(spans []*Span) bool {
	var taken, stored int64
	for _, s := range spans {
		taken += s.Take
		for _, g := range s.Segments {
			stored += int64(g.Count)
		}
	}
	return taken*2 < stored
}

// fill completes the frames of what a claim returned, and remembers those of which something is left. Segments that were removed
// since the claim are left out; it returns the spans that have others.
func (e *Engine) fill(ctx context.Context, spans []*Span) ([]*Span, error) {
	var missing db.SegmentFramesParams
	var at []*Segment
	for _, s := range spans {
		for i := range s.Segments {
			g := &s.Segments[i]
			k := frameKey{s.Row.ID, g.Base}
			if g.Frames == nil {
				if plain := e.frames.get(k, g.FirstID); plain != nil {
					g.Frames, g.Codec, g.KeyNo = plain, segment.Plain, 0
				} else {
					missing.PartitionIds = append(missing.PartitionIds, s.Row.ID)
					missing.BaseOffsets = append(missing.BaseOffsets, g.Base)
					at = append(at, g)
				}
			}
		}
	}
	if len(at) > 0 {
		rows, err := e.q.SegmentFrames(ctx, missing)
		if err != nil {
			return nil, e.Unavailable(err)
		}
		found := make(map[frameKey][]byte, len(rows))
		for _, r := range rows {
			found[frameKey{r.PartitionID, r.BaseOffset}] = r.Frames
		}
		gone := false
		for i, g := range at {
			g.Frames = found[frameKey{missing.PartitionIds[i], g.Base}]
			gone = gone || g.Frames == nil
		}
		if gone {
			var left []*Span
			for _, s := range spans {
				s.Segments = slices.DeleteFunc(s.Segments, func(g Segment) bool { return g.Frames == nil })
				if len(s.Segments) > 0 {
					left = append(left, s)
				}
			}
			spans = left
		}
	}
	for _, s := range spans {
		g := &s.Segments[len(s.Segments)-1]
		if g.Base+int64(g.Count) == s.Start+s.Take {
			continue
		}
		// Opened once for all who take the rest. What cannot be opened is reported by who decodes it.
		if plain, err := segment.Open(e.Keys, g.Codec, g.KeyNo, g.FirstID, g.Frames); err == nil {
			g.Frames, g.Codec, g.KeyNo = plain, segment.Plain, 0
			e.frames.add(frameKey{s.Row.ID, g.Base}, g.FirstID, plain)
		}
	}
	return spans, nil
}
