package browser

import (
	"fmt"
	"net/url"
	"strings"
	"syscall"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

var listPages = []struct{ hash, title, empty string }{
	{"#/overview", "Overview", "Nothing is stuck"},
	{"#/queues", "Queues and streams", "There is no queue yet"},
	{"#/groups", "Groups and subscriptions", "Nobody consumes yet"},
	{"#/blocked", "Blocked keys", "No key is blocked"},
	{"#/dead", "Dead letters", "There are no dead letters"},
	{"#/messages", "Messages", "There is no such message"},
	{"#/maintenance", "Maintenance", "Every push is refused"},
	{"#/system", "Brokers and database", "this one"},
}

// Without anything in it every page says so. A keyboard alone reaches the content and the pages.
func TestEmpty(t *testing.T) {
	b := start(t)
	p := open(t, b.url)
	for _, x := range listPages {
		p.to(x.hash, x.title)
		p.says(x.empty)
		p.shoot("empty-" + strings.TrimPrefix(x.hash, "#/"))
	}
	for _, c := range []struct{ hash, says string }{{"#/queue?name=nope", "Queue not found"}, {"#/message?id=msg_zzz", "message"}, {"#/message?partition=x&transaction=y", "Message not found"}, {"#/nonsense", "Nothing is stuck"}} {
		p.bears = append(p.bears, "404", "400")
		p.run(chromedp.Evaluate(`location.hash = `+quoted(c.hash), nil))
		p.says(c.says)
	}
	for _, what := range []string{"header", "nav[aria-label]", "main", "[role=alert]", "[role=status][aria-live=polite]", "html[lang]", "h1"} {
		if !js[bool](p, `!!document.querySelector(`+quoted(what)+`)`) {
			t.Errorf("there is no %s", what)
		}
	}
	p.run(chromedp.Navigate(b.url + "/"))
	p.says("Everything flows")
	p.run(chromedp.KeyEvent(kb.Tab), chromedp.KeyEvent(kb.Enter))
	if at := js[string](p, `document.activeElement.id`); at != "main" {
		t.Errorf("skip leads to %q", at)
	}
	p.run(chromedp.Evaluate(`document.querySelector("nav a[href='#/groups']").focus()`, nil), chromedp.KeyEvent(kb.Enter))
	p.says("Nobody consumes yet")
	if at := js[string](p, `document.activeElement.id + " " + document.querySelector("nav [aria-current=page]").innerText + " " + document.getElementById("live").innerText`); at != "main Groups Groups and subscriptions" {
		t.Errorf("after a link: %q", at)
	}
}

// fixture is a bit of everything that goes wrong.
func fixture(b *broker) {
	for i := range 5 {
		b.call("POST", "/api/v1/push", m{"items": []any{m{"queue": "emails", "partition": fmt.Sprint("customer-", i), "transactionId": fmt.Sprint("mail-", i), "payload": m{"to": "a@example.org", "n": i}}}})
	}
	b.call("PUT", "/v1/subscriptions/billing", m{"stream": "orders", "retry": m{"max_attempts": 5, "initial": "10m", "max": "20m"}})
	b.call("PUT", "/v1/subscriptions/audit", m{"stream": "orders", "retry": m{"max_attempts": 1}})
	var all []any
	for i := range 20 {
		all = append(all, m{"key": fmt.Sprint("tenant_", i%4), "payload": m{"order": i}})
	}
	b.call("POST", "/v1/streams/orders/messages", m{"messages": all})
	b.fail("billing", 3, "downstream 500: card 4711 was refused")
	b.fail("audit", 4, "no such tenant 7")
	b.fail("audit", 2, "disk full")
	popped := b.call("GET", "/api/v1/pop/queue/emails?batch=1&partitions=1&consumerGroup=mailer", nil)["messages"].([]any)[0].(m)
	b.call("POST", "/api/v1/ack", m{"transactionId": popped["transactionId"], "partitionId": popped["partitionId"], "leaseId": popped["leaseId"], "consumerGroup": "mailer", "status": "dlq", "error": "SMTP 550: mailbox 12 unavailable"})
	b.call("POST", "/api/v1/traces", m{"transactionId": popped["transactionId"], "partitionId": popped["partitionId"], "data": m{"step": "rendered"}, "eventType": "template", "consumerGroup": "mailer"})
}

// What goes wrong is on the first page, each page shows its part, and each action does what it says, after asking, with the count.
func TestTroubleAndActions(t *testing.T) {
	b := start(t)
	fixture(b)
	p := open(t, b.url)
	p.says("What is stuck", `Subscription "billing": 3 keys are blocked by messages that fail.`, `Subscription "audit": 6 messages died in the last ten minutes, mostly "no such tenant <n>".`,
		`Group "mailer" of queue "emails": 1 message died`)
	await(t, "the charts have the messages", func() bool {
		return js[bool](p, `document.querySelectorAll("svg.chart path").length === 5 && [...document.querySelectorAll("svg.chart")].some((s) => !/at most 0 per second; consumed/.test(s.getAttribute("aria-label")))`)
	})
	p.shoot("overview")

	// From the first page to the cause.
	p.click(`[...document.querySelectorAll(".stuck li")].find((x) => x.innerText.includes("billing")).querySelector("a")`)
	p.says("tenant_0", "downstream 500: card 4711 was refused", "next attempt", "Only of billing")
	p.shoot("blocked")
	p.click(`document.querySelector("td.actions a")`)
	p.says("Message msg_", "Payload", "\"order\": ", "Subscription billing", "failed", "downstream 500", "worker-1")
	p.shoot("trace")

	p.to("#/queues", "Queues and streams")
	p.says("orders", "emails", "1–2 of 2 queues")
	p.shoot("queues")
	p.click(`[...document.querySelectorAll("td a")].find((a) => a.innerText === "orders")`)
	p.says("Queue orders", "billing", "audit", "for the slowest group")
	await(t, "the chart of what waits ends with what waits", func() bool {
		return js[bool](p, `(async () => {
			const groups = (await (await fetch("console/queue?name=orders&project=default", { headers: { "X-FerryMQ-Console": "1" } })).json()).groups;
			const waiting = groups.reduce((n, g) => n + g.lag, 0);
			return waiting > 20 && [...document.querySelectorAll("svg.chart")].some((s) => s.getAttribute("aria-label").startsWith("Waiting in the last hour. over all groups: now " + waiting + ", at most " + waiting + " "));
		})()`)
	})
	p.shoot("queue")
	p.to("#/groups", "Groups and subscriptions")
	p.says("billing", "mailer", "subscription")
	p.shoot("groups")

	p.to("#/dead", "Dead letters")
	p.says("7 messages that failed too often", "no such tenant <n>", "disk full", "SMTP <n>: mailbox <n> unavailable")
	p.shoot("dead")
	p.click(`[...document.querySelectorAll("td a")].find((a) => a.innerText.startsWith("no such"))`)
	p.says("Dead letters: no such tenant <n>", `"order":`, "no such tenant 7")
	p.shoot("letters")
	p.to("#/dead", "Dead letters")
	row := func(text, button string) {
		t.Helper()
		await(t, button+" of "+text, func() bool {
			return js[bool](p, `(() => { const b = [...document.querySelectorAll("tr")].find((r) => r.innerText.includes(`+quoted(text)+`))?.querySelectorAll("button"); const x = b && [...b].find((x) => x.innerText === `+quoted(button)+` && !x.disabled); if (x) x.click(); return !!x; })()`)
		})
	}
	row("no such tenant", "Redrive")
	p.says("Redrive 4 messages?", "They go back to the end of their keys and are delivered to group audit again", "Error: no such tenant <n>")
	p.shoot("confirm")
	p.press("Cancel")
	if n := b.call("GET", "/v1/subscriptions/audit", nil)["dead"]; n != 6.0 {
		t.Errorf("after Cancel there are %v dead letters", n)
	}
	row("no such tenant", "Redrive")
	p.press("Redrive 4")
	p.says("4 messages were redriven.")
	p.not("no such tenant <n>")
	row("disk full", "Delete")
	p.press("Delete 2")
	p.says("2 dead letters were deleted.")
	p.not("disk full")
	row("SMTP", "Redrive")
	p.press("Redrive 1")
	p.says("1 message was redriven.", "There are no dead letters.")
	if n := b.call("GET", "/v1/subscriptions/audit", nil)["dead"]; n != 0.0 {
		t.Errorf("there are %v dead letters", n)
	}

	p.to("#/messages", "Messages")
	p.says("customer-0", "a@example.org")
	p.shoot("messages")
	p.fill("m-queue", "orders")
	p.fill("m-key", "tenant_2")
	p.press("Find")
	p.says(`{"order":2}`)
	p.not("a@example.org")
	p.to("#/messages?queue=emails", "Messages")
	p.click(`[...document.querySelectorAll("tr")].filter((r) => r.innerText.includes('"n":0')).at(-1).querySelector("td.actions a")`)
	p.says("Message mail-0", `"to": "a@example.org"`, "Trace", "template", "by mailer", `"step": "rendered"`)
	p.shoot("message")

	p.to("#/maintenance", "Maintenance")
	p.press("Begin push maintenance")
	p.says("Begin Push maintenance?", "Every push is refused with 503")
	p.press("Begin it")
	p.says("Push maintenance is on.", "End push maintenance")
	if on := b.call("GET", "/api/v1/system/maintenance", nil)["maintenanceMode"]; on != true {
		t.Errorf("push maintenance is %v", on)
	}
	p.to("#/overview", "Overview")
	p.says("Publishing is switched off")
	p.to("#/maintenance", "Maintenance")
	p.press("End push maintenance")
	p.press("End it")
	p.says("Begin push maintenance")
	p.press("Begin pop maintenance")
	p.press("Begin it")
	p.says("End pop maintenance")
	p.shoot("maintenance")
	p.to("#/system", "Brokers and database")
	p.says("this one", "PostgreSQL", "Round trip")
	p.shoot("system")
}

// Names and payloads of any kind are text, in every place.
func TestHostile(t *testing.T) {
	b := start(t)
	names := []string{`<script>alert(1)</script>`, `"><img src=x onerror=alert(1)>`, "a/b%2Fc?d=e#f&g", "שלום ‮evil", "🚢⚓️", "..", `'; drop table queues; --`, "{{7*7}}${7*7}", "javascript:alert(1)", strings.Repeat("long", 60)}
	for _, n := range names {
		b.call("PUT", "/v1/subscriptions/"+url.PathEscape(n+"!"), m{"stream": n, "retry": m{"max_attempts": 1}})
		b.call("POST", "/v1/streams/"+url.PathEscape(n)+"/messages", m{"messages": []any{m{"key": n, "payload": m{n: n}}, m{"key": n, "payload": n}}})
		b.fail(n+"!", 1, n)
	}
	p := open(t, b.url)
	p.says("10 groups")
	p.shoot("hostile-overview")
	shown := func(n string) string { return strings.ReplaceAll(n, "‮", `\u202e`) }
	for _, page := range []struct{ hash, title string }{{"#/queues", "Queues and streams"}, {"#/groups", "Groups and subscriptions"}, {"#/dead", "Dead letters"}, {"#/messages", "Messages"}} {
		p.to(page.hash, page.title)
		for _, n := range names {
			if page.title != "Dead letters" {
				p.says(shown(n))
			}
		}
		p.shoot("hostile-" + strings.TrimPrefix(page.hash, "#/"))
	}
	for _, n := range names {
		p.to("#/queue?name="+url.QueryEscape(n), "Queue")
		p.says("Queue "+shown(n), shown(n)+"!")
		p.to("#/queues?search="+url.QueryEscape(n), "Queues and streams")
		p.says(shown(n))
		p.to("#/dead?search="+url.QueryEscape(n), "Dead letters")
		p.says(shown(n) + "!")
		p.click(`[...document.querySelectorAll("tr")].filter((r) => r.innerText.includes(` + quoted(shown(n)+"!") + `))[0].querySelector("td a")`)
		p.says("Dead letters: ", shown(n))
		await(t, "its payload is there", func() bool {
			return js[bool](p, `!!document.querySelector("pre")?.innerText.includes(JSON.stringify(`+quoted(n)+`).slice(1, -1).replaceAll("\u202e", "\\u202e"))`)
		})
		if js[int](p, `document.querySelectorAll("main script, main img, main iframe").length`) != 0 {
			t.Errorf("%q became markup", n)
		}
	}
	p.to("#/dead?search="+url.QueryEscape(names[0]), "Dead letters")
	p.press("Redrive")
	p.press("Redrive 1")
	p.says("1 message was redriven.")
}

// Ten thousand queues are paged and searched.
func TestTenThousandQueues(t *testing.T) {
	b := start(t)
	for at := 0; at < 10_000; at += 1000 {
		var items []any
		for i := range 1000 {
			items = append(items, m{"queue": fmt.Sprintf("q-%05d", at+i), "payload": 1})
		}
		b.call("POST", "/api/v1/push", m{"items": items})
	}
	p := open(t, b.url)
	p.says("10,000")
	p.to("#/queues", "Queues and streams")
	p.says("1–50 of 10,000 queues", "q-00049")
	p.not("q-00050")
	p.press("Next")
	p.says("51–100 of 10,000 queues", "q-00050")
	p.press("Previous")
	p.says("1–50 of")
	p.fill("search", "Q-0999")
	p.says("1–10 of 10 queues", "q-09999")
	p.fill("search", "nothing like it")
	p.says("No queue has that in its name.")
	p.fill("search", "")
	p.says("1–50 of 10,000 queues")
	p.fill("sort", "pushed")
	p.says("1–50 of 10,000 queues")
	p.shoot("many")
	if took := js[float64](p, `(async () => { const t = performance.now(); await (await fetch("console/overview")).json(); return performance.now() - t; })()`); took > 5000 {
		t.Errorf("the overview takes %.0f ms", took)
	}
}

// A broker that goes away is missed at once, what was shown stays, and it goes on by itself when it is back.
func TestBrokerGoesAndComes(t *testing.T) {
	b := start(t)
	b.call("POST", "/api/v1/push", m{"items": []any{m{"queue": "emails", "payload": 1}}})
	p := open(t, b.url, "ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE", "503", "500")
	p.to("#/queues", "Queues and streams")
	p.says("emails", "live")
	b.down(syscall.SIGTERM)
	p.says("The broker has not answered since", "emails", "no answer")
	p.shoot("away")
	b.up()
	p.not("has not answered")
	p.says("emails", "live")
}

// Below a prefix everything works: files, pages, links, log-in and actions.
func TestPrefixAndRoles(t *testing.T) {
	b := start(t, "AUTH_REQUIRED=true", "ROOT_API_KEY="+rootKey)
	fixture(b)
	b.call("POST", "/v1/projects", m{"name": "payments"})
	reader := b.call("POST", "/v1/projects/default/keys", m{"name": "reader", "scopes": []string{"read"}})["secret"].(string)
	other := b.call("POST", "/v1/projects/payments/keys", m{"name": "other", "scopes": []string{"read", "admin"}})["secret"].(string)
	publisher := b.call("POST", "/v1/projects/default/keys", m{"name": "publisher", "scopes": []string{"publish"}})["secret"].(string)
	base := below(t, b, "/tools/ferry")
	p := open(t, base, "401", "403")
	login := func(key string) {
		t.Helper()
		p.says("Log in")
		p.fill("credential", key)
		p.run(chromedp.Evaluate(`document.getElementById("credential").focus()`, nil), chromedp.KeyEvent(kb.Enter))
	}
	p.shoot("login")
	login("wrong")
	p.says("Bad token header")
	login("fmq_wrong")
	p.says("Unknown API key")
	login(publisher)
	p.says("Insufficient permissions")
	login(rootKey)
	p.says("What is stuck", "Log out")
	if c := js[string](p, `document.cookie`); c != "" {
		t.Errorf("a script reads %q", c)
	}
	for _, x := range listPages {
		p.to(x.hash, x.title)
	}
	p.to("#/dead", "Dead letters")
	p.says("disk full")
	if !p.has("Redrive") || !p.has("Delete") {
		t.Error("an admin has no buttons")
	}
	p.press("Delete")
	p.says("cannot be brought back")
	p.press("Cancel")
	p.run(chromedp.Reload())
	p.says("disk full", "Log out") // the session outlives a reload
	p.press("Log out")

	login(reader)
	p.says("project default (read only)")
	p.to("#/overview", "Overview")
	p.says("What is stuck", `Subscription "billing"`)
	p.to("#/dead", "Dead letters")
	p.says("disk full")
	if p.has("Redrive") || p.has("Delete") {
		t.Error("a reader has buttons")
	}
	p.to("#/maintenance", "Maintenance")
	p.says("An API key has no part in this.")
	refused := js[int](p, `(async () => (await fetch("v1/subscriptions/audit/dead-letters", { method: "DELETE", body: '{"all":true}', headers: { "X-FerryMQ-Console": "1" } })).status)()`)
	if refused != 403 {
		t.Errorf("a reader deletes: %d", refused)
	}
	if bare := js[int](p, `(async () => (await fetch("console/overview")).status)()`); bare != 401 {
		t.Errorf("without the header: %d", bare)
	}
	p.press("Log out")

	login(other)
	p.says("project payments")
	p.to("#/overview", "Overview")
	p.says("Everything flows")
	p.to("#/queues", "Queues and streams")
	p.says("There is no queue yet")
}
