// The gateway's public routes. The API key, if one is needed, stays in this tab.

const KEY = "dalsegno.key";
const LINGER_S = 30; // how long an answer goes on without its reader
const AGAIN_MS = 500;

/** An answer that is no success; `code` and `status` are the gateway's. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error.message ?? `the gateway answered ${status}`);
    this.status = status;
    this.code = error.code ?? "";
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** The connection broke, or there is none. */
class LostError extends Error {}

/** Wait for something from the network. Browsers have no type of error for it: a TypeError becomes a LostError. */
async function received(promise) {
  try {
    return await promise;
  } catch (error) {
    throw error instanceof TypeError ? new LostError("The gateway cannot be reached.", { cause: error }) : error;
  }
}

async function asked(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const response = await received(fetch(path, { ...options, headers }));
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ApiError(response.status, body.error ?? {});
}

/** The JSON answer of a route. */
export async function get(path, signal) {
  return (await asked(path, { signal })).json();
}

/** The health document, also of a deployment that is not ready. */
export async function health() {
  return (await fetch("/health")).json();
}

/** Store a file; return its object. */
export async function upload(file) {
  const form = new FormData();
  form.append("purpose", "user_data");
  form.append("file", file, file.name || "file");
  return (await asked("/v1/files", { method: "POST", body: form })).json();
}

/**
 * Ask `/generate`. Calls `begun(requestId)` with the id on the log, and `line(object)` with each line of the
 * stream; the last line has `finish_reason` in its metadata. A connection that breaks is opened again, and the
 * answer goes on where it was: `broken(true)` says that it is gone, `broken(false)` that it is back. An abort
 * of `signal` cancels the request.
 */
export async function generate(body, { signal, begun, line, broken }) {
  const id = `page-${randomHex()}`;
  const json = JSON.stringify({ ...body, streaming: true, request_id: id, linger_s: LINGER_S });
  const cancel = () => cancelled(id);
  signal.addEventListener("abort", cancel);
  let [position, isWhole, lostMs] = [null, false, null]; // the index of the last line; since when it is broken
  const take = (one) => {
    if (lostMs !== null) broken(false);
    lostMs = null;
    line(one);
    position = one.metadata.index ?? position;
    isWhole ||= Boolean(one.metadata.finish_reason);
  };
  try {
    for (;;) {
      await readLines(json, position, { signal, begun, line: take }).catch((error) => {
        if (signal.aborted || !isPassing(error, lostMs !== null)) throw error;
      });
      if (isWhole) return;
      if (lostMs === null) broken(true);
      lostMs ??= performance.now();
      if (performance.now() - lostMs > LINGER_S * 1000) throw new Error("The connection to the gateway is lost.");
      await pause(AGAIN_MS, signal);
    }
  } finally {
    signal.removeEventListener("abort", cancel);
  }
}

async function readLines(body, position, { signal, begun, line }) {
  const headers = { "content-type": "application/json" };
  if (position !== null) headers["last-event-id"] = position;
  const response = await asked("/generate", { method: "POST", headers, body, signal });
  begun(response.headers.get("x-dalsegno-request-id"));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await received(reader.read());
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const one of lines) if (one) line(JSON.parse(one));
  }
}

/** True for an error of the connection, or of a gateway that is not back yet. */
function isPassing(error, isAgain) {
  return error instanceof LostError || (isAgain && error instanceof ApiError && [502, 503, 504].includes(error.status));
}

/** Cancel a request, also while the page is being closed. */
function cancelled(id) {
  asked(`/v1/requests/${id}`, { method: "DELETE", keepalive: true }).catch(() => {}); // it ended, or lingers out
}

function randomHex() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (one) => one.toString(16).padStart(2, "0")).join("");
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });
}

/** The bytes of a line of the stream. */
export function bytesOf(line) {
  return Uint8Array.from(atob(line.data), (one) => one.charCodeAt(0));
}
