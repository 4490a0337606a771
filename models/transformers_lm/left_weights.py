"""Weights that are left in the files until our kernels pack them, matrix by matrix.

Kernels multiply numbers of few bits as they are stored, and those of CPUs matrices of experts one by one,
whereas transformers merges those of a layer into a copy. On a GPU, floats that are to be quantised would take
memory that the quantised model does not need. So the model has placeholders for all these, which take no
memory. Whatever computes with floats in another way fills them first.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch

from models.checkpoints.files import CheckpointError
from models.grouped_weights import GroupedWeight
from models.transformers_lm.expert_layers import PARTS, ExpertMatrix, Part, matrix_named, name_in_files

Stored: TypeAlias = Mapping[str, Callable[[], GroupedWeight]]
"""By the name of a linear layer or of an expert's matrix, what reads its weight as it is stored."""
Floats: TypeAlias = Mapping[str, Callable[[], torch.Tensor]]
Readers: TypeAlias = Mapping[str, Callable[[], GroupedWeight | torch.Tensor]]
_Shapes: TypeAlias = dict[tuple[int, Part], tuple[int, ...]]
"""By the number of an expert and the part of it."""

CLASSES: Final = frozenset(
    {
        *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        *("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"),
        *("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GraniteForCausalLM"),
        *("Olmo2ForCausalLM", "Olmo3ForCausalLM", "Phi3ForCausalLM", "SmolLM3ForCausalLM"),
        *("GlmForCausalLM", "Glm4ForCausalLM", "Ernie4_5ForCausalLM", "HeliumForCausalLM"),
        *("SeedOssForCausalLM", "Exaone4ForCausalLM", "OlmoeForCausalLM", "Glm4MoeForCausalLM"),
        *("Dots1ForCausalLM", "Ernie4_5_MoeForCausalLM"),
    }
)
"""Those that the CPU kernels can compute. Of others, all weights are read when they are loaded."""
CLASSES_ON_GPU: Final = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Likewise, the GPU kernels."""
_IN_LAYERS: Final = re.compile(
    r"model\.layers\.\d+\."
    r"(self_attn\.(qkv|[qkvo])_proj|mlp\.(gate_up|(shared_experts?\.)?(gate|up|down))_proj)"
)
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_HEAD: Final = "lm_head"
_CPU: Final = torch.device("cpu")
_MERGED: Final[Mapping[Part, str]] = MappingProxyType(
    {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
)


def is_packed(module: str, config: Any) -> bool:
    """True if our kernels pack the weight of a module, so that nothing else needs it as floats.

    A head that shares its weight with the embeddings is looked up there.
    """
    if module == _HEAD:
        return not config.tie_word_embeddings
    if not is_in_model(module, config):
        return False
    return bool(_IN_LAYERS.fullmatch(module)) or name_in_files(module) is not None


def is_in_model(module: str, config: Any) -> bool:
    """False for a module of a layer behind the last one: of a head that predicts further tokens.

    Files of GLM-4.5, for example, have one; transformers does not compute it.
    """
    layer = _LAYER.match(module)
    return layer is None or int(layer[1]) < config.num_hidden_layers


@dataclass(frozen=True, slots=True)
class _Placeholder:
    """A tensor of zeros with the interface of a file's slice. All its numbers are one in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)[index]


def with_placeholders(
    slices: Mapping[str, Any], left: Iterable[str], dtype: torch.dtype, device: torch.device = _CPU
) -> dict[str, Any]:
    """Return a checkpoint's tensors with placeholders for the weights of the modules `left`.

    The matrices of a layer's experts become the two tensors that transformers has for them, as which they may
    be stored, too.

    Raises:
        CheckpointError: experts of a layer have different shapes, or one lacks a matrix.
    """
    kept = dict(slices)
    experts: dict[str, _Shapes] = {}
    for name in left:
        found = name_in_files(name)
        if found is not None and f"{name}.weight" not in kept:
            merged = f"{found.layer}.mlp.experts.{_MERGED[found.part]}"
            kept[merged] = _Placeholder(tuple(kept[merged].get_shape()), dtype, device)
            continue
        shape = tuple(kept.pop(f"{name}.weight").get_shape())
        if found is not None:
            experts.setdefault(f"{found.layer}.mlp.experts", {})[found.number, found.part] = shape
        else:
            kept[f"{name}.weight"] = _Placeholder(shape, dtype, device)
    for name, shapes in experts.items():
        count, inner, hidden = _common_shape(name, shapes)
        kept[f"{name}.{_MERGED['up']}"] = _Placeholder((count, 2 * inner, hidden), dtype, device)
        kept[f"{name}.{_MERGED['down']}"] = _Placeholder((count, hidden, inner), dtype, device)
    return kept


def _common_shape(name: str, shapes: _Shapes) -> tuple[int, int, int]:
    """The number of experts, the width of their inner states, and that of states.

    Raises:
        CheckpointError: they do not have all their matrices in the shapes of the first.
    """
    count = len({number for number, _ in shapes})
    inner, hidden = shapes.get((0, "up"), (0, 0))
    expected = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for number, part in product(range(count), PARTS):
        if (stored := shapes.get((number, part))) != expected[part]:
            raise CheckpointError(
                f"{name}: the {part} matrix of expert {number} is {stored or 'missing'}, expected "
                f"{expected[part]}, as of the first of {count} experts; download it again"
            )
    return count, inner, hidden


def floats_of_experts(
    slices: Mapping[str, Any], dtype: torch.dtype, config: Any
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what reads the matrices of experts that are stored one by one, by the names of modules."""
    return {
        name: partial(_read, one, dtype)
        for name, one in _by_module(slices).items()
        if name_in_files(name) is not None and is_in_model(name, config)
    }


def floats_of_linears(
    slices: Mapping[str, Any], dtype: torch.dtype, config: Any, device: torch.device
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what reads the weights that our kernels pack onto a device, by the names of modules."""
    return {
        name: partial(_read, one, dtype, device)
        for name, one in _by_module(slices).items()
        if is_packed(name, config)
    }


def as_floats(
    stored: Stored, dtype: torch.dtype, device: torch.device = _CPU
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what reads matrices onto a device as floats that are stored as numbers of few bits."""

    def floats_from(read: Callable[[], GroupedWeight]) -> torch.Tensor:
        return read().to(device).floats().to(dtype)

    return {name: partial(floats_from, read) for name, read in stored.items()}


def of_experts(stored: Stored) -> Stored:
    """Return those that read matrices of experts."""
    return {name: read for name, read in stored.items() if name_in_files(name) is not None}


def _by_module(slices: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of modules, by the names of these."""
    return {name.removesuffix(".weight"): one for name, one in slices.items() if name.endswith(".weight")}


def _read(slice: Any, dtype: torch.dtype, device: torch.device = _CPU) -> torch.Tensor:
    found: torch.Tensor = slice[...]
    return found.to(device, dtype)


def fill(model: Any, readers: Readers) -> None:
    """Replace placeholders by the floats that their readers return."""
    for name, read in readers.items():
        matrix, found = matrix_named(model, name), read()
        floats = found.floats() if isinstance(found, GroupedWeight) else found
        if isinstance(matrix, ExpertMatrix):
            _allocate(matrix.experts)
            matrix.weight.copy_(floats)
        else:
            matrix.weight.data = floats.to(matrix.weight.device, matrix.weight.dtype)


def _allocate(experts: Any) -> None:
    """Give the two tensors of all experts memory, unless they have it."""
    for parameter in (experts.gate_up_proj, experts.down_proj):
        if not any(parameter.stride()):
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
