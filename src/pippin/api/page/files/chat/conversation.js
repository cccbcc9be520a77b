// A conversation is a tree of messages; one path of it is shown. Knows no elements and no network.
//
//   nodes   id -> { id, parent, role, content, ... }
//   chosen  parent's id ("" above the first message) -> the child that is shown
//
// Editing a message or asking again adds a sibling. What both begin with is in the server's cache.

const ROOT = "";

export function newConversation(settings = {}) {
  const now = Date.now();
  return { id: newId(), created: now, updated: now, settings, nodes: {}, chosen: {} };
}

// The messages that are shown, first to last.
export function path(conversation) {
  const shown = [];
  let node = conversation.nodes[conversation.chosen[ROOT]];
  while (node) {
    shown.push(node);
    node = conversation.nodes[conversation.chosen[node.id]];
  }
  return shown;
}

// A new message under `parent` (null: the first one), which is shown from now on.
export function add(conversation, parent, message) {
  const node = { id: newId(), parent: parent?.id ?? ROOT, ...message };
  conversation.nodes[node.id] = node;
  choose(conversation, node);
  conversation.updated = Date.now();
  return node;
}

export function choose(conversation, node) {
  conversation.chosen[node.parent] = node.id;
}

// All messages that answer the same one, in the order in which they came.
export function siblings(conversation, node) {
  return Object.values(conversation.nodes).filter(({ parent }) => parent === node.parent);
}

export function parentOf(conversation, node) {
  return conversation.nodes[node.parent] ?? null;
}

// What the API gets: the path from the first message to `last`, and the system prompt before it.
export function messagesUpTo(conversation, last) {
  const messages = [];
  for (let node = last; node; node = parentOf(conversation, node)) messages.unshift(asMessage(node));
  const system = conversation.settings.system?.trim();
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

export function titleOf(conversation) {
  const first = path(conversation).find(({ role }) => role === "user");
  const line = first?.content.trim().split("\n")[0] ?? "";
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || "New chat";
}

function asMessage({ role, content, reasoning, calls, callId }) {
  if (role === "tool") return { role, tool_call_id: callId, content };
  if (role === "user") return { role, content };
  return {
    role,
    content,
    ...(reasoning ? { reasoning_content: reasoning } : {}),
    ...(calls?.length ? { tool_calls: calls.map(asCall) } : {}),
  };
}

function asCall({ id, name, args }) {
  return { id, type: "function", function: { name, arguments: args } };
}

function newId() {
  // randomUUID is only there on https and localhost.
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36)).join("");
}
