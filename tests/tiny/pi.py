"""Tiny robot policies in the published layouts: transformers' Pi0, and lerobot's Pi0 and Pi0.5.

Random weights, scaled so that actions depend on each image, on the text and on the state.
"""

import atexit
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.tiny.vocabulary import VOCAB_SIZE, Vocabulary, write_tokenizer

IMAGE_SIZE: Final = 28
HORIZON: Final = 6
STATE_DIM: Final = 8
ACTION_DIM: Final = 8
STEPS: Final = 4
ROBOT_DIM: Final = 7
"""The numbers in an action of the robot, in lerobot's checkpoints."""
ROBOT_STATE: Final = 5
CAMERAS: Final = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
_VOCABULARY: Final = Vocabulary(
    specials=["<pad>", "<eos>", "<bos>", "<unk>"], bos="<bos>", ends=["<eos>"], template="", pieces=True
)
_TEXT: Final[dict[str, Any]] = {
    "model_type": "gemma",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
_VISION: Final[dict[str, Any]] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIZE,
    "patch_size": 14,
    "vision_use_head": False,
    "hidden_act": "gelu_pytorch_tanh",
}
_SCALE: Final = 4.0


def statistics() -> dict[str, list[float]]:
    """Statistics of states and actions, by lerobot's names: no two numbers are alike."""
    return {
        "observation.state.mean": [0.1 * n for n in range(ROBOT_STATE)],
        "observation.state.std": [0.5 + 0.1 * n for n in range(ROBOT_STATE)],
        "observation.state.q01": [-1.0 - 0.2 * n for n in range(ROBOT_STATE)],
        "observation.state.q99": [1.0 + 0.3 * n for n in range(ROBOT_STATE)],
        "action.mean": [0.2 * n - 0.5 for n in range(ROBOT_DIM)],
        "action.std": [1.0 + 0.25 * n for n in range(ROBOT_DIM)],
        "action.q01": [-2.0 + 0.1 * n for n in range(ROBOT_DIM)],
        "action.q99": [3.0 + 0.2 * n for n in range(ROBOT_DIM)],
    }


def pi0_model() -> Any:
    """Transformers' Pi0, scaled."""
    import torch  # noqa: PLC0415 - a second, for tests that build it
    from transformers import PI0Config, PI0ForConditionalGeneration  # noqa: PLC0415

    vlm = {
        "model_type": "paligemma",
        "text_config": _TEXT,
        "vision_config": _VISION,
        "projection_dim": 32,
        "image_token_id": VOCAB_SIZE - 1,
    }
    config = PI0Config(
        vlm_config=vlm,
        dit_config={**_TEXT, "hidden_size": 24, "intermediate_size": 48},
        chunk_size=HORIZON,
        max_state_dim=STATE_DIM,
        max_action_dim=ACTION_DIM,
        num_inference_steps=STEPS,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = PI0ForConditionalGeneration(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed_tokens" not in name:
                parameter.mul_(_SCALE)
            elif "norm" in name and name.endswith("weight"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@cache
def tiny_pi0() -> Path:
    """The folder of a Pi0 in transformers' layout, without statistics; removed at the end of the process."""
    folder = _folder("pi0-")
    pi0_model().save_pretrained(folder)
    write_tokenizer(folder, _VOCABULARY)
    return folder


@cache
def lerobot_pi0() -> Path:
    """The same weights in lerobot's layout, with statistics: mean and deviation."""
    folder = _folder("lerobot-pi0-")
    _write_lerobot(folder, "pi0", _lerobot_names(pi0_model().state_dict()), "MEAN_STD")
    return folder


@cache
def tiny_pi05() -> Path:
    """The folder of a Pi0.5 in lerobot's layout, with statistics: quantiles."""
    folder = _folder("pi05-")
    _write_lerobot(folder, "pi05", pi05_tensors(), "QUANTILES")
    return folder


def pi05_tensors() -> dict[str, Any]:
    """The tensors of Pi0.5: those of Pi0 that it has too, and random ones for its norms and its time."""
    import torch  # noqa: PLC0415

    generator = torch.Generator().manual_seed(5)
    width = 24

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    found: dict[str, Any] = {}
    for name, tensor in _lerobot_names(pi0_model().state_dict()).items():
        if name.startswith(("state_proj", "action_time_mlp")):
            continue
        if "gemma_expert" in name and "norm" in name:
            stem = name.removesuffix("weight")
            found |= {f"{stem}dense.weight": random(3 * width, width), f"{stem}dense.bias": random(3 * width)}
        else:
            found[name] = tensor
    for layer in ("time_mlp_in", "time_mlp_out"):
        found |= {f"{layer}.weight": random(width, width) * 3, f"{layer}.bias": random(width)}
    return found


def _lerobot_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of transformers' Pi0 under lerobot's names; the embeddings as a language head."""
    gemma, vlm = "paligemma_with_expert.gemma_expert.", "paligemma_with_expert.paligemma."
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.startswith("model.dit.embed_tokens."):
            renamed = f"{gemma}lm_head.weight"
        elif name.startswith("model.dit."):
            renamed = name.replace("model.dit.", f"{gemma}model.")
        elif name == "model.vlm.language_model.embed_tokens.weight":
            renamed = f"{vlm}lm_head.weight"
        elif name.startswith("model.vlm.vision_tower.") and ".vision_model." not in name:
            renamed = name.replace("model.vlm.vision_tower.", f"{vlm}model.vision_tower.vision_model.")
        else:
            renamed = name.replace("model.vlm.", f"{vlm}model.").replace("embed_action_time.", "")
        found[renamed] = tensor.clone().contiguous()
    return found


def _write_lerobot(folder: Path, kind: str, tensors: Mapping[str, Any], mode: str) -> None:
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    save_file(dict(tensors), folder / "model.safetensors")
    config = {
        "type": kind,
        "chunk_size": HORIZON,
        "n_action_steps": HORIZON,
        "max_state_dim": STATE_DIM,
        "max_action_dim": ACTION_DIM,
        "num_inference_steps": STEPS,
        "tokenizer_max_length": 200,
        "image_resolution": [IMAGE_SIZE, IMAGE_SIZE],
        "head_dim": 16,
        "vit_num_heads": 4,
        "input_features": {
            "observation.state": {"type": "STATE", "shape": [ROBOT_STATE]},
            **{f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 28, 28]} for name in CAMERAS},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [ROBOT_DIM]}},
    }
    _write(folder / "config.json", config)
    norm_map = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    stats = {name: torch.tensor(values) for name, values in statistics().items()}
    for when, step in (("pre", "normalizer_processor"), ("post", "unnormalizer_processor")):
        state_file = f"policy_{when}processor_step_2_{step}.safetensors"
        save_file(stats, folder / state_file)
        steps = [
            {"registry_name": "rename_observations_processor", "config": {}},
            {"registry_name": step, "config": {"eps": 1e-8, "norm_map": norm_map}, "state_file": state_file},
        ]
        _write(folder / f"policy_{when}processor.json", {"name": "policy", "steps": steps})
    write_tokenizer(folder, _VOCABULARY)


def _folder(prefix: str) -> Path:
    temporary = TemporaryDirectory(prefix=prefix)
    atexit.register(temporary.cleanup)
    return Path(temporary.name)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
