"""A tiny Qwen3-Omni, which thinks and talks, its oracle, and how to serve the family `talking`.

The oracle is transformers' own `generate`: it thinks the whole text before it talks, one request at a time.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import yaml

from tests.tiny.families import installed
from tests.tiny.talking import graph

TEXTS: Final = ("hi", "cats *", "hello world")
TOKENS: Final = 8
FRAMES: Final = 9
"""The frames that tests compare with the oracle, which takes 0.1 s for each."""

_HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_ROPE: Final = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
_SIZES: Final = {"hidden_size": 32, "intermediate_size": 64}
_TEXT: Final[dict[str, Any]] = {
    **_HEADS,
    **_SIZES,
    "vocab_size": 400,
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "rope_parameters": _ROPE,
    "max_position_embeddings": 4096,
}
_MEDIA: Final = {
    "audio_token_id": 311,
    "image_token_id": 312,
    "video_token_id": 313,
    "vision_start_token_id": 314,
    "audio_start_token_id": 316,
    "position_id_per_seconds": 25,
}
_AUDIO: Final = {
    "num_mel_bins": 128,
    "encoder_layers": 1,
    "d_model": 32,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "output_dim": 32,
    "downsample_hidden_size": 16,
    "n_window": 50,
    "n_window_infer": 800,
}
_VISION: Final = {
    **_SIZES,
    "depth": 1,
    "num_heads": 4,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 256,
}
_TALKER: Final = {
    **_MEDIA,
    "text_config": {**_TEXT, "vocab_size": 1088, "shared_expert_intermediate_size": 32},
    "thinker_hidden_size": 32,
    "num_code_groups": 4,
    "accept_hidden_layer": 1,
    "spatial_merge_size": 2,
    "codec_eos_token_id": 290,
    "codec_nothink_id": 291,
    "codec_think_id": 292,
    "codec_think_bos_id": 293,
    "codec_think_eos_id": 294,
    "codec_pad_id": 295,
    "codec_bos_id": 297,
    "speaker_id": {"ethan": 296},
    "code_predictor_config": {
        **_HEADS,
        **_SIZES,
        "vocab_size": 64,
        "num_code_groups": 4,
        "num_hidden_layers": 2,
    },
}
_CODEC: Final = {
    **_SIZES,
    "codebook_size": 64,
    "num_quantizers": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "upsample_rates": [4, 3],
    "upsampling_ratios": [2],
    "decoder_dim": 32,
}
_SPECIAL: Final = {
    "im_start_token_id": 301,
    "im_end_token_id": 302,
    "tts_pad_token_id": 303,
    "tts_bos_token_id": 304,
    "tts_eos_token_id": 305,
    "user_token_id": 307,
    "assistant_token_id": 308,
    "system_token_id": 309,
}
_DEVIATION: Final = 0.06
"""Of the weights: so large that what is said changes with what was said."""
_TABLES: Final = ("embed_tokens", "lm_head", "codebook")

_folders: Final[list[TemporaryDirectory[str]]] = []


@dataclass(frozen=True, slots=True)
class Spoken:
    """The text and the speech of the oracle.

    Attributes:
        codes: (frames, groups).
        sound: (samples,), made in chunks as the family makes it.
    """

    token_ids: list[int]
    codes: torch.Tensor
    sound: torch.Tensor


@cache
def tiny_talker() -> Path:
    """The folder of the checkpoint, made once per process, never to be written to."""
    from transformers import (  # noqa: PLC0415 - takes a second
        Qwen3OmniMoeConfig,
        Qwen3OmniMoeForConditionalGeneration,
    )

    config = Qwen3OmniMoeConfig(
        thinker_config={
            **_MEDIA,
            "text_config": _TEXT,
            "audio_config": _AUDIO,
            "vision_config": _VISION,
            "vision_end_token_id": 315,
            "audio_end_token_id": 317,
            "user_token_id": 307,
        },
        talker_config=_TALKER,
        code2wav_config=_CODEC,
        enable_audio_output=True,
        **_SPECIAL,
    )
    folder = TemporaryDirectory(prefix="dalsegno-talker-")
    _folders.append(folder)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = Qwen3OmniMoeForConditionalGeneration(config)
        for name, weight in model.named_parameters():
            if any(table in name for table in _TABLES):
                continue
            if weight.ndim == 2 or "experts" in name:  # transformers leaves those of experts uninitialised
                weight.normal_(0, _DEVIATION)
            elif weight.ndim < 2 and "norm" in name and name.endswith("weight"):
                weight.add_(0.3 * torch.randn_like(weight))
        model.save_pretrained(folder.name)
    return Path(folder.name)


@cache
def _oracle() -> Any:
    from transformers import Qwen3OmniMoeForConditionalGeneration  # noqa: PLC0415 - takes a second

    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tiny_talker(), dtype=torch.float32).eval()
    model.talker.config.audio_config = model.thinker.config.audio_config  # transformers 5.23 expects it
    return model


@cache
def spoken(prompt: tuple[int, ...], *, tokens: int, frames: int) -> Spoken:
    """Generate with transformers, greedily, for the ids of a thinker's prompt."""
    model = _oracle()
    found: list[torch.Tensor] = []

    def note(codes: torch.Tensor, **_: int) -> torch.Tensor:
        found.append(codes)
        return torch.zeros(1, 1, 1)

    model.code2wav.chunked_decode = note
    ids = torch.tensor([prompt])
    sequences, _ = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        return_audio=True,
        thinker_max_new_tokens=tokens,
        thinker_do_sample=False,
        thinker_eos_token_id=302,
        talker_do_sample=False,
        talker_max_new_tokens=frames + 1,  # transformers drops the last frame
        talker_repetition_penalty=1.0,
    )
    codes = found[0]
    sound = type(model.code2wav).chunked_decode(
        model.code2wav, codes, chunk_size=graph.FRAMES, left_context_size=graph.CONTEXT
    )
    return Spoken(sequences[0, len(prompt) :].tolist(), codes[0].T, sound[0, 0])


def configuration(folder: Path, *, talker_rank: int = 0) -> Path:
    """A configuration to serve, in `folder`: talker and codec on a rank of their own, or on the first."""
    path = folder / f"talking-{talker_rank}.yaml"
    groups = [{"node_names": ["prepare", "thinker"], "ranks": [0]}]
    groups.append({"node_names": ["talker", "codec"], "ranks": [talker_rank]})
    settings = {
        "model": "talking",
        "checkpoint": str(tiny_talker()),
        "max_seq_len": 512,
        "node_groups": groups,
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def environment(folder: Path) -> dict[str, str]:
    """The family as pip would have installed it."""
    return installed("talking", folder)
