"""The shortest example: one JSON request, and the answer from plain NATS subscriptions.

    python ask_in_json.py ready.json demo "What does len do?"

It is for experiments: it misses events while its connection is lost; see ask_over_nats.py.
"""

import asyncio
import json
import sys
import uuid

import msgpack
import nats


async def ask(server, model, question):
    client = await nats.connect(server["nats_url"], **server["nats_client"])
    prefix, request_id = server["prefix"], uuid.uuid4().hex
    outputs = await client.subscribe(f"{prefix}.output.nats.{request_id}.*")
    ends = await client.subscribe(f"{prefix}.walk.{request_id}")

    request = {"model": model, "inputs": {"text": question}, "params": {"temperature": 0, "max_tokens": 64}}
    await client.jetstream().publish(f"{prefix}.request.{request_id}", json.dumps(request).encode())

    writers = {}  # the ranks that the request is placed on, each with its incarnation
    async for message in ends.messages:
        event = msgpack.unpackb(message.data)
        if event["type"] != "request.admitted.v1":
            break
        writers = event["lives"]
    messages = [await outputs.next_msg() for _ in range(outputs.pending_msgs)]
    for message in messages:
        writer, chunk = message.subject.rpartition(".")[2], msgpack.unpackb(message.data)
        if writers.get(writer) == chunk["incarnation"]:
            print(chunk.get("text", ""), end="")
    print()
    print(event["type"], event.get("failure", event.get("usage")), file=sys.stderr)
    await client.close()
    if event["type"] != "request.finished.v1":  # rejected, failed or cancelled
        raise SystemExit(1)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        asyncio.run(ask(json.load(file), *sys.argv[2:4]))
