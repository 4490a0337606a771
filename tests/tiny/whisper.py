"""A tiny Whisper in the published layout: windows of 2 s, six languages, times of 0.02 s.

Random weights, scaled so that the text depends on what is heard.
"""

import atexit
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tests.tiny.vocabulary import VOCAB_SIZE, Vocabulary, write_tokenizer

WINDOW_S: Final = 2
FRAMES: Final = WINDOW_S * 50
POSITIONS: Final = 64
LANGUAGES: Final = ("en", "de", "fr", "zh", "ja", "es")
RATE: Final = 16_000
_TASKS: Final = ("translate", "transcribe")
_LATER: Final = ("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
_TIMES: Final = tuple(f"<|{number * 0.02:.2f}|>" for number in range(FRAMES + 1))
_SPECIALS: Final = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    *(f"<|{task}|>" for task in _TASKS),
    *_LATER,
    *_TIMES,
)
_ATTENTION_SCALE: Final = 6.0
"""Of queries and keys: the attention of random weights is almost even otherwise, and hears nothing."""
_EMBEDDING_SCALE: Final = 0.05
_LOGIT_SCALE: Final = 20.0
"""Embeddings are also the head: large ones repeat the token before, and small ones need a scale behind."""


def sound(seconds: float, seed: int = 0) -> npt.NDArray[np.float32]:
    """Sound that differs in each part of it, (N,) float32 at 16 kHz."""
    random = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    tones = random.uniform(150, 3500, int(seconds * 8) + 1)[(time * 8).astype(int)]
    loud = random.uniform(0.05, 0.9, int(seconds * 8) + 1)[(time * 8).astype(int)]
    noise = 0.02 * random.standard_normal(len(time))
    return np.asarray(loud * np.sin(2 * np.pi * tones * time) + noise, np.float32)


@cache
def tiny_whisper() -> Path:
    """The folder of the checkpoint; it lives as long as the session."""
    kept = TemporaryDirectory(prefix="whisper-")
    atexit.register(kept.cleanup)
    folder = Path(kept.name)
    write(folder)
    return folder


def write(folder: Path, *, seed: int = 0, is_multilingual: bool = True) -> None:
    """Write a checkpoint."""
    ids = write_tokenizer(
        folder, Vocabulary(specials=_SPECIALS, ends=["<|endoftext|>"], bos=None, template="")
    )
    _write(folder / "config.json", _config(ids))
    _write(folder / "generation_config.json", _generation(ids, is_multilingual=is_multilingual))
    _write(
        folder / "preprocessor_config.json",
        {
            "chunk_length": WINDOW_S,
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 80,
            "hop_length": 160,
            "n_fft": 400,
            "n_samples": WINDOW_S * RATE,
            "nb_max_frames": WINDOW_S * 100,
            "padding_side": "right",
            "padding_value": 0.0,
            "processor_class": "WhisperProcessor",
            "return_attention_mask": False,
            "sampling_rate": RATE,
        },
    )
    _write_weights(folder, seed)


def _config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "activation_function": "gelu",
        "bos_token_id": ids["<|endoftext|>"],
        "d_model": 32,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "decoder_layers": 2,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "encoder_layers": 2,
        "eos_token_id": ids["<|endoftext|>"],
        "is_encoder_decoder": True,
        "max_source_positions": FRAMES,
        "max_target_positions": POSITIONS,
        "median_filter_width": 7,
        "num_mel_bins": 80,
        "pad_token_id": ids["<|endoftext|>"],
        "scale_embedding": False,
        "torch_dtype": "float32",
        "vocab_size": VOCAB_SIZE,
    }


def _generation(ids: dict[str, int], *, is_multilingual: bool) -> dict[str, Any]:
    return {
        "alignment_heads": [[0, 1], [1, 0], [1, 3]],
        "begin_suppress_tokens": [32, ids["<|endoftext|>"]],
        "bos_token_id": ids["<|endoftext|>"],
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "is_multilingual": is_multilingual,
        "lang_to_id": {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES},
        "max_initial_timestamp_index": 20,
        "max_length": POSITIONS,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "return_timestamps": False,
        "suppress_tokens": [
            3,
            7,
            ids["<|startoftranscript|>"],
            *(ids[f"<|{code}|>"] for code in LANGUAGES),
            *(ids[f"<|{task}|>"] for task in _TASKS),
            *(ids[name] for name in _LATER[:3]),
        ],
        "task_to_id": {task: ids[f"<|{task}|>"] for task in _TASKS},
    }


def _write_weights(folder: Path, seed: int) -> None:
    import torch  # noqa: PLC0415 - heavy
    from safetensors.torch import save_file  # noqa: PLC0415 - heavy
    from transformers import WhisperConfig, WhisperForConditionalGeneration  # noqa: PLC0415 - heavy

    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(WhisperConfig.from_pretrained(str(folder)))
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "proj_out.weight"}
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in state.items():
        if "layer_norm" in name or name == "model.encoder.embed_positions.weight":
            is_last = name == "model.decoder.layer_norm.weight"
            tensors[name] = tensor.clone() * (_LOGIT_SCALE if is_last else 1.0)
            continue
        fan = tensor[0].numel() if tensor.dim() > 1 else 1
        scale = _ATTENTION_SCALE**0.5 if ".q_proj." in name or ".k_proj." in name else 1.0
        scale = 0.1 if tensor.dim() == 1 else scale / fan**0.5
        if "embed_tokens" in name:
            scale = _EMBEDDING_SCALE
        tensors[name] = torch.randn(tensor.shape, generator=random) * scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
