// The timeline: a canvas that follows the engine, and a cursor that goes from step to step.
// To a screen reader it is a slider over steps, whose value is what a step did.

import { h } from "../lib/dom.js";
import { count, plural, seconds } from "../lib/format.js";
import { acceptedDrafts, layoutSteps, promptTokens, stepAt, verifiedDrafts } from "./timeline_layout.js";
import { paint } from "./timeline_paint.js";

const SPANS = [0.5, 1, 2, 5, 10, 20, 40]; // seconds in sight
const FRAME_MS = 40;

export class Timeline {
  #state;
  #open;
  #canvas = h("canvas", { class: "lanes", "aria-hidden": "true" });
  #span = 5;
  #selected = null; // a step
  #end = null; // of what is in sight, while it stands still; null: it follows
  #heard = { at: 0, when: 0 }; // the last message's time, on both clocks
  #spans = [];
  #painted = 0;
  #following = null; // the loop that draws; another one ends it

  // `open(step, seconds)` shows one, and how long it was on the device.
  constructor(state, open) {
    this.#state = state;
    this.#open = open;
    this.element = h("div", {
      class: "timeline", role: "slider", tabindex: 0, "aria-label": "Steps",
      "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0, "aria-valuetext": "No step yet",
      onkeydown: (event) => this.#key(event), onclick: (event) => this.#click(event),
    }, this.#canvas);
    new ResizeObserver(() => this.draw()).observe(this.element);
    addEventListener("themechange", () => this.draw());
  }

  heard() {
    this.#heard = { at: this.#state.at, when: performance.now() };
    this.#layout(this.#state.at - this.#span - 2);
    this.#describe();
  }

  // Of thousands of steps only those that may come into sight, unless it stands still.
  #layout(since) {
    const steps = this.#state.steps.filter(({ committed }) => committed > since);
    this.#spans = layoutSteps(steps, (slot, when) => this.#state.requestIn(slot, when));
  }

  zoom(by) {
    const at = SPANS.indexOf(this.#span) + by;
    this.#span = SPANS[Math.max(0, Math.min(SPANS.length - 1, at))];
    if (this.#end === null) this.heard();
    this.draw();
    return this.#span;
  }

  // Follows the engine's clock between messages, so that it moves and does not hop.
  follow() {
    this.#end = null;
    this.#selected = null;
    const own = (this.#following = {});
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const tick = (now) => {
      if (this.#following !== own) return;
      if (now - this.#painted >= (still ? 500 : FRAME_MS)) {
        this.#painted = now;
        this.draw();
      }
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  hold() {
    this.stop();
    this.#end ??= this.#now();
    this.#layout(-Infinity);
    this.draw();
  }

  // The timeline is not visible.
  stop() {
    this.#following = null;
  }

  draw() {
    const to = this.#end ?? this.#now();
    paint(this.#canvas, { spans: this.#spans, from: to - this.#span, to, selected: this.#selected, slots: this.#state.facts?.slots ?? 1 });
  }

  // A moment behind the server, so that all that is in sight has arrived.
  #now() {
    const { at, when } = this.#heard;
    return at + Math.min(1, (performance.now() - when) / 1000) - 0.15;
  }

  #select(step) {
    if (!step) return;
    this.#selected = step;
    this.hold();
    const { from: began, to } = this.#spans.find((span) => span.step === step && span.lane === "device");
    this.#open(step, to - began);
    const from = this.#end - this.#span;
    if (step.done > this.#end || step.planned < from) {
      const centred = (step.planned + step.done + this.#span) / 2;
      this.#end = Math.min(centred, this.#state.steps.at(-1).committed + this.#span / 20);
    }
    this.#describe();
    this.draw();
  }

  #click(event) {
    const { left, width } = this.#canvas.getBoundingClientRect();
    const to = this.#end ?? this.#now();
    this.#select(stepAt(this.#spans, to - this.#span * (1 - (event.clientX - left) / width)));
  }

  #key(event) {
    const steps = this.#state.steps;
    if (!steps.length) return;
    const at = this.#selected ? steps.indexOf(this.#selected) : steps.length;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowDown: at - 1, ArrowUp: at + 1, PageDown: at - 10, PageUp: at + 10, Home: 0, End: steps.length - 1, Enter: at }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.#select(steps[Math.max(0, Math.min(steps.length - 1, to))]);
  }

  #describe() {
    const steps = this.#state.steps;
    const step = this.#selected ?? steps.at(-1);
    if (!step) return;
    const set = (name, value) => this.element.setAttribute(`aria-value${name}`, String(value));
    set("min", steps[0].step);
    set("max", steps.at(-1).step);
    set("now", step.step);
    set("text", describeStep(step));
  }
}

export function describeStep(step) {
  const parts = [];
  if (step.chunks.length) parts.push(`${plural(promptTokens(step), "prompt token")} in ${plural(step.chunks.length, "chunk")}`);
  if (step.decode.length) parts.push(plural(step.decode.length, "decode row"));
  if (step.drafts.length) parts.push(`${count(acceptedDrafts(step))} of ${plural(verifiedDrafts(step), "draft")} accepted`);
  if (step.ghosts) parts.push(plural(step.ghosts, "ghost"));
  if (step.preempted.length) parts.push(`${count(step.preempted.length)} preempted`);
  return `Step ${count(step.step)}: ${parts.join(", ") || "nothing computed"}; ${seconds(step.committed - step.planned)}`;
}
