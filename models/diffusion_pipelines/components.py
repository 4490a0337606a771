"""The components of a pipeline's folder: its `model_index.json`, and the weight files of each. No torch.

Folders with code of their own are refused, and weights in another format than safetensors.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError, read_json
from models.checkpoints.weights import Shard, read_shard

MODEL_INDEX: Final = "model_index.json"
DENOISERS: Final = ("transformer", "transformer_2", "unet")
"""The components that a run calls once or more in each step, in every class of diffusers."""
TEXT_PREFIXES: Final = ("text_encoder", "tokenizer")
"""The components of these names are what `encode_prompt` needs."""

_LIBRARIES: Final = frozenset({"diffusers", "transformers"})
_VARIANTS: Final = ("", "fp16", "bf16")


@dataclass(frozen=True, slots=True)
class Component:
    """A component of a pipeline, as `model_index.json` names it.

    Attributes:
        library: `diffusers`, `transformers`, or a package of pipelines inside of diffusers.
        kind: the name of its class.
    """

    name: str
    library: str
    kind: str

    @property
    def is_text(self) -> bool:
        """True if only `encode_prompt` needs it."""
        return self.name.startswith(TEXT_PREFIXES)


@dataclass(frozen=True, slots=True)
class Index:
    """The content of `model_index.json`.

    Attributes:
        kind: the class of the pipeline.
        components: by name; those that the folder leaves out are not there.
        settings: the arguments of the class that are no components.
    """

    kind: str
    components: dict[str, Component]
    settings: dict[str, Any]


def read_index(folder: Path) -> Index:
    """Read `model_index.json`.

    Raises:
        CheckpointError: it is missing or damaged.
        UnsupportedArchitectureError: the pipeline needs code that is not diffusers' or transformers' own.
    """
    path = folder / MODEL_INDEX
    content = read_json(path)
    kind = content.get("_class_name")
    if not isinstance(kind, str):
        raise UnsupportedArchitectureError(
            f"{path}: expected the name of a class of diffusers as _class_name, found {kind!r}: "
            "pipelines with code of their own are not served"
        )
    entries = {name: value for name, value in content.items() if not name.startswith("_")}
    components = {
        name: _component(path, name, value)
        for name, value in entries.items()
        if _is_pair(value) and value[1] is not None
    }
    settings = {name: value for name, value in entries.items() if not _is_pair(value)}
    return Index(kind, components, settings)


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(one is None or isinstance(one, str) for one in value)
    )


def _component(path: Path, name: str, value: list[str]) -> Component:
    library, kind = value
    is_foreign = "." in library or "/" in library or (path.parent / name / f"{library}.py").exists()
    if is_foreign or (path.parent / f"{library}.py").exists() or (path.parent / "pipeline.py").exists():
        raise UnsupportedArchitectureError(
            f"{path}: component {name!r} is of {library}.{kind}: expected a class of diffusers or "
            "transformers; code in a checkpoint is not executed"
        )
    return Component(name, library, kind)


def component_class(component: Component, folder: Path) -> Any:
    """The class of a component; imports its library.

    Raises:
        UnsupportedArchitectureError: the installed library has no such class.
    """
    try:
        library = import_module(
            component.library
            if component.library in _LIBRARIES
            else f"diffusers.pipelines.{component.library}"
        )
        return getattr(library, component.kind)
    except (ImportError, AttributeError) as error:
        raise UnsupportedArchitectureError(
            f"{folder / MODEL_INDEX}: component {component.name!r} is of {component.library}."
            f"{component.kind}, which is not installed ({error}): expected a class of the installed "
            "diffusers or transformers"
        ) from error


@dataclass(frozen=True, slots=True)
class Weights:
    """The weight files of a component.

    Attributes:
        shards: checked; empty if it has none, as a scheduler.
        variant: the part of the files' names before `.safetensors`, such as `fp16`; empty for none.
    """

    shards: list[Shard]
    variant: str = ""

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


def weights_of(folder: Path, component: Component) -> Weights:
    """Check the weight files of a component.

    Raises:
        CheckpointError: its folder or a file is missing, damaged, or not safetensors.
    """
    path = folder / component.name
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is missing: {MODEL_INDEX} names the component {component.name!r}; download it again"
        )
    for variant in _VARIANTS:
        names = _files(path, variant)
        if names:
            return Weights([read_shard(path / name) for name in names], variant)
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.ckpt") for file in path.glob(pattern))
    if others or _needs_weights(component):
        raise CheckpointError(
            f"{path} has no *.safetensors: found {', '.join(others) or 'no weights'}; expected weights that "
            "`save_pretrained` has written"
        )
    return Weights([])


def _needs_weights(component: Component) -> bool:
    return component.name in (*DENOISERS, "vae") or component.name.startswith("text_encoder")


def _files(path: Path, variant: str) -> list[str]:
    """The names of the weight files of a variant, by their index if there is one."""
    for stem in ("diffusion_pytorch_model", "model"):
        middle = f".{variant}" if variant else ""
        for index in (
            path / f"{stem}.safetensors.index{middle}.json",
            path / f"{stem}{middle}.safetensors.index.json",
        ):
            if index.is_file():
                weight_map = read_json(index).get("weight_map")
                if not isinstance(weight_map, dict) or not weight_map:
                    raise CheckpointError(
                        f"{index} names no file: its weight_map is empty; download it again"
                    )
                names = sorted(set(weight_map.values()))
                if any(Path(name).name != name for name in names):
                    raise CheckpointError(f"{index} names a file in another folder: expected one beside it")
                return names
        if (path / f"{stem}{middle}.safetensors").is_file():
            return [f"{stem}{middle}.safetensors"]
    return []
