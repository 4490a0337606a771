"""A tiny Cohere Transcribe in the published layout. Random weights: text depends on sound and language."""

import atexit
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.tiny.vocabulary import Vocabulary, write_tokenizer

POSITIONS: Final = 48
WINDOW_S, SEARCH_S = 4.0, 1.0
"""In place of 35 and 5, for the tests of longer files."""
LANGUAGES: Final = ("en", "de", "ja")
_PROMPT: Final = (
    "\N{LOWER ONE EIGHTH BLOCK}",
    "<|startofcontext|>",
    "<|startoftranscript|>",
    "<|emo:undefined|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    "<|pnc|>",
    "<|nopnc|>",
    "<|noitn|>",
    "<|notimestamp|>",
    "<|nodiarize|>",
)
_ATTENTION_SCALE: Final = 3.0
_LOGIT_SCALE: Final = 3.0


@cache
def tiny_cohere_asr() -> Path:
    """The folder of the checkpoint; it lives as long as the session."""
    import torch  # noqa: PLC0415 - heavy
    from safetensors.torch import save_file  # noqa: PLC0415 - heavy
    from transformers import (  # noqa: PLC0415 - heavy
        CohereAsrConfig,
        CohereAsrFeatureExtractor,
        CohereAsrForConditionalGeneration,
    )

    kept = TemporaryDirectory(prefix="cohere-asr-")
    atexit.register(kept.cleanup)
    folder = Path(kept.name)
    specials = ["<unk>", "<pad>", "<|endoftext|>", *_PROMPT]
    ids = write_tokenizer(
        folder, Vocabulary(specials=specials, ends=["<|endoftext|>"], bos=None, template="", pieces=True)
    )
    tokens = {
        "bos_token_id": ids["<|startoftranscript|>"],
        "decoder_start_token_id": ids[_PROMPT[0]],
        "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<pad>"],
    }
    config = CohereAsrConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        encoder_config={
            "model_type": "parakeet_encoder",
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "subsampling_conv_channels": 8,
            "num_mel_bins": 80,
            "max_position_embeddings": 5000,
            "scale_input": False,
        },
        **tokens,
    )
    content = config.to_dict() | {"architectures": ["CohereAsrForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(content, indent=2, default=str) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")
    CohereAsrFeatureExtractor(
        feature_size=80, max_audio_clip_s=WINDOW_S, overlap_chunk_second=SEARCH_S
    ).save_pretrained(folder)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = CohereAsrForConditionalGeneration(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = _ATTENTION_SCALE**0.5 if ".q_proj." in name or ".k_proj." in name else 1.0
                parameter.copy_(torch.randn_like(parameter) * scale / parameter[0].numel() ** 0.5)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.1)
        model.proj_out.weight.mul_(_LOGIT_SCALE)
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, folder / "model.safetensors")
    return folder
