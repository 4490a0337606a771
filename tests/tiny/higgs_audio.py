"""A tiny Higgs Audio v2 with its codec in the published layout, and its oracle: transformers' `generate`."""

import sys
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Final
from unittest.mock import patch

import torch

from tests.tiny.vocabulary import Vocabulary, write_tokenizer

CODEBOOKS: Final = 4
CODES: Final = 66
BOS: Final = 64
EOS: Final = 65
RATIOS: Final = [4, 5, 2, 3]
HOP: Final = 120
"""The samples of a frame."""
_SCALE: Final = 5.0
_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'scene' %}<|scene_desc_start|>{{ message.content }}<|scene_desc_end|>"
    "{% else %}<|start_header_id|>{{ message.role }}<|end_header_id|>{{ message.content | trim }}{% endif %}"
    "{% if message.role == 'user' %}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|><|audio_out_bos|>{% endif %}"
)
_TOKENS: Final = Vocabulary(
    specials=[
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|scene_desc_start|>",
        "<|scene_desc_end|>",
        "<|audio_out_bos|>",
        "<|audio_eos|>",
        "<|reserved_special_token_6|>",
        "<|AUDIO_OUT|>",
    ],
    ends=["<|end_of_text|>"],
    template=_TEMPLATE,
    bos="<|begin_of_text|>",
)
_folders: Final[list[TemporaryDirectory[str]]] = []


@cache
def tiny_higgs_audio() -> Path:
    """The folder, with the codec in `audio_tokenizer`, written once per process, never to be written to."""
    from transformers import (  # noqa: PLC0415 - takes a second
        HiggsAudioV2Config,
        HiggsAudioV2ForConditionalGeneration,
    )

    _folders.append(TemporaryDirectory(prefix="tiny-higgs-audio-"))
    folder = Path(_folders[-1].name)
    ids = write_tokenizer(folder, _TOKENS)
    config = HiggsAudioV2Config(
        vocab_size=520,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        num_codebooks=CODEBOOKS,
        codebook_size=CODES,
        audio_token_id=ids["<|AUDIO_OUT|>"],
        audio_bos_token_id=ids["<|audio_out_bos|>"],
        audio_delay_token_id=ids["<|reserved_special_token_6|>"],
        audio_stream_bos_id=BOS,
        audio_stream_eos_id=EOS,
        pad_token_id=ids["<|end_of_text|>"],
        bos_token_id=ids["<|begin_of_text|>"],
        eos_token_id=ids["<|eot_id|>"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = HiggsAudioV2ForConditionalGeneration(config, use_text_head=True)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn_like(weight))
            elif "embed" in name or "head" in name:
                weight.normal_()
            else:
                weight.mul_(_SCALE)
        # Sound goes on for a while: the end is seldom the likeliest code.
        for book in range(CODEBOOKS):
            model.audio_lm_head.weight[book * CODES + EOS].mul_(0.05)
    published = {"_from_model_config": False, "ras_win_len": 7, "ras_win_max_num_repeat": 2}
    for name, value in published.items():
        setattr(model.generation_config, name, value)  # `update` does not know these
    model.save_pretrained(folder)
    _write_codec(folder / "audio_tokenizer")
    return folder


def _write_codec(folder: Path) -> None:
    from transformers import HiggsAudioV2TokenizerConfig  # noqa: PLC0415 - takes a second

    acoustic = {
        "model_type": "dac",
        "encoder_hidden_size": 4,
        "downsampling_ratios": RATIOS,
        "decoder_hidden_size": 64,
        "upsampling_ratios": RATIOS,
        "hidden_size": 64,
        "codebook_dim": 16,
        "n_codebooks": CODEBOOKS,
        "codebook_size": 64,
        "sampling_rate": 24_000,
    }
    semantic = {
        "model_type": "hubert",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "conv_dim": [16] * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
    }
    frames = 24_000 / HOP
    config = HiggsAudioV2TokenizerConfig(
        acoustic_model_config=acoustic,
        semantic_model_config=semantic,
        codebook_size=64,
        codebook_dim=16,
        target_bandwidths=[CODEBOOKS * 6 * frames / 1000],
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = _codec_class()(config)
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("codebook.embed"):
                weight.normal_()
            elif name.startswith(("acoustic_decoder", "fc2")) and weight.ndim > 1:
                weight.normal_(std=0.75 / weight[0].numel() ** 0.5)
    model.save_pretrained(folder)


def _codec_class() -> Any:
    """Transformers' class. Its module imports torchaudio, which only encoding needs: a name is enough."""
    package = "transformers.models.higgs_audio_v2_tokenizer"
    stand_in = ModuleType("torchaudio")
    stand_in.__spec__ = ModuleSpec("torchaudio", None)
    with patch.dict(sys.modules, torchaudio=stand_in):
        return import_module(f"{package}.modeling_higgs_audio_v2_tokenizer").HiggsAudioV2TokenizerModel


@cache
def oracle() -> Any:
    """Transformers' own model."""
    from transformers import HiggsAudioV2ForConditionalGeneration  # noqa: PLC0415 - takes a second

    found = HiggsAudioV2ForConditionalGeneration.from_pretrained(tiny_higgs_audio(), dtype=torch.float32)
    return found.eval()


@cache
def codec() -> Any:
    """Transformers' own codec."""
    return _codec_class().from_pretrained(tiny_higgs_audio() / "audio_tokenizer", dtype=torch.float32).eval()


def spoken(token_ids: list[int], *, steps: int, seed: int = 0, **how: Any) -> torch.Tensor:
    """The delayed codes of the oracle, (1, steps, codebooks), greedily unless `do_sample` is set."""
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        found: torch.Tensor = oracle().generate(
            input_ids=torch.tensor([token_ids]), max_new_tokens=steps, **{"do_sample": False, **how}
        )
    return found


def frames(delayed: torch.Tensor) -> torch.Tensor:
    """The codes that have sound, (frames, codebooks), by transformers' processor."""
    from transformers import HiggsAudioV2Processor  # noqa: PLC0415 - as above

    ends = (delayed[0] == EOS).all(-1).nonzero()
    rows = delayed[0, 1 : int(ends[0]) if len(ends) else None]
    found: torch.Tensor = HiggsAudioV2Processor.revert_delay_pattern(None, rows)
    return found


def sound(delayed: torch.Tensor) -> torch.Tensor:
    """The samples, (n,) float32, by transformers' codec, of codes as its processor clips them."""
    with torch.inference_mode():
        found: torch.Tensor = codec().decode(frames(delayed).clip(0, BOS - 1).T[None]).audio_values.flatten()
    return found
