// Requests that run, wait or have just ended, each with a bar of its tokens.
// Rows stay while their request is shown: one that is replaced could not be clicked.

import { columns, h, scrollTable } from "../lib/dom.js";
import { count, seconds } from "../lib/format.js";
import { shortId } from "./details.js";

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
