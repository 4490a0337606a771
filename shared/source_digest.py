"""Digests of source code: of the definitions that are reachable from a root, and of nothing else.

    digest((Root("conductor.core.cluster", ("Cluster",)),))

The unit is a top-level statement of a module. A statement that is reached reaches every name that it
mentions: in its own module, and through imports (also inside of functions, and through re-exports) in other
modules. An import executes a module, so it also reaches the module's effects: every top-level statement that
is neither a definition, an assignment to names, nor an import, and every definition with a decorator of the
project's own.

When in doubt, more is reached: local names are not distinguished from global ones, and a module that is used
as a value is reached as a whole. Only the project's packages and those of the roots are followed. Sources are
parsed, never executed. Not found are modules whose name is computed at run time, and state that an unused
assignment changes by calling a function.
"""

import ast
import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.util import decode_source, find_spec, resolve_name
from pathlib import Path
from typing import Final, NamedTuple

from shared.errors import DalSegnoError

PROJECT: Final = frozenset({"conductor", "configs", "dalsegno", "gateway", "models", "shared", "workers"})
"""The project's top-level packages."""
_DYNAMIC: Final = frozenset({"__subclasses__", "eval", "exec", "globals", "modules", "vars"})
"""Names through which a statement may use anything in its module."""
_ALIASES: Final[dict[str, str]] = {}
"""Current paths of modules by their old ones, see `add_aliases`."""


class MissingSourceError(DalSegnoError):
    """A module is reached whose source cannot be read."""

    code = "missing_source"


class Root(NamedTuple):
    """A starting point: names of a module, or the whole module if `names` is None."""

    module: str
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Closure:
    """Everything that is reached.

    Attributes:
        statements: module and source text of each statement, sorted by module and line.
        foreign: the used imports of other packages, which are not followed.
        names: the functions and classes among the statements, as `module.name`.
    """

    statements: tuple[tuple[str, str], ...]
    foreign: tuple[str, ...]
    names: frozenset[str]

    @property
    def modules(self) -> frozenset[str]:
        """The modules with at least one reached statement."""
        return frozenset(module for module, _ in self.statements)

    @property
    def digest(self) -> str:
        """BLAKE2b over statements and foreign imports. Hex, 32 characters."""
        total = hashlib.blake2b("\0".join(self.foreign).encode(), digest_size=16)
        for module, text in self.statements:
            total.update(f"{module}\0{text}\0".encode())
        return total.hexdigest()


class _Import(NamedTuple):
    """A name bound by an import: a module, or its attribute `name`. Inside of `try` it may be missing."""

    module: str
    name: str | None
    is_optional: bool


@dataclass(eq=False, slots=True)
class _Statement:
    """A top-level statement. `uses` maps names to the attributes taken of them, "" for the name alone."""

    module: str
    line: int
    text: str
    binds: frozenset[str]
    name: str
    uses: dict[str, set[str]]
    imports: dict[str, list[_Import]]
    decorators: frozenset[str]


@dataclass(slots=True)
class _Module:
    """One parsed source file."""

    statements: list[_Statement] = field(default_factory=list)
    by_name: dict[str, list[_Statement]] = field(default_factory=dict)
    imports: dict[str, list[_Import]] = field(default_factory=dict)
    """By local name; `*` for star imports. Imports that are nested in `if` and `try` are included."""
    effects: list[_Statement] = field(default_factory=list)


