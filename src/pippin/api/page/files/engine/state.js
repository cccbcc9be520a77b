// What the engine view knows, put together of the feed's messages.
// Everything is bounded: what is older than a window is forgotten.

import { events, ofChosen, request } from "../lib/api.js";

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

// The radix tree as the feed sends it: nodes, which are locked, and which were just evicted.
const LINGER_SECONDS = 1.5; // an evicted node stays in sight that long
const HOT_USES = 8; // uses of the tree since a node's own: fewer is hot

export class TreeState {
  nodes = new Map(); // id -> node; `evicted`: when it was evicted
  tick = 0;
  numNodes = 0;
  numTokens = 0;
  isThere = false;
  locked = new Set(); // ids of nodes that running requests lock
  #lockedEnds = [];

  reset(tree) {
    this.nodes.clear();
    this.isThere = tree !== null;
    this.apply(tree, 0);
  }

  apply(tree, at) {
    for (const [id, node] of this.nodes) {
      if (node.evicted !== undefined && node.evicted < at - LINGER_SECONDS) this.nodes.delete(id);
    }
    if (!tree) return;
    for (const id of tree.hidden) this.nodes.delete(id);
    for (const id of tree.evicted) {
      const node = this.nodes.get(id);
      if (node) node.evicted = at;
    }
    for (const node of tree.nodes) this.nodes.set(node.id, { ...node });
    this.tick = tree.tick;
    this.numNodes = tree.num_nodes;
    this.numTokens = tree.num_tokens;
    for (const end of tree.used) for (const node of this.pathTo(end)) node.used = tree.tick;
    this.#lockedEnds = tree.locked;
    this.locked = new Set(this.#lockedEnds.flatMap((end) => this.pathTo(end).map(({ id }) => id)));
  }

  // From a node up to the root, which is not sent.
  pathTo(id) {
    const path = [];
    for (let node = this.nodes.get(id); node; node = this.nodes.get(node.parent)) path.push(node);
    return path;
  }

  isHot = (node) => this.tick - node.used < HOT_USES;
}

// The stream of /events: open while the view is visible, and opened again when it ends.
const RETRY_MS = [500, 1000, 2000, 4000];

export class Feed {
  #handlers;
  #controller = null;

  // `event(name, data)` for each message; `trouble(text)`, or null when all is well again.
  constructor(handlers) {
    this.#handlers = handlers;
  }

  async open() {
    if (this.#controller) return;
    const controller = (this.#controller = new AbortController());
    for (let failures = 0; !controller.signal.aborted; failures += 1) {
      try {
        const response = await request(ofChosen("events"), { signal: controller.signal });
        for await (const { event, data } of events(response.body)) {
          failures = 0;
          this.#handlers.trouble(null);
          this.#handle(event, JSON.parse(data));
        }
        this.#handlers.trouble("The feed ended; connecting again.");
      } catch (error) {
        if (controller.signal.aborted) return;
        if (!error.title) console.error(error); // a bug of this page
        this.#handlers.trouble(`${error.title ?? "The feed was interrupted"}: ${error.message}`);
        if (error.status === 404) return; // a server without a feed
        if (error.code === "admin_key_required") return this.close(); // until it is opened again
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, 3)]));
    }
  }

  close() {
    this.#controller?.abort();
    this.#controller = null;
  }

  #handle(event, data) {
    if (event === "error") return this.#handlers.trouble(data.error.message);
    if (event === "engine") this.#handlers.trouble(`The engine was lost: ${data.reason}`);
    this.#handlers.event(event, data);
  }
}
