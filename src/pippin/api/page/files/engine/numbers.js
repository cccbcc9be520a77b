// The few numbers at the top.

import { h } from "../lib/dom.js";
import { count, percent, rate, seconds, sum } from "../lib/format.js";
import { sparkline } from "./charts.js";
import { quantile } from "./state.js";

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
