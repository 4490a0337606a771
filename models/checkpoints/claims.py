"""Claims: how a model family says that it serves a checkpoint folder, for `dalsegno serve FOLDER`.

A family declares a function in its `graph.py` and names it in `ModelGraph.claims`. The function looks at a
`CheckpointInfo` and returns a `Claim`, or None for a checkpoint that the family does not serve. The most
specific claim wins (`models.registry.family_of`). The function must be light: it reads small JSON files only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from models.checkpoints.files import read_config, read_json


class Claim(IntEnum):
    """The level of a claim, from general to specific. A family claims with the most specific true level."""

    GENERIC = 1
    """It serves a whole class of architectures, such as every `...ForCausalLM`."""
    ARCHITECTURE = 2
    """It serves this architecture."""
    CHECKPOINT = 3
    """It serves this model: further files of the folder, or its tokenizer, tell it from others of its
    architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint folder, as families see it.

    Attributes:
        config: the object in its `config.json`; empty in a folder with a config of each part instead.
    """

    folder: Path
    config: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "CheckpointInfo":
        """Read a folder's `config.json`.

        Raises:
            CheckpointError: it is missing or malformed.
        """
        return cls(folder=folder, config=read_config(folder))

    @property
    def architecture(self) -> str:
        """The first of the `architectures` in its `config.json`; empty if there is none."""
        names = self.config.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        return first if isinstance(first, str) else ""

    def has(self, name: str) -> bool:
        """Return true if the folder has a file of that relative path."""
        return (self.folder / name).is_file()

    def read_json(self, name: str) -> Mapping[str, Any]:
        """The object in one of the folder's JSON files; empty if there is no such file.

        Raises:
            CheckpointError: the file is malformed.
        """
        return read_json(self.folder / name) if self.has(name) else {}
