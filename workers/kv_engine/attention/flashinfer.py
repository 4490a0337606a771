"""FlashInfer's attention over the paged pool, on GPUs, chosen by `model_kwargs.attention: flashinfer`.

    FlashInfer           steps that run unrecorded: planned when their first layer is reached
    RecordedFlashInfer   recorded steps of one size: planned before each replay

FlashInfer computes on the host how a step's spans are distributed over the GPU (`plan`) and copies that to
the device; then each layer is computed with it (`run`). One plan serves all layers with the same window,
scaling and shape. A FlashInfer page is a block of the pool, and its layout NHD is the pool's layout, so no
data moves.

A CUDA graph contains the addresses of a plan's buffers and some numbers of the plan: offsets into the buffers
and the number of programs. In FlashInfer's mode for CUDA graphs these numbers depend on the number of rows
and not on any length (source of 0.6.13, `scheduler.cuh`: `DecodePlan`, `PrefillPlan`). A graph with other
numbers would compute wrong results, so they are compared for every plan.

This code has been tested on CPUs only, against a reference implementation of FlashInfer's classes.

Ye et al. 2025, arXiv 2501.01005.
"""

import logging
import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from configs.deployment import ConfigError
from shared.errors import BugError
from workers.kv_engine.node import KVNode
from workers.kv_engine.step import Int32s, Spans, Step

_LOGGER: Final = logging.getLogger(__name__)

HEAD_DIMS: Final = (64, 128, 256)
"""The head dimensions that FlashInfer's kernels are built and tested for (`flashinfer.aot`)."""
DTYPES: Final = (torch.float16, torch.bfloat16)

_BACKEND: Final = "fa2"
"""The backend whose plans were reviewed; mini-sglang also names it for an H200."""
_MIN_WORKSPACE_BYTES: Final = 128 << 20
"""FlashInfer's recommendation; it holds partial results of spans before they are merged."""
_PLAN_BYTES: Final = 1 << 20
"""A recorded plan of thousands of rows needs less; FlashInfer would take 8 MiB for each size."""


def make_kernel(node: KVNode) -> "FlashInfer":
    """Return a FlashInfer kernel for the node's pool, and log it.

    Raises:
        ConfigError: FlashInfer is not installed completely, or does not support the node.
    """
    if reason := _unsupported(node):
        raise ConfigError(f"model_kwargs.attention: flashinfer {reason}; auto does not need it")
    try:
        library: Any = import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(
            f"model_kwargs.attention: flashinfer is installed, but a dependency is missing ({error}): "
            "pip install 'dalsegno[flashinfer]'; auto does not need it"
        ) from error
    _LOGGER.info(
        "%s: attention by FlashInfer %s over the paged pool; kernels that are not compiled yet take a minute "
        "or more",
        node.name,
        library.__version__,
    )
    return FlashInfer(library, node.device)


def _unsupported(node: KVNode) -> str:
    """The reason why FlashInfer cannot attend for the node; empty if it can."""
    if node.device.type != "cuda":
        return f"runs on GPUs, and {node.name} is on the CPU"
    if find_spec("flashinfer") is None:
        return "is not installed: pip install 'dalsegno[flashinfer]'"
    if find_spec("flashinfer_jit_cache") is None:  # the precompiled kernels
        if which("ninja") is None:
            return "compiles kernels with ninja, which is not on the PATH: add the folder of pip's scripts"
        if not _has_nvcc():
            return "compiles its kernels with nvcc, which was not found: install the CUDA toolkit (CUDA_HOME)"
    if node.dtype not in DTYPES:
        return f"supports float16 and bfloat16, and {node.name} is in {node.dtype}: see model_kwargs.dtype"
    if node.layout.needs:
        return f"does not compute {', '.join(sorted(node.layout.needs))}, which {node.name} needs"
    if node.layout.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        return f"supports heads of {known} numbers, and those of {node.name} have {node.layout.head_dim}"
    return ""


def _has_nvcc() -> bool:
    """Return True if CUDA's compiler is where FlashInfer looks for it."""
    if named := os.environ.get("FLASHINFER_NVCC"):
        return which(named) is not None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and which("nvcc") is not None:
        return True
    return Path(home or "/usr/local/cuda", "bin", "nvcc").exists()


