"""A tiny Voxtral in the published layout, with chunks of 2 s. Random weights: text depends on the sound."""

import atexit
import base64
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

CHUNK_S: Final = 2
CHUNK_ROWS: Final = 25
PLACE: Final = 24
END: Final = 2
_SPECIALS: Final[dict[int, str]] = {
    0: "<unk>",
    1: "<s>",
    2: "</s>",
    3: "[INST]",
    4: "[/INST]",
    11: "<pad>",
    PLACE: "[AUDIO]",
    25: "[BEGIN_AUDIO]",
    34: "[TRANSCRIBE]",
}
"""The published special tokens that matter, by their ids."""
_SPECIAL_COUNT: Final = 40
_PIECES: Final = ("la", "ng", "lang", " the", "en", "de", "er", "in", " s", "ou")
_PATTERN: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
_VOCAB: Final = _SPECIAL_COUNT + 256 + len(_PIECES)
_ATTENTION_SCALE: Final = 16.0


@cache
def tiny_voxtral() -> Path:
    """The folder of the checkpoint; it lives as long as the session."""
    import torch  # noqa: PLC0415 - heavy
    from transformers import (  # noqa: PLC0415 - heavy
        VoxtralConfig,
        VoxtralForConditionalGeneration,
        WhisperFeatureExtractor,
    )

    kept = TemporaryDirectory(prefix="voxtral-")
    atexit.register(kept.cleanup)
    folder = Path(kept.name)
    (folder / "tekken.json").write_text(json.dumps(_tekken()))
    config = VoxtralConfig(
        audio_config={
            "num_mel_bins": 128,
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_source_positions": CHUNK_S * 50,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": _VOCAB,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 2048,
        },
        audio_token_id=PLACE,
    )
    WhisperFeatureExtractor(feature_size=128).save_pretrained(folder)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = VoxtralForConditionalGeneration(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = _ATTENTION_SCALE**0.5 if ".q_proj." in name or ".k_proj." in name else 1.0
                parameter.copy_(torch.randn_like(parameter) * scale / parameter[0].numel() ** 0.5)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    # As transformers writes it: with the names of tensors of the published files.
    model.save_pretrained(folder)
    generation = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 11}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return folder


def _tekken() -> dict[str, object]:
    """Mistral's file of a tokenizer: bytes, a few pieces, and special tokens before them."""
    tokens = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in _PIECES]
    return {
        "config": {
            "pattern": _PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": _VOCAB,
            "default_num_special_tokens": _SPECIAL_COUNT,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": _SPECIALS.get(rank, f"<SPECIAL_{rank}>"), "is_control": True}
            for rank in range(_SPECIAL_COUNT)
        ],
    }
