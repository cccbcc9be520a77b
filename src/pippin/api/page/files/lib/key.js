// The API key: asked for when the server wants one. It lives in sessionStorage, so that a reload
// does not ask again and closing the tab forgets it; nothing else of the browser ever gets it.

import { byId, h } from "./dom.js";

const NAME = "pippin.key";
let key = remembered();
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
      h("h2", { id: "key-title" }, "This server wants a key"),
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
      remember(input.value.trim());
      dialog.close();
    });
    dialog.addEventListener("cancel", (event) => event.preventDefault()); // nothing works without
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve();
    });
    byId("main").append(dialog);
    dialog.showModal();
  });
}

function remember(value) {
  key = value;
  try {
    sessionStorage.setItem(NAME, value);
  } catch {
    // Kept in memory then: a reload asks again.
  }
}

function remembered() {
  try {
    return sessionStorage.getItem(NAME);
  } catch {
    return null;
  }
}
