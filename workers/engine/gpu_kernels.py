"""Whether our own kernels compute on a device, and what they lack where they do not.

    kernel_for        attention over the paged pool: of every model
    by_gpu_kernels    a node whose layers they compute: of the models they know

Else torch and transformers' modules compute. What a CPU has of this is `by_cpu_kernels` in
`workers.kernels.decoder`.
"""

import logging
import os
import sysconfig
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Final, Protocol

import torch

from workers.engine.node import Node
from workers.engine.step import Step

_LOGGER: Final = logging.getLogger(__name__)


class Kernel(Protocol):
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


@cache
def kernel_for(device_type: str) -> Kernel | None:
    """The kernel for a type of devices; the first time it is asked, it is said.

    Triton comes with torch where there is CUDA; a torch that was built otherwise may be without it. It
    compiles from C what hands a kernel its arguments.
    """
    if device_type != "cuda":
        return None
    if missing := _missing():
        _LOGGER.warning(
            "GPUs compute by torch and transformers' modules alone, which is slower, and steps are not "
            "recorded in CUDA graphs: our kernels need %s",
            missing,
        )
        return None
    _LOGGER.info("attention on GPUs: Triton kernel over the paged pool")
    kernel: Kernel = import_module("workers.engine.triton_attention").attend
    return kernel


def _missing() -> str:
    """What Triton lacks; empty where it lacks nothing."""
    if find_spec("triton") is None:
        return "Triton, the version that this torch names (pip install triton)"
    named = os.environ.get("CC")
    if not any(which(name) for name in ([named] if named else ["gcc", "clang"])):
        return "a C compiler (apt install gcc libc6-dev, or name it: CC)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "Python's headers (apt install python3-dev)"
    return ""


def by_gpu_kernels(node: Node) -> Node:
    """The node, computed by our own kernels where its device has them and they know it; else as it is.

    Call it before the node is proven.
    """
    if kernel_for(node.device.type) is None:
        return node
    fused: Node = import_module("workers.engine.gpu_decoder").fused(node)
    return fused
