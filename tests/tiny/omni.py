"""A tiny Qwen3-Omni in the published layout, and its oracle: transformers' own `generate`, greedily.

`generate` thinks the whole text before it talks, one request at a time. The oracle returns the codes too, so
that tests choose the chunks in which they are decoded.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from tests.tiny.vocabulary import Vocabulary, write_tokenizer

GROUPS: Final = 4
_SEED: Final = 4
"""The answers to all requests of the tests differ with it, and have several distinct tokens."""
SPEAKERS: Final = {"chelsie": 296, "ethan": 298, "aiden": 299}
_DEVIATION: Final = 0.06
"""Of the weights: so large that what is said changes with what was said."""
_THINKER_DEVIATION: Final = 0.36
"""Of the thinker's: so large that the text depends on what was asked, and on media."""
_TABLES: Final = ("embed_tokens", "lm_head", "codebook")
_TURNS: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'audio' %}{{ '<|audio_start|><|audio_pad|><|audio_end|>' }}"
    "{% else %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_UNUSED: Final = 900
"""Special tokens without a use: with them, the others are beyond the talker's vocabulary, as published."""
_TOKENS: Final = Vocabulary(
    specials=[
        *(f"<|unused_{number}|>" for number in range(_UNUSED)),
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        *("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
        *("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
        *("system", "user", "assistant"),
    ],
    ends=["<|endoftext|>", "<|im_end|>"],
    template=_TURNS,
)
_HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_SIZES: Final = {"hidden_size": 32, "intermediate_size": 64}
_ROPE: Final = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
_TEXT: Final[dict[str, Any]] = {
    **_HEADS,
    **_SIZES,
    "vocab_size": 300 + len(_TOKENS.specials),
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "rope_parameters": _ROPE,
    "max_position_embeddings": 4096,
}
_AUDIO: Final = {
    "num_mel_bins": 128,
    "encoder_layers": 2,
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
    "depth": 3,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 64,
}
_CODES: Final = {
    "text_config": {**_TEXT, "vocab_size": 1088, "shared_expert_intermediate_size": 32},
    "thinker_hidden_size": 32,
    "num_code_groups": GROUPS,
    "accept_hidden_layer": 2,
    "spatial_merge_size": 2,
    "codec_eos_token_id": 290,
    "codec_nothink_id": 291,
    "codec_think_id": 292,
    "codec_think_bos_id": 293,
    "codec_think_eos_id": 294,
    "codec_pad_id": 295,
    "codec_bos_id": 297,
    "speaker_id": SPEAKERS,
    "code_predictor_config": {
        **_HEADS,
        **_SIZES,
        "vocab_size": 64,
        "num_code_groups": GROUPS,
        "num_hidden_layers": 2,
    },
}
_CODEC: Final = {
    **_SIZES,
    "codebook_size": 64,
    "num_quantizers": GROUPS,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "upsample_rates": [4, 3],
    "upsampling_ratios": [2],
    "decoder_dim": 32,
}
_PREPROCESSOR: Final = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 4 * 32**2, "longest_edge": 12 * 32**2},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "hop_length": 160,
    "n_fft": 400,
    "sampling_rate": 16000,
    "chunk_length": 30,
    "return_attention_mask": True,
    "padding_value": 0.0,
    "dither": 0.0,
}
_VIDEOS: Final = {"size": {"shortest_edge": 2 * 32**2, "longest_edge": 6 * 32**2}, "max_frames": 12}

_folders: Final[list[TemporaryDirectory[str]]] = []


@cache
def tiny_omni() -> Path:
    """The folder of the checkpoint, written once per process, never to be written to."""
    folder = TemporaryDirectory(prefix="tiny-omni-")
    _folders.append(folder)
    return write_omni(Path(folder.name))


