"""The torch face: SNAC waits while the file of `STALLING_FILE` exists, with its thread and its heartbeats."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.base import Item, StatelessResult
from models.orpheus import nodes


def load(checkpoint: Path, node: str, **kwargs: Any) -> Any:
    """The node of a checkpoint; the vocoder may stall."""
    found = nodes.load(checkpoint, node, **kwargs)
    return Stalling(found) if node == "snac_decoder" else found


class Stalling:
    """A vocoder."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self._file = Path(os.environ["STALLING_FILE"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def run(self, items: Sequence[Item]) -> "list[StatelessResult | Exception]":
        """Run the vocoder, once the file is gone."""
        while self._file.exists():
            time.sleep(0.005)  # the test removes it
        found: list[StatelessResult | Exception] = self._node.run(items)
        return found
