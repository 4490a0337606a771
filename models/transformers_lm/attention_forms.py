"""Forms of attention that transformers' modules compute around their attention function, or in their masks.

    latent attention     keys and values are one compressed row per token (DeepSeek V2, V3)
    chunks               tokens see no key before their range of the text (Llama 4)
    tuned queries        queries grow with their position (Llama 4)
    chosen keys          tokens see the keys that an indexer has chosen (DeepSeek V3.2; `indexers`)

A form is attached to the modules of a model before it is served. The attention over the paged pool asks it
for the queries that the stored keys are compared with, and gives it the outputs (`form_of`). Under its own
attention function a module computes as it always does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from models.transformers_lm.indexers import attach_indexers

SINKS: Final = "sinks"
CHUNKS: Final = "chunks"
CELLS: Final = "cells"
"""What a kernel has to declare to attend for a model with it (`models.base.KVLayout.needs`)."""

_FORM: Final = "dalsegno_form"
"""The attribute of an attention module that holds its form."""


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What a layer's attention is beyond causal attention over its own keys and values.

    Attributes:
        chunk: the tokens of a range, before which nothing is seen; None: everything is.
        latents: compressed keys and values; None if the module's own are stored.
        tuning: the factors of queries by their positions, (T,) to (T,); None: 1.
    """

    chunk: int | None = None
    latents: "Latents | None" = None
    tuning: Callable[[torch.Tensor], torch.Tensor] | None = None

    def queries(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the queries for the stored keys, (T, H, D of the keys), from the module's (T, H, D)."""
        if self.tuning is not None:
            queries = (queries * self.tuning(positions)[:, None, None]).to(queries.dtype)
        return self.latents.queries(queries) if self.latents is not None else queries

    def outputs(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return what the module expects, (T, H, D), from sums of the stored values."""
        return self.latents.outputs(outputs) if self.latents is not None else outputs


def form_of(module: torch.nn.Module) -> AttentionForm | None:
    """Return the form that is attached to an attention module, if any."""
    found: AttentionForm | None = getattr(module, _FORM, None)
    return found


def attach(module: torch.nn.Module, form: AttentionForm) -> None:
    """Attach a form to an attention module."""
    setattr(module, _FORM, form)


class Latents:
    """Latent attention over compressed rows (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A token's row is its latent, R numbers, and one rotated key that all heads share. A head's key is a matrix
    of the head times the latent, and so is its value. The matrix of the keys is applied to the queries
    instead, and that of the values to the sum of latents: so all heads read the same rows, a tenth of what
    keys and values of all heads would take.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._expanded = module.expand_kv
        self._stock: str = module.config._attn_implementation  # noqa: SLF001 - no public reader

    def expand_kv(self, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values from the latent (B, 1, T, R) and the rotated key (B, 1, T, P).

        It replaces the module's method: rows of (B, 1, T, R + P) and the latent, where the pool stores them.
        """
        if self._module.config._attn_implementation == self._stock:  # noqa: SLF001 - no public reader
            expanded: tuple[torch.Tensor, torch.Tensor] = self._expanded(latent, rotated)
            return expanded
        return torch.cat([latent, rotated], dim=-1), latent

    def _matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices of each head, to keys (H, N, R) and to values (H, V, R)."""
        kept = int(self._module.qk_nope_head_dim)
        by_head = self._module.kv_b_proj.weight.unflatten(0, (-1, kept + int(self._module.v_head_dim)))
        return by_head[:, :kept], by_head[:, kept:]

    def queries(self, queries: torch.Tensor) -> torch.Tensor:
        """Return (T, H, R + P) from (T, H, N + P)."""
        kept = int(self._module.qk_nope_head_dim)
        of_latents = torch.einsum("thn,hnr->thr", queries[..., :kept], self._matrices()[0])
        return torch.cat([of_latents, queries[..., kept:]], dim=-1)

    def outputs(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return (T, H, V) from (T, H, R)."""
        return torch.einsum("thr,hvr->thv", outputs, self._matrices()[1])


def attach_forms(model: torch.nn.Module) -> None:
    """Attach their forms to the attention modules of a model of transformers."""
    _keep_latents(model)
    _keep_chunks(model)
    attach_indexers(model)


def _keep_latents(model: torch.nn.Module) -> None:
    """Let all layers with latent attention store their compressed rows."""
    for module in model.modules():
        if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj"):
            latents = Latents(module)
            module.expand_kv = latents.expand_kv  # type: ignore[assignment] # a method of the module
            attach(module, AttentionForm(latents=latents))


def _keep_chunks(model: torch.nn.Module) -> None:
    """Tell layers that see chunks of the text their size, which transformers has in its masks alone."""
    for module in model.modules():
        config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
        kinds, size = (getattr(config, name, None) for name in ("layer_types", "attention_chunk_size"))
        if isinstance(layer, int) and kinds and size and hasattr(module, "q_proj"):
            chunk = int(size) if kinds[layer] == "chunked_attention" else None
            attach(module, AttentionForm(chunk=chunk, tuning=_taken_tuning(module)))


def _taken_tuning(module: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Take the tuning of queries from a module, which counts the tokens of a batch in place of positions."""
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return None
    module.attn_temperature_tuning = False
    floor, scale = float(module.floor_scale), float(module.attn_scale)

    def tuning(positions: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * scale + 1.0

    return tuning
