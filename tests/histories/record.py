"""Records the histories: `python -m tests.histories.record [NAME...]` serves, asks, harms, and exports.

The models are the bundled demo and the tiny Orpheus of the tests, so anybody can do it, in two minutes. The
payloads are left out: the histories are about decisions, and small.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from dalsegno.bundle import bundle_file
from shared.events import (
    Event,
    Inputs,
    Params,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestSubmitted,
    WalkBegun,
    decode,
    encode,
)
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer, Reader
from tests.e2e.deploy import Running
from tests.histories import FOLDER, WRONG
from tests.tiny.orpheus import tiny_orpheus

QUESTION: Final = "What does zip do?"
LONG: Final[dict[str, Any]] = {"temperature": 0, "ignore_eos": True}
SPOKEN: Final = {"input": "hello there", "voice": "tara", "seed": 3, "response_format": "pcm"}
ENDS: Final = (RequestFinished, RequestFailed, RequestCancelled, RequestRejected)
Scene = Callable[["Stage", str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Stage:
    """A deployment to ask and to harm."""

    model: str
    running: Running
    http: httpx.AsyncClient
    reader: Reader

    async def ask(self, name: str, text: str = QUESTION, **params: Any) -> Answer:
        """Ask, and take the whole answer."""
        return await clients.generate(self.http, Answer(name), text, **params)

    async def submit(self, name: str, data: bytes) -> None:
        """What any service may publish."""
        running = self.running
        async with clients.log_of(running, running.client) as log:
            await log.publish(self.reader.subjects.request(name), data)

    async def ended(self, name: str) -> None:
        """Wait for a request's end."""
        await self.reader.until(self.reader.subjects.walk(name), Event, lambda event: isinstance(event, ENDS))


# ---- what is asked -----------------------------------------------------------------------------------------


async def plain(stage: Stage, name: str) -> None:
    await stage.ask(name, temperature=0)


async def choices(stage: Stage, name: str) -> None:
    asked = {"model": "demo", "prompt": "Return the", "max_tokens": 6, "n": 3, "seed": 7, "temperature": 1.2}
    (await stage.http.post("/v1/completions", json=asked | {"request_id": name})).raise_for_status()


async def stop_string(stage: Stage, name: str) -> None:
    await stage.ask(name, temperature=0, stop=["where"])


async def logprobs(stage: Stage, name: str) -> None:
    asked = {"model": "demo", "prompt": "Return the", "max_tokens": 6, "logprobs": 2, "echo": True}
    (await stage.http.post("/v1/completions", json=asked | {"request_id": name})).raise_for_status()


async def cancelled(stage: Stage, name: str) -> None:
    async def cancel() -> None:
        (await stage.http.delete(f"/v1/requests/{name}")).raise_for_status()

    await _in_the_middle(stage, name, cancel)


async def rejected(stage: Stage, name: str) -> None:
    await stage.submit(name, encode(RequestSubmitted(model="nobody", inputs=Inputs(text=QUESTION))))
    await stage.ended(name)


async def unreadable(stage: Stage, name: str) -> None:
    await stage.submit(name, b'{"model": "demo", "inputs": {"txt": "What?"}}')
    await stage.ended(name)


async def failed(stage: Stage, name: str) -> None:
    params = Params(max_tokens=1_000_000)
    await stage.submit(
        name, encode(RequestSubmitted(model="demo", inputs=Inputs(text=QUESTION), params=params))
    )
    await stage.ended(name)


async def deadline(stage: Stage, name: str) -> None:
    params = Params(max_tokens=900, ignore_eos=True, temperature=0)
    event = RequestSubmitted(model="demo", inputs=Inputs(text=QUESTION), params=params, timeout_s=0.2)
    await stage.submit(name, encode(event))
    await stage.ended(name)


async def worker_died(stage: Stage, name: str) -> None:
    async def kill() -> None:
        os.kill(stage.running.pids.worker["0"], signal.SIGKILL)

    await _in_the_middle(stage, name, kill)


async def poison(stage: Stage, name: str) -> None:
    """Its worker dies of it once, and once more as soon as it has begun again, alone."""

    async def kill_twice() -> None:
        os.kill(stage.running.pids.worker["0"], signal.SIGKILL)
        done = stage.reader.subjects.done(0, name)
        await stage.reader.until(done, WalkBegun, lambda begun: begun.attempt == 2)
        os.kill(stage.running.pids.worker["0"], signal.SIGKILL)

    await _in_the_middle(stage, name, kill_twice)


async def conductor_died(stage: Stage, name: str) -> None:
    async def kill() -> None:
        os.kill(stage.running.pids.conductor[0], signal.SIGKILL)

    await _in_the_middle(stage, name, kill)


async def _in_the_middle(stage: Stage, name: str, harm: Callable[[], Awaitable[None]]) -> None:
    """Ask for a long answer, do something once it has begun, and wait for its end, whichever it is."""
    asked = clients.body(QUESTION, name, max_tokens=60, **LONG)
    tokens, harmed = 0, False
    async with stage.http.stream("POST", "/generate", json=asked) as answer:
        async for line in answer.aiter_lines():
            tokens += len(json.loads(line)["metadata"].get("token_ids", ()))
            if tokens >= 20 and not harmed:
                harmed = True
                await harm()
    await stage.ended(name)


