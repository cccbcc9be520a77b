// Server-sent events off a response's body. EventSource can send neither a key nor a POST.

// Yields { event, data } until the stream ends. Comments (": still here") are passed over.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const records = (rest + value).split(/\r?\n\r?\n/);
      rest = records.pop();
      for (const record of records) {
        const found = parse(record);
        if (found) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already: that error was thrown above
  }
}

function parse(record) {
  let event = "message";
  const data = [];
  for (const line of record.split(/\r?\n/)) {
    const [, field, value] = /^([^:]*):? ?(.*)$/s.exec(line);
    if (field === "data") data.push(value);
    else if (field === "event") event = value;
  }
  return data.length ? { event, data: data.join("\n") } : null;
}
