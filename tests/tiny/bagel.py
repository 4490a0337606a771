"""A tiny BAGEL checkpoint in the published layout, key by key: two configs, two weight files, a tokenizer.

The squares of positions have the published sizes: 64 x 64 for latents, 70 x 70 for patches. All else is tiny,
unless a larger shape is asked for. The weights are random, and so large that every one of them matters to
what is written and drawn.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.tiny.files import write_json
from tests.tiny.vocabulary import VOCAB_SIZE, Vocabulary, write_tokenizer

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class BagelShape:
    """Sizes of a checkpoint; those of the tiny one.

    Attributes:
        hidden, inner, layers, heads, kv_heads, vocabulary: of the language model.
        vit_hidden, vit_inner, vit_layers, vit_heads: of the vision tower.
        vae_widths: the channels of the autoencoder, by level; multiples of 32.
    """

    hidden: int = 64
    inner: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = VOCAB_SIZE
    rope_theta: float = 10000.0
    vit_hidden: int = 32
    vit_inner: int = 48
    vit_layers: int = 3
    vit_heads: int = 2
    vae_widths: tuple[int, ...] = (32, 32, 32, 32)

    @property
    def head_dim(self) -> int:
        """The numbers of a head."""
        return self.hidden // self.heads

    @property
    def llm_config(self) -> Mapping[str, Any]:
        """`llm_config.json`."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": self.vocabulary,
            "qk_norm": True,
        }

    @property
    def vit_config(self) -> Mapping[str, Any]:
        """`vit_config.json`."""
        return {
            "model_type": "siglip_vision_model",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": self.vit_hidden,
            "image_size": 980,
            "intermediate_size": self.vit_inner,
            "layer_norm_eps": 1e-6,
            "num_attention_heads": self.vit_heads,
            "num_channels": 3,
            "num_hidden_layers": self.vit_layers,
            "patch_size": _PATCH,
        }


TINY: Final = BagelShape()
VAE_BLOCKS: Final = 2
"""The residual blocks of a level of the encoder."""
VAE_CHANNELS: Final = 16
"""The channels of its latents."""
_PATCH: Final = 14
VOCABULARY: Final = Vocabulary(
    specials=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"],
    ends=["<|endoftext|>", "<|im_end|>"],
    template=(
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
        " + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
)

_LATENT_WIDTH: Final = 4 * VAE_CHANNELS
_folders: Final[list[TemporaryDirectory[str]]] = []  # they live as long as the session


class Draw:
    """Random tensors, in the order they are asked for."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float = 1.0, centre: float = 0.0) -> Array:
        return (centre + self._random.standard_normal(shape) * scale).astype(np.float32)

    def linear(
        self, name: str, out: int, into: int, *, bias: bool = True, gain: float = 1.5
    ) -> dict[str, Array]:
        """A matrix that keeps the size of its input, times `gain`."""
        made = {f"{name}.weight": self.normal(out, into, scale=gain / into**0.5)}
        return made | ({f"{name}.bias": self.normal(out, scale=0.2)} if bias else {})

    def convolution(self, name: str, out: int, into: int, size: int = 3) -> dict[str, Array]:
        weight = self.normal(out, into, size, size, scale=1 / (into * size * size) ** 0.5)
        return {f"{name}.weight": weight, f"{name}.bias": self.normal(out, scale=0.1)}

    def norm(self, name: str, size: int, *, bias: bool = False) -> dict[str, Array]:
        made = {f"{name}.weight": self.normal(size, scale=0.2, centre=1.0)}
        return made | ({f"{name}.bias": self.normal(size, scale=0.1)} if bias else {})

    def save(self, tensors: dict[str, Array], path: Path) -> None:
        """Write a weight file."""
        save_file(tensors, path)


@cache
def bagel_checkpoint(*, seed: int = 0) -> Path:
    """A checkpoint folder; built once per session, never to be written to."""
    folder = TemporaryDirectory(prefix="dalsegno-bagel-")
    _folders.append(folder)
    return write_bagel(Path(folder.name), Draw(seed))


def write_bagel(folder: Path, draw: Draw, shape: BagelShape = TINY) -> Path:
    """Write a checkpoint into an empty folder of the caller's own."""
    write_tokenizer(folder, VOCABULARY)
    write_json(
        folder / "config.json", {"architectures": ["BagelForConditionalGeneration"], "model_type": "bagel"}
    )
    write_json(folder / "llm_config.json", shape.llm_config)
    write_json(folder / "vit_config.json", shape.vit_config)
    of_model = [*_language(draw, shape), *_latent_parts(draw, shape.hidden), *_vision(draw, shape)]
    draw.save(dict(of_model), folder / "ema.safetensors")
    draw.save(
        {**_encoder(draw, shape.vae_widths), **_decoder(draw, shape.vae_widths)}, folder / "ae.safetensors"
    )
    return folder


def _language(draw: Draw, shape: BagelShape) -> Iterator[tuple[str, Array]]:
    """The language model; most of its weights are there twice."""
    body, hidden = "language_model.model", shape.hidden
    yield f"{body}.embed_tokens.weight", draw.normal(shape.vocabulary, hidden)
    yield "language_model.lm_head.weight", draw.normal(shape.vocabulary, hidden, scale=0.3)
    for end in ("", "_moe_gen"):
        yield from draw.norm(f"{body}.norm{end}", hidden).items()
        for layer in range(shape.layers):
            yield from _layer(draw, shape, f"{body}.layers.{layer}", end)


def _layer(draw: Draw, shape: BagelShape, at: str, end: str) -> Iterator[tuple[str, Array]]:
    """The weights of a layer for one kind of tokens."""
    hidden, inner = shape.hidden, shape.inner
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield from draw.norm(f"{at}.{name}{end}", hidden).items()
    for name, size in (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)):
        yield from draw.linear(f"{at}.self_attn.{name}{end}", size, hidden).items()
    yield from draw.linear(f"{at}.self_attn.o_proj{end}", hidden, width, bias=False).items()
    for name in ("q_norm", "k_norm"):
        weight = draw.normal(shape.head_dim, scale=0.3, centre=1.5)
        yield f"{at}.self_attn.{name}{end}.weight", weight
    for name, out, into in (
        ("gate_proj", inner, hidden),
        ("up_proj", inner, hidden),
        ("down_proj", hidden, inner),
    ):
        yield from draw.linear(f"{at}.mlp{end}.{name}", out, into, bias=False).items()


