"""The checkpoint of all peers: the shape of a published model with a smaller vocabulary, random weights.

It has the layout of the Hugging Face hub: `config.json`, bfloat16 in `model.safetensors` (in MXFP4 experts of
gpt-oss), and a byte-level tokenizer. Two properties make tokens countable in any server's output:

- Every token but the 256 bytes and the special ones is a space and letters, so a client can count the tokens
  of a text by its spaces.
- The embeddings of bytes and special tokens are zero. Embeddings are tied to the output, so their logits are
  zero too, and the largest of 31,741 random ones is above zero: no greedy answer ends early or contains a
  part of a character.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice, product
from math import prod
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_BYTES: Final = 256
_SPACE: Final = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # a space in byte-level vocabularies
_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SCALE: Final = 0.02
_BFLOAT16_BYTES: Final = 2
_BLOCKS, _SCALES = "_blocks", "_scales"
"""The ends of the names of experts in MXFP4."""
_EXPONENT: Final = 120
"""Of all scales, with an offset of 127: MXFP4 of random bits has a standard deviation of about 0.02."""
_LETTERS: Final = 4
"""Letters of the longest tokens: 26 + 26^2 + 26^3 + 26^4 words are enough for any vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a Qwen3: those of the published 0.6B except the vocabulary.

    Attributes:
        intermediate: the inner width of an MLP, or of an expert.
        experts: of a layer; 0 is one MLP for all tokens.
        chosen: the experts that see a token.
        norm: the weights of norms; Gemma adds one to them.
    """

    name: str = "qwen3-0.6b"
    hidden: int = 1024
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 3072
    vocabulary: int = 32_000
    positions: int = 4096
    experts: int = 0
    chosen: int = 0
    norm: float = 1.0

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of the tensors in the file."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.input_layernorm.weight", (self.hidden,)
            yield f"{at}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{at}.self_attn.q_proj.weight", (self.heads * self.head_dim, self.hidden)
            yield f"{at}.self_attn.k_proj.weight", (self.kv_heads * self.head_dim, self.hidden)
            yield f"{at}.self_attn.v_proj.weight", (self.kv_heads * self.head_dim, self.hidden)
            yield f"{at}.self_attn.o_proj.weight", (self.hidden, self.heads * self.head_dim)
            yield f"{at}.self_attn.q_norm.weight", (self.head_dim,)
            yield f"{at}.self_attn.k_norm.weight", (self.head_dim,)
            if self.experts:
                yield f"{at}.mlp.gate.weight", (self.experts, self.hidden)
            within = [f"{at}.mlp.experts.{number}" for number in range(self.experts)] or [f"{at}.mlp"]
            for mlp in within:
                yield f"{mlp}.gate_proj.weight", (self.intermediate, self.hidden)
                yield f"{mlp}.up_proj.weight", (self.intermediate, self.hidden)
                yield f"{mlp}.down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)

    @property
    def bytes_per_step(self) -> int:
        """The bytes of weights that a decode step of one sequence reads.

        That is all, because embeddings are the output layer too; of experts, those that see a token.
        """
        unread = 3 * (self.experts - self.chosen) * self.intermediate * self.hidden * self.layers
        return sum(bytes_of(name, sizes) for name, sizes in self.tensors()) - _BFLOAT16_BYTES * unread

    def config(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        kind = "Qwen3Moe" if self.experts else "Qwen3"
        of_experts = {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": self.intermediate,
            "norm_topk_prob": True,
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
        }
        of_qwen = {
            "architectures": [f"{kind}ForCausalLM"],
            "attention_bias": False,
            "max_window_layers": self.layers,
            "model_type": "qwen3_moe" if self.experts else "qwen3",
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "use_sliding_window": False,
        }
        return self._common_config() | of_qwen | (of_experts if self.experts else {})

    def _common_config(self) -> dict[str, Any]:
        return {
            "attention_dropout": 0.0,
            "eos_token_id": self.vocabulary - 1,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": _SCALE,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.positions,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocabulary,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssShape(Shape):
    """The sizes of a gpt-oss, whose experts are stored in MXFP4."""

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of the tensors in the file."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        attended, kept = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (attended, self.hidden),
            "self_attn.k_proj": (kept, self.hidden),
            "self_attn.v_proj": (kept, self.hidden),
            "self_attn.o_proj": (self.hidden, attended),
            "mlp.router": (self.experts, self.hidden),
        }
        merged = {
            "gate_up_proj": (2 * self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"{at}.{norm}.weight", (self.hidden,)
            yield f"{at}.self_attn.sinks", (self.heads,)
            for name, sizes in linears.items():
                yield f"{at}.{name}.weight", sizes
                yield f"{at}.{name}.bias", sizes[:1]
            for name, (outputs, inputs) in merged.items():
                within = f"{at}.mlp.experts.{name}"
                yield f"{within}_blocks", (self.experts, outputs, inputs // 32, 16)
                yield f"{within}_scales", (self.experts, outputs, inputs // 32)
                yield f"{within}_bias", (self.experts, outputs)
        yield "model.norm.weight", (self.hidden,)

    @property
    def bytes_per_step(self) -> int:
        """See `Shape.bytes_per_step`."""
        tensors = list(self.tensors())
        experts = sum(bytes_of(name, sizes) for name, sizes in tensors if ".experts." in name)
        rest = sum(bytes_of(name, sizes) for name, sizes in tensors if ".experts." not in name)
        return rest + experts * self.chosen // self.experts

    def config(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        return self._common_config() | {
            "architectures": ["GptOssForCausalLM"],
            "attention_bias": True,
            "experts_per_token": self.chosen,
            "layer_types": ["sliding_attention", "full_attention"] * (self.layers // 2),
            "model_type": "gpt_oss",
            "num_experts_per_tok": self.chosen,
            "num_local_experts": self.experts,
            "quantization_config": {"quant_method": "mxfp4"},
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Shape(Shape):
    """The sizes of a Gemma 3, which has norms of results, too, and windows in five of six layers."""

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of the tensors in the file."""
        for name, sizes in Shape.tensors(self):
            yield name, sizes
            if name.endswith("post_attention_layernorm.weight"):
                for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                    yield name.replace("post_attention_layernorm", norm), sizes

    def config(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        return self._common_config() | {
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "hidden_activation": "gelu_pytorch_tanh",
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": self.head_dim,
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        }


QWEN3_0_6B: Final = Shape()
QWEN3_30B_A3B: Final = Shape(
    name="qwen3-30b-a3b",
    hidden=2048,
    layers=4,
    heads=32,
    kv_heads=4,
    intermediate=768,
    experts=128,
    chosen=8,
)
"""Layers of the published model, 4 of its 48: 2.6 billion weights, of which a token is multiplied by 0.3."""
GPT_OSS_20B: Final = GptOssShape(
    name="gpt-oss-20b",
    hidden=2880,
    layers=4,
    heads=64,
    kv_heads=8,
    head_dim=64,
    intermediate=2880,
    experts=32,
    chosen=4,
)
"""4 of 24 layers: 3.4 billion weights, of which a token is multiplied by 0.6."""
GEMMA3_1B: Final = Gemma3Shape(
    name="gemma3-1b", hidden=1152, layers=26, heads=4, kv_heads=1, head_dim=256, intermediate=6912, norm=0.0
)
SHAPES: Final = {shape.name: shape for shape in (QWEN3_0_6B, QWEN3_30B_A3B, GPT_OSS_20B, GEMMA3_1B)}


def bytes_of(name: str, sizes: tuple[int, ...]) -> int:
    """Return the size of a tensor in the file."""
    return prod(sizes) * (1 if _is_mxfp4(name) else _BFLOAT16_BYTES)


def _is_mxfp4(name: str) -> bool:
    return name.endswith((_BLOCKS, _SCALES))


def write(folder: Path, shape: Shape) -> Path:
    """Write the checkpoint unless it exists: half a minute and a gigabyte for the smallest shape.

    The write is atomic: to a temporary folder, which is then renamed.
    """
    if (folder / "shape.json").exists() and json.loads((folder / "shape.json").read_text()) == asdict(shape):
        return folder
    draft = folder.with_name(f"{folder.name}.{os.getpid()}")
    draft.mkdir(parents=True)
    _write_weights(draft / "model.safetensors", shape)
    _write_tokenizer(draft, shape)
    _write_json(draft / "config.json", shape.config())
    ends = shape.vocabulary - 1
    _write_json(draft / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends})
    _write_json(draft / "shape.json", asdict(shape))
    if folder.exists():
        shutil.rmtree(folder)
    return draft.rename(folder)


