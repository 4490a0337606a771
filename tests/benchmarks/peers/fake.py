"""A peer that computes nothing: a token each millisecond, by the clock it does not have.

A file `behaviour` in its checkpoint says where it fails, if it does.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.protocol import Answer, Ready, drive


@contextmanager
def _loaded(checkpoint: Path) -> Iterator[Ready]:
    file = checkpoint / "behaviour"
    behaviour = file.read_text() if file.exists() else "well"
    if behaviour == "no start":
        raise MemoryError("no room for the weights")
    print("a library has something to say", flush=True)

    def answers(prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        if behaviour == "no answer":
            raise ValueError("this prompt is too much")
        if behaviour == "sudden end":
            sys.exit(9)
        count = max_tokens - 1 if behaviour == "short answer" else max_tokens
        times = [0.001 * (number + 1) for number in range(count)]
        return [Answer(times, ids=[300] * count) for _ in prompts]

    with subprocess.Popen(("sleep", "1000")) as below:
        try:
            yield Ready(answers, f"fake {checkpoint.name}", ("msgspec",))
        finally:
            below.kill()


if __name__ == "__main__":
    drive(_loaded)
