"""A checkpoint in the shape of Qwen3-TTS 1.7B with random weights, for machines without the real one.

The tokenizer and the table of texts are those of the tiny checkpoint. Its output is noise; its cost is that
of the real model.
"""

from pathlib import Path
from typing import Any, Final

import torch

from tests.tiny.qwen3_tts import write_qwen3_tts

_GROUPS: Final = 16
_LAYERS: Final[dict[str, Any]] = {
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_code_groups": _GROUPS,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
}
_TALKER: Final[dict[str, Any]] = {
    **_LAYERS,
    "code_predictor_config": {
        **_LAYERS,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 5,
        "rope_theta": 1_000_000,
        "vocab_size": 64,  # the tokens of the tiny talker's codes
    },
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 32_768,
    "num_hidden_layers": 28,
    "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "interleaved": True},
    "rope_theta": 1_000_000,
    "text_hidden_size": 2048,
}
_DECODER: Final[dict[str, Any]] = {
    "codebook_dim": 512,
    "decoder_dim": 1536,
    "head_dim": 64,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "latent_dim": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "num_key_value_heads": 16,
    "num_quantizers": _GROUPS,
    "sliding_window": 72,
}


def write_qwen3_tts_1b7(folder: Path) -> Path:
    """Write the checkpoint into an empty folder: 3.4 GB in bfloat16."""
    write_qwen3_tts(folder, talker=_TALKER, decoder=_DECODER, dtype=torch.bfloat16)
    return folder
