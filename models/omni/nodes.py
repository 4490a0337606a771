"""The torch nodes of a family that thinks and talks, each with its own part of the checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from models.base import Peers
from models.checkpoints.files import UnsupportedArchitectureError
from models.checkpoints.progress import Progress, silent
from models.omni.checkpoint import OmniCheckpoint
from models.omni.encoders import AudioEncoder
from models.omni.graph import CODE2WAV, SOUND, TALKER, THINKER, VISION
from models.omni.thinker import OmniThinker
from models.vision_language.decoder import decoder_of, examined
from models.vision_language.halves import is_of_tower, load_half, tower_half
from models.vision_language.tower import VisionEncoder
from shared.errors import BugError

TOWERS = MappingProxyType({VISION: "visual", SOUND: "audio_tower"})
"""The members of the thinker that the encoders are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniNodes:
    """The nodes of a family.

    Attributes:
        family: its name.
        model_class, thinker_class: of transformers, of the whole model and of its thinker.
        codec: the member of the whole model that makes sound.
        thinker: the class of the KV node.
        vision: the class of the encoder of images and videos.
        deepstack: the layers whose states the rows of media add to, by the thinker's config.
        state_layer: see `OmniThinker`, by the whole model's config.
        make_talker: from the checkpoint and the talker's weights.
        make_codec: from the checkpoint and the codec's weights.
        talker_positions: the longest sequence of the talker, by the whole model's config.
    """

    family: str
    model_class: Any
    thinker_class: Any
    codec: str
    thinker: type[OmniThinker]
    vision: type[VisionEncoder]
    deepstack: Callable[[Any], int]
    state_layer: Callable[[Any], int]
    make_talker: Callable[[OmniCheckpoint, Any], Any]
    make_codec: Callable[[OmniCheckpoint, Any], Any]
    talker_positions: Callable[[Any], int]

    def load(
        self,
        checkpoint: Path,
        node: str,
        *,
        device: str | torch.device = "cpu",
        dtype: str = "auto",
        progress: Progress = silent,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        peers: Peers | None = None,
    ) -> Any:
        """Load one node of a checkpoint folder in Hugging Face format; the codec computes in float32.

        Raises:
            CheckpointError: a file of the folder is missing, damaged or unsupported.
            UnsupportedArchitectureError: the node cannot be served, or not by that many ranks.
        """
        read, on = self._read(checkpoint), torch.device(device)
        match node:
            case "Thinker":
                return self._thinker(read, device=on, dtype=dtype, progress=progress, peers=peers)
            case "Talker":
                _check_alone(1 if peers is None else peers.size)
                return self.make_talker(read, read.load_talker(device=on, dtype=dtype, progress=progress))
            case "Code2Wav":
                return self.make_codec(read, read.load_codec(device=on, progress=progress))
            case "vision_encoder" | "audio_encoder":
                return self._encoder(read, node, device=on, dtype=dtype, progress=progress)
            case _:
                known = (THINKER, TALKER, CODE2WAV, VISION, SOUND)
                raise BugError(f"{self.family} has no node {node!r} with weights: expected one of {known}")

    def examine(self, checkpoint: Path, node: str, *, members: int = 1) -> int:
        """Raise what `load` would raise before it reads a weight; return a KV node's longest sequence.

        Raises:
            CheckpointError, UnsupportedArchitectureError: as `load` does.
        """
        read = self._read(checkpoint)
        if node != TALKER:
            return examined(read.thinker, members=members)
        _check_alone(members)
        return self.talker_positions(read.config)

    def _read(self, checkpoint: Path) -> OmniCheckpoint:
        return OmniCheckpoint.read(checkpoint, self.model_class, self.thinker_class, codec=self.codec)

    def _thinker(
        self,
        read: OmniCheckpoint,
        *,
        device: torch.device,
        dtype: str,
        progress: Progress,
        peers: Peers | None,
    ) -> OmniThinker:
        found = decoder_of(
            read.thinker,
            THINKER,
            device=device,
            dtype=dtype,
            progress=progress,
            peers=peers,
            node_class=self.thinker,
        )
        assert isinstance(found, OmniThinker)
        found.state_layer = self.state_layer(read.config)
        return found

    def _encoder(
        self, read: OmniCheckpoint, node: str, *, device: torch.device, dtype: str, progress: Progress
    ) -> VisionEncoder:
        thinker = read.thinker
        others = [tower for one, tower in TOWERS.items() if one != node]
        half = tower_half(thinker.model_class, *others)
        of_tower = is_of_tower(thinker.model_class, thinker.config)

        def keep(tensor: str) -> bool:
            return of_tower(tensor) and not set(others) & set(tensor.split("."))

        model = load_half(half, thinker, keep, device=device, dtype=dtype, progress=progress)
        if node == VISION:
            return self.vision(model)
        deeper = self.deepstack(thinker.config)
        return AudioEncoder(model, width=thinker.config.text_config.hidden_size * (1 + deeper))


def _check_alone(members: int) -> None:
    if members > 1:
        raise UnsupportedArchitectureError(
            f"{TALKER} is not shared by {members} ranks: it is small, and would wait for the others in every "
            "frame; expected tp_size 1 for it"
        )
