"""Services that use a plain NATS client: their requests are served, their malformed events do no harm.

The tests read the log as such a service does; `docs/nats.md` is the tested contract.
"""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest

from shared.events import (
    Event,
    OutputChunk,
    RequestAdmitted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    WalkStopped,
)
from tests.e2e import clients
from tests.e2e.clients import JUNK
from tests.e2e.deploy import Running

PAGE: Final = clients.ROOT / "docs" / "nats.md"
QUESTION: Final = "What does len do?"
ANSWER: Final = "Return the number of items in a container.\n"
_numbers: Iterator[int] = count(1)


def new_id() -> str:
    return f"nats-{next(_numbers)}"


def request(**changes: Any) -> dict[str, Any]:
    good = {
        "model": "demo",
        "inputs": {"messages": [{"role": "user", "content": QUESTION}]},
        "params": {"temperature": 0, "max_tokens": 32},
    }
    return good | changes


def asking(content: Any) -> dict[str, Any]:
    return request(inputs={"messages": [{"role": "user", "content": content}]})


def nested(levels: int) -> Any:
    value: Any = "deep"
    for _ in range(levels):
        value = [value]
    return value


# ---- the examples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ask_over_nats.py", "ask_in_json.py"])
def test_the_examples_print_the_answer(name: str, deployment: Running) -> None:
    command = [sys.executable, "-P", str(clients.example(name)), str(deployment.ready_file), "demo", QUESTION]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, ANSWER), ended.stderr


async def test_a_service_asks_many_questions_with_one_reader(deployment: Running) -> None:
    command = [sys.executable, str(clients.example("service_over_nats.py")), str(deployment.ready_file)]
    async with clients.reader(deployment) as reader:
        before = (await reader.log.state()).consumers
        asked = await asyncio.create_subprocess_exec(
            *command, "demo", *[QUESTION] * 20, stdout=asyncio.subprocess.PIPE
        )
        assert asked.stdout is not None
        printed, most = b"", 0
        while line := await asked.stdout.readline():
            printed += line
            most = max(most, (await reader.log.state()).consumers)
        assert await asked.wait() == 0
    assert printed.decode() == ANSWER * 20
    assert most <= before + 2, "the reader's own one included"


@pytest.mark.parametrize("name", ["ask_over_nats.py", "ask_in_json.py"])
def test_an_example_that_is_rejected_says_why_and_ends_with_1(name: str, deployment: Running) -> None:
    command = [sys.executable, "-P", str(clients.example(name)), str(deployment.ready_file), "none", QUESTION]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert "model_not_found" in ended.stderr


@pytest.mark.parametrize("name", ["ask_over_nats.py", "ask_in_json.py", "ask_with_image.py"])
def test_the_page_shows_the_examples_as_they_are_and_they_import_nothing_of_ours(name: str) -> None:
    script = clients.example(name).read_text()
    assert f"```python\n{script}```" in PAGE.read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", script, re.MULTILINE))
    standard = {"asyncio", "hashlib", "json", "mimetypes", "pathlib", "sys", "uuid"}
    assert imported <= standard | {"ask_over_nats", "msgpack", "nats"}


