"""A tiny V-JEPA 2 in the layout of facebook/vjepa2-vitl-fpc64-256: transformers' class, random weights."""

import atexit
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

CONFIG: Final[dict[str, Any]] = {
    "patch_size": 16,
    "crop_size": 64,
    "frames_per_clip": 8,
    "tubelet_size": 2,
    "hidden_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "mlp_ratio": 2,
    "pred_hidden_size": 48,
    "pred_num_attention_heads": 2,
    "pred_num_hidden_layers": 2,
    "pred_num_mask_tokens": 2,
}
PREPROCESSOR: Final[dict[str, Any]] = {
    "crop_size": {"height": 64, "width": 64},
    "do_center_crop": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"shortest_edge": 73},
    "video_processor_type": "VJEPA2VideoProcessor",
}
_SCALE: Final = 3.0
"""Weights of the usual deviation barely differ from zero: features would not depend on the video."""


@cache
def tiny_vjepa2() -> Path:
    """The folder of the checkpoint; made once in a process, and removed at its end."""
    import torch  # noqa: PLC0415 - a second, for tests that build it
    from transformers import VJEPA2Config, VJEPA2Model  # noqa: PLC0415

    temporary = TemporaryDirectory(prefix="vjepa2-")
    atexit.register(temporary.cleanup)
    folder = Path(temporary.name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VJEPA2Model(VJEPA2Config(**CONFIG))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(_SCALE)
            model.predictor.embeddings.mask_tokens.normal_(std=0.5)  # zeros in a new model
    model.save_pretrained(folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(PREPROCESSOR), encoding="utf-8")
    return folder
