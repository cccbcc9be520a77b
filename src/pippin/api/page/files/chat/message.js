// One message as an element, and what can be done with it.

import { copy, h, icon, submitOnEnter } from "../lib/dom.js";
import { count, percent, plural, rate, seconds } from "../lib/format.js";
import { renderMarkdown } from "../lib/markdown.js";

// `actions`: { edit, again, choose, curl, result }, each given the node.
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
    );
  }
  return line;
}

// What is under a reply: times, tokens, and how much of the prompt was not computed again.
export function statsLine(node) {
  const { ttft, rate: speed, tokens, prompt, cached } = node.stats ?? {};
  const facts = [];
  if (ttft !== undefined) facts.push(fact("TTFT", seconds(ttft), "time to the first token"));
  if (speed !== undefined) facts.push(fact("", `${rate(speed)} tok/s`, "tokens a second after the first"));
  if (tokens !== undefined) facts.push(fact("", plural(tokens, "token"), "tokens of the reply"));
  if (node.finish === "length") facts.push(fact("", "cut off at its limit", "max tokens, or all that the model holds"));
  if (node.finish === "stopped") facts.push(fact("", "stopped", "you stopped it"));
  return h("div", { class: "stats" }, facts, prompt ? reuse(prompt, cached) : null);
}

const fact = (name, value, title) =>
  h("span", { class: "fact", title }, name ? [h("span", { class: "name" }, name), " "] : null, value);

function reuse(prompt, cached) {
  const share = cached / prompt;
  const text = `${count(cached)} of ${plural(prompt, "prompt token")} reused (${percent(share)})`;
  const part = h("span", { class: "part" });
  part.style.width = `${100 * share}%`;
  return h(
    "span",
    { class: "reuse", "data-cached": cached, "data-prompt": prompt, title: text },
    h("span", { class: "bar", role: "img", "aria-label": text }, part),
    h("span", { class: "fact", "aria-hidden": "true" }, `${count(cached)} / ${count(prompt)} reused`),
  );
}

// A tool call that a model made, and a field for what the tool would have answered.
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

// A message that is written anew, in its place.
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
