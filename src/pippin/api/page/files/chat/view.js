// The chat: a list of conversations, one thread, a composer, and the replies that are on their way.

import { address, allModels, chooseModel, currentKey } from "../lib/api.js";
import { announce, byId, h, icon } from "../lib/dom.js";
import { count } from "../lib/format.js";
import { add, choose, messagesUpTo, newConversation, parentOf, path, siblings, titleOf } from "./conversation.js";
import * as store from "./conversation.js";
import { editor, messageElement } from "./message.js";
import { composer, modelPicker, settingsPanel, sidebar, welcome } from "./panels.js";
import { asCurl, Replies, requestBody } from "./reply.js";

export class Chat {
  #conversations = store.loadAll();
  #current = this.#conversations[0] ?? newConversation(store.lastSettings());
  #replies = new Replies({
    grew: (conversation, node) => this.#grew(conversation, node),
    ended: (conversation, node) => this.#ended(conversation, node),
  });
  #model = null; // { id, max_model_len }
  #parts;

  constructor(root) {
    const thread = h("div", { class: "thread", id: "thread" });
    const scroll = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Messages" }, thread);
    const notice = h("div", { class: "notice", role: "status" });
    const write = composer({ send: (text) => this.#send(text), stop: () => this.#replies.stop(this.#current) });
    const list = sidebar({
      open: (conversation) => this.#open(conversation),
      create: () => this.#open(newConversation(store.lastSettings())),
      remove: (conversation) => this.#remove(conversation),
      removeAll: () => this.#removeAll(),
      exportAll: () => store.download(this.#conversations, "pippin-conversations.json"),
      close: () => this.#toggle("sidebar", false),
    });
    const settings = settingsPanel({
      get: () => this.#current.settings,
      changed: () => {
        store.rememberSettings(this.#current.settings);
        this.#save(this.#current);
      },
      close: () => this.#toggle("settings", false),
    });
    const toggle = (name, glyph, label) =>
      h("button", { type: "button", class: "quiet icon", id: `toggle-${name}`, "aria-label": label,
        "aria-controls": name, "aria-expanded": "false", onclick: () => this.#toggle(name) }, icon(glyph));
    const title = h("h2", { class: "title" });
    const picker = modelPicker((id) => {
      this.#current.settings.model = id;
      store.rememberSettings(this.#current.settings);
      this.#save(this.#current);
      this.#show();
    });
    root.append(
      list,
      h("div", { class: "middle" },
        h("div", { class: "bar-top" }, toggle("sidebar", "menu", "Conversations"), title,
          picker, toggle("settings", "sliders", "Settings")),
        scroll, notice, write),
      settings,
      h("div", { class: "shade", onclick: () => this.#closePanels() }),
    );
    this.#parts = { root, thread, scroll, notice, write, list, settings, title, picker };
    root.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      if (this.#isNarrow() && this.#closePanels()) return;
      this.#replies.stop(this.#current);
    });
    addEventListener("storage", () => this.#reload());
    addEventListener("pagehide", () => this.#replies.conversations().forEach((found) => this.#save(found)));
    this.#show();
  }

  // Once the server has one.
  hasModels() {
    this.#show();
  }

  focus() {
    if (!this.#isNarrow()) this.#parts.write.focus(); // a phone's keyboard would cover the page
  }

  // ---- actions ------------------------------------------------------------------------------

  #send(text) {
    const last = path(this.#current).at(-1) ?? null;
    this.#reply(add(this.#current, last, { role: "user", content: text }));
  }

  #edit(node, element) {
    const replaced = editor(node.content, {
      cancel: () => replaced.replaceWith(element),
      send: (text) => this.#reply(add(this.#current, parentOf(this.#current, node), { role: "user", content: text })),
    });
    element.replaceWith(replaced);
    replaced.focusText();
  }

  #result(node, call, content) {
    node.answered = [...(node.answered ?? []), call.id];
    const last = path(this.#current).at(-1);
    const result = add(this.#current, last, { role: "tool", callId: call.id, content });
    if (node.calls.every(({ id }) => node.answered.includes(id))) this.#reply(result);
    else this.#show();
  }

  // Ask for an answer to `question`; one more than it has, if it has any.
  #reply(question) {
    const conversation = this.#current;
    const node = add(conversation, question, { role: "assistant", content: "", model: this.#model.id });
    if (!this.#conversations.includes(conversation)) this.#conversations.unshift(conversation);
    this.#replies.start(conversation, node, this.#bodyFor(node));
    this.#save(conversation);
    this.#show();
    this.#toEnd();
  }

  #bodyFor(node) {
    const question = parentOf(this.#current, node);
    return requestBody(this.#model.id, messagesUpTo(this.#current, question), this.#current.settings);
  }

  #choose(node, by) {
    const all = siblings(this.#current, node);
    choose(this.#current, all[all.indexOf(node) + by]);
    this.#save(this.#current);
    this.#show();
  }

  #open(conversation) {
    this.#current = conversation;
    if (this.#isNarrow()) this.#closePanels();
    this.#show();
    this.#toEnd();
    this.focus();
  }

  #remove(conversation) {
    if (!confirm(`Delete “${titleOf(conversation)}”?`)) return;
    this.#replies.stop(conversation);
    store.remove(conversation.id);
    this.#conversations = this.#conversations.filter((other) => other !== conversation);
    if (conversation === this.#current) this.#current = this.#conversations[0] ?? newConversation(store.lastSettings());
    this.#show();
  }

  #removeAll() {
    if (!this.#conversations.length || !confirm("Delete all conversations in this browser?")) return;
    for (const conversation of this.#conversations) {
      this.#replies.stop(conversation);
      store.remove(conversation.id);
    }
    this.#conversations = [];
    this.#open(newConversation(store.lastSettings()));
  }

  // ---- replies that arrive ------------------------------------------------------------------

  #grew(conversation, node) {
    if (conversation !== this.#current) return;
    this.#keepEnd(() => this.#elementOf(node)?.draw(true));
  }

  #ended(conversation, node) {
    this.#save(conversation);
    if (conversation !== this.#current) return;
    this.#keepEnd(() => this.#show());
    announce(node.error ? `${node.error.title}: ${node.error.message}` : `Reply complete. ${node.content.slice(0, 400)}`);
  }

  // ---- what is shown ------------------------------------------------------------------------

  #show() {
    const { thread, list, settings, title, write, picker } = this.#parts;
    this.#model = chooseModel(this.#current.settings.model);
    picker.show(allModels(), this.#model?.id);
    const shown = path(this.#current);
    const focus = this.#focusInThread();
    const actions = {
      edit: (node, element) => this.#edit(node, element),
      again: (node) => this.#reply(parentOf(this.#current, node)),
      choose: (node, by) => this.#choose(node, by),
      curl: (node) => asCurl(address("./"), this.#bodyFor(node), Boolean(currentKey())),
      result: (node, call, content) => this.#result(node, call, content),
    };
    thread.replaceChildren(...shown.map((node) => {
      const all = siblings(this.#current, node);
      return messageElement(node, {
        place: { index: all.indexOf(node), of: all.length }, actions,
        model: node.model ?? this.#model?.id ?? "Model", running: this.#replies.isRunning(node),
      });
    }));
    if (!shown.length) thread.append(welcome(this.#model, (text) => write.write(text)));
    title.textContent = titleOf(this.#current);
    list.show(this.#conversations, this.#current);
    settings.show();
    write.show(this.#model !== null, this.#replies.runsIn(this.#current), this.#room(shown));
    focus?.();
  }

  // Messages are drawn anew: the focus returns to the same button, or to the composer.
  #focusInThread() {
    const { thread, write } = this.#parts;
    const message = document.activeElement?.closest("#thread > *");
    if (!message) return null;
    const index = [...thread.children].indexOf(message);
    const label = document.activeElement.getAttribute("aria-label");
    return () => {
      const buttons = [...(thread.children[index]?.querySelectorAll(".actions button:enabled") ?? [])];
      (buttons.find((button) => button.getAttribute("aria-label") === label && button.checkVisibility({ visibilityProperty: true })) ?? write).focus();
    };
  }

  #room(shown) {
    const stats = shown.findLast(({ stats }) => stats?.prompt)?.stats;
    if (!stats || !this.#model) return "";
    return `${count(stats.prompt + stats.tokens)} of ${count(this.#model.max_model_len)} tokens`;
  }

  #elementOf(node) {
    return this.#parts.thread.querySelector(`[data-id="${node.id}"]`);
  }

  // A reader at the end stays at the end; one who has scrolled up stays there.
  #keepEnd(change) {
    const { scroll } = this.#parts;
    const atEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 40;
    change();
    if (atEnd) this.#toEnd();
  }

  #toEnd() {
    this.#parts.scroll.scrollTop = this.#parts.scroll.scrollHeight;
  }

  #save(conversation) {
    if (!Object.keys(conversation.nodes).length) return;
    try {
      const dropped = store.save(conversation);
      if (!dropped.length) return;
      const gone = new Set(dropped.map(({ id }) => id));
      this.#conversations = this.#conversations.filter(({ id }) => !gone.has(id));
      this.#notify(`The storage of this browser was full: ${dropped.map((old) => `“${titleOf(old)}”`).join(", ")} deleted.`);
    } catch {
      this.#notify("This browser does not store this conversation: its storage is full or switched off.");
    }
  }

  // Another tab changed something.
  #reload() {
    const running = this.#replies.conversations();
    const mine = (conversation) => [this.#current, ...running].find(({ id }) => id === conversation.id);
    this.#conversations = store.loadAll().map((found) => mine(found) ?? found);
    this.#parts.list.show(this.#conversations, this.#current);
  }

  #notify(text) {
    this.#parts.notice.textContent = text;
  }

  // ---- panels -------------------------------------------------------------------------------

  #isNarrow = () => matchMedia("(max-width: 899px)").matches;

  #toggle(name, open = !this.#isOpen(name)) {
    if (open && this.#isNarrow()) this.#closePanels();
    this.#parts.root.classList.toggle(`with-${name}`, open);
    this.#parts.root.classList.toggle(`without-${name}`, !open);
    byId(`toggle-${name}`).setAttribute("aria-expanded", String(open));
    if (open) byId(name).querySelector("button, textarea")?.focus();
    else byId(`toggle-${name}`).focus();
  }

  #isOpen = (name) => byId(name).checkVisibility();

  #closePanels() {
    const open = ["sidebar", "settings"].filter(this.#isOpen);
    open.forEach((name) => this.#toggle(name, false));
    return open.length > 0;
  }
}
