// One request: where its time went, on which ranks, what it waited for, and what it answered.

import * as address from "./address.js";
import { follow, get, isExported, mediumAddress } from "./data.js";
import { button, fill, h } from "./dom.js";
import { forkDialog } from "./fork.js";
import { bytes, count, json, seconds, several, share, SIGNS } from "./format.js";
import { isWait, nameOf, timeline } from "./lanes.js";

const MOST_TEXT = 20000; // characters that are shown on each side of the cursor

export const request = {
  title: "Request",

  async show(root, values, { say }) {
    const about = { source: values.get("source"), id: values.get("id") };
    const [found, sources] = await Promise.all([get("request", about), get("sources")]);
    if (!found.explained) {
      fill(root, h("h1", {}, found.request_id), h("p.failure", {}, found.damaged ?? "Its submission is missing from these records."));
      return null;
    }
    const total = Math.max(found.explained.seconds, 1e-6);
    const number = (name) => (values.has(name) ? Number(values.get(name)) : null);
    const details = h("div.details", { "aria-live": "polite" });
    const answer = answerPanel(about, found, number("at") ?? total);
    const lanes = timeline({
      lanes: [...found.lanes, ...outputLanes(found.output)],
      total,
      at: number("at") ?? total,
      from: number("from"),
      to: number("to"),
      pick: (lane, one) => { showPicked(details, about, lane, one); },
      moved: (time) => { answer.move(time); address.note({ at: time === total ? null : time.toFixed(6) }); },
      viewed: (from, to) => address.note({ from: from > 0 ? from.toFixed(6) : null, to: to < total ? to.toFixed(6) : null }),
    });
    const fork = sources.can_ask ? forkDialog(about, found, values.get("fork")) : null;
    fill(root,
      heading(found, about, fork),
      h("div.tools", {},
        h("h2", {}, "Timeline"), legend(found.lanes), h("span.grow"),
        button("−", () => lanes.zoom(2), { "aria-label": "Zoom out", title: "Zoom out (−)" }),
        button("all", () => lanes.all(), { "aria-label": "Show all of it", title: "Show all of it (0)" }),
        button("+", () => lanes.zoom(0.5), { "aria-label": "Zoom in", title: "Zoom in (+)" })),
      lanes.element,
      details,
      h("div.columns", {}, criticalPath(found, lanes), answer.element));
    root.addEventListener("shown", () => { lanes.redraw(); lanes.element.focus({ preventScroll: true }); if (values.has("fork")) fork?.open(); });
    const stop = about.source === "log" && sources.log?.live && !found.ended ? live(about, found.records, say) : () => {};
    return () => { stop(); lanes.close(); };
  },
};

/** Show the request again when it has more records than `shown`. */
function live(about, shown, say) {
  say("● live", "live");
  let isFirst = true;
  const stop = follow(async (news) => {
    if (news.error) { say(news.error, "bad"); return; }
    // The first news come once it listens: records may have come since the request was read.
    const isMissed = isFirst && (await get("request", about)).records !== shown;
    isFirst = false;
    if (isMissed || news.requests.includes(about.id)) dispatchEvent(new HashChangeEvent("hashchange"));
  });
  return () => { say(""); stop(); };
}

// ---- head ------------------------------------------------------------------------------------------------

