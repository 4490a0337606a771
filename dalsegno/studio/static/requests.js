// Requests: a list with filters, live while the deployment runs.

import * as address from "./address.js";
import { follow, get, isExported } from "./data.js";
import { button, fill, h } from "./dom.js";
import { count, seconds, several, SIGNS } from "./format.js";
import { virtualList } from "./virtual_list.js";

const FIELDS = [
  ["text", "Text of the prompt", "search", "text in the prompt"],
  ["outcome", "Outcome", "select", ["", "finished", "failed", "rejected", "cancelled", "open"]],
  ["code", "Error code", "text", "queue_full"],
  ["tenant", "Tenant", "text", "tenant"],
  ["model", "Model", "text", "model"],
  ["rank", "Rank", "text", "0"],
  ["since", "Submitted since", "text", "1h, or a time"],
  ["until", "Submitted before", "text", "a time"],
  ["slower-than", "Slower than", "text", "1.5s"],
  ["faster-than", "Faster than", "text", "200ms"],
  ["not", "Leave out", "text", "tenant=alice"],
];
const PRESETS = [
  ["all", {}],
  ["running", { outcome: "open" }],
  ["failed", { outcome: "failed" }],
  ["rejected", { outcome: "rejected" }],
  ["slower than 1 s", { "slower-than": "1s" }],
  ["last hour", { since: "1h" }],
];
const COLUMNS = [
  { name: "submitted (UTC)", class: "time" },
  { name: "request", class: "id" },
  { name: "outcome", class: "outcome" },
  { name: "took", class: "num took" },
  { name: "queue", class: "num less" },
  { name: "first", class: "num less" },
  { name: "tokens", class: "num" },
  { name: "tok/s", class: "num less" },
  { name: "tries", class: "num small" },
  { name: "ranks", class: "small" },
  { name: "events", class: "num small" },
  { name: "tenant", class: "less" },
  { name: "model", class: "name" },
  { name: "recorded in", class: "name wide" },
];

export const requests = {
  title: "Requests",

  async show(root, values, { say }) {
    const sources = await get("sources");
    const of = values.get("of") ?? (sources.log ? "log" : "bundles");
    const query = Object.fromEntries([...values].filter(([name]) => FIELDS.some(([field]) => field === name)));
    let longest = 0;
    let cursors = [""];

    const found = h("span.found");
    const list = virtualList({
      label: "Requests",
      columns: COLUMNS,
      height: 26,
      load,
      cells,
      classOf: (row) => row.outcome,
      open: (row) => address.go("request", about(row)),
      choose: (row, place) => address.note({ row: place }),
    });

    async function load(start) {
      const page = start / 500;
      const answer = await get("requests", { ...query, of, before: cursors[page] });
      if (answer.next) cursors[page + 1] = answer.next;
      for (const row of answer.rows) longest = Math.max(longest, row.seconds ?? 0);
      const known = start + answer.rows.length;
      fill(found, answer.next ? `more than ${several(known, "request")}` : several(known, "request"));
      return { rows: answer.rows, total: known + (answer.next ? 1 : 0) };
    }

    function cells(row) {
      const tokens = row.prompt_tokens === null ? "" : `${count(row.prompt_tokens)} + ${count(row.completion_tokens)}`;
      const rate = row.completion_tokens && row.seconds ? (row.completion_tokens / row.seconds).toFixed(1) : "";
      const why = row.finish_reason ?? row.code;
      return [
        row.submitted.replace("T", " ").replace("Z", ""),
        h("a", { href: address.of("request", about(row)) }, row.request_id),
        [h("span.sign", { "aria-hidden": "true" }, SIGNS[row.outcome]), ` ${row.outcome}`, why && h("span.dim", {}, ` ${why}`)],
        [h("span.bar", { "aria-hidden": "true", style: { width: `${longest ? (100 * (row.seconds ?? 0)) / longest : 0}%` } }),
          h("span", {}, row.seconds === null ? "running" : seconds(row.seconds))],
        seconds(row.queue_seconds),
        seconds(row.first_chunk_seconds),
        tokens,
        rate,
        row.attempts > 1 ? h("span.many", {}, row.attempts) : row.attempts,
        row.ranks.join(" "),
        count(row.events),
        row.tenant ?? "",
        row.model ?? "?",
        row.source_name,
      ];
    }

    const form = filterForm(query, of);
    fill(root,
      h("h1.hidden", {}, "Requests"),
      h("div.tools", {}, shelves(sources, of), isExported ? null : presets(query, of), found),
      isExported ? null : form,
      list.element,
      isExported ? null : dropHint());
    const none = sources.log || sources.bundles.length ? "No request matches these filters." : "No recording is open yet.";
    root.addEventListener("shown", async () => {
      try {
        await list.reload({ place: Number(values.get("row") ?? 0), none });
      } catch (error) {
        say(error.message, "bad");
        fill(found, h("span.bad", {}, error.message));
        return;
      }
      list.view.focus({ preventScroll: true });
    });
    const stop = of === "log" && sources.log?.live ? live(list, say, () => { cursors = [""]; }) : () => {};
    return () => { stop(); list.close(); };
  },
};

