// Markdown as elements. HTML in it is shown as it is written, images are left out, and the result is sanitised.

import { Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";

const ESCAPED = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };
const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: { html: ({ text }) => text.replace(/[&<>]/g, (one) => ESCAPED[one]) },
});
const SETTINGS = {
  RETURN_DOM_FRAGMENT: true,
  USE_PROFILES: { html: true },
  FORBID_TAGS: ["style", "form", "input", "button", "textarea", "select", "img", "video", "audio", "picture", "source", "svg", "iframe"],
  FORBID_ATTR: ["style", "id", "name", "class"],
};

/** A fragment for a text. */
export function markdown(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), SETTINGS);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const block of fragment.querySelectorAll("pre, table")) block.tabIndex = 0; // wide ones scroll
  return fragment;
}
