package handlers

import (
	"net/http"
	"time"
)

const (
	streamAhead = 1 << 20 // of an answer is kept until it is sent
	streamBytes = 8 << 20 // of stored messages is read at a time, or one message
)

// stream is a JSON answer that is sent in parts once it is large: a page of a thousand messages may be larger than memory.
type stream struct {
	api  *API
	w    http.ResponseWriter
	b    []byte
	sent bool
}

// flush sends what has been appended if that is a lot. Call it between elements.
func (s *stream) flush() error {
	if len(s.b) < streamAhead {
		return nil
	}
	if !s.sent {
		s.w.Header().Set("Content-Type", "application/json")
	}
	s.sent = true
	_ = http.NewResponseController(s.w).SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err := s.w.Write(s.b)
	s.b = s.b[:0]
	return err
}

// end sends the rest. Once a part has been sent an error can only break the answer off, so that nobody takes it for whole.
func (s *stream) end(err error) error {
	if !s.sent {
		if err != nil {
			return err
		}
		_ = s.api.write(s.w, http.StatusOK, s.b)
		return nil
	}
	if err == nil {
		_ = http.NewResponseController(s.w).SetWriteDeadline(time.Now().Add(writeTimeout))
		_, err = s.w.Write(s.b)
	}
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	return nil
}
