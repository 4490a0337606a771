"""Which family serves a model, and where its faces are.

Imports a face only when asked for it: the conductor asks for `graph` alone, so it never sees torch or a
tokenizer. Other packages add families by the entry point group `dalsegno.models`: the entry point's
name is the family, its value the package that holds `graph`, `processing` and `nodes`.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Final

from models.base import ModelGraph
from models.checkpoints.files import CheckpointError, read_json
from shared.closest_match import closest_match
from shared.errors import ClientError
from shared.source_digest import Root, digest

_BUILT_IN: Final = {"decoder_lm": "models.decoder_lm", "orpheus": "models.orpheus"}
ENTRY_POINT_GROUP: Final = "dalsegno.models"


class UnknownFamilyError(ClientError):
    """No family of that name, or none that serves such a checkpoint."""

    code = "unknown_family"


def families() -> dict[str, str]:
    """Every family's name and package."""
    return _BUILT_IN | {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def face(family: str, name: str) -> ModuleType:
    """The module `name` (`graph`, `processing` or `nodes`) of a family."""
    known = families()
    if family not in known:
        near = closest_match(family, known)
        hint = f"; did you mean {near!r}?" if near else ""
        raise UnknownFamilyError(f"model {family!r} is unknown: expected one of {sorted(known)}{hint}")
    return import_module(f"{known[family]}.{name}")


@cache
def graph(family: str) -> ModelGraph:
    """A family's graph: its module's `GRAPH`."""
    found = face(family, "graph").GRAPH
    assert isinstance(found, ModelGraph)
    return found


@cache
def plan_digest(family: str) -> str:
    """The digest of a family's plan: of `graph.py` and every definition it reaches. Hex, 32 characters."""
    return digest(plan_roots(family))


def plan_roots(family: str) -> tuple[Root, ...]:
    """The roots of a plan's sources: the whole `graph` module, and `GRAPH` if that module only imports it."""
    module = face(family, "graph").__name__
    return (Root(module), Root(module, ("GRAPH",)))


def family_of(checkpoint: Path) -> str:
    """The family that serves a checkpoint folder in Hugging Face format, told by its `config.json`.

    Raises:
        UnknownFamilyError: the folder has no readable `config.json`, or no family serves it.
    """
    path = checkpoint / "config.json"
    try:
        config = read_json(path)
        architectures = config.get("architectures")
        name = architectures[0] if isinstance(architectures, list) and architectures else None
        if name == "LlamaForCausalLM" and _is_orpheus(checkpoint):
            return "orpheus"
    except CheckpointError as error:
        raise UnknownFamilyError(f"{checkpoint} is no checkpoint: {error}") from error
    if isinstance(name, str) and name.endswith("ForCausalLM"):
        return "decoder_lm"
    raise UnknownFamilyError(
        f"{path}: decoder-only language models (an architecture ...ForCausalLM) are served, others not yet; "
        f"found {name!r}"
    )


def _is_orpheus(checkpoint: Path) -> bool:
    """Whether a Llama says audio tokens: SNAC is beside it, or its tokenizer has Orpheus' marks."""
    if (checkpoint / "snac" / "config.json").is_file():
        return True
    path = checkpoint / "tokenizer_config.json"
    added = read_json(path).get("added_tokens_decoder") if path.is_file() else None
    mark = added.get("128258") if isinstance(added, dict) else None  # what ends a speech
    return isinstance(mark, dict) and mark.get("content") == "<custom_token_2>"
