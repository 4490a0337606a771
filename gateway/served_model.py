"""The model that a deployment serves: its name, and what a request may ask of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from configs.adapters import configured
from configs.deployment import DeploymentConfig
from gateway.served_adapters import ServedAdapters
from models import registry
from models.base import ModelGraph
from models.checkpoints.files import CheckpointError
from shared.adapters import Adapter, addressed
from shared.errors import ModelNotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The facts about a deployment that a gateway needs.

    Attributes:
        ranks: the ranks whose workers the deployment needs.
        modalities: the input modalities; `outputs` are the output modalities.
        media: for each modality, the meaning of its bytes.
        voices: the voices of a model that speaks, the default one first.
        options: the family's own request parameters; None: it has none.
        takes_texts: a request on the log may have several texts.
        adapters: the LoRA adapters.
        aliases: further names by which clients may ask for the model.
        remarks: what is to be known of the checkpoint, in sentences.
    """

    name: str
    family: str
    ranks: tuple[int, ...]
    max_seq_len: int
    modalities: tuple[str, ...] = ("text",)
    outputs: tuple[str, ...] = ("text",)
    media: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    voices: tuple[str, ...] = ()
    options: type[msgspec.Struct] | None = None
    takes_texts: bool = False
    remarks: tuple[str, ...] = ()
    adapters: ServedAdapters = field(default_factory=ServedAdapters)
    aliases: tuple[str, ...] = ()

    @property
    def takes_media(self) -> bool:
        """The model takes anything but text."""
        return not set(self.modalities) <= {"text"}

    @classmethod
    def of(cls, config: DeploymentConfig) -> "ServedModel":
        graph = registry.graph(config.model)
        return cls(
            name=config.name or config.model,
            family=config.model,
            ranks=tuple(config.ranks),
            max_seq_len=config.max_seq_len,
            modalities=graph.modalities,
            outputs=graph.outputs,
            media=graph.media,
            voices=config.known_voices,
            options=graph.options,
            takes_texts=graph.takes_texts,
            remarks=_remarks(graph, config),
            adapters=ServedAdapters(configured(config), takes_others=config.adapters_at_runtime),
            aliases=tuple(dict.fromkeys(config.gateway.model_aliases)),
        )

    def check_model(self, name: str | None) -> None:
        """Refuse another name than the model's own, its aliases and its adapters'.

        Raises:
            ModelNotFoundError: `name` is another model, or an adapter that is not loaded.
        """
        if name is None or name == self.name or name in self.aliases:
            return
        if name not in self.adapter_models:
            raise ModelNotFoundError(name, self.name)

    @property
    def names(self) -> list[str]:
        """All names by which clients may ask: the model's own, its aliases, its adapters'."""
        return [self.name, *self.aliases, *sorted(self.adapter_models)]

    def own_name(self, name: str) -> str:
        """The model's own name for an alias; other names are left as they are."""
        return self.name if name in self.aliases else name

    @property
    def adapter_models(self) -> dict[str, Adapter]:
        """The adapters by the model names that address them."""
        return {addressed(self.name, name): adapter for name, adapter in self.adapters.by_name.items()}


def _remarks(graph: ModelGraph, config: DeploymentConfig) -> tuple[str, ...]:
    """What the family says of the checkpoint; nothing on a machine that does not have it."""
    checkpoint = Path(config.checkpoint)
    if graph.remarks is None or not checkpoint.is_dir():
        return ()
    try:
        return tuple(graph.remarks(checkpoint, config.model_kwargs))
    except CheckpointError:  # the workers refuse it
        return ()
