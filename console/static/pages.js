// The pages. Each asks for its numbers and makes its content anew; what is on screen already stays where nothing has changed.
import { h, name, visible, number, plural, span, rate, bytes, when, table, chart } from "./dom.js";

const pageSize = 50;

const tile = (title, value, note, kind) => h("div", { class: "tile" }, h("dt", null, title), h("dd", { class: kind }, value, note ? h("small", null, note) : null));

// groupName is how a group is called; consumers without a group have none.
const groupName = (g) => (g.name ? name(g.name) : h("span", null, "(no group)"));

const severity = (g) => (g.oldest_seconds > 300 ? "bad-text" : g.oldest_seconds > 60 ? "warn-text" : null);

const age = (x) => h("span", { class: severity(x) }, span(x.oldest_seconds));

const inProject = (project) => (project === "default" ? null : h("span", { class: "tag" }, "project ", name(project)));

const settledSoon = 300;

// bar is the search, the order and the pages of a list.
function bar({ q, go }, total, orders, what) {
  const offset = Number(q.get("offset") || 0);
  let wait = 0;
  const search = (event) => {
    clearTimeout(wait);
    const value = event.target.value;
    wait = setTimeout(() => go({ search: value, offset: 0, queue: "" }), settledSoon);
  };
  const last = Math.min(offset + pageSize, total);
  return h("div", { class: "bar", role: "search" },
    h("label", { for: "search" }, "Search", h("input", { id: "search", type: "search", maxlength: 255, value: q.get("search") || "", oninput: search })),
    orders ? h("label", { for: "sort" }, "Order", h("select", { id: "sort", onchange: (e) => go({ sort: e.target.value, offset: 0 }) },
      orders.map(([value, text]) => h("option", { value, selected: (q.get("sort") || orders[0][0]) === value }, text)))) : null,
    h("span", { class: "count", role: "status" }, total === 0 ? "none" : `${number(offset + 1)}–${number(last)} of ${plural(total, what, what + "s")}`),
    h("button", { type: "button", disabled: offset === 0, onclick: () => go({ offset: Math.max(0, offset - pageSize) }) }, "Previous"),
    h("button", { type: "button", disabled: last >= total, onclick: () => go({ offset: offset + pageSize }) }, "Next"));
}

// hour spreads the minutes that have numbers over the last sixty.
function hour(series) {
  const now = Math.floor(Date.now() / 60000);
  const points = Array.from({ length: 60 }, () => ({ pushed: 0, delivered: 0, done: 0, failed: 0, dead: 0 }));
  for (const m of series) {
    const at = 59 - (now - Math.floor(Date.parse(m.at) / 60000));
    if (at >= 0 && at < 60) points[at] = m;
  }
  return points;
}

// backlog counts back from what waits now, over all groups, by what came and went in each minute. A seek or retention is not in that.
function backlog(points, groups) {
  let waiting = groups.reduce((n, g) => n + g.lag, 0);
  return points.map((p) => p.pushed * groups.length - p.done - p.dead).reverse().map((change) => {
    const then = waiting;
    waiting = Math.max(0, waiting - change);
    return then;
  }).reverse();
}

function charts(series, groups) {
  const points = hour(series);
  const perSecond = (of) => points.map((p) => of(p) / 60);
  return h("section", { class: "charts", "aria-label": "The last hour" },
    chart("Messages", "per second", [["published", perSecond((p) => p.pushed)], ["consumed", perSecond((p) => p.done)]]),
    chart("Deliveries", "per second", [["delivered", perSecond((p) => p.delivered)]]),
    groups && groups.length ? chart("Waiting", "messages", [["over all groups", backlog(points, groups)]]) : null,
    chart("Failures", "per minute", [["failed attempts", points.map((p) => p.failed)], ["dead letters", points.map((p) => p.dead)]]));
}

// lately is the rate over the last full minutes.
function lately(series, of) {
  const points = hour(series).slice(56, 59);
  return points.reduce((sum, p) => sum + of(p), 0) / 180;
}

