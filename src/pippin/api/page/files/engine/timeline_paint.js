// Draws the timeline's lanes. Every kind has a shape as well as a colour.

import { promptTokens } from "./timeline_layout.js";

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
