"""Decoders that differ from Llama in their blocks alone: norms, biases, rotary angles, gates and experts."""

from typing import Final

from models.base import KVLayout
from tests.tiny.mixtures import SIZE, experts, gate
from tests.tiny.model import (
    COMMON,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    MAX_POSITIONS,
    WINDOW,
    Draw,
    Model,
    Tensors,
    attention,
    ends,
    head_norms,
    mlp,
    norms,
    plain_layer,
    signed_ends,
)
from tests.tiny.qwen import CHATML_VOCABULARY
from tests.tiny.vocabulary import VOCAB_SIZE

_LAYERS: Final = range(2)
_NORMS: Final = ("input_layernorm", "post_attention_layernorm")


def _biases(draw: Draw, layer: int, *, names: tuple[str, ...] = ("q", "k", "v")) -> Tensors:
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "o": HIDDEN}
    at = f"model.layers.{layer}.self_attn"
    return {f"{at}.{name}_proj.bias": draw.bias(sizes[name]) for name in names}


def _with_bias(draw: Draw, at: str, rows: int, columns: int, scale: float = 0.4) -> Tensors:
    """A linear layer, with weights of a scale at which greedy texts vary."""
    return {f"{at}.weight": draw.matrix(rows, columns, scale), f"{at}.bias": draw.bias(rows)}


def _two_ends(draw: Draw, embeddings: str, head: str) -> Tensors:
    """The embeddings and the head, without a last norm."""
    return {f"{name}.weight": draw.matrix(VOCAB_SIZE, HIDDEN) for name in (embeddings, head)}


def _layer_norm(draw: Draw, at: str) -> Tensors:
    return {f"{at}.weight": draw.norm(HIDDEN), f"{at}.bias": draw.bias(HIDDEN)}


# ---- dense -----------------------------------------------------------------------------------------


def _seed_oss(draw: Draw) -> Tensors:
    tensors = ends(draw)
    for layer in _LAYERS:
        tensors |= plain_layer(draw, layer) | _biases(draw, layer)
    return tensors


