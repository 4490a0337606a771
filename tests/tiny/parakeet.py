"""A tiny Parakeet with a CTC head in the published layout. Random weights: most frames say a token."""

import atexit
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.tiny.vocabulary import VOCAB_SIZE, Vocabulary, write_tokenizer


@cache
def tiny_parakeet() -> Path:
    """The folder of the checkpoint; it lives as long as the session."""
    import torch  # noqa: PLC0415 - heavy
    from safetensors.torch import save_file  # noqa: PLC0415 - heavy
    from transformers import (  # noqa: PLC0415 - heavy
        ParakeetCTCConfig,
        ParakeetFeatureExtractor,
        ParakeetForCTC,
    )

    kept = TemporaryDirectory(prefix="parakeet-")
    atexit.register(kept.cleanup)
    folder = Path(kept.name)
    ids = write_tokenizer(
        folder,
        Vocabulary(specials=["<unk>", "<pad>"], ends=["<pad>"], bos=None, template="", pieces=True),
    )
    config = ParakeetCTCConfig(
        vocab_size=VOCAB_SIZE,
        pad_token_id=ids["<pad>"],
        encoder_config={
            "model_type": "parakeet_encoder",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "subsampling_conv_channels": 8,
            "num_mel_bins": 80,
            "max_position_embeddings": 5000,
        },
    )
    content = config.to_dict() | {"architectures": ["ParakeetForCTC"]}
    (folder / "config.json").write_text(json.dumps(content, indent=2, default=str) + "\n")
    ParakeetFeatureExtractor(feature_size=80).save_pretrained(folder)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = ParakeetForCTC(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) / parameter[0].numel() ** 0.5)
            elif name == "ctc_head.bias":
                parameter[ids["<pad>"]] = 9.0
        model.ctc_head.weight.mul_(4.0)
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, folder / "model.safetensors")
    return folder
