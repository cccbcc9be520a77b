// One reply as it comes: text, reasoning, calls, and how long all of it took. Knows no elements.

import { ApiError, errorIn, request } from "../lib/api.js";
import { events } from "../lib/sse.js";

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
