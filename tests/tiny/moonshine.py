"""A tiny Moonshine in the published layout. Random weights, scaled so that the text depends on the sound."""

import atexit
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.tiny.vocabulary import Vocabulary, write_tokenizer

POSITIONS: Final = 40
"""At 6.5 tokens a second, of windows of 6.1 s."""
_ATTENTION_SCALE: Final = 5.0
"""Of queries and keys: the attention of random weights is almost even otherwise, and hears nothing."""
_EMBEDDING_SCALE: Final = 0.1
_LOGIT_SCALE: Final = 30.0
"""Embeddings are also the head: large ones repeat the token before, and small ones need a scale behind."""
_END_SCALE: Final = 1.7
"""Of the end's embedding, so that some texts end before their limit."""
_STREAMING_END_SCALE: Final = 0.8


STREAMING_FRAMES: Final = 320
"""Of the streaming version: 6.4 s of frames with positions."""


@cache
def tiny_moonshine() -> Path:
    """The folder of the checkpoint; it lives as long as the session."""
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration  # noqa: PLC0415 - heavy

    return _written(
        MoonshineForConditionalGeneration,
        lambda tokens: MoonshineConfig(
            vocab_size=512,
            hidden_size=48,
            intermediate_size=64,
            encoder_num_hidden_layers=2,
            decoder_num_hidden_layers=2,
            encoder_num_attention_heads=4,
            decoder_num_attention_heads=4,
            pad_head_dim_to_multiple_of=8,
            max_position_embeddings=POSITIONS,
            **tokens,
        ),
        end_scale=_END_SCALE,
    )


@cache
def tiny_streaming() -> Path:
    """The folder of a checkpoint of the streaming version; it lives as long as the session."""
    from transformers import (  # noqa: PLC0415 - heavy
        MoonshineStreamingConfig,
        MoonshineStreamingForConditionalGeneration,
    )

    return _written(
        MoonshineStreamingForConditionalGeneration,
        lambda tokens: MoonshineStreamingConfig(
            vocab_size=512,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=STREAMING_FRAMES,
            tie_word_embeddings=True,
            encoder_config={
                "hidden_size": 40,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "sliding_windows": [[16, 4], [16, 0]],
            },
            **tokens,
        ),
        end_scale=_STREAMING_END_SCALE,
    )


def _written(model_class: Any, configured: Callable[[dict[str, int]], Any], *, end_scale: float) -> Path:
    """Write a checkpoint of a class, whose configuration follows from the special tokens."""
    import torch  # noqa: PLC0415 - heavy
    from safetensors.torch import save_file  # noqa: PLC0415 - heavy
    from transformers import Wav2Vec2FeatureExtractor  # noqa: PLC0415 - heavy

    kept = TemporaryDirectory(prefix="moonshine-")
    atexit.register(kept.cleanup)
    folder = Path(kept.name)
    ids = write_tokenizer(
        folder,
        Vocabulary(
            specials=["<unk>", "<s>", "</s>"],
            ends=["</s>"],
            bos=None,
            template="",
            pieces=True,
            leads_with_space=True,
        ),
    )
    tokens = {
        "bos_token_id": ids["<s>"],
        "decoder_start_token_id": ids["<s>"],
        "eos_token_id": ids["</s>"],
        "pad_token_id": ids["</s>"],
    }
    config = configured(tokens)
    content = config.to_dict() | {"architectures": [model_class.__name__]}
    rope = content.pop("rope_parameters")  # the published files have its values one by one
    content |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor")} | {"rope_scaling": None}
    (folder / "config.json").write_text(json.dumps(content, indent=2, default=str) + "\n")
    generation = tokens | {"max_length": POSITIONS}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True).save_pretrained(folder)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = model_class(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = _ATTENTION_SCALE**0.5 if ".q_proj." in name or ".k_proj." in name else 1.0
                scale = _EMBEDDING_SCALE if "embed_tokens" in name else scale
                parameter.copy_(torch.randn_like(parameter) * scale / parameter[0].numel() ** 0.5)
        model.model.decoder.norm.weight.mul_(_LOGIT_SCALE)
        model.model.decoder.embed_tokens.weight[ids["</s>"]] *= end_scale
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "proj_out.weight"}
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder
