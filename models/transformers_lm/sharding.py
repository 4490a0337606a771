"""A model's part that one of several members computes: cut by the model's own plan, before it has memory.

    config.base_model_tp_plan   "layers.*.self_attn.q_proj": "colwise"      which matrix, and how
    sharded(class, peers)       a class whose instances are one member's part
    cuts_of(model, names)       what of each tensor in the files that part is

    colwise                 rows of the weight: each member has some of the outputs
    colwise_gather_output   the same, and the outputs are joined
    rowwise                 columns of the weight: each has some of the inputs, and the outputs are added
    rowwise_split_input     the same, where every member has all of the inputs
    packed_colwise          two matrices in one tensor, each cut by its rows
    moe_tp_experts          experts of whose matrices each member has a part: their outputs are added

Embeddings and head are whole in every member, whatever a plan says of them: that gives the same. A plan that
asks for something else is refused, and so are matrices that do not divide, and heads that would be torn.
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

_COLUMNS: Final = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
_ROWS: Final = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
_WHOLE: Final = frozenset(
    {"replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise"}
)
_PACKED: Final = "packed_colwise"
_EXPERTS: Final = "moe_tp_experts"
_PARTS: Final = "_dalsegno_parts"
"""What is cut of a sharded model's parameters, by their names: an attribute of the model."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a tensor a member has: of `size` equal ones along `dim` the one with that index.

    Attributes:
        dim: from the end, as experts are merged in front.
        matrices: the tensor holds so many one behind the other along `dim`, each of which is cut.
    """

    dim: int
    index: int
    size: int
    matrices: int = 1

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether such a tensor divides into parts: cut all the same, 65 rows in two would pass for 64."""
        return len(shape) >= -self.dim and shape[self.dim] % (self.matrices * self.size) == 0

    def of(self, tensor: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """The part; `tensor` is one, or a slice of a file, of which only that is read."""
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
    """A member that is alone with itself: shapes are right, and numbers are not. For runs without memory."""

    index: int
    size: int

    def add(self, tensor: torch.Tensor) -> None:
        pass

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * self.size, dim=-1)


class _ColumnLinear(torch.nn.Linear):
    """Some of a matrix' outputs."""

    peers: Peers
    is_joined: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        part = super().forward(input)
        return self.peers.join(part) if self.is_joined else part


class _RowLinear(torch.nn.Linear):
    """Some of a matrix' inputs; the bias is whole, and added once."""

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
    """A class like `model_class`, whose instances have the part of one member, without memory as they are.

    Making an instance raises UnsupportedArchitectureError where the model cannot be shared.
    """

    def begin(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        _shard(self, peers)

    # The name says to transformers which of its rules the class is under, and to people which model it is.
    told = {"__module__": model_class.__module__, "__qualname__": model_class.__qualname__, "__init__": begin}
    return type(model_class.__name__, (model_class,), told)


def cuts_of(model_class: Any, config: Any, names: Iterable[str]) -> Mapping[str, Cut]:
    """What to read of the tensors in the files, by their names there; a name that is not in it is read whole.

    Args:
        model_class: a class that is `sharded`, or another: of that nothing is cut.
        config: the model's.
        names: of all tensors in the files.

    Raises:
        UnsupportedArchitectureError: a tensor is not stored in a way that can be cut.
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
    """Those of the tensors in the files, by their names there, that become floats of the model."""
    model = _without_memory(model_class, config)
    state = model.state_dict()
    places = _places(model, names)
    return [name for name, place, _ in places if place in state and state[place].is_floating_point()]


def _without_memory(model_class: Any, config: Any) -> Any:
    with torch.device("meta"):
        return model_class(deepcopy(config))


def _places(model: Any, names: Iterable[str]) -> Iterator[tuple[str, str, Any]]:
    """Names in the files, each with that of its place in the model, and what merges several into one."""
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    for name in sorted(names, key=dot_natural_key):  # as transformers goes through them: some rules remember
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = name, None
        yield name, renamed, None if pattern is None else by_pattern[pattern]


def _of_merged(converter: Any, cut: Cut, name: str, model: Any) -> Cut:
    """The cut of one of several tensors that become one."""
    kinds = {type(operation) for operation in converter.operations}
    if kinds <= {MergeModulelist, Concatenate} and (Concatenate in kinds) == (cut.matrices > 1):
        return Cut(cut.dim, cut.index, cut.size)
    told = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise _refused(model, f"{name} is stored otherwise than the model has it ({told}), and cannot be cut")


# ---- modules -----------------------------------------------------------------------------------------


def _shard(model: Any, peers: Peers) -> None:
    """Cut a model's modules in place."""
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    body = model.base_model
    prefix = f"{model.base_model_prefix}." if body is not model else ""
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
            raise _refused(model, f"its plan asks for {style!r} of {name}, which is not known here")
    for name in experts:
        _add_up(model, modules[name], f"{prefix}{name}", parts, peers)
    if not parts:
        raise _refused(model, "transformers has no plan of how to share it (base_model_tp_plan)")
    setattr(model, _PARTS, parts)


def _generic(name: str) -> str:
    """A name as plans have it: with a star for every number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _replace(model: Any, modules: Mapping[str, Any], name: str, style: str, peers: Peers) -> None:
    """Put a part of a matrix in its place."""
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
    """Make a parameter that is no module's weight, of experts, as narrow as its part."""
    parent_name, _, own = name.rpartition(".")
    whole = getattr(modules[parent_name], own)
    if whole.ndim != 3:
        raise _refused(model, f"{name} has {whole.ndim} dimensions: expected experts' matrices, of 3")
    shape = list(whole.shape)
    shape[cut.dim] = _share(model, shape[cut.dim] // cut.matrices, name, cut.size) * cut.matrices
    setattr(modules[parent_name], own, torch.nn.Parameter(whole.new_empty(shape), requires_grad=False))


def _add_up(model: Any, experts: Any, name: str, parts: Mapping[str, Cut], peers: Peers) -> None:
    """Have the outputs of experts added over all members."""
    for own, _ in experts.named_parameters():
        if f"{name}.{own}" not in parts:
            raise _refused(model, f"{name}.{own} is whole in every member, and would be added by each")

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
        f"{type(model).__name__} cannot be shared by several ranks as they are: {why}; "
        "choose another tp_size, or leave it away"
    )
