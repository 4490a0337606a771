"""The models in a checkpoint of Qwen3-Omni, each read by itself: thinker, talker, code2wav."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import safe_open
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError, read_json
from models.checkpoints.progress import Progress
from models.checkpoints.weights import read_shards
from models.transformers_lm.architecture import config_of, model_class_of
from models.vision_language.halves import KIND, Checkpoint, lacking, load_half

_EMBEDDINGS: Final = "thinker.model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniCheckpoint:
    """A checkpoint folder, read up to its weights.

    Attributes:
        config: of the whole model.
    """

    folder: Path
    raw: dict[str, Any]
    config: Any

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read `config.json`.

        Raises:
            CheckpointError, UnsupportedArchitectureError: it is missing, malformed or unsupported.
        """
        raw = read_json(folder / "config.json")
        model_class = model_class_of(raw, folder, KIND, "model that thinks and talks")
        return cls(folder=folder, raw=raw, config=config_of(model_class, raw, folder))

    @property
    def thinker(self) -> Checkpoint:
        """The thinker: a vision-language model which hears as well."""
        return Checkpoint(
            folder=self.folder,
            raw=self.raw.get("thinker_config") or {},
            model_class=modeling.Qwen3OmniMoeThinkerForConditionalGeneration,
            config=self.config.thinker_config,
            prefix="thinker.",
        )

    def load_talker(self, *, device: torch.device, dtype: str, progress: Progress) -> Any:
        """Load the talker and its code predictor.

        Raises:
            CheckpointError: the checkpoint only thinks, or its files are damaged.
        """
        talker = self._load("talker", device=device, dtype=dtype, progress=progress)
        # Its positions of audio are computed with it, and transformers' own class lacks it.
        talker.config.audio_config = self.config.thinker_config.audio_config
        return talker

    def load_code2wav(self, *, device: torch.device, progress: Progress) -> Any:
        """Load the codec's decoder, in float32.

        Raises:
            CheckpointError: the checkpoint only thinks, or its files are damaged.
        """
        return self._load("code2wav", device=device, dtype="float32", progress=progress)

    def embeddings(self, token_ids: list[int]) -> torch.Tensor:
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
                "checkpoint that speaks, such as Qwen3-Omni-30B-A3B-Instruct"
            )
        whole = modeling.Qwen3OmniMoeForConditionalGeneration
        half = lacking(whole, *({"thinker", "talker", "code2wav"} - {name}))
        checkpoint = Checkpoint(folder=self.folder, raw=self.raw, model_class=whole, config=self.config)

        def keep(tensor: str) -> bool:
            return tensor.startswith(f"{name}.")

        model = load_half(half, checkpoint, keep, device=device, dtype=dtype, progress=progress)
        return getattr(model, name)
