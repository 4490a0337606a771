"""Sentences about a pipeline's folder, for operators. No torch, no diffusers."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from models.checkpoints.files import CheckpointError
from models.diffusion_pipelines.classes import IMAGE, KNOWN, class_of
from models.diffusion_pipelines.components import weights_of
from models.diffusion_pipelines.folder import PipelineFolder
from models.diffusion_pipelines.memory import request_bytes
from models.diffusion_pipelines.options import ImageOptions
from models.diffusion_pipelines.requests import pipeline_call

_LIBRARIES: Final = ("diffusers", "greenlet")
_GIB: Final = 1 << 30


def remarks_of(options: type[ImageOptions]) -> Callable[[Path, Mapping[str, Any]], Sequence[str]]:
    """The function `ModelGraph.remarks` of a family with these options."""

    def remarks(checkpoint: Path, kwargs: Mapping[str, Any]) -> Sequence[str]:
        if not checkpoint.is_dir():
            return ()
        _check_installed(checkpoint)
        folder = PipelineFolder.read(checkpoint)
        found = (_nodes(folder), _weights(folder), _memory(folder, options, kwargs), _checker(folder, kwargs))
        return [one for one in found if one]

    return remarks


def _check_installed(checkpoint: Path) -> None:
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise CheckpointError(
            f"{checkpoint} is a pipeline of diffusers, and {' and '.join(missing)} is not installed here: "
            "pip install 'dalsegno[diffusers]'"
        )


def _nodes(folder: PipelineFolder) -> str:
    if folder.kind in KNOWN:
        return ""
    return (
        f"{folder.kind} is no class that is served in parts: this pipeline runs as one node, and requests "
        "are not computed together"
    )


def _weights(folder: PipelineFolder) -> str:
    """The size of the weights of each part, and the parts without any: a machine may have those of its ranks.

    Raises:
        CheckpointError: a weight file is damaged.
    """
    sizes, missing = list[str](), list[str]()
    for name, part in folder.index.components.items():
        try:
            nbytes = weights_of(folder.path, part).nbytes
        except CheckpointError:
            if any((folder.path / name).glob("*.safetensors")):
                raise
            missing.append(name)
            continue
        if nbytes:
            sizes.append(f"{name} {_size(nbytes)}")
    if not sizes:
        return ""
    none = f"; {', '.join(missing)} has none here, so a node that loads it does not start" if missing else ""
    return f"{folder.kind}: weights of {', '.join(sizes)}{none}"


def _memory(folder: PipelineFolder, options: type[ImageOptions], kwargs: Mapping[str, Any]) -> str:
    """The memory of a request that asks for nothing."""
    kind = class_of(folder)
    call = pipeline_call(folder, options(), makes=kind.makes[0], pictures=kind.images[0])
    nbytes = request_bytes(folder, call, tiled=bool(kwargs.get("vae_tiling")))
    if not nbytes:
        return ""
    what = IMAGE if kind.makes[0] == IMAGE else f"video of {call.frames} frames"
    size = f"{call.width} x {call.height}"
    return f"the usual {what}, {size}, takes about {_size(nbytes)} beside the weights"


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB // 10 else f"{nbytes / (1 << 20):.1f} MiB"


def _checker(folder: PipelineFolder, kwargs: Mapping[str, Any]) -> str:
    """The state of a safety checker."""
    has_one = "safety_checker" in folder.index.components
    if not has_one and folder.kind != "Cosmos3OmniPipeline":
        return ""
    if not kwargs.get("safety_checker", True):
        return "the safety checker is off: model_kwargs.safety_checker"
    if not has_one and not folder.index.settings.get("enable_safety_checker", True):
        return "the safety checker is off: enable_safety_checker in model_index.json"
    return "the safety checker is on; model_kwargs.safety_checker: off switches it off"
