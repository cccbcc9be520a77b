// A conversation is a tree of messages; one path of it is shown.
//
//   nodes   id -> { id, parent, role, content, ... }
//   chosen  parent's id ("" above the first message) -> the child that is shown
//
// Editing a message or asking again adds a sibling. What both begin with is in the server's cache.

import { writeStored } from "../lib/api.js";
import { sum } from "../lib/format.js";

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

// Conversations in localStorage, one entry each, so that two tabs do not overwrite each other.
// Bounded: beyond that the oldest are deleted, and `save` returns them.
const PREFIX = "pippin.chat.";
const SETTINGS = "pippin.settings";
export const MAX_CONVERSATIONS = 60;
const MAX_CHARACTERS = 4_000_000; // browsers keep about five million for a site

export function loadAll() {
  const found = [];
  for (const name of names()) {
    try {
      found.push(JSON.parse(localStorage.getItem(name)));
    } catch {
      console.warn(`${name} in localStorage is not a conversation; it is left alone`);
    }
  }
  return found.sort((a, b) => b.updated - a.updated);
}

// Returns those that it deleted to make room; throws where that was not enough.
export function save(conversation) {
  const text = JSON.stringify(conversation);
  const others = loadAll().filter(({ id }) => id !== conversation.id);
  const dropped = [];
  const isFull = () =>
    others.length >= MAX_CONVERSATIONS || text.length + sizeOf(others) > MAX_CHARACTERS;
  while (others.length && isFull()) dropped.push(drop(others));
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, text);
      return dropped;
    } catch (error) {
      if (!others.length) throw error;
      dropped.push(drop(others));
    }
  }
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

export function lastSettings() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}

export const rememberSettings = (settings) =>
  writeStored("localStorage", SETTINGS, JSON.stringify(settings));

export function download(conversations, name) {
  const file = new Blob([JSON.stringify(conversations, null, 2)], { type: "application/json" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function names() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  } catch {
    return [];
  }
}

function drop(conversations) {
  const oldest = conversations.pop();
  remove(oldest.id);
  return oldest;
}

const sizeOf = (conversations) => sum(conversations.map(({ id }) => localStorage.getItem(PREFIX + id).length));
