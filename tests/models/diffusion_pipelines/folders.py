"""Folders of pipelines as far as plans read them: configurations, without weights."""

import json
from pathlib import Path
from typing import Any, Final

IMAGE_VAE: Final = {"block_out_channels": [128, 256, 512, 512]}
"""8 pixels to a latent."""
WAN22_VAE: Final = {"scale_factor_spatial": 16, "scale_factor_temporal": 4}
CONFIGS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "ZImagePipeline": {"vae": IMAGE_VAE, "transformer": {"dim": 3840}},
    "QwenImagePipeline": {"vae": {"temperal_downsample": [False, True, True]}},
    "FluxPipeline": {"vae": IMAGE_VAE},
    "Flux2KleinPipeline": {"vae": IMAGE_VAE},
    "StableDiffusion3Pipeline": {
        "vae": IMAGE_VAE, "transformer": {"patch_size": 2, "sample_size": 128},
    },
    "StableDiffusionXLPipeline": {"vae": IMAGE_VAE, "unet": {"sample_size": 128}},
    "WanPipeline": {"vae": WAN22_VAE, "transformer": {"patch_size": [1, 2, 2]}},
    "WanImageToVideoPipeline": {"vae": WAN22_VAE, "transformer": {"patch_size": [1, 2, 2]}},
    "LTXPipeline": {"vae": {}},
    "LTXImageToVideoPipeline": {"vae": {}},
    "Cosmos3OmniPipeline": {"vae": WAN22_VAE, "transformer": {"latent_patch_size": 2}},
}  # fmt: skip
"""By class, the configurations of the published checkpoints, as far as they are read."""


def written(folder: Path, kind: str, settings: dict[str, Any] | None = None, **configs: Any) -> Path:
    """Write a folder of a class; `configs` are further configurations, by part."""
    parts = {**CONFIGS.get(kind, {}), **configs}
    index = {"_class_name": kind, **{name: ["diffusers", "AutoModel"] for name in parts}, **(settings or {})}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    for name, config in parts.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder
