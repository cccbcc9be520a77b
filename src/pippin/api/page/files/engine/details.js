// The panel with everything about one step, node or request.

import { getJson, ofChosen } from "../lib/api.js";
import { announce, columns, h, icon, scrollTable } from "../lib/dom.js";
import { bytes, count, percent, plural, seconds } from "../lib/format.js";
import { acceptedDrafts, describeStep, promptTokens, verifiedDrafts } from "./timeline.js";

const REST_MS = 120; // the pointer rests that long before a text is fetched

export class Details {
  #body = h("div", { class: "details-body" });
  #timer = 0;
  #texts = new Map(); // node's id -> its text, while its tokens are the same

  constructor(close) {
    this.element = h("aside", { class: "card details", "aria-label": "Details" },
      h("div", { class: "card-head" }, h("h2", {}, "Details"),
        h("button", { type: "button", class: "quiet icon small", "aria-label": "Close details", onclick: () => { this.clear(); close(); } }, icon("close"))),
      this.#body);
    this.clear();
  }

  clear() {
    clearTimeout(this.#timer);
    this.element.classList.remove("open");
    this.#body.replaceChildren(h("p", { class: "note" },
      "Point at a node of the tree, or click a step or a request. With the keyboard: arrows, then Enter."));
  }

  // `busy`: seconds that it was on the device.
  showStep(step, busy, requestIn) {
    this.#show(`Step ${count(step.step)}`, [
      ["Prompts", step.chunks.length ? `${plural(promptTokens(step), "token")} in ${plural(step.chunks.length, "chunk")}` : "none"],
      ["Decode", step.decode.length ? plural(step.decode.length, "row") : "none"],
      ["Drafts", verifiedDrafts(step) ? `${count(acceptedDrafts(step))} of ${count(verifiedDrafts(step))} accepted` : "none"],
      ["Ghosts", count(step.ghosts)],
      ["Planned and launched", seconds(step.launched - step.planned)],
      ["On the device", `${step.seen ? "" : "at least "}${seconds(busy)}`],
      ["Host waited", seconds(step.waited)],
      ["Committed", seconds(step.committed - step.resumed)],
      ["Device idle before", step.span ? `${seconds(Math.max(0, step.idle))} (${percent(Math.max(0, step.idle) / step.span)})` : "after a pause"],
      ["Captured for the tree", plural(step.captures, "row")],
      ["Started", names(step.started)],
      ["Preempted", names(step.preempted)],
      ["Slots freed", step.retired.join(", ") || "none"],
      ["Forwards", forwards(step.forwards)],
    ], rowsTable(step, requestIn));
    announce(describeStep(step));
  }

  showRequest(request) {
    this.#show("Request", [
      ["Id", request.id],
      ["Phase", request.finish ? `${request.phase}: ${request.finish}` : request.phase],
      ["Slot", request.slot ?? "none"],
      ["Prompt", `${plural(request.prompt, "token")}, ${count(request.cached)} reused`],
      ...(request.peer ? [["Handed over", `${plural(request.peer, "token")} of a prefill engine`]] : []),
      ["Reply", `${plural(request.reply, "token")} of ${count(request.max_tokens)} at most`],
      ["Waited", seconds(request.started === null ? null : request.started - request.arrived)],
      ["First token after", seconds(request.first_token === null ? null : request.first_token - request.arrived)],
      ["Ended after", seconds(request.ended === null ? null : request.ended - request.arrived)],
      ["Priority", request.priority],
      ["Preempted", plural(request.preemptions, "time")],
    ]);
  }

  // `now`: fetch the text at once, not when the pointer rests.
  showNode(node, tree, now) {
    const text = h("pre", { class: "text", tabindex: 0, role: "region", "aria-label": "Text" }, "…");
    this.#show(plural(node.tokens, "token"), [
      ["Positions", `${count(node.start)} to ${count(node.start + node.tokens - 1)}`],
      ...Object.entries(node.bytes).map(([name, size]) => [name, bytes(size)]),
      ["Where", node.tier === "device" ? "on the device" : `on ${node.tier}`],
      ["Prompts that ended here", count(node.hits)],
      ["Last used", node.used === tree.tick ? "just now" : `${plural(tree.tick - node.used, "use")} of the tree ago`],
      ["Locked by a running request", tree.locked.has(node.id) ? "yes" : "no"],
      ["Children", count(node.children)],
    ], text);
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#fetchText(node, text), now ? 0 : REST_MS);
  }

  async #fetchText(node, place) {
    const key = `${node.id}:${node.start}:${node.tokens}`;
    try {
      if (!this.#texts.has(key)) this.#texts.set(key, await getJson(ofChosen(`events/node/${node.id}`)));
      const { text, shown, tokens } = this.#texts.get(key);
      place.textContent = shown < tokens ? `${text} …` : text;
    } catch (error) {
      place.textContent = error.status === 404 ? "(It is no longer in the tree.)" : `(${error.message})`;
    }
    if (this.#texts.size > 200) this.#texts.delete(this.#texts.keys().next().value);
  }

  #show(title, facts, more = null) {
    this.element.classList.add("open");
    this.#body.replaceChildren(
      h("h3", {}, title),
      h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))])),
      ...(more ? [more] : []),
    );
  }
}

