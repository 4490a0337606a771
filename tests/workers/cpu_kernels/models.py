"""Small decoders with random weights, in the shapes that the kernels treat differently."""

from copy import deepcopy
from typing import Any, Final

import torch
from transformers import (
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from models.base import KVLayout
from models.transformers_lm.longrope import rotary_change_of
from models.transformers_lm.node import DecoderLM

VOCABULARY: Final = 517
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 80,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 32,
}
_TYPES: Final = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: Final[dict[str, tuple[Any, Any]]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_COMMON, tie_word_embeddings=True)),
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            **_COMMON | {"num_attention_heads": 6, "hidden_size": 96, "head_dim": 96}, attention_bias=True
        ),
    ),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **_COMMON | {"num_attention_heads": 14, "hidden_size": 448},
            use_sliding_window=True,
            sliding_window=40,
            max_window_layers=1,
        ),
    ),
    "mistral": (
        MistralForCausalLM,
        MistralConfig(**_COMMON | {"num_key_value_heads": 1, "head_dim": 64}, sliding_window=24),
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **_COMMON, num_experts=11, num_experts_per_tok=3, moe_intermediate_size=48, mlp_only_layers=[1]
        ),
    ),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(
            **_COMMON,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=80,
            shared_expert_intermediate_size=144,
        ),
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**_COMMON, num_local_experts=4, sliding_window=24)),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **_COMMON,
            num_local_experts=6,
            num_experts_per_tok=3,
            attention_bias=True,
            sliding_window=24,
            rope_parameters={
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 150000.0,
                "rope_type": "yarn",
                "truncate": False,
            },
        ),
    ),
    "gemma": (GemmaForCausalLM, GemmaConfig(**_COMMON, tie_word_embeddings=False)),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(
            **_COMMON,
            query_pre_attn_scalar=20,
            sliding_window=24,
            tie_word_embeddings=False,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
        ),
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **_COMMON,
            query_pre_attn_scalar=20,
            sliding_window=24,
            layer_types=_TYPES,
            tie_word_embeddings=False,
        ),
    ),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig(
            **_COMMON,
            embedding_multiplier=12.0,
            attention_multiplier=0.1,
            residual_multiplier=0.3,
            logits_scaling=8.0,
        ),
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**_COMMON | {"hidden_size": 128}, pad_token_id=0)),
    "olmo3": (
        Olmo3ForCausalLM,
        Olmo3Config(**_COMMON | {"hidden_size": 128}, sliding_window=24, layer_types=_TYPES, pad_token_id=0),
    ),
    "phi3": (
        Phi3ForCausalLM,
        Phi3Config(
            **_COMMON | {"hidden_size": 320, "head_dim": 80}, partial_rotary_factor=0.5, pad_token_id=0
        ),
    ),
    "glm": (
        GlmForCausalLM,
        GlmConfig(**_COMMON, attention_bias=True, partial_rotary_factor=0.5, pad_token_id=0),
    ),
    "glm4": (
        Glm4ForCausalLM,
        Glm4Config(**_COMMON | {"head_dim": 48}, partial_rotary_factor=0.5, pad_token_id=0),
    ),
    "ernie4_5": (Ernie4_5ForCausalLM, Ernie4_5Config(**_COMMON, tie_word_embeddings=False)),
    "helium": (HeliumForCausalLM, HeliumConfig(**_COMMON | {"hidden_size": 128}, pad_token_id=0)),
    "seed_oss": (
        SeedOssForCausalLM,
        SeedOssConfig(**_COMMON, attention_bias=True, attention_out_bias=True, pad_token_id=0),
    ),
    "exaone4": (
        Exaone4ForCausalLM,
        Exaone4Config(**_COMMON, sliding_window=24, layer_types=_TYPES, pad_token_id=0),
    ),
    "olmoe": (
        OlmoeForCausalLM,
        OlmoeConfig(**_COMMON | {"hidden_size": 128}, num_experts=6, num_experts_per_tok=2, pad_token_id=0),
    ),
    "glm4_moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(
            **_COMMON,
            n_routed_experts=12,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=48,
            first_k_dense_replace=1,
            routed_scaling_factor=1.7,
            use_qk_norm=True,
            partial_rotary_factor=0.5,
            pad_token_id=0,
        ),
    ),
    "dots1": (
        Dots1ForCausalLM,
        Dots1Config(
            **_COMMON,
            n_routed_experts=7,
            num_experts_per_tok=3,
            n_shared_experts=2,
            moe_intermediate_size=48,
            first_k_dense_replace=1,
            norm_topk_prob=False,
            routed_scaling_factor=2.5,
            sliding_window=24,
            layer_types=_TYPES,
            pad_token_id=0,
        ),
    ),
    "ernie4_5_moe": (
        Ernie4_5_MoeForCausalLM,
        Ernie4_5_MoeConfig(
            **_COMMON,
            moe_num_experts=6,
            moe_k=3,
            moe_intermediate_size=48,
            moe_layer_start_index=1,
            moe_num_shared_experts=1,
            pad_token_id=0,
        ),
    ),
    "smollm3": (
        SmolLM3ForCausalLM,
        SmolLM3Config(**_COMMON, no_rope_layers=[1, 0, 1], pad_token_id=0),
    ),
}
"""Two, three, seven and four sharers of a head of keys; norms of queries, biases, windows, sinks; odd depths.

Of those with experts, one has a layer without, one an MLP for all tokens beside them, one whole layers, one
biases and another activation; three choose experts by biased probabilities, one of them from groups. The last
ones have what `workers.kv_engine.kernel_models.Kind` lists.
"""


def node(name: str = "qwen3", *, dtype: torch.dtype = torch.float32, **changes: Any) -> DecoderLM:
    """Return a node whose greedy answers vary, with the same weights at each call."""
    kind, config = MODELS[name]
    config = deepcopy(config)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = kind(config).eval().to(dtype).requires_grad_(requires_grad=False)
    for name_of, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.15)
        elif name_of.endswith("bias"):
            parameter.normal_(std=0.3)
        elif name_of.endswith("sinks"):
            parameter.normal_(std=2.0)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    for name_of, buffer in model.named_buffers():
        if name_of.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    attention = model.model.layers[0].self_attn
    return DecoderLM(
        model,
        name="llm",
        layout=KVLayout(
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            needs=frozenset({"sinks"} if hasattr(attention, "sinks") else ()),
        ),
        max_positions=config.max_position_embeddings,
        weights_digest="",
        rotary_change=rotary_change_of(kind.__name__, config),
    )
