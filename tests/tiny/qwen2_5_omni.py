"""A tiny Qwen2.5-Omni in the published layout, and its oracle: transformers' own `generate`, greedily.

`generate` draws the noise of the flow from torch's generator; the oracle takes it from the test.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest import mock

import torch

from tests.tiny.vocabulary import VOCAB_SIZE, Vocabulary, write_tokenizer

VOICES: Final = ("Chelsie", "Ethan")
CODE_END: Final = 204
CODE_PAD: Final = 202
_UNSOUNDED: Final = [201, 205, 206, 207]
MELS: Final = 20
STEPS: Final = 4
SAMPLES: Final = 240 * 2
"""Of a frame."""
_SEED: Final = 3
_DEVIATIONS: Final = {"thinker": 0.36, "talker": 0.3}
"""Of the weights: so large that the text depends on what was asked, and speech on the text."""
_TURNS: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_bos|><|VIDEO|><|vision_eos|>' }}"
    "{% elif part['type'] == 'audio' %}{{ '<|audio_bos|><|AUDIO|><|audio_eos|>' }}"
    "{% else %}{{ '<|vision_bos|><|IMAGE|><|vision_eos|>' }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TOKENS: Final = Vocabulary(
    specials=[
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *("<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>"),
        *("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"),
        *("<|tts_pad|>", "<|tts_bos|>", "<|tts_eos|>", "<|tts_chelsie|>", "<|tts_ethan|>"),
        *("system", "user", "assistant"),
    ],
    ends=["<|endoftext|>", "<|im_end|>"],
    template=_TURNS,
)
_HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES: Final = {"hidden_size": 32, "intermediate_size": 64}
_TEXT: Final[dict[str, Any]] = {
    **_HEADS,
    **_SIZES,
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
    "max_position_embeddings": 4096,
}
_AUDIO: Final = {
    "num_mel_bins": 128,
    "encoder_layers": 2,
    "d_model": 32,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "output_dim": 32,
    "n_window": 20,
}
_VISION: Final = {
    **_SIZES,
    "depth": 2,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}
_CODES: Final = {
    **_HEADS,
    **_SIZES,
    "hidden_size": 48,
    "vocab_size": 208,
    "embedding_size": 32,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]},
    "max_position_embeddings": 4096,
    "tts_codec_pad_token_id": CODE_PAD,
    "tts_codec_start_token_id": 203,
    "tts_codec_end_token_id": CODE_END,
    "tts_codec_mask_token_id": 206,
}
_FLOW: Final = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 16,
    "emb_dim": 16,
    "num_embeds": 200,
    "mel_dim": MELS,
    "enc_emb_dim": 24,
    "enc_dim": 16,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_attention_channels": 8,
    "block_size": 24,
    "look_ahead_layers": [1],
    "look_backward_layers": [0, 2],
}
_VOCODER: Final = {
    "mel_dim": MELS,
    "upsample_initial_channel": 128,
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": [[1, 3, 5]],
}
_PREPROCESSOR: Final = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 4 * 28**2, "longest_edge": 12 * 28**2},
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "hop_length": 160,
    "n_fft": 400,
    "sampling_rate": 16000,
    "chunk_length": 30,
    "n_samples": 480000,
    "nb_max_frames": 3000,
    "return_attention_mask": True,
    "padding_value": 0.0,
    "dither": 0.0,
}

_folders: Final[list[TemporaryDirectory[str]]] = []


@cache
def tiny_qwen2_5_omni() -> Path:
    """The folder of the checkpoint, written once per process, never to be written to."""
    folder = TemporaryDirectory(prefix="tiny-omni25-")
    _folders.append(folder)
    return _write(Path(folder.name))


def _write(folder: Path) -> Path:
    from transformers import Qwen2_5OmniConfig  # noqa: PLC0415 - takes a second
    from transformers import Qwen2_5OmniForConditionalGeneration as Model  # noqa: PLC0415

    ids = write_tokenizer(folder, _TOKENS)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(_SEED)
        model = Model(Qwen2_5OmniConfig(**_config(ids)))
        for name, weight in model.named_parameters():
            _vary(name, weight)
        model.talker.codec_head.weight[_UNSOUNDED] = 0  # never the likeliest code
        voices = {
            name: {
                "bos_token": ids[f"<|tts_{name.lower()}|>"],
                "cond": torch.randn(1, 24),
                "ref_mel": torch.randn(1, 30, MELS),
            }
            for name in VOICES
        }
    model.generation_config.eos_token_id = [ids[text] for text in _TOKENS.ends]
    model.save_pretrained(folder)
    torch.save(voices, folder / "spk_dict.pt")
    (folder / "chat_template.jinja").write_text(_TURNS)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR, indent=2))
    return folder


def _vary(name: str, weight: torch.Tensor) -> None:
    """Scale random weights so that every input matters, output varies, and sound is heard."""
    part = name.split(".", 1)[0]
    if part == "token2wav":
        _make_loud(name, weight)
    elif "embed_tokens" in name:
        weight.normal_()
    elif weight.ndim == 2:
        weight.normal_(0, _DEVIATIONS[part])
    elif weight.ndim < 2 and "norm" in name and name.endswith("weight"):
        weight.add_(0.3 * torch.randn_like(weight))


def _make_loud(name: str, weight: torch.Tensor) -> None:
    """Scale the weights of the codec, so that its sound is loud, and depends on each code."""
    if "codec_embed" in name:
        weight.normal_(0, 6)
    elif weight.ndim > 1:
        gain = 0.75 if "bigvgan" in name else 1.6
        weight.normal_(0, gain / weight[0].numel() ** 0.5)


def _config(ids: Mapping[str, int]) -> dict[str, Any]:
    media = {
        "audio_token_index": ids["<|AUDIO|>"],
        "image_token_index": ids["<|IMAGE|>"],
        "video_token_index": ids["<|VIDEO|>"],
        "vision_start_token_id": ids["<|vision_bos|>"],
        "vision_end_token_id": ids["<|vision_eos|>"],
        "audio_start_token_id": ids["<|audio_bos|>"],
        "audio_end_token_id": ids["<|audio_eos|>"],
    }
    return {
        "thinker_config": {
            **media,
            "text_config": _TEXT,
            "audio_config": _AUDIO,
            "vision_config": _VISION,
            "user_token_id": ids["user"],
        },
        "talker_config": {
            **_CODES,
            **media,
            "tts_text_start_token_id": ids["<|tts_bos|>"],
            "tts_text_end_token_id": ids["<|tts_eos|>"],
            "tts_text_pad_token_id": ids["<|tts_pad|>"],
        },
        "token2wav_config": {"dit_config": _FLOW, "bigvgan_config": _VOCODER},
        "enable_audio_output": True,
    }


@dataclass(frozen=True, slots=True)
class Spoken:
    """The text and the speech of the oracle.

    Attributes:
        codes: without the one that ended speech.
        sound: (samples,) float32, of all codes at once.
    """

    token_ids: list[int]
    codes: list[int]
    sound: torch.Tensor


@cache
def oracle() -> Any:
    """Transformers' own model."""
    from transformers import Qwen2_5OmniForConditionalGeneration  # noqa: PLC0415 - takes a second

    found = Qwen2_5OmniForConditionalGeneration.from_pretrained(tiny_qwen2_5_omni(), dtype=torch.float32)
    found.talker.register_forward_pre_hook(_with_mask, with_kwargs=True)
    return found.eval()


