// What another configuration would have done with the recorded requests: decisions, or simulated times.

import * as address from "./address.js";
import { get } from "./data.js";
import { button, fill, h } from "./dom.js";
import { count, json, several, share } from "./format.js";

const LEVELS = {
  decisions: "exact, given the recorded past",
  times: "simulated, with costs of the recorded run",
};
const TICK_MS = 250;

export const whatIf = {
  title: "What if",

  async show(root, values, { say }) {
    const sources = await get("sources");
    const all = [...(sources.log ? [sources.log] : []), ...sources.bundles];
    const source = values.get("source") ?? all[0]?.id;
    if (!source) {
      fill(root, h("p.empty", {}, "No recording is open yet."));
      return null;
    }
    const asked = { source, set: values.get("set") ?? "", level: values.get("level") ?? "decisions", last: values.get("last") ?? "" };
    const { settings } = await get("settings", { source });
    const leaving = new AbortController();
    const results = h("div.compared", { tabindex: 0, role: "region", "aria-label": "Answer", "aria-live": "polite" });
    const form = askingForm(all, asked, settings);
    fill(root, h("h1.hidden", {}, "What if"), h("div.asking", {}, form, knobs(settings, form)), results);
    root.addEventListener("shown", async () => {
      (asked.set ? results : form.elements.set).focus({ preventScroll: true });
      if (!asked.set) {
        fill(results, h("p.empty", {}, "Name a setting and its other value: who would have waited, been placed elsewhere or been refused?"));
        return;
      }
      const stop = clock(results);
      try {
        const found = await get("what-if", asked, leaving.signal);
        stop();
        fill(results, found.cannot ? refusal(found) : asked.level === "times" ? times(found) : decisions(found, source));
      } catch (error) {
        stop();
        if (error.name === "AbortError") return;
        fill(results, h("p.bad", { role: "alert" }, error.message));
        say("");
      }
    });
    return () => leaving.abort();
  },
};

/** The seconds that an answer has taken so far; the result stops them. */
function clock(results) {
  const begun = performance.now();
  const shown = h("span", { "aria-hidden": "true" });
  fill(results, h("p.loading", {}, "Computing … ", shown));
  const timer = setInterval(() => { shown.textContent = `${((performance.now() - begun) / 1e3).toFixed(0)} s`; }, TICK_MS);
  return () => clearInterval(timer);
}

function askingForm(all, asked, settings) {
  const form = h("form.what-if", { on: { submit: (event) => { event.preventDefault(); apply(); } } },
    h("label", {}, h("span", {}, "Recording"), h("select", { name: "source" },
      all.map((one) => h("option", { value: one.id, selected: one.id === asked.source }, one.name)))),
    h("label", {}, h("span", {}, "Settings, one KEY=VALUE per line"),
      h("textarea", { name: "set", rows: Math.max(3, asked.set.split("\n").length), spellcheck: "false", autocomplete: "off" }, asked.set)),
    h("fieldset", {}, h("legend", {}, "Tell"), Object.entries(LEVELS).map(([level, text]) =>
      h("label.choice", {}, h("input", { type: "radio", name: "level", value: level, checked: level === asked.level }), h("b", {}, level), h("span", {}, text)))),
    h("label", {}, h("span", {}, "The newest requests only (all, if empty)"),
      h("input", { name: "last", type: "number", min: 1, value: asked.last })),
    h("button", { type: "submit" }, "Ask"));
  form.elements.set.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); apply(); }
  });
  function apply() {
    const given = Object.fromEntries(new FormData(form));
    address.go("what-if", { ...given, set: given.set.split(/\r?\n/).map((line) => line.trim()).filter(Boolean).join("\n") });
  }
  return form;
}

/** The settings that can be changed; a button writes one into the form. */
function knobs(settings, form) {
  function write(one) {
    const area = form.elements.set;
    const lines = area.value.split("\n").filter((line) => line.trim() && !line.startsWith(`${one.name}=`));
    area.value = [...lines, `${one.name}=${one.recorded ?? one.default ?? ""}`].join("\n");
    area.focus();
    area.setSelectionRange(area.value.length - String(one.recorded ?? one.default ?? "").length, area.value.length);
  }
  return h("div.knobs", { tabindex: 0, role: "region", "aria-label": "Settings" }, h("table.differences", {},
    h("thead", {}, h("tr", {}, ["setting", "recorded", "default"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, settings.map((one) => h("tr", {},
      h("td", {}, button(one.name, () => write(one), { class: "quiet", "aria-label": `Change ${one.name}` })),
      h("td", {}, one.recorded === null ? h("span.dim", {}, "default") : String(one.recorded)),
      h("td", {}, one.default === null ? h("span.dim", {}, "–") : String(one.default), one.choices.length ? h("span.dim", {}, ` of ${one.choices.join(", ")}`) : ""))))));
}

function decisions(found, source) {
  return [
    h("p", {}, h("b", {}, `${several(found.affected, "request")} of ${count(found.requests)} would have been decided otherwise`),
      h("span.dim", {}, ` · ${several(found.decided, "decision")} made again · ${found.set.join(", ")}`)),
    notes(found.notes),
    found.changes.length ? h("table.differences.decided", { "aria-label": "Changed decisions" },
      h("thead", {}, h("tr", {}, ["request", "what", "decision", "record", "then"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, found.changes.map((one) => h("tr", {},
        h("td", {}, h("a", { href: address.of("request", { source, id: one.request_id }) }, one.request_id)),
        h("td", {}, one.kind.replace("_", " ")),
        h("td", {}, one.event),
        h("td.num", {}, h("a", { href: address.of("cluster", { source, at: one.seq }) }, one.seq)),
        h("td", {}, one.text))))) : null,
    found.count > found.changes.length ? h("p.dim", {}, `and ${several(found.count - found.changes.length, "other change")}`) : null,
  ];
}

function times(found) {
  const rows = Object.entries(found.calibration);
  return [
    h("p", {}, h("b", {}, `Simulated ${several(found.count, "request")}`), h("span.dim", {}, ` · ${found.set.join(", ")} · lowest and highest of ${several(found.seeds, "simulation")}`)),
    notes(found.notes),
    h("table.differences.measured", { "aria-label": "Times" },
      h("thead", {}, h("tr", {}, ["", "recorded", "simulated", "error", "what if", "lowest", "highest"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows.map(([name, one]) => {
        const then = found.predicted[name] ?? {};
        return h("tr", {}, h("th", { scope: "row" }, name), [one.recorded, one.simulated].map(number),
          h("td.num", {}, one.error === null ? "–" : share(one.error)), [then.value, then.low, then.high].map(number));
      }))),
  ];
}

function refusal(found) {
  const rows = Object.entries(found.calibration);
  return [
    h("p.bad", { role: "alert" }, "✕ ", found.cannot),
    rows.length ? h("table.differences.measured", { "aria-label": "Calibration" },
      h("thead", {}, h("tr", {}, ["", "recorded", "simulated", "error"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows.map(([name, one]) => h("tr", {}, h("th", { scope: "row" }, name), [one.recorded, one.simulated].map(number),
        h("td.num", {}, one.error === null ? "–" : share(one.error)))))) : null,
  ];
}

function notes(all) {
  return all.length ? h("ul.notes", {}, all.map((one) => h("li", {}, one))) : null;
}

function number(value) {
  return h("td.num", {}, value === null || value === undefined ? "–" : typeof value === "number" ? value.toLocaleString("en", { maximumFractionDigits: 3 }) : json(value));
}
