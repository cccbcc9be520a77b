// Conversations in localStorage, one entry each, so that two tabs do not overwrite each other.
// Bounded: beyond that the oldest are deleted, and `save` returns them.

import { sum } from "../lib/format.js";
import { writeStored } from "../lib/storage.js";

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
