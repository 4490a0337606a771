// One answer as it arrives: text token by token, reasoning, sound, images, files, progress.

import { bytesOf } from "./api.js";
import { fill, h } from "./dom.js";
import { bytes, duration } from "./format.js";
import { markdown } from "./markdown.js";
import { Sound } from "./sound.js";
import { divided } from "./thought.js";

const UTF8 = new TextDecoder();

/** The view of an answer, and what the browser measured of it. */
export class Answer {
  id = null;
  text = "";
  firstS = null;
  seconds = 0;
  tokens = 0;
  usage = null;
  finishReason = "";
  error = "";
  #startS = performance.now() / 1000;
  #isOpen = false;
  #sound = null;
  #format;
  #settings;
  #tokens = h("div.tokens");
  #thought = h("details.thought", { hidden: true }, h("summary", {}, "Reasoning"), h("div"));
  #text = h("div.text", { hidden: true });
  #media = h("div.media");
  #progress = h("div.progress", { hidden: true });
  #status = h("p.failed", { role: "alert", hidden: true });

  constructor(format, settings) {
    this.#format = format;
    this.#settings = settings;
    this.element = h("article.message.answer", { "aria-label": "Answer", "aria-busy": "true" },
      this.#thought, this.#tokens, this.#text, this.#media, this.#progress, this.#status);
  }

  /** Generated tokens for each second after the first. */
  perSecond() {
    return this.seconds > this.firstS ? (this.tokens - 1) / (this.seconds - this.firstS) : 0;
  }

  /** What the next turn of a chat contains of this answer. */
  get said() {
    return divided(this.text, this.#format, this.#isOpen).answer;
  }

  /** Take a line of the stream. */
  take(line) {
    const { modality, metadata } = line;
    this.seconds = performance.now() / 1000 - this.#startS;
    if (modality === "error") throw new Error(metadata.message);
    if (metadata.usage) this.usage = metadata.usage;
    if (metadata.finish_reason) {
      this.finishReason = metadata.finish_reason;
      return;
    }
    if (modality === "progress") return this.#advance(metadata);
    const data = bytesOf(line);
    if (metadata.advisory) return this.#preview(data, metadata);
    if (data.length || metadata.token_ids?.length) this.firstS ??= this.seconds;
    this.tokens += metadata.token_ids?.length ?? 0;
    this.#isOpen ||= Boolean(metadata.reasoning);
    if (modality === "text") this.#say(UTF8.decode(data), metadata.token_ids ?? []);
    else if (modality === "audio") this.#hear(data, metadata);
    else this.#keep(modality, data, metadata);
  }

  #say(text, ids) {
    this.text += text;
    this.#tokens.append(h("span", { title: ids.length ? `token ${ids.join(", ")}` : null }, text));
  }

  #hear(data, metadata) {
    this.#sound ??= new Sound();
    this.#sound.push(data, metadata, this.#settings.plays);
    this.#progress.hidden = false;
    this.#progress.textContent = `${duration(this.#sound.seconds)} of sound`;
  }

  #preview(data, metadata) {
    if (!metadata.content_type?.startsWith("image/")) return;
    this.#media.querySelector(".preview")?.remove();
    this.#media.append(h("img.preview", { src: address(data, metadata.content_type), alt: "A preview of the image" }));
  }

  #keep(modality, data, metadata) {
    const type = metadata.content_type ?? "application/octet-stream";
    this.#media.querySelector(".preview")?.remove();
    const url = address(data, type);
    const shape = metadata.shape && !metadata.content_type ? ` ${metadata.dtype} [${metadata.shape.join(", ")}]` : "";
    const name = `${modality}${shape}, ${bytes(data.byteLength)}`;
    const shown = type.startsWith("image/") ? h("img", { src: url, alt: "The image that the model made" })
      : type.startsWith("video/") ? h("video", { src: url, controls: true, "aria-label": "The video that the model made" }) : null;
    const file = `${modality}.${type.startsWith("image/") || type.startsWith("video/") ? type.split("/")[1] : "bin"}`;
    this.#media.append(h("figure", {}, shown, h("figcaption", {}, h("a", { href: url, download: file }, `Save ${name}`))));
  }

  #advance({ node, progress = {} }) {
    const { step, steps, remaining_s: left } = progress;
    this.#progress.hidden = false;
    fill(this.#progress, `${node ?? "the model"}: step ${step ?? "?"} of ${steps ?? "?"}${left ? `, ${duration(left)} left` : ""} `,
      steps ? h("progress", { value: step, max: steps, "aria-label": "Progress" }) : null);
  }

  /** Say what the answer waits for; nothing, if it goes on. */
  wait(message) {
    this.#status.hidden = !message;
    this.#status.textContent = message;
  }

  /** The end: a message if it failed, or was stopped. */
  end(error = "", { isStopped = false } = {}) {
    this.seconds = performance.now() / 1000 - this.#startS;
    this.error = error;
    this.element.removeAttribute("aria-busy");
    this.#progress.hidden = true;
    if (isStopped) this.#sound?.stop();
    if (this.#sound) {
      const url = URL.createObjectURL(this.#sound.file());
      this.#media.append(h("figure", {}, h("audio", { src: url, controls: true, "aria-label": "The sound of the answer" }),
        h("figcaption", {}, h("a", { href: url, download: "answer.wav" }, `Save ${duration(this.#sound.seconds)} of sound`))));
    }
    this.show();
    this.#status.hidden = !error && !isStopped;
    this.#status.textContent = error || (isStopped ? "Stopped." : "");
  }

  /** Show the text as the settings say: as Markdown, or token by token. */
  show() {
    if (this.element.hasAttribute("aria-busy")) return;
    const { thought, answer } = divided(this.text, this.#format, this.#isOpen);
    const byToken = this.#settings.showsTokens;
    this.#tokens.hidden = !byToken;
    this.#text.hidden = byToken;
    this.#thought.hidden = byToken || !thought;
    fill(this.#thought.lastElementChild, markdown(thought));
    fill(this.#text, markdown(answer));
  }
}

function address(data, type) {
  return URL.createObjectURL(new Blob([data], { type }));
}
