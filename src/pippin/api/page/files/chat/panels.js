// Where a message is written. Enter sends, Shift+Enter is a new line, Escape stops a reply.

import { h, icon, submitOnEnter } from "../lib/dom.js";
import { count } from "../lib/format.js";
import { titleOf } from "./conversation.js";

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

// The conversations that this browser keeps.
// `actions`: { open, create, remove, exportAll, removeAll, close }
export function sidebar(actions) {
  const list = h("ul", { class: "conversations" });
  const element = h(
    "aside",
    { class: "panel sidebar", id: "sidebar", "aria-label": "Conversations" },
    h("div", { class: "panel-head" },
      h("button", { type: "button", class: "new", onclick: actions.create }, icon("plus"), "New chat"),
      h("button", { type: "button", class: "quiet icon only-narrow", "aria-label": "Close conversations", onclick: actions.close }, icon("close"))),
    list,
    h("div", { class: "panel-foot" },
      h("button", { type: "button", class: "quiet small", onclick: actions.exportAll }, icon("download"), "Export"),
      h("button", { type: "button", class: "quiet small", onclick: actions.removeAll }, icon("trash"), "Delete all")),
    h("p", { class: "note" }, "Kept in this browser alone."),
  );
  element.show = (conversations, current) => {
    list.replaceChildren(...conversations.map((conversation) => row(conversation, conversation.id === current.id, actions)));
  };
  return element;
}

function row(conversation, isCurrent, actions) {
  const title = titleOf(conversation);
  return h(
    "li",
    { class: isCurrent ? "current" : "" },
    h("button", { type: "button", class: "open", "aria-current": isCurrent ? "true" : null, title,
      onclick: () => actions.open(conversation) }, title),
    h("button", { type: "button", class: "quiet icon small remove", "aria-label": `Delete “${title}”`,
      onclick: () => actions.remove(conversation) }, icon("trash")),
  );
}

// What a conversation asks with: system prompt, sampling, tools. Empty fields are the model's own.
const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }, "0 takes the likeliest"],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }, "share of the likeliest that is drawn from"],
  ["max_tokens", "Max tokens", { min: 1, step: 1, placeholder: "what fits" }, "longest reply"],
  ["seed", "Seed", { step: 1, placeholder: "drawn" }, "the same one draws the same reply"],
];
const EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh"];

// A panel whose fields change `get()`'s settings in place and then call `changed`.
export function settingsPanel({ get, changed, close }) {
  const fields = [];
  const field = (name, label, control, note) => {
    const id = `setting-${name}`;
    control.id = id;
    const wrong = h("p", { class: "wrong", id: `${id}-wrong`, role: "alert", hidden: true });
    fields.push({ name, control, wrong });
    control.addEventListener("change", () => read({ name, control, wrong }));
    if (note) control.setAttribute("aria-describedby", `${id}-note`);
    return h("div", { class: "field" }, h("label", { for: id }, label), control,
      note ? h("p", { class: "note", id: `${id}-note` }, note) : null, wrong);
  };

  function read({ name, control, wrong }) {
    const problem = problemOf(name, control);
    wrong.hidden = !problem;
    wrong.textContent = problem ?? "";
    control.setAttribute("aria-invalid", String(Boolean(problem)));
    if (problem) return;
    const settings = get();
    if (control.value === "") delete settings[name];
    else settings[name] = control.type === "number" ? Number(control.value) : control.value;
    changed();
  }

  const panel = h(
    "aside",
    { class: "panel settings", id: "settings", "aria-label": "Settings" },
    h("div", { class: "panel-head" }, h("h2", {}, "Settings"),
      h("button", { type: "button", class: "quiet icon", "aria-label": "Close settings", onclick: close }, icon("close"))),
    field("system", "System prompt", h("textarea", { rows: 5, placeholder: "None" })),
    h("div", { class: "pair" }, NUMBERS.map(([name, label, range, note]) =>
      field(name, label, h("input", { type: "number", placeholder: "model’s own", ...range }), note))),
    field("reasoning_effort", "Reasoning effort",
      h("select", {}, h("option", { value: "" }, "model’s own"), EFFORTS.map((effort) => h("option", { value: effort }, effort)))),
    field("tools", "Tools", h("textarea", { rows: 4, class: "mono", spellcheck: "false", placeholder: '[{"type": "function", "function": {"name": …}}]' }),
      "a JSON list, as in the API; you answer the calls"),
    h("p", { class: "note" }, "Empty fields are left to the model. They hold for this conversation and for new ones."),
  );
  let shown = null;
  panel.show = () => {
    if (shown === get()) return; // what is being written stays
    shown = get();
    for (const { name, control, wrong } of fields) {
      control.value = get()[name] ?? "";
      control.setAttribute("aria-invalid", "false");
      wrong.hidden = true;
    }
  };
  return panel;
}

function problemOf(name, control) {
  if (!control.validity.valid) return control.validationMessage;
  if (name !== "tools" || !control.value.trim()) return null;
  try {
    return Array.isArray(JSON.parse(control.value)) ? null : "This must be a list: [ … ]";
  } catch (error) {
    return `Not JSON: ${error.message}`;
  }
}

// Chooses the model of a conversation, where the server has several.
export function modelPicker(chosen) {
  const picker = h("select", { id: "model-picker", class: "model-picker", "aria-label": "Model", hidden: true });
  picker.addEventListener("change", () => chosen(picker.value));
  picker.show = (models, id) => {
    picker.hidden = models.length < 2;
    picker.replaceChildren(...models.map((model) => h("option", { value: model.id }, model.id)));
    picker.value = id ?? "";
  };
  return picker;
}

// What a conversation without messages shows.
const IDEAS = [
  "Tell me a story about a fox.",
  "Explain a radix tree to a ten-year-old.",
  "Write a haiku about waiting for the first token.",
];

export function welcome(model, write) {
  return h(
    "div",
    { class: "welcome" },
    h("img", { src: "page/icon.svg", width: 56, height: 56, alt: "" }),
    h("h2", {}, model ? model.id : "Waiting for the model"),
    h("p", {}, model
      ? `Runs on this server, with a context of ${count(model.max_model_len)} tokens. Beginnings that prompts share are computed once: see the bar under each reply.`
      : "The server is there; its model is not yet. This page waits with you."),
    h("div", { class: "ideas" }, model ? IDEAS.map((idea) => h("button", { type: "button", onclick: () => write(idea) }, idea)) : null),
  );
}
