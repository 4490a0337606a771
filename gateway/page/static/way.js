// A request's way through the system: rows with a beginning and an end, of its timeline on the log.

import { button, fill, h } from "./dom.js";
import { count, duration } from "./format.js";

const ENDS = {
  "request.finished": "finished",
  "request.failed": "failed",
  "request.cancelled": "cancelled",
  "request.rejected": "rejected",
};
const STEP_ENDS = ["walk.completed", "walk.failed", "walk.stopped"];

/** The rows of a timeline: `{label, from, to, kind, note}`, in seconds since the submission; `to` is null while open. */
function rowsOf(timeline) {
  const { events, chunks } = timeline;
  if (!events.length) return { rows: [], end: null, seconds: 0 };
  const zero = events[0].time;
  const at = (time) => Math.max(0, time - zero);
  const rows = [];
  const admitted = events.find((one) => one.type === "request.admitted" || one.type in ENDS);
  rows.push({ label: "waits for admission", from: 0, to: admitted ? at(admitted.time) : null, kind: "wait" });
  for (const order of events) {
    if (order.type === "request.resumed") {
      rows.push({ label: `attempt ${order.attempt} begins`, from: at(order.time), to: at(order.time), kind: "resume", note: "a worker was lost; the answer goes on where it was" });
    }
    if (order.type !== "node.ready") continue;
    const isSame = (one) => one.attempt === order.attempt && one.rank === order.rank && one.step === order.step;
    const end = events.find((one) => STEP_ENDS.includes(one.type) && isSame(one));
    const worked = Object.keys(end?.work ?? {});
    const names = worked.length ? worked : order.walks;
    const waits = Object.entries(end?.work ?? {}).filter(([, work]) => work.waited_s >= 0.001);
    const note = waits.map(([node, work]) => `${node} waited ${duration(work.waited_s)}`).join(", ");
    rows.push({
      label: `${names.join(", ")} on rank ${order.rank}`,
      from: at(order.time),
      to: end ? at(end.time) : null,
      kind: end?.type === "walk.failed" ? "failed" : "step",
      note: end?.code ? `${end.code}${note ? `; ${note}` : ""}` : note,
    });
  }
  const ended = events.findLast((one) => one.type in ENDS);
  if (chunks.count) {
    const to = ended || chunks.count > 1 ? at(chunks.last) : null;
    rows.push({ label: `answer in ${count(chunks.count, "chunk")}`, from: at(chunks.first), to, kind: "answer" });
  }
  const seconds = Math.max(at(events.at(-1).time), chunks.last ? at(chunks.last) : 0);
  return { rows, end: ended ? ENDS[ended.type] : null, code: ended?.code ?? "", seconds };
}

/** Show a request: what the browser measured, its way, and the commands that take it apart. */
export function showRequest(element, request, timeline) {
  const facts = [
    ["First output after", request.firstS === null ? "…" : duration(request.firstS)],
    ["Time", duration(request.seconds)],
    request.tokens > 1 && ["Tokens", `${request.tokens}, ${request.perSecond().toFixed(1)} per second`],
    request.usage?.prompt_tokens > 0 && ["Prompt", count(request.usage.prompt_tokens, "token")],
    request.finishReason && ["Ended by", request.finishReason],
  ].filter(Boolean);
  fill(
    element,
    h("h2", {}, "The request"),
    h("dl.facts", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    timeline && way(timeline),
    request.id && h("h3", {}, "In a terminal"),
    request.id && ["why", "log", "replay"].map((verb) => command(`dalsegno ${verb} ${request.id}`)),
  );
}

function way(timeline) {
  const { rows, end, code, seconds } = rowsOf(timeline);
  const whole = Math.max(seconds, 0.001);
  const percent = (value) => `${Math.min(100, (100 * value) / whole)}%`;
  const bars = rows.map((row) => {
    const to = row.to ?? seconds;
    return h(
      "li",
      {},
      h("div.label", {}, h("span", {}, row.label), h("span.num", {}, row.to === null ? "…" : duration(to - row.from))),
      h("div.track", { "aria-hidden": "true" }, h(`div.bar.${row.kind}`, { style: { left: percent(row.from), width: percent(Math.max(0, to - row.from)) } })),
      row.note && h("div.note.dim", {}, row.note),
    );
  });
  const last = end ? `${end}${code ? ` (${code})` : ""} after ${duration(seconds)}` : "running";
  return h("div.way", {}, h("h3", {}, "Its way, by the log's clock"), h("ol", {}, bars), h("p", { class: end && end !== "finished" ? "bad" : "dim" }, last));
}

function command(text) {
  const copy = button("Copy", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
  }, { "aria-label": `Copy: ${text}` });
  return h("div.command", {}, h("code", { tabindex: "0" }, text), copy);
}
