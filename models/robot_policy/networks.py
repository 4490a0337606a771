"""The configs of a policy's two networks: PaliGemma, and the layers of the expert.

Checkpoints of lerobot and openpi name a variant of Gemma instead of its sizes, so the sizes are read from the
shapes of the tensors. What shapes do not say is that of all published policies, unless `config.json` has it.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transformers import GemmaConfig, PaliGemmaConfig
from transformers.models.pi0.configuration_pi0 import PI0Config

from models.checkpoints.files import CheckpointError, read_json
from models.checkpoints.weights import Shard
from models.robot_policy.settings import PolicySettings
from models.robot_policy.tensor_names import EXPERT, PREFIX, place_of

_HEAD_DIM: Final = 256
_VISION_HEADS: Final = 16
_LANGUAGE: Final = f"{PREFIX}model.language_model."
_VISION: Final = f"{PREFIX}model.vision_tower."

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """The configs of the networks: transformers' `PaliGemmaConfig` and `GemmaConfig`."""

    prefix: Any
    expert: Any


def read_networks(checkpoint: Path, settings: PolicySettings, shards: Iterable[Shard]) -> Networks:
    """Read or derive the configs.

    Raises:
        CheckpointError: a tensor is missing, or the shapes do not fit one another.
    """
    raw = read_json(checkpoint / "config.json")
    if settings.is_transformers:
        config = PI0Config.from_dict(raw)
        found = Networks(prefix=config.vlm_config, expert=config.dit_config)
    else:
        shapes = {place_of(name): info.shape for shard in shards for name, info in shard.tensors.items()}
        found = _derived(shapes, raw, settings, checkpoint)
    # These mean prompts with images. Passes have masks of their own, and all else is causal.
    found.prefix.text_config.use_bidirectional_attention = False
    found.expert.use_bidirectional_attention = False
    _check_shared(found, checkpoint)
    return found


def _derived(shapes: Shapes, raw: Mapping[str, Any], settings: PolicySettings, checkpoint: Path) -> Networks:
    try:
        head_dim = int(raw.get("head_dim", _HEAD_DIM))
        vocabulary, _ = shapes.get(f"{_LANGUAGE}embed_tokens.weight") or shapes[f"{PREFIX}lm_head.weight"]
        text = {"vocab_size": vocabulary, **_gemma(shapes, f"{_LANGUAGE}layers.", head_dim)}
        expert = GemmaConfig(vocab_size=vocabulary, **_gemma(shapes, f"{EXPERT}dit.layers.", head_dim))
        vision = _siglip(shapes, raw, settings)
    except KeyError as error:
        raise CheckpointError(
            f"{checkpoint} lacks the tensor {error}: expected the weights of a robot policy, as lerobot or "
            "openpi publish them"
        ) from error
    prefix = PaliGemmaConfig(
        text_config={"model_type": "gemma", **text},
        vision_config={"model_type": "siglip_vision_model", **vision},
        projection_dim=text["hidden_size"],
        image_token_id=vocabulary - 1,  # no prompt has image tokens: its rows come first
    )
    return Networks(prefix=prefix, expert=expert)


def _gemma(shapes: Shapes, layers: str, head_dim: int) -> dict[str, Any]:
    """The sizes of a Gemma whose layers' names begin with `layers`."""
    queries, hidden = shapes[f"{layers}0.self_attn.q_proj.weight"]
    keys, _ = shapes[f"{layers}0.self_attn.k_proj.weight"]
    return {
        "hidden_size": hidden,
        "intermediate_size": shapes[f"{layers}0.mlp.up_proj.weight"][0],
        "num_hidden_layers": _layers(shapes, layers),
        "num_attention_heads": queries // head_dim,
        "num_key_value_heads": keys // head_dim,
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
    }


def _siglip(shapes: Shapes, raw: Mapping[str, Any], settings: PolicySettings) -> dict[str, Any]:
    tower = next((name[: name.index("embeddings.")] for name in shapes if name.startswith(_VISION)), _VISION)
    hidden, _, patch, _ = shapes[f"{tower}embeddings.patch_embedding.weight"]
    positions, _ = shapes[f"{tower}embeddings.position_embedding.weight"]
    if math.isqrt(positions) * patch != settings.image_size:
        raise CheckpointError(
            f"the vision tower has {positions} positions of {patch} x {patch} pixels: expected those of "
            f"{settings.image_size} x {settings.image_size}, as image_resolution in config.json says"
        )
    return {
        "hidden_size": hidden,
        "intermediate_size": shapes[f"{tower}encoder.layers.0.mlp.fc1.weight"][0],
        "num_hidden_layers": _layers(shapes, f"{tower}encoder.layers."),
        "num_attention_heads": int(raw.get("vit_num_heads", _VISION_HEADS)),
        "image_size": settings.image_size,
        "patch_size": patch,
        "hidden_act": "gelu_pytorch_tanh",
        "vision_use_head": False,
    }


def _layers(shapes: Shapes, prefix: str) -> int:
    """The number of layers whose tensors' names begin with `prefix`."""
    numbers = (re.match(r"\d+", name.removeprefix(prefix)) for name in shapes if name.startswith(prefix))
    return 1 + max(int(found[0]) for found in numbers if found)


def _check_shared(networks: Networks, checkpoint: Path) -> None:
    """Check that the expert can read the keys and values of the prefix."""

    def layout(config: Any) -> tuple[int, int, int]:
        return config.num_hidden_layers, config.num_key_value_heads, config.head_dim

    prefix, expert = layout(networks.prefix.text_config), layout(networks.expert)
    if prefix != expert:
        raise CheckpointError(
            f"{checkpoint}: the expert has (layers, KV heads, head size) {expert}: expected {prefix}, as the "
            "prefix, whose keys and values it reads"
        )
