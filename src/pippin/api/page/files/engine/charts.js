// Small charts: a line of the last minute, and a histogram over logarithmic bins.

import { h, svg } from "../lib/dom.js";
import { plural, seconds, sum } from "../lib/format.js";
import { quantile } from "./state.js";

const WIDTH = 240;
const HEIGHT = 56;
const BINS_A_DECADE = 6;

// Messages come up to ten a second: half a second of them is one point.
export function sparkline(messages, now, span = 60) {
  const halves = Map.groupBy(messages, ({ at }) => Math.floor(2 * at));
  const rates = [...halves].map(([half, group]) => ({ at: half / 2, rate: sum(group.map(({ rate }) => rate)) / group.length }));
  const top = Math.max(1, ...rates.map(({ rate }) => rate));
  const point = ({ at, rate }) => `${(WIDTH * (1 - (now - at) / span)).toFixed(1)},${(36 - (34 * rate) / top).toFixed(1)}`;
  return svg("svg", { viewBox: `0 0 ${WIDTH} 38`, class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("polyline", { points: rates.map(point).join(" ") }));
}

// The number of values in bins of equal ratio, from `low` to `high` (both in the bins).
export function logBins(values) {
  const bin = (value) => Math.floor(Math.log10(Math.max(value, 1e-5)) * BINS_A_DECADE);
  if (!values.length) return { first: 0, counts: [] };
  const found = values.map(bin);
  const first = Math.min(...found);
  const counts = Array(Math.max(...found) - first + 1).fill(0);
  for (const at of found) counts[at - first] += 1;
  return { first, counts };
}

export class Histogram {
  #plot = h("div", { class: "plot" });
  #note = h("p", { class: "note" }, "nothing yet");

  constructor(title, fill) {
    this.#plot.classList.add(fill);
    this.element = h("div", { class: "histogram" }, h("h3", {}, title), this.#plot, this.#note);
    this.draw([]);
  }

  draw(values) {
    const { first, counts } = logBins(values);
    const edge = (n) => 10 ** ((first + n) / BINS_A_DECADE);
    const width = WIDTH / Math.max(counts.length, 12);
    const top = Math.max(1, ...counts);
    const bars = counts.map((number, n) => svg("rect", {
      x: (n * width + 0.5).toFixed(1), width: (width - 1).toFixed(1),
      y: (HEIGHT - (HEIGHT * number) / top).toFixed(1), height: ((HEIGHT * number) / top).toFixed(1),
    }, svg("title", {}, `${seconds(edge(n))} to ${seconds(edge(n + 1))}: ${number}`)));
    const [middle, late] = [quantile(values, 0.5), quantile(values, 0.99)];
    const text = values.length ? `median ${seconds(middle)}, p99 ${seconds(late)}, of the last ${plural(values.length, "one")}` : "nothing yet";
    this.#plot.replaceChildren(
      svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": text }, bars),
      h("div", { class: "ends", "aria-hidden": "true" }, h("span", {}, counts.length ? seconds(edge(0)) : ""), h("span", {}, counts.length ? seconds(edge(counts.length)) : "")),
    );
    this.#note.textContent = text;
  }
}