SEED_OSS: Final = Model(
    architecture="SeedOssForCausalLM",
    proves="biases of queries, keys and values alone",
    config=COMMON
    | {
        "attention_bias": True,
        "attention_dropout": 0.1,
        "attention_out_bias": False,
        "head_dim": HEAD_DIM,
        "mlp_bias": False,
        "model_type": "seed_oss",
        "pad_token_id": 509,
        "residual_dropout": 0.1,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_seed_oss,
)


def _ernie(draw: Draw) -> Tensors:
    return signed_ends(draw) | plain_layer(draw, 0) | plain_layer(draw, 1)


ERNIE4_5: Final = Model(
    architecture="Ernie4_5ForCausalLM",
    proves="rotary angles of neighbouring channels",
    config=COMMON
    | {
        "head_dim": HEAD_DIM,
        "model_type": "ernie4_5",
        "pad_token_id": 509,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_ernie,
)


def _glm4(draw: Draw) -> Tensors:
    tensors = ends(draw)
    names = (
        "input_layernorm",
        "post_attention_layernorm",
        "post_self_attn_layernorm",
        "post_mlp_layernorm",
    )
    for layer in _LAYERS:
        at = f"model.layers.{layer}.mlp"
        tensors |= norms(draw, layer, names) | attention(draw, layer) | _biases(draw, layer)
        tensors |= {
            f"{at}.gate_up_proj.weight": draw.matrix(2 * INTERMEDIATE, HIDDEN),
            f"{at}.down_proj.weight": draw.matrix(HIDDEN, INTERMEDIATE),
        }
    return tensors


GLM4: Final = Model(
    architecture="Glm4ForCausalLM",
    proves="norms before and after each block, half of the channels rotated",
    config=COMMON
    | {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "head_dim": HEAD_DIM,
        "model_type": "glm4",
        "pad_token_id": 509,
        "partial_rotary_factor": 0.5,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_glm4,
)


def _exaone4(draw: Draw) -> Tensors:
    tensors = ends(draw)
    for layer in _LAYERS:
        tensors |= norms(draw, layer, ("post_attention_layernorm", "post_feedforward_layernorm"))
        tensors |= attention(draw, layer) | head_norms(draw, layer) | mlp(draw, layer)
    return tensors


EXAONE4: Final = Model(
    architecture="Exaone4ForCausalLM",
    proves="norms after blocks, windows; whole layers go without positions",
    config=COMMON
    | {
        "attention_dropout": 0.0,
        "head_dim": HEAD_DIM,
        "layer_types": ["sliding_attention", "full_attention"],
        "model_type": "exaone4",
        "pad_token_id": 509,
        "rope_scaling": None,
        "sliding_window": WINDOW,
        "sliding_window_pattern": "LG",
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_exaone4,
    windows=(WINDOW, None),
)


def _starcoder2(draw: Draw) -> Tensors:
    tensors = _two_ends(draw, "model.embed_tokens", "lm_head") | _layer_norm(draw, "model.norm")
    for layer in _LAYERS:
        at = f"model.layers.{layer}"
        tensors |= attention(draw, layer) | _biases(draw, layer, names=("q", "k", "v", "o"))
        tensors |= _layer_norm(draw, f"{at}.input_layernorm")
        tensors |= _layer_norm(draw, f"{at}.post_attention_layernorm")
        tensors |= _with_bias(draw, f"{at}.mlp.c_fc", INTERMEDIATE, HIDDEN, 0.2)
        tensors |= _with_bias(draw, f"{at}.mlp.c_proj", HIDDEN, INTERMEDIATE, 0.2)
    return tensors


STARCODER2: Final = Model(
    architecture="Starcoder2ForCausalLM",
    proves="layer norms, biases, no gates; a window",
    config={key: value for key, value in COMMON.items() if key != "rms_norm_eps"}
    | {
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "hidden_act": "gelu_pytorch_tanh",
        "mlp_type": "default",
        "model_type": "starcoder2",
        "norm_epsilon": 1e-5,
        "norm_type": "layer_norm",
        "pad_token_id": 509,
        "residual_dropout": 0.0,
        "sliding_window": WINDOW,
        "use_bias": True,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_starcoder2,
    windows=(WINDOW, WINDOW),
)


def _stablelm(draw: Draw) -> Tensors:
    tensors = {
        f"{name}.weight": draw.matrix(VOCAB_SIZE, HIDDEN) for name in ("model.embed_tokens", "lm_head")
    }
    tensors |= _layer_norm(draw, "model.norm")
    for layer in _LAYERS:
        at = f"model.layers.{layer}"
        tensors |= attention(draw, layer) | _biases(draw, layer) | mlp(draw, layer)
        tensors |= _layer_norm(draw, f"{at}.input_layernorm")
        tensors |= _layer_norm(draw, f"{at}.post_attention_layernorm")
    return tensors


STABLELM: Final = Model(
    architecture="StableLmForCausalLM",
    proves="layer norms with gates, a quarter of the channels rotated",
    config={key: value for key, value in COMMON.items() if key != "rms_norm_eps"}
    | {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "layer_norm_eps": 1e-5,
        "model_type": "stablelm",
        "partial_rotary_factor": 0.25,
        "qk_layernorm": False,
        "rope_scaling": None,
        "use_parallel_residual": False,
        "use_qkv_bias": True,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_stablelm,
)


def _gpt_neox(draw: Draw) -> Tensors:
    tensors = {
        f"{name}.weight": draw.matrix(VOCAB_SIZE, HIDDEN) for name in ("gpt_neox.embed_in", "embed_out")
    }
    tensors |= _layer_norm(draw, "gpt_neox.final_layer_norm")
    for layer in _LAYERS:
        at = f"gpt_neox.layers.{layer}"
        tensors |= _layer_norm(draw, f"{at}.input_layernorm")
        tensors |= _layer_norm(draw, f"{at}.post_attention_layernorm")
        tensors |= _with_bias(draw, f"{at}.attention.query_key_value", 3 * HIDDEN, HIDDEN)
        tensors |= _with_bias(draw, f"{at}.attention.dense", HIDDEN, HIDDEN)
        tensors |= _with_bias(draw, f"{at}.mlp.dense_h_to_4h", INTERMEDIATE, HIDDEN)
        tensors |= _with_bias(draw, f"{at}.mlp.dense_4h_to_h", HIDDEN, INTERMEDIATE)
    return tensors


GPT_NEOX: Final = Model(
    architecture="GPTNeoXForCausalLM",
    proves="one matrix of queries, keys and values, head by head; parallel blocks with a norm each",
    config={
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout": 0.0,
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": MAX_POSITIONS,
        "model_type": "gpt_neox",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 2,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_parallel_residual": True,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_gpt_neox,
    layout=KVLayout(layers=2, kv_heads=HEADS, head_dim=HEAD_DIM),
)


def _olmo(draw: Draw) -> Tensors:
    tensors = _two_ends(draw, "model.embed_tokens", "lm_head")
    for layer in _LAYERS:
        tensors |= attention(draw, layer) | mlp(draw, layer)
    return tensors


OLMO: Final = Model(
    architecture="OlmoForCausalLM",
    proves="norms without weights, clipped queries, keys and values",
    config={key: value for key, value in COMMON.items() if key != "rms_norm_eps"}
    | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": 2.0,
        "model_type": "olmo",
        "pad_token_id": 509,
        "rope_scaling": None,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_olmo,
)


def _arcee(draw: Draw) -> Tensors:
    tensors = ends(draw)
    for layer in _LAYERS:
        at = f"model.layers.{layer}.mlp"
        tensors |= norms(draw, layer, _NORMS) | attention(draw, layer)
        tensors |= {
            f"{at}.up_proj.weight": draw.matrix(INTERMEDIATE, HIDDEN),
            f"{at}.down_proj.weight": draw.matrix(HIDDEN, INTERMEDIATE),
        }
    return tensors


ARCEE: Final = Model(
    architecture="ArceeForCausalLM",
    proves="squared ReLU without gates; yarn",
    config=COMMON
    | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": HEAD_DIM,
        "hidden_act": "relu2",
        "mlp_bias": False,
        "model_type": "arcee",
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 4.0,
            "mscale": 1.0,
            "original_max_position_embeddings": 128,
            "rope_type": "yarn",
        },
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_arcee,
)


def _phi(draw: Draw) -> Tensors:
    tensors: Tensors = {"model.embed_tokens.weight": draw.matrix(VOCAB_SIZE, HIDDEN)}
    tensors |= _layer_norm(draw, "model.final_layernorm") | _with_bias(draw, "lm_head", VOCAB_SIZE, HIDDEN)
    for layer in _LAYERS:
        at = f"model.layers.{layer}"
        for name, rows in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            tensors |= _with_bias(draw, f"{at}.self_attn.{name}", rows * HEAD_DIM, HIDDEN)
        tensors |= _with_bias(draw, f"{at}.self_attn.dense", HIDDEN, HEADS * HEAD_DIM)
        tensors |= _layer_norm(draw, f"{at}.input_layernorm")
        tensors |= _with_bias(draw, f"{at}.mlp.fc1", INTERMEDIATE, HIDDEN)
        tensors |= _with_bias(draw, f"{at}.mlp.fc2", HIDDEN, INTERMEDIATE)
    return tensors


PHI: Final = Model(
    architecture="PhiForCausalLM",
    proves="parallel blocks, biases everywhere, some channels rotated",
    config={key: value for key, value in COMMON.items() if key != "rms_norm_eps"}
    | {
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "model_type": "phi",
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
        "resid_pdrop": 0.1,
        "rope_scaling": None,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_phi,
)


# ---- mixtures of experts ---------------------------------------------------------------------------


def _olmoe(draw: Draw) -> Tensors:
    tensors = ends(draw)
    for layer in _LAYERS:
        at = f"model.layers.{layer}.self_attn"
        tensors |= norms(draw, layer, _NORMS)
        tensors |= attention(draw, layer) | gate(draw, layer, bias=False) | experts(draw, layer)
        tensors |= {
            f"{at}.q_norm.weight": draw.norm(HEADS * HEAD_DIM),
            f"{at}.k_norm.weight": draw.norm(KV_HEADS * HEAD_DIM),
        }
    return tensors


OLMOE: Final = Model(
    architecture="OlmoeForCausalLM",
    proves="experts whose weights are not normalized; norms over all heads",
    config=COMMON
    | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "intermediate_size": SIZE,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "pad_token_id": 509,
        "rope_scaling": None,
        "router_aux_loss_coef": 0.01,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_olmoe,
)


def _qwen2_moe(draw: Draw) -> Tensors:
    tensors = ends(draw)
    for layer in _LAYERS:
        at = f"model.layers.{layer}.mlp"
        tensors |= norms(draw, layer, _NORMS)
        tensors |= attention(draw, layer) | _biases(draw, layer)
        tensors |= gate(draw, layer, bias=False) | experts(draw, layer)
        tensors |= {
            f"{at}.shared_expert.gate_proj.weight": draw.matrix(INTERMEDIATE, HIDDEN),
            f"{at}.shared_expert.up_proj.weight": draw.matrix(INTERMEDIATE, HIDDEN),
            f"{at}.shared_expert.down_proj.weight": draw.matrix(HIDDEN, INTERMEDIATE),
            f"{at}.shared_expert_gate.weight": draw.matrix(1, HIDDEN),
        }
    return tensors


QWEN2_MOE: Final = Model(
    architecture="Qwen2MoeForCausalLM",
    proves="experts beside one that all tokens share, with a gate of its own",
    config=COMMON
    | {
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "max_window_layers": 2,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": SIZE,
        "norm_topk_prob": False,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": INTERMEDIATE,
        "sliding_window": WINDOW,
        "use_sliding_window": False,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_qwen2_moe,
)


def _glm4_moe(draw: Draw) -> Tensors:
    tensors = ends(draw) | mlp(draw, 0) | gate(draw, 1) | experts(draw, 1, shared=True)
    for layer in _LAYERS:
        tensors |= norms(draw, layer, _NORMS)
        tensors |= attention(draw, layer) | _biases(draw, layer)
    return tensors


GLM4_MOE: Final = Model(
    architecture="Glm4MoeForCausalLM",
    proves="experts chosen by sigmoids and a bias, after a dense layer",
    config=COMMON
    | {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "first_k_dense_replace": 1,
        "head_dim": HEAD_DIM,
        "model_type": "glm4_moe",
        "moe_intermediate_size": SIZE,
        "n_group": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "pad_token_id": 509,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "routed_scaling_factor": 1.5,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_glm4_moe,
)


def _ernie4_5_moe(draw: Draw) -> Tensors:
    tensors = signed_ends(draw) | mlp(draw, 0) | gate(draw, 1, bias=False) | experts(draw, 1, shared=True)
    tensors["model.layers.1.mlp.moe_statics.e_score_correction_bias"] = draw.matrix(1, EXPERTS)
    for layer in _LAYERS:
        tensors |= norms(draw, layer, _NORMS) | attention(draw, layer)
    return tensors


ERNIE4_5_MOE: Final = Model(
    architecture="Ernie4_5_MoeForCausalLM",
    proves="experts chosen with a bias, beside shared ones, after a dense layer",
    config=COMMON
    | {
        "model_type": "ernie4_5_moe",
        "moe_intermediate_size": SIZE,
        "moe_k": 2,
        "moe_layer_end_index": 1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": EXPERTS,
        "moe_num_shared_experts": 1,
        "pad_token_id": 509,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_ernie4_5_moe,
)
