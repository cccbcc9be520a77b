// The byte budget, and what uses it.

import { h } from "../lib/dom.js";
import { bytes, percent } from "../lib/format.js";

const TITLES = { rows: "running requests", checkpoints: "checkpoints of replies", captures: "captures in flight", loads: "loading from a lower tier", free: "free" };

export class Memory {
  #bar = h("div", { class: "stack", role: "img", "aria-label": "No data yet" });
  #legend = h("ul", { class: "legend" });
  #note = h("p", { class: "note" });

  constructor() {
    this.element = h("div", { class: "memory" }, this.#bar, this.#legend, this.#note);
  }

  draw(memory) {
    const parts = [
      ...Object.entries(memory.tree).map(([name, size]) => [name, `tree: ${name}`, size]),
      ...["rows", "checkpoints", "captures", "loads", "free"].map((name) => [name, TITLES[name], memory[name]]),
    ];
    this.#bar.replaceChildren(...parts.map(([name, , size]) => {
      const part = h("span", { class: `fill-${name}` });
      part.style.flexGrow = String(size / memory.capacity);
      part.style.minWidth = size ? "2px" : "0";
      return part;
    }));
    const used = memory.capacity - memory.free;
    this.#bar.setAttribute("aria-label", `${bytes(used)} of ${bytes(memory.capacity)} in use`);
    this.#legend.replaceChildren(...parts.map(([name, title, size]) =>
      h("li", {}, h("i", { class: `swatch fill-${name}` }), h("span", {}, title), h("b", {}, bytes(size)))));
    this.#note.textContent = `${bytes(used)} of ${bytes(memory.capacity)} (${percent(used / memory.capacity)}); ` +
      `${bytes(memory.evictable)} of the tree could be evicted. ${bytes(memory.device)} are allocated on the device, weights included.`;
  }
}
