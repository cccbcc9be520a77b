// Markdown as elements. Whatever a model says becomes text nodes, and links to http(s) or mail.

import { copy, h, scrollTable } from "./dom.js";

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

// Markdown's blocks: a text to a list of them. Knows no elements; inline marks are left in.
//
// A text may end anywhere, since replies are shown while they come: a fence that is not closed yet
// is code up to the end. Each top-level block keeps its `raw` lines, so that one that has not
// changed need not be drawn again.

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( {1,4})(?=\S)|( *)$)/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 12; // lists in quotes in lists; what lies deeper is a paragraph

export function parseBlocks(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] = readBlock(lines, at, depth);
    blocks.push({ ...block, raw: lines.slice(at, next).join("\n") });
    at = next;
  }
  return blocks;
}

function readBlock(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return readFence(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return [{ type: "heading", level: heading[1].length, text: heading[2] ?? "" }, at + 1];
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return readQuote(lines, at, depth);
    if (ITEM.test(line)) return readList(lines, at, depth);
  }
  if (isTable(lines, at)) return readTable(lines, at);
  return readParagraph(lines, at);
}

function readFence(lines, at) {
  const [, indent, marks, info] = FENCE.exec(lines[at]);
  const closing = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const inner = new RegExp(`^ {0,${indent.length}}`);
  const text = lines.slice(at + 1, end).map((line) => line.replace(inner, "")).join("\n");
  return [
    { type: "code", language: info.trim().split(/\s/)[0], text, open: end === lines.length },
    Math.min(end + 1, lines.length),
  ];
}

function readQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && (QUOTE.test(lines[end]) || isLazy(lines, end))) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, "")).join("\n");
  return [{ type: "quote", blocks: parseBlocks(inner, depth + 1) }, end];
}

function readList(lines, at, depth) {
  const first = ITEM.exec(lines[at])[2];
  const isOrdered = /\d/.test(first);
  const kind = first.at(-1);
  const items = [];
  let loose = false;
  while (at < lines.length) {
    const mark = ITEM.exec(lines[at]);
    if (!mark || mark[2].at(-1) !== kind || RULE.test(lines[at])) break;
    const indent = mark[1].length + mark[2].length + (mark[3]?.length ?? 1);
    const end = endOfItem(lines, at, indent);
    const own = lines.slice(at, end);
    const inner = own.map((line, n) => line.slice(n ? Math.min(indent, leading(line)) : indent));
    items.push(readItem(inner, depth));
    at = end;
    const gap = at < lines.length && !lines[at].trim();
    while (at < lines.length && !lines[at].trim()) at += 1;
    loose ||= gap && at < lines.length && ITEM.exec(lines[at])?.[2].at(-1) === kind;
  }
  return [{ type: "list", ordered: isOrdered, start: parseInt(first, 10) || 0, loose, items }, at];
}

function readItem(lines, depth) {
  const task = /^\[([ xX])\]\s+/.exec(lines[0]);
  if (task) lines[0] = lines[0].slice(task[0].length);
  return {
    checked: task ? task[1] !== " " : null,
    blocks: parseBlocks(lines.join("\n"), depth + 1),
  };
}

// Its first line, all that is indented below it, and lines that go on with its paragraph.
function endOfItem(lines, at, indent) {
  let end = at + 1;
  for (let i = end; i < lines.length; i += 1) {
    if (!lines[i].trim()) continue;
    if (leading(lines[i]) < indent && !(i === end && isLazy(lines, i))) break;
    end = i + 1;
  }
  return end;
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") &&
    DIVIDER.test(lines[at + 1]) && cells(lines[at]).length === cells(lines[at + 1]).length;
}

function readTable(lines, at) {
  const align = cells(lines[at + 1]).map((mark) => {
    const [left, right] = [mark.startsWith(":"), mark.endsWith(":")];
    return right ? (left ? "center" : "right") : "left";
  });
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end += 1;
  const rows = lines.slice(at + 2, end).map((line) => align.map((_, n) => cells(line)[n] ?? ""));
  return [{ type: "table", align, head: cells(lines[at]), rows }, end];
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));
}

