// The engine, as it works: timeline, tree, memory, requests, times. Asks nothing while it is hidden.

import { h, icon } from "../lib/dom.js";
import { count, plural } from "../lib/format.js";
import { Memory, Numbers } from "./charts.js";
import { Details, Requests } from "./details.js";
import { Icicle } from "./icicle.js";
import { Feed, State } from "./state.js";
import { Timeline } from "./timeline.js";

const SLOWLY_MS = 250; // numbers that change more often cannot be read
const LANE_KINDS = [["plan", "plans"], ["launch", "launches"], ["wait", "waits"], ["commit", "commits"], ["prompt", "prompt’s chunk"], ["decode", "one token"], ["accepted", "accepted draft"], ["rejected", "rejected draft"], ["ghost", "ghost"], ["preempted", "preempted"]];
const NODE_KINDS = [["attention", "attention KV"], ["window", "window KV"], ["state", "state at its end"], ["hidden", "head’s input"], ["locked", "locked"], ["hot", "hot"], ["evicted", "just evicted"]];

export class Engine {
  #state = new State();
  #paused = false;
  #shown = false;
  #watching = false;
  #timer = null; // until the numbers are drawn
  #trouble = h("p", { class: "trouble", role: "status" });
  #treeNote = h("span", { class: "note" });
  #pause = h("button", { type: "button", class: "small", id: "pause", "aria-pressed": "false", onclick: () => this.#setPaused(!this.#paused) });
  #feed = new Feed({ event: (name, data) => this.#heard(name, data), trouble: (text) => this.#tell(text) });
  #numbers = new Numbers();
  #memory = new Memory();
  #details = new Details(() => {});
  #timeline = new Timeline(this.#state, (step, busy) => {
    this.#setPaused(true);
    this.#details.showStep(step, busy, (slot, when) => this.#state.requestIn(slot, when));
  });
  #icicle = new Icicle(this.#state, (node, now) => this.#details.showNode(node, this.#state.tree, now));
  #requests = new Requests(this.#state, (request) => this.#details.showRequest(request));

  constructor(root) {
    const span = h("span", { class: "note span" }, "5 s");
    const zoom = (by, sign, label) => h("button", { type: "button", class: "small", "aria-label": label, onclick: () => (span.textContent = `${this.#timeline.zoom(by)} s`) }, sign);
    root.append(
      h("div", { class: "engine-scroll", tabindex: 0, role: "region", "aria-label": "What the engine does" },
        h("div", { class: "engine-grid" },
          this.#numbers.element,
          this.#trouble,
          h("div", { class: "column" },
            card("timeline-card", "Timeline", [zoom(1, "−", "Show more time"), span, zoom(-1, "+", "Show less time"), this.#pause],
              this.#timeline.element, legend(LANE_KINDS, "lane")),
            card("tree-card", "Prefix cache", [this.#treeNote],
              h("div", { class: "icicle-scroll" }, this.#icicle.axis, this.#icicle.element), legend(NODE_KINDS, "key")),
            card("requests-card", "Requests", [], this.#requests.element)),
          h("div", { class: "column" },
            this.#details.element,
            card("memory-card", "Memory", [], this.#memory.element)))),
    );
    document.addEventListener("visibilitychange", () => this.#watch());
    this.#showPause();
    this.#requests.draw();
  }

  set isShown(shown) {
    this.#shown = shown;
    this.#watch();
  }

  // Whether this view and this tab are visible.
  #watch() {
    const watching = this.#shown && !document.hidden;
    if (watching === this.#watching) return;
    this.#watching = watching;
    if (watching) {
      this.#feed.open();
      if (!this.#paused) this.#timeline.follow();
    } else {
      this.#feed.close();
      this.#timeline.stop();
    }
  }

  // Paused, messages are ignored; afterwards a new snapshot is requested. The stream stays open
  // meanwhile, since the server sends the text of nodes to watchers only.
  #setPaused(paused) {
    if (paused === this.#paused) return;
    this.#paused = paused;
    this.#showPause();
    if (paused) return this.#timeline.hold();
    this.#feed.close();
    this.#feed.open();
    this.#timeline.follow();
  }

  #showPause() {
    this.#pause.replaceChildren(icon(this.#paused ? "play" : "pause"), this.#paused ? "Resume" : "Pause");
    this.#pause.setAttribute("aria-pressed", String(this.#paused));
  }

  #heard(event, data) {
    if (this.#paused) return;
    this.#state.apply(event, data);
    if (event === "engine") return;
    this.#timeline.heard();
    this.#icicle.draw();
    this.#requests.draw();
    this.#timer ??= setTimeout(() => this.#drawNumbers(), SLOWLY_MS);
  }

  #drawNumbers() {
    this.#timer = null;
    this.#numbers.draw(this.#state);
    this.#memory.draw(this.#state.memory);
    const { numNodes, numTokens, nodes, isThere } = this.#state.tree;
    this.#treeNote.textContent = isThere
      ? `${plural(numTokens, "token")} in ${plural(numNodes, "node")}${numNodes > nodes.size ? `, ${count(nodes.size)} of them shown` : ""}`
      : "switched off (--no-prefix-cache)";
  }

  #tell(trouble) {
    if (this.#trouble.textContent !== (trouble ?? "")) this.#trouble.textContent = trouble ?? "";
  }
}

function card(name, title, head, ...body) {
  return h("section", { class: `card ${name}`, "aria-label": title },
    h("div", { class: "card-head" }, h("h2", {}, title), h("div", { class: "tools" }, head)), ...body);
}

const legend = (kinds, prefix) =>
  h("ul", { class: "legend line" }, kinds.map(([kind, title]) => h("li", {}, h("i", { class: `swatch ${prefix}-${kind}` }), title)));
