"""A Z-Image pipeline with random weights, so large that its transformer decides the time of an image."""

from pathlib import Path
from typing import Final

from configs.demo_draw.pipeline import new_pipeline

SIDE: Final = 128
"""The pixels of an image, along a side: 64 tokens."""
WIDTH: Final = 384
LAYERS: Final = 8
_SEED: Final = 5


def write_random_pipeline(folder: Path, *, width: int = WIDTH, layers: int = LAYERS) -> Path:
    """Write the folder of a pipeline; the VAE has 8 pixels to a latent."""
    pipeline = new_pipeline(
        _SEED,
        vae={"block_out_channels": [16, 16, 32, 32], "latent_channels": 16, "sample_size": 512},
        text={"hidden_size": 128, "head_dim": 32},
        transformer={
            "dim": width,
            "n_layers": layers,
            "n_heads": width // 64,
            "axes_dims": [16, 24, 24],
            "axes_lens": [1024, 128, 128],
        },
    )
    pipeline.save_pretrained(folder)
    return folder
