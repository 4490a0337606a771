// Files that go with the next message: stored at once, named by their ids in the request.

import { upload } from "./api.js";
import { button, h } from "./dom.js";
import { bytes } from "./format.js";

export class Attachments {
  #list;
  #all = [];
  #failed;

  /** `failed` is called with the message of an upload that failed. */
  constructor(list, failed) {
    this.#list = list;
    this.#failed = failed;
  }

  /** Store files. */
  add(files) {
    for (const file of files) this.#store(file);
  }

  async #store(file) {
    const state = h("span.dim", {}, "is stored…");
    const one = { file, id: null, item: null };
    one.item = h("li", {}, preview(file), h("span", {}, `${file.name || "pasted"}, ${bytes(file.size)} `), state,
      button("Remove", () => this.#remove(one), { "aria-label": `Remove ${file.name}` }));
    this.#all.push(one);
    this.#list.append(one.item);
    one.stored = upload(file).then(
      (found) => {
        one.id = found.id;
        state.textContent = "";
      },
      (error) => {
        this.#remove(one);
        this.#failed(`${file.name}: ${error.message}`);
      },
    );
    await one.stored;
  }

  #remove(one) {
    one.item.remove();
    this.#all = this.#all.filter((other) => other !== one);
  }

  /** Wait for all uploads; return the files with their ids, and begin anew. */
  async taken() {
    await Promise.all(this.#all.map((one) => one.stored));
    const found = this.#all;
    this.#all = [];
    this.#list.replaceChildren();
    return found;
  }
}

/** A small view of a file, for people; null for one that has none. */
export function preview(file) {
  const [kind] = file.type.split("/");
  if (!["image", "audio", "video"].includes(kind)) return null;
  const src = URL.createObjectURL(file);
  if (kind === "image") return h("img.thumb", { src, alt: file.name });
  return h(kind, { src, controls: true, class: "thumb", "aria-label": file.name });
}
