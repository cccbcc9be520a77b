// Starts the page: two views, the theme, and the model's name once there is one.

import { Chat } from "./chat/view.js";
import { Engine } from "./engine/view.js";
import { allModels, getJson, setModels, writeStored } from "./lib/api.js";
import { byId, icon } from "./lib/dom.js";
import { count } from "./lib/format.js";

// Dark, light, or the system's theme: a button that changes to the next.
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

const RETRY_MS = 1500;
const VIEWS = ["chat", "engine"];

startTheme();
const views = { chat: new Chat(byId("chat")), engine: new Engine(byId("engine")) };
addEventListener("hashchange", showView);
showView();
findModel();

function showView() {
  const asked = location.hash.slice(1);
  const shown = VIEWS.includes(asked) ? asked : "chat";
  for (const name of VIEWS) {
    byId(name).hidden = name !== shown;
    if (name === shown) byId(`tab-${name}`).setAttribute("aria-current", "page");
    else byId(`tab-${name}`).removeAttribute("aria-current");
  }
  document.title = shown === "engine" ? "Engine · Pippin" : "Pippin";
  views.engine.isShown = shown === "engine"; // nothing is asked of the server for a hidden view
  if (shown === "chat") views.chat.focus();
}

// A server that is loading its model says so with a 503: ask again until there is one.
async function findModel() {
  const place = byId("model");
  for (;;) {
    try {
      const { data } = await getJson("v1/models");
      setModels(data);
      views.chat.hasModels();
      const [model, ...others] = allModels();
      place.textContent = others.length ? `${1 + others.length} models` : model.id;
      place.title = allModels().map(({ id, max_model_len: most }) => `${id}, ${count(most)} tokens of context`).join("\n");
      place.classList.remove("trouble");
      return;
    } catch (error) {
      place.textContent = error.title ? `${error.title}: ${error.message}` : error.message;
      place.classList.add("trouble");
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}
