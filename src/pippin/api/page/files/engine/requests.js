// Requests that run, wait or have just ended, each with a bar of its tokens.

import { h } from "../lib/dom.js";
import { count, seconds } from "../lib/format.js";
import { shortId } from "./details.js";

const ROWS = 8; // always that many lines, so that nothing below them moves
const ORDER = ["prefill", "decode", "compiling", "waiting", "ended"];

export class Requests {
  #state;
  #open;
  #body = h("tbody");
  #more = h("p", { class: "note" });

  constructor(state, open) {
    this.#state = state;
    this.#open = open;
    this.element = h("div", { class: "requests" },
      h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table of requests" },
        h("table", {},
          h("thead", {}, h("tr", {}, ["Request", "Phase", "Prompt and reply", "Tokens", "Waited"].map((name) => h("th", { scope: "col" }, name)))),
          this.#body)),
      this.#more);
  }

  draw() {
    const all = [...this.#state.requests.values()].sort(byPhase);
    const shown = all.slice(0, ROWS);
    const longest = Math.max(64, ...shown.map(({ prompt, reply }) => prompt + reply));
    const focused = this.#body.contains(document.activeElement) ? document.activeElement.dataset.request : null;
    this.#body.replaceChildren(
      ...shown.map((request) => this.#row(request, longest)),
      ...Array.from({ length: ROWS - shown.length }, () => h("tr", { class: "blank", "aria-hidden": "true" }, h("td", { colspan: 5 }, " "))),
    );
    if (focused) [...this.#body.querySelectorAll("button")].find(({ dataset }) => dataset.request === focused)?.focus();
    this.#more.textContent = all.length > ROWS ? `and ${count(all.length - ROWS)} more` : " ";
  }

  #row(request, longest) {
    const computed = Math.max(0, Math.min(request.held, request.prompt) - request.cached);
    const part = (name, tokens) => {
      const element = h("span", { class: name });
      element.style.width = `${(100 * tokens) / longest}%`;
      return element;
    };
    const left = request.ended === null ? Math.max(0, request.prompt - request.cached - computed) : 0;
    const waited = (request.started ?? request.ended ?? this.#state.at) - request.came;
    return h(
      "tr",
      { class: `phase-${request.phase}` },
      h("td", {}, h("button", { type: "button", class: "quiet small mono", "data-request": request.id, "aria-label": `Request ${shortId(request.id)}`, onclick: () => this.#open(request) }, shortId(request.id))),
      h("td", {}, request.retractions && request.ended === null ? `${request.phase} (retracted ${request.retractions}×)` : request.finish ?? request.phase),
      h("td", { class: "wide" }, h("span", { class: "tokens", role: "img", "aria-label": `${request.cached} reused, ${request.prompt - request.cached} computed, ${request.reply} of the reply` },
        part("reused", request.cached), part("computed", request.ended === null ? computed : request.prompt - request.cached), part("left", left), part("reply", request.reply))),
      h("td", { class: "number" }, `${count(request.cached)} / ${count(request.prompt)} + ${count(request.reply)}`),
      h("td", { class: "number" }, seconds(waited)),
    );
  }
}

function byPhase(a, b) {
  const order = ORDER.indexOf(a.phase) - ORDER.indexOf(b.phase);
  return order || (a.phase === "ended" ? b.ended - a.ended : a.came - b.came);
}
