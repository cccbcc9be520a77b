// The API key: asked for when the server requires one. It is in sessionStorage, so that a reload
// does not ask again and closing the tab deletes it; it is stored nowhere else.

import { byId, h } from "./dom.js";
import { readStored, writeStored } from "./storage.js";

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
