// A list of any length: only the rows in view exist. Rows have one height, and come in pages when they are needed.
//
// A frame of a scrolled list has to be drawn in 16 ms. So rows that leave the view are used again for those
// that come into it, and a page is loaded only once the view stays where it is.

import { fill, h, shown } from "./dom.js";

const AROUND = 12; // rows that are made above and below the view
const REST_MS = 50; // of a view that stays where it is

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
  const made = new Map(); // by number: the rows in the document
  const spare = []; // rows that are in no place
  let total = 0;
  let chosen = -1;
  let generation = 0;
  let due = 0;
  let resting = 0;

  const body = h("div.rows", {
    role: "rowgroup",
    on: {
      click: (event) => { if (!event.target.closest("a")) pick(placeOf(event)); },
      dblclick: (event) => { const value = valueAt(placeOf(event)); if (value) open?.(value); },
    },
  });
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
      if (place < first || place >= last) { made.delete(place); spare.push(row); }
    }
    const added = [];
    for (let place = first; place < last; place++) if (!made.has(place)) added.push(rowAt(place));
    for (const row of spare.splice(0)) row.remove();
    body.append(...added.filter((row) => !row.parentNode));
    if ([...made.keys()].some((place) => !valueAt(place))) loadAtRest();
  }

  /** Load what is in view, unless the view moves on before. */
  function loadAtRest() {
    clearTimeout(resting);
    const mine = generation;
    resting = setTimeout(() => {
      if (mine === generation) for (const place of made.keys()) if (!valueAt(place)) fetchAt(place);
    }, REST_MS);
  }

  function rowAt(place) {
    const row = spare.pop() ?? h("div.row", { role: "row" }, columns.map(() => h("div", { role: "gridcell" })));
    row.id = `${label.replace(/\W/g, "-")}-${place}`;
    row.setAttribute("aria-rowindex", place + 2);
    row.setAttribute("aria-selected", place === chosen ? "true" : "false");
    row.style.transform = `translateY(${place * height}px)`;
    row.dataset.place = place;
    made.set(place, row);
    write(row, valueAt(place));
    return row;
  }

  function write(row, value) {
    row.className = `row ${value ? classOf?.(value) ?? "" : "waiting"}`;
    const contents = value ? cells(value) : ["…"];
    columns.forEach((column, number) => {
      const cell = row.childNodes[number];
      cell.className = `cell ${value ? column.class : ""}`;
      const content = contents[number] ?? "";
      if (typeof content === "object") fill(cell, content);
      else cell.textContent = shown(content);
    });
  }

  function placeOf(event) {
    return Number(event.target.closest("[data-place]")?.dataset.place ?? -1);
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
      const value = valueAt(place);
      if (value && row.classList.contains("waiting")) write(row, value);
    }
    draw();
  }

  function clear() {
    for (const row of made.values()) row.remove();
    made.clear();
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
      if (!keep) { clear(); chosen = -1; view.scrollTop = 0; }
      pages.set(0, {});
      await take(0);
      if (keep) { clear(); draw(); }
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
    close() { watching.disconnect(); clearTimeout(resting); generation++; },
  };
}
