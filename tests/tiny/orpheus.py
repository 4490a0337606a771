"""Orpheus in the layout the hub has: a Llama with the published special tokens, and SNAC beside it.

Ids are the published ones, so the vocabulary has its published 156,940 rows, of 16 numbers each. Only audio
tokens have long ones, and the one that ends a speech now and then. SNAC keeps its rates, strides and
codebooks, so that a frame is 2048 samples; it is saved as published, a pickle of tensors.
"""

import json
import shutil
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from tests.tiny.files import write_json, write_weights
from tests.tiny.model import Array, Draw
from tests.tiny.vocabulary import Vocabulary, write_tokenizer

VOCAB_SIZE: Final = 156_940
FIRST_AUDIO: Final = 128_266
END_AUDIO: Final = FIRST_AUDIO + 7 * 4096
END_OF_SPEECH: Final = 128_258

_HIDDEN: Final = 16
_HEADS: Final = 2
_KV_HEADS: Final = 1
_HEAD_DIM: Final = 8
_INTERMEDIATE: Final = 32
_LAYERS: Final = 2
_SILENT: Final = 0.05
"""How long the rows of tokens are that are never said, to 1 of audio tokens."""
_ENDING: Final = 8.0
"""How long the row of the end of speech is: so that it comes after some seconds, and not always."""

_SPECIALS: Final = {
    "<|begin_of_text|>": 128_000,
    "<|end_of_text|>": 128_001,
    "<|start_header_id|>": 128_006,
    "<|end_header_id|>": 128_007,
    "<|eot_id|>": 128_009,
    "<|audio|>": 156_939,
} | {f"<custom_token_{number}>": 128_256 + number for number in (*range(16), 28_681)}
"""Of 28,682 custom tokens those that have a meaning of their own, and the first and last audio tokens."""

_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}<|eot_id|>{% endfor %}"
)

_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128_000,
    "eos_token_id": 128_009,
    "head_dim": _HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": _HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": _INTERMEDIATE,
    "max_position_embeddings": 131_072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": _HEADS,
    "num_hidden_layers": _LAYERS,
    "num_key_value_heads": _KV_HEADS,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.49.0",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}

_SNAC: Final[dict[str, Any]] = {
    "sampling_rate": 24_000,
    "encoder_dim": 2,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 16,
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "codebook_size": 4096,
    "codebook_dim": 4,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}

_folders: Final[list[TemporaryDirectory[str]]] = []


@cache
def tiny_orpheus() -> Path:
    """The folder of a tiny Orpheus, made once per process, never to be written to."""
    folder = TemporaryDirectory(prefix="dalsegno-orpheus-")
    _folders.append(folder)
    return write_orpheus(Path(folder.name))


def write_orpheus(folder: Path, *, seed: int = 0) -> Path:
    """Write a checkpoint into an empty folder of the caller's own; SNAC's is `snac` in it."""
    _write_tokenizer(folder)
    write_json(folder / "config.json", _CONFIG)
    # What the base model left there; Orpheus' makers sample otherwise.
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": 128_000, "do_sample": True, "eos_token_id": 128_009, "top_p": 0.9},
    )
    write_weights(folder, _weights(Draw(seed)), "BF16", 2)
    (folder / "snac").mkdir()
    write_snac(folder / "snac", seed=seed)
    return folder


def write_snac(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write SNAC alone, as `hubertsiuzdak/snac_24khz` is; `changes` are to its config."""
    import torch  # noqa: PLC0415 - a pickle of tensors is torch's own format

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from snac import SNAC  # noqa: PLC0415 - as above: its parameters' names are the format

    config = _SNAC | changes
    write_json(folder / "config.json", config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.save(SNAC(**config).state_dict(), folder / "pytorch_model.bin")
    return folder


def copied(folder: Path) -> Path:
    """A tiny Orpheus of the caller's own, in an empty folder: to be damaged."""
    shutil.copytree(tiny_orpheus(), folder, dirs_exist_ok=True)
    return folder


def _weights(draw: Draw) -> dict[str, Array]:
    lengths = np.full((VOCAB_SIZE, 1), _SILENT, np.float32)
    lengths[FIRST_AUDIO:END_AUDIO] = 1
    embeddings = draw.matrix(VOCAB_SIZE, _HIDDEN, 1.0) * lengths
    ending = draw.matrix(1, _HIDDEN, 1.0)[0]
    embeddings[END_OF_SPEECH] = ending * np.float32(_ENDING / np.linalg.norm(ending))
    tensors = {
        "model.embed_tokens.weight": embeddings,
        # Of both signs: else a tied head would say the last token for ever.
        "model.norm.weight": draw.matrix(1, _HIDDEN, 1.0)[0],
    }
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": draw.norm(_HIDDEN),
            f"{at}.post_attention_layernorm.weight": draw.norm(_HIDDEN),
            f"{at}.self_attn.q_proj.weight": draw.matrix(_HEADS * _HEAD_DIM, _HIDDEN, 0.5),
            f"{at}.self_attn.k_proj.weight": draw.matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN, 0.5),
            f"{at}.self_attn.v_proj.weight": draw.matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN, 0.5),
            f"{at}.self_attn.o_proj.weight": draw.matrix(_HIDDEN, _HEADS * _HEAD_DIM, 0.5),
            f"{at}.mlp.gate_proj.weight": draw.matrix(_INTERMEDIATE, _HIDDEN, 0.5),
            f"{at}.mlp.up_proj.weight": draw.matrix(_INTERMEDIATE, _HIDDEN, 0.5),
            f"{at}.mlp.down_proj.weight": draw.matrix(_HIDDEN, _INTERMEDIATE, 0.5),
        }
    return tensors


def _write_tokenizer(folder: Path) -> None:
    """A trained byte-level one whose special tokens are moved to the ids they have in the published one."""
    names = list(_SPECIALS)
    write_tokenizer(
        folder,
        Vocabulary(
            specials=names,
            bos="<|begin_of_text|>",
            ends=["<|end_of_text|>", "<|eot_id|>"],
            template=_TEMPLATE,
        ),
    )
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for token in tokenizer["added_tokens"]:
        token["id"] = _SPECIALS[token["content"]]
    tokenizer["model"]["vocab"] |= _SPECIALS
    tokenizer["post_processor"]["special_tokens"]["<|begin_of_text|>"]["ids"] = [128_000]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {
        str(id): {"content": text, "special": True, "normalized": False} for text, id in _SPECIALS.items()
    }
    settings["model_max_length"] = 131_072
    write_json(folder / "tokenizer_config.json", settings)
