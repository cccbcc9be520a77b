// Where a message is written. Enter sends, Shift+Enter is a new line, Escape stops a reply.

import { h, submitOnEnter } from "../lib/dom.js";
import { icon } from "../lib/icons.js";

export function composer({ send, stop }) {
  const text = h("textarea", { id: "message", rows: 1, placeholder: "Write a message", "aria-label": "Message", "aria-describedby": "composer-hint" });
  const button = h("button", { type: "submit", class: "main round", "aria-label": "Send" }, icon("send"));
  const hint = h("p", { class: "hint", id: "composer-hint" });
  const form = h("form", { class: "composer" }, h("div", { class: "box" }, text, button), hint);
  let running = false;
  let ready = false; // there is a model to send to

  const grow = () => {
    text.style.height = "auto";
    text.style.height = `${Math.min(text.scrollHeight, innerHeight * 0.4)}px`;
  };
  const submit = () => {
    if (running || !ready || !text.value.trim()) return;
    const written = text.value;
    text.value = "";
    grow();
    send(written);
  };
  text.addEventListener("input", grow);
  submitOnEnter(text, submit);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) stop();
    else submit();
  });

  form.focus = () => text.focus();
  form.write = (written) => {
    text.value = written;
    grow();
    text.focus();
  };
  form.show = (isReady, isRunning, note) => {
    const keys = isReady ? "Enter sends, Shift+Enter is a new line" : "Waiting for the model";
    hint.replaceChildren(h("span", { class: isReady ? "keys" : "" }, keys), h("span", {}, note));
    ready = isReady;
    button.disabled = !ready;
    if (running === isRunning) return;
    running = isRunning;
    button.replaceChildren(icon(running ? "stop" : "send"));
    button.setAttribute("aria-label", running ? "Stop" : "Send");
  };
  form.show(false, false);
  return form;
}