const overview = {
  title: "Overview",
  async show({ get, address }) {
    const o = await get("console/overview");
    const marks = { bad: "Now", warn: "Look" };
    return [
      h("section", { class: "card stuck", "aria-labelledby": "stuck" },
        h("h1", { id: "stuck" }, o.troubles.length ? "What is stuck" : "Everything flows"),
        h("ul", null,
          o.troubles.map((t) => h("li", { class: t.severity }, h("span", { class: "mark" }, marks[t.severity]), h("span", null, visible(t.text)), h("a", { href: address(t.page, t.query) }, "Show"))),
          o.troubles_hidden ? h("li", { class: "warn" }, `And ${number(o.troubles_hidden)} more: `, h("a", { href: address("groups") }, "all groups")) : null,
          o.troubles.length ? null : h("li", { class: "ok" }, "Nothing is stuck: no blocked key, no group without a consumer or falling behind, no new dead letter, no trouble with the database."))),
      h("dl", { class: "tiles" },
        tile("Published", rate(lately(o.series, (p) => p.pushed)), "per second"),
        tile("Consumed", rate(lately(o.series, (p) => p.done)), "per second"),
        tile("Waiting", number(o.lag), "messages, over all groups"),
        tile("Oldest", h("span", { class: severity(o) }, span(o.oldest_seconds)), "waiting message"),
        tile("Blocked keys", number(o.failing), "their message fails", o.failing ? "bad-text" : null),
        tile("Failed attempts", number(hour(o.series).slice(50).reduce((n, p) => n + p.failed, 0)), "in 10 minutes"),
        tile("Dead letters", number(o.dead), "stored"),
        tile("In work", number(o.leased), "keys that are leased"),
        tile("Live", number(o.connections), `connections here, ${number(o.waiting_consumers)} waiting`),
        tile("Queues", number(o.queues), plural(o.groups, "group", "groups"))),
      charts(o.series),
    ];
  },
};

const queueLink = (address, q) => h("a", { href: address("queue", { name: q.name, project: q.project }) }, name(q.name));

const queues = {
  title: "Queues and streams",
  async show(c) {
    const { q, get, address } = c;
    const list = await get("console/queues", { search: q.get("search"), sort: q.get("sort"), offset: q.get("offset"), limit: pageSize });
    return [
      h("h1", null, this.title),
      bar(c, list.total, [["name", "name"], ["lag", "most waiting"], ["oldest", "oldest message"], ["pushed", "busiest"]], "queue"),
      table("Queues", [
        ["Queue", (x) => [queueLink(address, x), inProject(x.project)], "text"],
        ["Waiting", (x) => (x.groups ? number(x.lag) : "no group"), "n"],
        ["Oldest", age, "n"],
        ["Blocked keys", (x) => h("span", { class: x.failing ? "bad-text" : null }, number(x.failing)), "n"],
        ["Published, 10 min", (x) => number(x.pushed), "n"],
        ["Stored", (x) => number(x.messages) + (x.more ? "+" : ""), "n"],
        ["Keys", (x) => number(x.keys) + (x.more ? "+" : ""), "n"],
        ["Groups", (x) => number(x.groups), "n"],
        ["Dead letters", (x) => number(x.dead), "n"],
      ], list.queues, list.all === 0 ? "There is no queue yet. The first message makes one." : "No queue has that in its name."),
    ];
  },
};

const queue = {
  title: "Queue",
  nav: "queues",
  async show({ q, get, address, session }) {
    const project = q.get("project") || "default";
    const x = await get("console/queue", { name: q.get("name"), project });
    return [
      h("h1", null, "Queue ", name(x.queue.name), inProject(project)),
      h("dl", { class: "tiles" },
        tile("Waiting", number(x.queue.lag), "for the slowest group"),
        tile("Oldest", h("span", { class: severity(x.queue) }, span(x.queue.oldest_seconds)), "waiting message"),
        tile("Published", rate(lately(x.series, (p) => p.pushed)), "per second"),
        tile("Stored", number(x.queue.messages) + (x.queue.more ? "+" : ""), plural(x.queue.keys, "key", "keys")),
        tile("Dead letters", number(x.queue.dead), x.queue.dead ? h("a", { href: address("dead", { search: x.queue.name }) }, "show") : "none")),
      project === "default" && session.project === null ? h("p", null, h("a", { href: address("messages", { queue: x.queue.name }) }, "Browse its messages")) : null,
      charts(x.series, x.groups),
      h("h2", null, "Groups and subscriptions"),
      groupTable(x.groups, address, "Nobody has consumed from this queue."),
    ];
  },
};

