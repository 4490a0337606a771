"""The settings of a late-interaction folder, in three layouts. No torch.

ColBERT                 `HF_ColBERT` in config.json, `artifact.metadata`, `linear.weight` among the weights
PyLate                  `modules.json` with Transformer and Dense, flat keys beside the prompts
sentence-transformers   `modules.json` with Transformer, Dense, MultiVectorMask and Normalize
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from models.checkpoints.files import CheckpointError, read_json, read_json_if_present
from models.late_interaction.graph import STANFORD
from models.text.embedding import Module, modules_of
from models.text_encoder.folder import Dense, max_positions, model_settings, stated_length

SETTINGS: Final = "config_sentence_transformers.json"
_PUNCTUATION: Final = tuple(string.punctuation)
_MEAN: Final = "meanmaxsim"
_TOKENS: Final = "token_embeddings"
_QUERY_TOKENS: Final = 32
_DOCUMENT_PROMPTS: Final = ("document", "passage", "corpus")
_MARKERS: Final = frozenset(
    {
        "query_length", "document_length", "do_query_expansion", "attend_to_expansion_tokens",
        "attend_to_mask_tokens", "query_prefix", "document_prefix", "skiplist_words",
    }
)  # fmt: skip
"""Keys of PyLate; a folder that has one expands its queries unless it says otherwise."""


class Expansion(msgspec.Struct, frozen=True, kw_only=True):
    """Queries are filled with mask tokens, whose vectors count as those of words do.

    Attributes:
        strategy: `fixed`: longer queries are cut to the length; `min`: they are not.
        length: the tokens of a query with its expansion.
        attend: the other tokens see the mask tokens.
        token: the token; None: the tokenizer's mask token, or else its end of a text.
    """

    strategy: Literal["fixed", "min"]
    length: Annotated[int, Meta(ge=1)]
    attend: bool = False
    token: str | None = None


class Mask(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that do not count: the configuration of the module `MultiVectorMask`."""

    skiplist_words: Sequence[str] = ()
    skiplist_tasks: Sequence[str] = ("document",)
    keep_only_token_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LateInteractionFolder:
    """The settings of a folder.

    Attributes:
        query_prefix, document_prefix: texts that are put before each.
        marks: prefixes that are single tokens of the vocabulary.
        query_tokens, document_tokens: the longest texts, with special tokens; None: `max_tokens`.
        expansion: that of queries; None: they are not expanded.
        mask: the tokens that do not count.
        stages: the projections; empty for the layout of ColBERT, whose projection is `linear.weight`.
        is_normalized: each vector has length 1.
        averages: a score is divided by the number of the query's vectors.
        max_tokens: the longest text as the folder states it.
        max_positions: the longest text that the model can take.
        lower_case: texts are made lower-case first.
    """

    query_prefix: str = ""
    document_prefix: str = ""
    marks: tuple[str, ...] = ()
    query_tokens: int | None = None
    document_tokens: int | None = None
    expansion: Expansion | None = None
    mask: Mask = field(default_factory=Mask)
    stages: tuple[Dense, ...] = ()
    is_normalized: bool = True
    averages: bool = False
    max_tokens: int
    max_positions: int
    lower_case: bool = False


def read(checkpoint: Path) -> LateInteractionFolder:
    """Read the settings of a folder.

    Raises:
        CheckpointError: a file is malformed, or a module is not supported.
    """
    config = read_json(checkpoint / "config.json")
    positions = max_positions(config)
    modules = modules_of(checkpoint)
    if not modules:
        if STANFORD not in (config.get("architectures") or ()):
            raise CheckpointError(
                f"{checkpoint}: expected modules.json, or the architecture {STANFORD} in config.json"
            )
        return _stanford(checkpoint, positions)
    return _of_modules(checkpoint, modules, positions)


def _stanford(checkpoint: Path, positions: int) -> LateInteractionFolder:
    """The settings of a folder of ColBERT's authors; what it does not say is ColBERT's default."""
    metadata = read_json_if_present(checkpoint / "artifact.metadata")
    query = metadata.get("query_token_id") or "[unused0]"
    document = metadata.get("doc_token_id") or "[unused1]"
    expansion = Expansion(
        strategy="fixed",
        length=metadata.get("query_maxlen") or _QUERY_TOKENS,
        attend=bool(metadata.get("attend_to_mask_tokens")),
    )
    return LateInteractionFolder(
        query_prefix=f"{query} ",
        document_prefix=f"{document} ",
        marks=(query, document),
        document_tokens=metadata.get("doc_maxlen"),
        expansion=expansion,
        mask=Mask(skiplist_words=_PUNCTUATION if metadata.get("mask_punctuation", True) else ()),
        max_tokens=stated_length(checkpoint, {}) or positions,
        max_positions=positions,
    )


