package main

import (
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// draw writes the columns of e's table that lines names against the column x, as a plot with logarithmic axes. A value of 0 on the x axis stands
// at the left edge. Without -svg nothing is drawn.
func (e *env) draw(name, title string, x int, xTitle string, lines map[string]int) error {
	if e.svg == "" {
		return nil
	}
	const w, h, left, right, top, bottom = 720, 400, 80, 170, 40, 60
	at := func(row []any, column int) float64 {
		switch v := row[column].(type) {
		case int:
			return float64(v)
		case float64:
			return v
		}
		return math.NaN()
	}
	loX, hiX, loY, hiY := math.Inf(1), 0.0, math.Inf(1), 0.0
	for _, r := range e.rows {
		if v := at(r, x); v > 0 {
			loX, hiX = min(loX, v), max(hiX, v)
		}
		for _, c := range lines {
			if v := at(r, c); v > 0 {
				loY, hiY = min(loY, v), max(hiY, v)
			}
		}
	}
	if hiX == 0 || hiY == 0 {
		return fmt.Errorf("nothing to draw in %s", name)
	}
	zero := slices.ContainsFunc(e.rows, func(r []any) bool { return at(r, x) == 0 })
	x0, x1 := math.Log10(loX), math.Max(math.Log10(hiX), math.Log10(loX)+1)
	if zero {
		x0--
	}
	y0, y1 := math.Floor(math.Log10(loY)), math.Ceil(math.Log10(hiY))
	px := func(v float64) float64 {
		if v <= 0 {
			return left
		}
		return left + (math.Log10(v)-x0)/(x1-x0)*(w-left-right)
	}
	py := func(v float64) float64 { return h - bottom - (math.Log10(v)-y0)/max(y1-y0, 1)*(h-top-bottom) }

	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12"><rect width="%d" height="%d" fill="#fff"/>`+"\n", w, h, w, h)
	fmt.Fprintf(&b, `<text x="%d" y="22" font-size="15">%s</text><text x="%d" y="%d" text-anchor="middle">%s</text>`+"\n", left, title, (left+w-right)/2, h-16, xTitle)
	for d := y0; d <= y1; d++ {
		y := py(math.Pow(10, d))
		fmt.Fprintf(&b, `<path d="M%d %.1fH%d" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%s</text>`+"\n", left, y, w-right, left-8, y+4, digits(math.Pow(10, d)))
	}
	for _, r := range e.rows {
		v := at(r, x)
		fmt.Fprintf(&b, `<path d="M%.1f %dV%d" stroke="#ddd"/><text x="%.1f" y="%d" text-anchor="middle">%s</text>`+"\n", px(v), top, h-bottom, px(v), h-bottom+18, short(v))
	}
	colours := []string{"#1b6ca8", "#c0392b", "#27864a", "#8e44ad"}
	for i, label := range slices.Sorted(maps.Keys(lines)) {
		var path strings.Builder
		for _, r := range e.rows {
			v := at(r, lines[label])
			if !(v > 0) {
				continue
			}
			step := "L"
			if path.Len() == 0 {
				step = "M"
			}
			fmt.Fprintf(&path, "%s%.1f %.1f", step, px(at(r, x)), py(v))
			fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", px(at(r, x)), py(v), colours[i%len(colours)])
		}
		fmt.Fprintf(&b, `<path d="%s" fill="none" stroke="%s" stroke-width="2"/><text x="%d" y="%d" fill="%s">%s</text>`+"\n",
			path.String(), colours[i%len(colours)], w-right+14, top+16+20*i, colours[i%len(colours)], label)
	}
	b.WriteString("</svg>\n")
	return os.WriteFile(filepath.Join(e.svg, name), []byte(b.String()), 0o644)
}

// short is a number with k or M.
func short(v float64) string {
	switch {
	case v >= 1e6:
		return fmt.Sprintf("%.3gM", v/1e6)
	case v >= 1e3:
		return fmt.Sprintf("%.3gk", v/1e3)
	}
	return fmt.Sprintf("%g", v)
}
