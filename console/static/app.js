// The frame of the console: session, pages, refreshing, and what is said when the broker does not answer.
import { h, morph } from "./dom.js";
import { pages } from "./pages.js";

const $ = (id) => document.getElementById(id);
const main = $("main");
const refreshEvery = 5000;

let session = null;
let shown = null; // the address whose page is on screen
let turn = 0; // of the newest render: older ones are dropped
let timer = 0;
let awaySince = null;

class Failure extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

// exact keeps numbers of payloads as they were written, where a number of JavaScript would be another one.
const exact = JSON.rawJSON ? (_, value, { source }) => (typeof value === "number" && source !== undefined && source !== String(value) ? JSON.rawJSON(source) : value) : undefined;

// call asks the API; path is relative, so that it works below any prefix.
async function call(method, path, body) {
  let response;
  try {
    response = await fetch(path, { method, body: body === undefined ? undefined : JSON.stringify(body), headers: { "X-FerryMQ-Console": "1" }, cache: "no-store" });
  } catch {
    throw new Failure(0, "The broker does not answer.");
  }
  const text = await response.text();
  let answer = null;
  try {
    answer = text ? JSON.parse(text, exact) : null;
  } catch {
    throw new Failure(response.status, "What answers is not the broker (" + response.status + ").");
  }
  if (!response.ok) throw new Failure(response.status, (answer && answer.error) || "The broker answered " + response.status + ".");
  return answer;
}

// query makes a query string of what is not empty.
const query = (values) => {
  const p = new URLSearchParams(Object.entries(values).filter(([, v]) => v !== "" && v !== null && v !== undefined));
  return p.size ? "?" + p : "";
};

const address = (page, values) => "#/" + page + query(values || {});

function where() {
  const [path, rest] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const page = Object.hasOwn(pages, path) ? path : "overview";
  return { page, q: new URLSearchParams(rest || "") };
}

function say(text) {
  $("live").textContent = "";
  $("live").textContent = text;
}

// ask opens a dialog and resolves to whether it was confirmed.
function ask({ title, text, action, danger }) {
  const dialog = $("dialog");
  return new Promise((resolve) => {
    const end = (yes) => {
      dialog.onclose = null;
      dialog.close();
      resolve(yes);
    };
    dialog.replaceChildren(
      h("h2", { id: "dialog-title" }, title), ...text.map((t) => h("p", null, t)),
      h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => end(false) }, "Cancel"), h("button", { type: "button", class: danger ? "danger" : "primary", onclick: () => end(true) }, action)));
    dialog.onclose = () => end(false);
    dialog.showModal();
  });
}

// act runs something that changes data and says what came of it.
async function act(work) {
  for (const b of main.querySelectorAll("button")) b.disabled = true;
  let text;
  let kind = "good";
  try {
    text = await work();
  } catch (e) {
    text = e.message;
    kind = "bad";
  }
  shownNotice = { kind, text, at: shown };
  say(text);
  await render(true);
}
let shownNotice = null;

function trouble(e) {
  if (e.status === 0) {
    awaySince ||= new Date();
    return `The broker has not answered since ${awaySince.toLocaleTimeString()}. What is shown is from before; trying again.`;
  }
  return null;
}

function state(up, text) {
  $("state").className = "state " + (up ? "up" : "down");
  $("state").textContent = text;
}

function banner(text) {
  if ($("banner").textContent !== text) $("banner").textContent = text;
}

function frame() {
  $("nav").hidden = !session;
  $("logout").hidden = !session || !session.authentication;
  const role = !session ? "" : session.admin ? "" : session.consume ? " (may consume)" : " (read only)";
  $("who").textContent = session ? (session.project !== null ? "project " + session.project : session.subject) + role : "";
  const { page } = where();
  for (const a of $("nav").children) {
    if (a.getAttribute("href") === "#/" + (pages[page].nav || page)) {
      if (!a.hasAttribute("aria-current")) a.scrollIntoView({ block: "nearest", inline: "nearest" });
      a.setAttribute("aria-current", "page");
    }
    else a.removeAttribute("aria-current");
  }
}

