// Chooses the model of a conversation, where the server has several.

import { h } from "../lib/dom.js";

export function modelPicker(chosen) {
  const picker = h("select", { id: "model-picker", class: "model-picker", "aria-label": "Model", hidden: true });
  picker.addEventListener("change", () => chosen(picker.value));
  picker.show = (models, id) => {
    picker.hidden = models.length < 2;
    picker.replaceChildren(...models.map((model) => h("option", { value: model.id }, model.id)));
    picker.value = id ?? "";
  };
  return picker;
}
