// A list of any length: only the rows in view exist. Rows have one height, and come in pages when they are needed.

import { fill, h } from "./dom.js";

const AROUND = 12; // rows that are made above and below the view

/**
 * Make a list.
 *
 * columns   labels of the columns, each `{name, class}`
 * height    of a row, in pixels
 * load      async (start) => {total, rows}: a page from number `start` on; `total` may grow
 * cells     (row) => the contents of its cells
 * choose    called with the row that is chosen, by key or click
 * open      called with the row that is opened, by Enter or double click; optional
 * classOf   (row) => a class of the row; optional
 */
export function virtualList({ label, columns, height, load, cells, choose, open, classOf }) {
  const pages = new Map();
  const made = new Map();
  let total = 0;
  let chosen = -1;
  let generation = 0;
  let due = 0;

  const body = h("div.rows", { role: "rowgroup" });
  const head = h("div.row.head", { role: "row", "aria-rowindex": 1 },
    columns.map((one) => h("div.cell", { role: "columnheader", class: one.class }, one.name)));
  const empty = h("p.empty", { hidden: true });
  const view = h("div.list", {
    role: "grid", tabindex: 0, "aria-label": label,
    on: { scroll: schedule, keydown: press },
  }, h("div", { role: "rowgroup", class: "heads" }, head), body);
  const element = h("div.listbox", {}, view, empty);
  const watching = new ResizeObserver(schedule);
  watching.observe(view);

  function schedule() {
    if (!due) due = requestAnimationFrame(draw);
  }

  function draw() {
    due = 0;
    const top = Math.max(0, view.scrollTop - head.offsetHeight);
    const first = Math.max(0, Math.floor(top / height) - AROUND);
    const last = Math.min(total, Math.ceil((view.scrollTop + view.clientHeight) / height) + AROUND);
    for (const [place, row] of made) {
      if (place < first || place >= last) { row.remove(); made.delete(place); }
    }
    for (let place = first; place < last; place++) if (!made.has(place)) body.append(rowAt(place));
  }

  function rowAt(place) {
    const value = valueAt(place);
    const row = h("div.row", {
      role: "row", id: `${label.replace(/\W/g, "-")}-${place}`, "aria-rowindex": place + 2,
      "aria-selected": place === chosen ? "true" : "false",
      class: value ? classOf?.(value) ?? "" : "waiting",
      on: { click: (event) => { if (!event.target.closest("a")) pick(place); }, dblclick: () => value && open?.(value) },
    }, value
      ? cells(value).map((content, number) => h("div.cell", { role: "gridcell", class: columns[number].class }, content))
      : h("div.cell", { role: "gridcell" }, "…"));
    row.style.transform = `translateY(${place * height}px)`;
    made.set(place, row);
    if (!value) fetchAt(place);
    return row;
  }

  function valueAt(place) {
    const start = startOf(place);
    return pages.get(start)?.rows?.[place - start] ?? null;
  }

  function startOf(place) {
    const size = pages.get(0)?.rows?.length || 1;
    return Math.floor(place / size) * size;
  }

  async function fetchAt(place) {
    const start = startOf(place);
    if (pages.has(start)) return;
    pages.set(start, {});
    await take(start);
  }

  async function take(start) {
    const mine = generation;
    const found = await load(start);
    if (mine !== generation) return;
    pages.set(start, found);
    total = found.total;
    body.style.height = `${total * height}px`;
    view.setAttribute("aria-rowcount", total + 1);
    for (const [place, row] of made) {
      if (row.classList.contains("waiting") || place >= total) { row.remove(); made.delete(place); }
    }
    draw();
  }

  function pick(place, quietly = false) {
    if (place < 0 || place >= total) return;
    const before = made.get(chosen);
    if (before) before.setAttribute("aria-selected", "false");
    chosen = place;
    reveal(place);
    const row = made.get(place);
    if (row) {
      row.setAttribute("aria-selected", "true");
      view.setAttribute("aria-activedescendant", row.id);
    }
    const value = valueAt(place);
    if (value && !quietly) choose?.(value, place);
  }

  function reveal(place) {
    const top = place * height;
    const room = view.clientHeight - head.offsetHeight;
    if (top < view.scrollTop) view.scrollTop = top;
    else if (top + height > view.scrollTop + room) view.scrollTop = top + height - room;
    draw();
  }

  function press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(view.clientHeight / height) - 2);
    const steps = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page };
    if (event.key in steps) pick(Math.min(total - 1, Math.max(0, chosen + steps[event.key])));
    else if (event.key === "Home") pick(0);
    else if (event.key === "End") pick(total - 1);
    else if (event.key === "Enter" && valueAt(chosen) && event.target === view) open?.(valueAt(chosen));
    else return;
    event.preventDefault();
  }

  return {
    element,
    view,
    /** Load again; `place` is chosen if it is a number. */
    async reload({ place = null, keep = false, none = "Nothing." } = {}) {
      generation++;
      pages.clear();
      if (!keep) { for (const row of made.values()) row.remove(); made.clear(); chosen = -1; view.scrollTop = 0; }
      pages.set(0, {});
      await take(0);
      if (keep) { for (const row of made.values()) row.remove(); made.clear(); draw(); }
      empty.hidden = total > 0;
      fill(empty, none);
      if (place !== null && total) {
        const near = Math.min(place, total - 1);
        await fetchAt(near);
        pick(near);
      }
    },
    pick,
    get chosen() { return valueAt(chosen); },
    get total() { return total; },
    close() { watching.disconnect(); generation++; },
  };
}
