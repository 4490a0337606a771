"""Aliases of the old module paths `shared.models.*`, for families of other packages.

The modules moved to `models`; the old paths work for one more version, with a `DeprecationWarning`. `install`
adds an import hook; `shared.models` calls it, and `models.registry` before it imports such a family. An alias
is the new module itself, so classes are the same under both names.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

from shared import source_digest, walks

_OLD: Final = "shared.models"
_KEPT: Final = (
    "base", "decoder_lm", "decoder_lm.graph", "decoder_lm.nodes", "decoder_lm.processing", "orpheus",
    "orpheus.frames", "orpheus.graph", "orpheus.nodes", "orpheus.processing", "orpheus.snac", "registry",
    "transformers_lm", "transformers_lm.architecture", "transformers_lm.loader", "transformers_lm.node",
    "transformers_lm.probe", "transformers_lm.quantised", "transformers_lm.sharding",
    "transformers_lm.tensors",
)  # fmt: skip
_RENAMED: Final = {
    "chat_template": "text.chat_template",
    "checkpoint": "checkpoints.files",
    "embedding": "text.embedding",
    "guide_refusals": "text.guide_errors",
    "guide_trial": "text.guide_trial",
    "guides": "text.guides",
    "progress": "checkpoints.progress",
    "text_decoder": "text.detokenizer",
    "tool_call_reader": "text.tool_call_parser",
    "tool_calls": "text.tool_calls",
    "weights": "checkpoints.weights",
}
ALIASES: Final = {
    f"{_OLD}.{old}": f"models.{new}" for old, new in (dict(zip(_KEPT, _KEPT, strict=True)) | _RENAMED).items()
}
"""The new path of each module, by its old one."""
_NAMES: Final = {
    "models.base": {"Guiding": "models.text.guiding.Guiding"},
    "models.decoder_lm.processing": {
        "load_tokenizer": "models.text.tokenizer.load_tokenizer",
        "vocab_size_of": "models.text.tokenizer.vocab_size_of",
    },
    "models.registry": {"face": "models.registry.module"},
    "models.text.detokenizer": {"TextDecoders": "models.text.detokenizer.DetokenizerFactory"},
    "models.text.guides": {"Guides": "models.text.guides.GuideCompiler"},
    "models.text.tool_call_parser": {
        "Said": "models.text.tool_call_parser.ParsedPiece",
        "ToolCallReader": "models.text.tool_call_parser.ToolCallParser",
    },
    "models.transformers_lm.sharding": {"Unheard": "models.transformers_lm.sharding.SilentPeers"},
}
"""Names that were renamed or moved, by module: an alias of the module has the old ones too."""


def install() -> None:
    """Make the old paths importable. Further calls have no effect."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        names = {
            f"{old}.{name}": n for old, new in ALIASES.items() for name, n in _NAMES.get(new, {}).items()
        }
        names |= {f"shared.walks.{old}": f"shared.walks.{new}" for old, new in walks.RENAMED.items()}
        source_digest.add_aliases(ALIASES | names)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = ALIASES.get(fullname)
        if new is None:
            return None
        warnings.warn(f"{fullname} has moved: import {new} instead", DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, _Alias(new))


class _Alias(Loader):
    """Loads a module by its new path."""

    def __init__(self, new: str) -> None:
        self._new = new

    def exec_module(self, module: ModuleType) -> None:
        current = sys.modules[module.__name__] = import_module(self._new)
        for old, new in _NAMES.get(self._new, {}).items():
            package, _, name = new.rpartition(".")
            setattr(current, old, getattr(import_module(package), name))
