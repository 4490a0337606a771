"""The language models inside vision-language classes, small and with random weights, as nodes."""

from typing import Any, Final

import torch
from transformers import (
    Gemma3TextConfig,
    Gemma3TextModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedConfig,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen3VLMoeTextConfig,
    Qwen3VLMoeTextModel,
    Qwen3VLTextConfig,
    Qwen3VLTextModel,
)

from models.base import KVLayout, TokenStep

VOCABULARY: Final = 211
HIDDEN: Final = 96
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
_TEXT_MODELS: Final[dict[str, tuple[Any, PreTrainedConfig, int]]] = {
    "llama": (LlamaModel, LlamaConfig(**_COMMON), 1),
    "gemma3": (
        Gemma3TextModel,
        Gemma3TextConfig(
            **_COMMON,
            head_dim=32,
            query_pre_attn_scalar=20,
            sliding_window=50,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        1,
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLTextModel,
        Qwen2_5_VLTextConfig(
            **_COMMON,
            use_sliding_window=True,
            sliding_window=50,
            max_window_layers=1,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        ),
        3,
    ),
    "qwen3_vl": (
        Qwen3VLTextModel,
        Qwen3VLTextConfig(
            **_COMMON,
            head_dim=32,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]},
        ),
        3,
    ),
    "qwen3_vl_moe": (
        Qwen3VLMoeTextModel,
        Qwen3VLMoeTextConfig(
            **_COMMON,
            head_dim=32,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]},
        ),
        3,
    ),
}
NAMES: Final = tuple(_TEXT_MODELS)


class TextNode:
    """A text model with a head: the members of a node that our kernels read."""

    name, architecture, kernels = "llm", "SomeForConditionalGeneration", "torch"
    vocab_size, max_positions = VOCABULARY, 512
    device, dtype = torch.device("cpu"), torch.float32
    masks: frozenset[str] = frozenset({"causal", "full"})

    def __init__(self, name: str, *, added_layers: int = 0) -> None:
        kind, self.text_config, self.position_axes = _TEXT_MODELS[name]
        torch.manual_seed(0)
        self.text_model = kind._from_config(self.text_config, attn_implementation="eager").eval()
        self.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        for parameter in (*self.text_model.parameters(), *self.lm_head.parameters()):
            parameter.requires_grad_(requires_grad=False)
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
        self.layout = KVLayout(layers=3, kv_heads=1, head_dim=32)
        self.parameters = sum(parameter.numel() for parameter in self.text_model.parameters())
        self.embed_width = HIDDEN * (1 + added_layers)

    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The logits of a text, (T, vocabulary)."""
        self.text_model.set_attn_implementation("eager")
        hidden = self.text_model(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The ids: `forward` embeds them."""
        return token_ids

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        """The states of a step's tokens, (T, hidden)."""
        output = self.text_model(
            input_ids=inputs[None],
            position_ids=step.positions.unsqueeze(-2),
            attention_mask=torch.zeros(1, 1, 1, 1),
            use_cache=False,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """The logits at some tokens."""
        logits: torch.Tensor = self.lm_head(hidden.index_select(0, indices))
        return logits

    def use_attention(self, name: str) -> None:
        """Set the attention function of all layers."""
        self.text_model.set_attn_implementation(name)
