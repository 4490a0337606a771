"""Registry of model families: their modules by family name, and the family that serves a checkpoint.

A family is a package with the modules `graph`, `processing` and `nodes`, each imported only on demand: the
conductor asks for `graph` alone and never imports torch or a tokenizer. Other packages add families by the
entry point group `dalsegno.models`: the entry point's name is the family, its value the package.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

from models import legacy_imports
from models.base import MediaReader, ModelGraph, Processing
from models.checkpoints.claims import CheckpointInfo, Claim
from models.checkpoints.contents import Files
from models.checkpoints.files import CheckpointError
from shared.closest_match import closest_match
from shared.errors import ClientError
from shared.source_digest import Root, digest

_LOGGER: Final = logging.getLogger(__name__)
_BUILT_IN: Final = {
    "bagel": "models.bagel",
    "block_diffusion": "models.block_diffusion",
    "cohere_asr": "models.cohere_asr",
    "cosmos3": "models.cosmos3",
    "csm": "models.csm",
    "decoder_lm": "models.decoder_lm",
    "dia": "models.dia",
    "gemma3": "models.gemma3",
    "higgs_audio_v2": "models.higgs_audio_v2",
    "idefics3": "models.idefics3",
    "image_pipeline": "models.image_pipeline",
    "image_text": "models.image_text",
    "internvl": "models.internvl",
    "late_interaction": "models.late_interaction",
    "llava": "models.llava",
    "masked_diffusion": "models.masked_diffusion",
    "mistral3": "models.mistral3",
    "moonshine": "models.moonshine",
    "orpheus": "models.orpheus",
    "paligemma": "models.paligemma",
    "parakeet": "models.parakeet",
    "pi0": "models.pi0",
    "pi05": "models.pi05",
    "qwen2_5_omni": "models.qwen2_5_omni",
    "qwen2_5_vl": "models.qwen2_5_vl",
    "qwen3_5": "models.qwen3_5",
    "qwen3_asr": "models.qwen3_asr",
    "qwen3_omni": "models.qwen3_omni",
    "qwen3_tts": "models.qwen3_tts",
    "qwen3_vl": "models.qwen3_vl",
    "reranker": "models.reranker",
    "text_encoder": "models.text_encoder",
    "video_pipeline": "models.video_pipeline",
    "vjepa2": "models.vjepa2",
    "vjepa2_ac": "models.vjepa2_ac",
    "voxtral": "models.voxtral",
    "wan22": "models.wan22",
    "whisper": "models.whisper",
    "whole_pipeline": "models.whole_pipeline",
    "whole_video_pipeline": "models.whole_video_pipeline",
}
ENTRY_POINT_GROUP: Final = "dalsegno.models"

WeightFiles = Callable[[Path, str, Mapping[str, Any]], Files]
"""Names the files that a node of a checkpoint folder loads, given the family's own `model_kwargs`."""


class UnknownFamilyError(ClientError):
    """There is no family of that name, or none that serves the checkpoint."""

    code = "unknown_family"


class AmbiguousFamilyError(UnknownFamilyError):
    """Several families claim the checkpoint with equal specificity."""

    code = "ambiguous_family"


def families() -> dict[str, str]:
    """The package of each family, by the family's name."""
    return _BUILT_IN | _of_other_packages(tuple(sys.path))


