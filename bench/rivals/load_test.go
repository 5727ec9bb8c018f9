package main

import "testing"

func TestCheckerSees(t *testing.T) {
	p := func(stream, seq uint32) []byte { return message{stream, seq, 5}.appendTo(nil, 256) }
	for _, c := range []struct {
		want string
		do   func(k *checker)
	}{
		{"ok", func(k *checker) { k.stored([]message{{1, 0, 5}}); k.acked(k.delivered(3, p(1, 0))) }},
		{"ok", func(k *checker) { k.acked(k.delivered(3, p(1, 0))); k.stored([]message{{1, 0, 5}}) }},
		{"1 x lost", func(k *checker) { k.stored([]message{{1, 0, 5}}); k.delivered(3, p(1, 0)) }},
		{"1 x order", func(k *checker) { k.acked(k.delivered(3, p(1, 1), p(1, 0))) }},
		{"1 x duplicate after ack", func(k *checker) { k.acked(k.delivered(3, p(1, 0))); k.delivered(4, p(1, 0)) }},
		{"1 x acked twice", func(k *checker) { k.acked([]message{{1, 0, 5}}); k.acked([]message{{1, 0, 5}}) }},
		{"1 x payload", func(k *checker) { b := p(1, 0); b[200] ^= 1; k.delivered(3, b) }},
	} {
		k := newChecker(256, perStream)
		if c.do(k); k.verdict() != c.want {
			t.Errorf("verdict %q, want %q", k.verdict(), c.want)
		}
	}
	k := newChecker(256, perConsumer)
	k.delivered(1, p(1, 1))
	if k.delivered(2, p(1, 0)); k.verdict() != "ok" {
		t.Errorf("order among consumers was not promised: %s", k.verdict())
	}
}
