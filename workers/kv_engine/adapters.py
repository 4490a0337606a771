"""The LoRA adapters of one engine: loaded when a sequence needs them, within a limit of memory.

An order names its adapter with folder and digest, so a worker that has restarted needs to know nothing more.
Adapters without sequences stay until the memory is needed; the least recently used one goes first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from shared.adapters import Adapter
from shared.errors import CapacityError, ClientError
from workers.kv_engine.sequence import Sequence, Span

if TYPE_CHECKING:
    from models.transformers_lm.adapters import AdaptedModules, AdapterWeights

MEMORY_BYTES: Final = 1 << 30
"""The default limit of the adapters' memory."""


class NoRoomForAdapterError(CapacityError):
    """The adapters of running requests take all the memory for adapters."""

    code = "adapters_memory_full"


class Adapters:
    """The loaded adapters of a node; `limit` is in bytes."""

    def __init__(self, modules: "AdaptedModules | None", limit: int) -> None:
        self._modules = modules
        self._limit = limit
        self._loaded: OrderedDict[str, AdapterWeights] = OrderedDict()

    def weights(self, adapter: Adapter, running: Iterable[Sequence]) -> "AdapterWeights":
        """Return an adapter's weights, loaded if necessary; `running` are the sequences in the engine.

        Raises:
            ClientError: this node takes no adapters.
            AdapterError: its files cannot be served, or are others now.
            NoRoomForAdapterError: it does not fit beside those of running sequences.
        """
        if self._modules is None:
            raise ClientError("this deployment takes no adapters: expected the key `adapters`")
        found = self._loaded.get(adapter.digest)
        if found is None:
            found = self._modules.load(adapter)
            self._make_room(found, {one.adapter.adapter.digest for one in running if one.adapter is not None})
            self._loaded[adapter.digest] = found
        self._loaded.move_to_end(adapter.digest)
        return found

    def computing(self, spans: Items[Span]) -> Any:
        """Return the context of a forward over `spans`, whose tokens are its first ones."""
        if self._modules is None or not uses_adapters(spans):
            return nullcontext()
        return self._modules.computing(list(self._groups(spans)))

    def _make_room(self, new: "AdapterWeights", in_use: set[str]) -> None:
        used = sum(one.nbytes for one in self._loaded.values())
        for digest in [one for one in self._loaded if one not in in_use]:
            if used + new.nbytes <= self._limit:
                break
            used -= self._loaded.pop(digest).nbytes
        if used + new.nbytes > self._limit:
            raise NoRoomForAdapterError(
                f"adapter {new.adapter.name!r} needs {new.nbytes} bytes, but those of running requests take "
                f"{used} of {self._limit} (adapters_memory_bytes): try again later, or raise the limit"
            )

    @staticmethod
    def _groups(spans: Items[Span]) -> "Iterator[tuple[AdapterWeights, torch.Tensor]]":
        """The adapters of a step with the indices of their tokens."""
        tokens: dict[AdapterWeights, list[int]] = {}
        offset = 0
        for span in spans:
            if span.sequence.adapter is not None:
                tokens.setdefault(span.sequence.adapter, []).extend(range(offset, offset + span.count))
            offset += span.count
        for weights, indices in tokens.items():
            device = next(iter(weights.products.values())).a.device
            yield weights, torch.tensor(indices, device=device)


def uses_adapters(spans: Items[Span]) -> bool:
    """Return whether any of the spans has an adapter."""
    return any(span.sequence.adapter is not None for span in spans)
