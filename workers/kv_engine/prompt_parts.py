"""The parts of a prompt that stand for media, as the engine keeps them for one sequence. Imports no torch.

    contents    the content of each token for the prefix cache: its id, and the medium it stands for
    positions   (axes, T), and the position of the first generated token
    key_ends    the number of tokens that each token sees; tokens of a full part see one another
    rows        the values that replace the embeddings of tokens

The parts are `models.sequence_request.PromptPart`s. Parts with rows do not overlap, and full parts do not
either; a part with rows may lie in a full one (PaliGemma: the whole prompt is one full part).
"""

import hashlib
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Items
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from models.sequence_request import PromptPart
from shared.errors import BugError

Int8s = npt.NDArray[np.int8]
Int32s = npt.NDArray[np.int32]
Positions = npt.NDArray[np.int32] | npt.NDArray[np.float32]

_NO_ROW: Final = -1


class PromptParts:
    """The parts of one prompt of T tokens.

    Args:
        prompt_ids: the T token ids.
        parts: in the order of the prompt.
        positions: (axes, T), of the type of the node's.
        next_position: the position of the token after the prompt, on all axes.
        rows: (N, width), the values for the tokens of parts with a digest, in their order; None if the
            prompt's keys and values come with the request.
        full_ignores_window: in layers with a window, a token of a full part sees all of it.
        routes: (T,), the set of weights of each token; None: 0 for all.

    Attributes:
        shift: what is added to the index of a generated token for its position.
        longest_full: the tokens of the longest full part, which is computed in one step.
        contents: what makes the keys and values of each prompt token: equal contents of two prompts up to a
            token have equal keys and values up to it.
    """

    def __init__(
        self,
        prompt_ids: Items[int],
        parts: Items[PromptPart],
        *,
        positions: Positions,
        next_position: float,
        rows: Any | None,
        full_ignores_window: bool = False,
        routes: Int8s | None = None,
    ) -> None:
        self.rows = rows
        self._positions: Final = positions
        self.shift: Final = next_position - len(prompt_ids)
        index = np.arange(len(prompt_ids), dtype=np.int32)
        self._row_of: Final = np.full(len(prompt_ids), _NO_ROW, np.int32)
        self._ends: Final = index + 1
        self._starts: Final = index.copy()
        self._is_full: Final = np.zeros(len(prompt_ids), np.bool_)
        self._full_ignores_window: Final = full_ignores_window
        self._routes: Final = np.zeros(len(prompt_ids), np.int8) if routes is None else routes
        _check(len(prompt_ids), parts, rows)
        row = 0
        for part in parts:
            end = part.start + part.count
            if part.digest:
                self._row_of[part.start : end] = np.arange(row, row + part.count)
                row += part.count
            if part.full:
                self._ends[part.start : end] = end
                self._starts[part.start : end] = part.start
                self._is_full[part.start : end] = True
        self.longest_full: Final = max((part.count for part in parts if part.full), default=0)
        self.contents: Final = _contents(prompt_ids, parts)

    def positions_of(self, start: int, count: int) -> Positions:
        """The positions of `count` tokens of the sequence from `start` on, (axes, count)."""
        known = self._positions[:, start : start + count]
        missing = count - known.shape[1]
        if not missing:
            return known
        first = start + known.shape[1] + self.shift
        after = (first + np.arange(missing)).astype(known.dtype)
        return np.concatenate([known, np.broadcast_to(after, (len(known), missing))], axis=1)

    def rows_in(self, start: int, count: int) -> tuple[slice, npt.NDArray[np.int64]]:
        """The rows of tokens from `start` on, and the tokens that take them, counted from `start`."""
        taken = self._row_of[start : start + count]
        places = np.flatnonzero(taken != _NO_ROW)
        if not len(places):
            return slice(0, 0), places
        return slice(int(taken[places[0]]), int(taken[places[-1]]) + 1), places

    def lacks_rows(self, start: int = 0) -> bool:
        """True if a prompt token from `start` on takes a row, and the rows did not come."""
        return self.rows is None and bool((self._row_of[start:] != _NO_ROW).any())

    def changes(self, start: int, count: int) -> bool:
        """True if a token from `start` on is computed in another way than in a prompt of text.

        It takes a row, sees other tokens, or has other weights.
        """
        if start >= len(self._row_of):
            return False
        takes_row = bool((self._row_of[start : start + count] != _NO_ROW).any())
        return takes_row or self.has_full(start, count) or bool(self.routes_of(start, count).any())

    def routes_of(self, start: int, count: int) -> Int8s:
        """The set of weights of `count` tokens from `start` on, (count,); 0 for generated tokens."""
        routes = np.zeros(count, np.int8)
        known = self._routes[start : start + count]
        routes[: len(known)] = known
        return routes

    def has_full(self, start: int, count: int) -> bool:
        """True if a token from `start` on sees tokens after it."""
        return bool(self._is_full[start : start + count].any())

    def key_ranges(self, start: int, count: int) -> tuple[Int32s, Int32s]:
        """`Step.key_ends` and `Step.full_starts` of `count` tokens from `start` on, (count,) each."""
        ends = np.arange(start + 1, start + count + 1, dtype=np.int32)
        starts = ends - 1
        known = self._ends[start : start + count]
        ends[: len(known)] = known
        if self._full_ignores_window:
            starts[: len(known)] = self._starts[start : start + count]
        return ends, starts

    def whole(self, start: int, count: int) -> int:
        """The most tokens from `start` on, up to `count`, that cut no full part; 0 if it begins with one."""
        end = start + count
        if end >= len(self._ends) or not self._is_full[end - 1] or self._ends[end - 1] <= end:
            return count
        return max(0, int(self._starts[end - 1]) - start)

    def rest_of_part(self, start: int) -> int:
        """The tokens from `start` to the end of its full part."""
        return int(self._ends[start]) - start


