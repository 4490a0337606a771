"""A tiny Dia with its DAC in the published layout, and its oracle: transformers' own `generate`."""

import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

DELAYS: Final = (0, 2, 3, 5)
CHANNELS: Final = len(DELAYS)
EOS: Final = 64
PAD: Final = 65
BOS: Final = 66
HOP: Final = 64
"""The samples of a frame."""
GENERATION: Final = {"do_sample": True, "guidance_scale": 3.0, "temperature": 1.8, "top_k": 45, "top_p": 0.95}
_SCALE: Final = 12.0
_folders: Final[list[TemporaryDirectory[str]]] = []


@cache
def tiny_dia() -> Path:
    """The folder of the checkpoint, with DAC in `dac`, written once per process, never to be written to."""
    from transformers import DiaConfig, DiaForConditionalGeneration  # noqa: PLC0415 - takes a second

    _folders.append(TemporaryDirectory(prefix="tiny-dia-"))
    folder = Path(_folders[-1].name)
    sizes = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    special = {"eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": BOS}
    config = DiaConfig(
        encoder_config={
            "hidden_size": 24,
            "num_key_value_heads": 4,
            "max_position_embeddings": 96,
            **sizes,
        },
        decoder_config={
            "vocab_size": 68,
            "hidden_size": 32,
            "num_key_value_heads": 2,
            "cross_num_attention_heads": 4,
            "cross_num_key_value_heads": 4,
            "cross_head_dim": 8,
            "cross_hidden_size": 24,
            "num_channels": CHANNELS,
            "max_position_embeddings": 512,
            **sizes,
            **special,
        },
        delay_pattern=[*DELAYS],
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = DiaForConditionalGeneration(config)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn_like(weight))
            elif "embed" in name or "logits" in name:
                weight.normal_()
            else:
                weight.mul_(_SCALE)
        # Sound goes on for a while: the end is seldom the likeliest code.
        model.logits_dense.weight[EOS].mul_(0.05)
    model.generation_config.update(**GENERATION, max_length=512)
    model.save_pretrained(folder)
    _write_dac(folder / "dac")
    return folder


def _write_dac(folder: Path) -> None:
    from transformers import DacConfig, DacModel  # noqa: PLC0415 - takes a second

    config = DacConfig(
        encoder_hidden_size=4,
        downsampling_ratios=[2, 2, 4, 4],
        decoder_hidden_size=64,
        upsampling_ratios=[4, 4, 2, 2],
        n_codebooks=CHANNELS,
        codebook_size=64,
        codebook_dim=8,
        sampling_rate=44_100,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = DacModel(config)
        for name, weight in model.named_parameters():
            if name.startswith("decoder") and weight.ndim > 1:
                weight.normal_(std=0.6 / weight[0].numel() ** 0.5)
    model.save_pretrained(folder)


@cache
def oracle() -> Any:
    """Transformers' own model."""
    from transformers import DiaForConditionalGeneration  # noqa: PLC0415 - takes a second

    return DiaForConditionalGeneration.from_pretrained(tiny_dia(), dtype=torch.float32).eval()


@cache
def codec() -> Any:
    """Transformers' own codec."""
    from transformers import DacModel  # noqa: PLC0415 - takes a second

    return DacModel.from_pretrained(tiny_dia() / "dac", dtype=torch.float32).eval()


@cache
def processor() -> Any:
    """Transformers' own processor: tokens, delays, and sound of delayed codes."""
    from transformers import DacFeatureExtractor, DiaProcessor, DiaTokenizer  # noqa: PLC0415 - as above

    return DiaProcessor(DacFeatureExtractor(sampling_rate=44_100, hop_length=HOP), DiaTokenizer(), codec())


_AUDIO: Final = {
    "delay_pattern": [*DELAYS],
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


def spoken(text: str, *, steps: int, seed: int = 0, **how: Any) -> torch.Tensor:
    """The delayed codes of the oracle, (1, steps, channels), greedily unless `do_sample` is set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the processor's own `max_length`
        given = processor()(text=[text], **_AUDIO)
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        found: torch.Tensor = oracle().generate(
            **given, max_new_tokens=steps, **{"do_sample": False, "temperature": 1.0, **how}
        )
    return found


def frames(delayed: torch.Tensor) -> torch.Tensor:
    """The codes without delays and marks, (frames, channels)."""
    end = delayed[0, :, 0].tolist().index(EOS)
    return torch.stack(
        [delayed[0, 1 + delay : end + delay, number] for number, delay in enumerate(DELAYS)], dim=1
    )


def sound(delayed: torch.Tensor) -> torch.Tensor:
    """The samples by transformers' processor, (n,) float32."""
    found: torch.Tensor = processor().decode(delayed, **_AUDIO)
    return found
