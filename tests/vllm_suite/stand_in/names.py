"""Stand-ins for the parts of vLLM that its tests import: names that can be read and called, and mean nothing.

Tests of vLLM's inner parts fail with this; those that only speak HTTP do not use it.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

LIMIT_S = 60.0
"""The time of a test, a start of the server included: some ask for answers without a limit."""


class _Anything(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "get_tokenizer":
            return _tokenizer
        found = type(name, (Exception,), {}) if name.endswith("Error") else MagicMock(name=name)
        setattr(self, name, found)
        return found


def _tokenizer(*_args: object, **_options: object) -> Any:
    import os  # noqa: PLC0415

    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(os.environ["SERVED_CHECKPOINT"])


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


sys.meta_path.insert(0, _Finder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(LIMIT_S))
