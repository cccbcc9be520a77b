// What a conversation asks with: system prompt, sampling, tools. Empty fields are the model's own.

import { h } from "../lib/dom.js";
import { icon } from "../lib/icons.js";

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
