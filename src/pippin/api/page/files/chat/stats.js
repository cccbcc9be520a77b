// What is under a reply: times, tokens, and how much of the prompt was not computed again.

import { h } from "../lib/dom.js";
import { count, percent, plural, rate, seconds } from "../lib/format.js";

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
