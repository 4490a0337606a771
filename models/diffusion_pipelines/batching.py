"""Calls of denoisers in one forward: the arguments that are joined, and those that calls must have in common.

A class of modules without a rule is called for one run at a time.
"""

import hashlib
import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from models.diffusion_pipelines.proxies import ModuleCall

_DIGESTED_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """The arguments of a module's `forward` that are joined; all others must be equal.

    Attributes:
        rows: the argument that has a row for each sample: a tensor, or a list of tensors.
        tensors: joined along the first dimension, with `rows`.
        lists: joined as lists, one element for each sample.
        ragged: those of `lists` whose tensors may differ in their first dimension: the module pads them.
        scalars: tensors without dimensions, such as the timestep of a U-Net: one for each sample of a batch.
        nested: dictionaries whose tensors are joined.
        padded: an argument (batch, length, width) of which the lengths may differ, and its mask (batch,
            length), which may be None.
    """

    rows: str
    tensors: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    ragged: frozenset[str] = frozenset()
    scalars: frozenset[str] = frozenset()
    nested: frozenset[str] = frozenset()
    padded: tuple[str, str] | None = None


def _rule(rows: str, *tensors: str, **others: Any) -> BatchRule:
    return BatchRule(rows=rows, tensors=frozenset(tensors), **others)


RULES: Final[Mapping[str, BatchRule]] = {
    "ZImageTransformer2DModel": _rule(
        "x", "t", lists=frozenset({"x", "cap_feats"}), ragged=frozenset({"cap_feats"})
    ),
    "QwenImageTransformer2DModel": _rule(
        "hidden_states", "hidden_states", "timestep", "guidance",
        lists=frozenset({"img_shapes"}),
        padded=("encoder_hidden_states", "encoder_hidden_states_mask"),
    ),
    "FluxTransformer2DModel": _rule(
        "hidden_states", "hidden_states", "timestep", "guidance", "pooled_projections",
        "encoder_hidden_states",
    ),
    "Flux2Transformer2DModel": _rule(
        "hidden_states", "hidden_states", "timestep", "guidance", "encoder_hidden_states", "img_ids",
        "txt_ids",
    ),
    "SD3Transformer2DModel": _rule(
        "hidden_states", "hidden_states", "timestep", "encoder_hidden_states", "pooled_projections"
    ),
    "UNet2DConditionModel": _rule(
        "sample", "sample", "encoder_hidden_states", "timestep_cond",
        scalars=frozenset({"timestep"}), nested=frozenset({"added_cond_kwargs"}),
    ),
    "WanTransformer3DModel": _rule(
        "hidden_states", "hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image"
    ),
    "LTXVideoTransformer3DModel": _rule(
        "hidden_states", "hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask"
    ),
}  # fmt: skip
"""By the class of the module. The calls are those of the pipelines of diffusers 0.42."""

_SAME_FOR_ALL: Final = frozenset(
    {("Flux2Transformer2DModel", "img_ids"), ("Flux2Transformer2DModel", "txt_ids")}
)
"""Arguments with a row for each sample of which the module reads the first only: they must be equal too."""


@cache
def _signature(module_class: Any) -> inspect.Signature:
    return inspect.signature(module_class.forward)


def arguments_of(module: torch.nn.Module, call: ModuleCall) -> dict[str, Any]:
    """The arguments of a call by name."""
    kind: Any = type(module)
    bound = _signature(kind).bind(module, *call.args, **call.kwargs)
    bound.arguments.pop("self", None)
    return dict(bound.arguments)


def rule_of(module: torch.nn.Module) -> BatchRule | None:
    """The rule of a module; None if it is called for one run at a time."""
    return RULES.get(type(module).__name__)


def rows_of(rule: BatchRule, arguments: Mapping[str, Any]) -> int:
    """The samples of a call."""
    return len(arguments[rule.rows])


