// One message as an element, and what can be done with it. Knows no network.

import { copy, h } from "../lib/dom.js";
import { icon } from "../lib/icons.js";
import { renderMarkdown } from "../markdown/render.js";
import { statsLine } from "./stats.js";
import { callElement } from "./tools.js";

// `actions`: { edit, again, choose, curl, python, result }, each given the node.
// `place`: { index, of }: which of its siblings it is.
export function messageElement(node, { place, actions, model, running = false }) {
  const element = h("article", { class: `message ${node.role}`, "data-id": node.id, "aria-label": labelOf(node, model) });
  element.append(h("h3", { class: "who" }, node.role === "user" ? "You" : node.role === "tool" ? "Tool result" : model));
  if (node.role === "assistant") element.append(...assistantBody(element, node, actions, running));
  else element.append(h("div", { class: "said plain" }, node.content));
  if (node.role !== "tool") element.append(footer(element, node, place, actions));
  return element;
}

const labelOf = (node, model) =>
  ({ user: "Your message", tool: "Tool result" })[node.role] ?? `Reply of ${model}`;

function assistantBody(element, node, actions, running) {
  const thought = h("div", { class: "prose" });
  const summary = h("summary", {}, "Reasoning");
  const reasoning = h("details", { class: "reasoning", hidden: true }, summary, thought);
  const prose = h("div", { class: "said prose" });
  const calls = h("div", { class: "calls" });
  const error = h("div", { class: "failure", role: "alert", hidden: true });
  const stats = h("div", { class: "stats-place" });
  // Draws what the node holds by now; called at most once a frame while it grows.
  element.draw = (isRunning) => {
    reasoning.hidden = !node.reasoning;
    if (node.reasoning) renderMarkdown(thought, node.reasoning);
    summary.textContent = isRunning && !node.content ? "Reasoning…" : "Reasoning";
    renderMarkdown(prose, node.content);
    prose.classList.toggle("waiting", isRunning && !node.content && !node.reasoning && !node.calls);
    element.classList.toggle("running", isRunning);
    calls.replaceChildren(...(node.calls ?? []).map((call) => callElement(node, call, isRunning, actions.result)));
    error.hidden = !node.error;
    if (node.error) error.replaceChildren(h("strong", {}, node.error.title), h("p", {}, node.error.message));
    stats.replaceChildren(statsLine(node));
  };
  element.draw(running);
  return [reasoning, prose, calls, error, stats];
}

function footer(element, node, { index, of }, actions) {
  const line = h("div", { class: "actions" });
  if (of > 1) {
    const turn = (by, name, label) =>
      h("button", {
        type: "button", class: "quiet icon small", "aria-label": label,
        disabled: index + by < 0 || index + by >= of, onclick: () => actions.choose(node, by),
      }, icon(name));
    line.append(h("span", { class: "branch", role: "group", "aria-label": "Versions" },
      turn(-1, "left", "Previous version"),
      h("span", { class: "which" }, `${index + 1}/${of}`),
      turn(1, "right", "Next version")));
  }
  const action = (glyph, label, run, title = label) => {
    const button = h("button", { type: "button", class: "quiet small", title, "aria-label": title, onclick: () => run(button) },
      icon(glyph), h("span", { class: "label" }, label));
    button.dataset.label = label;
    return button;
  };
  line.append(action("copy", "Copy", (button) => copy(node.content, button)));
  if (node.role === "user") line.append(action("edit", "Edit", () => actions.edit(node, element)));
  else {
    line.append(
      action("again", "Regenerate", () => actions.again(node)),
      action("copy", "curl", (button) => copy(actions.curl(node), button), "Copy as curl"),
      action("copy", "Python", (button) => copy(actions.python(node), button), "Copy as Python"),
    );
  }
  return line;
}
