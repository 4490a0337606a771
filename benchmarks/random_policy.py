"""A Pi0.5 of random weights in lerobot's layout, of the published size or of one for a CPU."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from tests.tiny.vocabulary import Vocabulary, write_tokenizer

_VOCABULARY: Final = Vocabulary(
    specials=["<pad>", "<eos>", "<bos>", "<unk>"], bos="<bos>", ends=["<eos>"], template="", pieces=True
)
_VLM: Final = "paligemma_with_expert.paligemma."
_EXPERT: Final = "paligemma_with_expert.gemma_expert.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyShape:
    """Sizes of the three networks: width, inner width of the MLP, layers, heads."""

    vision: tuple[int, int, int, int]
    prefix: tuple[int, int]
    expert: tuple[int, int]
    layers: int
    heads: int
    head_dim: int
    vocabulary: int
    dtype: torch.dtype


SHAPES: Final = {
    "small": PolicyShape(
        vision=(192, 768, 4, 4),
        prefix=(384, 1536),
        expert=(192, 768),
        layers=6,
        heads=8,
        head_dim=48,
        vocabulary=512,
        dtype=torch.float32,
    ),
    "published": PolicyShape(
        vision=(1152, 4304, 27, 16),
        prefix=(2048, 16_384),
        expert=(1024, 4096),
        layers=18,
        heads=8,
        head_dim=256,
        vocabulary=257_152,
        dtype=torch.bfloat16,
    ),
}


def write_policy(folder: Path, shape: PolicyShape) -> Path:
    """Write a checkpoint into a folder."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(*size, generator=generator) * 0.02).to(shape.dtype)
        for name, size in _tensors(shape)
    }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "type": "pi05",
        "head_dim": shape.head_dim,
        "vit_num_heads": shape.vision[3],
        "image_resolution": [224, 224],
        "output_features": {"action": {"type": "ACTION", "shape": [32]}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, _VOCABULARY)
    return folder


def _tensors(shape: PolicyShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of all tensors."""
    (hidden, _), (width, _) = shape.prefix, shape.expert
    yield f"{_VLM}lm_head.weight", (shape.vocabulary, hidden)
    yield from _vision(shape, f"{_VLM}model.vision_tower.vision_model.")
    yield from _linear(f"{_VLM}model.multi_modal_projector.linear", hidden, shape.vision[0])
    text = f"{_VLM}model.language_model."
    yield f"{text}norm.weight", (hidden,)
    yield from _linear(f"{_EXPERT}norm.dense", 3 * width, width)
    for layer in range(shape.layers):
        yield from _gemma_layer(f"{text}layers.{layer}.", shape.prefix, shape)
        yield from _gemma_layer(f"{_EXPERT}layers.{layer}.", shape.expert, shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{text}layers.{layer}.{norm}.weight", (hidden,)
            yield from _linear(f"{_EXPERT}layers.{layer}.{norm}.dense", 3 * width, width)
    for name, size in (("action_in_proj", (width, 32)), ("action_out_proj", (32, width))):
        yield from _linear(name, *size)
    for name in ("time_mlp_in", "time_mlp_out"):
        yield from _linear(name, width, width)


def _gemma_layer(
    layer: str, sizes: tuple[int, int], shape: PolicyShape
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = sizes
    queries = shape.heads * shape.head_dim
    for name, size in (
        ("self_attn.q_proj", (queries, hidden)),
        ("self_attn.k_proj", (shape.head_dim, hidden)),
        ("self_attn.v_proj", (shape.head_dim, hidden)),
        ("self_attn.o_proj", (hidden, queries)),
        ("mlp.gate_proj", (inner, hidden)),
        ("mlp.up_proj", (inner, hidden)),
        ("mlp.down_proj", (hidden, inner)),
    ):
        yield f"{layer}{name}.weight", size


def _vision(shape: PolicyShape, tower: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, layers, _ = shape.vision
    yield f"{tower}embeddings.patch_embedding.weight", (width, 3, 14, 14)
    yield f"{tower}embeddings.patch_embedding.bias", (width,)
    yield f"{tower}embeddings.position_embedding.weight", (256, width)
    yield from _linear(f"{tower}post_layernorm", width)
    for layer in range(layers):
        place = f"{tower}encoder.layers.{layer}."
        for norm in ("layer_norm1", "layer_norm2"):
            yield from _linear(f"{place}{norm}", width)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{place}self_attn.{name}", width, width)
        yield from _linear(f"{place}mlp.fc1", inner, width)
        yield from _linear(f"{place}mlp.fc2", width, inner)


def _linear(name: str, *size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", size
    yield f"{name}.bias", size[:1]
