"""Import of transformers without the parts that no worker uses.

It saves a third of a worker's start (2026-11).
transformers marks functions that must not be compiled, and supports tensors that are distributed over
processes. For both it imports torch's compiler, distributed tensors and sympy: 900 modules, 1.1 s of CPU.
This module avoids them:

    torch._dynamo       A stub provides the marks. It is replaced by the real module at the first use of
                        any other attribute, so `torch.compile` works as usual.
    torch.distributed   transformers sees it as unavailable, which is a build of torch that it supports.
                        Tensor parallelism here does not use torch's distributed tensors.
    transformers.models It reads all files of its folder to collect class names, which takes 0.2 s more.
                        Here it does so when a class is first requested.

If transformers is already imported, nothing is done. Its behaviour is the same in both cases.
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
"""The part of the compiler that transformers' masks import. They use it for masks made by torch's `vmap`."""


def import_transformers() -> None:
    """Import transformers and the parts of torch that it needs for a model.

    Call it in the thread that will use transformers. It takes a second or two, and meanwhile no other thread
    may import transformers.
    """
    if "transformers" in sys.modules:
        return
    collects = gc.isenabled()
    gc.disable()  # imported modules stay: there is no garbage to collect
    try:
        _install_stub()
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
    """Import `transformers.models`; it collects its class names when a class is first requested."""
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


# ---- the compiler's stub -------------------------------------------------------------------------------


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    """A mark for the compiler without effect: a decorator with or without arguments."""
    return _unmarked if function is None else function


class _Stub(ModuleType):
    """Stands for `torch._dynamo` until an attribute other than its marks is used."""

    __path__: MutableSequence[str] = []  # noqa: RUF012 - a package; `_Submodules` finds its modules

    disable = allow_in_graph = assume_constant_result = staticmethod(_unmarked)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # from code that inspects all loaded modules
            raise AttributeError(name)
        return getattr(_real_module(), name)


class _Submodules(MetaPathFinder, Loader):
    """Finds the stub's submodules: it imports the real package."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{_COMPILER}.") or not _is_installed():
            return None
        _real_module()
        import_module(fullname)
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the module has already run."""


_SUBMODULES: Final = _Submodules()


def _install_stub() -> None:
    """Install the stub, unless the real module is already imported."""
    torch = import_module("torch")
    if _COMPILER in sys.modules:
        return
    getitem = ModuleType(_GETITEM)
    getitem.TransformGetItemToIndex = _getitem_to_index  # type: ignore[attr-defined]
    sys.modules[_GETITEM] = getitem
    sys.modules[_COMPILER] = torch._dynamo = _Stub(_COMPILER)  # type: ignore[attr-defined] # noqa: SLF001
    sys.meta_path.insert(0, _SUBMODULES)


def _is_installed() -> bool:
    return isinstance(sys.modules.get(_COMPILER), _Stub)


def _real_module() -> ModuleType:
    """The real `torch._dynamo`, which replaces the stub."""
    if _is_installed():
        sys.meta_path.remove(_SUBMODULES)
        del sys.modules[_COMPILER], sys.modules[_GETITEM], import_module("torch").__dict__["_dynamo"]
    return import_module(_COMPILER)


def _getitem_to_index() -> Any:
    """The real `TransformGetItemToIndex()`."""
    _real_module()
    return import_module(_GETITEM).TransformGetItemToIndex()