def prompts(shape: Shape, count: int, length: int, *, seed: str) -> list[list[int]]:
    """Make prompts of random ids of text tokens; each seed gives other ones."""
    draw = Random(seed)
    usual = range(_BYTES, shape.vocabulary - len(_SPECIALS))
    return [[draw.choice(usual) for _ in range(length)] for _ in range(count)]


def words(folder: Path) -> list[str]:
    """The text of each token by its id, except the bytes, which no answer contains."""
    written = json.loads((folder / "tokenizer.json").read_text())
    specials = {token["content"]: token["id"] for token in written["added_tokens"]}
    vocabulary = written["model"]["vocab"] | specials
    return [token.replace(_SPACE, " ") for token in sorted(vocabulary, key=vocabulary.__getitem__)]


def _write_weights(path: Path, shape: Shape) -> None:
    """Write one tensor at a time, so that at most one is in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, sizes in shape.tensors():
        start, end = end, end + bytes_of(name, sizes)
        dtype = "U8" if _is_mxfp4(name) else "BF16"
        header[name] = {"dtype": dtype, "shape": list(sizes), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for name, sizes in shape.tensors():
            if name.endswith(_BLOCKS):
                file.write(random.bytes(prod(sizes)))
                continue
            if name.endswith(_SCALES):
                file.write(bytes([_EXPONENT]) * prod(sizes))
                continue
            values = (
                np.full(sizes, shape.norm, np.float32)
                if "norm" in name
                else random.standard_normal(sizes, np.float32) * np.float32(_SCALE)
            )
            if sizes == (shape.vocabulary, shape.hidden):
                values[:_BYTES] = values[-len(_SPECIALS) :] = 0
            file.write(_bfloat16(values))


def _bfloat16(values: NDArray[np.float32]) -> bytes:
    """Truncate each float32 to its upper half."""
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def _write_tokenizer(folder: Path, shape: Shape) -> None:
    """Write an untrained byte-level BPE: a space followed by every word of one letter, two, and so on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (
        "".join(word)
        for letters in range(1, _LETTERS + 1)
        for word in product(ascii_lowercase, repeat=letters)
    )
    merged = [
        (_SPACE + word[:-1], word[-1]) for word in islice(words, shape.vocabulary - _BYTES - len(_SPECIALS))
    ]
    tokens = [*alphabet, *(first + second for first, second in merged)]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merged))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": None,
        "chat_template": _TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": _SPECIALS[-1],
        "model_max_length": shape.positions,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
