"""The demo model that draws, untrained: its tokenizer, and Z-Image's parts in a small size."""

import random
from collections.abc import Mapping
from typing import Any, Final

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from configs.demo_draw.scenes import SIDE, caption, random_scene

SEED: Final = 61
END: Final = "<|endoftext|>"
SPECIAL: Final = (END, "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
PIPELINE: Any = ZImagePipeline
_VAE: Any = AutoencoderKL
_TRANSFORMER: Any = ZImageTransformer2DModel
_SCHEDULER: Any = FlowMatchEulerDiscreteScheduler
"""Their constructors have no types."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the captions. It can encode any UTF-8."""
    chance = random.Random(SEED)
    texts = [caption(random_scene(chance), chance) for _ in range(6000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=END, eos_token=END, chat_template=CHAT_TEMPLATE
    )


def build_pipeline() -> Any:
    """Make the untrained pipeline."""
    return new_pipeline(
        SEED,
        vae={"block_out_channels": [16, 24, 32], "latent_channels": 4},
        text={"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 512},
        transformer={
            "dim": 96,
            "n_layers": 4,
            "n_heads": 4,
            "axes_dims": [8, 8, 8],
            "axes_lens": [1024, SIDE // 8, SIDE // 8],
        },
    )


def new_pipeline(
    seed: int, *, vae: Mapping[str, Any], text: Mapping[str, Any], transformer: Mapping[str, Any]
) -> Any:
    """Make a small Z-Image pipeline with random weights, of which these sizes are given."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    return PIPELINE(
        _SCHEDULER(shift=3.0),
        _new_vae(vae),
        _new_text_encoder(text, len(tokenizer)),
        tokenizer,
        _new_transformer(transformer, vae["latent_channels"], text["hidden_size"]),
    )


def _new_vae(sizes: Mapping[str, Any]) -> Any:
    levels = len(sizes["block_out_channels"])
    return _VAE(
        down_block_types=["DownEncoderBlock2D"] * levels,
        up_block_types=["UpDecoderBlock2D"] * levels,
        layers_per_block=1,
        norm_num_groups=8,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
        scaling_factor=1.0,
        **sizes,
    )


def _new_text_encoder(sizes: Mapping[str, Any], vocabulary: int) -> Qwen3Model:
    return Qwen3Model(
        Qwen3Config(
            vocab_size=vocabulary,
            intermediate_size=2 * sizes["hidden_size"],
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            **sizes,
        )
    )


def _new_transformer(sizes: Mapping[str, Any], latent_channels: int, text_width: int) -> Any:
    return _TRANSFORMER(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=latent_channels,
        n_refiner_layers=1,
        n_kv_heads=sizes["n_heads"],
        qk_norm=True,
        cap_feat_dim=text_width,
        rope_theta=256.0,
        t_scale=1000.0,
        **sizes,
    )
