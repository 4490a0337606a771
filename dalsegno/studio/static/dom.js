// Elements are made here and only here, and every text is set as text: nothing in a log can become markup.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

/** A text with characters that are invisible, or turn the direction of others, written out. */
export function shown(value) {
  return String(value).replace(HIDDEN, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/**
 * Make an element. Properties: `class`, `on` (by event), `style` (by property), `data`, else attributes.
 * Children are elements, texts, or nothing (null, false).
 */
export function h(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const made = document.createElement(name || "div");
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (key === "style") for (const [what, how] of Object.entries(value)) made.style.setProperty(what, how);
    else if (key === "class") made.className += ` ${value}`;
    else if (key === "value") made.value = value;
    else made.setAttribute(key, value === true ? "" : shown(value));
  }
  add(made, children);
  return made;
}

/** Append children to an element. */
export function add(to, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    to.append(child instanceof Node ? child : document.createTextNode(shown(child)));
  }
  return to;
}

/** Replace all children of an element. */
export function fill(element, ...children) {
  element.textContent = "";
  return add(element, children);
}

/** A button. */
export function button(label, act, properties = {}) {
  return h("button", { type: "button", on: { click: act }, ...properties }, label);
}
