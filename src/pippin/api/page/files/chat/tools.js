// A tool call that a model made, and a field for what the tool would have answered.

import { h } from "../lib/dom.js";
import { icon } from "../lib/icons.js";

export function callElement(node, call, isRunning, sendResult) {
  const result = h("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "What the tool answers" });
  const form = h(
    "form",
    { class: "result", hidden: isRunning || node.answered?.includes(call.id) },
    result,
    h("button", { type: "submit", class: "small" }, "Send result"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sendResult(node, call, result.value);
  });
  return h(
    "section",
    { class: "call", "aria-label": `Tool call ${call.name}` },
    h("h4", {}, icon("tool"), h("code", {}, call.name)),
    h("pre", { tabindex: 0, role: "region", "aria-label": "Arguments" }, pretty(call.args)),
    form,
  );
}

// While it comes it is not JSON yet.
function pretty(args) {
  try {
    return JSON.stringify(JSON.parse(args), null, 2);
  } catch {
    return args;
  }
}
