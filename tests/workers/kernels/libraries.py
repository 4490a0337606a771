"""The kernels, compiled in every way that this machine can run, and quickly."""

import tempfile
from functools import cache
from pathlib import Path

from workers.kernels import build
from workers.kernels.library import Library

EMULATED = "emulated_amx"
NAMES = [EMULATED, *(variant.name for variant in build.variants_for(build.processor()))]

_folder = tempfile.TemporaryDirectory(prefix="dalsegno-kernels-")


@cache
def library(name: str) -> Library:
    """The library of a variant; `EMULATED` has Intel's tile unit written out in C++."""
    variants = build.variants_for(build.processor())
    if name == EMULATED:
        flags, variant = ["-DDALSEGNO_EMULATED_AMX"], next(v for v in variants if v.name != "amx")
    else:
        flags, variant = [], next(v for v in variants if v.name == name)
    return Library(build.build(variant, Path(_folder.name) / name, also=["-O1", *flags]))
