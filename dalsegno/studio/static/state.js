// The state after each record, as the conductor folds it: a slider over the records, and when a value changed.

import * as address from "./address.js";
import { get } from "./data.js";
import { button, fill, h } from "./dom.js";
import { count, json, seconds, several } from "./format.js";

export const state = {
  title: "State",

  async show(root, values, { say }) {
    const about = { source: values.get("source"), id: values.get("id") };
    const begin = values.has("seq") ? (await get("event", { ...about, seq: values.get("seq") })).place : Number(values.get("at") ?? 0);
    let now = await get("state", { ...about, place: begin });
    let wanted = now.place;
    let isAsking = false;
    let field = values.get("field") ?? "";
    let history = null;
    let filter = values.get("find") ?? "";

    const slider = h("input.slider", { type: "range", min: 0, max: now.count - 1, "aria-label": "Record", on: { input: () => go(Number(slider.value)) } });
    slider.value = now.place;
    const where = h("div.where");
    const changed = h("div.changes");
    const values_ = h("div.values", { tabindex: 0, role: "region", "aria-label": "Values" });
    const past = h("div.past");
    const rows = new Map();

    /** Show a place; while an answer is awaited, only the newest wish is kept. */
    async function go(place) {
      wanted = Math.min(now.count - 1, Math.max(0, place));
      slider.value = wanted;
      if (isAsking) return;
      isAsking = true;
      try {
        while (now.place !== wanted) now = await get("state", { ...about, place: wanted });
      } catch (error) {
        say(error.message, "bad");
      } finally {
        isAsking = false;
      }
      draw();
      address.note({ at: now.place, seq: null });
    }

    function draw() {
      const row = now.row;
      slider.setAttribute("aria-valuetext", `record ${row.seq}, ${row.type}`);
      fill(where,
        h("b", {}, `record ${row.seq}`), h("span.dim", {}, ` ${count(now.place + 1)} of ${count(now.count)} · ${seconds(row.t)} · ${row.writer} `),
        h("a", { href: address.of("events", { ...about, seq: row.seq }) }, row.type), " ", h("span.text", {}, row.text));
      const mine = now.changes;
      fill(changed, h("h2", {}, `Changed by this record: ${mine.length ? several(mine.length, "value") : "nothing"}`),
        h("ul", {}, mine.slice(0, 60).map((one) => h("li", {}, pathButton(one.name), " ",
          h("span.before", {}, json(one.before)), " → ", h("span.after", {}, json(one.after))))));
      drawValues(new Set(mine.map((one) => one.name)));
      drawPast();
    }

    /** Update the rows that exist; a step of the slider changes few. */
    function drawValues(marked) {
      const seen = new Set();
      let after = null;
      let root = null;
      for (const [name, value] of leaves(now.state)) {
        if (filter && !name.toLowerCase().includes(filter.toLowerCase())) continue;
        seen.add(name).add(`${rootOf(name)}.`);
        let row = rows.get(name);
        if (!row) {
          row = { mark: h("span.mark"), value: h("span.value"), text: null };
          row.element = h("div.leaf", {}, row.mark, pathButton(name, name.slice(rootOf(name).length + 1)), row.value);
          rows.set(name, row);
        }
        const text = json(value);
        if (row.text !== text) { row.text = text; fill(row.value, text.length > 600 ? `${text.slice(0, 600)}… ${count(text.length)} characters` : text); }
        const isMarked = marked.has(name);
        if (row.isMarked !== isMarked) {
          row.isMarked = isMarked;
          row.element.classList.toggle("changed", isMarked);
          fill(row.mark, isMarked ? "● changed" : "");
        }
        if (rootOf(name) !== root) { root = rootOf(name); after = put(rootRow(root), after); }
        after = put(row.element, after);
      }
      for (const [name, row] of rows) if (!seen.has(name)) { row.element.remove(); rows.delete(name); }
    }

    /** Put an element behind another one, or first, unless it is there. */
    function put(element, before) {
      const next = before ? before.nextSibling : values_.firstChild;
      if (next !== element) values_.insertBefore(element, next);
      return element;
    }

    function rootRow(name) {
      const key = `${name}.`;
      if (!rows.has(key)) rows.set(key, { element: h("div.root", {}, name) });
      return rows.get(key).element;
    }

    function pathButton(name, label = name) {
      return button(label, () => look(name), { class: "path", title: `When did ${name} change?` });
    }

    async function look(name) {
      field = name;
      address.note({ field });
      fill(past, h("p.loading", {}, `Looking for changes of ${name} …`));
      history = await get("changes", { ...about, name });
      drawPast();
    }

    function drawPast() {
      if (!history) { fill(past, h("p.dim", {}, "Choose a value to see when it first changed, and each time after.")); return; }
      const all = history.changes;
      fill(past,
        h("h2", {}, h("code", {}, history.name), h("span.dim", {}, ` ${all.length ? `changed ${history.more ? "more than " : ""}${several(all.length, "time")}` : "never changes here"}`)),
        h("ol", {}, all.slice(0, 400).map((one, place) => h("li", { "aria-current": one.place === now.place ? "step" : null },
          button(place ? `record ${one.seq}` : `first: record ${one.seq}`, () => go(one.place), { class: "link" }), " ",
          h("span.before", {}, json(one.before)), " → ", h("span.after", {}, json(one.after)), " ", h("span.dim", {}, `${one.type} ${one.text}`)))));
    }

    function press(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input[type=search]")) return;
      const large = Math.max(10, Math.round(now.count / 50));
      const step = event.shiftKey ? large : 1;
      const acts = {
        ArrowLeft: () => go(wanted - step), ArrowRight: () => go(wanted + step), Home: () => go(0), End: () => go(now.count - 1),
        n: () => toChange(1), p: () => toChange(-1),
      };
      if (!(event.key in acts)) return;
      event.preventDefault();
      acts[event.key]();
    }

    function toChange(direction) {
      const places = (history?.changes ?? []).map((one) => one.place);
      const next = direction > 0 ? places.find((one) => one > now.place) : places.filter((one) => one < now.place).at(-1);
      if (next !== undefined) go(next);
    }

    const search = h("input", { type: "search", placeholder: "part of a name", value: filter, "aria-label": "Find values", "data-search": true,
      on: { input: () => { filter = search.value; address.note({ find: filter }); draw(); } } });
    root.addEventListener("keydown", press);
    fill(root,
      h("h1.hidden", {}, "State"),
      h("div.tools", {},
        button("⇤", () => go(0), { "aria-label": "To the first record" }),
        button("◀", () => go(wanted - 1), { "aria-label": "One record back" }),
        slider,
        button("▶", () => go(wanted + 1), { "aria-label": "One record on" }),
        button("⇥", () => go(now.count - 1), { "aria-label": "To the last record" })),
      where,
      h("div.split.three", {}, h("div.side", {}, changed, past), h("div.side", {}, h("div.tools", {}, h("h2", {}, "State after it"), search), values_)));
    draw();
    if (field) look(field);
    root.addEventListener("shown", () => slider.focus({ preventScroll: true }));
    return null;
  },
};

/** Every value that is neither a map nor a list of maps, with its path: the names that the data uses. */
function* leaves(value, name = "") {
  if (Array.isArray(value) && value.some((one) => isMap(one))) {
    for (const [place, item] of value.entries()) yield* leaves(item, `${name}[${place}]`);
  } else if (isMap(value)) {
    for (const [key, item] of Object.entries(value)) yield* leaves(item, name ? `${name}.${key}` : key);
  } else yield [name, value];
}

function rootOf(name) {
  return name.split(".")[0];
}

function isMap(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
