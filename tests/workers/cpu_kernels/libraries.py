"""The kernels, compiled in every way that this machine can run, and quickly.

The best are those that a worker loads. The others are kept for the next run, and made by one process while
others wait for them.
"""

import fcntl
from functools import cache
from pathlib import Path
from typing import Final

from workers.cpu_kernels import compilation
from workers.cpu_kernels.compilation import Variant
from workers.cpu_kernels.library import Library, find_or_build

EMULATED: Final = "emulated_amx"
_VARIANTS: Final = compilation.variants_for(compilation.processor_flags())
NAMES: Final = [EMULATED, *(variant.name for variant in _VARIANTS)]

_FOLDER: Final = Path(__file__).parents[3] / ".pytest_cache" / "kernels"


@cache
def library(name: str) -> Library:
    """The library of a variant; `EMULATED` has Intel's tile unit written out in C++."""
    if name == EMULATED:
        return Library(
            _compiled(next(v for v in _VARIANTS if v.name != "amx"), name, "-DDALSEGNO_EMULATED_AMX")
        )
    variant = next(v for v in _VARIANTS if v.name == name)
    return Library(find_or_build(variant) if variant is _VARIANTS[0] else _compiled(variant, name))


def _compiled(variant: Variant, name: str, *flags: str) -> Path:
    folder = _FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / compilation.file_name(variant)
        if not path.is_file():
            compilation.clean(folder)
            compilation.build(variant, folder, also=["-O1", *flags])
    return path
