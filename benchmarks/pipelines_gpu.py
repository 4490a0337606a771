"""Denoising steps of pipelines in their published sizes, with random weights in bfloat16, on one GPU.

Each figure is printed as soon as it is there; a model that fails is named, and none begins after the time is
up. The calls go through the denoiser's own `compute`, one call and two in a forward. Not run on a GPU yet.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch

from benchmarks.report import Figure
from benchmarks.session import MINUTES, Session
from models.diffusion_pipelines.batching import joined, rows_of, rule_of, split

STEPS: Final = 10
QWEN_GOAL: Final = "1024 x 1024; goal below 0.243 s on an H200"
WAN_NOTE: Final = "Wan2.2 TI2V 5B, 832 x 480, 81 frames"


def qwen_image(device: str, **config: Any) -> tuple[Any, dict[str, Any]]:
    """Qwen-Image's transformer, and the arguments of a call: 1024 x 1024 pixels, 128 tokens of text."""
    from diffusers import QwenImageTransformer2DModel  # noqa: PLC0415

    module = _random(QwenImageTransformer2DModel, device, config)
    side = 64
    width = module.config.in_channels
    return module, {
        "hidden_states": _noise(device, 1, side * side, width),
        "timestep": torch.full((1,), 0.5, device=device, dtype=torch.bfloat16),
        "encoder_hidden_states": _noise(device, 1, 128, module.config.joint_attention_dim),
        "encoder_hidden_states_mask": None,
        "img_shapes": [[(1, side, side)]],
        "guidance": None,
        "attention_kwargs": {},
        "return_dict": False,
    }


def wan22(device: str, **config: Any) -> tuple[Any, dict[str, Any]]:
    """The transformer of Wan2.2's 5B model, and the arguments of a call: 832 x 480 pixels, 81 frames."""
    from diffusers import WanTransformer3DModel  # noqa: PLC0415

    published = {
        "in_channels": 48, "out_channels": 48, "num_attention_heads": 24, "attention_head_dim": 128,
        "ffn_dim": 14_336, "num_layers": 30,
    }  # fmt: skip
    module = _random(WanTransformer3DModel, device, published | config)
    return module, {
        "hidden_states": _noise(device, 1, module.config.in_channels, 21, 30, 52),
        "timestep": torch.full((1, 21 * 15 * 26), 500, device=device),  # of each token (`expand_timesteps`)
        "encoder_hidden_states": _noise(device, 1, 512, module.config.text_dim),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _random(kind: Any, device: str, config: Mapping[str, Any]) -> Any:
    """A module with random weights, made on the device in bfloat16: there is no copy in main memory."""
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return kind(**config).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)


def _noise(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


@torch.inference_mode()
def call_s(module: Any, arguments: dict[str, Any], calls: int, device: str) -> float:
    """The seconds of a forward over so many calls, the best of `STEPS`."""
    rule, found = rule_of(module), list[float]()
    assert rule is not None
    for _ in range(STEPS):
        begun_s = time.perf_counter()
        output = module(**joined(rule, [arguments] * calls))
        split(output, [rows_of(rule, arguments)] * calls)
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begun_s)
    return min(found)


def _steps(
    make: Callable[[str], tuple[Any, dict[str, Any]]], name: str, note: str, device: str
) -> Iterator[Figure]:
    module, arguments = make(device)
    one, both = (call_s(module, arguments, calls, device) for calls in (1, 2))
    yield Figure(f"{name}: a guided step, its two calls one after the other", 2 * one, "s", note)
    yield Figure(f"{name}: a guided step, its two calls in a forward", both, "s", note)
    yield Figure(f"{name}: a step without guidance", one, "s")


def one_by_one(device: str = "cuda", *, minutes: float = MINUTES) -> list[Figure]:
    """Measure all models; return what could be measured."""
    session = Session(minutes)
    session.measure("Qwen-Image", partial(_steps, qwen_image, "Qwen-Image", QWEN_GOAL, device))
    if device == "cuda":
        torch.cuda.empty_cache()
    session.measure("Wan2.2", partial(_steps, wan22, "Wan2.2", WAN_NOTE, device))
    return session.figures
