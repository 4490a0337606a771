"""Checkpoints whose model transformers has under another name: class, config, and names of tensors.

LLaDA's layers are Llama's, and those of LLaDA2 are GLM 4.5's. A family translates the `config.json`, and says
where each tensor of the class is stored. A stored tensor may hold several of the model's, as a matrix of
queries, keys and values does.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from models.checkpoints.files import CheckpointError
from models.checkpoints.weights import Shard, TensorInfo

Rule = Callable[[str], Mapping[str, int]]
"""The tensors of the model that a stored tensor holds, in order, with the rows of each. The rows of a single
one are not read. A stored tensor that holds none is left out."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the model in the files: the rows from `first` to `last` of `name`; `last` 0 is all."""

    name: str
    first: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a file's tensor, read when they are indexed."""

    file: Any
    first: int
    last: int

    def get_shape(self) -> list[int]:
        return [self.last - self.first, *self.file.get_shape()[1:]]

    def __getitem__(self, index: Any) -> Any:
        return self.file[self.first : self.last][index]


@dataclass(frozen=True, slots=True)
class Renamed:
    """The places of a model's tensors in the files, by their names in the model."""

    tensors: Mapping[str, _Stored]

    @classmethod
    def of(cls, shards: Iterable[Shard], rule: Rule) -> "Renamed":
        """Apply a rule to the names of all stored tensors.

        Raises:
            CheckpointError: a tensor that holds several has not as many rows as they.
        """
        found: dict[str, _Stored] = {}
        for name, info in (one for shard in shards for one in shard.tensors.items()):
            held = rule(name)
            if not held:
                continue
            if len(held) == 1:
                found[next(iter(held))] = _Stored(name)
                continue
            if sum(held.values()) != info.shape[0]:
                raise CheckpointError(
                    f"{name} has {info.shape[0]} rows: expected {sum(held.values())}, those of "
                    f"{', '.join(held)}; are config.json and the weights of one checkpoint?"
                )
            bounds = pairwise(accumulate(held.values(), initial=0))
            found |= {one: _Stored(name, *rows) for one, rows in zip(held, bounds, strict=True)}
        return cls(found)

    def slices(self, files: Mapping[str, Any]) -> dict[str, Any]:
        """The model's tensors by name, from slices of the files."""
        return {
            name: _Rows(files[one.name], one.first, one.last) if one.last else files[one.name]
            for name, one in self.tensors.items()
        }

    def shards(self, shards: Iterable[Shard]) -> list[Shard]:
        """The files as if the model's tensors were stored in them."""
        return [Shard(shard.path, shard.nbytes, dict(self._infos(shard))) for shard in shards]

    def _infos(self, shard: Shard) -> Iterable[tuple[str, TensorInfo]]:
        for name, one in self.tensors.items():
            info = shard.tensors.get(one.name)
            if info is None:
                continue
            if not one.last:
                yield name, info
                continue
            shape = (one.last - one.first, *info.shape[1:])
            yield name, TensorInfo(info.dtype, shape, info.nbytes * prod(shape) // max(1, info.elements))


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A checkpoint of another name: the class that computes it, and its tensors.

    Attributes:
        model_class: a class of transformers.
        config: of that class.
        rule: names the tensors of the class that a stored tensor holds.
    """

    model_class: Any
    config: Any
    rule: Rule
