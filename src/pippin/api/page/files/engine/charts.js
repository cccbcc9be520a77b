// The numbers at the top, with a line of the last minute; and what uses the memory.

import { h, svg } from "../lib/dom.js";
import { bytes, count, percent, rate, seconds, sum } from "../lib/format.js";
import { quantile } from "./state.js";

const WIDTH = 240;

// Messages come up to ten a second: half a second of them is one point.
export function sparkline(messages, now, span = 60) {
  const halves = Map.groupBy(messages, ({ at }) => Math.floor(2 * at));
  const rates = [...halves].map(([half, group]) => ({ at: half / 2, rate: sum(group.map(({ rate }) => rate)) / group.length }));
  const top = Math.max(1, ...rates.map(({ rate }) => rate));
  const point = ({ at, rate }) => `${(WIDTH * (1 - (now - at) / span)).toFixed(1)},${(36 - (34 * rate) / top).toFixed(1)}`;
  return svg("svg", { viewBox: `0 0 ${WIDTH} 38`, class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("polyline", { points: rates.map(point).join(" ") }));
}

export class Numbers {
  #cells = new Map();
  #spark = h("div", { class: "spark-place" });

  constructor() {
    const cell = (name, title, more = null) => {
      const value = h("b", {}, "–");
      const note = h("span", { class: "note" }, " ");
      this.#cells.set(name, { value, note });
      return h("li", { class: name }, h("span", { class: "name" }, title), value, note, more);
    };
    this.element = h("ul", { class: "numbers" },
      cell("rate", "Tokens a second", this.#spark),
      cell("running", "Running"),
      cell("reused", "Prompt tokens reused"),
      cell("ttft", "Time to first token"),
      cell("gap", "Gap between tokens"),
      cell("idle", "Device idle"),
      cell("handed", "Prompts handed over"));
  }

  draw(state) {
    const { load, facts, rates, at, ttfts, gaps } = state;
    if (!load || !facts) return;
    const recent = rates.filter((entry) => entry.at > at - 1);
    const speed = recent.length ? sum(recent.map((entry) => entry.rate)) / recent.length : 0;
    this.#set("rate", load.running ? rate(speed) : "0", `${count(load.generated_tokens)} since the start`);
    this.#set("running", `${load.running} of ${facts.slots}`, `${count(load.waiting + load.compiling)} waiting, ${count(load.preemptions)} preempted`);
    this.#set("reused", load.prompt_tokens ? percent(load.cached_tokens / load.prompt_tokens) : "–", `${count(load.cached_tokens)} of ${count(load.prompt_tokens)}`);
    this.#set("ttft", seconds(quantile(ttfts, 0.5)), `p99 ${seconds(quantile(ttfts, 0.99))}`);
    this.#set("gap", seconds(quantile(gaps, 0.5)), `p99 ${seconds(quantile(gaps, 0.99))}`);
    const busy = state.steps.filter((step) => step.span && step.done > at - 5);
    const span = sum(busy.map((step) => step.span));
    const idle = sum(busy.map((step) => Math.max(0, step.idle)));
    this.#set("idle", span ? percent(Math.min(1, idle / span)) : "–", facts.overlap ? "two steps in flight" : "one step at a time");
    this.#drawHandovers(load);
    this.#spark.replaceChildren(sparkline(rates, at));
  }

  // Of engines with a role alone.
  #drawHandovers({ received, sent }) {
    const parts = [["received", received], ["sent", sent]].filter(([, number]) => number !== null);
    this.element.classList.toggle("with-role", parts.length > 0);
    this.#set("handed", parts.map(([, number]) => count(number)).join(" / "), parts.map(([name]) => name).join(" / "));
  }

  #set(name, value, note) {
    const cell = this.#cells.get(name);
    if (cell.value.textContent !== value) cell.value.textContent = value;
    if (cell.note.textContent !== note) cell.note.textContent = note;
  }
}

// The byte budget, and what uses it.
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
