"""A tiny BAGEL checkpoint in the published layout, key by key: two configs, two weight files, a tokenizer.

The squares of positions have the published sizes: 64 x 64 for latents, 70 x 70 for patches. All else is tiny.
The weights are random, and so large that every one of them matters to what is written and drawn.
"""

from collections.abc import Iterator, Mapping
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

HIDDEN: Final = 64
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 16
LLM_CONFIG: Final[Mapping[str, Any]] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
    "qk_norm": True,
}
VIT_CONFIG: Final[Mapping[str, Any]] = {
    "model_type": "siglip_vision_model",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "image_size": 980,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-6,
    "num_attention_heads": 2,
    "num_channels": 3,
    "num_hidden_layers": 3,
    "patch_size": 14,
}
VAE_WIDTH: Final = 32
"""The channels of the autoencoder, the same in all of its levels."""
VAE_LEVELS: Final = 4
VAE_BLOCKS: Final = 2
"""The residual blocks of a level of the encoder."""
VAE_CHANNELS: Final = 16
"""The channels of its latents."""
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


class _Draw:
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


@cache
def bagel_checkpoint(*, seed: int = 0) -> Path:
    """A checkpoint folder; built once per session, never to be written to."""
    folder = TemporaryDirectory(prefix="dalsegno-bagel-")
    _folders.append(folder)
    return write_bagel(Path(folder.name), seed=seed)


def write_bagel(folder: Path, *, seed: int = 0) -> Path:
    """Write a checkpoint into an empty folder of the caller's own."""
    write_tokenizer(folder, VOCABULARY)
    write_json(
        folder / "config.json", {"architectures": ["BagelForConditionalGeneration"], "model_type": "bagel"}
    )
    write_json(folder / "llm_config.json", LLM_CONFIG)
    write_json(folder / "vit_config.json", VIT_CONFIG)
    draw = _Draw(seed)
    save_file(dict([*_language(draw), *_latent_parts(draw), *_vision(draw)]), folder / "ema.safetensors")
    save_file(dict([*_coder(draw, "encoder"), *_coder(draw, "decoder")]), folder / "ae.safetensors")
    return folder


def _language(draw: _Draw) -> Iterator[tuple[str, Array]]:
    """The language model; most of its weights are there twice."""
    body = "language_model.model"
    yield f"{body}.embed_tokens.weight", draw.normal(VOCAB_SIZE, HIDDEN)
    yield "language_model.lm_head.weight", draw.normal(VOCAB_SIZE, HIDDEN, scale=0.3)
    width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    inner = LLM_CONFIG["intermediate_size"]
    for end in ("", "_moe_gen"):
        yield from draw.norm(f"{body}.norm{end}", HIDDEN).items()
        for layer in range(LLM_CONFIG["num_hidden_layers"]):
            at = f"{body}.layers.{layer}"
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield from draw.norm(f"{at}.{name}{end}", HIDDEN).items()
            for name, size in (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)):
                yield from draw.linear(f"{at}.self_attn.{name}{end}", size, HIDDEN).items()
            yield from draw.linear(f"{at}.self_attn.o_proj{end}", HIDDEN, width, bias=False).items()
            for name in ("q_norm", "k_norm"):
                weight = draw.normal(HEAD_DIM, scale=0.3, centre=1.5)
                yield f"{at}.self_attn.{name}{end}.weight", weight
            for name, out, into in (
                ("gate_proj", inner, HIDDEN),
                ("up_proj", inner, HIDDEN),
                ("down_proj", HIDDEN, inner),
            ):
                yield from draw.linear(f"{at}.mlp{end}.{name}", out, into, bias=False).items()


def _latent_parts(draw: _Draw) -> Iterator[tuple[str, Array]]:
    yield from draw.linear("time_embedder.mlp.0", HIDDEN, 256).items()
    yield from draw.linear("time_embedder.mlp.2", HIDDEN, HIDDEN).items()
    yield from draw.linear("vae2llm", HIDDEN, _LATENT_WIDTH).items()
    yield from draw.linear("llm2vae", _LATENT_WIDTH, HIDDEN, gain=1.0).items()
    yield "latent_pos_embed.pos_embed", draw.normal(64 * 64, HIDDEN, scale=0.7)


def _vision(draw: _Draw) -> Iterator[tuple[str, Array]]:
    """The vision tower, without the last of its layers, which is not used."""
    body, hidden = "vit_model.vision_model", VIT_CONFIG["hidden_size"]
    numbers, places = 3 * VIT_CONFIG["patch_size"] ** 2, 70 * 70
    yield from draw.linear(f"{body}.embeddings.patch_embedding", hidden, numbers).items()
    yield f"{body}.embeddings.position_embedding.weight", draw.normal(places, hidden, scale=0.7)
    yield from draw.norm(f"{body}.post_layernorm", hidden, bias=True).items()
    for layer in range(VIT_CONFIG["num_hidden_layers"] - 1):
        at, inner = f"{body}.encoder.layers.{layer}", VIT_CONFIG["intermediate_size"]
        for name in ("layer_norm1", "layer_norm2"):
            yield from draw.norm(f"{at}.{name}", hidden, bias=True).items()
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from draw.linear(f"{at}.self_attn.{name}", hidden, hidden).items()
        yield from draw.linear(f"{at}.mlp.fc1", inner, hidden).items()
        yield from draw.linear(f"{at}.mlp.fc2", hidden, inner).items()
    yield from draw.linear("connector.fc1", HIDDEN, hidden).items()
    yield from draw.linear("connector.fc2", HIDDEN, HIDDEN).items()
    yield "vit_pos_embed.pos_embed", draw.normal(places, HIDDEN, scale=0.7)


def _coder(draw: _Draw, half: str) -> Iterator[tuple[str, Array]]:
    """One half of the autoencoder, under the names of FLUX."""
    width, is_encoder = VAE_WIDTH, half == "encoder"
    into, out = (3, 2 * VAE_CHANNELS) if is_encoder else (VAE_CHANNELS, 3)
    yield from draw.convolution(f"{half}.conv_in", width, into).items()
    for level in range(VAE_LEVELS):
        at = f"{half}.{'down' if is_encoder else 'up'}.{level}"
        for block in range(VAE_BLOCKS if is_encoder else VAE_BLOCKS + 1):
            yield from _residual(draw, f"{at}.block.{block}")
        if is_encoder and level < VAE_LEVELS - 1:
            yield from draw.convolution(f"{at}.downsample.conv", width, width).items()
        if not is_encoder and level > 0:
            yield from draw.convolution(f"{at}.upsample.conv", width, width).items()
    for block in (1, 2):
        yield from _residual(draw, f"{half}.mid.block_{block}")
    yield from draw.norm(f"{half}.mid.attn_1.norm", width, bias=True).items()
    for name in ("q", "k", "v", "proj_out"):
        yield from draw.convolution(f"{half}.mid.attn_1.{name}", width, width, size=1).items()
    yield from draw.norm(f"{half}.norm_out", width, bias=True).items()
    yield from draw.convolution(f"{half}.conv_out", out, width).items()


def _residual(draw: _Draw, name: str) -> Iterator[tuple[str, Array]]:
    for number in (1, 2):
        yield from draw.norm(f"{name}.norm{number}", VAE_WIDTH, bias=True).items()
        yield from draw.convolution(f"{name}.conv{number}", VAE_WIDTH, VAE_WIDTH).items()
