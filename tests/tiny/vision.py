"""Tiny checkpoints of vision-language models: transformers' own classes, in the layout that the hub has.

Random weights, with a seed and a scale that make them meaningful: greedy output varies, and depends on the
image. Matrices other than embeddings and heads are multiplied by the scale, and norms are jittered. Without
that, a model with tied embeddings repeats its last token whatever its layers say, and ignores its image.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from tests.tiny.vocabulary import VOCAB_SIZE, Vocabulary, write_tokenizer

VisionFamily = Literal["idefics3", "internvl", "llava", "mistral3", "pixtral"]

_TEXT: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
_VISION: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_EMBEDDINGS: Final = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionModel:
    """A tiny vision-language model.

    Attributes:
        architecture: the model class, of transformers.
        config: its config, given the ids of the special tokens.
        files: further JSON files of the folder.
        prepare: changes the model before its weights are scaled.
    """

    architecture: str
    config: Callable[[Mapping[str, int]], Mapping[str, Any]]
    vocabulary: Vocabulary
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    scale: float
    seed: int = 0
    prepare: Callable[[Any], None] = lambda _: None


_LLAVA: Final = VisionModel(
    architecture="LlavaForConditionalGeneration",
    config=lambda ids: {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **_VISION},
        "image_token_index": ids["<image>"],
        "vision_feature_select_strategy": "default",
        "vision_feature_layer": -2,
    },
    vocabulary=Vocabulary(
        specials=["<unk>", "<s>", "</s>", "<image>"],
        bos="<s>",
        ends=["</s>"],
        pieces=True,
        leads_with_space=True,
        template=(
            "{% for message in messages %}{% if message['role'] != 'system' %}"
            "{{ message['role'].upper() + ': ' }}{% endif %}"
            "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
            "{{ '<image>\n' }}{% endfor %}"
            "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
            "{{ content['text'] + ' ' }}{% endfor %}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
        ),
    ),
    files={
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "crop_size": {"height": 32, "width": 32},
            "size": {"shortest_edge": 32},
            "do_center_crop": True,
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_resize": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "resample": 3,
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
        },
    },
    scale=12.0,
    seed=4,
)


def _instruct(image: str) -> str:
    """A template in the manner of Mistral's, which writes `image` for a medium."""
    return (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST]' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% else %}{{ '" + image + "' }}{% endif %}{% endfor %}{% endif %}{{ '[/INST]' }}"
        "{% elif message['content'] is string %}{{ message['content'] + eos_token }}"
        "{% else %}{{ message['content'][0]['text'] + eos_token }}{% endif %}{% endfor %}"
    )


def turns(image: str, after: str) -> str:
    """A template in the manner of ChatML, which writes `image` for a medium and `after` after it."""
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% else %}{{ '" + image + after + "' }}{% endif %}{% endfor %}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


