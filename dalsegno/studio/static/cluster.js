// The cluster at a position of a recording: its ranks, and the requests that are open then.

import * as address from "./address.js";
import { get } from "./data.js";
import { button, fill, h } from "./dom.js";
import { count, seconds, several } from "./format.js";

const PHASES = { waiting: "◌", running: "▶", held: "‖" };

export const cluster = {
  title: "Cluster",

  async show(root, values, { say }) {
    const sources = await get("sources");
    const all = [...(sources.log ? [sources.log] : []), ...sources.bundles];
    const source = values.get("source") ?? all[0]?.id;
    if (!source) {
      fill(root, h("p.empty", {}, "No recording is open yet."));
      return null;
    }
    const range = await get("range", { source });
    let now = await get("cluster", { source, at: values.get("at") ?? range.last_seq });
    let wanted = now.seq;
    let isAsking = false;
    const slider = h("input.slider", { type: "range", min: range.first_seq, max: range.last_seq, "aria-label": "Record", on: { input: () => go(Number(slider.value)) } });
    slider.value = now.seq;
    const contents = h("div.compared", { tabindex: 0, role: "region", "aria-label": "Ranks and requests" });
    const choice = h("select", { "aria-label": "Recording", on: { change: () => address.go("cluster", { source: choice.value }) } },
      all.map((one) => h("option", { value: one.id, selected: one.id === source }, one.name)));

    async function go(seq) {
      wanted = Math.min(range.last_seq, Math.max(range.first_seq, seq));
      slider.value = wanted;
      if (isAsking) return;
      isAsking = true;
      try {
        let asked = null;
        while (asked !== wanted) { asked = wanted; now = await get("cluster", { source, at: asked }); }
      } catch (error) {
        say(error.message, "bad");
      } finally {
        isAsking = false;
      }
      draw();
      address.note({ source, at: wanted });
    }

    function draw() {
      slider.setAttribute("aria-valuetext", `record ${now.seq}`);
      const ended = Object.entries(now.ended).map(([phase, times]) => `${count(times)} ${phase}`).join(", ") || "none";
      fill(contents,
        h("p", {}, h("b", {}, `record ${now.seq}`), h("span.dim", {}, ` of ${range.first_seq} to ${range.last_seq} · ${now.time} · `),
          now.leader ? `${now.leader} leads, epoch ${now.epoch}` : "no conductor leads", h("span.dim", {}, ` · ended since the beginning: ${ended}`)),
        h("h2", {}, "Ranks"),
        h("div.ranks", {}, now.ranks.map((rank) => h("section.rank-card", { class: rank.incarnation === null ? "gone" : "", "aria-label": `Rank ${rank.rank}` },
          h("h3", {}, `rank ${rank.rank} `, rank.incarnation === null ? h("b.bad", {}, "✕ away") : h("span", {}, `✓ incarnation ${rank.incarnation}`)),
          h("p", {}, rank.nodes.join(", ")),
          h("p.dim", {}, `${count(rank.kv_tokens)} KV tokens · ${several(rank.placed, "request")} placed`),
          rank.running.length ? h("p", {}, "runs ", rank.running.map((id) => [link(id), " "])) : h("p.dim", {}, "runs nothing")))),
        h("h2", {}, several(now.open, "open request")),
        now.requests.length ? h("table.differences", { "aria-label": "Open requests" },
          h("thead", {}, h("tr", {}, ["phase", "request", "for", "attempt", "ranks", "steps", "tenant"].map((name) => h("th", { scope: "col" }, name)))),
          h("tbody", {}, now.requests.map((one) => h("tr", {},
            h("td", {}, h("span.sign", { "aria-hidden": "true" }, PHASES[one.phase]), ` ${one.phase}`), h("td", {}, link(one.request_id)),
            h("td.num", {}, seconds(one.seconds)), h("td.num", {}, one.attempt), h("td", {}, one.ranks.join(" ")), h("td", {}, one.steps.join(", ")), h("td", {}, one.tenant))))) : null);
    }

    function link(id) {
      return h("a", { href: address.of("request", { source, id }) }, id);
    }

    function press(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select")) return;
      const step = event.shiftKey ? Math.max(10, Math.round((range.last_seq - range.first_seq) / 50)) : 1;
      const acts = { ArrowLeft: () => go(wanted - step), ArrowRight: () => go(wanted + step), Home: () => go(range.first_seq), End: () => go(range.last_seq) };
      if (!(event.key in acts)) return;
      event.preventDefault();
      acts[event.key]();
    }

    root.addEventListener("keydown", press);
    fill(root, h("h1.hidden", {}, "Cluster"), h("div.tools", {}, choice,
      button("◀", () => go(wanted - 1), { "aria-label": "One record back" }), slider, button("▶", () => go(wanted + 1), { "aria-label": "One record on" })), contents);
    draw();
    root.addEventListener("shown", () => slider.focus({ preventScroll: true }));
    return null;
  },
};
