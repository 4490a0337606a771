"""Indexers of sparse attention: which of the earlier tokens a token attends to (DeepSeek V3.2, GLM-5).

An indexer has queries of some small heads, a key of each token, and a weight of each head. It scores every
earlier token, and the layer attends to the `top` best alone (DeepSeek-V3.2, section 2.1). In GLM-5, layers
without an indexer attend to those that the last one before them has chosen.

Transformers' module makes the scores and the choice in one method, over one batch with a cache object. Here
its `forward` returns what the scores are made of (`Indexed`), and the attention over the paged pool makes the
choice of each token (`workers.kv_engine.attention.choices`). The layer passes it through, to its attention
function and to the next layer. Under its own attention function a module computes as it always does.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import torch

from models.checkpoints.files import UnsupportedArchitectureError

_PARTS: Final = ("wq_b", "wk", "k_norm", "weights_proj")
"""The layers by which an indexer is recognised."""
_ROTATIONS: Final = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
"""The functions by which transformers' indexers rotate queries and keys."""
_CHECKED_TOKENS: Final = 12
_CHECKED_TOP: Final = 4
_ALL: Final = 2**31 - 1
_TOLERANCE: Final = 1e-4
"""Of the check of an indexer's class, in standard deviations of the scores."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Indexed:
    """An indexer's results for T packed tokens. It stands for their choices of keys.

    Attributes:
        layer: the number of the indexer's layer, in whose cells its keys are stored.
        top: how many keys a token attends to.
        queries: (T, I, D), of the indexer's heads.
        keys: (T, D), to be stored.
        weights: (T, I) float32, of the heads.
        scale: the factor of the products.
    """

    layer: int
    top: int
    queries: torch.Tensor
    keys: torch.Tensor
    weights: torch.Tensor
    scale: float


def scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Return the scores of keys, (B, Q, L) float32, as transformers computes them.

    Args:
        queries: (B, Q, I, D).
        weights: (B, Q, I).
        keys: (B, L, D).
        scale: the factor of the products.
    """
    products = torch.matmul(queries.float(), keys.transpose(-1, -2).float().unsqueeze(1)) * scale
    return torch.matmul(weights.unsqueeze(-2), products.relu_()).squeeze(-2)


class Indexer:
    """A layer's indexer as a function of packed tokens.

    Raises:
        UnsupportedArchitectureError: it rotates its queries in a way that is not known.
    """

    def __init__(self, module: Any, model_name: str) -> None:
        self._module = module
        self._own_forward: Final = module.forward
        self._stock: str = module.config._attn_implementation  # noqa: SLF001 - no public reader
        own = inspect.unwrap(type(module).forward)
        names = [name for name in own.__code__.co_names if name.startswith("apply_rotary")]
        if len(names) != 1 or names[0] not in _ROTATIONS:
            raise UnsupportedArchitectureError(
                f"{model_name} is not served: its {type(module).__name__} rotates queries by {names}, "
                f"expected one of {list(_ROTATIONS)}"
            )
        self._rotate: Final[Callable[..., Any]] = own.__globals__[names[0]]

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return what stands for the choice of packed tokens; or that of the module's own method.

        It replaces the module's method. `hidden_states` are (1, T, width), `q_resid` (1, T, rank).
        """
        if self._module.config._attn_implementation == self._stock:  # noqa: SLF001 - no public reader
            return self._own_forward(hidden_states, q_resid, position_embeddings, *args, **kwargs)
        return self.indexed(hidden_states, q_resid, position_embeddings)

    def indexed(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> Indexed:
        """Compute queries, keys and weights in transformers' order of operations."""
        module, (cos, sin) = self._module, position_embeddings
        queries = module.wq_b(q_resid).unflatten(-1, (module.n_heads, module.head_dim))
        keys = module.k_norm(module.wk(hidden_states)).unsqueeze(2)
        rotated = module.qk_rope_head_dim
        turned = self._rotate(queries[..., :rotated], keys[..., :rotated], cos, sin, unsqueeze_dim=2)
        queries, keys = (
            torch.cat([first, whole[..., rotated:]], dim=-1)
            for first, whole in zip(turned, (queries, keys), strict=True)
        )
        weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).float()
        return Indexed(
            layer=int(module.layer_idx),
            top=int(module.index_topk),
            queries=queries[0],
            keys=keys[0, :, 0],
            weights=(weights * module.n_heads**-0.5)[0],
            scale=float(module.softmax_scale),
        )


