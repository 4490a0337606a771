"""Tensor parallelism: the part of a model that one member of a group computes, by the model's own plan.

    config.base_model_tp_plan   "layers.*.self_attn.q_proj": "colwise"      the style of each matrix
    sharded(class, peers)       a class whose instances are one member's part; cut before memory is allocated
    cuts_of(model, names)       the part of each tensor in the files

    colwise                 rows of the weight: each member has some of the outputs
    colwise_gather_output   the same, and the outputs are concatenated
    rowwise                 columns of the weight: each member has some of the inputs, and outputs are summed
    rowwise_split_input     the same, if every member has all inputs
    packed_colwise          two matrices in one tensor, each cut by its rows
    moe_tp_experts          experts with cut matrices, whose outputs are summed

Embeddings and head are whole in every member, regardless of the plan; the result is the same. Other styles
are refused, and so are matrices that do not divide evenly, and cuts through an attention head.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.nn.functional import linear
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from models.base import Peers
from models.checkpoints.files import UnsupportedArchitectureError
from models.transformers_lm.architecture import body_name_of, body_of

_COLUMNS: Final = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
_ROWS: Final = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
_WHOLE: Final = frozenset(
    {
        "replicate",
        "replicated_with_grad_allreduce",
        "embedding_rowwise",
        "embedding_colwise",
        "mla_kv_a_proj",  # of latent attention: whole, but for its gradient
    }
)
_PACKED: Final = "packed_colwise"
_EXPERTS: Final = "moe_tp_experts"
_PARTS: Final = "_dalsegno_parts"
"""The attribute of a sharded model with the cuts of its parameters, by their names."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A member's part of a tensor: the one with `index` of `size` equal parts along `dim`.

    Attributes:
        dim: counted from the end, because experts are merged along a new first dimension.
        matrices: the number of matrices that the tensor concatenates along `dim`; each is cut.
    """

    dim: int
    index: int
    size: int
    matrices: int = 1

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if a tensor of this shape divides evenly. Otherwise 65 rows in two parts would pass for 64."""
        return len(shape) >= -self.dim and shape[self.dim] % (self.matrices * self.size) == 0

    def of(self, tensor: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """The part of a tensor, or of a slice of a file, of which only the part is read."""
        each = shape[self.dim] // self.matrices
        part = each // self.size
        dim = len(shape) + self.dim
        found = [
            tensor[
                (
                    *[slice(None)] * dim,
                    slice(matrix * each + self.index * part, matrix * each + (self.index + 1) * part),
                )
            ]
            for matrix in range(self.matrices)
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim=dim)


@dataclass(frozen=True, slots=True)
class SilentPeers:
    """Peers without communication, for runs without memory: results have the right shapes only."""

    index: int
    size: int

    def add(self, tensor: torch.Tensor) -> None:
        pass

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * self.size, dim=-1)


class _ColumnLinear(torch.nn.Linear):
    """A linear layer with some of the outputs."""

    peers: Peers
    is_joined: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        part = super().forward(input)
        return self.peers.join(part) if self.is_joined else part


class _RowLinear(torch.nn.Linear):
    """A linear layer with some of the inputs; the bias is whole and added after the sum."""

    peers: Peers
    is_split: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.is_split:
            input = input.chunk(self.peers.size, dim=-1)[self.peers.index]
        total = linear(input, self.weight)
        self.peers.add(total)
        bias = self._parameters["bias"]
        return total if bias is None else total + bias


