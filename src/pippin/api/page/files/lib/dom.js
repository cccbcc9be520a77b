// Makes elements. Text becomes text nodes; nothing here can turn a string into markup.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "open", "selected", "htmlFor"]);

// h("button", { class: "quiet", "aria-label": "Copy", onclick: copy }, "Copy")
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

// A table that scrolls in a region of its own; `head` and `rows` are elements.
export const scrollTable = (label, head, rows) =>
  h("div", { class: "table", tabindex: 0, role: "region", "aria-label": label },
    h("table", {}, h("thead", {}, h("tr", {}, head)), rows));

export const columns = (names) => names.map((name) => h("th", { scope: "col" }, name));

// Enter submits, Shift+Enter is a new line.
export function submitOnEnter(field, submit) {
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
}

export const byId = (id) => document.getElementById(id);

// For screen readers, after what they are reading.
export function announce(text) {
  byId("announcer").textContent = text;
}

// Copies text; the button shows that for a moment.
export async function copy(text, button) {
  const before = button.dataset.label ?? button.textContent;
  button.dataset.label = before;
  try {
    await navigator.clipboard.writeText(text);
    show(button, "Copied");
    announce("Copied");
  } catch {
    show(button, "Not allowed");
  }
  setTimeout(() => show(button, before), 1500);
}

function show(button, text) {
  const label = button.querySelector(".label");
  if (label) label.textContent = text;
  else button.textContent = text;
}

// Line icons of 16 units, as paths.
const PATHS = {
  plus: "M8 3v10M3 8h10",
  menu: "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
  sliders: "M2.5 5h6M12 5h1.5M2.5 11h1.5M7.5 11h6M10 3.2v3.6M5.7 9.2v3.6",
  send: "M8 13V3.5M3.8 7.5L8 3.3l4.2 4.2",
  stop: "M4.5 4.5h7v7h-7z",
  copy: "M5.5 5.5h7v8h-7zM3.5 10.5v-8h7",
  edit: "M3 13l.6-2.8 7-7 2.2 2.2-7 7zM9.3 4.5l2.2 2.2",
  again: "M13 8a5 5 0 1 1-1.6-3.7M11.5 1.8v2.7H8.8",
  left: "M9.8 3.5L5.5 8l4.3 4.5",
  right: "M6.2 3.5L10.5 8l-4.3 4.5",
  trash: "M3 4.5h10M6.5 4.3V2.8h3v1.5M4.3 4.5l.6 8.7h6.2l.6-8.7",
  download: "M8 2.5v7.5M4.7 7.2L8 10.4l3.3-3.2M3 13.3h10",
  close: "M4 4l8 8M12 4l-8 8",
  sun: "M8 5.3a2.7 2.7 0 1 1 0 5.4 2.7 2.7 0 0 1 0-5.4zM8 1.5v1.3M8 13.2v1.3M1.5 8h1.3M13.2 8h1.3M3.4 3.4l.9.9M11.7 11.7l.9.9M12.6 3.4l-.9.9M4.3 11.7l-.9.9",
  moon: "M13 9.6A5.6 5.6 0 0 1 6.4 3a5.6 5.6 0 1 0 6.6 6.6z",
  auto: "M8 2.5a5.5 5.5 0 1 0 0 11zM8 2.5a5.5 5.5 0 0 1 0 11z",
  pause: "M5.5 3.5v9M10.5 3.5v9",
  play: "M5 3.3l7.5 4.7L5 12.7z",
  tool: "M9.8 2.7a3.3 3.3 0 0 0-3.1 4.4l-4 4a1.5 1.5 0 0 0 2.2 2.2l4-4a3.3 3.3 0 0 0 4.3-4.2L11.3 7 9.5 6.5 9 4.7z",
};

export function icon(name) {
  return svg(
    "svg",
    { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true", class: "glyph" },
    svg("path", { d: PATHS[name] }),
  );
}
