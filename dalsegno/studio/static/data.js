// The data of the screens: from the studio's process, or from this file, if it is an exported one.

const embedded = document.getElementById("data");
const kept = embedded ? JSON.parse(embedded.textContent) : null;
const PAGE = 500;

export const isExported = kept !== null;

/** An error that says what to do. */
export class DataError extends Error {}

/** Return the answer to `/api/<what>?<query>`. */
export async function get(what, query = {}, signal = undefined) {
  if (kept) return fromFile(what, query);
  let found;
  try {
    found = await fetch(`/api/${what}${queryOf(query)}`, { signal, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new DataError("The studio does not answer: it was stopped. Start `dalsegno studio` again.");
  }
  if (found.status === 401) throw new DataError(await found.text());
  const value = await found.json();
  if (!found.ok) throw new DataError(value.error);
  return value;
}

/** The address of a medium of an answer. */
export function mediumAddress(source, id, number) {
  return kept ? kept.media[`${source} ${id} ${number}`] : `/api/medium${queryOf({ source, id, number })}`;
}

/** Add a bundle. */
export async function addBundle(file) {
  if (kept) throw new DataError("This is an exported file: it shows what is in it. Start `dalsegno studio`.");
  const found = await fetch("/api/bundles", {
    method: "POST",
    body: file,
    headers: { "x-dalsegno-studio": "1", "x-dalsegno-name": encodeURIComponent(file.name) },
  });
  const value = await found.json();
  if (!found.ok) throw new DataError(value.error);
  return value;
}

/** Submit a changed version of a request; return its id. */
export async function askFork(query) {
  const found = await fetch(`/api/fork${queryOf(query)}`, { method: "POST", headers: { "x-dalsegno-studio": "1" } });
  const value = await found.json();
  if (!found.ok) throw new DataError(value.error);
  return value.request_id;
}

/** Call `act` with news of a running deployment, until the result is called. */
export function follow(act) {
  if (kept) return () => {};
  const events = new EventSource("/api/live");
  events.onmessage = (event) => act(JSON.parse(event.data));
  events.onerror = () => act({ error: "The studio does not answer." });
  return () => events.close();
}

function queryOf(query) {
  const pairs = query instanceof URLSearchParams ? [...query] : Object.entries(query);
  const given = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `?${new URLSearchParams(given)}` : "";
}

// ---- an exported file ------------------------------------------------------------------------------------

function fromFile(what, query) {
  const { source, id } = query;
  if (what === "requests") return answer(what);
  if (what === "events") return eventsOf(source, id, query);
  if (what === "changes") return changesOf(source, id, query.name);
  const found = answer(what, source, id, query.seq ?? query.place);
  if (!found) throw new DataError("This is not in the exported file.");
  return found;
}

function answer(what, source = "", id = "", number = "") {
  return kept.answers[[what, source, id, number].join("\n")];
}

function eventsOf(source, id, { start = 0, kind = "", text = "" }) {
  const { rows, kinds } = answer("events", source, id);
  const wanted = text.toLowerCase();
  const chosen = rows.filter(
    (row) => (!kind || row.type === kind) &&
      (!wanted || [row.type, row.writer, row.text, row.seq].some((one) => String(one).toLowerCase().includes(wanted))),
  );
  return { total: chosen.length, start, kinds, rows: chosen.slice(start, start + PAGE) };
}

function changesOf(source, id, name) {
  const changes = [];
  const first = answer("state", source, id, 0);
  for (let place = 0; place < first.count; place++) {
    const { row, changes: all } = answer("state", source, id, place);
    for (const one of all) if (one.name === name) changes.push({ ...one, place, seq: row.seq, text: row.text, type: row.type });
  }
  return { name, changes };
}
