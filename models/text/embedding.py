"""How a checkpoint wants its hidden states made into an embedding: read from its files, without torch.

sentence-transformers writes it down: `modules.json` lists what follows on the model, and the folder of its
`Pooling` says how. Where nothing is written down it is the last token's state, brought to length 1, as
decoder-only embedding models have it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from models.checkpoints.files import CheckpointError, read_json
from models.sequence_request import PoolingParams
from shared.errors import ClientError

_SWITCHES: Final[Mapping[str, str]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
"""As sentence-transformers writes it: a boolean for each mode."""
MODES: Final = ("cls", "lasttoken", "mean", "weightedmean")
"""Those that are computed (`workers.kv_engine.sampling.pooling`)."""


class EmbeddingsNotSupportedError(ClientError):
    """The checkpoint makes its embeddings in a way that is not computed here."""

    code = "embeddings_not_supported"


class DimensionsNotSupportedError(ClientError):
    """The checkpoint has no embedding of that many dimensions."""

    code = "dimensions_not_supported"
    param = "dimensions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """How a checkpoint's embeddings are made.

    Attributes:
        mode: of `MODES`.
        normalize: they have length 1.
        size: how many dimensions they have.
        parts: how many of the first ones may be taken in their place; None is any number.
        why_not: what of it is not computed here; empty where all is.
    """

    mode: str = "lasttoken"
    normalize: bool = True
    size: int = 0
    parts: tuple[int, ...] | None = ()
    why_not: str = ""

    def asked(self, dimensions: int | None) -> PoolingParams:
        """The pooling of a prompt, for an embedding of so many dimensions; None is all.

        Raises:
            ClientError: the checkpoint has none, or none of that size.
        """
        if self.why_not:
            raise EmbeddingsNotSupportedError(
                f"this checkpoint's embeddings are not computed here: {self.why_not}"
            )
        if dimensions is None or dimensions == self.size:
            return PoolingParams(mode=self.mode, normalize=self.normalize)
        if dimensions > self.size or (self.parts is not None and dimensions not in self.parts):
            allowed = sorted({*(self.parts or ()), self.size})
            expected = (
                f"at most {self.size}" if self.parts is None else f"one of {', '.join(map(str, allowed))}"
            )
            raise DimensionsNotSupportedError(
                f"dimensions: expected {expected}, as this checkpoint says, found {dimensions}"
            )
        return PoolingParams(mode=self.mode, normalize=self.normalize, dimensions=dimensions)


def read(checkpoint: Path) -> Embedding:
    """What the files of a checkpoint say.

    Raises:
        CheckpointError: one of them is malformed.
    """
    config = _read_if_there(checkpoint / "config.json")
    size = config.get("hidden_size")
    known: dict[str, Any] = {"size": size if isinstance(size, int) else 0, "parts": _parts(config)}
    path = checkpoint / "modules.json"
    if not path.is_file():
        return Embedding(**known)
    mode, normalize, why_not = "", False, ""
    for module in _modules(path):
        kind = module.type.rpartition(".")[2]
        if kind == "Pooling" and not mode:
            mode = _mode_of(checkpoint / module.path / "config.json")
            if mode not in MODES:
                why_not = f"they are pooled by {mode!r}, expected one of {', '.join(MODES)}"
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            why_not = f"modules.json has {kind!r} behind the model, expected 'Pooling' and 'Normalize' alone"
    return Embedding(mode=mode or "lasttoken", normalize=normalize, why_not=why_not, **known)


class _Module(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    type: str


def _modules(path: Path) -> list[_Module]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise CheckpointError(f"{path}: expected sentence-transformers' list of modules: {error}") from error


def _mode_of(path: Path) -> str:
    config = read_json(path)
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else [m for name, m in _SWITCHES.items() if config.get(name)]
    if not modes:
        raise CheckpointError(f"{path}: expected one of {', '.join(_SWITCHES)} to be true, found none")
    return "+".join(modes)


def _parts(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The sizes an embedding may be cut to, by `matryoshka_dimensions` and `is_matryoshka`."""
    named = config.get("matryoshka_dimensions")
    if isinstance(named, list):
        return tuple(size for size in named if isinstance(size, int))
    return None if config.get("is_matryoshka") is True else ()


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
