"""Many requests with one reader, as a service should: beside ask_over_nats.py, which has the rules.

python service_over_nats.py ready.json demo "What does len do?" "What does sum do?"
"""

import asyncio
import json
import sys
import uuid

import msgpack
import nats
from ask_over_nats import read_answer
from nats.js.api import ConsumerConfig, DeliverPolicy


class Events:
    """The events of one request, in log order."""

    def __init__(self):
        self.queue = asyncio.Queue()

    @property
    async def messages(self):
        while True:
            yield await self.queue.get()


class Service:
    """One consumer for all requests of this process. `origin` keeps its answers apart from others'."""

    def __init__(self, client, prefix):
        self.log, self.prefix = client.jetstream(), prefix
        self.origin = f"service-{uuid.uuid4().hex[:8]}"
        self.stream = f"{prefix.upper()}_LOG"
        self.open = {}  # by request id: its events
        self.epoch = None  # the message of the last epoch, with which each request begins

    async def start(self):
        epoch, origin = f"{self.prefix}.conductor.epoch", self.origin
        wanted = [epoch, f"{self.prefix}.walk.*", f"{self.prefix}.output.{origin}.*.*"]
        config = ConsumerConfig(
            filter_subjects=wanted,
            deliver_policy=DeliverPolicy.NEW,
            idle_heartbeat=0.5,
            inactive_threshold=5,  # the server keeps the consumer of a killed process for so many seconds
        )
        events = await self.log.subscribe("", stream=self.stream, ordered_consumer=True, config=config)
        self.epoch = await self.log.get_last_msg(self.stream, epoch)
        self.task = asyncio.create_task(self.route(events))

    async def route(self, events):
        async for message in events.messages:
            tokens = message.subject.split(".")
            if tokens[1] == "conductor":
                self.epoch = message
                for request in self.open.values():
                    request.queue.put_nowait(message)
            elif (request := self.open.get(tokens[2 if tokens[1] == "walk" else 3])) is not None:
                request.queue.put_nowait(message)

    async def ask(self, model, question):
        request_id, events = uuid.uuid4().hex, Events()
        request = {
            "model": model,
            "inputs": {"messages": [{"role": "user", "content": question}]},
            "params": {"temperature": 0, "max_tokens": 64},
            "origin": self.origin,
        }
        events.queue.put_nowait(self.epoch)
        self.open[request_id] = events
        try:
            ack = await self.log.publish(f"{self.prefix}.request.{request_id}", msgpack.packb(request))
            await read_answer(events, ack.seq)
        finally:
            del self.open[request_id]


async def main(server, model, *questions):
    client = await nats.connect(server["nats_url"], **server["nats_client"])
    service = Service(client, server["prefix"])
    await service.start()
    for question in questions:  # or all at once
        await service.ask(model, question)
    service.task.cancel()
    await client.close()


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        asyncio.run(main(json.load(file), *sys.argv[2:]))
