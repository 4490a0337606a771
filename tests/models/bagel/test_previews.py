"""Previews: colours of latents as the decoder has them, at even steps."""

import pytest
import torch

from models.bagel import vae
from models.bagel.autoencoder import SCALE, SHIFT, load_half
from models.bagel.previews import LatentColors, is_shown, measured_colors, previews_of
from models.checkpoints.progress import silent
from tests.tiny.bagel import bagel_checkpoint


def test_a_linear_decoder_is_measured_exactly() -> None:
    weight, base = (
        torch.randn(5, 3, generator=torch.Generator().manual_seed(0)) / 9,
        torch.tensor([0.1, 0, -0.2]),
    )

    def decode(latents: torch.Tensor) -> torch.Tensor:
        return (latents.permute(0, 2, 3, 1) @ weight + base).permute(0, 3, 1, 2)

    latents = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(1))  # of 2 x 3 tokens
    found = measured_colors(decode, 5).image(vae.to_tokens(latents), (2, 3))
    exact = (decode(latents[None])[0] * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0) * 255
    assert (found.shape, found.dtype) == ((4, 6, 3), torch.uint8)
    assert (found.float() - exact).abs().max() <= 1


def test_a_preview_shows_where_the_flow_is_heading() -> None:
    colors = LatentColors(torch.eye(3), torch.zeros(3))
    image, noise = torch.full((6, 12), 0.5), torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    time = 0.75
    found = previews_of(colors, (1 - time) * image + time * noise, noise - image, time, (2, 3))
    assert torch.equal(found["image"], torch.full((4, 6, 3), 191, dtype=torch.uint8))
    assert previews_of(None, image, noise, time, (2, 3)) == {}


@pytest.mark.parametrize(
    ("steps", "wanted", "shown"),
    [(49, 0, []), (49, 1, [24]), (49, 3, [12, 24, 37]), (2, 3, [1]), (1, 3, [])],
)
def test_previews_are_even_and_none_is_the_image_itself(steps: int, wanted: int, shown: list[int]) -> None:
    assert [step for step in range(1, steps + 1) if is_shown(step, steps, wanted)] == shown


def test_the_colours_of_a_checkpoint_are_those_of_its_decoder() -> None:
    folder = bagel_checkpoint()
    colors, decoder = (
        vae.load_colors(folder),
        load_half(folder, "decoder", device="cpu", dtype="float32", progress=silent),
    )
    assert colors is not None
    flat = torch.zeros(16, 2, 2)
    exact = decoder(flat[None] / SCALE + SHIFT)[0].mean((1, 2))
    found = colors.image(vae.to_tokens(flat), (1, 1)).float().mean((0, 1))
    assert torch.allclose(found, ((exact * 0.5 + 0.5).clamp(0, 1) * 255), atol=1)
