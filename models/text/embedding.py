"""The embedding settings of a checkpoint: pooling mode, normalization, dimensions. No torch.

They are read from the files that sentence-transformers writes: `modules.json` lists the modules after the
model, and the folder of its `Pooling` module has the mode. Without these files an embedding is the last
token's hidden state, normalized, as usual for decoder-only embedding models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from models.checkpoints.files import CheckpointError, read_json, read_json_if_present, text_config
from models.sequence_request import PoolingParams
from shared.errors import ClientError

_SWITCHES: Final[Mapping[str, str]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The keys of sentence-transformers' older files: a boolean per mode. Vectors are joined in this order."""
MODES: Final = ("cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean")
"""The supported modes (`workers.kv_engine.sampling.pooling`)."""


class EmbeddingsNotSupportedError(ClientError):
    """The checkpoint's embeddings need an operation that is not supported."""

    code = "embeddings_not_supported"


class DimensionsNotSupportedError(ClientError):
    """The checkpoint has no embedding with that number of dimensions."""

    code = "dimensions_not_supported"
    param = "dimensions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The embedding settings of a checkpoint.

    Attributes:
        mode: the pooling mode, one of `MODES`.
        normalize: embeddings are scaled to length 1.
        size: the number of dimensions.
        truncations: the numbers of leading dimensions that a request may ask for; None allows any.
        unsupported: the reason why embeddings cannot be computed; empty if they can.
    """

    mode: str = "lasttoken"
    normalize: bool = True
    size: int = 0
    truncations: tuple[int, ...] | None = ()
    unsupported: str = ""

    def pooling(self, dimensions: int | None) -> PoolingParams:
        """The pooling of a prompt, for an embedding with `dimensions` dimensions; None means all.

        Raises:
            ClientError: the checkpoint has no such embedding.
        """
        if self.unsupported:
            raise EmbeddingsNotSupportedError(
                f"this checkpoint's embeddings are not supported: {self.unsupported}"
            )
        if dimensions is None or dimensions == self.size:
            return PoolingParams(mode=self.mode, normalize=self.normalize)
        if dimensions > self.size or (self.truncations is not None and dimensions not in self.truncations):
            allowed = sorted({*(self.truncations or ()), self.size})
            any_size = f"at most {self.size}"
            expected = any_size if self.truncations is None else f"one of {', '.join(map(str, allowed))}"
            raise DimensionsNotSupportedError(
                f"dimensions: expected {expected}, as this checkpoint says, found {dimensions}"
            )
        return PoolingParams(mode=self.mode, normalize=self.normalize, dimensions=dimensions)


def read(checkpoint: Path) -> Embedding:
    """Read the embedding settings of a checkpoint.

    Raises:
        CheckpointError: a file is malformed.
    """
    config = read_json_if_present(checkpoint / "config.json")
    text = text_config(config)
    size = text.get("hidden_size", text.get("n_embd"))
    known: dict[str, Any] = {
        "size": size if isinstance(size, int) else 0,
        "truncations": _truncations(config),
    }
    path = checkpoint / "modules.json"
    if not path.is_file():
        return Embedding(**known)
    mode, normalize, unsupported = "", False, ""
    for module in modules_of(checkpoint):
        kind = module.kind
        if kind == "Pooling" and not mode:
            mode = "+".join(modes_of(checkpoint / module.path / "config.json"))
            if mode not in MODES:
                unsupported = f"they are pooled by {mode!r}, expected one of {', '.join(MODES)}"
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            unsupported = (
                f"modules.json has {kind!r} after the model, expected 'Pooling' and 'Normalize' only"
            )
    return Embedding(mode=mode or "lasttoken", normalize=normalize, unsupported=unsupported, **known)


class Module(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `modules.json`: a module's folder, and the name of its class with that of its package."""

    path: str
    type: str

    @property
    def kind(self) -> str:
        """The name of the class, such as `Pooling`."""
        return self.type.rpartition(".")[2]


def modules_of(checkpoint: Path) -> list[Module]:
    """The modules that `modules.json` lists, in their order; none without such a file.

    Raises:
        CheckpointError: the file is malformed.
    """
    path = checkpoint / "modules.json"
    if not path.is_file():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Module])
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise CheckpointError(f"{path}: expected sentence-transformers' list of modules: {error}") from error


def modes_of(path: Path) -> list[str]:
    """The pooling modes in the configuration of a `Pooling` module; vectors of several are joined.

    Raises:
        CheckpointError: the file is malformed, or names no mode.
    """
    config = read_json(path)
    named = config.get("pooling_mode")
    found = [named] if isinstance(named, str) else named
    modes = found or [mode for name, mode in _SWITCHES.items() if config.get(name)]
    if not isinstance(modes, list) or not modes or not all(isinstance(mode, str) for mode in modes):
        raise CheckpointError(f"{path}: expected one of {', '.join(_SWITCHES)} to be true, found none")
    return modes


def _truncations(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The sizes to which an embedding may be truncated, by `matryoshka_dimensions` and `is_matryoshka`."""
    named = config.get("matryoshka_dimensions")
    if isinstance(named, list):
        return tuple(size for size in named if isinstance(size, int))
    return None if config.get("is_matryoshka") is True else ()