function about(row) {
  return { source: row.source, id: row.request_id };
}

/** Load the list again when there are news, unless the user looks at older requests. */
function live(list, say, forget) {
  say("● live", "live");
  const stop = follow(async (news) => {
    if (news.error) { say(news.error, "bad"); return; }
    if (!news.requests.length || list.view.scrollTop > 0) return;
    forget();
    await list.reload({ keep: true });
  });
  return () => { say(""); stop(); };
}

function shelves(sources, of) {
  const one = (id, label) =>
    h("a.shelf", { href: address.of("requests", { of: id }), "aria-current": of === id ? "true" : null }, label);
  return h("div.shelves", {},
    sources.log && one("log", ["log ", h("code", {}, sources.log.name)]),
    sources.bundles.length ? one("bundles", several(sources.bundles.length, "bundle")) : null);
}

function presets(query, of) {
  const same = (preset) => JSON.stringify(preset) === JSON.stringify(query);
  return h("div.presets", { role: "group", "aria-label": "Presets" }, PRESETS.map(([name, preset]) =>
    h("a.chip", { href: address.of("requests", { of, ...preset }), "aria-current": same(preset) ? "true" : null }, name)));
}

function filterForm(query, of) {
  const fields = FIELDS.map(([name, label, kind, hint]) => {
    const properties = { name, id: `filter-${name}` };
    const input = kind === "select"
      ? h("select", { ...properties, on: { change: apply } }, hint.map((one) =>
          h("option", { value: one, selected: (query[name] ?? "") === one }, one || "any")))
      : h("input", { ...properties, type: kind === "search" ? "search" : "text", placeholder: hint, value: query[name] ?? "",
          autocomplete: "off", spellcheck: "false", "data-search": name === "text" });
    return h("label", { class: query[name] ? "set" : "" }, h("span", {}, label), input);
  });
  const form = h("form.filters", { role: "search", on: { submit: (event) => { event.preventDefault(); apply(); } } },
    fields, h("button", { type: "submit" }, "Filter"));
  function apply() {
    address.go("requests", { of, ...Object.fromEntries(new FormData(form)) });
  }
  return form;
}

function dropHint() {
  const input = h("input.hidden", {
    type: "file", multiple: true, accept: ".bundle", tabindex: -1, "aria-label": "Bundles to open",
    on: { change: () => dispatchEvent(new CustomEvent("bundles", { detail: [...input.files] })) },
  });
  return h("p.hint", {}, "Drop bundles anywhere on this page, or ", button("choose files", () => input.click(), { class: "link" }), input,
    ". They stay in this process.");
}
