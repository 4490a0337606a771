"""A tiny Qwen3-TTS with preset voices, in the published layout.

Its oracle is a recording of the published code (`tests.models.qwen3_tts.record_published`), which loads it.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors.torch import save_file

from tests.tiny.vocabulary import Vocabulary, write_tokenizer

GROUPS: Final = 4
CODES: Final = 64
UNSAID: Final = 1024
END: Final = CODES + 10
_TEXTS: Final = 520
_TOKENS: Final = Vocabulary(
    specials=["<|im_start|>", "<|im_end|>", "assistant", "user", "\n", "<pad>", "<begin>", "<end>"],
    ends=["<|im_end|>"],
    template="",
)
_SPEAKERS: Final = {"vivian": CODES + 20, "ryan": CODES + 21, "eric": CODES + 22}
_LANGUAGES: Final = {"english": CODES + 30, "chinese": CODES + 31, "sichuan_dialect": CODES + 32}
_LAYERS: Final = {
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_code_groups": GROUPS,
    "rms_norm_eps": 1e-6,
}
_TALKER: Final[dict[str, Any]] = {
    **_LAYERS,
    "vocab_size": CODES + UNSAID,
    "hidden_size": 32,
    "max_position_embeddings": 512,
    "rope_theta": 10_000,
    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "interleaved": True},
    "text_hidden_size": 48,
    "text_vocab_size": _TEXTS,
    "code_predictor_config": {**_LAYERS, "vocab_size": CODES, "hidden_size": 24, "rope_theta": 10_000},
    "codec_eos_token_id": END,
    "codec_think_id": CODES + 11,
    "codec_nothink_id": CODES + 12,
    "codec_think_bos_id": CODES + 13,
    "codec_think_eos_id": CODES + 14,
    "codec_pad_id": CODES + 15,
    "codec_bos_id": CODES + 16,
    "spk_id": _SPEAKERS,
    "spk_is_dialect": {"vivian": False, "ryan": False, "eric": "sichuan_dialect"},
    "codec_language_id": _LANGUAGES,
}
_DECODER: Final[dict[str, Any]] = {
    "codebook_size": CODES,
    "hidden_size": 24,
    "latent_dim": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_quantizers": GROUPS,
    "codebook_dim": 16,
    "decoder_dim": 64,
    "sliding_window": 6,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
}
_CODEC: Final[dict[str, Any]] = {
    "architectures": ["Qwen3TTSTokenizerV2Model"],
    "model_type": "qwen3_tts_tokenizer_12hz",
    "decoder_config": _DECODER,
    "decode_upsample_rate": 1920,
}
_folders: Final[list[TemporaryDirectory[str]]] = []


@cache
def tiny_qwen3_tts() -> Path:
    """The folder of the checkpoint, written once per process, never to be written to."""
    _folders.append(TemporaryDirectory(prefix="tiny-qwen3-tts-"))
    folder = Path(_folders[-1].name)
    write_qwen3_tts(folder)
    return folder


def write_qwen3_tts(
    folder: Path,
    *,
    talker: Mapping[str, Any] = MappingProxyType({}),
    decoder: Mapping[str, Any] = MappingProxyType({}),
    dtype: torch.dtype = torch.float32,
    **changed: Any,
) -> None:
    """Write a checkpoint, with these keys of `config.json`, its talker and its codec's decoder changed."""
    from models.qwen3_tts import nodes  # noqa: PLC0415 - takes a second

    ids = write_tokenizer(folder, _TOKENS)
    config = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "1b7",
        "tts_model_type": "custom_voice",
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "tts_pad_token_id": ids["<pad>"],
        "tts_bos_token_id": ids["<begin>"],
        "tts_eos_token_id": ids["<end>"],
        "talker_config": {**_TALKER, **talker},
    }
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    codec = folder / "speech_tokenizer"
    codec.mkdir()
    (codec / "config.json").write_text(json.dumps({**_CODEC, "decoder_config": {**_DECODER, **decoder}}))
    for read in (nodes.talker_of(folder), nodes.codec_of(folder)):
        with torch.random.fork_rng(), torch.device("meta"):
            shapes = {name: one.shape for name, one in read.model_class(read.config).state_dict().items()}
        made = torch.Generator().manual_seed(0)
        weights = {
            f"{read.prefix}{name}": _weight(name, shapes[name], made).to(dtype) for name in sorted(shapes)
        }
        save_file(weights, read.folder / "model.safetensors", metadata={"format": "pt"})


def _weight(name: str, shape: torch.Size, made: torch.Generator) -> torch.Tensor:
    """A random tensor, so large that what is said varies, and the sound is loud and seldom too loud."""
    drawn = torch.randn(shape, generator=made)
    if name.endswith("cluster_usage"):
        return 1 + drawn.abs()
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.3 * drawn
    if name.endswith(("alpha", "beta", "bias")):
        return 0.1 * drawn
    if name.endswith(("gamma", "scale")):
        return 0.5 * drawn
    if "embed" in name or len(shape) < 2:
        return drawn
    found: torch.Tensor = drawn * ((0.5 if len(shape) > 2 else 1.5) / shape[1:].numel() ** 0.5)
    if name == "codec_head.weight":
        found[END] *= 0.885  # speech ends late
    return found
