// The stream of /events: open while somebody looks, and opened again when it breaks off.

import { request } from "../lib/api.js";
import { events } from "../lib/sse.js";

const RETRY_MS = [500, 1000, 2000, 4000];

export class Feed {
  #told;
  #controller = null;

  // `event(name, data)` for each message; `trouble(text)`, or null when all is well again.
  constructor(told) {
    this.#told = told;
  }

  async open() {
    if (this.#controller) return;
    const controller = (this.#controller = new AbortController());
    for (let failures = 0; !controller.signal.aborted; failures += 1) {
      try {
        const response = await request("events", { signal: controller.signal });
        for await (const { event, data } of events(response.body)) {
          failures = 0;
          this.#told.trouble(null);
          this.#tell(event, JSON.parse(data));
        }
        this.#told.trouble("The feed ended; asking for it again.");
      } catch (error) {
        if (controller.signal.aborted) return;
        if (!error.title) console.error(error); // this page's own mistake
        this.#told.trouble(`${error.title ?? "The feed broke off"}: ${error.message}`);
        if (error.status === 404) return; // a server without a feed
        if (error.code === "admin_key_required") return this.close(); // asked again when it is opened again
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, 3)]));
    }
  }

  close() {
    this.#controller?.abort();
    this.#controller = null;
  }

  #tell(event, data) {
    if (event === "error") this.#told.trouble(data.error.message);
    else if (event === "engine") this.#told.trouble(`The engine was lost: ${data.reason}`);
    if (event !== "error") this.#told.event(event, data);
  }
}
