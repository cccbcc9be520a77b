// Where each node of the tree lies: x in tokens, y in leaves. Knows no elements.
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
