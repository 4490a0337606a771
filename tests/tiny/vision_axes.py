"""Tiny checkpoints of the vision-language models whose tokens have several axes, or see later ones.

Built as those in `tests.tiny.vision`. Images of Gemma 3 are longer than its window, and the tower of
Qwen2.5-VL has several windows to an image.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from tests.tiny.vision import VisionModel, turns, write_model
from tests.tiny.vocabulary import VOCAB_SIZE, Vocabulary

AxesFamily = Literal[
    "gemma3",
    "paligemma",
    "paligemma2",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
]

_TEXT: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_QWEN2: Final = {name: value for name, value in _TEXT.items() if name != "head_dim"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
}
_TURNS: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% else %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN_TOKENS: Final = Vocabulary(
    specials=[
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ],
    ends=["<|endoftext|>", "<|im_end|>"],
    template=_TURNS,
)
_GEMMA_TOKENS: Final = Vocabulary(
    specials=[
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
        "<start_of_turn>",
        "<end_of_turn>",
    ],
    bos="<bos>",
    ends=["<eos>", "<end_of_turn>"],
    pieces=True,
    template="{{ bos_token }}"
    + turns("<start_of_image>", "")
    .replace("<|im_start|>", "<start_of_turn>")
    .replace("<|im_end|>", "<end_of_turn>"),
)
_SIGLIP: Final[dict[str, Any]] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "vision_use_head": False,
}
_SIGLIP_IMAGES: Final[dict[str, Any]] = {
    "size": {"height": 32, "width": 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def _qwen_ids(ids: Mapping[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _qwen_files(cell: int, frames: int) -> dict[str, dict[str, Any]]:
    """Images of 4 to 12 cells, and videos of 2 to 6 a frame; `frames`: bounds count frames together."""
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": cell // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 4 * cell**2, "longest_edge": 12 * cell**2},
    }
    videos = {"size": {"shortest_edge": 2 * frames * cell**2, "longest_edge": 6 * frames * cell**2}}
    return {
        "preprocessor_config.json": images,
        "video_preprocessor_config.json": images | videos | {"max_frames": 12},
    }


_QWEN2_5_VL: Final = VisionModel(
    architecture="Qwen2_5_VLForConditionalGeneration",
    config=lambda ids: {
        "text_config": _QWEN2,
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 32,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        **_qwen_ids(ids),
    },
    vocabulary=_QWEN_TOKENS,
    files=_qwen_files(28, 1),
    scale=12.0,
)
_QWEN2_VL: Final = VisionModel(
    architecture="Qwen2VLForConditionalGeneration",
    config=lambda ids: {
        "text_config": _QWEN2,
        "vision_config": {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **_qwen_ids(ids),
    },
    vocabulary=_QWEN_TOKENS,
    files=_qwen_files(28, 1),
    scale=12.0,
)
_QWEN3_TOWER: Final[dict[str, Any]] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
}
_QWEN3_AXES: Final[dict[str, Any]] = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
_EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_SHARED_EXPERT: Final[dict[str, Any]] = {"shared_expert_intermediate_size": 32}


def _qwen3_vl(architecture: str, text: Mapping[str, Any]) -> VisionModel:
    return VisionModel(
        architecture=architecture,
        config=lambda ids: {
            "text_config": {**_TEXT, "rope_parameters": _QWEN3_AXES, **text},
            "vision_config": _QWEN3_TOWER | {"deepstack_visual_indexes": [0, 1]},
            **_qwen_ids(ids),
        },
        vocabulary=_QWEN_TOKENS,
        files=_qwen_files(32, 8),
        scale=5.0,
    )


def _qwen3_5(architecture: str, text: Mapping[str, Any]) -> VisionModel:
    """Layers of gated delta attention, and one that attends, with angles for a half of each head."""
    return VisionModel(
        architecture=architecture,
        config=lambda ids: {
            "text_config": {
                **_TEXT,
                "head_dim": 32,
                "rope_parameters": _QWEN3_AXES | {"partial_rotary_factor": 0.5},
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                **text,
            },
            "vision_config": _QWEN3_TOWER,
            **_qwen_ids(ids),
        },
        vocabulary=_QWEN_TOKENS,
        files=_qwen_files(32, 8),
        scale=5.0,
    )


def _with_projector(model: Any) -> None:
    """Give the projector weights: transformers' are zeros."""
    import torch  # noqa: PLC0415 - heavy

    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)


_GEMMA3: Final = VisionModel(
    architecture="Gemma3ForConditionalGeneration",
    config=lambda ids: {
        "text_config": _TEXT
        | {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        },
        "vision_config": _SIGLIP,
        "mm_tokens_per_image": 16,
        "image_token_index": ids["<image_soft_token>"],
        "image_token_id": ids["<image_soft_token>"],
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
    },
    vocabulary=_GEMMA_TOKENS,
    files={
        "preprocessor_config.json": {"image_processor_type": "Gemma3ImageProcessor", **_SIGLIP_IMAGES},
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 16},
    },
    scale=3.0,
    seed=3,
    prepare=_with_projector,
)


def _paligemma(text: dict[str, Any], scale: float, seed: int = 0) -> VisionModel:
    return VisionModel(
        architecture="PaliGemmaForConditionalGeneration",
        config=lambda ids: {
            "text_config": _TEXT | text,
            "vision_config": _SIGLIP | {"projection_dim": 32},
            "projection_dim": 32,
            "image_token_id": ids["<image>"],
            "image_token_index": ids["<image>"],
            "bos_token_id": ids["<bos>"],
            "eos_token_id": ids["<eos>"],
            "pad_token_id": ids["<pad>"],
        },
        vocabulary=Vocabulary(
            specials=["<pad>", "<eos>", "<bos>", "<unk>", "<image>"],
            bos="<bos>",
            ends=["<eos>"],
            pieces=True,
            template="",
        ),
        files={
            "preprocessor_config.json": {
                "image_processor_type": "SiglipImageProcessor",
                "image_seq_length": 16,
                **_SIGLIP_IMAGES,
            }
        },
        scale=scale,
        seed=seed,
    )


AXES_MODELS: Final[Mapping[AxesFamily, VisionModel]] = {
    "gemma3": _GEMMA3,
    "paligemma": _paligemma({"model_type": "gemma"}, 12.0, seed=2),
    "paligemma2": _paligemma({"model_type": "gemma2", "sliding_window": 8, "query_pre_attn_scalar": 16}, 3.0),
    "qwen2_5_vl": _QWEN2_5_VL,
    "qwen2_vl": _QWEN2_VL,
    "qwen3_5": _qwen3_5("Qwen3_5ForConditionalGeneration", {}),
    "qwen3_5_moe": _qwen3_5("Qwen3_5MoeForConditionalGeneration", _SHARED_EXPERT | _EXPERTS),
    "qwen3_vl": _qwen3_vl("Qwen3VLForConditionalGeneration", {}),
    "qwen3_vl_moe": _qwen3_vl("Qwen3VLMoeForConditionalGeneration", _EXPERTS),
}

_folders: Final[list[TemporaryDirectory[str]]] = []  # they live as long as the session


@cache
def tiny_axes_checkpoint(family: AxesFamily) -> Path:
    """The folder of a tiny checkpoint, written once per session."""
    folder = TemporaryDirectory(prefix=f"tiny-{family}-")
    _folders.append(folder)
    return write_model(Path(folder.name), AXES_MODELS[family])
