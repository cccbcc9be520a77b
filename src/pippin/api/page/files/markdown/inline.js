// Markdown inside of a line: code, emphasis, links. Gives a small tree; knows no elements.
//
//   "a *b* `c`"  ->  ["a ", {type: "em", parts: ["b"]}, " ", {type: "code", text: "c"}]

const MAX_DEPTH = 8; // emphasis in emphasis; what lies deeper is plain text

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
    const found = depth < MAX_DEPTH ? firstRule(text, at, depth) : null;
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
