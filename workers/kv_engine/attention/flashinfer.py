"""Attention over the paged pool by FlashInfer, on GPUs and where it is asked for (`model_kwargs.attention`).

    FlashInfer           steps as they come: planned when their first layer is reached
    RecordedFlashInfer   steps of one size that are recorded: planned before each replay

FlashInfer works out on the host how the spans of a step are shared out over the GPU (`plan`), and writes that
to the device; a layer is computed by it then (`run`). One plan is for all layers that look back equally far
and make their scores alike. Its pages are our blocks, its layout NHD is the pool's: nothing is moved.

A recording has the addresses of a plan's buffers, and of the plan itself some numbers: offsets into them, and
how many programs there are. In its mode for CUDA graphs they follow from the number of rows, and from no
length: so in the source of 0.6.13 (`scheduler.cuh`: `DecodePlan`, `PrefillPlan`). A recording with others
would be wrong, so they are compared with every plan.

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
from workers.kv_engine.node import Node
from workers.kv_engine.step import Int32s, Spans, Step

_LOGGER: Final = logging.getLogger(__name__)

HEAD_DIMS: Final = (64, 128, 256)
"""What its kernels are made and tested for (`flashinfer.aot`); of others some do not compile."""
DTYPES: Final = (torch.float16, torch.bfloat16)

_BACKEND: Final = "fa2"
"""The one whose plans were read; others (mini-sglang) name it for an H200, too."""
_MIN_WORKSPACE_BYTES: Final = 128 << 20
"""As FlashInfer recommends: for what the parts of a span's keys come to, before they are merged."""
_PLAN_BYTES: Final = 1 << 20
"""A recorded plan of thousands of rows has less; FlashInfer would take 8 MiB, for each size."""


def make_kernel(node: Node) -> "FlashInfer":
    """FlashInfer for a node's pool; the log says so.

    Raises:
        ConfigError: it is not here, or does not know such a node.
    """
    if in_the_way := _unsupported(node):
        raise ConfigError(f"model_kwargs.attention: flashinfer {in_the_way}; auto does without it")
    try:
        library: Any = import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(
            f"model_kwargs.attention: flashinfer is here, but not all it needs ({error}): "
            "pip install 'dalsegno[flashinfer]'; auto does without it"
        ) from error
    _LOGGER.info(
        "%s: attention by FlashInfer %s over the paged pool; kernels that it has not compiled before take it "
        "a minute or more now",
        node.name,
        library.__version__,
    )
    return FlashInfer(library, node.device)


def _unsupported(node: Node) -> str:
    """Why it does not attend for a node; empty where it does."""
    if node.device.type != "cuda":
        return f"is for GPUs, and {node.name} is on the CPU"
    if find_spec("flashinfer") is None:
        return "is not installed: pip install 'dalsegno[flashinfer]'"
    if find_spec("flashinfer_jit_cache") is None:  # the kernels, compiled
        if which("ninja") is None:
            return "compiles its kernels by ninja, which is not on the PATH (it came with it: add the folder)"
        if not _has_nvcc():
            return "compiles its kernels by nvcc, which is not here: install the CUDA toolkit (CUDA_HOME)"
    if node.dtype not in DTYPES:
        return f"computes in float16 and bfloat16, and {node.name} is in {node.dtype}: see model_kwargs.dtype"
    if node.layout.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        return f"knows heads of {known} numbers, and those of {node.name} have {node.layout.head_dim}"
    return ""


def _has_nvcc() -> bool:
    """Whether CUDA's compiler is where FlashInfer looks for it."""
    if named := os.environ.get("FLASHINFER_NVCC"):
        return which(named) is not None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and which("nvcc") is not None:
        return True
    return Path(home or "/usr/local/cuda", "bin", "nvcc").exists()