def sharded(model_class: Any, peers: Peers) -> Any:
    """A subclass of `model_class` whose instances, built on the meta device, are the part of one member.

    Its constructor raises UnsupportedArchitectureError if the model cannot be shared.
    """

    def begin(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        _shard(self, peers)

    # Transformers selects its rules by the name of the class.
    attributes = {
        "__module__": model_class.__module__,
        "__qualname__": model_class.__qualname__,
        "__init__": begin,
    }
    return type(model_class.__name__, (model_class,), attributes)


def is_part(layer: Any) -> bool:
    """True if a linear layer is a member's part of one: it may have to be called to be joined or summed."""
    return isinstance(layer, _ColumnLinear | _RowLinear)


def joins_parts(layer: Any) -> bool:
    """True if a call of a linear layer concatenates the outputs of all members."""
    return isinstance(layer, _ColumnLinear) and layer.is_joined


def cuts_of(model_class: Any, config: Any, names: Iterable[str]) -> Mapping[str, Cut]:
    """The parts to read of the tensors in the files, by their names there; other tensors are read whole.

    Only tensors of a `sharded` class are cut.

    Raises:
        UnsupportedArchitectureError: a tensor is stored in a form that cannot be cut.
    """
    model = _without_memory(model_class, config)
    parts: Mapping[str, Cut] = getattr(model, _PARTS, MappingProxyType({}))
    if not parts:
        return {}
    found: dict[str, Cut] = {}
    for name, renamed, converter in _places(model, names):
        cut = parts.get(renamed)
        if cut is not None:
            found[name] = cut if converter is None else _of_merged(converter, cut, name, model)
    return found


def floats_among(model_class: Any, config: Any, names: Iterable[str]) -> list[str]:
    """The names of those tensors in the files that become floating-point tensors of the model."""
    model = _without_memory(model_class, config)
    state = model.state_dict()
    places = _places(model, names)
    return [name for name, place, _ in places if place in state and state[place].is_floating_point()]


def _without_memory(model_class: Any, config: Any) -> Any:
    with torch.device("meta"):
        return model_class(deepcopy(config))


def _places(model: Any, names: Iterable[str]) -> Iterator[tuple[str, str, Any]]:
    """The names in the files, each with its name in the model, and the converter if it merges several."""
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    state, prefix = model.state_dict(), body_name_of(model)
    for name in sorted(names, key=dot_natural_key):  # in transformers' order: some rules have state
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = name, None
        yield name, renamed, None if pattern is None else by_pattern[pattern]


def _of_merged(converter: Any, cut: Cut, name: str, model: Any) -> Cut:
    """The cut of one of several tensors that are merged to one."""
    kinds = {type(operation) for operation in converter.operations}
    if kinds <= {MergeModulelist, Concatenate} and (Concatenate in kinds) == (cut.matrices > 1):
        return Cut(cut.dim, cut.index, cut.size)
    operations = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise _refused(model, f"{name} is converted by {operations} when it is loaded, and cannot be cut")


# ---- modules -----------------------------------------------------------------------------------------


def _shard(model: Any, peers: Peers) -> None:
    """Cut a model's modules in place."""
    body = body_of(model)
    plan = getattr(body.config, "base_model_tp_plan", None) or {}
    place = next(name for name, module in model.named_modules() if module is body)
    prefix = f"{place}." if place else ""
    modules, parameters = dict(body.named_modules()), dict(body.named_parameters())
    parts: dict[str, Cut] = {}
    experts: list[str] = []
    for name in (*modules, *parameters):
        style = plan.get(_generic(name))
        if style is None or style in _WHOLE:
            continue
        module = modules.get(name)
        if style == _EXPERTS and module is not None:
            experts.append(name)
        elif style in _COLUMNS | _ROWS and module is not None:
            _replace(model, modules, name, style, peers)
            dim = -2 if style in _COLUMNS else -1
            parts[f"{prefix}{name}.weight"] = Cut(dim, peers.index, peers.size)
            if style in _COLUMNS and module.bias is not None:
                parts[f"{prefix}{name}.bias"] = Cut(-1, peers.index, peers.size)
        elif style in {_PACKED, *_ROWS} and name in parameters:
            matrices, dim = (2, -2) if style == _PACKED else (1, -1)
            parts[f"{prefix}{name}"] = Cut(dim, peers.index, peers.size, matrices)
            _narrow(model, modules, name, parts[f"{prefix}{name}"])
        else:
            raise _refused(model, f"its plan asks for {style!r} of {name}, which is not supported")
    for name in experts:
        _add_up(model, modules[name], f"{prefix}{name}", parts, peers)
    if not parts:
        raise _refused(model, "transformers has no tensor-parallel plan for it (base_model_tp_plan)")
    setattr(model, _PARTS, parts)


def _generic(name: str) -> str:
    """A name in the form of plans: with a star for every number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _replace(model: Any, modules: Mapping[str, Any], name: str, style: str, peers: Peers) -> None:
    """Replace a linear layer by its part."""
    whole = modules[name]
    if type(whole) is not torch.nn.Linear:
        raise _refused(model, f"{name} is a {type(whole).__name__}: expected a plain Linear")
    parent_name, _, own = name.rpartition(".")
    parent, has_bias = modules[parent_name], whole.bias is not None
    like = {"device": whole.weight.device, "dtype": whole.weight.dtype}
    part: torch.nn.Linear
    if style in _COLUMNS:
        outputs = _share(model, whole.out_features, name, peers.size)
        head = getattr(parent, "head_dim", None)
        if style == "colwise" and isinstance(head, int) and outputs % head:
            heads = whole.out_features // head
            raise _refused(model, f"{name} has {heads} heads, which do not divide by {peers.size}")
        part = _ColumnLinear(whole.in_features, outputs, bias=has_bias, **like)
        part.peers, part.is_joined = peers, style != "colwise"
    else:
        inputs = _share(model, whole.in_features, name, peers.size)
        part = _RowLinear(inputs, whole.out_features, bias=has_bias, **like)
        part.peers, part.is_split = peers, style != "rowwise"
    setattr(parent, own, part)


def _narrow(model: Any, modules: Mapping[str, Any], name: str, cut: Cut) -> None:
    """Reduce a parameter of experts, which is not the weight of a module, to its part."""
    parent_name, _, own = name.rpartition(".")
    whole = getattr(modules[parent_name], own)
    if whole.ndim != 3:
        raise _refused(model, f"{name} has {whole.ndim} dimensions: expected experts' matrices, of 3")
    shape = list(whole.shape)
    shape[cut.dim] = _share(model, shape[cut.dim] // cut.matrices, name, cut.size) * cut.matrices
    setattr(modules[parent_name], own, torch.nn.Parameter(whole.new_empty(shape), requires_grad=False))


def _add_up(model: Any, experts: Any, name: str, parts: Mapping[str, Cut], peers: Peers) -> None:
    """Sum the outputs of experts over all members, by a forward hook."""
    for own, _ in experts.named_parameters():
        if f"{name}.{own}" not in parts:
            raise _refused(
                model, f"{name}.{own} is whole in every member, and would be added by each of them"
            )

    def add(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        peers.add(output)
        return output

    hook: Callable[..., Any] = add
    experts.register_forward_hook(hook)


def _share(model: Any, total: int, name: str, size: int) -> int:
    if total % size:
        raise _refused(model, f"{name} is {total} wide, which does not divide by {size}")
    return total // size


def _refused(model: Any, why: str) -> UnsupportedArchitectureError:
    return UnsupportedArchitectureError(
        f"{type(model).__name__} cannot be shared by that many ranks: {why}; "
        "choose another tp_size, or leave it out"
    )
