"""Tiny multimodal checkpoints of which the language model is served alone.

Each has the language model of a tiny checkpoint of `tests.tiny`, and a small tower with random weights.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from models.checkpoints.files import read_json
from tests.tiny import MODELS, Family, tiny_checkpoint
from tests.tiny.files import write_json, write_weights
from tests.tiny.model import Draw

Composite = Literal["cohere2_vision", "gemma4", "llama4"]

_TOWER: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_COMPOSITES: Final[Mapping[Composite, tuple[Family, str, dict[str, Any]]]] = {
    "cohere2_vision": (
        "cohere2",
        "Cohere2VisionForConditionalGeneration",
        {"vision_config": _TOWER | {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8}},
    ),
    "gemma4": (
        "gemma4",
        "Gemma4ForConditionalGeneration",
        {
            "vision_config": _TOWER | {"head_dim": 16, "num_key_value_heads": 2, "global_head_dim": 16},
            "audio_config": None,
        },
    ),
    "llama4": (
        "llama4",
        "Llama4ForConditionalGeneration",
        {
            "vision_config": _TOWER
            | {
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            }
        },
    ),
}
_folders: Final[list[TemporaryDirectory[str]]] = []  # they live as long as the session


@cache
def composite_checkpoint(name: Composite) -> Path:
    """The folder of a tiny checkpoint, written once per session by transformers' own class."""
    folder = TemporaryDirectory(prefix=f"tiny-{name}-")
    _folders.append(folder)
    return _written(Path(folder.name), *_COMPOSITES[name])


def _written(folder: Path, family: Family, architecture: str, towers: dict[str, Any]) -> Path:
    import torch  # noqa: PLC0415 - heavy
    import transformers  # noqa: PLC0415 - heavy

    text = tiny_checkpoint(family)
    source = getattr(transformers, MODELS[family].architecture).from_pretrained(text)
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(text_config=source.config.to_dict(), **towers))
    decoder = model.get_decoder()
    getattr(decoder, "model", decoder).load_state_dict(source.model.state_dict())
    model.get_output_embeddings().load_state_dict(source.lm_head.state_dict())
    model.save_pretrained(folder)
    for file in text.iterdir():
        if file.suffix == ".jinja" or file.name.startswith(("token", "generation")):
            (folder / file.name).write_bytes(file.read_bytes())
    ends = read_json(folder / "generation_config.json")["eos_token_id"]
    write_json(folder / "config.json", read_json(folder / "config.json") | {"eos_token_id": ends[-1]})
    return folder


def written_by_names(
    folder: Path, family: Family, architecture: str, model_type: str, prefix: str = "model.language_model."
) -> Path:
    """Write a text model under the names that it has in a multimodal checkpoint, beside a tower's tensor."""
    model = MODELS[family]
    tensors = {
        name if name.startswith("lm_head.") else prefix + name.removeprefix("model."): tensor
        for name, tensor in model.weights(Draw(0)).items()
    }
    towers = {"model.vision_tower.patches.weight": Draw(1).matrix(4, 4)}
    source = tiny_checkpoint(family)
    text = read_json(source / "config.json")
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = {"architectures": [architecture], "model_type": model_type, "text_config": text}
    write_json(folder / "config.json", config | {"vision_config": {}, "eos_token_id": text["eos_token_id"]})
    write_weights(folder, tensors | towers, "F32", 1)
    return folder
