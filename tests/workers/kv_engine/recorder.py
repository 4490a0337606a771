"""A recorder of steps for machines without CUDA: a replay computes again."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from workers.kv_engine.gpu.cuda_graphs import Replay
from workers.kv_engine.gpu.host_reads import RefuseHostReads
from workers.kv_engine.step import Step

_VIEWS = tuple(
    f"aten.{name}." for name in ("alias", "detach", "flatten", "select", "slice", "unsqueeze", "view")
)
"""Operations without a launch."""


class Again:
    """A replay is the function, called again.

    Attributes:
        replays: how often.
    """

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, compute: Callable[[], None]) -> Replay:
        compute()

        def replay() -> None:
            self.replays += 1
            compute()

        return replay


class SameLaunches(Again):
    """A replay is held against what was recorded, as if it were a CUDA graph.

    It has to be the same operations, with the same numbers, over tensors of the same shapes; and those that
    were not made in the course of it have to be at the same addresses.

    Attributes:
        launches: of each recording, in order: how many of its operations launch a kernel, at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[int] = []
        self._now: _Launches | None = None

    def capture(self, compute: Callable[[], None]) -> Replay:
        with RefuseHostReads():
            compute()  # until it is warm
        recorded = self._launches(compute)
        assert not [one for one in recorded if "lift_fresh" in one], "a constant is copied from the host"
        self.launches.append(sum(not one.startswith(_VIEWS) for one in recorded))

        def replay() -> None:
            self.replays += 1
            found = self._launches(compute)
            assert len(found) == len(recorded)
            for expected, one in zip(recorded, found, strict=True):
                assert one == expected, f"recorded {expected}, found {one}"

        return replay

    def watched(self, kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The kernel, as one operation: what its interpreter does with torch is not what a GPU would."""

        def launched(*args: Any, **kwargs: Any) -> torch.Tensor:
            if self._now is None:
                with _disable_current_modes():
                    return kernel(*args, **kwargs)
            self._now.tell(kernel.__name__, _flat((args, kwargs)))
            with _disable_current_modes():
                out = kernel(*args, **kwargs)
            self._now.keep(out)
            return out

        return launched

    def _launches(self, compute: Callable[[], None]) -> list[str]:
        with _Launches() as self._now:
            compute()
        told, self._now = self._now.told, None
        return told


class _Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Everything torch does, each in one line."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.told: list[str] = []
        self._made: dict[int, torch.Tensor] = {}  # kept, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        self.tell(str(func), given)
        known = {_storage(leaf) for leaf in given if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in known:
                self.keep(leaf)
        return result

    def tell(self, what: str, given: Iterable[object]) -> None:
        self.told.append(f"{what} {' '.join(self._described(leaf) for leaf in given)}")

    def keep(self, tensor: torch.Tensor) -> None:
        self._made.setdefault(_storage(tensor), tensor)

    def _described(self, leaf: object) -> str:
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        at = "made" if _storage(leaf) in self._made else hex(leaf.data_ptr())
        return f"{leaf.dtype}{tuple(leaf.shape)}{leaf.stride()}@{at}"


def _flat(given: object) -> Iterable[object]:
    """The arguments, with a step reduced to what a kernel reads."""
    for leaf in tree_leaves(given):
        if isinstance(leaf, Step):
            yield from (leaf.query_offsets, leaf.kv_lengths, leaf.rows, leaf.block_table, leaf.slots)
        else:
            yield leaf


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
