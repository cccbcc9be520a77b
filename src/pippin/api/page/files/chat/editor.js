// A message that is written anew, in its place.

import { h, submitOnEnter } from "../lib/dom.js";

export function editor(text, { send, cancel }) {
  const field = h("textarea", { rows: Math.min(12, text.split("\n").length + 1), "aria-label": "Edit your message", value: text });
  const form = h(
    "form",
    { class: "message user editing" },
    field,
    h("div", { class: "actions" },
      h("button", { type: "submit", class: "main small" }, "Send"),
      h("button", { type: "button", class: "small", onclick: cancel }, "Cancel"),
      h("span", { class: "note" }, "The old version stays: ‹ › switches.")),
  );
  const submit = () => field.value.trim() && send(field.value);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    cancel();
  });
  submitOnEnter(field, submit);
  form.focusText = () => field.focus();
  return form;
}
