"""Compiles the C++ kernels: at installation (`install.py`), or when they are first wanted.

There is a library for each kind of processor (`VARIANTS`), named after the sources it was made of: what an
older version left behind is not taken for ours. Knows only the standard library: it runs where nothing is
installed yet.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILE_S = 300.0

_X86_64 = ("x86_64", "AMD64")
_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-math-errno"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
    "-Wno-unknown-warning-option",  # Clang does not know the next one
    "-Wno-maybe-uninitialized",  # of GCC's own intrinsics
)


class BuildError(Exception):
    """The kernels could not be compiled; says why."""


@dataclass(frozen=True)
class Variant:
    """The kernels for a kind of processor: what it must have, by the kernel's names, and how it is told."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "bmi2"})
VARIANTS = (
    Variant(
        "amx",
        _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
    Variant("avx512_bf16", _AVX512 | {"avx512_bf16"}, ("-march=x86-64-v4", "-mavx512bf16")),
    Variant("avx512", _AVX512, ("-march=x86-64-v4",)),
    Variant("plain", frozenset({"avx2", "fma", "f16c", "bmi2"}), ("-march=x86-64-v3",)),
)
"""The best first."""


def processor() -> frozenset[str]:
    """What this machine's processor has, in the words of `/proc/cpuinfo`; nothing where that is not there."""
    if platform.machine() not in _X86_64:
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def variants_for(has: frozenset[str]) -> list[Variant]:
    """The variants such a processor can run, the best first."""
    return [variant for variant in VARIANTS if variant.needs <= has]


def digest(variant: Variant) -> str:
    """Of the sources, and of how they are compiled."""
    found = hashlib.blake2b(repr((_FLAGS, variant.flags)).encode(), digest_size=6)
    for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def file_name(variant: Variant) -> str:
    """The file of a variant compiled from these sources."""
    return f"kernels-{variant.name}-{digest(variant)}.so"


def compiler() -> str | None:
    """The C++ compiler: `CXX`, or the first of the usual names that is there."""
    named = os.environ.get("CXX")
    return (
        shutil.which(named)
        if named
        else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    )


def build(variant: Variant, folder: Path, *, also: Sequence[str] = ()) -> Path:
    """Compile a variant into `folder`; several may do so at once.

    Args:
        variant: for which processor.
        folder: is made if it is not there.
        also: more flags; tests emulate what this machine lacks.

    Raises:
        BuildError: there is no compiler, or it refused.
        OSError: the folder cannot be written to.
    """
    command = compiler()
    if command is None:
        raise BuildError("no C++ compiler was found: on Debian, apt install g++ (or name one in CXX)")
    target = folder / file_name(variant)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as aside:
        made = Path(aside) / target.name
        arguments = [command, *_FLAGS, *variant.flags, *also, str(SOURCES / "body.cpp"), "-o", str(made)]
        try:
            ran = subprocess.run(arguments, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{command} was not done after {COMPILE_S:.0f} s") from error
        if ran.returncode:
            said = ran.stderr.strip()[-2000:] or "it said nothing"
            raise BuildError(f"{command} ended with status {ran.returncode}: {said}")
        made.replace(target)
    return target


def clean(folder: Path) -> None:
    """Remove what older sources were compiled to."""
    kept = {file_name(variant) for variant in VARIANTS}
    for path in folder.glob("kernels-*.so"):
        if path.name not in kept:
            path.unlink(missing_ok=True)
