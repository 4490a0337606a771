// The page: a conversation with the model, and the way of each request through the system.

import { ApiError, generate, get, health } from "./api.js";
import { Answer } from "./answer.js";
import { Attachments, preview } from "./attachments.js";
import { fill, h } from "./dom.js";
import { Settings } from "./settings.js";
import { showRequest } from "./way.js";

const HEALTH_MS = 5000;
const WAY_MS = 700;
const by = (id) => document.getElementById(id);
const [messages, prompt, send, stop, panel] = ["messages", "prompt", "send", "stop", "request"].map(by);

let model = null;
let turns = []; // {role, content, files} and, of the assistant, {answer}
let running = null; // the AbortController of the answer that is being written

const settings = new Settings(by("options"), {
  changed: () => turns.forEach((one) => one.answer?.show()),
  unlocked: loadModel,
});
const attachments = new Attachments(by("attached"), tell);

// ---- the model -----------------------------------------------------------------------------------------
async function loadModel() {
  try {
    const { data } = await get("/v1/models");
    model = await get(`/v1/models/${data[0].id}`);
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) {
      by("model").textContent = "needs an API key";
      settings.askForKey();
    } else tell(error.message);
    return;
  }
  by("model").textContent = model.id;
  document.title = `${model.id} · Dal Segno`;
  if (settings.model !== model.id) settings.build(model); // a new key leaves the fields as they are
  const media = model.input_modalities.filter((one) => one !== "text");
  by("attach").hidden = !media.length;
  by("files").accept = media.map((one) => (one === "tensor" ? ".npz,.safetensors,.npy" : `${one}/*`)).join(",");
  prompt.placeholder = model.input_modalities.includes("text") ? "Ask something" : `Attach ${media.join(" or ")}, and send`;
  if (!turns.length) welcome();
}

function welcome() {
  const outputs = model.output_modalities.filter((one) => !["embedding", "hidden_states"].includes(one)).join(", ");
  fill(messages, h("div.welcome", {}, h("h2", {}, model.id), h("p", {}, `Takes ${model.input_modalities.join(", ")}; answers in ${outputs}.`)));
}

async function watchHealth() {
  let [word, state] = ["the gateway does not answer", "bad"];
  try {
    const found = await health();
    word = found.status === "healthy" ? "ready" : found.missing[0] ?? found.status;
    state = found.status === "healthy" ? "good" : "warn";
  } catch {
    // said above
  }
  if (!model && state !== "bad" && !by("model").textContent) loadModel(); // it did not answer before
  const element = by("health");
  if (element.textContent !== word) element.textContent = word; // otherwise it is not news
  element.className = state;
  setTimeout(watchHealth, HEALTH_MS);
}

// ---- a turn --------------------------------------------------------------------------------------------
async function ask() {
  if (running || !model) return;
  const text = prompt.value.trim();
  running = new AbortController(); // from here on a second Enter does nothing
  const files = await attachments.taken();
  if (!text && !files.length) {
    running = null;
    return;
  }
  prompt.value = "";
  messages.querySelector(".welcome")?.remove();
  turns.push({ role: "user", content: text, files });
  const shown = h("article.message.mine", { "aria-label": "You" }, files.map((one) => preview(one.file) ?? h("p.dim", {}, one.file.name)), h("p", {}, text));
  const answer = new Answer(model.reasoning, settings);
  messages.append(shown, answer.element);
  const chat = turns;
  await written(answer, bodyOf(text, files), () => {
    if (answer.error) {
      chat.pop(); // a question without an answer is no part of the chat
      prompt.value ||= text;
    } else chat.push({ role: "assistant", content: answer.said, files: [], answer });
  });
}

function bodyOf(text, files) {
  const { body } = settings;
  if (!settings.isChat) return { ...body, text, files: files.map((one) => one.id), ...plain() };
  const chat = turns.map(({ role, content, files: with_ }) => ({ role, content: with_.length ? parts(content, with_) : content }));
  return { ...body, messages: settings.system ? [{ role: "system", content: settings.system }, ...chat] : chat };
}

function plain() {
  const chats = model.output_modalities.includes("text") && model.input_modalities.includes("text");
  return chats ? { chat: false } : {};
}

function parts(text, files) {
  const found = files.map((one) => ({ type: "file", file: { file_id: one.id } }));
  return text ? [...found, { type: "text", text }] : found;
}

async function written(answer, body, ended) {
  const { signal } = running;
  setRunning(true);
  let timeline = null;
  const draw = () => showRequest(panel, answer, timeline);
  const look = async () => {
    if (answer.id) timeline = await get(`/v1/requests/${answer.id}/timeline`).catch(() => timeline);
    if (!running || running.signal === signal) draw(); // not over that of the next answer
  };
  const looking = setInterval(look, WAY_MS);
  let [error, isStopped] = ["", false];
  try {
    await generate(body, {
      signal,
      begun: (id) => (answer.id = id),
      broken: (is) => answer.wait(is ? "The connection broke. Trying again …" : ""),
      line: (one) => {
        const isAtEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 60;
        answer.take(one);
        if (isAtEnd) answer.element.scrollIntoView({ block: "end" });
        draw();
      },
    });
  } catch (found) {
    isStopped = signal.aborted;
    if (!isStopped) error = found.message;
    if (found.code === "context_length_exceeded" && turns.length > 1) error += " The chat is full: begin a new one.";
    if (found.status === 401) settings.askForKey();
  }
  clearInterval(looking);
  answer.end(error, { isStopped });
  ended();
  answer.element.scrollIntoView({ block: "end" });
  setRunning(false);
  answer.element.addEventListener("click", () => !running && draw());
  await look();
}

function setRunning(is) {
  if (!is) running = null;
  send.hidden = is;
  stop.hidden = !is;
}

function tell(message) {
  messages.append(h("p.failed", { role: "alert" }, message));
  messages.scrollTop = messages.scrollHeight;
}

// ---- what people do ------------------------------------------------------------------------------------
by("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
prompt.addEventListener("paste", (event) => !by("attach").hidden && attachments.add(event.clipboardData.files));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
stop.addEventListener("click", () => running?.abort());
addEventListener("pagehide", () => running?.abort());
by("files").addEventListener("change", (event) => {
  attachments.add(event.target.files);
  event.target.value = "";
});
by("new").addEventListener("click", () => {
  running?.abort();
  turns = [];
  fill(panel);
  if (model) welcome();
  prompt.focus();
});
for (const kind of ["dragover", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    if (kind === "drop" && !by("attach").hidden) attachments.add(event.dataTransfer.files);
  });
}

settings.build(null);
loadModel();
watchHealth();
prompt.focus();
