// What the engine view knows, put together of the feed's messages. Knows no elements.
// Everything is bounded: what is older than a window is forgotten.

import { TreeState } from "./tree_state.js";

const MAX_STEPS = 4000;
const MAX_ENDED = 60; // requests
const MAX_SAMPLES = 500; // of times to first token and of gaps
const RATE_SECONDS = 60;

export class State {
  at = 0; // the engine's clock at the last message
  steps = [];
  requests = new Map(); // id -> request, oldest first
  tree = new TreeState();
  memory = null;
  load = null;
  facts = null; // of the snapshot: device, slots, overlap, components
  ttfts = [];
  gaps = [];
  rates = []; // { at, rate }
  leftOut = 0;
  #lastToken = new Map(); // slot -> when its last token was known

  apply(event, message) {
    if (event === "engine") return this.#forget();
    if (event === "snapshot") {
      this.#forget();
      const { device, slots, overlap, components } = message;
      this.facts = { device, slots, overlap, components };
      this.tree.reset(message.tree);
    } else {
      this.leftOut += message.left_out;
      this.tree.apply(message.tree, message.at);
    }
    this.at = message.at;
    this.memory = message.memory;
    this.load = message.load;
    for (const request of message.requests) this.#takeRequest(request);
    for (const step of message.steps) this.#takeStep(step);
    for (const [slot, held, reply] of message.progress ?? []) this.#progress(slot, held, reply);
    if (event === "frame") this.rates.push({ at: message.at, rate: message.load.tokens_per_second });
    this.#bound();
  }

  // The request that has or had a slot at some time; the last one that started by then.
  requestIn(slot, when) {
    let found = null;
    for (const request of this.requests.values()) {
      const started = request.started ?? Infinity;
      if (request.slot === slot && started <= when && (!found || started > found.started)) found = request;
    }
    return found;
  }

  #takeRequest(request) {
    const before = this.requests.get(request.id);
    if (request.first_token !== null && before?.first_token == null) {
      this.ttfts.push(request.first_token - request.arrived);
    }
    this.requests.set(request.id, request);
  }

  #takeStep(step) {
    if (this.steps.length && step.step <= this.steps.at(-1).step) return;
    this.steps.push(step);
    for (const slot of step.retired) this.#lastToken.delete(slot);
    const sampled = step.chunks.filter(({ samples }) => samples).map(({ slot }) => slot);
    for (const slot of step.decode) {
      const before = this.#lastToken.get(slot);
      if (before !== undefined) this.gaps.push(step.committed - before);
    }
    for (const slot of [...step.decode, ...sampled]) this.#lastToken.set(slot, step.committed);
  }

  #progress(slot, held, reply) {
    for (const request of this.requests.values()) {
      if (request.slot === slot && request.ended === null) Object.assign(request, { held, reply });
    }
  }

  #bound() {
    this.steps.splice(0, this.steps.length - MAX_STEPS);
    this.ttfts.splice(0, this.ttfts.length - MAX_SAMPLES);
    this.gaps.splice(0, this.gaps.length - MAX_SAMPLES);
    while (this.rates.length && this.rates[0].at < this.at - RATE_SECONDS) this.rates.shift();
    const ended = [...this.requests.values()].filter((request) => request.ended !== null);
    for (const { id } of ended.slice(0, Math.max(0, ended.length - MAX_ENDED))) this.requests.delete(id);
  }

  #forget() {
    this.steps = [];
    this.requests.clear();
    this.tree = new TreeState();
    this.#lastToken.clear();
    this.rates = [];
    this.load = null;
  }
}

// The value below which a share of all lies; null of none.
export function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}
