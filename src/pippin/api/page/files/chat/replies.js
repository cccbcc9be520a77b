// Replies in flight, at most one for each conversation. Knows no elements.

import { streamReply } from "./reply.js";

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
