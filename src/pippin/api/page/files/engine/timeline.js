// The timeline: a canvas that follows the engine, and a cursor that goes from step to step.
// To a screen reader it is a slider over steps, whose value is what a step did.

import { h } from "../lib/dom.js";
import { count, plural, seconds, sum } from "../lib/format.js";

// Steps as spans on lanes. Knows no canvas: times in, times out.
//
//   host    [plan|launch][wait ...][commit][plan|launch][wait ...
//   device       [ step 7 ..........][ step 8 ..........
//   slot 1       [chunk of a prompt ][ one token         ]
//   slot 2       [ one token        ][ ghost             ]
//   slot 3       [token|right|wrong ]                        two drafts, of which one was right
//
// `requestIn(slot, when)` is the request of a row: a row of one that had ended is a ghost.

export function layoutSteps(steps, requestIn) {
  const spans = [];
  let before = null; // when the device was done with the step before
  for (const step of steps) {
    const host = (kind, from, to) => spans.push({ lane: "host", kind, from, to, step });
    host("plan", step.planned, step.dispatched);
    host("launch", step.dispatched, step.launched);
    if (step.waited > 0) host("wait", step.resumed - step.waited, step.resumed);
    host("commit", step.resumed, step.committed);
    const from = before === null ? step.dispatched : Math.max(step.dispatched, before);
    const to = Math.max(from, step.done);
    before = to;
    const tokens = promptTokens(step);
    const kind = !step.decode.length ? "prompt" : tokens ? "mixed" : "decode";
    spans.push({ lane: "device", kind, from, to, step });
    for (const chunk of step.chunks) spans.push({ lane: chunk.slot, kind: "prompt", from, to, step });
    const ghosts = ghostSlots(step, requestIn);
    const drafts = new Map(step.drafts.map(([slot, ...counts]) => [slot, counts]));
    for (const slot of step.decode) {
      const [verified, accepted] = ghosts.has(slot) ? [0, 0] : drafts.get(slot) ?? [0, 0];
      const at = (n) => from + ((to - from) * n) / (1 + verified);
      spans.push({ lane: slot, kind: ghosts.has(slot) ? "ghost" : "decode", from, to: at(1), step });
      for (let n = 1; n <= verified; n += 1) {
        spans.push({ lane: slot, kind: n <= accepted ? "accepted" : "rejected", from: at(n), to: at(n + 1), step });
      }
    }
    for (const id of step.preempted) spans.push({ lane: "mark", kind: "preempted", from: step.planned, to: step.planned, step, id });
  }
  return spans;
}

export const verifiedDrafts = (step) => sum(step.drafts.map(([, verified]) => verified));

export const acceptedDrafts = (step) => sum(step.drafts.map(([, , accepted]) => accepted));

export const promptTokens = (step) => sum(step.chunks.map(({ tokens }) => tokens));

// As many as the step counted, of the slots whose requests ended before it was committed.
function ghostSlots(step, requestIn) {
  if (!step.ghosts) return new Set();
  const over = step.decode.filter((slot) => {
    const request = requestIn(slot, step.launched);
    return !request || (request.ended !== null && request.ended < step.resumed);
  });
  return new Set(over.slice(0, step.ghosts));
}

// The step that was on the device at a time, or the nearest to it.
export function stepAt(spans, when) {
  const device = spans.filter(({ lane }) => lane === "device");
  const away = ({ from, to }) => (when < from ? from - when : when > to ? when - to : 0);
  return device.reduce((best, span) => (!best || away(span) < away(best) ? span : best), null)?.step ?? null;
}

// Draws the timeline's lanes. Every kind has a shape as well as a colour.
const LABELS = 58; // pixels on the left
const HOST = { top: 22, height: 24 };
const DEVICE = { top: 56, height: 36 };
const SLOTS = { top: 104, height: 148 };
export const HEIGHT = SLOTS.top + SLOTS.height + 8;

export function paint(canvas, { spans, from, to, selected, slots }) {
  const width = canvas.parentElement.clientWidth;
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(HEIGHT * ratio)) canvas.height = Math.round(HEIGHT * ratio);
  const pen = canvas.getContext("2d");
  const colours = coloursOf(canvas);
  const x = (when) => LABELS + ((when - from) / (to - from)) * (width - LABELS);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, HEIGHT);
  pen.font = `11px ${colours.font}`;

  drawGrid(pen, colours, x, from, to, width);
  const seen = spans.filter((span) => span.to >= from && span.from <= to);
  const rows = rowsOf(seen, slots);
  pen.save();
  pen.beginPath();
  pen.rect(LABELS, 0, width - LABELS, HEIGHT);
  pen.clip();
  for (const span of seen) drawSpan(pen, colours, span, x, rows);
  if (selected) drawSelected(pen, colours, spans, selected, x);
  pen.restore();
  drawLabels(pen, colours, rows);
}

// Slots in use share the room: lanes are as high as their number allows.
function rowsOf(seen, slots) {
  const used = [...new Set(seen.map(({ lane }) => lane).filter(Number.isInteger))].sort((a, b) => a - b);
  const height = Math.max(3, Math.min(18, SLOTS.height / Math.max(used.length, Math.min(8, slots))));
  return new Map(used.map((slot, n) => [slot, { top: SLOTS.top + n * height, height: height - (height > 6 ? 2 : 1) }]));
}