def _with_mask(_talker: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of the talker's forward, with a mask of ones.

    The talker computes positions, and adds the codes of its prompt, only if it gets a mask. `generate` of
    transformers 5.23 drops a mask of ones, which it did not when the model was published.
    """
    tokens = given["inputs_embeds"] if given.get("inputs_embeds") is not None else given["input_ids"]
    length = given["past_key_values"].get_seq_length() + tokens.shape[1]
    return args, {**given, "attention_mask": torch.ones(1, length, dtype=torch.int64)}


def spoken(
    prompt: Sequence[int],
    *,
    tokens: int,
    frames: int,
    noise: Callable[[int], torch.Tensor],
    speaker: str = "Chelsie",
    penalty: float = 1.0,
    **media: Any,
) -> Spoken:
    """Generate with transformers, greedily, for the ids of a thinker's prompt and its media.

    `noise` makes the noise of so many rows of a spectrogram, (rows, MELS).
    """
    model, ids = oracle(), torch.tensor([list(prompt)])
    found: list[torch.Tensor] = []
    # `generate` gives the pixels to all parts, and the talker's own `generate` refuses them.
    talk, sound = model.talker.generate, model.token2wav.forward

    def talk_without_pixels(**given: Any) -> Any:
        return talk(**{name: one for name, one in given.items() if not name.startswith("pixel_values")})

    def note(code: torch.Tensor, **given: Any) -> torch.Tensor:
        found.append(code[0])
        wave: torch.Tensor = sound(code, **given)
        return wave

    def draw(shape: Sequence[int], **_: Any) -> torch.Tensor:
        return noise(shape[1])[None]

    with (
        warnings.catch_warnings(),
        mock.patch.object(model.talker, "generate", talk_without_pixels),
        mock.patch.object(model.token2wav, "forward", note),
        mock.patch("torch.randn", draw),
    ):
        warnings.simplefilter("ignore")
        sequences, wave = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            speaker=speaker,
            generation_mode="audio",
            thinker_max_new_tokens=tokens,
            thinker_do_sample=False,
            thinker_eos_token_id=model.generation_config.eos_token_id,
            talker_do_sample=False,
            talker_max_new_tokens=frames,
            talker_eos_token_id=[CODE_PAD, CODE_END],
            talker_repetition_penalty=penalty,
            token2wav_num_steps=STEPS,
            **media,
        )
    return Spoken(sequences[0, len(prompt) :].tolist(), found[0].tolist(), wave)