class Digests:
    """Digests of tensors whose content calls must have in common, such as positions.

    One belongs to a run, and keeps those of its calls: a run passes the same tensors in every step, and to
    read one from a GPU waits for the forward before.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[torch.Tensor, bytes]] = {}

    def of(self, argument: str, tensor: torch.Tensor) -> bytes:
        """The digest of an argument that nothing writes into."""
        kept = self._kept.get(argument)
        if kept is None or kept[0] is not tensor:
            kept = self._kept[argument] = tensor, _digest(tensor)
        return kept[1]


def group_of(name: str, module: torch.nn.Module, arguments: Mapping[str, Any], digests: Digests) -> Hashable:
    """All that calls of a module must have in common to be computed together; None for a call by itself."""
    rule = rule_of(module)
    if rule is None:
        return None
    kind = type(module).__name__
    parts = []
    for argument, value in sorted(arguments.items()):
        part = _common(rule, argument, value, digests)
        if (kind, argument) in _SAME_FOR_ALL and isinstance(value, torch.Tensor):
            part = (part, digests.of(argument, value))
        parts.append((argument, part))
    return name, tuple(parts)


def _common(rule: BatchRule, argument: str, value: Any, digests: Digests) -> Hashable:
    """The part of an argument that must be equal."""
    if rule.padded and argument in rule.padded:
        return (value.shape[2:], value.dtype) if argument == rule.padded[0] else None
    if value is None:
        return None
    if argument in rule.lists:
        if value and isinstance(value[0], torch.Tensor):
            start = 1 if argument in rule.ragged else 0
            return tuple(sorted({(tuple(one.shape[start:]), str(one.dtype)) for one in value}))
        return repr(value[0])
    if argument in rule.nested:
        return tuple((key, tuple(one.shape[1:]), one.dtype) for key, one in sorted(value.items()))
    if argument in rule.scalars:
        return "scalar", getattr(value, "dtype", type(value))
    if argument in rule.tensors:
        return tuple(value.shape[1:]), value.dtype
    return (
        (tuple(value.shape), value.dtype, digests.of(argument, value))
        if isinstance(value, torch.Tensor)
        else repr(value)
    )


def _digest(tensor: torch.Tensor) -> bytes:
    content = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=_DIGESTED_BYTES).digest()


def joined(rule: BatchRule, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The arguments of one forward over several calls of one group."""
    first = calls[0]
    made = {name: _joined(rule, name, [call[name] for call in calls], calls) for name in first}
    if rule.padded:
        text, mask = rule.padded
        made[text], made[mask] = _padded([(call[text], call.get(mask)) for call in calls])
    return made


def _joined(rule: BatchRule, name: str, values: list[Any], calls: Sequence[Mapping[str, Any]]) -> Any:
    if values[0] is None or (rule.padded and name in rule.padded):
        return values[0]
    if name in rule.lists:
        return [one for value in values for one in value]
    if name in rule.tensors:
        return torch.cat(values)
    if name in rule.nested:
        return {key: torch.cat([value[key] for value in values]) for key in values[0]}
    if name in rule.scalars:
        return _scalars(rule, values, calls)
    return values[0]


def _scalars(rule: BatchRule, values: list[Any], calls: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """One value for each sample of each call."""
    device = calls[0][rule.rows].device
    rows = [
        torch.as_tensor(value, device=device).reshape(-1).expand(rows_of(rule, call))
        for value, call in zip(values, calls, strict=True)
    ]
    return torch.cat(rows)


def _padded(
    texts: list[tuple[torch.Tensor, torch.Tensor | None]],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Texts of one length, by zeros at their ends that the mask hides; no mask where none is needed."""
    longest = max(text.shape[1] for text, _ in texts)
    if all(mask is None and text.shape[1] == longest for text, mask in texts):
        return torch.cat([text for text, _ in texts]), None
    rows, masks = [], []
    for text, mask in texts:
        missing = longest - text.shape[1]
        seen = mask if mask is not None else text.new_ones(text.shape[:2], dtype=torch.long)
        rows.append(torch.nn.functional.pad(text, (0, 0, 0, missing)))
        masks.append(torch.nn.functional.pad(seen, (0, missing)))
    return torch.cat(rows), torch.cat(masks)


def split(output: Any, counts: Sequence[int]) -> list[Any]:
    """Part the output of a forward over several calls.

    Args:
        output: a tuple of tensors, or of lists, with a row for each sample.
        counts: the samples of each call.
    """
    if isinstance(output, torch.Tensor):
        return list(torch.split(output, list(counts)))
    if isinstance(output, list):
        ends = [sum(counts[: index + 1]) for index in range(len(counts))]
        return [output[end - count : end] for end, count in zip(ends, counts, strict=True)]
    if isinstance(output, tuple):
        parts = [split(one, counts) for one in output]
        return [tuple(part[index] for part in parts) for index in range(len(counts))]
    return [output] * len(counts)