_PIXTRAL_TOKENS: Final = Vocabulary(
    specials=["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    bos="<s>",
    ends=["</s>"],
    template=_instruct("[IMG]"),
)
_PIXTRAL_VISION: Final[dict[str, Any]] = {
    "model_type": "pixtral",
    **_VISION,
    "head_dim": 8,
    "image_size": 64,
    "rope_theta": 10000.0,
}


def _pixtral_files(merge: int) -> dict[str, dict[str, Any]]:
    return {
        "preprocessor_config.json": {
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": 8, "width": 8},
            "size": {"longest_edge": 64},
        },
        "processor_config.json": {
            "processor_class": "PixtralProcessor",
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "patch_size": 8,
            "spatial_merge_size": merge,
        },
    }


_PIXTRAL: Final = VisionModel(
    architecture="LlavaForConditionalGeneration",
    config=lambda ids: {
        "text_config": {"model_type": "mistral", **_TEXT},
        "vision_config": _PIXTRAL_VISION,
        "image_token_index": ids["[IMG]"],
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
    },
    vocabulary=_PIXTRAL_TOKENS,
    files=_pixtral_files(1),
    scale=12.0,
    seed=6,
)

_MISTRAL3: Final = VisionModel(
    architecture="Mistral3ForConditionalGeneration",
    config=lambda ids: {
        "text_config": {"model_type": "mistral", **_TEXT},
        "vision_config": _PIXTRAL_VISION,
        "image_token_index": ids["[IMG]"],
        "vision_feature_layer": -1,
        "spatial_merge_size": 2,
    },
    vocabulary=_PIXTRAL_TOKENS,
    files=_pixtral_files(2),
    scale=12.0,
    seed=5,
)

_INTERNVL: Final = VisionModel(
    architecture="InternVLForConditionalGeneration",
    config=lambda ids: {
        "text_config": {"model_type": "qwen2", **{k: v for k, v in _TEXT.items() if k != "head_dim"}},
        "vision_config": _VISION | {"image_size": [32, 32], "patch_size": [8, 8]},
        "image_token_id": ids["<IMG_CONTEXT>"],
        "downsample_ratio": 0.5,
    },
    vocabulary=Vocabulary(
        specials=["<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
        ends=["<|im_end|>"],
        template=turns("<IMG_CONTEXT>", "\\n"),
    ),
    files={
        "preprocessor_config.json": {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 32, "width": 32},
            "crop_to_patches": False,
            "max_patches": 4,
            "min_patches": 1,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        },
        "processor_config.json": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    },
    scale=8.0,
    seed=7,
)

_IDEFICS3: Final = VisionModel(
    architecture="Idefics3ForConditionalGeneration",
    config=lambda ids: {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": _VISION,
        "scale_factor": 2,
        "image_token_id": ids["<image>"],
    },
    vocabulary=Vocabulary(
        specials=[
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<end_of_utterance>",
            "<fake_token_around_image>",
            "<image>",
        ],
        bos="<|begin_of_text|>",
        ends=["<|end_of_text|>", "<end_of_utterance>"],
        template=(
            "<|begin_of_text|>{% for message in messages %}{{ message['role'] | capitalize }}"
            "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
            "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
            "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
            "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
        ),
    ),
    files={
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor",
            "do_image_splitting": True,
            "max_image_size": {"longest_edge": 32},
            "size": {"longest_edge": 64},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    },
    scale=12.0,
    seed=3,
)

VISION_MODELS: Final[Mapping[VisionFamily, VisionModel]] = {
    "idefics3": _IDEFICS3,
    "internvl": _INTERNVL,
    "llava": _LLAVA,
    "mistral3": _MISTRAL3,
    "pixtral": _PIXTRAL,
}

_folders: Final[list[TemporaryDirectory[str]]] = []  # they live as long as the session


@cache
def tiny_vision_checkpoint(family: VisionFamily) -> Path:
    """The folder of a tiny checkpoint, written once per session."""
    folder = TemporaryDirectory(prefix=f"tiny-{family}-")
    _folders.append(folder)
    return write_vision_checkpoint(Path(folder.name), family)


def write_vision_checkpoint(folder: Path, family: VisionFamily) -> Path:
    """Write a tiny checkpoint into a folder."""
    return write_model(folder, VISION_MODELS[family])


def write_model(folder: Path, model: VisionModel) -> Path:
    """Write a tiny model and its tokenizer into a folder."""
    ids = write_tokenizer(folder, model.vocabulary)
    built = _built(model, ids)
    ends = [ids[text] for text in model.vocabulary.ends]
    built.generation_config.eos_token_id = ends
    built.generation_config.do_sample = False
    built.save_pretrained(folder)
    if model.vocabulary.template:
        (folder / "chat_template.jinja").write_text(model.vocabulary.template)
    for name, content in model.files.items():
        (folder / name).write_text(json.dumps(content, indent=2))
    return folder


def _built(model: VisionModel, ids: Mapping[str, int]) -> Any:
    """The model with its weights."""
    import torch  # noqa: PLC0415 - heavy
    import transformers  # noqa: PLC0415

    torch.manual_seed(model.seed)
    model_class = getattr(transformers, model.architecture)
    found = model_class(model_class.config_class(**model.config(ids))).eval()
    model.prepare(found)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if parameter.ndim >= 2 and not any(part in name for part in _EMBEDDINGS):
                parameter.mul_(model.scale)
            elif "norm" in name and name.endswith("weight"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return found