const trend = (g) => {
  const n = g.pushed - g.done - g.dead;
  return g.lag === 0 || n === 0 ? "steady" : n > 0 ? "+" + number(Math.min(n, g.lag)) : number(n);
};

function groupTable(rows, address, empty) {
  return table("Groups", [
    ["Group", (g) => [groupName(g), h("span", { class: "tag" }, g.kind), g.paused ? h("span", { class: "tag warn-text" }, "paused") : null, inProject(g.project)], "text"],
    ["Queue", (g) => queueLink(address, { name: g.queue, project: g.project }), "text"],
    ["Waiting", (g) => number(g.lag), "n"],
    ["Oldest", age, "n"],
    ["Change, 10 min", trend, "n"],
    ["Consumed, 10 min", (g) => number(g.done), "n"],
    ["Failed, 10 min", (g) => number(g.failed), "n"],
    ["In work", (g) => number(g.leased), "n"],
    ["Blocked keys", (g) => (g.failing ? h("a", { class: "bad-text", href: address("blocked", { search: g.name || "__QUEUE_MODE__", queue: g.queue }) }, number(g.failing)) : "0"), "n"],
  ], rows, empty);
}

const groups = {
  title: "Groups and subscriptions",
  async show(c) {
    const { q, get, address } = c;
    const list = await get("console/groups", { search: q.get("search"), sort: q.get("sort"), offset: q.get("offset"), limit: pageSize });
    return [
      h("h1", null, this.title),
      bar(c, list.total, [["oldest", "oldest message"], ["lag", "most waiting"], ["failing", "blocked keys"], ["name", "name"]], "group"),
      groupTable(list.groups, address, list.all === 0 ? "Nobody consumes yet. The first pop of a group, or a subscription, makes one." : "No group or queue has that in its name."),
    ];
  },
};

const blocked = {
  title: "Blocked keys",
  async show(c) {
    const { q, get, address, go } = c;
    const list = await get("console/blocked", { search: q.get("search"), queue: q.get("queue") });
    const only = q.get("search") || q.get("queue");
    return [
      h("h1", null, this.title),
      h("p", null, "The next message of these keys has failed. What is behind it waits, to keep the order; other keys go on."),
      only ? h("div", { class: "bar" }, h("span", null, "Only of ", name(q.get("search") || q.get("queue"))), h("button", { type: "button", onclick: () => go({ search: "", queue: "", project: "" }) }, "Show all")) : null,
      list.total > list.keys.length ? h("p", null, `The ${number(list.keys.length)} with most attempts of ${number(list.total)}.`) : null,
      table("Blocked keys", [
        ["Key", (k) => (k.key === null ? "(no key)" : name(k.key)), "text"],
        ["Group", (k) => [k.group ? name(k.group) : "(no group)", inProject(k.project)], "text"],
        ["Queue", (k) => queueLink(address, { name: k.queue, project: k.project }), "text"],
        ["Attempts", (k) => number(k.attempts), "n"],
        ["Last error", (k) => (k.last_error ? name(k.last_error) : "–"), "text"],
        ["Since", (k) => when(k.since), "n"],
        ["Until", (k) => (k.until ? [k.leased ? "in work, " : "next attempt ", when(k.until)] : "waits for a consumer"), "text"],
        ["Waiting", (k) => number(k.waiting), "n"],
        ["", (k) => h("a", { href: address("message", { id: k.message_id, project: k.project }) }, "Message"), "actions"],
      ], list.keys, "No key is blocked."),
    ];
  },
};

