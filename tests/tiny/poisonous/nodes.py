"""The torch face: a node that kills its process, or never comes back, when it has read a certain prompt.

A prompt does so by one character, three times, and a number behind it: so many forwards later, of whomever.
"""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any, Final

import torch
from tokenizers import Tokenizer

from models.decoder_lm import nodes
from models.decoder_lm.nodes import DecoderLM

KILLS: Final = "\x01"
HANGS: Final = "\x02"


def load(checkpoint: Path, node: str, **kwargs: Any) -> "Poisonous":
    """The node of a checkpoint, made unsound."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return Poisonous(nodes.load(checkpoint, node, **kwargs), tokenizer)


class Poisonous:
    """A decoder that goes the way of all flesh."""

    def __init__(self, node: DecoderLM, tokenizer: Tokenizer) -> None:
        self._node = node
        self._marks = {_id_of(tokenizer, mark): mark for mark in (KILLS, HANGS)}
        self._digits = {_id_of(tokenizer, str(digit)): digit for digit in range(10)}
        self._fuses: list[tuple[int, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Ids to ids, for as long as it lives."""
        self._fuses += _found(token_ids.tolist(), self._marks, self._digits)
        for left, mark in self._fuses:
            if left > 0:
                continue
            if mark == HANGS:
                Event().wait()
            os.kill(os.getpid(), signal.SIGKILL)
        self._fuses = [(left - 1, mark) for left, mark in self._fuses]
        return self._node.embed(token_ids)


def _found(
    ids: Sequence[int], marks: Mapping[int, str], digits: Mapping[int, int]
) -> Iterator[tuple[int, str]]:
    """The fuses in a packed sequence: after how many forwards, and what happens then."""
    for place, id in enumerate(ids):
        if id in marks and list(ids[place : place + 3]) == [id] * 3:
            number = 0
            for behind in ids[place + 3 :]:
                if behind not in digits:
                    break
                number = 10 * number + digits[behind]
            yield number, marks[id]


def _id_of(tokenizer: Tokenizer, character: str) -> int:
    [id] = tokenizer.encode(character, add_special_tokens=False).ids
    return int(id)
