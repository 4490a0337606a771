"""The interface of attention kernels, and the choice of one for a device or a node.

    choose_attention   the kernel for a node, as `model_kwargs.attention` asks
    default_kernel     this project's Triton kernel, on devices that can run it
    kernel_for         the same, if it computes the forms of attention that a model needs

A node without a kernel is served by torch (`workers.kv_engine.attention.paged`).
"""

import logging
import os
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Final, Literal, Protocol, runtime_checkable

import torch

from configs.deployment import ConfigError
from workers.kv_engine.node import CAUSAL_ONLY, KVNode
from workers.kv_engine.step import Step

_LOGGER: Final = logging.getLogger(__name__)


class AttentionKernel(Protocol):
    """An attention kernel: each token of a step attends to its span in the pool, (T, H, D) to (T, H, D).

    A kernel for more masks than the causal one has an attribute `masks` (`masks_of`), and one for more than
    keys and values of one shape in all layers an attribute `forms` (`forms_of`).
    """

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
    """A kernel whose launches are recorded for steps of one size; it plans each step before the replay."""

    def plan(self, step: Step) -> None:
        """Prepare the recorded launches for `step`, which has as many spans. Call it before each replay."""
        ...


@runtime_checkable
class PlanningKernel(AttentionKernel, Protocol):
    """A kernel that plans each step on the host. A CUDA graph of it needs a new plan before each replay."""

    def recorded(self) -> RecordedKernel:
        """Return a kernel for recorded steps of one size, whose buffers keep their addresses."""
        ...


def masks_of(kernel: AttentionKernel) -> frozenset[str]:
    """Return the masks that a kernel computes: `causal`, and `full` for ranges of keys (`Step.key_ends`)."""
    masks: frozenset[str] = getattr(kernel, "masks", CAUSAL_ONLY)
    return masks


def forms_of(kernel: AttentionKernel) -> frozenset[str]:
    """Return the forms of attention that a kernel computes, of those that a layout may need.

    `sinks` are logits that take part in the softmax alone, `chunks` are ranges of the text whose tokens see
    no earlier range, `cells` are layers whose keys and values are of other shapes, and `indexes` layers whose
    tokens see the keys that an indexer has chosen.
    """
    forms: frozenset[str] = getattr(kernel, "forms", frozenset())
    return forms


def kernel_for(device_type: str, needs: frozenset[str]) -> AttentionKernel | None:
    """Return the default kernel of this type of device if it computes these forms; None stands for torch."""
    kernel = default_kernel(device_type)
    if kernel is None or needs <= forms_of(kernel):
        return kernel
    _warn_of_forms(getattr(kernel, "__name__", type(kernel).__name__), ", ".join(sorted(needs)))
    return None


@cache
def _warn_of_forms(kernel: str, forms: str) -> None:
    _LOGGER.warning(
        "torch computes attention, and steps are not recorded in CUDA graphs: this model needs %s, which the "
        "kernel %s does not compute; it is slower",
        forms,
        kernel,
    )


def warn_of_mask(kernel: AttentionKernel) -> None:
    """Log, once per kernel, that torch computes steps whose mask the kernel lacks."""
    _warn_of_mask(getattr(kernel, "__name__", type(kernel).__name__))


@cache
def _warn_of_mask(kernel: str) -> None:
    _LOGGER.warning(
        "torch computes attention in steps with tokens that see later ones (images, programs): the kernel %s "
        "is for causal masks; those steps are slower",
        kernel,
    )


def choose_attention(node: KVNode, wanted: Literal["auto", "triton", "flashinfer"]) -> AttentionKernel | None:
    """Return the kernel that attends for `node`; None stands for torch. On a GPU the choice is logged.

    Raises:
        ConfigError: `wanted` names a kernel that cannot run here.
    """
    if wanted == "flashinfer":
        from workers.kv_engine.attention.flashinfer import make_kernel  # noqa: PLC0415 - only if asked for

        return make_kernel(node)
    kernel = kernel_for(node.device.type, node.layout.needs)
    if kernel is not None:
        _LOGGER.info("%s: attention by the Triton kernel over the paged pool", node.name)
    elif wanted == "triton":
        is_gpu = node.device.type == "cuda"
        lacks = f"a GPU, and {node.name} is on the CPU"
        if is_gpu:
            lacks = _missing_for_triton() or f"a model without {', '.join(sorted(node.layout.needs))}"
        raise ConfigError(f"model_kwargs.attention: triton needs {lacks}; auto uses what is available")
    return kernel


@cache
def default_kernel(device_type: str) -> AttentionKernel | None:
    """Return the Triton kernel if this type of device can run it, else None.

    Triton is installed with CUDA builds of torch, but not with every other build. It needs a C compiler and
    Python's headers to compile its launchers. The first call logs a missing dependency.
    """
    if device_type != "cuda":
        return None
    if missing := _missing_for_triton():
        _LOGGER.warning(
            "the Triton kernels cannot run, so this GPU is slower: transformers' modules compute the layers, "
            "torch computes attention (unless model_kwargs.attention names another kernel), and steps with "
            "torch's attention are not recorded in CUDA graphs; the Triton kernels need %s",
            missing,
        )
        return None
    from workers.kv_engine.attention.triton import attend  # noqa: PLC0415 - needs Triton

    return attend


def _missing_for_triton() -> str:
    """The dependency that Triton lacks, with the command that installs it; empty if none."""
    if find_spec("triton") is None:
        return "Triton, in the version that this torch requires (pip install triton)"
    named = os.environ.get("CC")
    if not any(which(name) for name in ([named] if named else ["gcc", "clang"])):
        return "a C compiler (apt install gcc libc6-dev, or name one in CC)"
    # Debian's own Python names a folder for local installations, and Triton looks into the other one.
    folders = {sysconfig.get_path("include"), sysconfig.get_path("include", "posix_prefix")}
    if not any(Path(folder, "Python.h").exists() for folder in folders):
        return "Python's headers (apt install python3-dev)"
    return ""
