"""The stateless nodes `vae_encoder` and `vae_decoder`: pixels to rows of a prompt, and latents to pixels."""

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import nn

from models.bagel.autoencoder import SCALE, SHIFT, latent_channels_of, load_half
from models.bagel.folder import AE, LATENT_PATCH, read_ema
from models.bagel.llm import llm_config
from models.bagel.parts import LatentModel, bracket_rows, bracketed
from models.bagel.previews import LatentColors, measured_colors
from models.base import Item, StatelessResult
from models.checkpoints.files import CheckpointError
from models.checkpoints.progress import Progress, silent
from models.encoder_cache import EncoderCache
from models.transformers_lm.architecture import choose_dtype
from models.transformers_lm.tensors import load_weights
from models.vision_language.visuals import Visual

MEMBERS: Final = frozenset({"time_embedder", "vae2llm", "latent_pos_embed"})
"""The members of the whole model that the encoder has."""


def to_tokens(latents: torch.Tensor) -> torch.Tensor:
    """Latents, (channels, 2 h, 2 w), as tokens, (h * w, 4 * channels): row by row, channels last."""
    channels, height, width = latents.shape
    p = LATENT_PATCH
    grid = latents.view(channels, height // p, p, width // p, p)
    return grid.permute(1, 3, 2, 4, 0).reshape(-1, p * p * channels)


def to_latents(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of `to_tokens`, for an image of `height` x `width` tokens."""
    p = LATENT_PATCH
    grid = tokens.view(height, width, p, p, -1)
    return grid.permute(4, 0, 2, 1, 3).reshape(-1, height * p, width * p)


class VaeEncoder:
    """`vae_pixels` (n,) float32, of its argument `vae_visuals` -> `latent_rows` (rows, hidden).

    The distribution of an image's latents is kept by its digest. The latents are drawn of it by the seed of
    the request, in the order of the images, as the published code does.

    Args:
        encoder: the encoder of the autoencoder.
        rows: latents to rows.
        brackets: (2, hidden), the rows of the tokens around an image.
    """

    max_batch, max_cost = 8, 16 << 20

    def __init__(self, encoder: nn.Module, rows: LatentModel, brackets: torch.Tensor) -> None:
        self._encoder, self._rows, self._brackets = encoder, rows, brackets
        self._dtype = next(encoder.parameters()).dtype
        self.encoder_cache: Final = EncoderCache()

    def cost(self, item: Item) -> float:
        """The number of numbers in the pixels of a request."""
        return item.inputs["vae_pixels"].numel()

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Encode the images of each item."""
        return [self._encoded(item) for item in items]

    def _encoded(self, item: Item) -> StatelessResult:
        visuals = msgspec.convert(item.args["vae_visuals"], list[Visual])
        seed = item.seed + int(item.args.get("choice", 0))
        generator = torch.Generator().manual_seed(seed % 2**63)
        counts = [torch.Size(visual.shape).numel() for visual in visuals]
        shares = torch.split(item.inputs["vae_pixels"], counts)
        rows = [
            self._rows_of(self._moments(visual, pixels.view(visual.shape)), generator)
            for visual, pixels in zip(visuals, shares, strict=True)
        ]
        return StatelessResult(outputs={"latent_rows": torch.cat([self._brackets[:0], *rows])})

    def _moments(self, visual: Visual, pixels: torch.Tensor) -> torch.Tensor:
        """Means and logarithms of variances of an image's latents, (2 * channels, 2 h, 2 w) float32."""
        found = self.encoder_cache.get(visual.digest)
        if found is None:
            found = self.encoder_cache.put(
                visual.digest, self._encoder(pixels[None].to(self._dtype))[0].float()
            )
        return found

    def _rows_of(self, moments: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The rows of an image, (h * w + 2, hidden)."""
        mean, variance = moments.chunk(2)
        noise = torch.randn(mean.shape, generator=generator).to(mean.device)
        latents = SCALE * (mean + torch.exp(0.5 * variance) * noise - SHIFT)
        grid = (latents.shape[1] // LATENT_PATCH, latents.shape[2] // LATENT_PATCH)
        return bracketed(self._rows.latent_rows(to_tokens(latents), 0.0, grid), self._brackets)


class VaeDecoder:
    """`latents` (h * w, channels) float32, of `width` x `height` pixels -> `image` (H, W, 3) uint8.

    Args:
        decoder: the decoder of the autoencoder.
        downsample: pixels to a token, in each direction.
    """

    max_batch = 8

    def __init__(self, decoder: nn.Module, downsample: int) -> None:
        self._decoder, self._downsample = decoder, downsample
        self._dtype = next(decoder.parameters()).dtype

    def group(self, item: Item) -> Hashable:
        """Images of one size are decoded together."""
        return item.args["width"], item.args["height"]

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Decode the images, one after the other: their pixels do not depend on the batch."""
        return [StatelessResult(outputs={"image": self._decoded(item)}) for item in items]

    def _decoded(self, item: Item) -> torch.Tensor:
        height, width = (item.args[name] // self._downsample for name in ("height", "width"))
        latents = to_latents(item.inputs["latents"].float(), height, width) / SCALE + SHIFT
        pixels = self._decoder(latents[None].to(self._dtype))[0].float()
        levels: torch.Tensor = (pixels * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0) * 255
        return levels.to(torch.uint8)


def load_encoder(folder: Path, *, device: str | torch.device, dtype: str, progress: Progress) -> VaeEncoder:
    """Load the encoder, and the modules that make rows of its latents.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    shard, on = read_ema(folder, MEMBERS), torch.device(device)
    config, channels = llm_config(folder), latent_channels_of(folder)
    if LATENT_PATCH**2 * channels != config.latent_width:
        raise CheckpointError(
            f"{folder}: expected {config.latent_width // LATENT_PATCH**2} channels of latents, for its "
            f"language model, found an autoencoder of {channels}; are the two files of one checkpoint?"
        )
    chosen = choose_dtype(dtype, on, [shard])
    rows = load_weights(LatentModel, config, [shard], on, chosen, silent)
    encoder = load_half(folder, "encoder", device=device, dtype=dtype, progress=progress)
    return VaeEncoder(encoder, rows, bracket_rows(folder).to(on, chosen))


def load_decoder(folder: Path, *, device: str | torch.device, dtype: str, progress: Progress) -> VaeDecoder:
    """Load the decoder.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    decoder: Any = load_half(folder, "decoder", device=device, dtype=dtype, progress=progress)
    return VaeDecoder(decoder, LATENT_PATCH * 2 ** (len(decoder.up_blocks) - 1))


def load_colors(folder: Path) -> LatentColors | None:
    """The colours of latents, for previews, by the decoder; None for a folder without `ae.safetensors`.

    Raises:
        CheckpointError: the file is damaged, or holds another autoencoder.
    """
    if not (folder / AE).exists():
        return None  # a rank with the language model alone does not need it
    decoder: Any = load_half(folder, "decoder", device="cpu", dtype="float32", progress=silent)
    return measured_colors(lambda latents: decoder(latents / SCALE + SHIFT), latent_channels_of(folder))
