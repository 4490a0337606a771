"""Which kernels compute on a device, and what they lack where they do not.

    choose_attention      attention over the paged pool: of every model, as `model_kwargs.attention` says
    default_kernel        our own of it, where a device has one: what computes where nothing is said
    use_gpu_kernels    a node whose layers our kernels compute: of the models they know

Else torch and transformers' modules compute. What a CPU has of this is `use_cpu_kernels` in
`workers.cpu_kernels.decoder`.
"""

import logging
import os
import sysconfig
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Final, Literal, Protocol, runtime_checkable

import torch

from configs.deployment import ConfigError
from workers.kv_engine.node import Node
from workers.kv_engine.step import Step

_LOGGER: Final = logging.getLogger(__name__)


class AttentionKernel(Protocol):
    """Each token of a step attends to its span's history in the pool: (T, H, D) to (T, H, D)."""

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
    ) -> torch.Tensor: ...


class RecordedKernel(AttentionKernel, Protocol):
    """One that has planned the step it computes; of steps of one size, which are recorded."""

    def plan(self, step: Step) -> None:
        """Have what was recorded compute `step`, which has as many spans; before each replay."""
        ...


@runtime_checkable
class PlanningKernel(AttentionKernel, Protocol):
    """A kernel that works out on the host how each step is computed: a recording of it has to be told."""

    def recorded(self) -> RecordedKernel:
        """One for the steps of one size that are recorded, over buffers that stay where they are."""
        ...


def choose_attention(node: Node, wanted: Literal["auto", "triton", "flashinfer"]) -> AttentionKernel | None:
    """Who attends for a node over the paged pool, as it is wanted; None is torch. On a GPU the log says who.

    Raises:
        ConfigError: who was named cannot do it here.
    """
    if wanted == "flashinfer":
        flashinfer: AttentionKernel = import_module("workers.kv_engine.attention.flashinfer").make_kernel(
            node
        )
        return flashinfer
    kernel = default_kernel(node.device.type)
    if kernel is not None:
        _LOGGER.info("%s: attention by the Triton kernel over the paged pool", node.name)
    elif wanted == "triton":
        lacks = _missing_for_triton() if node.device.type == "cuda" else f"a GPU, and {node.name} is on the CPU"
        raise ConfigError(f"model_kwargs.attention: triton needs {lacks}; auto is whatever there is")
    return kernel


@cache
def default_kernel(device_type: str) -> AttentionKernel | None:
    """Our own kernel for a type of devices; None where there is none: the first time it is said why.

    Triton comes with torch where there is CUDA; a torch that was built otherwise may be without it. It
    compiles from C what hands a kernel its arguments.
    """
    if device_type != "cuda":
        return None
    if missing := _missing_for_triton():
        _LOGGER.warning(
            "GPUs compute without our own kernels, which is slower: transformers' modules compute the "
            "layers, torch attends unless model_kwargs.attention names another, and what torch attends to "
            "is not recorded in CUDA graphs; our kernels need %s",
            missing,
        )
        return None
    kernel: AttentionKernel = import_module("workers.kv_engine.attention.triton").attend
    return kernel


def _missing_for_triton() -> str:
    """What Triton lacks; empty where it lacks nothing."""
    if find_spec("triton") is None:
        return "Triton, the version that this torch names (pip install triton)"
    named = os.environ.get("CC")
    if not any(which(name) for name in ([named] if named else ["gcc", "clang"])):
        return "a C compiler (apt install gcc libc6-dev, or name it: CC)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "Python's headers (apt install python3-dev)"
    return ""
