// Ask a running deployment a changed version of a recorded request. The dialog says what will be asked first.

import * as address from "./address.js";
import { askFork, get } from "./data.js";
import { button, fill, h } from "./dom.js";
import { json, several } from "./format.js";

const PAUSE_MS = 250; // after the last key, before the changes are looked at
const MOST_TEXT = 400;

/** A dialog for one request, and the button that opens it. `from` is the record up to which both are the same. */
export function forkDialog(about, found, from) {
  const preview = h("div.preview", { "aria-live": "polite" });
  const submit = h("button", { type: "submit", disabled: true }, "Ask the running deployment");
  const form = h("form", { on: { submit: ask, input: lookSoon } },
    h("h2", { id: "fork-title" }, "Ask again, with changes"),
    h("p.dim", {}, `A new request is submitted to the running deployment. ${found.request_id} and its records stay as they are.`),
    h("label", {}, h("span", {}, "The same up to record (its submission, if empty)"),
      h("input", { name: "seq", type: "number", min: 1, value: from ?? "" })),
    h("label", {}, h("span", {}, 'Changes, one KEY=VALUE per line: temperature=0.7, text="...", model=...'),
      h("textarea", { name: "set", rows: 4, spellcheck: "false" })),
    preview,
    h("p.buttons", {}, submit, button("Close", () => element.close())));
  const element = h("dialog.fork", { "aria-labelledby": "fork-title", on: { close: () => address.note({ fork: null }) } }, form);
  let waiting = 0;
  let looked = 0;

  function asked() {
    return { ...about, seq: form.elements.seq.value, set: form.elements.set.value };
  }

  function lookSoon() {
    submit.disabled = true;
    looked++;
    fill(preview, h("p.dim", {}, "…"));
    clearTimeout(waiting);
    waiting = setTimeout(look, PAUSE_MS);
  }

  async function look() {
    const mine = ++looked;
    try {
      const fork = await get("fork", asked());
      if (mine !== looked) return;
      fill(preview, shown(fork));
      submit.disabled = false;
    } catch (error) {
      if (mine === looked) fill(preview, h("p.bad", { role: "alert" }, error.message));
    }
  }

  async function ask(event) {
    event.preventDefault();
    if (submit.disabled) return; // Enter in a field, before the changes were looked at
    submit.disabled = true;
    try {
      const id = await askFork(asked());
      element.close();
      address.forget();
      address.go("request", { source: "log", id });
    } catch (error) {
      fill(preview, h("p.bad", { role: "alert" }, error.message));
    }
  }

  function open() {
    element.showModal();
    form.elements.set.focus();
    look();
  }

  return { element, open, opener: button("Ask again …", open, { title: "Submit a changed version of this request" }) };
}

function shown(fork) {
  const kept = fork.kept_tokens ? `The first ${several(fork.kept_tokens, "token")} of its answer become part of the prompt. ` : "";
  if (!fork.differences.length) return h("p", {}, kept, "Nothing else is changed.");
  return [h("p", {}, kept, "What will be asked differs in:"),
    h("table.differences", { "aria-label": "Differences" },
      h("thead", {}, h("tr", {}, ["value", "recorded", "asked"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, fork.differences.map((one) => h("tr", {}, h("td", {}, h("code", {}, one.field)),
        h("td.before", {}, brief(one.recorded)), h("td.after", {}, brief(one.asked))))))];
}

function brief(value) {
  const text = json(value);
  return text.length > MOST_TEXT ? `${text.slice(0, MOST_TEXT)} …` : text;
}
