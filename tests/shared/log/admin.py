"""An operator's actions on a server, unknown to the deployment, through nats-py."""

import json

import nats

from shared.log.nats.api import MAX_CONSUMERS
from shared.log.nats.private_server import NatsServer


async def delete_stream(server: NatsServer, stream: str) -> None:
    client = await nats.connect(server.url, token=server.token)
    await client.jetstream().delete_stream(stream)
    await client.close()


async def consumers_of(server: NatsServer, stream: str) -> int:
    client = await nats.connect(server.url, token=server.token)
    info = await client.jetstream().stream_info(stream)
    await client.close()
    return int(info.state.consumer_count)


async def say(server: NatsServer, command: bytes) -> None:
    """Send a raw protocol command, which no well-behaved client would send."""
    client = await nats.connect(server.url, token=server.token)
    client._transport.write(command)
    await client.flush()
    await client.close()


async def use_up_consumers(server: NatsServer, stream: str) -> None:
    """Create consumers until the stream refuses one; they last for minutes without a subscriber."""
    client = await nats.connect(server.url, token=server.token)
    number = 0
    while True:
        config = {
            "name": f"greedy-{number}",
            "deliver_subject": f"_INBOX.greedy.{number}",
            "ack_policy": "none",
            "inactive_threshold": 250 * 10**9,
            "mem_storage": True,
        }
        request = json.dumps({"stream_name": stream, "config": config}).encode()
        reply = await client.request(f"$JS.API.CONSUMER.CREATE.{stream}.greedy-{number}", request)
        error = json.loads(reply.data).get("error")
        if error is not None:
            assert error["err_code"] == MAX_CONSUMERS, error
            break
        number += 1
    await client.close()
