"""The peer for Dal Segno: gateway, log, conductor and worker, over HTTP."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.peers.forms import settings_for
from benchmarks.peers.protocol import Ready, asked_weights, drive
from benchmarks.peers.streams import complete
from tests.e2e.deploy import serve


@contextmanager
def _served(checkpoint: Path) -> Iterator[Ready]:
    model, kwargs = settings_for(checkpoint, asked_weights())
    how = [part for key, value in kwargs.items() for part in ("--set", f"model_kwargs.{key}={value}")]
    with (
        tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as folder,
        serve(Path(folder), *how, model=str(model)) as running,
    ):
        yield Ready(
            partial(complete, running.url, model.name.removesuffix(".gguf")),
            f"dalsegno serve {model} {' '.join(how)}",
            ("dalsegno", "torch", "transformers"),
        )
        print(running.log(), file=sys.stderr)


if __name__ == "__main__":
    drive(_served)
