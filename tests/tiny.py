"""Tiny checkpoints in the layout the hub has: what tests serve in the place of an 8B model.

Random weights, large enough that greedy output varies; a byte-level tokenizer with a chat template
beside them. Written by hand, key by key as published checkpoints have them (`rope_theta`,
`torch_dtype`, `weight_map`), not by the library that will read them; neither torch nor transformers is
imported here.
"""

import json
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

Family = Literal["llama", "llama3_rope", "qwen3"]
FAMILIES: Final[tuple[Family, ...]] = ("llama", "llama3_rope", "qwen3")

VOCAB_SIZE: Final = 512
MAX_POSITIONS: Final = 512

_HIDDEN: Final = 64
_INTERMEDIATE: Final = 128
_LAYERS: Final = 2
_HEADS: Final = 4
_KV_HEADS: Final = 2
_HEAD_DIM: Final = 16
_SCALE: Final = 0.2
"""The weights' standard deviation. The usual 0.02 collapses to one token, whatever the prompt."""

_CORPUS: Final = """
the quick brown fox jumps over the lazy dog while seven wizards quietly mix bright purple liquids.
what does len do? return the number of items in a container. sorted returns a new list in ascending order.
hello there, how are you today? please explain the difference between a tuple and a dictionary, briefly.
Fünf größere Übungen; naïve café; once upon a time a small machine learned to speak about strings.
example: print every third element, skip zero, convert unicode, join pieces.
"""

_CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA3: Final = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>"
    "\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

_folders: Final[list[TemporaryDirectory[str]]] = []  # they live as long as the session


@cache
def tiny_checkpoint(
    family: Family = "qwen3", *, seed: int = 0, dtype: Literal["F32", "BF16"] = "F32", shards: int = 1
) -> Path:
    """A checkpoint folder; built once per session, never to be written to."""
    folder = TemporaryDirectory(prefix=f"dalsegno-{family}-")
    _folders.append(folder)
    return write_checkpoint(Path(folder.name), family, seed=seed, dtype=dtype, shards=shards)


def write_checkpoint(
    folder: Path,
    family: Family = "qwen3",
    *,
    seed: int = 0,
    dtype: Literal["F32", "BF16"] = "F32",
    shards: int = 1,
) -> Path:
    """Write a checkpoint into an empty folder of the caller's own."""
    eos = _write_tokenizer(folder, family)
    _write_json(folder / "config.json", config(family, eos))
    _write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": [eos]})
    _write_weights(folder, weights(family, seed), dtype, shards)
    return folder


def config(family: Family, eos_id: int) -> dict[str, Any]:
    """The family's `config.json`, as published checkpoints write it."""
    common: dict[str, Any] = {
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": _INTERMEDIATE,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }
    if family == "qwen3":
        own = {"max_window_layers": _LAYERS, "sliding_window": None, "use_sliding_window": False}
        return common | own | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    llama = common | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
    if family == "llama":
        return llama
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    }
    return llama | {"rope_scaling": scaling, "rope_theta": 500000.0, "tie_word_embeddings": True}


def weights(family: Family, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights under the published names."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return (random.standard_normal((rows, columns)) * _SCALE).astype(np.float32)

    def norm(size: int) -> npt.NDArray[np.float32]:
        return (1 + random.standard_normal(size) * _SCALE).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, _HIDDEN), "model.norm.weight": norm(_HIDDEN)}
    if family != "llama3_rope":  # that one ties its head to its embeddings
        tensors["lm_head.weight"] = matrix(VOCAB_SIZE, _HIDDEN)
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": norm(_HIDDEN),
            f"{at}.post_attention_layernorm.weight": norm(_HIDDEN),
            f"{at}.self_attn.q_proj.weight": matrix(_HEADS * _HEAD_DIM, _HIDDEN),
            f"{at}.self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{at}.self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{at}.self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD_DIM),
            f"{at}.mlp.gate_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            f"{at}.mlp.up_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            f"{at}.mlp.down_proj.weight": matrix(_HIDDEN, _INTERMEDIATE),
        }
        if family == "qwen3":
            tensors |= {f"{at}.self_attn.{name}_norm.weight": norm(_HEAD_DIM) for name in ("q", "k")}
    return tensors


def _write_weights(
    folder: Path, tensors: Mapping[str, npt.NDArray[np.float32]], dtype: str, shards: int
) -> None:
    def stored(name: str) -> bytes:
        array = tensors[name]
        # bfloat16 is the upper half of a float32.
        return (
            (array.view(np.uint32) >> 16).astype(np.uint16).tobytes() if dtype == "BF16" else array.tobytes()
        )

    def write(path: Path, names: list[str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        data = b""
        for name in names:
            start, data = len(data), data + stored(name)
            shape = list(tensors[name].shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, len(data)]}
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        path.write_bytes(struct.pack("<Q", len(head)) + head + data)

    names = sorted(tensors)
    if shards == 1:
        write(folder / "model.safetensors", names)
        return
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[index::shards]
        write(folder / file, mine)
        weight_map |= dict.fromkeys(mine, file)
    size = sum(len(stored(name)) for name in names)
    index_file = folder / "model.safetensors.index.json"
    _write_json(index_file, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _write_tokenizer(folder: Path, family: Family) -> int:
    """Train a byte-level BPE and write it; the id of the token that ends a turn."""
    if family == "qwen3":
        specials, template = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], _CHATML
        bos, eos = None, "<|im_end|>"
    else:
        specials = [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ]
        template, bos, eos = _LLAMA3, "<|begin_of_text|>", "<|eot_id|>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    if bos is not None:  # Llama's tokenizer puts it in front of every text
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    eos_id = tokenizer.token_to_id(eos)
    assert eos_id is not None
    settings = {
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(text)): {"content": text, "special": True, "normalized": False}
            for text in specials
        },
        "bos_token": bos,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "model_max_length": MAX_POSITIONS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(folder / "tokenizer_config.json", settings)
    return eos_id


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