async def forked(stage: Stage, name: str) -> None:
    await stage.ask(f"{name}-from", temperature=0)
    where = ("--data-dir", str(stage.running.data_dir))
    asked = ("replay", f"{name}-from", "--fork-at", "output.chunk", "--set", "max_tokens=8", "--id", name)
    await asyncio.to_thread(_dalsegno, *asked, "--wait", *where)


async def speech(stage: Stage, name: str) -> None:
    asked = {**SPOKEN, "model": stage.model, "max_tokens": 60}
    (await stage.http.post("/v1/audio/speech", json=asked | {"request_id": name})).raise_for_status()


async def sound_worker_died(stage: Stage, name: str) -> None:
    """The rank that makes the sound dies while it does, and all of it is made again, the same."""
    asked = {**SPOKEN, "model": stage.model, "max_tokens": 200}
    async with stage.http.stream("POST", "/v1/audio/speech", json=asked | {"request_id": name}) as answer:
        heard = answer.aiter_bytes()
        await anext(heard)
        os.kill(stage.running.pids.worker["1"], signal.SIGKILL)
        async for _ in heard:
            pass


@dataclass(frozen=True, slots=True)
class Recording:
    """A deployment, and what is asked of it: by the history's name."""

    model: str
    scenes: dict[str, Scene]
    args: tuple[str, ...] = ()


RECORDINGS: Final = (
    Recording(
        "demo",
        {
            "plain": plain,
            "sealed": plain,
            "choices": choices,
            "stop-string": stop_string,
            "logprobs": logprobs,
            "cancelled": cancelled,
            "rejected": rejected,
            "unreadable": unreadable,
            "failed": failed,
            "deadline": deadline,
            "forked": forked,
            "worker-died": worker_died,
            "poison": poison,
            "conductor-died": conductor_died,
        },
    ),
    Recording("demo", {"worker-lost": worker_died}, ("--set", "max_attempts=1")),
    Recording("orpheus", {"speech": speech}),
    Recording("orpheus_two_ranks", {"speech-on-two-ranks": speech, "sound-worker-died": sound_worker_died}),
)


# ---- recording ---------------------------------------------------------------------------------------------


def record(names: Sequence[str]) -> None:
    """Record the histories that are named; all of them where none is."""
    for recording in RECORDINGS:
        wanted = {name: scene for name, scene in recording.scenes.items() if not names or name in names}
        if wanted:
            with tempfile.TemporaryDirectory() as folder:
                _record(recording, wanted, Path(folder))
    if not names or "wrong" in names:
        alter()


def _record(recording: Recording, scenes: dict[str, Scene], folder: Path) -> None:
    env = {"DALSEGNO_MODEL_KWARGS": "{device: cpu}"}
    if recording.model != "demo":
        env["DALSEGNO_CHECKPOINT"] = str(tiny_orpheus())
    with deploy.serve(folder, *recording.args, model=recording.model, env=env) as running:
        for name, scene in scenes.items():
            asyncio.run(_play(recording.model, running, name, scene))
            output = str(FOLDER / f"{name}.bundle")
            _dalsegno("export", name, "-o", output, "--data-dir", str(running.data_dir))
            found = bundle_file.read(output)
            _write(Path(output), msgspec.structs.replace(found.header, configs={}), found.kept)


async def _play(model: str, running: Running, name: str, scene: Scene) -> None:
    await clients.wait_until_ready(running)
    async with clients.http(running) as http, clients.reader(running) as reader:
        await scene(Stage(model, running, http, reader), name)


def _dalsegno(*args: str) -> None:
    ended = clients.run(*args)
    print(ended.stdout + ended.stderr, end="")
    if ended.returncode:
        sys.exit(ended.returncode)


def alter() -> None:
    """Make the history that must not match: a decision that does not follow, in a bundle that is whole."""
    found = bundle_file.read(str(FOLDER / "plain.bundle"))
    last = found.kept[-1].record
    finished = decode(last.data)
    assert isinstance(finished, RequestFinished)
    usage = msgspec.structs.replace(finished.usage, completion_tokens=finished.usage.completion_tokens + 1)
    data = encode(msgspec.structs.replace(finished, usage=usage))
    found.kept[-1] = bundle_file.BundledRecord(
        record=msgspec.structs.replace(last, data=data), digest=bundle_file.digest_of(data)
    )
    WRONG.mkdir(exist_ok=True)
    _write(WRONG / "altered.bundle", found.header, found.kept)


def _write(path: Path, header: bundle_file.Header, kept: list[bundle_file.BundledRecord]) -> None:
    """Without configurations: they name folders of whoever recorded it."""
    with path.open("wb") as file:
        bundle_file.write(file, header, kept)


if __name__ == "__main__":
    record(sys.argv[1:])
