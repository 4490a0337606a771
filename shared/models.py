"""The old path of the package `models`: it makes the old module paths `shared.models.*` importable.

Families of other packages may use them for one more version. `models.legacy_imports` has the aliases, each
with a warning.
"""

from importlib import import_module
from typing import Final

__path__: Final[list[str]] = []  # a package, so that the import system looks for `shared.models.base`
import_module("models.legacy_imports").install()
