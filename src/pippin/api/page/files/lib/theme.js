// Dark, light, or the system's theme: a button that changes to the next.

import { byId } from "./dom.js";
import { icon } from "./icons.js";
import { writeStored } from "./storage.js";

const NEXT = { auto: "light", light: "dark", dark: "auto" };
const ICONS = { auto: "auto", light: "sun", dark: "moon" };
const NAMES = { auto: "as the system", light: "light", dark: "dark" };

export function startTheme() {
  const button = byId("theme");
  const root = document.documentElement;
  const show = () => {
    const theme = root.dataset.theme ?? "auto";
    button.replaceChildren(icon(ICONS[theme]));
    button.setAttribute("aria-label", `Theme: ${NAMES[theme]}. Change to ${NAMES[NEXT[theme]]}`);
    button.title = `Theme: ${NAMES[theme]}`;
  };
  button.addEventListener("click", () => {
    const theme = NEXT[root.dataset.theme ?? "auto"];
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    writeStored("localStorage", "pippin.theme", theme);
    show();
    dispatchEvent(new Event("themechange")); // canvases read their colours again
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    dispatchEvent(new Event("themechange")));
  show();
}