class _LayerKind(NamedTuple):
    """The properties of layers that can share a plan."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    block_size: int
    scaling: float | None
    window: int | None
    softcap: float | None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def plan_options(self) -> dict[str, Any]:
        """The keyword arguments of `plan` that describe the scores."""
        return {
            # FlashInfer's window does not count the query's own key; `window` does.
            "window_left": -1 if self.window is None else self.window - 1,
            "logits_soft_cap": self.softcap,
            "sm_scale": self.scaling,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _PageTable:
    """The spans of a step in FlashInfer's format: on the host, except for the page numbers."""

    query_offsets: torch.Tensor  # (B + 1,) int32, the first query of each span
    page_offsets: torch.Tensor  # (B + 1,) int32, the first page of each span
    page_ids: torch.Tensor  # (pages,) int32, on the device
    last_page_lengths: torch.Tensor  # (B,) int32, the number of keys in each span's last page

    @classmethod
    def of(cls, spans: Spans, device: torch.device) -> "_PageTable":
        counts = -(-spans.kv_lengths // spans.block_size)
        max_pages = int(counts.max())
        is_page = np.arange(max_pages) < counts[:, None]
        return cls(
            query_offsets=_to_host_copy(spans.query_offsets, device),
            page_offsets=_to_host_copy(np.concatenate([[0], np.cumsum(counts)]), device),
            page_ids=_to_host_copy(spans.block_tables[:, :max_pages][is_page], device).to(
                device, non_blocking=True
            ),
            last_page_lengths=_to_host_copy(spans.kv_lengths - (counts - 1) * spans.block_size, device),
        )


def _to_host_copy(array: Int32s, device: torch.device) -> torch.Tensor:
    """Return a copy, in pinned memory for a GPU, so that it can be transferred in the background."""
    copied = torch.from_numpy(np.array(array, np.int32))
    return copied.pin_memory() if device.type == "cuda" else copied


class _Plan:
    """One FlashInfer wrapper, and the event after which it may be planned again."""

    def __init__(self, wrapper: Any, layers: _LayerKind, device: torch.device, *, is_decodes: bool) -> None:
        self._wrapper: Final = wrapper
        self._layers: Final = layers
        self._device: Final = device
        self._is_decodes: Final = is_decodes
        self._copied: Final = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def make(self, pages: _PageTable) -> None:
        """Plan the step whose layers are computed next."""
        shape = (self._layers.heads, self._layers.kv_heads, self._layers.dim, self._layers.block_size)
        pages_of_step = (pages.page_offsets, pages.page_ids, pages.last_page_lengths)
        if self._copied is not None:
            # `plan` writes to memory that is copied in the background: wait for the last copy.
            self._copied.synchronize()
        if self._is_decodes:
            self._wrapper.plan(*pages_of_step, *shape, **self._layers.plan_options)
        else:
            self._wrapper.plan(
                pages.query_offsets, *pages_of_step, *shape, causal=True, **self._layers.plan_options
            )
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))

    def run(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if queries.stride(-1) != 1:
            queries = queries.contiguous()
        shape = (-1, self._layers.block_size, self._layers.kv_heads, self._layers.dim)
        out: torch.Tensor = self._wrapper.run(queries, (keys.view(shape), values.view(shape)))
        return out

    @property
    def captured_numbers(self) -> list[int]:
        """The numbers of the plan that a CUDA graph contains."""
        return list(self._wrapper._plan_info)  # noqa: SLF001 - there is no public access


class _PlannedAttention:
    """Attention by a plan for the kind of layer; subclasses choose the plan."""

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        step: Step,
        *,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        layers = _LayerKind(
            heads=queries.shape[1],
            kv_heads=keys.shape[1],
            dim=keys.shape[2],
            dtype=keys.dtype,
            block_size=step.spans.block_size,
            scaling=scaling,
            window=window,
            softcap=softcap,
        )
        return self._planned(layers, step).run(queries, keys, values)

    def _planned(self, layers: _LayerKind, step: Step) -> _Plan:
        raise NotImplementedError


class FlashInfer(_PlannedAttention):
    """An attention kernel that plans each step (`kernels.PlanningKernel`), for one thread.

    Args:
        library: the `flashinfer` package, or a replacement in tests.
    """

    def __init__(self, library: Any, device: torch.device) -> None:
        self.library: Final = library
        self.device: Final = device
        self._workspace: torch.Tensor | None = None
        self._plans: dict[tuple[_LayerKind, bool], _Plan] = {}
        self._step: Step | None = None
        self._pages: _PageTable | None = None
        self._planned_kinds: set[tuple[_LayerKind, bool]] = set()

    def _planned(self, layers: _LayerKind, step: Step) -> _Plan:
        kind = layers, int(step.spans.query_offsets[-1]) == len(step.rows)
        if step is not self._step or self._pages is None:
            self._step, self._pages, self._planned_kinds = step, _PageTable.of(step.spans, self.device), set()
        if kind not in self._plans:
            self._plans[kind] = self._plan(*kind)
        if kind not in self._planned_kinds:
            self._plans[kind].make(self._pages)
            self._planned_kinds.add(kind)
        return self._plans[kind]

    def recorded(self) -> "RecordedFlashInfer":
        return RecordedFlashInfer(self)

    def _plan(self, layers: _LayerKind, is_decodes: bool) -> _Plan:
        workspace = self.workspace(_workspace_bytes(layers, _processors(self.device)))
        if is_decodes:
            wrapper = self.library.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=uses_tensor_cores(layers.group), backend=_BACKEND
            )
        else:
            wrapper = self.library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=_BACKEND)
        return _Plan(wrapper, layers, self.device, is_decodes=is_decodes)

    def workspace(self, nbytes: int) -> torch.Tensor:
        """Return at least `nbytes` of memory. All plans share it: it holds nothing between layers."""
        if self._workspace is None or self._workspace.nbytes < nbytes:
            self._workspace = torch.zeros(
                max(nbytes, _MIN_WORKSPACE_BYTES), dtype=torch.uint8, device=self.device
            )
        return self._workspace


