"""A tiny V-JEPA 2-AC in the published layout: one `.pt` with encoder and predictor, random weights.

The names are those of the published file, with what training has left in them. The published sizes need no
`config.json`; these do.
"""

import atexit
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

CONFIG: Final[dict[str, Any]] = {
    "crop_size": 64,
    "patch_size": 16,
    "tubelet_size": 2,
    "frames_per_clip": 8,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pred_hidden_size": 64,
    "pred_num_hidden_layers": 2,
    "pred_num_attention_heads": 2,
}
FILE: Final = "vjepa2-ac-tiny.pt"
_SCALE: Final = 4.0
"""Weights of the usual deviation barely differ from zero: latents would not depend on the actions."""


@cache
def tiny_vjepa2_ac(*, extrinsics: bool = False) -> Path:
    """The folder of the checkpoint; made once in a process, and removed at its end."""
    import torch  # noqa: PLC0415 - a second, for tests that build it

    temporary = TemporaryDirectory(prefix="vjepa2-ac-")
    atexit.register(temporary.cleanup)
    folder = Path(temporary.name)
    config = {**CONFIG, "use_extrinsics": extrinsics}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.save(tensors(), folder / FILE)
    return folder


def tensors() -> dict[str, dict[str, Any]]:
    """The content of the file; other entries of a training's state are in it, too."""
    predictor = {f"module.{name}": value for name, value in _random(_predictor_shapes(), 2).items()}
    encoder = {f"module.backbone.{name}": value for name, value in _random(_encoder_shapes(), 1).items()}
    return {"encoder": encoder, "predictor": predictor, "epoch": 3}  # type: ignore[dict-item]


def _predictor_shapes() -> dict[str, tuple[int, ...]]:
    width, latents = CONFIG["pred_hidden_size"], CONFIG["hidden_size"]
    shapes = {
        **_linear("predictor_embed", latents, width),
        **_linear("action_encoder", 7, width),
        **_linear("state_encoder", 7, width),
        **_linear("extrinsics_encoder", 6, width),
        **_norm("predictor_norm", width),
        **_linear("predictor_proj", width, latents),
    }
    for layer in range(CONFIG["pred_num_hidden_layers"]):
        shapes |= _block(f"predictor_blocks.{layer}", width)
    return shapes


def _encoder_shapes() -> dict[str, tuple[int, ...]]:
    width, patch = CONFIG["hidden_size"], CONFIG["patch_size"]
    shapes = {
        "patch_embed.proj.weight": (width, 3, CONFIG["tubelet_size"], patch, patch),
        "patch_embed.proj.bias": (width,),
        **_norm("norm", width),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes |= _block(f"blocks.{layer}", width)
    return shapes


def _block(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        **_norm(f"{name}.norm1", width),
        **_linear(f"{name}.attn.qkv", width, 3 * width),
        **_linear(f"{name}.attn.proj", width, width),
        **_norm(f"{name}.norm2", width),
        **_linear(f"{name}.mlp.fc1", width, 4 * width),
        **_linear(f"{name}.mlp.fc2", 4 * width, width),
    }


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _random(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        value = torch.randn(*shape, generator=generator) * 0.02 * _SCALE
        is_scale = "norm" in name and name.endswith("weight")
        found[name] = value + 1 if is_scale else value * (12 if "_encoder" in name else 1)
    return found
