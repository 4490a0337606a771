"""The predictor: tokens of actions, states and frames to the latents of the next frames.

A frame is its action, its state and its patches, in this order. Its tokens see one another and all earlier
frames. Patches have rotary positions by frame, row and column; the other tokens by frame alone, which is the
same as row 0 and column 0.

Names and numerics are those of the published code (`src/models/ac_predictor.py` of facebookresearch/vjepa2),
rotary angles in float32.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from models.vjepa2_ac.settings import AcSettings

EPS: Final = 1e-6
ACTION: Final = 7
"""The numbers of an action, and of a state: place, rotation and gripper."""
EXTRINSICS: Final = 6
_MLP_RATIO: Final = 4
_THETA: Final = 10_000.0

Attend = Callable[["Attention", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A layer's attention: queries, keys and values, (B, heads, N, size) each, to (B, N, heads, size)."""
Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of all tokens, (N, size) each."""


class Attention(nn.Module):
    """Attention with rotary positions on three axes."""

    def __init__(self, width: int, heads: int, layer_idx: int) -> None:
        super().__init__()
        self.heads: Final = heads
        self.layer_idx: Final = layer_idx
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, angles: Angles, attend: Attend) -> torch.Tensor:
        """(B, N, width) -> (B, N, width)."""
        split = self.qkv(hidden).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        found: torch.Tensor = self.proj(
            attend(self, rotated(query, angles), rotated(key, angles), value).flatten(-2)
        )
        return found


class Mlp(nn.Module):
    """Two linear layers with GELU between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, _MLP_RATIO * width)
        self.fc2 = nn.Linear(_MLP_RATIO * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., width) -> (..., width)."""
        found: torch.Tensor = self.fc2(nn.functional.gelu(self.fc1(hidden)))
        return found


class Block(nn.Module):
    """A layer."""

    def __init__(self, width: int, heads: int, layer_idx: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=EPS)
        self.attn = Attention(width, heads, layer_idx)
        self.norm2 = nn.LayerNorm(width, eps=EPS)
        self.mlp = Mlp(width)

    def forward(self, hidden: torch.Tensor, angles: Angles, attend: Attend) -> torch.Tensor:
        """(B, N, width) -> (B, N, width)."""
        hidden = hidden + self.attn(self.norm1(hidden), angles, attend)
        found: torch.Tensor = hidden + self.mlp(self.norm2(hidden))
        return found


class AcPredictor(nn.Module):
    """The weights of the predictor; several nodes of a process share them."""

    def __init__(self, settings: AcSettings) -> None:
        super().__init__()
        width, latents = settings.pred_hidden_size, settings.hidden_size
        self.settings: Final = settings
        self.predictor_embed = nn.Linear(latents, width)
        self.action_encoder = nn.Linear(ACTION, width)
        self.state_encoder = nn.Linear(ACTION, width)
        self.extrinsics_encoder = nn.Linear(EXTRINSICS, width)
        self.predictor_blocks = nn.ModuleList(
            Block(width, settings.pred_num_attention_heads, index)
            for index in range(settings.pred_num_hidden_layers)
        )
        self.predictor_norm = nn.LayerNorm(width, eps=EPS)
        self.predictor_proj = nn.Linear(width, latents)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        found: torch.dtype = self.predictor_embed.weight.dtype
        return found

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return self.predictor_embed.weight.device

    def rows(self, frames: torch.Tensor, controls: torch.Tensor) -> torch.Tensor:
        """The embeddings of frames, (B, T x frame tokens, width).

        Args:
            frames: latents, (B, T, patches, latent width).
            controls: action, state, and extrinsics if the checkpoint takes them, (B, T, 14 or 20).
        """
        controls = controls.to(self.device, self.dtype)
        parts = torch.split(controls, [ACTION, ACTION, controls.shape[-1] - 2 * ACTION], dim=-1)
        encoders = (self.action_encoder, self.state_encoder, self.extrinsics_encoder)
        conditions = [encode(part) for encode, part in zip(encoders, parts, strict=True) if part.shape[-1]]
        patches = self.predictor_embed(frames.to(self.device, self.dtype))
        found: torch.Tensor = torch.cat([torch.stack(conditions, dim=2), patches], dim=2).flatten(1, 2)
        return found

    def states(self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The states after the last norm, (B, N, width), of rows of that shape at positions (3, N)."""
        size = hidden.shape[-1] // self.settings.pred_num_attention_heads
        angles = angles_of(positions, size, hidden.dtype)
        for block in self.predictor_blocks:
            hidden = block(hidden, angles, attend)
        found: torch.Tensor = self.predictor_norm(hidden)
        return found

    def latents(self, states: torch.Tensor) -> torch.Tensor:
        """The latents of the frames behind, (B, T, patches, latent width) float32, of (B, N, width)."""
        frames = torch.unflatten(states, 1, (-1, self.settings.frame_tokens))
        found: torch.Tensor = self.predictor_proj(frames[:, :, self.settings.conditions :])
        return found.float()

    def forward(self, frames: torch.Tensor, controls: torch.Tensor) -> torch.Tensor:
        """Predict behind each frame at once, under a mask: shapes as in `rows` and `latents`."""
        count = frames.shape[1]
        positions = torch.cat([positions_of(self.settings, index) for index in range(count)], dim=1)
        frame = torch.arange(count, device=self.device).repeat_interleave(self.settings.frame_tokens)
        mask = frame[None, :] <= frame[:, None]

        def attend(_: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)

        return self.latents(self.states(self.rows(frames, controls), positions.to(self.device), attend))


def normalized(latents: torch.Tensor) -> torch.Tensor:
    """Latents as the predictor was trained to read them: each with mean 0 and deviation 1."""
    return layer_norm(latents.float(), (latents.shape[-1],))


def positions_of(settings: AcSettings, frame: int) -> torch.Tensor:
    """The positions of a frame's tokens by frame, row and column, (3, frame tokens) int32, on the CPU."""
    found = torch.zeros(3, settings.frame_tokens, dtype=torch.int32)
    found[0] = frame
    patch = torch.arange(settings.patches, dtype=torch.int32)
    found[1, settings.conditions :] = patch // settings.grid
    found[2, settings.conditions :] = patch % settings.grid
    return found


def angles_of(positions: torch.Tensor, size: int, dtype: torch.dtype) -> Angles:
    """Cosines and sines for heads of a size: a third of it for each axis, an even number; the rest stays.

    As published, an axis repeats its frequencies one after the other, although pairs are neighbours.
    """
    each = size // 3 // 2 * 2
    half = torch.arange(each // 2, device=positions.device, dtype=torch.float32)
    frequencies = _THETA ** -(half / (each / 2))
    angles = (positions.float()[..., None] * frequencies).repeat(1, 1, 2)  # (3, N, each)
    flat = nn.functional.pad(angles.transpose(0, 1).flatten(1), (0, size - 3 * each))
    return flat.cos().to(dtype), flat.sin().to(dtype)


def rotated(states: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Queries or keys, (B, heads, N, size), rotated in pairs of neighbours."""
    cosines, sines = angles
    first, second = torch.unflatten(states, -1, (-1, 2)).unbind(-1)
    turned = torch.stack((-second, first), dim=-1).flatten(-2)
    return states * cosines + turned * sines
