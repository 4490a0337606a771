// Elements are made here and only here, and every text is set as text.

/** Make an element: `h("p.dim", {id: "a"}, "text", child)`. `on` has listeners, `style` has properties. */
export function h(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const made = document.createElement(name || "div");
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (key === "style") for (const [what, how] of Object.entries(value)) made.style.setProperty(what, how);
    else if (key === "value") made.value = value;
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
  return made;
}

/** Replace all children of an element. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((one) => one));
  return element;
}

/** A button. */
export function button(label, act, properties = {}) {
  return h("button", { type: "button", on: { click: act }, ...properties }, label);
}
