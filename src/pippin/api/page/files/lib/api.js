// The server's API, as this page uses it: the key, and errors in plain words.

import { byId, h } from "./dom.js";

export class ApiError extends Error {
  constructor(status, code, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }

  // The short form of the error; `message` has the details.
  get title() {
    return TITLES[this.code] ?? (this.status >= 500 ? "The server could not do this" : "The server refused this");
  }
}

const TITLES = {
  unreachable: "The server cannot be reached",
  not_ready: "The engine is not ready",
  engine_dead: "The engine was lost",
  device_failed: "The engine was lost",
  overloaded: "The queue is full",
  out_of_memory: "Out of memory",
  context_length_exceeded: "Too long for this model",
  deadline_passed: "The deadline passed",
  too_many_connections: "Too many connections",
  forbidden: "Access denied for this address",
  admin_key_required: "Only an admin may see this",
  interrupted: "The connection was interrupted",
};

export const address = (path) => new URL(path, document.baseURI).href;

// A response without an error. After a 401 the key is asked for and the request is sent again.
export async function request(path, { method = "GET", body, signal } = {}) {
  for (;;) {
    const response = await send(path, method, body, signal);
    if (response.status !== 401) {
      if (!response.ok) throw await errorOf(response);
      return response;
    }
    await askForKey();
  }
}

export const getJson = async (path, options) => (await request(path, options)).json();

// `error` inside of an event.
export const errorIn = ({ message, code }) => new ApiError(0, code, message);

async function send(path, method, body, signal) {
  const headers = {};
  if (currentKey()) headers.authorization = `Bearer ${currentKey()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  try {
    return await fetch(address(path), {
      method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", `${location.host} does not answer: is it still running?`);
  }
}

async function errorOf(response) {
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  try {
    const { error } = await response.json();
    return new ApiError(response.status, error.code, error.message, retryAfter);
  } catch {
    return new ApiError(response.status, "unknown", `it answered ${response.status}`, retryAfter);
  }
}

// The API key: asked for when the server requires one. It is in sessionStorage, so that a reload
// does not ask again and closing the tab deletes it; it is stored nowhere else.
const NAME = "pippin.key";
let key = readStored("sessionStorage", NAME);
let asking = null;

export const currentKey = () => key;

// One question at a time, however many requests were refused.
export function askForKey() {
  asking ??= ask().finally(() => (asking = null));
  return asking;
}

function ask() {
  const wrong = key !== null;
  return new Promise((resolve) => {
    const input = h("input", {
      id: "key", type: "password", autocomplete: "current-password", required: true,
      "aria-describedby": "key-note",
    });
    const form = h(
      "form",
      {},
      h("h2", { id: "key-title" }, "This server requires a key"),
      wrong ? h("p", { class: "wrong", role: "alert" }, "That key was refused.") : null,
      h("label", { for: "key" }, "API key"),
      input,
      h("p", { id: "key-note", class: "note" },
        "One that the server was started with (--api-key). It is kept until this tab is closed."),
      h("button", { class: "main", type: "submit" }, "Continue"),
    );
    const dialog = h("dialog", { class: "ask", "aria-labelledby": "key-title" }, form);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      key = input.value.trim();
      writeStored("sessionStorage", NAME, key);
      dialog.close();
    });
    dialog.addEventListener("cancel", (event) => event.preventDefault()); // the page needs it
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve();
    });
    byId("main").append(dialog);
    dialog.showModal();
  });
}

// Server-sent events off a response's body. EventSource can send neither a key nor a POST.
// Yields { event, data } until the stream ends. Comments (": still here") are passed over.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const records = (rest + value).split(/\r?\n\r?\n/);
      rest = records.pop();
      for (const record of records) {
        const found = parse(record);
        if (found) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already: that error was thrown above
  }
}

function parse(record) {
  let event = "message";
  const data = [];
  for (const line of record.split(/\r?\n/)) {
    const [, field, value] = /^([^:]*):? ?(.*)$/s.exec(line);
    if (field === "data") data.push(value);
    else if (field === "event") event = value;
  }
  return data.length ? { event, data: data.join("\n") } : null;
}

// The models of the server, and the one that is chosen.
let models = []; // { id, max_model_len }
let chosen = null;

// Other names of a model are left out: `root` is the name that it has here.
export function setModels(listed) {
  models = listed.filter(({ id, root }) => root === undefined || root === id);
  chosen = models[0];
}

export const allModels = () => models;

// The model of that name, or the first; null before the server has one.
export function chooseModel(id) {
  chosen = models.find((model) => model.id === id) ?? models[0] ?? null;
  return chosen;
}

// A path about the engine of the chosen model; of several replicas, the one that the page's own
// address names: `/?replica=1`.
export function ofChosen(path) {
  const replica = new URLSearchParams(location.search).get("replica");
  const query = new URLSearchParams({
    ...(models.length > 1 && { model: chosen.id }),
    ...(replica !== null && { replica }),
  });
  return query.size > 0 ? `${path}?${query}` : path;
}

// Browser storage that may be switched off or full: reads then find nothing, writes are lost.
export function readStored(storage, name) {
  try {
    return globalThis[storage].getItem(name);
  } catch {
    return null;
  }
}

export function writeStored(storage, name, value) {
  try {
    globalThis[storage].setItem(name, value);
  } catch {
    // It lasts until the page is reloaded.
  }
}
