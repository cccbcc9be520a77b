// Markdown as elements. Whatever a model says becomes text nodes, and links to http(s) or mail.

import { copy, h, scrollTable } from "../lib/dom.js";
import { parseBlocks } from "./blocks.js";
import { highlight } from "./highlight.js";
import { parseInline } from "./inline.js";

const drawn = new WeakMap(); // container -> the raw text of each block in it

// Show `text` in `container`. Blocks at its beginning that are as before keep their elements, so
// that a reply in the making costs what its last block costs, and a selection above it stays.
export function renderMarkdown(container, text) {
  const blocks = parseBlocks(text);
  const before = drawn.get(container) ?? [];
  let same = 0;
  while (same < blocks.length && before[same] === blocks[same].raw) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...blocks.slice(same).map(block));
  drawn.set(container, blocks.map(({ raw }) => raw));
}

function block(found) {
  switch (found.type) {
    case "heading": // the page has headings of its own above these
      return h(`h${Math.min(found.level + 2, 6)}`, {}, inline(found.text));
    case "code":
      return codeBlock(found);
    case "quote":
      return h("blockquote", {}, found.blocks.map(block));
    case "list":
      return list(found);
    case "table":
      return table(found);
    case "rule":
      return h("hr");
    default:
      return h("p", {}, inline(found.text));
  }
}

function codeBlock({ language, text }) {
  const button = h("button", { class: "quiet small", type: "button", onclick: () => copy(text, button) }, "Copy");
  return h(
    "figure",
    { class: "code" },
    h("figcaption", {}, h("span", {}, language || "text"), button),
    h("pre", { tabindex: 0, role: "region", "aria-label": `Code, ${language || "text"}` },
      h("code", {}, highlight(text, language))),
  );
}

function list({ ordered, start, loose, items }) {
  const attributes = ordered && start !== 1 ? { start } : {};
  return h(ordered ? "ol" : "ul", attributes, items.map((item) => listItem(item, loose)));
}

function listItem({ checked, blocks }, loose) {
  const inner = blocks.flatMap((found) =>
    found.type === "paragraph" && !loose ? inline(found.text) : [block(found)]);
  if (checked === null) return h("li", {}, inner);
  const mark = h("span", { class: "task", role: "img", "aria-label": checked ? "done" : "to do" }, checked ? "☑ " : "☐ ");
  return h("li", { class: "has-task" }, mark, inner);
}

function table({ align, head, rows }) {
  const cell = (tag) => (text, n) => h(tag, { class: align[n], ...(tag === "th" ? { scope: "col" } : {}) }, inline(text));
  return scrollTable("Table", head.map(cell("th")), h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell("td"))))));
}

function inline(text) {
  return parseInline(text).map(part);
}

function part(found) {
  if (typeof found === "string") return document.createTextNode(found);
  switch (found.type) {
    case "code":
      return h("code", {}, found.text);
    case "break":
      return h("br");
    case "link":
      return h("a", { href: found.href, target: "_blank", rel: "noopener noreferrer" }, found.parts.map(part));
    default:
      return h(found.type, {}, found.parts.map(part));
  }
}