class Sources:
    """The source files below a folder, or those of the installed packages."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._folders: dict[str, tuple[Path, ...]] = {}
        self._modules: dict[str, _Module] = {}

    def closure(self, roots: Collection[Root]) -> Closure:
        """Find everything that `roots` reach.

        Raises:
            MissingSourceError: a reached module has no readable source.
        """
        self._folders.clear()
        self._modules.clear()
        return _Search(self, PROJECT | {root.module.partition(".")[0] for root in roots}).closure(roots)

    def has(self, module: str) -> bool:
        """Tell whether there is such a module or package."""
        return self._path(module) is not None or bool(self._package_folders(module))

    def module(self, name: str) -> _Module:
        """Parse a module's source. A package without `__init__.py` is an empty module."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> _Module:
        path = self._path(name)
        if path is None:
            if self._package_folders(name):
                return _Module()
            raise MissingSourceError(
                f"the source of {name} is needed for a digest and was not found in "
                f"{self._root or 'the installed packages'}: install packages as plain folders, with sources"
            )
        try:
            source = decode_source(path.read_bytes())
            return _parsed(name, source, is_package=path.name == "__init__.py")
        except (OSError, SyntaxError, ValueError) as error:
            raise MissingSourceError(
                f"the source of {name} is needed for a digest, and {path} is not readable as Python: {error}"
            ) from error

    def _path(self, module: str) -> Path | None:
        package, _, name = module.rpartition(".")
        candidates = [folder / "__init__.py" for folder in self._package_folders(module)]
        candidates += [folder / f"{name}.py" for folder in self._package_folders(package)]
        return next((path for path in candidates if path.is_file()), None)

    def _package_folders(self, package: str) -> tuple[Path, ...]:
        """The folders that hold a package's modules; none for what is no package."""
        if package not in self._folders:
            above, _, name = package.rpartition(".")
            if not package:
                self._folders[package] = (self._root,) if self._root is not None else ()
            elif above or self._root is not None:
                found = (folder / name for folder in self._package_folders(above))
                self._folders[package] = tuple(folder for folder in found if folder.is_dir())
            else:
                spec = find_spec(package)  # of a top-level package: nothing is imported
                places = spec.submodule_search_locations if spec is not None else None
                self._folders[package] = tuple(Path(place) for place in places or () if Path(place).is_dir())
        return self._folders[package]


def add_aliases(aliases: Mapping[str, str]) -> None:
    """Add old paths of modules with the current ones, for an import hook that accepts old paths."""
    _ALIASES.update(aliases)


@cache
def digest(roots: tuple[Root, ...]) -> str:
    """The digest of everything that `roots` reach in the installed packages. Hex, 32 characters."""
    return _installed().closure(roots).digest


@cache
def _installed() -> Sources:
    return Sources()


