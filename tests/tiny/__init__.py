"""Tiny checkpoints in the layout the hub has: what tests serve in the place of an 8B model.

Random weights, large enough that greedy output varies; a tokenizer of the family's kind with a chat
template beside them. Written by hand, key by key as published checkpoints have them (`rope_theta`,
`torch_dtype`, `weight_map`, one matrix per expert), not by the library that will read them; neither
torch nor transformers is imported here.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from tests.tiny import (
    cohere,
    gemma,
    gemma_nano,
    gpt2,
    granite,
    hybrid,
    indexed,
    latent,
    llama,
    llama4,
    minimax,
    mistral,
    olmo,
    phi,
    plain,
    qwen,
    sinks,
    smollm,
)
from tests.tiny.files import write_json, write_weights
from tests.tiny.model import MAX_POSITIONS, WINDOW, Draw, Model
from tests.tiny.vocabulary import VOCAB_SIZE, write_tokenizer

__all__ = [
    "FAMILIES",
    "MAX_POSITIONS",
    "MODELS",
    "VOCAB_SIZE",
    "WINDOW",
    "Family",
    "tiny_checkpoint",
    "write_checkpoint",
]

Family = Literal[
    "arcee",
    "bamba",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "falcon_h1",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "glm4",
    "glm4_lite",
    "glm4_moe",
    "glm_dsa",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granite4",
    "granite4_hybrid",
    "granite_swa",
    "jamba",
    "kimi_linear",
    "lfm2",
    "ling_hybrid",
    "llama",
    "llama3_rope",
    "llama4",
    "llama_dynamic",
    "mamba2",
    "mimo",
    "minicpm3",
    "minimax_m2",
    "mistral",
    "mixtral",
    "nemotron_h",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "phi3_longrope",
    "qwen2",
    "qwen2_moe",
    "qwen2_window",
    "qwen2_yarn",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
]

MODELS: Final[Mapping[Family, Model]] = {
    "arcee": plain.ARCEE,
    "bamba": hybrid.BAMBA,
    "cohere": cohere.COHERE,
    "cohere2": cohere.COHERE2,
    "deepseek_v2": latent.DEEPSEEK_V2,
    "deepseek_v3": latent.DEEPSEEK_V3,
    "deepseek_v32": indexed.DEEPSEEK_V32,
    "ernie4_5": plain.ERNIE4_5,
    "ernie4_5_moe": plain.ERNIE4_5_MOE,
    "exaone4": plain.EXAONE4,
    "falcon_h1": hybrid.FALCON_H1,
    "gemma": gemma.GEMMA,
    "gemma2": gemma.GEMMA2,
    "gemma3": gemma.GEMMA3,
    "gemma3n": gemma_nano.GEMMA3N,
    "gemma4": gemma_nano.GEMMA4,
    "glm4": plain.GLM4,
    "glm4_lite": latent.GLM4_LITE,
    "glm4_moe": plain.GLM4_MOE,
    "glm_dsa": indexed.GLM_DSA,
    "gpt2": gpt2.GPT2,
    "gpt_neox": plain.GPT_NEOX,
    "gpt_oss": sinks.GPT_OSS,
    "granite": granite.GRANITE,
    "granite4": granite.GRANITE4,
    "granite4_hybrid": hybrid.GRANITE4_HYBRID,
    "granite_swa": sinks.GRANITE_SWA,
    "jamba": hybrid.JAMBA,
    "kimi_linear": hybrid.KIMI_LINEAR,
    "lfm2": hybrid.LFM2,
    "ling_hybrid": hybrid.LING_HYBRID,
    "llama": llama.LLAMA,
    "llama3_rope": llama.LLAMA3_ROPE,
    "llama4": llama4.LLAMA4,
    "llama_dynamic": llama.LLAMA_DYNAMIC,
    "mamba2": hybrid.MAMBA2,
    "mimo": sinks.MIMO,
    "minicpm3": latent.MINICPM3,
    "minimax_m2": minimax.MINIMAX_M2,
    "mistral": mistral.MISTRAL,
    "mixtral": mistral.MIXTRAL,
    "nemotron_h": hybrid.NEMOTRON_H,
    "olmo": plain.OLMO,
    "olmo2": olmo.OLMO2,
    "olmo3": olmo.OLMO3,
    "olmoe": plain.OLMOE,
    "phi": plain.PHI,
    "phi3": phi.PHI3,
    "phi3_longrope": phi.PHI3_LONGROPE,
    "qwen2": qwen.QWEN2,
    "qwen2_moe": plain.QWEN2_MOE,
    "qwen2_window": qwen.QWEN2_WINDOW,
    "qwen2_yarn": qwen.QWEN2_YARN,
    "qwen3": qwen.QWEN3,
    "qwen3_5": hybrid.QWEN3_5,
    "qwen3_5_moe": hybrid.QWEN3_5_MOE,
    "qwen3_moe": qwen.QWEN3_MOE,
    "qwen3_next": hybrid.QWEN3_NEXT,
    "seed_oss": plain.SEED_OSS,
    "smollm3": smollm.SMOLLM3,
    "stablelm": plain.STABLELM,
    "starcoder2": plain.STARCODER2,
}
FAMILIES: Final[tuple[Family, ...]] = tuple(MODELS)

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
    model = MODELS[family]
    ids = write_tokenizer(folder, model.vocabulary)
    ends = [ids[text] for text in model.vocabulary.ends]
    bos = model.vocabulary.bos
    said: dict[str, Any] = {
        "architectures": [model.architecture],
        "bos_token_id": None if bos is None else ids[bos],
        "eos_token_id": ends[-1],
        "torch_dtype": "float32",
        "transformers_version": "4.51.0",
        "vocab_size": VOCAB_SIZE,
    }
    write_json(folder / "config.json", dict(model.config) | said)
    write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": ends})
    write_weights(folder, model.weights(Draw(seed)), dtype, shards)
    return folder
