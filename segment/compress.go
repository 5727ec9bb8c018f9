package segment

import (
	"runtime"
	"slices"

	"github.com/klauspost/compress/zstd"
)

// Codecs of stored frames, before encryption.
const (
	Plain int16 = 0
	Zstd  int16 = 1
)

const (
	// Whatever would make PostgreSQL move the row out of line, about 2,000
	// bytes, is tried. For less, 15 us of CPU would save a few hundred bytes.
	minCompress = 1536
	maxDecoded  = 80 << 20 // decompressed size accepted; a message may be 64 MiB
	sampleParts = 4
	samplePart  = 2 << 10
)

// Both are shared, wait for one of GOMAXPROCS coders and make their buffers on
// first use. The window and memory options make an encoder take 0.9 MiB instead
// of 9, at the same speed and ratio.
var (
	encoder = must(zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithWindowSize(MaxBytes), zstd.WithLowerEncoderMem(true),
		zstd.WithEncoderConcurrency(runtime.GOMAXPROCS(0))))
	decoder = must(zstd.NewReader(nil, zstd.WithDecoderMaxMemory(maxDecoded),
		zstd.WithDecoderConcurrency(runtime.GOMAXPROCS(0))))
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// compress returns src compressed into the memory of scratch, or empty if that
// saves less than a tenth. Large frames are judged by a sample first.
func compress(scratch, src []byte) []byte {
	scratch = scratch[:0]
	if len(src) < minCompress || len(src) > maxDecoded {
		return scratch
	}
	if len(src) >= 4*sampleParts*samplePart {
		for i := range sampleParts {
			from := i * (len(src) - samplePart) / (sampleParts - 1)
			scratch = append(scratch, src[from:from+samplePart]...)
		}
		n := len(scratch)
		if scratch = encoder.EncodeAll(scratch, slices.Grow(scratch, n+n/8)); !pays(len(scratch)-n, n) {
			return scratch[:0]
		}
	}
	if scratch = encoder.EncodeAll(src, scratch[:0]); !pays(len(scratch), len(src)) {
		return scratch[:0]
	}
	return scratch
}

func pays(packed, plain int) bool { return packed <= plain-plain/10 }

// decompress is the inverse of compress. The decoder allocates no more than
// the input can decode to, so a few hostile bytes can't claim megabytes.
func decompress(src []byte) ([]byte, error) {
	plain, err := decoder.DecodeAll(src, nil)
	if err != nil {
		return nil, damaged("zstd: %v", err)
	}
	return plain, nil
}
