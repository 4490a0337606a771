// Send Dal Segno a question over NATS from JavaScript: Node 20 or later, and
//
//     npm install @nats-io/transport-node @nats-io/jetstream @msgpack/msgpack
//     dalsegno serve demo --ready-file ready.json
//     node ask.mjs ready.json demo "What does len do?"

import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { decode } from "@msgpack/msgpack";
import { jetstream } from "@nats-io/jetstream";
import { connect } from "@nats-io/transport-node";

const [readyFile, model, question] = process.argv.slice(2);
const server = JSON.parse(readFileSync(readyFile, "utf8"));
const { user, password: pass, token } = server.nats_client;
const client = await connect({ servers: server.nats_url, user, pass, token });
const { prefix } = server;

const id = randomUUID();
const request = { model, inputs: { text: question }, params: { temperature: 0, max_tokens: 64 } };
// An acked request is stored. Without an ack, publish the same again: one id is executed once.
const ack = await jetstream(client).publish(`${prefix}.request.${id}`, JSON.stringify(request));

// One consumer for all subjects, so that events arrive in log order, from the beginning.
const consumer = await jetstream(client).consumers.getPushConsumer(`${prefix.toUpperCase()}_LOG`, {
  filter_subjects: [`${prefix}.conductor.epoch`, `${prefix}.walk.${id}`, `${prefix}.output.nats.${id}.*`],
});

let epoch = 0;
let attempt = 0;
let next = 0;
let lives = {}; // by writer: the incarnation that may write this output
const placedBy = new Set();
let early = new Map(); // by index: valid chunks that arrived before their predecessor

for await (const message of await consumer.consume()) {
  const event = decode(message.data); // fields with their default value are omitted
  if (event.type === "epoch.opened.v1") {
    epoch = Math.max(epoch, event.epoch);
  } else if (event.writer === "conductor" && event.epoch < epoch) {
    continue; // from a deposed conductor
  } else if (event.type === "request.admitted.v1" || event.type === "request.resumed.v1") {
    if (placedBy.has(event.id)) continue; // a second copy, perhaps of an earlier placement
    placedBy.add(event.id);
    lives = event.lives;
    if (event.attempt > attempt) {
      attempt = event.attempt; // its fence may be stored later
      early = new Map();
    }
  } else if (event.type === "output.chunk.v1" && lives[message.subject.split(".").pop()] !== event.incarnation) {
    continue; // by a process that has no order for this request
  } else if (event.type === "output.fence.v1" && event.attempt > attempt) {
    attempt = event.attempt; // a worker died: chunks that are not printed yet are computed again
    early = new Map();
    lives = event.lives ?? {}; // nobody, until the request is resumed
  } else if (event.type === "output.chunk.v1") {
    const index = event.index ?? 0;
    if (event.attempt >= attempt && index >= next && !early.has(index)) early.set(index, event);
    for (; early.has(next); early.delete(next++)) process.stdout.write(early.get(next).text ?? "");
  } else if (event.type === "request.finished.v1") {
    console.log();
    console.error(event.finish_reasons, event.usage);
    break;
  } else if (event.type === "request.failed.v1" || event.type === "request.cancelled.v1") {
    console.error(event.failure ?? event.reason);
    process.exitCode = 1;
    break;
  } else if (event.type === "request.rejected.v1" && event.submission_seq === ack.seq) {
    console.error(event.failure);
    process.exitCode = 1;
    break;
  }
}
await client.close();
