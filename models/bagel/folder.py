"""The files of a BAGEL checkpoint, in the published layout. No torch.

llm_config.json, vit_config.json    the configs of language model and vision tower
ema.safetensors                     the weights of both, and of the modules between them
ae.safetensors                      the autoencoder of images, that of FLUX
tokenizer.json                      the tokenizer, with the tokens around images
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any, Final, Self

from models.checkpoints.files import CheckpointError, read_json
from models.checkpoints.weights import Shard, read_shard

LLM_CONFIG: Final = "llm_config.json"
VIT_CONFIG: Final = "vit_config.json"
EMA: Final = "ema.safetensors"
AE: Final = "ae.safetensors"
BRACKETS: Final = ("<|vision_start|>", "<|vision_end|>")
"""The tokens around an image."""
LATENT_PATCH: Final = 2
"""A token of an image stands for so many latents in each direction."""

SIZED: Final = frozenset({"vit_pos_embed", "latent_pos_embed", "vae2llm"})
"""The members of the whole model whose shapes are sizes of the checkpoint."""

_SPACES: Final = ("vit_pos_embed.pos_embed", "latent_pos_embed.pos_embed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a checkpoint that its tensors tell, and its configs do not.

    Attributes:
        vit_side: the most patches of the vision tower along a side of an image.
        latent_side: the most tokens of latents along a side of an image.
        latent_width: the numbers in a token of latents.
    """

    vit_side: int
    latent_side: int
    latent_width: int

    @classmethod
    def of(cls, shard: Shard) -> Self:
        """Read them of the tensors of `ema.safetensors`.

        Raises:
            CheckpointError: a tensor is missing, or its shape fits no square.
        """
        vit, latent = (_side(shard, name) for name in _SPACES)
        width = _shape(shard, "vae2llm.weight")[-1]
        return cls(vit_side=vit, latent_side=latent, latent_width=width)


def read_ema(folder: Path, members: Collection[str]) -> Shard:
    """The header of `ema.safetensors`, with the tensors of these members of the whole model.

    Raises:
        CheckpointError: the file is missing, truncated or damaged.
    """
    shard = read_shard(folder / EMA)
    kept = {name: one for name, one in shard.tensors.items() if name.partition(".")[0] in members}
    return replace(shard, tensors=kept)


def bracket_ids(folder: Path) -> tuple[int, int]:
    """The ids of the tokens around an image, by `tokenizer.json`.

    Raises:
        CheckpointError: the file is missing or malformed, or lacks one of them.
    """
    path = folder / "tokenizer.json"
    raw = read_json(path)
    ids: dict[str, Any] = dict((raw.get("model") or {}).get("vocab") or {})
    ids |= {token["content"]: token["id"] for token in raw.get("added_tokens") or ()}
    begin, end = (_token_id(path, ids, name) for name in BRACKETS)
    return begin, end


def _token_id(path: Path, ids: Mapping[str, Any], name: str) -> int:
    found = ids.get(name)
    if not isinstance(found, int):
        raise CheckpointError(
            f"{path} lacks the token {name!r}: expected the tokenizer that was published with BAGEL"
        )
    return found


def _shape(shard: Shard, name: str) -> tuple[int, ...]:
    tensor = shard.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        found = "no such tensor" if tensor is None else f"one of the shape {tensor.shape}"
        raise CheckpointError(
            f"{shard.path}: expected the matrix {name}, found {found}; is it the file of a BAGEL checkpoint "
            "that understands and draws?"
        )
    return tensor.shape


def _side(shard: Shard, name: str) -> int:
    rows = _shape(shard, name)[0]
    side = isqrt(rows)
    if side * side != rows:
        raise CheckpointError(f"{shard.path}: expected a square number of rows in {name}, found {rows}")
    return side
