// A request as a command and as a program. The key is never in it.

export function asCurl(url, body, needsKey) {
  const lines = [
    `curl -N ${url}v1/chat/completions`,
    "-H 'Content-Type: application/json'",
    ...(needsKey ? ['-H "Authorization: Bearer $PIPPIN_API_KEY"'] : []),
    `-d ${quote(JSON.stringify(body, null, 2))}`,
  ];
  return `${lines.join(" \\\n  ")}\n`;
}

export function asPython(url, body, needsKey) {
  const { model, messages, stream, stream_options: options, ...rest } = body;
  const key = needsKey ? 'os.environ["PIPPIN_API_KEY"]' : '"any"';
  const fields = { model, messages, stream, ...rest };
  const written = Object.entries(fields).map(([name, value]) => `    ${name}=${literal(value, 1)},\n`);
  return [
    needsKey ? "import os\n\n" : "",
    "from openai import OpenAI\n\n",
    `client = OpenAI(base_url="${url}v1", api_key=${key})\n`,
    `stream = client.chat.completions.create(\n${written.join("")})\n`,
    "for chunk in stream:\n",
    "    if chunk.choices:\n",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)\n',
  ].join("");
}

// As Python writes it: JSON but for three words, and long lists over several lines.
export function literal(value, depth = 0) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value)
    ? value.map((item) => literal(item, depth + 1))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, depth + 1)}`);
  const line = `${open}${parts.join(", ")}${close}`;
  if (line.length + 4 * depth < 80 && !line.includes("\n")) return line;
  const indent = "    ".repeat(depth + 1);
  return `${open}\n${parts.map((part) => `${indent}${part},\n`).join("")}${"    ".repeat(depth)}${close}`;
}

const quote = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
