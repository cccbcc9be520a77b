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
