"""The compilation of the C++ kernels: at installation (`install.py`), or at their first use.

There is one library per kind of processor (`VARIANTS`). Its file name contains a digest of the sources, so a
library of an older version is not used. This module needs only the standard library, because it runs before
any dependency is installed.
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
    "-Wno-unknown-warning-option",  # Clang does not have the next option
    "-Wno-maybe-uninitialized",  # false positives in GCC's own intrinsics
)


class BuildError(Exception):
    """The kernels could not be compiled; the message says why."""


@dataclass(frozen=True)
class Variant:
    """A kind of processor.

    Attributes:
        needs: required CPU flags, by the Linux kernel's names.
        flags: compiler options.
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "bmi2"})
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
VARIANTS = (
    Variant(
        "amx",
        _AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    Variant(
        "avx512_bf16",
        _AVX512 | {"avx512_bf16", "avx512_vnni"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    ),
    Variant("avx512_vnni", _AVX512 | {"avx512_vnni"}, ("-march=x86-64-v4", "-mavx512vnni")),
    Variant("avx512", _AVX512, ("-march=x86-64-v4",)),
    Variant("avx_vnni", _AVX2 | {"avx_vnni"}, ("-march=x86-64-v3", "-mavxvnni")),
    Variant("plain", _AVX2, ("-march=x86-64-v3",)),
)
"""The best first."""


def processor_flags() -> frozenset[str]:
    """Return the CPU flags of this machine as in `/proc/cpuinfo`; empty if that cannot be read."""
    if platform.machine() not in _X86_64:
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def variants_for(flags: frozenset[str]) -> list[Variant]:
    """Return the variants that a processor with these flags can run, the best first."""
    return [variant for variant in VARIANTS if variant.needs <= flags]


def digest(variant: Variant) -> str:
    """Return a digest of the sources and the compiler options."""
    found = hashlib.blake2b(repr((_FLAGS, variant.flags)).encode(), digest_size=6)
    for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def file_name(variant: Variant) -> str:
    """Return the file name of the library of a variant, compiled from the current sources."""
    return f"kernels-{variant.name}-{digest(variant)}.so"


def compiler() -> str | None:
    """Return the path of the C++ compiler: `CXX`, or the first of the usual names that exists."""
    named = os.environ.get("CXX")
    return (
        shutil.which(named)
        if named
        else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    )


def build(variant: Variant, folder: Path, *, also: Sequence[str] = ()) -> Path:
    """Compile a variant into `folder`. Several processes may do so at the same time.

    Args:
        variant: the kind of processor.
        folder: created if it does not exist.
        also: more compiler options; tests use them to emulate instructions.

    Raises:
        BuildError: there is no compiler, or the compilation failed.
        OSError: the folder cannot be written to.
    """
    command = compiler()
    if command is None:
        raise BuildError("no C++ compiler was found: on Debian, apt install g++ (or name one in CXX)")
    target = folder / file_name(variant)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as temporary:
        made = Path(temporary) / target.name
        arguments = [command, *_FLAGS, *variant.flags, *also, str(SOURCES / "body.cpp"), "-o", str(made)]
        try:
            ran = subprocess.run(arguments, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{command} did not finish within {COMPILE_S:.0f} s") from error
        if ran.returncode:
            output = ran.stderr.strip()[-2000:] or "no output"
            raise BuildError(f"{command} ended with status {ran.returncode}: {output}")
        made.replace(target)
    return target


def clean(folder: Path) -> None:
    """Remove libraries that were compiled from other sources."""
    kept = {file_name(variant) for variant in VARIANTS}
    for path in folder.glob("kernels-*.so"):
        if path.name not in kept:
            path.unlink(missing_ok=True)
