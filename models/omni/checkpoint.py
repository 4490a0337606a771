"""The models in a checkpoint that thinks and talks, each read by itself: thinker, talker, codec."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import safe_open

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError, read_json
from models.checkpoints.progress import Progress
from models.checkpoints.weights import read_shards
from models.transformers_lm.architecture import config_of
from models.vision_language.halves import Checkpoint, lacking, load_half

_EMBEDDINGS: Final = "thinker.model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniCheckpoint:
    """A checkpoint folder, read up to its weights.

    Attributes:
        model_class: of the whole model, of transformers.
        thinker_class: of its thinker.
        codec: the name of the member that makes sound.
        config: of the whole model.
    """

    folder: Path
    model_class: Any
    thinker_class: Any
    codec: str
    raw: dict[str, Any]
    config: Any

    @classmethod
    def read(cls, folder: Path, model_class: Any, thinker_class: Any, *, codec: str) -> Self:
        """Read `config.json`.

        Raises:
            CheckpointError: it is missing or malformed.
        """
        raw = read_json(folder / "config.json")
        return cls(
            folder=folder,
            model_class=model_class,
            thinker_class=thinker_class,
            codec=codec,
            raw=raw,
            config=config_of(model_class, raw, folder),
        )

    @property
    def thinker(self) -> Checkpoint:
        """The thinker: a vision-language model which hears as well."""
        return Checkpoint(
            folder=self.folder,
            raw=self.raw.get("thinker_config") or {},
            model_class=self.thinker_class,
            config=self.config.thinker_config,
            prefix="thinker.",
        )

    def load_talker(self, *, device: torch.device, dtype: str, progress: Progress) -> Any:
        """Load the talker.

        Raises:
            CheckpointError: the checkpoint only thinks, or its files are damaged.
        """
        talker = self._load("talker", device=device, dtype=dtype, progress=progress)
        # Its positions of audio are computed with it, and transformers' own class lacks it.
        talker.config.audio_config = self.config.thinker_config.audio_config
        return talker

    def load_codec(self, *, device: torch.device, progress: Progress) -> Any:
        """Load the codec's decoder, in float32.

        Raises:
            CheckpointError: the checkpoint only thinks, or its files are damaged.
        """
        return self._load(self.codec, device=device, dtype="float32", progress=progress)

    def embeddings(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The thinker's embeddings of a few tokens, (n, hidden), without reading the others."""
        for shard in read_shards(self.folder):
            if _EMBEDDINGS in shard.tensors:
                with safe_open(shard.path, framework="pt", device="cpu") as file:
                    rows = file.get_slice(_EMBEDDINGS)
                    return torch.cat([rows[one : one + 1] for one in token_ids])
        raise CheckpointError(
            f"{self.folder} lacks the tensor {_EMBEDDINGS}: expected a thinker's embeddings"
        )

    def _load(self, name: str, *, device: torch.device, dtype: str, progress: Progress) -> Any:
        """Load one member of the whole model, whose class has the rules for its weights."""
        if not self.config.enable_audio_output:
            raise UnsupportedArchitectureError(
                f"{self.folder} only thinks (enable_audio_output is false), so it has no {name}: expected a "
                "checkpoint that speaks"
            )
        half = lacking(self.model_class, *({"thinker", "talker", self.codec} - {name}))
        checkpoint = Checkpoint(
            folder=self.folder, raw=self.raw, model_class=self.model_class, config=self.config
        )

        def keep(tensor: str) -> bool:
            return tensor.startswith(f"{name}.")

        model = load_half(half, checkpoint, keep, device=device, dtype=dtype, progress=progress)
        return getattr(model, name)
