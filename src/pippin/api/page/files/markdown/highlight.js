// Code in four colours: comments, strings, numbers and words that most languages reserve.
// One grammar for all of them: wrong in corners, and small.

import { h } from "../lib/dom.js";

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
