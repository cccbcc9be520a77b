// The conversations that this browser keeps.

import { h } from "../lib/dom.js";
import { icon } from "../lib/icons.js";
import { titleOf } from "./conversation.js";

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
