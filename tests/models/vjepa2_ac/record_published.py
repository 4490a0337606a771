"""Records what the published code computes with the tiny checkpoint: `published.npz`.

    git clone https://github.com/facebookresearch/vjepa2
    python -m tests.models.vjepa2_ac.record_published FOLDER_OF_THE_CLONE

Of timm, which needs torchvision, only `drop_path` is used, and it does nothing in inference.
"""

import sys
import types
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.nn.functional import layer_norm

from tests.models.vjepa2_ac import cases
from tests.tiny.vjepa2_ac import CONFIG, tensors

PATH: Final = Path(__file__).with_name("published.npz")


def main(clone: str) -> None:
    """Write the recording."""
    _pretend_timm()
    sys.path[:0] = [clone, str(Path(clone) / "notebooks")]
    found: dict[str, Any] = {}
    encoder, predictor, seeing = _encoder(), _predictor(False), _predictor(True)
    clip = torch.from_numpy(cases.clip())
    with torch.inference_mode():
        pixels = clip.permute(1, 0, 2, 3)[None]  # (1, 3, frames, H, W)
        found["clip"] = encoder(pixels)
        still = pixels.permute(0, 2, 1, 3, 4).flatten(0, 1).unsqueeze(2).repeat(1, 1, 2, 1, 1)
        frames = layer_norm(encoder(still), (CONFIG["hidden_size"],))
        actions, states, extrinsics = map(torch.from_numpy, cases.trajectory())
        steps = clip.shape[0] // 2
        of = actions[None, :steps], states[None, :steps]
        found["predicted"] = predictor(found["clip"], *of)
        found["seeing"] = seeing(found["clip"], *of, extrinsics[None, :steps])
        found["rollout"] = _rollout(predictor, frames[:1], actions, states)
        for name, options in cases.PLANS.items():
            found[name] = _plan(predictor, frames, options)
    found["poses"] = _poses()
    arrays: Any = {name: np.asarray(value) for name, value in found.items()}
    np.savez_compressed(PATH, **arrays)


def _rollout(
    predictor: Any, frame: torch.Tensor, actions: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """All frames again in each step, as the published code does."""
    found = frame
    for step in range(1, cases.HORIZON + 1):
        behind = predictor(found, actions[None, :step], states[None, :step])[:, -frame.shape[1] :]
        found = torch.cat([found, layer_norm(behind, behind.shape[-1:])], dim=1)
    return found[:, frame.shape[1] :]


def _plan(predictor: Any, frames: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    from utils.world_model_wrapper import WorldModel  # type: ignore[import-not-found]  # noqa: PLC0415

    patches = frames.shape[1]
    model = WorldModel(None, predictor, patches, None, mpc_args=options["mpc_args"], device="cpu")
    torch.manual_seed(cases.SEED)
    pose = torch.from_numpy(cases.POSE)[None, None]
    found: torch.Tensor = model.infer_next_action(
        frames[:1, None], pose, frames[cases.GOAL_FRAME, None, None], close_gripper=options["close_gripper"]
    )
    return found


def _poses() -> torch.Tensor:
    from utils.mpc_utils import compute_new_pose  # type: ignore[import-not-found]  # noqa: PLC0415

    poses, actions = map(torch.from_numpy, cases.movements())
    found: torch.Tensor = compute_new_pose(poses[:, None], actions[:, None])[:, 0]
    return found


def _encoder() -> Any:
    from src.models.vision_transformer import VisionTransformer  # type: ignore[import-not-found]  # noqa: PLC0415

    model = VisionTransformer(
        img_size=(CONFIG["crop_size"],) * 2,
        patch_size=CONFIG["patch_size"],
        num_frames=CONFIG["frames_per_clip"],
        tubelet_size=CONFIG["tubelet_size"],
        embed_dim=CONFIG["hidden_size"],
        depth=CONFIG["num_hidden_layers"],
        num_heads=CONFIG["num_attention_heads"],
        mlp_ratio=4,
        qkv_bias=True,
        norm_layer=lambda width: torch.nn.LayerNorm(width, eps=1e-6),
        use_sdpa=True,
        uniform_power=False,
        use_rope=True,
    )
    return _filled(model, "encoder")


def _predictor(extrinsics: bool) -> Any:
    from src.models.ac_predictor import vit_ac_predictor  # type: ignore[import-not-found]  # noqa: PLC0415

    model = vit_ac_predictor(
        img_size=(CONFIG["crop_size"],) * 2,
        patch_size=CONFIG["patch_size"],
        num_frames=16,
        tubelet_size=CONFIG["tubelet_size"],
        embed_dim=CONFIG["hidden_size"],
        predictor_embed_dim=CONFIG["pred_hidden_size"],
        depth=CONFIG["pred_num_hidden_layers"],
        num_heads=CONFIG["pred_num_attention_heads"],
        use_extrinsics=extrinsics,
    )
    return _filled(model, "predictor")


def _filled(model: Any, part: str) -> Any:
    named = tensors()[part]
    bare = {name.replace("module.", "").replace("backbone.", ""): value for name, value in named.items()}
    model.load_state_dict(bare, strict=True)
    return model.eval()


def _pretend_timm() -> None:
    layers: Any = types.ModuleType("timm.models.layers")
    layers.drop_path = lambda value, *_, **__: value
    sys.modules |= {
        "timm": types.ModuleType("timm"),
        "timm.models": types.ModuleType("timm.models"),
        "timm.models.layers": layers,
    }


if __name__ == "__main__":
    main(sys.argv[1])
