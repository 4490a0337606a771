"""The talker of Qwen3-TTS, of transformers' Qwen3 layers: a language model over codes, one within a frame.

Published positions have three axes with equal values, which is the plain rotary embedding of Qwen3.
The names of members are those of the published tensors.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3Model, Qwen3PreTrainedModel


class _Projection(nn.Module):
    """Embeddings of text to those of the talker."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.text_hidden_size, config.text_hidden_size)
        self.linear_fc2 = nn.Linear(config.text_hidden_size, config.hidden_size)

    def forward(self, embeds: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear_fc2(functional.silu(self.linear_fc1(embeds)))
        return found


class _Body(Qwen3Model):  # type: ignore[misc] # transformers has no types
    """The layers over frames, with embeddings of codes and of text."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens = None
        self.codec_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)

    def get_input_embeddings(self) -> nn.Module:
        return self.codec_embedding


class _PredictorBody(Qwen3Model):  # type: ignore[misc] # transformers has no types
    """The layers within a frame, with embeddings of the codes of each group but the last."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__(config)
        self.embed_tokens = None
        self.codec_embedding = nn.ModuleList(
            nn.Embedding(config.vocab_size, width) for _ in range(config.num_code_groups - 1)
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.codec_embedding


class _Predictor(Qwen3PreTrainedModel):  # type: ignore[misc] # transformers has no types
    """The code predictor, as `models.qwen3_omni.code_predictor` takes it."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__(config)
        self.model = _PredictorBody(config, width)
        self.lm_head = nn.ModuleList(
            nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            for _ in range(config.num_code_groups - 1)
        )
        narrows = config.hidden_size != width
        self.small_to_mtp_projection = nn.Linear(width, config.hidden_size) if narrows else nn.Identity()


class TalkerModel(Qwen3PreTrainedModel):  # type: ignore[misc] # transformers has no types
    """All weights under `talker.`: they are used by `models.qwen3_tts.talker`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = _Body(config)
        self.text_projection = _Projection(config)
        self.codec_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.code_predictor = _Predictor(qwen3_config(config.code_predictor_config), config.hidden_size)
        self.post_init()


def qwen3_config(raw: dict[str, Any]) -> Any:
    """The configuration of these layers: the published one, with its further keys."""
    left_out = ("model_type", "rope_scaling", "rope_theta", "layer_types", "architectures")
    given = {name: value for name, value in raw.items() if name not in left_out}
    rope = {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10_000)}
    return Qwen3Config(**given, rope_parameters=rope)
