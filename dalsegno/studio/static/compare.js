// Two requests beside one another: where their times, events and answers part.

import * as address from "./address.js";
import { get } from "./data.js";
import { fill, h } from "./dom.js";
import { count, seconds } from "./format.js";
import { isWait, nameOf } from "./lanes.js";

export const compare = {
  title: "Compare",

  async show(root, values) {
    const sources = await get("sources");
    const shelves = [...(sources.log ? ["log"] : []), ...(sources.bundles.length ? ["bundles"] : [])];
    const lists = await Promise.all(shelves.map((of) => get("requests", { of })));
    const rows = lists.flatMap((list) => list.rows);
    const pair = [{ source: values.get("source"), id: values.get("id") }, { source: values.get("source2"), id: values.get("id2") }];
    const title = h("h1.hidden", {}, "Compare");
    const contents = h("div.compared", { tabindex: 0, role: "region", "aria-label": "Comparison" });
    fill(root, title, choice(rows, pair), contents);
    if (pair.some((one) => !one.id)) {
      fill(contents, h("p.empty", {}, "Choose two requests: the same question on two days, before and after a change, with and without a lost worker."));
      return null;
    }
    const found = await get("compare", { ...pair[0], source2: pair[1].source, id2: pair[1].id });
    fill(contents, heads(found, pair), kinds(found), edges(found), texts(found), events(found, pair));
    return null;
  },
};

function choice(rows, pair) {
  const one = (place) => h("label", {}, h("span.dim", {}, place ? "with" : "compare"),
    h("select", { name: String(place), on: { change: apply } },
      h("option", { value: "" }, "a request"),
      known(rows, pair[place]).map((row) => h("option", {
        value: JSON.stringify([row.source, row.request_id]),
        selected: row.source === pair[place].source && row.request_id === pair[place].id,
      }, `${row.request_id} · ${row.outcome} · ${row.submitted} · ${row.source_name}`))));
  const form = h("form.choose", {}, one(0), one(1));
  function apply() {
    const [a, b] = ["0", "1"].map((name) => JSON.parse(form.elements[name].value || '["",""]'));
    address.go("compare", { source: a[0], id: a[1], source2: b[0], id2: b[1] });
  }
  return form;
}

/** The rows, and the chosen request, if it is older than all of them. */
function known(rows, one) {
  if (!one.id || rows.some((row) => row.source === one.source && row.request_id === one.id)) return rows;
  return [{ source: one.source, request_id: one.id, outcome: "", submitted: "", source_name: one.source }, ...rows];
}

function table(label, columns, rows) {
  return h("table.differences", { "aria-label": label },
    h("thead", {}, h("tr", {}, columns.map((name) => (name ? h("th", { scope: "col" }, name) : h("td", {}))))),
    h("tbody", {}, rows));
}

function heads(found, pair) {
  const [a, b] = found.heads;
  const usage = (one) => (one.usage ? `${count(one.usage.prompt_tokens ?? 0)} + ${count(one.usage.completion_tokens ?? 0)}` : "none");
  const lines = [
    ["request", (one, place) => h("a", { href: address.of("request", pair[place]) }, one.request_id)],
    ["submitted", (one) => one.begin], ["model", (one) => one.model], ["prompt", (one) => one.prompt], ["outcome", (one) => one.outcome],
    ["took", (one) => seconds(one.seconds)], ["first chunk", (one) => seconds(one.first_chunk) || "none"], ["tokens", usage],
    ["attempts", (one) => one.attempts], ["mostly", (one) => one.mostly],
  ];
  return [h("h2", {}, "Both"), table("Both requests", ["", "A", "B"], lines.map(([name, of]) => {
    const [left, right] = [of(a, 0), of(b, 1)];
    const same = left instanceof Node || String(left) === String(right);
    return h("tr", { class: same ? "" : "other" }, h("th", { scope: "row" }, name, same ? "" : h("span.sign", {}, " ≠")), h("td", {}, left ?? ""), h("td", {}, right ?? ""));
  }))];
}

function kinds(found) {
  const most = Math.max(...found.kinds.flatMap((one) => one.seconds), 1e-9);
  const bar = (kind, value) => h("td", {}, h(`span.fill.bar.${kind}`, { "aria-hidden": "true", class: isWait(kind) ? "wait" : "", style: { width: `${(160 * value) / most}px` } }), ` ${seconds(value)}`);
  return [h("h2", {}, "Time on the critical path"), table("Time by kind", ["", "A", "B", "B − A"], found.kinds.map(({ kind, seconds: [a, b] }) =>
    h("tr", {}, h("th", { scope: "row" }, nameOf(kind)), bar(kind, a), bar(kind, b), h("td.num", {}, `${b >= a ? "+" : "−"}${seconds(Math.abs(b - a))}`))))];
}

function edges(found) {
  const parted = found.edges.filter((one) => one.diverges);
  const same = found.edges.length - parted.length;
  return [h("h2", {}, "Values of nodes", h("span.dim", {}, ` ${same} the same, ${parted.length} different`)),
    parted.length ? table("Values that differ", ["value", "first difference"], parted.map((one) =>
      h("tr", {}, h("th", { scope: "row" }, h("code", {}, one.name)), h("td", {}, one.diverges)))) : null];
}

function texts(found) {
  return found.texts.map((one) => {
    const side = (text) => h("td", {}, h("div.prose", {},
      one.parts_at === null ? text : [[...text].slice(0, one.parts_at).join(""), h("mark", {}, [...text].slice(one.parts_at).join(""))]));
    const where = one.parts_at === null ? "the same" : `the same up to character ${count(one.parts_at)}`;
    return [h("h2", {}, one.track ? `Answer on ${one.track}` : "Answer", h("span.dim", {}, ` ${where}`)),
      table("Answers", ["A", "B"], h("tr", {}, one.texts.map(side)))];
  });
}

function events(found, pair) {
  const cell = (row, place) => (row
    ? [h("td.num", {}, h("a", { href: address.of("events", { ...pair[place], seq: row.seq }) }, row.seq)), h("td.num", {}, seconds(row.t)), h("td", {}, row.type, " ", h("span.dim", {}, row.text))]
    : [h("td.num", {}, ""), h("td.num", {}, ""), h("td.absent", {}, "–")]);
  return [h("h2", {}, "Events", h("span.dim", {}, " without chunks and items of streams")),
    table("Events", ["A", "time", "event", "B", "time", "event", ""], found.events.map(({ a, b }) =>
      h("tr", { class: a && b ? "" : "other" }, cell(a, 0), cell(b, 1), h("td", {}, a && b ? "" : a ? "only A" : "only B"))))];
}
