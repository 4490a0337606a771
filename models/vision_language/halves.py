"""The two halves of a vision-language model class of transformers: its language model, and its tower.

Each half is a subclass under the name of its class, whose instances lack the other half. So transformers
itself renames and loads the weights, also of checkpoints that were written by its older versions, and the
tensors of the other half are never read.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import torch
from transformers import PreTrainedModel

from models.checkpoints.files import CheckpointError, read_json, text_config
from models.checkpoints.progress import Progress
from models.checkpoints.weights import Shard, read_shards
from models.transformers_lm.architecture import choose_dtype, config_of, max_positions_of, model_class_of
from models.transformers_lm.quantised import quantised_of
from models.transformers_lm.renames import Renamed
from models.transformers_lm.tensors import load_weights

KIND: Final = "ForConditionalGeneration"
"""The end of the names of all these classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint folder, read up to its weights.

    Attributes:
        prefix: the begin of the names of its tensors, where the model is a part of what the folder has.
    """

    folder: Path
    raw: dict[str, Any]
    model_class: Any
    config: Any
    prefix: str = ""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read `config.json`.

        Raises:
            CheckpointError, UnsupportedArchitectureError: it is missing, malformed or unsupported.
        """
        raw = read_json(folder / "config.json")
        model_class = model_class_of(raw, folder, KIND)
        config = config_of(model_class, raw, folder)
        if config.model_type == "paligemma":
            # It means prompts with images. Those are full parts (`PromptPart.full`), and all else is causal.
            config.text_config.use_bidirectional_attention = False
        return cls(folder=folder, raw=raw, model_class=model_class, config=config)

    @property
    def max_positions(self) -> int:
        """The longest sequence of its language model."""
        # Without its class: among media, a sequence cannot be computed again when it outgrows rotary factors.
        raw = {**text_config(self.raw), "architectures": None}
        return max_positions_of(self.config.get_text_config(decoder=True), raw)


def language_half(model_class: Any) -> Any:
    """The class without its tower. Its `base_model` is the body of the language model."""

    def begin(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        body = self.model
        for name in _tower_names(body):
            _remove(body, name)

    return _subclass(model_class, begin, base_model=property(lambda self: text_model_of(self.model)))


def tower_half(model_class: Any, *without: str) -> Any:
    """The class without its language model and its head, and without the towers of these names."""

    def begin(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        body, text = self.model, text_model_of(self.model)
        for parent in (self, body):
            for name, child in list(parent.named_children()):
                if child is text or name in without or (parent is self and child is not body):
                    _remove(parent, name)

    return _subclass(model_class, begin, _tied_weights_keys={})


def lacking(model_class: Any, *members: str) -> Any:
    """The class without the members of these names, such as `model.encoder`: models of several networks."""

    def begin(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        for name in members:
            parent, _, last = name.rpartition(".")
            _remove(self.get_submodule(parent), last)

    # A class's own method may also load what the half lacks.
    load: Any = classmethod(PreTrainedModel.from_pretrained.__func__)
    return _subclass(model_class, begin, _tied_weights_keys={}, from_pretrained=load)


def text_model_of(body: Any) -> Any:
    """The language model in the body of a vision-language model: embeddings, layers and last norm."""
    for name in ("language_model", "text_model"):
        found = getattr(body, name, None)
        if found is not None:
            return found
    raise CheckpointError(f"{type(body).__name__} has no language model where it was expected")


def is_of_tower(model_class: Any, config: Any) -> Callable[[str], bool]:
    """A function that tells the tower's tensors by their names, in files of any version of transformers."""
    with torch.device("meta"):
        names = frozenset(_tower_names(model_class(config).model))
    return lambda name: not names.isdisjoint(name.split("."))


def load_half(
    half: Any,
    checkpoint: Checkpoint,
    keep: Callable[[str], bool],
    *,
    device: torch.device,
    dtype: str,
    progress: Progress,
) -> Any:
    """Load one half of a checkpoint: the tensors that `keep` names, of those with the checkpoint's prefix.

    Raises:
        CheckpointError: the weights are missing or damaged, or do not fit.
    """
    prefix = checkpoint.prefix
    shards = _kept(read_shards(checkpoint.folder), lambda tensor: tensor.startswith(prefix) and keep(tensor))
    quantised = quantised_of(checkpoint.raw, shards, checkpoint.folder)
    chosen = choose_dtype(dtype, device, quantised.as_floats(shards) if quantised is not None else shards)
    renamed = Renamed.of(shards, lambda tensor: {tensor.removeprefix(prefix): 0}) if prefix else None
    return load_weights(half, checkpoint.config, shards, device, chosen, progress, quantised, renamed)


def _kept(shards: Collection[Shard], keep: Callable[[str], bool]) -> list[Shard]:
    return [
        replace(shard, tensors={name: tensor for name, tensor in shard.tensors.items() if keep(name)})
        for shard in shards
    ]


def _tower_names(body: Any) -> list[str]:
    """The members of a body that are not its language model: modules, and parameters of its own."""
    text = text_model_of(body)
    modules = [name for name, child in body.named_children() if child is not text]
    return modules + [name for name, _ in body.named_parameters(recurse=False)]


def _remove(module: Any, name: str) -> None:
    """Take a member away. It stays as None, which code that asks whether it is there can read."""
    delattr(module, name)
    setattr(module, name, None)


def _subclass(model_class: Any, begin: Callable[..., None], **attributes: Any) -> Any:
    # Transformers selects its rules by the name of the class.
    names = {"__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), names | {"__init__": begin} | attributes)
