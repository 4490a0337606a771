"""The modules between BAGEL's language model, its vision tower and its latents, named as published."""

import math
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.qwen2.modeling_qwen2 import Qwen2PreTrainedModel

from models.bagel.folder import EMA, bracket_ids, read_ema
from models.checkpoints.files import CheckpointError

_FREQUENCIES: Final = 256
"""The numbers of a time's sinusoidal embedding: half of them cosines."""
_LONGEST_PERIOD: Final = 10_000
_EMBEDDINGS: Final = "language_model.model.embed_tokens.weight"


class PositionTable(nn.Module):
    """A row for each place of a square of `side` x `side`, row by row."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.side: Final = side
        self.pos_embed = nn.Parameter(torch.empty(side * side, width), requires_grad=False)

    def forward(self, height: int, width: int) -> torch.Tensor:
        """The rows of an image of `height` x `width` places, (height * width, hidden), row by row."""
        table = self.pos_embed.view(self.side, self.side, -1)
        return table[:height, :width].flatten(0, 1)


class TimeEmbedder(nn.Module):
    """A time of the flow, from 1 to 0, as a row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time: float) -> torch.Tensor:
        """The row of a time, (1, hidden)."""
        weight = next(self.mlp.parameters())
        half = _FREQUENCIES // 2
        steps = torch.arange(half, dtype=torch.float32, device=weight.device)
        angles = time * torch.exp(-math.log(_LONGEST_PERIOD) * steps / half)
        row: torch.Tensor = self.mlp(torch.cat([angles.cos(), angles.sin()]).to(weight.dtype)[None])
        return row


class Connector(nn.Module):
    """The features of the vision tower, as rows of the language model."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, width)
        self.fc2 = nn.Linear(width, width)
        self.activation = ACT2FN["gelu_pytorch_tanh"]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(..., features) to (..., hidden)."""
        rows: torch.Tensor = self.fc2(self.activation(self.fc1(features)))
        return rows


class LatentModel(Qwen2PreTrainedModel):  # type: ignore[misc] # transformers has no types
    """Tokens of latents as rows of the language model; its config is `models.bagel.llm.llm_config`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.add_members(config)
        self.post_init()

    def add_members(self, config: Any) -> None:
        """Make the modules that the model has."""
        self.time_embedder = TimeEmbedder(config.hidden_size)
        self.vae2llm = nn.Linear(config.latent_width, config.hidden_size)
        self.latent_pos_embed = PositionTable(config.latent_side, config.hidden_size)

    def latent_rows(self, latents: torch.Tensor, time: float, grid: tuple[int, int]) -> torch.Tensor:
        """The rows of latents, (n, width), of an image of `grid` tokens (rows, columns), at a time."""
        rows: torch.Tensor = self.vae2llm(latents.to(self.vae2llm.weight.dtype))
        return torch.add(rows + self.time_embedder(time), self.latent_pos_embed(*grid))


def bracketed(rows: torch.Tensor, brackets: torch.Tensor) -> torch.Tensor:
    """Rows of an image between those of the tokens around it, `brackets` (2, hidden)."""
    return torch.cat([brackets[:1], rows.to(brackets.dtype), brackets[1:]])


def bracket_rows(folder: Path) -> torch.Tensor:
    """The embeddings of the tokens around an image, (2, hidden), in the stored dtype.

    Raises:
        CheckpointError: a file is missing or damaged, or the tokens have no embeddings.
    """
    ids, shard = bracket_ids(folder), read_ema(folder, {"language_model"})
    found = shard.tensors.get(_EMBEDDINGS)
    if found is None or max(ids) >= found.shape[0]:
        raise CheckpointError(
            f"{shard.path}: expected {_EMBEDDINGS} with a row for each of the tokens {ids}, found "
            f"{'no such tensor' if found is None else found.shape}; are tokenizer.json and {EMA} of one "
            "checkpoint?"
        )
    with safe_open(shard.path, framework="pt", device="cpu") as file:
        table = file.get_slice(_EMBEDDINGS)
        return torch.cat([table[id : id + 1] for id in ids])
