// The recorded decisions beside the same decisions, made again by the installed code.

import * as address from "./address.js";
import { alternatives } from "./alternatives.js";
import { get, isExported } from "./data.js";
import { fill, h } from "./dom.js";
import { json, seconds, several } from "./format.js";
import { jsonView } from "./json_view.js";
import { virtualList } from "./virtual_list.js";

const MATCHES = {
  same: ["=", "made again, and equal"],
  differs: ["≠", "made again, and different"],
  adopted: ["←", "taken as recorded: it depends on all requests and workers"],
  unexpected: ["!", "recorded, but not made again"],
  unchecked: ["?", "after the first difference: nothing is compared there"],
  missing: ["∅", "made again, but not recorded"],
};
const CHOSEN = ["request.admitted", "request.resumed"]; // decisions that choose ranks
const COLUMNS = [
  { name: "record", class: "num seq" },
  { name: "time", class: "num" },
  { name: "replayed", class: "match" },
  { name: "decision", class: "type" },
  { name: "contents", class: "text" },
  { name: "follows from", class: "num link" },
  { name: "differences", class: "text" },
];

export const decisions = {
  title: "Decisions",

  async show(root, values) {
    const about = { source: values.get("source"), id: values.get("id") };
    const found = await get("decisions", about);
    const detail = h("div.event", { tabindex: 0, role: "region", "aria-label": "Decision" });
    const list = virtualList({
      label: "Decisions",
      columns: COLUMNS,
      height: 24,
      load: async () => ({ rows: found.decisions, total: found.decisions.length }),
      classOf: (row) => row.match,
      cells: (row) => [
        row.seq ?? "–", row.t === null ? "" : seconds(row.t),
        [h("span.sign", { "aria-hidden": "true" }, MATCHES[row.match][0]), ` ${row.match}`],
        row.type, row.text,
        row.cause ? h("a", { href: address.of("events", { ...about, seq: row.cause }) }, `↑ ${row.cause}`) : "",
        row.differences.map((one) => one.field).join(", "),
      ],
      choose: (row, place) => { show(row); address.note({ at: place }); },
      open: (row) => row.seq && address.go("events", { ...about, seq: row.seq }),
    });

    function show(row) {
      fill(detail,
        h("h2", {}, row.type, " ", h("span.sign", { class: row.match, "aria-hidden": "true" }, MATCHES[row.match][0]), ` ${row.match}`),
        h("p.dim", {}, MATCHES[row.match][1]),
        h("p.steps", {},
          row.cause ? ["follows from ", h("a", { href: address.of("events", { ...about, seq: row.cause }) }, `record ${row.cause}`), ". "] : "",
          row.place ? h("a", { href: address.of("state", { ...about, at: row.place - 1 }) }, "state before it") : ""),
        row.differences.length ? differences(row.differences) : null,
        !isExported && row.seq && CHOSEN.includes(row.type) ? alternatives(about, row.seq) : null,
        h("div.two", {},
          h("div", {}, h("h3", {}, "recorded"), row.recorded ? jsonView(row.recorded) : h("p.dim", {}, "nothing")),
          row.match === "adopted" ? null : h("div", {}, h("h3", {}, "decided now"), row.decided ? jsonView(row.decided) : h("p.dim", {}, "nothing"))));
    }

    fill(root,
      h("h1.hidden", {}, "Decisions"),
      h("div.verdicts", {}, found.verdicts.map((one) => h("div.verdict", { class: one.matches ? "same" : "differs" },
        h("span.sign", { "aria-hidden": "true" }, one.matches ? "✓" : "✕"), " ",
        one.lines.map((line, place) => (place ? h("p", {}, line) : h("b", {}, line)))))),
      h("ul.legend", { "aria-label": "Results" }, Object.entries(found.counts).map(([match, times]) =>
        h("li", { class: match }, h("span.sign", { "aria-hidden": "true" }, MATCHES[match][0]), ` ${several(times, "decision")} ${match}: ${MATCHES[match][1]}`))),
      h("div.split", {}, list.element, detail));
    root.addEventListener("shown", async () => {
      const first = found.decisions.findIndex((row) => !["same", "adopted"].includes(row.match));
      const place = values.has("at") ? Number(values.get("at")) : Math.max(first, 0);
      await list.reload({ place: found.decisions.length ? place : null, none: "No decision is recorded." });
      list.view.focus({ preventScroll: true });
    });
    return () => list.close();
  },
};

function differences(all) {
  return h("table.differences", {},
    h("thead", {}, h("tr", {}, ["value", "recorded", "decided now"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, all.map((one) => h("tr", {}, h("td", {}, h("code", {}, one.field)),
      h("td.before", {}, json(one.recorded)), h("td.after", {}, json(one.decided))))));
}