@cache
def _of_other_packages(path: tuple[str, ...]) -> dict[str, str]:
    """The families of installed packages, kept per path: reading all packages' metadata takes 20 ms."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def is_built_in(family: str) -> bool:
    """True for a family of this project, false for one of another package."""
    return families().get(family) == _BUILT_IN.get(family) is not None


def module(family: str, name: str) -> ModuleType:
    """The module `name` (`graph`, `processing` or `nodes`) of a family.

    Raises:
        UnknownFamilyError: there is no family of that name.
    """
    known = families()
    if family not in known:
        near = closest_match(family, known)
        hint = f"; did you mean {near!r}?" if near else ""
        raise UnknownFamilyError(f"model {family!r} is unknown: expected one of {sorted(known)}{hint}")
    if not is_built_in(family):
        legacy_imports.install()
    return import_module(f"{known[family]}.{name}")


def weight_files(family: str) -> WeightFiles | None:
    """The function that names the files a node loads: `weight_files` in a module of that name.

    None for a family without such a module: then all files that look like weights are taken for its own.
    """
    package = families().get(family, "")
    if not package or find_spec(f"{package}.weight_files") is None:
        return None
    found: WeightFiles = module(family, "weight_files").weight_files
    return found


def further_repositories(family: str, checkpoint: Path) -> Mapping[str, Sequence[str]]:
    """The names of the files that a family reads of further repositories on a hub, by repository.

    They are what `further_repositories` in its module `weight_files` returns, where there is one.
    """
    package = families().get(family, "")
    if not package or find_spec(f"{package}.weight_files") is None:
        return {}
    ask = getattr(module(family, "weight_files"), "further_repositories", None)
    found: Mapping[str, Sequence[str]] = ask(checkpoint) if ask is not None else {}
    return found


def load_processing(
    family: str,
    checkpoint: Path,
    *,
    max_seq_len: int,
    voices: Sequence[str] = (),
    media: MediaReader | None = None,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    device_bytes: Callable[[], int] | None = None,
) -> Processing:
    """Load the CPU nodes of a checkpoint: its family's `processing.load`.

    A family that has voices gets `voices`, if there are any; one that decodes media gets `media`. One that
    takes `kwargs` gets the deployment's `model_kwargs`, one that takes `device_bytes` a function that
    returns the memory of the rank's device, or None where that is not known.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    of_speech = {"voices": voices} if voices else {}
    load = module(family, "processing").load
    given = {"media": media, "kwargs": kwargs, "device_bytes": device_bytes}
    taken = {name: value for name, value in given.items() if name in signature(load).parameters}
    found: Processing = load(checkpoint, max_seq_len=max_seq_len, **of_speech, **taken)
    return found


@cache
def graph(family: str) -> ModelGraph:
    """A family's graph: its module's `GRAPH`."""
    found = module(family, "graph").GRAPH
    assert isinstance(found, ModelGraph)
    return found


@cache
def plan_digest(family: str) -> str:
    """The digest of a family's plan: of `graph.py` and every definition it reaches. Hex, 32 characters."""
    return digest(plan_roots(family))


def plan_roots(family: str) -> tuple[Root, ...]:
    """The roots of a plan's sources: the whole `graph` module, and `GRAPH` if that module only imports it."""
    name = module(family, "graph").__name__
    return (Root(name), Root(name, ("GRAPH",)))


def family_of(checkpoint: Path) -> str:
    """The family with the most specific claim to a checkpoint folder in Hugging Face format.

    A family whose `graph` cannot be imported, or whose claim fails, is skipped with a warning.

    Raises:
        UnknownFamilyError: the folder has no readable `config.json`, or no family claims it.
        AmbiguousFamilyError: several families claim it with equal specificity.
    """
    path = checkpoint / "config.json"
    try:
        info = CheckpointInfo.read(checkpoint)
        claims = {family: claim for family in sorted(families()) if (claim := _claim(family, info))}
    except CheckpointError as error:
        wanted = "expected a folder with config.json, or of a pipeline with model_index.json"
        raise UnknownFamilyError(f"{checkpoint} is no checkpoint: {wanted}; {error}") from error
    best = [family for family, claim in claims.items() if claim == max(claims.values())]
    if len(best) > 1:
        raise AmbiguousFamilyError(
            f"{checkpoint}: expected one family to claim this checkpoint, found {' and '.join(best)}; "
            f"choose one with `model: {best[0]}` in a YAML file"
        )
    if not best:
        raise UnknownFamilyError(
            f"{path}: expected an architecture that a family of models claims, "
            f"found {info.architecture or None!r}; {_asked()}"
        )
    return best[0]


def _claim(family: str, checkpoint: CheckpointInfo) -> Claim | None:
    """A family's claim to a checkpoint; None if it makes none, or fails."""
    try:
        claims = graph(family).claims
        return claims(checkpoint) if claims is not None else None
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - another package's error must not keep the others from serving
        _LOGGER.warning(
            "model family %r (%s) is ignored: %s: %s", family, families()[family], type(error).__name__, error
        )
        return None


def _asked() -> str:
    """The families that were asked for a claim, and what they serve."""
    found = []
    for family in sorted(families()):
        try:
            serves = graph(family).serves
        except Exception:  # noqa: BLE001, S112 - a warning names it already
            continue
        found.append(f"{family} ({serves})" if serves else family)
    return f"families asked: {', '.join(found)}"
