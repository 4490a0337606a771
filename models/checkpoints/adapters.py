"""LoRA adapters on disk: folders as peft writes them. Reads headers, no weights and no torch.

    adapter_config.json          rank, scale, and which modules are adapted
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight (r, in), .lora_B.weight (out, r)

An adapted module computes `y = W x + scale * B (A x)`. What peft can add to that and would change the answer
(DoRA, biases, whole modules, ...) is refused by the name of its field.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from models.checkpoints.files import CheckpointError, read_json
from models.checkpoints.weights import Shard, read_shard
from shared.adapters import Adapter

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_SIDES: Final = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_ENDS: Final = ("lm_head", "embed_tokens", "wte")
"""Modules without a hidden state of each token as input: the embeddings, and the head."""
_DIGEST_BYTES: Final = 16
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "megatron_config": ({},),
    "use_qalora": (False,),
    "fan_in_fan_out": (False,),
    "arrow_config": ({},),
    "use_bdlora": (False, {}),
    "velora_config": ({},),
    "monteclora_config": ({},),
}
"""Fields that change what a module computes, with the values that do not; so does null."""

_STARTS: Final = (None, "gaussian", "eva", "orthogonal")
"""The initial values that leave the base model as it is, besides true and false."""


class AdapterError(CheckpointError):
    """An adapter that cannot be served: damaged, of another kind, or made for another model."""

    code = "invalid_adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """A checked adapter folder.

    Attributes:
        scales: by adapted module, the factor of its product.
        shard: the file of its weights, of which only the header was read.
    """

    folder: Path
    scales: Mapping[str, float]
    shard: Shard

    @property
    def nbytes(self) -> int:
        """The bytes of its weights, as stored."""
        return self.shard.nbytes


def tensor_name(module: str, side: str) -> str:
    """The name in the file of matrix `A` or `B` of a module."""
    return f"{_PREFIX}{module}.lora_{side}.weight"


def read_adapter(folder: Path) -> AdapterFiles:
    """Check an adapter folder by its configuration and the header of its weights.

    Raises:
        AdapterError: a file is missing, damaged, or asks for what is not served; the message names the field.
    """
    try:
        config = read_json(folder / CONFIG)
        _check(config, folder)
        shard = read_shard(folder / WEIGHTS)
    except AdapterError:
        raise
    except CheckpointError as error:
        raise AdapterError(f"adapter {folder}: {error.message}") from error
    except OSError as error:
        raise AdapterError(
            f"adapter {folder}: expected {CONFIG} and {WEIGHTS}, as peft writes them"
        ) from error
    return AdapterFiles(folder=folder, scales=_scales(config, shard, folder), shard=shard)


def adapter_at(name: str, folder: Path) -> Adapter:
    """Check a folder, and name it with the digest of its content.

    Raises:
        AdapterError: see `read_adapter`.
    """
    read_adapter(folder)
    return Adapter(name=name, digest=adapter_digest(folder), folder=str(folder))


def adapter_digest(folder: Path) -> str:
    """The digest of every byte of an adapter's two files (hex, blake2b).

    Raises:
        AdapterError: a file is missing.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in (CONFIG, WEIGHTS):
        try:
            with (folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise AdapterError(f"adapter {folder}: cannot read {name}: {error.strerror}") from error
    return digest.hexdigest()


# ---- the configuration -----------------------------------------------------------------------------


def _check(config: Mapping[str, Any], folder: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterError(
            f"adapter {folder}: peft_type is {config.get('peft_type')!r}: expected 'LORA', the kind that is "
            "served"
        )
    for field, neutral in _NEUTRAL.items():
        value = config.get(field)
        if value is not None and value not in neutral:
            raise AdapterError(
                f"adapter {folder}: {field} is {value!r}, which is not served: expected an adapter without it"
            )
    start = config.get("init_lora_weights", True)
    if not isinstance(start, bool) and start not in _STARTS:
        raise AdapterError(
            f"adapter {folder}: init_lora_weights is {start!r}, which changes the base model's "
            "weights: convert it to a plain adapter (path_initial_model_for_weight_conversion of peft's "
            "save_pretrained)"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise AdapterError(
            f"adapter {folder}: expected a positive whole number r and a number lora_alpha, found "
            f"{rank!r} and {alpha!r}"
        )
    for field in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(field) or {}, dict):
            raise AdapterError(f"adapter {folder}: {field} is {config[field]!r}: expected an object")


def _scales(config: Mapping[str, Any], shard: Shard, folder: Path) -> dict[str, float]:
    """The factor of each adapted module; its matrices are in the file, and have its rank."""
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, info in shard.tensors.items():
        side = next((end for end in _SIDES if name.endswith(end)), None)
        if side is None or not name.startswith(_PREFIX):
            raise AdapterError(
                f"adapter {folder}: {WEIGHTS} has the tensor {name!r}, which is not served: expected "
                f"{tensor_name('<module>', 'A')} and ...lora_B.weight alone"
            )
        module = name.removeprefix(_PREFIX).removesuffix(side)
        modules.setdefault(module, {})[_SIDES[side]] = info.shape
    if not modules:
        raise AdapterError(f"adapter {folder}: {WEIGHTS} has no tensors: expected matrices A and B")
    return {module: _scale(module, shapes, config, folder) for module, shapes in sorted(modules.items())}


def _scale(
    module: str, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], folder: Path
) -> float:
    if module.rpartition(".")[2] in _ENDS:
        raise AdapterError(
            f"adapter {folder}: it adapts {module}, which is not served: expected target_modules among the "
            "linear modules of the layers"
        )
    rank = int(_by_pattern(config.get("rank_pattern"), module, config["r"]))
    alpha = float(_by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
    found_a, found_b = shapes.get("A"), shapes.get("B")
    is_whole = found_a is not None and found_b is not None and len(found_a) == len(found_b) == 2
    if not is_whole or found_a[0] != rank or found_b[1] != rank:  # type: ignore[index] # both are known
        raise AdapterError(
            f"adapter {folder}: {module} has matrices A {found_a} and B {found_b}: expected (r, in) and "
            f"(out, r) with r = {rank}"
        )
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _by_pattern(pattern: Mapping[str, Any] | None, module: str, otherwise: Any) -> Any:
    """The value for a module: the first key that is its name, the end of it, or an expression for it."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return otherwise
