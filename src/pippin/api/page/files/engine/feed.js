// The stream of /events: open while the view is visible, and opened again when it ends.

import { request } from "../lib/api.js";
import { ofChosen } from "../lib/models.js";
import { events } from "../lib/sse.js";

const RETRY_MS = [500, 1000, 2000, 4000];

export class Feed {
  #handlers;
  #controller = null;

  // `event(name, data)` for each message; `trouble(text)`, or null when all is well again.
  constructor(handlers) {
    this.#handlers = handlers;
  }

  async open() {
    if (this.#controller) return;
    const controller = (this.#controller = new AbortController());
    for (let failures = 0; !controller.signal.aborted; failures += 1) {
      try {
        const response = await request(ofChosen("events"), { signal: controller.signal });
        for await (const { event, data } of events(response.body)) {
          failures = 0;
          this.#handlers.trouble(null);
          this.#handle(event, JSON.parse(data));
        }
        this.#handlers.trouble("The feed ended; connecting again.");
      } catch (error) {
        if (controller.signal.aborted) return;
        if (!error.title) console.error(error); // a bug of this page
        this.#handlers.trouble(`${error.title ?? "The feed was interrupted"}: ${error.message}`);
        if (error.status === 404) return; // a server without a feed
        if (error.code === "admin_key_required") return this.close(); // until it is opened again
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, 3)]));
    }
  }

  close() {
    this.#controller?.abort();
    this.#controller = null;
  }

  #handle(event, data) {
    if (event === "error") return this.#handlers.trouble(data.error.message);
    if (event === "engine") this.#handlers.trouble(`The engine was lost: ${data.reason}`);
    this.#handlers.event(event, data);
  }
}
