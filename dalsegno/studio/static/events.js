// The events of a request, with links to cause and effect, and each event whole.

import * as address from "./address.js";
import { get } from "./data.js";
import { fill, h } from "./dom.js";
import { bytes, count, seconds, several } from "./format.js";
import { jsonView } from "./json_view.js";
import { virtualList } from "./virtual_list.js";

const COLUMNS = [
  { name: "record", class: "num seq" },
  { name: "time", class: "num" },
  { name: "writer", class: "writer" },
  { name: "event", class: "type" },
  { name: "contents", class: "text" },
  { name: "cause", class: "num link" },
  { name: "effects", class: "links" },
];

export const events = {
  title: "Events",

  async show(root, values, { say }) {
    const about = { source: values.get("source"), id: values.get("id") };
    const filter = { kind: values.get("kind") ?? "", text: values.get("text") ?? "" };
    const isWhole = !filter.kind && !filter.text;
    const [first, sources] = await Promise.all([get("events", { ...about, ...filter }), get("sources")]);
    let given = first;
    let shownSeq = null;
    const detail = h("div.event", { tabindex: 0, role: "region", "aria-label": "Event" });
    const link = (seq, label = seq) => h("a", { href: address.of("events", { ...about, seq }), on: { click: (event) => jump(event, seq) } }, label);
    const list = virtualList({
      label: "Events",
      columns: COLUMNS,
      height: 24,
      load: async (start) => {
        const page = start === 0 && given ? given : await get("events", { ...about, ...filter, start });
        given = null;
        return page;
      },
      classOf: (row) => `${row.type.replace(".", "-")} ${row.writer.split("/")[0].replace(/\d+$/, "")}`,
      cells: (row) => [
        row.seq, seconds(row.t), row.writer, row.type, row.text,
        row.cause ? link(row.cause, `↑ ${row.cause}`) : "",
        [row.effects.map((seq) => [link(seq, `↓ ${seq}`), " "]), row.more_effects ? `+${count(row.more_effects)}` : ""],
      ],
      choose: (row) => { show(row.seq); },
      open: (row) => address.go("state", { ...about, seq: row.seq }),
    });

    async function show(seq) {
      shownSeq = seq;
      address.note({ seq });
      const found = await get("event", { ...about, seq });
      if (shownSeq !== seq) return;
      fill(detail,
        h("h2", {}, found.type),
        h("p.dim", {}, `record ${found.seq} · ${found.time} · ${found.writer} · ${found.subject} · ${bytes(found.bytes)}`),
        h("p.steps", {},
          sources.can_ask && found.request === about.id ? [h("a", { href: address.of("request", { ...about, fork: found.seq }) }, "ask again from here"), " "] : "",
          found.cause ? ["caused by ", link(found.cause), " "] : "",
          found.effects.length ? ["led to ", found.effects.map((one) => [link(one), " "]), found.more_effects ? `and ${several(found.more_effects, "other")} ` : ""] : "",
          h("a", { href: address.of("state", { ...about, at: found.place }) }, "state after it")),
        found.event ? jsonView(found.event) : [h("p.bad", {}, found.text), h("pre.raw", {}, found.raw)]);
    }

    /** Choose the event at a position; a list without filters has them all, in order. */
    async function jump(event, seq) {
      event?.preventDefault();
      if (!isWhole) { address.go("events", { ...about, seq }); return; }
      const { place } = await get("event", { ...about, seq });
      await list.reload({ keep: true, place });
      list.view.focus({ preventScroll: true });
    }

    function press(event) {
      const row = list.chosen;
      if (!row || event.ctrlKey || event.metaKey || event.target.closest("input, select")) return;
      if (event.key === "c" && row.cause) jump(event, row.cause);
      else if (event.key === "e" && row.effects.length) jump(event, row.effects[0]);
      else if (event.key === "s") address.go("state", { ...about, seq: row.seq });
    }

    root.addEventListener("keydown", press);
    fill(root,
      h("h1.hidden", {}, "Events"),
      filterForm(about, filter, first),
      h("div.split", {}, list.element, detail));
    root.addEventListener("shown", async () => {
      const seq = Number(values.get("seq"));
      try {
        const place = seq && isWhole ? (await get("event", { ...about, seq })).place : 0;
        await list.reload({ place, none: "No event matches." });
      } catch (error) {
        say(error.message, "bad");
        return;
      }
      list.view.focus({ preventScroll: true });
    });
    return () => list.close();
  },
};

function filterForm(about, filter, found) {
  const kinds = Object.entries(found.kinds).sort();
  const select = h("select", { name: "kind", on: { change: apply } },
    h("option", { value: "" }, "all events"),
    kinds.map(([kind, times]) => h("option", { value: kind, selected: kind === filter.kind }, `${kind} (${count(times)})`)));
  const form = h("form.filters", { role: "search", on: { submit: (event) => { event.preventDefault(); apply(); } } },
    h("label", {}, h("span", {}, "Text"), h("input", { type: "search", name: "text", value: filter.text, placeholder: "in type, writer, contents", "data-search": true, autocomplete: "off" })),
    h("label", {}, h("span", {}, "Event"), select),
    h("button", { type: "submit" }, "Filter"),
    h("span.found", {}, several(found.total, "event")));
  function apply() {
    address.go("events", { ...about, ...Object.fromEntries(new FormData(form)) });
  }
  return form;
}
