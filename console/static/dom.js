// Building and updating the page. Text only ever becomes text nodes and attributes: nothing here takes markup.

const svgTags = new Set(["svg", "path", "line", "title"]);

// h makes an element. Properties that begin with "on" are listeners; false and null are left out.
export function h(tag, props, ...children) {
  const el = svgTags.has(tag) && props && props.svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name === "svg" || value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) {
      el.handlers = { ...el.handlers, [name.slice(2)]: value };
      el.addEventListener(name.slice(2), dispatch);
    } else if (name === "value") {
      el.value = value;
      el.wanted = value;
    } else {
      el.setAttribute(name, value === true ? "" : String(value));
    }
  }
  el.append(...flat(children));
  return el;
}

const flat = (children) => children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false).map((c) => (c instanceof Node ? c : String(c)));

function dispatch(event) {
  const f = this.handlers && this.handlers[event.type];
  if (f) return f.call(this, event);
}

// morph turns the children of an element into those of another, touching only what differs: focus, scroll and selection stay.
export function morph(to, from) {
  const want = [...from.childNodes];
  for (let i = 0; i < want.length; i++) {
    const have = to.childNodes[i];
    if (!have) to.append(want[i]);
    else if (have.nodeType === 3 && want[i].nodeType === 3) {
      if (have.data !== want[i].data) have.data = want[i].data;
    } else if (have.nodeName !== want[i].nodeName || (have.id || "") !== (want[i].id || "")) have.replaceWith(want[i]);
    else update(have, want[i]);
  }
  while (to.childNodes.length > want.length) to.lastChild.remove();
}

function update(have, want) {
  if (have.nodeType !== 1) return;
  for (const a of [...have.attributes]) if (!want.hasAttribute(a.name) && a.name !== "open") have.removeAttribute(a.name);
  for (const a of want.attributes) if (have.getAttribute(a.name) !== a.value) have.setAttribute(a.name, a.value);
  for (const type of Object.keys(want.handlers || {})) if (!have.handlers || !have.handlers[type]) have.addEventListener(type, dispatch);
  have.handlers = want.handlers;
  morph(have, want);
  if (want.wanted !== undefined && want.wanted !== have.wanted) {
    have.wanted = want.wanted;
    if (document.activeElement !== have) have.value = want.wanted;
  }
}

// name shows a name of somebody else's making: its direction stays its own.
export const name = (text) => h("bdi", null, visible(text));

// visible shows control and direction characters as what they are.
export const visible = (text) => String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));

export const number = (n) => (n === null || n === undefined ? "–" : n.toLocaleString("en-US"));

export const plural = (n, one, many) => number(n) + " " + (n === 1 ? one : many);

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return Math.round(seconds) + " s";
  if (seconds < 7200) return Math.floor(seconds / 60) + " min";
  if (seconds < 172800) return Math.floor(seconds / 3600) + " h";
  return Math.floor(seconds / 86400) + " d";
}

export function rate(n) {
  if (n === 0) return "0";
  return n < 10 ? n.toFixed(n < 1 ? 2 : 1) : number(Math.round(n));
}

export function bytes(n) {
  let unit = "bytes";
  for (const u of ["kB", "MB", "GB", "TB"]) {
    if (n < 10240) break;
    n /= 1024;
    unit = u;
  }
  return number(Math.round(n)) + " " + unit;
}

// when shows a moment: how long ago or ahead it is, and itself on demand.
export function when(text) {
  if (!text) return "–";
  const seconds = (Date.now() - Date.parse(text)) / 1000;
  return h("time", { datetime: text, title: text }, seconds >= 0 ? span(seconds) + " ago" : "in " + span(-seconds));
}

// table makes a table: columns are [title, cell of a row, class].
export function table(caption, columns, rows, empty) {
  if (rows.length === 0) return h("div", { class: "table" }, h("p", { class: "empty" }, empty));
  return h("div", { class: "table" },
    h("table", null,
      h("caption", { class: "unseen" }, caption),
      h("thead", null, h("tr", null, columns.map(([title, , kind]) => h("th", { scope: "col", class: kind }, title || h("span", { class: "unseen" }, "Actions"))))),
      h("tbody", null, rows.map((row) => h("tr", null, columns.map(([title, cell, kind]) => h("td", { class: kind, "data-label": title }, cell(row))))))));
}

// chart draws the last hour, a point a minute: series are [title, numbers].
export function chart(title, unit, series) {
  const top = Math.max(...series.flatMap(([, points]) => points), 0);
  const x = (i) => ((i / (series[0][1].length - 1)) * 600).toFixed(1);
  const y = (v) => (118 - (top ? v / top : 0) * 112).toFixed(1);
  const said = series.map(([label, points]) => `${label}: now ${rate(points[points.length - 1])}, at most ${rate(Math.max(...points))} ${unit}`).join("; ");
  return h("figure", { class: "card" },
    h("figcaption", null, title, series.map(([label], i) => h("span", { class: "s" + (i + 1) }, label))),
    h("svg", { svg: true, class: "chart", viewBox: "0 0 600 120", preserveAspectRatio: "none", role: "img", "aria-label": `${title} in the last hour. ${said}` },
      [6, 62, 118].map((at) => h("line", { svg: true, x1: 0, x2: 600, y1: at, y2: at })),
      series.map(([, points], i) => h("path", { svg: true, class: "s" + (i + 1), d: points.map((v, n) => (n ? "L" : "M") + x(n) + " " + y(v)).join("") }))),
    h("div", { class: "axis" }, h("span", null, "60 min ago"), h("span", null, `top: ${rate(top)} ${unit}`), h("span", null, "now")));
}