def attach_indexers(model: torch.nn.Module) -> None:
    """Let the indexers of a model of transformers return what their choices are made of.

    Raises:
        UnsupportedArchitectureError: an indexer is of an unknown kind.
    """
    found = _indexers_in(model)
    name = type(model).__name__
    for one in {type(module): module for module in found}.values():
        _check(one, name)
    for module in found:
        module.forward = Indexer(module, name).forward


def _indexers_in(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if all(hasattr(module, name) for name in _PARTS)]


@contextmanager
def choosing_all(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the indexers of a model choose all keys, also in transformers' own computation."""
    found = _indexers_in(model)
    own = [module.index_topk for module in found]
    try:
        for module in found:
            module.index_topk = _ALL
        yield
    finally:
        for module, top in zip(found, own, strict=True):
            module.index_topk = top


def _check(module: Any, model_name: str) -> None:
    """Compare the choices of a small indexer of the same class with those of its own method.

    The self-check of the engine does not: its text is shorter than what real models choose. Of keys with
    equal scores either may be chosen, so the scores of the chosen ones are compared.

    Raises:
        UnsupportedArchitectureError: they differ, or it cannot be computed.
    """
    name, tokens = type(module).__name__, _CHECKED_TOKENS
    by = torch.Generator().manual_seed(0)
    config = deepcopy(module.config)
    config.hidden_size, config.q_lora_rank, config.index_topk = 32, 24, _CHECKED_TOP
    seen = torch.ones(1, tokens, tokens, dtype=torch.bool, device="cpu").tril()
    try:
        small = _drawn(type(module)(config, 0).to_empty(device="cpu").float(), by)
        angles = _random(by, 1, tokens, small.qk_rope_head_dim // 2)
        both = angles.repeat(1, 1, 2)
        hidden, residual = (
            _random(by, 1, tokens, width) for width in (config.hidden_size, config.q_lora_rank)
        )
        given = (hidden, residual, (both.cos(), both.sin()))
        indexed = Indexer(small, model_name).indexed(*given)
        own = small.forward(*given, seen, None, past_key_values=None).long()
        every = scores(
            indexed.queries[None], indexed.weights[None], indexed.keys[None], scale=indexed.scale
        ).masked_fill(~seen, float("-inf"))
        best, chosen = every.topk(indexed.top).values, every.gather(-1, own).sort(descending=True).values
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as failure:
        raise UnsupportedArchitectureError(
            f"{model_name} is not served: its {name} cannot be computed over packed tokens "
            f"({type(failure).__name__}: {failure})"
        ) from failure
    error = float(torch.where(best == chosen, 0.0, best - chosen).abs().max() / every[seen].std())
    if not error <= _TOLERANCE:
        raise UnsupportedArchitectureError(
            f"{model_name} is not served: computed over packed tokens its {name} chooses other keys than by "
            f"its own method, with scores that differ by {error:.2g} standard deviations"
        )


def _drawn(module: Any, by: torch.Generator) -> Any:
    """Fill the parameters of a module with random numbers."""
    for parameter in module.parameters():
        parameter.requires_grad_(requires_grad=False).copy_(_random(by, *parameter.shape))
    return module


def _random(by: torch.Generator, *shape: int) -> torch.Tensor:
    # In the probe, the defaults are other ones.
    return torch.randn(shape, generator=by, device="cpu", dtype=torch.float32)
