"""Send Dal Segno a picture and a question over NATS: beside ask_over_nats.py, which reads the answer.

dalsegno serve MODEL --ready-file ready.json
python ask_with_image.py ready.json MODEL cat.png "What is it?"
"""

import asyncio
import hashlib
import json
import mimetypes
import sys
import uuid
from pathlib import Path

import msgpack
import nats
from ask_over_nats import read_answer
from nats.js.api import ConsumerConfig

PIECE = 524_288


async def store(client, prefix, data, content_type):
    """Store a file's bytes; return its digest. Equal bytes are stored once, so a repetition is harmless."""
    digest = hashlib.sha256(data).hexdigest()
    subject = f"{prefix}.media.none.{digest}"  # `none`: requests without a tenant
    log = client.jetstream()
    for start in range(0, len(data), PIECE):
        await log.publish(f"{subject}.{start // PIECE}", data[start : start + PIECE])
    # Last: only with its head is the medium complete.
    head = {"size": len(data), "content_type": content_type}
    await log.publish(f"{subject}.head", json.dumps(head).encode())
    return digest


async def ask(server, model, path, question):
    client = await nats.connect(server["nats_url"], **server["nats_client"])
    log, prefix = client.jetstream(), server["prefix"]

    data, content_type = path.read_bytes(), mimetypes.guess_type(path)[0]
    digest = await store(client, prefix, data, content_type)
    picture = {"modality": "image", "digest": digest, "size": len(data), "content_type": content_type}
    content = [{"type": "image", "file": 0}, {"type": "text", "text": question}]
    request = {
        "model": model,
        "inputs": {
            "messages": [{"role": "user", "content": content}],
            "files": [picture],
            "input_modalities": ["image", "text"],
        },
        "params": {"temperature": 0, "max_tokens": 64},
    }
    request_id = uuid.uuid4().hex
    ack = await log.publish(f"{prefix}.request.{request_id}", msgpack.packb(request))

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


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        asyncio.run(ask(json.load(file), sys.argv[2], Path(sys.argv[3]), sys.argv[4]))
