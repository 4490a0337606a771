"""Meanings of a struct's fields, read from the section `Attributes` of its docstring."""

import inspect
import re
from collections.abc import Mapping
from typing import Final

import msgspec

_ATTRIBUTE: Final = re.compile(r"^    (\w+): (.+?)(?=^    \w|\Z)", re.MULTILINE | re.DOTALL)


def meanings_of(kind: type[msgspec.Struct]) -> Mapping[str, str]:
    """Return the meaning of each field that the docstring describes."""
    doc = inspect.cleandoc(kind.__doc__ or "")
    _, _, attributes = doc.partition("Attributes:\n")
    return {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(attributes)}
