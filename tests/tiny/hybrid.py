"""Recurrent states: linear attention, Mamba and short convolutions, alone and between layers of attention.

Transformers itself writes these checkpoints, from weights that are drawn by their names.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from models.base import CellShape, KVLayout, StateShape
from tests.tiny.model import COMMON, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, Array, Draw, Model, Tensors
from tests.tiny.qwen import CHATML_VOCABULARY
from tests.tiny.vocabulary import VOCAB_SIZE

_LINEAR: Final = 16  # the numbers of a head of linear attention
_GROUPS: Final = 2
_INNER: Final = 2 * HIDDEN
_KERNEL: Final = 4
_STATE: Final = 16
_SCALE: Final = 0.12
_MAMBA_HEADS: Final = 8

_HYBRID: Final = COMMON | {
    "attention_dropout": 0.0,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
}
_KINDS: Final = ("linear_attention", "full_attention", "linear_attention")
_MIXTURE: Final = {
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 64,
}

# ---- weights -----------------------------------------------------------------------------------------


def _drawn(architecture: str, config: dict[str, Any]) -> Callable[[Draw], Tensors]:
    """The weights of an architecture as transformers writes them, drawn by the names of its parameters."""

    def weights(draw: Draw) -> Tensors:
        import torch  # noqa: PLC0415 - takes seconds, and most tests write no such checkpoint
        import transformers  # noqa: PLC0415
        from safetensors.numpy import load_file  # noqa: PLC0415

        model_class = getattr(transformers, architecture)
        model = model_class(model_class.config_class.from_dict(config | {"vocab_size": VOCAB_SIZE}))
        with torch.no_grad():
            for name, parameter in model.state_dict().items():
                drawn = _parameter(draw, name, tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(drawn))
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return dict(load_file(Path(folder) / "model.safetensors"))

    return weights


def _parameter(draw: Draw, name: str, shape: tuple[int, ...]) -> Array:
    if name.endswith("A_log"):  # a state is halved within 1 to 50 tokens
        return np.asarray(draw.tensor(*shape, scale=1.0) - 1, np.float32)
    if name.endswith(("dt_bias", "dt_proj.bias")):
        return np.asarray(draw.tensor(*shape, scale=0.5) - 1, np.float32)
    if "conv" in name and len(shape) == 3:
        return draw.tensor(*shape, scale=0.5)
    if len(shape) == 1 and ("norm" in name or name.endswith(".D")):
        return np.asarray(1 + draw.tensor(*shape, scale=0.1), np.float32)
    return draw.tensor(*shape, scale=_SCALE)


# ---- layouts -----------------------------------------------------------------------------------------

_CELLS: Final = CellShape(KV_HEADS, HEAD_DIM, HEAD_DIM)
_NO_CELLS: Final = CellShape(0, 0, 0)


def _delta(key_heads: int, value_heads: int) -> tuple[StateShape, ...]:
    """The states of a layer of gated delta attention."""
    channels = (2 * key_heads + value_heads) * _LINEAR
    return (
        StateShape((channels, _KERNEL), is_float32=False),
        StateShape((value_heads, _LINEAR, _LINEAR), is_float32=True),
    )


def _mamba2(groups: int) -> tuple[StateShape, ...]:
    return (
        StateShape((_INNER + 2 * groups * _STATE, _KERNEL), is_float32=False),
        StateShape((_MAMBA_HEADS, _INNER // _MAMBA_HEADS, _STATE), is_float32=True),
    )


def _layout(
    states: tuple[StateShape, ...],
    attending: tuple[bool, ...] = (False, True, False),
    recurrent: tuple[bool, ...] = (True, False, True),
    cells: CellShape = _CELLS,
) -> KVLayout:
    shapes = tuple(cells if attends else _NO_CELLS for attends in attending)
    first = cells if any(attending) else _NO_CELLS
    return KVLayout(
        layers=len(attending),
        kv_heads=first.heads,
        head_dim=first.key,
        cells=() if all(attending) or not any(attending) else shapes,
        needs=frozenset({"cells"}) if first.is_latent else frozenset(),
        states=tuple(states if keeps else () for keeps in recurrent),
    )


def _model(architecture: str, proves: str, layout: KVLayout, **config: Any) -> Model:
    whole = _HYBRID | config
    return Model(
        architecture=architecture,
        proves=proves,
        config=whole,
        vocabulary=CHATML_VOCABULARY,
        weights=_drawn(architecture, whole),
        windows=(None,) * layout.layers,
        layout=layout,
    )


# ---- models ------------------------------------------------------------------------------------------

_DELTA: Final = {
    "head_dim": HEAD_DIM,
    "layer_types": list(_KINDS),
    "linear_conv_kernel_dim": _KERNEL,
    "linear_key_head_dim": _LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": _LINEAR,
}
QWEN3_NEXT: Final = _model(
    "Qwen3NextForCausalLM",
    "[recurrent](#recurrent-states): gated delta attention; experts",
    _layout(_delta(2, 4)),
    model_type="qwen3_next",
    **_DELTA,
    **_MIXTURE,
)
QWEN3_5: Final = _model(
    "Qwen3_5ForCausalLM",
    "[recurrent](#recurrent-states): gated delta attention",
    _layout(_delta(2, 4)),
    model_type="qwen3_5_text",
    **_DELTA,
)
QWEN3_5_MOE: Final = _model(
    "Qwen3_5MoeForCausalLM",
    "[recurrent](#recurrent-states): gated delta attention; experts",
    _layout(_delta(2, 4)),
    model_type="qwen3_5_moe_text",
    **_DELTA,
    **_MIXTURE,
)

_LATENT: Final = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "layer_types": list(_KINDS),
    "moe_intermediate_size": 64,
    "n_group": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": HEADS,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "topk_group": 1,
    "v_head_dim": 12,
}
_LATENT_CELLS: Final = CellShape(1, 32, 24, is_latent=True)
KIMI_LINEAR: Final = _model(
    "KimiLinearForCausalLM",
    "[recurrent](#recurrent-states): delta attention with a decay per channel; latent attention, experts",
    _layout(_delta(4, 4), cells=_LATENT_CELLS),
    model_type="kimi_linear",
    linear_conv_kernel_dim=_KERNEL,
    linear_head_dim=_LINEAR,
    linear_num_heads=4,
    num_local_experts=4,
    **_LATENT,
)
LING_HYBRID: Final = _model(
    "BailingHybridForCausalLM",
    "[recurrent](#recurrent-states): layers as Kimi-Linear's, in Ling's hybrid models",
    _layout(_delta(4, 4), cells=_LATENT_CELLS),
    model_type="bailing_hybrid",
    linear_conv_kernel_dim=_KERNEL,
    linear_head_dim=_LINEAR,
    linear_num_heads=4,
    num_experts=4,
    **_LATENT,
)

_MAMBA: Final = {
    "mamba_chunk_size": 8,
    "mamba_d_conv": _KERNEL,
    "mamba_d_head": _INNER // _MAMBA_HEADS,
    "mamba_d_state": _STATE,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": _MAMBA_HEADS,
}
GRANITE4_HYBRID: Final = _model(
    "GraniteMoeHybridForCausalLM",
    "[recurrent](#recurrent-states): Mamba 2, experts and no positions, as in Granite 4's larger sizes",
    _layout(_mamba2(1)),
    model_type="granitemoehybrid",
    layer_types=["mamba", "attention", "mamba"],
    num_experts_per_tok=2,
    num_local_experts=4,
    position_embedding_type="nope",
    shared_intermediate_size=64,
    **_MAMBA,
)
BAMBA: Final = _model(
    "BambaForCausalLM",
    "[recurrent](#recurrent-states): Mamba 2",
    _layout(_mamba2(1)),
    model_type="bamba",
    attn_layer_indices=[1],
    **_MAMBA,
)
FALCON_H1: Final = _model(
    "FalconH1ForCausalLM",
    "[recurrent](#recurrent-states): Mamba 2 and attention in every layer",
    _layout(_mamba2(1), (True,) * 3, (True,) * 3),
    model_type="falcon_h1",
    head_dim=HEAD_DIM,
    mamba_d_ssm=_INNER,
    **_MAMBA,
)
NEMOTRON_H: Final = _model(
    "NemotronHForCausalLM",
    "[recurrent](#recurrent-states): Mamba 2; layers of experts alone",
    _layout(_mamba2(_GROUPS), (False, False, True, False), (True, False, False, False)),
    model_type="nemotron_h",
    chunk_size=8,
    conv_kernel=_KERNEL,
    head_dim=HEAD_DIM,
    hybrid_override_pattern="ME*-",
    mamba_head_dim=_INNER // _MAMBA_HEADS,
    mamba_num_heads=_MAMBA_HEADS,
    moe_intermediate_size=64,
    moe_shared_expert_intermediate_size=64,
    n_groups=_GROUPS,
    n_routed_experts=4,
    num_experts_per_tok=2,
    num_hidden_layers=4,
    ssm_state_size=_STATE,
)
JAMBA: Final = _model(
    "JambaForCausalLM",
    "[recurrent](#recurrent-states): the first Mamba; experts",
    _layout((StateShape((_INNER, _KERNEL), is_float32=False), StateShape((_INNER, _STATE), is_float32=True))),
    model_type="jamba",
    attn_layer_offset=1,
    attn_layer_period=3,
    expert_layer_offset=1,
    expert_layer_period=2,
    mamba_d_conv=_KERNEL,
    mamba_d_state=_STATE,
    mamba_dt_rank=8,
    mamba_expand=2,
    num_experts=4,
    num_experts_per_tok=2,
)
MAMBA2: Final = _model(
    "Mamba2ForCausalLM",
    "[recurrent](#recurrent-states): Mamba 2 without attention",
    _layout(_mamba2(1), (False,) * 3, (True,) * 3),
    model_type="mamba2",
    chunk_size=8,
    conv_kernel=_KERNEL,
    expand=2,
    head_dim=_INNER // _MAMBA_HEADS,
    n_groups=1,
    num_heads=_MAMBA_HEADS,
    state_size=_STATE,
)
LFM2: Final = _model(
    "Lfm2ForCausalLM",
    "[recurrent](#recurrent-states): short convolutions",
    _layout((StateShape((HIDDEN, 3), is_float32=False),)),
    model_type="lfm2",
    block_auto_adjust_ff_dim=False,
    conv_L_cache=3,
    conv_bias=False,
    layer_types=["conv", "full_attention", "conv"],
)
