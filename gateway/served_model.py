"""The model that a deployment serves: its name, and what a request may ask of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from configs.deployment import DeploymentConfig
from models import registry
from models.base import ModelGraph
from models.checkpoints.files import CheckpointError
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
        )

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name.

        Raises:
            ModelNotFoundError: `name` is another model.
        """
        if name is not None and name != self.name:
            raise ModelNotFoundError(name, self.name)


def _remarks(graph: ModelGraph, config: DeploymentConfig) -> tuple[str, ...]:
    """What the family says of the checkpoint; nothing on a machine that does not have it."""
    checkpoint = Path(config.checkpoint)
    if graph.remarks is None or not checkpoint.is_dir():
        return ()
    try:
        return tuple(graph.remarks(checkpoint, config.model_kwargs))
    except CheckpointError:  # the workers refuse it
        return ()