class _LayerKind(NamedTuple):
    """What layers have in common that are computed by one plan."""

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
    def how(self) -> dict[str, Any]:
        """How scores are made, as both kinds of plans are told."""
        return {
            # It counts the keys to the left of a query's own, which is one of our window.
            "window_left": -1 if self.window is None else self.window - 1,
            "logits_soft_cap": self.softcap,
            "sm_scale": self.scaling,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _PageTable:
    """The spans of a step as a plan is told of them: on the host, but for what the device alone reads."""

    queries: torch.Tensor  # (B + 1,) int32, where each span's queries begin
    offsets: torch.Tensor  # (B + 1,) int32, where each span's pages begin
    numbers: torch.Tensor  # (pages,) int32, on the device
    last: torch.Tensor  # (B,) int32, how many keys are in each span's last page

    @classmethod
    def of(cls, spans: Spans, device: torch.device) -> "_PageTable":
        counts = -(-spans.kv_lengths // spans.block_size)
        most = int(counts.max())
        is_page = np.arange(most) < counts[:, None]
        return cls(
            queries=_to_host_copy(spans.query_offsets, device),
            offsets=_to_host_copy(np.concatenate([[0], np.cumsum(counts)]), device),
            numbers=_to_host_copy(spans.block_tables[:, :most][is_page], device).to(device, non_blocking=True),
            last=_to_host_copy(spans.kv_lengths - (counts - 1) * spans.block_size, device),
        )


def _to_host_copy(array: Int32s, device: torch.device) -> torch.Tensor:
    """A copy of its own, that can go to the device while the host goes on."""
    copied = torch.from_numpy(np.array(array, np.int32))
    return copied.pin_memory() if device.type == "cuda" else copied


class _Plan:
    """A wrapper of FlashInfer's, and when it may be planned again."""

    def __init__(self, wrapper: Any, layers: _LayerKind, device: torch.device, *, is_decodes: bool) -> None:
        self._wrapper: Final = wrapper
        self._layers: Final = layers
        self._device: Final = device
        self._is_decodes: Final = is_decodes
        self._copied: Final = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def make(self, pages: _PageTable) -> None:
        """For a step, whose layers are computed next."""
        of_all = (self._layers.heads, self._layers.kv_heads, self._layers.dim, self._layers.block_size)
        where = (pages.offsets, pages.numbers, pages.last)
        if self._copied is not None:
            # A plan is written to memory that is copied from in the background: the last one has to be there.
            self._copied.synchronize()
        if self._is_decodes:
            self._wrapper.plan(*where, *of_all, **self._layers.how)
        else:
            self._wrapper.plan(pages.queries, *where, *of_all, causal=True, **self._layers.how)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))

    def run(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if queries.stride(-1) != 1:
            queries = queries.contiguous()
        shape = (-1, self._layers.block_size, self._layers.kv_heads, self._layers.dim)
        out: torch.Tensor = self._wrapper.run(queries, (keys.view(shape), values.view(shape)))
        return out

    @property
    def numbers(self) -> list[int]:
        """What a recording has of it."""
        return list(self._wrapper._plan_info)  # noqa: SLF001 - nothing else tells, and a wrong one answers wrong


class _PlannedAttention:
    """What layers of one kind have planned computes them; whose plan that is, who plans says."""

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
    """A kernel that plans each step (`kernels.PlanningKernel`), for engines of one thread.

    Args:
        library: the package, or what stands for it.
    """

    def __init__(self, library: Any, device: torch.device) -> None:
        self.library: Final = library
        self.device: Final = device
        self._workspace: torch.Tensor | None = None
        self._plans: dict[tuple[_LayerKind, bool], _Plan] = {}
        self._step: Step | None = None
        self._pages: _PageTable | None = None
        self._made: set[tuple[_LayerKind, bool]] = set()

    def _planned(self, layers: _LayerKind, step: Step) -> _Plan:
        kind = layers, int(step.spans.query_offsets[-1]) == len(step.rows)
        if step is not self._step or self._pages is None:
            self._step, self._pages, self._made = step, _PageTable.of(step.spans, self.device), set()
        if kind not in self._plans:
            self._plans[kind] = self._plan(*kind)
        if kind not in self._made:
            self._plans[kind].make(self._pages)
            self._made.add(kind)
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
        """So much memory at least, that all plans share: it holds nothing from one layer to the next."""
        if self._workspace is None or self._workspace.nbytes < nbytes:
            self._workspace = torch.zeros(
                max(nbytes, _MIN_WORKSPACE_BYTES), dtype=torch.uint8, device=self.device
            )
        return self._workspace


class RecordedFlashInfer(_PlannedAttention):
    """Of the steps of one size (`kernels.RecordedKernel`), over buffers of its own.

    It plans when layers of a kind are first reached, which is before anything is recorded.
    """

    def __init__(self, whole: FlashInfer) -> None:
        self._whole: Final = whole
        self._plans: dict[_LayerKind, _Plan] = {}
        self._numbers: dict[_LayerKind, list[int]] = {}

    def _planned(self, layers: _LayerKind, step: Step) -> _Plan:
        if layers not in self._plans:
            plan = self._plan(layers, len(step.rows), len(step.rows) * step.block_table.shape[1])
            plan.make(_PageTable.of(step.spans, self._whole.device))
            self._plans[layers], self._numbers[layers] = plan, plan.numbers
        return self._plans[layers]

    def plan(self, step: Step) -> None:
        """See `RecordedKernel`."""
        pages = _PageTable.of(step.spans, self._whole.device)
        for layers, plan in self._plans.items():
            plan.make(pages)
            if plan.numbers != self._numbers[layers]:
                raise BugError(
                    f"FlashInfer plans {plan.numbers} for a step that was recorded with "
                    f"{self._numbers[layers]}; model_kwargs.attention: triton does without it"
                )

    def _plan(self, layers: _LayerKind, rows: int, most_pages: int) -> _Plan:
        device = self._whole.device
        workspace = self._whole.workspace(_workspace_bytes(layers, _processors(device), rows))

        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        wrapper = self._whole.library.BatchDecodeWithPagedKVCacheWrapper(
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
    """Whether decodes go through the kernel of prompts; `group` heads share their keys.

    The other one knows groups of 1, 2, 3, 4 and 8 alone; and where 4 and more queries share what is read,
    others (mini-sglang) take tensor cores too.
    """
    return group >= 4


def _workspace_bytes(layers: _LayerKind, processors: int, rows: int | None = None) -> int:
    """What the parts of spans take at most, before they are merged: a float32 for each of a tile's numbers.

    A tile is of so many queries times heads; keys are cut until each processor has two programs. In a
    recording of `rows` decodes there are as many programs for every step as for the one that needs most.
    """
    tile, programs = 128, 2 * processors // layers.kv_heads
    if rows is not None:
        tile = next(size for size in (16, 64, 128) if layers.group <= size or size == 128)
        programs = max(programs, -(-rows * layers.group // tile) + rows - 1)
    return layers.heads * programs * tile * (layers.dim + 1) * 4


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
