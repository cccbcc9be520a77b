// The server's API, as this page uses it: the key, and errors in plain words.

import { askForKey, currentKey } from "./key.js";

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