async function render(again) {
  clearTimeout(timer);
  const mine = ++turn;
  const { page, q } = where();
  const here = location.hash;
  try {
    if (!session) session = await call("GET", "console/session");
    frame();
    const get = (path, values) => call("GET", path + query(values || {}));
    const content = await pages[page].show({ q, get, call, session, address, ask, act, go: (values) => go(page, q, values), refresh: () => render(true) });
    if (mine !== turn) return;
    awaySince = null;
    banner("");
    state(true, "live");
    put(here, h("div", null, notice(here), content), pages[page].title);
    timer = setTimeout(() => render(true), pages[page].still ? 1 << 30 : refreshEvery);
  } catch (e) {
    if (mine !== turn) return;
    if (!(e instanceof Failure)) throw e;
    if (e.status === 401) {
      session = null;
      frame();
      login(e.message);
      return;
    }
    const away = trouble(e);
    if (away) {
      banner(away);
      state(false, "no answer");
    } else {
      awaySince = null;
      const text = e.status >= 500 ? await whatIsWrong(e) : "";
      if (mine !== turn) return;
      banner(text);
      state(!text, text ? "trouble" : "live");
      if (!text) put(here, h("div", null, h("h1", null, pages[page].title), h("div", { class: "notice bad" }, e.message)), pages[page].title);
    }
    if (shown !== here && (away || e.status >= 500)) put(here, h("div", null, h("h1", null, pages[page].title), h("p", { class: "empty" }, "Nothing can be shown yet.")), pages[page].title);
    timer = setTimeout(() => render(true), away ? 2000 : refreshEvery);
  }
}

// whatIsWrong finds out whether it is the database.
async function whatIsWrong(e) {
  try {
    await call("GET", "health");
  } catch (health) {
    if (health.status === 503) return "The broker cannot reach its database. What is shown is from before; trying again.";
  }
  return `The broker could not answer: ${e.message}. Trying again.`;
}

function notice(here) {
  if (!shownNotice || shownNotice.at !== here) return null;
  return h("div", { class: "notice " + (shownNotice.kind === "bad" ? "bad" : "warn") }, shownNotice.text);
}

function put(here, content, title) {
  document.title = title + " – FerryMQ";
  if (shown !== here) {
    const first = shown === null;
    const moved = first || shown.split("?")[0] !== here.split("?")[0];
    if (shownNotice && shownNotice.at !== here) shownNotice = null;
    shown = here;
    if (moved) {
      main.replaceChildren(content);
      if (!first) {
        main.focus({ preventScroll: true });
        scrollTo(0, 0);
        say(title);
      }
      return;
    }
  }
  morph(main, h("div", null, content));
}

// go changes the query of the page that is shown.
function go(page, q, values) {
  const next = new URLSearchParams(q);
  for (const [k, v] of Object.entries(values)) {
    if (v === "" || v === null || v === 0) next.delete(k);
    else next.set(k, v);
  }
  location.hash = "/" + page + (next.size ? "?" + next : "");
}

function login(why) {
  shown = "login";
  document.title = "Log in – FerryMQ";
  state(true, "");
  $("state").className = "";
  banner("");
  const input = h("input", { id: "credential", type: "password", autocomplete: "current-password", required: true, "aria-describedby": "login-help login-error" });
  const error = h("p", { id: "login-error", class: "bad-text", role: "alert" }, why === "Authentication required" ? "" : why);
  const submit = async (event) => {
    event.preventDefault();
    error.textContent = "";
    try {
      const response = await fetch("console", { method: "POST", body: input.value.trim(), headers: { "X-FerryMQ-Console": "1" } });
      const answer = await response.json();
      if (!response.ok) throw new Failure(response.status, answer.error);
      session = answer;
      await render();
      main.focus();
    } catch (e) {
      error.textContent = e instanceof Failure ? e.message + "." : "The broker does not answer.";
      input.select();
    }
  };
  main.replaceChildren(h("form", { class: "card login", onsubmit: submit },
    h("h1", null, "Log in"),
    h("label", { for: "credential" }, "API key, root key or token", input),
    h("p", { id: "login-help" }, "It is kept in a cookie that ends with the browser."),
    error, h("button", { class: "primary", type: "submit" }, "Log in")));
  input.focus();
}

$("logout").addEventListener("click", async () => {
  try {
    await fetch("console", { method: "DELETE", headers: { "X-FerryMQ-Console": "1" } });
  } finally {
    session = null;
    clearTimeout(timer);
    render();
  }
});
$("skip").addEventListener("click", (e) => {
  e.preventDefault();
  main.focus();
});
addEventListener("hashchange", () => render());
addEventListener("online", () => render(true));
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : render(true)));
render();
