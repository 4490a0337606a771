"""The compiled kernels as Python sees them: a few C functions over plain structures.

`load` finds the library for this machine's processor, or has it compiled; where that cannot be it says why,
and torch computes instead. Nothing here knows a model.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_uint16, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

from workers.cpu_kernels import build
from workers.cpu_kernels.build import BuildError, Variant

_LOGGER: Final = logging.getLogger(__name__)
_Fields: TypeAlias = list[tuple[str, Any]]

BUILT: Final = build.SOURCES / "built"
FLOAT32, BFLOAT16 = 0, 1


class Patch(Structure):
    """A weight that has no place among those squeezed (`squeezed.h`)."""

    _fields_: ClassVar[_Fields] = [("step", c_int32), ("place", c_uint16), ("bits", c_uint16)]


class Matrix(Structure):
    """A packed matrix: (n, k), n of them the columns of a product; squeezed if it has `lists` of patches."""

    _fields_: ClassVar[_Fields] = [
        *((name, c_void_p) for name in ("data", "lists", "patches")),
        *((name, c_int32) for name in ("n", "k")),
    ]


class Layer(Structure):
    """A decoder layer's weights; norms and biases are float32, those that are not there null."""

    _fields_: ClassVar[_Fields] = [
        *((name, Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("norm_in", "norm_post", "q_norm", "k_norm", "qkv_bias", "o_bias")),
        ("window", c_int32),
    ]


class Model(Structure):
    """What is the same in every step."""

    _fields_: ClassVar[_Fields] = [
        *(
            (name, c_int32)
            for name in ("dtype", "layers", "hidden", "heads", "kv_heads", "dim", "intermediate")
        ),
        *(("eps", c_float), ("scaling", c_float), ("layer", POINTER(Layer)), ("norm", c_void_p)),
    ]


class Step(Structure):
    """One step, in the buffers of `workers.kv_engine.step`."""

    _fields_: ClassVar[_Fields] = [
        *((name, c_int32) for name in ("tokens", "spans", "block_size", "table_stride")),
        *((name, c_void_p) for name in ("positions", "slots", "rows", "query_offsets", "kv_lengths")),
        *((name, c_void_p) for name in ("block_table", "cos", "sin", "keys", "values", "hidden")),
    ]


class Library:
    """A loaded library.

    Attributes:
        variant: for which kind of processor it was compiled.
        is_allowed: whether this process may use what that kind has; AMX is asked for.
    """

    def __init__(self, path: Path) -> None:
        self._c: Final = ctypes.CDLL(str(path))
        self.variant: Final[str] = self._function("variant", c_char_p)().decode()
        self.is_allowed: Final = bool(self._function("allowed", c_int)())
        pointer, integer = c_void_p, c_int32
        self.open: Final = self._function("open", pointer, c_int)
        self.close: Final = self._function("close", None, pointer)
        self.helped: Final = self._function("helped", c_int64, pointer)
        self.packed_bytes: Final = self._function("packed_bytes", c_int64, c_int, integer, integer)
        self.pack: Final = self._function(
            "pack", None, pointer, c_int, pointer, pointer, integer, integer, c_int64, c_int, integer
        )
        self.squeezed_bytes: Final = self._function("squeezed_bytes", c_int64, integer, integer)
        self.count_patches: Final = self._function(
            "count_patches", c_int64, pointer, POINTER(Matrix), pointer
        )
        self.squeeze: Final = self._function(
            "squeeze", None, pointer, POINTER(Matrix), pointer, pointer, pointer
        )
        self.linear: Final = self._function(
            "linear", c_int, pointer, c_int, POINTER(Matrix), pointer, integer, pointer, c_int64
        )
        self.body: Final = self._function("body", c_int, pointer, POINTER(Model), POINTER(Step))

    def _function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function: Any = getattr(self._c, f"dalsegno_{name}")
        function.restype, function.argtypes = result, arguments
        found: Callable[..., Any] = function
        return found


@cache
def load() -> Library | None:
    """The library for this processor; None where there is none, which is said once."""
    for variant in build.variants_for(build.processor()):
        try:
            library = Library(find_or_build(variant))
        except (BuildError, OSError) as error:
            _LOGGER.warning("the CPU kernels are not there, torch computes instead (slower): %s", error)
            return None
        if library.is_allowed:
            return library
        _LOGGER.info("CPU kernels for %s: the operating system does not allow them", variant.name)
    _LOGGER.info("there are no CPU kernels for this processor: torch computes")
    return None


def find_or_build(variant: Variant) -> Path:
    """The library of a variant, made at installation or now.

    Raises:
        BuildError: it cannot be compiled.
        OSError: there is nowhere to put it.
    """
    name = build.file_name(variant)
    if (path := BUILT / name).is_file():
        return path
    cache_folder = _cache_folder()
    if (path := cache_folder / name).is_file():
        return path
    _LOGGER.info("compiling the CPU kernels for %s: some seconds, once", variant.name)
    try:
        return build.build(variant, BUILT)
    except OSError:  # installed by somebody else, or on what is mounted to be read only
        return build.build(variant, cache_folder)


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "dalsegno" / "kernels"
    except RuntimeError as error:  # a user of whom the system knows nothing
        raise BuildError(f"{error} (name a folder in XDG_CACHE_HOME)") from error
