package dedup

import "math/bits"

// table is an open-addressing hash table of fingerprints with linear probing.
// Its length is the number of entries, its capacity the number of slots.
// A fingerprint is kept at most twice, at the oldest and the newest offset it
// was seen with; the range between them stands for those in the middle.
type table []entry

// entry is 12 bytes: a uint64 would pad it to 16. at is the offset from the
// block's base plus one; 0 marks an empty slot.
type entry struct{ lo, hi, at uint32 }

// slotsFor returns how many slots n entries need: three quarters may be taken,
// of up to 8 slots all.
func slotsFor(n int) int {
	if n <= 8 {
		return n
	}
	return (n*4 + 2) / 3
}

func home(fp uint64, slots int) int {
	hi, _ := bits.Mul64(fp, uint64(slots))
	return int(hi)
}

// find returns the oldest and newest place of fp, 0 if there is none.
func (t table) find(fp uint64) (oldest, newest uint32) {
	slots := t[:cap(t)]
	i, lo, hi := home(fp, len(slots)), uint32(fp), uint32(fp>>32)
	for range slots {
		e := slots[i]
		if e.at == 0 {
			break
		}
		if e.lo == lo && e.hi == hi {
			newest = max(newest, e.at)
			if oldest == 0 || e.at < oldest {
				oldest = e.at
			}
		}
		if i++; i == len(slots) {
			i = 0
		}
	}
	return oldest, newest
}

// insert adds fp at a place later than all before, and returns by how many
// bytes the table grew.
func (t *table) insert(fp uint64, at uint32) (grown int64) {
	if slotsFor(len(*t)+1) > cap(*t) {
		grown = t.grow()
	}
	slots := (*t)[:cap(*t)]
	i, e := home(fp, len(slots)), entry{uint32(fp), uint32(fp >> 32), at}
	same := -1
	for slots[i].at != 0 {
		if slots[i].lo == e.lo && slots[i].hi == e.hi {
			if same >= 0 { // the third: the newer of the two gives way
				if slots[i].at < slots[same].at {
					i = same
				}
				slots[i].at = at
				return grown
			}
			same = i
		}
		if i++; i == len(slots) {
			i = 0
		}
	}
	slots[i] = e
	*t = (*t)[:len(*t)+1]
	return grown
}

func (t *table) grow() int64 {
	n := cap(*t)
	switch {
	case n == 0:
		n = 1
	case n < 16:
		n = max(4, n*2)
	case n < slotsFor(blockMax):
		n = min(n*3/2, slotsFor(blockMax))
	default:
		n = n * 3 / 2
	}
	return t.rebuild(n)
}

// rebuild moves the entries to a table of at least that many slots, and
// returns by how many bytes the table grew.
func (t *table) rebuild(n int) int64 {
	old, count, before := (*t)[:cap(*t)], len(*t), t.bytes()
	// append rounds up to what the allocator hands out anyway.
	slots := table(append([]entry(nil), make([]entry, n)...))
	slots = slots[:cap(slots)]
	clear(slots)
	for _, e := range old {
		if e.at == 0 {
			continue
		}
		i := home(uint64(e.hi)<<32|uint64(e.lo), len(slots))
		for slots[i].at != 0 {
			if i++; i == len(slots) {
				i = 0
			}
		}
		slots[i] = e
	}
	*t = slots[:count]
	return t.bytes() - before
}

// distinct appends every fingerprint once.
func (t table) distinct(dst []uint64) []uint64 {
	for _, e := range t[:cap(t)] {
		if e.at == 0 {
			continue
		}
		fp := uint64(e.hi)<<32 | uint64(e.lo)
		if oldest, _ := t.find(fp); oldest == e.at {
			dst = append(dst, fp)
		}
	}
	return dst
}

func (t table) bytes() int64 { return (int64(cap(t))*12 + 15) &^ 15 }
