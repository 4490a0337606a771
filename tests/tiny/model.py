"""What the tiny models have in common: their sizes, and the weights of a plain decoder."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from models.base import KVLayout
from tests.tiny.vocabulary import VOCAB_SIZE, Vocabulary

MAX_POSITIONS: Final = 512
WINDOW: Final = 24
"""The sliding window of those that have one: shorter than most texts of the tests."""

HIDDEN: Final = 64
INTERMEDIATE: Final = 128
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 16
EXPERTS: Final = 4
_SCALE: Final = 0.2
"""The weights' standard deviation. The usual 0.02 collapses to one token, whatever the prompt."""

Array = npt.NDArray[np.float32]
Tensors = dict[str, Array]

COMMON: Final[dict[str, Any]] = {
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": MAX_POSITIONS,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
}
"""Keys that all their `config.json` have, with the values most of them have here."""


class Draw:
    """Random weights, in the order they are asked for."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def matrix(self, rows: int, columns: int, scale: float = _SCALE) -> Array:
        return (self._random.standard_normal((rows, columns)) * scale).astype(np.float32)

    def tensor(self, *shape: int, scale: float = _SCALE) -> Array:
        return (self._random.standard_normal(shape) * scale).astype(np.float32)

    def norm(self, size: int, centre: float = 1) -> Array:
        """A norm's weights; some models store what is added to 1, and `centre` is 0."""
        return (centre + self._random.standard_normal(size) * _SCALE).astype(np.float32)

    def bias(self, size: int) -> Array:
        return (self._random.standard_normal(size) * _SCALE).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A tiny model: what its checkpoint holds, under the published names.

    Attributes:
        proves: what it has of its architecture, in words, for docs/models.md.
        windows: each layer's sliding window, None where it sees all.
        max_positions: the longest text that is served.
        layout: the shape of its keys and values; None: that of most of them.
    """

    architecture: str
    proves: str
    config: Mapping[str, Any]
    vocabulary: Vocabulary
    weights: Callable[[Draw], Tensors]
    windows: tuple[int | None, ...] = (None, None)
    max_positions: int = MAX_POSITIONS
    layout: KVLayout | None = None

    @property
    def kv_layout(self) -> KVLayout:
        """The shape of its keys and values."""
        return self.layout or KVLayout(layers=len(self.windows), kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def ends(draw: Draw) -> Tensors:
    """The embeddings, the last norm and the head."""
    return tied_ends(draw) | {"lm_head.weight": draw.matrix(VOCAB_SIZE, HIDDEN)}


def tied_ends(draw: Draw, scale: float = _SCALE) -> Tensors:
    """The embeddings, which are the head as well, and the last norm."""
    return {
        "model.embed_tokens.weight": draw.matrix(VOCAB_SIZE, HIDDEN, scale),
        "model.norm.weight": draw.norm(HIDDEN),
    }


def signed_ends(draw: Draw, *, centre: float = 0, scale: float = _SCALE) -> Tensors:
    """The same with a last norm of both signs.

    Where a residual stream is mostly its own embedding, a tied head would say the last token for ever.
    """
    norm = draw.matrix(1, HIDDEN, 1.0)[0] + np.float32(centre)
    return {"model.embed_tokens.weight": draw.matrix(VOCAB_SIZE, HIDDEN, scale), "model.norm.weight": norm}


def norms(draw: Draw, layer: int, names: Iterable[str], centre: float = 1) -> Tensors:
    return {f"model.layers.{layer}.{name}.weight": draw.norm(HIDDEN, centre) for name in names}


def attention(draw: Draw, layer: int) -> Tensors:
    at = f"model.layers.{layer}.self_attn"
    return {
        f"{at}.q_proj.weight": draw.matrix(HEADS * HEAD_DIM, HIDDEN),
        f"{at}.k_proj.weight": draw.matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{at}.v_proj.weight": draw.matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{at}.o_proj.weight": draw.matrix(HIDDEN, HEADS * HEAD_DIM),
    }


def head_norms(draw: Draw, layer: int, centre: float = 1) -> Tensors:
    """Norms of each head's queries and keys."""
    at = f"model.layers.{layer}.self_attn"
    return {f"{at}.{name}_norm.weight": draw.norm(HEAD_DIM, centre) for name in ("q", "k")}


def mlp(draw: Draw, layer: int) -> Tensors:
    at = f"model.layers.{layer}.mlp"
    return {
        f"{at}.gate_proj.weight": draw.matrix(INTERMEDIATE, HIDDEN),
        f"{at}.up_proj.weight": draw.matrix(INTERMEDIATE, HIDDEN),
        f"{at}.down_proj.weight": draw.matrix(HIDDEN, INTERMEDIATE),
    }


def plain_layer(draw: Draw, layer: int) -> Tensors:
    """A layer as Llama has it."""
    return (
        norms(draw, layer, ("input_layernorm", "post_attention_layernorm"))
        | attention(draw, layer)
        | mlp(draw, layer)
    )
