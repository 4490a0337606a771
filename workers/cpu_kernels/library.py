"""The Python binding of the compiled kernels: a few C functions over plain structures, by ctypes.

`load` finds the library for this machine's processor or compiles it. If neither is possible it logs the
reason, and torch computes instead. This module does not depend on any model.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int8, c_int32, c_int64, c_uint16, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

from workers.cpu_kernels import compilation
from workers.cpu_kernels.compilation import BuildError, Variant

_LOGGER: Final = logging.getLogger(__name__)
_Fields: TypeAlias = list[tuple[str, Any]]

BUILT: Final = compilation.SOURCES / "built"
FLOAT32, BFLOAT16 = 0, 1


class Patch(Structure):
    """A weight that a squeezed unit cannot represent (`squeezed.h`)."""

    _fields_: ClassVar[_Fields] = [("step", c_int32), ("place", c_uint16), ("bits", c_uint16)]


class Matrix(Structure):
    """A packed matrix (n, k); n is the number of columns of a product.

    Squeezed matrices have `lists`. Matrices whose weights are in groups (`grouped.h`) have `bits`, and
    `values` if their numbers choose one.
    """

    _fields_: ClassVar[_Fields] = [
        *((name, c_void_p) for name in ("data", "lists", "patches")),
        *((name, c_int32) for name in ("n", "k", "bits", "parts", "has_minimums", "has_values")),
        ("factor", c_float),
        ("values", c_int8 * 16),
    ]


class Choice(Structure):
    """The choice of `chosen` of `count` experts by a router, and their weights (`experts.h`).

    `count` is 0 without experts. `bias` is float32, (count,), or null.
    """

    _fields_: ClassVar[_Fields] = [
        *((name, c_int32) for name in ("count", "chosen", "groups", "open_groups")),
        *((name, c_int32) for name in ("is_sigmoid", "normalises")),
        *((name, c_float) for name in ("least", "factor")),
        ("bias", c_void_p),
    ]


class Experts(Structure):
    """The matrices of all experts of a layer, one expert after the other, each from a whole unit on.

    A further row of the router is the gate of the layer's MLP if `gates_mlp`. From row `rest` on, if it is
    not 0, is what rounding took from the router's weights. Biases are float32 in the columns of their
    products, or null. With a `limit`, the activation is gpt-oss's.
    """

    _fields_: ClassVar[_Fields] = [
        *((name, Matrix) for name in ("router", "gate_up", "down")),
        *((name, c_void_p) for name in ("router_bias", "gate_up_bias", "down_bias")),
        *(("choice", Choice), ("gates_mlp", c_int32), ("rest", c_int32)),
        *((name, c_float) for name in ("limit", "slope")),
    ]


class Norms(Structure):
    """The weights of a layer's norms: of what attention and the MLP read, and of their results."""

    _fields_: ClassVar[_Fields] = [
        (name, c_void_p) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")
    ]


class Layer(Structure):
    """The weights of a decoder layer. Norms and biases are float32; absent ones are null or empty.

    `qkv` has the matrix of values, unless it has a form of its own: then that is `v`. `angles` is the number
    of the set of angles; negative if queries and keys have no positions.
    """

    _fields_: ClassVar[_Fields] = [
        *((name, Matrix) for name in ("qkv", "v", "o", "gate_up", "down")),
        *(("experts", Experts), ("norms", Norms)),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "sinks", "qkv_bias", "o_bias")),
        *((name, c_int32) for name in ("window", "angles")),
    ]


class Model(Structure):
    """The properties of a model that are the same in every step."""

    _fields_: ClassVar[_Fields] = [
        *(
            (name, c_int32)
            for name in ("dtype", "layers", "hidden", "heads", "kv_heads", "dim", "intermediate")
        ),
        *((name, c_int32) for name in ("activation", "norms_whole_heads", "turns_neighbours", "cell_bits")),
        *((name, c_float) for name in ("eps", "scaling", "softcap", "residual")),
        *(("layer", POINTER(Layer)), ("norm", c_void_p)),
    ]


class Step(Structure):
    """One step, in the buffers of `workers.kv_engine.step`."""

    _fields_: ClassVar[_Fields] = [
        *((name, c_int32) for name in ("tokens", "spans", "block_size", "table_stride", "turned")),
        *((name, c_void_p) for name in ("slots", "rows", "query_offsets", "kv_lengths")),
        *((name, c_void_p) for name in ("block_table", "cos", "sin", "keys", "values", "hidden")),
        *((name, c_void_p) for name in ("key_ends", "full_starts", "added_rows", "added")),
        *((name, c_int32) for name in ("added_stride", "added_layers")),
    ]


class Library:
    """A loaded library of kernels.

    Attributes:
        variant: the kind of processor that it was compiled for.
        is_allowed: whether the operating system lets this process use the instructions; AMX needs permission.
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
        self.grouped_bytes: Final = self._function("grouped_bytes", c_int64, POINTER(Matrix))
        self.pack_groups: Final = self._function(
            "pack_groups", None, pointer, POINTER(Matrix), *(pointer,) * 3, integer, c_int, integer
        )
        self.quantise: Final = self._function(
            "quantise", None, pointer, c_int, pointer, *(integer,) * 3, *(pointer,) * 3
        )
        self.dequantise: Final = self._function(
            "dequantise", None, pointer, c_int, *(pointer,) * 4, *(integer,) * 3, pointer
        )
        self.linear: Final = self._function(
            "linear", c_int, pointer, c_int, POINTER(Matrix), pointer, integer, pointer, c_int64
        )
        self.choose: Final = self._function(
            "choose", None, pointer, integer, POINTER(Choice), *(pointer,) * 2
        )
        self.body: Final = self._function("body", c_int, pointer, POINTER(Model), POINTER(Step))

    def _function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function: Any = getattr(self._c, f"dalsegno_{name}")
        function.restype, function.argtypes = result, arguments
        found: Callable[..., Any] = function
        return found


@cache
def load() -> Library | None:
    """Return the library for this processor, or None; the first call logs the reason."""
    for variant in compilation.variants_for(compilation.processor_flags()):
        try:
            library = Library(find_or_build(variant))
        except (BuildError, OSError) as error:
            _LOGGER.warning("the CPU kernels are not available, torch computes instead (slower): %s", error)
            return None
        if library.is_allowed:
            return library
        _LOGGER.info(
            "CPU kernels for %s: the operating system does not permit their instructions", variant.name
        )
    _LOGGER.info("there are no CPU kernels for this processor: torch computes")
    return None


def find_or_build(variant: Variant) -> Path:
    """Return the path of the library of a variant, compiled at installation or now.

    Raises:
        BuildError: it cannot be compiled.
        OSError: no folder is writable.
    """
    name = compilation.file_name(variant)
    if (path := BUILT / name).is_file():
        return path
    cache_folder = _cache_folder()
    if (path := cache_folder / name).is_file():
        return path
    _LOGGER.info("compiling the CPU kernels for %s: this takes some seconds, once", variant.name)
    try:
        return compilation.build(variant, BUILT)
    except OSError:  # installed by another user, or on a read-only file system
        return compilation.build(variant, cache_folder)


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "dalsegno" / "kernels"
    except RuntimeError as error:  # the user has no home directory
        raise BuildError(f"{error} (name a folder in XDG_CACHE_HOME)") from error
