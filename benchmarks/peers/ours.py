"""The peer for Dal Segno: gateway, log, conductor and worker, over HTTP."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.peers.protocol import Ready, bits_of_weights, drive
from benchmarks.peers.streams import complete
from tests.e2e.deploy import serve

_HOW: Final = ("--set", "model_kwargs.dtype=bfloat16")  # the stored type; a CPU's default is float32


@contextmanager
def _served(checkpoint: Path) -> Iterator[Ready]:
    bits = bits_of_weights()
    how = _HOW if bits == 16 else (*_HOW, "--quantize", f"int{bits}")
    with (
        tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as folder,
        serve(Path(folder), *how, model=str(checkpoint)) as running,
    ):
        yield Ready(
            partial(complete, running.url, checkpoint.name),
            f"dalsegno serve {checkpoint} {' '.join(how)}",
            ("dalsegno", "torch", "transformers"),
        )
        print(running.log(), file=sys.stderr)


if __name__ == "__main__":
    drive(_served)