class _Search:
    """One search from the roots to everything that they reach."""

    def __init__(self, sources: Sources, packages: Collection[str]) -> None:
        self._sources = sources
        self._packages = packages
        self._reached: set[_Statement] = set()
        self._waiting: list[_Statement] = []
        self._executed: set[str] = set()
        self._seen: set[tuple[str, str]] = set()
        self._foreign: set[str] = set()

    def closure(self, roots: Collection[Root]) -> Closure:
        for root in roots:
            for name in root.names or ():
                self._reach(root.module, name)
            if root.names is None:
                self._reach_statements(self._execute(root.module).statements)
        while self._waiting:
            self._follow(self._waiting.pop())
        found = sorted(self._reached, key=lambda one: (one.module, one.line))
        return Closure(
            statements=tuple((one.module, one.text) for one in found),
            foreign=tuple(sorted(self._foreign)),
            names=frozenset(f"{one.module}.{one.name}" for one in found if one.name),
        )

    def _reach_statements(self, statements: Collection[_Statement]) -> None:
        new = [one for one in statements if one not in self._reached]
        self._reached.update(new)
        self._waiting += new

    def _reach(self, module: str, name: str) -> None:
        """Reach what the attribute `name` of `module` is; the whole module for an empty name."""
        if (module, name) in self._seen or not self._is_followed(module):
            return
        self._seen.add((module, name))
        source = self._execute(module)
        if not name:
            self._reach_statements(source.statements)
            return
        self._reach_statements(source.by_name.get(name, ()))
        for one in source.imports.get(name, ()):
            self._reach_import(one, "")
        if name not in source.by_name and name not in source.imports:
            if self._sources.has(f"{module}.{name}"):
                self._reach(f"{module}.{name}", "")
            elif "__getattr__" in source.by_name:
                self._reach(module, "")
            for star in source.imports.get("*", ()):
                if self._is_there(star):
                    self._reach(star.module, name)

    def _reach_import(self, one: _Import, attribute: str) -> None:
        """Reach what an import binds, or one attribute of it."""
        if not self._is_there(one):
            self._foreign.add(f"{one.module} {one.name}")
            return
        self._execute(one.module)
        inner = f"{one.module}.{one.name}"
        if one.name is None:
            self._reach(one.module, attribute)
        elif self._is_submodule(one):
            self._reach(inner, attribute)
        else:
            self._reach(one.module, one.name)

    def _follow(self, statement: _Statement) -> None:
        """Reach every name that a statement mentions."""
        source = self._sources.module(statement.module)
        for name, attributes in statement.uses.items():
            for one in (*statement.imports.get(name, ()), *source.imports.get(name, ())):
                for attribute in attributes:
                    self._reach_import(one, attribute)
            if name in source.by_name or "*" in source.imports:
                self._reach(statement.module, name)
            if name in _DYNAMIC or not attributes.isdisjoint(_DYNAMIC):
                self._reach(statement.module, "")

    def _execute(self, module: str) -> _Module:
        """Reach the effects of importing a module, of its packages, and of the modules that it imports."""
        source = self._sources.module(module)
        if module in self._executed:
            return source
        self._executed.add(module)
        if above := module.rpartition(".")[0]:
            self._execute(above)
        self._reach_statements(source.effects)
        for statement in source.statements:
            if any(self._is_ours(source, name) for name in statement.decorators):
                self._reach_statements((statement,))
        for one in (one for bound in source.imports.values() for one in bound if self._is_there(one)):
            self._execute(one.module)
            if self._is_submodule(one):
                self._execute(f"{one.module}.{one.name}")
        return source

    def _is_submodule(self, one: _Import) -> bool:
        """Tell whether `from module import name` imports a module: one that the package does not redefine."""
        if one.name is None or not self._sources.has(f"{one.module}.{one.name}"):
            return False
        package = self._sources.module(one.module)
        inner = (one.module, f"{one.module}.{one.name}")
        others = [each for each in package.imports.get(one.name, ()) if each.module not in inner or each.name]
        return one.name not in package.by_name and not others

    def _is_ours(self, source: _Module, name: str) -> bool:
        return name in source.by_name or any(map(self._is_there, source.imports.get(name, ())))

    def _is_followed(self, module: str) -> bool:
        return module.partition(".")[0] in self._packages

    def _is_there(self, one: _Import) -> bool:
        return self._is_followed(one.module) and (not one.is_optional or self._sources.has(one.module))


# ---- parsing -----------------------------------------------------------------------------------------
@lru_cache(maxsize=256)
def _parsed(name: str, source: str, *, is_package: bool) -> _Module:
    """Take a module apart into its top-level statements."""
    package = name if is_package else name.rpartition(".")[0]
    lines = source.splitlines(keepends=True)
    module = _Module()
    for node in ast.parse(source).body:
        if _is_inert(node):
            continue
        nodes = _nodes_in(node)
        imports = _imports_in(nodes, package)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for local, bound in imports.items():
                module.imports.setdefault(local, []).extend(bound)
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(one.lineno for one in decorators)])
        statement = _Statement(
            module=name,
            line=first,
            text="".join(lines[first - 1 : node.end_lineno]).rstrip(),
            binds=_bound_by(node, nodes),
            name=getattr(node, "name", ""),
            uses=_uses_in(nodes),
            imports=imports,
            decorators=frozenset(
                one.id for each in decorators for one in ast.walk(each) if isinstance(one, ast.Name)
            ),
        )
        module.statements.append(statement)
        for bound_name in statement.binds:
            module.by_name.setdefault(bound_name, []).append(statement)
        if not (statement.binds and _only_binds(node)):
            module.effects.append(statement)
    return module


