"""The peer for Dal Segno's engine in process: computation of tokens only, no HTTP, no log, no text."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from benchmarks.peers.forms import settings_for
from benchmarks.peers.protocol import Answer, Ready, asked_weights, drive
from configs.checks import resolve
from configs.deployment import DeploymentConfig
from dalsegno.config.gguf_files import converted
from workers import settings
from workers.kv_engine.outputs import TokenOutput
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.loading.engines import make_kv_engines


def resolved(model: Path) -> DeploymentConfig:
    """The configuration of a model; a GGUF file is converted beside it."""
    if model.suffix == ".gguf":
        model = converted(model, model.parent, lambda said: print(said, file=sys.stderr))
    return resolve(str(model))


@contextmanager
def _loaded(checkpoint: Path) -> Iterator[Ready]:
    model, how = settings_for(checkpoint, asked_weights())
    config = resolved(model)
    [engine] = make_kv_engines(config, settings.parse(config.model_kwargs | how), 0, lambda *_: None).values()
    keys = count()

    def ask(prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        begun_s = time.perf_counter()
        answers = {str(next(keys)): Answer() for _ in prompts}
        for key, ids in zip(answers, prompts, strict=True):
            engine.add(SequenceSpec(key=key, prompt_ids=ids, max_tokens=max_tokens, ignore_eos=True))
        while engine.has_work:
            for output in engine.step():
                assert isinstance(output, TokenOutput)
                answers[output.key].arrivals.append(time.perf_counter() - begun_s)
                answers[output.key].ids.append(output.token_id)
        return list(answers.values())

    yield Ready(
        ask,
        f"workers.loading.engines.make_kv_engines(..., {how}).step()",
        ("dalsegno", "torch", "transformers"),
    )


if __name__ == "__main__":
    drive(_loaded)
