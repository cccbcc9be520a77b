// What a conversation without messages shows.

import { h } from "../lib/dom.js";
import { count } from "../lib/format.js";

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
