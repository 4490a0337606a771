"""A Llama with random weights, large enough that the forward pass dominates, and an engine for it."""

from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.base import KVLayout
from models.transformers_lm.node import DecoderLM
from workers.cpu_kernels.decoder import use_cpu_kernels
from workers.kv_engine.config import KVEngineConfig
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.speculative.proposer import Proposer
from workers.machine.cores import cores
from workers.machine.cpu_threads import kernel_threads

VOCABULARY: Final = 16_000
LAYERS: Final = 8
_KV_HEADS: Final = 4
_HEAD_DIM: Final = 64


def node(
    *,
    layers: int = LAYERS,
    seed: int = 0,
    positions: int = 8192,
    quiet_from: int | None = None,
    served_as: Callable[[DecoderLM], DecoderLM] = lambda stock: stock,
) -> Any:
    """Make a model: 40 million weights with 8 layers. Models of one seed have the same first layers.

    Layers from `quiet_from` on contribute much less than earlier ones, so a model of the first layers alone
    is a good draft model. `served_as` makes another node of transformers' model, such as one with programs.
    """
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=_KV_HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=positions,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)
    if quiet_from is not None:
        for layer in model.model.layers[quiet_from:]:
            layer.self_attn.o_proj.weight *= 0.05
            layer.mlp.down_proj.weight *= 0.05
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    stock = DecoderLM(
        model,
        name="llm",
        layout=KVLayout(layers=layers, kv_heads=_KV_HEADS, head_dim=_HEAD_DIM),
        max_positions=positions,
        weights_digest="",
    )
    return use_cpu_kernels(served_as(stock), threads=kernel_threads(stock.parameters, cores()))


def engine(
    of: Any, *, tokens: int, max_sequences: int = 32, proposer: Proposer | None = None, **settings: Any
) -> KVEngine:
    """Make an engine for `of` with a KV cache of `tokens` tokens; `settings` are for `KVEngineConfig`."""
    config = KVEngineConfig(
        num_blocks=tokens // 16, block_size=16, max_step_tokens=512, max_sequences=max_sequences, **settings
    )
    return KVEngine(of, config, proposer=proposer)


def prompt(seed: int, length: int) -> list[int]:
    """Make a prompt that shares no prefix with others."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
    return ids


def spec(key: str, prompt_ids: list[int], max_tokens: int) -> SequenceSpec:
    """Specify a greedy answer of `max_tokens` tokens."""
    return SequenceSpec(key=key, prompt_ids=prompt_ids, max_tokens=max_tokens, ignore_eos=True)
