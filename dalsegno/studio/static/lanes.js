// The timeline of a request: lanes with bars and ticks, a ruler, a cursor, zoom.

import { fill, h } from "./dom.js";
import { seconds } from "./format.js";

const WAITS = new Set(["admission", "queue", "preempted", "held", "stream", "neighbours", "silent", "away", "no_conductor", "lost", "unreported"]);
const NAMES = {
  admission: "wait: admission", conductor: "conductor", no_conductor: "no conductor", queue: "wait: queue", prefill: "prefill",
  decode: "decode", neighbours: "beside prompts", preempted: "preempted", held: "held", node: "node", stream: "wait: stream",
  transit: "through the log", lost: "lost work", silent: "dead, unnoticed", away: "away", running: "running", order: "step",
  unreported: "never reported",
};
const MOST_TICKS = 4000;

/** True for what is hatched: time in which the request itself was not computed. */
export function isWait(kind) {
  return WAITS.has(kind);
}

export function nameOf(kind) {
  return NAMES[kind] ?? kind;
}

/**
 * Make a timeline.
 *
 * lanes    from the data, with the output's lanes
 * total    its length in seconds
 * at       of the cursor; from, to   of the view
 * pick     called with (lane, bar or tick) that is chosen
 * moved    called with the cursor's time; viewed with the view's times
 */
export function timeline({ lanes, total, at, from, to, pick, moved, viewed }) {
  let view = [from ?? 0, to ?? total];
  let cursor = at;
  let due = 0;
  const ruler = h("div.ruler", { "aria-hidden": "true" });
  const line = h("div.cursor", { "aria-hidden": "true" });
  const rows = lanes.map((lane) => ({ lane, track: h("div.track") }));
  const element = h("div.timeline", {
    role: "group", tabindex: 0, "aria-label": "Timeline: arrow keys move the cursor, plus and minus zoom",
    on: { keydown: press, wheel },
  },
  h("div.lane.top", {}, h("div.label", {}), ruler),
  rows.map(({ lane, track }) => h(`div.lane.${lane.kind}`, {}, h("div.label", { title: lane.label }, lane.label), track)),
  h("div.over", {}, h("div.label", {}), h("div.field", {}, line)));
  element.addEventListener("pointerdown", point);
  const watching = new ResizeObserver(schedule);
  watching.observe(element);

  function schedule() {
    if (!due) due = requestAnimationFrame(draw);
  }

  const width = () => ruler.clientWidth || 1;
  const xOf = (time) => ((time - view[0]) / (view[1] - view[0])) * width();

  function draw() {
    due = 0;
    drawRuler();
    for (const { lane, track } of rows) fill(track, bars(lane), ticks(lane));
    drawCursor();
  }

  function drawRuler() {
    const step = stepOf((view[1] - view[0]) / Math.max(2, width() / 90));
    const marks = [];
    for (let time = Math.ceil(view[0] / step) * step; time <= view[1]; time += step) {
      marks.push(h("span.mark", { style: { left: `${xOf(time)}px` } }, seconds(Math.abs(time) < step / 1e6 ? 0 : time)));
    }
    fill(ruler, marks);
  }

  function bars(lane) {
    const made = [];
    let before = -10;
    for (const bar of lane.bars) {
      if (bar.to < view[0] || bar.from > view[1]) continue;
      const left = Math.max(-2, xOf(bar.from));
      const right = Math.min(width() + 2, xOf(bar.to));
      if (right - left < 1 && left - before < 1) continue; // as narrow as a pixel that is drawn already
      before = left;
      const name = bar.name ?? nameOf(bar.kind);
      made.push(h(`button.bar.${bar.kind}`, {
        type: "button", tabindex: -1, class: WAITS.has(bar.kind) ? "wait" : "",
        style: { left: `${left}px`, width: `${Math.max(1.5, right - left)}px` },
        title: `${name}, ${seconds(bar.to - bar.from)}: ${bar.text}`,
        on: { click: () => pick(lane, bar) },
      }, right - left > 34 ? h("span", {}, bar.attempt > 1 ? `${name} · attempt ${bar.attempt}` : name) : null));
    }
    return made;
  }

  function ticks(lane) {
    const made = [];
    let before = -10;
    for (const tick of lane.ticks) {
      if (tick.at < view[0] || tick.at > view[1]) continue;
      const left = xOf(tick.at);
      if (left - before < 1.5 || made.length > MOST_TICKS) continue;
      before = left;
      made.push(h("button.tick", {
        type: "button", tabindex: -1, class: tick.kind.replace(".", "-"), style: { left: `${left}px` },
        title: `${tick.kind}: ${tick.text}`, on: { click: () => pick(lane, tick) },
      }));
    }
    return made;
  }

  function drawCursor() {
    const x = xOf(cursor);
    line.hidden = x < 0 || x > width();
    line.style.left = `${x}px`;
    fill(line, h("span", {}, seconds(cursor)));
    line.classList.toggle("left", x > width() - 80);
  }

  function move(time) {
    cursor = Math.min(total, Math.max(0, time));
    if (cursor < view[0] || cursor > view[1]) shift(cursor - (view[0] + view[1]) / 2);
    drawCursor();
    moved(cursor);
  }

  function zoom(factor, around = cursor) {
    const length = Math.min(total, Math.max(total / 1e5, (view[1] - view[0]) * factor));
    const part = (around - view[0]) / (view[1] - view[0]);
    place(around - part * length, length);
  }

  function shift(by) {
    place(view[0] + by, view[1] - view[0]);
  }

  function place(begin, length) {
    const first = Math.min(Math.max(0, begin), total - length);
    view = [first, first + length];
    schedule();
    viewed(view[0], view[1]);
  }

  function press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = ((view[1] - view[0]) / 200) * (event.shiftKey ? 10 : 1);
    const acts = {
      ArrowLeft: () => move(cursor - step), ArrowRight: () => move(cursor + step), Home: () => move(0), End: () => move(total),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => place(0, total),
    };
    if (!(event.key in acts)) return;
    acts[event.key]();
    event.preventDefault();
  }

  function wheel(event) {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    if (event.shiftKey) shift(((event.deltaX || event.deltaY) / width()) * (view[1] - view[0]));
    else zoom(Math.exp(event.deltaY / 300), timeAt(event));
  }

  function timeAt(event) {
    const box = ruler.getBoundingClientRect();
    return view[0] + ((event.clientX - box.left) / box.width) * (view[1] - view[0]);
  }

  function point(event) {
    const box = ruler.getBoundingClientRect();
    if (event.button !== 0 || event.clientX < box.left) return;
    const begin = event.clientX;
    const first = view[0];
    let dragged = false;
    const drag = (now) => {
      if (Math.abs(now.clientX - begin) > 4) dragged = true;
      if (dragged) place(first - ((now.clientX - begin) / box.width) * (view[1] - view[0]), view[1] - view[0]);
    };
    const drop = (now) => {
      removeEventListener("pointermove", drag);
      removeEventListener("pointerup", drop);
      if (!dragged) move(timeAt(now));
    };
    addEventListener("pointermove", drag);
    addEventListener("pointerup", drop);
  }

  return { element, move, redraw: schedule, zoom, all: () => place(0, total), close: () => watching.disconnect() };
}

function stepOf(least) {
  const power = 10 ** Math.floor(Math.log10(least || 1));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= least);
}