def write_omni(folder: Path, **changes: Any) -> Path:
    """Write a checkpoint, whose `config.json` differs in `changes`, into a folder."""
    from transformers import Qwen3OmniMoeConfig  # noqa: PLC0415 - takes a second
    from transformers import Qwen3OmniMoeForConditionalGeneration as Model  # noqa: PLC0415

    ids = write_tokenizer(folder, _TOKENS)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(_SEED)
        model = Model(Qwen3OmniMoeConfig(**{**_config(ids), **changes}))
        for name, weight in model.named_parameters():
            _vary(name, weight)
        first = ids["<|unused_0|>"]
        model.thinker.lm_head.weight[first : first + _UNUSED] = 0  # never the likeliest token
    ends = [ids[text] for text in _TOKENS.ends]
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(_TURNS)
    files = {
        "preprocessor_config.json": _PREPROCESSOR,
        "video_preprocessor_config.json": _PREPROCESSOR | _VIDEOS,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2))
    return folder


def _vary(name: str, weight: torch.Tensor) -> None:
    """Scale random weights so that every input matters, and output varies."""
    if any(table in name for table in _TABLES):
        return
    if name.startswith("code2wav"):
        _make_loud(name, weight)
        return
    if weight.ndim == 2 or "experts" in name:  # transformers leaves those of experts uninitialised
        weight.normal_(0, _THINKER_DEVIATION if name.startswith("thinker") else _DEVIATION)
    elif weight.ndim < 2 and "norm" in name and name.endswith("weight"):
        weight.add_(0.3 * torch.randn_like(weight))


def _make_loud(name: str, weight: torch.Tensor) -> None:
    """Scale the weights of the codec, so that its sound is loud, and depends on each code."""
    if "scale" in name:
        weight.fill_(0.3)
    elif "code_embedding" in name:
        weight.normal_()
    elif weight.ndim > 1:
        weight.mul_(4.0)


def _config(ids: Mapping[str, int]) -> dict[str, Any]:
    media = {
        "audio_token_id": ids["<|audio_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "position_id_per_seconds": 13,
    }
    return {
        "thinker_config": {
            **media,
            "text_config": _TEXT,
            "audio_config": _AUDIO,
            "vision_config": _VISION,
            "vision_end_token_id": ids["<|vision_end|>"],
            "audio_end_token_id": ids["<|audio_end|>"],
            "user_token_id": ids["user"],
        },
        "talker_config": {**_CODES, **media},
        "code2wav_config": _CODEC,
        "enable_audio_output": True,
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "user_token_id": ids["user"],
        "assistant_token_id": ids["assistant"],
        "system_token_id": ids["system"],
    }


@dataclass(frozen=True, slots=True)
class Spoken:
    """The text and the speech of the oracle.

    Attributes:
        codes: (frames, groups).
    """

    token_ids: list[int]
    codes: torch.Tensor


@cache
def oracle() -> Any:
    """Transformers' own model."""
    from transformers import Qwen3OmniMoeForConditionalGeneration  # noqa: PLC0415 - takes a second

    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tiny_omni(), dtype=torch.float32).eval()
    model.talker.config.audio_config = model.thinker.config.audio_config  # transformers 5.23 expects it
    return model


def spoken(
    prompt: Sequence[int],
    *,
    tokens: int,
    frames: int,
    speaker: str = "Ethan",
    penalty: float = 1.0,
    **media: torch.Tensor,
) -> Spoken:
    """Generate with transformers, greedily, for the ids of a thinker's prompt and its media."""
    model = oracle()
    found: list[torch.Tensor] = []

    def note(codes: torch.Tensor, **_: int) -> torch.Tensor:
        found.append(codes)
        return torch.zeros(1, 1, 1)

    model.code2wav.chunked_decode = note
    ids = torch.tensor([list(prompt)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a penalty without a prompt
        sequences, _ = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            speaker=speaker,
            return_audio=True,
            thinker_max_new_tokens=tokens,
            thinker_do_sample=False,
            thinker_eos_token_id=model.generation_config.eos_token_id,
            talker_do_sample=False,
            talker_max_new_tokens=frames + 1,  # transformers drops the last frame
            talker_repetition_penalty=penalty,
            **media,
        )
    return Spoken(sequences[0, len(prompt) :].tolist(), found[0][0].T)