const subPath = (d, what) => `v1/subscriptions/${encodeURIComponent(d.group)}/dead-letters${what}?project=${encodeURIComponent(d.project)}`;

async function redrive(c, d) {
  const of = d.group ? `group ${visible(d.group)}` : `queue ${visible(d.queue)}`;
  const yes = await c.ask({ title: `Redrive ${plural(d.count, "message", "messages")}?`, action: `Redrive ${number(d.count)}`,
    text: [`They go back to the end of their keys and are delivered to ${of} again, from the first attempt.`, "Error: " + visible(d.signature)] });
  if (!yes) return;
  await c.act(async () => {
    if (d.kind === "subscription") {
      const { redriven } = await c.call("POST", subPath(d, "/redrive"), { signature: d.signature });
      return `${plural(redriven, "message was", "messages were")} redriven.`;
    }
    const { ids } = await c.get("console/dead-letters/ids", { queue: d.queue, group: d.group, signature: d.signature });
    let done = 0;
    for (const id of ids) {
      try {
        await c.call("POST", `api/v1/dlq/${id}/replay`, {});
        done++;
      } catch (e) {
        if (e.status !== 404 && e.status !== 409) throw new Error(`${plural(done, "message was", "messages were")} redriven of ${number(ids.length)}, then: ${e.message}`);
      }
    }
    return `${plural(done, "message was", "messages were")} redriven.`;
  });
}

async function remove(c, d, all) {
  const whole = d.kind !== "subscription"; // the other API removes those of a group together
  const count = whole ? all : d.count;
  const yes = await c.ask({ title: `Delete ${plural(count, "dead letter", "dead letters")}?`, action: `Delete ${number(count)}`, danger: true,
    text: ["They cannot be brought back.", whole ? `These are all dead letters of ${d.group ? "group " + visible(d.group) + " on " : ""}queue ${visible(d.queue)}, whatever their error.` : "Error: " + visible(d.signature)] });
  if (!yes) return;
  await c.act(async () => {
    if (!whole) {
      const { deleted } = await c.call("DELETE", subPath(d, ""), { signature: d.signature });
      return `${plural(deleted, "dead letter was", "dead letters were")} deleted.`;
    }
    const q = new URLSearchParams({ queue: d.queue, consumerGroup: d.group || "__QUEUE_MODE__" });
    const { deleted } = await c.call("DELETE", "api/v1/dlq?" + q);
    return `${plural(deleted, "dead letter was", "dead letters were")} deleted.`;
  });
}

const dead = {
  title: "Dead letters",
  async show(c) {
    const { q, get, session, address } = c;
    const list = await get("console/dead-letters", { search: q.get("search"), offset: q.get("offset"), limit: pageSize });
    const ofGroup = (d) => list.signatures.filter((x) => x.queue === d.queue && x.group === d.group && x.kind === d.kind && x.project === d.project).reduce((n, x) => n + x.count, 0);
    const mine = (d) => d.live && (d.kind === "subscription" || (d.project === "default" && session.project === null));
    const mayRedrive = (d) => mine(d) && (d.kind === "subscription" ? session.admin : session.consume);
    return [
      h("h1", null, this.title),
      h("p", null, `${plural(list.messages, "message", "messages")} that failed too often, grouped by error.`),
      bar(c, list.total, null, "error"),
      table("Dead letters by error", [
        ["Error", (d) => h("a", { href: address("letters", { queue: d.queue, group: d.group, kind: d.kind, project: d.project, signature: d.signature }) }, d.signature ? name(d.signature) : "(no error text)"), "text"],
        ["Count", (d) => [number(d.count), d.recent ? h("span", { class: "tag bad-text" }, `+${number(d.recent)} in 10 min`) : null], "n"],
        ["Group", (d) => [d.group ? name(d.group) : "(no group)", d.live ? null : h("span", { class: "tag" }, "deleted"), inProject(d.project)], "text"],
        ["Queue", (d) => queueLink(address, { name: d.queue, project: d.project }), "text"],
        ["First", (d) => when(d.first_seen), "n"],
        ["Last", (d) => when(d.last_seen), "n"],
        ["", (d) => [
          mayRedrive(d) ? h("button", { type: "button", "aria-label": `Redrive ${d.count} of ${visible(d.signature)}`, onclick: () => redrive(c, d) }, "Redrive") : null,
          session.admin && mine(d) ? h("button", { type: "button", class: "danger", "aria-label": `Delete ${d.count} of ${visible(d.signature)}`, onclick: () => remove(c, d, ofGroup(d)) }, "Delete") : null], "actions"],
      ], list.signatures, q.get("search") ? "No dead letter has that in its error, group or queue." : "There are no dead letters."),
    ];
  },
};