def test_a_picture_for_a_model_of_text_is_rejected_by_its_place(deployment: Running, tmp_path: Path) -> None:
    picture = tmp_path / "cat.png"
    picture.write_bytes(bytes(600_000))
    command = [sys.executable, str(clients.example("ask_with_image.py")), str(deployment.ready_file), "demo"]
    ended = subprocess.run(
        [*command, str(picture), QUESTION], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    assert "unsupported_modality" in ended.stderr
    assert "files[0]: this model takes text, found image" in ended.stderr


# ---- idempotence ---------------------------------------------------------------------------------------


async def test_the_same_id_twice_executes_once(deployment: Running) -> None:
    request_id = new_id()
    packed, plain = msgpack.packb(request()), json.dumps(request()).encode()
    async with clients.service(deployment) as service, clients.reader(deployment) as reader:
        for copy in (packed, packed, plain):  # JSON or MessagePack: it is the same request
            await service.publish(f"ds.request.{request_id}", copy)
        await reader.until(reader.subjects.walk(request_id), RequestFinished)
        await service.publish(f"ds.request.{request_id}", packed)  # long after it was answered
        await served(service, reader)  # so the copy before has been read
        events = await reader.events(request_id)
        text, _ = await reader.answer(request_id)
    assert f"{text}\n" == ANSWER
    kinds = [type(event) for event in events]
    assert kinds.count(RequestAdmitted) == kinds.count(RequestFinished) == 1
    assert RequestRejected not in kinds
    offsets = [event.text_offset for event in events if isinstance(event, OutputChunk) and event.text]
    assert len(offsets) == len(set(offsets))
    assert clients.run_on(deployment, "replay", request_id).returncode == 0


async def test_the_same_id_with_another_body_is_a_conflict_that_names_its_submission(
    deployment: Running,
) -> None:
    request_id = new_id()
    subject = f"ds.request.{request_id}"
    async with clients.service(deployment) as service, clients.reader(deployment) as reader:
        first = await service.publish(subject, msgpack.packb(request()))
        other = await service.publish(subject, msgpack.packb(asking("What does print do?")))
        _, rejected = await reader.until(reader.subjects.walk(request_id), RequestRejected)
        await reader.until(reader.subjects.walk(request_id), RequestFinished)
        text, _ = await reader.answer(request_id)
    assert (rejected.failure.code, rejected.failure.status) == ("request_id_conflict", 409)
    assert rejected.submission_seq == other.seq != first.seq
    assert f"{text}\n" == ANSWER  # the first one's
    assert clients.run_on(deployment, "replay", request_id).returncode == 0


# ---- what cannot be read -------------------------------------------------------------------------------

UNREADABLE: Final[dict[str, bytes]] = {
    "nothing": b"",
    "no event": b"\xc1",
    "text": b"What does len do?",
    "half a JSON object": b'{"model": "demo", "inputs": {"te',
    "half a MessagePack map": msgpack.packb(request())[:-3],
    "an array": msgpack.packb([request()]),
    "no model": msgpack.packb({"inputs": {"text": "hi"}}),
    "no inputs": msgpack.packb({"model": "demo"}),
    "two inputs": msgpack.packb(request(inputs={"text": "hi", "messages": []})),
    "no input": msgpack.packb(request(inputs={})),
    "a misspelt input": msgpack.packb(request(inputs={"txt": "hi"})),
    "a misspelt parameter": msgpack.packb(request(params={"temprature": 0})),
    "a parameter of the wrong type": msgpack.packb(request(params={"max_tokens": "many"})),
    "no tokens": msgpack.packb(request(params={"max_tokens": 0})),
    "a temperature that is no number": msgpack.packb(request(params={"temperature": float("nan")})),
    "a seed beyond 64 bits": b'{"model":"demo","inputs":{"text":"hi"},"params":{"seed":' + b"9" * 30 + b"}}",
    "a negative token": msgpack.packb(request(inputs={"token_ids": [1, -1]})),
    "too many stops": msgpack.packb(request(params={"stop": ["x"] * 17})),
    "a name a megabyte long": msgpack.packb(request(params={"x" * 1_000_000: 1})),
    "a model a megabyte long": msgpack.packb(request(model="x" * 1_000_000)),
    "another event": msgpack.packb({"type": "request.finished.v1", "model": "demo"}),
    "another request's": msgpack.packb(request(request_id="another")),
    "the conductor's name": msgpack.packb(request(writer="conductor", epoch=10_000)),
    "an origin of no characters": msgpack.packb(request(origin="")),
    "an origin of two tokens": msgpack.packb(request(origin="a.b")),
    "an origin that breaks the line": msgpack.packb(request(origin="a 5\r\nhello\r\n")),
    "invalid UTF-8 in MessagePack": msgpack.packb(request()).replace(b"len", b"\xff\xfe\xfd"),
    "invalid UTF-8 in JSON": json.dumps(request()).encode().replace(b"len", b"\xff\xfe\xfd"),
    "half a surrogate pair": json.dumps(asking("\ud800")).encode(),
    "40 levels": msgpack.packb(asking(nested(40))),
    "900 levels": json.dumps(asking(nested(900))).encode(),
    "100,000 levels in JSON": b'{"model":"demo","inputs":{"messages":[' + b"[" * 100_000,
    "100,000 levels in MessagePack": b"\x82\xa5model\xa4demo\xa6inputs" + b"\x91" * 100_000,
    "keys that are no strings": msgpack.packb(asking([{1: 2}])),
    "an extension type": msgpack.packb(asking(msgpack.ExtType(5, b"x"))),
    "a number beyond 64 bits": json.dumps(asking([10**30])).encode(),
}
IMPOSSIBLE: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "another model": (request(model="gpt-17"), "model_not_found"),
    "more tokens than the context": (request(params={"max_tokens": 100_000}), "context_length_exceeded"),
    "more text than the context": (asking("len " * 20_000), "context_length_exceeded"),
    "an order larger than the log takes": (asking("x" * (8 * 1024 * 1024 - 400)), "payload_too_large"),
    "an empty prompt": (request(inputs={"text": "", "chat": False}), "invalid_request"),
    "no messages": (request(inputs={"messages": []}), "invalid_request"),
    "a message without a role": (request(inputs={"messages": [{"content": "hi"}]}), "invalid_request"),
    "a token nobody has": (request(inputs={"token_ids": [2**31 - 1]}), "invalid_token_id"),
    "an image": (
        request(inputs={"text": "x", "files": [{"modality": "image", "digest": "0" * 64, "size": 1}]}),
        "unsupported_modality",
    ),
    "bytes in an event": (
        request(inputs={"text": "x", "files": [{"modality": "image", "data": b"x"}]}),
        "inline_media",
    ),
    "an answer in pictures": (
        request(inputs={"text": "x", "output_modalities": ["image"]}),
        "unsupported_modality",
    ),
}


