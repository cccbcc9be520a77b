// The radix tree, drawn: a box for each node, of which one can be reached by keys.

import { h } from "../lib/dom.js";
import { plural } from "../lib/format.js";

// Where each node of the tree lies: x in tokens, y in leaves.
//
//   0 ........ 64 ....... 128      x: positions in a prompt; a node is as wide as its tokens
//   [ system  ][ first question ]  y: a node is as high as the leaves below it
//   [ prompt  ][ second         ]
//
// Children are ordered by id, so that what is there stays in place when something is added.

export function layoutTree(nodes) {
  const children = new Map();
  for (const node of nodes.values()) {
    const parent = nodes.has(node.parent) ? node.parent : 0;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(node);
  }
  for (const siblings of children.values()) siblings.sort((a, b) => a.id - b.id);

  const boxes = [];
  let leaves = 0;
  let tokens = 1;
  // Paths can be thousands of nodes long: no recursion. A node's height is known behind its last child.
  const open = [{ box: null, rest: children.get(0) ?? [], next: 0 }];
  while (open.length) {
    const top = open.at(-1);
    if (top.next === top.rest.length) {
      open.pop();
      if (!top.box) continue;
      if (!top.rest.length) leaves += 1;
      top.box.bottom = leaves;
      continue;
    }
    const node = top.rest[top.next];
    top.next += 1;
    const box = { id: node.id, node, parent: top.box?.id ?? 0, depth: open.length, x: node.start, width: node.tokens, top: leaves, bottom: leaves };
    tokens = Math.max(tokens, node.start + node.tokens);
    boxes.push(box);
    open.push({ box, rest: children.get(node.id) ?? [], next: 0 });
  }
  return { boxes, leaves, tokens };
}

// The box that an arrow key leads to; null where there is none.
export function neighbour(boxes, id, key) {
  const own = boxes.find((box) => box.id === id);
  if (!own) return boxes[0] ?? null;
  if (key === "ArrowLeft") return boxes.find((box) => box.id === own.parent) ?? null;
  if (key === "ArrowRight") return boxes.find((box) => box.parent === own.id) ?? null;
  const siblings = boxes.filter((box) => box.parent === own.parent);
  const at = siblings.indexOf(own) + (key === "ArrowDown" ? 1 : -1);
  return siblings[at] ?? null;
}

const LEAF = 32; // pixels, while all fit
const MIN_LEAF = 5;
const ROOM = 320;
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 200_000];

export class Icicle {
  #state;
  #open;
  #boxes = [];
  #elements = new Map(); // id -> element
  #current = null;

  constructor(state, open) {
    this.#state = state;
    this.#open = open;
    this.element = h("div", { class: "icicle", role: "tree", "aria-label": "Prefix cache", onkeydown: (event) => this.#key(event) });
    this.axis = h("div", { class: "axis", "aria-hidden": "true" });
  }

  draw() {
    const tree = this.#state.tree;
    const { boxes, leaves, tokens } = layoutTree(tree.nodes);
    this.#boxes = boxes;
    const leaf = Math.max(MIN_LEAF, Math.min(LEAF, ROOM / Math.max(1, leaves)));
    this.element.style.height = `${Math.max(leaf * leaves, leaf)}px`;
    this.element.hidden = boxes.length === 0; // an empty tree is no tree
    const gone = new Set(this.#elements.keys());
    for (const box of boxes) {
      gone.delete(box.id);
      this.#place(box, tree, leaf, tokens);
    }
    for (const id of gone) {
      this.#elements.get(id).remove();
      this.#elements.delete(id);
    }
    if (!this.#elements.has(this.#current)) this.#current = boxes[0]?.id ?? null;
    this.#elements.get(this.#current)?.setAttribute("tabindex", "0");
    this.#drawAxis(tokens);
  }

  #place(box, tree, leaf, tokens) {
    const { node } = box;
    const element = this.#elements.get(box.id) ?? this.#make(box.id);
    const set = (name, value) => element.style[name] === value || (element.style[name] = value);
    set("left", `${((100 * box.x) / tokens).toFixed(3)}%`);
    set("width", `max(3px, ${((100 * box.width) / tokens).toFixed(3)}% - 1px)`);
    set("top", `${(box.top * leaf).toFixed(1)}px`);
    set("height", `${((box.bottom - box.top) * leaf - 1).toFixed(1)}px`);
    const names = ["node", `tier-${node.tier}`, ...Object.keys(node.bytes).map((name) => `has-${name}`)];
    if (tree.locked.has(node.id)) names.push("locked");
    if (tree.isHot(node)) names.push("hot");
    if (node.evicted !== undefined) names.push("evicted");
    const className = names.join(" ");
    if (element.className !== className) element.className = className;
    const label = labelOf(node, tree);
    if (element.getAttribute("aria-label") !== label) {
      element.setAttribute("aria-label", label);
      element.setAttribute("aria-level", String(box.depth));
    }
  }

  #make(id) {
    const element = h("div", {
      role: "treeitem", tabindex: -1, "data-node": id, "aria-selected": "false",
      onclick: () => this.#show(id, true), onfocus: () => this.#show(id, false),
      onpointerenter: () => this.#show(id, false),
    });
    this.#elements.set(id, element);
    this.element.append(element);
    return element;
  }

  #show(id, stay) {
    const node = this.#state.tree.nodes.get(id);
    if (!node) return;
    if (stay || document.activeElement === this.#elements.get(id)) this.#become(id);
    this.#open(node, stay);
  }

  #become(id) {
    const before = this.#elements.get(this.#current);
    before?.setAttribute("tabindex", "-1");
    before?.setAttribute("aria-selected", "false");
    this.#current = id;
    this.#elements.get(id).setAttribute("tabindex", "0");
    this.#elements.get(id).setAttribute("aria-selected", "true");
  }

  #key(event) {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      return this.#show(this.#current, true);
    }
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    const box = neighbour(this.#boxes, this.#current, event.key);
    if (box) this.#elements.get(box.id).focus();
  }

  #drawAxis(tokens) {
    const marksThatFit = Math.max(2, Math.floor(this.element.clientWidth / 90));
    const key = `${tokens} ${marksThatFit}`;
    if (this.axis.dataset.drawn === key) return;
    this.axis.dataset.drawn = key;
    const every = STEPS.find((step) => tokens / step <= marksThatFit) ?? 1_000_000;
    const marks = [];
    for (let at = 0; at <= tokens * 0.97; at += every) {
      const mark = h("span", {}, at ? at.toLocaleString("en-US") : "0 tokens");
      mark.style.left = `${(100 * at) / tokens}%`;
      marks.push(mark);
    }
    this.axis.replaceChildren(...marks);
  }
}

export function labelOf(node, tree) {
  const parts = [`${plural(node.tokens, "token")} from ${node.start.toLocaleString("en-US")}`, Object.keys(node.bytes).join(", ") || "nothing kept"];
  if (node.tier !== "device") parts.push(`on ${node.tier}`);
  if (tree.locked.has(node.id)) parts.push("locked");
  if (tree.isHot(node)) parts.push("hot");
  if (node.evicted !== undefined) parts.push("evicted");
  return parts.join("; ");
}
