// One reply as it comes: text, reasoning, calls, and how long all of it took.

import { ApiError, errorIn, events, request } from "../lib/api.js";

export function requestBody(model, messages, settings) {
  const body = { model, messages, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens", "seed", "reasoning_effort"]) {
    if (settings[name] !== undefined && settings[name] !== "") body[name] = settings[name];
  }
  if (settings.tools?.trim()) body.tools = JSON.parse(settings.tools);
  return body;
}

// Fills `node` (content, reasoning, calls, finish, stats) and calls `changed` for each event.
export async function streamReply(body, node, { signal, changed }) {
  const asked = performance.now();
  let first = null;
  let last = null;
  let done = false;
  const response = await request("v1/chat/completions", { method: "POST", body, signal });
  try {
    for await (const { data } of events(response.body)) {
      if (data === "[DONE]") {
        done = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw errorIn(chunk.error);
      for (const choice of chunk.choices) {
        if (take(node, choice)) {
          last = performance.now();
          first ??= last;
        }
      }
      node.stats = statsOf({ asked, first, last, usage: chunk.usage, before: node.stats });
      changed();
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(0, "interrupted", "the server disconnected before the end of the reply");
  }
  if (!done) throw new ApiError(0, "interrupted", "the stream ended before the reply was complete");
}

// Whether something was said.
function take(node, { delta, finish_reason: finish }) {
  if (finish) node.finish = finish;
  if (delta.content) node.content += delta.content;
  if (delta.reasoning_content) node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
  for (const call of delta.tool_calls ?? []) takeCall((node.calls ??= []), call);
  return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
}

function takeCall(calls, { index, id, function: { name, arguments: args } }) {
  calls[index] ??= { id, name, args: "" };
  calls[index].args += args ?? "";
}

function statsOf({ asked, first, last, usage, before }) {
  const stats = { ...before };
  if (first !== null) stats.ttft = (first - asked) / 1000;
  if (usage) {
    stats.tokens = usage.completion_tokens;
    stats.prompt = usage.prompt_tokens;
    stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    if (stats.tokens > 1 && last > first) stats.rate = ((stats.tokens - 1) * 1000) / (last - first);
  }
  return stats;
}

// Replies in flight, at most one for each conversation.
export class Replies {
  #running = new Map(); // conversation -> { node, controller }
  #handlers;

  // `grew` at most once a frame, `ended` once; each with the conversation and its node.
  constructor(handlers) {
    this.#handlers = handlers;
  }

  async start(conversation, node, body) {
    this.stop(conversation);
    const controller = new AbortController();
    const own = { node, controller };
    this.#running.set(conversation, own);
    let frame = 0;
    const changed = () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        this.#handlers.grew(conversation, node);
      });
    };
    try {
      await streamReply(body, node, { signal: controller.signal, changed });
    } catch (error) {
      if (error.name === "AbortError") node.finish = "stopped";
      else node.error = { title: error.title ?? "This page has a bug", message: error.message };
      if (!error.title && error.name !== "AbortError") console.error(error);
    }
    cancelAnimationFrame(frame);
    if (this.#running.get(conversation) === own) this.#running.delete(conversation);
    this.#handlers.ended(conversation, node);
  }

  stop(conversation) {
    this.#running.get(conversation)?.controller.abort();
  }

  isRunning(node) {
    return [...this.#running.values()].some((running) => running.node === node);
  }

  runsIn = (conversation) => this.#running.has(conversation);
  conversations = () => [...this.#running.keys()];
}

// A request as a command. The key is never in it.
export function asCurl(url, body, needsKey) {
  const lines = [
    `curl -N ${url}v1/chat/completions`,
    "-H 'Content-Type: application/json'",
    ...(needsKey ? ['-H "Authorization: Bearer $PIPPIN_API_KEY"'] : []),
    `-d ${quote(JSON.stringify(body, null, 2))}`,
  ];
  return `${lines.join(" \\\n  ")}\n`;
}

const quote = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
