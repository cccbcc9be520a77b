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
