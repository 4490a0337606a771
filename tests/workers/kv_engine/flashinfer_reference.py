"""A reference implementation of FlashInfer's paged attention wrappers in torch, for machines without a GPU.

    the classes         `plan` and `run` as documented for 0.6.13, with its signatures
    without_a_device    FlashInfer's own classes, if it is installed; torch computes their launches

The first need nothing, the second show that the first are right about everything but the kernels. To have
them without CUDA, in 18 MB: `pip install --no-deps --target FOLDER flashinfer-python==0.6.13 apache-tvm-ffi
nvidia-ml-py einops tabulate`, and the folder on PYTHONPATH.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    *,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float,
) -> torch.Tensor:
    """Compute attention span by span: pages of (pages, page size, K, D), queries at the end of the keys."""
    group = q.shape[1] // k.shape[2]
    out = torch.empty_like(q)
    for span in range(len(last_page_len)):
        pages = indices[kv_indptr[span] : kv_indptr[span + 1]].long()
        kv_len = (len(pages) - 1) * k.shape[1] + int(last_page_len[span])
        keys, values = (cells[pages].flatten(0, 1)[:kv_len].float() for cells in (k, v))
        asked = q[qo_indptr[span] : qo_indptr[span + 1]].float()
        scores = torch.einsum("qhd,khd->hqk", asked, keys.repeat_interleave(group, 1)) * sm_scale
        if logits_soft_cap > 0:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        qo_idx, kv_idx = torch.arange(len(asked))[:, None], torch.arange(kv_len)
        is_seen = kv_idx + len(asked) <= kv_len + qo_idx
        if window_left >= 0:
            is_seen &= kv_idx + len(asked) + window_left >= kv_len + qo_idx
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        out[qo_indptr[span] : qo_indptr[span + 1]] = torch.einsum(
            "hqk,khd->qhd", weights, values.repeat_interleave(group, 1)
        ).to(q.dtype)
    return out


class _Wrapper:
    """The common part of both wrappers.

    Attributes:
        compute: what a `run` launches.
        plans: how many were made of all wrappers.
    """

    compute: Callable[..., torch.Tensor] = staticmethod(attended)
    plans = 0

    def _start(self, kv_layout: str, fixed: tuple[torch.Tensor, ...] | None) -> None:
        assert kv_layout == "NHD"
        self._fixed = fixed
        self._buffers: tuple[torch.Tensor, ...] = fixed or ()
        self._plan_info: list[int] = []

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8

    def _planned(self, queries: torch.Tensor, *where: torch.Tensor, **how: Any) -> None:
        _Wrapper.plans += 1
        kv_indptr, indices, last_page_len = where
        assert all(one.dtype == torch.int32 for one in (queries, *where))
        assert kv_indptr.diff().min() > 0
        assert len(indices) == int(kv_indptr[-1])
        if self._fixed is None:
            self._buffers = (queries.clone(), *(one.clone() for one in where))
        else:
            assert len(last_page_len) == len(self._fixed[-1])
            for buffer, one in zip(self._fixed, (queries, *where), strict=True):
                buffer[: len(one)] = one
        self._plan_info = [len(last_page_len), self._fixed is not None]
        self._how = how

    def _ran(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        k, v = paged_kv_cache
        assert k.shape[1:] == (self._how["page_size"], self._how["kv_heads"], q.shape[2])
        assert (q.dtype, k.dtype) == self._how["dtypes"]
        how = {name: self._how[name] for name in ("window_left", "logits_soft_cap", "sm_scale")}
        return type(self).compute(q, k, v, *self._buffers, **how)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        given = tuple(one for one in buffers if one is not None)
        assert len(given) == (3 if use_cuda_graph else 0)
        self._start(kv_layout, (torch.zeros_like(given[0]), *given) if use_cuda_graph else None)
        self._by_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        assert self._by_tensor_cores or num_qo_heads // num_kv_heads in {1, 2, 3, 4, 8}
        self._planned(
            torch.arange(len(last_page_len) + 1, dtype=torch.int32),
            *(indptr, indices, last_page_len),
            kv_heads=num_kv_heads,
            page_size=page_size,
            dtypes=(q_data_type, kv_data_type or q_data_type),
            window_left=window_left,
            logits_soft_cap=logits_soft_cap or 0.0,
            sm_scale=head_dim**-0.5 if sm_scale is None else sm_scale,
        )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._ran(q, paged_kv_cache)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        assert not use_cuda_graph, "steps with prompts are not recorded"
        self._start(kv_layout, None)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        assert causal
        self._planned(
            qo_indptr,
            *(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            kv_heads=num_kv_heads,
            page_size=page_size,
            dtypes=(q_data_type, kv_data_type or q_data_type),
            window_left=window_left,
            logits_soft_cap=logits_soft_cap or 0.0,
            sm_scale=head_dim_qk**-0.5 if sm_scale is None else sm_scale,
        )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> torch.Tensor:
        assert len(q) == int(self._buffers[0][-1])
        return self._ran(q, paged_kv_cache)


# ---- FlashInfer's own classes ------------------------------------------------------------------------


def without_a_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """FlashInfer, where what it compiles is computed in torch, and no memory is pinned; skips without it."""
    library = pytest.importorskip("flashinfer", reason="an extra of its own: see docs/serving.md")
    from flashinfer import decode, prefill  # type: ignore[import-not-found,unused-ignore] # noqa: PLC0415

    empty = torch.empty

    def unpinned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **{**kwargs, "pin_memory": False})

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(decode, "get_batch_prefill_module", _for_prompts)
    monkeypatch.setattr(prefill, "get_batch_prefill_module", _for_prompts)
    monkeypatch.setattr(decode, "get_batch_decode_module", _for_decodes)
    return library


def _for_prompts(backend: str, *of_module: Any) -> Any:
    """The compiled `csrc/batch_prefill.cu`; windows and caps work if it was compiled with them."""
    *_, has_window, has_cap, _ = of_module
    assert backend == "fa2"

    def plan(*args: Any) -> list[int]:
        _, _, _, qo_indptr, kv_indptr, kv_lens, _, batch, *_ = args
        assert {one.dtype for one in (qo_indptr, kv_indptr, kv_lens)} == {torch.int32}
        assert len(args) == 19
        return [batch]

    def paged_run(*args: Any) -> None:
        _, _, _, q, k, v, qo_indptr, kv_indptr, indices, last, out, _, mask_mode, layout, window, *more = args
        assert (layout, k.stride()) == (0, v.stride())
        is_causal = mask_mode == 1
        assert is_causal or (qo_indptr.diff() == 1).all()
        how = {
            "window_left": window if has_window else -1,
            "logits_soft_cap": more[7] if has_cap else 0.0,
            "sm_scale": more[8],
        }
        out.copy_(attended(q, k, v, qo_indptr, kv_indptr, indices, last, **how))

    return SimpleNamespace(plan=plan, paged_run=paged_run)


def _for_decodes(*of_module: Any) -> Any:
    """The compiled `csrc/batch_decode.cu`."""
    *_, has_window, has_cap = of_module

    def plan(*args: Any) -> list[int]:
        _, _, _, indptr, batch, heads, kv_heads, *_ = args
        assert indptr.dtype == torch.int32
        assert heads // kv_heads in {1, 2, 3, 4, 8}
        return [batch]

    def run(*args: Any) -> None:
        _, _, _, q, k, v, kv_indptr, indices, last, out, _, layout, window, *more = args
        assert (layout, k.stride()) == (0, v.stride())
        how = {
            "window_left": window if has_window else -1,
            "logits_soft_cap": more[2] if has_cap else 0.0,
            "sm_scale": more[3],
        }
        out.copy_(attended(q, k, v, torch.arange(len(q) + 1), kv_indptr, indices, last, **how))

    return SimpleNamespace(plan=plan, run=run)
