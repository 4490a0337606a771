// The settings of this tab, as form fields; which ones there are follows from the model.

import { key } from "./api.js";
import { h } from "./dom.js";

const SHOWN_OUTPUTS = ["text", "audio", "image", "video"];

export class Settings {
  showsTokens = false;
  plays = true;
  #form;
  #fields = {};

  /** `changed` is called when the way of showing changes, and `unlocked` when a key was entered. */
  constructor(form, { changed, unlocked }) {
    this.#form = form;
    this.changed = changed;
    this.unlocked = unlocked;
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** Make the fields for a model; null while none is known. */
  build(model) {
    this.model = model?.id ?? null;
    const outputs = (model?.output_modalities ?? []).filter((one) => SHOWN_OUTPUTS.includes(one));
    const inputs = model?.input_modalities ?? [];
    const chats = outputs.includes("text") && inputs.includes("text");
    const speaks = outputs.includes("audio");
    this.#fields = {};
    const field = (name, label, made) => {
      this.#fields[name] = made;
      made.id = `option-${name}`;
      return h("div.field", {}, h("label", { for: made.id }, label), made);
    };
    const check = (name, label, value, act) => {
      const made = h("input", { type: "checkbox", on: { change: () => act(made.checked) } });
      made.checked = value;
      return h("label.check", {}, made, ` ${label}`);
    };
    const number = (name, label, properties) => field(name, label, h("input", { type: "number", ...properties }));
    const choice = (name, label, options) =>
      field(name, label, h("select", {}, options.map(([value, text]) => h("option", { value }, text))));
    this.#form.replaceChildren(
      ...[
        chats && choice("form", "Send as", [["chat", "a chat"], ["text", "plain text, which the model continues"]]),
        chats && field("system", "System prompt", h("textarea", { rows: 2 })),
        outputs.length > 1 && choice("outputs", "Answer in", [
          ["", `the usual: ${model.output_modalities[0]}`],
          ...outputs.map((one) => [one, one]),
          ...(chats && speaks ? [["text,audio", "text and audio"]] : []),
        ]),
        model?.voices?.length > 0 && choice("voice", "Voice", [["", "the usual"], ...model.voices.map((one) => [one, one])]),
        number("max_tokens", "Longest answer, in tokens", { min: 1, max: model?.limits?.max_tokens }),
        number("temperature", "Temperature", { min: 0, max: 2, step: 0.1 }),
        number("seed", "Seed", { min: 0, step: 1 }),
        check("tokens", "Show tokens", this.showsTokens, (value) => {
          this.showsTokens = value;
          this.changed();
        }),
        speaks && check("plays", "Play sound as it arrives", this.plays, (value) => (this.plays = value)),
        field("key", "API key", h("input", { type: "password", autocomplete: "off", value: key.get(), on: {
          change: (event) => {
            key.set(event.target.value.trim());
            this.unlocked();
          },
        } })),
      ].filter(Boolean),
    );
  }

  #value(name) {
    return this.#fields[name]?.value ?? "";
  }

  get isChat() {
    return "form" in this.#fields && this.#value("form") === "chat";
  }

  get system() {
    return this.#value("system").trim();
  }

  /** The fields of a request to `/generate` that the settings give. */
  get body() {
    const kwargs = {};
    for (const name of ["max_tokens", "temperature", "seed"]) if (this.#value(name) !== "") kwargs[name] = Number(this.#value(name));
    if (this.#value("voice")) kwargs.voice = this.#value("voice");
    const outputs = this.#value("outputs");
    return { model_kwargs: kwargs, ...(outputs ? { output_modalities: outputs.split(",") } : {}) };
  }

  /** Show the field for the key. */
  askForKey() {
    this.#form.closest("details").open = true;
    this.#fields.key?.focus();
  }
}