def _latent_parts(draw: Draw, hidden: int) -> Iterator[tuple[str, Array]]:
    yield from draw.linear("time_embedder.mlp.0", hidden, 256).items()
    yield from draw.linear("time_embedder.mlp.2", hidden, hidden).items()
    yield from draw.linear("vae2llm", hidden, _LATENT_WIDTH).items()
    yield from draw.linear("llm2vae", _LATENT_WIDTH, hidden, gain=1.0).items()
    yield "latent_pos_embed.pos_embed", draw.normal(64 * 64, hidden, scale=0.7)


def _vision(draw: Draw, shape: BagelShape) -> Iterator[tuple[str, Array]]:
    """The vision tower, without the last of its layers, which is not used."""
    body, hidden = "vit_model.vision_model", shape.vit_hidden
    numbers, places = 3 * _PATCH**2, 70 * 70
    yield from draw.linear(f"{body}.embeddings.patch_embedding", hidden, numbers).items()
    yield f"{body}.embeddings.position_embedding.weight", draw.normal(places, hidden, scale=0.7)
    yield from draw.norm(f"{body}.post_layernorm", hidden, bias=True).items()
    for layer in range(shape.vit_layers - 1):
        at, inner = f"{body}.encoder.layers.{layer}", shape.vit_inner
        for name in ("layer_norm1", "layer_norm2"):
            yield from draw.norm(f"{at}.{name}", hidden, bias=True).items()
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from draw.linear(f"{at}.self_attn.{name}", hidden, hidden).items()
        yield from draw.linear(f"{at}.mlp.fc1", inner, hidden).items()
        yield from draw.linear(f"{at}.mlp.fc2", hidden, inner).items()
    yield from draw.linear("connector.fc1", shape.hidden, hidden).items()
    yield from draw.linear("connector.fc2", shape.hidden, shape.hidden).items()
    yield "vit_pos_embed.pos_embed", draw.normal(places, shape.hidden, scale=0.7)


def _encoder(draw: Draw, widths: Sequence[int]) -> dict[str, Array]:
    """The autoencoder's encoder, under the names of FLUX."""
    found = draw.convolution("encoder.conv_in", widths[0], 3)
    into = widths[0]
    for level, width in enumerate(widths):
        at = f"encoder.down.{level}"
        for block in range(VAE_BLOCKS):
            found |= _residual(draw, f"{at}.block.{block}", into if block == 0 else width, width)
        if level < len(widths) - 1:
            found |= draw.convolution(f"{at}.downsample.conv", width, width)
        into = width
    return found | _last_parts(draw, "encoder", middle=widths[-1], last=widths[-1], out=2 * VAE_CHANNELS)


def _decoder(draw: Draw, widths: Sequence[int]) -> dict[str, Array]:
    """The autoencoder's decoder, which goes from the last level to the first one."""
    found = draw.convolution("decoder.conv_in", widths[-1], VAE_CHANNELS)
    for level, width in enumerate(widths):
        at, into = f"decoder.up.{level}", widths[min(level + 1, len(widths) - 1)]
        for block in range(VAE_BLOCKS + 1):
            found |= _residual(draw, f"{at}.block.{block}", into if block == 0 else width, width)
        if level > 0:
            found |= draw.convolution(f"{at}.upsample.conv", width, width)
    return found | _last_parts(draw, "decoder", middle=widths[-1], last=widths[0], out=3)


def _last_parts(draw: Draw, half: str, *, middle: int, last: int, out: int) -> dict[str, Array]:
    """The blocks in the middle of a half of the autoencoder, and its last norm and convolution."""
    found: dict[str, Array] = {}
    for block in (1, 2):
        found |= _residual(draw, f"{half}.mid.block_{block}", middle, middle)
    found |= draw.norm(f"{half}.mid.attn_1.norm", middle, bias=True)
    for name in ("q", "k", "v", "proj_out"):
        found |= draw.convolution(f"{half}.mid.attn_1.{name}", middle, middle, size=1)
    found |= draw.norm(f"{half}.norm_out", last, bias=True)
    return found | draw.convolution(f"{half}.conv_out", out, last)


def _residual(draw: Draw, name: str, into: int, out: int) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for number, width in enumerate((into, out), start=1):
        found |= draw.norm(f"{name}.norm{number}", width, bias=True)
        found |= draw.convolution(f"{name}.conv{number}", out, width)
    if into != out:
        found |= draw.convolution(f"{name}.nin_shortcut", out, into, size=1)
    return found