class RecordedFlashInfer(_PlannedAttention):
    """The kernel of recorded steps of one size (`kernels.RecordedKernel`), with its own buffers.

    It makes the first plan of a kind of layer when such a layer is first reached, before recording begins.
    """

    def __init__(self, kernel: FlashInfer) -> None:
        self._kernel: Final = kernel
        self._plans: dict[_LayerKind, _Plan] = {}
        self._numbers: dict[_LayerKind, list[int]] = {}

    def _planned(self, layers: _LayerKind, step: Step) -> _Plan:
        if layers not in self._plans:
            plan = self._plan(layers, len(step.rows), len(step.rows) * step.block_table.shape[1])
            plan.make(_PageTable.of(step.spans, self._kernel.device))
            self._plans[layers], self._numbers[layers] = plan, plan.captured_numbers
        return self._plans[layers]

    def plan(self, step: Step) -> None:
        """See `RecordedKernel`."""
        pages = _PageTable.of(step.spans, self._kernel.device)
        for layers, plan in self._plans.items():
            plan.make(pages)
            if plan.captured_numbers != self._numbers[layers]:
                raise BugError(
                    f"FlashInfer plans {plan.captured_numbers} for a step that was recorded with "
                    f"{self._numbers[layers]}: expected the same numbers; set model_kwargs.attention: triton"
                )

    def _plan(self, layers: _LayerKind, rows: int, most_pages: int) -> _Plan:
        device = self._kernel.device
        workspace = self._kernel.workspace(_workspace_bytes(layers, _processors(device), rows))

        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        wrapper = self._kernel.library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=uses_tensor_cores(layers.group),
            paged_kv_indptr_buffer=buffer(rows + 1),
            paged_kv_indices_buffer=buffer(most_pages),
            paged_kv_last_page_len_buffer=buffer(rows),
            backend=_BACKEND,
        )
        wrapper.reset_workspace_buffer(workspace, torch.zeros(_PLAN_BYTES, dtype=torch.uint8, device=device))
        return _Plan(wrapper, layers, device, is_decodes=True)


def uses_tensor_cores(group: int) -> bool:
    """Return True if decodes use the prefill kernel, for `group` heads that share their keys.

    The decode kernel supports groups of 1, 2, 3, 4 and 8 only. For 4 and more queries per key, mini-sglang
    uses tensor cores, too.
    """
    return group >= 4


def _workspace_bytes(layers: _LayerKind, processors: int, rows: int | None = None) -> int:
    """The most bytes of partial results of split spans, in float32.

    A tile holds a fixed number of queries times heads; keys are split until each processor has two programs.
    A recording of `rows` decodes has the same number of programs for every step: that of the step that needs
    most.
    """
    tile, programs = 128, 2 * processors // layers.kv_heads
    if rows is not None:
        tile = next(size for size in (16, 64, 128) if layers.group <= size or size == 128)
        programs = max(programs, -(-rows * layers.group // tile) + rows - 1)
    return layers.heads * programs * tile * (layers.dim + 1) * 4


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