const forwards = (counts) =>
  Object.entries(counts).filter(([, value]) => value)
    .map(([name, value]) => (value === true ? name : `${value} ${name.replaceAll("_", " ")}`)).join(", ") || "none";

const names = (ids) => ids.map(shortId).join(", ") || "none";

export const shortId = (id) => {
  const [, middle, choice] = /^[a-z]+[-_](.+?)(-\d+)?$/i.exec(id) ?? [null, id, ""];
  return middle.slice(0, 6) + (choice && choice !== "-0" ? choice : "");
};

function tokensOf(slot, step) {
  const [, verified, accepted] = step.drafts.find(([own]) => own === slot) ?? [slot, 0, 0];
  return plural(1 + accepted, "token") + (verified ? `, ${count(accepted)} of ${plural(verified, "draft")}` : "");
}

function rowsTable(step, requestIn) {
  const rows = [
    ...step.chunks.map((chunk) => [chunk.slot, shortId(chunk.request),
      `${count(chunk.start)} + ${count(chunk.tokens)}${chunk.restored ? `, ${count(chunk.restored)} reused` : ""}`]),
    ...step.decode.map((slot) => [slot, shortId(requestIn(slot, step.launched)?.id ?? "–"), tokensOf(slot, step)]),
  ].sort((a, b) => a[0] - b[0]);
  return scrollTable("Rows of the step", columns(["Slot", "Request", "Tokens"]),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, String(cell)))))));
}

// Requests that run, wait or have just ended, each with a bar of its tokens.
// Rows stay while their request is shown: one that is replaced could not be clicked.
const ROWS = 8; // always that many lines, so that nothing below them moves
const ORDER = ["prefill", "decode", "loading", "compiling", "waiting", "ended"];
const PARTS = ["reused", "computed", "left", "reply"];

export class Requests {
  #state;
  #open;
  #rows = new Map(); // id -> row
  #blanks = Array.from({ length: ROWS }, () => h("tr", { class: "blank", "aria-hidden": "true" }, h("td", { colspan: 5 }, " ")));
  #body = h("tbody");
  #more = h("p", { class: "note" });

  constructor(state, open) {
    this.#state = state;
    this.#open = open;
    const head = columns(["Request", "Phase", "Prompt and reply", "Tokens", "Waited"]);
    this.element = h("div", { class: "requests" }, scrollTable("Table of requests", head, this.#body), this.#more);
  }

  draw() {
    const all = [...this.#state.requests.values()].sort(byPhase);
    const shown = all.slice(0, ROWS);
    const longest = Math.max(64, ...shown.map(({ prompt, reply }) => prompt + reply));
    const rows = new Map(shown.map(({ id }) => [id, this.#rows.get(id) ?? this.#row(id)]));
    for (const request of shown) rows.get(request.id).draw(request, longest, this.#state.at);
    const lines = [...[...rows.values()].map(({ element }) => element), ...this.#blanks.slice(rows.size)];
    if (lines.some((line, n) => line !== this.#body.children[n])) this.#body.replaceChildren(...lines);
    this.#rows = rows;
    this.#more.textContent = all.length > ROWS ? `and ${count(all.length - ROWS)} more` : " ";
  }

  #row(id) {
    const cells = Array.from({ length: 3 }, (_, n) => h("td", { class: n ? "number" : "" }));
    const parts = PARTS.map((name) => h("span", { class: name }));
    const bar = h("span", { class: "tokens", role: "img" }, parts);
    const button = h("button", { type: "button", class: "quiet small mono", "aria-label": `Request ${shortId(id)}`, onclick: () => this.#open(this.#state.requests.get(id)) }, shortId(id));
    const element = h("tr", {}, h("td", {}, button), cells[0], h("td", { class: "wide" }, bar), cells[1], cells[2]);
    const draw = (request, longest, now) => {
      const { prompt, cached, held, reply, ended, finish, phase, preemptions } = request;
      const computed = ended === null ? Math.max(0, Math.min(held, prompt) - cached) : prompt - cached;
      const again = preemptions && ended === null ? ` (preempted ${preemptions}×)` : "";
      element.className = `phase-${phase}`;
      cells[0].textContent = (finish ?? phase) + again;
      cells[1].textContent = `${count(cached)} / ${count(prompt)} + ${count(reply)}`;
      cells[2].textContent = seconds((request.started ?? ended ?? now) - request.arrived);
      [cached, computed, prompt - cached - computed, reply].forEach((tokens, n) => {
        parts[n].style.width = `${(100 * Math.max(0, tokens)) / longest}%`;
      });
      bar.setAttribute("aria-label", `${cached} reused, ${prompt - cached} computed, ${reply} of the reply`);
    };
    return { element, draw };
  }
}

function byPhase(a, b) {
  const order = ORDER.indexOf(a.phase) - ORDER.indexOf(b.phase);
  return order || (a.phase === "ended" ? b.ended - a.ended : a.arrived - b.arrived);
}
