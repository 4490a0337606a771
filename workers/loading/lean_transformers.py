"""transformers, imported without what no worker uses of it: a third of a worker's start (2026-11).

transformers marks some functions as not to be compiled, and knows tensors that are spread over processes.
For that it imports torch's compiler, distributed tensors and sympy: 900 modules, 1.1 s of CPU. So here

    torch._dynamo       is a stand-in, which gives the marks itself. It makes way for the real one as soon
                        as anybody asks it for something else: `torch.compile` works as ever.
    torch.distributed   is not there, as far as transformers is told; it knows such builds of torch. What
                        ranks compute together they do without its distributed tensors.
    transformers.models reads all files in its folder, for the names of their classes: 0.2 s more. The package
                        above it has done so just before; so it does it when it is asked for one.

Where transformers is imported already, nothing is done: it is faster, not different.
"""

import gc
import sys
from collections.abc import MutableSequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_COMPILER: Final = "torch._dynamo"
_GETITEM: Final = f"{_COMPILER}._trace_wrapped_higher_order_op"
"""What transformers' masks import from the compiler; they use it where a mask is made by torch's `vmap`."""


def import_transformers() -> None:
    """Import transformers, and of torch what it needs for a model.

    In the thread that is going to use it: it takes a second or two, and no other thread may import it then.
    """
    if "transformers" in sys.modules:
        return
    collects = gc.isenabled()
    gc.disable()  # what is imported stays: there is nothing to find in it
    try:
        _stand_in()
        utils: Any = import_module("transformers.utils")
        flags: Any = import_module("transformers.utils.import_utils")
        utils.is_torch_distributed_available = flags.is_torch_distributed_available = _no
        _name_models_later(flags)
        import_module("transformers.modeling_utils")
    finally:
        if collects:
            gc.enable()


def _no() -> bool:
    return False


def _name_models_later(flags: Any) -> None:
    """Import `transformers.models`; it finds the names of its classes when it is asked for one."""
    names_in = flags.define_import_structure
    flags.define_import_structure = lambda *_: {}
    try:
        models: Any = import_module("transformers.models")
    finally:
        flags.define_import_structure = names_in
    kind: Any = type(models)

    class Later(kind):  # type: ignore[misc] # a class that is known at run time
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            self.__class__ = kind
            kind.__init__(
                self, self.__name__, self.__file__, names_in(self.__file__), module_spec=self.__spec__
            )
            return getattr(self, name)

    models.__class__ = Later


# ---- the compiler's stand-in ---------------------------------------------------------------------------


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    """A mark for the compiler, as a decorator with or without arguments: there is no compiler to see it."""
    return _unmarked if function is None else function


class _StandIn(ModuleType):
    """In the place of `torch._dynamo`, until somebody asks for more than its marks."""

    __path__: MutableSequence[str] = []  # noqa: RUF012 - a package; `_Submodules` finds what is in it

    disable = allow_in_graph = assume_constant_result = staticmethod(_unmarked)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by who looks through all modules there are
            raise AttributeError(name)
        return getattr(_make_way(), name)


class _Submodules(MetaPathFinder, Loader):
    """Finds the submodules of the stand-in: by having the real package imported."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{_COMPILER}.") or not _is_in_place():
            return None
        _make_way()
        import_module(fullname)
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has run already."""


_SUBMODULES: Final = _Submodules()


def _stand_in() -> None:
    """Put the stand-in in its place, where the real one is not there yet."""
    torch = import_module("torch")
    if _COMPILER in sys.modules:
        return
    getitem = ModuleType(_GETITEM)
    getitem.TransformGetItemToIndex = _getitem_to_index  # type: ignore[attr-defined]
    sys.modules[_GETITEM] = getitem
    sys.modules[_COMPILER] = torch._dynamo = _StandIn(_COMPILER)  # type: ignore[attr-defined] # noqa: SLF001
    sys.meta_path.insert(0, _SUBMODULES)


def _is_in_place() -> bool:
    return isinstance(sys.modules.get(_COMPILER), _StandIn)


def _make_way() -> ModuleType:
    """The real `torch._dynamo`, from here on in its place."""
    if _is_in_place():
        sys.meta_path.remove(_SUBMODULES)
        del sys.modules[_COMPILER], sys.modules[_GETITEM], import_module("torch").__dict__["_dynamo"]
    return import_module(_COMPILER)


def _getitem_to_index() -> Any:
    """What `TransformGetItemToIndex()` gives."""
    _make_way()
    return import_module(_GETITEM).TransformGetItemToIndex()