function heading(found, about, fork) {
  const one = found.explained;
  const usage = found.output?.usage;
  const first = found.output?.t[0];
  const tokens = usage?.completion_tokens;
  const word = one.outcome.split(/[\s:,]/)[0];
  const cause = one.cause;
  const tiles = [
    ["took", seconds(one.seconds)],
    ["first chunk", first === undefined ? "none" : seconds(first)],
    ["tokens", usage ? `${count(usage.prompt_tokens ?? 0)} + ${count(tokens ?? 0)}` : "unknown"],
    ["rate", tokens ? `${(tokens / one.seconds).toFixed(1)} tok/s` : "–"],
    ["attempts", String(one.attempts)],
    ["records", count(found.records)],
  ];
  return h("div.heading", {},
    h("div.titled", {}, h("h1", {}, found.request_id), fork?.opener, fork?.element),
    found.forked_from && origin(found.forked_from, about),
    h("p.facts", {},
      h("span.outcome", { class: word }, h("span.sign", { "aria-hidden": "true" }, SIGNS[word] ?? "•"), ` ${one.outcome}`),
      one.error && h("span.bad", {}, ` ${one.error.code}: ${one.error.message}`),
      h("span.dim", {}, ` ${found.model ?? "unreadable submission"} · ${found.begin}${found.tenant ? ` · tenant ${found.tenant}` : ""}`)),
    found.parts_of_request.length > 1 && h("p.parts", {}, "Answers: ", found.parts_of_request.map((id) =>
      [h("a.chip", { href: address.of("request", { ...about, id }), "aria-current": id === found.request_id ? "true" : null }, id), " "])),
    h("dl.tiles", {}, tiles.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    cause && h("p.cause", {}, h("b", {}, "mostly: "), cause.text, " ", h("span.dim", {}, `${seconds(cause.seconds)}, ${share(cause.share)}`)),
    found.remarks.filter((line) => !line.startsWith("mostly: ") && !line.startsWith("error: ")).map((line) => h("p.remark", {}, line)),
    found.damaged && h("p.bad", {}, found.damaged));
}

/** The request that this one is a changed version of. */
function origin(fork, about) {
  const changes = Object.entries(fork.changes ?? {}).map(([name, value]) => `${name} = ${json(value)}`).join(", ");
  const pair = { source: about.source, id: fork.request_id, source2: about.source, id2: about.id };
  return h("p.remark", {}, "changed version of ", h("a", { href: address.of("request", { source: about.source, id: fork.request_id }) }, fork.request_id),
    ` from record ${fork.seq} on${changes ? `: ${changes}` : ""}`,
    isExported ? "" : [" · ", h("a", { href: address.of("compare", pair) }, "compare both")]);
}

function legend(lanes) {
  const kinds = new Set(lanes.flatMap((lane) => lane.bars.map((bar) => bar.kind)));
  return h("ul.legend", { "aria-label": "Kinds of parts" }, [...kinds].map((kind) =>
    h("li", {}, h(`span.swatch.bar.${kind}`, { class: isWait(kind) ? "wait" : "", "aria-hidden": "true" }), nameOf(kind))));
}

function outputLanes(output) {
  if (!output) return [];
  const lanes = new Map();
  output.t.forEach((at, place) => {
    const key = [output.track[place], output.choice[place] || ""].filter(Boolean).join(" ");
    if (!lanes.has(key)) lanes.set(key, { key, label: `output ${key}`.trim(), kind: "output", bars: [], ticks: [] });
    lanes.get(key).ticks.push({
      at, seq: output.seq[place], kind: "output.chunk",
      get text() { return `chunk at ${seconds(at)}, ${several(output.tokens[place], "token")}`; }, // of few that are drawn
    });
  });
  return [...lanes.values()];
}

function showPicked(details, about, lane, one) {
  const events = (seq, name) => seq && h("a", { href: address.of("events", { ...about, seq }) }, `${name} ${seq}`);
  const from = one.from ?? one.at;
  fill(details,
    h("b", {}, lane.label), h("span.dim", {}, ` ${nameOf(one.kind)} `),
    `from ${seconds(from)}${one.to !== undefined ? `, ${seconds(one.to - one.from)}` : ""}: `, one.text, " ",
    events(one.seq, one.to_seq ? "order" : "record"), " ", events(one.to_seq, "report"),
    (one.requests ?? []).map((id) => [" ", h("a", { href: address.of("request", { ...about, id }) }, id)]));
}

// ---- critical path -----------------------------------------------------------------------------------------

function criticalPath(found, lanes) {
  const parts = found.explained.parts;
  const widest = Math.max(...parts.map((part) => part.share), 1e-9);
  return h("section.critical", { "aria-label": "Critical path" },
    h("h2", {}, "Critical path", h("span.dim", {}, " every moment once")),
    h("div.scroll", { tabindex: 0, role: "region", "aria-label": "Parts of the critical path" },
      h("table", {},
        h("thead", {}, h("tr", {}, ["from", "took", "share"].map((name) => h("th.num", { scope: "col" }, name)),
          h("td.fills"), h("th", { scope: "col" }, "what"))),
        h("tbody", {}, parts.map((part) => h("tr", { on: { click: () => lanes.move(part.from_s) } },
          h("td.num", {}, seconds(part.from_s)),
          h("td.num", {}, seconds(part.seconds)),
          h("td.num.share", {}, share(part.share)),
          h("td.fills", {}, h(`span.fill.bar.${part.kind}`, {
            "aria-hidden": "true", class: isWait(part.kind) ? "wait" : "", style: { width: `${(72 * part.share) / widest}px` } })),
          h("td", {}, h("span.kind", {}, nameOf(part.kind)), " ", part.text)))))),
    found.explained.unusual.length ? h("ul.unusual", {}, found.explained.unusual.map((one) => h("li", {}, one.text))) : null);
}

// ---- the answer --------------------------------------------------------------------------------------------

/** The prompt, and the answer up to the cursor. */
function answerPanel(about, found, at) {
  const output = found.output;
  const texts = Object.entries(output?.texts ?? {}).filter(([, text]) => text);
  const parts = texts.map(([choice, text]) => {
    const before = h("span.said");
    const after = h("span.unsaid");
    const element = h("div.prose", { tabindex: 0, role: "region", "aria-label": texts.length > 1 ? `Answer ${choice}` : "Answer" }, before, after);
    return { choice: Number(choice), text, before, after, element };
  });
  const place = h("span.dim");
  const media = found.media.map((one) => medium(about, one));
  let shownTo = null;

  function move(time) {
    if (!output || shownTo === time) return;
    shownTo = time;
    let chunks = 0;
    const ends = new Map();
    for (let index = 0; index < output.t.length && output.t[index] <= time + 1e-9; index++) {
      ends.set(output.choice[index], output.end[index]);
      chunks = index + 1;
    }
    for (const part of parts) {
      const end = ends.get(part.choice) ?? 0;
      const first = Math.max(0, end - MOST_TEXT);
      const last = Math.min(part.text.length, end + MOST_TEXT);
      fill(part.before, first ? `… ${count(first)} characters before … ` : "", part.text.slice(first, end));
      fill(part.after, part.text.slice(end, last), last < part.text.length ? ` … ${count(part.text.length - last)} more characters` : "");
    }
    fill(place, ` up to ${seconds(time)}: ${count(chunks)} of ${several(output.t.length, "chunk")}`);
    for (const one of media) one.move(time);
  }

  const element = h("section.answer", { "aria-label": "Answer" },
    found.prompt && h("details.prompt", {}, h("summary", {}, h("b", {}, "Prompt "), h("span.dim", {}, several([...found.prompt].length, "character"))),
      h("div.prose", { tabindex: 0, role: "region", "aria-label": "Prompt" }, found.prompt)),
    h("h2", {}, "Answer", place),
    parts.map((part) => part.element),
    media.map((one) => one.element),
    !parts.length && !media.length && h("p.dim", {}, "No output."));
  move(at);
  return { element, move };
}

/** A medium of the answer: sound is played from the cursor on. */
function medium(about, one) {
  const name = [one.modality, one.track, one.choice ? `answer ${one.choice}` : ""].filter(Boolean).join(" ");
  const caption = h("figcaption", {}, h("b", {}, name), h("span.dim", {},
    ` ${one.seconds ? seconds(one.seconds) : ""} ${one.bytes ? bytes(one.bytes) : ""}`));
  if (one.why_not) return { element: h("figure.medium", {}, caption, h("p.dim", {}, one.why_not)), move() {} };
  const src = mediumAddress(about.source, about.id, one.number);
  if (one.modality === "image" || one.content_type.startsWith("image/")) {
    const image = h("img", { src, alt: `${name} of the answer` });
    const ready = one.times.at(-1)[0];
    return { element: h("figure.medium", {}, caption, image), move(time) { image.classList.toggle("later", time < ready); } };
  }
  const player = h(one.content_type.startsWith("video/") ? "video" : "audio", { src, controls: true, preload: "metadata", "aria-label": name });
  return {
    element: h("figure.medium", {}, caption, player),
    move(time) {
      if (!player.paused || !one.sample_rate) return;
      const samples = one.times.reduce((found, [at, end]) => (at <= time ? end : found), 0);
      player.currentTime = time >= one.times.at(-1)[0] ? 0 : samples / one.sample_rate;
    },
  };
}
