// The gateway's public routes. The API key, if one is needed, stays in this tab.

const KEY = "dalsegno.key";

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

async function asked(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const response = await fetch(path, { ...options, headers });
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
 * stream; the last line has `finish_reason` in its metadata.
 */
export async function generate(body, { signal, begun, line }) {
  const response = await asked("/generate", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, streaming: true }),
    signal,
  });
  begun(response.headers.get("x-dalsegno-request-id"));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const one of lines) if (one) line(JSON.parse(one));
  }
}

/** The bytes of a line of the stream. */
export function bytesOf(line) {
  return Uint8Array.from(atob(line.data), (one) => one.charCodeAt(0));
}