function drawSpan(pen, colours, span, x, rows) {
  const left = x(span.from);
  const width = Math.max(0.75, x(span.to) - left - (x(span.to) - left > 3 ? 1 : 0));
  if (span.lane === "mark") return drawPreemption(pen, colours, left);
  const place = span.lane === "host" ? HOST : span.lane === "device" ? DEVICE : rows.get(span.lane);
  if (!place) return;
  if (span.kind === "ghost") {
    pen.strokeStyle = colours.muted;
    pen.setLineDash([2, 2]);
    pen.strokeRect(left + 0.5, place.top + 0.5, Math.max(1, width - 1), place.height - 1);
    pen.setLineDash([]);
  } else if (span.kind === "accepted") {
    pen.fillStyle = colours.decode;
    pen.fillRect(left, place.top + place.height / 3, width, (place.height * 2) / 3);
  } else if (span.kind === "rejected") {
    pen.fillStyle = colours.bad;
    pen.fillRect(left, place.top + place.height - 2, width, 2);
  } else if (span.kind === "wait") {
    pen.fillStyle = colours.line;
    pen.fillRect(left, place.top + place.height / 2 - 1, width, 2);
  } else if (span.kind === "mixed") {
    pen.fillStyle = colours.prompt;
    pen.fillRect(left, place.top, width, place.height / 2);
    pen.fillStyle = colours.decode;
    pen.fillRect(left, place.top + place.height / 2, width, place.height / 2);
  } else {
    pen.fillStyle = colours[span.kind];
    pen.fillRect(left, place.top, width, place.height);
  }
  if (span.lane === "device" && width > 30) drawCounts(pen, colours, span, left, width);
}

function drawCounts(pen, colours, { step }, left, width) {
  const tokens = promptTokens(step);
  const lines = [tokens ? `${tokens}` : null, step.decode.length ? `${step.decode.length}` : null].filter(Boolean);
  pen.fillStyle = colours.onData;
  pen.textAlign = "center";
  lines.forEach((line, n) => {
    if (pen.measureText(line).width < width - 4) pen.fillText(line, left + width / 2, DEVICE.top + (DEVICE.height * (2 * n + 1)) / (2 * lines.length) + 4);
  });
}

function drawPreemption(pen, colours, left) {
  pen.fillStyle = colours.bad;
  pen.beginPath();
  pen.moveTo(left - 5, SLOTS.top - 10);
  pen.lineTo(left + 5, SLOTS.top - 10);
  pen.lineTo(left, SLOTS.top - 1);
  pen.fill();
}

function drawSelected(pen, colours, spans, selected, x) {
  pen.strokeStyle = colours.text;
  pen.lineWidth = 2;
  for (const span of spans.filter(({ step, lane }) => step === selected && (lane === "host" || lane === "device"))) {
    const place = span.lane === "host" ? HOST : DEVICE;
    pen.strokeRect(x(span.from) - 1, place.top - 2, Math.max(3, x(span.to) - x(span.from) + 1), place.height + 4);
  }
  pen.lineWidth = 1;
}

function drawGrid(pen, colours, x, from, to, width) {
  const every = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10].find((step) => ((width - LABELS) * step) / (to - from) > 70) ?? 20;
  pen.textAlign = "center";
  for (let n = Math.ceil(from / every); n * every <= to; n += 1) {
    const at = Math.round(x(n * every)) + 0.5;
    if (at < LABELS + 12) continue;
    pen.strokeStyle = colours.line;
    pen.beginPath();
    pen.moveTo(at, 16);
    pen.lineTo(at, HEIGHT);
    pen.stroke();
    pen.fillStyle = colours.muted;
    if (at < width - 18) pen.fillText(`${(n * every).toFixed(every < 0.1 ? 2 : every < 1 ? 1 : 0)} s`, at, 11);
  }
}

function drawLabels(pen, colours, rows) {
  pen.fillStyle = colours.muted;
  pen.textAlign = "left";
  pen.fillText("host", 0, HOST.top + 16);
  pen.fillText("device", 0, DEVICE.top + 22);
  for (const [slot, { top, height }] of rows) if (height >= 10) pen.fillText(`slot ${slot}`, 0, top + height / 2 + 4);
}

let known = null;
addEventListener("themechange", () => (known = null));

function coloursOf(canvas) {
  if (known) return known;
  const style = getComputedStyle(canvas);
  const colour = (name) => style.getPropertyValue(name);
  // Custom properties come as light-dark(...), which a canvas does not know: ask an element.
  const probe = document.createElement("span");
  canvas.parentElement.append(probe);
  const resolve = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  known = { font: colour("font-family") };
  for (const [key, name] of Object.entries(NAMES)) known[key] = resolve(name);
  probe.remove();
  return known;
}

const NAMES = { prompt: "--prompt", decode: "--decode", plan: "--plan", launch: "--launch", commit: "--commit", onData: "--on-data", line: "--line", muted: "--muted", text: "--text", bad: "--bad" };

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
