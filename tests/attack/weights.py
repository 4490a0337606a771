"""Swapped weights: a worker is killed in the middle of an answer, and restarts with another checkpoint.

The answer may end as the first model would have ended it, as a whole of the second one, or by name with
`weights_changed`; never begun by one and finished by the other. Swaps that keep a file's size, inode and
times must be noticed as well.
"""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.attack import target
from tests.attack.promises import Verdict
from tests.attack.target import Told, generate
from tests.e2e.deploy import Running
from tests.tiny import write_checkpoint

TOKENS: Final = 350
QUESTION: Final = "Tell me of a wizard."
PROVEN: Final = "weights_changed"
_WEIGHTS: Final = "model.safetensors"


async def attack(out: Path) -> list[Verdict]:
    """Swap each file of the checkpoint, in each way."""
    whole = Verdict("an answer is one model's, whatever is swapped while its worker is dead")
    replayed = Verdict("requests on swapped weights replay as they were answered")
    other = out / "other"
    other.mkdir(parents=True)
    write_checkpoint(other, seed=1)
    for name, swap in SWAPS.items():
        checkpoint = out / name.replace(" ", "-") / "checkpoint"
        checkpoint.mkdir(parents=True)
        write_checkpoint(checkpoint, seed=0)
        settings = {"checkpoint": str(checkpoint)}
        with target.served(checkpoint.parent, settings=settings) as running:
            await _swapped(running, name, partial(swap, checkpoint, other), whole)
            await _replayed(running, name, replayed)
    return [whole, replayed]


async def _swapped(running: Running, name: str, swap: Callable[[], None], verdict: Verdict) -> None:
    """Kill the worker in the middle of an answer, swap, and compare the answer with the one of before."""
    async with target.client(running) as http:
        first = (await _ask(http, "before")).answer
        victim = Told.new("victim")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(generate(http, victim, QUESTION, max_tokens=TOKENS, ignore_eos=True))
            await victim.is_under_way.wait()
            [pid] = running.pids.worker.values()
            os.kill(pid, signal.SIGSTOP)
            swap()
            os.kill(pid, signal.SIGKILL)
        second = (await _ask(http, "after")).answer
    data, tokens, end = victim.answer
    verdict.tried()
    verdict.note += f"{name}: {end}, {len(tokens)} tokens; "
    is_prefix = first[0].startswith(data) and end == PROVEN
    if (data, tokens) not in (first[:2], second[:2]) and not is_prefix:
        same = next(
            (at for at, pair in enumerate(zip(data, first[0], strict=False)) if pair[0] != pair[1]), 0
        )
        verdict.broken(
            f"{name} swapped between a kill and the restart",
            f"expected the first model's answer, the second's or {PROVEN}; found {end} with {len(data)} "
            f"bytes, of which the first {same} are the first model's",
        )


async def _ask(http: Any, name: str) -> Told:
    return await generate(http, Told.new(name), QUESTION, max_tokens=TOKENS, ignore_eos=True)


async def _replayed(running: Running, name: str, verdict: Verdict) -> None:
    for one in await asyncio.to_thread(target.replayed, running):
        verdict.tried()
        if not one["matches"]:
            verdict.broken(
                f"{name}: dalsegno replay {one['request_id']}", str((one.get("mismatch") or {}).get("what"))
            )


# ---- the swaps -----------------------------------------------------------------------------------------


def _replaced(name: str) -> Callable[[Path, Path], None]:
    """Put another file in the place of one, as `huggingface-cli download` or `mv` do."""

    def swap(here: Path, other: Path) -> None:
        shutil.copy(other / name, here / f"{name}.new")
        (here / f"{name}.new").replace(here / name)

    return swap


def _in_place(here: Path, other: Path) -> None:
    """Overwrite the weights in place, and give the file its old times again: inode, size, mtime are kept."""
    file = here / _WEIGHTS
    before = file.stat()
    with file.open("r+b") as target_file:
        target_file.write((other / _WEIGHTS).read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )


def _edited(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path, Path], None]:
    """Change a JSON file."""

    def swap(here: Path, _other: Path) -> None:
        said = json.loads((here / name).read_text())
        change(said)
        (here / name).write_text(json.dumps(said))

    return swap


def _without_merges(said: dict[str, Any]) -> None:
    said["model"]["merges"] = said["model"]["merges"][: len(said["model"]["merges"]) // 2]


def _another_template(said: dict[str, Any]) -> None:
    said["chat_template"] = "{% for message in messages %}{{ message.content }}!{% endfor %}"


def _another_end(said: dict[str, Any]) -> None:
    said["eos_token_id"] = [5, 6, 7]


SWAPS: Final[Mapping[str, Callable[[Path, Path], None]]] = {
    "weights": _replaced(_WEIGHTS),
    "weights in place": _in_place,
    "tokenizer": _edited("tokenizer.json", _without_merges),
    "chat template": _edited("tokenizer_config.json", _another_template),
    "generation config": _edited("generation_config.json", _another_end),
}