function readParagraph(lines, at) {
  let end = at + 1;
  while (isLazy(lines, end) && !isTable(lines, end)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n").trimEnd();
  return [{ type: "paragraph", text }, end];
}

// Whether a line can only go on with the paragraph before it.
function isLazy(lines, at) {
  const line = lines[at];
  return line !== undefined && line.trim() !== "" &&
    ![FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

const leading = (line) => line.length - line.trimStart().length;

// Markdown inside of a line: code, emphasis, links. Gives a small tree; knows no elements.
//
//   "a *b* `c`"  ->  ["a ", {type: "em", parts: ["b"]}, " ", {type: "code", text: "c"}]

const MAX_INLINE_DEPTH = 8; // emphasis in emphasis; what lies deeper is plain text

// Each begins where the scan stands. The first that fits wins.
const RULES = [
  [/\\([!-/:-@[-`{-~])/y, (found) => found[1]],
  [/(`+)(?!`)([\s\S]*?[^`])\1(?!`)/y, (found) => ({ type: "code", text: trimCode(found[2]) })],
  [/(?: {2,}|\\)\n/y, () => ({ type: "break" })],
  [/!?\[((?:[^\[\]\\]|\\.|\[[^\[\]]*\])*)\]\(\s*<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/y, link],
  [/\*\*(?=\S)([\s\S]*?[^\s\\])\*\*(?!\*)/y, nested("strong")],
  [/__(?=\S)([\s\S]*?[^\s\\])__(?![\w_])/y, nested("strong")],
  [/\*(?=[^\s*])((?:[^*]|\*\*[^*]+\*\*)*?[^\s*\\])\*(?!\*)/y, nested("em")],
  [/_(?=[^\s_])((?:[^_]|__[^_]+__)*?[^\s_\\])_(?![\w_])/y, nested("em")],
  [/~~(?=\S)([\s\S]*?\S)~~/y, nested("del")],
  [/<?(https?:\/\/[^\s<>]*[^\s<>.,;:!?'")\]*_])>?/y, (found) => ({ type: "link", href: found[1], parts: [found[1]] })],
];
const STARTS = /[\\`!\[*_~<h \n]/g;

export function parseInline(text, depth = 0) {
  const parts = [];
  const push = (part) => {
    const last = parts.length - 1;
    if (typeof part === "string" && typeof parts[last] === "string") parts[last] += part;
    else if (part !== "") parts.push(part);
  };
  let at = 0;
  while (at < text.length) {
    const found = depth < MAX_INLINE_DEPTH ? firstRule(text, at, depth) : null;
    if (found) {
      push(found.part);
      at = found.end;
      continue;
    }
    STARTS.lastIndex = at + 1; // nothing begins here: go on to where something might
    const next = STARTS.exec(text)?.index ?? text.length;
    push(text.slice(at, next));
    at = next;
  }
  return parts;
}

function firstRule(text, at, depth) {
  const inWord = at > 0 && /\w/.test(text[at - 1]);
  for (const [pattern, make] of RULES) {
    if (inWord && (text[at] === "_" || text[at] === "h")) continue; // snake_case is not emphasis
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (found) return { part: make(found, depth), end: at + found[0].length };
  }
  return null;
}

function nested(type) {
  return (found, depth) => ({ type, parts: parseInline(found[1], depth + 1) });
}

// Of an image only its link is shown: this page loads nothing from elsewhere.
function link(found, depth) {
  const parts = parseInline(found[1] || found[2], depth + 1);
  return isSafe(found[2]) ? { type: "link", href: found[2], parts } : { type: "span", parts };
}

export const isSafe = (href) => /^(https?:\/\/|mailto:)/i.test(href);

function trimCode(text) {
  const line = text.replace(/\n/g, " ");
  return /^ .*\S.* $/.test(line) ? line.slice(1, -1) : line;
}

// Code in four colours: comments, strings, numbers and words that most languages reserve.
// One grammar for all of them: wrong in corners, and small.
const HASH = new Set(["", "py", "python", "sh", "bash", "zsh", "shell", "yaml", "yml", "toml", "ruby", "rb", "r", "perl", "make", "dockerfile"]);
const PLAIN = new Set(["text", "txt", "plain", "markdown", "md", "diff"]);
const DASH = new Set(["sql", "lua", "haskell", "hs"]);
const STRING = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'|` + "`(?:[^`\\\\]|\\\\.)*`";
const NUMBER = String.raw`\b(?:0x[\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;
const WORD = String.raw`\b[A-Za-z_]\w*\b`;
const WORDS = new Set((
  "and as async await bool break case catch class const continue def default del do elif else enum " +
  "except export extends extern false False finally fn for from func function go if impl implements " +
  "import in int interface is lambda let match mod module mut namespace new nil None nonlocal not null " +
  "or package pass private protected pub public raise return self static struct super switch then this " +
  "throw trait true True try type typedef typeof undefined union unsafe use using var void where while " +
  "with yield select insert update delete from where join group order by having create table values " +
  "SELECT INSERT UPDATE DELETE FROM WHERE JOIN GROUP ORDER BY HAVING CREATE TABLE VALUES").split(" "));
const MAX_LENGTH = 20_000; // more is shown plain: colours are not worth a pause

export function highlight(text, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || text.length > MAX_LENGTH) return [document.createTextNode(text)];
  const parts = [];
  let last = 0;
  for (const found of text.matchAll(pattern(name))) {
    const kind = kindOf(found);
    if (!kind) continue;
    parts.push(document.createTextNode(text.slice(last, found.index)), h("span", { class: kind }, found[0]));
    last = found.index + found[0].length;
  }
  parts.push(document.createTextNode(text.slice(last)));
  return parts;
}

function pattern(name) {
  const line = DASH.has(name) ? "--" : HASH.has(name) ? "#" : "//";
  const comment = String.raw`${line}[^\n]*|/\*[\s\S]*?(?:\*/|$)`;
  return new RegExp(`(?<comment>${comment})|(?<string>${STRING})|(?<number>${NUMBER})|(?<word>${WORD})`, "g");
}

function kindOf({ groups, 0: text }) {
  if (groups.word) return WORDS.has(text) ? "keyword" : null;
  return groups.comment ? "comment" : groups.string ? "string" : "number";
}
