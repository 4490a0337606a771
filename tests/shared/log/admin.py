"""An operator's actions on a server, unknown to the deployment, through nats-py."""

import nats

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
