"""`nodes.load` of robot policies: PaliGemma in its two halves, and the family's expert."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PaliGemmaForConditionalGeneration

from models.base import KVLayout
from models.checkpoints.progress import Progress
from models.checkpoints.weights import Shard, read_shards, weights_digest
from models.robot_policy.expert import ActionExpert, ExpertNetwork
from models.robot_policy.flow import PolicyNode
from models.robot_policy.graph import ENCODER, LLM
from models.robot_policy.networks import Networks, read_networks
from models.robot_policy.settings import PolicySettings
from models.robot_policy.tensor_names import EXPERT, PREFIX, part_of
from models.robot_policy.tower import CameraEncoder
from models.transformers_lm.architecture import choose_dtype
from models.transformers_lm.probe import probe_layout
from models.transformers_lm.renames import Renamed
from models.transformers_lm.tensors import load_weights
from models.vision_language.decoder import VlmDecoder
from models.vision_language.halves import is_of_tower, language_half, tower_half
from shared.errors import BugError

MAX_POSITIONS: Final = 8192
"""The longest sequence: Gemma's."""


class PolicyLoader:
    """Loads the nodes of one family.

    Args:
        network: the class of its expert's weights.
        expert: the class that computes with them.
        max_tokens: the most tokens of a prompt, where the checkpoint does not say.
    """

    def __init__(self, network: type[ExpertNetwork], expert: type[ActionExpert], *, max_tokens: int) -> None:
        self._network = network
        self._expert = expert
        self._max_tokens = max_tokens

    def load(
        self,
        checkpoint: Path,
        node: str,
        *,
        device: str | torch.device = "cpu",
        dtype: str = "auto",
        progress: Progress,
        kwargs: Mapping[str, Any],
    ) -> PolicyNode | CameraEncoder:
        """Load `vit_encoder` or `LLM`.

        Raises:
            CheckpointError: a file of the folder is missing, damaged or unsupported.
        """
        settings = PolicySettings.read(checkpoint, max_tokens=self._max_tokens, kwargs=kwargs)
        shards = read_shards(checkpoint)
        parts = _Parts(
            shards, read_networks(checkpoint, settings, shards), torch.device(device), dtype, progress
        )
        if node == ENCODER:
            return CameraEncoder(parts.tower())
        if node != LLM:
            raise BugError(f"expected the node {LLM!r} or {ENCODER!r}, found {node!r}")
        decoder = parts.decoder()
        network = parts.expert(_with_settings(self._network, settings), decoder.dtype)
        expert = self._expert(network, settings, layout=decoder.layout, max_positions=decoder.max_positions)
        return PolicyNode(decoder, expert)

    def examine(self, checkpoint: Path, node: str, *, members: int = 1) -> int:
        """Raise what `load` would raise before it reads a weight; return the longest sequence in tokens.

        Raises:
            CheckpointError: a file of the folder is missing, damaged or unsupported.
        """
        settings = PolicySettings.read(checkpoint, max_tokens=self._max_tokens)
        networks = read_networks(checkpoint, settings, read_shards(checkpoint))
        probe_layout(language_half(PaliGemmaForConditionalGeneration), networks.prefix, MAX_POSITIONS)
        return MAX_POSITIONS


class _Parts:
    """The networks of one checkpoint, each loaded with its own tensors alone."""

    def __init__(
        self, shards: list[Shard], networks: Networks, device: torch.device, dtype: str, progress: Progress
    ) -> None:
        self._shards = shards
        self._networks = networks
        self._device = device
        self._dtype = dtype
        self._progress = progress

    def tower(self) -> Any:
        model_class = PaliGemmaForConditionalGeneration
        of_tower = is_of_tower(model_class, self._networks.prefix)
        return self._load(tower_half(model_class), self._networks.prefix, PREFIX, keep=of_tower)

    def decoder(self) -> VlmDecoder:
        model_class, config = PaliGemmaForConditionalGeneration, self._networks.prefix
        of_tower = is_of_tower(model_class, config)
        half = language_half(model_class)
        layout: KVLayout = probe_layout(half, config, MAX_POSITIONS)
        model = self._load(half, config, PREFIX, keep=lambda name: not of_tower(name))
        return VlmDecoder(
            model,
            name=LLM,
            layout=layout,
            max_positions=MAX_POSITIONS,
            weights_digest=weights_digest(self._shards),
        )

    def expert(self, network: Any, dtype: torch.dtype) -> Any:
        name = str(dtype).removeprefix("torch.")
        return self._load(network, self._networks.expert, EXPERT, keep=bool, dtype=name)

    def _load(self, model_class: Any, config: Any, prefix: str, *, keep: Any, dtype: str = "") -> Any:
        shards, rule = part_of(self._shards, prefix, keep)
        chosen = choose_dtype(dtype or self._dtype, self._device, shards)
        return load_weights(
            model_class, config, shards, self._device, chosen, self._progress, None, Renamed.of(shards, rule)
        )


def _with_settings(network: type[ExpertNetwork], settings: PolicySettings) -> Any:
    """The class, whose instances are made from a config alone, under its own name."""

    def begin(self: Any, config: Any) -> None:
        network.__init__(self, config, settings)

    names = {"__module__": network.__module__, "__qualname__": network.__qualname__}
    return type(network.__name__, (network,), {**names, "__init__": begin})
