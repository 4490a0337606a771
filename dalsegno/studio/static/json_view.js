// A JSON value as indented text, with its kinds told apart.

import { h } from "./dom.js";

const LONG = 400;

/** An element that shows a value. Long texts are cut until they are opened. */
export function jsonView(value) {
  return h("pre.json", { tabindex: 0 }, drawn(value, ""));
}

function drawn(value, indent) {
  if (value === null || value === undefined) return h("span.null", {}, "null");
  if (typeof value === "string") return text(value);
  if (typeof value !== "object") return h("span.number", {}, String(value));
  const entries = Object.entries(value);
  const isList = Array.isArray(value);
  const [begin, end] = isList ? "[]" : "{}";
  if (!entries.length) return begin + end;
  if (isList && entries.every(([, one]) => typeof one !== "object" || one === null)) {
    return [begin, entries.map(([, one], place) => [place ? ", " : "", drawn(one, indent)]), end];
  }
  const deeper = `${indent}  `;
  return [begin, "\n", entries.map(([name, one], place) => [
    deeper, isList ? "" : [h("span.key", {}, name), ": "], drawn(one, deeper), place < entries.length - 1 ? "," : "", "\n",
  ]), indent, end];
}

function text(value) {
  const quoted = JSON.stringify(value);
  if (quoted.length <= LONG) return h("span.string", {}, quoted);
  const short = h("span.string", {}, `${quoted.slice(0, LONG)}…`);
  const more = h("button.link", { type: "button", on: { click: () => { short.textContent = ""; short.append(quoted); more.remove(); } } },
    ` all ${quoted.length.toLocaleString("en")} characters`);
  return [short, more];
}
