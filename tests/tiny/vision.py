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

VisionFamily = Literal["llava"]

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
    seed: int = 0
    scale: float = 8.0
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
)

VISION_MODELS: Final[Mapping[VisionFamily, VisionModel]] = {"llava": _LLAVA}

_folders: Final[list[TemporaryDirectory[str]]] = []  # they live as long as the session


@cache
def tiny_vision_checkpoint(family: VisionFamily) -> Path:
    """The folder of a tiny checkpoint, written once per session."""
    folder = TemporaryDirectory(prefix=f"tiny-{family}-")
    _folders.append(folder)
    return write_vision_checkpoint(Path(folder.name), family)


def write_vision_checkpoint(folder: Path, family: VisionFamily) -> Path:
    """Write a tiny checkpoint into a folder."""
    model = VISION_MODELS[family]
    ids = write_tokenizer(folder, model.vocabulary)
    built = _built(model, ids)
    ends = [ids[text] for text in model.vocabulary.ends]
    built.generation_config.eos_token_id = ends
    built.generation_config.do_sample = False
    built.save_pretrained(folder)
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