def _of_modules(checkpoint: Path, modules: Sequence[Module], positions: int) -> LateInteractionFolder:
    flat = read_json_if_present(checkpoint / SETTINGS)
    own = model_settings(checkpoint)
    is_pylate = flat.get("model_type") == "ColBERT"
    stages, mask, is_normalized = _after_model(checkpoint, modules)
    if is_pylate:
        words = flat.get("skiplist_words")
        mask = Mask(skiplist_words=_PUNCTUATION if words is None else tuple(words))
    prompts = flat.get("prompts") or {}
    query, document = (
        _prefix(flat, f"{kind}_prefix", next((prompts[n] for n in names if prompts.get(n)), ""))
        for kind, names in (("query", ("query",)), ("document", _DOCUMENT_PROMPTS))
    )
    marks = [flat.get(name) or "" for name in ("query_prefix", "document_prefix")]
    expansion = _expansion(checkpoint, flat, own)
    return LateInteractionFolder(
        query_prefix=query,
        document_prefix=document,
        marks=tuple(mark for mark in marks if mark.strip()),
        query_tokens=own.get("query_length") or (None if expansion else flat.get("query_length")),
        document_tokens=own.get("document_length") or flat.get("document_length"),
        expansion=expansion,
        mask=mask,
        stages=stages,
        is_normalized=is_normalized or is_pylate,
        averages=flat.get("similarity_fn_name") == _MEAN,
        max_tokens=stated_length(checkpoint, own) or positions,
        max_positions=positions,
        lower_case=own.get("do_lower_case") is True,
    )


def _prefix(flat: Mapping[str, Any], key: str, prompt: str) -> str:
    """The text before each text of a kind: PyLate's prefix, and the prompt of that name behind it."""
    prefix = str(flat.get(key) or "")
    return prefix + prompt.removeprefix(prefix)


def _expansion(checkpoint: Path, flat: Mapping[str, Any], own: Mapping[str, Any]) -> Expansion | None:
    """The expansion of queries: of the module `Transformer`, else of PyLate's flat keys."""
    stated = own.get("query_expansion", flat.get("query_expansion"))
    if "query_expansion" not in own and "query_expansion" not in flat:
        if not _MARKERS & set(flat) or flat.get("do_query_expansion") is False:
            return None
        attends = flat.get("attend_to_expansion_tokens", flat.get("attend_to_mask_tokens"))
        length = flat.get("query_length") or _QUERY_TOKENS
        stated = {"strategy": "fixed", "length": length, "attend": bool(attends)}
    if stated is None:
        return None
    try:
        return msgspec.convert(stated, Expansion)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{checkpoint}: expected the settings of query_expansion: {error}") from error


def _after_model(checkpoint: Path, modules: Sequence[Module]) -> tuple[tuple[Dense, ...], Mask, bool]:
    """The projections, the tokens that do not count, and whether vectors are scaled to length 1."""
    path = checkpoint / "modules.json"
    first, *others = modules
    if first.kind != "Transformer" or first.path:
        raise CheckpointError(f"{path}: expected 'Transformer' in the folder itself, found {first.kind!r}")
    stages: list[Dense] = []
    mask, is_normalized = Mask(), False
    for module in others:
        config = read_json_if_present(checkpoint / module.path / "config.json")
        if not module.type.startswith(("sentence_transformers.", "pylate.")):
            raise CheckpointError(f"{path}: {module.type} is not supported (remote code is never run)")
        try:
            match module.kind:
                case "Dense":
                    stages.append(msgspec.convert(_of_tokens(config) | {"path": module.path}, Dense))
                case "MultiVectorMask":
                    mask = msgspec.convert(config, Mask)
                case "Normalize":
                    is_normalized = True
                case _:
                    raise CheckpointError(
                        f"{path}: {module.kind!r} is not supported, only Dense, MultiVectorMask, Normalize"
                    )
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{checkpoint / module.path}/config.json: {error}") from error
        if is_normalized and module.kind == "Dense":
            raise CheckpointError(f"{path}: expected Normalize behind every Dense")
    return tuple(stages), mask, is_normalized


def _of_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a Dense module of tokens; older ones do not name their input."""
    found = {"module_input_name": _TOKENS, **config}
    names = {found["module_input_name"], found.get("module_output_name") or found["module_input_name"]}
    if names != {_TOKENS}:
        raise CheckpointError(f"expected a Dense layer over {_TOKENS}, found {', '.join(map(str, names))}")
    return found