// text shows a payload: JSON is indented, and stays text.
function payload(value) {
  const s = typeof value === "string" ? value : JSON.stringify(value, null, 2);
  const cut = 100000;
  return h("pre", { tabindex: 0 }, visible(s === undefined ? "" : s.slice(0, cut)), s && s.length > cut ? `\n… ${number(s.length - cut)} more characters` : "");
}

const letters = {
  title: "Dead letters of an error",
  nav: "dead",
  still: true,
  async show({ q, get, address }) {
    const [queueName, group, kind, project, signature] = ["queue", "group", "kind", "project", "signature"].map((k) => q.get(k) || "");
    let rows;
    if (kind === "subscription") {
      const list = await get(`v1/subscriptions/${encodeURIComponent(group)}/dead-letters`, { project, signature, limit: 20 });
      rows = list.dead_letters.map((d) => ({ error: d.error, attempts: d.attempts, at: d.failed_at, key: d.message.key, payload: d.message.payload, link: address("message", { id: d.message.id, project }) }));
    } else {
      const { ids } = await get("console/dead-letters/ids", { queue: queueName, group, signature });
      const list = await get("api/v1/dlq", { queue: queueName, consumerGroup: group || "__QUEUE_MODE__", limit: 200 });
      rows = list.messages.filter((d) => ids.includes(d.id)).slice(0, 20).map((d) => ({ error: d.errorMessage, attempts: d.retryCount, at: d.failedAt, key: d.partition, payload: d.data, link: address("message", { partition: d.partitionId, transaction: d.transactionId }) }));
    }
    return [
      h("h1", null, "Dead letters: ", name(signature)),
      h("p", null, group ? ["Group ", name(group), ", queue "] : "Queue ", name(queueName), ". The newest, at most 20."),
      rows.map((d) => h("article", { class: "card" },
        h("dl", { class: "facts" }, h("dt", null, "Error"), h("dd", null, name(d.error)), h("dt", null, "Key"), h("dd", null, d.key === null ? "(no key)" : name(d.key)),
          h("dt", null, "Attempts"), h("dd", null, number(d.attempts)), h("dt", null, "Failed"), h("dd", null, when(d.at))),
        payload(d.payload), h("p", null, h("a", { href: d.link }, "Message and trace")))),
      rows.length ? null : h("p", { class: "empty" }, "There are none any more."),
    ];
  },
};

