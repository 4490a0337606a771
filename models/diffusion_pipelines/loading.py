"""Loading of some components of a pipeline; the others are descriptions without weights, or absent.

Nothing is fetched over a network, no pickle is read, and no code of the folder is executed.
"""

import importlib.util
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.checkpoints.progress import Progress
from models.diffusion_pipelines.components import (
    DENOISERS,
    MODEL_INDEX,
    Component,
    Index,
    Weights,
    component_class,
    read_index,
    weights_of,
)
from models.transformers_lm.architecture import choose_dtype

_DESCRIBED: Final = (*DENOISERS, "vae", "sound_tokenizer")
"""The components that a class reads attributes of, also where their weights are on another node."""

_FLAG_OF: Final = {"Cosmos3OmniPipeline": "enable_safety_checker"}
"""Classes whose checker `model_index.json` need not state."""


class Described:
    """A module without weights. It is no `torch.nn.Module`: a pipeline's device is that of its first module.

    Attributes:
        device: of the pipeline's other modules.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self.real = module
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)


class Loader:
    """Loads a pipeline of a folder, for one node.

    Args:
        safety_checker: False: a pipeline that has one is loaded without it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: str | torch.device,
        dtype: str,
        progress: Progress,
        safety_checker: bool = True,
    ) -> None:
        self.index: Final[Index] = read_index(folder)
        self.device: Final = torch.device(device)
        self._folder, self._dtype, self._progress = folder, dtype, progress
        self._with_checker = safety_checker

    @property
    def safety_checker(self) -> str:
        """The safety checker of the pipeline: `on`, `off`, or `none` if it has none."""
        has = "safety_checker" in self.index.components or self.index.settings.get("enable_safety_checker")
        if not has:
            return "none"
        return "on" if self._with_checker else "off"

    def pipeline(self, real: Collection[str]) -> Any:
        """Load a pipeline.

        Args:
            real: the components with weights that are loaded. Those of the denoiser, the VAE and a sound
                tokenizer are on the meta device otherwise, further ones are None. Components without
                weights, such as schedulers, are always there.

        Raises:
            CheckpointError: a file is missing or damaged; it names the file.
            UnsupportedArchitectureError: the class is unknown to the installed libraries.
        """
        real = [name for name in real if self._with_checker or name != "safety_checker"]
        weights = {name: weights_of(self._folder, self.index.components[name]) for name in real}
        dtypes = self._dtypes(weights)
        given = {
            name: self._described(component, dtypes)
            for name, component in self.index.components.items()
            if name not in real and self._is_replaced(name)
        }
        pipeline = self._from_pretrained(weights, dtypes, given)
        for name, module in given.items():
            if module is not None:
                pipeline.__dict__[name] = Described(module, self.device)
        for name in real:
            module = getattr(pipeline, name)
            if isinstance(module, torch.nn.Module):
                module.to(self.device).eval().requires_grad_(False)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def _is_replaced(self, name: str) -> bool:
        component = self.index.components[name]
        heavy = name in _DESCRIBED or name in ("image_encoder", "safety_checker", "prior")
        return heavy or component.is_text

    def _described(self, component: Component, dtypes: Mapping[str, torch.dtype]) -> Any:
        """A component without weights: its configuration and attributes; None where no class reads them."""
        if component.name not in _DESCRIBED:
            return None
        from accelerate import init_empty_weights  # noqa: PLC0415 - an extra

        kind = component_class(component, self._folder)
        try:
            with _quiet(), init_empty_weights():
                config = kind.load_config(self._folder / component.name, local_files_only=True)
                return kind.from_config(config).to(dtypes.get(component.name, torch.float32)).eval()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{self._folder / component.name} cannot be read: {error}") from error

    def _dtypes(self, weights: Mapping[str, Weights]) -> dict[str, torch.dtype]:
        """The type of each component: text encoders and denoisers have that of the denoiser.

        The others keep the type that they are stored in. A VAE that overflows in float16 is float32.
        """
        first = next((name for name in DENOISERS if name in self.index.components), None)
        shared = torch.float32
        if first is not None:
            found = weights.get(first) or weights_of(self._folder, self.index.components[first])
            shared = choose_dtype(self._dtype, self.device, found.shards)
        made = {}
        for name, component in self.index.components.items():
            own = weights.get(name)
            if name in DENOISERS or component.is_text:
                made[name] = shared
            elif own is not None and own.shards:
                made[name] = choose_dtype("auto", self.device, own.shards)
            if name == "vae" and made.get(name) is torch.float16:
                made[name] = torch.float32
        return made

    def _from_pretrained(
        self, weights: Mapping[str, Weights], dtypes: Mapping[str, torch.dtype], given: Mapping[str, Any]
    ) -> Any:
        kind = pipeline_class(self.index, self._folder)
        variants = {one.variant for one in weights.values() if one.variant}
        total, done = sum(one.nbytes for one in weights.values()), 0
        for name, one in weights.items():
            self._progress(done, total, name)
            done += one.nbytes
        options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, **given}
        if variants:
            options["variant"] = variants.pop()
        if not self._with_checker:
            options |= _unchecked(self.index)
        types = {name: dtype for name, dtype in dtypes.items() if name not in given}
        try:
            with _quiet():
                return kind.from_pretrained(
                    self._folder, torch_dtype={"default": torch.float32, **types}, **options
                )
        except CheckpointError:
            raise
        except (
            OSError,
            ValueError,
            RuntimeError,
            TypeError,
            KeyError,
            ImportError,
            SafetensorError,
        ) as error:
            off = "; or switch the checker off (model_kwargs: safety_checker: false)"
            raise CheckpointError(
                f"{self._folder} cannot be loaded as a {self.index.kind}: {error}; see the folders of "
                f"{', '.join(weights) or 'its components'}{off if self.safety_checker == 'on' else ''}"
            ) from error


def _unchecked(index: Index) -> dict[str, Any]:
    """The arguments that load a pipeline without its safety checker."""
    stated = index.settings | index.components
    flags = ("requires_safety_checker", "enable_safety_checker")
    off: dict[str, Any] = {
        flag: False for flag in flags if flag in index.settings or flag == _FLAG_OF.get(index.kind)
    }
    return off | ({"safety_checker": None} if "safety_checker" in stated else {})


def pipeline_class(index: Index, folder: Path) -> Any:
    """The class of a pipeline in diffusers.

    Raises:
        UnsupportedArchitectureError: the installed diffusers has no such class.
    """
    if importlib.util.find_spec("diffusers") is None:
        raise UnsupportedArchitectureError(
            f"{folder} is a pipeline of diffusers, which is not installed: pip install 'dalsegno[diffusers]'"
        )
    import diffusers  # noqa: PLC0415 - seconds

    try:
        return getattr(diffusers, index.kind)
    except (AttributeError, RuntimeError, ImportError) as error:
        raise UnsupportedArchitectureError(
            f"{folder / MODEL_INDEX}: diffusers {diffusers.__version__} has no pipeline {index.kind!r}; "
            "install a version that has it"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Switch off the libraries' own progress bars and notes, and Python's warnings."""
    from diffusers.utils import logging as diffusers_notes  # noqa: PLC0415 - seconds
    from transformers.utils import logging as transformers_notes  # noqa: PLC0415 - seconds

    level = diffusers_notes.get_verbosity()
    diffusers_notes.set_verbosity_error()
    diffusers_notes.disable_progress_bar()
    transformers_notes.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        diffusers_notes.set_verbosity(level)
