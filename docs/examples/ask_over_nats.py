"""Send Dal Segno a question over NATS, without Dal Segno's client: pip install nats-py msgpack.

dalsegno serve demo --ready-file ready.json
python ask_over_nats.py ready.json demo "What does len do?"
"""

import asyncio
import json
import sys
import uuid

import msgpack
import nats
from nats.js.api import ConsumerConfig


async def ask(server, model, question):
    client = await nats.connect(server["nats_url"], **server["nats_client"])
    log, prefix = client.jetstream(), server["prefix"]

    request_id = uuid.uuid4().hex
    request = {
        "model": model,
        "inputs": {"messages": [{"role": "user", "content": question}]},
        "params": {"temperature": 0, "max_tokens": 64},
    }
    # An acked request is stored. Without an ack, publish the same again: one id is executed once.
    ack = await log.publish(f"{prefix}.request.{request_id}", msgpack.packb(request))

    # One consumer for all subjects, so that events arrive in log order, from the beginning.
    wanted = [
        f"{prefix}.conductor.epoch",
        f"{prefix}.walk.{request_id}",
        f"{prefix}.output.nats.{request_id}.*",
    ]
    config = ConsumerConfig(filter_subjects=wanted, idle_heartbeat=0.5)
    stream = f"{prefix.upper()}_LOG"
    events = await log.subscribe("", stream=stream, ordered_consumer=True, config=config)
    try:
        await read_answer(events, ack.seq)
    finally:
        await client.close()


async def read_answer(events, submission_seq):
    """Print the answer as it arrives; return when it is complete."""
    epoch = attempt = next_index = 0
    lives = {}  # by writer: the incarnation that may write this output
    placed_by = set()
    chunks = {}  # by index: valid chunks that may have arrived before their predecessor
    async for message in events.messages:
        event = msgpack.unpackb(message.data)
        kind, writer = event["type"], message.subject.rpartition(".")[2]
        if kind == "epoch.opened.v1":
            epoch = max(epoch, event["epoch"])
        elif event["writer"] == "conductor" and event["epoch"] < epoch:
            continue  # from a deposed conductor

        elif kind in ("request.admitted.v1", "request.resumed.v1"):
            if event["id"] not in placed_by:  # a second copy may be stored later
                placed_by.add(event["id"])
                lives = event["lives"]
                if event["attempt"] > attempt:  # its fence may be stored later
                    attempt, chunks = event["attempt"], {}
        elif kind == "output.chunk.v1" and lives.get(writer) != event["incarnation"]:
            continue  # by a process that has no order for this request

        elif kind == "output.fence.v1" and event["attempt"] > attempt:
            attempt, chunks = event["attempt"], {}  # chunks that are not printed yet are computed again
            lives = event.get("lives", {})  # nobody, until the request is resumed
        elif kind == "output.chunk.v1":
            index = event.get("index", 0)  # fields with their default value are omitted
            if event["attempt"] >= attempt and index >= next_index:
                chunks.setdefault(index, event)  # the first of two copies counts
            while next_index in chunks:
                print(chunks.pop(next_index).get("text", ""), end="", flush=True)
                next_index += 1

        elif kind == "request.finished.v1":
            print()
            print(event["finish_reasons"], event["usage"], file=sys.stderr)
            return
        elif kind == "request.rejected.v1" and event["submission_seq"] == submission_seq:
            raise SystemExit(f"rejected: {event['failure']}")
        elif kind == "request.failed.v1":
            raise SystemExit(f"failed: {event['failure']}")
        elif kind == "request.cancelled.v1":
            raise SystemExit(f"cancelled: {event['reason']}")


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        asyncio.run(ask(json.load(file), *sys.argv[2:4]))