const messages = {
  title: "Messages",
  still: true,
  async show(c) {
    const { q, get, address, go, session } = c;
    const find = (event) => {
      event.preventDefault();
      const of = (id) => document.getElementById(id).value.trim();
      if (of("m-id").startsWith("msg_")) location.hash = address("message", { id: of("m-id") }).slice(1);
      else go({ queue: of("m-queue"), partition: of("m-key"), status: of("m-status"), offset: 0 });
    };
    const field = (id, label, value) => h("label", { for: id }, label, h("input", { id, type: "text", value: value || "", maxlength: 255 }));
    const byAPI = session.project === null;
    const offset = Number(q.get("offset") || 0);
    const list = byAPI ? await get("api/v1/messages", { queue: q.get("queue"), partition: q.get("partition"), status: q.get("status"), limit: pageSize + 1, offset: q.get("offset") }) : { messages: [] };
    const more = list.messages.length > pageSize;
    const first = (m) => visible(typeof m.payload === "string" ? m.payload : JSON.stringify(m.payload)).slice(0, 120);
    return [
      h("h1", null, this.title),
      h("form", { class: "bar", role: "search", onsubmit: find },
        byAPI ? [field("m-queue", "Queue", q.get("queue")), field("m-key", "Key (partition)", q.get("partition")),
          h("label", { for: "m-status" }, "State", h("select", { id: "m-status" }, ["", "pending", "processing", "completed", "dead_letter"].map((s) => h("option", { value: s, selected: (q.get("status") || "") === s }, s.replace("_", " ") || "any"))))] : null,
        field("m-id", "or a message id (msg_…)", ""),
        h("button", { class: "primary", type: "submit" }, "Find"),
        byAPI ? [h("button", { type: "button", disabled: offset === 0, onclick: () => go({ offset: Math.max(0, offset - pageSize) }) }, "Newer"),
          h("button", { type: "button", disabled: !more, onclick: () => go({ offset: offset + pageSize }) }, "Older")] : null),
      byAPI ? table("Messages", [
        ["Stored", (m) => when(m.createdAt), "n"],
        ["Queue", (m) => queueLink(address, { name: m.queue, project: "default" }), "text"],
        ["Key", (m) => name(m.partition), "text"],
        ["State", (m) => m.status.replace("_", " ")],
        ["Payload", (m) => (m.payloadAvailable ? name(first(m)) : "(cannot be read)"), "text"],
        ["", (m) => (m.transactionId === null ? null : h("a", { href: address("message", { partition: m.partitionId, transaction: m.transactionId }) }, "Show")), "actions"],
      ], list.messages.slice(0, pageSize), "There is no such message.") : h("p", { class: "empty" }, "An API key sees messages by their id, and dead letters."),
    ];
  },
};

const isTime = (key, value) => typeof value === "string" && /^\d{4}-\d\d-\d\dT/.test(value) && (key === "at" || key.endsWith("_at") || key.endsWith("At"));

// facts shows the fields of an object that are no objects.
const facts = (x, left) => h("dl", { class: "facts" }, Object.entries(x).filter(([k, v]) => v !== null && v !== "" && typeof v !== "object" && !left.includes(k)).map(([k, v]) => [h("dt", null, k), h("dd", null, isTime(k, v) ? [visible(v), " (", when(v), ")"] : name(v))]));

const message = {
  title: "Message",
  nav: "messages",
  async show(c) {
    const { q, get, address } = c;
    if (q.get("id")) {
      const trace = await get(`v1/messages/${encodeURIComponent(q.get("id"))}/trace`, { project: q.get("project") });
      try {
        return traced(trace, await get("console/message", { id: trace.id }));
      } catch (e) {
        if (e.status !== 404 && e.status !== 400) throw e;
        return traced(trace, null);
      }
    }
    const [p, t] = [q.get("partition") || "", q.get("transaction") || ""];
    const path = `${encodeURIComponent(p)}/${encodeURIComponent(t)}`;
    const m = await get("api/v1/messages/" + path);
    const traces = await get("api/v1/traces/" + path);
    return [
      h("h1", null, "Message ", name(t)),
      h("section", { class: "card" }, facts(m, ["data", "payload"]), h("h2", null, "Payload"), m.payloadAvailable === false ? h("p", null, "It cannot be read.") : payload(m.payload === undefined ? m.data : m.payload)),
      h("section", { class: "card" }, h("h2", null, "Trace"),
        (traces.traces || []).length ? h("ol", { class: "timeline" }, traces.traces.map((x) => h("li", null, when(x.created_at), " ", h("strong", null, name(x.event_type || "event")), x.consumer_group ? [" by ", name(x.consumer_group)] : null, x.data === undefined || x.data === null ? null : payload(x.data))))
          : h("p", null, "Nobody has traced this message.")),
    ];
  },
};

