"""Dal Segno's engine called in process: no HTTP, no log, no text; what is left is what computes tokens."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from benchmarks.peers.protocol import Ready, drive
from shared.config import resolve
from workers import settings
from workers.engine.sequence import SequenceSpec, TokenOutput
from workers.hosting import make_engine


@contextmanager
def _loaded(checkpoint: Path) -> Iterator[Ready]:
    config = resolve(str(checkpoint))
    engine = make_engine(config, settings.parse(config.model_kwargs), 0, lambda *_: None)
    keys = count()

    def answers(prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
        begun_s = time.perf_counter()
        arrivals: dict[str, list[float]] = {str(next(keys)): [] for _ in prompts}
        for key, ids in zip(arrivals, prompts, strict=True):
            engine.add(SequenceSpec(key=key, prompt_ids=ids, max_tokens=max_tokens, ignore_eos=True))
        while engine.has_work:
            for output in engine.step():
                assert isinstance(output, TokenOutput)
                arrivals[output.key].append(time.perf_counter() - begun_s)
        return list(arrivals.values())

    yield Ready(answers, "workers.hosting.make_engine(...).step()", ("dalsegno", "torch", "transformers"))


if __name__ == "__main__":
    drive(_loaded)
