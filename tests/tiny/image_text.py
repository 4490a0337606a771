"""Tiny CLIP and SigLIP checkpoints in their published layouts."""

import atexit
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

_TOWER: Final[dict[str, Any]] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_IMAGES: Final[dict[str, Any]] = {**_TOWER, "image_size": 32, "patch_size": 8}
_ENDS: Final = {"bos_token_id": 2, "pad_token_id": 3}
CONFIGS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "clip": (
        "CLIPModel",
        {
            "text_config": {**_TOWER, **_ENDS, "vocab_size": 256, "eos_token_id": 3},
            "vision_config": _IMAGES,
            "projection_dim": 16,
        },
    ),
    "old-clip": (
        "CLIPModel",
        {
            "text_config": {**_TOWER, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 2},
            "vision_config": _IMAGES,
            "projection_dim": 16,
        },
    ),
    "siglip": (
        "SiglipModel",
        {
            "text_config": {
                **_TOWER,
                "vocab_size": 256,
                "max_position_embeddings": 16,
                "projection_size": 32,
            },
            "vision_config": _IMAGES,
        },
    ),
}
"""The class and the configuration of each; `old-clip` states the end of texts as OpenAI's first ones."""
_SCALE: Final = 3.0
"""Weights of the usual deviation barely differ from zero: embeddings would not depend on the input."""
WORDS: Final = ("a", "red", "cat", "dog", "on", "mat", *(f"w{n}" for n in range(200)))


@cache
def tiny_image_text(name: str) -> Path:
    """The folder of a checkpoint of `CONFIGS`; made once in a process."""
    import torch  # noqa: PLC0415 - a second, for tests that build it
    import transformers  # noqa: PLC0415

    temporary = TemporaryDirectory(prefix=f"{name}-")
    atexit.register(temporary.cleanup)
    folder = Path(temporary.name) / name
    kind, config = CONFIGS[name]
    model_class = getattr(transformers, kind)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**config))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.dim() > 1 and "embedding" not in parameter_name:
                    parameter.mul_(_SCALE)
    model.save_pretrained(folder)
    _tokenizer(name).save_pretrained(folder)
    images = getattr(transformers, kind.replace("Model", "ImageProcessorPil"))
    sizes = {"size": {"height": 32, "width": 32}} if name == "siglip" else _CROPPED
    images(**sizes).save_pretrained(folder)
    return folder


_CROPPED: Final = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}


def _tokenizer(name: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    words = ["[UNK]", "</s>", "<bos>", "<eos>", *WORDS]
    begin, end = ("<bos>", "<eos>")
    if name == "old-clip":  # the end of a text has the highest id
        words.append(end := "<end>")
    if name == "siglip":
        begin, end = "", "</s>"
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(token, vocabulary[token]) for token in (begin, end) if token]
    template = f"{begin} $A {end}".strip()
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
    length = 16 if name == "siglip" else 77
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=length, unk_token="[UNK]", eos_token=end, pad_token=end
    )
