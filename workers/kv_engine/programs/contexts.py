"""The contexts of one run of a program: tokens with keys and values, forks, copies on write. No torch.

A context is a `Sequence` without a prompt, so a step is built of its spans as of any other. A fork shares the
blocks of the context it begins with. A block with several users is replaced before one of them writes to it,
and its cells before the written ones are copied.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from models.programs import Pass
from shared.errors import BugError, ClientError
from workers.kv_engine.programs.pages import Pages
from workers.kv_engine.sequence import Sequence as EngineSequence
from workers.kv_engine.sequence_spec import SequenceSpec

Int32s = npt.NDArray[np.int32]
CopyCells = Callable[[str, int, int, int], None]
"""Copies the first cells of one block to another one, in all layers: (tower, source, target, cells)."""
_NO_CELLS: Final = np.zeros(0, np.int32)


@dataclass(slots=True, kw_only=True)
class Context:
    """A context of a run.

    Attributes:
        sequence: its row and blocks; `computed` is its number of committed tokens.
        next_position: the position after its committed tokens.
        tower: the companion model whose pool its keys and values are in; empty for the node's.
        written: for each cell, committed or of the last pass, the largest position of its pass up to it.
    """

    sequence: EngineSequence
    next_position: int = 0
    tower: str = ""
    written: Int32s = field(default_factory=_NO_CELLS.copy)

    @property
    def length(self) -> int:
        """The number of its committed tokens."""
        return self.sequence.computed

    def set_length(self, cells: int) -> None:
        """Drop committed tokens, or commit the first tokens of the last pass, so that `cells` are committed.

        Raises:
            BugError: the context has not so many cells.
        """
        if not 0 <= cells <= len(self.written):
            raise BugError(
                f"a pass begins after {cells} cells of its context: expected 0 to {len(self.written)}, its "
                f"{self.length} committed tokens and those of its last pass"
            )
        self.sequence.computed = cells
        self.written = self.written[:cells]
        self.next_position = int(self.written[-1]) + 1 if cells else 0


class Contexts:
    """All contexts of a run.

    Args:
        key: the key of the run.
        rows: the rows of the step's tables that the run may use.
        max_blocks: the most blocks of a row.
        copy_cells: copies keys and values.
        pool_name: by the tower of a pass, the one whose pool it writes to.
    """

    def __init__(
        self,
        key: str,
        *,
        rows: Sequence[int],
        pages: Pages,
        block_size: int,
        max_blocks: int,
        copy_cells: CopyCells,
        pool_name: Callable[[str], str] = str,
    ) -> None:
        self.rows: Final = tuple(rows)
        self.pages: Final = pages
        self._key = key
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._copy_cells = copy_cells
        self._pool_name = pool_name
        self._free_rows = deque(rows)
        self._contexts: dict[str, Context] = {}

    def of(self, asked: Pass) -> Context:
        """Return the context of a pass."""
        return self._contexts[asked.context]

    def open(self, asked: Pass) -> None:
        """Open the context of a pass, if it is its first one.

        Raises:
            BugError: there are more contexts than declared, a fork of an unknown context, or of another
                tower's, or passes of a context for several towers.
        """
        known, pool = self._contexts.get(asked.context), self._pool_name(asked.tower)
        if known is not None:
            if known.tower != pool:
                raise BugError(
                    f"context {asked.context!r} is of the tower {known.tower!r}, its pass of {asked.tower!r}"
                )
            if asked.forks:
                raise BugError(f"context {asked.context!r} exists: only its first pass can fork another one")
            return
        if not self._free_rows:
            raise BugError(
                f"a program opens more than {len(self.rows)} contexts: expected its driver to declare "
                "max_contexts"
            )
        sequence = EngineSequence(
            SequenceSpec(key=f"{self._key}/{asked.context}", prompt_ids=[], max_tokens=0)
        )
        sequence.row = self._free_rows.popleft()
        context = self._contexts[asked.context] = Context(sequence=sequence, tower=pool)
        if asked.forks:
            self._fork(context, asked.forks)

    def make_room(self, context: Context, tokens: int) -> None:
        """Take blocks so that `tokens` more tokens can be written after a context's committed ones.

        Raises:
            ClientError: the context would be longer than the model supports.
            BugError: the driver declared too few tokens.
        """
        blocks, length = context.sequence.blocks, context.length
        if length + tokens > self._max_blocks * self._block_size:
            raise ClientError(
                f"the request needs a context of {length + tokens} tokens, but the model supports "
                f"{self._max_blocks * self._block_size}: ask for less",
                code="context_length_exceeded",
            )
        first, cells = divmod(length, self._block_size)
        last = -(-(length + tokens) // self._block_size)
        for number in range(first, min(last, len(blocks))):
            if self.pages.is_shared(blocks[number]):
                self._replace(context, number, cells if number == first else 0)
        while len(blocks) * self._block_size < length + tokens:
            blocks.append(self.pages.take())

    def _replace(self, context: Context, number: int, cells: int) -> None:
        """Give a context a block of its own in place of a shared one, with its first `cells`."""
        blocks = context.sequence.blocks
        old, blocks[number] = blocks[number], self.pages.take()
        if cells:
            self._copy_cells(context.tower, old, blocks[number], cells)
        self.pages.leave(old)
        context.sequence.admissions += 1  # its row of the block table is written again

    def _fork(self, context: Context, name: str) -> None:
        origin = self._contexts.get(name)
        if origin is None:
            raise BugError(f"a program forks {name!r}: expected one of its contexts {sorted(self._contexts)}")
        if origin.tower != context.tower:
            raise BugError(
                f"a context of the tower {context.tower!r} forks {name!r}, which is of {origin.tower!r}"
            )
        shared = origin.sequence.blocks[: -(-origin.length // self._block_size)]
        self.pages.share(shared)
        context.sequence.blocks = list(shared)
        context.sequence.ids = list(origin.sequence.ids[: origin.length])
        context.sequence.computed = origin.length
        context.next_position = origin.next_position
        context.written = origin.written[: origin.length]
