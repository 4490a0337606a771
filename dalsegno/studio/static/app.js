// The frame of the studio: the bar with its screens, keys, dropped bundles, errors.

import * as address from "./address.js";
import { addBundle, get, isExported } from "./data.js";
import { add, button, fill, h } from "./dom.js";
import { cluster } from "./cluster.js";
import { compare } from "./compare.js";
import { decisions } from "./decisions.js";
import { events } from "./events.js";
import { request } from "./request.js";
import { requests } from "./requests.js";
import { state } from "./state.js";
import { whatIf } from "./what_if.js";

const SCREENS = { requests, request, events, state, decisions, ...(isExported ? {} : { compare, cluster, "what-if": whatIf }) };
const ALONE = ["requests", "compare", "cluster", "what-if"]; // screens that need no request
const KEYS = [
  ["1 … 8", "the screens"],
  ["↑ ↓, j k", "move in a list; Page Up, Page Down, Home, End"],
  ["Enter", "open what is chosen"],
  ["← →", "move the cursor in time, or the slider; with Shift in larger steps"],
  ["+ − 0", "zoom the timeline in, out, and back"],
  ["c e s", "of an event: to its cause, to its first effect, to the state after it"],
  ["n p", "to the next and the previous change of the chosen value"],
  ["/", "to the search"],
  ["?", "these keys"],
];

let close = () => {};
let showing = 0;
const main = h("main", { id: "main", tabindex: -1 });
const tabs = h("nav", { "aria-label": "Screens" });
const subject = h("div.subject");
const status = h("div.status", { role: "status" });
const keys = helpDialog();

function bar() {
  return h("header.topbar", {},
    h("a.skip", { href: "#main", on: { click: (event) => { event.preventDefault(); main.focus(); } } }, "To the contents"),
    h("strong.name", {}, h("span.segno", { "aria-hidden": "true" }, "%"), "studio"),
    tabs, subject, status,
    button("?", () => keys.showModal(), { class: "quiet", "aria-label": "Keys", title: "Keys (?)" }));
}

function helpDialog() {
  const dialog = h("dialog.keys", { "aria-labelledby": "keys-title" },
    h("h2", { id: "keys-title" }, "Keys"),
    h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])),
    h("form", { method: "dialog" }, h("button", {}, "Close")));
  return dialog;
}

function drawTabs(current, values) {
  const about = { source: values.get("source"), id: values.get("id") };
  fill(tabs, Object.entries(SCREENS).map(([name, screen], place) => {
    const label = [h("span.key", { "aria-hidden": "true" }, place + 1), screen.title];
    const needs = !ALONE.includes(name) && !about.id;
    if (needs) return h("span.tab.off", { title: "Choose a request first" }, label);
    return h("a.tab", {
      href: address.of(name, name === "requests" ? listed : about),
      "aria-current": name === current ? "page" : null,
    }, label);
  }));
  fill(subject, about.id ? [h("span.dim", {}, "request "), h("code", {}, about.id)] : null);
  document.title = about.id ? `${about.id} · ${SCREENS[current].title}` : "Dal Segno studio";
}

let listed = {}; // the filters of the list, to go back to

async function show() {
  address.forget();
  const { screen, values } = address.read();
  const name = screen in SCREENS ? screen : "requests";
  if (name === "requests") listed = values;
  const mine = ++showing;
  close();
  close = () => {};
  drawTabs(name, values);
  fill(main, h("p.loading", {}, "Reading …"));
  const root = h("section.screen", { class: name, "aria-label": SCREENS[name].title });
  try {
    const ended = await SCREENS[name].show(root, values, { say, isCurrent: () => mine === showing });
    if (mine !== showing) { ended?.(); return; }
    close = ended ?? close;
    fill(main, root);
    root.dispatchEvent(new CustomEvent("shown"));
  } catch (error) {
    if (mine !== showing) return;
    fill(main, failure(error));
  }
}

function failure(error) {
  return h("div.failure", { role: "alert" }, h("h1", {}, "This cannot be shown"), h("p", {}, error.message),
    h("p", {}, h("a", { href: address.of("requests", {}) }, "All requests")));
}

/** Say something in the bar. */
function say(text, kind = "") {
  fill(status, text ? h("span", { class: kind }, text) : null);
}

function press(event) {
  const typing = event.target.closest("input:not([type=range]), select, textarea, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) {
    if (event.key === "Escape" && typing?.matches("input")) typing.blur();
    return;
  }
  if (event.key === "?") keys.showModal();
  else if (event.key === "/") (main.querySelector("[data-search]") ?? main).focus();
  else if (/^[1-8]$/.test(event.key)) tabs.children[event.key - 1]?.click();
  else return;
  event.preventDefault();
}

// ---- bundles by drag and drop ------------------------------------------------------------------------------

async function take(files) {
  let added = null;
  for (const file of files) {
    try {
      added = await addBundle(file);
    } catch (error) {
      say(error.message, "bad");
      return;
    }
  }
  if (!added) return;
  say(files.length === 1 ? `${added.name} is open` : `${files.length} bundles are open`);
  if (files.length === 1) address.go("request", { source: added.id, id: added.requests[0] });
  else address.go("requests", { of: "bundles" });
}

function listenForFiles() {
  addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dropping");
  });
  addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    take([...event.dataTransfer.files]);
  });
  addEventListener("bundles", (event) => take(event.detail));
}

add(document.body, [bar(), main, keys, h("div.drop", { "aria-hidden": "true" }, "Drop bundles to open them")]);
addEventListener("hashchange", show);
addEventListener("keydown", press);
if (!isExported) listenForFiles();
await start();

async function start() {
  if (!location.hash && isExported) {
    const { rows } = await get("requests");
    if (rows.length === 1) history.replaceState(null, "", address.of("request", { source: rows[0].source, id: rows[0].request_id }));
  }
  await show();
}