@pytest.mark.parametrize("what", UNREADABLE)
async def test_what_cannot_be_read_is_rejected_and_the_next_request_is_served(
    what: str, deployment: Running
) -> None:
    request_id = new_id()
    async with clients.service(deployment) as service, clients.reader(deployment) as reader:
        ack = await service.publish(f"ds.request.{request_id}", UNREADABLE[what])
        _, rejected = await reader.until(reader.subjects.walk(request_id), RequestRejected)
        await served(service, reader)
        events = await reader.events(request_id)
    assert not any(isinstance(event, RequestAdmitted) for event in events)
    assert (rejected.failure.code, rejected.failure.status) == ("malformed_request", 400)
    assert rejected.submission_seq == ack.seq


@pytest.mark.parametrize("what", IMPOSSIBLE)
async def test_what_cannot_be_served_ends_with_a_typed_error_and_the_next_request_is_served(
    what: str, deployment: Running
) -> None:
    request_id, (body, code) = new_id(), IMPOSSIBLE[what]
    async with clients.service(deployment) as service, clients.reader(deployment) as reader:
        await service.publish(f"ds.request.{request_id}", msgpack.packb(body))
        await served(service, reader)
        _, end = await reader.until(
            reader.subjects.walk(request_id), Event, lambda event: not isinstance(event, RequestAdmitted)
        )
    assert isinstance(end, RequestRejected | RequestFailed)
    assert end.failure.code == code
    assert 400 <= end.failure.status < 500


@pytest.mark.parametrize("request_id", ["not-a-token!", "ü", "x" * 65, "$"])
async def test_an_id_that_is_none_is_rejected_under_that_very_id(
    request_id: str, deployment: Running
) -> None:
    async with clients.service(deployment) as service, clients.reader(deployment) as reader:
        await service.publish(f"ds.request.{request_id}", msgpack.packb(request()))
        _, rejected = await reader.until(reader.subjects.walk(request_id), RequestRejected)
        await served(service, reader)
    assert rejected.failure.code == "malformed_request"


async def test_junk_beside_the_requests_harms_nobody(deployment: Running) -> None:
    """Of a conductor: `tests/fuzz/test_bus.py`, whose deployment shows a role's credentials."""
    request_id = new_id()
    async with clients.service(deployment) as service, clients.reader(deployment) as reader:
        for junk in JUNK:
            for subject in ("control.x", f"control.{request_id}"):
                await service.publish(f"ds.{subject}", junk)
        await served(service, reader)


async def served(service: Any, reader: clients.Reader) -> None:
    """Submit a request and wait for its answer: the conductor has then read everything before it."""
    request_id = new_id()
    await service.publish(f"ds.request.{request_id}", msgpack.packb(request()))
    await reader.until(reader.subjects.walk(request_id), RequestFinished)
    text, _ = await reader.answer(request_id)
    assert f"{text}\n" == ANSWER


def test_a_log_full_of_junk_is_replayed(deployment: Running) -> None:
    replayed = clients.run_on(deployment, "replay", "--all")
    assert replayed.returncode == 0, replayed.stdout


# ---- cancel --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"{}", b'{"reason": "enough"}', msgpack.packb({"reason": "enough"})])
async def test_a_request_is_cancelled_over_nats(body: bytes, random_deployment: Running) -> None:
    running, request_id = random_deployment, new_id()
    model = running_model(running)
    params = {"max_tokens": 400, "ignore_eos": True}
    async with clients.service(running) as service, clients.reader(running) as reader:
        await service.publish(f"ds.request.{request_id}", msgpack.packb(request(model=model, params=params)))
        await reader.until(reader.subjects.output("nats", request_id, "w0"), OutputChunk)
        await service.publish(f"ds.control.{request_id}", body)
        _, cancelled = await reader.until(reader.subjects.walk(request_id), RequestCancelled)
        _, stopped = await reader.until(reader.subjects.done(0, request_id), WalkStopped)
    assert cancelled.reason == ("enough" if b"enough" in body else "cancelled")
    assert 0 < stopped.tokens < 400
    assert clients.run_on(running, "replay", request_id).returncode == 0


async def test_a_cancel_after_the_end_is_too_late_and_changes_nothing(deployment: Running) -> None:
    request_id = new_id()
    async with clients.service(deployment) as service, clients.reader(deployment) as reader:
        await service.publish(f"ds.request.{request_id}", msgpack.packb(request()))
        await reader.until(reader.subjects.walk(request_id), RequestFinished)
        await service.publish(f"ds.control.{request_id}", b"{}")
        await served(service, reader)
        kinds = [type(event) for event in await reader.events(request_id)]
    assert RequestCancelled not in kinds
    assert clients.run_on(deployment, "replay", request_id).returncode == 0


def running_model(running: Running) -> str:
    """The model name of a bare folder is the folder's name."""
    said = re.search(r"Dal Segno serves (\S+) at", running.log())
    assert said is not None
    return said[1]
