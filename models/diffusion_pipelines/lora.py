"""LoRA folders: adapters that are loaded at their first use, and switched between forwards."""

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from models.diffusion_pipelines.components import DENOISERS
from shared.errors import ClientError

_TEXT_ENCODERS: Final = ("text_encoder", "text_encoder_2")
_INTO_DENOISER: Final = ("load_lora_into_transformer", "load_lora_into_unet")
_INTO_TEXT: Final = ("load_lora_into_text_encoder",)
_USUAL_NAME: Final = "pytorch_lora_weights.safetensors"


class Adapters:
    """The adapters of a node's modules.

    A call uses one adapter or none. The modules are shared by all runs, so the adapter is switched before the
    forward; calls with different adapters are never in one forward.

    Args:
        pipeline: whose modules they are; None for a node without any.
        text: the node has the text encoders.
        denoiser: the node has the denoiser.
    """

    def __init__(self, pipeline: Any, *, text: bool, denoiser: bool) -> None:
        self._pipeline = pipeline
        names = (*(_TEXT_ENCODERS if text else ()), *(DENOISERS if denoiser else ()))
        loadable = getattr(pipeline, "_lora_loadable_modules", ())
        self._names = [name for name in names if name in loadable or name in DENOISERS]
        self._others = (() if denoiser else _INTO_DENOISER) + (() if text else _INTO_TEXT)
        self._loaded: dict[str, str] = {}
        self._active: tuple[str, float] | None = None

    def use(self, lora: Mapping[str, Any] | None) -> None:
        """Switch to an adapter, or to none.

        Args:
            lora: `path`, a folder or a file of safetensors; `scale`, 1 if absent. None: no adapter.

        Raises:
            ClientError: the file cannot be read, or does not fit the model.
        """
        wanted = (str(lora["path"]), float(lora.get("scale", 1.0))) if lora else None
        if wanted == self._active or self._pipeline is None or not self._names:
            return
        if wanted is not None and wanted[0] not in self._loaded:
            self._load(wanted[0])
        for name in self._names:
            module = self._pipeline.__dict__.get(name)
            if module is not None and getattr(module, "peft_config", None):
                _switch(module, self._loaded[wanted[0]] if wanted else "", wanted[1] if wanted else 1.0)
        self._active = wanted

    def _load(self, path: str) -> None:
        """Load an adapter into the modules of this node; the pipeline's other modules are left alone."""
        kind = type(self._pipeline).__name__
        if not hasattr(self._pipeline, "load_lora_weights"):
            raise ClientError(f"{kind} takes no LoRA: expected no `lora`")
        loading = copy.copy(self._pipeline)
        loading.__dict__ = self._pipeline.__dict__ | dict.fromkeys(self._others, _nothing)
        file = _file_of(Path(path))
        name = f"lora_{len(self._loaded)}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # peft warns of a second adapter
                loading.load_lora_weights(
                    str(file.parent),
                    weight_name=file.name,
                    adapter_name=name,
                    local_files_only=True,
                    use_safetensors=True,
                )
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            raise ClientError(f"the LoRA {path} cannot be used with {kind}: {error}") from error
        self._loaded[path] = name


def _nothing(*_: Any, **__: Any) -> None:
    """Load nothing: the module is on another node."""


def _file_of(path: Path) -> Path:
    """The weight file of a LoRA.

    Raises:
        ClientError: there is none, or there are several.
    """
    if path.is_file():
        return path
    files = sorted(path.glob("*.safetensors"))
    usual = [file for file in files if file.name == _USUAL_NAME]
    found = usual or files
    if len(found) != 1:
        raise ClientError(
            f"the LoRA {path} has {len(files)} files *.safetensors: expected one, or one of the name "
            f"{_USUAL_NAME}"
        )
    return found[0]


def _switch(module: Any, name: str, scale: float) -> None:
    """Activate one adapter of a module; of an empty name, none."""
    active = name in module.peft_config
    if hasattr(module, "disable_lora"):  # a module of diffusers
        if active:
            module.enable_lora()
            module.set_adapters([name], [scale])
        else:
            module.disable_lora()
        return
    from diffusers.loaders import lora_base  # noqa: PLC0415 - seconds

    base: Any = lora_base
    if active:
        base.enable_lora_for_text_encoder(module)
        base.set_adapters_for_text_encoder([name], module, [scale])
    else:
        base.disable_lora_for_text_encoder(module)
