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
