"""Damaged events on every subject: all roles stay alive, and answer valid requests."""

import asyncio
import secrets
from collections.abc import Iterator
from typing import Final

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.events import Inputs, Params, RequestCancel, RequestSubmitted, encode
from shared.log.nats import jetstream
from shared.subjects import Subjects
from tests.e2e import clients, deploy
from tests.e2e.clients import JUNK
from tests.e2e.deploy import Running
from tests.fuzz.damage import FUZZED, damaged_bytes

pytestmark = pytest.mark.processes


_SUBMITTED: Final = encode(
    RequestSubmitted(
        id="x.1", writer="x", number=1, request_id="r", model="demo", inputs=Inputs(text="hello"),
        params=Params(max_tokens=2, stop=["\n"], temperature=0.5),
    )
)  # fmt: skip
_CANCEL: Final = encode(RequestCancel(id="x.2", writer="x", number=2, request_id="r", reason="no more"))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A separate deployment, so that damaged events stay in its log."""
    with deploy.serve(tmp_path_factory.mktemp("bus"), as_program=True) as running:
        yield running


def test_damaged_events_harm_nobody(own: Running) -> None:
    before = own.pids
    subjects = Subjects(own.prefix)

    with asyncio.Runner() as runner:
        conductor, worker = (
            runner.run(
                jetstream.connect(own.nats_url, credentials=own.shown_by(pid), subjects=subjects, name="fuzz")
            )
            for pid in (before.conductor[0], before.worker["0"])
        )
        client = runner.run(
            jetstream.connect(own.nats_url, credentials=own.client, subjects=subjects, name="fuzz")
        )

        @given(data=st.data())
        @FUZZED
        def publish(data: st.DataObject) -> None:
            request_id = f"f-{secrets.token_hex(6)}"
            log, subject = data.draw(
                st.sampled_from(
                    (
                        (client, subjects.request(request_id)),
                        (client, subjects.control(request_id)),
                        (conductor, subjects.walk(request_id)),
                        (conductor, subjects.ready(0, request_id)),
                        (worker, subjects.done(0, request_id)),
                        (worker, subjects.output("nats", request_id, "w0")),
                        (conductor, subjects.epoch),
                    )
                )
            )
            whole = data.draw(st.sampled_from((_SUBMITTED, _CANCEL)))
            runner.run(log.publish(subject, data.draw(damaged_bytes(whole))))

        publish()
        for log in (client, conductor, worker):
            runner.run(log.close())

    assert answers(own)
    assert own.pids == before  # nobody died


async def test_junk_of_the_conductor_harms_nobody(own: Running) -> None:
    before = own.pids
    conductor = own.shown_by(before.conductor[0])
    async with clients.log_of(own, conductor) as log:
        for junk in JUNK:
            await log.publish(f"{own.prefix}.walk.{secrets.token_hex(6)}", junk)

    assert await asyncio.to_thread(answers, own)
    assert own.pids == before


def answers(running: Running) -> bool:
    """True if it gives the answer it gave before: it has then read everything before the question."""
    question = {"model": "demo", "messages": [{"role": "user", "content": "What does len do?"}]}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=question | {"temperature": 0}, timeout=60)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text == "Return the number of items in a container."
