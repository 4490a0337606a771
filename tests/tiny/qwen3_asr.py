"""A tiny Qwen3-ASR in the published layout. Random weights: text depends on sound, language and prompt."""

import atexit
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.tiny.vocabulary import Vocabulary, write_tokenizer

_SPECIALS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
)
MARK: Final = "<asr_text>"
TEMPLATE: Final = (
    "{%- set ns = namespace(system='') -%}"
    "{%- for message in messages if message.role == 'system' -%}"
    "{%- for part in message.content if part.type == 'text' -%}"
    "{%- set ns.system = ns.system + part.text -%}"
    "{%- endfor -%}{%- endfor -%}"
    "{{- '<|im_start|>system\n' + ns.system + '<|im_end|>\n' -}}"
    "{%- for message in messages if message.role != 'system' -%}"
    "{{- '<|im_start|>' + message.role + '\n' -}}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'audio' -%}{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}"
    "{%- else -%}{{- part.text -}}{%- endif -%}"
    "{%- endfor -%}{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
_ATTENTION_SCALE: Final = 6.0


@cache
def tiny_qwen3_asr() -> Path:
    """The folder of the checkpoint; it lives as long as the session."""
    import torch  # noqa: PLC0415 - heavy
    from safetensors.torch import save_file  # noqa: PLC0415 - heavy
    from tokenizers import AddedToken, Tokenizer  # noqa: PLC0415 - heavy
    from transformers import (  # noqa: PLC0415 - heavy
        Qwen3ASRConfig,
        Qwen3ASRFeatureExtractor,
        Qwen3ASRForConditionalGeneration,
    )

    kept = TemporaryDirectory(prefix="qwen3-asr-")
    atexit.register(kept.cleanup)
    folder = Path(kept.name)
    ids = write_tokenizer(
        folder,
        Vocabulary(specials=_SPECIALS, ends=["<|endoftext|>", "<|im_end|>"], template=TEMPLATE),
    )
    # As published: the mark of the text is a token that decoding keeps.
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(MARK, special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["pad_token"] = "<|endoftext|>"
    settings["extra_special_tokens"] = {
        "audio_token": "<|audio_pad|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    ends = [ids["<|endoftext|>"], ids["<|im_end|>"]]
    config = Qwen3ASRConfig(
        audio_config={
            "num_mel_bins": 128,
            "encoder_layers": 2,
            "d_model": 32,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "output_dim": 32,
            "downsample_hidden_size": 16,
            "n_window_infer": 200,
        },
        text_config={
            "model_type": "qwen3",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
        audio_token_id=ids["<|audio_pad|>"],
        timestamp_token_id=ends[0],
        pad_token_id=ends[0],
        eos_token_id=ends,
        tie_word_embeddings=False,
    )
    content = config.to_dict() | {"architectures": ["Qwen3ASRForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(content, indent=2, default=str) + "\n")
    generation = {"eos_token_id": ends, "pad_token_id": ends[0]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    Qwen3ASRFeatureExtractor().save_pretrained(folder)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = Qwen3ASRForConditionalGeneration(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = _ATTENTION_SCALE**0.5 if ".q_proj." in name or ".k_proj." in name else 1.0
                parameter.copy_(torch.randn_like(parameter) * scale / parameter[0].numel() ** 0.5)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, folder / "model.safetensors")
    return folder