// traced shows what happened to a message of a stream.
function traced(t, stored) {
  return [
    h("h1", null, "Message ", name(t.id)),
    h("section", { class: "card" }, facts(t, []),
      h("h2", null, "Payload"), !stored ? h("p", null, "It is not stored any more, or not yet due.") : stored.readable ? payload(stored.payload) : h("p", null, "It cannot be read."),
      stored && stored.headers ? [h("h2", null, "Headers"), payload(stored.headers)] : null),
    (t.subscriptions || []).map((s) => h("section", { class: "card" },
      h("h2", null, "Subscription ", name(s.subscription || s.name)), facts(s, ["subscription", "name"]),
      h("ol", { class: "timeline" }, (s.events || []).map((e) => h("li", { class: e.error || /fail|dead/.test(e.event || e.type || "") ? "bad" : null }, when(e.at), " ", h("strong", null, e.event || e.type), e.attempt ? ` attempt ${e.attempt}` : null, e.consumer ? [" by ", name(e.consumer)] : null, e.error ? h("div", null, name(e.error)) : null))))),
  ];
}

const maintenance = {
  title: "Maintenance",
  async show(c) {
    const { get, session, ask, act, call } = c;
    if (session.project !== null) return [h("h1", null, this.title), h("p", { class: "empty" }, "An API key has no part in this.")];
    const s = await get("console/system");
    const flip = (on, title, path, what) => async () => {
      if (!(await ask({ title: `${on ? "End" : "Begin"} ${what}?`, action: on ? "End it" : "Begin it", danger: !on, text: [on ? "Everything goes on as before." : title] }))) return;
      await act(async () => {
        await call("POST", path, { enabled: !on });
        return `${what} is ${on ? "off" : "on"}. Other brokers follow within seconds.`;
      });
    };
    const part = (on, what, title, path) => h("section", { class: "card switch" },
      h("div", null, h("h2", null, what, h("span", { class: "tag " + (on ? "bad-text" : "") }, on ? "on" : "off")), h("p", null, title)),
      session.admin ? h("button", { type: "button", class: on ? "primary" : "danger", onclick: flip(on, title, path, what) }, (on ? "End " : "Begin ") + what.toLowerCase()) : h("span", null, "Only an admin can change it."));
    return [
      h("h1", null, this.title),
      part(s.push_maintenance, "Push maintenance", "Every push is refused with 503; producers try again later.", "api/v1/system/maintenance"),
      part(s.pop_maintenance, "Pop maintenance", "Every pop is answered empty; leases that run can still be acked.", "api/v1/system/maintenance/pop"),
    ];
  },
};

const system = {
  title: "Brokers and database",
  async show({ get, session }) {
    if (session.project !== null) return [h("h1", null, this.title), h("p", { class: "empty" }, "An API key has no part in this.")];
    const s = await get("console/system");
    const d = s.database;
    return [
      h("h1", null, this.title),
      h("dl", { class: "tiles" },
        tile("PostgreSQL", d.version.split(" ")[0], d.read_only ? "read only" : bytes(d.bytes)),
        tile("Round trip", d.round_trip_ms.toFixed(1) + " ms", "one query, from here"),
        tile("Connections", number(d.connections), "of " + number(d.max_connections), d.connections * 10 > d.max_connections * 9 ? "bad-text" : null),
        tile("Oldest transaction", span(d.oldest_transaction_seconds), "open", d.oldest_transaction_seconds > 300 ? "warn-text" : null),
        tile("Waiting for locks", number(d.waiting_for_locks), "sessions", d.waiting_for_locks >= 10 ? "warn-text" : null),
        tile("Live", number(s.connections), "HTTP connections here")),
      h("h2", null, "Brokers"),
      table("Brokers", [
        ["Broker", (b) => [name(b.name), b.this ? h("span", { class: "tag" }, "this one") : null], "text"],
        ["Running since", (b) => when(b.started_at), "n"],
        ["Last seen", (b) => h("span", { class: b.silent_seconds > 15 ? "bad-text" : null }, b.silent_seconds < 5 ? "now" : span(b.silent_seconds) + " ago"), "n"],
        ["State", (b) => (b.silent_seconds > 15 ? h("span", { class: "bad-text" }, "silent") : "up")],
      ], s.brokers, "No broker has been seen within the hour."),
    ];
  },
};

export const pages = { overview, queues, queue, groups, blocked, dead, letters, messages, message, maintenance, system };
