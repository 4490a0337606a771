"""A tiny CSM in the published layout, and its oracle: transformers' own `generate`, greedily."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from tests.tiny.vocabulary import Vocabulary, write_tokenizer

GROUPS: Final = 4
CODES: Final = 67
END: Final = 5
"""The code of the end: one of the codes that have a sound, as in the published checkpoint."""
_SCALE: Final = 6.0
_LOUDNESS: Final = 0.75
"""Scales the weights of the codec, so that its sound is loud, and seldom too loud."""
_TOKENS: Final = Vocabulary(
    specials=["<|begin_of_text|>", "<|end_of_text|>", "<|AUDIO|>", "<|audio_eos|>"],
    ends=["<|end_of_text|>"],
    template="",
    bos="<|begin_of_text|>",
)
_TABLES: Final = ("embed_tokens", "lm_head", "codebook", "embed_text", "embed_audio")
_CODEC: Final = {
    "model_type": "mimi",
    "sampling_rate": 24000,
    "hidden_size": 16,
    "num_filters": 4,
    "upsampling_ratios": [8, 6, 5, 4],
    "codebook_size": 128,
    "codebook_dim": 16,
    "num_quantizers": GROUPS,
    "vector_quantization_hidden_dimension": 16,
    "upsample_groups": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "frame_rate": 12.5,
}
_DEPTH: Final = {
    "num_codebooks": GROUPS,
    "backbone_hidden_size": 32,
    "vocab_size": CODES,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": GROUPS + 1,
}
_folders: Final[list[TemporaryDirectory[str]]] = []


@cache
def tiny_csm() -> Path:
    """The folder of the checkpoint, written once per process, never to be written to."""
    from transformers import CsmConfig, CsmForConditionalGeneration  # noqa: PLC0415 - takes a second

    _folders.append(TemporaryDirectory(prefix="tiny-csm-"))
    folder = Path(_folders[-1].name)
    ids = write_tokenizer(folder, _TOKENS)
    config = CsmConfig(
        num_codebooks=GROUPS,
        vocab_size=CODES,
        text_vocab_size=520,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=ids["<|AUDIO|>"],
        codebook_pad_token_id=CODES - 1,
        codebook_eos_token_id=END,
        bos_token_id=ids["<|begin_of_text|>"],
        audio_token_id=ids["<|AUDIO|>"],
        audio_eos_token_id=ids["<|audio_eos|>"],
        depth_decoder_config=_DEPTH,
        codec_config=_CODEC,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = CsmForConditionalGeneration(config)
        for name, weight in model.named_parameters():
            if name.startswith("codec_model"):
                weight.mul_(_LOUDNESS if weight.ndim > 1 else 1)
            elif weight.ndim > 1 and not any(table in name for table in _TABLES):
                weight.mul_(_SCALE)
            elif "norm" in name and name.endswith("weight"):
                weight.add_(0.3 * torch.randn_like(weight))
        for name, table in model.codec_model.named_buffers():
            if name.endswith("embed_sum"):  # the tables of codes, which transformers leaves at zero
                table.normal_()
    model.save_pretrained(folder)
    return folder


@cache
def oracle() -> Any:
    """Transformers' own model."""
    from transformers import CsmForConditionalGeneration  # noqa: PLC0415 - takes a second

    return CsmForConditionalGeneration.from_pretrained(tiny_csm(), dtype=torch.float32).eval()


@torch.inference_mode()
def spoken(prompt: Sequence[int], *, frames: int) -> torch.Tensor:
    """The codes of the oracle, (frames, groups)."""
    found: torch.Tensor = oracle().generate(
        input_ids=torch.tensor([prompt]),
        max_new_tokens=frames,
        do_sample=False,
        depth_decoder_do_sample=False,
        depth_decoder_min_new_tokens=GROUPS - 1,
        depth_decoder_max_new_tokens=GROUPS - 1,
        eos_token_id=None,
    )
    return found[0]
