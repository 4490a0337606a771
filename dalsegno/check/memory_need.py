"""The memory that a checkpoint needs: its weights, by the headers of their files, and its KV cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from configs.deployment import DeploymentConfig
from dalsegno.config import environment, resolve
from dalsegno.hub import memory, selection
from dalsegno.hub.progress import in_words
from models.checkpoints import hub_cache

_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
_QUANTISED_BITS: Final = {"int8": 8.5, "int4": 4.5, "fp8": 8}
"""Of a weight, by `model_kwargs.quantize`, with its share of a scale (`models.grouped_weights`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """The memory of one copy of a model, over all its ranks.

    Attributes:
        weights_bytes: of the weights, in the dtype that they are loaded in; if they are quantised meanwhile,
            of all matrices in that many bits.
        is_quantised: whether they are.
        kv_bytes_per_token: of the KV cache; 0 if unknown, or if there is none.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    is_quantised: bool = False

    def in_words(self, max_seq_len: int) -> Iterator[str]:
        """Yield notes for the operator."""
        rest = "; embeddings stay floats, and the head has eight bits" if self.is_quantised else ""
        yield f"the weights take {in_words(self.weights_bytes)} of memory{rest}"
        if each := self.kv_bytes_per_token:
            yield (
                f"keys and values take {in_words(each)} for each token, {in_words(each * max_seq_len)} for a "
                f"sequence of {max_seq_len}"
            )

    def as_data(self) -> dict[str, Any]:
        """The values for programs."""
        return {"weights_bytes": self.weights_bytes, "kv_bytes_per_token": self.kv_bytes_per_token}


def of(config: DeploymentConfig, *, kv_bytes: int) -> MemoryNeed | None:
    """The memory of a configuration's checkpoint; None if its weights are not known here.

    Raises:
        ClientError, HubUnavailableError: the header of a file with weights is damaged, or cannot be had.
    """
    folder = Path(config.checkpoint)
    on_hub = hub_cache.origin(folder)
    if on_hub is not None:
        sizes = memory.of_hub_name(on_hub, resolve.hub_of(environment.read()), folder)
    else:
        sizes = memory.of_files(selection.safetensors_of(folder))
    if sizes is None:
        return None
    each = _BYTES.get(str(config.model_kwargs.get("dtype", "auto")))
    weights_bytes = sizes.bytes_as(each) if each is not None else sizes.stored_bytes
    bits = _QUANTISED_BITS.get(str(config.model_kwargs.get("quantize", "auto")))
    if bits is not None:
        weights_bytes = int(sizes.bytes_as(2) / 16 * bits)
    return MemoryNeed(
        weights_bytes=weights_bytes,
        kv_bytes_per_token=kv_bytes,
        is_quantised=bits is not None,
    )
