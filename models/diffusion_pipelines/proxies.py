"""A pipeline of diffusers that stops at each call of its denoiser, and ends where the VAE would decode.

The pipeline's own `__call__` runs in a greenlet. In the place of its modules are proxies: a call of one
switches to the greenlet that started the run, which answers with the module's output. So the loop, the
scheduler and the guidance are diffusers' own, and the calls of many runs can be computed together.

Runs are interleaved in one thread that is in inference mode throughout: a `no_grad` block that a run has open
at a switch changes nothing for the others.
"""

import copy
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import greenlet
import torch


@dataclass(frozen=True, slots=True, eq=False)
class ModuleCall:
    """A call of a proxied module, with the arguments of its `forward`."""

    module: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Decoding(Exception):  # noqa: N818 - the normal end of a run
    """The pipeline has asked its VAE to decode: all steps are done.

    Attributes:
        args: of `decode`, by position.
        kwargs: of `decode`, by name.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("the pipeline decodes")
        self.args, self.kwargs = args, kwargs


class ModuleProxy(torch.nn.Module):
    """A module whose calls are computed by the greenlet above; everything else is the module's own."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        super().__init__()
        self.__dict__["real"] = module
        self.__dict__["called"] = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)

    @property
    def dtype(self) -> torch.dtype:
        """The module's."""
        found: torch.dtype = self.__dict__["real"].dtype
        return found

    @property
    def device(self) -> torch.device:
        """The module's."""
        found: torch.device = self.__dict__["real"].device
        return found

    def cache_context(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """Do nothing: the module keeps nothing between the calls of different runs."""
        return nullcontext()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the module's output."""
        return above().switch(ModuleCall(self.__dict__["called"], args, kwargs))


class VaeProxy(ModuleProxy):
    """A VAE whose decoder is on another node."""

    def __init__(self, vae: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(vae, "vae")
        self.__dict__["stated"] = (dtype, device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it was loaded in: it may have no parameters left."""
        found: torch.dtype = self.__dict__["stated"][0]
        return found

    @property
    def device(self) -> torch.device:
        """The device of the run."""
        found: torch.device = self.__dict__["stated"][1]
        return found

    def encode(self, pixels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Encode an input image, in the VAE's own dtype: some classes pass that of the denoiser."""
        return self.__dict__["real"].encode(pixels.to(self.dtype), *args, **kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """End the run."""
        raise Decoding(args, kwargs)


def above() -> greenlet.greenlet:
    """The greenlet that runs this one.

    Raises:
        RuntimeError: there is none: a proxy was called outside of a run.
    """
    parent = greenlet.getcurrent().parent
    if parent is None:
        raise RuntimeError("a proxied module was called outside of a run")
    return parent


def pipeline_of_run(pipeline: Any, replaced: Mapping[str, Any]) -> Any:
    """A pipeline for one run: it shares the modules, and has its own attributes and scheduler.

    Args:
        pipeline: as it was loaded.
        replaced: attributes of the run's pipeline in the place of the others: proxies, methods.
    """
    own = copy.copy(pipeline)
    own.__dict__ = dict(pipeline.__dict__)
    own.__dict__["scheduler"] = copy.deepcopy(pipeline.scheduler)
    own.__dict__ |= replaced
    own.set_progress_bar_config(disable=True)
    return own


def module_proxies(pipeline: Any, names: Iterable[str]) -> dict[str, ModuleProxy]:
    """The proxies of the modules of these names that the pipeline has."""
    found = {name: pipeline.__dict__.get(name) for name in names}
    return {name: ModuleProxy(module, name) for name, module in found.items() if module is not None}
