// What a decision was chosen from: each rank and why it was or was not taken, and the requests that waited.

import * as address from "./address.js";
import { get } from "./data.js";
import { button, fill, h } from "./dom.js";
import { count, seconds, several } from "./format.js";

const VERDICTS = {
  chosen: ["✓", "chosen"],
  possible: ["·", "possible, not chosen"],
  full: ["✕", "full"],
  closed: ["✕", "closed: kept for a request that may have killed a worker"],
  absent: ["✕", "no worker was there"],
  "other weights": ["✕", "has other weights"],
};
const POLICIES = {
  fsfs: "the fewest open requests",
  rr: "round robin",
  random: "derived from the request id",
  cache_aware: "the longest known prefix of the prompt; round robin if there is none",
};

/** A button that loads the alternatives of the decision at `seq`. */
export function alternatives(about, seq) {
  const shown = h("div.alternatives", { "aria-live": "polite" });
  const opener = button("What was it chosen from?", async () => {
    opener.disabled = true;
    fill(shown, h("p.loading", {}, "Deciding the log again up to this record …"));
    try {
      const found = await get("alternatives", { source: about.source, seq });
      fill(shown, found.cannot ? h("p.bad", { role: "alert" }, found.cannot) : contents(found, about));
    } catch (error) {
      fill(shown, h("p.bad", { role: "alert" }, error.message));
    }
    opener.disabled = false;
  });
  return h("div", {}, opener, shown);
}

function contents(found, about) {
  const limit = found.most_per_rank === null ? "" : `, at most ${several(found.most_per_rank, "request")} on a rank`;
  return [
    h("p", {}, `Decided after record ${found.after_seq}: ${found.reason}. ${count(found.open_requests)} of ${several(found.most, "place")} were taken. `,
      h("span.dim", {}, `Between possible ranks: ${POLICIES[found.policy] ?? found.policy}${limit}.`)),
    found.groups.map((group) => ranks(group, found)),
    found.queue.length ? line(found, about) : null,
  ];
}

function ranks(group, found) {
  const where = group.walks.length ? ` in ${group.walks.join(" and ")}` : "";
  const hasCache = found.policy === "cache_aware";
  return table(`Ranks of ${group.nodes.join(" and ")}${where}`, ["rank", "open requests", ...(hasCache ? ["prompt cached"] : []), "result"],
    group.ranks.map((one) => {
      const [sign, words] = VERDICTS[one.verdict];
      const now = one.decided === (one.verdict === "chosen") ? "" : one.decided ? "; the installed code chooses it" : "; the installed code does not choose it";
      return h("tr", { class: one.verdict === "chosen" ? "chosen" : "" }, h("th", { scope: "row" }, one.rank), h("td.num", {}, count(one.open_requests)),
        hasCache ? h("td.num", {}, `${count(one.cached)} of ${several(found.pieces, "piece")}`) : null,
        h("td", {}, h("span.sign", { "aria-hidden": "true" }, sign), ` ${words}${now}`));
    }));
}

function line(found, about) {
  const rest = found.waiting - found.queue.length;
  return [
    table(`${several(found.waiting, "request")} waited, in the order of their turns`, ["request", "priority", "deadline in", "tenant", "open of it"],
      found.queue.map((one) => h("tr", { class: one.request_id === about.id ? "chosen" : "" },
        h("td", {}, h("a", { href: address.of("request", { source: about.source, id: one.request_id }) }, one.request_id)),
        h("td.num", {}, String(one.priority)), h("td.num", {}, one.deadline_s === null ? "–" : seconds(one.deadline_s)),
        h("td", {}, one.tenant || "–"), h("td.num", {}, count(one.tenant_open))))),
    rest > 0 ? h("p.dim", {}, `and ${several(rest, "other")}`) : null,
  ];
}

function table(caption, columns, rows) {
  return [h("h3", {}, caption), h("table.differences", { "aria-label": caption },
    h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))];
}
