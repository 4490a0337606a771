"""Dal Segno as it is served: gateway, log, conductor and worker, asked over HTTP."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.peers.protocol import Ready, drive
from benchmarks.peers.streams import complete
from tests.e2e.deploy import serve


@contextmanager
def _served(checkpoint: Path) -> Iterator[Ready]:
    with (
        tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as folder,
        serve(Path(folder), model=str(checkpoint)) as running,
    ):
        yield Ready(
            partial(complete, running.url, checkpoint.name),
            f"dalsegno serve {checkpoint}",
            ("dalsegno", "torch", "transformers"),
        )
        print(running.log(), file=sys.stderr)


if __name__ == "__main__":
    drive(_served)