def _is_inert(node: ast.stmt) -> bool:
    """Tell whether an import skips the statement: a docstring, `if TYPE_CHECKING:`, the script part."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if not isinstance(node, ast.If) or node.orelse:
        return False
    return any(one in ast.unparse(node.test) for one in ("TYPE_CHECKING", "__name__ == '__main__'"))


def _only_binds(node: ast.stmt) -> bool:
    """Tell whether a statement does nothing but bind names. A class body may do more."""
    if isinstance(node, ast.ClassDef):
        return all(isinstance(one, ast.Pass) or _is_inert(one) or _only_binds(one) for one in node.body)
    return isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign | ast.AugAssign
    )


def _bound_by(node: ast.stmt, nodes: Collection[ast.AST]) -> frozenset[str]:
    """The module's names that a statement sets, also by `name.attribute = ...` and `name[key] = ...`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        declared = (one.names for one in nodes if type(one) is ast.Global)
        return frozenset((node.name, *(name for names in declared for name in names)))
    if isinstance(node, ast.Expr):
        return frozenset()
    defined = {one.name for one in nodes if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    return frozenset(
        defined | {one.id for one in nodes if type(one) is ast.Name and isinstance(one.ctx, ast.Store)}
    )


def _nodes_in(node: ast.AST) -> list[ast.AST]:
    """A node and all nodes in it, outer before inner; in half the time of `ast.walk`."""
    nodes = [node]
    for one in nodes:  # grows while it is read
        for name in one._fields:
            if name == "ctx":
                continue
            value = getattr(one, name, None)
            if type(value) is list:
                nodes += [inner for inner in value if isinstance(inner, ast.AST)]
            elif isinstance(value, ast.AST):
                nodes.append(value)
    return nodes


def _uses_in(nodes: Iterable[ast.AST]) -> dict[str, set[str]]:
    """Every name in a statement, with the attributes taken of it. Strings in annotations count as code."""
    uses: dict[str, set[str]] = {}
    with_attribute: set[ast.AST] = set()
    for one in nodes:
        if type(one) is ast.Attribute:
            if type(one.value) is ast.Name:
                uses.setdefault(one.value.id, set()).add(one.attr)
                with_attribute.add(one.value)
        elif type(one) is ast.Name:
            if one not in with_attribute:
                uses.setdefault(one.id, set()).add("")
        elif isinstance(one, ast.arg | ast.AnnAssign | ast.FunctionDef | ast.AsyncFunctionDef):
            for annotation in (getattr(one, "annotation", None), getattr(one, "returns", None)):
                for name, attributes in _uses_in(_quoted_in(annotation)).items():
                    uses.setdefault(name, set()).update(attributes)
    return uses


def _quoted_in(annotation: ast.expr | None) -> list[ast.AST]:
    """The code in the strings of an annotation."""
    quoted: list[ast.AST] = []
    for one in ast.walk(annotation) if annotation is not None else ():
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            try:
                quoted += ast.walk(ast.parse(one.value, mode="eval"))
            except SyntaxError:  # a literal, not a type
                continue
    return quoted


def _imports_in(nodes: Iterable[ast.AST], package: str) -> dict[str, list[_Import]]:
    """The imports in a statement by local name: `*` for stars, empty for a statement that binds no name."""
    imports: dict[str, list[_Import]] = {}
    optional: set[int] = set()
    for one in nodes:
        bound: list[tuple[str, str, str | None]] = []
        if type(one) is ast.Import:
            for alias in one.names:
                local = alias.asname or alias.name.partition(".")[0]
                bound += [(local, alias.name if alias.asname else local, None), ("", alias.name, None)]
        elif type(one) is ast.ImportFrom:
            origin = resolve_name("." * one.level + (one.module or ""), package)
            for alias in one.names:
                name = None if alias.name == "*" else alias.name
                bound.append((alias.asname or alias.name, origin, name))
        elif type(one) is ast.Try:
            optional.update(map(id, _nodes_in(one)))
        elif type(one) is ast.Call:
            called = getattr(one.func, "id", getattr(one.func, "attr", ""))
            literals = [arg.value for arg in one.args[:1] if isinstance(arg, ast.Constant)]
            bound += [("import_module", str(name), None) for name in literals if called == "import_module"]
        for local, found, attribute in bound:
            module, name = _current(found, attribute)
            imports.setdefault(local, []).append(_Import(module, name, id(one) in optional))
    return imports


def _current(module: str, name: str | None) -> tuple[str, str | None]:
    """An import as it reads with the current paths of modules."""
    if moved := _ALIASES.get(f"{module}.{name}"):
        package, _, name = moved.rpartition(".")
        return package, name
    return _ALIASES.get(module, module), name