class Contents(Items[Hashable]):
    """The contents of a sequence's tokens: those of its prompt's parts, then the ids of generated tokens."""

    def __init__(self, prompt: list[Hashable], ids: list[int]) -> None:
        self._prompt = prompt
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Hashable]:
        yield from self._prompt
        yield from self._ids[len(self._prompt) :]

    @overload
    def __getitem__(self, at: int) -> Hashable: ...
    @overload
    def __getitem__(self, at: slice) -> list[Hashable]: ...
    def __getitem__(self, at: int | slice) -> Hashable | list[Hashable]:
        if isinstance(at, int):
            return self._prompt[at] if at < len(self._prompt) else self._ids[at]
        start, stop, _ = at.indices(len(self._ids))
        return [*self._prompt[start:stop], *self._ids[max(start, len(self._prompt)) : stop]]


def _check(tokens: int, parts: Items[PromptPart], rows: Any | None) -> None:
    """Check that parts lie in the prompt, in order, without overlaps, and that they have their rows."""
    with_rows = [part for part in parts if part.digest]
    for kind in (with_rows, [part for part in parts if part.full]):
        end = 0
        for part in kind:
            if part.start < end or part.count < 1 or part.start + part.count > tokens:
                raise BugError(
                    f"prompt part of {part.count} tokens from {part.start} on: expected it after token {end} "
                    f"of a prompt of {tokens} tokens"
                )
            end = part.start + part.count
    wanted = sum(part.count for part in with_rows)
    if rows is not None and len(rows) != wanted:
        raise BugError(f"the prompt's parts take {wanted} rows, but {len(rows)} came with the request")


def _contents(prompt_ids: Items[int], parts: Items[PromptPart]) -> list[Hashable]:
    found: list[Hashable] = list(prompt_ids)
    for part in parts:
        if part.digest:
            # Positions depend on grid and seconds, which the rows need not.
            name = (part.digest, part.grid, part.seconds)
            for offset in range(part.count):
                place = part.start + offset
                found[place] = (prompt_ids[place], name, offset)
    for part in parts:
        if part.full:
            # The keys and values of a token depend on all tokens of its part, also on those after it.
            members = slice(part.start, part.start + part.count)
            whole = hashlib.blake2b(repr(found[members]).encode(), digest_size=16).digest()
            found[members] = [(content, whole) for content in found[members]]
    return found
